//! The wake-up and the hand-over of ring entries of calls, under every interleaving that `loom`
//! knows.
//!
//! Run by `./x loom`.
//!
//! **What runs**: the functions of [`wake`](super::wake) that the rings run, over `loom`'s atomics,
//! with the decisions that `Producer` and `Consumer` take on their results.
//!
//! **What is shown**:
//! - A consumer that follows drain, arm, look again, sleep never sleeps while an entry waits for
//!   which it will not be woken. This also holds where it gives up waiting (a time-out) and sleeps
//!   again.
//! - An entry read behind an acquired index or stamp is the one written for it.
//! - The index is never behind the stamps that were seen.
//! - In a ring smaller than what goes through it, an entry is not written again before it has been
//!   read.
//!
//! The producer's fence may do nothing (a cell with one CPU in QEMU before 8.1). A consumer that
//! looks once more after it went to sleep ([`crate::virtio::notify::RECHECK_NS`]) then misses
//! nothing either. As both sides are this project's code, the consumer's look is enough.
//!
//! **What bounds it**: one producer, one consumer, three entries (four in a ring of two), at most
//! [`PREEMPTIONS`] forced switches of threads. **What it does not show**: that a signal, once sent,
//! arrives; anything about a hostile peer; that `mem` compiles to the orderings that it names.

use std::sync::Arc;

use core::sync::atomic::Ordering;
use loom::sync::atomic::AtomicU32;
use loom::sync::{Mutex, Notify};
use loom::thread;

use super::wake::{self, Told, Waker, Word};

/// Enough for each of the protocol's windows (one switch inside the producer, one inside the
/// consumer), plus one.
const PREEMPTIONS: usize = 3;
/// The index runs over the wrap-around of the word's 31 bits.
const FIRST: u32 = (u32::MAX >> 1) - 1;

impl Word for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }
    fn store(&self, value: u32, order: Ordering) {
        AtomicU32::store(self, value, order)
    }
}

struct Ring {
    index: AtomicU32,
    word: AtomicU32,
    entries: [AtomicU32; 3],
    stamps: [AtomicU32; 3],
    size: u32,
    doorbell: Notify,
    /// Held by a producer without fences while a store of its is not visible yet.
    store_buffer: Mutex<()>,
}

impl Ring {
    fn new(size: u32) -> Ring {
        Ring {
            index: AtomicU32::new(FIRST),
            word: AtomicU32::new(FIRST << 1),
            entries: [AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0)],
            stamps: [AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0)],
            size,
            doorbell: Notify::new(),
            store_buffer: Mutex::new(()),
        }
    }

    fn place(&self, index: u32) -> usize {
        (index.wrapping_sub(FIRST) % self.size) as usize
    }

    fn entry(&self, index: u32) -> &AtomicU32 {
        &self.entries[self.place(index)]
    }

    fn stamp(&self, index: u32) -> &AtomicU32 {
        &self.stamps[self.place(index)]
    }
}

fn produce(ring: &Ring, batches: &[u32]) {
    let mut index = FIRST;
    let mut waker = Waker::default();
    for batch in batches {
        for _ in 0..*batch {
            while wake::under_way(&ring.word, index) >= ring.size {
                thread::yield_now();
            }
            // Relaxed, as the rings write entries: R0 orders it.
            AtomicU32::store(ring.entry(index), 0x100 + index.wrapping_sub(FIRST), Ordering::Relaxed);
            index = index.wrapping_add(1);
        }
        wake::publish(&ring.index, index);
        for n in 0..*batch {
            let at = index.wrapping_sub(batch - n);
            wake::stamp(ring.stamp(at), at);
        }
        if waker.wanted(&ring.word, index) {
            ring.doorbell.notify();
        }
    }
}

/// A word as it was read.
struct Read(u32);

impl Word for Read {
    fn load(&self, _: Ordering) -> u32 {
        self.0
    }
    fn store(&self, _: u32, _: Ordering) {
        unreachable!("a producer writes no word of its consumer");
    }
}

/// A producer whose fence does nothing: it has read the word when its index becomes visible.
fn produce_without_fence(ring: &Ring, batches: &[u32]) {
    let mut index = FIRST;
    let mut waker = Waker::default();
    for batch in batches {
        for _ in 0..*batch {
            AtomicU32::store(ring.entry(index), 0x100 + index.wrapping_sub(FIRST), Ordering::Relaxed);
            index = index.wrapping_add(1);
        }
        let buffer = ring.store_buffer.lock().unwrap();
        let word = Read(AtomicU32::load(&ring.word, Ordering::Relaxed));
        wake::publish(&ring.index, index);
        for n in 0..*batch {
            let at = index.wrapping_sub(batch - n);
            wake::stamp(ring.stamp(at), at);
        }
        drop(buffer);
        if waker.wanted(&word, index) {
            ring.doorbell.notify();
        }
    }
}

/// When a consumer says what it took.
#[derive(Clone, Copy)]
enum Says {
    /// After each entry.
    AtOnce,
    /// When it is due, in a ring of so many entries by its own count.
    Late(u32),
}

/// Drain, arm, look again, sleep. `give_ups` times it does not sleep but leaves as after a
/// time-out, and comes back.
fn consume(ring: &Ring, count: u32, give_ups: u32, says: Says) {
    consume_and_recheck(ring, count, give_ups, says, false);
}

/// As [`consume`], with one more look before it sleeps for ever if `recheck`.
fn consume_and_recheck(ring: &Ring, count: u32, mut give_ups: u32, says: Says, recheck: bool) {
    let (mut next, mut seen) = (FIRST, FIRST);
    let mut told = Told::default();
    told.took(&ring.word, next);
    let end = FIRST.wrapping_add(count);
    loop {
        while next != end && (seen != next || wake::is_stamped(ring.stamp(next), next)) {
            if seen == next {
                seen = next.wrapping_add(1);
            }
            let entry = AtomicU32::load(ring.entry(next), Ordering::Relaxed);
            assert_eq!(entry, 0x100 + next.wrapping_sub(FIRST), "entry behind an acquired index or stamp");
            next = next.wrapping_add(1);
            match says {
                Says::AtOnce => told.took(&ring.word, next),
                Says::Late(entries) => told.took_some(&ring.word, next, entries),
            }
        }
        if next == end {
            return;
        }
        seen = told.arm(&ring.word, next, &ring.index);
        assert!(seen.wrapping_sub(next) <= ring.size, "an index behind what its stamps say");
        if seen != next {
            continue;
        }
        if give_ups > 0 {
            give_ups -= 1;
            told.took(&ring.word, next);
            continue;
        }
        if recheck {
            // Waits for so long that what the producer had stored before is visible.
            drop(ring.store_buffer.lock().unwrap());
            seen = wake::available(&ring.index);
            if seen != next {
                continue;
            }
        }
        ring.doorbell.wait();
    }
}

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(run);
}

fn run(batches: &'static [u32], size: u32, give_ups: u32, says: Says) {
    model(move || {
        let ring = Arc::new(Ring::new(size));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || produce(&ring, batches))
        };
        consume(&ring, batches.iter().sum(), give_ups, says);
        producer.join().unwrap();
    });
}

#[test]
fn loom_rpc_wake_word_misses_no_wake_up() {
    for batches in [&[3][..], &[1, 2], &[2, 1], &[1, 1, 1]] {
        run(batches, 3, 0, Says::AtOnce);
    }
}

#[test]
fn loom_rpc_a_consumer_that_gave_up_is_woken_again() {
    for batches in [&[2][..], &[1, 1]] {
        run(batches, 3, 1, Says::AtOnce);
    }
}

#[test]
fn loom_rpc_entries_are_not_written_before_they_are_read() {
    for batches in [&[1, 1, 1][..], &[2, 1]] {
        run(batches, 2, 0, Says::AtOnce);
    }
}

/// A consumer that stays awake says late what it took: it is woken all the same, and a producer
/// that waits for room gets it when the consumer sleeps.
#[test]
fn loom_rpc_a_consumer_may_say_late_what_it_took() {
    for (batches, size) in [(&[1, 1, 1][..], 3), (&[2, 1], 3), (&[1, 2], 2), (&[1, 1, 1], 2)] {
        // A lag of one entry.
        run(batches, size, 0, Says::Late(4));
    }
    run(&[1, 1], 3, 1, Says::Late(4));
}

fn run_without_fence(batches: &'static [u32], recheck: bool) {
    model(move || {
        let ring = Arc::new(Ring::new(3));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || produce_without_fence(&ring, batches))
        };
        consume_and_recheck(&ring, batches.iter().sum(), 0, Says::AtOnce, recheck);
        producer.join().unwrap();
    });
}

#[test]
fn loom_rpc_one_more_look_finds_what_a_producer_without_fence_announced_to_nobody() {
    for batches in [&[3][..], &[1, 2], &[2, 1], &[1, 1, 1]] {
        run_without_fence(batches, true);
    }
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_rpc_finds_the_stall_by_a_producer_without_fence() {
    run_without_fence(&[3], false);
}

/// The model can fail: without the second look the window is open, and `loom` finds it.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_rpc_finds_the_missed_wake_up_without_the_second_look() {
    model(|| {
        let ring = Arc::new(Ring::new(3));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || produce(&ring, &[1]))
        };
        if wake::available(&ring.index) == FIRST {
            AtomicU32::store(&ring.word, FIRST << 1 | 1, Ordering::Release);
            ring.doorbell.wait();
        }
        producer.join().unwrap();
    });
}

/// A stamp that is written before its entry is found out.
#[test]
#[should_panic(expected = "entry behind an acquired index or stamp")]
fn loom_rpc_finds_a_stamp_before_its_entry() {
    model(|| {
        let ring = Arc::new(Ring::new(3));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || {
                wake::stamp(ring.stamp(FIRST), FIRST);
                AtomicU32::store(ring.entry(FIRST), 0x100, Ordering::Relaxed);
                wake::publish(&ring.index, FIRST.wrapping_add(1));
                if Waker::default().wanted(&ring.word, FIRST.wrapping_add(1)) {
                    ring.doorbell.notify();
                }
            })
        };
        consume(&ring, 1, 0, Says::AtOnce);
        producer.join().unwrap();
    });
}

/// Nor may it be written before the index: a consumer that has taken the entry would find an index
/// that does not count it.
#[test]
#[should_panic(expected = "an index behind what its stamps say")]
fn loom_rpc_finds_a_stamp_before_the_index() {
    model(|| {
        let ring = Arc::new(Ring::new(3));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || {
                for index in [FIRST, FIRST.wrapping_add(1)] {
                    AtomicU32::store(ring.entry(index), 0x100 + index.wrapping_sub(FIRST), Ordering::Relaxed);
                    wake::stamp(ring.stamp(index), index);
                    wake::publish(&ring.index, index.wrapping_add(1));
                    if Waker::default().wanted(&ring.word, index.wrapping_add(1)) {
                        ring.doorbell.notify();
                    }
                }
            })
        };
        consume(&ring, 2, 0, Says::AtOnce);
        producer.join().unwrap();
    });
}

/// Nor is the fence for show: with the producer's look at the word not fenced, `loom` finds the
/// window too.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_rpc_finds_the_missed_wake_up_without_the_fence() {
    model(|| {
        let ring = Arc::new(Ring::new(3));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || {
                wake::publish(&ring.index, FIRST.wrapping_add(1));
                if AtomicU32::load(&ring.word, Ordering::Relaxed) & 1 == 1 {
                    ring.doorbell.notify();
                }
            })
        };
        if wake::arm(&ring.word, FIRST, &ring.index) == FIRST {
            ring.doorbell.wait();
        }
        producer.join().unwrap();
    });
}

/// A waker that remembers nothing but "I woke it" would lose the second sleep: the sequence in the
/// word is needed.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_rpc_finds_the_lost_second_sleep_without_the_sequence() {
    model(|| {
        let ring = Arc::new(Ring::new(3));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || {
                let mut woken = false;
                for index in [FIRST, FIRST.wrapping_add(1)] {
                    AtomicU32::store(ring.entry(index), 0x100 + index.wrapping_sub(FIRST), Ordering::Relaxed);
                    wake::publish(&ring.index, index.wrapping_add(1));
                    if Waker::default().wanted(&ring.word, index.wrapping_add(1)) && !woken {
                        woken = true;
                        ring.doorbell.notify();
                    }
                }
            })
        };
        consume(&ring, 2, 0, Says::AtOnce);
        producer.join().unwrap();
    });
}

/// Nor may a waker remember a wake-up for which the consumer had no reason: between publishing and
/// looking at the word, the consumer may have taken all that there is and sleep at the very index.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_rpc_finds_the_lost_sleep_after_a_needless_wake_up() {
    model(|| {
        let ring = Arc::new(Ring::new(3));
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || {
                let mut waker = Waker::default();
                for index in [FIRST, FIRST.wrapping_add(1)] {
                    AtomicU32::store(ring.entry(index), 0x100 + index.wrapping_sub(FIRST), Ordering::Relaxed);
                    wake::publish(&ring.index, index.wrapping_add(1));
                    // As if there were always more to take than the consumer has.
                    if waker.wanted(&ring.word, FIRST.wrapping_sub(9)) {
                        ring.doorbell.notify();
                    }
                }
            })
        };
        consume(&ring, 2, 0, Says::AtOnce);
        producer.join().unwrap();
    });
}
