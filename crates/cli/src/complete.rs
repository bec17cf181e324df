//! Completion at a shell's prompt: `tombolo completions SHELL` prints a script that runs this
//! program with `$_TOMBOLO_COMPLETE` and the words typed so far, and the program answers with what
//! fits there.
//!
//! Commands, flags and paths come from the definition of the flags. This file adds the names of
//! things: fabrics, networks, machines, ports, links, services, groups, forwards, rules and keys
//! with their values. They come from the running fabric, or from the fabric's file if it does not
//! run.
//!
//! - Completion never waits longer than [`LIMIT`] for names, whatever the daemon, a file or a file
//!   system does. Each question is asked in a separate thread, which ends with the process.
//! - What is neither a plain name nor an address, key or value is not offered, since shells would
//!   take it apart and terminals would interpret it.
//! - Completion never fails: without an answer there is nothing to offer.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use clap::CommandFactory;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter};
use clap_complete::env::{CompleteEnv, Shells};
use serde_json::Value;
use tombolo_host::api::client::Client;
use tombolo_host::api::report::Status;
use tombolo_host::file::schema::{Key, SECTIONS};
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
    /// A key of a section that runs, and its value.
    Setting,
    /// A member and a port of it.
    Target,
    /// Where a forward listens.
    Forward,
    /// What a rule does.
    Action,
    /// A side of a rule.
    Who,
    /// A rule's protocol.
    Protocol,
    /// The number of a rule.
    Rule,
    /// The number of a rule that a new one comes before, or the next number.
    Place,
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
    ("wait", "names", What::Awaited),
    ("exec", "machine", What::Machine),
    ("set", "settings", What::Setting),
    ("unset", "keys", What::Key),
    ("port add", "network", What::Network),
    ("port set", "name", What::Port),
    ("port del", "name", What::Port),
    ("port stats", "name", What::Port),
    ("forward add", "to", What::Target),
    ("forward add", "network", What::Network),
    ("forward rm", "listen", What::Forward),
    ("rule add", "action", What::Action),
    ("rule add", "from", What::Who),
    ("rule add", "to", What::Who),
    ("rule add", "protocol", What::Protocol),
    ("rule add", "network", What::Network),
    ("rule add", "at", What::Place),
    ("rule rm", "number", What::Rule),
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
    let edits = match shell {
        "bash" => BASH,
        "zsh" => ZSH,
        _ => &[],
    };
    for (theirs, ours) in edits {
        text = text.replacen(theirs, ours, 1);
    }
    if shell == "zsh" {
        // A file of fpath is run at the first completion, which it has to answer too.
        text += "\nif [ \"$funcstack[1]\" = _tombolo ]; then\n    _clap_dynamic_completer_tombolo \"$@\"\nfi\n";
    }
    Ok(text)
}

/// What the script for bash has in place of clap's. Bash breaks words at `:` and `=`, so that
/// `127.0.0.1:8080`, `web:80` and `--from=web` come as three. Those are one word for the program,
/// and of what it offers bash wants the last part only. The answer is not split as words are:
/// `[::1]:80` would be a pattern for names of files.
const BASH: &[(&str, &str)] = &[
    (
        r#"    local words=("${COMP_WORDS[@]}")
    if [[ "${BASH_VERSINFO[0]}" -ge 4 ]]; then
        words[COMP_CWORD]="$2"
    fi
"#,
        r#"    local words=() rest=$COMP_LINE last=" " cut="" each i
    for ((i = 0; i <= COMP_CWORD; i++)); do
        each=${COMP_WORDS[i]}
        # The cursor may be within the word, or behind a separator that bash takes for the word.
        [[ $i -lt $COMP_CWORD || ( -z $2 && $each == [:=]* ) ]] || each=$2
        if [[ $i -gt 0 && $rest != [[:space:]]* && ( $each == [:=]* || $last == *[:=] ) ]]; then
            cut=${words[${#words[@]} - 1]}
            words[${#words[@]} - 1]+=$each
        else
            cut="" words+=("$each")
        fi
        rest=${rest#"${rest%%[![:space:]]*}"}
        rest=${rest#"${COMP_WORDS[i]}"} last=$each
    done
    [[ -n $2 ]] || cut=${words[${#words[@]} - 1]}
    _CLAP_COMPLETE_INDEX=$((${#words[@]} - 1))
"#,
    ),
    ("    COMPREPLY=( $( \\\n", "    local reply\n    reply=$( \\\n"),
    (
        r"    ) )
    if [[ $? != 0 ]]; then
        unset COMPREPLY
",
        r#"    )
    local status=$?
    COMPREPLY=()
    [[ -z $reply ]] || IFS=$IFS read -r -d '' -a COMPREPLY < <(printf '%s\0' "$reply")
    if [[ $status != 0 ]]; then
        unset COMPREPLY
    elif [[ -n $cut ]]; then
        COMPREPLY=("${COMPREPLY[@]#"$cut"}")
        [[ "${COMPREPLY-}" != *[=/:] ]] || compopt -o nospace 2>/dev/null
"#,
    ),
];

/// And that for zsh: no space comes after a `:` or `=` that more has to follow.
const ZSH: &[(&str, &str)] = &[
    ("        local -a other=()\n", "        local -a other=() open=()\n"),
    (
        "            else\n                other+=(\"$completion\")\n",
        r#"            elif [[ "$completion" =~ '^[^:]*(=|\\:)(:|$)' ]]; then
                open+=("$completion")
            else
                other+=("$completion")
"#,
    ),
    ("        [[ -n $other ]]", "        [[ -n $open ]] && _describe -V 'values' open -S ''\n        [[ -n $other ]]"),
];

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
    let found = match what {
        What::Setting => settings(&asked, &typed.to_string_lossy()),
        _ => names(what, &asked),
    };
    let mut out: Vec<_> = offered(found, typed)
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
        let is_fit = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-' | b':' | b'=' | b'[' | b']');
        name.bytes().all(is_fit) && name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '[')
    };
    names.retain(|(name, _)| name.starts_with(typed) && is_plain(name));
    names.sort_by(|a, b| number(&a.0).cmp(&number(&b.0)).then_with(|| a.cmp(b)));
    names.dedup_by(|a, b| a.0 == b.0);
    // What is said of them may be of a file that anyone wrote.
    names.iter_mut().for_each(|(_, about)| *about = about.replace(char::is_control, " "));
    names.truncate(NAMES_LIMIT);
    names
}

/// Numbers are in their own order, before names.
fn number(name: &str) -> usize {
    name.parse().unwrap_or(usize::MAX)
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
        What::Setting => settings(asked, ""),
        What::Target => Content::asked(asked).members().map(|(name, word)| (format!("{name}:"), word)).collect(),
        What::Forward => Content::asked(asked).forwards(proto(asked)),
        What::Action => values("rule", "action"),
        What::Protocol => values("rule", "protocol"),
        What::Who => Content::asked(asked).sides(),
        What::Rule => Content::asked(asked).rules(),
        What::Place => {
            let mut places = Content::asked(asked).rules();
            places.push(((places.len() + 1).to_string(), "behind all".into()));
            places
        }
    }
}

/// The transport that the words of the command line name.
fn proto(asked: &[OsString]) -> String {
    value_of(asked, &["--proto"]).and_then(|word| word.into_string().ok()).unwrap_or_else(|| "tcp".into())
}

/// A key of a kind of section.
fn key(section: &str, name: &str) -> Option<&'static Key> {
    SECTIONS.iter().find(|s| s.name == section)?.keys().find(|key| key.name == name)
}

/// The words that a key may have as its value: those in quotes of what it expects, and true and
/// false.
fn values(section: &str, name: &str) -> Vec<Name> {
    let Some(key) = key(section, name) else { return vec![] };
    let is_word = |word: &str| word.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
    let quoted = key.expects.split('"').skip(1).step_by(2);
    let truth = ["true", "false"].into_iter().filter(|word| key.expects.split([' ', ',']).any(|w| w == *word));
    // A list of words is not a word.
    let all = quoted.chain(truth).filter(|word| is_word(word) && !key.expects.starts_with("a list of"));
    all.map(|word| (word.to_string(), String::new())).collect()
}

/// What `set` takes: the keys of the sections that run, each with `=`, and behind that its words.
fn settings(asked: &[OsString], typed: &str) -> Vec<Name> {
    if let Some((path, _)) = typed.split_once('=') {
        let section = path.split('.').next().unwrap_or_default();
        let name = path.rsplit('.').next().unwrap_or_default();
        return values(section, name).into_iter().map(|(word, about)| (format!("{path}={word}"), about)).collect();
    }
    let content = Content::asked(asked);
    let sections =
        content.sections().filter_map(|(word, path)| Some((SECTIONS.iter().find(|s| s.name == word)?, path)));
    sections
        .flat_map(|(s, path)| s.keys().map(move |key| (format!("{path}.{}=", key.name), key.expects.into())))
        .collect()
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
    // Without a thread nothing is found.
    let _ = std::thread::Builder::new().spawn(move || tell.send(find()));
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

/// What is in the fabric file that would say what runs, or in the file itself.
#[derive(Debug, Default)]
struct Content {
    text: String,
    /// Nothing where the text has faults.
    root: Value,
}

impl Content {
    fn of(text: String) -> Content {
        let root = config::Document::read(&text).map(|document| document.root).unwrap_or_default();
        Content { text, root }
    }

    fn asked(words: &[OsString]) -> Content {
        let running = |select: &Select| Some(client(select)?.config().ok()?.toml);
        Content::of(first(words, running, written).unwrap_or_default())
    }

    /// Members of networks, with the words of their sections.
    fn members(&self) -> impl Iterator<Item = Name> {
        let members = ["cell", "vm", "tap", "port"];
        file::names(&self.text)
            .into_iter()
            .filter(move |(word, _)| members.contains(word))
            .map(|(word, name)| (name, word.into()))
    }

    /// Each section with a name: the word and the path of its keys.
    fn sections(&self) -> impl Iterator<Item = (&str, String)> {
        let words = self.root.as_object().into_iter().flatten();
        words.flat_map(|(word, sections)| {
            let names = sections.as_object().into_iter().flatten().filter(|(_, section)| section.is_object());
            names.map(move |(name, _)| (word.as_str(), format!("{word}.{name}")))
        })
    }

    fn list(&self, word: &str) -> impl Iterator<Item = &Value> {
        self.root.get(word).and_then(Value::as_array).into_iter().flatten()
    }

    /// Who may be a side of a rule: members, their groups, and outside.
    fn sides(&self) -> Vec<Name> {
        let sections = self.sections().filter_map(|(_, path)| config::at(&self.root, &format!("{path}.groups")));
        let groups = sections.flat_map(|value| match value {
            Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
            one => one.as_str().into_iter().collect::<Vec<_>>(),
        });
        let groups: Vec<_> = groups.map(|group| (group.to_string(), "group".to_string())).collect();
        with(self.members().chain(groups).collect(), &[(file::OUTSIDE, "the network's uplink")])
    }

    /// Where the forwards of a transport listen, with what they lead to.
    fn forwards(&self, proto: String) -> Vec<Name> {
        let text = |forward: &Value, key: &str| forward.get(key).and_then(Value::as_str).map(String::from);
        self.list("forward")
            .filter(|forward| text(forward, "proto").unwrap_or_else(|| "tcp".into()) == proto)
            .filter_map(|forward| Some((text(forward, "listen")?, format!("to {}", text(forward, "to")?))))
            .collect()
    }

    /// The numbers of the rules, with their content.
    fn rules(&self) -> Vec<Name> {
        (1..).zip(self.list("rule")).map(|(n, rule): (usize, _)| (n.to_string(), config::inline(rule))).collect()
    }
}

/// What the running fabric that the words select says, or else what its file says.
fn first<T: Send + 'static>(
    words: &[OsString],
    running: impl FnOnce(&Select) -> Option<T> + Send + 'static,
    written: impl FnOnce(&Select) -> Option<T> + Send + 'static,
) -> Option<T> {
    let until = Instant::now() + LIMIT;
    let (here, there) = (selected(words), selected(words));
    let (running, written) = (asked(move || running(&here)), asked(move || written(&there)));
    match running.recv_timeout(until - Instant::now()) {
        Ok(Some(found)) => Some(found),
        _ => written.recv_timeout(until.saturating_duration_since(Instant::now())).ok().flatten(),
    }
}

/// The parts of the fabric that the words select.
fn known(words: &[OsString]) -> Known {
    let running = |select: &Select| Some(Known::of_status(&client(select)?.status().ok()?));
    first(words, running, |select| Some(Known::of_file(&written(select)?))).unwrap_or_default()
}

fn client(select: &Select) -> Option<Client> {
    let root = rundir::runtime_root().ok()?;
    let name = select.name(&root).ok()?;
    Client::new(&name, &rundir::api_socket(&root, &name)).ok()
}

/// The keys and sections of what runs, with their values.
fn keys(select: &Select) -> Option<Vec<Name>> {
    let running = client(select)?.config().ok()?.config;
    let about = |path: &str| match config::at(&running, path) {
        Some(value) if !value.is_object() => config::inline(value),
        _ => "section".into(),
    };
    Some(all_paths(&running).into_iter().map(|path| (path.clone(), about(&path))).collect())
}

/// The text of the fabric's file.
fn written(select: &Select) -> Option<String> {
    let path = match (&select.fabric, &select.file) {
        (None, Some(file)) => file.clone(),
        (None, None) if Path::new(DEFAULT_FILE).exists() => DEFAULT_FILE.into(),
        _ => {
            let root = rundir::runtime_root().ok()?;
            rundir::read_owner(&root.join(select.name(&root).ok()?))?.file
        }
    };
    read(&path)
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
            let names = ["NAME", "MEMBER", "LINK", "NETWORK", "WHO", "MEMBER:PORT", "KEY", "KEY=VALUE"]
                .contains(&value.as_str())
                && !argument.ends_with("netns");
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

    #[test]
    fn what_rules_and_forwards_may_say_is_offered() {
        let text = "[network.lan]\nuplink = \"user\"\n[cell.web]\ngroups = [\"front\", \"all\"]\n[vm.db]\ncount = 2\n\
                    groups = \"all\"\n[tap.t]\n[[forward]]\nlisten = \"[::1]:80\"\nto = \"web:80\"\n[[forward]]\nproto = \"udp\"\n\
                    listen = \"127.0.0.1:53\"\nto = \"db-1:53\"\n[[rule]]\naction = \"deny\"\nto = \"db-1\"\n[[rule]]\naction = \"allow\"\n";
        let content = Content::of(text.into());
        let plain =
            |names: Vec<Name>| offered(names, OsStr::new("")).into_iter().map(|n| n.0).collect::<Vec<_>>().join(" ");
        assert_eq!(plain(content.sides()), "all db-1 db-2 front outside t web");
        assert_eq!(plain(content.forwards("tcp".into())), "[::1]:80");
        assert_eq!(content.forwards("udp".into()), [("127.0.0.1:53".to_string(), "to db-1:53".to_string())]);
        assert_eq!(content.rules()[0].1, "{ action = \"deny\", to = \"db-1\" }");
        assert_eq!(plain(content.rules()), "1 2");
        assert_eq!(plain(values("rule", "action")), "allow deny");
        assert_eq!(plain(values("rule", "protocol")), "icmp tcp udp");
        assert_eq!(plain(values("port", "class")), "background high marked normal urgent");
        assert_eq!(plain(values("vm", "allow")), "");
        assert_eq!(plain(values("vm", "agent")), "false true");
        let values = settings(&[], "port.guest.class=").into_iter().map(|(value, _)| value).collect::<Vec<_>>();
        assert!(values.contains(&"port.guest.class=urgent".into()), "{values:?}");
        let hostile = vec![("web".to_string(), "to \u{1b}[2Jdb:80".to_string())];
        assert_eq!(offered(hostile, OsStr::new("")), [("web".to_string(), "to  [2Jdb:80".to_string())]);
        // Ten comes behind nine.
        let numbers = (1..=10).map(|n| (n.to_string(), String::new())).collect();
        assert_eq!(plain(numbers), "1 2 3 4 5 6 7 8 9 10");
    }

    #[test]
    fn each_edit_of_a_script_finds_its_place() {
        for (shell, edits) in [("bash", BASH), ("zsh", ZSH)] {
            let text = script(shell).unwrap();
            for (_, ours) in edits {
                assert!(text.contains(ours), "clap's script for {shell} has changed: {text}");
            }
        }
    }
}
