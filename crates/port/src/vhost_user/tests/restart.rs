//! Connections that outlive the process that served them, through the fd store.

use super::*;
use rustix::net::SocketType;
use tombolo_ivshmem::fd_store::{FdStore, serve};
use tombolo_ivshmem::store::Store;
use tombolo_shm::listener::Listener;

/// A fabric's folder with an fd store in a thread.
struct Place {
    folder: PathBuf,
    _first: FdStore,
}

impl Place {
    fn new(name: &str) -> Place {
        let folder = std::env::temp_dir().join(format!("tombolo-vr-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("store");
        let listener = Listener::bind(&path, SocketType::SEQPACKET).unwrap();
        let fd_store = FdStore::connect(&path).unwrap();
        std::thread::spawn(move || serve(listener));
        Place { folder, _first: fd_store }
    }

    /// What a daemon that starts finds, and its ports.
    fn daemon(&self) -> (Arc<Store>, Worker) {
        let path = self.folder.join("store");
        let find = Box::new(move || FdStore::connect(&path).map_err(|e| e.to_string()));
        let store = Arc::new(Store::open(find, Box::new(|text| println!("{text}"))).unwrap());
        let ports = self.folder.join("ports");
        std::fs::create_dir_all(&ports).unwrap();
        let sockets = [Socket::Listen(ports.join("0")), Socket::Listen(ports.join("1"))];
        (store.clone(), Worker::with_store(sockets, 1, ports, Some(store)))
    }

    /// Ends a daemon as a handover or a kill does: nothing is closed, and none of its threads acts
    /// any more.
    fn leave((store, worker): (Arc<Store>, Worker)) {
        std::mem::forget(store.freeze(Duration::from_millis(50)));
        worker.leave.store(true, Ordering::SeqCst);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn frames_go_on_with_the_next_daemon_and_the_frontend_does_not_notice() {
    for (number, features) in [FULL, MODERN].into_iter().enumerate() {
        let place = Place::new(&format!("goes-on{number}"));
        let mut daemon = place.daemon();
        let (mut a, fa) = daemon.1.guest(0, features, 2048);
        let (mut b, fb) = daemon.1.guest(1, MODERN, 2048);
        for round in 0..5u8 {
            talk(&mut a, &mut b);
            Place::leave(daemon);
            // Sent while no daemon runs: it waits in the ring.
            let waiting = frame(700, round);
            a.send(&PLAIN, &waiting, &[]);
            daemon = place.daemon();
            assert_eq!(b.receive().1, waiting);
            talk(&mut a, &mut b);
            // Requests are answered as agreed on with the first daemon.
            assert!(fa.tell(SET_VRING_ENABLE, &state(0, 1), &[]));
            assert!(fb.tell(SET_VRING_CALL, &words(&[0]), &[b.calls[0].as_fd()]));
        }
        // Once more the whole life of a ring.
        for index in [0, 1] {
            assert!(fa.ask(GET_VRING_BASE, &state(index, 0)).is_some());
        }
        a.reboot();
        a.start_rings(&fa, 0);
        talk(&mut a, &mut b);
        let seen = daemon.1.seen.lock().unwrap();
        assert!(seen.faults.iter().all(Vec::is_empty), "{:?}", seen.faults);
    }
}

#[test]
fn a_connection_in_doubt_is_closed_and_comes_back() {
    let place = Place::new("doubt");
    let daemon = place.daemon();
    let (mut a, fa) = daemon.1.guest(0, FULL, 2048);
    let (mut b, _fb) = daemon.1.guest(1, FULL, 2048);
    talk(&mut a, &mut b);
    // A request of which only a part has come when the daemon ends.
    fa.raw(&Frontend::message(SET_VRING_NUM, 1, &state(0, 256))[..15], &[]).unwrap();
    let name = format!("{}vhost-user/0", tombolo_ivshmem::store::PREFIX);
    let path = place.folder.join("store");
    until("the doubt", || {
        let records = FdStore::connect(&path).unwrap().list().unwrap();
        records.iter().any(|record| record.name == name && record.in_doubt)
    });
    Place::leave(daemon);
    let daemon = place.daemon();
    assert!(fa.is_closed());
    let mut again = daemon.1.connect(0);
    // The driver's rings are as they were, and go on.
    a.attach(&mut again, 0);
    talk(&mut a, &mut b);
}

#[test]
fn a_record_that_does_not_fit_is_refused_in_words() {
    let place = Place::new("misfit");
    let daemon = place.daemon();
    let (_a, fa) = daemon.1.guest(0, FULL, 2048);
    let name = format!("{}vhost-user/0", tombolo_ivshmem::store::PREFIX);
    let path = place.folder.join("store");
    let record = || FdStore::connect(&path).unwrap().list().unwrap().into_iter().find(|record| record.name == name);
    // The state after the last message.
    until("the record", || record().is_some_and(|record| !record.in_doubt));
    let mailbox = || {
        let reactor = Reactor::new().unwrap();
        Arc::new(super::super::mailbox::Mailbox::new(reactor.registrar().registration(Token(0))))
    };
    let config = |queue_pairs| VhostUserConfig { socket: Socket::Listen(path.clone()), queue_pairs, mtu: 1500 };
    let read = |record, pairs| super::super::kept::read(record, &config(pairs), mailbox()).err();
    assert_eq!(read(record().unwrap(), 1), None);
    assert!(read(record().unwrap(), 2).unwrap().contains("queue pairs"));
    let len = record().unwrap().bytes.len();
    for cut in 0..len {
        let mut record = record().unwrap();
        record.bytes.truncate(cut);
        assert!(read(record, 1).is_some(), "{cut} of {len} bytes");
    }
    for descriptors in 0..record().unwrap().fds.len() {
        let mut record = record().unwrap();
        record.fds.truncate(descriptors);
        assert!(read(record, 1).unwrap().contains("descriptors"), "{descriptors}");
    }
    let mut other = record().unwrap();
    other.bytes[0] = 2;
    assert!(read(other, 1).unwrap().contains("version 2"));
    let mut foreign = record().unwrap();
    foreign.bytes[16 - 8 + 7] = 0xff;
    assert!(read(foreign, 1).unwrap().contains("features"));
    drop(fa);
}
