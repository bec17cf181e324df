//! The queues of FIFO event channels, as a guest reads them (xen/include/public/event_channel.h,
//! "FIFO-based event channels").
//!
//! An event channel has one word of 32 bits in the event array, and a control block of 72 bytes
//! says where its queues begin:
//!
//! ```text
//!   event word          31 PENDING   30 MASKED   29 LINKED   28 BUSY   16..0 LINK: the next channel of the queue, 0 at its end
//!   control block       0 READY: one bit for each queue that has events   4 reserved   8 HEAD[16]: first channel of each queue
//! ```
//!
//! Xen sets PENDING. A channel that is neither MASKED nor LINKED it then appends to the queue of
//! its priority: it sets LINKED, and writes the channel to LINK of the queue's last word while that
//! word is LINKED, or else to HEAD. In the second case it also sets the queue's bit in READY and
//! raises the upcall. The guest takes a channel off by clearing LINKED and LINK in one step. What
//! LINK said is the next one. If it said 0, the queue is empty for the guest, and what Xen appends
//! later begins at HEAD.
//!
//! [`Queues::take`] takes at most as many channels as it is told to. What is left stays here, in no
//! word that Xen would announce again: a guest must not sleep while [`Queues::has_left`].

use core::sync::atomic::Ordering;

use crate::mem::ForeignMut;

/// Priorities, and so queues: 0 is served first.
pub const QUEUES: usize = 16;
/// Event words in a page of the array.
pub const WORDS_PER_PAGE: usize = 1024;
/// The largest number of channels: a link has 17 bits.
pub const MAX_CHANNELS: usize = 1 << 17;
/// Bytes of a control block.
pub const CONTROL_BYTES: usize = HEADS + QUEUES * WORD_BYTES;

/// The channel has an event.
pub const PENDING: u32 = 1 << 31;
/// Xen does not append the channel to a queue.
pub const MASKED: u32 = 1 << 30;
/// The channel is in a queue.
pub const LINKED: u32 = 1 << 29;
/// The next channel of the queue.
pub const LINK: u32 = MAX_CHANNELS as u32 - 1;

const WORD_BYTES: usize = 4;
const READY: usize = 0;
const HEADS: usize = 8;

/// The memory that Xen and the guest share, as far as the guest uses it.
pub trait EventMemory {
    /// Takes all bits of READY. Acquire: HEAD is read after it.
    fn take_ready(&self) -> u32;
    /// HEAD of a queue.
    fn head(&self, queue: usize) -> u32;
    /// Clears the bits that `keep` lacks in a channel's word, in one step; gives the word as it
    /// was, or `None` for a channel that has no word.
    fn clear(&self, channel: u32, keep: u32) -> Option<u32>;
}

/// Where the guest is in each queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Queues {
    /// The next channel of each queue; 0 where it begins at HEAD.
    next: [u32; QUEUES],
    /// Queues that may have events, one bit each.
    ready: u32,
}

impl Queues {
    /// Takes up to `most` channels off the queues, the first queue first, and gives `fired` each
    /// that has an event and is not masked. A channel can come more than once.
    pub fn take(&mut self, memory: &impl EventMemory, most: usize, mut fired: impl FnMut(u32)) {
        for _ in 0..most {
            // Each time, so that a queue of higher priority need not wait for the rest of another
            // one.
            self.ready |= memory.take_ready() & ((1 << QUEUES) - 1);
            if self.ready == 0 {
                return;
            }
            let queue = self.ready.trailing_zeros() as usize;
            if let Some(channel) = self.step(memory, queue) {
                fired(channel);
            }
        }
    }

    /// Whether queues that were ready have not been read to their end.
    pub fn has_left(&self) -> bool {
        self.ready != 0
    }

    /// Takes the first channel off a queue; the channel, where it has an event.
    fn step(&mut self, memory: &impl EventMemory, queue: usize) -> Option<u32> {
        let channel = if self.next[queue] != 0 { self.next[queue] } else { memory.head(queue) };
        // Xen links no channel without a word. If it did, the rest of that queue would be lost, and
        // not the guest.
        let word = if channel == 0 { None } else { memory.clear(channel, !(LINKED | LINK)) };
        let word = word.unwrap_or(0);
        self.next[queue] = word & LINK;
        if self.next[queue] == 0 {
            self.ready &= !(1 << queue);
        }
        // Xen sets PENDING before it looks at LINKED: an event is in `word`, or it links the
        // channel again.
        if word & PENDING == 0 || word & MASKED != 0 {
            return None;
        }
        // This may take the mark of a later event too, whose link then brings nothing: the channel
        // is told after both.
        memory.clear(channel, !PENDING).map(|_| channel)
    }
}

/// A control block and the pages of an event array in memory that Xen writes to.
#[derive(Clone, Copy, Debug)]
pub struct EventPages<'p, 'm> {
    /// At least [`CONTROL_BYTES`] long, aligned to 8 bytes.
    pub control: ForeignMut<'m>,
    /// [`WORDS_PER_PAGE`] words each.
    pub array: &'p [ForeignMut<'m>],
}

impl EventPages<'_, '_> {
    /// Masks all channels of a page of the array, as it has to be before Xen learns of it.
    pub fn initialise(page: ForeignMut<'_>) {
        for word in 0..WORDS_PER_PAGE {
            let _ = page.store_u32(word * WORD_BYTES, MASKED, Ordering::Release);
        }
    }
}

impl EventMemory for EventPages<'_, '_> {
    fn take_ready(&self) -> u32 {
        self.control.swap_u32(READY, 0, Ordering::AcqRel).unwrap_or(0)
    }

    fn head(&self, queue: usize) -> u32 {
        self.control.as_foreign().load_u32(HEADS + queue * WORD_BYTES, Ordering::Acquire).unwrap_or(0)
    }

    fn clear(&self, channel: u32, keep: u32) -> Option<u32> {
        let page = self.array.get(channel as usize / WORDS_PER_PAGE)?;
        page.fetch_and_u32(channel as usize % WORDS_PER_PAGE * WORD_BYTES, keep, Ordering::AcqRel)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::boxed::Box;
    use std::collections::BTreeSet;
    use std::vec;
    use std::vec::Vec;

    const PAGE: usize = WORDS_PER_PAGE * WORD_BYTES;
    const CHANNELS: u32 = 2 * WORDS_PER_PAGE as u32;

    fn page() -> ForeignMut<'static> {
        let memory = Box::leak(vec![0u8; PAGE + 64].into_boxed_slice());
        let skip = memory.as_ptr().align_offset(64);
        ForeignMut::from(&mut memory[skip..skip + PAGE])
    }

    /// Xen's side.
    struct Xen {
        control: ForeignMut<'static>,
        array: Vec<ForeignMut<'static>>,
        tails: [u32; QUEUES],
    }

    impl Xen {
        fn new() -> Xen {
            let xen = Xen { control: page(), array: Vec::from([page(), page()]), tails: [0; QUEUES] };
            xen.array.iter().for_each(|page| EventPages::initialise(*page));
            xen
        }

        fn memory(&self) -> EventPages<'_, 'static> {
            EventPages { control: self.control, array: &self.array }
        }

        fn word(&self, channel: u32) -> u32 {
            self.memory().clear(channel, u32::MAX).unwrap()
        }

        fn set(&self, channel: u32, value: u32) {
            let at = channel as usize % WORDS_PER_PAGE * WORD_BYTES;
            self.array[channel as usize / WORDS_PER_PAGE].store_u32(at, value, Ordering::Relaxed).unwrap();
        }

        /// An event; whether the upcall is raised.
        fn send(&mut self, channel: u32, queue: usize) -> bool {
            self.set(channel, self.word(channel) | PENDING);
            if self.word(channel) & (MASKED | LINKED) != 0 {
                return false;
            }
            self.set(channel, self.word(channel) | LINKED);
            let tail = std::mem::replace(&mut self.tails[queue], channel);
            if tail != 0 && self.word(tail) & LINKED != 0 && tail != channel {
                self.set(tail, self.word(tail) & !LINK | channel);
                return false;
            }
            self.control.store_u32(HEADS + queue * WORD_BYTES, channel, Ordering::Relaxed).unwrap();
            let ready = self.control.as_foreign().load_u32(READY, Ordering::Relaxed).unwrap();
            self.control.store_u32(READY, ready | 1 << queue, Ordering::Relaxed).unwrap();
            ready & 1 << queue == 0
        }

        fn unmask(&mut self, channel: u32, queue: usize) {
            self.set(channel, self.word(channel) & !MASKED);
            if self.word(channel) & PENDING != 0 {
                self.send(channel, queue);
            }
        }
    }

    fn all(queues: &mut Queues, xen: &Xen) -> Vec<u32> {
        let mut fired = Vec::new();
        queues.take(&xen.memory(), 4096, |channel| fired.push(channel));
        assert!(!queues.has_left());
        fired
    }

    #[test]
    fn channels_come_in_the_order_of_their_events_and_urgent_queues_first() {
        let (mut xen, mut queues) = (Xen::new(), Queues::default());
        (1..9).chain([1500]).for_each(|channel| xen.unmask(channel, 7));
        assert!(xen.send(5, 7) && !xen.send(3, 7) && !xen.send(5, 7) && !xen.send(1500, 7));
        assert!(xen.send(8, 2));
        assert_eq!(xen.word(5), PENDING | LINKED | 3);
        assert_eq!(all(&mut queues, &xen), [8, 5, 3, 1500]);
        assert_eq!([3, 5, 8, 1500].map(|channel| xen.word(channel)), [0; 4]);
        // The last one of the queue is off it, so the next one begins at the head and is announced.
        assert!(xen.send(1500, 7));
        assert_eq!(all(&mut queues, &xen), [1500]);
        assert_eq!(all(&mut queues, &xen), []);
    }

    #[test]
    fn a_masked_channel_waits_until_it_is_let_through() {
        let (mut xen, mut queues) = (Xen::new(), Queues::default());
        assert!(!xen.send(4, 7));
        assert_eq!(all(&mut queues, &xen), []);
        xen.unmask(4, 7);
        assert_eq!(all(&mut queues, &xen), [4]);
        // Masked while it is in a queue: its mark stays for the one that unmasks it.
        assert!(xen.send(4, 7));
        xen.set(4, xen.word(4) | MASKED);
        assert_eq!(all(&mut queues, &xen), []);
        assert_eq!(xen.word(4), PENDING | MASKED);
        xen.unmask(4, 7);
        assert_eq!(all(&mut queues, &xen), [4]);
    }

    #[test]
    fn what_a_limit_leaves_is_known_and_comes_next() {
        let (mut xen, mut queues) = (Xen::new(), Queues::default());
        (1..6).for_each(|channel| xen.unmask(channel, 7));
        (1..6).for_each(|channel| _ = xen.send(channel, 7));
        let mut fired = Vec::new();
        queues.take(&xen.memory(), 2, |channel| fired.push(channel));
        assert!(queues.has_left());
        assert!(!xen.send(1, 7), "nobody is told of what is appended to a queue that is not empty");
        assert_eq!((fired, all(&mut queues, &xen)), (Vec::from([1, 2]), Vec::from([3, 4, 5, 1])));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, ..ProptestConfig::default() })]

        /// Against a set of the channels that have events: each comes, none that has none, whatever
        /// the limits and masks.
        #[test]
        fn every_event_comes(steps in prop::collection::vec((0u8..4, 1u32..40, 0usize..5), 1..200)) {
            let (mut xen, mut queues) = (Xen::new(), Queues::default());
            let queue = |channel: u32| channel as usize % QUEUES;
            let (mut waiting, mut open) = (BTreeSet::new(), BTreeSet::new());
            for (what, channel, most) in steps {
                let channel = channel * 50;
                match what {
                    0 | 1 => {
                        xen.send(channel, queue(channel));
                        waiting.insert(channel);
                    }
                    2 => {
                        xen.unmask(channel, queue(channel));
                        open.insert(channel);
                    }
                    _ => {
                        let mut fired = Vec::new();
                        queues.take(&xen.memory(), most, |channel| fired.push(channel));
                        for channel in fired {
                            prop_assert!(open.contains(&channel) && waiting.remove(&channel), "{channel}");
                        }
                    }
                }
            }
            let fired: BTreeSet<u32> = all(&mut queues, &xen).into_iter().collect();
            waiting.retain(|channel| open.contains(channel));
            prop_assert_eq!(fired, waiting);
        }

        /// Memory full of anything: no panic, and no more steps than were asked for.
        #[test]
        fn garbage_is_survived(words in prop::collection::vec(any::<u32>(), 64), most in 0usize..100) {
            let (xen, mut queues) = (Xen::new(), Queues::default());
            for (at, word) in words.iter().enumerate() {
                xen.control.store_u32(at * WORD_BYTES, *word & (CHANNELS * 2 - 1), Ordering::Relaxed).unwrap();
                xen.set(at as u32 * 7 + 1, *word & !(LINK & !0x1ff));
            }
            let mut count = 0;
            queues.take(&xen.memory(), most, |channel| { count += 1; assert!(channel != 0 && channel < CHANNELS) });
            prop_assert!(count <= most);
        }
    }
}
