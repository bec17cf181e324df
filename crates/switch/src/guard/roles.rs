//! What only some ports may do: advertise routers, serve DHCP, and speak for the gateway's
//! addresses.
//!
//! These checks apply to every port, with or without a list of addresses, unless the port's
//! [`Roles`] allow the thing:
//!
//! | frame | dropped as | allowed by |
//! | --- | --- | --- |
//! | router advertisement, redirect (ICMPv6 134, 137; RFC 6105), IRDP advertisement (ICMPv4 9) | `rogue_router` | [`Roles::router`] |
//! | UDP to the port of DHCP clients: 68 over IPv4, 546 over IPv6 (RFC 7610) | `rogue_dhcp` | [`Roles::dhcp_server`] |
//! | ARP or IP sender, neighbour advertisement or duplicate address detection of a protected address | `gateway_claim` | [`Roles::gateway`] |
//! | IPv6 on the link whose headers hide what it carries (RFC 7113 §3, RFC 7112) | `rogue_router` | router and DHCP server both |
//!
//! The check follows all VLAN tags, since a receiver takes stacked priority tags off one after the
//! other, and LLC/SNAP headers (CERT VU#855201). It follows IPv6 extension headers as far as the
//! frame's head shows them. Of fragments the first one counts: it has to show the upper-layer
//! header. A packet between global unicast addresses with a longer chain passes, since no router
//! advertisement has such a source and no DHCPv6 client such an address.

use super::ipv6::Upper;
use super::{ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, ipv6, network_layer};
use crate::drop::Reason;
use crate::frame::Mac;
use crate::plain::{Fields, Plain, UDP};
use std::net::{IpAddr, Ipv6Addr};

const ICMPV4: u8 = 1;
const IRDP_ADVERTISEMENT: u8 = 9;
const DHCPV4_CLIENT: u16 = 68;
const DHCPV6_CLIENT: u16 = 546;

/// What a port may do beyond sending its own traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roles {
    /// Advertise routers to its neighbours.
    pub router: bool,
    /// Answer DHCP clients.
    pub dhcp_server: bool,
    /// Send from the network's protected addresses, and claim them.
    pub gateway: bool,
}

impl Roles {
    /// Everything is allowed.
    pub const ALL: Roles = Roles { router: true, dhcp_server: true, gateway: true };

    /// One bit each.
    #[inline]
    pub(crate) const fn bits(self) -> u8 {
        self.router as u8 | (self.dhcp_server as u8) << 1 | (self.gateway as u8) << 2
    }
}

/// Addresses of a network that only ports with [`Roles::gateway`] may use, and its IPv6 prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Protected {
    ipv4: Vec<[u8; 4]>,
    ipv6: Vec<u128>,
    prefix6: Option<Ipv6Addr>,
}

impl Protected {
    /// Sorts `addresses` by family for fast look-up.
    pub fn new(addresses: &[IpAddr]) -> Protected {
        let mut out = Protected::default();
        for address in addresses {
            match address {
                IpAddr::V4(ip) => out.ipv4.push(ip.octets()),
                IpAddr::V6(ip) => out.ipv6.push(ip.to_bits()),
            }
        }
        out
    }

    /// The same in a network with that prefix, a /64: ports whose addresses no guard knows bring new
    /// ones at a limited rate.
    #[must_use]
    pub fn with_prefix6(self, prefix6: Option<Ipv6Addr>) -> Protected {
        Protected { prefix6, ..self }
    }

    pub(crate) fn prefix6(&self) -> Option<Ipv6Addr> {
        self.prefix6
    }

    fn has_ipv4(&self, bytes: Option<&[u8]>) -> bool {
        bytes.is_some_and(|bytes| self.ipv4.iter().any(|ip| ip == bytes))
    }
}

/// The link-local IPv6 address that an interface with that Ethernet address gives itself (RFC 4291
/// appendix A).
pub fn link_local(mac: &Mac) -> Ipv6Addr {
    Ipv6Addr::from_bits(ipv6::link_local(mac))
}

/// The group that listens for questions about an address (RFC 4291 §2.7.1), and its MAC address
/// (RFC 2464 §7).
pub fn solicited_node(address: Ipv6Addr) -> (Mac, Ipv6Addr) {
    let [.., a, b, c] = address.octets();
    let group = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]));
    ([0x33, 0x33, 0xff, a, b, c], group)
}

/// Whether [`refuse`] lets a frame with these fields pass from a port of any roles. It says no of
/// some that do.
#[inline(always)]
pub(crate) fn lets_pass(plain: &Plain, protected: &Protected) -> bool {
    match plain {
        Plain::Four(Fields { addresses: [both], ports, protocol }) => {
            let source = ((both >> 32) as u32).to_be_bytes();
            let to_client = *protocol == UDP && *ports as u16 == DHCPV4_CLIENT;
            !to_client && !protected.ipv4.contains(&source)
        }
        Plain::Six(Fields { addresses: [high, low, ..], ports, protocol }) => {
            let source = u128::from(*high) << 64 | u128::from(*low);
            let to_client = *protocol == UDP && *ports as u16 == DHCPV6_CLIENT;
            !to_client && !protected.ipv6.contains(&source)
        }
    }
}

/// Why the frame that starts with `head` may not pass from a port with these roles; `more` if it is
/// longer than that. Of TCP and UDP right behind an IP header without options it looks at
/// addresses, protocol and ports only, on which [`crate::policy`] relies.
pub(crate) fn refuse(head: &[u8], more: bool, roles: Roles, protected: &Protected) -> Option<Reason> {
    let Some((kind, at)) = network_layer(head) else {
        // A frame that ends there holds no packet.
        return (more && !(roles.router && roles.dhcp_server)).then_some(Reason::RogueRouter);
    };
    let packet = head.get(at..).unwrap_or_default();
    // So many tags or headers come first that the packet's own header is out of sight.
    let need = match kind {
        ETHERTYPE_IPV4 => 20,
        ETHERTYPE_IPV6 => 40,
        ETHERTYPE_ARP => 18,
        _ => 0,
    };
    if more && packet.len() < need && roles != Roles::ALL {
        return Some(Reason::RogueRouter);
    }
    match kind {
        ETHERTYPE_IPV4 => ipv4(packet, more, roles, protected),
        ETHERTYPE_IPV6 => ipv6(packet, roles, protected),
        ETHERTYPE_ARP if !roles.gateway && protected.has_ipv4(packet.get(14..18)) => Some(Reason::GatewayClaim),
        _ => None,
    }
}

fn ipv4(packet: &[u8], more: bool, roles: Roles, protected: &Protected) -> Option<Reason> {
    if !roles.gateway && protected.has_ipv4(packet.get(12..16)) {
        return Some(Reason::GatewayClaim);
    }
    let protocol = *packet.get(9)?;
    if !matches!(protocol, UDP | ICMPV4) || u16::from_be_bytes([packet[6], packet[7]]) & 0x1fff != 0 {
        // Later fragments are of no use without the first.
        return None;
    }
    let payload = packet.get(usize::from(packet[0] & 15) * 4..).unwrap_or_default();
    match protocol {
        UDP if !roles.dhcp_server => {
            let to = payload.get(2..4).map(|b| u16::from_be_bytes([b[0], b[1]]));
            (to == Some(DHCPV4_CLIENT) || to.is_none() && more).then_some(Reason::RogueDhcp)
        }
        ICMPV4 if !roles.router => {
            let kind = payload.first();
            (kind == Some(&IRDP_ADVERTISEMENT) || kind.is_none() && more).then_some(Reason::RogueRouter)
        }
        _ => None,
    }
}

fn ipv6(packet: &[u8], roles: Roles, protected: &Protected) -> Option<Reason> {
    let (source, destination) = (ipv6::address(packet.get(8..)?)?, ipv6::address(packet.get(24..)?)?);
    let is_protected = |ip: Option<u128>| ip.is_some_and(|ip| protected.ipv6.contains(&ip));
    if !roles.gateway && is_protected(Some(source)) {
        return Some(Reason::GatewayClaim);
    }
    match ipv6::upper_layer(packet) {
        Upper::Icmp { message, whole } => {
            let claims = match *message.first()? {
                ipv6::ROUTER_ADVERTISEMENT | ipv6::REDIRECT => {
                    return (!roles.router).then_some(Reason::RogueRouter);
                }
                kind => ipv6::claims(kind, source),
            };
            let target = message.get(8..).and_then(ipv6::address);
            // A target that is out of sight may be any.
            let claimed = is_protected(target) || target.is_none() && !whole;
            (claims && !roles.gateway && claimed).then_some(Reason::GatewayClaim)
        }
        Upper::Udp { to } => (!roles.dhcp_server && to == DHCPV6_CLIENT).then_some(Reason::RogueDhcp),
        Upper::Hidden => {
            let on_link = |ip: u128| {
                let ip = Ipv6Addr::from_bits(ip);
                ip.is_unicast_link_local() || ip.is_multicast() || ip.is_unspecified()
            };
            let trusted = roles.router && roles.dhcp_server;
            // Neighbour discovery has this hop limit, also between global addresses (RFC 4861
            // §7.1).
            let discovers = packet[7] == 255;
            (!trusted && (on_link(source) || on_link(destination) || discovers)).then_some(Reason::RogueRouter)
        }
        Upper::Other => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Reason::{GatewayClaim, RogueDhcp, RogueRouter};

    const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
    const GATEWAY: [u8; 4] = [10, 0, 0, 1];

    fn protected() -> Protected {
        Protected::new(&[IpAddr::from(GATEWAY), "fe80::1".parse().unwrap()])
    }

    fn frame(before: &[u8], kind: u16, payload: &[u8]) -> Vec<u8> {
        [&[0xff; 6][..], &MAC, before, &kind.to_be_bytes(), payload].concat()
    }

    fn told(frame: &[u8], roles: Roles) -> Option<Reason> {
        refuse(&frame[..frame.len().min(128)], frame.len() > 128, roles, &protected())
    }

    fn v4(source: [u8; 4], protocol: u8, options: usize, payload: &[u8]) -> Vec<u8> {
        let mut p = vec![0; 20 + options];
        p[0] = 0x45 + (options / 4) as u8;
        p[9] = protocol;
        p[12..16].copy_from_slice(&source);
        p.extend_from_slice(payload);
        p
    }

    fn v6(source: &str, to: &str, next: u8, payload: &[u8]) -> Vec<u8> {
        let mut p = vec![0x60, 0, 0, 0, 0, payload.len() as u8, next, 255];
        for ip in [source, to] {
            p.extend_from_slice(&ip.parse::<Ipv6Addr>().unwrap().octets());
        }
        p.extend_from_slice(payload);
        p
    }

    fn neighbour(kind: u8, target: &str) -> Vec<u8> {
        [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &target.parse::<Ipv6Addr>().unwrap().octets()].concat()
    }

    fn arp(sender: [u8; 4]) -> Vec<u8> {
        [&[0, 1, 8, 0, 6, 4, 0, 2][..], &MAC, &sender, &[0; 6], &[10, 0, 0, 9]].concat()
    }

    const RA: [u8; 16] = [134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0];
    const PAD: [u8; 6] = [1, 4, 0, 0, 0, 0];

    /// An extension header of eight bytes.
    fn extension(next: u8) -> Vec<u8> {
        [&[next, 0][..], &PAD].concat()
    }

    #[test]
    fn each_role_is_refused_to_ports_without_it() {
        let (router, dhcp, gateway) = (
            Roles { router: true, ..Roles::default() },
            Roles { dhcp_server: true, ..Roles::default() },
            Roles { gateway: true, ..Roles::default() },
        );
        let own = [10, 0, 0, 7];
        let udp = |to: u16| [&[0, 67][..], &to.to_be_bytes(), &[0; 4]].concat();
        let cases = [
            (0x86dd, v6("fe80::7", "ff02::1", 58, &RA), RogueRouter, router),
            (0x86dd, v6("fe80::7", "ff02::1", 58, &[137; 40]), RogueRouter, router),
            (0x0800, v4(own, 1, 0, &[9; 8]), RogueRouter, router),
            (0x0800, v4(own, 17, 0, &udp(68)), RogueDhcp, dhcp),
            (0x0800, v4(own, 17, 40, &udp(68)), RogueDhcp, dhcp),
            (0x86dd, v6("fe80::7", "fe80::9", 17, &udp(546)), RogueDhcp, dhcp),
            (0x0806, arp(GATEWAY), GatewayClaim, gateway),
            (0x0800, v4(GATEWAY, 6, 0, &[0; 20]), GatewayClaim, gateway),
            (0x86dd, v6("fe80::1", "ff02::1", 58, &[128; 8]), GatewayClaim, gateway),
            (0x86dd, v6("fe80::7", "ff02::1", 58, &neighbour(136, "fe80::1")), GatewayClaim, gateway),
            (0x86dd, v6("::", "ff02::1:ff00:1", 58, &neighbour(135, "fe80::1")), GatewayClaim, gateway),
        ];
        let snap = |oui: u8| [0, 60, 0xaa, 0xaa, 3, 0, 0, oui];
        let befores: [&[u8]; 6] = [
            &[],
            &[0x81, 0, 0, 0],
            &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 0],
            &[0x81, 0, 0, 0].repeat(8),
            &snap(0),
            &[&[0x81, 0, 0, 0][..], &snap(0xf8)].concat(),
        ];
        for (kind, packet, reason, allows) in cases {
            for before in befores {
                let frame = frame(before, kind, &packet);
                assert_eq!(told(&frame, Roles::default()), Some(reason), "{before:x?} {packet:x?}");
                assert_eq!(told(&frame, allows), None, "{before:x?} {packet:x?}");
                assert_eq!(told(&frame, Roles::ALL), None);
            }
        }
    }

    /// What the short way lets pass, the long one does too; and it lets most frames pass.
    #[test]
    fn the_short_way_lets_nothing_pass_that_the_long_one_refuses() {
        let mut state = 11u32;
        let mut next = move |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        let (mut passed, mut refused) = (0, 0);
        for _ in 0..60_000 {
            let port = [67u16, 68, 546, 547, 80][next(5) as usize];
            let [high, low] = port.to_be_bytes();
            let transport = [0, 80, high, low, 0, 20, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 0, 0, 0, 0, 0, 0];
            let (protocol, of_gateway) = ([6, 17, 17, 1, 58][next(5) as usize], next(4) == 0);
            let source = if of_gateway { GATEWAY } else { [10, 0, 0, 7] };
            let mut frame = if next(2) == 0 {
                frame(&[], 0x0800, &v4(source, protocol, 0, &transport))
            } else {
                frame(&[], 0x86dd, &v6(if of_gateway { "fe80::1" } else { "fe80::7" }, "fe80::9", protocol, &transport))
            };
            // Some have other bytes anywhere after the addresses, some end early.
            for _ in 0..next(3) {
                let at = 12 + next(frame.len() as u32 - 12) as usize;
                frame[at] = next(256) as u8;
            }
            frame.truncate(frame.len() - next(4) as usize / 3 * next(40) as usize);
            let Some((plain, _)) = crate::plain::read(&frame) else { continue };
            if lets_pass(&plain, &protected()) {
                passed += 1;
                for more in [false, true] {
                    assert_eq!(refuse(&frame, more, Roles::default(), &protected()), None, "{frame:x?}");
                }
            } else {
                refused += 1;
            }
        }
        assert!(passed > 5_000 && refused > 5_000, "{passed} {refused}");
    }

    #[test]
    fn ordinary_traffic_passes() {
        let own = [10, 0, 0, 7];
        let cases = [
            (0x0800, v4([0; 4], 17, 0, &[0, 68, 0, 67, 0, 0, 0, 0])),
            (0x0800, v4(own, 17, 0, &[0, 53, 200, 1, 0, 0, 0, 0])),
            (0x0800, v4(own, 1, 0, &[8; 8])),
            (0x0800, v4(own, 6, 0, &[0, 68, 0, 68])),
            (0x0806, arp(own)),
            (0x86dd, v6("fe80::7", "ff02::1:2", 17, &[2, 34, 2, 35, 0, 0, 0, 0])),
            (0x86dd, v6("::", "ff02::2", 58, &[133, 0, 0, 0, 0, 0, 0, 0])),
            // It asks for the gateway's address, and claims its own.
            (0x86dd, v6("fe80::7", "ff02::1:ff00:1", 58, &neighbour(135, "fe80::1"))),
            (0x86dd, v6("fe80::7", "ff02::1", 58, &neighbour(136, "fe80::7"))),
            (0x86dd, v6("2001:db8::7", "2001:db8::9", 6, &[0; 20])),
            (0x88b5, vec![0; 46]),
            (0x0026, vec![0x42, 0x42, 3, 0, 0, 0]),
        ];
        for (kind, packet) in cases {
            let frame = frame(&[], kind, &packet);
            assert_eq!(told(&frame, Roles::default()), None, "{packet:x?}");
            // A frame may be cut anywhere.
            for n in 0..frame.len() {
                let _ = told(&frame[..n], Roles::default());
            }
        }
    }

    #[test]
    fn headers_and_fragments_hide_no_router() {
        let on_link = |next: u8, payload: &[u8]| {
            told(&frame(&[], 0x86dd, &v6("fe80::7", "ff02::1", next, payload)), Roles::default())
        };
        for kind in [0, 43, 51, 60, 135, 139, 140] {
            // The authentication header counts its length in words of four bytes.
            let bytes = if kind == 51 { [&[58, 1][..], &[0; 10]].concat() } else { extension(58) };
            assert_eq!(on_link(kind, &[&bytes[..], &RA].concat()), Some(RogueRouter), "{kind}");
        }
        let chain = |n: usize| (1..n).fold(extension(58), |chain, _| [extension(60), chain].concat());
        for n in 1..=30 {
            assert_eq!(on_link(60, &[chain(n), RA.to_vec()].concat()), Some(RogueRouter), "{n} headers");
        }
        // Fragments: the first shows all headers, or does not pass; later ones do.
        let fragment = |next: u8, offset: u8| [next, 0, 0, offset, 0, 0, 0, 1];
        assert_eq!(on_link(44, &[&fragment(58, 1)[..], &RA].concat()), Some(RogueRouter));
        assert_eq!(
            on_link(44, &[&fragment(60, 1)[..], &extension(58)].concat()),
            Some(RogueRouter),
            "its message comes later"
        );
        assert_eq!(on_link(44, &[&fragment(60, 1)[..], &[58, 9]].concat()), Some(RogueRouter));
        assert_eq!(on_link(44, &[&fragment(17, 1)[..], &[2, 35]].concat()), Some(RogueRouter), "no ports");
        assert_eq!(on_link(44, &[&fragment(58, 8)[..], &RA].concat()), None, "a later fragment");
        // A payload length of zero before hop-by-hop options is not one: Linux takes all that is
        // there.
        let mut zero = v6("fe80::7", "ff02::1", 0, &[&extension(58)[..], &RA].concat());
        zero[5] = 0;
        assert_eq!(told(&frame(&[], 0x86dd, &zero), Roles::default()), Some(RogueRouter));
        // Between global addresses a long chain is somebody's source routing.
        let tcp = v6("2001:db8::7", "2001:db8::9", 43, &[&[6, 12][..], &[0; 130]].concat());
        assert_eq!(told(&frame(&[], 0x86dd, &tcp), Roles::default()), None);
        // The same with ICMPv6 may be neighbour discovery, unless it was routed.
        let mut icmp = v6("2001:db8::7", "2001:db8::9", 43, &[&[58, 12][..], &[0; 130]].concat());
        assert_eq!(told(&frame(&[], 0x86dd, &icmp), Roles::default()), Some(RogueRouter));
        icmp[7] = 64;
        assert_eq!(told(&frame(&[], 0x86dd, &icmp), Roles::default()), None);
        // One long header in place of many.
        for units in 0..=20 {
            let header = [&[58, units][..], &vec![0; 8 * usize::from(units) + 6]].concat();
            assert_eq!(on_link(60, &[&header[..], &RA].concat()), Some(RogueRouter), "{units} units");
        }
        // Tags that move the packet out of the head.
        for count in 1..=40 {
            let tags = frame(&[0x81, 0, 0, 0].repeat(count), 0x86dd, &v6("fe80::7", "ff02::1", 58, &RA));
            assert_eq!(told(&tags, Roles::default()), Some(RogueRouter), "{count} tags");
            let claim =
                frame(&[0x81, 0, 0, 0].repeat(count), 0x0800, &[v4(GATEWAY, 6, 0, &[0; 8]), vec![0; 40]].concat());
            assert!(told(&claim, Roles::default()).is_some(), "{count} tags");
        }
    }

    #[test]
    fn fragments_hide_no_dhcp_server() {
        let mut first = v4([10, 0, 0, 7], 17, 0, &[0, 67, 0, 68, 0, 0, 0, 0]);
        first[6] = 0x20;
        assert_eq!(told(&frame(&[], 0x0800, &first), Roles::default()), Some(RogueDhcp));
        first[7] = 1;
        assert_eq!(told(&frame(&[], 0x0800, &first), Roles::default()), None, "a later fragment has no ports");
    }
}
