//! A network link for a process: frames in and out by plain calls.
//!
//! A [`NetPeer`] is one end of a network link, as a port of the switch is. It is for users that
//! want frames and not a port: a test, a protocol stack in user space, a tool. It has no thread:
//! each call looks at the peer's state first.
//!
//! The peer sees sent frames at [`NetPeer::flush`]. Nothing blocks except [`NetPeer::wait`].

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tombolo_ring::ivshmem::backoff::Backoff;
use tombolo_ring::ivshmem::net::NetError;
use tombolo_ring::ivshmem::state::State;

use super::doorbells::OwnDoorbells;
use super::end::{EndError, LinkEnd, NetworkEnd, PeerDoorbells, Resets};

/// Waits until `look` finds something, a doorbell of the peer's or `other` wakes us, or `timeout`
/// has passed. Meanwhile it looks again as a [`Backoff`] has it. Returns whether
/// something may have happened. `look` says that we are about to sleep; after a doorbell it is
/// called once more, with `true`, when we are not.
pub(crate) fn wait_until<P>(
    peer: &mut P,
    timeout: Duration,
    other: Option<BorrowedFd<'_>>,
    doorbells: impl Fn(&P) -> &OwnDoorbells,
    mut look: impl FnMut(&mut P, bool) -> bool,
) -> bool {
    let (end, mut backoff) = (Instant::now() + timeout, Backoff::default());
    loop {
        if look(peer, false) {
            return true;
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        let doorbells = doorbells(peer);
        let pause = backoff.pause(doorbells.wakes()).map_or(left, |pause| left.min(pause));
        let mut fds: Vec<PollFd<'_>> =
            doorbells.all().iter().map(|doorbell| PollFd::new(doorbell, PollFlags::IN)).collect();
        fds.extend(other.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        // An interrupted wait looks again; a time beyond what the kernel counts is none.
        let is_rung = poll(&mut fds, Timespec::try_from(pause).ok().as_ref()).is_ok_and(|n| n != 0);
        doorbells.take(|_| true);
        if is_rung {
            look(peer, true);
            return true;
        }
    }
}

/// Why a frame was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum SendError {
    /// The link is not up.
    #[error("the link is not up: own state {own}, peer's {peer}")]
    Down { own: State, peer: State },
    /// The ring or the section has no room until the peer has taken frames.
    #[error("the ring is full; wait until the peer has taken frames")]
    Full,
    /// No frame of the link can have that many bytes.
    #[error("a frame of {got} bytes: 14 to {most} are expected")]
    Length {
        /// The bytes asked for.
        got: usize,
        most: usize,
    },
    /// The peer broke the rings' rules; the link was reset.
    #[error("the peer broke the rules of the ring: {0}; the link was reset")]
    Ring(NetError),
}

/// One end of a network link. See the module's head.
pub struct NetPeer {
    end: NetworkEnd,
    pub(crate) doorbells: OwnDoorbells,
}

impl NetPeer {
    /// An end of `parts`.
    ///
    /// # Errors
    /// [`EndError`], which says what does not fit.
    pub fn new(mut parts: LinkEnd) -> Result<NetPeer, EndError> {
        let doorbells = OwnDoorbells::from(std::mem::take(&mut parts.doorbells));
        let mut peer = NetPeer { end: NetworkEnd::new(parts)?, doorbells };
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
        self.end.handshake.machine().is_up()
    }

    /// Our state and the peer's, as of the last look.
    pub fn states(&self) -> (State, State) {
        (self.end.handshake.machine().own(), self.end.handshake.machine().peer())
    }

    /// Why the link was reset, counted.
    pub fn resets(&self) -> Resets {
        self.end.handshake.resets()
    }

    /// Longest frame that fits the link's MTU, with Ethernet header and one VLAN tag.
    pub fn longest_frame(&self) -> usize {
        self.end.mtu as usize + 18
    }

    /// The peer is there, rung by `doorbells` from now on; `None` where it polls.
    pub fn peer_joined(&mut self, doorbells: Option<Box<dyn PeerDoorbells>>) {
        self.doorbells.peer_joined();
        self.end.handshake.joined(doorbells);
        self.step();
    }

    /// The peer is gone.
    pub fn peer_left(&mut self) {
        self.end.left();
    }

    /// Stops and restarts, as a driver whose interface is set down and up; the peer follows.
    pub fn restart(&mut self) {
        self.end.restart_link();
    }

    fn down(&self) -> SendError {
        let (own, peer) = self.states();
        SendError::Down { own, peer }
    }

    #[cold]
    fn broken(&mut self) {
        if self.end.handshake.peer_stopped() {
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
        if !self.end.handshake.machine().may_use_rings() {
            return Err(self.down());
        }
        let most = self.end.geometry.data_bytes() as usize / 4;
        if frame.is_empty() || frame.len() > most {
            return Err(SendError::Length { got: frame.len(), most });
        }
        let NetworkEnd { handshake, places, sender, .. } = &mut self.end;
        let result = places.of(handshake.memory()).and_then(|sections| {
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
        if !self.end.handshake.machine().may_use_rings() {
            return;
        }
        let NetworkEnd { handshake, places, sender, .. } = &mut self.end;
        if places.of(handshake.memory()).is_ok_and(|sections| sender.publish(&sections)) {
            self.end.handshake.ring_traffic();
        }
    }

    /// Hands the next frame to `take`, and returns what that returned; `None` where there is no
    /// frame. The bytes were copied first, so they do not change.
    pub fn receive<T>(&mut self, buffer: &mut Vec<u8>, take: impl FnOnce(&[u8]) -> T) -> Option<T> {
        self.step();
        if !self.end.handshake.machine().may_use_rings() {
            return None;
        }
        let NetworkEnd { handshake, places, receiver, .. } = &mut self.end;
        let result = places.of(handshake.memory()).and_then(|sections| {
            let got = receiver.receive(&sections, 1, |view| {
                buffer.resize(view.len(), 0);
                view.read_into(buffer);
            })?;
            Ok((got == 1, receiver.release(&sections, got)))
        });
        match result {
            Ok((got, ring)) => {
                if ring {
                    self.end.handshake.ring_traffic();
                }
                got.then(|| take(buffer))
            }
            Err(_) => {
                self.broken();
                None
            }
        }
    }

    /// Waits until the peer rings, a frame is there, or `timeout` has passed. Without a doorbell it
    /// looks again and again, as a port does. Returns whether something may have happened.
    pub fn wait(&mut self, timeout: Duration) -> bool {
        self.wait_with(timeout, None)
    }

    /// As [`NetPeer::wait`], and until `other` is readable.
    pub(crate) fn wait_with(&mut self, timeout: Duration, other: Option<BorrowedFd<'_>>) -> bool {
        let mut is_second = false;
        let look = |peer: &mut NetPeer, is_rung: bool| {
            if std::mem::replace(&mut is_second, true) {
                peer.ring_late();
            }
            peer.end.step() || (!is_rung && peer.arm())
        };
        wait_until(self, timeout, other, |peer| &peer.doorbells, look)
    }

    /// Rings the peer where its request became visible since it was last read.
    fn ring_late(&mut self) {
        if !self.end.handshake.machine().may_use_rings() {
            return;
        }
        let NetworkEnd { handshake, places, sender, receiver, .. } = &mut self.end;
        let ring = places
            .of(handshake.memory())
            .is_ok_and(|sections| sender.recheck_ring(&sections) | receiver.recheck_ring(&sections));
        if ring {
            self.end.handshake.ring_traffic();
        }
    }

    /// Asks to be rung for the next frame; whether there is one already.
    pub fn arm(&mut self) -> bool {
        if !self.end.handshake.machine().may_use_rings() {
            return false;
        }
        let NetworkEnd { handshake, places, receiver, .. } = &mut self.end;
        match places.of(handshake.memory()).and_then(|sections| receiver.arm(&sections)) {
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
        self.end.handshake.close();
    }
}
