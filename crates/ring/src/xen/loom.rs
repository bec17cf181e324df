//! The wake-up protocol of Xen's rings under every interleaving and reordering that `loom` knows.
//!
//! Run by `RUSTFLAGS="--cfg loom" cargo test -p tombolo-ring --release loom`.
//!
//! **What runs**: the functions of [`notify`], which [`virtio::loom`](crate::virtio) models at
//! length. Here they run over 32-bit words with the additions of [`ring`](super::ring): an event
//! index that is one more than VirtIO's, kept in 16 bits for the decision, and [`Signals`].
//! Requests to a backend and responses to a frontend differ in names only.
//!
//! **What is shown**: a consumer that arms and looks again never sleeps while there is an entry
//! that was published without a notification. This also holds where it wants to be notified later
//! than at the next entry. With one more look, it also holds where the peer's fence does nothing.
//!
//! **What bounds it, and what it does not show**: as for virtqueues. That a notification arrives is
//! the hypervisor's part.

use std::sync::Arc;

use core::sync::atomic::Ordering;
use loom::sync::atomic::{AtomicU32, fence};
use loom::sync::{Mutex, Notify};
use loom::thread;

use super::events::{EventMemory, LINK, LINKED, PENDING, Queues};
use super::ring::suppression_of;
use crate::virtio::notify::{self, Signals, Word};

const PREEMPTIONS: usize = 3;
const ENTRIES: u32 = 3;
/// The index runs over the wrap-around.
const FIRST: u32 = u32::MAX - 1;
const END: u32 = FIRST.wrapping_add(ENTRIES);

impl Word for AtomicU32 {
    type Value = u32;
    fn load(&self, order: Ordering) -> u32 {
        AtomicU32::load(self, order)
    }
    fn store(&self, value: u32, order: Ordering) {
        AtomicU32::store(self, value, order)
    }
}

struct Ring {
    prod: AtomicU32,
    event: AtomicU32,
    entries: [AtomicU32; ENTRIES as usize],
    port: Notify,
    /// Held by a peer without fences while a store of its is not visible yet.
    store_buffer: Mutex<()>,
}

impl Ring {
    fn slot(&self, index: u32) -> &AtomicU32 {
        &self.entries[index.wrapping_sub(FIRST) as usize % ENTRIES as usize]
    }
}

fn model(run: impl Fn(Arc<Ring>) + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(move || {
        run(Arc::new(Ring {
            prod: AtomicU32::new(FIRST),
            // Served long ago.
            event: AtomicU32::new(FIRST.wrapping_sub(7)),
            entries: [AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0)],
            port: Notify::new(),
            store_buffer: Mutex::new(()),
        }))
    });
}

/// Publishes all entries in batches; with `recheck`, looks at the event index once more at the end.
fn produce(ring: &Ring, batches: &[u32], recheck: bool) {
    let (mut index, mut signals) = (FIRST, Signals::new(FIRST as u16));
    for batch in batches {
        for _ in 0..*batch {
            AtomicU32::store(ring.slot(index), 0x100 + index.wrapping_sub(FIRST), Ordering::Relaxed);
            index = index.wrapping_add(1);
        }
        notify::publish(&ring.prod, index);
        if signals.decide(suppression_of(notify::suppression(&ring.event)), index as u16) {
            ring.port.notify();
        }
    }
    if recheck && signals.is_in_doubt() {
        drop(ring.store_buffer.lock().unwrap());
        if signals.recheck(suppression_of(notify::suppression(&ring.event)), index as u16) {
            ring.port.notify();
        }
    }
}

/// Drains, arms for `after` more entries (no more than will come), looks again, sleeps. `event`
/// makes the event index.
fn consume(ring: &Ring, after: u32, event: impl Fn(u32) -> u32) {
    let mut next = FIRST;
    loop {
        let prod = notify::available(&ring.prod);
        while next != prod {
            let entry = AtomicU32::load(ring.slot(next), Ordering::Relaxed);
            assert_eq!(entry, 0x100 + next.wrapping_sub(FIRST), "entry behind an acquired index");
            next = next.wrapping_add(1);
        }
        let left = END.wrapping_sub(next);
        if left == 0 {
            return;
        }
        let after = after.min(left);
        let prod = notify::arm(&ring.event, event(next.wrapping_add(after)), &ring.prod);
        if prod.wrapping_sub(next) < after {
            ring.port.wait();
        }
    }
}

fn batches() -> [&'static [u32]; 4] {
    [&[3], &[1, 2], &[2, 1], &[1, 1, 1]]
}

#[test]
fn loom_xen_misses_no_wake_up() {
    for (batches, after) in batches().into_iter().flat_map(|batches| [(batches, 1), (batches, 2)]) {
        model(move |ring| {
            let producer = {
                let ring = ring.clone();
                thread::spawn(move || produce(&ring, batches, false))
            };
            consume(&ring, after, |event| event);
            producer.join().unwrap();
        });
    }
}

/// The model can fail: with an event index one too high, as a reading of ring.h by VirtIO's rule
/// would have it.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_xen_finds_an_event_index_that_is_one_too_high() {
    model(|ring| {
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || produce(&ring, &[3], false))
        };
        consume(&ring, 3, |event| event.wrapping_add(1));
        producer.join().unwrap();
    });
}

/// A consumer whose fence does nothing: it has looked at the index when its event index becomes
/// visible.
fn consumer_without_fence(recheck: bool) {
    for batches in batches() {
        model(move |ring| {
            let producer = {
                let ring = ring.clone();
                thread::spawn(move || produce(&ring, batches, recheck))
            };
            let mut next = notify::available(&ring.prod);
            while next != END {
                let buffer = ring.store_buffer.lock().unwrap();
                let prod = notify::available(&ring.prod);
                AtomicU32::store(&ring.event, next.wrapping_add(1), Ordering::Relaxed);
                drop(buffer);
                if prod == next {
                    ring.port.wait();
                }
                next = notify::available(&ring.prod);
            }
            producer.join().unwrap();
        });
    }
}

#[test]
fn loom_xen_one_more_look_finds_the_request_of_a_consumer_without_fence() {
    consumer_without_fence(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_xen_finds_the_stall_of_a_consumer_without_fence() {
    consumer_without_fence(false);
}

/// A producer whose fence does nothing: it has read the event index when its index becomes visible.
/// The consumer looks once more, later.
fn producer_without_fence(recheck: bool) {
    model(move |ring| {
        let producer = {
            let ring = ring.clone();
            thread::spawn(move || {
                AtomicU32::store(ring.slot(FIRST), 0x100, Ordering::Relaxed);
                let buffer = ring.store_buffer.lock().unwrap();
                let event = notify::suppression(&ring.event);
                notify::publish(&ring.prod, END);
                drop(buffer);
                if Signals::new(FIRST as u16).decide(suppression_of(event), END as u16) {
                    ring.port.notify();
                }
            })
        };
        let next = notify::available(&ring.prod);
        if next != END && notify::arm(&ring.event, next.wrapping_add(1), &ring.prod) == next {
            drop(ring.store_buffer.lock().unwrap());
            if !recheck || notify::available(&ring.prod) == next {
                ring.port.wait();
            }
        }
        producer.join().unwrap();
    });
}

#[test]
fn loom_xen_one_more_look_finds_what_a_producer_without_fence_announced_to_nobody() {
    producer_without_fence(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_xen_finds_the_stall_by_a_producer_without_fence() {
    producer_without_fence(false);
}

// --- FIFO event channels ---

/// Two channels of one queue, the control block, and the processor's flag with its upcall.
struct Channels {
    ready: AtomicU32,
    head: AtomicU32,
    words: [AtomicU32; 2],
    /// `evtchn_upcall_pending`, and the upcall that its setting raises.
    flag: AtomicU32,
    upcall: Notify,
    /// What each channel's sender wants to be seen.
    news: [AtomicU32; 2],
}

impl EventMemory for Channels {
    fn take_ready(&self) -> u32 {
        self.ready.swap(0, Ordering::AcqRel)
    }

    fn head(&self, _: usize) -> u32 {
        self.head.load(Ordering::Acquire)
    }

    fn clear(&self, channel: u32, keep: u32) -> Option<u32> {
        Some(self.words.get(channel as usize - 1)?.fetch_and(keep, Ordering::AcqRel))
    }
}

impl Channels {
    /// Xen's side, as event_fifo.c has it; the queue's lock is this thread's. The link is set with
    /// a compare-exchange, as the guest may take the tail off the queue meanwhile.
    fn send(&self, channel: u32, tail: &mut u32) {
        let word = &self.words[channel as usize - 1];
        word.fetch_or(PENDING, Ordering::AcqRel);
        if word.fetch_or(LINKED, Ordering::AcqRel) & LINKED != 0 {
            return;
        }
        let last = std::mem::replace(tail, channel);
        let is_appended = last != 0 && last != channel && {
            let word = &self.words[last as usize - 1];
            let link = |had: u32| (had & LINKED != 0).then_some(had & !LINK | channel);
            word.fetch_update(Ordering::AcqRel, Ordering::Acquire, link).is_ok()
        };
        if is_appended {
            return;
        }
        self.head.store(channel, Ordering::Release);
        let was_ready = self.ready.fetch_or(1, Ordering::AcqRel) != 0;
        // Xen's processor has a barrier in each such operation; loom knows it by the name of fence
        // only.
        fence(Ordering::SeqCst);
        if !was_ready && self.flag.swap(1, Ordering::AcqRel) == 0 {
            self.upcall.notify();
        }
    }
}

/// A guest that takes up to `most` channels in a turn sees the last news of each channel. `looks`
/// says whether it looks for what a turn has left before it sleeps.
fn take_events(order: &'static [u32], most: usize, looks: bool) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(move || {
        let channels = Arc::new(Channels {
            ready: AtomicU32::new(0),
            head: AtomicU32::new(0),
            words: [AtomicU32::new(0), AtomicU32::new(0)],
            flag: AtomicU32::new(0),
            upcall: Notify::new(),
            news: [AtomicU32::new(0), AtomicU32::new(0)],
        });
        let xen = {
            let channels = channels.clone();
            thread::spawn(move || {
                let mut tail = 0;
                for (at, channel) in order.iter().enumerate() {
                    channels.news[*channel as usize - 1].store(at as u32 + 1, Ordering::Relaxed);
                    channels.send(*channel, &mut tail);
                }
            })
        };
        let last = [1, 2].map(|channel| order.iter().rposition(|sent| *sent == channel).map_or(0, |at| at as u32 + 1));
        let (mut queues, mut seen) = (Queues::default(), [0; 2]);
        loop {
            // A store, and the exchange of READY behind it, which is a barrier on the guest's
            // processor. loom does not keep stores of two threads in the order that fences give
            // them, only exchanges.
            channels.flag.swap(0, Ordering::AcqRel);
            fence(Ordering::SeqCst);
            queues.take(&*channels, most, |channel| {
                let at = channel as usize - 1;
                seen[at] = channels.news[at].load(Ordering::Relaxed);
            });
            if seen == last {
                break;
            }
            if !looks || !queues.has_left() {
                channels.upcall.wait();
            }
        }
        xen.join().unwrap();
    });
}

#[test]
fn loom_xen_loses_no_event() {
    for order in [&[1, 2][..], &[1, 1], &[1, 2, 1], &[2, 1, 2]] {
        take_events(order, 4, true);
    }
    take_events(&[1, 2], 1, true);
}

/// The model can fail: nothing is announced again that a limited turn has left.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_xen_finds_a_guest_that_sleeps_over_what_is_left() {
    take_events(&[1, 2], 1, false);
}
