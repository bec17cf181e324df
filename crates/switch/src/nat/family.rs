//! What differs between IPv4 and IPv6 in [`super::Nat`]: headers, the messages by which a link's
//! stations find each other (ARP, neighbour discovery), and the numbers of ICMP.
//!
//! The router is generic over [`Address`], so each family's router is compiled for itself: IPv4
//! pays nothing for IPv6. It is compiled in the crate that uses it, so what it calls for every
//! frame outside of generic code is `#[inline]`.
//!
//! # Limits of IPv6
//! A packet with an extension header is dropped as `not_transformable`, as is every fragment with
//! IPv4 too. passt of Debian 12 takes the first extension header for the transport (`ipv6_l4hdr`):
//! behind options a guest could show this router other ports than passt uses. Packets whose IPv4
//! address stands in IPv6's form go nowhere, since passt's socket would connect by IPv4, to this
//! machine's loopback too. Messages of neighbour discovery are believed only with a hop limit of
//! 255, code 0, whole options and a right checksum (RFC 4861 §7.1).

use std::fmt::Debug;
use std::hash::Hash;
use std::net::{Ipv4Addr, Ipv6Addr};

use super::packet::{BROADCAST, IP_AT, word};
use crate::frame::Mac;
use crate::guard::{link_local, nd_options, solicited_node};
use tombolo_ring::checksum::{add, sum};

const ETHERTYPE_ARP: [u8; 2] = [0x08, 0x06];
/// RFC 826 for Ethernet and IPv4: 28 bytes behind the Ethernet header.
const ARP_BYTES: usize = IP_AT + 28;

// RFC 8200 §3 and §4, RFC 4443, RFC 4861 §4.
const IPV6_BYTES: usize = 40;
const FRAGMENT: u8 = 44;
const ICMPV6: u8 = 58;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Router solicitation to redirect.
const LINK_MESSAGES: std::ops::RangeInclusive<u8> = 133..=137;
/// Type, code, sum, reserved word and target.
const LINK_MESSAGE_BYTES: usize = 24;
const ON_LINK_HOPS: u8 = 255;
/// Router, solicited, override.
const ADVERTISEMENT_FLAGS: u8 = 0xe0;

/// An IP header as it stands at the start of some bytes, which may end before the packet does.
#[derive(Debug)]
pub struct Header<A> {
    /// Bytes before the transport.
    pub(super) bytes: usize,
    /// Bytes of the whole packet, as the header says.
    pub(super) total: usize,
    /// The transport's number.
    pub(super) protocol: u8,
    pub(super) from: A,
    pub(super) to: A,
    pub(super) fragment: bool,
    /// A fragment other than the first, which has no ports.
    pub(super) later_fragment: bool,
}

/// A question or answer about who has an address on the link.
#[derive(Debug)]
pub struct Message<A> {
    pub(super) is_question: bool,
    /// Who says so, and which address it has; no address where it does not have it yet.
    pub(super) sender: Mac,
    pub(super) sender_ip: A,
    pub(super) target_ip: A,
}

/// An address family that [`super::Nat`] translates: [`Ipv4Addr`] or [`Ipv6Addr`]. Nothing else can
/// implement it.
pub trait Address: Copy + Debug + Eq + Hash + Ord + 'static {
    /// Ethernet's number for its packets.
    const ETHERTYPE: u16;
    /// Bytes of an address.
    const BYTES: usize;
    /// Where a header has the source; the destination follows it.
    const SOURCE_AT: usize;
    /// Where a header has the hops that are left.
    const HOPS_AT: usize;
    /// Where a header has its own checksum, if it has one.
    const SUM_AT: Option<usize>;
    /// The number of ICMP.
    const ICMP: u8;
    /// ICMP's types of echo request and reply.
    const ECHO: [u8; 2];
    /// ICMP's types of errors that are translated.
    const ERRORS: &'static [u8];
    /// ICMP's type of "time exceeded".
    const TIME_EXCEEDED: u8;
    /// Longest error that the router sends: RFC 1812 §4.3.2.3, RFC 4443 §2.4 (c).
    const LONGEST_ERROR_BYTES: usize;
    /// Whether ICMP's checksum covers the addresses (RFC 4443 §2.3).
    const ICMP_COVERS_ADDRESSES: bool;
    /// Whether there are addresses that mean something on one link only.
    const HAS_SCOPES: bool;
    /// The version of a stored table ([`super::Nat::hand_over`]).
    const TABLE_VERSION: u8;
    /// The address as on the wire.
    type Octets: AsRef<[u8]>;

    /// The address as on the wire.
    fn bytes(self) -> Self::Octets;
    /// The address at the start of `bytes`, which has at least [`Address::BYTES`].
    fn read(bytes: &[u8]) -> Self;
    /// Its one's complement sum.
    fn total(self) -> u16;
    /// Whether it lies in a network.
    fn is_in(self, network: Self, prefix: u8) -> bool;
    /// Whether it is one particular host's.
    fn is_host(self) -> bool;
    /// Whether it is the sender's own machine.
    fn is_loopback(self) -> bool;
    /// Whether it means something on one link only. (IPv4's 169.254.0.0/16 does not count: clouds
    /// route it.)
    fn is_scoped(self) -> bool;
    /// The address that a station has on the link by its MAC, in a family with scopes.
    fn scoped(mac: Mac) -> Option<Self>;
    /// Reads the header at the start of `packet`; `None` where it is cut short or impossible.
    fn header(packet: &[u8]) -> Option<Header<Self>>;
    /// A header for `body_bytes` behind it, with its own sum.
    fn compose(protocol: u8, from: Self, to: Self, body_bytes: usize) -> Vec<u8>;
    /// Whether a frame with this ethertype is about who has which address on the link.
    fn is_link_message(frame: &[u8], ethertype: u16) -> bool;
    /// Reads such a frame; `None` where it is neither question nor answer, or not valid.
    fn link_message(frame: &[u8]) -> Option<Message<Self>>;
    /// A frame from `mac`, whose address is `own`, that asks `to`, or everyone, for `target`.
    fn question(mac: Mac, own: Self, target: Self, to: Option<Mac>) -> Vec<u8>;
    /// A frame that tells the sender of `question` that `mac` has the address `own`.
    fn answer(mac: Mac, own: Self, question: &Message<Self>) -> Vec<u8>;
}

fn arp(operation: u8, from: (Mac, Ipv4Addr), target: (Mac, Ipv4Addr), to: Mac) -> Vec<u8> {
    let head = [&to[..], &from.0, &ETHERTYPE_ARP, &[0, 1, 8, 0, 6, 4, 0, operation]].concat();
    [&head[..], &from.0, &from.1.octets(), &target.0, &target.1.octets()].concat()
}

impl Address for Ipv4Addr {
    const ETHERTYPE: u16 = 0x0800;
    const BYTES: usize = 4;
    const SOURCE_AT: usize = 12;
    const HOPS_AT: usize = 8;
    const SUM_AT: Option<usize> = Some(10);
    const ICMP: u8 = 1;
    const ECHO: [u8; 2] = [8, 0];
    // Destination unreachable ("fragmentation needed" among them), time exceeded, parameter
    // problem. Source quench is out of use (RFC 6633), and a redirect tells of another network's
    // routers.
    const ERRORS: &'static [u8] = &[3, 11, 12];
    const TIME_EXCEEDED: u8 = 11;
    const LONGEST_ERROR_BYTES: usize = 576;
    const ICMP_COVERS_ADDRESSES: bool = false;
    const HAS_SCOPES: bool = false;
    const TABLE_VERSION: u8 = 1;
    type Octets = [u8; 4];

    fn bytes(self) -> [u8; 4] {
        self.octets()
    }

    fn read(bytes: &[u8]) -> Self {
        Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3])
    }

    fn total(self) -> u16 {
        let [a, b, c, d] = self.octets();
        add(u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]))
    }

    fn is_in(self, network: Self, prefix: u8) -> bool {
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        u32::from(self) & mask == u32::from(network) & mask
    }

    fn is_host(self) -> bool {
        !(self.is_unspecified() || self.is_broadcast() || self.is_multicast())
    }

    fn is_loopback(self) -> bool {
        Ipv4Addr::is_loopback(&self)
    }

    fn is_scoped(self) -> bool {
        false
    }

    fn scoped(_: Mac) -> Option<Self> {
        None
    }

    fn header(packet: &[u8]) -> Option<Header<Self>> {
        let header: &[u8; 20] = packet.first_chunk()?;
        let bytes = usize::from(header[0] & 15) * 4;
        // More fragments, or an offset: RFC 791 §3.1.
        let fragment = u16::from_be_bytes([header[6], header[7]]);
        (header[0] >> 4 == 4 && bytes >= 20).then(|| Header {
            bytes,
            total: usize::from(u16::from_be_bytes([header[2], header[3]])),
            protocol: header[9],
            from: Self::read(&header[12..]),
            to: Self::read(&header[16..]),
            fragment: fragment & 0x3fff != 0,
            later_fragment: fragment & 0x1fff != 0,
        })
    }

    fn compose(protocol: u8, from: Self, to: Self, body_bytes: usize) -> Vec<u8> {
        let [high, low] = ((20 + body_bytes) as u16).to_be_bytes();
        // An error has the precedence "internetwork control" (RFC 1812 §4.3.2.5); nothing else may
        // be fragmented.
        let (service, fragment) = if protocol == Self::ICMP { (0xc0, 0) } else { (0, 0x40) };
        let mut out = vec![0x45, service, high, low, 0, 0, fragment, 0, 64, protocol, 0, 0];
        out.extend([from.octets(), to.octets()].concat());
        let header = !sum(&out);
        out[10..12].copy_from_slice(&header.to_be_bytes());
        out
    }

    fn is_link_message(_: &[u8], ethertype: u16) -> bool {
        ethertype == u16::from_be_bytes(ETHERTYPE_ARP)
    }

    fn link_message(frame: &[u8]) -> Option<Message<Self>> {
        let body: &[u8; 28] = frame.get(IP_AT..ARP_BYTES)?.try_into().ok()?;
        let (sender, is_arp) = (body[8..14].try_into().ok()?, body[..6] == [0, 1, 8, 0, 6, 4]);
        let (sender_ip, target_ip) = (Self::read(&body[14..]), Self::read(&body[24..]));
        is_arp.then_some(Message { is_question: body[6..8] == [0, 1], sender, sender_ip, target_ip })
    }

    fn question(mac: Mac, own: Self, target: Self, to: Option<Mac>) -> Vec<u8> {
        arp(1, (mac, own), ([0; 6], target), to.unwrap_or(BROADCAST))
    }

    fn answer(mac: Mac, own: Self, question: &Message<Self>) -> Vec<u8> {
        arp(2, (mac, own), (question.sender, question.sender_ip), question.sender)
    }
}

/// The source or target link-layer address (RFC 4861 §4.6.1) among `options`, if it is there;
/// `None` where the options are not whole.
fn link_layer_address(options: &[u8], wanted: u8) -> Option<Option<Mac>> {
    nd_options(options).try_fold(None, |found, option| {
        let (kind, bytes) = option?;
        Some(if kind == wanted { Some(*bytes[2..].first_chunk()?) } else { found })
    })
}

/// A solicitation or advertisement, with the option that tells the sender's MAC.
fn link_message(kind: u8, (mac, own): (Mac, Ipv6Addr), target: Ipv6Addr, to: (Mac, Ipv6Addr)) -> Vec<u8> {
    let (flags, option) = if kind == ADVERTISEMENT { (ADVERTISEMENT_FLAGS, 2) } else { (0, 1) };
    let body = [&[kind, 0, 0, 0, flags, 0, 0, 0][..], &target.octets(), &[option, 1], &mac].concat();
    let mut packet = super::packet::compose(ICMPV6, own, to.1, &body, 2);
    packet[Ipv6Addr::HOPS_AT] = ON_LINK_HOPS;
    super::packet::ethernet::<Ipv6Addr>(to.0, mac, &packet)
}

impl Address for Ipv6Addr {
    const ETHERTYPE: u16 = 0x86dd;
    const BYTES: usize = 16;
    const SOURCE_AT: usize = 8;
    const HOPS_AT: usize = 7;
    const SUM_AT: Option<usize> = None;
    const ICMP: u8 = ICMPV6;
    const ECHO: [u8; 2] = [128, 129];
    // Destination unreachable, packet too big, time exceeded, parameter problem.
    const ERRORS: &'static [u8] = &[1, 2, 3, 4];
    const TIME_EXCEEDED: u8 = 3;
    const LONGEST_ERROR_BYTES: usize = 1280;
    const ICMP_COVERS_ADDRESSES: bool = true;
    const HAS_SCOPES: bool = true;
    const TABLE_VERSION: u8 = 129;
    type Octets = [u8; 16];

    fn bytes(self) -> [u8; 16] {
        self.octets()
    }

    fn read(bytes: &[u8]) -> Self {
        let mut octets = [0; 16];
        octets.copy_from_slice(&bytes[..16]);
        octets.into()
    }

    fn total(self) -> u16 {
        sum(&self.octets())
    }

    fn is_in(self, network: Self, prefix: u8) -> bool {
        let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
        u128::from(self) & mask == u128::from(network) & mask
    }

    fn is_host(self) -> bool {
        // An IPv4 address in IPv6's form (RFC 4291 §2.5.5.2) is on no wire.
        !(self.is_unspecified() || self.is_multicast() || self.to_ipv4_mapped().is_some())
    }

    fn is_loopback(self) -> bool {
        Ipv6Addr::is_loopback(&self)
    }

    fn is_scoped(self) -> bool {
        self.is_unicast_link_local()
    }

    fn scoped(mac: Mac) -> Option<Self> {
        Some(link_local(&mac))
    }

    fn header(packet: &[u8]) -> Option<Header<Self>> {
        let header: &[u8; IPV6_BYTES] = packet.first_chunk()?;
        if header[0] >> 4 != 6 {
            return None;
        }
        let total = IPV6_BYTES + usize::from(u16::from_be_bytes([header[4], header[5]]));
        let (mut protocol, mut bytes) = (header[6], IPV6_BYTES);
        let fragment = protocol == FRAGMENT;
        let mut later_fragment = false;
        if fragment {
            let [next, _, high, low] = *packet.get(bytes..)?.first_chunk::<4>()?;
            later_fragment = u16::from_be_bytes([high, low]) & 0xfff8 != 0;
            (protocol, bytes) = (next, bytes + 8);
        }
        let (from, to) = (Self::read(&header[8..]), Self::read(&header[24..]));
        Some(Header { bytes, total, protocol, from, to, fragment, later_fragment })
    }

    fn compose(protocol: u8, from: Self, to: Self, body_bytes: usize) -> Vec<u8> {
        let [high, low] = (body_bytes as u16).to_be_bytes();
        [&[0x60, 0, 0, 0, high, low, protocol, 64][..], &from.octets(), &to.octets()].concat()
    }

    fn is_link_message(frame: &[u8], ethertype: u16) -> bool {
        // Behind extension headers it is none that counts, and goes no further either: it is
        // neither echo nor error.
        let kind = frame.get(IP_AT + IPV6_BYTES);
        ethertype == Self::ETHERTYPE
            && frame.get(IP_AT + 6) == Some(&ICMPV6)
            && kind.is_some_and(|kind| LINK_MESSAGES.contains(kind))
    }

    fn link_message(frame: &[u8]) -> Option<Message<Self>> {
        let sender = *frame.get(6..12)?.first_chunk()?;
        let packet = &frame[IP_AT..];
        let header = Self::header(packet)?;
        let body = packet.get(header.bytes..header.total).filter(|body| body.len() >= LINK_MESSAGE_BYTES)?;
        let covered = add(add(header.from.total(), header.to.total()), add(u16::from(ICMPV6), body.len() as u16));
        let is_valid = header.bytes == IPV6_BYTES
            && packet[Self::HOPS_AT] == ON_LINK_HOPS
            && body[1] == 0
            && add(covered, sum(body)) == 0xffff;
        let target = Self::read(&body[8..]);
        let option = match body[0] {
            SOLICITATION => 1,
            ADVERTISEMENT => 2,
            _ => return None,
        };
        let told = link_layer_address(&body[LINK_MESSAGE_BYTES..], option)?;
        let is_question = body[0] == SOLICITATION;
        let sender_ip = if is_question { header.from } else { target };
        (is_valid && target.is_host()).then_some(Message {
            is_question,
            sender: told.unwrap_or(sender),
            sender_ip,
            target_ip: target,
        })
    }

    fn question(mac: Mac, own: Self, target: Self, to: Option<Mac>) -> Vec<u8> {
        let group = solicited_node(target);
        link_message(SOLICITATION, (mac, own), target, to.map_or(group, |to| (to, target)))
    }

    fn answer(mac: Mac, own: Self, question: &Message<Self>) -> Vec<u8> {
        // Who has no address yet hears it as one of all nodes (RFC 4861 §7.2.4), and alone.
        let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
        let is_anonymous = question.sender_ip.is_unspecified();
        let to = if is_anonymous { all_nodes } else { question.sender_ip };
        let mut frame = link_message(ADVERTISEMENT, (mac, own), own, (question.sender, to));
        if is_anonymous {
            // Not an answer to its sender: no "solicited".
            let at = IP_AT + IPV6_BYTES;
            let before = word(&frame, at + 4);
            frame[at + 4] &= !0x40;
            let after = word(&frame, at + 4);
            super::packet::update(&mut frame, at + 2, &[before], &[after]);
        }
        frame
    }
}
