//! A call as its caller and its server see it: what is asked for, how it ends, what is answered.

use alloc::vec::Vec;
use core::fmt;
use core::time::Duration;

use tombolo_ring::rpc::Broken;
use tombolo_ring::rpc::entry::{BEST_EFFORT, Refusal, Status, Token};

/// What a call asks for, besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallOptions {
    /// The answer is wanted so long after the call; `None`: best effort, after all that have a deadline.
    pub deadline: Option<Duration>,
    /// For how long after the deadline a late reply is still waited for; not at all unless this is set.
    pub wait_late: Duration,
    /// How long this caller waits at most, where the deadline is later or there is none.
    pub timeout: Duration,
    /// How long the request may wait for its service; the provider's choice where there is none.
    pub ttl: Option<Duration>,
    /// Carried to the provider, to trace a call through several services.
    pub trace: u64,
}

impl Default for CallOptions {
    fn default() -> Self {
        CallOptions { deadline: None, wait_late: Duration::ZERO, timeout: CallOptions::TIMEOUT, ttl: None, trace: 0 }
    }
}

impl CallOptions {
    /// How long a caller waits that says nothing else.
    pub const TIMEOUT: Duration = Duration::from_secs(30);

    /// With a deadline so long after the call, which is waited for.
    pub fn within(left: Duration) -> CallOptions {
        CallOptions { deadline: Some(left), timeout: left.max(CallOptions::TIMEOUT), ..CallOptions::default() }
    }

    /// How long the call is waited for, and what it ends with if no answer has come by then.
    pub fn limit(&self) -> (Duration, CallError) {
        match self.deadline.map(|left| left.saturating_add(self.wait_late)) {
            Some(left) if left <= self.timeout => (left, CallError::DeadlineExceeded),
            _ => (self.timeout, CallError::Timeout),
        }
    }

    /// When the answer is wanted, and when the call ends by itself, on our clock; `u64::MAX` for best effort.
    pub(crate) fn instants_ns(&self, now_ns: u64) -> (u64, u64) {
        let deadline_ns = self.deadline.map_or(BEST_EFFORT, |left| now_ns.saturating_add(ns(left)));
        (deadline_ns, deadline_ns.saturating_add(ns(self.wait_late)))
    }

    /// With what is left of a request's deadline, for a call that is made to serve it.
    pub fn inherit(request: &Request, now_ns: u64) -> CallOptions {
        let deadline = request.left_ns(now_ns).map(Duration::from_nanos);
        CallOptions { deadline, trace: request.trace, ..CallOptions::default() }
    }

    /// As it crosses: ns that are left.
    pub(crate) fn left_ns(&self) -> u64 {
        self.deadline.map_or(BEST_EFFORT, |left| ns(left).min(BEST_EFFORT - 1))
    }
}

/// A duration in ns, as many as a `u64` holds.
pub fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// How a call ended, if not with a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum CallError {
    /// Its deadline passed without an answer. Whether the call is served is not known.
    DeadlineExceeded,
    /// Its deadline had passed before it could be served: it was not. Only a caller that waits beyond the deadline hears this.
    Late,
    /// It was not accepted.
    Refused(Refusal),
    /// It was cancelled before it was served.
    Cancelled,
    /// It waited for longer than its time to live.
    Expired,
    /// The provider failed while serving it, or serves nothing.
    Failed,
    /// The peer is not there, or went while the call was under way. Whether it was served is not known.
    ProviderGone,
    /// The caller's own time limit is over. Whether the call is served is not known.
    Timeout,
    /// The peer broke the protocol; the link restarts.
    Broken(Broken),
    /// As many calls, or as many bytes of requests, are under way as the link holds.
    Busy,
    /// The link carries no payload of that length.
    TooLong { bytes: usize, most: usize },
    /// Replies that have not been fetched fill the memory that is kept for them.
    ReplyMemory,
    /// A token that names no call under way.
    Unknown,
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallError::DeadlineExceeded => f.write_str("the deadline passed without an answer"),
            CallError::Late => f.write_str("the deadline had passed before the service could begin"),
            CallError::Refused(why) => write!(f, "the service refused the call: {}", why.text()),
            CallError::Cancelled => f.write_str("the call was cancelled"),
            CallError::Expired => f.write_str("the call waited for longer than its time to live"),
            CallError::Failed => f.write_str("the service failed while serving the call, or the peer serves nothing"),
            CallError::ProviderGone => f.write_str("the serving peer is not connected, or has gone"),
            CallError::Timeout => f.write_str("no answer came within the time limit"),
            CallError::Broken(broken) => write!(f, "{broken}; the link is reset"),
            CallError::Busy => f.write_str("the link holds no more calls, or bytes of requests, at a time"),
            CallError::TooLong { bytes, most } => write!(f, "a payload of {bytes} bytes; the link carries {most}"),
            CallError::ReplyMemory => f.write_str("unfetched replies fill the memory kept for replies"),
            CallError::Unknown => f.write_str("no call of that token is under way"),
        }
    }
}

impl core::error::Error for CallError {}

/// What a call brings back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// What the handler answered.
    pub bytes: Vec<u8>,
    /// The application's code; 0 is success.
    pub code: u32,
    /// How long the request waited at the provider, ns of its clock.
    pub queued_ns: u64,
    /// How long it was served, ns of the provider's clock.
    pub service_ns: u64,
    /// How long after the call's deadline it came, ns; 0 where it was in time, or the call had no deadline.
    pub late_by_ns: u64,
}

/// Which request of a side's, among those that wait or are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId {
    pub(crate) token: Token,
    /// Which life of the link it belongs to.
    pub(crate) epoch: u32,
}

/// A request that is to be served. It holds a copy of its bytes, which no peer changes any more.
#[derive(Debug)]
pub struct Request {
    pub(crate) id: RequestId,
    pub(crate) began_ns: u64,
    /// The payload that the client sent.
    pub bytes: Vec<u8>,
    /// When the answer is wanted, on our clock: what was left when it was taken, from then on. `u64::MAX`: best effort.
    pub deadline_ns: u64,
    /// How long it may wait for its service, from when it was taken; the server's choice where there is none.
    pub ttl: Option<Duration>,
    /// What the caller put in to follow a call through several services.
    pub trace: u64,
    /// How long it waited, ns.
    pub queued_ns: u64,
}

impl Request {
    /// Names the request in the provider's schedule and in logs.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// What is left of its time to live, for a handler that passes the call on.
    pub fn ttl_left(&self) -> Option<Duration> {
        self.ttl.map(|ttl| ttl.saturating_sub(Duration::from_nanos(self.queued_ns)))
    }

    /// What is left until the deadline, in ns; 0 when it has passed, `None` for best effort.
    pub fn left_ns(&self, now_ns: u64) -> Option<u64> {
        (self.deadline_ns != BEST_EFFORT).then(|| self.deadline_ns.saturating_sub(now_ns))
    }
}

/// What a handler answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    pub(crate) status: Status,
    pub(crate) code: u32,
    pub(crate) bytes: Vec<u8>,
}

impl Response {
    /// A reply of these bytes, with code 0.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Response {
        Response { status: Status::Served, code: 0, bytes: bytes.into() }
    }

    /// The same with the application's code; 0 is success.
    pub fn with_code(self, code: u32) -> Response {
        Response { code, ..self }
    }

    /// No reply: the call ends so, for who passes a call on that ended so.
    pub fn end(status: Status) -> Response {
        Response { status, code: 0, bytes: Vec::new() }
    }
}
