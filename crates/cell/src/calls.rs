//! Calls with deadlines: a cell calls its peer, and serves it, over a link of shared memory or over TCP.
//!
//! A [`Calls`] is one side ([`Net::calls`](crate::Net::calls), [`Net::calls_over`](crate::Net::calls_over)). The
//! decisions are made in [`tombolo_calls`], the same as on the other side: earliest deadline first, exactly one end of
//! each call, deadlines that cross as time left. A clone refers to the same side, and any task may use it.
//!
//! # Tasks
//! One task, the driver, belongs to each side. It sleeps until the peer rings (or sends), takes what came, and wakes
//! the tasks that wait for it. A request is served by one of the tasks of [`Calls::serve`]. So a handler may wait, also
//! for its own calls.
//!
//! # Failure
//! A peer that stops or dies ends each call in progress at once with [`CallError::ProviderGone`]. Over a link, the next
//! peer is served as the last one was; over TCP, this side is over. A peer that breaks the protocol has its link reset,
//! after 10 ms of rest, or its connection aborted; no other peer notices. A link without doorbell is polled now and
//! then, so all of this takes until the next poll.

use crate::Net;
use crate::ivshmem::handshake::{Do, Handshake};
use crate::ivshmem::link::{Link, LinkError};
use crate::ivshmem::poll_interval::{Pauses, PollInterval};
use crate::tcp::TcpStream;
use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::fmt;
use core::future::{Future, poll_fn};
use core::pin::pin;
use core::task::{Poll, Waker};
use tombolo_calls::carrier::Carrier;
use tombolo_calls::frames::Frames;
use tombolo_calls::sections::{Plan, Rings};
use tombolo_calls::session::{ServeOptions, Session, Stats};
use tombolo_calls::{CallError, CallOptions, Reply, Request, Response, ns};
use tombolo_ring::ivshmem::protocol::CALLS;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::Broken;
use tombolo_ring::rpc::entry::Token;

/// How long the other side of a connection may take to greet.
const GREETING_NS: u64 = 10_000_000_000;
/// Looks before other tasks have their turn, however much a peer sends.
const TURNS: usize = 4;

/// There are no calls to be had.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallsError {
    /// There is no such link.
    Link(LinkError),
    /// The link was made for something else.
    Protocol(u32),
    /// The link is not one of two peers.
    Peers(u32),
    /// Its output sections are too small: so many bytes.
    Sections(usize),
    /// The other side of the connection closed it, said nothing for 10 s, or speaks something else.
    Greeting,
}

impl fmt::Display for CallsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallsError::Link(error) => write!(f, "{error}"),
            CallsError::Protocol(got) => write!(f, "the link's protocol is {got:#06x}, expected {CALLS:#06x}, calls"),
            CallsError::Peers(peers) => write!(f, "the link has {peers} peers; calls need exactly two"),
            CallsError::Sections(bytes) => {
                write!(f, "output sections of {bytes} bytes hold no calls; 24 KiB are needed")
            }
            CallsError::Greeting => f.write_str("the other side of the connection does not speak the calls protocol"),
        }
    }
}

/// Over a link.
struct OnLink {
    handshake: Handshake,
    plan: Plan,
    rings: Rings,
    own: ForeignMut<'static>,
    theirs: Foreign<'static>,
}

enum Transport {
    Link(Box<OnLink>),
    Stream(Frames),
}

/// What all handles of one side share.
struct State {
    session: Session,
    transport: Transport,
    up: bool,
    /// The connection has ended: there is no next peer.
    over: bool,
    /// The driver of a connection, to be woken where there is something to send.
    driver: Option<Waker>,
    /// Tasks that wait for a request.
    servers: Vec<Waker>,
    /// Tasks that wait for the peer to come or go.
    watchers: Vec<Waker>,
}

fn wake_all(wakers: &mut Vec<Waker>) {
    for waker in wakers.drain(..) {
        waker.wake();
    }
}

impl State {
    fn new(session: Session, transport: Transport, up: bool) -> Rc<RefCell<State>> {
        let (servers, watchers) = (Vec::new(), Vec::new());
        let state = State { session, transport, up, over: false, driver: None, servers, watchers };
        Rc::new(RefCell::new(state))
    }

    /// Works on the session with what carries it. `None` where the peer is not there, or broke the protocol by that.
    fn with<T>(&mut self, work: impl FnOnce(&mut Session, &mut dyn Carrier) -> Result<T, Broken>) -> Option<T> {
        if !self.up {
            return None;
        }
        let State { session, transport, driver, .. } = self;
        let result = match transport {
            Transport::Link(on) => {
                let OnLink { handshake, rings, own, theirs, .. } = &mut **on;
                let result = rings.on(*own, *theirs).and_then(|mut wire| work(session, &mut wire));
                if rings.take_ring() {
                    handshake.link.ring_traffic(handshake.peer);
                }
                result
            }
            Transport::Stream(frames) => {
                let result = work(session, frames);
                if !frames.output().is_empty()
                    && let Some(driver) = driver.take()
                {
                    driver.wake();
                }
                result
            }
        };
        result.map_err(|broken| self.fault(broken)).ok()
    }

    fn fault(&mut self, broken: Broken) {
        match &mut self.transport {
            Transport::Link(on) => on.handshake.fault(),
            Transport::Stream(_) => self.over = true,
        }
        self.down(CallError::Broken(broken));
    }

    fn down(&mut self, error: CallError) {
        self.up = false;
        self.session.lost(error);
        wake_all(&mut self.watchers);
        if self.over {
            wake_all(&mut self.servers);
        }
        if let Some(driver) = self.driver.take() {
            driver.wake();
        }
    }

    /// Takes what has come.
    fn drain(&mut self, now_ns: u64) -> bool {
        let any = self.with(|session, transport| session.drain(transport, now_ns)).unwrap_or(false);
        if self.session.pending() > 0 {
            wake_all(&mut self.servers);
        }
        any
    }

    /// Over a link: takes what has come, and follows the peer's state. Whether anything came or changed.
    fn turn(&mut self, now_ns: u64) -> bool {
        // Before the peer's state: what it wrote before it went is still an answer.
        let any = self.drain(now_ns);
        let was_up = self.up;
        let Transport::Link(on) = &mut self.transport else { return any };
        let OnLink { handshake, plan, rings, own, theirs } = &mut **on;
        let mut fell = false;
        let stepped = handshake.step(|what| {
            match what {
                Do::Clear => {
                    plan.clear(*own);
                    *rings = Rings::new(*plan);
                }
                Do::Check => rings.on(*own, *theirs)?.check_peer()?,
                Do::Forget => fell = true,
            }
            Ok(())
        });
        match stepped {
            Err(broken) => self.fault(broken),
            Ok(up) => {
                if was_up && (fell || !up) {
                    self.down(CallError::ProviderGone);
                }
                self.up = up;
                if up && !was_up {
                    wake_all(&mut self.watchers);
                }
            }
        }
        any || was_up != self.up
    }

    /// Whether the driver of a link may sleep.
    fn may_sleep(&mut self) -> bool {
        self.with(|_, transport| transport.arm()).unwrap_or(true)
    }
}

/// One side of calls with a peer. See the module's head.
#[derive(Clone)]
pub struct Calls {
    net: Net,
    state: Rc<RefCell<State>>,
    /// Where the way is one.
    link: Option<Link>,
}

/// A call that is waited for: dropped before its end, it is given up.
struct Waited<'a> {
    calls: &'a Calls,
    token: Token,
}

impl Drop for Waited<'_> {
    fn drop(&mut self) {
        self.calls.give_up(self.token);
    }
}

impl Calls {
    pub(crate) fn open(net: &Net, name: &str, options: &ServeOptions) -> Result<Calls, CallsError> {
        let link = Link::open(net, name).map_err(CallsError::Link)?;
        if link.protocol() != CALLS {
            return Err(CallsError::Protocol(link.protocol()));
        }
        let peer = 1 - link.own_id().min(1);
        let theirs = link.output(peer).filter(|_| link.max_peers() == 2);
        let theirs = theirs.ok_or(CallsError::Peers(link.max_peers()))?;
        let own = link.own_output();
        let plan = Plan::new(own.len().min(theirs.len()) as u64).ok_or(CallsError::Sections(own.len()))?;
        let handshake = Handshake::new(link.clone(), peer);
        let transport = Transport::Link(Box::new(OnLink { handshake, plan, rings: Rings::new(plan), own, theirs }));
        let session = Session::new(plan.entries(), options);
        let calls = Calls { net: net.clone(), state: State::new(session, transport, false), link: Some(link.clone()) };
        net.spawn(calls.clone().drive_link(link));
        Ok(calls)
    }

    pub(crate) async fn over(net: &Net, mut stream: TcpStream, options: &ServeOptions) -> Result<Calls, CallsError> {
        let mut frames = Frames::default();
        let greeting = async {
            let hello = frames.output().len();
            stream.write_all(frames.output()).await.map_err(|_| CallsError::Greeting)?;
            frames.sent(hello);
            loop {
                if let Some(entries) = frames.greeted().map_err(|_| CallsError::Greeting)? {
                    return Ok(entries);
                }
                let read = stream.read_with(|bytes| (frames.feed(bytes), ())).await;
                read.ok().flatten().ok_or(CallsError::Greeting)?;
            }
        };
        let entries = net.within(GREETING_NS, greeting).await.unwrap_or(Err(CallsError::Greeting))?;
        let session = Session::new(entries, options);
        let state = State::new(session, Transport::Stream(frames), true);
        let calls = Calls { net: net.clone(), state, link: None };
        net.spawn(calls.clone().drive_stream(stream));
        Ok(calls)
    }

    fn now_ns(&self) -> u64 {
        self.net.now_ns()
    }

    /// Looks until there is nothing to do, or the others' turn has come. True where this side may sleep until it is rung.
    fn settle(&self, link: &Link) -> bool {
        let mut state = self.state.borrow_mut();
        for _ in 0..TURNS {
            if state.turn(self.now_ns()) {
                // Without a doorbell, no ring announces what follows on it.
                link.expect_answer();
            } else if state.may_sleep() {
                return true;
            }
        }
        false
    }

    async fn drive_link(self, link: Link) {
        let mut poll_interval = PollInterval::new(Pauses::DOWN);
        loop {
            link.until(|| (!self.settle(&link) || !self.is_up()).then_some(())).await;
            poll_interval.busy(self.now_ns());
            while !self.is_up() {
                let (theirs, down_until_ns) = {
                    let Transport::Link(on) = &self.state.borrow().transport else { return };
                    (on.handshake.theirs(), on.handshake.down_until_ns())
                };
                Handshake::change(&link, theirs, down_until_ns, &mut poll_interval).await;
                self.state.borrow_mut().turn(self.now_ns());
            }
            self.net.pause().await;
        }
    }

    async fn drive_stream(self, mut stream: TcpStream) {
        loop {
            let is_open = !stream.is_ended() && {
                let frames = |work: &mut dyn FnMut(&mut Frames) -> usize| match &mut self.state.borrow_mut().transport {
                    Transport::Stream(frames) => work(frames),
                    Transport::Link(_) => 0,
                };
                let take = |bytes: &mut [u8]| frames(&mut |frames| frames.feed(bytes));
                let fill = |room: &mut [u8]| {
                    frames(&mut |frames| {
                        let n = room.len().min(frames.output().len());
                        room[..n].copy_from_slice(&frames.output()[..n]);
                        frames.sent(n);
                        n
                    })
                };
                let mut exchange = pin!(stream.exchange(take, fill));
                let mut woken = false;
                poll_fn(|cx| {
                    // Restarted each time: before that, the code checks what it is to send, and whether the other side
                    // continues.
                    if core::mem::replace(&mut woken, true) {
                        return Poll::Ready(true);
                    }
                    let done = exchange.as_mut().poll(cx);
                    self.state.borrow_mut().driver = Some(cx.waker().clone());
                    done.map(|done| done.is_ok())
                })
                .await
            };
            let mut state = self.state.borrow_mut();
            state.drain(self.now_ns());
            if !is_open || state.over {
                state.over = true;
                state.down(CallError::ProviderGone);
                stream.abort();
                return;
            }
        }
    }

    /// Whether the peer is there.
    pub fn is_up(&self) -> bool {
        self.state.borrow().up
    }

    /// Whether there will be no peer any more: the connection has ended.
    pub fn is_over(&self) -> bool {
        self.state.borrow().over
    }

    async fn watch(&self, is_done: impl Fn(&State) -> bool) {
        poll_fn(|cx| {
            let mut state = self.state.borrow_mut();
            if is_done(&state) {
                return Poll::Ready(());
            }
            state.watchers.push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Waits until the peer is there; false where it never will be.
    pub async fn up(&self) -> bool {
        self.watch(|state| state.up || state.over).await;
        self.is_up()
    }

    /// Waits until the peer is gone.
    pub async fn down(&self) {
        self.watch(|state| !state.up).await;
    }

    /// Counters that only grow.
    pub fn stats(&self) -> Stats {
        self.state.borrow().session.stats()
    }

    /// Calls, and waits for the reply; other tasks and the network have their turns meanwhile. Dropped before the end, the call is given
    /// up and cancelled.
    ///
    /// # Errors
    /// [`CallError`]: what else it ended with.
    pub async fn call(&self, bytes: &[u8], options: &CallOptions) -> Result<Reply, CallError> {
        let token = self.submit(bytes, options)?;
        let waited = Waited { calls: self, token };
        let end = poll_fn(|cx| match self.state.borrow_mut().session.fetch(token, Some(cx.waker())) {
            Some(end) => Poll::Ready(end),
            None => Poll::Pending,
        });
        let (limit, over) = options.limit(self.now_ns());
        match self.net.within(ns(limit), end).await {
            Some(end) => {
                core::mem::forget(waited);
                end
            }
            None => Err(over),
        }
    }

    /// Calls, and waits for the reply; nothing else runs meanwhile, neither the network nor another task, so that the reply is taken as soon as
    /// it is there. With `spin` the processor does not sleep either. What the peer asks waits. Over TCP this cannot be: the stack has to
    /// run.
    ///
    /// # Errors
    /// [`CallError`]; over TCP [`CallError::Unknown`].
    pub fn call_alone(&self, bytes: &[u8], options: &CallOptions, spin: bool) -> Result<Reply, CallError> {
        let link = self.link.as_ref().ok_or(CallError::Unknown)?;
        let (limit, over) = options.limit(self.now_ns());
        let until_ns = self.now_ns().saturating_add(ns(limit));
        let token = self.submit(bytes, options)?;
        let end = link.until_alone(until_ns, spin, || {
            self.settle(link);
            self.poll(token)
        });
        // The peer may have been told that we are awake, and rings were taken: the driver has to say otherwise before it sleeps on.
        link.look_again();
        end.unwrap_or_else(|| {
            self.give_up(token);
            Err(over)
        })
    }

    /// Asks without waiting; what it ends with is fetched by [`Calls::poll`], until then it holds a slot.
    ///
    /// # Errors
    /// [`CallError::Busy`], [`CallError::TooLong`], [`CallError::ProviderGone`]: nothing was sent.
    pub fn submit(&self, bytes: &[u8], options: &CallOptions) -> Result<Token, CallError> {
        let now_ns = self.now_ns();
        let sent = self.state.borrow_mut().with(|session, transport| {
            match session.submit(transport, options, bytes, now_ns) {
                Err(CallError::Broken(broken)) => Err(broken),
                other => Ok(other),
            }
        });
        if let Some(link) = &self.link {
            link.expect_answer();
        }
        sent.unwrap_or(Err(CallError::ProviderGone))
    }

    /// How a call ended; `None` while it is under transport. From its deadline on [`CallError::DeadlineExceeded`], and the token names nothing any
    /// more.
    pub fn poll(&self, token: Token) -> Option<Result<Reply, CallError>> {
        let end = self.state.borrow_mut().session.fetch(token, None);
        if end.is_none() && self.state.borrow().session.is_overdue(token, self.now_ns()) {
            self.give_up(token);
            return Some(Err(CallError::DeadlineExceeded));
        }
        end
    }

    /// Asks the peer to take a call back. Its answer still comes. False where the token names no call under transport.
    pub fn cancel(&self, token: Token) -> bool {
        self.state.borrow_mut().with(|session, transport| session.cancel(transport, token)).unwrap_or(false)
    }

    /// The caller does not wait for this call any more: it is cancelled, and its slot comes back with its answer.
    pub fn give_up(&self, token: Token) {
        self.cancel(token);
        self.state.borrow_mut().session.abandon(token);
    }

    /// The next request of the peer's, earliest deadline first; [`Calls::respond`] answers it. `None` where there will be none. From the
    /// first such call on, what the peer asks waits for the next; before, it is answered as failed.
    pub async fn next(&self) -> Option<Request> {
        poll_fn(|cx| {
            let mut state = self.state.borrow_mut();
            state.session.serve();
            let now_ns = self.now_ns();
            if let Some(request) = state.with(|session, transport| session.next(transport, now_ns)).flatten() {
                return Poll::Ready(Some(request));
            }
            if state.over {
                return Poll::Ready(None);
            }
            state.servers.push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Whether the caller does not wait for the answer any more: the peer has cancelled the request since its service
    /// began, or is gone. A handler that takes long may look, and end early.
    pub fn is_taken_back(&self, request: &Request) -> bool {
        self.state.borrow().session.is_taken_back(request.id())
    }

    /// Answers a request. Where the peer has gone since, nothing happens.
    pub fn respond(&self, request: &Request, response: Response) {
        let now_ns = self.now_ns();
        let mut state = self.state.borrow_mut();
        if state.up {
            state.with(|session, transport| session.respond(transport, request, now_ns, response));
        } else {
            state.session.forget(request);
        }
    }

    /// Serves what the peer asks by `handler`, in so many tasks: so many requests are served at a time where the handler waits. To be called
    /// before the peer is waited for.
    pub fn serve(&self, tasks: u32, handler: impl AsyncFn(&Request) -> Response + 'static) {
        self.state.borrow_mut().session.serve();
        let handler = Rc::new(handler);
        for _ in 0..tasks {
            let (calls, handler) = (self.clone(), handler.clone());
            self.net.spawn(async move {
                while let Some(request) = calls.next().await {
                    let response = handler(&request).await;
                    calls.respond(&request, response);
                    // The network and other tasks have their turn, however many requests wait.
                    calls.net.pause().await;
                }
            });
        }
    }
}
