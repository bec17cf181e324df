//! Connections that open: of each, one segment goes to the uplink, and the next one once the uplink
//! has answered it.
//!
//! # Purpose
//! The passt of Debian 12 (9 March 2023) reads all segments of a connection that it finds in its
//! socket together. If the first of them opens the connection there (a SYN, or what answers passt's
//! own SYN) and another one is with it, whatever that is, passt tries the first one again and again
//! for ever: it takes all of its CPU time and serves no member any more. A host has nothing to say
//! before the answer, so what it says all the same is dropped.
//!
//! # Invariants
//! - A SYN may be sent again after [`AGAIN`], as hosts do after a second. Whatever else is sent is
//!   dropped until the answer, or for [`PATIENCE`]: passt has read the first one by then.
//! - Only a segment with ACK or RST is an answer. A SYN that passt repeats is none.
//!
//! # Limits
//! [`SETS`] times [`WAYS`] connections that open; the oldest of its set makes room for another one.
//! Which set that is follows from a key that no member knows. Far fewer segments fit into passt's
//! socket, so no member can make it forget a connection while that is there. Its memory, 768 KiB, is
//! there from the first SYN on. The table is not handed over to the next daemon: the connections
//! that open at that moment are not looked at. Where passt reads nothing for [`AGAIN`], as on a
//! machine that stood still, it finds a repeated SYN beside the first one.

use std::hash::{BuildHasher, Hash, RandomState};

use super::packet::{ACK, RST, SYN};
use crate::Nanos;

/// A SYN may be repeated after this time.
const AGAIN: Nanos = Nanos(900_000_000);
/// After this time the uplink has read what it was sent, if it lives.
const PATIENCE: Nanos = Nanos(3_000_000_000);
const SETS: usize = 4096;
const WAYS: usize = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Of the connection; 0 where there is none.
    hash: u64,
    at: Nanos,
    /// A segment that opens it was sent; else the uplink has asked for one.
    sent: bool,
}

/// The connections of a router that open.
#[derive(Debug)]
pub(super) struct Opening {
    keys: RandomState,
    /// [`SETS`], or none as long as nothing has opened.
    entries: Vec<[Entry; WAYS]>,
}

impl Opening {
    pub(super) fn new() -> Opening {
        Opening { keys: RandomState::new(), entries: Vec::new() }
    }

    pub(super) fn clear(&mut self) {
        self.entries = Vec::new();
    }

    fn set_of(hash: u64) -> usize {
        (hash >> 32) as usize % SETS
    }

    fn find(&mut self, hash: u64) -> Option<&mut Entry> {
        self.entries.get_mut(Self::set_of(hash))?.iter_mut().find(|entry| entry.hash == hash)
    }

    fn put(&mut self, entry: Entry) {
        self.entries.resize(SETS, [Entry::default(); WAYS]);
        let set = &mut self.entries[Self::set_of(entry.hash)];
        if let Some(oldest) = set.iter_mut().min_by_key(|entry| (entry.hash != 0, entry.at)) {
            *oldest = entry;
        }
    }

    /// Whether a segment of a connection, with these flags, may go to the uplink now.
    pub(super) fn lets_out(&mut self, now: Nanos, key: &impl Hash, flags: u8) -> bool {
        let hash = self.keys.hash_one(key) | 1;
        let opens = flags & SYN != 0;
        match self.find(hash) {
            Some(entry) if entry.sent && now.since(entry.at) < if opens { AGAIN } else { PATIENCE } => return false,
            Some(entry) if entry.sent && !opens => *entry = Entry::default(),
            // A refusal ends it.
            Some(entry) if flags & RST != 0 => *entry = Entry::default(),
            Some(entry) => (entry.sent, entry.at) = (true, now),
            // An answer to a SYN that was not asked for opens nothing: the uplink has had it before.
            None if opens && flags & ACK == 0 => self.put(Entry { hash, at: now, sent: true }),
            None => {}
        }
        true
    }

    /// A segment of a connection came from the uplink.
    pub(super) fn answered(&mut self, now: Nanos, key: &impl Hash, flags: u8) {
        let hash = self.keys.hash_one(key) | 1;
        match (self.find(hash), flags & (ACK | RST) != 0) {
            (Some(entry), true) => *entry = Entry::default(),
            (None, false) if flags & SYN != 0 => self.put(Entry { hash, at: now, sent: false }),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIN: u8 = 1;
    const PUSH: u8 = 8;

    #[test]
    fn after_a_syn_nothing_goes_until_the_answer() {
        let (mut opening, start) = (Opening::new(), Nanos::SECOND);
        for flags in [ACK, ACK | PUSH, FIN | ACK, RST, SYN, SYN | ACK, 0] {
            let key = ("guest", flags);
            assert!(opening.lets_out(start, &key, SYN), "{flags:#x}");
            assert!(!opening.lets_out(start, &key, flags), "{flags:#x}");
            assert!(opening.lets_out(start, &("another", flags), flags), "{flags:#x}");
            // Not by a SYN of the other side.
            opening.answered(start, &key, SYN);
            assert!(!opening.lets_out(start, &key, flags), "{flags:#x}");
            opening.answered(start, &key, SYN | ACK);
            assert!(opening.lets_out(start, &key, flags), "{flags:#x}");
        }
    }

    #[test]
    fn a_syn_is_repeated_after_a_second_and_the_rest_goes_when_the_uplink_is_silent() {
        let (mut opening, start) = (Opening::new(), Nanos::SECOND);
        assert!(opening.lets_out(start, &1, SYN));
        let later = start.after(Nanos::SECOND);
        assert!(opening.lets_out(later, &1, SYN) && !opening.lets_out(later, &1, SYN));
        assert!(!opening.lets_out(later.after(Nanos(PATIENCE.0 - 1)), &1, ACK));
        let silent = later.after(PATIENCE);
        assert!(opening.lets_out(silent, &1, ACK) && opening.lets_out(silent, &1, ACK));
    }

    #[test]
    fn one_segment_answers_the_syn_of_the_uplink() {
        for first in [SYN | ACK, ACK, SYN] {
            let (mut opening, now) = (Opening::new(), Nanos::SECOND);
            opening.answered(now, &1, SYN);
            assert!(opening.lets_out(now, &1, first) && !opening.lets_out(now, &1, ACK | PUSH));
            opening.answered(now, &1, SYN);
            assert!(!opening.lets_out(now, &1, first), "its SYN came once more");
            opening.answered(now, &1, ACK);
            assert!(opening.lets_out(now, &1, ACK | PUSH) && opening.lets_out(now, &1, ACK | PUSH));
        }
    }

    #[test]
    fn an_answer_that_is_repeated_on_an_open_connection_stops_nothing() {
        let (mut opening, now) = (Opening::new(), Nanos::SECOND);
        assert!(opening.lets_out(now, &1, SYN | ACK) && opening.entries.is_empty(), "no memory before the first SYN");
        opening.answered(now, &1, SYN);
        assert!(opening.lets_out(now, &1, SYN | ACK));
        opening.answered(now, &1, ACK);
        assert!(opening.lets_out(now, &1, SYN | ACK) && opening.lets_out(now, &1, ACK | PUSH));
    }

    #[test]
    fn after_a_refusal_the_uplink_may_ask_again_at_once() {
        let (mut opening, now) = (Opening::new(), Nanos::SECOND);
        for _ in 0..3 {
            opening.answered(now, &1, SYN);
            assert!(opening.lets_out(now, &1, RST | ACK));
        }
        opening.answered(now, &1, SYN);
        assert!(opening.lets_out(now, &1, SYN | ACK) && !opening.lets_out(now, &1, ACK));
    }

    #[test]
    fn others_that_open_have_none_forgotten() {
        let (mut opening, now) = (Opening::new(), Nanos::SECOND);
        assert!(opening.lets_out(now, &u64::MAX, SYN));
        // More than passt's socket holds.
        for n in 0..4000u64 {
            assert!(opening.lets_out(now, &n, SYN));
        }
        assert!(!opening.lets_out(now, &u64::MAX, ACK));
        opening.clear();
        assert!(opening.lets_out(now, &u64::MAX, ACK));
    }
}
