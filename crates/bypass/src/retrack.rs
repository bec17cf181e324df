//! Has conntrack check the windows of TCP connections again, once their frames take the kernel's path for good.
//!
//! While a connection is taken, conntrack sees one frame per lease, so it is told not to check windows ("liberal"). At `detach` its
//! numbers are far behind, and no request of ctnetlink sets them. But conntrack has a way of its own to get in step with a connection
//! that it has lost: if it sees a SYN, then a SYN-ACK that acknowledges it, it takes both ends' numbers, scales and
//! flags from these two (`nf_conntrack_tcp_packet`, the case `TCP_CONNTRACK_IGNORE`). So these two frames, and an acknowledgement from either end, come in
//! at the connection's interfaces, with the numbers that its flows have noted. The program `inject` puts them there. They
//! pass conntrack and the rules, and the egress program drops them by a nonce in their options, so no end ever sees one.
//!
//! # Frames in between
//! Numbers that were read just before are wrong if a frame passes before conntrack has the new ones. So conntrack checks no window in this
//! namespace while this goes on (`nf_conntrack_tcp_be_liberal`; the owner record says so, so that whoever comes after a kill sets it back, and no
//! flow is learned meanwhile). The numbers are read again afterwards. If they have changed, it is done again, with room for what
//! passes meanwhile. Room that a connection does not use up at once would make conntrack refuse its right RST, so then it is done a third
//! time, without.
//!
//! # What stays liberal
//! Connections without window scaling: conntrack picks up connections without a handshake in the same state, and knows no scale of these.
//! Those of which not both directions are known for sure, and those that have begun to end. Those whose
//! injected frames a rule before conntrack drops. Where it cannot be done for a connection, it is liberal again, as before.
//!
//! A kill in the midst leaves an entry that the connection's next frame completes; if there is none for a minute, the entry expires.

use crate::conntrack::{BE_LIBERAL, Conntrack, ESTABLISHED, Entry, UNACKNOWLEDGED, Update, WINDOW_SCALE};
use crate::layout::{Flow, Tuple};
use crate::maps::{FlowKey, Maps};
use crate::settle::{self, Standing, is_before};
use aya::TestRun;
use aya::programs::{SchedClassifier, TestRunOptions};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// For how long all connections together are worked on.
const LONGEST: Duration = Duration::from_secs(3);
/// How often one is tried.
const TRIES: usize = 8;
/// For how long a connection in motion may take to use up the room that it was given.
const MOVES_ON: Duration = Duration::from_millis(100);
/// What a connection in motion may send between two looks at it, in bytes: 20 µs at 100 Gbit/s.
const ROOM: u32 = 256 << 10;
/// The least window that such a connection is given, in bytes.
const WIDE: u32 = 2 * ROOM;

const SYN: u8 = 0x02;
const ACK: u8 = 0x10;
/// Kind and length of the option with the nonce: ebpf/bypass.bpf.c, `RETRACK_OPTION`.
const NONCE_OPTION: [u8; 2] = [253, 10];
const ETHERNET: usize = 14;
const TCP: usize = 20;

/// Whether conntrack checks no window of any connection in this namespace.
const LENIENT: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal";

pub(crate) fn is_lenient() -> bool {
    std::fs::read_to_string(LENIENT).is_ok_and(|text| text.trim() != "0")
}

pub(crate) fn set_lenient(on: bool) -> std::io::Result<()> {
    std::fs::write(LENIENT, if on { "1" } else { "0" })
}

/// Keeps the thread on the CPU that it is on: each CPU has a queue of its own for frames that come in, and these are to come in in order.
struct OnOneCpu(Option<CpuSet>);

impl OnOneCpu {
    fn new() -> OnOneCpu {
        let Ok(before) = sched_getaffinity(None) else { return OnOneCpu(None) };
        let mut one = CpuSet::new();
        one.set(sched_getcpu());
        OnOneCpu(sched_setaffinity(None, &one).is_ok().then_some(before))
    }
}

impl Drop for OnOneCpu {
    fn drop(&mut self) {
        if let Some(before) = &self.0 {
            let _ = sched_setaffinity(None, before);
        }
    }
}

/// One direction of a connection.
struct Side {
    tuple: Tuple,
    mac: [u8; 6],
    keys: Vec<FlowKey>,
}

/// How far a direction has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Numbers {
    end: u32,
    window: u16,
    scale: u8,
}

impl Numbers {
    fn of(side: &Side, maps: &Maps) -> Option<Numbers> {
        let mut best: Option<(Numbers, u32)> = None;
        for p in side.keys.iter().filter_map(|key| maps.flow(key)?.progress) {
            let (n, ack) = best.get_or_insert((Numbers { end: p.end, window: p.window, scale: p.scale }, p.ack));
            n.end = if is_before(n.end, p.end) { p.end } else { n.end };
            if is_before(*ack, p.ack) {
                (*ack, n.window) = (p.ack, p.window);
            }
        }
        best.map(|b| b.0)
    }

    /// With room for what is sent meanwhile.
    fn with_room(self) -> Numbers {
        let widest = u32::from(u16::MAX) << self.scale;
        let window = self.window.max((WIDE.min(widest) >> self.scale) as u16);
        Numbers { end: self.end.wrapping_add(ROOM.min(widest / 2)), window, ..self }
    }
}

/// Injects frames, and has the egress programs know them, as long as it lives.
struct Injector<'a> {
    maps: &'a mut Maps,
    program: SchedClassifier,
    nonce: [u8; 8],
}

impl<'a> Injector<'a> {
    fn open(maps: &'a mut Maps, program: SchedClassifier) -> Option<Injector<'a>> {
        let mut nonce = [0; 8];
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty()).ok()?;
        // Zero means none.
        nonce[0] |= 1;
        maps.set_retrack(u64::from_ne_bytes(nonce)).ok()?;
        Some(Injector { maps, program, nonce })
    }

    /// Has the kernel receive the connection's frames; says whether it did.
    fn shake_hands(&self, sides: [&Side; 2], numbers: [Numbers; 2], has_sack: bool) -> bool {
        let [a, b] = numbers;
        let syn = |n: Numbers, flags, ack| Segment {
            flags,
            seq: n.end.wrapping_sub(1),
            ack,
            window: n.window,
            scale: Some(n.scale),
            has_sack,
        };
        let plain =
            |n: Numbers, ack| Segment { flags: ACK, seq: n.end, ack, window: n.window, scale: None, has_sack: false };
        // The one by which the entry is established again comes last, so that what it says is known with that.
        let segments = [(0, syn(a, SYN, 0)), (1, syn(b, SYN | ACK, a.end)), (1, plain(b, a.end)), (0, plain(a, b.end))];
        segments.iter().all(|(side, segment)| {
            let frame = segment.frame(sides[*side], self.nonce);
            let run =
                self.program.test_run(TestRunOptions { data_in: Some(&frame), repeat: 1, ..TestRunOptions::new() });
            run.is_ok_and(|run| run.return_value == 0)
        })
    }
}

impl Drop for Injector<'_> {
    fn drop(&mut self) {
        // What is left set costs the egress program a comparison.
        let _ = self.maps.set_retrack(0);
    }
}

/// One frame of the handshake.
struct Segment {
    flags: u8,
    seq: u32,
    ack: u32,
    window: u16,
    /// Of a SYN: the options of RFC 7323 and, with `has_sack`, RFC 2018.
    scale: Option<u8>,
    has_sack: bool,
}

impl Segment {
    /// As it would come in at that side's interface, whose number is in the source address for the program `inject`.
    fn frame(&self, side: &Side, nonce: [u8; 8]) -> Vec<u8> {
        let mut options = NONCE_OPTION.to_vec();
        options.extend(nonce);
        options.extend([1, 1]);
        if let Some(scale) = self.scale {
            options.extend([1, 3, 3, scale]);
            if self.has_sack {
                options.extend([1, 1, 4, 2]);
            }
        }
        let length = (TCP + options.len()) as u16;
        let mut tcp = vec![];
        tcp.extend(side.tuple.source_port.to_be_bytes());
        tcp.extend(side.tuple.destination_port.to_be_bytes());
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        tcp.extend([(length as u8 / 4) << 4, self.flags]);
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0; 4]);
        tcp.extend(options);
        let (source, destination) = (settle::octets(side.tuple.source), settle::octets(side.tuple.destination));
        let mut pseudo = [source.clone(), destination.clone()].concat();
        pseudo.extend([0, 6]);
        pseudo.extend(length.to_be_bytes());
        let sum = checksum(&[&pseudo[..], &tcp[..]].concat());
        tcp[16..18].copy_from_slice(&sum.to_be_bytes());
        let mut frame = Vec::with_capacity(ETHERNET + 40 + tcp.len());
        frame.extend(side.mac);
        frame.extend([2, 0]);
        frame.extend(side.tuple.input.to_be_bytes());
        match side.tuple.source {
            IpAddr::V4(_) => {
                frame.extend([0x08, 0x00]);
                let mut ip = vec![0x45, 0];
                ip.extend((20 + length).to_be_bytes());
                ip.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
                ip.extend(source);
                ip.extend(destination);
                let sum = checksum(&ip);
                ip[10..12].copy_from_slice(&sum.to_be_bytes());
                frame.extend(ip);
            }
            IpAddr::V6(_) => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                frame.extend(length.to_be_bytes());
                frame.extend([6, 64]);
                frame.extend(source);
                frame.extend(destination);
            }
        }
        frame.extend(tcp);
        frame
    }
}

/// The Internet checksum (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(*two.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// The two directions of each connection, as its frames come in.
fn sides(
    flows: &[(FlowKey, Tuple, Flow)],
    standings: &[Standing],
    macs: &HashMap<u32, [u8; 6]>,
) -> HashMap<u64, [Side; 2]> {
    let mut found: HashMap<u64, [Option<Side>; 2]> = standings.iter().map(|s| (s.conn, [None, None])).collect();
    for (key, tuple, flow) in flows {
        let Some(p) = flow.progress.filter(|p| p.is_sure && !p.is_ending) else { continue };
        let (Some(both), Some(mac)) = (found.get_mut(&p.conn), macs.get(&tuple.input)) else { continue };
        let side = both[usize::from(p.is_reply)].get_or_insert(Side { tuple: *tuple, mac: *mac, keys: vec![] });
        side.keys.push(*key);
    }
    found.into_iter().filter_map(|(conn, [a, b])| Some((conn, [a?, b?]))).collect()
}

fn is_liberal(entry: &Entry) -> bool {
    entry.flags.iter().any(|f| f & BE_LIBERAL != 0)
}

/// Has the windows of these connections checked again; gives how many stay as they are. Nothing is taken any more, and the programs are
/// still there. `macs` has the Ethernet address of each interface.
pub(crate) fn retrack(
    maps: &mut Maps,
    program: SchedClassifier,
    conntrack: &Conntrack,
    flows: &[(FlowKey, Tuple, Flow)],
    macs: &HashMap<u32, [u8; 6]>,
) -> usize {
    let plain: Vec<_> = flows.iter().map(|(_, tuple, flow)| (*tuple, *flow)).collect();
    let standings = settle::standings(&plain);
    let sides = sides(flows, &standings, macs);
    let end = Instant::now() + LONGEST;
    let _on_one_cpu = OnOneCpu::new();
    let mut left = 0;
    let mut injector = None;
    let mut parts = Some((maps, program));
    for standing in &standings {
        let Ok(Some(entry)) = conntrack.entry(&standing.connection) else { continue };
        // A connection that is liberal by the sysctl has no such flag, and is none of ours.
        if entry.state != ESTABLISHED || !is_liberal(&entry) {
            continue;
        }
        if let Some((maps, program)) = parts.take() {
            injector = Injector::open(maps, program);
        }
        let is_done = match (&injector, sides.get(&standing.conn)) {
            (Some(injector), Some([a, b])) if entry.flags.iter().all(|f| f & WINDOW_SCALE != 0) => {
                Instant::now() < end && one(injector, conntrack, standing, [a, b], entry)
            }
            _ => false,
        };
        left += usize::from(!is_done);
    }
    left
}

/// The same for one connection; says whether.
fn one(injector: &Injector, conntrack: &Conntrack, standing: &Standing, sides: [&Side; 2], entry: Entry) -> bool {
    let numbers = || Some([Numbers::of(sides[0], injector.maps)?, Numbers::of(sides[1], injector.maps)?]);
    let mut moves = [false; 2];
    for _ in 0..TRIES {
        let Some(before) = numbers() else { break };
        let given = [0, 1].map(|n| if moves[n] { before[n].with_room() } else { before[n] });
        if !injector.shake_hands(sides, given, entry.has_sack()) {
            break;
        }
        let now = conntrack.entry(&standing.connection);
        // What conntrack takes from a SYN has no such flag; from Linux 5.18 on that of the other direction stays.
        if !now.is_ok_and(|now| now.is_some_and(|now| now.state == ESTABLISHED && now.flags[0] & BE_LIBERAL == 0)) {
            // A real frame came between two of ours, or a rule before conntrack dropped them.
            continue;
        }
        let until = Instant::now() + MOVES_ON;
        let is_used_up = loop {
            let Some(after) = numbers() else { break false };
            if (0..2).all(|n| !is_before(after[n].end, given[n].end)) {
                let passed = [0, 1].map(|n| after[n].end != before[n].end);
                // Where room was given, what came meanwhile is within; else nothing may have come.
                break (0..2).all(|n| moves[n] || !passed[n]) || {
                    moves = passed;
                    false
                };
            }
            if Instant::now() >= until {
                moves = [false; 2];
                break false;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        if is_used_up {
            // All of it was acknowledged, as conntrack sees it now.
            let flags = Some((entry.flags.map(|f| f & UNACKNOWLEDGED), UNACKNOWLEDGED | BE_LIBERAL));
            let update = Update { flags, state: None, timeout_s: Some(entry.timeout_s) };
            if conntrack.update(&standing.connection, update).is_ok() {
                return true;
            }
            break;
        }
    }
    let _ = conntrack.update(&standing.connection, Update::LIBERAL);
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(source: &str, destination: &str) -> Side {
        let tuple = Tuple {
            input: 0x0102_0304,
            source: source.parse().unwrap(),
            source_port: 0x1234,
            destination: destination.parse().unwrap(),
            destination_port: 80,
            protocol: 6,
        };
        Side { tuple, mac: [2, 9, 9, 9, 9, 9], keys: vec![] }
    }

    fn sum_of(parts: &[&[u8]]) -> u16 {
        checksum(&parts.concat())
    }

    #[test]
    fn frames_are_whole_and_carry_the_nonce_where_the_program_looks_for_it() {
        for (side, header) in [(side("10.0.0.1", "10.0.0.2"), 20), (side("fd00::1", "fd00::2"), 40)] {
            for (scale, has_sack, options) in [(Some(7), true, 20), (Some(0), false, 16), (None, false, 12)] {
                let flags = if scale.is_some() { SYN } else { ACK };
                let segment = Segment { flags, seq: 0xfffffff0, ack: 7, window: 502, scale, has_sack };
                let frame = segment.frame(&side, *b"nonce-8b");
                assert_eq!(&frame[..12], &[2, 9, 9, 9, 9, 9, 2, 0, 1, 2, 3, 4]);
                let (ip, tcp) = frame[ETHERNET..].split_at(header);
                assert_eq!(tcp.len(), TCP + options);
                assert_eq!((tcp[12] >> 4) as usize * 4, tcp.len());
                assert_eq!(&tcp[20..30], b"\xfd\x0anonce-8b");
                // Sums over what has its own checksum in it give zero.
                let addresses = &ip[header - if header == 20 { 8 } else { 32 }..];
                assert_eq!(sum_of(&[addresses, &[0, 6, 0, tcp.len() as u8], tcp]), 0);
                if header == 20 {
                    assert_eq!(sum_of(&[ip]), 0);
                    assert_eq!(u16::from_be_bytes([ip[2], ip[3]]) as usize, frame.len() - ETHERNET);
                } else {
                    assert_eq!(u16::from_be_bytes([ip[4], ip[5]]) as usize, tcp.len());
                }
            }
        }
    }

    #[test]
    fn room_is_no_more_than_half_of_the_window_that_the_scale_allows() {
        let narrow = Numbers { end: u32::MAX, window: 100, scale: 0 }.with_room();
        assert_eq!((narrow.end, narrow.window), (u32::MAX.wrapping_add(32767), 65535));
        let wide = Numbers { end: 10, window: 65000, scale: 7 }.with_room();
        assert_eq!((wide.end, wide.window), (10 + ROOM, 65000));
        let small = Numbers { end: 10, window: 5, scale: 7 }.with_room();
        assert_eq!(u32::from(small.window) << 7, WIDE);
    }
}
