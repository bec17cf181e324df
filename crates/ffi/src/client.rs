//! The exports of clients: connections, calls, loans, shared memory, replies. The header says what
//! each does.
//!
//! # Safety
//! Of every export: each pointer is null, or points to what the header says. Handles and tokens may
//! be any number.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]
#![allow(clippy::missing_safety_doc, reason = "the head says it for all")]

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::time::Duration;

use tombolo_rpc::client::{self, CallError, CallOptions, Client, ConnectOptions, Loan, Reply, Token};
use tombolo_rpc::shared::SharedBuffer;

use crate::general::refusal_code;
use crate::pointer;
use crate::status::{Failure, Status, guard};
use crate::table::Table;
use crate::types::{CallSettings, ConnectSettings, End, Handle, ReplyInfo};

static CLIENTS: Table<Client> = Table::new(1, "client");
static REPLIES: Table<Arc<Reply>> = Table::new(2, "reply");
static LOANS: Table<Loan> = Table::new(3, "loan");
pub(crate) static BUFFERS: Table<SharedBuffer> = Table::new(4, "buffer");

const NO_HANDLE: Handle = Handle { id: 0 };

/// Tokens cross as their bits.
fn token(bits: u64) -> Token {
    Token::new(bits as u32, (bits >> 32) as u32)
}

/// # Safety
/// As for every export.
unsafe fn connect_options(options: *const ConnectSettings) -> Result<ConnectOptions, Failure> {
    // SAFETY: as for this function.
    unsafe {
        let settings = pointer::settings("options", options)?;
        settings.options(pointer::optional_text("options.folder", settings.folder)?)
    }
}

/// # Safety
/// As for every export.
unsafe fn call_options(options: *const CallSettings) -> Result<CallOptions, Failure> {
    // SAFETY: as for this function.
    unsafe { pointer::settings("options", options) }?.options()
}

/// Submits, and gives out the token of what was.
///
/// # Safety
/// As for every export.
unsafe fn put_token(to: *mut u64, submit: impl FnOnce() -> Result<Token, Failure>) -> Result<Status, Failure> {
    // SAFETY: as for this function.
    unsafe {
        pointer::put("token", to, 0)?;
        pointer::put("token", to, submit()?.bits())?;
    }
    Ok(Status::Ok)
}

/// Keeps memory that is lent to the caller, and gives out its handle and where it is.
///
/// # Safety
/// As for every export.
unsafe fn put_memory<T: Send + Sync>(
    (table, what): (&'static Table<T>, &str),
    (handle, data): (*mut Handle, *mut *mut c_void),
    make: impl FnOnce() -> Result<T, Failure>,
    at: impl FnOnce(&T) -> *mut u8,
) -> Result<Status, Failure> {
    // SAFETY: as for this function.
    unsafe {
        pointer::put(what, handle, NO_HANDLE)?;
        pointer::put("data", data, std::ptr::null_mut())?;
        let made = make()?;
        let at = at(&made);
        pointer::put(what, handle, Handle { id: table.add(made)? })?;
        pointer::put("data", data, at.cast())?;
    }
    Ok(Status::Ok)
}

/// Gives a reply out, if there is one.
///
/// # Safety
/// As for every export.
unsafe fn put_reply(to: *mut Handle, reply: Result<Reply, CallError>) -> Result<Status, Failure> {
    let id = REPLIES.add(Arc::new(reply?))?;
    // SAFETY: as for this function.
    unsafe { pointer::put("reply", to, Handle { id }) }?;
    Ok(Status::Ok)
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_connect(
    name: *const c_char,
    options: *const ConnectSettings,
    client: *mut Handle,
) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        pointer::put("client", client, NO_HANDLE)?;
        let options = connect_options(options)?;
        let id = CLIENTS.add(Client::connect_with(pointer::text("name", name)?, &options)?)?;
        pointer::put("client", client, Handle { id })?;
        Ok(Status::Ok)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_close(client: Handle) -> i32 {
    guard(|| CLIENTS.take(client.id).map(|_| Status::Ok))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_call(
    client: Handle,
    data: *const c_void,
    len: usize,
    options: *const CallSettings,
    reply: *mut Handle,
) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        pointer::put("reply", reply, NO_HANDLE)?;
        let (client, options) = (CLIENTS.get(client.id)?, call_options(options)?);
        let token = client.submit_view(pointer::view("data", data, len)?, &options)?;
        put_reply(reply, client.wait(token, options.timeout))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_submit(
    client: Handle,
    data: *const c_void,
    len: usize,
    options: *const CallSettings,
    token: *mut u64,
) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        put_token(token, || {
            let (client, options) = (CLIENTS.get(client.id)?, call_options(options)?);
            Ok(client.submit_view(pointer::view("data", data, len)?, &options)?)
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_poll(client: Handle, token: u64, reply: *mut Handle) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        pointer::put("reply", reply, NO_HANDLE)?;
        match CLIENTS.get(client.id)?.poll(self::token(token)) {
            Some(done) => put_reply(reply, done),
            None => Ok(Status::Pending),
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_wait(client: Handle, token: u64, timeout_ns: u64, reply: *mut Handle) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        pointer::put("reply", reply, NO_HANDLE)?;
        put_reply(reply, CLIENTS.get(client.id)?.wait(self::token(token), Duration::from_nanos(timeout_ns)))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_wait_any(
    client: Handle,
    tokens: *const u64,
    count: usize,
    timeout_ns: u64,
    which: *mut usize,
) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        pointer::put("which", which, 0)?;
        let tokens: Vec<Token> = pointer::slice("tokens", tokens, count)?.iter().map(|bits| token(*bits)).collect();
        match CLIENTS.get(client.id)?.wait_any(&tokens, Duration::from_nanos(timeout_ns)) {
            Some(at) => pointer::put("which", which, at).map(|()| Status::Ok),
            None => Ok(Status::Pending),
        }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_wait_all(
    client: Handle,
    tokens: *const u64,
    count: usize,
    timeout_ns: u64,
    ends: *mut End,
) -> i32 {
    // SAFETY: as for every export; there are `count` ends.
    guard(|| unsafe {
        let tokens: Vec<Token> = pointer::slice("tokens", tokens, count)?.iter().map(|bits| token(*bits)).collect();
        let client = CLIENTS.get(client.id)?;
        if count > 0 {
            // Before anything is waited for, since an error after that could not be reported.
            pointer::put("ends", ends, End { status: Status::Pending as i32, refusal: 0, reply: NO_HANDLE })?;
        }
        for (at, end) in client.wait_all(&tokens, Duration::from_nanos(timeout_ns)).into_iter().enumerate() {
            let end = match end.map_err(Failure::from).and_then(|reply| REPLIES.add(Arc::new(reply))) {
                Ok(id) => End { status: Status::Ok as i32, refusal: 0, reply: Handle { id } },
                Err(Failure { status, refusal, .. }) => {
                    End { status: status as i32, refusal: refusal_code(refusal), reply: NO_HANDLE }
                }
            };
            pointer::put("ends", ends.add(at), end)?;
        }
        Ok(Status::Ok)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_cancel(client: Handle, token: u64) -> i32 {
    guard(|| {
        if CLIENTS.get(client.id)?.cancel(self::token(token)) { Ok(Status::Ok) } else { Err(CallError::Unknown.into()) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_loan_new(client: Handle, len: u64, loan: *mut Handle, data: *mut *mut c_void) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        let text = "the connection's memory has no room for it now; use a larger arena_bytes, or a buffer";
        let lend = || CLIENTS.get(client.id)?.loan(len).ok_or_else(|| Failure::new(Status::NoRoom, text));
        put_memory((&LOANS, "loan"), (loan, data), lend, |lent| lent.view().as_mut_ptr())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_loan_submit(
    client: Handle,
    loan: Handle,
    options: *const CallSettings,
    token: *mut u64,
) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        let loan = LOANS.take(loan.id)?;
        put_token(token, || Ok(CLIENTS.get(client.id)?.submit_loan(loan, &call_options(options)?)?))
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_loan_free(loan: Handle) -> i32 {
    guard(|| LOANS.take(loan.id).map(|_| Status::Ok))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_buffer_new(
    bytes: u64,
    populate: i32,
    buffer: *mut Handle,
    data: *mut *mut c_void,
) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        let make =
            || SharedBuffer::new(bytes, populate != 0).map_err(|error| Failure::new(Status::Memory, error.to_string()));
        put_memory((&BUFFERS, "buffer"), (buffer, data), make, |made| made.view().as_mut_ptr())
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_buffer_of_memfd(
    fd: i32,
    buffer: *mut Handle,
    data: *mut *mut c_void,
    bytes: *mut u64,
    writable: *mut i32,
) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        pointer::put("bytes", bytes, 0)?;
        pointer::put("writable", writable, 0)?;
        let (mut len, mut may_write) = (0, false);
        let make = || {
            let made = SharedBuffer::of_memfd(pointer::descriptor("fd", fd)?)?;
            (len, may_write) = (made.len(), made.is_writable());
            Ok(made)
        };
        put_memory((&BUFFERS, "buffer"), (buffer, data), make, |made| made.read().as_ptr().cast_mut())?;
        pointer::put("bytes", bytes, len)?;
        pointer::put("writable", writable, may_write.into())?;
        Ok(Status::Ok)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_buffer_submit(
    client: Handle,
    buffer: Handle,
    offset: u64,
    len: u64,
    options: *const CallSettings,
    token: *mut u64,
) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        put_token(token, || {
            let (client, buffer) = (CLIENTS.get(client.id)?, BUFFERS.get(buffer.id)?);
            Ok(client.submit_shared(&buffer, offset, len, &call_options(options)?)?)
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_buffer_free(buffer: Handle) -> i32 {
    guard(|| BUFFERS.take(buffer.id).map(|_| Status::Ok))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_reply_get(reply: Handle, info: *mut ReplyInfo) -> i32 {
    // SAFETY: as for every export. The bytes stay where they are: the table's reply owns them or
    // keeps them mapped.
    guard(|| unsafe {
        let reply = REPLIES.get(reply.id)?;
        let view = reply.view();
        let found = ReplyInfo {
            data: view.as_ptr().cast(),
            len: view.len() as u64,
            queued_ns: reply.queued_ns(),
            service_ns: reply.service_ns(),
            code: reply.code(),
            late: reply.is_late().into(),
        };
        pointer::put("info", info, found)?;
        Ok(Status::Ok)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_reply_check(reply: Handle) -> i32 {
    guard(|| if REPLIES.get(reply.id)?.is_current() { Ok(Status::Ok) } else { Err(CallError::Reclaimed.into()) })
}

/// Copies to C's memory as much as is asked for, after checking that it has the room.
///
/// # Safety
/// `to` is null or may be written for `room` bytes; `needed` as for every export.
unsafe fn fill(
    what: &str,
    to: *mut u8,
    room: usize,
    needed: *mut usize,
    len: usize,
    copy: impl FnOnce(tombolo_ring::mem::ForeignMut<'_>),
) -> Result<(), Failure> {
    // SAFETY: as for this function.
    unsafe { pointer::put("how many", needed, len) }?;
    if len > room {
        return Err(Failure::new(Status::NoRoom, format!("argument {what}: {len} bytes, and room for {room}")));
    }
    if len > 0 {
        // SAFETY: `room` bytes may be written, and there are no more than that.
        copy(unsafe { pointer::window(what, to, len) }?);
    }
    Ok(())
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_reply_copy(reply: Handle, to: *mut c_void, room: usize, copied: *mut usize) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        let reply = REPLIES.get(reply.id)?;
        let view = reply.view();
        fill("to", to.cast(), room, copied, view.len(), |to| {
            view.copy_to(to);
        })?;
        if reply.is_current() { Ok(Status::Ok) } else { Err(CallError::Reclaimed.into()) }
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_reply_free(reply: Handle) -> i32 {
    guard(|| REPLIES.take(reply.id).map(|_| Status::Ok))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_report(
    name: *const c_char,
    options: *const ConnectSettings,
    to: *mut c_char,
    room: usize,
    needed: *mut usize,
) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        let report = client::report(pointer::text("name", name)?, &connect_options(options)?)?;
        let mut text =
            serde_json::to_vec(&report).map_err(|error| Failure::new(Status::Protocol, error.to_string()))?;
        text.push(0);
        fill("to", to.cast(), room, needed, text.len(), |to| {
            to.write_from(&text);
        })?;
        Ok(Status::Ok)
    })
}
