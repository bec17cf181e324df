//! Calls with deadlines, as far as they need no operating system: what a service decides about its requests.
//!
//! Pure: instants in, decisions out, on any clock. Services of this machine ([`tombolo_ring::rpc`] over memfds, in `tombolo-rpc`) and
//! cells stand on it.
//!
//! * [`queue`]: earliest deadline first, and whether one more request can be met, at O(log n).
//! * [`schedule`]: a service's rules: bounds, admission, lateness, time to live.
#![no_std]

extern crate alloc;
#[cfg(any(test, feature = "std"))]
extern crate std;

pub mod queue;
pub mod schedule;
