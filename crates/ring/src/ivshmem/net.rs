//! Ethernet frames between two peers, in the layout of the ivshmem-net drivers of Linux (Siemens)
//! and Zephyr.
//!
//! # Theory of operation
//!
//! One direction is a split virtqueue without header and chains. All that a peer writes is in its
//! own output section:
//!
//! ```text
//!   my section                                       its writer: me
//!   ----------------------------------------------------------------------------------
//!   descriptor table   { offset, len, flags = 0, next } × num      of my frames
//!   available ring     flags, idx, ring[num], used_event           of my frames
//!   used ring          flags, idx, { id, len = 1 }[num], avail_event   of the PEER's frames
//!   data               the frames, one behind the other, round and round
//! ```
//!
//! So the used rings are swapped: the ring that returns my buffers is in the peer's section.
//! `offset` counts from the start of the section. `num` and the place of the data follow from the
//! section's length alone ([`Geometry`]), so the two sides need not exchange anything.
//!
//! A frame is one descriptor, in the form it has on a wire: with checksums, without a header before
//! it or a VLAN tag beside it. The sender lays frames out contiguously and gets them back **in
//! order**. It checks that each used entry names its oldest outstanding frame and has length 1.
//!
//! Doorbells use the event index. `avail_event` says after which frame the receiver wants a
//! doorbell. `used_event` says after which returned buffer the sender wants one. Zephyr always
//! rings and leaves `used_event` at 0.
//!
//! # Offloads
//!
//! Two ends can agree on offloads ([`state::Offloads`](super::state::Offloads)). Then each frame
//! follows a virtio-net header of [`OFFLOAD_HEADER_BYTES`] ([`crate::virtio::net`], without
//! `num_buffers`, so that the IP header is aligned). Both ends accept everything that the header
//! can say: checksums that are still to be computed, and, where the sections have room
//! ([`Geometry::takes_segments`]), TCP that is not yet segmented. Everything else stays as it is.
//!
//! # A request that comes late
//!
//! Linux's sender writes `used_event` without looking at the used index again. That leaves the
//! window of [`notify`] open: it gets no doorbell for buffers that return in this window. It then
//! always publishes one more frame, and that frame's return closes the window:
//! [`Receiver::release`] asks whether the request is past the index of its *last ring*, not of its
//! last check. A request costs one ring at most, late or not.
//!
//! # Invariants and failure
//!
//! The peer may write both sections at any moment (with v1 devices; v2 protects ours). This module
//! never reads back what it wrote to its own section. It reads each word of the peer once and
//! checks it. A word that breaks the rules is a [`NetError`] that names the word. After an error
//! the link must be reset, and nothing that came with the error may be used.
//!
//! Limits: sections below 4 GiB. A sender has up to `N` frames outstanding, for any `num`. A
//! receiver holds [`MAX_HELD`].

use core::num::Wrapping;
use core::sync::atomic::Ordering;

use crate::mem::{Foreign, ForeignMut};
use crate::virtio::notify::{self, Signals, Suppression, Word};

// --- the drivers' ---

/// Alignment of the used ring and of the data area.
const ALIGN: u32 = 64;
/// Most descriptors that a ring is given.
const MAX_NUM: u16 = 4096;
/// The least, in a section too small for more.
const MIN_NUM: u16 = 32;
/// A ring takes less than this part of its section.
const RING_SHARE: u32 = 8;
/// Bytes that a sender adds to a frame before it aligns its place (Ethernet header and VLAN tag,
/// which Linux counts twice).
const FRAME_EXTRA: u32 = 18;
/// What a frame's place is a multiple of: a cache line.
const FRAME_ALIGN: u32 = 64;
/// Least data area, in smallest MTUs of IPv4.
const MIN_DATA: u32 = 4 * 68;
/// The length of each used entry.
const USED_LEN: u32 = 1;

/// Bytes of the header before a frame, where offloads were agreed on.
pub const OFFLOAD_HEADER_BYTES: usize = crate::virtio::net::SHORT_HEADER_BYTES;
/// The longest frame that represents several segments, with its header.
const MAX_SEGMENTED_BYTES: u32 = 65535 + 14 + 4 + OFFLOAD_HEADER_BYTES as u32;

const DESCRIPTOR_BYTES: u32 = 16;
const RING_INDEX: u32 = 2;
const RING_ENTRIES: u32 = 4;
const AVAIL_ENTRY_BYTES: u32 = 2;
const USED_ENTRY_BYTES: u32 = 8;

// --- ours ---

/// Frames that a [`Receiver`] holds between receiving and releasing.
pub const MAX_HELD: usize = 512;
/// Frames that a [`Sender`] has out unless it is told otherwise: as many as the largest ring has.
pub const DEFAULT_DEPTH: usize = MAX_NUM as usize;

/// Why a section was refused, or what a peer wrote that breaks the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum NetError {
    /// A section without room for rings and frames, or of 4 GiB and more, or not aligned to 64
    /// bytes in memory.
    #[error(
        "an output section of {bytes} bytes: below 4 GiB, aligned to 64 bytes, and with room for {MIN_NUM} \
         descriptors and {MIN_DATA} bytes of frames is expected"
    )]
    Section { bytes: u64 },
    /// The available index is further ahead than the ring is long, or ran backwards.
    #[error("available index jumped from {next} to {got} in a ring of {num}")]
    AvailableJump {
        /// The index that was expected next.
        next: u16,
        /// The index that the peer published.
        got: u16,
        num: u16,
    },
    /// An entry of the available ring is no index of the descriptor table.
    #[error("available entry {index} names descriptor {got} of {num}")]
    AvailableEntry { index: u16, got: u16, num: u16 },
    /// A descriptor has flags; frames are single descriptors.
    #[error("descriptor {id} has flags {got:#x}, expected 0: a frame is one descriptor")]
    DescriptorFlags { id: u16, got: u16 },
    /// A descriptor's frame is not wholly inside the data area.
    #[error("descriptor {id}: {len} bytes at {address:#x} are not inside the data area {from:#x} to {to:#x}")]
    DescriptorRange {
        id: u16,
        /// The frame's offset in the section.
        address: u64,
        len: u32,
        /// The first byte of the data area.
        from: u32,
        /// The first byte behind it.
        to: u32,
    },
    /// The used index is further ahead than frames are out.
    #[error("used index jumped from {next} to {got} with {outstanding} frames out")]
    UsedJump {
        /// The index that was expected next.
        next: u16,
        /// The index that the peer published.
        got: u16,
        /// Frames that are out.
        outstanding: u16,
    },
    /// A used entry does not name the oldest frame that is out.
    #[error("used entry {index} names descriptor {got}, expected {expected}: frames return in order")]
    UsedId {
        index: u16,
        /// The descriptor that was expected.
        expected: u16,
        got: u32,
    },
    /// A used entry's length is not 1.
    #[error("used entry {index} has length {got}, expected {USED_LEN}")]
    UsedLen { index: u16, got: u32 },
}

/// Where everything is in a section, by its length alone. Offsets in bytes from the section's
/// start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    num: u16,
    section_bytes: u32,
    used_offset: u32,
    header_bytes: u32,
}

/// `vring_init` and `vring_size` of Linux's virtio_ring.h: offset of the used ring, and end of the
/// rings, aligned.
const fn vring(num: u16) -> (u32, u32) {
    // No overflow: num <= 2^12.
    let num = num as u32;
    let avail_end = (DESCRIPTOR_BYTES + AVAIL_ENTRY_BYTES) * num + 6;
    let used = avail_end.next_multiple_of(ALIGN);
    (used, (used + USED_ENTRY_BYTES * num + 6).next_multiple_of(ALIGN))
}

impl Geometry {
    /// The geometry of a section of `section_bytes`.
    ///
    /// # Errors
    /// [`NetError::Section`] where there is no room for frames, or the section is not below 4 GiB.
    pub const fn new(section_bytes: u64) -> Result<Geometry, NetError> {
        let refused = NetError::Section { bytes: section_bytes };
        if section_bytes > u32::MAX as u64 {
            return Err(refused);
        }
        let section = section_bytes as u32;
        let mut num = MAX_NUM;
        // The place of the data is that of the last size tried, which is twice the least one where
        // none fits: both drivers have it so.
        let mut header_bytes = vring(num).1;
        while header_bytes >= section / RING_SHARE {
            num /= 2;
            if num == MIN_NUM {
                break;
            }
            header_bytes = vring(num).1;
        }
        if header_bytes > section || section - header_bytes < MIN_DATA {
            return Err(refused);
        }
        Ok(Geometry { num, section_bytes: section, used_offset: vring(num).0, header_bytes })
    }

    /// Descriptors of a ring.
    pub const fn num(&self) -> u16 {
        self.num
    }

    /// Size of each peer's output section.
    pub const fn section_bytes(&self) -> u32 {
        self.section_bytes
    }

    /// Bytes before the data area: the rings.
    pub const fn header_bytes(&self) -> u32 {
        self.header_bytes
    }

    /// Bytes of the data area.
    pub const fn data_bytes(&self) -> u32 {
        self.section_bytes - self.header_bytes
    }

    /// Offset of the available ring.
    pub const fn available_offset(&self) -> u32 {
        DESCRIPTOR_BYTES * self.num as u32
    }

    /// Offset of the used ring (of the other side's frames).
    pub const fn used_offset(&self) -> u32 {
        self.used_offset
    }

    /// Where the reader of used entries says when it wants a doorbell.
    pub const fn used_event_offset(&self) -> u32 {
        self.available_offset() + RING_ENTRIES + AVAIL_ENTRY_BYTES * self.num as u32
    }

    /// Where the reader of available entries says when it wants a doorbell.
    pub const fn avail_event_offset(&self) -> u32 {
        self.used_offset + RING_ENTRIES + USED_ENTRY_BYTES * self.num as u32
    }

    /// The MTU that Linux's driver begins with: a sixteenth of the data area, at most 16 KiB.
    pub const fn linux_default_mtu(&self) -> u32 {
        if self.data_bytes() / 16 < 16384 { self.data_bytes() / 16 } else { 16384 }
    }

    /// The largest MTU of Linux's driver: a quarter of the data area, at most 65,535.
    pub const fn max_mtu(&self) -> u32 {
        if self.data_bytes() / 4 < 65535 { self.data_bytes() / 4 } else { 65535 }
    }

    /// Whether ends that agreed on offloads take TCP that is not cut: where four such frames find
    /// room.
    pub const fn takes_segments(&self) -> bool {
        self.data_bytes() / 4 >= MAX_SEGMENTED_BYTES
    }

    /// Bytes of the data area that a frame of `len` bytes takes where it need not wrap.
    const fn place_bytes(len: u32) -> u32 {
        (FRAME_EXTRA + len).next_multiple_of(FRAME_ALIGN)
    }
}

/// The two sections of a link: the own one, and the peer's, which is not written.
#[derive(Clone, Copy, Debug)]
pub struct Sections<'m> {
    own: ForeignMut<'m>,
    peer: Foreign<'m>,
}

/// A word of a section. Reads as 0 and ignores writes where it were outside, which
/// [`Sections::new`] rules out.
struct OwnWord<'m>(ForeignMut<'m>, u32);
struct PeerWord<'m>(Foreign<'m>, u32);

impl Word for OwnWord<'_> {
    type Value = u16;
    #[inline]
    fn load(&self, order: Ordering) -> u16 {
        self.0.as_foreign().load_u16(self.1 as usize, order).unwrap_or(0)
    }
    #[inline]
    fn store(&self, value: u16, order: Ordering) {
        let _ = self.0.store_u16(self.1 as usize, value, order);
    }
}

impl Word for PeerWord<'_> {
    type Value = u16;
    #[inline]
    fn load(&self, order: Ordering) -> u16 {
        self.0.load_u16(self.1 as usize, order).unwrap_or(0)
    }
    #[inline]
    fn store(&self, _: u16, _: Ordering) {
        debug_assert!(false, "a peer's section is not written");
    }
}

impl<'m> Sections<'m> {
    /// The sections of a link of `geometry`.
    ///
    /// # Errors
    /// [`NetError::Section`] where one has another length, or is not aligned to 64 bytes.
    pub fn new(geometry: &Geometry, own: ForeignMut<'m>, peer: Foreign<'m>) -> Result<Sections<'m>, NetError> {
        let starts = [own.as_mut_ptr() as usize, peer.as_ptr() as usize];
        for (start, len) in starts.into_iter().zip([own.len(), peer.len()]) {
            if len != geometry.section_bytes as usize || !start.is_multiple_of(ALIGN as usize) {
                return Err(NetError::Section { bytes: len as u64 });
            }
        }
        Ok(Sections { own, peer })
    }
}

/// Clears the rings of the own section, as both drivers do on their way from INIT to READY: zeros,
/// with the descriptors linked one to the next. A [`Sender`] and a [`Receiver`] made after that
/// start with it.
pub fn initialise(geometry: &Geometry, own: ForeignMut<'_>) {
    let header = own.take(geometry.header_bytes as usize);
    for at in (0..header.len()).step_by(64) {
        header.skip(at).write_from(&[0; 64]);
    }
    for id in 0..geometry.num - 1 {
        let next = DESCRIPTOR_BYTES as usize * usize::from(id) + 14;
        // Relaxed: the state word, written after this, orders it. Cannot fail: inside the header,
        // even.
        let _ = header.store_u16(next, id + 1, Ordering::Relaxed);
    }
}

/// The sending end: frames from here to the peer. It has up to `N` of them out.
#[derive(Clone, Debug)]
pub struct Sender<const N: usize = DEFAULT_DEPTH> {
    geometry: Geometry,
    /// Index of the next available entry to write.
    next_avail: Wrapping<u16>,
    /// The available index as last published.
    published: Wrapping<u16>,
    signals: Signals,
    /// Index of the next used entry to read.
    next_used: Wrapping<u16>,
    /// Where the next frame goes, from the start of the data area.
    head: u32,
    /// Bytes of the data area that frames have, with what was skipped at its end.
    taken_bytes: u32,
    /// Of each frame that is out, by its available index: its part of `taken_bytes`.
    taken: [u32; N],
}

impl<const N: usize> Sender<N> {
    const DEPTH_IS_SANE: () = assert!(N.is_power_of_two() && N <= MAX_NUM as usize, "N: a power of two, up to 4096");

    /// The end of a link whose own section was [`initialise`]d.
    pub const fn new(geometry: &Geometry) -> Sender<N> {
        let () = Self::DEPTH_IS_SANE;
        Sender {
            geometry: *geometry,
            next_avail: Wrapping(0),
            published: Wrapping(0),
            signals: Signals::new(0),
            next_used: Wrapping(0),
            head: 0,
            taken_bytes: 0,
            taken: [0; N],
        }
    }

    /// Starts again, with a section that was [`initialise`]d again.
    pub const fn restart(&mut self) {
        self.next_avail = Wrapping(0);
        self.published = Wrapping(0);
        self.signals = Signals::new(0);
        self.next_used = Wrapping(0);
        self.head = 0;
        self.taken_bytes = 0;
    }

    /// Frames that are out, those not published included.
    pub fn outstanding(&self) -> usize {
        usize::from((self.next_avail - self.next_used).0)
    }

    /// Most frames that may be out.
    pub const fn depth(&self) -> usize {
        if (self.geometry.num as usize) < N { self.geometry.num as usize } else { N }
    }

    /// Bytes of the data area that are taken.
    pub const fn taken_bytes(&self) -> u32 {
        self.taken_bytes
    }

    /// Where a frame of `len` bytes goes, and what it takes of the data area; `None` where there is
    /// no room.
    #[inline]
    fn place(&self, len: usize) -> Option<(u32, u32)> {
        let data = self.geometry.data_bytes();
        // No overflow: len is at most the data area, which leaves more than 18 + 63 bytes for the
        // rings.
        let len = u32::try_from(len).ok().filter(|len| *len != 0 && *len <= data)?;
        let needed = Geometry::place_bytes(len);
        let left = data - self.head;
        let (at, taken) = if needed <= left { (self.head, needed) } else { (0, needed.checked_add(left)?) };
        let fits = taken <= data - self.taken_bytes && self.outstanding() < self.depth();
        fits.then_some((at, taken))
    }

    /// Whether a frame of `len` bytes would find room now.
    #[inline]
    pub fn has_room(&self, len: usize) -> bool {
        self.place(len).is_some()
    }

    /// A place for a frame of `len` bytes, which the caller fills before it calls
    /// [`Sender::publish`]; `None` where there is no room, which [`Sender::reclaim`] may change, or
    /// where `len` is 0 or more than the section could ever hold.
    #[inline]
    pub fn push<'m>(&mut self, sections: &Sections<'m>, len: usize) -> Option<ForeignMut<'m>> {
        let (at, taken) = self.place(len)?;
        let offset = self.geometry.header_bytes + at;
        let place = sections.own.slice(offset as usize, len)?;
        let id = self.next_avail.0 & (self.geometry.num - 1);
        let own = &sections.own;
        // Relaxed: R0, the release of the available index, orders them. Cannot fail: id < num. The
        // descriptor's `next` stays as it was linked.
        let descriptor = (DESCRIPTOR_BYTES * u32::from(id)) as usize;
        let _ = own.store_u64(descriptor, u64::from(offset), Ordering::Relaxed);
        let _ = own.store_u32(descriptor + 8, len as u32, Ordering::Relaxed);
        let _ = own.store_u16(descriptor + 12, 0, Ordering::Relaxed);
        let entry = self.geometry.available_offset() + RING_ENTRIES + AVAIL_ENTRY_BYTES * u32::from(id);
        let _ = own.store_u16(entry as usize, id, Ordering::Relaxed);
        self.taken[usize::from(self.next_avail.0) % N] = taken;
        self.taken_bytes += taken;
        self.head = at + Geometry::place_bytes(len as u32);
        self.next_avail += 1;
        Some(place)
    }

    /// Withdraws the frame pushed last, if it was not published.
    pub fn unpush(&mut self) -> bool {
        if self.next_avail == self.published {
            return false;
        }
        self.next_avail -= 1;
        let taken = self.taken[usize::from(self.next_avail.0) % N];
        self.taken_bytes -= taken;
        // A frame that wrapped took what was left at the end, so its start is that much before the
        // end.
        let data = self.geometry.data_bytes();
        self.head = if taken <= self.head { self.head - taken } else { self.head + data - taken };
        true
    }

    /// Shows the peer what was pushed. Returns whether it wants to be rung for that.
    #[inline]
    pub fn publish(&mut self, sections: &Sections<'_>) -> bool {
        if self.published == self.next_avail {
            return false;
        }
        self.published = self.next_avail;
        notify::publish(&OwnWord(sections.own, self.geometry.available_offset() + RING_INDEX), self.published.0);
        let suppression = self.suppression(sections);
        self.signals.decide(suppression, self.published.0)
    }

    #[inline]
    fn suppression(&self, sections: &Sections<'_>) -> Suppression {
        Suppression::After(notify::suppression(&PeerWord(sections.peer, self.geometry.avail_event_offset())))
    }

    /// Whether the last [`Sender::publish`] said no and was not repeated by
    /// [`Sender::recheck_ring`].
    pub const fn is_in_doubt(&self) -> bool {
        self.signals.is_in_doubt()
    }

    /// Repeats the last decision of [`Sender::publish`]: whether the peer is to be rung late. To be
    /// asked once, [`notify::RECHECK_NS`] after it said no.
    pub fn recheck_ring(&mut self, sections: &Sections<'_>) -> bool {
        self.signals.is_in_doubt() && {
            let suppression = self.suppression(sections);
            self.signals.recheck(suppression, self.published.0)
        }
    }

    /// Reclaims the places of frames that the peer has returned; says how many.
    ///
    /// # Errors
    /// [`NetError`]: an index that jumped, an entry out of order or with another length than 1.
    #[inline]
    pub fn reclaim(&mut self, sections: &Sections<'_>) -> Result<usize, NetError> {
        let index = notify::available(&self.used_index(sections));
        self.take_used(sections, index)
    }

    #[inline]
    fn used_index<'m>(&self, sections: &Sections<'m>) -> PeerWord<'m> {
        PeerWord(sections.peer, self.geometry.used_offset + RING_INDEX)
    }

    #[inline]
    fn take_used(&mut self, sections: &Sections<'_>, index: u16) -> Result<usize, NetError> {
        let count = (Wrapping(index) - self.next_used).0;
        let outstanding = (self.published - self.next_used).0;
        if count > outstanding {
            return Err(NetError::UsedJump { next: self.next_used.0, got: index, outstanding });
        }
        for _ in 0..count {
            let expected = self.next_used.0 & (self.geometry.num - 1);
            let entry = self.geometry.used_offset + RING_ENTRIES + USED_ENTRY_BYTES * u32::from(expected);
            // Relaxed: ordered by A0, the acquire of the index that covers the entry.
            let word = |at: u32| sections.peer.load_u32(at as usize, Ordering::Relaxed).unwrap_or(u32::MAX);
            let (id, len) = (word(entry), word(entry + 4));
            if id != u32::from(expected) {
                return Err(NetError::UsedId { index: self.next_used.0, expected, got: id });
            }
            if len != USED_LEN {
                return Err(NetError::UsedLen { index: self.next_used.0, got: len });
            }
            self.taken_bytes -= self.taken[usize::from(self.next_used.0) % N];
            self.next_used += 1;
        }
        Ok(usize::from(count))
    }

    /// Asks for a doorbell when the next frame returns, and looks again. True: some frames have
    /// returned meanwhile and are reclaimed, so the caller continues instead of sleeping.
    ///
    /// # Errors
    /// As for [`Sender::reclaim`].
    pub fn arm(&mut self, sections: &Sections<'_>) -> Result<bool, NetError> {
        let suppression = OwnWord(sections.own, self.geometry.used_event_offset());
        let index = notify::arm(&suppression, self.next_used.0, &self.used_index(sections));
        Ok(self.take_used(sections, index)? != 0)
    }
}

/// The receiving end: frames from the peer.
#[derive(Clone, Debug)]
pub struct Receiver {
    geometry: Geometry,
    /// Index of the next available entry to read.
    next_avail: Wrapping<u16>,
    /// The available index as last read.
    seen_avail: Wrapping<u16>,
    /// Index of the next used entry to write.
    next_used: Wrapping<u16>,
    signals: Signals,
    /// Descriptors of frames received and not released, by available index.
    held: [u16; MAX_HELD],
}

impl Receiver {
    /// The end of a link whose own section was [`initialise`]d.
    pub const fn new(geometry: &Geometry) -> Receiver {
        Receiver {
            geometry: *geometry,
            next_avail: Wrapping(0),
            seen_avail: Wrapping(0),
            next_used: Wrapping(0),
            signals: Signals::new(0),
            held: [0; MAX_HELD],
        }
    }

    /// Starts again, with a section that was [`initialise`]d again.
    pub const fn restart(&mut self) {
        self.next_avail = Wrapping(0);
        self.seen_avail = Wrapping(0);
        self.next_used = Wrapping(0);
        self.signals = Signals::new(0);
    }

    /// Frames received and not released.
    pub fn held(&self) -> usize {
        usize::from((self.next_avail - self.next_used).0)
    }

    /// Frames that the peer has published and that were not received, as of the last look.
    pub fn waiting(&self) -> usize {
        usize::from((self.seen_avail - self.next_avail).0)
    }

    #[inline]
    fn accept(&mut self, index: u16) -> Result<(), NetError> {
        // The peer has at most `num` frames out, of which some were received and not released.
        let ahead = (Wrapping(index) - self.next_used).0.max((Wrapping(index) - self.next_avail).0);
        if ahead > self.geometry.num {
            return Err(NetError::AvailableJump { next: self.next_avail.0, got: index, num: self.geometry.num });
        }
        self.seen_avail = Wrapping(index);
        Ok(())
    }

    #[inline]
    fn avail_index<'m>(&self, sections: &Sections<'m>) -> PeerWord<'m> {
        PeerWord(sections.peer, self.geometry.available_offset() + RING_INDEX)
    }

    /// Hands up to `max` frames to `sink`, which is the place to prefetch; returns how many. A view
    /// may be empty, since a length of 0 breaks no rule. They are held until [`Receiver::release`].
    ///
    /// # Errors
    /// [`NetError`]: an index that jumped, an entry or a descriptor that is none. What the sink got before is not to be used.
    #[inline]
    pub fn receive<'m>(
        &mut self,
        sections: &Sections<'m>,
        max: usize,
        mut sink: impl FnMut(Foreign<'m>),
    ) -> Result<usize, NetError> {
        let want = max.min(MAX_HELD - self.held());
        let mut ready = usize::from((self.seen_avail - self.next_avail).0);
        if ready < want {
            self.accept(notify::available(&self.avail_index(sections)))?;
            ready = usize::from((self.seen_avail - self.next_avail).0);
        }
        let count = ready.min(want);
        let mut next = self.next_avail.0;
        for _ in 0..count {
            let (id, frame) = self.frame(sections, next)?;
            sink(frame);
            self.held[usize::from(next) % MAX_HELD] = id;
            next = next.wrapping_add(1);
        }
        self.next_avail = Wrapping(next);
        Ok(count)
    }

    /// The descriptor and the bytes behind available index `index`.
    #[inline]
    fn frame<'m>(&self, sections: &Sections<'m>, index: u16) -> Result<(u16, Foreign<'m>), NetError> {
        let Geometry { num, section_bytes: to, header_bytes: from, .. } = self.geometry;
        let entry = self.geometry.available_offset() + RING_ENTRIES + AVAIL_ENTRY_BYTES * u32::from(index & (num - 1));
        // Relaxed, all three: ordered by A0, the acquire of the index that covers the entry and its
        // descriptor.
        let id = sections.peer.load_u16(entry as usize, Ordering::Relaxed).unwrap_or(u16::MAX);
        if id >= num {
            return Err(NetError::AvailableEntry { index, got: id, num });
        }
        let descriptor = (DESCRIPTOR_BYTES * u32::from(id)) as usize;
        let long = |at| sections.peer.load_u64(at, Ordering::Relaxed).unwrap_or(u64::MAX);
        let (address, rest) = (long(descriptor), long(descriptor + 8));
        let (len, flags) = (rest as u32, (rest >> 32) as u16);
        if flags != 0 {
            return Err(NetError::DescriptorFlags { id, got: flags });
        }
        let range = NetError::DescriptorRange { id, address, len, from, to };
        let inside = address >= u64::from(from) && address < u64::from(to) && u64::from(len) <= u64::from(to) - address;
        if !inside {
            return Err(range);
        }
        // In range: below `to`, the length of the section.
        let frame = sections.peer.slice(address as usize, len as usize).ok_or(range)?;
        Ok((id, frame))
    }

    /// Gives the frames received last back, as if they had not been received; at most as many as
    /// are held.
    #[inline]
    pub fn unreceive(&mut self, count: usize) {
        // In range: held() is at most MAX_HELD.
        self.next_avail -= count.min(self.held()) as u16;
    }

    /// Returns the oldest `count` held frames to the peer, at most as many as are held. Says
    /// whether the peer wants to be rung for that.
    #[inline]
    pub fn release(&mut self, sections: &Sections<'_>, count: usize) -> bool {
        let count = count.min(self.held());
        if count == 0 {
            return false;
        }
        let own = &sections.own;
        for _ in 0..count {
            let id = self.held[usize::from(self.next_used.0) % MAX_HELD];
            let slot = u32::from(self.next_used.0 & (self.geometry.num - 1));
            let entry = (self.geometry.used_offset + RING_ENTRIES + USED_ENTRY_BYTES * slot) as usize;
            // Relaxed: R0, the release of the index, orders them. Cannot fail: slot < num.
            let _ = own.store_u32(entry, u32::from(id), Ordering::Relaxed);
            let _ = own.store_u32(entry + 4, USED_LEN, Ordering::Relaxed);
            self.next_used += 1;
        }
        notify::publish(&OwnWord(*own, self.geometry.used_offset + RING_INDEX), self.next_used.0);
        let suppression = self.suppression(sections);
        // Late: see the module's head.
        self.signals.decide_late(suppression, self.next_used.0)
    }

    #[inline]
    fn suppression(&self, sections: &Sections<'_>) -> Suppression {
        Suppression::After(notify::suppression(&PeerWord(sections.peer, self.geometry.used_event_offset())))
    }

    /// Whether the last [`Receiver::release`] said no and was not repeated by
    /// [`Receiver::recheck_ring`].
    pub const fn is_in_doubt(&self) -> bool {
        self.signals.is_in_doubt()
    }

    /// Repeats the last decision of [`Receiver::release`]: whether the peer is to be rung late. To
    /// be asked once, [`notify::RECHECK_NS`] after it said no.
    pub fn recheck_ring(&mut self, sections: &Sections<'_>) -> bool {
        self.signals.is_in_doubt() && {
            let suppression = self.suppression(sections);
            self.signals.recheck(suppression, self.next_used.0)
        }
    }

    /// Asks to be rung for the next frame, and looks again. True: there is one already, so the
    /// caller goes on instead of sleeping.
    ///
    /// # Errors
    /// [`NetError::AvailableJump`].
    #[inline]
    pub fn arm(&mut self, sections: &Sections<'_>) -> Result<bool, NetError> {
        let suppression = OwnWord(sections.own, self.geometry.avail_event_offset());
        let index = notify::arm(&suppression, self.next_avail.0, &self.avail_index(sections));
        self.accept(index)?;
        Ok(self.seen_avail != self.next_avail)
    }

    /// Whether there are frames that were not received.
    ///
    /// # Errors
    /// [`NetError::AvailableJump`].
    #[inline]
    pub fn has_available(&mut self, sections: &Sections<'_>) -> Result<bool, NetError> {
        if self.seen_avail == self.next_avail {
            self.accept(notify::available(&self.avail_index(sections)))?;
        }
        Ok(self.seen_avail != self.next_avail)
    }
}
