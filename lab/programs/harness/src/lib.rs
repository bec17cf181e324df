//! What the benches of calls share, ours and the peers' alike: a second process, both pinned, calls
//! in a closed loop, and one JSON object a row on standard output.
//!
//! A program of a bench starts itself again as the other end ([`Other`]), with `--other` as the
//! first of its arguments; that end says [`ready`] once it serves. From then on a thread of it
//! answers for its CPU time and learns of its parent's end, however that comes: no process outlives
//! its bench. The thread sleeps while calls are measured.
//!
//! [`peer`] has the rows of each peer.
//!
//! Failure: a row that cannot be measured is an error, never a zero.

pub mod peer;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use tombolo_shm::class::{self, Class};

/// What the programs of a bench return.
pub type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

/// How long the other end may take to clean up after itself.
const PATIENCE: Duration = Duration::from_secs(2);

static ENDED: AtomicBool = AtomicBool::new(false);

/// Keeps this thread, and those that it starts, on one CPU.
pub fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // On a machine with one CPU the rows for two mean nothing, and say so by their figures.
    let _ = sched_setaffinity(None, &set);
}

/// CPU time of this process so far.
fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The arguments after `--other`, where this process is the other end of a row.
pub fn other_end() -> Option<Vec<String>> {
    let mut args = std::env::args().skip(1);
    (args.next()? == "--other").then(|| args.collect())
}

/// The value of an option of this program, a number.
///
/// # Errors
/// Where it is none.
pub fn option(name: &str, default: usize) -> Fallible<usize> {
    let args: Vec<String> = std::env::args().collect();
    let value = args.iter().position(|a| a == name).and_then(|at| args.get(at + 1));
    let parsed = value.map(|v| v.parse().map_err(|e| format!("{name} {v}: expected a number ({e})"))).transpose()?;
    Ok(parsed.unwrap_or(default))
}

/// In the other end: it serves from now on. Returns at once. [`ended`] becomes true when the row is
/// over, and a moment later the process ends, even if it is busy.
pub fn ready() {
    std::thread::spawn(|| {
        for _ in std::io::stdin().lock().lines().map_while(Result::ok) {
            say(&cpu_ns().to_string());
        }
        ENDED.store(true, Ordering::SeqCst);
        std::thread::sleep(PATIENCE / 2);
        std::process::exit(0);
    });
    say("ready");
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    // A parent that has gone is noticed on the other pipe.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// In the other end: the row is over.
pub fn ended() -> bool {
    ENDED.load(Ordering::SeqCst)
}

/// In the other end, where other threads serve: waits until the row is over.
pub fn until_ended() {
    while !ended() {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The other end of a row.
#[derive(Debug)]
pub struct Other {
    child: Child,
    into: Option<ChildStdin>,
    out: BufReader<ChildStdout>,
}

impl Other {
    /// Starts this program again with `--other` and these arguments, and waits until it serves.
    ///
    /// # Errors
    /// Where it ends before that.
    pub fn start(args: &[&str]) -> Fallible<Other> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--other")
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let out = BufReader::new(child.stdout.take().ok_or("no output")?);
        let into = child.stdin.take();
        let mut other = Other { child, into, out };
        other.line()?;
        Ok(other)
    }

    fn line(&mut self) -> Fallible<String> {
        let mut line = String::new();
        if self.out.read_line(&mut line)? == 0 {
            return Err("the other end ended".into());
        }
        Ok(line.trim().into())
    }

    /// CPU time of both processes so far.
    ///
    /// # Errors
    /// Where the other end has ended.
    pub fn cpu_ns(&mut self) -> Fallible<u64> {
        let into = self.into.as_mut().ok_or("the other end has no standard input")?;
        into.write_all(b"\n")?;
        Ok(cpu_ns() + self.line()?.parse::<u64>()?)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It cleans up and ends by itself when it sees this.
        drop(self.into.take());
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One row: times of calls, and what they cost.
#[derive(Debug)]
pub struct Row {
    name: String,
    calls: usize,
    times: Vec<u32>,
    begun: Instant,
    cpu_ns: Option<u64>,
}

impl Row {
    /// Begins the measurement of so many calls.
    ///
    /// # Errors
    /// Where the other end does not answer for its CPU time.
    pub fn begin(name: &str, calls: usize, other: Option<&mut Other>) -> Fallible<Row> {
        let times = Vec::with_capacity(calls);
        let cpu_ns = other.map(Other::cpu_ns).transpose()?;
        Ok(Row { name: name.into(), calls, times, begun: Instant::now(), cpu_ns })
    }

    /// One call that began then and ends now.
    #[inline]
    pub fn add(&mut self, start: Instant) {
        self.times.push(start.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
    }

    /// Ends the measurement and prints the row. Rows without times of single calls have a rate
    /// only.
    ///
    /// # Errors
    /// Where the other end does not answer for its CPU time.
    pub fn end(mut self, other: Option<&mut Other>) -> Fallible<()> {
        let seconds = self.begun.elapsed().as_secs_f64();
        let cpu = match (self.cpu_ns, other) {
            (Some(before), Some(other)) => Some((other.cpu_ns()? - before) as f64 / 1000.0 / self.calls as f64),
            _ => None,
        };
        self.times.sort_unstable();
        let at = |part: f64| {
            let index = (self.times.len() as f64 * part) as usize;
            let last = self.times.len().checked_sub(1)?;
            Some(f64::from(self.times[index.min(last)]) / 1000.0)
        };
        let number = |value: Option<f64>| value.map_or("null".into(), |v| format!("{v:.3}"));
        say(&format!(
            "{{\"row\":\"{}\",\"calls\":{},\"min_us\":{},\"p50_us\":{},\"p99_us\":{},\"p999_us\":{},\"max_us\":{},\"rate\":{:.0},\"cpu_us\":{}}}",
            self.name,
            self.calls,
            number(at(0.0)),
            number(at(0.5)),
            number(at(0.99)),
            number(at(0.999)),
            number(at(1.0)),
            self.calls as f64 / seconds,
            number(cpu),
        ));
        Ok(())
    }
}

/// Calls as fast as they go, many at a time, for their rate and what they cost: a fifth of them to
/// warm up, then all of them.
///
/// # Errors
/// The first call's that fails.
pub fn rate(
    name: &str,
    calls: usize,
    mut other: Option<&mut Other>,
    mut run: impl FnMut(usize) -> Fallible<()>,
) -> Fallible<()> {
    run(calls / 5)?;
    let row = Row::begin(name, calls, other.as_deref_mut())?;
    run(calls)?;
    row.end(other)
}

/// Runs this thread, and those that it starts, as SCHED_FIFO. False where that is not allowed.
pub fn real_time() -> bool {
    class::set(Class::Fifo { priority: 50 }).is_ok()
}

/// In the other end: keeps its CPU busy until the row is over.
pub fn burn() {
    ready();
    while !ended() {
        std::hint::spin_loop();
    }
}

/// Calls in a closed loop: a fifth of them to warm up, then all of them timed.
///
/// # Errors
/// The first call's that fails.
pub fn closed_loop(
    name: &str,
    calls: usize,
    mut other: Option<&mut Other>,
    mut call: impl FnMut() -> Fallible<()>,
) -> Fallible<()> {
    for _ in 0..calls / 5 {
        call()?;
    }
    let mut row = Row::begin(name, calls, other.as_deref_mut())?;
    for _ in 0..calls {
        let start = Instant::now();
        call()?;
        row.add(start);
    }
    row.end(other)
}
