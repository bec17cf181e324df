//! Completion at a shell's prompt: `tombolo completions SHELL` prints a script that runs this program with
//! `$_TOMBOLO_COMPLETE` and the words typed so far, and the program answers with what fits there.
//!
//! Commands, flags and paths come from the definition of the flags. This file adds the names of things: fabrics, networks,
//! machines, ports, links and services. They come from the running fabric, or from the fabric's file if it does not run.
//!
//! - Completion never waits longer than [`LIMIT`] for names, whatever the daemon, a file or a file system does. Each
//!   question is asked in a separate thread, which ends with the process.
//! - What is not a plain name is not offered, since shells would take it apart and terminals would interpret it.
//! - Completion never fails: without an answer there is nothing to offer.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use clap::CommandFactory;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter};
use clap_complete::env::{CompleteEnv, Shells};
use tombolo_host::api::client::Client;
use tombolo_host::api::report::Status;
use tombolo_host::{config, file, rundir};
use tombolo_rpc::folder;

use crate::Cli;
use crate::ls;
use crate::select::{DEFAULT_FILE, Select};
use crate::set::all_paths;

/// The variable with the shell's name, in the environment of a question.
const VARIABLE: &str = "_TOMBOLO_COMPLETE";
/// How long all names together may take. A daemon under load answers within 20 ms.
const LIMIT: Duration = Duration::from_millis(700);
/// What is read of a fabric file at most, in bytes.
const FILE_LIMIT_BYTES: u64 = 1 << 20;
/// Names offered at most.
const NAMES_LIMIT: usize = 4096;

/// What a word of the command line names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Fabric,
    Network,
    Machine,
    /// A machine of a file for several.
    Host,
    Port,
    Link,
    Service,
    /// An app or a machine, to run.
    Runnable,
    /// A machine, or "daemon".
    Log,
    /// Whatever events are about.
    Subject,
    /// What `--for` asks for.
    Awaited,
    /// A key or section of the configuration that runs.
    Key,
}

/// Command, argument, and what the argument names.
const NAMES: &[(&str, &str, What)] = &[
    ("", "fabric", What::Fabric),
    ("up", "machine", What::Host),
    ("check", "machine", What::Host),
    ("apply", "machine", What::Host),
    ("down", "machine", What::Host),
    ("span settings", "machine", What::Host),
    ("events", "names", What::Subject),
    ("logs", "members", What::Log),
    ("wait", "name", What::Awaited),
    ("exec", "machine", What::Machine),
    ("unset", "keys", What::Key),
    ("port add", "network", What::Network),
    ("port set", "name", What::Port),
    ("port del", "name", What::Port),
    ("port stats", "name", What::Port),
    ("forward add", "network", What::Network),
    ("rule add", "network", What::Network),
    ("table mac", "network", What::Network),
    ("table neighbours", "network", What::Network),
    ("capture", "port", What::Port),
    ("capture", "network", What::Network),
    ("cell run", "what", What::Runnable),
    ("cell run", "network", What::Network),
    ("cell console", "name", What::Machine),
    ("cell stop", "names", What::Machine),
    ("cell restart", "names", What::Machine),
    ("service stats", "name", What::Service),
    ("service slow", "name", What::Service),
    ("service watch", "name", What::Service),
    ("service bridge", "link", What::Link),
    ("service bridge", "to", What::Service),
    ("service export", "services", What::Service),
    ("call", "name", What::Service),
];

/// Answers a question of a shell and ends the process, if this is one.
pub(crate) fn answer() {
    CompleteEnv::with_factory(|| with_names(Cli::command())).var(VARIABLE).complete();
}

/// The script that has `shell` ask this program.
pub(crate) fn script(shell: &str) -> io::Result<String> {
    let shells = Shells::builtins();
    let known = shells.completer(shell).ok_or_else(|| io::Error::other(format!("no completion for {shell}")))?;
    let mut text = Vec::new();
    known.write_registration(VARIABLE, "tombolo", "tombolo", "tombolo", &mut text)?;
    let mut text = String::from_utf8_lossy(&text).trim().to_string() + "\n";
    if shell == "zsh" {
        // A file of fpath is run at the first completion, which it has to answer too.
        text += "\nif [ \"$funcstack[1]\" = _tombolo ]; then\n    _clap_dynamic_completer_tombolo \"$@\"\nfi\n";
    }
    Ok(text)
}

/// The command with what completes the names.
fn with_names(command: clap::Command) -> clap::Command {
    NAMES.iter().fold(command, |command, (path, argument, what)| {
        let words: Vec<_> = path.split(' ').filter(|w| !w.is_empty()).collect();
        at(command, &words, argument, *what)
    })
}

fn at(command: clap::Command, path: &[&str], argument: &str, what: What) -> clap::Command {
    match path {
        // All are passed through, so that positional arguments keep their order.
        [] => command.mut_args(|a| match a.get_id() == argument {
            true => a.add(ArgValueCompleter::new(move |typed: &OsStr| fitting(what, typed))),
            false => a,
        }),
        [first, rest @ ..] => command.mut_subcommand(first, |sub| at(sub, rest, argument, what)),
    }
}

/// A name and, for shells that show it, what it is.
type Name = (String, String);

fn fitting(what: What, typed: &OsStr) -> Vec<CompletionCandidate> {
    let asked: Vec<OsString> = std::env::args_os().skip_while(|word| word != "--").skip(1).collect();
    let mut out: Vec<_> = offered(names(what, &asked), typed)
        .into_iter()
        .map(|(name, about)| CompletionCandidate::new(name).help(Some(about.into())))
        .collect();
    // An app may also be the path of an image.
    if what == What::Runnable && typed.to_string_lossy().contains('/') {
        out.extend(PathCompleter::any().complete(typed));
    }
    out
}

/// Of the names those that begin as typed and that every shell takes as one word.
fn offered(mut names: Vec<Name>, typed: &OsStr) -> Vec<Name> {
    let Some(typed) = typed.to_str() else { return vec![] };
    let is_plain = |name: &str| {
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
    };
    names.retain(|(name, _)| name.starts_with(typed) && is_plain(name));
    names.sort();
    names.dedup_by(|a, b| a.0 == b.0);
    names.truncate(NAMES_LIMIT);
    names
}

fn names(what: What, asked: &[OsString]) -> Vec<Name> {
    match what {
        What::Fabric => soon(|| rundir::runtime_root().map_or_else(|_| vec![], |root| fabrics(&root))),
        What::Service => soon(|| services().unwrap_or_default()),
        What::Network => known(asked).networks,
        What::Machine => known(asked).machines,
        What::Host => {
            let file = file_of(asked);
            soon(move || hosts(&file))
        }
        What::Port => known(asked).ports,
        What::Link => known(asked).links,
        What::Log => with(known(asked).machines, &[("daemon", "the daemon's own log")]),
        What::Subject => {
            let known = known(asked);
            [known.machines, known.ports, known.links].concat()
        }
        What::Runnable => {
            let apps = soon(|| file::apps().into_iter().map(|app| (app, "app".into())).collect());
            [known(asked).machines, apps].concat()
        }
        What::Key => {
            let select = selected(asked);
            soon(move || keys(&select).unwrap_or_default())
        }
        What::Awaited => match value_of(asked, &["--for"]).as_deref().and_then(OsStr::to_str) {
            Some("service") => names(What::Service, asked),
            Some("port") => names(What::Port, asked),
            _ => names(What::Machine, asked),
        },
    }
}

fn with(mut names: Vec<Name>, more: &[(&str, &str)]) -> Vec<Name> {
    names.extend(more.iter().map(|(name, about)| (name.to_string(), about.to_string())));
    names
}

fn fabrics(root: &Path) -> Vec<Name> {
    let about = |runs| if runs { "runs" } else { "does not run" };
    ls::names(root).into_iter().map(|(name, runs)| (name, about(runs).into())).collect()
}

/// The file that the words of the command line name, with `--file` or without.
fn file_of(words: &[OsString]) -> PathBuf {
    let alone =
        || words.iter().skip(1).find(|word| Path::new(word).extension().is_some_and(|end| end == "toml")).cloned();
    value_of(words, &["--file", "-f"]).or_else(alone).map_or_else(|| DEFAULT_FILE.into(), Into::into)
}

/// The machines of a file for several.
fn hosts(file: &Path) -> Vec<Name> {
    let names = read(file).map(|text| file::names(&text)).unwrap_or_default();
    names
        .into_iter()
        .filter(|(word, _)| *word == "machine")
        .map(|(_, name)| (name, "machine of the file".into()))
        .collect()
}

fn services() -> Option<Vec<Name>> {
    Some(folder::list(&folder::services().ok()?).into_iter().map(|name| (name, "service".into())).collect())
}

/// What `find` gives, or nothing if that takes too long.
fn soon(find: impl FnOnce() -> Vec<Name> + Send + 'static) -> Vec<Name> {
    asked(find).recv_timeout(LIMIT).unwrap_or_default()
}

/// Asks in a separate thread, which nothing waits for.
fn asked<T: Send + 'static>(find: impl FnOnce() -> T + Send + 'static) -> Receiver<T> {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(find()));
    told
}

/// The named parts of a fabric.
#[derive(Debug, Default, PartialEq, Eq)]
struct Known {
    networks: Vec<Name>,
    machines: Vec<Name>,
    ports: Vec<Name>,
    links: Vec<Name>,
}

impl Known {
    fn of_status(status: &Status) -> Known {
        Known {
            networks: status.networks.iter().map(|n| (n.name.clone(), "network".into())).collect(),
            machines: status.machines.iter().map(|m| (m.name.clone(), format!("{}, {}", m.kind, m.state))).collect(),
            ports: status
                .ports
                .iter()
                .map(|p| (p.name.clone(), format!("{} on {}, {}", p.kind, p.network, if p.up { "up" } else { "down" })))
                .collect(),
            links: status.links.iter().map(|l| (l.name.clone(), "link".into())).collect(),
        }
    }

    /// As the file says; a machine's port is named as the machine is.
    fn of_file(text: &str) -> Known {
        let mut known = Known::default();
        for (word, name) in file::names(text) {
            let entry = (name, word.to_string());
            match word {
                "network" => known.networks.push(entry),
                "machine" => {}
                "link" => known.links.push(entry),
                "cell" | "vm" => {
                    known.ports.push(entry.clone());
                    known.machines.push(entry);
                }
                _ => known.ports.push(entry),
            }
        }
        known
    }
}

/// The parts of the fabric that the words select: as it runs, or else as its file says.
fn known(words: &[OsString]) -> Known {
    let until = Instant::now() + LIMIT;
    let selects = || (selected(words), selected(words));
    let (here, there) = selects();
    let running = asked(move || running(&here));
    let written = asked(move || written(&there));
    match running.recv_timeout(until - Instant::now()) {
        Ok(Some(known)) => known,
        _ => written.recv_timeout(until.saturating_duration_since(Instant::now())).ok().flatten().unwrap_or_default(),
    }
}

fn running(select: &Select) -> Option<Known> {
    let root = rundir::runtime_root().ok()?;
    let name = select.name(&root).ok()?;
    let status = Client::new(&name, &rundir::api_socket(&root, &name)).ok()?.status().ok()?;
    Some(Known::of_status(&status))
}

/// The keys and sections of what runs, with their values.
fn keys(select: &Select) -> Option<Vec<Name>> {
    let root = rundir::runtime_root().ok()?;
    let name = select.name(&root).ok()?;
    let running = Client::new(&name, &rundir::api_socket(&root, &name)).ok()?.config().ok()?.config;
    let about = |path: &str| match config::at(&running, path) {
        Some(value) if !value.is_object() => config::inline(value),
        _ => "section".into(),
    };
    Some(all_paths(&running).into_iter().map(|path| (path.clone(), about(&path))).collect())
}

fn written(select: &Select) -> Option<Known> {
    let path = match (&select.fabric, &select.file) {
        (None, Some(file)) => file.clone(),
        (None, None) if Path::new(DEFAULT_FILE).exists() => DEFAULT_FILE.into(),
        _ => {
            let root = rundir::runtime_root().ok()?;
            rundir::read_owner(&root.join(select.name(&root).ok()?))?.file
        }
    };
    Some(Known::of_file(&read(&path)?))
}

/// The beginning of a fabric file.
fn read(path: &Path) -> Option<String> {
    let mut text = Vec::new();
    std::fs::File::open(path).ok()?.take(FILE_LIMIT_BYTES).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// The fabric that the words of the command line select, as clap would.
fn selected(words: &[OsString]) -> Select {
    let text = |word: OsString| word.into_string().ok().filter(|text| !text.is_empty());
    let file = value_of(words, &["--file", "-f"]).filter(|file| !file.is_empty());
    let fabric = value_of(words, &["--fabric"]).and_then(text);
    let fabric = fabric.or_else(|| std::env::var("TOMBOLO_FABRIC").ok().filter(|f| !f.is_empty() && file.is_none()));
    Select { fabric, file: file.map(Into::into) }
}

/// The value of a flag in the words: the next word, or what follows a `=`.
fn value_of(words: &[OsString], flags: &[&str]) -> Option<OsString> {
    words.iter().enumerate().find_map(|(i, word)| {
        if flags.iter().any(|flag| word == flag) {
            return words.get(i + 1).cloned();
        }
        let (flag, value) = word.to_str()?.split_once('=')?;
        flags.contains(&flag).then(|| value.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    /// Every argument of every command, as (command, argument, name of the value).
    fn arguments(command: &clap::Command, path: &str, out: &mut Vec<(String, String, String)>) {
        for argument in command.get_arguments().filter(|a| a.get_num_args().is_none_or(|n| n.takes_values())) {
            let value = argument.get_value_names().map(|v| v[0].to_string()).unwrap_or_default();
            out.push((path.to_string(), argument.get_id().to_string(), value));
        }
        for sub in command.get_subcommands().filter(|s| !s.is_hide_set()) {
            arguments(sub, format!("{path} {}", sub.get_name()).trim(), out);
        }
    }

    #[test]
    fn every_argument_that_names_something_is_completed() {
        with_names(Cli::command()).debug_assert();
        let mut all = vec![];
        arguments(&Cli::command(), "", &mut all);
        for (path, argument, _) in NAMES {
            assert!(all.iter().any(|(p, a, _)| (p.as_str(), a.as_str()) == (*path, *argument)), "{path} {argument}");
        }
        // Names that are given to something new.
        let new =
            [("port add", "name"), ("cell run", "name"), ("service bridge", "service"), ("service import", "name")];
        for (path, argument, value) in &all {
            let names = ["NAME", "MEMBER", "LINK", "NETWORK"].contains(&value.as_str()) && !argument.ends_with("netns");
            let known = NAMES.iter().any(|(p, a, _)| (p, a) == (&path.as_str(), &argument.as_str()));
            let is_new = new.contains(&(path, argument));
            assert_eq!(names && !is_new, known && names, "{path} {argument} <{value}>: add it to NAMES");
        }
    }

    #[test]
    fn the_machines_of_the_named_file_are_offered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("all.toml");
        std::fs::write(&path, "[machine.node-1]\naddress = 7\n[machine.node-2]\n[cell.web]\n[").unwrap();
        for line in [format!("tombolo up {} --machine", path.display()), format!("tombolo down -f {}", path.display())]
        {
            let found: Vec<_> = names(What::Host, &words(&line)).into_iter().map(|(name, _)| name).collect();
            assert_eq!(found, ["node-1", "node-2"], "{line}");
        }
    }

    #[test]
    fn the_fabric_is_selected_as_by_the_command() {
        let select = |line: &str| {
            let select = selected(&words(line));
            (select.fabric, select.file.map(|f| f.display().to_string()))
        };
        assert_eq!(select("tombolo cell stop --fabric demo x").0.as_deref(), Some("demo"));
        assert_eq!(select("tombolo --fabric=demo cell stop").0.as_deref(), Some("demo"));
        assert_eq!(select("tombolo -f a.toml cell stop").1.as_deref(), Some("a.toml"));
        assert_eq!(select("tombolo cell stop --file=b.toml").1.as_deref(), Some("b.toml"));
        assert_eq!(value_of(&words("tombolo wait --for"), &["--for"]), None);
    }

    #[test]
    fn only_plain_names_that_begin_as_typed_are_offered() {
        let names = ["web", "web2", "db", "we b", "we;b", "we\u{1b}[2J", "", "web"];
        let names = || names.map(|name| (name.to_string(), String::new())).to_vec();
        let offered = |typed: &str| offered(names(), OsStr::new(typed)).into_iter().map(|n| n.0).collect::<Vec<_>>();
        assert_eq!(offered("we"), ["web", "web2"]);
        assert_eq!(offered(""), ["db", "web", "web2"]);
        let many = (0..NAMES_LIMIT + 7).map(|n| (format!("n{n}"), String::new())).collect();
        assert_eq!(super::offered(many, OsStr::new("")).len(), NAMES_LIMIT);
    }

    #[test]
    fn what_does_not_answer_is_not_waited_for() {
        let begun = Instant::now();
        assert_eq!(
            soon(|| loop {
                std::thread::park()
            }),
            []
        );
        assert!(begun.elapsed() >= LIMIT, "{:?}", begun.elapsed());
    }

    #[test]
    fn a_file_gives_the_names_of_a_fabric_that_does_not_run() {
        let known = Known::of_file("[network.lan]\n[cell.web]\n[vm.db]\n[tap.t]\n[link.l]\n");
        let names = |names: &[Name]| names.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>().join(" ");
        assert_eq!(names(&known.networks), "lan");
        assert_eq!(names(&known.machines), "web db");
        assert_eq!(names(&known.ports), "web db t");
        assert_eq!(names(&known.links), "l");
    }
}
