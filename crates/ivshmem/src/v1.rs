//! The server's messages of ivshmem version 1, as stock QEMU reads them (QEMU
//! docs/specs/ivshmem-spec.rst, "Inter-VM Shared Memory server", protocol version 0), and their
//! reader.
//!
//! Each message is one signed number of 8 bytes, little-endian, with at most one descriptor. Only
//! the server speaks.
//! ```text
//! 0                      the protocol's version
//! id                     the client's own id
//! -1       + descriptor  the shared memory
//! peer     + descriptor  per vector of each peer that is there: that vector's eventfd, in the order of the vectors
//! own id   + descriptor  per vector: the eventfd on which the client is rung
//! peer     + descriptor  later: a peer's next vector; the peer is new with its first
//! peer                   later, alone: the peer is gone
//! ```
//! The reader takes what this project's server or QEMU's own (contrib/ivshmem-server) sends. It is
//! for host processes that join a link, and for tests. It trusts nothing: a server that breaks the
//! order above is an error, and the error says what came. Limits: ids to [`MAX_PEERS`],
//! [`MAX_VECTORS`] vectors.

use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::foreign::{self, ForeignFd, Kind};

/// The protocol's version, the server's first word.
pub const VERSION: i64 = 0;
/// The word that comes with the shared memory.
pub const MEMORY: i64 = -1;
/// Each message is one little-endian 64-bit number.
pub const MESSAGE_BYTES: usize = 8;
/// Ids are below this (ivshmem-spec.rst: IVPosition is 0 to 65535).
pub const MAX_PEERS: i64 = 65536;
/// Most vectors of a peer that the reader takes.
pub const MAX_VECTORS: usize = 32;

/// Puts one message into bytes, little-endian.
pub fn encode(number: i64) -> [u8; MESSAGE_BYTES] {
    number.to_le_bytes()
}

/// Reads the number of a message, little-endian.
pub fn decode(bytes: [u8; MESSAGE_BYTES]) -> i64 {
    i64::from_le_bytes(bytes)
}

/// What a server did that the protocol does not have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum ReadError {
    /// Another version, or no ivshmem server at all.
    #[error("the server's first word is {found}, expected 0 (protocol version 0); is this an ivshmem server's socket?")]
    Version { found: i64 },
    /// A number outside its range.
    #[error("the server sent {found} where {expected} was expected")]
    Number {
        /// What should have come.
        expected: &'static str,
        found: i64,
    },
    /// A descriptor that should have come, or should not.
    #[error("the server sent {found} descriptor(s) with the number {number}, expected {expected}")]
    Descriptors {
        number: i64,
        /// How many belong to it.
        expected: &'static str,
        found: usize,
    },
    /// A descriptor that is no eventfd.
    #[error("the server sent a descriptor with peer {peer} that is not an eventfd: {source}")]
    NoEventfd { peer: u32, source: Errno },
    /// Shared memory whose pages somebody else may hold back.
    #[error("the server sent {found} as the shared memory, expected a memfd, or a file of tmpfs or hugetlbfs")]
    NoMemory {
        /// What it is, as the kernel names it.
        found: String,
    },
    /// More vectors than the reader takes.
    #[error("the server sent more than {MAX_VECTORS} vectors of peer {peer}")]
    Vectors { peer: u32 },
}

/// What a client has learned with a message.
#[derive(Debug)]
pub enum News {
    /// The message changes nothing yet.
    Nothing,
    /// The shared memory is there; the client's own id is known.
    Memory,
    /// A vector of another peer; the first is its coming.
    Vector {
        /// Peer ID.
        peer: u32,
        /// Which of its vectors, from 0.
        vector: usize,
    },
    /// A vector of the client's own.
    OwnVector {
        /// Which, from 0.
        vector: usize,
    },
    /// A peer is gone, and its vectors with it.
    Gone {
        /// Peer ID.
        peer: u32,
    },
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Version,
    Id,
    Memory,
    Open,
}

/// The client's side of the conversation: messages in, what is known of the link out. Free of I/O.
#[derive(Debug)]
pub struct Client {
    stage: Stage,
    id: u32,
    memory: Option<OwnedFd>,
    own: Vec<Doorbell>,
    peers: BTreeMap<u32, Vec<Doorbell>>,
}

impl Default for Client {
    fn default() -> Self {
        Self::new()
    }
}

impl Client {
    /// A client to whom nothing was said.
    pub fn new() -> Client {
        Client { stage: Stage::Version, id: 0, memory: None, own: Vec::new(), peers: BTreeMap::new() }
    }

    /// The client's own id, once it is known.
    pub fn id(&self) -> Option<u32> {
        matches!(self.stage, Stage::Memory | Stage::Open).then_some(self.id)
    }

    /// The shared memory, once it came.
    pub fn memory(&self) -> Option<&OwnedFd> {
        self.memory.as_ref()
    }

    /// The doorbells on which the client is rung, by vector.
    pub fn own(&self) -> &[Doorbell] {
        &self.own
    }

    /// The doorbells of the other peers, by id and vector.
    pub fn peers(&self) -> &BTreeMap<u32, Vec<Doorbell>> {
        &self.peers
    }

    /// Takes one message and the descriptors that came with it.
    ///
    /// # Errors
    /// What the server did against the protocol. The conversation cannot go on then.
    pub fn take(&mut self, bytes: [u8; MESSAGE_BYTES], fds: Vec<ForeignFd>) -> Result<News, ReadError> {
        let number = decode(bytes);
        let count = fds.len();
        let mut fds = fds.into_iter();
        let bad = |expected| ReadError::Descriptors { number, expected, found: count };
        match self.stage {
            Stage::Version if number != VERSION => return Err(ReadError::Version { found: number }),
            Stage::Version | Stage::Id if count != 0 => return Err(bad("none")),
            Stage::Version => self.stage = Stage::Id,
            Stage::Id => {
                self.id = peer(number, "the client's own id, 0 to 65535,")?;
                self.stage = Stage::Memory;
            }
            Stage::Memory => {
                if number != MEMORY {
                    return Err(ReadError::Number { expected: "-1, with the shared memory,", found: number });
                }
                let (Some(memory), None) = (fds.next(), fds.next()) else { return Err(bad("1, the shared memory")) };
                if memory.kind() != Kind::Memory {
                    return Err(ReadError::NoMemory { found: foreign::name(&memory) });
                }
                self.memory = Some(memory.keep());
                self.stage = Stage::Open;
                return Ok(News::Memory);
            }
            Stage::Open => {
                let id = peer(number, "a peer's id, 0 to 65535,")?;
                let Some(fd) = fds.next() else {
                    if id == self.id {
                        return Err(bad("1: the client itself cannot be gone"));
                    }
                    self.peers.remove(&id);
                    return Ok(News::Gone { peer: id });
                };
                if fds.next().is_some() {
                    return Err(bad("at most 1"));
                }
                let doorbell = Doorbell::adopt(fd).map_err(|source| ReadError::NoEventfd { peer: id, source })?;
                let doorbells = if id == self.id { &mut self.own } else { self.peers.entry(id).or_default() };
                if doorbells.len() == MAX_VECTORS {
                    return Err(ReadError::Vectors { peer: id });
                }
                doorbells.push(doorbell);
                let vector = doorbells.len() - 1;
                return Ok(if id == self.id { News::OwnVector { vector } } else { News::Vector { peer: id, vector } });
            }
        }
        Ok(News::Nothing)
    }
}

fn peer(number: i64, expected: &'static str) -> Result<u32, ReadError> {
    match u32::try_from(number) {
        Ok(id) if number < MAX_PEERS => Ok(id),
        _ => Err(ReadError::Number { expected, found: number }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use tombolo_shm::memory::sealed_region;

    fn doorbell() -> ForeignFd {
        Doorbell::new().unwrap().as_fd().try_clone_to_owned().unwrap().into()
    }

    fn memory() -> ForeignFd {
        sealed_region("test", 4096).unwrap().into()
    }

    #[test]
    fn messages_are_the_bytes_of_the_specification() {
        let golden = [
            (VERSION, [0, 0, 0, 0, 0, 0, 0, 0]),
            (1, [1, 0, 0, 0, 0, 0, 0, 0]),
            (MEMORY, [0xff; 8]),
            (0x1234, [0x34, 0x12, 0, 0, 0, 0, 0, 0]),
            (65535, [0xff, 0xff, 0, 0, 0, 0, 0, 0]),
        ];
        for (number, bytes) in golden {
            assert_eq!(encode(number), bytes);
            assert_eq!(decode(bytes), number);
        }
    }

    fn greeted(id: i64) -> Client {
        let mut client = Client::new();
        client.take(encode(0), vec![]).unwrap();
        assert_eq!(client.id(), None);
        client.take(encode(id), vec![]).unwrap();
        assert!(matches!(client.take(encode(-1), vec![memory()]).unwrap(), News::Memory));
        client
    }

    #[test]
    fn a_client_learns_of_its_peers_and_itself() {
        let mut client = greeted(2);
        assert!(client.id() == Some(2) && client.memory().is_some());
        for (number, vector) in [(0, 0), (0, 1), (1, 0)] {
            let news = client.take(encode(number), vec![doorbell()]).unwrap();
            assert!(
                matches!(news, News::Vector { peer, vector: v } if (i64::from(peer), v) == (number, vector)),
                "{news:?}"
            );
        }
        assert!(matches!(client.take(encode(2), vec![doorbell()]).unwrap(), News::OwnVector { vector: 0 }));
        assert_eq!((client.peers()[&0].len(), client.peers()[&1].len(), client.own().len()), (2, 1, 1));
        assert!(matches!(client.take(encode(0), vec![]).unwrap(), News::Gone { peer: 0 }));
        // A server that was restarted may say it again.
        assert!(matches!(client.take(encode(0), vec![]).unwrap(), News::Gone { peer: 0 }));
        assert!(!client.peers().contains_key(&0));
    }

    #[test]
    fn a_server_that_breaks_the_order_is_told_apart() {
        let error = |client: &mut Client, number, fds| client.take(encode(number), fds).unwrap_err();
        assert_eq!(error(&mut Client::new(), 1, vec![]), ReadError::Version { found: 1 });
        assert!(matches!(error(&mut Client::new(), 0, vec![doorbell()]), ReadError::Descriptors { found: 1, .. }));
        let mut client = Client::new();
        client.take(encode(0), vec![]).unwrap();
        assert!(matches!(error(&mut client, 65536, vec![]), ReadError::Number { found: 65536, .. }));
        client.take(encode(65535), vec![]).unwrap();
        assert!(matches!(error(&mut client, 5, vec![memory()]), ReadError::Number { found: 5, .. }));
        assert!(matches!(error(&mut client, -1, vec![]), ReadError::Descriptors { found: 0, .. }));
        let mut client = greeted(1);
        assert!(matches!(error(&mut client, -2, vec![doorbell()]), ReadError::Number { found: -2, .. }));
        assert!(matches!(error(&mut client, 1, vec![]), ReadError::Descriptors { .. }));
        assert!(matches!(error(&mut client, 0, vec![doorbell(), doorbell()]), ReadError::Descriptors { found: 2, .. }));
        assert!(matches!(error(&mut client, 0, vec![memory()]), ReadError::NoEventfd { peer: 0, .. }));
        for _ in 0..MAX_VECTORS {
            client.take(encode(3), vec![doorbell()]).unwrap();
        }
        assert_eq!(error(&mut client, 3, vec![doorbell()]), ReadError::Vectors { peer: 3 });
    }
}
