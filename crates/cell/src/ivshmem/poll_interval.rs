//! How often a link without doorbell is looked at. Pure.
//!
//! The pause is a [`SHARE`]th of the time for which the link has been quiet, between a shortest and
//! a longest one. So a frame that follows on traffic waits for the shortest pause. For a peer that
//! answers after a while, the wait is a few percent longer than the answer took. A quiet cell costs
//! its machine a handful of wake-ups a second.

/// Pauses in the time since the last traffic.
const SHARE: u64 = 16;

/// The shortest and the longest pause between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pauses {
    pub(crate) shortest_ns: u64,
    pub(crate) longest_ns: u64,
}

impl Pauses {
    /// For a link whose peer announces no frames. A look costs an emulated machine 200 to 300
    /// microseconds of its host's time, so 64 quiet cells take less than a tenth of a core
    /// together.
    pub(crate) const POLLED: Pauses = Pauses { shortest_ns: 50_000, longest_ns: 200_000_000 };
    /// For a link with doorbell that is down: a peer that died rings no doorbell, and one that
    /// starts may have rung too early.
    pub(crate) const DOWN: Pauses = Pauses { shortest_ns: 1_000_000, longest_ns: 250_000_000 };
}

/// When to look next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PollInterval {
    pauses: Pauses,
    busy_ns: u64,
    next_ns: u64,
}

impl PollInterval {
    pub(crate) fn new(pauses: Pauses) -> PollInterval {
        PollInterval { pauses, busy_ns: 0, next_ns: 0 }
    }

    /// Something was found or sent at `now_ns`, so an answer or more of it is to be expected.
    pub(crate) fn busy(&mut self, now_ns: u64) {
        self.busy_ns = now_ns;
        self.next_ns = 0;
    }

    /// Nothing was found at `now_ns`: when to look again. A look before its time (the cell woke for
    /// something else) does not put that off.
    pub(crate) fn next(&mut self, now_ns: u64) -> u64 {
        if now_ns >= self.next_ns {
            let quiet_ns = now_ns.saturating_sub(self.busy_ns);
            self.next_ns = now_ns + (quiet_ns / SHARE).max(self.pauses.shortest_ns).min(self.pauses.longest_ns);
        }
        self.next_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// The times of the looks from `start_ns` to `end_ns` that find nothing.
    fn looks(poll_interval: &mut PollInterval, start_ns: u64, end_ns: u64) -> std::vec::Vec<u64> {
        let mut times = std::vec::Vec::new();
        let mut now = start_ns;
        while now < end_ns {
            now = poll_interval.next(now);
            times.push(now);
        }
        times
    }

    #[test]
    fn the_pause_is_the_shortest_after_traffic_and_grows_with_the_quiet_up_to_the_longest() {
        let mut poll_interval = PollInterval::new(Pauses { shortest_ns: 50_000, longest_ns: 20 * MS });
        poll_interval.busy(1000 * MS);
        let times = looks(&mut poll_interval, 1000 * MS, 3000 * MS);
        for pair in times.windows(2) {
            let (quiet, pause) = (pair[0] - 1000 * MS, pair[1] - pair[0]);
            assert_eq!(pause, (quiet / 16).clamp(50_000, 20 * MS));
        }
        assert_eq!(times[1] - times[0], 50_000);
        poll_interval.busy(3000 * MS);
        assert_eq!(poll_interval.next(3000 * MS), 3000 * MS + 50_000);
    }

    #[test]
    fn a_look_before_its_time_changes_nothing() {
        let mut poll_interval = PollInterval::new(Pauses { shortest_ns: 50, longest_ns: 1000 });
        let next = poll_interval.next(1_000_000);
        assert_eq!(next, 1_001_000);
        for now in 1_000_001..1_001_000 {
            assert_eq!(poll_interval.next(now), next);
        }
        assert_eq!(poll_interval.next(next), next + 1000);
    }

    #[test]
    fn a_quiet_link_is_looked_at_five_times_a_second() {
        let mut poll_interval = PollInterval::new(Pauses::POLLED);
        assert_eq!(looks(&mut poll_interval, 10_000 * MS, 11_000 * MS).len(), 5);
        // On the way there: no more than a few hundred.
        poll_interval.busy(20_000 * MS);
        let times = looks(&mut poll_interval, 20_000 * MS, 23_000 * MS);
        assert!(times.len() < 200, "{}", times.len());
    }

    #[test]
    fn the_longest_pause_may_be_shorter_than_the_shortest() {
        let mut poll_interval = PollInterval::new(Pauses { shortest_ns: 50, longest_ns: 10 });
        assert_eq!(poll_interval.next(1000), 1010);
    }
}
