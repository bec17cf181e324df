//! A service: registered under a name, called by clients, earliest deadline first.
//!
//! # Threads
//! `workers` threads serve. One more, the control thread, accepts clients, reads their sockets,
//! notices their deaths, and looks after requests while all workers are busy. There is no
//! dispatcher: a free worker takes what all clients have asked into the queue and serves the first
//! request (`worker`). An idle service sleeps, with no timer running.
//!
//! # Failure
//! A client that breaks the protocol is disconnected and counted. When a client dies, its requests
//! leave the queue and its memory is given back. A handler that panics costs its request, which is
//! answered as failed. When the service is dropped, waiting requests are refused and clients see
//! their sockets close. A handler under way is waited for. When the service's process dies, the
//! kernel closes the sockets and each waiting client gets its error.
//!
//! A child that the process forks does not serve: what it drops of the service stays its parent's.
//!
//! # Limits
//! [`Options`]: pending requests, clients, entries and memory per client.

mod connection;
mod control;
mod report;
mod request;
mod worker;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::io::Errno;
use tombolo_ring::rpc::MAX_ENTRIES;
use tombolo_ring::rpc::entry::Refusal;
use tombolo_shm::class::Class;
use tombolo_shm::doorbell::Doorbell;

pub use connection::Caller;
pub use report::{Answers, Report, SlowCall};
pub use request::{Handler, NoReplyMemory, Reply, Request};

use crate::clock;
use crate::folder::{self, FolderError, Listener};
use crate::poll::Polling;
use crate::process;
use crate::schedule::{Late, Order, Rules, Schedule};
use crate::sync::lock;
use report::{Counters, get};
use worker::Core;

/// Largest arena for the replies to one client, who faults all of it in: 64 MiB. Larger replies are
/// in memory of their own.
pub const MAX_REPLY_ARENA_BYTES: u64 = 64 << 20;

/// The shortest budget that `SCHED_DEADLINE` knows (DL_SCALE, sched(7)).
const DEADLINE_BUDGET_MIN: Duration = Duration::from_nanos(1024);

/// In which class workers run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkerClass {
    /// As any thread.
    #[default]
    Normal,
    /// `SCHED_FIFO` with that priority.
    Fifo(u8),
    /// `SCHED_DEADLINE`: the budget in each period.
    Deadline,
}

/// Who may call. The user that the service runs as, and root, always may.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// User IDs that may call.
    pub uids: Vec<u32>,
    /// Groups: of a caller, the one that it runs as and those that it is a member of besides.
    pub gids: Vec<u32>,
    /// Everybody on this machine who can reach the folder.
    pub everybody: bool,
}

impl Access {
    /// `groups` gives those that a caller is a member of besides the one that it runs as; it is
    /// asked only where they decide.
    fn allows(&self, own_uid: u32, caller: Caller, groups: impl FnOnce() -> Vec<u32>) -> bool {
        self.everybody
            || caller.uid == 0
            || caller.uid == own_uid
            || self.uids.contains(&caller.uid)
            || self.gids.contains(&caller.gid)
            || (!self.gids.is_empty() && groups().iter().any(|group| self.gids.contains(group)))
    }

    /// Permissions of the socket: the kernel keeps others out where only the owner may call.
    fn mode(&self) -> u32 {
        if *self == Access::default() { 0o600 } else { 0o666 }
    }
}

/// How a service runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads that run handlers.
    pub workers: u32,
    /// Their class. What is in force is in the report; that it was refused is no failure.
    pub class: WorkerClass,
    /// How long one request takes at most: admission counts with it until services were measured,
    /// and it is the runtime of [`WorkerClass::Deadline`].
    pub budget: Duration,
    /// The period of [`WorkerClass::Deadline`].
    pub period: Duration,
    /// Most requests that wait.
    pub queue_bound: usize,
    /// Who is served first; to compare with, and for callers whose deadlines stand for priorities.
    pub order: Order,
    /// What happens to requests whose deadline has passed before their service began.
    pub late: Late,
    /// Whether what cannot be met is refused at once.
    pub admission: bool,
    /// Whether each user that calls, and each of its clients, has a share of the workers' time, so
    /// that none makes the calls of the others late. Only with [`Order::Edf`].
    pub shares: bool,
    /// Users and groups that may call.
    pub access: Access,
    /// Most clients at a time.
    pub max_clients: usize,
    /// Most clients of one user at a time, so that no user keeps the others out.
    pub max_clients_per_uid: usize,
    /// Most bytes of memory that the clients of one user may have in use together: their sections,
    /// those of their replies, and whole memories that they hand over.
    pub max_bytes_per_uid: u64,
    /// Most requests that the clients of one user may have under way together. It is less than
    /// [`Options::queue_bound`], so that the queue always has room for other users. Each client
    /// counts with the entries that it connected with.
    pub max_entries_per_uid: u64,
    /// Most requests that one client may have under way.
    pub max_entries: u32,
    /// Largest arena that a client may bring for its requests.
    pub max_arena_bytes: u64,
    /// Memory for the replies to one client: 0 or a power of two from 4 KiB to
    /// [`MAX_REPLY_ARENA_BYTES`].
    pub reply_arena_bytes: u64,
    /// Most bytes of whole memories that one client may hand over.
    pub max_shared_bytes: u64,
    /// How long a request waits that says nothing else.
    pub ttl: Duration,
    /// How long a client may hold a reply.
    pub reply_ttl: Duration,
    /// Calls that take longer, waiting and service together, are in the report; so are those that
    /// waited for longer and were not served.
    pub slow: Duration,
    /// Whether and how long idle workers poll before they sleep.
    pub polling: Polling,
    /// The folder of the socket; the user's own where there is none.
    pub folder: Option<PathBuf>,
    /// The machines that calls are passed on to, for the report; empty: they are served here.
    pub machines: Vec<String>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            workers: 1,
            class: WorkerClass::Normal,
            budget: Duration::from_millis(1),
            period: Duration::from_millis(10),
            queue_bound: 16384,
            order: Order::Edf,
            late: Late::Refuse,
            admission: false,
            shares: true,
            access: Access::default(),
            max_clients: 256,
            max_clients_per_uid: 128,
            max_bytes_per_uid: 16 << 30,
            max_entries_per_uid: 8192,
            max_entries: 1024,
            max_arena_bytes: 64 << 20,
            reply_arena_bytes: 1 << 20,
            max_shared_bytes: 4 << 30,
            ttl: Duration::from_secs(60),
            reply_ttl: Duration::from_secs(60),
            slow: Duration::from_millis(10),
            polling: Polling::Adaptive,
            folder: None,
            machines: Vec::new(),
        }
    }
}

/// Why a service could not be registered.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum RegisterError {
    /// Its name or socket.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// An option that makes no sense.
    #[error("option {option}: {found}, expected {expected}")]
    Option {
        option: &'static str,
        found: u64,
        /// What it may be.
        expected: &'static str,
    },
    /// The system refused a thread or a descriptor.
    #[error("{what}: {source}")]
    System { what: &'static str, source: std::io::Error },
}

impl Options {
    fn check(&self) -> Result<(), RegisterError> {
        let wrong = |option, found, expected| Err(RegisterError::Option { option, found, expected });
        if self.workers == 0 || self.workers > 256 {
            return wrong("workers", self.workers.into(), "1 to 256");
        }
        if self.max_entries == 0 || self.max_entries > MAX_ENTRIES {
            return wrong("max_entries", self.max_entries.into(), "1 to 4096");
        }
        let geometry = tombolo_ring::rpc::Geometry::new(1, self.reply_arena_bytes);
        if geometry.is_none() || self.reply_arena_bytes > MAX_REPLY_ARENA_BYTES {
            return wrong("reply_arena_bytes", self.reply_arena_bytes, "0 or a power of two from 4096 to 67108864");
        }
        if self.queue_bound == 0 || self.queue_bound > 1 << 24 {
            return wrong("queue_bound", self.queue_bound as u64, "1 to 16777216");
        }
        match self.class {
            WorkerClass::Fifo(priority) if !(1..=99).contains(&priority) => {
                return wrong("class", priority.into(), "a FIFO priority of 1 to 99");
            }
            WorkerClass::Deadline if self.budget < DEADLINE_BUDGET_MIN || self.budget > self.period => {
                return wrong("budget", clock::ns(self.budget), "for SCHED_DEADLINE, from 1024 ns to the period");
            }
            _ => {}
        }
        Ok(())
    }

    fn rules(&self) -> Rules {
        Rules {
            pending: self.queue_bound,
            order: self.order,
            late: self.late,
            admission: self.admission,
            budget_ns: clock::ns(self.budget),
            shares: self.shares,
            workers: self.workers,
            ttl_ns: clock::ns(self.ttl),
        }
    }

    fn class(&self) -> Class {
        match self.class {
            WorkerClass::Normal => Class::Normal,
            WorkerClass::Fifo(priority) => Class::Fifo { priority },
            WorkerClass::Deadline => {
                let period_ns = clock::ns(self.period);
                Class::Deadline { runtime_ns: clock::ns(self.budget), deadline_ns: period_ns, period_ns }
            }
        }
    }
}

/// What all threads of a service share.
struct Engine {
    name: String,
    options: Options,
    handler: Box<dyn Handler>,
    core: Mutex<Core>,
    /// Where idle workers sleep: all clients' doorbells, and `nudge`.
    doorbells: std::os::fd::OwnedFd,
    /// Wakes one idle worker.
    nudge: Doorbell,
    /// Workers that sleep.
    idle: AtomicU32,
    /// A worker polls: one is enough.
    polling: AtomicBool,
    stopping: AtomicBool,
    /// The workers have ended.
    ended: AtomicBool,
    /// Wakes the control thread.
    control: Doorbell,
    /// The control thread sleeps without a time limit.
    control_rests: AtomicBool,
    counters: Counters,
    classes: Mutex<Vec<String>>,
    began: Instant,
}

impl Engine {
    /// `whole` is with what is behind locks; in a forked child another thread of its parent's may
    /// have held them.
    fn report(&self, whole: bool) -> Report {
        let (pending, clients) = match whole.then(|| lock(&self.core)) {
            Some(core) => (core.pending() as u64, core.clients() as u64),
            None => (0, 0),
        };
        let counters = &self.counters;
        Report {
            name: self.name.clone(),
            pid: std::process::id(),
            machines: self.options.machines.clone(),
            uptime_s: self.began.elapsed().as_secs_f64(),
            workers: if whole { lock(&self.classes).clone() } else { Vec::new() },
            budget_ns: clock::ns(self.options.budget),
            queue_bound: self.options.queue_bound as u64,
            late_policy: self.options.late,
            admission: self.options.admission,
            clients,
            broken_clients: get(&counters.broken_clients),
            broken_by: counters.broken_by(),
            refused_connections: get(&counters.refused_connections),
            pending,
            answers: counters.answers(),
            reclaimed_replies: get(&counters.reclaimed),
            sleeps: counters.sleeps(),
            polls_gained: counters.polls_gained(),
            queued: counters.queued(),
            service: counters.service(),
            slow_ns: clock::ns(self.options.slow),
            slow: get(&counters.slow),
            slow_calls: if whole { counters.slow_calls() } else { Vec::new() },
        }
    }
}

/// A service that runs until it is dropped.
pub struct Service {
    engine: Arc<Engine>,
    threads: Vec<JoinHandle<()>>,
    control: Option<JoinHandle<()>>,
    /// Whose threads these are.
    process: u32,
}

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Service").field("name", &self.engine.name).finish_non_exhaustive()
    }
}

impl Service {
    /// Registers a service and starts to serve.
    ///
    /// # Errors
    /// [`RegisterError`]: the name is taken or no name, an option makes no sense, or the system refuses.
    pub fn register(name: &str, options: Options, handler: impl Handler) -> Result<Service, RegisterError> {
        options.check()?;
        let folder = options.folder.clone().map_or_else(folder::services, Ok)?;
        let listener = Listener::bind(&folder, name, options.access.mode())?;
        let system = |what| move |source: Errno| RegisterError::System { what, source: source.into() };
        let doorbells = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("epoll"))?;
        let nudge = Doorbell::new().map_err(system("eventfd"))?;
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&doorbells, &nudge, epoll::EventData::new_u64(worker::NUDGE), edge).map_err(system("epoll"))?;
        let workers = options.workers as usize;
        let engine = Arc::new(Engine {
            name: name.into(),
            core: Mutex::new(Core::new(Schedule::new(options.rules()))),
            handler: Box::new(handler),
            doorbells,
            nudge,
            idle: AtomicU32::new(0),
            polling: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            control: Doorbell::new().map_err(system("eventfd"))?,
            control_rests: AtomicBool::new(false),
            counters: Counters::new(workers),
            classes: Mutex::new(vec!["starting".into(); workers]),
            began: Instant::now(),
            options,
        });
        let mut service =
            Service { engine: engine.clone(), threads: Vec::new(), control: None, process: process::here() };
        let spawn = |name: String, run: Box<dyn FnOnce() + Send>| {
            let spawned = std::thread::Builder::new().name(name).spawn(run);
            spawned.map_err(|source| RegisterError::System { what: "starting a thread", source })
        };
        for n in 0..workers {
            let engine = engine.clone();
            service.threads.push(spawn(format!("{name}-{n}"), Box::new(move || engine.work(n)))?);
        }
        let control = control::Control::new(engine, listener).map_err(system("epoll"))?;
        service.control = Some(spawn(format!("{name}-control"), Box::new(move || control.run()))?);
        Ok(service)
    }

    /// What it tells of itself. In a forked child, whose service it is not: what had been counted
    /// by then.
    pub fn report(&self) -> Report {
        self.engine.report(self.is_ours())
    }

    /// Whether this process registered it; a forked child did not, and its threads are not there.
    pub fn is_ours(&self) -> bool {
        self.process == process::here()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if !self.is_ours() {
            // In a forked child the service is its parent's: no thread of it is here, and its
            // clients are not to be answered.
            self.threads.drain(..).chain(self.control.take()).for_each(std::mem::forget);
            return;
        }
        // The doorbells order it.
        self.engine.stopping.store(true, Ordering::SeqCst);
        self.engine.nudge.ring();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.engine.refuse_all(&mut lock(&self.engine.core), Refusal::Stopping);
        self.engine.ended.store(true, Ordering::SeqCst);
        self.engine.control.ring();
        if let Some(control) = self.control.take() {
            let _ = control.join();
        }
    }
}
