//! The split virtqueue of VirtIO 1.x: how a driver lends buffers to a device and gets them back.
//!
//! # Theory of operation
//!
//! A queue is three areas of the driver's memory (VirtIO 1.3 §2.7). Each has one writer:
//!
//! ```text
//!   descriptor table   driver writes   { address, len, flags, next } × size
//!   available ring     driver writes   flags, idx, ring[size] of heads, used_event
//!   used ring          device writes   flags, idx, ring[size] of { id, len }, avail_event
//! ```
//!
//! The driver puts the head of a descriptor chain into `avail.ring` and publishes `avail.idx`. The
//! device takes it, uses the memory it describes, puts the head into `used.ring` and publishes
//! `used.idx`. Both indices run free over 16 bits and are masked by the (power of two) size.
//!
//! # What is here
//!
//! * [`DeviceQueue`]: the device side. It takes chains in batches, with one acquire of `avail.idx`
//!   and one release of `used.idx` for each batch. It returns them **in the order in which it took
//!   them**. `VIRTIO_F_IN_ORDER` promises this order. The order also lets a dead device be
//!   replaced: everything before `used.idx` is done and nothing behind it is
//!   ([`DeviceQueue::resume`]).
//! * [`DriverQueue`]: the driver side, for the unikernel, and as the peer in tests.
//! * [`net`]: the header in front of every frame of a network device.
//! * [`notify`]: the four steps in which the two sides avoid a missed wake-up, apart from the rings
//!   so that `loom` can run exactly that code.
//! * [`GuestMemory`]: from an address of the peer's to a view; [`RegionTable`] and [`Identity`]
//!   implement it.
//!
//! # Invariants and failure
//!
//! The other side is hostile. Every index, address, length and flag that it wrote is read once and
//! checked. A bad one is refused with a [`RingError`] that says where. Nothing here panics on what
//! memory holds, loops longer than the queue's size, or allocates. After an error the queue is
//! broken: its owner resets it and must not use what it has delivered. Descriptor tables are not
//! checked in advance, since the peer could change them after the check. The local copy that is
//! used is what gets checked.
//!
//! Limits: sizes are powers of two up to 32768. A chain has up to `size` descriptors, or up to
//! [`MAX_INDIRECT_ENTRIES`] in an indirect table. A device holds up to [`MAX_HELD`] chains at a
//! time.
//!
//! A queue belongs to one thread at a time and has no lock. Its state is plain numbers. Memory is
//! passed to each call, and views handed out live as long as that borrow.

pub mod device;
pub mod driver;
pub mod net;
pub mod notify;
pub mod split;

#[cfg(all(test, loom))]
mod loom;
#[cfg(all(test, not(loom)))]
mod tests;

pub use device::{DeviceQueue, MAX_HELD, QueueConfig};
pub use driver::{DriverQueue, Segment, Used};
pub use split::{Descriptor, Layout, MAX_INDIRECT_ENTRIES, MAX_QUEUE_SIZE};

use core::fmt;
use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::mem::ForeignMut;

/// Feature bits of VirtIO 1.3 §6 that change how a split queue works, as masks.
pub mod features {
    /// Both sides understand descriptors that point to a table of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notifications are asked for by index and not by a flag.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The device is a VirtIO 1.x device.
    pub const VERSION_1: u64 = 1 << 32;
    /// The device uses buffers in the order in which they were made available.
    pub const IN_ORDER: u64 = 1 << 35;
}

/// Memory of a guest, by the guest's addresses.
pub trait GuestMemory {
    /// A view of `len` bytes at the guest's `address`; `None` where that is not wholly inside one
    /// region.
    fn view(&self, address: u64, len: u32) -> Option<ForeignMut<'_>>;
}

impl<M: GuestMemory + ?Sized> GuestMemory for &M {
    #[inline]
    fn view(&self, address: u64, len: u32) -> Option<ForeignMut<'_>> {
        (**self).view(address, len)
    }
}

/// What can be behind a [`Region`]: something that holds a mapping and lends views of it.
pub trait Backing {
    /// All bytes of the region. The same ones at each call.
    fn bytes(&self) -> ForeignMut<'_>;
}

impl Backing for ForeignMut<'_> {
    #[inline]
    fn bytes(&self) -> ForeignMut<'_> {
        *self
    }
}

/// A piece of guest memory: the guest's address of its first byte, and its bytes here.
#[derive(Debug)]
pub struct Region<B> {
    start: u64,
    backing: B,
}

impl<B: Backing> Region<B> {
    /// A region at the guest's address `start`.
    pub const fn new(start: u64, backing: B) -> Self {
        Region { start, backing }
    }

    /// The guest's address of the first byte.
    pub const fn start(&self) -> u64 {
        self.start
    }

    /// The object that keeps the bytes mapped.
    pub const fn backing(&self) -> &B {
        &self.backing
    }

    #[inline]
    fn view(&self, address: u64, len: u32) -> Option<ForeignMut<'_>> {
        // Wrapping: an address below `start` becomes an offset beyond any region, which `slice`
        // refuses.
        let offset = usize::try_from(address.wrapping_sub(self.start)).ok()?;
        self.backing.bytes().slice(offset, len as usize)
    }
}

/// Guest memory as a table of regions sorted by address, with the last region that served tried
/// first: guests have one or two regions that matter.
///
/// `S` holds the regions: a slice, an array, a vector.
#[derive(Debug)]
pub struct RegionTable<B, S> {
    regions: S,
    backing: PhantomData<fn() -> B>,
    /// Index of the region that served last. Relaxed everywhere: any value is right, a good one is
    /// fast.
    last: AtomicUsize,
}

impl<B: Backing, S: AsRef<[Region<B>]>> RegionTable<B, S> {
    /// A table of `regions`, which must be sorted by address, not be empty, not overlap, and not
    /// run over the end of the address space. Refused with the index of the first region that does
    /// not fit behind the one before.
    pub fn new(regions: S) -> Result<Self, RingError> {
        let mut free_from = 0u64;
        for (index, region) in regions.as_ref().iter().enumerate() {
            let end = region.start.checked_add(region.backing.bytes().len() as u64);
            match end {
                Some(end) if end > region.start && region.start >= free_from => free_from = end,
                _ => return Err(RingError::Regions { index, start: region.start }),
            }
        }
        Ok(RegionTable { regions, backing: PhantomData, last: AtomicUsize::new(0) })
    }

    /// In ascending order of guest address.
    pub fn regions(&self) -> &[Region<B>] {
        self.regions.as_ref()
    }

    #[cold]
    fn search(&self, address: u64, len: u32) -> Option<ForeignMut<'_>> {
        let index = self.regions().partition_point(|region| region.start <= address).checked_sub(1)?;
        let view = self.regions()[index].view(address, len)?;
        self.last.store(index, Ordering::Relaxed);
        Some(view)
    }
}

impl<B: Backing, S: AsRef<[Region<B>]>> GuestMemory for RegionTable<B, S> {
    #[inline]
    fn view(&self, address: u64, len: u32) -> Option<ForeignMut<'_>> {
        let last = self.regions().get(self.last.load(Ordering::Relaxed));
        match last.and_then(|region| region.view(address, len)) {
            Some(view) => Some(view),
            None => self.search(address, len),
        }
    }
}

/// Memory of a peer that shares this address space: its addresses are ours. For cells and tests; it
/// covers one window, since nothing outside what the caller vouches for may be reached.
#[derive(Clone, Copy, Debug)]
pub struct Identity<'m>(ForeignMut<'m>);

impl<'m> Identity<'m> {
    /// Addresses inside `window` mean themselves, others nothing.
    pub const fn new(window: ForeignMut<'m>) -> Self {
        Identity(window)
    }

    /// The address by which a peer names the byte at `offset` of the window.
    pub fn address(&self, offset: usize) -> u64 {
        (self.0.as_mut_ptr() as usize + offset) as u64
    }
}

impl GuestMemory for Identity<'_> {
    #[inline]
    fn view(&self, address: u64, len: u32) -> Option<ForeignMut<'_>> {
        let base = NonNull::new(self.0.as_mut_ptr())?.addr().get() as u64;
        let offset = usize::try_from(address.wrapping_sub(base)).ok()?;
        self.0.slice(offset, len as usize)
    }
}

/// A part of a queue, for errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The descriptor table.
    Descriptors,
    /// The available ring.
    Available,
    /// The used ring.
    Used,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Part::Descriptors => "descriptor table",
            Part::Available => "available ring",
            Part::Used => "used ring",
        })
    }
}

/// Why a queue was refused or broke. Each is the peer's fault, and each costs the peer its port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum RingError {
    /// A queue's size is not a power of two from 1 to 32768.
    #[error("queue size {got} is not a power of two from 1 to {MAX_QUEUE_SIZE}")]
    QueueSize {
        /// The size that was asked for.
        got: u32,
    },
    /// An area of a queue is not aligned as the specification demands.
    #[error("{part} at {address:#x} is not aligned to {expected} bytes")]
    Misaligned {
        part: Part,
        address: u64,
        /// The alignment it needs, in bytes.
        expected: u64,
    },
    /// An area of a queue is not wholly inside one region of the guest's memory.
    #[error("{part} of {bytes} bytes at {address:#x} is not inside one memory region")]
    RingUnmapped { part: Part, address: u64, bytes: u32 },
    /// Regions of guest memory are empty, overlap, wrap around, or are out of order.
    #[error("memory region {index} at {start:#x} is empty, overlaps, wraps around or is out of order")]
    Regions {
        /// The first region that is wrong.
        index: usize,
        start: u64,
    },
    /// The available index is further ahead than the queue is long.
    #[error("available index jumped from {next} to {got} in a queue of {size}")]
    AvailableJump {
        /// The index that was expected next.
        next: u16,
        /// The index that the driver published.
        got: u16,
        size: u16,
    },
    /// The used index is further ahead than buffers are outstanding.
    #[error("used index jumped from {next} to {got} with {outstanding} buffers outstanding")]
    UsedJump {
        /// The index that was expected next.
        next: u16,
        /// The index that the device published.
        got: u16,
        /// How many buffers the device holds.
        outstanding: u16,
    },
    /// A descriptor index is not below the table's size.
    #[error("chain {head}: descriptor index {got} in a table of {size}")]
    DescriptorIndex {
        /// The chain's head, or the value in its place in the available ring.
        head: u16,
        got: u16,
        size: u16,
    },
    /// A chain has more descriptors than it may (as one with a loop always has).
    #[error("chain {head}: more than {limit} descriptors, or a loop")]
    ChainLength {
        head: u16,
        /// How many it may have.
        limit: u16,
    },
    /// A chain describes more bytes than a device takes.
    #[error("chain {head}: {got} bytes or more, at most {limit} are accepted")]
    ChainBytes {
        head: u16,
        got: u64,
        /// Bytes that are taken.
        limit: u32,
    },
    /// An indirect descriptor without the feature, inside an indirect table, or with a `next`.
    #[error(
        "chain {head}: descriptor {index} is indirect (flags {flags:#x}) where that was not agreed, inside a \
         table, or with a next one"
    )]
    Indirect {
        head: u16,
        /// The index of the descriptor.
        index: u16,
        flags: u16,
    },
    /// An indirect table is empty, not a multiple of 16 bytes, or too long.
    #[error("chain {head}: indirect table of {bytes} bytes, not 1 to {MAX_INDIRECT_ENTRIES} entries of 16 bytes")]
    IndirectLength {
        head: u16,
        /// The table's length in bytes.
        bytes: u32,
    },
    /// A descriptor is for writing by the device in a chain that the device reads.
    #[error("chain {head}: descriptor {index} is write-only in a chain to be read")]
    UnexpectedWritable {
        head: u16,
        /// The index of the descriptor.
        index: u16,
    },
    /// A descriptor is for reading by the device in a chain that the device writes.
    #[error("chain {head}: descriptor {index} is read-only in a chain to be written")]
    UnexpectedReadable {
        head: u16,
        /// The index of the descriptor.
        index: u16,
    },
    /// A descriptor has no bytes.
    #[error("chain {head}: descriptor {index} has no bytes")]
    EmptyDescriptor { head: u16, index: u16 },
    /// A buffer or an indirect table is not wholly inside one region of the guest's memory.
    #[error("chain {head}: {bytes} bytes at {address:#x} are not inside one memory region")]
    BufferUnmapped { head: u16, address: u64, bytes: u32 },
    /// A device returned a buffer that it does not hold.
    #[error("device returned buffer {got}, which it does not hold (size {size})")]
    UsedId {
        /// The identifier it returned.
        got: u32,
        size: u16,
    },
    /// A device claims to have written more than it was given room for.
    #[error("device claims {got} bytes written into buffer {head} of {limit}")]
    UsedLength {
        head: u16,
        got: u32,
        /// The room it had.
        limit: u32,
    },
}
