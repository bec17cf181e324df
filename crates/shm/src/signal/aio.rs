//! Signals by asynchronous I/O: one system call each, from a context per thread.
//!
//! A read of no bytes from the eventfd, which the kernel refuses without looking at the counter, is
//! submitted with the eventfd as its completion signal (`IOCB_FLAG_RESFD`). It completes within the
//! system call.
//!
//! The number of contexts of the whole system is limited (`fs.aio-max-nr`), and any local user can
//! use them up.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

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

// --- tuning ---

/// Signals between two clearings of the completions.
const BATCH: usize = 64;

/// A thread's own context.
pub(super) struct Context {
    id: u64,
    pending: usize,
}

impl Context {
    /// `None` where the system's limit is reached, or the kernel has no asynchronous I/O.
    pub(super) fn new() -> Option<Context> {
        Self::sized(2 * BATCH)
    }

    fn sized(events: usize) -> Option<Context> {
        let mut id = 0u64;
        // SAFETY: io_setup writes the context's identifier into `id`, which must be 0 before.
        let done = unsafe { libc::syscall(libc::SYS_io_setup, events, &raw mut id) };
        (done == 0).then_some(Context { id, pending: 0 })
    }

    /// Signals the eventfd. False where the kernel did not take the request; then nothing was done.
    pub(super) fn signal(&mut self, fd: BorrowedFd<'_>) -> bool {
        let request = Iocb {
            opcode: IOCB_CMD_PREAD,
            // Descriptors that are open are not negative.
            fd: fd.as_raw_fd() as u32,
            flags: IOCB_FLAG_RESFD,
            result_fd: fd.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let requests = [&raw const request];
        // SAFETY: one pointer to one request, both alive during the call; it reads no bytes into no
        // buffer, so no memory of this process is written, now or later.
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
        // SAFETY: no request of this context is under way: each completes when it is submitted. In
        // a forked child the identifier names nothing, and the kernel refuses it.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id) };
    }
}

/// For a test: contexts that take up what is left of the system's limit, until they are dropped.
#[cfg(test)]
pub(super) fn take_all() -> Vec<Context> {
    let mut taken = Vec::new();
    for events in [8192, 1024, 128, 16, 1] {
        taken.extend(std::iter::from_fn(|| Context::sized(events)).take(8192));
    }
    taken
}
