//! How two peers of a link meet: the state words, and the rings that tell of them. What both kinds of links have in common;
//! what they clear on the way is theirs.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use tombolo_ring::ivshmem::VECTOR_STATE;
use tombolo_ring::ivshmem::state::{Action, Cause, Machine, State};

use super::end::{EndError, LinkEnd, Memory, PeerDoorbells, Resets};

/// What a look at the peer's word asks of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing.
    None,
    /// To look again: the own state moved on.
    Again,
    /// To clear the own section and restart, then to call [`Handshake::cleared`] and look again.
    Clear,
    /// To forget what is held, and look again.
    Forget,
}

pub(super) struct Handshake {
    pub(super) memory: Arc<Memory>,
    pub(super) machine: Machine,
    pub(super) resets: Resets,
    pub(super) own_id: u32,
    pub(super) peer_id: u32,
    pub(super) vectors: u32,
    pub(super) present: bool,
    /// Rings sent to the peer.
    pub(super) rings: u64,
    pub(super) peer_word: usize,
    own_word: usize,
    doorbells: Option<Box<dyn PeerDoorbells>>,
    #[cfg(test)]
    muted: bool,
}

/// Looks at the peer's word that one service makes at most: a peer that plays with its word is followed no further.
pub(super) const MAX_STEPS: usize = 4;

impl Handshake {
    /// A handshake of `parts`, in RESET, with the offsets of the own and of the peer's section. It does not listen: the doorbells
    /// are the caller's.
    pub(super) fn new(parts: LinkEnd) -> Result<(Handshake, [usize; 2]), EndError> {
        let LinkEnd { memory, layout, own_id, peer_id, vectors, peer_doorbells, peer_present, offloads, .. } = parts;
        if matches!(&memory, Memory::Mapped(mapping) if mapping.view_mut().is_none()) {
            return Err(EndError::ReadOnly);
        }
        layout.check(memory.bytes().len() as u64)?;
        let place = |id| Some((layout.output(id)?.start, layout.state(id)?));
        let peers = EndError::Peers { own: own_id, peer: peer_id, max_peers: layout.max_peers };
        let (own, own_word) = place(own_id).ok_or(peers)?;
        let (peer, peer_word) = place(peer_id).filter(|_| own_id != peer_id).ok_or(peers)?;
        let mut handshake = Handshake {
            memory: Arc::new(memory),
            machine: Machine::with_offloads(offloads),
            resets: Resets::default(),
            own_id,
            peer_id,
            vectors,
            present: peer_present,
            rings: 0,
            peer_word,
            own_word,
            doorbells: peer_doorbells,
            #[cfg(test)]
            muted: false,
        };
        // A previous user of this end may have left another state; a running peer sees this change
        // and restarts.
        handshake.write();
        Ok((handshake, [own, peer]))
    }

    /// The peer's state word as it is; that of RESET where the peer is not there.
    #[inline]
    pub(super) fn look(&self) -> u32 {
        if !self.present {
            return State::Reset.word();
        }
        // Acquire, partner of the release in `write`: a peer seen in READY has cleared its section.
        self.memory.bytes().as_foreign().load_u32(self.peer_word, Ordering::Acquire).unwrap_or(0)
    }

    /// Rings the peer, if it can be rung.
    #[inline]
    pub(super) fn ring(&mut self, vector: u16) {
        if let Some(doorbells) = &self.doorbells {
            doorbells.ring(self.peer_id, vector);
            self.rings += 1;
        }
    }

    fn write(&mut self) {
        // Release, partner of the acquire in `look`: what was done to our section comes before.
        let _ = self.memory.bytes().store_u32(self.own_word, self.machine.own_word(), Ordering::Release);
        // The ring is no access to memory; the word has to be there when it arrives.
        fence(Ordering::SeqCst);
        self.ring(VECTOR_STATE);
    }

    /// Looks at the peer's word once and follows it.
    pub(super) fn step(&mut self) -> Step {
        match self.machine.step(self.look()) {
            Action::None => Step::None,
            Action::Write(_) => {
                self.write();
                Step::Again
            }
            Action::Initialise => Step::Clear,
            Action::Fall(cause) => {
                match cause {
                    Cause::PeerReset if !self.present => self.resets.peer_left += 1,
                    Cause::PeerReset => self.resets.peer_reset += 1,
                    Cause::PeerSkipped => self.resets.peer_skipped += 1,
                    Cause::PeerWord(_) => self.resets.peer_word += 1,
                }
                self.write();
                Step::Forget
            }
        }
    }

    /// The own section is cleared.
    pub(super) fn cleared(&mut self) {
        self.write();
    }

    /// Goes to RESET after a fault; the peer follows, or the link stays down.
    pub(super) fn reset(&mut self) {
        self.resets.fault += 1;
        self.machine.reset();
        self.write();
    }

    /// Says good-bye: goes to RESET without counting it.
    pub(super) fn close(&mut self) {
        #[cfg(test)]
        if self.muted {
            return;
        }
        self.machine.reset();
        self.write();
    }

    /// Has `close` say nothing.
    #[cfg(test)]
    pub(super) fn mute(&mut self) {
        self.muted = true;
    }

    /// The peer is there, rung by `doorbells` from now on.
    pub(super) fn joined(&mut self, doorbells: Option<Box<dyn PeerDoorbells>>) {
        self.present = true;
        self.doorbells = doorbells;
        // It may have missed what was said before it could be rung.
        self.ring(VECTOR_STATE);
    }

    /// The peer is gone, with its doorbells. A step is to follow.
    pub(super) fn left(&mut self) {
        self.present = false;
        self.doorbells = None;
    }

    /// Whether a ring's error is only that the peer has meanwhile stopped and cleared its section.
    pub(super) fn peer_stopped(&self) -> bool {
        !matches!(self.machine.state_of(self.look()), Some(State::Ready | State::Run))
    }
}
