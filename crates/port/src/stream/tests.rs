use super::*;
use crate::conformance::{Abilities, Fixture, Rig, Violation, frame, plain, same};
use crate::pair::OwnedFrame;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

/// A folder of its own for the sockets of one test.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Folder {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("tombolo-stream-{}-{n}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) trait Stream: Read + Write + Sized {
    fn ready(self) -> Self;
}

impl Stream for UnixStream {
    fn ready(self) -> Self {
        self.set_nonblocking(true).unwrap();
        self
    }
}

impl Stream for TcpStream {
    fn ready(self) -> Self {
        self.set_nonblocking(true).unwrap();
        self.set_nodelay(true).unwrap();
        self
    }
}

/// The other end, framed by hand so that the port's own code is not checked against itself.
pub(crate) struct Peer<S> {
    stream: S,
    out: Vec<u8>,
    bytes: Vec<u8>,
    frames: VecDeque<Vec<u8>>,
}

impl<S: Stream> Peer<S> {
    pub(crate) fn new(stream: S) -> Peer<S> {
        Peer { stream: stream.ready(), out: Vec::new(), bytes: Vec::new(), frames: VecDeque::new() }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
        match self.stream.write(&self.out) {
            Ok(n) => drop(self.out.drain(..n)),
            // The port may be gone or have closed; that shows in what is checked next.
            Err(e)
                if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) => {}
            Err(e) => panic!("{e}"),
        }
    }

    pub(crate) fn inject(&mut self, bytes: &[u8]) -> bool {
        if self.out.len() > 100_000 {
            self.write(&[]);
            return false;
        }
        self.write(&[&(bytes.len() as u32).to_be_bytes()[..], bytes].concat());
        true
    }

    pub(crate) fn collect(&mut self) -> Option<OwnedFrame> {
        if !self.out.is_empty() {
            self.write(&[]);
        }
        if self.frames.is_empty() {
            let mut room = [0; 65536];
            if let Ok(n) = self.stream.read(&mut room) {
                self.bytes.extend_from_slice(&room[..n]);
            }
            let mut rest = &self.bytes[..];
            while let Some((length, behind)) = rest.split_first_chunk() {
                let Some((frame, next)) = behind.split_at_checked(u32::from_be_bytes(*length) as usize) else { break };
                self.frames.push_back(frame.to_vec());
                rest = next;
            }
            self.bytes = rest.to_vec();
        }
        Some(OwnedFrame { bytes: self.frames.pop_front()?, offload: Offload::NONE })
    }
}

/// How a test comes by its end of the connection.
trait Opening: Sized {
    const KIND: &'static str;
    type Stream: Stream;
    fn make(registration: Registration) -> (StreamPort, Self);
    /// Called when the link is up or is to come up; may wait for what is on its way.
    fn peer(&mut self) -> Self::Stream;
    /// No new peer can come until `open`.
    fn close(&mut self) {}
    fn open(&mut self) {}
}

struct Streamed<W: Opening> {
    way: W,
    peer: Option<Peer<W::Stream>>,
}

impl<W: Opening> Streamed<W> {
    fn peer(&mut self) -> &mut Peer<W::Stream> {
        let Streamed { way, peer } = self;
        peer.get_or_insert_with(|| Peer::new(way.peer()))
    }
}

impl<W: Opening> Fixture for Streamed<W> {
    const KIND: &str = W::KIND;

    fn make(registration: Registration) -> (Box<dyn Port>, Self) {
        let (port, way) = W::make(registration);
        let mut fixture = Streamed { way, peer: None };
        fixture.connect();
        (Box::new(port), fixture)
    }

    fn abilities(&self) -> Abilities {
        Abilities { frame_bytes: (14, 1518), offload: false, back_pressure: true, window: 32 }
    }

    fn inject(&mut self, bytes: &[u8], _offload: Offload) -> bool {
        self.peer().inject(bytes)
    }

    fn collect(&mut self) -> Option<OwnedFrame> {
        self.peer().collect()
    }

    fn disconnect(&mut self) {
        self.peer();
        self.way.close();
        self.peer = None;
    }

    fn connect(&mut self) {
        self.way.open();
    }

    fn send_runt(&mut self) -> Violation {
        self.inject(&frame(0, 13), Offload::NONE);
        Violation::Dropped(Reason::Runt)
    }

    fn send_over_long(&mut self) -> Violation {
        self.inject(&frame(0, MAX_FRAME_BYTES + 1), Offload::NONE);
        Violation::Faulted(FaultKind::Protocol)
    }

    fn send_bad_offload(&mut self) -> Violation {
        Violation::Impossible("the framing has no offload fields")
    }

    fn break_protocol(&mut self) -> Violation {
        self.peer().write(&[0, 0, 0, 0]);
        self.peer().write(&frame(0, 60));
        Violation::Faulted(FaultKind::Protocol)
    }
}

/// The port listens on a Unix socket.
struct ListenUnix(Folder, Option<UnixStream>);

impl Opening for ListenUnix {
    const KIND: &str = "stream, listening on a Unix socket";
    type Stream = UnixStream;
    fn make(registration: Registration) -> (StreamPort, Self) {
        let folder = Folder::new();
        let address = Address::Unix(folder.path("s"));
        (StreamPort::listen(&address, 0o600, 1500, registration).unwrap(), ListenUnix(folder, None))
    }
    fn peer(&mut self) -> UnixStream {
        self.1.take().unwrap()
    }
    fn open(&mut self) {
        self.1 = Some(UnixStream::connect(self.0.path("s")).unwrap());
    }
}

/// The port listens on a TCP port.
struct ListenTcp(std::net::SocketAddr, Option<TcpStream>);

impl Opening for ListenTcp {
    const KIND: &str = "stream, listening on a TCP port";
    type Stream = TcpStream;
    fn make(registration: Registration) -> (StreamPort, Self) {
        let address = "tcp:127.0.0.1:0".parse().unwrap();
        let port = StreamPort::listen(&address, 0, 1500, registration).unwrap();
        let Some(Address::Tcp(at)) = port.listens_at().cloned() else { panic!("a TCP port") };
        (port, ListenTcp(at, None))
    }
    fn peer(&mut self) -> TcpStream {
        self.1.take().unwrap()
    }
    fn open(&mut self) {
        self.1 = Some(TcpStream::connect(self.0).unwrap());
    }
}

/// The port connects to a Unix socket.
struct ConnectUnix(Folder, Option<UnixListener>);

impl Opening for ConnectUnix {
    const KIND: &str = "stream, connecting to a Unix socket";
    type Stream = UnixStream;
    fn make(registration: Registration) -> (StreamPort, Self) {
        let folder = Folder::new();
        let port = StreamPort::connect(&Address::Unix(folder.path("s")), 1500, registration);
        (port, ConnectUnix(folder, None))
    }
    fn peer(&mut self) -> UnixStream {
        self.1.as_ref().unwrap().accept().unwrap().0
    }
    fn close(&mut self) {
        self.1 = None;
        std::fs::remove_file(self.0.path("s")).unwrap();
    }
    fn open(&mut self) {
        self.1 = Some(UnixListener::bind(self.0.path("s")).unwrap());
    }
}

/// The port connects to a TCP port.
struct ConnectTcp(std::net::SocketAddr, Option<TcpListener>);

impl Opening for ConnectTcp {
    const KIND: &str = "stream, connecting to a TCP port";
    type Stream = TcpStream;
    fn make(registration: Registration) -> (StreamPort, Self) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        (StreamPort::connect(&Address::Tcp(at), 1500, registration), ConnectTcp(at, Some(listener)))
    }
    fn peer(&mut self) -> TcpStream {
        self.1.as_ref().unwrap().accept().unwrap().0
    }
    fn close(&mut self) {
        self.1 = None;
    }
    fn open(&mut self) {
        if self.1.is_none() {
            self.1 = Some(TcpListener::bind(self.0).unwrap());
        }
    }
}

/// The port is given one end of a socketpair.
struct Given(StreamFeed, Option<UnixStream>);

impl Opening for Given {
    const KIND: &str = "stream, given a descriptor";
    type Stream = UnixStream;
    fn make(registration: Registration) -> (StreamPort, Self) {
        let (port, feed) = StreamPort::given(1500, registration);
        (port, Given(feed, None))
    }
    fn peer(&mut self) -> UnixStream {
        self.1.take().unwrap()
    }
    fn open(&mut self) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.0.give(theirs.into()).unwrap();
        self.1 = Some(ours);
    }
}

mod conformance {
    use super::*;

    mod listening_unix {
        crate::conformance_suite!(super::Streamed<super::ListenUnix>);
    }
    mod listening_tcp {
        crate::conformance_suite!(super::Streamed<super::ListenTcp>);
    }
    mod connecting_unix {
        crate::conformance_suite!(super::Streamed<super::ConnectUnix>);
    }
    mod connecting_tcp {
        crate::conformance_suite!(super::Streamed<super::ConnectTcp>);
    }
    mod given {
        crate::conformance_suite!(super::Streamed<super::Given>);
    }
}

type Socketpair = Streamed<Given>;

#[test]
fn a_peer_that_writes_byte_by_byte_is_understood() {
    let mut rig = Rig::<Socketpair>::up();
    let frames = plain(0, [60, 14, 300]);
    for frame in &frames {
        for byte in [&(frame.bytes.len() as u32).to_be_bytes()[..], &frame.bytes].concat() {
            rig.peer.peer().write(&[byte]);
            rig.turn(4);
        }
    }
    same(&frames, &rig.received);
}

#[test]
fn frames_before_the_end_are_delivered_and_an_unfinished_one_is_counted() {
    let mut rig = Rig::<Socketpair>::up();
    let frames = plain(0, vec![60; 10]);
    for frame in &frames {
        assert!(rig.peer.inject(&frame.bytes, Offload::NONE));
    }
    rig.peer.peer().write(&[0, 0, 0, 60, 1, 2, 3]);
    rig.peer.disconnect();
    // The end is received with the first frame, but the link is up while there are more.
    assert_eq!(rig.turn(4), 4);
    assert_eq!(rig.port.link(), Carrier::Up);
    rig.until_woken("the link goes down", |rig| rig.port.link() == Carrier::Down);
    same(&frames, &rig.received);
    assert_eq!((rig.rx_drops.of(Reason::Reset), rig.rx_drops.total()), (1, 1));
    assert!(rig.faults.is_empty(), "a peer that goes is no fault");
}

#[test]
fn a_second_peer_waits_until_the_first_is_gone() {
    let mut rig = Rig::<Streamed<ListenUnix>>::up();
    rig.receive_all(&plain(0, [60]));
    let mut second = Peer::new(UnixStream::connect(rig.peer.way.0.path("s")).unwrap());
    second.inject(&frame(7, 60));
    rig.settle();
    assert_eq!(rig.received.len(), 1, "the first peer has the port");
    rig.peer.disconnect();
    rig.until_woken("the second has its turn", |rig| rig.received.len() == 2);
    assert_eq!(rig.received[1].bytes, frame(7, 60));
}

#[test]
fn attempts_to_connect_become_fewer() {
    let folder = Folder::new();
    let reactor = tombolo_worker::reactor::Reactor::new().unwrap();
    let registration = reactor.registrar().registration(tombolo_switch::wait::Token(1));
    let mut port = StreamPort::connect(&Address::Unix(folder.path("nobody")), 1500, registration);
    // A virtual clock: the port is called exactly when it asked to be.
    let (mut now, mut waits) = (Nanos(1_000), Vec::new());
    for _ in 0..10 {
        let next = port.service(now).unwrap().unwrap();
        waits.push(next.since(now).0 / 1_000_000);
        assert_eq!(port.service(Nanos(next.0 - 1)), Ok(Some(next)), "not before its time");
        now = next;
    }
    assert_eq!(waits, [20, 40, 80, 160, 320, 640, 1000, 1000, 1000, 1000]);
}

#[test]
fn what_is_no_stream_socket_is_not_taken() {
    let reactor = tombolo_worker::reactor::Reactor::new().unwrap();
    let registration = reactor.registrar().registration(tombolo_switch::wait::Token(1));
    let (_port, feed) = StreamPort::given(1500, registration);
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    assert!(matches!(feed.give(pipe), Err(StreamError::NotAStream { source: Errno::NOTSOCK })));
}

#[test]
fn memory_that_a_sender_took_away_costs_its_frames_and_not_the_peer() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    let mut rig = Rig::<Socketpair>::up();
    let file = memfd_create("sender", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4096).unwrap();
    let memory = tombolo_shm::memory::Mapping::new(&file, 0, 4096, true).unwrap();
    let mut batch = Batch::with_capacity(1);
    batch.push(memory.view().take(1000), Offload::NONE);
    // Its head was copied; the rest is gone when it is sent.
    ftruncate(&file, 0).unwrap();
    let mut drops = Drops::default();
    let sent = rig.port.transmit(&batch, &[0], &mut drops).unwrap();
    assert_eq!((sent.frames, drops.of(Reason::SystemRefused), drops.total()), (0, 1, 1));
    assert_eq!(rig.port.link(), Carrier::Up);
    // Another sender's frame comes through, and the peer finds its beginning.
    let fine = frame(9, 700);
    let mut batch = Batch::with_capacity(1);
    batch.push(Foreign::from(&fine[..]), Offload::NONE);
    let sent = rig.port.transmit(&batch, &[0], &mut drops).unwrap();
    assert_eq!((sent.frames, drops.total()), (1, 1));
    assert_eq!(rig.peer.collect().unwrap().bytes, fine);
}
