//! The fabric file: what `tombolo.toml` says, read with positions, checked as a whole, before
//! anything is started.
//!
//! Purpose: text → [`Fabric`], or every complaint at once. A complaint names the file, line and
//! column, the key, what was expected, what was found, and a near name if one fits. It is not the
//! plan: no path is opened for writing, no address is bound; [`crate::plan`] turns a `Fabric` into
//! ports, processes and rules.
//!
//! - `schema`: the one table of sections and keys. Unknown keys are judged against it, and
//!   docs/fabric-file.md is tested against it.
//! - `json_schema`: the same table for editors.
//! - `read`: a section reader that takes typed values out of a TOML table and keeps their
//!   positions.
//! - `parse`: the sections, one function each.
//! - `names`: the names in a text that may be faulty, for completion.
//! - `places`: where the keys are, for faults that only the machine shows ([`crate::preflight`]).
//! - `across`: services that cross to other machines.
//! - `hosts`: one file for several machines.
//! - `boot`: what clients boot from the network.
//! - `traffic`: what limits a port, and changes of it while it runs.
//! - `check`: what only the whole file can say (unknown networks, doubled addresses, missing
//!   images).

mod across;
mod boot;
mod check;
mod hosts;
pub mod json_schema;
mod model;
mod names;
mod parse;
mod places;
mod policy;
mod problem;
mod read;
pub mod schema;
mod traffic;

pub use across::{Export, Import, Proof, pick_word};
pub(crate) use boot::boot_text;
pub use hosts::{Elsewhere, Here, Home, Host, SAY_WHICH, SpanDecl, Which, span_settings};
pub(crate) use model::overlap;
pub use model::{
    Accel, Attach, Boot, Contained, Dhcp, Fabric, Forward, Guard, Image, Ip6, LinkDecl, Machine, MachineKind,
    MachineType, MirrorDecl, Nic, PortDecl, PortKind, Prefix6, Proto, Restart, RuleDecl, Subnet, Tap, Target, Traffic,
    Uplink, Uplink6, Vxlan, Worker,
};
pub use model::{Ipv6, Mac, Network};
pub(crate) use names::MEMBERS;
pub use names::names;
pub(crate) use parse::find_app;
pub use parse::{add, apps, load, load_on, name_of, parse, parse_on};
pub use places::{Places, Readable, load_with_places, parse_with_places};
pub use policy::OUTSIDE;
pub use problem::{FileError, Of, Part, Problem, nearest, text_of};
pub(crate) use traffic::class_word;
pub use traffic::rate_change;
