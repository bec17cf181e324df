//! A cell whose socket listens, a wire, and a peer that is played, on a virtual clock.

use super::super::*;
use crate::device::capabilities;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::socket::tcp;
use smoltcp::time::Duration;
use smoltcp::wire::{ArpOperation, ArpPacket, ArpRepr, IpCidr, Ipv4Address};
use std::boxed::Box;
use std::vec::Vec;

pub(super) const OWN: Ipv4Address = Ipv4Address::new(10, 0, 0, 10);
pub(super) const PEER: Ipv4Address = Ipv4Address::new(10, 0, 0, 1);
pub(super) const OWN_MAC: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 10]);
pub(super) const PEER_MAC: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 1]);
pub(super) const OWN_PORT: u16 = 80;
pub(super) const PEER_PORT: u16 = 50_000;
/// The peer's first sequence number: its SYN.
pub(super) const PEER_SEQ: TcpSeqNumber = TcpSeqNumber(-3);
pub(super) const MTU: usize = 1500;
pub(super) const SEGMENT_BYTES: usize = MTU - 40;
pub(super) const CUT_BYTES: Option<NonZeroU16> = NonZeroU16::new(SEGMENT_BYTES as u16);
/// The window that the frames of [`own_frame`] tell.
pub(super) const OWN_WINDOW: u16 = 8192;
/// Frames of this size are cut by the device.
pub(super) const SEGMENTED_BYTES: usize = 61_428;
/// From one end to the other.
pub(super) const DELAY_NS: u64 = 50_000;
pub(super) const ROUND_TRIP_NS: u64 = 2 * DELAY_NS;
pub(super) const MS: u64 = 1_000_000;
pub(super) const S: u64 = 1000 * MS;

pub(super) fn byte(at: usize) -> u8 {
    (at % 251) as u8
}

/// Both ends of the cell's wire.
#[derive(Default)]
pub(super) struct Wire {
    pub(super) received: VecDeque<Vec<u8>>,
    pub(super) sent: Vec<Vec<u8>>,
    /// Nothing can be sent.
    pub(super) is_down: bool,
}

pub(super) struct Taken(Vec<u8>);

impl RxToken for Taken {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(&self.0)
    }
}

pub(super) struct Permit<'d>(&'d mut Vec<Vec<u8>>);

impl TxToken for Permit<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, build: F) -> R {
        let mut frame = std::vec![0xa5; len];
        let built = build(&mut frame);
        self.0.push(frame);
        built
    }
}

impl Device for Wire {
    type RxToken<'d> = Taken;
    type TxToken<'d> = Permit<'d>;

    fn receive(&mut self, _: Instant) -> Option<(Taken, Permit<'_>)> {
        let frame = self.received.pop_front()?;
        Some((Taken(frame), Permit(&mut self.sent)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Permit<'_>> {
        (!self.is_down).then_some(Permit(&mut self.sent))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        capabilities(MTU, SEGMENTED_BYTES, true)
    }
}

pub(super) fn ethernet(ethertype: EthernetProtocol, len: usize, build: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let mut bytes = std::vec![0; ETHERNET_HEADER_BYTES + len];
    let mut frame = EthernetFrame::new_unchecked(&mut bytes[..]);
    EthernetRepr { src_addr: PEER_MAC, dst_addr: OWN_MAC, ethertype }.emit(&mut frame);
    build(frame.payload_mut());
    bytes
}

pub(super) fn tcp_frame(tcp: &TcpRepr<'_>, from: IpAddress, to: IpAddress) -> Vec<u8> {
    let checksums = ChecksumCapabilities::default();
    let ip = IpRepr::new(from, to, IpProtocol::Tcp, tcp.buffer_len(), 64);
    let ethertype =
        if from.version() == smoltcp::wire::IpVersion::Ipv4 { EthernetProtocol::Ipv4 } else { EthernetProtocol::Ipv6 };
    ethernet(ethertype, ip.buffer_len(), |packet| {
        ip.emit(&mut *packet, &checksums);
        tcp.emit(&mut TcpPacket::new_unchecked(&mut packet[ip.header_len()..]), &from, &to, &checksums);
    })
}

/// A segment of the cell, built without its stack.
pub(super) fn own_frame(seq_number: TcpSeqNumber, payload: &[u8]) -> Vec<u8> {
    let repr = TcpRepr {
        src_port: OWN_PORT,
        dst_port: PEER_PORT,
        seq_number,
        ack_number: Some(PEER_SEQ + 1),
        window_len: OWN_WINDOW,
        payload,
        ..Peer::new(0).repr()
    };
    tcp_frame(&repr, OWN.into(), PEER.into())
}

/// A segment of the peer, from its number `seq_number` on.
pub(super) fn peer_frame(seq_number: TcpSeqNumber, ack_number: TcpSeqNumber, control: TcpControl) -> Vec<u8> {
    let ack_number = Some(ack_number);
    let repr = TcpRepr { seq_number, ack_number, control, window_len: 60_000, ..Peer::new(0).repr() };
    tcp_frame(&repr, PEER.into(), OWN.into())
}

/// A receiver as Linux has it: what comes early is kept and told of, what finds no room is dropped,
/// and then the window is closed.
pub(super) struct Peer {
    /// The sequence number of the stream's first byte.
    pub(super) first: TcpSeqNumber,
    /// Bytes of the stream that came in order, whatever was lost before.
    pub(super) taken: usize,
    /// What came above a gap: from and to.
    pub(super) early: Vec<(usize, usize)>,
    /// The largest window, in bytes.
    pub(super) window_bytes: usize,
    /// What the buffer really holds, which may be less than the window says.
    pub(super) room_bytes: usize,
    /// How much of what came in order was not read yet.
    pub(super) unread: usize,
    pub(super) reads: bool,
    /// Added to the window of the next acknowledgement, so that each is another one.
    pub(super) jitter: usize,
    pub(super) jitters: bool,
    pub(super) is_closed: bool,
    pub(super) is_mute: bool,
    pub(super) may_be_reset: bool,
    pub(super) is_reset: bool,
    pub(super) fin_taken: bool,
    /// Bytes that came more than once.
    pub(super) twice: usize,
    pub(super) selective: bool,
    /// After how many segments it acknowledges, besides at the end of each frame of the cell.
    pub(super) acks_every: usize,
}

impl Peer {
    pub(super) fn new(window_bytes: usize) -> Peer {
        Peer {
            first: TcpSeqNumber(0),
            taken: 0,
            early: Vec::new(),
            window_bytes,
            room_bytes: window_bytes,
            unread: 0,
            reads: true,
            jitter: 0,
            jitters: false,
            is_closed: false,
            is_mute: false,
            may_be_reset: false,
            is_reset: false,
            fin_taken: false,
            twice: 0,
            selective: true,
            acks_every: usize::MAX,
        }
    }

    pub(super) fn repr(&self) -> TcpRepr<'static> {
        TcpRepr {
            src_port: PEER_PORT,
            dst_port: OWN_PORT,
            control: TcpControl::None,
            seq_number: PEER_SEQ + 1,
            ack_number: Some(self.first + self.taken + usize::from(self.fin_taken)),
            window_len: 0,
            window_scale: None,
            max_seg_size: None,
            sack_permitted: false,
            sack_ranges: [None; 3],
            timestamp: None,
            payload: &[],
        }
    }

    pub(super) fn syn(&self) -> Vec<u8> {
        let repr = TcpRepr {
            control: TcpControl::Syn,
            seq_number: PEER_SEQ,
            ack_number: None,
            window_len: self.window_bytes as u16,
            max_seg_size: Some(SEGMENT_BYTES as u16),
            sack_permitted: self.selective,
            ..self.repr()
        };
        tcp_frame(&repr, PEER.into(), OWN.into())
    }

    pub(super) fn ack(&mut self) -> Vec<u8> {
        if self.jitters {
            self.jitter = (self.jitter + 7) % 1000;
        }
        let open = if self.is_closed { 0 } else { self.window_bytes.saturating_sub(self.unread + self.jitter) };
        let mut repr = TcpRepr { window_len: open as u16, ..self.repr() };
        if self.selective {
            let at = |offset: usize| (self.first + offset).0 as u32;
            for (range, (from, to)) in repr.sack_ranges.iter_mut().zip(self.early.iter().rev()) {
                *range = Some((at(*from), at(*to)));
            }
        }
        tcp_frame(&repr, PEER.into(), OWN.into())
    }

    /// The app reads all there is; what the peer then says.
    pub(super) fn read_all(&mut self) -> Vec<u8> {
        self.unread = 0;
        self.is_closed = false;
        self.ack()
    }

    /// Takes `from..to` of the stream, cut as on the wire.
    pub(super) fn take(&mut self, from: usize, to: usize) {
        for (a, b) in self.early.iter().copied().chain([(0, self.taken)]) {
            self.twice += b.min(to).saturating_sub(a.max(from));
        }
        self.early.push((from, to));
        self.early.sort_unstable();
        let mut merged: Vec<(usize, usize)> = Vec::new();
        for (from, to) in self.early.drain(..) {
            match merged.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ => merged.push((from, to)),
            }
        }
        self.early = merged;
        let before = self.taken;
        while let Some((from, to)) = self.early.first().copied()
            && from <= self.taken
        {
            self.taken = self.taken.max(to);
            self.early.remove(0);
        }
        if !self.reads {
            self.unread += self.taken - before;
        }
    }
}

/// A cell whose socket listens, and a peer that has connected to it.
pub(super) struct Net {
    pub(super) now_ns: u64,
    pub(super) wire: Wire,
    pub(super) interface: Interface,
    pub(super) sockets: SocketSet<'static>,
    pub(super) socket: SocketHandle,
    pub(super) detector: RefCell<LossDetector>,
    pub(super) is_watched: bool,
    pub(super) peer: Peer,
    /// What is on the way, with when it arrives; to the cell, and to the peer.
    pub(super) to_cell: VecDeque<(u64, Vec<u8>)>,
    pub(super) to_peer: VecDeque<(u64, Vec<u8>)>,
    /// Whether a segment of the stream, from and to, is lost.
    pub(super) drops: Box<dyn FnMut(usize, usize) -> bool>,
    pub(super) written: usize,
    pub(super) wanted: usize,
    pub(super) sent_segments: Vec<(usize, usize)>,
}

impl Net {
    /// The cell is to send `wanted` bytes and then to close.
    pub(super) fn new(
        is_watched: bool,
        peer: Peer,
        wanted: usize,
        drops: impl FnMut(usize, usize) -> bool + 'static,
    ) -> Net {
        let mut wire = Wire::default();
        let mut interface = Interface::new(Config::new(OWN_MAC.into()), &mut wire, Instant::ZERO);
        interface.update_ip_addrs(|addresses| addresses.push(IpCidr::new(OWN.into(), 24)).unwrap());
        let buffer = |bytes: usize| tcp::SocketBuffer::new(std::vec![0; bytes]);
        let mut socket = tcp::Socket::new(buffer(8192), buffer(128 << 10));
        // As `tcp::new_socket` sets them.
        socket.set_nagle_enabled(false);
        socket.set_ack_delay(None);
        socket.set_timeout(Some(Duration::from_secs(20)));
        socket.set_keep_alive(Some(Duration::from_secs(10)));
        socket.listen(OWN_PORT).unwrap();
        let mut sockets = SocketSet::new(Vec::new());
        let socket = sockets.add(socket);
        let detector = RefCell::new(LossDetector::new(OWN_MAC));
        let mut net = Net {
            now_ns: S,
            wire,
            interface,
            sockets,
            socket,
            detector,
            is_watched,
            peer,
            to_cell: VecDeque::new(),
            to_peer: VecDeque::new(),
            drops: Box::new(drops),
            written: 0,
            // Nothing is written before the connection is there.
            wanted: usize::MAX,
            sent_segments: Vec::new(),
        };
        let syn = net.peer.syn();
        net.say(syn);
        assert!(net.run(10 * MS, |net| net.state() == tcp::State::Established));
        net.wanted = wanted;
        net
    }

    pub(super) fn socket(&mut self) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(self.socket)
    }

    pub(super) fn state(&mut self) -> tcp::State {
        self.socket().state()
    }

    pub(super) fn losses(&self) -> u64 {
        self.detector.borrow().losses()
    }

    /// The peer sends a frame.
    pub(super) fn say(&mut self, frame: Vec<u8>) {
        self.to_cell.push_back((self.now_ns + DELAY_NS, frame));
    }

    pub(super) fn write(&mut self) {
        let (wanted, mut written) = (self.wanted, self.written);
        if wanted == usize::MAX {
            return;
        }
        let socket = self.socket();
        while written < wanted && socket.can_send() {
            let fill = |to: &mut [u8]| {
                let len = to.len().min(wanted - written);
                to[..len].iter_mut().enumerate().for_each(|(at, to)| *to = byte(written + at));
                (len, len)
            };
            written += socket.send(fill).unwrap();
        }
        if written == wanted && socket.may_send() {
            socket.close();
        }
        self.written = written;
    }

    /// One turn of the cell, as `stack::drive` has it.
    pub(super) fn turn(&mut self) {
        let now = Instant::from_micros((self.now_ns / 1000) as i64);
        if self.is_watched {
            let mut device = Watched { device: &mut self.wire, detector: &self.detector };
            self.interface.poll(now, &mut device, &mut self.sockets);
            self.write();
            let mut device = Watched { device: &mut self.wire, detector: &self.detector };
            self.interface.poll(now, &mut device, &mut self.sockets);
        } else {
            self.interface.poll(now, &mut self.wire, &mut self.sockets);
            self.write();
            self.interface.poll(now, &mut self.wire, &mut self.sockets);
        }
        for frame in self.wire.sent.drain(..) {
            self.to_peer.push_back((self.now_ns + DELAY_NS, frame));
        }
    }

    pub(super) fn peer_takes(&mut self, frame: &[u8]) {
        if let Ok(arp) = EthernetFrame::new_checked(frame).and_then(|f| ArpPacket::new_checked(f.payload()))
            && frame[12..14] == [8, 6]
        {
            if arp.operation() == ArpOperation::Request {
                let repr = ArpRepr::EthernetIpv4 {
                    operation: ArpOperation::Reply,
                    source_hardware_addr: PEER_MAC,
                    source_protocol_addr: PEER,
                    target_hardware_addr: OWN_MAC,
                    target_protocol_addr: OWN,
                };
                let answer = ethernet(EthernetProtocol::Arp, repr.buffer_len(), |to| {
                    repr.emit(&mut ArpPacket::new_unchecked(to));
                });
                self.say(answer);
            }
            return;
        }
        let Some(segment) = Segment::read(frame) else { return };
        if self.peer.is_mute {
            return;
        }
        if segment.rst {
            assert!(self.peer.may_be_reset, "the cell ended the connection");
            self.peer.is_reset = true;
            return;
        }
        if segment.syn {
            self.peer.first = segment.seq + 1;
            let ack = self.peer.ack();
            return self.say(ack);
        }
        if segment.payload_bytes == 0 && !segment.fin {
            return;
        }
        let is_known = |at: usize| segment.seq < self.peer.first + at;
        if segment.payload_bytes == 1 && (is_known(self.peer.taken) || !is_known(self.wanted)) {
            // A keep-alive: the byte before the next one, or before the one after the FIN.
            let ack = self.peer.ack();
            return self.say(ack);
        }
        let payload = &frame[frame.len() - segment.payload_bytes..];
        let start = segment.seq - self.peer.first;
        let is_right = payload.iter().enumerate().all(|(at, got)| *got == byte(start + at));
        assert!(is_right, "the stream is damaged at {start}");
        // The device cuts it into segments, each of which may be lost.
        for (at, piece) in payload.chunks(SEGMENT_BYTES).enumerate() {
            let from = start + at * SEGMENT_BYTES;
            let to = from + piece.len();
            self.sent_segments.push((from, to));
            if (self.drops)(from, to) {
                continue;
            }
            if to > self.peer.taken + self.peer.room_bytes.saturating_sub(self.peer.unread) {
                self.peer.is_closed = true;
                continue;
            }
            self.peer.take(from, to);
            if (at + 1).is_multiple_of(self.peer.acks_every) && to < start + payload.len() {
                let ack = self.peer.ack();
                self.say(ack);
            }
        }
        if segment.fin && self.peer.taken == start + segment.payload_bytes {
            self.peer.fin_taken = true;
        }
        let ack = self.peer.ack();
        self.say(ack);
    }

    /// Runs until `done`, or for `limit_ns`; returns whether it is done.
    pub(super) fn run(&mut self, limit_ns: u64, done: impl Fn(&mut Net) -> bool) -> bool {
        let end_ns = self.now_ns + limit_ns;
        loop {
            while self.to_cell.front().is_some_and(|(at, _)| *at <= self.now_ns) {
                let (_, frame) = self.to_cell.pop_front().unwrap();
                self.wire.received.push_back(frame);
            }
            self.turn();
            while self.to_peer.front().is_some_and(|(at, _)| *at <= self.now_ns) {
                let (_, frame) = self.to_peer.pop_front().unwrap();
                self.peer_takes(&frame);
            }
            if done(self) {
                return true;
            }
            let now = Instant::from_micros((self.now_ns / 1000) as i64);
            let stack_at = self.interface.poll_at(now, &self.sockets).map(|at| at.total_micros() as u64 * 1000);
            let detector_at = self.detector.borrow().poll_at().filter(|_| self.is_watched);
            let frames_at = [&self.to_cell, &self.to_peer].map(|queue| queue.front().map(|(at, _)| *at));
            let next = [stack_at, detector_at].into_iter().chain(frames_at).flatten().min().unwrap_or(end_ns);
            // A turn takes some time too.
            self.now_ns = next.max(self.now_ns + 1000).min(end_ns);
            if self.now_ns >= end_ns {
                return done(self);
            }
        }
    }

    /// The time until the peer has the whole stream; `None` where it has not within `limit_ns`.
    pub(super) fn transfer(&mut self, limit_ns: u64) -> Option<u64> {
        let start_ns = self.now_ns;
        let is_whole = self.run(limit_ns, |net| net.peer.taken == net.wanted);
        is_whole.then_some(self.now_ns - start_ns)
    }
}

/// Loses the segments that begin at these offsets, or behind, the first time each.
pub(super) fn once(mut offsets: Vec<usize>) -> impl FnMut(usize, usize) -> bool {
    move |from, to| {
        let hit = offsets.iter().position(|offset| (from..to).contains(offset));
        hit.map(|at| offsets.swap_remove(at)).is_some()
    }
}
