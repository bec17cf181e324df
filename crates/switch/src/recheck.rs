//! Which ports are to be looked at again, and when.
//!
//! A wake-up between a port and its peer can get lost where the peer's memory fences do nothing
//! (the window is drawn in [`tombolo_ring::virtio::notify`]). So a port that goes to sleep, or did
//! not signal its peer, is looked at once more, [`RECHECK_DELAY`] later, by
//! [`crate::port::Port::recheck`]. Once: a port that stays quiet after that costs nothing.
//!
//! The delay is the same for all, so the due times are a queue in order of time, and each operation
//! is O(1). A port is in the queue once at most. One that is noted while it waits there is looked
//! at when its turn comes, and once more after another delay: so every note is followed by a look
//! between one and two delays later.

use crate::Nanos;
use std::collections::VecDeque;
use tombolo_ring::virtio::notify::RECHECK_NS;

/// From a port's going to sleep, or not signalling, to the second look.
pub const RECHECK_DELAY: Nanos = Nanos(RECHECK_NS);

/// Noted in the current round.
const NOTED: u8 = 1;
const QUEUED: u8 = 2;
/// Noted since it was queued.
const AGAIN: u8 = 4;

/// The queue of a worker.
#[derive(Debug, Default)]
pub(crate) struct Rechecks {
    /// By the index of a port.
    flags: Vec<u8>,
    /// Noted in the current round: their delay starts with the next look at the clock, since the
    /// one before may be from long before they went to sleep.
    noted: Vec<u16>,
    due: VecDeque<(Nanos, u16)>,
}

impl Rechecks {
    /// Has a port looked at after the delay.
    #[inline]
    pub(crate) fn note(&mut self, index: u16) {
        let at = usize::from(index);
        if self.flags.len() <= at {
            self.flags.resize(at + 1, 0);
        }
        if self.flags[at] & NOTED == 0 {
            self.flags[at] |= NOTED;
            self.noted.push(index);
        }
    }

    /// The delays of those noted since the last call start at `now`, which was read after that.
    #[inline]
    pub(crate) fn start(&mut self, now: Nanos) {
        for index in self.noted.drain(..) {
            let flags = &mut self.flags[usize::from(index)];
            *flags &= !NOTED;
            if *flags & QUEUED != 0 {
                *flags |= AGAIN;
            } else {
                *flags |= QUEUED;
                self.due.push_back((now.after(RECHECK_DELAY), index));
            }
        }
    }

    /// When the next look is due.
    #[inline]
    pub(crate) fn next(&self) -> Option<Nanos> {
        self.due.front().map(|(at, _)| *at)
    }

    /// Takes the next port whose look is due at `now`.
    #[inline]
    pub(crate) fn take(&mut self, now: Nanos) -> Option<u16> {
        let (_, index) = self.due.pop_front_if(|(at, _)| *at <= now)?;
        let flags = &mut self.flags[usize::from(index)];
        if *flags & AGAIN != 0 {
            *flags &= !AGAIN;
            self.due.push_back((now.after(RECHECK_DELAY), index));
        } else {
            *flags &= !QUEUED;
        }
        Some(index)
    }

    /// The port is gone; another may get its index.
    pub(crate) fn forget(&mut self, index: u16) {
        if let Some(flags) = self.flags.get_mut(usize::from(index)) {
            *flags = 0;
            self.noted.retain(|other| *other != index);
            self.due.retain(|(_, other)| *other != index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(rechecks: &mut Rechecks, now: u64) -> Vec<u16> {
        std::iter::from_fn(|| rechecks.take(Nanos(now))).collect()
    }

    #[test]
    fn each_note_is_followed_by_one_look_within_two_delays() {
        const D: u64 = RECHECK_NS;
        let mut rechecks = Rechecks::default();
        assert_eq!(rechecks.next(), None);
        for index in [3, 1, 3] {
            rechecks.note(index);
        }
        rechecks.start(Nanos(1000));
        assert_eq!(rechecks.next(), Some(Nanos(1000 + D)));
        assert_eq!(taken(&mut rechecks, 999 + D), [0u16; 0]);
        // Noted again while it waits: a second look, and no third.
        rechecks.note(3);
        rechecks.start(Nanos(1000 + D / 2));
        assert_eq!(taken(&mut rechecks, 1000 + D), [3, 1]);
        assert_eq!(taken(&mut rechecks, 999 + 2 * D), [0u16; 0]);
        assert_eq!(taken(&mut rechecks, 1000 + 2 * D), [3]);
        assert_eq!(rechecks.next(), None);
        // A port that goes leaves nothing to the next one with its index.
        rechecks.note(1);
        rechecks.start(Nanos(0));
        rechecks.note(1);
        rechecks.forget(1);
        rechecks.start(Nanos(0));
        assert_eq!(rechecks.next(), None);
    }
}
