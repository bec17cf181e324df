//! What was found out about the processes that connect to a socket, for a moment.
//!
//! Purpose: to find out where a process comes from takes a walk through /proc ([`crate::lineage`]).
//! A process that connects again and again is looked at once in [`LASTS`], so that it cannot keep
//! its server busy by that.
//!
//! # Invariants
//! - What is known of a process is held together with its pidfd. A number that another process has
//!   by now is not taken for it, because the pidfd tells that the first one has ended.
//! - A process that has ended, also while it was looked at, is nothing else than that: its number
//!   may be another's.
//! - At most [`MOST`] processes are known; beyond that everything is forgotten.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::credentials;

/// How long it holds.
pub const LASTS: Duration = Duration::from_secs(1);
/// Most processes that are known.
pub const MOST: usize = 64;

/// What is known, by process.
#[derive(Debug)]
pub struct Verdicts<V> {
    known: HashMap<u32, Known<V>>,
}

#[derive(Debug)]
struct Known<V> {
    pidfd: OwnedFd,
    since: Instant,
    verdict: V,
}

/// What is to be thought of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found<V> {
    /// As a moment ago.
    Known(V),
    /// It was looked at.
    New(V),
    /// The process at the other end is gone.
    Ended,
}

impl<V> Default for Verdicts<V> {
    fn default() -> Self {
        Verdicts { known: HashMap::new() }
    }
}

impl<V: Copy> Verdicts<V> {
    /// What is known of the process `pid` at the other end of `socket`, else what `look` finds.
    pub fn of(&mut self, socket: impl AsFd, pid: u32, look: impl FnOnce() -> V) -> Found<V> {
        if let Some(known) = self.known.get(&pid).filter(|k| k.since.elapsed() < LASTS && !has_ended(&k.pidfd)) {
            return Found::Known(known.verdict);
        }
        self.known.retain(|_, k| k.since.elapsed() < LASTS);
        // Held first: what is found afterwards is found of that process, or not at all.
        let pidfd = match pidfd_of(socket, pid) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH | Errno::INVAL) => return Found::Ended,
            // No descriptor is left: nothing is kept.
            Err(_) => return Found::New(look()),
        };
        let verdict = look();
        if has_ended(&pidfd) {
            return Found::Ended;
        }
        if self.known.len() >= MOST {
            self.known.clear();
        }
        self.known.insert(pid, Known { pidfd, since: Instant::now(), verdict });
        Found::New(verdict)
    }
}

fn pidfd_of(socket: impl AsFd, pid: u32) -> Result<OwnedFd, Errno> {
    match credentials::peer_pidfd(socket) {
        // Before Linux 6.5.
        Err(Errno::NOPROTOOPT) => {
            let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH)?;
            pidfd_open(number, PidfdFlags::empty())
        }
        found => found,
    }
}

fn has_ended(pidfd: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn a_process_is_looked_at_once_and_again_when_that_is_old() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let me = std::process::id();
        let mut verdicts = Verdicts::default();
        assert_eq!(verdicts.of(&ours, me, || 1), Found::New(1));
        assert_eq!(verdicts.of(&ours, me, || 2), Found::Known(1));
        verdicts.known.get_mut(&me).unwrap().since -= LASTS;
        assert_eq!(verdicts.of(&ours, me, || 3), Found::New(3));
    }

    #[test]
    fn a_number_of_a_process_that_has_ended_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let program = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); input()";
        let mut child = std::process::Command::new("python3")
            .args(["-c", program])
            .arg(&path)
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let (socket, _) = listener.accept().unwrap();
        let mut verdicts = Verdicts::default();
        assert_eq!(verdicts.of(&socket, child.id(), || ()), Found::New(()));
        assert_eq!(verdicts.of(&socket, child.id(), || ()), Found::Known(()));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(verdicts.of(&socket, child.id(), || ()), Found::Ended);
    }
}
