//! One end of a link: the parts that it is made of ([`LinkEnd`]), and the end of a network link,
//! which has the handshake and both queue ends ([`NetworkEnd`]).
//!
//! The switch's port and the library for processes ([`peer`](crate::peer)) are thin shells around
//! it. It belongs to one thread.

use std::fmt;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use tombolo_ring::ivshmem::channel::ChannelError;
use tombolo_ring::ivshmem::net::{self, Geometry, NetError, Receiver, Sections, Sender};
use tombolo_ring::ivshmem::region::{Layout, RegionError};
use tombolo_ring::ivshmem::state::{Duty, Offloads};
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::virtio::Backing;
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::guest::GuestMapping;
use tombolo_shm::memory::Mapping;

use super::handshake::Handshake;

/// How a peer is rung: by its eventfds where we are a process ([`EventDoorbells`]), by a register
/// of the device where we are inside a guest.
pub trait PeerDoorbells: Send {
    /// Rings `vector` of `peer`. Stores made before are visible to the peer when it is woken. Must
    /// not block.
    fn ring(&self, peer: u32, vector: u16);
}

/// The eventfds of one peer, by vector.
#[derive(Debug)]
pub struct EventDoorbells(Vec<Doorbell>);

impl EventDoorbells {
    /// The eventfds that a server handed over.
    ///
    /// # Errors
    /// `EINVAL` for a descriptor that is no eventfd, else the kernel's.
    pub fn adopt(fds: impl IntoIterator<Item = OwnedFd>) -> Result<EventDoorbells, Errno> {
        fds.into_iter().map(Doorbell::adopt).collect::<Result<_, _>>().map(EventDoorbells)
    }
}

impl From<Vec<Doorbell>> for EventDoorbells {
    fn from(doorbells: Vec<Doorbell>) -> EventDoorbells {
        EventDoorbells(doorbells)
    }
}

impl PeerDoorbells for EventDoorbells {
    fn ring(&self, _peer: u32, vector: u16) {
        if let Some(doorbell) = self.0.get(usize::from(vector)) {
            doorbell.ring();
        }
    }
}

/// The mapped region of a link.
#[derive(Debug)]
pub enum Memory {
    /// A region that cannot shrink: a sealed memfd, or a device's memory inside a guest. Mapped for
    /// writing.
    Mapped(Mapping),
    /// A file of somebody else's, whose pages may go.
    Guest(GuestMapping),
}

impl Memory {
    /// All bytes; none where it was mapped for reading only.
    #[inline]
    pub(crate) fn bytes(&self) -> ForeignMut<'_> {
        match self {
            Memory::Mapped(mapping) => mapping.view_mut().unwrap_or_else(|| ForeignMut::from(&mut [][..])),
            Memory::Guest(mapping) => mapping.bytes(),
        }
    }

    /// Whether pages were gone when they were touched.
    #[inline]
    pub fn is_lost(&self) -> bool {
        match self {
            Memory::Mapped(_) => false,
            Memory::Guest(mapping) => mapping.is_lost(),
        }
    }
}

impl From<Mapping> for Memory {
    fn from(mapping: Mapping) -> Memory {
        Memory::Mapped(mapping)
    }
}

impl From<GuestMapping> for Memory {
    fn from(mapping: GuestMapping) -> Memory {
        Memory::Guest(mapping)
    }
}

/// What one end of a link is made of.
pub struct LinkEnd {
    /// The region, from its first byte.
    pub memory: Memory,
    /// Its sections; from our own plan or a decoded header, never trusted to fit.
    pub layout: Layout,
    /// This side's peer ID.
    pub own_id: u32,
    /// The other side's peer ID.
    pub peer_id: u32,
    /// Vectors of the link's devices: 0 where there is no doorbell at all.
    pub vectors: u32,
    /// Our receive side: what the peer rings, by vector. Empty where nothing wakes us; then the
    /// memory is polled.
    pub doorbells: Vec<Doorbell>,
    /// How to ring the peer; `None` where it polls, or is not there yet.
    pub peer_doorbells: Option<Box<dyn PeerDoorbells>>,
    /// Whether the peer may be there. False where somebody will say when it comes.
    pub peer_present: bool,
    /// Whether we made the region. If so, we clear the state word of a peer that leaves, since
    /// nothing else does.
    pub owns_region: bool,
    /// MTU of the link's network, in bytes; bounded by what the rings can carry.
    pub mtu: u32,
    /// Our part in the agreement on offloads.
    pub offloads: Offloads,
}

impl fmt::Debug for LinkEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LinkEnd { layout, own_id, peer_id, vectors, mtu, .. } = self;
        write!(f, "LinkEnd {{ {own_id} to {peer_id}, {vectors} vectors, mtu {mtu}, {layout:?} }}")
    }
}

/// Why an end cannot be made of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum EndError {
    /// The layout is wrong or does not fit the mapped memory.
    #[error("ivshmem link: {0}")]
    Region(RegionError),
    /// The output sections cannot hold rings.
    #[error("ivshmem link: {0}")]
    Net(NetError),
    /// The two numbers are not those of two peers of the region.
    #[error("ivshmem link: own number {own}, peer's number {peer}: two different ones below {max_peers} are expected")]
    Peers {
        own: u32,
        peer: u32,
        /// Peers of the region.
        max_peers: u32,
    },
    /// The memory is mapped for reading only.
    #[error("ivshmem link: the region is mapped for reading only; a peer writes its state and its output section")]
    ReadOnly,
    /// The record channel's shape is wrong or does not fit the output sections.
    #[error("ivshmem link: {0}")]
    Channel(ChannelError),
}

impl From<RegionError> for EndError {
    fn from(error: RegionError) -> EndError {
        EndError::Region(error)
    }
}

impl From<NetError> for EndError {
    fn from(error: NetError) -> EndError {
        EndError::Net(error)
    }
}

/// Why a link went to RESET, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resets {
    /// The peer went to RESET.
    pub peer_reset: u64,
    /// The peer's process or machine went.
    pub peer_left: u64,
    /// The peer went to INIT without RESET.
    pub peer_skipped: u64,
    /// The peer's state word was no state.
    pub peer_word: u64,
    /// The peer broke the rings' rules, or its memory is gone, or we were told to.
    pub fault: u64,
}

impl Resets {
    /// Sum over all causes.
    pub fn total(&self) -> u64 {
        self.peer_reset + self.peer_left + self.peer_skipped + self.peer_word + self.fault
    }
}

/// The end of a network link: a [`Handshake`], and both queue ends. The fields are apart, since
/// frames that were received borrow the memory while others are sent.
pub struct NetworkEnd {
    /// The states of both ends, the memory and the doorbells.
    pub handshake: Handshake,
    /// How the sections are cut.
    pub geometry: Geometry,
    /// What we send.
    pub sender: Sender,
    /// What the peer sends.
    pub receiver: Receiver,
    /// MTU of the link's network in bytes, no more than the rings can carry.
    pub mtu: u32,
    /// Where the sections are in the memory of `handshake`.
    pub places: Places,
}

/// Where the two sections are in the memory of a network link.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    geometry: Geometry,
    own: usize,
    peer: usize,
}

impl Places {
    /// Both sections.
    ///
    /// # Errors
    /// [`NetError::Section`] where the memory is smaller than it was.
    #[inline]
    pub fn of<'m>(&self, memory: &'m Memory) -> Result<Sections<'m>, NetError> {
        let (bytes, len) = (memory.bytes(), self.geometry.section_bytes() as usize);
        // Inside: the layout was checked against the memory.
        let refused = NetError::Section { bytes: bytes.len() as u64 };
        let own = bytes.slice(self.own, len).ok_or(refused)?;
        let peer = bytes.slice(self.peer, len).ok_or(refused)?;
        Sections::new(&self.geometry, own, peer.as_foreign())
    }
}

impl NetworkEnd {
    /// An end of `parts`, in RESET. It does not listen: the doorbells are the caller's.
    ///
    /// # Errors
    /// [`EndError`], which says what does not fit.
    pub fn new(parts: LinkEnd) -> Result<NetworkEnd, EndError> {
        let geometry = Geometry::new(parts.layout.output_bytes)?;
        let mtu = parts.mtu.min(geometry.max_mtu());
        let (handshake, [own, peer]) = Handshake::new(parts)?;
        let places = Places { geometry, own, peer };
        places.of(handshake.memory())?;
        let (sender, receiver) = (Sender::new(&geometry), Receiver::new(&geometry));
        Ok(NetworkEnd { handshake, geometry, sender, receiver, mtu, places })
    }

    fn restart(&mut self) {
        self.sender.restart();
        self.receiver.restart();
    }

    /// Follows the peer's state. Returns whether anything changed.
    pub fn step(&mut self) -> bool {
        let NetworkEnd { handshake, geometry, sender, receiver, places, .. } = self;
        handshake.follow(|duty, memory| {
            if duty == Duty::Clear
                && let Some(own) = memory.bytes().slice(places.own, geometry.section_bytes() as usize)
            {
                net::initialise(geometry, own);
            }
            if duty != Duty::Check {
                sender.restart();
                receiver.restart();
            }
        })
    }

    /// Resets the link after a fault; the peer follows, or the link stays down.
    pub fn reset(&mut self) {
        self.restart();
        self.handshake.reset();
    }

    /// Goes to RESET of our own will.
    pub fn restart_link(&mut self) {
        self.restart();
        self.handshake.close();
    }

    /// The peer is gone, with its doorbells.
    pub fn left(&mut self) {
        self.handshake.left();
        self.step();
    }
}
