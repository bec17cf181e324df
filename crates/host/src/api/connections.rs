//! The connections of the API: who gets one, and for how long.
//!
//! Purpose: a client that sends half a request, or does not read its answer, costs others nothing. This module knows
//! nothing of requests; [`super::server`] tells it when a connection waits for its client.
//!
//! # Invariants
//! - Users other than root and the owner, and the fabric's own machines and helpers, have [`Limits::strangers`] connections together. They only get 403, and they can
//!   never take a connection from the owner.
//! - Root and the owner always get through. When all connections are taken, a new one replaces one that waits for its
//!   client. It belongs to the process with the most connections, and of these it is the one that has waited longest.
//!   A process never loses a connection to one that has as many or more. Requests that the fabric works on and endless
//!   answers are never replaced.
//! - Of one process at most [`Limits::process`] requests are handled at one time. Further ones wait for their turn, and
//!   may be replaced meanwhile. It has at most as many endless answers, which have a limit for all processes too
//!   (`MAX_STREAMS`). So no process can take all places from the others.
//! - A process is known by its number and start time when it connected. A user who starts a process per connection
//!   is many processes, with the places of one user. Processes without a number here (another PID namespace) count as one.
//! - A connection ends when its client takes longer than [`Limits::head`] for a request's head (or to send the next
//!   request), [`Limits::body`] for a body of sections, or [`Limits::stalled`] without reading any of its answer.
//! - A head is at most 64 KiB (`HEAD_BYTES`), so half-sent heads hold at most 8 MiB.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::{Extension, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Sleep;
use tombolo_shm::{credentials, lineage};

use crate::members;

/// Bytes of a request's head, and of an answer that hyper buffers.
const HEAD_BYTES: usize = 64 << 10;
/// Pause after a connection could not be accepted, for want of descriptors for one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long answers under way may take to reach their clients once the fabric has ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How many connections there may be, and how long one may wait for its client.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections of root and the owner at one time.
    pub connections: usize,
    /// Connections of all other users together.
    pub strangers: usize,
    /// Requests of one process that are handled at one time; also its endless answers.
    pub process: usize,
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
            process: 32,
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
    /// It waits for its client since then, to send or to read, or for its turn behind its client's other requests.
    Waiting(Instant),
    /// The fabric works on its request, which has one of its process's places.
    Working { _place: OwnedSemaphorePermit },
    /// A capture or a console, which goes on for as long as the client wants it.
    Endless,
}

/// Number and start time of a process, in clock ticks after boot; `(0, None)` for one without a number here.
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
pub(super) struct Seat {
    /// The user at the other end, as the kernel says.
    pub(super) uid: u32,
    /// The machine or helper of the fabric that it is or descends from.
    pub(super) member: Option<u32>,
    pub(super) trusted: bool,
    /// The process at the other end.
    pub(super) process: Arc<Process>,
    pub(super) limits: Limits,
    phase: Mutex<Phase>,
    replaced: Notify,
}

impl Seat {
    fn new(uid: u32, member: Option<u32>, trusted: bool, process: Arc<Process>, limits: Limits) -> Seat {
        let phase = Mutex::new(Phase::Waiting(Instant::now()));
        Seat { uid, member, trusted, process, limits, phase, replaced: Notify::new() }
    }

    fn set(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    /// From now on it is the client's turn.
    pub(super) fn waits(&self) {
        self.set(Phase::Waiting(Instant::now()));
    }

    /// From now on it is the fabric's turn, as soon as fewer than [`Limits::process`] requests of its process are handled.
    ///
    /// # Errors
    /// If that took longer than [`Limits::turn`].
    pub(super) async fn works(&self) -> Result<(), Busy> {
        self.waits();
        let place = self.process.requests.clone().acquire_owned();
        match tokio::time::timeout(self.limits.turn, place).await {
            Ok(Ok(place)) => self.set(Phase::Working { _place: place }),
            // The semaphore is never closed.
            Ok(Err(_)) | Err(_) => return Err(Busy),
        }
        Ok(())
    }

    /// From now on it takes as long as the client wants.
    pub(super) fn is_endless(&self) {
        self.set(Phase::Endless);
    }

    fn lasts(&self) -> bool {
        matches!(*self.phase.lock().unwrap_or_else(PoisonError::into_inner), Phase::Endless)
    }

    /// Since when it waits for its client.
    fn waiting_since(&self) -> Option<Instant> {
        match *self.phase.lock().unwrap_or_else(PoisonError::into_inner) {
            Phase::Waiting(since) => Some(since),
            _ => None,
        }
    }
}

/// The process of a request has too many others under way.
#[derive(Debug)]
pub(super) struct Busy;

/// Accepts connections and answers with `router` until `ended` is done, then lets answers under way reach their clients.
pub(super) async fn serve(
    listener: UnixListener,
    owner: u32,
    limits: Limits,
    router: Router,
    ended: impl Future<Output = ()>,
) {
    let mut ended = pin!(ended);
    let mut tasks = JoinSet::new();
    let mut seats: Vec<Arc<Seat>> = Vec::new();
    let (closing, closed) = watch::channel(());
    loop {
        tokio::select! {
            () = &mut ended => break,
            Some(gone) = tasks.join_next() => {
                if let Ok(gone) = gone {
                    seats.retain(|seat| !Arc::ptr_eq(seat, &gone));
                }
            }
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else {
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                };
                // A peer whose user is not told is a stranger.
                let peer = credentials::peer(&stream);
                let uid = peer.map_or(u32::MAX, |peer| peer.uid);
                let pid = peer.map_or(0, |peer| peer.pid_or_zero());
                let member = members::member_of(i32::try_from(pid).ok());
                let trusted = (uid == 0 || uid == owner) && member.is_none();
                let id = (pid, lineage::start_ticks(pid));
                if !admit(&mut seats, trusted, id, &limits) {
                    continue;
                }
                let known = seats.iter().map(|seat| &seat.process).find(|process| process.id == id).cloned();
                let process = known.unwrap_or_else(|| Arc::new(Process::new(id, &limits)));
                let seat = Arc::new(Seat::new(uid, member, trusted, process, limits));
                seats.push(seat.clone());
                let router = router.clone().layer(Extension(seat.clone()));
                tasks.spawn(connection(stream, seat, router, limits, closed.clone()));
            }
        }
    }
    drop(listener);
    drop(closing);
    // What has not reached its client by then is dropped with the tasks.
    let _ = tokio::time::timeout(LAST_WORDS, async { while tasks.join_next().await.is_some() {} }).await;
}

/// Whether there is room for one more connection of that process; makes room where that is allowed.
fn admit(seats: &mut Vec<Arc<Seat>>, trusted: bool, process: ProcessId, limits: &Limits) -> bool {
    let limit = if trusted { limits.connections } else { limits.strangers };
    if seats.iter().filter(|s| s.trusted == trusted).count() < limit {
        return true;
    }
    if !trusted {
        return false;
    }
    let mut held: HashMap<ProcessId, usize> = HashMap::from([(process, 0)]);
    for seat in seats.iter().filter(|s| s.trusted) {
        *held.entry(seat.process.id).or_default() += 1;
    }
    let own = held[&process];
    let waiting = seats.iter().enumerate().filter(|(_, s)| s.trusted);
    let victims = waiting.filter_map(|(at, seat)| {
        let (since, id) = (seat.waiting_since()?, seat.process.id);
        // The new connection counts as one of its own process.
        let held = if id == process { own + 1 } else { held[&id] };
        (held > own).then_some((Reverse(held), since, at))
    });
    let Some((.., at)) = victims.min() else { return false };
    // Its task ends by this; until it has, the connection counts no more.
    seats.swap_remove(at).replaced.notify_one();
    true
}

async fn connection(
    stream: UnixStream,
    seat: Arc<Seat>,
    router: Router,
    limits: Limits,
    mut closed: watch::Receiver<()>,
) -> Arc<Seat> {
    let io = Connection { stream, seat: seat.clone(), stalled: limits.stalled, limit: None };
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.head).max_buf_size(HEAD_BYTES);
    let mut served = pin!(http.serve_connection(TokioIo::new(io), TowerToHyperService::new(router)));
    let mut open = true;
    // Whatever a client has found to wait with: longer than all of its limits together it does not.
    let all = limits.head + limits.body + limits.turn + limits.stalled;
    loop {
        tokio::select! {
            // First, so that a connection that was replaced begins no other request.
            biased;
            () = seat.replaced.notified() => break,
            () = tokio::time::sleep(all) => {
                if seat.waiting_since().is_some_and(|since| since.elapsed() >= all) {
                    break;
                }
            }
            // A client that broke the protocol, or was too slow, has lost its connection; nothing is left to be said.
            _ = &mut served => break,
            _ = closed.changed(), if open => {
                open = false;
                served.as_mut().graceful_shutdown();
            }
        }
    }
    seat
}

/// A stream whose writes fail when the client reads nothing for too long.
struct Connection {
    stream: UnixStream,
    seat: Arc<Seat>,
    stalled: Duration,
    /// Runs while the client does not read.
    limit: Option<Pin<Box<Sleep>>>,
}

impl Connection {
    /// What a write gave, or the end of the client's time.
    fn judge<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() || self.seat.lasts() {
            self.limit = None;
            return written;
        }
        let stalled = self.stalled;
        let limit = self.limit.get_or_insert_with(|| Box::pin(tokio::time::sleep(stalled)));
        ready!(limit.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
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
        self.judge(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connections by process, as the accept loop keeps them.
    struct Seats(Vec<Arc<Seat>>, Limits);

    impl Seats {
        fn connect(&mut self, pid: u32) -> bool {
            let (id, limits) = ((pid, Some(1)), self.1);
            let admitted = admit(&mut self.0, true, id, &limits);
            if admitted {
                self.0.push(Arc::new(Seat::new(0, None, true, Arc::new(Process::new(id, &limits)), limits)));
            }
            assert!(self.0.len() <= limits.connections);
            admitted
        }

        fn held(&self, pid: u32) -> usize {
            self.0.iter().filter(|seat| seat.process.id.0 == pid).count()
        }
    }

    #[test]
    fn processes_that_want_all_connections_share_them_and_take_none_of_those_with_few() {
        let mut seats = Seats(Vec::new(), Limits::default());
        for (pid, wanted) in [(1, 3), (2, 300), (3, 1), (4, 300), (5, 300), (6, 40), (2, 300)] {
            assert!((0..wanted).all(|_| seats.connect(pid)));
        }
        let held: Vec<_> = (1..=6).map(|pid| seats.held(pid)).collect();
        assert_eq!((held[0], held[2]), (3, 1));
        assert!([1, 3, 4, 5].iter().all(|&at| (30..=32).contains(&held[at])), "{held:?}");
        // As many processes as there are connections: the one that waits longest makes room.
        assert!((100..228).all(|pid| seats.connect(pid)));
        assert!((1..=6).all(|pid| seats.held(pid) == 0));
        assert!(seats.connect(228) && seats.held(100) == 0 && seats.held(101) == 1);
    }

    #[test]
    fn what_the_fabric_works_on_is_not_replaced() {
        let mut seats = Seats(Vec::new(), Limits { connections: 4, ..Limits::default() });
        assert!([1, 1, 1, 2].into_iter().all(|pid| seats.connect(pid)));
        seats.0[0].is_endless();
        seats.0[1].is_endless();
        assert!(seats.connect(2) && seats.held(1) == 2, "the one that waits");
        assert!(seats.connect(3) && seats.held(2) == 1);
        assert!(!seats.connect(1), "it has more than the others, and none of its own waits");
        assert!(seats.connect(4));
        assert!([1, 2, 3, 4].map(|pid| seats.held(pid)) == [2, 0, 1, 1], "the oldest of those with one");
    }
}
