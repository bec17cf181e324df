use super::family::Message;
use super::flow::{TCP_CLOSED_NS, TCP_HALF_NS, TCP_NS, TCP_RESET_NS, UDP_NS};
use super::packet::{BROADCAST, FIN, update};
use super::*;

type Ipv4 = Ip<Ipv4Addr>;
type Forwarded = super::forwarded::Forwarded<Ipv4Addr>;

const ROUTER: Mac = [2, 0, 0, 0, 0, 0xfe];
const GUEST: Mac = [2, 0, 0, 0, 0, 1];
const OTHER: Mac = [2, 0, 0, 0, 0, 2];
const PEER: Mac = [2, 0, 0, 0, 0, 0xaa];

struct Arp;

impl Arp {
    fn of(frame: &[u8]) -> Option<Message<Ipv4Addr>> {
        Ipv4Addr::link_message(frame)
    }
}

fn arp(operation: u8, from: Mac, from_ip: Ipv4Addr, target: Mac, target_ip: Ipv4Addr, to: Mac) -> Vec<u8> {
    let head = [&to[..], &from, &[8, 6, 0, 1, 8, 0, 6, 4, 0, operation]].concat();
    [&head[..], &from, &from_ip.octets(), &target, &target_ip.octets()].concat()
}

fn ip(text: &str) -> Ipv4Addr {
    text.parse().unwrap()
}

fn nat() -> Nat {
    let mut nat = Nat::new(Config {
        mac: ROUTER,
        router: ip("10.87.0.2"),
        subnet: ip("10.87.0.0"),
        prefix: 24,
        outside: ip("192.0.0.2"),
        peer: ip("192.0.0.1"),
        host: ip("192.0.0.1"),
        forwards: vec![Forward { protocol: Protocol::Tcp, port: 1, to: (ip("10.87.0.9"), 80) }],
    });
    let question = nat.next_for_uplink().unwrap();
    assert_eq!(Arp::of(&question).unwrap().target_ip, ip("192.0.0.1"));
    let mut answer = arp(2, PEER, ip("192.0.0.1"), ROUTER, ip("192.0.0.2"), ROUTER);
    assert_eq!(nat.inbound(Nanos(0), &mut answer), Verdict::Taken);
    nat
}

fn sum(bytes: impl IntoIterator<Item = u8>) -> u16 {
    let bytes: Vec<u8> = bytes.into_iter().collect();
    let mut sum: u32 = bytes.chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], *c.get(1).unwrap_or(&0)]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// A frame with right sums.
fn packet(to: Mac, from: Mac, protocol: Protocol, src: (&str, u16), dst: (&str, u16), flags: u8) -> Vec<u8> {
    let mut body = match protocol {
        Protocol::Tcp => {
            let mut b = vec![0; 20];
            (b[12], b[13]) = (0x50, flags);
            b
        }
        Protocol::Udp => vec![0, 0, 0, 0, 0, 13, 0, 0],
        Protocol::Echo => vec![8, 0, 0, 0, 0, 0, 0, 1],
    };
    if protocol == Protocol::Echo {
        body[4..6].copy_from_slice(&src.1.to_be_bytes());
    } else {
        body[0..2].copy_from_slice(&src.1.to_be_bytes());
        body[2..4].copy_from_slice(&dst.1.to_be_bytes());
    }
    body.extend_from_slice(b"hello");
    let (number, at) = match protocol {
        Protocol::Tcp => (6, 16),
        Protocol::Udp => (17, 6),
        Protocol::Echo => (1, 2),
    };
    let total = (20 + body.len()) as u16;
    let mut header = vec![0x45, 0, (total >> 8) as u8, total as u8, 0, 1, 0, 0, 64, number, 0, 0];
    header.extend_from_slice(&ip(src.0).octets());
    header.extend_from_slice(&ip(dst.0).octets());
    let s = !sum(header.iter().copied());
    header[10..12].copy_from_slice(&s.to_be_bytes());
    let pseudo = [0, number, 0, body.len() as u8];
    let pseudo = header[12..20].iter().copied().chain(pseudo).filter(|_| protocol != Protocol::Echo);
    let s = !sum(pseudo.chain(body.iter().copied()));
    body[at..at + 2].copy_from_slice(&s.to_be_bytes());
    let mut out = Vec::new();
    out.extend_from_slice(&to);
    out.extend_from_slice(&from);
    out.extend_from_slice(&[8, 0]);
    out.extend(header);
    out.extend(body);
    out
}

fn sums_are_right(frame: &[u8]) {
    let packet = Ipv4::of(frame).unwrap();
    assert_eq!(sum(frame[14..34].iter().copied()), 0xffff, "IP header");
    let body = &frame[34..packet.end];
    let pseudo = [0, packet.protocol, 0, body.len() as u8];
    let pseudo = frame[26..34].iter().copied().chain(pseudo).filter(|_| packet.protocol != 1);
    assert_eq!(sum(pseudo.chain(body.iter().copied())), 0xffff, "transport");
}

fn ends(frame: &[u8]) -> ((Ipv4Addr, u16), (Ipv4Addr, u16)) {
    let packet = Ipv4::of(frame).unwrap();
    let t = packet.transport(frame).unwrap();
    ((packet.from, t.source(frame)), (packet.to, t.destination(frame)))
}

#[test]
fn two_guests_with_the_same_port_get_different_ones_and_their_own_answers() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        let mut nat = nat();
        let mut seen = Vec::new();
        for (mac, guest) in [(GUEST, "10.87.0.9"), (OTHER, "10.87.0.10")] {
            let mut frame = packet(ROUTER, mac, protocol, (guest, 5001), ("198.51.100.7", 53), 2);
            assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Pass, "{protocol:?}");
            sums_are_right(&frame);
            let ((src, port), (dst, _)) = ends(&frame);
            assert_eq!((src, dst), (ip("192.0.0.2"), ip("198.51.100.7")));
            assert_eq!(frame[0..12], [PEER, ROUTER].concat()[..]);
            seen.push((mac, guest, port));
        }
        assert_ne!(seen[0].2, seen[1].2);
        for (mac, guest, port) in seen {
            let from = if protocol == Protocol::Echo { port } else { 53 };
            let mut frame = packet(ROUTER, PEER, protocol, ("198.51.100.7", from), ("192.0.0.2", port), 0x12);
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
fn a_forward_asks_for_the_guest_then_delivers_and_its_answers_keep_its_port() {
    let mut nat = nat();
    let syn = packet(ROUTER, PEER, Protocol::Tcp, ("192.0.0.1", 40000), ("192.0.0.2", 1), 2);
    assert_eq!(nat.inbound(Nanos(0), &mut syn.clone()), Verdict::Taken);
    let question = nat.next_for_network().unwrap();
    assert_eq!((question[0..6].to_vec(), Arp::of(&question).unwrap().target_ip), (BROADCAST.to_vec(), ip("10.87.0.9")));
    let mut answer = arp(2, GUEST, ip("10.87.0.9"), ROUTER, ip("10.87.0.2"), ROUTER);
    assert_eq!(nat.outbound(Nanos(0), None, &mut answer), Verdict::Taken);
    let delivered = nat.next_for_network().unwrap();
    sums_are_right(&delivered);
    assert_eq!(ends(&delivered), ((ip("192.0.0.1"), 40000), (ip("10.87.0.9"), 80)));
    assert_eq!(delivered[0..6], GUEST);
    let mut reply = packet(ROUTER, GUEST, Protocol::Tcp, ("10.87.0.9", 80), ("192.0.0.1", 40000), 0x12);
    assert_eq!(nat.outbound(Nanos(0), None, &mut reply), Verdict::Pass);
    sums_are_right(&reply);
    assert_eq!(ends(&reply), ((ip("192.0.0.2"), 1), (ip("192.0.0.1"), 40000)));
    // No guest starts a connection to the host through that address.
    let mut other = packet(ROUTER, GUEST, Protocol::Tcp, ("10.87.0.9", 81), ("192.0.0.1", 22), 2);
    assert_eq!(nat.outbound(Nanos(0), None, &mut other), Verdict::Drop(Reason::NoDestination));
}

#[test]
fn a_guest_that_boots_is_asked_until_the_uplink_would_give_up() {
    let mut nat = nat();
    let mut syn = packet(ROUTER, PEER, Protocol::Tcp, ("192.0.0.1", 40000), ("192.0.0.2", 1), 2);
    assert_eq!(nat.inbound(Nanos(0), &mut syn), Verdict::Taken);
    let (mut now, mut asked) = (Nanos(0), 0);
    let lost = loop {
        asked += u64::from(nat.next_for_network().is_some());
        match nat.poll(now) {
            (lost, None) => break lost,
            (0, Some(next)) => now = next,
            (lost, Some(_)) => panic!("{lost} lost early"),
        }
    };
    assert_eq!((asked, lost, now), (40, 1, HOLD_NS));
}

#[test]
fn what_is_for_a_guest_that_is_away_is_refused_at_once() {
    let mut nat = nat();
    nat.set_away(vec![ip("10.87.0.9")]);
    let from = ("192.0.0.1", 40000);
    let refusal = |frame: &[u8]| {
        sums_are_right(frame);
        assert_eq!(frame[0..12], [PEER, ROUTER].concat()[..]);
        assert_eq!(ends(frame), ((ip("192.0.0.2"), 1), (ip("192.0.0.1"), 40000)));
        let number = |at: usize| u32::from_be_bytes(frame[at..at + 4].try_into().unwrap());
        (frame[47], number(38), number(42))
    };
    // The first segment of a connection: the five bytes that it carries and its SYN are counted.
    let syn = packet(ROUTER, PEER, Protocol::Tcp, from, ("192.0.0.2", 1), SYN);
    let mut frame = syn.clone();
    assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Reply);
    assert_eq!(refusal(&frame), (RST | ACK, 0, 6));
    // One of an established connection.
    let mut frame = packet(ROUTER, PEER, Protocol::Tcp, from, ("192.0.0.2", 1), ACK);
    frame[42..46].copy_from_slice(&77u32.to_be_bytes());
    assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Reply);
    assert_eq!(refusal(&frame), (RST, 77, 0));
    // A reset is not answered, and no ARP request is sent.
    let mut frame = packet(ROUTER, PEER, Protocol::Tcp, from, ("192.0.0.2", 1), RST);
    assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Drop(Reason::NoDestination));
    assert_eq!((nat.next_for_network(), nat.deadline(), nat.flows()), (None, None, 0));
    // It is started, and waited for; and is away again before it answered.
    nat.set_away(vec![]);
    assert_eq!(nat.inbound(Nanos(0), &mut syn.clone()), Verdict::Taken);
    assert_eq!(nat.next_for_uplink(), None);
    nat.set_away(vec![ip("10.87.0.9")]);
    assert_eq!(refusal(&nat.next_for_uplink().unwrap()), (RST | ACK, 0, 6));
    assert_eq!((nat.poll(Nanos(0)), nat.flows()), ((1, None), 0));
    // Another guest's connections are not touched.
    let mut out = packet(ROUTER, OTHER, Protocol::Tcp, ("10.87.0.10", 5001), ("198.51.100.7", 80), SYN);
    assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
    let (_, port) = ends(&out).0;
    let mut back = packet(ROUTER, PEER, Protocol::Tcp, ("198.51.100.7", 80), ("192.0.0.2", port), SYN | ACK);
    assert_eq!(nat.inbound(Nanos(0), &mut back), Verdict::Pass);
}

#[test]
fn the_router_answers_arp_and_echo_for_itself_only() {
    let mut nat = nat();
    let mut question = arp(1, GUEST, ip("10.87.0.9"), [0; 6], ip("10.87.0.2"), BROADCAST);
    assert_eq!(nat.outbound(Nanos(0), None, &mut question), Verdict::Reply);
    let answer = Arp::of(&question).unwrap();
    assert_eq!((answer.is_question, answer.sender, answer.sender_ip), (false, ROUTER, ip("10.87.0.2")));
    let mut other = arp(1, GUEST, ip("10.87.0.9"), [0; 6], ip("10.87.0.7"), BROADCAST);
    assert_eq!(nat.outbound(Nanos(0), None, &mut other), Verdict::Taken);
    let mut ping = packet(ROUTER, GUEST, Protocol::Echo, ("10.87.0.9", 7), ("10.87.0.2", 0), 0);
    assert_eq!(nat.outbound(Nanos(0), None, &mut ping), Verdict::Reply);
    sums_are_right(&ping);
    assert_eq!(ping[0..12], [GUEST, ROUTER].concat()[..]);
}

#[test]
fn what_cannot_or_must_not_be_translated_is_dropped_with_a_reason() {
    let mut nat = nat();
    let good = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 5), ("198.51.100.7", 53), 0);
    type Change = dyn Fn(&mut Vec<u8>);
    let cases: [(&Change, Reason); 7] = [
        (&|f| f.truncate(13), Reason::Runt),
        (&|f| f.truncate(40), Reason::NotTransformable),
        (&|f| f[14] = 0x4f, Reason::NotTransformable),
        (&|f| f[20] = 0x20, Reason::NotTransformable),
        (&|f| f[23] = 47, Reason::NotTransformable),
        (&|f| f[26] = 11, Reason::BadSource),
        (&|f| f[22] = 1, Reason::NoDestination),
    ];
    for (i, (spoil, reason)) in cases.iter().enumerate() {
        let mut frame = good.clone();
        spoil(&mut frame);
        assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Drop(*reason), "case {i}");
    }
    for to in ["127.0.0.1", "10.87.0.50", "224.0.0.1", "255.255.255.255", "0.0.0.0"] {
        let mut frame = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 5), (to, 53), 0);
        assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Drop(Reason::NoDestination), "{to}");
    }
    let mut frame = packet(ROUTER, PEER, Protocol::Udp, ("198.51.100.7", 53), ("192.0.0.2", 3000), 0);
    assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Drop(Reason::NoDestination));
}

#[test]
fn no_truncation_panics() {
    let mut nat = nat();
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        let frame = packet(ROUTER, GUEST, protocol, ("10.87.0.9", 5), ("198.51.100.7", 53), 0);
        for n in 0..=frame.len() {
            nat.outbound(Nanos(0), None, &mut frame[..n].to_vec());
            nat.inbound(Nanos(0), &mut frame[..n].to_vec());
        }
    }
}

#[test]
fn a_guest_that_opens_flows_without_end_spends_only_its_own_share_until_they_are_idle() {
    let mut nat = nat();
    let mut refused = 0;
    for n in 0..(FLOWS_PER_SOURCE + 100) {
        let from = format!("10.87.0.{}", 20 + n % 200);
        let mut frame = packet(ROUTER, GUEST, Protocol::Udp, (&from, (n / 200 + 2000) as u16), ("198.51.100.7", 53), 0);
        refused += usize::from(nat.outbound(Nanos(0), None, &mut frame) == Verdict::Drop(Reason::GatewayFull));
    }
    assert_eq!(refused, 100);
    let mut other = packet(ROUTER, OTHER, Protocol::Udp, ("10.87.0.10", 5), ("198.51.100.7", 53), 0);
    assert_eq!(nat.outbound(Nanos(0), None, &mut other), Verdict::Pass);
    let later = UDP_NS.after(Nanos::SECOND);
    let mut frame = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 9), ("198.51.100.7", 53), 0);
    assert_eq!(nat.outbound(later, None, &mut frame), Verdict::Pass);
    assert_eq!(nat.flows(), 1, "idle mappings are gone");
}

fn secs(n: u64) -> Nanos {
    Nanos::SECOND.times(n)
}

fn tcp(from: (&str, u16), to: (&str, u16), flags: u8) -> Vec<u8> {
    let sender = if from.0.starts_with("10.87.") { GUEST } else { PEER };
    packet(ROUTER, sender, Protocol::Tcp, from, to, flags)
}

/// What the router sends into the network by itself: questions by whom they ask for, and other
/// frames.
fn sent(nat: &mut Nat) -> (Vec<(Mac, Ipv4Addr)>, Vec<Vec<u8>>) {
    let all = std::iter::from_fn(|| nat.next_for_network());
    let (questions, frames): (Vec<_>, Vec<_>) = all.partition(|f| f[12..14] == [8, 6]);
    let asked = |f: Vec<u8>| (f[0..6].try_into().unwrap(), Arp::of(&f).unwrap().target_ip);
    (questions.into_iter().map(asked).collect(), frames)
}

fn says(nat: &mut Nat, now: Nanos, mac: Mac) {
    let mut answer = arp(2, mac, ip("10.87.0.9"), ROUTER, ip("10.87.0.2"), ROUTER);
    assert_eq!(nat.outbound(now, None, &mut answer), Verdict::Taken);
}

#[test]
fn a_first_segment_is_repeated_until_the_guest_answers() {
    let mut nat = nat();
    let mut syn = tcp(("192.0.0.1", 40000), ("192.0.0.2", 1), SYN);
    assert_eq!(nat.inbound(Nanos(0), &mut syn), Verdict::Taken);
    // ARP is answered after 3 s, but the guest's TCP does not run for another 2 s.
    let (mut now, mut segments) = (Nanos(0), Vec::new());
    while let (0, Some(next)) = nat.poll(now) {
        let (asked, frames) = sent(&mut nat);
        assert!(asked.contains(&(BROADCAST, ip("10.87.0.9"))), "asked at {now:?}");
        for frame in frames {
            sums_are_right(&frame);
            assert_eq!((&frame[0..6], ends(&frame).1), (&GUEST[..], (ip("10.87.0.9"), 80)));
            segments.push(now);
        }
        if now == secs(3) {
            says(&mut nat, now, GUEST);
        }
        if now == secs(5) {
            let mut answer = tcp(("10.87.0.9", 80), ("192.0.0.1", 40000), SYN | ACK);
            assert_eq!(nat.outbound(now, None, &mut answer), Verdict::Pass);
        }
        now = next;
    }
    assert_eq!(nat.poll(now), (0, None), "nothing is repeated after the answer");
    assert!((4..=6).contains(&segments.len()), "{segments:?}");
    assert!(now <= secs(6));
}

#[test]
fn a_guest_that_was_known_and_boots_again_gets_the_first_segment_again() {
    let mut nat = nat();
    says(&mut nat, Nanos(0), OTHER);
    let mut syn = tcp(("192.0.0.1", 40000), ("192.0.0.2", 1), SYN);
    assert_eq!(nat.inbound(Nanos(0), &mut syn), Verdict::Pass);
    assert_eq!(syn[0..6], OTHER);
    // It comes back with another MAC; the old one does not answer.
    let mut now = Nanos(0);
    let delivered = loop {
        let (lost, next) = nat.poll(now);
        assert_eq!(lost, 0);
        let (_, frames) = sent(&mut nat);
        if let Some(frame) = frames.into_iter().find(|f| f[0..6] == GUEST) {
            break frame;
        }
        if now >= secs(1) {
            says(&mut nat, now, GUEST);
        }
        now = next.expect("it is still held");
    };
    sums_are_right(&delivered);
    assert!(now <= secs(4), "{now:?}");
    // The uplink gives the connection up: nothing is repeated any more.
    let mut reset = tcp(("192.0.0.1", 40000), ("192.0.0.2", 1), RST);
    assert_eq!(nat.inbound(now, &mut reset), Verdict::Pass);
    assert_eq!(nat.poll(now), (0, None));
}

#[test]
fn what_is_held_has_limits_and_every_loss_is_counted() {
    let mut nat = nat();
    for n in 0..(HELD as u16 + 10) {
        let mut syn = tcp(("192.0.0.1", 40000 + n), ("192.0.0.2", 1), SYN);
        assert_eq!(nat.inbound(Nanos(0), &mut syn), Verdict::Taken);
    }
    assert_eq!((nat.held.len(), nat.flows()), (HELD, HELD));
    assert_eq!(sent(&mut nat).0.len(), 1, "one question, however many wait");
    assert_eq!((nat.take_displaced(), nat.take_displaced()), (10, 0), "the oldest gave way");
    assert_eq!(nat.held[0].key.2, 40010);
    assert_eq!(nat.poll(HOLD_NS), (HELD as u64, None));
    assert_eq!(nat.flows(), 0, "nothing is left of connections that nobody answered");
}

/// A router with a TCP forward to 10.87.0.9:80 (port 1), a UDP one to 10.87.0.8:5000 (2) and a TCP
/// one to 10.87.0.8:80 (3).
fn with_forwards() -> Nat {
    let mut config = nat().config;
    config.forwards.extend([
        Forward { protocol: Protocol::Udp, port: 2, to: (ip("10.87.0.8"), 5000) },
        Forward { protocol: Protocol::Tcp, port: 3, to: (ip("10.87.0.8"), 80) },
    ]);
    let mut nat = Nat::new(config);
    nat.next_for_uplink();
    let mut answer = arp(2, PEER, ip("192.0.0.1"), ROUTER, ip("192.0.0.2"), ROUTER);
    assert_eq!(nat.inbound(Nanos(0), &mut answer), Verdict::Taken);
    nat
}

/// A guest says that it is there.
fn is_there(nat: &mut Nat, mac: Mac, address: &str) {
    let mut answer = arp(2, mac, ip(address), ROUTER, ip("10.87.0.2"), ROUTER);
    assert_eq!(nat.outbound(Nanos(0), None, &mut answer), Verdict::Taken);
}

fn datagram(from: (&str, u16)) -> Vec<u8> {
    packet(ROUTER, PEER, Protocol::Udp, from, ("192.0.0.2", 2), 0)
}

/// Sends `n` datagrams from addresses and ports that are all different; how many passed.
fn flood(nat: &mut Nat, now: Nanos, n: u32) -> usize {
    let one = |i: u32| {
        let from = format!("203.0.{}.{}", i / 60_000, i % 3);
        nat.inbound(now, &mut datagram((&from, (1024 + i % 60_000) as u16))) == Verdict::Pass
    };
    (0..n).map(one).filter(|passed| *passed).count()
}

#[test]
fn a_flood_of_one_forward_leaves_the_others_alone() {
    let mut nat = with_forwards();
    is_there(&mut nat, GUEST, "10.87.0.9");
    is_there(&mut nat, OTHER, "10.87.0.8");
    let client = ("198.51.100.7", 4000);
    assert_eq!(nat.inbound(Nanos(0), &mut tcp(client, ("192.0.0.2", 1), SYN)), Verdict::Pass);
    assert_eq!(nat.outbound(Nanos(0), None, &mut tcp(("10.87.0.9", 80), client, SYN | ACK)), Verdict::Pass);
    assert_eq!(nat.inbound(Nanos(0), &mut tcp(client, ("192.0.0.2", 1), ACK)), Verdict::Pass);
    // Neither is a datagram refused, nor a connection to another forward, new or old.
    assert_eq!(flood(&mut nat, secs(1), 200_000), 200_000);
    let share = nat.forwarded.share();
    assert_eq!(nat.flows(), 1 + share);
    for port in [1, 3] {
        let mut syn = tcp(("198.51.100.8", 4000), ("192.0.0.2", port), SYN);
        assert_eq!(nat.inbound(secs(1), &mut syn), Verdict::Pass, "forward {port}");
    }
    let mut answer = tcp(("10.87.0.9", 80), client, ACK);
    assert_eq!(nat.outbound(secs(1), None, &mut answer), Verdict::Pass);
    assert_eq!(ends(&answer).0, (ip("192.0.0.2"), 1));
    // No answer to them came.
    nat.sweep(secs(31).after(SWEEP_NS));
    assert_eq!(nat.flows(), 3);
}

#[test]
fn an_outside_address_has_half_of_a_forward() {
    let mut nat = with_forwards();
    is_there(&mut nat, OTHER, "10.87.0.8");
    let client = ("198.51.100.7", 4000);
    let answer = |nat: &mut Nat, to: (&str, u16)| {
        let mut frame = packet(ROUTER, OTHER, Protocol::Udp, ("10.87.0.8", 5000), to, 0);
        assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Pass);
        assert_eq!(ends(&frame).0, (ip("192.0.0.2"), 2), "it leaves through the forward");
    };
    assert_eq!(nat.inbound(Nanos(0), &mut datagram(client)), Verdict::Pass);
    answer(&mut nat, client);
    let half = nat.forwarded.peer_share();
    // Answered ones: they are not displaced before they are silent, and cost the others nothing.
    for n in 0..half as u16 {
        assert_eq!(nat.inbound(Nanos(0), &mut datagram(("203.0.113.1", 1024 + n))), Verdict::Pass);
        answer(&mut nat, ("203.0.113.1", 1024 + n));
    }
    let mut more = datagram(("203.0.113.1", 1000));
    assert_eq!(nat.inbound(secs(1), &mut more.clone()), Verdict::Drop(Reason::GatewayFull));
    assert_eq!(nat.inbound(secs(1), &mut datagram(("203.0.113.2", 1000))), Verdict::Pass);
    assert_eq!(nat.inbound(SILENT_NS, &mut more), Verdict::Pass, "the oldest silent one gives way");
    assert_eq!(nat.flows(), half + 2);
    // The client is still known; the address' first is not.
    assert!(nat.forwarded.get(&((Protocol::Udp, ip("10.87.0.8"), 5000), ip(client.0), client.1)).is_some());
    let first = (Protocol::Udp, ip("10.87.0.8"), 5000);
    assert!(nat.forwarded.get(&(first, ip("203.0.113.1"), 1024)).is_none());
}

#[test]
fn what_is_not_confirmed_gives_way_before_what_is() {
    let mut nat = with_forwards();
    is_there(&mut nat, OTHER, "10.87.0.8");
    let key = |peer: (&str, u16)| ((Protocol::Tcp, ip("10.87.0.8"), 80), ip(peer.0), peer.1);
    let client = ("198.51.100.7", 4000);
    assert_eq!(nat.inbound(Nanos(0), &mut tcp(client, ("192.0.0.2", 3), SYN)), Verdict::Pass);
    let mut back = packet(ROUTER, OTHER, Protocol::Tcp, ("10.87.0.8", 80), client, SYN | ACK);
    assert_eq!(nat.outbound(Nanos(0), None, &mut back), Verdict::Pass);
    // A minute later the connection is the forward's oldest, and silent, but it is established.
    for n in 0..60_000u32 {
        let from = format!("203.0.113.{}", n % 8);
        let mut syn = tcp((&from, (1024 + n / 8) as u16), ("192.0.0.2", 3), SYN);
        assert_eq!(nat.inbound(secs(60), &mut syn), Verdict::Pass, "{n}");
    }
    assert!(nat.forwarded.get(&key(client)).is_some());
    assert_eq!(nat.flows(), nat.forwarded.share());
    assert!(nat.forwarded.get(&key(("203.0.113.0", 1024))).is_none(), "the oldest gave way");
    assert!(nat.forwarded.get(&key(("203.0.113.7", 1024 + 7499))).is_some());
}

/// The table beside a simple one, over random operations.
#[test]
fn the_table_of_forwarded_connections_agrees_with_a_dull_one() {
    let mut random: u64 = std::env::var("TOMBOLO_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0x5eed);
    println!("TOMBOLO_SEED={random}");
    let mut below = |n: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % n
    };
    // So many forwards that a share is small enough to be full.
    let mut table = Table::new(64);
    let mut dull: HashMap<Forwarded, (u16, FlowState)> = HashMap::new();
    let (mut displaced, mut refused) = (0, 0);
    let mut now = Nanos(0);
    for step in 0..200_000u32 {
        now = now.after(Nanos::MILLI.times(below(2)));
        let rule = below(2) as usize;
        let peer = Ipv4Addr::from(0xcb00_7100 + below(4) as u32);
        let protocol = if rule == 0 { Protocol::Tcp } else { Protocol::Udp };
        let key: Forwarded = ((protocol, ip("10.87.0.8"), 80), peer, below(2000) as u16);
        let (from, to) = (("203.0.113.1", 5), ("192.0.0.2", 1));
        let way = if below(3) == 0 { Direction::Out } else { Direction::In };
        let flags = [SYN, ACK, ACK, FIN | ACK, RST][below(5) as usize];
        let frame = packet(ROUTER, PEER, protocol, from, to, flags);
        let t = Ipv4::of(&frame).unwrap().transport(&frame).unwrap();
        if below(50) == 0 {
            assert_eq!(table.remove(&key), dull.remove(&key).map(|(port, _)| port), "step {step}");
        } else if let Some((port, state)) = dull.get_mut(&key) {
            state.note(now, way, &t, &frame);
            assert_eq!(table.note(now, &key, |s| s.note(now, way, &t, &frame)), Some(*port), "step {step}");
        } else {
            assert_eq!(table.note(now, &key, |_| panic!("{step}")), None);
            let state = FlowState::new(now, Direction::In, &t, &frame);
            match table.add(now, key, (rule, 7), state) {
                Ok(None) => {}
                Ok(Some(gone)) => {
                    let (_, state) = dull.remove(&gone).unwrap();
                    let is_idle = now.since(state.last) >= SILENT_NS;
                    assert!(gone.0.0 == protocol && (state.idle() < TCP_HALF_NS.after(Nanos(1)) || is_idle), "{step}");
                    displaced += 1;
                }
                Err(()) => {
                    refused += 1;
                    continue;
                }
            }
            dull.insert(key, (7, state));
        }
        if step % 5000 == 0 {
            table.expire(now.after(secs(60)));
            dull.retain(|_, (_, state)| !state.is_over(now.after(secs(60))));
        }
        if step % 1000 == 0 {
            let mut all: Vec<_> = table.iter().map(|(key, port, state)| (*key, port, state.last)).collect();
            let mut want: Vec<_> = dull.iter().map(|(key, (port, state))| (*key, *port, state.last)).collect();
            let order = |a: &(Forwarded, u16, Nanos)| (a.0.0.0 as u8, a.0.1, a.0.2);
            all.sort_by_key(order);
            want.sort_by_key(order);
            assert_eq!(all, want, "step {step}");
            for rule in [Protocol::Tcp, Protocol::Udp] {
                assert!(dull.keys().filter(|k| k.0.0 == rule).count() <= table.share());
                for n in 0..4 {
                    let peer = Ipv4Addr::from(0xcb00_7100 + n);
                    assert!(dull.keys().filter(|k| k.0.0 == rule && k.1 == peer).count() <= table.peer_share());
                }
            }
        }
    }
    assert!(displaced > 1000, "{displaced} displaced, {refused} refused");
    let keys: Vec<_> = dull.into_keys().collect();
    keys.iter().for_each(|key| assert_eq!(table.remove(key), Some(7)));
    assert_eq!((table.len(), table.peers()), (0, 0), "nothing is left");
}

#[test]
fn a_guest_that_ignores_first_segments_costs_no_other_guest_its_own() {
    for (to_the_deaf, is_deaf_known) in [(1, true), (1, false), (2, true), (2, false)] {
        let mut nat = with_forwards();
        let (deaf, booting) = if to_the_deaf == 1 { ("10.87.0.9", 3) } else { ("10.87.0.8", 1) };
        if is_deaf_known {
            is_there(&mut nat, OTHER, deaf);
        }
        let mut outcome = Vec::new();
        let mut send = |nat: &mut Nat, n: u16| {
            let mut frame = tcp(("203.0.113.5", 2000 + n), ("192.0.0.2", 1), SYN);
            if to_the_deaf == 2 {
                frame = tcp(("203.0.113.5", 2000 + n), ("192.0.0.2", 3), SYN);
            }
            outcome.push(nat.inbound(Nanos(1), &mut frame));
        };
        (0..70).for_each(|n| send(&mut nat, n));
        let mut syn = tcp(("198.51.100.7", 4000), ("192.0.0.2", booting), SYN);
        assert_eq!(nat.inbound(Nanos(2), &mut syn), Verdict::Taken, "the only one of a guest that boots");
        (70..200).for_each(|n| send(&mut nat, n));
        let want = if is_deaf_known { Verdict::Pass } else { Verdict::Taken };
        assert!(outcome.iter().all(|verdict| *verdict == want));
        assert_eq!(nat.take_displaced(), if is_deaf_known { 0 } else { 200 + 1 - HELD as u64 });
        sent(&mut nat);
        let booted = if booting == 1 { "10.87.0.9" } else { "10.87.0.8" };
        is_there(&mut nat, GUEST, booted);
        let (_, frames) = sent(&mut nat);
        assert_eq!(frames.iter().map(|f| ends(f).0).collect::<Vec<_>>(), [(ip("198.51.100.7"), 4000)]);
    }
}

#[test]
fn among_what_a_guest_is_held_one_address_costs_no_other_its_place() {
    let mut nat = with_forwards();
    assert_eq!(nat.inbound(Nanos(0), &mut datagram(("198.51.100.7", 4000))), Verdict::Taken);
    for n in 0..500 {
        assert_eq!(nat.inbound(Nanos(1), &mut datagram(("203.0.113.5", 2000 + n))), Verdict::Taken);
    }
    let mut syn = tcp(("198.51.100.8", 4000), ("192.0.0.2", 3), SYN);
    assert_eq!(nat.inbound(Nanos(2), &mut syn), Verdict::Taken);
    assert_eq!(nat.take_displaced(), 501 - HELD_DATAGRAMS as u64);
    assert_eq!(nat.flows(), HELD_DATAGRAMS + 1, "what gave way is forgotten");
    assert_eq!(sent(&mut nat).0.len(), 1, "no question for every datagram");
    is_there(&mut nat, OTHER, "10.87.0.8");
    let (_, frames) = sent(&mut nat);
    let from: Vec<_> = frames.iter().map(|f| ends(f).0).collect();
    assert_eq!(from.len(), HELD_DATAGRAMS + 1);
    assert!(from.contains(&(ip("198.51.100.7"), 4000)) && from.contains(&(ip("203.0.113.5"), 2499)));
}

#[test]
fn guests_that_use_up_all_ports_leave_some_to_another() {
    let mut nat = nat();
    let flow = |nat: &mut Nat, station: u8, n: u16| {
        let mac = [2, 0, 0, 0, 7, station];
        let from = format!("10.87.0.{}", 20 + station);
        let mut frame = packet(ROUTER, mac, Protocol::Udp, (&from, n), ("198.51.100.7", 53), 0);
        nat.outbound(Nanos(0), Some(Token(u32::from(station))), &mut frame)
    };
    let mut passed = 0;
    for n in 0..FLOWS_PER_SOURCE as u16 {
        passed += (0..20).filter(|station| flow(&mut nat, *station, 2000 + n) == Verdict::Pass).count();
    }
    assert!(nat.flows() > 64_000 && passed > 64_000, "{passed}");
    for n in 0..1000 {
        assert_eq!(flow(&mut nat, 99, 2000 + n), Verdict::Pass, "{n}");
    }
    assert_eq!(nat.shares[&ChargedTo::Port(Token(99))].held, 1000);
    assert!(nat.shares.values().all(|share| share.held <= FLOWS_PER_SOURCE));
}

#[test]
fn a_table_that_was_taken_over_is_charged_to_ports_again_and_keeps_its_shares() {
    let mut nat = with_forwards();
    is_there(&mut nat, OTHER, "10.87.0.8");
    flood(&mut nat, secs(1), 40_000);
    let mut long = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 7000), ("198.51.100.7", 53), 0);
    assert_eq!(nat.outbound(secs(1), Some(Token(1)), &mut long.clone()), Verdict::Pass);
    let mut next = Nat::take_up(nat.config.clone(), &nat.hand_over()).unwrap();
    assert_eq!(next.flows(), nat.flows());
    assert!(next.shares.contains_key(&ChargedTo::Mac(GUEST)));
    assert_eq!(next.outbound(secs(2), Some(Token(9)), &mut long), Verdict::Pass);
    assert_eq!(next.shares.keys().collect::<Vec<_>>(), [&ChargedTo::Port(Token(9))]);
    assert_eq!(flood(&mut next, secs(2), 40_000), 40_000);
    assert_eq!(next.flows(), nat.flows(), "the share is the same");
    // With more forwards a share is smaller.
    let mut config = nat.config.clone();
    let more = (100..200).map(|port| Forward { protocol: Protocol::Udp, port, to: (ip("10.87.0.7"), port) });
    config.forwards.extend(more);
    let smaller = Nat::take_up(config, &nat.hand_over()).unwrap();
    assert_eq!(smaller.forwarded.len(), smaller.forwarded.share());
}

#[test]
fn the_uplink_is_not_asked_for_its_address_by_every_frame() {
    let mut nat = nat();
    nat.uplink_restarted();
    for n in 0..10_000 {
        let mut frame = tcp(("10.87.0.9", 2000 + n % 50), ("198.51.100.7", 80), SYN);
        assert_eq!(nat.outbound(secs(1), None, &mut frame), Verdict::Drop(Reason::LinkDown));
    }
    assert_eq!(std::iter::from_fn(|| nat.next_for_uplink()).count(), 1);
    let mut asked = 0;
    for n in 0..100 {
        let mut frame = tcp(("10.87.0.9", 2000), ("198.51.100.7", 80), SYN);
        nat.outbound(secs(2).after(Nanos::MILLI.times(100 * n)), None, &mut frame);
        asked += std::iter::from_fn(|| nat.next_for_uplink()).count();
    }
    assert_eq!(asked, 10, "once a second");
}

#[test]
fn nobody_takes_over_the_address_of_a_guest_that_answers() {
    let mut nat = nat();
    says(&mut nat, Nanos(0), GUEST);
    let to = |nat: &mut Nat, now| {
        let mut frame = tcp(("192.0.0.1", 40000), ("192.0.0.2", 1), ACK);
        assert_eq!(nat.inbound(now, &mut frame), Verdict::Pass);
        Mac::try_from(&frame[0..6]).unwrap()
    };
    // A message whose sender is not its frame's.
    let mut lie = arp(2, OTHER, ip("10.87.0.9"), ROUTER, ip("10.87.0.2"), ROUTER);
    lie[6..12].copy_from_slice(&GUEST);
    assert_eq!(nat.outbound(Nanos(0), None, &mut lie), Verdict::Drop(Reason::BadSource));
    for round in 0..10 {
        let now = secs(10 * round);
        says(&mut nat, now, OTHER);
        assert_eq!(sent(&mut nat).0, [(GUEST, ip("10.87.0.9"))], "its holder is asked");
        says(&mut nat, now, GUEST);
        nat.poll(now.after(secs(3)));
        assert_eq!(to(&mut nat, now.after(secs(3))), GUEST);
    }
    // One that has gone does not keep it.
    says(&mut nat, secs(200), OTHER);
    let mut now = secs(200);
    while let (_, Some(next)) = nat.poll(now) {
        now = next;
    }
    assert_eq!(to(&mut nat, now), OTHER);
    assert!(now <= secs(203));
}

#[test]
fn answers_go_to_the_station_that_asked_though_another_claims_its_address() {
    let mut nat = nat();
    let mut ports = Vec::new();
    for mac in [GUEST, OTHER] {
        let mut frame = packet(ROUTER, mac, Protocol::Udp, ("10.87.0.9", 5000), ("198.51.100.7", 53), 0);
        assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Pass);
        ports.push((mac, ends(&frame).0.1));
    }
    assert_ne!(ports[0].1, ports[1].1);
    for (mac, port) in ports {
        let mut back = packet(ROUTER, PEER, Protocol::Udp, ("198.51.100.7", 53), ("192.0.0.2", port), 0);
        assert_eq!(nat.inbound(Nanos(0), &mut back), Verdict::Pass);
        assert_eq!((&back[0..6], ends(&back).1), (&mac[..], (ip("10.87.0.9"), 5000)));
    }
}

#[test]
fn of_a_connection_that_opens_one_segment_goes_to_the_uplink_until_it_answers() {
    let mut nat = with_forwards();
    is_there(&mut nat, GUEST, "10.87.0.9");
    let early = Verdict::Drop(Reason::UplinkOpening);
    let (guest, peer) = (("10.87.0.9", 4000), ("198.51.100.7", 80));
    let out = |nat: &mut Nat, from, to, flags| nat.outbound(Nanos(0), None, &mut tcp(from, to, flags));
    assert_eq!(out(&mut nat, guest, peer, SYN), Verdict::Pass);
    assert_eq!(out(&mut nat, guest, ("198.51.100.8", 80), SYN), Verdict::Pass, "another connection of the port");
    for flags in [SYN, ACK, RST, FIN | ACK] {
        assert_eq!(out(&mut nat, guest, peer, flags), early, "{flags:#x}");
    }
    assert_eq!(nat.inbound(Nanos(0), &mut tcp(peer, ("192.0.0.2", 4000), SYN | ACK)), Verdict::Pass);
    assert_eq!(out(&mut nat, guest, peer, ACK), Verdict::Pass);
    assert_eq!(out(&mut nat, guest, ("198.51.100.8", 80), ACK), early);
    // One that comes by a forward.
    let (server, client) = (("10.87.0.9", 80), ("198.51.100.9", 5000));
    assert_eq!(nat.inbound(Nanos(0), &mut tcp(client, ("192.0.0.2", 1), SYN)), Verdict::Pass);
    assert_eq!(out(&mut nat, server, client, SYN | ACK), Verdict::Pass);
    assert_eq!(out(&mut nat, server, client, ACK), early);
    assert_eq!(nat.inbound(Nanos(0), &mut tcp(client, ("192.0.0.2", 1), ACK)), Verdict::Pass);
    assert_eq!(out(&mut nat, server, client, ACK), Verdict::Pass);
    // Another uplink knows none of them.
    assert_eq!(out(&mut nat, server, ("198.51.100.10", 81), SYN), Verdict::Pass);
    nat.uplink_restarted();
    let mut answer = arp(2, PEER, ip("192.0.0.1"), ROUTER, ip("192.0.0.2"), ROUTER);
    assert_eq!(nat.inbound(Nanos(0), &mut answer), Verdict::Taken);
    assert_eq!(out(&mut nat, server, ("198.51.100.10", 81), ACK), Verdict::Pass);
}

#[test]
fn a_port_of_the_uplink_that_another_guests_connection_gets_is_still_opening() {
    let mut nat = nat();
    let peer = ("198.51.100.7", 80);
    // All source ports below the first one wish that, and a mapping gives it.
    let mut first = tcp(("10.87.0.9", 1), peer, SYN);
    assert_eq!(nat.outbound(Nanos(0), None, &mut first), Verdict::Pass);
    let port = ends(&first).0.1;
    assert_eq!(port, FIRST_PORT);
    // Its own mapping gives way to very many others of the guest, and its port is free.
    for n in 0..FLOWS_PER_SOURCE as u16 {
        let mut other = tcp(("10.87.0.9", 5000 + n), ("198.51.100.9", 80), SYN);
        assert_eq!(nat.outbound(Nanos(0), None, &mut other), Verdict::Pass, "{n}");
    }
    let mut late = tcp(("10.87.0.9", 2), peer, ACK);
    assert_eq!(nat.outbound(Nanos(0), None, &mut late), Verdict::Drop(Reason::UplinkOpening));
    let mut elsewhere = tcp(("10.87.0.9", 2), ("198.51.100.77", 80), ACK);
    assert_eq!((nat.outbound(Nanos(0), None, &mut elsewhere), ends(&elsewhere).0.1), (Verdict::Pass, port));
}

#[test]
fn a_connection_lasts_as_long_as_its_state_says() {
    let (out, back) = (("10.87.0.9", 4000), ("198.51.100.7", 80));
    // What is sent out (true) and comes in, and how long its port is kept then.
    let (open, answer) = ((true, SYN), (false, SYN | ACK));
    let cases: [(&[(bool, u8)], Nanos); 8] = [
        (&[open], TCP_HALF_NS),
        (&[open, answer], TCP_NS),
        (&[open, answer, (true, RST)], TCP_RESET_NS),
        (&[open, answer, (false, RST)], TCP_RESET_NS),
        (&[open, answer, (true, FIN | ACK)], TCP_HALF_NS),
        (&[open, answer, (true, FIN | ACK), (false, FIN | ACK)], TCP_CLOSED_NS),
        // What comes before the answer does not go on: the uplink's connection knows nothing of it.
        (&[open, (true, RST)], TCP_HALF_NS),
        (&[open, (true, FIN | ACK), answer], TCP_NS),
    ];
    for (i, (segments, idle)) in cases.into_iter().enumerate() {
        let mut nat = nat();
        let mut has_answered = false;
        for (n, (is_out, flags)) in segments.iter().enumerate() {
            let verdict = match is_out {
                true => nat.outbound(Nanos(0), None, &mut tcp(out, back, *flags)),
                false => nat.inbound(Nanos(0), &mut tcp(back, ("192.0.0.2", 4000), *flags)),
            };
            let is_early = n > 0 && *is_out && !has_answered;
            let expected = if is_early { Verdict::Drop(Reason::UplinkOpening) } else { Verdict::Pass };
            assert_eq!(verdict, expected, "case {i}, segment {n}");
            has_answered |= !is_out;
        }
        nat.sweep(Nanos(idle.0 - 1));
        assert_eq!(nat.flows(), 1, "case {i}: too early");
        nat.sweep(idle.after(SWEEP_NS));
        assert_eq!((nat.flows(), nat.shares.len(), nat.ports.len()), (0, 0, 0), "case {i}");
    }
}

#[test]
fn short_connections_give_way_to_new_ones_and_a_long_one_stays() {
    let mut nat = nat();
    let mut long = tcp(("10.87.0.9", 22), ("198.51.100.7", 22), SYN);
    assert_eq!(nat.outbound(Nanos(0), None, &mut long), Verdict::Pass);
    let port = ends(&long).0.1;
    assert_eq!(nat.inbound(Nanos(0), &mut tcp(("198.51.100.7", 22), ("192.0.0.2", port), SYN | ACK)), Verdict::Pass);
    // A thousand connections a second, and no client waits for one.
    for n in 0..40_000u64 {
        let now = Nanos::MILLI.times(n);
        let from = format!("10.87.0.{}", 20 + n / 20_000);
        let mut frame = tcp((&from, (2000 + n % 20_000) as u16), ("198.51.100.7", 80), SYN);
        assert_eq!(nat.outbound(now, Some(Token(1)), &mut frame), Verdict::Pass, "{n}");
    }
    assert!(nat.flows() <= FLOWS_PER_SOURCE + 1);
    assert!(nat.shares[&ChargedTo::Port(Token(1))].yielding.len() <= 2 * FLOWS_PER_SOURCE);
    let mut back = tcp(("198.51.100.7", 22), ("192.0.0.2", port), ACK);
    assert_eq!(nat.inbound(secs(41), &mut back), Verdict::Pass);
}

#[test]
fn a_guest_that_makes_up_addresses_spends_one_share_and_leaves_nothing_behind() {
    let mut nat = nat();
    let mut passed = 0;
    for n in 0..20_000u32 {
        let [_, a, b, c] = n.to_be_bytes();
        let station = [2, 9, 9, a, b, c];
        let mut frame = packet(ROUTER, station, Protocol::Udp, ("10.87.0.77", 7000), ("198.51.100.7", 53), 0);
        passed += usize::from(nat.outbound(Nanos(0), Some(Token(4)), &mut frame) == Verdict::Pass);
    }
    assert_eq!((passed, nat.shares.len(), nat.neighbours.len()), (FLOWS_PER_SOURCE, 1, 0));
}

#[test]
fn every_port_is_given_once_and_the_search_says_when_there_is_none() {
    let mut taken = Taken::new();
    let mut seen = std::collections::HashSet::new();
    while let Some(port) = taken.free_from(40_001) {
        assert!(port >= FIRST_PORT && seen.insert(port));
        taken.set(port, true);
    }
    assert_eq!(seen.len(), usize::from(u16::MAX - FIRST_PORT) + 1);
    taken.set(40_000, false);
    assert_eq!(taken.free_from(40_001), Some(40_000));
}

/// An ICMP error with right sums: its type and code, the word behind its sum, and the packet that
/// it quotes.
fn error(macs: (Mac, Mac), from: &str, to: &str, ttl: u8, kind: [u8; 2], word: [u8; 4], quoted: &[u8]) -> Vec<u8> {
    let mut body = [&kind[..], &[0, 0], &word, quoted].concat();
    let s = !sum(body.iter().copied());
    body[2..4].copy_from_slice(&s.to_be_bytes());
    let total = (20 + body.len()) as u16;
    let mut header = vec![0x45, 0, (total >> 8) as u8, total as u8, 0, 9, 0, 0, ttl, 1, 0, 0];
    header.extend_from_slice(&ip(from).octets());
    header.extend_from_slice(&ip(to).octets());
    let s = !sum(header.iter().copied());
    header[10..12].copy_from_slice(&s.to_be_bytes());
    [&macs.0[..], &macs.1, &[8, 0], &header, &body].concat()
}

/// The same frame with its TTL reduced by one.
fn a_hop_on(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    Ipv4::of(&frame).unwrap().live(&mut frame).unwrap();
    frame
}

/// "Fragmentation needed, the MTU is 1280", port unreachable, time exceeded, parameter problem.
const ERRORS: [([u8; 2], [u8; 4]); 4] =
    [([3, 4], [0, 0, 5, 0]), ([3, 3], [0; 4]), ([11, 0], [0; 4]), ([12, 0], [20, 0, 0, 0])];

#[test]
fn an_error_about_a_guests_packet_reaches_it_with_its_own_packet_in_it() {
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        for (kind, word) in ERRORS {
            let mut nat = nat();
            let mine = |mac, from| packet(ROUTER, mac, protocol, (from, 4000), ("198.51.100.7", 443), ACK);
            // The first guest has the port, so the second one's is another.
            nat.outbound(Nanos(0), None, &mut mine(GUEST, "10.87.0.9"));
            let original = mine(OTHER, "10.87.0.10");
            let mut out = original.clone();
            assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
            assert_ne!(ends(&out).0.1, 4000);
            // Eight bytes of it as RFC 792 has it, all of it as RFC 1812 has it, and just not TCP's
            // sum.
            for quoted in [28, out.len() - 14, 36.min(out.len() - 14)] {
                let quoted = 14..14 + quoted;
                let way = ("203.0.113.9", "192.0.0.2");
                let mut got = error((ROUTER, PEER), way.0, way.1, 60, kind, word, &out[quoted.clone()]);
                assert_eq!(nat.inbound(Nanos(1), &mut got), Verdict::Pass, "{protocol:?} {kind:?}");
                let original = &a_hop_on(&original)[quoted];
                let want = error((OTHER, ROUTER), "203.0.113.9", "10.87.0.10", 59, kind, word, original);
                assert_eq!(got, want, "{protocol:?} {kind:?}");
            }
        }
    }
}

#[test]
fn a_guests_error_leaves_with_the_packet_that_the_uplink_sent_in_it() {
    for (kind, word) in ERRORS {
        let mut nat = nat();
        for mac in [GUEST, OTHER] {
            let from = if mac == GUEST { "10.87.0.9" } else { "10.87.0.10" };
            let mut out = packet(ROUTER, mac, Protocol::Udp, (from, 4000), ("198.51.100.7", 53), 0);
            assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
            let port = ends(&out).0.1;
            let sent = packet(ROUTER, PEER, Protocol::Udp, ("198.51.100.7", 53), ("192.0.0.2", port), 0);
            let mut came = sent.clone();
            assert_eq!(nat.inbound(Nanos(0), &mut came), Verdict::Pass);
            let mut got = error((ROUTER, mac), from, "198.51.100.7", 64, kind, word, &came[14..]);
            assert_eq!(nat.outbound(Nanos(0), None, &mut got), Verdict::Pass);
            let quoted = &a_hop_on(&sent)[14..];
            assert_eq!(got, error((PEER, ROUTER), "192.0.0.2", "198.51.100.7", 63, kind, word, quoted));
        }
    }
}

#[test]
fn errors_of_a_connection_through_a_forward_find_both_ends() {
    let mut nat = nat();
    let mut arp = arp(2, GUEST, ip("10.87.0.9"), ROUTER, ip("10.87.0.2"), ROUTER);
    nat.outbound(Nanos(0), None, &mut arp);
    let (kind, word) = ERRORS[0];
    let syn = packet(ROUTER, PEER, Protocol::Tcp, ("192.0.0.1", 5000), ("192.0.0.2", 1), SYN);
    let mut came = syn.clone();
    assert_eq!(nat.inbound(Nanos(0), &mut came), Verdict::Pass);
    let mut got = error((ROUTER, GUEST), "10.87.0.9", "192.0.0.1", 64, kind, word, &came[14..]);
    assert_eq!(nat.outbound(Nanos(0), None, &mut got), Verdict::Pass);
    assert_eq!(got, error((PEER, ROUTER), "192.0.0.2", "192.0.0.1", 63, kind, word, &a_hop_on(&syn)[14..]));
    let answer = packet(ROUTER, GUEST, Protocol::Tcp, ("10.87.0.9", 80), ("192.0.0.1", 5000), SYN | ACK);
    let mut out = answer.clone();
    assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
    let mut got = error((ROUTER, PEER), "192.0.0.1", "192.0.0.2", 64, kind, word, &out[14..]);
    assert_eq!(nat.inbound(Nanos(0), &mut got), Verdict::Pass);
    assert_eq!(got, error((GUEST, ROUTER), "192.0.0.1", "10.87.0.9", 63, kind, word, &a_hop_on(&answer)[14..]));
}

#[test]
fn errors_about_nothing_that_is_known_go_nowhere() {
    let mut nat = nat();
    let mut out = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 4000), ("198.51.100.7", 53), 0);
    assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
    let (kind, word) = ERRORS[1];
    let way = |quoted: &[u8]| error((ROUTER, PEER), "203.0.113.9", "192.0.0.2", 60, kind, word, quoted);
    let quoting = |src, dst| way(&packet(PEER, ROUTER, Protocol::Udp, src, dst, 0)[14..]);
    let far = ("198.51.100.7", 53);
    let drop = |reason| Verdict::Drop(reason);
    assert_eq!(nat.inbound(Nanos(0), &mut quoting(("192.0.0.2", 4001), far)), drop(Reason::NoDestination));
    assert_eq!(nat.inbound(Nanos(0), &mut quoting(("192.0.0.3", 4000), far)), drop(Reason::NoDestination));
    // Of a forward, but of no connection through it.
    let rule = packet(PEER, ROUTER, Protocol::Tcp, ("192.0.0.2", 1), far, 0);
    assert_eq!(nat.inbound(Nanos(0), &mut way(&rule[14..])), drop(Reason::NoDestination));
    // Cut short, at every length; what quotes the ports is enough.
    let whole = way(&out[14..]);
    for len in 34..whole.len() {
        let mut short = whole[..len].to_vec();
        short[16..18].copy_from_slice(&(len as u16 - 14).to_be_bytes());
        let want = if len < 34 + 8 + 28 { drop(Reason::NotTransformable) } else { Verdict::Pass };
        assert_eq!(nat.inbound(Nanos(0), &mut short), want, "{len} bytes");
    }
    // A later fragment has no ports; an error about an error, and one of a kind that is not passed.
    let mut fragment = out.clone();
    fragment[21] = 9;
    assert_eq!(nat.inbound(Nanos(0), &mut way(&fragment[14..])), drop(Reason::NotTransformable));
    assert_eq!(nat.inbound(Nanos(0), &mut way(&whole[14..])), drop(Reason::NotTransformable));
    let mut redirect = error((ROUTER, PEER), "203.0.113.9", "192.0.0.2", 60, [5, 1], [0; 4], &out[14..]);
    assert_eq!(nat.inbound(Nanos(0), &mut redirect), drop(Reason::NotTransformable));
    // A guest may complain only about packets that came to it, only to their sender, and not to the
    // host itself.
    let came = |from, to| packet(GUEST, ROUTER, Protocol::Udp, from, (to, 4000), 0);
    for (quoted, to, want) in [
        (came(far, "10.87.0.9"), "198.51.100.7", Verdict::Pass),
        (came(far, "10.87.0.9"), "198.51.100.8", drop(Reason::BadSource)),
        (came(far, "10.87.0.10"), "198.51.100.7", drop(Reason::BadSource)),
        (came(("127.0.0.1", 53), "10.87.0.9"), "127.0.0.1", drop(Reason::NoDestination)),
        (came(("192.0.0.1", 53), "10.87.0.9"), "192.0.0.1", drop(Reason::NoDestination)),
    ] {
        let mut frame = error((ROUTER, GUEST), "10.87.0.9", to, 64, kind, word, &quoted[14..]);
        assert_eq!(nat.outbound(Nanos(0), None, &mut frame), want, "to {to}");
    }
    let mut frame = error((ROUTER, OTHER), "10.87.0.9", far.0, 64, kind, word, &came(far, "10.87.0.9")[14..]);
    assert_eq!(nat.outbound(Nanos(0), None, &mut frame), drop(Reason::NoDestination), "another station's mapping");
}

#[test]
fn the_router_answers_a_packet_whose_hops_are_used_up() {
    let mut nat = nat();
    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
        let mut last = packet(ROUTER, GUEST, protocol, ("10.87.0.9", 4000), ("198.51.100.7", 33_434), SYN);
        last[22] = 1;
        update(&mut last, 24, &[64 << 8], &[1 << 8]);
        let quoted = last[14..].to_vec();
        assert_eq!(nat.outbound(Nanos(0), None, &mut last), Verdict::Drop(Reason::NoDestination));
        let got = nat.next_for_network().unwrap();
        let mut want = error((GUEST, ROUTER), "10.87.0.2", "10.87.0.9", 64, [11, 0], [0; 4], &quoted);
        // Precedence, and no identification.
        (want[15], want[19]) = (0xc0, 0);
        update(&mut want, 24, &[0x4500, 9], &[0x45c0, 0]);
        assert_eq!(got, want, "{protocol:?}");
        assert_eq!(nat.flows(), 0, "no port is taken for it");
    }
    // Not about an error, and only so many.
    let came = packet(GUEST, ROUTER, Protocol::Udp, ("198.51.100.7", 53), ("10.87.0.9", 4000), 0);
    let mut complaint = error((ROUTER, GUEST), "10.87.0.9", "198.51.100.7", 1, [3, 3], [0; 4], &came[14..]);
    assert!(matches!(nat.outbound(Nanos(0), None, &mut complaint), Verdict::Drop(_)));
    assert_eq!(nat.next_for_network(), None);
    for _ in 0..1000 {
        let mut last = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 4000), ("198.51.100.7", 33_434), 0);
        last[22] = 1;
        nat.outbound(Nanos(0), None, &mut last);
    }
    assert_eq!(std::iter::from_fn(|| nat.next_for_network()).count(), ERRORS_PER_SECOND as usize - 3);
}

#[test]
fn whatever_is_quoted_nothing_panics_and_what_is_damaged_stays_damaged() {
    let seed = std::env::var("TOMBOLO_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0x5eed);
    println!("TOMBOLO_SEED={seed}");
    let mut state: u64 = seed;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    // Zero and 0xffff are one number in this arithmetic.
    let essence = |bytes: &[u8]| sum(bytes.iter().copied()) % 0xffff;
    let mut passed = 0;
    for round in 0..20_000 {
        let mut nat = nat();
        let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Echo][random(3)];
        let mut out = packet(ROUTER, GUEST, protocol, ("10.87.0.9", 900), ("198.51.100.7", 53), ACK);
        assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
        let (kind, word) = ERRORS[random(4)];
        let quoted = &out[14..14 + 28 + random(out.len() - 42 + 1)];
        let mut frame = error((ROUTER, PEER), "203.0.113.9", "192.0.0.2", 60, kind, word, quoted);
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
        if verdict == Verdict::Pass && before[23] == 1 && before[34] == kind[0] {
            passed += 1;
            let ip = Ipv4::of(&before).unwrap();
            let at = ip.transport_at;
            assert_eq!(essence(&before[14..at]), essence(&frame[14..at]), "round {round}: IP header");
            assert_eq!(essence(&before[at..ip.end]), essence(&frame[at..ip.end]), "round {round}: the error");
        }
    }
    assert!(passed > 2000, "{passed} errors passed");
}

#[test]
fn connections_go_on_in_a_router_that_takes_the_table_over() {
    let mut nat = nat();
    let (guest, far) = (("10.87.0.5", 40_000), ("198.51.100.7", 443));
    let mut out = packet(ROUTER, GUEST, Protocol::Tcp, guest, far, SYN);
    assert_eq!(nat.outbound(Nanos(1), Some(Token(3)), &mut out), Verdict::Pass);
    // A forward's first segment, which is held until its guest is heard of.
    let mut first = packet(ROUTER, PEER, Protocol::Tcp, ("192.0.0.1", 5000), ("192.0.0.2", 1), SYN);
    let bytes = first.len();
    assert_eq!(nat.inbound(Nanos(2), &mut first), Verdict::Taken);
    let table = nat.hand_over();
    let mut next = Nat::take_up(nat.config.clone(), &table).unwrap();
    assert_eq!(next.flows(), nat.flows());
    let sorted = |nat: &Nat| {
        let mut bytes = nat.hand_over();
        bytes.sort_unstable();
        bytes
    };
    assert_eq!(sorted(&next), sorted(&nat));
    let mut back = packet(ROUTER, PEER, Protocol::Tcp, far, ("192.0.0.2", 40_000), SYN | ACK);
    assert_eq!(next.inbound(Nanos(3), &mut back), Verdict::Pass);
    assert_eq!((&back[0..6], &back[30..34]), (&GUEST[..], &ip("10.87.0.5").octets()[..]));
    let mut more = packet(ROUTER, GUEST, Protocol::Tcp, guest, far, ACK);
    assert_eq!(next.outbound(Nanos(4), Some(Token(9)), &mut more), Verdict::Pass);
    assert_eq!(next.flows(), nat.flows(), "the same mapping");
    // The forward's guest answers ARP: what was held is sent.
    let mut answer = arp(2, OTHER, ip("10.87.0.9"), ROUTER, ip("10.87.0.2"), ROUTER);
    assert_eq!(next.outbound(Nanos(5), None, &mut answer), Verdict::Taken);
    let sent: Vec<_> = std::iter::from_fn(|| next.next_for_network()).collect();
    let [held] = &sent[..] else { panic!("{sent:?}") };
    assert_eq!((&held[0..6], held.len()), (&OTHER[..], bytes));
    for cut in 0..table.len() {
        assert!(Nat::take_up(nat.config.clone(), &table[..cut]).is_err(), "{cut}");
    }
    assert!(Nat::take_up(nat.config.clone(), &[2]).unwrap_err().contains("version 2"));
}
