//! The fabric of one machine: file, plan, running state, API.

pub mod file;
pub mod qemu;
