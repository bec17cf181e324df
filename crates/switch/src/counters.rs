//! What is counted per port. Counters only grow; a reader computes rates. One thread writes (the
//! worker that owns the port), any thread reads.
//!
//! "rx" is what came *from* the port's peer into the switch, "tx" what went *to* the peer.

use crate::drop::{Drops, Reason};
use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer. Relaxed is enough: a reader wants a recent value of each, not an
/// order among them.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`. Only the one writer calls this, so load and store need no locked instruction.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// The value now.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A counter for each [`Reason`], by its number.
#[derive(Debug)]
pub struct ByReason([Counter; Reason::COUNT]);

impl Default for ByReason {
    fn default() -> Self {
        ByReason(std::array::from_fn(|_| Counter::default()))
    }
}

impl std::ops::Deref for ByReason {
    type Target = [Counter; Reason::COUNT];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<'a> IntoIterator for &'a ByReason {
    type Item = &'a Counter;
    type IntoIter = std::slice::Iter<'a, Counter>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

/// Buckets of the histogram of frames per turn: 0, 1, 2–3, 4–7, … , 2^(n-2) and more.
pub const TURN_BUCKETS: usize = 12;

/// Written only by the port's worker; readable from any thread.
#[derive(Debug, Default)]
pub struct PortCounters {
    /// Frames taken from the peer.
    pub rx_frames: Counter,
    /// Bytes of those frames, without framing or offload headers.
    pub rx_bytes: Counter,
    /// Frames given to the peer.
    pub tx_frames: Counter,
    /// Bytes of those frames.
    pub tx_bytes: Counter,
    /// Frames that came from this port and were dropped before a destination was chosen, by
    /// [`Reason`].
    pub rx_drops: ByReason,
    /// Frames that were to go to this port and were dropped, by [`Reason`].
    pub tx_drops: ByReason,
    /// Frames that waited for a buffer of the peer or for the rate limit before they were given to
    /// it or dropped.
    pub queued_frames: Counter,
    /// Times that the port was found ready after it had slept.
    pub wakeups: Counter,
    /// Frames waited although no wake-up had come, at the look that follows a sleep once
    /// ([`crate::recheck`]). A wake-up that was under way at that moment is counted too.
    pub late_wakeups: Counter,
    /// Times that the peer was signalled only at that look, which found its wish.
    pub late_signals: Counter,
    /// Turns in which the port was polled for frames.
    pub turns: Counter,
    /// Turns that used up the budget, so that the port was asked again before any sleep.
    pub exhausted_budgets: Counter,
    /// Frames per turn; bucket 0 is empty turns, bucket k ≥ 1 counts turns with 2^(k-1) to 2^k - 1
    /// frames.
    pub frames_per_turn: [Counter; TURN_BUCKETS],
    /// Times that the peer broke its protocol and the port was reset.
    pub faults: Counter,
    /// Times that the port was restarted after a panic in its code.
    pub restarts: Counter,
    /// Checksums completed in software for this destination.
    pub software_checksums: Counter,
    /// Frames that were cut in software for this destination.
    pub software_segmented: Counter,
    /// Segments cut in software for this destination.
    pub software_segments: Counter,
    /// Frames that became parts of frames before them for this destination.
    pub software_merged: Counter,
    /// Frames copied to a capture of this port.
    pub captured: Counter,
    /// Frames that a capture of this port could not keep up with.
    pub capture_lost: Counter,
}

impl PortCounters {
    /// Counts a turn that gave so many frames, and whether it used up its budget.
    #[inline]
    pub fn turn(&self, frames: u64, is_used_up: bool) {
        self.turns.add(1);
        let bucket = (u64::BITS - frames.leading_zeros()) as usize;
        self.frames_per_turn[bucket.min(TURN_BUCKETS - 1)].add(1);
        if is_used_up {
            self.exhausted_budgets.add(1);
        }
    }

    /// Adds what was dropped on the way from the port, and starts `drops` again at zero.
    #[inline]
    pub fn add_rx_drops(&self, drops: &mut Drops) {
        drops.drain(|reason, n| self.rx_drops[reason as usize].add(n));
    }

    /// Adds what was dropped on the way to the port, and starts `drops` again at zero.
    #[inline]
    pub fn add_tx_drops(&self, drops: &mut Drops) {
        drops.drain(|reason, n| self.tx_drops[reason as usize].add(n));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_fall_into_their_buckets() {
        let counters = PortCounters::default();
        for (frames, bucket) in [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (64, 7), (5000, TURN_BUCKETS - 1)] {
            let before = counters.frames_per_turn[bucket].get();
            counters.turn(frames, frames >= 64);
            assert_eq!(counters.frames_per_turn[bucket].get(), before + 1, "{frames} frames");
        }
        assert_eq!(counters.turns.get(), 7);
        assert_eq!(counters.exhausted_budgets.get(), 2);
    }
}
