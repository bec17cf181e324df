//! The two ends of a ring: who puts entries in, and who takes them out.
//!
//! A [`Producer`] writes entries, its published index and the entries' stamps in its own section,
//! and reads the consumer's wake word in the peer's section. A [`Consumer`] does the reverse. Both
//! hold only indices; the memory is given with every call.
//!
//! A consumer that is awake finds the next entry by its stamp. So only one line comes from the
//! other processor, and not first the line of the index. The consumer looks at the index before it
//! sleeps.
//!
//! A peer's index is checked on every read: at most as many entries are in progress as the ring
//! has. A check that fails ends the connection ([`Broken`]).

use core::marker::PhantomData;
use core::sync::atomic::Ordering;

use super::entry::{Entry, Head};
use super::wake::{self, Told, Waker, Word};
use super::{Broken, ENTRY_PAYLOAD, ENTRY_STAMP, Ends, INLINE_BYTES, PUBLISHED, WAKE};
use crate::mem::{Foreign, ForeignMut};

/// A word of our own section.
struct Own<'m>(ForeignMut<'m>, usize);

impl Word for Own<'_> {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        // The sections were checked to be as large as their geometry, and the words' offsets are
        // aligned.
        self.0.as_foreign().load_u32(self.1, order).unwrap_or(0)
    }
    #[inline]
    fn store(&self, value: u32, order: Ordering) {
        self.0.store_u32(self.1, value, order);
    }
}

/// A word of the peer's section, which we cannot write.
struct Peer<'m>(Foreign<'m>, usize);

impl Word for Peer<'_> {
    #[inline]
    fn load(&self, order: Ordering) -> u32 {
        self.0.load_u32(self.1, order).unwrap_or(0)
    }
    #[inline]
    fn store(&self, _: u32, _: Ordering) {}
}

/// Puts entries into the ring of our section.
#[derive(Debug)]
pub struct Producer<E> {
    /// Entries written.
    next: u32,
    /// Entries published.
    published: u32,
    /// Entries that the consumer is known to have taken: a look at its word is saved while there is
    /// room by that.
    taken: u32,
    waker: Waker,
    entry: PhantomData<E>,
}

impl<E> Default for Producer<E> {
    fn default() -> Self {
        Producer { next: 0, published: 0, taken: 0, waker: Waker::default(), entry: PhantomData }
    }
}

impl<E: Entry> Producer<E> {
    /// Whether one more entry fits.
    ///
    /// # Errors
    /// [`Broken::Wake`] where the peer says that it took what was not published.
    #[inline]
    pub fn has_room(&mut self, ends: Ends<'_>) -> Result<bool, Broken> {
        self.has_room_for(ends, ends.entries())
    }

    /// Whether one more answer fits. The consumer says late what it took ([`wake::lag`]), but who
    /// uses a slot again has taken its answer: there are more answers in a full ring and the next
    /// one than there are slots, so one of them was taken, and then the oldest was.
    ///
    /// # Errors
    /// As for [`Producer::has_room`].
    #[inline]
    pub fn may_answer(&mut self, ends: Ends<'_>) -> Result<bool, Broken> {
        self.has_room_for(ends, ends.entries() + wake::lag(ends.entries()))
    }

    #[inline]
    fn has_room_for(&mut self, ends: Ends<'_>, most: u32) -> Result<bool, Broken> {
        if self.next.wrapping_sub(self.taken) < most {
            return Ok(true);
        }
        let under_way = wake::under_way(&Peer(ends.peer, WAKE), self.next);
        if under_way > ends.entries() + wake::lag(ends.entries()) {
            return Err(Broken::Wake);
        }
        self.taken_to(self.next.wrapping_sub(under_way));
        Ok(self.next.wrapping_sub(self.taken) < most)
    }

    /// Entries written: the index of the next one.
    #[inline]
    pub const fn next(&self) -> u32 {
        self.next
    }

    /// The consumer has taken all entries before that index, which was written once: it has
    /// answered the last of them.
    #[inline]
    pub fn taken_to(&mut self, index: u32) {
        if self.next.wrapping_sub(index) < self.next.wrapping_sub(self.taken) {
            self.taken = index;
        }
    }

    /// Writes an entry with the bytes that belong to it. The peer does not see it before
    /// [`Producer::publish`]. The caller has asked [`Producer::has_room`], and `inline` is as long
    /// as the entry says.
    #[inline]
    pub fn push(&mut self, ends: Ends<'_>, entry: &E, inline: &[u8]) {
        let at = ends.own_geometry.entry(self.next);
        debug_assert_eq!(inline.len(), entry.inline_len());
        ends.own.write_array(at, entry.encode());
        if let Some(to) = ends.own.slice(at + ENTRY_PAYLOAD, inline.len()) {
            to.write_from(inline);
        }
        self.next = self.next.wrapping_add(1);
    }

    /// Makes what was pushed visible. True where the consumer has to be woken for it.
    #[inline]
    #[must_use = "a waiting consumer keeps sleeping if it is not woken"]
    pub fn publish(&mut self, ends: Ends<'_>) -> bool {
        wake::publish(&Own(ends.own, PUBLISHED), self.next);
        while self.published != self.next {
            wake::stamp(&Own(ends.own, ends.own_geometry.entry(self.published) + ENTRY_STAMP), self.published);
            self.published = self.published.wrapping_add(1);
        }
        self.waker.wanted(&Peer(ends.peer, WAKE), self.next)
    }
}

/// Takes entries out of the ring of the peer's section.
#[derive(Debug)]
pub struct Consumer<E> {
    /// Entries taken.
    next: u32,
    /// The published index, as far as it is known: as it was read before we were to sleep, or by
    /// the stamps of entries since.
    seen: u32,
    told: Told,
    entry: PhantomData<E>,
}

impl<E> Default for Consumer<E> {
    fn default() -> Self {
        Consumer { next: 0, seen: 0, told: Told::default(), entry: PhantomData }
    }
}

impl<E: Entry> Consumer<E> {
    /// Whether an entry waits. Looks at the stamp of the next entry only: [`Consumer::arm`] looks
    /// at the index.
    ///
    /// # Errors
    /// [`Broken::Index`].
    #[inline]
    pub fn is_ready(&mut self, ends: Ends<'_>) -> Result<bool, Broken> {
        if self.seen == self.next {
            if !is_there(ends, self.next) {
                return Ok(false);
            }
            self.seen = self.next.wrapping_add(1);
        }
        if self.seen.wrapping_sub(self.next) > ends.entries() { Err(Broken::Index) } else { Ok(true) }
    }

    /// Takes the next entry; its inline payload is copied to the beginning of `inline`, as long as
    /// the entry says. The entry stays the consumer's until [`Consumer::took`].
    ///
    /// # Errors
    /// What no correct peer writes.
    #[inline]
    pub fn take(&mut self, ends: Ends<'_>, inline: &mut [u8; INLINE_BYTES]) -> Result<Option<E>, Broken> {
        self.take_to(ends, |_| inline)
    }

    /// As [`Consumer::take`], where the entry says to which place its payload goes.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub fn take_to<'b>(
        &mut self,
        ends: Ends<'_>,
        place: impl FnOnce(&E) -> &'b mut [u8; INLINE_BYTES],
    ) -> Result<Option<E>, Broken> {
        if !self.is_ready(ends)? {
            return Ok(None);
        }
        let at = ends.peer_geometry.entry(self.next);
        let head: Head = ends.peer.read_array(at).ok_or(Broken::Short)?;
        let entry = E::parse(&head, ends.peer_geometry)?;
        let from = ends.peer.slice(at + ENTRY_PAYLOAD, entry.inline_len()).ok_or(Broken::Inline)?;
        from.read_into(place(&entry));
        self.next = self.next.wrapping_add(1);
        Ok(Some(entry))
    }

    /// Gives the producer the entries back that were taken so far, and says that we are awake.
    #[inline]
    pub fn took(&mut self, ends: Ends<'_>) {
        self.told.took(&Own(ends.own, WAKE), self.next);
    }

    /// As [`Consumer::took`], once it is due ([`wake::lag`]): for a consumer that answers what it
    /// takes, or uses slots again whose answers it took, by which the producer knows as much.
    #[inline]
    pub fn took_some(&mut self, ends: Ends<'_>) {
        self.told.took_some(&Own(ends.own, WAKE), self.next, ends.entries());
    }

    /// Says that we are about to sleep. False where an entry waits, and we must not sleep. True
    /// means that we may sleep until the producer wakes us or its published index is no longer
    /// [`Consumer::index`].
    ///
    /// # Errors
    /// [`Broken::Index`].
    #[inline]
    pub fn arm(&mut self, ends: Ends<'_>) -> Result<bool, Broken> {
        self.seen = self.told.arm(&Own(ends.own, WAKE), self.next, &Peer(ends.peer, PUBLISHED));
        Ok(self.seen == self.next || !self.is_ready(ends)?)
    }

    /// The published index at which we sleep: an entry waits when `published` gives another one.
    #[inline]
    pub const fn index(&self) -> u32 {
        self.next
    }
}

/// Whether the entry of that index has come, for a consumer that polls for its own
/// [`Consumer::index`].
#[inline]
pub fn is_there(ends: Ends<'_>, index: u32) -> bool {
    let entry = ends.peer_geometry.entry(index);
    let there = wake::is_stamped(&Peer(ends.peer, entry + ENTRY_STAMP), index);
    // While nothing is there: the payload's line then comes with the stamp's and not after it.
    if let Some(line) = ends.peer.slice(entry + ENTRY_PAYLOAD, 64) {
        line.prefetch();
    }
    there
}
