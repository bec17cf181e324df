//! Calls with deadlines: a cell calls its peer, and serves it, over a link of shared memory or over
//! TCP.
//!
//! A [`Calls`] is one side ([`Net::calls`](crate::Net::calls),
//! [`Net::calls_over`](crate::Net::calls_over)). The decisions are made in [`tombolo_calls`], the
//! same as on the other side: earliest deadline first, exactly one end of each call, deadlines that
//! cross as time left. So is the life of the link ([`Transport`]); this module adds tasks. A clone
//! refers to the same side, and any task may use it.
//!
//! # Tasks
//! One task, the driver, belongs to each side. It sleeps until the peer rings (or sends), takes
//! what came, and wakes the tasks that wait for it. A request is served by one of the tasks of
//! [`Calls::serve`]. So a handler may wait, also for its own calls.
//!
//! # Failure
//! A peer that stops or dies ends each call in progress at once with [`CallError::ProviderGone`].
//! Over a link, the next peer is served as the last one was; over TCP, this side is over. A peer
//! that breaks the protocol has its link reset, after 10 ms of rest, or its connection aborted; no
//! other peer notices. A link without doorbell is polled now and then, so all of this takes until
//! the next poll.

use crate::Net;
use crate::ivshmem::handshake::Handshake;
use crate::ivshmem::link::{Link, LinkError};
use crate::ivshmem::poll_interval::{Pauses, PollInterval};
use crate::tcp::TcpStream;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::fmt;
use core::future::{Future, poll_fn};
use core::pin::pin;
use core::task::{Poll, Waker};
use tombolo_calls::frames::Frames;
use tombolo_calls::sections::Plan;
use tombolo_calls::session::{ServeOptions, Stats};
use tombolo_calls::transport::{Sections, Stream, Transport};
use tombolo_calls::{CallError, CallOptions, Reply, Request, Response, ns};
use tombolo_ring::ivshmem::protocol::CALLS;
use tombolo_ring::ivshmem::state::{Duty, State};
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

/// The cell's end of a link.
struct LinkEnd {
    handshake: Handshake,
    own: ForeignMut<'static>,
    theirs: Foreign<'static>,
    epoch: u64,
}

impl Sections for LinkEnd {
    fn follow(&mut self, plan: &Plan) -> Result<bool, Broken> {
        let LinkEnd { handshake, own, theirs, epoch } = self;
        handshake.step(|duty| {
            match duty {
                Duty::Clear => {
                    plan.clear(*own);
                    *epoch += 1;
                }
                Duty::Check => plan.check_peer(*own, *theirs)?,
                Duty::Forget(_) => *epoch += 1,
            }
            Ok(())
        })
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn sections(&self) -> Option<(ForeignMut<'_>, Foreign<'_>)> {
        Some((self.own, self.theirs))
    }

    fn ring(&mut self) {
        self.handshake.link.ring_traffic(self.handshake.peer);
    }

    fn fault(&mut self) -> bool {
        self.handshake.fault();
        self.epoch += 1;
        self.handshake.theirs().1 == State::Reset.word()
    }
}

/// The cell's end of a connection. Its driver moves the bytes, since only a task can.
#[derive(Default)]
struct StreamEnd {
    /// To be woken where there is something to send.
    driver: Option<Waker>,
    /// The connection has ended.
    ended: bool,
}

impl StreamEnd {
    fn wake(&mut self) {
        if let Some(driver) = self.driver.take() {
            driver.wake();
        }
    }
}

impl Stream for StreamEnd {
    fn read(&mut self, _: &mut Frames) -> bool {
        !self.ended
    }

    fn write(&mut self, frames: &mut Frames) -> bool {
        if !frames.output().is_empty() {
            self.wake();
        }
        !self.ended
    }

    fn close(&mut self) {
        self.ended = true;
        self.wake();
    }
}

type CellTransport = Transport<LinkEnd, StreamEnd>;

/// What all handles of one side share.
struct CallsState {
    transport: CellTransport,
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

impl CallsState {
    fn new(transport: CellTransport) -> Rc<RefCell<CallsState>> {
        Rc::new(RefCell::new(CallsState { transport, servers: Vec::new(), watchers: Vec::new() }))
    }

    /// Works on the transport, and wakes those who wait for what changed.
    fn with<T>(&mut self, work: impl FnOnce(&mut CellTransport) -> T) -> T {
        let was_up = self.transport.is_up();
        let done = work(&mut self.transport);
        if was_up != self.transport.is_up() {
            wake_all(&mut self.watchers);
        }
        if self.transport.is_over() {
            wake_all(&mut self.watchers);
            wake_all(&mut self.servers);
        }
        done
    }

    /// Takes what has come, and follows the peer. Returns whether anything came or changed.
    fn turn(&mut self, now_ns: u64) -> bool {
        let any = self.with(|transport| transport.turn(now_ns));
        if self.transport.session().pending() > 0 {
            wake_all(&mut self.servers);
        }
        any
    }
}

/// One side of calls with a peer. See the module's head.
#[derive(Clone)]
pub struct Calls {
    net: Net,
    state: Rc<RefCell<CallsState>>,
    /// Where the transport is one.
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
        let end = LinkEnd { handshake, own, theirs, epoch: 0 };
        let state = CallsState::new(Transport::on_link(end, plan, options));
        let calls = Calls { net: net.clone(), state, link: Some(link.clone()) };
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
        let state = CallsState::new(Transport::on_stream(StreamEnd::default(), frames, entries, options));
        let calls = Calls { net: net.clone(), state, link: None };
        net.spawn(calls.clone().drive_stream(stream));
        Ok(calls)
    }

    fn now_ns(&self) -> u64 {
        self.net.now_ns()
    }

    /// Looks until there is nothing to do, or the others' turn has come. True where this side may
    /// sleep until it is rung.
    fn settle(&self, link: &Link) -> bool {
        let mut state = self.state.borrow_mut();
        for _ in 0..TURNS {
            if state.turn(self.now_ns()) {
                // Without a doorbell, no ring announces what follows on it.
                link.expect_answer();
            } else if state.with(|transport| transport.arm()) {
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
                    let state = self.state.borrow();
                    let Some(end) = state.transport.link() else { return };
                    (end.handshake.theirs(), end.handshake.down_until_ns())
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
                let frames = |work: &mut dyn FnMut(&mut Frames) -> usize| {
                    self.state.borrow_mut().transport.stream_mut().map_or(0, |(_, frames)| work(frames))
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
                    // Restarted each time: before that, the code checks what it is to send, and
                    // whether the other side continues.
                    if core::mem::replace(&mut woken, true) {
                        return Poll::Ready(true);
                    }
                    let done = exchange.as_mut().poll(cx);
                    if let Some((end, _)) = self.state.borrow_mut().transport.stream_mut() {
                        end.driver = Some(cx.waker().clone());
                    }
                    done.map(|done| done.is_ok())
                })
                .await
            };
            let mut state = self.state.borrow_mut();
            if let Some((end, _)) = state.transport.stream_mut() {
                end.ended |= !is_open;
            }
            state.turn(self.now_ns());
            if state.transport.is_over() {
                stream.abort();
                return;
            }
        }
    }

    /// Whether the peer is there.
    pub fn is_up(&self) -> bool {
        self.state.borrow().transport.is_up()
    }

    /// Whether there will be no peer any more: the connection has ended.
    pub fn is_over(&self) -> bool {
        self.state.borrow().transport.is_over()
    }

    async fn watch(&self, is_done: impl Fn(&CellTransport) -> bool) {
        poll_fn(|cx| {
            let mut state = self.state.borrow_mut();
            if is_done(&state.transport) {
                return Poll::Ready(());
            }
            state.watchers.push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Waits until the peer is there; false where it never will be.
    pub async fn up(&self) -> bool {
        self.watch(|transport| transport.is_up() || transport.is_over()).await;
        self.is_up()
    }

    /// Waits until the peer is gone.
    pub async fn down(&self) {
        self.watch(|transport| !transport.is_up()).await;
    }

    /// Counters that only grow.
    pub fn stats(&self) -> Stats {
        self.state.borrow().transport.session().stats()
    }

    /// Calls, and waits for the reply; other tasks and the network have their turns meanwhile.
    /// Dropped before the end, the call is given up and cancelled.
    ///
    /// # Errors
    /// [`CallError`]: what else it ended with.
    pub async fn call(&self, bytes: &[u8], options: &CallOptions) -> Result<Reply, CallError> {
        let token = self.submit(bytes, options)?;
        let waited = Waited { calls: self, token };
        let end = poll_fn(|cx| match self.state.borrow_mut().transport.fetch(token, Some(cx.waker())) {
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

    /// Calls, and waits for the reply; nothing else runs meanwhile, neither the network nor another
    /// task, so that the reply is taken as soon as it is there. With `spin` the processor does not
    /// sleep either. What the peer asks waits. Over TCP this cannot be: the stack has to run.
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
        // The peer may have been told that we are awake, and rings were taken: the driver has to
        // say otherwise before it sleeps on.
        link.look_again();
        end.unwrap_or_else(|| {
            self.give_up(token);
            Err(over)
        })
    }

    /// Asks without waiting; what it ends with is fetched by [`Calls::poll`], until then it holds a
    /// slot.
    ///
    /// # Errors
    /// [`CallError::Busy`], [`CallError::TooLong`], [`CallError::ProviderGone`]: nothing was sent.
    pub fn submit(&self, bytes: &[u8], options: &CallOptions) -> Result<Token, CallError> {
        let now_ns = self.now_ns();
        let sent = self.state.borrow_mut().with(|transport| transport.submit(options, bytes, now_ns));
        if let Some(link) = &self.link {
            link.expect_answer();
        }
        sent
    }

    /// How a call ended; `None` while it is under way. From its deadline on
    /// [`CallError::DeadlineExceeded`], and the token names nothing any more.
    pub fn poll(&self, token: Token) -> Option<Result<Reply, CallError>> {
        let now_ns = self.now_ns();
        self.state.borrow_mut().with(|transport| transport.poll(token, now_ns))
    }

    /// Asks the peer to take a call back. Its answer still comes. False where the token names no
    /// call under way.
    pub fn cancel(&self, token: Token) -> bool {
        self.state.borrow_mut().with(|transport| transport.cancel(token))
    }

    /// The caller does not wait for this call any more: it is cancelled, and its slot comes back
    /// with its answer.
    pub fn give_up(&self, token: Token) {
        self.state.borrow_mut().with(|transport| transport.give_up(token));
    }

    /// The next request of the peer's, earliest deadline first; [`Calls::respond`] answers it.
    /// `None` where there will be none. From the first such call on, what the peer asks waits for
    /// the next; before, it is answered as failed.
    pub async fn next(&self) -> Option<Request> {
        poll_fn(|cx| {
            let mut state = self.state.borrow_mut();
            state.transport.serve();
            let now_ns = self.now_ns();
            if let Some(request) = state.with(|transport| transport.next(now_ns)) {
                return Poll::Ready(Some(request));
            }
            if state.transport.is_over() {
                return Poll::Ready(None);
            }
            state.servers.push(cx.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Whether the caller does not wait for the answer any more: the peer has cancelled the request
    /// since its service began, or is gone. A handler that takes long may look, and end early.
    pub fn is_cancelled(&self, request: &Request) -> bool {
        self.state.borrow().transport.session().is_cancelled(request.id())
    }

    /// Answers a request. Where the peer has gone since, nothing happens.
    pub fn respond(&self, request: &Request, response: Response) {
        let now_ns = self.now_ns();
        self.state.borrow_mut().with(|transport| transport.respond(request, response, now_ns));
    }

    /// Serves what the peer asks by `handler`, in so many tasks: so many requests are served at a
    /// time where the handler waits. To be called before the peer is waited for.
    pub fn serve(&self, tasks: u32, handler: impl AsyncFn(&Request) -> Response + 'static) {
        self.state.borrow_mut().transport.serve();
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
