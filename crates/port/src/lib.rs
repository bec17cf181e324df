//! Attachments: each kind of port, behind the one trait of the switch
//! ([`tombolo_switch::port::Port`]). A worker of `tombolo_worker` serves them.
//!
//! * [`vhost_user`]: a virtual machine whose VMM is a vhost-user frontend.
//! * [`ivshmem`]: a cell, a guest or a process over a shared region, by the frames of the
//!   ivshmem-net drivers; a port around `tombolo_ivshmem`.
//! * [`pair`]: something in the same process.
//! * [`stream`]: QEMU's stream sockets, which passt speaks too.
//! * [`tap`]: an interface of the host's kernel, offloads kept.
//! * [`packet`]: an interface that exists, such as a network card or a veth.
//! * [`vxlan`]: networks of other machines, through a VXLAN tunnel over UDP.
//! * [`xen`]: a guest of Xen whose network frontend we are the backend of.
//! * [`link`]: network namespaces, and interfaces and their changes.
//! * [`child`]: child processes that die with the one that started them.
//!
//! ```
//! use std::time::Duration;
//! use tombolo_port::pair::{PairConfig, pair};
//! use tombolo_worker::thread::{WorkerConfig, WorkerThread};
//! use tombolo_switch::control::PortSettings;
//! use tombolo_switch::frame::Offload;
//! use tombolo_switch::mac::MacSettings;
//!
//! // A worker with a network of two ports, whose peers are here.
//! let thread = WorkerThread::start(&WorkerConfig { name: "lan".into(), ..WorkerConfig::default() })?;
//! let handle = thread.handle();
//! let network = handle.add_network("lan", MacSettings::default())?;
//! let mut peers = Vec::new();
//! for name in ["a", "b"] {
//!     let reserved = handle.reserve()?;
//!     let (port, peer) = pair(PairConfig::default(), thread.registration(&reserved))?;
//!     handle.add_port(reserved, network, name, Box::new(port), PortSettings::default())?;
//!     peers.push(peer);
//! }
//! let frame = [[0xff; 6], [2, 0, 0, 0, 0, 1]].concat().into_iter().chain([8, 6]).chain([0; 46]).collect::<Vec<u8>>();
//! peers[0].send(&frame, Offload::NONE).unwrap();
//! let received = peers[1].receive_timeout(Duration::from_secs(10)).expect("a broadcast comes to the other one");
//! assert_eq!(received.bytes, frame);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(
    any(test, feature = "test-support"),
    doc = "* [`conformance`]: the suite that every attachment passes by instantiation."
)]
#![warn(unreachable_pub)]

pub mod child;
#[cfg(any(test, feature = "test-support"))]
pub mod conformance;
pub mod ivshmem;
#[cfg(test)]
mod kernel_side;
pub mod link;
pub mod packet;
mod pages;
pub mod pair;
mod spread;
pub mod stream;
mod sys;
pub mod tap;
#[cfg(test)]
mod uplink;
pub mod vhost_user;
pub mod vxlan;
pub mod xen;
