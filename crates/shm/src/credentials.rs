//! Who is at the other end of a Unix socket, as the kernel saw it when it connected or began to
//! listen: process, user and group (SO_PEERCRED), supplementary groups (SO_PEERGROUPS) and a
//! descriptor of the process itself (SO_PEERPIDFD, Linux 6.5). See unix(7) and socket(7).
//!
//! A process in a PID namespace that is not below ours has no number here: SO_PEERCRED says 0.
//! rustix cannot represent that 0 (its `Pid` is never 0, and the call comes back as a made-up
//! error), so everything in this project asks [`peer`] instead. SO_PEERPIDFD works across PID
//! namespaces.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md): the C library has
//! no wrapper.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::process::Pid;

/// Groups at first; the kernel says where they are more, up to NGROUPS_MAX (65,536).
const USUAL: usize = 64;

/// SO_PEERPIDFD of asm-generic/socket.h, which all architectures that we build for use.
const SO_PEERPIDFD: libc::c_int = 77;

/// The process at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its number here; `None` where it is in a PID namespace that we do not see into.
    pub pid: Option<Pid>,
    /// Effective user ID when it connected.
    pub uid: u32,
    /// Effective group ID when it connected.
    pub gid: u32,
}

impl Peer {
    /// The process number as the kernel writes it: 0 where it has none here.
    pub fn pid_or_zero(&self) -> u32 {
        self.pid.map_or(0, |pid| pid.as_raw_nonzero().get().cast_unsigned())
    }
}

/// The process at the other end of a socket.
///
/// # Errors
/// The kernel's; `ENOTSOCK` where it is no socket.
pub fn peer(socket: impl AsFd) -> Result<Peer, Errno> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut bytes = size_of_val(&found) as libc::socklen_t;
    let (fd, to) = (socket.as_fd().as_raw_fd(), std::ptr::from_mut(&mut found).cast());
    // SAFETY: `to` and `bytes` describe `found`, three integers that any bytes are valid for.
    let failed = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, to, &mut bytes) } != 0;
    if failed {
        return Err(last_error());
    }
    Ok(Peer { pid: Pid::from_raw(found.pid), uid: found.uid, gid: found.gid })
}

/// A descriptor of the process at the other end (pidfd), also where that has no number in our PID
/// namespace. It is readable when the process has ended.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 6.5; `EINVAL` or `ESRCH` where the process has ended and been waited
/// for.
pub fn peer_pidfd(socket: impl AsFd) -> Result<OwnedFd, Errno> {
    let mut found: libc::c_int = -1;
    let mut bytes = size_of_val(&found) as libc::socklen_t;
    let (fd, to) = (socket.as_fd().as_raw_fd(), std::ptr::from_mut(&mut found).cast());
    // SAFETY: `to` and `bytes` describe `found`, an integer that any bytes are valid for.
    let failed = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, SO_PEERPIDFD, to, &mut bytes) } != 0;
    if failed || found < 0 {
        return Err(if failed { last_error() } else { Errno::BADF });
    }
    // SAFETY: the kernel has just made this descriptor for us, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(found) })
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)
}

/// The supplementary groups of the process at the other end.
///
/// # Errors
/// The kernel's; `ENODATA` where the other end has no credentials.
pub fn peer_groups(socket: impl AsFd) -> Result<Vec<u32>, Errno> {
    let mut groups = vec![0u32; USUAL];
    loop {
        let mut bytes = size_of_val(&groups[..]) as libc::socklen_t;
        let (fd, to) = (socket.as_fd().as_raw_fd(), groups.as_mut_ptr().cast());
        // SAFETY: `to` and `bytes` describe the vector's own initialised elements, which any bytes
        // are valid for; the kernel writes at most so many bytes, and sets `bytes` to what it wrote
        // or would have written.
        let failed = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, to, &mut bytes) } != 0;
        let count = bytes as usize / size_of::<u32>();
        if !failed {
            groups.truncate(count);
            return Ok(groups);
        }
        match last_error() {
            Errno::RANGE if count > groups.len() => groups.resize(count, 0),
            error => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_process_at_the_other_end_is_told() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let peer = peer(&ours).unwrap();
        assert_eq!(peer.pid_or_zero(), std::process::id());
        assert_eq!((peer.uid, peer.gid), (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw()));
        assert_eq!(super::peer(std::fs::File::open("/dev/null").unwrap()), Err(Errno::NOTSOCK));
        match peer_pidfd(&ours) {
            Ok(_) | Err(Errno::NOPROTOOPT) => {}
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn the_groups_of_the_other_end_are_told() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let expected: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        assert_eq!(peer_groups(&ours).unwrap(), expected);
        assert!(peer_groups(std::fs::File::open("/dev/null").unwrap()).is_err(), "no socket");
    }
}
