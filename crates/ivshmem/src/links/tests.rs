use super::super::{v1, v2};
use super::*;
use rustix::net::SocketType;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;
use tempfile::TempDir;
use tombolo_ring::ivshmem::region::Name;
use tombolo_shm::memory::cannot_shrink;
use tombolo_shm::passing;
use tombolo_testing::{TIMEOUT, found, until};

fn config(place: &TempDir, name: &str, max_peers: u32, host: bool) -> Config {
    let layout = Layout::v1(1 << 20, 0, max_peers).unwrap();
    let header = Header { layout, ..Header::network(Name::new(name).unwrap(), 2) };
    Config {
        name: name.into(),
        shape: Shape { dialect: Dialect::V1, max_peers, vectors: 2 },
        layout,
        region_bytes: 1 << 20,
        header: Some(header),
        host: host.then_some(0),
        helper: None,
        doors: vec![Door { path: place.path().join(name), seat: Seat::Any }],
    }
}

fn links() -> Links {
    Links::start("test", None, Box::new(|text| assert!(text.contains("was refused"), "{text}"))).unwrap()
}

/// A client: stock QEMU's part of the conversation.
struct Client {
    socket: OwnedFd,
    says: v1::Client,
}

impl Client {
    fn connect(path: &Path) -> Client {
        let socket = std::os::unix::net::UnixStream::connect(path).unwrap();
        socket.set_nonblocking(true).unwrap();
        Client { socket: socket.into(), says: v1::Client::new() }
    }

    /// Takes what has come; `false` at the end of the connection.
    fn read(&mut self) -> bool {
        loop {
            let mut bytes = [0; 8];
            match passing::receive(&self.socket, &mut bytes, false) {
                Ok(got) if got.bytes == 8 => drop(self.says.take(bytes, got.fds).unwrap()),
                Ok(_) => return false,
                Err(Errno::AGAIN) => return true,
                Err(Errno::CONNRESET) => return false,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn until(&mut self, what: &str, look: impl Fn(&v1::Client) -> bool) {
        until(what, || {
            assert!(self.read(), "{what}: the connection ended");
            look(&self.says)
        });
    }

    fn joined(path: &Path) -> Client {
        let mut client = Client::connect(path);
        client.until("a greeting", |c| c.own().len() == 2);
        client
    }

    fn until_cut(&mut self) {
        until("the end of the connection", || !self.read());
    }

    fn peers(&self) -> Vec<u32> {
        self.says.peers().iter().filter(|(_, doorbells)| doorbells.len() == 2).map(|(id, _)| *id).collect()
    }
}

fn rung(doorbell: &Doorbell) {
    until("a ring", || doorbell.take());
}

fn watched() -> (Watcher, Receiver<Event>) {
    let (sender, receiver) = channel();
    (Box::new(move |event| sender.send(event).unwrap()), receiver)
}

fn status(links: &Links, name: &str) -> LinkStatus {
    links.status().into_iter().find(|l| l.name == name).unwrap()
}

#[test]
fn peers_come_ring_each_other_and_go() {
    let (place, links) = (tempfile::tempdir().unwrap(), links());
    let opened = links.open(config(&place, "lan", 3, true)).unwrap();
    assert!(opened.own.len() == 2 && opened.restored.is_empty());
    let (watcher, events) = watched();
    links.serve("lan", Some(watcher)).unwrap();
    let mut a = Client::joined(&place.path().join("lan"));
    assert_eq!((a.says.id(), a.peers()), (Some(1), vec![0]));
    let Event::Joined { id: 1, doorbells } = events.recv_timeout(TIMEOUT).unwrap() else { panic!() };
    // Each rings the other, by vector.
    doorbells[1].ring();
    rung(&a.says.own()[1]);
    assert!(!a.says.own()[0].take());
    a.says.peers()[&0][0].ring();
    rung(&opened.own[0]);
    let b = Client::joined(&place.path().join("lan"));
    a.until("b", |c| c.peers().get(&2).is_some_and(|doorbells| doorbells.len() == 2));
    assert_eq!(b.peers(), [0, 1]);
    b.says.peers()[&1][1].ring();
    rung(&a.says.own()[1]);
    // All see the same memory, with its header; no peer can shrink it.
    let memory = b.says.memory().unwrap();
    assert!(cannot_shrink(memory));
    let mapping = Mapping::new(memory, 0, 1 << 20, true).unwrap();
    let header = Header::read(mapping.view()).unwrap();
    assert_eq!((header.name.as_str(), header.layout.max_peers, header.vectors), ("lan", 3, 2));
    let view = mapping.view_mut().unwrap();
    view.store_u32(header.layout.state(2).unwrap(), 3, Ordering::Release).unwrap();
    view.store_u32(header.layout.state(1).unwrap(), 2, Ordering::Release).unwrap();
    let states = |link: &LinkStatus| link.peers.iter().map(|p| (p.id, p.state)).collect::<Vec<_>>();
    let before = status(&links, "lan");
    assert_eq!(states(&before), [(0, 0), (1, 2), (2, 3)]);
    assert!(before.peers.iter().all(|p| p.pid == std::process::id()));
    // Full: another is refused.
    Client::connect(&place.path().join("lan")).until_cut();
    drop(b);
    a.until("b's end", |c| !c.peers().contains_key(&2));
    rung(&a.says.own()[0]);
    rung(&opened.own[0]);
    let after = found("its end", || Some(status(&links, "lan")).filter(|s| s.peers.len() == 2));
    assert_eq!((states(&after), after.joins, after.leaves, after.refused), (vec![(0, 0), (1, 2)], 2, 1, 1));
    assert_eq!(mapping.view().load_u32(header.layout.state(2).unwrap(), Ordering::Acquire), Some(0));
    let told: Vec<_> = std::iter::from_fn(|| events.try_recv().ok()).collect();
    assert!(matches!(&told[..], [Event::Joined { id: 2, .. }, Event::Left { id: 2 }]), "{told:?}");
    links.close("lan");
    a.until_cut();
    assert!(!place.path().join("lan").exists() && links.status().is_empty());
}

#[test]
fn who_comes_in_place_of_a_dying_peer_waits_for_its_seat() {
    let place = tempfile::tempdir().unwrap();
    let (sender, told) = channel();
    let links = Links::start("test", None, Box::new(move |text| sender.send(text.to_string()).unwrap())).unwrap();
    links.open(config(&place, "lan", 2, true)).unwrap();
    links.serve("lan", None).unwrap();
    let path = place.path().join("lan");
    for _ in 0..5 {
        let old = Client::joined(&path);
        // The next one is there before the kernel has closed the old one's connection.
        let mut new = Client::connect(&path);
        assert!(new.read() && new.says.id().is_none(), "it is neither greeted nor refused");
        drop(old);
        new.until("the seat", |c| c.own().len() == 2);
        assert_eq!(new.says.id(), Some(1));
        drop(new);
        until("its end", || status(&links, "lan").peers.len() == 1);
    }
    assert_eq!(status(&links, "lan").refused, 0);
    // One that gives up waiting takes no seat; one whose seat does not become free is told why.
    let _stays = Client::joined(&path);
    drop(Client::connect(&path));
    Client::connect(&path).until_cut();
    let text = told.recv_timeout(TIMEOUT).unwrap();
    assert!(text.contains("was refused after") && text.contains("1 by process"), "{text}");
    assert_eq!(status(&links, "lan").refused, 1);
}

#[test]
fn a_client_that_reads_nothing_blocks_nobody_and_is_cut_off() {
    let (place, links) = (tempfile::tempdir().unwrap(), links());
    links.open(config(&place, "lan", 4, false)).unwrap();
    links.serve("lan", None).unwrap();
    let mut good = Client::joined(&place.path().join("lan"));
    let mut slow = Client::joined(&place.path().join("lan"));
    let begun = Instant::now();
    let mut waiting = 0;
    while waiting == 0 {
        let other = Client::joined(&place.path().join("lan"));
        good.until("the other", |c| c.peers().get(&2).is_some_and(|b| b.len() == 2));
        drop(other);
        good.until("the other's end", |c| !c.peers().contains_key(&2));
        waiting = status(&links, "lan").peers.iter().find(|p| p.id == 1).unwrap().waiting;
        assert!(begun.elapsed() < TIMEOUT, "its socket never fills");
    }
    // Its queue is bounded from here on, however often others come and go.
    for _ in 0..50 {
        drop(Client::joined(&place.path().join("lan")));
        good.until("the other's end", |c| !c.peers().contains_key(&2));
        let link = status(&links, "lan");
        assert!(link.peers.iter().all(|p| p.waiting <= 2 * 3), "{link:?}");
    }
    lock(&links.inner).links.get_mut("lan").unwrap().server.set_patience_ns(50_000_000);
    links.doorbell.ring();
    good.until("the slow one's end", |c| !c.peers().contains_key(&1));
    assert_eq!(status(&links, "lan").cut_slow, 1);
    slow.until_cut();
}

#[test]
fn a_client_that_talks_is_cut_off() {
    let (place, links) = (tempfile::tempdir().unwrap(), links());
    links.open(config(&place, "lan", 4, false)).unwrap();
    links.serve("lan", None).unwrap();
    let mut good = Client::joined(&place.path().join("lan"));
    let mut bad = Client::joined(&place.path().join("lan"));
    good.until("the other", |c| c.peers().contains_key(&1));
    rustix::io::write(&bad.socket, b"x").unwrap();
    bad.until_cut();
    good.until("the other's end", |c| !c.peers().contains_key(&1));
    assert_eq!(status(&links, "lan").cut_talking, 1);
}

#[test]
fn two_links_do_not_meet() {
    let place = tempfile::tempdir().unwrap();
    let (ours, theirs) = (links(), links());
    for (links, name) in [(&ours, "a"), (&theirs, "b")] {
        links.open(config(&place, name, 4, false)).unwrap();
        links.serve(name, None).unwrap();
    }
    let taken = theirs.open(Config { doors: config(&place, "a", 4, false).doors, ..config(&place, "c", 4, false) });
    taken.unwrap();
    let error = theirs.serve("c", None).unwrap_err();
    assert!(matches!(error, LinkError::Listen { source: Errno::ADDRINUSE, .. }), "{error}");
    let (a, b) = (Client::joined(&place.path().join("a")), Client::joined(&place.path().join("b")));
    assert!(a.says.peers().is_empty() && b.says.peers().is_empty());
    let inode = |c: &Client| rustix::fs::fstat(c.says.memory().unwrap()).unwrap().st_ino;
    assert_ne!(inode(&a), inode(&b));
}

fn fd_store_at(path: PathBuf) -> Launch {
    Box::new(move || {
        let listener = Listener::replace(&path, SocketType::SEQPACKET).map_err(|e| e.to_string())?;
        let fd_store = FdStore::connect(&path).map_err(|e| e.to_string())?;
        std::thread::spawn(move || fd_store::serve(listener).unwrap());
        Ok(fd_store)
    })
}

fn kept_links(place: &TempDir) -> Links {
    Links::start("test", Some(fd_store_at(place.path().join("keeper"))), Box::new(|_| ())).unwrap()
}

#[test]
fn a_restarted_server_takes_up_peers_connections_and_memory() {
    let place = tempfile::tempdir().unwrap();
    let first = kept_links(&place);
    let opened = first.open(config(&place, "lan", 4, true)).unwrap();
    first.serve("lan", None).unwrap();
    let mut a = Client::joined(&place.path().join("lan"));
    let b = Client::joined(&place.path().join("lan"));
    a.until("b", |c| c.peers().get(&2).is_some_and(|doorbells| doorbells.len() == 2));
    let mapping = Mapping::new(a.says.memory().unwrap(), 0, 1 << 20, true).unwrap();
    mapping.view_mut().unwrap().store_u32(4096 + 4, 3, Ordering::Release).unwrap();
    mapping.view_mut().unwrap().store_u32(4096 + 8, 3, Ordering::Release).unwrap();
    until("peers without messages", || status(&first, "lan").peers.iter().all(|p| p.waiting == 0));
    drop((first, opened));
    // No daemon serves; existing peers continue.
    b.says.peers()[&1][1].ring();
    rung(&a.says.own()[1]);
    drop(b);
    assert!(a.read(), "its connection stands");

    let second = kept_links(&place);
    let other = Config { region_bytes: 1 << 21, ..config(&place, "lan", 4, true) };
    second.recall(FdStore::connect(&place.path().join("keeper")).unwrap()).unwrap();
    let same = config(&place, "lan", 4, true);
    assert!(second.remembers(&same, 1) && !second.remembers(&other, 1));
    // A child that another test forks may hold its end for an instant.
    until("the end of the one that has gone", || !second.remembers(&same, 2));
    let opened = second.open(same).unwrap();
    second.forget_rest();
    let [(1, doorbells)] = &opened.restored[..] else { panic!("{:?}", opened.restored) };
    let (watcher, events) = watched();
    second.serve("lan", Some(watcher)).unwrap();
    doorbells[0].ring();
    rung(&a.says.own()[0]);
    a.says.peers()[&0][1].ring();
    rung(&opened.own[1]);
    a.until("b's end", |c| !c.peers().contains_key(&2));
    let ours = Mapping::new(&opened.region, 0, 8192, false).unwrap();
    let words = [4, 8].map(|at| ours.view().load_u32(4096 + at, Ordering::Acquire).unwrap());
    assert_eq!(words, [3, 0], "the region is the same, and the state of who went meanwhile is 0");
    let mut c = Client::joined(&place.path().join("lan"));
    a.until("c", |a| a.peers().get(&2).is_some_and(|doorbells| doorbells.len() == 2));
    c.says.peers()[&1][0].ring();
    rung(&a.says.own()[0]);
    c.until("a", |c| c.peers().contains_key(&1));
    assert!(matches!(events.try_recv(), Ok(Event::Joined { id: 2, .. })), "of who was there before nothing is told");
    second.end_fd_store(TIMEOUT);
    until("the fd store's end", || !place.path().join("keeper").exists());
}

#[test]
fn a_helpers_seat_is_kept_and_is_no_reason_for_the_fd_store_to_stay() {
    let place = tempfile::tempdir().unwrap();
    let with_helper = || Config { helper: Some(1), ..config(&place, "calls", 2, false) };
    let first = kept_links(&place);
    first.open(with_helper()).unwrap();
    first.serve("calls", None).unwrap();
    let mut machine = Client::joined(&place.path().join("calls"));
    let mut helper = Client::joined(&place.path().join("calls"));
    machine.until("the helper", |c| c.peers().get(&1).is_some_and(|doorbells| doorbells.len() == 2));
    until("peers without messages", || status(&first, "calls").peers.iter().all(|p| p.waiting == 0));
    drop(first);
    let second = kept_links(&place);
    second.recall(FdStore::connect(&place.path().join("keeper")).unwrap()).unwrap();
    let opened = second.open(with_helper()).unwrap();
    assert_eq!(opened.restored.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 1]);
    drop((second, opened));
    assert!(machine.read() && helper.read(), "their connections stand");
    // No daemon serves. The machine is the last peer that the link is for.
    drop(machine);
    until("the fd store's end", || !place.path().join("keeper").exists());
    helper.until_cut();
}

#[test]
fn a_link_that_is_another_now_starts_anew_and_puts_its_peers_out() {
    let place = tempfile::tempdir().unwrap();
    let first = kept_links(&place);
    first.open(config(&place, "lan", 4, true)).unwrap();
    first.serve("lan", None).unwrap();
    let mut a = Client::joined(&place.path().join("lan"));
    drop(first);
    assert!(a.read());
    let second = kept_links(&place);
    second.recall(FdStore::connect(&place.path().join("keeper")).unwrap()).unwrap();
    let opened = second.open(config(&place, "lan", 3, true)).unwrap();
    assert!(opened.restored.is_empty());
    a.until_cut();
    second.serve("lan", None).unwrap();
    assert_eq!(Client::joined(&place.path().join("lan")).says.id(), Some(1));
    // A link of the earlier daemon that this one does not have is forgotten.
    second.close("lan");
    drop(second);
}

#[test]
fn a_lost_fd_store_is_replaced_and_told_everything() {
    let place = tempfile::tempdir().unwrap();
    let (sender, told) = channel();
    let on_failure: OnFailure = Box::new(move |text| sender.send(text.to_string()).unwrap());
    let links = Links::start("test", Some(fd_store_at(place.path().join("keeper"))), on_failure).unwrap();
    links.open(config(&place, "lan", 4, true)).unwrap();
    links.serve("lan", None).unwrap();
    let _a = Client::joined(&place.path().join("lan"));
    assert!(links.is_kept());
    FdStore::connect(&place.path().join("keeper")).unwrap().quit().unwrap();
    let text = told.recv_timeout(TIMEOUT).unwrap();
    assert!(text.contains("is lost"), "{text}");
    let names = found("another fd store with it all", || {
        let fd_store = FdStore::connect(&place.path().join("keeper")).ok()?;
        let names: Vec<String> = fd_store.list().ok()?.into_iter().map(|r| r.name).collect();
        (names.len() == 5).then_some(names)
    });
    assert_eq!(names, ["lan", "lan#0", "lan#1", "lan#2", "lan#3"]);
    links.end_fd_store(TIMEOUT);
}

#[test]
fn a_machine_without_doorbells_sits_until_its_process_ends() {
    let (place, links) = (tempfile::tempdir().unwrap(), links());
    let plain = Config { doors: vec![], ..config(&place, "lan", 2, true) };
    let shape = Shape { vectors: 0, ..plain.shape };
    let opened = links.open(Config { shape, ..plain }).unwrap();
    assert!(opened.own.is_empty());
    let (watcher, events) = watched();
    links.serve("lan", Some(watcher)).unwrap();
    for _ in 0..2 {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        links.occupy("lan", 1, child.id(), pidfd.as_fd()).unwrap();
        assert!(matches!(events.recv_timeout(TIMEOUT), Ok(Event::Joined { id: 1, doorbells }) if doorbells.is_empty()));
        assert!(links.occupy("lan", 1, child.id(), pidfd.as_fd()).is_err(), "the seat is taken");
        assert_eq!(status(&links, "lan").peers[1].pid, child.id());
        let mapping = Mapping::new(links.region("lan").unwrap(), 0, 8192, true).unwrap();
        mapping.view_mut().unwrap().store_u32(4096 + 4, 3, Ordering::Release).unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(matches!(events.recv_timeout(TIMEOUT), Ok(Event::Left { id: 1 })));
        assert_eq!(mapping.view().load_u32(4096 + 4, Ordering::Acquire), Some(0));
    }
}

#[test]
fn a_header_page_that_a_peer_overwrote_is_whole_for_the_next_one() {
    let (place, links) = (tempfile::tempdir().unwrap(), links());
    links.open(config(&place, "lan", 2, true)).unwrap();
    links.serve("lan", None).unwrap();
    let mapping = Mapping::new(links.region("lan").unwrap(), 0, 8192, true).unwrap();
    let page = || {
        let mut bytes = [0; 4096];
        mapping.view().read_into(&mut bytes);
        bytes
    };
    let before = page();
    let hostile = Client::joined(&place.path().join("lan"));
    mapping.view_mut().unwrap().write_from(&[0xa5; 4096]);
    assert_ne!(page(), before);
    drop(hostile);
    let _next = Client::joined(&place.path().join("lan"));
    assert_eq!(page(), before);
}

#[test]
fn version_2_over_its_socket() {
    let (place, links) = (tempfile::tempdir().unwrap(), links());
    let layout = Layout::v2(4096, 0, 0x7f000, 2);
    let config = Config {
        name: "lan".into(),
        shape: Shape { dialect: Dialect::V2 { protocol: 1, output_bytes: 0x7f000 }, max_peers: 2, vectors: 2 },
        layout,
        region_bytes: 1 << 20,
        header: None,
        host: Some(0),
        helper: None,
        doors: vec![Door { path: place.path().join("lan"), seat: Seat::Any }],
    };
    let opened = links.open(config).unwrap();
    let (watcher, events) = watched();
    links.serve("lan", Some(watcher)).unwrap();
    let socket = std::os::unix::net::UnixStream::connect(place.path().join("lan")).unwrap();
    // Each message with its descriptor comes with a call of its own: a descriptor ends what the
    // kernel gives at once.
    let take = || {
        let mut bytes = [0; v2::MAX_BYTES];
        let got = passing::receive(&socket, &mut bytes, true).unwrap();
        let (message, len) = v2::Message::decode(&bytes[..got.bytes]).unwrap().unwrap();
        assert_eq!(len, got.bytes);
        (message, got.fds)
    };
    let (init, fds) = take();
    let expected = v2::Message::Init { id: 1, max_peers: 2, vectors: 2, protocol: 1, output_bytes: 0x7f000 };
    assert_eq!(init, expected);
    let memory = Mapping::new(&fds[0], 0, 1 << 20, true).unwrap();
    let mut doorbells = Vec::new();
    for (id, vector) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let (message, fds) = take();
        assert_eq!(message, v2::Message::EventFd { id, vector });
        doorbells.push(Doorbell::adopt(fds.into_iter().next().unwrap()).unwrap());
    }
    let Event::Joined { id: 1, doorbells: ours } = events.recv_timeout(TIMEOUT).unwrap() else { panic!() };
    ours[1].ring();
    rung(&doorbells[3]);
    doorbells[0].ring();
    rung(&opened.own[0]);
    memory.view_mut().unwrap().store_u32(layout.state(1).unwrap(), 3, Ordering::Release).unwrap();
    // Any byte that it says gets it disconnected, and its state is cleared.
    rustix::io::write(&socket, &[0]).unwrap();
    assert!(matches!(events.recv_timeout(TIMEOUT), Ok(Event::Left { id: 1 })));
    assert_eq!(memory.view().load_u32(layout.state(1).unwrap(), Ordering::Acquire), Some(0));
    rung(&opened.own[0]);
    assert_eq!(passing::receive(&socket, &mut [0; 8], true).map(|got| got.bytes), Ok(0));
}
