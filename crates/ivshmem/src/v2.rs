//! The server's messages of ivshmem version 2, for builds of QEMU that carry that device, and their
//! reader.
//!
//! The device comes from Jailhouse (Documentation/ivshmem-v2-specification.md there). Its server
//! protocol was published with Siemens' QEMU device, which was never merged. This code follows that
//! protocol's header (ivshmem2.h, protocol version 2). It is tested against our own reader only:
//! there is no such QEMU to test with.
//!
//! Only the server speaks. All fields are little-endian; `len` is that of the whole message.
//! ```text
//! header     0 type u32 · 4 len u32
//! INIT       type 0, 40 bytes: 8 version · 12 compatible version · 16 id · 20 max_peers · 24 vectors · 28 protocol ·
//!            32 output section size u64; with the shared memory's descriptor
//! EVENT_FD   type 1, 16 bytes: 8 id · 12 vector; with an eventfd
//! PEER_GONE  type 2, 12 bytes: 8 id
//! ```
//! The shared memory is [State Table][R/W section][one output section per peer]. The size of the
//! R/W section is what is left. A protocol from 0x8000 on is virtio's: peer 0 is told the back
//! end's number (with bit 0x4000), the others the front end's.

use std::fmt;

/// The protocol version that this module speaks, and the oldest that it is compatible with.
pub const VERSION: u32 = 2;
/// Type of [`Message::Init`].
pub const TYPE_INIT: u32 = 0;
/// Type of [`Message::EventFd`].
pub const TYPE_EVENT_FD: u32 = 1;
/// Type of [`Message::PeerGone`].
pub const TYPE_PEER_GONE: u32 = 2;
/// Message type and length of the whole message, 4 bytes each.
pub const HEADER_BYTES: usize = 8;
/// Bytes of the longest message.
pub const MAX_BYTES: usize = 40;

/// First protocol number of virtio's (ivshmem-v2-specification.md, "Protocol").
const VIRTIO: u32 = 0x8000;
/// Set in the back end's number of a virtio protocol.
const BACKEND: u32 = 0x4000;

/// The protocol number that peer `id` is told on a link of `protocol`.
pub fn protocol_of(protocol: u32, id: u32) -> u32 {
    match (protocol >= VIRTIO, id) {
        (false, _) => protocol,
        (true, 0) => protocol | BACKEND,
        (true, _) => protocol & !BACKEND,
    }
}

/// What the server sends, decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// The first one, with the shared memory.
    Init {
        /// The client's own id.
        id: u32,
        /// Peers that there can be.
        max_peers: u32,
        /// Doorbells of each peer.
        vectors: u32,
        /// The protocol number of this client.
        protocol: u32,
        /// Bytes of each output section.
        output_bytes: u64,
    },
    /// A vector of a peer, or of the client's own, with its eventfd.
    EventFd {
        /// Peer ID.
        id: u32,
        /// Index among that peer's doorbells.
        vector: u32,
    },
    /// A peer is gone; its state word is 0 already.
    PeerGone {
        /// Peer ID that is free again.
        id: u32,
    },
}

/// What is wrong with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum MessageError {
    /// Too short for its type, or longer than any.
    #[error("a message of type {kind} says that it has {len} bytes, expected {expected} to {MAX_BYTES}")]
    Length { kind: u32, len: u32, expected: u32 },
    /// An unknown type.
    #[error("a message of type {kind}, expected 0 (INIT), 1 (EVENT_FD) or 2 (PEER_GONE)")]
    Type { kind: u32 },
    /// Another protocol.
    #[error("the server speaks version {version}, compatible with {compatible}; expected {VERSION}")]
    Version {
        version: u32,
        /// The oldest that it is compatible with.
        compatible: u32,
    },
}

impl Message {
    /// Its type and length.
    fn shape(&self) -> (u32, usize) {
        match self {
            Message::Init { .. } => (TYPE_INIT, 40),
            Message::EventFd { .. } => (TYPE_EVENT_FD, 16),
            Message::PeerGone { .. } => (TYPE_PEER_GONE, 12),
        }
    }

    /// Writes the message to the start of `to`; returns its length.
    pub fn encode(&self, to: &mut [u8; MAX_BYTES]) -> usize {
        let (kind, len) = self.shape();
        let mut put = |at: usize, value: u32| to[at..at + 4].copy_from_slice(&value.to_le_bytes());
        put(0, kind);
        put(4, len as u32);
        match *self {
            Message::Init { id, max_peers, vectors, protocol, output_bytes } => {
                let words = [VERSION, VERSION, id, max_peers, vectors, protocol];
                for (i, word) in words.into_iter().enumerate() {
                    put(8 + 4 * i, word);
                }
                to[32..40].copy_from_slice(&output_bytes.to_le_bytes());
            }
            Message::EventFd { id, vector } => {
                put(8, id);
                put(12, vector);
            }
            Message::PeerGone { id } => put(8, id),
        }
        len
    }

    /// Reads a message from the start of `bytes`: it and its length, or `None` where more has to
    /// come.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Message, usize)>, MessageError> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let (Some(kind), Some(len)) = (word(0), word(4)) else { return Ok(None) };
        let expected = match kind {
            TYPE_INIT => 40,
            TYPE_EVENT_FD => 16,
            TYPE_PEER_GONE => 12,
            _ => return Err(MessageError::Type { kind }),
        };
        // Longer ones are those of a later version, whose start is as here.
        if len < expected || len as usize > MAX_BYTES {
            return Err(MessageError::Length { kind, len, expected });
        }
        let read = || {
            let message = match kind {
                TYPE_INIT => {
                    let (version, compatible) = (word(8)?, word(12)?);
                    if version < VERSION || compatible > VERSION {
                        return Some(Err(MessageError::Version { version, compatible }));
                    }
                    let output_bytes = u64::from(word(32)?) | u64::from(word(36)?) << 32;
                    let (id, max_peers, vectors, protocol) = (word(16)?, word(20)?, word(24)?, word(28)?);
                    Message::Init { id, max_peers, vectors, protocol, output_bytes }
                }
                TYPE_EVENT_FD => Message::EventFd { id: word(8)?, vector: word(12)? },
                _ => Message::PeerGone { id: word(8)? },
            };
            Some(Ok(message))
        };
        match read().filter(|_| bytes.len() >= len as usize) {
            Some(message) => Ok(Some((message?, len as usize))),
            None => Ok(None),
        }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Message::Init { id, max_peers, .. } => write!(f, "INIT of peer {id} of {max_peers}"),
            Message::EventFd { id, vector } => write!(f, "EVENT_FD of peer {id}, vector {vector}"),
            Message::PeerGone { id } => write!(f, "PEER_GONE of peer {id}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INIT: Message =
        Message::Init { id: 1, max_peers: 2, vectors: 3, protocol: 0x4001, output_bytes: 0x1_0007_f000 };
    #[rustfmt::skip]
    const GOLDEN: [(Message, &[u8]); 3] = [
        (INIT, &[
            0, 0, 0, 0, 40, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 1, 0x40, 0, 0,
            0, 0xf0, 7, 0, 1, 0, 0, 0,
        ]),
        (Message::EventFd { id: 0x0102, vector: 1 }, &[1, 0, 0, 0, 16, 0, 0, 0, 2, 1, 0, 0, 1, 0, 0, 0]),
        (Message::PeerGone { id: 7 }, &[2, 0, 0, 0, 12, 0, 0, 0, 7, 0, 0, 0]),
    ];

    #[test]
    fn messages_are_the_bytes_of_their_layout() {
        for (message, golden) in GOLDEN {
            let mut bytes = [0xa5; MAX_BYTES];
            let len = message.encode(&mut bytes);
            assert_eq!(&bytes[..len], golden, "{message}");
            assert!(bytes[len..].iter().all(|b| *b == 0xa5), "{message}");
            assert_eq!(Message::decode(&bytes), Ok(Some((message, len))));
            for short in 0..len {
                assert_eq!(Message::decode(&bytes[..short]), Ok(None), "{message} cut at {short}");
            }
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let mut bytes = [0; MAX_BYTES];
        INIT.encode(&mut bytes);
        let with = |at: usize, value: u8| {
            let mut changed = bytes;
            changed[at] = value;
            Message::decode(&changed)
        };
        assert_eq!(with(0, 3), Err(MessageError::Type { kind: 3 }));
        assert_eq!(with(4, 39), Err(MessageError::Length { kind: 0, len: 39, expected: 40 }));
        assert_eq!(with(4, 41), Err(MessageError::Length { kind: 0, len: 41, expected: 40 }));
        // A later server that says it is compatible with this version.
        assert!(matches!(with(8, 3), Ok(Some(_))));
        let mut later = bytes;
        (later[8], later[12]) = (4, 3);
        assert_eq!(Message::decode(&later), Err(MessageError::Version { version: 4, compatible: 3 }));
    }

    #[test]
    fn of_a_virtio_link_peer_0_is_the_back_end() {
        assert_eq!((protocol_of(0x8001, 0), protocol_of(0x8001, 1)), (0xc001, 0x8001));
        assert_eq!((protocol_of(0xc001, 0), protocol_of(0xc001, 5)), (0xc001, 0x8001));
        assert_eq!((protocol_of(1, 0), protocol_of(0x4001, 1)), (1, 0x4001));
    }
}
