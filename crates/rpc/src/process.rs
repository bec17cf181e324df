//! Processes: which one this is after a fork, and whether the one at the other end of a socket
//! still runs.
//!
//! A forked child inherits the shared memory and the descriptors. It could answer its parent's
//! calls, end its connections and remove its names. So the holder of such a thing remembers which
//! process made it ([`here`]), and leaves it alone in another.
//!
//! A child also keeps open what its parent had open: a socket whose process was killed does not
//! close while a child of that process lives. So the life of the other side is its socket *and* its
//! process ([`pidfd_of`]).

//!
//! The process is known by a descriptor that the socket gives (SO_PEERPIDFD, Linux 6.5), which
//! holds across PID namespaces. Before that it is known by its number; across PID namespaces there
//! is none (it is 0), and the socket alone tells.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};
use tombolo_shm::credentials;
/// The number of this process: another one in a forked child.
pub(crate) use tombolo_shm::fork::process as here;

/// A descriptor of the process at the other end of a connected socket. `Ok(None)` where that cannot
/// be told.
fn pidfd(socket: impl AsFd) -> Result<Option<OwnedFd>, Errno> {
    match credentials::peer_pidfd(&socket) {
        Ok(life) => Ok(Some(life)),
        // How kernels say that it has ended and been waited for: 6.5 the former, later ones the
        // latter.
        Err(Errno::INVAL | Errno::SRCH) => Err(Errno::SRCH),
        Err(_) => match credentials::peer(&socket).ok().and_then(|peer| peer.pid) {
            Some(pid) => pidfd_open(pid, PidfdFlags::empty()).map(Some),
            None => Ok(None),
        },
    }
}

/// A descriptor that becomes readable when the process at the other end of a socket ends. `None`
/// where that cannot be told: then only the socket tells.
pub(crate) fn pidfd_of(socket: impl AsFd) -> Option<OwnedFd> {
    pidfd(socket).ok().flatten()
}

/// Whether the process that made the other end of a socket has ended, and only its children keep
/// the socket open.
pub(crate) fn has_ended(socket: impl AsFd) -> bool {
    match pidfd(socket) {
        Err(error) => error == Errno::SRCH,
        Ok(None) => false,
        // A dead process that was not waited for yet is readable too.
        Ok(Some(life)) => poll(&mut [PollFd::new(&life, PollFlags::IN)], Some(&Timespec::default())) == Ok(1),
    }
}
