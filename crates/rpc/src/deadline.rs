//! Deadlines as a caller gives them, and what a nested call inherits.
//!
//! While a worker serves a request, its thread has the request's deadline; a call that is made
//! meanwhile, to whichever service, gets that deadline or an earlier one of its own, never a later
//! one.

use std::cell::Cell;

use tombolo_ring::rpc::entry::BEST_EFFORT;

use crate::clock;

thread_local! {
    static SERVING: Cell<u64> = const { Cell::new(BEST_EFFORT) };
}

pub use tombolo_calls::Deadline;

/// As an instant of CLOCK_MONOTONIC in ns; `u64::MAX` is none.
#[inline]
pub fn resolve(deadline: Deadline) -> u64 {
    deadline.instant_ns(clock::now_ns, SERVING.get())
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_nested_call_never_has_more_time_than_its_caller() {
        assert_eq!(resolve(Deadline::Inherit), BEST_EFFORT);
        {
            let _scope = Scope::enter(1000);
            assert_eq!(resolve(Deadline::Inherit), 1000);
            assert_eq!(resolve(Deadline::At(10)), 10);
            assert_eq!(resolve(Deadline::In(Duration::from_secs(1))), 1000);
            let _inner = Scope::enter(5);
            assert_eq!(resolve(Deadline::At(10)), 5);
        }
        assert_eq!(resolve(Deadline::At(2000)), 2000);
        assert_eq!(resolve(Deadline::In(Duration::MAX)), BEST_EFFORT);
    }
}
