//! QEMU: found, probed, and turned into argument lists.
//!
//! - `probe`: which QEMU there is, and whether KVM really runs a guest (it may open and still not).
//! - `argv`: the pure part: a machine of the file and what the probe found → arguments.
//! - `agent`: commands in a guest, by the QEMU guest agent.
//! - `monitor`: a running machine's power button.

pub mod agent;
pub mod argv;
pub mod cloud_init;
pub mod monitor;
pub mod probe;
