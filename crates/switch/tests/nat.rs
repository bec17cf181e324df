//! Address translation compared with a simple table: every mapping is one-to-one and stable, every
//! frame that comes out has right checksums, and answers find their way back. No input bytes cause
//! a panic.
#![allow(missing_docs)]

use proptest::prelude::*;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    Icmpv4Packet, Icmpv4Repr, IpProtocol, Ipv4Packet, Ipv4Repr, TcpControl, TcpPacket, TcpRepr, TcpSeqNumber,
    UdpPacket, UdpRepr,
};
use std::collections::HashMap;
use std::net::Ipv4Addr;
use tombolo_switch::Nanos;
use tombolo_switch::frame::Mac;
use tombolo_switch::nat::{Config, FIRST_PORT, Nat, Protocol, Verdict};

const ROUTER_MAC: Mac = [2, 0, 0, 0, 0, 0xfe];
const PEER_MAC: Mac = [2, 0, 0, 0, 0, 0xaa];
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 2);
const PEER: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 1);

fn nat() -> Nat {
    let mut nat = Nat::new(Config {
        mac: ROUTER_MAC,
        router: Ipv4Addr::new(10, 9, 0, 2),
        subnet: Ipv4Addr::new(10, 9, 0, 0),
        prefix: 24,
        outside: OUTSIDE,
        peer: PEER,
        host: PEER,
        forwards: Vec::new(),
    });
    assert!(nat.next_for_uplink().is_some(), "it asks for the uplink's address");
    let mut answer = [&ROUTER_MAC[..], &PEER_MAC, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &PEER_MAC].concat();
    answer.extend_from_slice(&PEER.octets());
    answer.extend_from_slice(&ROUTER_MAC);
    answer.extend_from_slice(&OUTSIDE.octets());
    assert_eq!(nat.inbound(Nanos(0), &mut answer), Verdict::Taken);
    nat
}

fn guest(n: u8) -> (Mac, Ipv4Addr) {
    ([2, 0, 0, 0, 1, n], Ipv4Addr::new(10, 9, 0, 20 + n))
}

/// One end of a conversation: address and port, or the identifier of an echo.
type End = (Ipv4Addr, u16);

/// A frame that is rightly summed; an echo has one identifier, the source's on the way out, the
/// destination's back.
fn frame(macs: (Mac, Mac), kind: Protocol, from: End, to: End, data: &[u8], back: bool) -> Vec<u8> {
    let sums = ChecksumCapabilities::default();
    let (protocol, header) = match kind {
        Protocol::Tcp => (IpProtocol::Tcp, 20),
        Protocol::Udp => (IpProtocol::Udp, 8),
        Protocol::Echo => (IpProtocol::Icmp, 8),
    };
    let payload_len = header + data.len();
    let mut bytes = [&macs.1[..], &macs.0, &[8, 0]].concat();
    bytes.resize(34 + payload_len, 0);
    let ipv4 = Ipv4Repr { src_addr: from.0, dst_addr: to.0, next_header: protocol, payload_len, hop_limit: 64 };
    ipv4.emit(&mut Ipv4Packet::new_unchecked(&mut bytes[14..]), &sums);
    let body = &mut bytes[34..];
    match kind {
        Protocol::Udp => {
            let repr = UdpRepr { src_port: from.1, dst_port: to.1 };
            let mut packet = UdpPacket::new_unchecked(body);
            let fill = |room: &mut [u8]| room.copy_from_slice(data);
            repr.emit(&mut packet, &from.0.into(), &to.0.into(), data.len(), fill, &sums);
        }
        Protocol::Tcp => {
            let repr = TcpRepr {
                src_port: from.1,
                dst_port: to.1,
                control: TcpControl::None,
                seq_number: TcpSeqNumber(1),
                ack_number: Some(TcpSeqNumber(7)),
                window_len: 99,
                window_scale: None,
                max_seg_size: None,
                sack_permitted: false,
                sack_ranges: [None; 3],
                timestamp: None,
                payload: data,
            };
            repr.emit(&mut TcpPacket::new_unchecked(body), &from.0.into(), &to.0.into(), &sums);
        }
        Protocol::Echo => {
            let repr = match back {
                false => Icmpv4Repr::EchoRequest { ident: from.1, seq_no: 3, data },
                true => Icmpv4Repr::EchoReply { ident: to.1, seq_no: 3, data },
            };
            repr.emit(&mut Icmpv4Packet::new_unchecked(body), &sums);
        }
    }
    bytes
}

/// MACs, ends and payload of a frame whose sums have to be right.
fn read(bytes: &[u8], kind: Protocol, back: bool) -> (Mac, Mac, End, End, Vec<u8>) {
    let ipv4 = Ipv4Packet::new_checked(&bytes[14..]).unwrap();
    assert!(ipv4.verify_checksum(), "the header's sum");
    let (from, to) = (ipv4.src_addr(), ipv4.dst_addr());
    let body = ipv4.payload();
    let (from_port, to_port, data) = match kind {
        Protocol::Udp => {
            let udp = UdpPacket::new_checked(body).unwrap();
            assert!(udp.verify_checksum(&from.into(), &to.into()), "the datagram's sum");
            (udp.src_port(), udp.dst_port(), udp.payload().to_vec())
        }
        Protocol::Tcp => {
            let tcp = TcpPacket::new_checked(body).unwrap();
            assert!(tcp.verify_checksum(&from.into(), &to.into()), "the segment's sum");
            (tcp.src_port(), tcp.dst_port(), tcp.payload().to_vec())
        }
        Protocol::Echo => {
            let icmp = Icmpv4Packet::new_checked(body).unwrap();
            assert!(icmp.verify_checksum(), "the message's sum");
            let ends = if back { (0, icmp.echo_ident()) } else { (icmp.echo_ident(), 0) };
            (ends.0, ends.1, icmp.data().to_vec())
        }
    };
    let mac = |at: usize| Mac::try_from(&bytes[at..at + 6]).unwrap();
    (mac(6), mac(0), (from, from_port), (to, to_port), data)
}

fn kind() -> impl Strategy<Value = Protocol> {
    prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp), Just(Protocol::Echo)]
}

fn idle(kind: Protocol) -> Nanos {
    let seconds = match kind {
        Protocol::Tcp => 7440,
        Protocol::Udp => 300,
        Protocol::Echo => 60,
    };
    Nanos::SECOND.times(seconds)
}

#[derive(Clone, Debug)]
struct Step {
    guest: u8,
    kind: Protocol,
    port: u16,
    peer: u8,
    data: Vec<u8>,
    pause_secs: u64,
}

fn step() -> impl Strategy<Value = Step> {
    // Few ports, high and low ones, so that guests collide.
    let port = prop_oneof![1u16..4, 1022u16..1028, 65_533u16..=65_535];
    let pause = prop_oneof![8 => 0u64..5, 1 => Just(70u64), 1 => Just(400), 1 => Just(10_000)];
    let data = prop::collection::vec(any::<u8>(), 0..40);
    (0u8..4, kind(), port, 1u8..4, data, pause).prop_map(|(guest, kind, port, peer, data, pause_secs)| Step {
        guest,
        kind,
        port,
        peer,
        data,
        pause_secs,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn mappings_are_one_to_one_and_stable_and_answers_come_back(steps in prop::collection::vec(step(), 1..60)) {
        let mut nat = nat();
        let mut now = Nanos(0);
        // The simple table: a guest's end, its uplink port, and when it was last used.
        let mut table: HashMap<(Protocol, End), (u16, Nanos)> = HashMap::new();
        for Step { guest: n, kind, port, peer, data, pause_secs } in steps {
            now = now.after(Nanos::SECOND.times(pause_secs));
            table.retain(|(kind, _), (_, last)| now.since(*last) < idle(*kind));
            let (mac, address) = guest(n);
            let inside = (address, port);
            let outer = (Ipv4Addr::new(198, 51, 100, peer), if kind == Protocol::Echo { 0 } else { 443 });
            let mut out = frame((mac, ROUTER_MAC), kind, inside, outer, &data, false);
            prop_assert_eq!(nat.outbound(now, None, &mut out), Verdict::Pass);
            let (from_mac, to_mac, from, to, carried) = read(&out, kind, false);
            prop_assert_eq!((from_mac, to_mac, from.0, to, &carried), (ROUTER_MAC, PEER_MAC, OUTSIDE, outer, &data));
            prop_assert_eq!(out[14 + 8], 63, "one hop less");
            match table.get(&(kind, inside)) {
                Some((port, _)) => prop_assert_eq!(from.1, *port, "the same for every peer"),
                None => {
                    prop_assert!(from.1 >= FIRST_PORT, "lower ones are the forwards'");
                    let taken = table.iter().any(|((k, _), (port, _))| (*k, *port) == (kind, from.1));
                    prop_assert!(!taken, "a port for two");
                }
            }
            table.insert((kind, inside), (from.1, now));

            let mut back = frame((PEER_MAC, ROUTER_MAC), kind, outer, from, &data, true);
            prop_assert_eq!(nat.inbound(now, &mut back), Verdict::Pass);
            let (from_mac, to_mac, from, to, carried) = read(&back, kind, true);
            prop_assert_eq!((from_mac, to_mac, from, to, &carried), (ROUTER_MAC, mac, outer, inside, &data));
            prop_assert!(nat.flows() >= table.len());
        }
    }

    #[test]
    fn damage_on_the_way_is_not_repaired(step in step(), at in 34usize..60, bit in 0u8..8) {
        let mut nat = nat();
        let (mac, address) = guest(step.guest);
        let outer = (Ipv4Addr::new(198, 51, 100, 1), 443);
        let mut good = frame((mac, ROUTER_MAC), step.kind, (address, step.port), outer, &[7; 40], false);
        let mut bad = good.clone();
        // Behind the ports and outside of the sum itself, where a flipped bit shows in nothing but
        // the sum.
        let sums = match step.kind { Protocol::Tcp => 50..54, Protocol::Udp => 38..42, Protocol::Echo => 34..42 };
        prop_assume!(at >= 42 && !sums.contains(&at) && !(step.kind == Protocol::Tcp && (46..48).contains(&at)));
        bad[at] ^= 1 << bit;
        prop_assert_eq!(nat.outbound(Nanos(0), None, &mut good), Verdict::Pass);
        prop_assert_eq!(nat.outbound(Nanos(0), None, &mut bad), Verdict::Pass);
        good[at] ^= 1 << bit;
        prop_assert_eq!(good, bad, "the same sum, now wrong");
    }

    #[test]
    fn any_bytes_either_way_do_no_harm(frames in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..120), 0u8..4, any::<bool>()), 1..30)) {
        let mut nat = nat();
        let mut now = Nanos(0);
        for (mut bytes, dress, outward) in frames {
            if dress > 0 && bytes.len() >= 34 {
                bytes[..6].copy_from_slice(&ROUTER_MAC);
                bytes[12..14].copy_from_slice(if dress == 1 { &[8, 6] } else { &[8, 0] });
                if dress == 3 {
                    let total = (bytes.len() - 14) as u16;
                    bytes[14] = 0x45;
                    bytes[16..18].copy_from_slice(&total.to_be_bytes());
                    bytes[20..22].fill(0);
                    bytes[23] = [1, 6, 17][usize::from(bytes[23]) % 3];
                    let inside = guest(bytes[29] % 4).1.octets();
                    bytes[26..30].copy_from_slice(&inside);
                    if !outward {
                        bytes[30..34].copy_from_slice(&OUTSIDE.octets());
                    }
                }
            }
            if outward { nat.outbound(now, None, &mut bytes) } else { nat.inbound(now, &mut bytes) };
            now = now.after(Nanos::SECOND);
            nat.poll(now);
            while nat.next_for_network().is_some() || nat.next_for_uplink().is_some() {}
        }
    }
}
