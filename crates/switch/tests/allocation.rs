//! A worker that forwards frames takes no memory once it is warm: measured by an allocator that
//! counts.
//!
//! A global allocator cannot be written without `unsafe`, so this file is on the list of
//! ARCHITECTURE.md.
#![allow(missing_docs, unsafe_code)]

#[path = "support/memory.rs"]
mod memory;

use memory::{Memory, Refill};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use tombolo_ring::checksum;
use tombolo_switch::Nanos;
use tombolo_switch::control::{PortSettings, WorkerSettings};
use tombolo_switch::frame::{Checksum, Offload, SegmentKind, Segmentation};
use tombolo_switch::mac::MacSettings;
use tombolo_switch::port::Caps;
use tombolo_switch::wait::{CONTROL, Token, Waiter};
use tombolo_switch::worker::Worker;

thread_local! {
    static TAKEN: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is passed on to the system's allocator as it came; counting takes no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.with(|taken| taken.set(taken.get() + 1));
        // SAFETY: the caller keeps GlobalAlloc's rules, which are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`; the pointer came from there.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

struct AllAwake(u32, Nanos);

impl Waiter for AllAwake {
    fn wait(&mut self, timeout: Option<Nanos>, ready: &mut Vec<Token>) {
        // The ports keep each other busy, so commands may not wait for a sleep.
        ready.push(CONTROL);
        if timeout.is_none() {
            ready.extend((0..self.0).map(Token));
        }
    }
    fn now(&mut self) -> Nanos {
        // Fast enough that addresses age and are learned again meanwhile.
        self.1 = self.1.after(Nanos::MILLI.times(5));
        self.1
    }
}

/// The segment number `k` of a stream, of 100 bytes.
fn segment(to: [u8; 6], from: [u8; 6], k: u8) -> Vec<u8> {
    let mut bytes = [&to[..], &from, &[8, 0, 0x45, 0, 0, 140, 0, k, 0x40, 0, 64, 6, 0, 0]].concat();
    bytes.extend([10, 0, 0, 1, 10, 0, 0, 2, 0, 7, 0, 9, 0, 0, 1, 100 * k, 0, 0, 0, 2, 0x50, 0x10, 1, 0, 0, 0, 0, 0]);
    bytes.resize(154, k);
    let sum = !checksum::sum(&bytes[14..34]);
    bytes[24..26].copy_from_slice(&sum.to_be_bytes());
    let pseudo = checksum::add(checksum::add(checksum::sum(&bytes[26..34]), 6), 120);
    let sum = !checksum::add(pseudo, checksum::sum(&bytes[34..]));
    bytes[50..52].copy_from_slice(&sum.to_be_bytes());
    bytes
}

#[test]
fn a_warm_worker_takes_no_memory() {
    const PORTS: u32 = 16;
    // Each turn brings frames to many places, and one to be cut, or some to be merged, for another
    // port.
    let (mut worker, handle) = Worker::new(WorkerSettings { budget: 16, busy_poll: Nanos(0) }, 7, || {});
    let address = |n: u32| [2, 0, 0, 0, (n >> 8) as u8, n as u8];
    let asking = std::thread::spawn(move || {
        let macs = MacSettings { age: Nanos::SECOND.times(2), ..MacSettings::default() };
        let network = handle.add_network("net", macs).unwrap();
        let mut counters = Vec::new();
        for n in 0..PORTS {
            let mut frames: Vec<_> = (0..40)
                .map(|k| {
                    let to = if k == 0 { [0xff; 6] } else { address(k % PORTS) };
                    let mut bytes = [&to[..], &address(n + PORTS * (k % 3)), &[8, 0]].concat();
                    bytes.resize(60 + k as usize * 30, 0);
                    (bytes, Offload::NONE)
                })
                .collect();
            let mut large =
                [&address((n + 1) % PORTS)[..], &address(n), &[8, 0, 0x45, 0, 0, 0, 0, 1, 0, 0, 64, 6]].concat();
            large.resize(54 + 20_000, 0);
            large[46] = 0x50;
            let cut = Segmentation { kind: SegmentKind::Tcp4, ecn: false, size: 1448, header_bytes: 54 };
            let checksum = Checksum::Partial { start: 34, offset: 16 };
            if n % 4 < 2 {
                frames.push((large, Offload { checksum, segmentation: Some(cut) }));
            } else {
                // Segments that become one frame where that is taken.
                frames.extend((0..3).map(|k| (segment(address((n + 1) % PORTS), address(n), k), Offload::NONE)));
            }
            let caps = if n % 2 == 0 { Caps::plain(1500) } else { Caps::full(1500) };
            let port = Memory::new(frames, Refill::Service, caps).merging();
            let reserved = handle.reserve().unwrap();
            counters.push(handle.add_port(reserved, network, "p", Box::new(port), PortSettings::default()).unwrap());
        }
        (handle, counters)
    });
    let mut waiter = AllAwake(PORTS, Nanos(0));
    while !asking.is_finished() {
        worker.step(&mut waiter);
    }
    let (_handle, counters) = asking.join().unwrap();
    for _ in 0..2000 {
        worker.step(&mut waiter);
    }
    let sent = || counters.iter().map(|c| c.tx_frames.get()).sum::<u64>();
    let cut = || counters.iter().map(|c| c.software_segmented.get()).sum::<u64>();
    let merged = || counters.iter().map(|c| c.software_merged.get()).sum::<u64>();
    let (taken, frames, large, parts) = (TAKEN.get(), sent(), cut(), merged());
    for _ in 0..2000 {
        worker.step(&mut waiter);
    }
    assert!(sent() - frames > 90_000 && cut() - large > 1000, "{} {}", sent() - frames, cut() - large);
    assert!(merged() - parts > 1000, "{}", merged() - parts);
    assert_eq!(TAKEN.get() - taken, 0, "allocations in 2000 rounds");
}
