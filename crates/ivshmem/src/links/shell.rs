//! The state behind [`Links`](super::Links) and the thread that serves it: sockets in, messages of
//! the core out.

use super::super::fd_store::{self, FdStore};
use super::super::server::{Dialect, Hears, Passed, PeerRecord, Seat, Server};
use super::{
    Config, Event, Kind, Launch, LinkError, Member, OnFailure, Opened, ServedLink, Watcher, duplicate, has_ended, lock,
    now_ns, seat, seat_words,
};
use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::io::Errno;
use rustix::net::SocketType;
use rustix::time::Timespec;
use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tombolo_ring::ivshmem::region::PAGE_BYTES;
use tombolo_shm::credentials;
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::listener::{self, Listener};
use tombolo_shm::memory::{Mapping, cannot_shrink, sealed_region};
use tombolo_shm::passing;

/// How soon a client is tried again where the kernel had no room for a descriptor on its way.
const RETRY_NS: u64 = 100_000_000;
/// How long a connection waits for a seat: that of a peer that was killed is free only when the
/// kernel has taken its process apart, which takes seconds for a large guest on a busy machine.
pub(super) const SEAT_WAIT_NS: u64 = 5_000_000_000;
/// Most connections of a link that wait for a seat.
pub(super) const MAX_WAITING: usize = 8;
/// Time between two log lines about refused connections of a link.
const REFUSAL_LOG_NS: u64 = 10_000_000_000;
/// The epoll token of the thread's own doorbell; and of what is not watched.
pub(super) const OWN: u64 = 0;

#[derive(Debug, Clone)]
enum EventSource {
    FdStore,
    Door { link: String, at: usize },
    Member { link: String, id: u32 },
}

pub(super) struct Keeping {
    launch: Launch,
    pub(super) fd_store: Option<FdStore>,
    token: u64,
    /// Records of an earlier daemon that no link has taken up yet.
    pub(super) left: BTreeMap<String, fd_store::StoredRecord>,
    /// It was lost and could not be replaced.
    given_up: bool,
}

pub(super) struct Inner {
    epoll: OwnedFd,
    sources: HashMap<u64, EventSource>,
    next_token: u64,
    pub(super) links: BTreeMap<String, ServedLink>,
    pub(super) keeping: Option<Keeping>,
    /// Listening sockets of an earlier daemon, by their paths.
    pub(super) handed_doors: BTreeMap<PathBuf, OwnedFd>,
    on_failure: OnFailure,
    retry: bool,
    pub(super) end: bool,
}

pub(super) fn run(inner: &Mutex<Inner>, doorbell: &Doorbell, poll: &OwnedFd) {
    let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
    loop {
        let timeout = {
            let inner = lock(inner);
            if inner.end {
                return;
            }
            let deadline = inner.links.values().filter_map(|l| l.server.deadline_ns()).min();
            let now = now_ns();
            let wait = deadline.map(|at| at.saturating_sub(now) + 1_000_000);
            if inner.retry { Some(wait.map_or(RETRY_NS, |w| w.min(RETRY_NS))) } else { wait }
        };
        let timeout =
            timeout.map(|ns| Timespec { tv_sec: (ns / 1_000_000_000) as i64, tv_nsec: (ns % 1_000_000_000) as i64 });
        events.clear();
        // An interrupted wait reports no event.
        let _ = epoll::wait(poll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref());
        let mut inner = lock(inner);
        for event in &events {
            let token = event.data.u64();
            if token == OWN {
                doorbell.take();
            } else if let Some(source) = inner.sources.get(&token).cloned() {
                inner.ready(token, &source);
            }
        }
        inner.tick();
    }
}

/// What a link consists of.
struct Kept {
    region: OwnedFd,
    members: BTreeMap<u32, Member>,
    doorbells: Vec<Vec<Doorbell>>,
    server: Server,
}

/// The process at the other end of a socket; 0 where the kernel does not say.
fn peer_pid(connection: &OwnedFd) -> u32 {
    credentials::peer(connection).map_or(0, |peer| peer.pid_or_zero())
}

/// A connection for which there is no seat yet.
pub(super) struct Waiting {
    seat: Seat,
    connection: OwnedFd,
    since_ns: u64,
}

impl Keeping {
    pub(super) fn new(launch: Launch) -> Keeping {
        Keeping { launch, fd_store: None, token: OWN, left: BTreeMap::new(), given_up: false }
    }
}

impl Inner {
    pub(super) fn new(epoll: OwnedFd, keeping: Option<Keeping>, on_failure: OnFailure) -> Inner {
        let (sources, links) = (HashMap::new(), BTreeMap::new());
        Inner {
            epoll,
            sources,
            next_token: OWN + 1,
            links,
            keeping,
            on_failure,
            handed_doors: BTreeMap::new(),
            retry: false,
            end: false,
        }
    }

    fn watch(&mut self, fd: impl AsFd, source: EventSource, write: bool) -> Result<u64, Errno> {
        let token = self.next_token;
        self.next_token += 1;
        let mut flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if write {
            flags |= epoll::EventFlags::OUT;
        }
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), flags)?;
        self.sources.insert(token, source);
        Ok(token)
    }

    /// The fd store, and clients' VMMs, hold the same open files, which epoll goes on reporting: so
    /// they are taken out.
    fn unwatch(&mut self, fd: impl AsFd, token: u64) {
        if self.sources.remove(&token).is_some() {
            // It was added in `watch` and is removed nowhere else.
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    fn ready(&mut self, token: u64, source: &EventSource) {
        match source {
            EventSource::FdStore => {
                let gone = self.keeping.as_ref().and_then(|k| k.fd_store.as_ref()).is_none_or(has_ended);
                if gone {
                    self.lose_fd_store("it ended");
                }
            }
            EventSource::Door { link, at } => self.accept(link, *at),
            EventSource::Member { link, id } => {
                if self.links.get(link).and_then(|l| l.members.get(id)).is_some_and(|m| m.token == token) {
                    self.look(link, *id);
                }
            }
        }
    }

    fn tick(&mut self) {
        self.retry = false;
        let now = now_ns();
        let names: Vec<String> = self.links.keys().cloned().collect();
        for name in names {
            let overdue = self.links.get(&name).map(|l| l.server.overdue(now)).unwrap_or_default();
            for id in overdue {
                // Its socket may have had room since.
                self.pump(&name, id);
                if let Some(link) = self.links.get_mut(&name).filter(|l| l.server.overdue(now).contains(&id)) {
                    link.cut_slow += 1;
                    self.leave(&name, id);
                }
            }
            self.pump_all(&name);
            self.seat_waiting(&name);
        }
    }

    // --- the fd store ---

    pub(super) fn set_fd_store(&mut self, fd_store: Option<FdStore>) {
        let old = self.keeping.as_mut().and_then(|k| Some((k.fd_store.take()?, k.token)));
        if let Some((old, token)) = old {
            self.unwatch(&old, token);
        }
        let Some(fd_store) = fd_store else { return };
        // Unwatched, its loss shows with the next record.
        let token = self.watch(&fd_store, EventSource::FdStore, false).unwrap_or(OWN);
        if let Some(keeping) = &mut self.keeping {
            (keeping.fd_store, keeping.token, keeping.given_up) = (Some(fd_store), token, false);
        }
    }

    /// Starts an fd store in place of one that was lost, and tells it everything.
    fn lose_fd_store(&mut self, why: &str) {
        self.set_fd_store(None);
        if self.keeping.is_none() {
            return;
        }
        (self.on_failure)(&format!("the fd store of the ivshmem links is lost ({why}); starting another"));
        self.find_fd_store();
    }

    fn find_fd_store(&mut self) {
        let Some(keeping) = self.keeping.as_mut().filter(|k| k.fd_store.is_none() && !k.given_up) else { return };
        match (keeping.launch)() {
            Ok(fd_store) => {
                self.set_fd_store(Some(fd_store));
                let names: Vec<String> = self.links.keys().cloned().collect();
                for name in names {
                    self.keep_link(&name);
                    (0..self.links[&name].config.shape.max_peers).for_each(|id| self.keep_seat(&name, id));
                }
            }
            Err(error) => {
                keeping.given_up = true;
                (self.on_failure)(&format!(
                    "no fd store for the ivshmem links ({error}): they work, but do not survive a restart of the daemon"
                ));
            }
        }
    }

    pub(super) fn tell_fd_store(&mut self, say: impl Fn(&FdStore) -> Result<(), Errno>) {
        let Some(fd_store) = self.keeping.as_ref().and_then(|k| k.fd_store.as_ref()) else { return };
        if let Err(error) = say(fd_store) {
            self.lose_fd_store(&error.to_string());
        }
    }

    fn keep_link(&mut self, name: &str) {
        let Some(link) = self.links.get(name) else { return };
        let bytes = link.config.fingerprint();
        let Ok(region) = duplicate(name, &link.region) else { return };
        self.tell_fd_store(|fd_store| fd_store.put(name, &bytes, &[region.as_fd()], 0));
    }

    fn keep_seat(&mut self, name: &str, id: u32) {
        let Some(fd_store) = self.keeping.as_ref().and_then(|k| k.fd_store.as_ref()) else { return };
        let Some(link) = self.links.get(name) else { return };
        let member = link.members.get(&id);
        let nobody = PeerRecord { id, hears: Hears::Nothing, settled: false, told: 0 };
        let mut bytes = link.server.record(id).unwrap_or(nobody).encode().to_vec();
        bytes.extend(seat_words(member));
        let life = member.and_then(|m| m.life.as_ref());
        let mut fds: Vec<BorrowedFd<'_>> = life.iter().map(|fd| fd.as_fd()).collect();
        fds.extend(link.doorbells.get(id as usize).into_iter().flatten().map(AsFd::as_fd));
        let counts = life.is_some() && link.config.helper != Some(id);
        let done = fd_store.put(&link.config.peer_record(id), &bytes, &fds, u8::from(counts));
        if let Err(error) = done {
            self.lose_fd_store(&error.to_string());
        }
    }

    /// Has the fd store know what it must before more is sent.
    fn settle_accounts(&mut self, name: &str) {
        let changed = self.links.get_mut(name).map(|l| l.server.changed()).unwrap_or_default();
        changed.into_iter().for_each(|id| self.keep_seat(name, id));
    }

    // --- links ---

    pub(super) fn open(&mut self, config: Config) -> Result<Opened, LinkError> {
        let name = config.name.clone();
        let memory = |source| LinkError::Memory { link: name.clone(), source };
        let system = |what| {
            let link = name.clone();
            move |source| LinkError::System { what, link, source }
        };
        self.close(&name);
        self.find_fd_store();
        let (kept, out) = self.take_kept(&config);
        let restored = kept.is_some();
        let Kept { region, members, doorbells, server } = match kept {
            Some(kept) => kept,
            None => {
                let region = sealed_region(&format!("tombolo-{name}"), config.region_bytes).map_err(memory)?;
                let mut members = BTreeMap::new();
                let mut server = Server::new(config.shape);
                if let Some(host) = config.host {
                    let refused = |source| LinkError::Refused { link: name.clone(), source };
                    server.join(Seat::Fixed(host), Hears::Nothing, now_ns()).map_err(refused)?;
                    let pid = std::process::id();
                    members.insert(host, Member { kind: Kind::Host, pid, life: None, token: OWN });
                }
                let seat = |_| (0..config.shape.vectors).map(|_| Doorbell::shared()).collect();
                let doorbells = (0..config.shape.max_peers).map(seat).collect::<Result<_, _>>();
                Kept { region, members, doorbells: doorbells.map_err(system("making a doorbell"))?, server }
            }
        };
        let head =
            (config.layout.state_table_offset + u64::from(config.shape.max_peers) * 4).next_multiple_of(PAGE_BYTES);
        let mapping = Mapping::new(&region, 0, head, true).map_err(memory)?;
        let host = config.host.and_then(|host| doorbells.get(host as usize));
        let own =
            host.map(|doorbells: &Vec<Doorbell>| doorbells.iter().map(Doorbell::duplicate).collect::<Result<_, _>>());
        let own = own.transpose().map_err(system("duplicating a doorbell"))?.unwrap_or_default();
        let there = server.ids().filter(|id| Some(*id) != config.host);
        let there = there.map(|id| (id, doorbells[id as usize].iter().filter_map(|b| b.duplicate().ok()).collect()));
        let opened = Opened { region: duplicate(&name, &region)?, own, restored: there.collect() };
        let link = ServedLink {
            config,
            region,
            mapping,
            server,
            members,
            doorbells,
            doors: Vec::new(),
            watcher: None,
            joins: 0,
            leaves: 0,
            cut_slow: 0,
            cut_talking: 0,
            refused: 0,
            waiting: Vec::new(),
            refusal_told_ns: None,
        };
        if !restored {
            link.write_header();
        }
        // Those who were not taken up are gone from the state table too.
        out.iter().for_each(|id| link.clear_state(*id));
        let seats = link.config.shape.max_peers;
        self.links.insert(name.clone(), link);
        self.keep_link(&name);
        (0..seats).for_each(|id| self.keep_seat(&name, id));
        self.settle_accounts(&name);
        Ok(opened)
    }

    /// A link that the fd store of an earlier daemon had just so, on which somebody lives still;
    /// and the ids of those of its peers that are not taken up.
    fn take_kept(&mut self, config: &Config) -> (Option<Kept>, Vec<u32>) {
        let Some(keeping) = &mut self.keeping else { return (None, vec![]) };
        let link = keeping.left.remove(&config.name);
        let ids = 0..config.shape.max_peers;
        let seats: Vec<_> = ids.map(|id| seat(config, &keeping.left.remove(&config.peer_record(id))?)).collect();
        let region = link.filter(|l| l.bytes == config.fingerprint()).and_then(|l| l.fds.into_iter().next());
        let same = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|s| s.st_size as u64) == Ok(config.region_bytes);
        let region = region.filter(|fd| cannot_shrink(fd) && same(fd));
        let (mut records, mut members, mut doorbells, mut out) = (vec![], BTreeMap::new(), vec![], vec![]);
        // Without one seat's doorbells the others would ring no peer.
        let mut whole = region.is_some() && seats.iter().all(Option::is_some);
        for (id, seat) in seats.into_iter().enumerate().filter_map(|(id, seat)| Some((id as u32, seat?))) {
            doorbells.push(seat.doorbells);
            let Some((record, mut member)) = seat.member else { continue };
            let host = member.kind == Kind::Host && config.host == Some(id);
            let lives = host || member.life.as_ref().is_some_and(|life| !has_ended(life));
            if record.id != id || !lives {
                // The others are to be told, if they have heard of it for sure.
                records.extend((!record.settled).then_some(PeerRecord { id, ..record }));
                member.hang_up();
                out.push(id);
                continue;
            }
            if host {
                member.pid = std::process::id();
            }
            records.push(PeerRecord { settled: record.settled || host, ..record });
            members.insert(id, member);
        }
        let (server, unsettled) = Server::restore(config.shape, &records, now_ns());
        for id in unsettled {
            members.remove(&id).iter().for_each(Member::hang_up);
            out.push(id);
        }
        whole &= config.host.is_none_or(|host| members.contains_key(&host));
        whole &= members.values().any(|m| m.kind != Kind::Host);
        match region.filter(|_| whole) {
            Some(region) => (Some(Kept { region, members, doorbells, server }), out),
            None => {
                members.values().for_each(Member::hang_up);
                (None, out)
            }
        }
    }

    pub(super) fn serve(&mut self, name: &str, watcher: Option<Watcher>) -> Result<(), LinkError> {
        let unknown = || LinkError::Unknown { link: name.into() };
        let config = self.links.get(name).ok_or_else(unknown)?.config.clone();
        for (at, door) in config.doors.iter().enumerate() {
            let failed = |source| LinkError::Listen { link: name.into(), path: door.path.clone(), source };
            let handed = self.handed_doors.remove(&door.path).filter(|fd| listener::is_found_at(fd, &door.path));
            let handed = handed.and_then(|fd| Listener::adopt(fd, &door.path).ok());
            let listener = match handed {
                Some(listener) => listener,
                None => Listener::bind(&door.path, SocketType::STREAM).map_err(failed)?,
            };
            let token = self.watch(&listener, EventSource::Door { link: name.into(), at }, false).map_err(failed)?;
            let link = self.links.get_mut(name).ok_or_else(unknown)?;
            link.doors.push((listener, token, door.seat));
        }
        let link = self.links.get_mut(name).ok_or_else(unknown)?;
        link.watcher = watcher;
        let ids: Vec<u32> = link.members.keys().copied().collect();
        for id in ids {
            self.watch_member(name, id);
            // What happened before it was watched is not reported.
            self.look(name, id);
        }
        Ok(())
    }

    /// Listens again behind every door whose name is gone. Connected peers stay.
    pub(super) fn restore_doors(&mut self) -> Vec<LinkError> {
        let is_gone = |path: &Path| std::fs::symlink_metadata(path).is_err_and(|e| e.kind() == ErrorKind::NotFound);
        let mut gone = Vec::new();
        for (name, link) in &self.links {
            let doors = link.doors.iter().enumerate().filter(|(_, (door, ..))| is_gone(door.path()));
            gone.extend(doors.map(|(at, (door, ..))| (name.clone(), at, door.path().to_path_buf())));
        }
        let mut faults = Vec::new();
        for (name, at, path) in gone {
            let source = EventSource::Door { link: name.clone(), at };
            let opened = Listener::bind(&path, SocketType::STREAM)
                .and_then(|listener| self.watch(&listener, source, false).map(|token| (listener, token)));
            match (opened, self.links.get_mut(&name).and_then(|link| link.doors.get_mut(at))) {
                (Ok((listener, token)), Some(door)) => {
                    let old = std::mem::replace(door, (listener, token, door.2));
                    self.unwatch(&old.0, old.1);
                }
                (Err(source), _) => faults.push(LinkError::Listen { link: name, path, source }),
                _ => {}
            }
        }
        faults
    }

    fn watch_member(&mut self, name: &str, id: u32) {
        let Some(member) = self.links.get(name).and_then(|l| l.members.get(&id)) else { return };
        let (Some(life), write) = (&member.life, member.kind == Kind::Client) else { return };
        let Ok(life) = duplicate(name, life) else { return };
        // A peer that cannot be watched is one whose end is found when something is sent.
        let token = self.watch(&life, EventSource::Member { link: name.into(), id }, write).unwrap_or(OWN);
        if let Some(member) = self.links.get_mut(name).and_then(|l| l.members.get_mut(&id)) {
            // The duplicate is what epoll knows, so it is what is kept.
            member.life = Some(life);
            member.token = token;
        }
    }

    fn announce(&mut self, name: &str, id: u32) {
        let Some(link) = self.links.get_mut(name) else { return };
        let (Some(watcher), Some(member)) = (&mut link.watcher, link.members.get(&id)) else { return };
        if member.kind != Kind::Host {
            let doorbells = link.doorbells.get(id as usize).into_iter().flatten();
            let doorbells = doorbells.filter_map(|b| b.duplicate().ok()).collect();
            watcher(Event::Joined { id, doorbells });
        }
    }

    fn accept(&mut self, name: &str, at: usize) {
        loop {
            let Some(link) = self.links.get_mut(name) else { return };
            let Some((listener, _, seat)) = link.doors.get(at) else { return };
            let (accepted, seat) = (listener.accept(), *seat);
            match accepted {
                Ok(Some(connection)) => {
                    let waiting = Waiting { seat, connection, since_ns: now_ns() };
                    if let Some(waiting) = self.try_seat(name, waiting) {
                        let Some(link) = self.links.get_mut(name) else { return };
                        link.waiting.push(waiting);
                        if link.waiting.len() > MAX_WAITING {
                            // The one that has waited longest makes room.
                            let oldest = link.waiting.remove(0);
                            self.refuse(name, &oldest);
                        }
                        self.retry = true;
                    }
                }
                Ok(None) => return,
                Err(_) => {
                    // No descriptor left: it waits.
                    self.retry = true;
                    return;
                }
            }
        }
    }

    /// Seats a connection, or gives it back where there is no seat for it now.
    fn try_seat(&mut self, name: &str, waiting: Waiting) -> Option<Waiting> {
        if let Seat::Fixed(id) = waiting.seat {
            // The peer on that seat may have ended an instant ago.
            self.look(name, id);
        }
        match self.links.get(name)?.server.seat(waiting.seat) {
            Ok(_) => {
                self.welcome(name, waiting.seat, waiting.connection);
                None
            }
            Err(_) => Some(waiting),
        }
    }

    /// Seats connections that wait, as far as there are seats now, and refuses those that have
    /// waited for too long.
    fn seat_waiting(&mut self, name: &str) {
        let Some(link) = self.links.get_mut(name) else { return };
        for waiting in std::mem::take(&mut link.waiting) {
            let mut hang_up = [PollFd::new(&waiting.connection, PollFlags::RDHUP)];
            if poll(&mut hang_up, Some(&Timespec::default())).is_ok_and(|n| n > 0) {
                continue;
            }
            let Some(waiting) = self.try_seat(name, waiting) else { continue };
            if now_ns().saturating_sub(waiting.since_ns) >= SEAT_WAIT_NS {
                self.refuse(name, &waiting);
            } else if let Some(link) = self.links.get_mut(name) {
                link.waiting.push(waiting);
                self.retry = true;
            }
        }
    }

    /// Counts a connection for which there was no seat, and says why; the caller closes it.
    fn refuse(&mut self, name: &str, waiting: &Waiting) {
        let Some(link) = self.links.get_mut(name) else { return };
        link.refused += 1;
        let (now, Err(why)) = (now_ns(), link.server.seat(waiting.seat)) else { return };
        if link.refusal_told_ns.is_some_and(|told| now.saturating_sub(told) < REFUSAL_LOG_NS) {
            return;
        }
        link.refusal_told_ns = Some(now);
        let pid = peer_pid(&waiting.connection);
        let holders: Vec<String> = link.members.iter().map(|(id, m)| format!("{id} by process {}", m.pid)).collect();
        (self.on_failure)(&format!(
            "link {name}: process {pid} was refused after {} ms: {why} (peer IDs in use: {}); end one of them, or \
             raise the link's peers",
            now.saturating_sub(waiting.since_ns) / 1_000_000,
            holders.join(", "),
        ));
    }

    fn welcome(&mut self, name: &str, seat: Seat, connection: OwnedFd) -> Option<()> {
        let pid = peer_pid(&connection);
        let link = self.links.get_mut(name)?;
        let hears = match (seat, link.config.shape.dialect) {
            (Seat::Fixed(_), Dialect::V1) => Hears::Seats,
            _ => Hears::Comings,
        };
        let id = link.server.join(seat, hears, now_ns()).ok()?;
        self.seated(name, id, Member { kind: Kind::Client, pid, life: Some(connection), token: OWN });
        Some(())
    }

    pub(super) fn occupy(&mut self, name: &str, id: u32, pid: u32, pidfd: BorrowedFd<'_>) -> Result<(), LinkError> {
        self.look(name, id);
        let pidfd = duplicate(name, pidfd)?;
        let link = self.links.get_mut(name).ok_or_else(|| LinkError::Unknown { link: name.into() })?;
        let refused = |source| LinkError::Refused { link: name.into(), source };
        link.server.join(Seat::Fixed(id), Hears::Nothing, now_ns()).map_err(refused)?;
        let member = Member { kind: Kind::Occupant, pid, life: Some(pidfd), token: OWN };
        self.seated(name, id, member);
        self.look(name, id);
        Ok(())
    }

    fn seated(&mut self, name: &str, id: u32, member: Member) {
        if let Some(link) = self.links.get_mut(name) {
            // An earlier peer may have overwritten it, and a new one trusts it.
            link.write_header();
            link.joins += 1;
            link.members.insert(id, member);
        }
        self.watch_member(name, id);
        self.settle_accounts(name);
        self.announce(name, id);
        self.pump_all(name);
    }

    /// Looks whether a peer is there still, and sends what waits for it.
    fn look(&mut self, name: &str, id: u32) {
        let Some(link) = self.links.get_mut(name) else { return };
        let Some(Member { kind, life: Some(life), .. }) = link.members.get(&id) else { return };
        let gone = match kind {
            Kind::Client => match passing::receive(life, &mut [0; 64], false) {
                Ok(got) if got.bytes > 0 => {
                    link.cut_talking += 1;
                    true
                }
                Err(Errno::AGAIN | Errno::INTR) => false,
                _ => true,
            },
            _ => has_ended(life),
        };
        if gone {
            self.leave(name, id);
        } else {
            self.pump(name, id);
        }
    }

    fn leave(&mut self, name: &str, id: u32) {
        let Some(link) = self.links.get_mut(name) else { return };
        let Some(member) = link.members.remove(&id) else { return };
        link.leaves += 1;
        link.server.leave(id, now_ns());
        link.clear_state(id);
        for other in link.members.keys() {
            link.doorbells
                .get(*other as usize)
                .and_then(|doorbells| doorbells.first())
                .into_iter()
                .for_each(Doorbell::ring);
        }
        if let Some(watcher) = &mut link.watcher {
            watcher(Event::Left { id });
        }
        if let Some(life) = &member.life {
            self.unwatch(life, member.token);
            member.hang_up();
        }
        self.settle_accounts(name);
        self.pump_all(name);
    }

    fn pump_all(&mut self, name: &str) {
        let ids: Vec<u32> = self.links.get(name).map(|l| l.members.keys().copied().collect()).unwrap_or_default();
        ids.into_iter().for_each(|id| self.pump(name, id));
    }

    /// Sends what waits for a client, as far as its socket takes it.
    fn pump(&mut self, name: &str, id: u32) {
        loop {
            self.settle_accounts(name);
            let Some(link) = self.links.get_mut(name) else { return };
            let Some(message) = link.server.next(id).copied() else { return };
            let Some(Member { kind: Kind::Client, life: Some(connection), .. }) = link.members.get(&id) else { return };
            let passed = match message.passed {
                None => None,
                Some(Passed::Region) => Some(link.region.as_fd()),
                Some(Passed::Doorbell { peer, vector }) => link
                    .doorbells
                    .get(peer as usize)
                    .and_then(|doorbells| doorbells.get(vector as usize))
                    .map(AsFd::as_fd),
            };
            match passing::send(connection, message.bytes(), passed.as_slice(), false) {
                // A stream takes a message of a few bytes whole, or not at all.
                Ok(_) => link.server.sent(id, now_ns()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Err(Errno::TOOMANYREFS | Errno::NOBUFS | Errno::NOMEM) => {
                    self.retry = true;
                    return;
                }
                Err(_) => return self.leave(name, id),
            }
        }
    }

    pub(super) fn close(&mut self, name: &str) {
        let Some(link) = self.links.get(name) else { return };
        let ids: Vec<u32> = (0..link.config.shape.max_peers).collect();
        let labels: Vec<String> = ids.iter().map(|id| link.config.peer_record(*id)).collect();
        self.close_quietly(name);
        self.tell_fd_store(|fd_store| fd_store.forget(name));
        for label in labels {
            self.tell_fd_store(|fd_store| fd_store.forget(&label));
        }
    }

    /// Closes a link as far as this process goes.
    pub(super) fn close_quietly(&mut self, name: &str) {
        let Some(link) = self.links.remove(name) else { return };
        let forgets = self.keeping.is_some();
        for (listener, token, _) in &link.doors {
            self.unwatch(listener, *token);
        }
        for member in link.members.values() {
            let Some(life) = &member.life else { continue };
            self.unwatch(life, member.token);
            if forgets {
                member.hang_up();
            }
        }
    }
}
