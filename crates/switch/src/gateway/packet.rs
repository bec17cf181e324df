//! Reading what is addressed to the gateway, and writing its answers, over smoltcp's wire types.
//!
//! Nothing here keeps state: an answer goes back to the MAC address that the question came from, so
//! there is no neighbour cache for a guest to fill or poison.

use crate::drop::Reason;
use crate::frame::{Checksum, Mac};
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpHardware, ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol, EthernetRepr,
    Icmpv4DstUnreachable, Icmpv4Packet, Icmpv4Repr, IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr,
    TcpSeqNumber, UdpPacket, UdpRepr,
};
use std::net::Ipv4Addr;

/// Hop limit of what the gateway sends (the recommended default of RFC 1700).
pub(super) const HOP_LIMIT: u8 = 64;
pub(super) const ETHERNET_BYTES: usize = 14;
const IPV4_BYTES: usize = 20;
pub(super) const UDP_BYTES: usize = 8;
/// Bytes of the offending packet that an ICMP error quotes behind its header (RFC 792).
const QUOTED_BYTES: usize = 8;

/// The group bit of the first byte of a MAC address.
pub(super) fn is_group(mac: Mac) -> bool {
    mac[0] & 1 != 0
}

/// Where an IPv4 packet came from and goes to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    pub(super) source_mac: Mac,
    pub(super) destination_mac: Mac,
    pub(super) source: Ipv4Addr,
    pub(super) destination: Ipv4Addr,
}

/// What a frame holds for the gateway.
#[derive(Debug)]
pub(super) enum Inbound<'a> {
    /// A request for a hardware address.
    Arp { asker_mac: Mac, asker: Ipv4Addr, target: Ipv4Addr, is_request: bool },
    /// An IPv4 packet that is whole and has a right header; `packet` from its header to its last
    /// byte.
    Ipv4 { route: Route, protocol: IpProtocol, packet: &'a [u8], payload: &'a [u8] },
    /// Something that the gateway has no part in.
    Other,
}

/// Reads a frame that reached the gateway's port.
pub(super) fn read(frame: &[u8], own: Mac) -> Result<Inbound<'_>, Reason> {
    let ethernet = EthernetFrame::new_checked(frame).map_err(|_| Reason::Runt)?;
    let destination_mac = ethernet.dst_addr().0;
    if destination_mac != own && destination_mac != [0xff; 6] {
        return Ok(Inbound::Other);
    }
    let source_mac = ethernet.src_addr().0;
    if is_group(source_mac) || source_mac == [0; 6] || source_mac == own {
        return Err(Reason::BadSource);
    }
    let body = &frame[ETHERNET_BYTES..];
    match ethernet.ethertype() {
        EthernetProtocol::Arp => {
            let packet = ArpPacket::new_checked(body).map_err(|_| Reason::GatewayRefused)?;
            let Ok(ArpRepr::EthernetIpv4 {
                operation,
                source_hardware_addr,
                source_protocol_addr,
                target_protocol_addr,
                ..
            }) = ArpRepr::parse(&packet)
            else {
                return Err(Reason::GatewayRefused);
            };
            if source_hardware_addr.0 != source_mac {
                return Err(Reason::GatewayRefused);
            }
            Ok(Inbound::Arp {
                asker_mac: source_mac,
                asker: source_protocol_addr,
                target: target_protocol_addr,
                is_request: operation == ArpOperation::Request,
            })
        }
        EthernetProtocol::Ipv4 => {
            let packet = Ipv4Packet::new_checked(body).map_err(|_| Reason::GatewayRefused)?;
            let fragment = packet.more_frags() || packet.frag_offset() != 0;
            if packet.version() != 4 || fragment || !packet.verify_checksum() {
                return Err(Reason::GatewayRefused);
            }
            let route =
                Route { source_mac, destination_mac, source: packet.src_addr(), destination: packet.dst_addr() };
            let (header, total) = (usize::from(packet.header_len()), usize::from(packet.total_len()));
            Ok(Inbound::Ipv4 {
                route,
                protocol: packet.next_header(),
                packet: &body[..total],
                payload: &body[header..total],
            })
        }
        _ => Ok(Inbound::Other),
    }
}

/// Whether the transport checksum has to be looked at: a sum that is not there yet, or that never
/// left this machine, is as good as right.
pub(super) fn must_verify(checksum: Checksum) -> bool {
    checksum == Checksum::Unverified
}

/// The ports and the payload of a UDP datagram.
pub(super) fn read_udp<'a>(
    payload: &'a [u8],
    route: &Route,
    checksum: Checksum,
) -> Result<(u16, u16, &'a [u8]), Reason> {
    let udp = UdpPacket::new_checked(payload).map_err(|_| Reason::GatewayRefused)?;
    if must_verify(checksum) && !udp.verify_checksum(&route.source.into(), &route.destination.into()) {
        return Err(Reason::GatewayRefused);
    }
    let length = usize::from(udp.len());
    Ok((udp.src_port(), udp.dst_port(), &payload[UDP_BYTES..length]))
}

pub(super) fn ethernet(source: Mac, destination: Mac, ethertype: EthernetProtocol, payload_len: usize) -> Vec<u8> {
    let mut frame = vec![0; ETHERNET_BYTES + payload_len];
    let repr = EthernetRepr { src_addr: EthernetAddress(source), dst_addr: EthernetAddress(destination), ethertype };
    repr.emit(&mut EthernetFrame::new_unchecked(&mut frame[..]));
    frame
}

/// The answer to an ARP request for our own address.
pub(super) fn arp_reply(own_mac: Mac, own: Ipv4Addr, to_mac: Mac, to: Ipv4Addr) -> Vec<u8> {
    let repr = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Reply,
        source_hardware_addr: EthernetAddress(own_mac),
        source_protocol_addr: own,
        target_hardware_addr: EthernetAddress(to_mac),
        target_protocol_addr: to,
    };
    debug_assert_eq!(u16::from(ArpHardware::Ethernet), 1);
    let mut frame = ethernet(own_mac, to_mac, EthernetProtocol::Arp, repr.buffer_len());
    repr.emit(&mut ArpPacket::new_unchecked(&mut frame[ETHERNET_BYTES..]));
    frame
}

/// A frame with an IPv4 header from `from` to `to`, and where its payload of `payload_len` bytes
/// begins.
fn ipv4(route: &Route, next_header: IpProtocol, payload_len: usize) -> (Vec<u8>, usize) {
    let repr = Ipv4Repr {
        src_addr: route.source,
        dst_addr: route.destination,
        next_header,
        payload_len,
        hop_limit: HOP_LIMIT,
    };
    let mut frame = ethernet(route.source_mac, route.destination_mac, EthernetProtocol::Ipv4, IPV4_BYTES + payload_len);
    repr.emit(&mut Ipv4Packet::new_unchecked(&mut frame[ETHERNET_BYTES..]), &ChecksumCapabilities::default());
    (frame, ETHERNET_BYTES + IPV4_BYTES)
}

/// A UDP datagram.
pub(super) fn udp(route: &Route, source_port: u16, destination_port: u16, payload: &[u8]) -> Vec<u8> {
    let (mut frame, at) = ipv4(route, IpProtocol::Udp, UDP_BYTES + payload.len());
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

/// A frame around an IP packet that is complete, for the TCP stack's output.
pub(super) fn around(source: Mac, destination: Mac, packet: &[u8]) -> Vec<u8> {
    let kind =
        if packet.first().is_some_and(|b| b >> 4 == 6) { EthernetProtocol::Ipv6 } else { EthernetProtocol::Ipv4 };
    let mut frame = ethernet(source, destination, kind, packet.len());
    frame[ETHERNET_BYTES..].copy_from_slice(packet);
    frame
}

/// The answer to an ICMP echo request; `None` where `payload` is another message.
pub(super) fn echo_reply(route: &Route, payload: &[u8], checksum: Checksum) -> Result<Option<Vec<u8>>, Reason> {
    let packet = Icmpv4Packet::new_checked(payload).map_err(|_| Reason::GatewayRefused)?;
    if must_verify(checksum) && !packet.verify_checksum() {
        return Err(Reason::GatewayRefused);
    }
    let Ok(Icmpv4Repr::EchoRequest { ident, seq_no, data }) =
        Icmpv4Repr::parse(&packet, &ChecksumCapabilities::ignored())
    else {
        return Ok(None);
    };
    Ok(Some(icmp(&back(route), &Icmpv4Repr::EchoReply { ident, seq_no, data })))
}

fn icmp(route: &Route, repr: &Icmpv4Repr<'_>) -> Vec<u8> {
    let (mut frame, at) = ipv4(route, IpProtocol::Icmp, repr.buffer_len());
    repr.emit(&mut Icmpv4Packet::new_unchecked(&mut frame[at..]), &ChecksumCapabilities::default());
    frame
}

/// An ICMP error from `own` about `packet`, which came by `route`.
pub(super) fn unreachable(route: &Route, own: Ipv4Addr, packet: &[u8], reason: Icmpv4DstUnreachable) -> Vec<u8> {
    let view = Ipv4Packet::new_unchecked(packet);
    let header_len = usize::from(view.header_len());
    let header = Ipv4Repr {
        src_addr: route.source,
        dst_addr: route.destination,
        next_header: view.next_header(),
        payload_len: usize::from(view.total_len()) - header_len,
        hop_limit: view.hop_limit(),
    };
    let quoted = &packet[header_len..packet.len().min(header_len + QUOTED_BYTES)];
    let to = Route { source: own, ..back(route) };
    icmp(&to, &Icmpv4Repr::DstUnreachable { reason, header, data: quoted })
}

/// The reset that answers `segment`, which belongs to no connection (RFC 9293 §3.10.7.1); `None`
/// for a reset.
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
    let to = back(route);
    let (mut frame, at) = ipv4(&to, IpProtocol::Tcp, repr.buffer_len());
    let mut packet = TcpPacket::new_unchecked(&mut frame[at..]);
    repr.emit(&mut packet, &to.source.into(), &to.destination.into(), &ChecksumCapabilities::default());
    Some(frame)
}

pub(super) fn back(route: &Route) -> Route {
    Route {
        source_mac: route.destination_mac,
        destination_mac: route.source_mac,
        source: route.destination,
        destination: route.source,
    }
}
