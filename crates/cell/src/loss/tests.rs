//! The detector between the stack and a peer that is played here, on a virtual clock.

use super::*;
use network::*;
use smoltcp::socket::tcp;
use smoltcp::wire::Ipv6Address;
use std::boxed::Box;
use std::vec::Vec;

mod network;

#[test]
fn without_a_loss_nothing_is_sent_twice() {
    for jitters in [false, true] {
        let peer = Peer { jitters, ..Peer::new(30_000) };
        let mut net = Net::new(true, peer, 1_000_000, |_, _| false);
        assert!(net.transfer(S).is_some());
        net.run(2 * S, |net| net.peer.fin_taken && net.now_ns > 3 * S);
        assert_eq!((net.losses(), net.peer.twice), (0, 0));
        assert!(net.detector.borrow().connections.is_empty(), "an acknowledged FIN ends the record");
    }
}

#[test]
fn a_loss_is_found_though_each_acknowledgement_tells_another_window() {
    for (is_watched, expected) in [(false, S..2 * S), (true, 0..20 * MS)] {
        let peer = Peer { jitters: true, ..Peer::new(30_000) };
        let mut net = Net::new(is_watched, peer, 300_000, once(std::vec![150_000]));
        let took = net.transfer(10 * S).unwrap();
        assert!(expected.contains(&took), "watched {is_watched}: {took} ns");
        assert!(!is_watched || (net.losses(), net.peer.twice) == (1, 0), "{} {}", net.losses(), net.peer.twice);
    }
}

#[test]
fn several_losses_in_one_flight_cost_a_round_trip_each() {
    let lost: Vec<usize> = (0..6).map(|n| 150_000 + n * 3 * SEGMENT_BYTES).collect();
    for (is_watched, expected) in [(false, S..30 * S), (true, 0..30 * MS)] {
        let peer = Peer { jitters: true, ..Peer::new(60_000) };
        let mut net = Net::new(is_watched, peer, 400_000, once(lost.clone()));
        let took = net.transfer(60 * S).unwrap();
        assert!(expected.contains(&took), "watched {is_watched}: {took} ns");
        assert!(!is_watched || net.peer.twice <= 6 * SEGMENT_BYTES, "{} bytes came twice", net.peer.twice);
    }
}

/// The end of a reply finds no room at a peer, which closes its window, and opens it when its app
/// has read.
fn closed_with_the_end_on_the_way(is_watched: bool) -> Net {
    let peer = Peer { reads: false, room_bytes: 19_900, ..Peer::new(30_000) };
    let mut net = Net::new(is_watched, peer, 20_000, |_, _| false);
    assert!(net.run(10 * MS, |net| net.peer.is_closed));
    assert!(net.sent_segments.last().is_some_and(|(from, to)| (*from, *to) == (net.peer.taken, 20_000)));
    net.run(3 * ROUND_TRIP_NS, |_| false);
    net.peer.reads = true;
    let opened = net.peer.read_all();
    net.say(opened);
    net
}

#[test]
fn the_end_of_a_reply_that_found_no_room_comes_when_the_window_opens() {
    let mut net = closed_with_the_end_on_the_way(true);
    let took = net.transfer(10 * S).unwrap();
    assert!(took < 2 * ROUND_TRIP_NS, "{took} ns");
    assert_eq!((net.losses(), net.peer.twice), (1, 0));
    // Without the detector the answers to three keep-alives, 10 s apart, are the duplicates that it
    // takes.
    let took = closed_with_the_end_on_the_way(false).transfer(300 * S).unwrap();
    assert!((29 * S..31 * S).contains(&took), "{took} ns");
}

#[test]
fn a_silent_loss_of_the_end_is_found_by_time() {
    for (is_watched, expected) in [(false, S..S + 20 * MS), (true, MIN_TIMEOUT_NS..MIN_TIMEOUT_NS + 20 * MS)] {
        let mut net = Net::new(is_watched, Peer::new(30_000), 20_000, once(std::vec![19_900]));
        let took = net.transfer(10 * S).unwrap();
        assert!(expected.contains(&took), "watched {is_watched}: {took} ns");
    }
}

#[test]
fn a_keep_alive_of_the_peer_does_not_hide_a_loss() {
    let mut net = Net::new(true, Peer::new(30_000), 20_000, once(std::vec![19_900]));
    assert!(net.run(10 * MS, |net| net.sent_segments.last().is_some_and(|(_, to)| *to == 20_000)));
    net.run(3 * ROUND_TRIP_NS, |_| false);
    let keep_alive = TcpRepr { seq_number: PEER_SEQ, window_len: 30_000, ..net.peer.repr() };
    net.say(tcp_frame(&keep_alive, PEER.into(), OWN.into()));
    let took = net.transfer(10 * S).unwrap();
    assert!(took < MIN_TIMEOUT_NS + 20 * MS, "{took} ns");
}

#[test]
fn each_repeated_loss_by_time_waits_twice_as_long() {
    let mut left = 3;
    let drops = move |_, to: usize| {
        let is_last = to == 20_000 && left > 0;
        left -= usize::from(is_last);
        is_last
    };
    let mut net = Net::new(true, Peer::new(30_000), 20_000, drops);
    let took = net.transfer(10 * S).unwrap();
    // The first was sent at the start, and again after 200 ms and 600 ms.
    assert!((1400 * MS..1420 * MS).contains(&took), "{took} ns");
    assert_eq!(net.losses(), 3);
}

#[test]
fn a_peer_that_is_gone_is_still_given_up() {
    let mut net = Net::new(true, Peer::new(30_000), 1_000_000, |_, _| false);
    net.run(2 * MS, |net| net.peer.taken > 100_000);
    net.peer.is_mute = true;
    let start_ns = net.now_ns;
    assert!(net.run(60 * S, |net| net.state() == tcp::State::Closed));
    let took = net.now_ns - start_ns;
    assert!((20 * S..23 * S).contains(&took), "{took} ns");
    assert_eq!(net.losses(), u64::from(MAX_UNANSWERED));
    net.run(S, |_| false);
    assert!(net.detector.borrow().connections.is_empty(), "the reset ends the record");
}

#[test]
fn many_window_updates_are_no_loss() {
    let peer = Peer { reads: false, ..Peer::new(30_000) };
    let mut net = Net::new(true, peer, 300_000, |_, _| false);
    for _ in 0..1000 {
        net.run(150_000, |_| false);
        // Some bytes at a time: most of these acknowledge nothing new.
        net.peer.unread = net.peer.unread.saturating_sub(500);
        let update = net.peer.ack();
        net.say(update);
    }
    assert!(net.peer.taken > 250_000, "{}", net.peer.taken);
    assert_eq!((net.losses(), net.peer.twice), (0, 0));
}

#[test]
fn a_window_that_stays_closed_is_probed_by_the_stack_alone() {
    let peer = Peer { reads: false, ..Peer::new(30_000) };
    let mut net = Net::new(true, peer, 100_000, |_, _| false);
    net.run(12 * S, |_| false);
    assert_eq!(net.peer.taken, 30_000);
    let probes = net.sent_segments.iter().filter(|(from, to)| to - from == 1).count();
    assert!((2..=5).contains(&probes), "{probes} probes");
    assert_eq!(net.losses(), 0);
    let opened = net.peer.read_all();
    net.peer.reads = true;
    net.say(opened);
    let took = net.transfer(S).unwrap();
    assert!(took < 20 * MS, "{took} ns");
    assert_eq!(net.losses(), 0);
}

#[test]
fn a_peer_that_reads_nothing_for_minutes_keeps_its_connection() {
    for read_at in [1, 2, 5, 20, 100, 1000].map(|seconds| seconds * S) {
        let mut net = Net::new(true, Peer { reads: false, ..Peer::new(30_000) }, 100_000, |_, _| false);
        net.run(read_at, |_| false);
        assert_eq!((net.state(), net.peer.taken), (tcp::State::FinWait1, 30_000));
        let probes = net.sent_segments.iter().filter(|(from, to)| to - from == 1).count() as u64;
        assert!(probes <= 4 + read_at / (2 * S), "{probes} probes in {} s", read_at / S);
        // Its update of the window is lost, so the next probe has to find it out.
        net.peer.read_all();
        net.peer.reads = true;
        let took = net.transfer(60 * S).unwrap();
        assert!(took < 8 * S, "closed for {} s: {took} ns", read_at / S);
        assert_eq!(net.losses(), 0);
    }
    let mut net = Net::new(false, Peer { reads: false, ..Peer::new(30_000) }, 100_000, |_, _| false);
    net.peer.may_be_reset = true;
    let start_ns = net.now_ns;
    assert!(net.run(60 * S, |net| net.state() == tcp::State::Closed), "the stack alone probes as often as it must");
    // Answers to probes after 1, 2, 4, 8 and 16 s, and then none within the 20 s that it waits.
    let took = net.now_ns - start_ns;
    assert!((51 * S..52 * S).contains(&took), "{took} ns");
}

#[test]
fn a_reset_waits_for_the_way_to_its_peer() {
    let mut net = Net::new(true, Peer::new(30_000), 1_000_000, |_, _| false);
    net.run(2 * MS, |net| net.peer.taken > 100_000);
    net.peer.may_be_reset = true;
    net.wire.is_down = true;
    net.socket().abort();
    net.run(S, |_| false);
    assert!(!crate::tcp::is_over(net.socket()), "its reset was not sent");
    net.wire.is_down = false;
    net.run(10 * MS, |_| false);
    assert!(crate::tcp::is_over(net.socket()) && net.peer.is_reset);
}

#[test]
fn claims_of_selective_acknowledgement_cost_one_segment_at_most() {
    let peer = Peer { acks_every: 1, ..Peer::new(60_000) };
    let mut net = Net::new(true, peer, 1_000_000, |_, _| false);
    net.run(S, |net| net.peer.taken > 500_000);
    // What is on the way now is not acknowledged before the claims have come.
    let flight = net
        .run(S, |net| net.to_cell.is_empty())
        .then(|| net.detector.borrow().connections.values().next().map(Connection::flight_bytes));
    assert!(flight.flatten() > Some(10_000), "{flight:?}");
    let start = (net.peer.first + net.peer.taken).0 as u32;
    for round in 0..200u32 {
        let wild = start.wrapping_add(round.wrapping_mul(0x0101_0101));
        let ranges = [
            [Some((start + 1, start + 5000 + round)), None, None],
            [Some((wild, wild.wrapping_add(1 << 30))), Some((wild, wild)), Some((wild, start))],
            [Some((start, start + 5000)), Some((start.wrapping_sub(9), start + 9)), None],
        ];
        let sack_ranges = ranges[round as usize % 3];
        let repr = TcpRepr { sack_ranges, window_len: 60_000 - round as u16, ..net.peer.repr() };
        net.say(tcp_frame(&repr, PEER.into(), OWN.into()));
    }
    assert!(net.transfer(5 * S).is_some());
    assert_eq!(net.losses(), 1);
    assert!(net.peer.twice <= SEGMENT_BYTES, "{} bytes came twice", net.peer.twice);
}

#[test]
fn what_the_peer_says_came_twice_is_no_evidence() {
    let peer = Peer { acks_every: 1, ..Peer::new(60_000) };
    let mut net = Net::new(true, peer, 1_000_000, |_, _| false);
    net.run(S, |net| net.peer.taken > 500_000);
    net.run(S, |net| net.to_cell.is_empty());
    let losses = |offsets: [Option<(i32, i32)>; 2]| {
        let start = net.peer.first + net.peer.taken;
        let range = |(left, right)| ((start.0.wrapping_add(left)) as u32, (start.0.wrapping_add(right)) as u32);
        let sack_ranges = [offsets[0].map(range), offsets[1].map(range), None];
        let repr = TcpRepr { sack_ranges, window_len: 60_000, ..net.peer.repr() };
        let frame = tcp_frame(&repr, PEER.into(), OWN.into());
        net.detector.borrow_mut().incoming(&frame, net.now_ns);
        net.losses()
    };
    // Below the gap, and a part of the second range (RFC 2883 §4.1.1, §4.2.1).
    assert_eq!(losses([Some((-5000, -10)), None]), 0);
    assert_eq!(losses([Some((1000, 2000)), Some((1000, 2500))]), 0);
    assert_eq!(losses([Some((2600, 3700)), Some((1000, 3700))]), 0);
    // But this is.
    assert_eq!(losses([Some((3700, 4100)), Some((1000, 3700))]), 1);
}

#[test]
fn a_whole_flight_that_is_lost_costs_one_timeout() {
    let mut sent = 60_000;
    let drops = move |from, to| {
        let is_first = from >= sent;
        sent = sent.max(if is_first { to } else { 0 });
        is_first
    };
    let mut net = Net::new(true, Peer::new(30_000), 85_000, drops);
    let took = net.transfer(10 * S).unwrap();
    assert!((MIN_TIMEOUT_NS..MIN_TIMEOUT_NS + 50 * MS).contains(&took), "{took} ns");
}

#[test]
fn a_flight_that_is_only_late_costs_one_segment() {
    let peer = Peer { acks_every: 2, ..Peer::new(60_000) };
    let mut net = Net::new(true, peer, 400_000, |_, _| false);
    assert!(net.run(S, |net| net.peer.taken > 150_000));
    assert!(net.run(S, |net| net.to_cell.is_empty() && !net.to_peer.is_empty()));
    for (at, _) in &mut net.to_peer {
        *at += 300 * MS;
    }
    assert!(net.transfer(10 * S).is_some());
    assert_eq!(net.losses(), 1);
    assert!(net.peer.twice <= SEGMENT_BYTES, "{} bytes came twice", net.peer.twice);
    let detector = net.detector.borrow();
    let [connection] = detector.connections.values().collect::<Vec<_>>()[..] else { panic!("one connection") };
    let (smoothed_ns, _) = connection.round_trip_ns.unwrap();
    assert!(smoothed_ns < MS, "an acknowledgement of what was sent twice is no measurement: {smoothed_ns} ns");
}

/// SplitMix64, with the seed of the run.
fn random() -> impl FnMut() -> u64 {
    let seed = std::env::var("TOMBOLO_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(20_261_127);
    std::println!("TOMBOLO_SEED={seed}");
    let mut state: u64 = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[test]
fn no_acknowledgement_harms_the_detector() {
    const SENT: usize = 10_000;
    let mut random = random();
    let mut detector = LossDetector::new(OWN_MAC);
    let first = TcpSeqNumber(i32::MAX - 5000);
    let data = [0; SENT];
    let frame = own_frame(first, &data);
    let mut losses = 0;
    for round in 0..50_000u64 {
        if round.is_multiple_of(8) {
            losses += detector.losses();
            detector = LossDetector::new(OWN_MAC);
        }
        detector.outgoing(&frame, CUT_BYTES, round * MS);
        let places = [0, 1, 5000, SENT as u32, 15_000, 1 << 31, u32::MAX];
        let mut number = || {
            let near = [0, 1, u32::MAX][(random() % 3) as usize];
            (first.0 as u32).wrapping_add(places[(random() % 7) as usize]).wrapping_add(near)
        };
        let mut range = || Some((number(), number()));
        let sack_ranges = [range(), range(), range()];
        let ack_number = Some(TcpSeqNumber(number() as i32));
        let window_len = (random() % 3 * 1000) as u16;
        let repr = TcpRepr { ack_number, window_len, sack_ranges, ..Peer::new(0).repr() };
        let mut bytes = tcp_frame(&repr, PEER.into(), OWN.into());
        if random().is_multiple_of(4) {
            let at = (random() % bytes.len() as u64) as usize;
            bytes[at] ^= 1 << (random() % 8);
        }
        detector.incoming(&bytes, round * MS);
        detector.expire(round * MS);
        while let Some(AckFrame { bytes, len }) = detector.next_repeat() {
            assert!(Segment::read(&bytes[..len]).is_some());
        }
        let sound = |c: &Connection| c.flight_bytes() <= SENT + 1 && c.selective_bytes <= c.flight_bytes();
        assert!(detector.connections.values().all(sound), "round {round}: {:?}", detector.connections);
    }
    assert!(losses > 100, "{losses}");
}

#[test]
fn acknowledgements_of_what_was_not_sent_or_long_ago_are_not_believed() {
    let mut detector = LossDetector::new(OWN_MAC);
    let first = TcpSeqNumber(i32::MAX - 100);
    detector.outgoing(&own_frame(first, &[0; 500]), CUT_BYTES, S);
    let mut flight = |number: TcpSeqNumber| {
        let repr = TcpRepr { ack_number: Some(number), window_len: 1000, ..Peer::new(0).repr() };
        detector.incoming(&tcp_frame(&repr, PEER.into(), OWN.into()), S);
        let connection = detector.connections.values().next().unwrap();
        (connection.flight_bytes(), connection.last_ack.is_some())
    };
    assert_eq!(flight(first + 501), (500, false));
    assert_eq!(flight(first - 1), (500, false));
    assert_eq!(flight(TcpSeqNumber(first.0.wrapping_add(i32::MIN))), (500, false));
    assert_eq!(flight(first + 200), (300, true));
    assert_eq!(flight(first + 500), (0, true));
}

#[test]
fn random_losses_leave_the_stream_whole() {
    let mut random = random();
    let (mut watched_ns, mut bare_ns) = (0, 0);
    for round in 0..20 {
        let window = 5000 + (random() % 55_000) as usize;
        let (jitters, selective, per_mille) =
            (random().is_multiple_of(2), !random().is_multiple_of(4), 2 + random() % 40);
        let dice: Vec<u64> = (0..4096).map(|_| random() % 1000).collect();
        for (is_watched, total_ns) in [(true, &mut watched_ns), (false, &mut bare_ns)] {
            let (dice, mut at) = (dice.clone(), 0);
            let drops = move |_, _| {
                at += 1;
                dice[at % dice.len()] < per_mille
            };
            let peer = Peer { jitters, selective, ..Peer::new(window) };
            let mut net = Net::new(is_watched, peer, 400_000, drops);
            let took = net.transfer(600 * S);
            *total_ns += took.unwrap_or_else(|| panic!("round {round}, watched {is_watched}: the stream is not whole"));
            assert!(net.run(100 * S, |net| net.peer.fin_taken), "round {round}, watched {is_watched}");
        }
    }
    std::println!("watched {} ms, bare {} ms", watched_ns / MS, bare_ns / MS);
    assert!(watched_ns * 2 < bare_ns, "watched {watched_ns} ns, bare {bare_ns} ns");
}

#[test]
fn a_frame_of_the_detector_is_read_as_what_it_was_made_of() {
    let pairs: [(IpAddress, IpAddress); 2] = [
        (PEER.into(), OWN.into()),
        (Ipv6Address::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into(), Ipv6Address::new(0xfd00, 0, 0, 0, 0, 0, 0, 2).into()),
    ];
    for (from, to) in pairs {
        let flow = Flow { remote: IpEndpoint::new(from, PEER_PORT), local: IpEndpoint::new(to, OWN_PORT) };
        let last = LastAck { from_mac: PEER_MAC, seq: PEER_SEQ, window: 777 };
        let AckFrame { bytes, len } = AckFrame::new(&flow, OWN_MAC, &last, TcpSeqNumber(-1));
        let read = Segment::read(&bytes[..len]).unwrap();
        assert_eq!((read.from, read.to, read.from_mac), (flow.remote, flow.local, PEER_MAC));
        assert_eq!(EthernetFrame::new_unchecked(&bytes[..]).dst_addr(), OWN_MAC);
        assert_eq!((read.seq, read.ack, read.window), (PEER_SEQ, Some(TcpSeqNumber(-1)), 777));
        assert_eq!((read.payload_bytes, read.syn, read.fin, read.rst), (0, false, false, false));
        let tcp = TcpPacket::new_checked(&bytes[len - TCP_HEADER_BYTES..len]).unwrap();
        assert!(tcp.verify_checksum(&from, &to));
        for cut in 0..len {
            assert!(Segment::read(&bytes[..cut]).is_none(), "{cut} of {len} bytes");
        }
    }
}

#[test]
fn the_records_have_a_limit_and_the_one_unused_for_longest_goes_first() {
    let mut detector = LossDetector::new(OWN_MAC);
    let send = |detector: &mut LossDetector, port: u16, now_ns: u64| {
        let repr = TcpRepr { src_port: port, payload: b"x", ..Peer::new(0).repr() };
        detector.outgoing(&tcp_frame(&repr, OWN.into(), PEER.into()), CUT_BYTES, now_ns);
    };
    for port in 0..MAX_CONNECTIONS as u16 {
        send(&mut detector, port, 1000 + u64::from(port));
    }
    send(&mut detector, 0, 9999);
    send(&mut detector, 60_000, 10_000);
    let ports: Vec<u16> = detector.connections.keys().map(|flow| flow.local.port).collect();
    assert_eq!(ports.len(), MAX_CONNECTIONS);
    assert!(ports.contains(&0) && ports.contains(&60_000) && !ports.contains(&1));
}

#[test]
fn a_third_party_that_guesses_acknowledgements_does_no_harm() {
    let peer = Peer { acks_every: 1, jitters: true, ..Peer::new(60_000) };
    let mut net = Net::new(true, peer, 1_000_000, |_, _| false);
    assert!(net.run(S, |net| net.peer.taken > 500_000));
    assert!(net.run(S, |net| net.to_cell.is_empty() && !net.to_peer.is_empty()));
    // A forged acknowledgement that is believed would cover this loss.
    net.drops = Box::new(once(std::vec![net.peer.taken]));
    let unacknowledged = |net: &Net| net.detector.borrow().connections.values().next().map(|c| c.unacknowledged);
    let before = unacknowledged(&net);
    let flight = net.detector.borrow().connections.values().next().map_or(0, Connection::flight_bytes);
    assert!(flight > 10_000, "{flight}");
    let start = PEER_SEQ + 1;
    let window = net.detector.borrow().connections.values().next().unwrap().receive_window.unwrap();
    assert_eq!((window.start, window.bytes), (start, 8192), "the receive buffer of the socket");
    // Of both halves of the numbers, and just outside the window on either side.
    let below = [2, 100, 1 << 20, 1 << 30];
    let above = [window.bytes + 1, window.bytes + 100, 1 << 20, 1 << 30];
    let wild = below.map(|bytes: usize| start - bytes).into_iter().chain(above.map(|bytes| start + bytes));
    for seq in wild {
        for control in [TcpControl::None, TcpControl::Rst, TcpControl::Syn, TcpControl::Fin] {
            let number = net.peer.first + net.peer.taken + flight / 2;
            let frame = peer_frame(seq, number, control);
            net.detector.borrow_mut().incoming(&frame, net.now_ns);
            assert_eq!(unacknowledged(&net), before, "{control:?} at {seq}");
            net.say(frame);
        }
    }
    // A SYN in the window changes no connection of the stack either.
    let number = net.peer.first + net.peer.taken + flight / 2;
    net.detector.borrow_mut().incoming(&peer_frame(start, number, TcpControl::Syn), net.now_ns);
    assert_eq!(unacknowledged(&net), before);
    assert!(net.transfer(5 * S).is_some());
    assert_eq!(net.losses(), 1);
    // But a reset in the window ends the connection, and the record.
    let frame = peer_frame(start, net.peer.first + net.peer.taken, TcpControl::Rst);
    net.detector.borrow_mut().incoming(&frame, net.now_ns);
    assert_eq!(unacknowledged(&net), None);
}

#[test]
fn the_receive_window_ends_where_the_stack_says() {
    let start = TcpSeqNumber(i32::MAX - 10);
    let admits = |bytes: usize, offset: i32, payload_bytes: usize| {
        let mut segment =
            Segment::read(&peer_frame(TcpSeqNumber(start.0.wrapping_add(offset)), start, TcpControl::None));
        segment.as_mut().unwrap().payload_bytes = payload_bytes;
        ReceiveWindow { start, bytes }.admits(&segment.unwrap())
    };
    for (offset, expected) in [(-2, false), (-1, true), (0, true), (100, true), (101, false), (i32::MIN, false)] {
        assert_eq!(admits(100, offset, 0), expected, "nothing at {offset}");
    }
    // What was sent again may begin before the window.
    for (offset, payload_bytes, expected) in
        [(-50, 50, false), (-50, 51, true), (-50, 150, true), (-50, 151, false), (90, 500, true), (101, 1, false)]
    {
        assert_eq!(admits(100, offset, payload_bytes), expected, "{payload_bytes} bytes at {offset}");
    }
    assert!(admits(0, 0, 0) && !admits(0, 1, 0));
}

#[test]
fn windows_of_the_cell_are_scaled_as_its_syn_says() {
    let mut detector = LossDetector::new(OWN_MAC);
    let first = TcpSeqNumber(100);
    let syn = TcpRepr {
        src_port: OWN_PORT,
        dst_port: PEER_PORT,
        control: TcpControl::Syn,
        seq_number: first - 1,
        ack_number: Some(PEER_SEQ + 1),
        window_len: 60_000,
        max_seg_size: Some(SEGMENT_BYTES as u16),
        window_scale: Some(3),
        ..Peer::new(0).repr()
    };
    let bytes = |detector: &LossDetector| {
        detector.connections.values().next().and_then(|c| c.receive_window).map(|window| window.bytes)
    };
    detector.outgoing(&tcp_frame(&syn, OWN.into(), PEER.into()), None, S);
    assert_eq!(bytes(&detector), Some(60_000), "that of a SYN is not scaled");
    // A segment without a payload tells it as well.
    detector.outgoing(&own_frame(first, &[]), None, S);
    assert_eq!(bytes(&detector), Some(8 * usize::from(OWN_WINDOW)));
}

#[test]
fn a_small_segment_size_of_the_peer_holds_for_its_connection_alone() {
    const SMALL: usize = 536;
    let mut detector = LossDetector::new(OWN_MAC);
    let first = TcpSeqNumber(0);
    let acknowledge = |detector: &mut LossDetector, at: usize, now_ns: u64| {
        detector.incoming(&peer_frame(PEER_SEQ + 1, first + at, TcpControl::None), now_ns);
    };
    // A device that cuts, and one that does not.
    for cut in [true, false] {
        detector.connections.clear();
        if cut {
            detector.outgoing(&own_frame(first, &[0; 10 * SMALL]), NonZeroU16::new(SMALL as u16), S);
        } else {
            (0..10).for_each(|at| detector.outgoing(&own_frame(first + at * SMALL, &[0; SMALL]), None, S));
        }
        acknowledge(&mut detector, SMALL, S + MS);
        let before = detector.losses();
        detector.expire(4 * S);
        assert_eq!(detector.losses(), before + 1);
        // Two segments at once: the first was only late, and so is the rest.
        acknowledge(&mut detector, 3 * SMALL, 4 * S + MS);
        assert_eq!(detector.losses(), before + 1, "cut {cut}");
    }
}

#[test]
fn acknowledgements_that_came_while_the_cell_did_not_run_are_read_before_deadlines_are_judged() {
    let peer = Peer { acks_every: 2, ..Peer::new(60_000) };
    let mut net = Net::new(true, peer, 400_000, |_, _| false);
    assert!(net.run(S, |net| net.peer.taken > 150_000));
    assert!(net.run(S, |net| net.to_peer.is_empty() && !net.to_cell.is_empty()));
    net.now_ns += 700 * MS;
    assert!(net.transfer(S).is_some());
    assert_eq!((net.losses(), net.peer.twice), (0, 0));
}

#[test]
fn a_device_that_always_has_more_frames_does_not_keep_deadlines_from_being_judged() {
    let mut detector = LossDetector::new(OWN_MAC);
    let first = TcpSeqNumber(0);
    detector.outgoing(&own_frame(first, &[0; 5000]), CUT_BYTES, S);
    detector.incoming(&peer_frame(PEER_SEQ + 1, first, TcpControl::None), S);
    let detector = RefCell::new(detector);
    let mut wire = Wire::default();
    let mut frames = 0;
    while detector.borrow().losses() == 0 {
        wire.received.push_back(std::vec![0; 60]);
        let now = Instant::from_secs(10);
        assert!(Watched { device: &mut wire, detector: &detector }.receive(now).is_some());
        frames += 1;
        assert!(frames <= MAX_RING_FRAMES + 1);
    }
    assert_eq!(frames, MAX_RING_FRAMES + 1);
}

#[test]
fn the_timeout_stays_doubled_until_what_was_sent_once_is_acknowledged() {
    let mut detector = LossDetector::new(OWN_MAC);
    let first = TcpSeqNumber(0);
    let backoff = |detector: &LossDetector| detector.connections.values().next().map(|c| c.backoff);
    let acknowledge = |detector: &mut LossDetector, at: usize, now_ns: u64| {
        detector.incoming(&peer_frame(PEER_SEQ + 1, first + at, TcpControl::None), now_ns);
    };
    detector.outgoing(&own_frame(first, &[0; 1000]), CUT_BYTES, S);
    acknowledge(&mut detector, 0, S + MS);
    detector.expire(3 * S);
    assert_eq!(backoff(&detector), Some(1));
    // Sent again, with more behind it in the same segment.
    detector.outgoing(&own_frame(first, &[0; 1400]), CUT_BYTES, 3 * S);
    acknowledge(&mut detector, 1000, 3 * S + MS);
    assert_eq!(backoff(&detector), Some(1));
    acknowledge(&mut detector, 1400, 3 * S + 2 * MS);
    let connection = detector.connections.values().next().unwrap();
    assert_eq!((connection.backoff, connection.round_trip_ns), (0, Some((2 * MS, MS))));
}

#[test]
fn the_stack_takes_repeats_after_its_hardware_address_has_changed() {
    const NEXT_MAC: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 11]);
    let mut net = Net::new(true, Peer::new(30_000), 20_000, once(std::vec![19_900]));
    let is_sent = |net: &Net| net.sent_segments.last().is_some_and(|(_, to)| *to == 20_000);
    assert!(net.run(10 * MS, |net| is_sent(net) && net.to_cell.is_empty() && net.to_peer.is_empty()));
    assert!(net.peer.taken < 20_000);
    // As `Nic::announce` does it.
    net.interface.set_hardware_addr(NEXT_MAC.into());
    net.detector.get_mut().set_mac(NEXT_MAC);
    let took = net.transfer(10 * S).unwrap();
    assert!(took < MIN_TIMEOUT_NS + 20 * MS, "{took} ns");
    assert_eq!(net.losses(), 1);
}
