//! The back-off before something that failed is started again. It doubles with each failure in a
//! row, and is reset once the thing that was started has run for a while.

use std::time::{Duration, Instant};

/// What ran for so long has not failed in a row.
const CALM: Duration = Duration::from_secs(60);

/// Failures in a row, since the last calm time.
#[derive(Debug, Clone, Copy)]
pub(super) struct Backoff {
    first: Duration,
    longest: Duration,
    failures: u32,
}

impl Backoff {
    pub(super) const MACHINE: Backoff =
        Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(60), failures: 0 };
    /// For a passt: all members of its network wait for it.
    pub(super) const PASST: Backoff =
        Backoff { first: Duration::from_millis(200), longest: Duration::from_secs(10), failures: 0 };

    /// For the bridge of a link: who calls through it waits for it.
    pub(super) const BRIDGE: Backoff =
        Backoff { first: Duration::from_millis(200), longest: Duration::from_secs(2), failures: 0 };

    /// For the port of a container: what is in the way is in the container's namespace.
    pub(super) const CONTAINER: Backoff =
        Backoff { first: Duration::from_secs(1), longest: Duration::from_secs(30), failures: 0 };

    /// Notes a failure at `now` of what was started at `since`; how long to wait before it is
    /// started again.
    pub(super) fn failed(&mut self, since: Instant, now: Instant) -> Duration {
        let is_calm = now.saturating_duration_since(since) >= CALM;
        self.failures = if is_calm { 1 } else { self.failures.saturating_add(1) };
        (self.first * 2u32.saturating_pow(self.failures.saturating_sub(1).min(16))).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_a_limit_and_starts_again_after_a_calm_time() {
        let (mut backoff, mut now) = (Backoff::MACHINE, Instant::now());
        let mut fail = |ran: Duration| {
            let since = now;
            now += ran;
            backoff.failed(since, now).as_secs()
        };
        let quick = Duration::from_secs(2);
        assert_eq!([quick; 9].map(&mut fail), [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(fail(CALM - Duration::from_millis(1)), 60);
        assert_eq!(fail(CALM), 1);
        assert_eq!([quick; 2].map(&mut fail), [2, 4]);
        // Any number of failures.
        (0..100_000).for_each(|_| assert!(fail(quick) <= 60));
    }

    #[test]
    fn a_passt_is_waited_for_ten_seconds_at_most() {
        let (mut backoff, now) = (Backoff::PASST, Instant::now());
        let pauses = [(); 8].map(|()| backoff.failed(now, now).as_millis());
        assert_eq!(pauses, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(backoff.failed(now, now + CALM).as_millis(), 200);
    }

    #[test]
    fn a_parked_port_is_tried_every_thirty_seconds_at_least() {
        let (mut backoff, now) = (Backoff::CONTAINER, Instant::now());
        assert_eq!([(); 7].map(|()| backoff.failed(now, now).as_secs()), [1, 2, 4, 8, 16, 30, 30]);
    }

    #[test]
    fn a_bridge_is_waited_for_two_seconds_at_most() {
        let (mut backoff, now) = (Backoff::BRIDGE, Instant::now());
        assert_eq!([(); 6].map(|()| backoff.failed(now, now).as_millis()), [200, 400, 800, 1600, 2000, 2000]);
    }
}
