//! Which machine has which MAC address, as learned from what comes through the tunnel.
//!
//! The table is shared fairly. While there is room, a remote may have any number of addresses. In a
//! full table a remote that has less than its share (all places, divided by the remotes) takes a
//! place from the one that has most; one that has its share or more gets none. So a machine that
//! sends from ever new addresses takes none from another machine.
//!
//! Frames from an address without a place are dropped, since the switch, which sees one port, would
//! forget an address of another machine for it. Where there is no other one with addresses, they
//! pass, and nothing is learned from them.

use std::collections::HashMap;

use tombolo_switch::Nanos;
use tombolo_switch::frame::Mac;

/// Addresses that are kept, with those that the control plane places. As many as the switch learns
/// behind one port (`MacSettings::per_port`), so that one machine cannot push the addresses of
/// others out of the switch's table either.
pub const MAX_ENTRIES: usize = 12_288;
/// Addresses that are kept however many are placed.
const LEAST_ENTRIES: usize = 4096;
/// How long an address is kept that sends nothing, as by the kernel's vxlan device.
pub const AGE: Nanos = Nanos(300_000_000_000);
/// How often a full table is searched for old entries.
const SWEEP: Nanos = Nanos(1_000_000_000);

#[derive(Clone, Copy, Debug)]
struct Entry {
    remote: u16,
    /// Its place among the addresses of the remote.
    at: u32,
    seen: Nanos,
}

/// The table. A look-up is O(1); an entry that is due to go is not used.
#[derive(Debug)]
pub(super) struct Table {
    entries: HashMap<Mac, Entry>,
    /// Of each remote, the addresses that it has.
    of: Vec<Vec<Mac>>,
    /// How many it may have now.
    most: usize,
    /// The control plane has placed addresses.
    has_placed: bool,
    swept: Nanos,
    /// Frames from addresses that were not learned since the table was full.
    pub(super) refused: u64,
}

fn is_group(mac: Mac) -> bool {
    mac[0] & 1 != 0
}

impl Table {
    /// Of a tunnel with so many remotes.
    pub(super) fn new(remotes: usize) -> Table {
        Table {
            entries: HashMap::new(),
            of: vec![Vec::new(); remotes],
            most: MAX_ENTRIES,
            has_placed: false,
            swept: Nanos(0),
            refused: 0,
        }
    }

    /// Takes less room where the control plane has placed `placed` addresses.
    pub(super) fn leave_room_for(&mut self, placed: usize) {
        self.most = MAX_ENTRIES.saturating_sub(placed).max(LEAST_ENTRIES);
        self.has_placed = placed > 0;
    }

    /// How many addresses may be kept now.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// `mac` sends from `remote`. A later place replaces an earlier one. `false`: the remote has
    /// its share of a full table, and others have addresses too, so that the frame is to be
    /// dropped. O(1), and O(remotes) where a place is taken from another remote.
    pub(super) fn learn(&mut self, mac: Mac, remote: u16, now: Nanos) -> bool {
        if is_group(mac) || mac == [0; 6] {
            return true;
        }
        if let Some(entry) = self.entries.get_mut(&mac) {
            entry.seen = now;
            if entry.remote == remote {
                return true;
            }
            // It moved. The number of entries stays.
            self.remove(mac);
        } else if self.entries.len() >= self.most && !self.make_room(remote, now) {
            self.refused += 1;
            let is_alone = !self.has_placed && self.of[usize::from(remote)].len() == self.entries.len();
            return is_alone || self.of.len() == 1;
        }
        let list = &mut self.of[usize::from(remote)];
        self.entries.insert(mac, Entry { remote, at: list.len() as u32, seen: now });
        list.push(mac);
        true
    }

    fn remove(&mut self, mac: Mac) {
        let Some(Entry { remote, at, .. }) = self.entries.remove(&mac) else { return };
        let list = &mut self.of[usize::from(remote)];
        list.swap_remove(at as usize);
        if let Some(moved) = list.get(at as usize).and_then(|mac| self.entries.get_mut(mac)) {
            moved.at = at;
        }
    }

    /// Whether a full table has a place for one more address of `remote` now.
    fn make_room(&mut self, remote: u16, now: Nanos) -> bool {
        if now.since(self.swept) >= SWEEP {
            self.swept = now;
            let old: Vec<Mac> =
                self.entries.iter().filter(|(_, e)| now.since(e.seen) >= AGE).map(|(mac, _)| *mac).collect();
            old.into_iter().for_each(|mac| self.remove(mac));
            if self.entries.len() < self.most {
                return true;
            }
        }
        let share = self.most / self.of.len().max(1);
        if self.of[usize::from(remote)].len() >= share {
            return false;
        }
        // One has more than its share, since the table is full and this one has less.
        let last = self.of.iter().max_by_key(|list| list.len()).and_then(|most| most.last().copied());
        last.is_some_and(|mac| {
            self.remove(mac);
            true
        })
    }

    /// The remote that has `mac`; `None` where it is not known, and for groups.
    pub(super) fn find(&self, mac: Mac, now: Nanos) -> Option<u16> {
        let entry = self.entries.get(&mac)?;
        (now.since(entry.seen) < AGE).then_some(entry.remote)
    }

    /// How many addresses are kept.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mac(n: u32) -> Mac {
        let [a, b, c, d] = n.to_be_bytes();
        [2, 0, a, b, c, d]
    }

    #[test]
    fn an_address_is_where_it_last_sent_from_and_is_forgotten_when_it_is_silent() {
        let mut table = Table::new(5);
        assert!(table.learn(mac(1), 3, Nanos(0)));
        assert_eq!(table.find(mac(1), Nanos(1)), Some(3));
        assert!(table.learn(mac(1), 4, Nanos(10)));
        assert_eq!(table.find(mac(1), Nanos(AGE.0 + 9)), Some(4));
        assert_eq!(table.find(mac(1), Nanos(AGE.0 + 10)), None);
        for no in [[0; 6], [0xff; 6], [0x33, 0x33, 0, 0, 0, 1]] {
            assert!(table.learn(no, 1, Nanos(0)));
            assert_eq!(table.find(no, Nanos(0)), None);
        }
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn a_flood_of_addresses_fills_the_table_and_displaces_none_until_it_ages() {
        let mut table = Table::new(2);
        for n in 0..3 * MAX_ENTRIES as u32 {
            assert!(table.learn(mac(n), 0, Nanos(u64::from(n))), "no other one has addresses");
        }
        assert_eq!((table.len(), table.refused), (MAX_ENTRIES, 2 * MAX_ENTRIES as u64));
        assert_eq!(table.find(mac(0), Nanos(1)), Some(0), "those that were there stay");
        assert!(table.learn(mac(u32::MAX - 2), 1, Nanos(1)), "another one has a share");
        assert!(!table.learn(mac(u32::MAX - 1), 0, Nanos(1)), "which is protected from now on");
        let later = Nanos(AGE.0 + MAX_ENTRIES as u64);
        assert!(table.learn(mac(1), 1, later) && table.learn(mac(u32::MAX), 1, later));
        assert_eq!(table.find(mac(u32::MAX), later), Some(1));
        assert_eq!(table.len(), 2, "the silent ones made room");
    }

    #[test]
    fn of_one_remote_alone_every_address_passes_and_addresses_that_are_placed_are_protected() {
        for (remotes, placed, passes) in [(1, 0, true), (1, 5, true), (2, 0, true), (2, 5, false)] {
            let mut table = Table::new(remotes);
            table.leave_room_for(placed);
            assert!((0..table.most() as u32).all(|n| table.learn(mac(n), 0, Nanos(1))));
            assert_eq!(table.learn(mac(u32::MAX), 0, Nanos(1)), passes, "{remotes} {placed}");
            assert_eq!((table.find(mac(u32::MAX), Nanos(1)), table.refused), (None, 1));
        }
    }

    #[test]
    fn a_remote_that_floods_takes_no_place_from_the_share_of_another() {
        let mut table = Table::new(4);
        let share = (MAX_ENTRIES / 4) as u32;
        for n in 0..2 * MAX_ENTRIES as u32 {
            table.learn(mac(n), 0, Nanos(1));
        }
        // Two others come later, and find theirs.
        for remote in [1, 2] {
            let own = |n| mac((u32::from(remote) << 24) + n);
            assert!((0..share).all(|n| table.learn(own(n), remote, Nanos(2))), "{remote}");
            assert!(!table.learn(own(share), remote, Nanos(2)), "no more than that in a full table");
            for n in 2 * MAX_ENTRIES as u32..3 * MAX_ENTRIES as u32 {
                table.learn(mac(n), 0, Nanos(3));
            }
            assert!((0..share).all(|n| table.find(own(n), Nanos(3)) == Some(remote)), "{remote}");
        }
        assert_eq!(table.len(), MAX_ENTRIES);
    }

    #[test]
    fn the_lists_of_addresses_agree_with_the_table_whatever_happens() {
        let seed = std::env::var("TOMBOLO_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(20_261_127_u64);
        println!("TOMBOLO_SEED={seed}");
        let mut state = seed | 1;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let mut table = Table::new(3);
        for step in 0..200_000_u64 {
            let n = (random() % (2 * MAX_ENTRIES as u64)) as u32;
            table.learn(mac(n), (random() % 3) as u16, Nanos(step * 10_000_000));
            if step % 20_000 == 0 {
                assert_eq!(table.of.iter().map(Vec::len).sum::<usize>(), table.entries.len());
                for (remote, list) in table.of.iter().enumerate() {
                    for (at, mac) in list.iter().enumerate() {
                        let entry = table.entries[mac];
                        assert_eq!((usize::from(entry.remote), entry.at as usize), (remote, at));
                    }
                }
            }
        }
    }
}
