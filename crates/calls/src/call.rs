//! A call as its caller and its server see it: what is asked for, and what is answered.

use alloc::vec::Vec;
use core::time::Duration;

use tombolo_ring::rpc::entry::{Answer, BEST_EFFORT, Status, Token};

use crate::error::{CallError, Came};

/// A duration in ns; what is longer than a `u64` holds (584 years) is that.
#[inline]
pub fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// When an answer is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Deadline {
    /// The one of the request that the calling thread serves for a service of this machine, if it
    /// serves one; else none.
    #[default]
    Inherit,
    /// So much after the call; or that of the request that is served, if that is earlier.
    In(Duration),
    /// At an instant of the caller's clock, in ns; or that of the request that is served, if that
    /// is earlier.
    At(u64),
}

impl Deadline {
    /// As an instant of the caller's clock in ns, never later than the `inherited` one; `u64::MAX`
    /// is none. The clock is read only where it is needed.
    #[inline]
    pub fn instant_ns(self, now_ns: impl FnOnce() -> u64, inherited_ns: u64) -> u64 {
        let wanted = match self {
            Deadline::Inherit => BEST_EFFORT,
            Deadline::In(left) => now_ns().saturating_add(ns(left)),
            Deadline::At(instant) => instant,
        };
        wanted.min(inherited_ns)
    }
}

impl From<Option<Duration>> for Deadline {
    /// So much after the call; without a duration, none of its own.
    fn from(left: Option<Duration>) -> Deadline {
        left.map_or(Deadline::Inherit, Deadline::In)
    }
}

/// What a call asks for, besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallOptions {
    /// When an answer is wanted. A call without a deadline is best effort, after all that have one.
    pub deadline: Deadline,
    /// For how long after the deadline a late reply is still waited for; not at all unless this is
    /// set.
    pub wait_late: Duration,
    /// How long this caller waits at most, where the deadline is later or there is none.
    pub timeout: Duration,
    /// How long the request may wait at the provider; the provider's choice where there is none.
    pub ttl: Option<Duration>,
    /// Carried to the provider, to trace a call through several services.
    pub trace: u64,
}

impl Default for CallOptions {
    fn default() -> Self {
        CallOptions {
            deadline: Deadline::Inherit,
            wait_late: Duration::ZERO,
            timeout: CallOptions::TIMEOUT,
            ttl: None,
            trace: 0,
        }
    }
}

impl CallOptions {
    /// How long a caller waits that says nothing else.
    pub const TIMEOUT: Duration = Duration::from_secs(30);

    /// With a deadline so long after the call, which is waited for.
    pub fn within(left: Duration) -> CallOptions {
        let timeout = left.max(CallOptions::TIMEOUT);
        CallOptions { deadline: Deadline::In(left), timeout, ..CallOptions::default() }
    }

    /// With what is left of a request's deadline, for a call that is made to serve it.
    pub fn inherit<B>(request: &Request<B>, now_ns: u64) -> CallOptions {
        let left = request.left_ns(now_ns).map(Duration::from_nanos);
        CallOptions { deadline: left.into(), trace: request.trace, ..CallOptions::default() }
    }

    /// How long the call is waited for from now on, and what it ends with if no answer has come by
    /// then.
    pub fn limit(&self, now_ns: u64) -> (Duration, CallError) {
        let until_ns = self.until_ns(self.deadline.instant_ns(|| now_ns, BEST_EFFORT));
        let left = Duration::from_nanos(until_ns.saturating_sub(now_ns));
        if until_ns != BEST_EFFORT && left <= self.timeout {
            (left, CallError::DeadlineExceeded)
        } else {
            (self.timeout, CallError::Timeout)
        }
    }

    /// When a call with that deadline ends by itself: then, or as much later as its caller waits.
    /// `u64::MAX`: it does not.
    #[inline]
    pub fn until_ns(&self, deadline_ns: u64) -> u64 {
        deadline_ns.saturating_add(ns(self.wait_late))
    }

    /// The time to live as an entry has it: ms, 0 where the provider is to choose.
    #[inline]
    pub fn ttl_ms(&self) -> u32 {
        self.ttl.map_or(0, |ttl| u32::try_from(ttl.as_millis()).unwrap_or(u32::MAX).max(1))
    }
}

/// What a call brings back. The bytes are a copy, or whatever the caller's side keeps of them where
/// they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply<B = Vec<u8>> {
    /// What the handler answered.
    pub bytes: B,
    /// The application's code; 0 is success.
    pub code: u32,
    /// How long the request waited at the provider, ns of its clock.
    pub queued_ns: u64,
    /// How long it was served, ns of the provider's clock.
    pub service_ns: u64,
    /// How long after the call's deadline it came, ns; 0 where it was in time, or the call had no
    /// deadline.
    pub late_by_ns: u64,
}

impl<B> Reply<B> {
    /// The reply that an answer brings.
    #[inline]
    pub fn new(answer: &Answer, came: Came, bytes: B) -> Reply<B> {
        let &Answer { code, queued_ns, service_ns, .. } = answer;
        Reply { bytes, code, queued_ns, service_ns, late_by_ns: came.late_by_ns }
    }

    /// Whether it came after the call's deadline.
    pub fn is_late(&self) -> bool {
        self.late_by_ns > 0
    }
}

/// Which request of a side's, among those that wait or are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId {
    pub(crate) token: Token,
    /// Which epoch of the link it belongs to; 0 where connections have only one.
    pub(crate) epoch: u32,
}

impl RequestId {
    /// The client's name for it.
    pub fn token(self) -> Token {
        self.token
    }
}

/// A request that is to be served. Its bytes are a copy, which no peer changes any more, or a view
/// of the client's memory.
#[derive(Debug)]
pub struct Request<B = Vec<u8>> {
    pub(crate) id: RequestId,
    pub(crate) began_ns: u64,
    /// The payload that the client sent.
    pub bytes: B,
    /// When the answer is wanted, on the server's clock. Between machines: what was left when it
    /// was taken, from then on. `u64::MAX`: best effort.
    pub deadline_ns: u64,
    /// How long it may wait for its service, from when it was taken; the server's choice where
    /// there is none.
    pub ttl: Option<Duration>,
    /// What the caller put in to follow a call through several services.
    pub trace: u64,
    /// How long it waited, ns.
    pub queued_ns: u64,
}

impl<B> Request<B> {
    /// A request of a connection that has one epoch. `ttl_ms` as an entry has it.
    #[inline]
    pub fn new(token: Token, bytes: B, deadline_ns: u64, ttl_ms: u32, trace: u64, queued_ns: u64) -> Request<B> {
        let ttl = (ttl_ms > 0).then(|| Duration::from_millis(ttl_ms.into()));
        Request { id: RequestId { token, epoch: 0 }, began_ns: 0, bytes, deadline_ns, ttl, trace, queued_ns }
    }

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
