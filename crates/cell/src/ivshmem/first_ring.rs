//! Whether a peer was heard, and when a link with doorbell is looked at although nothing rings.
//! Pure.
//!
//! The first rings of a peer that came can get lost ([`tombolo_ring::ivshmem::backoff`]). Until one
//! has come, the memory is looked at again by time.

use tombolo_ring::ivshmem::backoff::{LookTimes, Wakes};

/// The first ring of a peer, waited for since the peer came.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FirstRing {
    rings_before: u64,
    look_times: LookTimes,
}

impl FirstRing {
    /// A peer came when the doorbell had rung so often.
    pub(crate) fn awaited(rings: u64) -> FirstRing {
        FirstRing { rings_before: rings, look_times: LookTimes::default() }
    }

    /// Whether it has come, at a doorbell that has rung `rings` times by now.
    pub(crate) fn has_come(&self, rings: u64) -> bool {
        rings != self.rings_before
    }

    /// When to look next, after a look at `now_ns` that found something or not; `None`: not before
    /// something rings. With `is_heard` the look after next is not due by time any more.
    pub(crate) fn next_look(&mut self, now_ns: u64, is_heard: bool, found: bool) -> Option<u64> {
        let wakes = if is_heard { Wakes::Heard } else { Wakes::Unheard };
        self.look_times.next(now_ns, wakes, found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_go_on_until_the_peer_has_rung() {
        let mut first = FirstRing::awaited(7);
        let mut at = 0;
        for _ in 0..10 {
            assert!(!first.has_come(7));
            at = first.next_look(at, false, false).expect("a ring may be lost");
        }
        assert!(first.has_come(8));
        let second = first.next_look(at, true, true).expect("a second look");
        assert_eq!(first.next_look(second, true, false), None);
    }
}
