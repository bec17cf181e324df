//! Calls with deadlines, as far as they need no operating system: what a service decides about its
//! requests, and both sides of calls between two machines.
//!
//! The crate is pure: instants go in, decisions come out, on any clock. Its users are services of
//! this machine ([`tombolo_ring::rpc`] over memfds, in `tombolo-rpc`), cells, and processes that
//! call cells (`tombolo-remote`).
//!
//! * [`queue`]: earliest deadline first, and whether one more request can be met, at O(log n).
//! * [`schedule`]: a service's rules: bounds, admission, lateness, time to live.
//! * [`CallOptions`], [`CallError`], [`Reply`], [`Request`]: a call as its caller and its server
//!   see it, wherever both are.
//! * [`slots`]: the calls that a client has under way, for all clients.
//! * [`session`]: one side of calls between two peers: answers, order, time that is left.
//! * [`carrier`]: what carries them: [`sections`], the shared memory of a link, or [`frames`], a
//!   stream of bytes.
//! * [`hello`]: what two machines say before that.
//! * [`transport`]: both together, with the life of the link or connection. Cells and processes
//!   bring their own memory, doorbells and sockets.
//!
//! ```
//! use tombolo_calls::queue::Queue;
//!
//! // Times in ns: rank (the order of service), deadline, and the work that it takes.
//! let mut queue = Queue::new(true);
//! queue.insert(9_000, 9_000, 2_000, "later");
//! queue.insert(4_000, 4_000, 2_000, "urgent");
//! let first = queue.first().unwrap();
//! assert_eq!(queue.get(first), Some(&"urgent"));
//! // At 1,000 both fit, and one more that has to be done by 5,000 does not: the urgent one comes before it.
//! assert!(queue.admits(1_000, 9_500, 9_500, 2_000) && !queue.admits(1_000, 5_000, 5_000, 3_000));
//! ```
#![no_std]

extern crate alloc;
#[cfg(any(test, feature = "std"))]
extern crate std;

mod call;
pub mod carrier;
mod error;
pub mod frames;
pub mod hello;
pub mod queue;
pub mod schedule;
pub mod sections;
pub mod session;
mod shares;
pub mod slots;
#[cfg(test)]
mod tests;
pub mod transport;

pub use call::{CallOptions, Deadline, Reply, Request, RequestId, Response, ns};
pub use error::{CallError, Came, Errno, NoMemory, NotShared};
