//! Sleeping on a word of shared memory until another process changes it and says so.
//!
//! The word may be in memory that we can only read: neither waiting nor waking writes it. A peer
//! that changes the word without waking is a peer that does not wake us; every wait has a time
//! limit.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md): rustix asks for a
//! reference to the word, and no reference may point into a peer's memory.
#![allow(unsafe_code)]

use std::time::Duration;

use tombolo_ring::mem::Foreign;

/// How a wait ended. Each is a reason to look at the word again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Woken {
    /// Somebody woke us, or a signal came.
    Woken,
    /// The word was not what was expected.
    Changed,
    /// The time is over.
    TimedOut,
}

fn word(memory: Foreign<'_>, offset: usize) -> Option<*const u8> {
    let part = memory.slice(offset, 4)?;
    part.as_ptr().cast::<u32>().is_aligned().then_some(part.as_ptr())
}

/// Sleeps while the little-endian word at `offset` is `expected`, for at most `timeout`. A word
/// that is not wholly in the memory, or not aligned, counts as changed.
pub fn wait(memory: Foreign<'_>, offset: usize, expected: u32, timeout: Duration) -> Woken {
    let Some(word) = word(memory, offset) else { return Woken::Changed };
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: FUTEX_WAIT only reads the four bytes at `word`, which are mapped and aligned (checked
    // above), and the timeout.
    let done = unsafe {
        libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, expected.to_le(), &raw const timeout, 0usize, 0u32)
    };
    if done == 0 {
        return Woken::Woken;
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::ETIMEDOUT) => Woken::TimedOut,
        Some(libc::EINTR) => Woken::Woken,
        _ => Woken::Changed,
    }
}

/// Wakes all that sleep on the word at `offset`, in whichever process.
pub fn wake(memory: Foreign<'_>, offset: usize) {
    let Some(word) = word(memory, offset) else { return };
    // SAFETY: FUTEX_WAKE uses the address only to find who sleeps there; the memory stays mapped
    // during the call.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX, 0usize, 0usize, 0u32) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::section;
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    #[test]
    fn a_reader_sleeps_on_a_word_it_cannot_write() {
        let (fd, own) = section::make("test", 4096, false).unwrap();
        let peer = section::adopt(&fd, 4096, false).unwrap();
        assert_eq!(wait(peer.view(), 128, 7, Duration::from_secs(10)), Woken::Changed);
        assert_eq!(wait(peer.view(), 128, 0, Duration::from_millis(1)), Woken::TimedOut);
        assert_eq!(wait(peer.view(), 4094, 0, Duration::from_secs(10)), Woken::Changed);
        assert_eq!(wait(peer.view(), 130, 0, Duration::from_secs(10)), Woken::Changed);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| while wait(peer.view(), 128, 0, Duration::from_secs(10)) != Woken::Changed {});
            own.view_mut().unwrap().store_u32(128, 1, Ordering::SeqCst);
            wake(own.view(), 128);
        });
        assert!(begun.elapsed() < Duration::from_secs(9), "it was not woken");
    }

    /// Who maps the word read-only can wake too: that is how waiters learn that the other side has
    /// gone.
    #[test]
    fn a_reader_can_wake_other_readers() {
        let (fd, _own) = section::make("test", 4096, false).unwrap();
        let peer = section::adopt(&fd, 4096, false).unwrap();
        let slept = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(wait(peer.view(), 0, 0, Duration::from_secs(10)), Woken::Woken);
                slept.store(true, Ordering::SeqCst);
            });
            while !slept.load(Ordering::SeqCst) {
                wake(peer.view(), 0);
                std::thread::yield_now();
            }
        });
    }
}
