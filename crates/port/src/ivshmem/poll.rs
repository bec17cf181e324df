//! When a link is looked at that nothing wakes, and what becomes of a peer that rings without end.
//! Pure; the clock is the caller's.
//!
//! # A link without a doorbell
//! It is looked at every [`PollSettings::fast`] while frames flow and for [`PollSettings::linger`]
//! after the last one, then half as often after each look that found nothing, down to every
//! [`PollSettings::slow`]. Times are multiples of the interval, so the idle links of a worker are
//! all looked at in one wake-up.
//!
//! # A link with doorbells that is down
//! It is looked at every [`DOWN_INTERVAL`]: a ring that was lost, such as one before the peer's
//! driver had its interrupts on, must not leave both ends waiting for each other.
//!
//! # A link with doorbells that is up, before the peer's first ring for traffic
//! That ring can get lost, too: QEMU drops it where the server has not told it of us yet. So looks
//! that find nothing follow each other in pauses that double, and end after some seconds
//! ([`tombolo_ring::ivshmem::backoff`]).
//!
//! # A peer that rings for nothing
//! A ring costs the worker a wake-up. More than [`STORM_RINGS`] of them in [`STORM_WINDOW`] beyond
//! the frames that were exchanged are a storm: the doorbells are not listened to for
//! [`STORM_HOLD`], and the link is looked at every [`STORM_INTERVAL`] instead. It goes on that way
//! until the rings stop; frames are late by that interval.

use tombolo_switch::Nanos;

/// Rings without frames that are borne in a window.
pub(super) const STORM_RINGS: u64 = 400;
pub(super) const STORM_WINDOW: Nanos = Nanos(10_000_000);
/// How long doorbells are not listened to after that.
pub(super) const STORM_HOLD: Nanos = Nanos(200_000_000);
/// How often the link is looked at then.
pub(super) const STORM_INTERVAL: Nanos = Nanos(1_000_000);

/// How often a link with doorbells is looked at while it is down and its peer is there.
pub(super) const DOWN_INTERVAL: Nanos = Nanos(100_000_000);

/// How often a link without doorbell is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollSettings {
    /// Interval while frames flow.
    pub fast: Nanos,
    /// How long after the last frame it stays fast.
    pub linger: Nanos,
    /// When nothing has come for long.
    pub slow: Nanos,
}

impl Default for PollSettings {
    /// 50 µs, 2 ms, 4 ms: a frame on an idle link waits for up to 4 ms; an idle link costs 250
    /// looks in a second.
    fn default() -> PollSettings {
        PollSettings { fast: Nanos(50_000), linger: Nanos(2_000_000), slow: Nanos(4_000_000) }
    }
}

#[derive(Debug)]
pub(super) struct Poller {
    settings: PollSettings,
    pub(super) interval: Nanos,
    busy_at: Nanos,
}

impl Poller {
    pub(super) fn new(settings: PollSettings) -> Poller {
        // At least a nanosecond: a moment later is promised.
        let settings = PollSettings { fast: settings.fast.max(Nanos(1)), ..settings };
        Poller { settings, interval: settings.fast, busy_at: Nanos(0) }
    }

    /// Whether it looks less often than it could.
    pub(super) fn is_slow(&self) -> bool {
        self.interval > self.settings.fast
    }

    /// Has the next looks be fast ones.
    pub(super) fn hurry(&mut self) {
        self.interval = self.settings.fast;
    }

    /// The time of the next look, after one at `now` that found something, or not.
    pub(super) fn next(&mut self, now: Nanos, busy: bool) -> Nanos {
        if busy {
            self.busy_at = now;
            self.interval = self.settings.fast;
        } else if now.since(self.busy_at) >= self.settings.linger {
            self.interval = Nanos(self.interval.0.saturating_mul(2)).min(self.settings.slow).max(self.settings.fast);
        }
        grid(now, self.interval)
    }
}

/// The next multiple of `interval` after `now`.
pub(super) fn grid(now: Nanos, interval: Nanos) -> Nanos {
    Nanos((now.0 / interval.0 + 1).saturating_mul(interval.0))
}

#[derive(Debug, Default)]
pub(super) struct Storm {
    window_from: Nanos,
    rings: u64,
    frames: u64,
    /// While it holds: until when.
    until: Option<Nanos>,
    /// Storms so far.
    pub(super) count: u64,
}

/// What is to be done about the doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Listen,
    /// Do not, and look again at the time given.
    Hold(Nanos),
}

impl Storm {
    /// Notes a look at `now`, with `frames` exchanged since the one before.
    pub(super) fn look(&mut self, now: Nanos, frames: u64) -> Verdict {
        if let Some(until) = self.until {
            if now < until {
                return Verdict::Hold(grid(now, STORM_INTERVAL));
            }
            self.until = None;
            (self.window_from, self.rings, self.frames) = (now, 0, 0);
        }
        if now.since(self.window_from) >= STORM_WINDOW {
            (self.window_from, self.rings, self.frames) = (now, 0, 0);
        }
        self.frames += frames;
        self.rings += 1;
        if self.rings > STORM_RINGS + self.frames {
            self.until = Some(now.after(STORM_HOLD));
            self.count += 1;
            return Verdict::Hold(grid(now, STORM_INTERVAL));
        }
        Verdict::Listen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_link_is_looked_at_ever_more_seldom_and_a_busy_one_at_once() {
        let mut poller = Poller::new(PollSettings::default());
        let mut now = Nanos(1_000_000_123);
        let mut looks = 0;
        poller.next(now, true);
        let quiet_from = now;
        while poller.interval < PollSettings::default().slow {
            let next = poller.next(now, false);
            assert!(next > now && next.since(now) <= poller.interval);
            (now, looks) = (next, looks + 1);
        }
        assert!(looks < 60, "{looks} looks until it is slow");
        assert!(now.since(quiet_from) < Nanos(20_000_000));
        assert!(poller.is_slow());
        // On the grid, where other links are looked at too.
        assert_eq!(poller.next(now, false).0 % PollSettings::default().slow.0, 0);
        let next = poller.next(now, true);
        assert!(next.since(now) <= PollSettings::default().fast && !poller.is_slow());
    }

    #[test]
    fn settings_without_sense_do_not_stop_the_clock() {
        let mut poller = Poller::new(PollSettings { fast: Nanos(0), linger: Nanos(0), slow: Nanos(0) });
        for at in 0..10 {
            assert!(poller.next(Nanos(at), at % 2 == 0) > Nanos(at));
        }
    }

    #[test]
    fn rings_without_end_are_a_storm_and_rings_for_frames_are_none() {
        let mut storm = Storm::default();
        let mut now = Nanos(0);
        for _ in 0..100_000 {
            now = now.after(Nanos(10_000));
            assert_eq!(storm.look(now, 1), Verdict::Listen);
        }
        let mut held_from = None;
        for _ in 0..=STORM_RINGS {
            now = now.after(Nanos(10_000));
            if let Verdict::Hold(next) = storm.look(now, 0) {
                assert!(next > now && next.since(now) <= STORM_INTERVAL);
                held_from = Some(now);
                break;
            }
        }
        assert!(held_from.is_some(), "a storm is seen within its window");
        while now.since(held_from.unwrap()) < STORM_HOLD {
            assert!(matches!(storm.look(now, 0), Verdict::Hold(_)));
            now = now.after(STORM_INTERVAL);
        }
        assert_eq!(storm.look(now, 0), Verdict::Listen, "then it is listened to again");
        assert_eq!(storm.count, 1);
    }
}
