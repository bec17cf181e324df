//! One file for several machines: `[machine.NAME]`, `[span]`, and the key `on`.
//!
//! The file is read once for each of its machines, each time without the sections that run
//! elsewhere. So a file is right only if it is right on every machine, and each machine refuses the
//! same faults. Here is what has to be known before that: the machines, where each section runs,
//! and which machine is meant.
//!
//! A section without `on` runs on every machine. There are exceptions, which follow what the
//! section names: a forward runs where its member is, a link where its machines are, a rule or
//! mirror where its members are, and an import where the service is not exported.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::model::{Dhcp, Mac};
use super::names::MEMBERS;
use super::parse::named;
use super::parse::words::clean_name;
use super::problem::{Complaints, dotted, near};
use super::read::{Section, Spots, found, integer};

/// A machine of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The NAME in `[machine.NAME]`.
    pub name: String,
    /// Where the other machines reach it.
    pub address: IpAddr,
}

/// `[span]`: what tombolo-span is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpanDecl {
    /// The TCP port at which each machine's tombolo-span listens.
    pub port: u16,
    /// The folder of keys; `None`: no TLS.
    pub keys: Option<PathBuf>,
    /// What all machines have in common.
    pub site: String,
    /// Seconds after which a machine that is not heard is forgotten.
    pub lease_s: u16,
}

/// This machine in a file for several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Here {
    /// This machine.
    pub host: Host,
    /// All others of the file, in its order.
    pub others: Vec<Host>,
    /// `[span]`
    pub span: Option<SpanDecl>,
    /// False where the first machine was taken because none was named: the file can be checked, and
    /// not run.
    pub is_chosen: bool,
}

/// The hint where no machine is named. Commands without `--machine` say something else.
pub const SAY_WHICH: &str = "say which one this is: --machine NAME";

/// Which machine of a file for several is meant. A name is a fault with any other file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which<'a> {
    /// The only one, or else the one that has this host's name.
    This,
    /// The one of this name.
    Named(&'a str),
    /// As `This`, or else any.
    Any,
}

impl<'a> Which<'a> {
    /// The named one, or else this one.
    pub fn of(name: Option<&'a str>) -> Self {
        name.map_or(Which::This, Which::Named)
    }
}

/// What belongs to one machine of the file, in a network that spans them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Home {
    /// The network.
    pub network: String,
    /// The machine.
    pub machine: String,
    /// The name of a member that runs on this machine alone.
    pub name: Option<String>,
    /// The first and the last address. Of a member and of a gateway both are the same.
    pub addresses: Option<(Ipv4Addr, Ipv4Addr)>,
    /// The MAC address of a member that no other machine has, or of the gateway or router.
    pub mac: Option<Mac>,
}

/// What the file has on other machines, as far as it matters here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// Addresses in networks of this machine: network, address, and whose it is in the words of a
    /// complaint.
    pub(super) taken: Vec<(String, Ipv4Addr, String)>,
    /// What other machines lease: network, first and last address, machine.
    pub(super) leased: Vec<(String, Ipv4Addr, Ipv4Addr, String)>,
    /// What this machine has for itself in a network of several: network, first and last address.
    pub(crate) own: Vec<(String, Ipv4Addr, Ipv4Addr)>,
    /// Members: name, path of the section, and the machine.
    pub(crate) members: Vec<(String, String, String)>,
    /// What belongs to which machine, of this one too.
    pub(crate) homes: Vec<Home>,
}

/// A cell, VM, tap or port, wherever it runs.
struct Member {
    /// Path of its section.
    section: String,
    /// Its name, or those of its machines.
    names: Vec<String>,
    homes: Vec<usize>,
    /// Its networks.
    networks: Vec<String>,
    /// Its fixed addresses, with their networks.
    ips: Vec<(String, Ipv4Addr)>,
    /// Its MAC addresses that the file gives, in the order of its networks.
    macs: Vec<Mac>,
}

impl Member {
    /// Its MAC addresses with their networks. Those that the file does not give are derived from
    /// `fabric`. One that it gives to a member of several machines is that of none of them.
    fn all_macs(&self, fabric: &str) -> Vec<(&str, Mac)> {
        let word = self.section.split('.').next().unwrap_or_default();
        let mut all = Vec::new();
        for (i, network) in self.networks.iter().enumerate() {
            let number = i.to_string();
            let derived = |name: &String| match word {
                "tap" => Some(Mac::derived(&[fabric, name, network])),
                "port" => None,
                _ => Some(Mac::derived(&[fabric, name, network, &number])),
            };
            let macs = self.names.iter().filter_map(|name| match self.macs.get(i) {
                Some(given) => Some(*given).filter(|_| self.homes.len() == 1),
                None => derived(name),
            });
            all.extend(macs.map(|mac| (network.as_str(), mac)));
        }
        all
    }
}

/// The machines of a file, and where its sections run.
pub(super) struct Hosts {
    pub(super) list: Vec<Host>,
    pub(super) span: Option<SpanDecl>,
    /// The places of the sections `[machine.NAME]`.
    places: Vec<Range<usize>>,
    /// Whether all addresses could be read.
    pub(super) have_addresses: bool,
    /// Of each section, by its path, the machines on which it runs; none for every machine.
    homes: HashMap<String, Vec<usize>>,
    members: Vec<Member>,
}

/// The beginning of the words for a gateway or router of another machine.
pub(super) const FIXED: &str = "the network's";

/// The number of parts into which DHCP ranges are divided. Up to four machines it does not depend
/// on their number, so that one more changes nothing at the others.
fn parts(machines: usize) -> u32 {
    (machines.max(4) as u32).next_power_of_two()
}

/// How many of a subnet's first addresses the gateways and routers of all machines need.
pub(super) fn own_addresses(machines: usize) -> u32 {
    2 * parts(machines) + 1
}

/// What the `index`-th machine leases of a range that it shares with the others.
pub(super) fn share(range: Dhcp, index: usize, machines: usize) -> Dhcp {
    let (from, to) = (u64::from(u32::from(range.from)), u64::from(u32::from(range.to)));
    if from > to {
        return range;
    }
    let (size, parts, index) = (to - from + 1, u64::from(parts(machines)), index as u64);
    let at = |part: u64| Ipv4Addr::from((from + size * part / parts) as u32);
    let end = u32::from(at(index + 1)).saturating_sub(1);
    Dhcp { from: at(index), to: end.into(), ..range }
}

/// An address of the first machine, as that of the `index`-th: its gateway and router are two
/// further for each.
pub(super) fn counted_on(ip: Ipv4Addr, index: usize) -> Ipv4Addr {
    u32::from(ip).saturating_add(2 * index as u32).into()
}

/// The texts of a value that is one or a list of them.
fn texts<'a>(value: Option<&'a Spanned<DeValue<'_>>>) -> Vec<&'a str> {
    let Some(value) = value.map(Spanned::get_ref) else { return vec![] };
    match value.as_array() {
        Some(list) => list.iter().filter_map(|item| item.get_ref().as_str()).collect(),
        None => value.as_str().into_iter().collect(),
    }
}

/// The tables of `[WORD.NAME]` or `[[WORD]]`, with their names (or numbers), paths and places.
fn sections<'a, 'i>(root: &'a DeTable<'i>, word: &str) -> Vec<(String, String, Range<usize>, &'a DeTable<'i>)> {
    let Some(value) = root.get(word).map(Spanned::get_ref) else { return vec![] };
    if let Some(tables) = value.as_table() {
        let all = tables.iter().filter_map(|(key, value)| Some((key, value.get_ref().as_table()?)));
        return all
            .map(|(key, t)| (key.get_ref().to_string(), format!("{word}.{}", key.get_ref()), key.span(), t))
            .collect();
    }
    let list = value.as_array().into_iter().flat_map(|list| list.iter().enumerate());
    let all = list.filter_map(|(i, item)| Some((i, item.span(), item.get_ref().as_table()?)));
    all.map(|(i, span, table)| (i.to_string(), format!("{word}[{i}]"), span, table)).collect()
}

/// The labels of members by which a section chooses where it runs, as far as it does.
fn labels(word: &str, table: &DeTable<'_>) -> Vec<String> {
    let keys: &[&str] = match word {
        "link" => &["between"],
        "forward" => &["to"],
        "rule" => &["from", "to"],
        "mirror" => &["of", "to"],
        _ => &[],
    };
    let all = keys.iter().flat_map(|key| texts(table.get(*key)));
    let name = |text: &str| match word {
        "forward" => text.rsplit_once(':').map_or_else(String::new, |(who, _)| who.into()),
        _ => text.to_string(),
    };
    all.map(name).collect()
}

impl Hosts {
    /// Reads what the file says about its machines. Complains about `on`, `span` and `[span]` in a
    /// file that has none.
    pub(super) fn read(root: &DeTable<'_>, dir: &Path, out: &mut Complaints<'_>, spots: &mut Spots) -> Hosts {
        let mut hosts = Hosts {
            list: vec![],
            span: None,
            places: vec![],
            have_addresses: true,
            homes: HashMap::new(),
            members: vec![],
        };
        let mut machines = named(root, "machine", out);
        machines.sort_by_key(|(_, span, _)| span.start);
        for (name, span, table) in machines {
            let mut s = Section::open("machine", format!("machine.{name}"), span.clone(), table, out, spots, &[]);
            let address = s.text("address", |text| {
                text.parse().ok().filter(|ip: &IpAddr| !ip.is_unspecified() && !ip.is_multicast())
            });
            if s.raw("address").is_none() {
                s.missing("address");
            }
            hosts.have_addresses &= address.is_some();
            let address = address.unwrap_or(Ipv4Addr::LOCALHOST.into());
            let misfit = |other: &Host| {
                let (of, name) = (other.address, &other.name);
                if of == address {
                    Some(format!("\"{address}\", as in [machine.{name}]"))
                } else if of.is_ipv6() != address.is_ipv6() {
                    Some(format!("\"{address}\", of another IP version than \"{of}\" of [machine.{name}]"))
                } else {
                    None
                }
            };
            let found = hosts.list.iter().find_map(misfit).filter(|_| hosts.have_addresses);
            if let Some(found) = found {
                let place = s.raw("address").map_or(span.clone(), |(_, place)| place);
                s.wrong("address", &place, found, None);
                hosts.have_addresses = false;
            }
            hosts.list.push(Host { name, address });
            hosts.places.push(span);
        }
        if let Some(value) = root.get("span") {
            hosts.read_span(value, dir, out, spots);
        }
        hosts.find_homes(root, out);
        hosts
    }

    fn read_span(&mut self, value: &Spanned<DeValue<'_>>, dir: &Path, out: &mut Complaints<'_>, spots: &mut Spots) {
        let Some(table) = value.get_ref().as_table() else {
            out.say(&value.span(), "span", "a section [span]", found(value.get_ref()), None);
            return;
        };
        if self.list.is_empty() && !out.refused("machine", None) {
            let hint = Some("for a file of one machine, docs/span.md has the settings of tombolo-span".to_string());
            out.say(&value.span(), "span", "it beside sections [machine.NAME]", "none of them", hint);
        }
        let mut s = Section::open("span", "span".into(), value.span(), table, out, spots, &[]);
        let name = |text: &str| tombolo_remote::machine::keys::is_machine_name(text).then(|| text.to_string());
        let tls = s.flag("tls").unwrap_or(true);
        s.applies("tls", Some(if tls { "true" } else { "false" }));
        if tls && s.raw("keys").is_none() {
            s.missing("keys");
        }
        let keys = s.text("keys", |text| (!text.is_empty()).then(|| dir.join(text)));
        self.span = Some(SpanDecl {
            port: s.number("port", 1024, 65535).unwrap_or(7447) as u16,
            keys: keys.filter(|_| tls),
            site: s.text("site", name).unwrap_or_else(|| "default".into()),
            lease_s: s.number("lease", 5, 3600).unwrap_or(15) as u16,
        });
    }

    /// The machines that `on` of a section names; `None` where it has none, or a faulty one.
    fn on(&self, path: &str, table: &DeTable<'_>, out: &mut Complaints<'_>) -> Option<Vec<usize>> {
        let value = table.get("on")?;
        if self.list.is_empty() {
            if !out.refused("machine", None) {
                let hint = Some("add a section [machine.NAME] for each machine, or leave `on` out".to_string());
                let expected = "no `on` in a file without sections [machine.NAME]";
                out.say(&value.span(), dotted(path, "on"), expected, found(value.get_ref()), hint);
            }
            return None;
        }
        let names = || self.list.iter().map(|host| host.name.as_str());
        let one = |text: &Spanned<DeValue<'_>>, out: &mut Complaints<'_>| {
            let name = text.get_ref().as_str();
            let at = name.and_then(|name| names().position(|known| known == name));
            if at.is_none() && !name.is_some_and(|name| out.refused("machine", Some(name))) {
                let expected =
                    format!("the name of a machine of the file ({})", names().collect::<Vec<_>>().join(", "));
                let hint = name.and_then(|name| near(name, names()));
                out.say(&text.span(), dotted(path, "on"), expected, found(text.get_ref()), hint);
            }
            at
        };
        let found = match value.get_ref().as_array() {
            Some(list) if !list.is_empty() => list.iter().map(|item| one(item, out)).collect(),
            _ => one(value, out).map(|at| vec![at]),
        };
        found.map(|mut homes: Vec<usize>| {
            homes.sort_unstable();
            homes.dedup();
            homes
        })
    }

    fn find_homes(&mut self, root: &DeTable<'_>, out: &mut Complaints<'_>) {
        let all: Vec<usize> = (0..self.list.len()).collect();
        let networks: Vec<String> = sections(root, "network").into_iter().map(|(name, ..)| name).collect();
        // Where members and groups are, by their names.
        let mut places: HashMap<String, Vec<usize>> = HashMap::new();
        for word in MEMBERS {
            for (name, section, _, table) in sections(root, word) {
                let homes = self.on(&section, table, out);
                if let Some(homes) = &homes {
                    self.homes.insert(section.clone(), homes.clone());
                }
                let homes = homes.unwrap_or_else(|| all.clone());
                let count = table.get("count").and_then(|value| integer(value.get_ref()));
                let names: Vec<String> = match count {
                    Some(count) => (1..=count.min(256)).map(|n| format!("{name}-{n}")).collect(),
                    None => vec![name],
                };
                for label in names.iter().map(String::as_str).chain(texts(table.get("groups"))) {
                    places.entry(label.into()).or_default().extend(&homes);
                }
                let mut at = texts(table.get("network"));
                if let ([only], true) = (&networks[..], at.is_empty()) {
                    at.push(only);
                }
                let ips = at.iter().zip(texts(table.get("ip")));
                let ips = ips.filter_map(|(network, ip)| Some((network.to_string(), ip.parse().ok()?))).collect();
                let networks = at.iter().map(ToString::to_string).collect();
                let macs = texts(table.get("mac")).into_iter().filter_map(Mac::parse).collect();
                self.members.push(Member { section, names, homes, networks, ips, macs });
            }
        }
        let mut exports: HashMap<String, Vec<usize>> = HashMap::new();
        for (name, section, _, table) in sections(root, "export") {
            if let Some(homes) = self.on(&section, table, out) {
                self.homes.insert(section.clone(), homes);
            }
            let homes = self.homes.get(&section).unwrap_or(&all);
            let mut services = texts(table.get("services"));
            if services.is_empty() {
                services.push(&name);
            }
            services.into_iter().for_each(|service| exports.entry(service.into()).or_default().extend(homes));
        }
        for (name, section, _, table) in sections(root, "import") {
            let homes = self.on(&section, table, out).or_else(|| {
                let service = texts(table.get("service")).first().map_or(name, |service| service.to_string());
                let exporters = exports.get(&service)?;
                Some(all.iter().copied().filter(|at| !exporters.contains(at)).collect())
            });
            homes.and_then(|homes| self.homes.insert(section, homes));
        }
        for word in ["link", "forward", "rule", "mirror"] {
            for (_, section, span, table) in sections(root, word) {
                if let Some(homes) = self.on(&section, table, out) {
                    self.homes.insert(section, homes);
                    continue;
                }
                if all.is_empty() {
                    continue;
                }
                let known = labels(word, table).into_iter().filter_map(|label| Some((places.get(&label)?, label)));
                let known: Vec<(&Vec<usize>, String)> = known.collect();
                let at = |at: &usize| known.iter().all(|(homes, _)| homes.contains(at));
                let homes: Vec<usize> = all.iter().copied().filter(at).collect();
                if homes.is_empty() && !known.is_empty() {
                    let place = |(homes, label): &(&Vec<usize>, String)| {
                        let names: Vec<_> = homes.iter().filter_map(|at| Some(&*self.list.get(*at)?.name)).collect();
                        format!("\"{label}\" on {}", names.join(" and "))
                    };
                    let there: Vec<_> = known.iter().map(place).collect();
                    let hint = "what is between machines passes the tunnel's port: write one section for each machine";
                    out.say(&span, section.clone(), "members of one machine", there.join(", "), Some(hint.into()));
                }
                if homes.len() < all.len() {
                    self.homes.insert(section, homes);
                }
            }
        }
    }

    /// Whether the section of that path runs on the `index`-th machine.
    pub(super) fn has(&self, index: usize, path: &str) -> bool {
        self.homes.get(path).is_none_or(|homes| homes.contains(&index))
    }

    /// Whether the section of that path runs on one machine alone, so that no other has its MAC
    /// address.
    pub(super) fn is_alone(&self, path: &str) -> bool {
        self.homes.get(path).is_some_and(|homes| homes.len() == 1)
    }

    /// Where the `index`-th machine is, as the others name it.
    pub(super) fn here(&self, index: usize, is_chosen: bool) -> Here {
        let mut others = self.list.clone();
        let host = others.remove(index);
        Here { host, others, span: self.span.clone(), is_chosen }
    }

    /// What the machines before the `index`-th have in the networks that span machines. One of two
    /// sections that contradict each other is told of the other, so that there is one complaint.
    pub(super) fn elsewhere(&self, index: usize, base: &str, spans: impl Fn(&str) -> bool) -> Elsewhere {
        let homes = self.members_homes(base, &spans);
        Elsewhere { homes, ..self.on_others(index, |home| home < index, spans) }
    }

    /// The names and addresses of members that are on one machine alone, and the MAC addresses of
    /// all members.
    fn members_homes(&self, base: &str, spans: impl Fn(&str) -> bool) -> Vec<Home> {
        let mut all = Vec::new();
        for member in &self.members {
            for home in &member.homes {
                let machine = &self.list[*home].name;
                let fabric = if self.is_alone(&member.section) { Some(base.into()) } else { name_on(base, machine) };
                let macs = fabric.iter().flat_map(|fabric| member.all_macs(fabric));
                all.extend(macs.filter(|(network, _)| spans(network)).map(|(network, mac)| Home {
                    network: network.into(),
                    machine: machine.clone(),
                    name: None,
                    addresses: None,
                    mac: Some(mac),
                }));
            }
            let [home] = member.homes[..] else { continue };
            let machine = &self.list[home].name;
            let mut add = |network: &str, name: Option<&String>, ip: Option<Ipv4Addr>| {
                let (network, machine, name) = (network.into(), machine.clone(), name.cloned());
                all.push(Home { network, machine, name, addresses: ip.map(|ip| (ip, ip)), mac: None });
            };
            for network in member.networks.iter().filter(|network| spans(network)) {
                member.names.iter().for_each(|name| add(network, Some(name), None));
            }
            for (network, ip) in member.ips.iter().filter(|(network, _)| spans(network)) {
                add(network, None, Some(*ip));
            }
        }
        all
    }

    /// What the machines after the `index`-th have, which additions are checked against besides.
    pub(super) fn later(&self, index: usize, spans: impl Fn(&str) -> bool) -> Elsewhere {
        self.on_others(index, |home| home > index, spans)
    }

    fn on_others(&self, index: usize, is_meant: impl Fn(usize) -> bool, spans: impl Fn(&str) -> bool) -> Elsewhere {
        let mut out = Elsewhere::default();
        for member in &self.members {
            for &home in member.homes.iter().filter(|home| is_meant(**home)) {
                let machine = &self.list[home].name;
                let is_here = member.homes.contains(&index);
                for name in member.names.iter().filter(|_| !is_here) {
                    out.members.push((name.clone(), member.section.clone(), machine.clone()));
                }
                for (network, ip) in member.ips.iter().filter(|(network, _)| spans(network)) {
                    out.taken.push((network.clone(), *ip, format!("[{}] on machine \"{machine}\"", member.section)));
                }
            }
        }
        out
    }

    /// The MAC addresses of the gateways and routers of all machines in a network, if it has those.
    pub(super) fn roles(&self, base: &str, network: &str, fixed: [Option<Ipv4Addr>; 2], out: &mut Elsewhere) {
        for Host { name: machine, .. } in &self.list {
            let Some(fabric) = name_on(base, machine) else { continue };
            for (role, _) in ["gateway", "router"].iter().zip(fixed).filter(|(_, ip)| ip.is_some()) {
                let mac = Some(Mac::derived(&[&fabric, network, role]));
                let (network, machine) = (network.into(), machine.clone());
                out.homes.push(Home { network, machine, name: None, addresses: None, mac });
            }
        }
    }

    /// The gateway, router and range of the other machines in a network of the `index`-th. `range`
    /// is the one that they share, also where nothing is leased.
    pub(super) fn of_network(
        &self,
        index: usize,
        network: &str,
        fixed: [Option<Ipv4Addr>; 2],
        dhcp: Option<Dhcp>,
        range: Dhcp,
        out: &mut Elsewhere,
    ) {
        if self.list.len() > 1 {
            let own = share(range, index, self.list.len());
            out.own.push((network.into(), own.from, own.to));
        }
        for (at, host) in self.list.iter().enumerate() {
            let part = share(range, at, self.list.len());
            let single = fixed.into_iter().flatten().map(|ip| counted_on(ip, at)).map(|ip| (ip, ip));
            for addresses in single.chain([(part.from, part.to)]) {
                let (network, machine) = (network.into(), host.name.clone());
                out.homes.push(Home { network, machine, name: None, addresses: Some(addresses), mac: None });
            }
        }
        for (at, host) in self.list.iter().enumerate().filter(|(at, _)| *at != index) {
            for (word, ip) in ["gateway", "router"].iter().zip(fixed) {
                let words = format!("{FIXED} {word} on machine \"{}\"", host.name);
                out.taken.extend(ip.map(|ip| (network.into(), counted_on(ip, at), words)));
            }
            if let Some(range) = dhcp.map(|dhcp| share(dhcp, at, self.list.len())) {
                out.leased.push((network.into(), range.from, range.to, host.name.clone()));
            }
        }
    }

    /// The machine that is meant. `None` after a complaint, and for [`Which::Any`].
    pub(super) fn choose(&self, which: Which<'_>, out: &mut Complaints<'_>) -> Option<usize> {
        choose(self.list.iter().map(|host| host.name.as_str()), &self.places, which, &host_name(), out)
    }
}

fn choose<'a>(
    names: impl Iterator<Item = &'a str> + Clone,
    places: &[Range<usize>],
    which: Which<'_>,
    host: &str,
    out: &mut Complaints<'_>,
) -> Option<usize> {
    let mut all = names.clone();
    let at = |name: &str| names.clone().position(|known| known == name);
    let (asked, is_named) = match which {
        Which::Named(name) => (name, true),
        _ if all.next().is_some() && all.next().is_none() => return Some(0),
        _ => (host, false),
    };
    if let Some(index) = at(asked) {
        return Some(index);
    }
    if which != Which::Any {
        let list = names.clone().collect::<Vec<_>>().join(", ");
        let found = match is_named {
            true => format!("{asked:?}"),
            false => format!("no --machine, and the host name {asked:?}"),
        };
        let hint = near(asked, names.clone()).filter(|_| is_named);
        let hint = hint.or_else(|| (!is_named).then(|| SAY_WHICH.into()));
        let place = places.first().cloned().unwrap_or(0..0);
        out.say(&place, "machine", format!("the name of a machine of the file ({list})"), found, hint);
    }
    None
}

/// Complains that a machine was named for a file that has none.
pub(super) fn without_machines(which: Which<'_>, out: &mut Complaints<'_>) {
    if let Which::Named(name) = which {
        let expected = format!("a section [machine.{name}], since --machine names that");
        let hint = Some("leave --machine out: the file is for one machine".to_string());
        out.say(&(0..0), "machine", expected, "no section [machine.NAME]", hint);
    }
}

/// This host's name, without its domain.
fn host_name() -> String {
    let system = rustix::system::uname();
    let name = system.nodename().to_string_lossy().to_lowercase();
    name.split('.').next().unwrap_or_default().into()
}

/// The fabric's name on a machine.
pub(super) fn name_on(base: &str, machine: &str) -> Option<String> {
    clean_name(&format!("{base}-{machine}"))
}

/// The fabric's name on the machine that is meant, of a file that may have any other fault; `base`
/// for a file of one machine.
pub(super) fn name_of(root: &DeTable<'_>, base: String, which: Which<'_>, out: &mut Complaints<'_>) -> Option<String> {
    let mut machines: Vec<_> = sections(root, "machine");
    machines.retain(|(name, ..)| clean_name(name).is_some());
    machines.sort_by_key(|(_, _, span, _)| span.start);
    if machines.is_empty() {
        let is_named = matches!(which, Which::Named(_)) && root.get("machine").is_none();
        if is_named {
            without_machines(which, out);
        }
        return (!is_named).then_some(base);
    }
    let places: Vec<_> = machines.iter().map(|(_, _, span, _)| span.clone()).collect();
    let names = machines.iter().map(|(name, ..)| name.as_str());
    let index = choose(names, &places, which, &host_name(), out)?;
    let name = &machines[index].0;
    name_on(&base, name).or_else(|| {
        too_long(&base, name, &places[index], out);
        None
    })
}

/// Complains that the name that a fabric gets on a machine is too long.
pub(super) fn too_long(base: &str, machine: &str, place: &Range<usize>, out: &mut Complaints<'_>) {
    let found = format!("{:?}", format!("{base}-{machine}"));
    let hint = Some("shorten the name of the fabric or of the machine".to_string());
    let expected = "a name that makes the fabric's name here, NAME-MACHINE, at most 24 characters long";
    out.say(place, format!("machine.{machine}"), expected, found, hint);
}

impl Hosts {
    /// The place of the section of the `index`-th machine.
    pub(super) fn place(&self, index: usize) -> &Range<usize> {
        &self.places[index]
    }
}

/// The settings of tombolo-span on a machine, as its settings file has them. `None` without
/// `[span]`.
pub fn span_settings(fabric: &super::Fabric) -> Option<String> {
    let here = fabric.here.as_ref()?;
    let span = here.span.as_ref()?;
    let text = |text: &str| {
        let escaped = text.chars().map(|c| match c {
            '"' | '\\' => format!("\\{c}"),
            c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
            c => c.to_string(),
        });
        format!("\"{}\"", escaped.collect::<String>())
    };
    let at = |host: &Host| std::net::SocketAddr::new(host.address, span.port);
    let peers = here.others.iter().map(|host| text(&format!("{}={}", host.name, at(host))));
    let proof = match &span.keys {
        Some(keys) => format!("keys = {}", text(&keys.display().to_string())),
        None => "no_tls = true".into(),
    };
    Some(format!(
        "fabric = {}\nmachine = {}\nlisten = {}\npeer = [{}]\n{proof}\nsite = {}\nlease = {}\n",
        text(&fabric.name),
        text(&here.host.name),
        text(&at(&here.host).to_string()),
        peers.collect::<Vec<_>>().join(", "),
        text(&span.site),
        span.lease_s,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{FileError, parse_on};

    #[test]
    fn a_range_is_divided_without_gaps_and_the_same_for_up_to_four_machines() {
        let range = Dhcp { from: [10, 87, 0, 15].into(), to: [10, 87, 0, 254].into(), lease_s: 60 };
        let ends = |machines| {
            let all = (0..machines).map(|at| share(range, at, machines));
            all.map(|r| (r.from.octets()[3], r.to.octets()[3])).collect::<Vec<_>>()
        };
        assert_eq!(ends(4), [(15, 74), (75, 134), (135, 194), (195, 254)]);
        assert_eq!(ends(2), ends(4)[..2]);
        let eight = ends(8);
        assert!(eight.windows(2).all(|two| two[0].1 + 1 == two[1].0) && eight[7].1 == 254, "{eight:?}");
    }

    #[test]
    fn the_machine_is_the_named_one_the_only_one_or_that_of_the_host() {
        let choose = |names: &[&str], which, host: &str| {
            let mut out = Complaints::new("");
            let index = choose(names.iter().copied(), &[], which, host, &mut out);
            (index, out.finish().into_iter().map(|p| p.to_string()).next().unwrap_or_default())
        };
        assert_eq!(choose(&["a"], Which::This, "h"), (Some(0), String::new()));
        assert_eq!(choose(&["a", "b"], Which::This, "b"), (Some(1), String::new()));
        assert_eq!(choose(&["a", "b"], Which::Named("a"), "b"), (Some(0), String::new()));
        assert_eq!(choose(&["a", "b"], Which::Any, "h"), (None, String::new()));
        let (index, error) = choose(&["node-1", "node-2"], Which::Named("nod-1"), "node-2");
        assert!(index.is_none() && error.ends_with("found \"nod-1\"; did you mean \"node-1\"?"), "{error}");
        let (index, error) = choose(&["node-1", "node-2"], Which::This, "h");
        assert!(
            index.is_none() && error.contains("(node-1, node-2), found no --machine, and the host name \"h\""),
            "{error}"
        );
        let alone = parse_on("name = \"t\"\n[network.lan]\n", Path::new("/x/t.toml"), Which::Named("b"));
        let error = alone.unwrap_err().to_string();
        assert!(error.contains("expected a section [machine.b]") && error.contains("leave --machine out"), "{error}");
        assert!(choose(&["a"], Which::Named("b"), "h").0.is_none(), "also where there is one only");
    }

    const FILE: &str = "name = \"demo\"\n[machine.b]\naddress = \"192.0.2.2\"\n[machine.a]\naddress = \"192.0.2.1\"\n\
        [network.lan]\nspan = 42\n[network.own]\n[span]\nkeys = \"keys\"\n\
        [tap.t]\non = \"a\"\nnetwork = \"lan\"\n[tap.u]\non = \"b\"\nnetwork = \"lan\"\n[tap.both]\nnetwork = \"own\"\n";

    fn on(text: &str, machine: &str) -> super::super::Fabric {
        parse_on(text, Path::new("/x/t.toml"), Which::Named(machine)).unwrap_or_else(|error| panic!("{error}"))
    }

    fn faults(text: &str) -> Vec<String> {
        match parse_on(text, Path::new("/x/t.toml"), Which::Any) {
            Err(FileError::Faulty { problems, .. }) => problems.iter().map(ToString::to_string).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_machine_has_its_sections_and_a_tunnel_to_the_others() {
        let (a, b) = (on(FILE, "a"), on(FILE, "b"));
        assert_eq!((a.name.as_str(), b.name.as_str()), ("demo-a", "demo-b"));
        assert_eq!(a.members().collect::<Vec<_>>(), ["both", "t", "span-lan"]);
        assert_eq!(b.members().collect::<Vec<_>>(), ["both", "u", "span-lan"]);
        let super::super::PortKind::Vxlan(tunnel) = &a.ports[0].kind else { panic!("{:?}", a.ports) };
        assert_eq!((tunnel.vni.get(), tunnel.local.to_string(), tunnel.learning), (42, "192.0.2.1".into(), false));
        assert_eq!(tunnel.remotes, ["192.0.2.2".parse::<IpAddr>().unwrap()]);
        let own = |fabric: &super::super::Fabric| {
            let lan = &fabric.networks[0];
            (lan.gateway.unwrap().octets()[3], lan.dhcp.unwrap().from.octets()[3], lan.mtu)
        };
        // In the file's order, so `b` is the first.
        assert_eq!((own(&b), own(&a)), ((1, 15, 1450), (3, 75, 1450)));
        assert_eq!((a.networks[0].ipv6, &a.networks[0].domain), (b.networks[0].ipv6, &b.networks[0].domain));
        assert_eq!(a.networks[0].domain, "demo.internal");
        assert_eq!(a.networks[1].gateway, b.networks[1].gateway, "a network that does not span is each machine's own");
        // What containers get is the machine's own, with and without leases.
        let ranges = |fabric: &super::super::Fabric| {
            let own = fabric.elsewhere.own.iter();
            own.map(|(network, from, to)| (network.clone(), from.octets()[3], to.octets()[3])).collect::<Vec<_>>()
        };
        let quiet = FILE.replace("span = 42", "span = 42\ndhcp = false");
        for text in [FILE, &quiet] {
            assert_eq!(ranges(&on(text, "b")), [("lan".to_string(), 15, 74)]);
            assert_eq!(ranges(&on(text, "a")), [("lan".to_string(), 75, 134)]);
        }
        // Both know what belongs to which of them.
        assert_eq!(a.elsewhere.homes, b.elsewhere.homes);
        let homes = a.elsewhere.homes.iter().filter(|home| home.mac.is_none()).map(|home| {
            let ends = home.addresses.map(|(from, to)| (from.octets()[3], to.octets()[3]));
            (home.network.as_str(), home.machine.as_str(), home.name.as_deref(), ends)
        });
        let expected = [
            ("lan", "a", Some("t"), None),
            ("lan", "b", Some("u"), None),
            ("lan", "b", None, Some((1, 1))),
            ("lan", "b", None, Some((15, 74))),
            ("lan", "a", None, Some((3, 3))),
            ("lan", "a", None, Some((75, 134))),
        ];
        assert_eq!(homes.collect::<Vec<_>>(), expected);
        // And the MAC addresses, as the machine itself has them.
        let more = FILE.replace("span = 42", "span = 42\nuplink = \"kernel\"")
            + "[tap.w]\non = \"a\"\nnetwork = \"lan\"\nmac = \"02:00:00:00:00:07\"\n\
               [cell.c]\non = \"a\"\ncount = 2\nimage = \"/proc/self/exe\"\nnetwork = [\"lan\", \"own\", \"lan\"]\n\
               [port.p]\non = \"b\"\nnetwork = \"lan\"\nmac = \"02:00:00:00:00:08\"\nkind = \"vhost-user\"\nsocket = \"p.sock\"\n\
               [port.q]\non = \"b\"\nnetwork = \"lan\"\nkind = \"vhost-user\"\nsocket = \"q.sock\"\n\
               [tap.all]\nnetwork = \"lan\"\n\
               [tap.given]\nnetwork = \"lan\"\nmac = \"02:00:00:00:00:09\"\n\
               [cell.two]\non = [\"a\", \"b\"]\nimage = \"/proc/self/exe\"\nnetwork = \"lan\"\n";
        let (a, b) = (on(&more, "a"), on(&more, "b"));
        let homes = |machine: &str| {
            let homes = b.elsewhere.homes.iter().filter(|home| home.machine == machine && home.network == "lan");
            homes.filter_map(|home| home.mac).collect::<std::collections::BTreeSet<_>>()
        };
        // Not that of `given`, which is the same on both.
        let expected = |fabric: &super::super::Fabric| {
            let nics = fabric.machines.iter().flat_map(|machine| &machine.nics).filter(|nic| nic.network == "lan");
            let taps = fabric.taps.iter().filter(|tap| tap.network == "lan" && tap.name != "given");
            let roles = ["gateway", "router"].map(|role| Mac::derived(&[&fabric.name, "lan", role]));
            let ports = fabric.ports.iter().filter_map(|port| port.mac);
            let all = nics.map(|nic| nic.mac).chain(taps.map(|tap| tap.mac)).chain(ports).chain(roles);
            all.collect::<std::collections::BTreeSet<_>>()
        };
        assert_eq!((homes("a").len(), homes("b").len()), (10, 6));
        assert_eq!((homes("a"), homes("b")), (expected(&a), expected(&b)));
        // A member keeps its MAC address when it moves, and one that is on each machine has another
        // on each.
        let moved = on(&FILE.replace("[tap.t]\non = \"a\"", "[tap.t]\non = \"b\""), "b");
        let mac = |fabric: &super::super::Fabric, name: &str| fabric.taps.iter().find(|t| t.name == name).unwrap().mac;
        assert_eq!(mac(&moved, "t"), mac(&a, "t"));
        assert_ne!(mac(&a, "both"), mac(&b, "both"));
    }

    #[test]
    fn the_settings_of_tombolo_span_follow_from_the_file() {
        let expected = "fabric = \"demo-a\"\nmachine = \"a\"\nlisten = \"192.0.2.1:7447\"\npeer = [\"b=192.0.2.2:7447\"]\n\
            keys = \"/x/keys\"\nsite = \"default\"\nlease = 15\n";
        assert_eq!(span_settings(&on(FILE, "a")).unwrap(), expected);
        let open = FILE.replace("keys = \"keys\"", "tls = false\nport = 7000\nsite = \"lab\"\nlease = 20");
        let text = span_settings(&on(&open, "b")).unwrap();
        for part in ["no_tls = true\n", "a=192.0.2.1:7000", "site = \"lab\"\n", "lease = 20\n"] {
            assert!(text.contains(part), "{text}: no {part}");
        }
        assert_eq!(span_settings(&on(&FILE.replace("[span]\nkeys = \"keys\"\n", ""), "a")), None);
    }

    #[test]
    fn sections_follow_what_they_name() {
        let more = "[tap.w]\non = \"a\"\nnetwork = \"lan\"\ngroups = \"web\"\nip = \"10.87.0.9\"\n[[rule]]\naction = \"deny\"\n\
            from = \"u\"\n[[rule]]\naction = \"deny\"\nfrom = \"web\"\nto = \"t\"\n[[rule]]\naction = \"deny\"\nto = \"outside\"\n\
            [[mirror]]\nof = \"t\"\nto = \"w\"\n\
            [export.sums]\non = \"a\"\nlisten = \"0.0.0.0:7000\"\nkeys = \"keys\"\n[import.sums]\nkeys = \"keys\"\n";
        let text = FILE.to_string() + more;
        let count = |f: super::super::Fabric| (f.rules.len(), f.mirrors.len(), f.exports.len(), f.imports.len());
        assert_eq!((count(on(&text, "a")), count(on(&text, "b"))), ((2, 1, 1, 0), (2, 0, 0, 1)));
        let (a, b) = (on(&text, "a"), on(&text, "b"));
        assert_eq!(b.imports[0].from, [("a".to_string(), "192.0.2.1:7000".to_string())]);
        assert_eq!(a.exports[0].proof.as_ref().unwrap().machine, "a");
        let found = faults(&(FILE.to_string() + "[[rule]]\naction = \"deny\"\nfrom = \"t\"\nto = \"u\"\n"));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("expected members of one machine, found \"t\" on a, \"u\" on b"), "{found:?}");
    }

    #[test]
    fn an_addition_takes_nothing_from_any_other_machine_of_the_file() {
        let text =
            FILE.replace("[tap.t]", "[tap.t]\nip = \"10.87.0.9\"").replace("[tap.u]", "[tap.u]\nip = \"10.87.0.8\"");
        // `b` is the first, so `t` is on a later machine than it, and `u` on an earlier one than
        // `a`.
        for (machine, name, ip) in [("b", "t", "10.87.0.9"), ("a", "u", "10.87.0.8")] {
            let fabric = on(&text, machine);
            let add = |section: &str| super::super::add(section, Path::new("added"), &fabric).map(drop);
            let error = add(&format!("[port.{name}]\nkind = \"stream\"\nnetwork = \"own\"\n")).unwrap_err().to_string();
            assert!(error.contains(&format!("as in [tap.{name}] on machine")), "{error}");
            let mac = "mac = \"02:00:00:00:00:09\"";
            let error = add(&format!("[port.x]\nkind = \"stream\"\nnetwork = \"lan\"\nip = \"{ip}\"\n{mac}\n"));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(&format!("that of [tap.{name}] on machine")), "{error}");
            add("[port.x]\nkind = \"stream\"\nnetwork = \"own\"\n").unwrap();
        }
    }

    #[test]
    fn what_machines_take_from_each_other_is_one_fault() {
        let ip = |text: &str| {
            text.replace("[tap.t]", "[tap.t]\nip = \"10.87.0.9\"").replace("[tap.u]", "[tap.u]\nip = \"10.87.0.9\"")
        };
        let found = faults(&ip(FILE));
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("10.87.0.9, which is that of [tap.u] on machine \"b\""), "{found:?}");
        // What the other machine leases, and its gateway.
        for (taken, word) in
            [("10.87.0.20", "machine \"b\" leases 10.87.0.15 to 10.87.0.74"), ("10.87.0.1", "gateway on machine \"b\"")]
        {
            let found = faults(&FILE.replace("[tap.t]", &format!("[tap.t]\nip = \"{taken}\"")));
            assert!(found.len() == 1 && found[0].contains(word), "{found:?}");
        }
        let found = faults(&(FILE.to_string() + "[port.u]\nkind = \"stream\"\non = \"a\"\nnetwork = \"own\"\n"));
        assert!(found.len() == 1 && found[0].contains("as in [tap.u] on machine \"b\""), "{found:?}");
        // A fault that each machine has is told once, also where the numbers of sections differ.
        let found = faults(
            &(FILE.to_string()
                + "[[forward]]\nlisten = \"127.0.0.1:80\"\nto = \"t:80\"\n[[forward]]\nlisten = \"127.0.0.1:81\"\nto = \"v:80\"\n"),
        );
        assert_eq!(found.iter().filter(|fault| fault.contains("\"v\"")).count(), 1, "{found:?}");
    }

    #[test]
    fn an_address_fixed_for_a_member_of_every_machine_is_a_fault() {
        let found = faults(&FILE.replace("[tap.t]\non = \"a\"", "[tap.t]\nip = \"10.87.0.9\""));
        assert!(
            found.len() == 1 && found[0].contains("10.87.0.9, which is that of [tap.t] on machine \"b\""),
            "{found:?}"
        );
    }

    #[test]
    fn any_text_is_read_without_a_panic() {
        for text in [
            "machine = 1\n",
            "[machine]\na = 1\n",
            "[machine.a]\naddress = 7\non = 1\n",
            "span = 1\n",
            "[[machine]]\n",
            "[tap.t]\non = []\n",
            "[machine.a]\n[tap.t]\non = [1]\n[[rule]]\nfrom = 3\n",
            "[network.lan]\nspan = {}\n",
        ] {
            assert!(!faults(text).is_empty(), "{text}");
        }
    }
}
