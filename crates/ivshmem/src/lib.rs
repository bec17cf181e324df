//! Links of ivshmem devices on Linux: who serves them, and how a process takes part in them.
//!
//! A link is a region of shared memory with an output section and a state word per peer
//! ([`tombolo_ring::ivshmem`] has the layouts and rules). Nothing here knows a switch. The port
//! that joins a link to a network is `tombolo_port::ivshmem`. A cell has a shell of its own around
//! the same rules.
//!
//! A link's server gives each peer the region and all doorbells, and says who comes and goes. The
//! traffic does not pass through it.
//!
//! * [`links`]: the regions, sockets and clients of a fabric's links, in a thread.
//! * [`server`]: the core of that: who is there, who was told what, what is to be sent; free of
//!   I/O.
//! * [`v1`]: messages of stock QEMU's server protocol, and a client's reader of them.
//! * [`v2`]: messages of the protocol of Jailhouse's device in QEMU.
//!
//! A fabric's daemon may restart while its links go on.
//!
//! * [`fd_store`]: a process that holds regions, doorbells and connections meanwhile.
//! * [`store`]: the daemon's side of it for everything except links.
//!
//! A peer is one end of a link.
//!
//! * [`client`]: a process that joins a link by its server's socket.
//! * [`end`]: what an end is made of, and the end of a network link, for ports and processes.
//! * [`handshake`]: the two state words, followed.
//! * [`peer`], [`channel`], [`raw`]: an end for a process: frames, records, or a protocol of its
//!   own.
//! * [`doorbells`]: those of an end, and whether its peer rings them.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use tombolo_ivshmem::client::Joined;
//! use tombolo_ivshmem::links::{Config, Door, Links};
//! use tombolo_ivshmem::server::{Dialect, Seat, Shape};
//! use tombolo_ring::ivshmem::region::{Header, Layout, Name};
//! use tombolo_ring::ivshmem::{channel, protocol};
//!
//! // A link of two peers, and its server.
//! let (bytes, folder) = (1 << 20, tempfile::tempdir()?);
//! let path = folder.path().join("control.sock");
//! let name = Name::new("control").ok_or("up to 32 bytes")?;
//! let links = Links::start("demo", None, Box::new(|text| eprintln!("{text}")))?;
//! links.open(Config {
//!     name: "control".into(),
//!     shape: Shape { dialect: Dialect::V1, max_peers: 2, vectors: 2 },
//!     layout: Layout::v1(bytes, 0, 2)?,
//!     region_bytes: bytes,
//!     header: Some(Header { protocol: protocol::CHANNEL, ..Header::network(name, 2) }),
//!     host: None,
//!     helper: None,
//!     doors: vec![Door { path: path.clone(), seat: Seat::Any }],
//! })?;
//! links.serve("control", None)?;
//!
//! // Both peers join, as processes do, and one sends the other a record.
//! let second = Duration::from_secs(1);
//! let shape = channel::Shape { slots: 4, record_bytes: 32, latest_bytes: 0 };
//! let mut a = Joined::connect(&path, second)?.channel(1, shape)?;
//! let mut b = Joined::connect(&path, second)?.channel(0, shape)?;
//! let end = Instant::now() + 10 * second;
//! while !(a.step()? & b.step()?) {
//!     assert!(Instant::now() < end, "the link does not come up");
//!     a.wait(Duration::from_millis(1))?;
//! }
//! a.peer().send(b"position 17")?;
//! let mut to = [0; 32];
//! let record = b.peer().recv(&mut to)?.ok_or("it is there")?;
//! assert_eq!(&to[..record.len], b"position 17");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![warn(unreachable_pub)]

pub mod channel;
pub mod client;
pub mod doorbells;
pub mod end;
pub mod fd_store;
pub mod handshake;
pub mod links;
pub mod peer;
pub mod raw;
pub mod server;
pub mod store;
pub mod v1;
pub mod v2;
