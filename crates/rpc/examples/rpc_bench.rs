//! Measures calls beside the floor that the kernel sets: a futex and a Unix socket, each between two processes.
//!
//! usage: rpc_bench [--repeats N] [--calls N]
//!
//! Each repeat runs every row once, one after the other, so that what is compared is interleaved. A row starts a process for the
//! other end (this program again), pins both, calls in a closed loop, and prints one JSON object: the row's name, its figures, and the
//! CPU time of both processes per call. `bench/rpc.py` runs it and prints the medians.
//!
//! Both ends sleep at once in the rows named "blocking", as real callers that come seldom do; "polled" never sleeps, "adaptive" is
//! what a program gets that chooses nothing.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use tombolo_ring::rpc::entry::BEST_EFFORT;
use tombolo_rpc::client::{CallOptions, Client, ConnectOptions};
use tombolo_rpc::poll::Polling;
use tombolo_rpc::provider::{Options, Reply, Request, Service, WorkerClass};
use tombolo_rpc::schedule::{Late, Next, Rules, Schedule};
use tombolo_rpc::shared::SharedBuffer;
use tombolo_shm::class::{self, Class};
use tombolo_shm::{futex, section};

type Fallible<T> = Result<T, Box<dyn std::error::Error>>;

const SHARED_BYTES: u64 = 1 << 30;

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    // On a machine with one CPU the rows for two mean nothing, and say so by their figures.
    let _ = sched_setaffinity(None, &set);
}

fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The other end of a row.
struct Other {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl Other {
    fn start(what: &str, dir: &Path, cpu: usize, fifo: bool) -> Fallible<Other> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--other", what, &cpu.to_string(), &u8::from(fifo).to_string()])
            .arg(dir)
            .stdout(Stdio::piped())
            .spawn()?;
        let out = BufReader::new(child.stdout.take().ok_or("no output")?);
        let mut other = Other { child, out };
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
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(request: &Request<'_>, reply: &mut Reply<'_>) {
    match request.len() {
        // The CPU time of this process so far.
        3 => drop(reply.write(&cpu_ns().to_le_bytes())),
        // Large requests in shared memory are answered by a word of them: no byte is moved.
        len if len as u64 == SHARED_BYTES => {
            let word = request.payload().read_array::<8>(0).unwrap_or_default();
            let _ = reply.write(&word);
        }
        len if len <= 200 => {
            let mut bytes = [0; 200];
            request.payload().read_into(&mut bytes);
            let _ = reply.write(&bytes[..len]);
        }
        len => {
            if let Ok(to) = reply.loan(len as u64) {
                request.payload().copy_to(to);
            }
        }
    }
}

fn polling(what: &str) -> Polling {
    match what {
        "polled" => Polling::Always,
        "adaptive" => Polling::Adaptive,
        _ => Polling::Never,
    }
}

fn other(what: &str, cpu: usize, fifo: bool, dir: &Path) -> Fallible<()> {
    pin(cpu);
    match what {
        "hog" => loop {
            std::hint::spin_loop();
        },
        "futex" => {
            let (fd, own) = section::make("bench", 4096, true)?;
            let socket = UnixStream::connect(dir.join("futex"))?;
            send_fd(&socket, &fd)?;
            let peer = section::adopt(receive_fd(&socket)?, 4096, true)?;
            println!("ready");
            let view = own.view_mut().ok_or("not writable")?;
            for n in 1u32.. {
                while peer.view().load_u32(0, Ordering::Acquire) != Some(n) {
                    futex::wait(peer.view(), 0, n - 1, Duration::from_secs(1));
                }
                view.store_u32(0, n, Ordering::Release);
                futex::wake(own.view(), 0);
            }
        }
        "unix" => {
            let mut socket = UnixStream::connect(dir.join("unix"))?;
            println!("ready");
            let mut bytes = [0; 64];
            while socket.read_exact(&mut bytes).is_ok() {
                socket.write_all(&bytes)?;
            }
        }
        what => {
            let class = if fifo { WorkerClass::Fifo(50) } else { WorkerClass::Normal };
            let options = Options { folder: Some(dir.into()), polling: polling(what), class, ..Options::default() };
            let _service = Service::register("bench", options, serve)?;
            println!("ready");
            loop {
                std::thread::sleep(Duration::from_secs(60));
            }
        }
    }
    Ok(())
}

fn send_fd(socket: &UnixStream, fd: impl AsFd) -> Fallible<()> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(socket, &[std::io::IoSlice::new(b"x")], &mut control, SendFlags::empty())?;
    Ok(())
}

fn receive_fd(socket: &UnixStream) -> Fallible<std::os::fd::OwnedFd> {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(socket, &mut [std::io::IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control.drain().find_map(|m| match m {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    fds.ok_or_else(|| "no descriptor came".into())
}

/// Times of calls, and what they cost.
struct Row {
    name: &'static str,
    times: Vec<u32>,
    seconds: f64,
    cpu_ns: Option<u64>,
}

impl Row {
    fn print(mut self, calls: usize) {
        self.times.sort_unstable();
        let at = |part: f64| {
            let index = (self.times.len() as f64 * part) as usize;
            self.times.get(index.min(self.times.len().saturating_sub(1))).map_or(0.0, |ns| f64::from(*ns) / 1000.0)
        };
        let cpu = self.cpu_ns.map_or("null".into(), |ns| format!("{:.3}", ns as f64 / 1000.0 / calls as f64));
        println!(
            "{{\"row\":\"{}\",\"calls\":{calls},\"p50_us\":{:.3},\"p99_us\":{:.3},\"p999_us\":{:.3},\"max_us\":{:.3},\"rate\":{:.0},\"cpu_us\":{cpu}}}",
            self.name,
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0),
            calls as f64 / self.seconds,
        );
    }
}

/// Warm-up, then `calls` timed ones.
fn closed_loop(
    name: &'static str,
    calls: usize,
    cpu: impl Fn() -> Option<u64>,
    mut call: impl FnMut() -> Fallible<()>,
) -> Fallible<Row> {
    for _ in 0..calls / 5 {
        call()?;
    }
    let mut times = Vec::with_capacity(calls);
    let (before, begun) = (cpu(), Instant::now());
    for _ in 0..calls {
        let start = Instant::now();
        call()?;
        times.push(start.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
    }
    let seconds = begun.elapsed().as_secs_f64();
    let cpu_ns = before.zip(cpu()).map(|(a, b)| b - a);
    Ok(Row { name, times, seconds, cpu_ns })
}

fn client(dir: &Path, what: &str) -> Fallible<Client> {
    let options = ConnectOptions { folder: Some(dir.into()), polling: polling(what), ..ConnectOptions::default() };
    Ok(Client::connect_with("bench", &options)?)
}

fn both_cpu(client: &Client) -> Option<u64> {
    let reply = client.call(b"cpu", &CallOptions::default()).ok()?;
    Some(cpu_ns() + u64::from_le_bytes(reply.view().read_array(0)?))
}

fn call_row(name: &'static str, what: &str, cpus: (usize, usize), bytes: usize, calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(cpus.0);
    let _other = Other::start(what, dir.path(), cpus.1, false)?;
    let client = client(dir.path(), what)?;
    let options = CallOptions::default();
    let payload = vec![7; bytes];
    let mut into = vec![0; bytes];
    let row = closed_loop(
        name,
        calls,
        || both_cpu(&client),
        || {
            let reply = client.call(&payload, &options)?;
            reply.copy_to(&mut into)?;
            Ok(())
        },
    )?;
    row.print(calls);
    Ok(())
}

fn shared_row(calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(0);
    let _other = Other::start("blocking", dir.path(), 1, false)?;
    let client = client(dir.path(), "blocking")?;
    let buffer = SharedBuffer::new(SHARED_BYTES, false)?;
    let mut n = 0u64;
    let row = closed_loop(
        "shared_1gib",
        calls,
        || both_cpu(&client),
        || {
            n += 1;
            buffer.view().write_array(0, n.to_le_bytes());
            let reply = client.call_shared(&buffer, 0, SHARED_BYTES, &CallOptions::default())?;
            if reply.view().read_array(0) != Some(n.to_le_bytes()) { Err("another answer".into()) } else { Ok(()) }
        },
    )?;
    row.print(calls);
    Ok(())
}

/// 16 calls under way from one thread; both sleep when there is nothing to do.
fn outstanding_row(calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(0);
    let _other = Other::start("blocking", dir.path(), 1, false)?;
    let client = client(dir.path(), "blocking")?;
    let options = CallOptions::default();
    let run = |calls: usize| -> Fallible<()> {
        let mut under_way = std::collections::VecDeque::with_capacity(16);
        for _ in 0..calls {
            if under_way.len() == 16
                && let Some(token) = under_way.pop_front()
            {
                client.wait(token, Duration::from_secs(10))?;
            }
            under_way.push_back(client.submit(&[7; 64], &options)?);
        }
        for token in under_way {
            client.wait(token, Duration::from_secs(10))?;
        }
        Ok(())
    };
    run(calls / 5)?;
    let (before, begun) = (both_cpu(&client), Instant::now());
    run(calls)?;
    let seconds = begun.elapsed().as_secs_f64();
    let cpu_ns = before.zip(both_cpu(&client)).map(|(a, b)| b - a);
    Row { name: "outstanding_16", times: vec![], seconds, cpu_ns }.print(calls);
    Ok(())
}

/// A busy loop on each CPU; workers and caller run as SCHED_FIFO where that is allowed.
fn loaded_row(calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    let hogs = [0, 1].map(|cpu| {
        Command::new(std::env::current_exe()?)
            .args(["--other", "hog", &cpu.to_string(), "0"])
            .arg(dir.path())
            .spawn()
            .map(|child| Hog { child })
    });
    let hogs: Vec<Hog> = hogs.into_iter().collect::<Result<_, std::io::Error>>()?;
    let _other = Other::start("blocking", dir.path(), 1, true)?;
    let row = std::thread::spawn({
        let dir = dir.path().to_path_buf();
        move || {
            pin(0);
            let fifo = class::set(Class::Fifo { priority: 50 }).is_ok();
            let measured = (|| {
                let client = client(&dir, "blocking")?;
                closed_loop(
                    if fifo { "loaded" } else { "loaded_without_rights" },
                    calls,
                    || None,
                    || {
                        client.call(&[7; 64], &CallOptions::default())?;
                        Ok(())
                    },
                )
            })();
            measured.map_err(|e| e.to_string())
        }
    });
    let row = row.join().map_err(|_| "the caller panicked")??;
    drop(hogs);
    row.print(calls);
    Ok(())
}

struct Hog {
    child: Child,
}

impl Drop for Hog {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn futex_row(name: &'static str, cpus: (usize, usize), calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(cpus.0);
    let listener = UnixListener::bind(dir.path().join("futex"))?;
    let dir_path = dir.path().to_path_buf();
    let started =
        std::thread::spawn(move || Other::start("futex", &dir_path, cpus.1, false).map_err(|e| e.to_string()));
    let (socket, _) = listener.accept()?;
    let (fd, own) = section::make("bench", 4096, true)?;
    send_fd(&socket, &fd)?;
    let peer = section::adopt(receive_fd(&socket)?, 4096, true)?;
    let _other = started.join().map_err(|_| "the starter panicked")??;
    let view = own.view_mut().ok_or("not writable")?;
    let mut n = 0u32;
    let row = closed_loop(
        name,
        calls,
        || None,
        || {
            n += 1;
            view.store_u32(0, n, Ordering::Release);
            futex::wake(own.view(), 0);
            while peer.view().load_u32(0, Ordering::Acquire) != Some(n) {
                futex::wait(peer.view(), 0, n - 1, Duration::from_secs(1));
            }
            Ok(())
        },
    )?;
    row.print(calls);
    Ok(())
}

fn unix_row(name: &'static str, cpus: (usize, usize), calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(cpus.0);
    let listener = UnixListener::bind(dir.path().join("unix"))?;
    let dir_path = dir.path().to_path_buf();
    let started = std::thread::spawn(move || Other::start("unix", &dir_path, cpus.1, false).map_err(|e| e.to_string()));
    let (mut socket, _) = listener.accept()?;
    let _other = started.join().map_err(|_| "the starter panicked")??;
    let mut bytes = [7; 64];
    let row = closed_loop(
        name,
        calls,
        || None,
        || {
            socket.write_all(&bytes)?;
            socket.read_exact(&mut bytes)?;
            Ok(())
        },
    )?;
    row.print(calls);
    Ok(())
}

/// What the order costs: one request in and one out, while ten thousand wait.
fn order_row(calls: usize) {
    let rules =
        Rules { pending: 20_000, late: Late::Refuse, admission: true, budget_ns: 1, workers: 1, ttl_ns: u64::MAX };
    let mut schedule = Schedule::new(rules);
    // Deadlines in no order, far enough that none is late: a multiplicative sequence.
    let deadline = |n: u64| 1_000_000_000 + (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 34);
    for n in 0..10_000 {
        let _ = schedule.offer(0, deadline(n), 0, n);
    }
    let _ = schedule.offer(0, BEST_EFFORT, 0, 0);
    let begun = Instant::now();
    for n in 0..calls as u64 {
        let _ = schedule.offer(0, deadline(10_000 + n), 0, n);
        if let Some(Next::Serve { .. }) = schedule.next(0) {
            schedule.done(0);
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    let us = seconds * 1e6 / calls as f64;
    println!("{{\"row\":\"order_10k\",\"calls\":{calls},\"p50_us\":{us:.4},\"pending\":{}}}", schedule.pending());
}

fn main() -> Fallible<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, what, cpu, fifo, dir] = &args[..]
        && flag == "--other"
    {
        return other(what, cpu.parse()?, fifo == "1", Path::new(dir));
    }
    let option = |name: &str, default: usize| -> Fallible<usize> {
        let value = args.iter().position(|a| a == name).and_then(|at| args.get(at + 1));
        Ok(value.map(|v| v.parse()).transpose()?.unwrap_or(default))
    };
    let repeats = option("--repeats", 3)?;
    let calls = option("--calls", 20_000)?;
    for _ in 0..repeats {
        futex_row("futex_blocking", (0, 1), calls)?;
        unix_row("unix_blocking", (0, 1), calls)?;
        call_row("blocking", "blocking", (0, 1), 64, calls)?;
        futex_row("futex_one_cpu", (0, 0), calls)?;
        unix_row("unix_one_cpu", (0, 0), calls)?;
        call_row("blocking_one_cpu", "blocking", (0, 0), 64, calls)?;
        call_row("adaptive", "adaptive", (0, 1), 64, 5 * calls)?;
        call_row("adaptive_one_cpu", "adaptive", (0, 0), 64, calls)?;
        call_row("polled", "polled", (0, 1), 64, 10 * calls)?;
        call_row("copy_64k", "blocking", (0, 1), 64 << 10, calls / 2)?;
        shared_row(calls / 2)?;
        outstanding_row(20 * calls)?;
        loaded_row(calls)?;
        order_row(10 * calls);
    }
    Ok(())
}
