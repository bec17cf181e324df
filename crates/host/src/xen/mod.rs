//! Xen's toolstack, `xl`: machines of the fabric as domains.
//!
//! # Purpose
//! A cell or VM with `attach = "xen"` is a PVH domain in place of a QEMU process. `xl create -F -c`
//! creates it and stays: it copies the console to its standard streams and ends when the domain has
//! ended. So `xl` is the machine's process for all that the fabric does with processes: it is
//! watched, adopted by the next daemon, and reported with its last lines.
//!
//! When a domain was suspended, its `xl` has no more to do with it. After `xl save` it is gone,
//! until an `xl restore`; after `xl save -c` it goes on at once. From then on `tombolo
//! domain-watch` is the machine's process, which does the same.
//!
//! - `config`: the pure part: a machine of the file → the text that `xl` gets.
//! - `toolstack`: finds `xl`, finds and destroys domains, and reads from its log how a domain
//!   ended.
//! - `watcher`: `tombolo domain-watch`.
//!
//! # Invariants
//! - A domain is known by its UUID, which depends on the runtime folder, the fabric and the
//!   machine. A domain of the same name that somebody else made is never destroyed.
//! - The owner record holds the domain before `xl` starts, until it is gone; that of a saved one
//!   stays. `xl` that is killed leaves its domain running; the fabric then destroys it.
//! - A machine is saved while the record holds its domain and its log ends with the suspension.

pub mod config;
pub mod toolstack;
pub mod watcher;
