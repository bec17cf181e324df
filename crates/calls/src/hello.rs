//! The first bytes between two machines, before the calls of [`crate::frames`]: the side that
//! connects names the service that it wants, and the other side answers whether it serves it.
//!
//! ```text
//!   hello     0..8 magic and version   8 length of the name   9.. the name
//!   verdict   0..8 magic and version   8 the verdict
//! ```
//!
//! The magic is `TMBLSVC` and the version 1. A name has 1 to 64 of `a-z A-Z 0-9 . _ -`, the first
//! not a dot: the rule of the folder of services. A cell that listens for calls has one service,
//! and no hello.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

const MAGIC: &[u8; 8] = b"TMBLSVC\x01";
/// A hello without its name; also a verdict.
const HEAD_BYTES: usize = 9;
/// The longest name.
pub const MAX_NAME_BYTES: usize = 64;
/// The longest hello.
pub const MAX_HELLO_BYTES: usize = HEAD_BYTES + MAX_NAME_BYTES;
/// The length of a verdict.
pub const VERDICT_BYTES: usize = HEAD_BYTES;

/// What the listening side answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Verdict {
    /// The greeting of calls follows.
    Welcome = 0,
    /// No service of that name runs there now.
    Absent = 1,
    /// It is not offered to this machine.
    Denied = 2,
    /// As many connections as allowed are open.
    Full = 3,
    /// The service runs on another machine, and is not passed on twice.
    Elsewhere = 4,
}

impl Verdict {
    /// All of them.
    pub const ALL: [Verdict; 5] =
        [Verdict::Welcome, Verdict::Absent, Verdict::Denied, Verdict::Full, Verdict::Elsewhere];
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Welcome => "welcome",
            Verdict::Absent => "no service of that name runs there; start it, or check its name",
            Verdict::Denied => "it is not offered to this machine; check the names that its export allows",
            Verdict::Full => "as many connections as it allows are open; raise its --connections",
            Verdict::Elsewhere => {
                "the service runs on a third machine, and is not passed on twice; import it from there"
            }
        })
    }
}

/// The other side does not speak this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum HelloError {
    /// Other first bytes, or another version.
    #[error("expected a hello of version 1, found other bytes")]
    Magic,
    /// A name that no service can have.
    #[error("the hello names no service: expected 1 to 64 of a-z A-Z 0-9 . _ -")]
    Name,
    /// A verdict of a later version.
    #[error("unknown verdict {0}: expected 0 to 4")]
    Verdict(u8),
}

/// Whether a service can have this name: the one rule, also for its socket in the folder of
/// services.
pub fn is_name(name: &[u8]) -> bool {
    let fine = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    (1..=MAX_NAME_BYTES).contains(&name.len()) && name[0] != b'.' && name.iter().all(fine)
}

/// The hello for a service.
///
/// # Errors
/// [`HelloError::Name`].
pub fn hello(name: &str) -> Result<Vec<u8>, HelloError> {
    if !is_name(name.as_bytes()) {
        return Err(HelloError::Name);
    }
    let mut out = MAGIC.to_vec();
    // At most 64.
    out.push(name.len() as u8);
    out.extend_from_slice(name.as_bytes());
    Ok(out)
}

/// The magic, as far as it has come.
fn check_magic(bytes: &[u8]) -> Result<(), HelloError> {
    let n = bytes.len().min(MAGIC.len());
    if bytes[..n] == MAGIC[..n] { Ok(()) } else { Err(HelloError::Magic) }
}

/// The service that a hello names; `None` while more has to come. It ends with the name: the other
/// side says nothing before the verdict, so more bytes than that are [`HelloError::Name`].
///
/// # Errors
/// [`HelloError`], as soon as it shows.
pub fn parse_hello(bytes: &[u8]) -> Result<Option<String>, HelloError> {
    check_magic(bytes)?;
    let Some(&len) = bytes.get(MAGIC.len()) else { return Ok(None) };
    let (len, name) = (len as usize, &bytes[HEAD_BYTES..]);
    if !(1..=MAX_NAME_BYTES).contains(&len) || name.len() > len {
        return Err(HelloError::Name);
    }
    if name.len() < len {
        return Ok(None);
    }
    let name = core::str::from_utf8(name).ok().filter(|name| is_name(name.as_bytes()));
    name.map(|name| Some(name.into())).ok_or(HelloError::Name)
}

/// The answer to a hello.
pub fn verdict(verdict: Verdict) -> [u8; VERDICT_BYTES] {
    core::array::from_fn(|i| MAGIC.get(i).copied().unwrap_or(verdict as u8))
}

/// A verdict that has come; `None` while more has to come.
///
/// # Errors
/// [`HelloError`], as soon as it shows.
pub fn parse_verdict(bytes: &[u8]) -> Result<Option<Verdict>, HelloError> {
    check_magic(bytes)?;
    let Some(&code) = bytes.get(MAGIC.len()) else { return Ok(None) };
    let known = Verdict::ALL.into_iter().find(|verdict| *verdict as u8 == code);
    known.map(Some).ok_or(HelloError::Verdict(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN: &[u8] = b"TMBLSVC\x01\x04calc";

    #[test]
    fn a_hello_is_these_bytes_and_is_read_back_only_when_it_is_whole() {
        assert_eq!(hello("calc").unwrap(), GOLDEN);
        for n in 0..GOLDEN.len() {
            assert_eq!(parse_hello(&GOLDEN[..n]), Ok(None), "{n} bytes");
        }
        assert_eq!(parse_hello(GOLDEN), Ok(Some("calc".into())));
        let more = [GOLDEN, b"x"].concat();
        assert_eq!(parse_hello(&more), Err(HelloError::Name));
        let longest = "n".repeat(MAX_NAME_BYTES);
        assert_eq!(hello(&longest).unwrap().len(), MAX_HELLO_BYTES);
        assert_eq!(parse_hello(&hello(&longest).unwrap()), Ok(Some(longest)));
    }

    #[test]
    fn what_is_no_hello_shows_with_its_first_wrong_byte() {
        for (bytes, error) in [
            (&b"GET / HT"[..], HelloError::Magic),
            (b"TMBLRPC\x02", HelloError::Magic),
            (b"TMBLSVC\x02", HelloError::Magic),
            (b"TMBLSVC\x01\x00", HelloError::Name),
            (b"TMBLSVC\x01\x41", HelloError::Name),
            (b"TMBLSVC\x01\x02.a", HelloError::Name),
            (b"TMBLSVC\x01\x02a/", HelloError::Name),
            (b"TMBLSVC\x01\x02\xc3\xa4", HelloError::Name),
        ] {
            assert_eq!(parse_hello(bytes), Err(error), "{bytes:02x?}");
        }
        assert_eq!(parse_hello(b"TMBLSVC\x01\x40"), Ok(None));
        for name in ["", ".a", "a/b", "ä", &"n".repeat(65)] {
            assert_eq!(hello(name), Err(HelloError::Name), "{name}");
        }
    }

    #[test]
    fn each_verdict_is_one_byte_behind_the_magic() {
        for (code, each) in (0u8..).zip(Verdict::ALL) {
            let bytes = verdict(each);
            assert_eq!(bytes, *[&b"TMBLSVC\x01"[..], &[code]].concat());
            for n in 0..VERDICT_BYTES {
                assert_eq!(parse_verdict(&bytes[..n]), Ok(None));
            }
            assert_eq!(parse_verdict(&bytes), Ok(Some(each)));
        }
        assert_eq!(parse_verdict(b"TMBLSVC\x01\x05"), Err(HelloError::Verdict(5)));
        assert_eq!(parse_verdict(b"HTTP/1.1 400"), Err(HelloError::Magic));
    }
}
