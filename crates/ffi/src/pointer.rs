//! Pointers from C: the only place where they are followed.
//!
//! What a pointer from C points to cannot be known. Checked are null, alignment and length; that
//! the rest is as the header says is the C side's promise, and the `# Safety` of each function
//! here. References made of them live no longer than the export that got them.
//!
//! The answer to a request is the exception: what C holds of it is compared with what this thread
//! serves, and never followed.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_rpc::provider::{Handler, Reply, Request};

use crate::status::{Failure, Status};
use crate::types::{AnswerMark, CallSettings, ConnectSettings, RequestInfo, ServiceSettings, Stats};

fn argument<T>(what: &str, problem: impl std::fmt::Display) -> Result<T, Failure> {
    Err(Failure::new(Status::Argument, format!("argument {what}: {problem}")))
}

/// A pointer that is neither null nor unaligned.
fn checked<T>(what: &str, from: *const T) -> Result<*const T, Failure> {
    if from.is_null() {
        return argument(what, "null");
    }
    if !from.is_aligned() {
        return argument(what, format_args!("{from:p} is not aligned to {} bytes", align_of::<T>()));
    }
    Ok(from)
}

/// `len` elements; none may be at null.
///
/// # Safety
/// They are there, initialised, and nothing writes them during `'a`.
pub(crate) unsafe fn slice<'a, T: Copy>(what: &str, from: *const T, len: usize) -> Result<&'a [T], Failure> {
    if len == 0 {
        return Ok(&[]);
    }
    let from = checked(what, from)?;
    match len.checked_mul(size_of::<T>()) {
        // SAFETY: not null and aligned (`checked`), at most isize::MAX bytes; the rest is the
        // caller's promise.
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(unsafe { std::slice::from_raw_parts(from, len) }),
        _ => argument(what, format_args!("{len} of them are more than memory holds")),
    }
}

/// `len` bytes to read, which another party may write meanwhile: a request's or a reply's are,
/// where C passes them on.
///
/// # Safety
/// They may be read during `'a`.
pub(crate) unsafe fn view<'a>(what: &str, from: *const c_void, len: usize) -> Result<Foreign<'a>, Failure> {
    if len == 0 {
        return Ok(Foreign::empty());
    }
    match NonNull::new(from.cast_mut().cast()) {
        // SAFETY: the caller's promise; no reference is made of them.
        Some(from) if isize::try_from(len).is_ok() => Ok(unsafe { Foreign::new(from, len) }),
        Some(_) => argument(what, format_args!("{len} bytes are more than memory holds")),
        None => argument(what, "null"),
    }
}

/// A text that ends with 0.
///
/// # Safety
/// It does, and nothing writes it during `'a`.
pub(crate) unsafe fn text<'a>(what: &str, from: *const c_char) -> Result<&'a str, Failure> {
    let from = checked(what, from)?;
    // SAFETY: not null; the rest is the caller's promise.
    let text = unsafe { CStr::from_ptr(from) };
    text.to_str().or_else(|error| argument(what, format_args!("not UTF-8: {error}")))
}

/// A text, or none at null.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn optional_text<'a>(what: &str, from: *const c_char) -> Result<Option<&'a str>, Failure> {
    // SAFETY: as for this function.
    if from.is_null() { Ok(None) } else { unsafe { text(what, from) }.map(Some) }
}

/// Writes a result.
///
/// # Safety
/// `to` is null or may be written as a `T`.
pub(crate) unsafe fn put<T>(what: &str, to: *mut T, value: T) -> Result<(), Failure> {
    let to = checked(what, to)?.cast_mut();
    // SAFETY: not null and aligned (`checked`); the rest is the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// `len` bytes to write to. A view, since a reference would promise that they are initialised.
///
/// # Safety
/// `to` is null or they may be written during `'a`.
pub(crate) unsafe fn window<'a>(what: &str, to: *mut u8, len: usize) -> Result<ForeignMut<'a>, Failure> {
    match NonNull::new(to) {
        // SAFETY: the caller's promise.
        Some(to) => Ok(unsafe { ForeignMut::new(to, len) }),
        None => argument(what, "null"),
    }
}

/// A duplicate of a descriptor of C's.
///
/// # Safety
/// Nothing else closes that descriptor's number meanwhile.
pub(crate) unsafe fn descriptor(what: &str, fd: i32) -> Result<OwnedFd, Failure> {
    if fd < 0 {
        return argument(what, format_args!("{fd}, expected an open descriptor"));
    }
    // SAFETY: not -1, and used for one call only, which says so where it is not open; the rest is
    // the caller's promise.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let copied = borrowed.try_clone_to_owned();
    copied.or_else(|error| argument(what, format_args!("{fd}, expected an open descriptor: {error}")))
}

/// A struct of the header that begins with its size as a u32, and whose fields may all be 0.
///
/// # Safety
/// All that is so.
pub(crate) unsafe trait Settings: Copy {}
// SAFETY: `repr(C)`, `size: u32` comes first, and all fields are integers and raw pointers.
unsafe impl Settings for ConnectSettings {}
// SAFETY: as above.
unsafe impl Settings for CallSettings {}
// SAFETY: as above.
unsafe impl Settings for ServiceSettings {}
// SAFETY: as above.
unsafe impl Settings for Stats {}

/// The size that a struct says it has is the one that this library knows.
///
/// # Safety
/// `from` is null or has its first field.
pub(crate) unsafe fn check_size<T: Settings>(what: &str, from: *const T) -> Result<(), Failure> {
    let from = checked(what, from)?;
    // SAFETY: not null and aligned (`checked`), and a u32 comes first (`Settings`).
    let size = unsafe { from.cast::<u32>().read() };
    if size as usize == size_of::<T>() {
        return Ok(());
    }
    argument(what, format_args!("its size is {size}, expected {}: set it with the macro of tombolo.h", size_of::<T>()))
}

/// Options, or all zeroes at null.
///
/// # Safety
/// `from` is null or has as many bytes as its first field says.
pub(crate) unsafe fn settings<T: Settings>(what: &str, from: *const T) -> Result<T, Failure> {
    if from.is_null() {
        // SAFETY: all fields may be 0 (`Settings`).
        return Ok(unsafe { MaybeUninit::zeroed().assume_init() });
    }
    // SAFETY: as for this function.
    unsafe { check_size(what, from) }?;
    // SAFETY: not null, aligned and as large as a `T` (`check_size`); all its fields are plain
    // (`Settings`).
    Ok(unsafe { from.read() })
}

thread_local! {
    /// The reply to the request that this thread serves.
    static ANSWER: Cell<*mut Reply<'static>> = const { Cell::new(ptr::null_mut()) };
}

/// Whether this thread serves a request.
pub(crate) fn in_handler() -> bool {
    !ANSWER.get().is_null()
}

/// Does something with the answer of the request that this thread serves, if `mark` is that.
pub(crate) fn with_answer(
    mark: *mut AnswerMark,
    body: impl FnOnce(&mut Reply<'_>) -> Result<Status, Failure>,
) -> Result<Status, Failure> {
    let answer = ANSWER.get();
    if answer.is_null() || !ptr::addr_eq(answer, mark) {
        let text = "this is not the answer to the request that this thread serves; answers end with their handlers";
        return Err(Failure::new(Status::UnknownHandle, text));
    }
    // SAFETY: `serve` put it there, from a `&mut` that it does not use until the handler has
    // returned, which it has not, since it is on this thread's stack. No other reference is made of
    // it meanwhile: `body` is ours and calls nothing of C's.
    body(unsafe { &mut *answer })
}

/// `tombolo_handler`
pub(crate) type Function = unsafe extern "C" fn(*mut c_void, *const RequestInfo, *mut AnswerMark) -> i32;

/// A handler of C's.
pub(crate) struct Callback {
    function: Function,
    context: *mut c_void,
}

// SAFETY: the context is C's, is passed on and never followed; that several threads may use it is
// what the header asks of its owner.
unsafe impl Send for Callback {}
// SAFETY: as above.
unsafe impl Sync for Callback {}

impl Callback {
    /// # Safety
    /// The function is as the header asks, until the service has been stopped.
    pub(crate) unsafe fn new(function: Function, context: *mut c_void) -> Callback {
        Callback { function, context }
    }
}

/// Takes the answer from the thread, however the handler ends.
struct Serving;

impl Drop for Serving {
    fn drop(&mut self) {
        ANSWER.set(ptr::null_mut());
    }
}

impl Handler for Callback {
    fn serve(&self, request: &Request<'_>, reply: &mut Reply<'_>) {
        let caller = request.caller();
        let info = RequestInfo {
            data: request.payload().as_ptr().cast(),
            len: request.len() as u64,
            deadline_ns: request.deadline_ns().unwrap_or(u64::MAX),
            trace: request.trace(),
            queued_ns: request.queued_ns(),
            pid: caller.pid,
            uid: caller.uid,
            gid: caller.gid,
            reserved: 0,
        };
        let mark: *mut Reply<'_> = reply;
        ANSWER.set(mark.cast());
        let serving = Serving;
        // SAFETY: `Callback::new` was promised a function as the header has it, and `info` outlives
        // the call.
        let status = unsafe { (self.function)(self.context, &info, mark.cast()) };
        drop(serving);
        if status != 0 {
            // How a handler says that it failed. No message of a panic: it is none.
            std::panic::resume_unwind(Box::new("the handler failed"));
        }
    }
}
