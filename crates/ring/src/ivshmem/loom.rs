//! The doorbells of a network link under every interleaving and reordering that `loom` knows.
//!
//! Run by `RUSTFLAGS="--cfg loom" cargo test -p tombolo-ring --release loom`.
//!
//! Towards the receiver of frames the protocol is that of the virtqueue, and `crates/ring/src/virtio/loom.rs` is its model. Here is
//! what differs: the sender's wish for returned buffers, which a sender such as Linux's writes without looking again.
//!
//! **What runs**: the functions of [`notify`](crate::virtio::notify) and the decision of `Receiver::release`
//! ([`Signals::decide_late`]), over `loom`'s atomics.
//!
//! **What is shown**: a sender that keeps one frame more out than it wishes for and sleeps is woken, although it does not look
//! again; with the decision of the virtqueue it is not always.
//!
//! **What bounds it and what it does not show**: as in the model of the virtqueue.

use std::sync::Arc;

use core::sync::atomic::Ordering;
use loom::sync::Notify;
use loom::sync::atomic::AtomicU16;
use loom::thread;

use crate::virtio::notify::{self, Signals, Wish};

const PREEMPTIONS: usize = 3;
/// Frames that are out when the sender wishes; the index runs over the wrap-around.
const FRAMES: u16 = 2;
const FIRST: u16 = u16::MAX;

struct Ring {
    used: AtomicU16,
    wish: AtomicU16,
    /// Frames published by the sender.
    avail: AtomicU16,
    doorbell: Notify,
}

impl Ring {
    fn new() -> Arc<Ring> {
        Arc::new(Ring {
            used: AtomicU16::new(FIRST),
            // Served long ago.
            wish: AtomicU16::new(FIRST.wrapping_sub(7)),
            avail: AtomicU16::new(FIRST.wrapping_add(FRAMES)),
            doorbell: Notify::new(),
        })
    }
}

/// Linux: looks, finds no room, wishes, publishes one frame more, sleeps without another look.
fn careless_sender(ring: &Ring) {
    let last = notify::available(&ring.used);
    AtomicU16::store(&ring.wish, last, Ordering::Relaxed);
    notify::publish(&ring.avail, FIRST.wrapping_add(FRAMES + 1));
    ring.doorbell.wait();
}

fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(run);
}

fn careless(by_last_ring: bool) {
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
                    let wish = Wish::After(notify::wish(&ring.wish));
                    let decide = if by_last_ring { Signals::decide_late } else { Signals::decide };
                    if decide(&mut signals, wish, next) {
                        ring.doorbell.notify();
                    }
                }
            })
        };
        careless_sender(&ring);
        receiver.join().unwrap();
    });
}

#[test]
fn loom_a_sender_that_does_not_look_again_is_woken() {
    careless(true);
}

/// The model can fail: by the index of the last question, as a virtqueue decides, the wish is missed.
#[test]
#[should_panic(expected = "deadlock")]
fn loom_finds_the_missed_wish_without_the_late_decision() {
    careless(false);
}
