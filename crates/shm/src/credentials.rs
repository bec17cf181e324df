//! Who is at the other end of a Unix socket, beyond what rustix tells: the groups that it is a member of (SO_PEERGROUPS, socket(7)), as the
//! kernel saw them when it connected.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md): the C library has no wrapper.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

/// Groups at first; the kernel says where they are more, up to NGROUPS_MAX (65,536).
const USUAL: usize = 64;

/// The supplementary groups of the process at the other end.
///
/// # Errors
/// The kernel's; `ENODATA` where the other end has no credentials.
pub fn peer_groups(socket: impl AsFd) -> Result<Vec<u32>, Errno> {
    let mut groups = vec![0u32; USUAL];
    loop {
        let mut bytes = size_of_val(&groups[..]) as libc::socklen_t;
        let (fd, to) = (socket.as_fd().as_raw_fd(), groups.as_mut_ptr().cast());
        // SAFETY: `to` and `bytes` describe the vector's own initialised elements, which any bytes are valid for; the kernel writes at
        // most so many bytes, and sets `bytes` to what it wrote or would have written.
        let failed = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, to, &mut bytes) } != 0;
        let count = bytes as usize / size_of::<u32>();
        if !failed {
            groups.truncate(count);
            return Ok(groups);
        }
        match Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL) {
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
    fn the_groups_of_the_other_end_are_told() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let expected: Vec<u32> = rustix::process::getgroups().unwrap().iter().map(|g| g.as_raw()).collect();
        assert_eq!(peer_groups(&ours).unwrap(), expected);
        assert!(peer_groups(std::fs::File::open("/dev/null").unwrap()).is_err(), "no socket");
    }
}
