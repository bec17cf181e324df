//! How a call ended, if not with a reply. One type for all callers: processes, cells, and both ends
//! of a link.

use core::fmt;

use tombolo_ring::rpc::Broken;
use tombolo_ring::rpc::entry::{Refusal, Status};

/// An error number of the operating system. This crate has none, so it is a number here. Where the
/// standard library is there (feature `std`), it is shown in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        #[cfg(feature = "std")]
        return std::io::Error::from_raw_os_error(self.0).fmt(f);
        #[cfg(not(feature = "std"))]
        write!(f, "error {}", self.0)
    }
}

/// The system gave no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMemory {
    /// What it was wanted for.
    pub what: &'static str,
    /// So many bytes of it.
    pub bytes: u64,
    /// What the system said.
    pub source: Errno,
}

/// Why memory could not be handed over to the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotShared {
    /// So many memories are handed over already, which is the limit.
    Full(usize),
    /// The service has not read what was handed over before.
    Unread,
    /// The system refused.
    System(Errno),
}

impl fmt::Display for NotShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotShared::Full(most) => write!(f, "{most} memories are handed over already; free one"),
            NotShared::Unread => f.write_str("it has not read what was handed over before; wait for its answers"),
            NotShared::System(errno) => errno.fmt(f),
        }
    }
}

/// How a call ended, if not with a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum CallError {
    /// Its deadline passed without an answer. Whether the call is served is not known. A caller
    /// that can use a late answer sets [`CallOptions::wait_late`](crate::CallOptions::wait_late).
    #[error("the deadline passed without an answer")]
    DeadlineExceeded,
    /// Its deadline had passed before it could be served: it was not. Only a caller that waits
    /// beyond the deadline hears this.
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
    /// The service failed while serving it, or the peer serves nothing.
    #[error("the service failed while serving the call, or the peer serves nothing")]
    Failed,
    /// The provider is not connected, or went while the call was under way. Whether it was served
    /// is not known.
    #[error("the service has gone, or is not connected")]
    ProviderGone,
    /// The caller's own time limit is over, before the deadline. Whether the call is served is not
    /// known.
    #[error("no answer came within the time limit")]
    Timeout,
    /// The provider broke the protocol. The connection has ended; a link is reset.
    #[error("{0}; the connection has ended, or its link is reset")]
    Broken(Broken),
    /// So many calls are under way. The connection takes no more of them, or no more bytes of
    /// requests.
    #[error("{0} calls are under way; the connection takes no more calls, or bytes of requests, at a time")]
    Busy(u32),
    /// The connection carries no payload of that length, and no memory can be handed over on it.
    #[error("a payload of {bytes} bytes; the link carries {most}")]
    TooLong { bytes: usize, most: usize },
    /// No memory for the request, or for a copy of the reply.
    #[error("{} of {} bytes: {}", .0.what, .0.bytes, .0.source)]
    Memory(NoMemory),
    /// The service takes no more memory, or no such large one.
    #[error("the service accepts no memory of {bytes} bytes: {why}")]
    Share { bytes: u64, why: NotShared },
    /// A part that the buffer does not have.
    #[error("bytes {offset} to {offset}+{len} were to be sent of a buffer that has {bytes}")]
    Range { offset: u64, len: u64, bytes: u64 },
    /// The reply was held for too long, and its memory was reclaimed.
    #[error("the reply was held for too long, and the service reclaimed its memory")]
    Reclaimed,
    /// The reply is in memory that the provider has not handed over, or that does not have so many
    /// bytes.
    #[error("the reply is in memory that the service did not hand over")]
    ReplyMemory,
    /// The reply needs more memory than this side keeps for the provider's replies. It is dropped,
    /// and the connection goes on.
    #[error(
        "the reply is in memory of {bytes} bytes, {in_use} of the service's are in use, and this connection \
         accepts {max} together; fetch and drop held replies, or connect with a larger max_shared_bytes"
    )]
    ReplyTooLarge { bytes: u64, in_use: u64, max: u64 },
    /// A token that names no call under way.
    #[error("no call of that token is under way: it was waited for, cancelled or given up already")]
    Unknown,
}

/// When an answer came, by the caller's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Came {
    /// How long after the deadline.
    pub late_by_ns: u64,
    /// Its caller waits beyond the deadline.
    pub waits_late: bool,
}

impl Came {
    /// What a call ends with whose answer has this status: nothing else where it was served.
    ///
    /// # Errors
    /// [`CallError`] that the status stands for.
    #[inline]
    pub fn end(&self, status: Status) -> Result<(), CallError> {
        Err(match status {
            Status::Served => return Ok(()),
            Status::Late if self.waits_late => CallError::Late,
            // Whether its caller or the provider sees first that the deadline is over makes no
            // difference.
            Status::Late => CallError::DeadlineExceeded,
            Status::Refused(why) => CallError::Refused(why),
            Status::Cancelled => CallError::Cancelled,
            Status::Expired => CallError::Expired,
            Status::Failed => CallError::Failed,
        })
    }
}
