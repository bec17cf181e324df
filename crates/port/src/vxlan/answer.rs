//! The answer to an ARP request or a neighbour solicitation, in place of a member on another
//! machine.
//!
//! Pure: bytes in, bytes out. The question comes from a guest, so nothing in it is trusted. What is
//! not exactly a question that has an answer here gets none, and goes its usual way:
//!
//! | question | answered |
//! | --- | --- |
//! | ARP request to all, also a probe (sender 0.0.0.0, RFC 5227 §2.1.1) | yes |
//! | neighbour solicitation to the target's group, also one that detects duplicates (from ::, RFC 4862 §5.4.2) | yes |
//! | ARP announcement: sender and target are the same address | no, all are to hear it |
//! | question to one station: a neighbour that is known is asked whether it is still there | no, it says so itself |
//! | question of the holder itself, which has moved here | no |
//! | anything with a VLAN tag, other lengths, false senders, wrong sums, other options than RFC 4861 has | no |

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tombolo_ring::checksum;
use tombolo_switch::frame::{Checksum, ETHERNET_HEADER_BYTES, Mac};
use tombolo_switch::guard::{nd_options, solicited_node};

const ARP: [u8; 2] = [0x08, 0x06];
const IPV6: [u8; 2] = [0x86, 0xdd];
const ARP_BYTES: usize = 28;
/// Ethernet over which IPv4 is resolved: hardware and protocol types and lengths (RFC 826).
const ARP_KIND: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ARP_REQUEST: [u8; 2] = [0, 1];
const ARP_REPLY: [u8; 2] = [0, 2];

const IPV6_BYTES: usize = 40;
const ICMPV6: u8 = 58;
/// No router has passed it on (RFC 4861 §7.1.1).
const ON_LINK: u8 = 255;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;
/// Without options (RFC 4861 §4.3).
const SOLICITATION_BYTES: usize = 24;
const SOURCE_LINK_LAYER: u8 = 1;
const TARGET_LINK_LAYER: u8 = 2;
// RFC 4861 §4.4. The third flag says that the sender is a router, which is not known here.
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

const ARP_FRAME_BYTES: usize = ETHERNET_HEADER_BYTES + ARP_BYTES;
const ADVERTISEMENT_FRAME_BYTES: usize = ETHERNET_HEADER_BYTES + IPV6_BYTES + SOLICITATION_BYTES + 8;

/// A frame that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// An ARP reply (RFC 826).
    Arp([u8; ARP_FRAME_BYTES]),
    /// A neighbour advertisement (RFC 4861 §4.4).
    Neighbour([u8; ADVERTISEMENT_FRAME_BYTES]),
}

impl Answer {
    /// The whole frame.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Answer::Arp(bytes) => bytes,
            Answer::Neighbour(bytes) => bytes,
        }
    }
}

/// The answer to `frame`, a whole frame of a member of this machine, if it asks for an address for
/// which `find` has the MAC address. `checksum` is what is known of the frame's sum.
pub fn answer_to(frame: &[u8], checksum: Checksum, find: impl Fn(IpAddr) -> Option<Mac>) -> Option<Answer> {
    let (header, body) = frame.split_first_chunk::<ETHERNET_HEADER_BYTES>()?;
    let destination: Mac = header[..6].try_into().ok()?;
    let asker: Mac = header[6..12].try_into().ok()?;
    if asker[0] & 1 != 0 || asker == [0; 6] {
        return None;
    }
    // One that has moved here asks whether it may have its own address.
    let find = |address: IpAddr| find(address).filter(|mac| *mac != asker);
    match [header[12], header[13]] {
        ARP => arp(body, destination, asker, find),
        IPV6 => neighbour(body, destination, asker, checksum, find),
        _ => None,
    }
}

fn ethernet(bytes: &mut [u8], to: Mac, from: Mac, kind: [u8; 2]) {
    bytes[..6].copy_from_slice(&to);
    bytes[6..12].copy_from_slice(&from);
    bytes[12..14].copy_from_slice(&kind);
}

fn arp(body: &[u8], destination: Mac, asker: Mac, find: impl Fn(IpAddr) -> Option<Mac>) -> Option<Answer> {
    // What follows is padding.
    let request = body.first_chunk::<ARP_BYTES>()?;
    let (sender, target) = (&request[14..18], &request[24..28]);
    let is_request = request[..6] == ARP_KIND && request[6..8] == ARP_REQUEST && request[8..14] == asker;
    if destination != [0xff; 6] || !is_request || sender == target {
        return None;
    }
    let holder = find(Ipv4Addr::from(<[u8; 4]>::try_from(target).ok()?).into())?;
    let mut bytes = [0; ARP_FRAME_BYTES];
    ethernet(&mut bytes, asker, holder, ARP);
    let reply = &mut bytes[ETHERNET_HEADER_BYTES..];
    reply[..6].copy_from_slice(&ARP_KIND);
    reply[6..8].copy_from_slice(&ARP_REPLY);
    reply[8..14].copy_from_slice(&holder);
    reply[14..18].copy_from_slice(target);
    reply[18..24].copy_from_slice(&asker);
    reply[24..28].copy_from_slice(sender);
    Some(Answer::Arp(bytes))
}

fn address(bytes: &[u8]) -> Option<Ipv6Addr> {
    bytes.first_chunk::<16>().copied().map(Ipv6Addr::from)
}

/// The sum of a message of ICMPv6 with its pseudo-header (RFC 8200 §8.1): 0xffff if the checksum in
/// it is right.
fn sum(source: Ipv6Addr, destination: Ipv6Addr, message: &[u8]) -> u16 {
    let addresses = checksum::add(checksum::sum(&source.octets()), checksum::sum(&destination.octets()));
    let fixed = checksum::add(message.len() as u16, u16::from(ICMPV6));
    checksum::add(checksum::add(addresses, fixed), checksum::sum(message))
}

/// The link-layer address that the options of a solicitation name; `None` if they are not whole, or
/// name two.
fn source_link_layer(options: &[u8]) -> Option<Option<&[u8]>> {
    nd_options(options).try_fold(None, |found, option| match option? {
        (SOURCE_LINK_LAYER, bytes) if bytes.len() == 8 && found.is_none() => Some(Some(&bytes[2..])),
        (SOURCE_LINK_LAYER, _) => None,
        _ => Some(found),
    })
}

fn neighbour(
    body: &[u8],
    destination: Mac,
    asker: Mac,
    checksum: Checksum,
    find: impl Fn(IpAddr) -> Option<Mac>,
) -> Option<Answer> {
    let (header, payload) = body.split_first_chunk::<IPV6_BYTES>()?;
    let message = payload.get(..usize::from(u16::from_be_bytes([header[4], header[5]])))?;
    let is_solicitation = header[0] >> 4 == 6
        && (header[6], header[7]) == (ICMPV6, ON_LINK)
        && message.len() >= SOLICITATION_BYTES
        && message[..2] == [SOLICITATION, 0];
    if !is_solicitation {
        return None;
    }
    let (source, group, target) = (address(&header[8..])?, address(&header[24..])?, address(&message[8..])?);
    if target.is_multicast()
        || source.is_multicast()
        || source == target
        || solicited_node(target) != (destination, group)
    {
        return None;
    }
    let is_anonymous = source.is_unspecified();
    let told = source_link_layer(&message[SOLICITATION_BYTES..])?;
    // One that has no address yet names none, others have to (RFC 4861 §4.3).
    if told != if is_anonymous { None } else { Some(&asker[..]) } {
        return None;
    }
    if checksum == Checksum::Unverified && sum(source, group, message) != 0xffff {
        return None;
    }
    let holder = find(target.into())?;
    // Who asks whether it may have the address hears it as all do (RFC 4861 §7.2.4), in a frame to
    // itself (RFC 6085).
    let (to, flags) = if is_anonymous { (ALL_NODES, OVERRIDE) } else { (source, SOLICITED | OVERRIDE) };
    let mut bytes = [0; ADVERTISEMENT_FRAME_BYTES];
    ethernet(&mut bytes, asker, holder, IPV6);
    let (header, message) = bytes[ETHERNET_HEADER_BYTES..].split_at_mut(IPV6_BYTES);
    header[0] = 0x60;
    header[5] = message.len() as u8;
    (header[6], header[7]) = (ICMPV6, ON_LINK);
    header[8..24].copy_from_slice(&target.octets());
    header[24..].copy_from_slice(&to.octets());
    message[0] = ADVERTISEMENT;
    message[4] = flags;
    message[8..24].copy_from_slice(&target.octets());
    message[24..26].copy_from_slice(&[TARGET_LINK_LAYER, 1]);
    message[26..].copy_from_slice(&holder);
    let checksum = !sum(target, to, message);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    Some(Answer::Neighbour(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKER: Mac = [2, 0, 0, 0, 0, 7];
    const HOLDER: Mac = [2, 0, 0, 0, 0, 1];
    const HELD: [u8; 4] = [10, 87, 0, 12];
    const HELD6: &str = "fd00::12";

    fn ip(text: &str) -> Ipv6Addr {
        text.parse().unwrap()
    }

    fn find(address: IpAddr) -> Option<Mac> {
        (address == IpAddr::from(HELD) || address == IpAddr::from(ip(HELD6))).then_some(HOLDER)
    }

    fn ask(frame: &[u8]) -> Option<Answer> {
        answer_to(frame, Checksum::Unverified, find)
    }

    fn request(sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
        let mut frame =
            [&[0xff; 6][..], &ASKER, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &ASKER, &sender, &[0; 6], &target].concat();
        frame.resize(60, 0);
        frame
    }

    fn solicitation(source: &str, target: &str, options: &[u8]) -> Vec<u8> {
        let (source, target) = (ip(source), ip(target));
        let (mac, group) = solicited_node(target);
        let mut message = [&[135, 0, 0, 0, 0, 0, 0, 0][..], &target.octets(), options].concat();
        let right = !sum(source, group, &message);
        message[2..4].copy_from_slice(&right.to_be_bytes());
        let header = [0x60, 0, 0, 0, 0, message.len() as u8, 58, 255];
        [&mac[..], &ASKER, &[0x86, 0xdd], &header, &source.octets(), &group.octets(), &message].concat()
    }

    fn told() -> Vec<u8> {
        [&[1, 1][..], &ASKER].concat()
    }

    #[test]
    fn an_arp_request_and_its_answer_in_bytes() {
        let question = b"\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x07\x08\x06\x00\x01\x08\x00\x06\x04\x00\x01\
            \x02\x00\x00\x00\x00\x07\x0a\x57\x00\x09\x00\x00\x00\x00\x00\x00\x0a\x57\x00\x0c";
        let answer = b"\x02\x00\x00\x00\x00\x07\x02\x00\x00\x00\x00\x01\x08\x06\x00\x01\x08\x00\x06\x04\x00\x02\
            \x02\x00\x00\x00\x00\x01\x0a\x57\x00\x0c\x02\x00\x00\x00\x00\x07\x0a\x57\x00\x09";
        assert_eq!(ask(question).unwrap().bytes(), answer);
        assert_eq!(request([10, 87, 0, 9], HELD)[..42], question[..]);
        // A probe: the address is taken, and the answer names no address of the asker.
        let probe = ask(&request([0; 4], HELD)).unwrap();
        assert_eq!((&probe.bytes()[..38], &probe.bytes()[38..]), (&answer[..38], &[0; 4][..]));
    }

    #[test]
    fn a_solicitation_and_its_answer_in_bytes() {
        // The sums are those of another program, over the pseudo-header of RFC 8200 §8.1.
        let question = b"\x33\x33\xff\x00\x00\x12\x02\x00\x00\x00\x00\x07\x86\xdd\x60\x00\x00\x00\x00\x20\x3a\xff\
            \xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x09\
            \xff\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xff\x00\x00\x12\
            \x87\x00\x7d\x69\x00\x00\x00\x00\xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x12\
            \x01\x01\x02\x00\x00\x00\x00\x07";
        let answer = b"\x02\x00\x00\x00\x00\x07\x02\x00\x00\x00\x00\x01\x86\xdd\x60\x00\x00\x00\x00\x20\x3a\xff\
            \xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x12\
            \xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x09\
            \x88\x00\x1c\x73\x60\x00\x00\x00\xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x12\
            \x02\x01\x02\x00\x00\x00\x00\x01";
        assert_eq!(solicitation("fd00::9", HELD6, &told()), question);
        assert_eq!(ask(question).unwrap().bytes(), answer);
        // Duplicate address detection: to all, not solicited.
        let Some(Answer::Neighbour(taken)) = ask(&solicitation("::", HELD6, &[])) else { panic!("no answer") };
        assert_eq!((taken[..6] == ASKER, address(&taken[38..]).unwrap(), taken[58]), (true, ALL_NODES, OVERRIDE));
        assert_eq!(sum(ip(HELD6), ALL_NODES, &taken[54..]), 0xffff);
        // With a nonce (RFC 7527), as Linux asks.
        assert!(ask(&solicitation("::", HELD6, &[14, 1, 1, 2, 3, 4, 5, 6])).is_some());
    }

    #[test]
    fn what_is_no_question_for_a_known_address_has_no_answer() {
        let (good, good6) = (request([10, 87, 0, 9], HELD), solicitation("fd00::9", HELD6, &told()));
        assert!(ask(&good).is_some() && ask(&good6).is_some());
        let none = |what: &str, frame: Vec<u8>| assert_eq!(ask(&frame), None, "{what}");
        none("another address", request([10, 87, 0, 9], [10, 87, 0, 13]));
        none("an announcement", request(HELD, HELD));
        none("another address of IPv6", solicitation("fd00::9", "fd00::13", &told()));
        none("its own address", solicitation(HELD6, HELD6, &told()));
        none("no link-layer address", solicitation("fd00::9", HELD6, &[]));
        none("that of another", solicitation("fd00::9", HELD6, &[1, 1, 2, 0, 0, 0, 0, 8]));
        none("one of a host without an address", solicitation("::", HELD6, &told()));
        none("an empty option", solicitation("fd00::9", HELD6, &[1, 0, 2, 0, 0, 0, 0, 7]));
        none("a cut option", solicitation("fd00::9", HELD6, &[1, 2, 2, 0, 0, 0, 0, 7]));
        none("from a group", solicitation("ff02::1", HELD6, &told()));
        let change = |frame: &[u8], at: usize, to: u8| {
            let mut frame = frame.to_vec();
            frame[at] = to;
            frame
        };
        for (what, at, to) in [
            ("to one station", 0, 2),
            ("from a group", 6, 3),
            ("a false sender", 22, 4),
            ("another hardware", 15, 6),
            ("another protocol", 17, 1),
            ("a reply", 21, 2),
            ("a VLAN tag", 12, 0x81),
        ] {
            none(what, change(&good, at, to));
        }
        for (what, at, to) in [
            ("a wrong sum", 57, 0),
            ("another hop limit", 21, 254),
            ("another code", 55, 1),
            ("to one station", 0, 0x32),
            ("another group's MAC", 5, 0x13),
            ("another group", 53, 0x13),
            ("IPv4", 14, 0x45),
            ("an extension header", 20, 0),
        ] {
            none(what, change(&good6, at, to));
        }
        for (frame, whole) in [(&good, ARP_FRAME_BYTES), (&good6, good6.len())] {
            (0..whole).for_each(|bytes| none("cut short", frame[..bytes].to_vec()));
        }
        let wrong = change(&good6, 57, 0);
        assert!(answer_to(&wrong, Checksum::Valid, find).is_some(), "a sum that never left this machine");
        let own = |_| Some(ASKER);
        assert_eq!(answer_to(&good, Checksum::Unverified, own), None, "it moved here");
        assert_eq!(answer_to(&good6, Checksum::Unverified, own), None);
    }
}
