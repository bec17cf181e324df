//! The wake-up protocol between a producer and a consumer of a virtqueue, in four steps. The rings
//! of Xen use it too ([`xen::ring`](crate::xen::ring)).
//!
//! Both rings of a virtqueue use it: the driver produces `avail.idx` for the device, the device
//! produces `used.idx` for the driver. The consumer says when it wants to be woken: by a flag, or
//! by the index after which it wants a notification (`VIRTIO_F_EVENT_IDX`). Both words are in
//! memory that the other side may see late. That opens this window:
//!
//! ```text
//!   producer                                consumer
//!   --------                                --------
//!                                           looks at index: nothing new
//!   writes the entry, publishes index  (R0)
//!   reads the request: "do not wake me"
//!                                           writes the request: "wake me"
//!                                           sleeps for ever
//! ```
//!
//! It is closed from both sides. The consumer looks at the index again *after* its request is
//! visible. The producer reads the request *after* its index is visible. Each of the two is a store
//! followed by a load of another word, and only a sequentially consistent fence keeps these in
//! order. With the fences, one of the two loads sees the other side's store: either the consumer
//! finds the entry, or the producer finds the request.
//!
//! # A peer whose fences do nothing
//!
//! The proof needs the fences of *both* sides. QEMU before 8.1 translates the fences of a guest
//! with one CPU to nothing, so the guest's store can stay in the host CPU's store buffer while its
//! load is already done:
//!
//! ```text
//!   peer (its fence does nothing)           this side
//!   -----------------------------           ---------
//!   reads the request: "do not wake me"
//!                                           writes the request, fence, looks at index: nothing new
//!                                           sleeps
//!   the index leaves the store buffer
//!   ... no side looks at it again
//! ```
//!
//! The same happens the other way round: the peer reads the index, this side publishes and reads an
//! old request, and the peer's request becomes visible after that. A store leaves the buffer within
//! well under a microsecond of its execution, and at the latest when the thread is switched out. So
//! each side repeats its last look once, [`RECHECK_NS`] later:
//!
//! * a consumer that went to sleep looks at the index once more, without touching its request;
//! * a producer that did not signal reads the request once more ([`Signals`]) and signals late.
//!
//! One look per sleep or unsent signal is enough. When the peer makes a later store, this side's
//! fence has taken effect, and the peer sees its result. There is no periodic tick. Where both
//! sides are this project's code, the consumer's look alone is enough; the producer's look is for
//! foreign consumers.
//!
//! `crates/ring/src/virtio/loom.rs` runs these functions under every interleaving that the memory
//! model allows, also with such a peer.

use core::sync::atomic::Ordering;

#[cfg(not(loom))]
use core::sync::atomic::fence;
#[cfg(loom)]
use loom::sync::atomic::fence;

/// How long after a decision to sleep, or not to signal, the look that led to it is repeated, in
/// nanoseconds. Far above what a store needs to become visible, far below what anybody notices.
pub const RECHECK_NS: u64 = 100_000;

/// A word that both sides can see; each has one writer.
pub trait Word {
    /// What it holds: `u16` in virtqueues, `u32` in the rings of Xen.
    type Value: Copy;
    /// Reads it.
    fn load(&self, order: Ordering) -> Self::Value;
    /// Writes it.
    fn store(&self, value: Self::Value, order: Ordering);
}

/// Producer, step 1: makes the entries that were written before visible, and then the index.
#[inline]
pub fn publish<W: Word>(index: &W, value: W::Value) {
    // R0, partner A0 in `available`: who sees the index sees the entries up to it.
    index.store(value, Ordering::Release);
}

/// Consumer: the index that the producer has published.
#[inline]
pub fn available<W: Word>(index: &W) -> W::Value {
    // A0, partner R0 in `publish`: entries up to the index may be read after this.
    index.load(Ordering::Acquire)
}

/// Producer, step 2, after [`publish`]: the consumer's request, a flag or an index.
#[inline]
pub fn suppression<W: Word>(word: &W) -> W::Value {
    // F0, partner F1 in `arm`: the index above is visible before the request is read.
    fence(Ordering::SeqCst);
    // Relaxed: the fence orders it, and nothing else is read on its strength.
    word.load(Ordering::Relaxed)
}

/// Consumer: writes its request and looks at the index again. If that is not what the consumer has
/// drained up to, it must drain again before it may sleep.
#[inline]
pub fn arm<W: Word, I: Word>(word: &W, value: W::Value, index: &I) -> I::Value {
    // Relaxed: the fence orders it, and it carries no data.
    word.store(value, Ordering::Relaxed);
    // F1, partner F0 in `suppression`: the request is visible before the index is read.
    fence(Ordering::SeqCst);
    available(index)
}

/// Whether a producer that moves its index from `old` to `new` passes the index `event` after which
/// the consumer wants to be woken (VirtIO 1.3 §2.7.10.1: `new - event - 1 < new - old`, modulo
/// 2^16).
#[inline]
pub const fn passes(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// A consumer's request, as its word says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suppression {
    /// To be woken when the index passes this one.
    After(u16),
    /// By flag: to be woken for everything, or for nothing.
    Always(bool),
}

/// A producer's memory of its signals.
///
/// A decision covers what was published since the last decision, as VirtIO 1.3 §2.7.10.1 has it.
/// The re-check covers what was published since the last *signal*, so it finds every request that
/// became visible late. A request costs one signal too many at most: the consumer may have found
/// what it asked for by itself.
#[derive(Clone, Copy, Debug)]
pub struct Signals {
    /// The index at the last decision.
    decided: u16,
    /// The index at the last signal.
    signalled: u16,
    /// A decision since the last signal was "no", and was not repeated yet.
    in_doubt: bool,
}

impl Signals {
    /// For a ring that starts at `index`.
    pub const fn new(index: u16) -> Signals {
        Signals { decided: index, signalled: index, in_doubt: false }
    }

    /// Whether the consumer has to be signalled for `published`, by the `suppression` that was read
    /// after publishing it.
    #[inline]
    pub const fn decide(&mut self, suppression: Suppression, published: u16) -> bool {
        let since = self.decided;
        self.decide_since(since, suppression, published)
    }

    /// As [`Signals::decide`], for consumers that do not look again after they wrote their request:
    /// also where the request was written after the decision before this one.
    #[inline]
    pub const fn decide_late(&mut self, suppression: Suppression, published: u16) -> bool {
        let since = self.signalled;
        self.decide_since(since, suppression, published)
    }

    #[inline]
    const fn decide_since(&mut self, since: u16, suppression: Suppression, published: u16) -> bool {
        let signal = match suppression {
            Suppression::After(event) => passes(event, since, published),
            Suppression::Always(always) => always && since != published,
        };
        self.decided = published;
        if signal {
            self.signalled = published;
        } else if published.wrapping_sub(self.signalled) > 1 << 15 {
            // A request that old no longer counts: indices are compared over half of their range.
            self.signalled = published.wrapping_sub(1 << 15);
        }
        self.in_doubt = !signal;
        signal
    }

    /// Repeats the decisions since the last signal with a `suppression` that was read at least
    /// [`RECHECK_NS`] later.
    pub const fn recheck(&mut self, suppression: Suppression, published: u16) -> bool {
        let signal = self.decide_late(suppression, published);
        self.in_doubt = false;
        signal
    }

    /// A signal was sent for `published` without a question.
    #[inline]
    pub const fn signalled(&mut self, published: u16) {
        *self = Signals::new(published);
    }

    /// Whether [`Signals::recheck`] is due some time after the last decision.
    #[inline]
    pub const fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_becomes_visible_late_costs_one_signal() {
        for start in [0u16, 0x7ff0, u16::MAX - 3] {
            let at = |n: u16| start.wrapping_add(n);
            let mut signals = Signals::new(start);
            assert!(signals.decide(Suppression::After(at(0)), at(1)) && !signals.is_in_doubt());
            // The consumer has taken one and sleeps; its request is not visible yet.
            assert!(!signals.decide(Suppression::After(at(0)), at(2)) && signals.is_in_doubt());
            assert!(signals.recheck(Suppression::After(at(1)), at(2)) && !signals.is_in_doubt());
            assert!(!signals.recheck(Suppression::After(at(1)), at(2)), "once");
            // More was published before the re-check: it covers all of it.
            assert!(
                !signals.decide(Suppression::After(at(1)), at(3)) && !signals.decide(Suppression::After(at(2)), at(4))
            );
            assert!(signals.recheck(Suppression::After(at(2)), at(4)));
            // So does a decision that expects late requests.
            assert!(
                !signals.decide_late(Suppression::After(at(3)), at(5))
                    && signals.decide_late(Suppression::After(at(4)), at(6))
            );
            // A consumer that took everything and sleeps behind it is left alone.
            assert!(!signals.recheck(Suppression::After(at(6)), at(6)));
        }
    }

    #[test]
    fn a_flag_that_becomes_visible_late_costs_one_signal() {
        let mut signals = Signals::new(7);
        assert!(!signals.decide(Suppression::Always(false), 8) && signals.is_in_doubt());
        assert!(signals.recheck(Suppression::Always(true), 8));
        assert!(!signals.recheck(Suppression::Always(true), 8) && !signals.is_in_doubt());
    }

    #[test]
    fn a_request_that_nobody_renews_is_signalled_once_in_a_turn_of_the_index() {
        // A consumer that polls for ever leaves its request where it was.
        let mut signals = Signals::new(0);
        let count = (1..=3 << 16).filter(|n: &u32| signals.decide_late(Suppression::After(0), *n as u16)).count();
        assert_eq!(count, 3);
    }
}
