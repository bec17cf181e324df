//! How often a link without doorbell is looked at. Pure.
//!
//! While frames come, and for [`LINGER`] empty looks after the last one, the pause is the shortest; then it doubles with each empty look up to
//! the longest. So a stream of frames waits for the shortest pause at most, and a quiet cell costs
//! its machine a few dozen wake-ups a second.

/// Empty looks at the shortest pause before it grows.
const LINGER: u32 = 16;

/// The shortest and the longest pause between two looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pauses {
    pub(crate) shortest_ns: u64,
    pub(crate) longest_ns: u64,
}

impl Pauses {
    /// For a link whose frames are announced by nobody.
    pub(crate) const POLLED: Pauses = Pauses { shortest_ns: 50_000, longest_ns: 20_000_000 };
    /// For a link with doorbell that is down: a peer that died rings no bell, and one that starts may have rung too early.
    pub(crate) const DOWN: Pauses = Pauses { shortest_ns: 1_000_000, longest_ns: 100_000_000 };
}

/// When to look next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pauses: Pauses,
    pause_ns: u64,
    empty: u32,
    next_ns: u64,
}

impl Pace {
    pub(crate) fn new(pauses: Pauses) -> Pace {
        Pace { pauses, pause_ns: pauses.shortest_ns, empty: 0, next_ns: 0 }
    }

    /// Something was found, or sent (an answer is to be expected): look often again.
    pub(crate) fn busy(&mut self) {
        self.empty = 0;
        self.pause_ns = self.pauses.shortest_ns;
        self.next_ns = 0;
    }

    /// Nothing was found at `now_ns`: when to look again. A look before its time (the cell woke for something else) does not count.
    pub(crate) fn next(&mut self, now_ns: u64) -> u64 {
        if now_ns >= self.next_ns {
            if self.next_ns != 0 {
                self.empty = self.empty.saturating_add(1);
            }
            if self.empty > LINGER {
                self.pause_ns = self.pause_ns.saturating_mul(2).min(self.pauses.longest_ns);
            }
            self.next_ns = now_ns + self.pause_ns;
        }
        self.next_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pauses of `looks` looks in a row that find nothing.
    fn pauses(pace: &mut Pace, start_ns: u64, looks: usize) -> std::vec::Vec<u64> {
        let mut now = start_ns;
        (0..looks)
            .map(|_| {
                let next = pace.next(now);
                let pause = next - now;
                now = next;
                pause
            })
            .collect()
    }

    #[test]
    fn the_pause_is_short_for_a_while_then_doubles_up_to_the_longest() {
        let mut pace = Pace::new(Pauses { shortest_ns: 50, longest_ns: 1000 });
        let found = pauses(&mut pace, 7, 24);
        assert_eq!(found[..17], [50; 17]);
        assert_eq!(found[17..], [100, 200, 400, 800, 1000, 1000, 1000]);
    }

    #[test]
    fn traffic_makes_it_short_again() {
        let mut pace = Pace::new(Pauses { shortest_ns: 50, longest_ns: 1000 });
        pauses(&mut pace, 7, 30);
        pace.busy();
        assert_eq!(pauses(&mut pace, 1_000_000, 17), [50; 17]);
    }

    #[test]
    fn a_look_before_its_time_changes_nothing() {
        let mut pace = Pace::new(Pauses { shortest_ns: 50, longest_ns: 1000 });
        let next = pace.next(1000);
        for now in 1001..1050 {
            assert_eq!(pace.next(now), next);
        }
        assert_eq!(pace.next(1050), 1100);
    }

    #[test]
    fn an_idle_link_is_looked_at_at_most_fifty_times_a_second() {
        let mut pace = Pace::new(Pauses::POLLED);
        let mut now = pauses(&mut pace, 0, 40).iter().sum::<u64>();
        let mut looks = 0;
        let end = now + 1_000_000_000;
        while now < end {
            now = pace.next(now);
            looks += 1;
        }
        assert!(looks <= 51, "{looks}");
    }
}
