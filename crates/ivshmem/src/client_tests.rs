//! Processes that join a link, against a server's side written here message by message, and against
//! servers that are none.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use tombolo_ring::ivshmem::channel::Shape;
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::region::{Header, Layout, Name};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::memory::{Mapping, sealed_region};
use tombolo_shm::passing;

use super::*;
use crate::channel::Error;

const BYTES: u64 = 1 << 20;
const SOON: Duration = Duration::from_secs(10);

/// The server's side of a link of two.
struct Host {
    region: OwnedFd,
    header: Header,
    /// By seat and vector.
    doorbells: Vec<Vec<Doorbell>>,
    sockets: Vec<Option<UnixStream>>,
}

fn say(socket: &UnixStream, number: i64, fd: Option<&OwnedFd>) {
    let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
    assert_eq!(passing::send(socket, &v1::encode(number), &fds, true), Ok(8));
}

impl Host {
    fn new(protocol: u32, vectors: u32) -> Host {
        let region = sealed_region("link", BYTES).unwrap();
        let layout = Layout::v1(BYTES, 0, 2).unwrap();
        let header =
            Header { protocol, vectors, layout, mac: [0; 6], mtu: 0, name: Name::new("test").unwrap(), offloads: true };
        let mut page = [0; 4096];
        header.encode(&mut page).unwrap();
        Mapping::new(&region, 0, BYTES, true).unwrap().view_mut().unwrap().write_from(&page);
        Host { region, header, doorbells: vec![Vec::new(), Vec::new()], sockets: vec![None, None] }
    }

    fn fds(&self, seat: usize) -> Vec<OwnedFd> {
        self.doorbells[seat].iter().map(|doorbell| doorbell.as_fd().try_clone_to_owned().unwrap()).collect()
    }

    /// Greets the client that takes `seat`, and tells the other one; returns the client's socket.
    fn greet(&mut self, seat: usize) -> OwnedFd {
        let (server, client) = UnixStream::pair().unwrap();
        self.doorbells[seat] = (0..self.header.vectors).map(|_| Doorbell::new().unwrap()).collect();
        say(&server, v1::VERSION, None);
        say(&server, seat as i64, None);
        say(&server, v1::MEMORY, Some(&self.region));
        let other = 1 - seat;
        for doorbell in self.fds(other) {
            say(&server, other as i64, Some(&doorbell));
        }
        for doorbell in self.fds(seat) {
            say(&server, seat as i64, Some(&doorbell));
        }
        if let Some(socket) = &self.sockets[other] {
            for doorbell in self.fds(seat) {
                say(socket, seat as i64, Some(&doorbell));
            }
        }
        self.sockets[seat] = Some(server);
        client.into()
    }

    /// `seat` is gone: its word is cleared and the other one told, as a server does.
    fn gone(&mut self, seat: usize) {
        let memory = Mapping::new(&self.region, 0, BYTES, true).unwrap();
        let word = self.header.layout.state(seat as u32).unwrap();
        memory.view_mut().unwrap().store_u32(word, 0, std::sync::atomic::Ordering::Release).unwrap();
        self.sockets[seat] = None;
        self.doorbells[seat].clear();
        if let Some(socket) = &self.sockets[1 - seat] {
            say(socket, seat as i64, None);
        }
        for doorbell in &self.doorbells[1 - seat] {
            doorbell.ring();
        }
    }
}

fn both_up<A: Meets, B: Meets>(a: &mut JoinedLink<A>, b: &mut JoinedLink<B>) {
    let end = Instant::now() + SOON;
    while !(a.step().unwrap() & b.step().unwrap()) {
        assert!(Instant::now() < end, "the link does not come up");
    }
}

#[test]
fn two_processes_exchange_frames_with_and_without_doorbells() {
    for vectors in [2, 1, 0] {
        let mut host = Host::new(protocol::NETWORK, vectors);
        let mut a = Joined::on(host.greet(0), SOON).unwrap().network().unwrap();
        assert!(!a.step().unwrap(), "nobody else is there");
        let joined = Joined::on(host.greet(1), SOON).unwrap();
        assert_eq!((joined.id(), joined.header().name.as_str()), (1, "test"));
        let mut b = joined.network().unwrap();
        both_up(&mut a, &mut b);
        let peer = std::thread::spawn(move || {
            let mut buffer = Vec::new();
            for _ in 0..100 {
                let end = Instant::now() + SOON;
                let frame = loop {
                    if let Some(frame) = b.peer().receive(&mut buffer, <[u8]>::to_vec) {
                        break frame;
                    }
                    assert!(Instant::now() < end, "no frame");
                    b.wait(SOON).unwrap();
                };
                b.peer().send(&frame).unwrap();
                b.peer().flush();
            }
            b
        });
        let mut buffer = Vec::new();
        for i in 0..100u8 {
            let frame = vec![i; 60 + usize::from(i)];
            a.peer().send(&frame).unwrap();
            a.peer().flush();
            let end = Instant::now() + SOON;
            while a.peer().receive(&mut buffer, |bytes| assert_eq!(bytes, frame)).is_none() {
                assert!(Instant::now() < end, "no answer");
                a.wait(SOON).unwrap();
            }
        }
        let mut b = peer.join().unwrap();
        // The server ends: the link goes on.
        host.sockets = vec![None, None];
        assert!(a.step().unwrap() && a.server_is_gone());
        a.peer().send(&[7; 60]).unwrap();
        a.peer().flush();
        assert_eq!(b.peer().receive(&mut buffer, <[u8]>::len), Some(60));
    }
}

#[test]
fn records_and_values_go_both_ways_and_a_peer_is_replaced() {
    let shape = Shape { slots: 64, record_bytes: 32, latest_bytes: 16 };
    for vectors in [2, 0] {
        let mut host = Host::new(protocol::CHANNEL, vectors);
        let join = |host: &mut Host, seat: usize| {
            Joined::on(host.greet(seat), SOON).unwrap().channel(1 - seat as u32, shape).unwrap()
        };
        let mut a = join(&mut host, 0);
        assert!(matches!(a.peer().send(b"x"), Err(Error::Down { .. })));
        for round in 0..3 {
            let mut b = join(&mut host, 1);
            both_up(&mut a, &mut b);
            let mut to = [0; 32];
            for i in 0..200u32 {
                a.peer().send(&i.to_le_bytes()).unwrap();
                let record = b.peer().recv(&mut to).unwrap().unwrap();
                assert_eq!((record.number, record.len, &to[..4]), (i + 1, 4, &i.to_le_bytes()[..]));
                b.peer().set(&to[..4]).unwrap();
                assert_eq!(a.peer().get(&mut to).unwrap().unwrap().number, i + 1);
            }
            for _ in 0..64 {
                b.peer().send(b"fill").unwrap();
            }
            assert_eq!(b.peer().send(b"fill"), Err(Error::Full));
            // A wait ends when a record is there already, and when one comes.
            assert!(a.wait(SOON).unwrap());
            drop(b);
            host.gone(1);
            let end = Instant::now() + SOON;
            while a.step().unwrap() || a.peer().states().0 != tombolo_ring::ivshmem::state::State::Init {
                assert!(Instant::now() < end, "round {round}: the peer's going is not seen");
            }
        }
        // A peer of another shape: refused by name, and the link reset.
        let other = Shape { slots: 32, ..shape };
        let mut b = Joined::on(host.greet(1), SOON).unwrap().channel(0, other).unwrap();
        both_up(&mut a, &mut b);
        let error = a.peer().send(b"x").unwrap_err().to_string();
        assert_eq!(
            error,
            "the peer has 32 slots of 32 bytes and a register of 16, expected 64 slots of 32 bytes and a register of 16"
        );
        assert_eq!(a.peer().resets().fault, 1);
    }
}

#[test]
fn a_waiting_process_is_woken_by_a_record() {
    let shape = Shape { slots: 4, record_bytes: 8, latest_bytes: 0 };
    let mut host = Host::new(protocol::CHANNEL, 2);
    let mut a = Joined::on(host.greet(0), SOON).unwrap().channel(1, shape).unwrap();
    let mut b = Joined::on(host.greet(1), SOON).unwrap().channel(0, shape).unwrap();
    both_up(&mut a, &mut b);
    let waiter = std::thread::spawn(move || {
        let (mut to, mut got, end) = ([0; 8], 0, Instant::now() + SOON);
        while got < 1000 {
            match b.peer().recv(&mut to).unwrap() {
                Some(record) => got = record.number,
                None => drop(b.wait(SOON)),
            }
            assert!(Instant::now() < end, "{got} of 1000 records came: a wake-up was missed");
        }
    });
    let end = Instant::now() + SOON;
    let mut sent = 0;
    while sent < 1000 {
        match a.peer().send(b"record") {
            Ok(()) => sent += 1,
            Err(Error::Full) => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < end, "{sent} of 1000 records were sent");
    }
    waiter.join().unwrap();
}

/// Waits until the thread of that name has slept at least so often.
fn until_slept(name: &str, times: u64) {
    let end = Instant::now() + SOON;
    let slept = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let texts = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok());
        let text = texts.into_iter().find(|text| text.starts_with(&format!("Name:\t{name}\n")))?;
        text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse::<u64>().ok()
    };
    while slept().is_none_or(|n| n < times) {
        assert!(Instant::now() < end, "{name} slept {:?} times, and looks no more", slept());
        std::thread::yield_now();
    }
}

/// QEMU drops a guest's rings for a process of which the server has not told it yet. Here the peer
/// never rings.
#[test]
fn a_waiting_process_finds_a_record_for_which_the_first_ring_got_lost() {
    let shape = Shape { slots: 4, record_bytes: 8, latest_bytes: 0 };
    for vectors in [1, 2] {
        let mut host = Host::new(protocol::CHANNEL, vectors);
        let mut a = Joined::on(host.greet(0), SOON).unwrap().channel(1, shape).unwrap();
        let mut b = Joined::on(host.greet(1), SOON).unwrap().channel(0, shape).unwrap();
        both_up(&mut a, &mut b);
        // Rings about the state came; of two vectors the other one is for traffic.
        if vectors == 1 {
            b.peer().doorbells.take(|_| true);
            b.peer().doorbells.peer_joined();
        }
        a.peer().peer_joined(None);
        let wait = move || {
            let (began, mut to) = (Instant::now(), [0; 8]);
            while b.peer().recv(&mut to).unwrap().is_none() {
                b.wait(6 * SOON).unwrap();
            }
            began.elapsed()
        };
        let waiter = std::thread::Builder::new().name("lost-ring".into()).spawn(wait).unwrap();
        // The look that follows on each sleep once is over.
        until_slept("lost-ring", 6);
        a.peer().send(b"record").unwrap();
        let waited = waiter.join().unwrap();
        assert!(waited < SOON, "{vectors} vectors: found after {waited:?}");
    }
}

#[test]
fn servers_that_are_none_are_told_apart() {
    let silent = |what: &dyn Fn(&UnixStream)| {
        let (server, client) = UnixStream::pair().unwrap();
        what(&server);
        drop(server);
        Joined::on(client.into(), Duration::from_millis(20)).err().unwrap()
    };
    assert!(matches!(silent(&|_| ()), JoinError::Closed));
    let (kept, client) = UnixStream::pair().unwrap();
    let timeout = Joined::on(client.into(), Duration::from_millis(20)).err().unwrap();
    assert!(matches!(timeout, JoinError::Timeout { .. }), "{timeout}");
    drop(kept);
    assert!(matches!(silent(&|s| say(s, 7, None)), JoinError::Protocol(v1::ReadError::Version { found: 7 })));
    let region = |bytes: u64| sealed_region("t", bytes).unwrap();
    let greeting = |s: &UnixStream, region: &OwnedFd| {
        say(s, 0, None);
        say(s, 0, None);
        say(s, -1, Some(region));
    };
    assert!(matches!(silent(&|s| greeting(s, &region(4096))), JoinError::Header(RegionError::Magic { .. })));
    assert!(matches!(silent(&|s| greeting(s, &region(0))), JoinError::Memory(_)));
    let path = std::env::temp_dir().join("tombolo-no-such-ivshmem-server");
    assert!(matches!(Joined::connect(path, SOON), Err(JoinError::Connect { .. })));
    // Links of other use, and seats that do not fit.
    let mut host = Host::new(protocol::CHANNEL, 1);
    assert!(matches!(Joined::on(host.greet(0), SOON).unwrap().network(), Err(JoinError::Protocols { .. })));
    let shape = Shape { slots: 4, record_bytes: 8, latest_bytes: 0 };
    for (peer, shape) in
        [(0, shape), (2, shape), (1, Shape { slots: 3, ..shape }), (1, Shape { slots: 32768, ..shape })]
    {
        let error = Joined::on(host.greet(0), SOON).unwrap().channel(peer, shape).err();
        assert!(matches!(error, Some(JoinError::End(_))), "{peer} {shape}");
    }
    let mut host = Host::new(protocol::NETWORK, 1);
    assert!(matches!(Joined::on(host.greet(1), SOON).unwrap().channel(0, shape), Err(JoinError::Protocols { .. })));
}
