//! Forked children, for tests of what a fork leaves behind.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

/// How long a child may take, s; then the kernel ends it.
const BOUND_S: u32 = 30;

/// Forks, as other threads run, and has the child do that and nothing else.
///
/// # Errors
/// In words how the child ended, where it ended otherwise than by finding `true`: also that it did
/// not end within half a minute.
///
/// # Panics
/// Where there can be no child.
pub fn in_child(body: impl FnOnce() -> bool) -> Result<(), String> {
    // SAFETY: the child does what it is there to show to be possible, and then ends; it never
    // returns from here.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        // SAFETY: system calls on this process alone. The signal's default ends it, whatever it
        // waits for.
        unsafe {
            libc::signal(libc::SIGALRM, libc::SIG_DFL);
            libc::alarm(BOUND_S);
        }
        let fine = catch_unwind(AssertUnwindSafe(body)).unwrap_or(false);
        // SAFETY: ends the process, without what it would do at its exit for its parent.
        unsafe { libc::_exit(if fine { 0 } else { 1 }) }
    }
    let mut status = 0;
    // SAFETY: the status is ours to be written, and the child is ours to be waited for.
    while unsafe { libc::waitpid(child, &mut status, 0) } < 0 {
        let error = std::io::Error::last_os_error();
        assert_eq!(error.kind(), std::io::ErrorKind::Interrupted, "waiting for a child: {error}");
    }
    match status {
        0 => Ok(()),
        _ if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGALRM => {
            Err(format!("the child hung for {BOUND_S} s"))
        }
        status => Err(format!("the child ended with status {status:#x}")),
    }
}
