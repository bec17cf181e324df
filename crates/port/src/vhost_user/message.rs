//! The frontend's messages, as they come from its socket.
//!
//! Descriptors that come with a message may lead to files whose `close` or `fstat` asks a server of
//! the frontend's own (FUSE), and the crate `vhost` closes what it does not expect. So messages are
//! read from the frontend's socket here. Their descriptors are checked without such a question
//! ([`tombolo_shm::foreign`]), and only harmless ones go on to the crate.
//!
//! Two things are changed on the way. A memory table that is longer than its number of regions says
//! is cut to that length, since user-mode Linux sends all entries of a table of fixed size. A
//! descriptor that comes with REM_MEM_REG is closed, as the specification allows.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use tombolo_shm::foreign::{self, ForeignFd, Kind};
use tombolo_shm::passing;
use vhost::vhost_user::{Error, Result};

use super::control::refused;

// VHOST_USER_* of the specification.
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;

// The header's fields, and its length (vhost-user specification, "Header"); each is a u32.
const REQUEST: usize = 0;
const FLAGS: usize = 4;
const SIZE: usize = 8;
const HEADER_BYTES: usize = 12;
/// The crate's limit, which no message of the specification reaches.
pub(super) const MAX_BODY_BYTES: u32 = 4096;
/// Most descriptors with a message: those of a memory table.
const MAX_DESCRIPTORS: usize = 32;
const MEMORY_TABLE_HEAD_BYTES: usize = 8;
const MEMORY_REGION_BYTES: usize = 32;

/// One message of the frontend's. Its descriptors are harmless.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) request: u32,
    pub(super) flags: u32,
    pub(super) body: Vec<u8>,
    pub(super) fds: Vec<OwnedFd>,
}

impl Message {
    /// Takes the next message off the frontend's socket; waits for it.
    pub(super) fn receive(mut frontend: &UnixStream) -> Result<Message> {
        let mut header = [0; HEADER_BYTES];
        let mut fds = Vec::new();
        let mut read = 0;
        while read < HEADER_BYTES {
            let got = match passing::receive(frontend, &mut header[read..], true) {
                Err(Errno::INTR) => continue,
                got => got.map_err(|error| Error::SocketBroken(error.into()))?,
            };
            fds.extend(got.fds);
            match got.bytes {
                0 if read == 0 => return Err(Error::Disconnected),
                0 => return Err(Error::PartialMessage),
                more => read += more,
            }
            if fds.len() > MAX_DESCRIPTORS || got.truncated {
                return Err(refused(format!("a message with more than {MAX_DESCRIPTORS} descriptors")));
            }
        }
        let [request, flags, bytes] = [REQUEST, FLAGS, SIZE].map(|at| word(&header, at));
        if bytes > MAX_BODY_BYTES {
            return Err(refused(format!(
                "request {request} is a message of {bytes} bytes, expected at most {MAX_BODY_BYTES}"
            )));
        }
        let mut body = vec![0; bytes as usize];
        // Descriptors that come with it are discarded by the kernel, since there is no room for
        // them.
        frontend.read_exact(&mut body).map_err(|_| Error::PartialMessage)?;
        if request == SET_MEM_TABLE && body.len() >= MEMORY_TABLE_HEAD_BYTES {
            let regions = word(&body, 0) as usize;
            let bytes = regions.saturating_mul(MEMORY_REGION_BYTES).saturating_add(MEMORY_TABLE_HEAD_BYTES);
            body.truncate(bytes);
        }
        let fds = harmless(request, fds)?;
        Ok(Message { request, flags, body, fds })
    }

    /// The bytes, with the header that fits them.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        for (at, value) in [(REQUEST, self.request), (FLAGS, self.flags), (SIZE, self.body.len() as u32)] {
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// The little-endian word at `at`, which lies inside `bytes`.
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The descriptors that `request` may have, where they are of the right kind. Others are closed
/// where that holds up nothing.
fn harmless(request: u32, fds: Vec<ForeignFd>) -> Result<Vec<OwnedFd>> {
    let (allowed, what, expected): (&[Kind], _, _) = match request {
        SET_MEM_TABLE | ADD_MEM_REG => (&[Kind::Memory], "the memory", "a memfd, or a file of tmpfs or hugetlbfs"),
        SET_VRING_KICK => (&[Kind::Eventfd], "the kick descriptor", "an eventfd"),
        SET_VRING_CALL => (&[Kind::Eventfd, Kind::Pipe], "the call descriptor", "an eventfd or a pipe"),
        SET_VRING_ERR => (&[Kind::Eventfd, Kind::Pipe], "the error descriptor", "an eventfd or a pipe"),
        REM_MEM_REG => return Ok(Vec::new()),
        _ => (&[], "a descriptor of this message", "no descriptor"),
    };
    if let Some(bad) = fds.iter().find(|fd| !allowed.contains(&fd.kind())) {
        return Err(refused(format!("request {request}: {what} is {}, expected {expected}", foreign::name(bad))));
    }
    Ok(fds.into_iter().map(ForeignFd::keep).collect())
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};
    use tombolo_shm::memory::sealed_region;
    use tombolo_testing::hex;

    use super::*;

    /// What QEMU 7.2 (Debian 1:7.2+dfsg-7+deb12u18) sent to a backend that recorded it, from a
    /// microvm of 64 MiB whose guest drives virtio-net: each kind of message once. With each, the
    /// kind of its descriptors and their number. The messages with 37 are of a second run, whose
    /// backend offered slots of memory.
    const QEMU: [(&str, Kind, usize); 16] = [
        ("01000000 01000000 00000000", Kind::Other, 0), // GET_FEATURES
        ("0f000000 01000000 00000000", Kind::Other, 0), // GET_PROTOCOL_FEATURES
        ("10000000 01000000 08000000 0980000000000000", Kind::Other, 0), // SET_PROTOCOL_FEATURES
        ("11000000 01000000 00000000", Kind::Other, 0), // GET_QUEUE_NUM
        ("24000000 01000000 00000000", Kind::Other, 0), // GET_MAX_MEM_SLOTS
        ("03000000 01000000 00000000", Kind::Other, 0), // SET_OWNER
        ("12000000 01000000 08000000 01000000 01000000", Kind::Other, 0), // SET_VRING_ENABLE
        ("02000000 01000000 08000000 0380006000000000", Kind::Other, 0), // SET_FEATURES
        // SET_MEM_TABLE: the number of regions and padding; of each the guest's address, its size,
        // the frontend's address and the offset in the file.
        (
            "05000000 01000000 48000000 02000000 00000000
            0000000000000000 00000f0000000000 0000f0ff2f407f00 0000000000000000
            0000100000000000 0000f00300000000 00f00f30407f0000 0000100000000000",
            Kind::Memory,
            2,
        ),
        // ADD_MEM_REG, with NEED_REPLY: padding, and a region.
        (
            "25000000 09000000 28000000 0000000000000000
            0000100000000000 0000f00300000000 00f00f680f7f0000 0000100000000000",
            Kind::Memory,
            1,
        ),
        ("08000000 01000000 08000000 01000000 00020000", Kind::Other, 0), // SET_VRING_NUM
        ("0a000000 01000000 08000000 01000000 00000000", Kind::Other, 0), // SET_VRING_BASE
        // SET_VRING_ADDR: index and flags, descriptors, used, available, log.
        (
            "09000000 01000000 28000000 01000000 00000000
            00601b30407f0000 80841b30407f0000 00801b30407f0000 80941b0000000000",
            Kind::Other,
            0,
        ),
        ("0c000000 01000000 08000000 0100000000000000", Kind::Eventfd, 1), // SET_VRING_KICK
        ("0d000000 01000000 08000000 0100000000000000", Kind::Eventfd, 1), // SET_VRING_CALL
        ("0b000000 01000000 08000000 01000000 00000000", Kind::Other, 0),  // GET_VRING_BASE
    ];

    /// What `receive` makes of a connection over which these bytes came before its end.
    fn received(bytes: &[u8], kind: Kind, descriptors: usize) -> Result<Message> {
        let (frontend, ours) = UnixStream::pair().unwrap();
        let make = |_| match kind {
            Kind::Memory => sealed_region("test", 4096).unwrap(),
            _ => eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        };
        let fds: Vec<OwnedFd> = (0..descriptors).map(make).collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        if !bytes.is_empty() {
            assert_eq!(passing::send(&frontend, bytes, &fds, true), Ok(bytes.len()));
        }
        frontend.shutdown(Shutdown::Write).unwrap();
        Message::receive(&ours)
    }

    #[test]
    fn what_qemu_sends_is_read_and_goes_on_as_the_same_bytes() {
        for (text, kind, descriptors) in QEMU {
            let golden = hex(text);
            let message = received(&golden, kind, descriptors).unwrap();
            assert_eq!((message.request, message.fds.len()), (golden[0].into(), descriptors));
            assert_eq!(message.flags, u32::from(golden[4]), "request {}", message.request);
            assert_eq!(message.body, golden[12..], "request {}", message.request);
            assert_eq!(message.bytes(), golden);
        }
    }

    #[test]
    fn a_message_that_ends_early_is_a_partial_one() {
        for (text, kind, descriptors) in QEMU {
            let golden = hex(text);
            assert!(matches!(received(&[], kind, 0), Err(Error::Disconnected)));
            for len in 1..golden.len() {
                let error = received(&golden[..len], kind, descriptors).unwrap_err();
                assert!(matches!(error, Error::PartialMessage), "request {}, {len} bytes: {error}", golden[0]);
            }
        }
    }

    #[test]
    fn a_descriptor_of_another_kind_or_with_another_message_is_refused() {
        for (text, kind, descriptors) in QEMU {
            let golden = hex(text);
            let other = if kind == Kind::Memory { Kind::Eventfd } else { Kind::Memory };
            let error = received(&golden, other, descriptors.max(1)).unwrap_err().to_string();
            assert!(error.contains(&format!("request {}: ", golden[0])) && error.contains("expected"), "{error}");
        }
    }
}
