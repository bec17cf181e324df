//! The port under the suite that all attachments pass, with and without doorbells; and against
//! peers that break each rule.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, OwnedFd};
use tombolo_ivshmem::end::EventDoorbells;
use tombolo_ivshmem::peer::{NetPeer, SendError};
use tombolo_ring::ivshmem::region::Layout;
use tombolo_ring::ivshmem::state::Offloads;
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::memory::{Mapping, sealed_region};
use tombolo_switch::drop::Reason;
use tombolo_switch::frame::Offload;
use tombolo_switch::port::{FaultKind, Port};

use super::*;
use crate::conformance::{Abilities, Fixture, Violation, frame};
use crate::pair::OwnedFrame;

const BYTES: u64 = 1 << 20;

fn map(region: &OwnedFd) -> Mapping {
    Mapping::new(region, 0, BYTES, true).unwrap()
}

fn doorbells(count: usize) -> Vec<Doorbell> {
    (0..count).map(|_| Doorbell::new().unwrap()).collect()
}

fn duplicates(doorbells: &[Doorbell]) -> EventDoorbells {
    let fds = doorbells.iter().map(|doorbell| doorbell.as_fd().try_clone_to_owned().unwrap());
    EventDoorbells::adopt(fds).unwrap()
}

/// Rings the port, until it is muted.
struct Muffled(EventDoorbells, Arc<AtomicBool>);

impl PeerDoorbells for Muffled {
    fn ring(&self, peer: u32, vector: u16) {
        if !self.1.load(Ordering::Relaxed) {
            self.0.ring(peer, vector);
        }
    }
}

/// The parts of the end `own_id` of a default link in `region`.
fn parts(region: &OwnedFd, own_id: u32, vectors: u32, doorbells: Vec<Doorbell>) -> LinkEnd {
    LinkEnd {
        memory: map(region).into(),
        layout: Layout::default_network(),
        own_id,
        peer_id: 1 - own_id,
        vectors,
        doorbells,
        peer_doorbells: None,
        peer_present: false,
        owns_region: own_id == 0,
        mtu: 1500,
        offloads: Offloads::None,
    }
}

/// A peer, and a thread that follows the port's state as a guest's driver does by its interrupts.
struct Driven {
    peer: Arc<Mutex<Option<NetPeer>>>,
    region: OwnedFd,
    /// The peer's doorbells.
    rung: Vec<Doorbell>,
    /// Has the peer ring no more.
    mute: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Driven {
    fn new(peer: NetPeer, region: &OwnedFd, rung: Vec<OwnedFd>, mute: Arc<AtomicBool>) -> Driven {
        let region = region.try_clone().unwrap();
        let peer = Arc::new(Mutex::new(Some(peer)));
        let own = rung.iter().map(|fd| Doorbell::adopt(fd.try_clone().unwrap()).unwrap()).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (peer, stop) = (peer.clone(), stop.clone());
            std::thread::spawn(move || {
                let tick = Timespec::try_from(Duration::from_millis(1)).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    if let Some(peer) = &mut *peer.lock().unwrap_or_else(PoisonError::into_inner) {
                        peer.step();
                    }
                    let mut fds: Vec<_> = rung.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
                    let _ = poll(&mut fds, Some(&tick));
                }
            })
        };
        Driven { peer, region, rung: own, mute, stop, thread: Some(thread) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<NetPeer>> {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
        // As one that is killed: it rings no peer, and its word stays as it is.
        self.mute.store(true, Ordering::Relaxed);
        let (memory, at) = (map(&self.region), Layout::default_network().state(1).unwrap());
        let word = memory.view().load_u32(at, Ordering::Relaxed).unwrap();
        if self.lock().take().is_some() {
            memory.view_mut().unwrap().store_u32(at, word, Ordering::Release).unwrap();
        }
    }
}

/// `VECTORS` doorbells at each end; none: both poll. With `OFFLOADS` they are agreed on, and the
/// fixture puts the headers before the peer's frames.
struct LinkFixture<const VECTORS: usize, const OFFLOADS: bool = false> {
    region: OwnedFd,
    handle: Handle,
    /// What the port listens to.
    port_doorbells: Vec<Doorbell>,
    driven: Option<Driven>,
    buffer: Vec<u8>,
}

impl<const VECTORS: usize, const OFFLOADS: bool> LinkFixture<VECTORS, OFFLOADS> {
    fn parts(region: &OwnedFd, own_id: u32, doorbells: Vec<Doorbell>) -> LinkEnd {
        let offloads = match (OFFLOADS, own_id) {
            (false, _) => Offloads::None,
            (true, 0) => Offloads::Offered,
            (true, _) => Offloads::Taken,
        };
        LinkEnd { offloads, ..parts(region, own_id, VECTORS as u32, doorbells) }
    }

    fn peer<T>(&mut self, call: impl FnOnce(&mut NetPeer) -> T) -> T {
        call(self.driven.as_ref().expect("a peer is there").lock().as_mut().expect("it lives"))
    }
}

impl<const VECTORS: usize, const OFFLOADS: bool> Fixture for LinkFixture<VECTORS, OFFLOADS> {
    const KIND: &'static str = "ivshmem";

    fn make(registration: Registration) -> (Box<dyn Port>, Self) {
        let region = sealed_region("link", BYTES).unwrap();
        let port_doorbells = doorbells(VECTORS);
        let listened = port_doorbells.iter().map(|b| Doorbell::adopt(b.as_fd().try_clone_to_owned().unwrap()).unwrap());
        let (port, handle) =
            Ivshmem::new(Self::parts(&region, 0, listened.collect()), PollSettings::default(), registration).unwrap();
        let mut fixture = LinkFixture { region, handle, port_doorbells, driven: None, buffer: Vec::new() };
        fixture.connect();
        (Box::new(port), fixture)
    }

    fn abilities(&self) -> Abilities {
        Abilities { frame_bytes: (14, 1518), offload: OFFLOADS, back_pressure: true, window: 200 }
    }

    fn polled(&self) -> bool {
        VECTORS == 0
    }

    fn inject(&mut self, bytes: &[u8], offload: Offload) -> bool {
        let bytes = if OFFLOADS { [&offload.to_vnet(), bytes].concat() } else { bytes.to_vec() };
        self.peer(|peer| match peer.send(&bytes) {
            Ok(()) => {
                peer.flush();
                true
            }
            Err(SendError::Full | SendError::Down { .. }) => false,
            Err(error) => panic!("{error}"),
        })
    }

    fn collect(&mut self) -> Option<OwnedFrame> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let frame = self.peer(|peer| peer.receive(&mut buffer, <[u8]>::to_vec));
        self.buffer = buffer;
        frame.map(|mut bytes| {
            if !OFFLOADS {
                return OwnedFrame { bytes, offload: Offload::NONE };
            }
            let header: Vec<u8> = bytes.drain(..OFFLOAD_HEADER_BYTES).collect();
            let offload = Offload::from_vnet(header.as_slice().try_into().unwrap(), bytes.len()).unwrap();
            OwnedFrame { bytes, offload }
        })
    }

    fn loses_wakeups(&self) -> bool {
        VECTORS != 0
    }

    fn inject_silently(&mut self, bytes: &[u8]) {
        let header: &[u8] = if OFFLOADS { &[0; OFFLOAD_HEADER_BYTES] } else { &[] };
        let bytes = [header, bytes].concat();
        let mute = self.driven.as_ref().expect("a peer is there").mute.clone();
        self.peer(|peer| {
            peer.send(&bytes).unwrap();
            mute.store(true, Ordering::Relaxed);
            peer.flush();
            mute.store(false, Ordering::Relaxed);
        });
    }

    fn ask_for_signals(&mut self) {
        self.peer(NetPeer::arm);
    }

    fn was_signalled(&mut self) -> bool {
        self.driven.as_ref().is_some_and(|driven| driven.rung.iter().fold(false, |any, doorbell| doorbell.take() | any))
    }

    fn disconnect(&mut self) {
        self.driven = None;
        self.handle.peer_left();
    }

    fn connect(&mut self) {
        let own = doorbells(VECTORS);
        let rung = own.iter().map(|doorbell| doorbell.as_fd().try_clone_to_owned().unwrap()).collect();
        let for_port = (VECTORS != 0).then(|| Box::new(duplicates(&own)) as Box<dyn PeerDoorbells>);
        let mute = Arc::new(AtomicBool::new(false));
        let mut parts = Self::parts(&self.region, 1, own);
        parts.peer_present = true;
        parts.peer_doorbells = (VECTORS != 0)
            .then(|| Box::new(Muffled(duplicates(&self.port_doorbells), mute.clone())) as Box<dyn PeerDoorbells>);
        let peer = NetPeer::new(parts).unwrap();
        self.driven = Some(Driven::new(peer, &self.region, rung, mute));
        self.handle.peer_joined(for_port);
    }

    fn send_runt(&mut self) -> Violation {
        assert!(self.inject(&frame(0, 13), Offload::NONE));
        Violation::Dropped(Reason::Runt)
    }

    fn send_over_long(&mut self) -> Violation {
        assert!(self.inject(&frame(0, 70_000), Offload::NONE));
        Violation::Dropped(Reason::TooLong)
    }

    fn send_bad_offload(&mut self) -> Violation {
        if !OFFLOADS {
            return Violation::Impossible("frames carry no offload state");
        }
        // A checksum beyond the frame's end.
        let header = [1, 0, 0, 0, 0, 0, 0xff, 0xff, 16, 0];
        self.peer(|peer| {
            peer.send(&[&header[..], &frame(0, 60)].concat()).unwrap();
            peer.flush();
        });
        Violation::Dropped(Reason::BadOffload)
    }

    fn break_protocol(&mut self) -> Violation {
        let memory = map(&self.region);
        let index = Layout::default_network().output(1).unwrap().start + 2048 * 16 + 2;
        memory.view_mut().unwrap().store_u16(index, 40_000, Ordering::Release).unwrap();
        if let Some(doorbell) = self.port_doorbells.last() {
            doorbell.ring();
        }
        Violation::Faulted(FaultKind::Ring)
    }

    fn spoil_transmit(&mut self) -> Violation {
        Violation::Impossible("what the peer returned is looked at before the first frame")
    }
}

mod with_two_vectors {
    crate::conformance_suite!(super::LinkFixture<2>);
}

mod with_one_vector {
    crate::conformance_suite!(super::LinkFixture<1>);
}

mod with_offloads {
    crate::conformance_suite!(super::LinkFixture<2, true>);
}

mod polled {
    crate::conformance_suite!(super::LinkFixture<0>);
}

// --- peers that break each rule ---

use crate::conformance::{Rig, plain};
use std::cell::RefCell;
use std::rc::Rc;
use tombolo_ring::ivshmem::net::Geometry;
use tombolo_switch::port::Carrier;
use tombolo_switch::wait::Token;
use tombolo_worker::reactor::Reactor;

/// A value of the port's status.
fn detail(port: &dyn Port, name: &str) -> String {
    port.details().into_iter().find(|(n, _)| *n == name).expect("it says that").1.to_string()
}

fn count(port: &dyn Port, name: &str) -> u64 {
    detail(port, name).parse().unwrap()
}

impl<const VECTORS: usize> LinkFixture<VECTORS> {
    fn state_word(&self, value: u32) {
        let word = Layout::default_network().state(1).unwrap();
        map(&self.region).view_mut().unwrap().store_u32(word, value, Ordering::Release).unwrap();
        self.port_doorbells.iter().for_each(Doorbell::ring);
    }

    /// The peer's driver stops following, as one that is in an attacker's hands.
    fn freeze(&mut self) -> NetPeer {
        let driven = self.driven.take().unwrap();
        let peer = driven.lock().take().unwrap();
        drop(driven);
        peer
    }
}

#[test]
fn a_state_word_of_any_value_costs_only_the_link() {
    let mut rig = Rig::<LinkFixture<2>>::up();
    let _frozen = rig.peer.freeze();
    for value in [4u32, 5, 0xff, 0x100, 0x1_0003, 1 << 31, u32::MAX] {
        let before = count(&*rig.port, "resets_peer_word");
        rig.peer.state_word(value);
        rig.until("the link goes down", |rig| rig.seen == Some(Carrier::Down));
        assert_eq!(count(&*rig.port, "resets_peer_word"), before + 1, "{value:#x}");
        assert_eq!(detail(&*rig.port, "peer_state"), format!("{value:#x}"));
        assert_eq!(rig.send(&plain(0, [60])), 0);
        assert_eq!(detail(&*rig.port, "own_state"), "reset");
        // One that then goes its way again is followed.
        for word in [0, 1, 2, 3] {
            rig.peer.state_word(word);
            rig.service();
        }
        assert_eq!(rig.seen, Some(Carrier::Up), "{value:#x}");
    }
    // Back to INIT without RESET.
    rig.peer.state_word(1);
    rig.service();
    assert_eq!((rig.seen, count(&*rig.port, "resets_peer_skipped")), (Some(Carrier::Down), 1));
    // Stuck in RUN: held until it follows.
    let mut rig = Rig::<LinkFixture<2>>::up();
    let _other = rig.peer.freeze();
    rig.port.reset(&Fault { kind: FaultKind::Ring, detail: "the test resets it".into() });
    for _ in 0..100 {
        rig.peer.state_word(3);
        rig.service();
        assert_eq!((rig.seen, detail(&*rig.port, "own_state")), (Some(Carrier::Down), "reset".into()));
    }
    assert!(rig.faults.is_empty());
}

/// A killed machine leaves its state word in RUN. On a link without a server that watches peers the
/// word stays so until the next machine comes up and begins with RESET.
#[test]
fn a_peer_that_was_killed_is_replaced_with_its_word_still_in_run() {
    let mut rig = Rig::<LinkFixture<0>>::up();
    rig.receive_all(&plain(0, [60]));
    for _ in 0..10 {
        rig.peer.driven = None;
        rig.send(&plain(1, [60, 60]));
        // No notification from either side.
        let mut parts = parts(&rig.peer.region, 1, 0, Vec::new());
        parts.peer_present = true;
        let peer = NetPeer::new(parts).unwrap();
        rig.peer.driven = Some(Driven::new(peer, &rig.peer.region, Vec::new(), Arc::default()));
        let resets = count(&*rig.port, "resets_peer_reset");
        rig.until("its coming is seen", |rig| count(&*rig.port, "resets_peer_reset") > resets);
        rig.until("the link comes up", |rig| rig.seen == Some(Carrier::Up));
        rig.received.clear();
        let mut stale = Vec::new();
        rig.drain(&mut stale);
        assert!(stale.is_empty(), "{} frames for its predecessor", stale.len());
        rig.receive_all(&plain(2, [60, 1514]));
        rig.deliver(&plain(2, [60, 1514]));
    }
}

/// The port is re-created over a region in which both ran: the old state belongs to neither.
#[test]
fn a_port_that_is_made_anew_meets_the_peer_again() {
    let mut rig = Rig::<LinkFixture<2>>::up();
    rig.receive_all(&plain(0, [60]));
    for _ in 0..5 {
        let listened = rig.peer.port_doorbells.iter().map(|b| Doorbell::adopt(b.as_fd().try_clone_to_owned().unwrap()));
        let mut parts = parts(&rig.peer.region, 0, 2, listened.map(Result::unwrap).collect());
        parts.peer_present = true;
        // It asks for no doorbells: what rang the peer before is lost, and it follows by looking.
        let registration = rig.port_registration();
        let (port, handle) = Ivshmem::new(parts, PollSettings::default(), registration).unwrap();
        rig.peer.handle = handle;
        rig.port = Box::new(port);
        rig.until("the link comes up", |rig| rig.seen == Some(Carrier::Up));
        rig.received.clear();
        rig.receive_all(&plain(2, [60, 1514]));
        rig.deliver(&plain(2, [60, 1514]));
    }
}

#[test]
fn a_peer_that_rings_without_end_is_not_listened_to_and_others_go_on() {
    let reactor = Rc::new(RefCell::new(Reactor::new().unwrap()));
    let mut bad = Rig::<LinkFixture<2>>::up_in(&reactor, Token(1));
    let mut good = Rig::<LinkFixture<2>>::up_in(&reactor, Token(2));
    let mut rings = 0u32;
    while count(&*bad.port, "ring_storms") == 0 {
        rings += 1;
        assert!(rings < 100_000, "it is never seen");
        bad.peer.port_doorbells[(rings % 2) as usize].ring();
        bad.turn(16);
    }
    assert!(detail(&*bad.port, "woken_by").contains("held"), "{:?}", bad.port.details());
    // Its rings wake no thread now.
    bad.turn(16);
    bad.wakeups = 0;
    for _ in 0..100 {
        bad.peer.port_doorbells[0].ring();
        assert!(!bad.sleep(Duration::ZERO));
    }
    let frames = plain(0, [60, 1514, 300]);
    good.received.clear();
    for frame in &frames {
        assert!(good.peer.inject(&frame.bytes, Offload::NONE));
    }
    good.until("the other port goes on", |rig| rig.received.len() == frames.len());
    // Its own frames are late, not lost; and when it is quiet, it is listened to again.
    for frame in &frames {
        assert!(bad.peer.inject(&frame.bytes, Offload::NONE));
    }
    bad.until("held frames come by the timer", |rig| rig.received.len() == frames.len());
    bad.until("it is listened to again", |rig| !detail(&*rig.port, "woken_by").contains("held"));
    bad.settle();
    assert!(bad.peer.inject(&frames[0].bytes, Offload::NONE));
    bad.until_woken("its doorbell wakes", |rig| rig.received.len() == frames.len() + 1);
    assert!(bad.faults.is_empty() && good.faults.is_empty());
}

#[test]
fn a_peer_that_never_takes_frames_loses_only_its_own() {
    let mut rig = Rig::<LinkFixture<2>>::up();
    let _frozen = rig.peer.freeze();
    for round in 0..50 {
        rig.send(&plain(round * 64, vec![1400; 64]));
    }
    assert!(rig.tx_drops.of(Reason::NoBuffer) > 2000, "{:?}", rig.tx_drops);
    assert_eq!(rig.tx_drops.total(), rig.tx_drops.of(Reason::NoBuffer));
    let fill = rig.port.fill().unwrap();
    assert!((290..2048).contains(&fill.frames_out), "{fill:?}: frames of 1400 bytes are out");
    assert!(fill.frames_out <= fill.frames_out_max && fill.bytes_out <= fill.bytes_out_max, "{fill:?}");
    assert!(fill.bytes_out >= 1400 * fill.frames_out && fill.frames_waiting_max > 0, "{fill:?}");
    assert!(rig.faults.is_empty());
}

/// Each word of its section that the port reads, while frames flow both ways.
#[test]
fn a_peer_that_writes_any_word_of_its_rings_is_reset_with_the_word_named() {
    let geometry = Geometry::new(0x7f000).unwrap();
    let section = Layout::default_network().output(1).unwrap().start;
    let avail = section + geometry.available_offset() as usize;
    let used = section + geometry.used_offset() as usize;
    let cases: [(&str, usize, u16); 6] = [
        ("available index", avail + 2, 9000),
        ("available entry", avail + 4, 2048),
        ("flags", section + 12, 1),
        ("data area", section, 1),
        ("used index", used + 2, 500),
        ("used entry", used + 4, 77),
    ];
    for (name, at, value) in cases {
        let mut rig = Rig::<LinkFixture<2>>::up();
        let mut frozen = rig.peer.freeze();
        frozen.send(&[9; 60]).unwrap();
        rig.send(&plain(0, [60]));
        frozen.receive(&mut Vec::new(), |_| ());
        map(&rig.peer.region).view_mut().unwrap().store_u16(at, value, Ordering::Release).unwrap();
        frozen.flush();
        if name == "available index" {
            // The flush wrote a good one.
            map(&rig.peer.region).view_mut().unwrap().store_u16(at, value, Ordering::Release).unwrap();
        }
        rig.receive(16);
        rig.send(&plain(1, [60]));
        assert_eq!(rig.faults.len(), 1, "{name}");
        let Fault { kind, detail: text } = &rig.faults[0];
        assert!(*kind == FaultKind::Ring && text.starts_with("peer 1: ") && text.contains(name), "{name}: {text}");
        assert_eq!((rig.port.link(), count(&*rig.port, "resets_fault")), (Carrier::Down, 1));
    }
}

#[test]
fn parts_that_do_not_fit_are_refused_by_name() {
    let reactor = Reactor::new().unwrap();
    let region = sealed_region("link", BYTES).unwrap();
    let refused = |change: &dyn Fn(&mut LinkEnd)| {
        let mut parts = parts(&region, 0, 0, Vec::new());
        change(&mut parts);
        match Ivshmem::new(parts, PollSettings::default(), reactor.registrar().registration(Token(1))) {
            Err(OpenError::End(error)) => error,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("it was taken"),
        }
    };
    assert!(matches!(refused(&|p| p.layout.output_bytes += 4096), EndError::Region(_)));
    assert!(matches!(refused(&|p| p.layout.output_bytes = 1 << 33), EndError::Region(_) | EndError::Net(_)));
    assert!(matches!(refused(&|p| p.own_id = 1), EndError::Peers { own: 1, peer: 1, max_peers: 2 }));
    assert!(matches!(refused(&|p| p.own_id = 2), EndError::Peers { own: 2, .. }));
    assert!(matches!(refused(&|p| p.peer_id = u32::MAX), EndError::Peers { .. }));
    let read_only = || Mapping::new(&region, 0, BYTES, false).unwrap();
    assert_eq!(refused(&|p| p.memory = read_only().into()), EndError::ReadOnly);
}

/// A region of somebody else's whose file shrinks: a fault once, and then quiet.
#[test]
fn a_region_whose_pages_go_is_one_fault() {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    let reactor = Reactor::new().unwrap();
    let region = memfd_create("shrinks", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&region, BYTES).unwrap();
    let mut parts = parts(&region, 0, 0, Vec::new());
    parts.memory = tombolo_shm::guest::GuestMapping::new(&region, 0, BYTES).unwrap().into();
    parts.peer_present = true;
    let registration = reactor.registrar().registration(Token(1));
    let (mut port, _handle) = Ivshmem::new(parts, PollSettings::default(), registration).unwrap();
    port.service(Nanos(1)).unwrap();
    ftruncate(&region, 4096).unwrap();
    let fault = port.service(Nanos(2)).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Memory);
    port.reset(&fault);
    for at in 3..10 {
        assert!(port.service(Nanos(at)).is_ok());
        assert_eq!(port.link(), Carrier::Down);
    }
}

#[test]
fn a_peer_that_resets_while_the_port_holds_its_frames_is_no_fault() {
    let mut rig = Rig::<LinkFixture<2>>::up();
    for round in 0..20 {
        for frame in plain(round * 100, [60, 1514, 300, 60]) {
            assert!(rig.peer.inject(&frame.bytes, Offload::NONE));
        }
        rig.receive(3);
        rig.transmit(&plain(round * 100 + 50, [60, 1514]));
        // Its driver goes to RESET, waits for us to follow, and clears its section: here it does
        // not wait.
        let peer = rig.peer.driven.as_ref().unwrap();
        peer.lock().as_mut().unwrap().restart();
        let section = Layout::default_network().output(1).unwrap();
        map(&rig.peer.region).view_mut().unwrap().skip(section.start).take(60_000).write_from(&[0; 60_000]);
        rig.release();
        let _ = rig.port.flush();
        rig.receive(16);
        rig.send(&plain(round * 100 + 60, [60]));
        rig.until("the link comes up again", |rig| rig.seen == Some(Carrier::Up));
        rig.settle();
        rig.received.clear();
        let mut stale = Vec::new();
        rig.drain(&mut stale);
        rig.receive_all(&plain(round * 100 + 70, [60, 1514]));
        rig.deliver(&plain(round * 100 + 70, [60, 1514]));
    }
    assert!(rig.faults.is_empty(), "{:?}", rig.faults);
    assert!(count(&*rig.port, "resets_peer_reset") >= 10, "{:?}", rig.port.details());
}

/// A ring about a state is lost on its way: the link comes up all the same.
#[test]
fn a_lost_ring_does_not_leave_both_waiting() {
    let reactor = Reactor::new().unwrap();
    let region = sealed_region("link", BYTES).unwrap();
    let mut ours = parts(&region, 0, 2, doorbells(2));
    ours.peer_present = true;
    let registration = reactor.registrar().registration(Token(1));
    let (mut port, _handle) = Ivshmem::new(ours, PollSettings::default(), registration).unwrap();
    let mut theirs = parts(&region, 1, 2, Vec::new());
    theirs.peer_present = true;
    // It cannot ring, and it is not rung.
    let mut peer = NetPeer::new(theirs).unwrap();
    let (mut now, mut looks) = (Nanos(0), 0);
    while port.link() != Carrier::Up {
        let next = port.service(now).unwrap();
        peer.step();
        (now, looks) = (next.unwrap_or(now), looks + 1);
        assert!(
            port.link() == Carrier::Up || next.is_some_and(|next| looks < 10 && next > Nanos(0)),
            "nobody looks again"
        );
    }
    assert!(now <= Nanos::SECOND, "{now:?}");
}

/// QEMU drops the ring for the first frame of a guest that has not been told of us yet. The port
/// sleeps by then and its second look is over.
#[test]
fn a_lost_first_ring_is_made_up_for() {
    fn silent(rig: &mut Rig<LinkFixture<2>>, number: u32) {
        rig.settle();
        let _ = (rig.port.recheck().unwrap(), rig.port.take_recheck());
        let before = rig.received.len();
        rig.peer.inject_silently(&plain(number, [60])[0].bytes);
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while rig.received.len() == before {
            assert!(rig.sleeps_and_looks(), "frame {number}: no look although nothing rang");
            assert!(std::time::Instant::now() < end, "frame {number}: the looks do not find it");
            rig.turn(16);
            rig.arm();
        }
    }
    for wait in [Duration::ZERO, Duration::from_secs(1)] {
        let mut rig = Rig::<LinkFixture<2>>::up();
        let end = std::time::Instant::now() + wait;
        rig.until("the port has looked in vain for a while", |_| std::time::Instant::now() >= end);
        // The next frame's ring may get lost, too: what was found has it look often again.
        for number in 0..3 {
            let began = std::time::Instant::now();
            silent(&mut rig, number);
            let waited = began.elapsed();
            // The pauses have grown to more than that in a second.
            assert!(number == 0 || waited < Duration::from_secs(1), "frame {number} was found after {waited:?}");
        }
        // And so may the first ones of the next peer, however often this one has rung.
        for number in 3..7 {
            rig.receive_all(&plain(number, [60]));
            rig.settle();
        }
        rig.peer.disconnect();
        rig.until("the link goes down", |rig| rig.seen == Some(Carrier::Down));
        rig.peer.connect();
        rig.until("the link comes up again", |rig| rig.seen == Some(Carrier::Up));
        silent(&mut rig, 7);
    }
}

#[test]
fn long_frames_go_where_the_section_has_room_for_them() {
    let reactor = Reactor::new().unwrap();
    let region = sealed_region("link", 1 << 24).unwrap();
    let layout = Layout::v1(1 << 24, 0, 2).unwrap();
    let long = |own_id: u32, mtu: u32| LinkEnd {
        memory: Mapping::new(&region, 0, 1 << 24, true).unwrap().into(),
        layout,
        peer_present: true,
        mtu,
        ..parts(&sealed_region("unused", BYTES).unwrap(), own_id, 0, Vec::new())
    };
    let registration = reactor.registrar().registration(Token(1));
    let (mut port, _handle) = Ivshmem::new(long(0, 65_000), PollSettings::default(), registration).unwrap();
    let mut peer = NetPeer::new(long(1, 65_000)).unwrap();
    while !peer.step() || port.link() != Carrier::Up {
        port.service(Nanos(1)).unwrap();
    }
    assert_eq!(port.caps().max_frame_bytes, 65_018);
    let wanted = [frame(1, 65_018), frame(2, 9018), frame(3, 60)];
    for frame in &wanted {
        peer.send(frame).unwrap();
    }
    peer.flush();
    let (mut batch, mut drops) = (tombolo_switch::frame::Batch::with_capacity(4), Drops::default());
    assert_eq!(port.receive(8, &mut batch, &mut drops), Ok(3));
    for (got, want) in batch.frames().iter().zip(&wanted) {
        let mut bytes = Vec::new();
        batch.append_to(got, &mut bytes);
        assert!(bytes == *want);
    }
    drop(batch);
    port.release().unwrap();
    // A small section bounds the MTU: a quarter of its data area.
    let region = sealed_region("small", 1 << 15).unwrap();
    let layout = Layout::v1(1 << 15, 0, 2).unwrap();
    let small = LinkEnd {
        memory: Mapping::new(&region, 0, 1 << 15, true).unwrap().into(),
        layout,
        ..parts(&sealed_region("unused", BYTES).unwrap(), 0, 0, Vec::new())
    };
    let registration = reactor.registrar().registration(Token(2));
    let (port, _handle) = Ivshmem::new(LinkEnd { mtu: 9000, ..small }, PollSettings::default(), registration).unwrap();
    let geometry = Geometry::new(layout.output_bytes).unwrap();
    assert_eq!(port.caps().max_frame_bytes, geometry.max_mtu() + 18);
    assert!(geometry.max_mtu() < 9000);
}
