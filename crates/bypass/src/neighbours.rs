//! Where each neighbour is, and whose flows must be learned again because it moved.
//!
//! A neighbour that moves costs a look at every flow, so one that moves again and again waits: at
//! first not at all, then twice as long each time, up to a second. Meanwhile its own frames may
//! still go to its old place. The flows of other neighbours are not touched.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// An Ethernet address.
pub(crate) type Mac = [u8; 6];

/// How long the second move of a neighbour in a row waits.
const FIRST_WAIT: Duration = Duration::from_millis(20);
/// The longest that a move waits.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// After so long without a move a neighbour counts as one that rests.
const FORGIVEN: Duration = Duration::from_secs(10);

/// One that has moved lately.
#[derive(Debug)]
struct Mover {
    /// Where it was, as flows may have it: not handled yet.
    was: HashSet<Mac>,
    /// When that may be handled.
    due_ns: u64,
    /// How long the next move waits after that.
    wait: Duration,
    last_ns: u64,
}

/// By the number of the interface, and the address of 4 or 16 bytes.
#[derive(Debug, Default)]
pub(crate) struct Neighbours {
    known: HashMap<(u32, Vec<u8>), Mac>,
    movers: HashMap<(u32, Vec<u8>), Mover>,
}

impl Neighbours {
    /// Takes a change in, at this time of the monotonic clock: the neighbour is at `mac` now, or nowhere.
    pub(crate) fn note(&mut self, index: u32, address: Vec<u8>, mac: Option<Mac>, now_ns: u64) {
        let key = (index, address);
        let old = match mac {
            Some(mac) => self.known.insert(key.clone(), mac).filter(|old| *old != mac),
            None => self.known.remove(&key),
        };
        let Some(old) = old else { return };
        let fresh = || Mover { was: HashSet::new(), due_ns: now_ns, wait: FIRST_WAIT, last_ns: now_ns };
        let mover = self.movers.entry(key).or_insert_with(fresh);
        mover.was.insert(old);
        mover.last_ns = now_ns;
    }

    /// Interfaces and addresses where neighbours were whose turn it is: flows to there are to go.
    pub(crate) fn due(&mut self, now_ns: u64) -> HashSet<(u32, Mac)> {
        let mut due = HashSet::new();
        for ((index, _), mover) in &mut self.movers {
            if mover.was.is_empty() || mover.due_ns > now_ns {
                continue;
            }
            due.extend(mover.was.drain().map(|mac| (*index, mac)));
            mover.due_ns = now_ns + mover.wait.as_nanos() as u64;
            mover.wait = (mover.wait * 2).min(LONGEST_WAIT);
        }
        let forgiven_ns = FORGIVEN.as_nanos() as u64;
        self.movers.retain(|_, mover| !mover.was.is_empty() || now_ns.saturating_sub(mover.last_ns) < forgiven_ns);
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Mac = [2, 0, 0, 0, 0, 1];
    const B: Mac = [2, 0, 0, 0, 0, 2];
    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn flows_to_a_neighbour_that_moved_or_went_are_due_and_to_one_that_stays_are_not() {
        let mut known = Neighbours::default();
        let at = vec![10, 0, 0, 1];
        let mut note = |index, mac, n: u64| {
            known.note(index, at.clone(), mac, n * 20 * SECOND_NS);
            known.due(n * 20 * SECOND_NS).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(note(3, Some(A), 0), []);
        assert_eq!(note(3, Some(A), 1), []);
        assert_eq!(note(4, Some(B), 2), [], "the same address on another interface is another neighbour");
        assert_eq!(note(3, Some(B), 3), [(3, A)]);
        assert_eq!(note(3, None, 4), [(3, B)]);
        assert_eq!(note(3, None, 5), []);
    }

    #[test]
    fn a_neighbour_that_flaps_is_followed_once_a_second_and_another_one_at_once() {
        let mut known = Neighbours::default();
        let (flapping, calm) = (vec![10, 0, 0, 1], vec![10, 0, 0, 2]);
        known.note(3, flapping.clone(), Some(A), 0);
        known.note(3, calm.clone(), Some([2, 0, 0, 0, 0, 3]), 0);
        let (mut handled, mut both) = (0, false);
        for n in 1..=10_000u64 {
            let now_ns = n * 1_000_000;
            known.note(3, flapping.clone(), Some(if n % 2 == 0 { A } else { B }), now_ns);
            let due = known.due(now_ns);
            handled += usize::from(!due.is_empty());
            both |= due.len() == 2;
        }
        assert!((10..=20).contains(&handled) && both, "{handled}");
        known.note(3, calm, Some(B), 10_001 * 1_000_000);
        assert_eq!(known.due(10_001 * 1_000_000), HashSet::from([(3, [2, 0, 0, 0, 0, 3])]));
        // It is not forgotten that it moved, and after a rest it is followed at once.
        assert!(!known.due(12 * SECOND_NS).is_empty());
        known.due(30 * SECOND_NS);
        known.note(3, flapping, None, 30 * SECOND_NS);
        assert!(!known.due(30 * SECOND_NS).is_empty());
    }
}
