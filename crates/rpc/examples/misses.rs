//! Deadlines missed against offered load, by order of service, with admission and without: one JSON
//! object for each run.
//!
//! usage: misses sim  [--seeds N] [--first SEED] [--loads PERCENT]   on a virtual clock, by `tombolo_rpc::simulate`
//!        misses real [--seeds N] [--first SEED] [--loads PERCENT] [--ms N] [--tries N]
//!                                                                a service and its client, two processes, in real time
//!
//! All orders serve the same requests: the same task sets and arrivals of the same seeds, one order
//! after the other for each seed. A request is missed when its reply is not there at its deadline.
//!
//! # Real runs
//! The service has one worker, pinned to CPU 0 and SCHED_FIFO where that is allowed (the row says
//! so). Its handler computes until its thread's CPU clock has moved on by [`WORK_NS`], not for a
//! number of iterations. The client, on CPU 1, submits at the instants that the seed gives.
//!
//! * `work_ns` is what each request takes at least, in any order: the handler's. The bound
//!   (`demanded`, how many of the requests any order misses) is of that alone, so it is a bound.
//! * `charged_ns` is what a request takes in all, the call with it: measured before the runs with
//!   requests that queue, the median of [`CALIBRATIONS`]. Loads and deadlines are made of it, and
//!   `least` is the part missed in the long run at that load.
//! * `served_ns` is the mean of what the services of this run took by the wall clock. Above
//!   `charged_ns` the run had more work than its load says.
//! * `lag_ns` is how late the client was with a request at most, `stolen_ns` what the hypervisor
//!   took from the CPUs meanwhile. A run in which the client was late with more than one request in
//!   a hundred, or more than 2 % of the time was stolen, is `disturbed`: it is printed, and done
//!   again up to `--tries` times.

use std::path::Path;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tombolo_bench::{Fallible, Other, option, other_end, pin, ready, real_time, until_ended};
use tombolo_rpc::client::{CallOptions, Client, ConnectOptions};
use tombolo_rpc::clock::now_ns;
use tombolo_rpc::deadline::Deadline;
use tombolo_rpc::provider::{Options, Reply, Request, Service, WorkerClass};
use tombolo_rpc::schedule::{Late, Order};
use tombolo_rpc::simulate::{Outcome, Task, Tasks, arrivals, demand_missed, least_missed, run};

/// A service's time on the virtual clock.
const SIMULATED_WORK_NS: u64 = 100_000;
/// CPU time that a handler takes in real runs: long beside what a call costs.
const WORK_NS: u64 = 500_000;
/// How often what a request takes is measured, with [`CALIBRATION_CALLS`] each.
const CALIBRATIONS: usize = 9;
const CALIBRATION_CALLS: usize = 40;
/// A client that is later with a request than a third of the work is late with it; so it may be
/// with one in so many.
const LAG_LIMIT_NS: u64 = WORK_NS / 3;
const LAG_PARTS: u64 = 100;
/// A tick of /proc/stat (USER_HZ, 100 a second).
const TICK_NS: u64 = 10_000_000;
/// So much of the run's time may be stolen: 2 %.
const STOLEN_PARTS: u64 = 50;
const SIMULATED_NS: u64 = 500_000_000;

const ORDERS: [(&str, Order); 3] = [("edf", Order::Edf), ("fifo", Order::Fifo), ("priority", Order::DeadlineMonotonic)];
const SETS: [(&str, Tasks); 3] = [("spread", Tasks::Spread), ("implicit", Tasks::Implicit), ("tight", Tasks::Tight)];

/// What is run once.
#[derive(Clone, Copy)]
struct Point {
    tasks: (&'static str, Tasks),
    load: f64,
    order: (&'static str, Order),
    admission: bool,
    seed: u64,
}

impl Point {
    fn print(&self, outcome: &Outcome, how: &str, demanded: u64, more: &str) {
        println!(
            "{{\"how\":\"{how}\",\"tasks\":\"{}\",\"load\":{:.2},\"order\":\"{}\",\"admission\":{},\"seed\":{},\"requests\":{},\"missed\":{},\"unserved\":{},\"demanded\":{demanded},\"least\":{:.5}{more}}}",
            self.tasks.0,
            self.load,
            self.order.0,
            self.admission,
            self.seed,
            outcome.requests,
            outcome.missed,
            outcome.unserved,
            least_missed(self.load),
        );
    }
}

fn points(seeds: std::ops::Range<usize>, loads: &[i32]) -> Vec<Point> {
    let mut points = Vec::new();
    for (tasks, load, seed) in SETS.into_iter().flat_map(|t| {
        loads.iter().flat_map({
            let seeds = seeds.clone();
            move |l| seeds.clone().map(move |s| (t, *l, s))
        })
    }) {
        for (order, admission) in ORDERS.into_iter().flat_map(|o| [(o, false), (o, true)]) {
            points.push(Point { tasks, load: f64::from(load) / 100.0, order, admission, seed: seed as u64 });
        }
    }
    points
}

impl Point {
    /// The point's task set, with `work_ns` of work per request.
    fn set(&self, work_ns: u64) -> Vec<Task> {
        self.tasks.1.set(self.load, work_ns, self.seed)
    }

    /// How many of its requests any order misses: made with so much charged for each, of which each
    /// takes `work_ns` at least.
    fn demanded(&self, charged_ns: u64, work_ns: u64, duration_ns: u64) -> u64 {
        let set = self.set(charged_ns);
        let requests =
            arrivals(&set, duration_ns, self.seed).into_iter().map(|(at, task)| (at, at + set[task].deadline_ns));
        demand_missed(&requests.collect::<Vec<_>>(), work_ns)
    }
}

fn simulated(point: &Point) -> Outcome {
    run(&point.set(SIMULATED_WORK_NS), point.order.1, point.admission, Late::Refuse, SIMULATED_NS, point.seed)
}

fn same_requests(points: &[Point]) -> impl Iterator<Item = &[Point]> {
    points.chunk_by(|a, b| (a.tasks.0, a.load, a.seed) == (b.tasks.0, b.load, b.seed))
}

fn simulate_all(points: &[Point]) {
    for same in same_requests(points) {
        let demanded = same[0].demanded(SIMULATED_WORK_NS, SIMULATED_WORK_NS, SIMULATED_NS);
        for point in same {
            point.print(&simulated(point), "sim", demanded, "");
        }
    }
}

/// What came of a real run, besides.
#[derive(Clone, Copy, Debug, Default)]
struct Run {
    served: u64,
    served_ns: u64,
    lag_ns: u64,
    /// Requests with which the client was late.
    lagged: u64,
    stolen_ns: u64,
}

impl Run {
    fn is_disturbed(&self, requests: u64, duration_ns: u64) -> bool {
        self.lagged > requests / LAG_PARTS || self.stolen_ns > duration_ns / STOLEN_PARTS
    }
}

fn run_all(points: &[Point], how: &str, duration_ns: u64, tries: usize) -> Fallible<()> {
    let charged_ns = charged()?;
    for same in same_requests(points) {
        let demanded = same[0].demanded(charged_ns, WORK_NS, duration_ns);
        for point in same {
            for tried in 1..=tries.max(1) {
                let (outcome, run) = real(point, charged_ns, duration_ns)?;
                let disturbed = run.is_disturbed(outcome.requests, duration_ns);
                let Run { served, served_ns, lag_ns, lagged, stolen_ns } = run;
                let served_ns = served_ns / served.max(1);
                let more = format!(
                    ",\"work_ns\":{WORK_NS},\"charged_ns\":{charged_ns},\"served_ns\":{served_ns},\"lag_ns\":{lag_ns},\"lagged\":{lagged},\"stolen_ns\":{stolen_ns},\"try\":{tried},\"disturbed\":{disturbed}"
                );
                point.print(&outcome, how, demanded, &more);
                if !disturbed {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// What the hypervisor has taken from all CPUs, ns: the eighth figure of /proc/stat, in ticks
/// (proc_stat(5)).
fn stolen_ns() -> u64 {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = stat.split_whitespace().nth(8).and_then(|ticks| ticks.parse::<u64>().ok()).unwrap_or(0);
    ticks * TICK_NS
}

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The service of real runs.
fn serve(args: &[String]) -> Fallible<()> {
    let [order, admission, budget_ns, dir] = args else { return Err("expected: ORDER ADMISSION BUDGET FOLDER".into()) };
    pin(0);
    let order = ORDERS.iter().find(|o| o.0 == order).ok_or("no such order")?.1;
    // A worker that runs before all else, with the control thread as it comes.
    let class = if real_time() { WorkerClass::Fifo(50) } else { WorkerClass::Normal };
    let options = Options {
        folder: Some(dir.into()),
        class,
        order,
        admission: admission == "true",
        budget: Duration::from_nanos(budget_ns.parse()?),
        ..Options::default()
    };
    let work = |_: &Request<'_>, reply: &mut Reply<'_>| {
        let until = thread_cpu_ns() + WORK_NS;
        while thread_cpu_ns() < until {
            std::hint::spin_loop();
        }
        let _ = reply.write(b"done");
    };
    let _service = Service::register("misses", options, work)?;
    ready();
    until_ended();
    Ok(())
}

/// A service in a process of its own, and a client of it.
fn service(order: &str, admission: bool, budget_ns: u64) -> Fallible<(tempfile::TempDir, Other, Client)> {
    let dir = tempfile::tempdir()?;
    let folder: &Path = dir.path();
    let words = [
        order,
        &admission.to_string(),
        &budget_ns.to_string(),
        folder.to_str().ok_or(
            "the folder's name is not \
            UTF-8",
        )?,
    ];
    let other = Other::start(&words)?;
    let options =
        ConnectOptions { folder: Some(folder.into()), entries: 1024, arena_bytes: 0, ..ConnectOptions::default() };
    let client = Client::connect_with("misses", &options)?;
    Ok((dir, other, client))
}

/// What a request takes in all where others queue behind it: the handler's work, and what the call
/// costs besides.
fn charged() -> Fallible<u64> {
    let (_dir, _other, client) = service("edf", false, 2 * WORK_NS)?;
    let mut took = Vec::new();
    for _ in 0..CALIBRATIONS {
        let tokens: Result<Vec<_>, _> =
            (0..=CALIBRATION_CALLS).map(|_| client.submit(b"work", &CallOptions::default())).collect();
        let mut tokens = tokens?.into_iter();
        // From the end of the first, so that the way there is not counted.
        let timeout = Duration::from_secs(10);
        client.wait(tokens.next().ok_or("no calls")?, timeout)?;
        let begun = now_ns();
        for token in tokens {
            client.wait(token, timeout)?;
        }
        took.push((now_ns() - begun) / CALIBRATION_CALLS as u64);
    }
    took.sort_unstable();
    Ok(took[CALIBRATIONS / 2].max(WORK_NS))
}

fn real(point: &Point, charged_ns: u64, duration_ns: u64) -> Fallible<(Outcome, Run)> {
    let Point { load, order, admission, seed, .. } = *point;
    let (_dir, _other, client) = service(order.0, admission, charged_ns)?;
    let set = point.set(charged_ns);
    let stolen = stolen_ns();
    let begin = now_ns() + 1_000_000;
    let (mut outcome, mut run) = (Outcome { load, ..Outcome::default() }, Run::default());
    let mut coming =
        arrivals(&set, duration_ns, seed).into_iter().map(|(at, task)| (begin + at, set[task].deadline_ns)).peekable();
    let mut tokens = Vec::new();
    let mut deadlines = Vec::new();
    while coming.peek().is_some() || !tokens.is_empty() {
        while let Some((at, relative)) = coming.next_if(|(at, _)| *at <= now_ns()) {
            let lag_ns = now_ns() - at;
            run.lag_ns = run.lag_ns.max(lag_ns);
            run.lagged += u64::from(lag_ns > LAG_LIMIT_NS);
            let deadline = at + relative;
            outcome.requests += 1;
            let options = CallOptions { deadline: Deadline::At(deadline), ..CallOptions::default() };
            match client.submit(b"work", &options) {
                Ok(token) => {
                    tokens.push(token);
                    deadlines.push(deadline);
                }
                Err(_) => {
                    outcome.missed += 1;
                    outcome.unserved += 1;
                }
            }
        }
        let next = coming.peek().map_or(u64::MAX, |(at, _)| *at);
        let left = Duration::from_nanos(next.saturating_sub(now_ns()).min(1_000_000_000));
        if tokens.is_empty() {
            std::thread::sleep(left);
        } else if let Some(index) = client.wait_any(&tokens, left) {
            let now = now_ns();
            let (token, deadline) = (tokens.swap_remove(index), deadlines.swap_remove(index));
            match client.poll(token) {
                Some(Ok(reply)) => {
                    outcome.missed += u64::from(now > deadline);
                    run.served += 1;
                    run.served_ns += reply.service_ns();
                }
                _ => {
                    outcome.missed += 1;
                    outcome.unserved += 1;
                }
            }
        }
    }
    run.stolen_ns = stolen_ns() - stolen;
    Ok((outcome, run))
}

fn main() -> Fallible<()> {
    if let Some(args) = other_end() {
        return serve(&args);
    }
    let how = std::env::args().nth(1).unwrap_or_default();
    let one = option("--loads", 0)? as i32;
    let first = option("--first", 0)?;
    let loads = |step| if one > 0 { vec![one] } else { (50..=120).step_by(step).collect() };
    match &how[..] {
        "sim" => {
            simulate_all(&points(first..first + option("--seeds", 20)?, &loads(5)));
        }
        "real" => {
            let (seeds, ms, tries) = (option("--seeds", 7)?, option("--ms", 500)?, option("--tries", 3)?);
            pin(1);
            let how = if real_time() { "real" } else { "real_without_rights" };
            let duration_ns = ms as u64 * 1_000_000;
            run_all(&points(first..first + seeds, &loads(10)), how, duration_ns, tries)?;
        }
        _ => return Err("expected: misses sim or misses real".into()),
    }
    Ok(())
}
