//! A network device in XenStore: where it is, what its backend offers, what the frontend writes
//! (public/io/netif.h).
//!
//! With one queue the nodes of its rings are the device's own; with several each queue has a folder
//! `queue-N` for them.

use super::Domain;
use crate::println;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use smoltcp::wire::EthernetAddress;
use tombolo_ring::xen::bus::BusState;
use tombolo_ring::xen::store::{Request, names, number};

/// Where a domain's network devices are.
const DEVICES: &str = "device/vif";
/// The token of the watch for devices to come.
const DEVICES_TOKEN: &str = "vif";

/// What the backend offers, as its nodes say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Features {
    /// Packets of several slots.
    pub(super) scatter_gather: bool,
    pub(super) tcpv4: bool,
    pub(super) tcpv6: bool,
    /// TCP and UDP over IPv4 without their sums.
    pub(super) checksum: bool,
    pub(super) checksum6: bool,
    /// An event channel for each ring.
    pub(super) split_channels: bool,
    /// Only the multicast addresses that the frontend asks for.
    pub(super) multicast_control: bool,
    pub(super) max_queues: u32,
}

const FEATURES: [&str; 8] = [
    "feature-sg",
    "feature-gso-tcpv4",
    "feature-gso-tcpv6",
    "feature-no-csum-offload",
    "feature-ipv6-csum-offload",
    "feature-split-event-channels",
    "feature-multicast-control",
    "multi-queue-max-queues",
];

impl Features {
    /// From the nodes' values in the order of [`FEATURES`]; one that is not there is `None`.
    fn parse(values: &[Option<u32>]) -> Features {
        let is_set = |at: usize| values.get(at).copied().flatten().is_some_and(|value| value != 0);
        let scatter_gather = is_set(0);
        Features {
            scatter_gather,
            // What is to be cut takes more than one slot.
            tcpv4: is_set(1) && scatter_gather,
            tcpv6: is_set(2) && scatter_gather && is_set(4),
            checksum: !is_set(3),
            checksum6: is_set(4),
            split_channels: is_set(5),
            multicast_control: is_set(6),
            max_queues: values.get(7).copied().flatten().unwrap_or(1).max(1),
        }
    }
}

/// What the backend needs to reach the frontend's rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rings {
    pub(super) transmit: u32,
    pub(super) receive: u32,
    /// The event channels: of the transmit and the receive ring; equal where there is one for both.
    pub(super) channels: (u32, u32),
}

impl Rings {
    /// The nodes to write and their values.
    fn nodes(&self) -> Vec<(&'static str, String)> {
        let mut nodes =
            Vec::from([("tx-ring-ref", self.transmit.to_string()), ("rx-ring-ref", self.receive.to_string())]);
        if self.channels.0 == self.channels.1 {
            nodes.push(("event-channel", self.channels.0.to_string()));
        } else {
            nodes.push(("event-channel-tx", self.channels.0.to_string()));
            nodes.push(("event-channel-rx", self.channels.1.to_string()));
        }
        nodes
    }
}

/// The nodes to write and their values, for rings of one queue or several.
fn nodes(rings: &[Rings], features: Features) -> Vec<(String, String)> {
    // Also for one queue: the last backend may have been told of more.
    let mut nodes = Vec::from([("multi-queue-num-queues".to_string(), rings.len().to_string())]);
    match rings {
        // Not below queue-0: a backend that knows one queue looks here.
        [one] => nodes.extend(one.nodes().into_iter().map(|(name, value)| (name.to_string(), value))),
        _ => {
            for (queue, rings) in rings.iter().enumerate() {
                nodes.extend(rings.nodes().into_iter().map(|(name, value)| (format!("queue-{queue}/{name}"), value)));
            }
        }
    }
    for name in [
        "request-rx-copy",
        "feature-rx-notify",
        "feature-sg",
        "feature-gso-tcpv4",
        "feature-gso-tcpv6",
        "feature-ipv6-csum-offload",
    ] {
        nodes.push((name.to_string(), "1".to_string()));
    }
    nodes.push(("request-multicast-control".to_string(), u32::from(features.multicast_control).to_string()));
    nodes
}

/// Six bytes in hexadecimal with colons between them.
fn parse_mac(text: &[u8]) -> Option<EthernetAddress> {
    let text = core::str::from_utf8(text).ok()?.trim_end_matches('\0');
    let mut octets = [0; 6];
    let mut parts = text.split(':');
    for octet in &mut octets {
        *octet = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    // The lowest bit of the first byte: IEEE 802-2014 §8.2.2.
    (parts.next().is_none() && octets[0] & 1 == 0).then_some(EthernetAddress(octets))
}

/// A network device of this domain.
#[derive(Clone, Debug)]
pub(super) struct Vif {
    path: String,
    backend: String,
    pub(super) backend_domain: u16,
    pub(super) mac: EthernetAddress,
    pub(super) mtu: Option<u32>,
}

impl Vif {
    /// Asks to be told of devices to come, or not any more.
    pub(super) fn watch_devices(domain: &Domain, is_wanted: bool) {
        let watch =
            if is_wanted { Request::Watch(DEVICES, DEVICES_TOKEN) } else { Request::Unwatch(DEVICES, DEVICES_TOKEN) };
        domain.ask(&[watch]);
    }

    /// Whether something happened to the devices since this was asked last.
    pub(super) fn have_changed(domain: &Domain) -> bool {
        domain.take_watch(DEVICES_TOKEN)
    }

    /// The device with the lowest number that is `wanted` and is whole; from then on its backend is
    /// watched, with this token.
    pub(super) fn find(domain: &Domain, token: &str, wanted: impl Fn(u32) -> bool) -> Option<Vif> {
        let list = domain.ask(&[Request::Directory(DEVICES)]).pop()?.ok()?;
        let mut numbers: Vec<u32> = names(&list).filter_map(|name| name.parse().ok()).filter(|n| wanted(*n)).collect();
        numbers.sort_unstable();
        let vif = numbers.into_iter().find_map(|number| Vif::read(domain, number))?;
        domain.ask(&[Request::Watch(&format!("{}/state", vif.backend), token)]);
        Some(vif)
    }

    fn read(domain: &Domain, number_of_device: u32) -> Option<Vif> {
        let path = format!("{DEVICES}/{number_of_device}");
        let nodes = ["backend", "backend-id", "mac", "mtu"].map(|node| format!("{path}/{node}"));
        let replies = domain.ask(&[0, 1, 2, 3].map(|node: usize| Request::Read(&nodes[node])));
        let [Ok(backend), Ok(backend_id), Ok(mac), mtu] = replies.as_slice() else { return None };
        let backend = core::str::from_utf8(backend).ok()?.trim_end_matches('\0').to_string();
        let backend_domain = u16::try_from(number(backend_id)?).ok()?;
        let mtu = mtu.as_ref().ok().and_then(|mtu| number(mtu));
        let Some(mac) = parse_mac(mac) else {
            println!("tombolo-cell: {path} in XenStore has no address that a card can have");
            return None;
        };
        (!backend.is_empty()).then_some(Vif { path, backend, backend_domain, mac, mtu })
    }

    /// What the backend's state is, and whether the toolstack wants the device; `None` where it is
    /// no longer this domain's.
    pub(super) fn look(&self, domain: &Domain) -> Option<(BusState, bool)> {
        let (own, state) = (format!("{}/backend", self.path), format!("{}/state", self.backend));
        let online = format!("{}/online", self.backend);
        let replies = domain.ask(&[Request::Read(&own), Request::Read(&state), Request::Read(&online)]);
        let [Ok(backend), state, online] = replies.as_slice() else { return None };
        let is_same = backend.strip_suffix(&[0]).unwrap_or(backend) == self.backend.as_bytes();
        let is_wanted = online.as_ref().is_ok_and(|online| number(online) == Some(1));
        is_same.then(|| (state.as_ref().map_or(BusState::Unknown, |state| BusState::parse(state)), is_wanted))
    }

    /// What the backend offers.
    pub(super) fn features(&self, domain: &Domain) -> Features {
        let nodes = FEATURES.map(|name| format!("{}/{name}", self.backend));
        let requests: Vec<_> = nodes.iter().map(|node| Request::Read(node)).collect();
        let values: Vec<_> = domain.ask(&requests).into_iter().map(|reply| number(&reply.ok()?)).collect();
        Features::parse(&values)
    }

    /// Writes what the backend needs; the state is written after it.
    pub(super) fn publish(&self, domain: &Domain, rings: &[Rings], features: Features) -> bool {
        let nodes = nodes(rings, features).into_iter();
        let nodes: Vec<_> = nodes.map(|(name, value)| (format!("{}/{name}", self.path), value)).collect();
        let requests: Vec<_> = nodes.iter().map(|(node, value)| Request::Write(node, value.as_bytes())).collect();
        domain.ask(&requests).iter().all(Result::is_ok)
    }

    /// Writes this end's state.
    pub(super) fn set_state(&self, domain: &Domain, state: BusState) {
        domain.ask(&[Request::Write(&format!("{}/state", self.path), state.text().as_bytes())]);
    }

    /// The device is not this domain's any more.
    pub(super) fn forget(self, domain: &Domain, token: &str) {
        domain.ask(&[Request::Unwatch(&format!("{}/state", self.backend), token)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_six_bytes_of_one_card() {
        assert_eq!(parse_mac(b"00:16:3e:0a:FF:02"), Some(EthernetAddress([0, 0x16, 0x3e, 0x0a, 0xff, 2])));
        assert_eq!(parse_mac(b"00:16:3e:0a:ff:02\0"), parse_mac(b"00:16:3e:0a:FF:02"));
        for wrong in
            ["", "00:16:3e:0a:ff", "00:16:3e:0a:ff:02:03", "00:16:3e:0a:ff:100", "01:16:3e:0a:ff:02", "00-16-3e"]
        {
            assert_eq!(parse_mac(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn features_of_linux_netback_and_of_a_backend_that_says_nothing() {
        let all = Features::parse(&[Some(1), Some(1), Some(1), None, Some(1), Some(1), Some(1), Some(4)]);
        let every = Features {
            scatter_gather: true,
            tcpv4: true,
            tcpv6: true,
            checksum: true,
            checksum6: true,
            split_channels: true,
            multicast_control: true,
            max_queues: 4,
        };
        assert_eq!(all, every);
        assert_eq!(Features::parse(&[None; 8]), Features { checksum: true, max_queues: 1, ..Features::default() });
        assert_eq!(Features::parse(&[]), Features { checksum: true, max_queues: 1, ..Features::default() });
        // Segmentation without several slots, or without the sums that it needs, is none.
        let odd = Features::parse(&[Some(0), Some(1), Some(1), Some(1), Some(0), None, None, Some(0)]);
        assert_eq!(odd, Features { max_queues: 1, ..Features::default() });
    }

    #[test]
    fn one_channel_or_two() {
        let two = Rings { transmit: 8, receive: 9, channels: (3, 4) }.nodes();
        assert!(
            two.contains(&("event-channel-tx", "3".to_string()))
                && two.contains(&("event-channel-rx", "4".to_string()))
        );
        assert!(two.iter().all(|(name, _)| *name != "event-channel"));
        let one = Rings { transmit: 8, receive: 9, channels: (3, 3) }.nodes();
        assert!(one.contains(&("event-channel", "3".to_string())) && one.len() + 1 == two.len());
        assert!(one.contains(&("tx-ring-ref", "8".to_string())));
    }

    #[test]
    fn one_queue_keeps_the_flat_nodes_and_several_have_folders() {
        let rings = |n: u32| Rings { transmit: n, receive: n + 1, channels: (n, n) };
        let has = |nodes: &[(String, String)], name: &str, value: &str| {
            nodes.iter().any(|(had, is)| had == name && is == value)
        };
        let one = nodes(&[rings(8)], Features { multicast_control: true, ..Features::default() });
        assert!(has(&one, "tx-ring-ref", "8") && has(&one, "request-multicast-control", "1"));
        assert!(has(&one, "multi-queue-num-queues", "1") && one.iter().all(|(name, _)| !name.starts_with("queue-")));
        let two = nodes(&[rings(8), rings(12)], Features::default());
        assert!(has(&two, "multi-queue-num-queues", "2") && has(&two, "request-multicast-control", "0"));
        assert!(has(&two, "queue-0/rx-ring-ref", "9") && has(&two, "queue-1/event-channel", "12"));
        assert!(two.iter().all(|(name, _)| name != "tx-ring-ref") && has(&two, "request-rx-copy", "1"));
    }
}
