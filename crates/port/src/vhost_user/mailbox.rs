//! Between a port's control thread and the worker that runs its rings: one command at a time, each
//! with an answer.
//!
//! The control thread blocks in [`Mailbox::post`] until the worker has carried the command out,
//! since the protocol demands that (a ring that was stopped is not touched again, memory that was
//! replaced is not mapped any more). The worker never blocks: it looks at one flag per turn and
//! takes the command when there is one.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tombolo_ring::virtio::QueueConfig;
use tombolo_shm::doorbell::Doorbell;
use tombolo_switch::port::Fault;

use super::memory::GuestTable;
use tombolo_worker::reactor::{Registration, Watch};

/// A ring to be run.
#[derive(Debug)]
pub(super) struct StartRing {
    pub(super) index: usize,
    pub(super) queue: QueueConfig,
    /// The index that the frontend names; see `DeviceQueue::resume`.
    pub(super) base: u16,
    pub(super) call: Option<Arc<Doorbell>>,
    /// Wakes the worker when the guest kicks; none for rings whose kicks say nothing (buffers for
    /// frames to the guest).
    pub(super) kick: Option<Watch>,
    pub(super) enabled: bool,
}

#[derive(Debug)]
pub(super) enum Command {
    /// A frontend is there; the stream is for ending the connection from the worker's side.
    Connected(UnixStream),
    /// The features agreed on.
    Features(u64),
    /// New guest memory. Comes while no ring runs.
    Memory(Arc<GuestTable>),
    Start(Box<StartRing>),
    Stop {
        index: usize,
    },
    Enable {
        index: usize,
        enabled: bool,
    },
    Call {
        index: usize,
        call: Option<Arc<Doorbell>>,
    },
    /// The connection is gone; with the fault, if the frontend broke the protocol.
    Closed(Option<Fault>),
}

/// What the worker says to a command.
#[derive(Debug)]
pub(super) enum Answer {
    Done,
    /// The available index of a stopped ring.
    Base(u16),
    /// Memory that is not used any more, to be unmapped by the control thread: it takes long.
    Old(Arc<GuestTable>),
    /// Why it was not carried out.
    Refused(String),
}

/// The port is gone.
#[derive(Debug)]
pub(super) struct Gone;

#[derive(Debug, Default)]
struct MailboxSlot {
    command: Option<Command>,
    answer: Option<Answer>,
    /// Memory that the worker gave up on its own.
    discarded: Vec<Arc<GuestTable>>,
    gone: bool,
}

#[derive(Debug)]
pub(super) struct Mailbox {
    /// Whether a command waits. A hint to look; the slot's lock orders everything.
    waiting: AtomicBool,
    slot: Mutex<MailboxSlot>,
    answered: Condvar,
    registration: Registration,
}

impl Mailbox {
    pub(super) fn new(registration: Registration) -> Mailbox {
        Mailbox { waiting: AtomicBool::new(false), slot: Mutex::default(), answered: Condvar::new(), registration }
    }

    pub(super) fn registration(&self) -> &Registration {
        &self.registration
    }

    fn lock(&self) -> MutexGuard<'_, MailboxSlot> {
        // A panic with the lock held leaves a slot that is still whole: fields are only moved in
        // and out.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Control side: has `command` carried out. Blocks until the worker has, or the port is gone.
    pub(super) fn post(&self, command: Command) -> Result<Answer, Gone> {
        let mut slot = self.lock();
        if slot.gone {
            return Err(Gone);
        }
        let discarded = std::mem::take(&mut slot.discarded);
        slot.command = Some(command);
        // Relaxed: the worker that sees it takes the lock, and the wake-up makes it look.
        self.waiting.store(true, Ordering::Relaxed);
        self.registration.wake();
        let mut slot = self.answered.wait_while(slot, |slot| slot.answer.is_none() && !slot.gone);
        let answer = match &mut slot {
            Ok(slot) => slot.answer.take(),
            Err(poisoned) => poisoned.get_mut().answer.take(),
        };
        drop(slot);
        drop(discarded);
        answer.ok_or(Gone)
    }

    /// Worker side: carries out what waits, if anything does.
    #[inline]
    pub(super) fn serve(&self, carry_out: impl FnOnce(Command) -> Answer) {
        // Relaxed: a hint; see `post`.
        if self.waiting.load(Ordering::Relaxed) {
            self.serve_waiting(carry_out);
        }
    }

    #[cold]
    fn serve_waiting(&self, carry_out: impl FnOnce(Command) -> Answer) {
        let command = {
            let mut slot = self.lock();
            self.waiting.store(false, Ordering::Relaxed);
            slot.command.take()
        };
        if let Some(command) = command {
            let answer = carry_out(command);
            self.lock().answer = Some(answer);
            self.answered.notify_one();
        }
    }

    /// Worker side: memory to be unmapped by the control thread, with its next command (it ends its
    /// connection).
    pub(super) fn discard(&self, memory: Arc<GuestTable>) {
        self.lock().discarded.push(memory);
    }

    /// The port is going: threads that wait, or post later, hear so.
    pub(super) fn close(&self) {
        self.lock().gone = true;
        self.answered.notify_all();
    }
}
