//! The DNS messages (RFC 1035) that the gateway reads and writes.
//!
//! Only the header and the one question of a query are read. Nothing comes before a question that a
//! compression pointer could lead to. So a pointer in it is an error, and no loop can be built.
//! Everything behind the question is checked for one thing: whether an OPT record (RFC 6891)
//! follows at once, and the size it names.

use crate::gateway::names::MAX_LABEL_BYTES;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub(super) const PORT: u16 = 53;
/// How long an answer about a member may be kept, in seconds: addresses can change at any time.
const TTL_SECS: u32 = 10;
pub(super) const HEADER_BYTES: usize = 12;
/// Longest message over UDP for a client that names no size (RFC 1035 §4.2.1).
pub(super) const UDP_BYTES: usize = 512;
/// Longest name, with the length bytes of its labels (RFC 1035 §2.3.4).
const MAX_NAME_BYTES: usize = 255;

const FLAG_ANSWER: u16 = 0x8000;
const FLAG_AUTHORITATIVE: u16 = 0x0400;
const FLAG_TRUNCATED: u16 = 0x0200;
const FLAG_RECURSION_DESIRED: u16 = 0x0100;
const FLAG_RECURSION_AVAILABLE: u16 = 0x0080;
const OPCODE_MASK: u16 = 0x7800;

const TYPE_A: u16 = 1;
const TYPE_SOA: u16 = 6;
const TYPE_PTR: u16 = 12;
const TYPE_AAAA: u16 = 28;
const TYPE_OPT: u16 = 41;
const TYPE_IXFR: u16 = 251;
const TYPE_AXFR: u16 = 252;
const TYPE_ANY: u16 = 255;
const CLASS_IN: u16 = 1;
const CLASS_ANY: u16 = 255;

/// Response codes (RFC 1035 §4.1.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Code {
    NoError = 0,
    FormatError = 1,
    ServerFailure = 2,
    NameError = 3,
    NotImplemented = 4,
    Refused = 5,
}

/// Why there is no question to answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// No query at all; answering it could make two servers talk to each other for ever.
    Silence,
    /// A query that is answered with a code.
    Answer { id: u16, flags: u16, code: Code },
}

/// A query: its header and its question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Query<'a> {
    pub(super) id: u16,
    flags: u16,
    /// The labels of the name, as they came.
    labels: Vec<&'a [u8]>,
    kind: u16,
    class: u16,
    /// The question section as it came, to be repeated.
    pub(super) question: &'a [u8],
    /// The size that an OPT record names.
    edns_bytes: Option<u16>,
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(super) fn read(bytes: &[u8]) -> Result<Query<'_>, Unread> {
    let (Some(id), Some(flags), Some(questions)) = (word(bytes, 0), word(bytes, 2), word(bytes, 4)) else {
        return Err(Unread::Silence);
    };
    if bytes.len() < HEADER_BYTES || flags & FLAG_ANSWER != 0 {
        return Err(Unread::Silence);
    }
    let refuse = |code| Unread::Answer { id, flags, code };
    if flags & OPCODE_MASK != 0 {
        return Err(refuse(Code::NotImplemented));
    }
    if questions != 1 {
        return Err(refuse(Code::FormatError));
    }
    let wrong = refuse(Code::FormatError);
    let mut labels = Vec::new();
    let mut at = HEADER_BYTES;
    loop {
        let length = usize::from(*bytes.get(at).ok_or(wrong)?);
        at += 1;
        if length == 0 {
            break;
        }
        // Above 63 are pointers and kinds of labels that were never used.
        if length > MAX_LABEL_BYTES || at + length + 1 - HEADER_BYTES > MAX_NAME_BYTES {
            return Err(wrong);
        }
        labels.push(bytes.get(at..at + length).ok_or(wrong)?);
        at += length;
    }
    let (kind, class) = (word(bytes, at).ok_or(wrong)?, word(bytes, at + 2).ok_or(wrong)?);
    let question = &bytes[HEADER_BYTES..at + 4];
    let additional_only = word(bytes, 6) == Some(0) && word(bytes, 8) == Some(0) && word(bytes, 10) != Some(0);
    let behind = &bytes[at + 4..];
    // An OPT record: the root's name, its type, and where others have a class, a size.
    let opt = additional_only && behind.first() == Some(&0) && word(behind, 1) == Some(TYPE_OPT);
    let edns_bytes = if opt { word(behind, 3) } else { None };
    Ok(Query { id, flags, labels, kind, class, question, edns_bytes })
}

/// What a query is about, seen from a network with a domain and a subnet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    /// A name of the network: its one label, in small letters.
    Member(String),
    Domain,
    /// A name under the domain that no member can have.
    Nobody,
    /// An address, by its name in `in-addr.arpa` or `ip6.arpa`.
    Address(IpAddr),
    /// Everything else.
    Elsewhere,
    /// A class or a type that is not served to anybody.
    Barred,
}

impl Query<'_> {
    /// What it asks for. Names of one label are the network's: they mean nothing to a server
    /// outside.
    pub(super) fn subject(&self, domain: &[String]) -> Subject {
        if !matches!(self.class, CLASS_IN | CLASS_ANY) || matches!(self.kind, TYPE_AXFR | TYPE_IXFR) {
            return Subject::Barred;
        }
        if let Some(address) = self.reverse() {
            return Subject::Address(address);
        }
        let (labels, n) = (&self.labels, self.labels.len());
        let ends_with = |suffix: &[String]| {
            n >= suffix.len()
                && labels[n - suffix.len()..].iter().zip(suffix).all(|(l, s)| l.eq_ignore_ascii_case(s.as_bytes()))
        };
        let own = if !domain.is_empty() && ends_with(domain) {
            &labels[..n - domain.len()]
        } else if n == 1 {
            &labels[..]
        } else {
            return Subject::Elsewhere;
        };
        match own {
            [] => Subject::Domain,
            [label] => match std::str::from_utf8(label) {
                Ok(text) => Subject::Member(text.to_ascii_lowercase()),
                Err(_) => Subject::Nobody,
            },
            _ => Subject::Nobody,
        }
    }

    fn reverse(&self) -> Option<IpAddr> {
        if self.labels.len() == 34 {
            return self.reverse6().map(IpAddr::V6);
        }
        let [d, c, b, a, in_addr, arpa] = self.labels[..] else { return None };
        if !in_addr.eq_ignore_ascii_case(b"in-addr") || !arpa.eq_ignore_ascii_case(b"arpa") {
            return None;
        }
        let octet = |label: &[u8]| {
            let plain = label.len() == 1 || label.first() != Some(&b'0');
            std::str::from_utf8(label).ok().filter(|t| plain && t.bytes().all(|b| b.is_ascii_digit()))?.parse().ok()
        };
        Some(Ipv4Addr::new(octet(a)?, octet(b)?, octet(c)?, octet(d)?).into())
    }

    /// The address of a name in `ip6.arpa`: its 32 hexadecimal digits, the last one first (RFC 3596
    /// §2.5).
    fn reverse6(&self) -> Option<Ipv6Addr> {
        let (digits, zone) = self.labels.split_at_checked(32)?;
        let [ip6, arpa] = *zone else { return None };
        if !ip6.eq_ignore_ascii_case(b"ip6") || !arpa.eq_ignore_ascii_case(b"arpa") {
            return None;
        }
        digits
            .iter()
            .rev()
            .try_fold(0u128, |bits, label| match **label {
                [digit] => Some(bits << 4 | u128::from(char::from(digit).to_digit(16)?)),
                _ => None,
            })
            .map(Ipv6Addr::from_bits)
    }

    /// Whether it asks for addresses of IPv4, and of IPv6.
    pub(super) fn wants_addresses(&self) -> (bool, bool) {
        (matches!(self.kind, TYPE_A | TYPE_ANY), matches!(self.kind, TYPE_AAAA | TYPE_ANY))
    }

    pub(super) fn wants_name(&self) -> bool {
        matches!(self.kind, TYPE_PTR | TYPE_ANY)
    }

    /// The longest answer over UDP that the client takes, and that fits `mtu`.
    pub(super) fn udp_room(&self, mtu: u16) -> usize {
        usize::from(self.edns_bytes.unwrap_or(0)).clamp(UDP_BYTES, usize::from(mtu).saturating_sub(28).max(UDP_BYTES))
    }

    /// The answer with `records` and `code`. `zone` is the domain that is the authority for a
    /// negative answer.
    pub(super) fn answer(&self, code: Code, records: &[AnswerRecord<'_>], zone: &[String], recursion: bool) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(128);
        let authoritative = if matches!(code, Code::NoError | Code::NameError) { FLAG_AUTHORITATIVE } else { 0 };
        let negative = records.is_empty() && authoritative != 0 && !zone.is_empty();
        header(&mut bytes, self.id, reply_flags(self.flags, recursion) | authoritative | code as u16);
        for count in [1, records.len() as u16, u16::from(negative), u16::from(self.edns_bytes.is_some())] {
            bytes.extend_from_slice(&count.to_be_bytes());
        }
        bytes.extend_from_slice(self.question);
        for record in records {
            match record {
                AnswerRecord::Address(IpAddr::V4(address)) => self.record(&mut bytes, TYPE_A, &address.octets()),
                AnswerRecord::Address(IpAddr::V6(address)) => self.record(&mut bytes, TYPE_AAAA, &address.octets()),
                AnswerRecord::Name(name, domain) => {
                    let mut data = Vec::with_capacity(64);
                    write_name(&mut data, std::iter::once(*name).chain(domain.iter().map(String::as_str)));
                    self.record(&mut bytes, TYPE_PTR, &data);
                }
            }
        }
        if negative {
            write_soa(&mut bytes, zone);
        }
        if self.edns_bytes.is_some() {
            // OPT: the root's name, our own size (what fits an Ethernet frame without fragments),
            // version 0.
            bytes.push(0);
            for value in [TYPE_OPT, 1232, 0, 0, 0] {
                bytes.extend_from_slice(&value.to_be_bytes());
            }
        }
        bytes
    }

    fn record(&self, bytes: &mut Vec<u8>, kind: u16, data: &[u8]) {
        // The name is a pointer to the question's.
        for value in [0xc000 | HEADER_BYTES as u16, kind, CLASS_IN] {
            bytes.extend_from_slice(&value.to_be_bytes());
        }
        bytes.extend_from_slice(&TTL_SECS.to_be_bytes());
        bytes.extend_from_slice(&(data.len() as u16).to_be_bytes());
        bytes.extend_from_slice(data);
    }
}

/// A record of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) enum AnswerRecord<'a> {
    Address(IpAddr),
    /// A name, and the domain that it is in.
    Name(&'a str, &'a [String]),
}

fn reply_flags(query_flags: u16, recursion: bool) -> u16 {
    FLAG_ANSWER | query_flags & FLAG_RECURSION_DESIRED | if recursion { FLAG_RECURSION_AVAILABLE } else { 0 }
}

fn header(bytes: &mut Vec<u8>, id: u16, flags: u16) {
    bytes.extend_from_slice(&id.to_be_bytes());
    bytes.extend_from_slice(&flags.to_be_bytes());
}

fn write_name<'a>(bytes: &mut Vec<u8>, labels: impl Iterator<Item = &'a str>) {
    for label in labels {
        bytes.push(label.len() as u8);
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
}

/// The start of authority of `zone`, which says how long a negative answer may be kept (RFC 2308
/// §5).
fn write_soa(bytes: &mut Vec<u8>, zone: &[String]) {
    let labels = || zone.iter().map(String::as_str);
    write_name(bytes, labels());
    for value in [TYPE_SOA, CLASS_IN] {
        bytes.extend_from_slice(&value.to_be_bytes());
    }
    bytes.extend_from_slice(&TTL_SECS.to_be_bytes());
    let mut data = Vec::with_capacity(96);
    write_name(&mut data, std::iter::once("gateway").chain(labels()));
    write_name(&mut data, std::iter::once("hostmaster").chain(labels()));
    // Serial, refresh, retry, expire: unused, since there are no zone transfers. Minimum: of
    // negative answers.
    for value in [1, 3600, 600, 86_400, TTL_SECS] {
        data.extend_from_slice(&value.to_be_bytes());
    }
    bytes.extend_from_slice(&(data.len() as u16).to_be_bytes());
    bytes.extend_from_slice(&data);
}

/// An answer that is a code and nothing else, to a query whose question could not be read.
pub(super) fn bare(id: u16, query_flags: u16, code: Code, recursion: bool) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_BYTES);
    let opcode = query_flags & OPCODE_MASK;
    header(&mut bytes, id, reply_flags(query_flags, recursion) | opcode | code as u16);
    bytes.resize(HEADER_BYTES, 0);
    bytes
}

/// Whether `answer` is one to the query with `id` and `question`.
pub(super) fn answers(answer: &[u8], id: u16, question: &[u8]) -> bool {
    let is_answer = word(answer, 2).is_some_and(|flags| flags & FLAG_ANSWER != 0);
    let same = answer.get(HEADER_BYTES..HEADER_BYTES + question.len());
    word(answer, 0) == Some(id)
        && is_answer
        && word(answer, 4) == Some(1)
        && same.is_some_and(|s| s.eq_ignore_ascii_case(question))
}

/// `answer`, which [`answers`], cut to header and question with the truncation flag, so that the
/// client asks again over TCP.
pub(super) fn truncated(answer: &[u8], question_len: usize) -> Vec<u8> {
    let mut bytes = answer[..HEADER_BYTES + question_len].to_vec();
    bytes[2] |= (FLAG_TRUNCATED >> 8) as u8;
    bytes[6..HEADER_BYTES].fill(0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(crate) fn query(id: u16, labels: &[&str], kind: u16) -> Vec<u8> {
        let mut bytes = Vec::new();
        header(&mut bytes, id, FLAG_RECURSION_DESIRED);
        bytes.extend_from_slice(&[0, 1, 0, 0, 0, 0, 0, 0]);
        write_name(&mut bytes, labels.iter().copied());
        bytes.extend_from_slice(&kind.to_be_bytes());
        bytes.extend_from_slice(&CLASS_IN.to_be_bytes());
        bytes
    }

    fn domain() -> Vec<String> {
        vec!["lab".into(), "internal".into()]
    }

    const GOLDEN_QUERY: &[u8] =
        b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x03WeB\x03lab\x08internal\x00\x00\x01\x00\x01";

    #[test]
    fn a_golden_query_gets_the_golden_answer() {
        assert_eq!(GOLDEN_QUERY, query(0x1234, &["WeB", "lab", "internal"], TYPE_A));
        let query = read(GOLDEN_QUERY).unwrap();
        assert_eq!(query.subject(&domain()), Subject::Member("web".into()));
        let record = AnswerRecord::Address(IpAddr::from([10, 1, 2, 3]));
        let answer = query.answer(Code::NoError, &[record], &domain(), true);
        let want: &[u8] = b"\x12\x34\x85\x80\x00\x01\x00\x01\x00\x00\x00\x00\
            \x03WeB\x03lab\x08internal\x00\x00\x01\x00\x01\
            \xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x0a\x00\x04\x0a\x01\x02\x03";
        assert_eq!(answer, want);
    }

    #[test]
    fn a_negative_answer_carries_the_authority_and_the_opt_record() {
        let mut bytes = query(7, &["nobody"], TYPE_A);
        bytes[11] = 1;
        bytes.extend_from_slice(b"\x00\x00\x29\x10\x00\x00\x00\x00\x00\x00\x00");
        let query = read(&bytes).unwrap();
        assert_eq!((query.edns_bytes, query.udp_room(1500), query.udp_room(600)), (Some(4096), 1472, 572));
        let answer = query.answer(Code::NameError, &[], &domain(), false);
        assert_eq!(answer[..12], *b"\x00\x07\x85\x03\x00\x01\x00\x00\x00\x01\x00\x01");
        let soa = b"\x03lab\x08internal\x00\x00\x06\x00\x01\x00\x00\x00\x0a\x00\x43\x07gateway\x03lab\x08internal\x00";
        assert!(answer.windows(soa.len()).any(|w| w == soa));
        assert!(answer.ends_with(b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"));
    }

    #[test]
    fn subjects_are_told_apart() {
        let cases: &[(&[&str], Subject)] = &[
            (&["WEB"], Subject::Member("web".into())),
            (&["web", "LAB", "internal"], Subject::Member("web".into())),
            (&["lab", "internal"], Subject::Domain),
            (&["a", "web", "lab", "internal"], Subject::Nobody),
            (&["lab"], Subject::Member("lab".into())),
            (&["example", "org"], Subject::Elsewhere),
            (&[], Subject::Elsewhere),
            (&["4", "3", "2", "10", "in-addr", "ARPA"], Subject::Address(IpAddr::from([10, 2, 3, 4]))),
            (&["4", "3", "2", "010", "in-addr", "arpa"], Subject::Elsewhere),
            (&["4", "3", "2", "256", "in-addr", "arpa"], Subject::Elsewhere),
            (&["+4", "3", "2", "10", "in-addr", "arpa"], Subject::Elsewhere),
        ];
        for (labels, want) in cases {
            assert_eq!(read(&query(1, labels, TYPE_A)).unwrap().subject(&domain()), *want, "{labels:?}");
        }
        assert_eq!(read(&query(1, &["web"], TYPE_AXFR)).unwrap().subject(&domain()), Subject::Barred);
    }

    #[test]
    fn what_is_no_query_is_not_answered_and_what_is_wrong_gets_a_code() {
        let code = |bytes: &[u8]| match read(bytes) {
            Err(Unread::Answer { code, .. }) => Some(code),
            _ => None,
        };
        let good = query(1, &["web"], TYPE_A);
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            bytes
        };
        assert_eq!(read(&with(2, 0x81)), Err(Unread::Silence));
        assert_eq!(code(&with(2, 0x28)), Some(Code::NotImplemented));
        assert_eq!(code(&with(5, 2)), Some(Code::FormatError));
        // A pointer to itself, a pointer forward, a reserved kind of label.
        for first in [0xc0, 0xc1, 0x40, 0x80] {
            assert_eq!(code(&with(12, first)), Some(Code::FormatError), "{first:x}");
        }
        let long = vec!["x".repeat(63); 4];
        let long: Vec<&str> = long.iter().map(String::as_str).collect();
        assert_eq!(code(&query(1, &long, TYPE_A)), Some(Code::FormatError));
        assert!(read(&query(1, &long[..3], TYPE_A)).is_ok());
        for cut in 0..good.len() {
            match read(&good[..cut]) {
                Err(Unread::Silence) => assert!(cut < HEADER_BYTES),
                Err(Unread::Answer { code, .. }) => assert_eq!(code, Code::FormatError),
                Ok(_) => panic!("cut at {cut}"),
            }
        }
    }

    #[test]
    fn an_answer_is_taken_only_for_its_own_question() {
        let asked = query(0x1234, &["example", "org"], TYPE_A);
        let question = &asked[HEADER_BYTES..];
        let mut answer = asked.clone();
        answer[2] = 0x81;
        assert!(answers(&answer, 0x1234, question));
        assert!(!answers(&answer, 0x1235, question));
        assert!(!answers(&asked, 0x1234, question), "that is a query");
        let mut other = answer.clone();
        other[13] ^= 1;
        assert!(!answers(&other, 0x1234, question));
        for cut in 0..answer.len() {
            assert!(!answers(&answer[..cut], 0x1234, question));
        }
        let mut long = answer.clone();
        long[7] = 9;
        long.extend_from_slice(&[0; 3000]);
        let cut = truncated(&long, question.len());
        assert_eq!((cut.len(), cut[2], cut[7]), (answer.len(), 0x83, 0));
    }
}
