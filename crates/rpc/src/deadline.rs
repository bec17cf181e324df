//! Deadlines as a caller gives them, and what a nested call inherits.
//!
//! While a worker serves a request, its thread has the request's deadline; a call that is made meanwhile, to whichever service, gets
//! that deadline or an earlier one of its own, never a later one.

use std::cell::Cell;
use std::time::Duration;

use tombolo_ring::rpc::entry::BEST_EFFORT;

use crate::clock;

thread_local! {
    static SERVING: Cell<u64> = const { Cell::new(BEST_EFFORT) };
}

/// When an answer is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Deadline {
    /// The one of the request that this thread serves, if it serves one; else none.
    #[default]
    Inherit,
    /// So much after the call; or that of the request that this thread serves, if that is earlier.
    In(Duration),
    /// At an instant of CLOCK_MONOTONIC, in ns; or that of the request that this thread serves, if that is earlier.
    At(u64),
}

impl Deadline {
    /// As an instant of CLOCK_MONOTONIC in ns; `u64::MAX` is none.
    #[inline]
    pub fn resolve(self) -> u64 {
        let wanted = match self {
            Deadline::Inherit => BEST_EFFORT,
            Deadline::In(left) => clock::now_ns().saturating_add(clock::ns(left)),
            Deadline::At(instant) => instant,
        };
        wanted.min(SERVING.get())
    }
}

/// Sets the deadline that calls of this thread inherit, until it is dropped.
#[derive(Debug)]
pub(crate) struct Scope(u64);

impl Scope {
    #[inline]
    pub(crate) fn enter(deadline: u64) -> Scope {
        Scope(SERVING.replace(deadline))
    }
}

impl Drop for Scope {
    #[inline]
    fn drop(&mut self) {
        SERVING.set(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nested_call_never_has_more_time_than_its_caller() {
        assert_eq!(Deadline::Inherit.resolve(), BEST_EFFORT);
        {
            let _scope = Scope::enter(1000);
            assert_eq!(Deadline::Inherit.resolve(), 1000);
            assert_eq!(Deadline::At(10).resolve(), 10);
            assert_eq!(Deadline::In(Duration::from_secs(1)).resolve(), 1000);
            let _inner = Scope::enter(5);
            assert_eq!(Deadline::At(10).resolve(), 5);
        }
        assert_eq!(Deadline::At(2000).resolve(), 2000);
        assert_eq!(Deadline::In(Duration::MAX).resolve(), BEST_EFFORT);
    }
}
