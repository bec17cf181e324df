//! Signalling an eventfd that a peer holds too, without ever blocking.
//!
//! `write` on an eventfd blocks when its counter is full, unless the open file is non-blocking; but that flag belongs
//! to the open file, which the peer shares: it can clear the flag, fill the counter, and have a worker of ours sleep
//! in `write` for ever. Looking with `poll` first leaves a gap, and there is no `RWF_NOWAIT` for eventfds.
//!
//! The kernel itself signals eventfds without blocking. So the kernel is asked to: a read of no bytes from the eventfd,
//! which it refuses without a look at the counter, is submitted as asynchronous I/O whose completion signals the
//! eventfd (`IOCB_FLAG_RESFD`). It completes within the one system call. A full counter stays full, which is a rung bell.
//!
//! Each thread has a context of its own. Where the kernel has no asynchronous I/O on eventfds (before Linux 5.8, or
//! where it is configured out) the caller is told, and writes.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::os::fd::{AsRawFd, BorrowedFd};

// --- the kernel's (include/uapi/linux/aio_abi.h) ---

const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    result_fd: u32,
}
const _: () = assert!(size_of::<Iocb>() == 64);

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}
const _: () = assert!(size_of::<IoEvent>() == 32);

// --- ours ---

/// Signals between two clearings of the completions.
const BATCH: usize = 64;

struct Context {
    id: u64,
    pending: usize,
}

impl Context {
    fn new() -> Option<Context> {
        let mut id = 0u64;
        // SAFETY: io_setup writes the context's identifier into `id`, which must be 0 before.
        let done = unsafe { libc::syscall(libc::SYS_io_setup, 2 * BATCH, &raw mut id) };
        (done == 0).then_some(Context { id, pending: 0 })
    }

    fn signal(&mut self, fd: BorrowedFd<'_>) -> bool {
        let request = Iocb {
            opcode: IOCB_CMD_PREAD,
            // Descriptors that are open are not negative.
            fd: fd.as_raw_fd() as u32,
            flags: IOCB_FLAG_RESFD,
            result_fd: fd.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let requests = [&raw const request];
        // SAFETY: one pointer to one request, both alive during the call; it reads no bytes into no buffer, so nothing
        // of ours is written, now or later.
        let submitted = unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1usize, requests.as_ptr()) };
        self.pending += 1;
        if self.pending >= BATCH {
            self.clear();
        }
        submitted == 1
    }

    fn clear(&mut self) {
        let mut events = [IoEvent::default(); 2 * BATCH];
        let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `events` has room for as many as are asked for; the timeout is read only.
        unsafe {
            libc::syscall(libc::SYS_io_getevents, self.id, 0usize, events.len(), events.as_mut_ptr(), &raw const now)
        };
        self.pending = 0;
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: a context of our own, in which no request is under way: each completes when it is submitted.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

thread_local! {
    /// `None` inside: this kernel has no asynchronous I/O, or no context was left.
    static CONTEXT: RefCell<Option<Context>> = RefCell::new(Context::new());
}

/// Signals the eventfd `fd` and never blocks. False where that is not possible here; then nothing was done.
#[inline]
pub(crate) fn signal(fd: BorrowedFd<'_>) -> bool {
    CONTEXT.try_with(|context| context.borrow_mut().as_mut().is_some_and(|context| context.signal(fd))).unwrap_or(false)
}
