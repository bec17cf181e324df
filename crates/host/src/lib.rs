//! The fabric of one machine: file, plan, running state, API.

pub mod api;
pub mod file;
pub mod plan;
pub mod process;
pub mod qemu;
pub mod rundir;
