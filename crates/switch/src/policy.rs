//! What the members of a network may exchange: isolation, rules, and mirrors.
//!
//! A network without any of it has no policy, and its frames pay nothing. With one, a frame between
//! two ports passes these steps; the first that applies decides:
//!
//! | step | passes | is dropped as |
//! | --- | --- | --- |
//! | the sender is a mirror's port | | `mirror_port` |
//! | one of the two ports is exempt (the gateway) | yes | |
//! | both ports are isolated, and not in one community | | `isolated` |
//! | no rule can apply to the two ports, and the policy is to allow | yes | |
//! | ARP, neighbour discovery, group membership | yes | |
//! | a connection that was let through, both directions; an ICMP error about one; later fragments of a packet | yes | |
//! | the first rule that applies, else the network's policy | if it allows | `denied` |
//! | no room for the new connection | | `connections_full` |
//!
//! # Connections
//! A connection is two addresses, their ports, the protocol, and the two ports of the switch. It is
//! remembered when a frame of it is allowed, and then its answers pass whatever the rules say of
//! that direction. Any TCP segment that a rule allows opens one, not only the first: connections
//! survive a restart of the daemon. When rules change, each connection is judged again at its next
//! frame.
//!
//! A frame of a connection that had one in the same direction since the last tick is not asked
//! again, neither here nor for the roles of its port ([`crate::guard::Roles`]): what both depend on
//! is the same in both frames (`Policy::is_recent`).
//!
//! A frame to a group opens no connection. Fragments pass once the first one did. Frames that hold
//! no IP are judged by the rules that name no protocol, port or address. IP whose headers do not
//! show in a frame's first 128 bytes passes only where nothing could be denied.

mod flows;
mod tuple;

use crate::drop::Reason;
use crate::guard::Roles;
use crate::mac::{PortNumber, Tick};
use crate::plain::{self, Plain};
use flows::{Direction, Flows, Found, Key};
use std::collections::HashMap;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use tuple::{Content, Kind, RST, Tuple};

pub use flows::{CAPACITY, PER_PORT};

/// What happens to a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// It passes.
    #[default]
    Allow,
    /// Its frames are dropped.
    Deny,
}

/// Who a side of a rule is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Who {
    /// The ports with this label: a member's name, a group's, or `outside`.
    Label(Arc<str>),
    /// Addresses with the same first bits.
    Prefix(IpAddr, u8),
}

/// Protocols of a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Protocol {
    /// Every one, and what is no IP.
    #[default]
    Any,
    /// ICMP of either family.
    Icmp,
    /// The one with this number.
    Number(u8),
}

impl Protocol {
    /// Whether all that it stands for has ports.
    pub fn has_ports(self) -> bool {
        matches!(self, Protocol::Number(number) if tuple::has_ports(number))
    }
}

/// One rule. Each list is of alternatives; an empty one stands for everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// What happens to the connections that the rule is about.
    pub action: Action,
    /// Who opens the connection.
    pub from: Vec<Who>,
    /// Who it is opened to.
    pub to: Vec<Who>,
    /// By which protocol.
    pub protocol: Protocol,
    /// Ports that it is opened to; only protocols with ports have any.
    pub ports: Vec<RangeInclusive<u16>>,
}

/// A port that gets a copy of what other ports send or receive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// Label of the ports whose frames are copied; every port's where it is empty.
    pub of: Vec<Arc<str>>,
    /// Label of the port that gets the copies.
    pub to: Arc<str>,
    /// Whether frames that those ports send are copied.
    pub sent: bool,
    /// Whether frames that those ports receive are copied.
    pub received: bool,
}

/// The policy of one network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// What happens to a connection that no rule is about.
    pub otherwise: Action,
    /// In this order; the first that applies decides.
    pub rules: Vec<Rule>,
    /// Ports that listen to others.
    pub mirrors: Vec<Mirror>,
}

impl Settings {
    /// Whether everything passes.
    pub fn is_empty(&self) -> bool {
        *self == Settings::default()
    }
}

/// Whom an isolated port can reach: every port that is not isolated, and these.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    /// The port is not isolated.
    #[default]
    Off,
    /// No isolated port.
    Alone,
    /// The isolated ports of the same community.
    Community(Arc<str>),
}

/// What a policy knows of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// Names that rules and mirrors use for it.
    pub names: Vec<Arc<str>>,
    /// Whom it can reach.
    pub isolation: Isolation,
    /// Neither rules nor isolation apply to it.
    pub exempt: bool,
}

impl Labels {
    fn matter(&self) -> bool {
        self.isolation != Isolation::Off
    }
}

/// Counts of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Frames that each rule decided on, in the order of the rules. The frames that follow in a
    /// connection are not among them.
    pub rules: Vec<u64>,
    /// Frames that no rule decided on.
    pub otherwise: u64,
    /// Connections that are remembered.
    pub connections: usize,
}

/// A set of ports.
#[derive(Clone, Debug, Default)]
struct Ports(Vec<u64>);

impl Ports {
    fn add(&mut self, port: PortNumber) {
        let at = usize::from(port) / 64;
        if self.0.len() <= at {
            self.0.resize(at + 1, 0);
        }
        self.0[at] |= 1 << (port % 64);
    }

    fn has(&self, port: PortNumber) -> bool {
        self.0.get(usize::from(port) / 64).is_some_and(|word| word & (1 << (port % 64)) != 0)
    }
}

/// One side of a rule, for the ports that there are.
#[derive(Debug)]
struct Side {
    any: bool,
    ports: Ports,
    prefixes: Vec<(u128, u32)>,
}

impl Side {
    fn is_about(&self, port: PortNumber, ip: u128) -> bool {
        self.any
            || self.ports.has(port)
            || self.prefixes.iter().any(|(base, bits)| (ip ^ base).leading_zeros() >= *bits)
    }

    /// Whether the side is about the port, whatever the address; `None` where the address decides.
    fn is_about_port(&self, port: PortNumber) -> Option<bool> {
        match self.any || self.ports.has(port) {
            true => Some(true),
            false if self.prefixes.is_empty() => Some(false),
            false => None,
        }
    }
}

#[derive(Debug)]
struct Compiled {
    from: Side,
    to: Side,
}

/// What is known of a port number.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// 0: not isolated; 1: alone; above: the number of its community.
    isolation: u16,
    exempt: bool,
    is_mirror: bool,
    is_mirrored: bool,
    /// Its row and column in `pairs`, plus one.
    place: u16,
}

/// Whether any rule can apply to frames between two ports, as far as it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pair {
    Unknown,
    /// Everything passes, both ways.
    Open,
    Judged,
}

/// Whether frames between two ports pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passes {
    Always,
    Never(Reason),
    /// It depends on the frame.
    IfAllowed,
}

/// What holds between two ports, whatever the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Relation {
    pub(crate) passes: Passes,
    /// Frames are copied to a mirror.
    pub(crate) is_mirrored: bool,
}

/// The most ports for which it is remembered which pairs are open.
const PAIRED_PORTS: usize = 1_024;

/// The policy of one network, for the ports that it has.
#[derive(Debug)]
pub(crate) struct Policy {
    settings: Settings,
    labels: HashMap<PortNumber, Labels>,
    known: Vec<Known>,
    compiled: Vec<Compiled>,
    pairs: Vec<Pair>,
    paired: usize,
    filters: bool,
    counts: Counts,
    flows: Flows,
    generation: u32,
    /// Of each mirror: the port that gets the copies, and the ports whose frames it gets.
    mirrors: Vec<(PortNumber, Ports, bool, bool)>,
}

impl Policy {
    /// A policy for ports with these labels; `None` where nothing is to be checked.
    pub(crate) fn new(settings: Settings, labels: &HashMap<PortNumber, Labels>, seed: u64) -> Option<Policy> {
        if settings.is_empty() && !labels.values().any(Labels::matter) {
            return None;
        }
        let filters = settings.otherwise == Action::Deny || !settings.rules.is_empty();
        let mut policy = Policy {
            settings,
            labels: labels.clone(),
            known: Vec::new(),
            compiled: Vec::new(),
            pairs: Vec::new(),
            paired: 0,
            filters,
            counts: Counts::default(),
            flows: Flows::new(if filters { CAPACITY } else { 0 }, seed),
            generation: 0,
            mirrors: Vec::new(),
        };
        policy.compile();
        policy.counts.rules = vec![0; policy.settings.rules.len()];
        Some(policy)
    }

    /// Takes over the connections of the policy before, which are judged by the new rules at their
    /// next frame.
    pub(crate) fn inherit(&mut self, before: Policy) {
        if self.filters && before.filters {
            self.flows = before.flows;
            self.generation = before.generation.wrapping_add(1);
            self.flows.set_members(self.labels.len());
        }
        if self.settings.rules == before.settings.rules {
            self.counts = before.counts;
        }
    }

    /// A port that comes, or whose labels change.
    pub(crate) fn join(&mut self, port: PortNumber, labels: Labels) {
        self.labels.insert(port, labels);
        self.generation = self.generation.wrapping_add(1);
        self.compile();
    }

    /// A port that goes, with its connections. Returns whether the policy still has a purpose.
    pub(crate) fn leave(&mut self, port: PortNumber) -> bool {
        self.labels.remove(&port);
        self.flows.remove_port(port);
        self.compile();
        !self.settings.is_empty() || self.labels.values().any(Labels::matter)
    }

    /// What was counted.
    pub(crate) fn counts(&self) -> Counts {
        Counts { connections: self.flows.len(), ..self.counts.clone() }
    }

    fn ports_of(&self, label: &str) -> Ports {
        let mut ports = Ports::default();
        for (port, _) in self.labels.iter().filter(|(_, labels)| labels.names.iter().any(|name| **name == *label)) {
            ports.add(*port);
        }
        ports
    }

    fn compile(&mut self) {
        let side = |who: &[Who]| {
            let mut side = Side { any: who.is_empty(), ports: Ports::default(), prefixes: Vec::new() };
            for who in who {
                match who {
                    Who::Label(label) => {
                        let ports = self.ports_of(label);
                        side.ports.0.resize(side.ports.0.len().max(ports.0.len()), 0);
                        side.ports.0.iter_mut().zip(ports.0).for_each(|(all, more)| *all |= more);
                    }
                    // Of a mapped IPv4 address the first 96 bits are the family.
                    Who::Prefix(ip, bits) => {
                        side.prefixes.push((tuple::mapped(*ip), u32::from(*bits) + if ip.is_ipv4() { 96 } else { 0 }))
                    }
                }
            }
            side
        };
        let compiled = self.settings.rules.iter().map(|rule| Compiled { from: side(&rule.from), to: side(&rule.to) });
        self.compiled = compiled.collect();
        let mut communities: Vec<Arc<str>> = Vec::new();
        let highest = self.labels.keys().copied().max().map_or(0, |port| usize::from(port) + 1);
        self.known = vec![Known::default(); highest];
        let mut order: Vec<_> = self.labels.keys().copied().collect();
        order.sort_unstable();
        for (place, port) in order.iter().enumerate() {
            let labels = &self.labels[port];
            let isolation = match &labels.isolation {
                Isolation::Off => 0,
                Isolation::Alone => 1,
                Isolation::Community(name) => {
                    let at = communities.iter().position(|known| known == name).unwrap_or_else(|| {
                        communities.push(name.clone());
                        communities.len() - 1
                    });
                    at as u16 + 2
                }
            };
            let place = if place < PAIRED_PORTS { place as u16 + 1 } else { 0 };
            self.known[usize::from(*port)] = Known { isolation, exempt: labels.exempt, place, ..Known::default() };
        }
        self.paired = order.len().min(PAIRED_PORTS);
        self.pairs = vec![Pair::Unknown; if self.filters { self.paired * self.paired } else { 0 }];
        self.mirrors.clear();
        for mirror in &self.settings.mirrors {
            let Some(to) = order.iter().copied().find(|port| self.ports_of(&mirror.to).has(*port)) else { continue };
            let mut of = Ports::default();
            for port in order.iter().filter(|port| **port != to) {
                if mirror.of.is_empty() || mirror.of.iter().any(|label| self.ports_of(label).has(*port)) {
                    of.add(*port);
                    self.known[usize::from(*port)].is_mirrored = true;
                }
            }
            self.known[usize::from(to)].is_mirror = true;
            self.mirrors.push((to, of, mirror.sent, mirror.received));
        }
        self.flows.set_members(order.len());
    }

    #[inline]
    fn known(&self, port: PortNumber) -> Known {
        self.known.get(usize::from(port)).copied().unwrap_or_default()
    }

    /// Whether the port gets only copies.
    #[inline]
    pub(crate) fn is_mirror(&self, port: PortNumber) -> bool {
        self.known(port).is_mirror
    }

    /// Calls `copy` for each port that is to get a copy of a frame from `from` to `to`.
    #[inline]
    pub(crate) fn mirror(&self, from: PortNumber, to: PortNumber, mut copy: impl FnMut(PortNumber)) {
        for (mirror, of, sent, received) in &self.mirrors {
            if *sent && of.has(from) || *received && of.has(to) {
                copy(*mirror);
            }
        }
    }

    /// Begins a batch.
    #[inline]
    pub(crate) fn begin(&mut self, now: Tick) {
        if self.filters {
            self.flows.sweep(now);
        }
    }

    /// What holds between two ports, whatever the frame.
    pub(crate) fn relation(&mut self, from: PortNumber, to: PortNumber) -> Relation {
        let (sender, receiver) = (self.known(from), self.known(to));
        Relation { passes: self.passes(from, to), is_mirrored: sender.is_mirrored || receiver.is_mirrored }
    }

    fn passes(&mut self, from: PortNumber, to: PortNumber) -> Passes {
        let (sender, receiver) = (self.known(from), self.known(to));
        if sender.exempt || receiver.exempt {
            return Passes::Always;
        }
        let apart = sender.isolation != receiver.isolation || sender.isolation == 1;
        if sender.isolation != 0 && receiver.isolation != 0 && apart {
            return Passes::Never(Reason::Isolated);
        }
        if !self.filters {
            return Passes::Always;
        }
        if sender.place != 0 && receiver.place != 0 {
            let at = (usize::from(sender.place) - 1) * self.paired + usize::from(receiver.place) - 1;
            if self.pairs[at] == Pair::Unknown {
                let open = self.is_open(from, to) && self.is_open(to, from);
                self.pairs[at] = if open { Pair::Open } else { Pair::Judged };
            }
            if self.pairs[at] == Pair::Open {
                return Passes::Always;
            }
        }
        Passes::IfAllowed
    }

    /// Why the frame that starts with `head` may not go from `from` to `to`, if it may not. One
    /// that is `shared` goes to a group.
    pub(crate) fn refuse(
        &mut self,
        now: Tick,
        (from, roles): (PortNumber, Roles),
        to: PortNumber,
        head: &[u8],
        shared: bool,
    ) -> Option<Reason> {
        match self.passes(from, to) {
            Passes::Always => None,
            Passes::Never(reason) => Some(reason),
            Passes::IfAllowed => self.judge(now, (from, roles), to, head, shared),
        }
    }

    /// Whether a frame of the same connection and direction, from the same port with the same
    /// roles, passed in this tick, under these rules, and whether one with these fields and TCP
    /// flags changes nothing about that. Both the rules and [`crate::guard::refuse`] look at
    /// nothing else of such a frame: addresses, protocol, ports and roles.
    #[inline(always)]
    pub(crate) fn is_recent(
        &self,
        now: Tick,
        (from, roles): (PortNumber, Roles),
        to: PortNumber,
        (plain, flags): (Plain, u8),
    ) -> bool {
        let direction = Direction { plain, from, to, roles };
        !tuple::kind_of(&plain, flags).changes_state() && self.flows.is_recent(now, self.generation, &direction)
    }

    /// For a change of what the roles of ports are about.
    pub(crate) fn forget_recent(&mut self) {
        self.flows.forget_all_recent();
    }

    /// Whether everything that `from` sends to `to` is allowed.
    fn is_open(&self, from: PortNumber, to: PortNumber) -> bool {
        for (rule, sides) in self.settings.rules.iter().zip(&self.compiled) {
            let about = match (sides.from.is_about_port(from), sides.to.is_about_port(to)) {
                (Some(false), _) | (_, Some(false)) => continue,
                (Some(true), Some(true)) => rule.protocol == Protocol::Any && rule.ports.is_empty(),
                _ => false,
            };
            match rule.action {
                Action::Deny => return false,
                Action::Allow if about => return true,
                Action::Allow => {}
            }
        }
        self.settings.otherwise == Action::Allow
    }

    /// As [`Policy::refuse`], for ports of which [`Policy::relation`] says that it depends on the
    /// frame. The roles of its port let the frame pass.
    pub(crate) fn judge(
        &mut self,
        now: Tick,
        (from, roles): (PortNumber, Roles),
        to: PortNumber,
        head: &[u8],
        shared: bool,
    ) -> Option<Reason> {
        if let Some((plain, flags)) = plain::read(head) {
            // The first frame of a connection is looked up again below.
            let kind = tuple::kind_of(&plain, flags);
            let direction = Direction { plain, from, to, roles };
            if self.flows.find_plain(now, self.generation, &direction, kind) == Found::Open {
                return None;
            }
        }
        self.judge_slowly(now, from, to, head, shared)
    }

    fn judge_slowly(
        &mut self,
        now: Tick,
        from: PortNumber,
        to: PortNumber,
        head: &[u8],
        shared: bool,
    ) -> Option<Reason> {
        let (tuple, kind) = match tuple::read(head) {
            Content::Link => return None,
            Content::Other => return self.verdict(from, to, None),
            // Its headers may be arranged so that only its receiver sees what it is.
            Content::Hidden => return (!self.is_open(from, to)).then_some(Reason::Denied),
            // The packet that it is about went the other way.
            Content::Error(_, Some(about)) if self.flows.has(now, self.generation, &Key::of(&about, to, from).0) => {
                return None;
            }
            Content::Error(tuple, _) => return self.verdict(from, to, Some(&tuple)),
            Content::Packet(tuple, kind) => (tuple, kind),
        };
        if let Kind::Later(id) = kind {
            let known = self.flows.has(now, self.generation, &Key::of_fragments(&tuple, from, to, id));
            return (!known).then_some(Reason::Denied);
        }
        let (key, from_low) = Key::of(&tuple, from, to);
        let reason = match self.flows.find(now, self.generation, &key, from_low, kind) {
            Found::Open => None,
            Found::Stale { forward } => {
                let again = match forward {
                    true => self.verdict(from, to, Some(&tuple)),
                    false => self.verdict(to, from, Some(&tuple.reversed())),
                };
                match again {
                    None => self.flows.renew(self.generation, &key),
                    Some(_) => self.flows.close(&key),
                }
                again
            }
            Found::Unknown => {
                let refused = self.verdict(from, to, Some(&tuple));
                let opens = !shared && !matches!(kind, Kind::Segment(flags) if flags & RST != 0);
                if refused.is_none() && opens && !self.flows.open(now, self.generation, key, from_low, from, kind) {
                    return Some(Reason::ConnectionsFull);
                }
                refused
            }
        };
        if let (None, Kind::First(id)) = (reason, kind) {
            let key = Key::of_fragments(&tuple, from, to, id);
            if !self.flows.open(now, self.generation, key, true, from, kind) {
                return Some(Reason::ConnectionsFull);
            }
        }
        reason
    }

    /// What the rules say of a new connection, or of a frame that is none.
    fn verdict(&mut self, from: PortNumber, to: PortNumber, tuple: Option<&Tuple>) -> Option<Reason> {
        let about = |(rule, sides): (&Rule, &Compiled)| match tuple {
            None => {
                rule.protocol == Protocol::Any
                    && rule.ports.is_empty()
                    && sides.from.is_about_port(from) == Some(true)
                    && sides.to.is_about_port(to) == Some(true)
            }
            Some(tuple) => {
                let protocol = match rule.protocol {
                    Protocol::Any => true,
                    Protocol::Icmp => matches!(tuple.protocol, tuple::ICMPV4 | tuple::ICMPV6),
                    Protocol::Number(number) => number == tuple.protocol,
                };
                let ports = || {
                    rule.ports.is_empty()
                        || tuple::has_ports(tuple.protocol) && rule.ports.iter().any(|p| p.contains(&tuple.to.port))
                };
                let sides = || sides.from.is_about(from, tuple.from.ip) && sides.to.is_about(to, tuple.to.ip);
                protocol && ports() && sides()
            }
        };
        let action = match self.settings.rules.iter().zip(&self.compiled).position(about) {
            Some(at) => {
                self.counts.rules[at] += 1;
                self.settings.rules[at].action
            }
            None => {
                self.counts.otherwise += 1;
                self.settings.otherwise
            }
        };
        (action == Action::Deny).then_some(Reason::Denied)
    }
}

#[cfg(test)]
#[path = "policy/tests.rs"]
mod tests;
