//! The calling side: connects to a service by its name and sends it requests, blocking or not.
//!
//! A [`Client`] is one connection. Threads may share it: one of the waiting threads sleeps on the
//! provider's word and takes the answers for all of them. Threads that need not wait for each other
//! open a client each.
//!
//! # How a call ends
//! A call ends in exactly one way:
//!
//! - with the reply;
//! - with [`CallError::Late`], [`CallError::Refused`], [`CallError::Cancelled`],
//!   [`CallError::Expired`] or [`CallError::Failed`], as the provider says;
//! - with [`CallError::ProviderGone`] when the provider dies;
//! - with [`CallError::Broken`] when the provider breaks the protocol;
//! - with [`CallError::DeadlineExceeded`] when its deadline passes without an answer;
//! - with [`CallError::Timeout`] when the caller's own timeout ends before that.
//!
//! After a deadline or a timeout the call is cancelled. Its slot and memory become free with the
//! answer, which is discarded.
//!
//! # Deadlines
//! A call ends at its deadline, also if its provider is stopped or hangs. A caller that can use a
//! late reply sets how long it waits after the deadline ([`CallOptions::wait_late`]). Such a reply
//! says that it is late ([`Reply::is_late`]).
//!
//! # Forks
//! A connection does not survive a fork. In a child of the process that connected, each call ends
//! with [`CallError::ProviderGone`]. If the child drops the connection, loans or replies, they
//! still belong to the parent.
//!
//! # A hostile provider
//! It can answer nonsense or nothing. Each field of an answer is read once and checked, and every
//! wait has a time limit. The memory that it makes a client map is bounded: its section when the
//! client connects, and whole memories by [`ConnectOptions::max_shared_bytes`].

mod connect;
mod connection;
mod future;
mod reply;
mod watchdog;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use rustix::io::Errno;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::INLINE_BYTES;
use tombolo_ring::rpc::entry::{Ask, Call, Payload};
use tombolo_shm::memory::MemoryError;

pub use connect::{ConnectError, ConnectOptions, report};
pub use future::CallFuture;
pub use reply::Reply;
use tombolo_calls as calls;
pub use tombolo_calls::{CallError, CallOptions, NoMemory, NotShared};
pub use tombolo_ring::rpc::entry::Token;

use crate::clock::{self, now_ns};
use crate::deadline;
use crate::message::Facts;
use crate::shared::{MAX_MEMORIES, SharedBuffer};
use crate::sync::lock;
use connection::{Inner, Limit, Slot, State, help};

fn not_shared(errno: Errno) -> NotShared {
    match errno {
        Errno::NOBUFS => NotShared::Full(MAX_MEMORIES),
        Errno::AGAIN => NotShared::Unread,
        errno => NotShared::System(calls::Errno(errno.raw_os_error())),
    }
}

/// Memory that could not be had for a call.
fn no_memory(error: MemoryError) -> CallError {
    let (what, bytes, source) = match error {
        MemoryError::System { what, bytes, source } => (what, bytes, source),
        MemoryError::OutsideFile { bytes, .. } | MemoryError::Shape { bytes, .. } => ("a mapping", bytes, Errno::INVAL),
        MemoryError::FileSystem { .. } => ("memory", 0, Errno::INVAL),
    };
    CallError::Memory(NoMemory { what, bytes, source: calls::Errno(source.raw_os_error()) })
}

/// Ends the connection with the last client, also where replies are still held, and the helper thread with it.
#[derive(Debug)]
struct Handle {
    inner: Arc<Inner>,
    /// Calls that are no longer awaited, and that could not be cancelled since the ring was full.
    /// The next thread that calls or waits cancels them.
    unsaid: Mutex<Vec<Token>>,
    /// Whether there may be any.
    any_unsaid: AtomicBool,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inner.closing.store(true, Ordering::SeqCst);
        if !is_ours(&self.inner) {
            return;
        }
        // The provider sees it, and so does the thread that watches the socket: it wakes the helper.
        let _ = rustix::net::shutdown(&self.inner.socket, rustix::net::Shutdown::Both);
        let _state = lock(&self.inner.state);
        self.inner.turn.notify_all();
    }
}

/// Whether this process made the connection. A forked child has it from its parent, with all locks
/// as they were at that instant.
#[inline]
fn is_ours(inner: &Inner) -> bool {
    // Relaxed: stored before any other thread has the connection.
    watchdog::is_ours(inner.watch_id.load(Ordering::Relaxed))
}

/// A connection to a service. Clones are the same connection.
#[derive(Clone, Debug)]
pub struct Client {
    inner: Arc<Inner>,
    handle: Arc<Handle>,
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
    /// The bytes to fill in; other processes may see them change.
    pub fn view(&self) -> ForeignMut<'_> {
        self.inner.ends().own_payload(self.offset, self.len).unwrap_or_else(|| ForeignMut::from(&mut [][..]))
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if !self.sent && is_ours(&self.inner) {
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
        let connected = connect::connect(name, options)?;
        let inner = Arc::new(Inner::new(connected, options));
        let id =
            watchdog::add(&inner).map_err(|source| ConnectError::System { what: "watching the service", source })?;
        inner.watch_id.store(id, Ordering::SeqCst);
        inner.set_cpu();
        let handle = Handle { inner: inner.clone(), unsaid: Mutex::default(), any_unsaid: AtomicBool::new(false) };
        Ok(Client { handle: Arc::new(handle), inner })
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
        self.submit_view(Foreign::from(bytes), options)
    }

    /// As [`Client::submit`], for bytes that another party may write meanwhile: a request or a reply that is passed on.
    ///
    /// # Errors
    /// [`CallError`], where the request could not be sent.
    pub fn submit_view(&self, bytes: Foreign<'_>, options: &CallOptions) -> Result<Token, CallError> {
        let len = bytes.len() as u64;
        if bytes.len() <= INLINE_BYTES {
            let mut inline = [0; INLINE_BYTES];
            let read = bytes.read_into(&mut inline);
            return self.submit(&inline[..read], options);
        }
        match self.loan(len) {
            Some(loan) => {
                bytes.copy_to(loan.view());
                self.submit_loan(loan, options)
            }
            None => {
                let buffer = SharedBuffer::new(len, false).map_err(no_memory)?;
                bytes.copy_to(buffer.view());
                self.submit_shared(&buffer, 0, len, options)
            }
        }
    }

    /// Room for a request of so many bytes in the connection's memory. `None` where there is none now.
    pub fn loan(&self, len: u64) -> Option<Loan> {
        if !is_ours(&self.inner) {
            return None;
        }
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
        if !is_ours(&self.inner) {
            return Err(CallError::ProviderGone);
        }
        let given = lock(&self.inner.state).given.give(&self.inner.socket, buffer);
        match given {
            Ok(()) => {}
            Err(Errno::PIPE) => return Err(CallError::ProviderGone),
            Err(errno) => return Err(CallError::Share { bytes: buffer.len(), why: not_shared(errno) }),
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
        if !is_ours(&self.inner) {
            return Err(CallError::ProviderGone);
        }
        let deadline_ns = deadline::resolve(options.deadline);
        let ttl_ms = options.ttl_ms();
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
        self.say_unsaid(state);
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
        state.asked_at[slot as usize] = state.asks.next();
        let until_ns = options.until_ns(deadline_ns);
        state.slots[slot as usize] =
            Slot::Waiting { block, shared, abandoned: false, waker: None, deadline_ns, until_ns };
        let call = Call { token, deadline_ns, time_left: false, trace: options.trace, ttl_ms, payload };
        state.asks.push(ends, &Ask::Call(call), inline);
        let ring = state.asks.publish(ends);
        drop(guard);
        if ring {
            inner.doorbell.ring();
        }
        Ok(token)
    }

    /// Whether a token's call is under way or done and not fetched.
    fn is_known(state: &State, token: Token) -> bool {
        let slot = state.slots.get(token.slot() as usize);
        let known = match slot {
            Some(Slot::Waiting { abandoned, .. }) => !abandoned,
            Some(Slot::Done(..)) => true,
            _ => false,
        };
        known && state.turns.get(token.slot() as usize) == Some(&token.turn())
    }

    /// Whether a token's answer has not come yet, regardless of which thread waits for it.
    fn is_waiting(state: &State, token: Token) -> bool {
        let at = token.slot() as usize;
        matches!(state.slots.get(at), Some(Slot::Waiting { .. })) && state.turns.get(at) == Some(&token.turn())
    }

    fn is_done(state: &State, token: Token) -> bool {
        matches!(state.slots.get(token.slot() as usize), Some(Slot::Done(..))) || !Self::is_known(state, token)
    }

    /// Takes the answer out of its slot.
    fn fetch(&self, state: &mut State, token: Token) -> Option<Result<Reply, CallError>> {
        if !Self::is_known(state, token) {
            return Some(Err(CallError::Unknown));
        }
        let slot = &mut state.slots[token.slot() as usize];
        let Slot::Done(answer, came) = *slot else { return None };
        *slot = Slot::Free;
        state.free.push(token.slot());
        Some(self.inner.outcome(answer, came, &state.inlines[token.slot() as usize]))
    }

    /// Whether a call has ended by itself, at its deadline or as much later as its caller waits.
    fn is_overdue(state: &State, token: Token) -> bool {
        // The clock is read for calls only that have a deadline.
        let until_ns = if Self::is_waiting(state, token) { state.until_ns(token.slot()) } else { u64::MAX };
        until_ns != u64::MAX && now_ns() >= until_ns
    }

    /// Looks whether the answer has come; `None` while it has not. From the deadline on [`CallError::DeadlineExceeded`], and the token names
    /// nothing any more.
    pub fn poll(&self, token: Token) -> Option<Result<Reply, CallError>> {
        if !is_ours(&self.inner) {
            return Some(Err(CallError::ProviderGone));
        }
        let (done, overdue, woken) = {
            let state = &mut *lock(&self.inner.state);
            let failed = self.inner.is_gone();
            self.inner.drain(state);
            self.say_unsaid(state);
            let mut done = self.fetch(state, token);
            if done.is_none() && (failed || state.broken.is_some()) {
                done = self.inner.failure(state).map(Err);
            }
            let overdue = done.is_none() && Self::is_overdue(state, token);
            (done, overdue, std::mem::take(&mut state.woken))
        };
        woken.into_iter().for_each(Waker::wake);
        if overdue {
            self.abandon(token);
            return Some(Err(CallError::DeadlineExceeded));
        }
        done
    }

    /// Waits for one answer, up to the call's own end at the most.
    ///
    /// # Errors
    /// [`CallError`]. After [`CallError::DeadlineExceeded`] and [`CallError::Timeout`] the call is cancelled, and the token names nothing any more.
    pub fn wait(&self, token: Token, timeout: Duration) -> Result<Reply, CallError> {
        if !is_ours(&self.inner) {
            return Err(CallError::ProviderGone);
        }
        let mut state = lock(&self.inner.state);
        self.say_unsaid(&mut state);
        let until_ns = state.until_ns(token.slot());
        let limit = Limit::new(timeout, until_ns);
        let (mut state, _) = self.inner.wait(state, limit, |state| Self::is_done(state, token));
        if let Some(done) = self.fetch(&mut state, token) {
            return done;
        }
        if let Some(failure) = self.inner.failure(&state) {
            return Err(failure);
        }
        let overdue = Self::is_overdue(&state, token);
        drop(state);
        self.abandon(token);
        Err(if overdue { CallError::DeadlineExceeded } else { CallError::Timeout })
    }

    /// Waits until the answer of any of these calls has come, or its deadline; which one that is. `None` after the time limit, or when there are
    /// no tokens. A connection that is lost counts as an answer of each of its calls.
    pub fn wait_any(&self, tokens: &[Token], timeout: Duration) -> Option<usize> {
        if !is_ours(&self.inner) {
            return (!tokens.is_empty()).then_some(0);
        }
        let state = lock(&self.inner.state);
        let first = |state: &State| tokens.iter().position(|t| Self::is_done(state, *t));
        let waiting = tokens.iter().filter(|t| Self::is_waiting(&state, **t));
        let until_ns = waiting.map(|t| state.until_ns(t.slot())).min().unwrap_or(u64::MAX);
        let limit = Limit::new(timeout, until_ns);
        let (state, _) = self.inner.wait(state, limit, |state| tokens.is_empty() || first(state).is_some());
        let ended = first(&state).or_else(|| tokens.iter().position(|t| Self::is_overdue(&state, *t)));
        ended.or_else(|| self.inner.failure(&state).and_then(|_| (!tokens.is_empty()).then_some(0)))
    }

    /// Waits for the answers of all these calls, in the order of the tokens. Those that have not come when the time is over are
    /// cancelled, and end with [`CallError::Timeout`], or earlier with [`CallError::DeadlineExceeded`].
    pub fn wait_all(&self, tokens: &[Token], timeout: Duration) -> Vec<Result<Reply, CallError>> {
        let until = now_ns().saturating_add(clock::ns(timeout));
        let left = || Duration::from_nanos(until.saturating_sub(now_ns()));
        tokens.iter().map(|token| self.wait(*token, left())).collect()
    }

    /// Asks the provider to take a call back. Its answer still comes: [`CallError::Cancelled`], or what it was if service had
    /// begun. False where the token names no call under way, or too many cancellations are under way.
    pub fn cancel(&self, token: Token) -> bool {
        if !is_ours(&self.inner) {
            return false;
        }
        let said = self.say_cancel(&mut lock(&self.inner.state), token);
        if said == Some(true) {
            self.inner.doorbell.ring();
        }
        said.is_some()
    }

    /// Writes a cancellation, and says whether the doorbell is to be rung. `None` where the token names no call under way, or there is no room.
    fn say_cancel(&self, state: &mut State, token: Token) -> Option<bool> {
        let ends = self.inner.ends();
        let fine = Self::is_waiting(state, token) && self.inner.failure(state).is_none();
        if !fine || state.asks.has_room(ends) != Ok(true) {
            return None;
        }
        state.asks.push(ends, &Ask::Cancel(token), &[]);
        Some(state.asks.publish(ends))
    }

    /// Cancels what could not be cancelled before.
    fn say_unsaid(&self, state: &mut State) {
        // Relaxed: it is set under the state's lock, which we hold.
        if !self.handle.any_unsaid.load(Ordering::Relaxed) {
            return;
        }
        let mut unsaid = lock(&self.handle.unsaid);
        let mut ring = false;
        unsaid.retain(|token| {
            let said = self.say_cancel(state, *token);
            ring |= said == Some(true);
            said.is_none() && Self::is_waiting(state, *token)
        });
        self.handle.any_unsaid.store(!unsaid.is_empty(), Ordering::Relaxed);
        if ring {
            self.inner.doorbell.ring();
        }
    }

    /// Abandons this call: it is cancelled, now or as soon as there is room for that. Its slot
    /// becomes free with its answer.
    fn abandon(&self, token: Token) {
        if !is_ours(&self.inner) {
            return;
        }
        // Before the guard, so that it is dropped after it: without the lock.
        let waker: Option<Waker>;
        let mut guard = lock(&self.inner.state);
        let state = &mut *guard;
        if !Self::is_known(state, token) {
            return;
        }
        if let Some(done) = self.fetch(state, token) {
            // Dropped outside the lock would be as well; a reply takes none.
            drop(done);
            return;
        }
        if let Slot::Waiting { abandoned, waker: waiting, .. } = &mut state.slots[token.slot() as usize] {
            *abandoned = true;
            waker = waiting.take();
            state.futures -= u32::from(waker.is_some());
        }
        match self.say_cancel(state, token) {
            Some(ring) => {
                drop(guard);
                if ring {
                    self.inner.doorbell.ring();
                }
            }
            None => {
                lock(&self.handle.unsaid).push(token);
                self.handle.any_unsaid.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Submits a request and returns a future of its reply.
    pub fn call_async(&self, bytes: &[u8], options: &CallOptions) -> CallFuture {
        CallFuture::new(self.clone(), self.submit(bytes, options))
    }

    /// For futures: the answer, or the waker is woken when it comes.
    fn poll_with(&self, token: Token, by: &Waker) -> Option<Result<Reply, CallError>> {
        if let Some(done) = self.poll(token) {
            return Some(done);
        }
        let mut own = Some(by.clone());
        let (mut again, mut sooner) = (false, false);
        {
            let state = &mut *lock(&self.inner.state);
            match state.slots.get_mut(token.slot() as usize) {
                Some(Slot::Waiting { waker, until_ns, .. }) => {
                    // The one before is dropped without the lock.
                    std::mem::swap(waker, &mut own);
                    state.futures += u32::from(own.is_none());
                    // The thread of deadlines has to end its sleep sooner.
                    sooner = *until_ns < state.futures_end_ns;
                    state.futures_end_ns = state.futures_end_ns.min(*until_ns);
                }
                // It came in between.
                _ => again = true,
            }
            again |= self.inner.is_gone();
            if !std::mem::replace(&mut state.helper, true) {
                let inner = self.inner.clone();
                let started = std::thread::Builder::new().name("tombolo-rpc-async".into()).spawn(move || help(&inner));
                // Without the thread the executor has to look again and again.
                state.helper = started.is_ok();
                again |= started.is_err();
            }
            self.inner.turn.notify_all();
        }
        if sooner {
            self.inner.timer.notify_all();
        }
        if again {
            by.wake_by_ref();
        }
        None
    }

    /// Calls under way or done and not fetched: each holds a slot. None in a forked child.
    pub fn under_way(&self) -> usize {
        if !is_ours(&self.inner) {
            return 0;
        }
        let state = &mut *lock(&self.inner.state);
        self.inner.drain(state);
        self.say_unsaid(state);
        state.slots.len() - state.free.len()
    }

    /// Bytes of the connection's request memory that are in use. None in a forked child.
    pub fn arena_used(&self) -> u64 {
        if !is_ours(&self.inner) {
            return 0;
        }
        let state = &mut *lock(&self.inner.state);
        self.inner.drain(state);
        state.arena.used_bytes()
    }
}
