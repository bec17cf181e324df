//! Descriptors that go through a Unix socket with a message (SCM_RIGHTS, unix(7)).
//!
//! A received descriptor is close-on-exec from the instant it arrives. Descriptors that come with a
//! message for which they are too many are closed, and the caller is told: a peer that sends more
//! than its protocol has broken it. So is one whose user has too many descriptors waiting to be
//! closed ([`crate::foreign`]): the kernel discards those.

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use crate::foreign::{self, ForeignFd};

/// Most descriptors with one message; the kernel allows 253.
pub const MAX_DESCRIPTORS: usize = 64;

/// Sends `bytes` with `fds`, and never raises SIGPIPE. Without `wait` it does not block (`EAGAIN`).
///
/// # Errors
/// The kernel's; `ETOOMANYREFS` where too many descriptors are on their way; `E2BIG` for more than
/// [`MAX_DESCRIPTORS`].
pub fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>], wait: bool) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    // The space is rounded up and may hold one more.
    if fds.len() > MAX_DESCRIPTORS || (!fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds))) {
        return Err(Errno::TOOBIG);
    }
    let flags = if wait { SendFlags::NOSIGNAL } else { SendFlags::NOSIGNAL | SendFlags::DONTWAIT };
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)
}

/// What came with one call of [`receive`].
#[derive(Debug)]
pub struct Received {
    /// Bytes written into the buffer; 0 at the end of a stream.
    pub bytes: usize,
    /// The descriptors, in the order in which they were sent.
    pub fds: Vec<ForeignFd>,
    /// Bytes or descriptors were cut off, since there was no room for them.
    pub truncated: bool,
}

/// Receives into `buffer`. Without `wait` it does not block (`EAGAIN`).
///
/// # Errors
/// The kernel's.
pub fn receive(socket: impl AsFd, buffer: &mut [u8], wait: bool) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let room = if foreign::has_room(&socket) { &mut space[..] } else { &mut [] };
    let mut control = RecvAncillaryBuffer::new(room);
    let flags = if wait { RecvFlags::CMSG_CLOEXEC } else { RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT };
    let got = recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    let fds = descriptors(&socket, &mut control);
    let truncated = got.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC);
    Ok(Received { bytes: got.bytes, fds, truncated })
}

/// The descriptors that came with a message, which the process at the other end of `socket` sent.
pub fn descriptors(socket: impl AsFd, control: &mut RecvAncillaryBuffer<'_>) -> Vec<ForeignFd> {
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            fds.extend(more.map(|fd| ForeignFd::new(fd, foreign::user_of(&socket))));
        }
    }
    fds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doorbell::Doorbell;
    use std::os::fd::OwnedFd;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    fn pair(kind: SocketType) -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn descriptors_arrive_with_their_message_and_in_order() {
        let (a, b) = pair(SocketType::SEQPACKET);
        let doorbells = [Doorbell::new().unwrap(), Doorbell::new().unwrap()];
        assert_eq!(send(&a, b"two", &[doorbells[0].as_fd(), doorbells[1].as_fd()], false), Ok(3));
        assert_eq!(send(&a, b"none", &[], false), Ok(4));
        let mut buffer = [0; 16];
        let got = receive(&b, &mut buffer, false).unwrap();
        assert_eq!((got.bytes, got.fds.len(), got.truncated), (3, 2, false));
        doorbells[1].ring();
        let mut arrived = got.fds.into_iter().map(|fd| Doorbell::adopt(fd).unwrap());
        assert!(!arrived.next().unwrap().take() && arrived.next().unwrap().take());
        let got = receive(&b, &mut buffer, false).unwrap();
        assert_eq!((&buffer[..got.bytes], got.fds.len()), (&b"none"[..], 0));
        assert_eq!(receive(&b, &mut buffer, false).err(), Some(Errno::AGAIN));
    }

    #[test]
    fn too_much_is_told_on_both_sides() {
        let (a, b) = pair(SocketType::SEQPACKET);
        let doorbell = Doorbell::new().unwrap();
        assert_eq!(send(&a, b"x", &[doorbell.as_fd(); MAX_DESCRIPTORS + 1], false), Err(Errno::TOOBIG));
        send(&a, b"longer than its room", &[doorbell.as_fd(); MAX_DESCRIPTORS], false).unwrap();
        let got = receive(&b, &mut [0; 4], false).unwrap();
        assert!(got.truncated && got.fds.len() == MAX_DESCRIPTORS);
    }
}
