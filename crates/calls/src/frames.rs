//! Calls over a stream of bytes, such as a TCP connection, for machines that share no memory: the same entries, one after another.
//!
//! ```text
//!   greeting, once each way   0..8 magic and version   8..12 entries   12..16 longest payload
//!   frame                     0..4 length of payload   4 kind (1 request, 2 answer)   5..8 zero
//!                             8..64 the entry, as in a ring   64.. the payload
//! ```
//!
//! All numbers are little-endian. An entry's payload is "inline" up to 192 bytes and else "in the arena" at offset 0; where it is, is
//! behind the entry in either case. The smaller of both sides' entries and payloads hold for both.
//!
//! Limits: 64 entries, payloads of 128 KiB. A peer that sends without reading what it is answered is not read from any more.

use alloc::vec::Vec;

use tombolo_ring::rpc::entry::{Answer, Ask, Call, Entry, Head, Payload};
use tombolo_ring::rpc::{Broken, ENTRY_HEAD_BYTES, Geometry, INLINE_BYTES, MAGIC, MIN_ARENA_BYTES};

use crate::carrier::{Carrier, Message};

/// Calls that one side may have under way.
pub const ENTRIES: u32 = 64;
/// The longest payload.
pub const PAYLOAD_BYTES: u32 = 128 << 10;
const GREETING_BYTES: usize = 16;
const PREFIX_BYTES: usize = 8;
const HEAD_BYTES: usize = PREFIX_BYTES + ENTRY_HEAD_BYTES;
const KIND_ASK: u8 = 1;
const KIND_ANSWER: u8 = 2;
/// With so much unsent nothing more is read.
const UNSENT_BYTES: usize = 2 * PAYLOAD_BYTES as usize;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(core::array::from_fn(|i| bytes[at + i]))
}

/// A queue of bytes: filled at its end, used up from its beginning.
#[derive(Debug, Default)]
struct Bytes {
    bytes: Vec<u8>,
    used: usize,
}

impl Bytes {
    fn waiting(&self) -> &[u8] {
        &self.bytes[self.used..]
    }

    fn use_up(&mut self, n: usize) {
        self.used += n;
        // Moved only when that is less than what was used since the last time.
        if self.used == self.bytes.len() || self.used > self.bytes.len() / 2 {
            self.bytes.drain(..self.used);
            self.used = 0;
        }
    }
}

/// One side of the stream: bytes in, bytes out.
#[derive(Debug)]
pub struct Frames {
    input: Bytes,
    output: Bytes,
    /// What was agreed on, once the peer has greeted.
    agreed: Option<Geometry>,
}

impl Default for Frames {
    fn default() -> Self {
        let mut output = Bytes::default();
        output.bytes.extend_from_slice(&MAGIC.to_le_bytes());
        output.bytes.extend_from_slice(&ENTRIES.to_le_bytes());
        output.bytes.extend_from_slice(&PAYLOAD_BYTES.to_le_bytes());
        Frames { input: Bytes::default(), output, agreed: None }
    }
}

impl Frames {
    /// What waits to be sent.
    pub fn output(&self) -> &[u8] {
        self.output.waiting()
    }

    /// The first `n` bytes of the output are sent.
    pub fn sent(&mut self, n: usize) {
        self.output.use_up(n);
    }

    /// How many bytes are taken now; 0 where the peer has to take its answers first, or a whole message waits to be taken.
    pub fn wanted(&self) -> usize {
        if self.output().len() > UNSENT_BYTES {
            return 0;
        }
        (HEAD_BYTES + PAYLOAD_BYTES as usize).saturating_sub(self.input.waiting().len())
    }

    /// Takes bytes that have come, as many as it says and wants.
    pub fn feed(&mut self, bytes: &[u8]) -> usize {
        let n = self.wanted().min(bytes.len());
        self.input.bytes.extend_from_slice(&bytes[..n]);
        n
    }

    /// The entries of either side, once the peer has greeted.
    ///
    /// # Errors
    /// [`Broken::Header`] where it speaks something else.
    pub fn greeted(&mut self) -> Result<Option<u32>, Broken> {
        if self.agreed.is_none() && self.input.waiting().len() >= GREETING_BYTES {
            let greeting = self.input.waiting();
            if greeting[..8] != MAGIC.to_le_bytes() {
                return Err(Broken::Header);
            }
            let entries = u32_at(greeting, 8).min(ENTRIES);
            let most = u32_at(greeting, 12).min(PAYLOAD_BYTES);
            let agreed = Geometry::new(entries, most.into()).filter(|_| u64::from(most) >= MIN_ARENA_BYTES);
            self.agreed = Some(agreed.ok_or(Broken::Header)?);
            self.input.use_up(GREETING_BYTES);
        }
        Ok(self.agreed.map(|g| g.entries()))
    }

    fn push(&mut self, kind: u8, head: &Head, bytes: &[u8]) {
        let mut prefix = [0; PREFIX_BYTES];
        // Payloads are checked to be no longer than was agreed on.
        prefix[..4].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        prefix[4] = kind;
        for part in [&prefix[..], head, bytes] {
            self.output.bytes.extend_from_slice(part);
        }
    }
}

/// As the bytes behind an entry are named in it.
fn payload(bytes: &[u8]) -> Payload {
    match bytes.len() {
        len @ ..=INLINE_BYTES => Payload::Inline { len: len as u32 },
        len => Payload::Arena { offset: 0, len: len as u64, block: 0, generation: 0 },
    }
}

impl Carrier for Frames {
    fn most(&self) -> usize {
        self.agreed.map_or(0, |g| g.arena_bytes() as usize)
    }

    fn ask(&mut self, ask: Ask, bytes: &[u8]) -> Result<bool, Broken> {
        let ask = match ask {
            Ask::Call(call) => Ask::Call(Call { payload: payload(bytes), ..call }),
            cancel => cancel,
        };
        self.push(KIND_ASK, &ask.encode(), bytes);
        Ok(true)
    }

    fn answer(&mut self, answer: Answer, bytes: &[u8]) -> Result<bool, Broken> {
        self.push(KIND_ANSWER, &Answer { payload: payload(bytes), ..answer }.encode(), bytes);
        Ok(true)
    }

    fn take(&mut self) -> Result<Option<Message>, Broken> {
        let Some(geometry) = self.agreed else { return Ok(None) };
        let waiting = self.input.waiting();
        if waiting.len() < HEAD_BYTES {
            return Ok(None);
        }
        let len = u32_at(waiting, 0) as usize;
        if len as u64 > geometry.arena_bytes() {
            return Err(Broken::Arena);
        }
        let head: Head = core::array::from_fn(|i| waiting[PREFIX_BYTES + i]);
        let message = match waiting[4] {
            KIND_ASK => match Ask::parse(&head, geometry)? {
                Ask::Cancel(token) => (Message::Cancel(token), Payload::EMPTY),
                Ask::Call(call) => (Message::Call(call, Vec::new()), call.payload),
            },
            KIND_ANSWER => {
                let answer = Answer::parse(&head, geometry)?;
                (Message::Answer(answer, Vec::new()), answer.payload)
            }
            _ => return Err(Broken::Kind),
        };
        let (mut message, payload) = message;
        if payload.len() != len as u64 || matches!(payload, Payload::Shared { .. }) {
            return Err(Broken::Payload);
        }
        let Some(bytes) = waiting.get(HEAD_BYTES..HEAD_BYTES + len) else { return Ok(None) };
        if let Message::Call(_, to) | Message::Answer(_, to) = &mut message {
            to.extend_from_slice(bytes);
        }
        self.input.use_up(HEAD_BYTES + len);
        Ok(Some(message))
    }

    fn arm(&mut self) -> Result<bool, Broken> {
        // The stream's bytes wake the threads that wait for it; what came was taken.
        Ok(true)
    }
}
