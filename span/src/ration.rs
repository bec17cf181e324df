//! How many lines of one kind are written, where other machines decide how often there is something
//! to say.

use std::time::{Duration, Instant};

/// Lines in [`SPAN`].
const LINES: u32 = 20;
const SPAN: Duration = Duration::from_secs(60);

/// The lines of the current minute.
#[derive(Debug)]
pub struct Ration {
    since: Instant,
    written: u32,
    left_out: u64,
}

impl Ration {
    /// A full one.
    pub fn new(now: Instant) -> Ration {
        Ration { since: now, written: 0, left_out: 0 }
    }

    /// Whether a line may be written. If not, it is counted.
    pub fn takes(&mut self, now: Instant) -> bool {
        // What was left out of the minute before is told first.
        let is_over = now.duration_since(self.since) >= SPAN && self.left_out == 0;
        if is_over {
            *self = Ration::new(now);
        }
        let takes = self.written < LINES && self.left_out == 0;
        if takes {
            self.written += 1;
        } else {
            self.left_out += 1;
        }
        takes
    }

    /// How many lines were left out in the minute that is over, once.
    pub fn left_out(&mut self, now: Instant) -> Option<u64> {
        if now.duration_since(self.since) < SPAN || self.left_out == 0 {
            return None;
        }
        let left_out = self.left_out;
        *self = Ration::new(now);
        Some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_lines_are_written_in_a_minute_and_the_others_are_counted() {
        let begin = Instant::now();
        let mut ration = Ration::new(begin);
        let mut count = |lines: u32, now| (0..lines).filter(|_| ration.takes(now)).count() as u32;
        assert_eq!(count(3, begin), 3);
        assert_eq!(count(100, begin + SPAN / 2), LINES - 3);
        assert_eq!(ration.left_out(begin + SPAN / 2), None, "the minute is not over");
        let later = begin + SPAN;
        assert!(!ration.takes(later), "first that lines were left out is told");
        assert_eq!((ration.left_out(later), ration.left_out(later)), (Some(100 - (LINES as u64 - 3) + 1), None));
        assert_eq!((0..100).filter(|_| ration.takes(later)).count() as u32, LINES);
        let mut idle = Ration::new(begin);
        assert!(idle.takes(begin) && idle.left_out(begin + 2 * SPAN).is_none());
        assert_eq!((0..100).filter(|_| idle.takes(begin + 2 * SPAN)).count() as u32, LINES);
    }
}
