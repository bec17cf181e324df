//! The importing side: connections to the machines that export a service, and the service under
//! whose name clients of this machine call it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tombolo_calls::session::ServeOptions;
use tombolo_calls::{CallError, CallOptions, Deadline};
use tombolo_ring::rpc::entry::Token;
use tombolo_rpc::clock::now_ns;
use tombolo_rpc::provider::{self, Access, Options, Service};

use super::engine::Engine;
use super::keys::Identity;
use super::{HANDSHAKE, MachineError, dial};
use crate::bridge;
use crate::calls::Calls;
use crate::transport::RemoteError;

/// The first pause before a machine is tried again; each is twice as long as the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How long other machines are preferred to one that left a call unanswered, or had it fail.
const SILENCE: Duration = Duration::from_secs(5);
/// How often it is looked whether a name that another service holds is free.
const LOOK: Duration = Duration::from_secs(1);

/// A machine that exports the service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Its name, which its certificate must prove. Without TLS only for messages.
    pub machine: String,
    /// For [`super::Tcp`] `ADDRESS:PORT` or `NAME:PORT`, looked up at each connection.
    pub address: String,
}

/// Which machine a call goes to, if there are several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pick {
    /// The one with the shortest round trip.
    #[default]
    Nearest,
    /// The one with the fewest calls of this import under way.
    LeastLoaded,
    /// The first of the list that was there, until it goes.
    Sticky,
}

/// What is imported.
#[derive(Clone, Debug)]
pub struct Import {
    /// The service's name at the exporting machines.
    pub service: String,
    /// Its name here.
    pub name: String,
    /// Who exports it.
    pub remotes: Vec<Remote>,
    /// Which of them a call goes to.
    pub pick: Pick,
    /// Calls that are passed on at a time.
    pub workers: u32,
    /// Who may call it here.
    pub access: Access,
    /// The folder of services; the user's own where there is none.
    pub folder: Option<PathBuf>,
}

/// What an import tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImportEvent {
    /// A machine is there.
    Up {
        /// Its name.
        machine: String,
        /// The shortest time that a request was on its way, there and back.
        round_trip: Duration,
    },
    /// It is not there any more.
    Down {
        /// Its name.
        machine: String,
    },
    /// It could not be reached. Told once for each reason.
    Failed {
        /// Its name.
        machine: String,
        /// Why.
        why: String,
    },
    /// The service could not be registered here. Told once for each reason.
    Unregistered {
        /// Why.
        why: String,
    },
    /// The service can be called here.
    Registered,
}

/// A machine, as calls see it.
struct Peer {
    remote: Remote,
    calls: Mutex<Option<Calls>>,
    under_way: AtomicU32,
    /// Until when other machines are preferred, since it left a call unanswered or had it fail: an
    /// instant of [`now_ns`].
    silent_until_ns: AtomicU64,
}

impl Peer {
    fn calls(&self) -> MutexGuard<'_, Option<Calls>> {
        self.calls.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Measures the way to a machine ([`Calls::way`]) by a request that the machine answers itself.
#[derive(Default)]
struct Probe(Option<Token>);

impl Probe {
    /// Asks, and waits up to [`LOOK`] for the answer. While one is missing, it waits for that one:
    /// a machine that answers nothing has one probe of the slots for calls.
    fn measure(&mut self, calls: &Calls) {
        // Nothing is left of its deadline, so that it is refused as late and no service sees it.
        let late = CallOptions { deadline: Deadline::At(0), wait_late: Duration::MAX, ..CallOptions::default() };
        let Some(token) = self.0.take().or_else(|| calls.submit(b"", &late).ok()) else { return };
        if calls.wait_for(token, LOOK).is_none() {
            self.0 = Some(token);
        }
    }
}

struct ImporterInner {
    import: Import,
    engine: Arc<dyn Engine>,
    identity: Option<Identity>,
    peers: Vec<Peer>,
    /// The machine that was last picked.
    sticky: AtomicUsize,
    service: Mutex<Option<Service>>,
    /// Why the service could not be registered, last time.
    unregistered: Mutex<String>,
    stop: AtomicBool,
    pause: (Mutex<()>, Condvar),
    tell: Box<dyn Fn(ImportEvent) + Send + Sync>,
}

/// An import that runs until it is dropped. Calls under way then end with `ProviderGone`.
pub struct Importer {
    shared: Arc<ImporterInner>,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Importer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Importer").field("name", &self.shared.import.name).finish_non_exhaustive()
    }
}

impl Import {
    /// Connects to the machines by the engine, and again whenever a connection ends. `tell` is
    /// called from several threads.
    ///
    /// # Errors
    /// [`RemoteError::System`].
    pub fn start(
        self,
        engine: Arc<dyn Engine>,
        identity: Option<Identity>,
        tell: impl Fn(ImportEvent) + Send + Sync + 'static,
    ) -> Result<Importer, RemoteError> {
        let peer = |remote: &Remote| Peer {
            remote: remote.clone(),
            calls: Mutex::default(),
            under_way: AtomicU32::new(0),
            silent_until_ns: AtomicU64::new(0),
        };
        let shared = Arc::new(ImporterInner {
            peers: self.remotes.iter().map(peer).collect(),
            import: self,
            engine,
            identity,
            sticky: AtomicUsize::new(0),
            service: Mutex::default(),
            unregistered: Mutex::default(),
            stop: AtomicBool::new(false),
            pause: Default::default(),
            tell: Box::new(tell),
        });
        let mut importer = Importer { shared, threads: Vec::new() };
        for at in 0..importer.shared.peers.len() {
            let shared = importer.shared.clone();
            let thread = std::thread::Builder::new()
                .name("tombolo-import".into())
                .spawn(move || shared.follow(at))
                .map_err(|source| RemoteError::System { what: "starting a thread", source })?;
            importer.threads.push(thread);
        }
        Ok(importer)
    }
}

impl Drop for Importer {
    fn drop(&mut self) {
        let ImporterInner { stop, pause, peers, .. } = &*self.shared;
        stop.store(true, Ordering::SeqCst);
        // The lock orders it: who has looked at the flag before waits by now.
        drop(pause.0.lock());
        pause.1.notify_all();
        for peer in peers {
            if let Some(calls) = &*peer.calls() {
                calls.hang_up();
            }
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl ImporterInner {
    fn stops(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn pause(&self, time: Duration) {
        let guard = self.pause.0.lock().unwrap_or_else(|e| e.into_inner());
        let _ = self.pause.1.wait_timeout_while(guard, time, |()| !self.stops());
    }

    fn connect(&self, peer: &Peer) -> Result<(Calls, Duration), MachineError> {
        let identity = self.identity.as_ref().map(|identity| (identity, peer.remote.machine.as_str()));
        let socket = self.engine.connect(&peer.remote)?;
        let until = Instant::now() + HANDSHAKE;
        let (end, took) = dial(socket, identity, &self.import.service, until)?;
        let options = ServeOptions { workers: self.import.workers, ..ServeOptions::default() };
        Ok((Calls::on(end, until, &options)?, took))
    }

    /// Keeps the connection to one machine.
    fn follow(self: &Arc<Self>, at: usize) {
        let peer = &self.peers[at];
        let machine = || peer.remote.machine.clone();
        // The one that seems to be farther is not called, so that calls would not correct that.
        let is_compared = self.import.pick == Pick::Nearest && self.peers.len() > 1;
        let (mut pause, mut told) = (FIRST_PAUSE, String::new());
        while !self.stops() {
            match self.connect(peer) {
                Ok((calls, took)) => {
                    let mut probe = Probe::default();
                    probe.measure(&calls);
                    *peer.calls() = Some(calls.clone());
                    let round_trip = calls.way().unwrap_or(took);
                    (self.tell)(ImportEvent::Up { machine: machine(), round_trip });
                    let began = Instant::now();
                    self.settle();
                    while !self.stops() && !calls.wait_end(LOOK) {
                        self.settle();
                        if is_compared {
                            probe.measure(&calls);
                        }
                    }
                    *peer.calls() = None;
                    self.settle();
                    (self.tell)(ImportEvent::Down { machine: machine() });
                    told.clear();
                    if began.elapsed() > LONGEST_PAUSE {
                        pause = FIRST_PAUSE;
                    }
                }
                Err(error) => {
                    let why = error.to_string();
                    if why != told {
                        (self.tell)(ImportEvent::Failed { machine: machine(), why: why.clone() });
                        told = why;
                    }
                }
            }
            self.pause(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Registers the service while at least one machine is there, and only then.
    fn settle(self: &Arc<Self>) {
        let mut service = self.service.lock().unwrap_or_else(|e| e.into_inner());
        let is_wanted = !self.stops() && self.peers.iter().any(|peer| peer.calls().is_some());
        if !is_wanted {
            *service = None;
        } else if service.is_none() {
            let mut told = self.unregistered.lock().unwrap_or_else(|e| e.into_inner());
            match self.register() {
                Ok(registered) => {
                    *service = Some(registered);
                    told.clear();
                    (self.tell)(ImportEvent::Registered);
                }
                Err(error) => {
                    let why = error.to_string();
                    if why != *told {
                        (self.tell)(ImportEvent::Unregistered { why: why.clone() });
                        *told = why;
                    }
                }
            }
        }
    }

    fn register(self: &Arc<Self>) -> Result<Service, provider::RegisterError> {
        let options = Options {
            workers: self.import.workers,
            access: self.import.access.clone(),
            folder: self.import.folder.clone(),
            machines: self.import.remotes.iter().map(|remote| remote.machine.clone()).collect(),
            ..Options::default()
        };
        // The service is a part of what it would keep alive.
        let shared = Arc::downgrade(self);
        let pass_on = move |request: &provider::Request<'_>, reply: &mut provider::Reply<'_>| match shared.upgrade() {
            Some(shared) => shared.pass_on(request, reply),
            None => reply.hang_up(),
        };
        Service::register(&self.import.name, options, pass_on)
    }

    fn pass_on(&self, request: &provider::Request<'_>, reply: &mut provider::Reply<'_>) {
        let bytes = request.to_vec();
        let mut tried = vec![false; self.peers.len()];
        while let Some((at, calls)) = self.pick(&tried) {
            tried[at] = true;
            let peer = &self.peers[at];
            let mut is_sent = false;
            peer.under_way.fetch_add(1, Ordering::Relaxed);
            let end = calls.call_in_turn(&bytes, &bridge::passed_on(request), |token| {
                is_sent = true;
                let calls = calls.clone();
                request.on_cancelled(move || calls.cancel_within(token, bridge::GRACE));
            });
            peer.under_way.fetch_sub(1, Ordering::Relaxed);
            // No answer, not even that it was cancelled, or none of the service, which may be gone
            // there: the others are asked first for a while.
            if matches!(end, Err(CallError::Timeout | CallError::DeadlineExceeded | CallError::Failed)) {
                peer.silent_until_ns.store(now_ns() + SILENCE.as_nanos() as u64, Ordering::Relaxed);
            }
            // Nothing was sent, so that it may go elsewhere.
            if !is_sent && matches!(end, Err(CallError::ProviderGone | CallError::Broken(_))) {
                continue;
            }
            return bridge::give(end, reply);
        }
        reply.hang_up();
    }

    /// The machine for the next call among those that are there and were not tried.
    fn pick(&self, tried: &[bool]) -> Option<(usize, Calls)> {
        let now = now_ns();
        let is_silent = |at: usize| self.peers[at].silent_until_ns.load(Ordering::Relaxed) > now;
        let is_there = |at: usize| !tried[at] && self.peers[at].calls().is_some();
        let any_speaks = (0..self.peers.len()).any(|at| is_there(at) && !is_silent(at));
        let there = |at: usize| {
            let is_out = tried[at] || any_speaks && is_silent(at);
            let calls = if is_out { None } else { self.peers[at].calls().clone() };
            calls.map(|calls| (at, calls))
        };
        let all = || (0..self.peers.len()).filter_map(there);
        if self.peers.len() == 1 {
            return there(0);
        }
        match self.import.pick {
            Pick::Nearest => all().min_by_key(|(_, calls)| calls.way().unwrap_or(Duration::MAX)),
            // Equal ones take turns, since the one picked last is under way.
            Pick::LeastLoaded => all().min_by_key(|(at, _)| self.peers[*at].under_way.load(Ordering::Relaxed)),
            Pick::Sticky => {
                let last = self.sticky.load(Ordering::Relaxed);
                let found = there(last).or_else(|| all().next());
                if let Some((at, _)) = &found {
                    self.sticky.store(*at, Ordering::Relaxed);
                }
                found
            }
        }
    }
}
