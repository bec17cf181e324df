//! The heap: all memory of the machine that nothing else occupies.
#![allow(unsafe_code)]

use super::startup::Region;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use talc::TalcLock;
use talc::source::Manual;

#[cfg_attr(not(test), global_allocator)]
static HEAP: TalcLock<spinning_top::RawSpinlock, Manual> = TalcLock::new(Manual);

static BYTES: AtomicUsize = AtomicUsize::new(0);

/// Hands a region to the heap.
///
/// # Safety
/// The region is RAM, mapped, and used by nothing else for ever.
pub(super) unsafe fn add(region: Region) {
    let base = core::ptr::with_exposed_provenance_mut::<u8>(region.start as usize);
    let len = (region.end - region.start) as usize;
    // SAFETY: the caller's promise.
    if unsafe { HEAP.lock().claim(base, len) }.is_some() {
        BYTES.fetch_add(len, Relaxed);
    }
}

/// How many bytes the heap was given.
pub(crate) fn bytes() -> usize {
    BYTES.load(Relaxed)
}
