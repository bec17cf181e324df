//! Which rules judge each frame of a flow, and of which flows: all base chains that forwarded
//! frames pass are walked, once for each kind of flow.
//!
//! A kind of flow (`World`) fixes the family, the protocol and the state of the connection, as they
//! are for every frame that may be taken. So `ct state established accept` ends the walk for
//! established flows, and the rules behind it cannot judge them. A rule may ask for interfaces,
//! addresses and ports before it judges. These narrow the filter of the flows that it could judge.
//!
//! Everything is conservative. A match that is not understood may match, and does not end a walk.
//! An unknown expression judges each frame. An `accept` ends only the base chain that it is in.

use super::JudgingRule;
use super::compare::{Comparer, Comparison, Match};
use super::filter::{Filter, Filters, Slots};
use super::ruleset::{
    Chain, Data, Expression, Hook, INET, IPV4, IPV6, NETDEV, NFT_BREAK, NFT_CONTINUE, NFT_GOTO, NFT_JUMP, NFT_RETURN,
    Rule, Ruleset, Table, Verdict,
};
use super::value::{Cell, Registers, known, varying};
use super::world::{
    Loaded, NETWORK_HEADER, Port, Position, TRANSPORT_HEADER, World, ct, may_be_written, meta, payload,
};
use super::xt;
use std::collections::{BTreeMap, HashMap, HashSet};

/// The kernel's limit of jumps within jumps.
const DEPTH: usize = 16;
/// Most rules that are looked at, so that no ruleset keeps the controller from its work.
const MOST_STEPS: usize = 3_000_000;
/// An element of a set that stays at least this long, in ms, is renewed in time by a frame per
/// lease.
const LONG_MS: u64 = 20_000;
/// `NFT_OBJECT_*` that judge each frame: quota, limit, connlimit, synproxy.
const JUDGING_OBJECTS: [(u32, &str); 4] = [(2, "quota"), (4, "limit"), (5, "ct count"), (10, "synproxy")];
const LAST_OBJECT: u32 = 10;

/// How a rule, or a chain, goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    On,
    /// No flow of this kind comes further in this chain; whether some go back to where it was
    /// called.
    Ends {
        returns: bool,
    },
}

/// All walks, and what they found.
struct Survey<'a> {
    ruleset: &'a Ruleset,
    comparer: Comparer<'a>,
    all: Slots,
    rewrites_addresses: bool,
    /// Sets in whose elements rules put limits and the like: (number of the table, name).
    stateful: HashSet<(usize, String)>,
    /// By table, chain and handle: why, for each kind of flow that has a reason of its own.
    found: BTreeMap<(usize, String, u64), Vec<String>>,
    filters: Filters,
    steps: usize,
}

/// The walk through one base chain for one kind of flow.
struct Walk<'s, 'a> {
    survey: &'s mut Survey<'a>,
    number: usize,
    table: &'a Table,
    at: Position,
    world: World,
    /// Of chains that were walked already: whether some flows come back from them.
    walked: HashMap<(&'a str, Filter), bool>,
}

/// The rules that judge each frame of a flow between these interfaces, and the flows that they
/// could judge.
pub(crate) fn survey(ruleset: &Ruleset, ports: &[Port]) -> (Vec<JudgingRule>, Filters) {
    let mut survey = Survey {
        ruleset,
        comparer: Comparer { ports },
        all: Slots::of(ports.iter().map(|p| p.slot)),
        rewrites_addresses: rewrites_addresses(ruleset),
        stateful: stateful_sets(ruleset),
        found: BTreeMap::new(),
        filters: Filters::default(),
        steps: 0,
    };
    survey.run();
    let named = |((table, chain, handle), why): ((usize, String, u64), Vec<String>)| {
        let (table, why) = (&ruleset.tables[table], why.join(", "));
        JudgingRule { family: family_name(table.family).into(), table: table.name.clone(), chain, handle, why }
    };
    let mut rules: Vec<_> = survey.found.into_iter().map(named).collect();
    let is_too_large = survey.steps > MOST_STEPS || ruleset.is_too_large;
    for (is_so, why) in [
        (ruleset.broken > 0, "a part of the ruleset could not be decoded"),
        (is_too_large, "the ruleset is too large to be followed"),
    ] {
        if is_so {
            rules.push(JudgingRule { why: why.into(), ..JudgingRule::default() });
            survey.filters = Filters::all();
        }
    }
    (rules, survey.filters)
}

fn family_name(family: u8) -> &'static str {
    match family {
        INET => "inet",
        IPV4 => "ip",
        IPV6 => "ip6",
        NETDEV => "netdev",
        _ => "other",
    }
}

fn expressions(table: &Table) -> impl Iterator<Item = &Expression> {
    table.chains.values().flat_map(|c| &c.rules).flat_map(|r| &r.expressions)
}

/// Whether a rule writes addresses or ports by itself: then those of a flow say nothing of what a
/// rule sees.
fn rewrites_addresses(ruleset: &Ruleset) -> bool {
    ruleset.tables.iter().flat_map(expressions).any(|e| {
        let (header, offset) = (e.number(2), e.number(3).unwrap_or(0));
        let end = offset.saturating_add(e.number(4).unwrap_or(0));
        let is_address = header == Some(NETWORK_HEADER) && end > 10 || header == Some(TRANSPORT_HEADER) && offset < 4;
        e.name == "payload" && e.get(5).is_some() && is_address
    })
}

/// What only counts, or only notes.
fn is_counter(name: &str) -> bool {
    matches!(name, "counter" | "last")
}

fn stateful_sets(ruleset: &Ruleset) -> HashSet<(usize, String)> {
    let mut found = HashSet::new();
    for (number, table) in ruleset.tables.iter().enumerate() {
        let own = |set: &&str| table.sets[*set].expressions.iter().any(|e| !is_counter(e));
        found.extend(table.sets.keys().map(String::as_str).filter(own).map(|name| (number, name.to_owned())));
        let fed =
            expressions(table).filter(|e| e.name == "dynset" && e.inner(7, 10).iter().any(|e| !is_counter(&e.name)));
        found.extend(fed.filter_map(|e| e.text(1)).map(|name| (number, name)));
    }
    found
}

impl<'a> Survey<'a> {
    fn run(&mut self) {
        let ruleset = self.ruleset;
        for (number, table) in ruleset.tables.iter().enumerate().filter(|(_, t)| !t.is_dormant) {
            for (name, chain) in &table.chains {
                let Some(hook) = &chain.hook else { continue };
                let Some(mut at) = Position::of(table.family, hook) else { continue };
                // A translation is decided by a connection's first frame; that chain sees no other.
                if chain.kind == "nat" {
                    continue;
                }
                if self.rewrites_addresses {
                    (at.source_is_out, at.destination_is_out) = (None, None);
                }
                let here = self.by_devices(hook, at);
                if here.inputs.is_empty() || here.outputs.is_empty() {
                    continue;
                }
                let is_other = |w: &World| matches!((table.family, w.v6), (IPV4, true) | (IPV6, false));
                for world in World::all().into_iter().filter(|w| !is_other(w)) {
                    let mut walk = Walk { survey: &mut *self, number, table, at, world, walked: HashMap::new() };
                    walk.chain(name, chain, here, 0);
                }
            }
        }
    }

    /// The flows that come by a chain's devices.
    fn by_devices(&self, hook: &Hook, at: Position) -> Filter {
        let is_named = |p: &&Port| hook.devices.is_empty() || hook.devices.iter().any(|d| d.is(&p.name));
        let here = Slots::of(self.comparer.ports.iter().filter(is_named).map(|p| p.slot));
        Filter {
            inputs: if at.is_ingress { here } else { self.all },
            outputs: if at.is_egress { here } else { self.all },
            source_is_out: at.source_is_out.unwrap_or(false),
            destination_is_out: at.destination_is_out.unwrap_or(false),
            ..Filter::ALL
        }
    }
}

/// A rule while it is walked through.
struct Going {
    registers: Registers,
    /// The flows that come as far as here.
    filter: Filter,
    /// All of the flows that came to the rule do.
    is_certain: bool,
    /// Of those that came to the rule it is just these that do.
    is_exact: bool,
    /// These leave the chain.
    leave: bool,
    /// Some flows go back to where the chain was called.
    returns: bool,
}

impl Going {
    /// The flows that come as far leave the chain, or the walk.
    fn ends(&mut self, returns: bool) -> Next {
        self.returns |= returns;
        self.leave = self.is_exact;
        if self.is_certain { Next::Ends { returns } } else { Next::On }
    }
}

/// The flows of a filter without some of them, where that is one by interfaces; else all of them.
fn without(all: &Filter, some: &Filter) -> Filter {
    let (inputs, outputs) = (all.inputs.and(some.inputs.not()), all.outputs.and(some.outputs.not()));
    if (Filter { inputs: some.inputs, ..*all }) == *some {
        Filter { inputs, ..*all }
    } else if (Filter { outputs: some.outputs, ..*all }) == *some {
        Filter { outputs, ..*all }
    } else {
        *all
    }
}

impl<'a> Walk<'_, 'a> {
    /// Walks a chain for flows that come to it; says whether some come to its end, or return.
    fn chain(&mut self, name: &'a str, chain: &'a Chain, filter: Filter, depth: usize) -> bool {
        if let Some(returns) = self.walked.get(&(name, filter)) {
            return *returns;
        }
        let mut returns = false;
        let (mut next, mut flows) = (Next::On, filter);
        for rule in &chain.rules {
            self.survey.steps += 1;
            if self.survey.steps > MOST_STEPS {
                return true;
            }
            let (after, some_return, rest) = self.rule(name, rule, flows, depth);
            returns |= some_return;
            (next, flows) = (after, rest);
            if next != Next::On {
                break;
            }
        }
        let returns = returns | (next != Next::Ends { returns: false });
        if depth > 0 {
            self.walked.insert((name, filter), returns);
        }
        returns
    }

    fn judges(&mut self, chain: &str, rule: &Rule, why: String, filter: &Filter) {
        let all = self.survey.all;
        // Also for an interface that is attached later, unless the rule tells interfaces apart.
        let wide = |slots: Slots| if slots.holds(all) { Slots::ALL } else { slots };
        let filter = Filter { inputs: wide(filter.inputs), outputs: wide(filter.outputs), ..*filter };
        self.survey.filters.add(filter, self.world.bit());
        let reasons = self.survey.found.entry((self.number, chain.to_owned(), rule.handle)).or_default();
        if !reasons.contains(&why) {
            reasons.push(why);
        }
    }

    /// Walks a rule for flows that come to it: how it goes on, whether some return, and the flows
    /// that come to the next rule.
    fn rule(&mut self, chain: &'a str, rule: &'a Rule, filter: Filter, depth: usize) -> (Next, bool, Filter) {
        let mut going = Going {
            registers: Registers::new(),
            filter,
            is_certain: true,
            is_exact: true,
            leave: false,
            returns: false,
        };
        for expression in &rule.expressions {
            let outcome = self.expression(expression, &mut going);
            let step = match outcome {
                Outcome::On => continue,
                Outcome::Stops => break,
                Outcome::Matches(Match::Always) => continue,
                Outcome::Matches(Match::Never) => break,
                Outcome::Matches(Match::Only(some)) => {
                    (going.filter, going.is_certain) = (some, false);
                    continue;
                }
                Outcome::Matches(Match::Maybe(some)) => {
                    (going.filter, going.is_certain, going.is_exact) = (some, false, false);
                    continue;
                }
                Outcome::Matches(Match::Judges(why)) => {
                    self.judges(chain, rule, why, &going.filter);
                    (going.is_certain, going.is_exact) = (false, false);
                    continue;
                }
                Outcome::Acts(why) => {
                    self.judges(chain, rule, why, &going.filter);
                    continue;
                }
                Outcome::Decides(verdict) => self.verdict(&verdict, &mut going, depth),
                Outcome::Chooses(choices) => {
                    let mut next = Next::On;
                    let before = (going.filter, going.is_certain);
                    going.is_exact = false;
                    for (how, verdict) in choices {
                        (going.filter, going.is_certain) = before;
                        match how {
                            Match::Always => {}
                            Match::Only(some) | Match::Maybe(some) => (going.filter, going.is_certain) = (some, false),
                            Match::Judges(why) => {
                                self.judges(chain, rule, why, &going.filter);
                                going.is_certain = false;
                            }
                            Match::Never => continue,
                        }
                        next = self.verdict(&verdict, &mut going, depth);
                    }
                    next
                }
            };
            let rest = if going.leave { without(&filter, &going.filter) } else { filter };
            return (step, going.returns, rest);
        }
        (Next::On, going.returns, filter)
    }

    fn verdict(&mut self, verdict: &Verdict, going: &mut Going, depth: usize) -> Next {
        match verdict.code {
            NFT_CONTINUE | NFT_BREAK => Next::On,
            NFT_RETURN => going.ends(true),
            NFT_JUMP | NFT_GOTO => {
                let chains = &self.table.chains;
                let target = verdict.chain.as_deref().and_then(|name| chains.get_key_value(name));
                let returns = match target {
                    Some((name, target)) if depth < DEPTH => self.chain(name, target, going.filter, depth + 1),
                    _ => true,
                };
                if verdict.code == NFT_JUMP && returns { Next::On } else { going.ends(returns) }
            }
            _ => going.ends(false),
        }
    }

    /// What an expression does. Registers are those of `nf_tables_api.c`: what is too short is
    /// padded.
    fn expression(&self, e: &Expression, going: &mut Going) -> Outcome {
        self.evaluate(e, going).unwrap_or_else(|| Outcome::unknown(&e.name))
    }

    /// The same; nothing where the expression lacks what it must have.
    fn evaluate(&self, e: &Expression, going: &mut Going) -> Option<Outcome> {
        let registers = &mut going.registers;
        let filter = &going.filter;
        let by = self.survey.comparer;
        let outcome = match e.name.as_str() {
            "immediate" => match e.data(2)? {
                Data::Verdict(verdict) => Outcome::Decides(verdict),
                Data::Value(bytes) => {
                    registers.write_exact(e.register(1)?, &bytes);
                    Outcome::On
                }
            },
            "payload" => return self.payload(e, registers),
            "exthdr" => return self.extension(e, registers),
            "meta" | "ct" => return self.key(e, registers),
            "cmp" => {
                let data = e.value(3)?;
                let cells = registers.read(e.register(1)?, data.len());
                Outcome::Matches(by.compare(cells, Comparison::decode(e.number(2)?)?, &data, filter))
            }
            "range" => {
                let (first, last) = (e.value(3)?, e.value(4)?);
                let cells = registers.read(e.register(1)?, first.len());
                Outcome::Matches(by.range(cells, &first, &last, e.number(2)? == 0, filter))
            }
            "bitwise" => {
                let (from, to, length) = (e.register(1)?, e.register(2)?, e.number(3)? as usize);
                let cells = registers.read(from, length).to_vec();
                match (e.number(6).unwrap_or(0), e.value(4), e.value(5)) {
                    (0, Some(mask), Some(xor)) => {
                        let masks = mask.into_iter().zip(xor);
                        registers.write(to, cells.iter().zip(masks).map(|(c, (mask, xor))| c.masked(mask, xor)));
                    }
                    _ => {
                        // A shift, or of two registers.
                        let other = e.register(8).map(|r| registers.read(r, length).to_vec()).unwrap_or_default();
                        let what = varying(&cells).or_else(|| varying(&other));
                        let each = what.map_or(Cell::STABLE, Cell::varying);
                        registers.write(to, std::iter::repeat_n(each, cells.len()));
                    }
                }
                Outcome::On
            }
            "byteorder" => {
                let (from, to) = (e.register(1)?, e.register(2)?);
                let (length, size) = (e.number(4)? as usize, e.number(5)? as usize);
                let cells = registers.read(from, length).to_vec();
                if let (Some(bytes), 1..=8) = (known(&cells), size) {
                    // To and from the network's order is the same here.
                    let swap = |b: &[u8]| {
                        if cfg!(target_endian = "little") { b.iter().rev().copied().collect() } else { b.to_vec() }
                    };
                    registers.write_exact(to, &bytes.chunks(size).flat_map(swap).collect::<Vec<u8>>());
                } else {
                    let each = varying(&cells).map_or(Cell::STABLE, Cell::varying);
                    registers.write(to, std::iter::repeat_n(each, cells.len()));
                }
                Outcome::On
            }
            "lookup" => return self.look_up(e, going),
            "dynset" => return self.update(e, registers),
            "hash" => {
                let cells = e.register(1).map(|r| registers.read(r, e.number(3).unwrap_or(0) as usize));
                let each = cells.and_then(varying).map_or(Cell::STABLE, Cell::varying);
                registers.fill(e.register(2)?, each);
                Outcome::On
            }
            "numgen" => {
                registers.fill(e.register(1)?, Cell::varying("numgen"));
                Outcome::On
            }
            "tunnel" => {
                registers.fill(e.register(2)?, Cell::varying("tunnel"));
                Outcome::On
            }
            "rt" | "fib" | "osf" | "xfrm" => {
                registers.fill(e.register(1)?, Cell::STABLE);
                Outcome::Matches(Match::Maybe(*filter))
            }
            "socket" => {
                registers.fill(e.register(2)?, Cell::STABLE);
                Outcome::Matches(Match::Maybe(*filter))
            }
            // Known to see only the frames on the kernel's path, or seen when a flow is learned.
            "counter" | "last" | "notrack" | "flow_offload" | "masq" | "nat" | "redir" => Outcome::On,
            "reject" => Outcome::Decides(Verdict { code: 0, chain: None }),
            "limit" | "quota" | "inner" => Outcome::Matches(Match::Judges(e.name.clone())),
            "connlimit" => Outcome::Matches(Match::Judges("ct count".into())),
            "log" | "dup" => Outcome::Acts(e.name.clone()),
            "queue" | "fwd" | "synproxy" | "tproxy" => Outcome::Matches(Match::Judges(e.name.clone())),
            "objref" => {
                let of_map = e.text(4).map(|name| self.table.sets.get(&name).map_or(u32::MAX, |s| s.object));
                let object = e.number(1).or(of_map)?;
                let cells = e.register(3).zip(e.text(4)).and_then(|(at, name)| {
                    varying(registers.read(at, self.table.sets.get(&name).map_or(4, |s| s.key_bytes)))
                });
                match (JUDGING_OBJECTS.iter().find(|(n, _)| *n == object), cells) {
                    (Some((_, name)), _) => Outcome::Matches(Match::Judges((*name).into())),
                    (None, Some(what)) => Outcome::Matches(Match::Judges(format!("matches {what}"))),
                    (None, None) if object > LAST_OBJECT => return None,
                    (None, None) if e.register(3).is_some() => Outcome::Matches(Match::Maybe(*filter)),
                    (None, None) => Outcome::On,
                }
            }
            "match" => {
                let (name, revision) = (e.text(1)?, e.number(2).unwrap_or(0));
                let info = e.get(3).unwrap_or_default();
                if name == "set" {
                    return Some(Outcome::Matches(xt::set(revision, info, &self.survey.ruleset.mac_sets, filter)));
                }
                Outcome::Matches(xt::matches(self.world, self.at, &name, revision, info, filter))
            }
            "target" => {
                let name = e.text(1)?;
                match xt::target(&name) {
                    Some(why) => Outcome::Acts(why),
                    None if xt::ends(&name) => Outcome::Decides(Verdict { code: 0, chain: None }),
                    None => Outcome::On,
                }
            }
            _ => return None,
        };
        Some(outcome)
    }

    /// A load from the packet, or a write to it.
    fn payload(&self, e: &Expression, registers: &mut Registers) -> Option<Outcome> {
        let (header, offset, length) = (e.number(2)?, e.number(3)? as usize, e.number(4)? as usize);
        if e.get(5).is_some() {
            let written = registers.read(e.register(5)?, length).iter().enumerate();
            let judges = written.map(|(n, cell)| self.judges_write(*cell, header, offset.saturating_add(n)));
            return Some(judges.flatten().next().map_or(Outcome::On, Outcome::Acts));
        }
        let cells = (offset..offset.saturating_add(length.min(64))).map(|n| payload(self.world, self.at, header, n));
        registers.write(e.register(1)?, cells);
        Some(Outcome::On)
    }

    /// Why a byte that is written judges each frame, if it does.
    fn judges_write(&self, cell: Cell, header: u32, n: usize) -> Option<String> {
        let there = payload(self.world, self.at, header, n);
        // nft writes whole words: what it does not alter is what it read there.
        let is_same = there.varies != 0
            && (cell.varies, cell.known, cell.value, cell.what) == (there.varies, there.known, there.value, there.what);
        if is_same {
            None
        } else if !may_be_written(self.world, header, n) {
            Some(if there.what.is_empty() { "writes into the packet".into() } else { format!("writes {}", there.what) })
        } else {
            (cell.varies != 0).then(|| format!("writes what depends on {}", cell.what))
        }
    }

    /// IPv6's extension headers, IPv4's options, TCP's options. Of the first two frames that may be
    /// taken have none.
    fn extension(&self, e: &Expression, registers: &mut Registers) -> Option<Outcome> {
        const TCP_OPTION: u32 = 1;
        const IS_PRESENT: u32 = 1;
        if e.number(6).unwrap_or(0) == TCP_OPTION && self.world.number() == 6 {
            let what = "TCP options";
            if e.get(1).is_none() {
                return Some(Outcome::Acts(format!("writes {what}")));
            }
            return Some(Outcome::Matches(Match::Judges(format!("matches {what}"))));
        }
        match e.register(1) {
            Some(to) if e.number(5).unwrap_or(0) & IS_PRESENT != 0 => {
                registers.write_exact(to, &[0]);
                Some(Outcome::On)
            }
            _ => Some(Outcome::Stops),
        }
    }

    /// `meta` and `ct`: a load, or that something is set.
    fn key(&self, e: &Expression, registers: &mut Registers) -> Option<Outcome> {
        let key = e.number(2)?;
        let is_meta = e.name == "meta";
        if let Some(from) = e.register(if is_meta { 3 } else { 4 }) {
            if is_meta && key == meta::NFTRACE {
                return Some(Outcome::Acts("meta nftrace".into()));
            }
            let what = varying(registers.read(from, 4));
            return Some(what.map_or(Outcome::On, |what| Outcome::Acts(format!("sets {} by {what}", e.name))));
        }
        let to = e.register(1)?;
        match if is_meta { meta(self.world, self.at, key) } else { ct(self.world, self.at, key) } {
            Loaded::Exact(bytes) => registers.write_exact(to, &bytes),
            Loaded::Cells(cells) => registers.write(to, cells),
            Loaded::Each(cell) => registers.fill(to, cell),
            Loaded::Nothing => return Some(Outcome::Stops),
        }
        Some(Outcome::On)
    }

    fn look_up(&self, e: &Expression, going: &mut Going) -> Option<Outcome> {
        const INVERTED: u32 = 1;
        let name = e.text(1)?;
        let set = self.table.sets.get(&name)?;
        let cells = going.registers.read(e.register(2)?, set.key_bytes).to_vec();
        let filter = &going.filter;
        let by = self.survey.comparer;
        if self.survey.stateful.contains(&(self.number, name)) {
            return Some(Outcome::Matches(Match::Judges("a set whose elements have limits".into())));
        }
        if e.is_verdict(3) {
            let choices = by.candidates(&cells, set, filter).into_iter().filter_map(|(how, e)| match &e.data {
                Some(Data::Verdict(verdict)) => Some((how, verdict.clone())),
                _ => None,
            });
            return Some(Outcome::Chooses(choices.collect()));
        }
        if let Some(to) = e.register(3) {
            let each = varying(&cells).map_or(Cell::STABLE, Cell::varying);
            going.registers.fill(to, each);
        }
        Some(Outcome::Matches(by.is_in(&cells, set, e.number(5).unwrap_or(0) & INVERTED == 0, filter)))
    }

    /// Elements that a rule adds. It makes no difference whether one is added again, or its time is
    /// set again once per lease.
    fn update(&self, e: &Expression, registers: &Registers) -> Option<Outcome> {
        let set = self.table.sets.get(&e.text(1)?)?;
        if let Some(limit) = e.inner(7, 10).iter().find(|e| !is_counter(&e.name)) {
            return Some(Outcome::Matches(Match::Judges(limit.name.clone())));
        }
        if let Some(what) = varying(registers.read(e.register(4)?, set.key_bytes)) {
            return Some(Outcome::Matches(Match::Judges(format!("adds to a set by {what}"))));
        }
        let timeout_ms = e.long(6).filter(|ms| *ms > 0).unwrap_or(set.timeout_ms);
        if (1..LONG_MS).contains(&timeout_ms) {
            return Some(Outcome::Acts("adds to a set for a short time".into()));
        }
        Some(Outcome::Matches(Match::Always))
    }
}

/// What comes of an expression. One lives at a time, on the stack.
#[allow(clippy::large_enum_variant)]
enum Outcome {
    On,
    /// No frame goes further in this rule.
    Stops,
    Matches(Match),
    /// Something is done with each frame.
    Acts(String),
    Decides(Verdict),
    /// One of these, by a map.
    Chooses(Vec<(Match, Verdict)>),
}

impl Outcome {
    fn unknown(name: &str) -> Outcome {
        Outcome::Matches(Match::Judges(format!("the expression {name:?}, which is not known here")))
    }
}

#[cfg(test)]
mod tests {
    use super::super::ruleset::tests::{number, put};
    use super::super::ruleset::{Device, Element, SET_ANONYMOUS, Set};
    use super::super::world::Protocol;
    use super::*;

    const ESTABLISHED: usize = 0;
    const NEW: usize = 2;
    const ACCEPT: i32 = 1;
    const DROP: i32 = 0;

    fn expression(name: &str, attributes: &[Vec<u8>]) -> Expression {
        Expression::new(name, &attributes.concat())
    }

    fn load(name: &str, key: u32) -> Expression {
        expression(name, &[number(1, 1), number(2, key)])
    }

    fn packet(header: u32, offset: u32, length: u32) -> Expression {
        expression("payload", &[number(1, 1), number(2, header), number(3, offset), number(4, length)])
    }

    fn write(header: u32, offset: u32, length: u32) -> Expression {
        expression("payload", &[number(2, header), number(3, offset), number(4, length), number(5, 1)])
    }

    fn compare(operation: u32, data: &[u8]) -> Expression {
        expression("cmp", &[number(1, 1), number(2, operation), put(3, &put(1, data))])
    }

    fn mask(mask: &[u8], xor: &[u8]) -> Expression {
        let length = number(3, mask.len() as u32);
        expression("bitwise", &[number(1, 1), number(2, 1), length, put(4, &put(1, mask)), put(5, &put(1, xor))])
    }

    fn immediate(value: &[u8]) -> Expression {
        expression("immediate", &[number(1, 1), put(2, &put(1, value))])
    }

    fn verdict(code: i32, chain: &str) -> Expression {
        let chain = if chain.is_empty() { vec![] } else { put(2, format!("{chain}\0").as_bytes()) };
        let data = put(2, &[number(1, code as u32), chain].concat());
        expression("immediate", &[number(1, 0), put(2, &data)])
    }

    fn plain(name: &str) -> Expression {
        expression(name, &[])
    }

    fn iifname(name: &str) -> Vec<Expression> {
        let mut bytes = name.as_bytes().to_vec();
        bytes.resize(16, 0);
        vec![load("meta", meta::IIFNAME), compare(0, &bytes)]
    }

    /// `ct state STATES`.
    fn state(states: u32) -> Vec<Expression> {
        vec![load("ct", 0), mask(&states.to_ne_bytes(), &[0; 4]), compare(1, &[0; 4])]
    }

    fn udp() -> Vec<Expression> {
        vec![load("meta", meta::L4PROTO), compare(0, &[17])]
    }

    fn chain(hook: Option<(u32, i32)>, rules: Vec<Vec<Expression>>) -> Chain {
        let rules = (1..).zip(rules).map(|(handle, expressions)| Rule { handle, expressions }).collect();
        Chain {
            hook: hook.map(|(number, priority)| Hook { number, priority, devices: vec![] }),
            kind: "filter".into(),
            rules,
        }
    }

    fn table(family: u8, chains: Vec<(&str, Chain)>) -> Table {
        let chains = chains.into_iter().map(|(name, chain)| (name.to_owned(), chain)).collect();
        Table { family, name: "f".into(), is_dormant: false, chains, sets: BTreeMap::new() }
    }

    fn ports() -> [Port; 3] {
        let port = |slot, name: &str| Port { slot, index: slot + 10, name: name.into() };
        [port(0, "ta"), port(1, "tb"), port(2, "eth0")]
    }

    fn look(table: Table) -> (Vec<String>, Filters) {
        let (rules, filters) = survey(&Ruleset { tables: vec![table], ..Ruleset::default() }, &ports());
        (rules.into_iter().map(|r| r.to_string()).collect(), filters)
    }

    /// Of one forward chain.
    fn forward(rules: Vec<Vec<Expression>>) -> (Vec<String>, Filters) {
        look(table(INET, vec![("c", chain(Some((2, 0)), rules))]))
    }

    /// Of what kinds a flow without other restrictions is judged.
    fn worlds(filters: &Filters) -> u32 {
        filters.worlds(&Filter::ALL).unwrap_or(0)
    }

    fn bits(is_it: impl Fn(World) -> bool) -> u32 {
        World::all().into_iter().filter(|w| is_it(*w)).fold(0, |bits, w| bits | w.bit())
    }

    fn all(parts: &[&[Expression]]) -> Vec<Expression> {
        parts.concat()
    }

    #[test]
    fn rules_that_treat_all_frames_of_a_flow_alike_are_not_named() {
        let ttl = vec![packet(1, 8, 2), compare(0, &[64, 17]), verdict(DROP, "")];
        let set_ttl = vec![packet(1, 8, 2), mask(&[0, 0xff], &[63, 0]), write(1, 8, 2)];
        let set_id = vec![immediate(&[0, 7]), write(1, 4, 2)];
        let counted = all(&[&udp(), &[plain("counter"), verdict(ACCEPT, "")]]);
        let rules = vec![ttl, set_ttl, set_id, counted, vec![verdict(DROP, "")]];
        let found = look(table(IPV4, vec![("c", chain(Some((2, 0)), rules))]));
        assert_eq!(found, (vec![], Filters::default()));
    }

    #[test]
    fn a_rule_that_judges_is_named_with_the_flows_that_come_to_it() {
        let (rules, filters) = forward(vec![vec![plain("limit"), verdict(ACCEPT, "")]]);
        assert_eq!(rules, ["inet f c handle 1: limit"]);
        assert_eq!(worlds(&filters), bits(|_| true));
        let narrow = all(&[&iifname("ta"), &udp(), &[packet(2, 2, 2), compare(0, &[0, 53]), plain("log")]]);
        let (rules, filters) = forward(vec![narrow]);
        assert_eq!(rules, ["inet f c handle 1: log"]);
        let expected =
            Filter { inputs: Slots::of([0]), destination_ports: (53, 53), destination_is_out: true, ..Filter::ALL };
        assert_eq!(filters.sorted(), [(expected, bits(|w| w.protocol == Protocol::Udp))]);
        // Of an interface that is not attached nothing is taken.
        assert_eq!(forward(vec![all(&[&iifname("wlan0"), &[plain("log")]])]), (vec![], Filters::default()));
    }

    #[test]
    fn what_established_flows_never_come_to_does_not_judge_them() {
        let accept = |states| all(&[&state(states), &[verdict(ACCEPT, "")]]);
        let (rules, filters) = forward(vec![accept(6), vec![plain("limit")]]);
        assert_eq!((rules.len(), worlds(&filters)), (1, bits(|w| w.state >= NEW)));
        let (rules, filters) = forward(vec![accept(0x4f), vec![plain("limit")]]);
        assert_eq!((rules, filters), (vec![], Filters::default()));
        // A rule that only some of them meet ends nothing, except for those that just an interface
        // tells from the others.
        let on_port = |states| {
            let port = [packet(2, 2, 2), compare(0, &[0, 53])];
            all(&[&state(states), &udp(), &port, &[verdict(ACCEPT, "")]])
        };
        assert_eq!(worlds(&forward(vec![on_port(6), vec![plain("limit")]]).1), bits(|_| true));
        let accept_ta = all(&[&iifname("ta"), &[verdict(ACCEPT, "")]]);
        let (_, filters) = forward(vec![accept_ta, vec![plain("limit")]]);
        assert_eq!(filters.sorted(), [(Filter { inputs: Slots::of([1, 2]), ..Filter::ALL }, bits(|_| true))]);
        // Nor does it end another base chain.
        let chains =
            vec![("a", chain(Some((2, -1)), vec![accept(6)])), ("b", chain(Some((2, 0)), vec![vec![plain("limit")]]))];
        assert_eq!(worlds(&look(table(INET, chains)).1), bits(|_| true));
        // Before connection tracking there is no state.
        let raw = chain(Some((0, -300)), vec![accept(6), vec![plain("limit")]]);
        assert_eq!(worlds(&look(table(INET, vec![("c", raw)])).1), bits(|_| true));
    }

    #[test]
    fn jumps_gotos_and_returns_are_followed() {
        let accept = all(&[&state(6), &[verdict(ACCEPT, "")]]);
        let by = |code, target: Vec<Vec<Expression>>| {
            let rules = vec![vec![verdict(code, "t")], vec![plain("limit")]];
            worlds(&look(table(INET, vec![("c", chain(Some((2, 0)), rules)), ("t", chain(None, target))])).1)
        };
        let unestablished = bits(|w| w.state >= NEW);
        assert_eq!(by(NFT_JUMP, vec![accept.clone()]), unestablished);
        let returning = all(&[&state(2), &[verdict(NFT_RETURN, "")]]);
        assert_eq!(by(NFT_JUMP, vec![returning, accept.clone()]), bits(|w| w.state >= NEW || w.state == ESTABLISHED));
        assert_eq!(by(NFT_GOTO, vec![accept.clone()]), 0);
        // What judges in a chain that only some flows come to.
        let rules = vec![all(&[&iifname("ta"), &[verdict(NFT_JUMP, "t")]])];
        let (named, filters) =
            look(table(INET, vec![("c", chain(Some((2, 0)), rules)), ("t", chain(None, vec![vec![plain("log")]]))]));
        assert_eq!(named, ["inet f t handle 1: log"]);
        assert_eq!(filters.sorted(), [(Filter { inputs: Slots::of([0]), ..Filter::ALL }, bits(|_| true))]);
    }

    #[test]
    fn a_map_of_verdicts_is_followed_by_its_key() {
        let to = |code, chain: &str| match verdict(code, chain).data(2) {
            Some(Data::Verdict(verdict)) => Some(Data::Verdict(verdict)),
            _ => None,
        };
        let element = |key: u32, data| Element { key: key.to_ne_bytes().to_vec(), last: None, flags: 0, data };
        let set = Set {
            flags: SET_ANONYMOUS | 8,
            key_bytes: 4,
            has_verdicts: true,
            elements: Some(vec![element(2, to(ACCEPT, "")), element(8, to(NFT_JUMP, "t"))]),
            ..Set::default()
        };
        let look_up = expression("lookup", &[put(1, b"__map0\0"), number(2, 1), number(3, 0)]);
        let rules = vec![vec![load("ct", 0), look_up], vec![plain("quota")]];
        let mut whole =
            table(INET, vec![("c", chain(Some((2, 0)), rules)), ("t", chain(None, vec![vec![plain("limit")]]))]);
        whole.sets.insert("__map0".into(), set);
        let (named, filters) = look(whole);
        assert_eq!(named, ["inet f c handle 2: quota", "inet f t handle 1: limit"]);
        assert_eq!(worlds(&filters), bits(|w| w.state != ESTABLISHED));
    }

    #[test]
    fn chains_that_forwarded_frames_do_not_pass_are_left_out() {
        let judging = || vec![vec![plain("limit")]];
        let nat = Chain { kind: "nat".into(), ..chain(Some((0, -100)), judging()) };
        assert_eq!(look(table(IPV4, vec![("c", nat)])).0.len(), 0);
        for hook in [1, 3] {
            assert_eq!(look(table(INET, vec![("c", chain(Some((hook, 0)), judging()))])).0.len(), 0);
        }
        let dormant = Table { is_dormant: true, ..table(INET, vec![("c", chain(Some((2, 0)), judging()))]) };
        assert_eq!(look(dormant).0.len(), 0);
        assert_eq!(look(table(7, vec![("c", chain(Some((2, 0)), judging()))])).0.len(), 0);
        let (_, filters) = look(table(IPV4, vec![("c", chain(Some((4, 0)), judging()))]));
        assert_eq!(worlds(&filters), bits(|w| !w.v6));
    }

    #[test]
    fn chains_of_devices_are_for_flows_that_come_or_go_there() {
        let at = |family, number, names: &[&str]| {
            let devices = names.iter().map(|n| Device { name: (*n).into(), is_prefix: false }).collect();
            let hook = Some(Hook { number, priority: 0, devices });
            look(table(family, vec![("c", Chain { hook, ..chain(None, vec![vec![plain("dup")]]) })])).1.sorted()
        };
        let everything = bits(|_| true);
        assert_eq!(at(NETDEV, 0, &["ta"]), [(Filter { inputs: Slots::of([0]), ..Filter::ALL }, everything)]);
        assert_eq!(at(INET, 5, &["ta"]), [(Filter { inputs: Slots::of([0]), ..Filter::ALL }, everything)]);
        assert_eq!(at(NETDEV, 1, &["ta", "tb"]), [(Filter { outputs: Slots::of([0, 1]), ..Filter::ALL }, everything)]);
        assert_eq!(at(NETDEV, 1, &["other"]), []);
    }

    #[test]
    fn the_clamp_of_segment_sizes_in_handshakes_does_not_judge_and_other_looks_at_tcp_do() {
        let tcp = || vec![load("meta", meta::L4PROTO), compare(0, &[6])];
        let option =
            |kind| expression("exthdr", &[number(kind, 1), put(2, &[2]), number(3, 2), number(4, 2), number(6, 1)]);
        let syn = vec![packet(2, 13, 1), mask(&[2], &[0]), compare(1, &[0])];
        assert_eq!(forward(vec![all(&[&tcp(), &syn, &[option(7)]])]), (vec![], Filters::default()));
        let only_tcp = bits(|w| w.protocol == Protocol::Tcp);
        for (rule, why) in [
            (vec![option(7)], "writes TCP options"),
            (vec![option(1)], "matches TCP options"),
            (vec![packet(2, 13, 1), mask(&[8], &[0]), compare(1, &[0])], "matches TCP's flags"),
            (vec![packet(2, 14, 2), compare(2, &[1, 0])], "matches TCP's window"),
            (vec![packet(2, 4, 4), compare(0, &[1, 0, 0, 0])], "matches TCP's sequence numbers"),
            (vec![immediate(&[1, 0]), write(2, 14, 2)], "writes TCP's window"),
            (vec![packet(2, 20, 4), compare(0, b"GET ")], "matches TCP's options or payload"),
        ] {
            let (named, filters) = forward(vec![all(&[&tcp(), &rule])]);
            assert_eq!(named, [format!("inet f c handle 1: {why}")]);
            assert_eq!(worlds(&filters), only_tcp, "{why}");
        }
    }

    #[test]
    fn each_way_to_tell_frames_apart_judges() {
        let numgen = || vec![expression("numgen", &[number(1, 1)]), compare(0, &[0; 4])];
        for (rule, why) in [
            (numgen(), "matches numgen"),
            (vec![load("meta", meta::LEN), compare(4, &[0, 0, 1, 0])], "matches meta length"),
            (vec![load("meta", meta::PRANDOM), compare(2, &[1, 0, 0, 0])], "matches meta random"),
            (vec![load("ct", 15), compare(4, &[0; 8])], "matches ct bytes"),
            (vec![packet(0, 6, 6), compare(0, &[2; 6])], "matches the source's Ethernet address"),
            (vec![packet(1, 2, 2), compare(0, &[1, 0])], "matches IPv4's length"),
            (vec![packet(3, 0, 4), compare(0, &[0; 4])], "matches the payload"),
            (
                [numgen()[..1].to_vec(), vec![expression("meta", &[number(2, 3), number(3, 1)])]].concat(),
                "sets meta by numgen",
            ),
            (vec![immediate(&[1]), expression("meta", &[number(2, 12), number(3, 1)])], "meta nftrace"),
            (vec![expression("objref", &[number(1, 2), put(2, b"q\0")])], "quota"),
            (vec![expression("match", &[put(1, b"statistic\0")])], "matches -m statistic"),
            (vec![expression("target", &[put(1, b"LOG\0")])], "-j LOG"),
            (vec![plain("dup")], "dup"),
            (vec![plain("queue")], "queue"),
            (vec![plain("new")], "the expression \"new\", which is not known here"),
            // An expression without what it must have.
            (vec![plain("cmp")], "the expression \"cmp\", which is not known here"),
        ] {
            let (named, filters) = forward(vec![rule]);
            assert_eq!(named, [format!("inet f c handle 1: {why}")]);
            assert_ne!(worlds(&filters), 0, "{why}");
        }
        for object in [1, 3, 7] {
            let (named, _) = forward(vec![vec![expression("objref", &[number(1, object), put(2, b"o\0")])]]);
            assert!(named.is_empty(), "object {object}");
        }
    }

    #[test]
    fn elements_that_rules_add_judge_where_they_have_limits_or_a_short_time() {
        let update = |more: &[Vec<u8>]| {
            let expression = expression("dynset", &[&[put(1, b"s\0"), number(3, 1), number(4, 1)], more].concat());
            let rules = vec![vec![packet(1, 12, 4), expression], vec![packet(1, 12, 4), expression_of_set()]];
            let mut whole = table(IPV4, vec![("c", chain(Some((2, 0)), rules))]);
            whole.sets.insert("s".into(), Set { key_bytes: 4, ..Set::default() });
            look(whole).0
        };
        fn expression_of_set() -> Expression {
            expression("lookup", &[put(1, b"s\0"), number(2, 1)])
        }
        let timeout = |ms: u64| vec![put(6, &ms.to_be_bytes())];
        assert!(update(&[]).is_empty() && update(&timeout(60_000)).is_empty());
        assert_eq!(update(&timeout(1000)), ["ip f c handle 1: adds to a set for a short time"]);
        let limited = update(&[put(7, &[put(1, b"limit\0"), put(2, &[])].concat())]);
        assert_eq!(limited, ["ip f c handle 1: limit", "ip f c handle 2: a set whose elements have limits"]);
        assert!(update(&[put(7, &[put(1, b"counter\0"), put(2, &[])].concat())]).is_empty());
    }

    #[test]
    fn rules_that_write_addresses_leave_no_flow_out_by_its_address() {
        let judging = vec![packet(1, 12, 4), compare(0, &[10, 1, 0, 2]), plain("log")];
        let narrow = forward(vec![judging.clone()]).1;
        assert_eq!(worlds(&narrow), 0);
        let (_, wide) = forward(vec![vec![immediate(&[10, 1, 0, 9]), write(1, 12, 4)], judging]);
        assert_eq!(worlds(&wide) & bits(|w| !w.v6), bits(|w| !w.v6));
    }

    #[test]
    fn a_ruleset_that_is_not_understood_judges_everything() {
        let (rules, filters) = survey(&Ruleset { broken: 1, ..Ruleset::default() }, &ports());
        assert_eq!((rules.len(), filters), (1, Filters::all()));
        // Chains that jump to two others each, down to the limit of depth: each is walked once.
        let link = |n: usize| vec![vec![verdict(NFT_JUMP, &format!("c{}", n + 1))]; 2];
        let names: Vec<String> = (0..16).map(|n| format!("c{n}")).collect();
        let chains =
            names.iter().enumerate().map(|(n, name)| (name.as_str(), chain((n == 0).then_some((2, 0)), link(n))));
        assert_eq!(look(table(INET, chains.collect())).0.len(), 0);
    }
}
