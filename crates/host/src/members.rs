//! The processes that this daemon runs for its fabric: machines (QEMU) and helpers (passt), started
//! or adopted.
//!
//! # Purpose
//! They run as the daemon's user, so a guest that has taken its QEMU over could connect to the
//! sockets that are for the owner: the API, the handover, and the fd store. A peer that is a
//! member, or descends from one, is refused there. Members are known by number and start time, and
//! not by their command lines, which a process can change.
//!
//! A guest may connect as often as it likes. What was found out about a process holds for a second
//! ([`Peers`]), so a refusal costs three system calls, and not a walk through /proc.
//!
//! # Limits
//! A process descends from its member only for as long as its parents live. QEMU's own sandbox lets
//! it start none.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tombolo_shm::verdicts::{Found, Verdicts};
use tombolo_shm::{credentials, lineage};

static MEMBERS: Mutex<BTreeSet<(u32, u64)>> = Mutex::new(BTreeSet::new());
/// Grows with each member, so that what was found out before holds no more.
static NOTED: AtomicU64 = AtomicU64::new(0);

/// Takes note of a member, and gives its start time, in clock ticks after boot; `None` if it has
/// ended. Those that have ended are forgotten.
pub(crate) fn note(pid: u32) -> Option<u64> {
    let ticks = lineage::start_ticks(pid)?;
    let mut members = MEMBERS.lock().unwrap_or_else(PoisonError::into_inner);
    members.retain(|(pid, ticks)| lineage::start_ticks(*pid) == Some(*ticks));
    members.insert((pid, ticks));
    // Relaxed: the lock orders it for those that look at the members, and a connection that is
    // looked at meanwhile may be from before or after.
    NOTED.fetch_add(1, Ordering::Relaxed);
    Some(ticks)
}

/// The process at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Its number, 0 where it has none here (another PID namespace).
    pub(crate) pid: u32,
    /// Its user; `u32::MAX` if the kernel does not tell.
    pub(crate) uid: u32,
    /// Its start time, in clock ticks after boot.
    pub(crate) ticks: Option<u64>,
    /// The member that it is or descends from.
    pub(crate) member: Option<u32>,
    /// It connected a moment ago already.
    pub(crate) is_known: bool,
}

/// What is known of the processes that connect to one socket.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    verdicts: Verdicts<(Option<u64>, Option<u32>)>,
    noted: u64,
}

impl Peers {
    /// The process at the other end; `None` if it has ended.
    pub(crate) fn look(&mut self, socket: impl AsFd) -> Option<Peer> {
        let noted = NOTED.load(Ordering::Relaxed);
        if std::mem::replace(&mut self.noted, noted) != noted {
            self.verdicts = Verdicts::default();
        }
        let peer = credentials::peer(&socket).ok();
        let uid = peer.map_or(u32::MAX, |peer| peer.uid);
        let pid = peer.map_or(0, |peer| peer.pid_or_zero());
        if pid == 0 {
            return Some(Peer { pid, uid, ticks: None, member: None, is_known: false });
        }
        let look = || (lineage::start_ticks(pid), member_of(i32::try_from(pid).ok()));
        let ((ticks, member), is_known) = match self.verdicts.of(socket, pid, look) {
            Found::Known(verdict) => (verdict, true),
            Found::New(verdict) => (verdict, false),
            Found::Ended => return None,
        };
        Some(Peer { pid, uid, ticks, member, is_known })
    }
}

/// All members, with their start times.
pub(crate) fn all() -> Vec<(u32, u64)> {
    MEMBERS.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
}

/// The member that a peer is or descends from. A peer without a number here (another PID namespace)
/// is none.
pub(crate) fn member_of(peer: Option<i32>) -> Option<u32> {
    let members = all();
    let pid = u32::try_from(peer?).ok()?;
    lineage::of(pid).find(|process| members.contains(process)).map(|(pid, _)| pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_and_what_it_starts_are_members_and_its_parent_is_not() {
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sh -c 'echo $$; read x'; :"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
        let grandchild: i32 = line.trim().parse().unwrap();
        assert_eq!(member_of(Some(grandchild)), None);
        note(child.id());
        assert_eq!(member_of(Some(grandchild)), Some(child.id()));
        assert_eq!(member_of(Some(child.id() as i32)), Some(child.id()));
        assert_eq!(member_of(Some(std::process::id() as i32)), None);
        assert_eq!(member_of(None), None);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(member_of(Some(child.id() as i32)), None);
    }
}
