//! Typed services over [`tombolo_rpc`]: what the code that `tombolo-rpc-build` generates from a
//! `.proto` file is made of.
//!
//! For each service of the file there is a trait for who serves and a client for who calls:
//!
//! ```text
//! service Calculator { rpc Add(Operands) returns (Number); }
//!
//! trait Calculator      { fn add(&self, context: &Context<'_>, request: Operands) -> Result<Number, Status>; }
//! struct CalculatorServer<S: Calculator>, to be added to a Router, which is the handler of a tombolo_rpc Service
//! struct CalculatorClient { fn add(&self, request: &Operands, options: &CallOptions) -> Result<Number, Error>; submit_add; add_async }
//! ```
//!
//! A request carries the method's full name before the encoded message (`envelope`). A reply's code
//! is a [`Code`]; with [`Code::Ok`] its bytes are the encoded message, else a text in UTF-8.
//! Deadlines, admission and all else are those of the call.
//!
//! # Failure
//! Everything that comes from the other side is decoded with bounds checked: bytes that are no
//! request of this kind, an unknown service or method, and a message that cannot be decoded are
//! answered with a status of their own, and nothing is called.
//!
//! # Limits
//! Unary methods only. Messages are encoded and decoded by copy.

mod client;
pub mod envelope;
mod server;
mod status;

pub use client::{Caller, Error, Pending};
pub use server::{Call, Context, Methods, Router, unary};
pub use status::{Code, Status};
// What generated code, and its users, need besides.
pub use prost;
pub use prost_types;
pub use tombolo_rpc;
