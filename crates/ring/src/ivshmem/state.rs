//! When two peers of a network link may use their rings: the states RESET, INIT, READY and RUN.
//!
//! Each peer has a state word and is its only writer. [`VECTOR_STATE`](super::VECTOR_STATE) tells
//! it that the other peer's word changed. The purpose: a peer clears its section only while the
//! other peer does not look at it. It looks at the other peer's section only after that section was
//! cleared.
//!
//! # The table
//!
//! What a peer in the row's state does when it sees the other peer's word in the column's state:
//!
//! | own \ peer | RESET | INIT | READY | RUN | any other value |
//! | --- | --- | --- | --- | --- | --- |
//! | RESET | INIT | INIT | wait | wait | wait |
//! | INIT | wait | clear, READY | clear, READY | clear, READY | fall |
//! | READY | fall | wait | RUN | RUN | fall |
//! | RUN | fall | fall | – | – | fall |
//!
//! "Clear" means: zero the rings in the own section and restart both queues. "Fall" means: stop at
//! once and go to RESET.
//!
//! # Transitions of a peer's word
//!
//! | legal | why |
//! | --- | --- |
//! | RESET → INIT | the other one has left READY and RUN, so it does not look at this section |
//! | INIT → READY | the section is cleared |
//! | READY → RUN | the other one has cleared its section (or, Linux, may do so still) |
//! | any → RESET | the driver stops, starts, or follows the other one |
//!
//! | forbidden | why, and what is done |
//! | --- | --- |
//! | READY or RUN → INIT without RESET | the section would be cleared while we look; from RUN we fall |
//! | RESET → READY or RUN | the section was not cleared after we stopped looking; we wait in RESET, or clear ours and find rings that contradict ours, which is a fault |
//! | to a value above 3 | no state; we fall |
//!
//! These are the rules of the drivers of Linux and Zephyr. This module adds three answers where the
//! two drivers say nothing: for a peer that skips RESET, and for words that are no state, which
//! Linux takes for READY.
//!
//! # Who takes offloads
//!
//! The region's header may offer offloads. A guest that wants them sets [`TAKES_OFFLOADS`] in its
//! words of INIT, READY and RUN. So the request of its earlier driver is never mistaken for its
//! own. Peer 0, which makes the offer, writes plain words. The drivers of Linux and Zephyr read no
//! header and never set the flag. A peer must not set it where offloads were not offered.
//!
//! [`Machine`] is pure: it is told the peer's word and says what to do. It steps on any look, not
//! only on changes, so a missed change costs nothing. [`Machine::follow`] is the loop around it
//! that every end of a link has, on Linux and in a cell: it looks, has the section cleared, and
//! writes the own word, in the order that the table needs.

use core::fmt;

/// A peer's state, as its state word says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// Not there, or stopped: looks at no ring.
    #[default]
    Reset = 0,
    /// About to clear its section.
    Init = 1,
    /// Has cleared its section.
    Ready = 2,
    /// Frames flow.
    Run = 3,
}

impl State {
    /// The state that a word encodes; `None` for a word that is no state.
    pub const fn from_word(word: u32) -> Option<State> {
        match word {
            0 => Some(State::Reset),
            1 => Some(State::Init),
            2 => Some(State::Ready),
            3 => Some(State::Run),
            _ => None,
        }
    }

    /// The number as the state table holds it.
    pub const fn word(self) -> u32 {
        self as u32
    }

    /// The name in status.
    pub const fn name(self) -> &'static str {
        match self {
            State::Reset => "reset",
            State::Init => "init",
            State::Ready => "ready",
            State::Run => "run",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a guest that takes offloads adds to its words of INIT, READY and RUN.
pub const TAKES_OFFLOADS: u32 = 1 << 8;

/// One end's part in the agreement on offloads: whether frames follow the header of
/// [`net`](super::net).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Offloads {
    /// They are not offered, or not known: frames are as on a wire.
    #[default]
    None,
    /// This end is peer 0, whose header page offers them.
    Offered,
    /// This end is the guest, was offered them, and takes them.
    Taken,
}

impl Offloads {
    /// The state that a peer's word encodes, and whether it takes offloads; `None` for a word that
    /// is no state.
    pub const fn of_peer(self, word: u32) -> (Option<State>, bool) {
        match (self, State::from_word(word & !TAKES_OFFLOADS)) {
            (Offloads::Offered, Some(State::Init | State::Ready | State::Run)) if word & TAKES_OFFLOADS != 0 => {
                (State::from_word(word & !TAKES_OFFLOADS), true)
            }
            _ => (State::from_word(word), false),
        }
    }
}

/// Why a machine fell back to RESET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The peer went to RESET: it stopped, restarted or left.
    PeerReset,
    /// The peer restarted without having been in RESET.
    PeerSkipped,
    /// The peer's word is no state.
    PeerWord(u32),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::PeerReset => f.write_str("the peer went to reset"),
            Cause::PeerSkipped => f.write_str("the peer went to init without reset"),
            Cause::PeerWord(word) => write!(f, "the peer's state word is {word:#x}, expected 0 to 3"),
        }
    }
}

/// What is to be done after a look at the peer's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing.
    None,
    /// Write the state into the own word ([`Machine::own_word`]), and ring the peer on the state
    /// vector.
    Write(State),
    /// Zero the rings in the own section and restart both queues
    /// ([`net::initialise`](super::net::initialise)). Then write [`State::Ready`] and ring.
    Initialise,
    /// Stop looking at rings; then write [`State::Reset`] and ring.
    Fall(Cause),
}

/// What [`Machine::follow`] asks of a link before it writes the own word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Zero the own section and restart what reads and writes the sections. The peer does not look
    /// at it meanwhile.
    Clear,
    /// The peer has cleared its section: check that it is what it should be.
    Check,
    /// Stop looking at the peer's section and forget what is known of it.
    Forget(Cause),
}

/// Looks at the peer's word that one [`Machine::follow`] makes at most. Three lead from anywhere to
/// where there is nothing to do. A peer that changes its word with each look is followed no
/// further.
const MAX_LOOKS: usize = 4;

/// One peer's state. See the module's head for the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    own: State,
    peer: State,
    offloads: Offloads,
    peer_takes: bool,
}

impl Machine {
    /// In RESET. The caller writes that into its word and rings, since an earlier owner may have
    /// left another one there.
    pub const fn new() -> Machine {
        Machine::with_offloads(Offloads::None)
    }

    /// As [`Machine::new`], with this end's part in the agreement on offloads.
    pub const fn with_offloads(offloads: Offloads) -> Machine {
        Machine { own: State::Reset, peer: State::Reset, offloads, peer_takes: false }
    }

    /// This side's state.
    pub const fn own(&self) -> State {
        self.own
    }

    /// What the own word is to hold.
    pub const fn own_word(&self) -> u32 {
        match (self.offloads, self.own) {
            (_, State::Reset) | (Offloads::None | Offloads::Offered, _) => self.own.word(),
            (Offloads::Taken, own) => own.word() | TAKES_OFFLOADS,
        }
    }

    /// The state that a peer's word encodes; `None` for a word that is no state.
    pub const fn state_of(&self, peer_word: u32) -> Option<State> {
        self.offloads.of_peer(peer_word).0
    }

    /// Whether frames follow the header of [`net`](super::net), both ways. It does not change while
    /// the rings may be used: a peer whose word suddenly says otherwise has restarted.
    pub const fn uses_offloads(&self) -> bool {
        match self.offloads {
            Offloads::None => false,
            Offloads::Offered => self.peer_takes,
            Offloads::Taken => true,
        }
    }

    /// The peer's state at the last look; RESET where its word was none.
    pub const fn peer(&self) -> State {
        self.peer
    }

    /// Whether the rings may be used.
    pub const fn may_use_rings(&self) -> bool {
        matches!((self.own, self.peer), (State::Run, State::Ready | State::Run))
    }

    /// Whether both run: frames are looked at on both sides.
    pub const fn is_up(&self) -> bool {
        matches!((self.own, self.peer), (State::Run, State::Run))
    }

    /// Takes the peer's word and says what to do. To be called until it says [`Action::None`];
    /// three times are enough.
    #[must_use = "the caller writes the new state into its word"]
    pub fn step(&mut self, peer_word: u32) -> Action {
        let (known, takes) = self.offloads.of_peer(peer_word);
        self.peer = known.unwrap_or(State::Reset);
        let changed = core::mem::replace(&mut self.peer_takes, takes) != takes;
        let action = match (self.own, known) {
            (State::Reset, Some(State::Reset | State::Init)) => Action::Write(State::Init),
            (State::Reset, _) => Action::None,
            (_, None) => Action::Fall(Cause::PeerWord(peer_word)),
            (State::Init, Some(State::Reset)) => Action::None,
            (State::Init, Some(_)) => Action::Initialise,
            (State::Ready | State::Run, Some(State::Reset)) => Action::Fall(Cause::PeerReset),
            (State::Ready, Some(State::Init)) => Action::None,
            (State::Ready, Some(State::Ready | State::Run)) => Action::Write(State::Run),
            (State::Run, Some(State::Init)) => Action::Fall(Cause::PeerSkipped),
            // Another driver, which was not seen in RESET.
            (State::Run, Some(_)) if changed => Action::Fall(Cause::PeerSkipped),
            (State::Run, Some(State::Ready | State::Run)) => Action::None,
        };
        self.own = match action {
            Action::None => self.own,
            Action::Write(state) => state,
            Action::Initialise => State::Ready,
            Action::Fall(_) => State::Reset,
        };
        action
    }

    /// Follows the peer until there is nothing to do. `look` reads the peer's word (acquire).
    /// `tell` writes the own word, after all that was done before (release), and rings the peer on
    /// the state vector. `act` does what the link has to do before that. Returns whether the own
    /// state or the peer's changed.
    ///
    /// ```
    /// use core::cell::Cell;
    /// use core::convert::Infallible;
    /// use tombolo_ring::ivshmem::state::{Duty, Machine};
    ///
    /// let words = [Cell::new(0), Cell::new(0)];
    /// let (mut a, mut b, mut cleared) = (Machine::new(), Machine::new(), 0);
    /// let mut act = |duty| {
    ///     cleared += u32::from(duty == Duty::Clear);
    ///     Ok::<(), Infallible>(())
    /// };
    /// while !(a.is_up() && b.is_up()) {
    ///     a.follow(|| words[1].get(), |word| words[0].set(word), &mut act)?;
    ///     b.follow(|| words[0].get(), |word| words[1].set(word), &mut act)?;
    /// }
    /// assert_eq!((cleared, words[0].get(), words[1].get()), (2, 3, 3));
    /// # Ok::<(), Infallible>(())
    /// ```
    ///
    /// # Errors
    /// What `act` refused with. Nothing was written after that; [`Machine::reset`] is to follow.
    pub fn follow<E>(
        &mut self,
        mut look: impl FnMut() -> u32,
        mut tell: impl FnMut(u32),
        mut act: impl FnMut(Duty) -> Result<(), E>,
    ) -> Result<bool, E> {
        let before = (self.own, self.peer);
        for _ in 0..MAX_LOOKS {
            match self.step(look()) {
                Action::None => break,
                Action::Write(State::Run) => act(Duty::Check)?,
                Action::Write(_) => {}
                Action::Initialise => act(Duty::Clear)?,
                Action::Fall(cause) => act(Duty::Forget(cause))?,
            }
            tell(self.own_word());
        }
        Ok(before != (self.own, self.peer))
    }

    /// Goes to RESET on the own account, such as after a broken ring. The caller writes the word
    /// and rings.
    pub fn reset(&mut self) {
        self.own = State::Reset;
    }
}
