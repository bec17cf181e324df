//! Which machine has which MAC address, as learned from what comes through the tunnel.

use std::collections::HashMap;

use tombolo_switch::Nanos;
use tombolo_switch::frame::Mac;

/// Addresses that are kept. Frames for those beyond go to all remotes.
pub const MAX_ENTRIES: usize = 4096;
/// How long an address is kept that sends nothing, as by the kernel's vxlan device.
pub const AGE: Nanos = Nanos(300_000_000_000);
/// How often a full table is searched for old entries.
const SWEEP: Nanos = Nanos(1_000_000_000);

#[derive(Clone, Copy, Debug)]
struct Entry {
    remote: u16,
    seen: Nanos,
}

/// The table. A look-up is O(1); an entry that is due to go is not used.
#[derive(Debug, Default)]
pub(super) struct Table {
    entries: HashMap<Mac, Entry>,
    swept: Nanos,
    /// Addresses that were not learned since the table was full.
    pub(super) refused: u64,
}

fn is_group(mac: Mac) -> bool {
    mac[0] & 1 != 0
}

impl Table {
    /// `mac` sends from `remote`. A later place replaces an earlier one.
    pub(super) fn learn(&mut self, mac: Mac, remote: u16, now: Nanos) {
        if is_group(mac) || mac == [0; 6] {
            return;
        }
        if let Some(entry) = self.entries.get_mut(&mac) {
            *entry = Entry { remote, seen: now };
            return;
        }
        if self.entries.len() >= MAX_ENTRIES && now.since(self.swept) >= SWEEP {
            self.swept = now;
            self.entries.retain(|_, entry| now.since(entry.seen) < AGE);
        }
        if self.entries.len() >= MAX_ENTRIES {
            self.refused += 1;
        } else {
            self.entries.insert(mac, Entry { remote, seen: now });
        }
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
        let mut table = Table::default();
        table.learn(mac(1), 3, Nanos(0));
        assert_eq!(table.find(mac(1), Nanos(1)), Some(3));
        table.learn(mac(1), 4, Nanos(10));
        assert_eq!(table.find(mac(1), Nanos(AGE.0 + 9)), Some(4));
        assert_eq!(table.find(mac(1), Nanos(AGE.0 + 10)), None);
        for no in [[0; 6], [0xff; 6], [0x33, 0x33, 0, 0, 0, 1]] {
            table.learn(no, 1, Nanos(0));
            assert_eq!(table.find(no, Nanos(0)), None);
        }
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn a_flood_of_addresses_fills_the_table_and_displaces_none_until_it_ages() {
        let mut table = Table::default();
        for n in 0..3 * MAX_ENTRIES as u32 {
            table.learn(mac(n), 0, Nanos(u64::from(n)));
        }
        assert_eq!((table.len(), table.refused), (MAX_ENTRIES, 2 * MAX_ENTRIES as u64));
        assert_eq!(table.find(mac(0), Nanos(1)), Some(0), "those that were there stay");
        let later = Nanos(AGE.0 + MAX_ENTRIES as u64);
        table.learn(mac(1), 1, later);
        table.learn(mac(u32::MAX), 1, later);
        assert_eq!(table.find(mac(u32::MAX), later), Some(1));
        assert_eq!(table.len(), 2, "the silent ones made room");
    }
}
