//! The exports of services: registration, answers, statistics. The header says what each does.
//!
//! # Safety
//! Of every export: each pointer is null, or points to what the header says. Handles may be any
//! number, and so may a `tombolo_answer *`, which is never followed.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]
#![allow(clippy::missing_safety_doc, reason = "the head says it for all")]

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use tombolo_rpc::provider::{NoReplyMemory, Service};

use crate::client::BUFFERS;
use crate::pointer::{self, Callback, Function};
use crate::status::{Failure, Status, guard};
use crate::table::Table;
use crate::types::{AnswerMark, Handle, ServiceSettings, Stats};

static SERVICES: Table<Arc<Service>> = Table::new(5, "service");

impl From<NoReplyMemory> for Failure {
    fn from(full: NoReplyMemory) -> Failure {
        Failure::new(Status::NoRoom, full.to_string())
    }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_register(
    name: *const c_char,
    options: *const ServiceSettings,
    handler: Option<Function>,
    context: *mut c_void,
    service: *mut Handle,
) -> i32 {
    // SAFETY: as for every export; the handler is C's promise.
    guard(|| unsafe {
        pointer::put("service", service, Handle { id: 0 })?;
        let settings = pointer::settings("options", options)?;
        let folder = pointer::optional_text("options.folder", settings.folder)?;
        let uids = pointer::slice("options.uids", settings.uids, settings.uid_count)?;
        let gids = pointer::slice("options.gids", settings.gids, settings.gid_count)?;
        let options = settings.options(folder, uids, gids)?;
        let handler = handler.ok_or_else(|| Failure::new(Status::Argument, "argument handler: null"))?;
        let name = pointer::text("name", name)?;
        let id = SERVICES.add(Arc::new(Service::register(name, options, Callback::new(handler, context))?))?;
        pointer::put("service", service, Handle { id })?;
        Ok(Status::Ok)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_stop(service: Handle) -> i32 {
    guard(|| {
        if pointer::in_handler() {
            let text = "a handler cannot end a service: it would wait for itself";
            return Err(Failure::new(Status::InHandler, text));
        }
        let mut service = SERVICES.take(service.id)?;
        if !service.is_ours() {
            // In a forked child it is its parent's, and who may have used it there is not here.
            return Ok(Status::Ok);
        }
        // A thread that reads its statistics just now is done at once; the handler must not be
        // called once we return.
        while let Err(shared) = Arc::try_unwrap(service).map(drop) {
            service = shared;
            std::thread::yield_now();
        }
        Ok(Status::Ok)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_service_stats(service: Handle, stats: *mut Stats) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        pointer::check_size("stats", stats)?;
        let report = SERVICES.get(service.id)?.report();
        pointer::put("stats", stats, Stats::new(&report))?;
        Ok(Status::Ok)
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_answer_write(answer: *mut AnswerMark, data: *const c_void, len: usize) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        let bytes = pointer::view("data", data, len)?;
        pointer::with_answer(answer, |reply| {
            reply.write_view(bytes)?;
            Ok(Status::Ok)
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_answer_loan(answer: *mut AnswerMark, len: u64, data: *mut *mut c_void) -> i32 {
    // SAFETY: as for every export.
    guard(|| unsafe {
        pointer::put("data", data, std::ptr::null_mut())?;
        pointer::with_answer(answer, |reply| {
            let view = reply.loan(len)?;
            pointer::put("data", data, view.as_mut_ptr().cast())?;
            Ok(Status::Ok)
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_answer_share(answer: *mut AnswerMark, buffer: Handle, offset: u64, len: u64) -> i32 {
    guard(|| {
        pointer::with_answer(answer, |reply| {
            let buffer = BUFFERS.get(buffer.id)?;
            reply.share(&buffer, offset, len)?;
            Ok(Status::Ok)
        })
    })
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tombolo_answer_code(answer: *mut AnswerMark, code: u32) -> i32 {
    guard(|| {
        pointer::with_answer(answer, |reply| {
            reply.set_code(code);
            Ok(Status::Ok)
        })
    })
}
