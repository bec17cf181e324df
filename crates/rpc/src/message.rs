//! Messages on a connection's socket: the handshake, memory handed over, reports. Nothing of a call itself.
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
                u32s(&[1, VERSION]);
                out.extend_from_slice(&MAGIC.to_le_bytes());
                out.extend_from_slice(&entries.to_le_bytes());
                out.extend_from_slice(&[0; 4]);
                out.extend_from_slice(&arena_bytes.to_le_bytes());
            }
            Message::Ask => {
                u32s(&[2, VERSION]);
                out.extend_from_slice(&MAGIC.to_le_bytes());
            }
            Message::Share { number, bytes } => {
                u32s(&[3, *number]);
                out.extend_from_slice(&bytes.to_le_bytes());
            }
            Message::Forget { number } => u32s(&[4, *number]),
            Message::Welcome(facts) => {
                u32s(&[17, VERSION]);
                for value in [facts.arena_bytes, facts.budget_ns, facts.max_shared_bytes] {
                    out.extend_from_slice(&value.to_le_bytes());
                }
                let late = if facts.late_is_best_effort { LATE_IS_BEST_EFFORT } else { 0 };
                let admission = if facts.admission { ADMISSION } else { 0 };
                out.extend_from_slice(&(late | admission).to_le_bytes());
            }
            Message::Refused(text) => {
                u32s(&[18]);
                out.extend_from_slice(text.as_bytes());
            }
            Message::Report(text) => {
                u32s(&[19]);
                out.extend_from_slice(text.as_bytes());
            }
        }
        out
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Message, Malformed> {
        let mut r = Reader(bytes);
        let message = match r.u32()? {
            1 => {
                r.version()?;
                r.magic()?;
                let entries = r.u32()?;
                r.u32()?;
                Message::Hello { entries, arena_bytes: r.u64()? }
            }
            2 => {
                r.version()?;
                r.magic()?;
                Message::Ask
            }
            3 => Message::Share { number: r.u32()?, bytes: r.u64()? },
            4 => Message::Forget { number: r.u32()? },
            17 => {
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
            18 => return Ok(Message::Refused(r.text()?)),
            19 => return Ok(Message::Report(r.text()?)),
            _ => return Err(Malformed::Bytes),
        };
        r.end()?;
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Message> {
        vec![
            Message::Hello { entries: 64, arena_bytes: 1 << 20 },
            Message::Ask,
            Message::Share { number: 3, bytes: 1 << 30 },
            Message::Forget { number: 3 },
            Message::Welcome(Facts {
                arena_bytes: 4096,
                budget_ns: 5,
                max_shared_bytes: 1 << 31,
                late_is_best_effort: true,
                admission: true,
            }),
            Message::Refused("no".into()),
            Message::Report("{}".into()),
        ]
    }

    #[test]
    fn messages_are_these_bytes() {
        let hello = b"\x01\0\0\0\x02\0\0\0TMBLRPC\x02\x40\0\0\0\0\0\0\0\0\0\x10\0\0\0\0\0";
        assert_eq!(all()[0].encode(), hello);
        let welcome = b"\x11\0\0\0\x02\0\0\0\0\x10\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\0\0\0\x80\0\0\0\0\x03\0\0\0";
        assert_eq!(all()[4].encode(), welcome);
        assert_eq!(all()[2].encode(), b"\x03\0\0\0\x03\0\0\0\0\0\0\x40\0\0\0\0");
        for message in all() {
            assert_eq!(Message::parse(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn what_is_cut_or_longer_or_unknown_is_refused() {
        for message in all().into_iter().take(5) {
            let bytes = message.encode();
            for len in 0..bytes.len() {
                assert_eq!(Message::parse(&bytes[..len]), Err(Malformed::Bytes), "{message:?} cut to {len}");
            }
            assert_eq!(Message::parse(&[&bytes[..], &[0]].concat()), Err(Malformed::Bytes));
        }
        assert_eq!(Message::parse(&[5, 0, 0, 0]), Err(Malformed::Bytes));
        assert_eq!(Message::parse(&[18, 0, 0, 0, 0xff]), Err(Malformed::Bytes));
        let mut other = all()[0].encode();
        other[4] = VERSION as u8 + 1;
        assert_eq!(Message::parse(&other), Err(Malformed::Version(VERSION + 1)));
        let mut other = all()[0].encode();
        other[8] = b'X';
        assert_eq!(Message::parse(&other), Err(Malformed::Bytes));
    }
}
