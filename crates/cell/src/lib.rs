//! A unikernel library: an app and this crate make an image that a virtual machine monitor or Xen
//! boots by PVH, with a network over virtio, shared memory (IVSHMEM) or Xen's rings and nothing
//! else of an operating system.
//!
//! An app is an async function that is given a [`Net`]:
//!
//! ```ignore
//! #![no_std]
//! #![no_main]
//! use tombolo_cell::{Net, TcpOptions, TcpStream};
//!
//! tombolo_cell::app!(hello);
//!
//! async fn hello(net: Net) {
//!     net.serve(80, TcpOptions::default(), |mut stream: TcpStream| async move {
//!         let _ = stream.write_all(b"hello\n").await;
//!     });
//! }
//! ```
//!
//! It is built in the workspace `cells/`, whose `.cargo/config.toml` holds the flags that make an
//! image.
//!
//! # The command line
//!
//! | word | meaning | default |
//! | --- | --- | --- |
//! | `ip=dhcp`, `ip=none`, `ip=ADDR/PREFIX` | IPv4 address | `dhcp` |
//! | `gw=ADDR` | IPv4 router | by DHCP |
//! | `ip6=ADDR/PREFIX`, `ip6=none` | the IPv6 address, beside which SLAAC forms none in its prefix; or none but the link-local one, and no router is asked for | by router advertisement (SLAAC) |
//! | `ip.N=`, `gw.N=`, `ip6.N=`, `gw6.N=` | the same of the network device of number N, 1 to 7; the first one has number 0, and no `.N` | as above |
//! | `macs=ADDR[,ADDR]` | the Ethernet addresses of the devices, in the order of their numbers; others come behind | virtio by MMIO, by PCI, then ivshmem links, each as found |
//! | `queues=N` | on Xen: queues of each vif, 1 to 8, and no more than its backend offers | 1 |
//! | `gw6=ADDR` | IPv6 router | by router advertisement |
//! | `dns=ADDR[,ADDR]` | DNS servers; the first is used | by DHCP, else by router advertisement |
//! | `hostname=NAME` | name sent with DHCP (option 12) | `cell` |
//! | `net=virtio`, `net=none`, `net=NAME` | the network: virtio devices only, none, or the ivshmem link of this name | on Xen its vifs; else all virtio devices and all ivshmem links that are networks, up to eight |
//! | `budget=N` | frames taken from the network in one turn, 1 to 4096 | 64 |
//! | `offloads=none` | a network link over shared memory carries frames as they are on a wire, also where the fabric offers more | carried |
//! | `busy_poll_us=N` | how long the cell goes on looking after the last frame before it sleeps, 0 to 1000000 | 0 |
//! | `ivshmem.NAME.id=N` | which peer the cell is on the link NAME, where its device has no doorbell and cannot say | 1 on a network link |
//! | `poll_min_us=N`, `poll_max_us=N` | the shortest and the longest pause between two looks at a link without doorbell, 1 to 1000000 | 50, 200000 |
//! | `tsc_khz=N` | rate of the time-stamp counter, if nothing tells it | found |
//! | `pcimem=ADDR` | where PCI base addresses go that the firmware left out | `0xc0000000` |
//! | `virtio_mmio.device=SIZE@ADDR:IRQ` | a virtio-mmio device; QEMU's microvm (`acpi=off`) and Firecracker add it by themselves | microvm's places are searched |
//! | `verbose` | says at start what was found | |
//! | `selftest=panic`, `stack`, `write`, `execute`, `null` | breaks that rule on purpose, for the tests of this crate | |
//! | `selftest=memory` | compares memcpy and its family with loops over bytes, and ends with success | |
//!
//! Further words are the app's own: [`Net::config`].
//!
//! # Several networks
//!
//! Each network device has an interface of its own, with its own addresses, DHCP client and routes.
//! Listeners and UDP sockets serve all of them. What comes in by a device is answered by it. A
//! connection that the app opens leaves by the first device that has the peer on its network, else
//! by the first that knows a router. Names are asked for at the first device's server, then at the
//! next one's. On Xen the vifs after the first, up to three in all, have only addresses that
//! `ip.N=` and `ip6.N=` give, and all routes lead through the first.
//!
//! # Shared memory without a network
//!
//! Real-time code talks to another machine by a [`Channel`] ([`Net::channel`]) or over a bare
//! [`Link`] ([`Net::link`]), with no IP and no switch between them; `cells/src/bin/control.rs` is
//! an example. docs/ivshmem.md has the picture.
//!
//! # Calls
//!
//! A cell calls a Linux process, or another cell, with a deadline, and serves it, earliest deadline
//! first: [`Calls`], over a link ([`Net::calls`]) or TCP ([`Net::calls_over`]);
//! `cells/src/bin/calc.rs` is an example, docs/rpc.md has the picture.
//!
//! # The end
//!
//! A panic, an exception and a stack overflow print what happened and leave with an [`ExitCode`].
//! As a domain of Xen they count as a crash; `xl shutdown` and `xl reboot` end the cell in order.
//!
//! # What it is not
//!
//! At most 3 GiB of memory are used, even if the machine has more. The cell has one processor, up
//! to eight network devices (on Xen three), no disk, no threads and no user mode: isolation is the
//! hypervisor's.
#![cfg_attr(not(test), no_std)]
#![warn(unreachable_pub)]
// On the host only the pure parts are tested; what runs on the machine alone has no caller there.
#![cfg_attr(test, allow(dead_code))]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod acpi;
mod app;
mod calls;
mod config;
mod device;
mod executor;
mod icmp;
mod ivshmem;
mod loss;
mod machine;
mod neighbor;
mod net;
mod pci;
#[cfg(not(test))]
mod selftest;
mod slaac;
mod stack;
mod tcp;
mod udp;
mod virtio;
mod xen;

pub use calls::{Calls, CallsError};
pub use config::Config;
pub use icmp::Pinger;
pub use ivshmem::channel::{Channel, ChannelError, ChannelOptions, ChannelStats};
pub use ivshmem::link::{Link, LinkError};
pub use machine::console;
pub use machine::exit::{ExitCode, exit};
pub use net::{Net, ResolveError, Sleep};
pub use smoltcp::wire::{IpAddress, IpEndpoint, Ipv4Address, Ipv6Address};
pub use stack::NetStats;
pub use tcp::{TcpError, TcpListener, TcpOptions, TcpStream};
pub use tombolo_calls::session::{ServeOptions, Stats as CallStats};
pub use tombolo_calls::{CallError, CallOptions, Deadline, Reply, Request, Response, schedule::Late};
pub use tombolo_ring::ivshmem::channel::{ChannelError as ChannelLayoutError, Record};
pub use tombolo_ring::mem::{Foreign, ForeignMut};
pub use tombolo_ring::rpc::entry::{Refusal, Status, Token};
pub use udp::{UdpError, UdpSocket};
pub use virtio::net::DeviceStats;
#[cfg(feature = "hostile")]
pub use xen::hostile;

#[cfg(not(test))]
pub(crate) use net::run;
