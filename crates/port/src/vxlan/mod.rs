//! A VXLAN tunnel (RFC 7348) over plain UDP sockets, without any privilege. It continues a network
//! on other machines. The other end may be this port, the kernel's vxlan device, Open vSwitch or
//! flannel (Cilium was not tried).
//!
//! # Where frames go
//! A frame goes to the remote that the control plane named for its address ([`Directory`]), else to
//! the remote from which that address was seen, else to all remotes, one copy each (head-end
//! replication). What comes from a remote goes to the members of this machine only: the switch
//! gives a port nothing that came from it, so tunnels between all pairs of machines make no loop. A
//! tunnel is no place for a spanning tree or for two tunnels into one network.
//!
//! # What is answered here
//! The control plane may say as well which IP addresses the members on other machines have. Then
//! ARP requests and neighbour solicitations for them, which the switch floods to this port, do not
//! go into the tunnel: the port answers them, as if the holder had. So a question costs no packet
//! on the way, and has an answer although the way is gone for a while. At most [`MAX_WAITING`]
//! answers wait for the worker; beyond that questions go to the remotes again. See `answer` for
//! what is a question.
//!
//! # What is accepted
//! Packets from the addresses of configured remotes, with the network's identifier. Others are
//! dropped, each under its reason. That is no protection from a machine on the way that forges
//! source addresses: VXLAN has no authentication. Put it on a network that you trust, or on
//! WireGuard.
//!
//! # A hostile remote
//! It can send whatever an unguarded member can, since nothing in a frame proves where it comes
//! from. It cannot displace other remotes: table entries and the traffic to groups are shared
//! fairly (`table`, `share`), and the details of the port name a remote that wants more. Not
//! divided is what the switch allows the port as a whole: frames to unknown addresses, and copies
//! of all flooded frames. What it sends at once is bounded by the kernel's receive buffer, which
//! all remotes share; only a firewall below divides that.
//!
//! # MTU
//! The headers of the tunnel take 50 bytes of the path's MTU, with IPv6 70. Outer packets are never
//! sent in fragments (RFC 7348 §4.3): a frame that is too long for the path is dropped as
//! `tunnel_too_long`.
//!
//! # Sockets
//! One socket receives, at the local address and port. [`FLOWS`] others send, each from its own
//! port, chosen by the inner flow, so that routers and network cards spread flows and keep their
//! order. Equal frames of a turn for one remote go to the kernel as one message, which it cuts
//! (UDP_SEGMENT), unless it cannot. What comes is taken in such messages too (UDP_GRO), where the
//! other end or the network card has joined it: a message is then the frames of several turns.
//!
//! # Not carried
//! Offloads: checksums and segments are finished before (the switch does it). The kernel of the
//! *same* machine may hand over inner packets whose checksum it has not finished, since it never
//! leaves that for a network card: as tests in namespaces have it, `ethtool -K INTERFACE tx off`
//! below the kernel's tunnel.
//!
//! # Life
//! The link is up while an interface of this machine that is up has the local address. A remote
//! that does not listen is not noticed.

mod answer;
mod directory;
mod share;
mod table;

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::ops::Range;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt;
use tombolo_ring::mem::Foreign;
use tombolo_ring::vxlan::{self, HEADER_BYTES, Vni};
use tombolo_switch::Nanos;
use tombolo_switch::detail::{Detail, Details};
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, ETHERNET_HEADER_BYTES, Frame, MAX_FRAME_BYTES, Mac, Offload};
use tombolo_switch::limit::Storm;
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, HandOver, Port, Sent};

use crate::link::{Condition, Interface, LinkError, Monitor, Netns, drop_reason};
use crate::sys::udp::{self, Datagram, Inbox, MAX_SEGMENTS, Message, Outbox};
use crate::sys::{self, Piece};
pub use answer::{Answer, answer_to};
use directory::Known;
pub use directory::{Directory, MAX_ADDRESSES, MAX_PLACES, Places};
use share::Shares;
use table::Table;
pub use table::{AGE, MAX_ENTRIES};
use tombolo_worker::reactor::{Registration, Watch};

/// Messages that one call receives.
pub const SLOTS: usize = 64;
/// Sockets that send.
pub const FLOWS: usize = 4;
/// Remotes of one tunnel: each frame without a known destination is copied so often.
pub const MAX_REMOTES: usize = 128;
/// Answers that may wait to be received by the worker.
pub const MAX_WAITING: usize = 256;
/// From slot to slot: the longest frame, and cache lines so that the slots' beginnings do not share
/// one set.
const STRIDE_BYTES: usize = (HEADER_BYTES + MAX_FRAME_BYTES).next_multiple_of(4096) - 4096 + 37 * 64;
const _: () = assert!(STRIDE_BYTES >= HEADER_BYTES + MAX_FRAME_BYTES);
const SOCKET_BYTES: u32 = 4 << 20;
/// How often a port that never sleeps looks for changed interfaces.
const LOOK_INTERVAL: Nanos = Nanos(10_000_000);
/// How often it is looked whether the local address is there again.
const ABSENT_INTERVAL: Nanos = Nanos(1_000_000_000);
/// The state that is handed over: a version.
const HANDED: &[u8] = b"vxlan 1";
/// A message that the kernel cuts is at most as long as a UDP datagram.
const MAX_MESSAGE_BYTES: usize = 65_000;

/// A tunnel.
#[derive(Clone, Debug)]
pub struct VxlanConfig {
    /// The network's identifier.
    pub vni: Vni,
    /// Where it receives. Not an unspecified address: the other ends know this one.
    pub local: SocketAddr,
    /// The other ends, 1 to [`MAX_REMOTES`], of the same family.
    pub remotes: Vec<SocketAddr>,
    /// The MTU of the network within, in bytes.
    pub mtu: u32,
    /// Whether it learns from what comes which remote has which address; otherwise every frame goes
    /// to all of them.
    pub learning: bool,
    /// What the control plane says of the members at the remotes.
    pub directory: Directory,
    /// What the remotes may send to groups, all together.
    pub storm: Storm,
    /// The namespace of the sockets.
    pub netns: Option<Netns>,
}

/// Why a tunnel could not be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum VxlanError {
    /// The remotes.
    #[error("a tunnel has 1 to {MAX_REMOTES} remotes, found {0}")]
    Remotes(usize),
    /// One of the remotes.
    #[error("the remote {remote}: expected another address than {local}, of its family, and each remote once")]
    Remote { remote: SocketAddr, local: SocketAddr },
    /// No other end could answer.
    #[error("the local address {0} is none that others can send to; expected one of this machine's")]
    Local(SocketAddr),
    /// A socket.
    #[error("{what} {address}: {source}")]
    Socket { what: &'static str, address: SocketAddr, source: std::io::Error },
    /// The namespace.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// The MTU of the path from `local` to `remote` in bytes, as this machine's kernel knows it; the
/// network's has to leave room for [`vxlan::overhead_bytes`]. Nothing is sent.
///
/// # Errors
/// If `local` is no address of this machine, or there is no route.
pub fn path_mtu(local: IpAddr, remote: SocketAddr) -> std::io::Result<u32> {
    udp::path_mtu(local, remote)
}

/// What becomes of a frame in a [`VxlanPort::transmit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// No copy of it was tried.
    Open,
    Sent,
    Lost(Reason),
}

/// A copy of a frame for one remote.
#[derive(Clone, Copy)]
struct Copied {
    /// Its place among the frames of the turn.
    frame: u16,
    /// Where its pieces end.
    end: usize,
}

/// What one socket sends in a turn.
#[derive(Default)]
struct Flow {
    pieces: Vec<Piece<'static>>,
    messages: Vec<Message>,
    /// How many of the copies each message has.
    counts: Vec<usize>,
    copies: Vec<Copied>,
    /// Bytes of the last message, and whether a shorter datagram has ended it.
    bytes: usize,
    is_closed: bool,
}

/// A port whose peers are the ends of a tunnel. See the module's head.
pub struct VxlanPort {
    config: VxlanConfig,
    header: [u8; HEADER_BYTES],
    receiver: UdpSocket,
    senders: Vec<UdpSocket>,
    _watch: Watch,
    registration: Registration,
    monitor: Monitor,
    /// The interface that has the local address.
    interface: Option<(String, u32)>,
    condition: Condition,
    next_look: Nanos,
    look_due: bool,
    now: Nanos,
    table: Table,
    shares: Shares,
    /// The kernel cuts messages into datagrams.
    cuts: bool,
    /// The kernel joins datagrams that come.
    joins: bool,
    inbox: Inbox,
    /// What the inbox holds, and which slot and byte of it is next.
    got: Vec<Datagram>,
    next: (usize, usize),
    /// Datagrams in a message, as the last call had them.
    joined: usize,
    outbox: Outbox,
    flows: Vec<Flow>,
    fates: Vec<Fate>,
    known: Known,
    /// Answers that the worker has not received yet.
    waiting: VecDeque<Answer>,
    /// Those that the current turn's batch looks into.
    answering: Vec<Answer>,
    arp_answers: u64,
    nd_answers: u64,
}

impl VxlanPort {
    /// Opens the tunnel's sockets. `handed` is what an earlier port left ([`Port::hand_over`]): its
    /// socket receives on, so that no packet is lost meanwhile, if it is at the same address.
    ///
    /// # Errors
    /// [`VxlanError`]: bad remotes, or a local address or port that cannot be had.
    pub fn open(
        config: &VxlanConfig,
        registration: Registration,
        handed: Option<HandOver>,
    ) -> Result<VxlanPort, VxlanError> {
        let VxlanConfig { local, remotes, .. } = config;
        if local.ip().is_unspecified() || local.ip().is_multicast() || local.port() == 0 {
            return Err(VxlanError::Local(*local));
        }
        if remotes.is_empty() || remotes.len() > MAX_REMOTES {
            return Err(VxlanError::Remotes(remotes.len()));
        }
        for (at, remote) in remotes.iter().enumerate() {
            let ip = remote.ip();
            let is_wrong =
                ip.is_ipv6() != local.is_ipv6() || ip == local.ip() || ip.is_unspecified() || ip.is_multicast();
            if is_wrong || remote.port() == 0 || remotes[..at].iter().any(|other| other.ip() == ip) {
                return Err(VxlanError::Remote { remote: *remote, local: *local });
            }
        }
        let netns = config.netns.as_ref();
        let open = |port: u16| {
            let address = SocketAddr::new(local.ip(), port);
            let failed = |what| move |source| VxlanError::Socket { what, address, source };
            let socket = UdpSocket::bind(address).map_err(failed("receiving at"))?;
            socket.set_nonblocking(true).map_err(failed("O_NONBLOCK of a socket at"))?;
            let refused = |what| move |errno: Errno| VxlanError::Socket { what, address, source: errno.into() };
            sys::set_buffers(&socket, SOCKET_BYTES).map_err(refused("setting the buffers of a socket at"))?;
            udp::never_fragment(&socket, local.is_ipv6()).map_err(refused("IP_MTU_DISCOVER of a socket at"))?;
            Ok::<_, VxlanError>(socket)
        };
        let handed = handed.filter(|handed| handed.state == HANDED).and_then(|handed| handed.fds.into_iter().next());
        let handed = handed.map(UdpSocket::from).filter(|socket| socket.local_addr().is_ok_and(|at| at == *local));
        let sockets = Netns::run_in(netns, || {
            let receiver = handed.map_or_else(|| open(local.port()), Ok)?;
            let senders = (0..FLOWS).map(|_| open(0)).collect::<Result<Vec<_>, _>>()?;
            Ok::<_, VxlanError>((receiver, senders))
        })?;
        let (receiver, senders) = sockets?;
        let monitor = Monitor::with_addresses(netns, &registration)?;
        let joins = udp::join(&receiver).is_ok();
        let watch = registration.watch(&receiver).map_err(|errno| VxlanError::Socket {
            what: "watching a socket at",
            address: *local,
            source: errno.into(),
        })?;
        let known = Known::new(config.directory.clone(), registration.clone());
        let mut port = VxlanPort {
            header: vxlan::header(config.vni),
            config: config.clone(),
            receiver,
            senders,
            _watch: watch,
            registration,
            monitor,
            interface: None,
            condition: Condition::Down,
            next_look: Nanos(0),
            look_due: false,
            now: Nanos(0),
            table: Table::new(config.remotes.len()),
            shares: Shares::new(config.remotes.len(), config.storm),
            cuts: true,
            joins,
            inbox: Inbox::new(SLOTS, STRIDE_BYTES),
            got: Vec::with_capacity(SLOTS),
            next: (0, 0),
            joined: 1,
            outbox: Outbox::default(),
            flows: (0..FLOWS).map(|_| Flow::default()).collect(),
            fates: Vec::new(),
            known,
            waiting: VecDeque::with_capacity(MAX_WAITING),
            answering: Vec::with_capacity(MAX_WAITING),
            arp_answers: 0,
            nd_answers: 0,
        };
        port.look();
        port.look_up_places();
        Ok(port)
    }

    /// Which interface has the local address, and its state.
    fn look(&mut self) {
        let (netns, local) = (self.config.netns.as_ref(), self.config.local.ip());
        let found = Netns::run_in(netns, || udp::interface_of(local)).ok().and_then(Result::ok).flatten();
        self.interface = found.and_then(|name| {
            let index = Interface::open(netns, &name).and_then(|interface| interface.index()).ok()?;
            Some((name, index))
        });
        let state = self.interface.as_ref().and_then(|(name, _)| self.monitor.state(name));
        self.condition = state.as_ref().map_or(Condition::Gone, Condition::of);
    }

    /// Whether the inbox holds datagrams that no turn has taken.
    fn has_more(&self) -> bool {
        self.next.0 < self.got.len()
    }

    /// Takes what the control plane has left.
    fn look_up_places(&mut self) {
        let remotes = &self.config.remotes;
        self.known.look(|end| remotes.iter().position(|remote| remote.ip() == end).map(|at| at as u16));
        self.table.leave_room_for(self.known.len().0);
        if let Some(storm) = self.known.storm() {
            self.shares.set_storm(storm);
        }
    }

    /// Whether `frame`, which would go to all remotes, was a question that has its answer now.
    fn has_answered(&mut self, frame: &Frame) -> bool {
        let is_whole = frame.len() == frame.head().len();
        if !is_whole || self.waiting.len() >= MAX_WAITING {
            return false;
        }
        let known = &self.known;
        let Some(answer) = answer_to(frame.head(), frame.offload.checksum, |address| known.holder(address)) else {
            return false;
        };
        match answer {
            Answer::Arp(_) => self.arp_answers += 1,
            Answer::Neighbour(_) => self.nd_answers += 1,
        }
        self.waiting.push_back(answer);
        true
    }

    /// Has the worker call [`Port::service`], which looks at the interfaces.
    fn ask_for_service(&mut self) {
        self.look_due = true;
        self.registration.wake();
    }

    fn fault(&self, what: &str, errno: Errno) -> Fault {
        Fault { kind: FaultKind::System, detail: format!("{what} the tunnel at {}: {errno}", self.config.local) }
    }

    /// The remote that a packet came from.
    fn remote_of(&self, from: Option<SocketAddr>) -> Option<u16> {
        let ip = from?.ip();
        self.config.remotes.iter().position(|remote| remote.ip() == ip).map(|at| at as u16)
    }

    /// Sends what `flow` holds, and notes what became of each frame. Returns whether the interface
    /// may have gone.
    fn send_flow(&mut self, at: usize, flow: &Flow, pieces: &[Piece<'_>]) -> bool {
        let (mut done, mut first_piece, mut first_copy, mut is_gone) = (0, 0, 0, false);
        while done < flow.messages.len() {
            let message = flow.messages[done];
            let sent = self.outbox.send(&self.senders[at], pieces, first_piece, &flow.messages[done..]);
            let messages = match sent {
                Ok(n) => n,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN | Errno::NOBUFS) => flow.messages.len() - done,
                Err(_) => 1,
            };
            let copies = first_copy..first_copy + flow.counts[done..done + messages].iter().sum::<usize>();
            if let Err(errno @ (Errno::MSGSIZE | Errno::INVAL | Errno::IO)) = sent
                && message.segment != 0
            {
                // Without checksums of the device, or before Linux 4.18, the kernel does not cut.
                self.cuts &= errno == Errno::MSGSIZE;
                for copy in copies.clone() {
                    let end = flow.copies[copy].end;
                    let single = [Message { to: message.to, end, segment: 0 }];
                    let sent = loop {
                        match self.outbox.send(&self.senders[at], pieces, first_piece, &single) {
                            Err(Errno::INTR) => {}
                            sent => break sent,
                        }
                    };
                    is_gone |= self.note(&flow.copies[copy..=copy], sent);
                    first_piece = end;
                }
            } else {
                is_gone |= self.note(&flow.copies[copies.clone()], sent);
            }
            first_copy = copies.end;
            done += messages;
            first_piece = flow.messages[done - 1].end;
        }
        is_gone
    }

    /// Notes what became of copies of frames. Returns whether the interface may have gone.
    fn note(&mut self, copies: &[Copied], sent: Result<usize, Errno>) -> bool {
        let (fate, is_gone) = match sent {
            Ok(_) => (Fate::Sent, false),
            Err(Errno::MSGSIZE) => (Fate::Lost(Reason::TunnelTooLong), false),
            // No route there; other remotes may have one.
            Err(Errno::NETUNREACH | Errno::HOSTUNREACH) => (Fate::Lost(Reason::LinkDown), false),
            Err(Errno::ADDRNOTAVAIL) => (Fate::Lost(Reason::LinkDown), true),
            Err(errno) => {
                let reason = drop_reason(errno);
                (Fate::Lost(reason), reason == Reason::LinkDown)
            }
        };
        for copy in copies {
            let known = &mut self.fates[copy.frame as usize];
            // One copy that went is enough for a frame that has several.
            if *known != Fate::Sent {
                *known = fate;
            }
        }
        is_gone
    }
}

/// Mixes bytes into a hash, eight at a time.
fn mix(hash: u64, bytes: Option<&[u8]>) -> u64 {
    let words = bytes.unwrap_or_default().chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    // The multiplier of Fibonacci hashing: 2^64 over the golden ratio.
    words.fold(hash, |hash, word| (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_right(29))
}

/// Which socket sends a frame: the same for all packets of a flow within. What is no IP has one
/// socket, which keeps its order.
fn flow_of(frame: &Frame) -> usize {
    let head = frame.head();
    let at = ETHERNET_HEADER_BYTES;
    let hash = match (head.get(12..14), head.get(at)) {
        // Addresses, and ports where they follow at once; fragments have none.
        (Some([0x08, 0x00]), Some(0x45)) => {
            let is_whole = head.get(at + 6..at + 8).is_some_and(|field| field[0] & 0x3f == 0 && field[1] == 0);
            let has_ports = is_whole && matches!(head.get(at + 9), Some(6 | 17));
            mix(0, head.get(at + 12..at + if has_ports { 24 } else { 20 }))
        }
        (Some([0x86, 0xdd]), Some(_)) => {
            let has_ports = matches!(head.get(at + 6), Some(6 | 17));
            mix(0, head.get(at + 8..at + if has_ports { 44 } else { 40 }))
        }
        _ => return 0,
    };
    (hash >> 32) as usize % FLOWS
}

impl Port for VxlanPort {
    fn kind(&self) -> &'static str {
        "vxlan"
    }

    fn link(&self) -> Carrier {
        self.condition.link()
    }

    fn caps(&self) -> Caps {
        Caps::plain(self.config.mtu)
    }

    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        self.now = now;
        self.look_up_places();
        let is_up = self.condition == Condition::Up;
        if now >= self.next_look || self.look_due {
            self.next_look = now.after(if is_up { LOOK_INTERVAL } else { ABSENT_INTERVAL });
            let due = std::mem::take(&mut self.look_due) || !is_up;
            let (name, index) = self.interface.as_ref().map_or(("", 0), |(name, index)| (name, *index));
            if self.monitor.changed(index, name) || due {
                self.look();
            }
        }
        // An address that comes later than its interface is reported by nothing that is watched.
        Ok((self.condition != Condition::Up).then(|| now.after(ABSENT_INTERVAL)))
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        // At most half of a turn, so that members that ask much do not hold up what comes from the
        // remotes.
        let answers = self.waiting.len().min(budget.div_ceil(2));
        self.answering.clear();
        self.answering.extend(self.waiting.drain(..answers));
        for answer in &self.answering {
            batch.push(Foreign::from(answer.bytes()), Offload::NONE);
        }
        let room = (budget - answers).min(SLOTS);
        if room == 0 {
            return Ok(budget);
        }
        let mut is_full = false;
        if !self.has_more() {
            self.next = (0, 0);
            // About as many as this turn takes, so that the rest is not read from a cold cache.
            let count = room.div_ceil(self.joined);
            match self.inbox.receive(&self.receiver, count, &mut self.got) {
                Ok(()) => {}
                Err(Errno::AGAIN) => return Ok(answers),
                // What is reported of an earlier datagram says nothing of those that wait.
                Err(Errno::INTR | Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH) => return Ok(budget),
                Err(errno) => return Err(self.fault("receiving on", errno)),
            }
            let datagrams: usize = self.got.iter().map(|got| got.bytes.div_ceil(got.segment.max(1)).max(1)).sum();
            self.joined = datagrams.div_ceil(self.got.len().max(1)).max(1);
            is_full = self.got.len() == count;
        }
        // No segmented frame comes out of a tunnel.
        batch.set_may_merge();
        let mut used = 0;
        let got = std::mem::take(&mut self.got);
        let (mut slot, mut at) = self.next;
        // Whose frame the last one was: those of one flow come together.
        let mut known = None;
        while used < room && slot < got.len() {
            let (datagram, from, begin) = (&got[slot], slot, at);
            let bytes = datagram.bytes.min(STRIDE_BYTES);
            // What the kernel has joined stays together, so that the switch can merge all of it.
            let segments = bytes.div_ceil(datagram.segment.max(1));
            if begin == 0 && used != 0 && segments > room - used {
                break;
            }
            let end = bytes.min(begin + datagram.segment);
            let is_last = end == bytes;
            (slot, at) = if is_last { (slot + 1, 0) } else { (slot, end) };
            used += 1;
            let packet = &self.inbox.slot(from)[begin..end];
            let Some(remote) = self.remote_of(datagram.from) else {
                drops.count(Reason::UnknownRemote, 1);
                continue;
            };
            match vxlan::parse(packet) {
                Ok(vni) if vni == self.config.vni => {}
                Ok(_) => {
                    drops.count(Reason::WrongVni, 1);
                    continue;
                }
                Err(_) => {
                    drops.count(Reason::BadTunnel, 1);
                    continue;
                }
            }
            let frame = &packet[HEADER_BYTES..];
            if datagram.truncated && is_last || frame.len() > MAX_FRAME_BYTES {
                drops.count(Reason::TooLong, 1);
                continue;
            }
            let Some(source) = frame
                .get(6..12)
                .and_then(|mac| Mac::try_from(mac).ok())
                .filter(|_| frame.len() >= ETHERNET_HEADER_BYTES)
            else {
                drops.count(Reason::Runt, 1);
                continue;
            };
            let destination = frame.first_chunk().copied().unwrap_or_default();
            if !self.shares.admit(remote, destination, self.now) {
                drops.count(Reason::RemoteStorm, 1);
                continue;
            }
            // The control plane's members need no place. Other addresses have one also where
            // nothing is learned from them: a machine that sends from ever new ones would push
            // those of the others out of the switch's table.
            if known != Some((source, remote)) {
                let is_placed = self.known.remote(source) == Some(remote);
                if !is_placed && !self.table.learn(source, remote, self.now) {
                    self.shares.refused[usize::from(remote)].addresses += 1;
                    drops.count(Reason::RemoteAddresses, 1);
                    continue;
                }
                known = Some((source, remote));
            }
            batch.push(Foreign::from(frame), Offload::NONE);
        }
        (self.got, self.next) = (got, (slot, at));
        // With every slot filled there is no telling whether there is more.
        Ok(if is_full || self.has_more() { budget } else { answers + used })
    }

    fn release(&mut self) -> Result<(), Fault> {
        self.answering.clear();
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        if self.condition != Condition::Up {
            drops.count(Reason::LinkDown, which.len() as u64);
            return Ok(sent);
        }
        let max_bytes = self.caps().max_frame_bytes as usize;
        let header = self.header;
        let mut flows = std::mem::take(&mut self.flows);
        let mut lists: [Vec<Piece<'_>>; FLOWS] =
            std::array::from_fn(|at| sys::recycle(std::mem::take(&mut flows[at].pieces)));
        self.fates.clear();
        // Where the last frame went: those of one flow come together.
        let mut known = None;
        for (place, index) in which.iter().enumerate() {
            let frame = &batch.frames()[*index as usize];
            if frame.len() > max_bytes || frame.offload.segmentation.is_some() {
                self.fates.push(Fate::Lost(Reason::TooLong));
                continue;
            }
            let destination = frame.destination();
            let is_group = destination[0] & 1 != 0;
            if is_group && self.known.answers_any() && self.has_answered(frame) {
                self.fates.push(Fate::Sent);
                continue;
            }
            self.fates.push(Fate::Open);
            let at = flow_of(frame);
            let (flow, pieces) = (&mut flows[at], &mut lists[at]);
            let remote = match known {
                Some((mac, remote)) if mac == destination => remote,
                _ => {
                    let placed = if is_group { None } else { self.known.remote(destination) };
                    let learned = || if self.config.learning { self.table.find(destination, self.now) } else { None };
                    let remote = placed.or_else(learned);
                    known = Some((destination, remote));
                    remote
                }
            };
            let remotes = match remote {
                Some(remote) => remote as usize..remote as usize + 1,
                None => 0..self.config.remotes.len(),
            };
            for to in &self.config.remotes[remotes] {
                let begin = pieces.len();
                pieces.push(Piece::from(&header[..]));
                pieces.push(Piece::from(frame.head()));
                pieces.extend(batch.tail(frame).iter().map(|piece| Piece::from(*piece)));
                flow.add(*to, frame.len() + HEADER_BYTES, begin..pieces.len(), place as u16, self.cuts);
            }
        }
        let mut is_gone = false;
        for (at, flow) in flows.iter_mut().enumerate() {
            let pieces = std::mem::take(&mut lists[at]);
            is_gone |= self.send_flow(at, flow, &pieces);
            flow.pieces = sys::recycle(pieces);
            flow.messages.clear();
            flow.counts.clear();
            flow.copies.clear();
        }
        self.flows = flows;
        for (index, fate) in which.iter().zip(&self.fates) {
            match fate {
                Fate::Sent => {
                    sent.frames += 1;
                    sent.bytes += batch.frames()[*index as usize].len() as u64;
                }
                Fate::Lost(reason) => drops.count(*reason, 1),
                // A tunnel has at least one remote.
                Fate::Open => drops.count(Reason::SystemRefused, 1),
            }
        }
        if is_gone {
            self.ask_for_service();
        }
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn answers(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        if self.answers() || self.has_more() {
            return Ok(true);
        }
        let seen = self.monitor.poll(&self.receiver).map_err(|errno| self.fault("polling", errno))?;
        let Some((socket, links)) = seen else { return Ok(true) };
        if links {
            self.ask_for_service();
            return Ok(true);
        }
        if socket.contains(PollFlags::ERR) {
            // Of a datagram that was sent; it is not asked what became of that.
            let _ = sockopt::socket_error(&self.receiver);
        }
        Ok(socket.contains(PollFlags::IN))
    }

    fn disarm(&mut self) {}

    fn reset(&mut self, _fault: &Fault) {
        self.waiting.clear();
        self.answering.clear();
        self.got.clear();
        self.look();
    }

    /// The socket that receives. What was learned is learned again.
    fn hand_over(&self) -> Option<HandOver> {
        let socket = self.receiver.try_clone().ok()?;
        Some(HandOver { state: HANDED.to_vec(), fds: vec![socket.into()] })
    }

    fn details(&self) -> Details {
        let VxlanConfig { vni, local, remotes, mtu, learning, .. } = &self.config;
        let remotes = remotes.iter().map(SocketAddr::to_string).collect();
        vec![
            ("vni", vni.get().into()),
            ("local", local.to_string().into()),
            ("remotes", Detail::Texts(remotes)),
            ("interface", self.interface.as_ref().map_or("none", |(name, _)| name.as_str()).into()),
            ("state", self.condition.to_string().into()),
            ("mtu", (*mtu).into()),
            ("learning", (*learning).into()),
            ("addresses", self.table.len().into()),
            ("addresses_max", self.table.most().into()),
            ("addresses_refused", self.table.refused.into()),
            ("limited_remotes", Detail::Texts(self.shares.named(&self.config.remotes))),
            ("cut_by_kernel", self.cuts.into()),
            ("joined_by_kernel", self.joins.into()),
            ("places", self.known.len().0.into()),
            ("places_max", MAX_PLACES.into()),
            ("answered_addresses", self.known.len().1.into()),
            ("arp_answers", self.arp_answers.into()),
            ("nd_answers", self.nd_answers.into()),
        ]
    }
}

impl Flow {
    /// Adds a copy of a frame: a datagram of `bytes`, with these pieces. It is a part of the last
    /// message where that goes to the same remote and its datagrams are as long, the last of them
    /// excepted, which may be shorter.
    fn add(&mut self, to: SocketAddr, bytes: usize, pieces: Range<usize>, frame: u16, cuts: bool) {
        let end = pieces.end;
        self.copies.push(Copied { frame, end });
        let begin = self.messages.len().checked_sub(2).map_or(0, |before| self.messages[before].end);
        if let (Some(last), Some(count)) = (self.messages.last_mut(), self.counts.last_mut()) {
            let segment = if last.segment == 0 { self.bytes } else { last.segment.into() };
            let fits = cuts
                && last.to == to
                && !self.is_closed
                && bytes <= segment
                && *count < MAX_SEGMENTS
                && self.bytes + bytes <= MAX_MESSAGE_BYTES
                && end - begin <= sys::MAX_PIECES;
            if fits {
                (last.segment, last.end) = (segment as u16, end);
                self.bytes += bytes;
                self.is_closed = bytes < segment;
                *count += 1;
                return;
            }
        }
        self.messages.push(Message { to, end, segment: 0 });
        self.counts.push(1);
        self.bytes = bytes;
        self.is_closed = false;
    }
}

#[cfg(test)]
mod tests;
