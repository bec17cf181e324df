//! The core of an ivshmem server: which peers are on a link, what each has been told of the others,
//! and what is still to be sent. It does no I/O. It is the same for both versions of the protocol,
//! which differ only in their messages.
//!
//! # Invariants
//! - A joining peer is unsettled until a socket has taken its own greeting and every announcement
//!   of it. A server that restarts drops the unsettled peers, because it cannot know which of their
//!   messages were sent. All others continue.
//! - [`Server::changed`] names the peers whose records must be kept before anything more is sent. A
//!   record never claims less than what a client may have been told.
//! - A queue is bounded by what there is to say. When a peer leaves, announcements of it that no
//!   socket has taken yet are withdrawn. So there are at most `vectors + 1` messages about each
//!   other peer, and the greeting.
//! - A client blocks no other client. One that has taken nothing for [`TIMEOUT_NS`] while something
//!   waits is [`overdue`].
//! - No client is told twice in a row that the same peer is gone.
//!
//! # Stock QEMU is told once
//! A doorbell belongs to its seat, not to the peer on that seat. A peer that comes back finds the
//! same doorbells, and others reach it through the same ones. So a client can get all of them in
//! its greeting, whether the seats are taken or not. It then needs no later message
//! ([`Hears::Seats`]). Stock QEMU must be treated so. When it is told that a peer is gone, it frees
//! that peer's doorbells (hw/misc/ivshmem.c, `close_peer_eventfds`) but keeps the pointer. It
//! writes through that pointer when the seat is taken again. The heap of 7.2 is corrupt from then
//! on. Its guest does not see such messages anyway. It sees by the state word that a peer is gone.
//! Other clients are told as the protocol has it ([`Hears::Comings`]).
//!
//! # Limits
//! [`MAX_PEERS`] peers on a link, [`MAX_VECTORS`] vectors each.
//!
//! [`overdue`]: Server::overdue

use super::{v1, v2};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most peers of a link. The header page of this project's regions has the same limit.
pub const MAX_PEERS: u32 = 64;
/// Most vectors of a peer.
pub const MAX_VECTORS: u32 = 16;
/// How long a client may take nothing while something waits for it, in nanoseconds.
pub const TIMEOUT_NS: u64 = 10_000_000_000;

/// Which server protocol a link speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// That of stock QEMU's `ivshmem-doorbell`.
    V1,
    /// That of Jailhouse's device in QEMU.
    V2 {
        /// The protocol number of the device's class.
        protocol: u32,
        /// Bytes of each output section.
        output_bytes: u64,
    },
}

/// What does not change about a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Version of the server protocol, with its settings.
    pub dialect: Dialect,
    /// Peers that there can be, 1 to [`MAX_PEERS`].
    pub max_peers: u32,
    /// Vectors of each peer, to [`MAX_VECTORS`]; 0 where there are no doorbells.
    pub vectors: u32,
}

/// Which descriptor goes with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Passed {
    /// The memfd of the shared memory.
    Region,
    /// A peer's doorbell.
    Doorbell {
        /// Peer ID of the doorbell's owner.
        peer: u32,
        /// Index among that peer's doorbells.
        vector: u32,
    },
}

/// One message to a client. It goes out with one call, whole or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outgoing {
    bytes: [u8; v2::MAX_BYTES],
    len: usize,
    /// The descriptor that goes with it.
    pub passed: Option<Passed>,
    about: About,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum About {
    Greeting,
    Joined(u32),
    Left(u32),
}

impl Outgoing {
    /// Encoded form, ready for `sendmsg`.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn number(number: i64, passed: Option<Passed>, about: About) -> Outgoing {
        let mut bytes = [0; v2::MAX_BYTES];
        bytes[..v1::MESSAGE_BYTES].copy_from_slice(&v1::encode(number));
        Outgoing { bytes, len: v1::MESSAGE_BYTES, passed, about }
    }

    fn message(message: v2::Message, passed: Option<Passed>, about: About) -> Outgoing {
        let mut bytes = [0; v2::MAX_BYTES];
        let len = message.encode(&mut bytes);
        Outgoing { bytes, len, passed, about }
    }
}

/// Where a peer sits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seat {
    /// The lowest free id.
    Any,
    /// The lowest free id from this one on.
    From(u32),
    /// Only this peer ID.
    Fixed(u32),
}

/// What a peer is told through its socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hears {
    /// Nothing: it has no socket.
    Nothing,
    /// Its greeting, with the doorbells of all seats, and no more.
    Seats,
    /// Its greeting, with the doorbells of the peers that are there, and each peer that joins or
    /// leaves.
    Comings,
}

/// Why a peer cannot join.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum Refused {
    /// No seat is free.
    #[error("all peer IDs of the link that it may use (of {max_peers}) are in use")]
    Full { max_peers: u32 },
    /// The seat is taken.
    #[error("peer ID {id} of the link is in use")]
    Taken { id: u32 },
    #[error("there is no peer ID {id} on a link of {max_peers}")]
    NoSeat { id: u32, max_peers: u32 },
}

/// What is remembered of a peer across a restart of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerRecord {
    /// Peer ID.
    pub id: u32,
    /// What it is told.
    pub hears: Hears,
    /// Whether all that belongs to its joining went out.
    pub settled: bool,
    /// The peers that it may have been told of, a bit each.
    pub told: u64,
}

/// Bytes of an encoded [`PeerRecord`].
pub const RECORD_BYTES: usize = 16;

impl PeerRecord {
    /// Its bytes: `id` u32, settled u16, hears u16, `told` u64, little-endian.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut out = [0; RECORD_BYTES];
        out[..4].copy_from_slice(&self.id.to_le_bytes());
        let hears = match self.hears {
            Hears::Nothing => 0,
            Hears::Seats => 1,
            Hears::Comings => 2,
        };
        out[4] = self.settled.into();
        out[6] = hears;
        out[8..].copy_from_slice(&self.told.to_le_bytes());
        out
    }

    /// Reads what [`PeerRecord::encode`] wrote; `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<PeerRecord> {
        let bytes: &[u8; RECORD_BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let told = u64::from(word(8)) | u64::from(word(12)) << 32;
        let hears = [Hears::Nothing, Hears::Seats, Hears::Comings].into_iter().nth((word(4) >> 16) as usize)?;
        let settled = word(4) & 0xffff;
        (word(0) < MAX_PEERS && settled < 2).then_some(PeerRecord { id: word(0), hears, settled: settled == 1, told })
    }
}

#[derive(Debug)]
struct Peer {
    hears: Hears,
    settled: bool,
    told: u64,
    queue: VecDeque<Outgoing>,
    /// When its queue last moved, or began to be one.
    moved_ns: u64,
}

/// The peers of one link.
#[derive(Debug)]
pub struct Server {
    shape: Shape,
    peers: BTreeMap<u32, Peer>,
    changed: BTreeSet<u32>,
    patience_ns: u64,
}

impl Server {
    /// A server of a link without peers.
    pub fn new(shape: Shape) -> Server {
        debug_assert!((1..=MAX_PEERS).contains(&shape.max_peers) && shape.vectors <= MAX_VECTORS);
        Server { shape, peers: BTreeMap::new(), changed: BTreeSet::new(), patience_ns: TIMEOUT_NS }
    }

    /// A server that takes over the peers of an earlier one. Clients that were told of a peer that
    /// has no record any more are told that it is gone. Unsettled peers are not taken over, and
    /// nothing is said of them. A client that was told of one before finds by the state word that
    /// it is gone. A client that was not told of it must not be told that it is gone. Returns their
    /// ids.
    pub fn restore(shape: Shape, records: &[PeerRecord], now_ns: u64) -> (Server, Vec<u32>) {
        let mut server = Server::new(shape);
        let mut out = Vec::new();
        for record in records {
            if !record.settled || record.id >= shape.max_peers || server.peers.contains_key(&record.id) {
                out.push(record.id);
                continue;
            }
            let PeerRecord { id, hears, told, .. } = *record;
            server.peers.insert(id, Peer { hears, settled: true, told, queue: VecDeque::new(), moved_ns: now_ns });
        }
        let unsettled = out.iter().fold(0u64, |mask, id| mask | 1u64.checked_shl(*id).unwrap_or(0));
        for (id, peer) in &mut server.peers {
            if peer.told & unsettled != 0 {
                peer.told &= !unsettled;
                server.changed.insert(*id);
            }
        }
        let here = server.peers.keys().fold(0u64, |mask, id| mask | 1 << id);
        for id in 0..shape.max_peers {
            if here & 1 << id == 0 {
                server.announce_leave(id, now_ns);
            }
        }
        (server, out)
    }

    /// What does not change.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Whether the peer is on the link.
    pub fn has(&self, id: u32) -> bool {
        self.peers.contains_key(&id)
    }

    /// The ids of the peers that are on the link.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.peers.keys().copied()
    }

    /// The id that a peer would get.
    ///
    /// # Errors
    /// Why there is none for it.
    pub fn seat(&self, seat: Seat) -> Result<u32, Refused> {
        let max_peers = self.shape.max_peers;
        match seat {
            Seat::Any => self.seat(Seat::From(0)),
            Seat::From(first) => (first..max_peers).find(|id| !self.has(*id)).ok_or(Refused::Full { max_peers }),
            Seat::Fixed(id) if id >= max_peers => Err(Refused::NoSeat { id, max_peers }),
            Seat::Fixed(id) if self.has(id) => Err(Refused::Taken { id }),
            Seat::Fixed(id) => Ok(id),
        }
    }

    /// Takes a peer onto the link: greets it, and announces it to those who hear of comings.
    ///
    /// # Errors
    /// Why it cannot be.
    pub fn join(&mut self, seat: Seat, hears: Hears, now_ns: u64) -> Result<u32, Refused> {
        let id = self.seat(seat)?;
        let others: Vec<u32> = match hears {
            Hears::Nothing => vec![],
            Hears::Seats => (0..self.shape.max_peers).filter(|other| *other != id).collect(),
            Hears::Comings => self.ids().collect(),
        };
        let mut queue = VecDeque::new();
        if hears != Hears::Nothing {
            self.greet(id, &others, &mut queue);
        }
        let told = if hears == Hears::Comings { others.iter().fold(0, |mask, other| mask | 1 << other) } else { 0 };
        let announcement: Vec<_> = self.doorbells(id, About::Joined(id)).collect();
        for (other, peer) in self.peers.iter_mut().filter(|(_, p)| p.hears == Hears::Comings) {
            if peer.queue.is_empty() {
                peer.moved_ns = now_ns;
            }
            peer.told |= 1 << id;
            peer.queue.extend(&announcement);
            self.changed.insert(*other);
        }
        self.peers.insert(id, Peer { hears, settled: false, told, queue, moved_ns: now_ns });
        self.changed.insert(id);
        self.settle();
        Ok(id)
    }

    fn doorbells(&self, peer: u32, about: About) -> impl Iterator<Item = Outgoing> + use<> {
        let dialect = self.shape.dialect;
        (0..self.shape.vectors).map(move |vector| {
            let passed = Some(Passed::Doorbell { peer, vector });
            match dialect {
                Dialect::V1 => Outgoing::number(peer.into(), passed, about),
                Dialect::V2 { .. } => Outgoing::message(v2::Message::EventFd { id: peer, vector }, passed, about),
            }
        })
    }

    fn greet(&self, id: u32, others: &[u32], queue: &mut VecDeque<Outgoing>) {
        let region = Some(Passed::Region);
        match self.shape.dialect {
            Dialect::V1 => {
                queue.push_back(Outgoing::number(v1::VERSION, None, About::Greeting));
                queue.push_back(Outgoing::number(id.into(), None, About::Greeting));
                queue.push_back(Outgoing::number(v1::MEMORY, region, About::Greeting));
            }
            Dialect::V2 { protocol, output_bytes } => {
                let Shape { max_peers, vectors, .. } = self.shape;
                let protocol = v2::protocol_of(protocol, id);
                let init = v2::Message::Init { id, max_peers, vectors, protocol, output_bytes };
                queue.push_back(Outgoing::message(init, region, About::Greeting));
            }
        }
        for other in others {
            queue.extend(self.doorbells(*other, About::Joined(*other)));
        }
        queue.extend(self.doorbells(id, About::Greeting));
    }

    /// Takes a peer off the link and tells the others. Returns whether it was on it.
    pub fn leave(&mut self, id: u32, now_ns: u64) -> bool {
        if self.peers.remove(&id).is_none() {
            return false;
        }
        self.changed.insert(id);
        self.announce_leave(id, now_ns);
        self.settle();
        true
    }

    fn announce_leave(&mut self, gone: u32, now_ns: u64) {
        let farewell = match self.shape.dialect {
            Dialect::V1 => Outgoing::number(gone.into(), None, About::Left(gone)),
            Dialect::V2 { .. } => Outgoing::message(v2::Message::PeerGone { id: gone }, None, About::Left(gone)),
        };
        let vectors = self.shape.vectors as usize;
        for (id, peer) in &mut self.peers {
            if peer.told & 1 << gone == 0 {
                continue;
            }
            // From here on it must not be said again, and if this server is killed before it is
            // said, it is not said at all: the doorbells stay right, and the state word says it.
            peer.told &= !(1 << gone);
            self.changed.insert(*id);
            let before = peer.queue.len();
            peer.queue.retain(|m| m.about != About::Joined(gone));
            // What was withdrawn whole was never heard of.
            if before - peer.queue.len() < vectors {
                if peer.queue.is_empty() {
                    peer.moved_ns = now_ns;
                }
                peer.queue.push_back(farewell);
            }
        }
    }

    /// What is to be sent to a peer next.
    pub fn next(&self, id: u32) -> Option<&Outgoing> {
        self.peers.get(&id)?.queue.front()
    }

    /// How many messages wait for a peer.
    pub fn waiting(&self, id: u32) -> usize {
        self.peers.get(&id).map_or(0, |p| p.queue.len())
    }

    /// Takes note that [`Server::next`] of that peer was taken by its socket.
    pub fn sent(&mut self, id: u32, now_ns: u64) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.moved_ns = now_ns;
        peer.queue.pop_front();
        self.settle();
    }

    /// Finds the peers of whose joining nothing waits any more.
    fn settle(&mut self) {
        let unsettled: Vec<u32> = self.peers.iter().filter(|(_, p)| !p.settled).map(|(id, _)| *id).collect();
        for id in unsettled {
            let waits = |(other, peer): (&u32, &Peer)| {
                let mut queue = peer.queue.iter();
                if *other == id { !peer.queue.is_empty() } else { queue.any(|m| m.about == About::Joined(id)) }
            };
            if !self.peers.iter().any(waits) {
                if let Some(peer) = self.peers.get_mut(&id) {
                    peer.settled = true;
                }
                self.changed.insert(id);
            }
        }
    }

    /// The peers whose records have to be kept, or forgotten where they are gone, before more is
    /// sent.
    pub fn changed(&mut self) -> BTreeSet<u32> {
        std::mem::take(&mut self.changed)
    }

    /// What is to be remembered of a peer.
    pub fn record(&self, id: u32) -> Option<PeerRecord> {
        self.peers.get(&id).map(|p| PeerRecord { id, hears: p.hears, settled: p.settled, told: p.told })
    }

    /// Another timeout than [`TIMEOUT_NS`].
    #[cfg(test)]
    pub(super) fn set_patience_ns(&mut self, patience_ns: u64) {
        self.patience_ns = patience_ns;
    }

    /// Clients that have taken nothing for too long.
    pub fn overdue(&self, now_ns: u64) -> Vec<u32> {
        let late = |p: &Peer| !p.queue.is_empty() && now_ns.saturating_sub(p.moved_ns) >= self.patience_ns;
        self.peers.iter().filter(|(_, p)| late(p)).map(|(id, _)| *id).collect()
    }

    /// When the next client is overdue, if nothing happens.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.peers.values().filter(|p| !p.queue.is_empty()).map(|p| p.moved_ns + self.patience_ns).min()
    }
}

#[cfg(test)]
mod tests;
