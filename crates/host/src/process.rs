//! Processes of a fabric: found, watched and ended by pidfd, so that a reused pid is never hit.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::Timespec;

/// A process that is held by its pidfd.
#[derive(Debug)]
pub struct Process {
    /// Its number, for display only.
    pub pid: u32,
    /// The handle that signals go through.
    pub pidfd: OwnedFd,
}

/// Held while a child is started: what one is to inherit must not be inherited by another.
static SPAWNING: Mutex<()> = Mutex::new(());

/// Starts a child.
///
/// # Errors
/// The system's.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    let _one_at_a_time = SPAWNING.lock().unwrap_or_else(PoisonError::into_inner);
    command.spawn()
}

/// Starts a child that inherits some descriptors under whatever numbers they get: `make` is told these, and makes the
/// command.
///
/// # Errors
/// The system's.
pub fn spawn_with(fds: &[OwnedFd], make: impl FnOnce(&[i32]) -> Command) -> io::Result<Child> {
    let _one_at_a_time = SPAWNING.lock().unwrap_or_else(PoisonError::into_inner);
    // Without close-on-exec, for as long as it takes to start.
    let inherited = fds.iter().map(rustix::io::dup).collect::<Result<Vec<OwnedFd>, _>>()?;
    let numbers: Vec<i32> = inherited.iter().map(AsRawFd::as_raw_fd).collect();
    make(&numbers).spawn()
}

/// Start time of a process in clock ticks after boot: field 22 of /proc/PID/stat (proc_pid_stat(5)).
pub fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything; fields are counted behind its last parenthesis.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// The arguments of a process.
pub fn arguments(pid: u32) -> Option<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words = bytes.strip_suffix(&[0]).unwrap_or(&bytes).split(|b| *b == 0);
    Some(words.map(|w| String::from_utf8_lossy(w).into_owned()).collect())
}

/// Running machines of a fabric whose monitor socket is in `runtime`: (machine's name, process, arguments). They are
/// found by `-name tombolo/FABRIC/NAME` of a process of the same user.
pub fn machines(fabric: &str, runtime: &std::path::Path) -> Vec<(String, Process, Vec<String>)> {
    let prefix = format!("tombolo/{fabric}/");
    let me = rustix::process::geteuid().as_raw();
    let Ok(entries) = fs::read_dir("/proc") else { return vec![] };
    let mut out = Vec::new();
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        if entry.metadata().map(|m| m.uid()).ok() != Some(me) {
            continue;
        }
        // The pidfd comes first: what is read afterwards is read of a process that we hold, or it reads of nobody.
        let Some(process) = Process::open(pid) else { continue };
        let Some(words) = arguments(pid) else { continue };
        let name = words.windows(2).find(|w| w[0] == "-name").and_then(|w| w[1].strip_prefix(&prefix));
        let Some(name) = name.map(str::to_string) else { continue };
        let monitor = crate::qemu::argv::monitor_path(runtime, &name).display().to_string();
        if words.iter().any(|w| w.contains(&monitor)) && process.is_running() {
            out.push((name, process, words));
        }
    }
    out
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
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
        matches!(poll(&mut fds, Some(&limit)), Ok(n) if n > 0)
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
            self.wait(Duration::from_secs(5));
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
        // A shell that keeps QEMU's words on its command line and waits for its standard input to end.
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
}
