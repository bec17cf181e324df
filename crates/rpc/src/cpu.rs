//! Where a thread runs, for the choice between polling and sleeping.

use std::sync::OnceLock;

/// The CPU on which this thread runs now.
#[inline]
pub(crate) fn current() -> u32 {
    rustix::thread::sched_getcpu() as u32
}

/// Whether this process may run on more than one CPU; looked up once.
pub(crate) fn several() -> bool {
    static SEVERAL: OnceLock<bool> = OnceLock::new();
    *SEVERAL.get_or_init(|| std::thread::available_parallelism().is_ok_and(|n| n.get() > 1))
}
