//! What [`super::Nat`] remembers of a flow: how far it has come, how long it may be idle, who it is
//! charged to, and which ports of the uplink's address are taken.

use std::collections::VecDeque;

use super::FIRST_PORT;
use super::family::Address;
use super::packet::{ACK, FIN, RST, SYN, Transport};
use crate::Nanos;
use crate::frame::Mac;
use crate::limit::ChargedTo;

// Idle times: RFC 5382 REQ-5 for TCP (2 h 4 min established, 4 min half-open and half-closed), RFC
// 4787 REQ-5 for UDP, RFC 5508 REQ-2 for echo; UDP from outside that the guest has not answered has
// the 30 s of Linux' conntrack. Both ends have said that they are done: twice Linux' segment
// lifetime (60 s). A reset ends a connection at once; its port rests a little.
pub(super) const TCP_NS: Nanos = Nanos(7_440 * 1_000_000_000);
pub(super) const TCP_HALF_NS: Nanos = Nanos(240 * 1_000_000_000);
pub(super) const TCP_CLOSED_NS: Nanos = Nanos(60 * 1_000_000_000);
pub(super) const TCP_RESET_NS: Nanos = Nanos(10 * 1_000_000_000);
pub(super) const UDP_NS: Nanos = Nanos(300 * 1_000_000_000);
pub(super) const UDP_UNANSWERED_NS: Nanos = Nanos(30 * 1_000_000_000);
pub(super) const ECHO_NS: Nanos = Nanos(60 * 1_000_000_000);

/// A transport that is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP (6).
    Tcp,
    /// UDP (17).
    Udp,
    /// Echo of ICMP (1) or ICMPv6 (58); the identifier takes the place of the port.
    Echo,
}

impl Protocol {
    pub(super) fn of<A: Address>(number: u8) -> Option<Protocol> {
        match number {
            6 => Some(Protocol::Tcp),
            17 => Some(Protocol::Udp),
            number if number == A::ICMP => Some(Protocol::Echo),
            _ => None,
        }
    }
}

/// A guest's end of a mapping.
pub(super) type Inside<A> = (Protocol, A, u16);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Out,
    In,
}

/// How far a connection has come, as its segments say, and how long it may be idle.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlowState {
    pub(super) protocol: Protocol,
    pub(super) last: Nanos,
    /// Something came the other way than the first frame.
    pub(super) answered: bool,
    pub(super) first: Direction,
    /// FIN seen: out, in.
    pub(super) done: [bool; 2],
    pub(super) reset: bool,
}

impl FlowState {
    pub(super) fn new(now: Nanos, first: Direction, t: &Transport, frame: &[u8]) -> FlowState {
        let mut state =
            FlowState { protocol: t.protocol, last: now, answered: false, first, done: [false; 2], reset: false };
        state.note(now, first, t, frame);
        state
    }

    #[inline]
    pub(super) fn note(&mut self, now: Nanos, direction: Direction, t: &Transport, frame: &[u8]) {
        self.last = now;
        if self.protocol != Protocol::Tcp {
            self.answered |= direction != self.first;
            return;
        }
        let (flags, data) = t.flags(frame);
        let over = self.reset || self.done == [true; 2];
        if flags & RST != 0 {
            self.reset = true;
        } else if flags & (SYN | ACK) == SYN {
            *self = FlowState { answered: false, first: direction, done: [false; 2], reset: false, ..*self };
        } else if over && data {
            // A guest's port serves all its peers: another connection of it is alive.
            (self.done, self.reset, self.answered) = ([false; 2], false, true);
        } else {
            self.answered |= direction != self.first;
            self.done[direction as usize] |= flags & FIN != 0;
        }
    }

    #[inline]
    pub(super) fn idle(&self) -> Nanos {
        match self.protocol {
            // Anybody outside can make one of these, and a guest's own need RFC 4787's time.
            Protocol::Udp if self.first == Direction::In && !self.answered => UDP_UNANSWERED_NS,
            Protocol::Udp => UDP_NS,
            Protocol::Echo => ECHO_NS,
            Protocol::Tcp if self.reset => TCP_RESET_NS,
            Protocol::Tcp if self.done == [true; 2] => TCP_CLOSED_NS,
            Protocol::Tcp if !self.answered || self.done != [false; 2] => TCP_HALF_NS,
            Protocol::Tcp => TCP_NS,
        }
    }

    #[inline]
    pub(super) fn is_over(&self, now: Nanos) -> bool {
        now.since(self.last) >= self.idle()
    }

    /// Whether it may have to give way to a new flow of its source; for datagrams, at some time.
    #[inline]
    pub(super) fn may_yield(&self) -> bool {
        self.protocol != Protocol::Tcp || self.idle().0 < TCP_NS.0
    }
}

#[derive(Debug)]
pub(super) struct Flow<A> {
    pub(super) inside: Inside<A>,
    pub(super) station: Mac,
    pub(super) source: ChargedTo,
    pub(super) state: FlowState,
    /// It is in its source's queue.
    pub(super) queued: bool,
    pub(super) id: u64,
}

/// What one source holds.
#[derive(Debug, Default)]
pub(super) struct Share {
    pub(super) held: usize,
    /// Mappings that may have to give way, oldest first, with the mapping's number; each at most
    /// once, dead ones among them.
    pub(super) yielding: VecDeque<(Protocol, u16, u64)>,
}

/// Which uplink ports are taken.
#[derive(Debug)]
pub(super) struct Taken(Vec<u64>);

impl Taken {
    pub(super) fn new() -> Taken {
        let mut words = vec![0; 1024];
        // The forwards' ports are never given.
        words[..usize::from(FIRST_PORT) / 64].fill(u64::MAX);
        Taken(words)
    }

    pub(super) fn set(&mut self, port: u16, taken: bool) {
        let (word, bit) = (&mut self.0[usize::from(port) / 64], 1 << (port % 64));
        *word = if taken { *word | bit } else { *word & !bit };
    }

    /// The first free port from `start` on, the lowest ones after the highest.
    pub(super) fn free_from(&self, start: u16) -> Option<u16> {
        let first = usize::from(start) / 64;
        let below = (1u64 << (start % 64)) - 1;
        let words = (first..1024).chain(0..=first);
        words.enumerate().find_map(|(i, word)| {
            let taken = if i == 0 { self.0[word] | below } else { self.0[word] };
            (taken != u64::MAX).then(|| (word * 64) as u16 + taken.trailing_ones() as u16)
        })
    }
}
