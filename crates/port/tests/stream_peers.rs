//! The stream attachment with its real peers: stock QEMU, by each of its ways to open a stream, and
//! passt.
//!
//! QEMU needs no guest for it: its hub joins the stream with its user-mode network, which answers
//! ARP, DHCP and pings at 10.0.2.2. A test whose program is not installed prints `skipped: NAME:
//! reason` and fails where `CI` is `true`.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tombolo_port::stream::{Address, StreamFeed, StreamPort};
use tombolo_ring::mem::Foreign;
use tombolo_switch::Nanos;
use tombolo_switch::drop::Drops;
use tombolo_switch::frame::{Batch, Offload};
use tombolo_switch::port::{Carrier, Port};
use tombolo_switch::wait::{Token, Waiter};
use tombolo_worker::reactor::{Reactor, Registration};

const DEADLINE: Duration = Duration::from_secs(30);
const OUR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const OUR_IP: [u8; 4] = [10, 0, 2, 15];
const GATEWAY: [u8; 4] = [10, 0, 2, 2];

/// A worker with the port alone.
struct Worker {
    port: StreamPort,
    reactor: Reactor,
    drops: Drops,
    got: Vec<Vec<u8>>,
}

impl Worker {
    fn new(make: impl FnOnce(Registration) -> StreamPort) -> Worker {
        let reactor = Reactor::new().unwrap();
        let port = make(reactor.registrar().registration(Token(0)));
        Worker { port, reactor, drops: Drops::default(), got: Vec::new() }
    }

    /// With a port that is given its peers.
    fn given() -> (Worker, StreamFeed) {
        let mut feed = None;
        let worker = Worker::new(|registration| {
            let (port, theirs) = StreamPort::given(1500, registration);
            feed = Some(theirs);
            port
        });
        (worker, feed.unwrap())
    }

    /// Works until `done`; asleep in between, until the port or its timer wakes.
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + DEADLINE;
        loop {
            let now = self.reactor.now();
            let timer = self.port.service(now).unwrap();
            let mut batch = Batch::with_capacity(64);
            let used = self.port.receive(64, &mut batch, &mut self.drops).unwrap();
            for frame in batch.frames() {
                let mut bytes = Vec::new();
                batch.append_to(frame, &mut bytes);
                self.got.push(bytes);
            }
            drop(batch);
            self.port.release().unwrap();
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "not within {DEADLINE:?}: {what}; {:?}", self.port.details());
            if done(self) {
                return;
            }
            if used < 64 && !self.port.arm().unwrap() {
                let timer = timer.map_or(u64::MAX, |at| at.since(self.reactor.now()).0);
                let timeout = Nanos(timer.min(left.as_nanos() as u64));
                self.reactor.wait(Some(timeout), &mut Vec::new());
            }
        }
    }

    fn link(&mut self, link: Carrier) {
        self.until("the link", |w| w.port.link() == link);
    }

    fn send(&mut self, frames: &[Vec<u8>]) {
        let mut batch = Batch::with_capacity(frames.len());
        for frame in frames {
            batch.push(Foreign::from(&frame[..]), Offload::NONE);
        }
        let which: Vec<u16> = (0..frames.len() as u16).collect();
        let sent = self.port.transmit(&batch, &which, &mut self.drops).unwrap();
        self.port.flush().unwrap();
        assert_eq!(sent.frames as usize, frames.len(), "{:?}", self.drops);
    }

    /// Sends `question` and returns the first frame that `is_answer`.
    fn ask(&mut self, question: Vec<u8>, is_answer: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        self.got.clear();
        self.send(&[question]);
        self.until("an answer", |w| w.got.iter().any(|f| is_answer(f)));
        self.got.iter().find(|f| is_answer(f)).unwrap().clone()
    }

    /// Asks for the gateway's address, pings it with every size, and asks for a lease.
    fn converse_with_slirp(&mut self) {
        let mac = self.arp();
        assert_eq!(mac, [0x52, 0x55, 10, 0, 2, 2]);
        let sizes: Vec<usize> = (0..1473).step_by(61).chain([1472]).collect();
        let pings: Vec<_> = sizes.iter().enumerate().map(|(n, size)| ping(mac, n as u16, *size)).collect();
        self.got.clear();
        self.send(&pings);
        let is_echo = |f: &&Vec<u8>| f.len() >= 42 && f[12..14] == [8, 0] && f[23] == 1 && f[34] == 0;
        self.until("all pings come back", |w| w.got.iter().filter(is_echo).count() == pings.len());
        for (ping, echo) in pings.iter().zip(self.got.iter().filter(is_echo)) {
            // QEMU pads what is shorter than Ethernet's least frame.
            assert_eq!(ping[38..], echo[38..ping.len()], "identifier, sequence and data");
            assert_eq!(echo.len(), ping.len().max(60));
        }
        assert_eq!(self.dhcp()[..3], OUR_IP[..3]);
    }

    fn arp(&mut self) -> [u8; 6] {
        let mut question = [[0xff; 6], OUR_MAC].concat();
        question.extend([8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
        question.extend([&OUR_MAC[..], &OUR_IP, &[0; 6], &GATEWAY].concat());
        let is_reply = |f: &[u8]| f.len() >= 42 && f[12..14] == [8, 6] && f[20..22] == [0, 2] && f[28..32] == GATEWAY;
        self.ask(question, is_reply)[22..28].try_into().unwrap()
    }

    /// The address that a DHCP server offers.
    fn dhcp(&mut self) -> [u8; 4] {
        let mut message = vec![1, 1, 6, 0, 0x12, 0x34, 0x56, 0x78];
        message.resize(28, 0);
        message.extend(OUR_MAC);
        message.resize(236, 0);
        message.extend([99, 130, 83, 99, 53, 1, 1, 55, 2, 1, 3, 255]);
        message.resize(300, 0);
        let length = (8 + message.len() as u16).to_be_bytes();
        let udp = [&[0, 68, 0, 67, length[0], length[1], 0, 0], &message[..]].concat();
        let question = ip([0xff; 6], 17, [0; 4], [255; 4], &udp);
        let is_offer = |f: &[u8]| {
            f.len() > 282
                && f[12..14] == [8, 0]
                && f[23] == 17
                && f[36..38] == [0, 68]
                && f[46..50] == [0x12, 0x34, 0x56, 0x78]
        };
        self.ask(question, is_offer)[58..62].try_into().unwrap()
    }
}

fn sum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    (!((sum + (sum >> 16)) as u16)).to_be_bytes()
}

fn ip(to: [u8; 6], protocol: u8, source: [u8; 4], destination: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let length = (20 + payload.len() as u16).to_be_bytes();
    let mut header = [0x45, 0, length[0], length[1], 0, 0, 0, 0, 64, protocol, 0, 0].to_vec();
    header.extend([source, destination].concat());
    let checksum = sum(&header);
    header[10..12].copy_from_slice(&checksum);
    [&to[..], &OUR_MAC, &[8, 0], &header, payload].concat()
}

fn ping(to: [u8; 6], sequence: u16, data: usize) -> Vec<u8> {
    let mut icmp = vec![8, 0, 0, 0, 0x54, 0x4d];
    icmp.extend(sequence.to_be_bytes());
    icmp.extend((0..data).map(|i| (i * 7 + sequence as usize) as u8));
    let checksum = sum(&icmp);
    icmp[2..4].copy_from_slice(&checksum);
    ip(to, 1, OUR_IP, GATEWAY, &icmp)
}

/// A folder of its own, which a program that runs as user `nobody` may write.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        use std::os::unix::fs::PermissionsExt;
        let path = std::env::temp_dir().join(format!("tombolo-peers-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o777)).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A program that is killed at the end of its test.
struct Program(Child);

impl Program {
    fn start(command: &mut Command) -> Program {
        Program(command.stdout(Stdio::null()).spawn().unwrap())
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// QEMU without a machine: the stream `netdev` joined with its user-mode network.
fn qemu(netdev: &str, stdin: Option<OwnedFd>) -> Program {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-M", "none", "-nodefaults", "-display", "none", "-monitor", "none", "-serial", "none"]);
    command.args(["-netdev", netdev, "-netdev", "user,id=u"]);
    command.args(["-netdev", "hubport,id=a,hubid=0,netdev=s", "-netdev", "hubport,id=b,hubid=0,netdev=u"]);
    command.stdin(stdin.map_or(Stdio::null(), Stdio::from));
    Program::start(&mut command)
}

/// Runs a test that needs a program, or says why not.
fn with(program: &str, body: impl FnOnce()) {
    let there = std::env::var_os("PATH").is_some_and(|p| std::env::split_paths(&p).any(|d| d.join(program).exists()));
    if there {
        return body();
    }
    tombolo_testing::skip(format!("{program} is not installed"));
}

fn unix(path: &Path) -> Address {
    Address::Unix(path.to_owned())
}

#[test]
fn qemu_stream_connects_to_us_and_again_after_it_was_killed() {
    with("qemu-system-x86_64", || {
        let folder = Folder::new("qc");
        let path = folder.0.join("s");
        let mut worker = Worker::new(|r| StreamPort::listen(&unix(&path), 0o600, 1500, r).unwrap());
        let netdev = format!("stream,id=s,server=off,addr.type=unix,addr.path={}", path.display());
        for _ in 0..2 {
            let peer = qemu(&netdev, None);
            worker.link(Carrier::Up);
            worker.converse_with_slirp();
            peer.kill();
            worker.link(Carrier::Down);
        }
        assert!(worker.port.details().contains(&("peers_so_far", 2u64.into())));
    });
}

#[test]
fn we_connect_to_qemu_stream_and_again_after_it_was_killed() {
    with("qemu-system-x86_64", || {
        let folder = Folder::new("qs");
        let path = folder.0.join("s");
        let mut worker = Worker::new(|r| StreamPort::connect(&unix(&path), 1500, r));
        let netdev = format!("stream,id=s,server=on,addr.type=unix,addr.path={}", path.display());
        for _ in 0..2 {
            let peer = qemu(&netdev, None);
            worker.link(Carrier::Up);
            worker.converse_with_slirp();
            peer.kill();
            worker.link(Carrier::Down);
        }
    });
}

#[test]
fn qemu_socket_is_given_one_end_of_a_pair() {
    with("qemu-system-x86_64", || {
        let (mut worker, feed) = Worker::given();
        for _ in 0..2 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            // Descriptor 0 is the one that any program inherits.
            let peer = qemu("socket,id=s,fd=0", Some(theirs.into()));
            feed.give(ours.into()).unwrap();
            worker.link(Carrier::Up);
            worker.converse_with_slirp();
            peer.kill();
            worker.link(Carrier::Down);
        }
    });
}

#[test]
fn qemu_socket_connects_to_us_over_tcp() {
    with("qemu-system-x86_64", || {
        let any = "tcp:127.0.0.1:0".parse().unwrap();
        let mut worker = Worker::new(|r| StreamPort::listen(&any, 0, 1500, r).unwrap());
        let Some(Address::Tcp(at)) = worker.port.listens_at().cloned() else { panic!("a TCP port") };
        let _peer = qemu(&format!("socket,id=s,connect={at}"), None);
        worker.link(Carrier::Up);
        worker.converse_with_slirp();
    });
}

#[test]
fn we_connect_to_qemu_socket_over_tcp() {
    with("qemu-system-x86_64", || {
        // A port that was free a moment ago.
        let at = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut worker = Worker::new(|r| StreamPort::connect(&Address::Tcp(at), 1500, r));
        let _peer = qemu(&format!("socket,id=s,listen={at}"), None);
        worker.link(Carrier::Up);
        worker.converse_with_slirp();
    });
}

fn passt(arguments: &[&str], stdin: Option<OwnedFd>) -> Program {
    let mut command = Command::new("passt");
    command.args(["--foreground", "--quiet", "-4", "-a", "10.0.2.15", "-n", "24", "-g", "10.0.2.2"]).args(arguments);
    command.stdin(stdin.map_or(Stdio::null(), Stdio::from)).stderr(Stdio::null());
    Program::start(&mut command)
}

/// passt takes its template from the interface with the default route.
fn with_passt(body: impl FnOnce()) {
    with("passt", || {
        let routes = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
        if routes.lines().any(|line| line.split_whitespace().nth(1) == Some("00000000")) {
            return body();
        }
        tombolo_testing::skip("passt needs an interface with a default route");
    });
}

#[test]
fn passt_is_given_one_end_of_a_pair_and_another_passt_after_it() {
    with_passt(|| {
        let (mut worker, feed) = Worker::given();
        for _ in 0..2 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let peer = passt(&["--fd", "0"], Some(theirs.into()));
            feed.give(ours.into()).unwrap();
            worker.link(Carrier::Up);
            assert_ne!(worker.arp(), [0; 6]);
            assert_eq!(worker.dhcp(), OUR_IP);
            peer.kill();
            worker.link(Carrier::Down);
        }
    });
}

#[test]
fn we_connect_to_passt() {
    with_passt(|| {
        let folder = Folder::new("passt");
        let path = folder.0.join("s");
        let mut worker = Worker::new(|r| StreamPort::connect(&unix(&path), 1500, r));
        let _peer = passt(&["-s", path.to_str().unwrap()], None);
        worker.link(Carrier::Up);
        assert_ne!(worker.arp(), [0; 6]);
        assert_eq!(worker.dhcp(), OUR_IP);
    });
}
