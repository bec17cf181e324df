//! The connections of the API: who gets one, and for how long.
//!
//! Purpose: a client that sends half a request, or does not read its answer, costs others nothing.
//! This module knows nothing of requests; [`super::server`] tells it when a connection waits for
//! its client.
//!
//! # Invariants
//! - Users other than root and the owner, and the fabric's own machines and helpers, have
//!   [`Limits::strangers`] connections together. They only get 403, and they can never take a
//!   connection from the owner.
//! - Root and the owner always get through. When all connections are taken, a new one replaces one
//!   that waits for its client or for its turn. It belongs to the process with the most
//!   connections, and of these it is one that waits for its client, the longest-waiting first. A
//!   process never loses a connection to one that has as many or more. Requests that the fabric
//!   works on and endless answers are never replaced.
//! - At most [`Limits::working`] connections have a request that is handled or an endless answer,
//!   and twice [`Limits::short`] have a short request (`status`, `down`) that is handled. That is
//!   fewer than there are connections, so a process without a connection always finds one to
//!   replace. Further requests wait for their turn, and may be replaced meanwhile. Short requests
//!   wait for others of their kind only. Turns are given in the order in which requests came, so a
//!   connection with pipelined requests gets one answer and then waits behind the others.
//! - Of one process at most [`Limits::process`] requests are handled at one time, short ones aside.
//!   It has at most as many endless answers, which have a limit for all processes too
//!   (`MAX_STREAMS`).
//! - A new connection of root or the owner that finds no place waits [`Limits::slot`] for one. It
//!   is told by a 503 if there is none, and so is a request that was replaced while it waited for
//!   its turn.
//! - A refused connection is cheap: what was found out about its process holds for a second
//!   (`members::Peers`).
//! - A process is known by its number and start time when it connected. A user who starts a process
//!   per connection is many processes, with the places of one user. Processes without a number here
//!   (another PID namespace) count as one.
//! - A connection ends when its client takes longer than [`Limits::head`] for a request's head (or
//!   to send the next request), [`Limits::body`] for a body of sections, or [`Limits::stalled`]
//!   without reading any of its answer.
//! - A connection is closed only when its client has sent what it wanted to, or `LINGER` after its
//!   last answer, so that the answer to a refused body (413) arrives instead of a reset. It may be
//!   replaced meanwhile.
//! - A head is at most 64 KiB (`HEAD_BYTES`), so half-sent heads hold at most 8 MiB.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use super::report::Fault;
use crate::members::Peers;
use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Sleep;

/// Bytes of a request's head, and of an answer that hyper buffers.
const HEAD_BYTES: usize = 64 << 10;
/// Pause after a connection could not be accepted because no descriptor was free for it.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long answers under way may take to reach their clients once the fabric has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// New connections that may wait for a place, and how often they look for one.
const LOBBY: usize = 32;
const LOOK: Duration = Duration::from_millis(20);
/// Replaced requests that may be told so at one time, and how long that may take.
const FAREWELLS: usize = 32;
const FAREWELL: Duration = Duration::from_millis(100);
/// How long a connection that has had its last answer may still send what is not read any more, and
/// how much of it is read at once. Closing before would reset the connection, and its client might
/// lose the answer.
const LINGER: Duration = Duration::from_secs(5);
const LINGER_CHUNK: usize = 16 << 10;

/// How many connections there may be, and how long one may wait for its client.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections of root and the owner at one time.
    pub connections: usize,
    /// Connections of all other users together.
    pub strangers: usize,
    /// Requests of all processes that are handled at one time, with their endless answers.
    pub working: usize,
    /// Requests for `status` that are handled at one time; also of those for `down`. They count
    /// nowhere else.
    pub short: usize,
    /// Requests of one process that are handled at one time; also its endless answers.
    pub process: usize,
    /// Time that a new connection of root or the owner waits for a place.
    pub slot: Duration,
    /// Time that a request waits for its turn behind others of its process.
    pub turn: Duration,
    /// Time for a request's head, and between two requests.
    pub head: Duration,
    /// Time for a body of sections.
    pub body: Duration,
    /// Time in which a client has to read some of an answer that is not endless.
    pub stalled: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 128,
            strangers: 8,
            working: 96,
            short: 12,
            process: 32,
            slot: Duration::from_secs(1),
            turn: Duration::from_secs(5),
            head: Duration::from_secs(5),
            body: Duration::from_secs(5),
            stalled: Duration::from_secs(10),
        }
    }
}

/// What a connection does.
#[derive(Debug)]
enum Phase {
    /// It waits for its client since then, to send or to read, or for its turn behind other
    /// requests.
    Waiting { since: Instant, turn: bool },
    /// The fabric works on its request, which has a place among all and, unless it is short, one of
    /// its process's.
    Working { all: OwnedSemaphorePermit, _own: Option<OwnedSemaphorePermit> },
    /// A capture or a console, which goes on for as long as the client wants it.
    Endless { _all: Option<OwnedSemaphorePermit> },
}

/// What a request waits behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// `status`, behind others of its kind.
    Status,
    /// `down`, behind others of its kind.
    Down,
    /// Everything else.
    Common,
}

/// What all connections share.
#[derive(Debug)]
struct Places {
    common: Arc<Semaphore>,
    status: Arc<Semaphore>,
    down: Arc<Semaphore>,
    farewells: Semaphore,
}

impl Places {
    fn new(limits: &Limits) -> Places {
        let of = |places| Arc::new(Semaphore::new(places));
        let farewells = Semaphore::new(FAREWELLS);
        Places { common: of(limits.working), status: of(limits.short), down: of(limits.short), farewells }
    }
}

/// Number and start time of a process, in clock ticks after boot; `(0, None)` for one without a
/// number here.
type ProcessId = (u32, Option<u64>);

/// What the connections of one process share.
#[derive(Debug)]
pub(super) struct Process {
    id: ProcessId,
    requests: Arc<Semaphore>,
    /// For its endless answers.
    pub(super) streams: Arc<Semaphore>,
}

impl Process {
    fn new(id: ProcessId, limits: &Limits) -> Process {
        let places = || Arc::new(Semaphore::new(limits.process));
        Process { id, requests: places(), streams: places() }
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.id.0 {
            0 => f.write_str("the clients in other PID namespaces together"),
            pid => write!(f, "process {pid}"),
        }
    }
}

/// One connection, for its task, its requests and the accept loop.
#[derive(Debug)]
pub(super) struct OpenConnection {
    /// The user at the other end, as the kernel says.
    pub(super) uid: u32,
    /// The machine or helper of the fabric that it is or descends from.
    pub(super) member: Option<u32>,
    pub(super) trusted: bool,
    /// The process at the other end.
    pub(super) process: Arc<Process>,
    pub(super) limits: Limits,
    places: Arc<Places>,
    phase: Mutex<Phase>,
    replaced: Notify,
    /// Rung when it is replaced while it waits for its turn, so that it can say so.
    turned_away: Notify,
}

impl OpenConnection {
    fn new(peer: &Peer, process: Arc<Process>, limits: Limits, places: Arc<Places>) -> OpenConnection {
        let phase = Mutex::new(Phase::Waiting { since: Instant::now(), turn: false });
        let Peer { uid, member, trusted, .. } = *peer;
        let (replaced, turned_away) = (Notify::new(), Notify::new());
        OpenConnection { uid, member, trusted, process, limits, places, phase, replaced, turned_away }
    }

    fn set(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    /// From now on it is the client's turn.
    pub(super) fn waits(&self) {
        self.set(Phase::Waiting { since: Instant::now(), turn: false });
    }

    /// From now on it is the fabric's turn, as soon as there is a place in that line.
    ///
    /// # Errors
    /// If that took longer than [`Limits::turn`], or its connection was replaced.
    pub(super) async fn works(&self, line: Line) -> Result<(), Busy> {
        self.set(Phase::Waiting { since: Instant::now(), turn: true });
        // None of the semaphores is ever closed.
        let place = async {
            let (own, all) = match line {
                Line::Status => (None, &self.places.status),
                Line::Down => (None, &self.places.down),
                // Its own place first, so that one process has no more than its share of the common
                // line.
                Line::Common => (self.process.requests.clone().acquire_owned().await.ok(), &self.places.common),
            };
            (own, all.clone().acquire_owned().await.ok())
        };
        tokio::select! {
            biased;
            () = self.turned_away.notified() => Err(Busy::Replaced),
            place = tokio::time::timeout(self.limits.turn, place) => match place {
                Ok((own, Some(all))) => {
                    self.set(Phase::Working { all, _own: own });
                    Ok(())
                }
                Ok((_, None)) | Err(_) => Err(self.late(line)),
            },
        }
    }

    /// What it has waited for in vain.
    fn late(&self, line: Line) -> Busy {
        let own = self.process.requests.available_permits() == 0;
        if line == Line::Common && own { Busy::Process } else { Busy::All }
    }

    /// From now on it takes as long as the client wants. It keeps its place among all.
    pub(super) fn is_endless(&self) {
        let mut phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        *phase = match std::mem::replace(&mut *phase, Phase::Endless { _all: None }) {
            Phase::Working { all, .. } => Phase::Endless { _all: Some(all) },
            other @ Phase::Endless { .. } => other,
            Phase::Waiting { .. } => Phase::Endless { _all: None },
        };
    }

    fn lasts(&self) -> bool {
        matches!(*self.phase.lock().unwrap_or_else(PoisonError::into_inner), Phase::Endless { .. })
    }

    /// Since when it waits, and whether that is for its turn; `None` where it does not wait.
    fn waiting(&self) -> Option<(Instant, bool)> {
        match *self.phase.lock().unwrap_or_else(PoisonError::into_inner) {
            Phase::Waiting { since, turn } => Some((since, turn)),
            _ => None,
        }
    }
}

/// Why a request is not handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Busy {
    /// Its process has too many others under way.
    Process,
    /// All processes together have.
    All,
    /// It waited for its turn, and a new connection needed its place.
    Replaced,
}

/// The process at the other end of a new connection.
#[derive(Clone, Copy, Debug)]
struct Peer {
    id: ProcessId,
    uid: u32,
    member: Option<u32>,
    trusted: bool,
}

/// A new connection that looks for a place.
struct Newcomer {
    stream: UnixStream,
    peer: Peer,
    until: Instant,
}

/// Accepts connections and answers with `router` until `ended` is done, then lets answers under way
/// reach their clients.
pub(super) async fn serve(
    listener: UnixListener,
    owner: u32,
    limits: Limits,
    router: Router,
    ended: impl Future<Output = ()>,
) {
    let mut ended = pin!(ended);
    let mut tasks = JoinSet::new();
    let mut slots: Vec<Arc<OpenConnection>> = Vec::new();
    let mut lobby: VecDeque<Newcomer> = VecDeque::new();
    let mut peers = Peers::default();
    let places = Arc::new(Places::new(&limits));
    let (closing, closed) = watch::channel(());
    let admit_to_slot =
        |slots: &mut Vec<Arc<OpenConnection>>, stream, peer: Peer, tasks: &mut JoinSet<Arc<OpenConnection>>| {
            let known = slots.iter().map(|slot| &slot.process).find(|process| process.id == peer.id).cloned();
            let process = known.unwrap_or_else(|| Arc::new(Process::new(peer.id, &limits)));
            let slot = Arc::new(OpenConnection::new(&peer, process, limits, places.clone()));
            slots.push(slot.clone());
            tasks.spawn(connection(stream, slot, router.clone(), limits, closed.clone()));
        };
    loop {
        tokio::select! {
            () = &mut ended => break,
            Some(gone) = tasks.join_next() => {
                if let Ok(gone) = gone {
                    slots.retain(|slot| !Arc::ptr_eq(slot, &gone));
                }
            }
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else {
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                };
                // One that has ended reads no answer, and what it descends from cannot be told any
                // more.
                let Some(found) = peers.look(&stream) else { continue };
                let trusted = (found.uid == 0 || found.uid == owner) && found.member.is_none();
                let peer = Peer { id: (found.pid, found.ticks), uid: found.uid, member: found.member, trusted };
                if !trusted && found.is_known {
                    refuse(&stream, &peer, owner);
                } else if admit(&mut slots, &peer, &limits) {
                    admit_to_slot(&mut slots, stream, peer, &mut tasks);
                } else if trusted && lobby.len() < LOBBY {
                    lobby.push_back(Newcomer { stream, peer, until: Instant::now() + limits.slot });
                } else {
                    refuse(&stream, &peer, owner);
                }
                continue;
            }
            () = tokio::time::sleep(LOOK), if !lobby.is_empty() => {}
        }
        for _ in 0..lobby.len() {
            let Some(Newcomer { stream, peer, until }) = lobby.pop_front() else { break };
            if admit(&mut slots, &peer, &limits) {
                admit_to_slot(&mut slots, stream, peer, &mut tasks);
            } else if Instant::now() < until {
                lobby.push_back(Newcomer { stream, peer, until });
            } else {
                refuse(&stream, &peer, owner);
            }
        }
    }
    drop(listener);
    drop(closing);
    // What has not reached its client by then is dropped with the tasks.
    let _ = tokio::time::timeout(LAST_WORDS, async { while tasks.join_next().await.is_some() {} }).await;
}

/// Whether there is room for one more connection of that process; makes room where that is allowed.
fn admit(slots: &mut Vec<Arc<OpenConnection>>, peer: &Peer, limits: &Limits) -> bool {
    let (trusted, process) = (peer.trusted, peer.id);
    let limit = if trusted { limits.connections } else { limits.strangers };
    if slots.iter().filter(|s| s.trusted == trusted).count() < limit {
        return true;
    }
    if !trusted {
        return false;
    }
    let mut held: HashMap<ProcessId, usize> = HashMap::from([(process, 0)]);
    for slot in slots.iter().filter(|s| s.trusted) {
        *held.entry(slot.process.id).or_default() += 1;
    }
    let own = held[&process];
    let waiting = slots.iter().enumerate().filter(|(_, s)| s.trusted);
    let victims = waiting.filter_map(|(at, slot)| {
        let ((since, turn), id) = (slot.waiting()?, slot.process.id);
        // The new connection counts as one of its own process.
        let held = if id == process { own + 1 } else { held[&id] };
        (held > own).then_some((Reverse(held), turn, since, at))
    });
    let Some((.., at)) = victims.min() else { return false };
    // Its task ends by this; until it has, the connection counts no more.
    slots.swap_remove(at).replaced.notify_one();
    true
}

/// Why somebody else's request is not carried out.
pub(super) fn forbidden(uid: u32, member: Option<u32>, owner: u32) -> Fault {
    let error = match member {
        Some(member) => format!("process {member} is a machine or helper of this fabric and may not use it"),
        None => format!("user {uid} may not use this fabric: expected root or its owner, user {owner}"),
    };
    Fault { error, hint: Some("run it as the owner, or with sudo".into()), problems: vec![] }
}

/// Tells a connection why it gets no place, if it reads that, and closes it. Takes no time.
fn refuse(stream: &UnixStream, peer: &Peer, owner: u32) {
    let (status, fault) = if peer.trusted {
        let error = "all connections are taken, and this process has as many as the others";
        let hint = Some("close some of them, or try again".into());
        ("503 Service Unavailable\r\nRetry-After: 1", Fault { error: error.into(), hint, problems: vec![] })
    } else {
        ("403 Forbidden", forbidden(peer.uid, peer.member, owner))
    };
    let body = serde_json::to_string(&fault).unwrap_or_default();
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/json\r\n");
    // Read, so that closing does not reset the connection. A client that went meanwhile is no
    // matter.
    let _ = rustix::io::read(stream, &mut [0; 4096]);
    let answer = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    let _ = rustix::net::send(stream, answer.as_bytes(), flags);
}

/// The API for one connection: its requests know its slot.
struct InSlot {
    router: TowerToHyperService<Router>,
    slot: Arc<OpenConnection>,
}

impl Service<Request<Incoming>> for InSlot {
    type Response = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Response;
    type Error = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Error;
    type Future = <TowerToHyperService<Router> as Service<Request<Incoming>>>::Future;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(self.slot.clone());
        self.router.call(request)
    }
}

async fn connection(
    stream: UnixStream,
    slot: Arc<OpenConnection>,
    router: Router,
    limits: Limits,
    mut closed: watch::Receiver<()>,
) -> Arc<OpenConnection> {
    let io = Connection {
        stream,
        slot: slot.clone(),
        stalled: limits.stalled,
        limit: None,
        closed: closed.clone(),
        linger: None,
    };
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(HEAD_BYTES);
    let service = InSlot { router: TowerToHyperService::new(router), slot: slot.clone() };
    let mut served = pin!(http.serve_connection(TokioIo::new(io), service));
    let mut open = true;
    // However a client manages to wait, it does not wait longer than all of its limits together.
    let all = limits.head + limits.body + limits.turn + limits.stalled;
    loop {
        tokio::select! {
            // First, so that a connection that was replaced begins no other request.
            biased;
            () = slot.replaced.notified() => {
                let told = slot.places.farewells.try_acquire();
                if told.is_ok() && slot.waiting().is_some_and(|(_, turn)| turn) {
                    slot.turned_away.notify_one();
                    served.as_mut().graceful_shutdown();
                    // What has not reached its client by then does not.
                    let _ = tokio::time::timeout(FAREWELL, served.as_mut()).await;
                }
                break;
            }
            () = tokio::time::sleep(all) => {
                if slot.waiting().is_some_and(|(since, _)| since.elapsed() >= all) {
                    break;
                }
            }
            // A client that broke the protocol, or was too slow, has lost its connection; nothing
            // is left to be said.
            _ = &mut served => break,
            _ = closed.changed(), if open => {
                open = false;
                served.as_mut().graceful_shutdown();
            }
        }
    }
    slot
}

/// A stream whose writes fail when the client reads nothing for too long, and that is closed only
/// when the client has sent all it wanted to (at most [`LINGER`] later): a refused body is never
/// read, and its client may still be writing.
struct Connection {
    stream: UnixStream,
    slot: Arc<OpenConnection>,
    stalled: Duration,
    /// Runs while the client does not read.
    limit: Option<Pin<Box<Sleep>>>,
    /// Has lost its sender when the server ends: then nothing is waited for.
    closed: watch::Receiver<()>,
    /// Runs from the end of the last answer on.
    linger: Option<Pin<Box<Sleep>>>,
}

impl Connection {
    /// What a write gave, or the end of the client's time.
    fn classify<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() || self.slot.lasts() {
            self.limit = None;
            return written;
        }
        let stalled = self.stalled;
        let limit = self.limit.get_or_insert_with(|| Box::pin(tokio::time::sleep(stalled)));
        ready!(limit.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// Reads and forgets what the client sends until it hangs up or its time is over.
    fn drain(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let mut chunk = [0; LINGER_CHUNK];
        let limit = self.linger.get_or_insert_with(|| Box::pin(tokio::time::sleep(LINGER)));
        while limit.as_mut().poll(cx).is_pending() {
            let mut buf = ReadBuf::new(&mut chunk);
            match Pin::new(&mut self.stream).poll_read(cx, &mut buf) {
                Poll::Ready(Ok(())) if !buf.filled().is_empty() => {}
                Poll::Ready(_) => break,
                Poll::Pending if self.closed.has_changed().is_err() => break,
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(())
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.classify(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.linger.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        }
        ready!(self.drain(cx));
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connections by process, as the accept loop keeps them.
    struct Slots(Vec<Arc<OpenConnection>>, Limits);

    impl Slots {
        fn connect(&mut self, pid: u32) -> bool {
            let (id, limits) = ((pid, Some(1)), self.1);
            let peer = Peer { id, uid: 0, member: None, trusted: true };
            let admitted = admit(&mut self.0, &peer, &limits);
            if admitted {
                let process = Arc::new(Process::new(id, &limits));
                self.0.push(Arc::new(OpenConnection::new(&peer, process, limits, Arc::new(Places::new(&limits)))));
            }
            assert!(self.0.len() <= limits.connections);
            admitted
        }

        fn held(&self, pid: u32) -> usize {
            self.0.iter().filter(|slot| slot.process.id.0 == pid).count()
        }
    }

    #[test]
    fn processes_that_want_all_connections_share_them_and_take_none_of_those_with_few() {
        let mut slots = Slots(Vec::new(), Limits::default());
        for (pid, wanted) in [(1, 3), (2, 300), (3, 1), (4, 300), (5, 300), (6, 40), (2, 300)] {
            assert!((0..wanted).all(|_| slots.connect(pid)));
        }
        let held: Vec<_> = (1..=6).map(|pid| slots.held(pid)).collect();
        assert_eq!((held[0], held[2]), (3, 1));
        assert!([1, 3, 4, 5].iter().all(|&at| (30..=32).contains(&held[at])), "{held:?}");
        // As many processes as there are connections: the one that waits longest makes room.
        assert!((100..228).all(|pid| slots.connect(pid)));
        assert!((1..=6).all(|pid| slots.held(pid) == 0));
        assert!(slots.connect(228) && slots.held(100) == 0 && slots.held(101) == 1);
    }

    #[test]
    fn what_the_fabric_works_on_is_not_replaced() {
        let mut slots = Slots(Vec::new(), Limits { connections: 4, ..Limits::default() });
        assert!([1, 1, 1, 2].into_iter().all(|pid| slots.connect(pid)));
        slots.0[0].is_endless();
        slots.0[1].is_endless();
        assert!(slots.connect(2) && slots.held(1) == 2, "the one that waits");
        assert!(slots.connect(3) && slots.held(2) == 1);
        assert!(!slots.connect(1), "it has more than the others, and none of its own waits");
        assert!(slots.connect(4));
        assert!([1, 2, 3, 4].map(|pid| slots.held(pid)) == [2, 0, 1, 1], "the oldest of those with one");
    }

    #[test]
    fn a_request_that_waits_for_its_turn_is_replaced_after_those_that_wait_for_their_clients() {
        let mut slots = Slots(Vec::new(), Limits { connections: 3, ..Limits::default() });
        assert!([1, 2, 3].into_iter().all(|pid| slots.connect(pid)));
        slots.0[0].set(Phase::Waiting { since: Instant::now(), turn: true });
        assert!(slots.connect(4) && slots.connect(5) && slots.held(1) == 1);
        assert!([4, 5].map(|pid| slots.held(pid)) == [1, 1]);
        slots.0.iter().for_each(|slot| slot.set(Phase::Waiting { since: Instant::now(), turn: true }));
        assert!(slots.connect(6), "none of them is worked on");
    }

    #[test]
    fn there_are_more_connections_than_are_worked_on_at_one_time() {
        let limits = Limits::default();
        assert!(limits.working + 2 * limits.short < limits.connections);
        assert!(super::super::server::MAX_STREAMS < limits.working, "captures leave room for requests");
    }
}
