//! What a service decides about its requests: whether one is accepted, which is next, what is too late and what waited too
//! long. Pure: instants in, decisions out.
//!
//! # Rules
//! - Earliest absolute deadline first, FIFO among equals, best effort after all deadlines; or another [`Order`], by choice.
//! - At most `pending` requests wait; one more is refused.
//! - With admission on, a request is refused at once when the budgets queued ahead of it do not leave it time, or when
//!   it would make one that was accepted late. On one worker the test is exact for what is queued, under the assumption that each
//!   request takes its budget; what is being served counts with what is left of its budget. Several workers are taken for one
//!   that is as many times as fast, which is a necessary condition only.
//! - A request whose deadline has passed when its service would begin is refused as late, or goes on as best effort, by the
//!   service's choice. It never runs above what it asked for because it is late.
//! - What waited for longer than its time to live is given up.

use alloc::vec::Vec;

use tombolo_ring::rpc::entry::{BEST_EFFORT, Refusal, Status};

use crate::queue::{Handle, Queue};

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
    /// As they come.
    Fifo,
    /// Priorities: the less time a request has from its arrival to its deadline, the sooner (deadline-monotonic); best effort last.
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
    /// Who comes first.
    pub order: Order,
    /// What happens to the late.
    pub late: Late,
    /// Whether what cannot be met is refused at once.
    pub admission: bool,
    /// How long a service takes at most, ns; admission counts with it.
    pub budget_ns: u64,
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
}

/// What is to be done next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next<T> {
    /// Serve this; call [`Schedule::done`] when that is done.
    Serve {
        /// The request.
        item: T,
        /// How long it waited.
        queued_ns: u64,
    },
    /// Answer this without serving it.
    Answer {
        /// The request.
        item: T,
        /// How long it waited.
        queued_ns: u64,
        /// With what.
        status: Status,
    },
}

/// The requests of one service that wait, and what is known of those being served.
#[derive(Debug)]
pub struct Schedule<T> {
    rules: Rules,
    queue: Queue<Waiting<T>>,
    /// When each service under way began.
    running: Vec<u64>,
}

impl<T> Schedule<T> {
    /// An empty schedule.
    pub fn new(rules: Rules) -> Schedule<T> {
        Schedule { rules, queue: Queue::new(rules.admission), running: Vec::new() }
    }

    /// Requests that wait.
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

    /// Accepts a request with its absolute deadline, or says why not and gives it back. A `ttl_ns` of 0 is the service's.
    ///
    /// # Errors
    /// The answer that the request gets at once: refused, or late.
    pub fn offer(&mut self, now: u64, deadline: u64, ttl_ns: u64, item: T) -> Result<Handle, (T, Status)> {
        if self.queue.len() >= self.rules.pending {
            return Err((item, Status::Refused(Refusal::QueueFull)));
        }
        let late = deadline < now;
        if late && self.rules.late == Late::Refuse {
            return Err((item, Status::Late));
        }
        let deadline = if late { BEST_EFFORT } else { deadline };
        let rank = self.rules.order.rank(now, deadline);
        let work = self.per_worker(self.rules.budget_ns);
        if self.rules.admission && deadline != BEST_EFFORT {
            let budget = self.rules.budget_ns;
            let left = self.running.iter().map(|began| budget.saturating_sub(now.saturating_sub(*began)));
            let left = left.fold(0, u64::saturating_add);
            let start = now.saturating_add(self.per_worker(left));
            if now.saturating_add(budget) > deadline || !self.queue.admits(start, rank, deadline, work) {
                return Err((item, Status::Refused(Refusal::Admission)));
            }
        }
        let ttl = if ttl_ns == 0 { self.rules.ttl_ns } else { ttl_ns };
        let waiting = Waiting { item, deadline_ns: deadline, arrived_ns: now, expires_ns: now.saturating_add(ttl) };
        Ok(self.queue.insert(rank, deadline, work, waiting))
    }

    /// What to do next; `None` where nothing waits.
    pub fn next(&mut self, now: u64) -> Option<Next<T>> {
        loop {
            let handle = self.queue.first()?;
            let waiting = self.queue.get_mut(handle)?;
            let expired = waiting.expires_ns <= now;
            let late = waiting.deadline_ns < now;
            if late && !expired && self.rules.late == Late::BestEffort {
                waiting.deadline_ns = BEST_EFFORT;
                let rank = self.rules.order.rank(now, BEST_EFFORT);
                self.queue.postpone(handle, rank);
                continue;
            }
            let Waiting { item, arrived_ns, .. } = self.queue.remove(handle)?;
            let queued_ns = now.saturating_sub(arrived_ns);
            let status = match (expired, late) {
                (true, _) => Status::Expired,
                (_, true) => Status::Late,
                _ => {
                    self.running.push(now);
                    return Some(Next::Serve { item, queued_ns });
                }
            };
            return Some(Next::Answer { item, queued_ns, status });
        }
    }

    /// A service that began at `began` has ended.
    pub fn done(&mut self, began: u64) {
        if let Some(at) = self.running.iter().position(|b| *b == began) {
            self.running.swap_remove(at);
        }
    }

    /// Takes a waiting request out, with how long it waited: it was cancelled, or its client has gone.
    pub fn remove(&mut self, now: u64, handle: Handle) -> Option<(T, u64)> {
        self.queue.remove(handle).map(|w| (w.item, now.saturating_sub(w.arrived_ns)))
    }

    /// The waiting request of that handle.
    pub fn get(&self, handle: Handle) -> Option<&T> {
        self.queue.get(handle).map(|w| &w.item)
    }

    /// Takes out all that waits in vain, with how long it waited and its answer: what waited for too long, wherever it is in the
    /// order, or is late, where the late are refused. O(n): to be done once in a while.
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
        self.queue.drain().into_iter().map(|w| w.item).collect()
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
            s.offer(10, deadline, 0, name).unwrap();
        }
        assert_eq!(s.next(12), serve('a', 2));
        assert_eq!(s.next(13), serve('b', 3));
        assert_eq!(s.next(14), serve('x', 4));
        assert_eq!(s.next(14), None);
    }

    #[test]
    fn one_too_many_is_refused_with_a_reason() {
        let mut s = Schedule::new(Rules { pending: 1, ..RULES });
        s.offer(0, 9, 0, 1).unwrap();
        assert_eq!(s.offer(0, 1, 0, 2), Err((2, Status::Refused(Refusal::QueueFull))));
    }

    #[test]
    fn the_late_are_refused_or_served_last_as_the_service_chose() {
        let mut s = Schedule::new(RULES);
        s.offer(0, 5, 0, 'a').unwrap();
        assert_eq!(s.offer(10, 9, 0, 'b'), Err(('b', Status::Late)));
        assert_eq!(s.next(6), Some(Next::Answer { item: 'a', queued_ns: 6, status: Status::Late }));

        let mut s = Schedule::new(Rules { late: Late::BestEffort, ..RULES });
        s.offer(0, BEST_EFFORT, 0, 'x').unwrap();
        s.offer(0, 5, 0, 'a').unwrap();
        s.offer(10, 9, 0, 'b').unwrap();
        s.offer(10, 99, 0, 'c').unwrap();
        // A late one comes after all deadlines; among the best effort it keeps its place by arrival.
        assert_eq!(s.next(11), serve('c', 1));
        assert_eq!(s.next(11), serve('x', 11));
        assert_eq!(s.next(11), serve('a', 11));
        assert_eq!(s.next(11), serve('b', 1));
    }

    #[test]
    fn other_orders_have_the_same_rules() {
        let mut s = Schedule::new(Rules { order: Order::Fifo, admission: true, ..RULES });
        s.offer(0, BEST_EFFORT, 0, 'x').unwrap();
        s.offer(0, 50, 0, 'a').unwrap();
        assert_eq!(s.offer(0, 29, 0, 'r'), Err(('r', Status::Refused(Refusal::Admission))), "20 of work are ahead");
        s.offer(0, 30, 0, 'b').unwrap();
        assert_eq!(s.next(1), serve('x', 1));
        assert_eq!(s.next(2), serve('a', 2));
        assert_eq!(s.next(31), Some(Next::Answer { item: 'b', queued_ns: 31, status: Status::Late }));

        // The late stay where they came, served without a deadline.
        let mut s = Schedule::new(Rules { order: Order::Fifo, late: Late::BestEffort, ..RULES });
        s.offer(0, 5, 0, 'a').unwrap();
        s.offer(0, 50, 0, 'b').unwrap();
        assert_eq!(s.next(6), serve('a', 6));

        let mut s = Schedule::new(Rules { order: Order::DeadlineMonotonic, admission: true, ..RULES });
        s.offer(0, 100, 0, 'a').unwrap();
        s.offer(50, 111, 0, 'b').unwrap();
        s.offer(60, 120, 0, 'c').unwrap();
        s.offer(60, BEST_EFFORT, 0, 'x').unwrap();
        let refused = Err(('r', Status::Refused(Refusal::Admission)));
        assert_eq!(s.offer(61, 86, 0, 'r'), refused, "ahead of all, and the first would be done at 101");
        assert_eq!(s.next(60), serve('c', 0), "60 to its deadline when it came, of 61 and 100");
        assert_eq!(s.next(60), serve('b', 10));
        assert_eq!(s.next(60), serve('a', 60));
        assert_eq!(s.next(60), serve('x', 0));
    }

    #[test]
    fn budgets_without_end_add_up_to_one_without_end() {
        let mut s = Schedule::new(Rules { admission: true, budget_ns: u64::MAX, workers: 2, ..RULES });
        for name in ['x', 'y'] {
            s.offer(0, BEST_EFFORT, 0, name).unwrap();
            assert_eq!(s.next(0), serve(name, 0));
        }
        assert_eq!(s.offer(1, u64::MAX - 1, 0, 'a'), Err(('a', Status::Refused(Refusal::Admission))));
    }

    #[test]
    fn a_deadline_is_met_at_its_very_instant() {
        let mut s = Schedule::new(RULES);
        s.offer(5, 5, 0, 'a').unwrap();
        assert_eq!(s.next(5), serve('a', 0));
    }

    #[test]
    fn admission_counts_what_is_queued_and_what_runs() {
        let mut s = Schedule::new(Rules { admission: true, ..RULES });
        let refused = Err((9, Status::Refused(Refusal::Admission)));
        assert_eq!(s.offer(0, 9, 0, 9), refused, "a budget of 10 before 9");
        s.offer(0, 10, 0, 1).unwrap();
        assert_eq!(s.offer(0, 19, 0, 9), refused);
        s.offer(0, 20, 0, 2).unwrap();
        assert_eq!(s.offer(0, 15, 0, 9), refused, "it would push the second out");
        assert_eq!(s.next(0), serve(1, 0));
        // 4 of 10 are done: 6 left, then 10 of the second, then its own 10.
        assert_eq!(s.offer(4, 29, 0, 9), refused);
        s.offer(4, 30, 0, 3).unwrap();
        s.offer(4, BEST_EFFORT, 0, 4).unwrap();
        s.done(0);
        assert_eq!(s.next(8), serve(2, 8));
    }

    #[test]
    fn what_waited_too_long_is_given_up_wherever_it_is() {
        let mut s = Schedule::new(RULES);
        s.offer(0, BEST_EFFORT, 0, 'x').unwrap();
        s.offer(0, 5000, 50, 'a').unwrap();
        s.offer(0, 6000, 2000, 'b').unwrap();
        assert_eq!(s.sweep(49), []);
        assert_eq!(s.next(50), Some(Next::Answer { item: 'a', queued_ns: 50, status: Status::Expired }));
        assert_eq!(s.sweep(1000), [('x', 1000, Status::Expired)]);
        assert_eq!(s.pending(), 1);
    }

    #[test]
    fn the_late_are_given_up_where_they_are_refused() {
        let mut s = Schedule::new(RULES);
        for (deadline, item) in [(30, 'c'), (10, 'a'), (BEST_EFFORT, 'x'), (20, 'b')] {
            s.offer(0, deadline, 0, item).unwrap();
        }
        assert_eq!(s.sweep(10), []);
        assert_eq!(s.sweep(21), [('a', 21, Status::Late), ('b', 21, Status::Late)]);
        assert_eq!(s.sweep(2000), [('c', 2000, Status::Expired), ('x', 2000, Status::Expired)], "once each");
        let mut s = Schedule::new(Rules { late: Late::BestEffort, ..RULES });
        s.offer(0, 10, 0, 'a').unwrap();
        assert_eq!(s.sweep(21), []);
        assert_eq!(s.next(21), serve('a', 21));
    }

    #[test]
    fn a_cancelled_request_leaves_and_its_handle_with_it() {
        let mut s = Schedule::new(RULES);
        let handle = s.offer(0, 5, 0, 'a').unwrap();
        assert_eq!(s.remove(3, handle), Some(('a', 3)));
        assert_eq!(s.remove(3, handle), None);
        assert_eq!(s.next(3), None);
    }
}
