//! Linux below the rings: memory that is shared by descriptor, doorbells, descriptor passing.
//!
//! Nothing here has a name in a file system that could outlive its owner. Memory is a sealed memfd,
//! a wake-up is an eventfd, and both die with the last descriptor.
//!
//! * [`memory`] – making a sealed region, and mapping a region that a peer handed over.
//! * [`guest`] – mapping a guest's memory, which its owner can take away.
//! * [`section`] – memory that one side writes and the other can only read, and which neither can
//!   take away.
//! * [`doorbell`] – wake-ups, which are eventfds.
//! * [`environment`] – environment variables, of which empty ones are not set.
//! * [`foreign`] – finding out what a peer's descriptor is, and closing it, without waiting for the
//!   peer.
//! * [`signal`] – signalling an eventfd that a peer holds too, without blocking.
//! * [`lineage`] – a process and those that it descends from.
//! * [`futex`] – sleeping on a word of shared memory.
//! * [`class`] – the scheduling class of a thread.
//! * [`fork`] – which process this is after a fork, and locks that no thread holds across one.
//! * [`credentials`] – who is at the other end of a Unix socket.
//! * [`passing`] – descriptors that go through a Unix socket.
//! * [`listener`] – listening Unix sockets that leave nothing behind.
//! * [`verdicts`] – a short-lived cache of what was found out about processes that connect.
//!
//! ```
//! use tombolo_shm::doorbell::Doorbell;
//!
//! let doorbell = Doorbell::shared()?;
//! // The other end, as a peer gets it: a descriptor of the same eventfd.
//! let peers = Doorbell::adopt(doorbell.duplicate()?.peers_fd().try_clone_to_owned()?)?;
//! peers.ring();
//! assert!(doorbell.take() && !doorbell.take(), "rung once");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![warn(unreachable_pub)]

pub mod class;
pub mod credentials;
pub mod doorbell;
pub mod environment;
pub mod foreign;
pub mod fork;
pub mod futex;
pub mod guest;
pub mod lineage;
pub mod listener;
pub mod memory;
pub mod passing;
pub mod section;
pub mod signal;
pub mod verdicts;
