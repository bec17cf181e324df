//! Processes of a fabric: found, watched and ended by pidfd, so that a reused pid is never hit.
//!
//! # How children are found again
//! A daemon may be killed at any instant. Its children may be stopped, spinning, or run as another
//! user (passt switches to `nobody`). So each kind has a mark that exists from the first
//! instruction of its program on. The mark is in a place that stays readable in every state and for
//! every user: the command line. A child that has not reached its program yet holds the fabric's
//! lock.
//!
//! | child | mark |
//! | --- | --- |
//! | QEMU | `-name tombolo/FABRIC/NAME` and the path of its monitor's socket |
//! | xl | its last words, `create -q -F -c RUNTIME/NAME.xl`; its domain by the owner record |
//! | watcher of a domain | `tombolo domain-watch NUMBER RUNTIME/NAME.xl` |
//! | passt | its name for itself, `RUNTIME/PORT/passt`; also [`HELPER_VARIABLE`], and the owner record |
//! | fd store of links | `tombolo keeper RUNTIME/keeper.sock` |
//! | bridge of a link | `tombolo link-bridge RUNTIME/LINK.link.sock`; also the owner record, since a process can change its arguments |
//! | bridge to machines | `tombolo machine-bridge RUNTIME/NAME.export`, or `.import`, which are no files; also the owner record |
//! | nft, probes | none: the kernel kills them with the daemon (`tombolo_port::child`) |

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use tombolo_port::child::inherit_only;

use crate::xen;

/// How long the kernel may take to end a killed process; one that waits for a device in the kernel
/// takes longer.
const KILLED: Duration = Duration::from_secs(5);

/// A process that is held by its pidfd.
#[derive(Debug)]
pub struct Process {
    /// Its number, for display only.
    pub pid: u32,
    /// The handle that signals go through.
    pub pidfd: OwnedFd,
}

/// Starts a child, which inherits nothing but its standard streams.
///
/// # Errors
/// The system's.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    inherit_only(command, &[]).spawn()
}

/// Starts a child that inherits some descriptors as well. Their numbers are not known in advance:
/// `make` gets these numbers, and makes the command.
///
/// # Errors
/// The system's.
pub fn spawn_with(fds: &[OwnedFd], make: impl FnOnce(&[i32]) -> Command) -> io::Result<Child> {
    // Behind the standard streams, which take their places in the child.
    let inherited: Vec<OwnedFd> =
        fds.iter().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3)).collect::<Result<_, _>>()?;
    let numbers: Vec<i32> = inherited.iter().map(AsRawFd::as_raw_fd).collect();
    inherit_only(&mut make(&numbers), &numbers).spawn()
}

/// Start time of a process in clock ticks after boot: field 22 of /proc/PID/stat
/// (proc_pid_stat(5)).
pub fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; fields are counted behind its last parenthesis.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// What a process is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// It runs, or is stopped.
    Runs,
    /// It was killed or ends by itself, and the kernel still takes it apart: about ten taps a
    /// second, for one.
    Ending,
    /// There is none of that number and start.
    Gone,
}

/// Looks the process up by number and start time, so that a reused number is not mistaken for it.
pub fn liveness(pid: u32, started_ticks: u64) -> Liveness {
    /// `PF_EXITING` (linux/sched.h), in field 9 of a thread's stat.
    const EXITING: u32 = 4;
    /// SIGKILL, in the masks of pending signals.
    const KILLED: u64 = 1 << 8;
    if start_ticks(pid) != Some(started_ticks) || !Process::open(pid).is_some_and(|p| p.is_running()) {
        return Liveness::Gone;
    }
    let ends = |task: &Path| -> Option<bool> {
        let stat = fs::read_to_string(task.join("stat")).ok()?;
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let is_dead = matches!(fields.next()?, "Z" | "X");
        let is_exiting = fields.nth(5)?.parse::<u32>().ok()? & EXITING != 0;
        let status = fs::read_to_string(task.join("status")).ok()?;
        let pending = status.lines().filter_map(|l| l.strip_prefix("SigPnd:").or_else(|| l.strip_prefix("ShdPnd:")));
        let is_killed = pending.filter_map(|m| u64::from_str_radix(m.trim(), 16).ok()).any(|m| m & KILLED != 0);
        Some(is_dead || is_exiting || is_killed)
    };
    let mut tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    // A thread that goes while it is looked at is ending.
    if tasks.all(|t| ends(&t.path()).unwrap_or(true)) { Liveness::Ending } else { Liveness::Runs }
}

/// Whether the process of that number and start time, if known, has ended or only waits for its
/// parent (state Z of proc_pid_stat(5)). A process that cannot be looked at, perhaps because no
/// descriptor is free, counts as running.
pub fn has_gone(pid: u32, started_ticks: Option<u64>) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => {
            state_in(&stat) == Some('Z')
                || started_ticks.is_some_and(|ticks| start_ticks(pid).is_some_and(|now| now != ticks))
        }
        Err(error) => {
            error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
        }
    }
}

/// The state of a process's first thread in its /proc/PID/stat, a letter of proc_pid_stat(5).
fn state_in(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

fn state(pid: u32) -> Option<char> {
    state_in(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Whether a process is stopped by a signal (state T); one that is traced is not.
pub fn is_stopped(pid: u32) -> bool {
    state(pid) == Some('T')
}

/// Whether a process runs, or waits for a processor or a disk (states R and D): if it has one
/// thread and does not answer, it is slow and does not hang.
pub fn is_busy(pid: u32) -> bool {
    matches!(state(pid), Some('R' | 'D'))
}

/// Reads the process's command line. `None`: /proc does not show it.
pub fn arguments(pid: u32) -> Option<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words = bytes.strip_suffix(&[0]).unwrap_or(&bytes).split(|b| *b == 0);
    Some(words.map(|w| String::from_utf8_lossy(w).into_owned()).collect())
}

/// The environment variable that marks a helper. It is for helpers that are started through a
/// script, which changes the command line: as its value the helper's name for itself.
pub const HELPER_VARIABLE: &str = "_TOMBOLO_HELPER";

/// A helper as the owner record has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// What it is for: the port's name.
    pub name: String,
    /// Process ID; it names the process only together with `started_ticks`.
    pub pid: u32,
    /// Its start, in clock ticks after boot.
    pub started_ticks: u64,
}

/// A passt's name for itself, by which it is found again. passt asks only that the last part is
/// `passt`.
pub fn helper_name(runtime: &Path, port: &str) -> String {
    format!("{}/{port}/passt", runtime.display())
}

/// Every process but this one, held by its pidfd, with its arguments.
fn all() -> impl Iterator<Item = (Process, Vec<String>)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|e| e.file_name().to_str().and_then(|n| n.parse::<u32>().ok()));
    let others = pids.filter(|pid| *pid != std::process::id());
    // The pidfd comes first: what is read afterwards is read of a process that we hold, or not at
    // all.
    others.filter_map(|pid| {
        let process = Process::open(pid)?;
        let words = arguments(pid)?;
        Some((process, words))
    })
}

/// Whether we may signal a process of that number. Processes of other users cannot be our children.
fn is_ours(process: &Process) -> bool {
    rustix::process::test_kill_process(Pid::from_raw(process.pid as i32).unwrap_or(Pid::INIT)).is_ok()
}

/// Running helpers (passt) of the fabric with this runtime directory, in any state: (port,
/// process).
pub fn helpers(runtime: &Path, recorded: &[Recorded]) -> Vec<(String, Process)> {
    let prefix = format!("{}/", runtime.display());
    let port = |name: &str| name.strip_prefix(&prefix)?.strip_suffix("/passt").map(str::to_string);
    let variable = format!("{HELPER_VARIABLE}=");
    let marked = |pid: u32| {
        // Readable for root, and for the helper's user if it has not changed its own.
        let bytes = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let words = bytes.split(|b| *b == 0).map(String::from_utf8_lossy);
        words.filter_map(|w| port(w.strip_prefix(&variable)?)).next()
    };
    let known = |pid: u32| {
        let record = recorded.iter().find(|r| r.pid == pid)?;
        (start_ticks(pid) == Some(record.started_ticks)).then(|| record.name.clone())
    };
    let found = all().filter_map(|(process, words)| {
        let name =
            words.first().and_then(|w| port(w)).or_else(|| known(process.pid)).or_else(|| marked(process.pid))?;
        (process.is_running() && is_ours(&process)).then_some((name, process))
    });
    found.collect()
}

/// Running fd stores of links at this socket, in any state.
pub fn fd_stores(socket: &Path) -> Vec<Process> {
    let socket = socket.display().to_string();
    let found = all().filter(|(process, words)| {
        words.len() == 3 && words[1] == "keeper" && words[2] == socket && process.is_running() && is_ours(process)
    });
    found.map(|(process, _)| process).collect()
}

/// A bridge process, as the owner record keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedBridge {
    /// Process ID; it names the process only together with `started_ticks`.
    pub pid: u32,
    /// Its start, in clock ticks after boot.
    pub started_ticks: u64,
    /// The arguments that it was started with, behind the program's name.
    pub words: Vec<String>,
}

/// Whether a process with these arguments is a bridge of the fabric with this runtime directory.
fn is_bridge(words: &[String], runtime: &Path) -> bool {
    let [_, command, socket, ..] = words else { return false };
    crate::bridge::COMMANDS.contains(&command.as_str()) && Path::new(socket).parent() == Some(runtime)
}

/// Running bridges of the fabric with this runtime directory, in any state, with the arguments
/// that they show. The second part is the record's entry: only a process that has one was started
/// by the fabric itself.
pub fn bridges(runtime: &Path, recorded: &[RecordedBridge]) -> Vec<(Process, Vec<String>, Option<RecordedBridge>)> {
    let found = all().filter_map(|(process, words)| {
        let known = recorded.iter().find(|r| r.pid == process.pid && start_ticks(r.pid) == Some(r.started_ticks));
        ((known.is_some() || is_bridge(&words, runtime)) && process.is_running() && is_same_user(process.pid))
            .then(|| (process, words, known.cloned()))
    });
    found.collect()
}

/// Kills processes that have nothing to save, and waits for their ends. Returns those that are
/// still there.
pub fn kill_all(processes: &[&Process]) -> Vec<u32> {
    let deadline = Instant::now() + KILLED;
    for process in processes {
        // One that has ended meanwhile is no error, and one that may not be signalled is still
        // there below.
        let _ = process.signal(Signal::KILL);
    }
    let left = processes.iter().filter(|p| !p.wait(deadline.saturating_duration_since(Instant::now())));
    left.map(|p| p.pid).collect()
}

/// Whether a process runs as this one's user. Only passt changes its user; another user's process
/// may carry any words.
pub fn is_same_user(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    // Real, effective, saved and file system user (proc_pid_status(5)).
    let ids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let effective = ids.and_then(|ids| ids.split_whitespace().nth(1)?.parse::<u32>().ok());
    effective == Some(rustix::process::geteuid().as_raw())
}

/// The parent of a process: field 4 of /proc/PID/stat (proc_pid_stat(5)).
fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The machine whose domain an `xl` with these arguments creates, or a `tombolo domain-watch`
/// watches, if its configuration is in `runtime`.
pub(crate) fn machine_of_xl(words: &[String], runtime: &Path) -> Option<String> {
    let path = Path::new(words.last()?);
    let name = path.file_name()?.to_str()?.strip_suffix(".xl")?;
    let creates = path.parent() == Some(runtime) && words.ends_with(&xen::config::words(runtime, name));
    (creates || xen::watcher::is_watcher(words, runtime, name)).then(|| name.to_string())
}

/// Running machines of a fabric whose monitor socket is in `runtime`: (machine's name, process,
/// arguments). They are found by `-name tombolo/FABRIC/NAME` of a process of the same user; those
/// of Xen by the configuration of their `xl`.
pub fn machines(fabric: &str, runtime: &Path) -> Vec<(String, Process, Vec<String>)> {
    let prefix = format!("tombolo/{fabric}/");
    let qemu = |words: &[String]| {
        let name = words.windows(2).find(|w| w[0] == "-name").and_then(|w| w[1].strip_prefix(&prefix))?.to_string();
        let monitor = crate::qemu::argv::monitor_path(runtime, &name).display().to_string();
        words.iter().any(|w| w.contains(&monitor)).then_some(name)
    };
    let found = all().filter_map(|(process, words)| {
        let xl = machine_of_xl(&words, runtime);
        let is_xl = xl.is_some();
        let name = xl.or_else(|| qemu(&words))?;
        (process.is_running() && is_same_user(process.pid)).then_some((name, process, words, is_xl))
    });
    let found: Vec<_> = found.collect();
    // `xl` forks for a moment's work, and its child has its command line.
    let of_xl: Vec<u32> = found.iter().filter(|(.., is_xl)| *is_xl).map(|(_, process, ..)| process.pid).collect();
    let is_child = |pid| parent(pid).is_some_and(|parent| of_xl.contains(&parent));
    let kept = found.into_iter().filter(|(_, process, _, is_xl)| !is_xl || !is_child(process.pid));
    kept.map(|(name, process, words, _)| (name, process, words)).collect()
}

/// Waits until a process has ended; `false` if it has not within `limit`. A signal to this process,
/// which has handlers, says nothing of that one.
pub(crate) fn ends_within(pidfd: impl AsFd, limit: Duration) -> Result<bool, Errno> {
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        match poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            other => return other.map(|n| n > 0),
        }
    }
}

impl Process {
    /// Holds the process of that number, if there is one.
    pub fn open(pid: u32) -> Option<Process> {
        let number = Pid::from_raw(i32::try_from(pid).ok()?)?;
        let pidfd = pidfd_open(number, PidfdFlags::empty()).ok()?;
        Some(Process { pid, pidfd })
    }

    /// Waits until it has ended; `false` if it has not within `limit`.
    pub fn wait(&self, limit: Duration) -> bool {
        ends_within(&self.pidfd, limit).unwrap_or(false)
    }

    /// Whether it has not ended.
    pub fn is_running(&self) -> bool {
        !self.wait(Duration::ZERO)
    }

    /// Sends a signal; an ended process is no error.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Ends it: SIGTERM, and SIGKILL if it has not ended within `grace`.
    pub fn end(&self, grace: Duration) -> io::Result<()> {
        self.signal(Signal::TERM)?;
        if !self.wait(grace) {
            self.signal(Signal::KILL)?;
            // A killed process is gone as soon as the kernel has taken it apart.
            self.wait(KILLED);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_its_cookie_and_ended() {
        let dir = tempfile::tempdir().unwrap();
        let monitor = crate::qemu::argv::monitor_path(dir.path(), "vm1").display().to_string();
        // A shell that keeps QEMU's words on its command line and waits for its standard input to
        // end.
        let mut child = Command::new("sh")
            .args(["-c", "read x", "-name", "tombolo/proctest/vm1", &format!("unix:{monitor}")])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let found = loop {
            let found = machines("proctest", dir.path());
            if !found.is_empty() || std::time::Instant::now() > deadline {
                break found;
            }
            std::thread::yield_now();
        };
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].0.as_str(), found[0].1.pid), ("vm1", child.id()));
        assert!(machines("proctest", std::path::Path::new("/elsewhere")).is_empty());
        assert!(machines("other", dir.path()).is_empty());
        found[0].1.end(Duration::from_secs(5)).unwrap();
        assert!(!found[0].1.is_running());
        child.wait().unwrap();
        found[0].1.signal(Signal::KILL).unwrap();
        assert!(start_ticks(std::process::id()).is_some());
    }

    #[test]
    fn an_xl_is_found_by_its_configuration_without_its_child() {
        let dir = tempfile::tempdir().unwrap();
        // A shell with xl's words, and a child that has the same.
        let words = xen::config::words(dir.path(), "web");
        let mut command = Command::new("sh");
        command.args(["-c", "(read x) <&0; read x"]).args(&words).stdin(std::process::Stdio::piped());
        let mut child = command.spawn().unwrap();
        let same = || all().filter(|(_, w)| w.ends_with(&words)).count();
        tombolo_testing::until("the shell and its child", || same() == 2);
        let found = machines("any", dir.path());
        let found: Vec<_> = found.iter().map(|(name, process, _)| (name.as_str(), process.pid)).collect();
        assert_eq!(found, [("web", child.id())]);
        assert!(machines("any", Path::new("/elsewhere")).is_empty());
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    /// Starts `sh` under another name for itself; its environment is `variable`.
    fn disguised(name: &str, variable: Option<&str>) -> Child {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new("sh");
        command.arg0(name).args(["-c", "read x"]).stdin(std::process::Stdio::piped());
        command.envs(variable.map(|value| (HELPER_VARIABLE, value)));
        command.spawn().unwrap()
    }

    #[test]
    fn bridges_are_found_by_their_arguments_or_the_record() {
        let dir = tempfile::tempdir().unwrap();
        let start = |words: &[&str]| {
            let mut command = Command::new("sh");
            command.args(["-c", "read x"]).args(words).stdin(std::process::Stdio::piped());
            command.spawn().unwrap()
        };
        // A shell does not give up its own first words, so it represents a process that has changed
        // what it shows.
        let mut changed = start(&[]);
        let words = vec!["link-bridge".to_string(), "/run/x/a.link.sock".into()];
        let record = RecordedBridge { pid: changed.id(), started_ticks: start_ticks(changed.id()).unwrap(), words };
        let elsewhere = RecordedBridge { started_ticks: 0, ..record.clone() };
        let found = bridges(dir.path(), std::slice::from_ref(&record));
        assert_eq!(
            found.iter().map(|(p, _, known)| (p.pid, known.clone())).collect::<Vec<_>>(),
            [(record.pid, Some(record))]
        );
        assert!(bridges(dir.path(), &[elsewhere]).is_empty());
        let socket = dir.path().join("a.link.sock").display().to_string();
        let words = |of: &[&str]| of.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(is_bridge(&words(&["tombolo", "link-bridge", &socket, "--to", "x"]), dir.path()));
        assert!(!is_bridge(&words(&["tombolo", "keeper", &socket]), dir.path()));
        assert!(!is_bridge(&words(&["tombolo", "link-bridge", "/elsewhere/a.link.sock"]), dir.path()));
        assert!(!is_bridge(&words(&["tombolo", "link-bridge"]), dir.path()));
        changed.kill().unwrap();
        changed.wait().unwrap();
    }

    #[test]
    fn helpers_are_found_by_name_variable_or_record_and_killed_while_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let name = helper_name(dir.path(), "uplink-lan");
        let mut children = [disguised(&name, None), disguised("passt", Some(&name)), disguised("passt", None)];
        let pids: Vec<u32> = children.iter().map(Child::id).collect();
        let record = Recorded { name: "uplink-ops".into(), pid: pids[2], started_ticks: start_ticks(pids[2]).unwrap() };
        let elsewhere = Recorded { started_ticks: 0, ..record.clone() };
        let find = |records: &[Recorded]| {
            let mut found: Vec<(u32, String)> =
                helpers(dir.path(), records).into_iter().map(|(name, p)| (p.pid, name)).collect();
            found.sort();
            found
        };
        // Between fork and exec a child has its parent's command line.
        tombolo_testing::until("all three", || find(std::slice::from_ref(&record)).len() == 3);
        let names = ["uplink-lan", "uplink-lan", "uplink-ops"].map(String::from);
        let mut expected: Vec<_> = pids.iter().copied().zip(names).collect();
        expected.sort();
        assert_eq!(find(&[record]), expected);
        // A number that belongs to another process by now matches no record.
        assert_eq!(find(&[elsewhere]).len(), 2);
        assert!(helpers(Path::new("/elsewhere"), &[]).is_empty());
        for child in &children {
            Process::open(child.id()).unwrap().signal(Signal::STOP).unwrap();
        }
        let held: Vec<Process> = pids.iter().filter_map(|pid| Process::open(*pid)).collect();
        assert!(kill_all(&held.iter().collect::<Vec<_>>()).is_empty());
        assert!(find(&[]).is_empty());
        for child in &mut children {
            child.wait().unwrap();
        }
    }
}
