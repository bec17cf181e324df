//! Workers. There is no dispatcher: each free worker takes what clients have asked, and serves the
//! first request.
//!
//! ```text
//!   take all that clients have asked into the queue; answer what is late, refused, expired
//!   something to serve:  others sleep? then arm the doorbells for them, and nudge one if more waits
//!                        serve it, answer it, begin again
//!   nothing:             poll a little, if that has paid lately
//!                        arm the doorbells, look again, sleep in epoll
//! ```
//!
//! A worker holds the core's lock for all of this except the serving, for well below a µs per
//! request. A client is *active* while its doorbell is not armed: workers look at it in each turn,
//! and it rings no doorbell. All idle workers sleep on one epoll instance, edge-triggered. The
//! kernel wakes one of them for each ring, so no thread hands work to another. While no worker is
//! idle, a ring wakes none of them. Workers then listen for doorbells between two requests, every
//! [`LOOK_NS`] at most. So service follows the order of deadlines over all clients to within that
//! time.
//!
//! A ring without work costs a wake-up. Arming a doorbell late costs nothing: after arming, the
//! worker looks at the ring again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};

use rustix::event::{Timespec, epoll};
use tombolo_calls as calls;
use tombolo_ring::mem::Foreign;
use tombolo_ring::rpc::entry::{Answer, Ask, BEST_EFFORT, Call, Payload, Refusal, Status};
use tombolo_ring::rpc::ring::{self, Consumer};
use tombolo_ring::rpc::{Broken, INLINE_BYTES};
use tombolo_shm::class;

use super::Engine;
use super::connection::{ClientSlot, Connection};
use super::report::{SlowCall, Tally, add};
use super::request::{Ending, Reply, Request, RequestBytes};
use crate::clock::now_ns;
use crate::deadline::Scope;
use crate::histogram::bump;
use crate::poll::{self, Poller, Polling};
use crate::schedule::{Next, Schedule};
use crate::sync::lock;

/// The event of the doorbell that is no client's.
pub(crate) const NUDGE: u64 = u64::MAX;
/// Most clients that are polled; with more of them active the worker sleeps.
const POLLED: usize = 8;
/// Doorbells that are heard at a time.
const EVENTS: usize = 64;
/// How often a worker that does not sleep listens for doorbells: a system call each time.
const LOOK_NS: u64 = 10_000;
/// Buffers that are kept for the short requests to come.
const SPARE: usize = 256;
/// How long a poll lasts where workers are to poll always: they look at what else there is after
/// that.
const ALWAYS_NS: u64 = 20_000_000;
/// How often in a row a client may wake us, or have us look, and ask for nothing. One that keeps
/// the protocol does so once per request at most: when its ring comes after its request was found.
const NOISE: u32 = 256;

/// A request that was taken from its client.
#[derive(Debug)]
pub(crate) struct Job {
    connection: Arc<Connection>,
    /// Of its intake.
    place: Place,
    call: Call,
    deadline_ns: u64,
    /// Of a short request. On its own, so that a job is moved cheaply, and used again by another.
    inline: Inline,
}

type Inline = Box<[u8; INLINE_BYTES]>;

impl Job {
    fn is_of(&self, connection: &Arc<Connection>) -> bool {
        Arc::ptr_eq(&self.connection, connection)
    }
}

/// Which intake, and which of those that had its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    index: u32,
    turn: u32,
}

impl Place {
    pub(crate) fn bits(self) -> u64 {
        u64::from(self.turn) << 32 | u64::from(self.index)
    }

    fn from_bits(bits: u64) -> Place {
        Place { index: bits as u32, turn: (bits >> 32) as u32 }
    }
}

#[derive(Debug)]
struct Intake {
    connection: Arc<Connection>,
    consumer: Consumer<Ask>,
    place: Place,
    active: bool,
    /// Its doorbell rang, or its index moved, since it was drained last.
    signalled: bool,
    /// How often in a row that was for nothing.
    noise: u32,
}

/// A client that is polled: the index at which nothing has come.
type Watched = (Arc<Connection>, u32, Place);

/// What is under the service's lock.
pub(crate) struct Core {
    schedule: Schedule<Job>,
    intakes: Vec<Option<Intake>>,
    active: Vec<Place>,
    turn: u32,
    clients: usize,
    spare: Vec<Inline>,
}

struct Worker<'e> {
    poller: Poller,
    events: Vec<epoll::Event>,
    watched: Vec<Watched>,
    tally: &'e Tally,
}

impl Core {
    pub(crate) fn new(schedule: Schedule<Job>) -> Core {
        Core { schedule, intakes: Vec::new(), active: Vec::new(), turn: 0, clients: 0, spare: Vec::new() }
    }

    /// A buffer comes back.
    fn spare(&mut self, inline: Inline) {
        if self.spare.len() < SPARE {
            self.spare.push(inline);
        }
    }

    pub(crate) fn pending(&self) -> usize {
        self.schedule.pending()
    }

    /// Whether a request is being served.
    pub(crate) fn serves(&self) -> bool {
        self.schedule.serving() > 0
    }

    pub(crate) fn clients(&self) -> usize {
        self.clients
    }

    fn intake(&mut self, place: Place) -> Option<&mut Intake> {
        self.intakes.get_mut(place.index as usize)?.as_mut().filter(|i| i.place == place)
    }

    /// Adds a client, whose doorbell is armed from the beginning.
    pub(crate) fn add(&mut self, connection: Arc<Connection>) -> Place {
        let free = self.intakes.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.intakes.push(None);
            self.intakes.len() - 1
        });
        // Not all ones: that is the nudge.
        self.turn = (self.turn + 1) & 0x7fff_ffff;
        let place = Place { index: index as u32, turn: self.turn };
        let mut consumer = Consumer::default();
        // A client that has asked before it was welcome finds its requests taken with the first
        // ring of its doorbell.
        let _ = consumer.arm(connection.ends());
        self.clients += 1;
        self.schedule.join(place.index, connection.caller.uid);
        self.intakes[index] = Some(Intake { connection, consumer, place, active: false, signalled: false, noise: 0 });
        place
    }

    /// Whether there are clients that are not looked at in each turn: their doorbells have to be
    /// listened for.
    fn some_are_armed(&self) -> bool {
        self.active.len() < self.clients
    }

    /// A client's doorbell rang, or its index moved.
    fn signal(&mut self, place: Place) {
        if let Some(intake) = self.intake(place) {
            intake.signalled = true;
        }
        self.activate(place);
    }

    /// Looks at this client in each turn from now on; it rings no doorbell meanwhile.
    fn activate(&mut self, place: Place) {
        let Some(intake) = self.intake(place) else { return };
        if !intake.active {
            intake.active = true;
            intake.consumer.took(intake.connection.ends());
            self.active.push(place);
        }
    }

    /// Arms the doorbells of all active clients. Returns true if one of them has asked in between:
    /// then no worker may sleep.
    fn arm(&mut self) -> bool {
        let mut found = false;
        let Core { intakes, active, .. } = self;
        active.retain(|place| {
            let Some(intake) = intakes[place.index as usize].as_mut().filter(|i| i.place == *place) else {
                return false;
            };
            // What is broken is noticed when it is drained.
            intake.active = !intake.consumer.arm(intake.connection.ends()).unwrap_or(false);
            intake.signalled |= intake.active;
            found |= intake.active;
            intake.active
        });
        found
    }
}

impl Engine {
    /// A worker's life.
    pub(super) fn work(&self, number: usize) {
        self.set_class(number);
        let mut worker = Worker {
            poller: Poller::default(),
            events: Vec::with_capacity(EVENTS),
            watched: Vec::with_capacity(POLLED),
            tally: &self.counters.workers[number],
        };
        let mut next_look = 0;
        let mut now = now_ns();
        let mut core = lock(&self.core);
        while !self.stopping.load(Ordering::SeqCst) {
            if now >= next_look && core.some_are_armed() {
                next_look = now + LOOK_NS;
                self.collect(&mut core, &mut worker.events);
            }
            self.drain(&mut core, now);
            match core.schedule.next(now) {
                Some(Next::Serve { item, queued_ns }) => {
                    item.connection.set_slot(item.call.token.slot(), ClientSlot::Serving);
                    // Relaxed: who sleeps counted itself under the lock; who has just woken takes
                    // the lock next.
                    if self.idle.load(Ordering::Relaxed) > 0 && (core.arm() || core.schedule.pending() > 0) {
                        self.nudge.ring();
                    }
                    drop(core);
                    self.call_control();
                    let served = self.serve(&item, queued_ns, now, worker.tally);
                    // Everything else that it holds is given back without the lock.
                    let Job { place, inline, .. } = item;
                    core = lock(&self.core);
                    core.schedule.done(place.index, now, served);
                    core.activate(place);
                    core.spare(inline);
                    // What has come by now is seen next: a reading of the clock is saved for each
                    // request of a row.
                    now = served.unwrap_or(now);
                }
                Some(Next::Answer { item, queued_ns, status }) => {
                    self.give_up(&item, status, queued_ns, now);
                    now = now_ns();
                }
                None => {
                    core = self.rest(core, &mut worker);
                    now = now_ns();
                }
            }
        }
        drop(core);
        // The next worker.
        self.nudge.ring();
    }

    /// Activates the clients whose doorbells have rung while no worker slept on them.
    fn collect(&self, core: &mut Core, events: &mut Vec<epoll::Event>) {
        events.clear();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let _ = epoll::wait(&self.doorbells, rustix::buffer::spare_capacity(events), Some(&now));
        // The nudge that ends the workers is for each of them: who hears it without sleeping on it
        // passes it on.
        if self.stopping.load(Ordering::SeqCst) && events.iter().any(|e| e.data.u64() == NUDGE) {
            self.nudge.ring();
        }
        for event in events.iter().map(|e| e.data.u64()).filter(|e| *e != NUDGE) {
            core.signal(Place::from_bits(event));
        }
    }

    fn set_class(&self, number: usize) {
        let wanted = self.options.class();
        let set = if wanted == class::Class::Normal { Ok(()) } else { class::set(wanted) };
        let mut text = class::current().map_or_else(|e| format!("unknown ({e})"), |c| c.to_string());
        if let Err(error) = set {
            text.push_str(&format!(" (asked for {wanted}: {error})"));
        }
        if let Some(slot) = lock(&self.classes).get_mut(number) {
            *slot = text;
        }
    }

    /// While requests are served the control thread looks after the queue now and then.
    fn call_control(&self) {
        // Relaxed: a late look costs the time of one look.
        if self.control_rests.load(Ordering::Relaxed) && self.control_rests.swap(false, Ordering::Relaxed) {
            self.control.ring();
        }
    }

    /// Takes what active clients have asked into the queue.
    pub(super) fn drain(&self, core: &mut Core, now: u64) {
        let mut at = 0;
        while let Some(place) = core.active.get(at).copied() {
            at += 1;
            if let Err(broken) = self.drain_one(core, place, now) {
                self.send_away(core, place, broken);
                core.active.retain(|p| *p != place);
                at -= 1;
            }
        }
    }

    fn drain_one(&self, core: &mut Core, place: Place, now: u64) -> Result<(), Broken> {
        let Core { intakes, schedule, spare, .. } = core;
        let intake = intakes.get_mut(place.index as usize).and_then(Option::as_mut).filter(|i| i.place == place);
        let Some(Intake { connection, consumer, signalled, noise, .. }) = intake else { return Ok(()) };
        let ends = connection.ends();
        // Something came; something of it was to the point.
        let (mut any, mut useful) = (std::mem::take(signalled), false);
        // No more than a ringful at a time, however fast a client asks: the others' turn comes.
        for _ in 0..connection.slots() {
            if !consumer.is_ready(ends)? {
                break;
            }
            let mut inline = spare.pop().unwrap_or_else(|| Box::new([0; INLINE_BYTES]));
            any = true;
            match consumer.take(ends, &mut inline)? {
                None => {}
                Some(Ask::Call(call)) => {
                    useful = true;
                    let job = Job { connection: connection.clone(), place, call, deadline_ns: 0, inline };
                    self.offer(schedule, connection, job, now)?;
                }
                Some(Ask::Cancel(token)) => {
                    useful |= !connection.is_free(token);
                    let slot = connection.slot(token.slot());
                    if slot == ClientSlot::Serving {
                        connection.note_cancelled(token);
                    } else if let ClientSlot::Queued(handle) = slot
                        && schedule.get(handle).is_some_and(|job| job.is_of(connection) && job.call.token == token)
                        && let Some((job, queued_ns)) = schedule.remove(now, handle)
                    {
                        self.give_up(&job, Status::Cancelled, queued_ns, now);
                    }
                }
            }
        }
        if any {
            consumer.took_some(ends);
            *noise = if useful { 0 } else { *noise + 1 };
        }
        if *noise > NOISE { Err(Broken::Noise) } else { Ok(()) }
    }

    fn offer(
        &self,
        schedule: &mut Schedule<Job>,
        connection: &Connection,
        mut job: Job,
        now: u64,
    ) -> Result<(), Broken> {
        let Call { token, deadline_ns, time_left, ttl_ms, .. } = job.call;
        if !connection.is_free(token) {
            return Err(Broken::Token);
        }
        let relative = time_left && deadline_ns != BEST_EFFORT;
        job.deadline_ns = if relative { now.saturating_add(deadline_ns) } else { deadline_ns };
        match schedule.offer(now, job.place.index, job.deadline_ns, u64::from(ttl_ms) * 1_000_000, job) {
            Ok(handle) => connection.set_slot(token.slot(), ClientSlot::Queued(handle)),
            Err((job, status)) => self.give_up(&job, status, 0, now),
        }
        Ok(())
    }

    /// Answers a request that is not served.
    pub(super) fn give_up(&self, job: &Job, status: Status, queued_ns: u64, now: u64) {
        let answer =
            Answer { token: job.call.token, status, code: 0, queued_ns, service_ns: 0, payload: Payload::EMPTY };
        self.trace(job, status, (queued_ns, 0), now);
        self.send(&job.connection, &answer, &[], now, || self.counters.answered(status));
    }

    fn send(&self, connection: &Connection, answer: &Answer, inline: &[u8], now: u64, count: impl FnOnce()) {
        if connection.is_gone() {
            add(&self.counters.abandoned, 1);
            return;
        }
        // Before the client can know of it: who has its answer finds it counted.
        count();
        if let Err(broken) = connection.answer(answer, inline, now)
            && connection.end()
        {
            self.counters.sent_away(broken);
        }
    }

    /// A client that broke the protocol. The control thread sees its socket close and clears up.
    fn send_away(&self, core: &mut Core, place: Place, broken: Broken) {
        if let Some(intake) = core.intake(place) {
            intake.active = false;
            if intake.connection.end() {
                self.counters.sent_away(broken);
            }
        }
    }

    /// A client has gone: takes its requests out of the queue, and everything of it with the last
    /// of them.
    pub(super) fn forget(&self, core: &mut Core, place: Place) {
        let Some(Intake { connection, .. }) = core.intake(place).map(|i| &*i) else { return };
        let connection = connection.clone();
        connection.end();
        connection.call_hooks(|_| true);
        // The client holds the doorbell too: closing ours would not end its events.
        let _ = epoll::delete(&self.doorbells, &connection.doorbell);
        let now = now_ns();
        for slot in 0..connection.slots() {
            // A request of a disconnected client may have left the queue without an update of its
            // slot. Its handle may belong to another request by now.
            if let ClientSlot::Queued(handle) = connection.slot(slot)
                && core.schedule.get(handle).is_some_and(|job| job.is_of(&connection))
                && core.schedule.remove(now, handle).is_some()
            {
                add(&self.counters.abandoned, 1);
            }
        }
        core.intakes[place.index as usize] = None;
        core.schedule.leave(place.index);
        core.clients -= 1;
        core.active.retain(|p| *p != place);
    }

    /// What is done now and then while all workers are busy: what clients ask is taken and judged,
    /// and what has waited too long or is late is given up.
    pub(super) fn attend(&self, core: &mut Core) {
        let now = now_ns();
        self.collect(core, &mut Vec::with_capacity(EVENTS));
        self.drain(core, now);
        for (job, queued_ns, status) in core.schedule.sweep(now) {
            self.give_up(&job, status, queued_ns, now);
        }
    }

    /// Refuses all that waits, in the queue and in the clients' rings.
    pub(super) fn refuse_all(&self, core: &mut Core, reason: Refusal) {
        let now = now_ns();
        let places: Vec<Place> = core.intakes.iter().flatten().map(|i| i.place).collect();
        for place in places {
            core.activate(place);
        }
        self.drain(core, now);
        for job in core.schedule.drain() {
            self.give_up(&job, Status::Refused(reason), 0, now);
        }
    }

    /// Serves a request and answers it; returns when the service ended, and `None` where there was
    /// none.
    fn serve(&self, job: &Job, queued_ns: u64, began: u64, tally: &Tally) -> Option<u64> {
        let Job { connection, call, deadline_ns, inline, .. } = job;
        if connection.is_gone() {
            add(&self.counters.abandoned, 1);
            return None;
        }
        let ends = connection.ends();
        let source = match call.payload {
            Payload::Inline { .. } => Some(RequestBytes::Inline),
            Payload::Arena { .. } => Some(RequestBytes::Arena),
            Payload::Shared { memory, .. } => connection.memory(memory).map(RequestBytes::Memory),
        };
        let payload = match (&source, call.payload) {
            (Some(RequestBytes::Inline), Payload::Inline { len }) => inline.get(..len as usize).map(Foreign::from),
            (Some(RequestBytes::Arena), Payload::Arena { offset, len, .. }) => ends.peer_payload(offset, len),
            (Some(RequestBytes::Memory(mapping)), Payload::Shared { offset, len, .. }) => {
                let range = usize::try_from(offset).ok().zip(usize::try_from(len).ok());
                range.and_then(|(offset, len)| mapping.view().slice(offset, len))
            }
            _ => None,
        };
        let Some(payload) = payload else {
            self.give_up(job, Status::Refused(Refusal::Memory), queued_ns, began);
            return None;
        };
        let Call { token, trace, ttl_ms, .. } = *call;
        let request = Request {
            request: calls::Request::new(token, payload, *deadline_ns, ttl_ms, trace, queued_ns),
            connection,
        };
        let mut reply = Reply::new(connection);
        let served = {
            let _scope = Scope::enter(*deadline_ns);
            // The reply is discarded after a panic; what the handler itself leaves behind is its
            // own affair.
            catch_unwind(AssertUnwindSafe(|| self.handler.serve(&request, &mut reply)))
        };
        connection.served(token);
        let ended = now_ns();
        let service_ns = ended.saturating_sub(began);
        let status = match (served, reply.ending(), reply.refusal()) {
            (Err(_), ..) => Status::Failed,
            (Ok(()), Some(Ending::HangUp), _) => {
                connection.end();
                Status::Failed
            }
            (Ok(()), Some(Ending::Status(status)), _) => status,
            (Ok(()), None, Some(reason)) => Status::Refused(reason),
            (Ok(()), None, None) => Status::Served,
        };
        if status != Status::Served || connection.is_gone() {
            reply.discard();
        }
        let (payload, bytes) = reply.payload();
        let code = reply.code();
        let answer = Answer { token: call.token, status, code, queued_ns, service_ns, payload };
        // Before the answer: a client that has it may forget this memory and hand over more, and
        // finds the room.
        drop(source);
        tally.call(queued_ns, service_ns);
        self.trace(job, status, (queued_ns, service_ns), ended);
        self.send(connection, &answer, bytes, ended, || match status {
            Status::Served => tally.served(ended > *deadline_ns),
            _ => self.counters.answered(status),
        });
        // A hint, which the answer does not wait for.
        connection.set_cpu();
        Some(ended)
    }

    /// Remembers a call that took longer than it should.
    #[inline]
    fn trace(&self, job: &Job, status: Status, (queued_ns, service_ns): (u64, u64), ended: u64) {
        if queued_ns.saturating_add(service_ns) > crate::clock::ns(self.options.slow) {
            self.counters.slow(SlowCall {
                pid: job.connection.caller.pid,
                trace: job.call.trace,
                request_bytes: job.call.payload.len(),
                queued_ns,
                service_ns,
                late_by_ns: ended.saturating_sub(job.deadline_ns),
                end: status.name().into(),
                at_ns: crate::clock::ns(self.began.elapsed()),
            });
        }
    }

    /// Nothing to serve: polls, or sleeps until a doorbell rings.
    fn rest<'a>(&'a self, mut core: MutexGuard<'a, Core>, worker: &mut Worker<'_>) -> MutexGuard<'a, Core> {
        let polls = self.watch(&core, worker);
        let mut began = None;
        if polls {
            drop(core);
            let (moved, first_look) = self.poll(worker);
            began = first_look;
            worker.watched.clear();
            self.polling.store(false, Ordering::Relaxed);
            worker.poller.learn(moved.is_some());
            core = lock(&self.core);
            if let Some(place) = moved {
                core.signal(place);
                bump(&worker.tally.polls_gained);
                return core;
            }
        }
        // This worker polled without the lock. Meanwhile the control thread may have taken in what
        // has arrived: then no worker may sleep.
        if core.schedule.pending() > 0 || core.arm() {
            return core;
        }
        // Under the lock: a thread that finds no idle worker after this looks at the active clients
        // itself.
        self.idle.fetch_add(1, Ordering::Relaxed);
        drop(core);
        let began = began.unwrap_or_else(now_ns);
        worker.events.clear();
        // An interruption is a wake-up for nothing.
        let _ = epoll::wait(&self.doorbells, rustix::buffer::spare_capacity(&mut worker.events), None);
        self.idle.fetch_sub(1, Ordering::Relaxed);
        bump(&worker.tally.sleeps);
        worker.poller.slept(now_ns().saturating_sub(began), polls);
        let mut core = lock(&self.core);
        for event in worker.events.iter().map(|e| e.data.u64()).filter(|e| *e != NUDGE) {
            core.signal(Place::from_bits(event));
        }
        core
    }

    /// Finds the clients to poll. Returns false if polling is not worth it, or another thread does
    /// it.
    fn watch(&self, core: &Core, worker: &mut Worker<'_>) -> bool {
        let Worker { poller, watched, .. } = worker;
        if self.options.polling == Polling::Never || core.active.is_empty() || core.active.len() > POLLED {
            return false;
        }
        let always = self.options.polling == Polling::Always;
        if !always && (!crate::cpu::several() || !poller.worth_it()) {
            return false;
        }
        let here = crate::cpu::current();
        let places = core.active.iter().filter_map(|p| core.intakes[p.index as usize].as_ref());
        let elsewhere = places.filter(|i| always || i.connection.ends().peer_cpu() != Some(here));
        watched.extend(elsewhere.map(|i| (i.connection.clone(), i.consumer.index(), i.place)));
        // Relaxed: two that poll at a time do no harm.
        let polls = !watched.is_empty() && !self.polling.swap(true, Ordering::Relaxed);
        if !polls {
            watched.clear();
        }
        polls
    }

    /// Looks until the index of one of them has moved, and says whose.
    fn poll(&self, worker: &Worker<'_>) -> (Option<Place>, Option<u64>) {
        let always = self.options.polling == Polling::Always;
        let window_ns = if always { ALWAYS_NS } else { worker.poller.window_ns() };
        let moved = |(connection, index, _): &&Watched| ring::is_there(connection.ends(), *index);
        poll::look(
            || worker.watched.iter().find(moved).map(|(.., place)| *place),
            |_, looked| looked >= window_ns || self.stopping.load(Ordering::Relaxed),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::client::{CallOptions, Client, ConnectOptions};
    use crate::provider::{Options, Service};

    #[test]
    fn a_worker_does_not_sleep_over_what_was_queued_while_it_polled() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Some(dir.path().to_path_buf());
        let options = Options { folder: folder.clone(), polling: Polling::Always, ..Options::default() };
        let service = Service::register("a", options, |_: &Request<'_>, reply: &mut Reply<'_>| {
            let _ = reply.write(b"x");
        });
        let service = service.unwrap();
        let client = Client::connect_with("a", &ConnectOptions { folder, ..ConnectOptions::default() }).unwrap();
        client.call(b"", &CallOptions::default()).unwrap();
        // The worker polls, ends its poll in vain, and waits for the lock; meanwhile the control
        // thread finds a request.
        let engine = &service.engine;
        let token = loop {
            let mut core = lock(&engine.core);
            if engine.polling.load(Ordering::Relaxed) {
                while engine.polling.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                let token = client.submit(b"", &CallOptions::default()).unwrap();
                engine.attend(&mut core);
                break token;
            }
            drop(core);
            client.call(b"", &CallOptions::default()).unwrap();
        };
        assert!(client.wait(token, Duration::from_secs(5)).is_ok());
    }
}
