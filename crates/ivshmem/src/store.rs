//! The daemon's side of the fd store, for everything except ivshmem links. Ports put their
//! connections there, and the next daemon takes them out again. The store itself is [`fd_store`].
//!
//! # Two uses
//! - A port keeps its record up to date at each change, so that it survives a daemon that is killed
//!   (vhost-user).
//! - In a planned handover every port puts its final state there (taps, streams, listeners), see
//!   docs/upgrade.md.
//!
//! # Freezing
//! Control threads act inside [`Store::enter`]. [`Store::freeze`] waits until no thread is inside,
//! and keeps threads out until the returned guard is dropped. Work that a thread has begun and does
//! not finish in time is left in doubt in the store. The next daemon closes that connection.
//!
//! # Failure
//! A store that is lost is replaced once per change. If that fails, ports continue, and connect
//! again after a restart.

use crate::fd_store::{self, FdStore, StoredRecord};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What the names of this module's records begin with; names of links' records do not.
pub const PREFIX: &str = "fd:";
/// Longest state that can be kept: 64 MiB.
pub const MAX_STATE_BYTES: u64 = 1 << 26;
/// A state up to this long is kept in its record; a longer one in a memfd behind its descriptors.
const INLINE_BYTES: usize = 2048;
const INLINE: u8 = 0;
const IN_MEMORY: u8 = 1;

/// Finds a store, or starts one.
pub type Find = Box<dyn FnMut() -> Result<FdStore, String> + Send>;
/// Told what the user should know, in a sentence.
pub type Tell = Box<dyn Fn(&str) + Send + Sync>;

struct StoreState {
    fd_store: Option<FdStore>,
    find: Find,
    /// Records of an earlier daemon that no port has taken.
    left: BTreeMap<String, StoredRecord>,
    frozen: bool,
    busy: usize,
    closed: bool,
}

/// The connection to the fd store, shared by all ports of a fabric.
pub struct Store {
    state: Mutex<StoreState>,
    changed: Condvar,
    tell: Tell,
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store").finish_non_exhaustive()
    }
}

/// A control thread is acting; see [`Store::enter`].
#[derive(Debug)]
pub struct Busy<'s>(&'s Store);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.lock().busy -= 1;
        self.0.changed.notify_all();
    }
}

/// Control threads are kept out until this is dropped.
#[derive(Debug)]
pub struct Frozen(Arc<Store>);

impl Drop for Frozen {
    fn drop(&mut self) {
        self.0.lock().frozen = false;
        self.0.changed.notify_all();
    }
}

impl Store {
    /// Finds the store and reads what an earlier daemon left in it.
    ///
    /// # Errors
    /// Why there is none, in words.
    pub fn open(mut find: Find, tell: Tell) -> Result<Store, String> {
        let fd_store = find()?;
        let records = fd_store.list_slowly(PREFIX).map_err(|e| format!("the fd store does not answer: {e}"))?;
        let left = records.into_iter().filter_map(|r| Some((r.name.strip_prefix(PREFIX)?.to_string(), r)));
        let state =
            StoreState { fd_store: Some(fd_store), find, left: left.collect(), frozen: false, busy: 0, closed: false };
        Ok(Store { state: Mutex::new(state), changed: Condvar::new(), tell })
    }

    /// Passes `text` to the function that the store was opened with.
    pub fn tell(&self, text: &str) {
        (self.tell)(text);
    }

    fn lock(&self) -> MutexGuard<'_, StoreState> {
        // Nothing is left half-changed by a panic: fields are set one by one, each with a meaning
        // of its own.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, what: impl Fn(&FdStore) -> Result<(), Errno>) -> Result<(), Errno> {
        self.say_to(&mut self.lock(), what)
    }

    /// What is of no use in another store than the one that it is about.
    fn say_here(&self, what: impl Fn(&FdStore) -> Result<(), Errno>) {
        if let Some(fd_store) = &self.lock().fd_store {
            // One that is lost is replaced at the next change.
            let _ = what(fd_store);
        }
    }

    /// No more is kept, and no store is started in place of one that ends: the fabric goes down.
    pub fn close(&self) {
        let mut state = self.lock();
        (state.fd_store, state.closed) = (None, true);
    }

    fn say_to(&self, state: &mut StoreState, what: impl Fn(&FdStore) -> Result<(), Errno>) -> Result<(), Errno> {
        let error = match state.fd_store.as_ref().map(&what) {
            Some(Ok(())) => return Ok(()),
            // The record's own fault, not the store's.
            Some(Err(error @ (Errno::MSGSIZE | Errno::TOOBIG))) => return Err(error),
            Some(Err(error)) => error,
            None => Errno::NOTCONN,
        };
        if state.closed {
            return Err(error);
        }
        state.fd_store = (state.find)().ok();
        state.fd_store.as_ref().map_or(Err(error), what)
    }

    /// Keeps a record, in place of the one of that name. What is kept this way is no reason for the
    /// store to stay.
    ///
    /// # Errors
    /// `EMSGSIZE` and `E2BIG` beyond the limits of a record; else there is no store.
    pub fn put(&self, name: &str, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let name = format!("{PREFIX}{name}");
        self.say(|fd_store| fd_store.put(&name, bytes, fds, 0))
    }

    /// Keeps a state of any size up to [`MAX_STATE_BYTES`], with its descriptors, for
    /// [`Store::take_state`].
    ///
    /// # Errors
    /// As for [`Store::put`]; and the kernel's, where there is no memory for it.
    pub fn put_state(&self, name: &str, state: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        if state.len() <= INLINE_BYTES {
            return self.put(name, &[&[INLINE], state].concat(), fds);
        }
        if state.len() as u64 > MAX_STATE_BYTES {
            return Err(Errno::FBIG);
        }
        let memory = rustix::fs::memfd_create("tombolo-state", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut at = 0;
        while at < state.len() {
            at += rustix::io::pwrite(&memory, &state[at..], at as u64)?;
        }
        self.put(name, &[IN_MEMORY], &[fds, &[memory.as_fd()]].concat())
    }

    /// Takes what [`Store::put_state`] of an earlier daemon kept: the state and its descriptors.
    pub fn take_state(&self, name: &str) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
        let mut record = self.take(name)?;
        match record.bytes.split_first()? {
            (&INLINE, state) => Some((state.to_vec(), record.fds)),
            (&IN_MEMORY, []) => {
                let memory = record.fds.pop()?;
                let size = u64::try_from(rustix::fs::fstat(&memory).ok()?.st_size).ok()?;
                let mut state = vec![0; usize::try_from(size.min(MAX_STATE_BYTES)).ok()?];
                let mut at = 0;
                while at < state.len() {
                    match rustix::io::pread(&memory, &mut state[at..], at as u64).ok()? {
                        0 => return None,
                        n => at += n,
                    }
                }
                Some((state, record.fds))
            }
            _ => None,
        }
    }

    /// Keeps a connection (the first descriptor) whose peer expects answers, and ends its doubt.
    ///
    /// # Errors
    /// As for [`Store::put`].
    pub fn put_connection(&self, name: &str, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let name = format!("{PREFIX}{name}");
        self.say(|fd_store| fd_store.put_connection(&name, bytes, fds))
    }

    /// Marks a connection: its peer has asked something that is not answered yet.
    pub fn doubt(&self, name: &str) {
        self.say_here(|fd_store| fd_store.doubt(&format!("{PREFIX}{name}")));
    }

    /// Has the store refuse connections of a process that started at that time, and of those that
    /// descend from it.
    pub fn refuse(&self, pid: u32, start_ticks: u64) {
        self.say_here(|fd_store| fd_store.put(&fd_store::refusal(pid), &start_ticks.to_le_bytes(), &[], 0));
    }

    /// Has the store look after its socket: it listens again where the path was deleted.
    pub fn wake(&self) {
        self.say_here(|fd_store| fd_store.forget("nothing has this name"));
    }

    /// Deletes a record and its descriptors from the store.
    pub fn forget(&self, name: &str) {
        self.say_here(|fd_store| fd_store.forget(&format!("{PREFIX}{name}")));
    }

    /// Has the store stay for `limit` without a daemon.
    ///
    /// # Errors
    /// There is no store.
    pub fn linger(&self, limit: Duration) -> Result<(), Errno> {
        self.say(|fd_store| fd_store.linger(limit))
    }

    /// Takes what an earlier daemon left under a name. The store keeps its copy until it is
    /// replaced or forgotten.
    pub fn take(&self, name: &str) -> Option<StoredRecord> {
        self.lock().left.remove(name)
    }

    /// Names of records that begin with `prefix` and that were not taken.
    pub fn left(&self, prefix: &str) -> Vec<String> {
        self.lock().left.keys().filter(|name| name.starts_with(prefix)).cloned().collect()
    }

    /// Forgets records that a planned handover left, taken or not.
    pub fn forget_all(&self, names: &[String]) {
        for name in names {
            self.lock().left.remove(name);
            self.forget(name);
        }
    }

    /// Forgets the records that were not taken. A connection among them ends.
    pub fn forget_rest(&self) {
        let left = std::mem::take(&mut self.lock().left);
        for (name, record) in left {
            if record.life > 0
                && let Some(connection) = record.fds.first()
            {
                // One that the peer has ended is shut already.
                let _ = rustix::net::shutdown(connection, rustix::net::Shutdown::Both);
            }
            self.forget(&name);
        }
    }

    /// For a control thread that acts on a peer's request: waits while the store is frozen.
    pub fn enter(&self) -> Busy<'_> {
        let state = self.changed.wait_while(self.lock(), |state| state.frozen);
        state.unwrap_or_else(PoisonError::into_inner).busy += 1;
        Busy(self)
    }

    /// Keeps control threads from acting, once those that act have finished or `limit` is over.
    pub fn freeze(self: &Arc<Store>, limit: Duration) -> Frozen {
        let mut state = self.lock();
        state.frozen = true;
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if state.busy == 0 || left.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Frozen(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fd_store::serve;
    use rustix::net::SocketType;
    use tombolo_shm::listener::Listener;
    fn store(path: std::path::PathBuf) -> Store {
        Store::open(
            Box::new(move || {
                if let Ok(found) = FdStore::connect(&path) {
                    return Ok(found);
                }
                let listener = Listener::replace(&path, SocketType::SEQPACKET).map_err(|e| e.to_string())?;
                let fd_store = FdStore::connect(&path).map_err(|e| e.to_string())?;
                std::thread::spawn(move || serve(listener));
                Ok(fd_store)
            }),
            Box::new(|_| ()),
        )
        .unwrap()
    }

    #[test]
    fn records_come_back_and_a_lost_store_is_replaced() {
        let path = std::env::temp_dir().join(format!("tmb-store-{}", std::process::id()));
        let doorbell = tombolo_shm::doorbell::Doorbell::new().unwrap();
        let first = store(path.clone());
        first.put("a", b"1", &[doorbell.as_fd()]).unwrap();
        first.put("b", b"2", &[doorbell.as_fd()]).unwrap();
        let second = store(path.clone());
        let record = second.take("a").unwrap();
        assert_eq!((&record.bytes[..], record.fds.len()), (&b"1"[..], 1));
        assert!(second.take("a").is_none());
        for size in [0, INLINE_BYTES, INLINE_BYTES + 1, 200_000] {
            let state: Vec<u8> = (0..size).map(|n| n as u8).collect();
            first.put_state("s", &state, &[doorbell.as_fd()]).unwrap();
            let (back, fds) = store(path.clone()).take_state("s").unwrap();
            assert!(back == state && fds.len() == 1, "{size}");
        }
        first.forget("s");
        assert_eq!(second.left(""), ["b"]);
        second.forget_rest();
        assert_eq!(store(path.clone()).left(""), ["a"]);
        FdStore::connect(&path).unwrap().quit().unwrap();
        tombolo_testing::until("the store's end", || FdStore::connect(&path).is_err());
        first.put("c", b"3", &[]).unwrap();
        assert_eq!(store(path.clone()).left(""), ["c"]);
        FdStore::connect(&path).unwrap().quit().unwrap();
        assert!(matches!(first.put("x", &[0; 5000], &[]), Err(Errno::MSGSIZE)));
    }

    #[test]
    fn who_acts_is_waited_for_and_who_comes_later_waits() {
        let path = std::env::temp_dir().join(format!("tmb-freeze-{}", std::process::id()));
        let store = Arc::new(store(path.clone()));
        let busy = store.enter();
        // One that does not finish does not hold it up.
        drop(store.freeze(Duration::from_millis(1)));
        drop(busy);
        let frozen = store.freeze(Duration::from_secs(60));
        let (its, (tell, told)) = (store.clone(), std::sync::mpsc::channel());
        let thread = std::thread::spawn(move || {
            let _busy = its.enter();
            tell.send(()).unwrap();
        });
        assert!(told.try_recv().is_err());
        drop(frozen);
        told.recv().unwrap();
        thread.join().unwrap();
        FdStore::connect(&path).unwrap().quit().unwrap();
    }
}
