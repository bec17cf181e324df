//! Where forwards go.

use std::net::IpAddr;

use super::{Check, Spot, address_of, path_of, uses};
use crate::file::model::*;
use crate::file::problem::{Complaints, near};
use crate::file::read::Spots;

/// The addresses that a member has by the file, with their networks, IPv4 first.
fn addresses_of<'f>(fabric: &'f Fabric, name: &str) -> Vec<(&'f Network, IpAddr)> {
    let four = fabric.addresses().into_iter().filter(|(_, _, _, who)| *who == name);
    let mut out: Vec<_> = four.filter_map(|(n, _, ip, _)| Some((fabric.network(n)?, IpAddr::from(ip)))).collect();
    for n in &fabric.networks {
        let of_it = fabric.addresses6(&n.name).into_iter().filter(|(who, ..)| who == name);
        let fixed = of_it.flat_map(|(.., all)| all).map(IpAddr::from).filter(|ip| n.has_host(*ip));
        out.extend(fixed.map(|ip| (n, ip)));
    }
    out
}

/// Whether two forwards ask one passt for the same port at different addresses, which it refuses.
/// All addresses of both families are one listener to it.
fn share_a_port(fabric: &Fabric, a: &Forward, b: &Forward) -> bool {
    let by_passt = fabric.network(&a.network).is_some_and(|n| n.uplink == Uplink::User);
    let is_same = a.network == b.network && (a.proto, a.listen.port()) == (b.proto, b.listen.port());
    let everywhere = a.listen.ip().is_unspecified() && b.listen.ip().is_unspecified();
    by_passt && is_same && !everywhere
}

/// Fills in where each forward goes.
pub(super) fn forwards(fabric: &mut Fabric, spots: &Spots, out: &mut Complaints<'_>) {
    let mut forwards = std::mem::take(&mut fabric.forwards);
    let mut check = Check { fabric, spots, out };
    for (i, f) in forwards.iter_mut().enumerate() {
        let at = &format!("forward[{i}]")[..];
        if let Some((network, ip)) = check.target(at, f) {
            (f.network, f.ip) = (network, ip);
        }
    }
    for i in 0..forwards.len() {
        let at = &format!("forward[{i}]")[..];
        if let Some(j) = (0..i).find(|&j| Fabric::same_listener(&forwards[i], &forwards[j])) {
            let to = forwards[j].target.with_port(forwards[j].port);
            let found = format!("{} {}, which leads to {to}", forwards[i].proto.word(), forwards[i].listen);
            let that = &format!("forward[{j}]")[..];
            let leans_on = [(at, "proto"), (that, "listen"), (that, "proto")];
            check.fault((at, "listen"), &leans_on, "a listener that no other forward has", found, None);
        } else if let Some(j) = (0..i).find(|&j| share_a_port(check.fabric, &forwards[i], &forwards[j])) {
            let to = forwards[j].target.with_port(forwards[j].port);
            let found = format!("{}, beside {}, which leads to {to}", forwards[i].listen, forwards[j].listen);
            let that = &format!("forward[{j}]")[..];
            let leans_on = [(at, "proto"), (that, "listen"), (that, "proto")];
            let hint =
                Some("listen at another port, or once at 0.0.0.0 for all addresses (and once at [::])".to_string());
            let expected = "a port that no other forward of the network has with uplink = \"user\"";
            check.fault((at, "listen"), &leans_on, expected, found, hint);
        }
    }
    fabric.forwards = forwards;
}

impl Check<'_, '_, '_> {
    /// The network and address that a forward goes to.
    fn target(&mut self, at: &str, f: &Forward) -> Option<(String, IpAddr)> {
        let fabric = self.fabric;
        let to = (at, "to");
        let on = |n: &str| f.network.is_empty() || f.network == n;
        let (network, ip) = match &f.target {
            Target::Ip(ip) => match fabric.networks.iter().find(|n| on(&n.name) && n.has_host(*ip)) {
                Some(n) => (n.name.clone(), *ip),
                None => {
                    let subnets: Vec<_> = fabric.networks.iter().map(|n| path_of(&n.name)).collect();
                    let mut leans_on: Vec<Spot<'_>> = subnets.iter().map(|at| (&at[..], "subnet")).collect();
                    leans_on.extend(subnets.iter().map(|at| (&at[..], "ipv6")));
                    leans_on.extend([("", "network"), (at, "network")]);
                    if !self.out.refused("network", None) {
                        self.fault(to, &leans_on, "an address inside one of the networks", ip.to_string(), None);
                    }
                    return None;
                }
            },
            Target::Name(name) => {
                // The first of a network that forwards to it, of the listener's family where there
                // is one.
                let rank = |(n, ip): &(&Network, IpAddr)| {
                    let served = n.uplink.forwards() && (ip.is_ipv4() || n.prefix_out().is_some());
                    (!served, ip.is_ipv4() != f.listen.is_ipv4())
                };
                match addresses_of(fabric, name).into_iter().filter(|(n, _)| on(&n.name)).min_by_key(rank) {
                    Some((n, ip)) => (n.name.clone(), ip),
                    None => {
                        self.no_target(at, f, name);
                        return None;
                    }
                }
            }
        };
        if let Some(n) = fabric.network(&network) {
            self.family(at, f, n, ip);
        }
        if let Some(n) = fabric.network(&network)
            && !n.uplink.forwards()
        {
            let found = format!("network \"{network}\" with uplink \"{}\"", n.uplink.word());
            let hint = Some(format!("set uplink = \"user\" in [network.{network}]"));
            let expected = "a member of a network with uplink \"user\" or \"kernel\"";
            self.fault(to, &[(&path_of(&network), "uplink"), (at, "network")], expected, found, hint);
        }
        Some((network, ip))
    }

    /// Complains about a forward whose address families the network's uplink does not serve.
    fn family(&mut self, at: &str, f: &Forward, n: &Network, ip: IpAddr) {
        let net = &path_of(&n.name)[..];
        let leans_on = [(net, "uplink"), (at, "network"), (net, "uplink6"), (net, "ipv6")];
        let is_out6 = n.prefix_out().is_some();
        match n.uplink {
            Uplink::User | Uplink::Kernel if ip.is_ipv6() && !is_out6 => {
                let hint = format!("set uplink6 = \"masquerade\" in [{net}], with an `mtu` of at least 1280");
                let expected = "a member's IPv4 address in a network without a way out for IPv6";
                self.fault((at, "to"), &leans_on, expected, ip.to_string(), Some(hint));
            }
            Uplink::User if f.listen.is_ipv6() != ip.is_ipv6() => {
                let (family, loopback) = if ip.is_ipv6() { ("IPv6", "[::1]") } else { ("IPv4", "127.0.0.1") };
                let hint = format!(
                    "passt does not change the family: listen at \"{loopback}:{}\", {}or set uplink = \"kernel\" in [{net}]",
                    f.listen.port(),
                    if ip.is_ipv6() { "" } else { "give the member an address by `ip6`, " },
                );
                let expected = format!("an {family} address and port, as the member has, with uplink = \"user\"");
                self.fault((at, "listen"), &leans_on, expected, f.listen.to_string(), Some(hint));
            }
            _ => {}
        }
    }

    /// Complains about a forward to a name without an address.
    fn no_target(&mut self, at: &str, f: &Forward, name: &str) {
        let fabric = self.fabric;
        let on: Vec<_> =
            uses(fabric).into_iter().filter(|(at, _)| at.split_once('.').is_some_and(|(_, n)| n == name)).collect();
        let mut leans_on = vec![(at.to_string(), "network")];
        leans_on.extend(on.iter().flat_map(|(that, network)| address_of(that, network)));
        let leans_on: Vec<_> = leans_on.iter().map(|(at, key)| (&at[..], *key)).collect();
        if !on.is_empty() && !f.network.is_empty() && on.iter().all(|(_, network)| *network != f.network) {
            let networks: Vec<_> = on.iter().map(|(_, network)| format!("{network:?}")).collect();
            let found = format!("{name:?}, which is on {}", networks.join(", "));
            let hint = Some("leave the forward's `network` out".to_string());
            self.fault((at, "to"), &leans_on, format!("a member of network {:?}", f.network), found, hint);
        } else if !on.is_empty() {
            let found = format!("{name:?}, whose address is not known");
            let has_lease = fabric.machines.iter().any(|m| m.name == name);
            let key = if f.listen.is_ipv6() { "an `ip` or `ip6`" } else { "an `ip`" };
            let hint = Some(match has_lease {
                true => format!("give \"{name}\" {key}, or have its network lease addresses: `dhcp = true`"),
                false => {
                    format!("give \"{name}\" {key}: only machines of the file have addresses that are known without it")
                }
            });
            self.fault((at, "to"), &leans_on, "a member with a known address", found, hint);
        } else if !crate::file::MEMBERS.iter().any(|word| self.out.refused(word, Some(name))) {
            let (found, hint) = match fabric.machines.iter().any(|m| m.name == name) {
                true => {
                    let hint = match fabric.networks.is_empty() {
                        true => "add [network.lan]".to_string(),
                        false => format!("give \"{name}\" a `network`"),
                    };
                    (format!("{name:?}, which is on no network"), Some(hint))
                }
                false => (format!("{name:?}"), near(name, fabric.members())),
            };
            self.fault((at, "to"), &leans_on, "the name of a member", found, hint);
        }
    }
}
