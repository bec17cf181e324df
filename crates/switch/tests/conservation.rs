//! Every frame is accounted for: random traffic over many ports, with guards, full rings, links
//! that come and go, faults, segmentation and removal of ports, and at the end the sums of the
//! counters agree with each other and with what the peers saw. The rule is written at the head of
//! `network.rs`.
#![allow(missing_docs)]

mod support;

use support::*;
use tombolo_switch::Nanos;
use tombolo_switch::control::{NetworkId, PortSettings, WorkerSettings};
use tombolo_switch::drop::Reason;
use tombolo_switch::frame::Offload;
use tombolo_switch::guard::Guard;
use tombolo_switch::mac::MacSettings;
use tombolo_switch::policy::{Action, Isolation, Labels, Mirror, Rule, Settings, Who};
use tombolo_switch::port::{Caps, Carrier};
use tombolo_testing::Random;

/// Some ports isolated, some in communities; one of them listens to others.
fn labels(n: u64) -> Labels {
    let isolation = match n % 7 {
        0 => Isolation::Alone,
        1 => Isolation::Community("a".into()),
        _ => Isolation::Off,
    };
    Labels { names: vec![format!("p{}", n % 12).into()], isolation, exempt: n == 23 }
}

fn policy(denies: bool) -> Settings {
    let mirror = Mirror { of: vec!["p3".into()], to: "p10".into(), sent: true, received: true };
    let from = vec![Who::Label("p5".into()), Who::Label("p6".into())];
    let rule = Rule { action: if denies { Action::Allow } else { Action::Deny }, from, ..Rule::default() };
    Settings {
        otherwise: if denies { Action::Deny } else { Action::Allow },
        rules: vec![rule],
        mirrors: if denies { vec![] } else { vec![mirror] },
    }
}

#[test]
fn every_frame_is_delivered_or_dropped_for_a_reason() {
    for seed in 1..=8u64 {
        let mut random = Random(seed);
        let mut bench = Bench::new(WorkerSettings { budget: 1 + random.below(70) as usize, ..Default::default() });
        let net = bench.network(MacSettings { capacity: 64, per_port: 20, age: Nanos::SECOND });
        let mut peers = Vec::new();
        for n in 0..24u64 {
            let guard = match n % 6 {
                0 => Guard::new(&[mac(n * 8), mac(n * 8 + 1)], &[]).pinned(),
                1 => Guard::new(&[], &["10.0.0.1".parse().unwrap()]),
                _ => Guard::default(),
            };
            let mac_limit = (n % 5 == 0).then_some(3);
            let labels = if seed % 2 == 0 { labels(n) } else { Labels::default() };
            let peer = bench.port(net, PortSettings { guard, mac_limit, labels, ..PortSettings::default() });
            peer.lock().refuses = n % 2 == 0;
            peer.lock().may_merge = n % 4 < 2;
            peer.lock().caps = match n % 3 {
                0 => Caps::plain(1500),
                1 => Caps { tso4: false, ..Caps::full(1500) },
                _ => Caps::full(9000),
            };
            peers.push(peer);
        }
        if seed % 2 == 0 {
            bench.ask(move |h| h.set_policy(NetworkId(0), policy(seed % 4 == 0))).unwrap();
        }
        let mut offered = vec![0u64; peers.len()];
        for _ in 0..4000 {
            let at = random.below(24) as usize;
            let peer = &peers[at];
            match random.below(60) {
                0 => peer.lock().room = random.below(400) as usize,
                1 => {
                    let link = if random.chance(3) { Carrier::Down } else { Carrier::Up };
                    peer.lock().link = link;
                    peer.wake();
                }
                2 => {
                    let faults = [At::Service, At::Transmit, At::Flush, At::Release, At::Arm];
                    peer.lock().fault = Some(faults[random.below(5) as usize]);
                }
                3 => bench.waiter.advance(Nanos::MILLI.times(random.below(600))),
                4..=20 => {
                    bench.worker.step(&mut bench.waiter);
                }
                _ => {
                    for _ in 0..random.below(30) {
                        let owner = random.below(24);
                        let to = match random.below(12) {
                            0 => BROADCAST,
                            1 => [0x33, 0x33, 0, 0, 0, 1],
                            2 => [0x01, 0x80, 0xc2, 0, 0, 0x0e],
                            3 => mac(random.next_u64() & 0xffff),
                            _ => mac(owner * 8),
                        };
                        let from = match random.below(20) {
                            0 => [0; 6],
                            1 => BROADCAST,
                            2 => mac(random.below(24) * 8),
                            _ => mac(at as u64 * 8 + random.below(4)),
                        };
                        if random.chance(10) {
                            for bytes in segments(to, from, 1 + random.below(6) as usize, 60) {
                                offered[at] += 1;
                                peer.send(bytes);
                            }
                            continue;
                        }
                        let (bytes, offload) = match random.below(8) {
                            0 => large(to, from, 1 + random.below(9000) as usize, 1 + random.below(1500) as u16),
                            1 => (frame(to, from, 14 + random.below(3000) as usize, 0), Offload::NONE),
                            2 => (frame(to, from, 0, 0)[..random.below(15) as usize].to_vec(), Offload::NONE),
                            _ => (frame(to, from, 60, 0), Offload::NONE),
                        };
                        offered[at] += 1;
                        peer.send_with(bytes, offload);
                    }
                }
            }
        }
        // Faults that were injected and not met would cut the end short.
        for peer in &peers {
            peer.lock().fault = None;
        }
        bench.waiter.advance(Nanos::SECOND);
        bench.settle();
        bench.waiter.advance(Nanos::SECOND);
        for peer in &peers {
            peer.wake();
        }
        bench.settle();
        let status = bench.ask(|h| h.status()).unwrap();
        let (mut received, mut lost_before, mut sent, mut lost_after, mut extra, mut merged) = (0, 0, 0, 0, 0, 0);
        let mut reasons = [0u64; Reason::COUNT];
        for (peer, offered) in peers.iter().zip(&offered) {
            let c = &peer.counters;
            assert_eq!(c.rx_frames.get(), *offered, "seed {seed}: every frame that was offered was taken");
            received += c.rx_frames.get();
            for (n, reason) in Reason::ALL.iter().enumerate() {
                reasons[n] += peer.rx_drops(*reason) + peer.tx_drops(*reason);
                lost_before += peer.rx_drops(*reason);
                lost_after += peer.tx_drops(*reason);
            }
            sent += c.tx_frames.get();
            extra += c.software_segments.get() - c.software_segmented.get();
            merged += c.software_merged.get();
            // What a faulty port took before its fault is counted as lost with its rings, not as
            // sent.
            let got = peer.lock().from_switch.len() as u64;
            let reset = peer.tx_drops(Reason::Reset);
            assert!(got >= c.tx_frames.get() && got <= c.tx_frames.get() + reset, "seed {seed}");
        }
        let copies = status.networks[0].copies;
        let unicast = received - lost_before - status.networks[0].flooded_unknown - status.networks[0].flooded_group;
        assert!(copies >= unicast);
        assert_eq!(copies + extra, sent + lost_after + merged, "seed {seed}: {reasons:?}");
        assert!(merged > 100, "seed {seed}: {merged}");
        let expected = [
            Reason::Runt,
            Reason::TooLong,
            Reason::Guard,
            Reason::BadSource,
            Reason::NoBuffer,
            Reason::QueueTimeout,
            Reason::QueueFull,
            Reason::LinkDown,
            Reason::Hairpin,
            Reason::Reserved,
            Reason::Reset,
        ];
        let of_policy = match seed % 4 {
            0 => vec![Reason::Isolated, Reason::Denied],
            2 => vec![Reason::Isolated, Reason::Denied, Reason::MirrorPort],
            _ => vec![],
        };
        // Where most traffic is denied, no queue fills.
        let expected = expected.into_iter().filter(|reason| seed % 4 != 0 || *reason != Reason::QueueFull);
        for reason in expected.chain(of_policy) {
            assert_ne!(reasons[reason as usize], 0, "seed {seed}: the traffic met {reason:?}");
        }
        assert!(extra > 0 && status.networks[0].flooded_unknown > 0);
    }
}
