//! The bypass: traffic between interfaces skips the kernel's forwarding, and arrives as the kernel
//! would have forwarded it.
//!
//! # How it stays true
//! The eBPF programs decide nothing by themselves. A flow's first frames take the kernel's path. A
//! program at the egress, behind routing, netfilter and neighbours, sees the result. From then on
//! the ingress program does the same to the next frames (ebpf/bypass.bpf.c). For each frame the
//! programs read from the kernel's own memory whether that still holds: generations of routes and
//! rules, and the conntrack entry itself (ebpf/validate.h). Each flow's lease is short, so that the
//! kernel sees a frame of it again and again.
//!
//! # What there is
//! - `object`, `types`: the compiled programs, adapted to the running kernel; what the kernel says
//!   of its types.
//! - `layout`, `maps`: what is in the maps.
//! - `place`: pins, owner record, locks, namespaces.
//! - `attachment`, `hook`: attaching and detaching; tc's hooks with tcx or without.
//! - `controller`: the process that supports the programs: traffic flows without it.
//! - `chooser`: which program takes an interface's frames, by what each of them has gained.
//! - `rules`: which firewall rules judge each frame, whose flows therefore stay on the kernel's
//!   path.
//! - `report`, `flows`, `trace`: what `status`, `flows` and `trace` show; `capture`: frames
//!   themselves.
//! - `warnings`: what of that a user should act on.
//! - `probe`: whether all this can be on this machine.
//! - `netlink`, `conntrack`: the kernel's answers about interfaces, neighbours and connections.
//! - `neighbours`: whose flows must be learned again because a neighbour moved.
//! - `settle`: corrects what conntrack holds of TCP connections.
//! - `retrack`: their windows are checked again after `detach`.
//!
//! # Failure
//! Anything that is not understood takes the kernel's path, with a counted reason. The bypass
//! decides to drop only one kind of frame: a FIN or RST that conntrack would call invalid. If every
//! process of it is killed traffic flows on; after `detach` nothing is left.
//!
//! ```
//! match tombolo_bypass::probe::probe() {
//!     Ok(found) => println!("it can be on {}, by {}", found.release, found.hook),
//!     Err(why) => println!("it cannot be: {why}"),
//! }
//! ```

pub mod attachment;
pub mod capture;
pub mod chooser;
pub mod conntrack;
pub mod controller;
pub mod flows;
mod hook;
pub mod layout;
pub mod maps;
mod neighbours;
pub mod netlink;
pub mod object;
pub mod place;
pub mod probe;
pub mod report;
mod retrack;
pub mod rules;
mod settle;
pub mod trace;
pub mod types;
pub mod warnings;
