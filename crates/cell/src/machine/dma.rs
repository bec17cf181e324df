//! Memory that devices read and write.
//!
//! Some of the machine's memory is set apart at the start and never given to the heap. Buffers come
//! from there as they are, without being zeroed. Zeroing would cost milliseconds of the start, and
//! touch pages that are not needed yet. Rust never owned this memory, so its bytes have some
//! unknown value.
#![allow(unsafe_code)]

use super::startup::Region;
use alloc::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use core::ptr::NonNull;
use spinning_top::Spinlock;
use tombolo_ring::mem::ForeignMut;

const PAGE: usize = 4096;
const ZEROS: [u8; 512] = [0; 512];

/// What is left of the memory set apart: first byte, and the byte after the last.
static APART: Spinlock<(usize, usize)> = Spinlock::new((0, 0));

/// How much of a region of `bytes` to set apart: enough for the largest rings and their buffers,
/// where there is plenty.
pub(super) const fn share(bytes: u64) -> u64 {
    if bytes >= 24 << 20 { 5 << 20 } else { bytes / 8 / PAGE as u64 * PAGE as u64 }
}

/// Sets a region apart.
///
/// # Safety
/// The region is RAM, mapped, and used by nothing else for ever.
pub(super) unsafe fn set_apart(region: Region) {
    *APART.lock() = (region.start as usize, region.end as usize);
}

/// `len` bytes of any value, aligned to a page, for ever. Their address is the one that a device
/// uses.
pub(crate) fn alloc_buffers(len: usize) -> ForeignMut<'static> {
    {
        let mut apart = APART.lock();
        let (start, end) = *apart;
        let whole = len.next_multiple_of(PAGE);
        if whole <= end - start
            && let Some(pointer) = NonNull::new(core::ptr::with_exposed_provenance_mut::<u8>(start))
        {
            apart.0 = start + whole;
            // SAFETY: of the region that was set apart, given out once; mapped for ever, and no
            // reference into it exists.
            return unsafe { ForeignMut::new(pointer, len) };
        }
    }
    let layout = Layout::from_size_align(len.max(1), PAGE).expect("a queue or buffer pool is far below isize::MAX");
    // SAFETY: the layout's size is not zero.
    let Some(pointer) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
    // SAFETY: allocated just now, never freed, and nothing else refers to it.
    unsafe { ForeignMut::new(pointer, len) }
}

/// `len` zeroed bytes, as [`alloc_buffers`].
pub(crate) fn alloc(len: usize) -> ForeignMut<'static> {
    let memory = alloc_buffers(len);
    for at in (0..len).step_by(ZEROS.len()) {
        memory.skip(at).write_from(&ZEROS);
    }
    memory
}

/// Memory by its addresses, for a device that a test plays.
#[cfg(test)]
pub(crate) struct HostMemory;

#[cfg(test)]
impl tombolo_ring::virtio::GuestMemory for HostMemory {
    fn view(&self, address: u64, len: u32) -> Option<ForeignMut<'_>> {
        let pointer = NonNull::new(core::ptr::with_exposed_provenance_mut::<u8>(address as usize))?;
        // SAFETY: the driver under test names only memory that it got from `alloc_buffers`, which
        // is never freed.
        Some(unsafe { ForeignMut::new(pointer, len as usize) })
    }
}
