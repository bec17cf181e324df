//! The fabric of one machine: file, plan, running state, API.
//!
//! * [`file`](mod@file): what `tombolo.toml` says, with every fault placed and told at once.
//! * [`plan`](mod@plan): what that comes to on this machine; pure.
//! * [`difference`]: what a changed file means for a fabric that runs; pure. [`preflight`]: what it
//!   needs of this machine.
//! * [`config`]: the running configuration as JSON, and merge patches that change it; pure.
//! * [`fabric`]: the plan carried out, kept, changed, taken down.
//! * [`api`]: HTTP and JSON on a Unix socket, and its client.
//! * [`qemu`], [`xen`], [`console`], [`kernel`], [`routes`], [`process`], [`rundir`]: the outside
//!   things that a fabric drives or leaves behind.
//! * [`bridge`]: the process that passes calls on between a link and the services of this machine.
//! * [`relay`], [`resolver`]: sockets of this machine for forwards, and for names that guests ask
//!   for.
//! * [`log`](mod@log), [`stamps`], [`moment`]: what is written for people to read, and when it was.
//! * [`blocking`]: work that may block, on threads of its own.
//! * [`confine`]: takes from the daemon and its machines what they do not need.
//! * [`daemon`]: a fabric with its API, from start to end, signals included; [`notify`]: what a
//!   service manager hears of it.
//! * [`web`]: the page that shows a fabric in a browser, a client of the API.
//! * [`doctor`]: what this machine can do, probed for real.
//!
//! ```
//! use std::path::Path;
//! use tombolo_host::file;
//!
//! let text = "name = \"demo\"\n[network.lan]\n[port.guest]\nkind = \"stream\"\n";
//! let fabric = file::parse(text, Path::new("tombolo.toml"))?;
//! assert_eq!((fabric.name.as_str(), fabric.networks[0].mtu), ("demo", 1500));
//! let faults = file::parse("[network.lan]\nmtuu = 9000\n", Path::new("tombolo.toml")).unwrap_err();
//! assert!(faults.to_string().contains("mtu"));
//! # Ok::<(), file::FileError>(())
//! ```
#![warn(unreachable_pub)]

pub mod api;
pub mod blocking;
pub mod bridge;
pub mod config;
pub mod confine;
pub mod console;
pub mod daemon;
pub mod difference;
pub mod doctor;
pub mod fabric;
pub mod file;
mod hash;
pub mod kernel;
pub mod log;
mod members;
pub mod moment;
pub mod notify;
pub mod plan;
pub mod preflight;
pub mod process;
pub mod qemu;
pub mod relay;
pub mod resolver;
pub mod routes;
mod run;
pub mod rundir;
pub mod stamps;
pub mod web;
pub mod xen;

/// The form of captures, for commands that write some which no port makes.
pub use tombolo_shm::environment;
pub use tombolo_switch::pcapng;
