//! Which members this machine has, from the tables of its daemon.
//!
//! A member is here if its MAC address is behind a port that is up and is no tunnel. One that is
//! not, and has a lease here, is announced too, so that no other machine gives its address away: it
//! may be silent, or have moved. What is behind a tunnel is announced by the machine that has it.
//! Members in VLANs are not announced: the tunnel carries one network. Neither are IPv6
//! addresses that members gave themselves: they are neither leased nor fixed, so where machines
//! disagree, none could take one from its member.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use tombolo_span::member::is_name;
use tombolo_span::{Address, Home, Local, Mac, Member};

use crate::daemon::{Port, Tables};

/// The kind of port that leads to other machines.
const TUNNEL: &str = "vxlan";

/// What this machine has in one network.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Here {
    /// Where it receives the network's tunnel.
    pub end: Option<IpAddr>,
    /// Its members.
    pub members: Vec<Local>,
    /// What belongs to which machine in it.
    pub homes: Vec<Home>,
}

/// Reads "52:54:00:12:34:56".
pub fn mac_of(text: &str) -> Option<Mac> {
    let mut mac = Mac::default();
    let mut pieces = text.split(':');
    for byte in &mut mac {
        let piece = pieces.next().filter(|piece| piece.len() == 2)?;
        *byte = u8::from_str_radix(piece, 16).ok()?;
    }
    pieces.next().is_none().then_some(mac)
}

/// What this machine has in each network that has a tunnel.
pub fn here(tables: &Tables, ports: &[Port]) -> BTreeMap<String, Here> {
    let mut all: BTreeMap<String, Here> = BTreeMap::new();
    for port in ports.iter().filter(|port| port.kind == TUNNEL) {
        // "192.0.2.1:4789", or "[fd00::1]:4789".
        let end = port.details.get("local").and_then(|local| local.as_str()?.parse::<std::net::SocketAddr>().ok());
        all.entry(port.network.clone()).or_default().end = end.map(|end| end.ip());
    }
    for (network, here) in &mut all {
        let port = |name: &str| ports.iter().find(|port| port.network == *network && port.name == name);
        let mut found: BTreeMap<Mac, Local> = BTreeMap::new();
        for entry in tables.macs.iter().filter(|entry| entry.network == *network) {
            let Some(mac) = mac_of(&entry.mac) else { continue };
            let is_here = port(&entry.port).is_some_and(|port| port.up && port.kind != TUNNEL);
            if !is_here || entry.vlan.is_some_and(|vlan| vlan != 0) {
                continue;
            }
            let member = Member { mac, name: None, addresses: Vec::new() };
            // Pinned to a port that is up: it is there, whatever it sends.
            let silent_for = Some(Duration::from_millis(entry.age_ms.unwrap_or(0)));
            found.insert(mac, Local { member, placed: true, silent_for });
        }
        for neighbour in tables.neighbours.iter().filter(|neighbour| neighbour.network == *network) {
            let Some(mac) = neighbour.mac.as_deref().and_then(mac_of).filter(|_| neighbour.source != "learned") else {
                continue;
            };
            let is_lease = neighbour.source == "lease";
            if is_lease {
                let member = Member { mac, name: None, addresses: Vec::new() };
                found.entry(mac).or_insert(Local { member, placed: false, silent_for: None });
            }
            let Some(local) = found.get_mut(&mac) else { continue };
            local.member.addresses.push(Address { ip: neighbour.ip, fixed: neighbour.fixed || !is_lease });
            // Each machine has a gateway of its own under that name.
            if is_lease || neighbour.source == "file" {
                let name = neighbour.name.as_ref().map(|name| name.to_ascii_lowercase());
                local.member.name = local.member.name.take().or(name.filter(|name| is_name(name)));
            }
        }
        for local in found.values_mut() {
            local.member.addresses.sort();
            local.member.addresses.dedup_by_key(|address| address.ip);
        }
        here.members = found.into_values().collect();
        let homes = tables.homes.iter().filter(|home| home.network == *network);
        here.homes = homes
            .map(|home| Home {
                machine: home.machine.clone(),
                name: home.name.as_ref().map(|name| name.to_ascii_lowercase()),
                addresses: home.from.zip(home.to),
                mac: home.mac.as_deref().and_then(mac_of),
            })
            .collect();
    }
    all
}

#[cfg(test)]
mod tests {
    use tombolo_span::member::mac_text;

    use super::*;
    use crate::daemon::KnownHomes;

    fn tables() -> Tables {
        let mut tables: Tables = serde_json::from_value(serde_json::json!({
            "schema": 1,
            "macs": [
                { "network": "lan", "mac": "02:00:00:00:00:01", "port": "web", "age_ms": 1500, "vlan": null },
                { "network": "lan", "mac": "02:00:00:00:00:02", "port": "span", "age_ms": 10, "vlan": null },
                { "network": "lan", "mac": "02:00:00:00:00:03", "port": "off", "age_ms": null, "vlan": null },
                { "network": "lan", "mac": "02:00:00:00:00:04", "port": "web", "age_ms": 10, "vlan": 7 },
                { "network": "lan", "mac": "02:00:00:00:00:05", "port": "lan.gateway", "age_ms": null, "vlan": null },
                { "network": "other", "mac": "02:00:00:00:00:06", "port": "x", "age_ms": 1, "vlan": null },
            ],
            "neighbours": [
                { "network": "lan", "ip": "10.87.0.1", "mac": "02:00:00:00:00:05", "port": null, "name": "gateway", "source": "gateway" },
                { "network": "lan", "ip": "10.87.0.9", "mac": "02:00:00:00:00:01", "port": "web", "name": "Web", "source": "lease", "fixed": true },
                { "network": "lan", "ip": "10.87.0.8", "mac": "02:00:00:00:00:01", "port": "web", "name": "web", "source": "file" },
                { "network": "lan", "ip": "fd00::8", "mac": "02:00:00:00:00:01", "port": "web", "name": "web", "source": "learned" },
                { "network": "lan", "ip": "10.87.0.7", "mac": "02:00:00:00:00:07", "port": null, "name": null, "source": "lease" },
                { "network": "lan", "ip": "10.87.0.6", "mac": "02:00:00:00:00:08", "port": null, "name": "vm", "source": "file" },
                { "network": "lan", "ip": "10.87.0.5", "mac": "02:00:00:00:00:02", "port": "span", "name": "moved", "source": "lease" },
            ],
            "homes": [
                { "network": "lan", "machine": "node-1", "name": null, "from": "10.87.0.5", "to": "10.87.0.9" },
                { "network": "lan", "machine": "node-2", "name": "Db", "from": null, "to": null },
                { "network": "lan", "machine": "node-2", "name": null, "from": null, "to": null, "mac": "02:00:00:00:00:0a" },
                { "network": "other", "machine": "node-2", "name": "x", "from": null, "to": null },
            ],
        }))
        .unwrap();
        KnownHomes::default().settle(&mut tables);
        tables
    }

    fn ports() -> Vec<Port> {
        let port = |name: &str, kind: &str, up: bool| Port {
            name: name.into(),
            network: "lan".into(),
            kind: kind.into(),
            up,
            details: BTreeMap::from([("local".into(), "192.0.2.1:4789".into())]),
        };
        vec![
            port("web", "tap", true),
            port("span", "vxlan", true),
            port("off", "vhost-user", false),
            port("lan.gateway", "gateway", true),
        ]
    }

    #[test]
    fn members_are_those_behind_ports_that_are_up_and_leases_are_kept_for_others() {
        let here = here(&tables(), &ports());
        assert_eq!(here.keys().collect::<Vec<_>>(), ["lan"], "a network without a tunnel stays here");
        let lan = &here["lan"];
        assert_eq!(lan.end, Some([192, 0, 2, 1].into()));
        let address = |last: u8, fixed| Address { ip: [10, 87, 0, last].into(), fixed };
        let member = |last: u8, name: Option<&str>, addresses: &[Address]| Member {
            mac: [2, 0, 0, 0, 0, last],
            name: name.map(Into::into),
            addresses: addresses.to_vec(),
        };
        let ms = |ms| Some(Duration::from_millis(ms));
        let expected = [
            (member(1, Some("web"), &[address(8, true), address(9, true)]), true, ms(1500)),
            (member(2, Some("moved"), &[address(5, false)]), false, None),
            (member(5, None, &[address(1, true)]), true, ms(0)),
            (member(7, None, &[address(7, false)]), false, None),
        ];
        let found: Vec<_> =
            lan.members.iter().map(|local| (local.member.clone(), local.placed, local.silent_for)).collect();
        assert_eq!(found, expected);
        let home = |machine: &str, name: Option<&str>, addresses| Home {
            machine: machine.into(),
            name: name.map(Into::into),
            addresses,
            mac: None,
        };
        let of_mac = Home { mac: Some([2, 0, 0, 0, 0, 10]), ..home("node-2", None, None) };
        let part = Some(([10, 87, 0, 5].into(), [10, 87, 0, 9].into()));
        assert_eq!(lan.homes, [home("node-1", None, part), home("node-2", Some("db"), None), of_mac]);
    }

    #[test]
    fn a_mac_address_is_six_bytes_in_hexadecimal() {
        assert_eq!(mac_of("52:54:00:12:34:ff"), Some([0x52, 0x54, 0, 0x12, 0x34, 0xff]));
        for no in ["", "52:54:00:12:34", "52:54:00:12:34:56:78", "52:54:00:12:34:5", "52:54:00:12:34:xx"] {
            assert_eq!(mac_of(no), None, "{no}");
        }
        assert_eq!(mac_text([0x52, 0x54, 0, 0x12, 0x34, 0xff]), "52:54:00:12:34:ff");
    }
}
