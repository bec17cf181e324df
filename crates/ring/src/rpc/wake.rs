//! The wake-up protocol of a call's rings: one word that holds how far the consumer has come and
//! whether it sleeps.
//!
//! Each consumer has one word, in its own section: `taken << 1 | waiting`. The producer publishes
//! an index and then reads that word; it wakes only a consumer that waits. With a sequence and a
//! flag in two words, one of them written by the producer, wake-ups are lost; here each word has
//! one writer and the same window as in `virtio::notify`:
//!
//! ```text
//!   producer                                consumer
//!   --------                                --------
//!                                           looks at the index: nothing new
//!   publishes the index  (R0)
//!   reads the word: "awake"
//!                                           writes the word: "waiting"
//!                                           sleeps for ever
//! ```
//!
//! It is closed by a fence on both sides and a second look of the consumer. While one sleep lasts
//! the producer may publish often: it remembers for which `taken` it woke last, and does not do it
//! again. That is safe since a consumer never sleeps twice at one `taken` once something beyond it
//! was published (its second look finds that), and only if the producer wakes for nothing else: a
//! consumer that has taken all there is, between the producer's publishing and its look at the
//! word, is left asleep. A wake-up at that `taken` would be remembered, and the next one, which is
//! needed, left out.
//!
//! Each write of the word takes its line from the producer, which reads it after each entry. A
//! consumer that stays awake therefore says late what it took ([`Told`]): at most a quarter of the
//! ring is taken and not said. Where each entry is answered, the producer does not depend on it:
//! who has the answer knows that the entry was taken, and all before it.
//!
//! Indices run free; the word holds 31 bits of them, which is enough to tell up to 2^31 - 1 entries
//! apart. `crates/ring/src/rpc/loom.rs` runs these functions under every interleaving that the
//! memory model allows.

use core::sync::atomic::Ordering;

#[cfg(not(loom))]
use core::sync::atomic::fence;
#[cfg(loom)]
use loom::sync::atomic::fence;

const WAITING: u32 = 1;
const INDEX_MASK: u32 = u32::MAX >> 1;

/// A 32-bit word that both sides can see; each has one writer.
pub trait Word {
    /// Reads it.
    fn load(&self, order: Ordering) -> u32;
    /// Writes it.
    fn store(&self, value: u32, order: Ordering);
}

/// Producer, step 1: makes the entries that were written before visible, and then the index.
#[inline]
pub fn publish(index: &impl Word, value: u32) {
    // R0, partner A0 in `available`: who sees the index sees the entries up to it.
    index.store(value, Ordering::Release);
}

/// Consumer: the index that the producer has published.
#[inline]
pub fn available(index: &impl Word) -> u32 {
    // A0, partner R0 in `publish`: entries up to the index may be read after this.
    index.load(Ordering::Acquire)
}

/// Producer, after [`publish`]: marks the entry of that index as written. For consumers that are
/// awake: they look for the stamp of the entry that comes next, and need not fetch the index
/// besides.
#[inline]
pub fn stamp(word: &impl Word, index: u32) {
    // R3, partner A3 in `is_stamped`: who sees the stamp sees the entry, and the index that counts
    // it.
    word.store(index.wrapping_add(1), Ordering::Release);
}

/// Consumer: whether the entry of that index, by its own stamp, has been written. Before that the
/// stamp is the one of the entry that was in its place a ringful ago, or 0.
#[inline]
pub fn is_stamped(word: &impl Word, index: u32) -> bool {
    // A3, partner R3 in `stamp`: the entry may be read after this.
    word.load(Ordering::Acquire) == index.wrapping_add(1)
}

/// How many entries the producer has published that the consumer's `word` does not count as taken,
/// for a producer that wants to know its room.
#[inline]
pub fn under_way(word: &impl Word, published: u32) -> u32 {
    // A2, partner R2 in `took`: the consumer has read the entries it took before they are written
    // again.
    let word = word.load(Ordering::Acquire);
    published.wrapping_sub(word >> 1) & INDEX_MASK
}

/// Consumer: says how far it has come, and that it is awake.
#[inline]
pub fn took(word: &impl Word, taken: u32) {
    // R2, partner A2 in `under_way`: entries up to here have been read.
    word.store(taken << 1, Ordering::Release);
}

/// Consumer: says that it is about to sleep, having taken up to `taken`, and looks at the index
/// again. Where that is not `taken`, it must not sleep.
#[inline]
pub fn arm(word: &impl Word, taken: u32, index: &impl Word) -> u32 {
    // R2 as in `took`.
    word.store(taken << 1 | WAITING, Ordering::Release);
    // F1, partner F0 in `Waker::wanted`: the request is visible before the index is read.
    fence(Ordering::SeqCst);
    available(index)
}

/// How many entries may be taken that the word does not say yet, in a ring of so many.
#[inline]
pub const fn lag(entries: u32) -> u32 {
    entries / 4
}

/// The consumer's memory of what its word says.
#[derive(Clone, Copy, Debug, Default)]
pub struct Told {
    taken: u32,
    waiting: bool,
}

impl Told {
    /// As [`took`], in any case.
    #[inline]
    pub fn took(&mut self, word: &impl Word, taken: u32) {
        *self = Told { taken, waiting: false };
        took(word, taken);
    }

    /// As [`took`], once it is due: where the word says that we sleep, or lags behind by more than
    /// [`lag`].
    #[inline]
    pub fn took_some(&mut self, word: &impl Word, taken: u32, entries: u32) {
        if self.waiting || taken.wrapping_sub(self.taken) > lag(entries) {
            self.took(word, taken);
        }
    }

    /// As [`arm`], which always says all.
    #[inline]
    pub fn arm(&mut self, word: &impl Word, taken: u32, index: &impl Word) -> u32 {
        *self = Told { taken, waiting: true };
        arm(word, taken, index)
    }
}

/// The producer's memory of whom it woke.
#[derive(Clone, Copy, Debug, Default)]
pub struct Waker {
    /// The consumer's 31 bits of `taken` at the last wake-up.
    woken_at: Option<u32>,
}

impl Waker {
    /// Producer, step 2, after [`publish`] of that index: whether the consumer has to be woken now.
    #[inline]
    pub fn wanted(&mut self, word: &impl Word, published: u32) -> bool {
        // F0, partner F1 in `arm`: the index above is visible before the request is read.
        fence(Ordering::SeqCst);
        // Relaxed: the fence orders it, and nothing else is read on its strength.
        let word = word.load(Ordering::Relaxed);
        let taken = word >> 1;
        if word & WAITING == 0 || taken == published & INDEX_MASK || self.woken_at == Some(taken) {
            return false;
        }
        self.woken_at = Some(taken);
        true
    }
}
