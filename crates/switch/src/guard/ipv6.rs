//! What a guarded port may claim to be in IPv6: source fields, and what neighbour discovery tells
//! of link-layer addresses.
//!
//! An address is the port's own if it is on the list, or is the link-local address that the frame's
//! Ethernet source gives (modified EUI-64, RFC 4291 appendix A). Then
//!
//! | frame | passes if |
//! | --- | --- |
//! | any packet | its source is an own address |
//! | source `::` | router solicitation, solicitation of an own address (RFC 4862 §5.4.2), or report of multicast groups (RFC 3590) |
//! | neighbour or router solicitation | besides, the source link-layer option is the Ethernet source |
//! | neighbour advertisement | besides, its target is an own address, and the target link-layer option is the Ethernet source |
//! | router advertisement, redirect | its port has the role of a router ([`super::Roles`]) |
//!
//! Neighbour discovery behind extension headers is found. It does not pass in fragments, which
//! hosts have to ignore (RFC 6980), or where it is longer than the part of a frame that the guard
//! sees. A packet whose headers are cut short before its upper layer does not pass either.

use crate::frame::Mac;
use std::net::Ipv6Addr;

/// Addresses and prefixes that a port may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct List(Vec<(u128, u8)>);

const HEADER_BYTES: usize = 40;
const HOP_BY_HOP: u8 = 0;
const UDP: u8 = 17;
const ROUTING: u8 = 43;
const FRAGMENT: u8 = 44;
const AUTHENTICATION: u8 = 51;
const ICMPV6: u8 = 58;
const DESTINATION_OPTIONS: u8 = 60;
const MOBILITY: u8 = 135;
const HOST_IDENTITY: u8 = 139;
const SHIM6: u8 = 140;
/// No known sender uses more extension headers than that.
const MAX_EXTENSIONS: usize = 8;

// Messages of ICMPv6 (RFC 4861 §4, RFC 2710, RFC 3810).
pub(super) const MLD_REPORT: u8 = 131;
pub(super) const MLD_DONE: u8 = 132;
pub(super) const ROUTER_SOLICITATION: u8 = 133;
pub(super) const ROUTER_ADVERTISEMENT: u8 = 134;
pub(super) const NEIGHBOUR_SOLICITATION: u8 = 135;
pub(super) const NEIGHBOUR_ADVERTISEMENT: u8 = 136;
pub(super) const REDIRECT: u8 = 137;
pub(super) const MLD2_REPORT: u8 = 143;

pub(super) const SOURCE_LINK_LAYER: u8 = 1;
pub(super) const TARGET_LINK_LAYER: u8 = 2;

/// What a packet carries.
pub(super) enum Upper<'p> {
    /// A message of ICMPv6, as far as it is seen, and whether that is all of it.
    Icmp { message: &'p [u8], whole: bool },
    /// UDP to that port.
    Udp { to: u16 },
    /// Something else, or a later fragment.
    Other,
    /// It cannot be told.
    Hidden,
}

pub(super) fn address(bytes: &[u8]) -> Option<u128> {
    Some(u128::from_be_bytes(bytes.get(..16)?.try_into().ok()?))
}

/// The link-local address that belongs to an Ethernet address.
pub(super) fn link_local(mac: &Mac) -> u128 {
    let [a, b, c, d, e, f] = *mac;
    u128::from_be_bytes([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

/// What `packet`, at least a header, carries.
pub(super) fn upper_layer(packet: &[u8]) -> Upper<'_> {
    let (mut next, mut at, mut fragment) = (packet[6], HEADER_BYTES, false);
    let end = match u16::from_be_bytes([packet[4], packet[5]]) {
        // Linux takes a length of zero before hop-by-hop options for that of a jumbogram, and all
        // that is there for its payload.
        0 if next == HOP_BY_HOP => usize::MAX,
        bytes => HEADER_BYTES + usize::from(bytes),
    };
    for _ in 0..=MAX_EXTENSIONS {
        match next {
            AUTHENTICATION => {
                // RFC 4302 §2.2: in words of four bytes, less two.
                let Some(&[following, words]) = packet.get(at..at + 2) else { return Upper::Hidden };
                (next, at) = (following, at + 4 * (usize::from(words) + 2));
            }
            HOP_BY_HOP | ROUTING | DESTINATION_OPTIONS | MOBILITY | HOST_IDENTITY | SHIM6 => {
                let Some(&[following, units]) = packet.get(at..at + 2) else { return Upper::Hidden };
                (next, at) = (following, at + 8 * (usize::from(units) + 1));
            }
            FRAGMENT => {
                let Some(fields) = packet.get(at..at + 8) else { return Upper::Hidden };
                if u16::from_be_bytes([fields[2], fields[3]]) & !7 != 0 {
                    return Upper::Other;
                }
                (next, at, fragment) = (fields[0], at + 8, true);
            }
            ICMPV6 => {
                let message = packet.get(at..end.min(packet.len())).unwrap_or_default();
                // Beyond what is seen of the frame it may be anything.
                if message.is_empty() && (fragment || end > packet.len()) {
                    return Upper::Hidden;
                }
                return Upper::Icmp { message, whole: end <= packet.len() && !fragment };
            }
            UDP => {
                let ports = packet.get(at..at + 4).filter(|_| at + 4 <= end);
                return ports.map_or(Upper::Hidden, |p| Upper::Udp { to: u16::from_be_bytes([p[2], p[3]]) });
            }
            _ => return Upper::Other,
        }
    }
    Upper::Hidden
}

/// The address that a packet from `source` announces, or is about to take (duplicate address
/// detection).
pub(super) fn claimed(source: u128, packet: &[u8]) -> Option<u128> {
    let Upper::Icmp { message, .. } = upper_layer(packet) else { return None };
    if claims(*message.first()?, source) { address(message.get(8..)?) } else { None }
}

/// Whether a message of this kind from `source` says that its target is the sender's, or will be.
pub(super) fn claims(kind: u8, source: u128) -> bool {
    kind == NEIGHBOUR_ADVERTISEMENT || kind == NEIGHBOUR_SOLICITATION && source == 0
}

/// The options of a message of neighbour discovery (RFC 4861 §4.6): the kind, and the bytes of the
/// option, at least 8. `None` stands for the rest where that is not well formed.
pub fn nd_options(mut rest: &[u8]) -> impl Iterator<Item = Option<(u8, &[u8])>> {
    std::iter::from_fn(move || {
        let all = std::mem::take(&mut rest);
        if all.is_empty() {
            return None;
        }
        let split = || {
            let &[kind, units] = all.first_chunk()?;
            let (option, rest) = all.split_at_checked(8 * usize::from(units)).filter(|_| units != 0)?;
            Some((kind, option, rest))
        };
        let Some((kind, option, behind)) = split() else { return Some(None) };
        rest = behind;
        Some(Some((kind, option)))
    })
}

/// Whether each option of that kind tells the Ethernet address, and the options are well formed.
pub(crate) fn options_tell(options: &[u8], kind: u8, mac: &Mac) -> bool {
    nd_options(options).all(|option| option.is_some_and(|(this, bytes)| this != kind || bytes.get(2..8) == Some(mac)))
}

impl List {
    /// Entries are addresses with the number of their leading bits that count.
    pub(super) fn new(entries: &[(Ipv6Addr, u8)]) -> List {
        let mut list: Vec<_> = entries.iter().map(|(ip, bits)| (ip.to_bits(), (*bits).min(128))).collect();
        list.sort_unstable();
        list.dedup();
        List(list)
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (Ipv6Addr, u8)> {
        self.0.iter().map(|(ip, bits)| (Ipv6Addr::from_bits(*ip), *bits))
    }

    fn owns(&self, ip: u128, mac: &Mac) -> bool {
        let listed = |&(base, bits): &(u128, u8)| (ip ^ base).leading_zeros() >= u32::from(bits);
        ip == link_local(mac) || self.0.iter().any(listed)
    }

    /// Whether a packet (the first bytes of it, or all) from that Ethernet source passes; `routes`
    /// if its port is a router.
    pub(super) fn lets_packet_pass(&self, packet: &[u8], mac: &Mac, routes: bool) -> bool {
        let Some(source) = packet.get(..HEADER_BYTES).and_then(|header| address(&header[8..])) else { return false };
        let anonymous = source == 0;
        if packet[0] >> 4 != 6 || !anonymous && !self.owns(source, mac) {
            return false;
        }
        match upper_layer(packet) {
            Upper::Hidden => false,
            Upper::Other | Upper::Udp { .. } => !anonymous,
            Upper::Icmp { message: [ROUTER_ADVERTISEMENT | REDIRECT, ..], .. } => routes && !anonymous,
            Upper::Icmp { message, whole } => self.lets_message_pass(message, whole, anonymous, mac),
        }
    }

    fn lets_message_pass(&self, message: &[u8], whole: bool, anonymous: bool, mac: &Mac) -> bool {
        let Some(&kind) = message.first() else { return false };
        let (options, target) = (message.get(24..), message.get(8..).and_then(address));
        let owns_target = target.is_some_and(|ip| self.owns(ip, mac));
        let tells = |options: Option<&[u8]>, kind| whole && options.is_some_and(|o| options_tell(o, kind, mac));
        match kind {
            ROUTER_SOLICITATION => tells(message.get(8..), SOURCE_LINK_LAYER),
            NEIGHBOUR_SOLICITATION => (!anonymous || owns_target) && tells(options, SOURCE_LINK_LAYER),
            NEIGHBOUR_ADVERTISEMENT => !anonymous && owns_target && tells(options, TARGET_LINK_LAYER),
            MLD_REPORT | MLD_DONE | MLD2_REPORT => true,
            _ => !anonymous,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = [2, 0, 0, 0, 0, 7];
    const OTHER: Mac = [2, 0, 0, 0, 0, 8];

    fn ip(text: &str) -> Ipv6Addr {
        text.parse().unwrap()
    }

    fn list() -> List {
        List::new(&[(ip("fd00::7"), 128), (ip("2001:db8:1::"), 64)])
    }

    fn packet(source: &str, next: u8, payload: &[u8]) -> Vec<u8> {
        let mut p = vec![0x60, 0, 0, 0, 0, payload.len() as u8, next, 255];
        p.extend_from_slice(&ip(source).octets());
        p.extend_from_slice(&ip("ff02::1").octets());
        p.extend_from_slice(payload);
        p
    }

    /// A message of neighbour discovery with a target and one link-layer option.
    fn message(kind: u8, target: &str, option: u8, mac: Mac) -> Vec<u8> {
        let mut m = vec![kind, 0, 0, 0, 0, 0, 0, 0];
        m.extend_from_slice(&ip(target).octets());
        m.extend_from_slice(&[option, 1]);
        m.extend_from_slice(&mac);
        m
    }

    fn passes(packet: &[u8]) -> bool {
        list().lets_packet_pass(packet, &MAC, false)
    }

    #[test]
    fn the_link_local_address_is_that_of_the_mac() {
        assert_eq!(Ipv6Addr::from_bits(link_local(&MAC)), ip("fe80::ff:fe00:7"));
        assert_eq!(Ipv6Addr::from_bits(link_local(&[0x52, 0x54, 0, 0x12, 0x34, 0x56])), ip("fe80::5054:ff:fe12:3456"));
    }

    #[test]
    fn only_own_addresses_are_sources() {
        for own in ["fd00::7", "2001:db8:1::1", "2001:db8:1:0:ffff::", "fe80::ff:fe00:7"] {
            assert!(passes(&packet(own, 6, &[0; 20])), "{own}");
            assert!(passes(&packet(own, ICMPV6, &[128; 8])), "echo from {own}");
        }
        for foreign in ["fd00::8", "2001:db8:2::1", "fe80::ff:fe00:8", "fe80::1", "::", "::1"] {
            assert!(!passes(&packet(foreign, 17, &[0; 20])), "{foreign}");
        }
        assert!(!passes(&[0x45; 60]), "that is no IPv6");
        assert!(!passes(&packet("fd00::7", 6, &[])[..39]), "a header cut short");
    }

    #[test]
    fn nobody_is_spoken_for_in_neighbour_discovery() {
        let cases = [
            // Who asks: for anybody, with its own link-layer address.
            ("fd00::7", message(135, "fd00::9", 1, MAC), true),
            ("fd00::7", message(135, "fd00::9", 1, OTHER), false),
            // Detection of doubled addresses: only for its own.
            ("::", message(135, "fd00::7", 14, MAC), true),
            ("::", message(135, "fd00::9", 14, MAC), false),
            // Who answers: for itself.
            ("fd00::7", message(136, "fd00::7", 2, MAC), true),
            ("fd00::7", message(136, "fe80::ff:fe00:7", 2, MAC), true),
            ("fd00::7", message(136, "fd00::9", 2, MAC), false),
            ("fd00::7", message(136, "fd00::7", 2, OTHER), false),
            ("::", message(136, "fd00::7", 2, MAC), false),
            ("fd00::7", message(137, "fd00::7", 2, MAC), false),
            ("fe80::ff:fe00:7", vec![134; 16], false),
            ("::", vec![133, 0, 0, 0, 0, 0, 0, 0], true),
            ("fe80::ff:fe00:7", vec![133, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 7], true),
            ("fe80::ff:fe00:7", vec![133, 0, 0, 0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 8], false),
            ("::", vec![143; 28], true),
            ("::", vec![128; 28], false),
        ];
        for (source, message, expected) in cases {
            assert_eq!(passes(&packet(source, ICMPV6, &message)), expected, "{source} {message:?}");
        }
        let good = message(136, "fd00::7", 2, MAC);
        for cut in 0..good.len() {
            // A message may end before its options; nothing else may be cut.
            assert_eq!(passes(&packet("fd00::7", ICMPV6, &good[..cut])), cut == 24, "cut at {cut}");
            assert!(!passes(&packet("fd00::7", ICMPV6, &good)[..HEADER_BYTES + cut]), "seen up to {cut}");
        }
        let mut empty = good;
        empty[25] = 0;
        assert!(!passes(&packet("fd00::7", ICMPV6, &empty)), "an option of no length");
    }

    #[test]
    fn extension_headers_hide_nothing() {
        let behind = |kind: u8, before: &[u8], message: &[u8]| packet("fd00::7", kind, &[before, message].concat());
        let bad = message(136, "fd00::9", 2, MAC);
        let good = message(136, "fd00::7", 2, MAC);
        let options = [ICMPV6, 0, 1, 4, 0, 0, 0, 0];
        for kind in [HOP_BY_HOP, ROUTING, DESTINATION_OPTIONS] {
            assert!(passes(&behind(kind, &options, &good)), "{kind}");
            assert!(!passes(&behind(kind, &options, &bad)), "{kind}");
            assert!(!passes(&behind(kind, &[ICMPV6, 9], &good)), "{kind}: longer than what is seen");
        }
        let first = [ICMPV6, 0, 0, 1, 0, 0, 0, 1];
        assert!(!passes(&behind(FRAGMENT, &first, &good)), "neighbour discovery in a fragment");
        assert!(passes(&behind(FRAGMENT, &first, &[128; 8])), "an echo in a fragment");
        assert!(passes(&behind(FRAGMENT, &[ICMPV6, 0, 0, 8, 0, 0, 0, 1], &bad)), "a later fragment, of whatever");
        let chain: Vec<u8> = (0..10).flat_map(|_| [HOP_BY_HOP, 0, 1, 4, 0, 0, 0, 0]).collect();
        assert!(!passes(&behind(HOP_BY_HOP, &chain, &good)), "a chain without end");
    }
}
