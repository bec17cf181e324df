//! Forks: which process this is after one, and locks that no thread holds across one.
//!
//! A forked child has its parent's memory as it was at that instant. Of its parent's threads it has
//! only the one that forked. A lock that another thread held stays held in the child for ever, and
//! the data under it may be half changed. So a lock in a static that a child also needs is named
//! here ([`keep`]) before it is first taken. From then on each fork takes it first and releases it
//! afterwards, in the parent and in the child (pthread_atfork(3)). So the child finds the lock free
//! and its data complete.
//!
//! # Invariants
//! * No thread forks while it holds a kept lock, or takes one while it holds another. Kept locks
//!   are held for a few steps that call no other module's code. So a fork waits only briefly for
//!   them, and never for itself.
//! * Nothing here blocks in a child on what its parent was doing: what is made once is made without
//!   a lock.
//!
//! # Limits
//! * Children that are made without these handlers (clone(2), `_Fork`, `posix_spawn`) may only
//!   become another program, or end. A signal handler that forks uses `_Fork`, as POSIX has it.
//! * Locks of single objects are not kept. The owner of such an object remembers which process made
//!   it ([`process`]), and leaves it alone in another process.
//! * The first lock of a process is not held by a fork if it is named while that fork, in another
//!   thread, runs other libraries' handlers.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::RefCell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};

use crate::memory::Mapping;

/// A lock that can be taken by who does not know what it keeps.
pub trait Lock: Sync {
    /// Takes it, alone, until the result is dropped.
    fn take(&'static self) -> Box<dyn Any>;
}

impl<T: Send + 'static> Lock for Mutex<T> {
    fn take(&'static self) -> Box<dyn Any> {
        Box::new(self.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T: Send + Sync + 'static> Lock for RwLock<T> {
    fn take(&'static self) -> Box<dyn Any> {
        Box::new(self.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The locks that forks take; this one is taken before all of them.
static KEPT: Mutex<Vec<&'static dyn Lock>> = Mutex::new(Vec::new());
/// Forks call us.
static HANDLED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// What this thread took for the fork that it is in.
    static HELD: RefCell<Vec<Box<dyn Any>>> = const { RefCell::new(Vec::new()) };
}

/// Has each fork of this process take the lock first. Called before the lock is taken for the first
/// time, and as often as anybody likes.
pub fn keep(lock: &'static dyn Lock) {
    // Relaxed: who does not see that it was done does it again, which the handlers bear. It comes
    // before the registry's lock, which is to be free in a child, too.
    if !HANDLED.load(Ordering::Relaxed) {
        // SAFETY: the handlers are functions of this module, which live as long as it does; a
        // library that is unloaded takes them along.
        let failed = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
        // Without memory for that, the next call that names a lock tries again.
        HANDLED.store(failed == 0, Ordering::Relaxed);
    }
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    if !kept.iter().any(|known| ptr::addr_eq(*known, lock)) {
        kept.push(lock);
    }
}

/// Before a fork, by the thread that forks. A second time it does nothing: two threads may have had
/// it called.
extern "C" fn before() {
    // A thread that forks while its locals are being destroyed has no place for them any more, and
    // forks as if they were not kept.
    let _ = HELD.try_with(|held| {
        let Ok(mut held) = held.try_borrow_mut() else { return };
        if held.is_empty() {
            let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
            held.extend(kept.iter().map(|lock| lock.take()));
            held.push(Box::new(kept));
        }
    });
}

/// After a fork, in the parent and in the child.
extern "C" fn after() {
    let _ = HELD.try_with(|held| held.try_borrow_mut().map(|mut held| held.clear()));
}

/// A page that a fork wipes; null before it is made. It is never given back.
static PAGE: AtomicPtr<Mapping> = AtomicPtr::new(ptr::null_mut());

/// The number of this process: another one in a forked child. It is read from a page that a fork
/// wipes, so that a look costs two loads.
#[inline]
pub fn process() -> u32 {
    // SAFETY: null, or a mapping that was leaked for this (`made`). Acquire, partner there: it is
    // whole.
    let page = unsafe { PAGE.load(Ordering::Acquire).as_ref() }.or_else(made);
    // Relaxed: the word says nothing of other memory.
    if let Some(known) = page.and_then(|page| page.view().load_u32(0, Ordering::Relaxed)).filter(|pid| *pid != 0) {
        return known;
    }
    let pid = std::process::id();
    if let Some(page) = page.and_then(Mapping::view_mut) {
        page.store_u32(0, pid, Ordering::Relaxed);
    }
    pid
}

/// The page, made. Without memory for it there is none, and each look asks the kernel.
#[cold]
fn made() -> Option<&'static Mapping> {
    let made = Box::into_raw(Box::new(Mapping::wiped_on_fork(4096).ok()?));
    // Release, partner in `process`. The first wins; no lock, which a fork could leave behind.
    match PAGE.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: it was just leaked, and nothing frees it.
        Ok(_) => Some(unsafe { &*made }),
        Err(first) => {
            // SAFETY: from `Box::into_raw` above, and no other thread has it.
            drop(unsafe { Box::from_raw(made) });
            // SAFETY: what is there was leaked by another thread, and nothing frees it.
            Some(unsafe { &*first })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_testing::fork::in_child;

    #[test]
    fn a_child_is_another_process() {
        let ours = process();
        assert_eq!((ours, process()), (std::process::id(), ours));
        in_child(|| process() == std::process::id() && process() != ours && in_child(|| process() != ours).is_ok())
            .unwrap();
        assert_eq!(process(), ours);
    }

    /// Two that are always alike, under a lock.
    static PAIR: Mutex<(u64, u64)> = Mutex::new((0, 0));
    static OTHER: RwLock<(u64, u64)> = RwLock::new((0, 0));

    #[test]
    fn a_child_finds_kept_locks_free_and_what_they_keep_whole() {
        static ENOUGH: AtomicBool = AtomicBool::new(false);
        for _ in 0..2 {
            keep(&PAIR);
            keep(&OTHER);
        }
        let change = |pair: &mut (u64, u64)| {
            pair.0 += 1;
            // Long enough that most forks come in between.
            (0..100).for_each(|_| std::hint::spin_loop());
            pair.1 += 1;
        };
        let all = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !ENOUGH.load(Ordering::Relaxed) {
                    change(&mut PAIR.lock().unwrap());
                }
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ENOUGH.load(Ordering::Relaxed) {
                        change(&mut OTHER.write().unwrap());
                        let pair = OTHER.read().unwrap();
                        assert_eq!(pair.0, pair.1);
                    }
                });
            }
            let child = || {
                // No other thread exists here that could hold them.
                let pair = PAIR.try_lock().is_ok_and(|pair| pair.0 == pair.1);
                let other = OTHER.try_write().is_ok_and(|pair| pair.0 == pair.1);
                // A child of the child's as well.
                pair && other && in_child(|| PAIR.try_lock().is_ok()).is_ok()
            };
            let all = (0..300).try_for_each(|_| in_child(child));
            ENOUGH.store(true, Ordering::Relaxed);
            all
        });
        all.unwrap();
    }
}
