//! The router for IPv6: what `tests` shows for IPv4, where the families differ.

use super::family::Message;
use super::packet::compose;
use super::*;
use std::net::Ipv6Addr;

const ROUTER: Mac = [2, 0, 0, 0, 0, 0xfe];
const GUEST: Mac = [2, 0, 0, 0, 0, 1];
const OTHER: Mac = [2, 0, 0, 0, 0, 2];
const PEER: Mac = [2, 0, 0, 0, 0, 0xaa];
/// The router's address on the network, and as what it is known to the uplink: by its MAC.
const OWN_LOCAL: &str = "fe80::ff:fe00:fe";
const OUTSIDE: &str = "fd99::2";
const UPLINK: &str = "fe80::1";
const HOST: &str = "fd99::1";
const FAR: (&str, u16) = ("2001:db8::7", 443);

fn ip(text: &str) -> Ipv6Addr {
    text.parse().unwrap()
}

fn config() -> Config<Ipv6Addr> {
    Config {
        mac: ROUTER,
        router: ip(OWN_LOCAL),
        subnet: ip("fd87::"),
        prefix: 64,
        outside: ip(OUTSIDE),
        peer: ip(UPLINK),
        host: ip(HOST),
        forwards: vec![Forward { protocol: Protocol::Tcp, port: 1, to: (ip("fd87::9"), 80) }],
    }
}

/// What a station says about its own address, unasked.
fn advertisement(mac: Mac, address: &str) -> Vec<u8> {
    let asked = Message { is_question: true, sender: ROUTER, sender_ip: ip(OWN_LOCAL), target_ip: ip(address) };
    Address::answer(mac, ip(address), &asked)
}

fn nat() -> Nat<Ipv6Addr> {
    let mut nat = Nat::new(config());
    let question = nat.next_for_uplink().unwrap();
    let asked = Ipv6Addr::link_message(&question).expect("a valid solicitation");
    assert_eq!((asked.sender, asked.sender_ip, asked.target_ip), (ROUTER, ip(OWN_LOCAL), ip(UPLINK)));
    assert_eq!(
        (&question[0..6], &question[38..54]),
        (&[0x33, 0x33, 0xff, 0, 0, 1][..], &ip("ff02::1:ff00:1").octets()[..])
    );
    assert!(!nat.is_peer_known());
    assert_eq!(nat.inbound(Nanos(0), &mut advertisement(PEER, UPLINK)), Verdict::Taken);
    assert!(nat.is_peer_known());
    nat
}

/// A frame with right sums.
fn packet(to: Mac, from: Mac, protocol: Protocol, src: (&str, u16), dst: (&str, u16), flags: u8) -> Vec<u8> {
    let ports = [src.1.to_be_bytes(), dst.1.to_be_bytes()].concat();
    let (number, sum_at, body) = match protocol {
        Protocol::Tcp => (6, 16, [&ports[..], &[0; 8], &[0x50, flags, 0, 0, 0, 0, 0, 0]].concat()),
        Protocol::Udp => (17, 6, [&ports[..], &[0, 13, 0, 0]].concat()),
        Protocol::Echo => (58, 2, [&[128, 0, 0, 0], &src.1.to_be_bytes()[..], &[0, 1]].concat()),
    };
    let body = [&body[..], b"hello"].concat();
    ethernet::<Ipv6Addr>(to, from, &compose(number, ip(src.0), ip(dst.0), &body, sum_at))
}

/// The sum of a packet without extension headers, over its pseudo-header: zero and 0xffff are one
/// number.
fn essence(frame: &[u8]) -> u16 {
    let body = &frame[54..];
    let words = [&frame[22..54], &[0, frame[20]], &(body.len() as u16).to_be_bytes(), body].concat();
    tombolo_ring::checksum::sum(&words) % 0xffff
}

fn sums_are_right(frame: &[u8]) {
    assert_eq!(essence(frame), 0, "{frame:02x?}");
}

fn ends(frame: &[u8]) -> ((Ipv6Addr, u16), (Ipv6Addr, u16)) {
    let packet = Ip::<Ipv6Addr>::of(frame).unwrap();
    let t = packet.transport(frame).unwrap();
    ((packet.from, t.source(frame)), (packet.to, t.destination(frame)))
}

#[test]
fn two_guests_with_the_same_port_get_different_ones_and_their_own_answers() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        let mut nat = nat();
        let mut seen = Vec::new();
        for (mac, guest) in [(GUEST, "fd87::9"), (OTHER, "fd87::10")] {
            let mut frame = packet(ROUTER, mac, protocol, (guest, 5001), FAR, SYN);
            assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Pass, "{protocol:?}");
            sums_are_right(&frame);
            let ((src, port), (dst, _)) = ends(&frame);
            assert_eq!((src, dst, frame[21]), (ip(OUTSIDE), ip(FAR.0), 63));
            assert_eq!(frame[0..12], [PEER, ROUTER].concat()[..]);
            seen.push((mac, guest, port));
        }
        assert_ne!(seen[0].2, seen[1].2);
        for (mac, guest, port) in seen {
            let from = if protocol == Protocol::Echo { port } else { FAR.1 };
            let mut frame = packet(ROUTER, PEER, protocol, (FAR.0, from), (OUTSIDE, port), SYN | ACK);
            assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Pass);
            sums_are_right(&frame);
            assert_eq!(frame[0..12], [mac, ROUTER].concat()[..]);
            let ((_, echo), (dst, to)) = ends(&frame);
            assert_eq!(dst, ip(guest));
            assert_eq!(if protocol == Protocol::Echo { echo } else { to }, 5001);
        }
    }
}

#[test]
fn the_hosts_own_connection_comes_as_an_address_that_guests_can_answer() {
    let mut nat = nat();
    let syn = packet(ROUTER, PEER, Protocol::Tcp, (UPLINK, 40000), (OWN_LOCAL, 1), SYN);
    assert_eq!(nat.inbound(Nanos(0), &mut syn.clone()), Verdict::Taken);
    let question = nat.next_for_network().unwrap();
    let asked = Ipv6Addr::link_message(&question).unwrap();
    assert_eq!((asked.is_question, asked.sender_ip, asked.target_ip), (true, ip(OWN_LOCAL), ip("fd87::9")));
    assert_eq!(nat.outbound(Nanos(0), None, &mut advertisement(GUEST, "fd87::9")), Verdict::Taken);
    let delivered = nat.next_for_network().unwrap();
    sums_are_right(&delivered);
    assert_eq!(ends(&delivered), ((ip(HOST), 40000), (ip("fd87::9"), 80)));
    assert_eq!(delivered[0..6], GUEST);
    let mut reply = packet(ROUTER, GUEST, Protocol::Tcp, ("fd87::9", 80), (HOST, 40000), SYN | ACK);
    assert_eq!(nat.outbound(Nanos(0), None, &mut reply), Verdict::Pass);
    sums_are_right(&reply);
    assert_eq!(ends(&reply), ((ip(OWN_LOCAL), 1), (ip(UPLINK), 40000)));
    // One from further away keeps its address, and comes to the other one of the router's.
    let mut far = packet(ROUTER, PEER, Protocol::Tcp, FAR, (OUTSIDE, 1), SYN);
    assert_eq!(nat.inbound(Nanos(0), &mut far), Verdict::Pass);
    assert_eq!(ends(&far), ((ip(FAR.0), FAR.1), (ip("fd87::9"), 80)));
    let mut reply = packet(ROUTER, GUEST, Protocol::Tcp, ("fd87::9", 80), FAR, SYN | ACK);
    assert_eq!(nat.outbound(Nanos(0), None, &mut reply), Verdict::Pass);
    assert_eq!(ends(&reply), ((ip(OUTSIDE), 1), (ip(FAR.0), FAR.1)));
    // No guest could answer another link-local address, and none starts a connection to the host.
    let mut local = packet(ROUTER, PEER, Protocol::Tcp, ("fe80::77", 5), (OWN_LOCAL, 1), SYN);
    assert_eq!(nat.inbound(Nanos(0), &mut local), Verdict::Drop(Reason::BadSource));
    for to in [HOST, UPLINK, OUTSIDE] {
        let mut other = packet(ROUTER, GUEST, Protocol::Tcp, ("fd87::9", 81), (to, 22), SYN);
        assert_eq!(nat.outbound(Nanos(0), None, &mut other), Verdict::Drop(Reason::NoDestination), "{to}");
    }
}

#[test]
fn what_is_for_a_guest_that_is_away_is_refused_at_once() {
    let mut nat = nat();
    nat.set_away(vec![ip("fd87::9")]);
    let syn = packet(ROUTER, PEER, Protocol::Tcp, (UPLINK, 40000), (OWN_LOCAL, 1), SYN);
    let refusal = |frame: &[u8]| {
        sums_are_right(frame);
        assert_eq!(frame[0..12], [PEER, ROUTER].concat()[..]);
        assert_eq!(ends(frame), ((ip(OWN_LOCAL), 1), (ip(UPLINK), 40000)));
        assert_eq!(frame[67], RST | ACK);
    };
    let mut frame = syn.clone();
    assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Reply);
    refusal(&frame);
    // It boots, and is waited for; and is away again before it answered.
    nat.set_away(vec![]);
    assert_eq!(nat.inbound(Nanos(0), &mut syn.clone()), Verdict::Taken);
    nat.set_away(vec![ip("fd87::9")]);
    refusal(&nat.next_for_uplink().unwrap());
    assert_eq!((nat.poll(Nanos(0)), nat.flows()), ((1, None), 0));
}

#[test]
fn the_router_answers_solicitations_and_echo_for_itself_only() {
    let mut nat = nat();
    for (from, group) in [("fd87::9", false), ("fe80::9", true), ("::", true)] {
        let to = (!group).then_some(ROUTER);
        let mut frame = Ipv6Addr::question(GUEST, ip(from), ip(OWN_LOCAL), to);
        assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Reply, "{from}");
        let answer = Ipv6Addr::link_message(&frame).expect("a valid advertisement");
        assert_eq!((answer.is_question, answer.sender, answer.target_ip), (false, ROUTER, ip(OWN_LOCAL)));
        // Router, override; solicited unless who asked has no address yet.
        let (flags, to) = if from == "::" { (0xa0, "ff02::1") } else { (0xe0, from) };
        assert_eq!((frame[58], &frame[0..6], &frame[38..54]), (flags, &GUEST[..], &ip(to).octets()[..]));
    }
    let mut other = Ipv6Addr::question(GUEST, ip("fd87::9"), ip("fd87::7"), None);
    assert_eq!(nat.outbound(Nanos(0), None, &mut other), Verdict::Taken);
    // In another's name.
    let mut false_one = Ipv6Addr::question(GUEST, ip("fd87::9"), ip(OWN_LOCAL), None);
    false_one[6..12].copy_from_slice(&OTHER);
    assert_eq!(nat.outbound(Nanos(0), None, &mut false_one), Verdict::Drop(Reason::BadSource));
    for from in ["fd87::9", "fe80::9"] {
        let mut ping = packet(ROUTER, GUEST, Protocol::Echo, (from, 7), (OWN_LOCAL, 0), 0);
        assert_eq!(nat.outbound(Nanos(0), None, &mut ping), Verdict::Reply);
        sums_are_right(&ping);
        assert_eq!((&ping[0..12], ping[54]), (&[GUEST, ROUTER].concat()[..], 129));
    }
    // The uplink finds both of the router's addresses.
    for own in [OUTSIDE, OWN_LOCAL] {
        let mut frame = Ipv6Addr::question(PEER, ip(UPLINK), ip(own), None);
        assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Reply);
        assert_eq!(Ipv6Addr::link_message(&frame).unwrap().target_ip, ip(own));
    }
}

#[test]
fn discovery_that_is_not_valid_is_not_believed() {
    let good = advertisement(GUEST, "fd87::9");
    assert!(Ipv6Addr::link_message(&good).is_some());
    for (what, at, value) in [
        ("routed", 21, 254),
        ("a code", 55, 1),
        ("another address than the sum covers", 77, 8),
        ("an option without length", 79, 0),
        ("an option longer than the message", 79, 2),
    ] {
        let mut frame = good.clone();
        let before = frame[at];
        frame[at] = value;
        // But for the address the sum is right, so that it is not the reason.
        if at != 77 && at != 21 {
            let word = |byte: u8| if at % 2 == 0 { u16::from(byte) << 8 } else { u16::from(byte) };
            packet::update(&mut frame, 56, &[word(before)], &[word(value)]);
        }
        assert!(Ipv6Addr::link_message(&frame).is_none(), "{what}");
        let mut nat = nat();
        let mut syn = packet(ROUTER, PEER, Protocol::Tcp, FAR, (OUTSIDE, 1), SYN);
        assert_eq!(nat.inbound(Nanos(0), &mut syn), Verdict::Taken);
        nat.outbound(Nanos(0), None, &mut frame);
        nat.next_for_network();
        assert_eq!(nat.next_for_network(), None, "{what}: nothing is sent to its MAC");
    }
}

/// The packet of `frame` with an extension header of `number` before its transport.
fn extended(frame: &[u8], number: u8, body: [u8; 6]) -> Vec<u8> {
    let mut out = [&frame[..54], &[frame[20], 0], &body, &frame[54..]].concat();
    out[20] = number;
    let len = u16::from_be_bytes([frame[18], frame[19]]) + 8;
    out[18..20].copy_from_slice(&len.to_be_bytes());
    out
}

#[test]
fn extension_headers_are_refused_since_passt_takes_them_for_the_transport() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        let plain = packet(ROUTER, GUEST, protocol, ("fd87::9", 5001), FAR, SYN);
        assert_eq!(nat().outbound(Nanos(0), None, &mut plain.clone()), Verdict::Pass);
        // Hop-by-hop and destination options of padding (RFC 8200 §4.2).
        let options = [0, 60].map(|number| extended(&plain, number, [1, 4, 0, 0, 0, 0]));
        // The first fragment, a later one, and the only one.
        let fragments = [[0, 1, 0, 0, 0, 7], [0, 8, 0, 0, 0, 7], [0, 0, 0, 0, 0, 7]];
        let refused = fragments.map(|body| extended(&plain, 44, body)).into_iter();
        let others = [43, 50, 51, 59, 135].map(|number| extended(&plain, number, [0; 6]));
        for (i, mut frame) in refused.chain(others).chain(options).enumerate() {
            let verdict = nat().outbound(Nanos(0), None, &mut frame);
            assert_eq!(verdict, Verdict::Drop(Reason::NotTransformable), "{protocol:?} {i}");
        }
    }
}

#[test]
fn what_cannot_or_must_not_be_translated_is_dropped_with_a_reason() {
    let mut nat = nat();
    let good = packet(ROUTER, GUEST, Protocol::Udp, ("fd87::9", 5), FAR, 0);
    type Change = dyn Fn(&mut Vec<u8>);
    let cases: [(&Change, Reason); 6] = [
        (&|f| f.truncate(13), Reason::Runt),
        (&|f| f.truncate(60), Reason::NotTransformable),
        (&|f| f[14] = 0x45, Reason::NotTransformable),
        (&|f| f[20] = 47, Reason::NotTransformable),
        (&|f| f[22] = 0xfc, Reason::BadSource),
        (&|f| f[21] = 1, Reason::NoDestination),
    ];
    for (i, (spoil, reason)) in cases.iter().enumerate() {
        let mut frame = good.clone();
        spoil(&mut frame);
        assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Drop(*reason), "case {i}");
    }
    for to in ["::1", "fd87::50", "ff02::1", "ff0e::1", "::", "fe80::5", "::ffff:127.0.0.1", "::ffff:192.0.2.1"] {
        let mut frame = packet(ROUTER, GUEST, Protocol::Udp, ("fd87::9", 5), (to, 53), 0);
        assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Drop(Reason::NoDestination), "{to}");
    }
    let mut frame = packet(ROUTER, GUEST, Protocol::Udp, ("fe80::9", 5), FAR, 0);
    assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Drop(Reason::BadSource), "a link-local source");
    let mut frame = packet(ROUTER, PEER, Protocol::Udp, FAR, (OUTSIDE, 3000), 0);
    assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Drop(Reason::NoDestination));
    let mut arp = [&[0xff; 6], &GUEST[..], &[8, 6], &[0; 28]].concat();
    assert_eq!(nat.outbound(Nanos(0), None, &mut arp), Verdict::Taken, "not this router's family");
}

/// An ICMPv6 error with right sums: its type and code, the word behind its sum, and the packet that
/// it quotes.
fn error(macs: (Mac, Mac), from: &str, to: &str, hops: u8, kind: [u8; 2], word: [u8; 4], quoted: &[u8]) -> Vec<u8> {
    let body = [&kind[..], &[0, 0], &word, quoted].concat();
    let mut packet = compose(58, ip(from), ip(to), &body, 2);
    packet[7] = hops;
    ethernet::<Ipv6Addr>(macs.0, macs.1, &packet)
}

/// Packet too big (the MTU is 1280), port unreachable, time exceeded, parameter problem.
const ERRORS: [([u8; 2], [u8; 4]); 4] =
    [([2, 0], [0, 0, 5, 0]), ([1, 4], [0; 4]), ([3, 0], [0; 4]), ([4, 1], [0, 0, 0, 6])];

fn a_hop_on(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame[21] -= 1;
    frame
}

#[test]
fn an_error_about_a_guests_packet_reaches_it_with_its_own_packet_in_it() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        for (kind, word) in ERRORS {
            let mut nat = nat();
            let mine = |mac, from| packet(ROUTER, mac, protocol, (from, 4000), FAR, ACK);
            // The first guest has the port, so the second one's is another.
            nat.outbound(Nanos(0), None, &mut mine(GUEST, "fd87::9"));
            let original = mine(OTHER, "fd87::10");
            let mut out = original.clone();
            assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
            assert_ne!(ends(&out).0.1, 4000);
            // The least that is translated, all of it, and just not TCP's sum.
            for quoted in [48, out.len() - 14, 56.min(out.len() - 14)] {
                let quoted = 14..14 + quoted;
                let (router, to) = ("2001:db8::fe", "fd87::10");
                let mut got = error((ROUTER, PEER), router, OUTSIDE, 60, kind, word, &out[quoted.clone()]);
                assert_eq!(nat.inbound(Nanos(1), &mut got), Verdict::Pass, "{protocol:?} {kind:?}");
                let want = error((OTHER, ROUTER), router, to, 59, kind, word, &a_hop_on(&original)[quoted]);
                assert_eq!(got, want, "{protocol:?} {kind:?}");
            }
        }
    }
}

#[test]
fn errors_of_a_connection_through_a_forward_find_both_ends() {
    for (outside, own, seen) in [(UPLINK, OWN_LOCAL, HOST), (FAR.0, OUTSIDE, FAR.0)] {
        let mut nat = nat();
        nat.outbound(Nanos(0), None, &mut advertisement(GUEST, "fd87::9"));
        let (kind, word) = ERRORS[0];
        let syn = packet(ROUTER, PEER, Protocol::Tcp, (outside, 5000), (own, 1), SYN);
        let mut came = syn.clone();
        assert_eq!(nat.inbound(Nanos(0), &mut came), Verdict::Pass);
        let mut got = error((ROUTER, GUEST), "fd87::9", seen, 64, kind, word, &came[14..]);
        assert_eq!(nat.outbound(Nanos(0), None, &mut got), Verdict::Pass);
        assert_eq!(got, error((PEER, ROUTER), own, outside, 63, kind, word, &a_hop_on(&syn)[14..]));
        let answer = packet(ROUTER, GUEST, Protocol::Tcp, ("fd87::9", 80), (seen, 5000), SYN | ACK);
        let mut out = answer.clone();
        assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
        let mut got = error((ROUTER, PEER), outside, own, 64, kind, word, &out[14..]);
        assert_eq!(nat.inbound(Nanos(0), &mut got), Verdict::Pass);
        assert_eq!(got, error((GUEST, ROUTER), seen, "fd87::9", 63, kind, word, &a_hop_on(&answer)[14..]));
    }
}

#[test]
fn errors_about_nothing_that_is_known_go_nowhere() {
    let mut nat = nat();
    let mut out = packet(ROUTER, GUEST, Protocol::Udp, ("fd87::9", 4000), FAR, 0);
    assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
    let (kind, word) = ERRORS[0];
    let way = |quoted: &[u8]| error((ROUTER, PEER), "2001:db8::fe", OUTSIDE, 60, kind, word, quoted);
    let quoting = |src| way(&packet(PEER, ROUTER, Protocol::Udp, src, FAR, 0)[14..]);
    let drop = |reason| Verdict::Drop(reason);
    assert_eq!(nat.inbound(Nanos(0), &mut quoting((OUTSIDE, 4001))), drop(Reason::NoDestination));
    assert_eq!(nat.inbound(Nanos(0), &mut quoting(("fd99::3", 4000))), drop(Reason::NoDestination));
    // Cut short, at every length; what quotes the ports is enough.
    let whole = way(&out[14..]);
    for len in 54..whole.len() {
        let mut short = whole[..len].to_vec();
        short[18..20].copy_from_slice(&(len as u16 - 54).to_be_bytes());
        let want = if len < 54 + 8 + 48 { drop(Reason::NotTransformable) } else { Verdict::Pass };
        assert_eq!(nat.inbound(Nanos(0), &mut short), want, "{len} bytes");
    }
    // A later fragment has no ports; an error about an error.
    let fragment = extended(&out, 44, [0, 8, 0, 0, 0, 7]);
    assert_eq!(nat.inbound(Nanos(0), &mut way(&fragment[14..])), drop(Reason::NotTransformable));
    assert_eq!(nat.inbound(Nanos(0), &mut way(&whole[14..])), drop(Reason::NotTransformable));
}

#[test]
fn the_router_answers_a_packet_whose_hops_are_used_up() {
    let mut nat = nat();
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        let mut last = packet(ROUTER, GUEST, protocol, ("fd87::9", 4000), FAR, SYN);
        last[21] = 1;
        // Longer than an error may be.
        last.extend([0; 1400]);
        let len = last.len() as u16 - 54;
        last[18..20].copy_from_slice(&len.to_be_bytes());
        let quoted = last[14..14 + 1280 - 48].to_vec();
        assert_eq!(nat.outbound(Nanos(0), None, &mut last), Verdict::Drop(Reason::NoDestination));
        let got = nat.next_for_network().unwrap();
        assert_eq!(got, error((GUEST, ROUTER), OWN_LOCAL, "fd87::9", 64, [3, 0], [0; 4], &quoted), "{protocol:?}");
        assert_eq!(nat.flows(), 0, "no port is taken for it");
    }
}

#[test]
fn whatever_comes_nothing_panics_and_what_is_damaged_stays_damaged() {
    let seed = std::env::var("TOMBOLO_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0x5eed);
    println!("TOMBOLO_SEED={seed}");
    let mut state: u64 = seed;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut passed = 0;
    for round in 0..20_000 {
        let mut nat = nat();
        let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Echo][random(3)];
        let mut out = packet(ROUTER, GUEST, protocol, ("fd87::9", 900), FAR, ACK);
        let original = out.clone();
        assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
        let (kind, word) = ERRORS[random(4)];
        let quoted = &out[14..14 + 48 + random(out.len() - 62 + 1)];
        let answer = error((ROUTER, PEER), "2001:db8::fe", OUTSIDE, 60, kind, word, quoted);
        let mut frame = [answer, original, advertisement(GUEST, "fd87::9")][random(3)].clone();
        for _ in 0..random(4) {
            let at = random(frame.len());
            frame[at] = random(256) as u8;
        }
        if random(4) == 0 {
            frame.truncate(random(frame.len()));
        }
        let before = frame.clone();
        let verdict =
            if random(2) == 0 { nat.inbound(Nanos(0), &mut frame) } else { nat.outbound(Nanos(0), None, &mut frame) };
        let ip = Ip::<Ipv6Addr>::of(&before).ok().filter(|ip| ip.transport_at == 54);
        if let Some(ip) = ip.filter(|_| verdict == Verdict::Pass) {
            // A UDP sum of zero means none, which this family does not allow: it is left alone.
            if ip.protocol != 17 || before[60..62] != [0, 0] {
                passed += 1;
                assert_eq!(essence(&before[..ip.end]), essence(&frame[..ip.end]), "round {round}");
            }
        }
    }
    assert!(passed > 2000, "{passed} passed");
}

#[test]
fn connections_go_on_in_a_router_that_takes_the_table_over() {
    let mut nat = nat();
    let guest = ("fd87::5", 40_000);
    let mut out = packet(ROUTER, GUEST, Protocol::Tcp, guest, FAR, SYN);
    assert_eq!(nat.outbound(Nanos(1), Some(Token(3)), &mut out), Verdict::Pass);
    let mut first = packet(ROUTER, PEER, Protocol::Tcp, (UPLINK, 5000), (OWN_LOCAL, 1), SYN);
    let bytes = first.len();
    assert_eq!(nat.inbound(Nanos(2), &mut first), Verdict::Taken);
    let table = nat.hand_over();
    let mut next = Nat::take_up(config(), &table).unwrap();
    assert_eq!((next.flows(), next.is_peer_known()), (nat.flows(), true));
    let mut back = packet(ROUTER, PEER, Protocol::Tcp, FAR, (OUTSIDE, 40_000), SYN | ACK);
    assert_eq!(next.inbound(Nanos(3), &mut back), Verdict::Pass);
    assert_eq!((&back[0..6], ends(&back).1), (&GUEST[..], (ip("fd87::5"), 40_000)));
    // The forward's guest says that it is there: what was held is sent.
    assert_eq!(next.outbound(Nanos(5), None, &mut advertisement(OTHER, "fd87::9")), Verdict::Taken);
    let sent: Vec<_> = std::iter::from_fn(|| next.next_for_network()).collect();
    let [held] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((&held[0..6], held.len()), (&OTHER[..], bytes));
    for cut in 0..table.len() {
        assert!(Nat::take_up(config(), &table[..cut]).is_err(), "{cut}");
    }
    // One family's table is not the other's.
    assert!(Nat::take_up(config(), &[1]).unwrap_err().contains("version 1, expected 129"));
}

/// What passt (Debian 12's, started with `-a fd99::2 -g fe80::1`) answered to this router's
/// question.
#[test]
fn passts_own_answer_is_believed() {
    let message = [0x88, 0, 0x98, 0x38, 0xe0, 0, 0, 0];
    let station = [0x5a, 0xe5, 0x86, 0xca, 0x20, 0x38];
    let body = [&message[..], &ip(UPLINK).octets(), &[2, 1], &station].concat();
    let header = [0x60, 0, 0, 0, 0, 32, 58, 255];
    let addresses = [ip(UPLINK).octets(), ip(OWN_LOCAL).octets()].concat();
    let mut frame = [&ROUTER[..], &station, &[0x86, 0xdd], &header, &addresses, &body].concat();
    let mut nat = Nat::new(config());
    assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Taken);
    assert!(nat.is_peer_known());
}
