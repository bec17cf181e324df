//! A window of device registers: bounds-checked volatile access.
#![allow(unsafe_code)]

use core::ptr::NonNull;

/// A window of device registers, mapped uncached for ever. Made by [`super::paging::map_device`]
/// only.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mmio {
    base: NonNull<u8>,
    len: usize,
}

macro_rules! access {
    ($read:ident, $write:ident, $word:ty) => {
        pub(crate) fn $read(&self, offset: usize) -> $word {
            // SAFETY: `at` checked bounds and alignment; the window is device memory, mapped for
            // ever, to which no reference exists.
            unsafe { self.at::<$word>(offset).read_volatile() }
        }

        pub(crate) fn $write(&self, offset: usize, value: $word) {
            // SAFETY: as for the read.
            unsafe { self.at::<$word>(offset).write_volatile(value) }
        }
    };
}

impl Mmio {
    /// # Safety
    /// The window is device memory (no RAM that Rust uses) and stays mapped for ever.
    pub(super) const unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Mmio { base, len }
    }

    /// The part from `offset`, `len` bytes long; `None` where it is not wholly inside.
    pub(crate) fn slice(&self, offset: usize, len: usize) -> Option<Mmio> {
        if offset <= self.len && len <= self.len - offset {
            // SAFETY: offset <= self.len.
            Some(Mmio { base: unsafe { self.base.add(offset) }, len })
        } else {
            None
        }
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// # Panics
    /// An access outside the window is a mistake of the driver, not of the device.
    fn at<T>(&self, offset: usize) -> *mut T {
        let size = size_of::<T>();
        assert!(offset <= self.len && size <= self.len - offset, "a register at {offset:#x} lies outside its window");
        // SAFETY: in bounds by the line above.
        let pointer = unsafe { self.base.as_ptr().add(offset) }.cast::<T>();
        assert!(pointer.is_aligned(), "a register at {offset:#x} is not aligned");
        pointer
    }

    access!(read8, write8, u8);
    access!(read16, write16, u16);
    access!(read32, write32, u32);
}
