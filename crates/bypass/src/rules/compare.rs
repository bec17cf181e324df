//! Comparisons of a register with a rule's values and sets, for all frames of a flow at once.

use super::filter::{Filter, Prefix, Slots};
use super::ruleset::{CATCH_ALL, Element, INTERVAL_END, SET_CONCAT, SET_INTERVAL, Set};
use super::value::{Cell, Field, known, varying};
use super::world::Port;
use std::cmp::Ordering;

/// What a match says of the flows that come to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Match {
    Never,
    Always,
    /// Of these, and of no others.
    Only(Filter),
    /// Of such as these, or it is not known.
    Maybe(Filter),
    /// It may say one thing of one frame and another of the next, by what this names.
    Judges(String),
}

impl Match {
    fn judges(what: &str) -> Match {
        Match::Judges(format!("matches {what}"))
    }

    /// The opposite, of a match that looks at a flow's interface only where `by_interface`.
    fn not(self, filter: &Filter, by_interface: bool) -> Match {
        match self {
            Match::Never => Match::Always,
            Match::Always => Match::Never,
            Match::Only(some) if by_interface => {
                let inputs =
                    if some.inputs == filter.inputs { some.inputs } else { filter.inputs.and(some.inputs.not()) };
                let outputs =
                    if some.outputs == filter.outputs { some.outputs } else { filter.outputs.and(some.outputs.not()) };
                if inputs.is_empty() || outputs.is_empty() {
                    Match::Never
                } else {
                    Match::Only(Filter { inputs, outputs, ..*filter })
                }
            }
            Match::Only(_) | Match::Maybe(_) => Match::Maybe(*filter),
            judges => judges,
        }
    }
}

/// `enum nft_cmp_ops`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    Unequal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

impl Comparison {
    pub(crate) fn decode(number: u32) -> Option<Comparison> {
        use Comparison::{Equal, Greater, GreaterOrEqual, Less, LessOrEqual, Unequal};
        [Equal, Unequal, Less, LessOrEqual, Greater, GreaterOrEqual].get(number as usize).copied()
    }

    fn holds(self, order: Ordering) -> bool {
        match self {
            Comparison::Equal => order.is_eq(),
            Comparison::Unequal => order.is_ne(),
            Comparison::Less => order.is_lt(),
            Comparison::LessOrEqual => order.is_le(),
            Comparison::Greater => order.is_gt(),
            Comparison::GreaterOrEqual => order.is_ge(),
        }
    }
}

/// Whether all bytes are of one field, from its first on.
fn is_field(cells: &[Cell], wanted: impl Fn(Field) -> bool) -> Option<Field> {
    let field = cells.first()?.origin?.0;
    let is_it = |(n, c): (usize, &Cell)| c.origin == Some((field, n as u8)) && c.mask == 0xff;
    (wanted(field) && cells.iter().enumerate().all(is_it)).then_some(field)
}

fn is_interface(cells: &[Cell]) -> bool {
    let wanted = |f| matches!(f, Field::Input | Field::Output | Field::InputName | Field::OutputName);
    is_field(cells, wanted).is_some()
}

fn port_of(cells: &[Cell]) -> Option<Field> {
    is_field(cells, |f| matches!(f, Field::SourcePort | Field::DestinationPort)).filter(|_| cells.len() == 2)
}

fn be16(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(..2)?.try_into().ok()?))
}

/// Comparisons among the attached interfaces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparer<'a> {
    pub ports: &'a [Port],
}

impl Comparer<'_> {
    fn slots(&self, is_it: impl Fn(&Port) -> bool) -> Slots {
        Slots::of(self.ports.iter().filter(|p| is_it(p)).map(|p| p.slot))
    }

    /// Those of the filter's flows that have these bytes, and whether they are just those; none: no
    /// flow has.
    fn narrow(&self, cells: &[Cell], data: &[u8], filter: &Filter) -> Option<(Filter, bool)> {
        let (mut narrow, mut exact) = (*filter, true);
        let mut ports = [[None; 2]; 2];
        let mut indices = [[None; 4]; 2];
        let mut names = [vec![], vec![]];
        for (cell, byte) in cells.iter().zip(data) {
            exact &= cell.known | cell.mask == 0xff;
            let Some((field, n)) = cell.origin else { continue };
            let n = usize::from(n);
            let is_whole = cell.mask == 0xff;
            match field {
                Field::Source => add_bits(&mut narrow.source, n, *byte, cell.mask)?,
                Field::Destination => add_bits(&mut narrow.destination, n, *byte, cell.mask)?,
                _ if !is_whole => exact = false,
                Field::SourcePort => ports[0][n] = Some(*byte),
                Field::DestinationPort => ports[1][n] = Some(*byte),
                Field::Input => indices[0][n] = Some(*byte),
                Field::Output => indices[1][n] = Some(*byte),
                Field::InputName => names[0].push((n, *byte)),
                Field::OutputName => names[1].push((n, *byte)),
            }
        }
        for (range, bytes) in [&mut narrow.source_ports, &mut narrow.destination_ports].into_iter().zip(ports) {
            match bytes {
                [Some(high), Some(low)] => {
                    let port = u16::from_be_bytes([high, low]);
                    if port < range.0 || port > range.1 {
                        return None;
                    }
                    *range = (port, port);
                }
                [None, None] => {}
                _ => exact = false,
            }
        }
        let sides = [&mut narrow.inputs, &mut narrow.outputs];
        for (side, (index, name)) in sides.into_iter().zip(indices.into_iter().zip(names)) {
            match index {
                [Some(a), Some(b), Some(c), Some(d)] => {
                    let index = u32::from_ne_bytes([a, b, c, d]);
                    *side = side.and(self.slots(|p| p.index == index));
                }
                [None, None, None, None] => {}
                _ => exact = false,
            }
            let byte_of = |p: &Port, n: usize| p.name.as_bytes().get(n).copied().unwrap_or(0);
            if !name.is_empty() {
                *side = side.and(self.slots(|p| name.iter().all(|(n, byte)| byte_of(p, *n) == *byte)));
            }
            if side.is_empty() {
                return None;
            }
        }
        Some((narrow, exact))
    }

    /// Whether the bytes are these.
    fn equal(&self, cells: &[Cell], data: &[u8], filter: &Filter) -> Match {
        if cells.len() < data.len() || data.is_empty() {
            return Match::Maybe(*filter);
        }
        let cells = &cells[..data.len()];
        if cells.iter().zip(data).any(|(c, byte)| c.known & (c.value ^ byte) != 0) {
            return Match::Never;
        }
        let Some((narrow, exact)) = self.narrow(cells, data, filter) else { return Match::Never };
        match varying(cells) {
            Some(what) => Match::judges(what),
            None if exact && narrow == *filter => Match::Always,
            None if exact => Match::Only(narrow),
            None => Match::Maybe(narrow),
        }
    }

    /// `cmp`.
    pub(crate) fn compare(&self, cells: &[Cell], how: Comparison, data: &[u8], filter: &Filter) -> Match {
        match how {
            Comparison::Equal => self.equal(cells, data, filter),
            Comparison::Unequal => self.equal(cells, data, filter).not(filter, is_interface(cells)),
            _ => {
                if let Some(bytes) = known(cells) {
                    return if how.holds(bytes.as_slice().cmp(data)) { Match::Always } else { Match::Never };
                }
                if let Some(what) = varying(cells) {
                    return Match::judges(what);
                }
                let (Some(_), Some(bound)) = (port_of(cells), be16(data)) else { return Match::Maybe(*filter) };
                let range = match how {
                    Comparison::Less => bound.checked_sub(1).map(|last| (0, last)),
                    Comparison::LessOrEqual => Some((0, bound)),
                    Comparison::Greater => bound.checked_add(1).map(|first| (first, u16::MAX)),
                    _ => Some((bound, u16::MAX)),
                };
                range.map_or(Match::Never, |range| within(cells, range, filter))
            }
        }
    }

    /// `range`: whether the bytes are between the two, both included.
    pub(crate) fn range(&self, cells: &[Cell], first: &[u8], last: &[u8], is_in: bool, filter: &Filter) -> Match {
        let inside = if let Some(bytes) = known(cells) {
            let bytes = bytes.as_slice();
            if first <= bytes && bytes <= last { Match::Always } else { Match::Never }
        } else if let Some(what) = varying(cells) {
            Match::judges(what)
        } else if let (Some(_), Some(first), Some(last)) = (port_of(cells), be16(first), be16(last)) {
            within(cells, (first, last), filter)
        } else {
            Match::Maybe(*filter)
        };
        if is_in { inside } else { inside.not(filter, false) }
    }

    /// `lookup` in a set without data.
    pub(crate) fn is_in(&self, cells: &[Cell], set: &Set, is_in: bool, filter: &Filter) -> Match {
        let inside = match &set.elements {
            Some(elements) => self.is_among(cells, set, elements, filter),
            None => varying(cells).map_or(Match::Maybe(*filter), Match::judges),
        };
        if is_in { inside } else { inside.not(filter, is_interface(cells)) }
    }

    fn is_among(&self, cells: &[Cell], set: &Set, elements: &[Element], filter: &Filter) -> Match {
        let all_others = elements.iter().any(|e| e.flags & CATCH_ALL != 0);
        if all_others {
            return Match::Maybe(*filter);
        }
        if set.flags & SET_INTERVAL != 0 {
            if let Some(bytes) = known(cells).filter(|_| set.flags & SET_CONCAT == 0) {
                return if interval(elements, &bytes).is_some() { Match::Always } else { Match::Never };
            }
            if let Some(what) = varying(cells) {
                return Match::judges(what);
            }
            return match port_of(cells).and_then(|_| hull(elements)).map(|range| within(cells, range, filter)) {
                // Between the first and the last there may be others.
                None | Some(Match::Always) => Match::Maybe(*filter),
                Some(Match::Only(some)) => Match::Maybe(some),
                Some(other) => other,
            };
        }
        let mut union: Option<Filter> = None;
        let (mut judges, mut exact) = (None, is_interface(cells));
        for element in elements {
            match self.equal(cells, &element.key, filter) {
                Match::Always => return Match::Always,
                Match::Never => {}
                Match::Only(some) => union = Some(union.map_or(some, |all| all.hull(&some))),
                Match::Maybe(some) => {
                    exact = false;
                    union = Some(union.map_or(some, |all| all.hull(&some)));
                }
                by => judges = Some(by),
            }
        }
        let some = union.map(if exact { Match::Only } else { Match::Maybe });
        judges.or(some).unwrap_or(Match::Never)
    }

    /// `lookup` in a map: each element that the key may be, and what that means.
    pub(crate) fn candidates<'s>(&self, cells: &[Cell], set: &'s Set, filter: &Filter) -> Vec<(Match, &'s Element)> {
        let elements = set.elements.as_deref().unwrap_or_default();
        let others = elements.iter().filter(|e| e.flags & CATCH_ALL != 0).map(|e| (Match::Maybe(*filter), e));
        if set.flags & SET_INTERVAL != 0 {
            if let Some(bytes) = known(cells).filter(|_| set.flags & SET_CONCAT == 0) {
                let it = interval(elements, &bytes).map(|e| (Match::Always, e));
                // What no interval has is the catch-all's.
                return it.into_iter().chain(others).take(1).collect();
            }
            let how = varying(cells).map_or(Match::Maybe(*filter), Match::judges);
            return elements.iter().filter(|e| e.flags & INTERVAL_END == 0).map(|e| (how.clone(), e)).collect();
        }
        let mut found = vec![];
        for element in elements.iter().filter(|e| e.flags & CATCH_ALL == 0) {
            match self.equal(cells, &element.key, filter) {
                Match::Never => {}
                Match::Always => return vec![(Match::Always, element)],
                other => found.push((other, element)),
            }
        }
        if found.is_empty() && known(cells).is_some() {
            return others.map(|(_, e)| (Match::Always, e)).collect();
        }
        found.extend(others);
        found
    }
}

/// Those of the filter's flows whose port is in a range.
fn within(cells: &[Cell], (first, last): (u16, u16), filter: &Filter) -> Match {
    let mut narrow = *filter;
    let range = match port_of(cells) {
        Some(Field::SourcePort) => &mut narrow.source_ports,
        _ => &mut narrow.destination_ports,
    };
    if first <= range.0 && range.1 <= last {
        return Match::Always;
    }
    *range = (range.0.max(first), range.1.min(last));
    if range.0 > range.1 { Match::Never } else { Match::Only(narrow) }
}

fn add_bits(prefix: &mut Prefix, n: usize, byte: u8, mask: u8) -> Option<()> {
    if (prefix.value[n] ^ byte) & prefix.mask[n] & mask != 0 {
        return None;
    }
    prefix.mask[n] |= mask;
    prefix.value[n] |= byte & mask;
    Some(())
}

/// The element whose interval a key is in. An interval goes from its key to that of an element with
/// `INTERVAL_END`, which is behind it, or to its own last one.
fn interval<'a>(elements: &'a [Element], key: &[u8]) -> Option<&'a Element> {
    let below = elements.iter().filter(|e| e.flags & CATCH_ALL == 0 && e.key.as_slice() <= key);
    // Of two with the same key the one that begins is meant.
    let nearest = below.max_by_key(|e| (&e.key, e.flags & INTERVAL_END == 0))?;
    let is_past = nearest.last.as_ref().is_some_and(|last| last.as_slice() < key);
    (nearest.flags & INTERVAL_END == 0 && !is_past).then_some(nearest)
}

/// The ports between the first and the last of all intervals.
fn hull(elements: &[Element]) -> Option<(u16, u16)> {
    let ports = |ends: bool| elements.iter().filter(move |e| (e.flags & INTERVAL_END != 0) == ends);
    let first = ports(false).filter_map(|e| be16(&e.key)).min()?;
    let last_start = ports(false).filter_map(|e| be16(&e.key)).max()?;
    let own_ends = ports(false).filter_map(|e| be16(e.last.as_ref()?)).max();
    let end = ports(true).filter_map(|e| be16(&e.key)).max().filter(|end| *end > last_start);
    Some((first, end.map(|e| e - 1).or(own_ends).unwrap_or(u16::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ports() -> Vec<Port> {
        let port = |slot, name: &str| Port { slot, index: slot + 10, name: name.into() };
        vec![port(0, "ta"), port(1, "tb"), port(2, "tap9")]
    }

    fn cells(field: Field, bytes: u8) -> Vec<Cell> {
        (0..bytes).map(|n| Cell::of(field, n)).collect()
    }

    fn here() -> Filter {
        Filter { inputs: Slots::of([0, 1, 2]), outputs: Slots::of([0, 1, 2]), ..Filter::ALL }
    }

    fn set(flags: u32, elements: &[(&[u8], u32)]) -> Set {
        let element =
            |(key, flags): &(&[u8], u32)| Element { key: key.to_vec(), last: None, flags: *flags, data: None };
        Set { flags, elements: Some(elements.iter().map(element).collect()), ..Set::default() }
    }

    #[test]
    fn interfaces_are_told_by_number_name_and_beginning() {
        let (ports, here) = (ports(), here());
        let by = Comparer { ports: &ports };
        let inputs = |slots: &[u32]| Match::Only(Filter { inputs: Slots::of(slots.iter().copied()), ..here });
        let name = |text: &str| {
            let mut bytes = text.as_bytes().to_vec();
            bytes.resize(16, 0);
            bytes
        };
        let iifname = cells(Field::InputName, 16);
        assert_eq!(by.compare(&iifname, Comparison::Equal, &name("ta"), &here), inputs(&[0]));
        assert_eq!(by.compare(&iifname, Comparison::Unequal, &name("ta"), &here), inputs(&[1, 2]));
        assert_eq!(by.compare(&iifname, Comparison::Equal, &name("eth0"), &here), Match::Never);
        assert_eq!(by.compare(&iifname, Comparison::Unequal, &name("eth0"), &here), Match::Always);
        assert_eq!(by.compare(&iifname, Comparison::Equal, b"ta", &here), inputs(&[0, 2]));
        let iif = cells(Field::Input, 4);
        assert_eq!(by.compare(&iif, Comparison::Equal, &11u32.to_ne_bytes(), &here), inputs(&[1]));
        let one = Filter { inputs: Slots::of([1]), ..here };
        assert_eq!(by.compare(&iif, Comparison::Equal, &11u32.to_ne_bytes(), &one), Match::Always);
        assert_eq!(by.compare(&iif, Comparison::Equal, &10u32.to_ne_bytes(), &one), Match::Never);
        let (ta, tb) = (name("ta"), name("tb"));
        let both = set(0, &[(&ta, 0), (&tb, 0)]);
        assert_eq!(by.is_in(&iifname, &both, true, &here), inputs(&[0, 1]));
    }

    #[test]
    fn prefixes_and_ports_narrow_the_flows() {
        let by = Comparer { ports: &[] };
        let all = Filter::ALL;
        // 10.1.0.0/20: the third byte by its upper half.
        let mut source = cells(Field::Source, 3);
        source[2] = source[2].masked(0xf0, 0);
        let Match::Only(narrow) = by.compare(&source, Comparison::Equal, &[10, 1, 0], &all) else { panic!() };
        assert_eq!(
            (&narrow.source.value[..4], &narrow.source.mask[..4]),
            (&[10, 1, 0, 0][..], &[255, 255, 240, 0][..])
        );
        assert_eq!(by.compare(&source, Comparison::Equal, &[10, 1, 0], &narrow), Match::Always);
        assert_eq!(by.compare(&source, Comparison::Equal, &[10, 1, 16], &narrow), Match::Never);
        // A bit that the mask took can be no 1.
        assert_eq!(by.compare(&source, Comparison::Equal, &[10, 1, 1], &all), Match::Never);
        let dport = cells(Field::DestinationPort, 2);
        let range = |first, last| Match::Only(Filter { destination_ports: (first, last), ..all });
        let among = |first, last| Match::Maybe(Filter { destination_ports: (first, last), ..all });
        assert_eq!(by.compare(&dport, Comparison::Equal, &[0, 80], &all), range(80, 80));
        assert_eq!(by.compare(&dport, Comparison::Unequal, &[0, 80], &all), Match::Maybe(all));
        assert_eq!(by.compare(&dport, Comparison::GreaterOrEqual, &[4, 0], &all), range(1024, 65535));
        assert_eq!(by.compare(&dport, Comparison::Less, &[0, 0], &all), Match::Never);
        assert_eq!(by.range(&dport, &[0, 10], &[0, 20], true, &all), range(10, 20));
        assert_eq!(by.is_in(&dport, &set(0, &[(&[0, 22], 0), (&[0, 80], 0)]), true, &all), among(22, 80));
        let ranges = set(SET_INTERVAL, &[(&[0, 0], 1), (&[0, 22], 0), (&[0, 23], 1), (&[0, 80], 0), (&[0, 90], 1)]);
        assert_eq!(by.is_in(&dport, &ranges, true, &all), among(22, 89));
        assert_eq!(by.is_in(&dport, &ranges, false, &all), Match::Maybe(all));
        // Half a port says nothing that a filter could.
        assert_eq!(by.compare(&dport[..1], Comparison::Equal, &[0], &all), Match::Maybe(all));
    }

    #[test]
    fn known_bits_settle_what_they_can_and_others_judge() {
        let by = Comparer { ports: &[] };
        let all = Filter::ALL;
        let flags = [Cell { varies: 0xe8, what: "TCP's flags", ..Cell::partly(0x17, 0x10) }];
        let equal = |mask, value: u8| by.compare(&flags.map(|c| c.masked(mask, 0)), Comparison::Equal, &[value], &all);
        assert_eq!(equal(0x02, 0x02), Match::Never);
        assert_eq!(equal(0x12, 0x10), Match::Always);
        assert_eq!(equal(0x3f, 0), Match::Never);
        assert_eq!(equal(0x08, 0x08), Match::Judges("matches TCP's flags".into()));
        let syn_or_reset = set(0, &[(&[2], 0), (&[4], 0)]);
        assert_eq!(by.is_in(&flags, &syn_or_reset, true, &all), Match::Never);
        assert_eq!(by.is_in(&flags, &syn_or_reset, false, &all), Match::Always);
        let length = [Cell::varying("meta length"); 4];
        assert_eq!(by.compare(&length, Comparison::Greater, &[0, 0, 2, 0], &all), Match::judges("meta length"));
        assert_eq!(by.is_in(&length, &Set::default(), true, &all), Match::judges("meta length"));
    }

    #[test]
    fn a_key_that_is_known_is_found_in_intervals() {
        let by = Comparer { ports: &[] };
        let protocols = set(SET_INTERVAL, &[(&[0], 1), (&[6], 0), (&[7], 1), (&[17], 0), (&[20], 1)]);
        let is_in = |n| by.is_in(&[Cell::exact(n)], &protocols, true, &Filter::ALL) == Match::Always;
        assert_eq!([5, 6, 7, 17, 19, 20].map(is_in), [false, true, false, true, true, false]);
    }

    #[test]
    fn a_map_gives_what_the_key_may_be() {
        let by = Comparer { ports: &[] };
        let map = set(0, &[(&[6], 0), (&[17], 0)]);
        let found = |cell| {
            by.candidates(&[cell], &map, &Filter::ALL).into_iter().map(|(how, e)| (how, e.key[0])).collect::<Vec<_>>()
        };
        assert_eq!(found(Cell::exact(17)), [(Match::Always, 17)]);
        assert_eq!(found(Cell::exact(1)), []);
        assert_eq!(found(Cell::STABLE).len(), 2);
        assert!(found(Cell::varying("x")).iter().all(|f| f.0 == Match::judges("x")));
    }
}
