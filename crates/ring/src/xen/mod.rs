//! The Xen dialect: how a guest's network frontend and a backend in another domain exchange
//! packets.
//!
//! # Theory of operation
//!
//! A vif has one pair of rings for each queue. A ring is one page of the frontend's memory that it
//! grants to the backend (xen/include/public/io/ring.h): four words and 256 slots. A slot holds a
//! request first and its response later.
//!
//! ```text
//!   offset 0     req_prod    frontend writes   requests up to here are in the slots
//!          4     req_event   backend writes    "notify me when req_prod reaches this"
//!          8     rsp_prod    backend writes    responses up to here are in the slots
//!          12    rsp_event   frontend writes   "notify me when rsp_prod reaches this"
//!          64    slots       both write        12 bytes each on the transmit ring, 8 on the receive ring
//! ```
//!
//! *Transmit* and *receive* are the guest's words: on the transmit ring a request is a piece of a
//! packet from the guest, on the receive ring it is an empty buffer for one. A packet takes up to
//! 18 slots, with extra infos in slots of their own. Buffers are pages named by grant references;
//! the caller moves the bytes.
//!
//! # What is here
//!
//! * [`ring`]: the shared page, its four words, and how both sides count and notify.
//! * [`netif`]: requests, responses and extra infos as bytes.
//! * [`TxFront`] and [`RxFront`]: the frontend's ends of the two rings, for cells and as the peer
//!   in tests.
//! * [`TxBack`] and [`RxBack`]: the backend's ends, for the fabric.
//! * [`store`]: messages of XenStore; [`bytes`]: the byte rings over which a guest speaks to it,
//!   and its console.
//! * [`bus`]: the states of the xenbus handshake, as a table for each end.
//! * [`events`]: the queues of FIFO event channels, as a guest reads them.
//!
//! # Invariants and failure
//!
//! The other side is hostile and can write to the whole page at any time. Each of its words is read
//! once into a local and checked. A bad one is refused with a [`XenError`]. What this side has
//! written is remembered here and never read back. Nothing panics on what memory holds, allocates,
//! or takes more than 256 steps per call. After an error the ring is broken: its owner disconnects
//! the vif. A packet that is merely wrong (too long, bad checksum request) is answered with an
//! error instead.
//!
//! Responses are written in the order of their requests, so each response is in the slot of its
//! request. netif.h demands that for the receive ring. On the transmit ring it lets a backend that
//! died be replaced ([`ring::BackIndices::attach`]).
//!
//! A ring belongs to one thread at a time and has no lock. Its state is plain numbers; the page is
//! passed to each call.

pub mod back;
pub mod bus;
pub mod bytes;
pub mod ctrl;
pub mod events;
pub mod front;
pub mod netif;
pub mod ring;
pub mod store;

#[cfg(all(test, loom))]
mod loom;
#[cfg(all(test, not(loom)))]
mod tests;

pub use back::{Packet, RxBack, RxContent, TxBack};
pub use front::{Completed, Received, RxFront, TxFront, TxPart};
pub use netif::{Checksum, Gso, GsoKind, PacketHash};
pub use ring::{PAGE_BYTES, RING_SLOTS, RingPage};

/// Why a ring, a message or a peer was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum XenError {
    /// The memory for a ring is shorter than a page, or not aligned to 64 bytes.
    #[error("a ring of Xen needs {PAGE_BYTES} bytes aligned to 64, got {bytes} bytes")]
    Page {
        /// Its length in bytes.
        bytes: usize,
    },
    /// The peer moved its producer index further than the ring has slots, or backwards.
    #[error("the peer's producer index is {got}, expected {from} to {from} + {room}")]
    IndexJump {
        /// The index that it wrote.
        got: u32,
        /// The first one that is legal.
        from: u32,
        /// How many entries were legal behind that.
        room: u32,
    },
    /// A packet says that it goes on, but its next slot is not published.
    #[error("the packet at index {index} continues in a slot that is not published")]
    Incomplete {
        /// Index of its first slot.
        index: u32,
    },
    /// A packet takes more slots than any well-behaved peer uses.
    #[error("the packet at index {index} takes too many slots")]
    TooManySlots {
        /// Index of its first slot.
        index: u32,
    },
    /// A buffer crosses the end of its page, or is empty inside a packet.
    #[error("the buffer at index {index} has {len} bytes at offset {offset} of its page")]
    Buffer {
        /// Index of its slot.
        index: u32,
        /// Offset in the page, in bytes.
        offset: u16,
        len: u16,
    },
    /// The pieces of a packet are together longer than the length in its first slot.
    #[error("the pieces of the packet at index {index} are longer than its {total} bytes")]
    Length {
        /// Index of its first slot.
        index: u32,
        /// The packet's length in bytes, as its first slot says.
        total: u16,
    },
    /// An extra info has a type that was not agreed on, or that is not known.
    #[error("an extra info has the unexpected type {got}")]
    ExtraType { got: u8 },
    /// An extra info asks for an unknown kind of segmentation, or for segments of no bytes.
    #[error("segmentation of the unknown kind {kind} with {size} bytes per segment")]
    Gso { kind: u8, size: u16 },
    /// A response answers a request that is not outstanding.
    #[error("the response at index {index} has the identifier {got}, which is not outstanding")]
    ResponseId {
        /// Index of its slot.
        index: u32,
        got: u16,
    },
    /// Responses were given for a packet that was not the next one to be answered. The caller's
    /// mistake.
    #[error("responses for index {got}, but {expected} is the next one to be answered")]
    OutOfOrder {
        /// Index of the packet's first slot.
        got: u32,
        /// Index of the slot to be answered next.
        expected: u32,
    },
    /// A message says that it is longer than XenStore allows.
    #[error("a XenStore message of {len} bytes")]
    MessageTooLong {
        /// Its payload's length in bytes.
        len: u32,
    },
    /// A message or path does not fit into the buffer for it.
    #[error("a XenStore message needs {needed} bytes and does not fit")]
    NoRoom {
        /// Bytes that it needs.
        needed: usize,
    },
    /// A message has an unknown type.
    #[error("a XenStore message of the unknown type {got}")]
    MessageType { got: u32 },
    /// A message's payload is not what its type demands.
    #[error("a XenStore message whose payload does not fit its type")]
    Payload,
}
