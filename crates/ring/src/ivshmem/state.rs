//! When two peers of a network link may use their rings: the states RESET, INIT, READY and RUN.
//!
//! Each peer has a state word, writes it alone, and hears of changes of the other's by [`VECTOR_STATE`](super::VECTOR_STATE).
//! The point of it: a peer clears its section only while the other one does not look at it, and looks at the other's only
//! after that was cleared.
//!
//! # The table
//!
//! What a peer in the state of the row does on seeing the other's word in the column's state:
//!
//! | own \ peer | RESET | INIT | READY | RUN | any other value |
//! | --- | --- | --- | --- | --- | --- |
//! | RESET | INIT | INIT | wait | wait | wait |
//! | INIT | wait | clear, READY | clear, READY | clear, READY | fall |
//! | READY | fall | wait | RUN | RUN | fall |
//! | RUN | fall | fall | – | – | fall |
//!
//! "Clear" is: zero the rings in the own section, start both queues anew. "Fall" is: stop at once and go to RESET.
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
//! These are the rules of the drivers of Linux and Zephyr, with three answers where the two say nothing: a peer that skips RESET,
//! and words that are no state, which Linux takes for READY.
//!
//! [`Machine`] is pure: it is told the peer's word and says what to do. It steps on any look, not on changes only, so a change
//! that was missed costs nothing.

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
    /// The state that a word stands for; `None` for a word that is no state.
    pub const fn from_word(word: u32) -> Option<State> {
        match word {
            0 => Some(State::Reset),
            1 => Some(State::Init),
            2 => Some(State::Ready),
            3 => Some(State::Run),
            _ => None,
        }
    }

    /// The word.
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

/// Why a machine fell back to RESET.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The peer went to RESET: it stopped, restarted or left.
    PeerReset,
    /// The peer began anew without having been in RESET.
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
    /// Write the state into the own word, and ring the peer on the state vector.
    Write(State),
    /// Zero the rings in the own section and start both queues anew ([`net::initialise`](super::net::initialise)); then write
    /// [`State::Ready`] and ring.
    Initialise,
    /// Stop looking at rings; then write [`State::Reset`] and ring.
    Fall(Cause),
}

/// One peer's state. See the module's head for the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    own: State,
    peer: State,
}

impl Machine {
    /// In RESET. The caller writes that into its word and rings, since an earlier owner may have left another one there.
    pub const fn new() -> Machine {
        Machine { own: State::Reset, peer: State::Reset }
    }

    /// The own state, which is what the own word is to hold.
    pub const fn own(&self) -> State {
        self.own
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

    /// Takes the peer's word and says what to do. To be called until it says [`Action::None`]; three times are enough.
    #[must_use = "the caller writes the new state into its word"]
    pub fn step(&mut self, peer_word: u32) -> Action {
        let known = State::from_word(peer_word);
        self.peer = known.unwrap_or(State::Reset);
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

    /// Goes to RESET on the own account, such as after a broken ring. The caller writes the word and rings.
    pub fn reset(&mut self) {
        self.own = State::Reset;
    }
}
