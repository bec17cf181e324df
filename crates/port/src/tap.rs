//! An attachment to the host's kernel: a tap, an interface whose other end is a descriptor.
//!
//! What is carried: frames with their checksum and segmentation state (`IFF_VNET_HDR`), both ways.
//! If the host's stack makes frames of up to 64 KiB with partial checksums, the kernel passes them
//! on as they are, and it takes the same. A tap that another process made without offload headers
//! is served too, as a plain destination.
//!
//! It is not fast per frame. A system call moves one frame (about a microsecond here); a tap pays
//! by frames that represent 45 segments. Several queues are not used: one worker owns the port.
//!
//! Invariants:
//! * The arena holds what one turn received. A frame takes as much of it as it has bytes, so small
//!   frames lie close together and the rest of the arena is never touched.
//! * One write is one frame, never a part of one.
//!
//! Life: a `Monitor` reports changes of the interface. When it is set down, the link is down and
//! frames to it are dropped as `link_down`. When another process deletes it, the port reports it
//! once as a fault and waits until a tap of its name is there again; it attaches the same
//! descriptor to it. A tap that is not persistent goes away with the port, also when the process is
//! killed.
//!
//! Limits: frames of 65,557 bytes; [`ARENA_BYTES`] a turn, after which the worker is told that
//! there is more.

use crate::link::{Condition, Interface, LinkError, LinkState, Monitor, Netns, drop_reason};
use crate::pages::{PAGE_BYTES, Pages};
use crate::sys::{self, IfReq, InterfaceRequest, Piece, TunValue, TunWord};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use tombolo_ring::mem::Foreign;
use tombolo_switch::Nanos;
use tombolo_switch::detail::Details;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, ETHERNET_HEADER_BYTES, Frame, MAX_FRAME_BYTES, Mac, Offload};
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, HandOver, Port, Sent};
use tombolo_switch::vnet::VNET_HEADER_BYTES;
use tombolo_worker::reactor::{Registration, Watch};

// linux/if_tun.h
const IFF_TAP: u16 = 0x0002;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;
const IFF_TUN_EXCL: u16 = 0x8000;
const TUN_F_ALL_TSO: u32 = 0x01 | 0x02 | 0x04 | 0x08; // CSUM, TSO4, TSO6, TSO_ECN
const TUN_F_USO: u32 = 0x20 | 0x40; // USO4, USO6: since Linux 6.2

/// Memory for the frames of one turn: eight of the longest. More would leave the processor's
/// second-level cache.
pub const ARENA_BYTES: usize = 8 * ROOM_BYTES;
/// Room for the longest frame with its header, in whole cache lines.
const READ_BYTES: usize = (MAX_FRAME_BYTES + 12).next_multiple_of(64);
/// From this length on a frame is placed so that its pages match our pages. Shorter ones lie close
/// together: more of them fit.
const LONG_BYTES: usize = 16 << 10;
/// Room for that, wherever in a page it is to begin.
const ROOM_BYTES: usize = READ_BYTES + PAGE_BYTES;
/// How often a port that never sleeps looks whether its interface changed.
const LOOK_INTERVAL: Nanos = Nanos(10_000_000);
/// How often an interface whose namespace we may not enter is tried again after it was down.
const PROBE_INTERVAL: Nanos = Nanos(200_000_000);

/// Whether a tap is made or found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Existing {
    /// It must not exist yet.
    #[default]
    Create,
    /// It must exist already.
    Adopt,
    /// It is used if it exists, and created otherwise.
    CreateOrAdopt,
}

/// Which tap, and how to set it up.
#[derive(Clone, Debug)]
pub struct TapConfig {
    /// Its name; a `%d` in the name of a new one is replaced by the first free number.
    pub name: String,
    /// The namespace that it is in, or will be in.
    pub netns: Option<Netns>,
    /// Whether it is made or found.
    pub existing: Existing,
    /// MTU to set, in bytes.
    pub mtu: Option<u32>,
    /// Hardware address to set, which is the host's address on this network.
    pub mac: Option<Mac>,
    /// The user who may open it later without privilege.
    pub owner: Option<u32>,
    /// The group that may open it later without privilege.
    pub group: Option<u32>,
    /// Whether it stays when the port goes.
    pub persist: bool,
    /// Whether it is set up at once.
    pub up: bool,
    /// Whether what the peer sends cannot change the host's configuration: with it, router
    /// advertisements and redirects are not accepted and the interface gives itself no address of a
    /// prefix. Applied before the interface is up.
    pub closed: bool,
}

impl TapConfig {
    /// A new tap in the calling thread's namespace, up, gone with the port.
    pub fn new(name: &str) -> TapConfig {
        TapConfig {
            name: name.to_owned(),
            netns: None,
            existing: Existing::Create,
            mtu: None,
            mac: None,
            owner: None,
            group: None,
            persist: false,
            up: true,
            closed: false,
        }
    }
}

/// Why a tap could not be attached.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum TapError {
    /// `/dev/net/tun` cannot be opened.
    #[error("/dev/net/tun: {source}; the tun module has to be there, and the file readable and writable")]
    Device { source: Errno },
    /// The kernel does not attach to the name.
    #[error("attaching to the tap `{name}`: {source}; {hint}")]
    Attach { name: String, source: Errno, hint: &'static str },
    /// A property that could not be set.
    #[error("setting {what} of the tap `{name}`: {source}")]
    Property { what: &'static str, name: String, source: Errno },
    /// The descriptor is no tap that can be used.
    #[error("the descriptor is not usable as a tap: {found}; a tap with IFF_TAP and IFF_NO_PI is expected")]
    NotATap {
        /// What it is instead.
        found: String,
    },
    /// The interface or its namespace.
    #[error(transparent)]
    Link(#[from] LinkError),
}

/// The offload header before each frame.
#[derive(Clone, Copy)]
struct Header {
    /// 0 without offload headers.
    bytes: usize,
    /// Written with a frame, it may say that the frame represents several datagrams.
    datagrams: bool,
}

/// A port on a tap device of the host.
pub struct TapPort {
    fd: OwnedFd,
    /// `None` while the interface is gone.
    watch: Option<Watch>,
    registration: Registration,
    /// `None` where the interface is in a namespace that we may not enter.
    monitor: Option<Monitor>,
    name: String,
    /// 0 while it is not known.
    index: u32,
    mtu: u32,
    header: Header,
    condition: Condition,
    /// A fault that was found where none can be returned.
    pending: Option<Fault>,
    next_look: Nanos,
    /// Look at once, at any time.
    look_due: bool,
    arena: Pages,
    /// The length of the frame that was read last.
    last_bytes: usize,
    pieces: Vec<Piece<'static>>,
    linear: Vec<u8>,
}

/// Makes or finds the tap without a port. One that is not persistent is gone when this returns.
///
/// # Errors
/// As [`TapPort::open`].
pub fn make(config: &TapConfig) -> Result<(), TapError> {
    make_device(config).map(drop)
}

fn make_device(config: &TapConfig) -> Result<(OwnedFd, String, Header), TapError> {
    let netns = config.netns.as_ref();
    if config.existing == Existing::Adopt {
        Interface::open(netns, &config.name)?;
    }
    // The descriptor belongs to the namespace in which it was opened.
    let fd = Netns::run_in(netns, open_device)??;
    let exclusive = if config.existing == Existing::Create { IFF_TUN_EXCL } else { 0 };
    let name = attach(&fd, &config.name, exclusive)?;
    let header = set_header(&fd, &name, 12)?;
    let property = |what| {
        let name = name.clone();
        move |source| TapError::Property { what, name, source }
    };
    for (what, request, value) in
        [("the owner", TunValue::Owner, config.owner), ("the group", TunValue::Group, config.group)]
    {
        if let Some(value) = value {
            sys::tun_value(&fd, request, value).map_err(property(what))?;
        }
    }
    let interface = Interface::open(netns, &name)?;
    if let Some(mac) = config.mac {
        interface.set_mac(mac)?;
    }
    if let Some(mtu) = config.mtu {
        interface.set_mtu(mtu)?;
    }
    if config.closed {
        Netns::run_in(netns, || crate::link::close_configuration(&name))??;
    }
    if config.up {
        interface.set_up(true)?;
    }
    if config.persist {
        sys::tun_value(&fd, TunValue::Persist, 1).map_err(property("persistence"))?;
    }
    Ok((fd, name, header))
}

impl TapPort {
    /// Makes or finds the tap.
    ///
    /// # Errors
    /// [`TapError`]; a tap that was made is gone again.
    pub fn open(config: &TapConfig, registration: Registration) -> Result<TapPort, TapError> {
        let (fd, name, header) = make_device(config)?;
        Self::attached(fd, name, header, config.netns.as_ref(), registration)
    }

    /// Takes a tap that another process opened, with offload headers or without.
    ///
    /// # Errors
    /// [`TapError`], among them [`TapError::NotATap`].
    pub fn adopt(fd: OwnedFd, registration: Registration) -> Result<TapPort, TapError> {
        let mut request = IfReq([0; 40]);
        sys::interface(&fd, InterfaceRequest::TunGetInterface, &mut request)
            .map_err(|source| TapError::NotATap { found: format!("TUNGETIFF says {source}") })?;
        let (name, flags) = (request.name(), u16::from_ne_bytes(request.value()));
        if flags & IFF_TAP == 0 || flags & IFF_NO_PI == 0 {
            return Err(TapError::NotATap { found: format!("`{name}` has the flags {flags:#06x}") });
        }
        let failed = |what, source| TapError::Property { what, name: name.clone(), source };
        let status = rustix::fs::fcntl_getfl(&fd).map_err(|e| failed("the file flags", e))?;
        rustix::fs::fcntl_setfl(&fd, status | OFlags::NONBLOCK).map_err(|e| failed("the file flags", e))?;
        let mut header = Header { bytes: 0, datagrams: false };
        if flags & IFF_VNET_HDR != 0 {
            let mut header_bytes = 0;
            sys::tun_word(&fd, TunWord::GetHeaderBytes, &mut header_bytes)
                .map_err(|e| failed("the header's size", e))?;
            if !(VNET_HEADER_BYTES..=64).contains(&(header_bytes as usize)) {
                return Err(TapError::NotATap { found: format!("`{name}` has headers of {header_bytes} bytes") });
            }
            header = set_header(&fd, &name, header_bytes)?;
        }
        // Without the right to ask where it is, or to go there, it is served without a monitor.
        let netns = sys::tun_namespace(&fd).ok().map(Netns::from).filter(|n| n.run(|| ()).is_ok());
        let here = Interface::open(None, &name).is_ok();
        match netns {
            Some(netns) => Self::attached(fd, name, header, Some(&netns), registration),
            None if here => Self::attached(fd, name, header, None, registration),
            None => Self::unmonitored(fd, name, header, registration),
        }
    }

    fn attached(
        fd: OwnedFd,
        name: String,
        header: Header,
        netns: Option<&Netns>,
        registration: Registration,
    ) -> Result<TapPort, TapError> {
        let monitor = Monitor::open(netns, &registration)?;
        let mut port = Self::unmonitored(fd, name, header, registration)?;
        let state = monitor.state(&port.name);
        port.index = monitor.index(&port.name).unwrap_or(0);
        port.monitor = Some(monitor);
        port.take_state(state);
        Ok(port)
    }

    fn unmonitored(fd: OwnedFd, name: String, header: Header, registration: Registration) -> Result<TapPort, TapError> {
        let watch = registration.watch(&fd).map_err(|source| TapError::Property {
            what: "a wake-up",
            name: name.clone(),
            source,
        })?;
        Ok(TapPort {
            fd,
            watch: Some(watch),
            registration,
            monitor: None,
            name,
            index: 0,
            mtu: 1500,
            header,
            condition: Condition::Up,
            pending: None,
            next_look: Nanos(0),
            look_due: false,
            arena: Pages::new(ARENA_BYTES),
            last_bytes: 0,
            pieces: Vec::new(),
            linear: Vec::new(),
        })
    }

    /// The name of the interface now.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn fault(&self, what: &str, errno: Errno) -> Fault {
        let detail = format!("{what} the tap `{}`: {errno}", self.name);
        Fault { kind: FaultKind::System, detail }
    }

    fn take_state(&mut self, state: Option<LinkState>) {
        if let Some(state) = state {
            self.condition = Condition::of(&state);
            self.mtu = state.mtu;
        }
    }

    /// The interface is deleted: report it once, and wait.
    fn lose(&mut self) {
        if self.condition != Condition::Gone {
            self.condition = Condition::Gone;
            self.watch = None;
            let detail = format!("the tap `{}` was deleted; the port waits for one of that name", self.name);
            self.pending = Some(Fault { kind: FaultKind::System, detail });
            self.registration.wake();
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
        let Some(monitor) = &self.monitor else { return };
        if self.condition == Condition::Gone {
            // Only an existing tap is attached to: one that was deleted is not made again.
            if monitor.index(&self.name).is_none() || attach(&self.fd, &self.name, 0).is_err() {
                return;
            }
            if self.header.bytes != 0 {
                let Ok(header) = set_header(&self.fd, &self.name, 12) else { return };
                self.header = header;
            }
            // The name may be that of a tap without a free queue; then the next change is another
            // chance.
            let Ok(watch) = self.registration.watch(&self.fd) else { return };
            self.watch = Some(watch);
            self.condition = Condition::Down;
        }
        // The interface may have been renamed, so the descriptor says which it is.
        let mut request = IfReq([0; 40]);
        match sys::interface(&self.fd, InterfaceRequest::TunGetInterface, &mut request) {
            Ok(()) => {
                self.name = request.name();
                self.index = self.monitor.as_ref().and_then(|m| m.index(&self.name)).unwrap_or(0);
                let state = self.monitor.as_ref().and_then(|m| m.state(&self.name));
                self.take_state(state);
            }
            Err(_) => self.lose(),
        }
    }

    /// Writes one frame; what the kernel says decides what becomes of it.
    fn write(&mut self, batch: &Batch<'_>, frame: &Frame) -> Result<(), Errno> {
        let mut header = [0; 64];
        header[..VNET_HEADER_BYTES].copy_from_slice(&frame.offload.to_vnet());
        let tail = batch.tail(frame);
        let mut pieces = sys::recycle(std::mem::take(&mut self.pieces));
        if self.header.bytes != 0 {
            pieces.push(Piece::from(&header[..self.header.bytes]));
        }
        let result = if tail.len() + 2 <= sys::MAX_PIECES {
            pieces.push(Piece::from(frame.head()));
            pieces.extend(tail.iter().map(|piece| Piece::from(*piece)));
            write(&self.fd, &pieces)
        } else {
            self.linear.clear();
            batch.append_to(frame, &mut self.linear);
            pieces.push(Piece::from(&self.linear[..]));
            write(&self.fd, &pieces)
        };
        self.pieces = sys::recycle(pieces);
        result
    }
}

fn write(fd: &OwnedFd, pieces: &[Piece<'_>]) -> Result<(), Errno> {
    loop {
        match sys::write_pieces(fd, pieces) {
            Err(Errno::INTR) => {}
            done => return done.map(drop),
        }
    }
}

fn open_device() -> Result<OwnedFd, TapError> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(|source| TapError::Device { source })
}

/// Attaches the descriptor to the tap `name`, which is made where there is none; returns its name.
fn attach(fd: &OwnedFd, name: &str, exclusive: u16) -> Result<String, TapError> {
    let mut request = IfReq::new(name).ok_or_else(|| LinkError::Name { name: name.into() })?;
    request.set(&(IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | exclusive).to_ne_bytes());
    match sys::interface(fd, InterfaceRequest::TunSetInterface, &mut request) {
        Ok(()) => Ok(request.name()),
        Err(source) => {
            let hint = match source {
                Errno::PERM => "making one needs CAP_NET_ADMIN, using one needs to be its owner",
                Errno::BUSY if exclusive != 0 => "one of that name exists; adopt it, or choose another name",
                Errno::BUSY => "another process uses it; stop that one first",
                Errno::INVAL => "an interface of that name exists and is not a single-queue tap",
                _ => "see ip-tuntap(8)",
            };
            Err(TapError::Attach { name: name.into(), source, hint })
        }
    }
}

/// Has the kernel put `bytes` of offload header before each frame, in little endian, and send what
/// we take.
fn set_header(fd: &OwnedFd, name: &str, mut bytes: i32) -> Result<Header, TapError> {
    let failed = |what| move |source| TapError::Property { what, name: name.into(), source };
    sys::tun_word(fd, TunWord::SetHeaderBytes, &mut bytes).map_err(failed("the header's size"))?;
    // Kernels without this option (CONFIG_TUN_VNET_CROSS_LE) refuse it where it would change
    // something only.
    let little_endian = sys::tun_word(fd, TunWord::SetLittleEndian, &mut 1);
    if cfg!(target_endian = "big") {
        little_endian.map_err(failed("the header's byte order"))?;
    }
    // A kernel that can hand such frames to us takes them too, whatever it was told to hand over.
    // It is told not to: a frame that represents several datagrams would be one for floods, limits
    // and mirrors.
    let datagrams = sys::tun_value(fd, TunValue::Offload, TUN_F_ALL_TSO | TUN_F_USO).is_ok();
    sys::tun_value(fd, TunValue::Offload, TUN_F_ALL_TSO).map_err(failed("the offloads"))?;
    Ok(Header { bytes: bytes as usize, datagrams })
}

impl Port for TapPort {
    fn kind(&self) -> &'static str {
        "tap"
    }

    fn link(&self) -> Carrier {
        self.condition.link()
    }

    fn caps(&self) -> Caps {
        match self.header {
            Header { bytes: 0, .. } => Caps::plain(self.mtu),
            Header { datagrams: uso, .. } => Caps { uso, ..Caps::full(self.mtu) },
        }
    }

    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        if let Some(fault) = self.pending.take() {
            return Err(fault);
        }
        if now >= self.next_look || self.look_due {
            self.next_look = now.after(LOOK_INTERVAL);
            let due = std::mem::take(&mut self.look_due);
            match &self.monitor {
                Some(monitor) if monitor.changed(self.index, &self.name) || due => self.look(),
                Some(_) => {}
                // No event says when it comes up: the next frame finds out.
                None if self.condition == Condition::Down => {
                    self.next_look = now.after(PROBE_INTERVAL);
                    self.condition = Condition::Up;
                }
                None => {}
            }
        }
        match self.pending.take() {
            Some(fault) => Err(fault),
            None if self.monitor.is_none() && self.condition == Condition::Down => Ok(Some(self.next_look)),
            None => Ok(None),
        }
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        if self.condition == Condition::Gone {
            return Ok(0);
        }
        let mut lost = None;
        let mut used = 0;
        let mut last_bytes = self.last_bytes;
        let mut free = &mut self.arena[..];
        while used < budget {
            if free.len() < ROOM_BYTES {
                // There is no room to see whether there is more, so say that there is.
                used = budget;
                break;
            }
            if last_bytes >= LONG_BYTES {
                // Long frames follow each other. Each page of one then matches one of our pages,
                // see `Pages`; short ones lie close together.
                let header_end = free.as_ptr().addr() + self.header.bytes;
                let skipped = header_end.next_multiple_of(PAGE_BYTES) - header_end;
                free = &mut std::mem::take(&mut free)[skipped..];
            }
            let n = match rustix::io::read(&self.fd, &mut free[..READ_BYTES]) {
                Ok(n) => n,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => break,
                Err(errno) => {
                    lost = Some(errno);
                    break;
                }
            };
            used += 1;
            last_bytes = n;
            let (bytes, rest) = std::mem::take(&mut free).split_at_mut(n.next_multiple_of(64));
            free = rest;
            let Some((header, frame)) = bytes[..n].split_at_checked(self.header.bytes) else {
                drops.count(Reason::Runt, 1);
                continue;
            };
            if frame.len() < ETHERNET_HEADER_BYTES {
                drops.count(Reason::Runt, 1);
                continue;
            }
            let offload = match header.first_chunk() {
                Some(header) => Offload::from_vnet(header, frame.len()),
                None => Ok(Offload::NONE),
            };
            match offload {
                Ok(offload) => batch.push(Foreign::from(frame), offload),
                Err(reason) => drops.count(reason, 1),
            }
        }
        self.last_bytes = last_bytes;
        match lost {
            None => Ok(used),
            Some(Errno::BADFD | Errno::NODEV) => {
                // The arena is borrowed by the batch, so the rest of the bookkeeping waits for
                // `service`.
                self.look_due = true;
                self.registration.wake();
                Ok(used)
            }
            Some(errno) => {
                let detail = format!("reading from the tap `{}`: {errno}", self.name);
                Err(Fault { kind: FaultKind::System, detail })
            }
        }
    }

    fn release(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        let max_bytes = self.caps().max_frame_bytes as usize;
        for (done, &i) in which.iter().enumerate() {
            if self.condition != Condition::Up {
                drops.count(Reason::LinkDown, (which.len() - done) as u64);
                break;
            }
            let frame = &batch.frames()[i as usize];
            if frame.len() > max_bytes && frame.offload.segmentation.is_none() {
                drops.count(Reason::TooLong, 1);
                continue;
            }
            match self.write(batch, frame) {
                Ok(()) => {
                    sent.frames += 1;
                    sent.bytes += frame.len() as u64;
                }
                Err(errno) => {
                    drops.count(drop_reason(errno), 1);
                    match errno {
                        Errno::IO => {
                            // It may be up again already, which the next look finds.
                            self.condition = Condition::Down;
                            self.ask_for_service();
                        }
                        Errno::BADFD | Errno::NODEV => self.lose(),
                        _ => {}
                    }
                }
            }
        }
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        match self.pending.take() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        // Wake-ups are always on; this is the second look, at the frames and at the interface in
        // one call.
        let mut fds = Vec::with_capacity(2);
        let gone = self.condition == Condition::Gone;
        let (tap, links) = (self.fd.as_fd(), self.monitor.as_ref().map(AsFd::as_fd));
        fds.extend((!gone).then(|| PollFd::from_borrowed_fd(tap, PollFlags::IN)));
        fds.extend(links.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        if let Err(errno) = poll(&mut fds, Some(&Timespec::default())) {
            return if errno == Errno::INTR { Ok(true) } else { Err(self.fault("polling", errno)) };
        }
        let frames = !gone && fds[0].revents().contains(PollFlags::IN);
        let failed = !gone && fds[0].revents().contains(PollFlags::ERR);
        let changed = links.is_some() && fds.last().is_some_and(|fd| !fd.revents().is_empty());
        if failed && self.monitor.is_none() {
            self.lose();
        } else if changed || failed {
            self.ask_for_service();
            return Ok(true);
        }
        match self.pending.take() {
            Some(fault) => Err(fault),
            // What the interface had queued before it went down may still be read.
            None => Ok(frames && self.condition != Condition::Gone),
        }
    }

    fn disarm(&mut self) {}

    fn reset(&mut self, _fault: &Fault) {
        // Nothing is held for the kernel; what state the interface is in decides how it goes on.
        self.pending = None;
        self.look();
        self.pending = None;
    }

    fn hand_over(&self) -> Option<HandOver> {
        // A tap that was deleted is waited for by name.
        let lives = self.condition != Condition::Gone;
        Some(HandOver { state: Vec::new(), fds: vec![self.fd.try_clone().ok().filter(|_| lives)?] })
    }

    fn details(&self) -> Details {
        vec![
            ("interface", self.name.clone().into()),
            ("state", self.condition.to_string().into()),
            ("mtu", self.mtu.into()),
            ("vnet_header_bytes", self.header.bytes.into()),
            ("datagram_segmentation", self.header.datagrams.into()),
            ("monitored", self.monitor.is_some().into()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{Rig, partial_frame, plain, same};
    use crate::kernel_side::{self, Attachment, KernelFixture, KernelSide};
    use tombolo_switch::frame::SegmentKind;

    /// The tap itself is where the kernel's side is.
    struct Tap;

    type TapFixture = KernelFixture<Tap>;

    impl Attachment for Tap {
        const KIND: &str = "tap";
        const PEER: &str = "tap0";

        fn missing() -> Option<String> {
            open_device().err().map(|error| error.to_string())
        }

        fn open(netns: &Netns, registration: Registration) -> Box<dyn Port> {
            let config = TapConfig { netns: Some(netns.clone()), mtu: Some(1500), ..TapConfig::new("tap0") };
            Box::new(TapPort::open(&config, registration).unwrap())
        }

        fn connect(netns: &Netns) {
            kernel_side::run(netns, "ip tuntap add dev tap0 mode tap");
            kernel_side::run(netns, "ip link set tap0 up");
        }
    }

    mod conformance {
        crate::conformance_suite!(super::TapFixture);
    }

    fn registration(reactor: &tombolo_worker::reactor::Reactor) -> Registration {
        reactor.registrar().registration(tombolo_switch::wait::Token(1))
    }

    /// A rig whose port took over a descriptor that was opened with `flags`.
    fn adopted(flags: u16, header_bytes: i32) -> Rig<TapFixture> {
        let mut rig = Rig::<TapFixture>::up();
        let netns = rig.peer.netns.clone();
        let fd = netns.run(open_device).unwrap().unwrap();
        let mut request = IfReq::new("other").unwrap();
        request.set(&flags.to_ne_bytes());
        sys::interface(&fd, InterfaceRequest::TunSetInterface, &mut request).unwrap();
        if flags & IFF_VNET_HDR != 0 {
            sys::tun_word(&fd, TunWord::SetHeaderBytes, &mut { header_bytes }).unwrap();
        }
        kernel_side::run(&netns, "ip link set other up");
        let registration = rig.port_registration();
        rig.port = Box::new(TapPort::adopt(fd, registration).unwrap());
        rig.peer.side = KernelSide::open(&netns, "other");
        rig.until("the link comes up", |rig| rig.seen == Some(Carrier::Up));
        rig
    }

    #[test]
    fn a_tap_without_offload_headers_is_a_plain_destination() {
        crate::conformance::run::<TapFixture>("a_tap_without_offload_headers", |_| {
            let mut rig = adopted(IFF_TAP | IFF_NO_PI, 0);
            assert_eq!(rig.port.caps(), Caps::plain(1500));
            let frames = plain(0, [14, 60, 200, 1514]);
            rig.receive_all(&frames);
            same(&frames, &rig.received);
            rig.deliver(&frames);
        });
    }

    #[test]
    fn a_tap_that_somebody_else_opened_keeps_its_header_size() {
        crate::conformance::run::<TapFixture>("a_tap_that_somebody_else_opened", |_| {
            for bytes in [10, 12] {
                let mut rig = adopted(IFF_TAP | IFF_NO_PI | IFF_VNET_HDR, bytes);
                assert!(rig.port.details().contains(&("vnet_header_bytes", (bytes as u64).into())));
                let frames = [partial_frame(0, 30_000, SegmentKind::Tcp4, Some(1448)), plain(1, [60]).remove(0)];
                rig.receive_all(&frames);
                same(&frames, &rig.received);
                rig.deliver(&frames);
            }
        });
    }

    #[test]
    fn the_link_follows_the_interface_and_the_mtu_and_the_name_are_taken_over() {
        crate::conformance::run::<TapFixture>("the_link_follows_the_interface", |_| {
            let mut rig = Rig::<TapFixture>::up();
            for (line, link) in [("ip link set tap0 down", Carrier::Down), ("ip link set tap0 up", Carrier::Up)] {
                kernel_side::run(&rig.peer.netns, line);
                // A frame that goes out before the port has heard of it is counted all the same.
                rig.send(&plain(0, [60]));
                rig.until_woken(line, |rig| rig.seen == Some(link));
            }
            assert!(rig.tx_drops.of(Reason::LinkDown) >= 1, "{:?}", rig.tx_drops);
            assert_eq!(rig.tx_drops.of(Reason::LinkDown), rig.tx_drops.total(), "{:?}", rig.tx_drops);
            kernel_side::run(&rig.peer.netns, "ip link set tap0 down");
            kernel_side::run(&rig.peer.netns, "ip link set tap0 name tap9 mtu 9000 up");
            rig.until_woken("MTU and name", |rig| {
                Caps { uso: false, ..rig.port.caps() } == Caps::full(9000)
                    && rig.port.details().contains(&("interface", "tap9".into()))
            });
            assert!(rig.faults.is_empty(), "{:?}", rig.faults);
            let frames = plain(10, [9014]);
            rig.receive_all(&frames);
            rig.deliver(&frames);
        });
    }

    #[test]
    fn a_tap_stays_only_where_it_was_asked_to() {
        crate::conformance::run::<TapFixture>("a_tap_stays_only_where_it_was_asked_to", |_| {
            let netns = kernel_side::quiet_namespace();
            let reactor = tombolo_worker::reactor::Reactor::new().unwrap();
            let exists = |name: &str| Interface::open(Some(&netns), name).is_ok();
            for (name, persist) in [("stays", true), ("goes", false)] {
                let mac = Some([2, 0, 0, 0, 0, 7]);
                let netns = Some(netns.clone());
                let config = TapConfig { netns, persist, mac, owner: Some(0), ..TapConfig::new(name) };
                let port = TapPort::open(&config, registration(&reactor)).unwrap();
                let interface = Interface::open(config.netns.as_ref(), name).unwrap();
                assert_eq!(interface.mac().unwrap(), [2, 0, 0, 0, 0, 7]);
                interface.add_address("10.9.0.1".parse().unwrap(), 24).unwrap();
                interface.add_address("10.9.0.1".parse().unwrap(), 24).unwrap();
                assert!(exists(name));
                drop(port);
                assert_eq!(exists(name), persist);
            }
            // It is found again, also by its owner; and a second one of its name is not made.
            let mut config = TapConfig { netns: Some(netns.clone()), ..TapConfig::new("stays") };
            let refused = TapPort::open(&config, registration(&reactor)).map(drop).unwrap_err();
            assert!(refused.to_string().contains("one of that name exists"), "{refused}");
            config.existing = Existing::Adopt;
            let port = TapPort::open(&config, registration(&reactor)).unwrap();
            let refused = TapPort::open(&config, registration(&reactor)).map(drop).unwrap_err();
            assert!(refused.to_string().contains("another process uses it"), "{refused}");
            drop(port);
            config.name = "absent".into();
            let refused = TapPort::open(&config, registration(&reactor)).map(drop).unwrap_err();
            assert!(matches!(refused, TapError::Link(LinkError::Absent { .. })), "{refused}");
        });
    }

    #[test]
    fn what_is_no_tap_is_not_taken() {
        let reactor = tombolo_worker::reactor::Reactor::new().unwrap();
        let null = std::fs::File::open("/dev/null").unwrap();
        let refused = TapPort::adopt(null.into(), registration(&reactor)).map(drop);
        assert!(matches!(refused, Err(TapError::NotATap { .. })), "{refused:?}");
    }
}
