//! The control side of a port: the socket, the protocol's messages, and the life of connections. A
//! thread of its own.
//!
//! The frontend is as hostile as its guest. What it says is checked here, and what concerns rings
//! and memory is handed to the worker through the mailbox. A message that breaks the protocol ends
//! the connection with a counted fault; the thread then waits for the next frontend, which is how a
//! restarted VMM comes back.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, listen, recv, socket_with,
};
use rustix::time::Timespec;
use tombolo_ring::virtio::split::check_size;
use tombolo_ring::virtio::{QueueConfig, features as ring_features, net::features as net_features};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::passing;
use tombolo_switch::port::{Fault, FaultKind};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use super::kept::Shelf;
use super::mailbox::{Answer, Command, Gone, Mailbox, StartRing};
use super::memory::{GuestRegion, GuestTable, MAX_REGIONS};
use super::message::{MAX_BODY_BYTES, Message, word};
use super::{Socket, VhostUserConfig, is_from_guest};

/// Longest chain that is taken: a frame with the largest header, and room for a driver's padding.
/// Frames longer than the switch carries are dropped one by one; only what is beyond all reason
/// breaks the ring.
const MAX_CHAIN_BYTES: u32 = 1 << 20;
/// Most segments of a chain that is taken: Linux has up to 47, a frame of 64 KiB in pages and its
/// headers.
const MAX_CHAIN_SEGMENTS: u16 = 128;
/// Frontends that may wait to be accepted.
const BACKLOG: i32 = 16;
/// Time from one attempt to reach a frontend that listens to the next; it doubles with each.
const FIRST_RETRY: Duration = Duration::from_millis(10);
/// The longest time; a connection that lasted so long makes the next time the first again.
const LONGEST_RETRY: Duration = Duration::from_secs(1);

/// Feature bits that are offered. Not among them: MAC, STATUS and link announcements, which VMMs
/// answer themselves; UFO and USO, which nothing here can cut.
pub(super) fn offered_features(config: &VhostUserConfig) -> u64 {
    use net_features as net;
    let base = ring_features::VERSION_1
        | ring_features::EVENT_IDX
        | ring_features::INDIRECT_DESC
        | ring_features::IN_ORDER
        | net::MRG_RXBUF
        | net::MTU
        | net::CSUM
        | net::GUEST_CSUM
        | net::HOST_TSO4
        | net::HOST_TSO6
        | net::HOST_ECN
        | net::GUEST_TSO4
        | net::GUEST_TSO6
        | net::GUEST_ECN
        // The control queue is the frontend's own business, which it may offer only if the backend
        // does not object.
        | net::CTRL_VQ
        | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    if config.queue_pairs > 1 { base | net::MQ } else { base }
}

/// Protocol features that are offered. Not among them:
/// * INFLIGHT_SHMFD: rings are answered in order, so the used index alone tells what is not done;
/// * LOG_SHMFD and what else belongs to migration.
fn offered_protocol_features() -> VhostUserProtocolFeatures {
    VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::MTU
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
}

/// What the frontend said of a ring.
#[derive(Debug, Default)]
pub(super) struct ControlRing {
    pub(super) size: u32,
    /// Descriptor table, available ring, used ring; in the frontend's address space.
    pub(super) addresses: Option<[u64; 3]>,
    pub(super) base: u16,
    pub(super) kick: Option<Doorbell>,
    pub(super) call: Option<Arc<Doorbell>>,
    /// What the frontend said last; a ring of which it said nothing is enabled unless protocol
    /// features were agreed on.
    pub(super) enabled: Option<bool>,
    /// The worker runs it.
    running: bool,
}

/// The state of one connection.
pub(super) struct Connection {
    mailbox: Arc<Mailbox>,
    offered: u64,
    pub(super) features: Option<u64>,
    pub(super) protocol_features: u64,
    queue_pairs: u32,
    mtu: u32,
    pub(super) memory: Arc<GuestTable>,
    pub(super) rings: Vec<ControlRing>,
}

/// Why a request was refused, in words.
pub(super) fn refused(text: impl Into<String>) -> Error {
    Error::ReqHandlerError(io::Error::other(text.into()))
}

fn unsupported<T>(what: &'static str) -> Result<T> {
    Err(Error::InvalidOperation(what))
}

impl Connection {
    pub(super) fn new(config: &VhostUserConfig, mailbox: Arc<Mailbox>) -> Connection {
        Connection {
            mailbox,
            offered: offered_features(config),
            features: None,
            protocol_features: 0,
            queue_pairs: config.queue_pairs.into(),
            mtu: config.mtu,
            memory: Arc::new(GuestTable::empty()),
            rings: (0..2 * config.queue_pairs).map(|_| ControlRing::default()).collect(),
        }
    }

    fn post(&self, command: Command) -> Result<Answer> {
        match self.mailbox.post(command) {
            Ok(Answer::Refused(why)) => Err(refused(why)),
            Ok(answer) => Ok(answer),
            Err(Gone) => Err(refused("the port is gone")),
        }
    }

    fn ring(&mut self, index: u32) -> Result<&mut ControlRing> {
        let rings = self.rings.len();
        let ring = self.rings.get_mut(index as usize);
        ring.ok_or_else(|| refused(format!("ring {index} of {rings}")))
    }

    /// As [`Connection::ring`], for what must not change while the ring runs.
    fn stopped_ring(&mut self, index: u32, what: &str) -> Result<&mut ControlRing> {
        let ring = self.ring(index)?;
        if ring.running {
            return Err(refused(format!("{what} of ring {index} was changed while it runs")));
        }
        Ok(ring)
    }

    /// Starts a ring of which all is known: its kick descriptor comes last.
    ///
    /// The protocol has a ring start with the first kick. It is started with the descriptor here,
    /// as DPDK's backend does: a driver that polls need never kick, and looking at a ring that is
    /// set up does no harm.
    fn start(&mut self, index: usize) -> Result<()> {
        if let Some(start) = self.prepare(index)? {
            self.post(Command::Start(Box::new(start)))?;
            self.rings[index].running = true;
        }
        Ok(())
    }

    /// Everything that starting a ring takes; `None` for one that runs, or of which not all is
    /// known.
    pub(super) fn prepare(&self, index: usize) -> Result<Option<StartRing>> {
        let features = self.features.unwrap_or(0);
        let ring = &self.rings[index];
        let (Some(addresses), Some(kick), false) = (ring.addresses, &ring.kick, ring.running) else { return Ok(None) };
        let translate = |address| {
            let found = self.memory.guest_address(address);
            found.ok_or_else(|| refused(format!(
                    "ring {index} at {address:#x} is in no memory region; is the guest's memory shared (QEMU: memory-backend-memfd,share=on)?"
                )))
        };
        let queue = QueueConfig {
            size: ring.size,
            descriptors: translate(addresses[0])?,
            available: translate(addresses[1])?,
            used: translate(addresses[2])?,
            features,
            max_chain_bytes: MAX_CHAIN_BYTES,
            max_chain_segments: MAX_CHAIN_SEGMENTS,
        };
        let kick = if is_from_guest(index) {
            let watch = self.mailbox.registration().watch(kick);
            Some(watch.map_err(|error| refused(format!("the kick descriptor of ring {index}: {error}")))?)
        } else {
            None
        };
        let enabled = ring.enabled.unwrap_or(features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0);
        Ok(Some(StartRing { index, queue, base: ring.base, call: ring.call.clone(), kick, enabled }))
    }

    /// Takes note that a prepared ring was started.
    pub(super) fn started(&mut self, index: usize) {
        self.rings[index].running = true;
    }

    /// Stops a ring; its index is remembered as its base.
    fn stop(&mut self, index: usize) -> Result<u16> {
        if self.rings[index].running {
            if let Answer::Base(base) = self.post(Command::Stop { index })? {
                self.rings[index].base = base;
            }
            self.rings[index].running = false;
        }
        Ok(self.rings[index].base)
    }

    /// Replaces the guest's memory; rings that run are stopped for it and go on where they were.
    fn replace_memory(&mut self, described: Vec<GuestRegion>) -> Result<()> {
        let mut regions: Vec<GuestRegion> = Vec::with_capacity(described.len());
        for region in described {
            if !regions.iter().any(|there| there.is_same(&region)) {
                regions.push(region);
            }
        }
        let table = Arc::new(GuestTable::new(regions).map_err(|error| refused(error.to_string()))?);
        let running: Vec<usize> = (0..self.rings.len()).filter(|index| self.rings[*index].running).collect();
        for index in &running {
            self.stop(*index)?;
        }
        self.memory = table.clone();
        if let Answer::Old(unmapped_here) = self.post(Command::Memory(table))? {
            drop(unmapped_here);
        }
        running.into_iter().try_for_each(|index| self.start(index))
    }

    fn map(region: &VhostUserMemoryRegion, file: File) -> Result<GuestRegion> {
        keep_from_children(&file);
        let VhostUserMemoryRegion { guest_phys_addr, memory_size, user_addr, mmap_offset } = *region;
        GuestRegion::map(file, guest_phys_addr, user_addr, memory_size, mmap_offset)
            .map_err(|error| refused(format!("memory region at {guest_phys_addr:#x}: {error}")))
    }

    fn set_call(&mut self, index: u32, file: Option<File>) -> Result<()> {
        file.iter().for_each(keep_from_children);
        // User-mode Linux has a pipe.
        let call = file.map(|file| Doorbell::adopt_any(OwnedFd::from(file))).transpose();
        let call = call.map_err(|error| refused(format!("the call descriptor of ring {index}: {error}")))?;
        let call = call.map(Arc::new);
        let ring = self.ring(index)?;
        ring.call = call.clone();
        if ring.running {
            self.post(Command::Call { index: index as usize, call })?;
        }
        Ok(())
    }
}

/// The crate `vhost` receives descriptors without close-on-exec: guests' memory is not for programs
/// that are started.
fn keep_from_children(file: &File) {
    // It fails for what is no open descriptor.
    let _ = rustix::io::fcntl_setfd(file, rustix::io::FdFlags::CLOEXEC);
}

impl VhostUserBackendReqHandlerMut for Connection {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    /// Deprecated; the specification has rings disabled, some frontends mean "stop everything".
    fn reset_owner(&mut self) -> Result<()> {
        (0..self.rings.len()).try_for_each(|index| self.stop(index).map(|_| ()))
    }

    fn reset_device(&mut self) -> Result<()> {
        unsupported("RESET_DEVICE was not offered")
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let surplus = features & !self.offered;
        if surplus != 0 {
            return Err(refused(format!("features {surplus:#x} were not offered")));
        }
        if self.features != Some(features) {
            if self.rings.iter().any(|ring| ring.running) {
                return Err(refused("features were changed while a ring runs"));
            }
            self.features = Some(features);
            self.post(Command::Features(features))?;
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<vhost::VhostUserMemoryRegionBase>>> {
        let mapped: Result<Vec<_>> = regions.iter().zip(files).map(|(region, file)| Self::map(region, file)).collect();
        self.replace_memory(mapped?)?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let ring = self.stopped_ring(index, "the size")?;
        // Said now, and not when the ring starts, which is three messages later and speaks of
        // something else.
        check_size(num).map_err(|error| refused(format!("the size of ring {index}: {error}")))?;
        ring.size = num;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        if !flags.is_empty() {
            return Err(refused(format!("ring {index}: logging of dirty pages was not offered")));
        }
        let addresses = Some([descriptor, available, used]);
        // Frontends repeat themselves.
        if self.ring(index)?.addresses != addresses {
            self.stopped_ring(index, "the address")?.addresses = addresses;
        }
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let ring = self.stopped_ring(index, "the base")?;
        ring.base = u16::try_from(base).map_err(|_| refused(format!("ring {index}: base {base} is beyond 65535")))?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        self.ring(index)?;
        let base = self.stop(index as usize)?;
        let ring = self.ring(index)?;
        ring.kick = None;
        ring.call = None;
        Ok(VhostUserVringState::new(index, u32::from(base)))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let ring = self.stopped_ring(u32::from(index), "the kick descriptor")?;
        let Some(fd) = fd else {
            // "Poll the ring instead" would keep a core busy for ever at a guest's request.
            return Err(refused(format!("ring {index} without a kick descriptor")));
        };
        keep_from_children(&fd);
        // Only an eventfd may keep a worker's epoll busy.
        let kick = Doorbell::adopt(OwnedFd::from(fd));
        ring.kick = Some(kick.map_err(|error| refused(format!("the kick descriptor of ring {index}: {error}")))?);
        self.start(usize::from(index))
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.set_call(u32::from(index), fd)
    }

    /// Faults end the connection, which tells more than the descriptor could.
    fn set_vring_err(&mut self, index: u8, _fd: Option<File>) -> Result<()> {
        self.ring(u32::from(index)).map(|_| ())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(offered_protocol_features())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let surplus = features & !offered_protocol_features().bits();
        if surplus != 0 {
            return Err(refused(format!("protocol features {surplus:#x} were not offered")));
        }
        self.protocol_features = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.queue_pairs))
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let ring = self.ring(index)?;
        ring.enabled = Some(enable);
        if ring.running {
            self.post(Command::Enable { index: index as usize, enabled: enable })?;
        }
        Ok(())
    }

    fn get_config(&mut self, _offset: u32, _size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        unsupported("CONFIG was not offered")
    }

    fn set_config(&mut self, _offset: u32, _buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        unsupported("CONFIG was not offered")
    }

    fn set_gpu_socket(&mut self, _gpu: GpuBackend) -> Result<()> {
        unsupported("a GPU socket for a network device")
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        unsupported("SHARED_OBJECT was not offered")
    }

    fn get_inflight_fd(&mut self, _inflight: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        unsupported("INFLIGHT_SHMFD was not offered")
    }

    fn set_inflight_fd(&mut self, _inflight: &VhostUserInflight, _file: File) -> Result<()> {
        unsupported("INFLIGHT_SHMFD was not offered")
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<vhost::VhostUserMemoryRegionBase>> {
        let added = Self::map(region, fd)?;
        let mut regions = self.memory.regions().to_vec();
        // QEMU 7.2 adds and removes each region once for each queue pair. No ring has to stop for
        // that.
        if !regions.iter().any(|there| there.is_same(&added)) {
            regions.push(added);
            self.replace_memory(regions)?;
        }
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (guest, frontend, bytes) = (region.guest_phys_addr, region.user_addr, region.memory_size);
        let mut regions = self.memory.regions().to_vec();
        let before = regions.len();
        regions.retain(|r| (r.guest_address, r.frontend_address, r.bytes) != (guest, frontend, bytes));
        // One that is gone already was removed for another queue pair.
        if regions.len() == before { Ok(()) } else { self.replace_memory(regions) }
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        unsupported("DEVICE_STATE was not offered")
    }

    fn check_device_state(&mut self) -> Result<()> {
        unsupported("DEVICE_STATE was not offered")
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        unsupported("SHMEM was not offered")
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        unsupported("LOG_SHMFD was not offered")
    }
}

/// Where frontends come from.
pub(super) enum FrontendSource {
    Listener(UnixListener),
    Connect(PathBuf),
}

impl FrontendSource {
    /// Opens the socket. A path that a dead daemon left behind is taken over; one with a listener
    /// is not.
    pub(super) fn open(socket: &Socket, kept: Option<OwnedFd>) -> io::Result<FrontendSource> {
        if let (Socket::Listen(path), Some(kept)) = (socket, kept)
            && tombolo_shm::listener::is_found_at(&kept, path)
        {
            let listener = UnixListener::from(kept);
            listener.set_nonblocking(true)?;
            return Ok(FrontendSource::Listener(listener));
        }
        match socket {
            Socket::Connect(path) => Ok(FrontendSource::Connect(path.clone())),
            Socket::Listen(path) => {
                let listener = match listen_privately(path) {
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_stale(path) => {
                        std::fs::remove_file(path)?;
                        listen_privately(path)?
                    }
                    other => other?,
                };
                listener.set_nonblocking(true)?;
                Ok(FrontendSource::Listener(listener))
            }
        }
    }

    /// Another descriptor of the listening socket.
    pub(super) fn listener(&self) -> Option<OwnedFd> {
        match self {
            FrontendSource::Listener(listener) => listener.try_clone().ok().map(OwnedFd::from),
            FrontendSource::Connect(_) => None,
        }
    }

    /// The next frontend; `None` when the port is going.
    fn next(&self, stop: &Doorbell, back_off: &mut BackOff, shelf: Option<&Shelf>) -> Option<UnixStream> {
        loop {
            let timeout = match self {
                FrontendSource::Listener(listener) => {
                    let _busy = shelf.map(|shelf| shelf.store.enter());
                    if let Ok((stream, _)) = listener.accept() {
                        // Accepted sockets do not inherit it on Linux, but say so: messages are
                        // read blocking.
                        if stream.set_nonblocking(false).is_ok() {
                            return Some(stream);
                        }
                    }
                    None
                }
                FrontendSource::Connect(path) => {
                    let mut left = back_off.left(Instant::now());
                    if left.is_zero() {
                        if let Ok(stream) = connect_now(path) {
                            return Some(stream);
                        }
                        back_off.failed(Instant::now());
                        left = back_off.left(Instant::now());
                    }
                    Some(Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() })
                }
            };
            let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
            if let FrontendSource::Listener(listener) = self {
                fds.push(PollFd::new(listener, PollFlags::IN));
            }
            // Interrupted or failed: looked at again.
            let _ = poll(&mut fds, timeout.as_ref());
            if fds[0].revents().contains(PollFlags::IN) {
                return None;
            }
        }
    }
}

/// When to connect again to a frontend that listens. One that is not there, or that ends each
/// connection at once, does not keep the thread busy.
struct BackOff {
    wait: Duration,
    not_before: Option<Instant>,
}

impl BackOff {
    fn new() -> BackOff {
        BackOff { wait: FIRST_RETRY, not_before: None }
    }

    fn left(&self, now: Instant) -> Duration {
        self.not_before.map_or(Duration::ZERO, |at| at.saturating_duration_since(now))
    }

    /// An attempt came to nothing.
    fn failed(&mut self, now: Instant) {
        self.not_before = Some(now + self.wait);
        self.wait = (self.wait * 2).min(LONGEST_RETRY);
    }

    /// A connection has ended.
    fn ended(&mut self, begun: Instant, now: Instant) {
        if now.saturating_duration_since(begun) >= LONGEST_RETRY {
            self.wait = FIRST_RETRY;
        }
        self.failed(now);
    }
}

#[cfg(test)]
#[test]
fn a_frontend_that_is_not_there_is_asked_ever_less_often() {
    let (mut back_off, mut now) = (BackOff::new(), Instant::now());
    assert!(back_off.left(now).is_zero());
    let mut attempts = 0;
    let end = now + Duration::from_secs(60);
    while now < end {
        back_off.failed(now);
        now += back_off.left(now);
        attempts += 1;
    }
    assert!((60..70).contains(&attempts), "{attempts}");
    // One that hangs up at once is no better; one that stayed is asked again soon.
    back_off.ended(now, now + Duration::from_millis(1));
    assert_eq!(back_off.left(now), LONGEST_RETRY + Duration::from_millis(1));
    let begun = now;
    now += LONGEST_RETRY;
    back_off.ended(begun, now);
    assert_eq!(back_off.left(now), FIRST_RETRY);
}

/// Connects without waiting for a listener whose backlog is full, which would keep the thread from
/// ending.
fn connect_now(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Listens at `path`, for our own user only.
fn listen_privately(path: &Path) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    tombolo_shm::listener::bind_private(&socket, path)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Whether the socket at `path` has no listener any more.
fn is_stale(path: &Path) -> bool {
    UnixStream::connect(path).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Waits until the peer has sent something, or has gone.
fn wait_for_message(stream: &UnixStream) {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    // Interrupted or failed: the receive that follows says so, or waits itself.
    while poll(&mut fds, None).is_err_and(|error| error == rustix::io::Errno::INTR) {}
}

/// A handler of messages that knows what was agreed on over this connection before.
///
/// The crate `vhost` keeps the agreed features to itself, and cannot be told. It is told by the
/// messages that a frontend sends, over a socket pair. Later messages go through that pair too.
fn handler_for(connection: &Arc<Mutex<Connection>>) -> io::Result<Pump> {
    let (its, ours) = UnixStream::pair()?;
    let handler = BackendReqHandler::from_stream(its, connection.clone());
    let mut pump = Pump { handler, ours };
    let (features, protocol) = {
        let connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
        (connection.features, connection.protocol_features)
    };
    let mut tell = |request: u32, value: Option<u64>| -> io::Result<()> {
        let bytes = value.map(u64::to_le_bytes);
        let words = [request, VERSION, bytes.map_or(0, |b| b.len() as u32)];
        let mut message: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        message.extend(bytes.iter().flatten());
        pump.handle(&message, &[]).map(drop).map_err(|error| io::Error::other(error.to_string()))
    };
    if let Some(features) = features {
        tell(GET_FEATURES, None)?;
        tell(SET_FEATURES, Some(features))?;
    }
    if protocol != 0 {
        tell(GET_PROTOCOL_FEATURES, None)?;
        tell(SET_PROTOCOL_FEATURES, Some(protocol))?;
    }
    Ok(pump)
}

/// Hands whole messages to the handler and takes its answers.
struct Pump {
    handler: BackendReqHandler<Mutex<Connection>>,
    ours: UnixStream,
}

impl Pump {
    /// Handles one message; returns the answer, which may be empty.
    fn handle(&mut self, message: &[u8], fds: &[OwnedFd]) -> Result<Vec<u8>> {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        // Both fit a socket's buffer, which is empty here.
        match passing::send(&self.ours, message, &fds, false) {
            Ok(sent) if sent == message.len() => {}
            Ok(_) => return Err(refused("a message was passed on in part")),
            Err(error) => return Err(refused(format!("passing a message on: {error}"))),
        }
        self.handler.handle_request()?;
        let mut answer = vec![0; MAX_BODY_BYTES as usize];
        match recv(&self.ours, &mut answer, RecvFlags::DONTWAIT) {
            Ok((bytes, _)) => answer.truncate(bytes),
            Err(_) => answer.clear(),
        }
        Ok(answer)
    }
}

/// Handles messages until the connection ends; returns why it did.
fn converse(stream: &UnixStream, connection: &Arc<Mutex<Connection>>, shelf: Option<&Shelf>) -> Error {
    let mut pump = match handler_for(connection) {
        Ok(pump) => pump,
        Err(error) => return refused(format!("taking up a connection: {error}")),
    };
    let keep = || {
        if let Some(shelf) = shelf {
            shelf.keep(stream, &connection.lock().unwrap_or_else(PoisonError::into_inner));
        }
    };
    loop {
        wait_for_message(stream);
        // A daemon that takes over waits until the answer is out, and then reads the next message
        // itself.
        let _busy = shelf.map(|shelf| shelf.store.enter());
        if let Some(shelf) = shelf {
            shelf.doubt();
        }
        let handled = Message::receive(stream).and_then(|message| {
            if own_message(stream, &message, connection)? {
                return Ok(());
            }
            let answer = pump.handle(&message.bytes(), &message.fds)?;
            (&*stream).write_all(&answer).map_err(Error::SocketError)
        });
        match handled {
            Ok(()) => keep(),
            Err(error) => return error,
        }
    }
}

/// The control thread: one frontend after the other, until the port is gone. `restored` is a
/// connection of the daemon before, which the worker has already.
pub(super) fn run(
    config: &VhostUserConfig,
    source: &FrontendSource,
    mailbox: &Arc<Mailbox>,
    stop: &Doorbell,
    shelf: Option<&Shelf>,
    mut restored: Option<(UnixStream, Connection)>,
) {
    let mut back_off = BackOff::new();
    loop {
        let (stream, connection) = match restored.take() {
            Some(known) => known,
            None => {
                let Some(stream) = source.next(stop, &mut back_off, shelf) else { return };
                let Ok(other_end) = stream.try_clone() else { continue };
                if mailbox.post(Command::Connected(other_end)).is_err() {
                    return;
                }
                (stream, Connection::new(config, mailbox.clone()))
            }
        };
        let begun = Instant::now();
        let connection = Arc::new(Mutex::new(connection));
        let error = converse(&stream, &connection, shelf);
        if let Some(shelf) = shelf {
            shelf.forget();
        }
        // The store may hold it still for an instant.
        let _ = stream.shutdown(std::net::Shutdown::Both);
        back_off.ended(begun, Instant::now());
        match mailbox.post(Command::Closed(fault(error))) {
            Ok(Answer::Old(unmapped_here)) => drop(unmapped_here),
            Ok(_) => {}
            Err(Gone) => return,
        }
    }
}

// Messages that the crate `vhost` does not take as QEMU sends them; VHOST_USER_* of the
// specification.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const NET_SET_MTU: u32 = 20;
const SET_VRING_ENABLE: u32 = 18;
const VERSION: u32 = 1;
const FLAG_REPLY: u32 = 4;
const FLAG_NEED_REPLY: u32 = 8;

/// Handles the message if it is one that the crate `vhost` would refuse: QEMU's network device
/// enables rings before it acknowledges features (and 7.2 never acknowledges the bit that the crate
/// asks for then), and the crate does not know the network's message about the MTU. Says whether it
/// did.
fn own_message(stream: &UnixStream, message: &Message, connection: &Mutex<Connection>) -> Result<bool> {
    let Message { request, flags, body, .. } = message;
    if !matches!(*request, SET_VRING_ENABLE | NET_SET_MTU) {
        return Ok(false);
    }
    let bytes = body.len();
    if flags & !FLAG_NEED_REPLY != VERSION || bytes != 8 {
        return Err(refused(format!("request {request} with flags {flags:#x} and {bytes} bytes, expected 8 bytes")));
    }
    let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
    let (first, second) = (word(body, 0), word(body, 4));
    // A frontend may be told no here, and go on.
    let mut no = false;
    match (*request, second) {
        (SET_VRING_ENABLE, 0 | 1) => connection.set_vring_enable(first, second == 1)?,
        (SET_VRING_ENABLE, _) => return Err(refused(format!("ring {first} enabled with {second}, expected 0 or 1"))),
        _ => no = second != 0 || first > connection.mtu,
    }
    let acknowledged = connection.protocol_features & VhostUserProtocolFeatures::REPLY_ACK.bits() != 0;
    if flags & FLAG_NEED_REPLY != 0 && acknowledged {
        let words = [*request, VERSION | FLAG_REPLY, 8, u32::from(no), 0];
        let reply: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        (&*stream).write_all(&reply).map_err(Error::SocketError)?;
    }
    Ok(true)
}

/// What the end of a connection means: a frontend may go at any time, and says nothing then.
fn fault(error: Error) -> Option<Fault> {
    let kind = match &error {
        Error::Disconnected | Error::SocketBroken(_) => return None,
        // It went while an answer was on its way.
        Error::SocketError(error)
            if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
        {
            return None;
        }
        Error::SocketError(_) | Error::SocketRetry(_) => FaultKind::System,
        _ => FaultKind::Protocol,
    };
    let detail = match error {
        Error::ReqHandlerError(why) => format!("vhost-user: {why}"),
        other => format!("vhost-user message: {other}"),
    };
    Some(Fault { kind, detail })
}

#[cfg(test)]
#[test]
fn a_frontend_that_goes_while_it_is_answered_is_no_fault() {
    let write = |kind: io::ErrorKind| fault(Error::SocketError(kind.into()));
    assert_eq!((write(io::ErrorKind::BrokenPipe), write(io::ErrorKind::ConnectionReset)), (None, None));
    assert_eq!(write(io::ErrorKind::OutOfMemory).map(|fault| fault.kind), Some(FaultKind::System));
    assert_eq!(fault(Error::PartialMessage).map(|fault| fault.kind), Some(FaultKind::Protocol));
}
