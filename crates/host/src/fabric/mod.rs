//! A running fabric: the plan carried out, kept, changed and taken down again.
//!
//! # Purpose
//! [`Running::start`] makes everything that a fabric file says. [`Running::add`],
//! [`Running::remove`], [`Running::run`] and stopping a machine change it. [`Running::take_down`]
//! ends it. This module is not the API, which calls it. It is not the data path either: worker
//! threads run that, and this module talks to them through their handles.
//!
//! # Invariants
//! - The runtime directory's lock is held from before the first thing is made until after the last
//!   is gone.
//! - Everything that outlives a killed daemon is found again. Machines, helpers and bridges carry
//!   marks ([`crate::process`]). The owner record, which is written first, names the nftables
//!   table, the sysctls and the interfaces under the bypass. Taps and sockets' listeners end with
//!   the process. passt ends with its stream, unless it hangs.
//! - A machine is adopted if it was started with exactly the arguments that the plan has for it,
//!   can connect again, and its driver had been on the network. Any other process of the fabric is
//!   ended before anything is made, with the same grace as by `down`.
//! - What was done with the leftovers of an earlier daemon is printed, and is part of the report
//!   ([`Running::status`]).
//! - After `start`, either everything in the file is up, or nothing.
//!
//! # Threads
//! One async thread owns the `Running` behind a mutex. Workers run on their own. Waiting for
//! processes to end happens outside the mutex.

mod apply;
mod backoff;
mod bypass;
mod capture;
mod config;
mod containers;
mod domains;
mod drive;
mod ending;
pub mod events;
pub mod fdstore;
pub mod handover;
mod handover_socket;
pub(crate) mod heal;
mod helper;
#[cfg(test)]
mod injected;
mod leases;
mod machine;
mod namespaces;
mod network;
mod parked;
mod passt;
mod ports;
mod rates;
mod report;
mod services;
pub mod shared;
mod span;
pub mod standing;
mod tables;

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tombolo_bypass::attachment::AttachError;
use tombolo_ivshmem::links::LinkError;
use tombolo_ivshmem::store::Store;
use tombolo_port::link::{Interface, LinkError as TapError};
use tombolo_switch::control::ControlError;
use tombolo_switch::guard::link_local;
use tombolo_worker::thread::{WorkerError, WorkerThread};

use crate::blocking;
use crate::config::Document;
use crate::file::{self, Fabric, FileError, Which};
use crate::kernel::{self, KernelError};
use crate::notify;
use crate::plan::{self, Facts, Plan, PlanError, PortPlan};
use crate::preflight;
use crate::process::{self, Liveness};
use crate::qemu::probe::{self, Qemu};
use crate::relay::{self, Relay};
use crate::routes::{self, Clash, Route};
use crate::rundir::{self, Addition, Owner, RunDir, RunDirError, Sysctl};
use crate::xen::toolstack;

pub use drive::drive;
use ending::{Ending, end_all};
use events::{Events, Facts as Told, Kind};
use fdstore::Finder;
use handover::{Commit, Prepared, Takeover};
pub use machine::Ended;
use machine::RunningMachine;
use network::Net;
use ports::RunningPort;

/// Why a fabric, or a change of it, did not come about.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum FabricError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    RunDir(#[from] RunDirError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("the switch: {0}")]
    Control(#[from] ControlError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error("port {port}: {why}")]
    Port {
        port: String,
        /// What its kind said.
        why: String,
    },
    /// The gateway of a network.
    #[error("network {network}: {why}")]
    Network { network: String, why: String },
    #[error("the bypass: {0}")]
    Bypass(#[from] AttachError),
    /// A link of shared memory.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A process.
    #[error("starting {what}: {source}; {hint}")]
    Spawn {
        /// Which program, for whom.
        what: String,
        source: std::io::Error,
        hint: &'static str,
    },
    /// This machine does not have what the file needs; all of it, with the places in the file.
    #[error("{0}")]
    Machine(FileError),
    /// No such member.
    #[error("the fabric has no {what} \"{name}\"{hint}")]
    Unknown {
        what: &'static str,
        /// The name asked for.
        name: String,
        /// A near name, or the names there are.
        hint: String,
    },
    /// A change that does not fit the state.
    #[error("{0}")]
    State(String),
    /// Another change is under way, and this one was not begun. Trying again helps, and clients do
    /// so.
    #[error("{0}")]
    Busy(String),
    /// A request that is wrong in itself.
    #[error("{0}")]
    Request(String),
    /// A request that is right in itself, and does not fit the file.
    #[error("{0}")]
    Unfit(String),
}

/// Tells the user what happens while the fabric runs; called with one line.
pub type Say = Arc<dyn Fn(&str) + Send + Sync>;

/// A worker and its thread.
pub(crate) struct RunningWorker {
    pub(crate) spec: file::Worker,
    pub(crate) thread: WorkerThread,
    pub(crate) started: Instant,
}

/// A running fabric. Shared as [`Shared`].
pub struct Running {
    pub(crate) spec: Fabric,
    pub(crate) file: PathBuf,
    /// The content of the file as it was last read; `None` where it could not be read.
    base: Option<Document>,
    pub(crate) dir: Option<RunDir>,
    pub(crate) facts: Facts,
    pub(crate) started: Instant,
    pub(crate) workers: Vec<RunningWorker>,
    pub(crate) networks: BTreeMap<String, Net>,
    pub(crate) ports: BTreeMap<String, RunningPort>,
    pub(crate) machines: BTreeMap<String, RunningMachine>,
    /// The fd store, and how it is found.
    pub(crate) store: Option<Arc<Store>>,
    pub(crate) finder: Finder,
    /// The daemon before put the final state of everything into the store, and this one takes it
    /// up.
    pub(crate) taking_over: bool,
    /// The daemon before has given everything up: there is no way back to it.
    has_taken_over: bool,
    /// Records of the handover that were taken.
    pub(crate) taken: Vec<String>,
    /// The daemon before, which waits to be told that this one takes over.
    commit: Option<Commit>,
    /// What was found out before it was asked.
    prepared: Option<Prepared>,
    /// Links of shared memory, where there are some.
    pub(crate) shared: Option<shared::SharedMemory>,
    /// What passes calls on between links and services, by link.
    pub(crate) bridges: BTreeMap<String, services::RunningBridge>,
    /// See [`Running::start`].
    owns: Arc<AtomicBool>,
    /// Networks whose bypass does not work, and why.
    pub(crate) bypass_faults: BTreeMap<String, String>,
    /// Passes connections of forwards on that the kernel does not translate.
    relay: Option<Relay>,
    /// Forwards of kernel uplinks that are not in force, since their machines do not run.
    pub(crate) away: Vec<(file::Proto, std::net::SocketAddr)>,
    /// What has its fd store replaced.
    bypass_watch: Option<tokio::task::JoinHandle<()>>,
    /// What looks for routes out of this machine.
    routers6_watch: Option<tokio::task::AbortHandle>,
    pub(crate) say: Say,
    /// What the user should know of this start.
    pub(crate) notes: Vec<String>,
    /// What this start did with what an earlier daemon had left, a sentence each.
    pub(crate) takeover: Vec<String>,
    /// Runtime files that were deleted and are not there again, a sentence each.
    pub(crate) missing: Vec<String>,
    /// Ports that could not be made again after their sockets were deleted.
    pub(crate) unmade: Vec<PortPlan>,
    pub(crate) me: std::sync::Weak<Mutex<Running>>,
    /// An apply is under way: nothing else may change the fabric.
    pub(crate) applying: bool,
    /// What happened.
    pub(crate) events: Events,
    /// What the control plane has said of other machines.
    pub(crate) span: span::Span,
    /// What of the ports is told in `events`.
    pub(crate) watched: events::Watched,
    /// The fixed IPv6 addresses of members that the kernel's rules know.
    fixed6: kernel::Fixed6,
    /// Where the ports of containers lead.
    containers: containers::Containers,
    /// Members of containers whose namespaces did not answer, and why, while the fabric starts.
    silent: BTreeMap<String, String>,
    /// Names of domains that are being ended since the addition that they were a part of failed.
    unadded: BTreeSet<String>,
}

/// The running fabric, for the task that answers for it and those that watch its processes.
#[derive(Clone)]
pub struct Shared {
    /// All that requests read or change.
    pub running: Arc<Mutex<Running>>,
}

impl Shared {
    /// The fabric cannot start because of `error`: undoes what was made, or, after a handover,
    /// leaves the guests to the next daemon. Returns what to tell the user.
    pub(crate) async fn fail(&self, error: FabricError) -> FabricError {
        let mut running = self.running.lock().await;
        running.open_events();
        let name = running.spec.name.clone();
        let facts = Told::of(&name).cause(&error.to_string());
        running.events.add(Kind::Fault, facts, &format!("{name} could not be started"));
        if !running.has_taken_over {
            let _ = running.take_down(true).await;
            return error;
        }
        running.events.flush();
        // What the guests need is in the fd store for the next daemon. Dropping it here would end
        // it.
        running.leave_after_failure();
        std::mem::forget(self.clone());
        notify::settle();
        FabricError::State(format!(
            "{error}; the guests run on without their network: correct what is wrong and run `tombolo up`"
        ))
    }
}

/// How long what a killed daemon had is waited for that the kernel takes back.
const LEAVING: Duration = Duration::from_secs(3);

/// An error with all that this machine does not have; the places are those of the file, as it is
/// now.
pub(crate) fn refuse_faults(
    faults: Vec<preflight::HostFault>,
    path: &Path,
    which: Which<'_>,
) -> Result<(), FabricError> {
    if faults.is_empty() { Ok(()) } else { Err(lacking(faults, path, which)) }
}

fn lacking(faults: Vec<preflight::HostFault>, path: &Path, which: Which<'_>) -> FabricError {
    let places = file::load_with_places(path, which).map_or_else(|_| file::Places::none(path), |(_, places)| places);
    lacking_at(faults, &places)
}

/// The same, with these places.
fn lacking_at(faults: Vec<preflight::HostFault>, places: &file::Places) -> FabricError {
    let problems = faults.into_iter().map(|fault| fault.placed(places)).collect();
    FabricError::Machine(places.error(problems))
}

/// Why [`Facts::kvm`] has no answer.
const NOT_ASKED: &str = "not asked";
/// Why a request that would change the fabric is refused.
const APPLY_RUNS: &str = "the fabric is being changed by another command or request; try again when that is done";

/// Whether KVM runs a guest here: found out once per boot and QEMU, since where it does not the
/// question takes seconds.
fn kvm(qemu: &Qemu) -> Result<(), String> {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Known {
        boot: String,
        qemu: PathBuf,
        version: (u32, u32, u32),
        answer: Result<(), String>,
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let place = rundir::runtime_root().ok().map(|root| root.join("kvm.json"));
    let known =
        place.as_ref().and_then(|p| std::fs::read(p).ok()).and_then(|t| serde_json::from_slice::<Known>(&t).ok());
    if let Some(known) = known
        && (known.boot.as_str(), &known.qemu, known.version) == (boot.as_str(), &qemu.path, qemu.version)
    {
        return known.answer;
    }
    let answer = probe::kvm(&qemu.path).map(|_| ());
    let known = Known { boot, qemu: qemu.path.clone(), version: qemu.version, answer: answer.clone() };
    if let (Some(place), Ok(text)) = (place, serde_json::to_vec(&known)) {
        // Without a place to remember it the question is asked again next time.
        let _ = rundir::write_whole(&place, &text);
    }
    answer
}

/// Finds out what the plan needs to know. KVM is asked only if a machine may use it.
pub fn facts(fabric: &Fabric, runtime: PathBuf) -> Facts {
    let is_xen = |m: &&file::Machine| m.attach == file::Attach::Xen;
    let xl = match fabric.machines.iter().find(is_xen) {
        Some(_) => toolstack::find(),
        None => Err(NOT_ASKED.into()),
    };
    let qemu = if fabric.machines.iter().all(|m| is_xen(&m)) {
        Err("not looked for".into())
    } else {
        probe::find().map_err(|e| e.to_string())
    };
    let wanted = fabric.machines.iter().any(|m| m.accel != file::Accel::Tcg && !is_xen(&m));
    let kvm = match &qemu {
        Ok(qemu) if wanted => kvm(qemu),
        _ => Err(NOT_ASKED.into()),
    };
    Facts { qemu, kvm, xl, runtime, tsc: probe::tsc() }
}

/// Sysctls of the family of `key`, and the others.
fn by_family(sysctls: Vec<Sysctl>, key: &str) -> (Vec<Sysctl>, Vec<Sysctl>) {
    let family = &key[.."net/ipv4/".len()];
    sysctls.into_iter().partition(|sysctl| sysctl.key.starts_with(family))
}

/// Whether a fabric has the machine forward the family whose sysctl is `key`.
fn needs_forwarding(owner: &Owner, key: &str) -> bool {
    owner.nft_table.is_some() && owner.sysctls.iter().any(|sysctl| sysctl.key == key)
}

/// The table of a fabric, if it is in this network namespace. One that is not is of another
/// namespace, or of before a restart of the machine.
fn table_here(owner: &Owner) -> Result<Option<String>, KernelError> {
    match &owner.nft_table {
        Some(table) if kernel::has_table(table)? => Ok(Some(table.clone())),
        _ => Ok(None),
    }
}

impl Running {
    /// A fabric of which nothing runs yet.
    fn new(spec: Fabric, file: PathBuf, dir: RunDir, facts: Facts, say: Say) -> Running {
        let finder = Finder::new(dir.path());
        let containers = dir.owner().containers.clone();
        Running {
            store: None,
            finder,
            taking_over: false,
            has_taken_over: false,
            taken: vec![],
            commit: None,
            prepared: None,
            spec,
            file,
            base: None,
            dir: Some(dir),
            facts,
            started: Instant::now(),
            workers: vec![],
            networks: BTreeMap::new(),
            ports: BTreeMap::new(),
            machines: BTreeMap::new(),
            shared: None,
            bridges: BTreeMap::new(),
            owns: Arc::default(),
            bypass_faults: BTreeMap::new(),
            relay: None,
            away: vec![],
            bypass_watch: None,
            routers6_watch: None,
            say,
            notes: vec![],
            takeover: vec![],
            missing: vec![],
            unmade: vec![],
            me: std::sync::Weak::new(),
            applying: false,
            events: Events::default(),
            span: span::Span::default(),
            watched: events::Watched::default(),
            unadded: BTreeSet::new(),
            containers,
            silent: BTreeMap::new(),
            fixed6: BTreeMap::new(),
        }
    }

    /// Carries out a fabric file. On an error nothing is left.
    ///
    /// # Errors
    /// The first thing that did not work.
    ///
    /// With `replace`, a daemon that runs the fabric is asked to hand over first. On an error
    /// before it has done so it goes on; on one afterwards the guests run on, and the next `up`
    /// takes them up. It may be dropped while it waits. Then nothing was made, or `owns` is set:
    /// what there is is this process's to clean up.
    pub async fn start(
        spec: Fabric,
        path: &Path,
        say: Say,
        replace: bool,
        owns: &Arc<AtomicBool>,
    ) -> Result<Shared, FabricError> {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
        let base = std::fs::read_to_string(path).ok().and_then(|text| Document::read(&text));
        let mut looked_at = None;
        let takeover = if replace {
            let (spec, base, absolute, say) = (spec.clone(), base.clone(), absolute.clone(), say.clone());
            // Before the other daemon pauses for this one.
            let namespaces = handover::namespaces(&spec, base.as_ref(), &absolute);
            let silent = namespaces::silent(namespaces).await;
            looked_at = Some(silent.clone());
            // It waits for the other daemon, which may be stopped.
            let begun = blocking::spawn(move || Takeover::begin(&spec, base.as_ref(), &absolute, &silent, &say)).await;
            begun.map_err(|error| FabricError::State(format!("asking for a handover: {error}")))??
        } else {
            None
        };
        let (mut dir, known) = match takeover {
            Some(Takeover { dir, facts, prepared, store, commit }) => (dir, Some((facts, prepared, store, commit))),
            None => {
                let dir = RunDir::claim(&spec.name, &absolute, &say).await?;
                owns.store(true, Ordering::Relaxed);
                (dir, None)
            }
        };
        // What the file says, if something was changed since that this machine may refuse by now.
        let mut unchanged = None;
        let spec = match dir.leftover.clone() {
            Some(left) if left.file == absolute => {
                unchanged = (!left.changes.is_empty()).then(|| spec.clone());
                let spec = config::restore(spec, base.as_ref(), &left.changes, &mut dir, &say);
                let additions = dir.owner().additions.clone();
                restore_additions(spec, &additions, &mut dir, &say)?
            }
            Some(_) => {
                dir.record(|o| {
                    o.additions.clear();
                    o.named.clear();
                    o.rates.clear();
                    o.changes.clear();
                });
                spec
            }
            None => spec,
        };
        let silent = match looked_at.filter(|_| known.is_some()) {
            Some(silent) => silent,
            None => namespaces::silent(namespaces::of(&spec)).await,
        };
        let (spec, lost) = containers::without_gone(spec, base.as_ref(), &silent, &mut dir, &say);
        let running = match known {
            Some((facts, prepared, store, commit)) => {
                let running = Running::new(spec, absolute, dir, facts, say);
                Running { store: Some(store), commit: Some(commit), prepared: Some(prepared), ..running }
            }
            None => {
                let facts = facts(&spec, dir.path().into());
                let mut running = Running::new(spec, absolute, dir, facts, say);
                running.find_store();
                running
            }
        };
        let shared = Shared { running: Arc::new(Mutex::new(running)) };
        let mut running = shared.running.lock().await;
        running.owns = owns.clone();
        running.base = base;
        running.silent = silent;
        running.me = Arc::downgrade(&shared.running);
        running.taking_over = running.take_state("handover".into()).is_some();
        lost.into_iter().for_each(|what| running.took_over(what));
        let mut planned = running.prepare().await;
        if let (Err(error), Some(spec)) = (&planned, unchanged.filter(|_| !running.taking_over))
            && !running.dir().owner().changes.is_empty()
        {
            let why = error.to_string();
            match running.prepare_unchanged(spec, &why).await {
                Ok(plan) => planned = Ok(plan),
                Err(also) => (running.say)(&format!("neither can what the file says be started: {also}")),
            }
        }
        let plan = match planned {
            Ok(plan) => plan,
            Err(error) => {
                // Nothing was made. What a killed daemon left, guests that run among it, waits for
                // a better file.
                if let Some(dir) = running.dir.take()
                    && dir.leftover.is_none()
                {
                    dir.remove()?;
                }
                return Err(error);
            }
        };
        if let Err(error) = running.make(&plan).await {
            if running.taking_over && !running.has_taken_over {
                // The daemon before goes on, or has left: the guests are not this one's to end.
                return Err(error);
            }
            drop(running);
            return Err(shared.fail(error).await);
        }
        drop(running);
        Ok(shared)
    }

    pub(crate) fn dir(&mut self) -> &mut RunDir {
        self.dir.as_mut().expect("the directory is there until take_down, which is the last call")
    }

    /// What can be refused before anything is made.
    async fn prepare(&mut self) -> Result<Plan, FabricError> {
        if let Some(prepared) = &self.prepared {
            return Ok(prepared.plan.clone());
        }
        let plan = plan::plan(&self.spec, &self.facts);
        if self.taking_over {
            // Routes and listeners are there already, and are the fabric's own.
            return Ok(plan?);
        }
        // A container's port is parked; what the file says has to be there.
        if let Some((port, why)) = self.silent.iter().find(|(name, _)| !self.is_contained(name)) {
            return Err(FabricError::Port { port: port.clone(), why: why.clone() });
        }
        // They are of no use without their daemon, and hold the listeners that are looked at below.
        self.end_helpers().await;
        self.note_routes();
        // Bridges to other machines go on, and listen.
        let standing = standing::Standing::listening(self.left_listeners());
        let begun = Instant::now();
        loop {
            let all = preflight::faults(&self.answering(), Some(&standing));
            // What a container has done to its namespace keeps no other member from its network:
            // its port is parked.
            let (of_containers, mut faults): (Vec<_>, Vec<_>) = all.into_iter().partition(|f| self.is_of_container(f));
            // The passt and the taps of a daemon that was killed an instant ago are on their way
            // out.
            let passes = self.dir().leftover.is_some() && begun.elapsed() < LEAVING;
            if passes && faults.iter().any(|fault| fault.may_pass) {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            for preflight::HostFault { section, key, expected, found, .. } in of_containers {
                (self.say)(&format!("[{section}] {key}: expected {expected}, found {found}"));
            }
            return match plan {
                Ok(plan) => refuse_faults(faults, &self.file, self.spec.which()).map(|()| plan),
                Err(error) if faults.is_empty() => Err(error.into()),
                Err(_) => {
                    faults.extend(preflight::plan_faults(&self.spec, &self.facts));
                    Err(lacking(faults, &self.file, self.spec.which()))
                }
            };
        }
    }

    /// As [`Running::prepare`], with what the file says in place of what was changed since, which
    /// this machine refuses: `why`.
    async fn prepare_unchanged(&mut self, spec: Fabric, why: &str) -> Result<Plan, FabricError> {
        let keys = config::keys_of(&self.dir().owner().changes);
        self.dir().record(Owner::end_changes);
        let (say, additions) = (self.say.clone(), self.dir().owner().additions.clone());
        self.spec = restore_additions(spec, &additions, self.dir(), &say)?;
        self.facts = facts(&self.spec, self.facts.runtime.clone());
        let plan = self.prepare().await?;
        (self.say)(&format!(
            "{keys} was changed before and this machine refuses it now; what the file says holds: {why}"
        ));
        Ok(plan)
    }

    /// Notes the networks whose subnet takes a part of a wider route of the host.
    fn note_routes(&mut self) {
        let mut notes = Vec::new();
        for (network, clash) in routes::clashes(&self.spec, &routes::host()) {
            let (name, subnet) = (network.name.clone(), network.subnet);
            // One that is taken is a fault.
            if let Clash::Shadowed(Route { subnet: wide, device }) = clash {
                notes.push(format!(
                    "network {name}: the host reaches {subnet} in the fabric now, and no longer by its route to {wide} through {device}"
                ));
            }
        }
        notes.iter().for_each(|note| (self.say)(note));
        self.notes = notes;
    }

    async fn make(&mut self, plan: &Plan) -> Result<(), FabricError> {
        self.start_store(plan);
        self.start_links(plan)?;
        self.take_doors();
        let (adopted, mut ending) = self.sort_recorded(plan);
        let kept: Vec<String> = adopted.iter().map(|(name, _)| name.clone()).chain(self.saved_machines(plan)).collect();
        if !self.taking_over {
            end_all(std::mem::take(&mut ending), &self.say).await;
            self.destroy_left(Some(plan), &kept).await;
            self.undo_leftover(plan)?;
        }
        for worker in self.spec.workers.clone() {
            self.start_worker(worker)?;
        }
        for network in self.spec.networks.clone() {
            self.start_network(&network)?;
        }
        // Kernel rules before the ports: no guest may send before its masquerade is in place. In a
        // handover the previous daemon's rules are in place, and guests do not wait for new ones.
        if !self.taking_over {
            self.kernel_rules(plan)?;
        }
        if self.commit.is_some() {
            // The last moment at which a signal calls it off.
            tokio::task::yield_now().await;
        }
        self.commit.take().map(|commit| commit.commit()).transpose()?;
        self.has_taken_over = self.taking_over;
        self.owns.store(true, Ordering::Relaxed);
        if self.has_taken_over {
            notify::took_over();
        }
        for port in &plan.ports {
            self.add_port_or_park(port)?;
        }
        if self.taking_over {
            self.teach();
            end_all(ending, &self.say).await;
            self.destroy_left(Some(plan), &kept).await;
            self.undo_leftover(plan)?;
            self.kernel_rules(plan)?;
        }
        self.undo_killed();
        self.kernel_taps(plan, false)?;
        self.settle_relay();
        self.settle_routers6();
        self.start_bypass(plan);
        self.direct_links(plan)?;
        if let Some(links) = self.links() {
            links.forget_rest();
        }
        self.start_bridges().await;
        self.update_names();
        for machine in &plan.machines {
            if let Some((_, pid)) = adopted.iter().find(|(name, _)| *name == machine.name) {
                self.adopt(machine, pid)?;
            } else if kept.contains(&machine.name) {
                self.leave_saved(machine);
            } else if let Some((how, _)) = self.take_state(format!("idle/{}", machine.name)) {
                self.leave_idle(machine, &String::from_utf8_lossy(&how));
            } else {
                match self.start_or_wait(machine) {
                    // Guests that run on, and have their network again, do not end for one that
                    // cannot start.
                    Err(error) if !adopted.is_empty() || self.taking_over => self.note_not_started(machine, &error),
                    started => started?,
                }
            }
        }
        // Those that are kept come behind some that depend on them.
        self.start_waiting();
        self.settle_store(plan);
        self.record_standing();
        self.open_events();
        self.watch_ports();
        self.note_containers();
        self.silent.clear();
        tokio::spawn(containers::watch(self.me.clone()));
        tokio::spawn(crate::stamps::keep(self.facts.runtime.clone(), self.me.clone()));
        let name = self.spec.name.clone();
        let facts = Told::of(&name).pid(std::process::id());
        let how = if self.has_taken_over { "taken over by another daemon" } else { "up" };
        self.events.add(Kind::Up, facts, &format!("{name} is {how}"));
        Ok(())
    }

    /// Has events numbered and kept from now on. They are in memory until here: the daemon before
    /// writes until it has handed over.
    fn open_events(&mut self) {
        let folder = match self.dir().make_state() {
            Ok(()) => Some(self.dir().state_path("")),
            // That is said of the leases already.
            Err(_) => None,
        };
        let say = self.say.clone();
        self.events.open(folder.as_deref(), &say);
    }

    /// Notes what was done with something that an earlier daemon left, and says it.
    fn took_over(&mut self, what: String) {
        (self.say)(&what);
        self.events.add(Kind::Recovery, Told::default(), &what);
        self.takeover.push(what);
    }

    /// Kills the helpers (passt) that an earlier daemon left, in any state.
    async fn end_helpers(&mut self) {
        let Some(dir) = &self.dir else { return };
        let left = process::helpers(dir.path(), &dir.owner().helpers);
        if left.is_empty() {
            return;
        }
        let names: Vec<_> = left.iter().map(|(name, p)| (name.clone(), p.pid)).collect();
        let work = move || process::kill_all(&left.iter().map(|(_, process)| process).collect::<Vec<_>>());
        // The work does not panic.
        let there = blocking::spawn_or_run(work).await.unwrap_or_default();
        for (name, pid) in names {
            self.took_over(match there.contains(&pid) {
                false => format!("{name}: passt, process {pid}, was ended: its daemon had left it behind"),
                true => format!("{name}: passt, process {pid}, was killed and has not ended: the kernel holds it"),
            });
        }
        // Those that have ended need no record.
        self.dir().record(|o| o.helpers.retain(|h| there.contains(&h.pid)));
    }

    /// Why a machine that an earlier daemon left cannot be kept; `None` if it can.
    fn unfit(&self, plan: &Plan, machine: &str, process: &process::Process, words: &[String]) -> Option<String> {
        let Some(planned) = plan.machines.iter().find(|m| m.name == machine) else {
            return Some("it is not in the file any more".into());
        };
        match (&planned.domain, process::machine_of_xl(words, &self.facts.runtime)) {
            (Some(domain), Some(_)) => return self.unfit_domain(domain),
            (None, None) => {}
            _ => return Some("its section has changed: `attach`".into()),
        }
        let settled = self.dir.as_ref()?.owner().settled.iter().find(|s| {
            s.machine == machine && s.pid == process.pid && process::start_ticks(s.pid) == Some(s.started_ticks)
        });
        let Some(settled) = settled else {
            // A script may add arguments, and a descriptor's number replaces its name.
            let asked = planned.argv.iter().skip(1).filter(|w| !w.contains("/proc/self/fd/"));
            if asked.into_iter().any(|word| !words.contains(word)) {
                return Some(format!("its section has changed: {}", difference(words, &planned.argv)));
            }
            return Some(
                "its driver was not on the network when its daemon ended, so it could not connect again".into(),
            );
        };
        // What it was started with is in the record, not on its command line: a script may stand
        // between.
        if planned.argv != settled.argv {
            return Some(format!("its section has changed: {}", difference(&settled.argv, &planned.argv)));
        }
        if !planned.survives && !self.taking_over {
            return Some("its attachment cannot connect again under this QEMU".into());
        }
        self.lost_link(&planned.seats)
    }

    /// What becomes of the machines that an earlier daemon left: those that are kept, and those
    /// that are to be ended.
    fn sort_recorded(&mut self, plan: &Plan) -> (Vec<(String, u32)>, Vec<Ending>) {
        let (name, runtime) = (self.spec.name.clone(), self.dir().path().to_path_buf());
        let (mut keep, mut end) = (Vec::new(), Vec::new());
        let known = self.prepared.take().map(|prepared| prepared.machines);
        for (machine, process, words) in known.unwrap_or_else(|| process::machines(&name, &runtime)) {
            if !process.is_running() {
                continue;
            }
            let pid = process.pid;
            let Some(why) = self.unfit(plan, &machine, &process, &words) else {
                self.took_over(format!("{machine}: kept, process {pid} runs on"));
                keep.push((machine, pid));
                continue;
            };
            let planned = plan.machines.iter().find(|m| m.name == machine);
            if planned.is_some_and(|p| self.lost_link(&p.seats).is_some()) {
                self.notes.push(format!("{machine} was restarted: {why}"));
            }
            let domain = self.domain_left(&words, &runtime);
            let ending = Ending::left(process, &words, &machine, &runtime, domain);
            let how = if ending.button.is_some() { ", by its power button first" } else { "" };
            let then = if planned.is_some() { "started again" } else { "ended" };
            self.took_over(format!("{machine}: {then}; process {pid} is ended{how}: {why}"));
            end.push(ending);
        }
        (keep, end)
    }

    /// Undoes what an earlier daemon made for a plan that has changed.
    fn undo_leftover(&mut self, plan: &Plan) -> Result<(), FabricError> {
        self.end_bypass()?;
        if let Some(table) = self.dir().owner().nft_table.clone()
            && plan.kernel.is_empty()
        {
            self.undo_kernel(&table)?;
            self.took_over(format!("nftables table {table}: removed: no network has a kernel uplink any more"));
        }
        Ok(())
    }

    pub(crate) fn undo_kernel(&mut self, table: &str) -> Result<(), FabricError> {
        let _turn = rundir::shared_turn(&rundir::runtime_root()?)?;
        // It is off before the chain that bounds it is gone.
        self.restore_forwarding(kernel::IP_FORWARD)?;
        self.restore_forwarding(kernel::FORWARD6)?;
        kernel::remove(table)?;
        self.fixed6.clear();
        self.dir().record(|o| {
            o.nft_table = None;
            o.sysctls.clear();
        });
        Ok(())
    }

    /// Ends the forwarding of a family, whose sysctl `key` names it, unless another fabric needs it
    /// still.
    fn restore_forwarding(&mut self, key: &str) -> Result<(), FabricError> {
        if !self.other_owners()?.iter().any(|owner| needs_forwarding(owner, key)) {
            let (own, _) = by_family(self.dir().owner().sysctls.clone(), key);
            kernel::restore(&own)?;
        }
        self.dir().record(|o| o.sysctls = by_family(std::mem::take(&mut o.sysctls), key).1);
        Ok(())
    }

    /// Records how a family was forwarded before there were fabrics. Returns whether it was, and
    /// what is to be set still.
    fn record_forwarding(&mut self, key: &str, mut before: Vec<Sysctl>) -> Result<(bool, Vec<Sysctl>), FabricError> {
        let set = before.iter().any(|s| s.key == key && s.before == "1");
        // Where another fabric has set it, the values from before are those that it found: the last
        // one down restores them. The other one may have been killed: then it has not restored them
        // yet.
        let was_off = |s: &Sysctl| s.key == key && s.before != "1";
        let others = self.other_owners()?.into_iter().chain(if set { self.killed_owners()? } else { vec![] });
        if let Some(theirs) = others.into_iter().find(|o| o.sysctls.iter().any(was_off)) {
            before = by_family(theirs.sysctls, key).0;
        }
        self.dir().record(|o| {
            // Values recorded by a killed daemon are those from before the fabric.
            if !o.sysctls.iter().any(|s| s.key == key) {
                o.sysctls.extend(before.iter().cloned());
            }
        });
        let forwarded = !self.dir().owner().sysctls.iter().any(was_off);
        Ok((forwarded, if set { vec![] } else { before }))
    }

    /// The owner records of other fabrics whose daemons were killed, and whose rules are still
    /// here.
    fn killed_owners(&self) -> Result<Vec<Owner>, FabricError> {
        let mut found = vec![];
        for owner in rundir::left_owners(&rundir::runtime_root()?) {
            if !owner.sysctls.is_empty() && table_here(&owner)?.is_some() {
                found.push(owner);
            }
        }
        Ok(found)
    }

    /// The owner records of the other fabrics that run. A killed one's lock may be held by who
    /// looks after it.
    fn other_owners(&self) -> Result<Vec<Owner>, FabricError> {
        let root = rundir::runtime_root()?;
        let others = rundir::running(&root).into_iter().filter(|n| *n != self.spec.name);
        let owners = others.filter_map(|name| rundir::read_owner(&root.join(name)));
        Ok(owners.filter(|owner| owner.liveness() != Liveness::Gone).collect())
    }

    /// Undoes the kernel uplinks that killed daemons of other fabrics left in this network
    /// namespace, but for the forwarding of a family that a fabric which runs needs: whichever
    /// comes or goes next looks again. A failure is said.
    fn undo_killed(&mut self) {
        match self.try_undo_killed() {
            Ok(done) => done.into_iter().for_each(|what| self.took_over(what)),
            Err(error) => (self.say)(&format!("the kernel uplink of a fabric without a daemon: {error}")),
        }
    }

    fn try_undo_killed(&self) -> Result<Vec<String>, FabricError> {
        let root = rundir::runtime_root()?;
        let is_left = |owner: &Owner| owner.nft_table.is_some();
        if rundir::left_owners(&root).iter().all(|owner| !is_left(owner)) {
            return Ok(vec![]);
        }
        let _turn = rundir::shared_turn(&root)?;
        let mut live = self.other_owners()?;
        live.extend(self.dir.as_ref().map(|dir| dir.owner().clone()));
        let mut done = vec![];
        for mut killed in rundir::Killed::all(&root, is_left) {
            let Some(table) = table_here(killed.owner())? else { continue };
            for key in [kernel::IP_FORWARD, kernel::FORWARD6] {
                if !live.iter().any(|owner| needs_forwarding(owner, key)) {
                    let (theirs, rest) = by_family(killed.owner().sysctls.clone(), key);
                    kernel::restore(&theirs)?;
                    killed.record(|owner| owner.sysctls = rest)?;
                }
            }
            if killed.owner().sysctls.is_empty() {
                kernel::remove(&table)?;
                killed.record(|owner| owner.nft_table = None)?;
                let why = match killed.owner().left {
                    true => "its daemon left it to the next one, which makes it again",
                    false => "its daemon was killed",
                };
                done.push(format!("nftables table {table}: removed, and forwarding is as before it: {why}"));
            }
        }
        Ok(done)
    }

    pub(crate) fn kernel_rules(&mut self, plan: &Plan) -> Result<(), FabricError> {
        if plan.kernel.is_empty() {
            return Ok(());
        }
        let _turn = rundir::shared_turn(&rundir::runtime_root()?)?;
        let name = self.spec.name.clone();
        self.dir().record(|o| o.nft_table = Some(kernel::table(&name)));
        let (forwarded, unset) = self.record_forwarding(kernel::IP_FORWARD, kernel::forwarding()?)?;
        let routes6 = kernel::has_ipv6() && plan.kernel.iter().any(|uplink| uplink.network.router6().is_some());
        let (forwarded6, unset6) = match routes6 {
            true => self.record_forwarding(kernel::FORWARD6, kernel::forwarding6()?)?,
            false => {
                self.restore_forwarding(kernel::FORWARD6)?;
                (true, vec![])
            }
        };
        let networks = plan.kernel.iter().map(|uplink| &uplink.network);
        let fixed: kernel::Fixed6 = networks.filter_map(|network| fixed6(&self.spec, network)).collect();
        kernel::apply(&name, &plan.kernel, &fixed, [forwarded, forwarded6])?;
        self.fixed6 = fixed;
        if !unset.is_empty() {
            kernel::set(kernel::IP_FORWARD, "1")?;
        }
        if !unset6.is_empty() {
            kernel::forward6(&unset6)?;
        }
        Ok(())
    }

    /// Has the kernel's rules know the fixed IPv6 addresses of the members of now.
    pub(crate) fn settle_fixed6(&mut self) {
        let Running { fixed6: in_force, spec, say, .. } = self;
        for (network, known) in in_force {
            let Some((_, now)) = spec.network(network).and_then(|network| fixed6(spec, network)) else { continue };
            if now == *known {
                continue;
            }
            match kernel::set_fixed6(&spec.name, network, &now) {
                Ok(()) => *known = now,
                Err(error) => say(&format!("network {network}: {error}; connections to its new members are bounded")),
            }
        }
    }

    /// The forward as the relay has it, where it has a part in it.
    fn relay_route(&self, forward: &file::Forward) -> Option<relay::Route> {
        let network = self.spec.network(&forward.network).filter(|n| n.uplink == file::Uplink::Kernel)?;
        if self.away.contains(&(forward.proto, forward.listen)) {
            return None;
        }
        let to = std::net::SocketAddr::new(forward.ip, forward.port);
        let listen = forward.relayed().filter(|_| self.ports.contains_key(&plan::uplink_name(&network.name)))?;
        Some(relay::Route { proto: forward.proto, listen, to })
    }

    /// Why the relay does not do its part in a forward.
    pub(crate) fn relay_fault(&self, forward: &file::Forward) -> Option<String> {
        self.relay.as_ref()?.fault(&self.relay_route(forward)?)
    }

    /// How the relay's part in a forward is used, where it has one.
    pub(crate) fn relay_use(&self, forward: &file::Forward) -> Option<relay::Use> {
        self.relay.as_ref()?.used(&self.relay_route(forward)?)
    }

    /// Has the kernel and the relay forward what the file and the additions of now say.
    fn forwards_again(&mut self) -> Result<(), FabricError> {
        self.kernel_again()?;
        self.settle_relay();
        Ok(())
    }

    /// The forwards of kernel uplinks that lead to machines which do not run: the host answers for
    /// itself at their ports, and nothing that takes a machine's address gets its connections.
    pub(crate) fn forwards_away(&self) -> Vec<(file::Proto, std::net::SocketAddr)> {
        let is_away = |f: &&file::Forward| self.is_of_kernel(f) && self.resting_target(f).is_some();
        self.spec.forwards.iter().filter(is_away).map(|f| (f.proto, f.listen)).collect()
    }

    fn is_of_kernel(&self, forward: &file::Forward) -> bool {
        self.spec.network(&forward.network).is_some_and(|network| network.uplink == file::Uplink::Kernel)
    }

    /// The machine that a forward leads to, if it does not run.
    fn resting_target<'f>(&self, forward: &'f file::Forward) -> Option<&'f str> {
        let file::Target::Name(name) = &forward.target else { return None };
        self.machines.get(name).filter(|machine| machine.pid.is_none()).map(|_| name.as_str())
    }

    /// Why a forward leads to nothing, where the machine that it leads to does not run.
    pub(crate) fn resting_fault(&self, forward: &file::Forward) -> Option<String> {
        let name = self.resting_target(forward)?;
        let what = if self.is_of_kernel(forward) { "connections are refused until it does" } else { "nothing answers" };
        Some(format!("{name} does not run: {what}"))
    }

    /// Takes the forwards of machines that have ended out of force, and puts those of machines that
    /// run back.
    pub(crate) fn settle_away(&mut self) {
        // Without rules there is nothing to change: they are not made yet, or are gone already.
        let has_rules = self.dir.as_ref().is_some_and(|dir| dir.owner().nft_table.is_some() && !dir.owner().ending);
        if has_rules
            && self.forwards_away() != self.away
            && let Err(error) = self.forwards_again()
        {
            (self.say)(&format!(
                "the forwards of machines that started or ended: {error}; the next change tries again"
            ));
        }
    }

    /// Has the relay pass on what the forwards of now need.
    pub(crate) fn settle_relay(&mut self) {
        let routes: Vec<_> = self.spec.forwards.iter().filter_map(|f| self.relay_route(f)).collect();
        if routes.is_empty() {
            self.relay = None;
            return;
        }
        if self.relay.is_none() {
            match Relay::start() {
                Ok(relay) => self.relay = Some(relay),
                Err(error) => {
                    return (self.say)(&format!("forwards that change the address family: no thread: {error}"));
                }
            }
        }
        self.relay.iter().for_each(|relay| relay.set(routes.clone()));
    }

    /// Sets up the host's ends of the kernel uplinks. With `reset` the IPv6 addresses that they had
    /// go.
    pub(crate) fn kernel_taps(&mut self, plan: &Plan, reset: bool) -> Result<(), FabricError> {
        for uplink in &plan.kernel {
            let router6 = uplink.network.router6();
            if reset || router6.is_some() {
                kernel::open_ipv6(&uplink.device, reset)?;
            }
            if let Some(router6) = router6.filter(|_| kernel::has_ipv6()) {
                let port = plan::uplink_name(&uplink.network.name);
                let failed = |error: TapError| FabricError::Port { port: port.clone(), why: error.to_string() };
                let tap = Interface::open(None, &uplink.device).map_err(failed)?;
                // The one that members are told as the router's, whichever this machine would
                // choose by itself.
                let own = link_local(&file::Mac::derived(&[&self.spec.name, &uplink.network.name, "router"]).0);
                [own, router6].into_iter().try_for_each(|ip| tap.add_address(ip.into(), 64)).map_err(failed)?;
                kernel::set(&format!("net/ipv6/conf/{}/forwarding", uplink.device), "1")?;
                for (key, value) in kernel::NEIGHBOURS {
                    kernel::set(&format!("net/ipv6/neigh/{}/{key}", uplink.device), value)?;
                }
            }
            kernel::set(&format!("net/ipv4/conf/{}/route_localnet", uplink.device), "1")?;
            kernel::set(&format!("net/ipv4/conf/{}/forwarding", uplink.device), "1")?;
            for (key, value) in kernel::NEIGHBOURS {
                kernel::set(&format!("net/ipv4/neigh/{}/{key}", uplink.device), value)?;
            }
        }
        Ok(())
    }

    /// Adds members: the text of sections of a fabric file. Starts them and returns their names.
    ///
    /// # Errors
    /// The sections' faults, or what did not work; then nothing was added.
    pub fn add(&mut self, text: &str) -> Result<Vec<String>, FabricError> {
        let spec = file::add(text, Path::new("request"), &self.spec)?;
        if let Some(name) = spec.members().find(|name| self.unadded.contains(*name)) {
            return Err(FabricError::Busy(format!(
                "\"{name}\" of an earlier try is being ended; try again in a few seconds"
            )));
        }
        let same = spec.networks.len() == self.spec.networks.len()
            && spec.links.len() == self.spec.links.len()
            && spec.exports.len() == self.spec.exports.len()
            && spec.imports.len() == self.spec.imports.len()
            && spec.rules.len() == self.spec.rules.len()
            && spec.mirrors.len() == self.spec.mirrors.len()
            && spec.name == self.spec.name;
        if !same {
            let text = "only [cell.…], [vm.…], [tap.…] and [port.…], and [[forward]] to these, can be added to a running \
                fabric; for the rest change the file and restart the fabric";
            return Err(FabricError::State(text.into()));
        }
        let mut facts = self.facts.clone();
        let wants_xl = facts.xl.is_err() && spec.machines.iter().any(|m| m.attach == file::Attach::Xen);
        if (facts.qemu.is_err() || facts.kvm == Err(NOT_ASKED.into()) || wants_xl) && !spec.machines.is_empty() {
            facts = self::facts(&spec, facts.runtime);
        }
        let names: Vec<String> =
            spec.members().filter(|n| !self.spec.members().any(|m| m == *n)).map(String::from).collect();
        self.can_be_called(&spec, &names)?;
        let forwards = &spec.forwards[self.spec.forwards.len()..];
        self.can_forward(&spec, forwards, &names)?;
        let forwards = !forwards.is_empty();
        let plan = plan::plan(&spec, &facts)?;
        let ports: Vec<_> = plan.ports.iter().filter(|p| !self.ports.contains_key(&p.name)).cloned().collect();
        let machines: Vec<_> = plan.machines.iter().filter(|m| names.contains(&m.name)).cloned().collect();
        let old = (std::mem::replace(&mut self.spec, spec), std::mem::replace(&mut self.facts, facts));
        let addition = Addition { names: names.clone(), text: text.into() };
        self.dir().record(|o| o.additions.push(addition));
        let made = self.start_links(&plan).and_then(|()| {
            ports.iter().try_for_each(|port| self.add_port(port))?;
            self.update_names();
            if forwards {
                self.forwards_again()?;
            }
            machines.iter().try_for_each(|machine| self.start_or_wait(machine))
        });
        if let Err(error) = made {
            for port in &ports {
                self.drop_port(&port.name);
            }
            for name in &names {
                let Some(mut machine) = self.machines.remove(name) else { continue };
                let (process, domain) = (machine.let_go(), machine.plan.domain.clone());
                if domain.is_some() {
                    self.end_unadded(name, Ending { process, button: None, domain });
                } else if let Some(process) = process {
                    // It has run for an instant only; nothing in it is worth a grace.
                    let _ = process.signal(rustix::process::Signal::KILL);
                }
            }
            (self.spec, self.facts) = old;
            self.update_names();
            if forwards && let Err(error) = self.forwards_again() {
                (self.say)(&format!("the rules of before cannot be put back: {error}"));
            }
            self.dir().record(|o| {
                o.additions.pop();
            });
            return Err(error);
        }
        self.note_containers();
        self.record_standing();
        let text = format!("{} added to the running fabric", was(&names));
        names.iter().for_each(|name| self.events.add(Kind::Apply, Told::of(name), &text));
        Ok(names)
    }

    /// Whether forwards can be added to what runs, those behind `[[forward]]` of an addition with
    /// these members.
    ///
    /// # Errors
    /// One to something else, one through an uplink that would have to start again for it, or one
    /// where another program listens.
    fn can_forward(&self, spec: &Fabric, forwards: &[file::Forward], names: &[String]) -> Result<(), FabricError> {
        let mut others = None;
        for forward in forwards {
            let (proto, listen) = (forward.proto, forward.listen);
            let it = format!("the forward of {} {listen}", proto.word());
            let own = matches!(&forward.target, file::Target::Name(name) if names.contains(name));
            if !own {
                let text = format!(
                    "{it}: expected to lead to a member that is added with it; `tombolo forward add` makes others"
                );
                return Err(FabricError::State(text));
            }
            if spec.network(&forward.network).is_none_or(|network| network.uplink != file::Uplink::Kernel) {
                let text = format!(
                    "{it}: network \"{}\" has no uplink \"kernel\", the only one that takes forwards while it runs: give \
                     it that uplink, or add the forward by `tombolo forward add` or to the file (`tombolo apply`)",
                    forward.network
                );
                return Err(FabricError::State(text));
            }
            let others = others.get_or_insert_with(|| crate::kernel::listeners_of_others(&self.spec.name));
            let forwarded = preflight::forwarded_by(others, proto, listen);
            let taken = preflight::free_in_family(proto, listen).err().or(forwarded);
            if let Some(preflight::Taken { found, hint, .. }) = taken {
                return Err(FabricError::State(format!("the forward of {found}; {hint}")));
            }
        }
        Ok(())
    }

    /// Forgets that a member was added; whether it was.
    pub(crate) fn forget_addition(&mut self, name: &str) -> Result<bool, FabricError> {
        let known = self.dir().owner().additions.iter().any(|a| a.names.iter().any(|n| n == name));
        if known {
            self.dir().record(|o| {
                for addition in &mut o.additions {
                    addition.names.retain(|n| n != name);
                }
                o.additions.retain(|a| !a.names.is_empty());
            });
            self.forget_rates(name);
        }
        Ok(known)
    }

    /// Removes a tap or bare port.
    ///
    /// # Errors
    /// If there is none of that name, or it belongs to a machine or the fabric itself.
    pub fn remove(&mut self, name: &str) -> Result<(), FabricError> {
        if name.strip_prefix("gateway-").is_some_and(|network| self.networks.contains_key(network)) {
            let text = format!("port \"{name}\" is the gateway of its network, which only `down` ends");
            return Err(FabricError::State(text));
        }
        let Some(port) = self.ports.get(name) else { return Err(self.unknown("port", name)) };
        if let Some(machine) = &port.plan.machine {
            let text = format!(
                "port \"{name}\" belongs to the machine \"{machine}\"; `tombolo cell stop {machine}` ends that"
            );
            return Err(FabricError::State(text));
        }
        if let Some(network) = name
            .strip_prefix("span-")
            .filter(|network| self.spec.here.is_some() && self.networks.contains_key(*network))
            .filter(|_| self.spec.ports.iter().any(|p| p.name == name && matches!(p.kind, file::PortKind::Vxlan(_))))
        {
            let text = format!(
                "port \"{name}\" is the tunnel to the other machines, which network \"{network}\" has as long as it has `span`"
            );
            return Err(FabricError::State(text));
        }
        let own = self.spec.taps.iter().any(|t| t.name == name) || self.spec.ports.iter().any(|p| p.name == name);
        if !own {
            return Err(FabricError::State(format!(
                "port \"{name}\" is the uplink of its network, which only `down` ends"
            )));
        }
        let target = file::Target::Name(name.into());
        let added = self.dir().owner().additions.iter().any(|a| a.names.iter().any(|n| n == name));
        let forward = self.spec.forwards.iter().find(|f| f.target == target);
        // Those that were added with it go with it. So do those of a container, which has ended.
        let contained = self.spec.contained().any(|member| member.name == name);
        let forwards = forward.is_some() && (added || contained);
        if let Some(forward) = forward.filter(|_| !forwards) {
            let text = format!(
                "port \"{name}\" is the target of the forward from {}; it cannot go before that",
                forward.listen
            );
            return Err(FabricError::State(text));
        }
        // A container has ended, whatever names it.
        if !added && !contained {
            self.can_remove(name)?;
        }
        if forwards {
            // First, since it alone can fail: then the port stays as it was, with its forwards.
            let before = self.spec.forwards.clone();
            self.spec.forwards.retain(|f| f.target != target);
            if let Err(error) = self.forwards_again() {
                self.spec.forwards = before;
                return Err(error);
            }
        }
        self.drop_port(name);
        self.spec.taps.retain(|t| t.name != name);
        self.spec.ports.retain(|p| p.name != name);
        self.update_names();
        self.forget_container(name);
        if !self.forget_addition(name)? {
            self.note_removed(name, contained);
        }
        self.forget_rates(name);
        self.record_standing();
        let text = format!("port {name} was removed from the running fabric");
        self.events.add(Kind::Apply, Told::of(name), &text);
        Ok(())
    }

    pub(crate) fn unknown(&self, what: &'static str, name: &str) -> FabricError {
        let names: Vec<&str> = match what {
            "port" => self.ports.keys().map(String::as_str).collect(),
            "network" => self.networks.keys().map(String::as_str).collect(),
            _ => self.machines.keys().map(String::as_str).collect(),
        };
        let hint = match names.len() {
            0 => format!("; it has no {what}"),
            _ => format!("; there are {}", names.join(", ")),
        };
        FabricError::Unknown { what, name: name.into(), hint }
    }

    /// Takes everything down. With `quietly`, the start has failed: nothing is said of what could
    /// not be removed, and containers that an earlier daemon had keep their interfaces and their
    /// record. The next daemon takes them up.
    ///
    /// # Errors
    /// Domains of Xen that may run on; then the runtime folder stays with the record of them.
    pub async fn take_down(&mut self, quietly: bool) -> Result<(), FabricError> {
        let say = self.say.clone();
        let trouble = |what: &str, error: &dyn std::fmt::Display| {
            if !quietly {
                say(&format!("down: {what}: {error}"));
            }
        };
        if !quietly {
            let name = self.spec.name.clone();
            self.events.add(Kind::Down, Told::of(&name), &format!("{name} is taken down"));
        }
        // An `up` that comes meanwhile waits.
        if let Some(dir) = &mut self.dir {
            dir.record(|o| o.ending = true);
        }
        let mut processes = Vec::new();
        let running = self.machines.iter().filter_map(|(name, m)| Some((name.clone(), m.pid?)));
        let running: Vec<_> = running.collect();
        for machine in self.machines.values_mut() {
            let (button, domain) = (machine.button(&self.facts.runtime), machine.plan.domain.clone());
            processes.extend(machine.let_go().map(|process| Ending { process: Some(process), button, domain }));
        }
        end_all(processes, &say).await;
        for (name, pid) in running {
            self.events.add(Kind::Stop, Told::of(&name).pid(pid), &format!("{name} was stopped with its fabric"));
        }
        self.machines.clear();
        // What a killed daemon, a start that failed half-way, or an adoption that did not come
        // about, has left.
        if let Some(dir) = &self.dir {
            let runtime = dir.path().to_path_buf();
            let left = process::machines(&self.spec.name, &runtime);
            let mut endings = Vec::new();
            for (machine, process, words) in left {
                let pid = process.pid;
                let domain = self.domain_left(&words, &runtime);
                let ending = Ending::left(process, &words, &machine, &runtime, domain);
                let how = if ending.button.is_some() { ", by its power button first" } else { "" };
                self.took_over(format!("{machine}: process {pid} is ended{how}"));
                endings.push(ending);
            }
            end_all(endings, &say).await;
            self.destroy_left(None, &[]).await;
        }
        if let Err(error) = self.end_bypass() {
            trouble("the bypass", &error);
        }
        self.relay = None;
        self.networks.values().for_each(Net::withdraw);
        self.networks.values().for_each(Net::finish_withdrawal);
        let names: Vec<String> = self.ports.keys().cloned().collect();
        for name in names {
            self.drop_port(&name);
        }
        let keeps_containers = quietly && !self.containers.is_empty();
        if !keeps_containers {
            self.delete_taps_of_containers().await;
        }
        self.networks.values().for_each(Net::stop_leases);
        for net in self.networks.values() {
            net.finish_leases(&say);
        }
        self.networks.clear();
        self.end_helpers().await;
        self.end_bridges().await;
        self.end_links();
        for worker in std::mem::take(&mut self.workers) {
            if let Err(error) = worker.thread.stop() {
                trouble("a worker", &error);
            }
        }
        if let Some(table) = self.dir.as_ref().and_then(|d| d.owner().nft_table.clone())
            && let Err(error) = self.undo_kernel(&table)
        {
            trouble("the kernel uplink", &error);
        }
        self.undo_killed();
        if !self.events.finish() {
            trouble("events", &"the last ones are not written: the disk does not answer");
        }
        let Some(mut dir) = self.dir.take() else { return Ok(()) };
        let left: Vec<String> = dir.owner().domains.iter().map(|d| d.name.clone()).collect();
        if !left.is_empty() {
            // The record is all that tells of them; of the rest nothing is to come back.
            dir.record(|o| {
                (o.standing, o.ending) = (None, false);
                o.additions.clear();
                o.named.clear();
                o.rates.clear();
                o.changes.clear();
                o.settled.clear();
                o.containers.clear();
            });
            let (names, fabric) = (left.join(", "), &self.spec.name);
            return Err(FabricError::State(format!(
                "all is down but the Xen domains {names}, which may run on: `tombolo down --fabric {fabric}` tries again, and `xl destroy` ends one"
            )));
        }
        if keeps_containers {
            dir.record(|o| {
                (o.standing, o.ending, o.left) = (None, false, true);
                o.settled.clear();
            });
            let n = self.containers.len();
            say(&format!("{n} container(s) keep their interfaces, which the next `up` takes up"));
            return Ok(());
        }
        if let Err(error) = dir.remove() {
            trouble("the runtime directory", &error);
        }
        Ok(())
    }
}

/// The fixed IPv6 addresses of a network's members, if its rules have them. Containers come and go,
/// and are known by what they send.
fn fixed6(spec: &Fabric, network: &file::Network) -> Option<(String, BTreeSet<Ipv6Addr>)> {
    let base = kernel::bounded(network)?;
    let contained: BTreeSet<&str> = spec.contained().map(|member| member.name).collect();
    let members = spec.addresses6(&network.name).into_iter().filter(|(name, ..)| !contained.contains(&**name));
    let is_within = |ip: &Ipv6Addr| ip.segments()[..4] == base.segments()[..4];
    Some((network.name.clone(), members.flat_map(|(.., all)| all).filter(is_within).collect()))
}

/// `web was`, or `a, b and c were`, for what follows.
fn was(names: &[String]) -> String {
    match names {
        [] => "nothing was".into(),
        [one] => format!("{one} was"),
        [first @ .., last] => format!("{} and {last} were", first.join(", ")),
    }
}

/// Applies what was added to the fabric while an earlier daemon ran. What no longer fits is said
/// and left out.
fn restore_additions(spec: Fabric, additions: &[Addition], dir: &mut RunDir, say: &Say) -> Result<Fabric, FabricError> {
    let mut misfits = Vec::new();
    let out = restore_additions_of(spec, additions, &mut |addition, error| {
        say(&format!("{} was added before and no longer fits: {error}", addition.names.join(", ")));
        misfits.push(addition.clone());
    });
    if !misfits.is_empty() {
        dir.record(|o| o.additions.retain(|a| !misfits.contains(a)));
    }
    Ok(out)
}

/// As [`restore_additions`]; `misfit` is told what no longer fits.
fn restore_additions_of(spec: Fabric, additions: &[Addition], misfit: &mut dyn FnMut(&Addition, &FileError)) -> Fabric {
    let mut out = spec;
    for addition in additions {
        match file::add(&addition.text, Path::new("added"), &out) {
            Ok(mut more) => {
                // Of several that were added at once some may have been removed since.
                let old: Vec<String> = out.members().map(String::from).collect();
                let keep = |name: &String| old.contains(name) || addition.names.contains(name);
                more.machines.retain(|m| keep(&m.name));
                more.taps.retain(|t| keep(&t.name));
                more.ports.retain(|p| keep(&p.name));
                more.forwards.retain(|f| !matches!(&f.target, file::Target::Name(name) if !keep(name)));
                out = more;
            }
            Err(error) => misfit(addition, &error),
        }
    }
    out
}

/// What an argument list has that another has not, for people: "now -m 48M, before -m 32M".
fn difference(before: &[String], now: &[String]) -> String {
    /// Options with their values; a value alone says little.
    fn options(argv: &[String]) -> Vec<String> {
        let mut out: Vec<String> = Vec::new();
        for word in argv.iter().skip(1) {
            match out.last_mut() {
                Some(last) if !word.starts_with('-') => *last = format!("{last} {word}"),
                _ => out.push(word.clone()),
            }
        }
        out
    }
    /// Characters of each side that are shown.
    const SHOWN: usize = 160;
    let (before_options, now_options) = (options(before), options(now));
    let only = |of: &[String], not_in: &[String]| {
        let all: Vec<&str> = of.iter().filter(|o| !not_in.contains(o)).map(String::as_str).collect();
        let text = all.join(" ");
        let cut: String = text.chars().take(SHOWN).collect();
        if cut.len() < text.len() { format!("{cut}…") } else { cut }
    };
    let sides = [("now", only(&now_options, &before_options)), ("before", only(&before_options, &now_options))];
    let told: Vec<String> = sides.iter().filter(|(_, t)| !t.is_empty()).map(|(w, t)| format!("{w} {t}")).collect();
    if told.is_empty() { format!("QEMU is {} now", now.first().map_or("", String::as_str)) } else { told.join(", ") }
}

/// Ends what a killed daemon of this fabric left, without starting anything. Returns what was done,
/// a sentence each; `None` if nothing was left.
///
/// # Errors
/// If a daemon runs, or the system refuses.
pub async fn clean_up(fabric: &str, say: Say) -> Result<Option<Vec<String>>, FabricError> {
    let dir = RunDir::claim(fabric, Path::new(""), &say).await?;
    let found = dir.leftover.is_some();
    let spec = Fabric::empty(fabric, PathBuf::new());
    let facts = facts(&spec, dir.path().into());
    let mut running = Running::new(spec, PathBuf::new(), dir, facts, say);
    running.take_down(false).await?;
    let done = std::mem::take(&mut running.takeover);
    Ok((found || !done.is_empty()).then_some(done))
}

/// The plan of a port that is added while the fabric runs, for messages.
pub(crate) fn describe(port: &PortPlan) -> String {
    match &port.attachment {
        plan::Attachment::VhostUser { socket, connect: true, .. } => {
            format!("vhost-user, connects to {}", socket.display())
        }
        plan::Attachment::VhostUser { socket, .. } => format!("vhost-user at {}", socket.display()),
        plan::Attachment::Stream { socket, .. } => format!("stream at {}", socket.display()),
        plan::Attachment::Tap { device, .. } => format!("tap {device}"),
        plan::Attachment::Packet { device, .. } => format!("interface {device}"),
        plan::Attachment::Xen { domain, vif, .. } => format!("vif {vif} of the Xen domain {domain}"),
        plan::Attachment::Ivshmem { link } => {
            let kind = if link.shape.vectors == 0 { "ivshmem, plain" } else { "ivshmem" };
            let doors: Vec<String> = link.doors.iter().map(|d| format!(" at {}", d.path.display())).collect();
            format!("{kind}, {} bytes{}", link.region_bytes, doors.join(","))
        }
        plan::Attachment::Vxlan(tunnel) => {
            let remotes: Vec<String> = tunnel.remotes.iter().map(ToString::to_string).collect();
            format!("VXLAN {} from {} to {}", tunnel.vni, tunnel.local, remotes.join(", "))
        }
        plan::Attachment::User(user) => format!("passt, router {}", user.router),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(String::from).collect()
    }

    #[test]
    fn a_changed_section_is_told_by_its_options() {
        let before = words("qemu -m 32M -smp 1 -device a");
        assert_eq!(difference(&before, &words("qemu -m 48M -smp 1 -device a")), "now -m 48M, before -m 32M");
        assert_eq!(difference(&before, &words("qemu -m 32M -smp 1 -device a -device b")), "now -device b");
        assert_eq!(difference(&before, &words("other -m 32M -smp 1 -device a")), "QEMU is other now");
        let long = "x".repeat(500);
        assert!(difference(&before, &words(&format!("qemu -append {long}"))).chars().count() < 400);
    }
}
