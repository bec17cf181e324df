//! How a peer is reached: over the sections of a link, or over a TCP connection. What both have in common is [`Transport`].
//!
//! A link outlives its peer: it goes down when that stops or dies, and comes up again with the next one. A connection ends once. Either
//! way, calls under way end at once ([`Session::lost`]). A peer that breaks the protocol has its link reset, or its connection closed.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tombolo_calls::CallError;
use tombolo_calls::carrier::Carrier;
use tombolo_calls::frames::Frames;
use tombolo_calls::sections::{Plan, Rings};
use tombolo_calls::session::{ServeOptions, Session};
use tombolo_port::ivshmem::client::{JoinError, Joined, Link};
use tombolo_port::ivshmem::raw::RawPeer;
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::rpc::Broken;
use tombolo_ring::virtio::notify::RECHECK_NS;
use tombolo_rpc::clock::now_ns;
use tombolo_shm::doorbell::Doorbell;

/// Without a doorbell: the first pause between two looks of a wait, of which each is twice as long as the one before.
const FIRST_NAP: Duration = Duration::from_micros(50);
const LONGEST_NAP: Duration = Duration::from_millis(4);
/// From a sleep to its second look, where peers ring.
const SECOND_LOOK: Duration = Duration::from_nanos(RECHECK_NS);
const READ_BYTES: usize = 64 << 10;

/// Why there are no calls with a peer.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum RemoteError {
    /// The link could not be joined.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The link's output sections are too small.
    #[error("output sections of {bytes} bytes hold no calls; give the link a region of 64K or more")]
    Sections { bytes: u64 },
    /// The link has more than two peers.
    #[error("the link has {peers} peers; calls need exactly two: one member and seats = 1, or two members")]
    Peers {
        /// How many it can have.
        peers: u32,
    },
    /// No connection.
    #[error(
        "connecting to {to}: {source}; expected a peer that listens for calls there, such as the cell `calc` with \
         tcp=PORT"
    )]
    Connect { to: SocketAddr, source: io::Error },
    /// A TCP connection.
    #[error("{what}: {source}")]
    Stream { what: &'static str, source: io::Error },
    /// The other side of a connection speaks something else, or nothing.
    #[error("the other side of the connection does not speak the calls protocol: {0}")]
    Greeting(&'static str),
    /// The system refused a descriptor or a thread.
    #[error("{what}: {source}")]
    System { what: &'static str, source: io::Error },
}

fn system(what: &'static str) -> impl Fn(Errno) -> RemoteError {
    move |errno| RemoteError::System { what, source: errno.into() }
}

/// What wakes a thread that waits, while others use the way.
pub(crate) struct Wakers {
    doorbells: Vec<Doorbell>,
    /// The link's server, or the connection.
    socket: OwnedFd,
    /// Rung by other threads of this process.
    pub(crate) nudge: Doorbell,
    /// We have no doorbell: the memory is looked at again and again.
    polled: bool,
}

/// A wait's pauses.
pub(crate) struct Backoff {
    /// The next one, if no doorbell is rung.
    polled: Duration,
    /// Where peers ring: the last look was the second one of a sleep. The first pause is short, since a machine's memory fences
    /// may do nothing ([`tombolo_ring::virtio::notify`]).
    looked_twice: bool,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff { polled: FIRST_NAP, looked_twice: false }
    }
}

impl Backoff {
    /// Something came, so the next sleep has a second look again.
    pub(crate) fn found(&mut self) {
        self.looked_twice = false;
    }
}

impl Wakers {
    /// Waits until something may have come, at most `left`. Returns whether something is at the socket.
    pub(crate) fn wait(&self, left: Duration, socket: PollFlags, backoff: &mut Backoff) -> bool {
        let pause = if self.polled {
            left.min(backoff.polled)
        } else if self.doorbells.is_empty() || backoff.looked_twice {
            left
        } else {
            left.min(SECOND_LOOK)
        };
        backoff.polled = (backoff.polled * 2).min(LONGEST_NAP);
        let doorbells = || self.doorbells.iter().chain([&self.nudge]);
        let mut fds: Vec<PollFd<'_>> = doorbells().map(|doorbell| PollFd::new(doorbell, PollFlags::IN)).collect();
        if !socket.is_empty() {
            fds.push(PollFd::new(&self.socket, socket));
        }
        // An interrupted wait looks again; a time beyond what the kernel counts is none.
        let Ok(ready) = poll(&mut fds, Timespec::try_from(pause).ok().as_ref()) else { return false };
        backoff.looked_twice = ready == 0;
        let rung = |fd: &PollFd<'_>| !fd.revents().is_empty();
        for (doorbell, _) in doorbells().zip(&fds).filter(|(_, fd)| rung(fd)) {
            doorbell.take();
        }
        fds.get(doorbells().count()).is_some_and(rung)
    }
}

/// Over a link.
struct OnLink {
    link: Link<RawPeer>,
    plan: Plan,
    rings: Rings,
    /// The link's epoch that `rings` belong to, and whether the peer's headers were looked at in it.
    epoch: u64,
    checked: bool,
    /// The server has said something, or may have.
    heard: bool,
    /// The conversation with the server failed or ended: it is not listened to any more.
    deaf: bool,
}

/// Over a connection.
struct OnStream {
    stream: TcpStream,
    frames: Frames,
    over: bool,
}

enum Kind {
    Link(Box<OnLink>),
    Stream(OnStream),
}

/// One side of calls with a peer: the session, and what carries it. It is used under one lock.
pub(crate) struct Transport {
    pub(crate) session: Session,
    kind: Kind,
    up: bool,
}

impl Transport {
    pub(crate) fn join(
        path: &Path,
        timeout: Duration,
        options: &ServeOptions,
    ) -> Result<(Transport, Wakers), RemoteError> {
        let joined = Joined::connect(path, timeout)?;
        let layout = joined.header().layout;
        let (peers, bytes) = (layout.max_peers, layout.output_bytes);
        if peers != 2 {
            return Err(RemoteError::Peers { peers });
        }
        let plan = Plan::new(bytes).ok_or(RemoteError::Sections { bytes })?;
        let peer = 1u32.wrapping_sub(joined.id());
        let polled = joined.header().vectors == 0;
        let link =
            joined.raw(peer, protocol::CALLS, "0x4002, a link for calls", Box::new(move |own| plan.clear(own)))?;
        let (doorbells, socket) = link.wakers()?;
        let nudge = Doorbell::new().map_err(system("eventfd"))?;
        // No epoch of a link has that number.
        let on =
            OnLink { link, plan, rings: Rings::new(plan), epoch: u64::MAX, checked: false, heard: true, deaf: false };
        let session = Session::new(plan.entries(), options);
        let transport = Transport { session, kind: Kind::Link(Box::new(on)), up: false };
        Ok((transport, Wakers { doorbells, socket, nudge, polled }))
    }

    /// Greets, and waits for the other side's greeting.
    pub(crate) fn greet(
        mut stream: TcpStream,
        timeout: Duration,
        options: &ServeOptions,
    ) -> Result<(Transport, Wakers), RemoteError> {
        let failed = |what| move |source| RemoteError::Stream { what, source };
        stream.set_nodelay(true).map_err(failed("TCP_NODELAY"))?;
        stream.set_read_timeout(Some(timeout)).map_err(failed("a time limit"))?;
        let mut frames = Frames::default();
        stream.write_all(frames.output()).map_err(failed("greeting"))?;
        frames.sent(frames.output().len());
        let end = Instant::now() + timeout;
        let entries = loop {
            let greeted = frames.greeted().map_err(|_| RemoteError::Greeting("it greets otherwise"))?;
            if let Some(entries) = greeted {
                break entries;
            }
            let mut bytes = [0; READ_BYTES];
            match stream.read(&mut bytes) {
                Ok(0) => return Err(RemoteError::Greeting("it closed the connection")),
                Ok(n) => _ = frames.feed(&bytes[..n]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Err(RemoteError::Greeting("it does not answer"));
                }
                Err(source) => return Err(RemoteError::Stream { what: "the greeting", source }),
            }
            if Instant::now() > end {
                return Err(RemoteError::Greeting("it does not answer"));
            }
        };
        stream.set_nonblocking(true).map_err(failed("O_NONBLOCK"))?;
        let socket = rustix::io::fcntl_dupfd_cloexec(&stream, 3).map_err(system("a descriptor"))?;
        let nudge = Doorbell::new().map_err(system("eventfd"))?;
        let session = Session::new(entries, options);
        let transport = Transport { session, kind: Kind::Stream(OnStream { stream, frames, over: false }), up: true };
        Ok((transport, Wakers { doorbells: Vec::new(), socket, nudge, polled: false }))
    }

    /// Whether the peer is there, as of the last look.
    pub(crate) fn is_up(&self) -> bool {
        self.up
    }

    /// Whether it never comes again.
    pub(crate) fn is_over(&self) -> bool {
        matches!(&self.kind, Kind::Stream(on) if on.over)
    }

    /// Whether peers that come and go are no longer reported.
    pub(crate) fn server_is_gone(&self) -> bool {
        matches!(&self.kind, Kind::Link(on) if on.deaf)
    }

    /// Something is at the socket.
    pub(crate) fn hear(&mut self) {
        if let Kind::Link(on) = &mut self.kind {
            on.heard = true;
        }
    }

    /// What of the socket a thread that sleeps listens to.
    pub(crate) fn listens(&self) -> PollFlags {
        match &self.kind {
            Kind::Link(on) if on.deaf => PollFlags::empty(),
            Kind::Link(_) => PollFlags::IN,
            Kind::Stream(on) if on.over => PollFlags::empty(),
            Kind::Stream(on) => {
                let mut flags = PollFlags::empty();
                flags.set(PollFlags::IN, on.frames.wanted() > 0);
                flags.set(PollFlags::OUT, !on.frames.output().is_empty());
                flags
            }
        }
    }

    /// Whether something is left to be sent as soon as the connection takes it.
    pub(crate) fn has_unsent(&self) -> bool {
        matches!(&self.kind, Kind::Stream(on) if !on.frames.output().is_empty())
    }

    /// Works on the session with what carries it. What the peer broke, it loses; `None` then, and where it is not there.
    pub(crate) fn with<T>(
        &mut self,
        work: impl FnOnce(&mut Session, &mut dyn Carrier) -> Result<T, Broken>,
    ) -> Option<T> {
        if !self.up {
            return None;
        }
        let Transport { session, kind, .. } = self;
        let result = match kind {
            Kind::Link(on) => {
                let OnLink { link, rings, checked, .. } = &mut **on;
                let result = (|| {
                    let (own, peer) = link.peer_ref().sections().ok_or(Broken::Short)?;
                    let mut wire = rings.on(own, peer)?;
                    if !*checked {
                        wire.check_peer()?;
                        *checked = true;
                    }
                    work(session, &mut wire)
                })();
                if rings.take_ring() {
                    link.peer().ring();
                }
                result
            }
            Kind::Stream(on) => {
                let result = work(session, &mut on.frames);
                on.flush();
                result
            }
        };
        match result {
            Ok(value) => Some(value),
            Err(broken) => {
                self.fault(broken);
                None
            }
        }
    }

    /// The peer broke the protocol.
    fn fault(&mut self, broken: Broken) {
        self.up = false;
        match &mut self.kind {
            Kind::Link(on) => {
                on.link.peer().fault();
                // A peer that has stopped meanwhile has cleared what was read.
                let stopped = on.link.peer().states().1 == tombolo_ring::ivshmem::state::State::Reset;
                self.session.lost(if stopped { CallError::ProviderGone } else { CallError::Broken(broken) });
            }
            Kind::Stream(on) => {
                on.close();
                self.session.lost(CallError::Broken(broken));
            }
        }
    }

    /// Follows the peer, takes what it sent, sends what waits. Returns whether anything came or changed.
    pub(crate) fn turn(&mut self) -> bool {
        let was_up = self.up;
        // Before the peer's state: what it wrote before it went is still an answer.
        let mut any = self.drain();
        let gone = match &mut self.kind {
            Kind::Link(on) => {
                let was_deaf = on.deaf;
                // A system call, which calls do without while the peer's word says that it is there.
                let up = if was_up && !std::mem::take(&mut on.heard) {
                    on.link.peer().step()
                } else {
                    // An error of the conversation is no end of the link.
                    on.link.step().unwrap_or_else(|_| {
                        on.deaf = true;
                        on.link.peer().step()
                    })
                };
                on.deaf |= on.link.server_is_gone();
                any |= was_deaf != on.deaf;
                let epoch = on.link.peer().epoch();
                let is_new = epoch != on.epoch;
                if is_new {
                    (on.rings, on.epoch, on.checked) = (Rings::new(on.plan), epoch, false);
                }
                self.up = up;
                was_up && (is_new || !up)
            }
            Kind::Stream(on) => {
                self.up = !on.over;
                was_up && on.over
            }
        };
        if gone {
            self.session.lost(CallError::ProviderGone);
        }
        if self.up && !was_up {
            any |= self.drain();
        }
        any || was_up != self.up
    }

    fn drain(&mut self) -> bool {
        if let Kind::Stream(on) = &mut self.kind {
            // What is in the buffer is taken below; the end is seen after it.
            on.read();
        }
        self.with(|session, transport| session.drain(transport, now_ns())).unwrap_or(false)
    }

    /// Says that we are about to sleep; false where something waits.
    pub(crate) fn arm(&mut self) -> bool {
        if !self.up {
            return true;
        }
        self.with(|_, transport| transport.arm()).unwrap_or(true)
    }
}

impl OnStream {
    /// Takes what has come, as far as it is wanted.
    fn read(&mut self) {
        let mut bytes = [0; READ_BYTES];
        while !self.over {
            let wanted = self.frames.wanted().min(bytes.len());
            if wanted == 0 {
                return;
            }
            match self.stream.read(&mut bytes[..wanted]) {
                Ok(0) => self.over = true,
                Ok(n) => _ = self.frames.feed(&bytes[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.over = true,
            }
        }
    }

    /// Sends what waits, as far as the connection takes it.
    fn flush(&mut self) {
        while !self.over && !self.frames.output().is_empty() {
            match self.stream.write(self.frames.output()) {
                Ok(n) => self.frames.sent(n),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.over = true,
            }
        }
    }

    fn close(&mut self) {
        self.over = true;
        // The other side may have closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
