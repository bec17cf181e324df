//! The connections of the API: who gets one, and for how long.
//!
//! Purpose: a client that sends half a request, or does not read its answer, costs others nothing. This module knows
//! nothing of requests; [`super::server`] tells it when a connection waits for its client.
//!
//! # Invariants
//! - Users other than root and the owner, and the fabric's own machines and helpers, have [`Limits::strangers`] connections together. They only get 403, and they can
//!   never take a connection from the owner.
//! - Root and the owner always get through. When all connections are taken, a new one replaces the one that has
//!   waited longest for its client. Requests that the fabric works on and endless answers are never replaced; the latter
//!   have a limit of their own.
//! - A connection ends when its client takes longer than [`Limits::head`] for a request's head (or to send the next
//!   request), [`Limits::body`] for a body of sections, or [`Limits::stalled`] without reading any of its answer.
//! - A head is at most 64 KiB (`HEAD_BYTES`), so half-sent heads hold at most 8 MiB.

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
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Sleep;

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
            head: Duration::from_secs(5),
            body: Duration::from_secs(5),
            stalled: Duration::from_secs(10),
        }
    }
}

/// What a connection does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It waits for its client since then, to send or to read.
    Waiting(Instant),
    /// The fabric works on its request.
    Working,
    /// A capture or a console, which goes on for as long as the client wants it.
    Endless,
}

/// One connection, for its task, its requests and the accept loop.
#[derive(Debug)]
pub(super) struct Seat {
    /// The user at the other end, as the kernel says.
    pub(super) uid: u32,
    /// The machine or helper of the fabric that it is or descends from.
    pub(super) member: Option<u32>,
    pub(super) trusted: bool,
    phase: Mutex<Phase>,
    replaced: Notify,
}

impl Seat {
    fn phase(&self) -> Phase {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, phase: Phase) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
    }

    /// From now on it is the client's turn.
    pub(super) fn waits(&self) {
        self.set(Phase::Waiting(Instant::now()));
    }

    /// From now on it is the fabric's turn.
    pub(super) fn works(&self) {
        self.set(Phase::Working);
    }

    /// From now on it takes as long as the client wants.
    pub(super) fn is_endless(&self) {
        self.set(Phase::Endless);
    }

    /// Since when it waits for its client.
    fn waiting_since(&self) -> Option<Instant> {
        match self.phase() {
            Phase::Waiting(since) => Some(since),
            _ => None,
        }
    }
}

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
                let (uid, pid) = stream.peer_cred().map_or((u32::MAX, None), |c| (c.uid(), c.pid()));
                let member = members::member_of(pid);
                let trusted = (uid == 0 || uid == owner) && member.is_none();
                if !admit(&mut seats, trusted, &limits) {
                    continue;
                }
                let phase = Mutex::new(Phase::Waiting(Instant::now()));
                let seat = Arc::new(Seat { uid, member, trusted, phase, replaced: Notify::new() });
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

/// Whether there is room for one more connection; makes room where that is allowed.
fn admit(seats: &mut Vec<Arc<Seat>>, trusted: bool, limits: &Limits) -> bool {
    let limit = if trusted { limits.connections } else { limits.strangers };
    if seats.iter().filter(|s| s.trusted == trusted).count() < limit {
        return true;
    }
    if !trusted {
        return false;
    }
    let waiting = seats.iter().enumerate().filter(|(_, s)| s.trusted);
    let longest = waiting.filter_map(|(at, s)| s.waiting_since().map(|since| (since, at))).min();
    let Some((_, at)) = longest else { return false };
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
    let all = limits.head + limits.body + limits.stalled;
    loop {
        tokio::select! {
            () = tokio::time::sleep(all) => {
                if seat.waiting_since().is_some_and(|since| since.elapsed() >= all) {
                    break;
                }
            }
            // A client that broke the protocol, or was too slow, has lost its connection; nothing is left to be said.
            _ = &mut served => break,
            () = seat.replaced.notified() => break,
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
        if written.is_ready() || self.seat.phase() == Phase::Endless {
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
