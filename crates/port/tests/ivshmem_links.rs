//! The whole of a network over ivshmem, without machines: the links' server on its sockets, a
//! worker with one port per link, and processes that join as QEMU does. Each reaches each through
//! the switch, with doorbells and without, over peers that come and go and a server that ends.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use tombolo_ivshmem::client::{Joined, JoinedLink};
use tombolo_ivshmem::end::{EventDoorbells, LinkEnd, PeerDoorbells};
use tombolo_ivshmem::links::{Config, Door, Event, Links};
use tombolo_ivshmem::peer::NetPeer;
use tombolo_ivshmem::server::{Dialect, Seat, Shape};
use tombolo_port::ivshmem::{Handle, Ivshmem, PollSettings};
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::region::{Header, Layout, Name};
use tombolo_ring::ivshmem::state::Offloads;
use tombolo_shm::memory::Mapping;
use tombolo_switch::control::{NetworkId, PortSettings};
use tombolo_switch::mac::MacSettings;
use tombolo_switch::port::Carrier;
use tombolo_testing::until;
use tombolo_worker::thread::{WorkerConfig, WorkerThread};

const TIMEOUT: Duration = Duration::from_secs(30);
const BYTES: u64 = 1 << 20;

struct Place(PathBuf);

impl Place {
    fn new(name: &str) -> Place {
        let path = std::env::temp_dir().join(format!("tmb-links-{name}-{}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Place(path)
    }

    fn socket(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.sock"))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn config(place: &Place, name: &str, vectors: u32) -> Config {
    let layout = Layout::v1(BYTES, 0, 2).unwrap();
    let header = Header { protocol: protocol::NETWORK, ..Header::network(Name::new(name).unwrap(), vectors) };
    Config {
        name: name.into(),
        shape: Shape { dialect: Dialect::V1, max_peers: 2, vectors },
        layout,
        region_bytes: BYTES,
        header: Some(header),
        host: Some(0),
        helper: None,
        doors: vec![Door { path: place.socket(name), seat: Seat::Fixed(1) }],
    }
}

/// The fabric's side: a server, and a worker with a port per link.
struct Fabric {
    place: Place,
    links: Option<Links>,
    worker: WorkerThread,
    network: NetworkId,
    handles: Vec<Handle>,
}

impl Fabric {
    fn new(name: &str) -> Fabric {
        let links = Links::start(name, None, Box::new(|text| panic!("{text}"))).unwrap();
        let worker = WorkerThread::start(&WorkerConfig { name: name.into(), ..WorkerConfig::default() }).unwrap();
        let network = worker.handle().add_network("net", MacSettings::default()).unwrap();
        Fabric { place: Place::new(name), links: Some(links), worker, network, handles: Vec::new() }
    }

    fn add(&mut self, name: &str, vectors: u32) -> Receiver<&'static str> {
        let links = self.links.as_ref().unwrap();
        let opened = links.open(config(&self.place, name, vectors)).unwrap();
        let parts = LinkEnd {
            memory: Mapping::new(&opened.region, 0, BYTES, true).unwrap().into(),
            layout: Layout::default_network(),
            own_id: 0,
            peer_id: 1,
            vectors,
            doorbells: opened.own,
            peer_doorbells: None,
            peer_present: false,
            owns_region: true,
            mtu: 1500,
            offloads: Offloads::Offered,
        };
        let reserved = self.worker.handle().reserve().unwrap();
        let registration = self.worker.registration(&reserved);
        let (port, handle) = Ivshmem::new(parts, PollSettings::default(), registration).unwrap();
        self.worker.handle().add_port(reserved, self.network, name, Box::new(port), PortSettings::default()).unwrap();
        let (tell, told) = channel();
        let watched = handle.clone();
        let watcher = move |event| {
            match event {
                Event::Joined { doorbells, .. } => {
                    let doorbells = (!doorbells.is_empty())
                        .then(|| Box::new(EventDoorbells::from(doorbells)) as Box<dyn PeerDoorbells>);
                    watched.peer_joined(doorbells);
                    tell.send("joined")
                }
                Event::Left { .. } => {
                    watched.peer_left();
                    tell.send("left")
                }
            }
            .unwrap_or(())
        };
        links.serve(name, Some(Box::new(watcher))).unwrap();
        self.handles.push(handle);
        told
    }

    fn join(&self, name: &str) -> JoinedLink<NetPeer> {
        let joined = Joined::connect(self.place.socket(name), TIMEOUT).unwrap();
        assert_eq!((joined.id(), joined.header().name.as_str()), (1, name));
        joined.network().unwrap()
    }

    /// Waits until the switch knows that all links are up: a link is up at its two ends one after
    /// the other.
    fn all_up(&self) {
        let end = Instant::now() + TIMEOUT;
        while self.worker.handle().status().unwrap().ports.iter().any(|port| port.link != Carrier::Up) {
            assert!(Instant::now() < end, "not all ports come up");
            std::thread::yield_now();
        }
    }

    fn detail(&self, port: usize, name: &str) -> String {
        let status = self.worker.handle().status().unwrap();
        status.ports[port].details.iter().find(|(n, _)| *n == name).unwrap().1.to_string()
    }
}

fn up(link: &mut JoinedLink<NetPeer>) {
    let end = Instant::now() + TIMEOUT;
    while !link.step().unwrap() {
        link.wait(Duration::from_millis(20)).unwrap();
        assert!(Instant::now() < end, "the link does not come up: {:?}", link.peer().states());
    }
}

fn mac(of: usize) -> [u8; 6] {
    [0x02, 0x54, 0x4d, 0, 0, of as u8]
}

fn frame(from: usize, to: [u8; 6], number: u32, len: usize) -> Vec<u8> {
    let mut frame = [&to[..], &mac(from), &[0x88, 0xb5], &number.to_be_bytes()].concat();
    frame.resize(len, number as u8);
    frame
}

/// Everybody sends to each other one, and all of it arrives, once and as it was.
fn all_pairs(links: &mut [JoinedLink<NetPeer>], round: u32) {
    let count = links.len();
    // One frame to everybody, so that the switch knows all.
    for (i, link) in links.iter_mut().enumerate() {
        link.peer().send(&frame(i, [0xff; 6], u32::MAX, 60)).unwrap();
        link.peer().flush();
    }
    let mut learned = vec![0; count];
    collect(links, |i, got| {
        learned[i] += usize::from(got[14..18] == [0xff; 4]);
        learned.iter().all(|n| *n >= count - 1)
    });
    let lens = [60, 1514, 200, 1000];
    for (from, link) in links.iter_mut().enumerate() {
        for to in (0..count).filter(|to| *to != from) {
            for (n, len) in lens.into_iter().enumerate() {
                let number = round * 1000 + (from * 100 + to * 10 + n) as u32;
                link.peer().send(&frame(from, mac(to), number, len)).unwrap();
            }
        }
        link.peer().flush();
    }
    let mut seen = std::collections::BTreeSet::new();
    collect(links, |i, got| {
        if got[..6] == mac(i) {
            let number = u32::from_be_bytes(got[14..18].try_into().unwrap());
            let from = usize::from(got[11]);
            let n = (number % 10) as usize;
            assert_eq!(got, frame(from, mac(i), number, lens[n]), "a frame as it was sent");
            assert!(seen.insert((from, i, number)), "once");
        }
        seen.len() == count * (count - 1) * lens.len()
    });
}

/// Has everybody receive until `done` says so.
fn collect(links: &mut [JoinedLink<NetPeer>], mut done: impl FnMut(usize, &[u8]) -> bool) {
    let (mut buffer, end) = (Vec::new(), Instant::now() + TIMEOUT);
    loop {
        for (i, link) in links.iter_mut().enumerate() {
            while let Some(over) = link.peer().receive(&mut buffer, |bytes| done(i, bytes)) {
                if over {
                    return;
                }
            }
            link.peer().wait(Duration::from_millis(1));
        }
        assert!(Instant::now() < end, "not all frames came");
    }
}

#[test]
fn each_reaches_each_with_doorbells_and_without() {
    let mut fabric = Fabric::new("pairs");
    // The third is polled by both.
    let told: Vec<_> = [2, 1, 0, 2].into_iter().enumerate().map(|(i, n)| fabric.add(&format!("l{i}"), n)).collect();
    let mut links: Vec<_> = (0..4).map(|i| fabric.join(&format!("l{i}"))).collect();
    links.iter_mut().for_each(up);
    assert!(told.iter().all(|t| t.recv_timeout(TIMEOUT) == Ok("joined")));
    fabric.all_up();
    all_pairs(&mut links, 0);
    for round in 1..4 {
        // One goes and another comes in its place; the others are not disturbed.
        let gone = round as usize % links.len();
        drop(links.remove(gone));
        assert_eq!(told[gone].recv_timeout(TIMEOUT), Ok("left"));
        links.insert(gone, fabric.join(&format!("l{gone}")));
        up(&mut links[gone]);
        assert_eq!(told[gone].recv_timeout(TIMEOUT), Ok("joined"));
        for (i, link) in links.iter_mut().enumerate() {
            assert!(link.step().unwrap());
            assert_eq!(link.peer().resets().total(), 0, "link {i}");
        }
        fabric.all_up();
        all_pairs(&mut links, round);
    }
    let left: u64 = (0..4).map(|i| fabric.detail(i, "resets_peer_left").parse::<u64>().unwrap()).sum();
    let stopped: u64 = (0..4).map(|i| fabric.detail(i, "resets_peer_reset").parse::<u64>().unwrap()).sum();
    assert_eq!(left + stopped, 3, "only those who went");
    // The server ends: links that exist go on.
    drop(fabric.links.take());
    for link in &mut links {
        let end = Instant::now() + TIMEOUT;
        while !link.server_is_gone() {
            link.step().unwrap();
            assert!(Instant::now() < end, "the server's end is not seen");
        }
    }
    links.iter_mut().for_each(up);
    fabric.all_up();
    all_pairs(&mut links, 9);
}

/// What 64 links cost that nothing wakes and nothing uses: their looks fall together, and there are
/// 250 in a second.
#[test]
fn idle_links_without_doorbells_share_their_wake_ups() {
    let mut fabric = Fabric::new("idle");
    let names: Vec<String> = (0..64).map(|i| format!("l{i}")).collect();
    names.iter().for_each(|name| drop(fabric.add(name, 0)));
    let mut links: Vec<_> = names.iter().map(|name| fabric.join(name)).collect();
    links.iter_mut().for_each(up);
    fabric.all_up();
    let slow = |port| fabric.detail(port, "woken_by").contains("4000 us");
    until("the last of them to become slow", || (0..64).all(slow));
    let counters = fabric.worker.handle().counters().clone();
    let (sleeps, slept, start) = (counters.sleeps.get(), counters.slept_ns.get(), Instant::now());
    // The span that is measured, not a wait for anything.
    std::thread::sleep(Duration::from_secs(2));
    let took = start.elapsed().as_secs_f64();
    let per_second = (counters.sleeps.get() - sleeps) as f64 / took;
    let awake = 1.0 - (counters.slept_ns.get() - slept) as f64 / 1e9 / took;
    println!("64 idle links: {per_second:.0} wake-ups a second, awake for {:.2} % of the time", awake * 100.0);
    assert!(per_second < 300.0, "{per_second} wake-ups a second");
    assert!(per_second > 50.0, "{per_second} looks a second: a frame would wait for long");
    assert!(fabric.detail(63, "woken_by").contains("4000 us"), "{}", fabric.detail(63, "woken_by"));
}
