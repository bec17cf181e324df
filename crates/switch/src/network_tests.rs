use super::*;
use crate::frame::{Mac, Offload};

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
        let mut batch = Batch::with_capacity(frames.len());
        for bytes in frames {
            batch.push(bytes[..].into(), Offload::NONE);
        }
        let mut drops = Drops::default();
        self.plan.clear();
        self.network.decide(Nanos(0), from, &Guard::default(), &batch, &mut self.plan, &mut drops);
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
