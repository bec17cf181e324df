//! What a port may claim to be: the check of source addresses.
//!
//! A guard without lists lets everything pass. With a list of MAC addresses only these may be a
//! frame's source. With a list of IPv4 addresses, the sender fields of ARP and the source field of
//! IPv4 must be on it. This also holds behind any VLAN tags and an LLC/SNAP header. Where the
//! header is cut short nothing passes, since nothing could be checked. A host that has no address
//! yet may ask: ARP probes (sender 0.0.0.0) and DHCP requests pass. With a list of IPv6 addresses,
//! which may be empty, IPv6 is held to that list and to the link-local address of the frame's
//! Ethernet source. The same holds for neighbour discovery, and the port may not act as a router
//! (`ipv6`). A guard that learns has no such list: its port may claim addresses that no other port
//! has (`bindings`). Without either, IPv6 passes unchecked, as other protocols do, but new source
//! addresses are limited in their rate (`unguarded`).
//!
//! What no ordinary member does is refused to every port that has no role for it, with or without
//! lists ([`Roles`]).

mod bindings;
mod ipv6;
mod roles;
mod unguarded;

pub(crate) use bindings::{Bindings, shown_mac};
pub use bindings::{LIMIT, Learn, Reservations};
pub use ipv6::nd_options;
pub(crate) use ipv6::options_tell;
pub use roles::{Protected, Roles, link_local, solicited_node};
pub(crate) use roles::{lets_pass, refuse};

use crate::frame::{ETHERNET_HEADER_BYTES, Mac};
use crate::mac::Address;
use std::net::{Ipv4Addr, Ipv6Addr};

/// The guard of one port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Guard {
    sources: Vec<Address>,
    ipv4: Vec<[u8; 4]>,
    ipv6: Option<ipv6::List>,
    learn: Option<Learn>,
    pinned: bool,
    is_crowded: bool,
    roles: Roles,
}

pub(crate) const ETHERTYPE_IPV4: u16 = 0x0800;
pub(crate) const ETHERTYPE_ARP: u16 = 0x0806;
pub(crate) const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_QINQ: u16 = 0x88a8;
/// Stacked tags of equipment from before IEEE 802.1ad.
const ETHERTYPE_OLD_QINQ: u16 = 0x9100;

impl Guard {
    /// A guard that lets only `sources` pass, or any source where the list is empty, and only
    /// `ipv4` as sender addresses, or any where that list is empty.
    pub fn new(sources: &[Mac], ipv4: &[Ipv4Addr]) -> Guard {
        let mut sources: Vec<_> = sources.iter().copied().map(Address::from).collect();
        sources.sort_unstable();
        sources.dedup();
        let mut ipv4: Vec<_> = ipv4.iter().map(Ipv4Addr::octets).collect();
        ipv4.sort_unstable();
        ipv4.dedup();
        Guard { sources, ipv4, ipv6: None, learn: None, pinned: false, is_crowded: false, roles: Roles::default() }
    }

    /// The same guard, which lets only these addresses and prefixes (with their bits that count)
    /// pass as IPv6 senders, and the link-local address of the frame's Ethernet source.
    #[must_use]
    pub fn with_ipv6(mut self, entries: &[(Ipv6Addr, u8)]) -> Guard {
        self.ipv6 = Some(ipv6::List::new(entries));
        self
    }

    /// The same guard, which learns the IPv6 addresses of its port, in place of a list.
    #[must_use]
    pub fn learning(mut self, learn: Learn) -> Guard {
        self.learn = Some(learn);
        self
    }

    /// What its port may claim in IPv6; `None` where nothing is learned.
    pub fn learns(&self) -> Option<Learn> {
        self.learn
    }

    /// The same guard, with its source addresses locked to the port: no other port of the network
    /// can take them over, frames from elsewhere that claim them are dropped.
    #[must_use]
    pub fn pinned(mut self) -> Guard {
        self.pinned = true;
        self
    }

    /// The same guard, for a port behind which is a whole network: it may bring any number of new
    /// IPv6 addresses, where it has neither a list of them nor learns them.
    #[must_use]
    pub fn crowded(mut self) -> Guard {
        self.is_crowded = true;
        self
    }

    /// The same guard, for a port that may do these things besides.
    #[must_use]
    pub fn with_roles(mut self, roles: Roles) -> Guard {
        self.roles = roles;
        self
    }

    /// What the port may do beyond sending its own traffic.
    pub fn roles(&self) -> Roles {
        self.roles
    }

    /// Whether the source addresses are locked to the port.
    pub fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// The source addresses that may pass; empty where any may.
    pub fn sources(&self) -> &[Address] {
        &self.sources
    }

    /// The IPv4 addresses that may pass; empty where any may.
    pub fn ipv4(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.ipv4.iter().copied().map(Ipv4Addr::from)
    }

    /// The IPv6 addresses and prefixes that may pass; `None` where any may.
    pub fn ipv6(&self) -> Option<impl Iterator<Item = (Ipv6Addr, u8)>> {
        self.ipv6.as_ref().map(ipv6::List::entries)
    }

    /// Whether frames have to be looked into.
    #[inline]
    pub(crate) fn checks_senders(&self) -> bool {
        !self.ipv4.is_empty() || self.ipv6.is_some()
    }

    #[inline]
    pub(crate) fn lets_source_pass(&self, source: Address) -> bool {
        self.sources.is_empty() || self.sources.binary_search(&source).is_ok()
    }

    /// Whether the frame that starts with `head` (its first 128 bytes, or all) passes the lists of
    /// IPv4 and IPv6.
    pub(crate) fn lets_sender_pass(&self, head: &[u8]) -> bool {
        match network_layer(head) {
            Some((ETHERTYPE_IPV4, at)) => self.lets_packet_pass(&head[at..]),
            Some((ETHERTYPE_ARP, at)) => self.lets_arp_pass(&head[at..], &head[6..12]),
            Some((ETHERTYPE_IPV6, at)) => self.lets_ipv6_pass(&head[at..], &head[6..12]),
            Some(_) => true,
            None => false,
        }
    }

    fn lets_ipv6_pass(&self, packet: &[u8], ethernet_source: &[u8]) -> bool {
        let Ok(mac) = Mac::try_from(ethernet_source) else { return false };
        self.ipv6.as_ref().is_none_or(|list| list.lets_packet_pass(packet, &mac, self.roles.router))
    }

    fn lets_packet_pass(&self, packet: &[u8]) -> bool {
        if self.ipv4.is_empty() {
            return true;
        }
        let Some(Ok(source)) = packet.get(12..16).map(<[u8; 4]>::try_from) else { return false };
        if source == [0; 4] {
            // Only a DHCP client's request (RFC 2131 §4.1): UDP from 68 to 67, header without
            // options.
            return packet[0] == 0x45 && packet[9] == 17 && packet.get(20..24) == Some(&[0, 68, 0, 67]);
        }
        packet[0] >> 4 == 4 && self.ipv4.binary_search(&source).is_ok()
    }

    fn lets_arp_pass(&self, arp: &[u8], ethernet_source: &[u8]) -> bool {
        if self.ipv4.is_empty() {
            return true;
        }
        // RFC 826: hardware and protocol type and lengths, operation, sender's hardware and
        // protocol address.
        let Some(fields) = arp.get(..28) else { return false };
        if fields[..6] != [0, 1, 8, 0, 6, 4] || &fields[8..14] != ethernet_source {
            return false;
        }
        let sender = [fields[14], fields[15], fields[16], fields[17]];
        sender == [0; 4] || self.ipv4.binary_search(&sender).is_ok()
    }
}

/// The type of what a frame carries, and where that begins: behind all VLAN tags, and behind an
/// LLC/SNAP header (RFC 1042 and IEEE 802.1H). `None` where the frame, or what is seen of it, ends
/// before that.
#[inline]
pub(crate) fn network_layer(head: &[u8]) -> Option<(u16, usize)> {
    let mut at = ETHERNET_HEADER_BYTES - 2;
    loop {
        let field = head.get(at..at + 2)?;
        at += 2;
        match u16::from_be_bytes([field[0], field[1]]) {
            ETHERTYPE_VLAN | ETHERTYPE_QINQ | ETHERTYPE_OLD_QINQ => at += 2,
            // A length (IEEE 802.3 §3.2.6), so LLC follows.
            0..0x600 if matches!(head.get(at..at + 6), Some([0xaa, 0xaa, 3, 0, 0, 0 | 0xf8])) => at += 6,
            kind => return Some((kind, at)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = [2, 0, 0, 0, 0, 7];

    fn frame(tags: usize, ethertype: u16, payload: &[u8]) -> Vec<u8> {
        let mut f = vec![0xff; 6];
        f.extend_from_slice(&MAC);
        for _ in 0..tags {
            f.extend_from_slice(&[0x81, 0, 0, 5]);
        }
        f.extend_from_slice(&ethertype.to_be_bytes());
        f.extend_from_slice(payload);
        f
    }

    fn arp(hardware: Mac, ip: [u8; 4]) -> Vec<u8> {
        [&[0, 1, 8, 0, 6, 4, 0, 1][..], &hardware, &ip, &[0; 6], &[10, 0, 0, 1]].concat()
    }

    fn packet(source: [u8; 4], protocol: u8, ports: [u8; 4]) -> Vec<u8> {
        let mut p = vec![0; 28];
        p[0] = 0x45;
        p[9] = protocol;
        p[12..16].copy_from_slice(&source);
        p[20..24].copy_from_slice(&ports);
        p
    }

    #[test]
    fn only_listed_senders_pass_whatever_their_tags() {
        let guard = Guard::new(&[MAC], &[Ipv4Addr::new(10, 0, 0, 2)]);
        let mine = [10, 0, 0, 2];
        let other = [10, 0, 0, 3];
        let dhcp = [0, 68, 0, 67];
        for tags in 0..=2 {
            let cases = [
                (0x0800, packet(mine, 6, [0; 4]), true),
                (0x0800, packet(other, 6, [0; 4]), false),
                (0x0800, packet([0; 4], 17, dhcp), true),
                (0x0800, packet([0; 4], 6, dhcp), false),
                (0x0800, packet([0; 4], 17, [0, 68, 0, 53]), false),
                (0x0800, packet(mine, 6, [0; 4])[..15].to_vec(), false),
                (0x0806, arp(MAC, mine), true),
                (0x0806, arp(MAC, [0; 4]), true),
                (0x0806, arp(MAC, other), false),
                (0x0806, arp([2, 0, 0, 0, 0, 8], mine), false),
                (0x0806, arp(MAC, mine)[..27].to_vec(), false),
                (0x86dd, vec![0x60; 40], true),
            ];
            for (ethertype, payload, passes) in cases {
                let f = frame(tags, ethertype, &payload);
                assert_eq!(guard.lets_sender_pass(&f), passes, "tags {tags} type {ethertype:#x} {payload:?}");
            }
        }
        assert!(guard.lets_sender_pass(&frame(5, 0x0800, &packet(mine, 6, [0; 4]))));
        assert!(!guard.lets_sender_pass(&frame(5, 0x0800, &packet(other, 6, [0; 4]))), "tags hide nothing");
        let snap = [&[0xaa, 0xaa, 3, 0, 0, 0, 8, 0][..], &packet(other, 6, [0; 4])].concat();
        assert!(!guard.lets_sender_pass(&frame(0, snap.len() as u16, &snap)), "nor does SNAP");
        assert!(!guard.lets_sender_pass(&frame(1, 0x0800, &[])[..15]), "cut inside the tag");
    }

    #[test]
    fn a_list_of_one_family_leaves_the_other_alone() {
        let four = packet([10, 0, 0, 3], 6, [0; 4]);
        let mut six = vec![0x60, 0, 0, 0, 0, 20, 6, 64];
        six.extend_from_slice(&[0xfd; 32]);
        six.extend_from_slice(&[0; 20]);
        let only_six = Guard::new(&[MAC], &[]).with_ipv6(&[]);
        for tags in 0..=2 {
            let frames = [(0x0800, &four[..]), (0x0806, &arp([2, 0, 0, 0, 0, 8], [9; 4])), (0x86dd, &six)];
            let passed = frames.map(|(kind, payload)| only_six.lets_sender_pass(&frame(tags, kind, payload)));
            assert_eq!(passed, [true, true, false], "{tags} tags");
            let listed = Guard::new(&[MAC], &[]).with_ipv6(&[([0xfd; 16].into(), 128)]);
            assert!(listed.lets_sender_pass(&frame(tags, 0x86dd, &six)));
        }
        assert!(only_six.checks_senders() && !Guard::new(&[MAC], &[]).checks_senders());
    }

    #[test]
    fn sources_are_checked_only_where_there_is_a_list() {
        let other = Address::from([2, 0, 0, 0, 0, 8]);
        assert!(Guard::default().lets_source_pass(other));
        assert!(!Guard::new(&[MAC], &[]).lets_source_pass(other));
        assert!(Guard::new(&[MAC], &[]).lets_source_pass(MAC.into()));
    }
}
