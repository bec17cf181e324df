//! The sections of a fabric file, one function each.

mod machine;
mod network;
pub(super) mod words;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::path::Path;

use tombolo_ring::ivshmem::protocol::CALLS;
use tombolo_ring::vxlan::Vni;
use toml::de::{DeTable, DeValue};

use super::across;
use super::boot::boot;
use super::hosts::{self, Hosts, Which};
use super::model::*;
use super::policy;
use super::problem::{Complaints, FileError, Part, Problem, nearest, text_of};
use super::read::{Section, Spots, found};
use super::traffic::traffic;
use super::{check, schema};

pub use machine::apps;
pub(crate) use machine::find_app;
pub(super) use network::IPV6_MTU;
use network::{guard, ip6, tunnel};
use words::{
    bracketed, clean_name, container_id, domain_of_xen, fabric_name, forward_target, interface_name, listener,
    near_listener, near_name, size_bytes,
};

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

/// A region's size: a BAR, so a power of two.
fn region(s: &mut Section<'_, '_, '_, '_>, from: u64, to: u64) -> u64 {
    let size = |t: &str| size_bytes(t).filter(|n| n.is_power_of_two() && (from..=to).contains(n));
    s.text("region", size).unwrap_or(1 << 20)
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

    fn open<'s, 'a, 'i>(&'s mut self, word: &str, (name, span, table): &Named<'a, 'i>) -> Section<'a, 'i, 's, 't> {
        Section::open(word, format!("{word}.{name}"), span.clone(), table, self.out, self.spots, &[])
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
        let link = LinkDecl {
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
