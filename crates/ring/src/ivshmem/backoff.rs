//! When a link's memory is looked at again although nothing has rung. Pure; the clock is the
//! caller's.

use core::time::Duration;

use crate::virtio::notify::RECHECK_NS;

/// Without a doorbell: the first pause between two looks, of which each is twice as long as the one
/// before.
const FIRST_POLL: Duration = Duration::from_micros(50);
const LONGEST_POLL: Duration = Duration::from_millis(4);
/// With one: from the beginning of a sleep to its second look, since the peer's memory fences may
/// do nothing ([`crate::virtio::notify`]).
const SECOND_LOOK: Duration = Duration::from_nanos(RECHECK_NS);
/// With one that has not been rung yet: looks follow at pauses that double up to this one. QEMU
/// drops a ring for a peer of which the server has not told it yet, and it may be told late: its
/// main loop shares a busy machine with the guest's processor.
const LONGEST_UNHEARD: Duration = Duration::from_secs(4);

/// What can wake an end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wakes {
    /// Nothing: the memory is looked at again and again.
    Polled,
    /// A doorbell that the peer has not rung for traffic yet.
    Unheard,
    /// A doorbell that it has rung.
    Heard,
}

/// The pauses between looks that find nothing.
///
/// ```
/// use core::time::Duration;
/// use tombolo_ring::ivshmem::backoff::{Backoff, Wakes};
///
/// // A peer that has rung before is relied on after a second look.
/// let mut backoff = Backoff::default();
/// assert_eq!(backoff.pause(Wakes::Heard), Some(Duration::from_micros(100)));
/// assert_eq!(backoff.pause(Wakes::Heard), None);
/// backoff.found();
/// assert_eq!(backoff.pause(Wakes::Heard), Some(Duration::from_micros(100)));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    /// Pauses since something was found.
    pauses: u32,
}

impl Backoff {
    /// Something came, so the pauses begin with the shortest again.
    pub fn found(&mut self) {
        self.pauses = 0;
    }

    /// How long after a look that found nothing the next one is due, though nothing rings; `None`:
    /// not before something rings.
    pub fn pause(&mut self, wakes: Wakes) -> Option<Duration> {
        let factor = 1 << self.pauses.min(20);
        let pause = match wakes {
            Wakes::Polled => Some((factor * FIRST_POLL).min(LONGEST_POLL)),
            Wakes::Unheard => Some(factor * SECOND_LOOK).filter(|pause| *pause <= LONGEST_UNHEARD),
            Wakes::Heard => (self.pauses == 0).then_some(SECOND_LOOK),
        };
        self.pauses = self.pauses.saturating_add(1);
        pause
    }
}

/// The same on a clock: when to look, for an end that is asked at any time.
#[derive(Clone, Copy, Debug)]
pub struct LookTimes {
    backoff: Backoff,
    /// `None`: not before something rings.
    due_ns: Option<u64>,
}

impl Default for LookTimes {
    fn default() -> Self {
        LookTimes { backoff: Backoff::default(), due_ns: Some(0) }
    }
}

impl LookTimes {
    /// When the next look is due, after one at `now_ns` that found something, or not. A look before
    /// its time puts nothing off.
    pub fn next(&mut self, now_ns: u64, wakes: Wakes, found: bool) -> Option<u64> {
        if found {
            self.backoff.found();
        }
        if found || self.due_ns.is_some_and(|due| due <= now_ns) {
            self.due_ns = self.backoff.pause(wakes).map(|pause| now_ns.saturating_add(pause.as_nanos() as u64));
        }
        self.due_ns
    }

    /// Whether the next look is further away than it would be after one that found something.
    pub fn is_late(&self) -> bool {
        self.due_ns.is_none() || self.backoff.pauses > 1
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::vec::Vec;

    fn pauses(wakes: Wakes, most: usize) -> Vec<Duration> {
        let mut backoff = Backoff::default();
        core::iter::from_fn(|| backoff.pause(wakes)).take(most).collect()
    }

    #[test]
    fn pauses_double_without_an_end_where_nothing_rings_and_up_to_four_seconds_before_the_first_ring() {
        let polled = pauses(Wakes::Polled, 100);
        assert_eq!(polled[..3], [50, 100, 200].map(Duration::from_micros));
        assert_eq!((polled.len(), polled[99]), (100, LONGEST_POLL));
        let unheard = pauses(Wakes::Unheard, 100);
        assert_eq!(unheard[..3], [100, 200, 400].map(Duration::from_micros));
        assert!(unheard.iter().sum::<Duration>() > LONGEST_UNHEARD && unheard.len() == 16, "{unheard:?}");
        assert_eq!(pauses(Wakes::Heard, 100), [SECOND_LOOK]);
    }

    #[test]
    fn before_the_first_ring_a_link_is_looked_at_for_some_seconds_after_what_came_last() {
        const SECOND: u64 = 1_000_000_000;
        let mut times = LookTimes::default();
        let mut run = |from: u64, mut found: bool| {
            let (mut now, mut count) = (from, 0);
            while let Some(next) = times.next(now, Wakes::Unheard, core::mem::take(&mut found)) {
                assert_eq!(times.next(now, Wakes::Unheard, false), Some(next), "one before its time changes nothing");
                assert!(next > now && times.is_late() == (count > 0));
                (now, count) = (next, count + 1);
            }
            assert!(times.is_late());
            (now - from, count)
        };
        for (from, found) in [(5, false), (8 * SECOND, true)] {
            let (time, count) = run(from, found);
            assert!((4 * SECOND..10 * SECOND).contains(&time) && count == 16, "{time} {count}");
        }
        // A peer that was heard: one look after what was found, and none until more is.
        let mut times = LookTimes::default();
        assert_eq!(times.next(7, Wakes::Heard, true), Some(7 + RECHECK_NS));
        assert_eq!(times.next(7 + RECHECK_NS, Wakes::Heard, false), None);
        assert_eq!(times.next(8 * SECOND, Wakes::Heard, false), None);
        assert_eq!(times.next(9 * SECOND, Wakes::Heard, true), Some(9 * SECOND + RECHECK_NS));
    }
}
