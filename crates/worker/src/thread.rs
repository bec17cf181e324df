//! A switch worker on a thread of its own: reactor, poll loop, name and affinity.
//!
//! The thread ends when [`WorkerThread::stop`] is called or when the last [`WorkerHandle`] is
//! dropped. Its ports are dropped there. A port is made in three steps:
//!
//! ```text
//! let reserved = thread.handle().reserve()?;
//! let port = SomePort::new(thread.registration(&reserved), …)?;
//! thread.handle().add_port(reserved, network, "name", Box::new(port), settings)?;
//! ```

use crate::reactor::{Reactor, Registrar, Registration};
use rustix::io::Errno;
use rustix::thread::{CpuSet, Pid};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;
use tombolo_switch::control::{ControlError, Reserved, WorkerHandle, WorkerSettings};
use tombolo_switch::wait::CONTROL;
use tombolo_switch::worker::Worker;

/// What a worker's thread is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerConfig {
    /// The thread's name; Linux shows its first 15 bytes.
    pub name: String,
    /// CPUs that it may run on; empty for those of the process.
    pub cpus: Vec<usize>,
    /// Settings of the loop.
    pub settings: WorkerSettings,
}

/// Why a worker could not be started, or how it ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum WorkerError {
    /// A CPU number beyond what the kernel's set holds.
    #[error("worker {name}: CPU {cpu} was asked for; expected a number below {limit}")]
    BadCpu {
        name: String,
        cpu: usize,
        /// The first number that is too large.
        limit: usize,
    },
    /// The kernel did not let the thread run where it should.
    #[error(
        "worker {name}: the kernel refused to bind it to CPUs {cpus:?}: {errno}; see /sys/devices/system/cpu/online"
    )]
    Affinity {
        name: String,
        cpus: Vec<usize>,
        /// What the kernel said.
        errno: Errno,
    },
    /// No reactor or no thread.
    #[error("worker {name}: could not be started: {detail}; raise the limit on open files or processes")]
    NotStarted {
        name: String,
        /// What the kernel said.
        detail: String,
    },
    /// The loop panicked.
    #[error("worker {name} ended by a panic: {detail}; this is a defect of tombolo, its ports are gone")]
    Panicked { name: String, detail: String },
}

/// A started worker: its thread, and the handle that controls it.
pub struct WorkerThread {
    name: String,
    handle: WorkerHandle,
    registrar: Registrar,
    thread: JoinHandle<()>,
    pid: Pid,
}

impl WorkerThread {
    /// Starts a worker.
    ///
    /// # Errors
    /// [`WorkerError::BadCpu`], [`WorkerError::Affinity`], [`WorkerError::NotStarted`]; nothing is
    /// left behind then.
    pub fn start(config: &WorkerConfig) -> Result<WorkerThread, WorkerError> {
        let WorkerConfig { name, cpus, settings } = config.clone();
        if let Some(cpu) = cpus.iter().copied().find(|cpu| *cpu >= CpuSet::MAX_CPU) {
            return Err(WorkerError::BadCpu { name, cpu, limit: CpuSet::MAX_CPU });
        }
        let not_started = |detail: String| WorkerError::NotStarted { name: name.clone(), detail };
        let (tell, told) = mpsc::sync_channel(1);
        let (bind, of_thread) = (cpus.clone(), name.clone());
        let thread = std::thread::Builder::new()
            .name(name.clone())
            .spawn(move || match prepare(&of_thread, bind, settings) {
                Ok((worker, mut reactor, handle)) => {
                    // The caller waits for this, so it cannot fail.
                    let _ = tell.send(Ok((handle, reactor.registrar(), rustix::thread::gettid())));
                    worker.run(&mut reactor);
                }
                Err(error) => {
                    let _ = tell.send(Err(error));
                }
            })
            .map_err(|error| not_started(error.to_string()))?;
        let (handle, registrar, pid) =
            told.recv().map_err(|_| not_started("the thread ended before it began to work".into()))??;
        Ok(WorkerThread { name, handle, registrar, thread, pid })
    }

    /// Adds, changes and removes ports while the thread runs.
    pub fn handle(&self) -> &WorkerHandle {
        &self.handle
    }

    /// The registration of the port that will have the reserved token.
    pub fn registration(&self, reserved: &Reserved) -> Registration {
        self.registrar.registration(reserved.token())
    }

    /// The name given at its start, as `status` shows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The thread's number in /proc.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Time that the thread has spent on a CPU; `None` where the kernel does not tell (no
    /// schedstat).
    pub fn cpu_time(&self) -> Option<Duration> {
        let path = format!("/proc/self/task/{}/schedstat", self.pid.as_raw_nonzero());
        let text = std::fs::read_to_string(path).ok()?;
        text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
    }

    /// Whether the thread has ended, by a panic or because it was stopped elsewhere.
    pub fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Stops the worker and waits for its end; its ports are dropped.
    ///
    /// # Errors
    /// [`WorkerError::Panicked`] where it had ended by a panic.
    pub fn stop(self) -> Result<(), WorkerError> {
        let WorkerThread { name, handle, thread, .. } = self;
        match handle.stop() {
            // Gone: it has ended already, and join says how.
            Ok(()) | Err(ControlError::Gone) => {}
            Err(error) => unreachable!("stop has no other error: {error}"),
        }
        thread.join().map_err(|panic| {
            let text = panic.downcast_ref::<&str>().map(ToString::to_string);
            let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
            WorkerError::Panicked { name, detail: text.unwrap_or_else(|| "no text".into()) }
        })
    }
}

/// What has to happen on the thread itself: its affinity, and its reactor, which stays there.
fn prepare(
    name: &str,
    cpus: Vec<usize>,
    settings: WorkerSettings,
) -> Result<(Worker, Reactor, WorkerHandle), WorkerError> {
    if !cpus.is_empty()
        && let Err(errno) = bind_to(&cpus)
    {
        return Err(WorkerError::Affinity { name: name.into(), cpus, errno });
    }
    let detail = |errno: Errno| WorkerError::NotStarted { name: name.into(), detail: errno.to_string() };
    let reactor = Reactor::new().map_err(detail)?;
    let control = reactor.registrar().registration(CONTROL);
    // The keys of the standard library's hasher come from the kernel's random source.
    let seed = RandomState::new().build_hasher().finish();
    let (worker, handle) = Worker::new(settings, seed, move || control.wake());
    Ok((worker, reactor, handle))
}

fn bind_to(cpus: &[usize]) -> Result<(), Errno> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu);
    }
    rustix::thread::sched_setaffinity(None, &set)
}
