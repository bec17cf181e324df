//! A gateway as a port of a worker, under its virtual clock.
#![allow(missing_docs)]

mod support;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{IpProtocol, Ipv4Packet, Ipv4Repr, UdpPacket, UdpRepr};
use std::net::Ipv4Addr;
use std::sync::Arc;
use support::*;
use tombolo_switch::Nanos;
use tombolo_switch::control::{PortSettings, WorkerSettings};
use tombolo_switch::gateway::{DhcpConfig, Gateway, GatewayConfig, GatewayHandle, GatewayPort, LeaseStore, Start};
use tombolo_switch::mac::MacSettings;

const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
const GATEWAY_MAC: [u8; 6] = [2, 0, 0, 0, 0xff, 1];

/// A bench with a network of a gateway and two ports.
fn bench() -> (Bench, GatewayHandle, [Peer; 2]) {
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
    };
    let now = bench.waiter.lock().now;
    let start = Start { now, unix_secs: 1_800_000_000, entropy: [1; 16] };
    let (port, handle) = GatewayPort::new(Gateway::new(config, &LeaseStore::default(), start).unwrap());
    let reserved = bench.handle.reserve().unwrap();
    let (waiter, token) = (bench.waiter.clone(), reserved.token());
    handle.set_port_waker(Arc::new(move || waiter.wake(token)));
    let settings = PortSettings::default();
    bench.ask(|h| h.add_port(reserved, net, "gateway", Box::new(port), settings)).unwrap();
    let ports = bench.ports(net);
    (bench, handle, ports)
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
    let mut message = vec![1, 1, 6, 0, 0, 0, 0, n as u8];
    message.resize(28, 0);
    message.extend_from_slice(&mac(n));
    message.resize(236, 0);
    message.extend_from_slice(b"\x63\x82\x53\x63\x35\x01\x01\xff");
    udp(mac(n), BROADCAST, (Ipv4Addr::UNSPECIFIED, 68), (Ipv4Addr::BROADCAST, 67), &message)
}

#[test]
fn the_worker_names_the_port_that_a_claim_came_from() {
    let (mut bench, handle, [a, b]) = bench();
    for n in 1..=20 {
        a.send(discover(n));
    }
    // One turn takes them all; time does not pass, so that the offers stand.
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
    // Nobody wakes the gateway meanwhile.
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
