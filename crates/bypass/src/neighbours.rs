//! Where each neighbour is, and whose flows must be learned again because it moved.
//!
//! A neighbour that moves costs a look at every flow, so one that moves again and again waits: at
//! first not at all, then twice as long each time, up to a second. Meanwhile its own frames may
//! still go to its old place.
//!
//! All flows to the old Ethernet address go, also those of another neighbour that has it. A hostile
//! one can claim that address for any number of its own, and move away. So an Ethernet address
//! waits in the same way: its flows are learned again once a second at most.

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

/// When the next move may be handled.
#[derive(Debug)]
struct Rest {
    due_ns: u64,
    /// How long the one after that waits.
    wait: Duration,
    last_ns: u64,
}

impl Rest {
    fn new(now_ns: u64) -> Rest {
        Rest { due_ns: now_ns, wait: FIRST_WAIT, last_ns: now_ns }
    }

    fn handled(&mut self, now_ns: u64) {
        self.due_ns = now_ns + self.wait.as_nanos() as u64;
        self.wait = (self.wait * 2).min(LONGEST_WAIT);
    }

    fn is_forgiven(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.last_ns) >= FORGIVEN.as_nanos() as u64
    }
}

/// One that has moved lately.
#[derive(Debug)]
struct Mover {
    /// Where it was, as flows may have it: not handled yet.
    was: HashSet<Mac>,
    rest: Rest,
}

/// By the number of the interface, and the address of 4 or 16 bytes.
#[derive(Debug, Default)]
pub(crate) struct Neighbours {
    known: HashMap<(u32, Vec<u8>), Mac>,
    movers: HashMap<(u32, Vec<u8>), Mover>,
    /// By the number of the interface: Ethernet addresses from which neighbours moved lately.
    places: HashMap<(u32, Mac), Rest>,
}

impl Neighbours {
    /// Takes a change in, at this time of the monotonic clock: the neighbour is at `mac` now, or
    /// nowhere.
    pub(crate) fn note(&mut self, index: u32, address: Vec<u8>, mac: Option<Mac>, now_ns: u64) {
        let key = (index, address);
        let old = match mac {
            Some(mac) => self.known.insert(key.clone(), mac).filter(|old| *old != mac),
            None => self.known.remove(&key),
        };
        let Some(old) = old else { return };
        let fresh = || Mover { was: HashSet::new(), rest: Rest::new(now_ns) };
        let mover = self.movers.entry(key).or_insert_with(fresh);
        mover.was.insert(old);
        mover.rest.last_ns = now_ns;
        self.places.entry((index, old)).or_insert_with(|| Rest::new(now_ns)).last_ns = now_ns;
    }

    /// Interfaces and addresses where neighbours were whose turn it is: flows to there are to go.
    pub(crate) fn due(&mut self, now_ns: u64) -> HashSet<(u32, Mac)> {
        let mut due = HashSet::new();
        let Neighbours { movers, places, .. } = self;
        for ((index, _), mover) in movers.iter_mut().filter(|(_, mover)| mover.rest.due_ns <= now_ns) {
            let before = mover.was.len();
            mover.was.retain(|mac| {
                // One that is due for another neighbour is due for this one too.
                let is_due =
                    due.contains(&(*index, *mac)) || places.get(&(*index, *mac)).is_none_or(|p| p.due_ns <= now_ns);
                if is_due {
                    due.insert((*index, *mac));
                }
                !is_due
            });
            if mover.was.len() < before {
                mover.rest.handled(now_ns);
            }
        }
        for place in &due {
            places.entry(*place).or_insert_with(|| Rest::new(now_ns)).handled(now_ns);
        }
        movers.retain(|_, mover| !mover.was.is_empty() || !mover.rest.is_forgiven(now_ns));
        places.retain(|_, place| place.due_ns > now_ns || !place.is_forgiven(now_ns));
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

    #[test]
    fn a_neighbour_that_claims_anothers_place_for_all_its_addresses_has_it_learned_again_once_a_second() {
        let mut known = Neighbours::default();
        let victim: Mac = [2, 0, 0, 0, 0, 9];
        known.note(3, vec![10, 0, 0, 9], Some(victim), 0);
        let mut handled = 0;
        for n in 1..=10_000u64 {
            let now_ns = n * 1_000_000;
            // 200 addresses, each at the victim's place and then at its own.
            let own = vec![10, 0, 1, (n / 2 % 200) as u8];
            known.note(3, own, Some(if n % 2 == 0 { victim } else { B }), now_ns);
            handled += usize::from(known.due(now_ns).contains(&(3, victim)));
        }
        assert!((9..=20).contains(&handled), "{handled}");
        // And when the victim moves itself, that is noticed within a second.
        known.note(3, vec![10, 0, 0, 9], Some(A), 10_001 * 1_000_000);
        assert!(known.due(10_001 * 1_000_000 + SECOND_NS).contains(&(3, victim)));
    }
}
