//! Frames that are kept for guests: until a guest is heard of, and first segments until it answers
//! them.

use super::family::Address;
use super::forwarded::Forwarded;
use super::{HELD, HELD_BYTES, HELD_DATAGRAMS, HOLD_NS, Nat, REPEAT_NS};
use crate::Nanos;

/// A frame for a guest that has not been heard of, or a first segment that it has not answered.
#[derive(Debug)]
pub(super) struct Held<A> {
    pub(super) key: Forwarded<A>,
    pub(super) since: Nanos,
    /// It is kept until it is answered, not only until it can be sent.
    pub(super) is_first: bool,
    pub(super) sent: bool,
    pub(super) frame: Vec<u8>,
}

impl<A: Address> Nat<A> {
    /// Sends what is held for `guest`, whose MAC is known; keeps first segments.
    pub(super) fn send_held(&mut self, now: Nanos, guest: A) {
        let Some(mac) = self.neighbours.get(&guest).map(|n| n.mac) else { return };
        for mut held in std::mem::take(&mut self.held) {
            if held.key.0.1 != guest {
                self.held.push_back(held);
                continue;
            }
            held.frame[0..6].copy_from_slice(&mac);
            if held.is_first && now.since(held.since) < HOLD_NS {
                self.to_network.push_back(held.frame.clone());
                held.sent = true;
                self.held.push_back(held);
            } else {
                self.to_network.push_back(held.frame);
            }
        }
    }

    pub(super) fn forget_unanswered(&mut self, key: &Forwarded<A>) {
        if self.forwarded.get(key).is_some_and(|(_, state)| !state.answered) {
            self.forwarded.remove(key);
        }
    }

    /// Keeps a frame for a guest, if there is room; with `sent` it is on its way already, and a
    /// copy is kept.
    pub(super) fn hold(
        &mut self,
        now: Nanos,
        key: Forwarded<A>,
        is_first: bool,
        sent: bool,
        frame: &mut Vec<u8>,
    ) -> bool {
        if let Some(held) = self.held.iter_mut().find(|held| is_first && held.is_first && held.key == key) {
            // The uplink repeats it after all.
            held.frame.clone_from(frame);
            return true;
        }
        if frame.len() > HELD_BYTES {
            return false;
        }
        let guest = key.0.1;
        let is_datagram = |held: &&Held<A>| !held.is_first && held.key.0.1 == guest;
        if !is_first && self.held.iter().filter(is_datagram).count() >= HELD_DATAGRAMS {
            self.displace(key, |held| !held.is_first);
        } else if self.held.len() >= HELD {
            self.displace(key, |_| true);
        }
        self.repeat_at(now.after(REPEAT_NS));
        let frame = if sent { frame.clone() } else { std::mem::take(frame) };
        self.held.push_back(Held { key, since: now, is_first, sent, frame });
        true
    }

    /// Gives up the held frame that has to make room for one of `key`, among those that `may` go:
    /// the oldest of the outside address with the most, of the guest with the most. The newcomer
    /// counts as one of them, so who floods displaces its own.
    fn displace(&mut self, key: Forwarded<A>, may: impl Fn(&Held<A>) -> bool) {
        // Quadratic in the number of places, which is small and constant.
        let held = || self.held.iter().filter(|held| may(held));
        let of_guest = |guest| held().filter(|h| h.key.0.1 == guest).count() + usize::from(key.0.1 == guest);
        // Ties go to the oldest: `max_by_key` takes the last of equals.
        let Some(guest) = held().rev().map(|h| h.key.0.1).max_by_key(|guest| of_guest(*guest)) else { return };
        let end = |k: &Forwarded<A>| (k.0.1, k.1);
        let of_peer = |peer| held().filter(|h| end(&h.key) == peer).count() + usize::from(end(&key) == peer);
        let own = held().rev().map(|h| end(&h.key)).filter(|(to, _)| *to == guest);
        let Some(peer) = own.max_by_key(|peer| of_peer(*peer)) else { return };
        let Some(at) = self.held.iter().position(|h| may(h) && end(&h.key) == peer) else { return };
        if let Some(gone) = self.held.remove(at).filter(|held| !held.sent) {
            self.displaced += 1;
            // The guest cannot answer what it has not seen.
            if !self.held.iter().any(|held| held.key == gone.key) && gone.key != key {
                self.forget_unanswered(&gone.key);
            }
        }
    }

    /// Held frames that no guest has seen and that gave way to others, since the last call.
    pub fn take_displaced(&mut self) -> u64 {
        std::mem::take(&mut self.displaced)
    }
}
