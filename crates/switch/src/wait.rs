//! How a worker sleeps: the one thing that the poll loop needs of an operating system.

use crate::Nanos;

/// Names one port of a worker to the code that wakes it: the index of its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u32);

/// The worker's own token: its control side left something for it.
pub const CONTROL: Token = Token(u32::MAX);

/// Where a worker waits for wake-ups of its ports. Linux's is an epoll instance with edge-triggered
/// sources (crate `tombolo-port`); tests have one under a virtual clock.
pub trait Waiter {
    /// Appends the tokens that were woken to `ready`, sleeping until there is one or `timeout` has
    /// passed: for ever with `None`, not at all with zero. A token may come without work and may
    /// come twice.
    fn wait(&mut self, timeout: Option<Nanos>, ready: &mut Vec<Token>);

    /// The worker's clock.
    fn now(&mut self) -> Nanos;
}
