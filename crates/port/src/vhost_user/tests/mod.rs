//! The vhost-user port against a scripted frontend: what works, what is refused, and that a
//! frontend, however it behaves, loses only its own port.

mod conformance;
mod frontend;
mod restart;

use super::{Socket, VhostUserConfig, VhostUserPort};
use frontend::*;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tombolo_ivshmem::store::Store;
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::virtio::net::features as net;
use tombolo_ring::virtio::notify::passes;
use tombolo_ring::virtio::split::{RING_INDEX, avail_event};
use tombolo_ring::virtio::{Descriptor, Layout, features as ring};
use tombolo_switch::Nanos;
use tombolo_switch::control::PortSettings;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::Batch;
use tombolo_switch::mac::MacSettings;
use tombolo_switch::port::{Carrier, Fault, FaultKind, Port};
use tombolo_switch::wait::{Token, Waiter};
use tombolo_testing::until;
use tombolo_worker::reactor::{Reactor, Registration};

const MODERN: u64 = ring::VERSION_1 | ring::INDIRECT_DESC;
const FULL: u64 = MODERN
    | ring::EVENT_IDX
    | net::MRG_RXBUF
    | net::CSUM
    | net::GUEST_CSUM
    | net::HOST_TSO4
    | net::GUEST_TSO4
    | net::HOST_TSO6
    | net::GUEST_TSO6;

/// What a worker has seen.
#[derive(Default)]
struct Seen {
    faults: [Vec<Fault>; 2],
    drops: Drops,
    links: Vec<Carrier>,
    sleeps: u64,
}

/// A thread that forwards between two ports as a switch's worker would: drain, arm, look again,
/// sleep.
struct Worker {
    seen: Noted<Seen>,
    stop: Arc<AtomicBool>,
    /// Its ports are handed over to the store and then left as an ended process leaves them.
    leave: Arc<AtomicBool>,
    registration: Registration,
    thread: Option<JoinHandle<()>>,
    folder: PathBuf,
}

impl Worker {
    fn new(name: &str, pairs: u16) -> Worker {
        let folder = std::env::temp_dir().join(format!("tombolo-vu-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self::with_sockets([Socket::Listen(folder.join("0")), Socket::Listen(folder.join("1"))], pairs, folder)
    }

    fn with_sockets(sockets: [Socket; 2], pairs: u16, folder: PathBuf) -> Worker {
        Self::with_store(sockets, pairs, folder, None)
    }

    /// With a store the ports keep their connections there.
    fn with_store(sockets: [Socket; 2], pairs: u16, folder: PathBuf, store: Option<Arc<Store>>) -> Worker {
        let (its, leave) = (store.clone(), Arc::new(AtomicBool::new(false)));
        let leaves = leave.clone();
        let seen = Noted::<Seen>::default();
        let stop = Arc::new(AtomicBool::new(false));
        let (give, registrar) = std::sync::mpsc::channel();
        let (give_ports, take_ports) = std::sync::mpsc::channel::<[VhostUserPort; 2]>();
        let thread = std::thread::spawn({
            let (seen, stop) = (seen.clone(), stop.clone());
            move || {
                // A reactor stays in its thread.
                let mut reactor = Reactor::new().unwrap();
                give.send(reactor.registrar()).unwrap();
                let mut ports = take_ports.recv().unwrap();
                let mut woken = Vec::new();
                while !stop.load(Ordering::SeqCst) {
                    let busy = Self::turn(&mut ports, &seen);
                    if !busy && !Self::each(&mut ports, &seen, |port| port.arm()).contains(&Some(true)) {
                        seen.lock().unwrap().sleeps += 1;
                        woken.clear();
                        reactor.wait(Some(Nanos::SECOND.times(10)), &mut woken);
                    }
                    ports.iter_mut().for_each(|port| port.disarm());
                }
                if let (Some(store), true) = (its, leaves.load(Ordering::SeqCst)) {
                    for (number, port) in ports.iter().enumerate() {
                        let handed = port.hand_over().unwrap();
                        let name = super::Shelf::final_name(&number.to_string());
                        store.put_state(&name, &handed.state, &[handed.fds[0].as_fd()]).unwrap();
                    }
                    std::mem::forget(ports);
                }
            }
        });
        let registrar = registrar.recv().unwrap();
        let mut token = 0;
        let ports = sockets.map(|socket| {
            let registration = registrar.registration(Token(token));
            let shelf = store.clone().map(|store| super::Shelf::new(store, &token.to_string()));
            token += 1;
            let config = VhostUserConfig { socket, queue_pairs: pairs, mtu: 1500 };
            VhostUserPort::open_kept(config, registration, shelf).unwrap()
        });
        give_ports.send(ports).unwrap();
        let registration = registrar.registration(Token(9));
        Worker { seen, stop, leave, registration, thread: Some(thread), folder }
    }

    fn each<T>(
        ports: &mut [VhostUserPort; 2],
        seen: &Noted<Seen>,
        mut call: impl FnMut(&mut VhostUserPort) -> Result<T, Fault>,
    ) -> [Option<T>; 2] {
        let mut index = 0;
        ports.each_mut().map(|port| {
            let result = call(port).map_err(|fault| {
                port.reset(&fault);
                seen.lock().unwrap().faults[index].push(fault);
            });
            index += 1;
            result.ok()
        })
    }

    fn turn(ports: &mut [VhostUserPort; 2], seen: &Noted<Seen>) -> bool {
        Self::each(ports, seen, |port| port.service(Nanos(0)));
        let mut busy = false;
        let mut drops = Drops::default();
        for from in 0..2 {
            let [a, b] = ports;
            let (source, destination) = if from == 0 { (a, b) } else { (b, a) };
            let mut batch = Batch::with_capacity(64);
            let received = source.receive(64, &mut batch, &mut drops);
            let which: Vec<u16> = (0..batch.len() as u16).collect();
            let sent = destination.transmit(&batch, &which, &mut drops).and_then(|_| destination.flush());
            drop(batch);
            let released = received.and_then(|taken| source.release().map(|()| taken));
            busy |= released.as_ref().is_ok_and(|taken| *taken != 0);
            for (index, result) in [(1 - from, sent), (from, released.map(|_| ()))] {
                if let Err(fault) = result {
                    ports[index].reset(&fault);
                    seen.lock().unwrap().faults[index].push(fault);
                }
            }
        }
        let mut seen = seen.lock().unwrap();
        drops.drain(|reason, n| seen.drops.count(reason, n));
        seen.links = ports.iter().map(|port| port.link()).collect();
        busy
    }

    fn path(&self, port: usize) -> PathBuf {
        self.folder.join(port.to_string())
    }

    fn connect(&self, port: usize) -> Frontend {
        Frontend::connect(&self.path(port))
    }

    /// A guest that is attached and has frames flowing.
    fn guest(&self, port: usize, features: u64, buffer_bytes: u32) -> (Guest, Frontend) {
        let guest = Guest::new(features, buffer_bytes);
        let mut frontend = self.connect(port);
        guest.attach(&mut frontend, 0);
        (guest, frontend)
    }

    fn until<T>(&self, what: &str, mut condition: impl FnMut(&Seen) -> Option<T>) -> T {
        let end = Instant::now() + TIMEOUT;
        loop {
            if let Some(value) = condition(&self.seen.lock().unwrap()) {
                return value;
            }
            assert!(Instant::now() < end, "{what} did not happen");
            std::thread::yield_now();
        }
    }

    /// The `number`th fault of a port.
    fn fault(&self, port: usize, number: usize) -> Fault {
        self.until("the fault", |seen| seen.faults[port].get(number).cloned())
    }

    fn dropped(&self, reason: Reason, n: u64) {
        self.until(reason.name(), |seen| (seen.drops.of(reason) >= n).then_some(()));
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.registration.wake();
        let ended = self.thread.take().unwrap().join();
        if self.leave.load(Ordering::SeqCst) {
            return ended.unwrap();
        }
        let left: Vec<_> = std::fs::read_dir(&self.folder).unwrap().flatten().map(|entry| entry.path()).collect();
        let _ = std::fs::remove_dir_all(&self.folder);
        if !std::thread::panicking() {
            ended.unwrap();
            assert!(left.is_empty(), "sockets left behind: {left:?}");
        }
    }
}

/// Frames of some sizes in both directions.
fn talk(a: &mut Guest, b: &mut Guest) {
    for (seed, len) in [60, 64, 115, 116, 117, 1000, 1514].into_iter().enumerate() {
        let there = frame(len, seed as u8);
        a.send(&PLAIN, &there, &[]);
        assert_eq!(b.receive().1, there, "{len} bytes there");
        let back = frame(len, 100 + seed as u8);
        b.send(&PLAIN, &back, &[12]);
        assert_eq!(a.receive().1, back, "{len} bytes back");
    }
}

#[test]
fn frames_go_both_ways_with_every_set_of_features() {
    for (number, features) in
        [MODERN, FULL, MODERN | ring::EVENT_IDX, MODERN | ring::IN_ORDER, FULL | ring::IN_ORDER].into_iter().enumerate()
    {
        let worker = Worker::new(&format!("ways{number}"), 1);
        let (mut a, _fa) = worker.guest(0, features, 2048);
        let (mut b, _fb) = worker.guest(1, MODERN, 2048);
        for _ in 0..40 {
            talk(&mut a, &mut b);
        }
        let seen = worker.seen.lock().unwrap();
        assert_eq!(seen.links, [Carrier::Up; 2]);
        assert!(seen.sleeps > 0, "the worker slept in between, and was woken");
        assert_eq!(seen.drops.total(), 0);
        assert!(seen.faults.iter().all(Vec::is_empty));
    }
}

#[test]
fn a_frame_in_any_pieces_arrives_whole() {
    let worker = Worker::new("pieces", 1);
    let (mut a, _fa) = worker.guest(0, FULL, 2048);
    let (mut b, _fb) = worker.guest(1, FULL, 2048);
    let sent = frame(900, 3);
    for cuts in [&[][..], &[12], &[1, 11], &[5, 20, 1, 1], &[12, 14], &[12, 128, 1], &[300, 300, 300], &[11, 2, 126]] {
        a.send(&PLAIN, &sent, cuts);
        assert_eq!(b.receive().1, sent, "{cuts:?}");
    }
}

#[test]
fn segmented_frames_keep_their_state_over_many_buffers() {
    let worker = Worker::new("tso", 1);
    let (mut a, _fa) = worker.guest(0, FULL, 2048);
    let (mut b, _fb) = worker.guest(1, FULL, 1526);
    let header = [1, 1, 66, 0, 0xa8, 5, 34, 0, 16, 0, 0, 0];
    for len in [3000, 20_000, 65_000] {
        let sent = frame(len, 9);
        a.send(&header, &sent, &[12, 66]);
        let (got_header, got) = b.receive();
        assert_eq!(got, sent, "{len}");
        assert_eq!(got_header[..10], header[..10]);
        let buffers = u16::from_le_bytes([got_header[10], got_header[11]]);
        assert_eq!(usize::from(buffers), (len + 12).div_ceil(1526));
    }
}

#[test]
fn frames_that_cannot_be_taken_are_dropped_for_their_reason() {
    let worker = Worker::new("drops", 1);
    let (mut a, _fa) = worker.guest(0, FULL, 2048);
    // First without a peer; then a guest with small buffers that may not be merged.
    a.send(&PLAIN, &frame(64, 1), &[]);
    worker.dropped(Reason::LinkDown, 1);
    let (mut b, fb) = worker.guest(1, MODERN, 200);
    a.send(&PLAIN, &frame(300, 1), &[]);
    worker.dropped(Reason::SmallBuffer, 1);
    a.send(&PLAIN, &frame(13, 1), &[]);
    a.send(&[0; 5], &[], &[]);
    a.send(&PLAIN, &[], &[]);
    worker.dropped(Reason::Runt, 3);
    a.send(&[1, 0, 0, 0, 0, 0, 90, 0, 16, 0, 0, 0], &frame(64, 1), &[]);
    worker.dropped(Reason::BadOffload, 1);
    a.send(&PLAIN, &vec![1; 70_000], &[]);
    worker.dropped(Reason::TooLong, 1);
    // Still in order, and the buffer that was too small is not lost.
    let sent = frame(100, 5);
    a.send(&PLAIN, &sent, &[]);
    assert_eq!(b.receive().1, sent);
    // A ring that is disabled: its frames go nowhere.
    assert!(fb.tell(SET_VRING_ENABLE, &state(1, 0), &[]));
    b.send(&PLAIN, &sent, &[]);
    worker.dropped(Reason::Disabled, 1);
    assert!(fb.tell(SET_VRING_ENABLE, &state(0, 0), &[]));
    a.send(&PLAIN, &sent, &[]);
    worker.dropped(Reason::LinkDown, 2);
    assert!(fb.tell(SET_VRING_ENABLE, &state(0, 1), &[]));
    assert!(fb.tell(SET_VRING_ENABLE, &state(1, 1), &[]));
    b.send(&PLAIN, &sent, &[]);
    assert_eq!(a.receive().1, sent);
    // A guest without buffers.
    b.buffer_bytes = 0;
    for number in 0..u32::from(RING_SIZE) + 6 {
        a.send(&PLAIN, &frame(64, number as u8), &[]);
        worker.until("the frame", |seen| {
            (seen.drops.of(Reason::NoBuffer) > 0 || a.rings[1].take_used().unwrap().is_some()).then_some(())
        });
    }
    worker.dropped(Reason::NoBuffer, 1);
}

#[test]
fn a_guest_reboots_on_the_same_connection() {
    let worker = Worker::new("reboot", 1);
    let (mut a, fa) = worker.guest(0, FULL, 2048);
    let (mut b, _fb) = worker.guest(1, FULL, 2048);
    for _ in 0..3 {
        talk(&mut a, &mut b);
        for index in [0, 1] {
            let base = fa.ask(GET_VRING_BASE, &state(index, 0)).unwrap();
            let base = u32::from_le_bytes(base[4..].try_into().unwrap());
            assert!(base > 0, "ring {index} stopped at {base}");
        }
        assert_eq!(worker.until("the link", |seen| seen.links.first().copied()), Carrier::Down);
        a.reboot();
        a.start_rings(&fa, 0);
    }
    talk(&mut a, &mut b);
    assert!(worker.seen.lock().unwrap().faults.iter().all(Vec::is_empty));
}

#[test]
fn a_frontend_dies_and_another_takes_its_place() {
    let worker = Worker::new("death", 1);
    let (mut b, _fb) = worker.guest(1, FULL, 2048);
    for _ in 0..5 {
        let (mut a, fa) = worker.guest(0, FULL, 2048);
        talk(&mut a, &mut b);
        drop(fa);
    }
    assert!(worker.seen.lock().unwrap().faults.iter().all(Vec::is_empty), "to go is no fault");
}

#[test]
fn the_backend_restarts_under_a_live_guest() {
    // Neither a frontend that remembers the right base, nor one that is ahead or behind, loses the
    // guest's frames.
    for (number, base) in [0u32, 7, 1000].into_iter().enumerate() {
        let name = format!("restart{number}");
        let worker = Worker::new(&name, 1);
        let (mut a, mut fa) = worker.guest(0, FULL, 2048);
        let (mut b, mut fb) = worker.guest(1, FULL, 2048);
        talk(&mut a, &mut b);
        drop(worker);
        assert!(fa.is_closed() && fb.is_closed());
        // Sent while no frontend is connected.
        let sent = frame(333, 1);
        a.send(&PLAIN, &sent, &[]);
        let worker = Worker::new(&name, 1);
        (fa, fb) = (worker.connect(0), worker.connect(1));
        b.attach(&mut fb, base);
        a.attach(&mut fa, base);
        assert_eq!(b.receive().1, sent);
        talk(&mut a, &mut b);
        assert!(worker.seen.lock().unwrap().faults.iter().all(Vec::is_empty));
    }
}

#[test]
fn we_connect_where_the_frontend_listens() {
    let folder = std::env::temp_dir().join(format!("tombolo-vu-{}-client", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let listen = |port: &str| UnixListener::bind(folder.join(port)).unwrap();
    // The second one listens only after the port was opened.
    let first = listen("0");
    let sockets = ["0", "1"].map(|port| Socket::Connect(folder.join(port)));
    let worker = Worker::with_sockets(sockets, 1, folder.clone());
    let second = listen("1");
    let (mut a, mut b) = (Guest::new(FULL, 2048), Guest::new(FULL, 2048));
    for base in [0, 14] {
        let mut frontends = [&first, &second].map(|listener| Frontend::new(listener.accept().unwrap().0));
        a.attach(&mut frontends[0], base);
        b.attach(&mut frontends[1], base);
        talk(&mut a, &mut b);
    }
    for port in ["0", "1"] {
        std::fs::remove_file(folder.join(port)).unwrap();
    }
    drop(worker);
}

#[test]
fn memory_comes_and_goes_in_slots_while_rings_run() {
    let worker = Worker::new("slots", 1);
    let (mut b, _fb) = worker.guest(1, FULL, 2048);
    let mut a = Guest::new(FULL, 2048);
    let mut fa = worker.connect(0);
    fa.negotiate(FULL);
    assert!(fa.ask_u64(GET_MAX_MEM_SLOTS).unwrap() >= 8);
    assert_eq!(fa.ask_u64(GET_QUEUE_NUM), Some(1));
    let slot = |region: &[u8]| [words(&[0]), region.to_vec()].concat();
    assert!(fa.tell(ADD_MEM_REG, &slot(&a.region()), &[a.file.as_fd()]));
    a.start_rings(&fa, 0);
    talk(&mut a, &mut b);
    let other = words(&[0, 4096, 0x1000, 0]);
    assert!(fa.tell(ADD_MEM_REG, &slot(&other), &[a.file.as_fd()]));
    talk(&mut a, &mut b);
    assert!(fa.tell(REM_MEM_REG, &slot(&other), &[]));
    talk(&mut a, &mut b);
    // QEMU 7.2 says everything once for each queue pair.
    assert!(fa.tell(REM_MEM_REG, &slot(&other), &[]), "removed twice");
    assert!(fa.tell(ADD_MEM_REG, &slot(&a.region()), &[a.file.as_fd()]), "added twice");
    let again = a.file.try_clone().unwrap();
    assert!(fa.tell(ADD_MEM_REG, &slot(&a.region()), &[again.as_fd()]), "by another descriptor");
    talk(&mut a, &mut b);
    assert!(worker.seen.lock().unwrap().faults.iter().all(Vec::is_empty));
    // Other memory at the same place is no repetition.
    let bytes = tombolo_shm::memory::sealed_region("other", frontend::MEMORY_BYTES).unwrap();
    assert!(!fa.tell(ADD_MEM_REG, &slot(&a.region()), &[bytes.as_fd()]));
    assert_eq!(worker.fault(0, 0).kind, FaultKind::Protocol);
}

/// User-mode Linux 6.1: a table of fixed length with unused entries, and pipes instead of call
/// eventfds.
#[test]
fn user_mode_linux_is_taken() {
    let worker = Worker::new("uml", 1);
    let (mut b, _fb) = worker.guest(1, FULL, 2048);
    let mut a = Guest::new(FULL, 2048);
    let mut fa = worker.connect(0);
    fa.negotiate(FULL);
    let table = [words(&[1]), a.region().to_vec(), vec![0; 7 * 32]].concat();
    assert!(fa.tell(SET_MEM_TABLE, &table, &[a.file.as_fd()]));
    a.start_rings(&fa, 0);
    let pipes = [0u64, 1].map(|ring| {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert!(fa.tell(SET_VRING_CALL, &words(&[ring]), &[writer.as_fd()]));
        reader
    });
    talk(&mut a, &mut b);
    for pipe in &pipes {
        let mut bytes = [0; 8];
        assert_eq!(rustix::io::read(pipe, &mut bytes), Ok(8), "the call is a pipe's");
    }
    // A kick from a pipe would keep the worker's epoll at the peer's request.
    let (kick, _writer) = rustix::pipe::pipe().unwrap();
    assert!(!fa.tell(SET_VRING_KICK, &words(&[0]), &[kick.as_fd()]));
    assert!(worker.fault(0, 0).detail.contains("expected an eventfd"));
}

/// A descriptor whose `close` blocks, with a message that has none: the port goes on, and lets
/// itself be removed.
#[test]
fn a_descriptor_whose_close_blocks_holds_nothing_up() {
    let worker = Worker::new("close", 1);
    let (slow, peer) = lingering();
    let fa = worker.connect(0);
    assert!(fa.raw(&Frontend::message(GET_FEATURES, 1, &[]), &[slow.as_fd()]).is_ok());
    drop(slow);
    assert!(fa.is_closed());
    assert!(worker.fault(0, 0).detail.contains("expected no descriptor"));
    let mut fa = worker.connect(0);
    fa.negotiate(FULL);
    drop(worker);
    drop(peer);
}

/// A socket whose `close` waits for a peer that does not read, for a minute; and the peer.
fn lingering() -> (std::net::TcpStream, std::net::TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let slow = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let peer = listener.accept().unwrap().0;
    slow.set_nonblocking(true).unwrap();
    while std::io::Write::write(&mut &slow, &[0; 1 << 16]).is_ok() {}
    slow.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&slow, Some(Duration::from_secs(60))).unwrap();
    (slow, peer)
}

/// QEMU 7.2's network device enables rings first, and acknowledges no protocol features in
/// SET_FEATURES.
#[test]
fn the_order_of_qemu_is_taken() {
    let worker = Worker::new("qemu", 1);
    let (mut b, _fb) = worker.guest(1, FULL, 2048);
    let mut a = Guest::new(FULL, 2048);
    let fa = worker.connect(0);
    fa.ask_u64(GET_FEATURES).unwrap();
    assert!(fa.tell(SET_PROTOCOL_FEATURES, &words(&[1 | 1 << 4]), &[]));
    assert!(fa.tell(NET_SET_MTU, &words(&[1500]), &[]));
    assert!(fa.tell(SET_OWNER, &[], &[]));
    for index in [0, 1] {
        assert!(fa.tell(SET_VRING_ENABLE, &state(index, 1), &[]));
    }
    assert!(fa.tell(SET_FEATURES, &words(&[FULL]), &[]));
    assert!(fa.tell(SET_MEM_TABLE, &a.mem_table(), &[a.file.as_fd()]));
    a.start_rings(&fa, 0);
    worker.until("the link", |seen| (seen.links == [Carrier::Up; 2]).then_some(()));
    talk(&mut a, &mut b);
}

/// A frontend that changes the call descriptor late, as QEMU does, hears at once: what came in
/// between went to the old one.
#[test]
fn a_new_call_descriptor_is_rung() {
    let worker = Worker::new("call", 1);
    let (mut b, fb) = worker.guest(1, FULL, 2048);
    let (mut a, _fa) = worker.guest(0, FULL, 2048);
    talk(&mut a, &mut b);
    assert!(!b.rings[0].arm().unwrap());
    // The signal for this frame goes to a descriptor that is no longer watched.
    let sent = frame(80, 1);
    let old = std::mem::replace(&mut b.calls[0], tombolo_shm::doorbell::Doorbell::new().unwrap());
    a.send(&PLAIN, &sent, &[]);
    let end = Instant::now() + TIMEOUT;
    while !old.take() {
        assert!(Instant::now() < end, "the frame is not signalled");
        std::thread::yield_now();
    }
    assert!(fb.tell(SET_VRING_CALL, &words(&[0]), &[b.calls[0].as_fd()]));
    assert!(b.calls[0].take(), "the new descriptor is rung");
    assert_eq!(b.receive().1, sent);
    talk(&mut a, &mut b);
}

#[test]
fn a_driver_that_takes_no_mtu_is_hinted_at() {
    let taken = tombolo_ring::virtio::net::features::MTU;
    let hint = super::mtu_hint(9000, FULL & !taken).unwrap();
    assert!(hint.contains("MTU of 9000") && hint.contains("ip link set eth0 mtu 9000"), "{hint}");
    assert!(super::mtu_hint(1400, FULL & !taken).is_some());
    assert_eq!(super::mtu_hint(9000, FULL | taken), None);
    assert_eq!(super::mtu_hint(1500, FULL & !taken), None, "what Ethernet has needs no taking");
}

#[test]
fn an_mtu_beyond_the_networks_is_refused_and_no_fault() {
    let worker = Worker::new("mtu", 1);
    let (_a, fa) = worker.guest(0, FULL, 2048);
    assert!(fa.tell(NET_SET_MTU, &words(&[1500]), &[]));
    assert!(!fa.tell(NET_SET_MTU, &words(&[1501]), &[]));
    assert!(!fa.tell(NET_SET_MTU, &words(&[u64::MAX]), &[]));
    assert!(fa.tell(NET_SET_MTU, &words(&[68]), &[]));
}

#[test]
fn several_queue_pairs_are_served() {
    let worker = Worker::new("pairs", 4);
    let (mut b, _fb) = worker.guest(1, FULL, 2048);
    let mut fa = worker.connect(0);
    let mut a = Guest::new(FULL | net::MQ | net::CTRL_VQ, 2048);
    fa.negotiate(a.features);
    assert_eq!(fa.ask_u64(GET_QUEUE_NUM), Some(4));
    assert!(fa.tell(SET_MEM_TABLE, &a.mem_table(), &[a.file.as_fd()]));
    a.start_rings(&fa, 0);
    talk(&mut a, &mut b);
    // A second pair with rings that have nothing in them, enabled for the guest's receive side:
    // half of the flows go there, find no buffer, and are counted.
    let extra = Guest::vring_addr(4);
    for index in [4u32, 5] {
        assert!(fa.tell(SET_VRING_NUM, &state(index, 8), &[]));
        let mut address = extra.clone();
        address[0] = index as u8;
        assert!(fa.tell(SET_VRING_ADDR, &address, &[]));
        assert!(fa.tell(SET_VRING_KICK, &words(&[u64::from(index)]), &[a.kicks[0].as_fd()]));
        assert!(fa.tell(SET_VRING_ENABLE, &state(index, 1), &[]));
    }
    let mut got = 0;
    for flow in 0..32 {
        let mut bytes = frame(64, flow);
        bytes[5] = flow;
        b.send(&PLAIN, &bytes, &[]);
        // Either it arrives or it is counted.
        worker.until("the frame's fate", |_| b.rings[1].take_used().unwrap().map(|_| ()));
    }
    let lost = || worker.seen.lock().unwrap().drops.of(Reason::NoBuffer);
    until("each frame to arrive or to be counted", || {
        got += u64::from(a.receive_within(Duration::from_millis(50)).is_some());
        got + lost() == 32
    });
    let lost = lost();
    assert!(got > 0 && lost > 0, "{got} to the first pair, {lost} to the second");
}

/// After any `attack` on port 0 (it gets port 1's guest, port 0's guest and its frontend), port 0's
/// connection ends, the fault is of `kind` and says `word`. Port 1's guest and port 0's next one go
/// on exchanging frames.
fn survive(name: &str, kind: FaultKind, word: &str, attack: impl FnOnce(&mut Guest, &mut Guest, &mut Frontend)) {
    let worker = Worker::new(name, 1);
    let (mut b, _fb) = worker.guest(1, FULL, 2048);
    let (mut a, mut fa) = worker.guest(0, FULL, 2048);
    talk(&mut a, &mut b);
    attack(&mut b, &mut a, &mut fa);
    let fault = worker.fault(0, 0);
    assert!(fault.kind == kind && fault.detail.contains(word), "{name}: {fault:?}");
    assert!(fa.is_closed(), "{name}: the connection is closed");
    let (mut c, _fc) = worker.guest(0, FULL, 2048);
    talk(&mut c, &mut b);
    let seen = worker.seen.lock().unwrap();
    assert_eq!(seen.faults[0].len(), 1, "{name}: {:?}", seen.faults[0]);
    assert!(seen.faults[1].is_empty(), "{name}: the neighbour noticed");
}

#[test]
fn bad_messages_cost_the_connection_and_nothing_else() {
    let protocol = FaultKind::Protocol;
    survive("garbage", protocol, "message", |_, _, f| f.raw(&[0xff; 64], &[]).unwrap());
    survive("zeros", protocol, "message", |_, _, f| f.raw(&[0; 12], &[]).unwrap());
    survive("huge-size", protocol, "message", |_, _, f| {
        let mut bytes = Frontend::message(SET_OWNER, 1, &[]);
        bytes[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        f.raw(&bytes, &[]).unwrap();
    });
    survive("half-header", protocol, "message", |_, _, f| {
        f.raw(&[1, 0, 0], &[]).unwrap();
        f.stream.shutdown(std::net::Shutdown::Write).unwrap();
    });
    survive("half-message", protocol, "message", |_, _, f| {
        let bytes = Frontend::message(SET_VRING_NUM, 1, &state(0, 64));
        f.raw(&bytes[..16], &[]).unwrap();
        f.stream.shutdown(std::net::Shutdown::Write).unwrap();
    });
    survive("no-such-ring", protocol, "ring 77", |_, _, f| assert!(!f.tell(SET_VRING_NUM, &state(77, 64), &[])));
    survive("no-such-request", protocol, "message", |_, _, f| {
        f.raw(&Frontend::message(9999, 1, &[]), &[]).unwrap();
    });
    survive("not-offered", protocol, "not offered", |_, _, f| assert!(!f.tell(SET_FEATURES, &words(&[1 << 34]), &[])));
    survive("enable-2", protocol, "expected 0 or 1", |_, _, f| assert!(!f.tell(SET_VRING_ENABLE, &state(0, 2), &[])));
    survive("enable-77", protocol, "ring 77", |_, _, f| assert!(!f.tell(SET_VRING_ENABLE, &state(77, 1), &[])));
    survive("enable-long", protocol, "expected 8 bytes", |_, _, f| {
        assert!(!f.tell(SET_VRING_ENABLE, &[0; 64], &[]));
    });
    survive("enable-half", protocol, "message", |_, _, f| {
        f.raw(&Frontend::message(SET_VRING_ENABLE, 1, &state(0, 1))[..15], &[]).unwrap();
        f.stream.shutdown(std::net::Shutdown::Write).unwrap();
    });
    survive("no-kick", protocol, "runs", |_, _, f| assert!(!f.tell(SET_VRING_KICK, &words(&[0x101]), &[])));
    survive("too-few-fds", protocol, "message", |_, g, f| {
        let table = [words(&[2]), g.region(), words(&[0, 4096, 0x1000, 0])].concat();
        assert!(!f.tell(SET_MEM_TABLE, &table, &[g.file.as_fd()]));
    });
    survive("no-fd", protocol, "message", |_, g, f| assert!(!f.tell(SET_MEM_TABLE, &g.mem_table(), &[])));
    survive("fds-where-none-belong", protocol, "message", |_, g, f| {
        assert!(!f.tell(SET_VRING_NUM, &state(0, 64), &[g.file.as_fd(); 3]));
    });
}

#[test]
fn impossible_memory_costs_the_connection_and_nothing_else() {
    let protocol = FaultKind::Protocol;
    let table = |regions: &[[u64; 4]]| {
        regions.iter().fold(words(&[regions.len() as u64]), |table, region| [table, words(region)].concat())
    };
    let attack = |name: &str, word: &str, regions: &[[u64; 4]]| {
        survive(name, protocol, word, |_, g, f| {
            assert!(!f.tell(SET_MEM_TABLE, &table(regions), &vec![g.file.as_fd(); regions.len()]));
        });
    };
    attack("beyond-file", "were to be mapped", &[[0, MEMORY_BYTES + 4096, 0, 0]]);
    attack("offset-beyond", "were to be mapped", &[[0, 4096, 0, MEMORY_BYTES]]);
    attack("huge", "bytes", &[[0, 1 << 50, 0, 0]]);
    attack("overlap-guest", "overlaps", &[[0, 8192, 0, 0], [4096, 4096, 1 << 40, 0]]);
    attack("overlap-frontend", "overlaps", &[[0, 8192, 0, 0], [1 << 40, 4096, 4096, 0]]);
    attack("wraps", "", &[[u64::MAX - 4095, 8192, 0, 0]]);
    attack("empty", "", &[[0, 0, 0, 0]]);
    // Rings that are in no region any more: they cannot go on.
    attack("rings-gone", "no memory region", &[[GUEST_BASE, MEMORY_BYTES, 0x1000, 0]]);
    survive("a-file-of-procfs", protocol, "expected a memfd", |_, _, f| {
        let region = words(&[1, GUEST_BASE, 4096, FRONTEND_BASE, 0]);
        let file = std::fs::File::open("/proc/self/maps").unwrap();
        assert!(!f.tell(SET_MEM_TABLE, &region, &[file.as_fd()]));
    });
    survive("a-file-as-call", protocol, "call descriptor", |_, g, f| {
        assert!(!f.tell(SET_VRING_CALL, &words(&[0]), &[g.file.as_fd()]));
    });
    survive("a-file-as-kick", protocol, "kick descriptor", |_, g, f| {
        f.ask(GET_VRING_BASE, &state(0, 0)).unwrap();
        assert!(!f.tell(SET_VRING_KICK, &words(&[0]), &[g.file.as_fd()]));
    });
    survive("not-a-file", protocol, "expected a memfd", |_, g, f| {
        let region = words(&[1, GUEST_BASE, 4096, FRONTEND_BASE, 0]);
        assert!(!f.tell(SET_MEM_TABLE, &region, &[g.kicks[0].as_fd()]));
    });
}

#[test]
fn rings_do_not_change_while_they_run() {
    let protocol = FaultKind::Protocol;
    survive("resize", protocol, "the size of ring 0", |_, _, f| assert!(!f.tell(SET_VRING_NUM, &state(0, 32), &[])));
    survive("move", protocol, "the address of ring 1", |_, _, f| {
        let mut address = Guest::vring_addr(0);
        address[0] = 1;
        assert!(!f.tell(SET_VRING_ADDR, &address, &[]));
    });
    survive("rebase", protocol, "the base of ring 1", |_, _, f| assert!(!f.tell(SET_VRING_BASE, &state(1, 3), &[])));
    survive("features", protocol, "features were changed", |_, _, f| {
        assert!(!f.tell(SET_FEATURES, &words(&[MODERN | 1 << 30]), &[]));
    });
    // A size that cannot be, refused when it is said and not when the ring starts.
    for size in [0, 3, 65_535, 65_536, 1 << 31, u32::MAX] {
        survive(&format!("size-{size}"), protocol, &format!("the size of ring 0: queue size {size} "), |_, _, f| {
            f.ask(GET_VRING_BASE, &state(0, 0)).unwrap();
            assert!(!f.tell(SET_VRING_NUM, &state(0, size), &[]));
        });
    }
    // No size at all.
    let worker = Worker::new("size-none", 1);
    let guest = Guest::new(MODERN, 2048);
    let mut frontend = worker.connect(0);
    frontend.negotiate(MODERN);
    assert!(frontend.tell(SET_MEM_TABLE, &guest.mem_table(), &[guest.file.as_fd()]));
    assert!(frontend.tell(SET_VRING_ADDR, &Guest::vring_addr(0), &[]));
    assert!(!frontend.tell(SET_VRING_KICK, &words(&[0]), &[guest.kicks[0].as_fd()]));
    assert_eq!(worker.fault(0, 0).kind, protocol);
    survive("base-65536", protocol, "beyond 65535", |_, _, f| {
        f.ask(GET_VRING_BASE, &state(0, 0)).unwrap();
        assert!(!f.tell(SET_VRING_BASE, &state(0, 65536), &[]));
    });
}

#[test]
fn a_guest_that_breaks_its_ring_loses_its_port_and_nothing_else() {
    let ring = FaultKind::Ring;
    // All descriptors of the ring are made the same, and one chain more is published.
    let poison = |guest: &Guest, descriptor: Descriptor, ahead: u16| {
        let table = guest.view(1 << 16, 4096);
        for index in 0..RING_SIZE {
            descriptor.write(table, index).unwrap();
        }
        let avail = guest.view((1 << 16) + 4096, 518);
        let index = avail.as_foreign().load_u16(2, Ordering::Relaxed).unwrap();
        avail.store_u16(2, index.wrapping_add(ahead), Ordering::Release).unwrap();
        guest.kicks[1].ring();
    };
    let good = Descriptor { address: GUEST_BASE, len: 100, flags: 0, next: 0 };
    survive("loop", ring, "ring 1: chain", |_, g, _| poison(g, Descriptor { flags: 1, ..good }, 1));
    survive("jump", ring, "available index jumped", |_, g, _| poison(g, good, 1000));
    survive("outside", ring, "not inside one", |_, g, _| poison(g, Descriptor { address: 0x1234, ..good }, 1));
    survive("wraps", ring, "not inside one", |_, g, _| poison(g, Descriptor { address: u64::MAX - 9, ..good }, 1));
    survive("write-only", ring, "write-only", |_, g, _| poison(g, Descriptor { flags: 2, ..good }, 1));
    survive("no-bytes", ring, "has no bytes", |_, g, _| poison(g, Descriptor { len: 0, ..good }, 1));
    survive("table", ring, "indirect table", |_, g, _| poison(g, Descriptor { flags: 4, ..good }, 1));
    survive("read-only", ring, "ring 0: chain", |neighbour, guest, _| {
        let table = guest.view(0, 4096);
        for index in 0..RING_SIZE {
            good.write(table, index).unwrap();
        }
        // The neighbour's next frame finds them.
        neighbour.send(&PLAIN, &frame(64, 1), &[]);
    });
}

#[test]
fn memory_that_is_taken_away_costs_its_port_and_nothing_else() {
    survive("truncated", FaultKind::Memory, "gone", |_, guest, _| {
        rustix::fs::ftruncate(&guest.file, 0).unwrap();
        guest.kicks[1].ring();
    });
}

#[test]
fn a_socket_in_use_is_refused_and_a_stale_one_taken_over() {
    let worker = Worker::new("stale", 1);
    let reactor = Reactor::new().unwrap();
    let open = |path: PathBuf| {
        let config = VhostUserConfig { socket: Socket::Listen(path), queue_pairs: 1, mtu: 1500 };
        VhostUserPort::open(config, reactor.registrar().registration(Token(0)))
    };
    assert!(open(worker.path(0)).is_err());
    let path = worker.folder.join("stale");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(open(path.clone()).unwrap());
    assert!(!path.exists());
}

/// A guest as QEMU before 8.1 makes it of one with one CPU: its read of the port's request
/// overtakes its publishing of a frame. Here it always does, and the frame becomes visible only
/// when the port has gone to sleep, so it is not announced. A store leaves a processor's buffer in
/// far less than the port's second look takes to come; a test's thread may be held up for longer,
/// and then announces its frame like a guest that is in order.
#[test]
fn a_guest_whose_fences_do_nothing_never_stalls() {
    const FRAMES: u16 = 100;
    let folder = std::env::temp_dir().join(format!("tombolo-vu-{}-fences", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let thread = tombolo_worker::thread::WorkerThread::start(&tombolo_worker::thread::WorkerConfig::default()).unwrap();
    let network = thread.handle().add_network("net", MacSettings::default()).unwrap();
    let reserved = thread.handle().reserve().unwrap();
    let socket = Socket::Listen(folder.join("0"));
    let config = VhostUserConfig { socket, queue_pairs: 1, mtu: 1500 };
    let port = Box::new(VhostUserPort::open(config, thread.registration(&reserved)).unwrap());
    let counters = thread.handle().add_port(reserved, network, "guest", port, PortSettings::default()).unwrap();

    let mut guest = Guest::new(MODERN | ring::EVENT_IDX, 2048);
    let mut frontend = Frontend::connect(&folder.join("0"));
    guest.attach(&mut frontend, 0);
    // The first frame makes the descriptor; every available entry names it, since a fresh ring is
    // zero.
    guest.send(&PLAIN, &frame(60, 1), &[]);
    let layout = Layout::new(RING_SIZE);
    let word = |offset: usize| guest.view((1 << 16) + offset as u64, 2);
    let available = word(layout.available + RING_INDEX);
    let (used, request) = (word(layout.used + RING_INDEX), word(layout.used + avail_event(RING_SIZE)));
    let read = |word: &ForeignMut<'_>| word.as_foreign().load_u16(0, Ordering::Acquire).unwrap();
    for index in 1..FRAMES {
        // Of a sleep before this one.
        let seen = index - 1;
        let end = Instant::now() + Duration::from_secs(60);
        while !(read(&used) == index && read(&request) == index) {
            assert!(Instant::now() < end, "the port does not take frame {index} and sleep");
            std::hint::spin_loop();
        }
        available.store_u16(0, index + 1, Ordering::Release).unwrap();
        assert!(!passes(seen, index, index + 1), "by what the guest has read the port is awake");
        let end = Instant::now() + Duration::from_millis(50);
        while read(&used) != index + 1 && Instant::now() < end {
            std::hint::spin_loop();
        }
        if read(&used) != index + 1 {
            guest.kicks[1].ring();
        }
    }
    let late = counters.late_wakeups.get();
    assert!(late > u64::from(FRAMES) / 10, "{late} of {FRAMES} frames were found by the second look");
    thread.stop().unwrap();
    let _ = std::fs::remove_dir_all(&folder);
}

/// Each guest that has had traffic is looked at once more after its port went to sleep, and then no
/// more.
#[test]
fn idle_guests_cost_less_than_one_percent_of_a_core() {
    const GUESTS: usize = 128;
    let folder = std::env::temp_dir().join(format!("tombolo-vu-{}-idle", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let thread = tombolo_worker::thread::WorkerThread::start(&tombolo_worker::thread::WorkerConfig::default()).unwrap();
    let network = thread.handle().add_network("net", MacSettings::default()).unwrap();
    let mut guests: Vec<(Guest, Frontend)> = (0..GUESTS)
        .map(|number| {
            let path = folder.join(number.to_string());
            let reserved = thread.handle().reserve().unwrap();
            let config = VhostUserConfig { socket: Socket::Listen(path.clone()), queue_pairs: 1, mtu: 1500 };
            let port = Box::new(VhostUserPort::open(config, thread.registration(&reserved)).unwrap());
            thread.handle().add_port(reserved, network, "guest", port, PortSettings::default()).unwrap();
            let guest = Guest::new(MODERN | ring::EVENT_IDX, 2048);
            let mut frontend = Frontend::connect(&path);
            guest.attach(&mut frontend, 0);
            (guest, frontend)
        })
        .collect();
    // A broadcast, so that each port has something to look at once more.
    guests[0].0.send(&PLAIN, &[&[0xff; 6][..], &[2, 0, 0, 0, 0, 1, 0x88, 0xb5], &[0; 46]].concat(), &[]);
    for (guest, _) in &mut guests[1..] {
        guest.receive();
    }
    let span = Duration::from_secs(1);
    until("an idle second", || {
        let before = thread.cpu_time().expect("schedstat");
        std::thread::sleep(span); // the second that is measured
        thread.cpu_time().unwrap() - before < span / 100
    });
    drop(guests);
    thread.stop().unwrap();
    let _ = std::fs::remove_dir_all(&folder);
}
