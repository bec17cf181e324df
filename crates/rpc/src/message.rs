//! Messages on a connection's socket: the handshake, memory handed over, reports. Nothing of a call
//! itself.
//!
//! ```text
//!   kind  name      sender    after the kind (u32)                                                        descriptors
//!   1     hello     client    version u32, magic u64, entries u32, 0 u32, arena_bytes u64                 section
//!   2     ask       client    version u32, magic u64                                                      -
//!   3     share     both      number u32, bytes u64                                                       memory
//!   4     forget    both      number u32                                                                  -
//!   17    welcome   provider  version u32, arena_bytes u64, budget_ns u64, max_shared_bytes u64, flags u32  section, doorbell
//!   18    refused   provider  reason in UTF-8                                                             -
//!   19    report    provider  JSON                                                                        -
//! ```
//!
//! All numbers are little-endian. A message is one packet; one of another length is refused.

use tombolo_ring::rpc::{MAGIC, VERSION};

/// Longest packet.
pub(crate) const MAX_BYTES: usize = 64 << 10;

const HELLO: u32 = 1;
const ASK: u32 = 2;
const SHARE: u32 = 3;
const FORGET: u32 = 4;
const WELCOME: u32 = 17;
const REFUSED: u32 = 18;
const REPORT: u32 = 19;

const LATE_IS_BEST_EFFORT: u32 = 1;
const ADMISSION: u32 = 2;

/// What a client learns of a service when it connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Bytes of the arena for replies.
    pub arena_bytes: u64,
    /// The service's execution budget.
    pub budget_ns: u64,
    /// Largest memory that may be handed over.
    pub max_shared_bytes: u64,
    /// Whether the late are served as best effort, rather than refused.
    pub late_is_best_effort: bool,
    /// Whether requests that cannot be met are refused at once.
    pub admission: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    Hello { entries: u32, arena_bytes: u64 },
    Ask,
    Share { number: u32, bytes: u64 },
    Forget { number: u32 },
    Welcome(Facts),
    Refused(String),
    Report(String),
}

/// Why a packet is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// Of another version of the protocol, which is this.
    Version(u32),
    Bytes,
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Malformed::Version(found) => {
                write!(f, "the other side speaks version {found}, expected {VERSION}; use programs of one release")
            }
            Malformed::Bytes => write!(f, "the other side sent an invalid message"),
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed::Bytes)?;
        self.0 = rest;
        Ok(*head)
    }
    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_le_bytes)
    }
    fn u64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_le_bytes)
    }
    fn version(&mut self) -> Result<(), Malformed> {
        match self.u32()? {
            VERSION => Ok(()),
            other => Err(Malformed::Version(other)),
        }
    }
    fn magic(&mut self) -> Result<(), Malformed> {
        if self.u64()? == MAGIC { Ok(()) } else { Err(Malformed::Bytes) }
    }
    fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed::Bytes) }
    }
    fn text(self) -> Result<String, Malformed> {
        String::from_utf8(self.0.to_vec()).map_err(|_| Malformed::Bytes)
    }
}

impl Message {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(48);
        let mut u32s = |values: &[u32]| values.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
        match self {
            Message::Hello { entries, arena_bytes } => {
                u32s(&[HELLO, VERSION]);
                out.extend_from_slice(&MAGIC.to_le_bytes());
                out.extend_from_slice(&entries.to_le_bytes());
                out.extend_from_slice(&[0; 4]);
                out.extend_from_slice(&arena_bytes.to_le_bytes());
            }
            Message::Ask => {
                u32s(&[ASK, VERSION]);
                out.extend_from_slice(&MAGIC.to_le_bytes());
            }
            Message::Share { number, bytes } => {
                u32s(&[SHARE, *number]);
                out.extend_from_slice(&bytes.to_le_bytes());
            }
            Message::Forget { number } => u32s(&[FORGET, *number]),
            Message::Welcome(facts) => {
                u32s(&[WELCOME, VERSION]);
                for value in [facts.arena_bytes, facts.budget_ns, facts.max_shared_bytes] {
                    out.extend_from_slice(&value.to_le_bytes());
                }
                let late = if facts.late_is_best_effort { LATE_IS_BEST_EFFORT } else { 0 };
                let admission = if facts.admission { ADMISSION } else { 0 };
                out.extend_from_slice(&(late | admission).to_le_bytes());
            }
            Message::Refused(text) => {
                u32s(&[REFUSED]);
                out.extend_from_slice(text.as_bytes());
            }
            Message::Report(text) => {
                u32s(&[REPORT]);
                out.extend_from_slice(text.as_bytes());
            }
        }
        out
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Message, Malformed> {
        let mut r = Reader(bytes);
        let message = match r.u32()? {
            HELLO => {
                r.version()?;
                r.magic()?;
                let entries = r.u32()?;
                r.u32()?;
                Message::Hello { entries, arena_bytes: r.u64()? }
            }
            ASK => {
                r.version()?;
                r.magic()?;
                Message::Ask
            }
            SHARE => Message::Share { number: r.u32()?, bytes: r.u64()? },
            FORGET => Message::Forget { number: r.u32()? },
            WELCOME => {
                r.version()?;
                let (arena_bytes, budget_ns, max_shared_bytes) = (r.u64()?, r.u64()?, r.u64()?);
                let flags = r.u32()?;
                Message::Welcome(Facts {
                    arena_bytes,
                    budget_ns,
                    max_shared_bytes,
                    late_is_best_effort: flags & LATE_IS_BEST_EFFORT != 0,
                    admission: flags & ADMISSION != 0,
                })
            }
            REFUSED => return Ok(Message::Refused(r.text()?)),
            REPORT => return Ok(Message::Report(r.text()?)),
            _ => return Err(Malformed::Bytes),
        };
        r.end()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_testing::hex;

    /// Each kind of message, and its bytes: written out from the table in the head of this file.
    fn all() -> [(Message, Vec<u8>); 7] {
        let welcome = Facts {
            arena_bytes: 4096,
            budget_ns: 5,
            max_shared_bytes: 1 << 31,
            late_is_best_effort: true,
            admission: true,
        };
        [
            (
                Message::Hello { entries: 64, arena_bytes: 1 << 20 },
                "01000000 # kind
                02000000 # version
                544d424c52504302 # TMBLRPC, 2
                40000000 # entries
                00000000
                0000100000000000 # bytes of the arena",
            ),
            (
                Message::Ask,
                "02000000
                02000000 # version
                544d424c52504302 # TMBLRPC, 2",
            ),
            (
                Message::Share { number: 3, bytes: 1 << 30 },
                "03000000
                03000000 # number
                0000004000000000 # bytes",
            ),
            (
                Message::Forget { number: 0x0102_0304 },
                "04000000
                04030201 # number",
            ),
            (
                Message::Welcome(welcome),
                "11000000
                02000000 # version
                0010000000000000 # bytes of the arena
                0500000000000000 # budget in ns
                0000008000000000 # most bytes that may be handed over
                03000000 # late is best effort (1), admission (2)",
            ),
            (
                Message::Refused("nö".into()),
                "12000000
                6ec3b6 # UTF-8",
            ),
            (
                Message::Report("{}".into()),
                "13000000
                7b7d",
            ),
        ]
        .map(|(message, text)| (message, hex(text)))
    }

    #[test]
    fn messages_are_these_bytes() {
        for (message, bytes) in all() {
            assert_eq!(message.encode(), bytes, "{message:?}");
            assert_eq!(Message::parse(&bytes), Ok(message));
        }
    }

    #[test]
    fn what_is_cut_or_longer_or_unknown_is_refused() {
        for (message, bytes) in all().into_iter().take(5) {
            for len in 0..bytes.len() {
                assert_eq!(Message::parse(&bytes[..len]), Err(Malformed::Bytes), "{message:?} cut to {len}");
            }
            assert_eq!(Message::parse(&[&bytes[..], &[0]].concat()), Err(Malformed::Bytes));
        }
        // A text is as long as its packet, but is whole characters.
        let [.., (_, refused), (_, report)] = all();
        for len in 0..4 {
            assert_eq!(Message::parse(&refused[..len]), Err(Malformed::Bytes));
            assert_eq!(Message::parse(&report[..len]), Err(Malformed::Bytes));
        }
        assert_eq!(Message::parse(&refused[..6]), Err(Malformed::Bytes), "half of a character");
        assert_eq!(Message::parse(&report[..5]), Ok(Message::Report("{".into())));
        assert_eq!(Message::parse(&[5, 0, 0, 0]), Err(Malformed::Bytes));
        assert_eq!(Message::parse(&[18, 0, 0, 0, 0xff]), Err(Malformed::Bytes));
        let mut other = all()[0].1.clone();
        other[4] = VERSION as u8 + 1;
        assert_eq!(Message::parse(&other), Err(Malformed::Version(VERSION + 1)));
        let mut other = all()[0].1.clone();
        other[8] = b'X';
        assert_eq!(Message::parse(&other), Err(Malformed::Bytes));
    }
}
