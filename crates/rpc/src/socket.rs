//! Packets with descriptors on a connection's socket.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tombolo_shm::foreign::{self, ForeignFd};
use tombolo_shm::passing;

use crate::message::{MAX_BYTES, Malformed, Message};

/// Most descriptors that go with a message.
const MAX_FDS: usize = 2;

/// What came from a socket.
#[derive(Debug)]
pub(crate) enum Received {
    Message(Message, Vec<ForeignFd>),
    /// A packet that is none.
    Malformed(Malformed),
    /// The other side has closed the connection, or died.
    Gone,
    /// Nothing now.
    Nothing,
}

/// Sends a message. Does not block where `wait` is false; then `EAGAIN` says that the other side
/// does not read.
pub(crate) fn send(socket: impl AsFd, message: &Message, fds: &[BorrowedFd<'_>], wait: bool) -> Result<(), Errno> {
    let bytes = message.encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    let flags = SendFlags::NOSIGNAL | if wait { SendFlags::empty() } else { SendFlags::DONTWAIT };
    sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags).map(|_| ())
}

/// Receives a message; waits for it, as long as the socket's own time limit says, where `wait` is
/// set.
pub(crate) fn receive(socket: impl AsFd, wait: bool) -> Received {
    let mut bytes = vec![0; MAX_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    // Without room the kernel discards descriptors, and the message comes without them.
    let room = if foreign::has_room(&socket) { &mut space[..] } else { &mut [] };
    let mut control = RecvAncillaryBuffer::new(room);
    let flags = RecvFlags::CMSG_CLOEXEC | if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
    let mut reset = false;
    let got = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            // The other side closed without reading what we sent. That is said once; what it sent
            // before comes after it.
            Err(Errno::CONNRESET) if !reset => reset = true,
            got => break got,
        }
    };
    let len = match got {
        Ok(got) if got.bytes == 0 => return Received::Gone,
        Ok(got) => got.bytes,
        Err(Errno::AGAIN) => return Received::Nothing,
        Err(_) => return Received::Gone,
    };
    let fds = passing::descriptors(&socket, &mut control);
    match Message::parse(&bytes[..len.min(MAX_BYTES)]) {
        Ok(message) => Received::Message(message, fds),
        Err(malformed) => Received::Malformed(malformed),
    }
}
