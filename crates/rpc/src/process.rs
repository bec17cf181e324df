//! Processes: which one this is after a fork, and whether the one at the other end of a socket still runs.
//!
//! What stands in shared memory, and the descriptors, are inherited by a forked child: it could answer its parent's calls, end its
//! connections and remove its names. So whoever holds such a thing remembers which process made it ([`here`]) and leaves it alone in another.
//!
//! A child also keeps open what its parent had open: a socket whose process was killed does not close while a child of its lives. So
//! the life of the other side is its socket *and* its process ([`life_of`]).

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
/// The number of this process: another one in a forked child.
pub(crate) use tombolo_shm::fork::process as here;

/// The process that made the other end of a connected socket. `None` where it is in a namespace that we do not see.
fn peer(socket: impl AsFd) -> Option<Pid> {
    let peer = sockopt::socket_peercred(socket).ok()?;
    Pid::from_raw(peer.pid.as_raw_nonzero().get())
}

/// A descriptor that becomes readable when the process at the other end of a socket ends. `None` where that cannot be told: then only
/// the socket tells.
pub(crate) fn life_of(socket: impl AsFd) -> Option<OwnedFd> {
    pidfd_open(peer(socket)?, PidfdFlags::empty()).ok()
}

/// Whether the process that made the other end of a socket has ended, and only its children keep the socket open.
pub(crate) fn has_ended(socket: impl AsFd) -> bool {
    let Some(pid) = peer(socket) else { return false };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Err(error) => error == Errno::SRCH,
        // A dead process that nobody has waited for.
        Ok(life) => poll(&mut [PollFd::new(&life, PollFlags::IN)], Some(&Timespec::default())) == Ok(1),
    }
}
