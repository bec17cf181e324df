//! An attachment over a stream socket, as QEMU's `-netdev stream` and `-netdev socket` and passt
//! speak it: each frame behind its length as four bytes.
//!
//! It is the way in for what has no shared memory to offer, needs no privilege, and works over a
//! descriptor that somebody hands over. What it is not: fast (each byte goes through the kernel
//! twice), and it carries no offload state, so it takes frames only as they are on a wire
//! ([`Caps::plain`]).
//!
//! # One call, many frames
//! A turn receives once, up to 256 KiB, and hands out views into what came; a frame that came in
//! part waits for the rest. Transmit sends the frames of a turn with one gathered write, straight
//! from where they lie.
//!
//! # Back-pressure
//! The socket's buffer is the queue. Where it takes a frame in part, the rest is kept and goes
//! first, so that no other frame gets in between; all further frames are dropped as `no_buffer`
//! until it is gone. So at most one frame is held, and nothing blocks.
//!
//! # Who connects
//! ```text
//! listen   one peer at a time; the next one waits in the backlog until that one is gone
//! connect  again and again: 10 ms after a peer that sent a frame or stayed a second, twice as long after each
//!          failure, at most 1 s
//! given    a descriptor, such as one end of a socketpair; another may be given when its peer is gone
//! ```
//! A peer that goes is no fault: the link is down and the port waits for the next one. A length
//! that no frame has is one: the stream has lost its place, so the connection is closed. A frame
//! that a peer left unfinished counts as `reset`.
//!
//! Threads: the port belongs to its worker; a [`StreamFeed`] may be used from any.

mod endpoint;
mod framing;

pub use endpoint::Address;

use crate::sys::{self, Piece};
use endpoint::{Listener, Progress};
use framing::{BadLength, Inbox, LENGTH_BYTES};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tombolo_ring::mem::Foreign;
use tombolo_switch::Nanos;
use tombolo_switch::detail::Details;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, ETHERNET_HEADER_BYTES, Frame, MAX_FRAME_BYTES, Offload};
use tombolo_switch::port::{Caps, Carrier, Fault, FaultKind, HandOver, Port, Sent};
use tombolo_worker::reactor::{Registration, Watch};

/// The first wait before a new attempt to connect.
const FIRST_RETRY: Nanos = Nanos(10_000_000);
const LONGEST_RETRY: Nanos = Nanos(1_000_000_000);
/// How long an attempt to connect over TCP may take.
const CONNECT_TIMEOUT: Nanos = Nanos(5_000_000_000);

// The state at a handover: version u8, flags u8, zero u16, received bytes u32, pending bytes u32
// (little-endian), then both. Descriptors: the connection, the listening socket.
const KEPT_VERSION: u8 = 1;
const KEPT_HEAD_BYTES: usize = 12;
const HAS_CONNECTION: u8 = 1;
const HAS_LISTENER: u8 = 2;

/// Why a stream attachment could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum StreamError {
    /// No address of a stream socket.
    #[error("`{text}` is not an address of a stream socket; expected `unix:PATH`, `/PATH` or `tcp:IP:PORT`")]
    Address { text: String },
    /// The kernel refused.
    #[error("{what} {address}: {source}")]
    System { what: &'static str, address: Address, source: Errno },
    /// A descriptor that cannot be used.
    #[error("the descriptor given is not usable as a stream: {source}; a connected stream socket is expected")]
    NotAStream { source: Errno },
}

/// Hands sockets to a port that was made by [`StreamPort::given`].
#[derive(Clone)]
pub struct StreamFeed {
    mailbox: Arc<Mailbox>,
    registration: Registration,
}

#[derive(Default)]
struct Mailbox {
    full: AtomicBool,
    socket: Mutex<Option<OwnedFd>>,
}

impl StreamFeed {
    /// Gives the port a connected stream socket, in place of the one that it has.
    ///
    /// # Errors
    /// [`StreamError::NotAStream`]; the port keeps what it has.
    pub fn give(&self, socket: OwnedFd) -> Result<(), StreamError> {
        check_stream(&socket)?;
        *self.mailbox.socket.lock().unwrap_or_else(PoisonError::into_inner) = Some(socket);
        // Release: a thread that sees the flag finds the socket; the mutex orders the rest.
        self.mailbox.full.store(true, Ordering::Release);
        self.registration.wake();
        Ok(())
    }

    /// Has the port served.
    pub fn wake(&self) {
        self.registration.wake();
    }

    /// A port in place of the one that this feed was made with, which is gone; it waits for the
    /// next socket. The peer of the old one saw the end of its stream.
    pub fn restart(&self, mtu: u32) -> StreamPort {
        let role = Role::Given { mailbox: self.mailbox.clone() };
        StreamPort::new(role, mtu, self.registration.clone())
    }
}

fn check_stream(socket: &OwnedFd) -> Result<(), StreamError> {
    match rustix::net::sockopt::socket_type(socket) {
        Ok(rustix::net::SocketType::STREAM) => Ok(()),
        Ok(_) => Err(StreamError::NotAStream { source: Errno::PROTOTYPE }),
        Err(source) => Err(StreamError::NotAStream { source }),
    }
}

enum Role {
    Listen { listener: Listener, _watch: Watch },
    Connect { address: Address, attempt: Option<Attempt>, backoff: Nanos, retry_at: Option<Nanos> },
    Given { mailbox: Arc<Mailbox> },
}

struct Attempt {
    socket: OwnedFd,
    until: Nanos,
    _watch: Watch,
}

struct Connection {
    socket: OwnedFd,
    _watch: Watch,
    /// There while something waits for room in the socket.
    room_watch: Option<Watch>,
    /// The rest of a frame that the socket took in part.
    pending: Vec<u8>,
    /// The peer takes no more; what it sent before is still received.
    broken: bool,
    /// The peer sends no more, but frames of it are still in the inbox.
    ended: bool,
}

impl Connection {
    /// The peer takes nothing any more. What it sent is received to its end, which closes the
    /// connection.
    fn give_up(&mut self, registration: &Registration) {
        self.broken = true;
        self.pending.clear();
        registration.wake();
    }
}

/// A port that speaks QEMU's framed stream, as listener or client.
pub struct StreamPort {
    role: Role,
    registration: Registration,
    connection: Option<Connection>,
    inbox: Inbox,
    /// The inbox holds what an earlier peer left.
    stale: bool,
    /// The connection carried a frame, so it was a good one.
    proved: bool,
    /// When the connection was made, by this side.
    opened_at: Nanos,
    connections: u64,
    mtu: u32,
    lengths: Vec<[u8; LENGTH_BYTES]>,
    pieces: Vec<Piece<'static>>,
    linear: Vec<u8>,
}

impl StreamPort {
    fn new(role: Role, mtu: u32, registration: Registration) -> StreamPort {
        StreamPort {
            role,
            registration,
            connection: None,
            inbox: Inbox::new(),
            stale: false,
            proved: false,
            opened_at: Nanos(0),
            connections: 0,
            mtu,
            lengths: Vec::new(),
            pieces: Vec::new(),
            linear: Vec::new(),
        }
    }

    /// Listens at `address`; the file of a Unix socket gets the rights `mode`, and one that a
    /// killed process left is replaced.
    ///
    /// # Errors
    /// [`StreamError::System`], such as `EADDRINUSE` where somebody listens there.
    pub fn listen(
        address: &Address,
        mode: u32,
        mtu: u32,
        registration: Registration,
    ) -> Result<StreamPort, StreamError> {
        Self::serve(Listener::bind(address, mode)?, address, mtu, registration)
    }

    fn serve(
        listener: Listener,
        address: &Address,
        mtu: u32,
        registration: Registration,
    ) -> Result<StreamPort, StreamError> {
        let failed = |source| StreamError::System { what: "watching", address: address.clone(), source };
        let watch = registration.watch(&listener.socket).map_err(failed)?;
        Ok(Self::new(Role::Listen { listener, _watch: watch }, mtu, registration))
    }

    /// As [`StreamPort::listen`], with the listening socket of another process where `handed` has
    /// it.
    ///
    /// # Errors
    /// As for [`StreamPort::listen`].
    pub fn listen_on(
        handed: &mut HandOver,
        address: &Address,
        mode: u32,
        mtu: u32,
        registration: Registration,
    ) -> Result<StreamPort, StreamError> {
        let flags = handed.state.get(1).copied().unwrap_or(0);
        let kept = if flags & HAS_LISTENER != 0 { handed.fds.pop() } else { None };
        match kept.and_then(|socket| Listener::adopt(socket, address)) {
            Some(listener) => Self::serve(listener, address, mtu, registration),
            None => Self::listen(address, mode, mtu, registration),
        }
    }

    /// Continues with the connection of a port of another process. Where that cannot be, the port
    /// is as it was, and the peer connects again.
    ///
    /// # Errors
    /// Why not, in words.
    pub fn take_up(&mut self, handed: HandOver) -> Result<(), String> {
        let short = || "the stored state of the stream ends early".to_string();
        let (head, rest) = handed.state.split_first_chunk::<KEPT_HEAD_BYTES>().ok_or_else(short)?;
        let [version, flags, _, _, lengths @ ..] = *head;
        if version != KEPT_VERSION {
            return Err(format!("the stored state of the stream has version {version}, expected {KEPT_VERSION}"));
        }
        if flags & HAS_CONNECTION == 0 {
            return Ok(());
        }
        let [a, b, c, d, e, f, g, h] = lengths;
        let lengths = [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])].map(|n| n as usize);
        let (received, pending) = rest.split_at_checked(lengths[0]).ok_or_else(short)?;
        if pending.len() != lengths[1] || pending.len() > LENGTH_BYTES + MAX_FRAME_BYTES {
            return Err(short());
        }
        let socket = handed.fds.into_iter().next().ok_or("the stored state of the stream has no socket")?;
        check_stream(&socket).map_err(|error| error.to_string())?;
        self.open(socket).map_err(|fault| fault.detail)?;
        if !self.inbox.refill(received) {
            self.connection = None;
            return Err(format!("the stored state of the stream has {} received bytes", received.len()));
        }
        if let Some(connection) = &mut self.connection {
            connection.pending.extend_from_slice(pending);
        }
        if let Role::Connect { retry_at, .. } = &mut self.role {
            *retry_at = None;
        }
        Ok(())
    }

    /// Connects to `address`, whenever somebody listens there.
    pub fn connect(address: &Address, mtu: u32, registration: Registration) -> StreamPort {
        let (address, retry_at) = (address.clone(), Some(Nanos(0)));
        let role = Role::Connect { address, attempt: None, backoff: FIRST_RETRY, retry_at };
        Self::new(role, mtu, registration)
    }

    /// Waits for sockets that the feed hands over.
    pub fn given(mtu: u32, registration: Registration) -> (StreamPort, StreamFeed) {
        let mailbox = Arc::<Mailbox>::default();
        let feed = StreamFeed { mailbox: mailbox.clone(), registration: registration.clone() };
        (Self::new(Role::Given { mailbox }, mtu, registration), feed)
    }

    /// The address where it listens, with the port that the kernel chose for port 0.
    pub fn listens_at(&self) -> Option<&Address> {
        match &self.role {
            Role::Listen { listener, .. } => Some(&listener.address),
            _ => None,
        }
    }

    fn fault(kind: FaultKind, what: &str, errno: Errno) -> Fault {
        Fault { kind, detail: format!("{what}: {errno}") }
    }

    fn open(&mut self, socket: OwnedFd) -> Result<(), Fault> {
        endpoint::tune(&socket);
        let watch = self.registration.watch(&socket);
        let watch = watch.map_err(|e| Self::fault(FaultKind::System, "watching a stream socket", e))?;
        self.inbox.clear();
        (self.stale, self.proved) = (false, false);
        self.connections += 1;
        // A worker looks at the link when it has serviced the port, and this may be its second look
        // before a sleep.
        self.registration.wake();
        self.connection = Some(Connection {
            socket,
            _watch: watch,
            room_watch: None,
            pending: Vec::new(),
            broken: false,
            ended: false,
        });
        Ok(())
    }

    /// Closes the connection, and has the worker come back for the next one.
    fn close(connection: &mut Option<Connection>, stale: &mut bool, registration: &Registration) {
        if connection.take().is_some() {
            *stale = true;
            registration.wake();
        }
    }

    fn accept(&mut self) -> Result<(), Fault> {
        if let (Role::Listen { listener, .. }, None) = (&self.role, &self.connection) {
            let accepted = listener.accept();
            if let Some(socket) = accepted.map_err(|e| Self::fault(FaultKind::System, "accepting a peer", e))? {
                self.open(socket)?;
            }
        }
        Ok(())
    }

    /// Takes the next step towards a connection; returns when to be called again.
    fn reconnect(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        let Role::Connect { address, attempt, backoff, retry_at } = &mut self.role else { return Ok(None) };
        if self.connection.is_some() {
            return Ok(None);
        }
        let at = *retry_at.get_or_insert_with(|| {
            if self.proved || now.since(self.opened_at) >= LONGEST_RETRY {
                *backoff = FIRST_RETRY;
            }
            now.after(*backoff)
        });
        let progress = match attempt.take() {
            Some(attempt) if now >= attempt.until => Err(Errno::TIMEDOUT),
            Some(attempt) => endpoint::connected(attempt.socket),
            None if now < at => return Ok(Some(at)),
            None => endpoint::connect(address),
        };
        match progress {
            Ok(Progress::Connected(socket)) => {
                // After this peer the wait is as before it, unless it proves good.
                *backoff = Nanos(backoff.0 * 2).min(LONGEST_RETRY);
                *retry_at = None;
                self.opened_at = now;
                self.open(socket).map(|()| None)
            }
            Ok(Progress::Pending(socket)) => {
                let until = now.after(CONNECT_TIMEOUT);
                match self.registration.watch_both(&socket) {
                    Ok(watch) => *attempt = Some(Attempt { socket, until, _watch: watch }),
                    Err(errno) => return Err(Self::fault(FaultKind::System, "watching a stream socket", errno)),
                }
                Ok(Some(until))
            }
            Err(_) => {
                *backoff = Nanos(backoff.0 * 2).min(LONGEST_RETRY);
                *retry_at = Some(now.after(*backoff));
                Ok(*retry_at)
            }
        }
    }

    /// Sends what waits for room in the socket.
    fn send_pending(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        if connection.pending.is_empty() || connection.broken {
            return;
        }
        match sys::send_pieces(&connection.socket, &[Piece::from(&connection.pending[..])]) {
            Ok(n) => drop(connection.pending.drain(..n)),
            Err(errno) if ends(errno) => connection.give_up(&self.registration),
            // No room, or no memory in the kernel: later.
            Err(_) => {}
        }
    }

    /// Sends `group`, whose pieces are few enough for one call, behind what is pending. Returns how
    /// many frames of it the socket took, the last one perhaps in part.
    ///
    /// # Errors
    /// Why it took none and never will.
    fn send_group(&mut self, batch: &Batch<'_>, group: &[&Frame]) -> Result<usize, Reason> {
        let connection = self.connection.as_mut().filter(|connection| !connection.broken);
        let connection = connection.ok_or(Reason::LinkDown)?;
        self.lengths.clear();
        self.lengths.extend(group.iter().map(|frame| (frame.len() as u32).to_be_bytes()));
        let mut pieces = sys::recycle(std::mem::take(&mut self.pieces));
        if !connection.pending.is_empty() {
            pieces.push(Piece::from(&connection.pending[..]));
        }
        for (frame, length) in group.iter().zip(&self.lengths) {
            pieces.push(Piece::from(&length[..]));
            let tail = batch.tail(frame);
            if tail.len() + 3 <= sys::MAX_PIECES {
                pieces.push(Piece::from(frame.head()));
                pieces.extend(tail.iter().map(|piece| Piece::from(*piece)));
            } else {
                // Such a frame is a group of its own.
                self.linear.clear();
                batch.append_to(frame, &mut self.linear);
                pieces.push(Piece::from(&self.linear[..]));
                break;
            }
        }
        let result = sys::send_pieces(&connection.socket, &pieces);
        self.pieces = sys::recycle(pieces);
        let mut written = match result {
            Ok(n) => n,
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => 0,
            Err(errno) if ends(errno) => {
                connection.give_up(&self.registration);
                return Err(Reason::LinkDown);
            }
            // Such as EFAULT, where the frames' own sender took its memory away: no fault of this
            // peer's. Nothing was sent, so the stream has not lost its place.
            Err(_) => return Err(Reason::SystemRefused),
        };
        let first = written.min(connection.pending.len());
        connection.pending.drain(..first);
        written -= first;
        for (taken, frame) in group.iter().enumerate() {
            let whole = LENGTH_BYTES + frame.len();
            if written >= whole {
                written -= whole;
                continue;
            }
            if written == 0 {
                return Ok(taken);
            }
            let pending = &mut connection.pending;
            pending.extend_from_slice(&self.lengths[taken]);
            batch.append_to(frame, pending);
            pending.drain(..written);
            return Ok(taken + 1);
        }
        Ok(group.len())
    }
}

/// Whether a failed send says that the peer is gone, and not only that these bytes could not be
/// sent.
fn ends(errno: Errno) -> bool {
    matches!(errno, Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN | Errno::TIMEDOUT)
}

impl Port for StreamPort {
    fn kind(&self) -> &'static str {
        "stream"
    }

    fn link(&self) -> Carrier {
        if self.connection.as_ref().is_some_and(|connection| !connection.broken) { Carrier::Up } else { Carrier::Down }
    }

    fn caps(&self) -> Caps {
        Caps::plain(self.mtu)
    }

    fn service(&mut self, now: Nanos) -> Result<Option<Nanos>, Fault> {
        if let Role::Given { mailbox } = &self.role
            // Acquire: pairs with the Release of `StreamFeed::give`; relaxed until there is
            // something.
            && mailbox.full.load(Ordering::Relaxed)
            && mailbox.full.swap(false, Ordering::Acquire)
        {
            let socket = mailbox.socket.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(socket) = socket {
                self.open(socket)?;
            }
        }
        self.send_pending();
        self.accept()?;
        self.reconnect(now)
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        let StreamPort { connection: slot, inbox, stale, proved, registration, .. } = self;
        let Some(connection) = slot else { return Ok(0) };
        // Whether the socket may hold more than was received.
        let mut more = true;
        if !connection.ended
            && let Some(room) = inbox.room()
        {
            let bytes = room.len();
            match recv(&connection.socket, room, RecvFlags::DONTWAIT) {
                Ok((0, _)) => connection.ended = true,
                Ok((n, _)) => {
                    inbox.filled(n);
                    more = n == bytes;
                }
                Err(Errno::AGAIN) => more = false,
                Err(Errno::INTR) => {}
                // Reset by the peer, timed out, unreachable: in each case it is gone.
                Err(_) => connection.ended = true,
            }
        }
        let left = inbox.len();
        let mut bytes_taken = 0;
        let (used, result) = inbox.take(budget, |frame| {
            bytes_taken += LENGTH_BYTES + frame.len();
            match frame.len() {
                0..ETHERNET_HEADER_BYTES => drops.count(Reason::Runt, 1),
                _ => batch.push(Foreign::from(frame), Offload::NONE),
            }
        });
        *proved |= used > 0;
        if let Err(BadLength(length)) = result {
            let detail = format!(
                "the peer announced a frame of {length} bytes, where 1 to {MAX_FRAME_BYTES} are expected; \
                 its connection is closed"
            );
            return Err(Fault { kind: FaultKind::Protocol, detail });
        }
        if used == budget {
            return Ok(budget);
        }
        if connection.ended {
            let unfinished = usize::from(bytes_taken < left);
            drops.count(Reason::Reset, unfinished as u64);
            Self::close(slot, stale, registration);
            return Ok(used + unfinished);
        }
        Ok(if more { budget } else { used })
    }

    fn release(&mut self) -> Result<(), Fault> {
        if std::mem::take(&mut self.stale) {
            self.inbox.clear();
        }
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        let max_bytes = self.caps().max_frame_bytes as usize;
        let frames = batch.frames();
        let mut group: Vec<&Frame> = Vec::with_capacity(which.len());
        let mut rest = which.iter().map(|i| &frames[*i as usize]).peekable();
        while rest.peek().is_some() {
            group.clear();
            let mut pieces = 1;
            while let Some(frame) = rest.peek() {
                if frame.len() > max_bytes {
                    drops.count(Reason::TooLong, 1);
                    rest.next();
                    continue;
                }
                pieces += 2 + batch.tail(frame).len();
                if pieces > sys::MAX_PIECES && !group.is_empty() {
                    break;
                }
                group.push(frame);
                rest.next();
                if pieces > sys::MAX_PIECES {
                    break;
                }
            }
            match self.send_group(batch, &group) {
                Err(reason) => drops.count(reason, group.len() as u64),
                Ok(taken) => {
                    sent.frames += taken as u64;
                    sent.bytes += group[..taken].iter().map(|frame| frame.len() as u64).sum::<u64>();
                    drops.count(Reason::NoBuffer, (group.len() - taken) as u64);
                }
            }
        }
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        self.accept()?;
        let Some(connection) = &mut self.connection else { return Ok(false) };
        if connection.pending.is_empty() {
            connection.room_watch = None;
        } else if connection.room_watch.is_none() {
            // Only while something waits: otherwise each frame that the peer reads would wake us.
            let watch = self.registration.watch_both(&connection.socket);
            let watch = watch.map_err(|e| Self::fault(FaultKind::System, "watching a stream socket", e))?;
            connection.room_watch = Some(watch);
        }
        if self.inbox.has_frame() {
            return Ok(true);
        }
        let mut fds = [PollFd::from_borrowed_fd(connection.socket.as_fd(), PollFlags::IN)];
        match poll(&mut fds, Some(&Timespec::default())) {
            Ok(_) => Ok(!fds[0].revents().is_empty()),
            Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(Self::fault(FaultKind::System, "polling a stream socket", errno)),
        }
    }

    fn disarm(&mut self) {}

    fn reset(&mut self, _fault: &Fault) {
        Self::close(&mut self.connection, &mut self.stale, &self.registration);
        self.inbox.clear();
        self.stale = false;
        if let Role::Connect { attempt, .. } = &mut self.role {
            *attempt = None;
        }
        // A peer that broke the protocol is waited for longer each time, even if it sent correct
        // frames before.
        self.proved = false;
    }

    fn hand_over(&self) -> Option<HandOver> {
        let mut handed = HandOver { state: vec![KEPT_VERSION, 0, 0, 0], fds: Vec::new() };
        // A connection that is about to end is not worth carrying over: the peer connects again.
        let alive = self.connection.as_ref().filter(|c| !c.broken && !c.ended && !self.stale);
        let (received, pending) =
            alive.map_or((&[][..], &[][..]), |connection| (self.inbox.bytes(), &connection.pending[..]));
        handed.state.extend((received.len() as u32).to_le_bytes());
        handed.state.extend((pending.len() as u32).to_le_bytes());
        handed.state.extend_from_slice(received);
        handed.state.extend_from_slice(pending);
        if let Some(connection) = alive {
            handed.fds.push(connection.socket.try_clone().ok()?);
            handed.state[1] |= HAS_CONNECTION;
        }
        if let Role::Listen { listener, .. } = &self.role {
            handed.fds.push(listener.socket.try_clone().ok()?);
            handed.state[1] |= HAS_LISTENER;
        }
        Some(handed)
    }

    fn details(&self) -> Details {
        let (role, address) = match &self.role {
            Role::Listen { listener, .. } => ("listen", listener.address.to_string()),
            Role::Connect { address, .. } => ("connect", address.to_string()),
            Role::Given { .. } => ("given", "a descriptor".into()),
        };
        let peer = self.connection.as_ref().map_or("none".to_string(), |c| endpoint::describe_peer(&c.socket));
        let pending = self.connection.as_ref().map_or(0, |c| c.pending.len());
        vec![
            ("role", role.into()),
            ("address", address.into()),
            ("peer", peer.into()),
            ("peers_so_far", self.connections.into()),
            ("pending_bytes", pending.into()),
            ("mtu", self.mtu.into()),
        ]
    }
}

#[cfg(test)]
pub(crate) mod tests;
