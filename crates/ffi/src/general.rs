//! What belongs to neither clients nor services: statuses in words, the clock, the version.
//!
//! # Safety
//! Nothing here follows a pointer; `unsafe` is the unmangled name.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

use std::ffi::c_char;

use tombolo_ring::rpc::entry::Refusal;
use tombolo_rpc::clock;

use crate::status::{LAST, Status};

/// `TOMBOLO_ABI_VERSION`
pub(crate) const ABI_VERSION: u32 = 1;

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_abi_version() -> u32 {
    ABI_VERSION
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_status_name(status: i32) -> *const c_char {
    let known = Status::ALL.iter().find(|(known, _)| *known as i32 == status);
    known.map_or(c"unknown", |(_, name)| name).as_ptr()
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_error_text() -> *const c_char {
    // The text lives until this thread's next failure replaces it.
    LAST.try_with(|last| last.borrow().text.as_ptr()).unwrap_or(c"".as_ptr())
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_error_refusal() -> i32 {
    let refusal = LAST.try_with(|last| last.borrow().refusal).ok().flatten();
    refusal_code(refusal)
}

/// A `tombolo_refusal`.
pub(crate) fn refusal_code(refusal: Option<Refusal>) -> i32 {
    // `Refusal::ALL` is in the order of the codes, from 1.
    refusal.and_then(|reason| Refusal::ALL.iter().position(|known| *known == reason)).map_or(0, |at| at as i32 + 1)
}

/// See the header.
#[unsafe(no_mangle)]
pub extern "C" fn tombolo_now_ns() -> u64 {
    clock::now_ns()
}
