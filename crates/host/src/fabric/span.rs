//! What the control plane says of the networks on other machines (`tombolo-span`, over the API),
//! and what becomes of it here.
//!
//! # Purpose
//! Which member is at which other machine goes to the tunnels ([`Directory`]) as places and as
//! addresses that are answered for, and to the gateway ([`Elsewhere`]) for names and leases.
//! Addresses that this machine has lost to another one go to the gateway and to the guards that
//! learn. This module is not the control plane: it takes whole lists per machine, and compares them
//! with what this machine has.
//!
//! # Invariants
//! - What this machine has wins: an entry whose MAC or IP address is in use here is kept and
//!   reported, but no question is answered with it. Frames for its MAC address still have their
//!   place.
//! - Of two machines that claim an address, the one whose list came or changed last has it.
//! - What was said stays until something else is said, however long the control plane is silent. A
//!   restarted daemon knows nothing, and is told again.
//! - A list that is equal to the one before it changes nothing.
//! - One machine takes no places from the others: where the members of all do not fit, those of the
//!   machines that have most are left out.
//!
//! # Conflicts
//! They are found when a list comes, when members or leases change, and every [`LOOK`] while there
//! are some. A guest can cause them, so there is at most one look per [`PAUSE`], and events are
//! rationed.
//!
//! # Limits
//! [`MAX_MACHINES`] machines of one network, [`MAX_MEMBERS`] members of one machine, [`MAX_PLACES`]
//! of one network, [`MAX_ADDRESSES`] addresses of one member, [`MAX_LOST`] lost addresses of one
//! network.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tombolo_port::vxlan::{MAX_ADDRESSES, MAX_PLACES, Places};
use tombolo_switch::frame::Mac as Bytes;
use tombolo_switch::gateway::{Elsewhere, Ipv6Config, Remote, is_host_name};
use tombolo_switch::guard::link_local;

use super::events::{Facts, Kind, Ration};
use super::{FabricError, Running};
use crate::api::report::{
    LostAnswer, LostRequest, RemoteConflict, RemoteConflicts, RemoteMachineReport, RemoteMemberReport, RemotesReport,
    RemotesRequest, SCHEMA, Span as Answer, SpanReport, SpanSummary,
};
use crate::file::{Mac, Network};
use crate::plan::Attachment;

/// Members that one machine may have in a network.
const MAX_MEMBERS: usize = 4096;
/// Machines of one network.
const MAX_MACHINES: usize = 1024;
/// Addresses of one network that were lost.
const MAX_LOST: usize = 16_384;
/// Longest name of a machine.
const MAX_MACHINE_BYTES: usize = 64;
/// How often is looked whether a conflict has ended.
const LOOK: Duration = Duration::from_secs(2);
/// The time between two looks, at least.
const PAUSE: Duration = Duration::from_millis(500);

/// A member on another machine.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    name: Option<String>,
    mac: Bytes,
    ips: Vec<IpAddr>,
}

/// What one machine has in a network.
#[derive(Clone, Debug)]
struct Machine {
    /// Its end of the tunnel.
    address: IpAddr,
    /// All that it was told to have.
    members: Vec<Member>,
    /// How many of them, from the first, have a place ([`Remotes::share_places`]).
    used: usize,
    /// Grows with each change of any machine.
    order: u64,
    /// When it was told last.
    told: Instant,
}

impl Machine {
    /// The members that have a place.
    fn placed(&self) -> &[Member] {
        &self.members[..self.used.min(self.members.len())]
    }
}

/// A part of an entry that is in use here.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Conflict {
    machine: String,
    member: Option<String>,
    mac: Bytes,
    /// `None`: it is the MAC address.
    ip: Option<IpAddr>,
    with: String,
}

impl Conflict {
    fn key(&self) -> (Bytes, Option<IpAddr>) {
        (self.mac, self.ip)
    }

    fn report(&self) -> RemoteConflict {
        let (member, mac) = (self.member.clone(), Mac(self.mac).to_string());
        RemoteConflict { member, mac, ip: self.ip, with: self.with.clone() }
    }
}

/// One network on the other machines.
#[derive(Debug, Default)]
struct Remotes {
    machines: BTreeMap<String, Machine>,
    lost: BTreeSet<IpAddr>,
    /// Those of `lost` that the file fixes, with who has them.
    fixed: BTreeMap<IpAddr, String>,
    conflicts: Vec<Conflict>,
}

/// All that the control plane has said.
#[derive(Debug)]
pub(crate) struct Span {
    networks: BTreeMap<String, Remotes>,
    report: Option<(Instant, SpanReport)>,
    /// Lists that were refused.
    refused: u64,
    order: u64,
    /// Something of this machine may have changed.
    pub(crate) news: Arc<Notify>,
    is_watched: bool,
    ration: Ration,
    /// Of events about members without a place, so that these take none from conflicts.
    cut_ration: Ration,
}

impl Default for Span {
    fn default() -> Self {
        let (networks, news, ration) = (BTreeMap::new(), Arc::default(), Ration::port());
        let cut_ration = Ration::port();
        Span { networks, report: None, refused: 0, order: 0, news, is_watched: false, ration, cut_ration }
    }
}

/// Who has an address on this machine.
#[derive(Clone, Debug)]
enum Use {
    Gateway,
    Router,
    Member(String),
    Lease { mac: Bytes, ip: IpAddr, name: Option<String> },
    Port(String),
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Use::Gateway => write!(f, "the gateway of this machine has it"),
            Use::Router => write!(f, "the router of this machine has it"),
            Use::Member(name) => write!(f, "the member {name} of this machine has it by the file"),
            Use::Lease { mac, ip, name: Some(name) } => {
                write!(f, "{name} ({}) of this machine has the lease of {ip}", Mac(*mac))
            }
            Use::Lease { mac, ip, name: None } => write!(f, "{} of this machine has the lease of {ip}", Mac(*mac)),
            Use::Port(name) => write!(f, "a member behind the port {name} of this machine sends with it"),
        }
    }
}

/// What this machine has in a network.
#[derive(Debug, Default)]
struct Local {
    macs: HashMap<Bytes, Use>,
    ips: HashMap<IpAddr, Use>,
}

impl Local {
    fn has(&mut self, mac: Option<Bytes>, ips: impl IntoIterator<Item = IpAddr>, who: &Use) {
        if let Some(mac) = mac {
            self.macs.entry(mac).or_insert_with(|| who.clone());
        }
        for ip in ips {
            self.ips.entry(ip).or_insert_with(|| who.clone());
        }
    }
}

fn invalid(at: &str, expected: &str, found: impl fmt::Display) -> FabricError {
    FabricError::Request(format!("{at}: expected {expected}, found {found}"))
}

/// An address of a station in `network`, or of another one.
fn station(text: &str, network: &Network) -> Option<IpAddr> {
    let ip: IpAddr = text.parse().ok()?;
    let is_one = match ip {
        IpAddr::V4(ip) => {
            let subnet = network.subnet;
            let edge = |n: u32| ip == subnet.nth(n);
            let class_e = ip.octets()[0] >= 240;
            !(ip.octets()[0] == 0
                || ip.is_multicast()
                || ip.is_loopback()
                || class_e
                || edge(0)
                || edge(subnet.hosts() + 1))
        }
        IpAddr::V6(ip) => {
            !(ip.is_unspecified() || ip.is_multicast() || ip.is_loopback() || ip.to_ipv4_mapped().is_some())
        }
    };
    is_one.then_some(ip)
}

fn stations(texts: &[String], at: &str, network: &Network) -> Result<Vec<IpAddr>, FabricError> {
    let one = |(n, text): (usize, &String)| {
        let wrong = || invalid(&format!("{at}[{n}]"), "the IP address of one station", format!("{text:?}"));
        station(text, network).ok_or_else(wrong)
    };
    texts.iter().enumerate().map(one).collect()
}

/// The members that a request names. A MAC address that is named twice is the first one's.
fn members(request: &RemotesRequest, network: &Network) -> Result<Vec<Member>, FabricError> {
    if request.members.len() > MAX_MEMBERS {
        return Err(invalid("members", &format!("at most {MAX_MEMBERS}"), request.members.len()));
    }
    let mut seen = HashSet::with_capacity(request.members.len());
    let mut out = Vec::with_capacity(request.members.len());
    for (n, member) in request.members.iter().enumerate() {
        let at = |key: &str| format!("members[{n}].{key}");
        let found = |text: &str| format!("{text:?}");
        if let Some(name) = member.name.as_ref().filter(|name| !is_host_name(name)) {
            let expected = "a name of 1 to 63 letters, digits and inner hyphens, or null";
            return Err(invalid(&at("name"), expected, found(name)));
        }
        let mac = Mac::parse(&member.mac);
        let expected = "the MAC address of one station, such as \"02:00:00:00:00:01\"";
        let mac = mac.ok_or_else(|| invalid(&at("mac"), expected, found(&member.mac)))?;
        if member.ips.len() > MAX_ADDRESSES {
            return Err(invalid(&at("ips"), &format!("at most {MAX_ADDRESSES}"), member.ips.len()));
        }
        let mut ips = stations(&member.ips, &at("ips"), network)?;
        let mut once = HashSet::new();
        ips.retain(|ip| once.insert(*ip));
        if seen.insert(mac) {
            out.push(Member { name: member.name.as_ref().map(|name| name.to_ascii_lowercase()), mac: mac.0, ips });
        }
    }
    Ok(out)
}

fn is_machine_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=MAX_MACHINE_BYTES).contains(&name.len()) && name.bytes().all(fits)
}

impl Remotes {
    /// All entries; those of the machine that was told last come first.
    fn entries(&self) -> impl Iterator<Item = (&str, &Machine, &Member)> {
        let mut machines: Vec<_> = self.machines.iter().collect();
        machines.sort_by_key(|(_, machine)| std::cmp::Reverse(machine.order));
        machines
            .into_iter()
            .flat_map(|(name, machine)| machine.placed().iter().map(move |m| (name.as_str(), machine, m)))
    }

    /// Leaves out members of the machines that have most, until all fit in [`MAX_PLACES`]: no
    /// machine has more than another one that lacks places. Returns the machines that have another
    /// number of places than before and lack some, and how many members are left out.
    fn share_places(&mut self) -> Vec<(String, usize)> {
        let mut counts: Vec<usize> = self.machines.values().map(|machine| machine.members.len()).collect();
        counts.sort_unstable();
        let (mut room, mut most) = (MAX_PLACES, usize::MAX);
        for (at, count) in counts.iter().enumerate() {
            let share = room / (counts.len() - at);
            if *count > share {
                most = share;
                break;
            }
            room -= count;
        }
        let share = |(name, machine): (&String, &mut Machine)| {
            let used = machine.members.len().min(most);
            let left_out = machine.members.len() - used;
            let is_new = std::mem::replace(&mut machine.used, used) != used;
            (is_new && left_out > 0).then(|| (name.clone(), left_out))
        };
        self.machines.iter_mut().filter_map(share).collect()
    }

    fn count(&self) -> usize {
        self.machines.values().map(|machine| machine.placed().len()).sum()
    }

    /// What of the entries is in use here.
    fn conflicts(&self, local: &Local) -> Vec<Conflict> {
        let mut out = Vec::new();
        for (name, machine) in &self.machines {
            for member in machine.placed() {
                let conflict = |ip, with: &Use| Conflict {
                    machine: name.clone(),
                    member: member.name.clone(),
                    mac: member.mac,
                    ip,
                    with: with.to_string(),
                };
                out.extend(local.macs.get(&member.mac).map(|with| conflict(None, with)));
                let ips = member.ips.iter().filter_map(|ip| Some((*ip, local.ips.get(ip)?)));
                out.extend(ips.map(|(ip, with)| conflict(Some(ip), with)));
            }
        }
        out
    }

    /// What a tunnel with these ends is told.
    fn places(&self, ends: &[IpAddr]) -> Places {
        let mine: HashSet<_> = self.conflicts.iter().map(Conflict::key).collect();
        let (mut places, mut placed, mut answered) = (Places::default(), HashSet::new(), HashSet::new());
        for (_, machine, member) in self.entries() {
            // Also of a machine behind another tunnel: what it has, none of the others has.
            let is_behind = ends.contains(&machine.address);
            if placed.insert(member.mac) && is_behind {
                places.place(member.mac, machine.address);
            }
            for ip in &member.ips {
                let is_ours = mine.contains(&(member.mac, None)) || mine.contains(&(member.mac, Some(*ip)));
                if answered.insert(*ip) && is_behind && !is_ours {
                    places.answer_for(*ip, member.mac);
                }
            }
        }
        places
    }

    /// What the gateway is told.
    fn elsewhere(&self) -> Elsewhere {
        let member = |(_, _, m): (_, _, &Member)| Remote { name: m.name.clone(), mac: m.mac, addresses: m.ips.clone() };
        Elsewhere::new(self.entries().map(member), self.lost.iter().copied())
    }

    fn conflicts_of(&self, machine: &str) -> RemoteConflicts {
        let own = self.conflicts.iter().filter(|conflict| conflict.machine == machine);
        RemoteConflicts { schema: SCHEMA, conflicts: own.map(Conflict::report).collect() }
    }

    fn report(&self, network: &str) -> RemotesReport {
        let mut conflicts: HashMap<(&str, Bytes), &str> = HashMap::new();
        for conflict in &self.conflicts {
            conflicts.entry((&conflict.machine, conflict.mac)).or_insert(&conflict.with);
        }
        let machine = |(name, machine): (&String, &Machine)| {
            let member = |m: &Member| {
                let conflict = conflicts.get(&(name.as_str(), m.mac)).map(|text| text.to_string());
                let (mac, used) = (Mac(m.mac).to_string(), conflict.is_none());
                RemoteMemberReport { name: m.name.clone(), mac, ips: m.ips.clone(), used, conflict }
            };
            RemoteMachineReport {
                machine: name.clone(),
                address: machine.address,
                age_s: machine.told.elapsed().as_secs_f64(),
                members: machine.placed().iter().map(member).collect(),
            }
        };
        RemotesReport {
            schema: SCHEMA,
            network: network.into(),
            machines: self.machines.iter().map(machine).collect(),
            lost: self.lost.iter().copied().collect(),
        }
    }
}

impl Running {
    /// Replaces what `machine` has in `network`.
    ///
    /// # Errors
    /// No such network, or a request that does not fit it.
    pub(crate) fn put_remotes(
        &mut self,
        network: &str,
        machine: &str,
        request: &RemotesRequest,
    ) -> Result<RemoteConflicts, FabricError> {
        self.replace_remotes(network, machine, request).inspect_err(|_| self.span.refused += 1)
    }

    fn replace_remotes(
        &mut self,
        network: &str,
        machine: &str,
        request: &RemotesRequest,
    ) -> Result<RemoteConflicts, FabricError> {
        let spec = self.spec.network(network).ok_or_else(|| self.unknown("network", network))?;
        if !is_machine_name(machine) {
            let expected = format!("a name of 1 to {MAX_MACHINE_BYTES} letters, digits, dots, hyphens and underscores");
            return Err(invalid("machine", &expected, format!("{machine:?}")));
        }
        let members = members(request, spec)?;
        let address: Option<IpAddr> = request.address.parse().ok();
        let ends: Vec<_> = self.tunnels(network).flat_map(|(_, ends)| ends).copied().collect();
        let Some(address) = address.filter(|address| ends.contains(address)) else {
            let found = format!("{:?}", request.address);
            let text = if ends.is_empty() {
                format!("address: the network {network} has no port of kind \"vxlan\" that leads to {found}")
            } else {
                let ends: Vec<_> = ends.iter().map(IpAddr::to_string).collect();
                format!(
                    "address: expected one of the remotes of {network}'s tunnel: {}; found {found}",
                    ends.join(", ")
                )
            };
            return Err(FabricError::Unfit(text));
        };
        let order = self.span.order + 1;
        let remotes = self.span.networks.entry(network.into()).or_default();
        if let Some(known) = remotes.machines.get_mut(machine)
            && known.address == address
            && known.members == members
        {
            known.told = Instant::now();
            return Ok(remotes.conflicts_of(machine));
        }
        if remotes.machines.len() >= MAX_MACHINES && !remotes.machines.contains_key(machine) {
            return Err(FabricError::State(format!(
                "the network {network} would have {} other machines, at most {MAX_MACHINES} fit",
                MAX_MACHINES + 1
            )));
        }
        self.span.order = order;
        // A number of places that stays is not told again.
        let known = remotes.machines.get(machine).filter(|known| known.used < known.members.len());
        let used = known.map_or(members.len(), |known| known.used);
        remotes.machines.insert(machine.into(), Machine { address, members, used, order, told: Instant::now() });
        self.share_places(network);
        self.settle_remotes(network)?;
        let none = RemoteConflicts { schema: SCHEMA, conflicts: vec![] };
        Ok(self.span.networks.get(network).map_or(none, |remotes| remotes.conflicts_of(machine)))
    }

    /// Divides the places of `network` again, and tells which machines lack some.
    fn share_places(&mut self, network: &str) {
        let Some(remotes) = self.span.networks.get_mut(network) else { return };
        for (name, left_out) in remotes.share_places() {
            if self.span.cut_ration.take(Instant::now()) {
                let facts = Facts::of(network).network(network).cause(&name);
                let text = format!(
                    "{name} has more members than its share of the {MAX_PLACES} places of {network}: {left_out} are left out"
                );
                self.events.add(Kind::Span, facts, &text);
            }
        }
    }

    /// Forgets what `machine` has in `network`, if anything is known of it.
    ///
    /// # Errors
    /// No such network.
    pub(crate) fn delete_remotes(&mut self, network: &str, machine: &str) -> Result<(), FabricError> {
        self.spec.network(network).ok_or_else(|| self.unknown("network", network))?;
        match self.span.networks.get_mut(network).and_then(|remotes| remotes.machines.remove(machine)) {
            Some(_) => {
                self.share_places(network);
                self.settle_remotes(network)
            }
            None => Ok(()),
        }
    }

    /// What is known of `network` on other machines.
    ///
    /// # Errors
    /// No such network.
    pub(crate) fn remotes(&self, network: &str) -> Result<RemotesReport, FabricError> {
        self.spec.network(network).ok_or_else(|| self.unknown("network", network))?;
        Ok(self.span.networks.get(network).unwrap_or(&Remotes::default()).report(network))
    }

    /// Replaces the list of addresses that this machine has lost to others.
    ///
    /// # Errors
    /// No such network, or what is no address.
    pub(crate) fn put_lost(&mut self, network: &str, request: &LostRequest) -> Result<LostAnswer, FabricError> {
        self.replace_lost(network, request).inspect_err(|_| self.span.refused += 1)
    }

    fn replace_lost(&mut self, network: &str, request: &LostRequest) -> Result<LostAnswer, FabricError> {
        let spec = self.spec.network(network).ok_or_else(|| self.unknown("network", network))?;
        if request.ips.len() > MAX_LOST {
            return Err(invalid("ips", &format!("at most {MAX_LOST}"), request.ips.len()));
        }
        let lost: BTreeSet<_> = stations(&request.ips, "ips", spec)?.into_iter().collect();
        let fixed = self.fixed(spec);
        let fixed: BTreeMap<_, _> = lost.iter().filter_map(|ip| Some((*ip, fixed.get(ip)?.clone()))).collect();
        let answer = LostAnswer { schema: SCHEMA, fixed: fixed.keys().copied().collect() };
        let remotes = self.span.networks.entry(network.into()).or_default();
        if remotes.lost == lost && remotes.fixed == fixed {
            return Ok(answer);
        }
        let fresh: Vec<_> = lost.difference(&remotes.lost).copied().collect();
        (remotes.lost, remotes.fixed) = (lost, fixed);
        let leases = self.networks.get(network).and_then(|net| net.gateway.as_ref()).map(|gateway| gateway.leases());
        let leases: HashMap<_, _> =
            leases.iter().flat_map(|all| &all.leases).map(|lease| (lease.address, lease)).collect();
        for ip in fresh {
            if !self.span.ration.take(Instant::now()) {
                continue;
            }
            let facts = Facts::of(network).network(network);
            let text = match (self.span.networks.get(network).and_then(|all| all.fixed.get(&ip)), leases.get(&ip)) {
                (Some(who), _) => format!("{ip} is in use on another machine too, and {who} keeps it here by the file"),
                (None, Some(lease)) => {
                    let name = lease.name.as_ref().map(|name| format!("{name}, ")).unwrap_or_default();
                    format!("{ip} was lost to another machine: the lease of {name}{} has ended", Mac(lease.mac))
                }
                (None, None) => format!("{ip} was lost to another machine"),
            };
            self.events.add(Kind::Span, facts, &text);
        }
        self.settle_remotes(network)?;
        Ok(answer)
    }

    /// Keeps the control plane's report of itself.
    pub(crate) fn put_span(&mut self, report: SpanReport) {
        self.span.report = Some((Instant::now(), report));
    }

    /// The control plane's last report, if one ever came.
    pub(crate) fn span_report(&self) -> Option<Answer> {
        let (came, report) = self.span.report.as_ref()?;
        Some(Answer { schema: SCHEMA, age_s: came.elapsed().as_secs_f64(), report: report.clone() })
    }

    /// The same in numbers, for `status`; `None` where nothing was ever said.
    pub(crate) fn span_summary(&self) -> Option<SpanSummary> {
        let remote: BTreeMap<_, _> = self.span.networks.iter().filter(|(_, all)| !all.machines.is_empty()).collect();
        if self.span.report.is_none() && remote.is_empty() && self.span.refused == 0 {
            return None;
        }
        let mut machines = BTreeMap::new();
        let report = self.span.report.as_ref();
        for machine in report.iter().flat_map(|(_, report)| &report.machines) {
            *machines.entry(machine.state.word().to_string()).or_insert(0) += 1;
        }
        Some(SpanSummary {
            age_s: report.map(|(came, _)| came.elapsed().as_secs_f64()),
            machines,
            members: remote.into_iter().map(|(name, all)| (name.clone(), all.count() as u64)).collect(),
            conflicts: report.map_or(0, |(_, report)| report.conflicts.len() as u64),
            lists_refused: self.span.refused,
            messages_refused: report.and_then(|(_, report)| report.counters.get("messages_refused")).map_or(0, |n| *n),
        })
    }

    /// What a user should know, in sentences.
    pub(crate) fn span_warnings(&self) -> impl Iterator<Item = String> {
        self.span.networks.iter().flat_map(|(network, all)| {
            all.fixed.iter().map(move |(ip, who)| {
                format!(
                    "network {network}: {ip} of {who} is in use on another machine as well, and the file fixes it here; \
                     give one of them another address"
                )
            })
        })
    }

    /// The tunnels of a network: their ports' names and their ends.
    fn tunnels(&self, network: &str) -> impl Iterator<Item = (&str, &[IpAddr])> {
        self.ports.values().filter(move |port| port.plan.network == network).filter_map(|port| {
            match &port.plan.attachment {
                Attachment::Vxlan(tunnel) => Some((port.plan.name.as_str(), &tunnel.remotes[..])),
                _ => None,
            }
        })
    }

    /// The addresses that the file gives to members and roles, with who has them.
    fn fixed(&self, spec: &Network) -> BTreeMap<IpAddr, String> {
        let mut out = BTreeMap::new();
        let roles = [("the gateway", spec.gateway), ("the router", spec.router)];
        out.extend(roles.into_iter().filter_map(|(who, ip)| Some((IpAddr::from(ip?), who.to_string()))));
        let six = spec.ipv6.map(Ipv6Config::new);
        out.extend(six.iter().map(|six| (IpAddr::from(six.address()), "the gateway".to_string())));
        for (_, _, ip, name) in self.spec.addresses().into_iter().filter(|(network, ..)| *network == spec.name) {
            out.insert(ip.into(), name.into());
            // DHCPv6 leases that member the address with this number.
            out.extend(six.iter().map(|six| (IpAddr::from(six.host(ip.to_bits().into())), name.to_string())));
        }
        for (name, _, ips) in self.spec.addresses6(&spec.name) {
            out.extend(ips.into_iter().map(|ip| (IpAddr::from(ip), name.clone())));
        }
        out
    }

    /// All that this machine has in a network.
    fn local(&self, spec: &Network) -> Result<Local, FabricError> {
        let mut local = Local::default();
        let derived = |role: &str| Mac::derived(&[&self.spec.name, &spec.name, role]).0;
        let own = |mac: &Bytes| IpAddr::from(link_local(mac));
        if let Some(ip) = spec.gateway {
            let (mac, six) =
                (derived("gateway"), spec.ipv6.map(|prefix| IpAddr::from(Ipv6Config::new(prefix).address())));
            local.has(Some(mac), [IpAddr::from(ip), own(&mac)].into_iter().chain(six), &Use::Gateway);
        }
        if let Some(ip) = spec.router {
            let (mac, six) = (derived("router"), spec.router6().map(IpAddr::from));
            local.has(Some(mac), [IpAddr::from(ip), own(&mac)].into_iter().chain(six), &Use::Router);
        }
        for (_, mac, ip, name) in self.spec.addresses().into_iter().filter(|(network, ..)| *network == spec.name) {
            local.has(mac.map(|mac| mac.0), [IpAddr::from(ip)], &Use::Member(name.into()));
        }
        for (name, mac, ips) in self.spec.addresses6(&spec.name) {
            local.has(mac.map(|mac| mac.0), ips.into_iter().map(IpAddr::from), &Use::Member(name));
        }
        let Some(net) = self.networks.get(&spec.name) else { return Ok(local) };
        for lease in net.gateway.as_ref().map(|gateway| gateway.leases()).unwrap_or_default().leases {
            let (mac, ip) = (lease.mac, lease.address);
            local.has(Some(mac), [ip], &Use::Lease { mac, ip, name: lease.name });
        }
        let Some((index, worker)) = self.worker_of(&spec.name) else { return Ok(local) };
        let is_member = |plan: &crate::plan::PortPlan| !matches!(plan.attachment, Attachment::Vxlan(_));
        let ports = self.ports.values().filter(|port| port.worker == index && port.plan.network == spec.name);
        let names: HashMap<_, _> =
            ports.filter(|port| is_member(&port.plan)).map(|port| (port.token.0, &port.plan.name)).collect();
        for entry in worker.thread.handle().macs(net.id)? {
            if let Some(name) = names.get(&u32::from(entry.port)) {
                local.has(Some(entry.address.bytes()), [], &Use::Port(name.to_string()));
            }
        }
        Ok(local)
    }

    /// Compares what was said of `network` with what this machine has, and tells the tunnels, the
    /// gateway and the guards what is new for them.
    fn settle_remotes(&mut self, network: &str) -> Result<(), FabricError> {
        let Some(spec) = self.spec.network(network).cloned() else {
            self.span.networks.remove(network);
            return Ok(());
        };
        let Some(remotes) = self.span.networks.get(network) else { return Ok(()) };
        let local = if remotes.machines.is_empty() { Local::default() } else { self.local(&spec)? };
        let fixed = if remotes.lost.is_empty() { BTreeMap::new() } else { self.fixed(&spec) };
        let Some(remotes) = self.span.networks.get_mut(network) else { return Ok(()) };
        remotes.fixed = remotes.lost.iter().filter_map(|ip| Some((*ip, fixed.get(ip)?.clone()))).collect();
        let conflicts = remotes.conflicts(&local);
        let before = std::mem::replace(&mut remotes.conflicts, conflicts);
        let before: HashSet<_> = before.iter().map(|c| (&c.machine, c.key())).collect();
        for conflict in remotes.conflicts.iter().filter(|c| !before.contains(&(&c.machine, c.key()))) {
            if !self.span.ration.take(Instant::now()) {
                break;
            }
            let (mac, machine) = (Mac(conflict.mac), &conflict.machine);
            let what = conflict.ip.map_or_else(|| mac.to_string(), |ip| ip.to_string());
            let who = conflict.member.as_ref().map_or_else(|| mac.to_string(), |name| format!("{name} ({mac})"));
            let facts = Facts::of(network).network(network).cause(&conflict.with);
            self.events.add(Kind::Span, facts, &format!("{what} of {who} on the machine {machine} is in use here too"));
        }
        let Some(remotes) = self.span.networks.get(network) else { return Ok(()) };
        for port in self.ports.values().filter(|port| port.plan.network == network) {
            let (Attachment::Vxlan(tunnel), Some(directory)) = (&port.plan.attachment, &port.directory) else {
                continue;
            };
            let places = remotes.places(&tunnel.remotes);
            if *directory.places() != places {
                directory.set(places);
            }
        }
        if let Some(gateway) = self.networks.get(network).and_then(|net| net.gateway.as_ref()) {
            let elsewhere = remotes.elsewhere();
            if *gateway.elsewhere() != elsewhere {
                gateway.set_elsewhere(elsewhere);
            }
        }
        let lost6 = remotes.lost.iter().filter(|ip| !remotes.fixed.contains_key(ip)).filter_map(|ip| match ip {
            IpAddr::V6(ip) => Some(*ip),
            IpAddr::V4(_) => None,
        });
        let lost6: Vec<Ipv6Addr> = lost6.collect();
        let worker = self.worker_of(network).map(|(_, worker)| worker.thread.handle().clone());
        if let (Some(worker), Some(net)) = (worker, self.networks.get_mut(network))
            && net.lost6 != lost6
        {
            worker.lose(net.id, lost6.clone())?;
            net.lost6 = lost6;
        }
        self.watch_span();
        Ok(())
    }

    /// The same for all networks: members, ports or gateways have changed. What fails is told.
    pub(crate) fn settle_span(&mut self) {
        for network in self.span.networks.keys().cloned().collect::<Vec<_>>() {
            if let Err(error) = self.settle_remotes(&network) {
                (self.say)(&format!("the network {network} on other machines: {error}"));
            }
        }
    }

    /// Looks again when leases change, and every now and then while there are conflicts.
    fn watch_span(&mut self) {
        if std::mem::replace(&mut self.span.is_watched, true) {
            return;
        }
        let (news, me) = (self.span.news.clone(), self.me.clone());
        tokio::spawn(async move {
            let mut has_conflicts = true;
            loop {
                tokio::select! {
                    () = news.notified() => {}
                    () = tokio::time::sleep(LOOK), if has_conflicts => {}
                }
                let Some(running) = me.upgrade() else { return };
                let mut running = running.lock().await;
                running.settle_span();
                has_conflicts = running.span.networks.values().any(|remotes| !remotes.conflicts.is_empty());
                drop(running);
                tokio::time::sleep(PAUSE).await;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::report::RemoteMember;
    use crate::file;
    use std::path::Path;

    const TEXT: &str = "name = \"s\"\n[network.lan]\nsubnet = \"10.87.0.0/24\"\nipv6 = \"fd00:1:2:3::/64\"\n\
        [tap.host]\nip = \"10.87.0.9\"\nmac = \"02:00:00:00:00:09\"\n";

    fn network() -> Network {
        file::parse(TEXT, Path::new("t.toml")).unwrap().networks.remove(0)
    }

    fn request(members: &[(&str, &str, &[&str])]) -> RemotesRequest {
        let member = |(name, mac, ips): &(&str, &str, &[&str])| RemoteMember {
            name: (!name.is_empty()).then(|| name.to_string()),
            mac: mac.to_string(),
            ips: ips.iter().map(|ip| ip.to_string()).collect(),
        };
        RemotesRequest { address: "192.0.2.2".into(), members: members.iter().map(member).collect() }
    }

    fn mac(n: u8) -> Bytes {
        [2, 0, 0, 0, 0, n]
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn end(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    /// A machine at `end(n)` that was told as the `order`-th.
    fn machine(n: u8, order: u64, told: &[(&str, &str, &[&str])]) -> Machine {
        let members = members(&request(told), &network()).unwrap();
        Machine { address: end(n), used: members.len(), members, order, told: Instant::now() }
    }

    #[test]
    fn what_is_no_list_of_members_is_refused_by_its_place() {
        let wrong = |told: &[(&str, &str, &[&str])]| members(&request(told), &network()).unwrap_err().to_string();
        let good = ("web", "02:00:00:00:00:01", &["10.87.0.12", "fd00::12"] as &[&str]);
        for name in ["web_1", "-web", "a.b", "ä", &"x".repeat(64)] {
            let text = wrong(&[good, (name, "02:00:00:00:00:02", &[])]);
            assert!(
                text.starts_with("members[1].name: expected a name of 1 to 63 letters") && text.contains(name),
                "{text}"
            );
        }
        for mac in
            ["", "02:00:00:00:00", "03:00:00:00:00:01", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00", "02-00-00-00-00-01"]
        {
            let text = wrong(&[("", mac, &[])]);
            assert!(text.starts_with("members[0].mac: expected the MAC address of one station"), "{text}");
        }
        for ip in [
            "10.87.0",
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "10.87.0.0",
            "10.87.0.255",
            "::",
            "::1",
            "ff02::1",
            "::ffff:10.87.0.12",
            "10.87.0.12/24",
        ] {
            let text = wrong(&[("", "02:00:00:00:00:01", &["10.87.0.12", ip])]);
            let expected = format!("members[0].ips[1]: expected the IP address of one station, found {ip:?}");
            assert_eq!(text, expected);
        }
        let many = vec!["10.87.0.12"; 17];
        assert_eq!(wrong(&[("", "02:00:00:00:00:01", &many)]), "members[0].ips: expected at most 16, found 17");
        assert_eq!(wrong(&vec![good; MAX_MEMBERS + 1]), "members: expected at most 4096, found 4097");
        // What comes twice counts once.
        let told = members(
            &request(&[("Web", good.1, good.2), ("db", good.1, &[]), ("", "02:00:00:00:00:02", &many[..16])]),
            &network(),
        );
        let told = told.unwrap();
        assert_eq!((told.len(), told[0].name.as_deref(), told[1].ips.len()), (2, Some("web"), 1));
        for (name, fits) in
            [("node-1", true), ("Node_1.example", true), ("", false), ("a/b", false), (&"x".repeat(65)[..], false)]
        {
            assert_eq!(is_machine_name(name), fits, "{name}");
        }
    }

    #[test]
    fn no_machine_takes_places_that_another_one_lacks() {
        let with = |counts: &[usize]| {
            let one = |(n, count): (usize, &usize)| {
                let member = Member { name: None, mac: mac(1), ips: vec![] };
                let machine = Machine { members: vec![member; *count], used: *count, ..machine(2, n as u64, &[]) };
                (format!("node-{n}"), machine)
            };
            Remotes { machines: counts.iter().enumerate().map(one).collect(), ..Remotes::default() }
        };
        let counts = |remotes: &Remotes| remotes.machines.values().map(|m| m.placed().len()).collect::<Vec<_>>();
        let mut fits = with(&[MAX_MEMBERS, MAX_MEMBERS, MAX_MEMBERS, MAX_PLACES - 3 * MAX_MEMBERS]);
        assert_eq!((fits.share_places(), fits.count()), (vec![], MAX_PLACES));
        // Four that take all they may, and a small one that comes last.
        let mut full = with(&[MAX_MEMBERS, MAX_MEMBERS, MAX_MEMBERS, MAX_MEMBERS, 40]);
        let cut = full.share_places();
        assert_eq!(counts(&full), [4086, 4086, 4086, 4086, 40]);
        assert_eq!((cut.len(), &cut[0]), (4, &("node-0".to_string(), 10)));
        assert!(full.count() <= MAX_PLACES);
        // Nothing has changed: what was told is there, and nothing is told again.
        assert_eq!((full.share_places(), full.machines["node-0"].members.len()), (vec![], MAX_MEMBERS));
        full.machines.remove("node-4");
        assert_eq!((full.share_places(), counts(&full)), (vec![], vec![MAX_MEMBERS; 4]), "they have their places back");
        let mut all = with(&[MAX_MEMBERS; 128]);
        all.share_places();
        assert_eq!(counts(&all), [MAX_PLACES / 128; 128]);
    }

    #[test]
    fn what_is_in_use_here_is_reported_and_not_answered_for() {
        let mut remotes = Remotes::default();
        let told: &[(&str, &str, &[&str])] = &[
            ("web", "02:00:00:00:00:01", &["10.87.0.12", "10.87.0.13", "fd00::12"]),
            ("db", "02:00:00:00:00:02", &["10.87.0.20"]),
            ("", "02:00:00:00:00:03", &["10.87.0.30"]),
        ];
        remotes.machines.insert("node-2".into(), machine(2, 1, told));
        let mut local = Local::default();
        local.has(
            None,
            [ip("10.87.0.13")],
            &Use::Lease { mac: mac(7), ip: ip("10.87.0.13"), name: Some("alpha".into()) },
        );
        local.has(Some(mac(2)), [], &Use::Port("guest".into()));
        remotes.conflicts = remotes.conflicts(&local);
        let answer = remotes.conflicts_of("node-2");
        let told: Vec<_> =
            answer.conflicts.iter().map(|c| (c.member.as_deref(), &c.mac[..], c.ip, &c.with[..])).collect();
        let expected = [
            (
                Some("web"),
                "02:00:00:00:00:01",
                Some(ip("10.87.0.13")),
                "alpha (02:00:00:00:00:07) of this machine has the lease of 10.87.0.13",
            ),
            (Some("db"), "02:00:00:00:00:02", None, "a member behind the port guest of this machine sends with it"),
        ];
        assert_eq!(told, expected);
        assert!(remotes.conflicts_of("node-3").conflicts.is_empty());
        let report = remotes.report("lan");
        let used: Vec<_> = report.machines[0].members.iter().map(|m| (m.used, m.conflict.is_some())).collect();
        assert_eq!(used, [(false, true), (false, true), (true, false)]);
        let mut places = Places::default();
        assert!([1, 2, 3].into_iter().all(|n| places.place(mac(n), end(2))));
        let answered = [("10.87.0.12", 1), ("fd00::12", 1), ("10.87.0.30", 3)];
        assert!(answered.into_iter().all(|(of, n)| places.answer_for(ip(of), mac(n))));
        assert_eq!(remotes.places(&[end(2)]), places, "all have their place");
        assert!(remotes.places(&[end(3)]).is_empty(), "another tunnel");
    }

    #[test]
    fn of_two_machines_the_one_that_was_told_last_has_an_address() {
        let mut remotes = Remotes::default();
        let told: &[(&str, &str, &[&str])] = &[("web", "02:00:00:00:00:01", &["10.87.0.12"])];
        remotes.machines.insert("a".into(), machine(2, 1, told));
        remotes.machines.insert("b".into(), machine(3, 2, told));
        let ends = [end(2), end(3)];
        let at = |n: u8| {
            let mut places = Places::default();
            places.place(mac(1), end(n));
            places.answer_for(ip("10.87.0.12"), mac(1));
            places
        };
        assert_eq!(remotes.places(&ends), at(3));
        // It has moved on; the list of the machine that it has left comes later.
        remotes.machines.insert("a".into(), machine(2, 3, told));
        assert_eq!(remotes.places(&ends), at(2));
        let elsewhere = Remote { name: Some("web".into()), mac: mac(1), addresses: vec![ip("10.87.0.12")] };
        remotes.lost.insert(ip("10.87.0.40"));
        assert_eq!(remotes.elsewhere(), Elsewhere::new([elsewhere], [ip("10.87.0.40")]));
        assert_eq!(remotes.report("lan").lost, [ip("10.87.0.40")]);
    }
}
