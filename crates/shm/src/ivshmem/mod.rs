//! Servers of ivshmem links: they give each peer of a link the region and everybody's doorbells, and say who comes and
//! goes. The traffic itself does not pass here: it goes through the region (`tombolo_ring::ivshmem`).
//!
//! * [`v1`]: messages of stock QEMU's server protocol, and a client's reader of them.
//! * [`v2`]: messages of the protocol of Jailhouse's device in QEMU.
//! * [`server`]: the core for both: who is there, who was told what, what is to be sent; free of I/O.
//! * [`links`]: the shell: the regions, sockets and clients of a fabric's links, in a thread.
//! * [`fd_store`]: a process that holds regions, doorbells and connections while a fabric's daemon restarts.

pub mod fd_store;
pub mod links;
pub mod server;
pub mod v1;
pub mod v2;
