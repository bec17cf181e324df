//! Signals by io_uring, for threads that have no context of asynchronous I/O.
//!
//! The ring's completions are announced at an eventfd (`IORING_REGISTER_EVENTFD`). Each signal
//! takes three system calls. The eventfd is registered. A request that does nothing is submitted,
//! and completes within the system call. The eventfd is unregistered. No limit of the system as a
//! whole applies: a ring is charged to its own process and user. Where io_uring is switched off
//! (`kernel.io_uring_disabled`, the seccomp filters of containers) there is no ring.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::memory::Mapping;

// --- the kernel's (include/uapi/linux/io_uring.h) ---

const IORING_OFF_SQ_RING: u64 = 0;
const IORING_OFF_SQES: u64 = 0x1000_0000;
const IORING_FEAT_SINGLE_MMAP: u32 = 1;
const IORING_REGISTER_EVENTFD: u32 = 4;
const IORING_UNREGISTER_EVENTFD: u32 = 5;
/// Bytes of a submission; all zero is IORING_OP_NOP.
const SQE_BYTES: u64 = 64;
/// Bytes of a completion.
const CQE_BYTES: u64 = 16;

#[repr(C)]
#[derive(Default)]
struct SqOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    flags: u32,
    dropped: u32,
    array: u32,
    reserved: u32,
    user_address: u64,
}

#[repr(C)]
#[derive(Default)]
struct CqOffsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    overflow: u32,
    cqes: u32,
    flags: u32,
    reserved: u32,
    user_address: u64,
}

#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    reserved: [u32; 3],
    sq: SqOffsets,
    cq: CqOffsets,
}
const _: () = assert!(size_of::<Params>() == 120);

/// A thread's own ring of one entry.
pub(super) struct Uring {
    fd: OwnedFd,
    /// Indices of both queues, and the completions.
    rings: Mapping,
    /// The one submission, which stays zero; and its mapping, which the kernel reads.
    _entries: Mapping,
    sq_tail: usize,
    cq_head: usize,
    cq_tail: usize,
}

impl Uring {
    /// `None` where the kernel has no io_uring for this process.
    pub(super) fn new() -> Option<Uring> {
        let mut params = Params::default();
        // SAFETY: the kernel reads and writes `params`, which has the size that it expects.
        let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1usize, &raw mut params) };
        if fd < 0 {
            return None;
        }
        // SAFETY: a new descriptor that nothing else owns; the kernel made it close-on-exec.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        if params.features & IORING_FEAT_SINGLE_MMAP == 0 {
            return None;
        }
        let array_end = u64::from(params.sq.array) + 4 * u64::from(params.sq_entries);
        let cqes_end = u64::from(params.cq.cqes) + CQE_BYTES * u64::from(params.cq_entries);
        let rings = Mapping::of_device(&fd, IORING_OFF_SQ_RING, array_end.max(cqes_end)).ok()?;
        let entries = Mapping::of_device(&fd, IORING_OFF_SQES, SQE_BYTES * u64::from(params.sq_entries)).ok()?;
        let [sq_tail, cq_head, cq_tail] = [params.sq.tail, params.cq.head, params.cq.tail].map(|at| at as usize);
        // The submission queue's array stays zero, so that each of its places names submission 0.
        Some(Uring { fd, rings, _entries: entries, sq_tail, cq_head, cq_tail })
    }

    fn index(&self, at: usize) -> &AtomicU32 {
        debug_assert!(at + 4 <= self.rings.len() && at.is_multiple_of(4));
        // SAFETY: `at` is an offset that the kernel gave for an index of this ring; it lies inside
        // the mapping, which lives as long as self, and is aligned. Both sides use it atomically.
        unsafe { AtomicU32::from_ptr(self.rings.start().as_ptr().add(at).cast()) }
    }

    fn register(&self, what: u32, argument: *const i32, count: u32) -> bool {
        // SAFETY: `argument` is null, or points to the descriptor that is registered.
        unsafe { libc::syscall(libc::SYS_io_uring_register, self.fd.as_raw_fd(), what, argument, count) == 0 }
    }

    /// Signals the eventfd. False where the kernel refused; then nothing was done.
    pub(super) fn signal(&mut self, fd: BorrowedFd<'_>) -> bool {
        let number = fd.as_raw_fd();
        if !self.register(IORING_REGISTER_EVENTFD, &raw const number, 1) {
            return false;
        }
        // Relaxed: only this thread writes the tail. Release, partner in the kernel: the submission
        // is written.
        let tail = self.index(self.sq_tail).load(Ordering::Relaxed);
        self.index(self.sq_tail).store(tail.wrapping_add(1), Ordering::Release);
        // SAFETY: one submission is handed over, no completion is waited for, and no signal mask is
        // given.
        let submitted = unsafe {
            let none = std::ptr::null::<libc::sigset_t>();
            libc::syscall(libc::SYS_io_uring_enter, self.fd.as_raw_fd(), 1u32, 0u32, 0u32, none, 0usize)
        };
        if submitted != 1 {
            // Not consumed: withdrawn, so that the queue does not fill up.
            self.index(self.sq_tail).store(tail, Ordering::Release);
        }
        // What has completed has done its work.
        let done = self.index(self.cq_tail).load(Ordering::Acquire);
        self.index(self.cq_head).store(done, Ordering::Release);
        self.register(IORING_UNREGISTER_EVENTFD, std::ptr::null(), 0);
        submitted == 1
    }
}
