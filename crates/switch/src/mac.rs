//! Where each MAC address was last seen: the memory of a learning switch.
//!
//! # Shape
//! Open addressing with linear probing over one array of words. Address and port are in one word,
//! so the look-up of a destination touches one cache line in nearly every case. A second array says
//! when an address was seen. A third holds each port's addresses in order of age. An address that
//! is seen again within the same [`Tick`] touches neither of these two. Deletion shifts back, so
//! there are no tombstones. All memory is allocated when the table is made.
//!
//! # VLANs
//! In a network with VLANs an address is learned once in each. A further array, which is empty
//! otherwise, has the VLAN of each slot. Pinned addresses are in VLAN 0, which stands for all: no
//! port can have the address of another port's pin in any.
//!
//! # Invariants
//! * A slot is 0 or `port << 48 | address`; an address is never 0 and never a group address.
//! * From an address's home slot to its slot no slot is empty, and the distance is below
//!   `MAX_PROBE`.
//! * An address that is not pinned is on the list of its port exactly once, lists are sorted by
//!   `seen`.
//!
//! # What a hostile port can do
//! A port has a limit; at the limit it pushes out its own oldest address. When the whole table is
//! full, a port that holds its fair share (capacity divided by ports) or more pushes out its own
//! oldest address. A port below its share takes the place of the oldest address of the port that
//! holds most. So a flood of addresses costs its own port. It costs no other port more than the
//! share that the table owes to each. The hash is keyed, so no outsider can choose addresses that
//! share a slot. A probe has a bound all the same.

use crate::Nanos;
use crate::frame::Mac;

/// A MAC address as a number: its six bytes in wire order are the low six bytes, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(u64);

impl Address {
    /// Bits that an address has.
    pub(crate) const MASK: u64 = (1 << 48) - 1;
    /// No address: what a runt has.
    pub const ZERO: Address = Address(0);
    /// ff:ff:ff:ff:ff:ff.
    pub const BROADCAST: Address = Address(Self::MASK);

    /// The low 48 bits of a word.
    #[inline]
    pub(crate) const fn from_low_bits(word: u64) -> Address {
        Address(word & Self::MASK)
    }

    /// Whether it names a group of stations: multicast or broadcast.
    #[inline]
    pub const fn is_group(self) -> bool {
        self.0 & 1 != 0
    }

    /// Whether a station may send from it: neither a group nor zero.
    #[inline]
    pub const fn is_station(self) -> bool {
        self.0 != 0 && !self.is_group()
    }

    /// The bytes in wire order.
    pub const fn bytes(self) -> Mac {
        let [a, b, c, d, e, f, ..] = self.0.to_le_bytes();
        [a, b, c, d, e, f]
    }
}

impl From<Mac> for Address {
    #[inline]
    fn from([a, b, c, d, e, f]: Mac) -> Self {
        Address(u64::from_le_bytes([a, b, c, d, e, f, 0, 0]))
    }
}

/// The table's unit of time: 2^28 ns, about 0.27 s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tick(u32);

impl Tick {
    const SHIFT: u32 = 28;
    /// Marks in `seen` an address that does not age.
    const PINNED: Tick = Tick(u32::MAX);

    /// Its number since the clock's start.
    #[inline]
    pub(crate) const fn number(self) -> u32 {
        self.0
    }

    /// The tick of an instant. 2^32 ticks are 36 years.
    #[inline]
    pub const fn of(now: Nanos) -> Tick {
        Tick((now.0 >> Self::SHIFT) as u32)
    }

    /// Whether more than `span` has passed at `now` since this tick, to within one tick.
    #[inline]
    pub(crate) const fn is_older_than(self, now: Tick, span: Nanos) -> bool {
        now.0.saturating_sub(self.0) as u64 > span.0 >> Self::SHIFT
    }
}

/// The number of a port within the table's network.
pub type PortNumber = u16;

/// Limits of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacSettings {
    /// Most addresses that the table holds.
    pub capacity: u32,
    /// Addresses behind one port, where the port has no limit of its own.
    pub per_port: u32,
    /// An address that was not seen for this long is forgotten, at most two ticks later.
    pub age: Nanos,
}

impl Default for MacSettings {
    fn default() -> Self {
        MacSettings { capacity: 16_384, per_port: 12_288, age: Nanos::SECOND.times(300) }
    }
}

/// What a table went through. Only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MacStats {
    /// Addresses learned that were not in the table; see also `moved`.
    pub learned: u64,
    /// Addresses that turned up behind another port.
    pub moved: u64,
    /// Addresses forgotten by age.
    pub expired: u64,
    /// Addresses pushed out by another of the same port.
    pub evicted_own: u64,
    /// Addresses pushed out by a port below its fair share.
    pub evicted_other: u64,
    /// Addresses not learned: limit of 0, or no room near the home slot.
    pub refused: u64,
}

/// What [`MacTable::learn`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learned {
    /// The address is where it was.
    Known,
    /// The table changed: a new address, or one that moved.
    Changed,
    /// The address is pinned to another port: a sender that uses it is an impostor.
    Pinned,
    /// There was no room; frames to it are flooded.
    Refused,
}

/// One address, for a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MacEntry {
    /// MAC address, as learned or pinned.
    pub address: Address,
    /// The port behind which it was seen.
    pub port: PortNumber,
    /// The VLAN in which it was seen; `None` where the network has no VLANs, or it is pinned in
    /// all.
    pub vlan: Option<u16>,
    /// Time since it was seen, to the tick; `None` where it is pinned.
    pub age: Option<Nanos>,
}

/// No slot: end of a list.
const NIL: u32 = u32::MAX;
/// Longest distance from an address's home slot; at half load a random table stays far below it.
const MAX_PROBE: usize = 128;
/// Addresses that one [`MacTable::expire`] forgets at most, so that no turn takes long.
const EXPIRE_AT_ONCE: usize = 256;

#[derive(Clone, Copy, Debug)]
struct Links {
    newer: u32,
    older: u32,
}

#[derive(Clone, Copy, Debug)]
struct PortList {
    newest: u32,
    oldest: u32,
    len: u32,
    limit: u32,
    present: bool,
}

impl PortList {
    const ABSENT: PortList = PortList { newest: NIL, oldest: NIL, len: 0, limit: 0, present: false };
}

/// The table of one network.
#[derive(Debug)]
pub struct MacTable {
    slots: Box<[u64]>,
    seen: Box<[u32]>,
    /// The VLAN of each slot; empty where the network has none.
    vlans: Box<[u16]>,
    links: Box<[Links]>,
    ports: Vec<PortList>,
    present_ports: u32,
    learned: u32,
    pinned: u32,
    settings: MacSettings,
    age_ticks: u32,
    expired_to: Tick,
    key: (u64, u64),
    stats: MacStats,
}

impl MacTable {
    /// An empty table; `seed` is best random, it keys the hash.
    pub fn new(settings: MacSettings, seed: u64) -> MacTable {
        // Half load at most, pinned addresses come on top of the capacity, within the other half.
        let slots = (settings.capacity.max(16) as usize * 2).next_power_of_two();
        let age_ticks = (settings.age.0 >> Tick::SHIFT).min(u32::MAX as u64 / 2) as u32 + 1;
        MacTable {
            slots: vec![0; slots].into_boxed_slice(),
            seen: vec![0; slots].into_boxed_slice(),
            vlans: Box::default(),
            links: vec![Links { newer: NIL, older: NIL }; slots].into_boxed_slice(),
            ports: Vec::new(),
            present_ports: 0,
            learned: 0,
            pinned: 0,
            settings,
            age_ticks,
            expired_to: Tick(0),
            key: (mix(seed), mix(seed ^ 0x9e37_79b9_7f4a_7c15) | 1),
            stats: MacStats::default(),
        }
    }

    /// Makes `port` known, with a limit of its own or the table's.
    pub fn add_port(&mut self, port: PortNumber, limit: Option<u32>) {
        let at = port as usize;
        if self.ports.len() <= at {
            self.ports.resize(at + 1, PortList::ABSENT);
        }
        let list = &mut self.ports[at];
        list.limit = limit.unwrap_or(self.settings.per_port);
        self.present_ports += u32::from(!list.present);
        list.present = true;
    }

    /// Forgets `port` and every address behind it, pinned ones included.
    pub fn remove_port(&mut self, port: PortNumber) {
        if !self.ports.get(port as usize).is_some_and(|l| l.present) {
            return;
        }
        self.present_ports -= 1;
        self.forget_learned(port);
        self.unpin_port(port);
        self.ports[port as usize] = PortList::ABSENT;
    }

    /// Forgets every address that was learned behind `port`.
    pub fn forget_learned(&mut self, port: PortNumber) {
        while let Some(oldest) = self.ports.get(port as usize).map(|list| list.oldest).filter(|oldest| *oldest != NIL) {
            self.remove(oldest as usize);
        }
    }

    /// Begins to keep VLANs apart, or ends it. Then everything that was learned is forgotten.
    pub fn keep_vlans(&mut self, on: bool) {
        if on != self.vlans.is_empty() {
            return;
        }
        (0..self.ports.len()).for_each(|port| self.forget_learned(port as PortNumber));
        self.vlans = vec![0; if on { self.slots.len() } else { 0 }].into_boxed_slice();
    }

    /// The port behind which `address` was seen.
    #[inline]
    pub fn find(&self, address: Address) -> Option<PortNumber> {
        self.slot_of(address, 0).map(|slot| port_of(self.slots[slot]))
    }

    /// The port behind which `address` was seen in `vlan`, or to which it is pinned.
    #[inline]
    pub fn find_in(&self, vlan: u16, address: Address) -> Option<PortNumber> {
        let slot = self.slot_of(address, vlan).or_else(|| self.slot_of(address, 0));
        slot.map(|slot| port_of(self.slots[slot]))
    }

    /// Remembers that `address`, a station's, was seen behind `port` at `now`. `port` was added.
    #[inline]
    pub fn learn(&mut self, now: Tick, address: Address, port: PortNumber) -> Learned {
        self.learn_in(now, 0, address, port)
    }

    /// As [`MacTable::learn`], in `vlan`; 0 where VLANs are not kept apart.
    #[inline]
    pub fn learn_in(&mut self, now: Tick, vlan: u16, address: Address, port: PortNumber) -> Learned {
        debug_assert!(address.is_station() && self.ports[port as usize].present);
        debug_assert_eq!(vlan == 0, self.vlans.is_empty());
        match self.slot_of(address, vlan) {
            Some(slot) if port_of(self.slots[slot]) == port => {
                if self.seen[slot] != now.0 {
                    self.refresh(slot, now);
                }
                Learned::Known
            }
            // What is pinned was learned in no VLAN, so this is looked at last.
            found => match (vlan != 0).then(|| self.slot_of(address, 0)).flatten() {
                Some(pinned) if port_of(self.slots[pinned]) == port => Learned::Known,
                Some(_) => Learned::Pinned,
                None => self.learn_slow(now, vlan, address, port, found),
            },
        }
    }

    /// Binds `address` to `port`, without age and beyond all limits, until
    /// [`MacTable::unpin_port`]. Returns whether that was done: not where another port has it
    /// pinned already, nor for a group address.
    pub fn pin(&mut self, address: Address, port: PortNumber) -> bool {
        if !address.is_station() {
            return false;
        }
        if let Some(slot) = self.slot_of(address, 0) {
            if self.seen[slot] == Tick::PINNED.0 {
                return port_of(self.slots[slot]) == port;
            }
            self.remove(slot);
        }
        let in_a_vlan = |(slot, vlan): (usize, &u16)| {
            (*vlan != 0 && Address::from_low_bits(self.slots[slot]) == address).then_some(*vlan)
        };
        let vlans: Vec<_> = self.vlans.iter().enumerate().filter_map(in_a_vlan).collect();
        for vlan in vlans {
            // One at a time, since a removal moves others.
            if let Some(slot) = self.slot_of(address, vlan) {
                self.remove(slot);
            }
        }
        if self.pinned as usize >= self.slots.len() / 4 {
            return false;
        }
        let Some(slot) = self.free_slot(address, 0) else { return false };
        self.slots[slot] = word(address, port);
        self.set_vlan(slot, 0);
        self.seen[slot] = Tick::PINNED.0;
        self.links[slot] = Links { newer: NIL, older: NIL };
        self.pinned += 1;
        true
    }

    /// The port to which `address` is pinned, if it is.
    pub fn pinned_to(&self, address: Address) -> Option<PortNumber> {
        let slot = self.slot_of(address, 0).filter(|slot| self.seen[*slot] == Tick::PINNED.0)?;
        Some(port_of(self.slots[slot]))
    }

    /// Ends every pin of `port`.
    pub fn unpin_port(&mut self, port: PortNumber) {
        let mine = |(slot, word): (usize, &u64)| {
            (*word != 0 && port_of(*word) == port && self.seen[slot] == Tick::PINNED.0)
                .then_some(Address::from_low_bits(*word))
        };
        let addresses: Vec<_> = self.slots.iter().enumerate().filter_map(mine).collect();
        for address in addresses {
            let slot = self.slot_of(address, 0).expect("it was listed just now, and others' removal keeps it");
            self.remove(slot);
        }
    }

    /// Forgets addresses that are too old at `now`, up to a bound per call; returns whether there
    /// are more.
    pub fn expire(&mut self, now: Tick) -> bool {
        if now <= self.expired_to {
            return false;
        }
        let mut left = EXPIRE_AT_ONCE;
        for port in 0..self.ports.len() {
            loop {
                let oldest = self.ports[port].oldest;
                if oldest == NIL || now.0.saturating_sub(self.seen[oldest as usize]) <= self.age_ticks {
                    break;
                }
                if left == 0 {
                    return true;
                }
                left -= 1;
                self.stats.expired += 1;
                self.remove(oldest as usize);
            }
        }
        self.expired_to = now;
        false
    }

    /// How many addresses there are, pinned ones included.
    pub fn len(&self) -> usize {
        (self.learned + self.pinned) as usize
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many addresses were learned behind `port`.
    pub fn behind(&self, port: PortNumber) -> u32 {
        self.ports.get(port as usize).map_or(0, |list| list.len)
    }

    /// What happened so far.
    pub fn stats(&self) -> MacStats {
        self.stats
    }

    /// The limits that the table was created with.
    pub fn settings(&self) -> MacSettings {
        self.settings
    }

    /// Every address, in no order.
    pub fn entries(&self, now: Nanos) -> impl Iterator<Item = MacEntry> {
        self.slots.iter().enumerate().filter(|(_, word)| **word != 0).map(move |(slot, word)| {
            let seen = self.seen[slot];
            let age = (seen != Tick::PINNED.0).then(|| now.since(Nanos((seen as u64) << Tick::SHIFT)));
            let vlan = self.vlans.get(slot).copied().filter(|vlan| *vlan != 0);
            MacEntry { address: Address::from_low_bits(*word), port: port_of(*word), vlan, age }
        })
    }

    #[inline]
    fn home(&self, address: Address, vlan: u16) -> usize {
        let product = (address.0 ^ (vlan as u64) << 48 ^ self.key.0) as u128 * self.key.1 as u128;
        ((product >> 64) as u64 ^ product as u64) as usize & (self.slots.len() - 1)
    }

    #[inline]
    fn slot_of(&self, address: Address, vlan: u16) -> Option<usize> {
        let mask = self.slots.len() - 1;
        let mut slot = self.home(address, vlan);
        loop {
            let word = self.slots[slot & mask];
            if word & Address::MASK == address.0 && self.vlan_of(slot & mask) == vlan {
                // The address zero is in no table, but an empty slot looks like it.
                return (word != 0).then_some(slot & mask);
            }
            if word == 0 {
                return None;
            }
            slot += 1;
        }
    }

    #[inline]
    fn vlan_of(&self, slot: usize) -> u16 {
        self.vlans.get(slot).copied().unwrap_or(0)
    }

    #[inline]
    fn set_vlan(&mut self, slot: usize, vlan: u16) {
        if let Some(place) = self.vlans.get_mut(slot) {
            *place = vlan;
        }
    }

    /// The first empty slot from the address's home, if it is near enough.
    fn free_slot(&self, address: Address, vlan: u16) -> Option<usize> {
        let mask = self.slots.len() - 1;
        let home = self.home(address, vlan);
        (home..home + MAX_PROBE.min(mask)).map(|slot| slot & mask).find(|slot| self.slots[*slot] == 0)
    }

    #[cold]
    fn learn_slow(
        &mut self,
        now: Tick,
        vlan: u16,
        address: Address,
        port: PortNumber,
        found: Option<usize>,
    ) -> Learned {
        let mut moved = false;
        if let Some(slot) = found {
            if self.seen[slot] == Tick::PINNED.0 {
                return Learned::Pinned;
            }
            if self.ports[port as usize].limit == 0 {
                self.stats.refused += 1;
                return Learned::Refused;
            }
            self.remove(slot);
            moved = true;
        }
        if !self.make_room(port) {
            self.stats.refused += 1;
            return Learned::Refused;
        }
        let Some(slot) = self.free_slot(address, vlan) else {
            self.stats.refused += 1;
            return Learned::Refused;
        };
        self.slots[slot] = word(address, port);
        self.set_vlan(slot, vlan);
        self.seen[slot] = now.0;
        self.push_newest(slot);
        self.learned += 1;
        *(if moved { &mut self.stats.moved } else { &mut self.stats.learned }) += 1;
        Learned::Changed
    }

    /// Sees to it that `port` may have one more address; `false` where it may have none at all.
    fn make_room(&mut self, port: PortNumber) -> bool {
        let PortList { len, limit, oldest, .. } = self.ports[port as usize];
        if limit == 0 {
            return false;
        }
        if len >= limit {
            self.stats.evicted_own += 1;
            self.remove(oldest as usize);
        } else if self.learned >= self.settings.capacity {
            let share = self.settings.capacity / self.present_ports.max(1);
            let (victim, counter) = if len > 0 && len >= share {
                (oldest, &mut self.stats.evicted_own)
            } else {
                let most = self.ports.iter().max_by_key(|list| list.len);
                (most.map_or(NIL, |list| list.oldest), &mut self.stats.evicted_other)
            };
            if victim == NIL {
                return false;
            }
            *counter += 1;
            self.remove(victim as usize);
        }
        true
    }

    fn refresh(&mut self, slot: usize, now: Tick) {
        if self.seen[slot] == Tick::PINNED.0 {
            return;
        }
        self.seen[slot] = now.0;
        let port = port_of(self.slots[slot]) as usize;
        if self.ports[port].newest != slot as u32 {
            self.unlink(slot);
            self.push_newest(slot);
        }
    }

    fn push_newest(&mut self, slot: usize) {
        let list = &mut self.ports[port_of(self.slots[slot]) as usize];
        let older = list.newest;
        list.newest = slot as u32;
        list.len += 1;
        if older == NIL {
            list.oldest = slot as u32;
        } else {
            self.links[older as usize].newer = slot as u32;
        }
        self.links[slot] = Links { newer: NIL, older };
    }

    fn unlink(&mut self, slot: usize) {
        let Links { newer, older } = self.links[slot];
        let list = &mut self.ports[port_of(self.slots[slot]) as usize];
        list.len -= 1;
        if newer == NIL {
            list.newest = older;
        } else {
            self.links[newer as usize].older = older;
        }
        if older == NIL {
            list.oldest = newer;
        } else {
            self.links[older as usize].newer = newer;
        }
    }

    /// Empties `slot`, and shifts those behind it back so that no probe meets a gap.
    fn remove(&mut self, slot: usize) {
        if self.seen[slot] != Tick::PINNED.0 {
            self.unlink(slot);
            self.learned -= 1;
        } else {
            self.pinned -= 1;
        }
        let mask = self.slots.len() - 1;
        let (mut hole, mut at) = (slot, slot);
        loop {
            at = (at + 1) & mask;
            let word = self.slots[at];
            if word == 0 {
                break;
            }
            let home = self.home(Address::from_low_bits(word), self.vlan_of(at));
            // It may go to the hole if its home is not between the hole and itself.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.relocate(at, hole);
                hole = at;
            }
        }
        self.slots[hole] = 0;
        self.set_vlan(hole, 0);
    }

    fn relocate(&mut self, from: usize, to: usize) {
        self.slots[to] = self.slots[from];
        self.seen[to] = self.seen[from];
        self.set_vlan(to, self.vlan_of(from));
        let links = self.links[from];
        self.links[to] = links;
        if self.seen[to] == Tick::PINNED.0 {
            return;
        }
        let list = &mut self.ports[port_of(self.slots[to]) as usize];
        if links.newer == NIL {
            list.newest = to as u32;
        } else {
            self.links[links.newer as usize].older = to as u32;
        }
        if links.older == NIL {
            list.oldest = to as u32;
        } else {
            self.links[links.older as usize].newer = to as u32;
        }
    }
}

#[inline]
const fn word(address: Address, port: PortNumber) -> u64 {
    (port as u64) << 48 | address.0
}

#[inline]
const fn port_of(word: u64) -> PortNumber {
    (word >> 48) as PortNumber
}

/// The finalizer of SplitMix64: spreads a seed over all bits.
const fn mix(seed: u64) -> u64 {
    let a = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    b ^ (b >> 31)
}

#[cfg(test)]
#[path = "mac_tests.rs"]
mod tests;
