//! Attachments: each kind of port, behind the one trait of the switch ([`tombolo_switch::port::Port`]).
//!
//! * [`reactor`]: the epoll instance in which a worker waits for all of its ports.
//! * [`pair`]: something in the same process.
//! * [`tap`]: an interface of the host's kernel, offloads kept.
//! * [`worker`]: a switch worker on a thread of its own.
//! * [`link`]: network namespaces, and interfaces and their changes.
#![cfg_attr(
    any(test, feature = "test-support"),
    doc = "* [`conformance`]: the suite that every attachment passes by instantiation."
)]
#![warn(unreachable_pub)]

#[cfg(any(test, feature = "test-support"))]
pub mod conformance;
#[cfg(test)]
mod kernel_side;
pub mod link;
pub mod pair;
pub mod reactor;
mod sys;
pub mod tap;
pub mod worker;
