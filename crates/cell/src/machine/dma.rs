//! Memory that devices read and write.
#![allow(unsafe_code)]

use alloc::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use core::ptr::NonNull;
use tombolo_ring::mem::ForeignMut;

/// `len` zeroed bytes, aligned to a page, for ever. Its address is the address that a device uses.
pub(crate) fn alloc(len: usize) -> ForeignMut<'static> {
    let layout = Layout::from_size_align(len.max(1), 4096).expect("a queue or buffer pool is far below isize::MAX");
    // SAFETY: the layout's size is not zero.
    let Some(pointer) = NonNull::new(unsafe { alloc_zeroed(layout) }) else { handle_alloc_error(layout) };
    // SAFETY: allocated just now, never freed, and nothing else refers to it.
    unsafe { ForeignMut::new(pointer, len) }
}
