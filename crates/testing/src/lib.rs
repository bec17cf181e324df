//! What tests of several crates share: waits for conditions, and random numbers that a seed
//! repeats. No program uses it.
//!
//! A test waits for what it says, never for a time: [`until`] and [`found`] look again and again,
//! and fail by the name of what did not come. Random choices come from a [`Random`], whose seed is
//! printed, so that a failure can be run again with `TOMBOLO_SEED`. [`fork`] has children of a
//! fork. [`hex`] reads bytes that a test has written down.

pub mod fork;

use std::fmt::Display;
use std::io::Write;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// How long a wait lasts before it fails: long enough for a machine that has much else to do.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(1);

/// Waits until `look` finds something, and gives it.
///
/// # Panics
/// When it finds nothing within [`TIMEOUT`].
#[track_caller]
pub fn found<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + TIMEOUT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "{what}: not within {TIMEOUT:?}");
        std::thread::sleep(PAUSE);
    }
}

/// Waits until `done`.
///
/// # Panics
/// When it is not within [`TIMEOUT`].
#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    found(what, || done().then_some(()));
}

/// Says that the test of this thread, or a part of it, cannot run here, and why. Where `CI` is
/// `true` nothing may be skipped.
///
/// The line goes past the test harness, which keeps what a test that passes has printed:
/// tests/stages.py counts these lines.
///
/// # Panics
/// Where `CI` is `true`.
#[track_caller]
pub fn skip(reason: impl Display) {
    let thread = std::thread::current();
    let line = format!("skipped: {}: {reason}", thread.name().unwrap_or("a test"));
    // In one piece, so that it stays a line. Without a place to tell it there is none to count it.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{line}; in CI nothing may be skipped");
}

/// The bytes that `text` writes in hexadecimal. White space is skipped, and so is the rest of a
/// line from `#`, where a test says what the bytes before it are.
///
/// # Panics
/// Where a character is no digit, or a line has half a byte.
#[track_caller]
pub fn hex(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for line in text.lines() {
        let digits = line.split('#').next().unwrap_or_default().split_whitespace().collect::<String>();
        let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        assert!(is_hex && digits.len().is_multiple_of(2), "expected pairs of hexadecimal digits, found {line:?}");
        let pairs = (0..digits.len()).step_by(2).map(|at| &digits[at..at + 2]);
        bytes.extend(pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap_or_default()));
    }
    bytes
}

/// The seed that `TOMBOLO_SEED` gives, if it does.
pub fn given_seed() -> Option<u64> {
    std::env::var("TOMBOLO_SEED").ok().and_then(|text| text.parse().ok())
}

/// Random numbers that a seed repeats (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Seeded by `TOMBOLO_SEED`, else by the time; the seed is printed.
    pub fn seeded() -> Random {
        Random::seeded_or(UNIX_EPOCH.elapsed().map_or(1, |t| t.as_nanos() as u64))
    }

    /// Seeded by `TOMBOLO_SEED`, else by `seed`; the seed is printed.
    pub fn seeded_or(seed: u64) -> Random {
        let seed = given_seed().unwrap_or(seed);
        println!("TOMBOLO_SEED={seed}");
        Random(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let a = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let b = (a ^ (a >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        b ^ (b >> 31)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next_u64() % n
    }

    /// An index into something of that length, which is not 0.
    pub fn index(&mut self, len: usize) -> usize {
        self.below(len as u64) as usize
    }

    /// A number in `from..=to`.
    pub fn within(&mut self, from: usize, to: usize) -> usize {
        from + self.index(to - from + 1)
    }

    /// True once in `one_in` times, on average.
    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_in_pairs_with_notes_behind_them() {
        assert_eq!(hex("\n 00fF # kind\n\n a0 # 11\n"), [0x00, 0xff, 0xa0]);
        for wrong in ["0", "0\n0", "+1", "0g"] {
            assert!(std::panic::catch_unwind(|| hex(wrong)).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_wait_ends_with_what_was_found() {
        let mut looks = 0;
        assert_eq!(
            found("the third look", || {
                looks += 1;
                (looks == 3).then_some(looks)
            }),
            3
        );
    }

    /// The first numbers of the reference implementation (Vigna, splitmix64.c) with the seed 1234567.
    #[test]
    fn the_numbers_are_those_of_splitmix64() {
        let mut random = Random(1_234_567);
        let first = [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423];
        assert_eq!(first.map(|_| random.next_u64()), first);
    }
}
