//! The cell as a domain of Xen (PVH): what takes the place of a machine's devices.
//!
//! [`Domain`] holds the shared information page (events, clock), the timer, the grant table and the
//! connection to XenStore. It exists only on Xen. Hypercalls are in `machine/hypercall.rs`, which
//! has all that is unsafe about them.
//!
//! # Events
//!
//! See [`events`].
//!
//! # Time
//!
//! The rate of the time-stamp counter is read once from Xen's clock page. The timer fires once, and
//! is set only when something waits for a time. An idle cell does not tick.
//!
//! # Save and restore
//!
//! `xl save` asks for a suspend in `control/shutdown`. The cell acknowledges it and stops
//! ([`hypercall::suspend`]). After `xl restore` another domain with the same memory continues. Its
//! shared information page, event channels, grant table, console and XenStore are new.
//! [`Domain::restored`] connects to them again, in that order. Devices notice by
//! [`Domain::restores`] and connect again; the stack above keeps its connections. The clock is
//! stopped in between. A domain that continues after all (`xl save -c`, or a save that failed) has
//! lost nothing.
//!
//! Limits: one processor; at most 131,072 event channels, or 4096 in the two-level form.

mod addresses;
pub(crate) mod console;
mod events;
mod front;
pub(crate) mod grants;
#[cfg(feature = "hostile")]
pub mod hostile;
pub(crate) mod net;
mod queue;
mod segments;
pub(crate) mod store;
mod vif;

use crate::machine::clock::{Clock, PvRate};
use crate::machine::exit::leave_domain;
use crate::machine::{console as machine_console, cpu, dma, hypercall, wait_for_interrupt};
use crate::println;
use alloc::boxed::Box;
use alloc::vec::Vec;
use console::ConsoleRing;
use core::cell::{Cell, RefCell};
use core::sync::atomic::Ordering::Acquire;
use core::task::Waker;
use events::Events;
use grants::{Access, Grants};
use hypercall::{Param, ShutdownReason};
use store::{Connection, Reply};
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::xen::bytes::BytePage;
use tombolo_ring::xen::store::{Request, StoreError};

const PAGE: usize = 4096;

/// Where the toolstack asks for a shutdown, also the token of that watch; and what a domain says
/// that it heeds there.
const SHUTDOWN: &str = "control/shutdown";
const FEATURES: [&str; 3] = ["control/feature-poweroff", "control/feature-reboot", "control/feature-suspend"];
/// Any value but 0: to the toolstack it says that the domain has drivers for Xen, and a domain
/// without such it would resume as if it had been restored (xc_resume.c). Events come by the
/// processor's own vector all the same.
const ENLIGHTENED: u64 = 1;
const NO_STORE: StoreError = StoreError::Other;

/// Offset in the shared information page (public/xen.h, 64 bit); processor 0's `vcpu_info` comes
/// first.
const TIME: usize = 32;
const TIME_BYTES: usize = 32;

/// A clock page's reading: at counter value `tsc` it was `system_ns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TimeInfo {
    tsc: u64,
    system_ns: u64,
    rate: PvRate,
}

impl TimeInfo {
    /// Parses `vcpu_time_info` (public/xen.h). `None` while Xen is writing it, which the version's
    /// lowest bit says.
    fn parse(bytes: &[u8; TIME_BYTES]) -> Option<TimeInfo> {
        let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
        let multiplier = u32::from_le_bytes(core::array::from_fn(|i| bytes[24 + i]));
        let rate = PvRate { multiplier, shift: bytes[28] as i8 };
        (bytes[0] & 1 == 0).then_some(TimeInfo { tsc: word(8), system_ns: word(16), rate })
    }

    /// Xen's system time at counter value `tsc`.
    fn at(&self, tsc: u64) -> u64 {
        self.system_ns + self.rate.ns(tsc.saturating_sub(self.tsc))
    }
}

/// Xen's timer, which fires once. It keeps Xen's time, which the cell's clock may be a little
/// behind: it fires before `at_ns` by the cell's clock, too, and only its event says that it has
/// fired.
#[derive(Default)]
struct Timer {
    /// Its event channel.
    port: Cell<u32>,
    /// When it fires, by the cell's clock; 0 where it is not set.
    at_ns: Cell<u64>,
}

impl Timer {
    /// It has fired, or Xen has forgotten it.
    fn clear(&self) {
        self.at_ns.set(0);
    }

    /// Whether it will fire by `until_ns` as it is set. Firing earlier than asked costs one turn of
    /// the main loop; setting it again costs a hypercall.
    fn fires_by(&self, until_ns: u64, now_ns: u64) -> bool {
        self.at_ns.get() > now_ns && self.at_ns.get() <= until_ns
    }
}

/// This domain, as Xen set it up.
pub(crate) struct Domain {
    pub(crate) clock: Clock,
    shared: ForeignMut<'static>,
    events: Events,
    map: Box<MapShared>,
    console_port: Cell<Option<u32>>,
    /// Waits for input of the console.
    console_reader: RefCell<Option<Waker>>,
    store: Option<RefCell<Connection>>,
    grants: RefCell<Grants>,
    timer: Timer,
    vector: Cell<u8>,
    restores: Cell<u32>,
}

/// Maps memory of Xen's, by address and length.
type MapShared = dyn Fn(u64, usize) -> Option<ForeignMut<'static>>;

/// A page that the toolstack has set up, and its event channel.
fn byte_page(map: &MapShared, page: Param, port: Param) -> Option<(BytePage<'static>, u32)> {
    let address = hypercall::param(page)?.checked_mul(PAGE as u64)?;
    let page = BytePage::new(map(address, PAGE)?).ok()?;
    Some((page, u32::try_from(hypercall::param(port)?).ok()?))
}

/// Takes the console; its event channel.
fn open_console(map: &MapShared) -> Option<u32> {
    let (page, port) = byte_page(map, Param::ConsolePage, Param::ConsolePort)?;
    machine_console::use_ring(ConsoleRing::new(page, port));
    Some(port)
}

fn open_store(map: &MapShared) -> Option<Connection> {
    let (page, port) = byte_page(map, Param::StorePage, Param::StorePort)?;
    Some(Connection::new(page, port))
}

/// Has Xen share its information in the place of `page`.
fn share_info(page: ForeignMut<'static>) {
    if let Err(refused) = hypercall::map_shared_info(page) {
        panic!("Xen refused the shared information page: {refused:?}");
    }
}

impl Domain {
    /// Maps what Xen shares. `start` is the counter at the cell's first instruction in Rust;
    /// `wants_fifo` is false for two-level event channels; `map` maps a page of Xen's.
    ///
    /// # Panics
    /// Where Xen refuses what every domain may do.
    pub(crate) fn open(
        start: u64,
        command_line_khz: Option<u64>,
        wants_fifo: bool,
        map: impl Fn(u64, usize) -> Option<ForeignMut<'static>> + 'static,
    ) -> Domain {
        let map: Box<MapShared> = Box::new(map);
        let console_port = open_console(&map);
        let store = open_store(&map).map(RefCell::new);
        let shared = dma::alloc(PAGE);
        share_info(shared);
        let events = Events::open(shared, wants_fifo);
        let rate = read_time(shared).map(|time| time.rate);
        hypercall::stop_periodic_timer();
        Domain {
            clock: Clock::new(start, command_line_khz, rate),
            shared,
            events,
            map,
            console_port: Cell::new(console_port),
            console_reader: RefCell::default(),
            store,
            grants: RefCell::default(),
            timer: Timer::default(),
            vector: Cell::new(0),
            restores: Cell::new(0),
        }
    }

    /// A domain without Xen, for a backend that a test plays.
    #[cfg(test)]
    pub(crate) fn played() -> Domain {
        let rate = PvRate { multiplier: 1 << 31, shift: 0 };
        let shared = dma::alloc(PAGE);
        Domain {
            clock: Clock::new(0, None, Some(rate)),
            shared,
            events: Events::open(shared, true),
            map: Box::new(|_, _| None),
            console_port: Cell::new(None),
            console_reader: RefCell::default(),
            store: None,
            grants: RefCell::default(),
            timer: Timer::default(),
            vector: Cell::new(0),
            restores: Cell::new(0),
        }
    }

    /// Has events raise `vector`, and opens the channels that every domain has.
    ///
    /// # Panics
    /// Where Xen refuses what every domain may do.
    pub(crate) fn take_interrupt(&self, vector: u8) {
        self.vector.set(vector);
        // Refused by a Xen that knows no such domains, where the toolstack does not ask for it
        // either.
        let _ = hypercall::set_param(Param::CallbackVia, ENLIGHTENED);
        let timer = hypercall::set_upcall_vector(vector).and_then(|()| hypercall::bind_timer());
        match timer {
            Ok(port) => {
                self.timer.port.set(port);
                self.listen(port);
            }
            Err(refused) => panic!("Xen refused the event vector or the timer: {refused:?}"),
        }
        if let Some(port) = self.console_port.get() {
            self.listen(port);
        }
        if let Some(store) = &self.store {
            self.listen(store.borrow().port());
            let features = FEATURES.map(|path| Request::Write(path, b"1"));
            self.ask(&features);
            self.ask(&[Request::Watch(SHUTDOWN, SHUTDOWN)]);
        }
    }

    /// The first step of each turn: takes events, and does what the toolstack asks for.
    pub(crate) fn begin_turn(&self) {
        self.events.take();
        if self.console_port.get().is_some_and(|port| self.has_fired(port))
            && let Some(reader) = self.console_reader.borrow_mut().take()
        {
            reader.wake();
        }
        let Some(store) = &self.store else { return };
        let port = store.borrow().port();
        if self.has_fired(port) {
            store.borrow_mut().turn(None);
        }
        if self.take_watch(SHUTDOWN) {
            self.obey();
        }
    }

    /// Does what `control/shutdown` says, if anything (docs/misc/xenstore-paths.pandoc).
    fn obey(&self) {
        let Some(Ok(word)) = self.ask(&[Request::Read(SHUTDOWN)]).pop() else { return };
        let reason = match word.as_slice() {
            b"poweroff" | b"halt" => ShutdownReason::Poweroff,
            b"reboot" => ShutdownReason::Reboot,
            b"suspend" => ShutdownReason::Suspend,
            _ => return,
        };
        // An empty node says that the wish was heard.
        self.ask(&[Request::Write(SHUTDOWN, b"")]);
        if reason == ShutdownReason::Suspend {
            return self.suspend();
        }
        println!(
            "tombolo-cell: {} by the toolstack",
            if reason == ShutdownReason::Reboot { "reboot" } else { "powered off" }
        );
        leave_domain(reason)
    }

    /// Stops until the toolstack lets this domain go on, or restores it as another one.
    fn suspend(&self) {
        // What is in the ring is not restored.
        machine_console::drain();
        let now_ns = self.clock.now_ns();
        if !hypercall::suspend() {
            self.restored(now_ns);
        }
    }

    /// Takes up what Xen keeps for this domain, which is a new one; `now_ns` is when the old one
    /// stopped.
    fn restored(&self, now_ns: u64) {
        // First, so that a panic can be read.
        self.console_port.set(open_console(&self.map));
        share_info(self.shared);
        self.events.restored();
        self.clock.resume(now_ns, read_time(self.shared).map(|time| time.rate));
        self.timer.clear();
        hypercall::stop_periodic_timer();
        self.grants.borrow_mut().restored();
        if let (Some(store), Some(opened)) = (&self.store, open_store(&self.map)) {
            *store.borrow_mut() = opened;
        }
        self.restores.set(self.restores.get() + 1);
        self.take_interrupt(self.vector.get());
        println!("tombolo-cell: restored");
    }

    /// The form of its event channels, as it is printed.
    pub(crate) fn event_form(&self) -> &'static str {
        self.events.form()
    }

    /// How often this domain was restored.
    pub(crate) fn restores(&self) -> u32 {
        self.restores.get()
    }

    /// Takes bytes that were typed at the console; where there are none, `reader` is woken when
    /// there are.
    pub(crate) fn read_console(&self, to: &mut [u8], reader: &Waker) -> usize {
        let read = machine_console::read(to);
        if read == 0 {
            *self.console_reader.borrow_mut() = Some(reader.clone());
        }
        read
    }

    /// Whether the domain has a console.
    pub(crate) fn has_console(&self) -> bool {
        self.console_port.get().is_some()
    }

    /// Asks XenStore, and waits for the replies: one for each request.
    pub(crate) fn ask(&self, requests: &[Request<'_>]) -> Vec<Reply> {
        let Some(store) = &self.store else { return requests.iter().map(|_| Err(NO_STORE)).collect() };
        let mut asked = store.borrow_mut().ask(requests);
        let deadline_ns = self.clock.now_ns() + store::TIMEOUT_NS;
        loop {
            store.borrow_mut().turn(Some(&mut asked));
            if asked.is_answered() || store.borrow().is_closed() {
                return asked.into_replies();
            }
            if self.clock.now_ns() >= deadline_ns {
                store.borrow_mut().close(&"no reply in time");
            }
            self.doze(Some(deadline_ns));
            self.events.take();
        }
    }

    /// Whether an event came for the watch with this token.
    pub(crate) fn take_watch(&self, token: &str) -> bool {
        self.store.as_ref().is_some_and(|store| store.borrow_mut().take_event(token))
    }

    /// Lets another domain use a page; see [`Grants::grant`].
    pub(crate) fn grant(&self, domain: u16, page: ForeignMut<'static>, access: Access) -> Option<u32> {
        self.grants.borrow_mut().grant(domain, page, access)
    }

    /// As `grant`, for a frame by its number.
    #[cfg(feature = "hostile")]
    pub(crate) fn grant_frame(&self, domain: u16, frame: u64) -> Option<u32> {
        self.grants.borrow_mut().grant_frame(domain, u32::try_from(frame).ok()?, Access::ReadWrite)
    }

    /// Takes a grant back; see [`Grants::end`].
    pub(crate) fn end_grant(&self, reference: u32) -> bool {
        self.grants.borrow_mut().end(reference)
    }

    /// Lets a channel's events through.
    pub(crate) fn listen(&self, port: u32) {
        self.events.listen(port);
    }

    /// Whether a channel has fired since this was asked last.
    pub(crate) fn has_fired(&self, port: u32) -> bool {
        self.events.take_fired(port)
    }

    /// Sleeps until an event comes, or until `until_ns`. It may wake early. Where XenStore told of
    /// something, or something was typed, while the turn waited for a reply, nothing would wake it
    /// again: then it does not sleep, and the next turn takes the event.
    pub(crate) fn sleep(&self, until_ns: Option<u64>) {
        let is_told = self.store.as_ref().is_some_and(|store| store.borrow().has_events());
        let is_typed = self.console_port.get().is_some_and(|port| self.events.has_fired(port));
        if !is_told && !is_typed {
            self.doze(until_ns);
        }
    }

    fn doze(&self, until_ns: Option<u64>) {
        if self.events.has_left() {
            return;
        }
        let now_ns = self.clock.now_ns();
        if until_ns.is_some_and(|until_ns| until_ns <= now_ns) || self.events.have_come() {
            return;
        }
        let time = until_ns.and_then(|_| read_time(self.shared));
        let at = until_ns.zip(time).map(|(until_ns, time)| time.at(cpu::tsc()) + (until_ns - now_ns));
        // Without the time it would sleep too long.
        if at.is_some() == until_ns.is_some() && self.events.poll(at).is_ok() {
            return;
        }
        if let Some(until_ns) = until_ns {
            if self.has_fired(self.timer.port.get()) {
                self.timer.clear();
            }
            if !self.timer.fires_by(until_ns, now_ns)
                && let Some(time) = read_time(self.shared)
            {
                hypercall::set_timer(time.at(cpu::tsc()) + (until_ns - now_ns));
                self.timer.at_ns.set(until_ns);
            }
        }
        if !self.events.have_come() {
            wait_for_interrupt();
        }
    }
}

/// Reads the clock page: again while Xen writes it, which is over at once.
fn read_time(shared: ForeignMut<'static>) -> Option<TimeInfo> {
    const TRIES: u32 = 1000;
    (0..TRIES).find_map(|_| {
        let version = shared.as_foreign().load_u32(TIME, Acquire)?;
        let time = TimeInfo::parse(&shared.as_foreign().read_array(TIME)?)?;
        (shared.as_foreign().load_u32(TIME, Acquire)? == version).then_some(time)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> [u8; TIME_BYTES] {
        let mut bytes = [0xa5; TIME_BYTES];
        bytes[..4].copy_from_slice(&6u32.to_le_bytes());
        bytes[8..16].copy_from_slice(&1_000_000u64.to_le_bytes());
        bytes[16..24].copy_from_slice(&5_000_000_000u64.to_le_bytes());
        // 2 GHz: half a nanosecond a tick.
        bytes[24..28].copy_from_slice(&(1u32 << 31).to_le_bytes());
        bytes[28] = 0;
        bytes
    }

    #[test]
    fn the_clock_page_gives_system_time() {
        let time = TimeInfo::parse(&sample()).unwrap();
        assert_eq!(time.at(1_000_000), 5_000_000_000);
        assert_eq!(time.at(3_000_000), 5_001_000_000);
        // A counter that another processor has read earlier.
        assert_eq!(time.at(0), 5_000_000_000);
        let mut slow = sample();
        slow[28] = (-1i8) as u8;
        assert_eq!(TimeInfo::parse(&slow).unwrap().at(5_000_000), 5_001_000_000);
        slow[28] = 1;
        assert_eq!(TimeInfo::parse(&slow).unwrap().at(2_000_000), 5_001_000_000);
    }

    #[test]
    fn a_page_that_is_being_written_or_makes_no_sense_is_not_believed() {
        let mut odd = sample();
        odd[0] = 7;
        assert_eq!(TimeInfo::parse(&odd), None);
        let mut wild = sample();
        wild[28] = 127;
        let time = TimeInfo::parse(&wild).unwrap();
        assert_eq!(time.at(u64::MAX), time.system_ns);
    }

    #[test]
    fn a_timer_that_fired_early_is_set_again() {
        let timer = Timer::default();
        assert!(!timer.fires_by(100, 50));
        timer.at_ns.set(100);
        assert!(timer.fires_by(100, 50) && timer.fires_by(200, 50));
        // Later than is wanted, or over.
        assert!(!timer.fires_by(99, 50) && !timer.fires_by(200, 100));
        // Its event came one nanosecond before the cell's clock says so; nothing would wake the
        // cell any more.
        timer.clear();
        assert!(!timer.fires_by(100, 99));
    }
}
