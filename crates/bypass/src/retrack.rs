//! Has conntrack check the windows of TCP connections again, once their frames take the kernel's
//! path for good.
//!
//! While a connection is taken, conntrack sees one frame per lease, so it is told not to check
//! windows ("liberal"). At `detach` its numbers are far behind, and no request of ctnetlink sets
//! them. But conntrack has its own way to resynchronise with a connection that it has lost. If it
//! sees a SYN, then a SYN-ACK that acknowledges it, it takes both ends' numbers, scales and flags
//! from these two (`nf_conntrack_tcp_packet`, the case `TCP_CONNTRACK_IGNORE`). So these two
//! frames, and an acknowledgement from either end, are injected at the connection's interfaces,
//! with the numbers that its flows have noted. The program `inject` does this. The frames pass
//! conntrack and the rules. The egress program then drops them by a nonce in their options, so no
//! end ever sees one.
//!
//! # Frames in between
//! Numbers that were read just before are wrong if a frame passes before conntrack has the new
//! ones. So conntrack checks no window in this namespace while this goes on
//! (`nf_conntrack_tcp_be_liberal`). The owner record says so, so that the next command sets it back
//! if this process is killed. The numbers are read again afterwards. If they have changed, the
//! procedure is repeated. A connection that never pauses for that long stays liberal, as before.
//!
//! # What stays liberal
//! - Connections that never pause, and all that come after the time limit of the procedure. Those
//!   at rest come first.
//! - Connections without window scaling: conntrack picks up connections without a handshake in the
//!   same state, and knows no scale of these.
//! - Those of which not both directions are known for sure, or of which one direction lately came
//!   by an interface without our programs. Then one end has acknowledged more than the other is
//!   known to have sent. Also those that have begun to end.
//! - Those whose injected frames a rule before conntrack drops.
//!
//! If the process is killed halfway, it leaves an entry that the connection's next frame completes,
//! or the next `detach`. If there is neither for a minute, the entry expires.

use crate::conntrack::{BE_LIBERAL, Conntrack, ESTABLISHED, Entry, SYN_RECV, UNACKNOWLEDGED, Update, WINDOW_SCALE};
use crate::layout::{Flow, Tuple};
use crate::maps::{FlowKey, Maps};
use crate::settle::{self, Standing, is_before};
use aya::TestRun;
use aya::programs::{SchedClassifier, TestRunOptions};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};
use tombolo_ring::checksum;

/// For how long all connections together are worked on.
const LONGEST: Duration = Duration::from_secs(3);
/// How often one is tried.
const TRIES: usize = 8;
/// For how long conntrack may take to see the injected frames: they wait in a queue where the
/// machine is busy.
const SEEN_WITHIN: Duration = Duration::from_millis(10);

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

/// Keeps the thread on the CPU that it is on: each CPU has a queue of its own for frames that come
/// in, and these are to come in in order.
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
    ack: u32,
    window: u16,
    scale: u8,
}

impl Numbers {
    fn of(side: &Side, maps: &Maps) -> Option<Numbers> {
        let mut best: Option<Numbers> = None;
        for p in side.keys.iter().filter_map(|key| maps.flow(key)?.progress) {
            let n = best.get_or_insert(Numbers { end: p.end, ack: p.ack, window: p.window, scale: p.scale });
            n.end = if is_before(n.end, p.end) { p.end } else { n.end };
            if is_before(n.ack, p.ack) {
                (n.ack, n.window) = (p.ack, p.window);
            }
        }
        best
    }
}

/// Whether neither end has acknowledged what the other is not known to have sent.
fn agree([a, b]: [Numbers; 2]) -> bool {
    !is_before(a.end, b.ack) && !is_before(b.end, a.ack)
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
        // The one by which the entry is established again comes last, so that what it says is known
        // with that.
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
    /// As it would come in at that side's interface, whose number is in the source address for the
    /// program `inject`.
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
        let sum = !checksum::sum(&[&pseudo[..], &tcp[..]].concat());
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
                let sum = !checksum::sum(&ip);
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

/// The two directions of each connection, as its frames come in. `macs` has the Ethernet address of
/// each interface where our programs are; others see nothing of the connection there, and would
/// pass on what is injected.
fn sides(
    flows: &[(FlowKey, Tuple, Flow)],
    standings: &[Standing],
    macs: &HashMap<u32, [u8; 6]>,
) -> HashMap<u64, [Side; 2]> {
    let mut found: HashMap<u64, [Option<Side>; 2]> = standings.iter().map(|s| (s.conn, [None, None])).collect();
    for (key, tuple, flow) in flows {
        let Some(p) = flow.progress.filter(|p| p.is_sure && !p.is_ending) else { continue };
        let (Some(both), Some(mac)) = (found.get_mut(&p.conn), macs.get(&tuple.input)) else { continue };
        if !macs.contains_key(&flow.output) {
            continue;
        }
        let side = both[usize::from(p.is_reply)].get_or_insert(Side { tuple: *tuple, mac: *mac, keys: vec![] });
        side.keys.push(*key);
    }
    found.into_iter().filter_map(|(conn, [a, b])| Some((conn, [a?, b?]))).collect()
}

fn is_liberal(entry: &Entry) -> bool {
    entry.flags.iter().any(|f| f & BE_LIBERAL != 0)
}

/// How many connections of these flows are liberal.
pub(crate) fn unchecked(conntrack: &Conntrack, flows: &[(FlowKey, Tuple, Flow)]) -> usize {
    let connections: HashMap<u64, &Tuple> =
        flows.iter().filter_map(|(_, tuple, flow)| Some((flow.progress?.conn, tuple))).collect();
    let is = |tuple: &&&Tuple| {
        conntrack.entry(&settle::by_tuple(tuple)).is_ok_and(|entry| entry.is_some_and(|e| is_liberal(&e)))
    };
    connections.values().filter(is).count()
}

/// Has the windows of these connections checked again. Nothing is taken any more, and the programs
/// are still there.
pub(crate) fn retrack(
    maps: &mut Maps,
    program: SchedClassifier,
    conntrack: &Conntrack,
    flows: &[(FlowKey, Tuple, Flow)],
    macs: &HashMap<u32, [u8; 6]>,
) {
    let plain: Vec<_> = flows.iter().map(|(_, tuple, flow)| (*tuple, *flow)).collect();
    let mut standings = settle::standings(&plain);
    standings.sort_by_key(|s| s.used_ns);
    let sides = sides(flows, &standings, macs);
    let end = Instant::now() + LONGEST;
    let _on_one_cpu = OnOneCpu::new();
    let Some(injector) = Injector::open(maps, program) else { return };
    for standing in &standings {
        if Instant::now() > end {
            return;
        }
        let Some([a, b]) = sides.get(&standing.conn) else { continue };
        let Ok(Some(entry)) = conntrack.entry(&standing.connection) else { continue };
        // A `detach` that was killed may have left the second of these states.
        let is_open = entry.state == ESTABLISHED || entry.state == SYN_RECV;
        if is_open && is_liberal(&entry) && entry.flags.iter().all(|f| f & WINDOW_SCALE != 0) {
            one(&injector, conntrack, standing, [a, b], entry);
        }
    }
}

/// Whether conntrack has seen all of the handshake. What it takes from a SYN has no such flag; from
/// Linux 5.18 on that of the other direction stays.
fn is_in_step(entry: Option<Entry>) -> bool {
    entry.is_some_and(|entry| entry.state == ESTABLISHED && entry.flags[0] & BE_LIBERAL == 0)
}

/// The same for one connection.
fn one(injector: &Injector, conntrack: &Conntrack, standing: &Standing, sides: [&Side; 2], entry: Entry) {
    let numbers = || Some([Numbers::of(sides[0], injector.maps)?, Numbers::of(sides[1], injector.maps)?]);
    let now = || conntrack.entry(&standing.connection).ok().flatten();
    let timeout_s = (entry.state == ESTABLISHED).then_some(entry.timeout_s);
    let mut has_begun = false;
    for _ in 0..TRIES {
        let Some(before) = numbers().filter(|n| agree(*n)) else { break };
        has_begun = true;
        if !injector.shake_hands(sides, before, entry.has_sack()) {
            break;
        }
        let until = Instant::now() + SEEN_WITHIN;
        let mut is_seen = is_in_step(now());
        while !is_seen && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
            is_seen = is_in_step(now());
        }
        // Else a real frame came between two injected ones, or a rule before conntrack dropped
        // them.
        let is_still = numbers().is_some_and(|after| agree(after) && (0..2).all(|n| after[n].end == before[n].end));
        if is_seen && is_still {
            // All of it was acknowledged, as conntrack sees it now.
            let flags = Some((entry.flags.map(|f| f & UNACKNOWLEDGED), UNACKNOWLEDGED | BE_LIBERAL));
            if conntrack.update(&standing.connection, Update { flags, state: None, timeout_s }).is_ok() {
                return;
            }
            break;
        }
    }
    if has_begun {
        // What was injected last may have been seen in part.
        let state = now().is_some_and(|entry| entry.state == SYN_RECV).then_some(ESTABLISHED);
        let _ = conntrack.update(&standing.connection, Update { state, timeout_s, ..Update::LIBERAL });
    }
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
        !checksum::sum(&parts.concat())
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
    fn numbers_agree_unless_more_was_acknowledged_than_sent() {
        let side = |end, ack| Numbers { end, ack, window: 1, scale: 7 };
        assert!(agree([side(5, 9), side(9, 5)]));
        assert!(agree([side(5, u32::MAX), side(9, u32::MAX - 4)]));
        assert!(!agree([side(5, 9), side(9, 6)]));
        assert!(!agree([side(u32::MAX, 1), side(0, u32::MAX)]));
    }
}
