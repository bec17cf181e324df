//! The driver side of a split virtqueue, for the unikernel, and as the mock peer of tests.
//!
//! The caller owns the memory: one piece for the ring, laid out by [`Layout`](super::Layout), and
//! the buffers. It names each buffer by the address that the *device* uses for it. Nothing is
//! allocated: the queue's own state is in an array of `N`, the largest size of the queue.
//!
//! The device is hostile too: it can write all over the ring. So free descriptors and outstanding
//! chains are remembered here and not read back from the ring. What a device returns is checked
//! against that.

use core::num::Wrapping;
use core::sync::atomic::Ordering;

use super::notify::{self, Signals, Suppression, Word};
use super::split::{self, Areas, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor};
use super::{RingError, features};
use crate::mem::ForeignMut;

/// A buffer for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its address, as the device knows it.
    pub address: u64,
    /// Its length in bytes, at least 1.
    pub len: u32,
    /// Whether the device writes it; otherwise it reads it.
    pub writable: bool,
}

/// A chain that the device has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// What the caller gave along with the chain.
    pub token: u32,
    /// Bytes that the device says it wrote, checked against the room that it had.
    pub len: u32,
}

/// What is remembered of a descriptor.
#[derive(Clone, Copy, Debug)]
struct DescriptorSlot {
    /// The next one of the free list, or of the chain.
    next: u16,
    /// Descriptors in the chain that starts here; 0 where none does.
    count: u16,
    token: u32,
    /// Bytes that the device may write into the chain.
    room: u32,
}

/// The driver side of a queue of up to `N` descriptors. See the module's head.
#[derive(Debug)]
pub struct DriverQueue<'m, const N: usize> {
    areas: Areas<'m>,
    size: u16,
    event_idx: bool,
    indirect: bool,
    in_order: bool,
    slots: [DescriptorSlot; N],
    /// First of the free list, which is as long as `free`.
    free_head: u16,
    free: u16,
    /// Index of the next available entry to write.
    next_avail: Wrapping<u16>,
    /// The available index as last published.
    published: Wrapping<u16>,
    signals: Signals,
    /// Index of the next used entry to read.
    next_used: Wrapping<u16>,
    /// The used index as last read.
    seen_used: Wrapping<u16>,
    /// Head of each chain by its available index, for devices that answer in order.
    order: [u16; N],
    /// With in-order: the chain up to which the entry that was read last speaks.
    batch_end: Wrapping<u16>,
}

impl<'m, const N: usize> DriverQueue<'m, N> {
    /// A queue of `size` descriptors in `ring`, which is zeroed. `agreed` are the features agreed
    /// on. `ring` is aligned to 16 bytes and at least [`Layout::bytes`](super::Layout) long; `size`
    /// is at most `N`.
    pub fn new(ring: ForeignMut<'m>, size: u16, agreed: u64) -> Result<Self, RingError> {
        let size = split::check_size(u32::from(size))?;
        if usize::from(size) > N {
            return Err(RingError::QueueSize { got: u32::from(size) });
        }
        let areas = Areas::lay_out(ring, size)?;
        for at in (0..ring.len()).step_by(64) {
            ring.skip(at).write_from(&[0; 64]);
        }
        // A circle, for devices that answer in order: descriptors are then taken one after the
        // other, as VirtIO 1.3 §2.7.5.1 demands. Only the first `size` <= 2^15 slots matter.
        let slots = core::array::from_fn(|i| DescriptorSlot {
            next: (i as u16).wrapping_add(1) & (size - 1),
            count: 0,
            token: 0,
            room: 0,
        });
        Ok(DriverQueue {
            areas,
            size,
            event_idx: agreed & features::EVENT_IDX != 0,
            indirect: agreed & features::INDIRECT_DESC != 0,
            in_order: agreed & features::IN_ORDER != 0,
            slots,
            free_head: 0,
            free: size,
            next_avail: Wrapping(0),
            published: Wrapping(0),
            signals: Signals::new(0),
            next_used: Wrapping(0),
            seen_used: Wrapping(0),
            order: [0; N],
            batch_end: Wrapping(0),
        })
    }

    /// Number of descriptors.
    pub const fn size(&self) -> u16 {
        self.size
    }

    /// Descriptors that are free.
    pub const fn free(&self) -> usize {
        self.free as usize
    }

    /// Chains that the device has, or that wait to be published.
    pub fn outstanding(&self) -> usize {
        usize::from((self.next_avail - self.next_used).0)
    }

    /// Adds a chain of `segments`, readable ones first; `token` comes back with it. False, and
    /// nothing done, where there are not as many free descriptors, or no segment.
    /// [`DriverQueue::publish`] shows it to the device.
    pub fn add(&mut self, segments: &[Segment], token: u32) -> bool {
        if segments.is_empty() || segments.len() > usize::from(self.free) {
            return false;
        }
        let head = self.free_head;
        let mut index = head;
        let mut room = 0u32;
        for (left, segment) in segments.iter().enumerate().map(|(i, s)| (segments.len() - 1 - i, s)) {
            let next = self.slots[usize::from(index)].next;
            let flags = if segment.writable { DESC_WRITE } else { 0 } | if left > 0 { DESC_NEXT } else { 0 };
            let next_in_chain = if left > 0 { next } else { 0 };
            let descriptor = Descriptor { address: segment.address, len: segment.len, flags, next: next_in_chain };
            // Cannot fail: index < size, from the free list.
            let _ = descriptor.write(self.areas.descriptors, index);
            room = room.saturating_add(if segment.writable { segment.len } else { 0 });
            index = next;
        }
        self.start(head, segments.len() as u16, room, token, index);
        true
    }

    /// Adds a chain whose descriptors are in a table of the caller's at the device's address
    /// `table`, `entries` long (see [`Descriptor::write`]). The device may write `room` bytes into
    /// the chain. False where no descriptor is free or the feature was not agreed on.
    pub fn add_indirect(&mut self, table: u64, entries: u16, room: u32, token: u32) -> bool {
        if self.free == 0 || !self.indirect || entries == 0 {
            return false;
        }
        let head = self.free_head;
        let len = u32::from(entries) * split::DESCRIPTOR_BYTES as u32;
        let descriptor = Descriptor { address: table, len, flags: DESC_INDIRECT, next: 0 };
        // Cannot fail: head < size, from the free list.
        let _ = descriptor.write(self.areas.descriptors, head);
        let next = self.slots[usize::from(head)].next;
        self.start(head, 1, room, token, next);
        true
    }

    fn start(&mut self, head: u16, count: u16, room: u32, token: u32, free_head: u16) {
        self.free_head = free_head;
        self.free -= count;
        let slot = &mut self.slots[usize::from(head)];
        (slot.count, slot.token, slot.room) = (count, token, room);
        let at = self.next_avail.0 & (self.size - 1);
        self.areas.set_avail_entry(at, head);
        self.order[usize::from(at)] = head;
        self.next_avail += 1;
    }

    /// Shows the device what was added. Returns whether it wants to be notified of that.
    pub fn publish(&mut self) -> bool {
        if self.published == self.next_avail {
            return false;
        }
        self.published = self.next_avail;
        notify::publish(&self.areas.avail_index(), self.published.0);
        let suppression = self.suppression();
        self.signals.decide(suppression, self.published.0)
    }

    fn suppression(&self) -> Suppression {
        if self.event_idx {
            Suppression::After(notify::suppression(&self.areas.avail_event(self.size)))
        } else {
            Suppression::Always(notify::suppression(&self.areas.used_flags()) & split::USED_NO_NOTIFY == 0)
        }
    }

    /// Whether the last [`DriverQueue::publish`] said no and was not repeated by
    /// [`DriverQueue::recheck_notify`].
    pub const fn is_in_doubt(&self) -> bool {
        self.signals.is_in_doubt()
    }

    /// Repeats the last decision of [`DriverQueue::publish`]: whether the device is to be notified
    /// late. To be asked once, [`notify::RECHECK_NS`] after it said no: the fences of one of the
    /// two sides may do nothing.
    pub fn recheck_notify(&mut self) -> bool {
        if !self.signals.is_in_doubt() {
            return false;
        }
        let suppression = self.suppression();
        self.signals.recheck(suppression, self.published.0)
    }

    /// Whether the device has returned chains without a notification: the second look some time
    /// after [`DriverQueue::arm`].
    pub fn has_used(&mut self) -> Result<bool, RingError> {
        if self.seen_used == self.next_used {
            self.accept_used(notify::available(&self.areas.used_index()))?;
        }
        Ok(self.seen_used != self.next_used)
    }

    /// The next chain that the device has returned, if there is one.
    pub fn take_used(&mut self) -> Result<Option<Used>, RingError> {
        if self.next_used == self.seen_used {
            self.accept_used(notify::available(&self.areas.used_index()))?;
            if self.next_used == self.seen_used {
                return Ok(None);
            }
        }
        if self.in_order {
            return self.take_in_order().map(Some);
        }
        let (id, len) = self.areas.used_entry(self.next_used.0 & (self.size - 1));
        let head = self.outstanding_head(id)?;
        self.finish(head, len).map(Some)
    }

    /// The device may have written one entry for a batch; those before the one that it names
    /// returned with length 0.
    fn take_in_order(&mut self) -> Result<Used, RingError> {
        let at = self.next_used.0 & (self.size - 1);
        let head = self.order[usize::from(at)];
        if self.next_used != self.batch_end {
            return self.finish(head, 0);
        }
        let (id, len) = self.areas.used_entry(at);
        let named = self.outstanding_head(id)?;
        if named == head {
            self.batch_end = self.next_used + Wrapping(1);
            return self.finish(head, len);
        }
        // A batch: the entry names its last chain, which must be among those that the used index
        // covers.
        let mut end = self.next_used + Wrapping(1);
        while end != self.seen_used {
            let candidate = self.order[usize::from(end.0 & (self.size - 1))];
            end += 1;
            if candidate == named {
                self.batch_end = end;
                return self.finish(head, 0);
            }
        }
        Err(RingError::UsedId { got: id, size: self.size })
    }

    fn outstanding_head(&self, id: u32) -> Result<u16, RingError> {
        let refused = RingError::UsedId { got: id, size: self.size };
        let head = u16::try_from(id).ok().filter(|id| *id < self.size).ok_or(refused)?;
        if self.slots[usize::from(head)].count == 0 { Err(refused) } else { Ok(head) }
    }

    fn finish(&mut self, head: u16, len: u32) -> Result<Used, RingError> {
        let DescriptorSlot { count, token, room, .. } = self.slots[usize::from(head)];
        if len > room {
            return Err(RingError::UsedLength { head, got: len, limit: room });
        }
        self.slots[usize::from(head)].count = 0;
        // In order, the free ones are the circle's rest, which grows by itself.
        if !self.in_order {
            // To the front of the free list: its descriptors are linked by `next` already.
            let mut last = head;
            for _ in 1..count {
                last = self.slots[usize::from(last)].next;
            }
            self.slots[usize::from(last)].next = self.free_head;
            self.free_head = head;
        }
        self.free += count;
        self.next_used += 1;
        Ok(Used { token, len })
    }

    fn accept_used(&mut self, index: u16) -> Result<(), RingError> {
        let outstanding = (self.published - self.next_used).0;
        if (Wrapping(index) - self.next_used).0 > outstanding {
            return Err(RingError::UsedJump { next: self.next_used.0, got: index, outstanding });
        }
        self.seen_used = Wrapping(index);
        Ok(())
    }

    /// Asks the device to interrupt for the next returned chain, and looks again. If this returns
    /// true there is one already: the caller goes on instead of sleeping.
    pub fn arm(&mut self) -> Result<bool, RingError> {
        let index = if self.event_idx {
            notify::arm(&self.areas.used_event(self.size), self.next_used.0, &self.areas.used_index())
        } else {
            notify::arm(&self.areas.avail_flags(), 0, &self.areas.used_index())
        };
        self.accept_used(index)?;
        Ok(self.seen_used != self.next_used)
    }

    /// Asks the device not to interrupt. A hint: one may come all the same.
    pub fn disarm(&mut self) {
        if !self.event_idx {
            // Relaxed: a hint that orders nothing.
            self.areas.avail_flags().store(split::AVAIL_NO_INTERRUPT, Ordering::Relaxed);
        }
    }
}
