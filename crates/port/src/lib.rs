//! Attachments: each kind of port, behind the one trait of the switch ([`tombolo_switch::port::Port`]).
//!
//! * [`vhost_user`]: a virtual machine whose VMM is a vhost-user frontend.
//! * [`reactor`]: the epoll instance in which a worker waits for all of its ports.
#![warn(unreachable_pub)]

pub mod reactor;
pub mod vhost_user;
