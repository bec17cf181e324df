//! The wake-up protocol between a producer and a consumer of a virtqueue, in four steps.
//!
//! Both rings use it: the driver produces `avail.idx` for the device, the device produces `used.idx` for the
//! driver. The consumer says when it wants to be woken: by a flag, or by the index after which it wants to hear
//! (`VIRTIO_F_EVENT_IDX`). Both words are in memory that the other side may see late, hence this window:
//!
//! ```text
//!   producer                                consumer
//!   --------                                --------
//!                                           looks at index: nothing new
//!   writes the entry, publishes index  (R0)
//!   reads the wish: "do not wake me"
//!                                           writes the wish: "wake me"
//!                                           sleeps for ever
//! ```
//!
//! It is closed from both sides: the consumer looks at the index again *after* its wish is visible, and the
//! producer reads the wish *after* its index is visible. Each of the two is a store followed by a load of
//! another word, which only a sequentially consistent fence keeps in order. With the fences one of the two loads
//! sees the other side's store: either the consumer finds the entry, or the producer finds the wish.
//!
//! `crates/ring/src/virtio/loom.rs` runs these functions under every interleaving that the memory model allows.

use core::sync::atomic::Ordering;

#[cfg(not(loom))]
use core::sync::atomic::fence;
#[cfg(loom)]
use loom::sync::atomic::fence;

/// A 16-bit word that both sides can see; each has one writer.
pub trait Word {
    /// Reads it.
    fn load(&self, order: Ordering) -> u16;
    /// Writes it.
    fn store(&self, value: u16, order: Ordering);
}

/// Producer, step 1: makes the entries that were written before visible, and then the index.
#[inline]
pub fn publish(index: &impl Word, value: u16) {
    // R0, partner A0 in `available`: who sees the index sees the entries up to it.
    index.store(value, Ordering::Release);
}

/// Consumer: the index that the producer has published.
#[inline]
pub fn available(index: &impl Word) -> u16 {
    // A0, partner R0 in `publish`: entries up to the index may be read after this.
    index.load(Ordering::Acquire)
}

/// Producer, step 2, after [`publish`]: the consumer's wish, a flag or an index.
#[inline]
pub fn wish(word: &impl Word) -> u16 {
    // F0, partner F1 in `arm`: the index above is visible before the wish is read.
    fence(Ordering::SeqCst);
    // Relaxed: the fence orders it, and nothing else is read on its strength.
    word.load(Ordering::Relaxed)
}

/// Consumer: writes its wish and looks at the index again. If that is not what the consumer has drained up to,
/// it must drain again before it may sleep.
#[inline]
pub fn arm(word: &impl Word, value: u16, index: &impl Word) -> u16 {
    // Relaxed: the fence orders it, and it carries no data.
    word.store(value, Ordering::Relaxed);
    // F1, partner F0 in `wish`: the wish is visible before the index is read.
    fence(Ordering::SeqCst);
    available(index)
}

/// Whether a producer that moves its index from `old` to `new` passes the index `event` after which the consumer
/// wants to be woken (VirtIO 1.3 §2.7.10.1: `new - event - 1 < new - old`, modulo 2^16).
#[inline]
pub const fn passes(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}
