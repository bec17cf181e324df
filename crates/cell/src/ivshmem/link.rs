//! A link from an app's point of view: sections, state words, doorbells, and how to wait for a
//! peer.
//!
//! Nothing here knows a protocol. What peers write is untrusted: read a field once, check it, use
//! it. The views ([`Foreign`], [`ForeignMut`]) give no reference into the memory.
//!
//! # Waiting
//!
//! Rings of a doorbell merge and are not stored. So a waiter always waits for something in the
//! memory: it looks, and if the thing is not there, it waits until a peer has rung and looks again.
//! A ring between the look and the wait is not lost. Interrupts come in only while the cell sleeps,
//! and the count of rings is compared with the one before the look. On a link without doorbell the
//! wait ends when it is time to look again ([`super::poll_interval`]).
//!
//! [`Link::until`] lets the network and other tasks run meanwhile. [`Link::until_alone`] does not:
//! the processor does nothing else until the event is there or the time is up. That saves the way
//! through the main loop. With `spin` the processor does not even sleep.

use super::device::Device;
use super::first_ring::FirstRing;
use super::poll_interval::PollInterval;
use crate::Net;
use crate::stack::NetInner;
use alloc::rc::Rc;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::fmt;
use core::future::poll_fn;
use core::task::{Poll, Waker};
use tombolo_ring::mem::{Foreign, ForeignMut};

/// A link is not to be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkError {
    /// No device has a link of this name.
    NotFound {
        /// The name that was asked for.
        name: String,
        /// The names of the links that are there and free.
        free: Vec<String>,
    },
}

impl fmt::Display for LinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LinkError::NotFound { name, free } = self;
        write!(f, "no ivshmem link {name:?} is free; ")?;
        if free.is_empty() { f.write_str("there is none") } else { write!(f, "there are {free:?}") }
    }
}

/// The links of the cell: those that are not taken yet, and those that a task waits for.
#[derive(Default)]
pub(crate) struct Links {
    free: RefCell<Vec<Device>>,
    taken: RefCell<Vec<Rc<Taken>>>,
}

/// A link in use.
struct Taken {
    device: Device,
    /// Rings before the last look.
    seen: Cell<u64>,
    poll_interval: Cell<PollInterval>,
    /// Something was found or sent since the last look that found nothing.
    has_moved: Cell<bool>,
    /// When to look again.
    look_at_ns: Cell<Option<u64>>,
    first_ring: Cell<FirstRing>,
    waker: RefCell<Option<Waker>>,
}

impl Taken {
    /// Whether a peer has rung since the last look, or it is time to look.
    fn is_due(&self, now_ns: u64) -> bool {
        let has_rung = self.device.rings().is_some_and(|rings| rings != self.seen.get());
        has_rung || self.look_at_ns.get().is_some_and(|at| at <= now_ns)
    }
}

impl Links {
    pub(crate) fn new(free: Vec<Device>) -> Links {
        Links { free: RefCell::new(free), taken: RefCell::default() }
    }

    /// Wakes the tasks that have to look.
    pub(crate) fn wake(&self, now_ns: u64) {
        for link in self.taken.borrow().iter() {
            if link.waker.borrow().is_some()
                && link.is_due(now_ns)
                && let Some(waker) = link.waker.take()
            {
                waker.wake();
            }
        }
    }

    /// When the next task has to look; `None` where all are rung for.
    pub(crate) fn look_at_ns(&self) -> Option<u64> {
        let taken = self.taken.borrow();
        taken.iter().filter(|link| link.waker.borrow().is_some()).filter_map(|link| link.look_at_ns.get()).min()
    }

    fn take(&self, name: &str, shared: &NetInner) -> Result<Rc<Taken>, LinkError> {
        let mut free = self.free.borrow_mut();
        let Some(at) = free.iter().position(|device| device.name() == name) else {
            let free = free.iter().map(|device| device.name().to_string()).collect();
            return Err(LinkError::NotFound { name: name.to_string(), free });
        };
        let device = free.remove(at);
        let link = Rc::new(Taken {
            seen: Cell::new(device.rings().unwrap_or(0)),
            has_moved: Cell::new(true),
            poll_interval: Cell::new(PollInterval::new(shared.config.pauses)),
            look_at_ns: Cell::new(None),
            first_ring: Cell::new(FirstRing::awaited(device.rings().unwrap_or(0))),
            waker: RefCell::new(None),
            device,
        });
        self.taken.borrow_mut().push(link.clone());
        Ok(link)
    }
}

/// A link over memory that this cell shares with others; from [`Net::link`]. It stays taken for as
/// long as the cell lives. A clone refers to the same one; one task at a time can wait for it.
#[derive(Clone)]
pub struct Link {
    net: Net,
    taken: Rc<Taken>,
}

impl Link {
    pub(crate) fn open(net: &Net, name: &str) -> Result<Link, LinkError> {
        let shared = net.shared();
        Ok(Link { net: net.clone(), taken: shared.links.take(name, shared)? })
    }

    pub(crate) fn net(&self) -> &Net {
        &self.net
    }

    /// The name in the region's header, as the fabric file gives it.
    pub fn name(&self) -> &str {
        self.taken.device.name()
    }

    /// The number of the protocol that the link was made for: 0x4001 for
    /// [`Channel`](crate::Channel), 0x4000 to 0x7fff for any of an app's own.
    pub fn protocol(&self) -> u32 {
        self.taken.device.protocol()
    }

    /// This peer's number, from 0.
    pub fn own_id(&self) -> u32 {
        self.taken.device.own_id()
    }

    /// How many peers there can be.
    pub fn max_peers(&self) -> u32 {
        self.taken.device.max_peers()
    }

    /// Whether peers can ring each other; if not, they have to look.
    pub fn has_doorbell(&self) -> bool {
        self.taken.device.rings().is_some()
    }

    /// How often peers have rung.
    pub fn rings(&self) -> u64 {
        self.taken.device.rings().unwrap_or(0)
    }

    /// Another peer is there, whose first rings may get lost.
    pub(crate) fn peer_joined(&self) {
        self.taken.first_ring.set(FirstRing::awaited(self.rings()));
    }

    /// The section that this peer writes and all read.
    pub fn own_output(&self) -> ForeignMut<'static> {
        self.taken.device.own_output()
    }

    /// The section that `peer` writes; `None` where there can be no such peer.
    pub fn output(&self, peer: u32) -> Option<Foreign<'static>> {
        self.taken.device.output(peer)
    }

    /// The section that all peers write; empty where the link has none.
    pub fn shared(&self) -> ForeignMut<'static> {
        self.taken.device.shared()
    }

    /// The state word of `peer`; 0, which means "not there", where there can be no such peer.
    pub fn state(&self, peer: u32) -> u32 {
        self.taken.device.state(peer)
    }

    /// Writes the own state word, after all that was written before, and rings vector 0 of all
    /// others.
    pub fn set_state(&self, value: u32) {
        self.taken.device.set_state(value);
    }

    pub(crate) fn assert_state(&self, value: u32) {
        self.taken.device.assert_state(value);
    }

    /// Rings `vector` of `peer`, after all that was written before. Nothing happens where it is not
    /// there or has no doorbell.
    pub fn ring(&self, peer: u32, vector: u16) {
        self.taken.device.ring(peer, vector);
    }

    /// Rings the vector of `peer` that means data: 1, or 0 where there is only one.
    pub fn ring_traffic(&self, peer: u32) {
        self.taken.device.ring_traffic(peer);
    }

    /// Nanoseconds since the start, as [`Net::now_ns`].
    pub fn now_ns(&self) -> u64 {
        self.net.now_ns()
    }

    fn before_look(&self) {
        self.taken.seen.set(self.rings());
    }

    /// Sets when to look next, after a look that found nothing.
    fn after_look(&self) {
        let now_ns = self.now_ns();
        if self.has_doorbell() {
            let Taken { look_at_ns, first_ring, has_moved, .. } = &*self.taken;
            let mut first = first_ring.get();
            // Of several peers it is not known which of them has rung.
            let is_heard = first.has_come(self.rings()) && self.max_peers() == 2;
            look_at_ns.set(first.next_look(now_ns, is_heard, has_moved.replace(false)));
            first_ring.set(first);
        } else {
            let mut poll_interval = self.taken.poll_interval.get();
            self.taken.look_at_ns.set(Some(poll_interval.next(now_ns)));
            self.taken.poll_interval.set(poll_interval);
        }
    }

    /// Says that something was sent or found, so that a link without doorbell is looked at often
    /// for a while.
    pub fn expect_answer(&self) {
        self.taken.has_moved.set(true);
        if !self.has_doorbell() {
            let mut poll_interval = self.taken.poll_interval.get();
            poll_interval.busy(self.now_ns());
            self.taken.poll_interval.set(poll_interval);
        }
    }

    /// Has the task that waits for the link look again: another one has looked in its place.
    pub(crate) fn look_again(&self) {
        if let Some(waker) = self.taken.waker.take() {
            waker.wake();
        }
    }

    /// Looks until `look` finds something, and gives that. The cell sleeps between two looks, and
    /// the network and other tasks have their turns; with `busy_poll_us=` on the command line it
    /// goes on looking for so long first.
    pub async fn until<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        let busy_poll_ns = self.net.shared().config.busy_poll_ns;
        let mut busy_until_ns = None;
        poll_fn(|cx| {
            loop {
                self.before_look();
                if let Some(found) = look() {
                    self.expect_answer();
                    return Poll::Ready(found);
                }
                if busy_poll_ns == 0 {
                    break;
                }
                let now_ns = self.now_ns();
                if now_ns >= *busy_until_ns.get_or_insert(now_ns + busy_poll_ns) {
                    break;
                }
                core::hint::spin_loop();
            }
            self.after_look();
            *self.taken.waker.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Looks until `look` finds something, or until `until_ns`; nothing else runs meanwhile,
    /// neither the network nor another task. With `spin` the processor does not sleep between two
    /// looks.
    pub fn until_alone<T>(&self, until_ns: u64, spin: bool, mut look: impl FnMut() -> Option<T>) -> Option<T> {
        loop {
            self.before_look();
            if let Some(found) = look() {
                self.expect_answer();
                return Some(found);
            }
            let now_ns = self.now_ns();
            if now_ns >= until_ns {
                return None;
            }
            if spin {
                core::hint::spin_loop();
                continue;
            }
            self.after_look();
            let wake_ns = self.taken.look_at_ns.get().map_or(until_ns, |at| at.min(until_ns));
            self.net.shared().platform.sleep(Some(wake_ns));
        }
    }
}
