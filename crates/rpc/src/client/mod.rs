//! Who calls: connects to a service by its name and asks it, blocking or not.
//!
//! A [`Client`] is one connection. Threads may share it: one of those that wait sleeps on the provider's word and takes the answers for
//! all of them. Threads that need not wait for each other open a client each.
//!
//! # What a call ends with
//! Exactly one of: the reply; [`CallError::Late`], [`CallError::Refused`], [`CallError::Cancelled`], [`CallError::Expired`],
//! [`CallError::Failed`] as the provider says; [`CallError::ProviderGone`] when it dies, [`CallError::Broken`] when it breaks the
//! protocol, [`CallError::Timeout`] when the caller's own patience ends. A call that timed out is cancelled, and its slot and
//! memory come back with the answer, which nobody sees.
//!
//! # A hostile provider
//! can answer nonsense or nothing. Each field of an answer is read once and checked; every wait has a time limit.

mod connect;
mod future;
mod life;
mod reply;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::Waker;
use std::time::Duration;

use tombolo_ring::mem::ForeignMut;
use tombolo_ring::rpc::arena::{Arena, Unit, units};
use tombolo_ring::rpc::entry::{Answer, Ask, Call, Payload, Refusal, Status};
use tombolo_ring::rpc::ring::{self, Consumer, Producer};
use tombolo_ring::rpc::{Broken, Ends, Geometry, INLINE_BYTES, PUBLISHED};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::futex;
use tombolo_shm::memory::{Mapping, MemoryError};

pub use connect::{ConnectError, ConnectOptions, report};
pub use future::CallFuture;
pub use reply::Reply;
pub use tombolo_ring::rpc::entry::Token;

use crate::clock::{self, now_ns};
use crate::cpu;
use crate::deadline::Deadline;
use crate::message::Facts;
use crate::poll::{POLL_NS, Poller, Polling};
use crate::shared::{Given, SharedBuffer, Taken};
use crate::socket::{self, Received};
use crate::sync::lock;
use reply::Bytes;

/// Looks between two readings of the clock.
const LOOKS: u32 = 32;
/// The longest sleep; a wait without a limit is a sequence of them.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// How a call ended, if not with a reply.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// Its deadline had passed before it could be served.
    #[error("the deadline had passed before the service could begin")]
    Late,
    /// It was not accepted.
    #[error("the service refused the call: {}", .0.text())]
    Refused(Refusal),
    /// It was cancelled before it was served.
    #[error("the call was cancelled")]
    Cancelled,
    /// It waited for longer than its time to live.
    #[error("the call waited for longer than its time to live")]
    Expired,
    /// The service broke while serving it.
    #[error("the service failed while serving the call")]
    Failed,
    /// The provider has died or ended. Whether the call was served is not known.
    #[error("the service has gone")]
    ProviderGone,
    /// The caller's own time limit is over. Whether the call is served is not known.
    #[error("no answer came within the time limit")]
    Timeout,
    /// The provider broke the protocol.
    #[error("{0}; the connection is of no use any more")]
    Broken(Broken),
    /// As many calls are under way as the connection allows.
    #[error("{0} calls are under way, and the connection allows no more")]
    Busy(u32),
    /// No memory for the request.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The service takes no more memory, or no such large one.
    #[error("the service takes no memory of {bytes} bytes: {source}")]
    Share {
        /// Its size.
        bytes: u64,
        /// The system's answer.
        source: rustix::io::Errno,
    },
    /// A part that the buffer does not have.
    #[error("bytes {offset} to {offset}+{len} were to be sent of a buffer that has {bytes}")]
    Range {
        /// Start of the part.
        offset: u64,
        /// Length of the part.
        len: u64,
        /// The buffer's size.
        bytes: u64,
    },
    /// The reply was held for too long, and its memory was taken back.
    #[error("the reply was held for too long, and the service took its memory back")]
    Reclaimed,
    /// The reply is in memory that the provider has not handed over, or that does not have so many bytes.
    #[error("the reply is in memory that the service did not hand over")]
    ReplyMemory,
    /// A token that names no call under way.
    #[error("no call of that token is under way: it was waited for, cancelled or given up already")]
    Unknown,
}

/// What a call asks for, besides its bytes.
#[derive(Clone, Copy, Debug)]
pub struct CallOptions {
    /// When an answer is wanted.
    pub deadline: Deadline,
    /// How long this caller waits at most, whatever the deadline.
    pub timeout: Duration,
    /// How long the request may wait at the provider; the service's choice where there is none.
    pub ttl: Option<Duration>,
    /// Carried to the provider's trace.
    pub trace: u64,
}

impl Default for CallOptions {
    fn default() -> Self {
        CallOptions { deadline: Deadline::Inherit, timeout: Duration::from_secs(30), ttl: None, trace: 0 }
    }
}

impl CallOptions {
    /// With a deadline so much after the call.
    pub fn within(left: Duration) -> CallOptions {
        CallOptions { deadline: Deadline::In(left), ..CallOptions::default() }
    }
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "all slots are allocated once, when the client connects")]
enum Slot {
    Free,
    Waiting {
        /// The request's block in our arena.
        block: Option<u64>,
        /// The request's memory, kept until its answer.
        _shared: Option<SharedBuffer>,
        /// Nobody waits for it any more.
        abandoned: bool,
        waker: Option<Waker>,
    },
    Done {
        answer: Answer,
        inline: [u8; INLINE_BYTES],
    },
}

#[derive(Debug)]
struct State {
    asks: Producer<Ask>,
    answers: Consumer<Answer>,
    slots: Vec<Slot>,
    turns: Vec<u32>,
    /// Free slots; the last used first.
    free: Vec<u32>,
    arena: Arena<Vec<Unit>>,
    given: Given,
    broken: Option<Broken>,
    /// One of those that wait sleeps or polls for all.
    leader: bool,
    /// The others.
    followers: u32,
    /// Futures under way.
    futures: u32,
    helper: bool,
    poller: Poller,
}

/// A connection.
#[derive(Debug)]
struct Inner {
    socket: OwnedFd,
    bell: Doorbell,
    own: Mapping,
    peer: Mapping,
    own_geometry: Geometry,
    peer_geometry: Geometry,
    facts: Facts,
    polling: Polling,
    state: Mutex<State>,
    turn: Condvar,
    taken: Mutex<Taken>,
    /// The provider has gone.
    gone: AtomicBool,
    /// The last `Client` has gone.
    closing: AtomicBool,
    /// Threads in or just before a futex wait.
    sleepers: AtomicU32,
    life: AtomicU64,
    cpu: AtomicU32,
}

impl Inner {
    #[inline]
    fn ends(&self) -> Ends<'_> {
        let own = self.own.view_mut().unwrap_or_else(|| ForeignMut::from(&mut [][..]));
        match Ends::new(own, self.own_geometry, self.peer.view(), self.peer_geometry) {
            Ok(ends) => ends,
            // The handshake mapped both with the sizes of their geometries, and neither can change.
            Err(_) => unreachable!("sections are as large as their geometries"),
        }
    }

    /// The provider has gone: all who wait learn it now.
    fn lost(&self) {
        self.gone.store(true, Ordering::SeqCst);
        loop {
            {
                let state = &mut *lock(&self.state);
                self.turn.notify_all();
                for slot in &mut state.slots {
                    if let Slot::Waiting { waker, .. } = slot
                        && let Some(waker) = waker.take()
                    {
                        waker.wake();
                    }
                }
            }
            futex::wake(self.peer.view(), PUBLISHED);
            if self.sleepers.load(Ordering::SeqCst) == 0 {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes the answers that have come.
    fn drain(&self, state: &mut State) {
        if state.broken.is_some() {
            return;
        }
        let ends = self.ends();
        let mut any = false;
        for _ in 0..ends.entries() {
            let mut inline = [0; INLINE_BYTES];
            match state.answers.take(ends, &mut inline) {
                Ok(None) => break,
                Ok(Some(answer)) => {
                    any = true;
                    if let Err(broken) = self.done(state, answer, inline) {
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
            state.answers.took(ends);
            if state.leader {
                // The one that sleeps may be the one whose answer this was; and it is not armed any more.
                futex::wake(self.peer.view(), PUBLISHED);
            }
            if state.followers > 0 {
                self.turn.notify_all();
            }
        }
    }

    fn done(&self, state: &mut State, answer: Answer, inline: [u8; INLINE_BYTES]) -> Result<(), Broken> {
        let slot = answer.token.slot();
        let at = slot as usize;
        let known = state.turns.get(at) == Some(&answer.token.turn());
        let Some(Slot::Waiting { block, abandoned, waker, .. }) = state.slots.get_mut(at).filter(|_| known) else {
            return Err(Broken::Token);
        };
        let (block, abandoned, waker) = (*block, *abandoned, waker.take());
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
            state.slots[at] = Slot::Done { answer, inline };
        }
        if let Some(waker) = waker {
            state.futures -= 1;
            waker.wake();
        }
        Ok(())
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// What a call ends with on a connection that is lost, if it is.
    fn failure(&self, state: &State) -> Option<CallError> {
        match state.broken {
            Some(broken) => Some(CallError::Broken(broken)),
            None if self.is_gone() => Some(CallError::ProviderGone),
            None => None,
        }
    }

    /// Waits until `ready`, the connection is lost, or the instant has come. False for the latter two.
    fn wait<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        until: u64,
        mut ready: impl FnMut(&mut State) -> bool,
    ) -> (MutexGuard<'a, State>, bool) {
        let done = loop {
            // Before the answers are taken: what a provider wrote before it went is still an answer.
            let gone = self.is_gone();
            self.drain(&mut state);
            if ready(&mut state) {
                break true;
            }
            if gone || state.broken.is_some() {
                break false;
            }
            let now = now_ns();
            if now >= until {
                break false;
            }
            let left = Duration::from_nanos(until - now).min(LONGEST_SLEEP);
            if state.leader {
                state.followers += 1;
                state = self.turn.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
                state.followers -= 1;
                continue;
            }
            state.leader = true;
            state = self.lead(state, until, left);
            state.leader = false;
        };
        if state.followers > 0 {
            // Somebody else's turn to sleep.
            self.turn.notify_all();
        }
        (state, done)
    }

    /// Polls or sleeps until something may have come.
    fn lead<'a>(&'a self, mut state: MutexGuard<'a, State>, until: u64, left: Duration) -> MutexGuard<'a, State> {
        let ends = self.ends();
        let index = state.answers.index();
        if self.polls(&mut state) {
            drop(state);
            let gained = self.poll(index, until);
            state = lock(&self.state);
            state.poller.learn(gained);
            // Another thread may have taken what came meanwhile, the answer that this one waits for too.
            if gained || self.polling == Polling::Always || state.answers.index() != index {
                return state;
            }
        }
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
        lock(&self.state)
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
    fn set_cpu(&self) -> u32 {
        let cpu = cpu::current();
        // Relaxed: a hint.
        if self.cpu.swap(cpu, Ordering::Relaxed) != cpu {
            self.ends().set_cpu(cpu);
        }
        cpu
    }

    fn poll(&self, index: u32, until: u64) -> bool {
        let ends = self.ends();
        let end = now_ns().saturating_add(POLL_NS).min(until);
        loop {
            for _ in 0..LOOKS {
                if ring::published(ends) != index {
                    return true;
                }
                std::hint::spin_loop();
            }
            if now_ns() >= end || self.gone.load(Ordering::Relaxed) {
                return false;
            }
        }
    }

    /// Memory that the provider has handed over. It sent that before the answer that names it.
    fn memory(&self, number: u32) -> Option<Arc<Mapping>> {
        let mut taken = lock(&self.taken);
        while taken.get(number).is_none() {
            match socket::receive(&self.socket, false) {
                Received::Message(message, fds) if taken.message(&message, &fds, u64::MAX) => {}
                _ => break,
            }
        }
        taken.get(number)
    }

    /// What becomes of the call whose answer this is.
    fn outcome(self: &Arc<Self>, answer: Answer, inline: [u8; INLINE_BYTES]) -> Result<Reply, CallError> {
        match answer.status {
            Status::Served => {}
            Status::Late => return Err(CallError::Late),
            Status::Refused(reason) => return Err(CallError::Refused(reason)),
            Status::Cancelled => return Err(CallError::Cancelled),
            Status::Expired => return Err(CallError::Expired),
            Status::Failed => return Err(CallError::Failed),
        }
        let bytes = match answer.payload {
            Payload::Inline { .. } => Bytes::Inline(inline),
            Payload::Arena { .. } => Bytes::Arena,
            Payload::Shared { memory, offset, len } => {
                let mapping = self.memory(memory).ok_or(CallError::ReplyMemory)?;
                let range = usize::try_from(offset).ok().zip(usize::try_from(len).ok());
                range.and_then(|(offset, len)| mapping.view().slice(offset, len)).ok_or(CallError::ReplyMemory)?;
                Bytes::Memory(mapping)
            }
        };
        Ok(Reply { inner: self.clone(), answer, bytes })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        life::remove(*self.life.get_mut());
    }
}

/// Ends the connection with the last client, also where replies are still held, and the helper thread with it.
#[derive(Debug)]
struct Handle(Arc<Inner>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.closing.store(true, Ordering::SeqCst);
        // The provider sees it, and so does the thread that watches the socket: it wakes the helper.
        let _ = rustix::net::shutdown(&self.0.socket, rustix::net::Shutdown::Both);
        let _state = lock(&self.0.state);
        self.0.turn.notify_all();
    }
}

/// A connection to a service. Clones are the same connection.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<Inner>,
    _handle: Arc<Handle>,
}

/// Room for a request in the connection's memory, to be written in place and then sent by [`Client::submit_loan`].
#[derive(Debug)]
pub struct Loan {
    inner: Arc<Inner>,
    offset: u64,
    len: u64,
    sent: bool,
}

impl Loan {
    /// Where to write.
    pub fn view(&self) -> ForeignMut<'_> {
        self.inner.ends().own_payload(self.offset, self.len).unwrap_or_else(|| ForeignMut::from(&mut [][..]))
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if !self.sent {
            lock(&self.inner.state).arena.give(self.offset);
        }
    }
}

impl Client {
    /// Connects to a service of this user's folder, with the default options.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(name: &str) -> Result<Client, ConnectError> {
        Client::connect_with(name, &ConnectOptions::default())
    }

    /// Connects to a service.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect_with(name: &str, options: &ConnectOptions) -> Result<Client, ConnectError> {
        let connect::Connected { socket, bell, own, peer, facts } = connect::connect(name, options)?;
        let entries = own.1.entries();
        let state = State {
            asks: Producer::default(),
            answers: Consumer::default(),
            slots: (0..entries).map(|_| Slot::Free).collect(),
            turns: vec![0; entries as usize],
            free: (0..entries).rev().collect(),
            arena: Arena::new(vec![Unit::default(); units(own.1.arena_bytes())]),
            given: Given::default(),
            broken: None,
            leader: false,
            followers: 0,
            futures: 0,
            helper: false,
            poller: Poller::default(),
        };
        let inner = Arc::new(Inner {
            socket,
            bell,
            own: own.0,
            peer: peer.0,
            own_geometry: own.1,
            peer_geometry: peer.1,
            facts,
            polling: options.polling,
            state: Mutex::new(state),
            turn: Condvar::new(),
            taken: Mutex::default(),
            gone: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            life: AtomicU64::new(0),
            cpu: AtomicU32::new(u32::MAX),
        });
        let id = life::add(&inner).map_err(|source| ConnectError::System { what: "watching the service", source })?;
        inner.life.store(id, Ordering::SeqCst);
        inner.set_cpu();
        Ok(Client { _handle: Arc::new(Handle(inner.clone())), inner })
    }

    /// What the service said of itself.
    pub fn facts(&self) -> Facts {
        self.inner.facts
    }

    /// Calls and waits for the reply.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn call(&self, bytes: &[u8], options: &CallOptions) -> Result<Reply, CallError> {
        let token = self.submit(bytes, options)?;
        self.wait(token, options.timeout)
    }

    /// Calls without waiting.
    ///
    /// # Errors
    /// [`CallError`], where the request could not be sent.
    pub fn submit(&self, bytes: &[u8], options: &CallOptions) -> Result<Token, CallError> {
        if bytes.len() <= INLINE_BYTES {
            return self.send(Payload::Inline { len: bytes.len() as u32 }, bytes, None, options);
        }
        match self.loan(bytes.len() as u64) {
            Some(loan) => {
                loan.view().write_from(bytes);
                self.submit_loan(loan, options)
            }
            None => {
                let buffer = SharedBuffer::new(bytes.len() as u64, false)?;
                buffer.view().write_from(bytes);
                self.submit_shared(&buffer, 0, bytes.len() as u64, options)
            }
        }
    }

    /// Room for a request of so many bytes in the connection's memory. `None` where there is none now.
    pub fn loan(&self, len: u64) -> Option<Loan> {
        let offset = {
            let state = &mut *lock(&self.inner.state);
            let free = state.arena.take(len);
            free.or_else(|| {
                self.inner.drain(state);
                state.arena.take(len)
            })?
        };
        Some(Loan { inner: self.inner.clone(), offset, len, sent: false })
    }

    /// Sends what was written into the loan, without waiting.
    ///
    /// # Errors
    /// [`CallError`], where the request could not be sent. The loan is given back.
    pub fn submit_loan(&self, mut loan: Loan, options: &CallOptions) -> Result<Token, CallError> {
        if !Arc::ptr_eq(&loan.inner, &self.inner) {
            return Err(CallError::Unknown);
        }
        let payload = Payload::Arena { offset: loan.offset, len: loan.len, block: 0, generation: 0 };
        let token = self.send(payload, &[], None, options)?;
        loan.sent = true;
        Ok(token)
    }

    /// Sends a part of shared memory, without waiting and without a copy. The memory must not be written before the answer.
    ///
    /// # Errors
    /// [`CallError`], where the request could not be sent.
    pub fn submit_shared(
        &self,
        buffer: &SharedBuffer,
        offset: u64,
        len: u64,
        options: &CallOptions,
    ) -> Result<Token, CallError> {
        if offset.checked_add(len).is_none_or(|end| end > buffer.len()) {
            return Err(CallError::Range { offset, len, bytes: buffer.len() });
        }
        let given = lock(&self.inner.state).given.give(&self.inner.socket, buffer);
        match given {
            Ok(()) => {}
            Err(rustix::io::Errno::PIPE) => return Err(CallError::ProviderGone),
            Err(source) => return Err(CallError::Share { bytes: buffer.len(), source }),
        }
        let payload = Payload::Shared { memory: buffer.number(), offset, len };
        self.send(payload, &[], Some(buffer.clone()), options)
    }

    /// Calls with a part of shared memory and waits for the reply.
    ///
    /// # Errors
    /// [`CallError`].
    pub fn call_shared(
        &self,
        buffer: &SharedBuffer,
        offset: u64,
        len: u64,
        options: &CallOptions,
    ) -> Result<Reply, CallError> {
        let token = self.submit_shared(buffer, offset, len, options)?;
        self.wait(token, options.timeout)
    }

    fn send(
        &self,
        payload: Payload,
        inline: &[u8],
        shared: Option<SharedBuffer>,
        options: &CallOptions,
    ) -> Result<Token, CallError> {
        let deadline_ns = options.deadline.resolve();
        let ttl_ms = options.ttl.map_or(0, |ttl| u32::try_from(ttl.as_millis()).unwrap_or(u32::MAX).max(1));
        let inner = &*self.inner;
        let ends = inner.ends();
        let mut guard = lock(&inner.state);
        let state = &mut *guard;
        if state.free.is_empty() {
            inner.drain(state);
        }
        if let Some(failure) = inner.failure(state) {
            return Err(failure);
        }
        let busy = CallError::Busy(ends.entries() - state.free.len() as u32);
        let Some(slot) = state.free.last().copied() else { return Err(busy) };
        match state.asks.has_room(ends) {
            Ok(true) => {}
            Ok(false) => return Err(busy),
            Err(broken) => {
                state.broken = Some(broken);
                return Err(CallError::Broken(broken));
            }
        }
        state.free.pop();
        let turn = &mut state.turns[slot as usize];
        *turn = turn.wrapping_add(1);
        let token = Token::new(slot, *turn);
        let block = match payload {
            Payload::Arena { offset, .. } => Some(offset),
            _ => None,
        };
        state.slots[slot as usize] = Slot::Waiting { block, _shared: shared, abandoned: false, waker: None };
        let call = Call { token, deadline_ns, time_left: false, trace: options.trace, ttl_ms, payload };
        state.asks.push(ends, &Ask::Call(call), inline);
        let ring = state.asks.publish(ends);
        drop(guard);
        if ring {
            inner.bell.ring();
        }
        Ok(token)
    }

    /// Whether a token's call is under way or done and not fetched.
    fn is_known(state: &State, token: Token) -> bool {
        let slot = state.slots.get(token.slot() as usize);
        let known = match slot {
            Some(Slot::Waiting { abandoned, .. }) => !abandoned,
            Some(Slot::Done { .. }) => true,
            _ => false,
        };
        known && state.turns.get(token.slot() as usize) == Some(&token.turn())
    }

    fn is_done(state: &State, token: Token) -> bool {
        matches!(state.slots.get(token.slot() as usize), Some(Slot::Done { .. })) || !Self::is_known(state, token)
    }

    /// Takes the answer out of its slot.
    fn fetch(&self, state: &mut State, token: Token) -> Option<Result<Reply, CallError>> {
        if !Self::is_known(state, token) {
            return Some(Err(CallError::Unknown));
        }
        let slot = &mut state.slots[token.slot() as usize];
        if !matches!(slot, Slot::Done { .. }) {
            return None;
        }
        let Slot::Done { answer, inline } = std::mem::replace(slot, Slot::Free) else { return None };
        state.free.push(token.slot());
        Some(self.inner.outcome(answer, inline))
    }

    /// Looks whether the answer has come; `None` while it has not.
    pub fn poll(&self, token: Token) -> Option<Result<Reply, CallError>> {
        let state = &mut *lock(&self.inner.state);
        let failed = self.inner.is_gone();
        self.inner.drain(state);
        let done = self.fetch(state, token);
        if done.is_none() && (failed || state.broken.is_some()) {
            return self.inner.failure(state).map(Err);
        }
        done
    }

    /// Waits for one answer.
    ///
    /// # Errors
    /// [`CallError`]. After [`CallError::Timeout`] the call is cancelled, and the token names nothing any more.
    pub fn wait(&self, token: Token, timeout: Duration) -> Result<Reply, CallError> {
        let until = now_ns().saturating_add(clock::ns(timeout));
        let state = lock(&self.inner.state);
        let (mut state, _) = self.inner.wait(state, until, |state| Self::is_done(state, token));
        if let Some(done) = self.fetch(&mut state, token) {
            return done;
        }
        if let Some(failure) = self.inner.failure(&state) {
            return Err(failure);
        }
        drop(state);
        self.abandon(token);
        Err(CallError::Timeout)
    }

    /// Waits until the answer of any of these calls has come; which one that is. `None` after the time limit, or when there are
    /// no tokens. A connection that is lost counts as an answer of each of its calls.
    pub fn wait_any(&self, tokens: &[Token], timeout: Duration) -> Option<usize> {
        let until = now_ns().saturating_add(clock::ns(timeout));
        let state = lock(&self.inner.state);
        let first = |state: &State| tokens.iter().position(|t| Self::is_done(state, *t));
        let (state, _) = self.inner.wait(state, until, |state| tokens.is_empty() || first(state).is_some());
        first(&state).or_else(|| self.inner.failure(&state).and_then(|_| (!tokens.is_empty()).then_some(0)))
    }

    /// Waits for the answers of all these calls, in the order of the tokens. Those that have not come when the time is over are
    /// cancelled, and end with [`CallError::Timeout`].
    pub fn wait_all(&self, tokens: &[Token], timeout: Duration) -> Vec<Result<Reply, CallError>> {
        let until = now_ns().saturating_add(clock::ns(timeout));
        let left = || Duration::from_nanos(until.saturating_sub(now_ns()));
        tokens.iter().map(|token| self.wait(*token, left())).collect()
    }

    /// Asks the provider to take a call back. Its answer still comes: [`CallError::Cancelled`], or what it was if service had
    /// begun. False where the token names no call under way, or too many cancellations are under way.
    pub fn cancel(&self, token: Token) -> bool {
        let mut guard = lock(&self.inner.state);
        let state = &mut *guard;
        let waiting = matches!(state.slots.get(token.slot() as usize), Some(Slot::Waiting { .. }));
        if !waiting || state.turns.get(token.slot() as usize) != Some(&token.turn()) {
            return false;
        }
        let ends = self.inner.ends();
        if self.inner.failure(state).is_some() || state.asks.has_room(ends) != Ok(true) {
            return false;
        }
        state.asks.push(ends, &Ask::Cancel(token), &[]);
        let ring = state.asks.publish(ends);
        drop(guard);
        if ring {
            self.inner.bell.ring();
        }
        true
    }

    /// Nobody waits for this call any more: it is cancelled, and its slot comes back with its answer.
    fn abandon(&self, token: Token) {
        {
            let state = &mut *lock(&self.inner.state);
            if !Self::is_known(state, token) {
                return;
            }
            if let Some(done) = self.fetch(state, token) {
                // Dropped outside the lock would be as well; a reply takes none.
                drop(done);
                return;
            }
            if let Slot::Waiting { abandoned, waker, .. } = &mut state.slots[token.slot() as usize] {
                *abandoned = true;
                if waker.take().is_some() {
                    state.futures -= 1;
                }
            }
        }
        self.cancel(token);
    }

    /// Calls, as a future.
    pub fn call_async(&self, bytes: &[u8], options: &CallOptions) -> CallFuture {
        CallFuture::new(self.clone(), self.submit(bytes, options))
    }

    /// For futures: the answer, or the waker is woken when it comes.
    fn poll_with(&self, token: Token, by: &Waker) -> Option<Result<Reply, CallError>> {
        if let Some(done) = self.poll(token) {
            return Some(done);
        }
        let mut guard = lock(&self.inner.state);
        let state = &mut *guard;
        match state.slots.get_mut(token.slot() as usize) {
            Some(Slot::Waiting { waker, .. }) => {
                if waker.replace(by.clone()).is_none() {
                    state.futures += 1;
                }
            }
            // It came in between.
            _ => by.wake_by_ref(),
        }
        if self.inner.is_gone() {
            by.wake_by_ref();
        }
        if !std::mem::replace(&mut state.helper, true) {
            let inner = self.inner.clone();
            let started = std::thread::Builder::new().name("tombolo-rpc-async".into()).spawn(move || help(&inner));
            if started.is_err() {
                // Without the thread the executor has to look again and again.
                state.helper = false;
                by.wake_by_ref();
            }
        }
        self.inner.turn.notify_all();
        None
    }

    /// Calls under way or done and not fetched: each holds a slot.
    pub fn under_way(&self) -> usize {
        let state = &mut *lock(&self.inner.state);
        self.inner.drain(state);
        state.slots.len() - state.free.len()
    }

    /// Bytes of the connection's request memory that are in use.
    pub fn arena_used(&self) -> u64 {
        let state = &mut *lock(&self.inner.state);
        self.inner.drain(state);
        state.arena.used_bytes()
    }
}

/// Waits on behalf of futures until the last client has gone.
fn help(inner: &Inner) {
    let closing = || inner.closing.load(Ordering::SeqCst) || inner.is_gone();
    let mut state = lock(&inner.state);
    while !closing() {
        if state.futures == 0 {
            state = inner.turn.wait(state).unwrap_or_else(|e| e.into_inner());
            continue;
        }
        let until = now_ns().saturating_add(clock::ns(LONGEST_SLEEP));
        state = inner.wait(state, until, |state| state.futures == 0 || closing()).0;
        if state.broken.is_some() {
            break;
        }
    }
    for slot in &mut state.slots {
        if let Slot::Waiting { waker, .. } = slot
            && let Some(waker) = waker.take()
        {
            waker.wake();
        }
    }
}
