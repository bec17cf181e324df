//! Records between two peers, for real-time code that wants no IP: a queue of fixed-size slots each
//! way, and a register that holds the latest value.
//!
//! # Layout
//!
//! Each peer writes only its own output section. Both use the same [`Shape`], which they know
//! beforehand. A section states its own shape, so that a mistake is an error and not garbage.
//!
//! ```text
//!   bytes        field                               little-endian; line
//!   0..4         magic "TMCH"                        0: written once, on the way from INIT to READY
//!   4..8         version, 1
//!   8..12        slots, a power of two
//!   12..16       record_bytes
//!   16..20       latest_bytes, 0 where there is no register
//!   128..130     head: records written, modulo 2^16  1: written with each record
//!   256..258     tail: records of the OTHER side that were read   2: written with each record read
//!   258..260     wake: the other side's head after which to ring
//!   384..388     number of the latest value          3: written with each value
//!   512..        slots: { number u32, len u32, bytes }, each a multiple of 64 bytes
//!   …            four copies of the register: { number u32, len u32, bytes }, each a multiple of 64 bytes
//! ```
//!
//! # Queue
//! A record goes into the slot of its number; head is published after it. The reader copies the
//! record out and publishes tail, which frees the slot. A full queue refuses a record; nothing is
//! overwritten. Numbers count from 1 and are checked. A reader that finds a number other than the
//! next one gets an error.
//!
//! # Register
//! A value goes into the next of four copies, whose number is 0 meanwhile. Then the number of the
//! latest copy is published. The writer never waits. A reader copies the latest value and looks at
//! its number before and after. It fails only if three more values were written during the copy,
//! four times in a row.
//!
//! # Invariants and failure
//! As in [`net`](super::net): nothing is read back from the own section, and each foreign word is
//! read once and checked. After an error the link must be reset. States are those of
//! [`state`](super::state); [`initialise`] clears the own section. Nothing allocates, blocks or
//! rings. Every call takes a bounded number of steps: one record, or four copies of a value.

use core::fmt;
use core::num::Wrapping;
use core::sync::atomic::{Ordering, fence};

use crate::mem::{Foreign, ForeignMut};
use crate::virtio::notify::{self, Word};

/// The magic number of a channel's section.
pub const MAGIC: [u8; 4] = *b"TMCH";
/// The version of the layout that is spoken here.
pub const VERSION: u32 = 1;
/// Most slots of a queue.
pub const MAX_SLOTS: u32 = 1 << 15;
/// Longest record or value.
pub const MAX_RECORD_BYTES: u32 = 1 << 20;

const HEAD: usize = 128;
const TAIL: usize = 256;
const WAKE: usize = 258;
const LATEST: usize = 384;
const SLOTS: u64 = 512;
/// Number and length before a record's bytes.
const RECORD_HEADER: u64 = 8;
/// Records begin at cache lines.
const LINE: u64 = 64;
/// Copies of the register.
const COPIES: u32 = 4;

/// Why a shape or a section was refused, what could not be sent, or what a peer wrote that breaks
/// the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum ChannelError {
    /// No channel has such slots, records or values.
    #[error("{0}: 1 to {MAX_SLOTS} slots, a power of two, and up to {MAX_RECORD_BYTES} bytes are expected")]
    Shape(Shape),
    /// The section is too short for the shape, or not aligned to 64 bytes.
    #[error("a section of {bytes} bytes, aligned to 64 and with {needed} bytes or more is expected")]
    Section {
        bytes: u64,
        /// The length that the shape needs.
        needed: u64,
    },
    /// The peer's section does not begin as one of this version.
    #[error("the peer's section begins with {got:02x?}, expected \"TMCH\" and version {VERSION}")]
    Header {
        /// Its first eight bytes.
        got: [u8; 8],
    },
    /// The peer's section says another shape.
    #[error("the peer has {got}, expected {expected}")]
    PeerShape { expected: Shape, got: Shape },
    /// The record or value is longer than the shape allows, or than the caller's buffer.
    #[error("{got} bytes, but there is room for {room}")]
    Length { got: usize, room: usize },
    /// A record or value of the peer's is longer than the shape allows.
    #[error("a record of {got} bytes, at most {most} are expected")]
    RecordLength { got: u32, most: u32 },
    /// The peer's head is further ahead than there are slots.
    #[error("head jumped from {next} to {got}")]
    HeadJump {
        /// The head that was expected next.
        next: u16,
        got: u16,
    },
    /// The peer's tail is ahead of what was written, or ran backwards.
    #[error("tail is {got} with {outstanding} records out")]
    TailJump {
        /// Records that are out.
        outstanding: u16,
        got: u16,
    },
    /// A slot holds another record than the next one.
    #[error("found record {got} in place of record {expected}")]
    Number { expected: u32, got: u32 },
}

impl ChannelError {
    /// Whether the peer broke the rules, so that the link is to be reset; otherwise the call itself
    /// was wrong.
    pub const fn resets_link(&self) -> bool {
        !matches!(self, ChannelError::Shape(_) | ChannelError::Section { .. } | ChannelError::Length { .. })
    }
}

/// How a channel's sections are cut; the same on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Slots of each queue: a power of two up to [`MAX_SLOTS`].
    pub slots: u32,
    /// Longest record that fits, in bytes.
    pub record_bytes: u32,
    /// Longest value of the register; 0 where there is none.
    pub latest_bytes: u32,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { slots, record_bytes, latest_bytes } = self;
        write!(f, "{slots} slots of {record_bytes} bytes and a register of {latest_bytes}")
    }
}

/// Bytes of a slot or copy for so many bytes of content.
const fn stride(bytes: u32) -> u64 {
    (RECORD_HEADER + bytes as u64).next_multiple_of(LINE)
}

impl Shape {
    /// Checks the shape; the other methods rely on it.
    ///
    /// # Errors
    /// [`ChannelError::Shape`].
    pub const fn check(&self) -> Result<(), ChannelError> {
        let slots = self.slots.is_power_of_two() && self.slots <= MAX_SLOTS;
        if slots && self.record_bytes <= MAX_RECORD_BYTES && self.latest_bytes <= MAX_RECORD_BYTES {
            Ok(())
        } else {
            Err(ChannelError::Shape(*self))
        }
    }

    /// The shape with as many slots as fit a section; `None` where not one does.
    pub const fn largest(section_bytes: u64, record_bytes: u32, latest_bytes: u32) -> Option<Shape> {
        let mut slots = MAX_SLOTS;
        while slots != 0 {
            let shape = Shape { slots, record_bytes, latest_bytes };
            if shape.check().is_ok() && shape.bytes() <= section_bytes {
                return Some(shape);
            }
            slots /= 2;
        }
        None
    }

    /// Bytes that a section needs.
    pub const fn bytes(&self) -> u64 {
        // No overflow in a checked shape: at most 2^15 * (2^20 + 64) + 4 * (2^20 + 64).
        self.latest_offset() + if self.latest_bytes == 0 { 0 } else { COPIES as u64 * stride(self.latest_bytes) }
    }

    const fn latest_offset(&self) -> u64 {
        SLOTS + self.slots as u64 * stride(self.record_bytes)
    }

    const fn slot(&self, index: u16) -> usize {
        (SLOTS + (index as u64 & (self.slots as u64 - 1)) * stride(self.record_bytes)) as usize
    }

    const fn copy(&self, number: u32) -> usize {
        (self.latest_offset() + (number % COPIES) as u64 * stride(self.latest_bytes)) as usize
    }
}

/// The two sections of a channel: the own one, and the peer's, which is not written.
#[derive(Clone, Copy, Debug)]
pub struct Sections<'m> {
    own: ForeignMut<'m>,
    peer: Foreign<'m>,
}

impl<'m> Sections<'m> {
    /// The sections of a channel of `shape`.
    ///
    /// # Errors
    /// [`ChannelError::Shape`], and [`ChannelError::Section`] where one is too short or not aligned
    /// to 64 bytes.
    pub fn new(shape: &Shape, own: ForeignMut<'m>, peer: Foreign<'m>) -> Result<Sections<'m>, ChannelError> {
        shape.check()?;
        let needed = shape.bytes();
        let starts = [own.as_mut_ptr() as usize, peer.as_ptr() as usize];
        for (start, len) in starts.into_iter().zip([own.len(), peer.len()]) {
            if (len as u64) < needed || !start.is_multiple_of(LINE as usize) {
                return Err(ChannelError::Section { bytes: len as u64, needed });
            }
        }
        Ok(Sections { own, peer })
    }
}

struct OwnWord<'m>(ForeignMut<'m>, usize);
struct PeerWord<'m>(Foreign<'m>, usize);

// Reads as 0 and ignores writes where it were outside, which `Sections::new` rules out.
impl Word for OwnWord<'_> {
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

impl Word for PeerWord<'_> {
    type Value = u16;
    #[inline]
    fn load(&self, order: Ordering) -> u16 {
        self.0.load_u16(self.1, order).unwrap_or(0)
    }
    #[inline]
    fn store(&self, _: u16, _: Ordering) {
        debug_assert!(false, "a peer's section is not written");
    }
}

/// Clears the own section and writes its shape, on the way from INIT to READY. A [`Channel`] made
/// after that starts with it.
pub fn initialise(shape: &Shape, sections: &Sections<'_>) {
    let own = &sections.own;
    for at in (0..SLOTS as usize).step_by(64) {
        own.skip(at).write_from(&[0; 64]);
    }
    // Relaxed, all of them: the state word, written after this, orders them. Cannot fail: inside
    // the section.
    for index in 0..shape.slots {
        let _ = own.store_u32(shape.slot(index as u16), 0, Ordering::Relaxed);
    }
    if shape.latest_bytes != 0 {
        for copy in 0..COPIES {
            let _ = own.store_u32(shape.copy(copy), 0, Ordering::Relaxed);
        }
    }
    let _ = own.write_array(0, MAGIC);
    for (at, word) in [(4, VERSION), (8, shape.slots), (12, shape.record_bytes), (16, shape.latest_bytes)] {
        let _ = own.store_u32(at, word, Ordering::Relaxed);
    }
}

/// A record or value that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its number, counted from 1 by its writer, modulo 2^32.
    pub number: u32,
    /// Its length in bytes.
    pub len: usize,
}

/// What became of something to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sent {
    /// It is in the queue, and the peer wants to be rung for it.
    Ring,
    /// It is in the queue; the peer looks by itself.
    Quiet,
    /// The queue is full; nothing was sent.
    Full,
}

/// One end of a channel: both directions of it. See the module's head.
#[derive(Clone, Debug)]
pub struct Channel {
    shape: Shape,
    /// Records written.
    written: Wrapping<u32>,
    /// The peer's tail as last read: records that it has read, modulo 2^16.
    seen_tail: Wrapping<u16>,
    /// Records read.
    read: Wrapping<u32>,
    /// Values written to the register.
    values: u32,
}

impl Channel {
    /// The end of a link whose own section was [`initialise`]d.
    pub const fn new(shape: &Shape) -> Channel {
        let shape = *shape;
        Channel { shape, written: Wrapping(0), seen_tail: Wrapping(0), read: Wrapping(0), values: 0 }
    }

    /// Starts again, with a section that was [`initialise`]d again.
    pub const fn restart(&mut self) {
        *self = Channel::new(&self.shape);
    }

    /// How the sections are cut.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Checks that the peer's section says the same shape. To be called once, when the peer is seen
    /// in READY or RUN.
    ///
    /// # Errors
    /// [`ChannelError::Header`] and [`ChannelError::PeerShape`].
    pub fn check_peer(&self, sections: &Sections<'_>) -> Result<(), ChannelError> {
        let got: [u8; 20] = sections.peer.read_array(0).unwrap_or([0; 20]);
        let word = |at: usize| u32::from_le_bytes([got[at], got[at + 1], got[at + 2], got[at + 3]]);
        if got[..4] != MAGIC || word(4) != VERSION {
            let [a, b, c, d, e, f, g, h, ..] = got;
            return Err(ChannelError::Header { got: [a, b, c, d, e, f, g, h] });
        }
        let got = Shape { slots: word(8), record_bytes: word(12), latest_bytes: word(16) };
        if got != self.shape {
            return Err(ChannelError::PeerShape { expected: self.shape, got });
        }
        Ok(())
    }

    /// Records that the peer has not read, as of the last look.
    pub fn outstanding(&self) -> usize {
        usize::from((Wrapping(self.written.0 as u16) - self.seen_tail).0)
    }

    /// Writes a record into the queue.
    ///
    /// # Errors
    /// [`ChannelError::Length`] and nothing sent; [`ChannelError::TailJump`], the peer's doing.
    #[inline]
    pub fn send(&mut self, sections: &Sections<'_>, record: &[u8]) -> Result<Sent, ChannelError> {
        let room = self.shape.record_bytes as usize;
        if record.len() > room {
            return Err(ChannelError::Length { got: record.len(), room });
        }
        let slots = self.shape.slots as usize;
        if self.outstanding() >= slots {
            // Acquire, by the name of it: the peer has read a slot before it gives it back.
            let tail = Wrapping(notify::available(&PeerWord(sections.peer, TAIL)));
            let outstanding = self.outstanding();
            if usize::from((tail - self.seen_tail).0) > outstanding {
                return Err(ChannelError::TailJump { outstanding: outstanding as u16, got: tail.0 });
            }
            self.seen_tail = tail;
            if self.outstanding() >= slots {
                return Ok(Sent::Full);
            }
        }
        let old = self.written.0 as u16;
        let slot = self.shape.slot(old);
        self.written += 1;
        put(&sections.own, slot, self.written.0, record);
        notify::publish(&OwnWord(sections.own, HEAD), self.written.0 as u16);
        let event = notify::suppression(&PeerWord(sections.peer, WAKE));
        Ok(if notify::passes(event, old, self.written.0 as u16) { Sent::Ring } else { Sent::Quiet })
    }

    /// The peer's head, checked.
    #[inline]
    fn accept(&self, head: u16) -> Result<u16, ChannelError> {
        let next = self.read.0 as u16;
        let ready = head.wrapping_sub(next);
        if u32::from(ready) > self.shape.slots { Err(ChannelError::HeadJump { next, got: head }) } else { Ok(ready) }
    }

    /// Copies the next record into `to`; `None` where there is none.
    ///
    /// # Errors
    /// [`ChannelError::Length`] where `to` is too short, and the record stays; or the peer's doing.
    #[inline]
    pub fn recv(&mut self, sections: &Sections<'_>, to: &mut [u8]) -> Result<Option<Record>, ChannelError> {
        if self.accept(notify::available(&PeerWord(sections.peer, HEAD)))? == 0 {
            return Ok(None);
        }
        let expected = (self.read + Wrapping(1)).0;
        let slot = self.shape.slot(self.read.0 as u16);
        // Relaxed: ordered by the acquire of head.
        let word = |at| sections.peer.load_u32(at, Ordering::Relaxed).unwrap_or(0);
        let got = word(slot);
        if got != expected {
            return Err(ChannelError::Number { expected, got });
        }
        let len = take(&sections.peer, slot, word(slot + 4), self.shape.record_bytes, to)?;
        self.read += 1;
        notify::publish(&OwnWord(sections.own, TAIL), self.read.0 as u16);
        Ok(Some(Record { number: expected, len }))
    }

    /// Asks to be rung for the next record, and looks again. True: there is one already.
    ///
    /// # Errors
    /// [`ChannelError::HeadJump`].
    pub fn arm(&mut self, sections: &Sections<'_>) -> Result<bool, ChannelError> {
        let wake = OwnWord(sections.own, WAKE);
        let head = notify::arm(&wake, self.read.0 as u16, &PeerWord(sections.peer, HEAD));
        Ok(self.accept(head)? != 0)
    }

    /// Writes the register. The peer is not rung for it: it looks when it needs the value.
    ///
    /// # Errors
    /// [`ChannelError::Length`], and nothing written.
    #[inline]
    pub fn set(&mut self, sections: &Sections<'_>, value: &[u8]) -> Result<(), ChannelError> {
        let room = self.shape.latest_bytes as usize;
        if value.len() > room || room == 0 {
            return Err(ChannelError::Length { got: value.len(), room });
        }
        // 0 means "none".
        self.values = self.values.wrapping_add(1).max(1);
        let copy = self.shape.copy(self.values);
        let own = &sections.own;
        let _ = own.store_u32(copy, 0, Ordering::Relaxed);
        // L0, partner L1: a reader that sees bytes of this value sees that the copy was taken away.
        fence(Ordering::Release);
        put(own, copy, 0, value);
        // L2, partner L3: who sees the number sees the value.
        let _ = own.store_u32(copy, self.values, Ordering::Release);
        let _ = own.store_u32(LATEST, self.values, Ordering::Release);
        Ok(())
    }

    /// Copies the peer's latest value into `to`; `None` where it has written none, or writes faster
    /// than it can be copied.
    ///
    /// # Errors
    /// [`ChannelError::Length`] where `to` is too short for it.
    #[inline]
    pub fn get(&self, sections: &Sections<'_>, to: &mut [u8]) -> Result<Option<Record>, ChannelError> {
        let peer = &sections.peer;
        if self.shape.latest_bytes == 0 {
            return Ok(None);
        }
        for _ in 0..COPIES {
            let number = peer.load_u32(LATEST, Ordering::Acquire).unwrap_or(0);
            if number == 0 {
                return Ok(None);
            }
            let copy = self.shape.copy(number);
            // L3, partner L2.
            if peer.load_u32(copy, Ordering::Acquire) != Some(number) {
                continue;
            }
            let len = peer.load_u32(copy + 4, Ordering::Relaxed).unwrap_or(0);
            let result = take(peer, copy, len, self.shape.latest_bytes, to);
            // L1, partner L0: had bytes changed meanwhile, the number would be another.
            fence(Ordering::Acquire);
            if peer.load_u32(copy, Ordering::Relaxed) != Some(number) {
                continue;
            }
            return result.map(|len| Some(Record { number, len }));
        }
        Ok(None)
    }
}

/// Writes number, length and bytes of a record at `at`, whose section has room for it.
#[inline]
fn put(own: &ForeignMut<'_>, at: usize, number: u32, bytes: &[u8]) {
    // Relaxed, and a plain copy: ordered by what publishes them.
    let _ = own.store_u32(at, number, Ordering::Relaxed);
    let _ = own.store_u32(at + 4, bytes.len() as u32, Ordering::Relaxed);
    own.skip(at + RECORD_HEADER as usize).write_from(bytes);
}

/// Copies the `len` bytes of the record at `at` into `to`.
#[inline]
fn take(peer: &Foreign<'_>, at: usize, len: u32, most: u32, to: &mut [u8]) -> Result<usize, ChannelError> {
    let (got, room) = (len as usize, to.len());
    let bytes = peer.slice(at + RECORD_HEADER as usize, got).filter(|_| len <= most);
    let bytes = bytes.ok_or(ChannelError::RecordLength { got: len, most })?;
    let to = to.get_mut(..got).ok_or(ChannelError::Length { got, room })?;
    Ok(bytes.read_into(to))
}

#[cfg(all(test, not(loom)))]
#[path = "channel_tests.rs"]
mod tests;
