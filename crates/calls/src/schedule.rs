//! What a service decides about its requests: whether one is accepted, which is next, what is too
//! late and what waited too long. Pure: instants in, decisions out.
//!
//! # Rules
//! - Earliest absolute deadline first, FIFO among equals, best effort after all deadlines; or
//!   another [`Order`], by choice.
//! - At most `pending` requests wait; one more is refused.
//! - Shares (`shares`): while several clients ask, a client that has had more than its share of the
//!   workers' time yields to those that have not, as far as these would otherwise lose their own
//!   share. Within a client the order is that of deadlines.
//! - With admission on, a request is refused at once when the work queued ahead of it does not
//!   leave it time, or when it would make one that was accepted late. Work is what services have
//!   taken, measured per client: the mean, and once per question four mean deviations on top; the
//!   budget counts until a few services were measured. On one worker the test is exact for what is
//!   queued, under the assumption that each request takes so long; what is being served counts with
//!   what is left of that. Several workers are taken for one that is as many times as fast, which
//!   is a necessary condition only. A client within its share is not refused for the requests of
//!   clients beyond theirs: it is accepted, too, where its share alone leaves the time.
//! - A request whose deadline has passed when its service would begin is refused as late, or goes
//!   on as best effort, by the service's choice. It never runs above what it asked for because it
//!   is late.
//! - What waited for longer than its time to live is given up.

use alloc::vec::Vec;

use tombolo_ring::rpc::entry::{BEST_EFFORT, Refusal, Status};

use crate::queue::{Handle, Queue};
use crate::shares::{Estimate, Shares};

/// What happens to a request whose deadline has passed before its service began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "std", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Late {
    /// It is answered as late, unserved.
    #[default]
    Refuse,
    /// It is served after all that still can be in time.
    BestEffort,
}

/// In which order requests are served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "std", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "kebab-case"))]
pub enum Order {
    /// Earliest absolute deadline first, best effort last.
    #[default]
    Edf,
    /// In order of arrival.
    Fifo,
    /// Priorities: the less time a request has from its arrival to its deadline, the sooner
    /// (deadline-monotonic); best effort last.
    DeadlineMonotonic,
}

impl Order {
    /// Where in the queue a request comes that has arrived at `now`.
    fn rank(self, now: u64, deadline: u64) -> u64 {
        match self {
            Order::Edf => deadline,
            Order::Fifo => 0,
            Order::DeadlineMonotonic if deadline == BEST_EFFORT => BEST_EFFORT,
            Order::DeadlineMonotonic => deadline.saturating_sub(now),
        }
    }
}

/// The rules of one service.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Most requests that wait.
    pub pending: usize,
    /// Order in which waiting requests are served.
    pub order: Order,
    /// What happens to the late.
    pub late: Late,
    /// Whether what cannot be met is refused at once.
    pub admission: bool,
    /// How long a service takes at most, ns; admission counts with it until services were measured.
    pub budget_ns: u64,
    /// Whether each client has a share of the workers' time. Only where the earliest deadline comes
    /// first: other orders compare no instants.
    pub shares: bool,
    /// Workers, at least 1.
    pub workers: u32,
    /// How long a request waits that says nothing else, ns.
    pub ttl_ns: u64,
}

#[derive(Debug)]
struct Waiting<T> {
    item: T,
    deadline_ns: u64,
    arrived_ns: u64,
    expires_ns: u64,
    /// The client that sent it.
    client: u32,
    /// In that client's own queue.
    own: Handle,
}

/// Whose share a service is charged to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Client(u32),
    /// The client has gone while it was served; what is left is its user.
    User(u32),
}

/// A service under way.
#[derive(Debug)]
struct Running {
    by: By,
    began_ns: u64,
    /// How long it was taken to last.
    work_ns: u64,
}

/// What is to be done next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<T> {
    /// Serve this; call [`Schedule::done`] when that is done.
    Serve {
        /// The request to serve.
        item: T,
        /// How long it waited.
        queued_ns: u64,
    },
    /// Answer this without serving it.
    Answer {
        /// The request that is not served.
        item: T,
        /// How long it waited.
        queued_ns: u64,
        /// Says why it was not served.
        status: Status,
    },
}

/// The requests of one service that wait, and what is known of those being served.
#[derive(Debug)]
pub struct Schedule<T> {
    rules: Rules,
    queue: Queue<Waiting<T>>,
    running: Vec<Running>,
    shares: Shares,
    /// Of all clients together.
    service: Estimate,
}

impl<T> Schedule<T> {
    /// An empty schedule.
    pub fn new(rules: Rules) -> Schedule<T> {
        let shares = Shares::new(rules.shares && rules.order == Order::Edf, rules.workers);
        Schedule {
            rules,
            queue: Queue::new(rules.admission),
            running: Vec::new(),
            shares,
            service: Estimate::default(),
        }
    }

    /// A client comes, under a number that no other has now, with the user that it belongs to. One
    /// that asks without having come is its own user, of that number.
    pub fn join(&mut self, client: u32, user: u32) {
        self.shares.join(client, user);
    }

    /// A client has gone, and its requests are taken out. Its number may be another's from now on.
    pub fn leave(&mut self, client: u32) {
        let user = self.shares.leave(client).unwrap_or(client);
        for running in self.running.iter_mut().filter(|r| r.by == By::Client(client)) {
            running.by = By::User(user);
        }
    }

    /// How long a service for this client takes, and by how much that varies, ns.
    fn measured(&self, client: u32) -> (u64, u64) {
        let known = [self.shares.service(client), Some(self.service)].into_iter().flatten();
        known.filter_map(|estimate| estimate.known()).next().unwrap_or((self.rules.budget_ns, 0))
    }

    /// How many requests wait.
    pub fn pending(&self) -> usize {
        self.queue.len()
    }

    /// Requests that are being served.
    pub fn serving(&self) -> usize {
        self.running.len()
    }

    fn per_worker(&self, ns: u64) -> u64 {
        ns / u64::from(self.rules.workers.max(1))
    }

    /// Accepts a client's request with its absolute deadline, or says why not and gives it back. A
    /// `ttl_ns` of 0 is the service's.
    ///
    /// # Errors
    /// The answer that the request gets at once: refused, or late.
    pub fn offer(&mut self, now: u64, client: u32, deadline: u64, ttl_ns: u64, item: T) -> Result<Handle, (T, Status)> {
        if self.queue.len() >= self.rules.pending {
            return Err((item, Status::Refused(Refusal::QueueFull)));
        }
        let late = deadline < now;
        if late && self.rules.late == Late::Refuse {
            return Err((item, Status::Late));
        }
        let deadline = if late { BEST_EFFORT } else { deadline };
        let rank = self.rules.order.rank(now, deadline);
        let (service, varies) = if self.rules.admission { self.measured(client) } else { (0, 0) };
        let work = self.per_worker(service);
        if self.rules.admission && deadline != BEST_EFFORT {
            let left = self.running.iter().map(|r| r.work_ns.saturating_sub(now.saturating_sub(r.began_ns)));
            let left = left.fold(0, u64::saturating_add);
            let margin = varies.saturating_mul(4);
            let start = now.saturating_add(self.per_worker(left)).saturating_add(margin);
            let fits = now.saturating_add(service).saturating_add(margin) <= deadline;
            let room = self.queue.admits(start, rank, deadline, work)
                || self.shares.leaves_time(client, now, start, work, deadline);
            if !(fits && room) {
                return Err((item, Status::Refused(Refusal::Admission)));
            }
        }
        let ttl = if ttl_ns == 0 { self.rules.ttl_ns } else { ttl_ns };
        let expires_ns = now.saturating_add(ttl);
        let waiting = Waiting { item, deadline_ns: deadline, arrived_ns: now, expires_ns, client, own: 0 };
        let handle = self.queue.insert(rank, deadline, work, waiting);
        let own = self.shares.waits(client, rank, work, handle);
        if let Some(waiting) = self.queue.get_mut(handle) {
            waiting.own = own;
        }
        Ok(handle)
    }

    /// Takes a request out of the queue.
    fn take(&mut self, handle: Handle) -> Option<Waiting<T>> {
        let waiting = self.queue.remove(handle)?;
        self.shares.waits_no_more(waiting.client, waiting.own);
        Some(waiting)
    }

    /// What to do next; `None` where nothing waits.
    #[inline]
    pub fn next(&mut self, now: u64) -> Option<Next<T>> {
        loop {
            let first = self.queue.first()?;
            let waiting = self.queue.get_mut(first)?;
            let expired = waiting.expires_ns <= now;
            let late = waiting.deadline_ns < now;
            if late && !expired && self.rules.late == Late::BestEffort {
                waiting.deadline_ns = BEST_EFFORT;
                let (client, own) = (waiting.client, waiting.own);
                let rank = self.rules.order.rank(now, BEST_EFFORT);
                self.queue.postpone(first, rank);
                self.shares.postpone(client, own, rank);
                continue;
            }
            // What is not served costs no share. Where the first is in time, all are: only who is
            // served first is left to say.
            let deadline_ns = waiting.deadline_ns;
            let client = waiting.client;
            let service_ns = self.service.known().map_or(self.rules.budget_ns, |(mean_ns, _)| mean_ns);
            let allowance = service_ns.saturating_mul(4);
            let handle = match expired || late {
                true => first,
                false => self.shares.first(now, allowance, client, deadline_ns).unwrap_or(first),
            };
            let Waiting { item, arrived_ns, expires_ns, client, .. } = self.take(handle)?;
            let queued_ns = now.saturating_sub(arrived_ns);
            let status = match (expires_ns <= now, late) {
                (true, _) => Status::Expired,
                (_, true) => Status::Late,
                _ => {
                    let (work_ns, _) = self.measured(client);
                    self.running.push(Running { by: By::Client(client), began_ns: now, work_ns });
                    self.shares.begins(client, now, work_ns);
                    return Some(Next::Serve { item, queued_ns });
                }
            };
            return Some(Next::Answer { item, queued_ns, status });
        }
    }

    /// A service for this client that began at `began` has ended at `ended`; `None`: in vain, so
    /// that it says nothing of how long services take.
    pub fn done(&mut self, client: u32, began: u64, ended: Option<u64>) {
        let position = |is: &dyn Fn(By) -> bool| self.running.iter().position(|r| r.began_ns == began && is(r.by));
        let found = position(&|by| by == By::Client(client)).or_else(|| position(&|by| matches!(by, By::User(_))));
        let Some(at) = found else { return };
        let Running { by, work_ns, .. } = self.running.swap_remove(at);
        let took_ns = ended.map_or(0, |ended| ended.saturating_sub(began));
        if ended.is_some() {
            self.service.learn(took_ns);
        }
        match by {
            By::Client(client) => self.shares.ends(client, work_ns, took_ns, ended.is_some()),
            // Who hangs up in the middle of a service pays for all of it, else that would be how to
            // get more than one's share.
            By::User(user) => self.shares.ends_for_user(user, work_ns, took_ns),
        }
    }

    /// Takes a waiting request out, with how long it waited: it was cancelled, or its client has
    /// gone.
    pub fn remove(&mut self, now: u64, handle: Handle) -> Option<(T, u64)> {
        self.take(handle).map(|w| (w.item, now.saturating_sub(w.arrived_ns)))
    }

    /// The waiting request of that handle.
    pub fn get(&self, handle: Handle) -> Option<&T> {
        self.queue.get(handle).map(|w| &w.item)
    }

    /// Takes out all that waits in vain, with how long it waited and its answer: what waited for
    /// too long, wherever it is in the order, or is late, where the late are refused. O(n): to be
    /// done once in a while.
    pub fn sweep(&mut self, now: u64) -> Vec<(T, u64, Status)> {
        let refuses = self.rules.late == Late::Refuse;
        let judge = |waiting: &Waiting<T>| {
            let late = refuses && waiting.deadline_ns < now;
            if waiting.expires_ns <= now { Some(Status::Expired) } else { late.then_some(Status::Late) }
        };
        let vain: Vec<_> =
            self.queue.handles().filter_map(|h| self.queue.get(h).and_then(judge).map(|status| (h, status))).collect();
        let taken = |(handle, status)| self.remove(now, handle).map(|(item, queued_ns)| (item, queued_ns, status));
        vain.into_iter().filter_map(taken).collect()
    }

    /// Takes all out, in order.
    pub fn drain(&mut self) -> Vec<T> {
        let mut all = Vec::with_capacity(self.queue.len());
        while let Some(handle) = self.queue.first() {
            all.extend(self.take(handle).map(|w| w.item));
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: Rules = Rules {
        pending: 8,
        order: Order::Edf,
        late: Late::Refuse,
        admission: false,
        budget_ns: 10,
        shares: true,
        workers: 1,
        ttl_ns: 1000,
    };

    fn serve<T>(item: T, queued_ns: u64) -> Option<Next<T>> {
        Some(Next::Serve { item, queued_ns })
    }

    #[test]
    fn the_earliest_deadline_is_next_and_what_waited_is_counted() {
        let mut s = Schedule::new(RULES);
        for (deadline, name) in [(BEST_EFFORT, 'x'), (50, 'b'), (40, 'a')] {
            s.offer(10, 0, deadline, 0, name).unwrap();
        }
        assert_eq!(s.next(12), serve('a', 2));
        assert_eq!(s.next(13), serve('b', 3));
        assert_eq!(s.next(14), serve('x', 4));
        assert_eq!(s.next(14), None);
    }

    #[test]
    fn one_too_many_is_refused_with_a_reason() {
        let mut s = Schedule::new(Rules { pending: 1, ..RULES });
        s.offer(0, 0, 9, 0, 1).unwrap();
        assert_eq!(s.offer(0, 0, 1, 0, 2), Err((2, Status::Refused(Refusal::QueueFull))));
    }

    #[test]
    fn the_late_are_refused_or_served_last_as_the_service_chose() {
        let mut s = Schedule::new(RULES);
        s.offer(0, 0, 5, 0, 'a').unwrap();
        assert_eq!(s.offer(10, 0, 9, 0, 'b'), Err(('b', Status::Late)));
        assert_eq!(s.next(6), Some(Next::Answer { item: 'a', queued_ns: 6, status: Status::Late }));

        let mut s = Schedule::new(Rules { late: Late::BestEffort, ..RULES });
        s.offer(0, 0, BEST_EFFORT, 0, 'x').unwrap();
        s.offer(0, 0, 5, 0, 'a').unwrap();
        s.offer(10, 0, 9, 0, 'b').unwrap();
        s.offer(10, 0, 99, 0, 'c').unwrap();
        // A late one comes after all deadlines; among the best effort it keeps its place by
        // arrival.
        assert_eq!(s.next(11), serve('c', 1));
        assert_eq!(s.next(11), serve('x', 11));
        assert_eq!(s.next(11), serve('a', 11));
        assert_eq!(s.next(11), serve('b', 1));
    }

    #[test]
    fn other_orders_have_the_same_rules() {
        let mut s = Schedule::new(Rules { order: Order::Fifo, admission: true, ..RULES });
        s.offer(0, 0, BEST_EFFORT, 0, 'x').unwrap();
        s.offer(0, 0, 50, 0, 'a').unwrap();
        assert_eq!(s.offer(0, 0, 29, 0, 'r'), Err(('r', Status::Refused(Refusal::Admission))), "20 of work are ahead");
        s.offer(0, 0, 30, 0, 'b').unwrap();
        assert_eq!(s.next(1), serve('x', 1));
        assert_eq!(s.next(2), serve('a', 2));
        assert_eq!(s.next(31), Some(Next::Answer { item: 'b', queued_ns: 31, status: Status::Late }));

        // The late stay where they came, served without a deadline.
        let mut s = Schedule::new(Rules { order: Order::Fifo, late: Late::BestEffort, ..RULES });
        s.offer(0, 0, 5, 0, 'a').unwrap();
        s.offer(0, 0, 50, 0, 'b').unwrap();
        assert_eq!(s.next(6), serve('a', 6));

        let mut s = Schedule::new(Rules { order: Order::DeadlineMonotonic, admission: true, ..RULES });
        s.offer(0, 0, 100, 0, 'a').unwrap();
        s.offer(50, 0, 111, 0, 'b').unwrap();
        s.offer(60, 0, 120, 0, 'c').unwrap();
        s.offer(60, 0, BEST_EFFORT, 0, 'x').unwrap();
        let refused = Err(('r', Status::Refused(Refusal::Admission)));
        assert_eq!(s.offer(61, 0, 86, 0, 'r'), refused, "ahead of all, and the first would be done at 101");
        assert_eq!(s.next(60), serve('c', 0), "60 to its deadline when it came, of 61 and 100");
        assert_eq!(s.next(60), serve('b', 10));
        assert_eq!(s.next(60), serve('a', 60));
        assert_eq!(s.next(60), serve('x', 0));
    }

    #[test]
    fn budgets_without_end_add_up_to_one_without_end() {
        let mut s = Schedule::new(Rules { admission: true, budget_ns: u64::MAX, workers: 2, ..RULES });
        for name in ['x', 'y'] {
            s.offer(0, 0, BEST_EFFORT, 0, name).unwrap();
            assert_eq!(s.next(0), serve(name, 0));
        }
        assert_eq!(s.offer(1, 0, u64::MAX - 1, 0, 'a'), Err(('a', Status::Refused(Refusal::Admission))));
    }

    #[test]
    fn a_deadline_is_met_at_its_very_instant() {
        let mut s = Schedule::new(RULES);
        s.offer(5, 0, 5, 0, 'a').unwrap();
        assert_eq!(s.next(5), serve('a', 0));
    }

    #[test]
    fn admission_counts_what_is_queued_and_what_runs() {
        let mut s = Schedule::new(Rules { admission: true, ..RULES });
        let refused = Err((9, Status::Refused(Refusal::Admission)));
        assert_eq!(s.offer(0, 0, 9, 0, 9), refused, "a budget of 10 before 9");
        s.offer(0, 0, 10, 0, 1).unwrap();
        assert_eq!(s.offer(0, 0, 19, 0, 9), refused);
        s.offer(0, 0, 20, 0, 2).unwrap();
        assert_eq!(s.offer(0, 0, 15, 0, 9), refused, "it would push the second out");
        assert_eq!(s.next(0), serve(1, 0));
        // 4 of 10 are done: 6 left, then 10 of the second, then its own 10.
        assert_eq!(s.offer(4, 0, 29, 0, 9), refused);
        s.offer(4, 0, 30, 0, 3).unwrap();
        s.offer(4, 0, BEST_EFFORT, 0, 4).unwrap();
        s.done(0, 0, Some(10));
        assert_eq!(s.next(8), serve(2, 8));
    }

    #[test]
    fn what_waited_too_long_is_given_up_wherever_it_is() {
        let mut s = Schedule::new(RULES);
        s.offer(0, 0, BEST_EFFORT, 0, 'x').unwrap();
        s.offer(0, 0, 5000, 50, 'a').unwrap();
        s.offer(0, 0, 6000, 2000, 'b').unwrap();
        assert_eq!(s.sweep(49), []);
        assert_eq!(s.next(50), Some(Next::Answer { item: 'a', queued_ns: 50, status: Status::Expired }));
        assert_eq!(s.sweep(1000), [('x', 1000, Status::Expired)]);
        assert_eq!(s.pending(), 1);
    }

    #[test]
    fn the_late_are_given_up_where_they_are_refused() {
        let mut s = Schedule::new(RULES);
        for (deadline, item) in [(30, 'c'), (10, 'a'), (BEST_EFFORT, 'x'), (20, 'b')] {
            s.offer(0, 0, deadline, 0, item).unwrap();
        }
        assert_eq!(s.sweep(10), []);
        assert_eq!(s.sweep(21), [('a', 21, Status::Late), ('b', 21, Status::Late)]);
        assert_eq!(s.sweep(2000), [('c', 2000, Status::Expired), ('x', 2000, Status::Expired)], "once each");
        let mut s = Schedule::new(Rules { late: Late::BestEffort, ..RULES });
        s.offer(0, 0, 10, 0, 'a').unwrap();
        assert_eq!(s.sweep(21), []);
        assert_eq!(s.next(21), serve('a', 21));
    }

    #[test]
    fn a_cancelled_request_leaves_and_its_handle_with_it() {
        let mut s = Schedule::new(RULES);
        let handle = s.offer(0, 0, 5, 0, 'a').unwrap();
        assert_eq!(s.remove(3, handle), Some(('a', 3)));
        assert_eq!(s.remove(3, handle), None);
        assert_eq!(s.next(3), None);
    }
}
