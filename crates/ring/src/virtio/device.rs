//! The device side of a split virtqueue: takes chains in batches, returns them in order.
//!
//! One turn of a device that reads (a network device's transmit queue of the guest):
//!
//! ```text
//!   receive   one acquire of avail.idx; views of up to `max` chains go to the caller's sink; heads are held
//!   ...       the caller copies what it wants out of the views
//!   release   used entries for the oldest held chains, one release of used.idx
//!   signal?   one fence, one look at the driver's request
//!   arm       under budget only: say where to wake us, and look again
//!   ...       once, [`notify::RECHECK_NS`] after `arm` or after a `signal?` that said no:
//!   recheck   `has_available` and `recheck_signal`, for drivers whose fences do nothing
//! ```
//!
//! A device that writes (the receive queue of the guest) does [`DeviceQueue::take_writable`] and
//! fills the views. It returns what it did not need with [`DeviceQueue::put_back`], then calls
//! [`DeviceQueue::complete`] with the lengths and [`DeviceQueue::publish`]. The driver sees nothing
//! of a frame that spans several buffers before the last step. So the frame's header may be written
//! late.
//!
//! A chain is wholly readable or wholly writable here, as network devices demand; a mixed one is
//! refused.

use core::num::Wrapping;
use core::sync::atomic::Ordering;

use super::notify::{self, Signals, Suppression, Word};
use super::split::{
    self, Areas, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, DESCRIPTOR_BYTES, Descriptor, MAX_INDIRECT_ENTRIES,
};
use super::{GuestMemory, Part, RingError, features};
use crate::mem::{Foreign, ForeignMut};

// --- tuning ---

/// Most chains that a device holds at a time. Their heads are kept here and not read from the ring
/// again, where the driver could have changed them, and where it dirties the lines while it adds
/// more.
pub const MAX_HELD: usize = 256;
const _: () = assert!(MAX_HELD.is_power_of_two());

/// What a driver has set up of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// Number of descriptors; a power of two up to 32768.
    pub size: u32,
    /// The guest's address of the descriptor table, aligned to 16 bytes.
    pub descriptors: u64,
    /// The guest's address of the available ring, aligned to 2 bytes.
    pub available: u64,
    /// The guest's address of the used ring, aligned to 4 bytes.
    pub used: u64,
    /// The features agreed on; those in [`features`] matter here.
    pub features: u64,
    /// Longest chain that is taken, in bytes.
    pub max_chain_bytes: u32,
    /// Longest chain that is taken, in segments. It bounds the work that one available entry
    /// causes.
    pub max_chain_segments: u16,
}

/// The device side of a queue. See the module's head.
#[derive(Clone, Debug)]
pub struct DeviceQueue {
    size: u16,
    at: [u64; 3],
    event_idx: bool,
    indirect: bool,
    in_order: bool,
    max_chain_bytes: u32,
    max_chain_segments: u16,
    /// Index of the next available entry to take.
    next_avail: Wrapping<u16>,
    /// The available index as last read: entries before it may be read without another acquire.
    seen_avail: Wrapping<u16>,
    /// Index of the next used entry to write. `next_avail - next_used` chains are held, up to
    /// [`MAX_HELD`].
    next_used: Wrapping<u16>,
    /// The used index as last published.
    published: Wrapping<u16>,
    /// The used index when it was last decided whether to signal; unknown at first, when one signal
    /// too many is right.
    decided: Option<Wrapping<u16>>,
    signals: Signals,
    /// Heads of the held chains, by their available index.
    held: [u16; MAX_HELD],
}

impl DeviceQueue {
    /// A queue that starts at index 0. Addresses are checked for alignment here, and for being
    /// mapped at each use.
    pub fn new(config: &QueueConfig) -> Result<DeviceQueue, RingError> {
        let size = split::check_size(config.size)?;
        let at = [config.descriptors, config.available, config.used];
        let aligns = [
            (Part::Descriptors, split::DESCRIPTORS_ALIGN),
            (Part::Available, split::AVAILABLE_ALIGN),
            (Part::Used, split::USED_ALIGN),
        ];
        for (address, (part, expected)) in at.into_iter().zip(aligns) {
            if !address.is_multiple_of(expected) {
                return Err(RingError::Misaligned { part, address, expected });
            }
        }
        Ok(DeviceQueue {
            size,
            at,
            event_idx: config.features & features::EVENT_IDX != 0,
            indirect: config.features & features::INDIRECT_DESC != 0,
            in_order: config.features & features::IN_ORDER != 0,
            max_chain_bytes: config.max_chain_bytes,
            max_chain_segments: config.max_chain_segments,
            next_avail: Wrapping(0),
            seen_avail: Wrapping(0),
            next_used: Wrapping(0),
            published: Wrapping(0),
            decided: None,
            signals: Signals::new(0),
            held: [0; MAX_HELD],
        })
    }

    /// Goes on where another device stopped: at the used index in the ring, since chains are
    /// returned in order and those behind that index may not have been seen to the end. Returns the
    /// index.
    ///
    /// It is the ring that counts and not the `base` that a frontend remembers, which can be ahead
    /// of it where the device before this one died: a frame that was taken but not returned would
    /// be lost to the guest for ever. Only where the used index cannot belong to the available one
    /// (a driver that started afresh did not clear it) the base is taken.
    pub fn resume<M: GuestMemory>(&mut self, memory: &M, base: u16) -> Result<u16, RingError> {
        let areas = self.areas(memory)?;
        // Relaxed: no other device runs, so nothing else writes this word; it orders nothing.
        let used = areas.used_index().load(Ordering::Relaxed);
        let available = notify::available(&areas.avail_index());
        let index = if available.wrapping_sub(used) <= self.size { used } else { base };
        self.start_at(index);
        self.accept_avail(available)?;
        Ok(index)
    }

    fn start_at(&mut self, index: u16) {
        self.next_avail = Wrapping(index);
        self.seen_avail = Wrapping(index);
        self.next_used = Wrapping(index);
        self.published = Wrapping(index);
        self.decided = None;
        self.signals = Signals::new(index);
    }

    /// Number of descriptors.
    pub const fn size(&self) -> u16 {
        self.size
    }

    /// Index of the next available entry that will be taken; what a frontend is told when it stops
    /// the queue and nothing is held.
    pub const fn next_avail(&self) -> u16 {
        self.next_avail.0
    }

    /// Chains taken and not returned.
    #[inline]
    pub const fn held(&self) -> usize {
        // Wrapping subtraction of free-running indices; at most MAX_HELD.
        self.next_avail.0.wrapping_sub(self.next_used.0) as usize
    }

    /// Gives up all held chains and goes back to the published index, for a queue that stops in
    /// between.
    pub fn forget_held(&mut self) {
        self.next_avail = self.published;
        self.next_used = self.published;
    }

    #[inline]
    fn areas<'m, M: GuestMemory>(&self, memory: &'m M) -> Result<Areas<'m>, RingError> {
        Areas::find(memory, self.size, self.at)
    }

    /// Reads the available index, if what was seen of it is less than `want`; returns how many
    /// chains may be taken.
    #[inline]
    fn look(&mut self, areas: &Areas<'_>, want: usize) -> Result<usize, RingError> {
        let want = want.min(MAX_HELD - self.held());
        let mut ready = usize::from((self.seen_avail - self.next_avail).0);
        if ready < want {
            self.check_avail(areas)?;
            ready = usize::from((self.seen_avail - self.next_avail).0);
        }
        Ok(ready.min(want))
    }

    #[inline]
    fn check_avail(&mut self, areas: &Areas<'_>) -> Result<(), RingError> {
        self.accept_avail(notify::available(&areas.avail_index()))
    }

    #[inline]
    fn accept_avail(&mut self, index: u16) -> Result<(), RingError> {
        // A driver has at most `size` chains out, of which some were taken and not returned.
        if (Wrapping(index) - self.next_used).0 > self.size {
            return Err(RingError::AvailableJump { next: self.next_avail.0, got: index, size: self.size });
        }
        if (Wrapping(index) - self.next_avail).0 > self.size {
            // Behind what was taken already: the index ran backwards.
            return Err(RingError::AvailableJump { next: self.next_avail.0, got: index, size: self.size });
        }
        self.seen_avail = Wrapping(index);
        Ok(())
    }

    /// Takes up to `max` chains that the device reads. For each segment the sink gets its view and
    /// whether it is the chain's last one; the sink is the place to prefetch. Returns how many
    /// chains were taken.
    ///
    /// On an error the queue is broken and what the sink got is not to be used.
    #[inline]
    pub fn receive<'m, M: GuestMemory>(
        &mut self,
        memory: &'m M,
        max: usize,
        mut sink: impl FnMut(Foreign<'m>, bool),
    ) -> Result<usize, RingError> {
        self.take::<M, 0>(memory, max, &mut |view, last| sink(view.as_foreign(), last))
    }

    /// Takes up to `max` chains that the device writes, as [`DeviceQueue::receive`] does.
    #[inline]
    pub fn take_writable<'m, M: GuestMemory>(
        &mut self,
        memory: &'m M,
        max: usize,
        mut sink: impl FnMut(ForeignMut<'m>, bool),
    ) -> Result<usize, RingError> {
        self.take::<M, DESC_WRITE>(memory, max, &mut sink)
    }

    /// `WRITE` is the value that the flag [`DESC_WRITE`] must have.
    #[inline]
    fn take<'m, M: GuestMemory, const WRITE: u16>(
        &mut self,
        memory: &'m M,
        max: usize,
        sink: &mut impl FnMut(ForeignMut<'m>, bool),
    ) -> Result<usize, RingError> {
        let areas = self.areas(memory)?;
        let count = self.look(&areas, max)?;
        // Kept in a register: through `self` each turn would load what the one before has just
        // stored.
        let mut next = self.next_avail.0;
        for _ in 0..count {
            let head = areas.avail_entry(next & (self.size - 1));
            let descriptor = self.descriptor(areas.descriptors, head, head, self.size)?;
            let plain = descriptor.flags & (DESC_NEXT | DESC_INDIRECT | DESC_WRITE) == WRITE;
            if plain && descriptor.len != 0 && descriptor.len <= self.max_chain_bytes {
                sink(buffer(memory, head, &descriptor)?, true);
            } else {
                self.walk::<M, WRITE>(memory, &areas, head, descriptor, sink)?;
            }
            self.held[usize::from(next) % MAX_HELD] = head;
            next = next.wrapping_add(1);
        }
        self.next_avail = Wrapping(next);
        Ok(count)
    }

    #[inline]
    fn descriptor(&self, table: ForeignMut<'_>, head: u16, got: u16, size: u16) -> Result<Descriptor, RingError> {
        let refused = RingError::DescriptorIndex { head, got, size };
        if got >= size {
            return Err(refused);
        }
        Descriptor::read(table, got).ok_or(refused)
    }

    /// The general case: chains of several descriptors, indirect tables, and anything invalid. Work
    /// is bounded by the queue's size plus [`MAX_INDIRECT_ENTRIES`].
    #[inline(never)]
    fn walk<'m, M: GuestMemory, const WRITE: u16>(
        &self,
        memory: &'m M,
        areas: &Areas<'m>,
        head: u16,
        first: Descriptor,
        sink: &mut impl FnMut(ForeignMut<'m>, bool),
    ) -> Result<(), RingError> {
        let mut table = areas.descriptors;
        let mut entries = self.size;
        let mut in_table = false;
        let mut budget = self.size.min(self.max_chain_segments);
        let mut index = head;
        let mut descriptor = first;
        let mut bytes = 0u64;
        loop {
            if descriptor.flags & DESC_INDIRECT != 0 {
                // The flag "write" means nothing here (VirtIO 1.3 §2.7.5.3.2).
                if !self.indirect || in_table || descriptor.flags & DESC_NEXT != 0 {
                    return Err(RingError::Indirect { head, index, flags: descriptor.flags });
                }
                entries = indirect_entries(head, descriptor.len)?;
                table = buffer(memory, head, &descriptor)?;
                if !(table.as_mut_ptr() as usize).is_multiple_of(align_of::<u64>()) {
                    // No alignment is demanded of a table; drivers align it all the same, and words
                    // need it.
                    return self.walk_unaligned::<M, WRITE>(memory, table, head, entries, bytes, sink);
                }
                in_table = true;
                // Descriptors before the table have a limit of their own: at most twice as many in
                // all.
                budget = entries.min(self.max_chain_segments);
                index = 0;
                descriptor = self.descriptor(table, head, 0, entries)?;
                continue;
            }
            let limit = entries.min(self.max_chain_segments);
            budget = budget.checked_sub(1).ok_or(RingError::ChainLength { head, limit })?;
            let last = descriptor.flags & DESC_NEXT == 0;
            sink(self.segment::<M, WRITE>(memory, head, index, &descriptor, &mut bytes)?, last);
            if last {
                return Ok(());
            }
            if budget == 0 {
                return Err(RingError::ChainLength { head, limit });
            }
            index = descriptor.next;
            descriptor = self.descriptor(table, head, index, entries)?;
        }
    }

    /// As [`DeviceQueue::walk`] inside an indirect table that is not aligned to 8 bytes.
    #[cold]
    fn walk_unaligned<'m, M: GuestMemory, const WRITE: u16>(
        &self,
        memory: &'m M,
        table: ForeignMut<'m>,
        head: u16,
        entries: u16,
        mut bytes: u64,
        sink: &mut impl FnMut(ForeignMut<'m>, bool),
    ) -> Result<(), RingError> {
        let mut index = 0;
        let limit = entries.min(self.max_chain_segments);
        for _ in 0..limit {
            let refused = RingError::DescriptorIndex { head, got: index, size: entries };
            let at = DESCRIPTOR_BYTES * usize::from(index);
            let raw = if index < entries { table.as_foreign().read_array::<DESCRIPTOR_BYTES>(at) } else { None };
            let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, f0, f1, n0, n1] = raw.ok_or(refused)?;
            let descriptor = Descriptor {
                address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
                len: u32::from_le_bytes([l0, l1, l2, l3]),
                flags: u16::from_le_bytes([f0, f1]),
                next: u16::from_le_bytes([n0, n1]),
            };
            if descriptor.flags & DESC_INDIRECT != 0 {
                return Err(RingError::Indirect { head, index, flags: descriptor.flags });
            }
            let last = descriptor.flags & DESC_NEXT == 0;
            sink(self.segment::<M, WRITE>(memory, head, index, &descriptor, &mut bytes)?, last);
            if last {
                return Ok(());
            }
            index = descriptor.next;
        }
        Err(RingError::ChainLength { head, limit })
    }

    #[inline]
    fn segment<'m, M: GuestMemory, const WRITE: u16>(
        &self,
        memory: &'m M,
        head: u16,
        index: u16,
        descriptor: &Descriptor,
        bytes: &mut u64,
    ) -> Result<ForeignMut<'m>, RingError> {
        if descriptor.flags & DESC_WRITE != WRITE {
            return Err(match WRITE {
                0 => RingError::UnexpectedWritable { head, index },
                _ => RingError::UnexpectedReadable { head, index },
            });
        }
        if descriptor.len == 0 {
            return Err(RingError::EmptyDescriptor { head, index });
        }
        // No overflow: at most 2^15 + 2^10 lengths of 32 bits.
        *bytes += u64::from(descriptor.len);
        if *bytes > u64::from(self.max_chain_bytes) {
            return Err(RingError::ChainBytes { head, got: *bytes, limit: self.max_chain_bytes });
        }
        buffer(memory, head, descriptor)
    }

    /// Gives back the chains taken last, as if they had not been taken; at most as many as are
    /// held.
    #[inline]
    pub fn put_back(&mut self, count: usize) {
        // In range: held() is at most MAX_HELD.
        self.next_avail -= count.min(self.held()) as u16;
    }

    /// Writes used entries for the oldest held chains, one per length of bytes written;
    /// [`DeviceQueue::publish`] shows them to the driver. Lengths beyond the held chains are
    /// ignored. Returns how many were written.
    #[inline]
    pub fn complete<M: GuestMemory>(
        &mut self,
        memory: &M,
        lens: impl IntoIterator<Item = u32>,
    ) -> Result<usize, RingError> {
        let areas = self.areas(memory)?;
        let first = self.next_used.0;
        let mut next = first;
        for len in lens.into_iter().take(self.held()) {
            let head = self.held[usize::from(next) % MAX_HELD];
            areas.set_used_entry(next & (self.size - 1), head, len);
            next = next.wrapping_add(1);
        }
        self.next_used = Wrapping(next);
        Ok(usize::from(next.wrapping_sub(first)))
    }

    /// Shows the driver what was completed. Returns whether there was anything new.
    #[inline]
    pub fn publish<M: GuestMemory>(&mut self, memory: &M) -> Result<bool, RingError> {
        if self.published == self.next_used {
            return Ok(false);
        }
        let areas = self.areas(memory)?;
        notify::publish(&areas.used_index(), self.next_used.0);
        self.published = self.next_used;
        Ok(true)
    }

    /// Returns the oldest `count` held chains, which the device has read, and shows that to the
    /// driver. At most as many as are held.
    #[inline]
    pub fn release<M: GuestMemory>(&mut self, memory: &M, count: usize) -> Result<(), RingError> {
        let count = count.min(self.held());
        if count == 0 {
            return Ok(());
        }
        let areas = self.areas(memory)?;
        if self.in_order {
            // One entry represents the batch: it is at the first one's place and names the last
            // (VirtIO 1.3 §2.7.9).
            let last = self.next_used + Wrapping(count as u16 - 1);
            let head = self.held[usize::from(last.0) % MAX_HELD];
            areas.set_used_entry(self.next_used.0 & (self.size - 1), head, 0);
            self.next_used = last + Wrapping(1);
        } else {
            let mut next = self.next_used.0;
            for _ in 0..count {
                let head = self.held[usize::from(next) % MAX_HELD];
                areas.set_used_entry(next & (self.size - 1), head, 0);
                next = next.wrapping_add(1);
            }
            self.next_used = Wrapping(next);
        }
        notify::publish(&areas.used_index(), self.next_used.0);
        self.published = self.next_used;
        Ok(())
    }

    /// Whether the driver wants to be interrupted for what was published since the last call. To be
    /// asked once after a batch; it costs a fence.
    #[inline]
    pub fn needs_signal<M: GuestMemory>(&mut self, memory: &M) -> Result<bool, RingError> {
        let new = self.published;
        if self.decided == Some(new) {
            return Ok(false);
        }
        let suppression = self.suppression(&self.areas(memory)?);
        if self.decided.replace(new).is_none() && self.event_idx {
            // A driver that has not been told anything yet is told: its first request may be the 0
            // of a fresh ring.
            self.signals.signalled(new.0);
            return Ok(true);
        }
        Ok(self.signals.decide(suppression, new.0))
    }

    #[inline]
    fn suppression(&self, areas: &Areas<'_>) -> Suppression {
        if self.event_idx {
            Suppression::After(notify::suppression(&areas.used_event(self.size)))
        } else {
            Suppression::Always(notify::suppression(&areas.avail_flags()) & split::AVAIL_NO_INTERRUPT == 0)
        }
    }

    /// Whether the last [`DeviceQueue::needs_signal`] said no and was not repeated by
    /// [`DeviceQueue::recheck_signal`].
    #[inline]
    pub const fn is_in_doubt(&self) -> bool {
        self.signals.is_in_doubt()
    }

    /// Repeats the last decision of [`DeviceQueue::needs_signal`]: whether the driver is to be
    /// interrupted late. To be asked once, [`notify::RECHECK_NS`] after it said no.
    pub fn recheck_signal<M: GuestMemory>(&mut self, memory: &M) -> Result<bool, RingError> {
        let Some(decided) = self.decided.filter(|_| self.signals.is_in_doubt()) else { return Ok(false) };
        let suppression = self.suppression(&self.areas(memory)?);
        Ok(self.signals.recheck(suppression, decided.0))
    }

    /// Has the next [`DeviceQueue::needs_signal`] after something was published say yes: for a new
    /// way of signalling, when what was sent the old way may not have arrived.
    pub const fn forget_signals(&mut self) {
        self.decided = None;
    }

    /// Asks the driver to notify of the next chain, and looks again. If this returns true there are
    /// chains to take already: the caller goes on (and disarms) instead of sleeping.
    #[inline]
    pub fn arm<M: GuestMemory>(&mut self, memory: &M) -> Result<bool, RingError> {
        let areas = self.areas(memory)?;
        let index = if self.event_idx {
            notify::arm(&areas.avail_event(self.size), self.next_avail.0, &areas.avail_index())
        } else {
            notify::arm(&areas.used_flags(), 0, &areas.avail_index())
        };
        self.accept_avail(index)?;
        Ok(self.seen_avail != self.next_avail)
    }

    /// Asks the driver not to notify. A hint: one may come all the same.
    #[inline]
    pub fn disarm<M: GuestMemory>(&mut self, memory: &M) -> Result<(), RingError> {
        // With event indices there is nothing to do: the one armed for lies behind, and is passed
        // again only after 2^16 chains.
        if !self.event_idx {
            // Relaxed: a hint that orders nothing.
            self.areas(memory)?.used_flags().store(split::USED_NO_NOTIFY, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether there are chains that have not been taken; looks at the ring only if none is known
    /// of.
    #[inline]
    pub fn has_available<M: GuestMemory>(&mut self, memory: &M) -> Result<bool, RingError> {
        if self.seen_avail == self.next_avail {
            let areas = self.areas(memory)?;
            self.check_avail(&areas)?;
        }
        Ok(self.seen_avail != self.next_avail)
    }
}

#[inline]
fn buffer<'m, M: GuestMemory>(memory: &'m M, head: u16, d: &Descriptor) -> Result<ForeignMut<'m>, RingError> {
    memory.view(d.address, d.len).ok_or(RingError::BufferUnmapped { head, address: d.address, bytes: d.len })
}

fn indirect_entries(head: u16, bytes: u32) -> Result<u16, RingError> {
    let entries = bytes / DESCRIPTOR_BYTES as u32;
    let whole = bytes.is_multiple_of(DESCRIPTOR_BYTES as u32);
    match u16::try_from(entries) {
        Ok(entries @ 1..=MAX_INDIRECT_ENTRIES) if whole => Ok(entries),
        _ => Err(RingError::IndirectLength { head, bytes }),
    }
}
