//! Runtime files that are deleted under a running fabric come back.
//!
//! # Purpose
//! A cleaner of temporary files, or an `rm -rf`, takes names away and nothing else: the daemon runs
//! on with its lock, taps and connections. The daemon watches its runtime directory (inotify(7))
//! and makes again what is missing: the directory, its lock and record, the sockets of ports and
//! links, of the API, of handovers and of the fd store. So all commands find it as before.
//!
//! # Limits
//! A port whose peer is connected keeps its connection, and gets its socket again when the peer
//! goes. A machine's console and monitor belong to its QEMU and come back when it is started again.
//! Without inotify the directory is looked at once a second.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::unix::AsyncFd;
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinSet;

use super::{FabricError, Running, handover, handover_socket};
use crate::api::Requests;
use crate::api::server::Server;
use crate::plan::{Attachment, PortPlan};

/// How long after an event is looked: `rm -rf` takes one file after the other.
const SETTLE: Duration = Duration::from_millis(100);
/// How often is looked again while something cannot be made, or nothing tells of changes.
const AGAIN: Duration = Duration::from_secs(1);

/// Tells of names that go from a directory.
struct Watch {
    fd: AsyncFd<OwnedFd>,
}

impl Watch {
    fn new() -> Option<Watch> {
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).ok()?;
        #[expect(
            deprecated,
            reason = "unsound for a type that gives another descriptor each time; an OwnedFd does not"
        )]
        let fd = AsyncFd::new(fd).ok()?;
        Some(Watch { fd })
    }

    /// Watches the directory that is at `folder` now; whether there is one.
    fn look_at(&self, folder: &Path) -> bool {
        let flags = WatchFlags::DELETE | WatchFlags::MOVED_FROM | WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF;
        inotify::add_watch(self.fd.get_ref(), folder, flags).is_ok()
    }

    /// Returns once a name has gone.
    async fn changed(&self) {
        let Ok(mut guard) = self.fd.readable().await else { return std::future::pending().await };
        let mut buffer = [MaybeUninit::uninit(); 4096];
        // Which names is looked up afterwards.
        while rustix::io::read(self.fd.get_ref(), &mut buffer).is_ok_and(|(read, _)| !read.is_empty()) {}
        guard.clear_ready();
    }
}

/// Whether nothing has that name.
pub(super) fn is_missing(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound)
}

/// The socket in the runtime directory at which a port's peers find it.
fn own_socket(plan: &PortPlan) -> Option<&Path> {
    match &plan.attachment {
        Attachment::VhostUser { socket, connect: false, .. } | Attachment::Stream { socket, connect: false } => {
            Some(socket)
        }
        _ => None,
    }
}

/// What of the runtime directory was deleted while the fabric runs.
#[derive(Default)]
pub(crate) struct Deleted {
    /// What is not there again, a sentence each.
    pub(super) faults: Vec<String>,
    /// Ports that could not be made again.
    ports: Vec<PortPlan>,
}

impl Deleted {
    /// Forgets a port that goes.
    pub(super) fn forget(&mut self, port: &str) {
        self.ports.retain(|plan| plan.name != port);
    }
}

impl Running {
    /// Makes missing runtime files again, except for the API's socket. Returns whether something is
    /// left to be made.
    pub(super) fn restore_files(&mut self) -> bool {
        let Some(dir) = &mut self.dir else { return false };
        let restored = dir.restore();
        self.deleted.faults.clear();
        match restored {
            Ok(false) => {}
            Ok(true) => (self.say)("runtime files were deleted, and are created again"),
            Err(error) => {
                self.deleted.faults.push(format!("runtime files were deleted and cannot be created again: {error}"));
                return true;
            }
        }
        let is_gone = |plan: &&PortPlan| own_socket(plan).is_some_and(is_missing);
        let gone: Vec<PortPlan> = self.ports.values().map(|p| &p.plan).filter(is_gone).cloned().collect();
        let gone: Vec<PortPlan> = std::mem::take(&mut self.deleted.ports).into_iter().chain(gone).collect();
        if gone.is_empty() {
            return false;
        }
        let connected = self.connected();
        for plan in gone {
            if connected.contains(&plan.name) {
                let text = "its socket was deleted; its peer stays connected, and the socket is created again when \
                    the peer \
                     disconnects";
                self.deleted.faults.push(format!("port {}: {text}", plan.name));
                continue;
            }
            // An error is among those of the status, and it is tried again.
            let _ = self.make_again(plan);
        }
        self.update_names();
        !self.deleted.faults.is_empty()
    }

    /// Makes a port again whose socket was deleted.
    fn make_again(&mut self, plan: PortPlan) -> Result<(), FabricError> {
        self.drop_port(&plan.name);
        let made = self.add_port(&plan);
        match &made {
            Ok(()) => {
                let machine = plan.machine.as_ref().and_then(|m| Some((m, self.machines.get(m)?.pid?)));
                if let Some((name, pid)) = machine {
                    self.settle(name, pid);
                }
            }
            Err(error) => {
                self.deleted.faults.push(format!("port {} cannot be created again: {error}", plan.name));
                self.deleted.ports.push(plan);
            }
        }
        made
    }

    /// Makes deleted files again that a machine needs when it starts. QEMU before 8.0 connects to
    /// the socket of a stream once, when it starts, and runs on without a network if there is none.
    /// The machine does not run, so a connection that a port still has is over.
    ///
    /// # Errors
    /// If a port of the machine cannot be made again.
    pub(super) fn restore_for(&mut self, machine: &str) -> Result<(), FabricError> {
        self.restore_files();
        let is_own = |plan: &PortPlan| plan.machine.as_deref() == Some(machine);
        let (mut gone, others): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.deleted.ports).into_iter().partition(is_own);
        self.deleted.ports = others;
        let plans = self.ports.values().map(|p| &p.plan);
        gone.extend(plans.filter(|p| is_own(p) && own_socket(p).is_some_and(is_missing)).cloned());
        if gone.is_empty() {
            return Ok(());
        }
        let made = gone.into_iter().map(|plan| self.make_again(plan)).collect::<Vec<_>>();
        self.update_names();
        made.into_iter().collect()
    }

    /// Names of the ports whose peers are connected.
    fn connected(&self) -> Vec<String> {
        let statuses = self.workers.iter().filter_map(|w| w.thread.handle().status().ok());
        let ports = statuses.flat_map(|s| s.ports);
        let is_connected = |key: &str, value: &str| match key {
            "frontend" => value == "connected",
            "peer" => value != "none",
            _ => false,
        };
        let connected = ports.filter(|p| p.details.iter().any(|(key, value)| is_connected(key, value.text())));
        connected.map(|p| p.name.to_string()).collect()
    }
}

/// Serves the API, and keeps the runtime files there, until `ended` is done. Returns once the last
/// answer is sent.
pub(crate) async fn keep(
    me: Weak<Mutex<Running>>,
    server: Server,
    folder: PathBuf,
    requests: Requests,
    mut ended: oneshot::Receiver<()>,
) {
    let socket = folder.join("api.sock");
    let watch = Watch::new();
    let mut is_watched = watch.as_ref().is_some_and(|w| w.look_at(&folder));
    let mut serving = JoinSet::new();
    let mut serve = |server: Server| {
        let (stop, stopped) = oneshot::channel::<()>();
        let requests = requests.clone();
        serving.spawn(server.serve(requests, async {
            let _ = stopped.await;
        }));
        stop
    };
    let mut stop = serve(server);
    let handover = handover::socket_path(&folder);
    // What could not be made at the start, as on a full disk, tells of no change.
    let mut is_pending = true;
    let mut asked = match me.upgrade() {
        Some(running) => {
            let say = running.lock().await.say.clone();
            let asked = handover_socket::serve(&folder, requests.clone(), say.clone());
            asked.inspect_err(|e| say(&format!("`up --replace` will not work: {}: {e}", handover.display()))).ok()
        }
        None => None,
    };
    loop {
        let changed = async {
            match &watch {
                Some(watch) if is_watched => watch.changed().await,
                _ => std::future::pending().await,
            }
        };
        let again = async {
            match is_pending || !is_watched {
                true => tokio::time::sleep(AGAIN).await,
                false => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = &mut ended => break,
            () = changed => tokio::time::sleep(SETTLE).await,
            () = again => {}
        }
        let Some(running) = me.upgrade() else { continue };
        // The files of a fabric that goes down go with it.
        let mut running = tokio::select! {
            _ = &mut ended => break,
            running = running.lock() => running,
        };
        if running.dir.is_none() {
            is_pending = false;
            is_watched = watch.is_some();
            continue;
        }
        is_pending = running.restore_files();
        is_pending |= running.store.restore() | running.restore_links();
        if is_missing(&socket) {
            match Server::bind(&socket) {
                // The connections of the one before come to their ends.
                Ok(server) => stop = serve(server),
                Err(error) => {
                    running
                        .deleted
                        .faults
                        .push(format!("the API's socket was deleted and cannot be created again: {error}"));
                    is_pending = true;
                }
            }
        }
        if is_missing(&handover) {
            match handover_socket::serve(&folder, requests.clone(), running.say.clone()) {
                Ok(task) => asked.replace(task).into_iter().for_each(|old| old.abort()),
                Err(error) => {
                    running
                        .deleted
                        .faults
                        .push(format!("{} was deleted and cannot be created again: {error}", handover.display()));
                    is_pending = true;
                }
            }
        }
        is_watched = watch.as_ref().is_some_and(|w| w.look_at(&folder));
    }
    asked.into_iter().for_each(|task| task.abort());
    drop(stop);
    while serving.join_next().await.is_some() {}
}
