//! What a frame says about the connection that it belongs to: addresses, protocol, ports. Pure;
//! looks only at the frame's head.

use crate::guard::{ETHERTYPE_ARP, ETHERTYPE_IPV4, ETHERTYPE_IPV6, network_layer};
use crate::plain::{Fields, Plain, TCP, UDP};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub(super) const ICMPV4: u8 = 1;
const IGMP: u8 = 2;
pub(super) const ICMPV6: u8 = 58;
// TCP flags: RFC 9293 §3.1.
pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const ACK: u8 = 0x10;

/// What comes before an IPv4 address in the IPv6 address that stands for it (RFC 4291 §2.5.5.2).
const MAPPED: u128 = 0xffff << 32;

/// Addresses are IPv6, with IPv4 as `::ffff:a.b.c.d`, so that one table holds both families.
pub(super) fn mapped(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().to_bits(),
        IpAddr::V6(ip) => ip.to_bits(),
    }
}

/// One end of a connection as the packet names it: address, and port or identifier (0 where the
/// protocol has none).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct End {
    pub(super) ip: u128,
    pub(super) port: u16,
}

/// Both ends of a packet, and its protocol (the last header's number; ICMP and ICMPv6 by their own
/// numbers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuple {
    pub(super) from: End,
    pub(super) to: End,
    pub(super) protocol: u8,
}

impl Tuple {
    /// The tuple of packets in the other direction.
    pub(super) fn reversed(self) -> Tuple {
        Tuple { from: self.to, to: self.from, protocol: self.protocol }
    }
}

/// Whether the protocol's packets begin with two ports: TCP, UDP, DCCP, SCTP, UDP-Lite.
pub(super) fn has_ports(protocol: u8) -> bool {
    matches!(protocol, TCP | UDP | 33 | 132 | 136)
}

/// What a packet means for the state of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A TCP segment with these flags.
    Segment(u8),
    /// A packet of any other protocol.
    Datagram,
    /// The first fragment of a packet with this identification; others follow.
    First(u32),
    /// A later fragment of a packet with this identification. It has no ports.
    Later(u32),
}

impl Kind {
    /// Whether such a packet may change the state of a connection that has had one in the same
    /// direction.
    #[inline(always)]
    pub(super) fn changes_state(self) -> bool {
        match self {
            Kind::Segment(flags) => flags & (SYN | FIN | RST) != 0,
            _ => false,
        }
    }
}

/// What a frame holds for a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A packet that a rule can judge.
    Packet(Tuple, Kind),
    /// An ICMP error, and the packet that it is about; `None` where what it quotes of that cannot
    /// be read.
    Error(Tuple, Option<Tuple>),
    /// What the link itself needs: ARP, neighbour discovery, group membership.
    Link,
    /// No IP.
    Other,
    /// IP whose headers are cut short, or not to be seen in the frame's head.
    Hidden,
}

/// Reads the frame that starts with `head` (its first 128 bytes, or all).
pub(super) fn read(head: &[u8]) -> Content {
    match network_layer(head) {
        Some((ETHERTYPE_IPV4, at)) => ipv4(&head[at..]).unwrap_or(Content::Hidden),
        Some((ETHERTYPE_IPV6, at)) => ipv6(&head[at..]).unwrap_or(Content::Hidden),
        Some((ETHERTYPE_ARP, _)) => Content::Link,
        Some(_) => Content::Other,
        None => Content::Hidden,
    }
}

impl Plain {
    /// What such a frame of this tuple has; of each family where both have the same tuple.
    pub(super) fn of(tuple: &Tuple, is_ipv4: bool) -> Plain {
        let ([from, to], protocol) = ([tuple.from.ip, tuple.to.ip], tuple.protocol);
        let ports = u32::from(tuple.from.port) << 16 | u32::from(tuple.to.port);
        if is_ipv4 {
            let addresses = [u64::from(from as u32) << 32 | u64::from(to as u32)];
            return Plain::Four(Fields { addresses, ports, protocol });
        }
        let addresses = [(from >> 64) as u64, from as u64, (to >> 64) as u64, to as u64];
        Plain::Six(Fields { addresses, ports, protocol })
    }

    pub(super) fn tuple(&self) -> Tuple {
        let (from, to, ports, protocol) = match *self {
            Plain::Four(Fields { addresses: [both], ports, protocol }) => {
                (MAPPED | u128::from(both >> 32), MAPPED | u128::from(both as u32), ports, protocol)
            }
            Plain::Six(Fields { addresses: [a, b, c, d], ports, protocol }) => {
                (u128::from(a) << 64 | u128::from(b), u128::from(c) << 64 | u128::from(d), ports, protocol)
            }
        };
        let [from_port, to_port] = [(ports >> 16) as u16, ports as u16];
        Tuple { from: End { ip: from, port: from_port }, to: End { ip: to, port: to_port }, protocol }
    }
}

/// What a [`Plain`] frame means for its connection.
#[inline(always)]
pub(super) fn kind_of(plain: &Plain, flags: u8) -> Kind {
    let (Plain::Four(Fields { protocol, .. }) | Plain::Six(Fields { protocol, .. })) = plain;
    if *protocol == TCP { Kind::Segment(flags) } else { Kind::Datagram }
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// Addresses, protocol and the offset of what follows the header; of fragments, whether it is the
/// first, and the identification.
struct Header {
    from: u128,
    to: u128,
    protocol: u8,
    at: usize,
    fragment: Option<(bool, u32)>,
}

fn ipv4_header(packet: &[u8]) -> Option<Header> {
    let header: &[u8; 20] = packet.first_chunk()?;
    let at = usize::from(header[0] & 15) * 4;
    if header[0] >> 4 != 4 || at < 20 {
        return None;
    }
    let address = |at: usize| Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]);
    // Bit 13: more fragments follow; the 13 below: the offset. RFC 791 §3.1.
    let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff;
    let id = u32::from(u16::from_be_bytes([header[4], header[5]]));
    Some(Header {
        from: mapped(address(12).into()),
        to: mapped(address(16).into()),
        protocol: header[9],
        at,
        fragment: (fragment != 0).then_some((fragment & 0x1fff == 0, id)),
    })
}

fn ipv6_header(packet: &[u8]) -> Option<Header> {
    let header: &[u8; 40] = packet.first_chunk()?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let address = |bytes: &[u8]| <[u8; 16]>::try_from(bytes).map(|b| Ipv6Addr::from(b).to_bits()).ok();
    let (from, to) = (address(&header[8..24])?, address(&header[24..40])?);
    let (mut protocol, mut at, mut fragment) = (header[6], 40, None);
    loop {
        // RFC 8200 §4, RFC 4302 §2.2; the last three are mobility, HIP and shim6.
        let bytes = match protocol {
            0 | 43 | 60 | 135 | 139 | 140 => usize::from(*packet.get(at + 1)?) * 8 + 8,
            51 => usize::from(*packet.get(at + 1)?) * 4 + 8,
            44 => {
                let fields: &[u8; 8] = packet.get(at..)?.first_chunk()?;
                let offset = u16::from_be_bytes([fields[2], fields[3]]);
                let id = u32::from_be_bytes([fields[4], fields[5], fields[6], fields[7]]);
                // Offset 0 and no more: an atomic fragment (RFC 6946), as good as whole.
                if offset & 0xfff9 != 0 {
                    fragment = Some((offset & 0xfff8 == 0, id));
                }
                8
            }
            _ => return Some(Header { from, to, protocol, at, fragment }),
        };
        protocol = *packet.get(at)?;
        at += bytes;
        if fragment.is_some_and(|(is_first, _)| !is_first) {
            return Some(Header { from, to, protocol, at, fragment });
        }
    }
}

/// The packet's tuple, where it has the ports that its protocol knows.
fn tuple(header: &Header, packet: &[u8]) -> Option<Tuple> {
    let payload = packet.get(header.at..)?;
    let (from, to) = match header.protocol {
        protocol if has_ports(protocol) => (word(payload, 0)?, word(payload, 2)?),
        // Echo: the identifier is both ends' port (RFC 792, RFC 4443 §4.1).
        ICMPV4 if matches!(payload.first()?, 0 | 8) => (word(payload, 4)?, word(payload, 4)?),
        ICMPV6 if matches!(payload.first()?, 128 | 129) => (word(payload, 4)?, word(payload, 4)?),
        _ => (0, 0),
    };
    Some(Tuple {
        from: End { ip: header.from, port: from },
        to: End { ip: header.to, port: to },
        protocol: header.protocol,
    })
}

/// `quoted` reads what the payload of an ICMP error quotes.
fn packet(
    header: &Header,
    packet: &[u8],
    is_error: bool,
    quoted: impl FnOnce(&[u8]) -> Option<Header>,
) -> Option<Content> {
    if let Some((false, id)) = header.fragment {
        let (from, to) = (End { ip: header.from, port: 0 }, End { ip: header.to, port: 0 });
        return Some(Content::Packet(Tuple { from, to, protocol: header.protocol }, Kind::Later(id)));
    }
    let (about, payload) = (tuple(header, packet)?, &packet[header.at..]);
    Some(match header.fragment {
        Some((_, id)) => Content::Packet(about, Kind::First(id)),
        None if header.protocol == TCP => Content::Packet(about, Kind::Segment(*payload.get(13)?)),
        None if is_error => {
            let inner = payload.get(8..).and_then(|bytes| tuple(&quoted(bytes)?, bytes));
            Content::Error(about, inner)
        }
        None => Content::Packet(about, Kind::Datagram),
    })
}

fn ipv4(bytes: &[u8]) -> Option<Content> {
    let header = ipv4_header(bytes)?;
    if header.protocol == IGMP {
        return Some(Content::Link);
    }
    // Unreachable, source quench, time exceeded, parameter problem.
    let is_error = header.protocol == ICMPV4 && matches!(bytes.get(header.at), Some(3 | 4 | 11 | 12));
    packet(&header, bytes, is_error, ipv4_header)
}

fn ipv6(bytes: &[u8]) -> Option<Content> {
    let header = ipv6_header(bytes)?;
    // Multicast listener discovery, router and neighbour discovery, MLDv2: RFC 2710, RFC 4861, RFC 3810.
    let is_link = |payload: &[u8]| matches!(payload.first(), Some(130..=137 | 143));
    if header.protocol == ICMPV6 && header.fragment.is_none() && bytes.get(header.at..).is_some_and(is_link) {
        return Some(Content::Link);
    }
    let is_error = header.protocol == ICMPV6 && bytes.get(header.at).is_some_and(|kind| *kind < 128);
    packet(&header, bytes, is_error, ipv6_header)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    pub(crate) fn end(text: &str, port: u16) -> End {
        End { ip: mapped(ip(text)), port }
    }

    /// A frame with an IP packet of that protocol and payload.
    pub(crate) fn frame(from: &str, to: &str, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut f = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
        match (ip(from), ip(to)) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                f.extend([8, 0, 0x45, 0]);
                f.extend((20 + payload.len() as u16).to_be_bytes());
                f.extend([0, 7, 0, 0, 64, protocol, 0, 0]);
                f.extend(from.octets());
                f.extend(to.octets());
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                f.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                f.extend((payload.len() as u16).to_be_bytes());
                f.extend([protocol, 64]);
                f.extend(from.octets());
                f.extend(to.octets());
            }
            _ => panic!("one family"),
        }
        f.extend(payload);
        f
    }

    pub(crate) fn tcp(from: u16, to: u16, flags: u8) -> Vec<u8> {
        let mut t = vec![0; 20];
        t[..2].copy_from_slice(&from.to_be_bytes());
        t[2..4].copy_from_slice(&to.to_be_bytes());
        (t[12], t[13]) = (0x50, flags);
        t
    }

    const FAMILIES: [(&str, &str); 2] = [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")];

    #[test]
    fn a_segment_a_datagram_and_an_echo_have_their_tuples() {
        for (from, to) in FAMILIES {
            let segment = frame(from, to, TCP, &tcp(1234, 80, SYN));
            let want = Tuple { from: end(from, 1234), to: end(to, 80), protocol: TCP };
            assert_eq!(read(&segment), Content::Packet(want, Kind::Segment(SYN)));
            let datagram = frame(from, to, UDP, &[0, 53, 1, 0, 0, 8, 0, 0]);
            let want = Tuple { from: end(from, 53), to: end(to, 256), protocol: UDP };
            assert_eq!(read(&datagram), Content::Packet(want, Kind::Datagram));
            let (protocol, request) = if from.contains(':') { (ICMPV6, 128) } else { (ICMPV4, 8) };
            let echo = frame(from, to, protocol, &[request, 0, 0, 0, 3, 4, 0, 1]);
            let want = Tuple { from: end(from, 0x304), to: end(to, 0x304), protocol };
            assert_eq!(read(&echo), Content::Packet(want, Kind::Datagram));
        }
    }

    #[test]
    fn plain_frames_are_read_as_all_others_are() {
        let mut state = 3u32;
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let mut plain_ones = 0;
        for round in 0..40_000 {
            let (from, to) = FAMILIES[round % 2];
            let mut f = frame(from, to, [TCP, UDP, ICMPV4, ICMPV6, 44][round % 5], &tcp(1, 2, next()));
            for _ in 0..next() % 4 {
                let at = 12 + usize::from(next()) % (f.len() - 12);
                f[at] = next();
            }
            f.truncate(f.len() - usize::from(next() % 16) * usize::from(next() % 4 / 3));
            if let Some((plain, flags)) = crate::plain::read(&f) {
                plain_ones += 1;
                assert_eq!(read(&f), Content::Packet(plain.tuple(), kind_of(&plain, flags)), "{f:?}");
                assert_eq!(Plain::of(&plain.tuple(), matches!(plain, Plain::Four(_))), plain);
            }
        }
        assert!(plain_ones > 5_000, "{plain_ones}");
    }

    #[test]
    fn an_error_shows_the_packet_that_it_is_about() {
        for (from, to) in FAMILIES {
            let quoted = &frame(from, to, UDP, &[0, 53, 1, 0, 0, 8, 0, 0])[14..];
            let (protocol, kind) = if from.contains(':') { (ICMPV6, 1) } else { (ICMPV4, 3) };
            let error = frame(to, from, protocol, &[&[kind, 0, 0, 0, 0, 0, 0, 0], quoted].concat());
            let Content::Error(_, Some(about)) = read(&error) else { panic!("{:?}", read(&error)) };
            assert_eq!(about, Tuple { from: end(from, 53), to: end(to, 256), protocol: UDP });
            let cut = frame(to, from, protocol, &[kind, 0, 0, 0, 0, 0, 0, 0, 0x45]);
            assert!(matches!(read(&cut), Content::Error(_, None)));
        }
    }

    #[test]
    fn what_the_link_needs_is_no_packet_and_what_is_cut_short_is_hidden() {
        assert_eq!(read(&[&[0xff; 12][..], &[8, 6], &[0; 28]].concat()), Content::Link);
        assert_eq!(read(&frame("fe80::1", "ff02::1", ICMPV6, &[135; 24])), Content::Link);
        assert_eq!(read(&frame("10.0.0.1", "224.0.0.22", IGMP, &[0x22; 8])), Content::Link);
        assert_eq!(read(&[&[0xff; 12][..], &[0x88, 0xcc], &[0; 28]].concat()), Content::Other);
        for (from, to) in FAMILIES {
            let whole = frame(from, to, TCP, &tcp(1, 2, ACK));
            for cut in 14..whole.len() - 7 {
                assert_eq!(read(&whole[..cut]), Content::Hidden, "cut at {cut}");
            }
        }
    }

    #[test]
    fn fragments_are_known_by_their_identification() {
        let mut first = frame("10.0.0.1", "10.0.0.2", UDP, &[0, 53, 1, 0, 0, 8, 0, 0]);
        first[14 + 6] = 0x20;
        assert!(matches!(read(&first), Content::Packet(_, Kind::First(7))));
        let mut later = first.clone();
        later[14 + 7] = 1;
        let Content::Packet(tuple, Kind::Later(7)) = read(&later) else { panic!("{:?}", read(&later)) };
        assert_eq!((tuple.from.port, tuple.to.port), (0, 0), "its payload holds no ports");
        let six = |offset: u8, more: u8| {
            let header = [UDP, 0, 0, offset << 3 | more, 0, 0, 1, 2, 0, 53, 1, 0, 0, 8, 0, 0];
            read(&frame("fd00::1", "fd00::2", 44, &header))
        };
        assert!(matches!(six(0, 1), Content::Packet(_, Kind::First(258))));
        assert!(matches!(six(1, 1), Content::Packet(_, Kind::Later(258))));
        assert!(matches!(six(0, 0), Content::Packet(_, Kind::Datagram)), "an atomic fragment is whole");
    }

    #[test]
    fn extension_headers_are_passed_over_as_far_as_they_show() {
        let options = [&[60, 0, 0, 0, 0, 0, 0, 0][..], &[TCP, 1], &[0; 14], &tcp(5, 6, SYN)].concat();
        let Content::Packet(tuple, _) = read(&frame("fd00::1", "fd00::2", 0, &options)) else { panic!() };
        assert_eq!((tuple.from.port, tuple.to.port, tuple.protocol), (5, 6, TCP));
        assert_eq!(read(&frame("fd00::1", "fd00::2", 0, &[60, 200, 0, 0, 0, 0, 0, 0])), Content::Hidden);
    }
}
