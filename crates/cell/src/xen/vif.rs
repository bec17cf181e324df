//! A network device in XenStore: where it is, what its backend offers, what the frontend writes (public/io/netif.h).

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
/// The tokens of the two watches: for devices to come, for the backend of the one that is there.
const DEVICES_TOKEN: &str = "vif";
const BACKEND_TOKEN: &str = "backend";

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
}

const FEATURES: [&str; 6] = [
    "feature-sg",
    "feature-gso-tcpv4",
    "feature-gso-tcpv6",
    "feature-no-csum-offload",
    "feature-ipv6-csum-offload",
    "feature-split-event-channels",
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
        for name in [
            "request-rx-copy",
            "feature-rx-notify",
            "feature-sg",
            "feature-gso-tcpv4",
            "feature-gso-tcpv6",
            "feature-ipv6-csum-offload",
        ] {
            nodes.push((name, "1".to_string()));
        }
        nodes
    }
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
    /// Asks to be told of devices to come.
    pub(super) fn watch_devices(domain: &Domain) {
        domain.ask(&[Request::Watch(DEVICES, DEVICES_TOKEN)]);
    }

    /// Whether something happened to the devices, or to a backend, since this was asked last.
    pub(super) fn has_news(domain: &Domain) -> bool {
        domain.take_watch(DEVICES_TOKEN) | domain.take_watch(BACKEND_TOKEN)
    }

    /// The first device that there is, and is whole; from then on its backend is watched instead of the devices.
    pub(super) fn find(domain: &Domain) -> Option<Vif> {
        let list = domain.ask(&[Request::Directory(DEVICES)]).pop()?.ok()?;
        let vif = names(&list).find_map(|name| Vif::read(domain, name))?;
        domain.ask(&[
            Request::Unwatch(DEVICES, DEVICES_TOKEN),
            Request::Watch(&format!("{}/state", vif.backend), BACKEND_TOKEN),
        ]);
        Some(vif)
    }

    fn read(domain: &Domain, name: &str) -> Option<Vif> {
        let path = format!("{DEVICES}/{name}");
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

    /// What the backend's state is; `None` where the device is no longer this domain's.
    pub(super) fn look(&self, domain: &Domain) -> Option<BusState> {
        let (own, state) = (format!("{}/backend", self.path), format!("{}/state", self.backend));
        let replies = domain.ask(&[Request::Read(&own), Request::Read(&state)]);
        let [Ok(backend), state] = replies.as_slice() else { return None };
        let is_same = backend.strip_suffix(&[0]).unwrap_or(backend) == self.backend.as_bytes();
        is_same.then(|| state.as_ref().map_or(BusState::Unknown, |state| BusState::parse(state)))
    }

    /// What the backend offers.
    pub(super) fn features(&self, domain: &Domain) -> Features {
        let nodes = FEATURES.map(|name| format!("{}/{name}", self.backend));
        let requests: Vec<_> = nodes.iter().map(|node| Request::Read(node)).collect();
        let values: Vec<_> = domain.ask(&requests).into_iter().map(|reply| number(&reply.ok()?)).collect();
        Features::parse(&values)
    }

    /// Writes what the backend needs; the state is written after it.
    pub(super) fn publish(&self, domain: &Domain, rings: &Rings) -> bool {
        let nodes: Vec<_> =
            rings.nodes().into_iter().map(|(name, value)| (format!("{}/{name}", self.path), value)).collect();
        let requests: Vec<_> = nodes.iter().map(|(node, value)| Request::Write(node, value.as_bytes())).collect();
        domain.ask(&requests).iter().all(Result::is_ok)
    }

    /// Writes this end's state.
    pub(super) fn set_state(&self, domain: &Domain, state: BusState) {
        domain.ask(&[Request::Write(&format!("{}/state", self.path), state.text().as_bytes())]);
    }

    /// The device is not this domain's any more: watches the devices again.
    pub(super) fn forget(self, domain: &Domain) {
        domain.ask(&[
            Request::Unwatch(&format!("{}/state", self.backend), BACKEND_TOKEN),
            Request::Watch(DEVICES, DEVICES_TOKEN),
        ]);
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
        let all = Features::parse(&[Some(1), Some(1), Some(1), None, Some(1), Some(1)]);
        let every = Features {
            scatter_gather: true,
            tcpv4: true,
            tcpv6: true,
            checksum: true,
            checksum6: true,
            split_channels: true,
        };
        assert_eq!(all, every);
        assert_eq!(Features::parse(&[None; 6]), Features { checksum: true, ..Features::default() });
        assert_eq!(Features::parse(&[]), Features { checksum: true, ..Features::default() });
        // Segmentation without several slots, or without the sums that it needs, is none.
        let odd = Features::parse(&[Some(0), Some(1), Some(1), Some(1), Some(0), None]);
        assert_eq!(odd, Features::default());
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
        assert!(one.contains(&("tx-ring-ref", "8".to_string())) && one.contains(&("request-rx-copy", "1".to_string())));
    }
}
