//! A service on a virtual clock: how many deadlines are missed, by order of service, at a given
//! load.
//!
//! The same [`Schedule`] that a service runs decides here; only time and work are made up. Requests
//! come from several tasks, each with its own period, work and relative deadline, with random
//! phases and jitter, so that the load is the sum of work/period; a request's service is not
//! interrupted. What a request misses: its deadline, by being done too late, or by being refused or
//! given up.
//!
//! Bounds: at a load above 1 no order can serve in time more than 1/load of the work, so in the
//! long run at least `1 - 1/load` of it is missed ([`least_missed`]). Of the requests of one run,
//! [`demand_missed`] counts how many any order misses, even one that knows what comes and
//! interrupts what it serves; where that is 0 the requests are feasible, and a preemptive
//! earliest-deadline-first order misses none. A service does not interrupt: what it misses there is
//! the price of that, at most one service's time of blocking each. Above 1, earliest deadline first
//! without admission does worse than it must: it serves first what is about to be lost.

use crate::schedule::{Late, Next, Order, Rules, Schedule};

/// A source of requests.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    /// From one request to the next, ns.
    pub period_ns: u64,
    /// Service time, ns.
    pub work_ns: u64,
    /// From a request to its deadline, ns.
    pub deadline_ns: u64,
}

/// What came of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Requests that arrived during the run.
    pub requests: u64,
    /// Not done by their deadline, for any reason.
    pub missed: u64,
    /// Of these: not accepted, or given up unserved.
    pub unserved: u64,
    /// Work offered per time.
    pub load: f64,
}

impl Outcome {
    /// Missed per request.
    pub fn miss_ratio(&self) -> f64 {
        self.missed as f64 / self.requests.max(1) as f64
    }
}

/// The part of the work that any order must miss at a load.
pub fn least_missed(load: f64) -> f64 {
    (1.0 - 1.0 / load).max(0.0)
}

/// Demand is looked at in intervals of so many requests at most. Fewer, and the bound is lower than
/// it could be; it stays a bound.
const MOST_DEMANDED: usize = 4096;

/// How many of these requests any order misses, on one worker, with `work_ns` each: (instant,
/// deadline), by instant.
///
/// In an interval as many can be served as its length holds. Those that come and are due within it,
/// above that number, are missed (the processor demand criterion: Baruah, Rosier, Howell 1990).
/// What the best choice of intervals that do not overlap adds up to is missed in all.
pub fn demand_missed(requests: &[(u64, u64)], work_ns: u64) -> u64 {
    let mut ends: Vec<u64> = requests.iter().map(|(_, deadline)| *deadline).collect();
    ends.sort_unstable();
    // What is missed of the requests due up to each end.
    let mut missed: Vec<u64> = Vec::with_capacity(ends.len());
    for (index, end) in ends.iter().enumerate() {
        let mut most = missed.last().copied().unwrap_or(0);
        let (mut demand, mut before) = (0, index);
        let come = requests.partition_point(|(at, _)| at < end);
        for (begin, deadline) in requests[..come].iter().rev().take(MOST_DEMANDED) {
            if deadline > end {
                continue;
            }
            demand += 1;
            while before > 0 && ends[before - 1] > *begin {
                before -= 1;
            }
            let others = before.checked_sub(1).map_or(0, |last| missed[last]);
            most = most.max(others + u64::saturating_sub(demand, (end - begin) / work_ns.max(1)));
        }
        missed.push(most);
    }
    missed.last().copied().unwrap_or(0)
}

/// Small, seeded, the same on each machine.
struct Random(u64);

impl Random {
    /// Uniform in 0..n.
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % n.max(1)
    }

    /// Uniform between 0 and 1.
    fn part(&mut self) -> f64 {
        self.below(1 << 53) as f64 / (1u64 << 53) as f64
    }
}

/// Which tasks make up a load. All of them ask for the same service, so work is the same for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tasks {
    /// Ten tasks of equal rates, whose relative deadlines are from 4 to 40 times the work, shorter
    /// than their periods and longer: feasible up to a load of 1, as a rule.
    Spread,
    /// Ten tasks of uniformly random rates (UUniFast, Bini and Buttazzo 2005), each with its period as its deadline: feasible for a preemptive
    /// earliest-deadline-first order at each load up to 1.
    Implicit,
    /// Ten tasks of equal rates, whose relative deadlines are from 1.2 to 3 times the work: where
    /// several ask at once not all can be served in time, so that this is infeasible at each load.
    Tight,
}

impl Tasks {
    /// Tasks that together ask for `load` of one worker's time; only [`Tasks::Implicit`] uses
    /// `seed`.
    pub fn set(self, load: f64, work_ns: u64, seed: u64) -> Vec<Task> {
        const TASKS: u64 = 10;
        match self {
            Tasks::Spread | Tasks::Tight => (1..=TASKS)
                .map(|n| {
                    let period_ns = (work_ns as f64 * TASKS as f64 / load) as u64;
                    let tenths = if self == Tasks::Spread { 40 * n } else { 10 + 2 * n };
                    Task { period_ns, work_ns, deadline_ns: tenths * work_ns / 10 }
                })
                .collect(),
            Tasks::Implicit => {
                let mut random = Random(!seed);
                let mut left = load;
                let shares = (1..=TASKS).rev().map(|more| {
                    let rest = left * random.part().powf(1.0 / (more - 1) as f64);
                    let share = if more == 1 { left } else { left - rest };
                    left = rest;
                    share
                });
                let tasks = shares.map(|share| {
                    // One that hardly ever asks would make no difference but to the time that it
                    // takes to run.
                    let period_ns = (work_ns as f64 / share.max(1e-3)) as u64;
                    Task { period_ns, work_ns, deadline_ns: period_ns }
                });
                tasks.collect()
            }
        }
    }
}

/// When each task asks within `duration_ns`: (instant, task), in order. The first instant is
/// random, each later one a period after, with a jitter of up to a fifth of the period.
pub fn arrivals(tasks: &[Task], duration_ns: u64, seed: u64) -> Vec<(u64, usize)> {
    let mut random = Random(seed);
    let mut arrivals = Vec::new();
    for (index, task) in tasks.iter().enumerate() {
        let mut at = random.below(task.period_ns);
        while at < duration_ns {
            arrivals.push((at + random.below(task.period_ns / 5), index));
            at += task.period_ns;
        }
    }
    arrivals.sort_unstable();
    arrivals
}

/// Runs the tasks for `duration_ns` on one worker.
pub fn run(tasks: &[Task], order: Order, admission: bool, late: Late, duration_ns: u64, seed: u64) -> Outcome {
    let arrivals = arrivals(tasks, duration_ns, seed);
    let budget_ns = tasks.iter().map(|t| t.work_ns).max().unwrap_or(0);
    let rules =
        Rules { pending: usize::MAX, order, late, admission, budget_ns, shares: false, workers: 1, ttl_ns: u64::MAX };
    let mut schedule = Schedule::new(rules);
    let load = tasks.iter().map(|t| t.work_ns as f64 / t.period_ns as f64).sum();
    let mut outcome = Outcome { requests: arrivals.len() as u64, load, ..Outcome::default() };
    let (mut now, mut coming) = (0u64, arrivals.into_iter().peekable());
    let mut offer = |schedule: &mut Schedule<(u64, usize)>, now: u64, outcome: &mut Outcome| {
        while let Some((at, task)) = coming.next_if(|(at, _)| *at <= now) {
            let deadline = at + tasks[task].deadline_ns;
            if schedule.offer(at, 0, deadline, 0, (deadline, task)).is_err() {
                outcome.missed += 1;
                outcome.unserved += 1;
            }
        }
        coming.peek().map(|(at, _)| *at)
    };
    loop {
        let next_arrival = offer(&mut schedule, now, &mut outcome);
        match schedule.next(now) {
            Some(Next::Serve { item: (deadline, task), .. }) => {
                let began = now;
                now += tasks[task].work_ns;
                // What comes meanwhile is judged while this one runs.
                offer(&mut schedule, now, &mut outcome);
                schedule.done(0, began, Some(now));
                outcome.missed += u64::from(now > deadline);
            }
            Some(Next::Answer { .. }) => {
                outcome.missed += 1;
                outcome.unserved += 1;
            }
            None => match next_arrival {
                Some(at) => now = at,
                None => return outcome,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const WORK: u64 = 100_000;

    fn once(load: f64, order: Order, admission: bool, late: Late, seed: u64) -> Outcome {
        run(&Tasks::Spread.set(load, WORK, seed), order, admission, late, SECOND, seed)
    }

    fn ratio(load: f64, order: Order, admission: bool, late: Late) -> f64 {
        (0..4).map(|seed| once(load, order, admission, late, seed).miss_ratio()).sum::<f64>() / 4.0
    }

    #[test]
    fn the_load_is_what_was_asked_for() {
        let outcome = once(0.8, Order::Edf, false, Late::Refuse, 1);
        assert!((outcome.load - 0.8).abs() < 0.001);
        assert_eq!(outcome.requests, 8000);
        for seed in 0..20 {
            let tasks = Tasks::Implicit.set(0.9, WORK, seed);
            let load: f64 = tasks.iter().map(|t| t.work_ns as f64 / t.period_ns as f64).sum();
            assert!((load - 0.9).abs() < 0.01, "{load}: {tasks:?}");
        }
    }

    #[test]
    fn earliest_deadline_first_misses_none_where_others_do() {
        assert_eq!(ratio(0.9, Order::Edf, false, Late::Refuse), 0.0);
        assert!(ratio(0.9, Order::Fifo, false, Late::Refuse) > 0.0, "FIFO");
    }

    #[test]
    fn in_overload_only_admission_stays_near_the_bound() {
        let (edf, admitted) = (ratio(1.2, Order::Edf, false, Late::Refuse), ratio(1.2, Order::Edf, true, Late::Refuse));
        let (fifo, least) = (ratio(1.2, Order::Fifo, false, Late::BestEffort), least_missed(1.2));
        assert!(admitted >= least - 0.01, "{admitted} below the bound {least}");
        assert!(admitted < least + 0.05, "{admitted}, bound {least}");
        // Without it the earliest deadline first serves one that is lost already before one that is
        // not; and an order that never gives up loses nearly all.
        assert!(edf > admitted && fifo > edf && fifo > 0.8, "{admitted} {edf} {fifo}");
    }

    #[test]
    fn admission_refuses_and_keeps_what_it_accepted_in_each_order() {
        for (order, seed) in
            [Order::Edf, Order::Fifo, Order::DeadlineMonotonic].into_iter().flat_map(|o| (0..4).map(move |s| (o, s)))
        {
            let outcome = once(1.2, order, true, Late::Refuse, seed);
            assert_eq!(outcome.missed, outcome.unserved, "{order:?}: all that was accepted was in time");
            assert!(outcome.miss_ratio() < least_missed(1.2) + 0.3, "{order:?} {outcome:?}");
        }
    }

    /// The most that can be served in time, by trying each choice: served in the order of
    /// deadlines, with interruptions, slot by slot.
    fn most_in_time(requests: &[(u64, u64)], work: u64) -> u64 {
        let feasible = |chosen: &[(u64, u64)]| {
            let mut left: Vec<(u64, u64, u64)> = chosen.iter().map(|(at, due)| (*at, *due, work)).collect();
            let last = chosen.iter().map(|c| c.1).max().unwrap_or(0);
            for now in 0..last {
                let ready = left.iter_mut().filter(|(at, _, left)| *at <= now && *left > 0);
                if let Some(first) = ready.min_by_key(|r| r.1) {
                    first.2 -= 1;
                    if first.2 == 0 && now + 1 > first.1 {
                        return false;
                    }
                }
            }
            left.iter().all(|(.., left)| *left == 0)
        };
        let choices = 0..1u32 << requests.len();
        let chosen = |bits: u32| -> Vec<(u64, u64)> {
            requests.iter().enumerate().filter(|(n, _)| bits >> n & 1 == 1).map(|(_, r)| *r).collect()
        };
        choices.filter(|bits| feasible(&chosen(*bits))).map(|bits| bits.count_ones()).max().unwrap_or(0).into()
    }

    #[test]
    fn demand_is_a_bound_and_zero_where_all_can_be_served() {
        assert_eq!(demand_missed(&[], 3), 0);
        assert_eq!(demand_missed(&[(0, 3), (0, 3), (0, 3)], 3), 2);
        assert_eq!(demand_missed(&[(0, 3), (0, 4), (10, 12), (20, 23)], 3), 2, "apart from each other");
        let mut exact = 0;
        for seed in 0..200 {
            let mut random = Random(seed);
            let mut requests: Vec<(u64, u64)> = (0..7).map(|_| (random.below(15), 2 + random.below(9))).collect();
            requests.iter_mut().for_each(|(at, due)| *due += *at);
            requests.sort_unstable();
            let (bound, best) = (demand_missed(&requests, 3), 7 - most_in_time(&requests, 3));
            assert!(bound <= best, "seed {seed}: {bound} of {best}, {requests:?}");
            assert_eq!(bound == 0, best == 0, "seed {seed}: {requests:?}");
            exact += u32::from(bound == best);
        }
        assert!(exact > 150, "mostly it is what the best order misses: {exact} of 200");
    }

    #[test]
    fn no_order_misses_less_than_demand_says_and_the_sets_are_as_feasible_as_they_should() {
        let demand = |tasks: Tasks, load, seed| {
            let set = tasks.set(load, WORK, seed);
            let requests: Vec<_> =
                arrivals(&set, SECOND / 10, seed).into_iter().map(|(at, n)| (at, at + set[n].deadline_ns)).collect();
            let least = demand_missed(&requests, WORK);
            for (order, admission) in
                [Order::Edf, Order::Fifo, Order::DeadlineMonotonic].into_iter().flat_map(|o| [(o, false), (o, true)])
            {
                let outcome = run(&set, order, admission, Late::Refuse, SECOND / 10, seed);
                assert!(outcome.missed >= least, "{tasks:?} {load} {order:?} {outcome:?}: {least}");
            }
            least
        };
        for seed in 0..3 {
            assert_eq!(demand(Tasks::Spread, 0.9, seed), 0);
            assert_eq!(demand(Tasks::Implicit, 0.8, seed), 0);
            assert!(demand(Tasks::Tight, 0.5, seed) > 0);
            assert!(demand(Tasks::Spread, 1.2, seed) > 100);
        }
    }

    #[test]
    fn priorities_miss_no_less_than_deadlines_below_full_load() {
        let late = Late::Refuse;
        let (edf, priority) =
            (ratio(0.95, Order::Edf, false, late), ratio(0.95, Order::DeadlineMonotonic, false, late));
        assert!(edf <= priority, "{edf} {priority}");
    }
}
