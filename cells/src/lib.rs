//! What the apps speak, apart from the network: pure, and tested on the host.
#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod calc;
pub mod http;
pub mod iperf;
pub mod latency;
pub mod range;
