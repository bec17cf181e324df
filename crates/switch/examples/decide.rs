//! What the switch's own work costs per frame, on this machine: the decision alone, and a whole
//! turn of the worker between two ports that cost next to nothing (their frames lie in memory, what
//! they are given is copied into a buffer that stays hot).
//!
//! `cargo run --release -p tombolo-switch --example decide [PART OF A CASE'S NAME]` prints one line
//! per case: nanoseconds per frame, best and median of the rounds. Nothing is asserted; it is a
//! tool for the eye, and the bench of the repo measures the real thing. With the argument `cost
//! [BYTES]` it prints what rules, VLANs and classes add with 64 flows of frames of so many bytes
//! (1500) between the same two Ethernet addresses, for `./x bench daytwo`.

#[path = "../tests/support/memory.rs"]
mod memory;

use memory::{Memory, Refill};
use std::hint::black_box;
use std::time::Instant;
use tombolo_ring::mem::Foreign;
use tombolo_switch::Nanos;
use tombolo_switch::class::Marking;
use tombolo_switch::control::{PortSettings, WorkerHandle, WorkerSettings};
use tombolo_switch::drop::Drops;
use tombolo_switch::frame::{Batch, Offload};
use tombolo_switch::guard::Guard;
use tombolo_switch::limit::Storm;
use tombolo_switch::mac::MacSettings;
use tombolo_switch::network::{Network, Plan};
use tombolo_switch::policy::{Action, Labels, Protocol, Rule, Settings, Who};
use tombolo_switch::port::Caps;
use tombolo_switch::vlan::Membership;
use tombolo_switch::wait::{CONTROL, Token, Waiter};
use tombolo_switch::worker::Worker;

/// Rounds are short, so that on a busy machine some of them have a core to themselves.
const ROUNDS: usize = 300;
const BATCH: usize = 64;

fn main() {
    // With an argument, only the cases whose name has it.
    let wanted = std::env::args().nth(1).unwrap_or_default();
    if wanted == "cost" {
        return cost(std::env::args().nth(2).map_or(1500, |bytes| bytes.parse().expect("bytes of a frame")));
    }
    println!("{:<44} {:>8} {:>8}", "case", "ns best", "ns med.");
    for (name, flows) in [("one flow", 1), ("64 flows", 64), ("10,000 flows", 10_000)] {
        for (policy, settings) in [("", Settings::default()), (", rules for others", others()), (", rules", rules())] {
            let name = format!("decision, {name}{policy}");
            if name.contains(&wanted) {
                decision(&name, flows, settings, [None, None]);
            }
        }
    }
    let (access, trunk) = (Membership::access(10), Membership { native: None, trunk: Some(vec![10..=20]) });
    let pairs =
        [("access ports of a VLAN", [access.clone(), access.clone()]), ("access port to trunk", [access, trunk])];
    for (what, pair) in pairs {
        let pair = pair.map(Some);
        for (flows, many) in [(1, "one flow"), (64, "64 flows")] {
            let name = format!("decision, {many}, {what}");
            if name.contains(&wanted) {
                decision(&name, flows, Settings::default(), pair.clone());
            }
        }
        for bytes in [64, 1500] {
            let name = format!("turn between two ports, {bytes} bytes, {what}");
            if name.contains(&wanted) {
                turn(&name, bytes, Settings::default(), pair.clone());
            }
        }
    }
    for bytes in [64, 1500] {
        for (policy, settings) in [("", Settings::default()), (", rules for others", others()), (", rules", rules())] {
            let name = format!("turn between two ports, {bytes} bytes{policy}");
            if name.contains(&wanted) {
                turn(&name, bytes, settings, [None, None]);
            }
        }
    }
}

/// A policy that is about other members.
fn others() -> Settings {
    let rule = |name: &str| Rule { action: Action::Deny, from: vec![Who::Label(name.into())], ..Rule::default() };
    Settings { rules: ["web", "db", "app", "ids"].map(rule).into(), ..Settings::default() }
}

/// A policy that denies by default; the ports' connections are allowed by the last of its rules.
fn rules() -> Settings {
    let allowed = Rule { from: vec![Who::Label("port".into())], protocol: Protocol::Number(17), ..Rule::default() };
    let mut settings = others();
    settings.rules.push(allowed);
    Settings { otherwise: Action::Deny, ..settings }
}

fn labels() -> Labels {
    Labels { names: vec!["port".into()], ..Labels::default() }
}

fn frame(to: usize, from: usize, bytes: usize) -> Vec<u8> {
    between(to, from, frame_of(to, from, bytes))
}

/// The frame, with these Ethernet addresses.
fn between(to: usize, from: usize, mut frame: Vec<u8>) -> Vec<u8> {
    let address = |n: usize| [2, 0, (n >> 24) as u8, (n >> 16) as u8, (n >> 8) as u8, n as u8];
    frame[..6].copy_from_slice(&address(to));
    frame[6..12].copy_from_slice(&address(from));
    frame
}

/// A frame whose IP addresses say which flow it is of.
fn frame_of(to: usize, from: usize, bytes: usize) -> Vec<u8> {
    let mut frame = [&[0; 12][..], &[8, 0]].concat();
    frame.resize(bytes, 0);
    // IPv4 and UDP, from which a policy knows the connection.
    frame[14] = 0x45;
    frame[23] = 17;
    frame[26..30].copy_from_slice(&(from as u32).to_be_bytes());
    frame[30..34].copy_from_slice(&(to as u32).to_be_bytes());
    frame
}

/// Runs `work`, which handles `frames` frames, several times and prints what a frame costs.
fn measure(name: &str, frames: usize, mut work: impl FnMut()) {
    let mut results = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        work();
        results.push(start.elapsed().as_nanos() as f64 / frames as f64);
    }
    results.sort_by(f64::total_cmp);
    println!("{name:<44} {:>8.2} {:>8.2}", results[0], results[ROUNDS / 2]);
}

fn decision(name: &str, flows: usize, policy: Settings, vlans: [Option<Membership>; 2]) {
    let mut network = Network::new(MacSettings::default(), 42);
    let mut plan = Plan::default();
    for port in 0..2 {
        network.join(port, None);
        network.set_link(port, true);
        network.set_labels(port, labels());
        plan.add_port(port, BATCH);
    }
    network.set_policy(policy);
    for (port, vlans) in (0..).zip(vlans.clone()) {
        network.set_vlans(port, vlans);
    }
    let tagged = vlans[1].as_ref().is_some_and(|vlans| vlans.trunk.is_some());
    let guard = Guard::default();
    let mut drops = Drops::default();
    let frames: Vec<_> = (0..flows.max(BATCH)).map(|n| frame(100_000 + n % flows, n % flows, 64)).collect();
    // The answers, from which the destinations are known.
    for back in &frames {
        let mut batch = Batch::with_capacity(1);
        let mut reply = back.clone();
        reply[..6].copy_from_slice(&back[6..12]);
        reply[6..12].copy_from_slice(&back[..6]);
        reply[26..30].copy_from_slice(&back[30..34]);
        reply[30..34].copy_from_slice(&back[26..30]);
        if tagged {
            reply.splice(12..12, [0x81, 0, 0, 10]);
        }
        batch.push(Foreign::from(&reply[..]), Offload::NONE);
        network.decide(Nanos(0), 1, &guard, &mut batch, &mut plan, &mut drops);
        plan.clear();
    }
    let mut batches: Vec<_> = frames
        .chunks(BATCH)
        .map(|frames| {
            let mut batch = Batch::with_capacity(BATCH);
            for frame in frames {
                batch.push(Foreign::from(&frame[..]), Offload::NONE);
            }
            batch
        })
        .collect();
    let passes = 20_000usize.div_ceil(frames.len());
    let mut run = |now: Nanos, passes: usize| {
        for _ in 0..passes {
            for batch in &mut batches {
                black_box(network.decide(now, 0, &guard, batch, &mut plan, &mut drops));
                for port in plan.destinations() {
                    network.shape(*port, batch, plan.frames_to(*port));
                }
                network.restore(batch);
                plan.clear();
            }
        }
    };
    // Some time goes by first: tables follow what they had to hold.
    (1..5).for_each(|second| run(Nanos::SECOND.times(second), 1));
    measure(name, passes * frames.len(), || run(Nanos::SECOND.times(5), passes));
}

/// Frames of both ports per wake-up.
const TURN_FRAMES: usize = 1 << 14;

/// Wakes both ports whenever the worker would sleep, and keeps real time.
struct Restless {
    start: Instant,
    sleeps: u32,
}

impl Waiter for Restless {
    fn wait(&mut self, timeout: Option<Nanos>, ready: &mut Vec<Token>) {
        if timeout.is_none() {
            self.sleeps += 1;
            ready.extend([Token(0), Token(1), CONTROL]);
        }
    }

    fn now(&mut self) -> Nanos {
        Nanos(self.start.elapsed().as_nanos() as u64)
    }
}

/// A worker with two ports in memory that send to each other.
struct Pair {
    worker: Worker,
    waiter: Restless,
    _handle: WorkerHandle,
}

impl Pair {
    fn new(flows: usize, bytes: usize, policy: Settings, vlans: [Option<Membership>; 2], marking: Marking) -> Pair {
        let mut waiter = Restless { start: Instant::now(), sleeps: 0 };
        let (mut worker, handle) = Worker::new(WorkerSettings::default(), 7, || {});
        let asked = std::thread::spawn(move || {
            let network = handle.add_network("net", MacSettings::default()).expect("a worker that runs");
            handle.set_policy(network, policy).expect("a network that is there");
            // The flows of the second port are the answers.
            let ends = |n: usize, second: bool| if second { (1 + n, 100_000 + n) } else { (100_000 + n, 1 + n) };
            for (second, vlans) in [false, true].into_iter().zip(vlans) {
                let tagged = vlans.as_ref().is_some_and(|vlans| vlans.trunk.is_some());
                let one = |n: usize| {
                    let (to, from) = ends(n, second);
                    let [to_mac, from_mac] = if second { [1, 2] } else { [2, 1] };
                    let mut bytes = between(to_mac, from_mac, frame_of(to, from, bytes));
                    if tagged {
                        bytes.splice(12..12, [0x81, 0, 0, 10]);
                    }
                    (bytes, Offload::NONE)
                };
                let port = Memory::new((0..flows).map(one).collect(), Refill::Wake(TURN_FRAMES / 2), Caps::full(1500));
                let reserved = handle.reserve().expect("a free token");
                let settings =
                    PortSettings { storm: Storm::OFF, labels: labels(), vlans, marking, ..PortSettings::default() };
                handle.add_port(reserved, network, "memory", Box::new(port), settings).expect("a port that is added");
            }
            handle
        });
        while !asked.is_finished() {
            worker.step(&mut waiter);
        }
        Pair { worker, waiter, _handle: asked.join().expect("the asking thread") }
    }

    /// Both ports send [`TURN_FRAMES`] frames between them.
    fn round(&mut self) {
        let before = self.waiter.sleeps;
        while self.waiter.sleeps <= before + 1 {
            self.worker.step(&mut self.waiter);
        }
    }
}

fn turn(name: &str, bytes: usize, policy: Settings, vlans: [Option<Membership>; 2]) {
    let mut pair = Pair::new(1, bytes, policy, vlans, Marking::default());
    measure(name, TURN_FRAMES, || pair.round());
}

/// What rules, VLANs and classes add to a whole turn with 64 flows, each alone and all together.
/// The settings take turns round by round, so that what else the machine does meets all of them.
fn cost(bytes: usize) {
    const REPEATS: usize = 9;
    let vlans = || [Some(Membership::access(10)), Some(Membership::access(10))];
    let settings = [
        ("none", Settings::default(), [None, None], Marking::default()),
        ("rules", rules(), [None, None], Marking::default()),
        ("VLANs", Settings::default(), vlans(), Marking::default()),
        ("classes", Settings::default(), [None, None], Marking::Marks),
        ("all", rules(), vlans(), Marking::Marks),
    ];
    let mut pairs = settings.map(|(name, policy, vlans, marking)| (name, Pair::new(64, bytes, policy, vlans, marking)));
    // Of each repeat the median of its rounds.
    let mut medians = vec![Vec::new(); pairs.len()];
    for _ in 0..REPEATS {
        let mut rounds = vec![Vec::new(); pairs.len()];
        for _ in 0..ROUNDS / 3 {
            for ((_, pair), rounds) in pairs.iter_mut().zip(&mut rounds) {
                let start = Instant::now();
                pair.round();
                rounds.push(start.elapsed().as_nanos() as f64 / TURN_FRAMES as f64);
            }
        }
        for (rounds, medians) in rounds.iter_mut().zip(&mut medians) {
            rounds.sort_by(f64::total_cmp);
            medians.push(rounds[rounds.len() / 2]);
        }
    }
    let plain = medians[0].clone();
    let what = format!("turn, 64 flows, {bytes} bytes, with");
    println!("{what:<44} {:>8} {:>8} {:>8} {:>8}", "ns", "% more", "least", "most");
    for ((name, _), medians) in pairs.iter().zip(&mut medians) {
        let mut percent: Vec<f64> =
            medians.iter().zip(&plain).map(|(with, without)| (with / without - 1.0) * 100.0).collect();
        percent.sort_by(f64::total_cmp);
        medians.sort_by(f64::total_cmp);
        let [ns, percent, least, most] = [medians[REPEATS / 2], percent[REPEATS / 2], percent[0], percent[REPEATS - 1]];
        println!("{name:<44} {ns:>8.2} {percent:>8.1} {least:>8.1} {most:>8.1}");
    }
}
