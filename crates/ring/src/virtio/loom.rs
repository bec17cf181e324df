//! The notification protocol under every interleaving and reordering that `loom` knows.
//!
//! Run by `RUSTFLAGS="--cfg loom" cargo test -p tombolo-ring --release loom`.
//!
//! **What runs**: the functions of [`notify`](super::notify) that the rings run, over `loom`'s
//! atomics, with the decisions that `DeviceQueue` and `DriverQueue` take on their results
//! (`passes`, "look again before sleep").
//!
//! **What is shown**: a consumer that follows drain, arm, re-check, sleep never sleeps while there
//! is an entry that the producer published without signalling. An entry read behind an acquired
//! index is the one written before it. Both hold for the flag and for the event index, with
//! wrap-around of the index in between. Where the peer's fence does nothing, both hold with one
//! more look ([`notify::RECHECK_NS`]).
//!
//! **A peer whose fence does nothing** runs its load before its store, as a CPU's store buffer
//! makes it seem. A lock models that a store leaves the buffer within bounded time: the peer holds
//! it from its load to its store, and this side takes it before its second look. So the look comes
//! after each store whose load came before the decision that it repeats. The delay has to ensure
//! nothing else.
//!
//! **What bounds it**: one producer, one consumer, three entries, at most [`PREEMPTIONS`] forced
//! switches of threads. **What it does not show**: that a signal, once sent, arrives (that is the
//! eventfd's or the hypervisor's part); anything about a peer that does not follow the protocol
//! (such a peer can only fail to be woken); that `mem` compiles to the orderings that it names.
//! `loom` models sequentially consistent *fences* correctly, and nothing else is used here. It
//! knows no torn reads, which word-sized atomics rule out.

use std::sync::Arc;
use std::vec::Vec;

use core::sync::atomic::Ordering;
use loom::sync::atomic::AtomicU16;
use loom::sync::{Mutex, Notify};
use loom::thread;

use super::notify::{self, Signals, Suppression, Word};

/// Enough for each of the protocol's windows (one switch inside the producer, one inside the
/// consumer), plus one.
const PREEMPTIONS: usize = 3;
const ENTRIES: u16 = 3;
/// The index runs over the wrap-around.
const FIRST: u16 = u16::MAX - 1;

impl Word for AtomicU16 {
    type Value = u16;
    fn load(&self, order: Ordering) -> u16 {
        AtomicU16::load(self, order)
    }
    fn store(&self, value: u16, order: Ordering) {
        AtomicU16::store(self, value, order)
    }
}

struct Ring {
    index: AtomicU16,
    suppression: AtomicU16,
    entries: [AtomicU16; ENTRIES as usize],
    doorbell: Notify,
    /// Held by a peer without fences while a store of its is not visible yet.
    store_buffer: Mutex<()>,
}

impl Ring {
    fn new(suppression: u16) -> Ring {
        Ring {
            index: AtomicU16::new(FIRST),
            suppression: AtomicU16::new(suppression),
            entries: [AtomicU16::new(0), AtomicU16::new(0), AtomicU16::new(0)],
            doorbell: Notify::new(),
            store_buffer: Mutex::new(()),
        }
    }

    /// Waits for so long that what the peer had stored before is visible.
    fn let_stores_become_visible(&self) {
        drop(self.store_buffer.lock().unwrap());
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
        if wants(notify::suppression(&ring.suppression), old, index) {
            ring.doorbell.notify();
        }
    }
}

/// Drain, arm, re-check, sleep, until all entries came. A missed wake-up shows as a deadlock, which
/// `loom` reports.
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
        if notify::arm(&ring.suppression, arm_with(next), &ring.index) != next {
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
            consume(&ring, |_| 0, |ring| AtomicU16::store(&ring.suppression, 1, Ordering::Relaxed));
            producer.join().unwrap();
        });
    }
}

#[test]
fn loom_event_index_misses_no_wake_up() {
    for batches in batches() {
        model(move || {
            // Behind the first index: a request that was served long ago.
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
            AtomicU16::store(&ring.suppression, 0, Ordering::Relaxed);
            ring.doorbell.wait();
        }
        producer.join().unwrap();
    });
}

/// Nor is a fence for show: with the producer's look at the request not fenced, `loom` finds the
/// window too.
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
                if AtomicU16::load(&ring.suppression, Ordering::Relaxed) & 1 == 0 {
                    ring.doorbell.notify();
                }
            })
        };
        if notify::arm(&ring.suppression, 0, &ring.index) == FIRST {
            ring.doorbell.wait();
        }
        producer.join().unwrap();
    });
}

/// A producer whose fence does nothing: it has read the request when its index becomes visible.
fn produce_without_fence(ring: &Ring, batches: &[u16], wants: impl Fn(u16, u16, u16) -> bool) {
    let mut index = FIRST;
    for batch in batches {
        let old = index;
        for _ in 0..*batch {
            AtomicU16::store(ring.slot(index), 0x100 + index.wrapping_sub(FIRST), Ordering::Relaxed);
            index = index.wrapping_add(1);
        }
        let buffer = ring.store_buffer.lock().unwrap();
        let suppression = AtomicU16::load(&ring.suppression, Ordering::Relaxed);
        notify::publish(&ring.index, index);
        drop(buffer);
        if wants(suppression, old, index) {
            ring.doorbell.notify();
        }
    }
}

/// As [`consume`], with one more look before it sleeps for ever; without `recheck`, as [`consume`]
/// is.
fn consume_with_recheck(ring: &Ring, recheck: bool, arm_with: impl Fn(u16) -> u16, disarm: impl Fn(&Ring)) {
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
        if notify::arm(&ring.suppression, arm_with(next), &ring.index) == next {
            ring.let_stores_become_visible();
            if !recheck || notify::available(&ring.index) == next {
                ring.doorbell.wait();
            }
        }
        disarm(ring);
    }
}

fn producer_without_fence(batches: &'static [u16], recheck: bool, flag: bool) {
    model(move || {
        let ring = Arc::new(Ring::new(if flag { 1 } else { FIRST.wrapping_sub(7) }));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || match flag {
                true => produce_without_fence(&ring, batches, |flag, _, _| flag & 1 == 0),
                false => produce_without_fence(&ring, batches, notify::passes),
            })
        };
        match flag {
            true => {
                let disarm = |ring: &Ring| AtomicU16::store(&ring.suppression, 1, Ordering::Relaxed);
                consume_with_recheck(&ring, recheck, |_| 0, disarm);
            }
            false => consume_with_recheck(&ring, recheck, |next| next, |_| ()),
        }
        producer.join().unwrap();
    });
}

#[test]
fn loom_one_more_look_finds_what_a_producer_without_fence_announced_to_nobody() {
    for batches in batches() {
        producer_without_fence(batches, true, true);
        producer_without_fence(batches, true, false);
    }
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_the_stall_by_a_producer_without_fence_by_flag() {
    producer_without_fence(&[3], false, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_the_stall_by_a_producer_without_fence_by_event_index() {
    producer_without_fence(&[3], false, false);
}

/// A consumer whose fence does nothing: it has looked at the index when its request becomes
/// visible. The producer decides as the rings do, and with `recheck` once more when it has nothing
/// left to publish.
fn consumer_without_fence(batches: &'static [u16], recheck: bool, flag: bool) {
    model(move || {
        let suppression =
            move |word: u16| if flag { Suppression::Always(word & 1 == 0) } else { Suppression::After(word) };
        let ring = Arc::new(Ring::new(if flag { 1 } else { FIRST.wrapping_sub(7) }));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || {
                let (mut index, mut signals) = (FIRST, Signals::new(FIRST));
                for batch in batches {
                    index = index.wrapping_add(*batch);
                    notify::publish(&ring.index, index);
                    if signals.decide(suppression(notify::suppression(&ring.suppression)), index) {
                        ring.doorbell.notify();
                    }
                }
                if recheck && signals.is_in_doubt() {
                    ring.let_stores_become_visible();
                    if signals.recheck(suppression(notify::suppression(&ring.suppression)), index) {
                        ring.doorbell.notify();
                    }
                }
            })
        };
        let mut next = notify::available(&ring.index);
        while next != FIRST.wrapping_add(ENTRIES) {
            let buffer = ring.store_buffer.lock().unwrap();
            let index = notify::available(&ring.index);
            AtomicU16::store(&ring.suppression, if flag { 0 } else { next }, Ordering::Relaxed);
            drop(buffer);
            if index == next {
                ring.doorbell.wait();
            }
            next = notify::available(&ring.index);
            if flag {
                AtomicU16::store(&ring.suppression, 1, Ordering::Relaxed);
            }
        }
        producer.join().unwrap();
    });
}

#[test]
fn loom_one_more_look_finds_the_request_of_a_consumer_without_fence() {
    for batches in batches() {
        consumer_without_fence(batches, true, true);
        consumer_without_fence(batches, true, false);
    }
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_the_stall_of_a_consumer_without_fence_by_flag() {
    consumer_without_fence(&[3], false, true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_the_stall_of_a_consumer_without_fence_by_event_index() {
    consumer_without_fence(&[3], false, false);
}
