//! The heap: all memory of the machine that nothing else occupies.
#![allow(unsafe_code)]

use super::startup::Region;
use alloc::vec::Vec;
use core::alloc::{GlobalAlloc, Layout};
use core::arch::asm;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use talc::TalcLock;
use talc::source::Manual;

#[cfg_attr(not(test), global_allocator)]
static HEAP: Heap = Heap(TalcLock::new(Manual));

/// The allocator, behind calls that are never inlined: else each place that allocates has its own
/// copy of the lock and of the common case, and a copy that the start runs once costs an emulator
/// more to translate than calls cost for ever after.
struct Heap(TalcLock<spinning_top::RawSpinlock, Manual>);

// SAFETY: the inner allocator's own implementation, unchanged.
unsafe impl GlobalAlloc for Heap {
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.0.alloc(layout) }
    }

    #[inline(never)]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    #[inline(never)]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    #[inline(never)]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.0.realloc(pointer, layout, bytes) }
    }
}

static BYTES: AtomicUsize = AtomicUsize::new(0);

/// Hands a region to the heap.
///
/// # Safety
/// The region is RAM, mapped, and used by nothing else for ever.
pub(super) unsafe fn add(region: Region) {
    let base = core::ptr::with_exposed_provenance_mut::<u8>(region.start as usize);
    let len = (region.end - region.start) as usize;
    // SAFETY: the caller's promise.
    if unsafe { HEAP.0.lock().claim(base, len) }.is_some() {
        BYTES.fetch_add(len, Relaxed);
    }
}

/// How many bytes the heap was given.
pub(crate) fn bytes() -> usize {
    BYTES.load(Relaxed)
}

/// `len` bytes of any value, for a buffer that is written before it is read. If they were zeroed,
/// the buffers of a dozen connections would cost the start of an emulated cell some milliseconds,
/// and its host a page for each 4 KiB that is not needed yet.
pub(crate) fn buffer(len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = Vec::with_capacity(len);
    let start = bytes.as_mut_ptr();
    // SAFETY: to the compiler this block has written the bytes, since it may write anything that
    // its operand leads to. On the machine they hold what they held: RAM has a value in each byte,
    // and keeps it.
    unsafe { asm!("/* {} */", in(reg) start, options(nostack, preserves_flags)) };
    // SAFETY: `len` bytes were allocated, and have their values by the block above.
    unsafe { bytes.set_len(len) };
    bytes
}
