//! Passes connections and datagrams of forwards on between sockets of this machine: between the address families, which the
//! kernel's translation cannot do, and from ::1 ([`crate::kernel`]).
//!
//! # Theory of operation
//! One thread has all listeners. A connection is taken and a second one is made to the member, which sees the host's address on
//! its network as the peer; bytes are copied both ways, and each end of stream as well. A member that refuses or does not
//! answer resets the first connection. For UDP each peer of a listener gets a socket of its own towards the member, so that
//! answers find back. A listener at "all addresses" is one socket for each address that the machine has, looked up again
//! every two seconds: so answers leave with the address that was asked, and the other family is not touched.
//!
//! # Limits
//! A forward has at most [`CONNECTIONS`] connections; beyond that those who connect wait in the kernel's queue. It has at most
//! [`PEERS`] UDP peers; beyond that new ones are dropped until one was silent for [`SILENT`]. Peers inside of a network and
//! outside of it are hostile alike: nothing that they send is interpreted.
//!
//! # Failure
//! A listener that cannot be had is a fault of its forward ([`Relay::fault`]) and tried again every two seconds. Connections end
//! with the daemon, and with a change of their forward.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::{Semaphore, mpsc as tasks};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::file::Proto;
use crate::routes;

/// Connections that one forward has at a time.
pub const CONNECTIONS: usize = 1024;
/// UDP peers that one forward has at a time.
pub const PEERS: usize = 1024;
/// A UDP peer that was silent for so long, in both directions, is forgotten.
pub const SILENT: Duration = Duration::from_secs(60);
/// How long a member has to take a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// How often listeners that are missing are tried, and the machine's addresses looked up.
const LOOK: Duration = Duration::from_secs(2);
/// How long a change of the forwards is waited for.
const CHANGE: Duration = Duration::from_secs(2);
/// Bytes that are copied at once, per direction of a connection.
const COPIED: usize = 64 << 10;
/// Longest datagram (RFC 768).
const DATAGRAM: usize = 65_535;
/// Pause after `accept` failed, as without free descriptors.
const PAUSE: Duration = Duration::from_millis(100);

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

type Faults = Arc<Mutex<HashMap<Route, String>>>;
type Change = (Vec<Route>, mpsc::Sender<()>);

/// The thread that passes on. It ends, with all that it has, when this is dropped.
#[derive(Debug)]
pub struct Relay {
    changes: tasks::UnboundedSender<Change>,
    faults: Faults,
}

impl Relay {
    /// A relay without forwards.
    ///
    /// # Errors
    /// The system's, where the thread cannot be started.
    pub fn start() -> io::Result<Relay> {
        let (changes, news) = tasks::unbounded_channel();
        let faults = Faults::default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let told = faults.clone();
        let work = move || runtime.block_on(serve(news, told));
        std::thread::Builder::new().name("tb-relay".into()).spawn(work)?;
        Ok(Relay { changes, faults })
    }

    /// Has these forwards in place of those before; equal ones go on. Returns when they listen, or do not.
    pub fn set(&self, routes: Vec<Route>) {
        let (done, wait) = mpsc::channel();
        if self.changes.send((routes, done)).is_ok() {
            // It does nothing that blocks, but bind and close sockets of its own.
            let _ = wait.recv_timeout(CHANGE);
        }
    }

    /// Why a forward does not listen.
    pub fn fault(&self, route: &Route) -> Option<String> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).get(route).cloned()
    }
}

/// A forward's listeners by address. Dropping one ends it and its connections.
struct Served {
    listeners: BTreeMap<IpAddr, Running>,
    /// Of all its listeners together.
    places: Arc<Semaphore>,
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

async fn serve(mut news: tasks::UnboundedReceiver<Change>, faults: Faults) {
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
                    let places = if route.proto == Proto::Tcp { CONNECTIONS } else { PEERS };
                    let new = || Served { listeners: BTreeMap::new(), places: Arc::new(Semaphore::new(places)) };
                    served.entry(route).or_insert_with(new);
                }
                Some(done)
            }
            _ = look.tick() => None,
        };
        let mut found = HashMap::new();
        for (route, served) in &mut served {
            if let Err(error) = listen(route, served).await {
                found.insert(*route, format!("listening at {} {}: {error}", route.proto.word(), route.listen));
            }
        }
        *faults.lock().unwrap_or_else(PoisonError::into_inner) = found;
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

/// The addresses of this machine in the text of /proc/net/fib_trie: a line with the address, then one that says what it is.
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

/// The addresses of this machine in the text of /proc/net/if_inet6, without link-local and tentative ones.
fn local6(table: &str) -> Vec<Ipv6Addr> {
    let usable = routes::addresses6(table).filter(|a| !a.ip.is_unicast_link_local() && !a.is_tentative);
    usable.map(|address| address.ip).collect()
}

/// Opens what is missing of a forward's listeners, and ends those of addresses that are gone.
async fn listen(route: &Route, served: &mut Served) -> io::Result<()> {
    let wanted = addresses(route.listen.ip());
    served.listeners.retain(|ip, running| wanted.contains(ip) && running.0.iter().all(|task| !task.is_finished()));
    let mut failed = None;
    for ip in wanted {
        if served.listeners.contains_key(&ip) {
            continue;
        }
        let at = SocketAddr::new(ip, route.listen.port());
        let (to, places) = (route.to, served.places.clone());
        let opened = match route.proto {
            Proto::Tcp => TcpListener::bind(at).await.map(|l| tokio::spawn(accept(l, to, places))),
            Proto::Udp => UdpSocket::bind(at).await.map(|s| tokio::spawn(datagrams(s, to, places))),
        };
        match opened {
            Ok(task) => drop(served.listeners.insert(ip, Running(vec![task]))),
            Err(error) => failed = Some(error),
        }
    }
    failed.map_or(Ok(()), Err)
}

/// Takes connections as long as it runs. They are tasks of its own, and end with it.
async fn accept(listener: TcpListener, to: SocketAddr, places: Arc<Semaphore>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        // Never closed.
        let Ok(place) = places.clone().acquire_owned().await else { return };
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((stream, _)) => {
                connections.spawn(async move {
                    pass(stream, to).await;
                    drop(place);
                });
            }
            // Of the connection (it was reset), or of the process (it has no descriptors left).
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

async fn pass(mut outer: TcpStream, to: SocketAddr) {
    let mut inner = match timeout(CONNECT, TcpStream::connect(to)).await {
        Ok(Ok(inner)) => inner,
        Ok(Err(_)) | Err(_) => {
            // The peer is told by a reset, as by a member that refuses.
            let _ = outer.set_zero_linger();
            return;
        }
    };
    // Segments are passed on as they come.
    let _ = (outer.set_nodelay(true), inner.set_nodelay(true));
    if tokio::io::copy_bidirectional_with_sizes(&mut outer, &mut inner, COPIED, COPIED).await.is_err() {
        let _ = (outer.set_zero_linger(), inner.set_zero_linger());
    }
}

/// A peer of a UDP listener.
struct Peer {
    socket: Arc<UdpSocket>,
    heard: Arc<Mutex<Instant>>,
    _answers: Running,
    _place: tokio::sync::OwnedSemaphorePermit,
}

async fn datagrams(listener: UdpSocket, to: SocketAddr, places: Arc<Semaphore>) {
    let listener = Arc::new(listener);
    let mut peers: HashMap<SocketAddr, Peer> = HashMap::new();
    let mut bytes = vec![0; DATAGRAM];
    let mut swept = Instant::now();
    let silent = |peer: &Peer| peer.heard.lock().unwrap_or_else(PoisonError::into_inner).elapsed() >= SILENT;
    loop {
        // An error tells of an answer that found nobody (ICMP); the listener goes on.
        let Ok((len, from)) = listener.recv_from(&mut bytes).await else {
            tokio::task::yield_now().await;
            continue;
        };
        if swept.elapsed() >= LOOK {
            swept = Instant::now();
            peers.retain(|_, peer| !silent(peer));
        }
        let peer = match peers.entry(from) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                // Beyond the limit datagrams are lost, as anywhere on the way.
                let Ok(place) = places.clone().try_acquire_owned() else { continue };
                let Ok(peer) = peer(&listener, from, to, place).await else { continue };
                new.insert(peer)
            }
        };
        *peer.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        // Not awaited: one member whose queue is full does not hold up the others.
        let _ = peer.socket.try_send(&bytes[..len]);
    }
}

async fn peer(
    listener: &Arc<UdpSocket>,
    from: SocketAddr,
    to: SocketAddr,
    place: tokio::sync::OwnedSemaphorePermit,
) -> io::Result<Peer> {
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
    socket.connect(to).await?;
    // A new socket is not known to be writable until it was asked.
    socket.writable().await?;
    let socket = Arc::new(socket);
    let heard = Arc::new(Mutex::new(Instant::now()));
    let (back, inner, told) = (listener.clone(), socket.clone(), heard.clone());
    let answers = tokio::spawn(async move {
        let mut bytes = vec![0; DATAGRAM];
        loop {
            // The member may refuse one datagram and take the next.
            let Ok(len) = inner.recv(&mut bytes).await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            let _ = back.send_to(&bytes[..len], from).await;
        }
    });
    Ok(Peer { socket, heard, _answers: Running(vec![answers]), _place: place })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener as Listener, TcpStream as Stream, UdpSocket as Datagram};

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
