//! Planned handover: another daemon takes the fabric over while its guests run. See
//! docs/upgrade.md.
//!
//! ```text
//!   new daemon                                   old daemon
//!   ----------                                   ----------
//!   reads the file, checks the plan
//!   "tombolo handover 1"             ──────►     stops control threads, links and workers
//!                                                puts every port's final state into the fd store
//!                                    ◄──────     "ready"
//!   reads the store, starts workers and networks
//!   "commit"                         ──────►     (up to here it can go on by itself)
//!                                    ◄──────     "yours", and exits without clearing up
//!   opens the ports where the others stood
//! ```
//!
//! # What failure does
//! - The new daemon fails, ends or says nothing for two seconds before "commit": the old one goes
//!   on.
//! - The new daemon ends after "commit", or cannot make what its file says: everything is in the
//!   store, and the next `up` takes it from there. What can be refused is refused before it asks
//!   ([`Standing`](super::standing::Standing)).
//! - The old daemon is killed meanwhile: the lock is free, and what it has put is taken as after a
//!   crash.
//!
//! The same final state is put when the daemon is told to leave (SIGUSR2): then the store waits for
//! the next daemon.
//!
//! # Records
//! `final/PORT` the state of a port · `passt/PORT` the passt behind it · `macs/NETWORK` learned
//! addresses · `leases/NETWORK` · `idle/MACHINE` a machine that does not run · `door/SOCKET` where
//! a link listens · `lock` the lock of the runtime directory · `handover` that all of it was put.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use tombolo_ivshmem::links;
use tombolo_ivshmem::store::{Frozen, Store};
use tombolo_port::vhost_user::Shelf;
use tombolo_switch::control::Paused;
use tombolo_switch::wait::Token;

use super::additions::restore_additions_of;
use super::events::{Facts as Told, Kind};
use super::{FabricError, Running, Say, config, facts, namespaces};
use crate::config::Document;
use crate::file::{self, Fabric};
use crate::plan::{self, Facts, Plan};
use crate::process::{self, Process};
use crate::rundir::{self, Owner, RunDir};

/// The first word, with the version of the conversation.
pub(crate) const HELLO: &str = "tombolo handover 1";
/// How long the old daemon pauses for the new one, which has little left to do.
const COMMIT: Duration = Duration::from_secs(2);
/// How long the new daemon waits for the old one.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long control threads may take to finish what they do.
const FREEZE: Duration = Duration::from_millis(100);
/// How long the store waits for the next daemon after one was told to leave.
const LINGER: Duration = Duration::from_secs(60);

/// Where a daemon is asked to hand over.
pub fn socket_path(runtime: &Path) -> PathBuf {
    runtime.join("handover.sock")
}

fn refused(why: impl Into<String>) -> FabricError {
    FabricError::State(format!("the running daemon does not hand over: {}", why.into()))
}

/// All names of a handover's records, those that were taken included.
pub(crate) fn records(store: &Store, taken: &[String]) -> Vec<String> {
    let mut names = taken.to_vec();
    for prefix in ["final/", "passt/", "macs/", "leases/", "door/", "idle/", "lock", "handover"] {
        names.extend(store.left(prefix));
    }
    names
}

/// What a new daemon has from the old one before it is sure.
pub(crate) struct Takeover {
    pub(crate) dir: RunDir,
    pub(crate) facts: Facts,
    pub(crate) prepared: Prepared,
    pub(crate) store: Arc<Store>,
    pub(crate) commit: Commit,
}

/// What the new daemon has found out while the old one still worked.
pub(crate) struct Prepared {
    pub(crate) plan: Plan,
    /// The fabric's machines, as [`process::machines`] has them.
    pub(crate) machines: Vec<(String, Process, Vec<String>)>,
}

/// The connection to the old daemon, which waits.
pub(crate) struct Commit {
    reader: BufReader<UnixStream>,
    old: Owner,
}

/// The record of a daemon.
fn record_of(runtime: &Path) -> Option<Owner> {
    serde_json::from_slice(&std::fs::read(runtime.join("owner.json")).ok()?).ok()
}

/// The fabric of a file as the daemon of this record runs it: with what was changed and added
/// since. What does not fit is told once it is certain that this daemon takes over.
fn with_changes(spec: &Fabric, base: Option<&Document>, file: &Path, owner: &Owner) -> Fabric {
    if owner.file != file {
        return spec.clone();
    }
    let full = config::changed(spec, base, &owner.changes, file).unwrap_or_else(|_| spec.clone());
    restore_additions_of(full, &owner.additions, &mut |_, _| ())
}

/// The namespaces that a daemon which takes over is to find, by members. Their paths may not
/// answer, so they are looked at before another daemon is asked: it pauses for [`COMMIT`] only.
/// Empty where none runs.
pub(crate) fn namespaces(spec: &Fabric, base: Option<&Document>, file: &Path) -> BTreeMap<String, String> {
    let owner = rundir::runtime_root().ok().and_then(|root| record_of(&root.join(&spec.name)));
    owner.map(|owner| namespaces::of(&with_changes(spec, base, file, &owner))).unwrap_or_default()
}

impl Takeover {
    /// Asks the daemon that runs this fabric to hand over; `None` where none runs. Checks first
    /// what can be checked. `base` is the content of the file. Namespaces of members that are
    /// `silent` did not answer.
    pub(crate) fn begin(
        spec: &Fabric,
        base: Option<&Document>,
        file: &Path,
        silent: &BTreeMap<String, String>,
        say: &Say,
    ) -> Result<Option<Takeover>, FabricError> {
        let root = rundir::runtime_root()?;
        let folder = root.join(&spec.name);
        if !rundir::running(&root).contains(&spec.name) {
            return Ok(None);
        }
        let read = || record_of(&folder).ok_or_else(|| refused("its record owner.json cannot be read"));
        let owner = read()?;
        let full = with_changes(spec, base, file, &owner);
        let facts = facts(&full, folder.clone());
        let plan = plan::plan(&full, &facts)?;
        if let Some(standing) = &owner.standing {
            // What is there is handed over. What is new has to be opened.
            let is_new = |tap: &&file::Tap| !standing.has(&format!("tap.{}", tap.name), "device", &tap.device);
            let new = full.taps.iter().filter(is_new).find_map(|tap| silent.get_key_value(&tap.name));
            if let Some((port, why)) = new {
                return Err(FabricError::Port { port: port.clone(), why: why.clone() });
            }
            standing.check(&full, &plan, file)?;
        }
        let finder = super::fdstore::Finder::new(&folder);
        let unreachable = || {
            refused(
                "its fd store cannot be reached: expected it to listen at keeper.sock; the running daemon creates a \
                 deleted socket again, so try again in a few seconds; else run `tombolo down` and `tombolo up`",
            )
        };
        // One that hangs is replaced by the daemon that is asked.
        if super::heal::is_missing(finder.path()) && finder.is_cut_off() {
            return Err(unreachable());
        }
        let before = (owner.additions.clone(), owner.changes.clone());
        let mut commit = Commit::ask(&folder, owner)?;
        // Written again while it made ready.
        commit.old = read()?;
        if (&commit.old.additions, &commit.old.changes) != (&before.0, &before.1) {
            return Err(refused("its members or settings have just changed; try again"));
        }
        // Not before the old daemon is paused: until then it may start another one.
        let machines = process::machines(&spec.name, &folder);
        let store = finder.open_found(say).ok_or_else(unreachable)?;
        // Taken out at once: its holder keeps the fabric from every other process.
        let lock = store.take("lock");
        store.forget("lock");
        let lock = lock.and_then(|record| record.fds.into_iter().next());
        let lock = lock.ok_or_else(|| refused("the lock of its runtime directory is not in the fd store"))?;
        let dir = RunDir::inherit(&spec.name, file, lock)?;
        Ok(Some(Takeover { dir, facts, prepared: Prepared { plan, machines }, store, commit }))
    }
}

/// A line of at most 64 bytes, which is there within `limit`, however it is dealt out.
fn line_within(socket: &mut UnixStream, limit: Duration) -> std::io::Result<String> {
    let until = Instant::now() + limit;
    let mut out = Vec::new();
    while out.len() < 64 && out.last() != Some(&b'\n') {
        let left = until.saturating_duration_since(Instant::now());
        // A timeout of zero would be none at all.
        socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let mut byte = [0];
        match socket.read(&mut byte) {
            Ok(0) => break,
            Ok(_) if left.is_zero() => return Err(std::io::ErrorKind::TimedOut.into()),
            Ok(_) => out.push(byte[0]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&out).trim_end().to_string())
}

/// A connection that waits so long for room in the queue of its listener. Each write to it may take
/// as long, too.
fn connect_within(path: &Path, limit: Duration) -> std::io::Result<UnixStream> {
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    net::sockopt::set_socket_timeout(&socket, net::sockopt::Timeout::Send, Some(limit))?;
    match net::connect(&socket, &SocketAddrUnix::new(path)?) {
        Ok(()) => Ok(socket.into()),
        Err(Errno::AGAIN) => {
            let text = format!("its queue of connections has been full for {} s", limit.as_secs());
            Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text))
        }
        Err(errno) => Err(errno.into()),
    }
}

impl Commit {
    fn ask(folder: &Path, old: Owner) -> Result<Commit, FabricError> {
        let path = socket_path(folder);
        let failed = |e: std::io::Error| refused(format!("{}: {e}", path.display()));
        let socket = connect_within(&path, TIMEOUT).map_err(failed)?;
        socket.set_read_timeout(Some(TIMEOUT)).map_err(failed)?;
        let mut commit = Commit { reader: BufReader::new(socket), old };
        commit.say(HELLO).map_err(failed)?;
        match commit.hear() {
            Ok(line) if line == "ready" => Ok(commit),
            Ok(line) if line.is_empty() => Err(refused("it closed the connection; its log says why")),
            Ok(line) => Err(refused(line)),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                Err(refused(format!("it did not answer within {} s", TIMEOUT.as_secs())))
            }
            Err(error) => Err(refused(error.to_string())),
        }
    }

    fn say(&mut self, line: &str) -> std::io::Result<()> {
        writeln!(self.reader.get_mut(), "{line}")
    }

    fn hear(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        self.reader.read_line(&mut line)?;
        Ok(line.trim_end().to_string())
    }

    /// Takes over for good. After an error the old daemon goes on.
    pub(crate) fn commit(mut self) -> Result<(), FabricError> {
        let old = Process::open(self.old.pid);
        let said = self.say("commit").and_then(|()| self.hear());
        if matches!(&said, Ok(line) if line == "yours") {
            return Ok(());
        }
        // It may have ended at this very instant: then no other process has the fabric.
        if process::start_ticks(self.old.pid) != Some(self.old.started_ticks) || old.is_none_or(|p| !p.is_running()) {
            return Ok(());
        }
        Err(refused(said.map_or_else(|error| error.to_string(), |line| format!("it answered {line:?} to commit"))))
    }
}

/// Everything is paused until this is dropped. The order of the fields is the order in which it
/// resumes.
struct Standstill<'r> {
    _paused: Vec<Paused>,
    _links: Option<links::Standstill<'r>>,
    _frozen: Frozen,
}

impl Running {
    /// Answers a daemon that wants to take over. Does not return if that one does: this process
    /// ends. Blocks for as long as the other one may take to say so; its first words were heard
    /// already.
    pub(crate) fn hand_over(&mut self, mut socket: UnixStream) {
        let (say, events) = (self.say.clone(), self.events.clone());
        if self.applying {
            let why = "it is being changed by another command or request; try again in a few seconds";
            // The other daemon may have gone.
            let _ = writeln!(socket, "{why}");
            return;
        }
        if self.store.finder().replace_hung() {
            say("the fd store did not answer and was replaced");
        }
        match self.stand_still(true) {
            Ok((standstill, store, names)) => {
                // From the next one's "commit" on it is the one that writes.
                events.flush();
                let set = socket.set_write_timeout(Some(COMMIT));
                let heard =
                    set.and_then(|()| writeln!(socket, "ready")).and_then(|()| line_within(&mut socket, COMMIT));
                if heard.is_ok_and(|line| line == "commit") {
                    say("another daemon has taken over; the guests run on");
                    let _ = writeln!(socket, "yours");
                    // Nothing is cleared up: all of it is the other's now.
                    std::process::exit(0);
                }
                // Closed before anything goes on here: a late "commit" finds no receiver.
                drop(socket);
                store.forget_all(&names);
                drop(standstill);
                say("handover: the other daemon did not take over; this one continues");
            }
            Err(why) => {
                let _ = writeln!(socket, "{why}");
                say(&format!("handover: {why}; this daemon continues"));
            }
        }
        // The other one had written its own number there.
        self.dir().record(|_| ());
    }

    /// Leaves everything to the next daemon and ends this process. Returns only if that cannot be:
    /// [`FabricError::Busy`] while an apply is under way.
    pub(crate) fn leave(&mut self) -> FabricError {
        let say = self.say.clone();
        if self.applying {
            return FabricError::Busy(
                "another command or request changes the fabric, and its end is waited for".into(),
            );
        }
        self.dir().record(|o| o.left = true);
        // A tap keeps its namespace alive, and a container may end before the next daemon is there.
        // That one attaches by the interface's name.
        let taps = self.spec.contained().filter(|member| member.word == "tap");
        let taps: Vec<_> = taps.map(|member| Shelf::final_name(member.name)).collect();
        let result = self.stand_still(false).and_then(|(standstill, store, names)| match store.linger(LINGER) {
            Ok(()) => {
                store.forget_all(&taps);
                std::mem::forget(standstill);
                Ok(())
            }
            Err(error) => {
                store.forget_all(&names);
                Err(format!("the fd store is lost: {error}"))
            }
        });
        match result {
            Ok(()) => {
                self.events.add(Kind::Down, Told::of(&self.spec.name), "the daemon leaves the guests to the next one");
                self.events.flush();
                say(
                    "leaving the guests to the next daemon; without a running guest the fd store waits a minute for it",
                );
                std::process::exit(0);
            }
            Err(why) => {
                self.dir().record(|o| o.left = false);
                FabricError::State(why)
            }
        }
    }

    /// After a failure of this daemon that has taken over already: what it has opened is put into
    /// the store again, beside what it has not come to, and waits there for the next daemon. The
    /// caller must drop nothing of this fabric.
    pub(crate) fn leave_after_failure(&mut self) {
        let say = self.say.clone();
        let put = self.stand_still(false).and_then(|(standstill, store, _)| {
            std::mem::forget(standstill);
            store.linger(LINGER).map_err(|error| format!("the fd store is lost: {error}"))
        });
        match put {
            Ok(()) => say("this daemon cannot go on: what the guests need waits a minute for the next one"),
            Err(why) => say(&format!("what the guests need may be incomplete for the next daemon: {why}")),
        }
    }

    /// Stops everything that acts and puts its state into the store, with the lock for a daemon
    /// that waits for it. On an error everything goes on.
    fn stand_still(&mut self, with_lock: bool) -> Result<(Standstill<'_>, Arc<Store>, Vec<String>), String> {
        let store = self.store.opened(&self.say)?;
        self.note_all_settled();
        let frozen = store.freeze(FREEZE);
        let links = self.links().map(|links| links.freeze());
        let paused: Result<Vec<Paused>, _> = self.workers.iter().map(|w| w.thread.handle().pause()).collect();
        let paused = paused.map_err(|error| error.to_string())?;
        let mut names = Vec::new();
        match self.put_finals(&store, &paused, links.as_ref(), with_lock, &mut names) {
            Ok(()) => Ok((Standstill { _paused: paused, _links: links, _frozen: frozen }, store, names)),
            Err(error) => {
                store.forget_all(&names);
                Err(format!("the fd store does not accept the state of the ports: {error}"))
            }
        }
    }

    fn put_finals(
        &self,
        store: &Store,
        paused: &[Paused],
        links: Option<&links::Standstill<'_>>,
        with_lock: bool,
        names: &mut Vec<String>,
    ) -> Result<(), rustix::io::Errno> {
        let mut put = |name: String, state: &[u8], fds: &[BorrowedFd<'_>]| {
            let done = store.put_state(&name, state, fds);
            names.push(name);
            done
        };
        for Paused { ports, macs, .. } in paused {
            for (port, handed) in ports {
                let fds: Vec<BorrowedFd<'_>> = handed.fds.iter().map(AsFd::as_fd).collect();
                put(Shelf::final_name(port), &handed.state, &fds)?;
            }
            for (network, learned) in macs {
                let line = |(mac, port): &([u8; 6], Arc<str>)| format!("{} {port}\n", file::Mac(*mac));
                put(format!("macs/{network}"), learned.iter().map(line).collect::<String>().as_bytes(), &[])?;
            }
        }
        for (name, port) in &self.ports {
            if let Some(process) = port.passt_pid().and_then(Process::open) {
                put(format!("passt/{name}"), &process.pid.to_le_bytes(), &[process.pidfd.as_fd()])?;
            }
        }
        for (name, machine) in
            self.machines.iter().filter(|(_, m)| m.pid.is_none() && !m.waits && (m.stopped || m.again_at.is_none()))
        {
            let how = machine.ended.as_ref().map_or("", |ended| &ended.how);
            put(format!("idle/{name}"), how.as_bytes(), &[])?;
        }
        for (name, net) in &self.networks {
            // Its writer may be behind by the last change.
            if let Some(Ok(leases)) = net.gateway.as_ref().map(|gateway| serde_json::to_vec(&gateway.leases())) {
                put(format!("leases/{name}"), &leases, &[])?;
            }
        }
        for (path, door) in links.iter().flat_map(|links| links.doors()) {
            let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
            put(format!("door/{name}"), path.as_os_str().as_encoded_bytes(), &[door])?;
        }
        // When a daemon has ended, no process may hold its lock.
        if let Some(dir) = self.dir.as_ref().filter(|_| with_lock) {
            put("lock".into(), &[], &[dir.lock()])?;
        }
        put("handover".into(), &std::process::id().to_le_bytes(), &[])
    }

    /// The sockets where the daemon before listened for peers of links.
    pub(crate) fn take_doors(&mut self) {
        for name in self.store.left("door/") {
            let Some((path, fds)) = self.store.take_state(name) else { continue };
            // The bytes are those of a path; another one is not found among the doors.
            let path = PathBuf::from(String::from_utf8_lossy(&path).into_owned());
            if let Some(links) = self.links() {
                links.adopt_doors(fds.into_iter().map(|fd| (path.clone(), fd)));
            }
        }
    }

    /// Teaches the networks what the daemon before had learned.
    pub(crate) fn teach(&mut self) {
        let names: Vec<String> = self.networks.keys().cloned().collect();
        for name in names {
            let Some((text, _)) = self.store.take_state(format!("macs/{name}")) else { continue };
            let entry = |line: &str| -> Option<([u8; 6], Token)> {
                let (mac, port) = line.split_once(' ')?;
                let bytes: Result<Vec<u8>, _> = mac.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect();
                Some((bytes.ok()?.try_into().ok()?, self.ports.get(port)?.token))
            };
            let learned = String::from_utf8_lossy(&text).lines().filter_map(entry).collect();
            if let (Some(net), Some((_, worker))) = (self.networks.get(&name), self.worker_of(&name)) {
                // A worker that has ended is reported by itself.
                let _ = worker.thread.handle().teach(net.id, learned);
            }
        }
    }
}
