//! The flows that judging rules could judge, as the egress program checks them: `struct judges` of
//! ebpf/tables.h.

use crate::layout::MAX_PORTS;
use std::collections::HashMap;

/// Most filters that the map has room for.
pub(crate) const MAX_FILTERS: usize = 32;
/// Bytes of `struct judge`.
const FILTER_BYTES: usize = 8 * 2 + 16 * 4 + 8 + 2 * MAX_PORTS as usize / 8;
const HEADER_BYTES: usize = 16;
/// Bytes of `struct judges`.
pub const JUDGES_BYTES: usize = HEADER_BYTES + MAX_FILTERS * FILTER_BYTES;

/// `enum rules_state`: whether the programs may learn at all, and whether the generation must be
/// the one that the filters were made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum RulesState {
    Unread = 0,
    Read = 1,
    Skipped = 2,
}

/// A set of attached interfaces, by their slots in the counters' map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slots([u64; MAX_PORTS as usize / 64]);

impl Slots {
    pub(crate) const ALL: Slots = Slots([u64::MAX; MAX_PORTS as usize / 64]);

    pub(crate) fn of(slots: impl IntoIterator<Item = u32>) -> Slots {
        let mut set = Slots([0; MAX_PORTS as usize / 64]);
        for slot in slots.into_iter().filter(|s| *s < MAX_PORTS) {
            set.0[slot as usize / 64] |= 1 << (slot % 64);
        }
        set
    }

    pub(crate) fn and(self, other: Slots) -> Slots {
        Slots(std::array::from_fn(|n| self.0[n] & other.0[n]))
    }

    pub(crate) fn not(self) -> Slots {
        Slots(self.0.map(|word| !word))
    }

    fn or(self, other: Slots) -> Slots {
        Slots(std::array::from_fn(|n| self.0[n] | other.0[n]))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    pub(crate) fn holds(&self, other: Slots) -> bool {
        self.and(other) == other
    }

    fn bytes(&self) -> impl Iterator<Item = u8> {
        let half = |n: u32, word: u64| ((word >> (32 * n)) as u32).to_ne_bytes();
        self.0.into_iter().flat_map(move |word| half(0, word).into_iter().chain(half(1, word)))
    }
}

/// Bits of an address, as on the wire; an IPv4 address has the first four bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Prefix {
    pub value: [u8; 16],
    pub mask: [u8; 16],
}

/// The flows of some kinds that come and go by some interfaces, with such addresses and ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Filter {
    pub inputs: Slots,
    pub outputs: Slots,
    pub source: Prefix,
    pub destination: Prefix,
    /// First and last.
    pub source_ports: (u16, u16),
    pub destination_ports: (u16, u16),
    /// Whether the source is the one behind the translation, or the one that came in.
    pub source_is_out: bool,
    pub destination_is_out: bool,
}

impl Filter {
    pub(crate) const ALL: Filter = Filter {
        inputs: Slots::ALL,
        outputs: Slots::ALL,
        source: Prefix { value: [0; 16], mask: [0; 16] },
        destination: Prefix { value: [0; 16], mask: [0; 16] },
        source_ports: (0, u16::MAX),
        destination_ports: (0, u16::MAX),
        source_is_out: false,
        destination_is_out: false,
    };

    /// One that both are in: of addresses what is equal, of ports all between.
    pub(crate) fn hull(&self, other: &Filter) -> Filter {
        let address = |a: Prefix, b: Prefix| if a == b { a } else { Prefix::default() };
        let ports = |a: (u16, u16), b: (u16, u16)| (a.0.min(b.0), a.1.max(b.1));
        Filter {
            inputs: self.inputs.or(other.inputs),
            outputs: self.outputs.or(other.outputs),
            source: address(self.source, other.source),
            destination: address(self.destination, other.destination),
            source_ports: ports(self.source_ports, other.source_ports),
            destination_ports: ports(self.destination_ports, other.destination_ports),
            ..*self
        }
    }

    /// The same by its interfaces only.
    fn wider(self) -> Filter {
        Filter { inputs: self.inputs, outputs: self.outputs, ..Filter::ALL }
    }

    /// What makes no difference is made equal, so that equal filters are found.
    fn plain(mut self) -> Filter {
        if self.source.mask == [0; 16] && self.source_ports == (0, u16::MAX) {
            self.source_is_out = false;
        }
        if self.destination.mask == [0; 16] && self.destination_ports == (0, u16::MAX) {
            self.destination_is_out = false;
        }
        self
    }

    fn to_bytes(self, worlds: u32) -> Vec<u8> {
        let side = |is_out: bool| if is_out { u32::MAX } else { 0 }.to_ne_bytes();
        let mut bytes = worlds.to_ne_bytes().to_vec();
        bytes.extend(side(self.source_is_out));
        bytes.extend(side(self.destination_is_out));
        bytes.extend([0; 4]);
        for part in [self.source.value, self.source.mask, self.destination.value, self.destination.mask] {
            bytes.extend(part);
        }
        for (first, last) in [self.source_ports, self.destination_ports] {
            bytes.extend(first.to_ne_bytes());
            bytes.extend(last.to_ne_bytes());
        }
        bytes.extend(self.inputs.bytes().chain(self.outputs.bytes()));
        bytes
    }
}

/// Filters, each with the kinds of flows (bits: `World::bit`) that it is for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Filters(HashMap<Filter, u32>);

impl Filters {
    /// Every flow.
    pub(crate) fn all() -> Filters {
        Filters(HashMap::from([(Filter::ALL, u32::MAX)]))
    }

    pub(crate) fn add(&mut self, filter: Filter, worlds: u32) {
        *self.0.entry(filter.plain()).or_default() |= worlds;
    }

    #[cfg(test)]
    pub(crate) fn worlds(&self, filter: &Filter) -> Option<u32> {
        self.0.get(filter).copied()
    }

    #[cfg(test)]
    pub(crate) fn sorted(&self) -> Vec<(Filter, u32)> {
        self.0.iter().map(|(f, w)| (*f, *w)).collect()
    }

    /// As few as the map has room for: where they are too many, such that cover more.
    fn fitting(&self) -> Filters {
        if self.0.len() <= MAX_FILTERS {
            return self.clone();
        }
        let mut wider = Filters::default();
        for (filter, worlds) in &self.0 {
            wider.add(filter.wider(), *worlds);
        }
        if wider.0.len() <= MAX_FILTERS {
            return wider;
        }
        Filters(HashMap::from([(Filter::ALL, self.0.values().fold(0, |all, worlds| all | worlds))]))
    }

    /// As in the map.
    pub(crate) fn to_bytes(&self, state: RulesState, generation: u32) -> [u8; JUDGES_BYTES] {
        // In an order of their own, so that the same filters are the same bytes.
        let mut filters: Vec<_> = self.fitting().0.iter().map(|(f, worlds)| f.to_bytes(*worlds)).collect();
        filters.sort();
        let mut bytes = [0; JUDGES_BYTES];
        for (at, word) in [filters.len() as u32, generation, state as u32].into_iter().enumerate() {
            bytes[4 * at..4 * at + 4].copy_from_slice(&word.to_ne_bytes());
        }
        for (to, from) in bytes[HEADER_BYTES..].chunks_exact_mut(FILTER_BYTES).zip(filters) {
            to.copy_from_slice(&from);
        }
        bytes
    }
}

/// What the map's first bytes say: (state, generation).
pub(crate) fn header(bytes: &[u8; JUDGES_BYTES]) -> (RulesState, u32) {
    let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let state = match word(8) {
        1 => RulesState::Read,
        2 => RulesState::Skipped,
        _ => RulesState::Unread,
    };
    (state, word(4))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(port: u16) -> Filter {
        Filter { destination_ports: (port, port), ..Filter::ALL }
    }

    #[test]
    fn a_filter_is_what_the_program_reads() {
        let mut filters = Filters::default();
        let mut filter = Filter { inputs: Slots::of([0, 33]), destination_is_out: true, ..port(80) };
        filter.source.value[..2].copy_from_slice(&[10, 1]);
        filter.source.mask[..2].copy_from_slice(&[0xff, 0xff]);
        filters.add(filter, 0b101);
        let bytes = filters.to_bytes(RulesState::Read, 7);
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!([0, 4, 8, 12].map(word), [1, 7, 1, 0]);
        assert_eq!([16, 20, 24].map(word), [0b101, 0, u32::MAX]);
        assert_eq!((&bytes[32..35], &bytes[48..51]), (&[10, 1, 0][..], &[0xff, 0xff, 0][..]));
        let half = |at: usize| u16::from_ne_bytes(bytes[at..at + 2].try_into().unwrap());
        assert_eq!([96, 98, 100, 102].map(half), [0, u16::MAX, 80, 80]);
        assert_eq!([104, 108, 112].map(word), [1, 2, 0]);
        assert_eq!(word(104 + 128), u32::MAX);
        assert_eq!((FILTER_BYTES, JUDGES_BYTES), (344, 16 + 32 * 344));
        assert_eq!(header(&bytes), (RulesState::Read, 7));
    }

    #[test]
    fn more_filters_than_there_is_room_for_become_such_that_cover_more() {
        let mut filters = Filters::default();
        for n in 0..40 {
            filters.add(Filter { inputs: Slots::of([u32::from(n) % 2]), ..port(n) }, 1 << (n % 3));
        }
        let fitting = filters.fitting();
        assert_eq!(fitting.0.len(), 2);
        assert_eq!(fitting.worlds(&Filter { inputs: Slots::of([1]), ..Filter::ALL }), Some(0b111));
        for n in 0..40 {
            filters.add(Filter { inputs: Slots::of([n]), ..Filter::ALL }, 1 << 29);
        }
        assert_eq!(filters.fitting().worlds(&Filter::ALL), Some(1 << 29 | 0b111));
    }

    #[test]
    fn the_same_filters_are_the_same_bytes() {
        let of = |ports: [u16; 3]| {
            let mut filters = Filters::default();
            ports.into_iter().for_each(|p| filters.add(port(p), 1));
            filters.to_bytes(RulesState::Read, 1)
        };
        assert_eq!(of([1, 2, 3]), of([3, 1, 2]));
    }
}
