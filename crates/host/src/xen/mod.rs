//! Xen's toolstack, `xl`: machines of the fabric as domains.
//!
//! # Purpose
//! A cell or VM with `attach = "xen"` is a PVH domain in place of a QEMU process. `xl create -F -c` creates it and stays: it
//! copies the console to its standard streams and ends when the domain has ended. So `xl` is the machine's process for all
//! that the fabric does with processes: it is watched, adopted by the next daemon, and reported with its last lines.
//!
//! - `config`: the pure part: a machine of the file → the text that `xl` gets.
//! - `toolstack`: finds `xl`, finds and destroys domains, and reads from its log how a domain ended.
//!
//! # Invariants
//! - A domain is known by its UUID, which depends on the runtime folder, the fabric and the machine. A domain of the same
//!   name that somebody else made is never destroyed.
//! - The owner record holds the domain before `xl` starts, until it is gone. `xl` that is killed leaves its domain
//!   running; the fabric then destroys it.

pub mod config;
pub mod toolstack;
