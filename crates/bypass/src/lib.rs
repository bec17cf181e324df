//! The bypass: traffic between interfaces skips the kernel's forwarding, and arrives as the kernel would have forwarded it.
//!
//! # How it stays true
//! The eBPF programs decide nothing by themselves. A flow's first frames go up the kernel's way; a program at the egress, behind routing,
//! netfilter and neighbours, sees what became of them, and from then on the ingress program does the same to the next
//! ones (ebpf/bypass.bpf.c). Whether that still holds is read per frame from the kernel's own memory: generations of routes and rules, and the
//! conntrack entry itself (ebpf/truth.h). Each flow's lease is short, so that the kernel sees a frame of it again and again.
//!
//! # What there is
//! - `object`, `types`: the compiled programs, made fit for the running kernel; what it says of its types.
//! - `layout`, `maps`: what is in the maps.
//! - `place`: pins, owner record, locks, namespaces.
//! - `attachment`, `hook`: attaching and detaching; tc's hooks with tcx or without.
//! - `keeper`: the process that helps along: it is not needed for traffic to flow.
//! - `rules`: which firewall rules judge each frame, whose flows therefore stay on the kernel's path.
//! - `report`, `flows`, `trace`: what `status`, `flows` and `trace` show; `capture`: frames themselves.
//! - `warnings`: what of that a user should act on.
//! - `probe`: whether all this can be on this machine.
//! - `netlink`, `conntrack`: the kernel's answers about interfaces, neighbours and connections.
//! - `neighbours`: whose flows are to be learned again because it moved.
//! - `settle`: what conntrack holds of TCP connections, made right.
//! - `retrack`: their windows are checked again after `detach`.
//!
//! # Failure
//! Anything that is not understood goes up the kernel's way, with a counted reason; no frame is dropped by a decision of the bypass but a FIN or RST that conntrack would call invalid. If every
//! process of it is killed traffic flows on; after `detach` nothing is left.

pub mod attachment;
pub mod capture;
pub mod chooser;
pub mod conntrack;
pub mod flows;
mod hook;
pub mod keeper;
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
