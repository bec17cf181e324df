//! The calling side: connects to a service by its name and sends it requests, blocking or not.
//!
//! A [`Client`] is one connection. Threads may share it: one of the waiting threads sleeps on the
//! provider's word and takes the answers for all of them. Threads that need not wait for each other
//! open a client each. This file is what users see; all that they share is in `connection`.
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

use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use rustix::io::Errno;
use tombolo_calls as calls;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::INLINE_BYTES;
use tombolo_ring::rpc::entry::Payload;
use tombolo_shm::memory::MemoryError;

pub use connect::{ConnectError, ConnectOptions, report};
pub use future::CallFuture;
pub use reply::Reply;
pub use tombolo_calls::{CallError, CallOptions, NoMemory, NotShared};
pub use tombolo_ring::rpc::entry::Token;

use crate::clock::{self, now_ns};
use crate::message::Facts;
use crate::shared::{MAX_MEMORIES, SharedBuffer};
use connection::ClientConnection;

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

/// Ends the connection with the last client, also where replies are still held, and the helper
/// threads with it.
#[derive(Debug)]
struct LastClient(Arc<ClientConnection>);

impl Drop for LastClient {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// A connection to a service. Clones are the same connection.
#[derive(Clone, Debug)]
pub struct Client {
    connection: Arc<ClientConnection>,
    _last: Arc<LastClient>,
}

/// Room for a request in the connection's memory, to be written in place and then sent by
/// [`Client::submit_loan`].
#[derive(Debug)]
pub struct Loan {
    connection: Arc<ClientConnection>,
    offset: u64,
    len: u64,
    sent: bool,
}

impl Loan {
    /// The bytes to fill in; other processes may see them change.
    pub fn view(&self) -> ForeignMut<'_> {
        self.connection.block(self.offset, self.len)
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if !self.sent {
            self.connection.give_block(self.offset);
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
        let connection = ClientConnection::new(connected, options)
            .map_err(|source| ConnectError::System { what: "watching the service", source })?;
        Ok(Client { _last: Arc::new(LastClient(connection.clone())), connection })
    }

    /// What the service said of itself.
    pub fn facts(&self) -> Facts {
        self.connection.facts()
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
            return self.connection.send(Payload::Inline { len: bytes.len() as u32 }, bytes, None, options);
        }
        self.submit_view(Foreign::from(bytes), options)
    }

    /// As [`Client::submit`], for bytes that another party may write meanwhile: a request or a
    /// reply that is passed on.
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

    /// Room for a request of so many bytes in the connection's memory. `None` where there is none
    /// now.
    pub fn loan(&self, len: u64) -> Option<Loan> {
        let offset = self.connection.take_block(len)?;
        Some(Loan { connection: self.connection.clone(), offset, len, sent: false })
    }

    /// Sends what was written into the loan, without waiting.
    ///
    /// # Errors
    /// [`CallError`], where the request could not be sent. The loan is given back.
    pub fn submit_loan(&self, mut loan: Loan, options: &CallOptions) -> Result<Token, CallError> {
        if !Arc::ptr_eq(&loan.connection, &self.connection) {
            return Err(CallError::Unknown);
        }
        let payload = Payload::Arena { offset: loan.offset, len: loan.len, block: 0, generation: 0 };
        let token = self.connection.send(payload, &[], None, options)?;
        loan.sent = true;
        Ok(token)
    }

    /// Sends a part of shared memory, without waiting and without a copy. The memory must not be
    /// written before the answer.
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
        self.connection.hand_over(buffer)?;
        let payload = Payload::Shared { memory: buffer.number(), offset, len };
        self.connection.send(payload, &[], Some(buffer.clone()), options)
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

    /// Looks whether the answer has come; `None` while it has not. From the deadline on
    /// [`CallError::DeadlineExceeded`], and the token names nothing any more.
    pub fn poll(&self, token: Token) -> Option<Result<Reply, CallError>> {
        self.connection.poll(token)
    }

    /// Waits for one answer, up to the call's own end at the most.
    ///
    /// # Errors
    /// [`CallError`]. After [`CallError::DeadlineExceeded`] and [`CallError::Timeout`] the call is
    /// cancelled, and the token names nothing any more.
    pub fn wait(&self, token: Token, timeout: Duration) -> Result<Reply, CallError> {
        self.connection.wait(token, timeout)
    }

    /// Waits until the answer of any of these calls has come, or its deadline; which one that is.
    /// `None` after the time limit, or when there are no tokens. A connection that is lost counts
    /// as an answer of each of its calls.
    pub fn wait_any(&self, tokens: &[Token], timeout: Duration) -> Option<usize> {
        self.connection.wait_any(tokens, timeout)
    }

    /// Waits for the answers of all these calls, in the order of the tokens. Those that have not
    /// come when the time is over are cancelled, and end with [`CallError::Timeout`], or earlier
    /// with [`CallError::DeadlineExceeded`].
    pub fn wait_all(&self, tokens: &[Token], timeout: Duration) -> Vec<Result<Reply, CallError>> {
        let until = now_ns().saturating_add(clock::ns(timeout));
        let left = || Duration::from_nanos(until.saturating_sub(now_ns()));
        tokens.iter().map(|token| self.wait(*token, left())).collect()
    }

    /// Asks the provider to take a call back. Its answer still comes: [`CallError::Cancelled`], or
    /// what it was if service had begun. False where the token names no call under way, or too many
    /// cancellations are under way.
    pub fn cancel(&self, token: Token) -> bool {
        self.connection.cancel(token)
    }

    /// Abandons this call: it is cancelled, now or as soon as there is room for that. Its slot
    /// becomes free with its answer.
    fn abandon(&self, token: Token) {
        self.connection.abandon(token);
    }

    /// Submits a request and returns a future of its reply.
    pub fn call_async(&self, bytes: &[u8], options: &CallOptions) -> CallFuture {
        CallFuture::new(self.clone(), self.submit(bytes, options))
    }

    /// For futures: the answer, or the waker is woken when it comes.
    fn poll_with(&self, token: Token, by: &Waker) -> Option<Result<Reply, CallError>> {
        self.connection.poll_with(token, by)
    }

    /// Calls under way or done and not fetched: each holds a slot. None in a forked child.
    pub fn under_way(&self) -> usize {
        self.connection.under_way()
    }

    /// Bytes of the connection's request memory that are in use. None in a forked child.
    pub fn arena_used(&self) -> u64 {
        self.connection.arena_used()
    }
}
