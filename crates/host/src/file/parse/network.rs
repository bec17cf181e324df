//! `[network.NAME]` and the tunnels to other machines that networks have by `span`.

use std::net::Ipv4Addr;
use std::ops::Range;

use tombolo_ring::vxlan::{self, Vni};
use toml::de::{DeTable, DeValue};

use super::words::{domain_name, interface_name, server};
use super::{Reader, SPAN};
use crate::file::boot::boot;
use crate::file::hosts::{self, Here, Hosts};
use crate::file::model::*;
use crate::file::policy;
use crate::file::problem::near;
use crate::file::read::{Section, found, integer};

const DEFAULT_LEASE_S: u32 = 3600;

impl Reader<'_, '_> {
    pub(super) fn network(&mut self, name: String, span: Range<usize>, table: &DeTable<'_>, base: &str) {
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

    /// The tunnels of networks with `span`.
    pub(super) fn tunnels(&mut self) {
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
}

/// The smallest MTU with which Linux does IPv6 on a device (RFC 8200 §5).
pub(in crate::file) const IPV6_MTU: u16 = 1280;

pub(super) fn guard(s: &mut Section<'_, '_, '_, '_>) -> Option<Guard> {
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

pub(super) fn ip6(s: &mut Section<'_, '_, '_, '_>) -> Ip6 {
    match s.raw("ip6") {
        None => Ip6::Unsaid,
        Some((value, _)) if value.as_str() == Some("any") => Ip6::Any,
        Some(_) => s.list("ip6", true, Prefix6::parse).map_or(Ip6::Unsaid, Ip6::Only),
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

/// The keys of a port of kind "vxlan".
pub(super) fn tunnel(s: &mut Section<'_, '_, '_, '_>) -> Vxlan {
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
