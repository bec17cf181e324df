//! The clock of deadlines: CLOCK_MONOTONIC in ns, the same for all processes of a machine.

use rustix::time::{ClockId, clock_gettime};
pub use tombolo_calls::ns;

/// CLOCK_MONOTONIC, which is the same for all processes of a machine.
#[inline]
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The monotonic clock is never negative.
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}
