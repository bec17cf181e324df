//! Captures of a working port, read back by tshark.
#![allow(missing_docs)]

mod support;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use support::*;
use tombolo_switch::Nanos;
use tombolo_switch::capture::{Capture, CaptureMemory, CaptureRead, CaptureSettings, FRAME_OVERHEAD_BYTES};
use tombolo_switch::control::{PortSettings, WorkerSettings};
use tombolo_switch::filter::Filter;
use tombolo_switch::frame::{Checksum, Offload};
use tombolo_switch::guard::Guard;
use tombolo_switch::mac::MacSettings;

/// The fields of each frame of a pcapng file, one line per frame.
fn tshark(file: &[u8], fields: &[&str]) -> Vec<Vec<String>> {
    let path = std::env::temp_dir().join(format!("tombolo-capture-{}-{:x}.pcapng", std::process::id(), file.len()));
    std::fs::write(&path, file).unwrap();
    let mut command = Command::new("tshark");
    command.arg("-r").arg(&path).args(["-T", "fields", "-E", "separator=|"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let output = command.output().expect("tshark, which this test reads the capture with: apt install tshark");
    std::fs::remove_file(&path).unwrap();
    assert!(output.status.success(), "tshark: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.split('|').map(String::from).collect()).collect()
}

#[test]
fn tshark_reads_what_a_port_received_transmitted_and_dropped() {
    let mut bench = Bench::new(WorkerSettings::default());
    let net = bench.network(MacSettings::default());
    let a = bench.port(net, PortSettings { guard: Guard::new(&[mac(1)], &[]), ..PortSettings::default() });
    let [b] = bench.ports(net);
    let clock_start = Nanos(1_700_000_000_123_456_789);
    let settings = CaptureSettings { clock_start, snap_bytes: 100, ..CaptureSettings::default() };
    let mut capture = bench.ask(|h| h.capture(a.token, settings)).unwrap();
    let partial = Offload { checksum: Checksum::Partial { start: 34, offset: 16 }, segmentation: None };
    let mut tcp = frame(BROADCAST, mac(1), 60, 1);
    tcp[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 46, 0, 1, 0x40, 0, 64, 6]);
    a.send_with(tcp, partial);
    a.send(frame(BROADCAST, mac(2), 61, 2));
    bench.settle();
    b.send(frame(mac(1), mac(2), 1514, 3));
    bench.waiter.advance(Nanos(1_000_000_001));
    bench.settle();
    a.lock().room = 0;
    b.send(frame(mac(1), mac(2), 70, 4));
    bench.settle();
    let mut file = Vec::new();
    assert_eq!(capture.read(&mut file, Duration::ZERO), CaptureRead::Data);
    assert_eq!(capture.read(&mut file, Duration::ZERO), CaptureRead::Quiet);
    bench.ask(|h| h.remove_port(a.token)).unwrap();
    assert_eq!(capture.read(&mut file, Duration::ZERO), CaptureRead::Ended);
    let fields = [
        "frame.interface_name",
        "frame.time_epoch",
        "frame.len",
        "frame.cap_len",
        "frame.packet_flags_direction",
        "frame.comment",
        "eth.src",
    ];
    let lines = tshark(&file, &fields);
    let name = format!("port{}", a.token.0);
    let (one, two) = ("02:00:00:00:00:01", "02:00:00:00:00:02");
    let want = [
        [&name, "1700000000.123456789", "60", "60", "0x00000001", "partial checksum, from 34, at +16", one],
        [&name, "1700000000.123456789", "61", "61", "0x00000001", "dropped: guard", two],
        [&name, "1700000001.123456790", "1514", "100", "0x00000002", "", two],
        [
            &name,
            "1700000001.123456790",
            "70",
            "70",
            "0x00000002",
            "the port did not take 1 of the 1 frames of this turn",
            two,
        ],
    ];
    assert_eq!(lines, want.map(|line| line.map(String::from).to_vec()));
    assert_eq!((a.counters.captured.get(), a.counters.capture_lost.get()), (4, 0));
}

#[test]
fn a_capture_that_is_not_read_loses_frames_and_never_holds_the_worker_up() {
    let mut bench = Bench::new(WorkerSettings::default());
    let net = bench.network(MacSettings::default());
    let [a, b] = bench.ports(net);
    let settings =
        CaptureSettings { queue_bytes: (60 + FRAME_OVERHEAD_BYTES) * 100 + 30, ..CaptureSettings::default() };
    let capture = bench.ask(|h| h.capture(a.token, settings)).unwrap();
    for n in 0..1000 {
        a.send(frame(BROADCAST, mac(1), 60, n));
    }
    bench.settle();
    assert_eq!(b.take().len(), 1000);
    assert_eq!((a.counters.captured.get(), a.counters.capture_lost.get()), (100, 900));
    assert_eq!(capture.lost(), 900);
    let mut file = Vec::new();
    capture.finish(&mut file);
    assert_eq!(tshark(&file, &["frame.len"]).len(), 100);
    // The statistics block is the last: how many there were, how many are missing.
    let numbers = &file[file.len() - 32..];
    assert_eq!(numbers[..4], [4, 0, 8, 0]);
    assert_eq!(numbers[4..12], 1000u64.to_le_bytes());
    assert_eq!(numbers[16..24], 900u64.to_le_bytes());
    // There is no reader any more: the next frame ends the copying.
    let before = a.counters.captured.get();
    for n in 0..3 {
        a.send(frame(BROADCAST, mac(1), 60, n));
        bench.settle();
    }
    assert!(a.counters.captured.get() <= before + 1);
}

#[test]
fn a_capture_of_no_bytes_is_bounded_too() {
    let mut bench = Bench::new(WorkerSettings::default());
    let net = bench.network(MacSettings::default());
    let [a, _b] = bench.ports(net);
    let settings = CaptureSettings { snap_bytes: 0, queue_bytes: FRAME_OVERHEAD_BYTES * 10, ..Default::default() };
    let mut capture = bench.ask(|h| h.capture(a.token, settings)).unwrap();
    for round in 1..=2 {
        for n in 0..100 {
            a.send(frame(BROADCAST, mac(1), 60, n));
            bench.settle();
        }
        assert_eq!((a.counters.captured.get(), capture.lost()), (10 * round, 90 * round));
        // What was read makes room again.
        assert_eq!(capture.read(&mut Vec::new(), Duration::ZERO), CaptureRead::Data);
    }
}

#[test]
fn captures_that_are_not_read_share_a_memory_and_give_it_back() {
    let mut bench = Bench::new(WorkerSettings::default());
    let net = bench.network(MacSettings::default());
    let [a, _b] = bench.ports(net);
    let limit = 1 << 20;
    let memory = Arc::new(CaptureMemory::new(limit));
    let settings = CaptureSettings { memory: Some(memory.clone()), ..Default::default() };
    let start = |bench: &mut Bench| bench.ask(|h| h.capture(a.token, settings.clone())).unwrap();
    let mut stuck: Vec<_> = (0..16).map(|_| start(&mut bench)).collect();
    let flood = |bench: &mut Bench| {
        for n in 0..2000 {
            a.send(frame(BROADCAST, mac(1), 1500, n));
            bench.settle();
        }
    };
    flood(&mut bench);
    assert!(memory.used_bytes() > limit / 2 && memory.used_bytes() <= limit, "{}", memory.used_bytes());
    // One that comes late has its share, and what it loses is counted.
    let mut late = start(&mut bench);
    let lost_before = a.counters.capture_lost.get();
    flood(&mut bench);
    assert!(memory.used_bytes() <= limit, "{}", memory.used_bytes());
    let mut file = Vec::new();
    assert_eq!(late.read(&mut file, Duration::ZERO), CaptureRead::Data);
    assert!(file.len() < 64 << 10, "a piece is small: {}", file.len());
    assert!(a.counters.capture_lost.get() > lost_before + 16 * 1900);
    // A reader that is stuck gives back all that waits for it, and gets nothing until it goes on.
    stuck.iter_mut().for_each(Capture::discard);
    late.finish(&mut file);
    assert_eq!(memory.used_bytes(), 0);
    flood(&mut bench);
    assert_eq!(memory.used_bytes(), 0);
    let lost = stuck[0].lost();
    stuck[0].resume();
    flood(&mut bench);
    assert!(memory.used_bytes() > limit / 4 && stuck[0].lost() < lost + 2000);
    assert_eq!(stuck[0].read(&mut file, Duration::ZERO), CaptureRead::Data);
    drop(stuck);
    flood(&mut bench);
    assert_eq!(memory.used_bytes(), 0);
}

#[test]
fn a_network_is_captured_once_per_frame_and_only_what_the_filter_takes() {
    let mut bench = Bench::new(WorkerSettings::default());
    let (net, other) = (bench.network(MacSettings::default()), bench.network(MacSettings::default()));
    let [a, b] = bench.ports(net);
    let [c, _d] = bench.ports(other);
    let filter = Some(Arc::new(Filter::parse("ether src 02:00:00:00:00:01 and less 100").unwrap()));
    let filtered = CaptureSettings { filter, ..CaptureSettings::default() };
    let mut all = bench.ask(|h| h.capture_network(net, CaptureSettings::default())).unwrap();
    let mut some = bench.ask(|h| h.capture_network(net, filtered)).unwrap();
    a.send(frame(BROADCAST, mac(1), 60, 1));
    b.send(frame(mac(1), mac(2), 61, 2));
    a.send(frame(mac(2), mac(1), 200, 3));
    c.send(frame(BROADCAST, mac(1), 60, 4));
    bench.settle();
    let read = |capture: &mut Capture| {
        let mut file = Vec::new();
        capture.read(&mut file, Duration::ZERO);
        let mut lines = tshark(&file, &["frame.interface_name", "frame.len"]);
        lines.sort();
        lines.iter().map(|line| line.join(" ")).collect::<Vec<_>>()
    };
    assert_eq!(read(&mut all).len(), 3);
    let found = read(&mut some);
    assert!(found.len() == 1 && found[0].ends_with(" 60"), "{found:?}");
    // With the last port of the network it ends, and says what was lost at each.
    bench.ask(|h| h.remove_port(a.token)).unwrap();
    assert_eq!(all.read(&mut Vec::new(), Duration::ZERO), CaptureRead::Quiet);
    bench.ask(|h| h.remove_port(b.token)).unwrap();
    assert_eq!(all.read(&mut Vec::new(), Duration::ZERO), CaptureRead::Ended);
}
