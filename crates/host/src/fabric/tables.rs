//! Which addresses are where: the forwarding tables of the networks, and what the fabric knows of
//! their members' addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

use super::{FabricError, Running};
use crate::api::report::{HomeReport, MacReport, NeighbourReport, SCHEMA, Tables};
use crate::file::{Home, Mac};
use tombolo_switch::vlan::DEFAULT;

impl Running {
    /// The tables of all networks at this instant. `known` is the revision of the homes that the
    /// client has: they are many, and rarely change.
    ///
    /// # Errors
    /// If a worker has ended.
    pub(crate) fn tables(&self, known: Option<&str>) -> Result<Tables, FabricError> {
        // The gateways leave what they have heard in the turn in which their worker answers the
        // other questions. One that is being restarted has what it left last: nothing is waited
        // for.
        self.networks.values().filter_map(|net| net.gateway.as_ref()).for_each(|gateway| gateway.ask_learned6());
        let (mut macs, mut neighbours) = (Vec::new(), Vec::new());
        for spec in &self.spec.networks {
            let (Some(net), Some((_, worker))) = (self.networks.get(&spec.name), self.worker_of(&spec.name)) else {
                continue;
            };
            let handle = worker.thread.handle();
            let status = handle.status()?;
            let names: BTreeMap<_, _> = status.ports.iter().map(|p| (p.token.0, p.name.to_string())).collect();
            let mut places = BTreeMap::new();
            for entry in handle.macs(net.id)? {
                let Some(port) = names.get(&u32::from(entry.port)) else { continue };
                let mac = Mac(entry.address.bytes()).to_string();
                // Addresses are of the gateway's VLAN, where a station is in several.
                if entry.vlan.is_none_or(|vlan| vlan == DEFAULT) || !places.contains_key(&mac) {
                    places.insert(mac.clone(), port.clone());
                }
                let age_ms = entry.age.map(|age| age.0 / 1_000_000);
                macs.push(MacReport { network: spec.name.clone(), mac, port: port.clone(), age_ms, vlan: entry.vlan });
            }
            let of_members = self.spec.addresses().into_iter().filter(|(network, ..)| *network == spec.name);
            let mut of_file: BTreeSet<IpAddr> = of_members.map(|(_, _, ip, _)| ip.into()).collect();
            let six = self.spec.addresses6(&spec.name);
            of_file.extend(six.iter().flat_map(|(_, _, ips)| ips.iter().map(|ip| IpAddr::from(*ip))));
            let mut seen = BTreeSet::new();
            let mut add = |ip: IpAddr, mac: Option<String>, name: Option<String>, source: &str| {
                // What is leased or reserved is announced too.
                if !seen.insert(ip) && source == "learned" {
                    return;
                }
                let port = mac.as_ref().and_then(|mac| places.get(mac)).cloned();
                let network = spec.name.clone();
                let fixed = !["lease", "learned"].contains(&source) || of_file.contains(&ip);
                neighbours.push(NeighbourReport { network, ip, mac, port, name, source: source.to_string(), fixed });
            };
            let role = |role: &str| Some(Mac::derived(&[&self.spec.name, &spec.name, role]).to_string());
            if let Some(ip) = spec.gateway {
                add(ip.into(), role("gateway"), Some("gateway".into()), "gateway");
            }
            if let Some(ip) = spec.router {
                add(ip.into(), role("router"), None, "router");
            }
            let leases = net.gateway.as_ref().map(|g| g.leases()).unwrap_or_default().leases;
            for lease in &leases {
                add(lease.address, Some(Mac(lease.mac).to_string()), lease.name.clone(), "lease");
            }
            for (network, mac, ip, name) in self.spec.addresses() {
                if network == spec.name && !leases.iter().any(|lease| lease.address == ip) {
                    add(ip.into(), mac.map(|mac| mac.to_string()), Some(name.into()), "file");
                }
            }
            for (name, mac, ips) in six {
                for ip in ips.into_iter().filter(|ip| !leases.iter().any(|lease| lease.address == *ip)) {
                    add(ip.into(), mac.map(|mac| mac.to_string()), Some(name.clone()), "file");
                }
            }
            let learned = net.gateway.as_ref().map(|gateway| gateway.learned6()).unwrap_or_default();
            let named: BTreeMap<_, _> = leases.iter().filter_map(|l| Some((l.mac, l.name.as_ref()?))).collect();
            for &(address, mac) in learned.iter() {
                let of_file = net.gateway.as_ref().and_then(|gateway| gateway.name_of(mac));
                let name = of_file.or_else(|| named.get(&mac).map(ToString::to_string));
                add(address.into(), Some(Mac(mac).to_string()), name, "learned");
            }
        }
        macs.sort();
        neighbours.sort();
        let (homes, homes_revision) = homes(&self.spec.elsewhere.homes, known);
        Ok(Tables { schema: SCHEMA, macs, neighbours, homes, homes_revision })
    }
}

/// The homes for people, sorted, and their revision; `None` for those of the revision `known`.
fn homes(all: &[Home], known: Option<&str>) -> (Option<Vec<HomeReport>>, String) {
    // The same for the same list, also of another daemon of this version.
    let mut hasher = DefaultHasher::new();
    all.hash(&mut hasher);
    let revision = format!("{:016x}", hasher.finish());
    if known == Some(&*revision) {
        return (None, revision);
    }
    let report = |home: &Home| HomeReport {
        network: home.network.clone(),
        machine: home.machine.clone(),
        name: home.name.clone(),
        from: home.addresses.map(|(from, _)| from.into()),
        to: home.addresses.map(|(_, to)| to.into()),
        mac: home.mac.map(|mac| mac.to_string()),
    };
    let mut reports: Vec<_> = all.iter().map(report).collect();
    reports.sort();
    (Some(reports), revision)
}

#[cfg(test)]
#[test]
fn homes_that_a_client_has_are_not_sent_again() {
    let home = |n: u8| Home {
        network: "lan".into(),
        machine: format!("node-{n}"),
        name: None,
        addresses: None,
        mac: Some(Mac([2, 0, 0, 0, 0, n])),
    };
    let (all, first) = homes(&[home(2), home(1)], None);
    assert_eq!(all.unwrap().iter().map(|home| home.machine.as_str()).collect::<Vec<_>>(), ["node-1", "node-2"]);
    assert_eq!(homes(&[home(2), home(1)], Some(&first)), (None, first.clone()));
    let (other, second) = homes(&[home(2)], Some(&first));
    assert!(other.is_some_and(|all| all.len() == 1) && second != first);
    assert_eq!(homes(&[], None).0, Some(vec![]));
}
