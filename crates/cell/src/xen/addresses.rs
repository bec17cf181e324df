//! Which network device a frame belongs to, where a domain has several: by the cell's own address
//! in it. Pure.
//!
//! The stack has one interface with the addresses of all devices, and the Ethernet address of the
//! first. A frame leaves by the device whose address is its source. That device's Ethernet address
//! replaces the first one's, in the header and in what ARP and neighbour discovery say of the
//! sender. A frame that comes in for another device's address is not taken.
//!
//! The first device has all addresses that no other has, among them the one by DHCP and the
//! link-local one.

use alloc::vec::Vec;
use smoltcp::wire::{EthernetAddress, IpAddress, IpCidr, Ipv4Address, Ipv6Address};
use tombolo_ring::checksum;

const ETHERNET_HEADER_BYTES: usize = 14;
const TYPE_IPV4: [u8; 2] = [0x08, 0x00];
const TYPE_ARP: [u8; 2] = [0x08, 0x06];
const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const ICMPV6: u8 = 58;
const ICMPV6_AT: usize = ETHERNET_HEADER_BYTES + 40;
/// Neighbour solicitation and advertisement (RFC 4861 §4.3, §4.4): the options follow on 24 bytes.
const NEIGHBOR_MESSAGES: core::ops::RangeInclusive<u8> = 135..=136;
const NEIGHBOR_OPTIONS_AT: usize = ICMPV6_AT + 24;
/// Options with the sender's and the target's Ethernet address (RFC 4861 §4.6.1), of 8 bytes.
const LINK_ADDRESS_OPTIONS: core::ops::RangeInclusive<u8> = 1..=2;

fn ipv4(frame: &[u8], at: usize) -> Option<IpAddress> {
    let octets: [u8; 4] = frame.get(at..at + 4)?.try_into().ok()?;
    Some(IpAddress::Ipv4(Ipv4Address::from(octets)))
}

fn ipv6(frame: &[u8], at: usize) -> Option<IpAddress> {
    let octets: [u8; 16] = frame.get(at..at + 16)?.try_into().ok()?;
    Some(IpAddress::Ipv6(Ipv6Address::from(octets)))
}

/// Sender and receiver by their protocol addresses, in that order; `None` for what is neither IP
/// nor ARP.
fn ends(frame: &[u8]) -> Option<(IpAddress, IpAddress)> {
    const AT: usize = ETHERNET_HEADER_BYTES;
    match frame.get(12..14)?.try_into().ok()? {
        TYPE_ARP => Some((ipv4(frame, AT + 14)?, ipv4(frame, AT + 24)?)),
        TYPE_IPV4 => Some((ipv4(frame, AT + 12)?, ipv4(frame, AT + 16)?)),
        TYPE_IPV6 => Some((ipv6(frame, AT + 8)?, ipv6(frame, AT + 24)?)),
        _ => None,
    }
}

/// The addresses of the devices after the first, in their order.
#[derive(Clone, Debug, Default)]
pub(super) struct Addresses(pub(super) Vec<Vec<IpCidr>>);

impl Addresses {
    /// The device that has `address`: 0 for the first one.
    pub(super) fn device_of(&self, address: IpAddress) -> usize {
        self.0.iter().position(|own| own.iter().any(|own| own.address() == address)).map_or(0, |at| at + 1)
    }

    /// The device by which a frame is to permit.
    pub(super) fn outgoing(&self, frame: &[u8]) -> usize {
        if self.0.is_empty() { 0 } else { ends(frame).map_or(0, |(from, _)| self.device_of(from)) }
    }

    /// Whether a frame that came in by `device` is for the address of another one. `own` are all
    /// addresses of the cell.
    pub(super) fn is_astray(&self, frame: &[u8], device: usize, own: &[IpCidr]) -> bool {
        let to = if self.0.is_empty() { None } else { ends(frame).map(|(_, to)| to) };
        to.is_some_and(|to| own.iter().any(|own| own.address() == to) && self.device_of(to) != device)
    }

    /// The multicast addresses that `device` has to let pass for what the cell's addresses `own`
    /// need: all systems (RFC 1112 §4), all nodes, and the solicited-node address of each IPv6
    /// address (RFC 4291 §2.7.1).
    pub(super) fn groups(&self, device: usize, own: &[IpCidr]) -> Vec<EthernetAddress> {
        let mut groups =
            Vec::from([EthernetAddress([0x01, 0x00, 0x5e, 0, 0, 1]), EthernetAddress([0x33, 0x33, 0, 0, 0, 1])]);
        for address in own.iter().map(IpCidr::address).filter(|address| self.device_of(*address) == device) {
            if let IpAddress::Ipv6(address) = address {
                let [.., a, b, c] = address.octets();
                let group = EthernetAddress([0x33, 0x33, 0xff, a, b, c]);
                if !groups.contains(&group) {
                    groups.push(group);
                }
            }
        }
        groups
    }
}

/// Puts `mac` in the place of the sender's Ethernet address.
pub(super) fn stamp(frame: &mut [u8], mac: EthernetAddress) {
    let Some(header) = frame.get_mut(..ETHERNET_HEADER_BYTES) else { return };
    header[6..12].copy_from_slice(&mac.0);
    let kind = [header[12], header[13]];
    if kind == TYPE_ARP {
        if let Some(sender) = frame.get_mut(ETHERNET_HEADER_BYTES + 8..ETHERNET_HEADER_BYTES + 14) {
            sender.copy_from_slice(&mac.0);
        }
        return;
    }
    let is_neighbor = kind == TYPE_IPV6
        && frame.get(ETHERNET_HEADER_BYTES + 6) == Some(&ICMPV6)
        && frame.get(ICMPV6_AT).is_some_and(|kind| NEIGHBOR_MESSAGES.contains(kind));
    if !is_neighbor {
        return;
    }
    let Some(&mut [kind, len, ref mut address @ ..]) = frame.get_mut(NEIGHBOR_OPTIONS_AT..NEIGHBOR_OPTIONS_AT + 8)
    else {
        return;
    };
    if !LINK_ADDRESS_OPTIONS.contains(&kind) || len != 1 {
        return;
    }
    let (old, new) = (checksum::sum(address), checksum::sum(&mac.0));
    address.copy_from_slice(&mac.0);
    let before = u16::from_be_bytes([frame[ICMPV6_AT + 2], frame[ICMPV6_AT + 3]]);
    frame[ICMPV6_AT + 2..ICMPV6_AT + 4].copy_from_slice(&checksum::update(before, old, new).to_be_bytes());
}

/// A number that the frames of one flow share: over the addresses and, where they follow a plain
/// header, the ports.
pub(super) fn flow(frame: &[u8]) -> usize {
    const AT: usize = ETHERNET_HEADER_BYTES;
    let (addresses, ports) = match frame.get(12..14) {
        Some([0x08, 0x00]) => (AT + 12..AT + 20, if frame.get(AT) == Some(&0x45) { AT + 20..AT + 24 } else { 0..0 }),
        Some([0x86, 0xdd]) => (AT + 8..AT + 40, AT + 40..AT + 44),
        _ => return 0,
    };
    let bytes = [addresses, ports].into_iter().filter_map(|part| frame.get(part)).flatten();
    // FNV-1a, 32 bits.
    let hash = bytes.fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193));
    (hash ^ hash >> 16) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::neighbor::Question;
    use smoltcp::phy::ChecksumCapabilities;
    use smoltcp::wire::{Icmpv6Packet, Icmpv6Repr, Ipv6Packet};

    const FIRST: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 1]);
    const SECOND: EthernetAddress = EthernetAddress([0, 0x16, 0x3e, 0xff, 0xfe, 0x77]);

    fn cidr(text: &str) -> IpCidr {
        text.parse().unwrap()
    }

    fn two() -> (Addresses, Vec<IpCidr>) {
        let second = Vec::from([cidr("10.8.0.2/24"), cidr("fd08::2:3456/64")]);
        let mut own = Vec::from([cidr("fe80::1/64"), cidr("10.9.0.2/24"), cidr("fd09::2/64")]);
        own.extend(&second);
        (Addresses(Vec::from([second])), own)
    }

    fn question(question: Question) -> Vec<u8> {
        let mut frame = std::vec![0; question.frame_bytes(FIRST)];
        question.emit(FIRST, &mut frame);
        frame
    }

    #[test]
    fn a_frame_leaves_by_the_device_that_has_its_source() {
        let (addresses, own) = two();
        let arp = |to: [u8; 4], from: [u8; 4]| question(Question::Arp { to: to.into(), own: from.into() });
        assert_eq!(addresses.outgoing(&arp([10, 8, 0, 1], [10, 8, 0, 2])), 1);
        assert_eq!(addresses.outgoing(&arp([10, 9, 0, 1], [10, 9, 0, 2])), 0);
        let ask =
            |own: &str| question(Question::Solicitation { to: "fd08::1".parse().unwrap(), own: own.parse().unwrap() });
        assert_eq!(addresses.outgoing(&ask("fd08::2:3456")), 1);
        assert_eq!(addresses.outgoing(&ask("fe80::1")), 0);
        assert_eq!(addresses.outgoing(&[0; 14]), 0);
        // What asks for the second device's address on the first one's link goes unheard, and the
        // other way round.
        let asked = arp([10, 8, 0, 2], [10, 9, 0, 1]);
        assert!(addresses.is_astray(&asked, 0, &own) && !addresses.is_astray(&asked, 1, &own));
        let asked = arp([10, 9, 0, 2], [10, 8, 0, 1]);
        assert!(addresses.is_astray(&asked, 1, &own) && !addresses.is_astray(&asked, 0, &own));
        assert!(!addresses.is_astray(&arp([10, 8, 0, 255], [10, 9, 0, 1]), 0, &own));
        assert!(!Addresses::default().is_astray(&asked, 0, &own));
    }

    #[test]
    fn the_sender_is_named_in_the_header_in_arp_and_in_neighbour_discovery() {
        let mut arp = question(Question::Arp { to: [10, 8, 0, 1].into(), own: [10, 8, 0, 2].into() });
        stamp(&mut arp, SECOND);
        assert_eq!((&arp[6..12], &arp[22..28]), (&SECOND.0[..], &SECOND.0[..]));
        let (to, own): (Ipv6Address, Ipv6Address) = ("fd08::1".parse().unwrap(), "fd08::2".parse().unwrap());
        let mut ask = question(Question::Solicitation { to, own });
        stamp(&mut ask, SECOND);
        assert_eq!(&ask[6..12], &SECOND.0);
        let packet = Ipv6Packet::new_checked(&ask[14..]).unwrap();
        let message = Icmpv6Packet::new_checked(packet.payload()).unwrap();
        let (from, to) = (packet.src_addr(), packet.dst_addr());
        // Fails where the checksum is wrong.
        let repr = Icmpv6Repr::parse(&from, &to, &message, &ChecksumCapabilities::default()).unwrap();
        assert!(std::format!("{repr:?}").contains("ff, fe, 77") || std::format!("{repr:?}").contains("255, 254, 119"));
        for len in 0..ask.len() {
            stamp(&mut ask.clone()[..len], FIRST);
        }
    }

    #[test]
    fn each_device_asks_for_the_groups_of_its_own_addresses() {
        let (addresses, own) = two();
        let group = |a, b, c| EthernetAddress([0x33, 0x33, 0xff, a, b, c]);
        let (first, second) = (addresses.groups(0, &own), addresses.groups(1, &own));
        assert_eq!(first[2..], [group(0, 0, 1), group(0, 0, 2)]);
        assert_eq!(second[2..], [group(2, 0x34, 0x56)]);
        assert_eq!(first[..2], second[..2]);
    }

    #[test]
    fn a_flow_keeps_its_number_and_flows_spread() {
        let frame = |port: u16| {
            let mut frame = std::vec![0; 60];
            frame[12..15].copy_from_slice(&[8, 0, 0x45]);
            frame[34..36].copy_from_slice(&port.to_be_bytes());
            frame
        };
        let mut seen = [0; 4];
        for port in 0..400 {
            assert_eq!(flow(&frame(port)), flow(&frame(port)));
            seen[flow(&frame(port)) % 4] += 1;
        }
        assert!(seen.iter().all(|count| *count > 60), "{seen:?}");
        assert_eq!(flow(&[0; 14]), 0);
        (0..60).for_each(|len| _ = flow(&frame(1)[..len]));
    }
}
