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
//! # Parts
//! [`Running`] has what runs by name: workers, networks, ports, machines. Each of its other parts
//! owns its data, and its methods are given what they need of the rest: the fd store (`OwnStore`),
//! the daemon before (`Predecessor`), kernel uplinks (`Uplinks`), the bypass (`NetworksBypass`),
//! deleted runtime files (`Deleted`), links (`SharedMemory`), other machines (`Span`), events
//! (`Events`) and containers (`Containers`). `start`, `additions`, `apply` and `down` put the parts
//! in order.
//!
//! # Threads
//! One async thread owns the `Running` behind a mutex. Workers run on their own. Waiting for
//! processes to end happens outside the mutex.

mod additions;
mod adopt;
mod apply;
mod backoff;
mod bypass;
mod capture;
mod config;
mod containers;
mod domains;
mod down;
mod drive;
mod ending;
pub mod events;
mod facts;
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
mod start;
mod steps;
mod tables;
mod uplinks;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::Mutex;
use tombolo_bypass::attachment::AttachError;
use tombolo_ivshmem::links::LinkError;
use tombolo_switch::control::ControlError;
use tombolo_worker::thread::{WorkerError, WorkerThread};

use crate::config::Document;
use crate::file::{self, Fabric, FileError, Which};
use crate::kernel::KernelError;
use crate::notify;
use crate::plan::{self, Facts, PlanError, PortPlan};
use crate::preflight;
use crate::rundir::{RunDir, RunDirError};

use adopt::Predecessor;
use bypass::NetworksBypass;
pub use down::clean_up;
pub use drive::drive;
use events::{Events, Facts as Told, Kind};
pub use facts::facts;
use fdstore::OwnStore;
use heal::Deleted;
pub use machine::Ended;
use machine::RunningMachine;
use network::Net;
use ports::RunningPort;
use uplinks::Uplinks;

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
    pub(crate) store: OwnStore,
    before: Predecessor,
    /// Links of shared memory, where there are some.
    pub(crate) shared: Option<shared::SharedMemory>,
    /// What passes calls on between links and services, by link.
    pub(crate) bridges: BTreeMap<String, services::RunningBridge>,
    pub(crate) bypass: NetworksBypass,
    pub(crate) uplinks: Uplinks,
    pub(crate) say: Say,
    /// What the user should know of this start.
    pub(crate) notes: Vec<String>,
    pub(crate) deleted: Deleted,
    pub(crate) me: std::sync::Weak<Mutex<Running>>,
    /// An apply is under way: nothing else may change the fabric.
    pub(crate) applying: bool,
    /// What happened.
    pub(crate) events: Events,
    /// What the control plane has said of other machines.
    pub(crate) span: span::Span,
    /// What of the ports is told in `events`.
    pub(crate) watched: events::Watched,
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
        if !running.before.has_handed_over {
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

/// Why a request that would change the fabric is refused.
const APPLY_RUNS: &str = "the fabric is being changed by another command or request; try again when that is done";

/// The directory, where the rest of [`Running`] is borrowed too.
fn dir_of(dir: &mut Option<RunDir>) -> &mut RunDir {
    dir.as_mut().expect("the directory is there until take_down, which is the last call")
}

impl Running {
    /// A fabric of which nothing runs yet.
    fn new(spec: Fabric, file: PathBuf, dir: RunDir, facts: Facts, say: Say) -> Running {
        let containers = dir.owner().containers.clone();
        Running {
            store: OwnStore::new(dir.path()),
            before: Predecessor::default(),
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
            bypass: NetworksBypass::default(),
            uplinks: Uplinks::default(),
            say,
            notes: vec![],
            deleted: Deleted::default(),
            me: std::sync::Weak::new(),
            applying: false,
            events: Events::default(),
            span: span::Span::default(),
            watched: events::Watched::default(),
            unadded: BTreeSet::new(),
            containers,
            silent: BTreeMap::new(),
        }
    }

    pub(crate) fn dir(&mut self) -> &mut RunDir {
        dir_of(&mut self.dir)
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
        self.before.told.push(what);
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
