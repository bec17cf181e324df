//! Tests of the router before an uplink ([`tombolo_switch::nat::uplink`]). They are here because
//! real ports are its uplink.

mod conformance;

use crate::pair::{PairConfig, PairPeer, pair};
use crate::stream::StreamPort;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use tombolo_ring::mem::Foreign;
use tombolo_switch::Nanos;
use tombolo_switch::detail::Detail;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, Offload};
use tombolo_switch::nat::uplink::{NatPort, QUEUE_FRAMES, STORM_REPEATS, had_ipv6};
use tombolo_switch::nat::{Config, Forward, Protocol};
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, Port, Sent};
use tombolo_switch::wait::Token;
use tombolo_worker::reactor::Reactor;

pub(super) const ROUTER: [u8; 6] = [2, 0, 0, 0, 0, 0xfe];
pub(super) const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 1];
pub(super) const PASST: [u8; 6] = [2, 0, 0, 0, 0, 0xaa];

/// A router whose uplink is a pair, and the pair's other end; `Reactor` outlives both.
fn world(capacity: usize) -> (Reactor, NatPort, PairPeer) {
    let reactor = Reactor::new().unwrap();
    let caps = Caps::plain(1500);
    let (inner, passt) = pair(PairConfig { capacity, caps }, reactor.registrar().registration(Token(1))).unwrap();
    (reactor, NatPort::new(config(), Box::new(inner), 1500), passt)
}

pub(super) fn config() -> Config {
    Config {
        mac: ROUTER,
        router: Ipv4Addr::new(10, 9, 0, 2),
        subnet: Ipv4Addr::new(10, 9, 0, 0),
        prefix: 24,
        outside: Ipv4Addr::new(192, 0, 0, 2),
        peer: Ipv4Addr::new(192, 0, 0, 1),
        host: Ipv4Addr::new(192, 0, 0, 1),
        forwards: vec![Forward { protocol: Protocol::Tcp, port: 1, to: (Ipv4Addr::new(10, 9, 0, 9), 80) }],
    }
}

pub(super) fn arp_answer(from: [u8; 6], ip: [u8; 4]) -> Vec<u8> {
    let head: &[u8] = &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2];
    [&ROUTER[..], &from, head, &from, &ip, &ROUTER, &[10, 9, 0, 2]].concat()
}

/// An IPv4 frame; the NAT looks at no sum.
pub(super) fn ipv4(from_mac: [u8; 6], protocol: u8, from: [u8; 4], to: [u8; 4], body: &[u8]) -> Vec<u8> {
    let [high, low] = (20 + body.len() as u16).to_be_bytes();
    let header: &[u8] = &[0x45, 0, high, low, 0, 1, 0, 0, 64, protocol, 0, 0];
    [&ROUTER[..], &from_mac, &[8, 0], header, &from, &to, body].concat()
}

fn datagram(port: u8) -> Vec<u8> {
    ipv4(GUEST, 17, [10, 9, 0, 9], [198, 51, 100, 7], &[40, port, 0, 53, 0, 8, 0, 0])
}

/// An echo request for the router itself.
fn ping() -> Vec<u8> {
    let mut echo = ipv4(GUEST, 1, [10, 9, 0, 9], [10, 9, 0, 2], &[8, 0, 0, 0, 0, 1, 0, 1]);
    echo[24..26].fill(0);
    echo
}

fn syn() -> Vec<u8> {
    let body = [0x9c, 0x40, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 2, 0, 0, 0, 0, 0, 0];
    ipv4(PASST, 6, [192, 0, 0, 1], [192, 0, 0, 2], &body)
}

fn give(port: &mut NatPort, frames: &[Vec<u8>]) -> (Sent, Drops) {
    let mut batch = Batch::with_capacity(frames.len());
    batch.set_ingress(Token(7));
    for frame in frames {
        batch.push(Foreign::from(&frame[..]), Offload::NONE);
    }
    let all: Vec<u16> = (0..frames.len() as u16).collect();
    let mut drops = Drops::default();
    let sent = port.transmit(&batch, &all, &mut drops).unwrap();
    port.flush().unwrap();
    (sent, drops)
}

fn take(port: &mut NatPort, budget: usize) -> (Vec<Vec<u8>>, Drops) {
    let (mut batch, mut drops) = (Batch::with_capacity(budget), Drops::default());
    port.receive(budget, &mut batch, &mut drops).unwrap();
    let copy = |frame| {
        let mut bytes = Vec::new();
        batch.append_to(frame, &mut bytes);
        bytes
    };
    let frames = batch.frames().iter().map(copy).collect();
    drop(batch);
    port.release().unwrap();
    (frames, drops)
}

#[test]
fn an_uplink_that_lives_answers_and_one_that_storms_is_found() {
    let (_reactor, mut port, passt) = introduced(64);
    let away = port.away();
    let before = away.beat();
    away.ask();
    port.service(Nanos::SECOND.times(2)).unwrap();
    assert_eq!(passt.receive().expect("a question").bytes[12..14], [8, 6]);
    assert_eq!((away.beat().asked, away.beat().answers), (before.asked + 1, before.answers));
    passt.send(&arp_answer(PASST, [192, 0, 0, 1]), Offload::NONE).unwrap();
    take(&mut port, 8);
    assert_eq!(away.beat().answers, before.answers + 1);

    // One segment again and again, 2000 times a second; a frame of another connection between
    // them changes nothing.
    let mut at = Nanos::SECOND.times(3);
    let mut other = syn();
    other[34] ^= 1;
    let mut sent = 0;
    while away.beat().repeats == 0 {
        assert!(sent < 3 * STORM_REPEATS, "{:?}", away.beat());
        at = at.after(Nanos(500_000));
        port.service(at).unwrap();
        passt.send(&syn(), Offload::NONE).unwrap();
        other[38] = other[38].wrapping_add(1);
        passt.send(&other, Offload::NONE).unwrap();
        take(&mut port, 8);
        while passt.receive().is_some() {}
        sent += 1;
    }
    assert!(away.beat().repeats >= STORM_REPEATS);
}

/// The uplink has said where it is.
fn introduced(capacity: usize) -> (Reactor, NatPort, PairPeer) {
    let (reactor, mut port, passt) = world(capacity);
    port.service(Nanos::SECOND).unwrap();
    let question = passt.receive().expect("it asks for the uplink");
    assert_eq!(question.bytes[12..14], [8, 6]);
    passt.send(&arp_answer(PASST, [192, 0, 0, 1]), Offload::NONE).unwrap();
    assert!(take(&mut port, 8).0.is_empty());
    (reactor, port, passt)
}

#[test]
fn every_frame_is_sent_or_dropped_though_queues_are_full() {
    let (_reactor, mut port, passt) = introduced(16);
    // More pings at the router than its queue holds, while the answers are not taken.
    let mut answered = 0;
    for _ in 0..(QUEUE_FRAMES / 64 + 3) {
        let (sent, drops) = give(&mut port, &vec![ping(); 64]);
        assert_eq!(sent.frames + drops.total(), 64);
        answered += sent.frames;
    }
    assert_eq!(answered, QUEUE_FRAMES as u64);
    // A frame of the router's own that finds no room is no loss of a frame that was handed
    // over.
    passt.send(&syn(), Offload::NONE).unwrap();
    while !take(&mut port, 64).0.is_empty() {}
    // More than the uplink takes.
    let frames: Vec<_> = (0..40).map(datagram).collect();
    let (sent, drops) = give(&mut port, &frames);
    assert_eq!((sent.frames, sent.bytes), (16, 16 * 42));
    assert_eq!(drops.total(), 24);
    assert_eq!(std::iter::from_fn(|| passt.receive()).count(), 16);
}

#[test]
fn own_frames_that_find_no_room_are_counted_apart() {
    let (_reactor, mut port, _passt) = introduced(16);
    for _ in 0..QUEUE_FRAMES / 64 {
        assert_eq!(give(&mut port, &vec![ping(); 64]).0.frames, 64);
    }
    // Its address is claimed by two, so the holder is asked: a frame of the router's own.
    let claims = [arp_answer(GUEST, [10, 9, 0, 9]), arp_answer(PASST, [10, 9, 0, 9])];
    let (sent, drops) = give(&mut port, &claims);
    assert_eq!((sent.frames, drops.total()), (2, 0));
    let (frames, drops) = take(&mut port, 8);
    assert_eq!((frames.len(), drops.of(Reason::GatewayFull)), (8, 1));
}

#[test]
fn a_connection_to_a_guest_that_is_away_is_refused_by_the_router() {
    let (_reactor, mut port, passt) = introduced(16);
    let away = port.away();
    away.set(vec![Ipv4Addr::new(10, 9, 0, 9).into()]);
    passt.send(&syn(), Offload::NONE).unwrap();
    let (frames, drops) = take(&mut port, 8);
    assert_eq!((frames.len(), drops.total()), (0, 0));
    let refusal = passt.receive().expect("an answer");
    assert_eq!((&refusal.bytes[0..6], refusal.bytes[23], refusal.bytes[47]), (&PASST[..], 6, 0x14), "RST, ACK");
    // It was held for a guest that boots, which then ends.
    away.set(vec![]);
    passt.send(&syn(), Offload::NONE).unwrap();
    take(&mut port, 8);
    assert!(passt.receive().is_none());
    away.set(vec![Ipv4Addr::new(10, 9, 0, 9).into()]);
    port.service(Nanos::SECOND.times(2)).unwrap();
    assert_eq!(passt.receive().expect("an answer").bytes[47], 0x14);
}

#[test]
fn a_guest_that_boots_late_gets_the_first_segment_though_nothing_else_happens() {
    let (_reactor, mut port, passt) = introduced(16);
    assert_eq!(port.service(Nanos::SECOND).unwrap(), None);
    passt.send(&syn(), Offload::NONE).unwrap();
    let (frames, drops) = take(&mut port, 8);
    assert_eq!((frames.len(), drops.total()), (0, 0));
    // The worker was promised that nothing is due; the port does not let it sleep on that.
    while !take(&mut port, 8).0.is_empty() {}
    assert!(port.arm().unwrap());
    let mut now = Nanos::SECOND;
    let delivered = loop {
        // What the worker does: service when it is due, and nothing in between.
        let next = port.service(now).unwrap();
        let (frames, _) = take(&mut port, 8);
        if let Some(frame) = frames.iter().find(|f| f[12..14] == [8, 0]) {
            break frame.clone();
        }
        assert!(!port.arm().unwrap(), "it sleeps in between");
        if now >= Nanos::SECOND.times(4) {
            give(&mut port, &[arp_answer(GUEST, [10, 9, 0, 9])]);
            continue;
        }
        now = next.expect("a time to ask again");
    };
    assert_eq!(
        (&delivered[0..6], &delivered[30..34], &delivered[36..38]),
        (&GUEST[..], &[10, 9, 0, 9][..], &[0, 80][..])
    );
}

const PASST6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
const OWN_LOCAL: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe, 0, 0, 0xfe];

fn six(last: u16) -> [u8; 16] {
    Ipv6Addr::new(0xfd09, 0, 0, 0, 0, 0, 0, last).octets()
}

fn config6() -> Config<Ipv6Addr> {
    Config {
        mac: ROUTER,
        router: OWN_LOCAL.into(),
        subnet: six(0).into(),
        prefix: 64,
        outside: Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 2),
        peer: PASST6.into(),
        host: Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 1),
        forwards: vec![Forward { protocol: Protocol::Tcp, port: 1, to: (six(9).into(), 80) }],
    }
}

fn ipv6(from_mac: [u8; 6], protocol: u8, from: [u8; 16], to: [u8; 16], body: &[u8]) -> Vec<u8> {
    let [high, low] = (body.len() as u16).to_be_bytes();
    let header: &[u8] = &[0x60, 0, 0, 0, high, low, protocol, 255];
    [&ROUTER[..], &from_mac, &[0x86, 0xdd], header, &from, &to, body].concat()
}

/// An unsolicited advertisement, as RFC 4861 §4.4 has it.
fn advertisement(mac: [u8; 6], address: [u8; 16]) -> Vec<u8> {
    let mut body = [&[136, 0, 0, 0, 0x60, 0, 0, 0][..], &address, &[2, 1], &mac].concat();
    let covered = [&address[..], &OWN_LOCAL, &[0, 58, 0, body.len() as u8], &body].concat();
    body[2..4].copy_from_slice(&(!tombolo_ring::checksum::sum(&covered)).to_be_bytes());
    ipv6(mac, 58, address, OWN_LOCAL, &body)
}

fn datagram6(port: u8) -> Vec<u8> {
    let far = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 7).octets();
    ipv6(GUEST, 17, six(5), far, &[40, port, 0, 53, 0, 8, 1, 1])
}

fn syn6() -> Vec<u8> {
    ipv6(PASST, 6, PASST6, OWN_LOCAL, &syn()[34..])
}

#[test]
fn ipv6_goes_out_and_comes_in_once_the_uplink_has_said_that_it_has_it() {
    let (_reactor, port, passt) = introduced(16);
    let mut port = port.with_ipv6(config6());
    let away = port.away();
    port.service(Nanos::SECOND).unwrap();
    let question = passt.receive().expect("it looks for the uplink").bytes;
    assert_eq!((&question[12..14], question[54], &question[62..78]), (&[0x86, 0xdd][..], 135, &PASST6[..]));
    // passt without IPv6 says nothing to that.
    let (sent, drops) = give(&mut port, &[datagram6(1), datagram(1)]);
    assert_eq!((sent.frames, drops.of(Reason::LinkDown), away.has_ipv6()), (1, 1, false));
    assert_eq!(std::iter::from_fn(|| passt.receive()).filter(|f| f.bytes[12..14] == [8, 0]).count(), 1);
    assert!(port.details().contains(&("ipv6", "the uplink has none".into())));
    passt.send(&advertisement(PASST, PASST6), Offload::NONE).unwrap();
    assert!(take(&mut port, 8).0.is_empty());
    assert!(away.has_ipv6());
    let (sent, drops) = give(&mut port, &[datagram6(1), datagram(1)]);
    assert_eq!((sent.frames, drops.total()), (2, 0));
    let out = passt.receive().unwrap().bytes;
    assert_eq!((&out[0..6], &out[22..38]), (&PASST[..], &config6().outside.octets()[..]));
    assert_eq!(passt.receive().unwrap().bytes[12..14], [8, 0], "each family by its own table");
    let counts = port.details();
    assert!(counts.contains(&("flows", 1u64.into())) && counts.contains(&("flows6", 1u64.into())));

    // A connection comes in: its first segment waits for the guest, and the worker is not let
    // sleep on it.
    passt.send(&syn6(), Offload::NONE).unwrap();
    let (frames, _) = take(&mut port, 8);
    assert!(frames.is_empty() && port.answers());
    let due = port.service(Nanos::SECOND).unwrap().expect("a time to ask again");
    assert!(due <= Nanos::SECOND.times(2));
    take(&mut port, 8);
    give(&mut port, &[advertisement(GUEST, six(9))]);
    let (frames, _) = take(&mut port, 8);
    let segment = frames.iter().find(|f| f[20] == 6).expect("what waited");
    assert_eq!((&segment[0..6], &segment[22..38]), (&GUEST[..], &config6().host.octets()[..]));

    port.reset(&Fault { kind: FaultKind::System, detail: "a test".into() });
    assert!(!away.has_ipv6(), "the next uplink has to say it again");
}

#[test]
fn a_guest_is_away_by_all_its_addresses() {
    let (_reactor, port, passt) = introduced(16);
    let mut port = port.with_ipv6(config6());
    port.service(Nanos::SECOND).unwrap();
    passt.send(&advertisement(PASST, PASST6), Offload::NONE).unwrap();
    take(&mut port, 8);
    while passt.receive().is_some() {}
    port.away().set(vec![Ipv4Addr::new(10, 9, 0, 9).into(), Ipv6Addr::from(six(9)).into()]);
    for (syn, flags_at) in [(syn(), 47), (syn6(), 67)] {
        passt.send(&syn, Offload::NONE).unwrap();
        assert!(take(&mut port, 8).0.is_empty());
        assert_eq!(passt.receive().expect("a refusal").bytes[flags_at], 0x14, "RST, ACK");
    }
}

#[test]
fn both_tables_are_taken_over_and_a_stored_one_without_ipv6_still_is() {
    let reactor = Reactor::new().unwrap();
    for (before, after) in [(true, true), (true, false), (false, true)] {
        let (stream, feed) = StreamPort::given(1500, reactor.registrar().registration(Token(1)));
        let mut port = NatPort::new(config(), Box::new(stream), 1500);
        if before {
            port = port.with_ipv6(config6());
        }
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        feed.give(ours.into()).unwrap();
        port.service(Nanos::SECOND).unwrap();
        if before {
            let found = advertisement(PASST, PASST6);
            theirs.write_all(&[&(found.len() as u32).to_be_bytes()[..], &found].concat()).unwrap();
            take(&mut port, 8);
            assert_eq!(give(&mut port, &[datagram6(1)]).0.frames, 1);
        }
        let handed = port.hand_over().expect("a stream can be handed over");
        assert_eq!(had_ipv6(&handed), before);
        let ipv6 = after.then(config6);
        let (mut next, _feed) = StreamPort::given(1500, reactor.registrar().registration(Token(2)));
        let attach = |rest| next.take_up(rest).map(|()| Box::new(next) as Box<dyn Port>);
        let port = NatPort::take_up(config(), ipv6, handed, 1500, attach).unwrap();
        let flows = port.details().into_iter().find(|(name, _)| *name == "flows6").map(|(_, flows)| flows);
        assert_eq!(flows, after.then(|| Detail::from(usize::from(before))));
        assert_eq!(port.away().has_ipv6(), before && after);
    }
}

#[test]
fn a_fault_of_the_uplink_takes_no_frame_along_that_came_before_it() {
    let (_reactor, mut port, passt) = introduced(16);
    assert_eq!(give(&mut port, &[ping()]).0.frames, 1);
    drop(passt);
    let (mut batch, mut drops) = (Batch::with_capacity(8), Drops::default());
    // Whether this call or the next shows the fault, the frame is in the batch.
    let _ = port.receive(8, &mut batch, &mut drops);
    assert_eq!((batch.len(), drops.total()), (1, 0));
}

#[test]
fn a_router_made_anew_takes_the_next_stream_of_its_feed() {
    let reactor = Reactor::new().unwrap();
    let (stream, feed) = StreamPort::given(1500, reactor.registrar().registration(Token(1)));
    let mut port = NatPort::new(config(), Box::new(stream), 1500);
    for round in 0..3 {
        let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        feed.give(ours.into()).unwrap();
        port.service(Nanos::SECOND).unwrap();
        assert_eq!(port.link(), Carrier::Up, "round {round}");
        // It asks for the uplink, so the stream is alive and the table a new one.
        let mut frame = [0; 4 + 42];
        theirs.read_exact(&mut frame).unwrap();
        assert_eq!((&frame[..4], &frame[16..18]), (&[0, 0, 0, 42][..], &[8, 6][..]));
        drop(port);
        assert_eq!(theirs.read(&mut frame).unwrap(), 0, "the program behind it sees that it is gone");
        port = NatPort::new(config(), Box::new(feed.restart(1500)), 1500);
        assert_eq!(port.link(), Carrier::Down);
    }
}

#[test]
fn without_an_uplink_nothing_piles_up() {
    let reactor = Reactor::new().unwrap();
    let (stream, feed) = StreamPort::given(1500, reactor.registrar().registration(Token(1)));
    let mut port = NatPort::new(config(), Box::new(stream), 1500);
    port.service(Nanos::SECOND).unwrap();
    for _ in 0..100 {
        let (sent, drops) = give(&mut port, &vec![datagram(1); 64]);
        assert_eq!((sent.frames, drops.of(Reason::LinkDown)), (0, 64));
    }
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    feed.give(ours.into()).unwrap();
    port.service(Nanos::SECOND).unwrap();
    drop((port, feed));
    let mut waited = Vec::new();
    theirs.read_to_end(&mut waited).unwrap();
    assert_eq!((waited.len(), &waited[16..18]), (4 + 42, &[8, 6][..]), "its own question, and nothing that waited");
}
