//! The poll loop: one thread, its ports, and the networks that they belong to.
//!
//! # What a worker does
//! A worker holds the ports that are *active*: those that were woken and have not yet been found
//! empty with their wake-ups on. Each active port gets one turn per round. In a turn, up to
//! *budget* frames are taken, decided on, and copied straight to their destinations. A port that
//! stays under budget is polled for the busy-poll time. Then it is armed, looked at once more (the
//! window is drawn in [`crate::port`]), and sleeps. Where a peer's memory fences may do nothing, it
//! is looked at once more a little later ([`crate::recheck`]). With no active port the worker
//! sleeps in its [`Waiter`]. With active ports it asks the waiter without sleeping, after each
//! round that moved nothing and at least every [`POLL_INTERVAL`]. So ports that wake up meanwhile
//! get their turns.
//!
//! ```text
//!            woken, timer, found by a re-check, or an answer left by a transmit
//!   asleep ------------------------------------------------> active --- budget used up: next round --+
//!     ^                                                        ^  |                                   |
//!     |   under budget, busy-poll time over, arm() == false    |  +-----------------------------------+
//!     +--------------------------------------------------------+
//! ```
//!
//! # Invariants
//! * What a turn costs beyond its budget, in copies and in segments made in software, is a debt of
//!   the port that sent the frames. The port pays a budget's worth per round in place of a turn. So
//!   a port that floods, or makes the worker segment its frames for other ports, gets no more of
//!   the worker's time than the rest. Its next turn takes fewer frames, so that no turn costs much
//!   more than a budget's worth of copies.
//! * A control command waits for one turn at most, and a wake-up for [`ROUND_TIME`] and one turn.
//! * A port's clock is never further behind than [`SERVICE_INTERVAL`] when it gets frames, even
//!   while it sleeps.
//! * All ports of a network belong to one worker, so the path of a frame takes no lock
//!   (docs/decisions/0001-one-worker-per-network.md).
//! * While a port's batch lives, its slot is out of the table. A frame never goes back to its own
//!   port, so the destinations are all in the table.
//! * A token is the index of a slot. It is reserved before the port is made and free again after it
//!   is removed.
//! * Every frame is accounted for; see [`crate::network`]. A frame that waits for a buffer of its
//!   destination (`overflow.rs`) is counted when it leaves that queue.
//!
//! # Failure
//! A [`Fault`] is recorded, and the port is reset. The worker then leaves it alone for
//! [`FAULT_PAUSE`], so that a peer that breaks its protocol over and over costs others nothing. A
//! port that does not account for every frame that it was given is treated the same way, and its
//! lost frames are counted.
//!
//! A panic inside a port's code is a defect in this project, and other ports must not pay for it.
//! It is caught at the call. The port's object is dropped, and its slot reports the panic's text. A
//! port that came with a [`Restart`] is restarted in the same slot, with its name, guard, pins and
//! counters. The pause before that doubles from [`FAULT_PAUSE`] to [`RESTART_PAUSE_MAX`] while the
//! port continues to panic; `restarts` counts the restarts. Any other port stays out of service
//! until the control side removes it. A panic in the loop itself ends the worker, and every
//! [`WorkerHandle`] call then says so.
//!
//! # Limits
//! 65,535 ports per worker. A batch has at most 65,535 frames; ordinary budgets are 32 to 256.

mod deliver;

use crate::Nanos;
use crate::capture::Tap;
use crate::class::Marking;
use crate::control::{Command, LoopCounters, NetworkId, Reserved, WorkerHandle, WorkerSettings};
use crate::counters::PortCounters;
use crate::drop::{Drops, Reason};
use crate::frame::Batch;
use crate::guard::Guard;
use crate::limit::{Meters, Rates, Storm};
use crate::merge::Merger;
use crate::network::{Network, Plan};
use crate::offload::Transformer;
use crate::overflow::Overflow;
use crate::port::{Carrier, Fault, FaultKind, Port, Rechecked};
use crate::recheck::Rechecks;
use crate::wait::{CONTROL, Token, Waiter};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;

/// With ports active, the waiter is asked at least this often. A question is a system call of about
/// 250 ns, so this is about 1 % of a core.
pub const POLL_INTERVAL: Nanos = Nanos(25_000);
/// A port that is polled without pause gets its control side looked after at least this often.
pub const SERVICE_INTERVAL: Nanos = Nanos(2_000_000);
/// A round that takes longer goes on after the waiter was asked and timers have run.
pub const ROUND_TIME: Nanos = Nanos(1_000_000);
/// Turns between two looks at the clock within a round.
const TURNS_PER_LOOK: usize = 4;
/// A port most of whose frames are lost to storm control gets this part of a budget per turn:
/// frames that are only dropped cost time too.
const STORM_PART: usize = 16;
/// Frames per turn of a port whose sending is limited.
const LIMITED_BUDGET: usize = 8;
/// How long a port is left alone after a fault.
pub const FAULT_PAUSE: Nanos = Nanos(10_000_000);
/// Longest pause before a port that panicked is restarted. A guest that finds a way to make it
/// panic so costs the worker one restart per second.
pub const RESTART_PAUSE_MAX: Nanos = Nanos(1_000_000_000);
/// A port that ran for this long since its restart starts with the shortest pause again.
const CALM: Nanos = Nanos(10_000_000_000);

/// Frames of a batch are numbered by 16 bits.
pub(crate) const MAX_BUDGET: usize = u16::MAX as usize;
/// The end of time: no deadline.
const NEVER: Nanos = Nanos(u64::MAX);

/// A worker; made with its [`WorkerHandle`], run on a thread of its own.
pub struct Worker {
    core: Core,
    commands: Receiver<Command>,
}

/// The state of a worker that commands work on.
pub(crate) struct Core {
    pub(crate) settings: WorkerSettings,
    pub(crate) seed: u64,
    pub(crate) slots: Vec<Option<Box<PortSlot>>>,
    pub(crate) networks: Vec<Option<NetworkSlot>>,
    pub(crate) counters: Arc<LoopCounters>,
    pub(crate) now: Nanos,
    /// When the first round began.
    pub(crate) started: Option<Nanos>,
    pub(crate) stopped: bool,
    /// Ports that want turns, the next one first.
    active: VecDeque<u16>,
    /// Those of them whose turns come between those of the others, and whether the last turn was
    /// one of theirs.
    urgent: VecDeque<u16>,
    was_urgent: bool,
    /// Ports that may be among `urgent`.
    urgent_ports: usize,
    ready: Vec<Token>,
    /// No deadline of any slot is earlier than this.
    earliest: Nanos,
    rechecks: Rechecks,
    /// Slots with frames that wait for a buffer of their peer, and when the first of them is tried
    /// again.
    waiting: Vec<u16>,
    waiting_at: Nanos,
    /// Reused memory for what a port refuses, and for the frames of a batch that a capture is
    /// shown.
    refused: Vec<u16>,
    shown: Vec<u16>,
    /// Frames for rings that no others wait for; keeps its memory.
    apart: Vec<u16>,
    polled_at: Nanos,
    /// Frames that the last round moved.
    moved: usize,
    plan: Plan,
    transformer: Transformer,
    merger: Merger,
    spare: Batch<'static>,
    /// Frames that a rate limit lets pass; keeps its memory.
    passed: Vec<u16>,
    on_change: Option<OnChange>,
}

/// A network and its name.
pub(crate) struct NetworkSlot {
    pub(crate) name: Arc<str>,
    pub(crate) network: Network,
}

/// The last fault of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRecord {
    /// Kind, and the sentence for `status`.
    pub fault: Fault,
    /// When, by the worker's clock.
    pub at: Nanos,
}

/// Restarts a port after a panic in its code, from the state that outlives it. The worker calls it
/// with its clock. It must not block. The error is one sentence that says what to do; the worker
/// tries again later.
pub type Restart = Box<dyn FnMut(Nanos) -> Result<Box<dyn Port>, String> + Send>;

/// Who is told that frames flow.
pub(crate) type WhenUp = Box<dyn FnOnce() + Send>;

/// Who is told that a port's link or faults have changed.
pub(crate) type OnChange = Arc<dyn Fn() + Send + Sync>;

/// One port and what the worker keeps about it.
pub(crate) struct PortSlot {
    pub(crate) token: Reserved,
    pub(crate) name: Arc<str>,
    pub(crate) network: NetworkId,
    pub(crate) kind: &'static str,
    /// `None` after a panic in its code.
    pub(crate) port: Option<Box<dyn Port>>,
    pub(crate) guard: Guard,
    pub(crate) counters: Arc<PortCounters>,
    pub(crate) last_fault: Option<FaultRecord>,
    pub(crate) panic: Option<String>,
    pub(crate) restart: Option<Restart>,
    /// The last pause before the port was restarted, and when that was.
    restart_pause: Nanos,
    restarted_at: Nanos,
    pub(crate) taps: Vec<Tap>,
    overflow: Overflow,
    pub(crate) active: bool,
    pub(crate) up: bool,
    when_up: Option<WhenUp>,
    pub(crate) on_change: Option<OnChange>,
    wants_service: bool,
    /// Copies and segments of earlier turns that are not paid for yet.
    debt: u64,
    /// Most frames of the next turn, where the last one was costly.
    allowance: usize,
    pub(crate) storm: Storm,
    pub(crate) rates: Rates,
    pub(crate) marking: Marking,
    send: Meters,
    receive: Meters,
    last_frame_at: Nanos,
    serviced_at: Nanos,
    deadline: Nanos,
    /// Until then its rate limit takes no frame of it.
    limited_until: Nanos,
    quiet_until: Nanos,
}

/// What the decision needs of the port that a batch came from.
#[derive(Clone, Copy)]
struct BatchSource<'a> {
    index: u16,
    network: NetworkId,
    guard: &'a Guard,
    counters: &'a PortCounters,
}

/// Why a call into a port failed.
enum PortFailure {
    Fault(Fault),
    Panic(String),
}

/// Calls into a port; a panic becomes a [`PortFailure`] instead of the worker's end. The port is
/// not used again after a panic, so that it may be left in any state.
#[inline]
fn catch_panic<T>(call: impl FnOnce() -> Result<T, Fault>) -> Result<T, PortFailure> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(PortFailure::Fault),
        Err(payload) => Err(PortFailure::Panic(panic_text(payload.as_ref()))),
    }
}

/// [`catch_panic`], for calls that cannot fail otherwise.
#[inline]
fn catch_panic_call(call: impl FnOnce()) -> Result<(), PortFailure> {
    catch_panic(|| {
        call();
        Ok(())
    })
}

#[cold]
fn panic_text(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|s| s.to_string());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic without text".into())
}

impl Worker {
    /// A worker without networks; a budget out of bounds is brought into them. `seed` keys its hash
    /// tables and is best random; `wake` makes its waiter return [`CONTROL`], from any thread.
    pub fn new(settings: WorkerSettings, seed: u64, wake: impl Fn() + Send + Sync + 'static) -> (Worker, WorkerHandle) {
        let settings = WorkerSettings { budget: settings.budget.clamp(1, MAX_BUDGET), ..settings };
        let counters = Arc::new(LoopCounters::default());
        let (handle, commands) = WorkerHandle::new(wake, counters.clone());
        let core = Core {
            settings,
            seed,
            slots: Vec::new(),
            networks: Vec::new(),
            counters,
            now: Nanos(0),
            started: None,
            stopped: false,
            active: VecDeque::new(),
            urgent: VecDeque::new(),
            was_urgent: false,
            urgent_ports: 0,
            ready: Vec::new(),
            earliest: NEVER,
            rechecks: Rechecks::default(),
            waiting: Vec::new(),
            waiting_at: NEVER,
            refused: Vec::new(),
            shown: Vec::new(),
            apart: Vec::new(),
            polled_at: Nanos(0),
            moved: 0,
            plan: Plan::default(),
            transformer: Transformer::default(),
            merger: Merger::default(),
            spare: Batch::with_capacity(settings.budget),
            passed: Vec::new(),
            on_change: None,
        };
        (Worker { core, commands }, handle)
    }

    /// Runs until [`WorkerHandle::stop`], or until every handle is gone.
    pub fn run(mut self, waiter: &mut impl Waiter) {
        while self.step(waiter) {}
    }

    /// One round: waits if no port is active, does what was asked, then gives each active port one
    /// turn. Returns `false` when the worker was stopped.
    pub fn step(&mut self, waiter: &mut impl Waiter) -> bool {
        let core = &mut self.core;
        core.now = waiter.now();
        core.started.get_or_insert(core.now);
        core.rechecks.start(core.now);
        if core.is_idle() {
            let before = core.now;
            let due = core.earliest.min(core.waiting_at);
            let until = core.rechecks.next().map_or(due, |at| at.min(due));
            let timeout = (until != NEVER).then(|| until.since(before));
            waiter.wait(timeout, &mut core.ready);
            core.now = waiter.now();
            core.polled_at = core.now;
            core.counters.sleeps.add(1);
            core.counters.slept_ns.add(core.now.since(before).0);
        } else if core.moved == 0 || core.now.since(core.polled_at) >= POLL_INTERVAL {
            core.ask(waiter);
        }
        core.wake_ready(&self.commands);
        if core.now >= core.earliest {
            core.run_timers();
        }
        while let Some(index) = core.rechecks.take(core.now) {
            core.recheck(index);
        }
        if core.now >= core.waiting_at {
            core.drain_waiting();
        }
        core.round(waiter, &self.commands);
        !core.stopped
    }
}

impl Core {
    fn is_idle(&self) -> bool {
        self.active.is_empty() && self.urgent.is_empty()
    }

    /// Asks the waiter without sleeping.
    fn ask(&mut self, waiter: &mut impl Waiter) {
        waiter.wait(Some(Nanos(0)), &mut self.ready);
        self.polled_at = self.now;
        self.counters.polls.add(1);
    }

    /// Does what the waiter has found.
    fn wake_ready(&mut self, commands: &Receiver<Command>) {
        if self.ready.is_empty() {
            return;
        }
        let mut ready = std::mem::take(&mut self.ready);
        for token in ready.drain(..) {
            if token == CONTROL {
                while let Ok(command) = commands.try_recv() {
                    command(self);
                }
            } else {
                self.wake(token);
            }
        }
        self.ready = ready;
    }

    /// Puts a port that wants a turn behind the others of its kind.
    fn enqueue(&mut self, index: u16, is_urgent: bool) {
        if is_urgent { self.urgent.push_back(index) } else { self.active.push_back(index) }
    }

    /// The port that has the next turn: an urgent one and another by turns, while there are both.
    fn next_turn(&mut self) -> Option<u16> {
        self.was_urgent = !self.urgent.is_empty() && (!self.was_urgent || self.active.is_empty());
        if self.was_urgent { self.urgent.pop_front() } else { self.active.pop_front() }
    }

    /// [`WorkerHandle::set_marking`]; `None` without such a port.
    pub(crate) fn set_marking(&mut self, token: Token, marking: Marking) -> Option<()> {
        let slot = self.slots.get_mut(token.0 as usize)?.as_mut()?;
        let was = std::mem::replace(&mut slot.marking, marking);
        self.urgent_ports += usize::from(marking.is_urgent());
        self.urgent_ports -= usize::from(was.is_urgent());
        Some(())
    }

    /// Puts a port into its reserved slot and gives it its first turn soon.
    pub(crate) fn insert(&mut self, mut slot: Box<PortSlot>) {
        let index = slot.token.token().0 as usize;
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        debug_assert!(self.slots[index].is_none());
        self.plan.add_port(index as u16, self.settings.budget);
        slot.last_frame_at = self.now;
        slot.on_change = self.on_change.clone();
        self.urgent_ports += usize::from(slot.marking.is_urgent());
        // A port that is connected already gets floods from now on, not only after its first turn.
        self.refresh_link(index as u16, &mut slot);
        self.slots[index] = Some(slot);
        self.activate(index as u16);
    }

    /// Takes a port out, with everything that was known about it.
    pub(crate) fn remove(&mut self, token: Token) -> Option<Box<PortSlot>> {
        let slot = self.slots.get_mut(token.0 as usize)?.take()?;
        self.active.retain(|index| *index != token.0 as u16);
        self.urgent.retain(|index| *index != token.0 as u16);
        self.urgent_ports -= usize::from(slot.marking.is_urgent());
        self.rechecks.forget(token.0 as u16);
        if let Some(network) = self.network(slot.network) {
            network.network.leave(token.0 as u16);
        }
        Some(slot)
    }

    pub(crate) fn network(&mut self, id: NetworkId) -> Option<&mut NetworkSlot> {
        self.networks.get_mut(id.0 as usize)?.as_mut()
    }

    /// A new budget takes effect with the next turn.
    pub(crate) fn set(&mut self, settings: WorkerSettings) {
        self.settings = settings;
        for index in 0..self.slots.len() {
            self.plan.add_port(index as u16, settings.budget);
        }
    }

    fn wake(&mut self, token: Token) {
        if let Some(Some(slot)) = self.slots.get(token.0 as usize) {
            if !slot.active {
                slot.counters.wakeups.add(1);
            }
            self.activate(token.0 as u16);
        }
    }

    /// Sees to it that a port gets a turn in this round, with its control side looked after.
    pub(crate) fn activate(&mut self, index: u16) {
        let Some(slot) = &mut self.slots[index as usize] else { return };
        slot.wants_service = true;
        if slot.active || (slot.port.is_none() && slot.restart.is_none()) {
            return;
        }
        if self.now < slot.quiet_until || (slot.port.is_none() && !slot.restart(self.now)) {
            slot.deadline = slot.deadline.min(slot.quiet_until);
            self.earliest = self.earliest.min(slot.deadline);
            return;
        }
        slot.active = true;
        if let Some(Err(failure)) = slot.port.as_mut().map(|port| catch_panic_call(|| port.disarm())) {
            slot.suffer(failure, self.now);
        }
        let is_urgent = slot.marking.is_urgent();
        self.enqueue(index, is_urgent);
    }

    fn run_timers(&mut self) {
        self.earliest = NEVER;
        for index in 0..self.slots.len() {
            let Some(slot) = &mut self.slots[index] else { continue };
            if slot.deadline <= self.now {
                slot.deadline = NEVER;
                self.activate(index as u16);
            } else {
                self.earliest = self.earliest.min(slot.deadline);
            }
        }
    }

    /// The look that follows a sleep, or a signal that was not sent, once.
    fn recheck(&mut self, index: u16) {
        let Some(Some(slot)) = self.slots.get_mut(usize::from(index)) else { return };
        let Some(port) = slot.port.as_mut().filter(|_| self.now >= slot.quiet_until) else { return };
        match catch_panic(|| port.recheck()) {
            Ok(Rechecked { work, signalled }) => {
                slot.counters.late_signals.add(signalled.into());
                // What waits for the end of a rate limit's pause is not late.
                if work && !slot.active && self.now >= slot.limited_until {
                    slot.counters.late_wakeups.add(1);
                    self.activate(index);
                }
            }
            Err(failure) => self.fault_of(index, failure),
        }
    }

    /// One turn for each port that was active when the round began, for at most [`ROUND_TIME`]:
    /// those that are left are first in the next round. Commands are run between turns.
    fn round(&mut self, waiter: &mut impl Waiter, commands: &Receiver<Command>) {
        self.moved = 0;
        if self.is_idle() {
            return;
        }
        self.counters.rounds.add(1);
        // A port that becomes active meanwhile queues up behind, so none can be overtaken for ever.
        // An urgent one overtakes others, by one turn for each of theirs.
        let (began, mut turn, mut left) = (self.now, 0, self.active.len() + self.urgent.len());
        while left != 0 {
            let Some(index) = self.next_turn() else { break };
            (turn, left) = (turn + 1, left - 1);
            self.turn(index);
            while let Ok(command) = commands.try_recv() {
                command(self);
            }
            if self.stopped {
                break;
            }
            if turn % TURNS_PER_LOOK == 0 {
                let now = waiter.now();
                if now.since(began) >= ROUND_TIME {
                    break;
                }
                if self.urgent_ports != 0 && now.since(self.polled_at) >= POLL_INTERVAL {
                    // Those that were woken meanwhile have their turns within this round.
                    let before = self.urgent.len();
                    self.now = now;
                    self.ask(waiter);
                    self.wake_ready(commands);
                    left += self.urgent.len().saturating_sub(before);
                }
            }
        }
    }

    /// A turn of one port, which queues up again if it stays active.
    fn turn(&mut self, index: u16) {
        let Some(mut slot) = self.slots[index as usize].take() else { return };
        let result =
            if slot.port.is_none() || self.now < slot.quiet_until { Ok(false) } else { self.turn_of(index, &mut slot) };
        if result.is_ok() && slot.port.as_mut().is_some_and(|port| port.take_recheck()) {
            self.rechecks.note(index);
        }
        let stays = result.unwrap_or_else(|failure| {
            slot.suffer(failure, self.now);
            self.refresh_link(index, &mut slot);
            false
        });
        slot.active = stays;
        if stays {
            self.enqueue(index, slot.marking.is_urgent());
        }
        self.earliest = self.earliest.min(slot.deadline);
        self.slots[index as usize] = Some(slot);
    }

    fn turn_of(&mut self, index: u16, slot: &mut PortSlot) -> Result<bool, PortFailure> {
        let (now, budget) = (self.now, self.settings.budget);
        if slot.wants_service || now.since(slot.serviced_at) >= SERVICE_INTERVAL {
            slot.wants_service = false;
            slot.serviced_at = now;
            let Some(port) = &mut slot.port else { return Ok(false) };
            slot.deadline = catch_panic(|| port.service(now))?.unwrap_or(NEVER);
            if let Some(said) = catch_panic(|| Ok(port.take_reservations()))?
                && let Some(NetworkSlot { network, .. }) = self.network(slot.network)
            {
                network.reserve(index, said);
            }
            self.refresh_link(index, slot);
        }
        if slot.debt != 0 {
            slot.debt = slot.debt.saturating_sub(budget as u64);
            return Ok(true);
        }
        let mut budget = budget.min(slot.allowance);
        if slot.send.whole.is_on() {
            let pause = slot.send.whole.wait(now);
            if pause != Nanos(0) {
                slot.limited_until = now.after(pause);
                slot.deadline = slot.deadline.min(slot.limited_until);
                return Ok(false);
            }
            // Frames may be of 64 KiB, so a turn takes few of them.
            budget = budget.min(LIMITED_BUDGET);
        }
        let Some(port) = &mut slot.port else { return Ok(false) };
        let mut batch = std::mem::take(&mut self.spare);
        let mut drops = Drops::default();
        batch.set_ingress(slot.token.token());
        batch.set_marking(slot.marking);
        let received = receive(port.as_mut(), budget, &mut batch, &mut drops);
        let refused = if drops.any() { drops.total() } else { 0 };
        let taken = batch.len();
        slot.counters.rx_frames.add(taken as u64 + refused);
        if taken != 0 {
            let from = BatchSource { index, network: slot.network, guard: &slot.guard, counters: &slot.counters };
            let (cost, bytes) = self.pass_on(from, &mut slot.send, &mut slot.taps, &mut batch, &mut drops);
            slot.debt = cost.saturating_sub(self.settings.budget as u64);
            slot.send.whole.charge(now, taken as u64, bytes);
            slot.allowance = allowance(self.settings.budget, taken, cost, &drops);
        }
        self.spare = batch.recycle();
        slot.counters.add_rx_drops(&mut drops);
        let used = received?;
        self.moved += used;
        // A port may use up its budget with fewer frames, to be asked again.
        slot.counters.turn(taken as u64 + refused, used >= budget);
        let Some(port) = &mut slot.port else { return Ok(false) };
        if used != 0 {
            slot.last_frame_at = now;
            catch_panic(|| port.release())?;
        }
        if used >= budget || now.since(slot.last_frame_at) < self.settings.busy_poll {
            return Ok(true);
        }
        catch_panic(|| {
            let found = port.arm()?;
            if found {
                port.disarm();
            }
            Ok(found)
        })
    }

    /// Decides on a batch of `index` and hands its frames to their destinations; returns how many
    /// copies and segments that took, and the bytes that came.
    #[inline]
    fn pass_on(
        &mut self,
        from: BatchSource<'_>,
        send: &mut Meters,
        taps: &mut Vec<Tap>,
        batch: &mut Batch<'_>,
        drops: &mut Drops,
    ) -> (u64, u64) {
        let Some(Some(NetworkSlot { network, .. })) = self.networks.get_mut(from.network.0 as usize) else {
            // A network goes only after its ports, so this cannot be; the frames are accounted for
            // all the same.
            drops.count(Reason::NoDestination, batch.len() as u64);
            return (0, 0);
        };
        self.plan.note_drops(!taps.is_empty());
        let summary = network.decide(self.now, from.index, from.guard, batch, &mut self.plan, drops);
        from.counters.rx_bytes.add(summary.bytes);
        if send.has_classes() {
            self.plan.limit(batch, |frame| send.class_passes(self.now, batch, frame), drops);
        }
        let shapes = network.has_vlans();
        if !taps.is_empty() {
            network.restore(batch);
            taps.retain(|tap| tap.received(self.now, batch, self.plan.dropped(), from.counters));
        }
        let mut cost = 0;
        for at in 0..self.plan.destinations().len() {
            let to = self.plan.destinations()[at];
            self.catch_up(to);
            if shapes && let Some(Some(NetworkSlot { network, .. })) = self.networks.get_mut(from.network.0 as usize) {
                network.shape(to, batch, self.plan.frames_to(to));
            }
            // A mirror gets each frame as it came.
            let network = self.networks.get(from.network.0 as usize).and_then(Option::as_ref);
            let may_merge = batch.may_merge() && !network.is_some_and(|slot| slot.network.is_mirror(to));
            match self.deliver(to, batch, summary, may_merge) {
                Some(copies) => cost += copies,
                // A destination is a member of the network and not the source, so this cannot be;
                // its counters would have gone with its slot, so the frames are accounted for here.
                None => drops.count(Reason::NoDestination, self.plan.frames_to(to).len() as u64),
            }
        }
        self.plan.clear();
        (cost, summary.bytes)
    }

    #[cold]
    fn fault_of(&mut self, to: u16, failure: PortFailure) {
        let Some(mut slot) = self.slots[to as usize].take() else { return };
        slot.suffer(failure, self.now);
        self.refresh_link(to, &mut slot);
        self.earliest = self.earliest.min(slot.deadline);
        self.slots[to as usize] = Some(slot);
    }

    /// Tells the network whether floods should reach the port.
    fn refresh_link(&mut self, index: u16, slot: &mut PortSlot) {
        let up = match &mut slot.port {
            Some(port) => catch_panic(|| Ok(port.link() == Carrier::Up)).unwrap_or(false),
            None => false,
        };
        if up != slot.up {
            slot.up = up;
            let mut lost = Drops::default();
            slot.overflow.clear(Reason::LinkDown, &mut lost);
            slot.counters.add_tx_drops(&mut lost);
            if let Some(network) = self.network(slot.network) {
                network.network.set_link(index, up);
            }
            if up && let Some(then) = slot.when_up.take() {
                then();
            }
            slot.tell_change();
        }
    }

    /// [`WorkerHandle::on_change`].
    pub(crate) fn set_on_change(&mut self, tell: OnChange) {
        self.slots.iter_mut().flatten().for_each(|slot| slot.on_change = Some(tell.clone()));
        self.on_change = Some(tell);
    }

    /// [`WorkerHandle::when_up`]; `None` without such a port.
    pub(crate) fn when_up(&mut self, token: Token, then: WhenUp) -> Option<()> {
        let mut slot = self.slots.get_mut(token.0 as usize)?.take()?;
        // What `up` says may be of its last service.
        self.refresh_link(token.0 as u16, &mut slot);
        match slot.up {
            true => then(),
            false => slot.when_up = Some(then),
        }
        self.slots[token.0 as usize] = Some(slot);
        Some(())
    }
}

/// Frames that a port may give in its next turn, after one of `taken` frames that cost `cost`
/// copies: about as many as make a budget's worth of copies, and few if most were lost to storm
/// control.
#[inline]
fn allowance(budget: usize, taken: usize, cost: u64, drops: &Drops) -> usize {
    let mut next = usize::MAX;
    if cost > taken as u64 {
        next = (budget as u64 * taken as u64 / cost) as usize;
    }
    if drops.any() {
        let storm = [Reason::BroadcastStorm, Reason::MulticastStorm, Reason::UnknownStorm, Reason::FloodBudget];
        let lost: u64 = storm.into_iter().map(|reason| drops.of(reason)).sum();
        if lost * 2 > taken as u64 {
            next = next.min(budget / STORM_PART);
        }
    }
    next.max(1)
}

/// [`Port::receive`] with a panic caught; a function of its own for the sake of the batch's
/// lifetime.
#[inline]
fn receive<'m>(
    port: &'m mut dyn Port,
    budget: usize,
    batch: &mut Batch<'m>,
    drops: &mut Drops,
) -> Result<usize, PortFailure> {
    catch_panic(move || port.receive(budget, batch, drops))
}

impl PortSlot {
    pub(crate) fn new(
        token: Reserved,
        network: NetworkId,
        name: &str,
        port: Box<dyn Port>,
        restart: Option<Restart>,
        guard: Guard,
    ) -> Box<PortSlot> {
        Box::new(PortSlot {
            token,
            name: name.into(),
            network,
            kind: port.kind(),
            port: Some(port),
            guard,
            counters: Arc::default(),
            last_fault: None,
            panic: None,
            restart,
            restart_pause: Nanos(0),
            restarted_at: Nanos(0),
            taps: Vec::new(),
            overflow: Overflow::default(),
            active: false,
            up: false,
            when_up: None,
            on_change: None,
            wants_service: true,
            debt: 0,
            allowance: usize::MAX,
            storm: Storm::default(),
            rates: Rates::default(),
            marking: Marking::default(),
            send: Meters::default(),
            receive: Meters::default(),
            last_frame_at: Nanos(0),
            serviced_at: Nanos(0),
            deadline: NEVER,
            limited_until: Nanos(0),
            quiet_until: Nanos(0),
        })
    }

    #[cold]
    fn tell_change(&self) {
        if let Some(tell) = &self.on_change {
            tell();
        }
    }

    /// Sets the limits; buckets start full.
    pub(crate) fn limit(&mut self, storm: Storm, rates: Rates) {
        (self.storm, self.rates) = (storm, rates);
        self.send = Meters::new(rates.send, rates.send_class);
        self.receive = Meters::new(rates.receive, rates.receive_class);
        self.limited_until = Nanos(0);
    }

    /// Records what happened, and resets the port or drops it.
    #[cold]
    fn suffer(&mut self, failure: PortFailure, now: Nanos) {
        self.counters.faults.add(1);
        self.tell_change();
        let mut lost = Drops::default();
        self.overflow.clear(Reason::Reset, &mut lost);
        self.counters.add_tx_drops(&mut lost);
        let text = match failure {
            PortFailure::Panic(text) => text,
            PortFailure::Fault(fault) => {
                self.quiet_until = now.after(FAULT_PAUSE);
                self.deadline = self.quiet_until;
                let reset = self.port.as_mut().map(|port| catch_panic_call(|| port.reset(&fault)));
                self.last_fault = Some(FaultRecord { fault, at: now });
                match reset {
                    Some(Err(PortFailure::Panic(text))) => text,
                    _ => return,
                }
            }
        };
        self.broke(text, now);
        let port = self.port.take();
        // What panicked once may panic again when it is dropped.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(port)));
    }

    /// Notes a panic in the port's code, and when the port is to be restarted.
    #[cold]
    fn broke(&mut self, text: String, now: Nanos) {
        let (what, deadline) = match self.restart {
            None => ("was taken out of service", NEVER),
            Some(_) => {
                let calm = self.restart_pause == Nanos(0) || now.since(self.restarted_at) >= CALM;
                let pause = if calm { FAULT_PAUSE } else { Nanos(self.restart_pause.0 * 2).min(RESTART_PAUSE_MAX) };
                self.restart_pause = pause;
                self.quiet_until = now.after(pause);
                ("restarts", self.quiet_until)
            }
        };
        self.deadline = deadline;
        let detail = format!("the port's code panicked, so the port {what}: {text}");
        self.last_fault = Some(FaultRecord { fault: Fault { kind: FaultKind::System, detail }, at: now });
        self.panic = Some(text);
    }

    /// Restarts the port after a panic; returns whether it is there again. If not, the worker tries
    /// again after the next pause.
    #[cold]
    fn restart(&mut self, now: Nanos) -> bool {
        let Some(restart) = &mut self.restart else { return false };
        let made = catch_unwind(AssertUnwindSafe(|| restart(now)));
        self.restarted_at = now;
        match made.unwrap_or_else(|payload| Err(panic_text(payload.as_ref()))) {
            Ok(port) => {
                self.port = Some(port);
                self.panic = None;
                self.counters.restarts.add(1);
                self.tell_change();
                true
            }
            Err(text) => {
                self.broke(format!("it could not be restarted: {text}"), now);
                false
            }
        }
    }
}
