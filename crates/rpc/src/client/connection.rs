//! One connection as all who use it share it: its sections, its slots, and the wait for answers.
//!
//! # Who waits
//! One of the threads that wait is the leader: it polls or sleeps on the provider's word without
//! the lock. The others are followers, on `turn`. A thread that takes answers wakes the followers.
//! A leader that is done leaves the lead to one of them. The content of a slot and its turn are
//! only read and written under the lock.
//!
//! A future's waker is foreign code, which may poll or drop futures immediately. So it is called
//! and dropped without the lock. A thread that takes an answer leaves the waker in `woken`. A
//! thread that polls calls it once the lock is free. If none polls, the thread that waits on behalf
//! of futures does so, since it hears of each answer.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::Waker;
use std::time::Duration;

use tombolo_calls::{self as calls, Came};
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::rpc::arena::{Arena, Unit, units};
use tombolo_ring::rpc::entry::{Answer, Ask, BEST_EFFORT, Payload, Refusal, Status};
use tombolo_ring::rpc::ring::{self, Consumer, Producer};
use tombolo_ring::rpc::{Broken, Ends, Geometry, INLINE_BYTES, PUBLISHED};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::futex;
use tombolo_shm::memory::Mapping;

use super::connect::{ConnectOptions, Connected};
use super::reply::{Bytes, Reply};
use super::{CallError, watchdog};
use crate::clock::{self, now_ns};
use crate::cpu;
use crate::message::Facts;
use crate::poll::{self, Poller, Polling};
use crate::quota::Quota;
use crate::shared::{Given, Lent, SharedBuffer, Taken, TooLarge};
use crate::socket::{self, Received};
use crate::sync::lock;

/// Messages that are read in search of one memory: more than a socket's buffer holds (each costs it 768 of 212,992 bytes at least).
const MESSAGES: usize = 1024;
/// The longest sleep; a wait without a limit is a sequence of them.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) enum Slot {
    Free,
    Waiting {
        /// The request's block in our arena.
        block: Option<u64>,
        /// The request's memory, kept until its answer.
        shared: Option<SharedBuffer>,
        /// The call is no longer awaited.
        abandoned: bool,
        waker: Option<Waker>,
        /// When the answer is wanted; `u64::MAX`: best effort.
        deadline_ns: u64,
        /// When the call ends by itself: at its deadline, or as much later as its caller waits for a late reply.
        until_ns: u64,
    },
    Done(Answer, Came),
}

/// How long somebody waits. The clock is first looked at when it matters.
pub(super) struct Limit {
    timeout_ns: u64,
    until: Option<u64>,
    /// An instant at which it ends in any case.
    end_ns: u64,
    over: bool,
}

impl Limit {
    /// So long, and not beyond an instant.
    pub(super) fn new(timeout: Duration, end_ns: u64) -> Limit {
        Limit { timeout_ns: clock::ns(timeout), until: None, end_ns, over: false }
    }

    fn left_ns(&mut self, now: u64) -> u64 {
        let until = *self.until.get_or_insert(now.saturating_add(self.timeout_ns).min(self.end_ns));
        until.saturating_sub(now)
    }

    fn is_over(&mut self, now: u64) -> bool {
        self.over |= self.left_ns(now) == 0;
        self.over
    }

    /// How long the next sleep may last; `None` when the wait is over.
    fn left(&mut self, now: u64) -> Option<Duration> {
        (!self.is_over(now)).then(|| Duration::from_nanos(self.left_ns(now)).min(LONGEST_SLEEP))
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) asks: Producer<Ask>,
    answers: Consumer<Answer>,
    pub(super) slots: Vec<Slot>,
    /// The bytes of short answers, by slot.
    pub(super) inlines: Vec<[u8; INLINE_BYTES]>,
    pub(super) turns: Vec<u32>,
    /// Where in the ring the request of each slot was written.
    pub(super) asked_at: Vec<u32>,
    /// Free slots; the last used first.
    pub(super) free: Vec<u32>,
    pub(super) arena: Arena<Vec<Unit>>,
    pub(super) given: Given,
    pub(super) broken: Option<Broken>,
    /// One of those that wait sleeps or polls for all.
    leader: bool,
    /// The others.
    followers: u32,
    /// Futures under way.
    pub(super) futures: u32,
    /// No future's call ends by itself before this instant; the thread of deadlines looks for those that do, then.
    pub(super) futures_end_ns: u64,
    /// Wakers of futures that are done.
    pub(super) woken: Vec<Waker>,
    pub(super) helper: bool,
    poller: Poller,
}

impl State {
    /// When the call of a slot ends by itself.
    pub(super) fn until_ns(&self, slot: u32) -> u64 {
        match self.slots.get(slot as usize) {
            Some(Slot::Waiting { until_ns, .. }) => *until_ns,
            _ => u64::MAX,
        }
    }

    /// Leaves the wakers of futures whose calls have ended by themselves in `woken`: who polls them finds that.
    fn end_futures(&mut self, now: u64) {
        if now < self.futures_end_ns {
            return;
        }
        self.futures_end_ns = u64::MAX;
        let State { slots, woken, futures, futures_end_ns, .. } = self;
        for slot in slots {
            let Slot::Waiting { waker, until_ns, .. } = slot else { continue };
            if *until_ns > now {
                if waker.is_some() {
                    *futures_end_ns = (*futures_end_ns).min(*until_ns);
                }
            } else if let Some(waker) = waker.take() {
                *futures -= 1;
                woken.push(waker);
            }
        }
    }

    /// The wakers of all futures: of those that are done, and of those that will not be.
    fn take_wakers(&mut self) -> Vec<Waker> {
        let waiting = self.slots.iter_mut().filter_map(|slot| match slot {
            Slot::Waiting { waker, .. } => waker.take(),
            _ => None,
        });
        self.futures = 0;
        self.woken.drain(..).chain(waiting).collect()
    }
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) socket: OwnedFd,
    pub(super) doorbell: Doorbell,
    own: Mapping,
    peer: Mapping,
    own_geometry: Geometry,
    peer_geometry: Geometry,
    pub(super) facts: Facts,
    polling: Polling,
    pub(super) state: Mutex<State>,
    pub(super) turn: Condvar,
    /// Where the thread sleeps that ends futures at their instants.
    pub(super) timer: Condvar,
    taken: Mutex<Taken>,
    max_shared_bytes: u64,
    /// The provider has gone.
    gone: AtomicBool,
    /// The last `Client` has gone.
    pub(super) closing: AtomicBool,
    /// Threads in or just before a futex wait.
    sleepers: AtomicU32,
    pub(super) watch_id: AtomicU64,
    cpu: AtomicU32,
}

impl Inner {
    /// A connection as the handshake left it, with nothing under way.
    pub(super) fn new(connected: Connected, options: &ConnectOptions) -> Inner {
        let Connected { socket, doorbell, own, peer, facts } = connected;
        let entries = own.1.entries();
        let state = State {
            asks: Producer::default(),
            answers: Consumer::default(),
            slots: (0..entries).map(|_| Slot::Free).collect(),
            inlines: vec![[0; INLINE_BYTES]; entries as usize],
            turns: vec![0; entries as usize],
            asked_at: vec![0; entries as usize],
            free: (0..entries).rev().collect(),
            arena: Arena::new(vec![Unit::default(); units(own.1.arena_bytes())]),
            given: Given::default(),
            broken: None,
            leader: false,
            followers: 0,
            futures: 0,
            futures_end_ns: u64::MAX,
            woken: Vec::new(),
            helper: false,
            poller: Poller::default(),
        };
        Inner {
            socket,
            doorbell,
            own: own.0,
            peer: peer.0,
            own_geometry: own.1,
            peer_geometry: peer.1,
            facts,
            polling: options.polling,
            state: Mutex::new(state),
            turn: Condvar::new(),
            timer: Condvar::new(),
            taken: Mutex::new(Taken::new(options.max_shared_bytes, Quota::default())),
            max_shared_bytes: options.max_shared_bytes,
            gone: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            watch_id: AtomicU64::new(0),
            cpu: AtomicU32::new(u32::MAX),
        }
    }

    #[inline]
    pub(super) fn ends(&self) -> Ends<'_> {
        let own = self.own.view_mut().unwrap_or_else(|| ForeignMut::from(&mut [][..]));
        match Ends::new(own, self.own_geometry, self.peer.view(), self.peer_geometry) {
            Ok(ends) => ends,
            // The handshake mapped both with the sizes of their geometries, and neither can change.
            Err(_) => unreachable!("sections are as large as their geometries"),
        }
    }

    /// The provider has gone: all who wait learn it now.
    pub(super) fn lost(&self) {
        self.gone.store(true, Ordering::SeqCst);
        loop {
            let wakers = {
                let state = &mut *lock(&self.state);
                self.turn.notify_all();
                state.take_wakers()
            };
            wakers.into_iter().for_each(Waker::wake);
            futex::wake(self.peer.view(), PUBLISHED);
            if self.sleepers.load(Ordering::SeqCst) == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes the answers that have come.
    pub(super) fn drain(&self, state: &mut State) {
        if state.broken.is_some() {
            return;
        }
        let ends = self.ends();
        let (mut any, mut now) = (false, None);
        for _ in 0..ends.entries() {
            let State { answers, inlines, .. } = state;
            // Slots are below the number of entries, or the entry is broken.
            match answers.take_to(ends, |answer| &mut inlines[answer.token.slot() as usize]) {
                Ok(None) => break,
                Ok(Some(answer)) => {
                    any = true;
                    if let Err(broken) = self.done(state, answer, &mut now) {
                        state.broken = Some(broken);
                        break;
                    }
                }
                Err(broken) => {
                    state.broken = Some(broken);
                    break;
                }
            }
        }
        if any {
            state.answers.took_some(ends);
            if state.leader {
                // The one that sleeps may be the one whose answer this was; and it is not armed any more.
                futex::wake(self.peer.view(), PUBLISHED);
            }
            if state.followers > 0 {
                self.turn.notify_all();
            }
        }
    }

    /// `now` is read for the first answer that has a deadline.
    fn done(&self, state: &mut State, answer: Answer, now: &mut Option<u64>) -> Result<(), Broken> {
        let slot = answer.token.slot();
        let at = slot as usize;
        let known = state.turns.get(at) == Some(&answer.token.turn());
        let Some(Slot::Waiting { block, shared, abandoned, waker, deadline_ns, until_ns }) =
            state.slots.get_mut(at).filter(|_| known)
        else {
            return Err(Broken::Token);
        };
        let late_by_ns = match *deadline_ns {
            BEST_EFFORT => 0,
            deadline_ns => now.get_or_insert_with(now_ns).saturating_sub(deadline_ns),
        };
        let came = Came { late_by_ns, waits_late: *until_ns > *deadline_ns };
        if let Some(buffer) = shared
            && answer.status == Status::Refused(Refusal::Memory)
        {
            state.given.refused(buffer);
        }
        let (block, abandoned, waker) = (*block, *abandoned, waker.take());
        state.asks.taken_to(state.asked_at[at].wrapping_add(1));
        if let Some(block) = block {
            state.arena.give(block);
        }
        if abandoned {
            if let Payload::Arena { block, generation, .. } = answer.payload {
                self.ends().set_mark(block, generation);
            }
            state.slots[at] = Slot::Free;
            state.free.push(slot);
        } else {
            state.slots[at] = Slot::Done(answer, came);
        }
        if let Some(waker) = waker {
            state.futures -= 1;
            state.woken.push(waker);
        }
        Ok(())
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// What a call ends with on a connection that is lost, if it is.
    pub(super) fn failure(&self, state: &State) -> Option<CallError> {
        match state.broken {
            Some(broken) => Some(CallError::Broken(broken)),
            None if self.is_gone() => Some(CallError::ProviderGone),
            None => None,
        }
    }

    /// Waits until `ready`, the connection is lost, or the time is over. False for the latter two.
    pub(super) fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        mut limit: Limit,
        mut ready: impl FnMut(&mut State) -> bool,
    ) -> (MutexGuard<'a, State>, bool) {
        let done = loop {
            // Before the answers are taken: what a provider wrote before it went is still an answer.
            let gone = self.is_gone();
            self.drain(&mut state);
            if ready(&mut state) {
                break true;
            }
            if gone || state.broken.is_some() || limit.over {
                break false;
            }
            if state.leader {
                let Some(left) = limit.left(now_ns()) else { continue };
                state.followers += 1;
                state = self.turn.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
                state.followers -= 1;
                continue;
            }
            state.leader = true;
            state = self.lead(state, &mut limit);
            state.leader = false;
        };
        if state.followers > 0 {
            // Another thread's turn to sleep.
            self.turn.notify_all();
        }
        (state, done)
    }

    /// Polls or sleeps until something may have come, or the time is over.
    fn lead<'a>(&'a self, mut state: MutexGuard<'a, State>, limit: &mut Limit) -> MutexGuard<'a, State> {
        let ends = self.ends();
        let index = state.answers.index();
        let polls = self.polls(&mut state);
        let mut began = None;
        if polls {
            let window_ns = state.poller.window_ns();
            drop(state);
            let find = || ring::is_there(ends, index).then_some(());
            let over = |now, looked| looked >= window_ns || limit.is_over(now) || self.gone.load(Ordering::Relaxed);
            let (found, first_look) = poll::look(find, over);
            began = first_look;
            let gained = found.is_some();
            state = lock(&self.state);
            state.poller.learn(gained);
            // Another thread may have taken what came meanwhile, the answer that this one waits for too.
            if gained || self.polling == Polling::Always || state.answers.index() != index {
                return state;
            }
        }
        let now = now_ns();
        let Some(left) = limit.left(now) else { return state };
        match state.answers.arm(ends) {
            Ok(true) => {}
            Ok(false) => return state,
            Err(broken) => {
                state.broken = Some(broken);
                return state;
            }
        }
        let index = state.answers.index();
        drop(state);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        if !self.is_gone() {
            futex::wait(self.peer.view(), PUBLISHED, index, left);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        let mut state = lock(&self.state);
        state.poller.slept(now_ns().saturating_sub(began.unwrap_or(now)), polls);
        state
    }

    fn polls(&self, state: &mut State) -> bool {
        match self.polling {
            Polling::Never => false,
            Polling::Always => true,
            Polling::Adaptive => {
                cpu::several() && state.poller.worth_it() && self.ends().peer_cpu() != Some(self.set_cpu())
            }
        }
    }

    /// Tells the provider where we run, where that has changed.
    pub(super) fn set_cpu(&self) -> u32 {
        let cpu = cpu::current();
        // Relaxed: a hint.
        if self.cpu.swap(cpu, Ordering::Relaxed) != cpu {
            self.ends().set_cpu(cpu);
        }
        cpu
    }

    /// Memory that the provider has handed over. It sent that before the answer that names it.
    fn memory(&self, number: u32) -> Result<Arc<Lent>, CallError> {
        let mut taken = lock(&self.taken);
        // One that sends without end must not keep us here.
        for _ in 0..MESSAGES {
            if let Some(memory) = taken.get(number) {
                return Ok(memory);
            }
            match socket::receive(&self.socket, false) {
                Received::Message(message, fds) if taken.message(&message, &fds) => {}
                _ => break,
            }
        }
        Err(match taken.too_large(number) {
            Some(TooLarge { bytes, in_use }) => CallError::ReplyTooLarge { bytes, in_use, max: self.max_shared_bytes },
            None => CallError::ReplyMemory,
        })
    }

    /// What becomes of the call whose answer this is.
    pub(super) fn outcome(
        self: &Arc<Self>,
        answer: Answer,
        came: Came,
        inline: &[u8; INLINE_BYTES],
    ) -> Result<Reply, CallError> {
        came.end(answer.status)?;
        let bytes = match answer.payload {
            Payload::Inline { .. } => Bytes::Inline(*inline),
            Payload::Arena { .. } => Bytes::Arena,
            Payload::Shared { memory, offset, len } => {
                let memory = self.memory(memory)?;
                let range = usize::try_from(offset).ok().zip(usize::try_from(len).ok());
                range.and_then(|(offset, len)| memory.view().slice(offset, len)).ok_or(CallError::ReplyMemory)?;
                Bytes::Memory(memory)
            }
        };
        Ok(Reply { inner: self.clone(), payload: answer.payload, reply: calls::Reply::new(&answer, came, bytes) })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        watchdog::remove(*self.watch_id.get_mut());
    }
}

/// Waits on behalf of futures until the last client has gone.
///
/// Deadlines have a thread of their own. This one may sleep on the ring's futex, where a wake-up that comes just before the sleep is lost;
/// that thread sleeps on a condition variable with the lock, where none is.
pub(super) fn help(inner: &Inner) {
    std::thread::scope(|scope| {
        let timer =
            std::thread::Builder::new().name("tombolo-rpc-time".into()).spawn_scoped(scope, || end_in_time(inner));
        wait_for_answers(inner, timer.is_ok());
        // It has seen `closing` or `broken`, or does now.
        inner.timer.notify_all();
    });
    let mut state = lock(&inner.state);
    let wakers = state.take_wakers();
    drop(state);
    wakers.into_iter().for_each(Waker::wake);
}

fn is_closing(inner: &Inner, state: &State) -> bool {
    inner.closing.load(Ordering::SeqCst) || inner.is_gone() || state.broken.is_some()
}

/// Calls the wakers of futures that are done, without the lock.
fn wake_futures<'a>(inner: &'a Inner, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    let woken = std::mem::take(&mut state.woken);
    if woken.is_empty() {
        return state;
    }
    drop(state);
    woken.into_iter().for_each(Waker::wake);
    lock(&inner.state)
}

/// Takes the answers of futures and wakes them. Where no thread could be started for their deadlines, it looks after those as well.
fn wait_for_answers(inner: &Inner, has_timer: bool) {
    let mut state = lock(&inner.state);
    loop {
        state = wake_futures(inner, state);
        if is_closing(inner, &state) {
            // Under the lock, so that the other thread either sees it or sleeps already and is woken.
            return;
        }
        if state.futures == 0 {
            state = inner.turn.wait(state).unwrap_or_else(|e| e.into_inner());
            continue;
        }
        let end_ns = if has_timer { u64::MAX } else { state.futures_end_ns };
        let closing = || inner.closing.load(Ordering::SeqCst) || inner.is_gone();
        let ready = |state: &mut State| {
            let sooner = !has_timer && state.futures_end_ns < end_ns;
            state.futures == 0 || !state.woken.is_empty() || sooner || closing()
        };
        state = inner.wait(state, Limit::new(LONGEST_SLEEP, end_ns), ready).0;
        if !has_timer {
            state.end_futures(now_ns());
        }
    }
}

/// Ends the futures whose calls end by themselves, at their instants.
fn end_in_time(inner: &Inner) {
    let mut state = lock(&inner.state);
    loop {
        state = wake_futures(inner, state);
        if is_closing(inner, &state) {
            return;
        }
        let now = now_ns();
        if state.futures_end_ns <= now {
            state.end_futures(now);
            continue;
        }
        let left = Duration::from_nanos(state.futures_end_ns - now).min(LONGEST_SLEEP);
        state = match state.futures {
            0 => inner.timer.wait(state).unwrap_or_else(|e| e.into_inner()),
            _ => inner.timer.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0,
        };
    }
}
