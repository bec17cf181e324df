//! Frames on their way through the switch.
//!
//! A frame's first [`HEAD_BYTES`] bytes are copied once into local memory. The switch decides only
//! on these bytes (addresses, protocol headers), and exactly these bytes leave it. A peer that
//! rewrites its buffer meanwhile changes only payload. The rest stays in its source's memory as
//! [`Foreign`] segments. It is copied once, straight into the destination's buffer. A small frame
//! is wholly in the head, and its source is not touched again.
//!
//! A [`Batch`] holds the frames that one turn took from one port. It borrows the source's memory
//! for its lifetime, so a port cannot change or release its buffers while the batch lives.

use crate::class::{Class, Marking};
use crate::mac::Address;
use crate::wait::Token;
use tombolo_ring::mem::{Foreign, ForeignMut};

/// Bytes of a frame that are copied into local memory: Ethernet 14 + two VLAN tags 8 + IPv6 40 +
/// TCP 60 = 122.
pub const HEAD_BYTES: usize = 128;

/// Bytes of an Ethernet header: destination, source, type.
pub const ETHERNET_HEADER_BYTES: usize = 14;

/// The longest frame that anything here carries: a segmentation-offload frame of 64 KiB with its
/// header and tags.
pub const MAX_FRAME_BYTES: usize = 65_535 + ETHERNET_HEADER_BYTES + 8;

/// Bytes of a VLAN tag (IEEE 802.1Q §9.6): type 0x8100 and the tag control information.
pub const TAG_BYTES: usize = 4;

const TAG_TYPE: [u8; 2] = [0x81, 0];

/// A MAC address, in wire order.
pub type Mac = [u8; 6];

/// What is known of a frame's transport checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// The bytes hold a checksum that was not verified.
    #[default]
    Unverified,
    /// Somebody we trust for it (the host's kernel, a device) has checked it, or it never left this
    /// machine.
    Valid,
    /// The checksum field holds only the pseudo-header's sum. The side that sends the frame to a
    /// wire must sum the bytes from `start` to the end and put the result at `start + offset`.
    Partial {
        /// First byte that is summed, from the start of the frame.
        start: u16,
        /// Where the sum goes, from `start`.
        offset: u16,
    },
}

/// The protocol by which a frame is to be cut into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentKind {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// Datagrams of one UDP flow, over IPv4 or IPv6.
    Udp,
}

impl SegmentKind {
    /// The number of the transport protocol, and where in its header the checksum is, in bytes.
    pub(crate) const fn transport(self) -> (u8, usize) {
        match self {
            SegmentKind::Tcp4 | SegmentKind::Tcp6 => (6, 16),
            SegmentKind::Udp => (17, 6),
        }
    }
}

/// A frame that represents several segments of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segmentation {
    /// What kind of stream.
    pub kind: SegmentKind,
    /// Whether the congestion-window-reduced flag belongs to the first segment only.
    pub ecn: bool,
    /// Payload bytes of each segment or datagram, the last one excepted; never 0.
    pub size: u16,
    /// Bytes of all headers, which each segment repeats; a hint of the sender, 0 where it gave
    /// none.
    pub header_bytes: u16,
}

/// Offload state that travels with a frame from port to port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offload {
    /// State of the transport checksum.
    pub checksum: Checksum,
    /// How the frame is to be segmented, where it represents several segments.
    pub segmentation: Option<Segmentation>,
}

impl Offload {
    /// A frame as it is on a wire.
    pub const NONE: Offload = Offload { checksum: Checksum::Unverified, segmentation: None };
}

/// One frame of a [`Batch`]: the local copy of its head, and where its remaining bytes are.
#[derive(Clone, Debug)]
pub struct Frame {
    /// With room for a tag that is put in.
    head: [u8; HEAD_BYTES + TAG_BYTES],
    /// Length of the whole frame, head included.
    len: u32,
    first_segment: u32,
    segments: u16,
    head_len: u16,
    /// The 802.1p priority of the tag that was taken out; 0 without one.
    priority: u8,
    /// Offload state. The code that pushed the frame has checked it against the frame's length.
    pub offload: Offload,
}

impl Frame {
    const EMPTY: Frame = Frame {
        head: [0; HEAD_BYTES + TAG_BYTES],
        len: 0,
        first_segment: 0,
        segments: 0,
        head_len: 0,
        priority: 0,
        offload: Offload::NONE,
    };

    /// The 802.1p priority that the frame came with; 0 without a tag.
    pub(crate) fn priority(&self) -> u8 {
        self.tag().map_or(self.priority, |tag| (tag >> 13) as u8)
    }

    /// Length of the frame in bytes: Ethernet header and payload, without frame check sequence.
    #[inline]
    #[allow(clippy::len_without_is_empty)] // a frame without a byte is never pushed
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// The local copy of the first bytes: all of them, or about [`HEAD_BYTES`]. A tag that was put
    /// in or taken out makes the head of a longer frame longer or shorter.
    #[inline]
    pub fn head(&self) -> &[u8] {
        &self.head[..self.head_len as usize]
    }

    /// Destination address; zero where the frame is a runt.
    #[inline]
    pub fn destination(&self) -> Mac {
        let [a, b, c, d, e, f, ..] = self.head;
        [a, b, c, d, e, f]
    }

    /// Destination and source as numbers, for look-ups; zero where the frame is a runt.
    #[inline]
    pub fn addresses(&self) -> (Address, Address) {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, ..] = self.head;
        let destination = Address::from_low_bits(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
        (destination, Address::from_low_bits(u64::from_le_bytes([g, h, i, j, k, l, m, n])))
    }

    /// Source address; zero where the frame is a runt.
    #[inline]
    pub fn source(&self) -> Mac {
        let [_, _, _, _, _, _, a, b, c, d, e, f, ..] = self.head;
        [a, b, c, d, e, f]
    }
}

impl Frame {
    /// [`Frame::head`], for changes that keep its length.
    pub(crate) fn head_mut(&mut self) -> &mut [u8] {
        &mut self.head[..self.head_len as usize]
    }

    /// The control information of the frame's outer VLAN tag of type 0x8100, where all of it is
    /// there.
    #[inline]
    pub fn tag(&self) -> Option<u16> {
        (self.head_len as usize >= ETHERNET_HEADER_BYTES + TAG_BYTES && self.head[12..14] == TAG_TYPE)
            .then(|| u16::from_be_bytes([self.head[14], self.head[15]]))
    }

    /// Gives the frame this VLAN tag, in place of the one it has, or none. The offload state
    /// follows. A frame without a tag is not longer than [`MAX_FRAME_BYTES`] less a tag's, nor was
    /// a tag put into it that it had not before.
    pub(crate) fn set_tag(&mut self, tag: Option<u16>) {
        const AT: usize = ETHERNET_HEADER_BYTES - 2;
        let shift = match (self.tag(), tag) {
            (Some(old), None) => {
                self.priority = (old >> 13) as u8;
                self.head.copy_within(AT + TAG_BYTES.., AT);
                -(TAG_BYTES as i16)
            }
            (None, Some(_)) => {
                // One that ends with the array is there only if the frame came with its tag.
                debug_assert!(self.head_len as usize <= HEAD_BYTES);
                // A fixed number of bytes takes a few vector instructions.
                self.head.copy_within(AT..HEAD_BYTES, AT + TAG_BYTES);
                TAG_BYTES as i16
            }
            _ => 0,
        };
        if let Some(tag) = tag {
            self.head[AT..AT + 2].copy_from_slice(&TAG_TYPE);
            self.head[AT + 2..AT + 4].copy_from_slice(&tag.to_be_bytes());
        }
        if shift != 0 {
            self.head_len = self.head_len.saturating_add_signed(shift);
            self.len = self.len.saturating_add_signed(shift.into());
            if let Checksum::Partial { start, .. } = &mut self.offload.checksum {
                *start = start.saturating_add_signed(shift);
            }
            if let Some(cut) = self.offload.segmentation.as_mut().filter(|cut| cut.header_bytes != 0) {
                cut.header_bytes = cut.header_bytes.saturating_add_signed(shift);
            }
        }
    }
}

/// The frames that one turn took from one port, in order.
#[derive(Debug, Default)]
pub struct Batch<'m> {
    /// Slots stay initialised and are reused, so that no turn clears 128 bytes per frame; `used`
    /// counts the live ones.
    slots: Vec<Frame>,
    used: usize,
    segments: Vec<Foreign<'m>>,
    ingress: Option<Token>,
    marking: Marking,
    may_merge: bool,
}

impl<'m> Batch<'m> {
    /// An empty batch with room for `frames` before it allocates.
    pub fn with_capacity(frames: usize) -> Self {
        let (slots, segments) = (vec![Frame::EMPTY; frames], Vec::with_capacity(frames));
        Batch { slots, segments, ..Batch::default() }
    }

    /// Says which port the frames came from. The worker sets it after
    /// [`crate::port::Port::receive`]; a batch that was recycled names no port.
    #[inline]
    pub fn set_ingress(&mut self, port: Token) {
        self.ingress = Some(port);
    }

    /// Says by what the frames get their class, as [`Batch::set_ingress`] says whose they are.
    #[inline]
    pub(crate) fn set_marking(&mut self, marking: Marking) {
        self.marking = marking;
    }

    #[inline]
    pub(crate) fn marking(&self) -> Marking {
        self.marking
    }

    /// The class of `frame`, a frame of this batch.
    pub(crate) fn class_of(&self, frame: &Frame) -> Class {
        self.marking.class(frame.priority(), frame)
    }

    /// The port that the frames came from, where the worker said so. Inner ports keep accounts per
    /// source by it, since a guest can write any source address into its frames.
    #[inline]
    pub fn ingress(&self) -> Option<Token> {
        self.ingress
    }

    /// Says that the peer cannot hand over segmented frames, so that it is worth while to look for
    /// segments of one stream ([`crate::merge`]). Called by [`crate::port::Port::receive`]; a batch
    /// that was recycled says nothing.
    #[inline]
    pub fn set_may_merge(&mut self) {
        self.may_merge = true;
    }

    /// Whether segments of one stream are worth looking for.
    #[inline]
    pub(crate) fn may_merge(&self) -> bool {
        self.may_merge
    }

    /// Number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.used
    }

    /// Whether there is no frame.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// The frames, in the order in which they came.
    #[inline]
    pub fn frames(&self) -> &[Frame] {
        &self.slots[..self.used]
    }

    /// The frames, for a change of their offload state.
    #[inline]
    pub fn frames_mut(&mut self) -> &mut [Frame] {
        &mut self.slots[..self.used]
    }

    /// Appends a frame that lies in one piece, such as a small frame of a guest. `offload` was
    /// checked against its length.
    #[inline]
    pub fn push(&mut self, bytes: Foreign<'m>, offload: Offload) {
        debug_assert!(!bytes.is_empty() && bytes.len() <= MAX_FRAME_BYTES);
        let first_segment = self.segments.len() as u32;
        let slot = self.slot();
        let head_len = bytes.read_into(&mut slot.head[..HEAD_BYTES]);
        // A runt leaves no bytes of an earlier frame where its addresses would be.
        if head_len < ETHERNET_HEADER_BYTES {
            slot.head[head_len..ETHERNET_HEADER_BYTES].fill(0);
        }
        slot.head_len = head_len as u16;
        slot.priority = 0;
        slot.len = bytes.len() as u32;
        slot.first_segment = first_segment;
        slot.offload = offload;
        if bytes.len() > head_len {
            slot.segments = 1;
            self.segments.push(bytes.skip(head_len));
        } else {
            slot.segments = 0;
        }
    }

    /// Appends a frame that lies in several pieces. `offload` was checked against its length.
    /// Without a byte in any piece nothing is appended.
    pub fn push_pieces(&mut self, pieces: impl IntoIterator<Item = Foreign<'m>>, offload: Offload) {
        let first_segment = self.segments.len();
        let used = self.used;
        let slot = self.slot();
        let (mut head_len, mut len) = (0, 0);
        // The slot is borrowed while segments are pushed, so take its head out of the way by index.
        slot.offload = offload;
        slot.first_segment = first_segment as u32;
        for piece in pieces {
            len += piece.len();
            let taken = piece.read_into(&mut self.slots[used].head[head_len..HEAD_BYTES]);
            head_len += taken;
            if piece.len() > taken {
                self.segments.push(piece.skip(taken));
            }
        }
        let segments = self.segments.len() - first_segment;
        let slot = &mut self.slots[used];
        if head_len < ETHERNET_HEADER_BYTES {
            slot.head[head_len..ETHERNET_HEADER_BYTES].fill(0);
        }
        slot.head_len = head_len as u16;
        slot.priority = 0;
        slot.len = len as u32;
        slot.segments = segments as u16;
        debug_assert!(len <= MAX_FRAME_BYTES && segments <= u16::MAX as usize);
        if len == 0 {
            self.used = used;
        }
    }

    /// Appends `frame`, a frame of `from`, whose head is copied.
    pub(crate) fn push_frame(&mut self, from: &'m Batch<'_>, frame: &Frame) {
        let first_segment = self.segments.len() as u32;
        let slot = self.slot();
        slot.clone_from(frame);
        slot.first_segment = first_segment;
        self.segments.extend_from_slice(from.tail(frame));
    }

    /// Appends the bytes of `frame`, a frame of `from`, behind its first `skip` ones, which are
    /// within its head, to the last frame, whose head stays as it is. Together they are not longer
    /// than [`MAX_FRAME_BYTES`].
    pub(crate) fn append_to_last(&mut self, from: &'m Batch<'_>, frame: &'m Frame, skip: usize) {
        let before = self.segments.len();
        let head = &frame.head()[skip.min(frame.head().len())..];
        if !head.is_empty() {
            self.segments.push(Foreign::from(head));
        }
        self.segments.extend_from_slice(from.tail(frame));
        let added = (self.segments.len() - before) as u16;
        if let Some(last) = self.slots[..self.used].last_mut() {
            last.segments += added;
            last.len += (frame.len() - skip) as u32;
        }
    }

    /// The pieces of `frame`, a frame of this batch, that lie behind its head, in order.
    #[inline]
    pub fn tail(&self, frame: &Frame) -> &[Foreign<'m>] {
        let first = frame.first_segment as usize;
        &self.segments[first..first + frame.segments as usize]
    }

    /// Copies `frame`, a frame of this batch, into `to`, from the frame's first byte on; returns
    /// how many bytes fitted. For a destination whose buffer is in several pieces see
    /// [`Batch::copy_scattered`].
    #[inline]
    pub fn copy(&self, frame: &Frame, to: ForeignMut<'_>) -> usize {
        let mut at = to.write_from(frame.head());
        for piece in self.tail(frame) {
            at += piece.copy_to(to.skip(at));
        }
        at
    }

    /// Copies `frame`, a frame of this batch, into the pieces of `to`, in order; returns how many
    /// bytes fitted.
    pub fn copy_scattered<'d>(&self, frame: &Frame, to: impl IntoIterator<Item = ForeignMut<'d>>) -> usize {
        let mut to = to.into_iter();
        let mut room = to.next();
        let mut done = 0;
        let head = Foreign::from(frame.head());
        for mut piece in std::iter::once(head).chain(self.tail(frame).iter().copied()) {
            while !piece.is_empty() {
                let Some(into) = room else { return done };
                let n = piece.copy_to(into);
                done += n;
                piece = piece.skip(n);
                room = if n == into.len() { to.next() } else { Some(into.skip(n)) };
            }
        }
        done
    }

    /// Copies `frame`, a frame of this batch, to the end of `to`.
    pub fn append_to(&self, frame: &Frame, to: &mut Vec<u8>) {
        let start = to.len();
        to.resize(start + frame.len(), 0);
        let copied = self.copy(frame, ForeignMut::from(&mut to[start..]));
        debug_assert_eq!(copied, frame.len());
    }

    /// Forgets the frames and gives the batch back for another source, with its allocations.
    #[must_use]
    pub fn recycle<'other>(mut self) -> Batch<'other> {
        self.segments.clear();
        // An empty vector mapped in place keeps its allocation and gets the other lifetime, without
        // unsafe.
        let segments = self.segments.into_iter().map(|_| unreachable!("the vector was cleared")).collect();
        Batch { slots: self.slots, segments, ..Batch::default() }
    }

    #[inline]
    fn slot(&mut self) -> &mut Frame {
        if self.used == self.slots.len() {
            self.slots.push(Frame::EMPTY);
        }
        self.used += 1;
        &mut self.slots[self.used - 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(n: usize) -> Vec<u8> {
        (0..n).map(|i| (i * 7 + 3) as u8).collect()
    }

    #[test]
    fn a_frame_comes_out_as_it_went_in_whatever_its_pieces() {
        for len in [1, 13, 14, 60, 64, 65, 127, 128, 129, 1514, 65_000] {
            let source = bytes(len);
            for cut in [0, 1, 13, 14, 100, 127, 128, 129, 1000, len] {
                let (a, b) = source.split_at(cut.min(len));
                let mut batch = Batch::with_capacity(1);
                batch.push_pieces([Foreign::from(a), Foreign::from(b)], Offload::NONE);
                batch.push(Foreign::from(&source[..]), Offload::NONE);
                for frame in batch.frames() {
                    let mut out = Vec::new();
                    batch.append_to(frame, &mut out);
                    assert_eq!(out, source, "len {len} cut {cut}");
                    let mut first = vec![0xa5; 10];
                    let mut rest = vec![0xa5; len];
                    let pieces = [ForeignMut::from(&mut first[..]), ForeignMut::from(&mut rest[..])];
                    assert_eq!(batch.copy_scattered(frame, pieces), len);
                    first.extend_from_slice(&rest);
                    assert_eq!(&first[..len], &source[..]);
                }
            }
        }
    }

    #[test]
    fn a_runt_shows_no_bytes_of_an_earlier_frame() {
        let long = [0xee; 64];
        let mut batch = Batch::with_capacity(1);
        batch.push(Foreign::from(&long[..]), Offload::NONE);
        let mut batch = batch.recycle();
        batch.push(Foreign::from(&long[..3]), Offload::NONE);
        assert_eq!(batch.frames()[0].source(), [0; 6]);
        assert_eq!(batch.frames()[0].destination(), [0xee, 0xee, 0xee, 0, 0, 0]);
    }

    #[test]
    fn a_copy_into_too_little_room_says_how_much_fitted() {
        let source = bytes(300);
        let mut batch = Batch::with_capacity(1);
        batch.push(Foreign::from(&source[..]), Offload::NONE);
        let frame = &batch.frames()[0];
        let mut small = [0; 200];
        assert_eq!(batch.copy(frame, ForeignMut::from(&mut small[..])), 200);
        assert_eq!(batch.copy_scattered(frame, [ForeignMut::from(&mut small[..100])]), 100);
        assert_eq!(&small[..], &source[..200]);
    }

    #[test]
    fn pieces_without_a_byte_are_no_frame() {
        let mut batch = Batch::with_capacity(1);
        batch.push_pieces([Foreign::empty(), Foreign::empty()], Offload::NONE);
        assert!(batch.is_empty());
    }
}
