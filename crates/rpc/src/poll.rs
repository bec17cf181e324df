//! Whether polling before sleep is worth it, learned from what it gained.
//!
//! A sleep costs both sides several µs; polling costs CPU while it lasts and saves the sleep only if something comes in that
//! time. After each poll in vain the next `2^n - 1` sleeps are not polled before, for n growing up to 8; a poll that
//! gains sets n back. So a caller that calls again and again finds a polling service, and an idle one costs next to nothing.
//! There is no polling at all where both ends share a CPU: the poller would keep the other from running.

/// How long a poll lasts: about twice what waking a sleeper on another CPU takes.
pub(crate) const POLL_NS: u64 = 20_000;
const MAX_LEVEL: u32 = 8;

/// When to poll.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Polling {
    /// As it gains.
    #[default]
    Adaptive,
    /// Never: each wait sleeps at once.
    Never,
    /// Always, until something comes or the time is over: the fastest, at the price of a CPU. Does not look at CPUs.
    Always,
}

/// The memory of what polling gained.
#[derive(Debug, Default)]
pub(crate) struct Poller {
    level: u32,
    skip: u32,
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

    pub(crate) fn learn(&mut self, gained: bool) {
        if gained {
            (self.level, self.skip) = (0, 0);
        } else {
            self.level = (self.level + 1).min(MAX_LEVEL);
            self.skip = (1 << self.level) - 1;
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
}
