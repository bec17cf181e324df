//! Measures calls beside the floor that the kernel sets: a futex and a Unix socket, each between
//! two processes.
//!
//! usage: rpc_bench [--calls N] [--only ROW]
//!
//! Runs every row once, one after the other, and prints one JSON object for each (`tombolo_bench`).
//! A row starts a process for the other end (this program again), pins both, and calls in a closed
//! loop. The lab (`./x bench rpc`) runs each row in turn with those of the peers and prints the
//! medians.
//!
//! Both ends sleep at once in the rows named "blocking" and "asleep", as real callers that come
//! seldom do; "polled" never sleeps, those named "adaptive", "outstanding_16" and "loaded" are what
//! a program gets that does not choose how to wait. "order" is one request in and one out while ten
//! thousand wait, without any process: all of what a service decides, with admission and without,
//! beside the same done by the standard library's heap and tree. "futex_16" is sixteen under way,
//! asleep, of indices and wake-ups alone: what the machine leaves of "outstanding_16_asleep".

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tombolo_bench::{Fallible, Other, Row, closed_loop, option, other_end, pin, ready, until_ended};
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::INLINE_BYTES;
use tombolo_ring::rpc::wake::{self, Told, Waker, Word};
use tombolo_rpc::client::{CallOptions, Client, ConnectOptions};
use tombolo_rpc::poll::Polling;
use tombolo_rpc::provider::{Options, Reply, Request, Service, WorkerClass};
use tombolo_rpc::schedule::{Late, Next, Order, Rules, Schedule};
use tombolo_rpc::shared::SharedBuffer;
use tombolo_shm::class::{self, Class};
use tombolo_shm::foreign::ForeignFd;
use tombolo_shm::memory::Mapping;
use tombolo_shm::{futex, passing, section};

const SHARED_BYTES: u64 = 1 << 30;
const PENDING: u64 = 10_000;
/// The priority of the loaded rows' threads.
const FIFO: u8 = 50;

fn serve(request: &Request<'_>, reply: &mut Reply<'_>) {
    match request.len() {
        // Large requests in shared memory are answered with one word of their payload: no byte is
        // moved.
        len if len as u64 == SHARED_BYTES => {
            let word = request.payload().read_array::<8>(0).unwrap_or_default();
            let _ = reply.write(&word);
        }
        len if len <= INLINE_BYTES => {
            let mut bytes = [0; INLINE_BYTES];
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

fn other(args: &[String]) -> Fallible<()> {
    let [what, cpu, dir] = args else { return Err("expected: WHAT CPU FOLDER".into()) };
    let dir = Path::new(dir);
    pin(cpu.parse()?);
    match &what[..] {
        "hog" => {
            ready();
            loop {
                std::hint::spin_loop();
            }
        }
        "futex" | "spin" => {
            let spins = what == "spin";
            let (own, peer) = share(&UnixStream::connect(dir.join("socket"))?)?;
            let view = own.view_mut().ok_or("not writable")?;
            ready();
            for n in 1u32.. {
                until(peer.view(), n, spins);
                view.store_u32(0, n, Ordering::Release);
                if !spins {
                    futex::wake(own.view(), 0);
                }
            }
        }
        "index" => {
            let socket = UnixStream::connect(dir.join("socket"))?;
            let mut indices = Indices::share(&socket)?;
            ready();
            loop {
                for _ in 0..indices.take()? {
                    indices.send()?;
                }
            }
        }
        "unix" => {
            let mut socket = UnixStream::connect(dir.join("socket"))?;
            ready();
            let mut bytes = [0; 64];
            while socket.read_exact(&mut bytes).is_ok() {
                socket.write_all(&bytes)?;
            }
        }
        what => {
            let (how, class) = match what.strip_suffix("_fifo") {
                Some(how) => (how, WorkerClass::Fifo(FIFO)),
                None => (what, WorkerClass::Normal),
            };
            let options = Options { folder: Some(dir.into()), polling: polling(how), class, ..Options::default() };
            let _service = Service::register("bench", options, serve)?;
            ready();
            until_ended();
        }
    }
    Ok(())
}

fn start(what: &str, cpu: usize, dir: &Path) -> Fallible<Other> {
    Other::start(&[what, &cpu.to_string(), dir.to_str().ok_or("the folder's name is not UTF-8")?])
}

fn receive_fd(socket: &UnixStream) -> Fallible<std::os::fd::OwnedFd> {
    passing::receive(socket, &mut [0; 8], true)?
        .fds
        .pop()
        .map(ForeignFd::keep)
        .ok_or_else(|| "no descriptor came".into())
}

fn client(dir: &Path, what: &str) -> Fallible<Client> {
    let options = ConnectOptions { folder: Some(dir.into()), polling: polling(what), ..ConnectOptions::default() };
    Ok(Client::connect_with("bench", &options)?)
}

fn call_row(name: &str, what: &str, cpus: (usize, usize), bytes: usize, calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(cpus.0);
    let mut other = start(what, cpus.1, dir.path())?;
    let client = client(dir.path(), what)?;
    let options = CallOptions::default();
    let payload = vec![7; bytes];
    let mut into = vec![0; bytes];
    closed_loop(name, calls, Some(&mut other), || {
        let reply = client.call(&payload, &options)?;
        reply.copy_to(&mut into)?;
        Ok(())
    })
}

fn shared_row(calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(0);
    let mut other = start("blocking", 1, dir.path())?;
    let client = client(dir.path(), "blocking")?;
    let buffer = SharedBuffer::new(SHARED_BYTES, false)?;
    let mut n = 0u64;
    closed_loop("shared_1gib", calls, Some(&mut other), || {
        n += 1;
        buffer.view().write_array(0, n.to_le_bytes());
        let reply = client.call_shared(&buffer, 0, SHARED_BYTES, &CallOptions::default())?;
        if reply.view().read_array(0) != Some(n.to_le_bytes()) { Err("another answer".into()) } else { Ok(()) }
    })
}

/// 16 calls under way from one thread; both wait as `what` says when there is nothing to do.
fn outstanding_row(name: &str, what: &str, calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(0);
    let mut other = start(what, 1, dir.path())?;
    let client = client(dir.path(), what)?;
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
    let row = Row::begin(name, calls, Some(&mut other))?;
    run(calls)?;
    row.end(Some(&mut other))
}

/// A busy loop on each CPU. With `fifo` worker and caller run as SCHED_FIFO where that is allowed,
/// else the row says that it is without.
fn loaded_row(name: &str, what: &str, fifo: bool, calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    let _hogs = [start("hog", 0, dir.path())?, start("hog", 1, dir.path())?];
    let provider = if fifo { format!("{what}_fifo") } else { what.into() };
    let mut other = start(&provider, 1, dir.path())?;
    // A thread of its own, which takes its class with it.
    let (folder, of_row) = (dir.path(), &mut other);
    let measured = std::thread::scope(|scope| {
        let mut row = move || -> Fallible<()> {
            pin(0);
            let refused = fifo && class::set(Class::Fifo { priority: FIFO }).is_err();
            let name = if refused { format!("{name}_without_rights") } else { name.into() };
            let client = client(folder, what)?;
            closed_loop(&name, calls, Some(&mut *of_row), || {
                client.call(&[7; 64], &CallOptions::default())?;
                Ok(())
            })
        };
        scope.spawn(move || row().map_err(|e| e.to_string())).join()
    });
    Ok(measured.map_err(|_| "the caller panicked")??)
}

/// Waits until the other end has written a number: asleep, or looking all the time.
fn until(word: Foreign<'_>, n: u32, spins: bool) {
    while word.load_u32(0, Ordering::Acquire) != Some(n) {
        if spins {
            std::hint::spin_loop();
        } else {
            futex::wait(word, 0, n - 1, Duration::from_secs(1));
        }
    }
}

/// One word in each direction: "futex", or "spin" without the kernel, which is the round trip of a
/// cache line.
fn word_row(name: &str, what: &str, cpus: (usize, usize), calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(cpus.0);
    let spins = what == "spin";
    let ((own, peer), mut other) = connected(what, cpus.1, dir.path(), share)?;
    let view = own.view_mut().ok_or("not writable")?;
    let mut n = 0u32;
    closed_loop(name, calls, Some(&mut other), || {
        n += 1;
        view.store_u32(0, n, Ordering::Release);
        if !spins {
            futex::wake(own.view(), 0);
        }
        until(peer.view(), n, spins);
        Ok(())
    })
}

/// Memory of our side, and of the other end, which does the same.
fn share(socket: &UnixStream) -> Fallible<(Mapping, Mapping)> {
    let (fd, own) = section::make("bench", 4096, true)?;
    passing::send(socket, b"x", &[fd.as_fd()], true)?;
    Ok((own, section::adopt(receive_fd(socket)?, 4096, true)?))
}

/// A word of our side that the other end sees.
struct OwnWord<'m>(ForeignMut<'m>, usize);
/// A word of the other end's side.
struct PeerWord<'m>(Foreign<'m>, usize);

impl Word for OwnWord<'_> {
    fn load(&self, order: Ordering) -> u32 {
        self.0.as_foreign().load_u32(self.1, order).unwrap_or(0)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.0.store_u32(self.1, value, order);
    }
}

impl Word for PeerWord<'_> {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load_u32(self.1, order).unwrap_or(0)
    }
    fn store(&self, _: u32, _: Ordering) {}
}

/// Calls without anything but their wake-ups: an index each way, and the word that says who sleeps.
/// What is left when a call has no payload, no order, no time and no owner.
struct Indices {
    own: Mapping,
    peer: Mapping,
    sent: u32,
    seen: u32,
    waker: Waker,
    told: Told,
}

impl Indices {
    const INDEX: usize = 0;
    const WAKE: usize = 128;

    fn share(socket: &UnixStream) -> Fallible<Indices> {
        let (own, peer) = share(socket)?;
        Ok(Indices { own, peer, sent: 0, seen: 0, waker: Waker::default(), told: Told::default() })
    }

    fn send(&mut self) -> Fallible<()> {
        self.sent = self.sent.wrapping_add(1);
        let own = self.own.view_mut().ok_or("not writable")?;
        wake::publish(&OwnWord(own, Self::INDEX), self.sent);
        if self.waker.wanted(&PeerWord(self.peer.view(), Self::WAKE), self.sent) {
            futex::wake(self.own.view(), Self::INDEX);
        }
        Ok(())
    }

    /// How many have come since the last time; sleeps at once while there are none.
    fn take(&mut self) -> Fallible<u32> {
        let own = OwnWord(self.own.view_mut().ok_or("not writable")?, Self::WAKE);
        let index = PeerWord(self.peer.view(), Self::INDEX);
        loop {
            let come = wake::available(&index).wrapping_sub(self.seen);
            if come > 0 {
                self.seen = self.seen.wrapping_add(come);
                self.told.took_some(&own, self.seen, 16);
                return Ok(come);
            }
            if self.told.arm(&own, self.seen, &index) == self.seen {
                futex::wait(self.peer.view(), Self::INDEX, self.seen, Duration::from_secs(1));
            }
        }
    }
}

/// As `outstanding_row`, of indices alone.
fn index_row(name: &str, calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(0);
    let (mut indices, mut other) = connected("index", 1, dir.path(), Indices::share)?;
    let mut run = |calls: usize| -> Fallible<()> {
        let (mut sent, mut taken) = (0, 0);
        while taken < calls {
            while sent < calls && sent - taken < 16 {
                indices.send()?;
                sent += 1;
            }
            taken += indices.take()? as usize;
        }
        Ok(())
    };
    run(calls / 5)?;
    let row = Row::begin(name, calls, Some(&mut other))?;
    run(calls)?;
    row.end(Some(&mut other))
}

fn unix_row(name: &str, cpus: (usize, usize), calls: usize) -> Fallible<()> {
    let dir = tempfile::tempdir()?;
    pin(cpus.0);
    let (mut socket, mut other) = connected("unix", cpus.1, dir.path(), |socket| Ok(socket.try_clone()?))?;
    let mut bytes = [7; 64];
    closed_loop(name, calls, Some(&mut other), || {
        socket.write_all(&bytes)?;
        socket.read_exact(&mut bytes)?;
        Ok(())
    })
}

/// Starts an end that connects to our socket, and does with that what the two begin with.
fn connected<T>(
    what: &str,
    cpu: usize,
    dir: &Path,
    begin: impl FnOnce(&UnixStream) -> Fallible<T>,
) -> Fallible<(T, Other)> {
    let listener = UnixListener::bind(dir.join("socket"))?;
    std::thread::scope(|scope| {
        let starts = scope.spawn(|| start(what, cpu, dir).map_err(|e| e.to_string()));
        let begun = begin(&listener.accept()?.0)?;
        Ok((begun, starts.join().map_err(|_| "the starter panicked")??))
    })
}

/// Clients whose requests these are: one has 1024 under way at most.
const CLIENTS: u64 = 16;

/// A deadline somewhere in the span of those that wait, which moves on with the requests that are
/// taken; far enough that none is late.
fn deadline(n: u64) -> u64 {
    1_000_000_000 + n * 1000 + (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) % (2 * PENDING * 1000)
}

/// What one request in and one out cost while so many wait.
fn order_row<Q>(name: &str, calls: usize, queue: &mut Q, put: impl Fn(&mut Q, u64), take: impl Fn(&mut Q)) {
    (0..PENDING).for_each(|n| put(queue, n));
    let mut times = Vec::new();
    // By the hundred: the clock would be most of what is measured.
    let rounds = (calls as u64 / 100).max(1);
    for round in 0..rounds {
        let begun = Instant::now();
        for n in 0..100 {
            put(queue, PENDING + round * 100 + n);
            take(queue);
        }
        times.push(begun.elapsed().as_secs_f64() * 1e4);
    }
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times[((times.len() as f64 * part) as usize).min(times.len() - 1)];
    println!("{{\"row\":\"{name}\",\"calls\":{},\"p50_us\":{:.4},\"p99_us\":{:.4}}}", 100 * rounds, at(0.5), at(0.99));
}

fn order_rows(calls: usize) -> Fallible<()> {
    for (name, admission, shares) in [
        ("order_10k", true, true),
        ("order_10k_without_admission", false, true),
        ("order_10k_without_shares", true, false),
        ("order_10k_without_both", false, false),
    ] {
        let rules = Rules {
            pending: 20_000,
            order: Order::Edf,
            late: Late::Refuse,
            admission,
            budget_ns: 1,
            shares,
            workers: 1,
            ttl_ns: u64::MAX,
        };
        let mut schedule = Schedule::new(rules);
        let put = |schedule: &mut Schedule<[u64; 3]>, n| {
            let _ = schedule.offer(0, (n % CLIENTS) as u32, deadline(n), 0, [n; 3]);
        };
        let take = |schedule: &mut Schedule<[u64; 3]>| {
            if let Some(Next::Serve { item: [n, ..], .. }) = schedule.next(0) {
                schedule.done((n % CLIENTS) as u32, 0, None);
            }
        };
        order_row(name, calls, &mut schedule, put, take);
        if schedule.pending() as u64 != PENDING {
            return Err(format!("{} wait, expected {PENDING}: some were refused", schedule.pending()).into());
        }
    }
    // What they order by, and as much to carry.
    type Heap = BinaryHeap<Reverse<(u64, u64, [u64; 3])>>;
    let push = |heap: &mut Heap, n| heap.push(Reverse((deadline(n), n, [n; 3])));
    let pop = |heap: &mut Heap| _ = black_box(heap.pop());
    order_row("order_10k_binary_heap", calls, &mut Heap::new(), push, pop);
    type Tree = BTreeMap<(u64, u64), [u64; 3]>;
    let insert = |tree: &mut Tree, n| _ = tree.insert((deadline(n), n), [n; 3]);
    let pop = |tree: &mut Tree| _ = black_box(tree.pop_first());
    order_row("order_10k_btree_map", calls, &mut Tree::new(), insert, pop);
    Ok(())
}

fn main() -> Fallible<()> {
    if let Some(args) = other_end() {
        return other(&args);
    }
    let calls = option("--calls", 20_000)?;
    let args: Vec<String> = std::env::args().collect();
    let only = args.iter().position(|a| a == "--only").and_then(|at| args.get(at + 1));
    type Run = Box<dyn Fn(&str) -> Fallible<()>>;
    let call = |what: &'static str, cpus, bytes, calls| -> Run {
        Box::new(move |name| call_row(name, what, cpus, bytes, calls))
    };
    let rows: Vec<(&str, Run)> = vec![
        ("futex_blocking", Box::new(move |name| word_row(name, "futex", (0, 1), calls))),
        ("unix_blocking", Box::new(move |name| unix_row(name, (0, 1), calls))),
        ("blocking", call("blocking", (0, 1), 64, calls)),
        ("futex_one_cpu", Box::new(move |name| word_row(name, "futex", (0, 0), calls))),
        ("unix_one_cpu", Box::new(move |name| unix_row(name, (0, 0), calls))),
        ("blocking_one_cpu", call("blocking", (0, 0), 64, calls)),
        ("adaptive", call("adaptive", (0, 1), 64, 5 * calls)),
        ("adaptive_one_cpu", call("adaptive", (0, 0), 64, calls)),
        ("spin", Box::new(move |name| word_row(name, "spin", (0, 1), 10 * calls))),
        ("polled", call("polled", (0, 1), 64, 10 * calls)),
        ("copy_64k", call("blocking", (0, 1), 64 << 10, calls / 2)),
        ("copy_64k_adaptive", call("adaptive", (0, 1), 64 << 10, calls / 2)),
        ("shared_1gib", Box::new(move |_| shared_row(calls / 2))),
        ("outstanding_16", Box::new(move |name| outstanding_row(name, "adaptive", 20 * calls))),
        ("futex_16", Box::new(move |name| index_row(name, 20 * calls))),
        ("outstanding_16_asleep", Box::new(move |name| outstanding_row(name, "blocking", 20 * calls))),
        ("loaded", Box::new(move |name| loaded_row(name, "adaptive", true, 5 * calls))),
        ("loaded_asleep", Box::new(move |name| loaded_row(name, "blocking", true, calls))),
        ("loaded_normal", Box::new(move |name| loaded_row(name, "adaptive", false, 5 * calls))),
        ("order", Box::new(move |_| order_rows(10 * calls))),
    ];
    for (name, run) in rows.iter().filter(|(name, _)| only.is_none_or(|only| only == name)) {
        run(name)?;
    }
    Ok(())
}
