//! The processes that this daemon runs for its fabric: machines (QEMU) and helpers (passt), started or adopted.
//!
//! # Purpose
//! They run as the daemon's user, so a guest that has taken its QEMU over could connect to the sockets that are for the
//! owner: the API, the handover, and the fd store. A peer that is a member, or descends from one, is refused there.
//! Members are known by number and start time, and not by their command lines, which a process can change.
//!
//! # Limits
//! A process descends from its member only for as long as its parents live. QEMU's own sandbox lets it start none.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use tombolo_shm::lineage;

static MEMBERS: Mutex<BTreeSet<(u32, u64)>> = Mutex::new(BTreeSet::new());

/// Takes note of a member. Those that have ended are forgotten.
pub(crate) fn note(pid: u32) {
    let Some(ticks) = lineage::start_ticks(pid) else { return };
    let mut members = MEMBERS.lock().unwrap_or_else(PoisonError::into_inner);
    members.retain(|(pid, ticks)| lineage::start_ticks(*pid) == Some(*ticks));
    members.insert((pid, ticks));
}

/// All members, with their start times.
pub(crate) fn all() -> Vec<(u32, u64)> {
    MEMBERS.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
}

/// The member that a peer is or descends from. A peer without a number here (another PID namespace) is none.
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
