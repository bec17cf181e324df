//! Calls with deadlines between a Linux process and a cell, a guest, or a process of another
//! machine.
//!
//! * [`Calls`]: one side of a link or of a TCP connection: it calls the peer and serves it,
//!   blocking or not, from any thread.
//! * [`bridge`]: a service of this machine whose requests a cell serves, and the reverse: `tombolo
//!   service bridge`.
//! * [`machine`]: services that one machine exports to others, over TLS: `tombolo service export`
//!   and `import`.
//!
//! ```no_run
//! use std::time::Duration;
//! use tombolo_remote::{CallOptions, Calls, Response, ServeOptions};
//!
//! let calls = Calls::join("/run/…/calls.sock", Duration::from_secs(5), &ServeOptions::default())?;
//! let server = calls.serve(|request| Response::new(request.bytes.clone()))?;
//! if calls.wait_up(Duration::from_secs(10)) {
//!     let reply = calls.call(b"6 * 7", &CallOptions::within(Duration::from_millis(5)))?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What is decided is in [`tombolo_calls`], which cells use as well; docs/rpc.md has the picture.
#![warn(unreachable_pub)]

pub mod bridge;
mod calls;
pub mod machine;
mod transport;

pub use calls::{Calls, Server};
pub use tombolo_calls::session::{ServeOptions, Stats};
pub use tombolo_calls::{CallError, CallOptions, Deadline, Reply, Request, RequestId, Response};
pub use tombolo_ring::rpc::entry::{Refusal, Status, Token};
pub use transport::RemoteError;
