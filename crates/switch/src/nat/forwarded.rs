//! Connections that came in through forwards, with a share for each forward and, within it, for
//! each outside address.
//!
//! Hosts outside make these entries, so none of them may cost another forward its connections, nor
//! one address the others'. A forward holds at most [`Table::share`] entries and an outside address
//! half of that. At such a limit the share makes room among its own entries: the oldest that is not
//! confirmed (reset, then closed, then half-open TCP or UDP that the guest has not answered), else
//! the oldest confirmed one if it was silent for [`SILENT_NS`]. If there is none, the newcomer is
//! refused.
//!
//! # How it works
//! Entries lie in a slab. Each is in two doubly linked lists, of its forward and of its address,
//! both for its [`Stage`] and in the order of last use. All entries of one list have the same idle
//! time, so what is over and what has to give way is always at a list's front: every operation
//! costs the same however many entries there are. A list is ordered to within [`MOVE_NS`], so that
//! a busy connection does not relink itself for every frame.

use std::collections::HashMap;

use super::family::Address;
use super::flow::{FlowState, Inside, TCP_CLOSED_NS, TCP_NS, TCP_RESET_NS, UDP_NS};
use super::{Protocol, SILENT_NS};
use crate::Nanos;

/// A connection through a forward: the guest's end, and the peer's.
pub(super) type Forwarded<A> = (Inside<A>, A, u16);

/// Entries of all forwards together, as long as each share is within its bounds below.
const TOTAL: usize = 65_536;
/// Bounds of one forward's share: a fabric with a thousand forwards still serves a thousand
/// connections with each, and a fabric with one does not spend its whole memory on it.
const LEAST: usize = 1024;
const MOST: usize = 16_384;
/// An entry's place in its lists is at most so much older than its last use.
const MOVE_NS: Nanos = Nanos(1_000_000_000);
const NONE: u32 = u32::MAX;

/// How far an entry has come, in the order in which entries give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Reset,
    Closed,
    Unconfirmed,
    Confirmed,
}

impl Stage {
    const COUNT: usize = 4;

    fn of(state: &FlowState) -> Stage {
        match (state.protocol, state.idle()) {
            (Protocol::Tcp, TCP_RESET_NS) => Stage::Reset,
            (Protocol::Tcp, TCP_CLOSED_NS) => Stage::Closed,
            (Protocol::Tcp, TCP_NS) | (Protocol::Udp, UDP_NS) => Stage::Confirmed,
            _ => Stage::Unconfirmed,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Links {
    older: u32,
    newer: u32,
}

const LOOSE: Links = Links { older: NONE, newer: NONE };

#[derive(Debug)]
struct Entry<A> {
    key: Forwarded<A>,
    /// The forward's port.
    port: u16,
    state: FlowState,
    stage: Stage,
    /// When it was put at its lists' ends.
    moved: Nanos,
    /// Its forward's share, its address' share.
    shares: [u32; 2],
    links: [Links; 2],
}

#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
}

/// What a forward, or an address at a forward, holds.
#[derive(Clone, Copy, Debug)]
struct Share {
    held: usize,
    stages: [List; Stage::COUNT],
}

impl Share {
    const EMPTY: Share = Share { held: 0, stages: [List { oldest: NONE, newest: NONE }; Stage::COUNT] };
}

#[derive(Debug)]
pub(super) struct Table<A> {
    forwards: usize,
    index: HashMap<Forwarded<A>, u32>,
    entries: Vec<Entry<A>>,
    free_entries: Vec<u32>,
    /// The forwards' in their order, then the addresses'.
    shares: Vec<Share>,
    free_shares: Vec<u32>,
    /// (Forward, outside address) → share.
    peers: HashMap<(u32, A), u32>,
}

impl<A: Address> Table<A> {
    /// An empty table for so many forwards.
    pub(super) fn new(forwards: usize) -> Table<A> {
        Table {
            forwards,
            index: HashMap::new(),
            entries: Vec::new(),
            free_entries: Vec::new(),
            shares: vec![Share::EMPTY; forwards],
            free_shares: Vec::new(),
            peers: HashMap::new(),
        }
    }

    /// Entries that one forward may hold.
    pub(super) fn share(&self) -> usize {
        (TOTAL / self.forwards.max(1)).clamp(LEAST, MOST)
    }

    /// Entries that one outside address may hold at one forward.
    pub(super) fn peer_share(&self) -> usize {
        self.share() / 2
    }

    pub(super) fn len(&self) -> usize {
        self.index.len()
    }

    /// Outside addresses that hold something, each counted for each forward.
    #[cfg(test)]
    pub(super) fn peers(&self) -> usize {
        self.peers.len()
    }

    pub(super) fn clear(&mut self) {
        *self = Table::new(self.forwards);
    }

    /// The forward's port and the connection's state.
    pub(super) fn get(&self, key: &Forwarded<A>) -> Option<(u16, &FlowState)> {
        let entry = &self.entries[*self.index.get(key)? as usize];
        Some((entry.port, &entry.state))
    }

    /// Changes the state of a connection with `note`; returns the forward's port, if the connection
    /// is known.
    pub(super) fn note(&mut self, now: Nanos, key: &Forwarded<A>, note: impl FnOnce(&mut FlowState)) -> Option<u16> {
        let at = *self.index.get(key)?;
        let entry = &mut self.entries[at as usize];
        note(&mut entry.state);
        let stage = Stage::of(&entry.state);
        let port = entry.port;
        if stage != entry.stage || now.since(entry.moved) >= MOVE_NS {
            self.unlink(at);
            let entry = &mut self.entries[at as usize];
            (entry.stage, entry.moved) = (stage, now);
            self.link(at);
        }
        Some(port)
    }

    /// The port of the uplink's address that a known connection came to.
    pub(super) fn port_of(&self, key: &Forwarded<A>) -> Option<u16> {
        self.index.get(key).map(|at| self.entries[*at as usize].port)
    }

    /// Adds a connection that is not known, through forward number `forward` with its `port`.
    /// Returns the one that had to give way; `Err` if none could.
    pub(super) fn add(
        &mut self,
        now: Nanos,
        key: Forwarded<A>,
        (forward, port): (usize, u16),
        state: FlowState,
    ) -> Result<Option<Forwarded<A>>, ()> {
        let forward = forward as u32;
        let peer = self.peers.get(&(forward, key.1)).copied();
        let full = match peer {
            Some(peer) if self.shares[peer as usize].held >= self.peer_share() => Some(peer),
            _ => (self.shares[forward as usize].held >= self.share()).then_some(forward),
        };
        let displaced = match full {
            Some(share) => Some(self.make_room(now, share).ok_or(())?),
            None => None,
        };
        // Looked up again: what gave way may have been the address' last.
        let peer = self.peers.get(&(forward, key.1)).copied().unwrap_or_else(|| {
            let at = self.free_shares.pop().unwrap_or_else(|| {
                self.shares.push(Share::EMPTY);
                self.shares.len() as u32 - 1
            });
            self.peers.insert((forward, key.1), at);
            at
        });
        let (stage, shares) = (Stage::of(&state), [forward, peer]);
        let entry = Entry { key, port, state, stage, moved: now, shares, links: [LOOSE; 2] };
        let at = match self.free_entries.pop() {
            Some(at) => {
                self.entries[at as usize] = entry;
                at
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.index.insert(key, at);
        shares.iter().for_each(|share| self.shares[*share as usize].held += 1);
        self.link(at);
        Ok(displaced)
    }

    /// Removes an entry of `share`, and says which.
    fn make_room(&mut self, now: Nanos, share: u32) -> Option<Forwarded<A>> {
        let stages = self.shares[share as usize].stages;
        let at = stages.iter().map(|list| list.oldest).find(|at| *at != NONE)?;
        let entry = &self.entries[at as usize];
        if entry.stage == Stage::Confirmed && now.since(entry.state.last) < SILENT_NS {
            return None;
        }
        let key = entry.key;
        self.remove(&key);
        Some(key)
    }

    /// Forgets a connection; returns the forward's port, if it was known.
    pub(super) fn remove(&mut self, key: &Forwarded<A>) -> Option<u16> {
        let at = self.index.remove(key)?;
        self.unlink(at);
        self.free_entries.push(at);
        let Entry { port, shares: [forward, peer], .. } = self.entries[at as usize];
        self.shares[forward as usize].held -= 1;
        let share = &mut self.shares[peer as usize];
        share.held -= 1;
        if share.held == 0 {
            self.peers.remove(&(forward, key.1));
            self.free_shares.push(peer);
        }
        Some(port)
    }

    /// Forgets connections that were idle for too long.
    pub(super) fn expire(&mut self, now: Nanos) {
        for (forward, stage) in (0..self.forwards).flat_map(|f| (0..Stage::COUNT).map(move |s| (f, s))) {
            loop {
                let at = self.shares[forward].stages[stage].oldest;
                let Some(entry) = self.entries.get(at as usize).filter(|e| at != NONE && e.state.is_over(now)) else {
                    break;
                };
                let key = entry.key;
                self.remove(&key);
            }
        }
    }

    /// All connections: key, forward's port, state.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Forwarded<A>, u16, &FlowState)> {
        self.index.iter().map(|(key, at)| {
            let entry = &self.entries[*at as usize];
            (key, entry.port, &entry.state)
        })
    }

    fn unlink(&mut self, at: u32) {
        let Entry { shares, stage, links, .. } = self.entries[at as usize];
        for (level, (share, Links { older, newer })) in shares.into_iter().zip(links).enumerate() {
            let list = &mut self.shares[share as usize].stages[stage as usize];
            match older {
                NONE => list.oldest = newer,
                _ => self.entries[older as usize].links[level].newer = newer,
            }
            match newer {
                NONE => list.newest = older,
                _ => self.entries[newer as usize].links[level].older = older,
            }
        }
    }

    /// Puts an entry that is in no list at the end of its two.
    fn link(&mut self, at: u32) {
        let Entry { shares, stage, .. } = self.entries[at as usize];
        for (level, share) in shares.into_iter().enumerate() {
            let list = &mut self.shares[share as usize].stages[stage as usize];
            let older = std::mem::replace(&mut list.newest, at);
            match older {
                NONE => list.oldest = at,
                _ => self.entries[older as usize].links[level].newer = at,
            }
            self.entries[at as usize].links[level] = Links { older, newer: NONE };
        }
    }
}
