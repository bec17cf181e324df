//! One report with every field set, and every number in it another: for tests of what is made of reports.

use super::report::*;
use std::collections::BTreeMap;

/// A status in which no field is empty and every counter has a value that no other has.
pub(crate) fn status() -> Status {
    let mut n = 1_000_003;
    let mut next = || {
        n += 17;
        n
    };
    let counters = CounterReport {
        rx_frames: next(),
        rx_bytes: next(),
        tx_frames: next(),
        tx_bytes: next(),
        rx_drops: BTreeMap::from([("guard-source".into(), next()), ("bad-length".into(), next())]),
        tx_drops: BTreeMap::from([("peer-slow".into(), next())]),
        wakeups: next(),
        turns: next(),
        exhausted_budgets: next(),
        frames_per_turn: vec![next(), next(), next()],
        faults: next(),
        restarts: next(),
        software_checksums: next(),
        software_segments: next(),
        captured: next(),
        capture_lost: next(),
    };
    Status {
        schema: SCHEMA,
        version: "0.1.0".into(),
        name: "demo".into(),
        file: "/srv/a \"b\"\\c/tombolo.toml".into(),
        pid: 4711,
        uptime_s: 3723.5,
        networks: vec![NetworkReport {
            name: "lan".into(),
            subnet: "10.87.0.0/24".into(),
            gateway: "10.87.0.1".parse().ok(),
            router: Some("10.87.0.2".parse().unwrap()),
            uplink: "user".into(),
            uplink_fault: Some("passt is not installed".into()),
            domain: "demo.internal".into(),
            mtu: 1500,
            worker: "main".into(),
            macs: next(),
            flooded_unknown: next(),
            leases: vec![LeaseReport {
                mac: "02:54:00:00:00:01".into(),
                ip: "10.87.0.10".parse().unwrap(),
                name: Some("web".into()),
                fixed: true,
                expires_s: Some(3599),
            }],
            counters: BTreeMap::from([("dhcp_acks".into(), next()), ("dns_queries".into(), next())]),
        }],
        machines: vec![MachineReport {
            name: "web".into(),
            kind: "cell".into(),
            state: "running".into(),
            pid: Some(4712),
            accel: "tcg".into(),
            machine: "microvm".into(),
            addresses: BTreeMap::from([("lan".into(), "10.87.0.10".parse().unwrap())]),
            uptime_s: Some(61.25),
            last_end: Some("exit code 3".into()),
            restarts: 5,
            adopted: true,
        }],
        ports: vec![PortReport {
            name: "web".into(),
            network: "lan".into(),
            kind: "vhost-user".into(),
            up: true,
            offloads: vec!["checksum".into(), "tso4".into()],
            guard: vec!["02:54:00:00:00:01".into()],
            details: BTreeMap::from([("socket".into(), "/run/tombolo/demo/web.sock".into())]),
            macs: next(),
            counters,
            last_fault: Some("avail index jumped by 300, the ring has 256".into()),
        }],
        forwards: vec![ForwardReport {
            proto: "tcp".into(),
            listen: "127.0.0.1:8080".parse().unwrap(),
            to: "web:80".into(),
            address: "10.87.0.10".parse().unwrap(),
            fault: Some("address in use".into()),
        }],
        links: vec![LinkReport {
            name: "web".into(),
            kind: "network".into(),
            version: 1,
            protocol: 1,
            plain: false,
            region_bytes: 1 << 20,
            vectors: 2,
            max_peers: 2,
            peers: vec![LinkPeerReport {
                id: 1,
                name: Some("web".into()),
                pid: Some(4712),
                state: "run".into(),
                state_word: 3,
                waiting_messages: next(),
            }],
            rings: Some(RingReport {
                frames_out: next(),
                frames_out_max: next(),
                bytes_out: next(),
                bytes_out_max: next(),
                frames_waiting: next(),
                frames_waiting_max: next(),
            }),
            joins: next(),
            leaves: next(),
            cut_slow: next(),
            cut_talking: next(),
            refused: next(),
            kept: true,
        }],
        workers: vec![WorkerReport {
            name: "main".into(),
            cpu: Some(1),
            budget: 64,
            busy_poll_us: 20,
            sleeps: next(),
            slept_ns: 2_500_000_000,
            lifetime_ns: 10_000_000_000,
        }],
        warnings: vec!["the uplink of lan does not work".into()],
    }
}
