//! Calls with deadlines over shared memory: the layout of a connection and the protocol of its
//! rings, both ends.
//!
//! A connection has two **sections**. The client makes and writes one, the provider makes and
//! writes the other. Each side maps the other's section for reading only. Both have the same
//! layout, so that there is only one to check:
//!
//! ```text
//!   0     header     magic, version, role, geometry; written once
//!   128   published  how many entries this side has put into its ring; a side that sleeps looks at it
//!   256   wake       how many entries of the peer's ring this side has taken, and whether it sleeps (see `wake`)
//!   384   hint       the CPU this side last ran on, plus one; 0 is unknown
//!   512   marks      one word for each block of the provider's arena (see below)
//!         ring       `entries` entries of 256 bytes, each with a stamp: requests in the client's section, replies in the provider's
//!         arena      payloads that are too long for an entry; which part is in use only its writer knows
//! ```
//!
//! Words of different writers, and words that change at different times, are on separate lines of
//! 128 bytes.
//!
//! **One answer per request.** A request carries a token whose low half is a *slot* below
//! `entries`. The slot is in use until the reply with that token has been taken. So there are at
//! most `entries` requests and replies in progress, and the reply ring always has room for the
//! answer. The provider may read a request's payload in the client's arena until its answer. The
//! client may read a reply's block in the provider's arena until it writes the block's generation
//! into its own mark of that block. The provider keeps the generation in *its* mark of the block.
//! When it reclaims a block that was held too long, it moves the generation on. So the client can
//! tell that what it copied may be torn.
//!
//! **The peer is hostile.** An entry is read once into a local and checked against the geometry
//! that the handshake agreed on, never against the peer's header. An index that moves by more than
//! the ring holds ends the connection. A peer can still write nonsense *into its own payloads*, and
//! it can fail to wake us.
//!
//! Limits: 1 to [`MAX_ENTRIES`] entries, an arena of 0 or a power of two from 4 KiB to 2^40 bytes.

pub mod arena;
pub mod entry;
#[cfg(all(test, loom))]
mod loom;
pub mod ring;
#[cfg(all(test, not(loom)))]
mod tests;
pub mod wake;

use crate::mem::{Foreign, ForeignMut};
use core::sync::atomic::Ordering;

/// The two ends' distance of words that must not share a line: two cache lines, since processors
/// fetch them in pairs.
pub const LINE_BYTES: usize = 128;
/// "TMBLRPC" and the layout's version, first in every section.
pub const MAGIC: u64 = u64::from_le_bytes(*b"TMBLRPC\x02");
/// The layout's version; another one is refused.
pub const VERSION: u32 = 2;
/// Bytes of an entry of either ring.
pub const ENTRY_BYTES: usize = 256;
/// Bytes of an entry that say what it is.
pub const ENTRY_HEAD_BYTES: usize = 56;
/// Where an entry's stamp is ([`wake::stamp`]): in the line of its head, so that who looks for the
/// one has the other.
pub const ENTRY_STAMP: usize = ENTRY_HEAD_BYTES;
/// Where an entry's inline payload begins.
pub const ENTRY_PAYLOAD: usize = 64;
/// The longest payload that travels in the entry itself.
pub const INLINE_BYTES: usize = ENTRY_BYTES - ENTRY_PAYLOAD;
/// Most entries of a ring.
pub const MAX_ENTRIES: u32 = 4096;
/// 1 TiB.
pub const MAX_ARENA_BYTES: u64 = 1 << 40;
/// Smallest arena that is one.
pub const MIN_ARENA_BYTES: u64 = 4096;

const HEADER: usize = 0;
/// Offset of the published index; futexes wait on it.
pub const PUBLISHED: usize = LINE_BYTES;
/// Offset of the wake word.
pub const WAKE: usize = 2 * LINE_BYTES;
/// Offset of the CPU hint.
pub const HINT: usize = 3 * LINE_BYTES;
const MARKS: usize = 4 * LINE_BYTES;
const HEADER_BYTES: usize = 40;

const _: () = assert!(HEADER_BYTES <= LINE_BYTES && ENTRY_BYTES.is_multiple_of(LINE_BYTES));
const _: () = assert!(PUBLISHED / LINE_BYTES != WAKE / LINE_BYTES && WAKE / LINE_BYTES != HINT / LINE_BYTES);
const _: () = assert!(ENTRY_STAMP + 4 <= ENTRY_PAYLOAD && ENTRY_STAMP.is_multiple_of(4));
const _: () = assert!(ENTRY_PAYLOAD + 64 <= LINE_BYTES, "a call with 64 bytes is one line");

/// Who writes a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Puts requests into its ring.
    Client,
    /// Puts replies into its ring.
    Provider,
}

impl Role {
    const fn code(self) -> u32 {
        match self {
            Role::Client => 1,
            Role::Provider => 2,
        }
    }
}

/// What a peer did that no correct peer does. The connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The section's header is not the one that was agreed on.
    Header,
    /// The section is smaller than its geometry asks.
    Short,
    /// The published index moved by more entries than the ring holds.
    Index,
    /// The wake word names more entries than were published.
    Wake,
    /// An entry is of an unknown kind.
    Kind,
    /// A payload is of an unknown kind.
    Payload,
    /// An inline payload is longer than an entry.
    Inline,
    /// A payload is not wholly inside the arena.
    Arena,
    /// A token's slot, or a block, is not below the number of entries.
    Slot,
    /// A token that is under way came again, or an answer to nothing that was asked.
    Token,
    /// An answer's status is unknown.
    Status,
    /// It woke us repeatedly for nothing.
    Noise,
}

impl Broken {
    /// In declaration order, for reports and tests.
    pub const ALL: [Broken; 12] = [
        Broken::Header,
        Broken::Short,
        Broken::Index,
        Broken::Wake,
        Broken::Kind,
        Broken::Payload,
        Broken::Inline,
        Broken::Arena,
        Broken::Slot,
        Broken::Token,
        Broken::Status,
        Broken::Noise,
    ];

    /// Its name, for counters.
    pub const fn name(self) -> &'static str {
        match self {
            Broken::Header => "header",
            Broken::Short => "short",
            Broken::Index => "index",
            Broken::Wake => "wake",
            Broken::Kind => "kind",
            Broken::Payload => "payload",
            Broken::Inline => "inline",
            Broken::Arena => "arena",
            Broken::Slot => "slot",
            Broken::Token => "token",
            Broken::Status => "status",
            Broken::Noise => "noise",
        }
    }

    /// What it was, as the end of a sentence that begins "the peer".
    pub const fn text(self) -> &'static str {
        match self {
            Broken::Header => "has a section whose header is not what was agreed on",
            Broken::Short => "has a section smaller than was agreed on",
            Broken::Index => "published more entries than its ring holds",
            Broken::Wake => "took more entries than were published",
            Broken::Kind => "sent an entry of unknown kind",
            Broken::Payload => "sent a payload of unknown kind",
            Broken::Inline => "sent an inline payload longer than an entry",
            Broken::Arena => "named a payload outside its arena",
            Broken::Slot => "named a slot that does not exist",
            Broken::Token => "used a token that is in use, or answered a request that was not made",
            Broken::Status => "sent an answer of unknown status",
            Broken::Noise => "woke us repeatedly for nothing",
        }
    }
}

impl core::fmt::Display for Broken {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "the peer {}", self.text())
    }
}

/// The sizes of one section. Both sides agree on them in the handshake; offsets follow from them
/// alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    entries: u32,
    arena_bytes: u64,
}

impl Geometry {
    /// `entries` is a power of two up to [`MAX_ENTRIES`]; `arena_bytes` is 0 or a power of two from
    /// [`MIN_ARENA_BYTES`] to [`MAX_ARENA_BYTES`]. `None` for other values.
    pub const fn new(entries: u32, arena_bytes: u64) -> Option<Geometry> {
        let arena = arena_bytes == 0
            || (arena_bytes.is_power_of_two() && arena_bytes >= MIN_ARENA_BYTES && arena_bytes <= MAX_ARENA_BYTES);
        if entries.is_power_of_two() && entries <= MAX_ENTRIES && arena {
            Some(Geometry { entries, arena_bytes })
        } else {
            None
        }
    }

    /// Entries of the ring, slots of the client, blocks of the provider.
    pub const fn entries(&self) -> u32 {
        self.entries
    }

    /// Size of the area for payloads that do not fit an entry; 0 if there is none.
    pub const fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    /// Where the mark of `block` is; the caller has checked the block.
    const fn mark(&self, block: u32) -> usize {
        MARKS + 4 * block as usize
    }

    const fn ring(&self) -> usize {
        (MARKS + 4 * self.entries as usize).next_multiple_of(LINE_BYTES)
    }

    /// Where the entry of a free-running index is.
    #[inline]
    const fn entry(&self, index: u32) -> usize {
        self.ring() + (index & (self.entries - 1)) as usize * ENTRY_BYTES
    }

    /// Where the arena begins, in bytes from the section's start.
    pub const fn arena(&self) -> usize {
        (self.ring() + self.entries as usize * ENTRY_BYTES).next_multiple_of(4096)
    }

    /// Bytes of the whole section.
    pub const fn section_bytes(&self) -> u64 {
        self.arena() as u64 + self.arena_bytes
    }

    /// Bytes of a section's header.
    pub const HEADER_BYTES: usize = HEADER_BYTES;

    /// The header of a section of this geometry, at its start.
    pub fn header(&self, role: Role) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&role.code().to_le_bytes());
        bytes[16..20].copy_from_slice(&self.entries.to_le_bytes());
        bytes[20..24].copy_from_slice(&(ENTRY_BYTES as u32).to_le_bytes());
        bytes[24..32].copy_from_slice(&self.arena_bytes.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.section_bytes().to_le_bytes());
        bytes
    }
}

/// Our section and the peer's, for one operation. Each was checked against its geometry by
/// [`Ends::new`].
#[derive(Clone, Copy, Debug)]
pub struct Ends<'m> {
    own: ForeignMut<'m>,
    peer: Foreign<'m>,
    own_geometry: Geometry,
    peer_geometry: Geometry,
}

impl<'m> Ends<'m> {
    /// Both sections, which must be as large as their geometries say.
    ///
    /// # Errors
    /// [`Broken::Short`] where one is not, or where the two have different numbers of entries.
    pub fn new(
        own: ForeignMut<'m>,
        own_geometry: Geometry,
        peer: Foreign<'m>,
        peer_geometry: Geometry,
    ) -> Result<Ends<'m>, Broken> {
        let fits = |len: usize, g: &Geometry| len as u64 >= g.section_bytes();
        let same = own_geometry.entries == peer_geometry.entries;
        if !(same && fits(own.len(), &own_geometry) && fits(peer.len(), &peer_geometry)) {
            return Err(Broken::Short);
        }
        Ok(Ends { own, peer, own_geometry, peer_geometry })
    }

    /// Writes the header of our section, which must be fresh (all zero).
    pub fn initialise(&self, role: Role) {
        initialise(self.own, self.own_geometry, role);
    }

    /// Checks the peer's header, once, before anything else is read of it.
    ///
    /// # Errors
    /// [`Broken::Header`] where it is not what `role` and the peer's geometry ask.
    pub fn check_peer(&self, role: Role) -> Result<(), Broken> {
        let header = self.peer.read_array::<HEADER_BYTES>(HEADER).ok_or(Broken::Short)?;
        if header == self.peer_geometry.header(role) { Ok(()) } else { Err(Broken::Header) }
    }

    /// Entries of either ring.
    #[inline]
    pub const fn entries(&self) -> u32 {
        self.own_geometry.entries
    }

    /// The part of our arena from `offset`; `None` where it is not wholly inside.
    #[inline]
    pub fn own_payload(&self, offset: u64, len: u64) -> Option<ForeignMut<'m>> {
        within(self.own_geometry, offset, len).and_then(|(at, len)| self.own.slice(at, len))
    }

    /// The part of the peer's arena from `offset`; `None` where it is not wholly inside.
    #[inline]
    pub fn peer_payload(&self, offset: u64, len: u64) -> Option<Foreign<'m>> {
        within(self.peer_geometry, offset, len).and_then(|(at, len)| self.peer.slice(at, len))
    }

    /// Says on which CPU we run, for the peer's choice between polling and sleeping.
    #[inline]
    pub fn set_cpu(&self, cpu: u32) {
        // Relaxed: a hint, read for nothing else.
        self.own.store_u32(HINT, cpu.wrapping_add(1), Ordering::Relaxed);
    }

    /// The CPU on which the peer says it runs.
    #[inline]
    pub fn peer_cpu(&self) -> Option<u32> {
        self.peer.load_u32(HINT, Ordering::Relaxed).and_then(|cpu| cpu.checked_sub(1))
    }

    /// Writes our mark of a block below [`Ends::entries`].
    #[inline]
    pub fn set_mark(&self, block: u32, generation: u32) {
        if block < self.entries() {
            // R1, partner A1 in `peer_mark`: what we did with the block before is done when the
            // peer sees the mark.
            self.own.store_u32(self.own_geometry.mark(block), generation, Ordering::Release);
        }
    }

    /// The peer's mark of a block below [`Ends::entries`], 0 for others.
    #[inline]
    pub fn peer_mark(&self, block: u32) -> u32 {
        if block >= self.entries() {
            return 0;
        }
        // A1, partner R1 in `set_mark`.
        self.peer.load_u32(self.peer_geometry.mark(block), Ordering::Acquire).unwrap_or(0)
    }

    /// Whether a reply that was copied out of `block` was still the client's to read when the copy
    /// was done.
    #[inline]
    pub fn still_ours(&self, block: u32, generation: u32) -> bool {
        // The copy above is done before the mark is read: a provider that takes the block back
        // first moves its mark.
        core::sync::atomic::fence(Ordering::Acquire);
        self.peer_mark(block) == generation
    }
}

/// Writes the header of this side's fresh section, before the peer's is known.
pub fn initialise(own: ForeignMut<'_>, geometry: Geometry, role: Role) {
    own.write_array(HEADER, geometry.header(role));
}

#[inline]
fn within(geometry: Geometry, offset: u64, len: u64) -> Option<(usize, usize)> {
    let end = offset.checked_add(len)?;
    if end > geometry.arena_bytes {
        return None;
    }
    // The arena is inside a section that is mapped, so its offsets fit.
    Some((geometry.arena() + usize::try_from(offset).ok()?, usize::try_from(len).ok()?))
}
