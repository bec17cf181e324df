//! The control thread: accepts clients, speaks with them over their sockets, notices that they have
//! gone.
//!
//! It sleeps while nothing is served: until a reply has been held for too long, and without a time
//! limit where none is held. While requests are served it looks at the queue every [`ATTEND`], so
//! that what clients ask while all workers are busy is refused, cancelled or expired in that time.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use tombolo_ring::rpc::{Ends, Geometry, Role, initialise};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::foreign::ForeignFd;
use tombolo_shm::{credentials, section};

use super::Engine;
use super::connection::{Caller, Connection};
use super::report::add;
use super::worker::{Core, Place};
use crate::clock;
use crate::folder::Listener;
use crate::message::{Facts, Message};
use crate::process;
use crate::quota::{Quota, Share};
use crate::schedule::Late;
use crate::shared::Taken;
use crate::socket::{self, Received};
use crate::sync::lock;
use crate::warm;

/// How often the queue is looked at while requests are served.
const ATTEND: Duration = Duration::from_millis(10);
/// Quiet turns after which the thread rests.
const QUIET_TURNS: u32 = 20;
/// How often held replies are looked at.
const RECLAIM: Duration = Duration::from_secs(1);
/// The longest sleep while some are held.
const LONGEST_REST: Duration = Duration::from_secs(3600);
/// How long a client may be connected without saying what it wants, when others want its place.
const SILENCE: Duration = Duration::from_secs(2);

const LISTENER: u64 = 0;
const BELL: u64 = 1;
const FIRST_CLIENT: u64 = 2;
/// In the number of an event: it is not the client's socket, but its process.
const PROCESS: u64 = 1 << 63;

enum Client {
    /// Connected, and not welcome yet.
    Stranger { socket: OwnedFd, caller: Caller, since: Instant },
    Welcome {
        connection: Arc<Connection>,
        place: Place,
        /// Its process, which tells that it has ended also where children of its keep the socket
        /// open.
        process: Option<OwnedFd>,
    },
}

pub(super) struct Control {
    engine: Arc<Engine>,
    listener: Listener,
    epoll: OwnedFd,
    clients: HashMap<u64, Client>,
    next: u64,
    reclaimed: Instant,
    /// What users have in use; those who have nothing are left out sooner or later.
    shares: HashMap<u32, Share>,
    /// Given up to tell a client that there are no descriptors left.
    spare: Option<OwnedFd>,
}

/// A descriptor that is of no use but to be closed.
fn spare() -> Option<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC).ok()
}

/// Requests wait, or are served.
fn is_busy(core: &Core) -> bool {
    core.pending() > 0 || core.serves()
}

impl Client {
    fn caller(&self) -> Caller {
        match self {
            Client::Stranger { caller, .. } => *caller,
            Client::Welcome { connection, .. } => connection.caller,
        }
    }
}

impl Control {
    pub(super) fn new(engine: Arc<Engine>, listener: Listener) -> Result<Control, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, &listener.socket, epoll::EventData::new_u64(LISTENER), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &engine.control, epoll::EventData::new_u64(BELL), epoll::EventFlags::IN)?;
        let reclaimed = Instant::now();
        Ok(Control {
            engine,
            listener,
            epoll,
            clients: HashMap::new(),
            next: FIRST_CLIENT,
            reclaimed,
            shares: HashMap::new(),
            spare: spare(),
        })
    }

    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(32);
        let mut quiet = 0;
        let mut served = 0;
        while !self.engine.ended.load(Ordering::SeqCst) {
            let limit = if quiet >= QUIET_TURNS { self.rest() } else { Some(ATTEND) };
            let limit = limit.map(|l| Timespec { tv_sec: l.as_secs().cast_signed(), tv_nsec: l.subsec_nanos().into() });
            events.clear();
            let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), limit.as_ref());
            if quiet >= QUIET_TURNS {
                self.engine.control_rests.store(false, Ordering::SeqCst);
                if !events.is_empty() {
                    quiet = 0;
                }
            }
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    BELL => {
                        self.engine.control.take();
                    }
                    id if id & PROCESS != 0 => self.remove(id & !PROCESS),
                    id => self.read(id),
                }
            }
            let now_served = self.engine.counters.calls();
            let pending = self.attend();
            quiet = if pending || now_served != served { 0 } else { QUIET_TURNS.min(quiet + 1) };
            served = now_served;
        }
        for id in self.clients.keys().copied().collect::<Vec<_>>() {
            self.remove(id);
        }
    }

    /// Has workers ring that begin to serve from now on; for how long the thread may sleep until
    /// then. `None`: without a limit.
    fn rest(&self) -> Option<Duration> {
        self.engine.control_rests.store(true, Ordering::SeqCst);
        // Who has begun before, and did not ring, is seen here: both are under the lock.
        if is_busy(&lock(&self.engine.core)) {
            return Some(ATTEND);
        }
        let held = self.clients.values().filter_map(|client| match client {
            Client::Welcome { connection, .. } => connection.oldest_held(),
            Client::Stranger { .. } => None,
        });
        let due_ns = held.min()?.saturating_add(clock::ns(self.engine.options.reply_ttl));
        // A little later than that it has been held for longer.
        let due = Duration::from_nanos(due_ns.saturating_sub(clock::now_ns())).min(LONGEST_REST) + ATTEND;
        Some(due.max(RECLAIM.saturating_sub(self.reclaimed.elapsed())))
    }

    /// True while requests wait or are served.
    fn attend(&mut self) -> bool {
        let core = &mut *lock(&self.engine.core);
        if self.engine.idle.load(Ordering::Relaxed) == 0 {
            self.engine.attend(core);
        }
        let busy = is_busy(core);
        if self.reclaimed.elapsed() >= RECLAIM {
            self.reclaimed = Instant::now();
            let (now, ttl) = (clock::now_ns(), clock::ns(self.engine.options.reply_ttl));
            for client in self.clients.values() {
                if let Client::Welcome { connection, .. } = client {
                    add(&self.engine.counters.reclaimed, connection.reclaim(now, ttl));
                }
            }
        }
        busy
    }

    fn accept(&mut self) {
        // A storm of connections must not keep the thread from its other work.
        for _ in 0..32 {
            let socket = match self.accept_one() {
                Ok(socket) => socket,
                Err(Errno::MFILE | Errno::NFILE) => {
                    self.turn_away();
                    continue;
                }
                Err(_) => return,
            };
            let Ok(peer) = credentials::peer(&socket) else { continue };
            let caller = Caller { pid: peer.pid_or_zero(), uid: peer.uid, gid: peer.gid };
            let own = rustix::process::geteuid().as_raw();
            let groups = || credentials::peer_groups(&socket).unwrap_or_default();
            if !self.engine.options.access.allows(own, caller, groups) {
                self.refuse(&socket, format!("user {} (group {}) may not call this service", caller.uid, caller.gid));
                continue;
            }
            if self.clients.len() >= self.engine.options.max_clients {
                self.clear_strangers();
            }
            if self.clients.len() >= self.engine.options.max_clients {
                self.refuse(
                    &socket,
                    format!("{} clients are connected, and the service allows no more", self.clients.len()),
                );
                continue;
            }
            let of_user = self.clients.values().filter(|c| c.caller().uid == caller.uid).count();
            if of_user >= self.engine.options.max_clients_per_uid {
                let why =
                    format!("{of_user} clients of user {} are connected, and the service allows no more", caller.uid);
                self.refuse(&socket, why);
                continue;
            }
            let id = self.next;
            let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
            if epoll::add(&self.epoll, &socket, epoll::EventData::new_u64(id), flags).is_ok() {
                self.next += 1;
                self.clients.insert(id, Client::Stranger { socket, caller, since: Instant::now() });
            }
        }
    }

    fn accept_one(&self) -> Result<OwnedFd, Errno> {
        accept_with(&self.listener.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }

    /// There is no descriptor left for who comes now; one that was kept for it says so. Otherwise
    /// it would wait for us, and the listener would wake us for it again and again.
    fn turn_away(&mut self) {
        match self.spare.take().map(drop).and_then(|()| self.accept_one().ok()) {
            Some(socket) => {
                self.refuse(&socket, "the service has as many files open as it may (ulimit -n)".into());
            }
            // Others were faster.
            None => std::thread::sleep(ATTEND),
        }
        self.spare = spare();
    }

    /// Takes a client out, with all that it asked. One of our forked children may hold its
    /// descriptors too, so that closing them would end neither the connection nor the events.
    fn remove(&mut self, id: u64) {
        match self.clients.remove(&id) {
            None => {}
            Some(Client::Stranger { socket, .. }) => self.hang_up(&socket),
            Some(Client::Welcome { connection, place, process }) => {
                self.engine.forget(&mut lock(&self.engine.core), place);
                self.hang_up(&connection.socket);
                if let Some(process) = process {
                    let _ = epoll::delete(&self.epoll, &process);
                }
            }
        }
    }

    /// The other side reads what was sent to it, and then the end.
    fn hang_up(&self, socket: &OwnedFd) {
        let _ = epoll::delete(&self.epoll, socket);
        let _ = shutdown(socket, Shutdown::Both);
    }

    /// Sends those away who have gone already, or have said nothing for too long.
    fn clear_strangers(&mut self) {
        let strangers = self.clients.iter().filter(|(_, c)| matches!(c, Client::Stranger { .. })).map(|(id, _)| *id);
        for id in strangers.collect::<Vec<_>>() {
            self.read(id);
        }
        let silent = |c: &Client| matches!(c, Client::Stranger { since, .. } if since.elapsed() > SILENCE);
        for id in self.clients.iter().filter(|(_, c)| silent(c)).map(|(id, _)| *id).collect::<Vec<_>>() {
            self.remove(id);
        }
    }

    fn refuse(&self, socket: impl AsFd, why: String) {
        add(&self.engine.counters.refused_connections, 1);
        // A client that does not read its refusal sees the socket close.
        let _ = socket::send(socket, &Message::Refused(why), &[], false);
    }

    fn read(&mut self, id: u64) {
        let stays = match self.clients.get(&id) {
            None => true,
            Some(Client::Welcome { connection, .. }) => !connection.is_gone() && connection.read_messages(),
            Some(Client::Stranger { socket, .. }) => match socket::receive(socket, false) {
                Received::Nothing => true,
                Received::Message(Message::Ask, _) => {
                    let report = serde_json::to_string(&self.engine.report(true)).unwrap_or_default();
                    socket::send(socket, &Message::Report(report), &[], false).is_ok()
                }
                Received::Message(Message::Hello { entries, arena_bytes }, fds) => {
                    self.welcome(id, entries, arena_bytes, fds);
                    true
                }
                Received::Malformed(why) => {
                    self.refuse(socket, why.to_string());
                    false
                }
                Received::Message(..) | Received::Gone => false,
            },
        };
        if !stays {
            self.remove(id);
        }
    }

    fn welcome(&mut self, id: u64, entries: u32, arena_bytes: u64, fds: Vec<ForeignFd>) {
        let Some(Client::Stranger { socket, caller, .. }) = self.clients.remove(&id) else { return };
        let copy = match socket.try_clone() {
            Ok(copy) => copy,
            Err(error) => {
                self.refuse(&socket, error.to_string());
                return self.hang_up(&socket);
            }
        };
        match self.connect(socket, caller, entries, arena_bytes, fds) {
            Ok((connection, place)) => {
                let process = process::pidfd_of(&copy).filter(|process| {
                    let data = epoll::EventData::new_u64(id | PROCESS);
                    epoll::add(&self.epoll, process, data, epoll::EventFlags::IN).is_ok()
                });
                self.clients.insert(id, Client::Welcome { connection, place, process });
            }
            Err(why) => {
                self.refuse(&copy, why);
                self.hang_up(&copy);
            }
        }
    }

    /// What a user has in use.
    fn share(&mut self, uid: u32) -> Share {
        self.shares.retain(|_, share| !(share.bytes.is_free() && share.entries.is_free()));
        let options = &self.engine.options;
        let (bytes, entries) = (Quota::new(options.max_bytes_per_uid), Quota::new(options.max_entries_per_uid));
        self.shares.entry(uid).or_insert(Share { bytes, entries }).clone()
    }

    fn connect(
        &mut self,
        socket: OwnedFd,
        caller: Caller,
        entries: u32,
        arena_bytes: u64,
        fds: Vec<ForeignFd>,
    ) -> Result<(Arc<Connection>, Place), String> {
        // Everything is checked before memory is made, mapped pages are touched or anything is
        // charged: a refusal costs a few system calls, and leaves nothing behind.
        let share = self.share(caller.uid);
        let options = &self.engine.options;
        let [theirs] = <[ForeignFd; 1]>::try_from(fds)
            .map_err(|fds| format!("{} descriptors came, expected a section", fds.len()))?;
        if entries > options.max_entries || arena_bytes > options.max_arena_bytes {
            return Err(format!(
                "{entries} entries and an arena of {arena_bytes} bytes were asked for, and the service allows {} and {}",
                options.max_entries, options.max_arena_bytes
            ));
        }
        let sizes = || format!("{entries} entries and an arena of {arena_bytes} bytes: expected powers of two");
        let peer_geometry = Geometry::new(entries, arena_bytes).ok_or_else(sizes)?;
        let own_geometry = Geometry::new(entries, options.reply_arena_bytes).ok_or_else(sizes)?;
        let peer = section::adopt(&theirs, peer_geometry.section_bytes(), false).map_err(|e| e.to_string())?;
        if !warm::has_header(&theirs, peer_geometry, Role::Client) {
            return Err("the section's header is not that of this version".into());
        }
        let bytes = peer_geometry.section_bytes() + own_geometry.section_bytes();
        let too_much = |amount: u64, what: &str, max: u64| {
            let uid = caller.uid;
            format!("a connection takes {amount} {what}, and user {uid} would have more than {max} in use with it")
        };
        let bytes = share.bytes.take(bytes).ok_or_else(|| too_much(bytes, "bytes", options.max_bytes_per_uid))?;
        let asked = u64::from(entries);
        let entries = share.entries.take(asked);
        let entries = entries.ok_or_else(|| too_much(asked, "entries", options.max_entries_per_uid))?;
        let (fd, own) = section::make("tombolo-rpc", own_geometry.section_bytes(), true).map_err(|e| e.to_string())?;
        let view = own.view_mut().ok_or("the section cannot be written")?;
        initialise(view, own_geometry, Role::Provider);
        let ends = Ends::new(view, own_geometry, peer.view(), peer_geometry).map_err(|e| e.to_string())?;
        ends.check_peer(Role::Client).map_err(|e| e.to_string())?;
        warm::fault_in(&theirs, &peer, peer_geometry);
        let doorbell = Doorbell::shared().map_err(|e| e.to_string())?;
        let doorbell_fd = doorbell.as_fd().try_clone_to_owned().map_err(|e| e.to_string())?;
        let taken = Taken::new(options.max_shared_bytes, share.bytes);
        let (own, peer) = ((own, own_geometry), (peer, peer_geometry));
        let connection = Connection::new(caller, socket, doorbell, own, peer, taken, [bytes, entries]);
        let connection = Arc::new(connection);
        let place = lock(&self.engine.core).add(connection.clone());
        let data = epoll::EventData::new_u64(place.bits());
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        let facts = Facts {
            arena_bytes: options.reply_arena_bytes,
            budget_ns: clock::ns(options.budget),
            max_shared_bytes: options.max_shared_bytes,
            late_is_best_effort: options.late == Late::BestEffort,
            admission: options.admission,
        };
        let added = epoll::add(&self.engine.doorbells, &connection.doorbell, data, edge);
        let sent = added.and_then(|()| {
            socket::send(&connection.socket, &Message::Welcome(facts), &[fd.as_fd(), doorbell_fd.as_fd()], false)
        });
        if let Err(error) = sent {
            self.engine.forget(&mut lock(&self.engine.core), place);
            return Err(error.to_string());
        }
        Ok((connection, place))
    }
}
