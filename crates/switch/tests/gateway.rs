//! A gateway as a port of a worker, under its virtual clock.
#![allow(missing_docs)]

mod support;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{IpProtocol, Ipv4Packet, Ipv4Repr, UdpPacket, UdpRepr};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use support::*;
use tombolo_switch::Nanos;
use tombolo_switch::control::{PortSettings, WorkerSettings};
use tombolo_switch::drop::Drops;
use tombolo_switch::frame::Batch;
use tombolo_switch::gateway::{
    DhcpConfig, Gateway, GatewayConfig, GatewayHandle, GatewayPort, LeaseStore, Member, Start,
};
use tombolo_switch::guard::{Guard, Roles};
use tombolo_switch::mac::MacSettings;
use tombolo_switch::port::{Caps, Carrier, Fault, Port, Sent};
use tombolo_switch::worker::Restart;

const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const GATEWAY_MAC: [u8; 6] = [2, 0, 0, 0, 0xff, 1];

/// A gateway with a bug that a test can trigger.
struct Trap {
    port: GatewayPort,
    sprung: Arc<AtomicBool>,
}

impl Port for Trap {
    fn kind(&self) -> &'static str {
        self.port.kind()
    }
    fn link(&self) -> Carrier {
        self.port.link()
    }
    fn caps(&self) -> Caps {
        self.port.caps()
    }
    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        self.port.service(now)
    }
    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        self.port.receive(budget, batch, drops)
    }
    fn release(&mut self) -> Result<(), Fault> {
        self.port.release()
    }
    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let sent = self.port.transmit(batch, which, drops)?;
        // Behind the work, so that it is half done.
        assert!(!self.sprung.swap(false, Ordering::Relaxed), "the trap was sprung");
        Ok(sent)
    }
    fn flush(&mut self) -> Result<(), Fault> {
        self.port.flush()
    }
    fn answers(&self) -> bool {
        self.port.answers()
    }
    fn arm(&mut self) -> Result<bool, Fault> {
        self.port.arm()
    }
    fn disarm(&mut self) {
        self.port.disarm();
    }
    fn reset(&mut self, fault: &Fault) {
        self.port.reset(fault);
    }
}

/// A bench with a network of a gateway and two ports.
fn bench() -> (Bench, GatewayHandle, [Peer; 2]) {
    let (bench, handle, ports, _) = trapped();
    (bench, handle, ports)
}

/// As [`bench`], with what makes the gateway panic.
fn trapped() -> (Bench, GatewayHandle, [Peer; 2], Arc<AtomicBool>) {
    let mut bench = Bench::new(WorkerSettings::default());
    let net = bench.network(MacSettings::default());
    let range = (Ipv4Addr::new(10, 9, 0, 16), Ipv4Addr::new(10, 9, 0, 23));
    let config = GatewayConfig {
        mac: GATEWAY_MAC,
        address: GATEWAY,
        prefix: 24,
        mtu: 1500,
        router: None,
        dns: Vec::new(),
        domain: String::new(),
        name: "gateway".into(),
        forward: true,
        dhcp: Some(DhcpConfig { range, lease_secs: 3600, leases_per_port: None }),
        ipv6: None,
    };
    let now = bench.waiter.lock().now;
    let start = Start { now, unix_secs: 1_800_000_000, entropy: [1; 16] };
    let (port, handle) = GatewayPort::new(Gateway::new(config, &LeaseStore::default(), start).unwrap());
    let reserved = bench.handle.reserve().unwrap();
    let (waiter, token) = (bench.waiter.clone(), reserved.token());
    handle.set_port_waker(Arc::new(move || waiter.wake(token)));
    // As the host adds it.
    let guard = Guard::default().with_roles(Roles::ALL);
    let settings = PortSettings { guard, ..PortSettings::default() };
    let sprung = Arc::<AtomicBool>::default();
    let port = Box::new(Trap { port, sprung: sprung.clone() });
    let (again, trap) = (handle.clone(), sprung.clone());
    let restart: Restart = Box::new(move |now| match again.restart(now) {
        Ok(port) => Ok(Box::new(Trap { port, sprung: trap.clone() })),
        Err(error) => Err(error.to_string()),
    });
    bench.ask(|h| h.add_lasting_port(reserved, net, "gateway", port, restart, settings)).unwrap();
    let ports = bench.ports(net);
    (bench, handle, ports, sprung)
}

fn udp(from_mac: [u8; 6], to_mac: [u8; 6], from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), data: &[u8]) -> Vec<u8> {
    let mut frame = [&to_mac[..], &from_mac, &[8, 0]].concat();
    frame.resize(42 + data.len(), 0);
    let sums = ChecksumCapabilities::default();
    let ipv4 = Ipv4Repr {
        src_addr: from.0,
        dst_addr: to.0,
        next_header: IpProtocol::Udp,
        payload_len: 8 + data.len(),
        hop_limit: 64,
    };
    ipv4.emit(&mut Ipv4Packet::new_unchecked(&mut frame[14..]), &sums);
    UdpRepr { src_port: from.1, dst_port: to.1 }.emit(
        &mut UdpPacket::new_unchecked(&mut frame[34..]),
        &from.0.into(),
        &to.0.into(),
        data.len(),
        |room| room.copy_from_slice(data),
        &sums,
    );
    frame
}

fn discover(n: u64) -> Vec<u8> {
    dhcp(n, b"\x35\x01\x01\xff")
}

fn request(n: u64, address: Ipv4Addr) -> Vec<u8> {
    dhcp(n, &[&b"\x35\x01\x03\x32\x04"[..], &address.octets(), b"\xff"].concat())
}

fn dhcp(n: u64, options: &[u8]) -> Vec<u8> {
    let mut message = vec![1, 1, 6, 0, 0, 0, 0, n as u8];
    message.resize(28, 0);
    message.extend_from_slice(&mac(n));
    message.resize(236, 0);
    message.extend_from_slice(b"\x63\x82\x53\x63");
    message.extend_from_slice(options);
    udp(mac(n), BROADCAST, (Ipv4Addr::UNSPECIFIED, 68), (Ipv4Addr::BROADCAST, 67), &message)
}

/// The kind (RFC 2132 §9.6) and the address of a DHCP answer.
fn answer(frame: &[u8]) -> (u8, Ipv4Addr) {
    let message = &frame[42..];
    assert_eq!(message[240..242], [0x35, 1], "the kind comes first");
    (message[242], Ipv4Addr::new(message[16], message[17], message[18], message[19]))
}

fn query(id: u16, name: &str) -> Vec<u8> {
    let mut bytes = [&id.to_be_bytes()[..], b"\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"].concat();
    for label in name.split('.') {
        bytes.push(label.len() as u8);
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.extend_from_slice(b"\x00\x00\x01\x00\x01");
    bytes
}

/// Runs until `done` gives something, and not a step further: an idle worker sleeps until the next
/// lease ends.
#[track_caller]
fn run<T>(bench: &mut Bench, mut done: impl FnMut() -> Option<T>) -> T {
    for _ in 0..64 {
        bench.worker.step(&mut bench.waiter);
        if let Some(found) = done() {
            return found;
        }
    }
    panic!("it did not happen");
}

/// The next frame that a port's peer got for itself.
#[track_caller]
fn reply(bench: &mut Bench, peer: &Peer, n: u64) -> Vec<u8> {
    run(bench, || peer.take_bytes().into_iter().find(|f| f[..6] == mac(n) || f[..6] == BROADCAST && f[37] == 68))
}

#[test]
fn a_gateway_that_panicked_comes_back_with_its_leases_members_and_counters() {
    let (mut bench, handle, [a, b], trap) = trapped();
    let counters = bench.ask(|h| h.status()).unwrap().ports[0].counters.clone();
    let member = Member { name: "printer".into(), mac: None, address: Some(Ipv4Addr::new(10, 9, 0, 200)) };
    handle.set_member(member).unwrap();
    a.send(discover(1));
    let offered = answer(&reply(&mut bench, &a, 1)).1;
    a.send(request(1, offered));
    assert_eq!(answer(&reply(&mut bench, &a, 1)), (5, offered));
    // A query is under way.
    let client = (offered, 4000);
    a.send(udp(mac(1), GATEWAY_MAC, client, (GATEWAY, 53), &query(7, "big.org")));
    let old = run(&mut bench, || handle.take_queries().pop()).id;
    trap.store(true, Ordering::Relaxed);
    b.send(discover(2));
    run(&mut bench, || (!trap.load(Ordering::Relaxed)).then_some(()));
    // A member comes while the port is out of service.
    let late = Member { name: "late".into(), mac: None, address: Some(Ipv4Addr::new(10, 9, 0, 201)) };
    handle.set_member(late).unwrap();
    a.take();
    b.take();
    run(&mut bench, || (counters.restarts.get() == 1).then_some(()));
    assert_eq!(handle.leases().leases.len(), 1);
    // The lease is the first guest's, who renews it; the second one gets another.
    a.send(request(1, offered));
    assert_eq!(answer(&reply(&mut bench, &a, 1)), (5, offered));
    b.send(request(2, offered));
    assert_eq!(answer(&reply(&mut bench, &b, 2)).0, 6, "refused");
    b.send(discover(2));
    assert_ne!(answer(&reply(&mut bench, &b, 2)).1, offered);
    // Names of before and of meanwhile are known.
    for (name, last) in [("printer", 200), ("late", 201)] {
        a.take();
        a.send(udp(mac(1), GATEWAY_MAC, client, (GATEWAY, 53), &query(8, name)));
        let got = reply(&mut bench, &a, 1);
        assert_eq!((got[42 + 3] & 15, got.last()), (0, Some(&last)), "{name}");
    }
    // An answer to the old one's query matches no query, though the new one's first query could
    // have been taken for it.
    a.send(udp(mac(1), GATEWAY_MAC, client, (GATEWAY, 53), &query(9, "big.org")));
    let asked = run(&mut bench, || handle.take_queries().pop());
    assert_ne!(asked.id, old);
    handle.answer(old, Vec::new());
    run(&mut bench, || (handle.counters().dns_upstream_strays.get() == 1).then_some(()));
    assert_eq!(handle.counters().dhcp_acks.get(), 2, "counters go on");
    let status = bench.ask(|h| h.status()).unwrap().ports[0].clone();
    assert_eq!((status.panic, status.link), (None, Carrier::Up));
    assert!(status.last_fault.is_some_and(|f| f.fault.detail.contains("the trap was sprung")));
}

#[test]
fn the_worker_names_the_port_that_a_claim_came_from() {
    let (mut bench, handle, [a, b]) = bench();
    for n in 1..=20 {
        a.send(discover(n));
    }
    // One turn takes them all; time does not pass, so that the offers stay valid.
    for _ in 0..8 {
        bench.worker.step(&mut bench.waiter);
        if a.lock().to_switch.is_empty() && !a.lock().from_switch.is_empty() {
            break;
        }
    }
    assert_eq!(a.take().len(), 4, "half of the range of 8");
    assert_eq!(handle.counters().dhcp_over_quota.get(), 16);
    b.send(discover(30));
    for _ in 0..8 {
        bench.worker.step(&mut bench.waiter);
    }
    let offers = b.take().into_iter().filter(|d| d.bytes[..6] == mac(30)).count();
    assert_eq!(offers, 1);
}

#[test]
fn a_query_that_nobody_answers_fails_by_the_workers_own_timer() {
    let (mut bench, handle, [a, b]) = bench();
    let client = (Ipv4Addr::new(10, 9, 0, 50), 4000);
    let query = b"\x43\x21\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03big\x03org\x00\x00\x01\x00\x01";
    let before = bench.waiter.lock().now;
    a.send(udp(mac(1), GATEWAY_MAC, client, (GATEWAY, 53), query));
    bench.settle();
    assert_eq!(handle.take_queries().len(), 1);
    let answers = a.take_bytes();
    assert_eq!(answers.len(), 1);
    assert_eq!((&answers[0][42..44], answers[0][45] & 15), (&b"\x43\x21"[..], 2));
    assert_eq!(bench.waiter.lock().now.since(before), Nanos::MILLI.times(4500));
    // The flood of the unknown address aside, the other port hears nothing; the answer is for one.
    assert_eq!(b.take().len(), 1);
    // An answer that the host gives wakes the port and goes out without any timer.
    a.send(udp(mac(1), GATEWAY_MAC, client, (GATEWAY, 53), query));
    for _ in 0..4 {
        bench.worker.step(&mut bench.waiter);
        if let Some(asked) = handle.take_queries().pop() {
            let mut answer = asked.bytes;
            answer[2] |= 0x80;
            handle.answer(asked.id, answer);
        }
    }
    bench.settle();
    assert_eq!(a.take().len(), 1);
    assert_eq!(handle.counters().dns_upstream_answers.get(), 1);
}

#[test]
fn the_first_query_after_an_idle_minute_is_timed_from_now() {
    let (mut bench, handle, [a, _b]) = bench();
    bench.settle();
    // Nothing wakes the gateway meanwhile.
    bench.waiter.advance(Nanos::SECOND.times(60));
    let client = (Ipv4Addr::new(10, 9, 0, 50), 4000);
    let query = b"\x43\x21\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03big\x03org\x00\x00\x01\x00\x01";
    let before = bench.waiter.lock().now;
    a.send(udp(mac(1), GATEWAY_MAC, client, (GATEWAY, 53), query));
    for _ in 0..8 {
        bench.worker.step(&mut bench.waiter);
        if let Some(asked) = handle.take_queries().pop() {
            let mut answer = asked.bytes;
            answer[2] |= 0x80;
            handle.answer(asked.id, answer);
        }
    }
    let answers = a.take_bytes();
    assert_eq!(answers.len(), 1);
    assert_eq!(answers[0][45] & 15, 0, "the host's answer, and no failure that was due in the past");
    assert!(bench.waiter.lock().now.since(before) < Nanos::SECOND);
    assert_eq!(handle.counters().dns_upstream_answers.get(), 1);
}
