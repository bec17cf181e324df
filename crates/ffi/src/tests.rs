//! The exports called as C calls them, wrongly too.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::client::*;
use crate::general::*;
use crate::service::*;
use crate::status::Status;
use crate::types::{
    AnswerMark, CallSettings, ConnectSettings, End, Handle, NONE, ReplyInfo, RequestInfo, ServiceSettings, Stats,
};

const NOTHING: Handle = Handle { id: 0 };
const SECOND_NS: u64 = 1_000_000_000;

fn zeroed<T>(size: impl FnOnce(&mut T)) -> T {
    // SAFETY: only used for the structs of the header, whose fields may all be 0.
    let mut value = unsafe { std::mem::zeroed() };
    size(&mut value);
    value
}

fn call_settings() -> CallSettings {
    zeroed(|s: &mut CallSettings| s.size = size_of::<CallSettings>() as u32)
}

fn is(status: Status, got: i32) {
    // SAFETY: both texts live until this thread's next failure.
    let (name, text) = unsafe { (CStr::from_ptr(tombolo_status_name(got)), CStr::from_ptr(tombolo_error_text())) };
    assert_eq!(got, status as i32, "{name:?} ({text:?}), expected {status:?}");
}

/// What the first byte asks for: 'e' the request again, 'f' a failure, 's' the second byte as code,
/// 'l' an answer in place, 'o' one that is too large and another in its place, 'b' to wait for the
/// gate, 'x' to end the service.
unsafe extern "C" fn serve(context: *mut c_void, request: *const RequestInfo, answer: *mut AnswerMark) -> i32 {
    // SAFETY: as the header promises; the requests of these tests are not written meanwhile.
    unsafe {
        let gate = &*context.cast::<Gate>();
        let request = &*request;
        let bytes = std::slice::from_raw_parts(request.data.cast::<u8>(), request.len as usize);
        match bytes.first() {
            Some(b'f') => return 1,
            Some(b's') => is(Status::Ok, tombolo_answer_code(answer, bytes[1].into())),
            Some(b'l') => {
                let mut to = null_mut();
                is(Status::Ok, tombolo_answer_loan(answer, 5000, &mut to));
                to.cast::<u8>().write_bytes(7, 5000);
            }
            Some(b'o') => {
                let mut to = null_mut();
                is(Status::NoRoom, tombolo_answer_loan(answer, 1 << 40, &mut to));
                assert!(to.is_null());
                is(Status::Ok, tombolo_answer_write(answer, c"less".as_ptr().cast(), 4));
            }
            Some(b'b') => gate.wait(),
            Some(b'x') => {
                is(Status::InHandler, tombolo_stop(Handle { id: gate.service.load(Ordering::SeqCst) as u64 }))
            }
            _ => is(Status::Ok, tombolo_answer_write(answer, request.data, request.len as usize)),
        }
        0
    }
}

#[derive(Default)]
struct Gate {
    open: std::sync::Mutex<bool>,
    turn: std::sync::Condvar,
    waiting: AtomicUsize,
    service: AtomicUsize,
}

impl Gate {
    fn wait(&self) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut open = self.open.lock().unwrap();
        while !*open {
            open = self.turn.wait(open).unwrap();
        }
    }

    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.turn.notify_all();
    }

    fn reached(&self) {
        tombolo_testing::until("the handler is called", || self.waiting.load(Ordering::SeqCst) > 0);
    }
}

struct World {
    folder: CString,
    service: Handle,
    client: Handle,
    gate: Box<Gate>,
    _dir: tempfile::TempDir,
}

fn folder_of(dir: &Path) -> CString {
    CString::new(dir.to_str().unwrap()).unwrap()
}

fn connect_settings(folder: &CStr) -> ConnectSettings {
    zeroed(|s: &mut ConnectSettings| {
        s.size = size_of::<ConnectSettings>() as u32;
        s.folder = folder.as_ptr();
    })
}

fn world(change: impl FnOnce(&mut ServiceSettings)) -> World {
    let dir = tempfile::tempdir().unwrap();
    let folder = folder_of(dir.path());
    let options = zeroed(|s: &mut ServiceSettings| {
        s.size = size_of::<ServiceSettings>() as u32;
        s.folder = folder.as_ptr();
        change(s);
    });
    let (mut service, mut client) = (NOTHING, NOTHING);
    let gate = Box::<Gate>::default();
    let context = (&raw const *gate).cast_mut().cast();
    // SAFETY: as the header asks; the gate outlives the service.
    unsafe {
        is(Status::Ok, tombolo_register(c"s".as_ptr(), &options, Some(serve), context, &mut service));
        is(Status::Ok, tombolo_connect(c"s".as_ptr(), &connect_settings(&folder), &mut client));
    }
    gate.service.store(service.id as usize, Ordering::SeqCst);
    World { folder, service, client, gate, _dir: dir }
}

impl World {
    fn call(&self, bytes: &[u8], options: &CallSettings) -> Result<(u32, Vec<u8>), i32> {
        let mut reply = NOTHING;
        // SAFETY: as the header asks.
        match unsafe { tombolo_call(self.client, bytes.as_ptr().cast(), bytes.len(), options, &mut reply) } {
            0 => Ok(read(reply)),
            status => {
                assert_eq!(reply.id, 0);
                Err(status)
            }
        }
    }

    fn submit(&self, bytes: &[u8]) -> u64 {
        let mut token = 0;
        // SAFETY: as the header asks.
        is(Status::Ok, unsafe { tombolo_submit(self.client, bytes.as_ptr().cast(), bytes.len(), null(), &mut token) });
        token
    }

    fn wait(&self, token: u64) -> Result<(u32, Vec<u8>), i32> {
        let mut reply = NOTHING;
        // SAFETY: as the header asks.
        match unsafe { tombolo_wait(self.client, token, 20 * SECOND_NS, &mut reply) } {
            0 => Ok(read(reply)),
            status => Err(status),
        }
    }

    fn stats(&self) -> Stats {
        let mut stats = zeroed(|s: &mut Stats| s.size = size_of::<Stats>() as u32);
        // SAFETY: as the header asks.
        is(Status::Ok, unsafe { tombolo_service_stats(self.service, &mut stats) });
        stats
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.gate.open();
        // SAFETY: numbers. Either may have been closed by the test.
        unsafe {
            tombolo_close(self.client);
            tombolo_stop(self.service);
        }
    }
}

/// A reply's code and bytes; it is freed.
fn read(reply: Handle) -> (u32, Vec<u8>) {
    let mut info = zeroed(|_: &mut ReplyInfo| {});
    let mut copied = 0;
    // SAFETY: as the header asks.
    unsafe {
        is(Status::Ok, tombolo_reply_get(reply, &mut info));
        assert!(!info.data.is_null());
        let mut bytes = vec![0u8; info.len as usize];
        if info.len > 0 {
            is(Status::NoRoom, tombolo_reply_copy(reply, bytes.as_mut_ptr().cast(), bytes.len() - 1, &mut copied));
            assert_eq!(copied, bytes.len());
        }
        is(Status::Ok, tombolo_reply_copy(reply, bytes.as_mut_ptr().cast(), bytes.len(), &mut copied));
        is(Status::Ok, tombolo_reply_check(reply));
        is(Status::Ok, tombolo_reply_free(reply));
        is(Status::UnknownHandle, tombolo_reply_free(reply));
        (info.code, bytes)
    }
}

#[test]
fn calls_bring_their_replies_of_all_sizes() {
    let world = world(|_| {});
    for len in [0, 1, 192, 193, 5000, 100_000] {
        let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
        assert_eq!(world.call(&bytes, &call_settings()), Ok((0, bytes)), "{len} bytes");
    }
    assert_eq!(world.call(b"s\x07", &call_settings()), Ok((7, vec![])));
    assert_eq!(world.call(b"l", &call_settings()), Ok((0, vec![7; 5000])));
    assert_eq!(world.call(b"o", &call_settings()), Ok((0, b"less".to_vec())), "what is put in last is sent");
    assert_eq!(world.stats().served, 9);
    assert_eq!(world.stats().clients, 1);
}

#[test]
fn loans_and_buffers_are_written_in_place() {
    let world = world(|_| {});
    let (mut loan, mut buffer, mut data, mut token) = (NOTHING, NOTHING, null_mut(), 0);
    // SAFETY: as the header asks.
    unsafe {
        is(Status::Ok, tombolo_loan_new(world.client, 3000, &mut loan, &mut data));
        data.cast::<u8>().write_bytes(3, 3000);
        is(Status::Ok, tombolo_loan_submit(world.client, loan, null(), &mut token));
        assert_eq!(world.wait(token), Ok((0, vec![3; 3000])));
        is(Status::UnknownHandle, tombolo_loan_submit(world.client, loan, null(), &mut token));
        is(Status::UnknownHandle, tombolo_loan_free(loan));
        is(Status::NoRoom, tombolo_loan_new(world.client, 1 << 30, &mut loan, &mut data));
        assert!(data.is_null() && loan.id == 0);

        is(Status::Ok, tombolo_buffer_new(1 << 20, 0, &mut buffer, &mut data));
        data.cast::<u8>().add(4096).write_bytes(9, 4096);
        is(Status::Ok, tombolo_buffer_submit(world.client, buffer, 4096, 4096, null(), &mut token));
        assert_eq!(world.wait(token), Ok((0, vec![9; 4096])));
        is(Status::Range, tombolo_buffer_submit(world.client, buffer, 4096, 1 << 20, null(), &mut token));
        is(Status::Ok, tombolo_buffer_free(buffer));
        is(Status::UnknownHandle, tombolo_buffer_submit(world.client, buffer, 0, 1, null(), &mut token));
    }
}

#[test]
fn each_end_of_a_call_has_its_status() {
    let world = world(|options| options.queue_bound = 2);
    let exceeded = CallSettings { deadline_kind: 2, deadline_ns: 1, ..call_settings() };
    is(Status::DeadlineExceeded, world.call(b"e", &exceeded).unwrap_err());
    let late = CallSettings { wait_late_ns: u64::MAX, ..exceeded };
    is(Status::Late, world.call(b"e", &late).unwrap_err());
    is(Status::Failed, world.call(b"f", &call_settings()).unwrap_err());
    let blocked = world.submit(b"b");
    world.gate.reached();
    let (second, third, fourth) = (world.submit(b"e2"), world.submit(b"e3"), world.submit(b"e4"));
    let (mut reply, mut which) = (NOTHING, 0);
    // SAFETY: as the header asks.
    unsafe {
        is(Status::Refused, world.wait(fourth).unwrap_err());
        assert_eq!(tombolo_error_refusal(), 1, "the queue was full");
        is(Status::Pending, tombolo_poll(world.client, second, &mut reply));
        is(Status::Pending, tombolo_wait_any(world.client, [second, third].as_ptr(), 2, 1, &mut which));
        is(Status::Ok, tombolo_cancel(world.client, third));
        is(Status::Ok, tombolo_wait_any(world.client, [second, third].as_ptr(), 2, 20 * SECOND_NS, &mut which));
        assert_eq!(which, 1);
        is(Status::Cancelled, tombolo_poll(world.client, third, &mut reply));
        assert_eq!(tombolo_error_refusal(), 0);
        is(Status::UnknownCall, tombolo_poll(world.client, third, &mut reply));
        let (third, fourth) = (world.submit(b"e3"), world.submit(b"e4"));
        is(Status::Ok, tombolo_cancel(world.client, third));
        let mut ends = [End { status: 0, refusal: 0, reply: NOTHING }; 3];
        let all = [fourth, third, 7];
        is(Status::Ok, tombolo_wait_all(world.client, all.as_ptr(), 3, 20 * SECOND_NS, ends.as_mut_ptr()));
        let told = ends.map(|end| (end.status, end.refusal, end.reply.id));
        let (refused, cancelled, unknown) = (Status::Refused, Status::Cancelled, Status::UnknownCall);
        assert_eq!(told, [(refused as i32, 1, 0), (cancelled as i32, 0, 0), (unknown as i32, 0, 0)]);
        is(Status::Ok, tombolo_wait_all(world.client, null(), 0, 1, null_mut()));
        is(Status::Argument, tombolo_wait_all(world.client, all.as_ptr(), 3, 1, null_mut()));
        is(Status::Timeout, tombolo_wait(world.client, blocked, 1, &mut reply));
        let expires = CallSettings { ttl_ns: 1_000_000, ..call_settings() };
        is(Status::Expired, world.call(b"e", &expires).unwrap_err());
        world.gate.open();
        is(Status::Ok, tombolo_wait_all(world.client, &second, 1, 20 * SECOND_NS, ends.as_mut_ptr()));
        assert_eq!(ends[0].status, Status::Ok as i32);
        assert_eq!(read(ends[0].reply), (0, b"e2".to_vec()));
        is(Status::Ok, tombolo_stop(world.service));
        is(Status::ProviderGone, world.call(b"e", &call_settings()).unwrap_err());
        is(Status::UnknownHandle, tombolo_stop(world.service));
        let mut client = NOTHING;
        is(Status::NoService, tombolo_connect(c"s".as_ptr(), &connect_settings(&world.folder), &mut client));
    }
}

#[test]
fn a_handler_cannot_stop_its_own_service() {
    let world = world(|_| {});
    assert_eq!(world.call(b"x", &call_settings()), Ok((0, vec![])));
}

#[test]
fn closing_in_one_thread_does_not_hurt_a_call_in_another() {
    let world = world(|_| {});
    let blocked = world.submit(b"b");
    world.gate.reached();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| world.wait(blocked));
        // SAFETY: a number.
        is(Status::Ok, unsafe { tombolo_close(world.client) });
        world.gate.open();
        match waits.join().unwrap() {
            Ok(answer) => assert_eq!(answer, (0, vec![])),
            // It was closed before the other thread came to wait.
            Err(status) => is(Status::UnknownHandle, status),
        }
    });
}

#[test]
fn a_child_forked_at_any_instant_leaves_its_parents_alone_and_connects_anew() {
    let world = world(|_| {});
    let enough = std::sync::atomic::AtomicBool::new(false);
    let connect = || {
        let mut client = NOTHING;
        // SAFETY: as the header asks.
        is(Status::Ok, unsafe { tombolo_connect(c"s".as_ptr(), &connect_settings(&world.folder), &mut client) });
        client
    };
    let echo = |client: Handle| {
        let mut reply = NOTHING;
        // SAFETY: as the header asks.
        match unsafe { tombolo_call(client, c"echo".as_ptr().cast(), 4, null(), &mut reply) } {
            0 => Ok(read(reply).1),
            status => Err(status),
        }
    };
    // What a child does: all that touches what other threads were changing when it was forked.
    let child = || {
        let (mut buffer, mut data, mut loan) = (NOTHING, null_mut(), NOTHING);
        is(Status::ProviderGone, echo(world.client).unwrap_err());
        world.stats();
        // SAFETY: as the header asks.
        unsafe {
            is(Status::NoRoom, tombolo_loan_new(world.client, 100, &mut loan, &mut data));
            is(Status::Ok, tombolo_close(world.client));
            is(Status::Ok, tombolo_stop(world.service));
            is(Status::Ok, tombolo_buffer_new(4096, 0, &mut buffer, &mut data));
            is(Status::Ok, tombolo_buffer_free(buffer));
        }
        let client = connect();
        assert_eq!(echo(client), Ok(b"echo".to_vec()));
        // SAFETY: a number.
        is(Status::Ok, unsafe { tombolo_close(client) });
        true
    };
    let until_enough = |step: &dyn Fn()| {
        while !enough.load(Ordering::Relaxed) {
            step();
        }
    };
    let all = std::thread::scope(|scope| {
        // SAFETY: a number.
        scope.spawn(|| until_enough(&|| is(Status::Ok, unsafe { tombolo_close(connect()) })));
        scope.spawn(|| until_enough(&|| drop(echo(world.client))));
        scope.spawn(|| until_enough(&|| assert!(world.stats().clients > 0)));
        scope.spawn(|| {
            until_enough(&|| {
                let (mut buffer, mut data) = (NOTHING, null_mut());
                // SAFETY: as the header asks.
                unsafe {
                    is(Status::Ok, tombolo_buffer_new(4096, 0, &mut buffer, &mut data));
                    is(Status::Ok, tombolo_buffer_free(buffer));
                }
            })
        });
        let all = (0..100).try_for_each(|_| tombolo_testing::fork::in_child(child));
        enough.store(true, Ordering::Relaxed);
        all
    });
    all.unwrap();
    assert_eq!(echo(world.client), Ok(b"echo".to_vec()), "the parent's connection is still there");
}

#[test]
fn wrong_arguments_are_told_apart_and_hurt_nobody() {
    let world = world(|_| {});
    let (mut client, mut service, mut reply, mut token, mut which) = (NOTHING, NOTHING, NOTHING, 0, 0);
    let folder = connect_settings(&world.folder);
    let garbage = [0, 1, 42, u64::MAX, world.service.id, world.client.id + 1].map(|id| Handle { id });
    // SAFETY: what is wrong here is what the library checks: nulls, numbers, sizes.
    unsafe {
        is(Status::Argument, tombolo_connect(null(), null(), &mut client));
        is(Status::Argument, tombolo_connect(c"s".as_ptr(), null(), null_mut()));
        is(Status::Argument, tombolo_connect(c"\xff".as_ptr(), null(), &mut client));
        is(Status::Name, tombolo_connect(c"../s".as_ptr(), &folder, &mut client));
        is(Status::Argument, tombolo_connect(c"s".as_ptr(), &ConnectSettings { size: 7, ..folder }, &mut client));
        is(Status::Option, tombolo_connect(c"s".as_ptr(), &ConnectSettings { entries: 3, ..folder }, &mut client));
        is(Status::Option, tombolo_connect(c"s".as_ptr(), &ConnectSettings { polling: 3, ..folder }, &mut client));
        is(Status::Argument, tombolo_call(world.client, null(), 1, null(), &mut reply));
        is(Status::Argument, tombolo_call(world.client, c"".as_ptr().cast(), usize::MAX, null(), &mut reply));
        is(Status::Argument, tombolo_call(world.client, null(), 0, null(), null_mut()));
        is(Status::Ok, tombolo_call(world.client, null(), 0, null(), &mut reply));
        read(reply);
        let unknown = CallSettings { deadline_kind: 3, ..call_settings() };
        is(Status::Option, tombolo_call(world.client, null(), 0, &unknown, &mut reply));
        is(Status::Argument, tombolo_submit(world.client, null(), 0, null(), null_mut()));
        is(Status::Argument, tombolo_wait_any(world.client, null(), 3, 1, &mut which));
        is(Status::Pending, tombolo_wait_any(world.client, null(), 0, 1, &mut which));

        for token in [0, 7, u64::MAX] {
            is(Status::UnknownCall, tombolo_poll(world.client, token, &mut reply));
            is(Status::UnknownCall, tombolo_wait(world.client, token, NONE, &mut reply));
            is(Status::UnknownCall, tombolo_cancel(world.client, token));
        }
        let mut data = null_mut();
        for wrong in garbage {
            is(Status::UnknownHandle, tombolo_call(wrong, null(), 0, null(), &mut reply));
            is(Status::UnknownHandle, tombolo_submit(wrong, null(), 0, null(), &mut token));
            is(Status::UnknownHandle, tombolo_poll(wrong, 0, &mut reply));
            is(Status::UnknownHandle, tombolo_wait(wrong, 0, 0, &mut reply));
            is(Status::UnknownHandle, tombolo_cancel(wrong, 0));
            is(Status::UnknownHandle, tombolo_loan_new(wrong, 1, &mut client, &mut data));
            is(Status::UnknownHandle, tombolo_close(wrong));
            is(Status::UnknownHandle, tombolo_reply_check(wrong));
            is(Status::UnknownHandle, tombolo_reply_free(wrong));
            is(Status::UnknownHandle, tombolo_buffer_free(wrong));
        }
        is(Status::Memory, tombolo_buffer_new(0, 0, &mut client, &mut data));

        is(Status::Argument, tombolo_register(c"t".as_ptr(), null(), None, null_mut(), &mut service));
        let options = zeroed(|s: &mut ServiceSettings| {
            s.size = size_of::<ServiceSettings>() as u32;
            s.folder = world.folder.as_ptr();
        });
        let mut register = |name: &CStr, options: &ServiceSettings| {
            tombolo_register(name.as_ptr(), options, Some(serve), null_mut(), &mut service)
        };
        is(Status::Running, register(c"s", &options));
        is(Status::Name, register(c"", &options));
        is(Status::Argument, register(c"t", &ServiceSettings { size: 0, ..options }));
        is(Status::Argument, register(c"t", &ServiceSettings { uid_count: 1, ..options }));
        is(Status::Option, register(c"t", &ServiceSettings { workers: 1000, ..options }));
        is(Status::Option, register(c"t", &ServiceSettings { late_policy: 2, ..options }));
        is(Status::Option, register(c"t", &ServiceSettings { order: 3, ..options }));
        is(Status::Option, register(c"t", &ServiceSettings { worker_class: 1, ..options }));
        is(Status::Option, register(c"t", &ServiceSettings { worker_class: 1, fifo_priority: 300, ..options }));
        is(Status::Option, register(c"t", &ServiceSettings { worker_class: 9, ..options }));
        is(Status::Argument, tombolo_service_stats(world.service, null_mut()));
        is(Status::UnknownHandle, tombolo_answer_write(null_mut(), null(), 0));
        is(Status::UnknownHandle, tombolo_answer_code(std::ptr::dangling_mut(), 0));
        assert_eq!(CStr::from_ptr(tombolo_status_name(-5)), c"unknown");
    }
    assert_eq!(world.call(b"e", &call_settings()), Ok((0, b"e".to_vec())), "the service has not noticed");
}

#[test]
fn a_report_is_text_for_who_has_the_room() {
    let world = world(|_| {});
    let options = connect_settings(&world.folder);
    let mut needed = 0;
    // SAFETY: as the header asks.
    unsafe {
        is(Status::NoRoom, tombolo_report(c"s".as_ptr(), &options, null_mut(), 0, &mut needed));
        // Numbers in it may have grown meanwhile.
        let mut text = vec![0u8; needed + 100];
        is(Status::Ok, tombolo_report(c"s".as_ptr(), &options, text.as_mut_ptr().cast(), text.len(), &mut needed));
        let report: serde_json::Value = serde_json::from_slice(&text[..needed - 1]).unwrap();
        assert_eq!((text[needed - 1], report["name"].as_str()), (0, Some("s")));
    }
}
