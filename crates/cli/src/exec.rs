//! `tombolo exec`: a command in a VM, by the QEMU guest agent.

use std::io::{self, IsTerminal, Read, Write};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use clap::Args;
use signal_hook::consts::{SIGINT, SIGTERM};
use tombolo_host::api::report::Status;
use tombolo_host::qemu::agent::{self, AgentError, End, Finished, INPUT_BYTES};
use tombolo_host::rundir;

use crate::exit::{Exit, Failure};
use crate::number;
use crate::out::{self, tell};
use crate::select::Select;

/// The time is over.
const LATE: u8 = 124;
/// There was no command: as with docker, and unlike what most commands end with.
const NOT_DONE: u8 = 125;
/// The command could not be started.
const NOT_RUN: u8 = 126;
/// There is none of that name.
const NOT_FOUND: u8 = 127;
/// QEMU has made the agent's device by then, counted from its start, on a busy machine too.
const DEVICE: Duration = Duration::from_secs(3);

const EXAMPLES: &str = "\
The VM needs `agent = true` in the fabric file, and qemu-guest-agent running in the guest. The command is run by
no shell. It is found in the agent's PATH, and has the agent's rights, which are usually root's. Output is shown at
the end; the agent keeps 16 MiB of each stream. Ctrl-C and SIGTERM end the command in the guest, with all that it
started; a second one ends only `exec`. With --timeout the command runs on.

Exit codes: the command's; 128 and the signal that ended it, or `exec` (130 by Ctrl-C); 124 the time was over;
125 `exec` itself failed; 126 the command could not be started; 127 it was not found.

Examples:
  tombolo exec db uptime
  tombolo exec db -- sh -c 'df -h | tail -n +2'   what a shell is needed for
  tombolo exec db tee /etc/motd < motd            input, up to 4 MiB
  tombolo exec --json --timeout 5 db id           both streams and the exit code";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Exec {
    /// Name of the VM
    machine: String,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<String>,
    /// Give up after this time; the command runs on in the guest
    #[arg(long, value_name = "S", value_parser = number::seconds, allow_hyphen_values = true)]
    timeout: Option<Duration>,
    /// Give the command no input; otherwise it gets standard input, unless that is a terminal
    #[arg(short, long)]
    no_stdin: bool,
    /// Print the exit code and the output as JSON
    #[arg(long)]
    json: bool,
}

fn not_done(text: impl Into<String>) -> Failure {
    Failure::Said(Exit::Guest(NOT_DONE), text.into())
}

fn by_code(failure: Failure) -> Failure {
    match failure {
        Failure::Said(Exit::Failed, text) => not_done(text),
        other => other,
    }
}

/// Whether the machine can have an agent, and runs.
fn look(status: &Status, name: &str) -> Result<(), String> {
    let names = || status.machines.iter().map(|m| m.name.as_str()).collect::<Vec<_>>().join(", ");
    let Some(m) = status.machines.iter().find(|m| m.name == name) else {
        return Err(format!("there is no machine \"{name}\"; there are: {}", names()));
    };
    can_run(name, &m.kind, m.domain.is_some() || m.accel == "xen", &m.state)
}

/// Whether the machine was started so short a time ago that its QEMU may still be making devices.
fn is_young(status: &Status, name: &str) -> bool {
    let machine = status.machines.iter().find(|machine| machine.name == name);
    machine.and_then(|machine| machine.uptime_s).is_some_and(|uptime| uptime < DEVICE.as_secs_f64())
}

/// Whether a machine of this kind, in this state, can run a command.
fn can_run(name: &str, kind: &str, is_domain: bool, state: &str) -> Result<(), String> {
    if kind == "cell" {
        return Err(format!("{name} is a cell, and runs no other programs; `tombolo cell console {name}` talks to it"));
    }
    if is_domain {
        return Err(format!(
            "{name} is a domain of Xen, and has no guest agent; `tombolo cell console {name}` talks to it"
        ));
    }
    if state != "running" {
        return Err(format!(
            "{name} is {state}; `tombolo wait {name}` waits for it, `tombolo cell run {name}` starts it"
        ));
    }
    Ok(())
}

/// Standard input, whole: the agent takes no more once the command runs.
fn input(deadline: Option<Instant>) -> Result<Vec<u8>, Failure> {
    let (tell, told) = mpsc::channel();
    let read = move || {
        let mut bytes = Vec::new();
        let read = io::stdin().take(INPUT_BYTES as u64 + 1).read_to_end(&mut bytes);
        tell.send(read.map(|_| bytes))
    };
    let failed = |error| not_done(format!("no thread could be started that reads standard input: {error}"));
    std::thread::Builder::new().spawn(read).map_err(failed)?;
    let read = match deadline {
        None => told.recv().ok(),
        Some(deadline) => told.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok(),
    };
    let late = || Failure::Said(Exit::Guest(LATE), "standard input did not end in time; -n gives none".into());
    let bytes = read.ok_or_else(late)?.map_err(|error| not_done(format!("standard input: {error}")))?;
    match bytes.len() > INPUT_BYTES {
        true => Err(not_done(format!("standard input: expected at most {} MiB, found more", INPUT_BYTES >> 20))),
        false => Ok(bytes),
    }
}

/// SIGINT and SIGTERM, from when a command may run in the guest. The second one ends this process.
struct Signals {
    stop: Arc<AtomicBool>,
    which: Arc<AtomicUsize>,
}

impl Signals {
    fn catch() -> Result<Signals, Failure> {
        let signals = Signals { stop: Arc::default(), which: Arc::default() };
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, signals.stop.clone())?;
            signal_hook::flag::register_usize(signal, signals.which.clone(), signal as usize)?;
            signal_hook::flag::register(signal, signals.stop.clone())?;
        }
        Ok(signals)
    }

    /// The last one that came.
    fn which(&self) -> u8 {
        self.which.load(Ordering::SeqCst) as u8
    }
}

fn failure(name: &str, error: &AgentError, signal: u8) -> Failure {
    let text = format!("{name}: {error}");
    let code = match error {
        AgentError::TimedOut { .. } => LATE,
        AgentError::Stopped { .. } => 128 + signal,
        AgentError::NotStarted(why) if why.contains("No such file") => NOT_FOUND,
        AgentError::NotStarted(_) => NOT_RUN,
        _ => NOT_DONE,
    };
    Failure::Said(Exit::Guest(code), text)
}

/// The exit code of a command that has ended. Windows has larger ones.
fn code(end: End) -> u8 {
    match end {
        End::Code(code) => u8::try_from(code).unwrap_or(u8::MAX),
        End::Signal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
    }
}

fn report(name: &str, done: &Finished) -> serde_json::Value {
    let (exit_code, signal) = match done.end {
        End::Code(code) => (Some(code), None),
        End::Signal(signal) => (None, Some(signal)),
    };
    let mut out = serde_json::json!({
        "machine": name,
        "exit_code": exit_code,
        "signal": signal,
        "stdout": String::from_utf8_lossy(&done.stdout),
        "stderr": String::from_utf8_lossy(&done.stderr),
        "truncated": done.truncated,
    });
    for (key, bytes) in [("stdout_base64", &done.stdout), ("stderr_base64", &done.stderr)] {
        if std::str::from_utf8(bytes).is_err() {
            out[key] = agent::encode(bytes).into();
        }
    }
    out
}

impl Exec {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let deadline = self.timeout.map(|timeout| Instant::now() + timeout);
        let name = &self.machine;
        let root = rundir::runtime_root()?;
        let fabric = select.name(&root).map_err(by_code)?;
        let status = select.client()?.status().map_err(|error| by_code(error.into()))?;
        look(&status, name).map_err(not_done)?;
        let socket = agent::socket_path(&root.join(fabric), name);
        // QEMU makes it in the first moments of a machine.
        let made = Instant::now() + DEVICE;
        while !socket.exists() && is_young(&status, name) && Instant::now() < made {
            std::thread::sleep(Duration::from_millis(50));
        }
        if !socket.exists() {
            return Err(not_done(format!(
                "{name} has no device for an agent: add `agent = true` to [vm.{name}] in {}; `tombolo apply` then \
                 starts it again with one",
                status.file
            )));
        }
        let input = match self.no_stdin || io::stdin().is_terminal() {
            true => vec![],
            false => input(deadline)?,
        };
        let signals = Signals::catch()?;
        let done = agent::execute(&socket, &self.command, &input, deadline, &signals.stop);
        let done = done.map_err(|error| failure(name, &error, signals.which()))?;
        if self.json {
            out::json(&report(name, &done))?;
        } else {
            io::stderr().write_all(&done.stderr)?;
            let mut stdout = io::stdout().lock();
            stdout.write_all(&done.stdout)?;
            stdout.flush()?;
        }
        if done.truncated {
            tell!("tombolo: {name}: the agent kept only the first part of the output");
        }
        Ok(Exit::Guest(code(done.end)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        exec: Exec,
    }

    fn parse(words: &[&str]) -> Result<Exec, clap::Error> {
        Line::try_parse_from(["exec"].iter().chain(words)).map(|l| l.exec)
    }

    #[test]
    fn what_stands_behind_the_machine_is_the_commands() {
        assert_eq!(parse(&["db", "ls", "-l", "--json"]).unwrap().command, ["ls", "-l", "--json"]);
        assert_eq!(parse(&["--json", "db", "--", "ls", "-l"]).unwrap().command, ["ls", "-l"]);
        assert!(parse(&["db"]).is_err() && parse(&["--timeout", "0", "db", "ls"]).is_err());
    }

    #[test]
    fn a_machine_that_cannot_run_a_command_is_refused_with_what_to_do() {
        assert_eq!(can_run("db", "vm", false, "running"), Ok(()));
        let why = |kind, is_domain, state| can_run("db", kind, is_domain, state).unwrap_err();
        assert!(
            why("cell", false, "running").contains("is a cell") && why("cell", true, "stopped").contains("console db")
        );
        assert!(why("vm", true, "running").contains("domain of Xen"));
        for state in ["stopped", "failed", "waiting", "restarting"] {
            assert!(why("vm", false, state).contains(&format!("db is {state}; `tombolo wait db`")));
        }
    }

    #[test]
    fn ends_have_codes() {
        assert_eq!((code(End::Code(0)), code(End::Code(7)), code(End::Signal(9))), (0, 7, 137));
        assert_eq!(code(End::Code(-1_073_741_510)), 255);
        let error = |why: &str| failure("db", &AgentError::NotStarted(why.into()), 0);
        assert!(matches!(error("x (No such file or directory)"), Failure::Said(Exit::Guest(127), _)));
        assert!(matches!(error("x (Permission denied)"), Failure::Said(Exit::Guest(126), _)));
        let stopped = AgentError::Stopped { pid: None, why: String::new() };
        assert!(matches!(failure("db", &stopped, 2), Failure::Said(Exit::Guest(130), _)));
        let bytes = Finished { end: End::Code(0), stdout: vec![0xff], stderr: vec![], truncated: false };
        assert_eq!(report("db", &bytes)["stdout_base64"], "/w==");
    }
}
