//! The links of one fabric: their regions, listening sockets and clients. The fd store holds all of
//! these while the daemon restarts. This module is the shell around [`server`](super::server).
//!
//! # Where the I/O runs
//! One thread does the I/O of the whole fabric. It sleeps in epoll and never blocks on a client. It
//! is not the daemon's runtime: stock QEMU blocks at its start until it is greeted. A daemon that
//! waits for QEMU (or for nft, or a monitor) must not also be what QEMU waits for. It is not a
//! worker either, because a greeting must not delay frames. Calls from other threads act at once,
//! under the same lock.
//!
//! # Invariants
//! - The fd store is told a fact before any client is told what follows from it (see
//!   [`server`](super::server)).
//! - This module writes a region's state word only for a peer that is gone. It writes 0 and rings
//!   vector 0 of everybody.
//! - Regions are sealed. Only the header page and the state table of a region are mapped here.
//!
//! # What failure does
//! A client that sends anything, or takes nothing for ten seconds, is disconnected, counted, and
//! announced as gone. Its VMM does not connect again, so its machine must be restarted to come
//! back. An fd store that is lost is replaced, and the new one is told everything again. If that
//! fails, the links continue, but they do not survive the daemon.
//!
//! A connection for which no seat is free waits for one for five seconds. The peer that it replaces
//! may have been killed an instant ago. At most eight connections wait at a link. After five
//! seconds the connection is closed and counted, and the reason is logged.
//!
//! Limits: those of [`server`](super::server); doorbells and connections are three to five
//! descriptors per peer.

mod shell;

use super::fd_store::{self, FdStore};
use super::server::{Dialect, PeerRecord, Refused, Seat, Server, Shape};
use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::io::Errno;
use rustix::net::Shutdown;
use rustix::time::{ClockId, Timespec, clock_gettime};
use shell::{Inner, Keeping, OWN, Waiting, run};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tombolo_ring::ivshmem::region::{Header, Layout, PAGE_BYTES};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::listener::Listener;
use tombolo_shm::memory::{Mapping, MemoryError};

/// Why a link cannot be.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum LinkError {
    /// Its region.
    #[error("the region of link {link}: {source}")]
    Memory { link: String, source: MemoryError },
    /// A socket on which it is to be served.
    #[error("listening on {} for link {link}: {source}", path.display())]
    Listen { link: String, path: PathBuf, source: Errno },
    /// Another system call.
    #[error("{what} of link {link}: {source}")]
    System { what: &'static str, link: String, source: Errno },
    /// No seat.
    #[error("link {link}: {source}")]
    Refused { link: String, source: Refused },
    /// No such link.
    #[error("no link {link}")]
    Unknown { link: String },
}

/// A way into a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Door {
    /// Path of the socket.
    pub path: PathBuf,
    /// The seat that a peer gets when it joins through this door. Stock QEMU is behind a door to a
    /// fixed seat of a version 1 link. It is told of all seats at once; other clients are told when
    /// peers join and leave.
    pub seat: Seat,
}

/// A link to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Its name, one of the fabric's.
    pub name: String,
    /// Protocol, seats, vectors.
    pub shape: Shape,
    /// Offsets and sizes of the region's sections.
    pub layout: Layout,
    /// Size of the region in bytes, a power of two.
    pub region_bytes: u64,
    /// The header page of a v1 region.
    pub header: Option<Header>,
    /// The seat of this process itself.
    pub host: Option<u32>,
    /// The seat of a process that serves this one. It stays on the link while this process is away.
    /// It is no reason for the fd store to stay: where it is the only peer left, the fd store ends,
    /// and its connection with it.
    pub helper: Option<u32>,
    /// Sockets at which peers join.
    pub doors: Vec<Door>,
}

impl Config {
    /// What a kept link must equal to be taken up again.
    fn fingerprint(&self) -> Vec<u8> {
        let Shape { dialect, max_peers, vectors } = self.shape;
        let (kind, protocol, output_bytes) = match dialect {
            Dialect::V1 => (1, 0, 0),
            Dialect::V2 { protocol, output_bytes } => (2, protocol, output_bytes),
        };
        let mut out = Vec::new();
        for word in [kind, protocol, max_peers, vectors, self.host.unwrap_or(u32::MAX)] {
            out.extend(word.to_le_bytes());
        }
        let Layout { state_table_offset, rw_offset, rw_bytes, .. } = self.layout;
        let longs = [output_bytes, self.region_bytes, state_table_offset, rw_offset, rw_bytes];
        let more = [self.layout.output_offset, self.layout.output_bytes];
        longs.iter().chain(&more).for_each(|long| out.extend(long.to_le_bytes()));
        if let Some(header) = &self.header {
            let mut page = [0; tombolo_ring::ivshmem::region::HEADER_BYTES];
            // A page of just the header's size has room for it.
            let _ = header.encode(&mut page);
            out.extend(page);
        }
        out
    }

    fn peer_record(&self, id: u32) -> String {
        format!("{}#{id}", self.name)
    }
}

/// What a link's own process is told.
#[derive(Debug)]
pub enum Event {
    /// A peer is on the link, with these doorbells by vector; none where it has none.
    Joined {
        /// Peer ID of the new peer.
        id: u32,
        /// One doorbell per vector of the peer.
        doorbells: Vec<Doorbell>,
    },
    /// A peer has left the link.
    Left {
        /// Peer ID that is free again.
        id: u32,
    },
}

/// Is told of a link's events, in the thread of the links or in the caller's thread. It must not
/// call back.
pub type Watcher = Box<dyn FnMut(Event) + Send>;

/// A link that was made, or taken up again.
#[derive(Debug)]
pub struct Opened {
    /// The shared memory, to be mapped.
    pub region: OwnedFd,
    /// The doorbells on which this process is rung, by vector.
    pub own: Vec<Doorbell>,
    /// The peers that were on it before this process was, with their doorbells; of these no
    /// [`Event::Joined`] is told.
    pub restored: Vec<(u32, Vec<Doorbell>)>,
}

/// A peer as a report shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerStatus {
    /// Peer ID, unique on the link.
    pub id: u32,
    /// Its process; 0 where the kernel does not say.
    pub pid: u32,
    /// Its state word, as the region holds it now.
    pub state: u32,
    /// Messages that wait for it.
    pub waiting: usize,
}

/// A link as a report shows it. Counters grow from the daemon's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkStatus {
    /// As the fabric file or the caller gave it.
    pub name: String,
    /// Protocol, seats, vectors.
    pub shape: Shape,
    /// Size of the shared region, header included.
    pub region_bytes: u64,
    /// Peers that are connected now.
    pub peers: Vec<PeerStatus>,
    /// Peers that have joined.
    pub joins: u64,
    /// Peers that have left.
    pub leaves: u64,
    /// Clients that were cut off because they took nothing.
    pub cut_slow: u64,
    /// Clients that were cut off because they said something.
    pub cut_talking: u64,
    /// Connections for which no peer ID was free.
    pub refused: u64,
    /// Whether the fd store has it.
    pub kept: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// This process.
    Host,
    /// A client; its life is its connection.
    Client,
    /// A machine without doorbells; its life is a pidfd.
    Occupant,
}

struct Member {
    kind: Kind,
    pid: u32,
    /// The connection, or a pidfd.
    life: Option<OwnedFd>,
    token: u64,
}

impl Member {
    /// Ends a client's connection, wherever else it is held: the fd store has it too, so closing it
    /// is not enough.
    fn hang_up(&self) {
        if let (Kind::Client, Some(connection)) = (&self.kind, &self.life) {
            // One that the client has ended is shut already.
            let _ = rustix::net::shutdown(connection, Shutdown::Both);
        }
    }
}

struct ServedLink {
    config: Config,
    region: OwnedFd,
    /// Header page and state table.
    mapping: Mapping,
    server: Server,
    members: BTreeMap<u32, Member>,
    /// The doorbells of each seat, by vector. They stay with the seat when peers join and leave.
    doorbells: Vec<Vec<Doorbell>>,
    doors: Vec<(Listener, u64, Seat)>,
    watcher: Option<Watcher>,
    joins: u64,
    leaves: u64,
    cut_slow: u64,
    cut_talking: u64,
    refused: u64,
    /// Connections for which there is no seat yet.
    waiting: Vec<Waiting>,
    refusal_told_ns: Option<u64>,
}

/// Finds, or starts, an fd store.
pub type Launch = Box<dyn FnMut() -> Result<FdStore, String> + Send>;
/// Told of what goes wrong, in a sentence.
pub type OnFailure = Box<dyn Fn(&str) + Send>;

/// Links that are frozen; see [`Links::freeze`].
pub struct Standstill<'l> {
    inner: MutexGuard<'l, Inner>,
}

impl Standstill<'_> {
    /// The listening sockets, with their paths.
    pub fn doors(&self) -> impl Iterator<Item = (&Path, BorrowedFd<'_>)> {
        self.inner.links.values().flat_map(|link| &link.doors).map(|(door, ..)| (door.path(), door.as_fd()))
    }
}

/// The links of one fabric. Dropping it ends the thread and closes all links; it does not end the
/// fd store.
pub struct Links {
    inner: Arc<Mutex<Inner>>,
    doorbell: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn lock(inner: &Mutex<Inner>) -> MutexGuard<'_, Inner> {
    inner.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether the other side of a sign of life has ended.
fn has_ended(fd: impl AsFd) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd.as_fd(), fd_store::sign(&fd))];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0)
}

impl Links {
    /// Starts the thread. With `launch` there is an fd store from the first link on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn start(name: &str, launch: Option<Launch>, on_failure: OnFailure) -> Result<Links, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let doorbell = Arc::new(Doorbell::new()?);
        epoll::add(&epoll, &*doorbell, epoll::EventData::new_u64(OWN), epoll::EventFlags::IN)?;
        let keeping = launch.map(Keeping::new);
        let poll = rustix::io::fcntl_dupfd_cloexec(&epoll, 3)?;
        let inner = Arc::new(Mutex::new(Inner::new(epoll, keeping, on_failure)));
        let (its, its_doorbell) = (inner.clone(), doorbell.clone());
        let thread = std::thread::Builder::new()
            .name(format!("{name}-ivshmem"))
            .spawn(move || run(&its, &its_doorbell, &poll))
            .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::AGAIN))?;
        Ok(Links { inner, doorbell, thread: Some(thread) })
    }

    /// Takes over what the fd store of an earlier daemon has. Before any link is opened.
    pub fn recall(&self, fd_store: FdStore) -> Result<(), Errno> {
        let mut inner = lock(&self.inner);
        let records = fd_store.list()?;
        inner.set_fd_store(Some(fd_store));
        if let Some(keeping) = &mut inner.keeping {
            // The rest of the store belongs to ports.
            let links = records.into_iter().filter(|r| !r.name.starts_with(crate::store::PREFIX));
            keeping.left = links.map(|r| (r.name.clone(), r)).collect();
        }
        Ok(())
    }

    /// Listening sockets that an earlier daemon handed over; links that have a door there use them.
    pub fn adopt_doors(&self, doors: impl IntoIterator<Item = (PathBuf, OwnedFd)>) {
        lock(&self.inner).handed_doors.extend(doors);
    }

    /// Listens again where the socket of a link was deleted. Returns what could not be made.
    pub fn restore_doors(&self) -> Vec<LinkError> {
        let faults = lock(&self.inner).restore_doors();
        self.doorbell.ring();
        faults
    }

    /// Whether the peer of that link could be taken up from what the fd store of an earlier daemon
    /// had.
    pub fn remembers(&self, config: &Config, id: u32) -> bool {
        let inner = lock(&self.inner);
        let Some(left) = inner.keeping.as_ref().map(|k| &k.left) else { return false };
        let link = left.get(&config.name).is_some_and(|r| r.bytes == config.fingerprint() && r.fds.len() == 1);
        let peer = left.get(&config.peer_record(id)).and_then(|r| seat(config, r)).and_then(|seat| seat.member);
        link && peer.is_some_and(|(record, m)| record.settled && m.life.is_some_and(|life| !has_ended(life)))
    }

    /// Forgets what no link has taken up.
    pub fn forget_rest(&self) {
        let mut inner = lock(&self.inner);
        let left = inner.keeping.as_mut().map(|k| std::mem::take(&mut k.left)).unwrap_or_default();
        for name in left.keys() {
            inner.tell_fd_store(|fd_store| fd_store.forget(name));
        }
    }

    /// Makes a link. Where the fd store of an earlier daemon holds it with the same `config` and a
    /// peer is still on it, takes that link over instead. No peer can join before [`Links::serve`].
    ///
    /// # Errors
    /// The kernel's; nothing is left then.
    pub fn open(&self, config: Config) -> Result<Opened, LinkError> {
        lock(&self.inner).open(config)
    }

    /// Opens a link's doors. From now on `watcher` is told of each peer that joins or leaves.
    ///
    /// # Errors
    /// The kernel's, such as `EADDRINUSE`. The link is closed then.
    pub fn serve(&self, name: &str, watcher: Option<Watcher>) -> Result<(), LinkError> {
        let mut inner = lock(&self.inner);
        let done = inner.serve(name, watcher);
        if done.is_err() {
            inner.close(name);
        }
        drop(inner);
        self.doorbell.ring();
        done
    }

    /// Puts a machine without doorbells on its seat, until its process ends. Takes a duplicate of
    /// the pidfd.
    ///
    /// # Errors
    /// If the seat is taken, or there is none.
    pub fn occupy(&self, name: &str, id: u32, pid: u32, pidfd: BorrowedFd<'_>) -> Result<(), LinkError> {
        lock(&self.inner).occupy(name, id, pid, pidfd)
    }

    /// A link's region.
    ///
    /// # Errors
    /// If there is none of that name, or no descriptor is left.
    pub fn region(&self, name: &str) -> Result<OwnedFd, LinkError> {
        let inner = lock(&self.inner);
        let link = inner.links.get(name).ok_or_else(|| LinkError::Unknown { link: name.into() })?;
        duplicate(name, &link.region)
    }

    /// Closes a link: its clients are put out, its sockets are removed, the fd store forgets it.
    pub fn close(&self, name: &str) {
        lock(&self.inner).close(name);
    }

    /// What is to be said of each link, in the order of their names.
    pub fn status(&self) -> Vec<LinkStatus> {
        let inner = lock(&self.inner);
        let kept = inner.keeping.as_ref().is_some_and(|k| k.fd_store.is_some());
        inner.links.values().map(|link| link.status(kept)).collect()
    }

    /// Until the guard is dropped, no peer joins or leaves, and no peer is told anything: another
    /// process takes the links over.
    pub fn freeze(&self) -> Standstill<'_> {
        Standstill { inner: lock(&self.inner) }
    }

    /// Whether there is an fd store.
    pub fn is_kept(&self) -> bool {
        lock(&self.inner).keeping.as_ref().is_some_and(|k| k.fd_store.is_some())
    }

    /// Ends the fd store too: nothing is to be taken up again. Waits for its end, up to `limit`.
    pub fn end_fd_store(&self, limit: Duration) {
        let mut inner = lock(&self.inner);
        let fd_store = inner.keeping.as_mut().and_then(|k| k.fd_store.take());
        inner.keeping = None;
        if let Some(fd_store) = fd_store {
            // One that is lost has ended.
            let _ = fd_store.quit();
            let limit = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: limit.subsec_nanos().into() };
            let mut fds = [PollFd::from_borrowed_fd(fd_store.as_fd(), PollFlags::IN)];
            let _ = poll(&mut fds, Some(&limit));
        }
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        lock(&self.inner).end = true;
        self.doorbell.ring();
        if let Some(thread) = self.thread.take() {
            // It panics only through a defect in this code, and the panic was already reported
            // where it happened.
            let _ = thread.join();
        }
        let mut inner = lock(&self.inner);
        let names: Vec<String> = inner.links.keys().cloned().collect();
        // The fd store goes on with what it has: a daemon that follows takes it up.
        inner.keeping = None;
        names.iter().for_each(|name| inner.close_quietly(name));
    }
}

fn duplicate(link: &str, fd: impl AsFd) -> Result<OwnedFd, LinkError> {
    rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(|source| LinkError::System {
        what: "duplicating a descriptor",
        link: link.into(),
        source,
    })
}

/// A seat as the fd store had it: its doorbells, and who sat on it.
struct KeptSeat {
    doorbells: Vec<Doorbell>,
    member: Option<(PeerRecord, Member)>,
}

/// The words of a seat's record behind that of its peer: what sits on it, and its process.
fn seat_words(member: Option<&Member>) -> [u8; 5] {
    let kind = match member.map(|m| &m.kind) {
        None => 0,
        Some(Kind::Host) => 1,
        Some(Kind::Client) => 2,
        Some(Kind::Occupant) => 3,
    };
    let [a, b, c, d] = member.map_or(0, |m| m.pid).to_le_bytes();
    [kind, a, b, c, d]
}

fn seat(config: &Config, kept: &fd_store::StoredRecord) -> Option<KeptSeat> {
    let (record, rest) = kept.bytes.split_at_checked(super::server::RECORD_BYTES)?;
    let [kind, pid @ ..] = rest else { return None };
    let pid = u32::from_le_bytes(pid.try_into().ok()?);
    let kind = match kind {
        0 => None,
        1 => Some(Kind::Host),
        2 => Some(Kind::Client),
        3 => Some(Kind::Occupant),
        _ => return None,
    };
    let mut fds = kept.fds.iter().map(|fd| rustix::io::fcntl_dupfd_cloexec(fd, 3));
    let life = match kind {
        None | Some(Kind::Host) => None,
        _ => Some(fds.next()?.ok()?),
    };
    let doorbells: Vec<Doorbell> = fds.map(|fd| Doorbell::adopt(fd.ok()?).ok()).collect::<Option<_>>()?;
    let member = match kind {
        Some(kind) => Some((PeerRecord::decode(record)?, Member { kind, pid, life, token: OWN })),
        None => None,
    };
    (doorbells.len() == config.shape.vectors as usize).then_some(KeptSeat { doorbells, member })
}

impl ServedLink {
    /// Writes the header page of a v1 region. Peers can write to it too, so it is written again for
    /// each peer that joins.
    fn write_header(&self) {
        if let (Some(view), Some(header)) = (self.mapping.view_mut(), &self.config.header) {
            let mut page = [0; PAGE_BYTES as usize];
            // A whole page has room for it.
            let _ = header.encode(&mut page);
            view.write_from(&page);
        }
    }

    /// Writes 0 into the state word of a peer that is gone.
    fn clear_state(&self, id: u32) {
        if let (Some(view), Some(at)) = (self.mapping.view_mut(), self.config.layout.state(id)) {
            // Release: a reader that sees the word also sees what was said before of the peer's
            // going. Nothing depends on it.
            let _ = view.store_u32(at, 0, Ordering::Release);
        }
    }

    fn status(&self, kept: bool) -> LinkStatus {
        let peer = |(id, member): (&u32, &Member)| {
            let at = self.config.layout.state(*id).unwrap_or(usize::MAX);
            // Relaxed: a number for a report.
            let state = self.mapping.view().load_u32(at, Ordering::Relaxed).unwrap_or(0);
            PeerStatus { id: *id, pid: member.pid, state, waiting: self.server.waiting(*id) }
        };
        LinkStatus {
            name: self.config.name.clone(),
            shape: self.config.shape,
            region_bytes: self.config.region_bytes,
            peers: self.members.iter().map(peer).collect(),
            joins: self.joins,
            leaves: self.leaves,
            cut_slow: self.cut_slow,
            cut_talking: self.cut_talking,
            refused: self.refused,
            kept,
        }
    }
}

#[cfg(test)]
mod tests;
