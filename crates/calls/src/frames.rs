//! Calls over a stream of bytes, such as a TCP connection, for machines that share no memory: the
//! same entries, one after another.
//!
//! ```text
//!   greeting, once each way   0..8 magic and version   8..12 entries   12..16 longest payload
//!   frame                     0..4 length of payload   4 kind (1 request, 2 answer)   5..8 zero
//!                             8..64 the entry, as in a ring   64.. the payload
//! ```
//!
//! All numbers are little-endian. An entry's payload is "inline" up to 192 bytes and else "in the
//! arena" at offset 0; where it is, is behind the entry in either case. The smaller of both sides'
//! entries and payloads hold for both.
//!
//! Limits: 64 entries, payloads of 128 KiB. A peer that sends without reading what it is answered
//! is not read from any more.

use alloc::vec::Vec;

use tombolo_ring::rpc::entry::{Answer, Ask, Call, Entry, Head, Payload};
use tombolo_ring::rpc::{Broken, ENTRY_HEAD_BYTES, Geometry, INLINE_BYTES, MAGIC, MIN_ARENA_BYTES};

use crate::carrier::{Carrier, Message};

/// Calls that one side may have under way.
pub const ENTRIES: u32 = 64;
/// The longest payload.
pub const PAYLOAD_BYTES: u32 = 128 << 10;
// The greeting's fields.
const MAGIC_AT: usize = 0;
const ENTRIES_AT: usize = 8;
const PAYLOAD_AT: usize = 12;
const GREETING_BYTES: usize = 16;
// The fields of a frame before its entry.
const LENGTH_AT: usize = 0;
const KIND_AT: usize = 4;
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
        output.bytes.resize(GREETING_BYTES, 0);
        output.bytes[MAGIC_AT..ENTRIES_AT].copy_from_slice(&MAGIC.to_le_bytes());
        output.bytes[ENTRIES_AT..PAYLOAD_AT].copy_from_slice(&ENTRIES.to_le_bytes());
        output.bytes[PAYLOAD_AT..].copy_from_slice(&PAYLOAD_BYTES.to_le_bytes());
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

    /// How many bytes are taken now; 0 where the peer has to take its answers first, or a whole
    /// message waits to be taken.
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
            if greeting[MAGIC_AT..ENTRIES_AT] != MAGIC.to_le_bytes() {
                return Err(Broken::Header);
            }
            let entries = u32_at(greeting, ENTRIES_AT).min(ENTRIES);
            let most = u32_at(greeting, PAYLOAD_AT).min(PAYLOAD_BYTES);
            let agreed = Geometry::new(entries, most.into()).filter(|_| u64::from(most) >= MIN_ARENA_BYTES);
            self.agreed = Some(agreed.ok_or(Broken::Header)?);
            self.input.use_up(GREETING_BYTES);
        }
        Ok(self.agreed.map(|g| g.entries()))
    }

    fn push(&mut self, kind: u8, head: &Head, bytes: &[u8]) {
        let mut prefix = [0; PREFIX_BYTES];
        // Payloads are checked to be no longer than was agreed on.
        prefix[LENGTH_AT..KIND_AT].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
        prefix[KIND_AT] = kind;
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
        let len = u32_at(waiting, LENGTH_AT) as usize;
        if len as u64 > geometry.arena_bytes() {
            return Err(Broken::Arena);
        }
        let head: Head = core::array::from_fn(|i| waiting[PREFIX_BYTES + i]);
        let message = match waiting[KIND_AT] {
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

#[cfg(test)]
mod tests {
    use std::vec;

    use tombolo_ring::rpc::entry::{Refusal, Status, Token};

    use super::*;

    // Written out from the table in the head of this file and, for entries, from that of
    // `tombolo_ring::rpc::entry`.

    const GREETING: &[u8] = b"TMBLRPC\x02\x40\0\0\0\0\0\x02\0";

    fn call() -> (Ask, Vec<u8>) {
        let call = Call {
            token: Token::new(5, 0x0102),
            deadline_ns: 0x1122_3344_5566_7788,
            time_left: true,
            trace: 9,
            ttl_ms: 300,
            payload: Payload::Inline { len: 3 },
        };
        let bytes = [
            &[3, 0, 0, 0, 1, 0, 0, 0][..],                     // length of the payload, a request
            &[5, 0, 0, 0, 2, 1, 0, 0],                         // token: slot, turn
            &[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11], // deadline
            &[9, 0, 0, 0, 0, 0, 0, 0],                         // trace
            &[0; 8],                                           // the payload's offset
            &[3, 0, 0, 0, 0, 0, 0, 0],                         // its length
            &[0; 4],                                           // its memory
            &[44, 1, 0, 0],                                    // time to live
            &[1, 0, 1, 0],                                     // a call, an inline payload, flags: time left
            &[0; 4],
            b"sum",
        ]
        .concat();
        (Ask::Call(call), bytes)
    }

    fn cancel() -> (Ask, Vec<u8>) {
        let head = [&[0, 0, 0, 0, 1, 0, 0, 0][..], &[63, 0, 0, 0, 1, 0, 0, 0]].concat();
        // The kind of the entry is behind 48 bytes of it.
        (Ask::Cancel(Token::new(63, 1)), [&head[..], &[0; 40], &[2], &[0; 7]].concat())
    }

    fn answer() -> (Answer, Vec<u8>) {
        let answer = Answer {
            token: Token::new(5, 0x0102),
            status: Status::Refused(Refusal::Memory),
            code: 0x0a0b_0c0d,
            queued_ns: 1000,
            service_ns: 258,
            payload: Payload::Arena { offset: 0, len: 193, block: 0, generation: 0 },
        };
        let bytes = [
            &[193, 0, 0, 0, 2, 0, 0, 0][..], // length of the payload, an answer
            &[5, 0, 0, 0, 2, 1, 0, 0],       // token: slot, turn
            &[0xe8, 3, 0, 0, 0, 0, 0, 0],    // queued
            &[2, 1, 0, 0, 0, 0, 0, 0],       // served
            &[0; 8],                         // the payload's offset
            &[193, 0, 0, 0, 0, 0, 0, 0],     // its length
            &[0; 8],                         // its block and generation
            &[3, 1, 3, 0],                   // refused, a payload in the arena, the reason
            &[0x0d, 0x0c, 0x0b, 0x0a],       // the application's code
            &[7; 193],
        ]
        .concat();
        (answer, bytes)
    }

    /// One side that was greeted, and has sent its greeting.
    fn greeted() -> Frames {
        let mut frames = Frames::default();
        assert_eq!(frames.feed(GREETING), GREETING_BYTES);
        assert_eq!(frames.greeted(), Ok(Some(ENTRIES)));
        frames.sent(GREETING_BYTES);
        frames
    }

    #[test]
    fn the_greeting_is_these_bytes_and_nothing_is_read_before_all_of_them() {
        assert_eq!(Frames::default().output(), GREETING);
        for len in 0..GREETING_BYTES {
            let mut frames = Frames::default();
            frames.feed(&GREETING[..len]);
            assert_eq!((frames.greeted(), frames.most()), (Ok(None), 0), "{len} bytes");
            assert!(matches!(frames.take(), Ok(None)));
            frames.feed(&GREETING[len..]);
            assert_eq!((frames.greeted(), frames.most()), (Ok(Some(64)), 128 << 10));
        }
        // Another version, no entries, an arena that is none.
        for (at, wrong) in [(7, 3), (8, 0), (14, 0)] {
            let mut bytes = GREETING.to_vec();
            bytes[at] = wrong;
            let mut frames = Frames::default();
            frames.feed(&bytes);
            assert_eq!(frames.greeted(), Err(Broken::Header), "{wrong} at {at}");
        }
    }

    #[test]
    fn messages_are_these_bytes() {
        let mut frames = greeted();
        let ((call, call_bytes), (cancel, cancel_bytes), (answer, answer_bytes)) = (call(), cancel(), answer());
        assert_eq!(frames.ask(call, b"sum"), Ok(true));
        assert_eq!(frames.ask(cancel, b""), Ok(true));
        assert_eq!(frames.answer(answer, &[7; 193]), Ok(true));
        assert_eq!(frames.output(), [&call_bytes[..], &cancel_bytes, &answer_bytes].concat());

        let mut frames = greeted();
        for bytes in [&call_bytes, &cancel_bytes, &answer_bytes] {
            assert_eq!(frames.feed(bytes), bytes.len());
        }
        let Message::Call(got, payload) = frames.take().unwrap().unwrap() else { panic!("a call") };
        assert_eq!((Ask::Call(got), &payload[..]), (call, &b"sum"[..]));
        let Message::Cancel(got) = frames.take().unwrap().unwrap() else { panic!("a cancellation") };
        assert_eq!(Ask::Cancel(got), cancel);
        let Message::Answer(got, payload) = frames.take().unwrap().unwrap() else { panic!("an answer") };
        assert_eq!((got, payload), (answer, vec![7; 193]));
        assert!(matches!(frames.take(), Ok(None)));
    }

    #[test]
    fn a_message_that_is_cut_waits_for_the_rest_of_it() {
        for bytes in [call().1, cancel().1, answer().1] {
            for len in 0..bytes.len() {
                let mut frames = greeted();
                frames.feed(&bytes[..len]);
                assert!(matches!(frames.take(), Ok(None)), "{len} bytes");
                frames.feed(&bytes[len..]);
                assert!(matches!(frames.take(), Ok(Some(_))), "{len} bytes");
            }
        }
    }

    #[test]
    fn impossible_values_are_refused_by_name() {
        for (at, wrong, error) in [
            (0, 4, Broken::Payload),  // another length than the entry says
            (2, 3, Broken::Arena),    // longer than was agreed on
            (4, 3, Broken::Kind),     // neither a request nor an answer
            (8, 64, Broken::Slot),    // a slot that was not agreed on
            (56, 3, Broken::Kind),    // neither a call nor a cancellation
            (57, 2, Broken::Payload), // memory that was handed over, which a stream cannot
            (57, 3, Broken::Payload), // no kind of payload
        ] {
            let mut bytes = call().1;
            bytes[at] = wrong;
            let mut frames = greeted();
            frames.feed(&bytes);
            assert_eq!(frames.take().unwrap_err(), error, "{wrong} at {at}");
        }
    }
}
