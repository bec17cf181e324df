//! The doorbells of a network link under every interleaving and reordering that `loom` knows.
//!
//! Run by `RUSTFLAGS="--cfg loom" cargo test -p tombolo-ring --release loom`.
//!
//! Towards the receiver of frames the protocol is that of the virtqueue, and
//! `crates/ring/src/virtio/loom.rs` is its model. Here is what differs: the sender's request for
//! returned buffers, which a sender such as Linux's writes without looking again.
//!
//! **What runs**: the functions of [`notify`](crate::virtio::notify) and the decision of
//! `Receiver::release` ([`Signals::decide_late`]), over `loom`'s atomics.
//!
//! **What is shown**: a sender that keeps one frame more out than its request names and sleeps is
//! woken, although it does not look again; with the decision of the virtqueue it is not always. The
//! same holds, with one more look of the receiver ([`notify::RECHECK_NS`]), where the sender's
//! fences do nothing.
//!
//! **A sender whose fences do nothing** has its stores held back behind its loads and behind each
//! other, as a CPU with a weakly ordered memory may have it. That a store becomes visible within
//! bounded time is a lock, as in the model of the virtqueue.
//!
//! **What bounds it and what it does not show**: as in the model of the virtqueue.

use std::sync::Arc;

use core::sync::atomic::Ordering;
use loom::sync::atomic::AtomicU16;
use loom::sync::{Mutex, Notify};
use loom::thread;

use crate::virtio::notify::{self, Signals, Suppression};

const PREEMPTIONS: usize = 3;
/// Frames that are out when the sender asks to be woken; the index runs over the wrap-around.
const FRAMES: u16 = 2;
const FIRST: u16 = u16::MAX;

struct Ring {
    used: AtomicU16,
    suppression: AtomicU16,
    /// Frames published by the sender.
    avail: AtomicU16,
    doorbell: Notify,
    /// Held by a sender without fences while a store of its is not visible yet.
    store_buffer: Mutex<()>,
}

impl Ring {
    fn new() -> Arc<Ring> {
        Arc::new(Ring {
            used: AtomicU16::new(FIRST),
            // Served long ago.
            suppression: AtomicU16::new(FIRST.wrapping_sub(7)),
            avail: AtomicU16::new(FIRST.wrapping_add(FRAMES)),
            doorbell: Notify::new(),
            store_buffer: Mutex::new(()),
        })
    }
}

/// Linux: looks, finds no room, writes its request, publishes one frame more, sleeps without
/// another look.
fn careless_sender(ring: &Ring) {
    let last = notify::available(&ring.used);
    AtomicU16::store(&ring.suppression, last, Ordering::Relaxed);
    notify::publish(&ring.avail, FIRST.wrapping_add(FRAMES + 1));
    ring.doorbell.wait();
}

/// The same without fences: its request becomes visible last, behind the frame that it publishes
/// after it.
fn careless_sender_without_fences(ring: &Ring) {
    let buffer = ring.store_buffer.lock().unwrap();
    let last = notify::available(&ring.used);
    notify::publish(&ring.avail, FIRST.wrapping_add(FRAMES + 1));
    AtomicU16::store(&ring.suppression, last, Ordering::Relaxed);
    drop(buffer);
    ring.doorbell.wait();
}

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(run);
}

/// What the receiver does, and what the sender is like.
#[derive(Clone, Copy)]
struct Ends {
    by_last_ring: bool,
    recheck: bool,
    fences: bool,
}

fn careless(Ends { by_last_ring, recheck, fences }: Ends) {
    model(move || {
        let ring = Ring::new();
        let receiver = {
            let ring = ring.clone();
            thread::spawn(move || {
                let (mut signals, mut next) = (Signals::new(FIRST), FIRST);
                while next != FIRST.wrapping_add(FRAMES + 1) {
                    if notify::available(&ring.avail) == next {
                        thread::yield_now();
                        continue;
                    }
                    next = next.wrapping_add(1);
                    notify::publish(&ring.used, next);
                    let suppression = Suppression::After(notify::suppression(&ring.suppression));
                    let decide = if by_last_ring { Signals::decide_late } else { Signals::decide };
                    if decide(&mut signals, suppression, next) {
                        ring.doorbell.notify();
                    }
                }
                if recheck && signals.is_in_doubt() {
                    // Waits for so long that what the sender had stored before is visible.
                    drop(ring.store_buffer.lock().unwrap());
                    if signals.recheck(Suppression::After(notify::suppression(&ring.suppression)), next) {
                        ring.doorbell.notify();
                    }
                }
            })
        };
        if fences {
            careless_sender(&ring);
        } else {
            careless_sender_without_fences(&ring);
        }
        receiver.join().unwrap();
    });
}

#[test]
fn loom_a_sender_that_does_not_look_again_is_woken() {
    careless(Ends { by_last_ring: true, recheck: false, fences: true });
}

/// The model can fail: by the index of the last question, as a virtqueue decides, the request is
/// missed.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_the_missed_request_without_the_late_decision() {
    careless(Ends { by_last_ring: false, recheck: false, fences: true });
}

#[test]
fn loom_one_more_look_finds_the_request_of_a_careless_sender_without_fences() {
    careless(Ends { by_last_ring: true, recheck: true, fences: false });
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_the_missed_request_of_a_careless_sender_without_fences() {
    careless(Ends { by_last_ring: true, recheck: false, fences: false });
}
