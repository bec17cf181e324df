//! Reading IPv6 that reaches the gateway, and writing its answers, over smoltcp's wire types.
//!
//! As for IPv4, nothing here keeps state: an answer goes to the MAC address that the question came
//! from. That holds for answers to a group as well, which RFC 6085 allows: the frame is one
//! station's, and wakes no other one.

use crate::drop::Reason;
use crate::frame::{Checksum, Mac};
use crate::gateway::packet::{self, ETHERNET_BYTES, HOP_LIMIT, UDP_BYTES};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    EthernetFrame, EthernetProtocol, Icmpv6DstUnreachable, Icmpv6Packet, Icmpv6Repr, IpProtocol, Ipv6Packet, Ipv6Repr,
    TcpControl, TcpPacket, TcpRepr, TcpSeqNumber, UdpPacket, UdpRepr,
};
use std::net::Ipv6Addr;

const IPV6_BYTES: usize = 40;
/// Hop limit of neighbour discovery, by which a receiver knows that no router passed it on (RFC 4861
/// §3.1).
pub(super) const ON_LINK: u8 = 255;
/// Extension headers that are passed over before the payload.
const MAX_EXTENSIONS: usize = 4;
/// Bytes of the offending packet that an ICMP error quotes behind its header.
const QUOTED_BYTES: usize = 64;
const FRAGMENT: u8 = 44;

/// Where a packet came from and goes to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub(super) source_mac: Mac,
    pub(super) destination_mac: Mac,
    pub(super) source: Ipv6Addr,
    pub(super) destination: Ipv6Addr,
}

impl Route {
    /// The way back.
    pub(super) fn back(&self) -> Route {
        Route {
            source_mac: self.destination_mac,
            destination_mac: self.source_mac,
            source: self.destination,
            destination: self.source,
        }
    }
}

/// A packet that is whole.
#[derive(Debug)]
pub(super) struct Inbound<'a> {
    pub(super) route: Route,
    pub(super) hop_limit: u8,
    /// The upper layer, behind hop-by-hop and destination options.
    pub(super) protocol: u8,
    /// From its header to its last byte.
    pub(super) packet: &'a [u8],
    pub(super) payload: &'a [u8],
}

/// The MAC address of an IPv6 group (RFC 2464 §7).
pub(super) fn group_mac(group: Ipv6Addr) -> Mac {
    let bytes = group.octets();
    [0x33, 0x33, bytes[12], bytes[13], bytes[14], bytes[15]]
}

/// Whether a frame with this head, to an IPv6 group, may matter to a gateway: neighbour discovery,
/// and DHCPv6 clients' messages. A look at fixed places, so that what is flooded otherwise costs no
/// copy.
pub(crate) fn is_for_gateway(head: &[u8]) -> bool {
    if head.get(..2) != Some(&[0x33, 0x33]) || head.get(12..14) != Some(&[0x86, 0xdd]) {
        return false;
    }
    match head.get(20) {
        Some(58) => head.get(21) == Some(&ON_LINK) && matches!(head.get(54), Some(133 | 135 | 136)),
        Some(17) => head.get(56..58) == Some(&[2, 35]),
        _ => false,
    }
}

/// Reads an IPv6 frame to `own` or to a group; `None` where it is no business of the gateway.
pub(super) fn read(frame: &[u8], own: Mac) -> Result<Option<Inbound<'_>>, Reason> {
    let ethernet = EthernetFrame::new_checked(frame).map_err(|_| Reason::Runt)?;
    let (source_mac, destination_mac) = (ethernet.src_addr().0, ethernet.dst_addr().0);
    if destination_mac != own && !packet::is_group(destination_mac) {
        return Ok(None);
    }
    if packet::is_group(source_mac) || source_mac == [0; 6] || source_mac == own {
        return Err(Reason::BadSource);
    }
    let body = &frame[ETHERNET_BYTES..];
    let header = Ipv6Packet::new_checked(body).map_err(|_| Reason::GatewayRefused)?;
    let (source, destination) = (header.src_addr(), header.dst_addr());
    if header.version() != 6 || source.is_multicast() || source.is_loopback() {
        return Err(Reason::GatewayRefused);
    }
    let packet = &body[..IPV6_BYTES + usize::from(header.payload_len())];
    let (mut protocol, mut at) = (u8::from(header.next_header()), IPV6_BYTES);
    for _ in 0..=MAX_EXTENSIONS {
        match protocol {
            0 | 60 => {
                let Some(&[next, units]) = packet.get(at..at + 2) else { return Err(Reason::GatewayRefused) };
                (protocol, at) = (next, at + 8 * (usize::from(units) + 1));
            }
            // No message to the gateway is long enough to need fragments, and neighbour discovery
            // may not come in any (RFC 6980).
            FRAGMENT => return Err(Reason::GatewayRefused),
            _ => break,
        }
    }
    let payload = packet.get(at..).ok_or(Reason::GatewayRefused)?;
    let route = Route { source_mac, destination_mac, source, destination };
    Ok(Some(Inbound { route, hop_limit: header.hop_limit(), protocol, packet, payload }))
}

/// A frame with an IPv6 header, and where its payload of `payload_len` bytes begins.
fn ipv6(route: &Route, next_header: IpProtocol, hop_limit: u8, payload_len: usize) -> (Vec<u8>, usize) {
    let repr = Ipv6Repr { src_addr: route.source, dst_addr: route.destination, next_header, payload_len, hop_limit };
    let bytes = IPV6_BYTES + payload_len;
    let mut frame = packet::ethernet(route.source_mac, route.destination_mac, EthernetProtocol::Ipv6, bytes);
    repr.emit(&mut Ipv6Packet::new_unchecked(&mut frame[ETHERNET_BYTES..]));
    (frame, ETHERNET_BYTES + IPV6_BYTES)
}

/// A message of ICMPv6 that is complete but for its checksum.
pub(super) fn icmp_bytes(route: &Route, hop_limit: u8, message: &[u8]) -> Vec<u8> {
    let (mut frame, at) = ipv6(route, IpProtocol::Icmpv6, hop_limit, message.len());
    frame[at..].copy_from_slice(message);
    Icmpv6Packet::new_unchecked(&mut frame[at..]).fill_checksum(&route.source, &route.destination);
    frame
}

fn icmp(route: &Route, repr: &Icmpv6Repr<'_>) -> Vec<u8> {
    let (mut frame, at) = ipv6(route, IpProtocol::Icmpv6, HOP_LIMIT, repr.buffer_len());
    let mut message = Icmpv6Packet::new_unchecked(&mut frame[at..]);
    repr.emit(&route.source, &route.destination, &mut message, &ChecksumCapabilities::default());
    frame
}

/// The type of an ICMPv6 message whose checksum is right, where it has to be.
pub(super) fn icmp_kind(inbound: &Inbound<'_>, checksum: Checksum) -> Result<u8, Reason> {
    let message = Icmpv6Packet::new_checked(inbound.payload).map_err(|_| Reason::GatewayRefused)?;
    let right = message.verify_checksum(&inbound.route.source, &inbound.route.destination);
    if packet::must_verify(checksum) && !right {
        return Err(Reason::GatewayRefused);
    }
    Ok(message.msg_type().into())
}

/// The answer to an echo request; `None` where it is another message.
pub(super) fn echo_reply(inbound: &Inbound<'_>) -> Option<Vec<u8>> {
    let (route, message) = (&inbound.route, Icmpv6Packet::new_checked(inbound.payload).ok()?);
    let read = Icmpv6Repr::parse(&route.source, &route.destination, &message, &ChecksumCapabilities::ignored());
    let Ok(Icmpv6Repr::EchoRequest { ident, seq_no, data }) = read else { return None };
    Some(icmp(&route.back(), &Icmpv6Repr::EchoReply { ident, seq_no, data }))
}

/// An ICMPv6 error from `own` about `inbound`.
pub(super) fn unreachable(inbound: &Inbound<'_>, own: Ipv6Addr, own_mac: Mac, reason: Icmpv6DstUnreachable) -> Vec<u8> {
    let route = &inbound.route;
    let body = &inbound.packet[IPV6_BYTES..];
    let header = Ipv6Repr {
        src_addr: route.source,
        dst_addr: route.destination,
        next_header: Ipv6Packet::new_unchecked(inbound.packet).next_header(),
        payload_len: body.len(),
        hop_limit: inbound.hop_limit,
    };
    let to = Route { source: own, source_mac: own_mac, ..route.back() };
    icmp(&to, &Icmpv6Repr::DstUnreachable { reason, header, data: &body[..body.len().min(QUOTED_BYTES)] })
}

/// The ports and the payload of a UDP datagram.
pub(super) fn read_udp<'a>(inbound: &Inbound<'a>, checksum: Checksum) -> Result<(u16, u16, &'a [u8]), Reason> {
    let udp = UdpPacket::new_checked(inbound.payload).map_err(|_| Reason::GatewayRefused)?;
    let (source, destination) = (inbound.route.source, inbound.route.destination);
    // Over IPv6 a sum of zero is none that was left out (RFC 8200 §8.1).
    let right = udp.checksum() != 0 && udp.verify_checksum(&source.into(), &destination.into());
    if packet::must_verify(checksum) && !right {
        return Err(Reason::GatewayRefused);
    }
    Ok((udp.src_port(), udp.dst_port(), &inbound.payload[UDP_BYTES..usize::from(udp.len())]))
}

/// A UDP datagram.
pub(super) fn udp(route: &Route, source_port: u16, destination_port: u16, payload: &[u8]) -> Vec<u8> {
    let (mut frame, at) = ipv6(route, IpProtocol::Udp, HOP_LIMIT, UDP_BYTES + payload.len());
    UdpRepr { src_port: source_port, dst_port: destination_port }.emit(
        &mut UdpPacket::new_unchecked(&mut frame[at..]),
        &route.source.into(),
        &route.destination.into(),
        payload.len(),
        |to| to.copy_from_slice(payload),
        &ChecksumCapabilities::default(),
    );
    frame
}

/// The reset that answers `segment`, which belongs to no connection; `None` for a reset.
pub(super) fn tcp_reset(route: &Route, segment: &TcpPacket<&[u8]>) -> Option<Vec<u8>> {
    if segment.rst() {
        return None;
    }
    let end = segment.seq_number() + segment.segment_len();
    let (seq_number, ack_number) =
        if segment.ack() { (segment.ack_number(), None) } else { (TcpSeqNumber(0), Some(end)) };
    let repr = TcpRepr {
        src_port: segment.dst_port(),
        dst_port: segment.src_port(),
        control: TcpControl::Rst,
        seq_number,
        ack_number,
        window_len: 0,
        window_scale: None,
        max_seg_size: None,
        sack_permitted: false,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    };
    let to = route.back();
    let (mut frame, at) = ipv6(&to, IpProtocol::Tcp, HOP_LIMIT, repr.buffer_len());
    let mut packet = TcpPacket::new_unchecked(&mut frame[at..]);
    repr.emit(&mut packet, &to.source.into(), &to.destination.into(), &ChecksumCapabilities::default());
    Some(frame)
}
