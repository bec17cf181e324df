//! The C ABI of [`tombolo_rpc`]: `libtombolo.so` and `libtombolo.a`, with
//! `bindings/include/tombolo.h` as their header.
//!
//! * [`client`]: the exports of clients: connections, calls, loans, shared memory, replies.
//! * [`service`]: those of services: registration, answers, statistics.
//! * [`general`]: statuses in words, the clock, the version.
//!
//! # Invariants
//! * What crosses the boundary is C's: numbers, pointers, `repr(C)` structs (`types`). The header
//!   is written by hand, for those who read it; `header` (a test) compares each of its prototypes,
//!   constants and struct layouts with the source.
//! * A handle is a number that is looked up (`table`), so that a wrong one is an error and no
//!   access to memory.
//! * Each export runs inside [`status::guard`]: a panic becomes `TOMBOLO_PANIC`, an error a status
//!   with its text kept for the thread.
//! * A pointer from C is used in `pointer` only; it cannot be checked beyond null, alignment and
//!   length.
//!
//! # Limits
//! 16 million handles of a kind at a time. A handler that throws through its `extern "C"` frame
//! ends the process.
//!
//! A program that uses it is in `bindings/examples`, for C, C++ and Python: a library of C's kind
//! has no examples of Rust.

pub mod client;
pub mod general;
#[cfg(test)]
mod header;
mod pointer;
pub mod service;
mod status;
mod table;
#[cfg(test)]
mod tests;
mod types;
