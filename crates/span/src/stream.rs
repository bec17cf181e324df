//! Connections that carry bytes between two machines, as messages: what calls go by where there is
//! no direct path.
//!
//! One machine opens a [`Stream`], and the other accepts it. Both then send data, each in messages
//! with its position. This module decides; the program `tombolo-span` has the messages carried by
//! zenoh.
//!
//! # Messages
//! All numbers are little-endian.
//!
//! ```text
//!   0..4    "TSC" and the version, 1
//!   4       kind: 1 open, 2 accept, 3 data, 4 taken, 5 end
//!   5       0 from the side that opened the stream, 1 from the other
//!   6       of an end: why (Ending); else 0
//!   7       0
//!   8..16   the stream's number, which the side that opens it chooses at random
//!   16..24  of data: how many bytes came before; of taken: how many were taken; else 0
//!   24..    of data: 1 to 32768 bytes
//! ```
//!
//! # Rules
//! - A side sends at most [`WINDOW_BYTES`] more than the other one says it has taken, so no stream
//!   can fill another machine's memory, or a queue on the way that other streams need.
//! - Data whose position is not the next one ends the stream. What carries the messages may lose
//!   some when a link on the way breaks. Nothing is sent again, since nothing is known to be lost
//!   then.
//! - Each side says something at least every [`BEAT`]. A stream over which nothing came for
//!   [`SILENCE`] ends.

use std::time::Duration;

/// Bytes that a side may have sent and the other one not taken.
pub const WINDOW_BYTES: u64 = 256 << 10;
/// The most bytes in one message.
pub const MAX_DATA_BYTES: usize = 32 << 10;
/// How often a side says something.
pub const BEAT: Duration = Duration::from_secs(1);
/// After so long without a message the stream ends.
pub const SILENCE: Duration = Duration::from_secs(4);
/// The longest message.
pub const MAX_MESSAGE_BYTES: usize = HEAD_BYTES + MAX_DATA_BYTES;

const MAGIC: &[u8; 4] = b"TSC\x01";
// The head's fields.
const KIND: usize = 4;
const SIDE: usize = 5;
const WHY: usize = 6;
const ZERO: usize = 7;
const NUMBER: usize = 8;
const POSITION: usize = 16;
const HEAD_BYTES: usize = 24;
const OPEN: u8 = 1;
const ACCEPT: u8 = 2;
const DATA: u8 = 3;
const TAKEN: u8 = 4;
const END: u8 = 5;

/// Why a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u8)]
pub enum Ending {
    /// One side has ended it.
    #[error("the other side has closed it")]
    Closed = 0,
    /// The machine exports nothing.
    #[error("that machine exports no services by tombolo-span; check its settings for export = [...]")]
    Absent = 1,
    /// It has as many streams of this machine as it takes.
    #[error("that machine has as many connections of this one as it takes")]
    Full = 2,
    /// It has no such stream, for example since it started again.
    #[error("that machine does not know the connection: its tombolo-span was started again")]
    Unknown = 3,
    /// A message is missing.
    #[error("bytes were lost on the way")]
    Lost = 4,
    /// A message breaks the rules.
    #[error("the other side broke the protocol")]
    Broken = 5,
    /// Nothing was heard for [`SILENCE`], or the machine was seen to go.
    #[error("the machine, or the way to it, is gone")]
    Gone = 6,
}

impl Ending {
    /// All of them, in the order of their numbers.
    pub const ALL: [Ending; 7] =
        [Ending::Closed, Ending::Absent, Ending::Full, Ending::Unknown, Ending::Lost, Ending::Broken, Ending::Gone];
}

/// Which of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Side {
    /// The one that opened the stream.
    Opener = 0,
    /// The one that accepted it.
    Acceptor = 1,
}

impl Side {
    /// The opposite side.
    pub fn other(self) -> Side {
        match self {
            Side::Opener => Side::Acceptor,
            Side::Acceptor => Side::Opener,
        }
    }
}

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// Opens the stream.
    Open,
    /// Accepts it.
    Accept,
    /// Bytes.
    Data {
        /// How many were sent before.
        position: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// So many bytes were taken so far.
    Taken(u64),
    /// The stream has ended.
    End(Ending),
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamMessage<'a> {
    /// The stream's number.
    pub number: u64,
    /// Who says it.
    pub from: Side,
    /// What it says.
    pub content: Content<'a>,
}

impl<'a> StreamMessage<'a> {
    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, why, position, bytes) = match self.content {
            Content::Open => (OPEN, 0, 0, &[][..]),
            Content::Accept => (ACCEPT, 0, 0, &[][..]),
            Content::Data { position, bytes } => (DATA, 0, position, bytes),
            Content::Taken(taken) => (TAKEN, 0, taken, &[][..]),
            Content::End(ending) => (END, ending as u8, 0, &[][..]),
        };
        let mut out = Vec::with_capacity(HEAD_BYTES + bytes.len());
        out.resize(HEAD_BYTES, 0);
        out[..KIND].copy_from_slice(MAGIC);
        (out[KIND], out[SIDE], out[WHY]) = (kind, self.from as u8, why);
        out[NUMBER..POSITION].copy_from_slice(&self.number.to_le_bytes());
        out[POSITION..].copy_from_slice(&position.to_le_bytes());
        out.extend_from_slice(bytes);
        out
    }

    /// Reads a message; `None` where it is none.
    pub fn parse(message: &'a [u8]) -> Option<StreamMessage<'a>> {
        let (head, bytes) = message.split_at_checked(HEAD_BYTES)?;
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
        let (kind, side, why, position) = (head[KIND], head[SIDE], head[WHY], u64_at(POSITION));
        let is_data = kind == DATA;
        let is_fine = head[..KIND] == *MAGIC
            && side <= 1
            && head[ZERO] == 0
            && (kind == END || why == 0)
            && (is_data || kind == TAKEN || position == 0)
            && is_data != bytes.is_empty()
            && bytes.len() <= MAX_DATA_BYTES;
        if !is_fine {
            return None;
        }
        let content = match kind {
            OPEN if side == Side::Opener as u8 => Content::Open,
            ACCEPT if side == Side::Acceptor as u8 => Content::Accept,
            DATA => Content::Data { position, bytes },
            TAKEN => Content::Taken(position),
            END => Content::End(*Ending::ALL.get(usize::from(why))?),
            _ => return None,
        };
        let from = if side == 0 { Side::Opener } else { Side::Acceptor };
        Some(StreamMessage { number: u64_at(NUMBER), from, content })
    }
}

/// One side of a stream that is open. Instants are of any clock that does not go back.
#[derive(Clone, Debug)]
pub struct Stream {
    /// Bytes that were sent.
    sent: u64,
    /// How many of them the other side has taken.
    acknowledged: u64,
    /// Bytes that have come.
    received: u64,
    /// How many of them were taken here.
    taken: u64,
    /// How many the other side was told of.
    told: u64,
    /// When something came, and when something was sent.
    heard: Duration,
    said: Duration,
}

impl Stream {
    /// A stream from now on.
    pub fn new(now: Duration) -> Stream {
        Stream { sent: 0, acknowledged: 0, received: 0, taken: 0, told: 0, heard: now, said: now }
    }

    /// How many bytes the next message may have; 0 where the other side has to take some first.
    pub fn room(&self) -> usize {
        // At most the window.
        ((WINDOW_BYTES - (self.sent - self.acknowledged)) as usize).min(MAX_DATA_BYTES)
    }

    /// So many bytes are sent now, at most [`Stream::room`]; returns their position.
    pub fn send(&mut self, bytes: usize, now: Duration) -> u64 {
        let position = self.sent;
        self.sent += bytes as u64;
        self.said = now;
        position
    }

    /// Bytes that have come and were not taken; at most [`WINDOW_BYTES`].
    pub fn waiting(&self) -> u64 {
        self.received - self.taken
    }

    /// Something has come from the other side.
    ///
    /// # Errors
    /// How the stream ends by that.
    pub fn receive(&mut self, content: &Content<'_>, now: Duration) -> Result<(), Ending> {
        self.heard = now;
        match *content {
            Content::Open => Err(Ending::Broken),
            Content::Accept => Ok(()),
            Content::End(ending) => Err(ending),
            Content::Taken(taken) => {
                if taken > self.sent {
                    return Err(Ending::Broken);
                }
                self.acknowledged = self.acknowledged.max(taken);
                Ok(())
            }
            Content::Data { position, bytes } => {
                if position != self.received {
                    return Err(Ending::Lost);
                }
                let received = self.received + bytes.len() as u64;
                if received - self.told > WINDOW_BYTES {
                    return Err(Ending::Broken);
                }
                self.received = received;
                Ok(())
            }
        }
    }

    /// So many of the bytes that wait were taken.
    pub fn took(&mut self, bytes: usize) {
        self.taken += bytes as u64;
    }

    /// Whether the other side is to be told now how many bytes were taken. A quarter of the window
    /// is worth a message of its own.
    pub fn is_due(&self, now: Duration) -> bool {
        self.taken - self.told >= WINDOW_BYTES / 4 || now.saturating_sub(self.said) >= BEAT
    }

    /// What the other side is to be told now of the bytes that were taken.
    ///
    /// # Errors
    /// [`Ending::Gone`].
    pub fn due(&mut self, now: Duration) -> Result<Option<u64>, Ending> {
        if now.saturating_sub(self.heard) >= SILENCE {
            return Err(Ending::Gone);
        }
        let is_due = self.is_due(now);
        if is_due {
            (self.told, self.said) = (self.taken, now);
        }
        Ok(is_due.then_some(self.told))
    }
}

#[cfg(test)]
mod tests {
    use tombolo_testing::{Random, hex};

    use super::*;

    fn message(from: Side, content: Content<'_>) -> StreamMessage<'_> {
        StreamMessage { number: 0x0102_0304_0506_0708, from, content }
    }

    #[test]
    fn messages_are_these_bytes_and_no_others_are_messages() {
        // Written out from the table in the head of this file: the magic and version; kind, side,
        // why, 0; the stream's number; the position.
        for (said, text) in [
            (message(Side::Opener, Content::Open), "54534301 01 00 00 00 0807060504030201 0000000000000000"),
            (message(Side::Acceptor, Content::Accept), "54534301 02 01 00 00 0807060504030201 0000000000000000"),
            (
                message(Side::Opener, Content::Data { position: 5, bytes: b"calc" }),
                "54534301 03 00 00 00 0807060504030201 0500000000000000 63616c63",
            ),
            (message(Side::Acceptor, Content::Taken(258)), "54534301 04 01 00 00 0807060504030201 0201000000000000"),
            (
                message(Side::Opener, Content::End(Ending::Lost)),
                "54534301 05 00 04 00 0807060504030201 0000000000000000",
            ),
        ] {
            let bytes = hex(text);
            assert_eq!(said.encode(), bytes, "{said:?}");
            assert_eq!(StreamMessage::parse(&bytes), Some(said));
            for short in 0..bytes.len() {
                // Data may be any number of bytes, but not none.
                let content = match said.content {
                    Content::Data { position, .. } if short > HEAD_BYTES => {
                        Some(Content::Data { position, bytes: &bytes[HEAD_BYTES..short] })
                    }
                    _ => None,
                };
                let expected = content.map(|content| StreamMessage { content, ..said });
                assert_eq!(StreamMessage::parse(&bytes[..short]), expected, "{short} bytes");
            }
            for (at, wrong) in [(0, b'X'), (3, 2), (4, 0), (4, 6), (5, 2), (6, 7), (7, 1)] {
                let mut bytes = bytes.clone();
                bytes[at] = wrong;
                assert_eq!(StreamMessage::parse(&bytes), None, "{said:?} with {wrong} at {at}");
            }
        }
        let wrong_side = message(Side::Acceptor, Content::Open).encode();
        let empty = message(Side::Opener, Content::Data { position: 0, bytes: b"" }).encode();
        let long = message(Side::Opener, Content::Data { position: 0, bytes: &vec![0; MAX_DATA_BYTES + 1] }).encode();
        let taken = [message(Side::Opener, Content::Taken(1)).encode(), vec![1]].concat();
        for bytes in [wrong_side, empty, long, taken] {
            assert_eq!(StreamMessage::parse(&bytes), None);
        }
        for (number, ending) in (0u8..).zip(Ending::ALL) {
            assert_eq!(ending as u8, number);
        }
    }

    #[test]
    fn a_side_sends_no_more_than_the_other_one_has_room_for() {
        let (mut here, mut there) = (Stream::new(Duration::ZERO), Stream::new(Duration::ZERO));
        let bytes = vec![7; MAX_DATA_BYTES];
        let mut sent = 0;
        while here.room() > 0 {
            let position = here.send(here.room(), Duration::ZERO);
            there.receive(&Content::Data { position, bytes: &bytes }, Duration::ZERO).unwrap();
            sent += bytes.len() as u64;
        }
        assert_eq!((sent, there.waiting()), (WINDOW_BYTES, WINDOW_BYTES));
        assert_eq!(there.due(Duration::ZERO), Ok(None));
        // Little that was taken is no message of its own before a beat has passed.
        there.took(MAX_DATA_BYTES);
        assert_eq!(there.due(Duration::ZERO), Ok(None));
        there.took(MAX_DATA_BYTES);
        assert_eq!(there.due(Duration::ZERO), Ok(Some(2 * MAX_DATA_BYTES as u64)));
        assert_eq!(here.room(), 0);
        here.receive(&Content::Taken(2 * MAX_DATA_BYTES as u64), Duration::ZERO).unwrap();
        assert_eq!(here.room(), MAX_DATA_BYTES);
        assert_eq!(there.due(BEAT), Ok(Some(2 * MAX_DATA_BYTES as u64)));
    }

    #[test]
    fn what_is_missing_too_much_or_impossible_ends_the_stream() {
        let fresh = || Stream::new(Duration::ZERO);
        let data = |position, bytes| Content::Data { position, bytes };
        assert_eq!(fresh().receive(&data(1, b"x"), Duration::ZERO), Err(Ending::Lost));
        let mut twice = fresh();
        twice.receive(&data(0, b"x"), Duration::ZERO).unwrap();
        assert_eq!(twice.receive(&data(0, b"x"), Duration::ZERO), Err(Ending::Lost));
        assert_eq!(fresh().receive(&Content::Taken(1), Duration::ZERO), Err(Ending::Broken));
        assert_eq!(fresh().receive(&Content::Open, Duration::ZERO), Err(Ending::Broken));
        assert_eq!(fresh().receive(&Content::End(Ending::Closed), Duration::ZERO), Err(Ending::Closed));
        let mut full = fresh();
        let bytes = vec![0; MAX_DATA_BYTES];
        for n in 0..WINDOW_BYTES / MAX_DATA_BYTES as u64 {
            full.receive(&data(n * MAX_DATA_BYTES as u64, &bytes), Duration::ZERO).unwrap();
        }
        // What was taken counts only once the other side was told of it.
        full.took(1);
        assert_eq!(full.receive(&data(WINDOW_BYTES, b"x"), Duration::ZERO), Err(Ending::Broken));
    }

    #[test]
    fn a_stream_over_which_nothing_comes_ends() {
        let mut stream = Stream::new(Duration::ZERO);
        assert_eq!(stream.due(BEAT), Ok(Some(0)));
        assert_eq!(stream.due(BEAT + BEAT / 2), Ok(None));
        stream.receive(&Content::Taken(0), BEAT).unwrap();
        assert!(stream.due(SILENCE).is_ok());
        assert_eq!(stream.due(SILENCE + BEAT), Err(Ending::Gone));
    }

    #[test]
    fn whatever_each_side_sends_and_takes_all_bytes_arrive_and_none_waits_beyond_the_window() {
        let mut random = Random::seeded();
        let mut sides = [Stream::new(Duration::ZERO), Stream::new(Duration::ZERO)];
        let mut ways: [Vec<Vec<u8>>; 2] = Default::default();
        let (mut sent, mut came) = ([0u64; 2], [0u64; 2]);
        let mut now = Duration::ZERO;
        for _ in 0..20_000 {
            let (n, other) = if random.chance(2) { (0, 1) } else { (1, 0) };
            let from = if n == 0 { Side::Opener } else { Side::Acceptor };
            match random.below(4) {
                0 if sides[n].room() > 0 => {
                    let bytes = vec![n as u8; 1 + random.index(sides[n].room())];
                    let position = sides[n].send(bytes.len(), now);
                    sent[n] += bytes.len() as u64;
                    ways[n].push(message(from, Content::Data { position, bytes: &bytes }).encode());
                }
                1 if !ways[other].is_empty() => {
                    let bytes = ways[other].remove(0);
                    sides[n].receive(&StreamMessage::parse(&bytes).unwrap().content, now).unwrap();
                    assert!(sides[n].waiting() <= WINDOW_BYTES);
                }
                2 => {
                    let bytes = random.below(sides[n].waiting() + 1);
                    sides[n].took(bytes as usize);
                    came[n] += bytes;
                }
                _ => {
                    now += Duration::from_millis(1);
                    if let Ok(Some(taken)) = sides[n].due(now) {
                        ways[n].push(message(from, Content::Taken(taken)).encode());
                    }
                }
            }
        }
        for (n, other) in [(0, 1), (1, 0)] {
            for bytes in std::mem::take(&mut ways[other]) {
                sides[n].receive(&StreamMessage::parse(&bytes).unwrap().content, now).unwrap();
            }
            assert_eq!(came[n] + sides[n].waiting(), sent[other]);
            assert!(sent[n] > WINDOW_BYTES, "{sent:?}");
        }
    }
}
