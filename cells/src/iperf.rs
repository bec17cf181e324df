//! What iperf 2 speaks on the wire, as stock iperf 2.1.8 was seen to speak it, and its arithmetic
//! of loss and jitter.
//!
//! All words are big-endian and 32 bits wide.
//!
//! ```text
//! UDP datagram    0 id (low)   4 seconds   8 microseconds   12 id (high)   16 client header
//! client header   0 flags   4 threads   8 port to come back to   12 buffer   16 window or rate   20 amount
//!                 24 type   28 length   32 upper flags (16), lower flags (16)   36, 40 version   44 TOS
//!                 48 rate (low)   52 rate (high)
//! server report   16 flags   20 bytes (high)   24 bytes (low)   28 seconds   32 microseconds   36 lost
//! (in a datagram) 40 out of order   44 datagrams   48 jitter seconds   52 jitter microseconds
//! ```
//!
//! A TCP client begins its stream with a client header. A UDP client puts one into each datagram,
//! and ends with datagrams whose id is negative, until the server has answered one with its report.
//! The amount is in bytes, or, negative, in hundredths of a second.

use alloc::format;
use alloc::string::String;

/// The port of iperf 2.
pub const PORT: u16 = 5001;
/// The payload of a datagram that fits an Ethernet frame.
pub const DATAGRAM_BYTES: usize = 1470;
/// Bytes of the part of a client header that is always there.
pub const CLIENT_HEADER_BYTES: usize = 24;
/// Bytes of a client header with what is read of its extension.
pub const EXTENDED_HEADER_BYTES: usize = 56;
/// Bytes of the head of a datagram.
pub const UDP_HEADER_BYTES: usize = 16;
/// Bytes of a datagram with a server report.
pub const REPORT_BYTES: usize = 56;

const FLAG_VERSION_1: u32 = 0x8000_0000;
const FLAG_EXTENDED: u32 = 0x4000_0000;
const FLAG_RUN_NOW: u32 = 0x0000_0001;
const FLAG_ID_64: u32 = 0x0800_0000;
const UPPER_REVERSE: u16 = 0x0400;
const UPPER_FULL_DUPLEX: u16 = 0x0800;

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn put(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_be_bytes());
}

/// How much is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// Stop after this many payload bytes.
    Bytes(u64),
    /// Stop after this time.
    Nanoseconds(u64),
}

/// What the server is to do besides receiving.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// This side only receives.
    Receive,
    /// Send to the client's port when it has finished (`-r`).
    Tradeoff,
    /// Send to the client's port at the same time (`-d`).
    Dual,
    /// Send on this connection instead (`-R`).
    Reverse,
    /// Send on this connection as well (`--full-duplex`).
    FullDuplex,
}

/// What a client wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientHeader {
    /// What the server is to do.
    pub mode: Mode,
    /// The client's port for a connection back.
    pub port: u16,
    /// How much the server is to send, if it is to send.
    pub amount: Amount,
    /// Bits per second at which it is to send; 0: as fast as it goes.
    pub rate: u64,
    /// Bytes of each datagram that it is to send: those that the client was told (`-l`), no more
    /// than fit a frame.
    pub datagram_bytes: usize,
}

impl ClientHeader {
    /// Reads a header; bytes that are no header (old clients send data at once) are a client that
    /// wants nothing. `None`: there are too few bytes to tell.
    pub fn parse(bytes: &[u8]) -> Option<ClientHeader> {
        let flags = word(bytes, 0)?;
        let nothing = ClientHeader {
            mode: Mode::Receive,
            port: 0,
            amount: Amount::Bytes(0),
            rate: 0,
            datagram_bytes: DATAGRAM_BYTES,
        };
        if flags & (FLAG_VERSION_1 | FLAG_EXTENDED) == 0 {
            return Some(nothing);
        }
        let port = word(bytes, 8)? as u16;
        let datagram_bytes = match word(bytes, 12)? as usize {
            0 => DATAGRAM_BYTES,
            told => told.min(DATAGRAM_BYTES),
        };
        let amount = match word(bytes, 20)? as i32 {
            hundredths @ ..0 => Amount::Nanoseconds(u64::from(hundredths.unsigned_abs()) * 10_000_000),
            bytes => Amount::Bytes(bytes as u64),
        };
        let (mut upper, mut rate) = (0, 0);
        if flags & FLAG_EXTENDED != 0 {
            upper = (word(bytes, 32)? >> 16) as u16;
            rate = u64::from(word(bytes, 48)?) | u64::from(word(bytes, 52)?) << 32;
        }
        let mode = if upper & UPPER_FULL_DUPLEX != 0 {
            Mode::FullDuplex
        } else if upper & UPPER_REVERSE != 0 {
            Mode::Reverse
        } else if flags & FLAG_VERSION_1 == 0 {
            Mode::Receive
        } else if flags & FLAG_RUN_NOW != 0 {
            Mode::Dual
        } else {
            Mode::Tradeoff
        };
        Some(ClientHeader { mode, port, amount, rate, datagram_bytes })
    }
}

/// The head of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Its number, from 1; negative in the last one.
    pub id: i64,
    /// When it was sent, by the sender's clock.
    pub sent_us: u64,
}

impl Datagram {
    /// Reads a datagram's head.
    pub fn parse(bytes: &[u8]) -> Option<Datagram> {
        let low = word(bytes, 0)?;
        let sent_us = u64::from(word(bytes, 4)?) * 1_000_000 + u64::from(word(bytes, 8)?);
        // Without the flag the number has 32 bits and no other half.
        let has_high = word(bytes, UDP_HEADER_BYTES).is_some_and(|flags| flags & FLAG_ID_64 != 0);
        let high = word(bytes, 12)?;
        let id = if has_high { (u64::from(high) << 32 | u64::from(low)) as i64 } else { i64::from(low as i32) };
        Some(Datagram { id, sent_us })
    }

    /// Writes the head, and a client header that wants nothing and says that the number has 64
    /// bits.
    ///
    /// # Panics
    /// `bytes` must have room for both, 40 bytes.
    pub fn emit(&self, bytes: &mut [u8]) {
        put(bytes, 0, self.id as u32);
        put(bytes, 4, (self.sent_us / 1_000_000) as u32);
        put(bytes, 8, (self.sent_us % 1_000_000) as u32);
        put(bytes, 12, (self.id >> 32) as u32);
        bytes[UDP_HEADER_BYTES..UDP_HEADER_BYTES + CLIENT_HEADER_BYTES].fill(0);
        put(bytes, UDP_HEADER_BYTES, FLAG_ID_64);
    }
}

/// What a receiver of datagrams has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes of payload, headers not counted.
    pub bytes: u64,
    /// From the first datagram to the last.
    pub duration_us: u64,
    /// Numbers that never came.
    pub lost: u64,
    /// Numbers that came after a higher one.
    pub out_of_order: u64,
    /// Datagrams that were sent, as far as the numbers tell.
    pub datagrams: u64,
    /// Smoothed variation of the transit time (RFC 3550 §6.4.1).
    pub jitter_us: u64,
}

impl Report {
    /// Writes the report behind the head of a datagram, which stays as it is.
    ///
    /// # Panics
    /// `bytes` must have room, [`REPORT_BYTES`].
    pub fn emit(&self, bytes: &mut [u8]) {
        let capped = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        for (at, value) in [
            (16, FLAG_VERSION_1),
            (20, (self.bytes >> 32) as u32),
            (24, self.bytes as u32),
            (28, (self.duration_us / 1_000_000) as u32),
            (32, (self.duration_us % 1_000_000) as u32),
            (36, capped(self.lost)),
            (40, capped(self.out_of_order)),
            (44, capped(self.datagrams)),
            (48, (self.jitter_us / 1_000_000) as u32),
            (52, (self.jitter_us % 1_000_000) as u32),
        ] {
            put(bytes, at, value);
        }
    }

    /// Reads the report of a server; `None` where the datagram holds none.
    pub fn parse(bytes: &[u8]) -> Option<Report> {
        let word = |at| word(bytes, at);
        if word(16)? & FLAG_VERSION_1 == 0 {
            return None;
        }
        Some(Report {
            bytes: u64::from(word(20)?) << 32 | u64::from(word(24)?),
            duration_us: u64::from(word(28)?) * 1_000_000 + u64::from(word(32)?),
            lost: u64::from(word(36)?),
            out_of_order: u64::from(word(40)?),
            datagrams: u64::from(word(44)?),
            jitter_us: u64::from(word(48)?) * 1_000_000 + u64::from(word(52)?),
        })
    }
}

/// Follows the datagrams of one sender.
#[derive(Clone, Copy, Debug)]
pub struct Receiver {
    first_us: u64,
    last_us: u64,
    bytes: u64,
    received: u64,
    out_of_order: u64,
    highest: i64,
    transit_us: i64,
    /// In sixteenths of a microsecond.
    jitter_16: u64,
}

impl Receiver {
    /// The first datagram came at `now_us`.
    pub fn new(now_us: u64) -> Receiver {
        Receiver {
            first_us: now_us,
            last_us: now_us,
            bytes: 0,
            received: 0,
            out_of_order: 0,
            highest: 0,
            transit_us: 0,
            jitter_16: 0,
        }
    }

    /// A datagram of `len` bytes came at `now_us`. The last one (negative number) is not counted.
    pub fn take(&mut self, datagram: Datagram, len: usize, now_us: u64) {
        self.last_us = now_us;
        if datagram.id <= 0 {
            // It says how many there were.
            self.highest = self.highest.max(datagram.id.saturating_neg() - 1);
            return;
        }
        self.bytes += len as u64;
        if datagram.id > self.highest {
            self.highest = datagram.id;
        } else {
            self.out_of_order += 1;
        }
        let transit_us = (now_us as i64).wrapping_sub(datagram.sent_us as i64);
        if self.received > 0 {
            let variation = transit_us.wrapping_sub(self.transit_us).unsigned_abs();
            self.jitter_16 = self.jitter_16 + variation - (self.jitter_16 + 8) / 16;
        }
        self.transit_us = transit_us;
        self.received += 1;
    }

    /// What was seen so far.
    pub fn report(&self) -> Report {
        let datagrams = (self.highest.max(0) as u64).max(self.received);
        Report {
            bytes: self.bytes,
            duration_us: self.last_us - self.first_us,
            lost: datagrams - self.received,
            out_of_order: self.out_of_order,
            datagrams,
            jitter_us: self.jitter_16 / 16,
        }
    }
}

/// A line of the console: what was moved in what time.
pub fn line(what: &str, bytes: u64, duration_us: u64) -> String {
    let bits = if duration_us == 0 { 0 } else { u128::from(bytes) * 8_000_000 / u128::from(duration_us) };
    let (mega, rest) = (bits / 1_000_000, bits / 10_000 % 100);
    let (s, hundredths) = (duration_us / 1_000_000, duration_us / 10_000 % 100);
    format!("iperf: {what}: {bytes} bytes in {s}.{hundredths:02} s, {mega}.{rest:02} Mbit/s")
}

/// The same with loss and jitter.
pub fn udp_line(what: &str, report: &Report) -> String {
    let Report { bytes, duration_us, lost, out_of_order, datagrams, jitter_us } = *report;
    let head = line(what, bytes, duration_us);
    let (ms, rest) = (jitter_us / 1000, jitter_us % 1000);
    format!("{head}, jitter {ms}.{rest:03} ms, lost {lost} of {datagrams}, out of order {out_of_order}")
}

/// A number of bits or bytes with a suffix as iperf takes it: `k`, `m`, `g` are powers of 1000,
/// `K`, `M`, `G` of 1024.
pub fn quantity(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 1,
        "k" => 1000,
        "m" => 1_000_000,
        "g" => 1_000_000_000,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    /// From the words that stock iperf 2.1.8 sent.
    fn bytes(words: &[u32]) -> std::vec::Vec<u8> {
        words.iter().flat_map(|w| w.to_be_bytes()).collect()
    }

    const PLAIN: [u32; 15] = [0x4001_0078, 1, 0x807f, 0, 0, 0xffff_ff9c, 0, 0, 0, 0x0002_0001, 0x0008_0003, 0, 0, 0, 0];

    #[test]
    fn what_stock_clients_send_is_understood() {
        let second = Amount::Nanoseconds(1_000_000_000);
        for (flags, upper, mode) in [
            (0x4001_0078, 0, Mode::Receive),
            (0xc001_0078, 0, Mode::Tradeoff),
            (0xc001_0079, 0, Mode::Dual),
            (0x4401_0078, 0x0400_0000, Mode::Reverse),
            (0x4401_0078, 0x0800_0000, Mode::FullDuplex),
        ] {
            let mut words = PLAIN;
            (words[0], words[8]) = (flags, upper);
            let header = ClientHeader::parse(&bytes(&words)).unwrap();
            let datagram_bytes = DATAGRAM_BYTES;
            assert_eq!(header, ClientHeader { mode, port: 0x807f, amount: second, rate: 0, datagram_bytes });
        }
        let mut words = PLAIN;
        words[5] = 0x10_0000;
        assert_eq!(ClientHeader::parse(&bytes(&words)).unwrap().amount, Amount::Bytes(1 << 20));
        for (told, len) in [(256, 256), (1470, 1470), (8000, DATAGRAM_BYTES), (u32::MAX, DATAGRAM_BYTES)] {
            words[3] = told;
            assert_eq!(ClientHeader::parse(&bytes(&words)).unwrap().datagram_bytes, len);
        }
        // -C: data at once.
        assert_eq!(ClientHeader::parse(b"0123456789012345678901234").unwrap().mode, Mode::Receive);
    }

    #[test]
    fn a_short_header_is_not_judged() {
        let whole = bytes(&PLAIN);
        for len in 0..EXTENDED_HEADER_BYTES {
            assert_eq!(ClientHeader::parse(&whole[..len]), None, "{len}");
        }
        assert!(ClientHeader::parse(&whole[..EXTENDED_HEADER_BYTES]).is_some());
    }

    #[test]
    fn datagrams_both_ways() {
        let stock = bytes(&[0xffff_ff25, 0x6b02_08a1, 0x0004_2250, 0xffff_ffff, 0x4801_0098]);
        let datagram = Datagram::parse(&stock).unwrap();
        assert_eq!((datagram.id, datagram.sent_us), (-219, 0x6b02_08a1 * 1_000_000 + 0x0004_2250));
        for id in [1, -1, 5_000_000_000, -5_000_000_000] {
            let mut bytes = vec![0xa5; 64];
            let datagram = Datagram { id, sent_us: 12_345_678 };
            datagram.emit(&mut bytes);
            assert_eq!(Datagram::parse(&bytes), Some(datagram));
            assert_eq!(bytes[40], 0xa5);
        }
        for len in 0..UDP_HEADER_BYTES {
            assert_eq!(Datagram::parse(&stock[..len]), None);
        }
    }

    #[test]
    fn reports_both_ways() {
        let report = Report {
            bytes: 5_000_000_000,
            duration_us: 2_500_001,
            lost: 3,
            out_of_order: 1,
            datagrams: 100,
            jitter_us: 1_000_017,
        };
        let mut bytes = vec![0xa5; REPORT_BYTES];
        report.emit(&mut bytes);
        assert_eq!(bytes[..16], [0xa5; 16]);
        assert_eq!(Report::parse(&bytes), Some(report));
        for len in 0..REPORT_BYTES {
            assert_eq!(Report::parse(&bytes[..len]), None);
        }
        bytes[16] = 0;
        assert_eq!(Report::parse(&bytes), None);
    }

    #[test]
    fn loss_order_and_jitter() {
        let mut receiver = Receiver::new(0);
        for (at, id) in [1i64, 2, 5, 4, 6].into_iter().enumerate() {
            let now_us = at as u64 * 1000;
            receiver.take(Datagram { id, sent_us: now_us }, 100, now_us);
        }
        // 8 were sent; 3, 7 and 8 are missing.
        receiver.take(Datagram { id: -9, sent_us: 0 }, 100, 6000);
        let report = receiver.report();
        assert_eq!((report.bytes, report.datagrams, report.lost, report.out_of_order), (500, 8, 3, 1));
        assert_eq!((report.duration_us, report.jitter_us), (6000, 0));

        // A transit time that jumps by 160 µs each time: the jitter goes there.
        let mut receiver = Receiver::new(0);
        for id in 1..500i64 {
            let now_us = id as u64 * 1000 + if id % 2 == 0 { 160 } else { 0 };
            receiver.take(Datagram { id, sent_us: id as u64 * 1000 }, 100, now_us);
        }
        assert!(receiver.report().jitter_us.abs_diff(160) <= 2, "{}", receiver.report().jitter_us);
    }

    #[test]
    fn lines_and_quantities() {
        assert_eq!(line("TCP", 1_250_000, 1_000_000), "iperf: TCP: 1250000 bytes in 1.00 s, 10.00 Mbit/s");
        assert_eq!(line("TCP", 5, 0), "iperf: TCP: 5 bytes in 0.00 s, 0.00 Mbit/s");
        assert_eq!(
            (quantity("10m"), quantity("2K"), quantity("7"), quantity("x"), quantity("1q")),
            (Some(10_000_000), Some(2048), Some(7), None, None)
        );
    }
}
