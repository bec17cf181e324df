//! Event channels of this domain, in the form that Xen offers: FIFO queues, or two levels of bits.
//!
//! In both forms Xen sets `evtchn_upcall_pending` of the shared information page with an event.
//! Each turn of the main loop calls [`Events::take`], which resets the flag *before* it looks for
//! events:
//!
//! ```text
//!   cell                                      Xen
//!   flag = 0                                  mark the event in its channel
//!   take READY and the queues, or             set the flag
//!   pending_sel and the bits                  does the cell poll that channel? wake it
//!   work, arm the rings, look again
//!   flag still 0? SCHEDOP_poll of all         is one of them marked? return at once
//!   channels
//! ```
//!
//! The cell sleeps in a hypercall ([`Events::poll`]), in which Xen looks at the marks once more. So
//! none is lost, and none costs an interrupt: interrupts stay off. Xen also raises the upcall
//! vector, which then stays pending in the local APIC. A Xen that refuses to poll has the cell
//! sleep in `hlt`, from which the vector wakes it.
//!
//! * FIFO ([`tombolo_ring::xen::events`]): one word for each channel, and queues that keep the
//!   order of the events. One turn takes a limited number, and the cell does not sleep over the
//!   rest.
//! * Two-level (public/xen.h), where Xen refuses the first form or the command line says
//!   `events=2l`: one bit for each channel, in `evtchn_pending`, and one bit for each 64 of them in
//!   `evtchn_pending_sel`.

use crate::machine::{dma, hypercall};
use crate::println;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::xen::events::{EventPages, MAX_CHANNELS, Queues, WORDS_PER_PAGE};

const PAGE: usize = 4096;
/// Offsets in the shared information page (public/xen.h, 64 bit); processor 0's `vcpu_info` comes
/// first.
const UPCALL_PENDING: usize = 0;
const PENDING_SEL: usize = 8;
const EVENT_PENDING: usize = 0x800;
const EVENT_MASK: usize = 0xa00;
const WORD_BITS: usize = 64;
/// 4096 channels, all that two levels have.
const EVENT_WORDS: usize = 64;
/// Channels that one turn takes off the queues: more than the channels of a domain with all its
/// devices.
const MOST: usize = 256;

/// Which event channels have fired and were not yet asked for.
#[derive(Default)]
struct Fired(RefCell<Vec<u64>>);

impl Fired {
    fn add(&self, word: usize, bits: u64) {
        let mut words = self.0.borrow_mut();
        if word < MAX_CHANNELS / WORD_BITS {
            if word >= words.len() {
                words.resize(word + 1, 0);
            }
            words[word] |= bits;
        }
    }

    fn clear(&self) {
        self.0.borrow_mut().fill(0);
    }

    fn has(&self, port: u32) -> bool {
        let words = self.0.borrow();
        words.get(port as usize / WORD_BITS).is_some_and(|word| word & 1 << (port as usize % WORD_BITS) != 0)
    }

    fn take(&self, port: u32) -> bool {
        let mut words = self.0.borrow_mut();
        let Some(word) = words.get_mut(port as usize / WORD_BITS) else { return false };
        let bit = 1 << (port as usize % WORD_BITS);
        let had = *word & bit != 0;
        *word &= !bit;
        had
    }
}

/// The FIFO form's memory, and where the cell is in its queues.
struct Fifo {
    control: ForeignMut<'static>,
    array: Vec<ForeignMut<'static>>,
    queues: Queues,
}

impl Fifo {
    /// Has Xen use that form; `None` where it refuses.
    fn open() -> Option<Fifo> {
        let control = dma::alloc(PAGE);
        hypercall::use_fifo_events(control).ok()?;
        Some(Fifo { control, array: Vec::new(), queues: Queues::default() })
    }

    /// A new domain has the memory of the one that was saved, and Xen knows none of it.
    ///
    /// # Panics
    /// Where Xen refuses what it has granted before.
    fn restored(&mut self) {
        self.queues = Queues::default();
        self.control.write_from(&[0; PAGE]);
        let array = core::mem::take(&mut self.array);
        let mut done = hypercall::use_fifo_events(self.control);
        for page in array {
            done = done.and_then(|()| self.add(page));
        }
        if let Err(refused) = done {
            panic!("Xen refused FIFO event channels after a restore: {refused:?}");
        }
    }

    fn add(&mut self, page: ForeignMut<'static>) -> Result<(), hypercall::Refused> {
        EventPages::initialise(page);
        hypercall::expand_event_array(page)?;
        self.array.push(page);
        Ok(())
    }

    /// Makes a word for a channel.
    fn reach(&mut self, port: u32) -> Result<(), hypercall::Refused> {
        while self.array.len() <= port as usize / WORDS_PER_PAGE {
            self.add(dma::alloc(PAGE))?;
        }
        Ok(())
    }
}

/// The domain's event channels.
pub(super) struct Events {
    shared: ForeignMut<'static>,
    fired: Fired,
    fifo: RefCell<Option<Fifo>>,
    /// The channels that were listened to. One that was closed has no events.
    ports: RefCell<Vec<u32>>,
}

impl Events {
    /// `shared` is the shared information page; `wants_fifo` is false for the two-level form.
    pub(super) fn open(shared: ForeignMut<'static>, wants_fifo: bool) -> Events {
        Events::mask_all(shared);
        let fifo = RefCell::new(if wants_fifo { Fifo::open() } else { None });
        Events { shared, fired: Fired::default(), fifo, ports: RefCell::default() }
    }

    /// Lets no event through that was not asked for, in the two-level form.
    fn mask_all(shared: ForeignMut<'static>) {
        for word in 0..EVENT_WORDS {
            let _ = shared.store_u64(EVENT_MASK + word * 8, u64::MAX, Release);
        }
    }

    /// Starts again in a domain that was restored, whose shared information page is mapped already.
    ///
    /// # Panics
    /// Where Xen refuses what it has granted before.
    pub(super) fn restored(&self) {
        Events::mask_all(self.shared);
        self.fired.clear();
        self.ports.borrow_mut().clear();
        if let Some(fifo) = &mut *self.fifo.borrow_mut() {
            fifo.restored();
        }
    }

    /// The form, as it is printed.
    pub(super) fn form(&self) -> &'static str {
        if self.fifo.borrow().is_some() { "FIFO" } else { "two-level" }
    }

    /// Lets a channel's events through.
    pub(super) fn listen(&self, port: u32) {
        let reached = self.fifo.borrow_mut().as_mut().map_or(Ok(()), |fifo| fifo.reach(port));
        // Unmasking cannot fail for a channel of this domain.
        if let Err(refused) = reached.and_then(|()| hypercall::unmask(port)) {
            println!("tombolo-cell: Xen refused the events of channel {port}: {refused:?}");
            return;
        }
        let ports = &mut *self.ports.borrow_mut();
        if !ports.contains(&port) {
            ports.push(port);
        }
    }

    /// Sleeps until an event comes that was not taken, or until Xen's system time is `until_ns`.
    pub(super) fn poll(&self, until_ns: Option<u64>) -> Result<(), hypercall::Refused> {
        hypercall::poll(&self.ports.borrow(), until_ns)
    }

    /// Takes what has fired since the last call.
    pub(super) fn take(&self) {
        // The flag goes first: see the picture above. The exchange that follows is a barrier on
        // this processor, and Release keeps the compiler from moving the write behind it.
        let _ = self.shared.write_array(UPCALL_PENDING, [0u8]);
        if let Some(Fifo { control, array, queues }) = &mut *self.fifo.borrow_mut() {
            let memory = EventPages { control: *control, array };
            return queues.take(&memory, MOST, |port| {
                self.fired.add(port as usize / WORD_BITS, 1 << (port as usize % WORD_BITS))
            });
        }
        let mut words = self.shared.swap_u64(PENDING_SEL, 0, AcqRel).unwrap_or(0);
        while words != 0 {
            let word = words.trailing_zeros() as usize;
            words &= words - 1;
            let mask = self.shared.as_foreign().load_u64(EVENT_MASK + word * 8, Acquire).unwrap_or(u64::MAX);
            let pending = self.shared.as_foreign().load_u64(EVENT_PENDING + word * 8, Acquire).unwrap_or(0);
            let bits = pending & !mask;
            let _ = self.shared.fetch_and_u64(EVENT_PENDING + word * 8, !bits, AcqRel);
            self.fired.add(word, bits);
        }
    }

    /// Whether Xen has set the flag since the last [`Events::take`]: there are events to take.
    pub(super) fn have_come(&self) -> bool {
        // One that comes from here on is Xen's affair.
        self.shared.as_foreign().read_array(UPCALL_PENDING).is_some_and(|[flag]: [u8; 1]| flag != 0)
    }

    /// Whether the last call took less than there was, of which nothing will tell.
    pub(super) fn has_left(&self) -> bool {
        self.fifo.borrow().as_ref().is_some_and(|fifo| fifo.queues.has_left())
    }

    /// Whether a channel has fired since this was asked last.
    pub(super) fn take_fired(&self, port: u32) -> bool {
        self.fired.take(port)
    }

    /// As [`Events::take_fired`], without taking it.
    pub(super) fn has_fired(&self, port: u32) -> bool {
        self.fired.has(port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::Ordering::Relaxed;
    use tombolo_ring::xen::events::{LINKED, PENDING};

    #[test]
    fn a_channel_that_fired_is_told_once() {
        let fired = Fired::default();
        fired.add(1, 1 << 3 | 1 << 5);
        fired.add(1, 1 << 3);
        fired.add(MAX_CHANNELS / WORD_BITS, 1);
        assert!(fired.has(67) && !fired.has(66) && !fired.has(u32::MAX));
        assert!(fired.take(67) && !fired.take(67) && !fired.has(67));
        assert!(fired.take(69) && !fired.take(3) && !fired.take(u32::MAX));
    }

    #[test]
    fn both_forms_take_an_event_and_reset_the_flag() {
        let shared = dma::alloc(PAGE);
        let events = Events::open(shared, false);
        events.listen(70);
        for (at, value) in [(EVENT_MASK + 8, !(1 << 6)), (EVENT_PENDING + 8, 1 << 6 | 1 << 7), (PENDING_SEL, 1 << 1)] {
            shared.store_u64(at, value, Relaxed).unwrap();
        }
        assert!(!events.have_come());
        shared.write_array(UPCALL_PENDING, [1u8]).unwrap();
        assert!(events.have_come());
        events.take();
        assert!(!events.have_come());
        assert!(events.has_fired(70) && events.take_fired(70) && !events.take_fired(71));
        assert_eq!(shared.as_foreign().read_array(UPCALL_PENDING), Some([0]));
        assert_eq!(events.form(), "two-level");

        let events = Events::open(shared, true);
        let (low, high) = (70, WORDS_PER_PAGE as u32 + 1);
        events.listen(low);
        events.listen(high);
        shared.write_array(UPCALL_PENDING, [1u8]).unwrap();
        let play = |fifo: &Fifo| {
            // One queue with both channels, as Xen links them.
            fifo.array[0].store_u32(low as usize * 4, PENDING | LINKED | high, Relaxed).unwrap();
            fifo.array[1].store_u32(4, PENDING | LINKED, Relaxed).unwrap();
            fifo.control.store_u32(8 + 7 * 4, low, Relaxed).unwrap();
            fifo.control.store_u32(0, 1 << 7, Relaxed).unwrap();
        };
        play(events.fifo.borrow().as_ref().unwrap());
        events.take();
        assert!(events.take_fired(low) && events.take_fired(high) && !events.has_left());
        assert_eq!(shared.as_foreign().read_array(UPCALL_PENDING), Some([0]));
        assert_eq!(events.form(), "FIFO");
        // Nothing of the domain that was saved is left in a restored one, and its pages are used
        // again.
        play(events.fifo.borrow().as_ref().unwrap());
        events.restored();
        events.take();
        assert!(!events.has_fired(low) && events.fifo.borrow().as_ref().unwrap().array.len() == 2);
    }
}
