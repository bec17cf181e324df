//! Links over IVSHMEM: a region of memory that peers share, a word of state for each, and
//! doorbells.
//!
//! # Theory of operation
//!
//! A region (Jailhouse's IVSHMEM v2 specification) is cut into sections, each a multiple of a page:
//!
//! ```text
//!   [header page]   v1 only: what v2 has in registers (docs/decisions/0010-ivshmem-v1-header-page.md)
//!   state table     peer i writes word i
//!   R/W section     everybody writes; may be empty; not used by the protocols here
//!   output 0        peer 0 writes, all read
//!   output 1        peer 1 writes, all read
//!   …
//! ```
//!
//! Two peers run a protocol over their output sections, each writing its own only: Ethernet frames
//! ([`net`]), or bare records for real-time code ([`channel`]). Before that they agree, by their
//! state words, on when each has cleared its own section ([`state`]).
//!
//! # What is here
//!
//! * [`region`]: where the sections are, and the header page of a v1 region.
//! * [`state`]: the states RESET, INIT, READY and RUN, as a table.
//! * [`net`]: the frame layout of the ivshmem-net drivers of Linux (Siemens) and Zephyr, bit for
//!   bit, both ends.
//! * [`channel`]: fixed-size records with sequence numbers, and a register for the latest value.
//!
//! # Invariants and failure
//!
//! As everywhere in this crate the peer is hostile: with stock QEMU it can write every byte of the
//! region, our own section included. So nothing here reads back what it wrote: what must be
//! remembered is remembered outside. Errors name the word that was wrong, and its owner resets the
//! link. Nothing allocates, panics on what memory holds, or rings: functions say whether the peer
//! wants to be rung.

pub mod backoff;
pub mod channel;
pub mod net;
pub mod region;
pub mod state;

#[cfg(all(test, loom))]
mod loom;
#[cfg(all(test, not(loom)))]
mod tests;

/// Protocol numbers of IVSHMEM v2, the class codes of its devices.
pub mod protocol {
    /// Virtual peer-to-peer Ethernet, [`net`](super::net).
    pub const NETWORK: u32 = 0x0001;
    /// First number for users' own protocols.
    pub const USER_FIRST: u32 = 0x4000;
    /// The record channel, [`channel`](super::channel).
    pub const CHANNEL: u32 = 0x4001;
    /// Calls with deadlines, [`rpc`](crate::rpc): each output section holds its peer's requests and
    /// answers.
    pub const CALLS: u32 = 0x4002;
    /// Last number for users' own protocols.
    pub const USER_LAST: u32 = 0x7fff;
}

/// Vector by which a peer tells of a changed state word.
pub const VECTOR_STATE: u16 = 0;

/// Vector by which a peer tells of frames or of buffers that came back, for a link with so many
/// vectors. With one vector both events share it.
pub const fn vector_traffic(vectors: u32) -> u16 {
    if vectors > 1 { 1 } else { 0 }
}
