//! `tombolo up`: the fabric in the foreground, or as a daemon.
//!
//! # The daemon
//! The program starts itself again in a new session, with its log as standard error and a pipe as
//! standard output. It reports the outcome once over the pipe: the report when the fabric is up, or
//! the reason why it is not. Only then does the first process end, and with 0 only if the fabric is
//! up. A daemon that dies before it reports has closed its pipe.
//!
//! A process in between starts the daemon and ends at once. So the daemon is the child of process 1
//! (or of a subreaper) before the fabric is up. When `MAINPID=` arrives, systemd accepts a new main
//! process as its own only if it is its child. If it is not, systemd does not wait for it to end
//! when it stops the service, but kills it.

use std::io::{self, BufRead, BufReader, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use tombolo_host::api::client::Client;
use tombolo_host::api::report::Status;
use tombolo_host::daemon::Start;
use tombolo_host::file::Which;
use tombolo_host::process::{self, Process};
use tombolo_host::{confine, daemon, file, log, moment, notify, preflight, rundir};

use crate::exit::{Exit, Failure};
use crate::out;
use crate::select::{DEFAULT_FILE, OfMachine, Select};
use crate::wait::is_hopeless;

#[derive(Args, Debug)]
pub(crate) struct Up {
    /// Fabric file [default: tombolo.toml]
    #[arg(value_name = "FILE", conflicts_with = "file")]
    path: Option<PathBuf>,
    #[command(flatten)]
    of: OfMachine,
    /// Run as a daemon; return once the fabric is up
    #[arg(short, long)]
    daemon: bool,
    /// With --daemon: return once every machine's ports are up, or exit with 3 after SECONDS
    #[arg(long, value_name = "SECONDS", requires = "daemon", num_args = 0..=1, default_missing_value = "60", require_equals = true)]
    wait: Option<u32>,
    /// With --daemon: print the report of `status` as JSON
    #[arg(long, requires = "daemon")]
    json: bool,
    /// Take over from the running daemon of this fabric while its guests run on; without one, same
    /// as plain `up`
    #[arg(long)]
    replace: bool,
    /// On SIGTERM, leave machines and containers running for the next daemon, as on SIGUSR2; for a
    /// daemon in a container, whose runtime sends SIGTERM when it stops or replaces it
    #[arg(long)]
    leave_on_term: bool,
    /// The process in between: starts the daemon and ends
    #[arg(long, hide = true, conflicts_with = "daemon")]
    detach: bool,
    /// The daemon itself, started by that process
    #[arg(long, hide = true, value_name = "PID", conflicts_with = "daemon")]
    answer_on_stdout: Option<u32>,
}

/// How long a daemon that has said why it fails may take to end.
const ENDING: Duration = Duration::from_secs(60);
/// How long the daemon waits for the end of the process in between, which has nothing left to do.
const ORPHANED: Duration = Duration::from_secs(1);

/// What the daemon says over the pipe.
#[derive(Debug, Serialize, Deserialize)]
enum Word {
    /// The daemon runs, as this process.
    Runs(u32),
    Stands {
        status: Box<Status>,
        seconds: f64,
    },
    Failed {
        code: u8,
        error: String,
    },
    /// Something is waited for; another word follows.
    Waits(String),
}

impl Up {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        if select.fabric.is_some() && self.path.is_none() && select.file.is_none() && !Path::new(DEFAULT_FILE).exists()
        {
            return Err(Failure::misused("up takes a fabric file, not a fabric's name: tombolo up FILE"));
        }
        let path = self.path.clone().or_else(|| select.file.clone()).unwrap_or_else(|| DEFAULT_FILE.into());
        if self.detach {
            return self.detach(&path);
        }
        if let Some(starter) = self.answer_on_stdout {
            return serve_as_daemon(&path, self.of.which(), self.start(), starter);
        }
        is_file(&path)?;
        let spec = preflight::load(&path, self.of.which())?;
        if let Some(name) = select.fabric.as_ref().filter(|n| **n != spec.name) {
            let found =
                format!("--fabric: expected \"{name}\", but {} is of the fabric \"{}\"", path.display(), spec.name);
            return Err(Failure::misused(found));
        }
        if self.daemon { self.start_daemon(&spec.name, &path) } else { foreground(spec, &path, self.start()) }
    }

    fn start(&self) -> Start {
        Start { replace: self.replace, leave_on_term: self.leave_on_term }
    }

    /// The options that the daemon itself needs.
    fn words(&self) -> impl Iterator<Item = String> {
        let replace = self.replace.then(|| "--replace".to_string());
        let machine = self.of.machine.as_ref().map(|name| format!("--machine={name}"));
        replace.into_iter().chain(self.leave_on_term.then(|| "--leave-on-term".to_string())).chain(machine)
    }

    fn detach(&self, path: &Path) -> Result<Exit, Failure> {
        let program = std::env::current_exe().map_err(|e| Failure::failed(format!("finding this program: {e}")))?;
        // Nothing waits for it here: the one that does is its parent once this process has ended.
        Command::new(&program)
            .arg("up")
            .arg(path)
            .arg(format!("--answer-on-stdout={}", std::process::id()))
            .args(self.words())
            .spawn()
            .map_err(|e| Failure::failed(format!("starting {} as a daemon: {e}", program.display())))?;
        Ok(Exit::Done)
    }

    fn start_daemon(&self, name: &str, path: &Path) -> Result<Exit, Failure> {
        let folder = rundir::runtime_root()?.join(name);
        let log_path = folder.join("log");
        let at =
            |what: &'static str| move |e: io::Error| Failure::failed(format!("{what} {}: {e}", log_path_text(name)));
        rundir::make_dir(&folder)?;
        let mut open = std::fs::OpenOptions::new();
        let log = match open.append(true).create(true).mode(0o600).open(&log_path) {
            Ok(log) => log,
            // A full disk keeps no guest from its network.
            Err(error) => {
                out::tell!("tombolo: the daemon runs without a log: {}: {error}", log_path.display());
                std::fs::OpenOptions::new().write(true).open("/dev/null").map_err(at("opening /dev/null for"))?
            }
        };
        let program = std::env::current_exe().map_err(|e| Failure::failed(format!("finding this program: {e}")))?;
        let mut command = Command::new(&program);
        command
            .arg("up")
            .arg(std::path::absolute(path)?)
            .arg("--detach")
            .args(self.words())
            .env_remove("TOMBOLO_FABRIC")
            .envs(notify::watchdog_for_daemon())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        // A lock or a pipe of the caller ends with the caller, not with the daemon.
        let mut child = process::spawn(&mut command)
            .map_err(|e| Failure::failed(format!("starting {} as a daemon: {e}", program.display())))?;
        let mut line = String::new();
        let pipe = child.stdout.take().expect("asked for above");
        let mut words = BufReader::new(pipe);
        child.wait()?;
        let mut daemon = None;
        let word = loop {
            line.clear();
            words.read_line(&mut line)?;
            match serde_json::from_str(&line) {
                Ok(Word::Runs(pid)) => daemon = Process::open(pid),
                Ok(Word::Waits(what)) => out::tell!("tombolo: {what}"),
                word => break word,
            }
        };
        match word {
            Ok(Word::Stands { status, seconds }) => self.stands(*status, seconds),
            Ok(Word::Failed { code, error }) => {
                if let Some(daemon) = daemon {
                    daemon.wait(ENDING);
                }
                Err(Failure::Said(if code == Exit::Misused.code() { Exit::Misused } else { Exit::Failed }, error))
            }
            Ok(Word::Runs(_) | Word::Waits(_)) | Err(_) => {
                let log = std::fs::read_to_string(&log_path).unwrap_or_default();
                let last: Vec<_> = log.lines().rev().take(5).collect();
                let last: Vec<_> = last.into_iter().rev().collect();
                Err(Failure::failed(format!(
                    "the daemon ended before the fabric was up; the end of its log {}:\n{}",
                    log_path.display(),
                    last.join("\n")
                )))
            }
        }
    }

    fn stands(&self, status: Status, seconds: f64) -> Result<Exit, Failure> {
        let (mut status, mut exit) = (status, Exit::Done);
        if let Some(limit) = self.wait {
            let root = rundir::runtime_root()?;
            let mut client = Client::new(&status.name, &rundir::api_socket(&root, &status.name))?;
            let end = Instant::now() + Duration::from_secs(limit.into());
            loop {
                status = client.status()?;
                let missing = missing(&status);
                if missing.is_empty() {
                    break;
                }
                if is_hopeless(&status, &missing) || Instant::now() >= end {
                    for (name, state) in missing {
                        out::tell!("tombolo: {name} is not on the network: {state}");
                    }
                    exit = Exit::Partly;
                    break;
                }
                if client.sleep(Duration::from_millis(50))? {
                    exit = Exit::Partly;
                    break;
                }
            }
        }
        if self.wait.is_none() {
            let root = rundir::runtime_root()?;
            let mut client = Client::new(&status.name, &rundir::api_socket(&root, &status.name))?;
            status = first_second(&mut client, status)?;
            for (name, end) in dead(&status) {
                out::tell!("tombolo: {name} died at once: {end}");
                exit = Exit::Partly;
            }
        }
        tell_all(&status);
        if self.json {
            out::json(&status)?;
        } else {
            out::print(&format!("{}\n", summary(&status, Duration::from_secs_f64(seconds))))?;
        }
        Ok(exit)
    }
}

fn log_path_text(name: &str) -> String {
    format!("the daemon of \"{name}\"")
}

/// How long machines are watched that have just been started. QEMU that refuses what it was given
/// ends within this.
const AT_ONCE: Duration = Duration::from_secs(1);

/// The status once each machine is on the network or has died, at the latest after [`AT_ONCE`].
fn first_second(client: &mut Client, mut status: Status) -> Result<Status, Failure> {
    let end = Instant::now() + AT_ONCE;
    let begins = |m: &tombolo_host::api::report::MachineReport| m.state == "running" && !m.adopted;
    while status.machines.iter().any(begins) && Instant::now() < end {
        let dead: Vec<String> = dead(&status).map(|(name, _)| name.to_string()).collect();
        if missing(&status).iter().all(|(name, _)| dead.contains(name)) || client.sleep(Duration::from_millis(50))? {
            break;
        }
        status = client.status()?;
    }
    Ok(status)
}

/// Machines that have failed, and how, with the last lines of their consoles.
fn dead(status: &Status) -> impl Iterator<Item = (&str, &str)> {
    status.machines.iter().filter(|m| m.state == "failed").filter_map(|m| Some((&m.name[..], m.last_end.as_deref()?)))
}

/// Machines that are not running with all of their ports up, and how they are.
pub(crate) fn missing(status: &Status) -> Vec<(String, String)> {
    let late = |m: &&tombolo_host::api::report::MachineReport| {
        let own = |p: &&tombolo_host::api::report::PortReport| {
            p.name == m.name || p.name.strip_prefix(&m.name).is_some_and(|rest| rest.starts_with('.'))
        };
        // One that has done what it had to do, and ended well, needs no network any more.
        let is_done = m.state == "stopped" && m.last_end.is_some();
        !is_done && (m.state != "running" || !status.ports.iter().filter(own).all(|p| p.up))
    };
    let machines = status.machines.iter().filter(late);
    let how = |m: &tombolo_host::api::report::MachineReport| match (&m.last_end, m.state.as_str()) {
        (_, "running") => "it runs, but its driver has not started every port".to_string(),
        (Some(end), state) => format!("{state}: {end}"),
        (None, state) => state.to_string(),
    };
    machines.map(|m| (m.name.clone(), how(m))).collect()
}

/// What the user should know of a start: what became of an earlier daemon's things, and what does
/// not work.
fn tell_all(status: &Status) {
    status.takeover.iter().chain(&status.warnings).for_each(|line| out::tell!("tombolo: {line}"));
}

fn summary(status: &Status, took: Duration) -> String {
    format!(
        "{} is up after {}: {}, {}, {}, {}",
        status.name,
        out::span(took.as_secs_f64()),
        out::counted(status.networks.len(), "network"),
        out::counted(status.machines.len(), "machine"),
        out::counted(status.ports.len(), "port"),
        out::counted(status.forwards.len(), "forward"),
    )
}

/// A fabric's file is read again: for the places of faults, by the daemon in the background, and by
/// the daemon that follows. So it is no pipe.
fn is_file(path: &Path) -> Result<(), Failure> {
    match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => Err(Failure::misused(format!(
            "{}: expected a regular file, which the next daemon can read again, found a {}; write it to a file first",
            path.display(),
            if found.is_dir() { "folder" } else { "pipe or device" }
        ))),
        // Reading it tells what is wrong.
        _ => Ok(()),
    }
}

fn foreground(spec: file::Fabric, path: &Path, start: Start) -> Result<Exit, Failure> {
    let tty = io::stderr().is_terminal();
    let name = spec.name.clone();
    if tty {
        out::tell!(
            "starting {name}: {}, {}, {}, {} …",
            out::counted(spec.networks.len(), "network"),
            out::counted(spec.machines.len(), "machine"),
            out::counted(spec.taps.len(), "tap"),
            out::counted(spec.ports.len(), "port"),
        );
    }
    // Progress is for a terminal only; what happens once the fabric is up is always printed, and is
    // in its log too. Until then the folder of the log may be another daemon's.
    let stands = Arc::new(AtomicBool::new(false));
    let aloud = stands.clone();
    let log: Arc<OnceLock<Mutex<log::Log>>> = Arc::default();
    let kept = log.clone();
    let say: tombolo_host::fabric::Say = Arc::new(move |line: &str| {
        if let Some(log) = kept.get() {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            // A full disk is no reason to end.
            let _ = log.write(&format!("{} ", stamp()), line);
        }
        if tty || aloud.load(Ordering::Relaxed) || line.starts_with(rundir::WAITING) {
            line.lines().for_each(|line| out::tell!("tombolo: {}", log::shown(line, log::LINE_CHARS)));
        }
    });
    confine::daemon().iter().for_each(|note| out::tell!("tombolo: {note}"));
    daemon::run(spec, path, say, start, |status, took| {
        notify::stands();
        stands.store(true, Ordering::Relaxed);
        if let Some(mut opened) = log_of(&name) {
            let version = env!("CARGO_PKG_VERSION");
            let _ = opened.write(
                &format!("{} ", stamp()),
                &format!("tombolo {version} runs {}: {}", path.display(), summary(status, took)),
            );
            let _ = log.set(Mutex::new(opened));
        }
        tell_all(status);
        let rest = if io::stdout().is_terminal() { "; Ctrl-C ends it" } else { "" };
        // The reader of our output may have gone; the fabric is up all the same.
        let _ = writeln!(io::stdout(), "{}{rest}", summary(status, took));
    })?;
    if tty {
        out::tell!("{name} is down");
    }
    Ok(Exit::Done)
}

/// The log of the fabric's daemon.
fn log_of(name: &str) -> Option<log::Log> {
    log::Log::open(&rundir::runtime_root().ok()?.join(name).join("log")).ok()
}

/// Writes to the daemon's log, which is its standard error until the log is rotated.
fn log_say(path: &Path, which: Which<'_>) -> tombolo_host::fabric::Say {
    let log = file::name_of(path, which).ok().and_then(|name| log_of(&name)).map(Mutex::new);
    Arc::new(move |line: &str| {
        let head = format!("{} ", stamp());
        let Some(log) = &log else {
            line.lines().for_each(|line| out::tell!("{head}{}", log::shown(line, log::LINE_CHARS)));
            return;
        };
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        // A full disk is no reason to end; what panics and children say goes to the same file.
        if let Ok(true) = log.write(&head, line) {
            let _ = rustix::stdio::dup2_stderr(log.file());
        }
    })
}

fn serve_as_daemon(path: &Path, which: Which<'_>, start: Start, starter: u32) -> Result<Exit, Failure> {
    // Fails only for the leader of a process group, which a child that was just started is not.
    let _ = rustix::process::setsid();
    let begun = Instant::now();
    while std::os::unix::process::parent_id() == starter && begun.elapsed() < ORPHANED {
        std::thread::sleep(Duration::from_millis(1));
    }
    let send = |word: &Word| {
        if let Ok(text) = serde_json::to_string(word) {
            let mut pipe = io::stdout().lock();
            // The process that started us may have been killed; the fabric is up all the same.
            let _ = writeln!(pipe, "{text}").and_then(|()| pipe.flush());
        }
    };
    send(&Word::Runs(std::process::id()));
    let log = log_say(path, which);
    let say: tombolo_host::fabric::Say = Arc::new(move |line: &str| {
        log(line);
        if line.starts_with(rundir::WAITING) {
            send(&Word::Waits(line.to_string()));
        }
    });
    say(&format!("tombolo {} starts on {}", env!("CARGO_PKG_VERSION"), path.display()));
    let tell = |word: &Word| {
        send(word);
        // The pipe ends here for its reader.
        if let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
            let _ = rustix::stdio::dup2_stdout(null);
        }
    };
    let ready_say = say.clone();
    let live = || -> Result<(), Failure> {
        let spec = preflight::load(path, which)?;
        confine::daemon().iter().for_each(|note| say(note));
        daemon::run(spec, path, say.clone(), start, |status, took| {
            notify::stands();
            ready_say(&summary(status, took));
            tell(&Word::Stands { status: Box::new(status.clone()), seconds: took.as_secs_f64() });
        })?;
        Ok(())
    };
    match live() {
        Ok(()) => Ok(Exit::Done),
        Err(Failure::Said(exit, error)) => {
            say(&error);
            tell(&Word::Failed { code: exit.code(), error });
            Ok(exit)
        }
        Err(Failure::Unread) => Ok(Exit::Failed),
    }
}

/// The time at the head of a line of the log, to the millisecond like those of consoles: `tombolo
/// logs` sorts by it.
fn stamp() -> String {
    moment::rfc3339(moment::unix_ms())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        select: Select,
        #[command(flatten)]
        up: Up,
    }

    fn parse(words: &[&str]) -> Result<Line, clap::Error> {
        Line::try_parse_from([&["up"], words].concat())
    }

    #[test]
    fn the_file_is_named_in_one_way_only() {
        assert_eq!(parse(&["a.toml"]).unwrap().up.path.as_deref(), Some(Path::new("a.toml")));
        assert_eq!(parse(&["-f", "a.toml"]).unwrap().select.file.as_deref(), Some(Path::new("a.toml")));
        assert!(parse(&["a.toml", "-f", "b.toml"]).is_err());
    }

    #[test]
    fn waiting_takes_a_daemon_and_has_a_limit() {
        assert!(parse(&["--wait"]).is_err());
        assert_eq!(parse(&["-d", "--wait"]).unwrap().up.wait, Some(60));
        assert_eq!(parse(&["--daemon", "--wait=5", "x.toml"]).unwrap().up.wait, Some(5));
        assert!(parse(&["-d", "--wait", "x.toml"]).unwrap().up.path.is_some());
    }

    #[test]
    fn json_is_the_daemons_report() {
        assert!(parse(&["-d", "--json"]).unwrap().up.json);
        assert!(parse(&["--json"]).is_err());
    }

    #[test]
    fn a_machine_is_missing_until_all_of_its_ports_are_up() {
        let text = r#"{"schema":1,"version":"","name":"t","file":"","pid":1,"uptime_s":0,"networks":[],"forwards":[],"workers":[],"warnings":[],
            "machines":[{"name":"a","kind":"cell","state":"running","pid":1,"accel":"tcg","machine":"microvm","addresses":{},"uptime_s":1,"last_end":null,"restarts":0,"adopted":false}],
            "ports":[]}"#;
        let port = |name: &str, up| {
            let text = r#"{"name":"","network":"","kind":"","up":false,"offloads":[],"guard":[],"details":{},"macs":0,"last_fault":null,
                "counters":{"rx_frames":0,"rx_bytes":0,"tx_frames":0,"tx_bytes":0,"rx_drops":{},"tx_drops":{},"wakeups":0,"turns":0,"exhausted_budgets":0,
                "frames_per_turn":[],"faults":0,"software_checksums":0,"software_segments":0,"captured":0,"capture_lost":0}}"#;
            let mut port: tombolo_host::api::report::PortReport = serde_json::from_str(text).unwrap();
            (port.name, port.up) = (name.into(), up);
            port
        };
        let mut status: Status = serde_json::from_str(text).unwrap();
        status.ports = vec![port("a", true), port("a.1", false), port("ab", false)];
        assert_eq!(
            missing(&status),
            [("a".to_string(), "it runs, but its driver has not started every port".to_string())]
        );
        status.ports[1].up = true;
        assert!(missing(&status).is_empty());
        status.machines[0].state = "starting".into();
        assert_eq!(missing(&status).len(), 1);
    }
}
