//! Checksums and segmentation: what a frame says of itself, what the device does, what is done
//! here. Pure.
//!
//! The TCP/IP stack neither computes nor verifies TCP and UDP checksums; this module does, or
//! leaves it to the device:
//!
//! * sending, the device offers `CSUM`: the checksum field gets the sum of the pseudo header, and
//!   the frame's virtio header says where the rest starts and goes. Otherwise the whole checksum is
//!   computed here.
//! * receiving: a frame with `NEEDS_CSUM` or `DATA_VALID` is believed (it comes from a machine of
//!   the same host, or somebody has verified it); any other is verified here, and dropped if it is
//!   wrong.

use core::num::NonZeroU16;
use tombolo_ring::checksum::{add, sum};
use tombolo_ring::virtio::net::{DATA_VALID, GSO_TCPV4, GSO_TCPV6, NEEDS_CSUM, NetHeaderRepr};

const ETHERNET_HEADER_BYTES: usize = 14;
const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const IPV6_HEADER_BYTES: usize = 40;
const PROTOCOL_TCP: u8 = 6;
const PROTOCOL_UDP: u8 = 17;
const TCP_CHECKSUM: usize = 16;
const TCP_HEADER_BYTES: usize = 20;
const TCP_DATA_OFFSET: usize = 12;
const UDP_CHECKSUM: usize = 6;
const UDP_HEADER_BYTES: usize = 8;

/// A TCP or UDP segment inside a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Transport {
    /// Offset of the TCP or UDP header in the frame.
    start: usize,
    /// Offset of the first byte behind the segment.
    end: usize,
    is_tcp: bool,
    is_ipv4: bool,
    /// Sum of the pseudo header without the length.
    addresses: u16,
}

impl Transport {
    fn checksum_offset(&self) -> usize {
        if self.is_tcp { TCP_CHECKSUM } else { UDP_CHECKSUM }
    }

    fn pseudo_header_sum(&self) -> u16 {
        let protocol = if self.is_tcp { PROTOCOL_TCP } else { PROTOCOL_UDP };
        // The length of a segment that the device will cut can be more than 16 bits.
        let len = (self.end - self.start) as u32;
        let len = add(len as u16, (len >> 16) as u16);
        add(self.addresses, add(protocol.into(), len))
    }

    /// Finds the segment; `None` for anything else, for fragments, and for lengths that do not fit
    /// the frame.
    fn find(frame: &[u8]) -> Option<Transport> {
        let kind = frame.get(12..14)?;
        let (protocol, start, end, addresses) = if kind == TYPE_IPV4 {
            let header = frame.get(ETHERNET_HEADER_BYTES..ETHERNET_HEADER_BYTES + 20)?;
            let header_bytes = usize::from(header[0] & 0xf) * 4;
            let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff;
            if header[0] >> 4 != 4 || header_bytes < 20 || fragment != 0 {
                return None;
            }
            // 0 where segmentation by the device makes it more than 16 bits hold.
            let end = match usize::from(u16::from_be_bytes([header[2], header[3]])) {
                0 => frame.len(),
                total => ETHERNET_HEADER_BYTES + total,
            };
            (header[9], ETHERNET_HEADER_BYTES + header_bytes, end, sum(&header[12..20]))
        } else if kind == TYPE_IPV6 {
            let header = frame.get(ETHERNET_HEADER_BYTES..ETHERNET_HEADER_BYTES + IPV6_HEADER_BYTES)?;
            let start = ETHERNET_HEADER_BYTES + IPV6_HEADER_BYTES;
            let end = match usize::from(u16::from_be_bytes([header[4], header[5]])) {
                0 => frame.len(),
                payload => start + payload,
            };
            (header[6], start, end, sum(&header[8..40]))
        } else {
            return None;
        };
        let header_bytes = match protocol {
            PROTOCOL_TCP => TCP_HEADER_BYTES,
            PROTOCOL_UDP => UDP_HEADER_BYTES,
            _ => return None,
        };
        let fits = start + header_bytes <= end && end <= frame.len();
        let (is_tcp, is_ipv4) = (protocol == PROTOCOL_TCP, kind == TYPE_IPV4);
        fits.then_some(Transport { start, end, is_tcp, is_ipv4, addresses })
    }
}

/// Completes a frame that the stack has built, whose TCP or UDP checksum is missing, and says what
/// the device is to do. `offload`: the device computes checksums. `segment_bytes`: it also cuts the
/// payload into pieces of this size.
pub(crate) fn finish(frame: &mut [u8], offload: bool, segment_bytes: Option<NonZeroU16>) -> NetHeaderRepr {
    let mut header = NetHeaderRepr { num_buffers: 0, ..NetHeaderRepr::PLAIN };
    let Some(transport) = Transport::find(frame) else { return header };
    let at = transport.start + transport.checksum_offset();
    if !offload {
        frame[at..at + 2].fill(0);
        let whole = add(transport.pseudo_header_sum(), sum(&frame[transport.start..transport.end]));
        let checksum = match !whole {
            0 if !transport.is_tcp => 0xffff,
            checksum => checksum,
        };
        frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
        return header;
    }
    frame[at..at + 2].copy_from_slice(&transport.pseudo_header_sum().to_be_bytes());
    header.flags = NEEDS_CSUM;
    header.csum_start = transport.start as u16;
    header.csum_offset = transport.checksum_offset() as u16;
    if let Some(size) = segment_bytes.filter(|_| transport.is_tcp) {
        let tcp_header = usize::from(frame[transport.start + TCP_DATA_OFFSET] >> 4) * 4;
        header.gso_type = if transport.is_ipv4 { GSO_TCPV4 } else { GSO_TCPV6 };
        header.gso_size = size.get();
        header.hdr_len = (transport.start + tcp_header) as u16;
    }
    header
}

/// Whether a received frame's checksum is right, or vouched for by its header, or not this module's
/// to judge.
pub(crate) fn is_sound(frame: &[u8], header: &NetHeaderRepr) -> bool {
    if header.flags & (NEEDS_CSUM | DATA_VALID) != 0 {
        return true;
    }
    let Some(transport) = Transport::find(frame) else { return true };
    let at = transport.start + transport.checksum_offset();
    if !transport.is_tcp && transport.is_ipv4 && frame[at..at + 2] == [0, 0] {
        return true;
    }
    add(transport.pseudo_header_sum(), sum(&frame[transport.start..transport.end])) == 0xffff
}

/// Whether a frame asks for a new TCP connection: listeners have to keep one socket ready for each.
pub(crate) fn is_tcp_syn(frame: &[u8]) -> bool {
    const FLAGS: usize = 13;
    const SYN: u8 = 2;
    const ACK: u8 = 16;
    Transport::find(frame).is_some_and(|t| t.is_tcp && frame[t.start + FLAGS] & (SYN | ACK) == SYN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use smoltcp::phy::ChecksumCapabilities;
    use smoltcp::wire::{
        EthernetAddress, EthernetFrame, EthernetProtocol, IpAddress, IpProtocol, Ipv4Address, Ipv4Packet, Ipv4Repr,
        Ipv6Address, Ipv6Packet, Ipv6Repr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber, TcpTimestampRepr, UdpPacket,
        UdpRepr,
    };
    use std::vec::Vec;

    /// A frame with a right checksum, made by smoltcp: the simple model.
    fn frame(tcp: bool, v4: bool, payload: &[u8]) -> Vec<u8> {
        let caps = ChecksumCapabilities::default();
        let (src, dst): (IpAddress, IpAddress) = if v4 {
            (Ipv4Address::new(10, 1, 2, 3).into(), Ipv4Address::new(10, 9, 8, 255).into())
        } else {
            (Ipv6Address::new(0xfd00, 0, 0, 0, 1, 2, 3, 4).into(), Ipv6Address::new(0xfe80, 1, 0, 0, 0, 0, 0, 9).into())
        };
        let tcp_repr = TcpRepr {
            src_port: 80,
            dst_port: 40000,
            control: TcpControl::Syn,
            seq_number: TcpSeqNumber(77),
            ack_number: None,
            window_len: 65535,
            window_scale: Some(7),
            max_seg_size: Some(1460),
            sack_permitted: true,
            sack_ranges: [None; 3],
            timestamp: None::<TcpTimestampRepr>,
            payload,
        };
        let udp_repr = UdpRepr { src_port: 7, dst_port: 40000 };
        let len = if tcp { tcp_repr.buffer_len() } else { udp_repr.header_len() + payload.len() };
        let protocol = if tcp { IpProtocol::Tcp } else { IpProtocol::Udp };
        let ip_header = if v4 { 20 } else { 40 };
        let mut bytes = std::vec![0xa5; 14 + ip_header + len];
        let mut ethernet = EthernetFrame::new_unchecked(&mut bytes[..]);
        ethernet.set_src_addr(EthernetAddress([2, 0, 0, 0, 0, 1]));
        ethernet.set_dst_addr(EthernetAddress([2, 0, 0, 0, 0, 2]));
        ethernet.set_ethertype(if v4 { EthernetProtocol::Ipv4 } else { EthernetProtocol::Ipv6 });
        match (src, dst) {
            (IpAddress::Ipv4(src_addr), IpAddress::Ipv4(dst_addr)) => {
                Ipv4Repr { src_addr, dst_addr, next_header: protocol, payload_len: len, hop_limit: 64 }
                    .emit(&mut Ipv4Packet::new_unchecked(ethernet.payload_mut()), &caps)
            }
            (IpAddress::Ipv6(src_addr), IpAddress::Ipv6(dst_addr)) => {
                Ipv6Repr { src_addr, dst_addr, next_header: protocol, payload_len: len, hop_limit: 64 }
                    .emit(&mut Ipv6Packet::new_unchecked(ethernet.payload_mut()))
            }
            _ => unreachable!(),
        }
        let segment = &mut bytes[14 + ip_header..];
        if tcp {
            tcp_repr.emit(&mut TcpPacket::new_unchecked(segment), &src, &dst, &caps);
        } else {
            udp_repr.emit(
                &mut UdpPacket::new_unchecked(segment),
                &src,
                &dst,
                payload.len(),
                |to| to.copy_from_slice(payload),
                &caps,
            );
        }
        bytes
    }

    fn each_kind(mut check: impl FnMut(bool, bool, &[u8])) {
        let payload: Vec<u8> = (0..999u32).map(|i| (i * 31 % 251) as u8).collect();
        for len in [0, 1, 2, 7, 8, 9, 63, 100, 999] {
            for (tcp, v4) in [(true, true), (true, false), (false, true), (false, false)] {
                check(tcp, v4, &payload[..len]);
            }
        }
    }

    #[test]
    fn right_checksums_pass_and_every_flipped_byte_is_seen() {
        each_kind(|tcp, v4, payload| {
            let good = frame(tcp, v4, payload);
            assert!(is_sound(&good, &NetHeaderRepr::PLAIN));
            let start = if v4 { 34 } else { 54 };
            for at in (start..good.len()).step_by(13) {
                let mut bad = good.clone();
                bad[at] ^= 0x10;
                // A UDP length that no longer matches is the stack's to refuse.
                assert!(!is_sound(&bad, &NetHeaderRepr::PLAIN), "byte {at} of {}", good.len());
                assert!(is_sound(&bad, &NetHeaderRepr { flags: DATA_VALID, ..NetHeaderRepr::PLAIN }));
            }
        });
    }

    #[test]
    fn without_offload_the_checksum_is_the_one_smoltcp_computes() {
        each_kind(|tcp, v4, payload| {
            let want = frame(tcp, v4, payload);
            let mut got = want.clone();
            let at = if v4 { 34 } else { 54 } + if tcp { 16 } else { 6 };
            got[at..at + 2].copy_from_slice(&[0xde, 0xad]);
            let header = finish(&mut got, false, None);
            assert_eq!((header.flags, got == want), (0, true), "tcp {tcp} v4 {v4} {}", payload.len());
        });
    }

    #[test]
    fn with_offload_a_device_that_sums_gets_the_same() {
        each_kind(|tcp, v4, payload| {
            let want = frame(tcp, v4, payload);
            let mut got = want.clone();
            let header = finish(&mut got, true, NonZeroU16::new(1000));
            assert_eq!(header.flags, NEEDS_CSUM);
            assert_eq!(
                header.gso_type,
                if !tcp {
                    0
                } else if v4 {
                    GSO_TCPV4
                } else {
                    GSO_TCPV6
                }
            );
            // What a device does (VirtIO 1.3 §5.1.6.2).
            let start = usize::from(header.csum_start);
            let at = start + usize::from(header.csum_offset);
            let checksum = !sum(&got[start..]);
            got[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
            assert_eq!(got, want);
            if tcp {
                assert_eq!(usize::from(header.hdr_len), want.len() - payload.len());
            }
        });
    }

    #[test]
    fn truncated_frames_and_other_protocols_are_left_alone() {
        let whole = frame(true, true, b"payload");
        for len in 0..whole.len() {
            let mut cut = whole[..len].to_vec();
            assert!(is_sound(&cut, &NetHeaderRepr::PLAIN), "{len}");
            assert_eq!(finish(&mut cut, true, None).flags, 0);
            assert_eq!(cut, whole[..len]);
            assert!(!is_tcp_syn(&cut));
        }
        assert!(is_tcp_syn(&whole));
        assert!(!is_tcp_syn(&frame(false, true, b"x")));
    }
}
