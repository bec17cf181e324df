//! What `flows` shows: which flows have traffic now, which way their frames go, and why some are
//! not taken.
//!
//! While it measures, the programs count each frame by flow in a separate table. They do so up to a
//! moment that is put off again and again, so a command that is killed costs nothing after two
//! seconds. Two that measure at the same time both read the table before and after; neither clears
//! it.

use crate::attachment::{AttachError, monotonic_ns};
use crate::layout::{NO_FLOW, TAKEN, Tuple, UNLEARNED, Usage, VERDICTS};
use crate::maps::{Maps, Usages};
use crate::place::Place;
use std::time::{Duration, Instant};

/// How often it looks whether it is to end.
const PAUSE: Duration = Duration::from_millis(50);

/// One flow, in one direction, while it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowUsage {
    /// Which flow, as its frames come in.
    pub tuple: Tuple,
    /// Number of the interface where they go out; 0: not known.
    pub output: u32,
    /// Frames that were taken.
    pub taken: u64,
    /// Their bytes, from the Ethernet header on.
    pub taken_bytes: u64,
    /// Frames that took the kernel's path.
    pub passed: u64,
    /// Bytes of the frames in `passed`.
    pub passed_bytes: u64,
    /// How the last frame that was taken went: a key of `VERDICTS`, or nothing if none was.
    pub path: Option<&'static str>,
    /// Why the last frame that was not taken went the kernel's path: a key of `VERDICTS` or
    /// `UNLEARNED`, and what it means.
    pub why: Option<(&'static str, &'static str)>,
}

impl FlowUsage {
    /// All bytes, on either path.
    pub fn bytes(&self) -> u64 {
        self.taken_bytes + self.passed_bytes
    }

    /// Nothing where no frame came since `before`.
    fn since(tuple: Tuple, before: Usage, now: Usage) -> Option<FlowUsage> {
        // The kernel may have evicted the entry and begun another.
        let grown = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        let (taken, passed) = (grown(now.taken, before.taken), grown(now.passed, before.passed));
        // That the kernel has not forwarded one like it is true of each flow that it forwards and
        // that is not learned: then that is the reason.
        let why = match (now.passed_for, now.refused) {
            (Some(NO_FLOW) | None, Some(code)) => UNLEARNED.get(code),
            (Some(code), _) => VERDICTS.get(code),
            (None, None) => None,
        };
        (taken + passed > 0).then(|| FlowUsage {
            tuple,
            output: now.output,
            taken,
            taken_bytes: grown(now.taken_bytes, before.taken_bytes),
            passed,
            passed_bytes: grown(now.passed_bytes, before.passed_bytes),
            path: now.taken_by.filter(|_| taken > 0).filter(|code| *code < TAKEN).map(|code| VERDICTS[code].0),
            why: why.filter(|_| passed > 0).copied(),
        })
    }
}

/// The result of watching flows for a while.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// The flows with frames in that time; those with most bytes first.
    pub flows: Vec<FlowUsage>,
    /// Whether everything was detached meanwhile, which ended it.
    pub detached: bool,
}

/// Counts the frames of each flow for a time, until `is_stopped` says so, or until everything is
/// detached.
///
/// # Errors
/// If nothing is attached, or a map cannot be read.
pub fn measure(place: &Place, time: Duration, is_stopped: impl Fn() -> bool) -> Result<Measured, AttachError> {
    let generation = place.generation();
    let (mut maps, usages) = (Maps::open(place)?, Usages::open(place)?);
    let before = usages.read();
    let end = Instant::now() + time;
    let detached = loop {
        // Programs look at whole seconds.
        maps.account_until(monotonic_ns() / 1_000_000_000 + 1)?;
        let left = end.saturating_duration_since(Instant::now());
        if place.generation() != generation {
            break true;
        }
        if left.is_zero() || is_stopped() {
            break false;
        }
        std::thread::sleep(left.min(PAUSE));
    };
    let mut flows: Vec<FlowUsage> = usages
        .read()
        .into_iter()
        .filter_map(|(key, now)| {
            let before = before.get(&key).copied().unwrap_or_default();
            FlowUsage::since(Tuple::of_usage(&key), before, now)
        })
        .collect();
    // The same order each time, independent of the table's order.
    flows
        .sort_by_key(|f| (std::cmp::Reverse(f.bytes()), f.tuple.source, f.tuple.source_port, f.tuple.destination_port));
    Ok(Measured { flows, detached })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::KEY6_BYTES;

    fn tuple() -> Tuple {
        Tuple::of_usage(&[0; KEY6_BYTES])
    }

    #[test]
    fn what_was_counted_before_does_not_count() {
        let before = Usage { taken: 5, taken_bytes: 500, passed: 1, taken_by: Some(0), ..Usage::default() };
        let now = Usage { taken: 7, taken_bytes: 700, ..before };
        let flow = FlowUsage::since(tuple(), before, now).unwrap();
        assert_eq!((flow.taken, flow.taken_bytes, flow.passed), (2, 200, 0));
        assert_eq!((flow.path, flow.why), (Some("taken_tcx"), None));
        assert_eq!(FlowUsage::since(tuple(), now, now), None);
    }

    #[test]
    fn an_entry_that_was_evicted_meanwhile_counts_from_zero() {
        let before = Usage { taken: 5, ..Usage::default() };
        let now = Usage { taken: 2, ..Usage::default() };
        assert_eq!(FlowUsage::since(tuple(), before, now).unwrap().taken, 2);
    }

    #[test]
    fn why_a_flow_is_not_learned_says_more_than_that_it_is_not_known() {
        let now = Usage { passed: 2, passed_for: Some(NO_FLOW), refused: Some(0), ..Usage::default() };
        let why = |now| FlowUsage::since(tuple(), Usage::default(), now).unwrap().why.unwrap().0;
        assert_eq!(why(now), "altered");
        assert_eq!(why(Usage { refused: None, ..now }), "up_no_flow");
        assert_eq!(why(Usage { passed_for: Some(12), ..now }), "up_handshake");
    }
}
