//! The packets that [`super::Nat`] rewrites: Ethernet, IP and the transports, in place in a frame.
//!
//! A header that was checked ([`Ip::of`], [`Ip::transport`]) lies within its frame, so no accessor panics on the
//! frame that it was read from. Checksums of forwarded packets are updated by difference (RFC 1624), never recomputed,
//! so a frame damaged on the way stays damaged.

use super::family::{Address, Header};
use super::flow::Protocol;
use crate::drop::Reason;
use crate::frame::Mac;
use tombolo_ring::checksum::{self, add, sum};

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
    #[inline]
    pub(super) fn of(frame: &[u8]) -> Option<Ethernet> {
        let (to, rest) = frame.split_first_chunk::<6>()?;
        let (from, rest) = rest.split_first_chunk::<6>()?;
        let (kind, _) = rest.split_first_chunk::<2>()?;
        Some(Ethernet { to: *to, from: *from, kind: u16::from_be_bytes(*kind) })
    }
}

/// A frame that carries a packet of the family.
pub(super) fn ethernet<A: Address>(to: Mac, from: Mac, packet: &[u8]) -> Vec<u8> {
    [&to[..], &from, &A::ETHERTYPE.to_be_bytes(), packet].concat()
}

/// A packet with right sums; the one of `body` is at `sum_at` there, zero before.
pub(super) fn compose<A: Address>(protocol: u8, from: A, to: A, body: &[u8], sum_at: usize) -> Vec<u8> {
    let mut out = A::compose(protocol, from, to, body.len());
    let at = out.len();
    out.extend_from_slice(body);
    let mut total = sum(body);
    if protocol != A::ICMP || A::ICMP_COVERS_ADDRESSES {
        // The pseudo-header: RFC 9293 §3.1, RFC 8200 §8.1.
        total = add(add(total, add(from.total(), to.total())), add(u16::from(protocol), body.len() as u16));
    }
    out[at + sum_at..at + sum_at + 2].copy_from_slice(&(!total).to_be_bytes());
    out
}

/// A checked IP header: `transport_at` and `end` are within the frame.
pub(super) struct Ip<A> {
    /// Where the transport begins in the frame.
    pub(super) transport_at: usize,
    /// End of the packet in the frame; padding may follow.
    pub(super) end: usize,
    pub(super) protocol: u8,
    pub(super) from: A,
    pub(super) to: A,
    pub(super) fragment: bool,
    pub(super) later_fragment: bool,
}

pub(super) const IP_AT: usize = 14;

impl<A: Address> Ip<A> {
    pub(super) fn of(frame: &[u8]) -> Result<Ip<A>, Reason> {
        let header = frame.get(IP_AT..).and_then(A::header).ok_or(Reason::NotTransformable)?;
        let Header { bytes, total, protocol, from, to, fragment, later_fragment } = header;
        if total < bytes || IP_AT + total > frame.len() {
            return Err(Reason::NotTransformable);
        }
        let (transport_at, end) = (IP_AT + bytes, IP_AT + total);
        Ok(Ip { transport_at, end, protocol, from, to, fragment, later_fragment })
    }

    pub(super) fn transport(&self, frame: &[u8]) -> Result<Transport, Reason> {
        let protocol = Protocol::of::<A>(self.protocol).ok_or(Reason::NotTransformable)?;
        let at = self.transport_at;
        let least = if protocol == Protocol::Tcp { 20 } else { 8 };
        if self.fragment || at + least > self.end {
            return Err(Reason::NotTransformable);
        }
        // Echo request and reply only: RFC 792, RFC 4443.
        if protocol == Protocol::Echo && !A::ECHO.contains(&frame[at]) {
            return Err(Reason::NotTransformable);
        }
        Ok(Transport { protocol, at, end: self.end })
    }

    /// Whether [`Ip::live`] would let it pass.
    pub(super) fn outlives_a_hop(&self, frame: &[u8]) -> bool {
        frame[IP_AT + A::HOPS_AT] > 1
    }

    /// One hop less to live.
    pub(super) fn live(&self, frame: &mut [u8]) -> Result<(), Reason> {
        if !self.outlives_a_hop(frame) {
            return Err(Reason::NoDestination);
        }
        // IPv4 covers it with its sum, as the first half of a word.
        let at = IP_AT + A::HOPS_AT;
        let old = word(frame, at);
        frame[at] -= 1;
        if let Some(sum_at) = A::SUM_AT {
            update(frame, IP_AT + sum_at, &[old], &[word(frame, at)]);
        }
        Ok(())
    }

    pub(super) fn rewrite_source(&self, frame: &mut [u8], to: A) {
        self.rewrite(frame, A::SOURCE_AT, self.from, to);
    }

    pub(super) fn rewrite_destination(&self, frame: &mut [u8], to: A) {
        self.rewrite(frame, A::SOURCE_AT + A::BYTES, self.to, to);
    }

    fn rewrite(&self, frame: &mut [u8], at: usize, old: A, new: A) {
        let at = IP_AT + at;
        frame[at..at + A::BYTES].copy_from_slice(new.bytes().as_ref());
        if let Some(sum_at) = A::SUM_AT {
            update(frame, IP_AT + sum_at, &[old.total()], &[new.total()]);
        }
    }
}

/// The one's complement sums of the addresses of a packet before and after they were rewritten.
#[derive(Clone, Copy)]
pub(super) struct Readdressed {
    pub(super) old: u16,
    pub(super) new: u16,
}

impl Readdressed {
    pub(super) fn of<A: Address>(old: A, new: A) -> Readdressed {
        Readdressed { old: old.total(), new: new.total() }
    }

    /// With another address of the packet.
    pub(super) fn and<A: Address>(self, old: A, new: A) -> Readdressed {
        Readdressed { old: add(self.old, old.total()), new: add(self.new, new.total()) }
    }
}

pub(super) struct Transport {
    pub(super) protocol: Protocol,
    pub(super) at: usize,
    /// End of the packet in the frame.
    pub(super) end: usize,
}

impl Transport {
    #[inline]
    pub(super) fn source_at(&self) -> usize {
        if self.protocol == Protocol::Echo { self.at + 4 } else { self.at }
    }

    #[inline]
    pub(super) fn source(&self, frame: &[u8]) -> u16 {
        word(frame, self.source_at())
    }

    #[inline]
    pub(super) fn destination(&self, frame: &[u8]) -> u16 {
        if self.protocol == Protocol::Echo { 0 } else { word(frame, self.at + 2) }
    }

    pub(super) fn is_echo_request<A: Address>(&self, frame: &[u8]) -> bool {
        frame[self.at] == A::ECHO[0]
    }

    /// The flags of a TCP segment, and whether it carries data.
    #[inline]
    pub(super) fn flags(&self, frame: &[u8]) -> (u8, bool) {
        let data_at = self.at + usize::from(frame[self.at + 12] >> 4) * 4;
        (frame[self.at + 13], data_at < self.end)
    }

    /// The packet that refuses a TCP segment (RFC 9293 §3.10.7.1); none for a reset, nor for other protocols.
    pub(super) fn reset<A: Address>(&self, frame: &[u8], from: (A, u16), to: (A, u16)) -> Option<Vec<u8>> {
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
        let ports = [from.1.to_be_bytes(), to.1.to_be_bytes()].concat();
        let numbers = [own.to_be_bytes(), next.to_be_bytes(), [0x50, answer, 0, 0], [0; 4]].concat();
        Some(compose(6, from.0, to.0, &[ports, numbers].concat(), 16))
    }

    /// Writes a port (or echo identifier) at `at`; `addresses` is the change in the pseudo-header.
    pub(super) fn rewrite<A: Address>(&self, frame: &mut [u8], at: usize, port: u16, addresses: Readdressed) {
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
        if self.protocol != Protocol::Echo || A::ICMP_COVERS_ADDRESSES {
            update(frame, sum_at, &[addresses.old], &[addresses.new]);
        }
        if self.protocol == Protocol::Udp && word(frame, sum_at) == 0 {
            frame[sum_at..sum_at + 2].copy_from_slice(&[0xff, 0xff]);
        }
    }
}

#[inline]
pub(super) fn word(frame: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

/// Corrects the checksum at `at` where the words `old` became `new`.
#[inline]
pub(super) fn update(frame: &mut [u8], at: usize, old: &[u16], new: &[u16]) {
    let total = |words: &[u16]| words.iter().fold(0, |total, word| add(total, *word));
    let checksum = checksum::update(word(frame, at), total(old), total(new));
    frame[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
}
