//! Keys that do nothing where they stand.

use std::net::Ipv4Addr;

use super::{Check, Spot, decides_gateway, path_of, path_of_machine};
use crate::file::model::*;

/// Keys that do nothing where they stand, as far as several keys or sections decide that.
/// [`super::schema::CONDITIONS`] has those that one other key of their section decides about.
impl Check<'_, '_, '_> {
    /// Complains about a key if the file has it, which does nothing at that `place`. The `reason`
    /// may end in what else to do.
    pub(super) fn idle(&mut self, (at, key): Spot<'_>, leans_on: &[Spot<'_>], place: &str, reason: &str) {
        if self.spots.has(at, key) {
            let found = self.out.excerpt(&self.spots.of(at, key));
            let hint = Some(format!("{reason} leave `{key}` out"));
            self.fault((at, key), leans_on, format!("no `{key}` {place}"), found, hint);
        }
    }

    pub(super) fn idle_workers(&mut self) {
        let fabric = self.fabric;
        for worker in &fabric.workers {
            let at = &format!("worker.{}", worker.name)[..];
            let used = fabric.networks.iter().any(|n| n.worker == worker.name);
            if used || !self.spots.has(at, "") || self.out.refused("network", None) {
                continue;
            }
            let networks: Vec<_> = fabric.networks.iter().map(|n| path_of(&n.name)).collect();
            let mut leans_on: Vec<Spot<'_>> = networks.iter().map(|at| (&at[..], "worker")).collect();
            leans_on.push(("", "network"));
            let hint = format!("set worker = \"{}\" in a network, or leave the section out", worker.name);
            self.fault((at, ""), &leans_on, "a worker that runs a network", "one that runs none", Some(hint));
        }
    }

    pub(super) fn idle_keys_of_networks(&mut self) {
        let fabric = self.fabric;
        for n in &fabric.networks {
            let at = &path_of(&n.name)[..];
            let leans_on = [(at, "uplink"), (at, "gateway"), (at, "dhcp")];
            if n.gateway.is_none() {
                for key in ["domain", "dns"] {
                    let reason = "no name server of the fabric is there: set `gateway`, or";
                    self.idle((at, key), &leans_on, "on a network without a gateway", reason);
                }
            } else if n.uplink == Uplink::None {
                let reason = "the gateway asks no other name servers then: set `uplink`, or";
                self.idle((at, "dns"), &leans_on, "with uplink = \"none\"", reason);
            }
        }
    }

    pub(super) fn idle_keys_of_members(&mut self) {
        let fabric = self.fabric;
        for m in &fabric.machines {
            let at = &path_of_machine(m)[..];
            if m.nics.is_empty() && self.spots.has(at, "network") {
                let reason = "it has no network device;";
                // "xen" says who runs it, too.
                let attach = ["attach"].into_iter().filter(|_| m.attach != Attach::Xen);
                for key in attach.chain([
                    "region",
                    "queues",
                    "guard",
                    "ip6",
                    "ip6_limit",
                    "allow",
                    "storm",
                    "rate",
                    "class",
                    "groups",
                    "isolated",
                    "vlan",
                    "trunk",
                    "native",
                ]) {
                    self.idle((at, key), &[(at, "network")], "without a network", reason);
                }
            }
            let networks: Vec<_> = m.nics.iter().map(|nic| &nic.network[..]).collect();
            self.idle_address(at, &networks, m.guard);
            self.idle_role(at, &networks, m.traffic.roles.gateway);
        }
        for t in &fabric.taps {
            let at = &format!("tap.{}", t.name)[..];
            self.idle_role(at, &[&t.network], t.traffic.roles.gateway);
            if t.adopt && t.guard == Guard::Off && !self.leases(&t.network, t.ip) {
                let reason = "the device keeps its own address: set `guard`, or `ip` for a lease, or";
                self.idle_mac(at, &t.network, "with adopt = true", reason);
            }
        }
        for p in &fabric.ports {
            let at = &format!("port.{}", p.name)[..];
            self.idle_address(at, &[&p.network], p.guard);
            self.idle_role(at, &[&p.network], p.traffic.roles.gateway);
            // The link's header has a place for it.
            let told = matches!(p.kind, PortKind::Ivshmem { version: 1, .. });
            if !told && p.guard == Guard::Off && !self.leases(&p.network, p.ip) {
                let reason = "nothing else uses it: set `guard`, or `ip` for a lease, or";
                self.idle_mac(at, &p.network, "with guard = \"off\" and without a lease", reason);
            }
        }
    }

    /// Whether that address on that network is leased and has a name there. True for a network that
    /// is not known.
    fn leases(&self, network: &str, ip: Option<Ipv4Addr>) -> bool {
        ip.is_some() && self.fabric.network(network).is_none_or(|n| n.gateway.is_some())
    }

    fn idle_mac(&mut self, at: &str, network: &str, place: &str, reason: &str) {
        let net = path_of(network);
        let own = ["adopt", "kind", "version", "guard", "ip", "network"].map(|key| (at, key));
        let leans_on = [&own[..], &decides_gateway(&net)].concat();
        self.idle((at, "mac"), &leans_on, place, reason);
    }

    /// Complains about `ip` of a member that is not held to it, on networks that do not lease it.
    fn idle_address(&mut self, at: &str, networks: &[&str], guard: Guard) {
        let gateways = |n: &&str| self.fabric.network(n).is_none_or(|n| n.gateway.is_some());
        if guard == Guard::Ip || networks.iter().any(gateways) {
            return;
        }
        let nets: Vec<_> = networks.iter().map(|n| path_of(n)).collect();
        let mut leans_on: Vec<Spot<'_>> = nets.iter().flat_map(|net| decides_gateway(net)).collect();
        leans_on.extend([(at, "guard"), (at, "mac"), (at, "network")]);
        let place = format!("on a network without a gateway, with guard = \"{}\"", guard.word());
        self.idle(
            (at, "ip"),
            &leans_on,
            &place,
            "the member is not held to it, and there is no lease: set guard = \"ip\", or",
        );
    }

    /// Complains about the right to the addresses of a gateway and a router where there are none.
    fn idle_role(&mut self, at: &str, networks: &[&str], allowed: bool) {
        let has = |n: &&str| self.fabric.network(n).is_none_or(|n| n.gateway.is_some() || n.router.is_some());
        if !allowed || networks.is_empty() || networks.iter().any(has) {
            return;
        }
        let nets: Vec<_> = networks.iter().map(|n| path_of(n)).collect();
        let mut leans_on: Vec<Spot<'_>> = nets.iter().flat_map(|net| decides_gateway(net)).collect();
        leans_on.push((at, "network"));
        if self.spots.has(at, "allow") {
            let found = self.out.excerpt(&self.spots.of(at, "allow"));
            let hint = Some("any member may use every address there; leave \"gateway-addresses\" out".to_string());
            let expected = "no \"gateway-addresses\" on a network without a gateway";
            self.fault((at, "allow"), &leans_on, expected, found, hint);
        }
    }
}
