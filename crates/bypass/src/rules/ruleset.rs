//! The nftables ruleset as netlink tells it: tables, chains, rules, sets.
//!
//! Messages are decoded by `linux/netfilter/nf_tables.h`. Numbers are big-endian there. An
//! expression keeps its attributes as bytes; `walk` reads those that it knows. What cannot be
//! decoded is counted in `broken`, so that a ruleset that is not understood is never taken for an
//! empty one.

use crate::netlink::attributes;
use std::collections::{BTreeMap, BTreeSet};

/// `enum nf_tables_msg_types`, the low byte of a message's type.
pub(crate) const NEWTABLE: u8 = 0;
pub(crate) const GETTABLE: u8 = 1;
pub(crate) const NEWCHAIN: u8 = 3;
pub(crate) const GETCHAIN: u8 = 4;
pub(crate) const NEWRULE: u8 = 6;
pub(crate) const GETRULE: u8 = 7;
pub(crate) const NEWSET: u8 = 9;
pub(crate) const GETSET: u8 = 10;
pub(crate) const NEWSETELEM: u8 = 12;
pub(crate) const GETSETELEM: u8 = 13;
pub(crate) const GETGEN: u8 = 16;

/// `NFPROTO_*`.
pub(crate) const INET: u8 = 1;
pub(crate) const IPV4: u8 = 2;
pub(crate) const NETDEV: u8 = 5;
pub(crate) const IPV6: u8 = 10;

/// `NFT_SET_*`.
pub(crate) const SET_ANONYMOUS: u32 = 0x1;
pub(crate) const SET_INTERVAL: u32 = 0x4;
pub(crate) const SET_CONCAT: u32 = 0x80;
/// Flags of an element: it is where an interval ends; it matches every other key.
pub(crate) const INTERVAL_END: u32 = 0x1;
pub(crate) const CATCH_ALL: u32 = 0x2;
/// `NFT_DATA_VERDICT`: the data type of a verdict map.
const DATA_VERDICT: u32 = 0xffff_ff00;
const TABLE_DORMANT: u32 = 0x1;

/// Most of each that are read, so that no ruleset takes all memory. With more rules no walk would
/// come to its end.
const MOST_TABLES: usize = 10_000;
const MOST_RULES: usize = 250_000;
const MOST_ELEMENTS: usize = 1_000_000;

/// Bytes of all registers; the verdict's is none of them.
pub(crate) const REGISTERS_BYTES: usize = 64;

fn be32(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(..4)?.try_into().ok()?))
}

fn be64(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(bytes.get(..8)?.try_into().ok()?))
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn find(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attributes(bytes).find(|a| a.0 == wanted).map(|a| a.1)
}

/// What a rule decides: `NF_*` or `NFT_*`, and the chain of a jump or goto.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub code: i32,
    pub chain: Option<String>,
}

/// `IPSET_ATTR_TYPENAME` and `IPSET_ATTR_INDEX`.
const IPSET_TYPE: u16 = 3;
const IPSET_INDEX: u16 = 11;

pub(crate) const NFT_CONTINUE: i32 = -1;
pub(crate) const NFT_BREAK: i32 = -2;
pub(crate) const NFT_JUMP: i32 = -3;
pub(crate) const NFT_GOTO: i32 = -4;
pub(crate) const NFT_RETURN: i32 = -5;

/// `NFTA_DATA_*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Data {
    Value(Vec<u8>),
    Verdict(Verdict),
}

impl Data {
    fn decode(bytes: &[u8]) -> Option<Data> {
        if let Some(value) = find(bytes, 1) {
            return Some(Data::Value(value.to_vec()));
        }
        let verdict = find(bytes, 2)?;
        Some(Data::Verdict(Verdict { code: be32(find(verdict, 1)?)? as i32, chain: find(verdict, 2).map(text) }))
    }
}

/// A part of a rule: a match, a load into a register, an action.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Expression {
    /// "payload", "cmp", "limit"; empty where it could not be decoded.
    pub name: String,
    attributes: Vec<u8>,
}

impl Expression {
    fn decode(bytes: &[u8]) -> Expression {
        let name = find(bytes, 1).map(text).unwrap_or_default();
        Expression { name, attributes: find(bytes, 2).unwrap_or_default().to_vec() }
    }

    /// The expressions of an attribute that lists them (`NFTA_LIST_ELEM`).
    fn list(bytes: &[u8]) -> Vec<Expression> {
        attributes(bytes).filter(|a| a.0 == 1).map(|a| Expression::decode(a.1)).collect()
    }

    pub(crate) fn get(&self, kind: u16) -> Option<&[u8]> {
        find(&self.attributes, kind)
    }

    pub(crate) fn number(&self, kind: u16) -> Option<u32> {
        be32(self.get(kind)?)
    }

    pub(crate) fn long(&self, kind: u16) -> Option<u64> {
        be64(self.get(kind)?)
    }

    pub(crate) fn text(&self, kind: u16) -> Option<String> {
        self.get(kind).map(text)
    }

    pub(crate) fn data(&self, kind: u16) -> Option<Data> {
        Data::decode(self.get(kind)?)
    }

    /// The bytes of a value.
    pub(crate) fn value(&self, kind: u16) -> Option<Vec<u8>> {
        match self.data(kind)? {
            Data::Value(value) => Some(value),
            Data::Verdict(_) => None,
        }
    }

    /// Where a data register begins among the bytes of all of them: four have sixteen bytes (1 to
    /// 4), and the same bytes are sixteen of four (8 to 23).
    pub(crate) fn register(&self, kind: u16) -> Option<usize> {
        match self.number(kind)? as usize {
            n @ 1..=4 => Some((n - 1) * 16),
            n @ 8..=23 => Some((n - 8) * 4),
            _ => None,
        }
    }

    /// Whether an attribute names the register of verdicts.
    pub(crate) fn is_verdict(&self, kind: u16) -> bool {
        self.number(kind) == Some(0)
    }

    /// The expressions within, in one attribute or in a list: those of a `dynset`.
    pub(crate) fn inner(&self, one: u16, list: u16) -> Vec<Expression> {
        let single = self.get(one).map(Expression::decode);
        single.into_iter().chain(self.get(list).map(Expression::list).unwrap_or_default()).collect()
    }

    #[cfg(test)]
    pub(crate) fn new(name: &str, attributes: &[u8]) -> Expression {
        Expression { name: name.into(), attributes: attributes.to_vec() }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    pub handle: u64,
    pub expressions: Vec<Expression>,
}

/// A device that a chain is for, by its whole name or by how its name begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub name: String,
    pub is_prefix: bool,
}

impl Device {
    /// A name without its zero byte, or with an asterisk, is how names begin.
    fn decode(bytes: &[u8]) -> Device {
        let name = text(bytes);
        match name.strip_suffix('*') {
            Some(start) => Device { name: start.into(), is_prefix: true },
            None => Device { is_prefix: bytes.last() != Some(&0), name },
        }
    }

    pub(crate) fn is(&self, name: &str) -> bool {
        if self.is_prefix { name.starts_with(&self.name) } else { name == self.name }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hook {
    pub number: u32,
    pub priority: i32,
    /// Those of a chain at an ingress or egress; none: any.
    pub devices: Vec<Device>,
}

impl Hook {
    fn decode(bytes: &[u8]) -> Option<Hook> {
        let mut hook =
            Hook { number: be32(find(bytes, 1)?)?, priority: be32(find(bytes, 2)?)? as i32, devices: vec![] };
        hook.devices.extend(find(bytes, 3).map(Device::decode));
        for (kind, name) in find(bytes, 4).into_iter().flat_map(attributes) {
            let device = Device::decode(name);
            hook.devices.push(Device { is_prefix: device.is_prefix || kind != 1, ..device });
        }
        Some(hook)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Chain {
    /// None: only others jump to it.
    pub hook: Option<Hook>,
    /// "filter", "nat" or "route"; empty without a hook.
    pub kind: String,
    pub rules: Vec<Rule>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Element {
    pub key: Vec<u8>,
    /// The last key of an interval, where the element says so itself.
    pub last: Option<Vec<u8>>,
    pub flags: u32,
    pub data: Option<Data>,
}

impl Element {
    fn decode(bytes: &[u8]) -> Option<Element> {
        let value = |kind| match find(bytes, kind).and_then(Data::decode) {
            Some(Data::Value(value)) => Some(value),
            _ => None,
        };
        let flags = find(bytes, 3).and_then(be32).unwrap_or(0);
        let key = value(1);
        if key.is_none() && flags & CATCH_ALL == 0 {
            return None;
        }
        let data = find(bytes, 2).and_then(Data::decode);
        Some(Element { key: key.unwrap_or_default(), last: value(10), flags, data })
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Set {
    pub flags: u32,
    pub key_bytes: usize,
    /// Whether its elements are verdicts.
    pub has_verdicts: bool,
    /// How long an element stays unless it says so itself, in ms; 0: for ever.
    pub timeout_ms: u64,
    /// `NFT_OBJECT_*` of a map of objects.
    pub object: u32,
    /// What is evaluated when an element is found.
    pub expressions: Vec<String>,
    /// Where they were asked for.
    pub elements: Option<Vec<Element>>,
}

impl Set {
    /// Whether the elements matter: those of sets that were written into a rule, and verdicts.
    pub(crate) fn is_of_interest(&self) -> bool {
        self.has_verdicts || self.flags & SET_ANONYMOUS != 0
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    pub family: u8,
    pub name: String,
    pub is_dormant: bool,
    pub chains: BTreeMap<String, Chain>,
    pub sets: BTreeMap<String, Set>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ruleset {
    pub tables: Vec<Table>,
    /// Messages and elements that could not be decoded.
    pub broken: usize,
    /// There are more rules or elements than are read.
    pub is_too_large: bool,
    /// The indices of ipset's sets whose entries have MAC addresses.
    pub mac_sets: BTreeSet<u16>,
    /// Those of its lists of sets, which may have such sets.
    pub(super) set_lists: BTreeSet<u16>,
    pub(super) rules: usize,
    pub(super) elements: usize,
    /// The index of the table that was looked for last: messages of one table follow each other.
    pub(super) last: usize,
}

impl Ruleset {
    /// Whether rules ask sets of ipset (`-m set`).
    pub(crate) fn asks_ipset(&self) -> bool {
        let mut rules = self.tables.iter().flat_map(|table| table.chains.values()).flat_map(|chain| &chain.rules);
        rules.any(|rule| rule.expressions.iter().any(|e| e.name == "match" && e.text(1).as_deref() == Some("set")))
    }

    /// Takes in a message of a dump of ipset's sets, which begins with `struct nfgenmsg`.
    pub(crate) fn add_ipset(&mut self, body: &[u8]) {
        let find = |wanted| body.get(4..).and_then(|body| find(body, wanted));
        let index = find(IPSET_INDEX).and_then(|index| Some(u16::from_be_bytes(index.try_into().ok()?)));
        match (find(IPSET_TYPE).map(text), index) {
            // "hash:mac", "bitmap:ip,mac", "hash:ip,mac".
            (Some(kind), Some(index)) if kind.split([':', ',']).any(|part| part == "mac") => {
                self.mac_sets.insert(index);
            }
            (Some(kind), Some(index)) if kind.starts_with("list:") => {
                self.set_lists.insert(index);
            }
            (Some(_), Some(_)) => {}
            _ => self.broken += 1,
        }
    }

    /// To be called when all sets of ipset are there: which of them is in a list is not asked.
    pub(crate) fn finish_ipset(&mut self) {
        if !self.mac_sets.is_empty() {
            self.mac_sets.append(&mut self.set_lists);
        }
    }

    fn table(&mut self, family: u8, name: Option<&[u8]>) -> Option<&mut Table> {
        let name = text(name?);
        let is_it = |t: &Table| t.family == family && t.name == name;
        if !self.tables.get(self.last).is_some_and(is_it) {
            self.last = self.tables.iter().position(is_it)?;
        }
        self.tables.get_mut(self.last)
    }

    /// Takes in a message of a dump: tables first, then chains, rules, sets, elements. `kind` is
    /// the low byte of its type, `body` begins with `struct nfgenmsg`. Says whether there is room
    /// for more.
    pub(crate) fn add(&mut self, kind: u8, body: &[u8]) -> bool {
        if self.decode(kind, body).is_none() {
            self.broken += 1;
        }
        self.is_too_large |=
            self.rules > MOST_RULES || self.elements > MOST_ELEMENTS || self.tables.len() > MOST_TABLES;
        !self.is_too_large
    }

    fn decode(&mut self, kind: u8, body: &[u8]) -> Option<()> {
        let family = *body.first()?;
        let body = body.get(4..)?;
        let get = |wanted| find(body, wanted);
        match kind {
            NEWTABLE => {
                let flags = get(2).and_then(be32).unwrap_or(0);
                self.tables.push(Table {
                    family,
                    name: text(get(1)?),
                    is_dormant: flags & TABLE_DORMANT != 0,
                    chains: BTreeMap::new(),
                    sets: BTreeMap::new(),
                });
            }
            NEWCHAIN => {
                let hook = match get(4) {
                    Some(hook) => Some(Hook::decode(hook)?),
                    None => None,
                };
                let chain = Chain { hook, kind: get(7).map(text).unwrap_or_default(), rules: vec![] };
                self.table(family, get(1))?.chains.insert(text(get(3)?), chain);
            }
            NEWRULE => {
                let rule =
                    Rule { handle: be64(get(3)?)?, expressions: get(4).map(Expression::list).unwrap_or_default() };
                let chain = text(get(2)?);
                self.rules += 1;
                self.table(family, get(1))?.chains.get_mut(&chain)?.rules.push(rule);
            }
            NEWSET => {
                let number = |kind| get(kind).and_then(be32).unwrap_or(0);
                let one = get(17).map(Expression::decode);
                let all = one.into_iter().chain(get(18).map(Expression::list).unwrap_or_default());
                let set = Set {
                    flags: number(3),
                    key_bytes: number(5) as usize,
                    has_verdicts: number(6) == DATA_VERDICT,
                    timeout_ms: get(11).and_then(be64).unwrap_or(0),
                    object: number(15),
                    expressions: all.map(|e| e.name).collect(),
                    elements: None,
                };
                self.table(family, get(1))?.sets.insert(text(get(2)?), set);
            }
            NEWSETELEM => {
                let name = text(get(2)?);
                let set = self.table(family, get(1))?.sets.get_mut(&name)?;
                let elements = set.elements.get_or_insert_default();
                let mut count = 0;
                for (_, element) in get(3).into_iter().flat_map(attributes) {
                    elements.push(Element::decode(element)?);
                    count += 1;
                }
                self.elements += count;
            }
            // A dump has nothing else.
            _ => {}
        }
        Some(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// An attribute.
    pub(crate) fn put(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = (value.len() as u16 + 4).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    pub(crate) fn number(kind: u16, value: u32) -> Vec<u8> {
        put(kind, &value.to_be_bytes())
    }

    #[test]
    fn sets_with_mac_addresses_and_lists_beside_them_are_found_as_the_kernel_sends_them() {
        // As Linux 6.18 answers IPSET_CMD_LIST: the index is in network byte order, and its type
        // says so.
        let set = |name: &[u8], kind: &[u8], index: u16| {
            message(2, &[put(1, &[7]), put(2, name), put(3, kind), put(0x400b, &index.to_be_bytes())])
        };
        let [plain, list, mac] =
            [set(b"a\0", b"hash:ip\0", 0), set(b"l\0", b"list:set\0", 1), set(b"m\0", b"bitmap:ip,mac\0", 258)];
        let of = |messages: &[&Vec<u8>]| {
            let mut ruleset = Ruleset::default();
            messages.iter().for_each(|message| ruleset.add_ipset(message));
            ruleset.finish_ipset();
            (ruleset.mac_sets, ruleset.broken)
        };
        assert_eq!(of(&[&plain, &list]), (BTreeSet::new(), 0));
        assert_eq!(of(&[&plain, &list, &mac]), (BTreeSet::from([1, 258]), 0));
        assert_eq!(of(&[&message(2, &[put(1, &[7])])]), (BTreeSet::new(), 1));
    }

    fn message(family: u8, attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut body = vec![family, 0, 0, 0];
        body.extend(attributes.concat());
        body
    }

    /// `ip f forward handle 7: meta l4proto udp counter accept`, and a set of verdicts, as Linux
    /// 6.18 sends them.
    fn messages() -> Vec<(u8, Vec<u8>)> {
        let expression =
            |name: &[u8], data: &[Vec<u8>]| put(1 | 0x8000, &[put(1, name), put(2 | 0x8000, &data.concat())].concat());
        let verdict = put(2 | 0x8000, &number(1, 1));
        let rule = [
            expression(b"meta\0", &[number(2, 16), number(1, 1)]),
            expression(b"cmp\0", &[number(1, 1), number(2, 0), put(3 | 0x8000, &put(1, &[17]))]),
            expression(b"immediate\0", &[number(1, 0), put(2 | 0x8000, &verdict)]),
        ];
        let hook = [number(1, 2), number(2, 0), put(4 | 0x8000, &put(1, b"ta\0"))];
        let element = [put(1 | 0x8000, &put(1, &[6])), put(2 | 0x8000, &verdict), number(3, 0)];
        vec![
            (NEWTABLE, message(2, &[put(1, b"f\0"), number(2, 0)])),
            (
                NEWCHAIN,
                message(
                    2,
                    &[put(1, b"f\0"), put(3, b"forward\0"), put(4 | 0x8000, &hook.concat()), put(7, b"filter\0")],
                ),
            ),
            (
                NEWRULE,
                message(
                    2,
                    &[
                        put(1, b"f\0"),
                        put(2, b"forward\0"),
                        put(3, &7u64.to_be_bytes()),
                        put(4 | 0x8000, &rule.concat()),
                    ],
                ),
            ),
            (
                NEWSET,
                message(2, &[put(1, b"f\0"), put(2, b"__map0\0"), number(3, 9), number(5, 1), number(6, DATA_VERDICT)]),
            ),
            (
                NEWSETELEM,
                message(
                    2,
                    &[put(1, b"f\0"), put(2, b"__map0\0"), put(3 | 0x8000, &put(1 | 0x8000, &element.concat()))],
                ),
            ),
        ]
    }

    #[test]
    fn a_dump_is_read_as_what_it_says() {
        let mut ruleset = Ruleset::default();
        for (kind, body) in messages() {
            ruleset.add(kind, &body);
        }
        assert_eq!((ruleset.broken, ruleset.tables.len()), (0, 1));
        let table = &ruleset.tables[0];
        let chain = &table.chains["forward"];
        let hook = chain.hook.as_ref().unwrap();
        assert_eq!((hook.number, hook.priority, chain.kind.as_str()), (2, 0, "filter"));
        assert_eq!(hook.devices, [Device { name: "ta".into(), is_prefix: false }]);
        let rule = &chain.rules[0];
        assert_eq!(rule.handle, 7);
        let names: Vec<_> = rule.expressions.iter().map(|e| e.name.as_str()).collect();
        assert_eq!(names, ["meta", "cmp", "immediate"]);
        assert_eq!((rule.expressions[0].register(1), rule.expressions[1].value(3)), (Some(0), Some(vec![17])));
        let accept = Verdict { code: 1, chain: None };
        assert!(rule.expressions[2].is_verdict(1));
        assert_eq!(rule.expressions[2].data(2), Some(Data::Verdict(accept.clone())));
        let set = &table.sets["__map0"];
        assert!(set.has_verdicts && set.is_of_interest());
        let element = Element { key: vec![6], last: None, flags: 0, data: Some(Data::Verdict(accept)) };
        assert_eq!(set.elements.as_deref(), Some(&[element][..]));
    }

    #[test]
    fn a_message_that_is_cut_anywhere_breaks_nothing_and_is_counted_where_it_matters() {
        for cut in 0..messages().len() {
            let whole = messages()[cut].1.len();
            for length in 0..whole {
                let mut ruleset = Ruleset::default();
                for (n, (kind, body)) in messages().into_iter().enumerate() {
                    let bytes = if n == cut { &body[..length] } else { &body[..] };
                    ruleset.add(kind, bytes);
                }
                assert!(length > 4 || ruleset.broken > 0, "message {cut} cut to {length} bytes");
            }
        }
    }

    #[test]
    fn registers_of_both_sizes_share_their_bytes() {
        let at = |n: u32| Expression::new("meta", &number(1, n)).register(1);
        assert_eq!(
            [0, 1, 4, 5, 8, 9, 23, 24].map(at),
            [None, Some(0), Some(48), None, Some(0), Some(4), Some(60), None]
        );
    }

    #[test]
    fn a_device_is_named_whole_or_by_its_beginning() {
        assert!(Device::decode(b"ta\0").is("ta") && !Device::decode(b"ta\0").is("ta0"));
        assert!(Device::decode(b"ta").is("ta0") && Device::decode(b"ta*\0").is("ta0"));
        assert!(!Device::decode(b"ta*\0").is("tb"));
    }
}
