//! ARP, ICMP, and what the gateway does not take.

use super::*;
use smoltcp::wire::{ArpOperation, ArpPacket, ArpRepr, Icmpv4Packet};

fn arp(n: u8, source: Ipv4Addr, target: Ipv4Addr, operation: ArpOperation) -> Vec<u8> {
    let repr = ArpRepr::EthernetIpv4 {
        operation,
        source_hardware_addr: EthernetAddress(mac(n)),
        source_protocol_addr: source,
        target_hardware_addr: EthernetAddress([0; 6]),
        target_protocol_addr: target,
    };
    let mut frame = [&[0xff; 6][..], &mac(n), &[8, 6]].concat();
    frame.resize(14 + 28, 0);
    repr.emit(&mut ArpPacket::new_unchecked(&mut frame[14..]));
    frame
}

/// An echo request of `data` by `route`.
pub(super) fn echo(route: &Route, data: &[u8]) -> Vec<u8> {
    let mut frame = packet::udp(route, 0, 0, &[&[0; 0], data].concat());
    frame[14 + 9] = 1;
    frame[34..42].copy_from_slice(&[8, 0, 0, 0, 0x12, 0x34, 0, 7]);
    Icmpv4Packet::new_unchecked(&mut frame[34..]).fill_checksum();
    Ipv4Packet::new_unchecked(&mut frame[14..]).fill_checksum();
    frame
}

#[test]
fn arp_for_our_address_is_answered_in_the_golden_bytes() {
    let mut world = World::new();
    let frames = world.put(&arp(1, ip(20), GATEWAY, ArpOperation::Request)).unwrap();
    let want: &[u8] = b"\x02\0\0\0\x01\x01\x02\0\0\0\0\xfe\x08\x06\0\x01\x08\0\x06\x04\0\x02\
        \x02\0\0\0\0\xfe\x0a\x09\0\x01\x02\0\0\0\x01\x01\x0a\x09\0\x14";
    assert_eq!(frames, [want]);
    assert!(world.put(&arp(1, ip(20), ip(21), ArpOperation::Request)).unwrap().is_empty());
    assert!(world.put(&arp(1, ip(20), GATEWAY, ArpOperation::Reply)).unwrap().is_empty());
    assert!(world.put(&arp(1, GATEWAY, ip(21), ArpOperation::Reply)).unwrap().is_empty());
    assert_eq!(world.count("address_conflicts"), 1);
    let mut false_sender = arp(1, ip(20), GATEWAY, ArpOperation::Request);
    false_sender[22 + 5] ^= 1;
    assert_eq!(world.put(&false_sender), Err(Reason::GatewayRefused));
}

#[test]
fn echo_is_answered_with_what_it_carried() {
    let mut world = World::new();
    for length in [0, 56, 1472] {
        let data: Vec<u8> = (0..length).map(|i| i as u8).collect();
        let frames = world.put(&echo(&route(1, ip(20)), &data)).unwrap();
        let frame = &frames[0];
        let icmp = Icmpv4Packet::new_checked(&frame[34..]).unwrap();
        assert!(icmp.verify_checksum() && Ipv4Packet::new_checked(&frame[14..]).unwrap().verify_checksum());
        assert_eq!(frame[..6], mac(1));
        assert_eq!((&frame[30..34], frame[34], icmp.echo_ident()), (&ip(20).octets()[..], 0, 0x1234));
        assert_eq!(&frame[42..], &data[..]);
    }
    let to_all = Route { destination: ip(255), destination_mac: [0xff; 6], ..route(1, ip(20)) };
    assert!(world.put(&echo(&to_all, b"smurf")).unwrap().is_empty());
}

#[test]
fn sums_are_looked_at_unless_the_frame_never_left_the_machine() {
    let mut world = World::new();
    let query = b"\x43\x21\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07gateway\x00\x00\x01\x00\x01";
    let mut frame = packet::udp(&route(1, ip(20)), 999, 53, query);
    frame[40] ^= 1;
    assert_eq!(world.put(&frame), Err(Reason::GatewayRefused));
    for checksum in [Checksum::Valid, Checksum::Partial { start: 34, offset: 6 }] {
        world.gateway.input(world.now, &frame, checksum, None).unwrap();
        assert_eq!(world.sent().len(), 1);
    }
    let mut frame = echo(&route(1, ip(20)), b"x");
    frame[36] ^= 1;
    assert_eq!(world.put(&frame), Err(Reason::GatewayRefused));
    let mut frame = echo(&route(1, ip(20)), b"x");
    frame[24] ^= 1;
    assert_eq!(world.put(&frame), Err(Reason::GatewayRefused), "the header's own sum");
}

#[test]
fn what_is_false_or_in_parts_is_refused_and_what_is_not_ours_ignored() {
    let mut world = World::new();
    let good = echo(&route(1, ip(20)), b"x");
    let change = |at: usize, bytes: &[u8]| {
        let mut frame = good.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        if at > 14 {
            Ipv4Packet::new_unchecked(&mut frame[14..]).fill_checksum();
        }
        frame
    };
    assert_eq!(world.put(&change(6, &[3])), Err(Reason::BadSource), "a group's source address");
    assert_eq!(world.put(&change(6, &[0; 6])), Err(Reason::BadSource));
    assert_eq!(world.put(&change(6, &GATEWAY_MAC)), Err(Reason::BadSource));
    assert_eq!(world.put(&change(20, &[0x20, 0])), Err(Reason::GatewayRefused), "a first fragment");
    assert_eq!(world.put(&change(20, &[0, 9])), Err(Reason::GatewayRefused), "a later fragment");
    for source in [ip(0), ip(255), GATEWAY, Ipv4Addr::new(8, 8, 8, 8), Ipv4Addr::UNSPECIFIED] {
        assert_eq!(world.put(&change(26, &source.octets())), Err(Reason::GatewayRefused), "{source}");
    }
    let ignored = world.count("ignored_frames");
    assert!(world.put(&change(0, &mac(9))).unwrap().is_empty(), "another station's");
    assert!(world.put(&change(12, &[0x86, 0xdd])).unwrap().is_empty(), "IPv6");
    assert_eq!(world.count("ignored_frames"), ignored + 2);
}

#[test]
fn what_is_not_served_gets_an_error_within_a_rate() {
    let mut world = World::new();
    let to_closed = packet::udp(&route(1, ip(20)), 999, 54, b"hello");
    let outside = Route { destination: Ipv4Addr::new(1, 1, 1, 1), ..route(1, ip(20)) };
    let to_outside = packet::udp(&outside, 999, 53, b"hello");
    for (frame, code) in [(&to_closed, 3), (&to_outside, 0)] {
        let reply = world.put(frame).unwrap().pop().unwrap();
        assert_eq!((reply[34], reply[35], &reply[30..34]), (3, code, &ip(20).octets()[..]));
        assert_eq!(reply[26..30], GATEWAY.octets());
        assert!(Icmpv4Packet::new_checked(&reply[34..]).unwrap().verify_checksum());
        // The start of the packet that it is about.
        assert_eq!(reply[42 + 12..42 + 28], frame[26..42]);
    }
    assert_eq!(world.count("not_routed_packets"), 1);
    let errors = (0..200).filter(|_| !world.put(&to_closed).unwrap().is_empty()).count();
    assert_eq!(errors, 48);
    world.pass(1);
    assert_eq!(world.put(&to_closed).unwrap().len(), 1);
}

#[test]
fn a_full_queue_is_a_counted_loss() {
    let mut world = World::new();
    let ping = echo(&route(1, ip(20)), b"x");
    for _ in 0..QUEUE_FRAMES {
        world.gateway.input(world.now, &ping, Checksum::Unverified, None).unwrap();
    }
    assert_eq!(world.gateway.input(world.now, &ping, Checksum::Unverified, None), Err(Reason::GatewayFull));
    assert_eq!((world.count("lost_answers"), world.sent().len()), (1, QUEUE_FRAMES));
}
