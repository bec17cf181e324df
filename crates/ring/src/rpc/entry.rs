//! Entries of the two rings: a request and an answer, 56 bytes that say what it is, a stamp, and
//! the inline payload.
//!
//! ```text
//!            request                          answer
//!    0..8    token                            token
//!    8..16   deadline, ns                     queued, ns
//!   16..24   trace                            service time, ns
//!   24..32   payload's offset                 payload's offset
//!   32..40   payload's length                 payload's length
//!   40..44   memory (number of a memfd)       memory, or block of the arena
//!   44..48   time to live, ms (0: default)    generation of the block
//!   48       kind                             status
//!   49       payload's kind                   payload's kind
//!   50..52   flags                            reason of a refusal
//!   52..56   0                                the application's code
//!   56..60   stamp: index + 1, written last   the same
//!   60..64   0                                0
//!   64..256  inline payload                   inline payload
//! ```
//!
//! All numbers are little-endian. A token's low 32 bits are the slot, its high 32 bits the slot's
//! turn.

use super::{Broken, ENTRY_HEAD_BYTES, Geometry, INLINE_BYTES};

/// A deadline of best effort: after all others.
pub const BEST_EFFORT: u64 = u64::MAX;
/// The deadline of this request is the time that is left, not an instant of a clock that both sides
/// share.
pub const FLAG_TIME_LEFT: u16 = 1;

const KIND_CALL: u8 = 1;
const KIND_CANCEL: u8 = 2;
const PAYLOAD_INLINE: u8 = 0;
const PAYLOAD_ARENA: u8 = 1;
const PAYLOAD_SHARED: u8 = 2;

/// What names a request in its connection, from its submission to its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Token(u64);

impl Token {
    /// Packs a slot and its turn, which tells a reused slot from its earlier use.
    pub const fn new(slot: u32, turn: u32) -> Token {
        Token((turn as u64) << 32 | slot as u64)
    }

    /// Index into the slot table.
    pub const fn slot(self) -> u32 {
        self.0 as u32
    }

    /// How often the slot was used before, modulo 2^32.
    pub const fn turn(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Both as one number.
    pub const fn bits(self) -> u64 {
        self.0
    }

    fn parse(bits: u64, geometry: Geometry) -> Result<Token, Broken> {
        let token = Token(bits);
        if token.slot() < geometry.entries() { Ok(token) } else { Err(Broken::Slot) }
    }
}

/// Location and length of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload {
    /// The bytes are in the entry itself.
    Inline {
        /// Bytes, at most [`INLINE_BYTES`].
        len: u32,
    },
    /// In the writer's arena.
    Arena {
        /// From the arena's start.
        offset: u64,
        /// Length in bytes.
        len: u64,
        /// In an answer: the block that is given back by its mark. 0 in a request.
        block: u32,
        /// In an answer: the block's generation. 0 in a request.
        generation: u32,
    },
    /// In memory that was handed over by descriptor. Whether it has these bytes is for its mapping
    /// to say.
    Shared {
        /// The memory's number in this connection.
        memory: u32,
        /// From the memory's start.
        offset: u64,
        /// Length in bytes.
        len: u64,
    },
}

impl Payload {
    /// A payload without bytes.
    pub const EMPTY: Payload = Payload::Inline { len: 0 };

    /// Length in bytes, wherever the payload is.
    pub const fn len(&self) -> u64 {
        match *self {
            Payload::Inline { len } => len as u64,
            Payload::Arena { len, .. } | Payload::Shared { len, .. } => len,
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// kind, offset, len, memory or block, generation
    const fn fields(&self) -> (u8, u64, u64, u32, u32) {
        match *self {
            Payload::Inline { len } => (PAYLOAD_INLINE, 0, len as u64, 0, 0),
            Payload::Arena { offset, len, block, generation } => (PAYLOAD_ARENA, offset, len, block, generation),
            Payload::Shared { memory, offset, len } => (PAYLOAD_SHARED, offset, len, memory, 0),
        }
    }

    /// Checked against the geometry of the section whose arena it is in.
    fn parse(
        kind: u8,
        offset: u64,
        len: u64,
        number: u32,
        generation: u32,
        geometry: Geometry,
    ) -> Result<Payload, Broken> {
        match kind {
            PAYLOAD_INLINE if len <= INLINE_BYTES as u64 => Ok(Payload::Inline { len: len as u32 }),
            PAYLOAD_INLINE => Err(Broken::Inline),
            PAYLOAD_ARENA if number >= geometry.entries() => Err(Broken::Slot),
            PAYLOAD_ARENA if offset.checked_add(len).is_none_or(|end| end > geometry.arena_bytes()) => {
                Err(Broken::Arena)
            }
            PAYLOAD_ARENA => Ok(Payload::Arena { offset, len, block: number, generation }),
            PAYLOAD_SHARED if offset.checked_add(len).is_none() => Err(Broken::Payload),
            PAYLOAD_SHARED => Ok(Payload::Shared { memory: number, offset, len }),
            _ => Err(Broken::Payload),
        }
    }
}

/// What a client asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// A request to serve.
    Call(Call),
    /// Answer the call with this token as cancelled, if it is not being served yet. Not answered
    /// itself.
    Cancel(Token),
}

/// A request, without its payload's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Names it until its answer.
    pub token: Token,
    /// Absolute, in ns of CLOCK_MONOTONIC; [`BEST_EFFORT`] for none. Time left where `time_left` is
    /// set.
    pub deadline_ns: u64,
    /// Whether the deadline is the time that is left.
    pub time_left: bool,
    /// Carried to the provider's trace, so that a call can be followed through several services.
    pub trace: u64,
    /// How long it may wait for service before it is given up, in ms; 0 leaves that to the service.
    pub ttl_ms: u32,
    /// Where its bytes are.
    pub payload: Payload,
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// It was served; the code is the application's.
    Served,
    /// Its deadline had passed before its service began, and the service refuses what is late.
    Late,
    /// It was not accepted, for the reason given.
    Refused(Refusal),
    /// The client took it back before its service began.
    Cancelled,
    /// It waited for longer than its time to live.
    Expired,
    /// The service broke while serving it.
    Failed,
}

impl Status {
    /// In one word, as reports have it.
    pub const fn name(self) -> &'static str {
        match self {
            Status::Served => "served",
            Status::Late => "late",
            Status::Refused(_) => "refused",
            Status::Cancelled => "cancelled",
            Status::Expired => "expired",
            Status::Failed => "failed",
        }
    }
}

/// Why a request was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// The service's queue is full.
    QueueFull,
    /// The budgets of what is queued ahead do not leave time before the deadline, or it would make
    /// another one late.
    Admission,
    /// The payload's memory is unknown, not sealed, shorter than the request says, or beyond the
    /// service's bounds.
    Memory,
    /// The reply does not fit into what is left of the connection's reply memory.
    ReplyMemory,
    /// The service is ending.
    Stopping,
}

impl Refusal {
    /// All of them, in the order of their codes from 1.
    pub const ALL: [Refusal; 5] =
        [Refusal::QueueFull, Refusal::Admission, Refusal::Memory, Refusal::ReplyMemory, Refusal::Stopping];

    const fn code(self) -> u16 {
        match self {
            Refusal::QueueFull => 1,
            Refusal::Admission => 2,
            Refusal::Memory => 3,
            Refusal::ReplyMemory => 4,
            Refusal::Stopping => 5,
        }
    }

    /// In one word, as reports have it.
    pub const fn name(self) -> &'static str {
        match self {
            Refusal::QueueFull => "queue-full",
            Refusal::Admission => "admission",
            Refusal::Memory => "memory",
            Refusal::ReplyMemory => "reply-memory",
            Refusal::Stopping => "stopping",
        }
    }

    /// The reason in words.
    pub const fn text(self) -> &'static str {
        match self {
            Refusal::QueueFull => "its queue is full",
            Refusal::Admission => "the deadline cannot be met with the requests already queued",
            Refusal::Memory => {
                "the payload's memory is not sealed, too short, or beyond the service's limit for one client or user"
            }
            Refusal::ReplyMemory => {
                "the reply does not fit into the connection's reply memory (the service's reply_arena_bytes); it can hand over larger ones by reference"
            }
            Refusal::Stopping => "it is ending",
        }
    }
}

impl Status {
    const fn code(self) -> (u8, u16) {
        match self {
            Status::Served => (1, 0),
            Status::Late => (2, 0),
            Status::Refused(reason) => (3, reason.code()),
            Status::Cancelled => (4, 0),
            Status::Expired => (5, 0),
            Status::Failed => (6, 0),
        }
    }

    fn parse(status: u8, reason: u16) -> Result<Status, Broken> {
        Ok(match status {
            1 => Status::Served,
            2 => Status::Late,
            3 => {
                let index = usize::from(reason).wrapping_sub(1);
                Status::Refused(*Refusal::ALL.get(index).ok_or(Broken::Status)?)
            }
            4 => Status::Cancelled,
            5 => Status::Expired,
            6 => Status::Failed,
            _ => return Err(Broken::Status),
        })
    }
}

/// An answer, without its payload's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Token of the request that it answers.
    pub token: Token,
    /// Whether the request was served, and why not.
    pub status: Status,
    /// The application's code; 0 is success.
    pub code: u32,
    /// From when the provider saw the request to when its service began or it was given up.
    pub queued_ns: u64,
    /// How long it was served.
    pub service_ns: u64,
    /// Where the reply's bytes are.
    pub payload: Payload,
}

/// An entry's bytes before its stamp.
pub type Head = [u8; ENTRY_HEAD_BYTES];

fn u64_at(head: &Head, at: usize) -> u64 {
    u64::from_le_bytes(core::array::from_fn(|i| head[at + i]))
}

fn u32_at(head: &Head, at: usize) -> u32 {
    u32::from_le_bytes(core::array::from_fn(|i| head[at + i]))
}

fn u16_at(head: &Head, at: usize) -> u16 {
    u16::from_le_bytes(core::array::from_fn(|i| head[at + i]))
}

/// An entry of a ring: what it says, apart from its inline payload.
pub trait Entry: Sized {
    /// In the form that it has in the ring.
    fn encode(&self) -> Head;
    /// Checked against the geometry of its writer's section.
    ///
    /// # Errors
    /// What no correct peer writes.
    fn parse(head: &Head, geometry: Geometry) -> Result<Self, Broken>;
    /// Bytes of the inline payload that follow.
    fn inline_len(&self) -> usize;
}

impl Entry for Ask {
    #[inline]
    fn encode(&self) -> Head {
        let mut head = [0; ENTRY_HEAD_BYTES];
        match self {
            Ask::Cancel(token) => {
                head[0..8].copy_from_slice(&token.bits().to_le_bytes());
                head[48] = KIND_CANCEL;
            }
            Ask::Call(call) => {
                let (kind, offset, len, number, _) = call.payload.fields();
                head[0..8].copy_from_slice(&call.token.bits().to_le_bytes());
                head[8..16].copy_from_slice(&call.deadline_ns.to_le_bytes());
                head[16..24].copy_from_slice(&call.trace.to_le_bytes());
                head[24..32].copy_from_slice(&offset.to_le_bytes());
                head[32..40].copy_from_slice(&len.to_le_bytes());
                head[40..44].copy_from_slice(&number.to_le_bytes());
                head[44..48].copy_from_slice(&call.ttl_ms.to_le_bytes());
                head[48] = KIND_CALL;
                head[49] = kind;
                head[50..52].copy_from_slice(&(if call.time_left { FLAG_TIME_LEFT } else { 0 }).to_le_bytes());
            }
        }
        head
    }

    #[inline]
    fn parse(head: &Head, geometry: Geometry) -> Result<Ask, Broken> {
        let token = Token::parse(u64_at(head, 0), geometry)?;
        match head[48] {
            KIND_CANCEL => Ok(Ask::Cancel(token)),
            KIND_CALL => Ok(Ask::Call(Call {
                token,
                deadline_ns: u64_at(head, 8),
                // Flags that we do not know are left for versions to come.
                time_left: u16_at(head, 50) & FLAG_TIME_LEFT != 0,
                trace: u64_at(head, 16),
                ttl_ms: u32_at(head, 44),
                payload: Payload::parse(head[49], u64_at(head, 24), u64_at(head, 32), u32_at(head, 40), 0, geometry)?,
            })),
            _ => Err(Broken::Kind),
        }
    }

    #[inline]
    fn inline_len(&self) -> usize {
        match self {
            Ask::Call(Call { payload: Payload::Inline { len }, .. }) => *len as usize,
            _ => 0,
        }
    }
}

impl Entry for Answer {
    #[inline]
    fn encode(&self) -> Head {
        let mut head = [0; ENTRY_HEAD_BYTES];
        let (kind, offset, len, number, generation) = self.payload.fields();
        let (status, reason) = self.status.code();
        head[0..8].copy_from_slice(&self.token.bits().to_le_bytes());
        head[8..16].copy_from_slice(&self.queued_ns.to_le_bytes());
        head[16..24].copy_from_slice(&self.service_ns.to_le_bytes());
        head[24..32].copy_from_slice(&offset.to_le_bytes());
        head[32..40].copy_from_slice(&len.to_le_bytes());
        head[40..44].copy_from_slice(&number.to_le_bytes());
        head[44..48].copy_from_slice(&generation.to_le_bytes());
        head[48] = status;
        head[49] = kind;
        head[50..52].copy_from_slice(&reason.to_le_bytes());
        head[52..56].copy_from_slice(&self.code.to_le_bytes());
        head
    }

    #[inline]
    fn parse(head: &Head, geometry: Geometry) -> Result<Answer, Broken> {
        let (offset, len) = (u64_at(head, 24), u64_at(head, 32));
        Ok(Answer {
            token: Token::parse(u64_at(head, 0), geometry)?,
            status: Status::parse(head[48], u16_at(head, 50))?,
            code: u32_at(head, 52),
            queued_ns: u64_at(head, 8),
            service_ns: u64_at(head, 16),
            payload: Payload::parse(head[49], offset, len, u32_at(head, 40), u32_at(head, 44), geometry)?,
        })
    }

    #[inline]
    fn inline_len(&self) -> usize {
        match self.payload {
            Payload::Inline { len } => len as usize,
            _ => 0,
        }
    }
}
