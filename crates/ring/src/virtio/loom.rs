//! The notification protocol under every interleaving and reordering that `loom` knows.
//!
//! Run by `RUSTFLAGS="--cfg loom" cargo test -p tombolo-ring --release loom`.
//!
//! **What runs**: the functions of [`notify`](super::notify) that the rings run, over `loom`'s atomics, with the
//! decisions that `DeviceQueue` and `DriverQueue` take on their results (`passes`, "look again before sleep").
//!
//! **What is shown**: a consumer that follows drain, arm, re-check, sleep never sleeps while an entry stands that the
//! producer published without signalling; and an entry read behind an acquired index is the one written before it.
//! Both for the flag and for the event index, with wrap-around of the index in between.
//!
//! **What bounds it**: one producer, one consumer, three entries, at most [`PREEMPTIONS`] forced switches of
//! threads. **What it does not show**: that a signal, once sent, arrives (that is the eventfd's or the
//! hypervisor's); anything about a peer that does not follow the protocol (such a peer can only fail to be woken);
//! that `mem` compiles to the orderings that it names. `loom` takes sequentially consistent *fences* for what they
//! are, which is all that is used here; it knows no torn reads, which word-sized atomics rule out.

use std::sync::Arc;
use std::vec::Vec;

use core::sync::atomic::Ordering;
use loom::sync::Notify;
use loom::sync::atomic::AtomicU16;
use loom::thread;

use super::notify::{self, Word};

/// Enough for each of the protocol's windows (one switch inside the producer, one inside the consumer), plus one.
const PREEMPTIONS: usize = 3;
const ENTRIES: u16 = 3;
/// The index runs over the wrap-around.
const FIRST: u16 = u16::MAX - 1;

impl Word for AtomicU16 {
    fn load(&self, order: Ordering) -> u16 {
        AtomicU16::load(self, order)
    }
    fn store(&self, value: u16, order: Ordering) {
        AtomicU16::store(self, value, order)
    }
}

struct Ring {
    index: AtomicU16,
    wish: AtomicU16,
    entries: [AtomicU16; ENTRIES as usize],
    doorbell: Notify,
}

impl Ring {
    fn new(wish: u16) -> Ring {
        Ring {
            index: AtomicU16::new(FIRST),
            wish: AtomicU16::new(wish),
            entries: [AtomicU16::new(0), AtomicU16::new(0), AtomicU16::new(0)],
            doorbell: Notify::new(),
        }
    }

    fn slot(&self, index: u16) -> &AtomicU16 {
        &self.entries[usize::from(index.wrapping_sub(FIRST) % ENTRIES)]
    }
}

fn produce(ring: &Ring, batches: &[u16], wants: impl Fn(u16, u16, u16) -> bool) {
    let mut index = FIRST;
    for batch in batches {
        let old = index;
        for _ in 0..*batch {
            // Relaxed, as the rings write entries: R0 orders it.
            AtomicU16::store(ring.slot(index), 0x100 + index.wrapping_sub(FIRST), Ordering::Relaxed);
            index = index.wrapping_add(1);
        }
        notify::publish(&ring.index, index);
        if wants(notify::wish(&ring.wish), old, index) {
            ring.doorbell.notify();
        }
    }
}

/// Drain, arm, re-check, sleep, until all entries came. A missed wake-up shows as a deadlock, which `loom` reports.
fn consume(ring: &Ring, arm_with: impl Fn(u16) -> u16, disarm: impl Fn(&Ring)) {
    let mut next = FIRST;
    let end = FIRST.wrapping_add(ENTRIES);
    loop {
        let index = notify::available(&ring.index);
        while next != index {
            let entry = AtomicU16::load(ring.slot(next), Ordering::Relaxed);
            assert_eq!(entry, 0x100 + next.wrapping_sub(FIRST), "entry behind an acquired index");
            next = next.wrapping_add(1);
        }
        if next == end {
            return;
        }
        if notify::arm(&ring.wish, arm_with(next), &ring.index) != next {
            disarm(ring);
            continue;
        }
        ring.doorbell.wait();
        disarm(ring);
    }
}

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(run);
}

fn batches() -> Vec<&'static [u16]> {
    std::vec![&[3], &[1, 2], &[2, 1], &[1, 1, 1]]
}

#[test]
fn loom_flag_misses_no_wake_up() {
    for batches in batches() {
        model(move || {
            let ring = Arc::new(Ring::new(1));
            let producer = {
                let ring = ring.clone();
                thread::spawn(move || produce(&ring, batches, |flag, _, _| flag & 1 == 0))
            };
            consume(&ring, |_| 0, |ring| AtomicU16::store(&ring.wish, 1, Ordering::Relaxed));
            producer.join().unwrap();
        });
    }
}

#[test]
fn loom_event_index_misses_no_wake_up() {
    for batches in batches() {
        model(move || {
            // Behind the first index: a wish that was served long ago.
            let ring = Arc::new(Ring::new(FIRST.wrapping_sub(7)));
            let producer = {
                let ring = ring.clone();
                thread::spawn(move || produce(&ring, batches, notify::passes))
            };
            consume(&ring, |next| next, |_| ());
            producer.join().unwrap();
        });
    }
}

/// The model can fail: without the second look the window of `notify` is open, and `loom` finds it.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_the_missed_wake_up_without_the_second_look() {
    model(|| {
        let ring = Arc::new(Ring::new(1));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || produce(&ring, &[1], |flag, _, _| flag & 1 == 0))
        };
        if notify::available(&ring.index) == FIRST {
            AtomicU16::store(&ring.wish, 0, Ordering::Relaxed);
            ring.doorbell.wait();
        }
        producer.join().unwrap();
    });
}

/// Nor is a fence for show: with the producer's look at the wish not fenced, `loom` finds the window too.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_the_missed_wake_up_without_the_fence() {
    model(|| {
        let ring = Arc::new(Ring::new(1));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || {
                AtomicU16::store(ring.slot(FIRST), 0x100, Ordering::Relaxed);
                notify::publish(&ring.index, FIRST.wrapping_add(1));
                if AtomicU16::load(&ring.wish, Ordering::Relaxed) & 1 == 0 {
                    ring.doorbell.notify();
                }
            })
        };
        if notify::arm(&ring.wish, 0, &ring.index) == FIRST {
            ring.doorbell.wait();
        }
        producer.join().unwrap();
    });
}
