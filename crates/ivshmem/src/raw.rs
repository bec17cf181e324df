//! A link for a process's own protocol: the two output sections, the states and the doorbells, and
//! nothing else.
//!
//! The content of the sections is up to the user. This module says when they may be looked at:
//! after both peers have cleared theirs, until one of them stops. Each such time is a *epoch* of
//! the link, with a number of its own. A user that remembers anything of the sections must forget
//! it when the number changes. The module has no thread; each call looks at the peer's state first.
//! Nothing blocks except the wait of [`super::client::JoinedLink`].

use std::os::fd::BorrowedFd;
use std::time::Duration;

use tombolo_ring::ivshmem::state::{Duty, State};
use tombolo_ring::mem::{Foreign, ForeignMut};

use super::doorbells::OwnDoorbells;
use super::end::{EndError, LinkEnd, PeerDoorbells, Resets};
use super::handshake::Handshake;
use super::peer::wait_until;

/// Makes the own output section fresh; the peer does not look at it meanwhile.
pub type Clear = Box<dyn FnMut(ForeignMut<'_>) + Send>;

/// One end of a link. See the module's head.
pub struct RawPeer {
    handshake: Handshake,
    own: usize,
    peer: usize,
    section_bytes: usize,
    clear: Clear,
    epoch: u64,
    pub(crate) doorbells: OwnDoorbells,
}

impl RawPeer {
    /// An end of `parts`, whose MTU does not matter.
    ///
    /// # Errors
    /// [`EndError`], which says what does not fit.
    pub fn new(mut parts: LinkEnd, clear: Clear) -> Result<RawPeer, EndError> {
        let doorbells = OwnDoorbells::from(std::mem::take(&mut parts.doorbells));
        // Checked against the memory, which is mapped.
        let section_bytes = parts.layout.output_bytes as usize;
        let (handshake, [own, peer]) = Handshake::new(parts)?;
        let mut end = RawPeer { handshake, own, peer, section_bytes, clear, epoch: 0, doorbells };
        end.step();
        Ok(end)
    }

    /// Follows the peer's state. Returns whether the sections may be used.
    pub fn step(&mut self) -> bool {
        let RawPeer { handshake, own, section_bytes, clear, epoch, .. } = self;
        handshake.follow(|duty, memory| {
            if duty == Duty::Clear
                && let Some(own) = memory.bytes().slice(*own, *section_bytes)
            {
                clear(own);
            }
            *epoch += u64::from(duty != Duty::Check);
        });
        self.is_up()
    }

    /// Whether the sections may be used, as of the last look.
    pub fn is_up(&self) -> bool {
        self.handshake.machine().may_use_rings()
    }

    /// The number of the link's epoch.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Our state and the peer's, as of the last look.
    pub fn states(&self) -> (State, State) {
        (self.handshake.machine().own(), self.handshake.machine().peer())
    }

    /// Why the link was reset, counted.
    pub fn resets(&self) -> Resets {
        self.handshake.resets()
    }

    /// Our output section and the peer's; to be used while the link is up. `None` where the memory
    /// has gone.
    #[inline]
    pub fn sections(&self) -> Option<(ForeignMut<'_>, Foreign<'_>)> {
        let bytes = self.handshake.memory().bytes();
        let own = bytes.slice(self.own, self.section_bytes)?;
        Some((own, bytes.slice(self.peer, self.section_bytes)?.as_foreign()))
    }

    /// Rings the peer on the vector that means data.
    pub fn ring(&mut self) {
        self.handshake.ring_traffic();
    }

    /// The peer broke the user's protocol: the link goes to RESET, and restarts if the peer
    /// follows. If the peer has stopped meanwhile, nothing more happens.
    pub fn fault(&mut self) {
        if !self.handshake.peer_stopped() {
            self.epoch += 1;
            self.handshake.reset();
        }
        self.step();
    }

    /// The peer is there, rung by `doorbells` from now on; `None` where it polls.
    pub fn peer_joined(&mut self, doorbells: Option<Box<dyn PeerDoorbells>>) {
        self.doorbells.peer_joined();
        self.handshake.joined(doorbells);
        self.step();
    }

    /// The peer is gone.
    pub fn peer_left(&mut self) {
        self.handshake.left();
        self.step();
    }

    /// Waits until the peer rings, its state changes, `other` is readable, or `timeout` has passed.
    /// It does not know what the sections hold: without doorbells, and before the peer's first ring
    /// (which QEMU can lose), the caller has to look again after a short timeout.
    pub(crate) fn wait_with(&mut self, timeout: Duration, other: Option<BorrowedFd<'_>>) -> bool {
        let was_up = self.is_up();
        wait_until(self, timeout, other, |peer| &peer.doorbells, |peer, _| peer.step() != was_up)
    }
}

impl Drop for RawPeer {
    fn drop(&mut self) {
        self.handshake.close();
    }
}
