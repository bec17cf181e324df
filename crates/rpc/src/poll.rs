//! Whether polling before sleep is worth it, and for how long, learned from what it gained.
//!
//! A sleep costs both sides several µs; polling costs CPU while it lasts and saves the sleep only
//! if something comes in that time. After each poll in vain the next `2^n - 1` sleeps are not
//! polled before, for n growing up to 8; a poll that gains sets n back. So a caller that calls
//! again and again finds a polling service, and an idle one costs next to nothing. There is no
//! polling at all where both ends share a CPU: the poller would keep the other from running.
//!
//! How long a wake-up takes is the machine's affair: 5 µs, or 50 where a halted processor has to be
//! fetched from a hypervisor. Where both ends sleep, each waits for the other's wake-up and its
//! own, and neither would find that a poll of `FIRST_NS` gains. So a sleep that a poll of up to
//! `LONGEST_NS` might have saved makes the next poll longer, until it gains or is as long as that;
//! a long sleep makes it short again.

use crate::clock::now_ns;

/// How long a poll lasts at first: about twice what waking a sleeper on another CPU takes.
pub(crate) const FIRST_NS: u64 = 20_000;
/// How long a poll lasts at most: about a wake-up on a machine where they are dear.
pub(crate) const LONGEST_NS: u64 = 100_000;
/// Looks between two readings of the clock; so many come before the first: what gains does so soon.
const LOOKS: u32 = 32;
const MAX_LEVEL: u32 = 8;

/// When a waiting thread polls instead of sleeping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Polling {
    /// As it gains.
    #[default]
    Adaptive,
    /// Never: each wait sleeps at once.
    Never,
    /// Always, until something comes or the time is over: the fastest, at the price of a CPU. Does
    /// not look at CPUs.
    Always,
}

/// The memory of what polling gained.
#[derive(Debug)]
pub(crate) struct Poller {
    level: u32,
    skip: u32,
    window_ns: u64,
}

impl Default for Poller {
    fn default() -> Self {
        Poller { level: 0, skip: 0, window_ns: FIRST_NS }
    }
}

impl Poller {
    /// Whether to poll before this sleep.
    pub(crate) fn worth_it(&mut self) -> bool {
        if self.skip > 0 {
            self.skip -= 1;
            return false;
        }
        true
    }

    /// How long.
    pub(crate) fn window_ns(&self) -> u64 {
        self.window_ns
    }

    pub(crate) fn learn(&mut self, gained: bool) {
        if gained {
            (self.level, self.skip) = (0, 0);
        } else {
            self.level = (self.level + 1).min(MAX_LEVEL);
            self.skip = (1 << self.level) - 1;
        }
    }

    /// A wait is over that ended asleep: how long it was, with the poll before it if there was one.
    /// About half of it was our own wake-up.
    pub(crate) fn slept(&mut self, waited_ns: u64, polled: bool) {
        if waited_ns > 2 * LONGEST_NS {
            self.window_ns = FIRST_NS;
        } else if polled && self.window_ns < LONGEST_NS {
            self.window_ns = (2 * self.window_ns).max(waited_ns / 2).min(LONGEST_NS);
            // The longer one gets its chance.
            (self.level, self.skip) = (0, 0);
        }
    }
}

/// Looks until it finds something, or is to end, for which it is asked now and then with the time
/// and with how long it has looked. Says what was found, and when it began by the clock, if it came
/// to look at that.
#[inline]
pub(crate) fn look<T>(
    mut find: impl FnMut() -> Option<T>,
    mut ends: impl FnMut(u64, u64) -> bool,
) -> (Option<T>, Option<u64>) {
    let mut began = None;
    loop {
        for _ in 0..LOOKS {
            if let Some(found) = find() {
                return (Some(found), began);
            }
            std::hint::spin_loop();
        }
        let now = now_ns();
        if ends(now, now.saturating_sub(*began.get_or_insert(now))) {
            return (None, began);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_gains_is_polled_always_and_what_does_not_seldom() {
        let mut poller = Poller::default();
        for _ in 0..100 {
            assert!(poller.worth_it());
            poller.learn(true);
        }
        let mut polls = 0;
        for _ in 0..10_000 {
            if poller.worth_it() {
                polls += 1;
                poller.learn(false);
            }
        }
        assert!((10..60).contains(&polls), "{polls} of 10,000 in vain");
        while !poller.worth_it() {}
        poller.learn(true);
        assert!(poller.worth_it());
    }

    #[test]
    fn a_poll_grows_to_what_a_wake_up_costs_and_no_further() {
        let mut poller = Poller::default();
        // Both ends sleep, and each wake-up takes 45 µs.
        let mut rounds = 0;
        while poller.window_ns() < 45_000 {
            assert!(poller.worth_it(), "a longer poll is tried at once");
            poller.learn(false);
            poller.slept(95_000, true);
            rounds += 1;
        }
        assert!(rounds <= 3, "{rounds}");
        assert!(poller.worth_it());
        // What comes every 150 µs is not worth a CPU.
        let mut polled = 0;
        for _ in 0..10_000 {
            let polls = poller.worth_it();
            if polls {
                polled += 1;
                assert!(poller.window_ns() <= LONGEST_NS);
                poller.learn(false);
            }
            poller.slept(150_000, polls);
        }
        assert!((10..60).contains(&polled), "{polled} of 10,000 in vain");
        // Nor is what comes seldom worth a long poll.
        poller.slept(10_000_000, false);
        assert_eq!(poller.window_ns(), FIRST_NS);
    }
}
