//! How a process reaches a peer: by the sections of a link that it joined, or over a TCP
//! connection. What becomes of calls when the peer comes, goes or breaks the protocol is decided in
//! [`tombolo_calls::transport`]; this module has the memory, the sockets and the sleep.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tombolo_calls::frames::Frames;
use tombolo_calls::sections::Plan;
use tombolo_calls::session::ServeOptions;
use tombolo_calls::transport::{Sections, Stream as _, Transport};
use tombolo_ivshmem::client::{JoinError, Joined, JoinedLink};
use tombolo_ivshmem::doorbells::OwnDoorbells;
use tombolo_ivshmem::raw::RawPeer;
use tombolo_ring::ivshmem::backoff::Backoff;
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::state::State;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::Broken;
use tombolo_shm::doorbell::Doorbell;

use crate::machine::wire::{StreamEnd, Timed};

/// What an event of a connection is of.
const SOCKET: u64 = 0;
const NUDGE: u64 = 1;
/// What is read of a greeting at a time.
const READ_BYTES: usize = 4 << 10;

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

/// What wakes a thread that waits, while others use the transport.
pub(crate) struct Wakers {
    doorbells: OwnDoorbells,
    /// The link's server, or the connection.
    socket: OwnedFd,
    /// What tells of each change at the connection and of each nudge once, to one of the threads
    /// that wait.
    connection: Option<OwnedFd>,
    /// Rung by other threads of this process.
    pub(crate) nudge: Doorbell,
    /// As `nudge`, for the thread that waits for the connection's end.
    pub(crate) end: Doorbell,
}

impl Wakers {
    /// Waits until something may have come, at most `left`, on a link with its server where that is
    /// listened to. Returns whether something is at the socket.
    pub(crate) fn wait(&self, left: Duration, listens: bool, backoff: &mut Backoff) -> bool {
        match &self.connection {
            Some(epoll) => self.wait_connection(epoll, left),
            None => self.wait_link(left, listens, backoff),
        }
    }

    fn wait_connection(&self, connection: &OwnedFd, left: Duration) -> bool {
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 2];
        // As in `wait_link`.
        let left = Timespec::try_from(left).ok();
        let Ok(found) = epoll::wait(connection, &mut events[..], left.as_ref()) else { return false };
        let has = |what| events[..found].iter().any(|event| event.data.u64() == what);
        if has(NUDGE) {
            self.nudge.take();
        }
        has(SOCKET)
    }

    fn wait_link(&self, left: Duration, listens: bool, backoff: &mut Backoff) -> bool {
        let pause = backoff.pause(self.doorbells.wakes()).map_or(left, |pause| left.min(pause));
        let own = self.doorbells.all();
        let mut fds: Vec<PollFd<'_>> =
            own.iter().chain([&self.nudge]).map(|doorbell| PollFd::new(doorbell, PollFlags::IN)).collect();
        if listens {
            fds.push(PollFd::new(&self.socket, PollFlags::IN));
        }
        // An interrupted wait looks again; a time beyond what the kernel counts is none.
        let Ok(ready) = poll(&mut fds, Timespec::try_from(pause).ok().as_ref()) else { return false };
        if ready != 0 {
            backoff.found();
        }
        let is_rung = |at: usize| fds.get(at).is_some_and(|fd| !fd.revents().is_empty());
        self.doorbells.take(is_rung);
        if is_rung(own.len()) {
            self.nudge.take();
        }
        is_rung(own.len() + 1)
    }

    /// Waits for the end of the connection, at most `left`, or until `end` is rung. Returns whether
    /// the other side has ended it.
    pub(crate) fn wait_end(&self, left: Duration) -> bool {
        // Errors and the end in both directions are reported unasked.
        let mut fds = [PollFd::new(&self.end, PollFlags::IN), PollFd::new(&self.socket, PollFlags::RDHUP)];
        if poll(&mut fds, Timespec::try_from(left).ok().as_ref()).is_err() {
            return false;
        }
        let [is_rung, is_heard] = [0, 1].map(|at| !fds[at].revents().is_empty());
        if is_rung {
            self.end.take();
        }
        is_heard
    }
}

/// Our end of a link, and the conversation with its server.
pub(crate) struct LinkEnd {
    link: JoinedLink<RawPeer>,
    /// The server has said something, or may have.
    heard: bool,
    /// The conversation with the server failed or ended: it is not listened to any more.
    deaf: bool,
}

impl Sections for LinkEnd {
    /// The plan is applied by the link's own `clear`.
    fn follow(&mut self, _: &Plan) -> Result<bool, Broken> {
        // A system call, which calls do without while the peer's word says that it is there.
        let up = if self.link.peer_ref().is_up() && !std::mem::take(&mut self.heard) {
            self.link.peer().step()
        } else {
            // An error of the conversation is no end of the link.
            self.link.step().unwrap_or_else(|_| {
                self.deaf = true;
                self.link.peer().step()
            })
        };
        self.deaf |= self.link.server_is_gone();
        Ok(up)
    }

    fn epoch(&self) -> u64 {
        self.link.peer_ref().epoch()
    }

    fn sections(&self) -> Option<(ForeignMut<'_>, Foreign<'_>)> {
        self.link.peer_ref().sections()
    }

    fn ring(&mut self) {
        self.link.peer().ring();
    }

    fn fault(&mut self) -> bool {
        self.link.peer().fault();
        self.link.peer().states().1 == State::Reset
    }
}

/// One side of calls with a peer. It is used under one lock.
pub(crate) type RemoteTransport = Transport<LinkEnd, StreamEnd>;

/// Takes a peer ID on the link whose server listens at `path`.
pub(crate) fn join(
    path: &Path,
    timeout: Duration,
    options: &ServeOptions,
) -> Result<(RemoteTransport, Wakers), RemoteError> {
    let joined = Joined::connect(path, timeout)?;
    let layout = joined.header().layout;
    let (peers, bytes) = (layout.max_peers, layout.output_bytes);
    if peers != 2 {
        return Err(RemoteError::Peers { peers });
    }
    let plan = Plan::new(bytes).ok_or(RemoteError::Sections { bytes })?;
    let peer = 1u32.wrapping_sub(joined.id());
    let link = joined.raw(peer, protocol::CALLS, "0x4002, a link for calls", Box::new(move |own| plan.clear(own)))?;
    let (doorbells, socket) = link.wakers()?;
    let [nudge, ended] = [Doorbell::new().map_err(system("eventfd"))?, Doorbell::new().map_err(system("eventfd"))?];
    let end = LinkEnd { link, heard: true, deaf: false };
    let transport = Transport::on_link(end, plan, options);
    Ok((transport, Wakers { doorbells, socket, connection: None, nudge, end: ended }))
}

/// Greets, and waits for the other side's greeting.
pub(crate) fn greet(
    mut stream: StreamEnd,
    until: Instant,
    options: &ServeOptions,
) -> Result<(RemoteTransport, Wakers), RemoteError> {
    let failed = |what| move |source| RemoteError::Stream { what, source };
    stream.socket().set_nodelay().map_err(failed("TCP_NODELAY"))?;
    let mut frames = Frames::default();
    let mut timed = Timed { end: &mut stream, until };
    timed.write_all(frames.output()).map_err(failed("greeting"))?;
    frames.sent(frames.output().len());
    let entries = loop {
        let greeted = frames.greeted().map_err(|_| RemoteError::Greeting("it greets otherwise"))?;
        if let Some(entries) = greeted {
            break entries;
        }
        let mut bytes = [0; READ_BYTES];
        match timed.read(&mut bytes) {
            Ok(0) => return Err(RemoteError::Greeting("it closed the connection")),
            Ok(n) => _ = frames.feed(&bytes[..n]),
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                return Err(RemoteError::Greeting("it does not answer"));
            }
            Err(source) => return Err(RemoteError::Stream { what: "the greeting", source }),
        }
    };
    stream.socket().set_nonblocking(true).map_err(failed("O_NONBLOCK"))?;
    let socket = rustix::io::fcntl_dupfd_cloexec(stream.socket(), 3).map_err(system("a descriptor"))?;
    let [nudge, end] = [Doorbell::new().map_err(system("eventfd"))?, Doorbell::new().map_err(system("eventfd"))?];
    let connection = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll"))?;
    let listen = |fd: BorrowedFd<'_>, what, flags| {
        epoll::add(&connection, fd, EventData::new_u64(what), flags | EventFlags::ET).map_err(system("epoll"))
    };
    listen(socket.as_fd(), SOCKET, EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP)?;
    listen(nudge.as_fd(), NUDGE, EventFlags::IN)?;
    let transport = Transport::on_stream(stream, frames, entries, options);
    let wakers = Wakers { doorbells: Vec::new().into(), socket, connection: Some(connection), nudge, end };
    Ok((transport, wakers))
}

/// Whether peers that come and go are no longer reported.
pub(crate) fn server_is_gone(transport: &RemoteTransport) -> bool {
    transport.link().is_some_and(|end| end.deaf)
}

/// Whether the connection has bytes that are wanted now and were not before: no change at the
/// socket tells of them.
pub(crate) fn has_input(transport: &RemoteTransport) -> bool {
    transport.stream().is_some_and(|(stream, frames)| stream.has_more() && frames.wanted() > 0)
}

/// Something is at the socket.
pub(crate) fn hear(transport: &mut RemoteTransport) {
    if let Some(end) = transport.link_mut() {
        end.heard = true;
    }
}

#[cfg(test)]
mod tests {
    use tombolo_ring::ivshmem::backoff::Wakes;

    use super::*;

    const LONG: Duration = Duration::from_secs(100);

    /// A cell's first ring can get lost ([`tombolo_ring::ivshmem::backoff`]).
    #[test]
    fn before_the_first_ring_the_memory_is_looked_at_again_and_after_it_once() {
        let doorbells = OwnDoorbells::from(vec![Doorbell::new().unwrap(), Doorbell::new().unwrap()]);
        let other = doorbells.duplicate().unwrap();
        let socket = Doorbell::new().unwrap().as_fd().try_clone_to_owned().unwrap();
        let [nudge, end] = [Doorbell::new().unwrap(), Doorbell::new().unwrap()];
        let wakers = Wakers { doorbells, socket, connection: None, nudge, end };
        let mut backoff = Backoff::default();
        let began = Instant::now();
        for look in 0..10 {
            assert!(!wakers.wait(LONG, true, &mut backoff), "nothing is at the socket");
            assert!(began.elapsed() < LONG / 4, "look {look}: after {:?}", began.elapsed());
        }
        // Another thread's nudge is no ring of the peer's.
        wakers.nudge.ring();
        wakers.wait(LONG, true, &mut backoff);
        assert_eq!(wakers.doorbells.wakes(), Wakes::Unheard);
        other.all()[1].ring();
        wakers.wait(LONG, true, &mut backoff);
        assert_eq!(wakers.doorbells.wakes(), Wakes::Heard);
        let short = Duration::from_millis(50);
        for (look, least) in [Duration::ZERO, short, short].into_iter().enumerate() {
            let began = Instant::now();
            wakers.wait(short, true, &mut backoff);
            assert!(began.elapsed() >= least, "look {look} after a ring: after {:?}", began.elapsed());
        }
    }
}
