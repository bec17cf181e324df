//! The port under the suite that all attachments pass, with and without doorbells; and against peers that break each rule.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, OwnedFd};
use tombolo_ring::ivshmem::region::Layout;
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::memory::{Mapping, sealed_region};
use tombolo_switch::drop::Reason;
use tombolo_switch::frame::Offload;
use tombolo_switch::port::{FaultKind, Port};

use super::peer::{NetPeer, SendError};
use super::*;
use crate::conformance::{Abilities, Fixture, Misdeed, frame};
use crate::pair::OwnedFrame;

const BYTES: u64 = 1 << 20;

fn map(region: &OwnedFd) -> Mapping {
    Mapping::new(region, 0, BYTES, true).unwrap()
}

fn bells(count: usize) -> Vec<Doorbell> {
    (0..count).map(|_| Doorbell::new().unwrap()).collect()
}

fn duplicates(bells: &[Doorbell]) -> Box<dyn Bells> {
    let fds = bells.iter().map(|bell| bell.as_fd().try_clone_to_owned().unwrap());
    Box::new(EventBells::adopt(fds).unwrap())
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
        bells: None,
        peer_present: false,
        owns_region: own_id == 0,
        mtu: 1500,
    }
}

/// A peer, and a thread that follows the port's state as a guest's driver does by its interrupts.
struct Driven {
    peer: Arc<Mutex<Option<NetPeer>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Driven {
    fn new(peer: NetPeer, rung: Vec<OwnedFd>) -> Driven {
        let peer = Arc::new(Mutex::new(Some(peer)));
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
        Driven { peer, stop, thread: Some(thread) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<NetPeer>> {
        self.peer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
        if let Some(peer) = self.lock().take() {
            peer.die();
        }
    }
}

/// `VECTORS` doorbells at each end; none: both poll.
struct LinkFixture<const VECTORS: usize> {
    region: OwnedFd,
    handle: Handle,
    /// What the port listens to.
    port_bells: Vec<Doorbell>,
    driven: Option<Driven>,
    buffer: Vec<u8>,
}

impl<const VECTORS: usize> LinkFixture<VECTORS> {
    fn peer<T>(&mut self, call: impl FnOnce(&mut NetPeer) -> T) -> T {
        call(self.driven.as_ref().expect("a peer is there").lock().as_mut().expect("it lives"))
    }
}

impl<const VECTORS: usize> Fixture for LinkFixture<VECTORS> {
    const KIND: &'static str = "ivshmem";

    fn make(registration: Registration) -> (Box<dyn Port>, Self) {
        let region = sealed_region("link", BYTES).unwrap();
        let port_bells = bells(VECTORS);
        let listened = port_bells.iter().map(|b| Doorbell::adopt(b.as_fd().try_clone_to_owned().unwrap()).unwrap());
        let parts = parts(&region, 0, VECTORS as u32, listened.collect());
        let (port, handle) = Ivshmem::new(parts, PollSettings::default(), registration).unwrap();
        let mut fixture = LinkFixture { region, handle, port_bells, driven: None, buffer: Vec::new() };
        fixture.connect();
        (Box::new(port), fixture)
    }

    fn abilities(&self) -> Abilities {
        Abilities { frame_bytes: (14, 1518), offload: false, back_pressure: true, window: 200 }
    }

    fn polled(&self) -> bool {
        VECTORS == 0
    }

    fn inject(&mut self, bytes: &[u8], _: Offload) -> bool {
        self.peer(|peer| match peer.send(bytes) {
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
        frame.map(|bytes| OwnedFrame { bytes, offload: Offload::NONE })
    }

    fn disconnect(&mut self) {
        self.driven = None;
        self.handle.peer_left();
    }

    fn connect(&mut self) {
        let own = bells(VECTORS);
        let rung = own.iter().map(|bell| bell.as_fd().try_clone_to_owned().unwrap()).collect();
        let for_port = (VECTORS != 0).then(|| duplicates(&own));
        let mut parts = parts(&self.region, 1, VECTORS as u32, own);
        parts.peer_present = true;
        parts.bells = (VECTORS != 0).then(|| duplicates(&self.port_bells));
        let peer = NetPeer::new(parts).unwrap();
        self.driven = Some(Driven::new(peer, rung));
        self.handle.peer_joined(for_port);
    }

    fn send_runt(&mut self) -> Misdeed {
        assert!(self.inject(&frame(0, 13), Offload::NONE));
        Misdeed::Dropped(Reason::Runt)
    }

    fn send_over_long(&mut self) -> Misdeed {
        assert!(self.inject(&frame(0, 70_000), Offload::NONE));
        Misdeed::Dropped(Reason::TooLong)
    }

    fn send_bad_offload(&mut self) -> Misdeed {
        Misdeed::Impossible("frames carry no offload state")
    }

    fn break_protocol(&mut self) -> Misdeed {
        let memory = map(&self.region);
        let index = Layout::default_network().output(1).unwrap().start + 2048 * 16 + 2;
        memory.view_mut().unwrap().store_u16(index, 40_000, Ordering::Release).unwrap();
        if let Some(bell) = self.port_bells.last() {
            bell.ring();
        }
        Misdeed::Faulted(FaultKind::Ring)
    }
}

mod with_two_vectors {
    crate::conformance_suite!(super::LinkFixture<2>);
}

mod with_one_vector {
    crate::conformance_suite!(super::LinkFixture<1>);
}

mod polled {
    crate::conformance_suite!(super::LinkFixture<0>);
}
