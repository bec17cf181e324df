//! An attachment to something in the same process: two bounded queues of frames with their offload
//! state.
//!
//! One end is a [`PairPort`], the other a [`PairPeer`]: a plain handle with `send` and `receive`,
//! for tests and for anything that lives in the fabric's own process. It is not a fast path: the
//! queue owns the frames, so each is copied once on the way in and once on the way out.
//!
//! Invariants:
//! * A queue holds at most `capacity` frames; a frame that the port received counts until
//!   [`Port::release`], as a slot of a ring would.
//! * The peer sees transmitted frames at [`Port::flush`], not before.
//! * Nothing blocks: a full queue refuses ([`PairPeer::send`]) or drops as `no_buffer` (towards the
//!   peer).
//! * The peer's end may go and another may come ([`PairConnector::connect`]); the content of the
//!   queues is gone then.
//!
//! Threads: the port belongs to its worker, the peer to its holder. There is a mutex per pair, held
//! for a push or a pop of one batch.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tombolo_ring::mem::Foreign;
use tombolo_shm::doorbell::Doorbell;
use tombolo_switch::Nanos;
use tombolo_switch::detail::Details;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, ETHERNET_HEADER_BYTES, MAX_FRAME_BYTES, Offload};
use tombolo_switch::port::{Caps, Carrier, Fault, Port, Sent};
use tombolo_worker::reactor::Registration;

/// What a pair is made of.
#[derive(Clone, Copy, Debug)]
pub struct PairConfig {
    /// Frames that each direction holds.
    pub capacity: usize,
    /// What the peer takes.
    pub caps: Caps,
}

impl Default for PairConfig {
    fn default() -> Self {
        PairConfig { capacity: 256, caps: Caps::full(1500) }
    }
}

/// A frame with its offload state, as a peer in this process sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnedFrame {
    /// The frame from its Ethernet header on.
    pub bytes: Vec<u8>,
    /// What of checksum and segmentation is still to be done.
    pub offload: Offload,
}

/// Why the peer could not send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The port does not keep up: its queue holds as many frames as it may.
    #[error("the port's queue is full; wait until it has taken frames")]
    Full,
    /// The port is gone, or another peer has taken the place.
    #[error("the port is gone, or has another peer now")]
    Closed,
    /// No frame can have that many bytes.
    #[error("a frame of {0} bytes: 1 to {MAX_FRAME_BYTES} are expected")]
    Length(usize),
}

#[derive(Default)]
struct PairState {
    /// Counts peers; a handle of an earlier one finds itself closed.
    generation: u64,
    connected: bool,
    port_gone: bool,
    to_port: VecDeque<OwnedFrame>,
    /// Frames that the port has received and not released.
    with_port: usize,
    to_peer: VecDeque<OwnedFrame>,
    /// The port sleeps: the next frame wakes it.
    port_armed: bool,
    /// The peer waits on its doorbell: the next flush rings it.
    peer_armed: bool,
    /// Buffers that carried a frame and can carry the next.
    spare: Vec<Vec<u8>>,
}

struct PairInner {
    state: Mutex<PairState>,
    registration: Registration,
    doorbell: Doorbell,
    capacity: usize,
}

impl PairInner {
    fn lock(&self) -> MutexGuard<'_, PairState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end that the switch uses.
pub struct PairPort {
    shared: Arc<PairInner>,
    caps: Caps,
    /// Frames handed out by `receive`, until `release`.
    taken: Vec<OwnedFrame>,
    /// Frames transmitted, until `flush`.
    staged: Vec<OwnedFrame>,
    /// Buffers that are free again.
    spare: Vec<Vec<u8>>,
}

/// Makes peers for a [`PairPort`], one at a time.
#[derive(Clone)]
pub struct PairConnector(Arc<PairInner>);

/// The end that a test or an in-process member uses.
pub struct PairPeer {
    shared: Arc<PairInner>,
    generation: u64,
}

/// A port with a peer on it.
///
/// # Errors
/// The kernel's, where no descriptor is left.
pub fn pair(config: PairConfig, registration: Registration) -> Result<(PairPort, PairPeer), Errno> {
    let (port, connector) = PairPort::new(config, registration)?;
    Ok((port, connector.connect()))
}

impl PairPort {
    /// A port without a peer, and what makes peers for it.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn new(config: PairConfig, registration: Registration) -> Result<(PairPort, PairConnector), Errno> {
        let (doorbell, capacity) = (Doorbell::new()?, config.capacity.max(1));
        let shared = Arc::new(PairInner { state: Mutex::default(), registration, doorbell, capacity });
        let connector = PairConnector(shared.clone());
        let (taken, staged, spare) = (Vec::new(), Vec::new(), Vec::new());
        Ok((PairPort { shared, caps: config.caps, taken, staged, spare }, connector))
    }

    /// Keeps buffers of ordinary frames for the next ones; those of segmented frames are too large
    /// to hoard.
    fn keep(&mut self, mut bytes: Vec<u8>) {
        if bytes.capacity() <= 4096 && self.spare.len() < self.shared.capacity {
            bytes.clear();
            self.spare.push(bytes);
        }
    }
}

impl PairConnector {
    /// Takes the place of the peer. A peer that was there finds itself closed.
    pub fn connect(&self) -> PairPeer {
        let mut state = self.0.lock();
        state.generation += 1;
        state.connected = !state.port_gone;
        state.to_port.clear();
        state.to_peer.clear();
        state.peer_armed = false;
        let generation = state.generation;
        drop(state);
        self.0.doorbell.take();
        self.0.registration.wake();
        PairPeer { shared: self.0.clone(), generation }
    }
}

impl PairPeer {
    /// Sends a frame to the port.
    ///
    /// # Errors
    /// [`SendError`]; the frame was not taken.
    pub fn send(&self, bytes: &[u8], offload: Offload) -> Result<(), SendError> {
        if bytes.is_empty() || bytes.len() > MAX_FRAME_BYTES {
            return Err(SendError::Length(bytes.len()));
        }
        let mut state = self.shared.lock();
        if state.generation != self.generation || !state.connected {
            return Err(SendError::Closed);
        }
        if state.to_port.len() + state.with_port >= self.shared.capacity {
            return Err(SendError::Full);
        }
        let mut buffer = state.spare.pop().unwrap_or_default();
        buffer.extend_from_slice(bytes);
        state.to_port.push_back(OwnedFrame { bytes: buffer, offload });
        if std::mem::take(&mut state.port_armed) {
            drop(state);
            self.shared.registration.wake();
        }
        Ok(())
    }

    /// The next frame from the port, if there is one.
    pub fn receive(&self) -> Option<OwnedFrame> {
        let mut state = self.shared.lock();
        if state.generation == self.generation { state.to_peer.pop_front() } else { None }
    }

    /// The next frame from the port; waits for it up to `timeout`.
    pub fn receive_timeout(&self, timeout: Duration) -> Option<OwnedFrame> {
        let end = Instant::now() + timeout;
        loop {
            self.shared.lock().peer_armed = true;
            if let Some(frame) = self.receive() {
                return Some(frame);
            }
            let left = Timespec::try_from(end.checked_duration_since(Instant::now())?).ok()?;
            // An interrupted wait looks again.
            let _ = poll(&mut [PollFd::new(&self.shared.doorbell, PollFlags::IN)], Some(&left));
            self.shared.doorbell.take();
        }
    }

    /// Whether the port is there and this is its peer.
    pub fn is_connected(&self) -> bool {
        let state = self.shared.lock();
        state.generation == self.generation && state.connected
    }
}

impl AsFd for PairPeer {
    /// Readable after frames came; only once [`PairPeer::receive_timeout`] has armed it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.doorbell.as_fd()
    }
}

impl Drop for PairPeer {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        if state.generation == self.generation {
            state.connected = false;
            drop(state);
            self.shared.registration.wake();
        }
    }
}

impl Drop for PairPort {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.port_gone = true;
        state.connected = false;
        drop(state);
        self.shared.doorbell.ring();
    }
}

impl Port for PairPort {
    fn kind(&self) -> &'static str {
        "pair"
    }

    fn link(&self) -> Carrier {
        if self.shared.lock().connected { Carrier::Up } else { Carrier::Down }
    }

    fn caps(&self) -> Caps {
        self.caps
    }

    fn service(&mut self, _now: Nanos) -> Result<Option<Nanos>, Fault> {
        Ok(None)
    }

    fn receive<'m>(&'m mut self, budget: usize, batch: &mut Batch<'m>, drops: &mut Drops) -> Result<usize, Fault> {
        let mut state = self.shared.lock();
        let used = budget.min(state.to_port.len());
        let first = self.taken.len();
        self.taken.extend(state.to_port.drain(..used));
        state.with_port += used;
        drop(state);
        for frame in &self.taken[first..] {
            // The peer is of this process, but its offload state may still be a guest's.
            let fits = frame.offload == Offload::NONE
                || Offload::from_vnet(&frame.offload.to_vnet(), frame.bytes.len()).is_ok();
            if frame.bytes.len() < ETHERNET_HEADER_BYTES {
                drops.count(Reason::Runt, 1);
            } else if !fits {
                drops.count(Reason::BadOffload, 1);
            } else {
                batch.push(Foreign::from(&frame.bytes[..]), frame.offload);
            }
        }
        Ok(used)
    }

    fn release(&mut self) -> Result<(), Fault> {
        if self.taken.is_empty() {
            return Ok(());
        }
        let mut state = self.shared.lock();
        state.with_port = state.with_port.saturating_sub(self.taken.len());
        for mut frame in self.taken.drain(..) {
            if frame.bytes.capacity() <= 4096 && state.spare.len() < self.shared.capacity {
                frame.bytes.clear();
                state.spare.push(frame.bytes);
            }
        }
        Ok(())
    }

    fn transmit(&mut self, batch: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        let (connected, waiting) = {
            let mut state = self.shared.lock();
            if self.spare.is_empty() {
                std::mem::swap(&mut self.spare, &mut state.spare);
            }
            (state.connected, state.to_peer.len())
        };
        if !connected {
            drops.count(Reason::LinkDown, which.len() as u64);
            return Ok(sent);
        }
        for &i in which {
            let frame = &batch.frames()[i as usize];
            if waiting + self.staged.len() >= self.shared.capacity {
                drops.count(Reason::NoBuffer, 1);
            } else if frame.len() > self.caps.max_frame_bytes as usize && frame.offload.segmentation.is_none() {
                drops.count(Reason::TooLong, 1);
            } else {
                let mut bytes = self.spare.pop().unwrap_or_default();
                batch.append_to(frame, &mut bytes);
                sent.frames += 1;
                sent.bytes += bytes.len() as u64;
                self.staged.push(OwnedFrame { bytes, offload: frame.offload });
            }
        }
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), Fault> {
        if self.staged.is_empty() {
            return Ok(());
        }
        let mut state = self.shared.lock();
        if state.connected {
            state.to_peer.extend(self.staged.drain(..));
            if std::mem::take(&mut state.peer_armed) {
                drop(state);
                self.shared.doorbell.ring();
            }
        } else {
            drop(state);
            // The peer went between transmit and flush, with the content of its queue.
            while let Some(frame) = self.staged.pop() {
                self.keep(frame.bytes);
            }
        }
        Ok(())
    }

    fn arm(&mut self) -> Result<bool, Fault> {
        let mut state = self.shared.lock();
        state.port_armed = true;
        Ok(!state.to_port.is_empty())
    }

    fn disarm(&mut self) {
        self.shared.lock().port_armed = false;
    }

    fn reset(&mut self, _fault: &Fault) {
        self.taken.clear();
        self.staged.clear();
        let mut state = self.shared.lock();
        state.connected = false;
        state.with_port = 0;
        state.to_port.clear();
        state.to_peer.clear();
        drop(state);
        self.shared.doorbell.ring();
    }

    fn details(&self) -> Details {
        let state = self.shared.lock();
        vec![
            ("capacity", self.shared.capacity.into()),
            ("queued_from_peer", state.to_port.len().into()),
            ("queued_to_peer", state.to_peer.len().into()),
            ("peers_so_far", state.generation.into()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{Abilities, Fixture, Rig, Violation, frame, plain};

    struct PairFixture {
        connector: PairConnector,
        peer: Option<PairPeer>,
    }

    impl Fixture for PairFixture {
        const KIND: &str = "pair";

        fn make(registration: Registration) -> (Box<dyn Port>, Self) {
            let (port, connector) = PairPort::new(PairConfig::default(), registration).unwrap();
            let peer = Some(connector.connect());
            (Box::new(port), PairFixture { connector, peer })
        }

        fn abilities(&self) -> Abilities {
            Abilities { frame_bytes: (14, 1518), offload: true, back_pressure: true, window: 256 }
        }

        fn inject(&mut self, bytes: &[u8], offload: Offload) -> bool {
            match self.peer.as_ref().unwrap().send(bytes, offload) {
                Ok(()) => true,
                Err(SendError::Full) => false,
                Err(error) => panic!("{error}"),
            }
        }

        fn collect(&mut self) -> Option<OwnedFrame> {
            self.peer.as_ref().unwrap().receive()
        }

        fn disconnect(&mut self) {
            self.peer = None;
        }

        fn connect(&mut self) {
            self.peer = Some(self.connector.connect());
        }

        fn send_runt(&mut self) -> Violation {
            assert!(self.inject(&frame(0, 13), Offload::NONE));
            Violation::Dropped(Reason::Runt)
        }

        fn send_over_long(&mut self) -> Violation {
            let refused = self.peer.as_ref().unwrap().send(&frame(0, MAX_FRAME_BYTES + 1), Offload::NONE);
            assert_eq!(refused, Err(SendError::Length(MAX_FRAME_BYTES + 1)));
            Violation::Impossible("`send` refuses it")
        }

        fn send_bad_offload(&mut self) -> Violation {
            let checksum = tombolo_switch::frame::Checksum::Partial { start: 34, offset: 40 };
            assert!(self.inject(&frame(0, 60), Offload { checksum, segmentation: None }));
            Violation::Dropped(Reason::BadOffload)
        }

        fn break_protocol(&mut self) -> Violation {
            Violation::Impossible("the handle has no way to")
        }
    }

    mod conformance {
        crate::conformance_suite!(super::PairFixture);
    }

    #[test]
    fn a_peer_that_waits_is_woken_by_the_flush() {
        let mut rig = Rig::<PairFixture>::up();
        let peer = rig.peer.peer.take().unwrap();
        let waiter = std::thread::spawn(move || peer.receive_timeout(Duration::from_secs(20)).unwrap());
        while !rig.peer.connector.0.lock().peer_armed {
            std::thread::yield_now();
        }
        rig.send(&plain(7, [60]));
        assert_eq!(waiter.join().unwrap().bytes, frame(7, 60));
    }

    #[test]
    fn a_frame_that_the_port_holds_counts_against_the_queue_until_it_is_released() {
        let mut rig = Rig::<PairFixture>::up();
        for i in 0..256 {
            assert!(rig.peer.inject(&frame(i, 60), Offload::NONE));
        }
        assert!(!rig.peer.inject(&frame(256, 60), Offload::NONE));
        assert_eq!(rig.receive(100), 100);
        assert!(!rig.peer.inject(&frame(256, 60), Offload::NONE));
        rig.release();
        assert!(rig.peer.inject(&frame(256, 60), Offload::NONE));
    }

    #[test]
    fn an_earlier_peer_finds_itself_closed() {
        let mut rig = Rig::<PairFixture>::up();
        let second = rig.peer.connector.connect();
        assert_eq!(rig.peer.peer.as_ref().unwrap().send(&frame(0, 60), Offload::NONE), Err(SendError::Closed));
        rig.peer.peer = None;
        assert!(second.is_connected() && rig.port.link() == Carrier::Up);
        drop(rig);
        assert_eq!(second.send(&frame(0, 60), Offload::NONE), Err(SendError::Closed));
    }
}
