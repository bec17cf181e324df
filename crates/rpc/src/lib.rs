//! Calls with deadlines between processes of one machine, over shared memory.
//!
//! The layout of a connection and the protocol of its rings are in [`tombolo_ring::rpc`], order and
//! rules in [`tombolo_calls`]; this crate holds what a service and a client do with them.
//!
//! * [`provider`]: a service: registered under a name, called by clients, earliest deadline first.
//! * [`client`]: connects to a service by its name and sends it requests, blocking or not.
//! * [`shared`]: payloads that are handed over as whole memory, written in place.
//! * [`folder`]: where services are found: a folder of sockets.
//! * [`clock`], [`deadline`]: the clock of deadlines, and what a nested call inherits.
//! * [`poll`]: whether polling before sleep is worth it.
//!
//! What decides is pure and runs on any clock:
//!
//! * [`queue`]: earliest deadline first, and whether one more request can be met, at O(log n).
//! * [`schedule`]: a service's rules: bounds, admission, lateness, time to live.
//! * [`simulate`]: the same rules on a virtual clock: deadlines missed against load, by order of
//!   service.
//! * [`histogram`]: times as they are counted and reported.
//!
//! ```
//! use std::time::Duration;
//! use tombolo_rpc::client::{CallOptions, Client, ConnectOptions};
//! use tombolo_rpc::provider::{Options, Reply, Request, Service};
//!
//! let folder = tempfile::tempdir()?;
//! let options = Options { folder: Some(folder.path().into()), ..Options::default() };
//! let upper = |request: &Request<'_>, reply: &mut Reply<'_>| {
//!     let _ = reply.write(&request.to_vec().to_ascii_uppercase());
//! };
//! let _service = Service::register("upper", options, upper)?;
//! let options = ConnectOptions { folder: Some(folder.path().into()), ..ConnectOptions::default() };
//! let client = Client::connect_with("upper", &options)?;
//! let reply = client.call(b"hello", &CallOptions::within(Duration::from_secs(10)))?;
//! assert_eq!(reply.to_vec()?, b"HELLO");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![warn(unreachable_pub)]

pub mod client;
pub mod clock;
mod cpu;
pub mod deadline;
pub mod folder;
pub mod histogram;
mod message;
pub mod poll;
mod process;
pub mod provider;
mod quota;
pub mod shared;
pub mod simulate;
mod socket;
mod sync;
mod warm;

pub use message::Facts;
pub use tombolo_calls::{queue, schedule};
