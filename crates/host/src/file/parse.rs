//! The sections of a fabric file, one function each.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::ops::Range;
use std::path::{Path, PathBuf};

use tombolo_ring::ivshmem::protocol::CALLS;
use tombolo_ring::vxlan::{self, Vni};
use tombolo_shm::environment::variable;
use toml::de::{DeTable, DeValue};

use super::across;
use super::boot::boot;
use super::hosts::{self, Here, Hosts, Which};
use super::model::*;
use super::policy;
use super::problem::{Complaints, FileError, Part, Problem, near, nearest, text_of};
use super::read::{Section, Spots, found, integer};
use super::traffic::traffic;
use super::{check, schema};

/// Words of the head that open sections.
const OPENERS: [&str; 14] = [
    "machine", "span", "worker", "network", "cell", "vm", "tap", "port", "link", "export", "import", "forward", "rule",
    "mirror",
];

/// Reads and checks the file at `path`, for this machine where it is one for several.
pub fn load(path: &Path) -> Result<Fabric, FileError> {
    load_on(path, Which::This)
}

/// As [`load`], for the machine that is meant.
pub fn load_on(path: &Path, which: Which<'_>) -> Result<Fabric, FileError> {
    let text = text_of(path)?;
    parse_on(&text, path, which)
}

/// The name of the fabric of the file at `path`, even if other parts of the file are wrong.
///
/// # Errors
/// If the file cannot be read, or is one for several machines of which none is meant.
pub fn name_of(path: &Path, which: Which<'_>) -> Result<String, FileError> {
    let text = text_of(path)?;
    let (root, _) = DeTable::parse_recoverable(&text);
    let named = root.get_ref().get("name").and_then(|v| v.get_ref().as_str()).and_then(fabric_name);
    let dir = folder_of(path);
    let mut out = Complaints::new(&text);
    let name = match named.or_else(|| folder_name(&dir)) {
        Some(base) => hosts::name_of(root.get_ref(), base, which, &mut out),
        None => {
            nameless(&dir, &mut out);
            None
        }
    };
    name.ok_or_else(|| FileError::Faulty { path: path.into(), problems: out.finish(), part: Part::File })
}

fn folder_of(path: &Path) -> std::path::PathBuf {
    std::path::absolute(path).ok().and_then(|p| p.parent().map(Path::to_path_buf)).unwrap_or_default()
}

/// The name that a folder gives its fabric: `My Lab_2` gives `my-lab-2`. `None` where nothing of it
/// may stay.
fn folder_name(dir: &Path) -> Option<String> {
    let name = dir.file_name()?.to_str()?.to_ascii_lowercase();
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
    let name: String = words.collect::<Vec<_>>().join("-").chars().take(24).collect();
    fabric_name(name.trim_end_matches('-'))
}

/// Complains that neither the file nor its folder gives the fabric a name.
fn nameless(dir: &Path, out: &mut Complaints<'_>) {
    let folder = dir.file_name().map_or_else(|| "/".into(), |n| n.to_string_lossy());
    let expects = schema::section("").keys().find(|k| k.name == "name").map_or("a name", |k| k.expects);
    let found = format!("none, and the folder {folder:?} gives it none");
    out.say(&(0..0), "name", expects, found, Some("add name = \"…\" at the head of the file".into()));
}

/// Reads and checks a fabric file's text. `path` is shown in complaints; its folder is where
/// relative paths start.
pub fn parse(text: &str, path: &Path) -> Result<Fabric, FileError> {
    parse_on(text, path, Which::This)
}

/// As [`parse`], for the machine that is meant.
pub fn parse_on(text: &str, path: &Path, which: Which<'_>) -> Result<Fabric, FileError> {
    parse_with_spots(text, path, which).map(|(fabric, _)| fabric)
}

/// As [`parse_on`], with the places of the keys.
pub(super) fn parse_with_spots(text: &str, path: &Path, which: Which<'_>) -> Result<(Fabric, Spots), FileError> {
    let dir = folder_of(path);
    read(text, path, Fabric::empty(folder_name(&dir).unwrap_or_default(), dir), Part::File, which)
}

/// Reads `text` as additions to a running fabric: sections of cells, VMs, taps, ports and forwards.
/// The whole is checked again. `path` is what complaints show, as in [`parse`].
pub fn add(text: &str, path: &Path, to: &Fabric) -> Result<Fabric, FileError> {
    read(text, path, to.clone(), Part::Addition, Which::This).map(|(fabric, _)| fabric)
}

fn read(text: &str, path: &Path, start: Fabric, part: Part, which: Which<'_>) -> Result<(Fabric, Spots), FileError> {
    let (result, problems) = read_partly(text, start, part, which);
    match result.filter(|_| problems.is_empty()) {
        Some(result) => Ok(result),
        None => Err(FileError::Faulty { path: path.into(), problems, part }),
    }
}

/// What could be read of a file, whatever is wrong with the rest, and its faults. Forwards are
/// known by their numbers: they are left out where one is missing.
pub(super) fn parse_partly(text: &str, path: &Path, which: Which<'_>) -> (Option<(Fabric, Spots)>, Vec<Problem>) {
    let dir = folder_of(path);
    let start = Fabric::empty(folder_name(&dir).unwrap_or_default(), dir);
    let (mut result, problems) = read_partly(text, start, Part::File, which);
    if let Some((fabric, _)) = &mut result {
        let (root, _) = DeTable::parse_recoverable(text);
        let all = root.get_ref().get("forward").and_then(|value| value.get_ref().as_array()).map_or(0, |all| all.len());
        if fabric.forwards.len() != all {
            fabric.forwards.clear();
        }
    }
    (result, problems)
}

fn read_partly(text: &str, start: Fabric, part: Part, which: Which<'_>) -> (Option<(Fabric, Spots)>, Vec<Problem>) {
    let (root, errors) = DeTable::parse_recoverable(text);
    let root = root.get_ref();
    let fresh = || {
        let mut out = Complaints::new(text);
        out.broken = !errors.is_empty();
        for error in &errors {
            let span = error.span().unwrap_or(text.len()..text.len());
            let there = text.get(span.clone()).filter(|s| !s.trim().is_empty());
            let there =
                there.map_or_else(|| "the end of it".to_string(), |s| format!("{:?}", s.lines().next().unwrap_or("")));
            out.say(&span, "", format!("valid TOML ({})", error.message()), there, None);
        }
        out
    };
    let (mut out, mut spots) = (fresh(), Spots::default());
    let hosts = Hosts::read(root, &start.dir, &mut out, &mut spots);
    let is_whole = part == Part::File;
    for word in ["machine", "span"].into_iter().filter(|_| !is_whole) {
        if let Some(value) = root.get(word) {
            out.say(&value.span(), word, "sections of this machine alone", found(value.get_ref()), None);
        }
    }
    let one = |out: &mut Complaints<'_>, spots: &mut Spots, at: Option<(&Hosts, usize, bool)>| {
        let hosts = at.map(|(hosts, index, _)| (hosts, index));
        let mut reader = Reader { out, spots, fabric: start.clone(), hosts, spans: vec![] };
        if let Some((hosts, index, is_chosen)) = at {
            reader.fabric.here = Some(hosts.here(index, is_chosen));
        }
        reader.root(root);
        let mut fabric = reader.fabric;
        if errors.is_empty() {
            check::check(&mut fabric, spots, out);
        } else {
            out.explain_by_syntax();
        }
        fabric
    };
    let mut result = None;
    let problems = if hosts.list.is_empty() || !is_whole {
        if is_whole && errors.is_empty() && root.get("machine").is_none() {
            hosts::without_machines(which, &mut out);
        }
        result = Some(one(&mut out, &mut spots, None));
        out.finish()
    } else {
        let chosen = hosts.choose(which, &mut out);
        let mut problems = out.finish();
        for index in 0..hosts.list.len() {
            let is_result = index == chosen.unwrap_or(0);
            let (mut out, mut own) = (fresh(), spots.clone());
            let fabric = one(&mut out, &mut own, Some((&hosts, index, is_result && chosen.is_some())));
            if is_result {
                let mut fabric = fabric;
                let spans = |name: &str| network_spans(root, name);
                let later = hosts.later(index, spans);
                fabric.elsewhere.members.extend(later.members);
                fabric.elsewhere.taken.extend(later.taken);
                result = Some(fabric);
                spots = own;
            }
            problems.extend(out.finish());
        }
        once(problems)
    };
    (result.map(|fabric| (fabric, spots)), problems)
}

/// Whether a network of the file spans its machines.
fn network_spans(root: &DeTable<'_>, name: &str) -> bool {
    let networks = root.get("network").and_then(|value| value.get_ref().as_table());
    let network = networks.and_then(|all| all.get(name)).and_then(|value| value.get_ref().as_table());
    network.is_some_and(|table| table.contains_key("span"))
}

/// Faults that several machines of one file have, each once: the number of a forward or rule may
/// differ between them.
fn once(mut problems: Vec<Problem>) -> Vec<Problem> {
    problems.sort_by(|a, b| (a.line, a.column, &a.key).cmp(&(b.line, b.column, &b.key)));
    let mut out: Vec<Problem> = Vec::new();
    for problem in problems {
        let is_same = |other: &Problem| {
            (other.line, other.column, &other.expected, &other.found)
                == (problem.line, problem.column, &problem.expected, &problem.found)
        };
        if !out.iter().any(is_same) {
            out.push(problem);
        }
    }
    out
}

const DEFAULT_LEASE_S: u32 = 3600;

/// A name usable in files, devices and DNS: 1 to 24 of a-z, 0-9 and `-`, not at an end.
pub(super) fn clean_name(name: &str) -> Option<String> {
    let ok = (1..=24).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-');
    ok.then(|| name.to_string())
}

/// The name that was probably meant by one that is none, as a hint: `web-1` for `Web_1`.
fn near_name(name: &str) -> Option<String> {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let text: String = name.chars().map(plain).take(24).collect();
    // Of runs of other characters one hyphen is left.
    let words: Vec<_> = text.split('-').filter(|word| !word.is_empty()).collect();
    clean_name(&words.join("-")).map(|name| format!("did you mean \"{name}\"?"))
}

/// A fabric's name is that of a folder beside the one in which services listen
/// (`tombolo_rpc::folder`).
fn fabric_name(name: &str) -> Option<String> {
    clean_name(name).filter(|name| name != "services")
}

fn interface_name(name: &str) -> Option<String> {
    let ok = (1..=15).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic() && b != b'/' && b != b':');
    (ok && name != "." && name != "..").then(|| name.to_string())
}

/// What identifies an attachment of CNI: network, container and interface.
fn container_id(text: &str) -> Option<String> {
    let ok = (1..=400).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./".contains(&b));
    ok.then(|| text.to_string())
}

/// A name that `xl` gives a domain.
fn domain_of_xen(name: &str) -> Option<String> {
    let ok = (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic() && b != b'/');
    ok.then(|| name.to_string())
}

/// QEMU's word for the format that a disk's name tells.
fn format_of(path: &Path) -> String {
    if path.extension().is_some_and(|e| e == "qcow2") { "qcow2" } else { "raw" }.to_string()
}

fn size_mib(text: &str) -> Option<u32> {
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let factor = match unit {
        "M" | "MiB" => 1,
        "G" | "GiB" => 1024,
        _ => return None,
    };
    digits.parse::<u32>().ok()?.checked_mul(factor).filter(|m| (1..=1 << 20).contains(m))
}

/// A size in bytes: "64K", "1M", "0".
fn size_bytes(text: &str) -> Option<u64> {
    if text == "0" {
        return Some(0);
    }
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit())?);
    let shift = match unit {
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// A region's size: a BAR, so a power of two.
fn region(s: &mut Section<'_, '_, '_, '_>, from: u64, to: u64) -> u64 {
    let size = |t: &str| size_bytes(t).filter(|n| n.is_power_of_two() && (from..=to).contains(n));
    s.text("region", size).unwrap_or(1 << 20)
}

fn server(text: &str) -> Option<SocketAddr> {
    let address = text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 53));
    address.or_else(|_| text.parse::<SocketAddr>()).ok()
}

struct Reader<'c, 't> {
    out: &'c mut Complaints<'t>,
    spots: &'c mut Spots,
    fabric: Fabric,
    /// The machines of a file for several, and which of them it is read for.
    hosts: Option<(&'c Hosts, usize)>,
    /// The networks with `span`: VNI and UDP port.
    spans: Vec<(String, Vni, u16)>,
}

/// The beginning of the name of the port that `span` gives a network; the network's name follows.
pub(super) const SPAN: &str = "span-";

pub(super) type Named<'a, 'i> = (String, Range<usize>, &'a DeTable<'i>);

/// The tables `[WORD.NAME]`, with names checked.
pub(super) fn named<'a, 'i>(root: &'a DeTable<'i>, word: &str, out: &mut Complaints<'_>) -> Vec<Named<'a, 'i>> {
    let Some(value) = root.get(word) else { return vec![] };
    let form = schema::section(word).form;
    let Some(tables) = value.get_ref().as_table() else {
        out.say(&value.span(), word, format!("sections {form}"), found(value.get_ref()), None);
        out.refuse(word, "");
        return vec![];
    };
    let mut all = Vec::new();
    for (key, value) in tables {
        let path = format!("{word}.{}", key.get_ref());
        let Some(name) = clean_name(key.get_ref()) else {
            let there = format!("the name {:?}", key.get_ref());
            out.refuse(word, key.get_ref());
            let hint = near_name(key.get_ref());
            out.say(&key.span(), path, "a name of 1 to 24 of a-z, 0-9 and -", there, hint);
            continue;
        };
        match value.get_ref() {
            // The span of a table's own header is empty for dotted keys; its key always has a
            // place in the text.
            DeValue::Table(table) => all.push((name, key.span(), table)),
            other => {
                let keys: Vec<_> = schema::section(word).keys().map(|k| k.name).collect();
                let is_key = keys.contains(&name.as_str());
                let hint = is_key.then(|| format!("give the {word} a name: {form}"));
                out.refuse(word, if is_key { "" } else { &name });
                out.say(&value.span(), path, format!("a section {form}"), found(other), hint);
            }
        }
    }
    all
}

impl<'t> Reader<'_, 't> {
    fn root(&mut self, root: &DeTable<'_>) {
        let mut head = Section::open("", String::new(), 0..0, root, self.out, self.spots, &OPENERS);
        if let Some(name) = head.text_or("name", fabric_name, near_name) {
            self.fabric.name = name;
        }
        if self.fabric.name.is_empty()
            && !root.contains_key("name")
            && !self.out.broken
            && !self.out.doubted("", "name")
        {
            nameless(&self.fabric.dir, self.out);
        }
        let base = self.fabric.name.clone();
        if let Some((hosts, index)) = self.hosts.filter(|_| !base.is_empty()) {
            let machine = &hosts.list[index].name;
            match hosts::name_on(&base, machine) {
                Some(name) => self.fabric.name = name,
                None => hosts::too_long(&base, machine, hosts.place(index), self.out),
            }
        }
        self.strangers(root);
        let mut workers = self.named(root, "worker");
        workers.sort_by_key(|(_, span, _)| span.start);
        for (name, span, table) in workers {
            let mut s = self.open("worker", &(name.clone(), span, table));
            let worker = Worker {
                cpu: s.number("cpu", 0, 4095).map(|n| n as usize),
                budget: s.number("budget", 1, 256).unwrap_or(64) as u32,
                busy_poll_us: s.number("busy_poll_us", 0, 1_000_000).unwrap_or(0) as u32,
                name,
            };
            self.fabric.workers.push(worker);
        }
        if self.fabric.workers.is_empty() {
            self.fabric.workers.push(Worker { name: "main".into(), cpu: None, budget: 64, busy_poll_us: 0 });
        }
        // In the file's order, so that default subnets follow it.
        let mut networks = self.named(root, "network");
        networks.sort_by_key(|(_, span, _)| span.start);
        if let Some((hosts, index)) = self.hosts {
            let spans = |name: &str| networks.iter().any(|(n, _, table)| n == name && table.contains_key("span"));
            self.fabric.elsewhere = hosts.elsewhere(index, &base, spans);
        }
        for (name, span, table) in networks {
            self.network(name, span, table, &base);
        }
        for (name, span, table) in self.named(root, "cell") {
            self.machine(MachineKind::Cell, name, span, table, &base);
        }
        for (name, span, table) in self.named(root, "vm") {
            self.machine(MachineKind::Vm, name, span, table, &base);
        }
        self.depend_on_all_of_a_section();
        for (name, span, table) in self.named(root, "tap") {
            self.tap(name, span, table, &base);
        }
        for (name, span, table) in self.named(root, "port") {
            self.port(name, span, table);
        }
        self.tunnels();
        for (name, span, table) in self.named(root, "link") {
            self.link(name, span, table);
        }
        let (dir, here) = (self.fabric.dir.clone(), self.fabric.here.clone());
        for (name, span, table) in self.named(root, "export") {
            let mut s = self.open("export", &(name.clone(), span, table));
            let export = across::export(&mut s, name, &dir, here.as_ref());
            self.fabric.exports.push(export);
        }
        let exporters = self.hosts.map(|(hosts, _)| across::exporters(root, hosts)).unwrap_or_default();
        for (name, span, table) in self.named(root, "import") {
            let mut s = self.open("import", &(name.clone(), span, table));
            let import = across::import(&mut s, name, &dir, here.as_ref(), &exporters);
            self.fabric.imports.push(import);
        }
        self.forwards(root);
        self.policies(root);
    }

    /// Notes which sections a misspelt word of the head keeps from being read.
    fn strangers(&mut self, root: &DeTable<'_>) {
        for (word, value) in root {
            if OPENERS.contains(&word.get_ref().as_ref()) {
                continue;
            }
            let meant = nearest(word.get_ref(), OPENERS);
            match (value.get_ref(), meant) {
                (DeValue::Table(tables), _) => {
                    tables.keys().for_each(|name| self.out.refuse(meant.unwrap_or_default(), name.get_ref()));
                }
                (_, Some(meant)) => self.out.refuse(meant, ""),
                (_, None) => {}
            }
        }
    }

    /// As [`named`], without those that run on other machines.
    fn named<'a, 'i>(&mut self, root: &'a DeTable<'i>, word: &str) -> Vec<Named<'a, 'i>> {
        let mut all = named(root, word, self.out);
        if let Some((hosts, index)) = self.hosts {
            all.retain(|(name, ..)| hosts.has(index, &format!("{word}.{name}")));
        }
        all
    }

    /// What a member's MAC address is derived from, besides its name: the name of the fabric, or of
    /// the file for a member that no other machine has. So it keeps its address when it moves to
    /// another one.
    fn mac_base(&self, section: &str, base: &str) -> String {
        let is_alone = self.hosts.is_some_and(|(hosts, _)| hosts.is_alone(section));
        if is_alone { base.into() } else { self.fabric.name.clone() }
    }

    /// The tunnels of networks with `span`.
    fn tunnels(&mut self) {
        let Some(Here { host, others, span, .. }) = self.fabric.here.clone() else { return };
        if !self.hosts.is_some_and(|(hosts, _)| hosts.have_addresses) {
            return;
        }
        for (network, vni, udp_port) in std::mem::take(&mut self.spans) {
            let kind = PortKind::Vxlan(Vxlan {
                vni,
                local: host.address,
                remotes: others.iter().map(|other| other.address).collect(),
                udp_port,
                // tombolo-span tells who is where.
                learning: span.is_none(),
            });
            self.fabric.ports.push(PortDecl {
                name: format!("{SPAN}{network}"),
                network,
                kind,
                mac: None,
                ip: None,
                guard: Guard::Off,
                ip6: Ip6::Unsaid,
                traffic: Traffic::default(),
                boot: None,
                container: None,
                netns: None,
            });
        }
    }

    fn open<'s, 'a, 'i>(&'s mut self, word: &str, (name, span, table): &Named<'a, 'i>) -> Section<'a, 'i, 's, 't> {
        Section::open(word, format!("{word}.{name}"), span.clone(), table, self.out, self.spots, &[])
    }

    fn network(&mut self, name: String, span: Range<usize>, table: &DeTable<'_>, base: &str) {
        let index = self.fabric.networks.len() as u32;
        let first = self.fabric.workers[0].name.clone();
        let (hosts, here, fabric) = (self.hosts, self.fabric.here.clone(), self.fabric.name.clone());
        let mut s = self.open("network", &(name.clone(), span, table));
        let fallback = Subnet { base: Ipv4Addr::new(10, 87, (index % 256) as u8, 0), prefix: 24 };
        let subnet = s.text_or("subnet", Subnet::parse, Subnet::near).unwrap_or(fallback);
        if s.raw("subnet").is_none() && s.refused("network") {
            s.doubt("subnet");
        }
        let tunnel = span_of(&mut s, hosts);
        // Of a network that spans machines the file has what the first of them has.
        let (at, machines) = hosts.filter(|_| tunnel.is_some()).map_or((0, 1), |(hosts, at)| (at, hosts.list.len()));
        let gateway = s.text("gateway", |t| t.parse().ok());
        let uplink = uplink(&mut s);
        let router = s.text("router", |t| t.parse().ok()).unwrap_or_else(|| subnet.nth(2));
        s.applies("uplink", Some(uplink.word()));
        let router = uplink.forwards().then_some(router);
        // A network that joins a real one has that one's DHCP server; a second would lease
        // addresses to strangers.
        let low = if machines > 1 { hosts::own_addresses(machines) } else { 0 };
        let dhcp = dhcp(&mut s, subnet, !matches!(uplink, Uplink::Bridge { .. }), low);
        // Nor does it answer for an address there that it was not given.
        let asked = dhcp.is_some() || !matches!(uplink, Uplink::Bridge { .. });
        let gateway = gateway.or_else(|| asked.then(|| subnet.nth(1)));
        let domain = s.text("domain", domain_name).unwrap_or_else(|| format!("{base}.internal"));
        let overhead =
            here.filter(|_| tunnel.is_some()).map_or(0, |here| vxlan::overhead_bytes(here.host.address.is_ipv6()));
        let mtu = s.number("mtu", 576, 9216).unwrap_or(1500 - overhead as i64) as u16;
        let dns = s.list("dns", false, server).unwrap_or_default();
        let worker = s.string("worker").unwrap_or(first);
        let bypass = bypass(&mut s).filter(|_| uplink == Uplink::Kernel);
        let policy = policy::otherwise(&mut s);
        let boot = boot(&mut s);
        // As with DHCP, and without a gateway nothing would advertise it.
        let joins = matches!(uplink, Uplink::Bridge { .. });
        let ipv6 = match s.text("ipv6", Ipv6::parse).unwrap_or(if joins { Ipv6::Off } else { Ipv6::Auto }) {
            Ipv6::Auto => Some(derived_prefix(if tunnel.is_some() { base } else { &fabric }, &name)),
            Ipv6::Prefix(prefix) => Some(prefix),
            Ipv6::Off => None,
        };
        let ipv6 = ipv6.filter(|_| gateway.is_some());
        let uplink6 = uplink6(&mut s);
        let by_default = if mtu >= IPV6_MTU { Uplink6::Masquerade } else { Uplink6::Off };
        let uplink6 = match ipv6 {
            Some(_) if uplink.forwards() => uplink6.unwrap_or(by_default),
            _ => Uplink6::Off,
        };
        if let Some(((hosts, at), (vni, udp_port))) = hosts.zip(tunnel) {
            let range = dhcp.unwrap_or_else(|| whole_range(subnet, low));
            hosts.of_network(at, &name, [gateway, router], dhcp, range, &mut self.fabric.elsewhere);
            hosts.roles(base, &name, [gateway, router], &mut self.fabric.elsewhere);
            self.spans.push((name.clone(), vni, udp_port));
        }
        let counted_on = |ip| hosts::counted_on(ip, at);
        self.fabric.networks.push(Network {
            name,
            subnet,
            gateway: gateway.map(counted_on),
            router: router.map(counted_on),
            dhcp: dhcp.map(|dhcp| if machines > 1 { hosts::share(dhcp, at, machines) } else { dhcp }),
            uplink,
            domain,
            mtu,
            dns,
            worker,
            bypass,
            policy,
            ipv6,
            boot,
            uplink6,
        });
    }

    fn machine(&mut self, kind: MachineKind, name: String, span: Range<usize>, table: &DeTable<'_>, base: &str) {
        let fabric = self.mac_base(&format!("{}.{name}", kind.word()), base);
        let (only, none_at_all) = (self.only_network(), self.fabric.networks.is_empty());
        let dir = self.fabric.dir.clone();
        let file = |text: &str| (!text.is_empty()).then(|| dir.join(text));
        let mut s = self.open(kind.word(), &(name.clone(), span, table));
        let cell = kind == MachineKind::Cell;
        let attach = s
            .word(
                "attach",
                &[
                    ("vhost-user", Attach::VhostUser),
                    ("stream", Attach::Stream),
                    ("ivshmem", Attach::Ivshmem),
                    ("ivshmem-plain", Attach::IvshmemPlain),
                    ("xen", Attach::Xen),
                ],
            )
            .unwrap_or(Attach::VhostUser);
        s.applies("attach", Some(attach.word()));
        let from_network = !cell && matches!(s.raw("boot"), Some((DeValue::Boolean(true) | DeValue::Table(_), _)));
        let netboot = if cell { None } else { boot(&mut s) };
        let (boot, cmdline) = if cell {
            let app = s.string("app");
            let image = match s.text("image", file) {
                Some(path) => {
                    if app.is_some() {
                        let spot = s.raw("app").map(|(_, span)| span).unwrap_or(0..0);
                        s.wrong("app", &spot, "both app and image", Some("keep one of them".into()));
                    }
                    Image::Path(path)
                }
                None => Image::App(app.unwrap_or_else(|| name.clone())),
            };
            (Boot::Cell(image), s.text("args", |t| Some(t.to_string())).unwrap_or_default())
        } else {
            let kernel = s.text("kernel", file);
            let initrd = s.text("initrd", file);
            let format = s.word("disk_format", &[("raw", "raw"), ("qcow2", "qcow2")]).unwrap_or("raw");
            let first = s.text("disk", file).map(|path| (path, format.to_string()));
            let more = s.list("disks", true, file).unwrap_or_default();
            let disks =
                first.into_iter().chain(more.into_iter().map(|path| (path.clone(), format_of(&path)))).collect();
            let cloud_init = s.text("cloud_init", file);
            if s.raw("kernel").is_none() && s.raw("disk").is_none() && !s.doubted("disk") && !from_network {
                s.missing("kernel");
            }
            let console = if attach == Attach::Xen { "console=hvc0" } else { "console=ttyS0" };
            let cmdline = s.text("cmdline", |t| Some(t.to_string())).unwrap_or_else(|| console.into());
            for on in ["kernel", "disk"] {
                let given = s.raw(on).map(|_| "");
                s.applies(on, given);
            }
            (Boot::Vm { kernel, initrd, disks, cloud_init }, cmdline)
        };
        let networks = s.list("network", true, |t| Some(t.to_string())).or(only.map(|n| vec![n])).unwrap_or_default();
        if s.raw("network").is_none() {
            no_network(&mut s, networks.is_empty(), none_at_all);
        }
        let counted = s.number("count", 1, 256);
        if let Some(n) = counted {
            alone_in_its_section(&mut s, &name, n);
        }
        let count = networks.len();
        let macs = s.list("mac", true, Mac::parse).unwrap_or_default();
        let ips: Vec<Ipv4Addr> = s.list("ip", true, |t| t.parse().ok()).unwrap_or_default();
        for (key, len) in [("mac", macs.len()), ("ip", ips.len())] {
            if len > count && !s.doubted("network") {
                let spot = s.raw(key).map(|(_, span)| span).unwrap_or(0..0);
                s.wrong(key, &spot, format!("{len} of them for {count} network(s)"), None);
            }
        }
        let nics = networks
            .into_iter()
            .enumerate()
            .map(|(i, network)| Nic {
                mac: macs.get(i).copied().unwrap_or_else(|| Mac::derived(&[&fabric, &name, &network, &i.to_string()])),
                ip: ips.get(i).copied(),
                network,
            })
            .collect();
        let machine = Machine {
            section: format!("{}.{name}", kind.word()),
            kind,
            boot,
            nics,
            memory_mib: s.text("memory", size_mib).unwrap_or(if cell { 32 } else { 256 }),
            cpus: s.number("cpus", 1, 64).unwrap_or(1) as u16,
            machine: s
                .word("machine", &[("microvm", MachineType::Microvm), ("q35", MachineType::Q35)])
                .unwrap_or(if cell { MachineType::Microvm } else { MachineType::Q35 }),
            accel: s
                .word("accel", &[("auto", Accel::Auto), ("kvm", Accel::Kvm), ("tcg", Accel::Tcg)])
                .unwrap_or(Accel::Auto),
            cmdline,
            iommu: !cell && s.flag("iommu").unwrap_or(false),
            agent: !cell && s.flag("agent").unwrap_or(false),
            qemu: s.list("qemu", false, |t| Some(t.to_string())).unwrap_or_default(),
            xl: s.list("xl", false, |t| (!t.contains('\n')).then(|| t.to_string())).unwrap_or_default(),
            attach,
            region: region(&mut s, 1 << 20, 16 << 20),
            queues: s.number("queues", 1, 8).unwrap_or(1) as u16,
            guard: guard(&mut s).unwrap_or(Guard::Ip),
            ip6: ip6(&mut s),
            traffic: traffic(&mut s),
            restart: s
                .word(
                    "restart",
                    &[("no", Restart::No), ("on-failure", Restart::OnFailure), ("always", Restart::Always)],
                )
                .unwrap_or(Restart::No),
            depends_on: s.list("depends_on", true, |t| Some(t.to_string())).unwrap_or_default(),
            from_network,
            netboot,
            name,
        };
        match counted {
            None => self.fabric.machines.push(machine),
            Some(last) => self.fabric.machines.extend((1..=last).map(|n| numbered(&machine, n, &fabric))),
        }
    }

    /// Gives a `depends_on` that names a section with `count` the names of its machines.
    fn depend_on_all_of_a_section(&mut self) {
        let known: Vec<(String, String)> =
            self.fabric.machines.iter().map(|m| (m.name.clone(), m.section.clone())).collect();
        let meant = |name: &String| -> Vec<String> {
            let of_it = |section: &str| section.split_once('.').is_some_and(|(_, s)| s == name);
            match known.iter().any(|(other, _)| other == name) {
                true => vec![name.clone()],
                false => {
                    let all: Vec<_> = known.iter().filter(|(_, s)| of_it(s)).map(|(n, _)| n.clone()).collect();
                    if all.is_empty() { vec![name.clone()] } else { all }
                }
            }
        };
        for machine in &mut self.fabric.machines {
            machine.depends_on = machine.depends_on.iter().flat_map(meant).collect();
        }
    }

    fn only_network(&self) -> Option<String> {
        match &self.fabric.networks[..] {
            [only] => Some(only.name.clone()),
            _ => None,
        }
    }

    fn tap(&mut self, name: String, span: Range<usize>, table: &DeTable<'_>, base: &str) {
        let (fabric, only) = (self.mac_base(&format!("tap.{name}"), base), self.only_network());
        let none_at_all = self.fabric.networks.is_empty();
        let mut s = self.open("tap", &(name.clone(), span, table));
        let network = one_network(&mut s, only, none_at_all);
        let device = s.text("device", interface_name).unwrap_or_else(|| name.clone());
        if s.raw("device").is_none() && interface_name(&device).is_none() {
            s.missing("device");
        }
        let adopt = s.flag("adopt").unwrap_or(false);
        s.applies("adopt", Some(if adopt { "true" } else { "false" }));
        let tap = Tap {
            device,
            adopt,
            netns: s.string("netns"),
            ip: s.text("ip", |t| t.parse().ok()),
            mac: s.text("mac", Mac::parse).unwrap_or_else(|| Mac::derived(&[&fabric, &name, &network])),
            guard: guard(&mut s).unwrap_or(Guard::Off),
            ip6: ip6(&mut s),
            traffic: traffic(&mut s),
            accept_ra: s.flag("accept_ra").unwrap_or(false),
            container: s.text("container", container_id),
            monitor: s.flag("monitor").unwrap_or(false),
            boot: boot(&mut s),
            network,
            name,
        };
        s.applies("monitor", Some(if tap.monitor { "true" } else { "false" }));
        if tap.container.is_some() && !(tap.adopt && tap.netns.is_some()) {
            s.missing(if tap.adopt { "netns" } else { "adopt" });
        }
        self.fabric.taps.push(tap);
    }

    fn port(&mut self, name: String, span: Range<usize>, table: &DeTable<'_>) {
        let (only, none_at_all) = (self.only_network(), self.fabric.networks.is_empty());
        let dir = self.fabric.dir.clone();
        let mut s = self.open("port", &(name.clone(), span, table));
        let network = one_network(&mut s, only, none_at_all);
        let socket = s.text("socket", |t| (!t.is_empty()).then(|| dir.join(t)));
        let connect = s.flag("connect").unwrap_or(false);
        let device = s.text("device", interface_name);
        let queues = s.number("queues", 1, 8).unwrap_or(1) as u16;
        if s.raw("kind").is_none() {
            s.missing("kind");
        }
        let version = s.number("version", 1, 2).unwrap_or(1) as u8;
        let region = region(&mut s, 1 << 20, 16 << 20);
        let vectors = s.number("vectors", 1, 16).unwrap_or(2) as u32;
        let domain = s.text("domain", domain_of_xen).unwrap_or_else(|| name.clone());
        let vif = s.number("vif", 0, 255).unwrap_or(0) as u32;
        let kinds = [("vhost-user", 0), ("stream", 1), ("packet", 2), ("ivshmem", 3), ("xen", 4), ("vxlan", 5)];
        let word = s.word("kind", &kinds);
        if let Some(kind) = word {
            s.applies("kind", kinds.iter().find(|(_, k)| *k == kind).map(|(word, _)| *word));
        }
        if connect && matches!(word, Some(0 | 1)) && socket.is_none() && s.raw("socket").is_none() {
            s.missing("socket");
        }
        let kind = match word {
            Some(0) => PortKind::VhostUser { socket, queues, connect },
            Some(3) => PortKind::Ivshmem { socket, version, region, vectors },
            Some(4) => PortKind::Xen { domain, vif, queues },
            Some(5) => PortKind::Vxlan(tunnel(&mut s)),
            Some(2) => {
                if s.raw("device").is_none() {
                    s.missing("device");
                }
                PortKind::Packet { device: device.unwrap_or_default() }
            }
            _ => PortKind::Stream { socket, connect },
        };
        let mac = s.text("mac", Mac::parse);
        let ip = s.text("ip", |t| t.parse().ok());
        let guard = guard(&mut s).unwrap_or(match (mac, ip) {
            (Some(_), Some(_)) => Guard::Ip,
            (Some(_), None) => Guard::Mac,
            (None, _) => Guard::Off,
        });
        let boot = boot(&mut s);
        if mac.is_none() && s.raw("mac").is_none() && (ip.is_some() || guard != Guard::Off || boot.is_some()) {
            s.missing("mac");
        }
        let (ip6, traffic) = (ip6(&mut s), traffic(&mut s));
        let (container, netns) = (s.text("container", container_id), s.string("netns"));
        if container.is_some() && netns.is_none() {
            s.missing("netns");
        }
        let port = PortDecl { name, network, kind, mac, ip, guard, ip6, traffic, boot, container, netns };
        self.fabric.ports.push(port);
    }

    fn link(&mut self, name: String, span: Range<usize>, table: &DeTable<'_>) {
        let mut s = self.open("link", &(name.clone(), span, table));
        let between = s.list("between", false, |t| Some(t.to_string())).unwrap_or_default();
        if s.raw("between").is_none() {
            s.missing("between");
        }
        let (service, to) = (s.text("service", across::service_name), s.text("to", across::service_name));
        // The fabric's own seat, and what it speaks there.
        let (seats, protocol) = if service.is_some() || to.is_some() { (1, CALLS) } else { (0, 0x4001) };
        let link = Link {
            everybody: s.word("callers", &[("owner", false), ("everybody", true)]).unwrap_or(false),
            service,
            to,
            seats: s.number("seats", 0, 62).map_or(seats, |n| n as u32),
            plain: s.flag("plain").unwrap_or(false),
            region: region(&mut s, 64 << 10, 1 << 30),
            rw: s.text("rw", |t| size_bytes(t).filter(|n| n.is_multiple_of(4096))).unwrap_or(0),
            protocol: s.number("protocol", 0, 0xffff).map_or(protocol, |n| n as u32),
            vectors: s.number("vectors", 1, 16).unwrap_or(2) as u32,
            between,
            name,
        };
        let given = s.raw("service").map(|_| "");
        s.applies("service", given);
        s.applies("plain", Some(if link.plain { "true" } else { "false" }));
        self.fabric.links.push(link);
    }

    /// The tables of the list `[[WORD]]`, with their paths: those of an addition count on from the
    /// `base` that there are.
    fn listed<'a, 'i>(&mut self, root: &'a DeTable<'i>, word: &str, base: usize) -> Vec<Named<'a, 'i>> {
        let Some(value) = root.get(word) else { return vec![] };
        let form = schema::section(word).form;
        let Some(array) = value.get_ref().as_array() else {
            let hint = Some(format!("write {form}"));
            self.out.say(&value.span(), word, format!("sections {form}"), found(value.get_ref()), hint);
            return vec![];
        };
        let mut out = Vec::new();
        for (i, item) in array.iter().enumerate() {
            if self.hosts.is_some_and(|(hosts, at)| !hosts.has(at, &format!("{word}[{i}]"))) {
                continue;
            }
            // Counted without those that run on other machines, as the check counts them.
            let path = format!("{word}[{}]", base + out.len());
            match item.get_ref().as_table() {
                Some(table) => out.push((path, item.span(), table)),
                None => self.out.say(&item.span(), path, format!("a section {form}"), found(item.get_ref()), None),
            }
        }
        out
    }

    fn policies(&mut self, root: &DeTable<'_>) {
        for (path, span, table) in self.listed(root, "rule", self.fabric.rules.len()) {
            let mut s = Section::open("rule", path, span, table, self.out, self.spots, &[]);
            self.fabric.rules.push(policy::rule(&mut s));
        }
        for (path, span, table) in self.listed(root, "mirror", self.fabric.mirrors.len()) {
            let mut s = Section::open("mirror", path, span, table, self.out, self.spots, &[]);
            self.fabric.mirrors.push(policy::mirror(&mut s));
        }
    }

    fn forwards(&mut self, root: &DeTable<'_>) {
        for (path, span, table) in self.listed(root, "forward", self.fabric.forwards.len()) {
            let mut s = Section::open("forward", path, span, table, self.out, self.spots, &[]);
            let proto = s.word("proto", &[("tcp", Proto::Tcp), ("udp", Proto::Udp)]).unwrap_or(Proto::Tcp);
            let listen = s.text_or("listen", listener, near_listener);
            let to = s.text_or("to", forward_target, |text| bracketed(text).map(|meant| meant.1));
            let network = s.string("network").unwrap_or_default();
            for key in ["listen", "to"] {
                if s.raw(key).is_none() {
                    s.missing(key);
                }
            }
            // With one half at fault the other is checked all the same; its place is kept by a port 0. One with both at fault
            // keeps its number, which faults of the others are told by.
            let ip = IpAddr::from(Ipv4Addr::UNSPECIFIED);
            let listen = listen.unwrap_or_else(|| SocketAddr::new(ip, 0));
            let (target, port) = to.unwrap_or((Target::Ip(ip), 0));
            self.fabric.forwards.push(Forward { proto, listen, target, port, network, ip });
        }
    }
}

/// What `{n}` stands for in a section with `count`: the number of each machine.
const NUMBER: &str = "{n}";

/// Complains about keys that several machines of one section cannot share.
fn alone_in_its_section(s: &mut Section<'_, '_, '_, '_>, name: &str, count: i64) {
    if clean_name(&format!("{name}-{count}")).is_none() {
        let spot = s.raw("count").map(|(_, span)| span).unwrap_or(0..0);
        let hint = Some("give the section a shorter name: the machines are NAME-1 and so on".into());
        s.wrong("count", &spot, format!("one that makes the name {name}-{count} longer than 24"), hint);
    }
    for key in ["mac", "ip"] {
        if let Some((value, span)) = s.raw(key).filter(|_| count > 1) {
            let hint = Some(format!("leave `{key}` out: each machine gets its own"));
            s.wrong(key, &span, format!("{} for {count} machines", found(value)), hint);
        }
    }
    let has_disks = count > 1 && s.has_key("disk");
    for key in ["disk", "disks"].into_iter().filter(|_| has_disks) {
        let Some((value, span)) = s.raw(key) else { continue };
        let alone = |value: &DeValue<'_>| value.as_str().is_some_and(|text| !text.contains(NUMBER));
        let shared = alone(value) || value.as_array().is_some_and(|list| list.iter().any(|v| alone(v.get_ref())));
        if shared {
            let hint = Some(format!("put {NUMBER} into the name: it is the number of each machine"));
            s.wrong(key, &span, format!("one disk for {count} machines"), hint);
        }
    }
}

/// The `n`-th machine of a section with `count`.
fn numbered(machine: &Machine, n: i64, fabric: &str) -> Machine {
    let number = n.to_string();
    let text = |text: &str| text.replace(NUMBER, &number);
    let path = |path: &Path| path.to_str().map_or_else(|| path.to_path_buf(), |p| text(p).into());
    let mut out = machine.clone();
    out.name = format!("{}-{n}", machine.name);
    out.cmdline = text(&machine.cmdline);
    for (i, nic) in out.nics.iter_mut().enumerate() {
        // One machine may have been given an address.
        let derived = Mac::derived(&[fabric, &machine.name, &nic.network, &i.to_string()]);
        if nic.mac == derived {
            nic.mac = Mac::derived(&[fabric, &out.name, &nic.network, &i.to_string()]);
        }
    }
    if let Boot::Vm { disks, cloud_init, .. } = &mut out.boot {
        disks.iter_mut().for_each(|(disk, _)| *disk = path(disk));
        *cloud_init = cloud_init.as_deref().map(path);
    }
    out
}

fn domain_name(text: &str) -> Option<String> {
    let label = |l: &str| (1..=63).contains(&l.len()) && l.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    (text.len() <= 200 && text.split('.').all(label)).then(|| text.to_ascii_lowercase())
}

fn guard(s: &mut Section<'_, '_, '_, '_>) -> Option<Guard> {
    s.word("guard", &[("ip", Guard::Ip), ("mac", Guard::Mac), ("off", Guard::Off)])
}

/// The tunnel of a network that spans machines: VNI and UDP port.
fn span_of(s: &mut Section<'_, '_, '_, '_>, hosts: Option<(&Hosts, usize)>) -> Option<(Vni, u16)> {
    let (value, span) = s.raw("span")?;
    let vni = |value: &DeValue<'_>| integer(value).and_then(|n| u32::try_from(n).ok()).and_then(Vni::new);
    let port = |value: &DeValue<'_>| integer(value).and_then(|n| u16::try_from(n).ok()).filter(|n| *n > 0);
    let tunnel = match value {
        DeValue::Table(table) => {
            let known = table.keys().all(|key| ["vni", "udp_port"].contains(&key.get_ref().as_ref()));
            let udp_port = table.get("udp_port").map_or(Some(vxlan::PORT), |value| port(value.get_ref()));
            table.get("vni").and_then(|value| vni(value.get_ref())).zip(udp_port).filter(|_| known)
        }
        other => vni(other).map(|vni| (vni, vxlan::PORT)),
    };
    match (tunnel, hosts) {
        (None, _) => s.wrong("span", &span, found(value), None),
        (_, Some((hosts, _))) if hosts.list.len() > 1 => {}
        (_, _) if s.refused("machine") => {}
        _ => {
            let hint = Some("in a file of one machine add a port of kind \"vxlan\" (docs/span.md)".to_string());
            s.wrong("span", &span, "fewer than two sections [machine.NAME]", hint);
        }
    }
    tunnel
}

/// The keys of a port of kind "vxlan".
fn tunnel(s: &mut Section<'_, '_, '_, '_>) -> Vxlan {
    for key in ["vni", "local", "remotes"] {
        if s.raw(key).is_none() {
            s.missing(key);
        }
    }
    let none = Vni::new(0).expect("it has less than 24 bits");
    Vxlan {
        vni: s.number("vni", 0, Vni::MAX.into()).and_then(|n| Vni::new(n as u32)).unwrap_or(none),
        local: s.text("local", |t| t.parse().ok()).unwrap_or(Ipv4Addr::LOCALHOST.into()),
        remotes: s.list("remotes", false, |t| t.parse().ok()).unwrap_or_default(),
        udp_port: s.number("udp_port", 1, 65535).map_or(vxlan::PORT, |n| n as u16),
        learning: s.flag("learning").unwrap_or(true),
    }
}

fn ip6(s: &mut Section<'_, '_, '_, '_>) -> Ip6 {
    match s.raw("ip6") {
        None => Ip6::Unsaid,
        Some((value, _)) if value.as_str() == Some("any") => Ip6::Any,
        Some(_) => s.list("ip6", true, Prefix6::parse).map_or(Ip6::Unsaid, Ip6::Only),
    }
}

fn one_network(s: &mut Section<'_, '_, '_, '_>, only: Option<String>, none_at_all: bool) -> String {
    let network = s.string("network").or(only);
    if s.raw("network").is_none() {
        no_network(s, network.is_none(), none_at_all);
    }
    network.unwrap_or_default()
}

/// A member that names no network: a fault where there is no single one; but a file without any
/// network has that fault alone, and a network that was not taken may be the one meant.
fn no_network(s: &mut Section<'_, '_, '_, '_>, unknown: bool, none_at_all: bool) {
    if s.refused("network") || none_at_all {
        s.doubt("network");
    } else if unknown {
        s.missing("network");
    }
}

fn uplink(s: &mut Section<'_, '_, '_, '_>) -> Uplink {
    let Some((value, span)) = s.raw("uplink") else { return Uplink::None };
    match value {
        DeValue::Table(table) => {
            let device = table.get("bridge").and_then(|v| v.get_ref().as_str()).and_then(interface_name);
            match device {
                Some(device) if table.len() == 1 => return Uplink::Bridge { device },
                _ => s.wrong("uplink", &span, "a table of another form", None),
            }
        }
        DeValue::String(text) => match text.as_ref() {
            "none" => {}
            "user" => return Uplink::User,
            "kernel" => return Uplink::Kernel,
            "bridge" => {
                s.wrong(
                    "uplink",
                    &span,
                    found(value),
                    Some("name its interface: uplink = { bridge = \"eth0\" }".into()),
                );
            }
            other => s.wrong("uplink", &span, found(value), near(other, ["none", "user", "kernel"])),
        },
        other => s.wrong("uplink", &span, found(other), None),
    }
    Uplink::None
}

/// The smallest MTU with which Linux does IPv6 on a device (RFC 8200 §5).
pub(super) const IPV6_MTU: u16 = 1280;

/// How the uplink carries IPv6, where the file says so.
fn uplink6(s: &mut Section<'_, '_, '_, '_>) -> Option<Uplink6> {
    let (value, span) = s.raw("uplink6")?;
    let words = ["masquerade", "routed", "off"];
    match value {
        DeValue::Table(table) => {
            let text = table.get("prefix").and_then(|v| v.get_ref().as_str());
            match text.map(Ipv6::parse) {
                Some(Some(Ipv6::Prefix(prefix))) if table.len() == 1 => return Some(Uplink6::Prefix(prefix)),
                Some(_) if table.len() == 1 => {
                    let hint = "it takes the place of the network's: a /64 like \"2001:db8:1:2::/64\"".to_string();
                    s.wrong("uplink6", &span, format!("the prefix {:?}", text.unwrap_or_default()), Some(hint));
                }
                _ => s.wrong("uplink6", &span, "a table of another form", None),
            }
        }
        DeValue::String(text) => match text.as_ref() {
            "masquerade" => return Some(Uplink6::Masquerade),
            "routed" => return Some(Uplink6::Routed),
            "off" => return Some(Uplink6::Off),
            other => {
                let prefix = matches!(Ipv6::parse(other), Some(Ipv6::Prefix(_)));
                let hint = prefix.then(|| format!("write uplink6 = {{ prefix = \"{other}\" }}"));
                s.wrong("uplink6", &span, found(value), hint.or_else(|| near(other, words)));
            }
        },
        other => s.wrong("uplink6", &span, found(other), None),
    }
    None
}

/// Where a forward listens: no group, no link-local address, and no IPv4 address in IPv6's clothes.
pub(super) fn listener(text: &str) -> Option<SocketAddr> {
    let at: SocketAddr = text.parse().ok()?;
    let usable = match at.ip() {
        IpAddr::V4(ip) => !ip.is_multicast() && !ip.is_broadcast(),
        IpAddr::V6(ip) => !ip.is_multicast() && !ip.is_unicast_link_local() && ip.to_ipv4_mapped().is_none(),
    };
    (usable && at.port() != 0).then_some(at)
}

/// What a listener that is none may have meant.
pub(super) fn near_listener(text: &str) -> Option<String> {
    if let Ok(at) = text.parse::<SocketAddr>() {
        return match at.ip() {
            _ if at.port() == 0 => Some("the port is a number from 1 to 65535".into()),
            IpAddr::V6(ip) if ip.is_unicast_link_local() => {
                Some("a link-local address belongs to one interface; give another address of it, or [::]".into())
            }
            IpAddr::V6(ip) => {
                ip.to_ipv4_mapped().map(|ip| format!("did you mean \"{}\"?", SocketAddr::new(ip.into(), at.port())))
            }
            IpAddr::V4(_) => None,
        };
    }
    if let Some((_, meant)) = bracketed(text) {
        return Some(meant);
    }
    let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
    let port: u16 = port.parse().ok().filter(|port| *port != 0)?;
    match host {
        "*" => Some(format!("all addresses are \"0.0.0.0:{port}\", those of IPv6 \"[::]:{port}\"")),
        "" | "localhost" => Some(format!("did you mean \"127.0.0.1:{port}\", or \"[::1]:{port}\" for IPv6?")),
        _ => None,
    }
}

/// An IPv6 address and a port without brackets around the address: what was meant, and how to say
/// it.
fn bracketed(text: &str) -> Option<(SocketAddr, String)> {
    let (address, port) = text.rsplit_once(':')?;
    let ip: Ipv6Addr = address.parse().ok().filter(|_| !address.starts_with('['))?;
    let meant = SocketAddr::new(ip.into(), port.parse().ok().filter(|port| *port != 0)?);
    Some((meant, format!("an IPv6 address stands in brackets: did you mean \"{meant}\"?")))
}

fn forward_target(text: &str) -> Option<(Target, u16)> {
    let (who, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|&p: &u16| p != 0)?;
    if let Some(inner) = who.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return Some((Target::Ip(inner.parse::<Ipv6Addr>().ok()?.into()), port));
    }
    let target = who.parse::<Ipv4Addr>().map(|ip| Target::Ip(ip.into()));
    Some((target.ok().or_else(|| clean_name(who).map(Target::Name))?, port))
}

/// What of a network's traffic skips the kernel's forwarding.
fn bypass(s: &mut Section<'_, '_, '_, '_>) -> Option<Vec<String>> {
    let (value, span) = s.raw("bypass")?;
    match value {
        DeValue::Boolean(on) => on.then(Vec::new),
        DeValue::Array(array) if !array.is_empty() => s.list("bypass", false, interface_name),
        other => {
            s.wrong("bypass", &span, found(other), None);
            None
        }
    }
}

/// All of a subnet but its low sixteenth, which is for the gateway, the router and fixed addresses:
/// at least the first `low - 1`.
fn whole_range(subnet: Subnet, low: u32) -> Dhcp {
    let low = (subnet.hosts() / 16).clamp(3, 256).max(low);
    Dhcp { from: subnet.nth(low), to: subnet.nth(subnet.hosts()), lease_s: DEFAULT_LEASE_S }
}

fn dhcp(s: &mut Section<'_, '_, '_, '_>, subnet: Subnet, by_default: bool, low: u32) -> Option<Dhcp> {
    let mut range = whole_range(subnet, low);
    let Some((value, span)) = s.raw("dhcp") else { return by_default.then_some(range) };
    match value {
        DeValue::Boolean(on) => return on.then_some(range),
        DeValue::Table(table) => {
            for (key, value) in table {
                let address = || value.get_ref().as_str().and_then(|t| t.parse().ok());
                let name: &str = key.get_ref();
                let ok = match name {
                    "from" => address().map(|a| range.from = a).is_some(),
                    "to" => address().map(|a| range.to = a).is_some(),
                    "lease_s" => {
                        let seconds = integer(value.get_ref()).and_then(|n| u32::try_from(n).ok()).filter(|&n| n >= 30);
                        seconds.map(|n| range.lease_s = n).is_some()
                    }
                    _ => {
                        s.wrong("dhcp", &key.span(), format!("the key {name}"), near(name, ["from", "to", "lease_s"]));
                        true
                    }
                };
                if !ok {
                    s.wrong("dhcp", &value.span(), format!("{} for {name}", found(value.get_ref())), None);
                }
            }
        }
        other => s.wrong("dhcp", &span, found(other), None),
    }
    Some(range)
}

/// Where apps are looked for: `$TOMBOLO_APPS`, beside the program, the source tree,
/// `lib/tombolo/apps` of the prefix that the program is installed in, `/usr/lib/tombolo/apps`.
fn app_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = variable("TOMBOLO_APPS").map(PathBuf::from).into_iter().collect();
    if let Ok(exe) = std::env::current_exe() {
        for up in exe.ancestors().skip(1).take(4) {
            folders.push(up.join("apps"));
            folders.push(up.join("cells/target/x86_64-unknown-linux-gnu/release"));
        }
        folders.extend(exe.ancestors().nth(2).map(|prefix| prefix.join("lib/tombolo/apps")));
        folders.retain(|f| f.is_dir());
    }
    let debians = PathBuf::from("/usr/lib/tombolo/apps");
    if !folders.contains(&debians) {
        folders.push(debians);
    }
    let mut seen = BTreeSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    folders
}

/// The names of the apps that are built, sorted.
pub fn apps() -> Vec<String> {
    let entries = app_folders().into_iter().filter_map(|f| std::fs::read_dir(f).ok()).flatten().flatten();
    let files = entries.filter(|e| e.path().is_file()).filter_map(|e| e.file_name().into_string().ok());
    // Beside the images Cargo leaves files with a dot in their names. Two folders may have one app.
    files.filter(|name| !name.contains('.')).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The path of a cell app's image.
pub(crate) fn find_app(app: &str) -> Result<PathBuf, Vec<PathBuf>> {
    let mut tried = Vec::new();
    for folder in app_folders() {
        let path = folder.join(app);
        if path.is_file() {
            return Ok(path);
        }
        tried.push(path);
    }
    Err(tried)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_probably_meant_is_offered() {
        let faults = |text: &str| match parse(text, Path::new("x.toml")) {
            Err(FileError::Faulty { problems, .. }) => problems.iter().map(ToString::to_string).collect::<Vec<_>>(),
            other => panic!("{other:?}"),
        };
        let found =
            faults("name = \"My Lab\"\n[network.lan]\nsubnet = \"10.87.3.9/22\"\n[cell.Web_1]\napp = \"httpd\"\n");
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].ends_with("did you mean \"my-lab\"?"), "{found:?}");
        assert!(found[1].ends_with("did you mean \"10.87.0.0/22\"?"), "{found:?}");
        assert!(found[2].ends_with("did you mean \"web-1\"?"), "{found:?}");
        let [one] = &faults("[network.lan]\nsubnet = \"10.87.0.0\"\n")[..] else { panic!() };
        assert!(!one.contains("did you mean"), "{one}");
        assert_eq!([near_name("--"), near_name("ü"), near_name("")], [None, None, None]);
        assert_eq!(
            near_name("a_very_long_name_of_more_than_it_may_have").as_deref(),
            Some("did you mean \"a-very-long-name-of-more\"?")
        );
    }
}
