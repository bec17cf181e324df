//! The fd store of a running fabric: the process that holds what outlives the daemon, found or
//! started.
//!
//! It is a child that leaves the daemon's process group. The next daemon finds it by its socket in
//! the runtime directory. It ends when the fabric does, and by itself when the daemon and
//! everything alive that it holds are gone. Every fabric with vhost-user ports or ivshmem links has
//! one; others get one for the time of a handover.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::SocketType;
use tombolo_ivshmem::fd_store::{self, FdStore};
use tombolo_ivshmem::store::Store;
use tombolo_port::vhost_user::Shelf;
use tombolo_shm::listener::Listener;
use tombolo_switch::port::HandOver;

use super::Say;
use crate::plan::{Attachment, Plan};
use crate::{members, process};

/// How long a store may take to end.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(3);
/// How long a store may take to answer while it waits for a processor or a disk.
const SLOW: Duration = Duration::from_secs(30);
/// How long a store that was told to end may take to be gone.
const ENDS: Duration = Duration::from_millis(500);

/// The store itself: what the hidden subcommand of the program runs. Its standard input is its
/// listening socket, which is at `path`.
///
/// # Errors
/// In words.
pub fn keep(path: &Path) -> Result<(), String> {
    let failed = |what: &str, e: Errno| format!("{what} {}: {e}", path.display());
    // Fails only for the leader of a process group, which a child that was just started is not.
    let _ = rustix::process::setsid();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    // Where it may not be raised, what is beyond it is not kept.
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised);
    let stdin = rustix::io::fcntl_dupfd_cloexec(std::io::stdin(), 3).map_err(|e| failed("taking the socket", e))?;
    // The one descriptor that keeps the name alive is the one that is dropped at the end.
    let null = std::fs::File::open("/dev/null").map_err(|e| e.to_string())?;
    rustix::stdio::dup2_stdin(null).map_err(|e| failed("closing the standard input of", e))?;
    let listener = Listener::adopt(stdin, path).map_err(|e| failed("listening at", e))?;
    fd_store::serve(listener).map_err(|e| failed("keeping at", e))
}

/// Finds the fabric's store, or starts one. Clones share the list of started processes.
#[derive(Clone)]
pub(crate) struct Finder {
    path: PathBuf,
    children: Arc<Mutex<Vec<Child>>>,
}

impl Finder {
    pub(crate) fn new(runtime: &Path) -> Finder {
        Finder { path: runtime.join("keeper.sock"), children: Arc::default() }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a store runs that cannot be reached: its socket was deleted, or it hangs.
    pub(crate) fn is_cut_off(&self) -> bool {
        self.running().is_none() && !process::fd_stores(&self.path).is_empty()
    }

    /// The store that runs. One that was killed may still have its socket for an instant, and one
    /// that hangs has it for ever: so it has to answer. On a machine with too much work it may take
    /// long, and is not given up: what it holds would be lost.
    pub(crate) fn running(&self) -> Option<FdStore> {
        let until = Instant::now() + SLOW;
        let asked = |fd_store: FdStore| fd_store.list_of("nothing has this name").map(|_| fd_store);
        let is_slow = || process::fd_stores(&self.path).iter().any(|store| process::is_busy(store.pid));
        loop {
            match FdStore::connect(&self.path).and_then(asked) {
                Err(Errno::AGAIN) if Instant::now() < until && is_slow() => {}
                found => return found.ok(),
            }
        }
    }

    /// The store that runs, or a new one.
    pub(crate) fn find(&self) -> Result<FdStore, String> {
        // Held throughout, so that two that look for a store do not start two.
        let mut children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
        match self.running() {
            Some(fd_store) => Ok(fd_store),
            // What does not answer, or cannot be reached, is of no use any more.
            None => self.replace(&mut children),
        }
    }

    /// Ends a store that can be connected to and does not answer, and starts another. Who keeps
    /// something in the old one finds it lost with the next word to it, and keeps it in the new
    /// one. Returns whether that was so.
    pub(crate) fn replace_hung(&self) -> bool {
        if super::heal::is_missing(&self.path) || !self.is_cut_off() {
            return false;
        }
        let mut children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
        self.replace(&mut children).is_ok()
    }

    /// Kills every store of this path and starts one.
    fn replace(&self, children: &mut Vec<Child>) -> Result<FdStore, String> {
        process::kill_all(&process::fd_stores(&self.path).iter().collect::<Vec<_>>());
        self.launch(children)
    }

    fn launch(&self, children: &mut Vec<Child>) -> Result<FdStore, String> {
        let path = &self.path;
        let failed = |what: &str, e: &dyn std::fmt::Display| format!("{what} {}: {e}", path.display());
        let listener = Listener::replace(path, SocketType::SEQPACKET).map_err(|e| failed("listening at", &e))?;
        let fd_store = FdStore::connect(path).map_err(|e| failed("connecting to", &e))?;
        let socket = listener.hand_over().map_err(|e| failed("handing over", &e))?;
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("tombolo")
            .arg("keeper")
            .arg(path)
            .stdin(Stdio::from(socket))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A terminal's ^C is for the daemon.
            .process_group(0);
        let child = process::spawn(&mut command).map_err(|e| failed("starting an fd store for", &e))?;
        children.retain_mut(|c| !matches!(c.try_wait(), Ok(Some(_))));
        children.push(child);
        Ok(fd_store)
    }

    /// Ends the store that runs, even if another process started it, and waits for its end.
    pub(crate) fn end(&self) {
        if let Ok(fd_store) = FdStore::connect(&self.path)
            && fd_store.quit().is_ok()
        {
            let limit = Timespec { tv_sec: TIMEOUT.as_secs() as i64, tv_nsec: 0 };
            let mut fds = [PollFd::from_borrowed_fd(fd_store.as_fd(), PollFlags::IN)];
            let _ = poll(&mut fds, Some(&limit));
        }
        self.reap();
        // One that hangs, or whose socket is gone.
        let left = process::fd_stores(&self.path);
        process::kill_all(&left.iter().filter(|p| !p.wait(ENDS)).collect::<Vec<_>>());
    }

    /// Waits for the stores that this process started, which have been told to end.
    pub(crate) fn reap(&self) {
        for child in self.children.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            let _ = process::Process::open(child.id()).is_none_or(|p| p.wait(TIMEOUT));
            // One that hangs keeps nothing of worth any more.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub(crate) fn open(&self, say: &Say) -> Result<Arc<Store>, String> {
        let finder = self.clone();
        Self::open_with(move || finder.find(), say)
    }

    /// The store that another daemon started, which is not this one's to end.
    pub(crate) fn open_found(&self, say: &Say) -> Option<Arc<Store>> {
        let finder = self.clone();
        let mut first = true;
        let find = move || match std::mem::take(&mut first) {
            true => finder.running().ok_or_else(|| "it does not answer".into()),
            false => finder.find(),
        };
        Self::open_with(find, say).ok()
    }

    fn open_with(
        find: impl FnMut() -> Result<FdStore, String> + Send + 'static,
        say: &Say,
    ) -> Result<Arc<Store>, String> {
        let say = say.clone();
        Ok(Arc::new(Store::open(Box::new(find), Box::new(move |text| say(text)))?))
    }
}

/// Whether a plan has what outlives the daemon.
fn wanted(plan: &Plan) -> bool {
    let is_kept = |port: &crate::plan::PortPlan| matches!(port.attachment, Attachment::VhostUser { .. });
    plan.ports.iter().any(is_kept) || plan.all_links().next().is_some()
}

/// The fabric's fd store, where it has one, and what was taken out of it.
pub(crate) struct OwnStore {
    store: Option<Arc<Store>>,
    finder: Finder,
    /// Records of a handover that were taken.
    taken: Vec<String>,
}

impl OwnStore {
    /// No store yet, for the fabric with this runtime directory.
    pub(crate) fn new(folder: &Path) -> OwnStore {
        OwnStore { store: None, finder: Finder::new(folder), taken: vec![] }
    }

    /// Uses the store that the daemon before has answered through.
    pub(crate) fn use_found(&mut self, store: Arc<Store>) {
        self.store = Some(store);
    }

    pub(crate) fn finder(&self) -> &Finder {
        &self.finder
    }

    /// Connects to the store that an earlier daemon left, if there is one.
    pub(crate) fn find(&mut self, say: &Say) {
        if self.store.is_none() && self.finder.running().is_some() {
            self.open(say);
        }
    }

    /// Starts a store where the plan has something for it.
    pub(crate) fn start(&mut self, plan: &Plan, say: &Say) {
        if self.store.is_none() && wanted(plan) {
            self.open(say);
        }
    }

    fn open(&mut self, say: &Say) {
        if let Err(why) = self.opened(say) {
            say(&format!("guests must connect again after a restart, because there is no fd store: {why}"));
        }
    }

    /// The store; started if there is none.
    pub(crate) fn opened(&mut self, say: &Say) -> Result<Arc<Store>, String> {
        match &self.store {
            Some(store) => Ok(store.clone()),
            None => Ok(self.store.insert(self.finder.open(say)?).clone()),
        }
    }

    /// Takes a state that the daemon before put.
    pub(crate) fn take_state(&mut self, name: String) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let state = self.store.as_ref()?.take_state(&name)?;
        self.taken.push(name);
        Some(state)
    }

    /// The final state of a port that the daemon before ran.
    pub(crate) fn take_port(&mut self, port: &str) -> Option<HandOver> {
        let (state, fds) = self.take_state(Shelf::final_name(port))?;
        Some(HandOver { state, fds })
    }

    /// Names of the records that begin like this.
    pub(crate) fn left(&self, beginning: &str) -> Vec<String> {
        self.store.as_ref().map(|store| store.left(beginning)).unwrap_or_default()
    }

    /// Everything is taken up: the rest of what an earlier daemon left goes, and the store with it
    /// if it has no use.
    pub(crate) fn settle(&mut self, plan: &Plan) {
        let Some(store) = &self.store else { return };
        store.forget_all(&super::handover::records(store, &self.taken));
        store.forget_rest();
        if !wanted(plan) {
            store.close();
            self.store = None;
            self.finder.end();
        }
        for (pid, ticks) in members::all() {
            self.refuse(pid, ticks);
        }
    }

    /// Takes note of a machine or helper, which may not use the sockets that are for the owner.
    pub(crate) fn note_member(&self, pid: u32) {
        if let Some(ticks) = members::note(pid) {
            self.refuse(pid, ticks);
        }
    }

    fn refuse(&self, pid: u32, ticks: u64) {
        if let Some(store) = &self.store {
            store.refuse(pid, ticks);
        }
    }

    /// Has the store listen at its path again where that was deleted; whether it is to be looked at
    /// again.
    pub(crate) fn restore(&self) -> bool {
        let Some(store) = self.store.as_ref().filter(|_| super::heal::is_missing(self.finder.path())) else {
            return false;
        };
        store.wake();
        true
    }

    /// A port's place in the store.
    pub(crate) fn shelf(&self, port: &str) -> Option<Shelf> {
        self.store.clone().map(|store| Shelf::new(store, port))
    }

    /// Says good-bye to the store, which may hold links still.
    pub(crate) fn close(&mut self) {
        if let Some(store) = self.store.take() {
            store.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::Signal;

    /// A process that is found as the store at a socket, and works as long as this one is there.
    fn works(folder: &Path, socket: &Path) -> Child {
        std::fs::write(folder.join("keeper"), "while kill -0 $PPID; do :; done").unwrap();
        Command::new("sh").arg("keeper").arg(socket).current_dir(folder).spawn().unwrap()
    }

    #[test]
    fn a_store_that_is_slow_is_waited_for_and_one_that_is_stopped_is_not() {
        let folder = std::env::temp_dir().join(format!("tombolo-fdstore-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let finder = Finder::new(&folder);
        let listener = Listener::replace(finder.path(), SocketType::SEQPACKET).unwrap();
        let mut process = works(&folder, finder.path());
        let pid = process.id();
        let is_stopped = |wanted| {
            while process::is_stopped(pid) != wanted {
                std::thread::yield_now();
            }
        };
        let signal = |signal| process::Process::open(pid).unwrap().signal(signal).unwrap();
        signal(Signal::STOP);
        is_stopped(true);
        assert!(finder.running().is_none() && finder.is_cut_off());
        signal(Signal::CONT);
        is_stopped(false);
        // Beyond what one that hangs is given.
        let asked = Instant::now();
        let serves = std::thread::spawn(move || {
            std::thread::sleep(TIMEOUT + Duration::from_secs(1));
            fd_store::serve(listener)
        });
        let found = finder.running();
        assert!(found.is_some() && asked.elapsed() > TIMEOUT, "{:?}", asked.elapsed());
        drop(found);
        serves.join().unwrap().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
