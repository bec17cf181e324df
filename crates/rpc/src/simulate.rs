//! A service on a virtual clock: how many deadlines are missed, by order of service, at a given load.
//!
//! The same [`Schedule`] that a service runs decides here; only time and work are made up. Requests come from several tasks,
//! each with its own period, work and relative deadline, with random phases and jitter, so that the load is the sum of
//! work/period; a request's service is not interrupted. What a request misses: its deadline, by being done too late, or by
//! being refused or given up.
//!
//! Bound: at a load above 1 no order can serve in time more than 1/load of the work, so at least `1 - 1/load` of it is missed
//! ([`least_missed`]). At a load up to 1 a preemptive earliest-deadline-first order misses none; a service does not interrupt, so its
//! misses there are the price of that, at most one service's time of blocking each. Above 1, earliest deadline first without
//! admission does worse than it must: it serves first what is about to be lost.

use tombolo_ring::rpc::entry::BEST_EFFORT;

use crate::schedule::{Late, Next, Rules, Schedule};

/// In which order requests are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Earliest deadline first.
    Edf,
    /// As they come.
    Fifo,
    /// By task: the shorter its relative deadline, the sooner (deadline-monotonic).
    Priority,
}

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
    /// Requests.
    pub requests: u64,
    /// Not done by their deadline, for whatever reason.
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
}

/// Ten tasks whose loads are equal and sum up to `load`; their relative deadlines are from 4 to 40 times a service's 100 µs.
pub fn task_set(load: f64) -> Vec<Task> {
    let work_ns = 100_000;
    let tasks = 10u64;
    (1..=tasks)
        .map(|n| {
            let period_ns = (work_ns as f64 * tasks as f64 / load) as u64;
            Task { period_ns, work_ns, deadline_ns: 4 * n * work_ns }
        })
        .collect()
}

/// Runs the tasks for `duration_ns` on one worker.
pub fn run(tasks: &[Task], order: Order, admission: bool, late: Late, duration_ns: u64, seed: u64) -> Outcome {
    let mut random = Random(seed);
    // (instant, task)
    let mut arrivals: Vec<(u64, usize)> = Vec::new();
    for (index, task) in tasks.iter().enumerate() {
        let mut at = random.below(task.period_ns);
        while at < duration_ns {
            // Jitter up to a fifth of the period.
            arrivals.push((at + random.below(task.period_ns / 5), index));
            at += task.period_ns;
        }
    }
    arrivals.sort_unstable();
    let budget_ns = tasks.iter().map(|t| t.work_ns).max().unwrap_or(0);
    let late = if order == Order::Edf { late } else { Late::BestEffort };
    let rules = Rules { pending: usize::MAX, late, admission, budget_ns, workers: 1, ttl_ns: u64::MAX };
    let mut schedule = Schedule::new(rules);
    let load = tasks.iter().map(|t| t.work_ns as f64 / t.period_ns as f64).sum();
    let mut outcome = Outcome { requests: arrivals.len() as u64, load, ..Outcome::default() };
    let (mut now, mut coming) = (0u64, arrivals.into_iter().peekable());
    let mut offer = |schedule: &mut Schedule<(u64, usize)>, now: u64, outcome: &mut Outcome| {
        while let Some((at, task)) = coming.next_if(|(at, _)| *at <= now) {
            let deadline = at + tasks[task].deadline_ns;
            let key = match order {
                Order::Edf => deadline,
                Order::Fifo => BEST_EFFORT,
                // Far in the future, so that none is late: only the order counts.
                Order::Priority => (1 << 62) + tasks[task].deadline_ns,
            };
            if schedule.offer(at, key, 0, (deadline, task)).is_err() {
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
                schedule.done(began);
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

    fn ratio(load: f64, order: Order, admission: bool) -> f64 {
        let ratios = (0..4).map(|seed| run(&task_set(load), order, admission, Late::Refuse, SECOND, seed).miss_ratio());
        ratios.sum::<f64>() / 4.0
    }

    #[test]
    fn the_load_is_what_was_asked_for() {
        let outcome = run(&task_set(0.8), Order::Edf, false, Late::Refuse, SECOND, 1);
        assert!((outcome.load - 0.8).abs() < 0.001);
        assert_eq!(outcome.requests, 8000);
    }

    #[test]
    fn earliest_deadline_first_misses_none_where_others_do() {
        assert_eq!(ratio(0.9, Order::Edf, false), 0.0);
        assert!(ratio(0.9, Order::Fifo, false) > 0.0, "FIFO");
    }

    #[test]
    fn in_overload_only_admission_stays_near_the_bound() {
        let (edf, fifo) = (ratio(1.2, Order::Edf, false), ratio(1.2, Order::Fifo, false));
        let (admitted, least) = (ratio(1.2, Order::Edf, true), least_missed(1.2));
        assert!(admitted >= least - 0.01, "{admitted} below the bound {least}");
        assert!(admitted < least + 0.05, "{admitted}, bound {least}");
        // Without it the earliest deadline first serves one that is lost already before one that is not.
        assert!(edf > admitted && fifo > edf && fifo > 0.8, "{admitted} {edf} {fifo}");
    }

    #[test]
    fn admission_refuses_and_keeps_what_it_accepted() {
        for seed in 0..4 {
            let outcome = run(&task_set(1.2), Order::Edf, true, Late::Refuse, SECOND, seed);
            assert_eq!(outcome.missed, outcome.unserved, "all that was accepted was in time");
            assert!(outcome.miss_ratio() < least_missed(1.2) + 0.1, "{outcome:?}");
        }
    }

    #[test]
    fn priorities_starve_the_last_task_in_overload() {
        let (edf, priority) = (ratio(0.95, Order::Edf, false), ratio(0.95, Order::Priority, false));
        assert!(edf <= priority, "{edf} {priority}");
    }
}
