//! A network device of a virtual machine, whose VMM is a vhost-user frontend: QEMU, Cloud
//! Hypervisor, crosvm, or DPDK's virtio-user. We are the backend.
//!
//! # Theory of operation
//!
//! The frontend connects over a Unix socket (or listens there, and we connect). It hands over the
//! guest's memory as file descriptors, says where in it the virtqueues are, and gives an eventfd
//! for each direction of wake-ups. From then on frames go between guest and worker through the
//! rings, and the frontend is not involved.
//!
//! ```text
//!   control thread (control.rs)             worker (this file, ring.rs)
//!   ---------------------------             ---------------------------
//!   reads messages, blocking                polls rings
//!   checks, maps memory
//!   posts a command, waits         ──────►  service(): carries it out, answers
//!   answers the frontend           ◄──────
//!                                           fault: shuts the socket down
//!   reads the end of the stream    ◄──────
//!   waits for the next frontend
//! ```
//!
//! So a slow or hostile frontend blocks only its own control thread. The worker's cost is one
//! relaxed load per turn.
//!
//! # Rings
//!
//! Ring 2k carries frames *to* the guest (its receive queue), ring 2k+1 frames *from* it, for queue
//! pair k. Frames to a guest with several enabled pairs are spread by a hash of addresses and
//! ports, so that a flow stays in order.
//!
//! # Life of a ring
//!
//! | from | by | to |
//! | --- | --- | --- |
//! | stopped | size, address, base, then the kick descriptor | running |
//! | running | SET_VRING_ENABLE 1 | running and open; before that nothing is taken from it |
//! | open | SET_VRING_ENABLE 0 | shut: frames are lost as `disabled` or `link_down` |
//! | running | GET_VRING_BASE | stopped, when the worker has let go of it |
//! | running | new memory | stopped, then running at the same index |
//! | any | connection closed, fault | stopped; memory unmapped |
//!
//! The worker would be using what changes, so these are refused: size, address, base or kick
//! descriptor of a running ring; features while any ring runs.
//!
//! A frontend that comes back goes through the same steps. It is a restarted VMM, or the same guest
//! after *we* were restarted. A ring that has been in use continues at its used index, and the base
//! that the frontend remembers is ignored. Frames are answered in order, so nothing is done behind
//! that index, and the guest's driver loses nothing. For this reason no in-flight log is kept.
//!
//! # Restart of the daemon
//! With a place in the fd store ([`Shelf`]) the connection, the memory and the eventfds outlive
//! this process. The control thread stores the state after each message, and marks it as in doubt
//! while it handles one. The next daemon continues at the used index, and sends the frontend no
//! message. See docs/upgrade.md.
//!
//! # Limits
//!
//! 32 memory regions of 1 TiB in all, in memfds, tmpfs or hugetlbfs; 128 queue pairs; chains of 1
//! MiB and 128 segments; eventfds for kick and call, which cannot be made to block us. Not offered:
//! packed rings, migration, RSS.

mod control;
mod kept;
mod mailbox;
mod memory;
mod message;
mod ring;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use tombolo_ivshmem::fd_store::StoredRecord;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::virtio::net::{HEADER_BYTES, SHORT_HEADER_BYTES, features as net_features};
use tombolo_ring::virtio::{DeviceQueue, RingError, features as ring_features};
use tombolo_shm::doorbell::Doorbell;
use tombolo_switch::Nanos;
use tombolo_switch::detail::{Detail, Details};
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, Frame};
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, HandOver, MAX_RINGS, Port, Rechecked, Sent};

use crate::spread::{Spread, queue_of};
use control::Connection;
pub use kept::Shelf;
use mailbox::{Answer, Command, Mailbox, StartRing};
use memory::GuestTable;
use ring::{Framing, Gate, Ring, Segments, recycle};
use tombolo_worker::reactor::Registration;

/// Most queue pairs of a port.
pub const MAX_QUEUE_PAIRS: u16 = 128;

/// Where the frontend is met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Socket {
    /// We listen at this path, and frontends connect (QEMU's `chardev socket,…,reconnect=1`).
    Listen(PathBuf),
    /// The frontend listens at this path (QEMU's `server=on`), and we connect, again and again.
    Connect(PathBuf),
}

/// How a port is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUserConfig {
    /// Where the frontend is met.
    pub socket: Socket,
    /// Queue pairs that are offered, 1 to [`MAX_QUEUE_PAIRS`].
    pub queue_pairs: u16,
    /// The network's MTU in bytes.
    pub mtu: u32,
}

/// Why a port could not be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum OpenError {
    #[error("vhost-user socket {path}: {source}")]
    Socket { path: PathBuf, source: io::Error },
    /// An impossible number of queue pairs.
    #[error("{got} queue pairs, expected 1 to {MAX_QUEUE_PAIRS}")]
    QueuePairs {
        /// The number asked for.
        got: u16,
    },
    /// The control thread.
    #[error("starting the control thread of a vhost-user port: {0}")]
    Thread(io::Error),
}

/// Whether ring `index` carries frames from the guest.
const fn is_from_guest(index: usize) -> bool {
    index % 2 == 1
}

#[derive(Debug, Default)]
struct Pair {
    to_guest: Option<Ring>,
    from_guest: Option<Ring>,
}

impl Pair {
    fn ring_mut(&mut self, index: usize) -> &mut Option<Ring> {
        if is_from_guest(index) { &mut self.from_guest } else { &mut self.to_guest }
    }

    fn is_open_to_guest(&self) -> bool {
        self.to_guest.as_ref().is_some_and(|ring| ring.gate == Gate::Open)
    }

    /// The ring to the guest, if frames may go there.
    #[inline]
    fn open_to_guest(&mut self) -> Option<&mut Ring> {
        self.to_guest.as_mut().filter(|ring| ring.gate == Gate::Open)
    }
}

/// A port whose peer is a vhost-user frontend with its guest. See the module's head.
#[derive(Debug)]
pub struct VhostUserPort {
    config: VhostUserConfig,
    mailbox: Arc<Mailbox>,
    stop: Arc<Doorbell>,
    /// Disconnected when the control thread has ended.
    thread_ends: Option<mpsc::Receiver<()>>,
    /// The listening socket once more, for the next daemon.
    listener: Option<OwnedFd>,
    /// The frontend's socket, to end the connection from here.
    connection: Option<UnixStream>,
    memory: Arc<GuestTable>,
    features: u64,
    framing: Framing,
    pairs: Vec<Pair>,
    /// The pair that is asked first for frames, next time.
    first_pair: usize,
    /// Reused allocations.
    received: Segments<Foreign<'static>>,
    buffers: Segments<ForeignMut<'static>>,
    spread: Spread,
}

impl VhostUserPort {
    /// Opens the port's socket and waits for a frontend, in a thread of its own. `registration` is
    /// the port's in its worker's reactor.
    ///
    /// # Errors
    /// [`OpenError`]; a listening socket whose path already has a listener is refused, a stale one
    /// is taken over.
    pub fn open(config: VhostUserConfig, registration: Registration) -> Result<VhostUserPort, OpenError> {
        Self::open_kept(config, registration, None)
    }

    /// As [`VhostUserPort::open`], with a place in the fd store: the connection is kept there, and
    /// one that an earlier daemon left there goes on.
    ///
    /// # Errors
    /// As for [`VhostUserPort::open`]. A connection that cannot go on is closed, and the frontend
    /// connects again.
    pub fn open_kept(
        config: VhostUserConfig,
        registration: Registration,
        shelf: Option<Shelf>,
    ) -> Result<VhostUserPort, OpenError> {
        if !(1..=MAX_QUEUE_PAIRS).contains(&config.queue_pairs) {
            return Err(OpenError::QueuePairs { got: config.queue_pairs });
        }
        let path = match &config.socket {
            Socket::Listen(path) | Socket::Connect(path) => path.clone(),
        };
        let socket = |source| OpenError::Socket { path: path.clone(), source };
        let kept_listener = shelf.as_ref().and_then(Shelf::take_listener);
        let source = control::FrontendSource::open(&config.socket, kept_listener).map_err(socket)?;
        let stop = Arc::new(Doorbell::new().map_err(|error| socket(error.into()))?);
        let mailbox = Arc::new(Mailbox::new(registration));
        let mut port = VhostUserPort {
            pairs: (0..config.queue_pairs).map(|_| Pair::default()).collect(),
            mailbox: mailbox.clone(),
            stop: stop.clone(),
            thread_ends: None,
            listener: source.listener(),
            connection: None,
            memory: Arc::new(GuestTable::empty()),
            features: 0,
            framing: Framing {
                header_bytes: HEADER_BYTES,
                mergeable: false,
                checksums: false,
                max_frame_bytes: Caps::plain(config.mtu).max_frame_bytes as usize,
            },
            first_pair: 0,
            received: Vec::new(),
            buffers: Vec::new(),
            spread: Spread::default(),
            config: config.clone(),
        };
        let restored = shelf.as_ref().and_then(|shelf| port.take_up(shelf));
        let (running, ends) = mpsc::channel();
        let run = move || {
            let _running: mpsc::Sender<()> = running;
            control::run(&config, &source, &mailbox, &stop, shelf.as_ref(), restored);
        };
        std::thread::Builder::new().name("vhost-user".into()).spawn(run).map_err(OpenError::Thread)?;
        port.thread_ends = Some(ends);
        Ok(port)
    }

    /// Goes on with the connection that an earlier daemon kept, if there is one that can go on.
    fn take_up(&mut self, shelf: &Shelf) -> Option<(UnixStream, Connection)> {
        let record = shelf.take()?;
        let stream = record.fds.first().and_then(|fd| fd.try_clone().ok()).map(UnixStream::from)?;
        match self.restore(record) {
            Ok(connection) => {
                shelf.keep(&stream, &connection);
                Some((stream, connection))
            }
            Err(why) => {
                shelf.give_up(&why);
                let _ = stream.shutdown(std::net::Shutdown::Both);
                self.connection = None;
                drop(self.let_go());
                None
            }
        }
    }

    /// Carries out what the control thread would have had carried out step by step.
    fn restore(&mut self, record: StoredRecord) -> Result<Connection, String> {
        let (stream, mut connection) = kept::read(record, &self.config, self.mailbox.clone())?;
        let starts: Result<Vec<_>, _> = (0..connection.rings.len()).map(|index| connection.prepare(index)).collect();
        let starts: Vec<StartRing> = starts.map_err(|error| error.to_string())?.into_iter().flatten().collect();
        let mut commands = vec![Command::Connected(stream)];
        commands.extend(connection.features.map(Command::Features));
        commands.push(Command::Memory(connection.memory.clone()));
        let calls: Vec<_> = starts.iter().filter_map(|start| start.call.clone()).collect();
        for start in &starts {
            connection.started(start.index);
        }
        commands.extend(starts.into_iter().map(|start| Command::Start(Box::new(start))));
        for command in commands {
            if let Answer::Refused(why) = self.carry_out(command, &mut None) {
                return Err(why);
            }
        }
        // What was signalled, or not, before the daemon before ended is not known. One signal too
        // many does no harm.
        for call in calls {
            call.ring();
        }
        Ok(connection)
    }

    fn carry_out(&mut self, command: Command, fault: &mut Option<Fault>) -> Answer {
        match command {
            Command::Connected(stream) => {
                self.connection = Some(stream);
                Answer::Done
            }
            Command::Closed(reason) => {
                *fault = reason;
                self.connection = None;
                Answer::Old(self.let_go())
            }
            // After a fault the connection still runs down; nothing of it is taken up again.
            _ if self.connection.is_none() => Answer::Refused("the port was reset".into()),
            Command::Features(features) => {
                self.features = features;
                let modern = features & ring_features::VERSION_1 != 0;
                let mergeable = features & net_features::MRG_RXBUF != 0;
                let header_bytes = if modern || mergeable { HEADER_BYTES } else { SHORT_HEADER_BYTES };
                let checksums = features & net_features::GUEST_CSUM != 0;
                self.framing = Framing { header_bytes, mergeable, checksums, ..self.framing };
                Answer::Done
            }
            Command::Memory(table) => Answer::Old(std::mem::replace(&mut self.memory, table)),
            Command::Start(start) => match self.start(*start) {
                Ok(()) => Answer::Done,
                Err((index, error)) => Answer::Refused(format!("ring {index}: {error}")),
            },
            Command::Stop { index } => {
                let ring = self.pairs.get_mut(index / 2).and_then(|pair| pair.ring_mut(index).take());
                match ring {
                    // Nothing is held: a turn ends with `release` and `flush`. If it were, it
                    // counts as not taken.
                    Some(mut ring) => {
                        ring.queue.forget_held();
                        Answer::Base(ring.queue.next_avail())
                    }
                    None => Answer::Done,
                }
            }
            Command::Enable { index, enabled } => {
                if let Some(ring) = self.ring_mut(index) {
                    ring.gate = match (enabled, ring.gate) {
                        (true, _) => Gate::Open,
                        (false, Gate::Waiting) => Gate::Waiting,
                        (false, _) => Gate::Shut,
                    };
                }
                Answer::Done
            }
            Command::Call { index, call } => {
                if let Some(ring) = self.ring_mut(index) {
                    // What was signalled the old way while the frontend changed over may have gone
                    // nowhere, and with event indices would not be signalled again.
                    ring.queue.forget_signals();
                    if let Some(call) = &call {
                        call.ring();
                    }
                    ring.call = call;
                }
                Answer::Done
            }
        }
    }

    fn ring_mut(&mut self, index: usize) -> Option<&mut Ring> {
        self.pairs.get_mut(index / 2)?.ring_mut(index).as_mut()
    }

    fn start(&mut self, start: StartRing) -> Result<(), (usize, RingError)> {
        let StartRing { index, queue, base, call, kick, enabled } = start;
        let run = |memory: &GuestTable| {
            let mut queue = DeviceQueue::new(&queue)?;
            queue.resume(memory, base)?;
            // Rings from the guest are armed when the worker stops polling; those to the guest
            // never need a kick.
            queue.disarm(memory)?;
            Ok(queue)
        };
        let queue = run(&self.memory).map_err(|error| (index, error))?;
        if let Some(pair) = self.pairs.get_mut(index / 2) {
            *pair.ring_mut(index) = Some(Ring {
                queue,
                call,
                _kick: kick,
                lens: Vec::new(),
                gate: if enabled { Gate::Open } else { Gate::Waiting },
                wants_recheck: false,
            });
        }
        Ok(())
    }

    /// Drops all rings and returns the memory, which the control thread unmaps.
    fn let_go(&mut self) -> Arc<GuestTable> {
        for pair in &mut self.pairs {
            *pair = Pair::default();
        }
        self.features = 0;
        std::mem::replace(&mut self.memory, Arc::new(GuestTable::empty()))
    }
}

/// A fault of ring `index`, or of the memory below it: what is read from lost memory is no word of
/// the guest's.
#[cold]
fn ring_fault(memory: &GuestTable, index: usize, error: RingError) -> Fault {
    match memory_fault(memory) {
        Some(fault) => fault,
        None => Fault { kind: FaultKind::Ring, detail: format!("ring {index}: {error}") },
    }
}

#[cold]
fn memory_fault(memory: &GuestTable) -> Option<Fault> {
    memory.is_lost().then(|| Fault {
        kind: FaultKind::Memory,
        detail: "pages of the guest's memory are gone: its file was truncated, or has no space".into(),
    })
}

impl Port for VhostUserPort {
    fn kind(&self) -> &'static str {
        "vhost-user"
    }

    fn link(&self) -> Carrier {
        let open = |ring: &Option<Ring>| ring.as_ref().is_some_and(|ring| ring.gate == Gate::Open);
        if self.pairs.iter().any(|pair| open(&pair.to_guest) && open(&pair.from_guest)) {
            Carrier::Up
        } else {
            Carrier::Down
        }
    }

    fn caps(&self) -> Caps {
        let has = |bit| self.features & bit != 0;
        let checksum = has(net_features::GUEST_CSUM);
        Caps {
            checksum,
            tso4: checksum && has(net_features::GUEST_TSO4),
            tso6: checksum && has(net_features::GUEST_TSO6),
            ecn: checksum && has(net_features::GUEST_ECN),
            ..Caps::plain(self.config.mtu)
        }
    }

    fn service(&mut self, _now: Nanos) -> Result<Option<Nanos>, Fault> {
        let mut fault = None;
        let mailbox = self.mailbox.clone();
        mailbox.serve(|command| self.carry_out(command, &mut fault));
        match fault {
            Some(fault) => Err(fault),
            None => Ok(None),
        }
    }

    #[inline]
    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        let memory: &'m GuestTable = &self.memory;
        let mut segments: Segments<Foreign<'m>> = std::mem::take(&mut self.received);
        let pairs = self.pairs.len();
        let mut taken = 0;
        let mut fault = None;
        for turn in 0..pairs {
            let pair = (self.first_pair + turn) % pairs;
            let Some(ring) = &mut self.pairs[pair].from_guest else { continue };
            match ring.receive(memory, self.framing, budget - taken, batch, drops, &mut segments) {
                Ok(got) => taken += got,
                Err(error) => {
                    fault = Some(ring_fault(memory, 2 * pair + 1, error));
                    break;
                }
            }
        }
        self.first_pair = (self.first_pair + 1) % pairs;
        self.received = recycle(segments);
        match fault.or_else(|| memory_fault(memory)) {
            Some(fault) => Err(fault),
            None => Ok(taken),
        }
    }

    #[inline]
    fn release(&mut self) -> Result<(), Fault> {
        let memory = &*self.memory;
        for (pair, rings) in self.pairs.iter_mut().enumerate() {
            if let Some(ring) = &mut rings.from_guest {
                ring.release(memory).map_err(|error| ring_fault(memory, 2 * pair + 1, error))?;
            }
        }
        Ok(())
    }

    #[inline]
    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let VhostUserPort { memory, pairs, framing, buffers, spread, .. } = self;
        let memory = &**memory;
        let mut segments: Segments<ForeignMut<'_>> = std::mem::take(buffers);
        let mut sent = Sent::default();
        let open = pairs.iter_mut().filter_map(Pair::open_to_guest).count();
        let mut fault = None;
        let lists = if open > 1 { spread.sort(batch, which, open) } else { &[] };
        let rings = pairs.iter_mut().enumerate().filter_map(|(pair, rings)| Some((pair, rings.open_to_guest()?)));
        for (turn, (pair, ring)) in rings.enumerate() {
            // With one pair there is nothing to sort.
            let which = lists.get(turn).map_or(which, Vec::as_slice);
            let result = ring.transmit(memory, *framing, batch, which, drops, &mut segments);
            match result {
                Ok(Sent { frames, bytes }) => {
                    sent.frames += frames;
                    sent.bytes += bytes;
                }
                Err(error) => {
                    fault = Some(ring_fault(memory, 2 * pair, error));
                    break;
                }
            }
        }
        *buffers = recycle(segments);
        if let Some(fault) = fault.or_else(|| memory_fault(memory)) {
            // What was written is never published; the caller counts everything that `drops` does
            // not hold.
            return Err(fault);
        }
        if open == 0 {
            drops.count(Reason::LinkDown, which.len() as u64);
        }
        Ok(sent)
    }

    fn ring_of(&self, frame: &Frame) -> u8 {
        let open = self.pairs.iter().filter(|pair| pair.is_open_to_guest()).count();
        (queue_of(frame, open) % MAX_RINGS) as u8
    }

    #[inline]
    fn flush(&mut self) -> Result<(), Fault> {
        let memory = &*self.memory;
        for (pair, rings) in self.pairs.iter_mut().enumerate() {
            if let Some(ring) = &mut rings.to_guest {
                ring.flush(memory).map_err(|error| ring_fault(memory, 2 * pair, error))?;
            }
        }
        Ok(())
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        let memory = &*self.memory;
        let mut more = false;
        for (pair, rings) in self.pairs.iter_mut().enumerate() {
            if let Some(ring) = &mut rings.from_guest {
                more |= ring.arm(memory).map_err(|error| ring_fault(memory, 2 * pair + 1, error))?;
            }
        }
        Ok(more)
    }

    #[inline]
    fn take_recheck(&mut self) -> bool {
        let mut wanted = false;
        for rings in &mut self.pairs {
            for ring in [&mut rings.to_guest, &mut rings.from_guest].into_iter().flatten() {
                wanted |= std::mem::take(&mut ring.wants_recheck);
            }
        }
        wanted
    }

    fn recheck(&mut self) -> Result<Rechecked, Fault> {
        let memory = &*self.memory;
        let mut found = Rechecked::default();
        for (pair, rings) in self.pairs.iter_mut().enumerate() {
            let broken = |index| move |error| ring_fault(memory, index, error);
            if let Some(ring) = &mut rings.to_guest {
                found.signalled |= ring.recheck_signal(memory).map_err(broken(2 * pair))?;
            }
            if let Some(ring) = &mut rings.from_guest {
                found.signalled |= ring.recheck_signal(memory).map_err(broken(2 * pair + 1))?;
                found.work |= ring.recheck_work(memory).map_err(broken(2 * pair + 1))?;
            }
        }
        Ok(found)
    }

    fn disarm(&mut self) {
        for ring in self.pairs.iter_mut().filter_map(|pair| pair.from_guest.as_mut()) {
            // A ring whose memory is gone says so at the next receive.
            let _ = ring.queue.disarm(&*self.memory);
        }
    }

    fn reset(&mut self, _fault: &Fault) {
        if let Some(connection) = self.connection.take() {
            // The control thread reads the end of the stream, and says that the connection is
            // closed.
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        let memory = self.let_go();
        self.mailbox.discard(memory);
    }

    fn hand_over(&self) -> Option<HandOver> {
        // The connection itself is in the store all the time.
        let listener = self.listener.as_ref()?.try_clone().ok()?;
        Some(HandOver { state: Vec::new(), fds: vec![listener] })
    }

    fn details(&self) -> Details {
        let rings = self.pairs.iter().flat_map(|pair| [&pair.to_guest, &pair.from_guest]).flatten();
        let sizes = rings.map(|ring| ring.queue.size().into()).collect();
        let memory: u64 = self.memory.regions().iter().map(|region| region.bytes).sum();
        let runs = self.pairs.iter().any(|pair| pair.to_guest.is_some());
        let hint = mtu_hint(self.config.mtu, self.features).filter(|_| runs).map(|hint| ("hint", hint.into()));
        let mut details = vec![
            ("frontend", if self.connection.is_some() { "connected" } else { "none" }.into()),
            ("features", format!("{:#x}", self.features).into()),
            ("ring_sizes", Detail::Numbers(sizes)),
            ("memory_bytes", memory.into()),
            ("memory_regions", self.memory.regions().len().into()),
        ];
        details.extend(hint);
        details
    }
}

/// How long the end of a port waits for that of its control thread.
const THREAD_END: Duration = Duration::from_millis(500);

/// What is to be said of a guest whose driver did not take the network's MTU from the device.
/// Ethernet's own needs no taking.
fn mtu_hint(mtu: u32, features: u64) -> Option<String> {
    const ETHERNET_MTU: u32 = 1500;
    (mtu != ETHERNET_MTU && features & net_features::MTU == 0).then(|| {
        format!(
            "the guest's driver did not take the network's MTU of {mtu} from its device (VIRTIO_NET_F_MTU); unless DHCP sets it, \
             set it in the guest (ip link set eth0 mtu {mtu}), or frames are dropped as too long or stay short"
        )
    })
}

impl Drop for VhostUserPort {
    fn drop(&mut self) {
        self.mailbox.close();
        self.stop.ring();
        if let Some(connection) = self.connection.take() {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        // The control thread sees the stop doorbell, the stream that was shut down, or the mailbox
        // that was closed, and ends by itself, usually at once. Unmapping a large guest takes time,
        // and ports are dropped by the control plane, so it is not waited for without end.
        if let Some(ends) = self.thread_ends.take() {
            let _ = ends.recv_timeout(THREAD_END);
        }
        if let Socket::Listen(path) = &self.config.socket {
            let _ = std::fs::remove_file(path);
        }
    }
}
