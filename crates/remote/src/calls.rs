//! Calls with one peer, from any thread: blocking or not, both ways.
//!
//! This module has no thread of its own. One of the threads that wait (a caller, a server), the
//! leader, sleeps on the link's doorbells or the connection, and takes what arrives for all of
//! them. Each of the others waits on a condition variable of its own, and is woken when there is
//! something for it ([`Interest`]): a reply wakes its caller, and a request one server. Another one
//! becomes the leader when the leader has what it waited for. All servers of a connection lead at
//! the same time: the kernel wakes one of them for what arrives, so that none has to wake the next
//! one.
//!
//! A thread that takes something while the leader sleeps on a link's doorbells wakes it, since the
//! peer has been told that we are awake. So nothing happens while no thread waits: a peer's
//! requests are served while a thread serves ([`Calls::serve`]).

use std::collections::BTreeSet;
use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tombolo_calls::session::{ServeOptions, Stats};
use tombolo_calls::transport::Stream;
use tombolo_calls::{CallError, CallOptions, Deadline, Reply, Request, RequestId, Response};
use tombolo_ring::ivshmem::backoff::Backoff;
use tombolo_ring::rpc::entry::{BEST_EFFORT, Status, Token};
use tombolo_rpc::clock::now_ns;

use crate::machine::Socket;
use crate::machine::wire::StreamEnd;
use crate::transport::{self, RemoteError, RemoteTransport, Wakers};

/// So much from now; what is longer than any run is as good as for ever.
fn after(left: Duration) -> Instant {
    Instant::now() + left.min(Duration::from_secs(1 << 30))
}

/// A wait without a limit is a sequence of such.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// Called when a request that is being served is cancelled.
type Hook = Box<dyn FnOnce() + Send>;

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interest {
    /// The end of this call.
    Reply(Token),
    /// A request to serve, by any one of those that wait for one.
    Request,
    /// Anything that changes.
    Change,
}

struct CallsState {
    transport: RemoteTransport,
    /// For requests that are being served.
    hooks: Vec<(RequestId, Hook)>,
    /// Those that sleep on the doorbells or the connection: one, or some that all wait for
    /// requests.
    leaders: Vec<Interest>,
    /// The others.
    followers: Vec<(Interest, Arc<Condvar>)>,
    /// A thread waits for the connection's end ([`Calls::wait_end`]).
    has_watcher: bool,
    /// Requests that threads of [`Calls::serve`] work on.
    serving: u32,
    /// Calls that wait for room, by deadline and then in the order in which they came.
    waiting: BTreeSet<(u64, u64)>,
    /// How many calls have waited so far.
    waited: u64,
    /// Calls that were cancelled, and until when their answers are waited for.
    cancelled: Vec<(Token, Instant)>,
}

impl CallsState {
    /// Whether a thread with this interest may sleep on the doorbells or the connection.
    fn may_lead(&self, interest: Interest) -> bool {
        let all_serve = || interest == Interest::Request && self.leaders.iter().all(|other| *other == interest);
        self.leaders.is_empty() || self.transport.stream().is_some() && all_serve()
    }

    /// Whether a thread with this interest has to look. Requests that wait are counted down in
    /// `requests`.
    fn concerns(&self, interest: Interest, requests: &mut usize) -> bool {
        // Each wait ends with the peer, or goes on in another way.
        if !self.transport.is_up() || transport::server_is_gone(&self.transport) {
            return true;
        }
        match interest {
            Interest::Reply(token) => {
                self.transport.session().is_settled(token) || self.cancelled.iter().any(|(of, _)| *of == token)
            }
            Interest::Request => {
                let any = *requests > 0;
                *requests = requests.saturating_sub(1);
                any
            }
            Interest::Change => true,
        }
    }
}

struct CallsInner {
    state: Mutex<CallsState>,
    wakers: Wakers,
    workers: u32,
}

/// One side of calls with a peer: it calls and is called. A clone refers to the same one.
#[derive(Clone)]
pub struct Calls(Arc<CallsInner>);

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").field("up", &self.is_up()).finish_non_exhaustive()
    }
}

impl Calls {
    fn new((transport, wakers): (RemoteTransport, Wakers), options: &ServeOptions) -> Calls {
        let state = Mutex::new(CallsState {
            transport,
            hooks: Vec::new(),
            leaders: Vec::new(),
            followers: Vec::new(),
            has_watcher: false,
            serving: 0,
            waiting: BTreeSet::new(),
            waited: 0,
            cancelled: Vec::new(),
        });
        Calls(Arc::new(CallsInner { state, wakers, workers: options.workers.max(1) }))
    }

    /// Takes a seat on the link whose server listens at `path`. The peer need not be there yet, and
    /// may come and go.
    ///
    /// # Errors
    /// [`RemoteError`]: no such link, no free seat, or one that was made for something else than calls.
    pub fn join(path: impl AsRef<Path>, timeout: Duration, options: &ServeOptions) -> Result<Calls, RemoteError> {
        Ok(Calls::new(transport::join(path.as_ref(), timeout, options)?, options))
    }

    /// Connects to a peer that listens for calls by TCP. When the connection ends, this is over
    /// ([`Calls::is_over`]).
    ///
    /// # Errors
    /// [`RemoteError`]: nothing listens there, or it is no peer of calls.
    pub fn connect(to: SocketAddr, timeout: Duration, options: &ServeOptions) -> Result<Calls, RemoteError> {
        let stream = TcpStream::connect_timeout(&to, timeout).map_err(|source| RemoteError::Connect { to, source })?;
        Calls::over(stream, timeout, options)
    }

    /// Uses an established connection, such as one that a listener accepted.
    ///
    /// # Errors
    /// [`RemoteError`]: the other side is no peer of calls.
    pub fn over(stream: TcpStream, timeout: Duration, options: &ServeOptions) -> Result<Calls, RemoteError> {
        Calls::on(StreamEnd::plain(Socket::Tcp(stream)), Instant::now() + timeout, options)
    }

    pub(crate) fn on(stream: StreamEnd, until: Instant, options: &ServeOptions) -> Result<Calls, RemoteError> {
        Ok(Calls::new(transport::greet(stream, until, options)?, options))
    }

    fn lock(&self) -> MutexGuard<'_, CallsState> {
        // Each change under the lock is whole, whether it panics or not.
        self.0.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Follows the peer, and has others look where something came for them. Returns whether
    /// anything did.
    fn turn(&self, state: &mut CallsState) -> bool {
        self.turn_for(state, None)
    }

    /// As [`Calls::turn`], for a thread that then looks for what it waits for itself.
    fn turn_for(&self, state: &mut CallsState, own: Option<Interest>) -> bool {
        let was_deaf = transport::server_is_gone(&state.transport);
        let any = state.transport.turn(now_ns()) | (was_deaf != transport::server_is_gone(&state.transport));
        if any {
            self.tell(state, own);
            let CallsState { transport, hooks, .. } = state;
            for (_, hook) in hooks.extract_if(.., |(id, _)| transport.session().is_cancelled(*id)) {
                hook();
            }
        }
        any
    }

    /// Has the others look for which there is something. A request is left to a thread that serves
    /// itself (`own`).
    fn tell(&self, state: &CallsState, own: Option<Interest>) {
        let mut requests =
            state.transport.session().pending().saturating_sub(usize::from(own == Some(Interest::Request)));
        let mut nudges = false;
        for leader in &state.leaders {
            nudges |= state.concerns(*leader, &mut requests);
        }
        // On a link the leader has told the peer that it sleeps, which no longer holds.
        if nudges || !state.leaders.is_empty() && state.transport.link().is_some() {
            // If it concerns several, each of them wakes the next one.
            self.0.wakers.nudge.ring();
        }
        for (interest, turn) in &state.followers {
            if state.concerns(*interest, &mut requests) {
                turn.notify_one();
            }
        }
        if state.has_watcher && !state.transport.is_up() {
            self.0.wakers.end.ring();
        }
    }

    /// The end of a call was fetched, so that another one may begin.
    fn has_room(&self, state: &CallsState) {
        if !state.waiting.is_empty() {
            self.tell(state, None);
        }
    }

    /// Works on the transport. Others look where the link broke by that. Where the connection takes
    /// no more, the leader hears when it does.
    fn with<T>(&self, state: &mut CallsState, work: impl FnOnce(&mut RemoteTransport) -> T) -> T {
        let was_up = state.transport.is_up();
        let done = work(&mut state.transport);
        if was_up != state.transport.is_up() {
            self.tell(state, None);
        }
        if !state.leaders.is_empty() && transport::has_input(&state.transport) {
            self.0.wakers.nudge.ring();
        }
        done
    }

    /// Waits until `ready` gives something, or `until`. `interest` says when it may.
    fn wait<T>(
        &self,
        until: Instant,
        interest: Interest,
        mut ready: impl FnMut(&mut CallsState) -> Option<T>,
    ) -> Option<T> {
        let mut backoff = Backoff::default();
        let mut state = self.lock();
        let found = loop {
            if self.turn_for(&mut state, Some(interest)) {
                backoff.found();
            }
            if let Some(found) = ready(&mut state) {
                break Some(found);
            }
            let left = until.saturating_duration_since(Instant::now()).min(LONGEST_SLEEP);
            if left.is_zero() {
                break None;
            }
            if !state.may_lead(interest) {
                let turn = Arc::new(Condvar::new());
                state.followers.push((interest, turn.clone()));
                state = turn.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
                state.followers.retain(|(_, other)| !Arc::ptr_eq(other, &turn));
                continue;
            }
            if !self.with(&mut state, |transport| transport.arm()) {
                continue;
            }
            state.leaders.push(interest);
            let listens = !transport::server_is_gone(&state.transport);
            drop(state);
            let is_heard = self.0.wakers.wait(left, listens, &mut backoff);
            state = self.lock();
            if let Some(at) = state.leaders.iter().position(|leader| *leader == interest) {
                state.leaders.swap_remove(at);
            }
            if is_heard {
                transport::hear(&mut state.transport);
            }
        };
        if !state.leaders.is_empty() {
            let is_next = !state.transport.is_up() || state.transport.session().pending() > 0;
            if is_next && state.transport.stream().is_some() {
                self.0.wakers.nudge.ring();
            }
        } else {
            // Another thread's turn to sleep on the doorbells: rather one that something arrives
            // for.
            let next = state.followers.iter().max_by_key(|(interest, _)| *interest != Interest::Change);
            if let Some((_, turn)) = next {
                turn.notify_one();
            }
        }
        found
    }

    /// Whether the peer is there.
    pub fn is_up(&self) -> bool {
        let mut state = self.lock();
        self.turn(&mut state);
        state.transport.is_up()
    }

    /// Waits until the peer is there; false where it did not come in time, or never will: the
    /// connection or the link's server has ended.
    pub fn wait_up(&self, timeout: Duration) -> bool {
        let found = self.wait(Instant::now() + timeout, Interest::Change, |state| {
            let ended = state.transport.is_over() || transport::server_is_gone(&state.transport);
            (state.transport.is_up() || ended).then(|| state.transport.is_up())
        });
        found.unwrap_or(false)
    }

    /// Waits until the peer is not there, or the link's server has ended; false where neither is so
    /// after `timeout`.
    pub fn wait_down(&self, timeout: Duration) -> bool {
        let ended = |state: &mut CallsState| {
            (!state.transport.is_up() || transport::server_is_gone(&state.transport)).then_some(())
        };
        self.wait(Instant::now() + timeout, Interest::Change, ended).is_some()
    }

    /// As [`Calls::wait_down`], where other threads take what arrives, or nothing is to be taken
    /// until one calls: on a connection this thread listens to its end only. So a reply or a
    /// request wakes the thread that it is for, and not first this one.
    pub(crate) fn wait_end(&self, timeout: Duration) -> bool {
        let until = after(timeout);
        let mut state = self.lock();
        self.turn(&mut state);
        if state.transport.stream().is_some() && state.transport.is_up() && !state.has_watcher {
            state.has_watcher = true;
            drop(state);
            let is_heard = self.0.wakers.wait_end(timeout);
            state = self.lock();
            state.has_watcher = false;
            self.turn(&mut state);
            if !is_heard || !state.transport.is_up() {
                return !state.transport.is_up();
            }
            // The other side has ended, and what it left has to be taken before that is seen.
        }
        drop(state);
        self.wait_down(until.saturating_duration_since(Instant::now()))
    }

    /// Whether the server of the link has ended, with its fabric. The link itself goes on, but
    /// peers that die are no longer reported.
    pub fn server_is_gone(&self) -> bool {
        let mut state = self.lock();
        transport::hear(&mut state.transport);
        self.turn(&mut state);
        transport::server_is_gone(&state.transport)
    }

    /// Whether the peer is gone for good: its connection has ended.
    pub fn is_over(&self) -> bool {
        let mut state = self.lock();
        self.turn(&mut state);
        state.transport.is_over()
    }

    /// Counters that only grow.
    pub fn stats(&self) -> Stats {
        self.lock().transport.session().stats()
    }

    /// The shortest time that a call was on its way, there and back; `None` before the first
    /// answer.
    pub fn way(&self) -> Option<Duration> {
        self.lock().transport.session().way_ns().map(Duration::from_nanos)
    }

    /// Ends a connection, and with it this side ([`Calls::is_over`]); nothing on a link.
    pub fn hang_up(&self) {
        let mut state = self.lock();
        if let Some((stream, _)) = state.transport.stream_mut() {
            Stream::close(stream);
        }
        self.turn(&mut state);
    }

    /// Requests of the peer's that wait.
    pub fn pending(&self) -> usize {
        let mut state = self.lock();
        self.turn(&mut state);
        state.transport.session().pending()
    }

    /// Our calls that hold a slot: under way, or done and not fetched.
    pub fn under_way(&self) -> usize {
        let mut state = self.lock();
        self.turn(&mut state);
        state.transport.session().under_way()
    }

    /// Calls, and waits for the reply.
    ///
    /// # Errors
    /// [`CallError`]: what else it ended with; also where the link's server ended meanwhile, [`CallError::ProviderGone`].
    pub fn call(&self, bytes: &[u8], options: &CallOptions) -> Result<Reply, CallError> {
        let (limit, over) = options.limit(now_ns());
        let was_deaf = transport::server_is_gone(&self.lock().transport);
        let token = self.submit(bytes, options)?;
        self.end_of(token, after(limit), over, was_deaf)
    }

    /// As [`Calls::call`]. Where as many calls or bytes are under way as the connection holds, it
    /// waits for room, the earliest deadline first; its deadline and timeout hold meanwhile.
    /// `begun` is told the token before the wait for the reply, so that another thread may cancel
    /// the call.
    ///
    /// # Errors
    /// As there, without [`CallError::Busy`].
    pub fn call_in_turn(
        &self,
        bytes: &[u8],
        options: &CallOptions,
        begun: impl FnOnce(Token),
    ) -> Result<Reply, CallError> {
        let now = now_ns();
        let (limit, over) = options.limit(now);
        let until = after(limit);
        // An instant, since it may be sent later.
        let deadline_ns = options.deadline.instant_ns(|| now, BEST_EFFORT);
        let options = CallOptions { deadline: Deadline::At(deadline_ns), ..*options };
        let (was_deaf, turn) = {
            let mut state = self.lock();
            state.waited += 1;
            let turn = (deadline_ns, state.waited);
            state.waiting.insert(turn);
            (transport::server_is_gone(&state.transport), turn)
        };
        let sent = self.wait(until, Interest::Change, |state| {
            // Where the peer is not there, each is told so at once.
            if state.transport.is_up() && state.waiting.first() != Some(&turn) {
                return None;
            }
            match self.with(state, |transport| transport.submit(&options, bytes, now_ns())) {
                Err(CallError::Busy(_)) => None,
                end => Some(end),
            }
        });
        let mut state = self.lock();
        state.waiting.remove(&turn);
        if !state.waiting.is_empty() {
            // The next one's turn.
            self.tell(&state, None);
        }
        drop(state);
        let token = sent.unwrap_or(Err(over))?;
        begun(token);
        self.end_of(token, until, over, was_deaf)
    }

    /// Waits for the end of a call, and abandons it where it has none in time.
    fn end_of(&self, token: Token, until: Instant, over: CallError, was_deaf: bool) -> Result<Reply, CallError> {
        let mut until = until;
        let end = loop {
            // An earlier end of the wait, since the call was cancelled meanwhile.
            let mut sooner = None;
            let end = self.wait(until, Interest::Reply(token), |state| {
                // Who waits would not be told that the peer dies.
                let is_lost = !was_deaf && transport::server_is_gone(&state.transport);
                let end = state.transport.fetch(token, None);
                let end = end.map_or_else(|| is_lost.then_some(Err(CallError::ProviderGone)), Some);
                let cancelled = state.cancelled.iter().find(|(of, at)| *of == token && *at < until);
                sooner = cancelled.map(|(_, at)| *at).filter(|_| end.is_none());
                end.or(sooner.map(|_| Err(over)))
            });
            match sooner {
                Some(at) => until = at,
                None => break end.unwrap_or(Err(over)),
            }
        };
        let mut state = self.lock();
        state.cancelled.retain(|(of, _)| *of != token);
        self.has_room(&state);
        drop(state);
        if matches!(end, Err(CallError::DeadlineExceeded | CallError::Timeout | CallError::ProviderGone)) {
            self.give_up(token);
        }
        end
    }

    /// Asks without waiting. What it ends with is fetched by [`Calls::poll`] or
    /// [`Calls::wait_for`]; until then it holds a slot.
    ///
    /// # Errors
    /// [`CallError::Busy`], [`CallError::TooLong`], [`CallError::ProviderGone`]: nothing was sent.
    pub fn submit(&self, bytes: &[u8], options: &CallOptions) -> Result<Token, CallError> {
        let mut state = self.lock();
        self.turn(&mut state);
        self.with(&mut state, |transport| transport.submit(options, bytes, now_ns()))
    }

    /// How a call ended; `None` while it is under way. From its deadline on
    /// [`CallError::DeadlineExceeded`], and the token names nothing any more.
    pub fn poll(&self, token: Token) -> Option<Result<Reply, CallError>> {
        let mut state = self.lock();
        self.turn(&mut state);
        let end = self.with(&mut state, |transport| transport.poll(token, now_ns()));
        if end.is_some() {
            self.has_room(&state);
        }
        end
    }

    /// Waits for the end of a call, which is its deadline at the latest; `None` where it is still
    /// under way after `timeout`.
    pub fn wait_for(&self, token: Token, timeout: Duration) -> Option<Result<Reply, CallError>> {
        let until_ns = self.lock().transport.session().until_ns(token);
        let left = Duration::from_nanos(until_ns.saturating_sub(now_ns()));
        let end =
            self.wait(after(timeout.min(left)), Interest::Reply(token), |state| state.transport.fetch(token, None));
        if end.is_some() {
            self.has_room(&self.lock());
        }
        end.or_else(|| self.poll(token))
    }

    /// Asks the peer to take a call back. Its answer still comes: [`CallError::Cancelled`], or what
    /// it was if service had begun. False where the token names no call under way.
    pub fn cancel(&self, token: Token) -> bool {
        let mut state = self.lock();
        self.with(&mut state, |transport| transport.cancel(token))
    }

    /// As [`Calls::cancel`]; who waits for the call in [`Calls::call`] or [`Calls::call_in_turn`]
    /// waits no longer than `grace` from now on.
    pub(crate) fn cancel_within(&self, token: Token, grace: Duration) {
        let mut state = self.lock();
        if self.with(&mut state, |transport| transport.cancel(token)) {
            // Whom an earlier end concerned has taken it by then; a call that no caller waits for
            // leaves nothing behind.
            let now = Instant::now();
            state.cancelled.retain(|(_, at)| *at > now);
            state.cancelled.push((token, after(grace)));
            self.tell(&state, None);
        }
    }

    /// Abandons this call: it is cancelled, and its slot becomes free with its answer.
    pub fn give_up(&self, token: Token) {
        let mut state = self.lock();
        self.with(&mut state, |transport| transport.give_up(token));
    }

    /// Waits for the next request of the peer's, earliest deadline first; [`Calls::respond`]
    /// answers it. From the first such call on what the peer asks waits for the next; before, it is
    /// answered as failed.
    pub fn next(&self, timeout: Duration) -> Option<Request> {
        self.lock().transport.serve();
        self.wait(Instant::now() + timeout, Interest::Request, |state| match self.take(state) {
            None if state.transport.is_over() => Some(None),
            request => request.map(Some),
        })
        .flatten()
    }

    fn take(&self, state: &mut CallsState) -> Option<Request> {
        self.with(state, |transport| transport.next(now_ns()))
    }

    /// Has `hook` called when the answer to a request that is being served is no longer awaited:
    /// its caller cancels it, or is gone. It is called at once if that was so before, and never if
    /// the request is answered first. The thread that notices calls it, and blocks all other use of
    /// this side meanwhile. So the hook must be short, and must not use these [`Calls`].
    pub fn on_cancelled(&self, request: &Request, hook: impl FnOnce() + Send + 'static) {
        let mut state = self.lock();
        if state.transport.session().is_cancelled(request.id()) {
            hook();
        } else {
            state.hooks.push((request.id(), Box::new(hook)));
        }
    }

    /// Answers a request. Where the peer has gone since, nothing happens.
    pub fn respond(&self, request: &Request, response: Response) {
        let mut state = self.lock();
        state.hooks.retain(|(id, _)| *id != request.id());
        self.with(&mut state, |transport| transport.respond(request, response, now_ns()));
    }

    /// Serves what the peer asks by `handler`, as many requests at a time as
    /// [`ServeOptions::workers`] says, until what is returned is dropped. There is one thread more
    /// than that, so that requests are taken, and their deadlines begin to run on our clock, while
    /// others are served. A handler that panics costs its request, answered as failed.
    ///
    /// # Errors
    /// [`RemoteError::System`] where no thread can be had.
    pub fn serve(&self, handler: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Result<Server, RemoteError> {
        self.lock().transport.serve();
        let handler = Arc::new(handler);
        let mut server = Server { calls: self.clone(), stop: Arc::new(AtomicBool::new(false)), threads: Vec::new() };
        for _ in 0..=self.0.workers {
            let (calls, stop, handler) = (self.clone(), server.stop.clone(), handler.clone());
            let work = move || calls.work(&stop, &*handler);
            let spawned = std::thread::Builder::new().name("tombolo-calls".into()).spawn(work);
            let thread = spawned.map_err(|source| RemoteError::System { what: "starting a thread", source })?;
            server.threads.push(thread);
        }
        Ok(server)
    }

    /// Serves until the peer is over, or `stop`.
    fn work(&self, stop: &AtomicBool, handler: &impl Fn(&Request) -> Response) {
        let mut over = false;
        while !over {
            let request = self.wait(Instant::now() + LONGEST_SLEEP, Interest::Request, |state| {
                over = stop.load(Ordering::SeqCst) || state.transport.is_over();
                if over {
                    return Some(None);
                }
                let request = if state.serving < self.0.workers { self.take(state) } else { None };
                state.serving += u32::from(request.is_some());
                request.map(Some)
            });
            let Some(request) = request.flatten() else { continue };
            let response = catch_unwind(AssertUnwindSafe(|| handler(&request)));
            self.respond(&request, response.unwrap_or_else(|_| Response::end(Status::Failed)));
            self.lock().serving -= 1;
        }
        // The next one's turn to end.
        self.0.wakers.nudge.ring();
    }
}

/// Serves until it is dropped; a handler under way is waited for.
#[derive(Debug)]
pub struct Server {
    calls: Calls,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let Calls(shared) = &self.calls;
        // The lock orders it: a thread that has looked at the flag before sleeps by now.
        self.calls.lock().followers.iter().for_each(|(_, turn)| turn.notify_one());
        shared.wakers.nudge.ring();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
