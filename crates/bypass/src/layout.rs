//! What is in the maps, as bytes: the other side of ebpf/tables.h.
//!
//! Values are copied out of the kernel as byte arrays and taken apart here, so no pointer and no
//! `unsafe` is needed. The header asserts the sizes and offsets that are used here, and a map is
//! opened only if the kernel made it with these sizes.

use serde::Serialize;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes of `struct key4`.
pub const KEY4_BYTES: usize = 16;
/// Bytes of `struct key6`.
pub const KEY6_BYTES: usize = 44;
/// Bytes of `struct flow`.
pub const FLOW_BYTES: usize = 128;
/// Bytes of `struct flow6`, which begins with a `struct flow`.
pub const FLOW6_BYTES: usize = 160;
/// Bytes of `struct port`.
pub const PORT_BYTES: usize = 24;
/// Elements of `settings`, one `u64` each.
pub const SET_EPOCH: u32 = 0;
/// Up to which second of the monotonic clock events are wanted; 0: not at all.
pub const SET_TRACE: u32 = 1;
/// Up to which second of the monotonic clock frames are counted by flow; 0: not at all.
pub const SET_ACCOUNT: u32 = 2;
/// How long a flow holds before the kernel is asked again, in ns.
pub const SET_LEASE_NS: u32 = 3;
/// Length of the kernel's tick (a jiffy), in which conntrack counts its timeouts, in ns.
pub const SET_TICK_NS: u32 = 4;
/// The nonce in the options of frames that `detach` injects; 0: there are none.
pub const SET_RETRACK: u32 = 7;
/// Up to which second of the monotonic clock frames are captured; 0: not at all.
pub const SET_CAPTURE: u32 = 5;
/// Up to when one of the three may be wanted, in ns of the monotonic clock: what programs look at
/// for each frame.
pub const SET_OBSERVED_NS: u32 = 6;
/// Bytes of `struct usage`.
pub const USAGE_BYTES: usize = 40;
/// Bytes of `struct counters`.
pub const COUNTERS_BYTES: usize = 8 * (VERDICT_SLOTS + 6 + UNLEARNED_SLOTS + 2 + UNLEARNED_SLOTS + 1);
/// Bytes of `struct event`.
pub const EVENT_BYTES: usize = 72;
/// Bytes of `struct captured`, which a frame's bytes follow.
pub const CAPTURED_BYTES: usize = 32;
/// Bytes of `struct wanted`.
pub const WANTED_BYTES: usize = 88;
/// Bytes of `struct wish`.
pub const WISH_BYTES: usize = 40;
/// Most interfaces in one namespace.
pub const MAX_PORTS: u32 = 1024;
/// Most flows of one family.
pub const MAX_FLOWS: usize = 65536;
/// `enum protocol`: numbers of IP. The last one never occurs.
const PROTOCOLS: [u8; 4] = [17, 6, 1, 0];
const AF_INET: u8 = 2;
const VERDICT_SLOTS: usize = 32;
const UNLEARNED_SLOTS: usize = 8;

/// `enum verdict`: (name in reports, what it means). The first three are frames that were taken.
pub const VERDICTS: [(&str, &str); 26] = [
    ("taken_tcx", "redirected to the output's queue"),
    ("taken_peer", "redirected straight into the other end of a veth pair"),
    ("taken_xdp", "redirected before there was an sk_buff"),
    ("up_off", "the interface is not bypassed now, or the required controller is gone"),
    ("up_not_ours", "broadcast, multicast, or another's Ethernet address"),
    ("up_protocol", "neither IPv4 nor IPv6"),
    ("up_vlan", "a VLAN tag"),
    ("up_options", "IPv4 options or IPv6 extension headers"),
    ("up_fragment", "a fragment"),
    ("up_ttl", "its hop limit ends here"),
    ("up_transport", "neither TCP, UDP nor an ICMP echo"),
    ("up_malformed", "lengths or the header's checksum do not agree"),
    ("up_handshake", "SYN, FIN, RST or no ACK"),
    ("up_no_flow", "the kernel has not forwarded one like it yet, or not by an attached interface"),
    ("up_lease", "the flow's lease ended; the kernel is asked again"),
    ("up_changed", "routes, rules or settings have changed"),
    ("up_conntrack", "the connection's entry is gone or changed"),
    ("up_mtu", "too long for the output"),
    ("handed_partial", "by XDP to tcx: its checksum is not finished, or it has none, or may be a tunnel's"),
    (
        "handed_large",
        "by XDP to tcx: a segmentation frame or another that came as an sk_buff, or too long for the output",
    ),
    ("handed_output", "by XDP to tcx: an output that only tcx serves, or programs of others before ours there"),
    ("handed_capture", "by XDP to tcx: a process captures here"),
    ("up_failed", "the kernel had no room for the change"),
    ("up_fields", "TTL, DF, id, flow label or mark differ from those of the frame that the flow was learned from"),
    (
        "dropped_window",
        "a FIN or RST outside of the window of a connection that is taken, which conntrack calls invalid",
    ),
    ("up_decrypted", "it came out of IPsec, whose policy the kernel checks for each frame"),
];
/// How many of `VERDICTS` are frames that were taken.
pub const TAKEN: usize = 3;
/// Which of them XDP handed on to tcx: those frames are counted again, under what tcx did.
pub const HANDED: std::ops::Range<usize> = 18..22;
/// Of `HANDED`: unfinished checksums.
pub const HANDED_PARTIAL: usize = 18;
/// Of `HANDED`: segmentation frames.
pub const HANDED_LARGE: usize = 19;
/// Frames that were dropped: neither taken nor passed.
pub const DROPPED_WINDOW: usize = 24;
/// Frames whose flow is not known.
pub const NO_FLOW: usize = 13;
/// Frames that XDP sent out.
pub const TAKEN_XDP: usize = 2;

/// `enum unlearned`: why nothing was learned from a frame that the kernel forwarded.
pub const UNLEARNED: [(&str, &str); 8] = [
    ("altered", "the kernel altered more than a plain forward does"),
    ("not_established", "the TCP connection is not established both ways"),
    ("not_liberal", "the TCP connection's windows are still checked; the controller is asked"),
    ("not_plain_connection", "a helper, sequence adjustment or a zone, or a frame that conntrack calls invalid"),
    ("not_plain_route", "a tunnel, a port of a bridge or bond, or the output is not attached"),
    ("not_at_once", "it was held back, for example by NFQUEUE, or routes or rules changed while it waited"),
    ("not_kept", "TCP through conntrack, and no controller runs"),
    ("judged", "a firewall rule that judges each frame could apply to it, or changed rules were not read yet"),
];

/// Frames that come in at the interface may be taken.
pub const PORT_TAKE: u32 = 1;
/// Frames may go out straight into the veth's other end.
pub const PORT_PEER: u32 = 2;
/// The driver takes frames from XDP.
pub const PORT_XDP_OUT: u32 = 4;
/// A packet socket listens on it.
pub const PORT_CAPTURED: u32 = 8;

/// Most flows here are of one frame: one is learned with its second.
pub const PORT_TWICE: u32 = 16;

/// A process takes packets from NFQUEUE in this namespace.
pub const PORT_QUEUED: u32 = 32;

/// Others' tcx programs run before ours at the ingress: XDP would pass them by.
pub const PORT_PRECEDED: u32 = 64;

/// Which program takes frames at an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[repr(u32)]
pub enum Mode {
    /// At the tc ingress hook: frames keep their segmentation and checksum state.
    Tcx = 0,
    /// In the driver, before there is an sk_buff; what it does not take, tcx does.
    Xdp = 1,
}

impl Mode {
    /// "tcx" or "xdp", as reports spell it.
    pub fn word(self) -> &'static str {
        match self {
            Mode::Tcx => "tcx",
            Mode::Xdp => "xdp",
        }
    }

    fn from_word(word: u32) -> Mode {
        if word == 1 { Mode::Xdp } else { Mode::Tcx }
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// `struct port`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Which entry of the counters is its own.
    pub slot: u32,
    /// A set of the `PORT_*` bits.
    pub flags: u32,
    /// Which program takes frames.
    pub mode: Mode,
    /// The number of the reason for the mode.
    pub why: u32,
    /// Since when, on the monotonic clock.
    pub since_ns: u64,
}

impl Port {
    /// As in the map.
    pub fn to_bytes(self) -> [u8; PORT_BYTES] {
        let mut bytes = [0; PORT_BYTES];
        for (at, value) in [(0, self.slot), (4, self.flags), (8, self.mode as u32), (12, self.why)] {
            bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        bytes[16..].copy_from_slice(&self.since_ns.to_ne_bytes());
        bytes
    }

    /// Decodes an entry of the map.
    pub fn from_bytes(bytes: &[u8; PORT_BYTES]) -> Port {
        Port {
            slot: word(bytes, 0),
            flags: word(bytes, 4),
            mode: Mode::from_word(word(bytes, 8)),
            why: word(bytes, 12),
            since_ns: long(bytes, 16),
        }
    }
}

/// `struct counters`, summed over the CPUs; of times the latest. All are monotonic.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Indexed like `VERDICTS`.
    pub packets: [u64; VERDICTS.len()],
    /// Bytes of taken frames, summed over all paths.
    pub taken_bytes: u64,
    /// Segmentation frames among those taken.
    pub taken_large: u64,
    /// Frames that tcx took and XDP could have taken.
    pub taken_able: u64,
    /// Those that it could have, except for their unfinished checksums.
    pub taken_partial: u64,
    /// Flows learned, each renewal counted.
    pub learned: u64,
    /// Of those, how many with a shorter lease than the one set, since conntrack would have dropped
    /// the connection before its end.
    pub shortened: u64,
    /// Forwarded frames that nothing was learned from, by reason.
    pub unlearned: [u64; UNLEARNED.len()],
    /// Frames that captures asked for.
    pub captured: u64,
    /// Of those, how many found no room.
    pub capture_lost: u64,
    /// When each of `unlearned` was counted last, in ns of the monotonic clock; 0: never.
    pub unlearned_ns: [u64; UNLEARNED.len()],
    /// When `shortened` was counted last.
    pub shortened_ns: u64,
}

impl Counters {
    /// Adds the counters of one CPU.
    pub fn add(&mut self, bytes: &[u8; COUNTERS_BYTES]) {
        let at = |n: usize| long(bytes, 8 * n);
        for (n, sum) in self.packets.iter_mut().enumerate() {
            *sum += at(n);
        }
        self.taken_bytes += at(VERDICT_SLOTS);
        self.taken_large += at(VERDICT_SLOTS + 1);
        self.taken_able += at(VERDICT_SLOTS + 2);
        self.taken_partial += at(VERDICT_SLOTS + 3);
        self.learned += at(VERDICT_SLOTS + 4);
        self.shortened += at(VERDICT_SLOTS + 5);
        for (n, sum) in self.unlearned.iter_mut().enumerate() {
            *sum += at(VERDICT_SLOTS + 6 + n);
        }
        self.captured += at(VERDICT_SLOTS + 6 + UNLEARNED_SLOTS);
        self.capture_lost += at(VERDICT_SLOTS + 7 + UNLEARNED_SLOTS);
        for (n, last) in self.unlearned_ns.iter_mut().enumerate() {
            *last = at(VERDICT_SLOTS + 8 + UNLEARNED_SLOTS + n).max(*last);
        }
        self.shortened_ns = at(VERDICT_SLOTS + 8 + 2 * UNLEARNED_SLOTS).max(self.shortened_ns);
    }

    /// Packets that were taken, by whichever path.
    pub fn taken(&self) -> u64 {
        self.packets[..TAKEN].iter().sum()
    }

    /// Packets that went the kernel's way.
    pub fn passed(&self) -> u64 {
        let others = self.packets[HANDED].iter().sum::<u64>() + self.packets[DROPPED_WINDOW];
        self.packets[TAKEN..].iter().sum::<u64>() - others
    }
}

/// Where frames of a flow come in, from whom and to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Tuple {
    /// Number of the interface.
    pub input: u32,
    /// Of the frame as it comes in, before NAT.
    pub source: IpAddr,
    /// Source port; an echo's id.
    pub source_port: u16,
    /// Of the frame as it comes in, before NAT.
    pub destination: IpAddr,
    /// Destination port; an echo's type and code.
    pub destination_port: u16,
    /// IP protocol number.
    pub protocol: u8,
}

fn ports(bytes: &[u8], at: usize) -> (u16, u16) {
    let port = |at| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    (port(at), port(at + 2))
}

fn v4(bytes: &[u8], at: usize) -> IpAddr {
    let octets: [u8; 4] = bytes[at..at + 4].try_into().expect("four bytes");
    Ipv4Addr::from(octets).into()
}

fn v6(bytes: &[u8], at: usize) -> IpAddr {
    let octets: [u8; 16] = bytes[at..at + 16].try_into().expect("sixteen bytes");
    Ipv6Addr::from(octets).into()
}

impl Tuple {
    /// `struct key4`.
    pub fn from_key4(bytes: &[u8; KEY4_BYTES]) -> Tuple {
        let (source_port, destination_port) = ports(bytes, 12);
        Tuple {
            input: word(bytes, 0) >> 10,
            source: v4(bytes, 4),
            source_port,
            destination: v4(bytes, 8),
            destination_port,
            protocol: PROTOCOLS[word(bytes, 0) as usize & 3],
        }
    }

    /// The key of a usage, a `struct key6` with the address family in it.
    pub fn of_usage(bytes: &[u8; KEY6_BYTES]) -> Tuple {
        let family = u16::from_ne_bytes([bytes[42], bytes[43]]);
        Tuple::from_key6(bytes, family == u16::from(AF_INET))
    }

    /// `struct key6`; of an IPv4 frame the first word of each address counts.
    pub fn from_key6(bytes: &[u8], is_v4: bool) -> Tuple {
        let (source_port, destination_port) = ports(bytes, 36);
        let address = if is_v4 { v4 } else { v6 };
        Tuple {
            input: word(bytes, 0),
            source: address(bytes, 4),
            source_port,
            destination: address(bytes, 20),
            destination_port,
            protocol: bytes[40],
        }
    }
}

/// The parts of `struct flow` that people ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// When its lease ends, on the monotonic clock.
    pub until_ns: u64,
    /// Whether it belongs to a connection.
    pub tracked: bool,
    /// The epoch that it was learned in.
    pub epoch: u32,
    /// Number of the interface where it goes out.
    pub output: u32,
    /// The Ethernet address that it goes to.
    pub to: [u8; 6],
    /// When it was last used, to a sixteenth of a lease.
    pub used_ns: u64,
    /// How far TCP's sequence numbers have come, if conntrack tracks it.
    pub progress: Option<Progress>,
}

/// The sequence numbers of one direction of a TCP connection, as far as frames of one flow tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The address of the conntrack entry, which identifies the connection.
    pub conn: u64,
    /// Whether it is the direction of the answers.
    pub is_reply: bool,
    /// Whether the numbers are in step with the kernel's or with the other direction's.
    pub is_sure: bool,
    /// Whether a FIN or RST passed.
    pub is_ending: bool,
    /// The highest sequence number sent, behind its data.
    pub end: u32,
    /// The highest acknowledgement sent.
    pub ack: u32,
    /// The window in the last frame, as in the header.
    pub window: u16,
    /// By how many bits windows of this direction are shifted (RFC 7323 section 2.2).
    pub scale: u8,
}

impl Flow {
    /// Reads a flow from either map, at this moment of the monotonic clock. The additional fields
    /// of IPv6 come last.
    ///
    /// # Panics
    /// With fewer than `FLOW_BYTES`.
    pub fn from_bytes(bytes: &[u8], now_ns: u64) -> Flow {
        const USED_SHIFT: u32 = 20;
        const TRACKED: u8 = 1;
        const SURE: u8 = 2;
        const ENDING: u8 = 4;
        // It may be a little later than now. It wraps, so only the difference says when.
        let unused = ((now_ns >> USED_SHIFT) as u32).wrapping_sub(word(bytes, 108)) as i32;
        let unused_ns = (unused.max(0) as u64) << USED_SHIFT;
        let sequence = bytes[63];
        Flow {
            until_ns: long(bytes, 0),
            tracked: long(bytes, 16) != 0,
            epoch: word(bytes, 32),
            output: word(bytes, 36),
            to: bytes[88..94].try_into().expect("six bytes"),
            used_ns: now_ns.saturating_sub(unused_ns),
            progress: (sequence & TRACKED != 0).then(|| Progress {
                conn: long(bytes, 16),
                is_reply: bytes[61] != 0,
                is_sure: sequence & SURE != 0,
                is_ending: sequence & ENDING != 0,
                end: word(bytes, 112),
                ack: word(bytes, 116),
                window: u16::from_ne_bytes([bytes[106], bytes[107]]),
                scale: bytes[62],
            }),
        }
    }
}

/// What passed of one flow while `flows` measured: `struct usage`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Frames that were taken.
    pub taken: u64,
    /// Their bytes, from the Ethernet header on.
    pub taken_bytes: u64,
    /// Frames that took the kernel's path.
    pub passed: u64,
    /// Bytes of the frames in `passed`.
    pub passed_bytes: u64,
    /// Number of the interface where it goes out; 0: not known.
    pub output: u32,
    /// `VERDICTS`: of the last frame that was taken.
    pub taken_by: Option<usize>,
    /// `VERDICTS`: of the last frame that took the kernel's path.
    pub passed_for: Option<usize>,
    /// `UNLEARNED`: why the last frame that the kernel forwarded was not learned.
    pub refused: Option<usize>,
}

impl Usage {
    /// From an entry of the map.
    pub fn from_bytes(bytes: &[u8; USAGE_BYTES]) -> Usage {
        let code = |at: usize| usize::from(bytes[at]).checked_sub(1);
        Usage {
            taken: long(bytes, 0),
            taken_bytes: long(bytes, 8),
            passed: long(bytes, 16),
            passed_bytes: long(bytes, 24),
            output: word(bytes, 32),
            taken_by: code(36),
            passed_for: code(37),
            refused: code(38),
        }
    }
}

/// What a trace tells of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When, on the monotonic clock.
    pub at_ns: u64,
    /// Addresses, ports and protocol of the flow.
    pub tuple: Tuple,
    /// Number of the interface where it goes out; 0: not known.
    pub output: u32,
    /// Bytes of the IP packet.
    pub length: u32,
    /// What happened: a key, and what it means.
    pub what: (&'static str, &'static str),
}

impl Event {
    /// From the ring; nothing for a kind that is not known.
    pub fn from_bytes(bytes: &[u8]) -> Option<Event> {
        let bytes: &[u8; EVENT_BYTES] = bytes.try_into().ok()?;
        let code = usize::from(bytes[62]);
        let what = match bytes[61] {
            0 => *VERDICTS.get(code)?,
            1 => ("learned", "the kernel forwarded it; the next ones are taken"),
            2 => *UNLEARNED.get(code)?,
            _ => return None,
        };
        Some(Event {
            at_ns: long(bytes, 0),
            tuple: Tuple::from_key6(&bytes[8..52], bytes[60] == AF_INET),
            output: word(bytes, 52),
            length: word(bytes, 56),
            what,
        })
    }
}

/// Where a frame was captured: `enum point`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// At ingress, before any rewriting.
    In,
    /// As it goes out, after it was taken.
    Out,
    /// As the kernel sends it: forwarded, or the host's own.
    Kernel,
    /// As it came in; if the same CPU captured it just before as one that is taken, it was not.
    Failed,
}

/// What a captured frame is: `struct captured`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Captured {
    /// When, on the monotonic clock.
    pub at_ns: u64,
    /// Number of the interface where it came in or goes out.
    pub interface: u32,
    /// The other one of the two; 0: not known, or the host itself.
    pub other: u32,
    /// Bytes of the frame.
    pub length: u32,
    /// Bytes that were kept.
    pub kept: u32,
    /// Bytes of payload of each packet of a segmentation frame.
    pub segment: Option<u16>,
    /// The VLAN tag's control information, which is kept beside the frame.
    pub tag: Option<u16>,
    /// Where it was seen.
    pub point: Point,
    /// What became of it: a key of `VERDICTS`, and what it means. Nothing of what the kernel sends.
    pub what: Option<(&'static str, &'static str)>,
}

impl Captured {
    /// From a perf buffer: the record, and the frame's bytes. Nothing for what is not known.
    pub fn from_bytes(bytes: &[u8]) -> Option<(Captured, &[u8])> {
        let (record, frame) = bytes.split_at_checked(CAPTURED_BYTES)?;
        let half = |at: usize| u16::from_ne_bytes([record[at], record[at + 1]]);
        let point = match record[29] {
            0 => Point::In,
            1 => Point::Out,
            2 => Point::Kernel,
            3 => Point::Failed,
            _ => return None,
        };
        let what = match point {
            Point::Kernel => None,
            _ => Some(*VERDICTS.get(usize::from(record[30]))?),
        };
        let captured = Captured {
            at_ns: long(record, 0),
            interface: word(record, 8),
            other: word(record, 12),
            length: word(record, 16),
            kept: word(record, 20),
            segment: (half(24) != 0).then(|| half(24)),
            tag: (record[28] != 0).then(|| half(26)),
            point,
            what,
        };
        // Behind it the kernel fills up to a whole word.
        Some((captured, frame.get(..captured.kept as usize)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let port = Port { slot: 3, flags: PORT_TAKE | PORT_PEER, mode: Mode::Xdp, why: 2, since_ns: 1 << 40 };
        assert_eq!(Port::from_bytes(&port.to_bytes()), port);
    }

    #[test]
    fn a_key_is_a_tuple_in_the_wires_byte_order() {
        let mut key = [0; KEY4_BYTES];
        key[..4].copy_from_slice(&(5u32 << 10 | 46 << 2 | 1).to_ne_bytes());
        key[4..12].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        key[12..].copy_from_slice(&[0x30, 0x39, 0, 80]);
        let tuple = Tuple::from_key4(&key);
        assert_eq!((tuple.input, tuple.source_port, tuple.destination_port, tuple.protocol), (5, 12345, 80, 6));
        assert_eq!(tuple.source.to_string(), "10.0.0.1");
    }

    #[test]
    fn a_usage_says_how_many_frames_went_which_way_and_why() {
        let mut bytes = [0; USAGE_BYTES];
        for (n, count) in [3u64, 300, 4, 400].into_iter().enumerate() {
            bytes[8 * n..8 * n + 8].copy_from_slice(&count.to_ne_bytes());
        }
        bytes[32..36].copy_from_slice(&7u32.to_ne_bytes());
        bytes[36..39].copy_from_slice(&[3, 14, 0]);
        let usage = Usage::from_bytes(&bytes);
        assert_eq!((usage.taken, usage.taken_bytes, usage.passed, usage.passed_bytes), (3, 300, 4, 400));
        assert_eq!((usage.output, usage.taken_by, usage.passed_for, usage.refused), (7, Some(2), Some(13), None));
    }

    #[test]
    fn the_key_of_a_usage_says_its_family() {
        let mut key = [0; KEY6_BYTES];
        key[4..8].copy_from_slice(&[10, 0, 0, 1]);
        key[42..].copy_from_slice(&2u16.to_ne_bytes());
        assert_eq!(Tuple::of_usage(&key).source.to_string(), "10.0.0.1");
        key[42..].copy_from_slice(&10u16.to_ne_bytes());
        assert_eq!(Tuple::of_usage(&key).source.to_string(), "a00:1::");
    }

    #[test]
    fn a_captured_frame_is_its_record_and_its_bytes() {
        let mut bytes = vec![0; CAPTURED_BYTES];
        bytes[..8].copy_from_slice(&7u64.to_ne_bytes());
        for (at, value) in [(8, 3u32), (12, 4), (16, 60), (20, 5)] {
            bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        bytes[24..26].copy_from_slice(&1448u16.to_ne_bytes());
        bytes[26..29].copy_from_slice(&[9, 0, 1]);
        bytes[29..31].copy_from_slice(&[1, 2]);
        bytes.extend([1, 2, 3, 4, 5, 0, 0, 0]);
        let (captured, frame) = Captured::from_bytes(&bytes).unwrap();
        assert_eq!((captured.at_ns, captured.interface, captured.other, captured.length), (7, 3, 4, 60));
        assert_eq!((captured.segment, captured.tag), (Some(1448), Some(9)));
        assert_eq!((captured.point, captured.what.unwrap().0), (Point::Out, "taken_xdp"));
        assert_eq!(frame, [1, 2, 3, 4, 5]);
        for length in 0..CAPTURED_BYTES + 5 {
            assert_eq!(Captured::from_bytes(&bytes[..length]), None, "{length} bytes");
        }
        bytes[29] = 4;
        assert_eq!(Captured::from_bytes(&bytes), None);
    }

    #[test]
    fn counters_of_cpus_are_summed() {
        let mut bytes = [0; COUNTERS_BYTES];
        bytes[0] = 2;
        bytes[8 * 13] = 3;
        bytes[8 * VERDICT_SLOTS] = 4;
        let last = COUNTERS_BYTES - 8;
        bytes[last] = 5;
        let mut sum = Counters::default();
        sum.add(&bytes);
        bytes[last] = 4;
        sum.add(&bytes);
        assert_eq!((sum.taken(), sum.passed(), sum.taken_bytes, sum.shortened_ns), (4, 6, 8, 5));
    }
}
