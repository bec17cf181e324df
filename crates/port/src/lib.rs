//! Attachments: each kind of port, behind the one trait of the switch ([`tombolo_switch::port::Port`]).
//!
//! * [`reactor`]: the epoll instance in which a worker waits for all of its ports.
#![warn(unreachable_pub)]

pub mod reactor;
