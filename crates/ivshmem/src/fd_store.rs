//! The fd store of a fabric: a small process that holds what must survive the daemon. For ivshmem
//! links this is regions, doorbells and the connections of the VMMs. For vhost-user ports it is the
//! connection, the guest's memory and the eventfds. The fd store does not interpret what it holds.
//! It keeps records by name, bytes with descriptors, and returns them.
//!
//! A machine without a server continues to ring and read: its memory and eventfds are its own. A
//! killed server takes with it the other end of each, and the connection through which the machine
//! is told of others. The fd store holds these too.
//!
//! # Life
//! The fd store ends when it is told to. It also ends when no process is connected and all signs of
//! life in its records are dead (`life`: pidfds and connections). So it outlives a killed daemon as
//! long as there is a machine to take over, and not longer. Its listening socket is made, and
//! connected to, before the fd store is started. So there is no instant at which it runs and cannot
//! be reached. An fd store that has no connection any more when it starts ends at once.
//!
//! # Connections that expect answers
//! A vhost-user frontend that has sent a request waits for the answer, and its guest may be stopped
//! until it comes. There is no answer while the daemon is away. Such a connection is kept with
//! PUT_CONNECTION: its first descriptor is shut down as soon as the peer sends something while no
//! daemon is connected. The frontend then connects again, as after any crash. DOUBT marks a record
//! while the daemon handles a request, because the fd store cannot know how far a killed daemon
//! got. A record in doubt is shut down when no daemon is connected, and listed as ENTRY_IN_DOUBT.
//! The next PUT ends the doubt.
//!
//! # The wire
//! A SOCK_SEQPACKET Unix socket that only the same user may use. Requests need no answer, except
//! LIST. LIST is answered by one ENTRY for each record whose name begins with the one given, and an
//! END. A request that was sent is carried out even if its sender is killed at the next instant.
//! ```text
//! 0 kind u8 (1 PUT, 2 FORGET, 3 LIST, 4 QUIT, 5 ENTRY, 6 END, 7 PUT_CONNECTION, 8 DOUBT, 9 ENTRY_IN_DOUBT, 10 LINGER)
//! 1 life u8 · 2 name's bytes u16 LE · 4 name · record
//! ```
//! LINGER carries a u32 LE of seconds: so long the store stays without a daemon even if nothing in
//! it is alive. PUT replaces the record of that name. Its descriptors come with it; the first
//! `life` of them are signs of life.
//!
//! # Who may connect
//! Processes of the same user, except those that a record [`refusal`] names (its bytes: the start
//! time, u64 LE) and their descendants. So a guest that has taken over its QEMU gets nothing here.
//! For a process that connects again and again, the fd store checks this once a second. After 64
//! new connections it serves requests again.
//!
//! # A deleted socket
//! Where nothing has its path any more, the fd store listens there again at the next request.
//!
//! # Limits
//! [`MAX_RECORDS`] records of at most [`MAX_BYTES`] bytes and [`MAX_DESCRIPTORS`] descriptors.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};
use tombolo_shm::credentials;
use tombolo_shm::foreign::ForeignFd;
use tombolo_shm::lineage;
use tombolo_shm::listener::Listener;
use tombolo_shm::passing::{self, MAX_DESCRIPTORS};
use tombolo_shm::verdicts::{Found, Verdicts};

/// Records that the store accepts.
pub const MAX_RECORDS: usize = 4096;
/// Longest message: header, name and record together.
pub const MAX_BYTES: usize = 4096;

// The header's fields.
const KIND: usize = 0;
const LIFE: usize = 1;
const NAME_BYTES: usize = 2;
const HEADER_BYTES: usize = 4;
const PUT: u8 = 1;
const FORGET: u8 = 2;
const LIST: u8 = 3;
const QUIT: u8 = 4;
const ENTRY: u8 = 5;
const END: u8 = 6;
const PUT_CONNECTION: u8 = 7;
const DOUBT: u8 = 8;
const ENTRY_IN_DOUBT: u8 = 9;
const LINGER: u8 = 10;

/// How long an fd store may take to answer, or to make room for a request, before it counts as
/// lost.
const TIMEOUT: Duration = Duration::from_secs(3);
/// How long one that has just answered may take for each record that it lists: a machine with too
/// much work.
const SLOW: Duration = Duration::from_secs(30);

/// Connections that are accepted before requests are heard again.
const ACCEPTED: usize = 64;

/// A record that the fd store holds, with its descriptors.
#[derive(Debug)]
pub struct StoredRecord {
    /// Unique in the store: putting a record replaces the one of that name.
    pub name: String,
    /// Contents, which only the owner of the record interprets.
    pub bytes: Vec<u8>,
    /// Its descriptors, in the order in which they were given.
    pub fds: Vec<OwnedFd>,
    /// How many of the first of them are signs of life.
    pub life: u8,
    /// The daemon that put it was handling a request of its peer.
    pub in_doubt: bool,
}

/// The name of the record that keeps a process, and those that descend from it, from connecting.
pub fn refusal(pid: u32) -> String {
    format!("{REFUSE}{pid}")
}

const REFUSE: &str = "refuse:";

/// Whether one of the records refuses that process.
fn is_refused(records: &BTreeMap<String, Kept>, pid: u32) -> bool {
    let ticks = |pid: u32| records.get(&refusal(pid)).and_then(|kept| kept.bytes.first_chunk().copied());
    lineage::of(pid).any(|(pid, found)| ticks(pid).is_some_and(|ticks| u64::from_le_bytes(ticks) == found))
}

/// Forgets refusals of processes that have ended.
fn forget_ended(records: &mut BTreeMap<String, Kept>) {
    records.retain(|name, _| {
        let pid = name.strip_prefix(REFUSE).and_then(|pid| pid.parse().ok());
        pid.is_none_or(|pid| lineage::start_ticks(pid).is_some())
    });
}

fn message(kind: u8, life: u8, name: &str, bytes: &[u8]) -> Result<Vec<u8>, Errno> {
    if HEADER_BYTES + name.len() + bytes.len() > MAX_BYTES {
        return Err(Errno::MSGSIZE);
    }
    let mut out = vec![0; HEADER_BYTES];
    (out[KIND], out[LIFE]) = (kind, life);
    out[NAME_BYTES..HEADER_BYTES].copy_from_slice(&(name.len() as u16).to_le_bytes());
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(bytes);
    Ok(out)
}

/// Kind, life, name and record of a message.
fn parse(bytes: &[u8]) -> Option<(u8, u8, &str, &[u8])> {
    let (head, rest) = bytes.split_at_checked(HEADER_BYTES)?;
    let (name, record) = rest.split_at_checked(u16::from_le_bytes([head[NAME_BYTES], head[NAME_BYTES + 1]]).into())?;
    Some((head[KIND], head[LIFE], std::str::from_utf8(name).ok()?, record))
}

/// The connection of a daemon to its fd store.
#[derive(Debug)]
pub struct FdStore {
    socket: OwnedFd,
}

impl FdStore {
    /// Connects to the fd store at `path`.
    ///
    /// # Errors
    /// `ENOENT` or `ECONNREFUSED` where there is none.
    pub fn connect(path: &Path) -> Result<FdStore, Errno> {
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        for way in [sockopt::Timeout::Send, sockopt::Timeout::Recv] {
            sockopt::set_socket_timeout(&socket, way, Some(TIMEOUT))?;
        }
        net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(FdStore { socket })
    }

    /// Has a record kept, in place of the one of that name. The first `life` descriptors are signs
    /// of life.
    ///
    /// # Errors
    /// `EMSGSIZE` and `E2BIG` beyond the limits; else the fd store is lost.
    pub fn put(&self, name: &str, bytes: &[u8], fds: &[BorrowedFd<'_>], life: u8) -> Result<(), Errno> {
        self.say(PUT, life, name, bytes, fds)
    }

    /// As [`FdStore::put`], for a connection whose peer expects answers; see the module's head.
    /// Ends its doubt.
    ///
    /// # Errors
    /// As for [`FdStore::put`].
    pub fn put_connection(&self, name: &str, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        self.say(PUT_CONNECTION, 1, name, bytes, fds)
    }

    /// Marks a record as in doubt, if there is one.
    ///
    /// # Errors
    /// The fd store is lost.
    pub fn doubt(&self, name: &str) -> Result<(), Errno> {
        self.say(DOUBT, 0, name, &[], &[])
    }

    /// Has it stay for `limit` without a daemon, even if nothing in it is alive; for a restart that
    /// follows soon.
    ///
    /// # Errors
    /// The fd store is lost.
    pub fn linger(&self, limit: Duration) -> Result<(), Errno> {
        let seconds = u32::try_from(limit.as_secs()).unwrap_or(u32::MAX);
        self.say(LINGER, 0, "", &seconds.to_le_bytes(), &[])
    }

    /// Has a record forgotten, if there is one.
    ///
    /// # Errors
    /// The fd store is lost.
    pub fn forget(&self, name: &str) -> Result<(), Errno> {
        self.say(FORGET, 0, name, &[], &[])
    }

    /// Has it end.
    ///
    /// # Errors
    /// The fd store is lost, so it has ended.
    pub fn quit(&self) -> Result<(), Errno> {
        self.say(QUIT, 0, "", &[], &[])
    }

    fn say(&self, kind: u8, life: u8, name: &str, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        let message = message(kind, life, name, bytes)?;
        loop {
            match passing::send(&self.socket, &message, fds, true) {
                Err(Errno::INTR) => {}
                done => return done.map(drop),
            }
        }
    }

    /// Everything that is kept, by name.
    ///
    /// # Errors
    /// The fd store is lost; `EPROTO` if it is none.
    pub fn list(&self) -> Result<Vec<StoredRecord>, Errno> {
        self.list_of("")
    }

    /// As [`FdStore::list_of`], from a store that has just answered, however slow it is.
    ///
    /// # Errors
    /// As for [`FdStore::list`].
    pub(crate) fn list_slowly(&self, prefix: &str) -> Result<Vec<StoredRecord>, Errno> {
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(SLOW))?;
        let records = self.list_of(prefix);
        sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(TIMEOUT))?;
        records
    }

    /// Those records whose names begin with `prefix`.
    ///
    /// # Errors
    /// As for [`FdStore::list`].
    pub fn list_of(&self, prefix: &str) -> Result<Vec<StoredRecord>, Errno> {
        self.say(LIST, 0, prefix, &[], &[])?;
        let mut out = Vec::new();
        let mut buffer = [0; MAX_BYTES];
        loop {
            let got = match passing::receive(&self.socket, &mut buffer, true) {
                Err(Errno::INTR) => continue,
                got => got?,
            };
            match parse(&buffer[..got.bytes]).filter(|_| !got.truncated) {
                Some((END, ..)) => return Ok(out),
                Some((kind @ (ENTRY | ENTRY_IN_DOUBT), life, name, bytes)) => {
                    let in_doubt = kind == ENTRY_IN_DOUBT;
                    out.push(StoredRecord {
                        name: name.into(),
                        bytes: bytes.into(),
                        fds: got.fds.into_iter().map(ForeignFd::keep).collect(),
                        life,
                        in_doubt,
                    });
                }
                // The end of the stream, or descriptors that this process has no room for.
                _ => return Err(Errno::PROTO),
            }
        }
    }
}

impl AsFd for FdStore {
    /// Hangs up when the fd store is lost.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

struct Kept {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
    life: u8,
    /// Signs of life that have not ended.
    alive: Vec<bool>,
    /// Its first descriptor is a connection whose peer expects answers.
    expects_answers: bool,
    in_doubt: bool,
}

impl Kept {
    /// Ends the connection, wherever else it is held.
    fn shut(&self) {
        if let Some(connection) = self.fds.first() {
            // One that the peer has ended is shut already.
            let _ = net::shutdown(connection, net::Shutdown::Both);
        }
    }
}

/// What shows that the other side of a sign of life has ended: a pidfd becomes readable; of a
/// connection only the hang-up counts, which is told unasked.
pub(super) fn sign(fd: impl AsFd) -> PollFlags {
    match fstat(fd).map(|s| FileType::from_raw_mode(s.st_mode)) {
        Ok(FileType::Socket) => PollFlags::empty(),
        _ => PollFlags::IN,
    }
}

/// Keeps, until it is told to end or there is nothing more to keep anything for.
///
/// # Errors
/// The kernel's, where it cannot even wait.
pub fn serve(listener: Listener) -> Result<(), Errno> {
    let me = rustix::process::geteuid().as_raw();
    let mut records: BTreeMap<String, Kept> = BTreeMap::new();
    let mut connections: Vec<OwnedFd> = Vec::new();
    // Gone before the connections are: a process that sees them end starts another fd store in its
    // place.
    let mut listener = listener;
    let mut refusals = Verdicts::default();
    let mut linger_until: Option<Instant> = None;
    loop {
        let deleted =
            std::fs::symlink_metadata(listener.path()).is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound);
        let again = deleted.then(|| Listener::replace(listener.path(), SocketType::SEQPACKET).ok()).flatten();
        // Who connected before the deletion still waits at the old one.
        let old = again.map(|again| std::mem::replace(&mut listener, again));
        for from in old.iter().chain([&listener]) {
            for _ in 0..ACCEPTED {
                let Ok(Some(connection)) = from.accept() else { break };
                let Some(peer) = credentials::peer(&connection).ok().filter(|peer| peer.uid == me) else { continue };
                let pid = peer.pid_or_zero();
                // Before refusals of processes that have ended are forgotten.
                let named = records.contains_key(&refusal(pid));
                let refuses = || {
                    forget_ended(&mut records);
                    is_refused(&records, pid)
                };
                let is_refused = match pid {
                    // In another PID namespace.
                    0 => false,
                    pid => match refusals.of(&connection, pid, refuses) {
                        // A record may have come since.
                        Found::Known(false) => is_refused(&records, pid),
                        Found::Known(true) | Found::New(true) => true,
                        Found::New(false) => false,
                        // What a killed daemon has sent is carried out, and not what a machine sent
                        // and then ended.
                        Found::Ended => named,
                    },
                };
                if !is_refused {
                    connections.push(connection);
                }
            }
        }
        drop(old);
        let alone = connections.is_empty();
        if alone {
            records.retain(|_, kept| {
                let doubtful = kept.expects_answers && kept.in_doubt;
                if doubtful {
                    kept.shut();
                }
                !doubtful
            });
        }
        let lingers =
            linger_until.map(|until| until.saturating_duration_since(Instant::now())).filter(|d| !d.is_zero());
        if alone && lingers.is_none() && !records.values().any(|k| k.alive.contains(&true)) {
            return Ok(());
        }
        let mut fds = vec![PollFd::new(&listener, PollFlags::IN)];
        fds.extend(connections.iter().map(|c| PollFd::new(c, PollFlags::IN)));
        let mut signs = Vec::new();
        for (name, kept) in &records {
            for (i, fd) in kept.fds.iter().enumerate().take(kept.life.into()).filter(|(i, _)| kept.alive[*i]) {
                let expects = alone && kept.expects_answers && i == 0;
                fds.push(PollFd::new(fd, if expects { PollFlags::IN } else { sign(fd) }));
                signs.push((name.clone(), i, expects));
            }
        }
        let limit = lingers.filter(|_| alone).map(|d| Timespec { tv_sec: d.as_secs() as i64 + 1, tv_nsec: 0 });
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        // A daemon that connects at the same instant is heard first: it answers what the peer asks.
        let daemon_comes = ready[0];
        for ((name, i, expects), _) in
            signs.into_iter().zip(&ready[1 + connections.len()..]).filter(|(_, ready)| **ready)
        {
            if expects && daemon_comes {
                continue;
            }
            if expects {
                if let Some(kept) = records.remove(&name) {
                    kept.shut();
                }
            } else if let Some(kept) = records.get_mut(&name) {
                kept.alive[i] = false;
            }
        }
        let mut at = 0;
        let mut quit = false;
        connections.retain(|connection| {
            at += 1;
            // All that it has said, before a younger one is heard: a daemon that follows a killed
            // one asks for what that one's last requests have made.
            while ready[at] && !quit {
                match request(connection, &mut records, &mut quit, &mut linger_until) {
                    Some(true) => {}
                    Some(false) => break,
                    None => return false,
                }
            }
            true
        });
        if quit {
            return Ok(());
        }
    }
}

/// Carries out one request; whether there was one, or `None` if the connection is over.
fn request(
    connection: &OwnedFd,
    records: &mut BTreeMap<String, Kept>,
    quit: &mut bool,
    linger_until: &mut Option<Instant>,
) -> Option<bool> {
    let mut buffer = [0; MAX_BYTES];
    let got = match passing::receive(connection, &mut buffer, false) {
        Ok(got) => got,
        Err(Errno::AGAIN | Errno::INTR) => return Some(false),
        Err(_) => return None,
    };
    let (kind, life, name, bytes) = parse(&buffer[..got.bytes])?;
    match kind {
        PUT | PUT_CONNECTION => {
            // An incomplete record is worse than none, so a request for it finds nothing.
            if got.truncated || usize::from(life) > got.fds.len() || records.len() >= MAX_RECORDS {
                if let Some(old) = records.remove(name)
                    && old.expects_answers
                {
                    old.shut();
                }
                return Some(true);
            }
            // From a daemon of this process's own user.
            let (alive, expects_answers) = (vec![true; life.into()], kind == PUT_CONNECTION);
            let kept = Kept {
                bytes: bytes.into(),
                alive,
                fds: got.fds.into_iter().map(ForeignFd::keep).collect(),
                life,
                expects_answers,
                in_doubt: false,
            };
            records.insert(name.into(), kept);
        }
        DOUBT => {
            if let Some(kept) = records.get_mut(name) {
                kept.in_doubt = true;
            }
        }
        LINGER => {
            let seconds = u32::from_le_bytes(*bytes.first_chunk()?);
            *linger_until = Some(Instant::now() + Duration::from_secs(seconds.into()));
        }
        FORGET => drop(records.remove(name)),
        LIST => list(connection, records, name).ok()?,
        QUIT => *quit = true,
        _ => return None,
    }
    Some(true)
}

fn list(connection: &OwnedFd, records: &BTreeMap<String, Kept>, prefix: &str) -> Result<(), Errno> {
    sockopt::set_socket_timeout(connection, sockopt::Timeout::Send, Some(TIMEOUT))?;
    for (name, kept) in records.iter().filter(|(name, _)| name.starts_with(prefix)) {
        let fds: Vec<BorrowedFd<'_>> = kept.fds.iter().map(AsFd::as_fd).collect();
        debug_assert!(fds.len() <= MAX_DESCRIPTORS);
        let kind = if kept.in_doubt { ENTRY_IN_DOUBT } else { ENTRY };
        passing::send(connection, &message(kind, kept.life, name, &kept.bytes)?, &fds, true)?;
    }
    passing::send(connection, &message(END, 0, "", &[])?, &[], true).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::sync::atomic::{AtomicU32, Ordering};
    use tombolo_shm::doorbell::Doorbell;

    /// A socket of the test's own, and the fd store behind it in a thread.
    struct Place {
        path: std::path::PathBuf,
    }

    impl Place {
        fn new() -> Place {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let number = NUMBER.fetch_add(1, Ordering::Relaxed);
            Place { path: std::env::temp_dir().join(format!("tmb-fd_store-{}-{number}", std::process::id())) }
        }

        fn start(&self) -> (FdStore, std::thread::JoinHandle<Result<(), Errno>>) {
            let listener = Listener::bind(&self.path, SocketType::SEQPACKET).unwrap();
            let fd_store = FdStore::connect(&self.path).unwrap();
            (fd_store, std::thread::spawn(move || serve(listener)))
        }
    }

    impl Drop for Place {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.path);
        }
    }

    fn names(fd_store: &FdStore) -> Vec<(String, Vec<u8>, usize, u8)> {
        fd_store.list().unwrap().into_iter().map(|r| (r.name, r.bytes, r.fds.len(), r.life)).collect()
    }

    /// Written out from the layout in the head of this file: kind, life, name's length, name,
    /// record.
    const PUT_BYTES: &[u8] = b"\x01\x01\x07\x00lan/webone";
    const LIST_BYTES: &[u8] = b"\x03\x00\x04\x00lan/";
    const ENTRY_BYTES: &[u8] = b"\x05\x01\x07\x00lan/webone";
    const DOUBT_BYTES: &[u8] = b"\x08\x00\x07\x00lan/web";
    const ENTRY_IN_DOUBT_BYTES: &[u8] = b"\x09\x01\x07\x00lan/webone";
    const END_BYTES: &[u8] = b"\x06\x00\x00\x00";

    fn next(socket: &OwnedFd) -> (Vec<u8>, usize) {
        let mut buffer = [0xa5; MAX_BYTES];
        let got = passing::receive(socket, &mut buffer, true).unwrap();
        (buffer[..got.bytes].into(), got.fds.len())
    }

    #[test]
    fn a_daemon_sends_these_bytes() {
        let (ours, theirs) =
            net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let daemon = FdStore { socket: ours };
        let doorbell = Doorbell::new().unwrap();
        daemon.put("lan/web", b"one", &[doorbell.as_fd()], 1).unwrap();
        daemon.put_connection("lan/web", b"two", &[doorbell.as_fd()]).unwrap();
        daemon.forget("gone").unwrap();
        daemon.doubt("lan/web").unwrap();
        daemon.linger(Duration::from_secs(3600)).unwrap();
        daemon.quit().unwrap();
        for (bytes, fds) in [
            (PUT_BYTES, 1),
            (b"\x07\x01\x07\x00lan/webtwo", 1),
            (b"\x02\x00\x04\x00gone", 0),
            (DOUBT_BYTES, 0),
            // Seconds: 3600.
            (b"\x0a\x00\x00\x00\x10\x0e\x00\x00", 0),
            (b"\x04\x00\x00\x00", 0),
        ] {
            assert_eq!(next(&theirs), (bytes.to_vec(), fds));
        }
        // And LIST, with an answer that has one record in doubt.
        passing::send(&theirs, ENTRY_BYTES, &[doorbell.as_fd()], true).unwrap();
        passing::send(&theirs, ENTRY_IN_DOUBT_BYTES, &[doorbell.as_fd()], true).unwrap();
        passing::send(&theirs, END_BYTES, &[], true).unwrap();
        let records = daemon.list_of("lan/").unwrap();
        assert_eq!(next(&theirs), (LIST_BYTES.to_vec(), 0));
        let read: Vec<_> = records.into_iter().map(|r| (r.name, r.bytes, r.fds.len(), r.life, r.in_doubt)).collect();
        let record = |in_doubt| ("lan/web".to_owned(), b"one".to_vec(), 1, 1, in_doubt);
        assert_eq!(read, [record(false), record(true)]);
    }

    #[test]
    fn a_store_takes_these_bytes_and_answers_with_these() {
        let place = Place::new();
        let (daemon, thread) = place.start();
        let (connection, _its) =
            net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        passing::send(&daemon, PUT_BYTES, &[connection.as_fd()], true).unwrap();
        for (first, entry) in [(LIST_BYTES, ENTRY_BYTES), (DOUBT_BYTES, ENTRY_IN_DOUBT_BYTES)] {
            passing::send(&daemon, first, &[], true).unwrap();
            if first == DOUBT_BYTES {
                passing::send(&daemon, LIST_BYTES, &[], true).unwrap();
            }
            assert_eq!(next(&daemon.socket), (entry.to_vec(), 1));
            assert_eq!(next(&daemon.socket), (END_BYTES.to_vec(), 0));
        }
        daemon.quit().unwrap();
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn a_message_that_is_cut_inside_its_header_or_name_is_none() {
        for bytes in [PUT_BYTES, LIST_BYTES, ENTRY_BYTES, DOUBT_BYTES, ENTRY_IN_DOUBT_BYTES, END_BYTES] {
            let name_ends = HEADER_BYTES + usize::from(bytes[2]);
            for len in 0..=bytes.len() {
                let (name, record) = (&bytes[4..name_ends.min(len).max(4)], &bytes[name_ends.min(len)..len]);
                let whole = (bytes[0], bytes[1], std::str::from_utf8(name).unwrap(), record);
                let expected = if len < name_ends { None } else { Some(whole) };
                assert_eq!(parse(&bytes[..len]), expected, "{len} bytes");
            }
        }
    }

    #[test]
    fn what_is_kept_comes_back_over_another_connection() {
        let place = Place::new();
        let (first, thread) = place.start();
        let doorbell = Doorbell::new().unwrap();
        let (alive, _its) =
            net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        first.put("lan/web", b"one", &[alive.as_fd(), doorbell.as_fd()], 1).unwrap();
        first.put("lan", b"", &[], 0).unwrap();
        first.put("gone", b"x", &[doorbell.as_fd()], 0).unwrap();
        first.put("lan", b"two", &[], 0).unwrap();
        first.forget("gone").unwrap();
        drop(first);
        assert_eq!(Listener::bind(&place.path, SocketType::SEQPACKET).err(), Some(Errno::ADDRINUSE));
        let second = FdStore::connect(&place.path).unwrap();
        let expected = [("lan".into(), b"two".to_vec(), 0, 0), ("lan/web".into(), b"one".to_vec(), 2, 1)];
        assert_eq!(names(&second), expected);
        assert_eq!(second.list_of("lan/").unwrap().len(), 1);
        assert!(second.list_of("no").unwrap().is_empty());
        let mut all = second.list().unwrap();
        let again = Doorbell::adopt(all.pop().unwrap().fds.pop().unwrap()).unwrap();
        doorbell.ring();
        assert!(again.take(), "it is the same eventfd");
        second.quit().unwrap();
        thread.join().unwrap().unwrap();
        assert!(!place.path.exists());
        assert!(second.list().is_err());
    }

    #[test]
    fn a_deleted_socket_is_made_again_and_a_machine_gets_nothing_there() {
        let place = Place::new();
        let (daemon, thread) = place.start();
        daemon.put("lan", b"one", &[], 0).unwrap();
        std::fs::remove_file(&place.path).unwrap();
        daemon.forget("nothing has this name").unwrap();
        tombolo_testing::until("the socket", || FdStore::connect(&place.path).is_ok());
        let other = FdStore::connect(&place.path).unwrap();
        assert_eq!(names(&other).len(), 1);
        // This process plays the machine; a refusal of another process of its number is none.
        let (me, ticks) = (std::process::id(), lineage::start_ticks(std::process::id()).unwrap());
        daemon.put(&refusal(me), &(ticks + 1).to_le_bytes(), &[], 0).unwrap();
        assert!(daemon.list().is_ok());
        assert!(FdStore::connect(&place.path).unwrap().list().is_ok());
        daemon.put(&refusal(me), &ticks.to_le_bytes(), &[], 0).unwrap();
        assert!(daemon.list().is_ok());
        assert!(FdStore::connect(&place.path).unwrap().list().is_err());
        daemon.quit().unwrap();
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn who_connected_before_the_socket_was_deleted_is_heard() {
        let place = Place::new();
        let listener = Listener::bind(&place.path, SocketType::SEQPACKET).unwrap();
        let daemon = FdStore::connect(&place.path).unwrap();
        std::fs::remove_file(&place.path).unwrap();
        let thread = std::thread::spawn(move || serve(listener));
        daemon.put("lan", b"one", &[], 0).unwrap();
        assert_eq!(names(&daemon).len(), 1);
        daemon.quit().unwrap();
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn it_outlives_its_daemon_for_as_long_as_a_machine_lives() {
        let place = Place::new();
        let (daemon, thread) = place.start();
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        let (connection, its) =
            net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        daemon.put("by pidfd", b"", &[pidfd.as_fd()], 1).unwrap();
        daemon.put("by connection", b"", &[connection.as_fd()], 1).unwrap();
        daemon.put("no sign of life", b"", &[connection.as_fd()], 0).unwrap();
        drop((daemon, connection));
        // A byte on the connection is no end of it.
        rustix::io::write(&its, b"x").unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(names(&FdStore::connect(&place.path).unwrap()).len(), 3);
        drop(its);
        thread.join().unwrap().unwrap();
        assert!(!place.path.exists());
    }

    #[test]
    fn one_that_nobody_waits_for_ends_at_once_and_a_dead_ones_socket_is_replaced() {
        let place = Place::new();
        let (daemon, thread) = place.start();
        drop(daemon);
        thread.join().unwrap().unwrap();
        // As one that was killed leaves it.
        drop(std::os::unix::net::UnixListener::bind(&place.path).unwrap());
        assert_eq!(FdStore::connect(&place.path).err(), Some(Errno::CONNREFUSED));
        let (daemon, thread) = place.start();
        drop(daemon);
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn nonsense_ends_its_connection_alone() {
        let place = Place::new();
        let (daemon, thread) = place.start();
        daemon.put("a", b"", &[], 0).unwrap();
        for bad in [&[0u8; 2][..], &[PUT, 0, 9, 0, 1], &[9, 0, 0, 0], &[PUT, 0, 1, 0, 0xff]] {
            let other = FdStore::connect(&place.path).unwrap();
            passing::send(&other.socket, bad, &[], true).unwrap();
            assert!(other.list().is_err(), "{bad:?}");
        }
        daemon.put("b", b"", &[], 1).unwrap();
        assert_eq!(names(&daemon), [("a".into(), vec![], 0, 0)], "a record without its sign of life is none");
        assert_eq!(daemon.put("c", &[0; MAX_BYTES], &[], 0), Err(Errno::MSGSIZE));
        drop(daemon);
        thread.join().unwrap().unwrap();
    }

    /// A connection that is kept, and its peer's end.
    fn kept_connection(fd_store: &FdStore, name: &str) -> (OwnedFd, OwnedFd) {
        let (ours, theirs) =
            net::socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        fd_store.put_connection(name, b"state", &[ours.as_fd()]).unwrap();
        (ours, theirs)
    }

    fn is_shut(peer: &OwnedFd) -> bool {
        let mut fds = [PollFd::new(peer, PollFlags::RDHUP)];
        poll(&mut fds, Some(&Timespec { tv_sec: 10, tv_nsec: 0 })).unwrap();
        fds[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP)
    }

    #[test]
    fn a_peer_that_asks_while_no_daemon_is_there_is_told_so_and_the_others_stay() {
        let place = Place::new();
        let (first, thread) = place.start();
        let (asks_ours, asks) = kept_connection(&first, "asks");
        let (silent_ours, silent) = kept_connection(&first, "silent");
        let (doubted_ours, doubted) = kept_connection(&first, "doubted");
        let (sure_ours, _sure) = kept_connection(&first, "sure");
        drop((asks_ours, silent_ours, doubted_ours, sure_ours));
        first.doubt("doubted").unwrap();
        first.doubt("sure").unwrap();
        let second = FdStore::connect(&place.path).unwrap();
        let doubts: Vec<_> = second.list().unwrap().into_iter().map(|r| (r.name, r.in_doubt)).collect();
        let expected = [("asks", false), ("doubted", true), ("silent", false), ("sure", true)];
        assert_eq!(doubts, expected.map(|(name, doubt)| (name.to_string(), doubt)));
        // The next state ends the doubt.
        let again = second.list().unwrap().pop().unwrap();
        second.put_connection("sure", b"state", &[again.fds[0].as_fd()]).unwrap();
        // While a daemon is connected, a question waits for it.
        rustix::io::write(&asks, b"question").unwrap();
        assert_eq!(names(&second).len(), 4);
        drop((first, second));
        assert!(is_shut(&asks) && is_shut(&doubted));
        let third = FdStore::connect(&place.path).unwrap();
        assert_eq!(names(&third).into_iter().map(|n| n.0).collect::<Vec<_>>(), ["silent", "sure"]);
        rustix::io::write(&silent, b"x").unwrap();
        third.quit().unwrap();
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn it_lingers_for_a_restart_as_long_as_it_was_told() {
        let place = Place::new();
        let (first, thread) = place.start();
        let doorbell = Doorbell::new().unwrap();
        first.put("tap", b"", &[doorbell.as_fd()], 0).unwrap();
        first.linger(Duration::from_secs(3600)).unwrap();
        drop(first);
        let second = FdStore::connect(&place.path).unwrap();
        assert_eq!(names(&second).len(), 1);
        second.linger(Duration::ZERO).unwrap();
        drop(second);
        thread.join().unwrap().unwrap();
    }
}
