//! What only the whole file can say. Also fills in what depends on it: leased addresses and forward
//! targets.
//!
//! Each complaint names the keys that it leans on, and is not made where one of them is at fault
//! itself.

mod addresses;
mod forwards;
mod idle;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;

use tombolo_port::vxlan::MAX_REMOTES;
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::region::Layout;

use super::model::*;
use super::parse::{SPAN, apps, find_app};
use super::problem::{Complaints, dotted, near};
use super::read::Spots;
use crate::xen::config::domain_of;

/// The file as read, and what is said about it.
pub(super) struct Check<'f, 'c, 't> {
    pub(super) fabric: &'f Fabric,
    spots: &'f Spots,
    out: &'c mut Complaints<'t>,
}

/// A key: dotted path of its section, and its name.
type Spot<'a> = (&'a str, &'a str);

impl Check<'_, '_, '_> {
    /// Whether a section of that word and name was not taken.
    pub(super) fn refuses(&self, word: &str, name: &str) -> bool {
        self.out.refused(word, Some(name))
    }

    /// Complains about a key, unless its own value, or one that the complaint leans on, is at fault
    /// already.
    pub(super) fn fault(
        &mut self,
        (at, key): Spot<'_>,
        leans_on: &[Spot<'_>],
        expected: impl Into<String>,
        found: impl Into<String>,
        hint: Option<String>,
    ) {
        if self.out.doubted(at, key) || leans_on.iter().any(|(at, key)| self.out.at_fault(at, key)) {
            return;
        }
        self.out.say(&self.spots.of(at, key), dotted(at, key), expected, found, hint);
    }
}

pub(super) fn check(fabric: &mut Fabric, spots: &Spots, out: &mut Complaints<'_>) {
    let mut check = Check { fabric, spots, out };
    if check.fabric.networks.is_empty() && needs_network(check.fabric) && !check.out.refused("network", None) {
        let hint = Some("add [network.lan]".to_string());
        check.fault(("", "network"), &[], "at least one section [network.NAME]", "none", hint);
    }
    check.networks();
    check.members();
    check.images();
    check.dependencies();
    check.links();
    check.across();
    check.leased_elsewhere();
    let taken = check.addresses();
    let without = addresses::lease(fabric, taken);
    let mut check = Check { fabric, spots, out };
    check.too_many(&without);
    check.idle_workers();
    check.boots();
    check.idle_keys_of_networks();
    check.idle_keys_of_members();
    check.guards();
    check.own_addresses6();
    check.cells6();
    check.containers6();
    super::policy::check(&mut check);
    forwards::forwards(fabric, spots, out);
}

/// Whether a file without a network has something that needs one. Machines that share memory need
/// none.
fn needs_network(fabric: &Fabric) -> bool {
    let attached = fabric.machines.iter().any(|m| !m.nics.is_empty());
    let crosses = !(fabric.exports.is_empty() && fabric.imports.is_empty());
    attached
        || (fabric.machines.is_empty() && !crosses)
        || !(fabric.taps.is_empty() && fabric.ports.is_empty() && fabric.forwards.is_empty())
}

/// The way from a machine to itself by `depends_on`, if there is one.
fn circle(fabric: &Fabric, from: &Machine) -> Option<Vec<String>> {
    let mut seen: Vec<&str> = Vec::new();
    let mut ways = vec![vec![from.name.as_str()]];
    while let Some(way) = ways.pop() {
        let last = way.last().and_then(|name| fabric.machines.iter().find(|m| m.name == *name));
        for next in last.iter().flat_map(|m| &m.depends_on) {
            let on = [&way[..], &[next.as_str()]].concat();
            if *next == from.name {
                return Some(on.into_iter().map(String::from).collect());
            }
            if !seen.contains(&next.as_str()) {
                seen.push(next);
                ways.push(on);
            }
        }
    }
    None
}

fn path_of(network: &str) -> String {
    format!("network.{network}")
}

fn path_of_machine(m: &Machine) -> String {
    m.section.clone()
}

impl Check<'_, '_, '_> {
    fn networks(&mut self) {
        let fabric = self.fabric;
        for (i, n) in fabric.networks.iter().enumerate() {
            let at = &path_of(&n.name)[..];
            let dhcp = n.dhcp.map_or(vec![], |d| vec![("dhcp", d.from), ("dhcp", d.to)]);
            let fixed = [("gateway", n.gateway), ("router", n.router)].into_iter().filter_map(|(k, ip)| Some((k, ip?)));
            for (key, ip) in fixed.chain(dhcp).filter(|(_, ip)| !n.subnet.has_host(*ip)) {
                let hint = Some("the subnet's first and last address are its own".to_string());
                let expected = format!("a host address inside {}", n.subnet);
                self.fault((at, key), &[(at, "subnet")], expected, ip.to_string(), hint);
            }
            if let Some(dhcp) = n.dhcp.filter(|d| d.from > d.to) {
                let found = format!("{} to {}", dhcp.from, dhcp.to);
                let leans_on = [(at, "subnet"), (at, "dhcp")];
                self.fault((at, "dhcp"), &leans_on, "a range that does not run backwards", found, None);
            }
            if !fabric.workers.iter().any(|w| w.name == n.worker) && !self.out.refused("worker", Some(&n.worker)) {
                let names: Vec<_> = fabric.workers.iter().map(|w| w.name.as_str()).collect();
                let expected = format!("the name of a worker ({})", names.join(", "));
                self.fault((at, "worker"), &[], expected, format!("{:?}", n.worker), near(&n.worker, names));
            }
            if let (Some(gateway), true) = (n.gateway, n.router == n.gateway) {
                let hint = Some(format!("leave `router` out, or use {}", n.subnet.nth(2)));
                let leans_on = [(at, "subnet"), (at, "gateway")];
                let expected = "an address that the gateway does not have";
                self.fault((at, "router"), &leans_on, expected, gateway.to_string(), hint);
            }
            self.way_out6(at, n);
            for other in &fabric.networks[..i] {
                let that = &path_of(&other.name)[..];
                if other.subnet.overlaps(n.subnet) {
                    let found = format!("{}, which overlaps {} of network \"{}\"", n.subnet, other.subnet, other.name);
                    self.fault((at, "subnet"), &[(that, "subnet")], "a subnet of its own", found, None);
                }
                if let Some(prefix) = n.ipv6.filter(|prefix| other.ipv6 == Some(*prefix)) {
                    let found = format!("{prefix}/64, which is that of network \"{}\"", other.name);
                    self.fault((at, "ipv6"), &[(that, "ipv6")], "a prefix of its own", found, None);
                }
                let outside = |n: &Network| match n.uplink6 {
                    Uplink6::Prefix(prefix) => Some(prefix),
                    _ => None,
                };
                let taken = [outside(other), other.ipv6];
                if let Some(prefix) = n.ipv6.filter(|prefix| outside(other) == Some(*prefix)) {
                    let found = format!("{prefix}/64, which that of network \"{}\" is translated to", other.name);
                    self.fault((at, "ipv6"), &[(that, "uplink6")], "a prefix of its own", found, None);
                }
                if let Some(prefix) = outside(n).filter(|prefix| taken.contains(&Some(*prefix))) {
                    let found = format!("{prefix}/64, which is that of network \"{}\"", other.name);
                    let leans_on = [(that, "ipv6"), (that, "uplink6")];
                    self.fault((at, "uplink6"), &leans_on, "a prefix of its own", found, None);
                }
                if let (Uplink::Bridge { device: a }, Uplink::Bridge { device: b }) = (&other.uplink, &n.uplink)
                    && a == b
                {
                    let found = format!("\"{a}\", which network \"{}\" has joined", other.name);
                    self.fault((at, "uplink"), &[], "an interface of its own", found, None);
                }
            }
        }
    }

    fn members(&mut self) {
        let fabric = self.fabric;
        for (at, network) in uses(fabric) {
            let known = network.is_empty() || fabric.network(&network).is_some();
            if !known && !self.out.refused("network", Some(&network)) {
                let names: Vec<_> = fabric.networks.iter().map(|n| n.name.as_str()).collect();
                // A file without any network has that fault alone.
                let leans_on = if names.is_empty() { &[("", "network")][..] } else { &[] };
                let expected = format!("the name of a network ({})", names.join(", "));
                self.fault((&at, "network"), leans_on, expected, format!("{network:?}"), near(&network, names));
            }
        }
        let elsewhere = fabric.elsewhere.members.iter();
        let mut seen: HashMap<&str, String> =
            elsewhere.map(|(name, at, machine)| (name.as_str(), format!("[{at}] on machine \"{machine}\""))).collect();
        let machines = fabric.machines.iter().map(|m| (m.name.as_str(), path_of_machine(m)));
        let taps = fabric.taps.iter().map(|t| (t.name.as_str(), format!("tap.{}", t.name)));
        let ports = fabric.ports.iter().map(|p| (p.name.as_str(), format!("port.{}", p.name)));
        for (name, at) in machines.chain(taps).chain(ports) {
            let port_of =
                |network: &Network| ["gateway", "uplink"].iter().any(|w| name == format!("{w}-{}", network.name));
            if ["gateway", "uplink", "router"].contains(&name) || fabric.networks.iter().any(port_of) {
                let found = format!("{name:?}, which is the fabric's own port");
                self.fault((&at, ""), &[], "a name that the fabric does not use itself", found, None);
            }
            if let Some(other) = seen.insert(name, format!("[{at}]")) {
                let found = format!("{name:?}, as in {other}");
                self.fault((&at, ""), &[], "a name that no other member has", found, None);
            }
        }
        let mut devices: HashMap<(&str, Option<&str>), &str> = HashMap::new();
        for tap in &fabric.taps {
            let at = &format!("tap.{}", tap.name)[..];
            if let (Some(ip), None, Some(Uplink::Kernel)) =
                (tap.ip, &tap.netns, fabric.network(&tap.network).map(|n| &n.uplink))
            {
                // The host would have two routes to the subnet, and answers to a forward's
                // masqueraded clients take the wrong.
                let found = format!("{ip}, a second address of the host in network \"{}\"", tap.network);
                let hint =
                    "uplink = \"kernel\" has given the host one: leave `ip` out, or put the device into a `netns`";
                let expected = "no address for a device of the host beside a kernel uplink";
                self.fault((at, "ip"), &[(at, "netns"), (at, "network")], expected, found, Some(hint.into()));
            }
            let leads_out = |n: &&Network| n.uplink.forwards() && n.prefix_out().is_some();
            if tap.accept_ra && tap.netns.is_none() && fabric.network(&tap.network).as_ref().is_some_and(leads_out) {
                // The host would send what is for the outside to its own fabric, which sends it to
                // the host.
                let expected = "false for a device of the host in a network with a way out for IPv6";
                let hint = "the host would take the fabric's router for its own way out: leave it out, put the device into a \
                            `netns`, or set uplink6 = \"off\"";
                let leans_on = [(at, "netns"), (at, "network"), (at, "adopt")];
                self.fault((at, "accept_ra"), &leans_on, expected, "true", Some(hint.into()));
            }
            if let Some(other) = devices.insert((&tap.device, tap.netns.as_deref()), &tap.name) {
                let found = format!("{:?}, as in [tap.{other}]", tap.device);
                let that = &format!("tap.{other}")[..];
                let leans_on = [(at, "netns"), (that, "device"), (that, "netns")];
                self.fault((at, "device"), &leans_on, "a device of its own", found, None);
            }
        }
        // Of each vif the section that has it.
        let mut vifs: HashMap<(String, u32), String> = HashMap::new();
        for m in fabric.machines.iter().filter(|m| m.attach == Attach::Xen) {
            let numbers = (0..).zip(&m.nics).map(|(vif, _)| vif);
            vifs.extend(numbers.map(|vif| ((domain_of(&fabric.name, &m.name), vif), path_of_machine(m))));
        }
        for port in &fabric.ports {
            let PortKind::Xen { domain, vif, .. } = &port.kind else { continue };
            let at = &format!("port.{}", port.name)[..];
            if let Some(that) = &vifs.insert((domain.clone(), *vif), at.to_string()) {
                let found = format!("vif {vif} of {domain:?}, as in [{that}]");
                let that = &that[..];
                let leans_on = [(at, "domain"), (that, "vif"), (that, "domain"), (at, "kind"), (that, "kind")];
                self.fault((at, "vif"), &leans_on, "a vif of its own", found, None);
            }
        }
        self.tunnels();
    }

    /// The ends of tunnels: addresses that can be meant, one tunnel per network, and per address
    /// and port.
    fn tunnels(&mut self) {
        let (mut networks, mut listeners) = (HashMap::new(), HashMap::new());
        for port in &self.fabric.ports {
            let PortKind::Vxlan(tunnel) = &port.kind else { continue };
            let at = &format!("port.{}", port.name)[..];
            let Vxlan { local, remotes, udp_port, .. } = tunnel;
            let net = &path_of(&port.network)[..];
            let is_span = port.name.starts_with(SPAN) && !self.spots.has(at, "") && self.spots.has(net, "span");
            // What `span` makes has no section of its own.
            let spot = |key| if is_span { (net, "span") } else { (at, key) };
            let own = [(at, "kind"), (at, "local")];
            if let Some(that) = networks.insert(&port.network, &port.name) {
                let found = format!("{:?}, which has [port.{that}]", port.network);
                let hint = "frames would go round between two tunnels: write all remotes into one";
                let that = &format!("port.{that}")[..];
                let leans_on = [(at, "kind"), (that, "kind"), (that, "network")];
                self.fault(spot("network"), &leans_on, "a network without a tunnel", found, Some(hint.into()));
            }
            if let Some(that) = listeners.insert((local, udp_port), &port.name) {
                let network = that.strip_prefix(SPAN).filter(|_| is_span);
                let other = network.map_or_else(|| format!("port.{that}"), path_of);
                let found = format!("{local} port {udp_port}, as in [{other}]");
                let that = &format!("port.{that}")[..];
                let leans_on = [&own[..], &[(that, "kind"), (that, "local"), (that, "udp_port")]].concat();
                let hint = match is_span {
                    true => "give one network another port: span = { vni = …, udp_port = … }",
                    false => "set another `udp_port`, at the other ends too, or another `local`",
                };
                self.fault(spot("udp_port"), &leans_on, "an address and port of its own", found, Some(hint.into()));
            }
            let unfit = |ip: &IpAddr| ip.is_unspecified() || ip.is_multicast();
            if unfit(local) {
                let hint = "the other ends name this address in their `remotes`";
                let expected = "one of this machine's addresses";
                self.fault((at, "local"), &[(at, "kind")], expected, format!("\"{local}\""), Some(hint.into()));
            }
            if remotes.is_empty() || remotes.len() > MAX_REMOTES {
                let expected = format!("1 to {MAX_REMOTES} remotes");
                self.fault(spot("remotes"), &own, expected, remotes.len().to_string(), None);
            }
            for (n, remote) in remotes.iter().enumerate() {
                let (found, hint) = if remote.is_ipv6() != local.is_ipv6() {
                    (format!("\"{remote}\", of another IP version than `local`"), Some("a tunnel has one IP version"))
                } else if remote == local {
                    (format!("\"{remote}\", which is `local`"), Some("name the other ends only"))
                } else if unfit(remote) {
                    (format!("\"{remote}\", which is no address of one machine"), None)
                } else if remotes[..n].contains(remote) {
                    (format!("\"{remote}\" twice"), Some("it would get each frame twice"))
                } else {
                    continue;
                };
                let hint = hint.map(String::from);
                self.fault(spot("remotes"), &own, "addresses of other machines, each once", found, hint);
                break;
            }
        }
    }

    fn images(&mut self) {
        for m in &self.fabric.machines {
            let at = &path_of_machine(m)[..];
            match &m.boot {
                Boot::Cell(Image::Path(path)) => self.file((at, "image"), path),
                Boot::Cell(Image::App(app)) => self.app(at, app),
                Boot::Vm { kernel, initrd, disks, cloud_init } => {
                    kernel.iter().for_each(|p| self.file((at, "kernel"), p));
                    initrd.iter().for_each(|p| self.file((at, "initrd"), p));
                    disks.iter().for_each(|(p, _)| self.file((at, self.disk_key(at, p)), p));
                    cloud_init.iter().for_each(|p| self.file((at, "cloud_init"), p));
                }
            }
            if m.iommu && m.machine != MachineType::Q35 {
                let hint = Some("leave `machine` out".to_string());
                self.fault((at, "iommu"), &[], "false on a machine other than q35", "true", hint);
            }
            if m.attach == Attach::Xen {
                // `disk` is complained about where it is given, and a VM without either as such.
                if matches!(m.boot, Boot::Vm { kernel: None, .. }) && self.spots.has(at, "disk") {
                    let found = format!("none in [{at}], which has attach = \"xen\"");
                    let hint = "give `kernel`, and `initrd` where it needs one: a PVH domain has no firmware that boots from a disk";
                    self.fault((at, "kernel"), &[(at, "attach")], "a kernel image", found, Some(hint.into()));
                }
                continue;
            }
            if m.from_network {
                let kernel = matches!(m.boot, Boot::Vm { kernel: Some(_), .. });
                if kernel {
                    let hint = Some("leave `kernel` out, or `boot`".to_string());
                    self.fault((at, "boot"), &[(at, "kernel")], "no `boot` beside `kernel`", "both", hint);
                }
                if m.nics.is_empty() {
                    self.fault((at, "boot"), &[(at, "network")], "a machine with a network", "none", None);
                }
            }
            if m.machine == MachineType::Microvm && matches!(m.boot, Boot::Vm { kernel: None, .. }) {
                let hint = Some("use machine = \"q35\", or give `kernel`".to_string());
                let expected = "a machine type that boots from a disk or the network";
                self.fault((at, "machine"), &[(at, "kernel")], expected, "\"microvm\"", hint);
            }
        }
    }

    /// What clients boot: with a server for what is no URL, and where someone tells them.
    fn boots(&mut self) {
        let fabric = self.fabric;
        let networks = fabric.networks.iter().map(|n| (path_of(&n.name), n.name.as_str(), n.boot.as_ref()));
        let machines = fabric
            .machines
            .iter()
            .flat_map(|m| m.nics.iter().map(|nic| (path_of_machine(m), nic.network.as_str(), m.netboot.as_ref())));
        let taps = fabric.taps.iter().map(|t| (format!("tap.{}", t.name), t.network.as_str(), t.boot.as_ref()));
        let ports = fabric.ports.iter().map(|p| (format!("port.{}", p.name), p.network.as_str(), p.boot.as_ref()));
        for (at, network, boot) in networks.chain(machines).chain(taps).chain(ports) {
            let (Some(network), Some(boot)) = (fabric.network(network), boot) else { continue };
            let at = &at[..];
            let of = &path_of(&network.name)[..];
            let server = boot.server.or(network.boot.as_ref().and_then(|all| all.server));
            if let Some(file) = super::boot::needs_server(boot).filter(|_| server.is_none()) {
                let hint = Some(format!("add server = \"…\": {file:?} is no URL"));
                self.fault((at, "boot"), &[(of, "boot")], "the address of a TFTP server", "no `server`", hint);
            }
            let six = boot.url6.is_some() || boot.ipxe6.is_some() || !boot.architectures6.is_empty();
            let four = boot.file.is_some() || boot.ipxe.is_some() || !boot.architectures.is_empty();
            let leans_on = [(of, "dhcp"), (of, "ipv6"), (of, "uplink")];
            if network.dhcp.is_none() && (four || six) {
                let hint = Some("its DHCP server is what tells clients: set `dhcp`, or leave `boot` out".to_string());
                self.fault((at, "boot"), &leans_on, "a network with `dhcp`", "one without", hint);
            } else if network.ipv6.is_none() && six {
                let hint = Some("leave `url6`, `arch6` and `ipxe6` out, or set `ipv6`".to_string());
                self.fault((at, "boot"), &leans_on, "a network with `ipv6`", "one without", hint);
            }
        }
    }

    /// The key that gives a disk of a machine.
    fn disk_key(&self, at: &str, path: &Path) -> &'static str {
        let is_first = |m: &&Machine| {
            path_of_machine(m) == at
                && matches!(&m.boot, Boot::Vm { disks, .. } if disks.first().is_some_and(|d| d.0 == path))
        };
        if self.spots.has(at, "disk") && self.fabric.machines.iter().any(|m| is_first(&m)) { "disk" } else { "disks" }
    }

    /// Names in `depends_on`, and circles of them.
    fn dependencies(&mut self) {
        let fabric = self.fabric;
        for m in &fabric.machines {
            let at = &path_of_machine(m)[..];
            for name in &m.depends_on {
                let known = fabric.machines.iter().any(|other| other.name == *name);
                if !known && !["cell", "vm"].iter().any(|word| self.out.refused(word, Some(name))) {
                    let names: Vec<&str> = fabric.machines.iter().map(|m| m.name.as_str()).collect();
                    let expected = format!("names of cells and VMs ({})", names.join(", "));
                    self.fault((at, "depends_on"), &[], expected, format!("{name:?}"), near(name, names));
                }
            }
            if let Some(circle) = circle(fabric, m) {
                let hint = Some("none of them could ever start: leave one `depends_on` out".to_string());
                let expected = "machines that do not depend on this one";
                self.fault((at, "depends_on"), &[], expected, circle.join(" → "), hint);
            }
        }
    }

    /// Whether the file is read for another machine than this one, whose files are not here.
    fn is_elsewhere(&self) -> bool {
        self.fabric.here.as_ref().is_some_and(|here| !here.is_chosen)
    }

    /// A file that a machine needs.
    fn file(&mut self, (at, key): Spot<'_>, path: &Path) {
        if self.is_elsewhere() {
            return;
        }
        let found = match std::fs::metadata(path) {
            Ok(meta) if meta.is_file() => return,
            Ok(_) => format!("{}, which is not a file", path.display()),
            // What this user may not see is no fault of the file: the start finds it, with all
            // other faults of the machine.
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return,
            Err(error) => format!("{}: {error}", path.display()),
        };
        let made_by = if path.parent().is_some_and(|p| p.ends_with("build/guest")) {
            Some("`./x guest` makes it in Tombolo's source tree")
        } else if path.ancestors().any(|p| p.ends_with("cells/target")) {
            Some("`./x cells` makes it in Tombolo's source tree")
        } else {
            path.starts_with(&self.fabric.dir).then_some("relative paths start from the folder of the fabric's file")
        };
        self.fault((at, key), &[], "the path of a file that can be read", found, made_by.map(str::to_string));
    }

    /// An app that a cell runs.
    fn app(&mut self, at: &str, app: &str) {
        if self.is_elsewhere() {
            return;
        }
        let Err(tried) = find_app(app) else { return };
        let tried: Vec<_> = tried.iter().map(|p| p.display().to_string()).collect();
        let found = format!("no image for {app:?} (looked at {})", tried.join(", "));
        let built = apps();
        let hint = near(app, built.iter().map(String::as_str)).unwrap_or_else(|| {
            let there = if built.is_empty() { String::new() } else { format!("built are {}; ", built.join(", ")) };
            format!(
                "{there}`./x cells` in Tombolo's source tree builds the apps; an image of your own is given by `image`"
            )
        });
        self.fault((at, "app"), &[(at, "image")], "the name of a built app", found, Some(hint));
    }

    fn links(&mut self) {
        let fabric = self.fabric;
        for link in &fabric.links {
            let at = &format!("link.{}", link.name)[..];
            if fabric.links.iter().take_while(|l| !std::ptr::eq(*l, link)).any(|l| l.name == link.name) {
                self.fault((at, ""), &[], "a name that no other link has", format!("{:?}", link.name), None);
            }
            for (j, name) in link.between.iter().enumerate() {
                let known = fabric.machines.iter().any(|m| m.name == *name);
                if !known && !["cell", "vm"].iter().any(|word| self.out.refused(word, Some(name))) {
                    let names: Vec<&str> = fabric.machines.iter().map(|m| m.name.as_str()).collect();
                    let expected = format!("names of cells and VMs ({})", names.join(", "));
                    let hint = near(name, names).or_else(|| {
                        let other = fabric.members().any(|m| m == name);
                        other.then(|| "for processes of your own set `seats`".to_string())
                    });
                    self.fault((at, "between"), &[], expected, format!("{name:?}"), hint);
                }
                let is_xen = |m: &&Machine| m.name == *name && m.attach == Attach::Xen;
                if let Some(machine) = fabric.machines.iter().find(is_xen) {
                    let found = format!("{name:?}, a domain of Xen (attach = \"xen\")");
                    let hint = "leave it out: a link is an ivshmem device, which only QEMU has; a network connects the machine";
                    let leans_on = [(&path_of_machine(machine)[..], "attach")];
                    self.fault((at, "between"), &leans_on, "machines that QEMU runs", found, Some(hint.into()));
                }
                if link.between[..j].contains(name) {
                    self.fault((at, "between"), &[], "each machine once", format!("{name:?} again"), None);
                }
            }
            let ends = (2..=64).contains(&link.max_peers());
            if !ends {
                let found = format!("{} machine(s) and seats = {}", link.between.len(), link.seats);
                // A bridge's seat comes with its service.
                let leans_on = [(at, "seats"), (at, "service"), (at, "to")];
                self.fault((at, "between"), &leans_on, "2 to 64 ends, with `seats`", found, None);
            }
            self.bridged(at, link);
            if let (true, Err(error)) = (ends, Layout::v1(link.region, link.rw, link.max_peers())) {
                let expected = "room for a header, a state table, `rw`, and a page for each end";
                let leans_on = [(at, "rw"), (at, "between"), (at, "seats")];
                self.fault((at, "region"), &leans_on, expected, error.to_string(), Some("make `region` larger".into()));
            }
        }
    }

    /// What a link must be so that the fabric passes calls on.
    fn bridged(&mut self, at: &str, link: &LinkDecl) {
        if link.is_bridged() {
            if link.between.len() != 1 || link.seats != 1 {
                let found = format!("{} machine(s) and seats = {}", link.between.len(), link.seats);
                let hint = Some("the fabric itself is the other end: leave `seats` out".to_string());
                self.fault((at, "between"), &[(at, "seats")], "one machine, with `service` or `to`", found, hint);
            }
            if link.protocol != protocol::CALLS {
                let hint = Some("leave `protocol` out".to_string());
                let expected = "0x4002, calls, with `service` or `to`";
                self.fault((at, "protocol"), &[], expected, format!("{:#x}", link.protocol), hint);
            }
            let leans_on = [(at, "service"), (at, "to")];
            self.idle((at, "rw"), &leans_on, "with `service` or `to`", "calls use the sections that have one writer;");
        }
        let mut before = self.fabric.links.iter().take_while(|l| !std::ptr::eq(*l, link));
        if let Some(name) = &link.service
            && before.any(|l| l.service.as_ref() == Some(name))
        {
            self.fault((at, "service"), &[], "a name that no other link has", format!("{name:?}"), None);
        }
    }

    /// What services that cross to other machines have in common with others of the file.
    fn across(&mut self) {
        let fabric = self.fabric;
        for (i, export) in fabric.exports.iter().enumerate() {
            let at = &format!("export.{}", export.name)[..];
            if fabric.exports[..i].iter().any(|other| other.name == export.name) {
                self.fault((at, ""), &[], "a name that no other export has", format!("{:?}", export.name), None);
            }
            if let Some(other) = fabric.exports[..i].iter().find(|other| overlap(other.listen, export.listen)) {
                let found = format!("{}, where [export.{}] listens", export.listen, other.name);
                let hint = Some(format!("list all in `services` of [export.{}], or choose another port", other.name));
                let leans_on = [(&format!("export.{}", other.name)[..], "listen")];
                self.fault((at, "listen"), &leans_on, "an address and port of its own", found, hint);
            }
            let meets = |f: &Forward| f.proto == Proto::Tcp && overlap(f.listen, export.listen);
            if let Some(j) = fabric.forwards.iter().position(meets) {
                let found = format!("{}, beside {} of forward[{j}]", export.listen, fabric.forwards[j].listen);
                let that = &format!("forward[{j}]")[..];
                let leans_on = [(that, "listen"), (that, "proto")];
                let hint = Some("choose another port for one of them".to_string());
                self.fault((at, "listen"), &leans_on, "an address and port that no forward has", found, hint);
            }
        }
        for (i, import) in fabric.imports.iter().enumerate() {
            let at = &format!("import.{}", import.name)[..];
            if fabric.imports[..i].iter().any(|other| other.name == import.name) {
                self.fault((at, ""), &[], "a name that no other import has", format!("{:?}", import.name), None);
            }
            let key = if self.spots.has(at, "as") { "as" } else { "service" };
            let here = &import.as_name;
            let by_link = fabric.links.iter().find(|link| link.service.as_ref() == Some(here));
            let by_import = fabric.imports[..i].iter().find(|other| other.as_name == *here);
            let who = by_link.map(|link| format!("link.{}", link.name));
            let leans_on = [(at, "service"), (at, "as")];
            if let Some(who) = who.or(by_import.map(|other| format!("import.{}", other.name))) {
                let (found, hint) = (format!("{here:?}, as [{who}] has"), Some("set `as` to another name".to_string()));
                self.fault((at, key), &leans_on, "a name that no other service of the file has", found, hint);
            }
            if let Some(export) = fabric.exports.iter().find(|export| export.services.contains(here)) {
                let found = format!("{here:?}, which [export.{}] exports", export.name);
                let hint = Some("calls would go round in circles: leave one of them out, or set `as`".to_string());
                self.fault((at, key), &leans_on, "a service that this machine does not export", found, hint);
            }
            for (j, (machine, address)) in import.from.iter().enumerate() {
                if import.from[..j].iter().any(|other| other.0 == *machine || other.1 == *address) {
                    let found = format!("{machine:?} at {address:?} again");
                    self.fault((at, "from"), &[], "each machine once", found, None);
                }
            }
        }
    }

    /// Complains about ranges that are too small for the devices of the file's machines, of which
    /// these networks lack one each.
    fn too_many(&mut self, without: &[String]) {
        let fabric = self.fabric;
        for net in &fabric.networks {
            let lacking = without.iter().filter(|name| **name == net.name).count();
            let (Some(dhcp), true) = (net.dhcp, lacking != 0) else { continue };
            let at = &path_of(&net.name)[..];
            let found = format!("{} to {}, {lacking} too few", dhcp.from, dhcp.to);
            let hint = Some("give the network a larger `subnet` or range, or have fewer machines".to_string());
            let leans_on = [(at, "subnet"), (at, "gateway"), (at, "router")];
            self.fault((at, "dhcp"), &leans_on, "a range with an address for each cell", found, hint);
        }
    }
}

/// What decides whether a network has a gateway.
fn decides_gateway(net: &str) -> [Spot<'_>; 3] {
    [(net, "uplink"), (net, "gateway"), (net, "dhcp")]
}

/// What decides whether a member of a network has a known address.
fn address_of(at: &str, network: &str) -> [(String, &'static str); 4] {
    let net = path_of(network);
    [(at.into(), "ip"), (at.into(), "network"), (net.clone(), "dhcp"), (net, "subnet")]
}

/// Every use of a network's name, as (section path, network).
fn uses(fabric: &Fabric) -> Vec<(String, String)> {
    let mut out = Vec::new();
    for m in &fabric.machines {
        out.extend(m.nics.iter().map(|n| (path_of_machine(m), n.network.clone())));
    }
    out.extend(fabric.taps.iter().map(|t| (format!("tap.{}", t.name), t.network.clone())));
    out.extend(fabric.ports.iter().map(|p| (format!("port.{}", p.name), p.network.clone())));
    let forwards = fabric.forwards.iter().enumerate().map(|(i, f)| (format!("forward[{i}]"), f.network.clone()));
    out.extend(forwards);
    out
}

/// The section of the member of that name.
fn section_of_member(fabric: &Fabric, name: &str) -> String {
    let is_it = |at: &String| at.split_once('.').is_some_and(|(_, other)| other == name);
    uses(fabric).into_iter().map(|(at, _)| at).find(is_it).unwrap_or_default()
}
