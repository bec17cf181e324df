//! Layout of a split virtqueue (VirtIO 1.3 §2.7), with the alignments and sizes of its areas.
//!
//! Words are little-endian. Offsets are in bytes from the start of each area.

use core::sync::atomic::Ordering;

use super::notify::Word;
use super::{GuestMemory, Part, RingError};
use crate::mem::ForeignMut;

// --- the specification's ---

/// Largest size of a queue, in descriptors (§2.7).
pub const MAX_QUEUE_SIZE: u16 = 1 << 15;
/// Bytes of a descriptor (§2.7.5).
pub const DESCRIPTOR_BYTES: usize = 16;
/// Alignment of the descriptor table.
pub const DESCRIPTORS_ALIGN: u64 = 16;
/// Alignment of the available ring.
pub const AVAILABLE_ALIGN: u64 = 2;
/// Alignment of the used ring.
pub const USED_ALIGN: u64 = 4;

/// Descriptor flag: the chain goes on at `next`.
pub const DESC_NEXT: u16 = 1;
/// Descriptor flag: the device writes the buffer (otherwise it reads it).
pub const DESC_WRITE: u16 = 2;
/// Descriptor flag: the buffer is a table of descriptors.
pub const DESC_INDIRECT: u16 = 4;

/// Bit of `avail.flags`: the driver asks for no interrupt.
pub const AVAIL_NO_INTERRUPT: u16 = 1;
/// Bit of `used.flags`: the device asks for no notification.
pub const USED_NO_NOTIFY: u16 = 1;

/// Offset of `flags` in both rings.
pub const RING_FLAGS: usize = 0;
/// Offset of `idx` in both rings.
pub const RING_INDEX: usize = 2;
/// Offset of the entries in both rings.
pub const RING_ENTRIES: usize = 4;
/// Bytes of an entry of the available ring.
pub const AVAIL_ENTRY_BYTES: usize = 2;
/// Bytes of an entry of the used ring.
pub const USED_ENTRY_BYTES: usize = 8;

// --- ours ---

/// Most entries of an indirect table that a device reads: what the iovec of one system call may
/// have.
pub const MAX_INDIRECT_ENTRIES: u16 = 1024;
/// What a writer's area is aligned to by [`Layout`], so that the two sides write different cache
/// lines, and different pairs of them (the adjacent-line prefetcher fetches two).
const SIDE_ALIGN: usize = 128;

const _: () = {
    let layout = Layout::new(256);
    assert!(layout.descriptors == 0 && layout.available == 4096);
    assert!(layout.used.is_multiple_of(SIDE_ALIGN) && layout.used >= layout.available + available_bytes(256) as usize);
    assert!(descriptors_bytes(MAX_QUEUE_SIZE) == 1 << 19);
    assert!(available_bytes(8) == 6 + 16 && used_bytes(8) == 6 + 64);
};

/// Bytes of the descriptor table of a queue of `size`.
pub const fn descriptors_bytes(size: u16) -> u32 {
    // No overflow in these three: size <= 2^15, so at most 2^19.
    DESCRIPTOR_BYTES as u32 * size as u32
}

/// Bytes of the available ring of a queue of `size`, with `used_event`.
pub const fn available_bytes(size: u16) -> u32 {
    6 + AVAIL_ENTRY_BYTES as u32 * size as u32
}

/// Bytes of the used ring of a queue of `size`, with `avail_event`.
pub const fn used_bytes(size: u16) -> u32 {
    6 + USED_ENTRY_BYTES as u32 * size as u32
}

/// Offset of `used_event` in the available ring.
pub const fn used_event(size: u16) -> usize {
    RING_ENTRIES + AVAIL_ENTRY_BYTES * size as usize
}

/// Offset of `avail_event` in the used ring.
pub const fn avail_event(size: u16) -> usize {
    RING_ENTRIES + USED_ENTRY_BYTES * size as usize
}

/// Checks a queue's size.
pub const fn check_size(size: u32) -> Result<u16, RingError> {
    if size.is_power_of_two() && size <= MAX_QUEUE_SIZE as u32 {
        Ok(size as u16)
    } else {
        Err(RingError::QueueSize { got: size })
    }
}

/// Where a driver that lays out a queue in one piece of memory puts the three areas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Offset of the descriptor table; the piece must be aligned to 16 bytes, 128 for speed.
    pub descriptors: usize,
    /// Offset of the available ring.
    pub available: usize,
    /// Offset of the used ring.
    pub used: usize,
    /// Length from the descriptor table to the end of the used ring.
    pub bytes: usize,
}

impl Layout {
    /// The layout of a queue of `size` descriptors.
    pub const fn new(size: u16) -> Layout {
        let available = descriptors_bytes(size) as usize;
        let used = (available + available_bytes(size) as usize).next_multiple_of(SIDE_ALIGN);
        Layout { descriptors: 0, available, used, bytes: used + used_bytes(size) as usize }
    }
}

/// A descriptor, as one reads it into a local.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// The buffer's address, in the driver's terms.
    pub address: u64,
    /// The buffer's length in bytes.
    pub len: u32,
    /// [`DESC_NEXT`], [`DESC_WRITE`], [`DESC_INDIRECT`].
    pub flags: u16,
    /// Index of the next descriptor; valid only with [`DESC_NEXT`].
    pub next: u16,
}

impl Descriptor {
    /// Reads descriptor `index` of a table; `None` where the table is shorter, or not aligned to 8
    /// bytes.
    #[inline]
    pub fn read(table: ForeignMut<'_>, index: u16) -> Option<Descriptor> {
        let at = DESCRIPTOR_BYTES * index as usize;
        let table = table.as_foreign();
        // Relaxed: ordered by A0, the acquire of the available index behind which the descriptor
        // was written. A driver that writes it later tears only its own chain.
        let address = table.load_u64(at, Ordering::Relaxed)?;
        let rest = table.load_u64(at + 8, Ordering::Relaxed)?;
        Some(Descriptor { address, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 })
    }

    /// Writes descriptor `index` of a table; `None` where the table is shorter, or not aligned to 8
    /// bytes.
    #[inline]
    pub fn write(self, table: ForeignMut<'_>, index: u16) -> Option<()> {
        let at = DESCRIPTOR_BYTES * index as usize;
        let rest = u64::from(self.len) | u64::from(self.flags) << 32 | u64::from(self.next) << 48;
        // Relaxed: R0, the release of the available index, orders it.
        table.store_u64(at, self.address, Ordering::Relaxed)?;
        table.store_u64(at + 8, rest, Ordering::Relaxed)
    }
}

/// Views of the three areas, taken once per call of a queue's method.
///
/// Constructed only with areas of the right length and alignment in the peer's *and* in our address
/// space, so an index that was masked or checked by `size` is always inside.
#[derive(Clone, Copy, Debug)]
pub(super) struct Areas<'m> {
    pub(super) descriptors: ForeignMut<'m>,
    pub(super) available: ForeignMut<'m>,
    pub(super) used: ForeignMut<'m>,
}

/// A word inside an area. Reads as 0 and ignores writes if it were outside, which [`Areas`] rules
/// out.
#[derive(Clone, Copy, Debug)]
pub(super) struct AreaWord<'m>(ForeignMut<'m>, usize);

impl Word for AreaWord<'_> {
    type Value = u16;
    #[inline]
    fn load(&self, order: Ordering) -> u16 {
        self.0.as_foreign().load_u16(self.1, order).unwrap_or(0)
    }
    #[inline]
    fn store(&self, value: u16, order: Ordering) {
        let _ = self.0.store_u16(self.1, value, order);
    }
}

impl<'m> Areas<'m> {
    /// The areas of a queue whose guest addresses are given.
    #[inline]
    pub(super) fn find<M: GuestMemory>(memory: &'m M, size: u16, at: [u64; 3]) -> Result<Areas<'m>, RingError> {
        let area = |part, address, bytes, align: u64| match memory.view(address, bytes) {
            // The host's address can be less aligned than the guest's if a region is mapped at an
            // odd offset.
            Some(view) if (view.as_mut_ptr() as usize as u64).is_multiple_of(align) => Ok(view),
            Some(_) => Err(RingError::Misaligned { part, address, expected: align }),
            None => Err(RingError::RingUnmapped { part, address, bytes }),
        };
        Ok(Areas {
            descriptors: area(Part::Descriptors, at[0], descriptors_bytes(size), DESCRIPTORS_ALIGN)?,
            available: area(Part::Available, at[1], available_bytes(size), AVAILABLE_ALIGN)?,
            used: area(Part::Used, at[2], used_bytes(size), USED_ALIGN)?,
        })
    }

    /// The areas of a queue laid out by [`Layout`] in one piece of memory.
    pub(super) fn lay_out(ring: ForeignMut<'m>, size: u16) -> Result<Areas<'m>, RingError> {
        let layout = Layout::new(size);
        let area = |part, offset: usize, bytes: u32, align: u64| {
            let address = (ring.as_mut_ptr() as usize + offset) as u64;
            match ring.slice(offset, bytes as usize) {
                Some(view) if address.is_multiple_of(align) => Ok(view),
                Some(_) => Err(RingError::Misaligned { part, address, expected: align }),
                None => Err(RingError::RingUnmapped { part, address, bytes }),
            }
        };
        Ok(Areas {
            descriptors: area(Part::Descriptors, layout.descriptors, descriptors_bytes(size), DESCRIPTORS_ALIGN)?,
            available: area(Part::Available, layout.available, available_bytes(size), AVAILABLE_ALIGN)?,
            used: area(Part::Used, layout.used, used_bytes(size), USED_ALIGN)?,
        })
    }

    /// `avail.flags`; written by the driver.
    #[inline]
    pub(super) fn avail_flags(&self) -> AreaWord<'m> {
        AreaWord(self.available, RING_FLAGS)
    }
    /// `avail.idx`; written by the driver.
    #[inline]
    pub(super) fn avail_index(&self) -> AreaWord<'m> {
        AreaWord(self.available, RING_INDEX)
    }
    /// `avail.used_event`; written by the driver.
    #[inline]
    pub(super) fn used_event(&self, size: u16) -> AreaWord<'m> {
        AreaWord(self.available, used_event(size))
    }
    /// `used.flags`; written by the device.
    #[inline]
    pub(super) fn used_flags(&self) -> AreaWord<'m> {
        AreaWord(self.used, RING_FLAGS)
    }
    /// `used.idx`; written by the device.
    #[inline]
    pub(super) fn used_index(&self) -> AreaWord<'m> {
        AreaWord(self.used, RING_INDEX)
    }
    /// `used.avail_event`; written by the device.
    #[inline]
    pub(super) fn avail_event(&self, size: u16) -> AreaWord<'m> {
        AreaWord(self.used, avail_event(size))
    }

    /// Entry `slot` (already masked) of the available ring.
    #[inline]
    pub(super) fn avail_entry(&self, slot: u16) -> u16 {
        // Relaxed: ordered by A0, the acquire of the index that covers the entry.
        AreaWord(self.available, RING_ENTRIES + AVAIL_ENTRY_BYTES * slot as usize).load(Ordering::Relaxed)
    }

    /// Writes entry `slot` (already masked) of the available ring.
    #[inline]
    pub(super) fn set_avail_entry(&self, slot: u16, head: u16) {
        // Relaxed: R0, the release of the index, orders it.
        AreaWord(self.available, RING_ENTRIES + AVAIL_ENTRY_BYTES * slot as usize).store(head, Ordering::Relaxed)
    }

    /// Entry `slot` (already masked) of the used ring: identifier and length.
    #[inline]
    pub(super) fn used_entry(&self, slot: u16) -> (u32, u32) {
        let at = RING_ENTRIES + USED_ENTRY_BYTES * slot as usize;
        let used = self.used.as_foreign();
        // Relaxed: ordered by A0, the acquire of the index that covers the entry.
        let word = |at| used.load_u32(at, Ordering::Relaxed).unwrap_or(0);
        (word(at), word(at + 4))
    }

    /// Writes entry `slot` (already masked) of the used ring.
    #[inline]
    pub(super) fn set_used_entry(&self, slot: u16, id: u16, len: u32) {
        let at = RING_ENTRIES + USED_ENTRY_BYTES * slot as usize;
        // Relaxed: R0, the release of the index, orders them.
        let _ = self.used.store_u32(at, u32::from(id), Ordering::Relaxed);
        let _ = self.used.store_u32(at + 4, len, Ordering::Relaxed);
    }
}
