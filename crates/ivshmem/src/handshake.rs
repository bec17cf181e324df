//! The handshake of two peers of a link: the state words in its memory, and the doorbells that tell
//! of them. All kinds of links have it in common; what they clear on the way is theirs.
//! [`Machine::follow`] says what is done when.

use std::cell::Cell;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use tombolo_ring::ivshmem::state::{Cause, Duty, Machine, State};
use tombolo_ring::ivshmem::{VECTOR_STATE, vector_traffic};

use super::end::{EndError, LinkEnd, Memory, PeerDoorbells, Resets};

/// The two state words, and what rings the peer when ours has changed.
struct Words {
    memory: Arc<Memory>,
    own: usize,
    peer: usize,
    peer_id: u32,
    present: bool,
    doorbells: Option<Box<dyn PeerDoorbells>>,
    /// Rings sent to the peer.
    rings: Cell<u64>,
}

impl Words {
    #[inline]
    fn look(&self) -> u32 {
        if !self.present {
            return State::Reset.word();
        }
        // Acquire, partner of the release in `tell`: a peer seen in READY has cleared its section.
        self.memory.bytes().as_foreign().load_u32(self.peer, Ordering::Acquire).unwrap_or(0)
    }

    fn tell(&self, word: u32) {
        // Release, partner of the acquire in `look`: what was done to our section comes before.
        let _ = self.memory.bytes().store_u32(self.own, word, Ordering::Release);
        // The ring is no access to memory; the word has to be there when it arrives.
        fence(Ordering::SeqCst);
        self.ring(VECTOR_STATE);
    }

    #[inline]
    fn ring(&self, vector: u16) {
        if let Some(doorbells) = &self.doorbells {
            doorbells.ring(self.peer_id, vector);
            self.rings.set(self.rings.get() + 1);
        }
    }
}

/// One end's part in the handshake. Its memory is that of the whole link.
pub struct Handshake {
    words: Words,
    machine: Machine,
    resets: Resets,
    own_id: u32,
    vectors: u32,
}

impl Handshake {
    /// A handshake of `parts`, in RESET, with the offsets of the own and of the peer's section. It
    /// does not listen: the doorbells are the caller's.
    pub(crate) fn new(parts: LinkEnd) -> Result<(Handshake, [usize; 2]), EndError> {
        let LinkEnd { memory, layout, own_id, peer_id, vectors, peer_doorbells, peer_present, offloads, .. } = parts;
        if matches!(&memory, Memory::Mapped(mapping) if mapping.view_mut().is_none()) {
            return Err(EndError::ReadOnly);
        }
        layout.check(memory.bytes().len() as u64)?;
        let place = |id| Some((layout.output(id)?.start, layout.state(id)?));
        let peers = EndError::Peers { own: own_id, peer: peer_id, max_peers: layout.max_peers };
        let (own, own_word) = place(own_id).ok_or(peers)?;
        let (peer, peer_word) = place(peer_id).filter(|_| own_id != peer_id).ok_or(peers)?;
        let (memory, doorbells, rings) = (Arc::new(memory), peer_doorbells, Cell::default());
        let words = Words { memory, own: own_word, peer: peer_word, peer_id, present: peer_present, doorbells, rings };
        let handshake =
            Handshake { words, machine: Machine::with_offloads(offloads), resets: Resets::default(), own_id, vectors };
        // A previous user of this end may have left another state; a running peer sees this change
        // and restarts.
        handshake.tell();
        Ok((handshake, [own, peer]))
    }

    /// The memory of the link.
    #[inline]
    pub fn memory(&self) -> &Memory {
        &self.words.memory
    }

    /// The state of both ends, as of the last look.
    #[inline]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Why the link was reset, counted.
    pub fn resets(&self) -> Resets {
        self.resets
    }

    /// Our peer ID.
    pub fn own_id(&self) -> u32 {
        self.own_id
    }

    /// The peer's ID.
    pub fn peer_id(&self) -> u32 {
        self.words.peer_id
    }

    /// Vectors of the link's devices.
    pub fn vectors(&self) -> u32 {
        self.vectors
    }

    /// Whether the peer may be there.
    pub fn is_present(&self) -> bool {
        self.words.present
    }

    /// Rings sent to the peer.
    pub fn rings(&self) -> u64 {
        self.words.rings.get()
    }

    /// The peer's state word, for a thread that hears of the peer's end.
    pub fn peer_word(&self) -> PeerWord {
        PeerWord { memory: self.words.memory.clone(), at: self.words.peer }
    }

    /// The peer's state word as it is; that of RESET where the peer is not there.
    #[inline]
    pub fn look(&self) -> u32 {
        self.words.look()
    }

    /// Rings the peer, if it can be rung, on the vector that means frames, records or buffers.
    #[inline]
    pub fn ring_traffic(&self) {
        self.words.ring(vector_traffic(self.vectors));
    }

    fn tell(&self) {
        self.words.tell(self.machine.own_word());
    }

    /// Looks at the peer's word and follows it. `act` does to the sections what that needs. Returns
    /// whether the own state or the peer's changed.
    pub(crate) fn follow(&mut self, mut act: impl FnMut(Duty, &Memory)) -> bool {
        let Handshake { words, machine, resets, .. } = self;
        let act = |duty| {
            if let Duty::Forget(cause) = duty {
                match cause {
                    Cause::PeerReset if !words.present => resets.peer_left += 1,
                    Cause::PeerReset => resets.peer_reset += 1,
                    Cause::PeerSkipped => resets.peer_skipped += 1,
                    Cause::PeerWord(_) => resets.peer_word += 1,
                }
            }
            act(duty, &words.memory);
            Ok::<(), Infallible>(())
        };
        let Ok(changed) = machine.follow(|| words.look(), |word| words.tell(word), act);
        changed
    }

    /// Goes to RESET after a fault; the peer follows, or the link stays down.
    pub(crate) fn reset(&mut self) {
        self.resets.fault += 1;
        self.machine.reset();
        self.tell();
    }

    /// Says good-bye: goes to RESET without counting it.
    pub fn close(&mut self) {
        self.machine.reset();
        self.tell();
    }

    /// The peer is there, rung by `doorbells` from now on.
    pub fn joined(&mut self, doorbells: Option<Box<dyn PeerDoorbells>>) {
        (self.words.present, self.words.doorbells) = (true, doorbells);
        // It may have missed what was said before it could be rung.
        self.words.ring(VECTOR_STATE);
    }

    /// The peer is gone, with its doorbells. [`Handshake::follow`] is to come next.
    pub(crate) fn left(&mut self) {
        (self.words.present, self.words.doorbells) = (false, None);
    }

    /// Whether a ring's error is only that the peer has meanwhile stopped and cleared its section.
    pub fn peer_stopped(&self) -> bool {
        !matches!(self.machine.state_of(self.look()), Some(State::Ready | State::Run))
    }
}

/// A peer's state word. The maker of a region clears it when the peer's process ends, since nothing
/// else does.
#[derive(Debug)]
pub struct PeerWord {
    memory: Arc<Memory>,
    at: usize,
}

impl PeerWord {
    /// Has the word say that the peer is not there.
    pub fn clear(&self) {
        let _ = self.memory.bytes().store_u32(self.at, State::Reset.word(), Ordering::Release);
    }
}
