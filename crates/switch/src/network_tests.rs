use super::*;
use crate::frame::{Checksum, Mac, Offload};
use std::net::IpAddr;

const A: Mac = [2, 0, 0, 0, 0, 1];
const B: Mac = [2, 0, 0, 0, 0, 2];
const C: Mac = [2, 0, 0, 0, 0, 3];

fn frame(to: Mac, from: Mac) -> Vec<u8> {
    let mut bytes = [&to[..], &from, &[0x88, 0xb5]].concat();
    bytes.resize(60, 0);
    bytes
}

/// Each destination and the frames that it gets.
type Lists = Vec<(PortNumber, Vec<u16>)>;

struct Bench {
    network: Network,
    plan: Plan,
}

impl Bench {
    fn new(ports: u16) -> Bench {
        let mut network = Network::new(MacSettings::default(), 1);
        let mut plan = Plan::default();
        for port in 0..ports {
            network.join(port, None);
            network.set_link(port, true);
            plan.add_port(port, 8);
        }
        plan.note_drops(true);
        Bench { network, plan }
    }

    /// Destinations with their frames, and the frames that go nowhere.
    fn decide(&mut self, from: PortNumber, frames: &[Vec<u8>]) -> (Lists, Vec<(u16, Reason)>) {
        self.decide_by(&Guard::default(), from, frames)
    }

    /// [`Bench::decide`], with the guard of the port `from`.
    fn decide_by(&mut self, guard: &Guard, from: PortNumber, frames: &[Vec<u8>]) -> (Lists, Vec<(u16, Reason)>) {
        let mut batch = Batch::with_capacity(frames.len());
        for bytes in frames {
            batch.push(bytes[..].into(), Offload::NONE);
        }
        let mut drops = Drops::default();
        self.plan.clear();
        self.network.decide(Nanos(0), from, guard, &mut batch, &mut self.plan, &mut drops);
        let plan = &self.plan;
        assert_eq!(drops.total(), plan.dropped().len() as u64);
        let lists = plan.destinations().iter().map(|port| (*port, plan.frames_to(*port).to_vec()));
        (lists.collect(), plan.dropped().to_vec())
    }
}

#[test]
fn each_kind_of_frame_goes_where_the_table_says() {
    let mut bench = Bench::new(3);
    bench.decide(1, &[frame([0xff; 6], B)]);
    bench.decide(2, &[frame([0xff; 6], C)]);
    let reserved = [0x01, 0x80, 0xc2, 0, 0, 0x01];
    let spanning_tree = [0x01, 0x80, 0xc2, 0, 0, 0x00];
    let frames = [
        frame(B, A),
        frame(C, A),
        frame(B, A),
        frame([0xff; 6], A),
        frame(A, A),
        frame(reserved, A),
        frame(spanning_tree, A),
        frame([2, 9, 9, 9, 9, 9], A),
        frame(B, [0; 6]),
        frame(B, [1, 0, 0, 0, 0, 1]),
        vec![2; 13],
        frame(B, A),
    ];
    let (lists, dropped) = bench.decide(0, &frames);
    assert_eq!(lists, [(1, vec![0, 2, 3, 6, 7, 11]), (2, vec![1, 3, 6, 7])]);
    let bad = Reason::BadSource;
    assert_eq!(dropped, [(4, Reason::Hairpin), (5, Reason::Reserved), (8, bad), (9, bad), (10, Reason::Runt)]);
    let counters = &bench.network.counters;
    assert_eq!((counters.flooded_unknown.get(), counters.flooded_group.get()), (1, 4));
    assert_eq!(counters.copies.get(), 2 + 2 + 10);
}

#[test]
fn an_address_that_turns_up_here_within_the_batch_changes_the_way_at_once() {
    let mut bench = Bench::new(2);
    bench.decide(1, &[frame([0xff; 6], B)]);
    // B moves to port 0 in the middle of a batch that is going to B.
    let (lists, dropped) = bench.decide(0, &[frame(B, A), frame(B, B), frame(B, A)]);
    assert_eq!(lists, [(1, vec![0])]);
    assert_eq!(dropped, [(1, Reason::Hairpin), (2, Reason::Hairpin)]);
    assert_eq!(bench.network.macs.stats().moved, 1);
}

#[test]
fn links_that_are_down_and_ports_that_left_get_no_floods() {
    let mut bench = Bench::new(3);
    bench.network.set_link(1, false);
    assert_eq!(bench.decide(0, &[frame(B, A)]).0, [(2, vec![0])]);
    bench.network.leave(2);
    assert_eq!(bench.decide(0, &[frame(B, A)]).1, [(0, Reason::NoDestination)]);
    bench.network.set_link(1, true);
    assert_eq!(bench.decide(0, &[frame(B, A)]).0, [(1, vec![0])]);
}

/// A UDP or TCP packet of 40 payload bytes behind `tags` VLAN tags, from 10.9.0.20.
fn packet(tags: usize, protocol: u8, header_words: u8) -> Vec<u8> {
    let mut bytes = [&B[..], &A].concat();
    for _ in 0..tags {
        bytes.extend_from_slice(&[0x81, 0, 0, 5]);
    }
    bytes.extend_from_slice(&[8, 0, 0x40 | header_words, 0, 0, 80, 0, 1, 0, 0, 64, protocol, 0, 0, 10, 9, 0, 20]);
    bytes.extend_from_slice(&[10, 9, 0, 9]);
    bytes.resize(bytes.len() + header_words as usize * 4 - 20 + 60, 0);
    bytes
}

/// The same over IPv6 with `extensions` headers of 8 bytes.
fn packet6(extensions: &[u8], protocol: u8) -> Vec<u8> {
    let chain = [extensions, &[protocol]].concat();
    let mut bytes = [&B[..], &A, &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 80, chain[0], 64], &[7; 32]].concat();
    for next in &chain[1..] {
        bytes.extend_from_slice(&[*next, 0, 0, 0, 0, 0, 0, 0]);
    }
    bytes.resize(bytes.len() + 60, 0);
    bytes
}

#[test]
fn a_partial_checksum_is_that_of_the_transport_header_and_of_nothing_else() {
    let guard = Guard::new(&[A], &["10.9.0.20".parse().unwrap()]);
    let mut arp = [&B[..], &A, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 1], &A, &[10, 9, 0, 20]].concat();
    arp.resize(80, 0);
    let mut no_ip = packet(0, 6, 5);
    no_ip[14] = 0x44; // a header of 16 bytes
    let fine: &[(Vec<u8>, u16, u16)] = &[
        (packet(0, 6, 5), 34, 16),
        (packet(0, 17, 5), 34, 6),
        (packet(0, 6, 15), 74, 16),
        (packet(1, 17, 5), 38, 6),
        (packet(2, 6, 6), 46, 16),
        (packet6(&[], 6), 54, 16),
        (packet6(&[0, 60], 17), 70, 6),
        (packet6(&[43], 6), 62, 16),
    ];
    let lies: &[(Vec<u8>, u16, u16)] = &[
        (packet(0, 17, 5), 26, 2),  // into the destination address
        (packet(0, 17, 5), 14, 12), // the source address
        (packet(0, 17, 5), 26, 6),  // starts in the IP header
        (packet(0, 17, 5), 34, 16), // TCP's place in a UDP packet
        (packet(0, 6, 5), 34, 0),   // the ports
        (packet(0, 6, 5), 35, 16),
        (packet(0, 6, 6), 34, 16), // starts in the IP options
        (packet(1, 17, 5), 34, 6), // starts in front of where the tag moved it
        (packet(0, 1, 5), 34, 2),  // ICMP, which no driver leaves to a device
        (packet(3, 6, 5), 46, 16), // more tags than are looked behind
        (packet6(&[], 6), 38, 16),
        (packet6(&[0], 6), 54, 16),
        (packet6(&[44], 6), 62, 16), // fragments are not offloaded
        (packet6(&[0; 9], 6), 126, 2),
        (arp, 28, 0), // the sender's address
        (no_ip, 30, 16),
    ];
    for (frames, expected) in [(fine, 1), (lies, 0)] {
        for (bytes, start, offset) in frames {
            // Each needs no guard that looks at addresses to be refused.
            for guard in [&Guard::default(), &guard] {
                let mut bench = Bench::new(2);
                let offload =
                    Offload { checksum: Checksum::Partial { start: *start, offset: *offset }, segmentation: None };
                let mut batch = Batch::with_capacity(1);
                batch.push(bytes[..].into(), offload);
                let mut drops = Drops::default();
                bench.network.decide(Nanos(0), 0, guard, &mut batch, &mut bench.plan, &mut drops);
                let case = format!("{bytes:02x?} {start} {offset}");
                assert_eq!(bench.plan.frames_to(1).len(), expected, "{case}");
                // Behind three tags the guard says so first.
                let refused = drops.of(Reason::BadOffload) + drops.of(Reason::Guard);
                assert_eq!(refused, 1 - expected as u64, "{case}");
            }
        }
    }
}

fn isolated() -> Labels {
    Labels { isolation: policy::Isolation::Alone, ..Labels::default() }
}

fn mirror(of: &str, to: &str) -> policy::Settings {
    let mirror = policy::Mirror { of: vec![of.into()], to: to.into(), sent: true, received: true };
    policy::Settings { mirrors: vec![mirror], ..policy::Settings::default() }
}

fn named(name: &str) -> Labels {
    Labels { names: vec![name.into()], ..Labels::default() }
}

#[test]
fn isolated_ports_are_not_reached_by_address_nor_by_floods() {
    let mut bench = Bench::new(4);
    for (port, mac) in [(0, A), (1, B), (2, C)] {
        bench.decide(port, &[frame([0xff; 6], mac)]);
    }
    bench.network.set_labels(0, isolated());
    bench.network.set_labels(1, isolated());
    let frames = [frame(B, A), frame(C, A), frame([0xff; 6], A), frame([2, 9, 9, 9, 9, 9], A)];
    let before = bench.network.counters.copies.get();
    let (lists, dropped) = bench.decide(0, &frames);
    assert_eq!(lists, [(2, vec![1, 2, 3]), (3, vec![2, 3])]);
    assert_eq!(dropped, [(0, Reason::Isolated)]);
    assert_eq!(bench.network.counters.copies.get() - before, 5);
    let (lists, _) = bench.decide(2, &[frame(A, C), frame(B, C), frame([0xff; 6], C)]);
    assert_eq!(lists, [(0, vec![0, 2]), (1, vec![1, 2]), (3, vec![2])], "one that is not isolated reaches all");
    bench.network.set_link(2, false);
    bench.network.set_link(3, false);
    let (lists, dropped) = bench.decide(0, &[frame([0xff; 6], A)]);
    assert_eq!((lists, dropped), (vec![], vec![(0, Reason::Isolated)]), "nobody is left for the flood");
    bench.network.set_labels(0, Labels::default());
    bench.network.set_labels(1, Labels::default());
    assert_eq!(bench.decide(0, &[frame(B, A)]).0, [(1, vec![0])]);
}

#[test]
fn a_mirror_gets_each_frame_once_and_sends_none() {
    let mut bench = Bench::new(4);
    for (port, mac) in [(0, A), (1, B), (2, C)] {
        bench.decide(port, &[frame([0xff; 6], mac)]);
    }
    for (port, name) in [(0, "a"), (1, "a"), (3, "ids")] {
        bench.network.set_labels(port, named(name));
    }
    bench.network.set_policy(mirror("a", "ids"));
    let before = bench.network.counters.copies.get();
    let (lists, dropped) = bench.decide(0, &[frame(B, A), frame([0xff; 6], A), frame(A, A)]);
    assert_eq!(
        lists,
        [(3, vec![0, 1]), (1, vec![0, 1]), (2, vec![1])],
        "a flood is for others, the mirror has its copy"
    );
    assert_eq!(dropped, [(2, Reason::Hairpin)]);
    assert_eq!(bench.network.counters.copies.get() - before, 5);
    assert_eq!(bench.decide(2, &[frame([0x01, 0, 0x5e, 0, 0, 1], C)]).0, [(0, vec![0]), (3, vec![0]), (1, vec![0])]);
    assert_eq!(bench.decide(3, &[frame(A, [2, 0, 0, 0, 0, 9])]).1, [(0, Reason::MirrorPort)]);
    bench.network.set_policy(policy::Settings::default());
    assert_eq!(bench.decide(0, &[frame(B, A)]).0, [(1, vec![0])]);
}

/// A UDP or TCP frame without options and extension headers from A to B, by the last bytes of the
/// IP addresses.
fn plain(six: bool, from: u8, to: u8, protocol: u8, to_port: u16) -> Vec<u8> {
    let mut bytes = [B, A].concat();
    if six {
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, protocol, 64]);
        for last in [from, to] {
            bytes.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
        }
    } else {
        bytes.extend([8, 0, 0x45, 0, 0, 40, 0, 1, 0, 0, 64, protocol, 0, 0, 10, 9, 0, from, 10, 9, 0, to]);
    }
    bytes.extend([0, 67]);
    bytes.extend(to_port.to_be_bytes());
    // What of TCP follows, with ACK alone.
    bytes.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    bytes
}

/// A frame of a known connection is not asked for its port's roles again, so nothing that they are
/// about may change meanwhile.
#[test]
fn no_frame_of_a_known_connection_passes_against_the_roles_of_its_port() {
    let mut bench = Bench::new(3);
    bench.network.set_labels(1, named("a"));
    let allowed = policy::Rule { to: vec![policy::Who::Label("a".into())], ..policy::Rule::default() };
    let otherwise = policy::Action::Deny;
    bench.network.set_policy(policy::Settings { otherwise, rules: vec![allowed], mirrors: Vec::new() });
    for (port, mac) in [(1, B), (0, A)] {
        bench.decide(port, &[frame([0xff; 6], mac)]);
    }
    let mut state = 7u32;
    let mut next = |below: u32| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % below
    };
    let (mut protected, mut passed, mut refused) = (Protected::default(), 0, 0);
    for step in 0..20_000 {
        if next(50) == 0 {
            let addresses: [IpAddr; 2] = ["10.9.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
            protected = Protected::new(&addresses[..next(3) as usize]);
            bench.network.protect(protected.clone());
        }
        let any = |n: u32| n != 0;
        let roles = Roles { router: any(next(2)), dhcp_server: any(next(2)), gateway: any(next(2)) };
        let guard = Guard::default().with_roles(roles);
        let frames: Vec<_> = (0..1 + next(3))
            .map(|_| {
                plain(
                    any(next(2)),
                    [2, 3][next(2) as usize],
                    9,
                    [6, 17][next(2) as usize],
                    [68, 546, 80][next(3) as usize],
                )
            })
            .collect();
        let (lists, dropped) = bench.decide_by(&guard, 0, &frames);
        for (index, bytes) in (0..).zip(&frames) {
            let reason = dropped.iter().find(|(at, _)| *at == index).map(|(_, reason)| *reason);
            assert_eq!(reason, guard::refuse(bytes, false, roles, &protected), "step {step}: {bytes:?}");
            let went = lists.iter().any(|(port, which)| *port == 1 && which.contains(&index));
            assert_eq!(went, reason.is_none());
            *(if went { &mut passed } else { &mut refused }) += 1;
        }
    }
    assert!(passed > 5_000 && refused > 5_000, "{passed} {refused}");
}
