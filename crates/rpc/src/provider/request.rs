//! What a handler is given and what it gives: a request and the reply to it.

use std::sync::Arc;
use std::time::Duration;

use tombolo_calls as calls;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::INLINE_BYTES;
use tombolo_ring::rpc::entry::{BEST_EFFORT, Payload, Refusal, Status};

use super::connection::{Block, Caller, Connection};
use crate::clock;
use crate::shared::{Lent, SharedBuffer};

/// A request that is being served.
#[derive(Debug)]
pub struct Request<'a> {
    pub(crate) request: calls::Request<Foreign<'a>>,
    pub(crate) connection: &'a Arc<Connection>,
}

impl<'a> Request<'a> {
    /// The request's bytes, where they are. A client can change those of a large payload while they
    /// are read: what is looked at twice is copied first ([`Request::to_vec`]).
    pub fn payload(&self) -> Foreign<'a> {
        self.request.bytes
    }

    /// Length of the payload in bytes.
    pub fn len(&self) -> usize {
        self.request.bytes.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.request.bytes.is_empty()
    }

    /// A copy of the bytes.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.request.bytes.len()];
        self.request.bytes.read_into(&mut bytes);
        bytes
    }

    /// The absolute deadline in ns of CLOCK_MONOTONIC; `None` for best effort.
    pub fn deadline_ns(&self) -> Option<u64> {
        Some(self.request.deadline_ns).filter(|deadline| *deadline != BEST_EFFORT)
    }

    /// What is left until the deadline, in ns; 0 when it has passed, `None` for best effort.
    pub fn left_ns(&self) -> Option<u64> {
        // The clock is read only where there is a deadline.
        self.deadline_ns().and_then(|_| self.request.left_ns(clock::now_ns()))
    }

    /// What the caller put in to follow a call through several services.
    pub fn trace(&self) -> u64 {
        self.request.trace
    }

    /// How long it waited, ns.
    pub fn queued_ns(&self) -> u64 {
        self.request.queued_ns
    }

    /// What is left of the time to live that its caller gave it; `None` if the caller left it to
    /// the service. It is for a handler that passes the request on.
    pub fn ttl_left(&self) -> Option<Duration> {
        self.request.ttl_left()
    }

    /// Whether the answer is no longer awaited: the caller has cancelled the request since its
    /// service began, or is gone. A handler that takes long may look, and end early. While all
    /// workers are busy it is noticed within 10 ms.
    pub fn is_cancelled(&self) -> bool {
        self.connection.is_cancelled(self.request.id().token())
    }

    /// Has `hook` called when that becomes so, at once if it is so already, and not any more when
    /// the handler has returned. The thread that notices calls it while the service's queue is held
    /// up: it must be short.
    pub fn on_cancelled(&self, hook: impl FnOnce() + Send + 'static) {
        self.connection.on_cancelled(self.request.id().token(), Box::new(hook));
    }

    /// Who calls, as the kernel says.
    pub fn caller(&self) -> Caller {
        self.connection.caller
    }
}

#[derive(Debug)]
enum Content {
    Inline(usize),
    Block(Block),
    Shared { number: u32, offset: u64, len: u64 },
}

/// There is no room left for the reply in this connection: its client holds replies, or the reply
/// is larger than its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "no room for the reply: the client holds too many, or it is larger than the connection's reply memory; hand over a SharedBuffer"
)]
pub struct NoReplyMemory;

/// The reply to a request. Empty until something is put in; what is put in last is sent.
#[derive(Debug)]
pub struct Reply<'a> {
    connection: &'a Arc<Connection>,
    inline: [u8; INLINE_BYTES],
    content: Content,
    code: u32,
    refusal: Option<Refusal>,
    ending: Option<Ending>,
}

/// How a request ends that is passed on and has no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Status(Status),
    HangUp,
}

impl<'a> Reply<'a> {
    pub(crate) fn new(connection: &'a Arc<Connection>) -> Reply<'a> {
        Reply {
            connection,
            inline: [0; INLINE_BYTES],
            content: Content::Inline(0),
            code: 0,
            refusal: None,
            ending: None,
        }
    }

    /// Replaces what the reply holds.
    fn put(&mut self, content: Content) {
        if let Content::Block(old) = std::mem::replace(&mut self.content, content) {
            self.connection.give_block(old);
        }
    }

    /// A copy of these bytes.
    ///
    /// # Errors
    /// [`NoReplyMemory`]; the request is answered as refused unless something else is put in.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), NoReplyMemory> {
        self.write_view(Foreign::from(bytes))
    }

    /// As [`Reply::write`], for bytes that another party may write meanwhile: a request that is
    /// sent back.
    ///
    /// # Errors
    /// As there.
    pub fn write_view(&mut self, bytes: Foreign<'_>) -> Result<(), NoReplyMemory> {
        if let Some(inline) = self.inline.get_mut(..bytes.len()) {
            bytes.read_into(inline);
            self.refusal = None;
            self.put(Content::Inline(bytes.len()));
            return Ok(());
        }
        bytes.copy_to(self.loan(bytes.len() as u64)?);
        Ok(())
    }

    /// Room for so many bytes in the connection's reply memory, to be written in place.
    ///
    /// # Errors
    /// [`NoReplyMemory`], as for [`Reply::write`].
    pub fn loan(&mut self, len: u64) -> Result<ForeignMut<'a>, NoReplyMemory> {
        self.put(Content::Inline(0));
        let Some(block) = self.connection.take_block(len) else {
            self.refusal = Some(Refusal::ReplyMemory);
            return Err(NoReplyMemory);
        };
        self.refusal = None;
        self.put(Content::Block(block));
        Ok(self.connection.block_view(&block))
    }

    /// A part of memory of our own, which the client reads where it is. Nothing is copied, and
    /// nothing keeps the handler from writing there later.
    ///
    /// # Errors
    /// [`NoReplyMemory`] where the part is not in the buffer, or the client takes no more memory.
    pub fn share(&mut self, buffer: &SharedBuffer, offset: u64, len: u64) -> Result<(), NoReplyMemory> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= buffer.len());
        if !inside || self.connection.give(buffer).is_err() {
            self.refusal = Some(Refusal::ReplyMemory);
            return Err(NoReplyMemory);
        }
        self.refusal = None;
        self.put(Content::Shared { number: buffer.number(), offset, len });
        Ok(())
    }

    /// The application's code: 0, which it is unless set, is success.
    pub fn set_code(&mut self, code: u32) {
        self.code = code;
    }

    /// No reply: the request ends so. For who passes it on to another service, and is told that it
    /// ended so there.
    pub fn end(&mut self, status: Status) {
        self.ending = Some(Ending::Status(status));
    }

    /// No answer at all: the connection ends, and each of its calls with "provider gone". For who
    /// passes requests on to a provider that has gone.
    pub fn hang_up(&mut self) {
        self.ending = Some(Ending::HangUp);
    }

    pub(crate) fn ending(&self) -> Option<Ending> {
        self.ending
    }

    pub(crate) fn code(&self) -> u32 {
        self.code
    }

    pub(crate) fn refusal(&self) -> Option<Refusal> {
        self.refusal
    }

    /// How it is sent, with its inline bytes.
    pub(crate) fn payload(&self) -> (Payload, &[u8]) {
        match self.content {
            Content::Inline(len) => (Payload::Inline { len: len as u32 }, &self.inline[..len]),
            Content::Block(block) => {
                let generation = self.connection.generation(&block);
                (Payload::Arena { offset: block.offset, len: block.len, block: block.id, generation }, &[])
            }
            Content::Shared { number, offset, len } => (Payload::Shared { memory: number, offset, len }, &[]),
        }
    }

    /// Gives back what is not sent.
    pub(crate) fn discard(&mut self) {
        self.put(Content::Inline(0));
    }
}

/// Who serves the requests of a service. Called by several workers at a time.
pub trait Handler: Send + Sync + 'static {
    /// Serves one request. A panic is answered as failed, and the worker goes on.
    fn serve(&self, request: &Request<'_>, reply: &mut Reply<'_>);
}

impl<F: Fn(&Request<'_>, &mut Reply<'_>) + Send + Sync + 'static> Handler for F {
    fn serve(&self, request: &Request<'_>, reply: &mut Reply<'_>) {
        self(request, reply)
    }
}

/// Where a request's bytes are while it is served.
pub(crate) enum RequestBytes {
    Inline,
    Arena,
    Memory(Arc<Lent>),
}
