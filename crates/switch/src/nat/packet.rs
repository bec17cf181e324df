//! The packets that [`super::Nat`] rewrites: Ethernet, IP and the transports, in place in a frame.
//!
//! A header that was checked ([`Ip::of`], [`Ip::transport`]) lies within its frame, so no accessor
//! panics on the frame that it was read from. Checksums of forwarded packets are updated by
//! difference (RFC 1624), never recomputed, so a frame damaged on the way stays damaged.

use super::family::{Address, Header};
use super::flow::Protocol;
use crate::drop::Reason;
use crate::frame::Mac;
use tombolo_ring::checksum::{self, add, sum};

pub(super) const BROADCAST: Mac = [0xff; 6];
// Fields of the transports that are read or rewritten: RFC 9293 §3.1, RFC 768, RFC 792, RFC 4443
// §4.
const SOURCE_PORT_AT: usize = 0;
const DESTINATION_PORT_AT: usize = 2;
const TCP_SEQUENCE_AT: usize = 4;
const TCP_ACKNOWLEDGED_AT: usize = 8;
const TCP_DATA_AT: usize = 12;
const TCP_FLAGS_AT: usize = 13;
const TCP_SUM_AT: usize = 16;
const TCP_BYTES: usize = 20;
// Its options (RFC 9293 §3.2): the end of the list, one byte of nothing, the largest segment.
const END_OF_OPTIONS: u8 = 0;
const NO_OPTION: u8 = 1;
const MSS_OPTION: u8 = 2;
const MSS_BYTES: usize = 4;
/// The smallest segment size that a peer is told of: that of Linux (`tcp_min_snd_mss`), which does
/// not send smaller ones either. passt of Debian 12 ends by a division by zero where it is below 4.
const LEAST_MSS: u16 = 48;
const UDP_SUM_AT: usize = 6;
const UDP_BYTES: usize = 8;
const ECHO_SUM_AT: usize = 2;
const ECHO_IDENTIFIER_AT: usize = 4;
const ECHO_BYTES: usize = 8;
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
        let least = match protocol {
            Protocol::Tcp => TCP_BYTES,
            Protocol::Udp => UDP_BYTES,
            Protocol::Echo => ECHO_BYTES,
        };
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
        match self.protocol {
            Protocol::Echo => self.at + ECHO_IDENTIFIER_AT,
            _ => self.at + SOURCE_PORT_AT,
        }
    }

    #[inline]
    pub(super) fn source(&self, frame: &[u8]) -> u16 {
        word(frame, self.source_at())
    }

    #[inline]
    pub(super) fn destination(&self, frame: &[u8]) -> u16 {
        if self.protocol == Protocol::Echo { 0 } else { word(frame, self.at + DESTINATION_PORT_AT) }
    }

    pub(super) fn is_echo_request<A: Address>(&self, frame: &[u8]) -> bool {
        frame[self.at] == A::ECHO[0]
    }

    /// The flags of a TCP segment, and whether it carries data.
    #[inline]
    pub(super) fn flags(&self, frame: &[u8]) -> (u8, bool) {
        let data_at = self.at + usize::from(frame[self.at + TCP_DATA_AT] >> 4) * 4;
        (frame[self.at + TCP_FLAGS_AT], data_at < self.end)
    }

    /// The packet that refuses a TCP segment (RFC 9293 §3.10.7.1); none for a reset, nor for other
    /// protocols.
    pub(super) fn reset<A: Address>(&self, frame: &[u8], from: (A, u16), to: (A, u16)) -> Option<Vec<u8>> {
        if self.protocol != Protocol::Tcp {
            return None;
        }
        let segment = &frame[self.at..self.end];
        let flags = segment[TCP_FLAGS_AT];
        if flags & RST != 0 {
            return None;
        }
        let [sequence, acknowledged] =
            [TCP_SEQUENCE_AT, TCP_ACKNOWLEDGED_AT].map(|at| u32::from_be_bytes([0, 1, 2, 3].map(|i| segment[at + i])));
        let data = segment.len().saturating_sub(usize::from(segment[TCP_DATA_AT] >> 4) * 4) as u32;
        let length = data + u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        let (own, next, answer) =
            if flags & ACK != 0 { (acknowledged, 0, RST) } else { (0, sequence.wrapping_add(length), RST | ACK) };
        let ports = [from.1.to_be_bytes(), to.1.to_be_bytes()].concat();
        let numbers = [own.to_be_bytes(), next.to_be_bytes(), [0x50, answer, 0, 0], [0; 4]].concat();
        Some(compose(6, from.0, to.0, &[ports, numbers].concat(), TCP_SUM_AT))
    }

    /// Writes a port (or echo identifier) at `at`; `addresses` is the change in the pseudo-header.
    pub(super) fn rewrite<A: Address>(&self, frame: &mut [u8], at: usize, port: u16, addresses: Readdressed) {
        let old = word(frame, at);
        frame[at..at + 2].copy_from_slice(&port.to_be_bytes());
        let sum_at = match self.protocol {
            Protocol::Tcp => self.at + TCP_SUM_AT,
            Protocol::Udp => self.at + UDP_SUM_AT,
            Protocol::Echo => self.at + ECHO_SUM_AT,
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
        if self.protocol == Protocol::Tcp && frame[self.at + TCP_FLAGS_AT] & SYN != 0 {
            self.raise_mss(frame);
        }
    }

    /// Raises the largest segment size that a SYN asks for to [`LEAST_MSS`].
    fn raise_mss(&self, frame: &mut [u8]) {
        let end = self.end.min(self.at + usize::from(frame[self.at + TCP_DATA_AT] >> 4) * 4);
        let mut at = self.at + TCP_BYTES;
        while at < end && frame[at] != END_OF_OPTIONS {
            if frame[at] == NO_OPTION {
                at += 1;
                continue;
            }
            let Some(bytes) = frame[..end].get(at + 1).map(|bytes| usize::from(*bytes)) else { return };
            if bytes < 2 || at + bytes > end {
                return;
            }
            if frame[at] == MSS_OPTION && bytes == MSS_BYTES {
                let old = word(frame, at + 2);
                if old < LEAST_MSS {
                    frame[at + 2..at + MSS_BYTES].copy_from_slice(&LEAST_MSS.to_be_bytes());
                    // The sum is over words from the header's start: at an odd place a value is in two of them.
                    let is_odd = (at - self.at) % 2 == 1;
                    let [old, new] = [old, LEAST_MSS].map(|word| if is_odd { word.swap_bytes() } else { word });
                    update(frame, self.at + TCP_SUM_AT, &[old], &[new]);
                }
            }
            at += bytes;
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

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use tombolo_testing::hex;

    use super::*;

    // Packets of a guest and what kernel 6.18 made of them as a router between two veth pairs, with
    // nftables' `masquerade to :40000` (`masquerade` for echo requests): TCP's SYN, a datagram and
    // an echo request. Lines: Ethernet, IP, transport.

    const V4: [[&str; 2]; 3] = [
        [
            "020000000002 020000000009 0800
            4500 0028 00010000 40 06 4635 0a570009 c6336407
            1389 0050 01020304 00000000 5002 faf0 6878 0000",
            "020000000001 020000000003 0800
            4500 0028 00010000 3f 06 9192 c0000002 c6336407
            9c40 0050 01020304 00000000 5002 faf0 2a1e 0000",
        ],
        [
            "020000000002 020000000009 0800
            4500 0021 00010000 40 11 4631 0a570009 c6336407
            1389 0035 000d 73a9 68656c6c6f",
            "020000000001 020000000003 0800
            4500 0021 00010000 3f 11 918e c0000002 c6336407
            9c40 0035 000d 354f 68656c6c6f",
        ],
        [
            "020000000002 020000000009 0800
            4500 0021 00010000 40 01 4641 0a570009 c6336407
            0800 a0a3 1389 0001 68656c6c6f",
            "020000000001 020000000003 0800
            4500 0021 00010000 3f 01 919e c0000002 c6336407
            0800 a0a3 1389 0001 68656c6c6f",
        ],
    ];
    const V6: [[&str; 2]; 3] = [
        [
            "020000000002 020000000009 86dd
            60000000 0014 06 40 fd870000000000000000000000000009 20010db8000000000000000000000007
            1389 0050 01020304 00000000 5002 faf0 71c2 0000",
            "020000000001 020000000003 86dd
            60000000 0014 06 3f fd920000000000000000000000000002 20010db8000000000000000000000007
            9c40 0050 01020304 00000000 5002 faf0 e906 0000",
        ],
        [
            "020000000002 020000000009 86dd
            60000000 000d 11 40 fd870000000000000000000000000009 20010db8000000000000000000000007
            1389 0035 000d 7cf3 68656c6c6f",
            "020000000001 020000000003 86dd
            60000000 000d 11 3f fd920000000000000000000000000002 20010db8000000000000000000000007
            9c40 0035 000d f437 68656c6c6f",
        ],
        [
            "020000000002 020000000009 86dd
            60000000 000d 3a 40 fd870000000000000000000000000009 20010db8000000000000000000000007
            8000 fd0a 1389 0001 68656c6c6f",
            "020000000001 020000000003 86dd
            60000000 000d 3a 3f fd920000000000000000000000000002 20010db8000000000000000000000007
            8000 fd06 1389 0001 68656c6c6f",
        ],
    ];
    const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Echo];

    fn is_rewritten_as_by_the_kernel<A: Address>(pairs: [[&str; 2]; 3], guest: A, peer: A, outside: A) {
        for ([before, after], protocol) in pairs.into_iter().zip(PROTOCOLS) {
            let (mut frame, golden) = (hex(before), hex(after));
            let ethernet = Ethernet::of(&frame).unwrap();
            assert_eq!((ethernet.to, ethernet.from), ([2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 9]));
            assert_eq!(ethernet.kind, A::ETHERTYPE);
            let ip = Ip::<A>::of(&frame).unwrap();
            assert_eq!((ip.from, ip.to, ip.end, ip.fragment), (guest, peer, frame.len(), false));
            let transport = ip.transport(&frame).unwrap();
            assert_eq!((transport.protocol, transport.source(&frame)), (protocol, 5001));

            // The transport, made of its parts: the kernel has checked its sum.
            let sum_at = [TCP_SUM_AT, UDP_SUM_AT, ECHO_SUM_AT][protocol as usize];
            let mut body = frame[transport.at..].to_vec();
            body[sum_at..sum_at + 2].fill(0);
            let composed = compose(ip.protocol, guest, peer, &body, sum_at);
            assert!(composed.ends_with(&frame[transport.at..]), "{protocol:?}");

            ip.live(&mut frame).unwrap();
            ip.rewrite_source(&mut frame, outside);
            let port = if protocol == Protocol::Echo { 5001 } else { 40_000 };
            transport.rewrite::<A>(&mut frame, transport.source_at(), port, Readdressed::of(guest, outside));
            assert_eq!(frame[IP_AT..], golden[IP_AT..], "{protocol:?}");
        }
    }

    #[test]
    fn packets_are_rewritten_as_the_kernel_does_it() {
        let v4 = |text: &str| text.parse::<Ipv4Addr>().unwrap();
        is_rewritten_as_by_the_kernel(V4, v4("10.87.0.9"), v4("198.51.100.7"), v4("192.0.0.2"));
        let v6 = |text: &str| text.parse::<Ipv6Addr>().unwrap();
        is_rewritten_as_by_the_kernel(V6, v6("fd87::9"), v6("2001:db8::7"), v6("fd92::2"));
    }

    /// A frame from a guest to a peer with a TCP header of these flags and options.
    fn segment(flags: u8, options: &[u8]) -> Vec<u8> {
        let (guest, peer) = (Ipv4Addr::new(10, 87, 0, 2), Ipv4Addr::new(192, 0, 2, 9));
        let words = (5 + options.len() / 4) as u8;
        let body =
            [&[0x9c, 0x40, 0, 80, 0, 0, 0, 1, 0, 0, 0, 0, words << 4, flags, 1, 0, 0, 0, 0, 0], options].concat();
        ethernet::<Ipv4Addr>([2; 6], [4; 6], &compose(6, guest, peer, &body, TCP_SUM_AT))
    }

    #[test]
    fn a_segment_size_that_no_one_can_send_is_raised() {
        let rewritten = |mut frame: Vec<u8>| {
            let ip = Ip::<Ipv4Addr>::of(&frame).unwrap();
            let transport = ip.transport(&frame).unwrap();
            let nothing = Readdressed { old: 0, new: 0 };
            transport.rewrite::<Ipv4Addr>(&mut frame, transport.source_at(), 0x9c40, nothing);
            frame
        };
        let option = |size: u16| [&[MSS_OPTION, 4][..], &size.to_be_bytes()].concat();
        for (size, told) in [(0, 48), (1, 48), (3, 48), (47, 48), (48, 48), (1460, 1460)] {
            // Alone, behind another option, and at an odd place.
            let behind = |before: &[u8], after: &[u8], size| [before, &option(size), after].concat();
            let places: [(&[u8], &[u8]); 3] = [(&[], &[]), (&[3, 3, 7, 1], &[]), (&[1], &[3, 3, 7])];
            for (before, after) in places {
                for flags in [SYN, SYN | ACK] {
                    let frame = rewritten(segment(flags, &behind(before, after, size)));
                    assert_eq!(frame, segment(flags, &behind(before, after, told)), "{size} {before:?}");
                }
                let other = segment(ACK, &behind(before, after, size));
                assert_eq!(rewritten(other.clone()), other, "it is only in a SYN that it says anything");
            }
        }
        // Options that are none, or go on behind their end.
        for options in [
            [MSS_OPTION, 0, 0, 1],
            [MSS_OPTION, 5, 0, 1],
            [1, 1, 1, MSS_OPTION],
            [3, 200, MSS_OPTION, 4],
            [0, MSS_OPTION, 4, 0],
        ] {
            assert_eq!(rewritten(segment(SYN, &options)), segment(SYN, &options), "{options:?}");
        }
    }

    fn is_refused_when_cut<A: Address>(pairs: [[&str; 2]; 3]) {
        for frame in pairs.into_iter().flatten().map(hex) {
            let transport_at = Ip::<A>::of(&frame).unwrap().transport_at;
            for len in 0..frame.len() {
                assert_eq!(Ethernet::of(&frame[..len]).is_some(), len >= IP_AT, "{len} bytes");
                assert_eq!(Ip::<A>::of(&frame[..len]).err(), Some(Reason::NotTransformable), "{len} bytes");
            }
            // A header that says less than its transport needs, in a frame that is whole.
            let needed = match Ip::<A>::of(&frame).unwrap().transport(&frame).unwrap().protocol {
                Protocol::Tcp => 20,
                _ => 8,
            };
            for bytes in 0..needed {
                let mut ip = Ip::<A>::of(&frame).unwrap();
                ip.end = transport_at + bytes;
                assert_eq!(ip.transport(&frame).err(), Some(Reason::NotTransformable), "{bytes} bytes");
            }
        }
    }

    #[test]
    fn a_cut_packet_is_not_transformable() {
        is_refused_when_cut::<Ipv4Addr>(V4);
        is_refused_when_cut::<Ipv6Addr>(V6);
    }
}
