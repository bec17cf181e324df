//! What a changed fabric file means for a fabric that runs: which parts come, go, change and
//! restart. Pure.
//!
//! # Purpose
//! [`difference`] compares two [`Model`]s, part by part. A part is a section of the file with what
//! it comes to on this machine: a worker, a network with its uplink and forwards, a cell or VM with
//! its ports, a tap, a port or a link. [`Model::with`] applies one change. Applying all changes of
//! a difference to the old model gives the new one.
//!
//! # What is never done
//! A part that is equal in both models is in no change: nothing touches it. A change that the
//! running members could not follow is [`Action::Refuse`], with the reason. Then nothing is done at
//! all.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::RangeInclusive;

use tombolo_ivshmem::links::Config;
use tombolo_switch::class::Marking;
use tombolo_switch::limit::{Limit, Rates, Storm};
use tombolo_switch::policy::{self, Isolation, Mirror, Protocol, Rule, Who};
use tombolo_switch::vlan::Membership;

use crate::file::{self, Boot, Fabric, Forward, Guard, Image, Ip6, Network, Uplink, boot_text, class_word};
use crate::plan::{self, KernelUplink, MachinePlan, Plan, PortPlan};

/// A fabric file and what it comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// As in the file.
    pub fabric: Fabric,
    /// On this machine.
    pub plan: Plan,
}

/// A section of the file with what belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// `[worker.NAME]`
    Worker(file::Worker),
    /// `[network.NAME]` with its forwards and uplink.
    Network(Box<NetworkPart>),
    /// `[cell.NAME]` or `[vm.NAME]`.
    Machine(Box<MachinePart>),
    /// `[tap.NAME]`; without a port where it could not be made.
    Tap(Box<(file::Tap, Option<PortPlan>)>),
    /// `[port.NAME]`, likewise.
    Port(Box<(file::PortDecl, Option<PortPlan>)>),
    /// `[link.NAME]`
    Link(Box<(file::LinkDecl, Option<Config>)>),
    /// `[export.NAME]`
    Export(Box<file::Export>),
    /// `[import.NAME]`
    Import(Box<file::Import>),
    /// All of `[[rule]]` and `[[mirror]]`.
    Policy(Box<(Vec<file::RuleDecl>, Vec<file::MirrorDecl>)>),
}

/// A network with what leads out of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkPart {
    /// Its section.
    pub spec: Network,
    /// Its forwards, in the file's order.
    pub forwards: Vec<Forward>,
    /// The port of its uplink.
    pub uplink: Option<PortPlan>,
    /// The kernel's part of that.
    pub kernel: Option<KernelUplink>,
}

/// A machine with its process and ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MachinePart {
    /// Its section.
    pub spec: file::Machine,
    /// What is started for it.
    pub plan: Option<MachinePlan>,
    /// Its ports, in order.
    pub ports: Vec<PortPlan>,
}

/// What is done with a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Action {
    /// It is new.
    Add,
    /// It is not in the file any more.
    Remove,
    /// It goes on while it is changed.
    Change,
    /// It is ended and started again, as it is in the file now.
    Restart,
    /// It cannot be changed while the fabric runs: nothing is done.
    Refuse,
}

impl Action {
    /// As in reports.
    pub fn word(self) -> &'static str {
        match self {
            Action::Add => "add",
            Action::Remove => "remove",
            Action::Change => "change",
            Action::Restart => "restart",
            Action::Refuse => "refuse",
        }
    }
}

/// A key whose value differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyChange {
    /// As in the file.
    pub key: String,
    /// Its value in what runs; `None` where there was none.
    pub before: Option<String>,
    /// Its value in the file.
    pub after: Option<String>,
}

/// One part of a difference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Dotted path of the section, like "cell.web".
    pub section: String,
    /// What is done.
    pub action: Action,
    /// What differs; empty for what is new or gone.
    pub keys: Vec<KeyChange>,
    /// Why it is restarted or refused, and what comes with a change; empty where nothing is to be
    /// said.
    pub reason: String,
    /// As it runs.
    pub before: Option<Part>,
    /// As it is in the file.
    pub after: Option<Part>,
}

impl Change {
    /// Whether this is only what another network would mean for a member: none of its own keys
    /// differs.
    fn follows(&self, network: &str) -> bool {
        let networks = |part: &Part| -> Vec<String> {
            match part {
                Part::Machine(part) => part.spec.nics.iter().map(|nic| nic.network.clone()).collect(),
                Part::Tap(part) => vec![part.0.network.clone()],
                Part::Port(part) => vec![part.0.network.clone()],
                _ => vec![],
            }
        };
        let is_other = self.before.is_some() && self.keys.is_empty();
        is_other && self.after.as_ref().is_some_and(|part| networks(part).iter().any(|name| name == network))
    }
}

/// The changes to tell of: where one of a network is refused, nothing would become of what follows
/// from it for the network's members.
pub fn told(changes: &[Change]) -> impl Iterator<Item = &Change> {
    let refused: Vec<&str> = changes
        .iter()
        .filter(|change| change.action == Action::Refuse)
        .filter_map(|change| change.section.strip_prefix("network."))
        .collect();
    changes.iter().filter(move |change| !refused.iter().any(|network| change.follows(network)))
}

impl Model {
    /// All parts, by section.
    pub fn parts(&self) -> BTreeMap<String, Part> {
        let (fabric, plan) = (&self.fabric, &self.plan);
        let port = |name: &str| plan.ports.iter().find(|p| p.name == name).cloned();
        let mut out = BTreeMap::new();
        for worker in &fabric.workers {
            out.insert(format!("worker.{}", worker.name), Part::Worker(worker.clone()));
        }
        for spec in &fabric.networks {
            let part = NetworkPart {
                spec: spec.clone(),
                forwards: fabric.forwards.iter().filter(|f| f.network == spec.name).cloned().collect(),
                uplink: port(&plan::uplink_name(&spec.name)),
                kernel: plan.kernel.iter().find(|k| k.network.name == spec.name).cloned(),
            };
            out.insert(format!("network.{}", spec.name), Part::Network(Box::new(part)));
        }
        for spec in &fabric.machines {
            let part = MachinePart {
                spec: spec.clone(),
                plan: plan.machines.iter().find(|m| m.name == spec.name).cloned(),
                ports: (0..spec.nics.len()).filter_map(|i| port(&plan::port_name(&spec.name, i))).collect(),
            };
            out.insert(format!("{}.{}", spec.kind.word(), spec.name), Part::Machine(Box::new(part)));
        }
        for tap in &fabric.taps {
            out.insert(format!("tap.{}", tap.name), Part::Tap(Box::new((tap.clone(), port(&tap.name)))));
        }
        for spec in &fabric.ports {
            out.insert(format!("port.{}", spec.name), Part::Port(Box::new((spec.clone(), port(&spec.name)))));
        }
        for link in &fabric.links {
            let config = plan.links.iter().find(|c| c.name == format!("link:{}", link.name)).cloned();
            out.insert(format!("link.{}", link.name), Part::Link(Box::new((link.clone(), config))));
        }
        for export in &fabric.exports {
            out.insert(format!("export.{}", export.name), Part::Export(Box::new(export.clone())));
        }
        for import in &fabric.imports {
            out.insert(format!("import.{}", import.name), Part::Import(Box::new(import.clone())));
        }
        if !fabric.rules.is_empty() || !fabric.mirrors.is_empty() {
            out.insert("policy".into(), Part::Policy(Box::new((fabric.rules.clone(), fabric.mirrors.clone()))));
        }
        out
    }

    /// The model after a change. Parts keep their places; new ones come last.
    #[must_use]
    pub fn with(mut self, change: &Change) -> Model {
        match (&change.before, &change.after) {
            (_, Some(after)) => self.put(after),
            (Some(before), None) => self.take(before),
            (None, None) => {}
        }
        self
    }

    fn put(&mut self, part: &Part) {
        let (fabric, plan) = (&mut self.fabric, &mut self.plan);
        match part {
            Part::Worker(worker) => replace(&mut fabric.workers, |w| w.name == worker.name, [worker.clone()]),
            Part::Network(part) => {
                let name = &part.spec.name;
                replace(&mut fabric.networks, |n| n.name == *name, [part.spec.clone()]);
                replace(&mut fabric.forwards, |f| f.network == *name, part.forwards.clone());
                replace(&mut plan.ports, |p| p.name == plan::uplink_name(name), part.uplink.clone());
                replace(&mut plan.kernel, |k| k.network.name == *name, part.kernel.clone());
            }
            Part::Machine(part) => {
                let name = &part.spec.name;
                replace(&mut fabric.machines, |m| m.name == *name, [part.spec.clone()]);
                replace(&mut plan.machines, |m| m.name == *name, part.plan.clone());
                replace(&mut plan.ports, |p| p.machine.as_ref() == Some(name), part.ports.clone());
            }
            Part::Tap(part) => {
                replace(&mut fabric.taps, |t| t.name == part.0.name, [part.0.clone()]);
                replace(&mut plan.ports, |p| p.name == part.0.name, part.1.clone());
            }
            Part::Port(part) => {
                replace(&mut fabric.ports, |p| p.name == part.0.name, [part.0.clone()]);
                replace(&mut plan.ports, |p| p.name == part.0.name, part.1.clone());
            }
            Part::Link(part) => {
                replace(&mut fabric.links, |l| l.name == part.0.name, [part.0.clone()]);
                replace(&mut plan.links, |c| c.name == format!("link:{}", part.0.name), part.1.clone());
            }
            Part::Export(part) => replace(&mut fabric.exports, |e| e.name == part.name, [(**part).clone()]),
            Part::Import(part) => replace(&mut fabric.imports, |i| i.name == part.name, [(**part).clone()]),
            Part::Policy(part) => (fabric.rules, fabric.mirrors) = (**part).clone(),
        }
    }

    fn take(&mut self, part: &Part) {
        let (fabric, plan) = (&mut self.fabric, &mut self.plan);
        match part {
            Part::Worker(worker) => fabric.workers.retain(|w| w.name != worker.name),
            Part::Network(part) => {
                let name = &part.spec.name;
                fabric.networks.retain(|n| n.name != *name);
                fabric.forwards.retain(|f| f.network != *name);
                plan.ports.retain(|p| p.name != plan::uplink_name(name));
                plan.kernel.retain(|k| k.network.name != *name);
            }
            Part::Machine(part) => {
                let name = &part.spec.name;
                fabric.machines.retain(|m| m.name != *name);
                plan.machines.retain(|m| m.name != *name);
                plan.ports.retain(|p| p.machine.as_ref() != Some(name));
            }
            Part::Tap(part) => {
                fabric.taps.retain(|t| t.name != part.0.name);
                plan.ports.retain(|p| p.name != part.0.name);
            }
            Part::Port(part) => {
                fabric.ports.retain(|p| p.name != part.0.name);
                plan.ports.retain(|p| p.name != part.0.name);
            }
            Part::Link(part) => {
                fabric.links.retain(|l| l.name != part.0.name);
                plan.links.retain(|c| c.name != format!("link:{}", part.0.name));
            }
            Part::Export(part) => fabric.exports.retain(|e| e.name != part.name),
            Part::Import(part) => fabric.imports.retain(|i| i.name != part.name),
            Part::Policy(_) => (fabric.rules, fabric.mirrors) = (vec![], vec![]),
        }
    }
}

/// Puts `new` where the first of the old ones was, or last, and takes the old ones out.
fn replace<T>(list: &mut Vec<T>, is_old: impl Fn(&T) -> bool, new: impl IntoIterator<Item = T>) {
    let at = list.iter().position(&is_old).unwrap_or(list.len());
    list.retain(|item| !is_old(item));
    list.splice(at..at, new);
}

/// What has to be done so that a fabric that runs as `old` becomes `new`, in the order of sections.
pub fn difference(old: &Model, new: &Model) -> Vec<Change> {
    let (before, mut after) = (old.parts(), new.parts());
    let mut out = Vec::new();
    for (section, before) in before {
        let after = after.remove(&section);
        if Some(&before) == after.as_ref() {
            continue;
        }
        out.push(match after {
            None => Change {
                section,
                action: Action::Remove,
                keys: vec![],
                reason: String::new(),
                before: Some(before),
                after: None,
            },
            Some(after) => {
                let keys = keys(&before, &after);
                let (action, reason) = judge(old, &before, &after, &keys);
                Change { section, action, keys, reason, before: Some(before), after: Some(after) }
            }
        });
    }
    out.extend(after.into_iter().map(|(section, after)| Change {
        section,
        action: Action::Add,
        keys: vec![],
        reason: String::new(),
        before: None,
        after: Some(after),
    }));
    out.sort_by(|a, b| a.section.cmp(&b.section));
    // The prefix is the part of a network that guards of its members have.
    let has_prefix = |change: &&Change| change.keys.iter().any(|key| key.key == "ipv6");
    let with_prefix = out.iter().filter(has_prefix);
    let networks: Vec<String> =
        with_prefix.filter_map(|change| Some(change.section.strip_prefix("network.")?.to_string())).collect();
    for change in out.iter_mut().filter(|change| change.action == Action::Change && change.reason.is_empty()) {
        let of: Vec<_> = networks.iter().filter(|name| change.follows(name)).map(|n| format!("network.{n}")).collect();
        if !of.is_empty() {
            change.reason = format!("its guard follows {}", of.join(" and "));
        }
    }
    out
}

/// Keys of a network that its members have learned.
const FIXED: [&str; 4] = ["subnet", "gateway", "mtu", "worker"];
/// Keys of a member that change while it runs.
const LIVE: [&str; 11] =
    ["guard", "ip6", "allow", "storm", "rate", "class", "groups", "isolated", "vlan", "trunk", "native"];

/// The names of `keys`, for people.
fn named(keys: &[KeyChange]) -> String {
    keys.iter().map(|k| format!("`{}`", k.key)).collect::<Vec<_>>().join(", ")
}

/// How a part that differs is changed, and why so.
fn judge(old: &Model, before: &Part, after: &Part, keys: &[KeyChange]) -> (Action, String) {
    let beyond = |names: &[&str]| -> Vec<KeyChange> {
        keys.iter().filter(|k| !names.contains(&k.key.as_str())).cloned().collect()
    };
    match (before, after) {
        (Part::Worker(_), Part::Worker(_)) => (Action::Change, String::new()),
        (Part::Network(a), Part::Network(b)) => judge_network(old, a, b, keys),
        (Part::Machine(a), Part::Machine(b)) => {
            let same_ports = a.ports.len() == b.ports.len()
                && a.ports.iter().zip(&b.ports).all(|(a, b)| {
                    (&a.name, &a.network, &a.attachment, a.mtu) == (&b.name, &b.network, &b.attachment, b.mtu)
                });
            let live = [&LIVE[..], &["restart", "depends_on"]].concat();
            if a.plan == b.plan && same_ports && a.spec.nics == b.spec.nics {
                return (Action::Change, String::new());
            }
            // A cell is told its address when it starts.
            let is_told = |key: &&str| *key != "ip6" || b.spec.kind != file::MachineKind::Cell;
            let rest = beyond(&live.iter().filter(|key| is_told(key)).copied().collect::<Vec<_>>());
            let why = match rest.is_empty() {
                true => "what it is started with has changed: its links, or the programs of this machine".into(),
                false => format!("{}: read when it starts", named(&rest)),
            };
            (Action::Restart, why)
        }
        (Part::Tap(a), Part::Tap(b)) => {
            judge_port(&a.1, &b.1, &beyond(&[&LIVE[..], &["boot"]].concat()), "its device is made again")
        }
        (Part::Port(a), Part::Port(b)) => {
            judge_port(&a.1, &b.1, &beyond(&[&LIVE[..], &["ip", "boot"]].concat()), "its peer has to connect again")
        }
        // Then only its bridge is another one.
        (Part::Link(a), Part::Link(b)) if a.1 == b.1 => (Action::Change, "calls under way through it end".into()),
        (Part::Link(_), Part::Link(_)) => {
            (Action::Restart, "its memory is made again, and its machines start again with it".into())
        }
        (Part::Export(_), Part::Export(_)) | (Part::Import(_), Part::Import(_)) => {
            (Action::Restart, "calls under way through it end".into())
        }
        (Part::Policy(a), Part::Policy(b)) => {
            let rules = "connections that exist are judged by the new rules at their next frame";
            (Action::Change, if a.0 == b.0 { String::new() } else { rules.into() })
        }
        // A section has its kind in its path.
        _ => (Action::Restart, String::new()),
    }
}

fn judge_port(a: &Option<PortPlan>, b: &Option<PortPlan>, rest: &[KeyChange], what: &str) -> (Action, String) {
    match (a, b) {
        (Some(a), Some(b)) if (&a.network, &a.attachment, a.mtu) == (&b.network, &b.attachment, b.mtu) => {
            (Action::Change, String::new())
        }
        (None, _) => (Action::Restart, "it is missing: it could not be made, or was deleted".into()),
        _ if rest.is_empty() => (Action::Restart, what.into()),
        _ => (Action::Restart, format!("{}: {what}", named(rest))),
    }
}

fn judge_network(old: &Model, a: &NetworkPart, b: &NetworkPart, keys: &[KeyChange]) -> (Action, String) {
    let name = &a.spec.name;
    let members: Vec<&str> = members_of(&old.fabric, name);
    let moved = a.spec.gateway.is_some() && b.spec.gateway.is_none();
    let fixed: Vec<KeyChange> = keys
        .iter()
        .filter(|k| FIXED.contains(&k.key.as_str()) && !(k.key == "gateway" && (moved || k.before.is_none())))
        .cloned()
        .collect();
    let router = matches!((a.spec.router, b.spec.router), (Some(a), Some(b)) if a != b);
    if !fixed.is_empty() || router {
        let fixed = if fixed.is_empty() { "`router`".to_string() } else { named(&fixed) };
        return match members.is_empty() {
            true => (Action::Restart, format!("{fixed}: it has no members, and is made again")),
            false => (
                Action::Refuse,
                format!(
                    "{fixed}: its members ({}) run with the addresses and settings of before; \
                     `tombolo down` and `tombolo up` change it",
                    shortened(&members)
                ),
            ),
        };
    }
    let mut told = Vec::new();
    if uplink_differs(a, b) && matches!((&a.spec.uplink, &b.spec.uplink), (Uplink::User, Uplink::User)) {
        told.push("passt is started again: connections through the uplink end");
    } else if a.spec.uplink6 != b.spec.uplink6 && a.spec.uplink == b.spec.uplink {
        told.push("connections through its uplink for IPv6 may end");
    } else if a.spec.uplink != b.spec.uplink {
        told.push("connections through the uplink end");
        if a.spec.router != b.spec.router && !members.is_empty() {
            told.push("members learn of the router when they renew their leases");
        }
    }
    if a.spec.ipv6 != b.spec.ipv6 && a.spec.ipv6.is_some() {
        told.push("its IPv6 prefix is withdrawn");
    }
    if gateway_differs(&a.spec, &b.spec) {
        told.push("its gateway is made again, leases stay");
    }
    (Action::Change, told.join("; "))
}

/// Whether the gateway of a network has to be made again.
pub(crate) fn gateway_differs(a: &Network, b: &Network) -> bool {
    let told =
        |n: &Network| (n.gateway, n.router, n.dhcp, n.domain.clone(), n.dns.clone(), n.uplink != Uplink::None, n.ipv6);
    told(a) != told(b)
}

/// Whether the port of a network's uplink has to be made again.
pub(crate) fn uplink_differs(a: &NetworkPart, b: &NetworkPart) -> bool {
    a.uplink != b.uplink
}

fn members_of<'f>(fabric: &'f Fabric, network: &str) -> Vec<&'f str> {
    let machines = fabric.machines.iter().filter(|m| m.nics.iter().any(|n| n.network == network));
    let taps = fabric.taps.iter().filter(|t| t.network == network).map(|t| t.name.as_str());
    let ports = fabric.ports.iter().filter(|p| p.network == network).map(|p| p.name.as_str());
    machines.map(|m| m.name.as_str()).chain(taps).chain(ports).collect()
}

/// The first names of a list, and how many there are beyond.
fn shortened(names: &[&str]) -> String {
    const SHOWN: usize = 4;
    match names.len() {
        n if n > SHOWN => format!("{} and {} more", names[..SHOWN].join(", "), n - SHOWN),
        _ => names.join(", "),
    }
}

/// Collects keys that differ.
struct Keys(Vec<KeyChange>);

impl Keys {
    fn text(&mut self, key: &str, before: Option<String>, after: Option<String>) {
        if before != after {
            self.0.push(KeyChange { key: key.into(), before, after });
        }
    }

    fn say<T: PartialEq>(&mut self, key: &str, before: &T, after: &T, text: impl Fn(&T) -> Option<String>) {
        if before != after {
            self.0.push(KeyChange { key: key.into(), before: text(before), after: text(after) });
        }
    }

    fn plain<T: PartialEq + ToString>(&mut self, key: &str, before: &T, after: &T) {
        self.say(key, before, after, |value| Some(value.to_string()));
    }

    fn maybe<T: PartialEq + ToString>(&mut self, key: &str, before: &Option<T>, after: &Option<T>) {
        self.say(key, before, after, |value| value.as_ref().map(T::to_string));
    }

    fn list<T: PartialEq>(&mut self, key: &str, before: &[T], after: &[T], text: impl Fn(&T) -> String) {
        self.say(key, &before, &after, |list| {
            (!list.is_empty()).then(|| list.iter().map(&text).collect::<Vec<_>>().join(", "))
        });
    }

    /// Each item that goes and each that comes, with its number from 1; and whether the others have
    /// another order.
    fn items<T: PartialEq>(&mut self, key: &str, before: &[T], after: &[T], text: impl Fn(&T) -> String) {
        let not_in = |list: &[T], other: &[T]| -> Vec<(String, String)> {
            let numbered = (1..).zip(list).filter(|(_, item)| !other.contains(item));
            numbered.map(|(n, item): (usize, _)| (format!("{key} {n}"), text(item))).collect()
        };
        for (key, item) in not_in(before, after) {
            self.text(&key, Some(item), None);
        }
        for (key, item) in not_in(after, before) {
            self.text(&key, None, Some(item));
        }
        let kept =
            |list: &'_ [T], other: &[T]| list.iter().filter(|item| other.contains(item)).map(&text).collect::<Vec<_>>();
        let (before, after) = (kept(before, after), kept(after, before));
        if before != after {
            self.text(&format!("order of {key}s"), Some(before.join("; ")), Some(after.join("; ")));
        }
    }

    fn proof(&mut self, before: &Option<file::Proof>, after: &Option<file::Proof>) {
        self.say("tls", &before.is_some(), &after.is_some(), |tls| Some(tls.to_string()));
        let machine = |proof: &Option<file::Proof>| proof.as_ref().map(|proof| proof.machine.clone());
        self.text("machine", machine(before), machine(after));
        let keys = |proof: &Option<file::Proof>| proof.as_ref().map(|proof| proof.keys.display().to_string());
        let is_other = matches!((before, after), (Some(a), Some(b)) if a.keys == b.keys && a.digest != b.digest);
        let other = if is_other { ", other keys" } else { "" };
        self.text("keys", keys(before), keys(after).map(|keys| keys + other));
    }

    /// A value whose form in the file is not worth the words.
    fn other<T: PartialEq + Debug>(&mut self, key: &str, before: &T, after: &T) {
        self.say(key, before, after, |value| Some(format!("{value:?}")));
    }

    fn member(&mut self, (guard, ip6, traffic): Limits<'_>, (guard_b, ip6_b, traffic_b): Limits<'_>) {
        self.say("guard", &guard, &guard_b, |g| Some(g.word().into()));
        self.say("ip6", ip6, ip6_b, ip6_text);
        self.maybe("ip6_limit", &traffic.ip6_limit, &traffic_b.ip6_limit);
        self.say("allow", &traffic.roles, &traffic_b.roles, |r| {
            let all =
                [(r.router, "router-advertisements"), (r.dhcp_server, "dhcp-server"), (r.gateway, "gateway-addresses")];
            let named: Vec<&str> = all.iter().filter(|(is, _)| *is).map(|(_, word)| *word).collect();
            (!named.is_empty()).then(|| named.join(", "))
        });
        self.say("storm", &traffic.storm, &traffic_b.storm, storm_text);
        self.say("rate", &traffic.rates, &traffic_b.rates, rates_text);
        self.say("class", &traffic.marking, &traffic_b.marking, |marking| {
            (*marking != Marking::default()).then(|| class_word(*marking).into())
        });
        self.list("groups", &traffic.groups, &traffic_b.groups, String::clone);
        self.say("isolated", &traffic.isolation, &traffic_b.isolation, |isolation| match isolation {
            Isolation::Off => None,
            Isolation::Alone => Some("true".into()),
            Isolation::Community(name) => Some(name.to_string()),
        });
        let (vlans, vlans_b) = (vlan_texts(&traffic.vlans), vlan_texts(&traffic_b.vlans));
        for (key, (before, after)) in ["vlan", "trunk", "native"].into_iter().zip(vlans.iter().zip(&vlans_b)) {
            self.say(key, before, after, Clone::clone);
        }
    }
}

type Limits<'a> = (Guard, &'a Ip6, &'a file::Traffic);

fn who_text(who: &Who) -> String {
    match who {
        Who::Label(label) => label.to_string(),
        Who::Prefix(ip, bits) => format!("{ip}/{bits}"),
    }
}

/// A list of names that stands for all where it is empty.
fn listed(word: &str, names: impl Iterator<Item = String>) -> Option<String> {
    let names: Vec<_> = names.collect();
    (!names.is_empty()).then(|| format!("{word} {}", names.join(" or ")))
}

/// A rule as `rule add` takes it, in words: "deny from a or b to db tcp port 80".
fn rule_text(rule: &Rule, network: Option<&str>) -> String {
    let action = match rule.action {
        policy::Action::Allow => "allow",
        policy::Action::Deny => "deny",
    };
    let protocol = match rule.protocol {
        Protocol::Any => None,
        Protocol::Icmp => Some("icmp".into()),
        Protocol::Number(6) => Some("tcp".into()),
        Protocol::Number(17) => Some("udp".into()),
        Protocol::Number(number) => Some(format!("protocol {number}")),
    };
    let port = |range: &RangeInclusive<u16>| match range.start() == range.end() {
        true => range.start().to_string(),
        false => format!("{}-{}", range.start(), range.end()),
    };
    let parts = [
        Some(action.to_string()),
        listed("from", rule.from.iter().map(who_text)),
        listed("to", rule.to.iter().map(who_text)),
        protocol,
        listed("port", rule.ports.iter().map(port)),
        network.map(|name| format!("in {name}")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// A mirror in words: "of web to ids".
fn mirror_text(mirror: &Mirror, network: Option<&str>) -> String {
    let of = listed("of", mirror.of.iter().map(ToString::to_string)).unwrap_or("of all".into());
    let way = match (mirror.sent, mirror.received) {
        (true, false) => " what they send",
        (false, true) => " what they receive",
        _ => "",
    };
    let network = network.map_or_else(String::new, |name| format!(" in {name}"));
    format!("{of}{way} to {}{network}", mirror.to)
}

/// The keys `vlan`, `trunk` and `native`.
fn vlan_texts(vlans: &Option<Membership>) -> [Option<String>; 3] {
    let native = |vlans: &Membership| vlans.native.map(|vlan| vlan.to_string());
    match vlans {
        None => [None, None, None],
        Some(access @ Membership { trunk: None, .. }) => [native(access), None, None],
        Some(port @ Membership { trunk: Some(ranges), .. }) => {
            let texts = ranges.iter().map(|range| match range.start() == range.end() {
                true => range.start().to_string(),
                false => format!("{}-{}", range.start(), range.end()),
            });
            let list = texts.collect::<Vec<_>>().join(", ");
            [None, Some(if list.is_empty() { "[]".into() } else { list }), native(port)]
        }
    }
}

fn ip6_text(ip6: &Ip6) -> Option<String> {
    match ip6 {
        Ip6::Unsaid => None,
        Ip6::Any => Some("any".into()),
        Ip6::Only(list) => Some(list.iter().map(|p| format!("{}/{}", p.base, p.bits)).collect::<Vec<_>>().join(", ")),
    }
}

fn storm_text(storm: &Storm) -> Option<String> {
    let one = |name: &str, limit: &Option<Limit>| match limit {
        Some(limit) => format!("{name} {}", limit.per_second),
        None => format!("{name} off"),
    };
    let all = [("broadcast", &storm.broadcast), ("multicast", &storm.multicast), ("unknown", &storm.unknown)];
    Some(all.map(|(name, limit)| one(name, limit)).join(", "))
}

/// Bits per second as the file may have them: "100M".
fn bits_text(bits: u64) -> String {
    let units = [(1_000_000_000, "G"), (1_000_000, "M"), (1_000, "K")];
    let unit = units.into_iter().find(|(size, _)| bits.is_multiple_of(*size));
    unit.map_or_else(|| bits.to_string(), |(size, word)| format!("{}{word}", bits / size))
}

pub(crate) fn rates_text(rates: &Rates) -> Option<String> {
    let all: Vec<String> = rates
        .named()
        .flat_map(|(name, rate)| {
            let bits = rate.bits.map(|n| format!("{name} {}", bits_text(n)));
            let burst = rate.burst.map(|n| format!("{name}_burst {}", bits_text(n)));
            let frames = rate.frames.map(|n| format!("{name}_frames {n}"));
            [bits, burst, frames].into_iter().flatten()
        })
        .collect();
    (!all.is_empty()).then(|| all.join(", "))
}

/// What a forward is known by, and where it goes.
fn forward_texts(f: &Forward) -> (String, String) {
    (format!("forward {} {}", f.proto.word(), f.listen), f.target.with_port(f.port))
}

/// The keys in which two parts of the same section differ.
fn keys(before: &Part, after: &Part) -> Vec<KeyChange> {
    let mut out = Keys(vec![]);
    match (before, after) {
        (Part::Worker(a), Part::Worker(b)) => {
            out.maybe("cpu", &a.cpu, &b.cpu);
            out.plain("budget", &a.budget, &b.budget);
            out.plain("busy_poll_us", &a.busy_poll_us, &b.busy_poll_us);
        }
        (Part::Network(a), Part::Network(b)) => network_keys(&mut out, a, b),
        (Part::Machine(a), Part::Machine(b)) => machine_keys(&mut out, &a.spec, &b.spec),
        (Part::Tap(a), Part::Tap(b)) => {
            let (a, b) = (&a.0, &b.0);
            out.plain("network", &a.network, &b.network);
            out.plain("device", &a.device, &b.device);
            out.plain("adopt", &a.adopt, &b.adopt);
            out.maybe("netns", &a.netns, &b.netns);
            out.maybe("ip", &a.ip, &b.ip);
            out.plain("mac", &a.mac, &b.mac);
            out.plain("accept_ra", &a.accept_ra, &b.accept_ra);
            out.say("boot", &a.boot, &b.boot, |boot| boot.as_ref().map(boot_text));
            out.maybe("container", &a.container, &b.container);
            out.plain("monitor", &a.monitor, &b.monitor);
            out.member((a.guard, &a.ip6, &a.traffic), (b.guard, &b.ip6, &b.traffic));
        }
        (Part::Port(a), Part::Port(b)) => {
            let (a, b) = (&a.0, &b.0);
            out.plain("network", &a.network, &b.network);
            out.other("kind", &a.kind, &b.kind);
            out.maybe("mac", &a.mac, &b.mac);
            out.say("boot", &a.boot, &b.boot, |boot| boot.as_ref().map(boot_text));
            out.maybe("ip", &a.ip, &b.ip);
            out.maybe("container", &a.container, &b.container);
            out.maybe("netns", &a.netns, &b.netns);
            out.member((a.guard, &a.ip6, &a.traffic), (b.guard, &b.ip6, &b.traffic));
        }
        (Part::Link(a), Part::Link(b)) => {
            let (a, b) = (&a.0, &b.0);
            out.list("between", &a.between, &b.between, String::clone);
            out.plain("seats", &a.seats, &b.seats);
            out.plain("plain", &a.plain, &b.plain);
            out.plain("region", &a.region, &b.region);
            out.plain("rw", &a.rw, &b.rw);
            out.plain("protocol", &a.protocol, &b.protocol);
            out.plain("vectors", &a.vectors, &b.vectors);
            out.maybe("service", &a.service, &b.service);
            out.maybe("to", &a.to, &b.to);
            out.say("callers", &a.everybody, &b.everybody, |all| Some(if *all { "everybody" } else { "owner" }.into()));
        }
        (Part::Export(a), Part::Export(b)) => {
            out.list("services", &a.services, &b.services, String::clone);
            out.plain("listen", &a.listen, &b.listen);
            out.list("allow", &a.allow, &b.allow, String::clone);
            out.proof(&a.proof, &b.proof);
        }
        (Part::Import(a), Part::Import(b)) => {
            out.plain("service", &a.service, &b.service);
            out.plain("as", &a.as_name, &b.as_name);
            out.list("from", &a.from, &b.from, |(machine, address)| format!("{machine}={address}"));
            out.say("pick", &a.pick, &b.pick, |pick| Some(file::pick_word(*pick).into()));
            out.say("callers", &a.everybody, &b.everybody, |all| Some(if *all { "everybody" } else { "owner" }.into()));
            out.proof(&a.proof, &b.proof);
        }
        (Part::Policy(a), Part::Policy(b)) => {
            out.items("rule", &a.0, &b.0, |decl| rule_text(&decl.rule, decl.network.as_deref()));
            out.items("mirror", &a.1, &b.1, |decl| mirror_text(&decl.mirror, decl.network.as_deref()));
        }
        _ => {}
    }
    out.0
}

fn network_keys(out: &mut Keys, a: &NetworkPart, b: &NetworkPart) {
    let (n, m) = (&a.spec, &b.spec);
    out.plain("subnet", &n.subnet, &m.subnet);
    out.maybe("gateway", &n.gateway, &m.gateway);
    out.maybe("router", &n.router, &m.router);
    out.say("dhcp", &n.dhcp, &m.dhcp, |d| d.map(|d| format!("{} to {}, {} s", d.from, d.to, d.lease_s)));
    out.say("uplink", &n.uplink, &m.uplink, |u| {
        Some(match u {
            Uplink::Bridge { device } => format!("bridge {device}"),
            other => other.word().into(),
        })
    });
    out.plain("domain", &n.domain, &m.domain);
    out.plain("mtu", &n.mtu, &m.mtu);
    out.list("dns", &n.dns, &m.dns, ToString::to_string);
    out.plain("worker", &n.worker, &m.worker);
    out.say("ipv6", &n.ipv6, &m.ipv6, |p| Some(p.map_or("off".into(), |prefix| format!("{prefix}/64"))));
    out.say("boot", &n.boot, &m.boot, |boot| boot.as_ref().map(boot_text));
    out.say("uplink6", &n.uplink6, &m.uplink6, |way| Some(way.text()));
    out.say("policy", &n.policy, &m.policy, |policy| Some(format!("{policy:?}").to_lowercase()));
    out.say("bypass", &n.bypass, &m.bypass, |b| b.as_ref().map(|names| names.join(", ")));
    let texts = |part: &NetworkPart| part.forwards.iter().map(forward_texts).collect::<BTreeMap<_, _>>();
    let (before, after) = (texts(a), texts(b));
    for key in before.keys().chain(after.keys().filter(|key| !before.contains_key(*key))) {
        out.text(key, before.get(key).cloned(), after.get(key).cloned());
    }
}

fn machine_keys(out: &mut Keys, a: &file::Machine, b: &file::Machine) {
    let path = |path: &Option<std::path::PathBuf>| path.as_ref().map(|p| p.display().to_string());
    match (&a.boot, &b.boot) {
        (Boot::Cell(a), Boot::Cell(b)) => out.say("image", a, b, |image| {
            Some(match image {
                Image::App(app) => app.clone(),
                Image::Path(path) => path.display().to_string(),
            })
        }),
        (
            Boot::Vm { kernel: ka, initrd: ia, disks: da, cloud_init: ca },
            Boot::Vm { kernel: kb, initrd: ib, disks: db, cloud_init: cb },
        ) => {
            out.say("kernel", ka, kb, path);
            out.say("initrd", ia, ib, path);
            out.list("disk", da, db, |(path, format)| format!("{} ({format})", path.display()));
            out.say("cloud_init", ca, cb, path);
        }
        _ => {}
    }
    let boots = |m: &file::Machine| match &m.netboot {
        Some(boot) => Some(boot_text(boot)),
        None => m.from_network.then(|| "true".to_string()),
    };
    out.text("boot", boots(a), boots(b));
    let line = if a.kind == file::MachineKind::Cell { "args" } else { "cmdline" };
    out.say(line, &a.cmdline, &b.cmdline, |text| Some(format!("{text:?}")));
    let networks = |m: &file::Machine| m.nics.iter().map(|n| n.network.clone()).collect::<Vec<_>>();
    out.list("network", &networks(a), &networks(b), String::clone);
    let macs = |m: &file::Machine| m.nics.iter().map(|n| n.mac).collect::<Vec<_>>();
    out.list("mac", &macs(a), &macs(b), ToString::to_string);
    let ips = |m: &file::Machine| m.nics.iter().map(|n| n.ip).collect::<Vec<_>>();
    out.list("ip", &ips(a), &ips(b), |ip| ip.map_or_else(|| "none".into(), |ip| ip.to_string()));
    out.say("memory", &a.memory_mib, &b.memory_mib, |n| Some(format!("{n}M")));
    out.plain("cpus", &a.cpus, &b.cpus);
    out.say("machine", &a.machine, &b.machine, |m| Some(m.word().into()));
    out.other("accel", &a.accel, &b.accel);
    out.list("qemu", &a.qemu, &b.qemu, String::clone);
    out.list("xl", &a.xl, &b.xl, String::clone);
    out.plain("iommu", &a.iommu, &b.iommu);
    out.plain("agent", &a.agent, &b.agent);
    out.say("attach", &a.attach, &b.attach, |at| Some(at.word().into()));
    out.plain("region", &a.region, &b.region);
    out.plain("queues", &a.queues, &b.queues);
    out.other("restart", &a.restart, &b.restart);
    out.list("depends_on", &a.depends_on, &b.depends_on, String::clone);
    out.member((a.guard, &a.ip6, &a.traffic), (b.guard, &b.ip6, &b.traffic));
}

#[cfg(test)]
#[path = "difference_tests.rs"]
mod tests;
