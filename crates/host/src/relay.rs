//! Passes connections and datagrams of forwards on between sockets of this machine: between the
//! address families, which the kernel's translation cannot do, and from ::1 ([`crate::kernel`]).
//!
//! # Theory of operation
//! One thread has all listeners. A connection is taken and a second one is made to the member,
//! which sees the host's address on its network as the peer; bytes are copied both ways, and each
//! end of stream as well. A member that refuses or does not answer resets the first connection. For
//! UDP each peer of a listener gets a socket of its own towards the member, so that answers find
//! back. A listener at "all addresses" is one socket for each address that the machine has, looked
//! up again every two seconds: so answers leave with the address that was asked, and the other
//! family is not touched.
//!
//! # Limits
//! Peers inside of a network and outside of it are hostile alike: nothing that they send is
//! interpreted, and each thing that they can have more of has a limit ([`Limits`]). A forward has
//! at most 1024 TCP connections and 1024 UDP peers, of which one address (one /64) has at most
//! half. All forwards together have at most a quarter of the descriptors that the process may open.
//! What is beyond that is refused: a connection is reset, a datagram dropped, and both are counted.
//! A forward that is full says so as its fault.
//!
//! A place becomes free when a connection ends. Keepalive ends a connection whose peer or member
//! has disappeared, within two minutes. [`Limits::half_closed`] ends one whose second direction is
//! silent after the first has ended. A UDP peer is forgotten by its own timer, so a datagram costs
//! the same however many peers there are. Idle connections cost no memory here: the thread has one
//! buffer, and a connection has bytes only while its receiver does not read.
//!
//! # Failure
//! A listener that cannot be opened is a fault of its forward ([`Relay::fault`]), and is retried
//! every two seconds. Connections end with the daemon, and with a change of their forward. With
//! fixed addresses and no fault the thread sleeps until something comes.

use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc as tasks};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::file::Proto;
use crate::routes;

/// How long a member has to take a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// How often listeners that are missing are tried, and the machine's addresses looked up.
const LOOK: Duration = Duration::from_secs(2);
/// How long a change of the forwards is waited for.
const CHANGE: Duration = Duration::from_secs(2);
/// Bytes that are copied at once.
const COPIED: usize = 64 << 10;
/// Longest datagram (RFC 768).
const DATAGRAM: usize = 65_535;
/// Pause after `accept` failed, as without free descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// A connection that was silent for so long is asked whether its peer is there, at these intervals,
/// and so many times.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(15), 4);
/// How long data may be unconfirmed before the peer counts as gone, in milliseconds: as long as
/// keepalive takes.
const UNCONFIRMED_MS: u32 = 120_000;
/// Descriptors of a connection, and of a UDP peer.
const DESCRIPTORS: (u32, u32) = (2, 1);

thread_local! {
    /// What is being copied: used between two waits, by one task at a time.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; COPIED.max(DATAGRAM)]);
}

/// What peers can have, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Connections that one forward has at a time.
    pub connections: usize,
    /// UDP peers that one forward has at a time.
    pub peers: usize,
    /// Descriptors of all connections and UDP peers together.
    pub descriptors: usize,
    /// A UDP peer that was silent for so long, in both directions, is forgotten.
    pub silent: Duration,
    /// As `silent`, while the member has not answered it yet. The kernel's translation has the same
    /// default.
    pub unanswered: Duration,
    /// A connection of which one direction has ended, and the other was silent for so long, ends.
    pub half_closed: Duration,
}

impl Limits {
    /// Those of a process that may open so many files.
    fn of(files: Option<u64>) -> Limits {
        let files = usize::try_from(files.unwrap_or(u64::MAX)).unwrap_or(usize::MAX);
        Limits {
            connections: 1024,
            peers: 1024,
            descriptors: (files / 4).clamp(16, 16 << 10),
            silent: Duration::from_secs(60),
            unanswered: Duration::from_secs(30),
            half_closed: Duration::from_secs(120),
        }
    }
}

/// One forward that is passed on here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// TCP or UDP.
    pub proto: Proto,
    /// Where it listens.
    pub listen: SocketAddr,
    /// Where it goes.
    pub to: SocketAddr,
}

/// What is told of a forward.
#[derive(Debug)]
struct Shown {
    /// Why it does not listen.
    fault: Option<String>,
    places: Arc<Places>,
}

type Told = Arc<Mutex<HashMap<Route, Shown>>>;
type Change = (Vec<Route>, mpsc::Sender<()>);

/// The thread that passes on. It ends, with all that it has, when this is dropped.
#[derive(Debug)]
pub struct Relay {
    changes: tasks::UnboundedSender<Change>,
    told: Told,
}

/// How a forward is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// Connections, or UDP peers, that it has.
    pub open: u64,
    /// Connections that were reset, or datagrams that were dropped, since there was no place for
    /// them.
    pub refused: u64,
}

impl Relay {
    /// A relay without forwards.
    ///
    /// # Errors
    /// The system's, where the thread cannot be started.
    pub fn start() -> io::Result<Relay> {
        Relay::with(Limits::of(rustix::process::getrlimit(rustix::process::Resource::Nofile).current))
    }

    fn with(limits: Limits) -> io::Result<Relay> {
        let (changes, news) = tasks::unbounded_channel();
        let told = Told::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let shown = told.clone();
        let work = move || runtime.block_on(serve(news, shown, limits));
        std::thread::Builder::new().name("tb-relay".into()).spawn(work)?;
        Ok(Relay { changes, told })
    }

    /// Has these forwards in place of those before; equal ones go on. Returns when they listen, or
    /// do not.
    pub fn set(&self, routes: Vec<Route>) {
        let (done, wait) = mpsc::channel();
        if self.changes.send((routes, done)).is_ok() {
            // It does nothing that blocks, but bind and close sockets of its own.
            let _ = wait.recv_timeout(CHANGE);
        }
    }

    /// Why a forward does not work, or not for all.
    pub fn fault(&self, route: &Route) -> Option<String> {
        let told = locked(&self.told);
        let shown = told.get(route)?;
        shown.fault.clone().or_else(|| shown.places.full())
    }

    /// How a forward is used; `None` if it is not passed on here.
    pub fn used(&self, route: &Route) -> Option<Use> {
        locked(&self.told).get(route).map(|shown| shown.places.used())
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The places of a forward, of all its listeners together.
#[derive(Debug)]
struct Places {
    limit: usize,
    own: Arc<Semaphore>,
    /// Descriptors, of all forwards together.
    all: Arc<Semaphore>,
    each: u32,
    /// How many those of one address have.
    shares: Mutex<HashMap<IpAddr, usize>>,
    refused: AtomicU64,
    what: &'static str,
}

/// A place that is taken. Dropping it gives it back.
struct Place {
    places: Arc<Places>,
    from: IpAddr,
    _own: OwnedSemaphorePermit,
    _all: OwnedSemaphorePermit,
}

impl Places {
    fn new(proto: Proto, limits: &Limits, all: &Arc<Semaphore>) -> Arc<Places> {
        let (limit, each, what) = match proto {
            Proto::Tcp => (limits.connections, DESCRIPTORS.0, "connections"),
            Proto::Udp => (limits.peers, DESCRIPTORS.1, "UDP peers"),
        };
        let (own, all) = (Arc::new(Semaphore::new(limit)), all.clone());
        Arc::new(Places { limit, own, all, each, shares: Mutex::default(), refused: AtomicU64::new(0), what })
    }

    /// A place for one from that address; where there is none, that is counted.
    fn take(self: &Arc<Places>, from: SocketAddr) -> Option<Place> {
        let place = self.try_take(from.ip());
        if place.is_none() {
            // Relaxed: it is only shown.
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        place
    }

    fn try_take(self: &Arc<Places>, from: IpAddr) -> Option<Place> {
        let from = match from {
            // One who has an address has all of its /64.
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into(),
            IpAddr::V4(_) => from,
        };
        let mut shares = locked(&self.shares);
        if shares.get(&from).is_some_and(|share| *share >= self.limit.div_ceil(2)) {
            return None;
        }
        let own = self.own.clone().try_acquire_owned().ok()?;
        let all = self.all.clone().try_acquire_many_owned(self.each).ok()?;
        *shares.entry(from).or_default() += 1;
        Some(Place { places: self.clone(), from, _own: own, _all: all })
    }

    fn used(&self) -> Use {
        let open = self.limit - self.own.available_permits();
        Use { open: open as u64, refused: self.refused.load(Ordering::Relaxed) }
    }

    /// That there is no place left, and what to do.
    fn full(&self) -> Option<String> {
        let what = self.what;
        let instead =
            "or let listener and member have addresses of one family (not ::1), which the kernel forwards itself";
        if self.own.available_permits() == 0 {
            return Some(format!("full: it has {} {what}, and more are refused: end some, {instead}", self.limit));
        }
        (self.all.available_permits() < self.each as usize).then(|| {
            format!(
                "full: all forwards together have as many connections as the daemon's open files allow, and more are \
                 refused: raise that limit (`ulimit -n`, LimitNOFILE), end some, {instead}"
            )
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut shares = locked(&self.places.shares);
        if let Entry::Occupied(mut share) = shares.entry(self.from) {
            *share.get_mut() -= 1;
            if *share.get() == 0 {
                share.remove();
            }
        }
    }
}

/// A forward's listeners by address. Dropping one ends it and its connections.
struct Served {
    listeners: BTreeMap<IpAddr, Running>,
    places: Arc<Places>,
}

struct Running(Vec<JoinHandle<()>>);

impl Running {
    /// Ends its tasks, and waits until their sockets are closed.
    async fn end(mut self) {
        for task in &mut self.0 {
            task.abort();
            // Nothing panics there; and if so, it has ended, too.
            let _ = task.await;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

async fn serve(mut news: tasks::UnboundedReceiver<Change>, told: Told, limits: Limits) {
    let all = Arc::new(Semaphore::new(limits.descriptors));
    let mut looks = false;
    let mut served: HashMap<Route, Served> = HashMap::new();
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let done = tokio::select! {
            change = news.recv() => {
                let Some((routes, done)) = change else { return };
                for (_, gone) in served.extract_if(|route, _| !routes.contains(route)) {
                    for running in gone.listeners.into_values() {
                        running.end().await;
                    }
                }
                for route in routes {
                    let new = || Served { listeners: BTreeMap::new(), places: Places::new(route.proto, &limits, &all) };
                    served.entry(route).or_insert_with(new);
                }
                Some(done)
            }
            _ = look.tick(), if looks => None,
        };
        let mut shown = HashMap::new();
        looks = false;
        for (route, served) in &mut served {
            let listening = listen(route, served, &limits).await;
            let fault = listening.err().map(|e| format!("listening at {} {}: {e}", route.proto.word(), route.listen));
            looks |= fault.is_some() || route.listen.ip().is_unspecified();
            shown.insert(*route, Shown { fault, places: served.places.clone() });
        }
        *locked(&told) = shown;
        // Who waited too long has gone.
        if let Some(done) = done {
            let _ = done.send(());
        }
    }
}

/// The addresses at which a forward is to listen now.
fn addresses(listen: IpAddr) -> Vec<IpAddr> {
    match listen {
        IpAddr::V4(ip) if ip.is_unspecified() => {
            local4(&std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default())
                .into_iter()
                .map(Into::into)
                .collect()
        }
        IpAddr::V6(ip) if ip.is_unspecified() => {
            local6(&std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default())
                .into_iter()
                .map(Into::into)
                .collect()
        }
        one => vec![one],
    }
}

/// The addresses of this machine in the text of /proc/net/fib_trie: a line with the address, then
/// one that says what it is.
fn local4(table: &str) -> Vec<Ipv4Addr> {
    let (mut out, mut last) = (vec![Ipv4Addr::LOCALHOST], None);
    for line in table.lines() {
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse().ok();
        } else if line == "/32 host LOCAL"
            && let Some(address) = last
            && !out.contains(&address)
        {
            out.push(address);
        }
    }
    out
}

/// The addresses of this machine in the text of /proc/net/if_inet6, without link-local and
/// tentative ones.
fn local6(table: &str) -> Vec<Ipv6Addr> {
    let usable = routes::addresses6(table).filter(|a| !a.ip.is_unicast_link_local() && !a.is_tentative);
    usable.map(|address| address.ip).collect()
}

/// Opens what is missing of a forward's listeners, and ends those of addresses that are gone.
async fn listen(route: &Route, served: &mut Served, limits: &Limits) -> io::Result<()> {
    let wanted = addresses(route.listen.ip());
    served.listeners.retain(|ip, running| wanted.contains(ip) && running.0.iter().all(|task| !task.is_finished()));
    let mut failed = None;
    for ip in wanted {
        if served.listeners.contains_key(&ip) {
            continue;
        }
        let at = SocketAddr::new(ip, route.listen.port());
        let (to, places, limits) = (route.to, served.places.clone(), *limits);
        let opened = match route.proto {
            Proto::Tcp => TcpListener::bind(at).await.map(|l| tokio::spawn(accept(l, to, places, limits))),
            Proto::Udp => UdpSocket::bind(at).await.map(|s| tokio::spawn(datagrams(s, to, places, limits))),
        };
        match opened {
            Ok(task) => drop(served.listeners.insert(ip, Running(vec![task]))),
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Takes connections as long as it runs. They are tasks of its own, and end with it.
async fn accept(listener: TcpListener, to: SocketAddr, places: Arc<Places>, limits: Limits) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, from)) => match places.take(from) {
                Some(place) => {
                    connections.spawn(async move {
                        pass(stream, to, limits.half_closed).await;
                        drop(place);
                    });
                }
                None => {
                    let _ = stream.set_zero_linger();
                    drop(stream);
                    // Those who connect again and again do not hold up the connections that there
                    // are.
                    tokio::task::yield_now().await;
                }
            },
            // Of the connection (it was reset), or of the process (it has no descriptors left).
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

async fn pass(outer: TcpStream, to: SocketAddr, half_closed: Duration) {
    let inner = match timeout(CONNECT, TcpStream::connect(to)).await {
        Ok(Ok(inner)) => inner,
        Ok(Err(_)) | Err(_) => {
            // The peer is told by a reset, as by a member that refuses.
            let _ = outer.set_zero_linger();
            return;
        }
    };
    // Segments are passed on as they come.
    let _ = (outer.set_nodelay(true), inner.set_nodelay(true));
    // Where the kernel has no such option, the connection ends when a side says so.
    let _ = (keep_alive(&outer), keep_alive(&inner));
    if copy_both(&outer, &inner, half_closed).await.is_err() {
        let _ = (outer.set_zero_linger(), inner.set_zero_linger());
    }
}

/// Has the kernel end a connection whose other side has gone without a word.
fn keep_alive(stream: &TcpStream) -> rustix::io::Result<()> {
    let (silent, interval, times) = KEEPALIVE;
    sockopt::set_tcp_keepidle(stream.as_fd(), silent)?;
    sockopt::set_tcp_keepintvl(stream.as_fd(), interval)?;
    sockopt::set_tcp_keepcnt(stream.as_fd(), times)?;
    sockopt::set_tcp_user_timeout(stream.as_fd(), UNCONFIRMED_MS)?;
    sockopt::set_socket_keepalive(stream.as_fd(), true)
}

/// Copies both ways, until both have ended, or one has and the other is silent.
async fn copy_both(outer: &TcpStream, inner: &TcpStream, half_closed: Duration) -> io::Result<()> {
    let moved = Mutex::new(Instant::now());
    let (mut inwards, mut outwards) = (Box::pin(copy(outer, inner, &moved)), Box::pin(copy(inner, outer, &moved)));
    let rest = tokio::select! {
        ended = &mut inwards => ended.map(|()| outwards),
        ended = &mut outwards => ended.map(|()| inwards),
    };
    let mut rest = rest?;
    *locked(&moved) = Instant::now();
    loop {
        let until = *locked(&moved) + half_closed;
        match tokio::time::timeout_at(until, &mut rest).await {
            Ok(ended) => return ended,
            Err(_) if locked(&moved).elapsed() >= half_closed => return Err(io::ErrorKind::TimedOut.into()),
            Err(_) => {}
        }
    }
}

/// Copies one way, and the end of the stream as well.
async fn copy(from: &TcpStream, to: &TcpStream, moved: &Mutex<Instant>) -> io::Result<()> {
    let blocked = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
    loop {
        from.readable().await?;
        // What the receiver does not take yet; `None` at the end.
        let step = BUFFER.with_borrow_mut(|buffer| -> io::Result<Option<Vec<u8>>> {
            let len = match from.try_read(&mut buffer[..COPIED]) {
                Ok(0) => return Ok(None),
                Ok(len) => len,
                Err(error) if blocked(&error) => return Ok(Some(vec![])),
                Err(error) => return Err(error),
            };
            *locked(moved) = Instant::now();
            let sent = match to.try_write(&buffer[..len]) {
                Ok(sent) => sent,
                Err(error) if blocked(&error) => 0,
                Err(error) => return Err(error),
            };
            Ok(Some(buffer[sent..len].to_vec()))
        })?;
        let Some(rest) = step else { break };
        let mut rest = rest.as_slice();
        while !rest.is_empty() {
            to.writable().await?;
            match to.try_write(rest) {
                Ok(sent) => {
                    *locked(moved) = Instant::now();
                    rest = &rest[sent..];
                }
                Err(error) if blocked(&error) => {}
                Err(error) => return Err(error),
            }
        }
        // A fast stream does not hold up the others.
        tokio::task::yield_now().await;
    }
    match rustix::net::shutdown(to.as_fd(), rustix::net::Shutdown::Write) {
        // It has gone meanwhile; the other direction tells.
        Err(rustix::io::Errno::NOTCONN) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// A peer of a UDP listener.
struct Peer {
    socket: Arc<UdpSocket>,
    heard: Arc<Mutex<Instant>>,
    _answers: Running,
    _place: Place,
}

async fn datagrams(listener: UdpSocket, to: SocketAddr, places: Arc<Places>, limits: Limits) {
    let listener = Arc::new(listener);
    let mut peers: HashMap<SocketAddr, Peer> = HashMap::new();
    // Each peer tells once that it was silent, so there are at most as many words as peers.
    let (tell, mut silent) = tasks::unbounded_channel();
    let mut bytes = vec![0; DATAGRAM];
    loop {
        let received = tokio::select! {
            biased;
            // First, so that a datagram that comes then begins again.
            Some(from) = silent.recv() => {
                peers.remove(&from);
                continue;
            }
            received = listener.recv_from(&mut bytes) => received,
        };
        // An error tells of an answer that found no receiver (ICMP); the listener goes on.
        let Ok((len, from)) = received else {
            tokio::task::yield_now().await;
            continue;
        };
        let peer = match peers.entry(from) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                // Beyond the limit datagrams are lost, as anywhere on the way.
                let Some(place) = places.take(from) else {
                    tokio::task::yield_now().await;
                    continue;
                };
                let Ok(peer) = peer(&listener, from, to, place, &limits, &tell).await else { continue };
                new.insert(peer)
            }
        };
        *locked(&peer.heard) = Instant::now();
        // Not awaited: one member whose queue is full does not hold up the others.
        let _ = peer.socket.try_send(&bytes[..len]);
    }
}

async fn peer(
    listener: &Arc<UdpSocket>,
    from: SocketAddr,
    to: SocketAddr,
    place: Place,
    limits: &Limits,
    silent: &tasks::UnboundedSender<SocketAddr>,
) -> io::Result<Peer> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
    socket.connect(to).await?;
    // A new socket is not known to be writable until it was asked.
    socket.writable().await?;
    let socket = Arc::new(socket);
    let heard = Arc::new(Mutex::new(Instant::now()));
    let (back, inner, told) = (listener.clone(), socket.clone(), heard.clone());
    let (limits, silent) = (*limits, silent.clone());
    let answers = tokio::spawn(async move {
        let mut patience = limits.unanswered;
        loop {
            let until = *locked(&told) + patience;
            if tokio::time::timeout_at(until, inner.readable()).await.is_err() {
                if locked(&told).elapsed() >= patience {
                    // The listener has gone, and this with it.
                    let _ = silent.send(from);
                    return;
                }
                continue;
            }
            let answered = BUFFER.with_borrow_mut(|buffer| {
                let len = inner.try_recv(buffer)?;
                // One that is full loses it, as anywhere on the way.
                let _ = back.try_send_to(&buffer[..len], from);
                Ok::<(), io::Error>(())
            });
            match answered {
                Ok(()) => {
                    patience = limits.silent;
                    *locked(&told) = Instant::now();
                    tokio::task::yield_now().await;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // The member may refuse one datagram and take the next.
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    });
    Ok(Peer { socket, heard, _answers: Running(vec![answers]), _place: place })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener as Listener, TcpStream as Stream, UdpSocket as Datagram};
    use tombolo_testing::until;

    const FOUR: &str = "127.0.0.1";
    const SIX: &str = "::1";

    fn at(ip: &str, port: u16) -> SocketAddr {
        SocketAddr::new(ip.parse().unwrap(), port)
    }

    /// A port that was free a moment ago.
    fn free(ip: &str) -> u16 {
        Listener::bind(at(ip, 0)).unwrap().local_addr().unwrap().port()
    }

    #[test]
    fn bytes_and_the_end_of_a_stream_pass_between_the_families() {
        let relay = Relay::start().unwrap();
        for (outer, inner) in [(FOUR, SIX), (SIX, FOUR), (SIX, SIX)] {
            let member = Listener::bind(at(inner, 0)).unwrap();
            let route = Route { proto: Proto::Tcp, listen: at(outer, free(outer)), to: member.local_addr().unwrap() };
            relay.set(vec![route]);
            assert_eq!(relay.fault(&route), None);
            let mut client = Stream::connect(route.listen).unwrap();
            let sent: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
            let (mut writer, copy) = (client.try_clone().unwrap(), sent.clone());
            let writing = std::thread::spawn(move || {
                writer.write_all(&copy).unwrap();
                writer.shutdown(std::net::Shutdown::Write).unwrap();
            });
            let (mut taken, _) = member.accept().unwrap();
            let mut got = Vec::new();
            taken.read_to_end(&mut got).unwrap();
            writing.join().unwrap();
            assert!(got == sent, "{} of {} bytes", got.len(), sent.len());
            // The other way goes on after the first has ended.
            taken.write_all(b"done").unwrap();
            drop(taken);
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            assert_eq!(answer, "done");
        }
    }

    #[test]
    fn a_member_that_refuses_resets_and_a_forward_that_goes_ends_its_connections() {
        let relay = Relay::start().unwrap();
        let route = Route { proto: Proto::Tcp, listen: at(SIX, free(SIX)), to: at(FOUR, free(FOUR)) };
        relay.set(vec![route]);
        let error = Stream::connect(route.listen).unwrap().read(&mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        let member = Listener::bind(route.to).unwrap();
        let mut client = Stream::connect(route.listen).unwrap();
        let _taken = member.accept().unwrap();
        relay.set(vec![]);
        assert!(matches!(client.read(&mut [0; 8]), Ok(0) | Err(_)));
        assert!(Stream::connect(route.listen).is_err(), "it listens no more");
    }

    #[test]
    fn datagrams_find_back_to_the_peer_that_asked() {
        let relay = Relay::start().unwrap();
        for (outer, inner) in [(FOUR, SIX), (SIX, FOUR)] {
            let member = Datagram::bind(at(inner, 0)).unwrap();
            let listen = at(outer, Datagram::bind(at(outer, 0)).unwrap().local_addr().unwrap().port());
            let route = Route { proto: Proto::Udp, listen, to: member.local_addr().unwrap() };
            relay.set(vec![route]);
            assert_eq!(relay.fault(&route), None);
            let clients: Vec<_> = (0..3).map(|_| Datagram::bind(at(outer, 0)).unwrap()).collect();
            for (n, client) in clients.iter().enumerate() {
                client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                client.send_to(&[n as u8], listen).unwrap();
            }
            member.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let mut bytes = [0; 8];
            for _ in &clients {
                let (len, from) = member.recv_from(&mut bytes).unwrap();
                member.send_to(&[&bytes[..len], b"!"].concat(), from).unwrap();
            }
            for (n, client) in clients.iter().enumerate() {
                let (len, from) = client.recv_from(&mut bytes).unwrap();
                assert_eq!((&bytes[..len], from), (&[n as u8, b'!'][..], listen));
            }
        }
    }

    const SMALL: Limits = Limits {
        connections: 4,
        peers: 4,
        descriptors: 64,
        silent: Duration::from_millis(300),
        unanswered: Duration::from_millis(300),
        half_closed: Duration::from_millis(300),
    };

    /// Connections from an address of 127/8.
    fn from(ip: [u8; 4], to: SocketAddr) -> Stream {
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None).unwrap();
        rustix::net::bind(&socket, &SocketAddr::from((ip, 0))).unwrap();
        rustix::net::connect(&socket, &to).unwrap();
        let stream = Stream::from(socket);
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    fn is_refused(mut stream: Stream) -> bool {
        stream.read(&mut [0; 8]).is_err_and(|error| error.kind() == io::ErrorKind::ConnectionReset)
    }

    #[test]
    fn one_address_has_half_of_the_places_and_a_full_forward_refuses_counts_and_says_so() {
        let relay = Relay::with(SMALL).unwrap();
        let member = Listener::bind(at(SIX, 0)).unwrap();
        let route = Route { proto: Proto::Tcp, listen: at(FOUR, free(FOUR)), to: member.local_addr().unwrap() };
        relay.set(vec![route]);
        let hog: Vec<_> = (0..2).map(|_| (from([127, 0, 0, 1], route.listen), member.accept().unwrap())).collect();
        assert!(is_refused(from([127, 0, 0, 1], route.listen)), "it has its share");
        assert_eq!((relay.used(&route), relay.fault(&route)), (Some(Use { open: 2, refused: 1 }), None));
        let other = [[127, 0, 0, 2], [127, 0, 0, 3]].map(|ip| (from(ip, route.listen), member.accept().unwrap()));
        let fault = relay.fault(&route).unwrap();
        assert!(fault.contains("full: it has 4 connections") && fault.contains("one family"), "{fault}");
        assert!(is_refused(from([127, 0, 0, 4], route.listen)));
        assert_eq!(relay.used(&route), Some(Use { open: 4, refused: 2 }));
        // Places come back.
        drop(hog);
        until("free places", || relay.used(&route).unwrap().open == 2);
        assert_eq!(relay.fault(&route), None);
        let mut again = from([127, 0, 0, 1], route.listen);
        member.accept().unwrap().0.write_all(b"hi").unwrap();
        let mut answer = String::new();
        again.read_to_string(&mut answer).unwrap();
        assert_eq!(answer, "hi");
        drop(other);
    }

    #[test]
    fn all_forwards_together_leave_descriptors_to_the_daemon() {
        let relay = Relay::with(Limits { descriptors: 3, ..SMALL }).unwrap();
        let member = Listener::bind(at(SIX, 0)).unwrap();
        let route = |listen| Route { proto: Proto::Tcp, listen, to: member.local_addr().unwrap() };
        let (one, two) = (route(at(FOUR, free(FOUR))), route(at(SIX, free(SIX))));
        relay.set(vec![one, two]);
        let _kept = (Stream::connect(one.listen).unwrap(), member.accept().unwrap());
        assert!(is_refused(Stream::connect(two.listen).unwrap()));
        let fault = relay.fault(&two).unwrap();
        assert!(fault.contains("open files") && fault.contains("LimitNOFILE"), "{fault}");
        assert_eq!(relay.used(&two), Some(Use { open: 0, refused: 1 }));
        assert_eq!(Limits::of(Some(1024)).descriptors, 256);
        assert_eq!((Limits::of(None).descriptors, Limits::of(Some(0)).descriptors), (16 << 10, 16));
    }

    #[test]
    fn a_half_closed_connection_that_is_silent_ends_and_all_have_keepalive() {
        let relay = Relay::with(SMALL).unwrap();
        let member = Listener::bind(at(SIX, 0)).unwrap();
        let route = Route { proto: Proto::Tcp, listen: at(FOUR, free(FOUR)), to: member.local_addr().unwrap() };
        relay.set(vec![route]);
        let mut client = Stream::connect(route.listen).unwrap();
        let (mut taken, _) = member.accept().unwrap();
        // One that is open both ways may be silent for longer than that.
        std::thread::sleep(SMALL.half_closed * 2);
        client.write_all(b"x").unwrap();
        taken.read_exact(&mut [0]).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(taken.read(&mut [0]).unwrap(), 0);
        // The member speaks now and then, and is heard; then it is silent.
        for _ in 0..4 {
            std::thread::sleep(SMALL.half_closed / 3);
            taken.write_all(b"y").unwrap();
            client.read_exact(&mut [0]).unwrap();
        }
        client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        assert_eq!(client.read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        until("a free place", || relay.used(&route).unwrap().open == 0);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let stream = TcpStream::connect(member.local_addr().unwrap()).await.unwrap();
            keep_alive(&stream).unwrap();
            assert!(sockopt::socket_keepalive(stream.as_fd()).unwrap());
            assert_eq!(sockopt::tcp_keepidle(stream.as_fd()).unwrap(), KEEPALIVE.0);
        });
    }

    #[test]
    fn udp_peers_are_forgotten_by_their_own_timers_and_a_flood_is_counted() {
        let relay = Relay::with(SMALL).unwrap();
        let member = Datagram::bind(at(SIX, 0)).unwrap();
        let listen = at(FOUR, Datagram::bind(at(FOUR, 0)).unwrap().local_addr().unwrap().port());
        let route = Route { proto: Proto::Udp, listen, to: member.local_addr().unwrap() };
        relay.set(vec![route]);
        let clients: Vec<_> = (0..8).map(|_| Datagram::bind(at(FOUR, 0)).unwrap()).collect();
        clients.iter().for_each(|client| assert_eq!(client.send_to(b"?", listen).unwrap(), 1));
        until("all of them", || relay.used(&route).unwrap().refused == 6);
        // No datagram comes that could have them looked at.
        until("silence", || relay.used(&route).unwrap().open == 0);
        // One that comes again is answered.
        member.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        clients[7].set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        clients[7].send_to(b"again", listen).unwrap();
        let mut bytes = [0; 8];
        let peer = loop {
            let (len, peer) = member.recv_from(&mut bytes).unwrap();
            if &bytes[..len] == b"again" {
                break peer;
            }
        };
        member.send_to(b"yes", peer).unwrap();
        assert_eq!(clients[7].recv(&mut bytes).unwrap(), 3);
    }

    #[test]
    fn a_listener_that_is_taken_is_a_fault_until_it_is_free() {
        let relay = Relay::start().unwrap();
        let taken = Listener::bind(at(SIX, 0)).unwrap();
        let route = Route { proto: Proto::Tcp, listen: taken.local_addr().unwrap(), to: at(FOUR, 9) };
        relay.set(vec![route]);
        assert!(relay.fault(&route).is_some_and(|fault| fault.contains("in use")), "{:?}", relay.fault(&route));
        drop(taken);
        relay.set(vec![route]);
        assert_eq!(relay.fault(&route), None);
    }

    #[test]
    fn the_machines_addresses_are_read_from_the_kernels_tables() {
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\nLocal:\n     |-- 10.1.0.2\n        \
            /32 host LOCAL\n     |-- 10.1.0.255\n        /32 link BROADCAST\n     |-- 127.0.0.1\n        /32 host LOCAL\n";
        assert_eq!(local4(trie), [Ipv4Addr::LOCALHOST, Ipv4Addr::new(10, 1, 0, 2)]);
        let six = "fe800000000000000000000000000001 02 40 20 80 eth0\n20010db8000000000000000000000007 02 40 00 80 eth0\n\
            20010db8000000000000000000000008 02 40 00 40 eth0\n00000000000000000000000000000001 01 80 10 80 lo\nx\n";
        assert_eq!(local6(six), ["2001:db8::7".parse::<Ipv6Addr>().unwrap(), Ipv6Addr::LOCALHOST]);
        assert!(addresses("::".parse().unwrap()).contains(&IpAddr::from(Ipv6Addr::LOCALHOST)));
    }
}
