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
        let [request, flags, bytes] = [0, 4, 8].map(|at| word(&header, at));
        if bytes > MAX_BODY_BYTES {
            return Err(refused(format!(
                "request {request} is a message of {bytes} bytes, expected at most {MAX_BODY_BYTES}"
            )));
        }
        let mut body = vec![0; bytes as usize];
        // Descriptors that come with it are discarded by the kernel, since there is no room for them.
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
        let words = [self.request, self.flags, self.body.len() as u32];
        let header = words.into_iter().flat_map(u32::to_le_bytes);
        header.chain(self.body.iter().copied()).collect()
    }
}

/// The little-endian word at `at`, which lies inside `bytes`.
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The descriptors that `request` may have, where they are of the right kind. Others are closed where that holds up nothing.
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
