//! What only the whole file can say. Also fills in what depends on it: leased addresses and forward targets.

use std::collections::HashMap;
use std::net::Ipv4Addr;

use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::region::Layout;

use super::model::*;
use super::parse::{apps, find_app};
use super::problem::{Complaints, near};
use super::read::Spots;

pub(super) fn check(fabric: &mut Fabric, spots: &Spots, out: &mut Complaints<'_>) {
    if fabric.networks.is_empty() {
        // A misspelt [network] was told already.
        if out.list.is_empty() {
            out.say(
                &(0..0),
                "network",
                "at least one section [network.NAME]",
                "none",
                Some("add [network.lan]".into()),
            );
        }
        return;
    }
    networks(fabric, spots, out);
    members(fabric, spots, out);
    images(fabric, spots, out);
    links(fabric, spots, out);
    let taken = addresses(fabric, spots, out);
    lease(fabric, taken);
    guards(fabric, spots, out);
    forwards(fabric, spots, out);
}

fn networks(fabric: &Fabric, spots: &Spots, out: &mut Complaints<'_>) {
    for (i, n) in fabric.networks.iter().enumerate() {
        let at = format!("network.{}", n.name);
        let mut inside = |key: &str, ip: Ipv4Addr| {
            if !n.subnet.has_host(ip) {
                let hint = Some("the subnet's first and last address are its own".to_string());
                out.say(
                    &spots.of(&at, key),
                    format!("{at}.{key}"),
                    format!("a host address inside {}", n.subnet),
                    ip.to_string(),
                    hint,
                );
            }
        };
        if let Some(gateway) = n.gateway {
            inside("gateway", gateway);
        }
        if let Some(router) = n.router {
            inside("router", router);
        }
        if let Some(dhcp) = n.dhcp {
            inside("dhcp", dhcp.from);
            inside("dhcp", dhcp.to);
            if dhcp.from > dhcp.to {
                let found = format!("{} to {}", dhcp.from, dhcp.to);
                out.say(
                    &spots.of(&at, "dhcp"),
                    format!("{at}.dhcp"),
                    "a range that does not run backwards",
                    found,
                    None,
                );
            }
        }
        if !fabric.workers.iter().any(|w| w.name == n.worker) {
            let names: Vec<_> = fabric.workers.iter().map(|w| w.name.as_str()).collect();
            let expected = format!("the name of a worker ({})", names.join(", "));
            out.say(
                &spots.of(&at, "worker"),
                format!("{at}.worker"),
                expected,
                format!("{:?}", n.worker),
                near(&n.worker, names),
            );
        }
        if let (Some(gateway), true) = (n.gateway, n.router == n.gateway) {
            let hint = Some(format!("leave `router` out, or use {}", n.subnet.nth(2)));
            out.say(
                &spots.of(&at, "router"),
                format!("{at}.router"),
                "an address that the gateway does not have",
                gateway.to_string(),
                hint,
            );
        }
        for other in &fabric.networks[..i] {
            if other.subnet.overlaps(n.subnet) {
                let found = format!("{}, which overlaps {} of network \"{}\"", n.subnet, other.subnet, other.name);
                out.say(&spots.of(&at, "subnet"), format!("{at}.subnet"), "a subnet of its own", found, None);
            }
            if let (Uplink::Bridge { device: a }, Uplink::Bridge { device: b }) = (&other.uplink, &n.uplink)
                && a == b
            {
                let found = format!("\"{a}\", which network \"{}\" has joined", other.name);
                out.say(&spots.of(&at, "uplink"), format!("{at}.uplink"), "an interface of its own", found, None);
            }
        }
    }
}

/// Every use of a network's name, as (section path, network).
fn uses(fabric: &Fabric) -> Vec<(String, String)> {
    let mut out = Vec::new();
    for m in &fabric.machines {
        out.extend(m.nics.iter().map(|n| (format!("{}.{}", m.kind.word(), m.name), n.network.clone())));
    }
    out.extend(fabric.taps.iter().map(|t| (format!("tap.{}", t.name), t.network.clone())));
    out.extend(fabric.ports.iter().map(|p| (format!("port.{}", p.name), p.network.clone())));
    let forwards = fabric.forwards.iter().enumerate().map(|(i, f)| (format!("forward[{i}]"), f.network.clone()));
    out.extend(forwards);
    out
}

fn members(fabric: &Fabric, spots: &Spots, out: &mut Complaints<'_>) {
    for (at, network) in uses(fabric) {
        if !network.is_empty() && fabric.network(&network).is_none() {
            let names: Vec<_> = fabric.networks.iter().map(|n| n.name.as_str()).collect();
            let expected = format!("the name of a network ({})", names.join(", "));
            out.say(
                &spots.of(&at, "network"),
                format!("{at}.network"),
                expected,
                format!("{network:?}"),
                near(&network, names),
            );
        }
    }
    let mut seen: HashMap<&str, String> = HashMap::new();
    let machines = fabric.machines.iter().map(|m| (m.name.as_str(), m.kind.word()));
    let taps = fabric.taps.iter().map(|t| (t.name.as_str(), "tap"));
    let ports = fabric.ports.iter().map(|p| (p.name.as_str(), "port"));
    for (name, word) in machines.chain(taps).chain(ports) {
        let at = format!("{word}.{name}");
        if ["gateway", "uplink", "router"].contains(&name) {
            let found = format!("{name:?}, which is the fabric's own port");
            out.say(&spots.of(&at, ""), &at, "a name that the fabric does not use itself", found, None);
        }
        if let Some(other) = seen.insert(name, at.clone()) {
            out.say(
                &spots.of(&at, ""),
                &at,
                "a name that no other member has",
                format!("{name:?}, as in [{other}]"),
                None,
            );
        }
    }
    let mut devices: HashMap<(&str, Option<&str>), &str> = HashMap::new();
    for tap in &fabric.taps {
        if let (Some(ip), None, Some(Uplink::Kernel)) =
            (tap.ip, &tap.netns, fabric.network(&tap.network).map(|n| &n.uplink))
        {
            // The host would have two routes to the subnet, and answers to a forward's masqueraded clients take the wrong.
            let at = format!("tap.{}", tap.name);
            let found = format!("{ip}, a second address of the host in network \"{}\"", tap.network);
            let hint = "uplink = \"kernel\" has given the host one: leave `ip` out, or put the device into a `netns`";
            out.say(
                &spots.of(&at, "ip"),
                format!("{at}.ip"),
                "no address for a device of the host beside a kernel uplink",
                found,
                Some(hint.into()),
            );
        }
        if let Some(other) = devices.insert((&tap.device, tap.netns.as_deref()), &tap.name) {
            let at = format!("tap.{}", tap.name);
            let found = format!("{:?}, as in [tap.{other}]", tap.device);
            out.say(&spots.of(&at, "device"), format!("{at}.device"), "a device of its own", found, None);
        }
    }
}

fn images(fabric: &Fabric, spots: &Spots, out: &mut Complaints<'_>) {
    for m in &fabric.machines {
        let at = format!("{}.{}", m.kind.word(), m.name);
        let mut file = |key: &str, path: &std::path::Path| {
            let found = match std::fs::metadata(path) {
                Ok(meta) if meta.is_file() => return,
                Ok(_) => format!("{}, which is no file", path.display()),
                Err(error) => format!("{}: {error}", path.display()),
            };
            let hint = path.is_relative().then(|| "paths start from the file's folder".to_string());
            out.say(&spots.of(&at, key), format!("{at}.{key}"), "the path of a file that can be read", found, hint);
        };
        match &m.boot {
            Boot::Cell(Image::Path(path)) => file("image", path),
            Boot::Cell(Image::App(app)) => {
                if let Err(tried) = find_app(app) {
                    let tried: Vec<_> = tried.iter().map(|p| p.display().to_string()).collect();
                    let found = format!("no image for {app:?} (looked at {})", tried.join(", "));
                    let build =
                        || "build the cells (cd cells && cargo build --release), set TOMBOLO_APPS, or give `image`";
                    let apps = apps();
                    let hint = near(app, apps.iter().map(String::as_str)).unwrap_or_else(|| build().into());
                    out.say(&spots.of(&at, "app"), format!("{at}.app"), "the name of a built app", found, Some(hint));
                }
            }
            Boot::Vm { kernel, initrd, disk } => {
                kernel.iter().for_each(|p| file("kernel", p));
                initrd.iter().for_each(|p| file("initrd", p));
                disk.iter().for_each(|(p, _)| file("disk", p));
            }
        }
        if m.attach != Attach::VhostUser && m.queues > 1 {
            let hint = Some("several queue pairs need attach = \"vhost-user\"".to_string());
            out.say(&spots.of(&at, "queues"), format!("{at}.queues"), "1", m.queues.to_string(), hint);
        }
        if m.iommu && m.machine != MachineType::Q35 {
            let hint = Some("leave `machine` out".to_string());
            out.say(&spots.of(&at, "iommu"), format!("{at}.iommu"), "false on a machine that is no q35", "true", hint);
        }
        if m.machine == MachineType::Microvm && matches!(m.boot, Boot::Vm { kernel: None, .. }) {
            let hint = Some("use machine = \"q35\", or give `kernel`".to_string());
            out.say(
                &spots.of(&at, "machine"),
                format!("{at}.machine"),
                "a machine type that boots from a disk",
                "\"microvm\"",
                hint,
            );
        }
    }
}

fn links(fabric: &Fabric, spots: &Spots, out: &mut Complaints<'_>) {
    for (i, link) in fabric.links.iter().enumerate() {
        let at = format!("link.{}", link.name);
        let mut say = |key: &str, expected: String, found: String, hint: Option<String>| {
            out.say(&spots.of(&at, key), format!("{at}.{key}"), expected, found, hint);
        };
        if fabric.links[..i].iter().any(|l| l.name == link.name) {
            say("", "a name that no other link has".into(), format!("{:?}", link.name), None);
        }
        for (j, name) in link.between.iter().enumerate() {
            if !fabric.machines.iter().any(|m| m.name == *name) {
                let names: Vec<&str> = fabric.machines.iter().map(|m| m.name.as_str()).collect();
                let expected = format!("names of cells and VMs ({})", names.join(", "));
                let hint = near(name, names).or_else(|| {
                    let other = fabric.members().any(|m| m == name);
                    other.then(|| "for processes of your own set `seats`".to_string())
                });
                say("between", expected, format!("{name:?}"), hint);
            }
            if link.between[..j].contains(name) {
                say("between", "each machine once".into(), format!("{name:?} again"), None);
            }
        }
        if !(2..=64).contains(&link.max_peers()) {
            let found = format!("{} machine(s) and {} seat(s)", link.between.len(), link.seats);
            say("between", "2 to 64 ends, with `seats`".into(), found, None);
        }
        if link.is_bridged() {
            if link.between.len() != 1 || link.seats != 1 {
                let found = format!("{} machine(s) and {} seat(s)", link.between.len(), link.seats);
                let hint = Some("the fabric takes the seat itself: leave `seats` out".to_string());
                say("between", "one machine, with `service` or `to`".into(), found, hint);
            }
            if link.protocol != protocol::CALLS {
                let hint = Some("leave `protocol` out".to_string());
                say("protocol", "0x4002, calls, with `service` or `to`".into(), format!("{:#x}", link.protocol), hint);
            }
        }
        if link.everybody && link.service.is_none() {
            say("callers", "\"owner\" without `service`".into(), "\"everybody\"".into(), None);
        }
        if let Some(name) = &link.service
            && fabric.links[..i].iter().any(|l| l.service.as_ref() == Some(name))
        {
            say("service", "a name that no other link has".into(), format!("{name:?}"), None);
        }
        if link.plain && link.seats > 0 {
            let hint = Some("a process needs the link's server to get the memory: leave `plain` out".to_string());
            say("seats", "0 on a plain link".into(), link.seats.to_string(), hint);
        }
        if (2..=64).contains(&link.max_peers())
            && let Err(error) = Layout::v1(link.region, link.rw, link.max_peers())
        {
            let hint = Some("make `region` larger".to_string());
            say(
                "region",
                "room for a header, a state table, `rw`, and a page for each end".into(),
                error.to_string(),
                hint,
            );
        }
    }
}

/// Complains about MACs and addresses used twice or out of place; returns who has which address.
fn addresses(fabric: &Fabric, spots: &Spots, out: &mut Complaints<'_>) -> HashMap<(String, Ipv4Addr), String> {
    let mut macs: HashMap<(String, Mac), String> = HashMap::new();
    let mut ips: HashMap<(String, Ipv4Addr), String> = HashMap::new();
    for n in &fabric.networks {
        if let Some(gateway) = n.gateway {
            ips.insert((n.name.clone(), gateway), "the network's gateway".into());
        }
        if let Some(router) = n.router {
            ips.insert((n.name.clone(), router), "the network's router".into());
        }
    }
    let mut rows: Vec<(String, &str, Option<Mac>, Option<Ipv4Addr>)> = Vec::new();
    for m in &fabric.machines {
        rows.extend(
            m.nics.iter().map(|n| (format!("{}.{}", m.kind.word(), m.name), n.network.as_str(), Some(n.mac), n.ip)),
        );
    }
    rows.extend(fabric.taps.iter().map(|t| (format!("tap.{}", t.name), t.network.as_str(), Some(t.mac), t.ip)));
    rows.extend(fabric.ports.iter().map(|p| (format!("port.{}", p.name), p.network.as_str(), p.mac, p.ip)));
    for (at, network, mac, ip) in rows {
        let Some(net) = fabric.network(network) else { continue };
        if let Some(mac) = mac
            && let Some(other) = macs.insert((network.into(), mac), format!("[{at}]"))
        {
            let found = format!("{mac}, as in {other}");
            out.say(&spots.of(&at, "mac"), format!("{at}.mac"), "a MAC address that no other member has", found, None);
        }
        let Some(ip) = ip else { continue };
        if !net.subnet.has_host(ip) {
            let expected = format!("a host address inside {} of network \"{network}\"", net.subnet);
            out.say(&spots.of(&at, "ip"), format!("{at}.ip"), expected, ip.to_string(), None);
        }
        if let Some(other) = ips.insert((network.into(), ip), format!("[{at}]")) {
            let found = format!("{ip}, which is that of {other}");
            out.say(&spots.of(&at, "ip"), format!("{at}.ip"), "an address that nobody else has", found, None);
        }
    }
    ips
}

/// Gives every device without an address one of its network's range: a place that depends on its MAC, or the next
/// free one, so that a device keeps its address when others come and go.
fn lease(fabric: &mut Fabric, mut taken: HashMap<(String, Ipv4Addr), String>) {
    let networks = fabric.networks.clone();
    for machine in &mut fabric.machines {
        for nic in &mut machine.nics {
            let Some(net) = networks.iter().find(|n| n.name == nic.network) else { continue };
            let (None, Some(dhcp)) = (nic.ip, net.dhcp) else { continue };
            let (from, to) = (u32::from(dhcp.from), u32::from(dhcp.to));
            if from > to {
                continue;
            }
            let size = to - from + 1;
            let [_, _, a, b, c, d] = nic.mac.0;
            let start = u32::from_be_bytes([a, b, c, d]) % size;
            let free = (0..size)
                .map(|i| Ipv4Addr::from(from + (start + i) % size))
                .find(|ip| !taken.contains_key(&(net.name.clone(), *ip)));
            if let Some(ip) = free {
                taken.insert((net.name.clone(), ip), machine.name.clone());
                nic.ip = Some(ip);
            }
        }
    }
}

/// `guard = "ip"` that was asked for, where there is no address to hold the member to.
fn guards(fabric: &Fabric, spots: &Spots, out: &mut Complaints<'_>) {
    let machines = fabric
        .machines
        .iter()
        .map(|m| (format!("{}.{}", m.kind.word(), m.name), m.guard, m.nics.iter().all(|n| n.ip.is_some())));
    let taps = fabric.taps.iter().map(|t| (format!("tap.{}", t.name), t.guard, t.ip.is_some()));
    let ports = fabric.ports.iter().map(|p| (format!("port.{}", p.name), p.guard, p.ip.is_some()));
    for (at, guard, known) in machines.chain(taps).chain(ports) {
        if guard == Guard::Ip && !known && spots.has(&at, "guard") {
            let found = "\"ip\" without a known address";
            let hint = Some("give it an `ip`, or use \"mac\"".to_string());
            out.say(&spots.of(&at, "guard"), format!("{at}.guard"), "\"mac\" or \"off\" here", found, hint);
        }
    }
}

fn forwards(fabric: &mut Fabric, spots: &Spots, out: &mut Complaints<'_>) {
    let mut forwards = std::mem::take(&mut fabric.forwards);
    for (i, f) in forwards.iter_mut().enumerate() {
        let at = format!("forward[{i}]");
        // Port 0 keeps the place of what could not be read, and was complained about there.
        if !f.listen.is_ipv4() {
            let found = f.listen.to_string();
            let hint = Some("IPv6 listeners are not served yet".to_string());
            out.say(&spots.of(&at, "listen"), format!("{at}.listen"), "an IPv4 address and port", found, hint);
        }
        if f.port == 0 {
            continue;
        }
        let spot = spots.of(&at, "to");
        let key = format!("{at}.to");
        let asked = f.network.clone();
        let on = |n: &str| asked.is_empty() || asked == n;
        let (network, ip) = match &f.target {
            Target::Ip(ip) => match fabric.networks.iter().find(|n| on(&n.name) && n.subnet.has_host(*ip)) {
                Some(n) => (n.name.clone(), *ip),
                None => {
                    out.say(&spot, key, "an address inside one of the networks", ip.to_string(), None);
                    continue;
                }
            },
            Target::Name(name) => {
                let all: Vec<_> = fabric.addresses().into_iter().filter(|(_, _, _, who)| who == name).collect();
                let best = |(n, ..): &&(&str, Option<Mac>, Ipv4Addr, &str)| {
                    on(n) && fabric.network(n).is_some_and(|n| n.uplink.forwards())
                };
                match all.iter().find(best).or_else(|| all.iter().find(|(n, ..)| on(n))) {
                    Some(&(n, _, ip, _)) => (n.to_string(), ip),
                    None if fabric.members().any(|m| m == name) => {
                        let hint = Some(format!("give \"{name}\" an `ip`, or its network DHCP"));
                        out.say(
                            &spot,
                            key,
                            "a member with a known address",
                            format!("{name:?}, whose address is not known"),
                            hint,
                        );
                        continue;
                    }
                    None => {
                        let hint = near(name, fabric.members());
                        out.say(&spot, key, "the name of a member", format!("{name:?}"), hint);
                        continue;
                    }
                }
            }
        };
        if let Some(n) = fabric.network(&network)
            && !n.uplink.forwards()
        {
            let found = format!("network \"{network}\" with uplink \"{}\"", n.uplink.word());
            let hint = Some(format!("set uplink = \"user\" in [network.{network}]"));
            out.say(&spot, key, "a member of a network with uplink \"user\" or \"kernel\"", found, hint);
        }
        (f.network, f.ip) = (network, ip);
    }
    for i in 0..forwards.len() {
        let twin = (0..i).find(|&j| Fabric::same_listener(&forwards[i], &forwards[j]));
        if let Some(j) = twin.filter(|_| forwards[i].listen.port() != 0) {
            let found = format!("{} {}, as in forward[{j}]", forwards[i].proto.word(), forwards[i].listen);
            let at = format!("forward[{i}]");
            out.say(
                &spots.of(&at, "listen"),
                format!("{at}.listen"),
                "a listener that no other forward has",
                found,
                None,
            );
        }
    }
    fabric.forwards = forwards;
}
