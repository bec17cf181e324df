//! Whom to ask for its Ethernet address, and when. Pure.
//!
//! The stack below asks for a neighbour by itself (ARP, neighbour solicitation), but at most once a
//! second over all of them. The second new neighbour would wait a second, the tenth nine. So this
//! module also asks for each neighbour that is about to be sent to, each at its own poll_interval.
//! The stack takes the answers like those to its own questions. It then sends the waiting packets
//! at once.
//!
//! A neighbour is about to be sent to when the app names it, and when a packet came from it. A peer
//! that still knows a restarted cell's address does not ask before it sends. A sender's claim is
//! only a reason to ask; it is never believed.
//!
//! Limits: [`MAX_NEIGHBORS`] are remembered, as many as the stack holds answers of. Where more than
//! that are new within a second, the rest waits for the stack's own questions. A question that is
//! lost is asked again when the neighbour is next wanted, or by the stack.

use crate::slaac;
use alloc::vec::Vec;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol, Icmpv6Packet, Icmpv6Repr,
    IpAddress, IpProtocol, Ipv4Address, Ipv6Address, Ipv6Packet, Ipv6Repr, NdiscRepr,
};

/// `iface-neighbor-cache-count` of the cells' workspace.
const MAX_NEIGHBORS: usize = 64;
/// The same neighbour is not asked for twice within this time.
const AGAIN_NS: u64 = 1_000_000_000;
/// For so long after its answer it is not asked for; the stack forgets it after 60 s.
const FRESH_NS: u64 = 30_000_000_000;

const ETHERNET_HEADER_BYTES: usize = 14;
const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_ARP: [u8; 2] = [0x08, 0x06];
const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const ICMPV6: u8 = 58;
/// Neighbour solicitation and advertisement (RFC 4861 §4.3, §4.4).
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;

/// What a received frame says of who sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NeighborEvent {
    /// It sent a packet to this card.
    Packet(IpAddress),
    /// It told its Ethernet address, to `to` if that is said.
    Answer { from: IpAddress, to: Option<IpAddress> },
    /// It told all hosts that it has an address, or asks whether another one has it that it is
    /// about to use (RFC 4862 §5.4).
    Claim(Ipv6Address),
}

fn ipv4(frame: &[u8], at: usize) -> Option<IpAddress> {
    let octets: [u8; 4] = frame.get(at..at + 4)?.try_into().ok()?;
    Some(IpAddress::Ipv4(Ipv4Address::from(octets)))
}

/// What a message of neighbour discovery for all hosts, or for all that an address may belong to,
/// says of who has an address. It is valid by RFC 4861 §7.1: a hop limit of 255 shows that no router
/// passed it on.
fn claim(frame: &[u8]) -> Option<NeighborEvent> {
    let packet = Ipv6Packet::new_checked(frame.get(ETHERNET_HEADER_BYTES..)?).ok()?;
    if packet.next_header() != IpProtocol::Icmpv6 || packet.hop_limit() != 255 {
        return None;
    }
    let (from, to, message) = (packet.src_addr(), packet.dst_addr(), packet.payload());
    let target: [u8; 16] = message.get(8..24)?.try_into().ok()?;
    let is_claim = match (message[0], message[1]) {
        (ADVERTISEMENT, 0) => to.is_multicast(),
        (SOLICITATION, 0) => from.is_unspecified(),
        _ => false,
    };
    let is_right = is_claim && Icmpv6Packet::new_unchecked(message).verify_checksum(&from, &to);
    is_right.then(|| NeighborEvent::Claim(Ipv6Address::from(target)))
}

impl NeighborEvent {
    /// Reads a frame; `own` is the address of the card that got it.
    pub(crate) fn of(frame: &[u8], own: EthernetAddress) -> Option<NeighborEvent> {
        let kind = frame.get(12..14)?;
        if kind == TYPE_ARP {
            // RFC 826: the sender's protocol address at byte 14 of the packet, the target's at 24.
            let (from, to) = (ipv4(frame, ETHERNET_HEADER_BYTES + 14)?, ipv4(frame, ETHERNET_HEADER_BYTES + 24)?);
            return Some(NeighborEvent::Answer { from, to: Some(to) });
        }
        if kind == TYPE_IPV6
            && let claim @ Some(_) = claim(frame)
        {
            return claim;
        }
        if frame[..6] != own.0 {
            return None;
        }
        if kind == TYPE_IPV4 {
            return ipv4(frame, ETHERNET_HEADER_BYTES + 12).map(NeighborEvent::Packet);
        }
        if kind != TYPE_IPV6 {
            return None;
        }
        let octets: [u8; 16] = frame.get(ETHERNET_HEADER_BYTES + 8..ETHERNET_HEADER_BYTES + 24)?.try_into().ok()?;
        let from = IpAddress::Ipv6(Ipv6Address::from(octets));
        let neighbor = frame[ETHERNET_HEADER_BYTES + 6] == ICMPV6
            && frame.get(ETHERNET_HEADER_BYTES + 40).is_some_and(|kind| matches!(*kind, SOLICITATION | ADVERTISEMENT));
        Some(if neighbor { NeighborEvent::Answer { from, to: None } } else { NeighborEvent::Packet(from) })
    }
}

/// Where a device keeps whom it has seen, without the further packets of the same sender.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    router_advert: Option<Vec<u8>>,
    news: Option<NeighborEvent>,
    last: Option<NeighborEvent>,
}

impl Watch {
    /// Looks at a received frame. `asks` for a connection: then its sender is news each time, since
    /// what was found out of it may be too old.
    pub(crate) fn note(&mut self, frame: &[u8], own: EthernetAddress, asks: bool) {
        let event = NeighborEvent::of(frame, own);
        if asks || event != self.last {
            self.news = event;
            self.last = event;
        }
        if slaac::is_router_advert(frame) {
            self.router_advert = frame.get(ETHERNET_HEADER_BYTES..).map(<[u8]>::to_vec);
        }
    }

    /// The router advertisement that was received last, from its IPv6 header on.
    pub(crate) fn take_router_advert(&mut self) -> Option<Vec<u8>> {
        self.router_advert.take()
    }

    /// Who sent the frame that was received last, where that is news.
    pub(crate) fn take(&mut self) -> Option<NeighborEvent> {
        self.news.take()
    }
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    address: IpAddress,
    asked_ns: Option<u64>,
    answered_ns: Option<u64>,
}

impl Entry {
    fn last_ns(&self) -> u64 {
        self.asked_ns.max(self.answered_ns).unwrap_or(0)
    }
}

/// The neighbours that were asked for or that have answered.
#[derive(Debug, Default)]
pub(crate) struct Neighbors(Vec<Entry>);

impl Neighbors {
    /// Whether to ask for a neighbour that is about to be sent to; if so, it counts as asked for.
    pub(crate) fn want(&mut self, address: IpAddress, now_ns: u64) -> bool {
        let Some(entry) = self.entry(address, now_ns) else { return false };
        let within = |at: Option<u64>, ns| at.is_some_and(|at| now_ns.saturating_sub(at) < ns);
        let ask = !within(entry.answered_ns, FRESH_NS) && !within(entry.asked_ns, AGAIN_NS);
        if ask {
            entry.asked_ns = Some(now_ns);
        }
        ask
    }

    /// Notes that a neighbour has told its Ethernet address.
    pub(crate) fn answered(&mut self, address: IpAddress, now_ns: u64) {
        if let Some(entry) = self.entry(address, now_ns) {
            entry.answered_ns = Some(now_ns);
        }
    }

    /// Forgets all, as the stack does when its own addresses change.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// The neighbour's entry, made if there is none; `None` where all entries are younger than a
    /// second.
    fn entry(&mut self, address: IpAddress, now_ns: u64) -> Option<&mut Entry> {
        let new = Entry { address, asked_ns: None, answered_ns: None };
        let at = match self.0.iter().position(|entry| entry.address == address) {
            Some(at) => at,
            None if self.0.len() < MAX_NEIGHBORS => {
                self.0.push(new);
                self.0.len() - 1
            }
            None => {
                let (at, oldest) = self.0.iter().enumerate().min_by_key(|(_, entry)| entry.last_ns())?;
                if now_ns.saturating_sub(oldest.last_ns()) < AGAIN_NS {
                    return None;
                }
                self.0[at] = new;
                at
            }
        };
        self.0.get_mut(at)
    }
}

/// The question for a neighbour, to be written into a frame.
pub(crate) enum Question {
    /// For all routers (RFC 4861 §4.1).
    Routers {
        own: Ipv6Address,
    },
    Arp {
        to: Ipv4Address,
        own: Ipv4Address,
    },
    Solicitation {
        to: Ipv6Address,
        own: Ipv6Address,
    },
}

impl Question {
    /// For an ARP request: operation, sender, target.
    fn arp(mac: EthernetAddress, own: Ipv4Address, to: Ipv4Address) -> ArpRepr {
        ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Request,
            source_hardware_addr: mac,
            source_protocol_addr: own,
            target_hardware_addr: EthernetAddress::BROADCAST,
            target_protocol_addr: to,
        }
    }

    fn solicitation(mac: EthernetAddress, own: Ipv6Address, to: Ipv6Address) -> (Ipv6Repr, Icmpv6Repr<'static>) {
        // Without an own address it asks whether another has the address (RFC 4862 §5.4.2).
        let lladdr = (!own.is_unspecified()).then(|| mac.into());
        let message = Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit { target_addr: to, lladdr });
        let header = Ipv6Repr {
            src_addr: own,
            dst_addr: solicited_node(to),
            next_header: IpProtocol::Icmpv6,
            payload_len: message.buffer_len(),
            hop_limit: 255,
        };
        (header, message)
    }

    fn routers(mac: EthernetAddress, own: Ipv6Address) -> (Ipv6Repr, Icmpv6Repr<'static>) {
        let message = Icmpv6Repr::Ndisc(NdiscRepr::RouterSolicit { lladdr: Some(mac.into()) });
        let header = Ipv6Repr {
            src_addr: own,
            dst_addr: ALL_ROUTERS,
            next_header: IpProtocol::Icmpv6,
            payload_len: message.buffer_len(),
            hop_limit: 255,
        };
        (header, message)
    }

    fn icmpv6(&self, mac: EthernetAddress) -> Option<(Ipv6Repr, Icmpv6Repr<'static>)> {
        match *self {
            Question::Arp { .. } => None,
            Question::Solicitation { to, own } => Some(Self::solicitation(mac, own, to)),
            Question::Routers { own } => Some(Self::routers(mac, own)),
        }
    }

    pub(crate) fn frame_bytes(&self, mac: EthernetAddress) -> usize {
        ETHERNET_HEADER_BYTES
            + match *self {
                Question::Arp { to, own } => Self::arp(mac, own, to).buffer_len(),
                _ => self.icmpv6(mac).map_or(0, |(header, message)| header.buffer_len() + message.buffer_len()),
            }
    }

    pub(crate) fn emit(&self, mac: EthernetAddress, frame: &mut [u8]) {
        let mut frame = EthernetFrame::new_unchecked(frame);
        frame.set_src_addr(mac);
        match *self {
            Question::Arp { to, own } => {
                frame.set_dst_addr(EthernetAddress::BROADCAST);
                frame.set_ethertype(EthernetProtocol::Arp);
                Self::arp(mac, own, to).emit(&mut ArpPacket::new_unchecked(frame.payload_mut()));
            }
            _ => {
                let Some((header, message)) = self.icmpv6(mac) else { return };
                let [.., a, b, c, d] = header.dst_addr.octets();
                frame.set_dst_addr(EthernetAddress([0x33, 0x33, a, b, c, d]));
                frame.set_ethertype(EthernetProtocol::Ipv6);
                let mut packet = Ipv6Packet::new_unchecked(frame.payload_mut());
                header.emit(&mut packet);
                let mut body = Icmpv6Packet::new_unchecked(packet.payload_mut());
                message.emit(&header.src_addr, &header.dst_addr, &mut body, &ChecksumCapabilities::default());
            }
        }
    }
}

const ALL_ROUTERS: Ipv6Address = Ipv6Address::new(0xff02, 0, 0, 0, 0, 0, 0, 2);

/// The group that a neighbour listens to for questions after it (RFC 4291 §2.7.1).
fn solicited_node(address: Ipv6Address) -> Ipv6Address {
    let [.., a, b, c] = address.octets();
    Ipv6Address::new(0xff02, 0, 0, 0, 0, 1, 0xff00 | u16::from(a), u16::from_be_bytes([b, c]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    const MAC: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 9]);
    const SECOND: u64 = 1_000_000_000;

    fn v4(last: u8) -> IpAddress {
        IpAddress::v4(10, 0, 0, last)
    }

    #[test]
    fn each_neighbor_is_asked_for_at_its_own_pace() {
        let mut neighbors = Neighbors::default();
        let now = 5 * SECOND;
        for last in 1..=9 {
            assert!(neighbors.want(v4(last), now), "the others' questions do not hold {last} back");
            assert!(!neighbors.want(v4(last), now + AGAIN_NS - 1));
        }
        assert!(neighbors.want(v4(1), now + AGAIN_NS));
        neighbors.answered(v4(1), now + AGAIN_NS);
        assert!(!neighbors.want(v4(1), now + AGAIN_NS + FRESH_NS - 1));
        assert!(neighbors.want(v4(1), now + AGAIN_NS + FRESH_NS));
        neighbors.clear();
        assert!(neighbors.want(v4(1), now));
    }

    #[test]
    fn the_table_is_bounded_and_gives_up_the_oldest() {
        let mut neighbors = Neighbors::default();
        for number in 0..MAX_NEIGHBORS as u64 {
            assert!(neighbors.want(v4(number as u8), SECOND + number));
        }
        assert!(!neighbors.want(v4(200), SECOND + 100), "all are younger than a second");
        assert!(neighbors.want(v4(200), 2 * SECOND));
        assert_eq!(neighbors.0.len(), MAX_NEIGHBORS);
        assert!(!neighbors.want(v4(1), 2 * SECOND), "number 0 made room, not number 1");
    }

    #[test]
    fn questions_are_what_the_protocols_say() {
        let (to, own) = (Ipv4Address::new(10, 0, 0, 7), Ipv4Address::new(10, 0, 0, 9));
        let question = Question::Arp { to, own };
        let mut frame = vec![0xa5; question.frame_bytes(MAC)];
        question.emit(MAC, &mut frame);
        let golden = [
            [0xff; 6].as_slice(),
            &MAC.0,
            &[0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1],
            &MAC.0,
            &[10, 0, 0, 9],
            &[0xff; 6],
            &[10, 0, 0, 7],
        ];
        assert_eq!(frame, golden.concat());
        assert_eq!(NeighborEvent::of(&frame, MAC), Some(NeighborEvent::Answer { from: v4(9), to: Some(v4(7)) }));

        let (to, own) =
            (Ipv6Address::new(0xfd00, 0, 0, 0, 0, 0, 0x12, 0x3456), Ipv6Address::new(0xfd00, 0, 0, 0, 0, 0, 0, 9));
        let question = Question::Solicitation { to, own };
        let mut frame = vec![0xa5; question.frame_bytes(MAC)];
        question.emit(MAC, &mut frame);
        assert_eq!(frame[..6], [0x33, 0x33, 0xff, 0x12, 0x34, 0x56]);
        let packet = Ipv6Packet::new_checked(&frame[14..]).unwrap();
        let header = Ipv6Repr::parse(&packet).unwrap();
        assert_eq!((header.dst_addr, header.hop_limit), (solicited_node(to), 255));
        let message = Icmpv6Packet::new_checked(packet.payload()).unwrap();
        let caps = ChecksumCapabilities::default();
        let parsed = Icmpv6Repr::parse(&header.src_addr, &header.dst_addr, &message, &caps).unwrap();
        assert_eq!(parsed, Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit { target_addr: to, lladdr: Some(MAC.into()) }));
    }

    #[test]
    fn only_another_sender_or_a_connection_is_news() {
        let packet = |last: u8| {
            let mut frame = vec![0; 34];
            frame[..6].copy_from_slice(&MAC.0);
            frame[12..14].copy_from_slice(&TYPE_IPV4);
            frame[26..30].copy_from_slice(&[10, 0, 0, last]);
            frame
        };
        let mut watch = Watch::default();
        let mut news = |last, asks| {
            watch.note(&packet(last), MAC, asks);
            watch.take()
        };
        assert_eq!(news(1, false), Some(NeighborEvent::Packet(v4(1))));
        assert_eq!(news(1, false), None);
        assert_eq!(news(1, true), Some(NeighborEvent::Packet(v4(1))));
        assert_eq!(news(2, false), Some(NeighborEvent::Packet(v4(2))));
    }

    #[test]
    fn sightings_of_packets_are_of_those_to_this_card_and_truncation_is_none() {
        let mut frame = vec![0; 34];
        frame[..6].copy_from_slice(&MAC.0);
        frame[12..14].copy_from_slice(&TYPE_IPV4);
        frame[26..30].copy_from_slice(&[10, 0, 0, 3]);
        assert_eq!(NeighborEvent::of(&frame, MAC), Some(NeighborEvent::Packet(v4(3))));
        for len in 0..30 {
            assert_eq!(NeighborEvent::of(&frame[..len], MAC), None, "{len}");
        }
        frame[0] = 0xff;
        assert_eq!(NeighborEvent::of(&frame, MAC), None);
        let mut frame = vec![0; 55];
        frame[..6].copy_from_slice(&MAC.0);
        frame[12..14].copy_from_slice(&TYPE_IPV6);
        frame[37] = 1;
        let from = IpAddress::v6(0, 0, 0, 0, 0, 0, 0, 1);
        assert_eq!(NeighborEvent::of(&frame, MAC), Some(NeighborEvent::Packet(from)));
        frame[20] = ICMPV6;
        frame[54] = 136;
        assert_eq!(NeighborEvent::of(&frame, MAC), Some(NeighborEvent::Answer { from, to: None }));
        assert_eq!(NeighborEvent::of(&frame[..54], MAC), Some(NeighborEvent::Packet(from)));
    }

    fn is_claim(frame: &[u8]) -> bool {
        matches!(NeighborEvent::of(frame, MAC), Some(NeighborEvent::Claim(_)))
    }

    #[test]
    fn an_address_is_claimed_by_an_advertisement_to_all_or_the_question_of_who_is_about_to_use_it() {
        let target = Ipv6Address::new(0xfd01, 0, 0, 0, 0, 0, 0, 9);
        let frame = |card: [u8; 6], from: Ipv6Address, to: Ipv6Address, hops, message| {
            let mut frame = vec![0; 78];
            frame[..6].copy_from_slice(&card);
            frame[12..14].copy_from_slice(&TYPE_IPV6);
            (frame[14], frame[19], frame[20], frame[21], frame[54]) = (0x60, 24, ICMPV6, hops, message);
            frame[22..38].copy_from_slice(&from.octets());
            frame[38..54].copy_from_slice(&to.octets());
            frame[62..78].copy_from_slice(&target.octets());
            Icmpv6Packet::new_unchecked(&mut frame[54..]).fill_checksum(&from, &to);
            frame
        };
        let (nodes, all_nodes) = ([0x33, 0x33, 0, 0, 0, 1], Ipv6Address::new(0xff02, 0, 0, 0, 0, 0, 0, 1));
        let (card, group, none) = ([0x33, 0x33, 0xff, 0, 0, 9], solicited_node(target), Ipv6Address::UNSPECIFIED);
        let answer = frame(nodes, target, all_nodes, 255, ADVERTISEMENT);
        // The answer of a tunnel is for all, in a frame to the one that asked.
        let own = frame(MAC.0, target, all_nodes, 255, ADVERTISEMENT);
        let question = frame(card, none, group, 255, SOLICITATION);
        for frame in [&answer, &own, &question] {
            assert_eq!(NeighborEvent::of(frame, MAC), Some(NeighborEvent::Claim(target)));
            (0..78).for_each(|len| assert!(!is_claim(&frame[..len]), "{len}"));
            for at in 14..78 {
                let mut bad = frame.clone();
                bad[at] ^= 0x10;
                // The traffic class and the flow label are not covered.
                assert!(!is_claim(&bad) || (14..18).contains(&at), "byte {at}");
            }
        }
        for frame in [
            frame(nodes, target, all_nodes, 64, ADVERTISEMENT),
            frame(card, target, group, 255, SOLICITATION),
            frame(MAC.0, target, target, 255, ADVERTISEMENT),
            frame(nodes, none, all_nodes, 255, 134),
        ] {
            assert!(!is_claim(&frame));
        }
    }
}
