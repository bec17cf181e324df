//! Views over memory that a peer may write at any moment, and the ring dialects spoken over it.
//!
//! Everything here is `no_std` and free of I/O: bytes in shared memory and indices in, decisions
//! out. Both ends of each dialect are here (the device side for the fabric, the driver side for
//! cells and for tests), and all memory ordering of the project lives here.
//!
//! * [`mem`]: the one module that touches foreign memory. No Rust reference ever points into it.
//! * [`checksum`]: the internet checksum.
//! * [`ivshmem`]: links over IVSHMEM: regions, states, frames between two peers, and records for
//!   real-time code.
//! * [`rpc`]: calls with deadlines: the layout of a connection and its rings, client's end and
//!   provider's end.
//! * [`virtio`]: the split virtqueue of VirtIO 1.x, device side and driver side, and the header of
//!   virtio-net.
//! * [`vxlan`]: the header between a UDP datagram and the Ethernet frame in it.
//! * [`xen`]: Xen's network rings, frontend and backend, XenStore's messages, and the states of the
//!   xenbus handshake.
//!
//! ```
//! use tombolo_ring::checksum;
//! use tombolo_ring::vxlan::{self, Vni};
//!
//! let packet = [0x08, 0, 0, 0, 0, 0, 42, 0];
//! assert_eq!(vxlan::parse(&packet).unwrap(), Vni::new(42).unwrap());
//! // Of an IPv4 header with its checksum the sum is all ones (RFC 1071).
//! let header = [0x45, 0, 0, 20, 0, 0, 0, 0, 64, 17, 0x66, 0xd7, 10, 0, 0, 1, 10, 0, 0, 2];
//! assert_eq!(checksum::sum(&header), 0xffff);
//! ```
#![no_std]

#[cfg(any(test, loom))]
extern crate std;

pub mod checksum;
pub mod ivshmem;
pub mod mem;
pub mod rpc;
pub mod virtio;
pub mod vxlan;
pub mod xen;
