//! The packets that [`super::Nat`] rewrites: Ethernet, ARP, IPv4 and the transports, in place in a frame.
//!
//! A header that was checked ([`Ipv4::of`], [`Ipv4::transport`]) lies within its frame, so no accessor panics on the
//! frame that it was read from. Checksums of forwarded packets are updated by difference (RFC 1624), never recomputed,
//! so a frame damaged on the way stays damaged.

use std::net::Ipv4Addr;

use super::flow::Protocol;
use crate::drop::Reason;
use crate::frame::Mac;
use tombolo_ring::checksum::{self, add, sum};

pub(super) const ETHERTYPE_IPV4: u16 = 0x0800;
pub(super) const ETHERTYPE_ARP: u16 = 0x0806;
pub(super) const BROADCAST: Mac = [0xff; 6];
// TCP flags: RFC 9293 §3.1.
pub(super) const FIN: u8 = 0x01;
pub(super) const SYN: u8 = 0x02;
pub(super) const RST: u8 = 0x04;
pub(super) const ACK: u8 = 0x10;

pub(super) struct Ethernet {
    pub(super) to: Mac,
    pub(super) from: Mac,
    pub(super) kind: u16,
}

impl Ethernet {
    pub(super) fn of(frame: &[u8]) -> Option<Ethernet> {
        let (to, rest) = frame.split_first_chunk::<6>()?;
        let (from, rest) = rest.split_first_chunk::<6>()?;
        let (kind, _) = rest.split_first_chunk::<2>()?;
        Some(Ethernet { to: *to, from: *from, kind: u16::from_be_bytes(*kind) })
    }
}

/// A frame that carries an IPv4 packet.
pub(super) fn ethernet(to: Mac, from: Mac, packet: &[u8]) -> Vec<u8> {
    [&to[..], &from, &ETHERTYPE_IPV4.to_be_bytes(), packet].concat()
}

/// RFC 826 for Ethernet and IPv4: 28 bytes behind the Ethernet header.
pub(super) const ARP_BYTES: usize = 14 + 28;

pub(super) struct Arp {
    pub(super) operation: u16,
    pub(super) sender: Mac,
    pub(super) sender_ip: Ipv4Addr,
    pub(super) target_ip: Ipv4Addr,
}

impl Arp {
    pub(super) fn of(frame: &[u8]) -> Option<Arp> {
        let body: &[u8; 28] = frame.get(14..ARP_BYTES)?.try_into().ok()?;
        if body[..6] != [0, 1, 8, 0, 6, 4] {
            return None;
        }
        let mut sender = [0; 6];
        sender.copy_from_slice(&body[8..14]);
        Some(Arp {
            operation: u16::from_be_bytes([body[6], body[7]]),
            sender,
            sender_ip: Ipv4Addr::new(body[14], body[15], body[16], body[17]),
            target_ip: Ipv4Addr::new(body[24], body[25], body[26], body[27]),
        })
    }
}

pub(super) fn arp(
    operation: u8,
    sender: Mac,
    sender_ip: Ipv4Addr,
    target: Mac,
    target_ip: Ipv4Addr,
    to: Mac,
) -> Vec<u8> {
    let mut out = Vec::with_capacity(ARP_BYTES);
    out.extend_from_slice(&to);
    out.extend_from_slice(&sender);
    out.extend_from_slice(&[0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, operation]);
    out.extend_from_slice(&sender);
    out.extend_from_slice(&sender_ip.octets());
    out.extend_from_slice(&target);
    out.extend_from_slice(&target_ip.octets());
    out
}

/// A checked IPv4 header: `end` is within the frame.
pub(super) struct Ipv4 {
    pub(super) header_bytes: usize,
    /// End of the packet in the frame; padding may follow.
    pub(super) end: usize,
    pub(super) protocol: u8,
    pub(super) from: Ipv4Addr,
    pub(super) to: Ipv4Addr,
    pub(super) fragment: bool,
}

pub(super) const IP_AT: usize = 14;

impl Ipv4 {
    pub(super) fn of(frame: &[u8]) -> Result<Ipv4, Reason> {
        let header: &[u8; 20] =
            frame.get(IP_AT..IP_AT + 20).and_then(|h| h.try_into().ok()).ok_or(Reason::NotTransformable)?;
        let header_bytes = usize::from(header[0] & 15) * 4;
        let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
        if header[0] >> 4 != 4 || header_bytes < 20 || total < header_bytes || IP_AT + total > frame.len() {
            return Err(Reason::NotTransformable);
        }
        Ok(Ipv4 {
            header_bytes,
            end: IP_AT + total,
            protocol: header[9],
            from: Ipv4Addr::new(header[12], header[13], header[14], header[15]),
            to: Ipv4Addr::new(header[16], header[17], header[18], header[19]),
            // More fragments, or an offset: RFC 791 §3.1.
            fragment: u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0,
        })
    }

    pub(super) fn transport(&self, frame: &[u8]) -> Result<Transport, Reason> {
        let protocol = Protocol::of(self.protocol).ok_or(Reason::NotTransformable)?;
        let at = IP_AT + self.header_bytes;
        let least = if protocol == Protocol::Tcp { 20 } else { 8 };
        if self.fragment || at + least > self.end {
            return Err(Reason::NotTransformable);
        }
        // Echo request and reply only: RFC 792.
        if protocol == Protocol::Echo && !matches!(frame[at], 0 | 8) {
            return Err(Reason::NotTransformable);
        }
        Ok(Transport { protocol, at, end: self.end })
    }

    /// Whether [`Ipv4::live`] would let it pass.
    pub(super) fn outlives_a_hop(&self, frame: &[u8]) -> bool {
        frame[IP_AT + 8] > 1
    }

    /// One hop less to live.
    pub(super) fn live(&self, frame: &mut [u8]) -> Result<(), Reason> {
        let ttl = frame[IP_AT + 8];
        if !self.outlives_a_hop(frame) {
            return Err(Reason::NoDestination);
        }
        let old = u16::from_be_bytes([ttl, self.protocol]);
        frame[IP_AT + 8] = ttl - 1;
        update(frame, IP_AT + 10, &[old], &[u16::from_be_bytes([ttl - 1, self.protocol])]);
        Ok(())
    }

    pub(super) fn rewrite_source(&self, frame: &mut [u8], to: Ipv4Addr) {
        frame[IP_AT + 12..IP_AT + 16].copy_from_slice(&to.octets());
        update(frame, IP_AT + 10, &words(self.from), &words(to));
    }

    pub(super) fn rewrite_destination(&self, frame: &mut [u8], to: Ipv4Addr) {
        frame[IP_AT + 16..IP_AT + 20].copy_from_slice(&to.octets());
        update(frame, IP_AT + 10, &words(self.to), &words(to));
    }
}

pub(super) struct Transport {
    pub(super) protocol: Protocol,
    pub(super) at: usize,
    /// End of the packet in the frame.
    pub(super) end: usize,
}

impl Transport {
    pub(super) fn source_at(&self) -> usize {
        if self.protocol == Protocol::Echo { self.at + 4 } else { self.at }
    }

    pub(super) fn source(&self, frame: &[u8]) -> u16 {
        word(frame, self.source_at())
    }

    pub(super) fn destination(&self, frame: &[u8]) -> u16 {
        if self.protocol == Protocol::Echo { 0 } else { word(frame, self.at + 2) }
    }

    pub(super) fn is_echo_request(&self, frame: &[u8]) -> bool {
        frame[self.at] == 8
    }

    /// The flags of a TCP segment, and whether it carries data.
    pub(super) fn flags(&self, frame: &[u8]) -> (u8, bool) {
        let data_at = self.at + usize::from(frame[self.at + 12] >> 4) * 4;
        (frame[self.at + 13], data_at < self.end)
    }

    /// The packet that refuses a TCP segment (RFC 9293 §3.10.7.1); none for a reset, nor for other protocols.
    pub(super) fn reset(&self, frame: &[u8], from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> Option<Vec<u8>> {
        if self.protocol != Protocol::Tcp {
            return None;
        }
        let segment = &frame[self.at..self.end];
        let flags = segment[13];
        if flags & RST != 0 {
            return None;
        }
        let [sequence, acknowledged] = [4, 8].map(|at| u32::from_be_bytes([0, 1, 2, 3].map(|i| segment[at + i])));
        let data = segment.len().saturating_sub(usize::from(segment[12] >> 4) * 4) as u32;
        let length = data + u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        let (own, next, answer) =
            if flags & ACK != 0 { (acknowledged, 0, RST) } else { (0, sequence.wrapping_add(length), RST | ACK) };
        let mut out = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0];
        out.extend([from.0.octets(), to.0.octets()].concat());
        out.extend([from.1.to_be_bytes(), to.1.to_be_bytes()].concat());
        out.extend([own.to_be_bytes(), next.to_be_bytes(), [0x50, answer, 0, 0], [0; 4]].concat());
        let header = !sum(&out[..20]);
        out[10..12].copy_from_slice(&header.to_be_bytes());
        // RFC 9293 §3.1: addresses, protocol and length go before the segment.
        let segment = !add(add(sum(&out[12..20]), sum(&[0, 6, 0, 20])), sum(&out[20..]));
        out[36..38].copy_from_slice(&segment.to_be_bytes());
        Some(out)
    }

    /// Writes a port (or echo identifier) at `at`; `address` is the change of an address in the pseudo-header.
    pub(super) fn rewrite(&self, frame: &mut [u8], at: usize, port: u16, address: Option<(Ipv4Addr, Ipv4Addr)>) {
        let old = word(frame, at);
        frame[at..at + 2].copy_from_slice(&port.to_be_bytes());
        let sum_at = match self.protocol {
            Protocol::Tcp => self.at + 16,
            Protocol::Udp => self.at + 6,
            Protocol::Echo => self.at + 2,
        };
        // A UDP sum of zero means that there is none: RFC 768.
        if self.protocol == Protocol::Udp && word(frame, sum_at) == 0 {
            return;
        }
        update(frame, sum_at, &[old], &[port]);
        if let (Some((from, to)), false) = (address, self.protocol == Protocol::Echo) {
            update(frame, sum_at, &words(from), &words(to));
        }
        if self.protocol == Protocol::Udp && word(frame, sum_at) == 0 {
            frame[sum_at..sum_at + 2].copy_from_slice(&[0xff, 0xff]);
        }
    }
}

pub(super) fn word(frame: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

pub(super) fn words(ip: Ipv4Addr) -> [u16; 2] {
    let [a, b, c, d] = ip.octets();
    [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])]
}

/// Corrects the checksum at `at` where the words `old` became `new`.
pub(super) fn update(frame: &mut [u8], at: usize, old: &[u16], new: &[u16]) {
    let total = |words: &[u16]| words.iter().fold(0, |total, word| add(total, *word));
    let checksum = checksum::update(word(frame, at), total(old), total(new));
    frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
}
