//! The checks, one function each; [`conformance_suite!`](crate::conformance_suite) lists them.

use super::{DEADLINE, Fixture, Rig, Violation, isolated, partial_frame, plain, same};
use crate::pair::OwnedFrame;
use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tombolo_switch::detail::Detail;
use tombolo_switch::drop::Reason;
use tombolo_switch::frame::{Offload, SegmentKind};
use tombolo_switch::port::{Carrier, Fault, FaultKind, Rechecked};
use tombolo_switch::wait::Token;
use tombolo_testing::{Random, until};
use tombolo_worker::reactor::Reactor;

fn not_applicable(name: &str, reason: &str) {
    println!("not applicable: {name}: {reason}");
}

/// Every length of small frames, then in uneven steps up to the longest, and the lengths around
/// cache lines, the local head and the MTU.
fn lengths((from, to): (usize, usize)) -> Vec<usize> {
    let coarse = (200..to).step_by(37).chain([127, 128, 129, 511, 512, 513, 1499, 1500, 1513, 1514, to - 1, to]);
    (from..=200).chain(coarse).filter(|len| (from..=to).contains(len)).collect()
}

/// What the peer sends arrives byte for byte.
pub fn frames_arrive_intact_at_every_size<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    let frames = plain(0, lengths(rig.peer.abilities().frame_bytes));
    rig.receive_all(&frames);
    same(&frames, &rig.received);
    assert_eq!(rig.rx_drops.total(), 0);
}

/// What is transmitted arrives at the peer byte for byte.
pub fn frames_leave_intact_at_every_size<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    let frames = plain(0, lengths(rig.peer.abilities().frame_bytes));
    rig.deliver(&frames);
    assert_eq!(rig.tx_drops.total(), 0);
}

/// A thousand numbered frames each way keep their order.
pub fn order_is_kept_both_ways<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    let shortest = rig.peer.abilities().frame_bytes.0;
    let frames = plain(0, (0..1000).map(|i| shortest.max(60) + i % 3));
    rig.receive_all(&frames);
    same(&frames, &rig.received);
    rig.deliver(&frames);
}

/// No call gives more than its budget; less than the budget means that there was no more.
pub fn the_budget_is_obeyed<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    let count = rig.peer.abilities().window.min(50);
    rig.settle();
    let frames = plain(0, vec![80; count]);
    for frame in &frames {
        assert!(rig.peer.inject(&frame.bytes, frame.offload), "a window of {count} has room for {count}");
    }
    let end = Instant::now() + DEADLINE;
    for budget in [1, 2, 7, 16].into_iter().cycle() {
        let before = rig.received.len();
        let used = rig.turn(budget);
        assert!(rig.received.len() - before <= budget);
        if rig.received.len() == count {
            break;
        }
        // The wire may still be on its way; but what is less than the budget is all there was.
        assert!(used == budget || rig.received.len() < count);
        assert!(Instant::now() < end, "{} of {count} frames came", rig.received.len());
    }
    same(&frames, &rig.received);
    let extra = rig.turn(16);
    assert!(extra == 0 && rig.received.len() == count, "nothing comes twice");
}

/// The peer's buffers, however few, are enough for any number of frames once they are released.
pub fn buffers_come_back_after_release<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    let window = rig.peer.abilities().window;
    for round in 0..20 {
        rig.received.clear();
        let frames = plain(round * 1000, vec![1000; window]);
        rig.receive_all(&frames);
        same(&frames, &rig.received);
    }
}

/// After `flush` the peer sees the frames although the port is not called again.
pub fn flush_publishes_without_another_call<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    let frames = plain(0, [60, 1000, 1514]);
    rig.settle();
    assert_eq!(rig.send(&frames), 3);
    let (mut got, end) = (Vec::new(), Instant::now() + DEADLINE);
    while got.len() < 3 {
        rig.drain(&mut got);
        assert!(Instant::now() < end, "{} of 3 frames", got.len());
        std::thread::yield_now();
    }
    same(&frames, &got);
}

/// Has the peer misbehave, checks what becomes of it, and that the port then carries frames again.
fn violation<F: Fixture>(name: &str, deed: impl FnOnce(&mut F) -> Violation) {
    let mut rig = Rig::<F>::up();
    rig.receive_all(&plain(0, [60]));
    rig.received.clear();
    match deed(&mut rig.peer) {
        Violation::Impossible(reason) => return not_applicable(name, reason),
        Violation::Dropped(reason) => {
            rig.until_woken("the drop is counted", |rig| rig.rx_drops.of(reason) > 0);
            assert_eq!((rig.rx_drops.of(reason), rig.rx_drops.total()), (1, 1), "{:?}", rig.rx_drops);
            assert!(rig.faults.is_empty(), "{:?}", rig.faults);
            assert_eq!(rig.port.link(), Carrier::Up);
        }
        Violation::Faulted(kind) => {
            rig.until_woken("the fault is seen", |rig| !rig.faults.is_empty());
            assert_eq!(rig.faults[0].kind, kind, "{:?}", rig.faults);
            assert_eq!(rig.faults.len(), 1, "{:?}", rig.faults);
            rig.peer.disconnect();
            rig.peer.connect();
            rig.until("the link comes up again", |rig| rig.seen == Some(Carrier::Up));
        }
    }
    assert!(rig.received.is_empty(), "what should not be a frame is none");
    let frames = plain(100, [60, 1514, 14.max(rig.peer.abilities().frame_bytes.0)]);
    rig.receive_all(&frames);
    same(&frames, &rig.received);
    rig.deliver(&frames);
}

/// A frame too short for its header is counted.
pub fn a_runt_is_counted_and_the_next_frame_arrives<F: Fixture>(name: &str) {
    violation::<F>(name, F::send_runt);
}

/// A frame longer than any may be is counted, or costs the peer its connection.
pub fn an_over_long_frame_does_no_harm<F: Fixture>(name: &str) {
    violation::<F>(name, F::send_over_long);
}

/// Offload fields that do not fit their frame are counted.
pub fn a_frame_with_lying_offload_is_counted<F: Fixture>(name: &str) {
    violation::<F>(name, F::send_bad_offload);
}

/// A frame longer than the port said it takes, which the switch never sends, is dropped or carried
/// whole.
pub fn a_frame_beyond_the_mtu_is_not_transmitted<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    let longest = rig.port.caps().max_frame_bytes as usize;
    let frames = plain(0, [60, longest + 1, 60]);
    let taken = rig.send(&frames);
    assert_eq!((taken, rig.tx_drops.of(Reason::TooLong)), (2, 1), "{:?}", rig.tx_drops);
    let got = rig.collect(2);
    same(&[frames[0].clone(), frames[2].clone()], &got);
}

/// A peer that does not read: nothing blocks, every frame is delivered or counted, and order is
/// kept.
pub fn a_peer_that_does_not_read_costs_only_its_own_frames<F: Fixture>(name: &str) {
    let mut rig = Rig::<F>::up();
    let (mut taken, mut next) = (0, 0);
    let mut accepted = Vec::new();
    for _ in 0..200 {
        let frames = plain(next, vec![1400; 64]);
        next += 64;
        let before = rig.tx_drops.total();
        let count = rig.send(&frames);
        taken += count;
        if rig.tx_drops.total() == before {
            accepted.extend(frames.iter().filter_map(|f| super::number(&f.bytes)));
        }
        rig.service();
        if rig.tx_drops.of(Reason::NoBuffer) > 200 {
            break;
        }
    }
    assert!(rig.faults.is_empty(), "{:?}", rig.faults);
    assert_eq!(taken as u64 + rig.tx_drops.total(), u64::from(next), "sent is taken plus dropped");
    if !rig.peer.abilities().back_pressure {
        return not_applicable(name, "what a kernel's interface does not pass on is lost behind the port");
    }
    assert!(rig.tx_drops.of(Reason::NoBuffer) > 0, "{:?}", rig.tx_drops);
    assert_eq!(rig.tx_drops.of(Reason::NoBuffer), rig.tx_drops.total(), "{:?}", rig.tx_drops);
    let got = rig.collect(taken);
    let numbers: Vec<_> = got.iter().filter_map(|f| super::number(&f.bytes)).collect();
    assert!(numbers.windows(2).all(|w| w[0] < w[1]), "the order is kept");
    assert!(accepted.iter().all(|n| numbers.binary_search(n).is_ok()), "what was taken without a drop is there");
    assert!(got.iter().all(|f| f.bytes == super::frame(super::number(&f.bytes).unwrap_or(0), 1400)));
    rig.deliver(&plain(next, [60, 1514, 60]));
}

/// The window between the last receive and the sleep: a frame in it is found by `arm`.
pub fn a_frame_between_receive_and_arm_is_seen<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    for round in 0..50 {
        rig.settle();
        rig.turn(16);
        let frames = plain(round, [60]);
        assert!(rig.peer.inject(&frames[0].bytes, Offload::NONE));
        // Either `arm` sees it, or it is still on its way and wakes.
        let seen = rig.arm();
        assert!(seen || rig.sleep(DEADLINE), "round {round}: neither seen nor woken");
        rig.until_woken("the frame is received", |rig| rig.received.len() == round as usize + 1);
    }
}

/// A frame that comes while the port sleeps wakes it.
pub fn a_frame_after_arm_wakes<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    for round in 0..50 {
        rig.settle();
        let frames = plain(round, [60]);
        assert!(rig.peer.inject(&frames[0].bytes, Offload::NONE));
        assert!(rig.sleep(DEADLINE), "round {round}: not woken");
        rig.until_woken("the frame is received", |rig| rig.received.len() == round as usize + 1);
    }
}

/// The peer's fences do nothing, so it did not see that the port sleeps: one more look finds its
/// frame.
pub fn a_lost_wake_up_is_found_by_one_more_look<F: Fixture>(name: &str) {
    let mut rig = Rig::<F>::up();
    if !rig.peer.loses_wakeups() {
        assert!(!rig.port.take_recheck(), "what needs no second look asks for none");
        return not_applicable(name, "the kernel or a lock carries its wake-ups");
    }
    for round in 0..3 {
        rig.settle();
        assert!(rig.port.take_recheck(), "a port that was armed wants a second look");
        assert!(!rig.port.take_recheck(), "one");
        assert_eq!(rig.port.recheck(), Ok(Rechecked::default()), "nothing waits");
        rig.peer.inject_silently(&plain(round, [60])[0].bytes);
        assert!(rig.port.recheck().unwrap().work, "round {round}: the second look finds the frame");
        rig.turn(16);
        assert_eq!(rig.received.len(), round as usize + 1);
    }
}

/// The peer's fences do nothing, so its request became visible after the port had read it: one more
/// look finds it.
pub fn a_request_that_was_missed_is_found_by_one_more_look<F: Fixture>(name: &str) {
    let mut rig = Rig::<F>::up();
    if !rig.peer.loses_wakeups() {
        return not_applicable(name, "the kernel or a lock carries its wake-ups");
    }
    rig.settle();
    let frames = plain(0, [60; 3]);
    let send = |rig: &mut Rig<F>, index: usize| {
        let (_, _) = (rig.port.recheck().unwrap(), rig.port.take_recheck());
        assert_eq!(rig.send(&frames[index..=index]), 1);
        rig.peer.was_signalled()
    };
    send(&mut rig, 0);
    assert!(rig.peer.collect().is_some());
    rig.peer.ask_for_signals();
    assert!(send(&mut rig, 1), "the peer asked for it");
    assert!(rig.peer.collect().is_some());
    assert!(!send(&mut rig, 2), "the peer did not say that it sleeps");
    assert!(rig.port.take_recheck(), "a port that did not signal wants a second look");
    rig.peer.ask_for_signals();
    assert!(rig.port.recheck().unwrap().signalled && rig.peer.was_signalled(), "the second look finds the request");
    assert!(!rig.port.recheck().unwrap().signalled && !rig.peer.was_signalled(), "once");
    assert!(rig.peer.collect().is_some());
}

/// A connected port without traffic wakes no thread and asks for no timers; one that is polled is
/// looked at seldom.
pub fn an_idle_port_sleeps<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    rig.receive_all(&plain(0, [60, 60]));
    rig.deliver(&plain(2, [60, 60]));
    rig.settle();
    rig.service();
    let polled = rig.peer.polled();
    assert_eq!(rig.timer.is_some(), polled, "a connected port that is woken needs no timer");
    // A polled one comes to rest within 30 ms; from then on no more than a look every 2 ms.
    let most = if polled { 150 } else { 4 };
    if polled {
        let end = Instant::now() + Duration::from_millis(30);
        while Instant::now() < end {
            rig.sleep(Duration::from_millis(10));
            rig.turn(16);
        }
    }
    rig.wakeups = 0;
    let end = Instant::now() + Duration::from_millis(300);
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        if rig.sleep(left) {
            rig.turn(16);
            assert!(!rig.arm() || rig.wakeups < most);
        }
    }
    assert!(rig.wakeups < most, "{} wake-ups in 300 ms without traffic", rig.wakeups);
    rig.receive_all(&plain(4, [60]));
}

fn carried<F: Fixture>(name: &str, frames: &[OwnedFrame]) {
    let mut rig = Rig::<F>::up();
    if !rig.peer.abilities().offload {
        let caps = rig.port.caps();
        assert!(!(caps.checksum || caps.tso4 || caps.tso6 || caps.ecn), "what is not carried is not offered");
        return not_applicable(name, "this kind carries frames as they are on a wire");
    }
    let caps = rig.port.caps();
    assert!(caps.checksum && caps.tso4 && caps.tso6, "{caps:?}");
    let takes = |frame: &&OwnedFrame| frame.offload.segmentation.is_none_or(|cut| caps.takes(cut.kind));
    let taken: Vec<_> = frames.iter().filter(takes).cloned().collect();
    // No peer of a suite sends several datagrams as one frame.
    let is_given = |frame: &&OwnedFrame| frame.offload.segmentation.is_none_or(|cut| cut.kind != SegmentKind::Udp);
    let given: Vec<_> = taken.iter().filter(is_given).cloned().collect();
    rig.receive_all(&given);
    same(&given, &rig.received);
    rig.deliver(&taken);
}

/// A checksum that is left to a later hop stays so, with its place, both ways.
pub fn a_partial_checksum_is_carried<F: Fixture>(name: &str) {
    let frames = [
        partial_frame(1, 80, SegmentKind::Tcp4, None),
        partial_frame(2, 1514, SegmentKind::Tcp4, None),
        partial_frame(3, 100, SegmentKind::Tcp6, None),
        partial_frame(4, 1514, SegmentKind::Tcp6, None),
    ];
    carried::<F>(name, &frames);
}

/// A frame that represents several segments stays whole, both ways.
pub fn segmentation_is_carried<F: Fixture>(name: &str) {
    let frames = [
        partial_frame(1, 20_000, SegmentKind::Tcp4, Some(1448)),
        partial_frame(2, 65_000, SegmentKind::Tcp4, Some(1448)),
        partial_frame(3, 20_000, SegmentKind::Tcp6, Some(1428)),
        partial_frame(4, 3000, SegmentKind::Tcp4, Some(500)),
        // Datagrams, where the port takes them.
        partial_frame(5, 20_000, SegmentKind::Udp, Some(500)),
    ];
    carried::<F>(name, &frames);
}

/// The link is down while there is no peer, and frames are counted then; up when one is there.
pub fn the_link_follows_the_peer<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    rig.settle();
    rig.peer.disconnect();
    rig.until_woken("the link goes down", |rig| rig.seen == Some(Carrier::Down));
    assert_eq!(rig.send(&plain(0, [60, 60, 60])), 0);
    assert_eq!((rig.tx_drops.of(Reason::LinkDown), rig.tx_drops.total()), (3, 3), "{:?}", rig.tx_drops);
    assert_eq!(rig.turn(16), 0, "without a peer there are no frames");
    rig.peer.connect();
    rig.until("the link comes up", |rig| rig.seen == Some(Carrier::Up));
    let frames = plain(10, [60, 1514]);
    rig.receive_all(&frames);
    rig.deliver(&frames);
}

/// The peer goes and another comes; what was on its way meanwhile is gone, and frames flow both
/// ways again.
fn served_after_another_peer<F: Fixture>(rig: &mut Rig<F>, round: u32) {
    rig.peer.disconnect();
    rig.until("the link goes down", |rig| rig.seen == Some(Carrier::Down));
    rig.peer.connect();
    rig.until("the link comes up", |rig| rig.seen == Some(Carrier::Up));
    rig.settle();
    rig.received.clear();
    let mut stale = Vec::new();
    rig.drain(&mut stale);
    let frames = plain(round * 10, [60, 1000, 1514]);
    rig.receive_all(&frames);
    same(&frames, &rig.received);
    rig.deliver(&frames);
}

/// A peer that dies with frames on their way, both ways, ten times over.
pub fn a_dead_peer_is_replaced<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    for round in 0..10 {
        for frame in plain(1_000_000, vec![700; 5]) {
            rig.peer.inject(&frame.bytes, frame.offload);
        }
        rig.send(&plain(2_000_000, vec![700; 5]));
        served_after_another_peer(&mut rig, round);
    }
}

/// A peer that breaks the protocol loses its own connection; another port of the same worker does
/// not notice.
pub fn a_broken_protocol_costs_only_that_port<F: Fixture>(name: &str) {
    let reactor = Rc::new(RefCell::new(Reactor::new().unwrap()));
    let mut bad = Rig::<F>::up_in(&reactor, Token(1));
    let mut good = Rig::<F>::up_in(&reactor, Token(2));
    let kind = match bad.peer.break_protocol() {
        Violation::Impossible(reason) => return not_applicable(name, reason),
        Violation::Dropped(reason) => panic!("{reason:?} is not the reason of a fault"),
        Violation::Faulted(kind) => kind,
    };
    bad.until_woken("the fault is seen", |rig| !rig.faults.is_empty());
    assert_eq!(bad.faults[0].kind, kind, "{:?}", bad.faults);
    assert_eq!(bad.port.link(), Carrier::Down);
    let frames = plain(0, [60, 1514, 300]);
    // `bad`'s wake-ups end up with `good` and the other way round, so both are asked at each tick.
    good.received.clear();
    for frame in &frames {
        assert!(good.peer.inject(&frame.bytes, frame.offload));
    }
    good.until("the other port goes on", |rig| rig.received.len() == frames.len());
    same(&frames, &good.received);
    good.deliver(&frames);
    assert!(good.faults.is_empty(), "{:?}", good.faults);
    bad.peer.disconnect();
    bad.peer.connect();
    bad.until("it comes back", |rig| rig.seen == Some(Carrier::Up));
    assert_eq!(bad.faults.len(), 1, "{:?}", bad.faults);
    bad.deliver(&plain(0, [60]));
}

/// A reset while frames are held both ways leaves nothing of them in what comes after.
pub fn a_reset_in_the_midst_of_traffic_recovers<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    for round in 0..5 {
        for frame in plain(1_000_000, vec![900; 8]) {
            rig.peer.inject(&frame.bytes, frame.offload);
        }
        rig.receive(4);
        rig.transmit(&plain(2_000_000, vec![900; 8]));
        let fault = Fault { kind: FaultKind::System, detail: "the suite resets the port".into() };
        rig.port.reset(&fault);
        rig.release();
        let _ = rig.port.flush();
        served_after_another_peer(&mut rig, round);
    }
}

/// A fault in the midst of a transmit: what was dropped before it is counted by the port,
/// everything else by its caller, and nothing by both.
pub fn a_fault_of_transmit_counts_each_frame_once<F: Fixture>(name: &str) {
    let mut rig = Rig::<F>::up();
    rig.settle();
    let kind = match rig.peer.spoil_transmit() {
        Violation::Impossible(reason) => return not_applicable(name, reason),
        Violation::Dropped(reason) => panic!("{reason:?} is not the reason of a fault"),
        Violation::Faulted(kind) => kind,
    };
    let longest = rig.port.caps().max_frame_bytes as usize;
    let mut sizes = vec![60; 64];
    sizes[0] = longest + 1;
    assert_eq!(rig.send(&plain(0, sizes)), 0);
    assert_eq!(rig.faults.first().map(|fault| fault.kind), Some(kind), "{:?}", rig.faults);
    assert_eq!(rig.tx_drops.total(), 64, "{:?}", rig.tx_drops);
    assert_eq!(rig.tx_drops.of(Reason::TooLong), 1, "the fault came after some frames: {:?}", rig.tx_drops);
    rig.peer.disconnect();
    rig.peer.connect();
    rig.until("the link comes up again", |rig| rig.seen == Some(Carrier::Up));
    rig.deliver(&plain(100, [60, 1514]));
}

/// Frames of every size and kind, interleaved at random, both ways at once.
pub fn sizes_mixed_at_random_both_ways<F: Fixture>(_: &str) {
    let mut rig = Rig::<F>::up();
    let abilities = rig.peer.abilities();
    let (from, to) = abilities.frame_bytes;
    let mut random = Random::seeded();
    let mut number = 0;
    for _ in 0..200 {
        let mut make = |random: &mut Random| {
            number += 1;
            match random.within(0, 9) {
                0 if abilities.offload => {
                    partial_frame(number, random.within(3000, 65_000), SegmentKind::Tcp4, Some(1448))
                }
                1 if abilities.offload => partial_frame(number, random.within(80, to), SegmentKind::Tcp6, None),
                2..5 => plain(number, [to]).remove(0),
                5..7 => plain(number, [random.within(from, to)]).remove(0),
                _ => plain(number, [random.within(from, from.max(100))]).remove(0),
            }
        };
        let count = random.within(1, abilities.window.min(24));
        let there: Vec<_> = (0..count).map(|_| make(&mut random)).collect();
        let back: Vec<_> = (0..count).map(|_| make(&mut random)).collect();
        rig.received.clear();
        for frame in &there {
            assert!(rig.peer.inject(&frame.bytes, frame.offload), "a window has room");
        }
        assert_eq!(rig.send(&back), count, "{:?}", rig.tx_drops);
        rig.until_woken("all arrive", |rig| rig.received.len() == there.len());
        same(&there, &rig.received);
        let got = rig.collect(count);
        same(&back, &got);
    }
    assert_eq!((rig.rx_drops.total(), rig.tx_drops.total()), (0, 0));
}

/// A hundred peers come and go, and the process has as many descriptors as before.
pub fn no_descriptor_leaks_over_a_hundred_peers<F: Fixture>(name: &str) {
    isolated(name, || {
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let before_any = open();
        let mut rig = Rig::<F>::up();
        let mut settled = 0;
        for round in 0..100 {
            rig.peer.disconnect();
            rig.until("the link goes down", |rig| rig.seen == Some(Carrier::Down));
            rig.peer.connect();
            rig.until("the link comes up", |rig| rig.seen == Some(Carrier::Up));
            rig.received.clear();
            rig.receive_all(&plain(round, [60]));
            rig.deliver(&plain(round, [60]));
            if round == 10 {
                settled = open();
            }
        }
        let now = open();
        assert!(now <= settled, "{settled} descriptors became {now}");
        drop(rig);
        // A thread of the port may end a little later than the port.
        until("no descriptor stays behind the port", || open() == before_any);
    });
}

/// The port names its kind, says what it is made of, and offers something sane.
pub fn it_describes_itself<F: Fixture>(_: &str) {
    let rig = Rig::<F>::up();
    assert!(!rig.port.kind().is_empty());
    let details = rig.port.details();
    assert!(!details.is_empty());
    // A list may be empty.
    let is_said = |value: &Detail| matches!(value, Detail::Texts(_)) || !value.to_string().is_empty();
    assert!(details.iter().all(|(name, value)| !name.is_empty() && is_said(value)), "{details:?}");
    assert!(rig.port.caps().max_frame_bytes >= 1514, "{:?}", rig.port.caps());
}
