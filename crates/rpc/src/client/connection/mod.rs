//! One connection, and the only owner of what its users share: its sections, its calls under way,
//! and the wait for their answers.
//!
//! Clients, futures, loans and replies hold a [`ClientConnection`] and use it through its methods.
//! None of them sees its lock or what the lock protects. The module has three parts:
//!
//! * this file: requests out, answers in, cancellation, and what a call ends with;
//! * [`wait`]: how threads wait for answers, one of them on behalf of all;
//! * [`helper`]: the two threads that wait on behalf of futures.
//!
//! The slot table is [`tombolo_calls::slots`], which both ends of a link use too. It is only used
//! under the lock.
//!
//! # Wakers
//! A future's waker is foreign code, which may poll or drop futures immediately. So it is called
//! and dropped without the lock. A thread that takes an answer leaves the waker in `woken`. A
//! thread that polls calls it once the lock is free. If none polls, the thread that waits on behalf
//! of futures does so, since it hears of each answer.
//!
//! # Forks
//! In a forked child the connection is its parent's, with all locks as they were at that instant.
//! Each method looks at that first ([`ClientConnection::is_ours`]), and touches nothing there.

mod helper;
mod wait;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::Waker;
use std::time::Duration;

use rustix::io::Errno;
use tombolo_calls::slots::{Found, Slots};
use tombolo_calls::{self as calls, CallError, CallOptions, Came};
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::arena::{Arena, Unit, units};
use tombolo_ring::rpc::entry::{Answer, Ask, Call, Payload, Refusal, Status, Token};
use tombolo_ring::rpc::ring::{Consumer, Producer};
use tombolo_ring::rpc::{Broken, Ends, Geometry, INLINE_BYTES, PUBLISHED};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::futex;
use tombolo_shm::memory::Mapping;

use super::connect::{ConnectOptions, Connected};
use super::reply::{Bytes, Reply};
use super::{not_shared, watchdog};
use crate::clock::now_ns;
use crate::deadline;
use crate::message::Facts;
use crate::poll::Polling;
use crate::quota::Quota;
use crate::shared::{Given, Lent, SharedBuffer, Taken, TooLarge};
use crate::socket::{self, Received};
use crate::sync::lock;
use helper::Futures;
use wait::{Lead, Limit};

/// Messages that are read in search of one memory: more than a socket's buffer holds (each costs it
/// 768 of 212,992 bytes at least).
const MESSAGES: usize = 1024;

/// What is kept with a call until its answer.
#[derive(Debug)]
struct Kept {
    /// The request's block in our arena.
    block: Option<u64>,
    /// The request's memory.
    shared: Option<SharedBuffer>,
    /// Where in the ring the request was written.
    asked_at: u32,
}

/// What the lock protects.
#[derive(Debug)]
struct ConnectionState {
    asks: Producer<Ask>,
    answers: Consumer<Answer>,
    slots: Slots<Kept, (Answer, Came)>,
    /// The bytes of short answers, by slot.
    inlines: Vec<[u8; INLINE_BYTES]>,
    /// Calls that are no longer awaited, and that could not be cancelled since the ring was full.
    /// The next thread that calls or waits cancels them.
    unsaid: Vec<Token>,
    arena: Arena<Vec<Unit>>,
    given: Given,
    broken: Option<Broken>,
    lead: Lead,
    futures: Futures,
}

/// One connection. See the module's head.
#[derive(Debug)]
pub(super) struct ClientConnection {
    socket: OwnedFd,
    doorbell: Doorbell,
    own: Mapping,
    peer: Mapping,
    own_geometry: Geometry,
    peer_geometry: Geometry,
    facts: Facts,
    polling: Polling,
    state: Mutex<ConnectionState>,
    /// Where followers sleep, and the helper while there is no future.
    turn: Condvar,
    /// Where the thread sleeps that ends futures at their instants.
    timer: Condvar,
    taken: Mutex<Taken>,
    max_shared_bytes: u64,
    /// The provider has gone.
    gone: AtomicBool,
    /// The last `Client` has gone.
    closing: AtomicBool,
    /// Threads in or just before a futex wait.
    sleepers: AtomicU32,
    watch_id: AtomicU64,
    cpu: AtomicU32,
}

impl ClientConnection {
    /// A connection as the handshake left it, with nothing under way, watched from now on.
    ///
    /// # Errors
    /// The watchdog has no thread or no descriptor.
    pub(super) fn new(connected: Connected, options: &ConnectOptions) -> Result<Arc<ClientConnection>, Errno> {
        let Connected { socket, doorbell, own, peer, facts } = connected;
        let entries = own.1.entries();
        let state = ConnectionState {
            asks: Producer::default(),
            answers: Consumer::default(),
            slots: Slots::new(entries),
            inlines: vec![[0; INLINE_BYTES]; entries as usize],
            unsaid: Vec::new(),
            arena: Arena::new(vec![Unit::default(); units(own.1.arena_bytes())]),
            given: Given::default(),
            broken: None,
            lead: Lead::default(),
            futures: Futures::default(),
        };
        let connection = Arc::new(ClientConnection {
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
        });
        connection.watch_id.store(watchdog::add(&connection)?, Ordering::SeqCst);
        connection.set_cpu();
        Ok(connection)
    }

    /// What the service said of itself.
    pub(super) fn facts(&self) -> Facts {
        self.facts
    }

    /// The connection's socket, whose end is the provider's.
    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Whether this process made the connection. A forked child has it from its parent, with all
    /// locks as they were at that instant.
    #[inline]
    pub(super) fn is_ours(&self) -> bool {
        // Relaxed: stored before any other thread has the connection.
        watchdog::is_ours(self.watch_id.load(Ordering::Relaxed))
    }

    #[inline]
    fn ends(&self) -> Ends<'_> {
        let own = self.own.view_mut().unwrap_or_else(|| ForeignMut::from(&mut [][..]));
        match Ends::new(own, self.own_geometry, self.peer.view(), self.peer_geometry) {
            Ok(ends) => ends,
            // The handshake mapped both with the sizes of their geometries, and neither can change.
            Err(_) => unreachable!("sections are as large as their geometries"),
        }
    }

    /// The last client has gone: the connection ends, also where replies are still held, and the
    /// helper with it.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::SeqCst);
        if !self.is_ours() {
            return;
        }
        // The provider sees it, and so does the thread that watches the socket: it wakes the
        // helper.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        let _state = lock(&self.state);
        self.turn.notify_all();
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

    #[inline]
    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// What a call ends with on a connection that is lost, if it is.
    #[inline]
    fn failure(&self, state: &ConnectionState) -> Option<CallError> {
        match state.broken {
            Some(broken) => Some(CallError::Broken(broken)),
            None if self.is_gone() => Some(CallError::ProviderGone),
            None => None,
        }
    }

    /// A block of so many bytes in the memory for requests. `None` where there is none now.
    pub(super) fn take_block(&self, len: u64) -> Option<u64> {
        if !self.is_ours() {
            return None;
        }
        let state = &mut *lock(&self.state);
        let free = state.arena.take(len);
        free.or_else(|| {
            self.drain(state);
            state.arena.take(len)
        })
    }

    /// A block that was not sent.
    pub(super) fn give_block(&self, offset: u64) {
        if self.is_ours() {
            lock(&self.state).arena.give(offset);
        }
    }

    /// The bytes of a block.
    pub(super) fn block(&self, offset: u64, len: u64) -> ForeignMut<'_> {
        self.ends().own_payload(offset, len).unwrap_or_else(|| ForeignMut::from(&mut [][..]))
    }

    /// Hands memory over to the service, unless it has it.
    ///
    /// # Errors
    /// [`CallError::Share`], [`CallError::ProviderGone`].
    pub(super) fn hand_over(&self, buffer: &SharedBuffer) -> Result<(), CallError> {
        if !self.is_ours() {
            return Err(CallError::ProviderGone);
        }
        match lock(&self.state).given.give(&self.socket, buffer) {
            Ok(()) => Ok(()),
            Err(Errno::PIPE) => Err(CallError::ProviderGone),
            Err(errno) => Err(CallError::Share { bytes: buffer.len(), why: not_shared(errno) }),
        }
    }

    /// Sends a request. With its answer the block of an arena payload is free again, and `shared`
    /// is dropped.
    ///
    /// # Errors
    /// [`CallError`]: nothing was sent.
    pub(super) fn send(
        &self,
        payload: Payload,
        inline: &[u8],
        shared: Option<SharedBuffer>,
        options: &CallOptions,
    ) -> Result<Token, CallError> {
        if !self.is_ours() {
            return Err(CallError::ProviderGone);
        }
        let deadline_ns = deadline::resolve(options.deadline);
        let ends = self.ends();
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        if state.slots.is_full() {
            self.drain(state);
        }
        if let Some(failure) = self.failure(state) {
            return Err(failure);
        }
        self.say_unsaid(state);
        let Some(token) = state.slots.vacant() else { return Err(CallError::Busy(state.slots.under_way())) };
        match state.asks.has_room(ends) {
            Ok(true) => {}
            Ok(false) => return Err(CallError::Busy(state.slots.under_way())),
            Err(broken) => {
                state.broken = Some(broken);
                return Err(CallError::Broken(broken));
            }
        }
        let block = match payload {
            Payload::Arena { offset, .. } => Some(offset),
            _ => None,
        };
        let kept = Kept { block, shared, asked_at: state.asks.next() };
        state.slots.begin(token, deadline_ns, options.until_ns(deadline_ns), kept);
        let ttl_ms = options.ttl_ms();
        let call = Call { token, deadline_ns, time_left: false, trace: options.trace, ttl_ms, payload };
        state.asks.push(ends, &Ask::Call(call), inline);
        let ring = state.asks.publish(ends);
        drop(guard);
        if ring {
            self.doorbell.ring();
        }
        Ok(token)
    }

    /// Takes the answers that have come.
    fn drain(&self, state: &mut ConnectionState) {
        if state.broken.is_some() {
            return;
        }
        let ends = self.ends();
        let (mut any, mut now) = (false, None);
        for _ in 0..ends.entries() {
            let ConnectionState { answers, inlines, .. } = state;
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
            self.tell(state);
        }
    }

    /// `now` is read for the first answer that has a deadline.
    fn done(&self, state: &mut ConnectionState, answer: Answer, now: &mut Option<u64>) -> Result<(), Broken> {
        let read = || *now.get_or_insert_with(now_ns);
        let ended = state.slots.answer(answer.token, read, |came| (answer, came))?;
        let Kept { block, shared, asked_at } = ended.kept;
        if let Some(buffer) = shared
            && answer.status == Status::Refused(Refusal::Memory)
        {
            state.given.refused(&buffer);
        }
        state.asks.taken_to(asked_at.wrapping_add(1));
        if let Some(block) = block {
            state.arena.give(block);
        }
        if ended.abandoned {
            self.release(answer.payload);
        }
        if let Some(waker) = ended.waker {
            state.futures.ended(waker);
        }
        Ok(())
    }

    /// Gives the provider a reply's memory back.
    pub(super) fn release(&self, payload: Payload) {
        if let Payload::Arena { block, generation, .. } = payload
            && self.is_ours()
        {
            self.ends().set_mark(block, generation);
        }
    }

    /// Whether the provider has not taken the reply's memory back.
    pub(super) fn is_current(&self, payload: Payload) -> bool {
        match payload {
            Payload::Arena { block, generation, .. } => self.ends().still_ours(block, generation),
            _ => true,
        }
    }

    /// Bytes in the provider's reply memory.
    pub(super) fn reply_view(&self, offset: u64, len: u64) -> Foreign<'_> {
        self.ends().peer_payload(offset, len).unwrap_or(Foreign::empty())
    }

    /// Takes what a call ended with out of its slot; `None` while it is under way.
    fn fetch(self: &Arc<Self>, state: &mut ConnectionState, token: Token) -> Option<Result<Reply, CallError>> {
        match state.slots.fetch(token) {
            Found::Waiting(()) => None,
            Found::Unknown => Some(Err(CallError::Unknown)),
            Found::Done((answer, came)) => Some(self.outcome(answer, came, &state.inlines[token.slot() as usize])),
        }
    }

    /// What becomes of the call whose answer this is.
    fn outcome(self: &Arc<Self>, answer: Answer, came: Came, inline: &[u8; INLINE_BYTES]) -> Result<Reply, CallError> {
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
        // The bytes are moved once, and not into the head and then with it.
        let head = calls::Reply::new(&answer, came, ());
        Ok(Reply { connection: self.clone(), payload: answer.payload, bytes, head })
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

    /// What a call ended with; `None` while it is under way.
    pub(super) fn poll(self: &Arc<Self>, token: Token) -> Option<Result<Reply, CallError>> {
        if !self.is_ours() {
            return Some(Err(CallError::ProviderGone));
        }
        let (done, overdue, woken) = {
            let state = &mut *lock(&self.state);
            let gone = self.is_gone();
            self.drain(state);
            self.say_unsaid(state);
            let mut done = self.fetch(state, token);
            if done.is_none() && (gone || state.broken.is_some()) {
                done = self.failure(state).map(Err);
            }
            let overdue = done.is_none() && state.slots.is_overdue(token, now_ns);
            (done, overdue, state.futures.take_woken())
        };
        woken.into_iter().for_each(Waker::wake);
        if overdue {
            self.abandon(token);
            return Some(Err(CallError::DeadlineExceeded));
        }
        done
    }

    /// Waits for one answer, up to the call's own end at the most.
    pub(super) fn wait(self: &Arc<Self>, token: Token, timeout: Duration) -> Result<Reply, CallError> {
        if !self.is_ours() {
            return Err(CallError::ProviderGone);
        }
        let mut state = lock(&self.state);
        self.say_unsaid(&mut state);
        let limit = Limit::new(timeout, state.slots.until_ns(token));
        let mut state = self.wait_until(state, limit, |state| state.slots.is_settled(token));
        if let Some(done) = self.fetch(&mut state, token) {
            return done;
        }
        if let Some(failure) = self.failure(&state) {
            return Err(failure);
        }
        let overdue = state.slots.is_overdue(token, now_ns);
        drop(state);
        self.abandon(token);
        Err(if overdue { CallError::DeadlineExceeded } else { CallError::Timeout })
    }

    /// Waits until any of these calls has ended, or its deadline has come; which one that is.
    pub(super) fn wait_any(&self, tokens: &[Token], timeout: Duration) -> Option<usize> {
        if tokens.is_empty() || !self.is_ours() {
            return (!tokens.is_empty()).then_some(0);
        }
        let state = lock(&self.state);
        let first = |state: &ConnectionState| tokens.iter().position(|t| state.slots.is_settled(*t));
        let until_ns = tokens.iter().map(|t| state.slots.until_ns(*t)).min().unwrap_or(u64::MAX);
        let state = self.wait_until(state, Limit::new(timeout, until_ns), |state| first(state).is_some());
        let ended = first(&state).or_else(|| tokens.iter().position(|t| state.slots.is_overdue(*t, now_ns)));
        ended.or_else(|| self.failure(&state).map(|_| 0))
    }

    /// Asks the provider to cancel a call. False where the token names no call under way, or too
    /// many cancellations are under way.
    pub(super) fn cancel(&self, token: Token) -> bool {
        if !self.is_ours() {
            return false;
        }
        let said = self.say_cancel(&mut lock(&self.state), token);
        if said == Some(true) {
            self.doorbell.ring();
        }
        said.is_some()
    }

    /// Writes a cancellation, once for each call, and says whether the doorbell is to be rung.
    /// `None` where the token names no call under way, or there is no room.
    fn say_cancel(&self, state: &mut ConnectionState, token: Token) -> Option<bool> {
        let to_say = state.slots.to_cancel(token)?;
        if self.failure(state).is_some() {
            return None;
        }
        if !to_say {
            return Some(false);
        }
        let ends = self.ends();
        if state.asks.has_room(ends) != Ok(true) {
            return None;
        }
        state.asks.push(ends, &Ask::Cancel(token), &[]);
        state.slots.cancelled(token);
        Some(state.asks.publish(ends))
    }

    /// Cancels what could not be cancelled before.
    #[inline]
    fn say_unsaid(&self, state: &mut ConnectionState) {
        if state.unsaid.is_empty() {
            return;
        }
        let mut unsaid = std::mem::take(&mut state.unsaid);
        let mut ring = false;
        unsaid.retain(|token| {
            let said = self.say_cancel(state, *token);
            ring |= said == Some(true);
            said.is_none() && state.slots.waiting(*token).is_some()
        });
        state.unsaid = unsaid;
        if ring {
            self.doorbell.ring();
        }
    }

    /// Abandons this call: it is cancelled, now or as soon as there is room for that. Its slot
    /// becomes free with its answer.
    pub(super) fn abandon(self: &Arc<Self>, token: Token) {
        if !self.is_ours() {
            return;
        }
        // Before the guard, so that it is dropped after it: without the lock.
        let waker: Option<Waker>;
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        match state.slots.abandon(token) {
            Found::Unknown => return,
            Found::Done((answer, came)) => {
                // Its memory is the provider's again when it is dropped, which takes no lock.
                drop(self.outcome(answer, came, &state.inlines[token.slot() as usize]));
                return;
            }
            Found::Waiting(of_future) => waker = of_future,
        }
        state.futures.abandoned(waker.is_some());
        match self.say_cancel(state, token) {
            Some(ring) => {
                drop(guard);
                if ring {
                    self.doorbell.ring();
                }
            }
            None => state.unsaid.push(token),
        }
    }

    /// Calls that hold a slot: under way, or done and not fetched. None in a forked child.
    pub(super) fn under_way(&self) -> usize {
        if !self.is_ours() {
            return 0;
        }
        let state = &mut *lock(&self.state);
        self.drain(state);
        self.say_unsaid(state);
        state.slots.under_way() as usize
    }

    /// Bytes of the memory for requests that are in use. None in a forked child.
    pub(super) fn arena_used(&self) -> u64 {
        if !self.is_ours() {
            return 0;
        }
        let state = &mut *lock(&self.state);
        self.drain(state);
        state.arena.used_bytes()
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        watchdog::remove(*self.watch_id.get_mut());
    }
}
