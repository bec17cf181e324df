//! One side of a connection on which both peers may send and serve calls. As a client it keeps
//! slots and answers; as a provider it keeps order and deadlines. The module is pure: instants go
//! in, decisions come out. Each call passes in what carries the messages ([`Carrier`]).
//!
//! # Time
//! The two peers' clocks are unrelated. A deadline crosses as the ns that are left when the request
//! is given to the carrier. The receiver turns it into an instant of its own clock when it takes
//! the request out. The transport time in between is not known. It makes the deadline later, never
//! earlier. Over a stream this is corrected: the ns that are left are fewer by half of the shortest
//! time that a call was on its way, there and back ([`Session::subtract_way`]). A request that
//! would have to wait for room in the carrier is not accepted at all ([`CallError::Busy`]).
//!
//! # One answer per request
//! A call ends once. It ends with its reply, with the provider's error, or with
//! [`CallError::ProviderGone`] when the peer goes ([`Session::lost`]). Its caller can also end it
//! with [`CallError::DeadlineExceeded`] or [`CallError::Timeout`] ([`Session::is_overdue`]), and
//! then abandons it ([`Session::abandon`]). A slot becomes free when its answer arrives or the
//! link's life ends, and is not reused before.
//!
//! # The peer is hostile
//! The carrier reads each entry once and checks it. This module then checks each token against the
//! calls that are under way. Requests hold copies of their bytes, and never more of them than the
//! carrier's arena has. Replies that are never fetched are bounded as well. A protocol violation by
//! the peer is [`Broken`], and its link restarts.
//!
//! # Limits
//! As many calls in each direction as the link has entries, at most 64. A request that is late, or
//! has waited too long, is answered when the provider next looks for something to serve, not
//! before.

use alloc::vec;
use alloc::vec::Vec;
use core::task::Waker;
use core::time::Duration;

use tombolo_ring::rpc::entry::{Answer, Ask, BEST_EFFORT, Call, Payload, Refusal, Status, Token};
use tombolo_ring::rpc::{Broken, INLINE_BYTES};

use crate::call::{CallOptions, Reply, Request, RequestId, Response, ns};
use crate::carrier::{Carrier, Message};
use crate::error::CallError;
use crate::queue::Handle;
use crate::schedule::{Late, Next, Order, Rules, Schedule};
use crate::slots::{Found, Slots};

/// Unfetched replies are kept up to so many times the longest payload.
const REPLIES: usize = 8;

/// How a side serves what it is asked.
#[derive(Clone, Copy, Debug)]
pub struct ServeOptions {
    /// What happens to requests whose deadline has passed before their service began.
    pub late: Late,
    /// Whether what cannot be met is refused at once.
    pub admission: bool,
    /// How long one request takes at most; admission counts with it until services were measured.
    pub budget: Duration,
    /// How many requests are served at a time; admission counts with it.
    pub workers: u32,
    /// How long a request waits that says nothing else.
    pub ttl: Duration,
}

impl Default for ServeOptions {
    fn default() -> Self {
        ServeOptions {
            late: Late::Refuse,
            admission: false,
            budget: Duration::from_millis(1),
            workers: 1,
            ttl: Duration::from_secs(60),
        }
    }
}

/// Counters of one side, all monotonic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Calls that this side made.
    pub asked: u64,
    /// Calls that got the reply.
    pub replied: u64,
    /// Calls that ended since the peer went or broke the protocol.
    pub lost: u64,
    /// Requests of the peer that this side served.
    pub served: u64,
    /// Requests answered as late.
    pub late: u64,
    /// Requests of the peer that this side refused.
    pub refused: u64,
    /// Requests answered as cancelled, expired or failed.
    pub given_up: u64,
    /// Requests whose caller went before their answer.
    pub abandoned: u64,
}

/// What is kept of a call under way.
#[derive(Clone, Copy, Debug)]
struct Asked {
    /// Its long bytes.
    long: usize,
    /// When it was sent.
    sent_ns: u64,
}

/// A slot of the peer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Theirs {
    Free,
    Queued(Handle),
    /// The one of that token; its caller may have taken it back.
    Serving {
        token: Token,
        is_cancelled: bool,
    },
}

/// A payload's bytes as far as they are counted: those that are not in an entry.
fn long(bytes: usize) -> usize {
    if bytes > INLINE_BYTES { bytes } else { 0 }
}

/// One side. See the module's head.
#[derive(Debug)]
pub struct Session {
    entries: u32,
    /// Our own calls.
    slots: Slots<Asked, Result<Reply, CallError>>,
    /// The shortest time that a call was on its way, there and back; `None` before the first
    /// answer.
    way_ns: Option<u64>,
    /// Half of that is subtracted from what is left of a deadline.
    subtracts: bool,
    /// Long bytes of our calls under way.
    asked_bytes: usize,
    /// Long bytes of replies that wait to be fetched.
    reply_bytes: usize,
    /// Whether this side serves what the peer asks.
    serves: bool,
    schedule: Schedule<Request>,
    theirs: Vec<Theirs>,
    /// Long bytes of the peer's requests that wait or are served.
    owed_bytes: usize,
    epoch: u32,
    stats: Stats,
}

impl Session {
    /// A side with so many slots each way.
    pub fn new(entries: u32, options: &ServeOptions) -> Session {
        let rules = Rules {
            pending: entries as usize,
            order: Order::Edf,
            late: options.late,
            admission: options.admission,
            budget_ns: ns(options.budget),
            // One peer asks.
            shares: false,
            workers: options.workers,
            ttl_ns: ns(options.ttl),
        };
        Session {
            entries,
            slots: Slots::new(entries),
            way_ns: None,
            subtracts: false,
            asked_bytes: 0,
            reply_bytes: 0,
            serves: false,
            schedule: Schedule::new(rules),
            theirs: vec![Theirs::Free; entries as usize],
            owed_bytes: 0,
            epoch: 0,
            stats: Stats::default(),
        }
    }

    /// From now on this side serves what the peer asks ([`Session::next`]). Before, requests are
    /// answered as failed.
    pub fn serve(&mut self) {
        self.serves = true;
    }

    /// From now on half of [`Session::way_ns`] is subtracted from what is left of a deadline, for a
    /// peer that is far enough away for that to matter.
    pub fn subtract_way(&mut self) {
        self.subtracts = true;
    }

    /// The shortest time that a call of ours was on its way, there and back, in ns: its round trip
    /// without the times that it waited and was served, which the peer states. A peer that states
    /// them wrongly makes this smaller, never larger than its fastest answer. `None` before the
    /// first answer.
    pub fn way_ns(&self) -> Option<u64> {
        self.way_ns
    }

    /// Counters that only grow.
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// Requests of the peer's that wait.
    pub fn pending(&self) -> usize {
        self.schedule.pending()
    }

    /// Our calls that hold a slot: under way, or done and not fetched.
    pub fn under_way(&self) -> usize {
        self.slots.under_way() as usize
    }

    /// Sends a request to the peer. What is left of the deadline at `now_ns` goes with it.
    ///
    /// # Errors
    /// [`CallError::Busy`], [`CallError::TooLong`]: nothing was sent. [`CallError::Broken`]: the
    /// link must be restarted.
    pub fn submit(
        &mut self,
        carrier: &mut (impl Carrier + ?Sized),
        options: &CallOptions,
        bytes: &[u8],
        now_ns: u64,
    ) -> Result<Token, CallError> {
        let most = carrier.most();
        if bytes.len() > most {
            return Err(CallError::TooLong { bytes: bytes.len(), most });
        }
        let long = long(bytes.len());
        let busy = CallError::Busy(self.slots.under_way());
        let token = self.slots.vacant().filter(|_| self.asked_bytes + long <= most).ok_or(busy)?;
        let deadline_ns = options.deadline.instant_ns(|| now_ns, BEST_EFFORT);
        let left_ns = match deadline_ns {
            BEST_EFFORT => BEST_EFFORT,
            deadline_ns => {
                let way_ns = self.way_ns.filter(|_| self.subtracts).unwrap_or(0);
                deadline_ns.saturating_sub(now_ns).saturating_sub(way_ns / 2)
            }
        };
        let ttl_ms = options.ttl_ms();
        let call = Call {
            token,
            deadline_ns: left_ns,
            time_left: true,
            trace: options.trace,
            ttl_ms,
            payload: Payload::EMPTY,
        };
        match carrier.ask(Ask::Call(call), bytes) {
            Ok(true) => {}
            Ok(false) => return Err(busy),
            Err(broken) => return Err(CallError::Broken(broken)),
        }
        self.slots.begin(token, deadline_ns, options.until_ns(deadline_ns), Asked { long, sent_ns: now_ns });
        self.asked_bytes += long;
        self.stats.asked += 1;
        Ok(token)
    }

    /// Whether a call under way has come to its own end: its deadline, or as much later as its
    /// caller waits for a late reply. Its caller gives it up then.
    pub fn is_overdue(&self, token: Token, now_ns: u64) -> bool {
        self.slots.is_overdue(token, || now_ns)
    }

    /// Whether its caller has nothing to wait for: the call has ended, or the token names none.
    pub fn is_settled(&self, token: Token) -> bool {
        self.slots.is_settled(token)
    }

    /// When a call under way ends by itself; `u64::MAX` where it does not.
    pub fn until_ns(&self, token: Token) -> u64 {
        self.slots.until_ns(token)
    }

    /// How a call ended, once; `None` while it is under way, and then `waker` is woken when it
    /// ends.
    pub fn fetch(&mut self, token: Token, waker: Option<&Waker>) -> Option<Result<Reply, CallError>> {
        match self.slots.fetch(token) {
            Found::Waiting(()) => {
                if let (Some(waker), Some(waiting)) = (waker, self.slots.waiting_mut(token)) {
                    waiting.waker.get_or_insert_with(|| waker.clone()).clone_from(waker);
                }
                None
            }
            Found::Done(end) => {
                self.dropped(&end);
                Some(end)
            }
            Found::Unknown => Some(Err(CallError::Unknown)),
        }
    }

    /// An end is no longer kept for its caller.
    fn dropped(&mut self, end: &Result<Reply, CallError>) {
        if let Ok(reply) = end {
            self.reply_bytes -= long(reply.bytes.len());
        }
    }

    /// Asks the peer to cancel a call. Its answer still comes: [`CallError::Cancelled`], or the
    /// real result if service had begun. Returns false if the token names no call under way, or one
    /// that was already cancelled.
    ///
    /// # Errors
    /// The link must be restarted.
    pub fn cancel(&mut self, carrier: &mut (impl Carrier + ?Sized), token: Token) -> Result<bool, Broken> {
        if self.slots.to_cancel(token) != Some(true) || !carrier.ask(Ask::Cancel(token), &[])? {
            return Ok(false);
        }
        self.slots.cancelled(token);
        Ok(true)
    }

    /// Marks a call as no longer awaited. Its slot becomes free with its answer;
    /// [`Session::cancel`] hastens that.
    pub fn abandon(&mut self, token: Token) {
        if let Found::Done(end) = self.slots.abandon(token) {
            self.dropped(&end);
        }
    }

    /// Takes what has arrived: requests go into the queue, answers into their slots. Returns true
    /// if anything had arrived.
    ///
    /// # Errors
    /// Something that no correct peer does: the link must be restarted ([`Session::lost`]).
    pub fn drain(&mut self, carrier: &mut (impl Carrier + ?Sized), now_ns: u64) -> Result<bool, Broken> {
        let most = carrier.most();
        let mut any = false;
        // A peer that never stops is not read for ever in one turn.
        for _ in 0..4 * self.entries {
            match carrier.take()? {
                None => break,
                Some(Message::Call(call, bytes)) => self.asked(carrier, call, bytes, now_ns)?,
                Some(Message::Cancel(token)) => self.cancelled(carrier, token, now_ns)?,
                Some(Message::Answer(answer, bytes)) => self.answered(answer, bytes, most, now_ns)?,
            }
            any = true;
        }
        Ok(any)
    }

    fn asked(
        &mut self,
        carrier: &mut (impl Carrier + ?Sized),
        call: Call,
        bytes: Vec<u8>,
        now_ns: u64,
    ) -> Result<(), Broken> {
        let Call { token, deadline_ns: left_ns, time_left, ttl_ms, trace, .. } = call;
        let at = token.slot() as usize;
        if self.theirs.get(at) != Some(&Theirs::Free) {
            return Err(Broken::Token);
        }
        let long = long(bytes.len());
        if self.owed_bytes + long > carrier.most() {
            // Its requests overlap in its arena.
            return Err(Broken::Arena);
        }
        let deadline_ns = match (left_ns, time_left) {
            (BEST_EFFORT, _) => BEST_EFFORT,
            // Nothing is left: it has passed, however soon the request is looked at.
            (0, true) => now_ns.saturating_sub(1),
            (left, true) => now_ns.saturating_add(left),
            // An instant of a clock that we do not share.
            (_, false) => return Err(Broken::Kind),
        };
        self.owed_bytes += long;
        let mut request = Request::new(token, bytes, deadline_ns, ttl_ms, trace, 0);
        request.id.epoch = self.epoch;
        if !self.serves {
            return self.end(carrier, &request, now_ns, Response::end(Status::Failed));
        }
        match self.schedule.offer(now_ns, 0, deadline_ns, u64::from(ttl_ms) * 1_000_000, request) {
            Ok(handle) => self.theirs[at] = Theirs::Queued(handle),
            Err((request, status)) => self.end(carrier, &request, now_ns, Response::end(status))?,
        }
        Ok(())
    }

    fn cancelled(&mut self, carrier: &mut (impl Carrier + ?Sized), token: Token, now_ns: u64) -> Result<(), Broken> {
        match self.theirs.get_mut(token.slot() as usize) {
            Some(Theirs::Serving { token: served, is_cancelled }) if *served == token => *is_cancelled = true,
            Some(&mut Theirs::Queued(handle)) if self.schedule.get(handle).is_some_and(|r| r.id.token == token) => {
                if let Some((request, queued_ns)) = self.schedule.remove(now_ns, handle) {
                    let request = Request { queued_ns, ..request };
                    self.end(carrier, &request, now_ns, Response::end(Status::Cancelled))?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether the answer to this request is no longer awaited: its caller has cancelled it since
    /// its service began, or is gone.
    pub fn is_cancelled(&self, request: RequestId) -> bool {
        let slot = self.theirs.get(request.token.slot() as usize);
        request.epoch != self.epoch || slot == Some(&Theirs::Serving { token: request.token, is_cancelled: true })
    }

    fn answered(&mut self, answer: Answer, bytes: Vec<u8>, most: usize, now_ns: u64) -> Result<(), Broken> {
        let (max, in_use) = ((REPLIES * most) as u64, self.reply_bytes as u64);
        let bytes_kept = long(bytes.len());
        let at_peer_ns = answer.queued_ns.saturating_add(answer.service_ns);
        let mut is_reply = false;
        let ended = self.slots.answer(
            answer.token,
            || now_ns,
            |came| {
                came.end(answer.status)?;
                let more = bytes_kept as u64;
                if more > max.saturating_sub(in_use) {
                    return Err(CallError::ReplyTooLarge { bytes: more, in_use, max });
                }
                is_reply = true;
                Ok(Reply::new(&answer, came, bytes))
            },
        )?;
        if is_reply {
            self.reply_bytes += bytes_kept;
            self.stats.replied += 1;
        }
        let Asked { long, sent_ns } = ended.kept;
        self.asked_bytes -= long;
        let way_ns = now_ns.saturating_sub(sent_ns).saturating_sub(at_peer_ns);
        self.way_ns = Some(self.way_ns.map_or(way_ns, |least| least.min(way_ns)));
        if let Some(waker) = ended.waker {
            waker.wake();
        }
        Ok(())
    }

    /// The request to serve now, if one waits: the one that is due first. What is late or has
    /// waited for too long is answered on the way. [`Session::respond`] is to be called when it is
    /// served.
    ///
    /// # Errors
    /// What no correct peer does.
    pub fn next(&mut self, carrier: &mut (impl Carrier + ?Sized), now_ns: u64) -> Result<Option<Request>, Broken> {
        loop {
            match self.schedule.next(now_ns) {
                None => return Ok(None),
                Some(Next::Serve { item, queued_ns }) => {
                    let serving = Theirs::Serving { token: item.id.token, is_cancelled: false };
                    self.theirs[item.id.token.slot() as usize] = serving;
                    return Ok(Some(Request { queued_ns, began_ns: now_ns, ..item }));
                }
                Some(Next::Answer { item, queued_ns, status }) => {
                    let request = Request { queued_ns, ..item };
                    self.end(carrier, &request, now_ns, Response::end(status))?;
                }
            }
        }
    }

    /// Answers a request that was served. The answer is dropped if the link has restarted since.
    ///
    /// # Errors
    /// What no correct peer does.
    pub fn respond(
        &mut self,
        carrier: &mut (impl Carrier + ?Sized),
        request: &Request,
        now_ns: u64,
        response: Response,
    ) -> Result<(), Broken> {
        if request.id.epoch != self.epoch {
            self.forget(request);
            return Ok(());
        }
        self.schedule.done(0, request.began_ns, Some(now_ns));
        self.end(carrier, request, now_ns, response)
    }

    /// As [`Session::respond`], for a link that is down, where there is nothing to answer.
    pub fn forget(&mut self, request: &Request) {
        self.schedule.done(0, request.began_ns, None);
        self.stats.abandoned += 1;
    }

    /// Answers, and gives the peer its slot back.
    fn end(
        &mut self,
        carrier: &mut (impl Carrier + ?Sized),
        request: &Request,
        now_ns: u64,
        response: Response,
    ) -> Result<(), Broken> {
        let Response { status, code, bytes } = response;
        let service_ns = if request.began_ns == 0 { 0 } else { now_ns.saturating_sub(request.began_ns) };
        let answer = |status, code| Answer {
            token: request.id.token,
            status,
            code,
            queued_ns: request.queued_ns,
            service_ns,
            payload: Payload::EMPTY,
        };
        self.theirs[request.id.token.slot() as usize] = Theirs::Free;
        self.owed_bytes -= long(request.bytes.len());
        let sent = bytes.len() <= carrier.most() && carrier.answer(answer(status, code), &bytes)?;
        let status = if sent { status } else { Status::Refused(Refusal::ReplyMemory) };
        if !sent {
            carrier.answer(answer(status, 0), &[])?;
        }
        let stats = &mut self.stats;
        *match status {
            Status::Served => &mut stats.served,
            Status::Late => &mut stats.late,
            Status::Refused(_) => &mut stats.refused,
            Status::Cancelled | Status::Expired | Status::Failed => &mut stats.given_up,
        } += 1;
        Ok(())
    }

    /// The peer has gone, or its link restarts. Each call under way ends with `error` at once; its
    /// slot becomes free when the caller fetches that. The peer's requests are dropped.
    pub fn lost(&mut self, error: CallError) {
        self.epoch = self.epoch.wrapping_add(1);
        self.stats.abandoned += self.schedule.drain().len() as u64;
        self.theirs.fill(Theirs::Free);
        (self.owed_bytes, self.asked_bytes) = (0, 0);
        let Session { slots, stats, .. } = self;
        slots.end_all(
            || Err(error),
            |ended| {
                stats.lost += 1;
                if let Some(waker) = ended.waker {
                    waker.wake();
                }
            },
        );
    }
}
