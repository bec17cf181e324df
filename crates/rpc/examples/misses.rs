//! Deadlines missed against offered load, by order of service, with admission and without: one JSON object for each run.
//!
//! usage: misses sim  [--seeds N] [--loads PERCENT]               on a virtual clock, by `tombolo_rpc::simulate`
//!        misses real [--seeds N] [--loads PERCENT] [--ms N]      a service and its client, two processes, in real time
//!
//! Both take the same task sets, arrivals and orders, of the same seeds. `demanded` is how many of the run's requests any order misses, `least` the part
//! that is missed in the long run at that load. In a real run the service has one worker, pinned to CPU 0 and
//! SCHED_FIFO where that is allowed (the row says so), whose handler uses its budget of CPU time; the client, on CPU 1, submits at the
//! instants that the seed gives and takes the answers as they come. A request is missed when its reply is not there at its deadline.

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
/// A service's time in real runs: long beside what a call costs.
const REAL_WORK_NS: u64 = 500_000;
/// That, and what a call costs besides: a service's budget, and the work of which the load is made.
const REAL_TIME_NS: u64 = REAL_WORK_NS + 50_000;
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
    fn print(&self, outcome: &Outcome, how: &str, demanded: u64) {
        println!(
            "{{\"how\":\"{how}\",\"tasks\":\"{}\",\"load\":{:.2},\"order\":\"{}\",\"admission\":{},\"seed\":{},\"requests\":{},\"missed\":{},\"unserved\":{},\"demanded\":{demanded},\"least\":{:.5}}}",
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

fn points(seeds: usize, loads: &[i32]) -> Vec<Point> {
    let mut points = Vec::new();
    for (tasks, load, seed) in
        SETS.into_iter().flat_map(|t| loads.iter().flat_map(move |l| (0..seeds).map(move |s| (t, *l, s))))
    {
        for (order, admission) in ORDERS.into_iter().flat_map(|o| [(o, false), (o, true)]) {
            points.push(Point { tasks, load: f64::from(load) / 100.0, order, admission, seed: seed as u64 });
        }
    }
    points
}

impl Point {
    /// Its tasks, with so much work each.
    fn set(&self, work_ns: u64) -> Vec<Task> {
        self.tasks.1.set(self.load, work_ns, self.seed)
    }

    /// How many of its requests any order misses.
    fn demanded(&self, work_ns: u64, duration_ns: u64) -> u64 {
        let set = self.set(work_ns);
        let requests =
            arrivals(&set, duration_ns, self.seed).into_iter().map(|(at, task)| (at, at + set[task].deadline_ns));
        demand_missed(&requests.collect::<Vec<_>>(), work_ns)
    }
}

fn simulated(point: &Point) -> Outcome {
    run(&point.set(SIMULATED_WORK_NS), point.order.1, point.admission, Late::Refuse, SIMULATED_NS, point.seed)
}

/// Runs all points, of which those of one set of requests follow each other.
fn run_all(
    points: &[Point],
    how: &str,
    (work_ns, duration_ns): (u64, u64),
    run: impl Fn(&Point) -> Fallible<Outcome>,
) -> Fallible<()> {
    for same in points.chunk_by(|a, b| (a.tasks.0, a.load, a.seed) == (b.tasks.0, b.load, b.seed)) {
        let demanded = same[0].demanded(work_ns, duration_ns);
        for point in same {
            point.print(&run(point)?, how, demanded);
        }
    }
    Ok(())
}

fn thread_cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The service of real runs.
fn serve(args: &[String]) -> Fallible<()> {
    let [order, admission, dir] = args else { return Err("expected: ORDER ADMISSION FOLDER".into()) };
    pin(0);
    let order = ORDERS.iter().find(|o| o.0 == order).ok_or("no such order")?.1;
    // A worker that runs before all else, with the control thread as it comes.
    let class = if real_time() { WorkerClass::Fifo(50) } else { WorkerClass::Normal };
    let options = Options {
        folder: Some(dir.into()),
        class,
        order,
        admission: admission == "true",
        budget: Duration::from_nanos(REAL_TIME_NS),
        ..Options::default()
    };
    let work = |_: &Request<'_>, reply: &mut Reply<'_>| {
        let until = thread_cpu_ns() + REAL_WORK_NS;
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

fn real(point: &Point, duration_ns: u64) -> Fallible<Outcome> {
    let Point { load, order, admission, seed, .. } = *point;
    let dir = tempfile::tempdir()?;
    let folder: &Path = dir.path();
    let _other = Other::start(&[order.0, &admission.to_string(), folder.to_str().ok_or("a folder that is no text")?])?;
    let options =
        ConnectOptions { folder: Some(folder.into()), entries: 1024, arena_bytes: 0, ..ConnectOptions::default() };
    let client = Client::connect_with("misses", &options)?;
    let set = point.set(REAL_TIME_NS);
    let begin = now_ns() + 1_000_000;
    let mut outcome = Outcome { load, ..Outcome::default() };
    let mut coming =
        arrivals(&set, duration_ns, seed).into_iter().map(|(at, task)| (begin + at, set[task].deadline_ns)).peekable();
    let mut tokens = Vec::new();
    let mut deadlines = Vec::new();
    while coming.peek().is_some() || !tokens.is_empty() {
        while let Some((at, relative)) = coming.next_if(|(at, _)| *at <= now_ns()) {
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
                Some(Ok(_)) => outcome.missed += u64::from(now > deadline),
                _ => {
                    outcome.missed += 1;
                    outcome.unserved += 1;
                }
            }
        }
    }
    Ok(outcome)
}

fn main() -> Fallible<()> {
    if let Some(args) = other_end() {
        return serve(&args);
    }
    let how = std::env::args().nth(1).unwrap_or_default();
    let one = option("--loads", 0)? as i32;
    let loads = |step| if one > 0 { vec![one] } else { (50..=120).step_by(step).collect() };
    match &how[..] {
        "sim" => {
            let seeds = option("--seeds", 20)?;
            let sizes = (SIMULATED_WORK_NS, SIMULATED_NS);
            run_all(&points(seeds, &loads(5)), "sim", sizes, |point| Ok(simulated(point)))?;
        }
        "real" => {
            let (seeds, ms) = (option("--seeds", 3)?, option("--ms", 500)?);
            pin(1);
            let how = if real_time() { "real" } else { "real_without_rights" };
            let duration_ns = ms as u64 * 1_000_000;
            run_all(&points(seeds, &loads(10)), how, (REAL_TIME_NS, duration_ns), |point| real(point, duration_ns))?;
        }
        _ => return Err("expected: misses sim or misses real".into()),
    }
    Ok(())
}
