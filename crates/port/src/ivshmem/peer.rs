//! A link for a process of its own, without a switch: frames in and out by plain calls.
//!
//! A [`NetPeer`] is one end of a network link, as [`super::Ivshmem`] is, for whoever wants frames and not a port: a test, a
//! protocol stack in user space, a tool. It has no thread: each call looks at the peer's state first.
//!
//! Frames that were sent are seen by the peer at [`NetPeer::flush`]. Nothing blocks but [`NetPeer::wait`].

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tombolo_ring::ivshmem::net::NetError;
use tombolo_ring::ivshmem::state::State;
use tombolo_shm::doorbell::Doorbell;

use super::end::{Bells, End, EndError, LinkEnd, Resets};

/// Without a doorbell: the first pause between two looks of a [`NetPeer::wait`], of which each is twice as long as the one
/// before.
const FIRST_NAP: Duration = Duration::from_micros(50);
/// The longest.
const LONGEST_NAP: Duration = Duration::from_millis(4);

/// Why a frame was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The link is not up.
    #[error("the link is not up: own state {own}, peer's {peer}")]
    Down {
        /// Our state.
        own: State,
        /// The peer's state.
        peer: State,
    },
    /// The ring or the section has no room until the peer has taken frames.
    #[error("the ring is full; wait until the peer has taken frames")]
    Full,
    /// No frame of the link can have that many bytes.
    #[error("a frame of {got} bytes: 14 to {most} are expected")]
    Length {
        /// The bytes asked for.
        got: usize,
        /// The most.
        most: usize,
    },
    /// The peer broke the rings' rules; the link was reset.
    #[error("the peer broke the rules of the ring: {0}; the link was reset")]
    Ring(NetError),
}

/// One end of a network link. See the module's head.
pub struct NetPeer {
    end: End,
    doorbells: Vec<Doorbell>,
}

impl NetPeer {
    /// An end of `parts`.
    ///
    /// # Errors
    /// [`EndError`], which says what does not fit.
    pub fn new(mut parts: LinkEnd) -> Result<NetPeer, EndError> {
        let doorbells = std::mem::take(&mut parts.doorbells);
        let mut peer = NetPeer { end: End::new(parts)?, doorbells };
        peer.step();
        Ok(peer)
    }

    /// Follows the peer's state; every other call does so too. Returns whether the link is up.
    pub fn step(&mut self) -> bool {
        self.end.step();
        self.is_up()
    }

    /// Whether both ends run, as of the last look.
    pub fn is_up(&self) -> bool {
        self.end.machine.is_up()
    }

    /// Our state and the peer's, as of the last look.
    pub fn states(&self) -> (State, State) {
        (self.end.machine.own(), self.end.machine.peer())
    }

    /// Why the link was reset, counted.
    pub fn resets(&self) -> Resets {
        self.end.resets
    }

    /// Longest frame that fits the link's MTU, with Ethernet header and one VLAN tag.
    pub fn longest_frame(&self) -> usize {
        self.end.mtu as usize + 18
    }

    /// The peer is there, rung by `bells` from now on; `None` where it polls.
    pub fn peer_joined(&mut self, bells: Option<Box<dyn Bells>>) {
        self.end.joined(bells);
        self.step();
    }

    /// The peer is gone.
    pub fn peer_left(&mut self) {
        self.end.left();
    }

    /// Has the peer go without a word, as one that is killed.
    #[cfg(test)]
    pub(super) fn die(mut self) {
        self.end.mute();
    }

    fn down(&self) -> SendError {
        let (own, peer) = self.states();
        SendError::Down { own, peer }
    }

    #[cold]
    fn broken(&mut self) {
        if self.end.peer_stopped() {
            self.end.step();
        } else {
            self.end.reset();
        }
    }

    /// Puts a frame into the ring; [`NetPeer::flush`] shows it to the peer.
    ///
    /// # Errors
    /// [`SendError`]; the frame was not taken.
    pub fn send(&mut self, frame: &[u8]) -> Result<(), SendError> {
        self.step();
        if !self.end.machine.may_use_rings() {
            return Err(self.down());
        }
        let most = self.end.geometry.data_bytes() as usize / 4;
        if frame.is_empty() || frame.len() > most {
            return Err(SendError::Length { got: frame.len(), most });
        }
        let End { memory, places, sender, .. } = &mut self.end;
        let result = places.of(memory).and_then(|sections| {
            if !sender.has_room(frame.len()) {
                sender.reclaim(&sections)?;
            }
            Ok(sender.push(&sections, frame.len()).map(|place| place.write_from(frame)))
        });
        match result {
            Ok(Some(_)) => Ok(()),
            Ok(None) => Err(SendError::Full),
            Err(error) => {
                self.broken();
                Err(SendError::Ring(error))
            }
        }
    }

    /// Shows the peer what was sent, and rings it where it wants that.
    pub fn flush(&mut self) {
        if !self.end.machine.may_use_rings() {
            return;
        }
        let End { memory, places, sender, .. } = &mut self.end;
        if places.of(memory).is_ok_and(|sections| sender.publish(&sections)) {
            self.end.ring_traffic();
        }
    }

    /// Hands the next frame to `take`, and returns what that returned; `None` where there is no frame. The bytes were copied
    /// first, so they do not change.
    pub fn receive<T>(&mut self, buffer: &mut Vec<u8>, take: impl FnOnce(&[u8]) -> T) -> Option<T> {
        self.step();
        if !self.end.machine.may_use_rings() {
            return None;
        }
        let End { memory, places, receiver, .. } = &mut self.end;
        let result = places.of(memory).and_then(|sections| {
            let got = receiver.receive(&sections, 1, |view| {
                buffer.resize(view.len(), 0);
                view.read_into(buffer);
            })?;
            Ok((got == 1, receiver.release(&sections, got)))
        });
        match result {
            Ok((got, ring)) => {
                if ring {
                    self.end.ring_traffic();
                }
                got.then(|| take(buffer))
            }
            Err(_) => {
                self.broken();
                None
            }
        }
    }

    /// Waits until the peer rings, a frame is there, or `timeout` has passed. Without a doorbell it looks again and again, as a
    /// port does. Returns whether something may have happened.
    pub fn wait(&mut self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut nap = FIRST_NAP;
        loop {
            if self.end.step() || self.arm() {
                return true;
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            if self.doorbells.is_empty() {
                std::thread::sleep(left.min(nap));
                nap = (nap * 2).min(LONGEST_NAP);
                continue;
            }
            let mut fds: Vec<PollFd<'_>> = self.doorbells.iter().map(|b| PollFd::new(b, PollFlags::IN)).collect();
            let timeout = Timespec::try_from(left).ok();
            // An interrupted wait looks again.
            let rung = poll(&mut fds, timeout.as_ref()).is_ok_and(|n| n != 0);
            for bell in &self.doorbells {
                bell.take();
            }
            if rung {
                self.end.step();
                return true;
            }
        }
    }

    fn arm(&mut self) -> bool {
        if !self.end.machine.may_use_rings() {
            return false;
        }
        let End { memory, places, receiver, .. } = &mut self.end;
        match places.of(memory).and_then(|sections| receiver.arm(&sections)) {
            Ok(more) => more,
            Err(_) => {
                self.broken();
                true
            }
        }
    }
}

impl Drop for NetPeer {
    fn drop(&mut self) {
        self.end.close();
    }
}
