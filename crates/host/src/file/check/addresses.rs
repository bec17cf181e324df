//! Addresses of networks and members, and leases for those that have none.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tombolo_switch::gateway::Ipv6Config;

use super::{Check, address_of, path_of, path_of_machine, section_of_member};
use crate::file::hosts::FIXED;
use crate::file::model::*;

impl Check<'_, '_, '_> {
    /// Complains about a way out for IPv6 that the rest of the network contradicts.
    pub(super) fn way_out6(&mut self, at: &str, n: &Network) {
        let spot = (at, "uplink6");
        if self.spots.has(at, "uplink6") && n.uplink.forwards() && n.ipv6.is_none() {
            let reason = "it has no IPv6 prefix then: leave ipv6 = \"off\" out, or";
            self.idle(spot, &[(at, "ipv6"), (at, "uplink"), (at, "gateway")], "with ipv6 = \"off\"", reason);
        }
        let Some(prefix) = n.ipv6.filter(|_| n.uplink6 != Uplink6::Off) else { return };
        if n.mtu < crate::file::parse::IPV6_MTU {
            let hint = Some("set `mtu` to 1280 or more, or leave `uplink6` out".to_string());
            let expected = "\"off\" with an `mtu` below 1280, which IPv6 cannot use";
            self.fault(spot, &[(at, "mtu")], expected, n.uplink6.text(), hint);
        }
        if n.uplink == Uplink::User && n.uplink6 != Uplink6::Masquerade {
            let hint = Some("set uplink = \"kernel\", which needs root".to_string());
            let expected = "\"masquerade\" or \"off\" with uplink = \"user\"";
            self.fault(spot, &[(at, "uplink")], expected, n.uplink6.text(), hint);
            return;
        }
        if n.uplink6 == Uplink6::Routed && !self.spots.has(at, "ipv6") {
            let hint = "give the prefix that is routed to this host: ipv6 = \"2001:db8:1:2::/64\"".to_string();
            let expected = "another value without `ipv6`: no router knows the derived prefix";
            self.fault(spot, &[(at, "ipv6")], expected, "\"routed\"", Some(hint));
        }
        if n.uplink6 == Uplink6::Prefix(prefix) {
            let hint = Some("set uplink6 = \"routed\", which translates nothing".to_string());
            self.fault(spot, &[(at, "ipv6")], "another prefix than the network's", format!("{prefix}/64"), hint);
        }
    }

    /// Complains about fixed IPv6 addresses of members that are the network's own.
    pub(super) fn own_addresses6(&mut self) {
        let fabric = self.fabric;
        for n in &fabric.networks {
            let Some(prefix) = n.ipv6 else { continue };
            let net_at = path_of(&n.name);
            let gateway = Ipv6Config::new(prefix).address();
            let own = [(Some(prefix), "network"), (Some(gateway), "gateway"), (n.router6(), "router")];
            for (name, _, all) in fabric.addresses6(&n.name) {
                for (ip, word) in own.iter().filter_map(|(ip, word)| Some((ip.filter(|ip| all.contains(ip))?, word))) {
                    let at = section_of_member(fabric, &name);
                    let leans_on = [(&at[..], "network"), (&net_at, "ipv6")];
                    let found = format!("{ip}, which is the {word}'s");
                    self.fault((&at, "ip6"), &leans_on, "an address that no other member has", found, None);
                }
            }
        }
    }

    /// Complains about an IPv6 address of a cell that it could not use, or that another cell gives
    /// itself, too. A cell has the first address of its list that is in the network's prefix,
    /// always. Other members may share one that moves between them.
    pub(super) fn cells6(&mut self) {
        let fabric = self.fabric;
        let is_cell = |name: &str| fabric.machines.iter().any(|m| m.name == name && m.kind == MachineKind::Cell);
        for n in &fabric.networks {
            let Some(prefix) = n.ipv6 else { continue };
            let net_at = path_of(&n.name);
            let mut taken: HashMap<Ipv6Addr, String> = HashMap::new();
            for (name, _, all) in fabric.addresses6(&n.name).into_iter().filter(|(name, ..)| is_cell(name)) {
                let Some(first) = all.first() else { continue };
                let at = section_of_member(fabric, &name);
                let leans_on = [(&at[..], "network"), (&net_at, "ipv6"), (&at, "count")];
                let Some(own) = all.iter().find(|ip| n.has_host(IpAddr::V6(**ip))) else {
                    let expected = format!("an address within {prefix}/64 of network \"{}\"", n.name);
                    let hint = "a cell gives itself the first address of the prefix that is in the list".to_string();
                    self.fault((&at, "ip6"), &leans_on, expected, first.to_string(), Some(hint));
                    continue;
                };
                if let Some(other) = taken.insert(*own, at.clone()) {
                    let found = format!("{own}, which is that of [{other}]");
                    let leans_on = [&leans_on[..], &[(&other, "ip6")]].concat();
                    self.fault((&at, "ip6"), &leans_on, "an address that no other cell has", found, None);
                }
            }
        }
    }

    /// Complains about addresses that other machines of the file give to their members.
    pub(super) fn leased_elsewhere(&mut self) {
        let fabric = self.fabric;
        for (network, ip, whose) in &fabric.elsewhere.taken {
            let range =
                fabric.network(network).and_then(|n| n.dhcp).filter(|range| (range.from..=range.to).contains(ip));
            if range.is_some() && whose.starts_with(FIXED) {
                let net = &path_of(network)[..];
                let hint = Some(format!("begin above {ip}, or leave `from` out"));
                let leans_on = [(net, "subnet"), (net, "gateway"), (net, "router")];
                let found = format!("{ip}, {whose}, in it");
                self.fault((net, "dhcp"), &leans_on, "a range without addresses of the machines", found, hint);
            }
        }
        let machines =
            fabric.machines.iter().flat_map(|m| m.nics.iter().map(|n| (path_of_machine(m), &n.network, n.ip)));
        let taps = fabric.taps.iter().map(|t| (format!("tap.{}", t.name), &t.network, t.ip));
        let ports = fabric.ports.iter().map(|p| (format!("port.{}", p.name), &p.network, p.ip));
        for (at, network, ip) in machines.chain(taps).chain(ports) {
            let Some(ip) = ip else { continue };
            let holds =
                |(of, from, to, _): &&(String, Ipv4Addr, Ipv4Addr, String)| of == network && (from..=to).contains(&&ip);
            let Some((_, from, to, machine)) = fabric.elsewhere.leased.iter().find(holds) else { continue };
            let found = format!("{ip}, and machine \"{machine}\" leases {from} to {to}");
            let hint = fabric.network(network).and_then(|n| n.dhcp);
            let hint = hint.map(|own| {
                format!("this one leases {} to {}; one below all ranges is free everywhere", own.from, own.to)
            });
            let net = &path_of(network)[..];
            let leans_on = [(&at[..], "network"), (net, "subnet"), (net, "dhcp"), (net, "span")];
            self.fault((&at, "ip"), &leans_on, "an address that no other machine leases", found, hint);
        }
    }

    /// Complains about MACs and addresses used twice or out of place; returns who has which
    /// address.
    pub(super) fn addresses(&mut self) -> HashMap<(String, Ipv4Addr), String> {
        let fabric = self.fabric;
        let mut macs: HashMap<(&str, Mac), String> = HashMap::new();
        // Of each address the section and key that give it, and the words for that.
        let elsewhere = fabric.elsewhere.taken.iter();
        let mut ips: HashMap<(String, Ipv4Addr), (String, &str, String)> = elsewhere
            .map(|(network, ip, whose)| ((network.clone(), *ip), (path_of(network), "span", whose.clone())))
            .collect();
        for n in &fabric.networks {
            for (key, ip) in [("gateway", n.gateway), ("router", n.router)] {
                if let Some(ip) = ip {
                    ips.insert((n.name.clone(), ip), (path_of(&n.name), key, format!("the network's {key}")));
                }
            }
        }
        let mut rows: Vec<(String, &str, Option<Mac>, Option<Ipv4Addr>)> = Vec::new();
        for m in &fabric.machines {
            rows.extend(m.nics.iter().map(|n| (path_of_machine(m), n.network.as_str(), Some(n.mac), n.ip)));
        }
        rows.extend(fabric.taps.iter().map(|t| (format!("tap.{}", t.name), t.network.as_str(), Some(t.mac), t.ip)));
        rows.extend(fabric.ports.iter().map(|p| (format!("port.{}", p.name), p.network.as_str(), p.mac, p.ip)));
        for (at, network, mac, ip) in rows {
            let Some(net) = fabric.network(network) else { continue };
            let (at, net_at) = (&at[..], &path_of(network)[..]);
            if let Some(mac) = mac
                && let Some(other) = macs.insert((network, mac), at.into())
            {
                // Members of one name have one MAC address, unless the file gives them others.
                let leans_on = [(at, ""), (at, "network"), (&other, "mac"), (&other, "network")];
                let found = format!("{mac}, as in [{other}]");
                self.fault((at, "mac"), &leans_on, "a MAC address that no other member has", found, None);
            }
            let Some(ip) = ip else { continue };
            let placed = [(at, "network"), (net_at, "subnet")];
            if !net.subnet.has_host(ip) {
                let expected = format!("a host address inside {} of network \"{network}\"", net.subnet);
                self.fault((at, "ip"), &placed, expected, ip.to_string(), None);
            }
            if let Some((that, key, who)) = ips.insert((network.into(), ip), (at.into(), "ip", format!("[{at}]"))) {
                let leans_on = [&placed[..], &[(&that, key)]].concat();
                let found = format!("{ip}, which is that of {who}");
                self.fault((at, "ip"), &leans_on, "an address that no other member has", found, None);
            }
        }
        ips.into_iter().map(|(place, (.., who))| (place, who)).collect()
    }

    /// Fixed IPv6 addresses of containers. Unlike those of other members, which may share one that
    /// moves between them, they belong to one container. So of two calls of the CNI plugin that
    /// choose the same address only one succeeds.
    pub(super) fn containers6(&mut self) {
        let fabric = self.fabric;
        for network in fabric.networks.iter().filter(|n| n.ipv6.is_some()) {
            let containers: Vec<_> = fabric.contained().filter(|member| member.network == network.name).collect();
            let Some(prefix) = network.ipv6.filter(|_| !containers.is_empty()) else { continue };
            let mut taken: HashMap<Ipv6Addr, Vec<String>> = HashMap::new();
            for (name, _, all) in fabric.addresses6(&network.name) {
                all.into_iter().for_each(|ip| taken.entry(ip).or_default().push(name.clone()));
            }
            // What DHCPv6 gives to a member with a fixed IPv4 address.
            for (_, _, ip, name) in fabric.addresses().into_iter().filter(|(n, ..)| *n == network.name) {
                let leased = Ipv6Addr::from_bits(prefix.to_bits() | u128::from(ip.to_bits()));
                taken.entry(leased).or_default().push(name.into());
            }
            // Of two with one address the later one is at fault, which is the one that is to be
            // added.
            for member in containers.into_iter().rev() {
                let (at, net_at) = (&format!("{}.{}", member.word, member.name)[..], &path_of(&network.name)[..]);
                let Ip6::Only(list) = member.ip6 else { continue };
                for ip in list.iter().filter(|p| p.bits == 128).map(|p| p.base) {
                    let others = taken.get(&ip).into_iter().flatten();
                    let Some(other) = others.into_iter().find(|name| **name != member.name) else { continue };
                    let found = format!("{ip}, which is that of {other}");
                    // Where two have one IPv4 address, that is said already, and this follows from
                    // it.
                    let that = &section_of_member(fabric, other)[..];
                    let leans_on = [(at, "network"), (net_at, "ipv6"), (at, "container")];
                    let leans_on = [&leans_on[..], &[(at, "ip"), (that, "ip"), (that, "ip6")]].concat();
                    self.fault((at, "ip6"), &leans_on, "an address that no other member has", found, None);
                }
            }
        }
    }

    /// `guard = "ip"` that was asked for, where there is no address to hold the member to; `ip6`
    /// where no member is held to it.
    pub(super) fn guards(&mut self) {
        let fabric = self.fabric;
        let asked = |ip6: &Ip6| *ip6 != Ip6::Unsaid;
        let machines = fabric.machines.iter().map(|m| (path_of_machine(m), m.guard, asked(&m.ip6)));
        let taps = fabric.taps.iter().map(|t| (format!("tap.{}", t.name), t.guard, asked(&t.ip6)));
        let ports = fabric.ports.iter().map(|p| (format!("port.{}", p.name), p.guard, asked(&p.ip6)));
        for (at, guard, asked) in machines.chain(taps).chain(ports) {
            if asked && guard != Guard::Ip {
                let leans_on = [(&at[..], "guard"), (&at, "mac"), (&at, "ip")];
                let found = format!("it with guard = \"{}\"", guard.word());
                let needs = if at.starts_with("port.") { "; a port needs `mac` and `ip` for that" } else { "" };
                let hint = Some(format!("set guard = \"ip\"{needs}"));
                self.fault((&at, "ip6"), &leans_on, "it beside guard = \"ip\" alone", found, hint);
            }
        }
        let machines = fabric.machines.iter().map(|m| (path_of_machine(m), m.guard, asked(&m.ip6), &m.traffic));
        let taps = fabric.taps.iter().map(|t| (format!("tap.{}", t.name), t.guard, asked(&t.ip6), &t.traffic));
        let ports = fabric.ports.iter().map(|p| (format!("port.{}", p.name), p.guard, asked(&p.ip6), &p.traffic));
        for (at, guard, listed, traffic) in machines.chain(taps).chain(ports) {
            if traffic.ip6_limit.is_some() && (listed || guard != Guard::Ip) {
                let leans_on = [(&at[..], "guard"), (&at, "ip6"), (&at, "mac"), (&at, "ip")];
                let found = match listed {
                    true => "it with `ip6`".to_string(),
                    false => format!("it with guard = \"{}\"", guard.word()),
                };
                let expected = "it beside guard = \"ip\" alone, without `ip6`";
                self.fault((&at, "ip6_limit"), &leans_on, expected, found, Some("leave it out".into()));
            }
        }
        let machines = fabric.machines.iter().map(|m| {
            let unknown = m.nics.iter().find(|n| n.ip.is_none());
            (path_of_machine(m), m.guard, unknown.map(|n| n.network.as_str()))
        });
        let of = |network, ip: Option<Ipv4Addr>| ip.is_none().then_some(network);
        let taps = fabric.taps.iter().map(|t| (format!("tap.{}", t.name), t.guard, of(t.network.as_str(), t.ip)));
        let ports = fabric.ports.iter().map(|p| (format!("port.{}", p.name), p.guard, of(p.network.as_str(), p.ip)));
        for (at, guard, unknown) in machines.chain(taps).chain(ports) {
            if let (Guard::Ip, Some(network), true) = (guard, unknown, self.spots.has(&at, "guard")) {
                let leans_on = address_of(&at, network);
                let leans_on: Vec<_> = leans_on.iter().map(|(at, key)| (&at[..], *key)).collect();
                let found = "\"ip\" without a known address";
                let hint = Some("give it an `ip`, or use \"mac\"".to_string());
                self.fault((&at, "guard"), &leans_on, "\"mac\" or \"off\" here", found, hint);
            }
        }
    }
}

/// Gives every device without an address one of its network's range: a place that depends on its
/// MAC, or the next free one, so that a device keeps its address when others come and go. Returns
/// the network of each cell for which there is none.
pub(super) fn lease(fabric: &mut Fabric, mut taken: HashMap<(String, Ipv4Addr), String>) -> Vec<String> {
    let (networks, mut without) = (fabric.networks.clone(), Vec::new());
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
            match free {
                Some(ip) => {
                    taken.insert((net.name.clone(), ip), machine.name.clone());
                    nic.ip = Some(ip);
                }
                // A guest may have an address that the gateway does not lease.
                None if matches!(machine.boot, Boot::Cell(_)) => without.push(net.name.clone()),
                None => {}
            }
        }
    }
    without
}
