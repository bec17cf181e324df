//! Between a port's control thread and its worker: one connection handed over at a time, or
//! withdrawn, and what the frontend changes about it meanwhile.

use super::connection::{Connection, Requested};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tombolo_shm::doorbell::Doorbell;
use tombolo_switch::port::Fault;
use tombolo_worker::reactor::Registration;

/// The port is gone.
#[derive(Debug)]
pub(super) struct Gone;

#[derive(Default)]
struct ConnectionSlot {
    /// What the worker is to run from now on; `Some(None)` is nothing.
    next: Option<Option<Box<Connection>>>,
    /// What it ran before, once it has taken `next`.
    old: Option<Option<Box<Connection>>>,
    /// What its connection is to do from now on.
    requested: Option<Requested>,
    /// The worker gave its connection up, and why.
    given_up: Option<(Box<Connection>, Fault)>,
    gone: bool,
    /// What the control thread has to say, for status.
    state: String,
}

pub(super) struct Exchange {
    /// Whether `next` or `requested` wait. A hint to look; the slot's lock orders everything.
    waiting: AtomicBool,
    slot: Mutex<ConnectionSlot>,
    taken: Condvar,
    registration: Registration,
    /// Wakes the control thread.
    doorbell: Arc<Doorbell>,
}

impl Exchange {
    pub(super) fn new(registration: Registration, doorbell: Arc<Doorbell>) -> Exchange {
        let (waiting, taken) = (AtomicBool::new(false), Condvar::new());
        let slot = Mutex::new(ConnectionSlot { state: "looking for the domain".into(), ..ConnectionSlot::default() });
        Exchange { waiting, slot, taken, registration, doorbell }
    }

    pub(super) fn registration(&self) -> &Registration {
        &self.registration
    }

    pub(super) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionSlot> {
        // A panic with the lock held leaves a slot that is still whole: fields are only moved in
        // and out.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Control side: has the worker run `next` and nothing else. Blocks until it does. Returns what
    /// it ran before, which is released here, since unmapping takes long.
    pub(super) fn hand_over(&self, next: Option<Box<Connection>>) -> Result<Option<Box<Connection>>, Gone> {
        let put = |slot: &mut ConnectionSlot| (slot.next, slot.old) = (Some(next), None);
        self.ask(put, |slot| slot.old.is_none()).old.take().ok_or(Gone)
    }

    /// Control side: has the worker's connection do what the frontend asks for now. Blocks until it
    /// does, or has none.
    pub(super) fn change(&self, requested: Requested) -> Result<(), Gone> {
        let slot = self.ask(|slot| slot.requested = Some(requested), |slot| slot.requested.is_some());
        if slot.requested.is_some() { Err(Gone) } else { Ok(()) }
    }

    /// Leaves something for the worker, and waits until it has taken that, or the port is gone.
    fn ask(
        &self,
        put: impl FnOnce(&mut ConnectionSlot),
        waits: impl Fn(&ConnectionSlot) -> bool,
    ) -> MutexGuard<'_, ConnectionSlot> {
        let mut slot = self.lock();
        put(&mut slot);
        // Relaxed: the worker that sees it takes the lock, and the wake-up makes it look.
        self.waiting.store(true, Ordering::Relaxed);
        self.registration.wake();
        self.taken.wait_while(slot, |slot| waits(slot) && !slot.gone).unwrap_or_else(PoisonError::into_inner)
    }

    /// Control side: what the worker gave up, and why.
    pub(super) fn given_up(&self) -> Option<(Box<Connection>, Fault)> {
        self.lock().given_up.take()
    }

    /// Control side: whether the port is gone.
    pub(super) fn is_closed(&self) -> bool {
        self.lock().gone
    }

    /// Control side: what it is at, for status.
    pub(super) fn say(&self, state: String) {
        self.lock().state = state;
    }

    /// What the control thread said last.
    pub(super) fn state(&self) -> String {
        self.lock().state.clone()
    }

    /// Worker side: takes what waits, if anything does.
    #[inline]
    pub(super) fn serve(&self, running: &mut Option<Box<Connection>>) {
        // Relaxed: a hint; see `ask`.
        if self.waiting.load(Ordering::Relaxed) {
            let mut slot = self.lock();
            self.waiting.store(false, Ordering::Relaxed);
            if let Some(next) = slot.next.take() {
                slot.old = Some(std::mem::replace(running, next));
            }
            if let Some(requested) = slot.requested.take()
                && let Some(connection) = running
            {
                connection.change(requested);
            }
            self.taken.notify_one();
        }
    }

    /// Worker side: the connection is broken; the control thread closes it, or attaches again.
    pub(super) fn give_up(&self, connection: Box<Connection>, fault: Fault) {
        self.lock().given_up = Some((connection, fault));
        self.doorbell.ring();
    }

    /// The port is going: the control thread hears so.
    pub(super) fn close(&self) {
        self.lock().gone = true;
        self.taken.notify_all();
        self.doorbell.ring();
    }
}
