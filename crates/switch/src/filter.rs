//! Which frames a capture takes: an expression over their headers, in the words of pcap-filter(7).
//!
//! ```text
//! expression = term { ("and" | "or") term }      "and" binds closer; also && and ||
//! term       = ("not" | "!") term | "(" expression ")" | primitive
//! primitive  = arp | ip | ip6 | icmp | icmp6 | tcp | udp | igmp | broadcast | multicast | vlan [N]
//!            | [src | dst] host ADDRESS | [src | dst] net ADDRESS/BITS
//!            | [tcp | udp] [src | dst] port N | [tcp | udp] [src | dst] portrange N-M
//!            | ether [src | dst | host] MAC | ether proto N | less N | greater N
//! ```
//!
//! A primitive means what it means there: a test compares both, frame by frame, where tcpdump is
//! installed. There is one difference: VLAN tags are looked through, so `ip` is also true of a
//! tagged packet.
//!
//! # Limits
//! An expression has at most [`MAX_PRIMITIVES`], so that a frame costs the worker a bounded time.
//! It sees the head of a frame that every frame's decision sees
//! ([`HEAD_BYTES`](crate::frame::HEAD_BYTES)); what is behind it is not there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::RangeInclusive;

/// Primitives of one expression.
pub const MAX_PRIMITIVES: usize = 64;
/// Parentheses and negations within each other.
const MAX_DEPTH: usize = 32;

const ETHERTYPE_IP: u16 = 0x0800;
const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_RARP: u16 = 0x8035;
const ETHERTYPE_IP6: u16 = 0x86dd;
const ETHERTYPES_VLAN: [u16; 3] = [0x8100, 0x88a8, 0x9100];
const ICMP: u8 = 1;
const IGMP: u8 = 2;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMP6: u8 = 58;
const SCTP: u8 = 132;
/// The fragment header of IPv6.
const FRAGMENT: u8 = 44;
/// A packet of IPv4 whose offset is in these bits is a later fragment: its ports are elsewhere.
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// An expression that was understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter(Node);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    All(Vec<Node>),
    Any(Vec<Node>),
    Not(Box<Node>),
    Is(Primitive),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
    Either,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Primitive {
    EtherType(u16),
    Protocol { v4: Option<u8>, v6: Option<u8> },
    Broadcast,
    Multicast,
    Vlan(Option<u16>),
    Net(Side, IpAddr, u8),
    Port(Side, Option<u8>, RangeInclusive<u16>),
    Mac(Side, [u8; 6]),
    AtMost(usize),
    AtLeast(usize),
}

/// What is wrong with an expression, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("filter, at {at}: expected {expected}, found {found}; docs/day-two.md has the words")]
pub struct FilterError {
    /// The word's number, counted from 1.
    pub at: usize,
    /// What could have stood there.
    pub expected: String,
    /// What stood there.
    pub found: String,
}

struct Parser<'t> {
    words: Vec<&'t str>,
    at: usize,
    primitives: usize,
}

impl Filter {
    /// Reads an expression.
    ///
    /// # Errors
    /// The first word that does not fit.
    pub fn parse(text: &str) -> Result<Filter, FilterError> {
        let mut words = Vec::new();
        for piece in text.split_whitespace() {
            let mut rest = piece;
            while let Some(at) = rest.find(['(', ')', '!']) {
                words.extend((at > 0).then_some(&rest[..at]));
                words.push(&rest[at..=at]);
                rest = &rest[at + 1..];
            }
            words.extend((!rest.is_empty()).then_some(rest));
        }
        let mut parser = Parser { words, at: 0, primitives: 0 };
        let node = parser.any(0)?;
        match parser.peek() {
            None => Ok(Filter(node)),
            Some(_) => Err(parser.wrong("`and`, `or` or the end")),
        }
    }

    /// Whether a frame of `len` bytes that begins with `head` is one of those.
    pub fn matches(&self, head: &[u8], len: usize) -> bool {
        self.0.holds(&Frame::of(head, len))
    }
}

impl<'t> Parser<'t> {
    fn peek(&self) -> Option<&'t str> {
        self.words.get(self.at).copied()
    }

    fn next(&mut self) -> Option<&'t str> {
        let word = self.peek();
        self.at += 1;
        word
    }

    fn wrong(&self, expected: &str) -> FilterError {
        let found = self.peek().map_or_else(|| "the end".into(), |word| format!("{word:?}"));
        FilterError { at: self.at + 1, expected: expected.into(), found }
    }

    fn takes(&mut self, words: &[&str]) -> bool {
        let is = self.peek().is_some_and(|word| words.contains(&word));
        self.at += usize::from(is);
        is
    }

    fn any(&mut self, depth: usize) -> Result<Node, FilterError> {
        let mut nodes = vec![self.all(depth)?];
        while self.takes(&["or", "||"]) {
            nodes.push(self.all(depth)?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::Any(nodes) })
    }

    fn all(&mut self, depth: usize) -> Result<Node, FilterError> {
        let mut nodes = vec![self.term(depth)?];
        while self.takes(&["and", "&&"]) {
            nodes.push(self.term(depth)?);
        }
        Ok(if nodes.len() == 1 { nodes.remove(0) } else { Node::All(nodes) })
    }

    fn term(&mut self, depth: usize) -> Result<Node, FilterError> {
        if depth > MAX_DEPTH {
            return Err(self.wrong(&format!("at most {MAX_DEPTH} parentheses and negations within each other")));
        }
        if self.takes(&["not", "!"]) {
            return Ok(Node::Not(Box::new(self.term(depth + 1)?)));
        }
        if self.takes(&["("]) {
            let node = self.any(depth + 1)?;
            return if self.takes(&[")"]) { Ok(node) } else { Err(self.wrong("`)`")) };
        }
        self.primitives += 1;
        if self.primitives > MAX_PRIMITIVES {
            return Err(self.wrong(&format!("at most {MAX_PRIMITIVES} primitives")));
        }
        Ok(Node::Is(self.primitive()?))
    }

    fn side(&mut self) -> Side {
        match self.peek() {
            Some("src") => self.at += 1,
            Some("dst") => {
                self.at += 1;
                return Side::Destination;
            }
            _ => return Side::Either,
        }
        Side::Source
    }

    /// The next word as what `read` makes of it.
    fn value<T>(&mut self, expected: &str, read: impl FnOnce(&str) -> Option<T>) -> Result<T, FilterError> {
        let value = self.peek().and_then(read).ok_or_else(|| self.wrong(expected))?;
        self.at += 1;
        Ok(value)
    }

    fn primitive(&mut self) -> Result<Primitive, FilterError> {
        const WORDS: &str = "a primitive, such as tcp, arp, host ADDRESS, net ADDRESS/BITS, port N or ether host MAC";
        let at = self.at;
        let word = self.next();
        let both = |v4, v6| Primitive::Protocol { v4: Some(v4), v6: Some(v6) };
        Ok(match word {
            Some("arp") => Primitive::EtherType(ETHERTYPE_ARP),
            Some("ip") => Primitive::EtherType(ETHERTYPE_IP),
            Some("ip6") => Primitive::EtherType(ETHERTYPE_IP6),
            Some("icmp") => Primitive::Protocol { v4: Some(ICMP), v6: None },
            Some("igmp") => Primitive::Protocol { v4: Some(IGMP), v6: None },
            Some("icmp6") => Primitive::Protocol { v4: None, v6: Some(ICMP6) },
            Some("tcp") if self.is_port() => self.port(Some(TCP))?,
            Some("udp") if self.is_port() => self.port(Some(UDP))?,
            Some("tcp") => both(TCP, TCP),
            Some("udp") => both(UDP, UDP),
            Some("broadcast") => Primitive::Broadcast,
            Some("multicast") => Primitive::Multicast,
            Some("vlan") => {
                let id = self.peek().and_then(|word| word.parse().ok()).filter(|id| *id < 4096);
                self.at += usize::from(id.is_some());
                Primitive::Vlan(id)
            }
            Some("less") => Primitive::AtMost(self.value("a number of bytes", |w| w.parse().ok())?),
            Some("greater") => Primitive::AtLeast(self.value("a number of bytes", |w| w.parse().ok())?),
            Some("ether") if self.takes(&["proto"]) => {
                Primitive::EtherType(self.value("an EtherType such as 0x88b5, arp, ip or ip6", ether_type)?)
            }
            Some("ether") => {
                let side = self.side();
                self.takes(&["host"]);
                Primitive::Mac(side, self.value("a MAC address such as 02:00:00:00:00:01", mac)?)
            }
            Some("src" | "dst" | "host" | "net" | "port" | "portrange") => {
                self.at = at;
                if self.is_port() {
                    return self.port(None);
                }
                let side = self.side();
                if self.takes(&["net"]) {
                    let (ip, bits) = self.value("a network such as 10.0.0.0/24 or fd00::/64", net)?;
                    return Ok(Primitive::Net(side, ip, bits));
                }
                self.takes(&["host"]);
                let ip: IpAddr = self.value("an address such as 10.0.0.1 or fd00::1", |w| w.parse().ok())?;
                Primitive::Net(side, ip, if ip.is_ipv4() { 32 } else { 128 })
            }
            _ => {
                self.at = at;
                return Err(self.wrong(WORDS));
            }
        })
    }

    /// Whether `port` or `portrange` comes next, after `src` or `dst`.
    fn is_port(&self) -> bool {
        let sided = matches!(self.peek(), Some("src" | "dst"));
        matches!(self.words.get(self.at + usize::from(sided)), Some(&("port" | "portrange")))
    }

    fn port(&mut self, protocol: Option<u8>) -> Result<Primitive, FilterError> {
        let side = self.side();
        let range = match self.next() {
            Some("portrange") => self.value("a range of ports such as 8000-8010", |w| {
                let (from, to) = w.split_once('-')?;
                let (from, to): (u16, u16) = (from.parse().ok()?, to.parse().ok()?);
                (from <= to).then_some(from..=to)
            })?,
            _ => {
                let port: u16 = self.value("a port from 0 to 65535", |w| w.parse().ok())?;
                port..=port
            }
        };
        Ok(Primitive::Port(side, protocol, range))
    }
}

fn ether_type(word: &str) -> Option<u16> {
    match word {
        "arp" => Some(ETHERTYPE_ARP),
        "ip" => Some(ETHERTYPE_IP),
        "ip6" => Some(ETHERTYPE_IP6),
        _ => word.strip_prefix("0x").map_or_else(|| word.parse().ok(), |hex| u16::from_str_radix(hex, 16).ok()),
    }
}

fn mac(word: &str) -> Option<[u8; 6]> {
    let mut out = [0; 6];
    let mut parts = word.split(':');
    for byte in &mut out {
        let part = parts.next().filter(|part| (1..=2).contains(&part.len()))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(out)
}

fn net(word: &str) -> Option<(IpAddr, u8)> {
    let (ip, bits) = word.split_once('/')?;
    let (ip, bits): (IpAddr, u8) = (ip.parse().ok()?, bits.parse().ok()?);
    (bits <= if ip.is_ipv4() { 32 } else { 128 }).then_some((ip, bits))
}

/// What of a frame is asked for.
struct Frame<'h> {
    head: &'h [u8],
    len: usize,
    vlan: Option<u16>,
    ether_type: u16,
    /// What follows the EtherType.
    body: &'h [u8],
}

impl<'h> Frame<'h> {
    fn of(head: &'h [u8], len: usize) -> Frame<'h> {
        let mut at = 12;
        let mut vlan = None;
        let word = |at: usize| Some(u16::from_be_bytes([*head.get(at)?, *head.get(at + 1)?]));
        let mut ether_type = word(at).unwrap_or(0);
        while ETHERTYPES_VLAN.contains(&ether_type) && at < 12 + 8 {
            // The outer tag is the one that is asked for.
            vlan = vlan.or(word(at + 2).map(|tag| tag & 0xfff));
            at += 4;
            ether_type = word(at).unwrap_or(0);
        }
        Frame { head, len, vlan, ether_type, body: head.get(at + 2..).unwrap_or(&[]) }
    }

    fn protocol(&self) -> Option<u8> {
        match self.ether_type {
            ETHERTYPE_IP => self.body.get(9).copied(),
            ETHERTYPE_IP6 => self.body.get(6).copied(),
            _ => None,
        }
    }

    /// Source and destination port of a packet that has them.
    fn ports(&self, wanted: Option<u8>) -> Option<(u16, u16)> {
        let protocol = self.protocol()?;
        let has = wanted.map_or(matches!(protocol, TCP | UDP | SCTP), |wanted| wanted == protocol);
        let start = match self.ether_type {
            _ if !has => return None,
            ETHERTYPE_IP => {
                let fragment = u16::from_be_bytes([*self.body.get(6)?, *self.body.get(7)?]);
                if fragment & FRAGMENT_OFFSET != 0 {
                    return None;
                }
                usize::from(self.body.first()? & 0xf) * 4
            }
            _ => 40,
        };
        let port = |at: usize| Some(u16::from_be_bytes([*self.body.get(at)?, *self.body.get(at + 1)?]));
        Some((port(start)?, port(start + 2)?))
    }

    /// Source and destination address: of IP, and of ARP.
    fn addresses(&self) -> Option<(IpAddr, IpAddr)> {
        let v4 = |at: usize| Some(IpAddr::V4(Ipv4Addr::from(*self.body.get(at..)?.first_chunk::<4>()?)));
        let v6 = |at: usize| Some(IpAddr::V6(Ipv6Addr::from(*self.body.get(at..)?.first_chunk::<16>()?)));
        match self.ether_type {
            ETHERTYPE_IP => Some((v4(12)?, v4(16)?)),
            ETHERTYPE_IP6 => Some((v6(8)?, v6(24)?)),
            ETHERTYPE_ARP | ETHERTYPE_RARP => Some((v4(14)?, v4(24)?)),
            _ => None,
        }
    }
}

fn within(ip: IpAddr, net: IpAddr, bits: u8) -> bool {
    match (ip, net) {
        (IpAddr::V4(ip), IpAddr::V4(net)) => (u32::from(ip) ^ u32::from(net)).leading_zeros() >= u32::from(bits),
        (IpAddr::V6(ip), IpAddr::V6(net)) => (u128::from(ip) ^ u128::from(net)).leading_zeros() >= u32::from(bits),
        _ => false,
    }
}

/// Whether that is so of the side or sides that are meant.
fn sided<T>(side: Side, (source, destination): (T, T), is: impl Fn(T) -> bool) -> bool {
    match side {
        Side::Source => is(source),
        Side::Destination => is(destination),
        Side::Either => is(source) || is(destination),
    }
}

impl Node {
    fn holds(&self, frame: &Frame<'_>) -> bool {
        match self {
            Node::All(nodes) => nodes.iter().all(|node| node.holds(frame)),
            Node::Any(nodes) => nodes.iter().any(|node| node.holds(frame)),
            Node::Not(node) => !node.holds(frame),
            Node::Is(primitive) => primitive.holds(frame),
        }
    }
}

impl Primitive {
    fn holds(&self, frame: &Frame<'_>) -> bool {
        match self {
            Primitive::EtherType(kind) => frame.ether_type == *kind,
            Primitive::Protocol { v4, v6 } => {
                let found = frame.protocol();
                match frame.ether_type {
                    ETHERTYPE_IP => v4.is_some() && found == *v4,
                    // A fragment says what is in it.
                    ETHERTYPE_IP6 if found == Some(FRAGMENT) => v6.is_some() && frame.body.get(40).copied() == *v6,
                    ETHERTYPE_IP6 => v6.is_some() && found == *v6,
                    _ => false,
                }
            }
            Primitive::Broadcast => frame.head.get(..6) == Some(&[0xff; 6]),
            Primitive::Multicast => frame.head.first().is_some_and(|byte| byte & 1 != 0),
            Primitive::Vlan(id) => frame.vlan.is_some_and(|found| id.is_none_or(|id| id == found)),
            Primitive::Net(side, net, bits) => {
                frame.addresses().is_some_and(|both| sided(*side, both, |ip| within(ip, *net, *bits)))
            }
            Primitive::Port(side, protocol, range) => {
                frame.ports(*protocol).is_some_and(|both| sided(*side, both, |port| range.contains(&port)))
            }
            Primitive::Mac(side, mac) => {
                let (destination, source) = (frame.head.get(..6), frame.head.get(6..12));
                sided(*side, (source, destination), |found| found == Some(&mac[..]))
            }
            Primitive::AtMost(bytes) => frame.len <= *bytes,
            Primitive::AtLeast(bytes) => frame.len >= *bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pcapng::{self, Direction, Packet};
    use std::os::unix::fs::MetadataExt;
    use std::process::{Command, Stdio};
    use tombolo_testing::Random;

    const EXPRESSIONS: [&str; 30] = [
        "arp",
        "ip",
        "ip6",
        "tcp",
        "udp",
        "icmp",
        "icmp6",
        "igmp",
        "broadcast",
        "multicast",
        "host 10.0.0.1",
        "src host 10.0.0.1",
        "dst host 10.0.0.2",
        "src 10.0.0.2",
        "host fd00::1",
        "dst fd00::2",
        "net 10.0.0.0/31",
        "src net 10.0.0.0/8",
        "dst net fd00::/127",
        "port 80",
        "src port 80",
        "dst port 53",
        "tcp port 80",
        "udp dst port 53",
        "portrange 50-80",
        "ether host 02:00:00:00:00:01",
        "ether src 2:0:0:0:0:2 and not arp",
        "ether proto 0x88b5",
        "less 70 or greater 100",
        "not (tcp or udp) && !arp and (net 10.0.0.0/8 or ip6)",
    ];

    /// A frame in which every field that is asked for has a value that is asked for, about every
    /// second time.
    fn frame(random: &mut Random) -> Vec<u8> {
        let mut pick = |of: &[&[u8]]| of[random.below(of.len() as u64) as usize].to_vec();
        let macs: [&[u8]; 4] = [&[2, 0, 0, 0, 0, 1], &[2, 0, 0, 0, 0, 2], &[0xff; 6], &[1, 0, 0x5e, 0, 0, 1]];
        let mut out = [pick(&macs), pick(&macs)].concat();
        let kind = pick(&[&[8, 0], &[8, 0], &[8, 6], &[0x86, 0xdd], &[0x88, 0xb5]]);
        out.extend(&kind);
        let v4: [&[u8]; 4] = [&[10, 0, 0, 1], &[10, 0, 0, 2], &[10, 9, 9, 9], &[192, 168, 0, 1]];
        let protocol = pick(&[&[TCP], &[UDP], &[ICMP], &[IGMP], &[ICMP6], &[SCTP], &[FRAGMENT]]);
        match kind[..] {
            [8, 0] => {
                let words = pick(&[&[0x45], &[0x46]]);
                let fragment = pick(&[&[0, 0], &[0x40, 0], &[0x20, 0], &[0, 9]]);
                out.extend([&words[..], &[0, 0, 60, 0, 0], &fragment, &[64], &protocol, &[0, 0]].concat());
                out.extend([pick(&v4), pick(&v4)].concat());
                out.resize(14 + usize::from(words[0] & 0xf) * 4, 0);
            }
            [8, 6] => {
                out.extend([vec![0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1], pick(&v4), vec![0; 6], pick(&v4)].concat())
            }
            [0x86, 0xdd] => {
                let ip = |last: u8| {
                    let mut ip = vec![0; 16];
                    (ip[0], ip[15]) = (0xfd, last);
                    ip
                };
                let (a, b) = (ip(pick(&[&[1], &[2], &[3]])[0]), ip(pick(&[&[1], &[2], &[3]])[0]));
                out.extend([vec![0x60, 0, 0, 0, 0, 20], protocol, vec![64], a, b].concat());
                out.extend(pick(&[&[], &[TCP, 0, 0, 0, 0, 0, 0, 1], &[UDP, 0, 0, 0, 0, 0, 0, 1]]));
            }
            _ => {}
        }
        let ports: [&[u8]; 4] = [&[0, 80], &[0, 53], &[0, 60], &[31, 144]];
        out.extend([pick(&ports), pick(&ports)].concat());
        out.resize(out.len() + random.below(60) as usize, 0);
        out
    }

    #[test]
    fn each_expression_means_what_it_means_to_tcpdump() {
        let found = Command::new("tcpdump").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if found.is_err() {
            return tombolo_testing::skip("tcpdump is not installed: ./x setup base");
        }
        let mut random = Random::seeded();
        let frames: Vec<_> = (0..3000).map(|_| frame(&mut random)).collect();
        let mut file = Vec::new();
        pcapng::section(&mut file, "test");
        pcapng::interface(&mut file, "a", 65535);
        for (n, bytes) in frames.iter().enumerate() {
            let direction = Direction::Received;
            let original_bytes = bytes.len() as u32;
            let time_ns = n as u64 * 1_000_000_000;
            pcapng::packet(&mut file, &Packet { interface: 0, time_ns, direction, bytes, original_bytes, comment: "" });
        }
        let path = std::env::temp_dir().join(format!("filter-{}.pcapng", std::process::id()));
        std::fs::write(&path, file).unwrap();
        for expression in EXPRESSIONS {
            let mut command = Command::new("tcpdump");
            command.args(["-n", "-tt", "-q", "-r"]).arg(&path);
            // As root it would become a user that may not be there.
            if std::fs::metadata("/proc/self").is_ok_and(|me| me.uid() == 0) {
                command.args(["-Z", "root"]);
            }
            let done = command.arg(expression).output().unwrap();
            assert!(done.status.success(), "{expression}: {}", String::from_utf8_lossy(&done.stderr));
            let text = String::from_utf8_lossy(&done.stdout);
            let stamp = |line: &str| line.split_once('.').and_then(|(second, _)| second.parse::<usize>().ok());
            let theirs: Vec<usize> = text.lines().filter_map(stamp).collect();
            let filter = Filter::parse(expression).unwrap();
            let is_taken = |n: &usize| filter.matches(&frames[*n], frames[*n].len());
            let ours: Vec<usize> = (0..frames.len()).filter(is_taken).collect();
            assert!(!ours.is_empty() && ours.len() < frames.len(), "{expression}: {}", ours.len());
            let differ = ours.iter().find(|n| !theirs.contains(n)).or(theirs.iter().find(|n| !ours.contains(n)));
            assert_eq!(differ, None, "{expression}: frame {:02x?}", differ.map(|n| &frames[*n]));
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_tag_is_looked_through() {
        let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x81, 0, 0x20, 7, 8, 0];
        bytes.extend([0x45, 0, 0, 40, 0, 0, 0, 0, 64, TCP, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, 0, 80, 1, 0]);
        let holds = |text: &str| Filter::parse(text).unwrap().matches(&bytes, bytes.len());
        assert!(holds("vlan") && holds("vlan 7 and tcp src port 80 and dst host 10.0.0.2"));
        assert!(!holds("vlan 8") && !holds("not vlan") && !holds("udp"));
        for cut in 0..bytes.len() {
            for expression in EXPRESSIONS {
                Filter::parse(expression).unwrap().matches(&bytes[..cut], cut);
            }
        }
    }

    #[test]
    fn a_word_that_does_not_fit_is_told_with_its_place() {
        for (text, at, expected) in [
            ("", 1, "a primitive"),
            ("tpc", 1, "a primitive"),
            ("tcp port", 3, "a port"),
            ("tcp port 70000", 3, "a port"),
            ("host 10.0.0", 2, "an address"),
            ("net 10.0.0.0", 2, "a network"),
            ("net 10.0.0.0/33", 2, "a network"),
            ("(tcp or udp", 5, "`)`"),
            ("tcp udp", 2, "`and`"),
            ("ether host 1:2", 3, "a MAC"),
            ("portrange 9-1", 2, "a range"),
        ] {
            let error = Filter::parse(text).unwrap_err();
            assert!(error.at == at && error.expected.starts_with(expected), "{text}: {error}");
        }
        let many = vec!["tcp"; MAX_PRIMITIVES].join(" or ");
        assert!(Filter::parse(&many).is_ok());
        assert!(Filter::parse(&format!("{many} or udp")).unwrap_err().expected.starts_with("at most 64"));
        assert!(Filter::parse(&"(".repeat(100_000)).unwrap_err().expected.starts_with("at most 32"));
    }
}
