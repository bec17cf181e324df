//! A process as a peer of a link: it connects to the link's server as QEMU does, maps the region,
//! and has frames ([`Joined::network`]) or records ([`Joined::channel`]).
//!
//! ```no_run
//! use std::time::Duration;
//! use tombolo_ivshmem::client::Joined;
//!
//! let mut link = Joined::connect("/run/…/control.sock", Duration::from_secs(5))?.network()?;
//! while !link.step()? {
//!     link.wait(Duration::from_millis(100))?;
//! }
//! link.peer().send(&[0xff; 60])?;
//! link.peer().flush();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The messages are those of ivshmem version 1 ([`crate::v1`]). The region begins
//! with our header page, which is checked like that of an untrusted peer. When the server ends, the
//! link stays as it is: region and doorbells outlive it. Only joins and leaves are no longer
//! reported ([`JoinedLink::server_is_gone`]).
//!
//! No thread; nothing blocks except `connect` and `wait`, both up to the time given.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::v1::{self, News};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tombolo_ring::ivshmem::channel::Shape;
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::region::{Header, RegionError};
use tombolo_ring::ivshmem::state::Offloads;
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::foreign::ForeignFd;
use tombolo_shm::guest::GuestMapping;
use tombolo_shm::memory::{Mapping, MemoryError, cannot_shrink, expect_memory};
use tombolo_shm::passing;

use super::channel::ChannelPeer;
use super::doorbells::OwnDoorbells;
use super::end::{EndError, EventDoorbells, LinkEnd, Memory, PeerDoorbells};
use super::peer::NetPeer;
use super::raw::{Clear, RawPeer};

/// Why a link could not be joined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum JoinError {
    /// The socket.
    #[error("the ivshmem server's socket {path}: {source}")]
    Connect { path: PathBuf, source: io::Error },
    /// The conversation's socket failed.
    #[error("reading from the ivshmem server: {0}")]
    Socket(Errno),
    /// The server ended the conversation before it had said all.
    #[error("the ivshmem server closed the connection before the handshake: does the link have a free peer ID?")]
    Closed,
    /// The server said something else.
    #[error("the ivshmem server: {0}")]
    Protocol(v1::ReadError),
    /// The server did not say all in time.
    #[error("the ivshmem server did not greet within {waited:?}")]
    Timeout {
        /// How long was waited.
        waited: Duration,
    },
    /// The region cannot be mapped.
    #[error("the link's region: {0}")]
    Memory(MemoryError),
    /// The region's header page.
    #[error("the link's region: {0}")]
    Header(RegionError),
    /// A region of other use.
    #[error("link `{name}` has protocol {got:#x}, expected {expected}")]
    Protocols { name: String, got: u32, expected: &'static str },
    /// Ids, sections or shape do not fit.
    #[error(transparent)]
    End(#[from] EndError),
}

/// What was heard of a peer, in this order.
#[derive(Clone, Copy, Debug, Default)]
struct Heard {
    left: bool,
    /// With all of its vectors.
    joined: bool,
}

/// The conversation with the server.
struct Server {
    socket: OwnedFd,
    client: v1::Client,
    /// Bytes of a message that came in part.
    partial: Vec<u8>,
    fds: Vec<ForeignFd>,
    gone: bool,
}

impl Server {
    /// Takes what the server has said, without waiting; returns what of that is about `watched`.
    fn take(&mut self, watched: Option<(u32, u32)>) -> Result<Heard, JoinError> {
        let mut heard = Heard::default();
        while !self.gone {
            let mut buffer = [0; v1::MESSAGE_BYTES];
            let want = v1::MESSAGE_BYTES - self.partial.len();
            let received = match passing::receive(&self.socket, &mut buffer[..want], false) {
                Ok(received) => received,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => continue,
                Err(Errno::CONNRESET) => {
                    self.gone = true;
                    break;
                }
                Err(errno) => return Err(JoinError::Socket(errno)),
            };
            if received.bytes == 0 {
                self.gone = true;
                break;
            }
            self.partial.extend_from_slice(&buffer[..received.bytes]);
            self.fds.extend(received.fds);
            if let Ok(bytes) = <[u8; v1::MESSAGE_BYTES]>::try_from(&self.partial[..]) {
                self.partial.clear();
                let news = self.client.take(bytes, std::mem::take(&mut self.fds)).map_err(JoinError::Protocol)?;
                match (news, watched) {
                    (News::Gone { peer }, Some((watched, _))) if peer == watched => {
                        heard = Heard { left: true, joined: false };
                    }
                    (News::Vector { peer, vector }, Some((watched, vectors))) if peer == watched => {
                        heard.joined |= vector as u64 + 1 == u64::from(vectors);
                    }
                    _ => {}
                }
            }
        }
        Ok(heard)
    }

    /// What rings `peer`, once all of its vectors are known.
    fn doorbells(&self, peer: u32, vectors: u32) -> Option<Box<dyn PeerDoorbells>> {
        let doorbells =
            self.client.peers().get(&peer).filter(|doorbells| doorbells.len() as u64 >= u64::from(vectors))?;
        // Duplicates, since the conversation keeps its own. Without a descriptor left the peer is
        // as good as absent.
        duplicates(doorbells).ok().map(|doorbells| Box::new(EventDoorbells::from(doorbells)) as Box<dyn PeerDoorbells>)
    }
}

fn duplicates(doorbells: &[Doorbell]) -> Result<Vec<Doorbell>, Errno> {
    doorbells.iter().map(|doorbell| Doorbell::adopt(rustix::io::fcntl_dupfd_cloexec(doorbell.as_fd(), 3)?)).collect()
}

/// A seat on a link: the server has greeted, the region is mapped, and its header judged.
pub struct Joined {
    server: Server,
    header: Header,
    memory: Memory,
    id: u32,
}

impl Joined {
    /// Connects to the server that listens at `path`, and takes its greeting, for up to `timeout`.
    ///
    /// # Errors
    /// [`JoinError`].
    pub fn connect(path: impl AsRef<Path>, timeout: Duration) -> Result<Joined, JoinError> {
        let path = path.as_ref();
        let socket = UnixStream::connect(path);
        let socket = socket.map_err(|source| JoinError::Connect { path: path.to_owned(), source })?;
        Joined::on(socket.into(), timeout)
    }

    /// As [`Joined::connect`], on a socket that is connected.
    ///
    /// # Errors
    /// [`JoinError`].
    pub fn on(socket: OwnedFd, timeout: Duration) -> Result<Joined, JoinError> {
        let end = Instant::now() + timeout;
        let client = v1::Client::new();
        let mut server = Server { socket, client, partial: Vec::new(), fds: Vec::new(), gone: false };
        let mut mapped: Option<(Memory, Header)> = None;
        loop {
            server.take(None)?;
            if let (None, Some(fd)) = (&mapped, server.client.memory()) {
                let memory = map(fd).map_err(JoinError::Memory)?;
                let header = Header::read(memory.bytes().as_foreign()).map_err(JoinError::Header)?;
                mapped = Some((memory, header));
            }
            let own = server.client.own().len() as u64;
            match (mapped, server.client.id()) {
                // Own vectors come last.
                (Some((memory, header)), Some(id)) if own >= u64::from(header.vectors) => {
                    return Ok(Joined { server, header, memory, id });
                }
                (not_yet, _) => mapped = not_yet,
            }
            if server.gone {
                return Err(JoinError::Closed);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(JoinError::Timeout { waited: timeout });
            }
            let mut fds = [PollFd::new(&server.socket, PollFlags::IN)];
            // An interrupted wait looks again.
            let _ = poll(&mut fds, Timespec::try_from(left).ok().as_ref());
        }
    }

    /// What the region's header page says.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// This client's own peer ID.
    pub fn id(&self) -> u32 {
        self.id
    }

    fn start<P>(
        self,
        peer_id: u32,
        make: impl FnOnce(LinkEnd) -> Result<P, EndError>,
    ) -> Result<JoinedLink<P>, JoinError> {
        let Joined { server, header, memory, id } = self;
        let vectors = header.vectors;
        let doorbells = server.doorbells(peer_id, vectors).filter(|_| vectors != 0);
        let own = server.client.own();
        let own = &own[..own.len().min(vectors as usize)];
        let parts = LinkEnd {
            memory,
            layout: header.layout,
            own_id: id,
            peer_id,
            vectors,
            doorbells: duplicates(own).map_err(JoinError::Socket)?,
            peer_present: vectors == 0 || doorbells.is_some(),
            peer_doorbells: doorbells,
            owns_region: false,
            mtu: header.mtu().into(),
            offloads: Offloads::None,
        };
        Ok(JoinedLink { server, header, peer: make(parts)?, peer_id })
    }

    fn expect(&self, is: bool, expected: &'static str) -> Result<(), JoinError> {
        let Header { name, protocol, .. } = &self.header;
        let refused = || JoinError::Protocols { name: name.as_str().to_owned(), got: *protocol, expected };
        if is { Ok(()) } else { Err(refused()) }
    }

    /// Takes the seat on a network link, whose other peer is the fabric or a guest.
    ///
    /// # Errors
    /// [`JoinError::Protocols`] where it is no network link, [`JoinError::End`] where it is not one
    /// of two peers.
    pub fn network(self) -> Result<JoinedLink<NetPeer>, JoinError> {
        self.expect(self.header.protocol == protocol::NETWORK, "1, a network link")?;
        let peer = 1u32.wrapping_sub(self.id);
        self.start(peer, NetPeer::new)
    }

    /// Takes the seat on a link of records, with `peer` as the other end and both sections cut by
    /// `shape`.
    ///
    /// # Errors
    /// [`JoinError::Protocols`] where the link is of no user's protocol, [`JoinError::End`] where
    /// ids or shape do not fit.
    pub fn channel(self, peer: u32, shape: Shape) -> Result<JoinedLink<ChannelPeer>, JoinError> {
        let users = protocol::USER_FIRST..=protocol::USER_LAST;
        self.expect(users.contains(&self.header.protocol), "0x4000 to 0x7fff, a link for users' own protocols")?;
        self.start(peer, |parts| ChannelPeer::new(parts, shape))
    }

    /// Takes the seat on a link whose protocol is spoken by the caller, with `peer` as the other
    /// end. `clear` makes the own output section fresh, each time that the link comes up.
    ///
    /// # Errors
    /// [`JoinError::Protocols`] where the link is not of `protocol`, which is `named` so in the
    /// error; [`JoinError::End`] where the ids do not fit.
    pub fn raw(
        self,
        peer: u32,
        protocol: u32,
        named: &'static str,
        clear: Clear,
    ) -> Result<JoinedLink<RawPeer>, JoinError> {
        self.expect(self.header.protocol == protocol, named)?;
        self.start(peer, |parts| RawPeer::new(parts, clear))
    }
}

/// Maps all of a region: one that could shrink is watched for that.
fn map(fd: &OwnedFd) -> Result<Memory, MemoryError> {
    expect_memory(fd)?;
    let stat = rustix::fs::fstat(fd).map_err(|source| MemoryError::System { what: "fstat", bytes: 0, source })?;
    let bytes = u64::try_from(stat.st_size).unwrap_or(0);
    if cannot_shrink(fd) {
        Mapping::new(fd, 0, bytes, true).map(Memory::from)
    } else {
        GuestMapping::new(fd, 0, bytes).map(Memory::from)
    }
}

/// What a link's peer is told of the other one.
pub trait Meets {
    /// The other one is there, rung by `doorbells` from now on.
    fn joined(&mut self, doorbells: Option<Box<dyn PeerDoorbells>>);
    /// The other one is gone.
    fn left(&mut self);
    /// Follows the other's state; returns whether the link is up.
    fn follow(&mut self) -> bool;
    /// Those that the other rings.
    fn doorbells(&self) -> &OwnDoorbells;
    /// Waits for the other, or for `server` to be readable.
    fn wait_for(&mut self, timeout: Duration, server: Option<&OwnedFd>) -> bool;
}

macro_rules! meets {
    ($peer:ty) => {
        impl Meets for $peer {
            fn joined(&mut self, doorbells: Option<Box<dyn PeerDoorbells>>) {
                self.peer_joined(doorbells);
            }
            fn left(&mut self) {
                self.peer_left();
            }
            fn follow(&mut self) -> bool {
                self.step()
            }
            fn doorbells(&self) -> &OwnDoorbells {
                &self.doorbells
            }
            fn wait_for(&mut self, timeout: Duration, server: Option<&OwnedFd>) -> bool {
                self.wait_with(timeout, server.map(AsFd::as_fd))
            }
        }
    };
}

meets!(NetPeer);
meets!(ChannelPeer);
meets!(RawPeer);

/// A link that was joined: its end, and the conversation with its server.
pub struct JoinedLink<P> {
    server: Server,
    header: Header,
    peer: P,
    peer_id: u32,
}

impl<P: Meets> JoinedLink<P> {
    /// Hears what the server has said and follows the other peer's state. Returns whether the link
    /// is up.
    ///
    /// # Errors
    /// [`JoinError`] of the conversation; the link itself may go on.
    pub fn step(&mut self) -> Result<bool, JoinError> {
        let heard = self.server.take(Some((self.peer_id, self.header.vectors)))?;
        if heard.left {
            self.peer.left();
            if self.header.vectors == 0 {
                // The arrival of the next one is not reported; its state word shows it.
                self.peer.joined(None);
            }
        }
        if heard.joined {
            self.peer.joined(self.server.doorbells(self.peer_id, self.header.vectors));
        }
        Ok(self.peer.follow())
    }

    /// The end, for frames or records.
    pub fn peer(&mut self) -> &mut P {
        &mut self.peer
    }

    /// The end, to look at.
    pub fn peer_ref(&self) -> &P {
        &self.peer
    }

    /// What the region's header page says.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Whether the server has ended the conversation. The link goes on.
    pub fn server_is_gone(&self) -> bool {
        self.server.gone
    }

    /// Our doorbells and the server's socket, for a thread that waits while others use the link.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn wakers(&self) -> Result<(OwnDoorbells, OwnedFd), JoinError> {
        let socket = rustix::io::fcntl_dupfd_cloexec(&self.server.socket, 3).map_err(JoinError::Socket)?;
        Ok((self.peer.doorbells().duplicate().map_err(JoinError::Socket)?, socket))
    }

    /// Waits until the other peer or the server says something, or `timeout` has passed; then does
    /// as [`JoinedLink::step`].
    ///
    /// # Errors
    /// As for [`JoinedLink::step`].
    pub fn wait(&mut self, timeout: Duration) -> Result<bool, JoinError> {
        let server = (!self.server.gone).then_some(&self.server.socket);
        self.peer.wait_for(timeout, server);
        self.step()
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
