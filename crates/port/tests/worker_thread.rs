//! A worker on a thread of its own, with ports whose peers are in this process.

use rustix::thread::CpuSet;
use std::time::{Duration, Instant};
use tombolo_port::pair::{self, OwnedFrame, PairConfig, PairPeer};
use tombolo_switch::control::{ControlError, NetworkId, PortSettings};
use tombolo_switch::mac::MacSettings;
use tombolo_worker::thread::{WorkerConfig, WorkerError, WorkerThread};

fn start() -> (WorkerThread, NetworkId) {
    let config = WorkerConfig { name: "test-worker".into(), ..WorkerConfig::default() };
    let thread = WorkerThread::start(&config).unwrap();
    let network = thread.handle().add_network("net", MacSettings::default()).unwrap();
    (thread, network)
}

fn port(thread: &WorkerThread, network: NetworkId, name: &str) -> PairPeer {
    let reserved = thread.handle().reserve().unwrap();
    let (port, peer) = pair::pair(PairConfig::default(), thread.registration(&reserved)).unwrap();
    thread.handle().add_port(reserved, network, name, Box::new(port), PortSettings::default()).unwrap();
    peer
}

fn frame(to: u8, from: u8) -> Vec<u8> {
    let mut bytes = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 0x88, 0xb5];
    bytes.resize(64, from);
    bytes
}

fn next(peer: &PairPeer) -> OwnedFrame {
    peer.receive_timeout(Duration::from_secs(10)).expect("a frame before the deadline")
}

#[test]
fn frames_cross_a_real_worker_and_it_stops_cleanly() {
    let (thread, network) = start();
    let (a, b) = (port(&thread, network, "a"), port(&thread, network, "b"));
    for round in 0..100 {
        a.send(&frame(2, 1), Default::default()).unwrap();
        assert_eq!(next(&b).bytes, frame(2, 1), "round {round}");
        b.send(&frame(1, 2), Default::default()).unwrap();
        assert_eq!(next(&a).bytes, frame(1, 2), "round {round}");
    }
    let handle = thread.handle().clone();
    thread.stop().unwrap();
    assert!(matches!(handle.status(), Err(ControlError::Gone)));
}

#[test]
fn sixty_four_idle_ports_cost_less_than_a_hundredth_of_a_core() {
    let (thread, network) = start();
    let peers: Vec<_> = (0..64).map(|n| port(&thread, network, &format!("p{n}"))).collect();
    // Every port has carried something, so all are known to sleep again, not only never woken.
    for n in 0..64 {
        peers[n].send(&frame(255, n as u8), Default::default()).unwrap();
        for (_, peer) in peers.iter().enumerate().filter(|(other, _)| *other != n) {
            assert_eq!(next(peer).bytes, frame(255, n as u8));
        }
    }
    let sleeps = || thread.handle().counters().sleeps.get();
    thread.handle().status().unwrap();
    let cpu = || thread.cpu_time().expect("this kernel has schedstat");
    // Of a few spans one shows the worker alone, without what the machine does besides.
    let is_idle = (0..5).any(|_| {
        let (wall_before, cpu_before, sleeps_before) = (Instant::now(), cpu(), sleeps());
        // Not a wait for anything: this is the span that is measured.
        std::thread::sleep(Duration::from_millis(500));
        let (used, span, woken) = (cpu() - cpu_before, wall_before.elapsed(), sleeps() - sleeps_before);
        println!("idle: {used:?} of {span:?} on a CPU, woken {woken} times");
        used < span / 100 && woken <= 2
    });
    assert!(is_idle, "an idle worker that uses the CPU or is woken");
    thread.stop().unwrap();
}

#[test]
fn a_cpu_that_is_not_there_is_refused_and_said() {
    let config = |cpu| WorkerConfig { name: "w".into(), cpus: vec![cpu], ..WorkerConfig::default() };
    assert!(matches!(WorkerThread::start(&config(100_000)), Err(WorkerError::BadCpu { cpu: 100_000, .. })));
    assert!(matches!(WorkerThread::start(&config(1023)), Err(WorkerError::Affinity { .. })));
    let set = rustix::thread::sched_getaffinity(None).unwrap();
    let mine = (0..CpuSet::MAX_CPU).find(|cpu| set.is_set(*cpu)).unwrap();
    let thread = WorkerThread::start(&config(mine)).unwrap();
    let bound = rustix::thread::sched_getaffinity(Some(thread.pid())).unwrap();
    assert_eq!(bound.count(), 1);
    assert!(bound.is_set(mine));
    thread.stop().unwrap();
}
