//! An attachment to an existing interface: a network card, a veth, by a packet socket on it.
//!
//! The network and what is behind the interface are one. Every frame that the interface receives
//! comes in, for any address. Frames for it go out with the addresses that guests gave them. It is
//! not a way between guests and the host's own stack. What the host itself sends on the interface
//! stays unseen, and what goes out here does not come up in the host (as with macvlan). The tap is
//! for that.
//!
//! What is carried: checksum and segmentation state (`PACKET_VNET_HDR`) both ways. A VLAN tag that
//! the kernel took out of a frame is put back in its place.
//!
//! Limits: [`SLOTS`] frames per call, of 65,557 bytes. What the kernel drops because the socket's
//! buffer is full is counted as `system_refused`.
//!
//! Life: a `Monitor` reports changes. The link is down while the interface is down or without its
//! carrier. When the interface is deleted, the port reports it once as a fault and waits until an
//! interface of its name is there again.
//!
//! Sending goes through the interface's queueing discipline, which queues while the device is busy.
//! `qdisc_bypass` goes past it: less work per frame, but frames are lost as soon as the device is
//! busy, and the host's captures do not see them.

use crate::link::{Condition, Interface, LinkError, LinkState, Monitor, Netns, drop_reason};
use crate::sys::{self, Headers, Piece, Received, Slots};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt;
use std::os::fd::OwnedFd;
use tombolo_ring::mem::Foreign;
use tombolo_switch::Nanos;
use tombolo_switch::detail::Details;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, Checksum, ETHERNET_HEADER_BYTES, Frame, MAX_FRAME_BYTES, Offload};
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, Port, Sent};
use tombolo_switch::vnet::VNET_HEADER_BYTES;
use tombolo_worker::reactor::{Registration, Watch};

/// Frames that one call receives.
pub const SLOTS: usize = 64;
/// Where a frame starts in its slot: behind the offload header and room for a VLAN tag.
const FRAME_AT: usize = 16;
const VLAN_TAG_BYTES: usize = 4;
/// Bytes of the two addresses, behind which a VLAN tag goes.
const ADDRESSES_BYTES: usize = 12;
/// From slot to slot. 37 cache lines more than a multiple of 4096, so that the first lines of all
/// slots do not share one set of the first-level cache.
const STRIDE_BYTES: usize = (FRAME_AT + MAX_FRAME_BYTES).next_multiple_of(4096) - 4096 + 37 * 64;
const _: () = assert!(STRIDE_BYTES >= FRAME_AT + MAX_FRAME_BYTES && STRIDE_BYTES % 4096 == 37 * 64);
/// The socket's buffer each way: some 1,500 frames of 1500 bytes as the kernel counts them.
const SOCKET_BYTES: u32 = 4 << 20;
/// How often a port that never sleeps looks whether its interface changed or the kernel dropped
/// frames.
const LOOK_INTERVAL: Nanos = Nanos(10_000_000);

/// Which interface, and how.
#[derive(Clone, Debug)]
pub struct PacketConfig {
    /// As `ip link` shows it.
    pub interface: String,
    /// The namespace that it is in.
    pub netns: Option<Netns>,
    /// Whether it is to receive frames for every address; a bridge of guests needs that on a
    /// network card.
    pub promiscuous: bool,
    /// Whether sending goes past the interface's queue; see the head of this module.
    pub qdisc_bypass: bool,
}

impl PacketConfig {
    /// The interface of that name in the calling thread's namespace, promiscuous.
    pub fn new(interface: &str) -> PacketConfig {
        PacketConfig { interface: interface.to_owned(), netns: None, promiscuous: true, qdisc_bypass: false }
    }
}

/// Why an interface could not be joined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum PacketError {
    /// The kernel gives no packet socket.
    #[error("a packet socket: {source}; that needs CAP_NET_RAW in the interface's namespace")]
    Socket { source: Errno },
    /// The socket cannot be used on the interface.
    #[error("{what} `{interface}`: {source}")]
    Join { what: &'static str, interface: String, source: Errno },
    /// The interface or its namespace.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// A port on an interface of the host, over an `AF_PACKET` socket.
pub struct PacketPort {
    socket: OwnedFd,
    _watch: Watch,
    registration: Registration,
    monitor: Monitor,
    name: String,
    index: u32,
    promiscuous: bool,
    qdisc_bypass: bool,
    condition: Condition,
    mtu: u32,
    pending: Option<Fault>,
    next_look: Nanos,
    /// Look at once, at any time.
    look_due: bool,
    /// Frames that the kernel dropped and that are not counted yet.
    uncounted: u64,
    slots: Slots,
    got: Vec<Received>,
    headers: Headers,
    vnet: Vec<[u8; VNET_HEADER_BYTES]>,
    pieces: Vec<Piece<'static>>,
    ends: Vec<usize>,
    linear: Vec<u8>,
}

impl PacketPort {
    /// Joins the interface, which has to exist.
    ///
    /// # Errors
    /// [`PacketError`].
    pub fn open(config: &PacketConfig, registration: Registration) -> Result<PacketPort, PacketError> {
        let netns = config.netns.as_ref();
        let index = Interface::open(netns, &config.interface)?.index()?;
        let socket = Netns::run_in(netns, || sys::packet_socket(true, config.qdisc_bypass))?;
        let socket = socket.map_err(|source| PacketError::Socket { source })?;
        let failed = |what| move |source| PacketError::Join { what, interface: config.interface.clone(), source };
        sys::set_buffers(&socket, SOCKET_BYTES).map_err(failed("setting the buffers of a socket on"))?;
        let monitor = Monitor::open(netns, &registration)?;
        let watch = registration.watch(&socket).map_err(failed("watching a socket on"))?;
        let mut port = PacketPort {
            socket,
            _watch: watch,
            registration,
            monitor,
            name: config.interface.clone(),
            index,
            promiscuous: config.promiscuous,
            qdisc_bypass: config.qdisc_bypass,
            condition: Condition::Down,
            mtu: 1500,
            pending: None,
            next_look: Nanos(0),
            look_due: false,
            uncounted: 0,
            slots: Slots::new(SLOTS, STRIDE_BYTES),
            got: Vec::with_capacity(SLOTS),
            headers: Headers::default(),
            vnet: Vec::new(),
            pieces: Vec::new(),
            ends: Vec::new(),
            linear: Vec::new(),
        };
        port.join(index).map_err(failed("binding to"))?;
        Ok(port)
    }

    fn join(&mut self, index: u32) -> Result<(), Errno> {
        sys::bind_packet(&self.socket, index)?;
        if self.promiscuous {
            sys::join_promiscuous(&self.socket, index)?;
        }
        self.index = index;
        // An error of the interface that is gone is none of this one.
        let _ = sockopt::socket_error(&self.socket);
        let state = self.monitor.state(&self.name);
        self.take_state(state);
        Ok(())
    }

    fn take_state(&mut self, state: Option<LinkState>) {
        if let Some(state) = state {
            self.condition = Condition::of(&state);
            self.mtu = state.mtu;
        }
    }

    /// Has the worker call [`Port::service`] before it sleeps: it looks at the link there and
    /// nowhere else.
    fn ask_for_service(&mut self) {
        self.look_due = true;
        self.registration.wake();
    }

    /// Something about links changed: look what.
    fn look(&mut self) {
        if self.condition != Condition::Gone {
            match self.monitor.name(self.index) {
                Some(name) => {
                    self.name = name;
                    let state = self.monitor.state(&self.name);
                    return self.take_state(state);
                }
                None => {
                    self.condition = Condition::Gone;
                    let detail =
                        format!("the interface `{}` was deleted; the port waits for one of that name", self.name);
                    self.pending = Some(Fault { kind: FaultKind::System, detail });
                }
            }
        }
        if let Some(index) = self.monitor.index(&self.name) {
            // One that goes again at once leaves the port as it is: the monitor tells of the next.
            let _ = self.join(index);
        }
    }

    fn pending(&mut self) -> Result<(), Fault> {
        self.pending.take().map_or(Ok(()), Err)
    }

    fn fault(&self, what: &str, errno: Errno) -> Fault {
        Fault { kind: FaultKind::System, detail: format!("{what} `{}`: {errno}", self.name) }
    }

    /// Sends `group`, whose pieces are few enough; counts each frame as sent or dropped. `false`
    /// where the socket has no room for more in this turn.
    fn send_group(&mut self, batch: &Batch<'_>, group: &[&Frame], sent: &mut Sent, drops: &mut Drops) -> bool {
        self.vnet.clear();
        self.vnet.extend(group.iter().map(|frame| host_order(frame.offload.to_vnet())));
        // A frame in too many pieces is a group of its own.
        let linear = scattered(batch, group[0]);
        if linear {
            self.linear.clear();
            batch.append_to(group[0], &mut self.linear);
        }
        let mut pieces = sys::recycle(std::mem::take(&mut self.pieces));
        self.ends.clear();
        for (frame, header) in group.iter().zip(&self.vnet) {
            pieces.push(Piece::from(&header[..]));
            if linear {
                pieces.push(Piece::from(&self.linear[..]));
            } else {
                pieces.push(Piece::from(frame.head()));
                pieces.extend(batch.tail(frame).iter().map(|piece| Piece::from(*piece)));
            }
            self.ends.push(pieces.len());
        }
        let mut room = true;
        let mut trouble = false;
        let (mut done, mut first_piece) = (0, 0);
        while done < group.len() {
            // The ends count from the first piece that is given.
            let ends: &[usize] = &self.ends[done..];
            let result = if first_piece == 0 {
                sys::send_many(&self.socket, &pieces, ends, &mut self.headers)
            } else {
                let shifted: Vec<usize> = ends.iter().map(|end| end - first_piece).collect();
                sys::send_many(&self.socket, &pieces[first_piece..], &shifted, &mut self.headers)
            };
            match result {
                Ok(n) => {
                    sent.frames += n as u64;
                    sent.bytes += group[done..done + n].iter().map(|frame| frame.len() as u64).sum::<u64>();
                    done += n;
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    drops.count(Reason::NoBuffer, (group.len() - done) as u64);
                    room = false;
                    break;
                }
                Err(errno) => {
                    let reason = drop_reason(errno);
                    drops.count(reason, 1);
                    trouble |= reason == Reason::LinkDown;
                    done += 1;
                }
            }
            first_piece = if done == 0 { 0 } else { self.ends[done - 1] };
        }
        self.pieces = sys::recycle(pieces);
        if trouble {
            // It may be up again already, which the next look finds.
            self.condition = Condition::Down;
            self.ask_for_service();
        }
        room
    }
}

/// Whether a frame, with its header, is in more pieces than one message may have.
fn scattered(batch: &Batch<'_>, frame: &Frame) -> bool {
    batch.tail(frame).len() + 2 > sys::MAX_PIECES
}

/// The header with the byte order of the host, which packet sockets use (tun has an option for it).
fn host_order(mut header: [u8; VNET_HEADER_BYTES]) -> [u8; VNET_HEADER_BYTES] {
    if cfg!(target_endian = "big") {
        header[2..].chunks_exact_mut(2).for_each(|word| word.reverse());
    }
    header
}

/// Puts a VLAN tag back behind the addresses of the frame at [`FRAME_AT`], whose beginning moves to
/// the front; the places that its offload state names move back with the rest.
fn insert_tag(slot: &mut [u8], [kind, control]: [u16; 2], offload: &mut Offload) -> usize {
    let at = FRAME_AT - VLAN_TAG_BYTES;
    slot.copy_within(FRAME_AT..FRAME_AT + ADDRESSES_BYTES, at);
    let tag = &mut slot[at + ADDRESSES_BYTES..FRAME_AT + ADDRESSES_BYTES];
    tag[..2].copy_from_slice(&kind.to_be_bytes());
    tag[2..].copy_from_slice(&control.to_be_bytes());
    if let Checksum::Partial { start, .. } = &mut offload.checksum {
        *start += VLAN_TAG_BYTES as u16;
    }
    if let Some(segmentation) = &mut offload.segmentation
        && segmentation.header_bytes != 0
    {
        segmentation.header_bytes = segmentation.header_bytes.saturating_add(VLAN_TAG_BYTES as u16);
    }
    at
}

impl Port for PacketPort {
    fn kind(&self) -> &'static str {
        "packet"
    }

    fn link(&self) -> Carrier {
        self.condition.link()
    }

    fn caps(&self) -> Caps {
        Caps::full(self.mtu)
    }

    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        if now >= self.next_look || self.look_due {
            self.next_look = now.after(LOOK_INTERVAL);
            let due = std::mem::take(&mut self.look_due);
            self.uncounted += u64::from(sys::packet_drops(&self.socket).unwrap_or(0));
            if self.monitor.changed(self.index, &self.name) || due {
                self.look();
            }
        }
        self.pending().map(|()| None)
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        let lost = self.uncounted.min(budget as u64);
        self.uncounted -= lost;
        drops.count(Reason::SystemRefused, lost);
        let mut used = lost as usize;
        let room = (budget - used).min(SLOTS);
        if room == 0 {
            return Ok(used);
        }
        // The header ends where the frame starts.
        let header_at = FRAME_AT - VNET_HEADER_BYTES;
        match self.slots.receive(&self.socket, room, header_at, &mut self.got) {
            Ok(()) => {}
            Err(Errno::AGAIN) => return Ok(used),
            Err(Errno::INTR) => return Ok(budget),
            // A frame whose segmentation the header cannot express (tunnels; before Linux 6.2 UDP);
            // the kernel has dropped it.
            Err(Errno::INVAL) => {
                drops.count(Reason::SystemRefused, 1);
                return Ok(budget);
            }
            // The interface went down or away; the look finds out which.
            Err(Errno::NETDOWN | Errno::NXIO | Errno::NODEV) => {
                self.ask_for_service();
                return Ok(used);
            }
            Err(errno) => return Err(self.fault("receiving on", errno)),
        }
        used += self.got.len();
        for (slot, got) in self.slots.chunks_mut().zip(&self.got) {
            let frame_bytes = got.bytes.saturating_sub(VNET_HEADER_BYTES);
            if got.truncated || frame_bytes + VLAN_TAG_BYTES > MAX_FRAME_BYTES {
                drops.count(Reason::TooLong, 1);
                continue;
            }
            if frame_bytes < ETHERNET_HEADER_BYTES {
                drops.count(Reason::Runt, 1);
                continue;
            }
            let header = slot[header_at..].first_chunk().copied().map_or([0; VNET_HEADER_BYTES], host_order);
            match Offload::from_vnet(&header, frame_bytes) {
                Ok(mut offload) => {
                    let start = match got.vlan {
                        Some(tag) => insert_tag(slot, tag, &mut offload),
                        None => FRAME_AT,
                    };
                    batch.push(Foreign::from(&slot[start..FRAME_AT + frame_bytes]), offload);
                }
                Err(reason) => drops.count(reason, 1),
            }
        }
        // With every slot filled there is no telling whether there is more.
        Ok(if self.got.len() == SLOTS { budget } else { used })
    }

    fn release(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        let max_bytes = self.caps().max_frame_bytes as usize;
        let frames = batch.frames();
        let mut group: Vec<&Frame> = Vec::with_capacity(which.len());
        let mut rest = which.iter().map(|i| &frames[*i as usize]).peekable();
        while rest.peek().is_some() {
            if self.condition != Condition::Up {
                drops.count(Reason::LinkDown, rest.count() as u64);
                break;
            }
            group.clear();
            while let Some(frame) = rest.peek() {
                if frame.len() > max_bytes && frame.offload.segmentation.is_none() {
                    drops.count(Reason::TooLong, 1);
                } else if !group.is_empty() && (scattered(batch, frame) || scattered(batch, group[0])) {
                    break;
                } else {
                    group.push(frame);
                }
                rest.next();
            }
            if group.is_empty() {
                break;
            }
            if !self.send_group(batch, &group, &mut sent, drops) {
                drops.count(Reason::NoBuffer, rest.count() as u64);
                break;
            }
        }
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        self.pending()
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        // Wake-ups are always on; this is the second look, at the frames and at the interface in
        // one call.
        let seen = self.monitor.poll(&self.socket).map_err(|errno| self.fault("polling", errno))?;
        let Some((socket, links)) = seen else { return Ok(true) };
        if links || socket.contains(PollFlags::ERR) {
            // The error is only that the interface went down, which the look tells better.
            let _ = sockopt::socket_error(&self.socket);
            self.ask_for_service();
            return Ok(true);
        }
        Ok(socket.contains(PollFlags::IN))
    }

    fn disarm(&mut self) {}

    fn reset(&mut self, _fault: &Fault) {
        // Nothing is held for the kernel; what state the interface is in decides how it goes on.
        self.look();
        self.pending = None;
    }

    fn details(&self) -> Details {
        vec![
            ("interface", self.name.clone().into()),
            ("index", self.index.into()),
            ("state", self.condition.to_string().into()),
            ("mtu", self.mtu.into()),
            ("promiscuous", self.promiscuous.into()),
            ("qdisc_bypass", self.qdisc_bypass.into()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{Fixture, Rig, frame, number, partial_frame, plain, same};
    use crate::kernel_side::{self, Attachment, KernelFixture};
    use crate::pair::OwnedFrame;
    use tombolo_switch::frame::SegmentKind;

    /// The peer is at the far end of a pair of interfaces.
    struct Veth;

    type PacketFixture = KernelFixture<Veth>;

    impl Attachment for Veth {
        const KIND: &str = "packet";
        const PEER: &str = "vb";

        fn open(netns: &Netns, registration: Registration) -> Box<dyn Port> {
            Veth::connect(netns);
            let config = PacketConfig { netns: Some(netns.clone()), ..PacketConfig::new("va") };
            Box::new(PacketPort::open(&config, registration).unwrap())
        }

        fn connect(netns: &Netns) {
            kernel_side::run(netns, "ip link add va type veth peer name vb");
            kernel_side::run(netns, "ip link set vb up");
            kernel_side::run(netns, "ip link set va up");
            kernel_side::await_carrier(netns, "vb");
        }
    }

    mod conformance {
        crate::conformance_suite!(super::PacketFixture);
    }

    #[test]
    fn a_vlan_tag_is_put_back_and_the_offload_state_follows() {
        crate::conformance::run::<PacketFixture>("a_vlan_tag_is_put_back", |_| {
            let mut rig = Rig::<PacketFixture>::up();
            // The veth takes the tag out of what is sent with one, as network cards do.
            let inner = partial_frame(1, 1000, SegmentKind::Tcp4, None);
            let mut tagged = inner.bytes.clone();
            tagged.splice(12..12, [0x81, 0x00, 0x20, 0x05]);
            let checksum = Checksum::Partial { start: 38, offset: 16 };
            let offload = Offload { checksum, segmentation: None };
            let frames = [OwnedFrame { bytes: tagged, offload }, inner];
            rig.receive_all(&frames);
            same(&frames, &rig.received);
            rig.deliver(&frames[1..]);
        });
    }

    #[test]
    fn the_link_follows_the_interface_and_its_carrier_and_the_mtu_is_taken_over() {
        crate::conformance::run::<PacketFixture>("the_link_follows_the_interface", |_| {
            let mut rig = Rig::<PacketFixture>::up();
            for (line, link) in [
                ("ip link set va down", Carrier::Down),
                ("ip link set va up", Carrier::Up),
                ("ip link set vb down", Carrier::Down),
                ("ip link set vb up", Carrier::Up),
            ] {
                kernel_side::run(&rig.peer.netns, line);
                rig.until_woken(line, |rig| rig.seen == Some(link));
            }
            rig.receive_all(&plain(0, [60, 1514]));
            kernel_side::run(&rig.peer.netns, "ip link set va name vc mtu 9000");
            rig.until_woken("the MTU is taken over", |rig| rig.port.caps().max_frame_bytes == 9018);
            assert!(rig.port.details().contains(&("interface", "vc".into())));
            assert!(rig.faults.is_empty(), "{:?}", rig.faults);
        });
    }

    #[test]
    fn what_the_kernel_drops_for_want_of_room_is_counted() {
        crate::conformance::run::<PacketFixture>("what_the_kernel_drops_is_counted", |_| {
            let mut rig = Rig::<PacketFixture>::up();
            rig.settle();
            let sent = 20_000;
            for n in 0..sent {
                while !rig.peer.inject(&frame(n, 1400), Offload::NONE) {
                    std::thread::yield_now();
                }
            }
            rig.until("each frame is received or counted", |rig| {
                rig.received.len() as u64 + rig.rx_drops.of(Reason::SystemRefused) == u64::from(sent)
            });
            assert!(rig.rx_drops.of(Reason::SystemRefused) > 0, "{:?}", rig.rx_drops);
            let numbers: Vec<_> = rig.received.iter().filter_map(|f| number(&f.bytes)).collect();
            assert!(numbers.windows(2).all(|w| w[0] < w[1]), "the order is kept");
        });
    }
}
