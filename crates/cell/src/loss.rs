//! Finds lost TCP segments that the stack below does not notice, and has it send them again. Pure.
//!
//! smoltcp 0.14 sends a segment again after three duplicate acknowledgements, or after a timeout of
//! at least a second. That leaves four gaps:
//!
//! * It counts only acknowledgements with an unchanged window, and reads no selective
//!   acknowledgements. A peer that reads slowly tells another window each time, so a loss waits for
//!   the timeout.
//! * Where several segments were lost, it needs three duplicates or a timeout for each.
//! * Where a peer closes its window with data on the way, the timer of zero-window probes replaces
//!   the one of retransmissions, and none runs once the window opens again. If the last segment of
//!   a reply was lost, it waits for the answers to three keep-alives: 30 s. Linux as a peer does
//!   that: it drops a segment for which its full buffer has no room, and closes its window in the
//!   same step.
//! * It probes a closed window at intervals that double up to a minute, whatever the peer answers,
//!   and gives up a peer that was silent for longer than [`tcp`](crate::tcp) allows. So a peer that
//!   reads nothing for a minute would lose its connection, although it answers each probe.
//!
//! A [`LossDetector`] watches the TCP segments of one device in both directions
//! (docs/decisions/0021-tcp-losses-of-cells.md has the alternatives). It takes the first
//! unacknowledged segment for lost
//!
//! 1. by selective acknowledgements: more than two full segments above it have arrived, or three
//!    acknowledgements each told of more data above it (RFC 6675 §4, `IsLost`), or all but one of
//!    at most three segments on the way have arrived (RFC 5827 §3.1);
//! 2. when a window that was closed with the segment on the way opens again without an
//!    acknowledgement of it;
//! 3. when an acknowledgement covers only what was sent again, and more was on the way (RFC 6582
//!    §3.2), after a loss that was found by 2 or 4;
//! 4. when nothing was acknowledged for as long as RFC 6298 says, but with Linux's minimum of 200
//!    ms.
//!
//! A plain window update is none of these. For a lost segment the stack is handed the peer's last
//! acknowledgement again, as often as makes it a loss by the stack's own rule. The stack sends the
//! segment from its own buffer, and its congestion control counts the loss; the detector holds no
//! data and sends nothing.
//!
//! For the fourth gap the stack is told, after each [`PROBED_NS`] of answers with a closed window,
//! of a window of one byte, and at once of the closed one again. That starts its probes from the
//! shortest interval.
//!
//! **Limits.** One record of a few words per connection, [`MAX_CONNECTIONS`] of them; the one
//! unused for longest goes first. Per acknowledgement of a peer there is at most one loss. After
//! [`MAX_UNANSWERED`] losses by time without a frame from the peer, the rest is the stack's, so a
//! peer that is gone is given up little later than without the detector. Not covered, and left to
//! the stack's timeout: lost SYN and FIN, and losses after both sides have closed, the peer first
//! (LAST-ACK), where smoltcp counts no duplicates.
//!
//! **Failure.** A wrong guess costs one segment sent twice, and the stack halves its congestion
//! window. A peer that acknowledges each segment of a flight that was only late gets each of them
//! twice, as after the stack's own timeout. What a peer writes changes only the record of its own
//! connection. A third party that does not see the connection must guess its sequence numbers: as
//! in the stack, a segment counts only if it lies in the receive window (RFC 9293 §3.10.7.4, RFC
//! 5961 §5.2), be it an acknowledgement or a reset. A SYN never changes a connection that is there.
//!
//! **Pauses.** Deadlines are judged when the device has no more frames, so acknowledgements that
//! came while the cell did not run count. Under a load that leaves frames over in each turn, they
//! are judged once per [`MAX_RING_FRAMES`] frames.

use alloc::collections::{BTreeMap, VecDeque};
use core::cell::RefCell;
use core::num::NonZeroU16;
use smoltcp::phy::{ChecksumCapabilities, Device, DeviceCapabilities, PacketMeta, RxToken, TxToken};
use smoltcp::time::Instant;
use smoltcp::wire::{
    EthernetAddress, EthernetFrame, EthernetProtocol, EthernetRepr, IpAddress, IpEndpoint, IpProtocol, IpRepr,
    Ipv4Packet, Ipv6Packet, TcpControl, TcpOption, TcpPacket, TcpRepr, TcpSeqNumber,
};

/// Acknowledgements that each tell of more data above a gap, after which the gap is a loss (RFC
/// 6675 §2).
const DUP_THRESH: usize = 3;
/// Before there is a measurement (RFC 6298 §2.1).
const INITIAL_TIMEOUT_NS: u64 = 1_000_000_000;
/// The largest shift of a window (RFC 7323 §2.3).
const MAX_WINDOW_SHIFT: u8 = 14;
/// The variance counts four times (RFC 6298 §2.3).
const VARIANCE_FACTOR: u64 = 4;

/// As Linux's TCP_RTO_MIN: longer than the 40 ms for which its receiver may delay an
/// acknowledgement.
const MIN_TIMEOUT_NS: u64 = 200_000_000;
/// Doublings of the timeout, at most.
const MAX_BACKOFF: u32 = 8;
/// Losses found by time in a row, with no frame of the peer in between.
const MAX_UNANSWERED: u32 = 3;
/// Connections that are watched at a time.
const MAX_CONNECTIONS: usize = 2048;
/// An acknowledgement with another window clears the stack's count of duplicates, one with the
/// right window follows, and three more are duplicates of that.
const LOSS_REPEATS: u8 = 5;
/// A window that opens ends the stack's probes, and the closed one begins them.
const PROBE_REPEATS: u8 = 2;
/// How long a window may be closed before the stack's probes start from the shortest interval. By
/// then they are at most twice as far apart, which is less than a peer may be silent.
const PROBED_NS: u64 = 5_000_000_000;
/// No receive ring of a device holds more frames.
const MAX_RING_FRAMES: usize = 4096;
/// Of the frames of the detector, which no router sees.
const HOP_LIMIT: u8 = 64;

const ETHERNET_HEADER_BYTES: usize = 14;
const IPV6_HEADER_BYTES: usize = 40;
const TCP_HEADER_BYTES: usize = 20;
const MAX_ACK_BYTES: usize = ETHERNET_HEADER_BYTES + IPV6_HEADER_BYTES + TCP_HEADER_BYTES;

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Flow {
    remote: IpEndpoint,
    local: IpEndpoint,
}

/// What counts of a TCP segment.
struct Segment {
    from: IpEndpoint,
    to: IpEndpoint,
    from_mac: EthernetAddress,
    seq: TcpSeqNumber,
    ack: Option<TcpSeqNumber>,
    window: u16,
    /// The shift of later windows, which only a SYN tells.
    window_shift: u8,
    payload_bytes: usize,
    syn: bool,
    fin: bool,
    rst: bool,
    selective: [Option<(TcpSeqNumber, TcpSeqNumber)>; 3],
}

impl Segment {
    /// Reads a frame; `None` for all that is not TCP, and for fragments.
    fn read(frame: &[u8]) -> Option<Segment> {
        let ethernet = EthernetFrame::new_checked(frame).ok()?;
        let (from, to, payload): (IpAddress, IpAddress, &[u8]) = match ethernet.ethertype() {
            EthernetProtocol::Ipv4 => {
                let ip = Ipv4Packet::new_checked(ethernet.payload()).ok()?;
                if ip.next_header() != IpProtocol::Tcp || ip.more_frags() || ip.frag_offset() != 0 {
                    return None;
                }
                (ip.src_addr().into(), ip.dst_addr().into(), ip.payload())
            }
            EthernetProtocol::Ipv6 => {
                let ip = Ipv6Packet::new_checked(ethernet.payload()).ok()?;
                if ip.next_header() != IpProtocol::Tcp {
                    return None;
                }
                (ip.src_addr().into(), ip.dst_addr().into(), ip.payload())
            }
            _ => return None,
        };
        let tcp = TcpPacket::new_checked(payload).ok()?;
        let ranges = if tcp.options().is_empty() { [None; 3] } else { tcp.selective_ack_ranges().ok()? };
        Some(Segment {
            from: IpEndpoint::new(from, tcp.src_port()),
            to: IpEndpoint::new(to, tcp.dst_port()),
            from_mac: ethernet.src_addr(),
            seq: tcp.seq_number(),
            ack: tcp.ack().then(|| tcp.ack_number()),
            window: tcp.window_len(),
            window_shift: if tcp.syn() { window_shift(tcp.options()) } else { 0 },
            payload_bytes: tcp.payload().len(),
            syn: tcp.syn(),
            fin: tcp.fin(),
            rst: tcp.rst(),
            selective: ranges.map(|r| r.map(|(left, right)| (TcpSeqNumber(left as i32), TcpSeqNumber(right as i32)))),
        })
    }
}

/// The window scale option of a SYN; without one, later windows are not scaled.
fn window_shift(mut options: &[u8]) -> u8 {
    while let Ok((rest, option)) = TcpOption::parse(options) {
        match option {
            TcpOption::WindowScale(shift) => return shift.min(MAX_WINDOW_SHIFT),
            TcpOption::EndOfList => return 0,
            _ => options = rest,
        }
    }
    0
}

/// Bytes from one sequence number on to another; very many where `to` is before `from`.
fn distance(from: TcpSeqNumber, to: TcpSeqNumber) -> usize {
    to.0.wrapping_sub(from.0) as u32 as usize
}

/// The peer's last acknowledgement: what of it is needed to make it again. Its number is
/// `Connection::unacknowledged`.
#[derive(Clone, Copy, Debug)]
struct LastAck {
    from_mac: EthernetAddress,
    seq: TcpSeqNumber,
    window: u16,
}

/// What the cell last told the peer of its receive window.
#[derive(Clone, Copy, Debug)]
struct ReceiveWindow {
    /// The cell's acknowledgement number.
    start: TcpSeqNumber,
    bytes: usize,
}

impl ReceiveWindow {
    /// Whether the stack takes a segment, or answers it as a keep-alive: one byte before the
    /// window. The stack may have taken data that it has not acknowledged yet, so what follows a
    /// full window counts as well.
    fn admits(&self, segment: &Segment) -> bool {
        let begins_within = distance(self.start - 1, segment.seq) <= 1 + self.bytes;
        let end = distance(self.start, segment.seq + segment.payload_bytes);
        begins_within || segment.payload_bytes > 0 && (1..=self.bytes).contains(&end)
    }
}

/// Why a segment is taken for lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Evidence {
    /// The peer told of what came behind it.
    Selective,
    /// Nothing tells whether what was sent behind it came.
    Guess,
}

/// A connection, as far as its sender goes.
#[derive(Debug)]
struct Connection {
    /// The first byte that is not acknowledged.
    unacknowledged: TcpSeqNumber,
    /// The byte after the last one that was sent; a FIN does not count.
    next: TcpSeqNumber,
    fin_sent: bool,
    /// `None` until the cell has acknowledged the peer's SYN.
    receive_window: Option<ReceiveWindow>,
    /// By which the cell's windows are scaled, at most. 0 if its SYN was not seen, so that the
    /// window is taken for a smaller one.
    receive_shift: u8,
    /// Payload of a full segment: as the device was last told to cut, or the largest that was sent
    /// whole.
    segment_bytes: usize,
    /// `None` until the peer has sent a segment whose window is scaled as all later ones are: any
    /// but its SYN.
    last_ack: Option<LastAck>,
    /// Bytes above the gap that the peer told of, and how many acknowledgements told of more since
    /// the gap is the first.
    selective_bytes: usize,
    selective_acks: usize,
    /// The end of what was on the way when the peer closed its window.
    closed: Option<TcpSeqNumber>,
    /// Since when the window is closed, or the stack's probes began again.
    probed_since_ns: Option<u64>,
    /// The start of the segment that was sent again last.
    resent: Option<TcpSeqNumber>,
    /// The end of what was on the way when a loss was guessed: all of that may be lost.
    doubtful: Option<TcpSeqNumber>,
    /// What the next measurement of the round trip waits for, and since when.
    sample: Option<(TcpSeqNumber, u64)>,
    /// Smoothed round trip and its variance, in nanoseconds.
    round_trip_ns: Option<(u64, u64)>,
    backoff: u32,
    unanswered: u32,
    deadline_ns: Option<u64>,
    used_ns: u64,
}

impl Connection {
    fn new(first: TcpSeqNumber, now_ns: u64) -> Connection {
        Connection {
            unacknowledged: first,
            next: first,
            fin_sent: false,
            receive_window: None,
            receive_shift: 0,
            segment_bytes: 0,
            last_ack: None,
            selective_bytes: 0,
            selective_acks: 0,
            closed: None,
            probed_since_ns: None,
            resent: None,
            doubtful: None,
            sample: None,
            round_trip_ns: None,
            backoff: 0,
            unanswered: 0,
            deadline_ns: None,
            used_ns: now_ns,
        }
    }

    fn is_waiting(&self) -> bool {
        self.unacknowledged < self.next
    }

    /// Notes what an outgoing segment tells of the receive window. That of a SYN is not scaled.
    fn advertised(&mut self, segment: &Segment) {
        let shift = if segment.syn { 0 } else { self.receive_shift };
        let bytes = usize::from(segment.window) << shift;
        self.receive_window = segment.ack.map(|start| ReceiveWindow { start, bytes }).or(self.receive_window);
    }

    /// How long nothing may be acknowledged (RFC 6298 §2, §5.5).
    fn timeout_ns(&self) -> u64 {
        let timeout_ns = self.round_trip_ns.map_or(INITIAL_TIMEOUT_NS, |(smoothed, variance)| {
            (smoothed + VARIANCE_FACTOR * variance).max(MIN_TIMEOUT_NS)
        });
        timeout_ns << self.backoff.min(MAX_BACKOFF)
    }

    /// RFC 6298 §2.2, §2.3.
    fn measured(&mut self, sample_ns: u64) {
        self.round_trip_ns = Some(match self.round_trip_ns {
            None => (sample_ns, sample_ns / 2),
            Some((smoothed, variance)) => {
                ((7 * smoothed + sample_ns) / 8, (3 * variance + smoothed.abs_diff(sample_ns)) / 4)
            }
        });
    }

    /// Bytes on the way.
    fn flight_bytes(&self) -> usize {
        distance(self.unacknowledged, self.next)
    }

    /// How many bytes above the gap the peer says it has.
    fn selective_bytes(&self, ranges: &[Option<(TcpSeqNumber, TcpSeqNumber)>; 3]) -> usize {
        let flight = self.flight_bytes();
        let offset = |at| distance(self.unacknowledged, at);
        let ranges = ranges.map(|range| range.map(|(left, right)| (offset(left), offset(right))));
        // The first may tell of what came twice: below the gap, or a part of the second (RFC 2883
        // §4).
        let is_told_twice = match (ranges[0], ranges[1]) {
            (Some(first), Some(second)) => second.0 <= first.0 && first.1 <= second.1,
            _ => false,
        };
        let sound = ranges.iter().skip(usize::from(is_told_twice)).flatten();
        let sound = sound.filter(|(left, right)| 0 < *left && left < right && *right <= flight);
        // Ranges that overlap are not what RFC 2018 allows.
        sound.map(|(left, right)| right - left).sum::<usize>().min(flight)
    }

    /// Takes an acknowledgement of `number`, which is not less than the last one; returns why the
    /// segment there is lost, if it is.
    fn acknowledged(&mut self, number: TcpSeqNumber, segment: &Segment, now_ns: u64) -> Option<Evidence> {
        let segment_bytes = self.segment_bytes;
        let mut evidence = None;
        if number > self.unacknowledged {
            if let Some((end, since_ns)) = self.sample
                && number >= end
            {
                self.measured(now_ns.saturating_sub(since_ns));
                self.sample = None;
                // Only now: an acknowledgement of what was sent again says nothing of the round
                // trip (RFC 6298 §5, Karn).
                self.backoff = 0;
            }
            let step = distance(self.unacknowledged, number);
            self.unacknowledged = number;
            (self.selective_bytes, self.selective_acks) = (0, 0);
            self.closed = self.closed.filter(|end| number < *end);
            // Where more is acknowledged than was sent again, the rest was only late.
            self.doubtful = self.doubtful.filter(|end| number < *end && step <= segment_bytes);
            evidence = self.doubtful.map(|_| Evidence::Guess);
            self.deadline_ns = self.is_waiting().then(|| now_ns + self.timeout_ns());
        }
        if !self.is_waiting() {
            return None;
        }
        let told = self.selective_bytes(&segment.selective);
        if told > self.selective_bytes {
            self.selective_bytes = told;
            self.selective_acks += 1;
            let flight = self.flight_bytes();
            // So little is on the way that no more can be told (RFC 5827 §3.1).
            let is_all_told = flight <= DUP_THRESH * segment_bytes && flight - told <= segment_bytes;
            if is_all_told || told > (DUP_THRESH - 1) * segment_bytes || self.selective_acks >= DUP_THRESH {
                evidence = Some(Evidence::Selective);
            }
        }
        if segment.window == 0 {
            // What is sent again now finds no room either.
            self.closed = Some(self.next);
            return None;
        }
        if self.closed.take().is_some() {
            return Some(Evidence::Guess);
        }
        evidence.filter(|_| self.resent != Some(self.unacknowledged))
    }

    /// Notes the window of an acknowledgement. Whether it has been closed for so long that the
    /// stack's probes are to begin again.
    fn was_probed(&mut self, window: u16, now_ns: u64) -> bool {
        if window > 0 {
            self.probed_since_ns = None;
            return false;
        }
        let since_ns = *self.probed_since_ns.get_or_insert(now_ns);
        let is_long = now_ns.saturating_sub(since_ns) >= PROBED_NS;
        if is_long {
            self.probed_since_ns = Some(now_ns);
        }
        is_long
    }

    /// The first segment is lost, and about to be sent again.
    fn lost(&mut self, evidence: Evidence, now_ns: u64) {
        self.resent = Some(self.unacknowledged);
        self.closed = None;
        match evidence {
            Evidence::Selective => {}
            Evidence::Guess => self.doubtful = Some(self.next),
        }
        self.deadline_ns = Some(now_ns + self.timeout_ns());
    }
}

/// A connection whose last acknowledgement the stack is to get `count` times again, the first time
/// with another window.
struct Repeat {
    flow: Flow,
    count: u8,
    left: u8,
}

impl Repeat {
    fn new(flow: Flow, count: u8) -> Repeat {
        Repeat { flow, count, left: count }
    }
}

/// A frame of the detector's own, for the stack.
pub(crate) struct AckFrame {
    bytes: [u8; MAX_ACK_BYTES],
    len: usize,
}

/// Watches the connections of one device.
pub(crate) struct LossDetector {
    connections: BTreeMap<Flow, Connection>,
    repeats: VecDeque<Repeat>,
    /// Not later than the first deadline.
    look_at_ns: Option<u64>,
    /// The interface's hardware address, without which the stack does not take a frame.
    mac: EthernetAddress,
    /// Frames that the device received since deadlines were judged last.
    unjudged_frames: usize,
    losses: u64,
}

/// Makes `look_at_ns` no later than `deadline_ns`.
fn look_before(look_at_ns: &mut Option<u64>, deadline_ns: Option<u64>) {
    if let Some(at) = deadline_ns {
        *look_at_ns = Some(look_at_ns.map_or(at, |first| first.min(at)));
    }
}

impl LossDetector {
    /// For an interface with the hardware address `mac`.
    pub(crate) fn new(mac: EthernetAddress) -> LossDetector {
        LossDetector {
            connections: BTreeMap::new(),
            repeats: VecDeque::new(),
            look_at_ns: None,
            mac,
            unjudged_frames: 0,
            losses: 0,
        }
    }

    /// The interface has another hardware address.
    pub(crate) fn set_mac(&mut self, mac: EthernetAddress) {
        self.mac = mac;
    }

    /// Segments that were found lost so far.
    pub(crate) fn losses(&self) -> u64 {
        self.losses
    }

    /// When to receive next, even without a frame. Can be too early.
    pub(crate) fn poll_at(&self) -> Option<u64> {
        self.look_at_ns
    }

    /// Looks for segments that were not acknowledged in time.
    fn expire(&mut self, now_ns: u64) {
        self.unjudged_frames = 0;
        if self.look_at_ns.is_none_or(|at| now_ns < at) {
            return;
        }
        self.look_at_ns = None;
        for (flow, connection) in &mut self.connections {
            if connection.deadline_ns.is_some_and(|at| at <= now_ns) {
                connection.deadline_ns = None;
                if connection.last_ack.is_some() && connection.unanswered < MAX_UNANSWERED {
                    connection.unanswered += 1;
                    connection.backoff += 1;
                    connection.lost(Evidence::Guess, now_ns);
                    self.losses += 1;
                    self.repeats.push_back(Repeat::new(*flow, LOSS_REPEATS));
                }
            }
            look_before(&mut self.look_at_ns, connection.deadline_ns);
        }
    }

    /// Looks at a frame that the device received, before the stack gets it.
    fn incoming(&mut self, frame: &[u8], now_ns: u64) {
        let Some(segment) = Segment::read(frame) else { return };
        let flow = Flow { remote: segment.from, local: segment.to };
        let Some(connection) = self.connections.get_mut(&flow) else { return };
        match connection.receive_window {
            // As the stack, which takes no other SYN and no segment outside its window. The cell's
            // own SYN begins the next connection with these ends.
            Some(window) if segment.syn || !window.admits(&segment) => return,
            Some(_) => {}
            // The answer to the cell's SYN acknowledges exactly that.
            None if (segment.syn || segment.rst) && segment.ack == Some(connection.next) => {}
            None => return,
        }
        if segment.rst {
            self.connections.remove(&flow);
            return;
        }
        let Some(number) = segment.ack else { return };
        // As the stack: it believes neither old acknowledgements nor those of what was not sent.
        let allowed = connection.flight_bytes() + usize::from(connection.fin_sent);
        if distance(connection.unacknowledged, number) > allowed {
            return;
        }
        if connection.next < number {
            // The FIN is acknowledged, so there is nothing more to lose.
            self.connections.remove(&flow);
            return;
        }
        connection.used_ns = now_ns;
        connection.unanswered = 0;
        if !segment.syn {
            let end = segment.seq + segment.payload_bytes + usize::from(segment.fin);
            connection.last_ack = Some(LastAck {
                from_mac: segment.from_mac,
                // A keep-alive has the number before, which the stack would not take.
                seq: connection.last_ack.map_or(end, |last| last.seq.max(end)),
                window: segment.window,
            });
        }
        let was_probed = connection.was_probed(segment.window, now_ns);
        if let Some(evidence) = connection.acknowledged(number, &segment, now_ns) {
            connection.lost(evidence, now_ns);
            self.losses += 1;
            self.repeats.push_back(Repeat::new(flow, LOSS_REPEATS));
        } else if was_probed {
            self.repeats.push_back(Repeat::new(flow, PROBE_REPEATS));
        }
        look_before(&mut self.look_at_ns, connection.deadline_ns);
    }

    /// Looks at a frame that the stack sends. The device cuts it into segments with a payload of
    /// `cut_bytes`, if given.
    fn outgoing(&mut self, frame: &[u8], cut_bytes: Option<NonZeroU16>, now_ns: u64) {
        let Some(segment) = Segment::read(frame) else { return };
        let flow = Flow { remote: segment.to, local: segment.from };
        if segment.rst {
            self.connections.remove(&flow);
            return;
        }
        if segment.syn {
            let first = segment.seq + 1;
            let is_again = self.connections.get(&flow).is_some_and(|before| before.next == first);
            let mut connection = Connection::new(first, now_ns);
            connection.sample = (!is_again).then_some((first, now_ns));
            connection.receive_shift = segment.window_shift;
            connection.advertised(&segment);
            self.insert(flow, connection);
            return;
        }
        if let Some(connection) = self.connections.get_mut(&flow) {
            connection.advertised(&segment);
        }
        if segment.payload_bytes == 0 && !segment.fin {
            return;
        }
        if !self.connections.contains_key(&flow) {
            let mut connection = Connection::new(segment.seq, now_ns);
            connection.advertised(&segment);
            self.insert(flow, connection);
        }
        let Some(connection) = self.connections.get_mut(&flow) else { return };
        let end = segment.seq + segment.payload_bytes;
        let is_closed = connection.last_ack.is_some_and(|last| last.window == 0);
        if is_closed && segment.seq == connection.next && segment.payload_bytes == 1 {
            // A zero-window probe, which the stack itself does not count as sent.
            return;
        }
        connection.used_ns = now_ns;
        connection.fin_sent |= segment.fin;
        // What is not cut may be less than a full segment.
        let whole_bytes = connection.segment_bytes.max(segment.payload_bytes);
        connection.segment_bytes = cut_bytes.map_or(whole_bytes, |bytes| usize::from(bytes.get()));
        if segment.payload_bytes > 0 && segment.seq == connection.unacknowledged && connection.is_waiting() {
            connection.resent = Some(segment.seq);
            // A later acknowledgement may be of either of both (RFC 6298 §3, Karn's algorithm).
            connection.sample = None;
        }
        if connection.next < end {
            connection.next = end;
            connection.sample.get_or_insert((end, now_ns));
            connection.deadline_ns.get_or_insert(now_ns + connection.timeout_ns());
            look_before(&mut self.look_at_ns, connection.deadline_ns);
        }
    }

    fn insert(&mut self, flow: Flow, connection: Connection) {
        if self.connections.len() >= MAX_CONNECTIONS
            && !self.connections.contains_key(&flow)
            && let Some(oldest) = self.connections.iter().min_by_key(|(_, c)| c.used_ns).map(|(flow, _)| *flow)
        {
            self.connections.remove(&oldest);
        }
        self.connections.insert(flow, connection);
    }

    /// The next acknowledgement that the stack is to get again.
    fn next_repeat(&mut self) -> Option<AckFrame> {
        loop {
            let repeat = self.repeats.front_mut()?;
            let Repeat { flow, count, left } = *repeat;
            repeat.left -= 1;
            if left == 1 {
                self.repeats.pop_front();
            }
            let Some(connection) = self.connections.get(&flow) else { continue };
            let Some(last) = connection.last_ack else { continue };
            let window = match last.window {
                window if left < count => window,
                0 => 1,
                window => window - 1,
            };
            let seq = connection.receive_window.map_or(last.seq, |own| last.seq.max(own.start));
            return Some(AckFrame::new(&flow, self.mac, &LastAck { window, seq, ..last }, connection.unacknowledged));
        }
    }
}

impl AckFrame {
    fn new(flow: &Flow, to_mac: EthernetAddress, last: &LastAck, number: TcpSeqNumber) -> AckFrame {
        let mut frame = AckFrame { bytes: [0; MAX_ACK_BYTES], len: 0 };
        let checksums = ChecksumCapabilities::default();
        let (from, to) = (flow.remote.addr, flow.local.addr);
        let tcp = TcpRepr {
            src_port: flow.remote.port,
            dst_port: flow.local.port,
            control: TcpControl::None,
            seq_number: last.seq,
            ack_number: Some(number),
            window_len: last.window,
            window_scale: None,
            max_seg_size: None,
            sack_permitted: false,
            sack_ranges: [None; 3],
            timestamp: None,
            payload: &[],
        };
        let ip = IpRepr::new(from, to, IpProtocol::Tcp, TCP_HEADER_BYTES, HOP_LIMIT);
        let ethertype = match from {
            IpAddress::Ipv4(_) => EthernetProtocol::Ipv4,
            IpAddress::Ipv6(_) => EthernetProtocol::Ipv6,
        };
        frame.len = ETHERNET_HEADER_BYTES + ip.header_len() + TCP_HEADER_BYTES;
        let mut ethernet = EthernetFrame::new_unchecked(&mut frame.bytes[..]);
        EthernetRepr { src_addr: last.from_mac, dst_addr: to_mac, ethertype }.emit(&mut ethernet);
        let packet = ethernet.payload_mut();
        ip.emit(&mut *packet, &checksums);
        let segment = &mut packet[ip.header_len()..][..TCP_HEADER_BYTES];
        tcp.emit(&mut TcpPacket::new_unchecked(segment), &from, &to, &checksums);
        frame
    }
}

/// A device that a [`LossDetector`] watches, for the length of one call of the stack.
pub(crate) struct Watched<'w, D> {
    pub(crate) device: &'w mut D,
    pub(crate) detector: &'w RefCell<LossDetector>,
}

fn nanoseconds(now: Instant) -> u64 {
    now.total_micros() as u64 * 1000
}

/// A frame of the device, or one of the detector.
pub(crate) enum WatchedFrame<'d, R> {
    Device { frame: R, detector: &'d RefCell<LossDetector>, now_ns: u64 },
    Repeat(AckFrame),
}

impl<R: RxToken> RxToken for WatchedFrame<'_, R> {
    fn consume<T, F: FnOnce(&[u8]) -> T>(self, read: F) -> T {
        match self {
            WatchedFrame::Device { frame, detector, now_ns } => frame.consume(|bytes| {
                detector.borrow_mut().incoming(bytes, now_ns);
                read(bytes)
            }),
            WatchedFrame::Repeat(AckFrame { bytes, len }) => read(&bytes[..len]),
        }
    }
}

/// Permission to send a frame; `None`, with which an answer to a repeated acknowledgement is built
/// and dropped.
pub(crate) struct WatchedPermit<'d, T> {
    permit: Option<T>,
    detector: &'d RefCell<LossDetector>,
    cut_bytes: Option<NonZeroU16>,
    now_ns: u64,
}

impl<T: TxToken> TxToken for WatchedPermit<'_, T> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, build: F) -> R {
        let WatchedPermit { permit, detector, cut_bytes, now_ns } = self;
        match permit {
            Some(permit) => permit.consume(len, |bytes| {
                let built = build(bytes);
                detector.borrow_mut().outgoing(bytes, cut_bytes, now_ns);
                built
            }),
            None => build(&mut alloc::vec![0; len]),
        }
    }

    fn set_meta(&mut self, meta: PacketMeta) {
        self.cut_bytes = meta.segmentation_offload_size;
        if let Some(permit) = &mut self.permit {
            permit.set_meta(meta);
        }
    }
}

impl<D: Device> Device for Watched<'_, D> {
    type RxToken<'d>
        = WatchedFrame<'d, D::RxToken<'d>>
    where
        Self: 'd;
    type TxToken<'d>
        = WatchedPermit<'d, D::TxToken<'d>>
    where
        Self: 'd;

    fn receive(&mut self, now: Instant) -> Option<(Self::RxToken<'_>, Self::TxToken<'_>)> {
        let (detector, now_ns) = (self.detector, nanoseconds(now));
        let repeated =
            |ack| (WatchedFrame::Repeat(ack), WatchedPermit { permit: None, detector, cut_bytes: None, now_ns });
        if detector.borrow().unjudged_frames >= MAX_RING_FRAMES {
            detector.borrow_mut().expire(now_ns);
        }
        let repeat = detector.borrow_mut().next_repeat();
        if let Some(ack) = repeat {
            return Some(repeated(ack));
        }
        let Some((frame, permit)) = self.device.receive(now) else {
            // All that came until now was looked at.
            let mut detector = detector.borrow_mut();
            detector.expire(now_ns);
            return detector.next_repeat().map(repeated);
        };
        detector.borrow_mut().unjudged_frames += 1;
        let permit = WatchedPermit { permit: Some(permit), detector, cut_bytes: None, now_ns };
        Some((WatchedFrame::Device { frame, detector, now_ns }, permit))
    }

    fn transmit(&mut self, now: Instant) -> Option<Self::TxToken<'_>> {
        let (detector, now_ns) = (self.detector, nanoseconds(now));
        let permit = self.device.transmit(now)?;
        Some(WatchedPermit { permit: Some(permit), detector, cut_bytes: None, now_ns })
    }

    fn capabilities(&self) -> DeviceCapabilities {
        self.device.capabilities()
    }
}

#[cfg(test)]
mod tests;
