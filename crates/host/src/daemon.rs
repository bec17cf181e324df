//! The daemon: one fabric with its API, from its start to its end, on the calling thread.
//!
//! It ends after a `down` request, or when SIGINT, SIGTERM or SIGHUP comes. A signal during `down`
//! means that the user is in a hurry: machines that were given two seconds to end are killed at
//! once. A signal that comes before the fabric is up undoes what has been made. Before a handover's
//! "commit" it cancels the handover.
//!
//! Another daemon may take the fabric over (`up --replace`), and SIGUSR2 leaves it to the next one.
//! In both cases this process ends and removes nothing. See [`crate::fabric::handover`].
//! [`Start::leave_on_term`] gives SIGTERM that meaning too: it is all that a container runtime
//! sends.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::process::Signal as Number;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Mutex, oneshot};

use crate::api::report::Status;
use crate::api::server::{Server, ServerError};
use crate::api::{Refusal, Request, Requests};
use crate::fabric::{self, FabricError, Running, Say, heal};
use crate::{file, notify, process, rundir};

/// Why a daemon did not start, or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The fabric did not come about, or could not be cleared up.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// There is no place for its socket.
    #[error(transparent)]
    RunDir(#[from] rundir::RunDirError),
    /// The API could not be served.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// A signal came before it was up.
    #[error("interrupted before the fabric was up; everything created so far was removed")]
    Interrupted,
    /// A signal came that leaves the fabric to the next daemon, while an earlier one still had it.
    #[error("interrupted while it waited for the fabric's earlier daemon; nothing was changed")]
    Left,
    /// A signal came before the daemon that runs the fabric had handed over.
    #[error("interrupted before it took over; the running daemon continues")]
    CalledOff,
    /// The system refused what every program needs.
    #[error("setting up the daemon: {0}")]
    System(#[from] std::io::Error),
    /// The fabric's task is gone without having been asked to end.
    #[error("the fabric's task ended unexpectedly; `tombolo down` cleans up")]
    Lost,
}

/// How a daemon starts, and ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct Start {
    /// In place of the daemon that runs the fabric.
    pub replace: bool,
    /// SIGTERM leaves machines and containers to the next daemon, as SIGUSR2 does.
    pub leave_on_term: bool,
}

/// The next signal of one kind; none where there is no such kind.
async fn next(signal: &mut Option<Signal>) {
    match signal {
        Some(signal) => {
            signal.recv().await;
        }
        None => std::future::pending().await,
    }
}

/// Signals that take the fabric down.
struct Signals {
    interrupt: Signal,
    hangup: Signal,
    term: Option<Signal>,
}

impl Signals {
    fn new(leave_on_term: bool) -> std::io::Result<Signals> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
            term: if leave_on_term { None } else { Some(signal(SignalKind::terminate())?) },
        })
    }

    async fn came(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.hangup.recv() => {}
            () = next(&mut self.term) => {}
        }
    }
}

/// Signals that leave the fabric to the next daemon.
struct Leaving {
    user: Signal,
    term: Option<Signal>,
}

impl Leaving {
    fn new(leave_on_term: bool) -> std::io::Result<Leaving> {
        let term = if leave_on_term { Some(signal(SignalKind::terminate())?) } else { None };
        Ok(Leaving { user: signal(SignalKind::user_defined2())?, term })
    }

    async fn came(&mut self) {
        tokio::select! {
            _ = self.user.recv() => {}
            () = next(&mut self.term) => {}
        }
    }

    /// Ends once a signal has come while the fabric was another daemon's. One that comes later
    /// waits in `is_asked`: what has been begun is brought to its end before it is left.
    async fn came_early(&mut self, owns: &AtomicBool, is_asked: &mut bool) {
        self.came().await;
        *is_asked = true;
        if owns.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    }
}

/// How often, and how many times, a daemon that was told to leave tries to. While an apply changes
/// the fabric it waits for the end of that, which does not count.
const LEAVES_AGAIN: Duration = Duration::from_secs(1);
const LEAVE_TRIES: u32 = 30;

/// Runs a fabric to its end. `ready` is called once it is up and answers, with its report and the
/// time that took.
///
/// # Errors
/// Why it could not start; then nothing is left.
pub fn run(
    spec: file::Fabric,
    path: &Path,
    say: Say,
    start: Start,
    ready: impl FnOnce(&Status, Duration),
) -> Result<(), DaemonError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(live(spec, path, say, start, ready));
    // A thread that waits for a process of no interest any more does not hold up the end.
    runtime.shutdown_timeout(Duration::from_millis(100));
    done
}

async fn live(
    spec: file::Fabric,
    path: &Path,
    say: Say,
    Start { replace, leave_on_term }: Start,
    ready: impl FnOnce(&Status, Duration),
) -> Result<(), DaemonError> {
    let begun = Instant::now();
    let name = spec.name.clone();
    let folder = rundir::runtime_root()?.join(&name);
    let mut signals = Signals::new(leave_on_term)?;
    let mut leave = Leaving::new(leave_on_term)?;
    let owns: Arc<AtomicBool> = Arc::default();
    let mut leaves_at_once = false;
    let started = tokio::select! {
        started = Running::start(spec, path, say.clone(), replace, &owns) => Some(started?),
        () = signals.came() => None,
        () = leave.came_early(&owns, &mut leaves_at_once) => {
            return Err(if replace { DaemonError::CalledOff } else { DaemonError::Left });
        }
    };
    let Some(shared) = started else {
        // While another daemon was waited for nothing had been made.
        if owns.load(Ordering::Relaxed) {
            fabric::clean_up(&name, say).await?;
        } else if replace {
            return Err(DaemonError::CalledOff);
        }
        return Err(DaemonError::Interrupted);
    };
    let server = match Server::bind(&folder.join("api.sock")) {
        Ok(server) => server,
        Err(error) => return Err(shared.fail(FabricError::State(error.to_string())).await.into()),
    };
    let me = Arc::downgrade(&shared.running);
    let watchdog_me = me.clone();
    let (requests, mut end) = fabric::drive(shared);
    let (ended, server_end) = oneshot::channel::<()>();
    let serving = tokio::spawn(heal::keep(me, server, folder.clone(), requests.clone(), server_end));
    let leaving = tokio::spawn({
        let (requests, say) = (requests.clone(), say.clone());
        async move {
            loop {
                if !std::mem::take(&mut leaves_at_once) {
                    leave.came().await;
                }
                if leave_when_possible(&requests, &say).await.is_none() {
                    return;
                }
            }
        }
    });
    let status = ask_status(&requests).await.ok_or(DaemonError::Lost)?;
    ready(&status, begun.elapsed());
    let watched = tokio::spawn(feed_watchdog(watchdog_me));
    tokio::select! {
        _ = &mut end => {}
        () = signals.came() => {
            say("received a signal: taking the fabric down");
            let (reply, _answer) = oneshot::channel();
            // An error means that it is going down already.
            let _ = requests.send(Request::Down(reply)).await;
            tokio::select! {
                _ = &mut end => {}
                () = signals.came() => {
                    say("received another signal: killing the machines that have not ended yet");
                    for (_, machine, _) in process::machines(&name, &folder) {
                        let _ = machine.signal(Number::KILL);
                    }
                    let _ = end.await;
                }
            }
        }
    }
    leaving.abort();
    drop((ended, requests));
    serving.await.map_err(|_| DaemonError::Lost)?;
    watched.abort();
    Ok(())
}

/// Leaves the fabric to the next daemon, which ends this process. Returns if that cannot be; `None`
/// where the fabric is gone.
async fn leave_when_possible(requests: &Requests, say: &Say) -> Option<()> {
    let mut tries = LEAVE_TRIES;
    let mut said = String::new();
    while tries > 0 {
        let (reply, answer) = oneshot::channel();
        requests.send(Request::Leave(reply)).await.ok()?;
        let refusal = answer.await.ok()?.err()?;
        let is_busy = matches!(refusal, Refusal::Busy(_));
        tries -= u32::from(!is_busy);
        let why = refusal.to_string();
        if said != why {
            match is_busy {
                true => say(&format!("the guests are left to the next daemon later: {why}")),
                false => say(&format!("cannot leave the guests to the next daemon: {why}; this is tried for 30 s")),
            }
            said = why;
        }
        tokio::time::sleep(LEAVES_AGAIN).await;
    }
    say("the guests could not be left to the next daemon; this one continues");
    Some(())
}

/// Tells the service manager, as often as it asks for, that the daemon works. A control plane that
/// hangs says nothing; nor does one with a worker that does not answer, since it waits for that
/// answer.
async fn feed_watchdog(running: Weak<Mutex<Running>>) {
    let Some(period) = notify::watchdog_period() else { return };
    // systemd's advice: twice per period.
    let mut turn = tokio::time::interval(period / 2);
    loop {
        turn.tick().await;
        let Some(running) = running.upgrade() else { return };
        // A fabric that starts or ends a machine at the moment is asked next time.
        if running.try_lock().is_ok_and(|running| !running.workers_answer()) {
            return;
        }
        notify::works();
    }
}

async fn ask_status(requests: &Requests) -> Option<Status> {
    let (reply, answer) = oneshot::channel();
    requests.send(Request::Status(reply)).await.ok()?;
    answer.await.ok()?.ok()
}

/// How long a daemon that was asked to end by a signal may take: guests with disks have 15 s.
const ENDS: Duration = Duration::from_secs(30);
/// How often it is said that it is waited for.
const PROGRESS: Duration = Duration::from_secs(2);

/// Ends a daemon that does not answer, found by the lock that it holds wherever that file is by
/// now: by SIGTERM, which takes the fabric down in order or leaves it, and by SIGKILL if it does
/// not end. Then clears up.
///
/// # Errors
/// If there is no such daemon, or the system refuses.
pub fn end(fabric: &str, say: &Say) -> Result<(), DaemonError> {
    let folder = rundir::runtime_root()?.join(fabric);
    let found = rundir::daemon_of(&folder).and_then(process::Process::open);
    // Looked up again while it is held, so that it is no other process of that number.
    if let Some(daemon) = found.filter(|d| rundir::daemon_of(&folder) == Some(d.pid)) {
        say(&format!("the daemon (process {}) does not answer: ending it with a signal", daemon.pid));
        daemon.signal(Number::TERM)?;
        // One that was stopped cannot hear the other.
        daemon.signal(Number::CONT)?;
        let begun = Instant::now();
        while !daemon.wait(PROGRESS) && begun.elapsed() < ENDS {
            say(&format!("{}for process {}: {} s so far", rundir::WAITING, daemon.pid, begun.elapsed().as_secs()));
        }
        if daemon.is_running() {
            say(&format!("process {} did not end within {} s: it is killed", daemon.pid, ENDS.as_secs()));
            daemon.signal(Number::KILL)?;
        }
    }
    clean_up(fabric, say.clone()).map(|_| ())
}

/// Clears up what a killed daemon of this fabric left. Returns what was done, a sentence each;
/// `None` if nothing was left.
///
/// # Errors
/// If its daemon runs, or the system refuses.
pub fn clean_up(fabric: &str, say: Say) -> Result<Option<Vec<String>>, DaemonError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(fabric::clean_up(fabric, say))?)
}
