//! Locks.

use std::sync::{Mutex, MutexGuard};

/// A poisoned lock is taken all the same: each change under the locks of this crate is whole,
/// whether it panics or not.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
