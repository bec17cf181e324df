//! Views over foreign memory: memory that another party maps too and may write at any moment.
//!
//! Two rules, for the whole project:
//!
//! 1. **No Rust reference points into foreign memory.** A `&[u8]` promises that the bytes do not
//!    change while it lives. A hostile peer keeps no such promise. A view is a pointer with a
//!    length and a lifetime.
//! 2. **Read once.** A field is read into a local, the local is checked, the local is used. Reading
//!    it again may give another value.
//!
//! A peer that writes at a bad moment can hand over torn *data*. It can never make an access here
//! leave the bounds that the constructor was promised. Single words are accessed as atomics, so a
//! torn index does not exist. Bulk bytes are accessed by plain copies, whose content is untrusted
//! anyway.
//!
//! [`Foreign`] is a readable view, [`ForeignMut`] a writable one. Both are plain values: copying
//! one copies the pointer. The lifetime is that of the mapping. Two views may overlap, even two
//! writable ones, since another process writes there too.
//!
//! This module is on the list of modules that may use `unsafe` (ARCHITECTURE.md).
#![allow(unsafe_code)]

use core::marker::PhantomData;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

/// A readable window of foreign memory.
#[derive(Clone, Copy, Debug)]
pub struct Foreign<'m> {
    ptr: NonNull<u8>,
    len: usize,
    lifetime: PhantomData<&'m ()>,
}

/// A writable window of foreign memory.
#[derive(Clone, Copy, Debug)]
pub struct ForeignMut<'m>(Foreign<'m>);

// SAFETY: a view holds no state of its own and every access through it is an atomic or a bulk copy
// whose content no code relies on; the mapping's lifetime bounds it on whichever thread it is used.
unsafe impl Send for Foreign<'_> {}
// SAFETY: as for Send; a shared view only copies out of memory that others write anyway.
unsafe impl Sync for Foreign<'_> {}
// SAFETY: as for Foreign.
unsafe impl Send for ForeignMut<'_> {}
// SAFETY: as for Foreign; writes race with the peer by design, and no reference into the window
// exists.
unsafe impl Sync for ForeignMut<'_> {}

/// Largest object that is moved by the copy with constant sizes; longer ones go to `memmove`.
const SMALL_COPY_BYTES: usize = 128;

impl<'m> Foreign<'m> {
    /// A view of `len` bytes at `ptr`.
    ///
    /// # Safety
    /// The `len` bytes at `ptr` stay mapped and readable for `'m`, and no Rust reference other than
    /// to interior-mutable or foreign data refers to them in that time.
    #[inline]
    pub const unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        Foreign { ptr, len, lifetime: PhantomData }
    }

    /// An empty view.
    #[inline]
    pub const fn empty() -> Self {
        Foreign { ptr: NonNull::dangling(), len: 0, lifetime: PhantomData }
    }

    /// Length in bytes.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the view has no byte.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte, for system calls that take an iovec. Never to be dereferenced
    /// elsewhere.
    #[inline]
    pub const fn as_ptr(&self) -> *const u8 {
        self.ptr.as_ptr()
    }

    /// The part of `len` bytes from `offset`, or `None` where it is not wholly inside.
    #[inline]
    pub const fn slice(self, offset: usize, len: usize) -> Option<Foreign<'m>> {
        // No overflow: `len <= self.len - offset` is only evaluated when offset <= self.len.
        if offset <= self.len && len <= self.len - offset {
            // SAFETY: offset <= self.len, so the pointer stays inside the window the constructor
            // was promised.
            let ptr = unsafe { self.ptr.add(offset) };
            Some(Foreign { ptr, len, lifetime: PhantomData })
        } else {
            None
        }
    }

    /// The view without its first `n` bytes; empty where it has no more than that.
    #[inline]
    pub fn skip(self, n: usize) -> Foreign<'m> {
        let n = n.min(self.len);
        // SAFETY: n <= self.len.
        Foreign { ptr: unsafe { self.ptr.add(n) }, len: self.len - n, lifetime: PhantomData }
    }

    /// The first `n` bytes, or all where there are fewer.
    #[inline]
    pub fn take(self, n: usize) -> Foreign<'m> {
        Foreign { len: n.min(self.len), ..self }
    }

    #[inline]
    fn field<T>(&self, offset: usize) -> Option<*mut T> {
        let part = self.slice(offset, size_of::<T>())?;
        let ptr = part.ptr.as_ptr().cast::<T>();
        ptr.is_aligned().then_some(ptr)
    }

    /// The little-endian u16 at `offset`, read as one word; `None` where it is out of bounds or not
    /// aligned.
    #[inline]
    pub fn load_u16(&self, offset: usize, order: Ordering) -> Option<u16> {
        let ptr = self.field::<u16>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is mapped for 'm; access is
        // atomic only.
        Some(u16::from_le(unsafe { AtomicU16::from_ptr(ptr) }.load(order)))
    }

    /// The little-endian u32 at `offset`, read as one word; `None` where it is out of bounds or not
    /// aligned.
    #[inline]
    pub fn load_u32(&self, offset: usize, order: Ordering) -> Option<u32> {
        let ptr = self.field::<u32>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is mapped for 'm; access is
        // atomic only.
        Some(u32::from_le(unsafe { AtomicU32::from_ptr(ptr) }.load(order)))
    }

    /// The little-endian u64 at `offset`, read as one word; `None` where it is out of bounds or not
    /// aligned.
    #[inline]
    pub fn load_u64(&self, offset: usize, order: Ordering) -> Option<u64> {
        let ptr = self.field::<u64>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is mapped for 'm; access is
        // atomic only.
        Some(u64::from_le(unsafe { AtomicU64::from_ptr(ptr) }.load(order)))
    }

    /// Copies `N` bytes at `offset` into a local; `None` where they are not wholly inside.
    #[inline]
    pub fn read_array<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        let part = self.slice(offset, N)?;
        let mut local = [0u8; N];
        // SAFETY: `slice` checked that N bytes are inside the window; `local` holds as many.
        unsafe { read_words(part.ptr.as_ptr(), &mut local) };
        Some(local)
    }

    /// Copies the first bytes into `to`, as many as both hold; returns how many.
    #[inline]
    pub fn read_into(&self, to: &mut [u8]) -> usize {
        let n = self.len.min(to.len());
        // SAFETY: n bytes are readable (constructor) and writable (`to` is exclusive); `copy`
        // allows overlap, although an exclusive local slice cannot overlap a foreign window.
        unsafe { copy_bytes(self.ptr.as_ptr(), to.as_mut_ptr(), n) };
        n
    }

    /// Copies bytes into `to`, as many as both hold; returns how many. The two may overlap (a peer
    /// can hand over the same memory twice).
    #[inline]
    pub fn copy_to(&self, to: ForeignMut<'_>) -> usize {
        let n = self.len.min(to.0.len);
        // SAFETY: n bytes are inside both windows by their constructors; `copy_bytes` allows
        // overlap.
        unsafe { copy_bytes(self.ptr.as_ptr(), to.0.ptr.as_ptr(), n) };
        n
    }

    /// Asks the processor to fetch the first cache line, for a read that comes soon.
    #[inline]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch never faults, for any address.
        unsafe {
            core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(self.ptr.as_ptr().cast())
        };
    }
}

impl<'m> From<&'m [u8]> for Foreign<'m> {
    /// A view of this process's own memory: nothing writes there while the reference lives, so
    /// reading is fine.
    #[inline]
    fn from(bytes: &'m [u8]) -> Self {
        Foreign { ptr: NonNull::from(bytes).cast(), len: bytes.len(), lifetime: PhantomData }
    }
}

impl<'m> ForeignMut<'m> {
    /// A writable view of `len` bytes at `ptr`.
    ///
    /// # Safety
    /// As for [`Foreign::new`], and the bytes are writable.
    #[inline]
    pub const unsafe fn new(ptr: NonNull<u8>, len: usize) -> Self {
        // SAFETY: the caller's promise is a superset of what Foreign::new asks.
        ForeignMut(unsafe { Foreign::new(ptr, len) })
    }

    /// The same window for reading.
    #[inline]
    pub const fn as_foreign(&self) -> Foreign<'m> {
        self.0
    }

    /// Length in bytes.
    #[inline]
    pub const fn len(&self) -> usize {
        self.0.len
    }

    /// Whether the view has no byte.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The address of the first byte, for system calls that take an iovec. Never to be dereferenced
    /// elsewhere.
    #[inline]
    pub const fn as_mut_ptr(&self) -> *mut u8 {
        self.0.ptr.as_ptr()
    }

    /// The part of `len` bytes from `offset`, or `None` where it is not wholly inside.
    #[inline]
    pub const fn slice(self, offset: usize, len: usize) -> Option<ForeignMut<'m>> {
        match self.0.slice(offset, len) {
            Some(part) => Some(ForeignMut(part)),
            None => None,
        }
    }

    /// The view without its first `n` bytes; empty where it has no more than that.
    #[inline]
    pub fn skip(self, n: usize) -> ForeignMut<'m> {
        ForeignMut(self.0.skip(n))
    }

    /// The first `n` bytes, or all where there are fewer.
    #[inline]
    pub fn take(self, n: usize) -> ForeignMut<'m> {
        ForeignMut(self.0.take(n))
    }

    /// Writes a little-endian u16 as one word; `None` where it is out of bounds or not aligned.
    #[inline]
    pub fn store_u16(&self, offset: usize, value: u16, order: Ordering) -> Option<()> {
        let ptr = self.0.field::<u16>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is writable for 'm; access is
        // atomic only.
        unsafe { AtomicU16::from_ptr(ptr) }.store(value.to_le(), order);
        Some(())
    }

    /// Writes a little-endian u32 as one word; `None` where it is out of bounds or not aligned.
    #[inline]
    pub fn store_u32(&self, offset: usize, value: u32, order: Ordering) -> Option<()> {
        let ptr = self.0.field::<u32>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is writable for 'm; access is
        // atomic only.
        unsafe { AtomicU32::from_ptr(ptr) }.store(value.to_le(), order);
        Some(())
    }

    /// Writes a little-endian u64 as one word; `None` where it is out of bounds or not aligned.
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64, order: Ordering) -> Option<()> {
        let ptr = self.0.field::<u64>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is writable for 'm; access is
        // atomic only.
        unsafe { AtomicU64::from_ptr(ptr) }.store(value.to_le(), order);
        Some(())
    }

    /// Exchanges the little-endian u32 at `offset` in one step; gives what was there. `None` as for
    /// a store.
    #[inline]
    pub fn swap_u32(&self, offset: usize, value: u32, order: Ordering) -> Option<u32> {
        let ptr = self.0.field::<u32>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is writable for 'm; access is
        // atomic only.
        Some(u32::from_le(unsafe { AtomicU32::from_ptr(ptr) }.swap(value.to_le(), order)))
    }

    /// Clears the bits that `keep` lacks in the little-endian u32 at `offset`, in one step; gives
    /// what was there. `None` as for a store.
    #[inline]
    pub fn fetch_and_u32(&self, offset: usize, keep: u32, order: Ordering) -> Option<u32> {
        let ptr = self.0.field::<u32>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is writable for 'm; access is
        // atomic only.
        Some(u32::from_le(unsafe { AtomicU32::from_ptr(ptr) }.fetch_and(keep.to_le(), order)))
    }

    /// Exchanges the little-endian u64 at `offset` in one step; gives what was there. `None` as for
    /// a store.
    #[inline]
    pub fn swap_u64(&self, offset: usize, value: u64, order: Ordering) -> Option<u64> {
        let ptr = self.0.field::<u64>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is writable for 'm; access is
        // atomic only.
        Some(u64::from_le(unsafe { AtomicU64::from_ptr(ptr) }.swap(value.to_le(), order)))
    }

    /// Clears the bits that `keep` lacks in the little-endian u64 at `offset`, in one step; gives
    /// what was there. `None` as for a store.
    #[inline]
    pub fn fetch_and_u64(&self, offset: usize, keep: u64, order: Ordering) -> Option<u64> {
        let ptr = self.0.field::<u64>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is writable for 'm; access is
        // atomic only.
        Some(u64::from_le(unsafe { AtomicU64::from_ptr(ptr) }.fetch_and(keep.to_le(), order)))
    }

    /// Writes `new` to the little-endian u16 at `offset` if it is `current`, in one step. Whether
    /// it was; `None` as for a store.
    #[inline]
    pub fn compare_exchange_u16(&self, offset: usize, current: u16, new: u16, order: Ordering) -> Option<bool> {
        let ptr = self.0.field::<u16>(offset)?;
        // SAFETY: `field` checked bounds and alignment; the window is writable for 'm; access is
        // atomic only.
        let word = unsafe { AtomicU16::from_ptr(ptr) };
        Some(word.compare_exchange(current.to_le(), new.to_le(), order, Ordering::Relaxed).is_ok())
    }

    /// Writes `N` bytes at `offset`; `None` where they do not fit.
    #[inline]
    pub fn write_array<const N: usize>(&self, offset: usize, value: [u8; N]) -> Option<()> {
        let part = self.0.slice(offset, N)?;
        // SAFETY: `slice` checked that N bytes are inside the writable window; the store asks no
        // alignment. Unlike a read, a write whose value is a local gains nothing from `volatile`:
        // nothing can be read twice.
        unsafe { ptr::write_unaligned(part.ptr.as_ptr().cast::<[u8; N]>(), value) };
        Some(())
    }

    /// Asks the processor to fetch the first cache line for writing, for a write that comes soon.
    #[inline]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch never faults, for any address.
        unsafe {
            core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_ET0 }>(self.0.ptr.as_ptr().cast())
        };
    }

    /// Copies bytes of `from` into the window, as many as both hold; returns how many.
    #[inline]
    pub fn write_from(&self, from: &[u8]) -> usize {
        let n = self.0.len.min(from.len());
        // SAFETY: n bytes are readable in `from` and writable in the window (constructor).
        unsafe { copy_bytes(from.as_ptr(), self.0.ptr.as_ptr(), n) };
        n
    }
}

impl<'m> From<&'m mut [u8]> for ForeignMut<'m> {
    /// A view of memory of our own, held exclusively while the view lives.
    #[inline]
    fn from(bytes: &'m mut [u8]) -> Self {
        let len = bytes.len();
        ForeignMut(Foreign { ptr: NonNull::from(bytes).cast(), len, lifetime: PhantomData })
    }
}

/// Reads bytes once each into a local, in words of up to eight bytes of any alignment. A volatile
/// read of a byte array would be compiled to as many byte loads; a plain read would allow the
/// compiler to read again later.
///
/// # Safety
/// `N` bytes are readable at `from`.
#[inline(always)]
unsafe fn read_words<const N: usize>(from: *const u8, local: &mut [u8; N]) {
    #[derive(Clone, Copy)]
    #[repr(C, packed)]
    struct Unaligned<T>(T);
    let mut at = 0;
    macro_rules! words {
        ($word:ty) => {
            while N - at >= size_of::<$word>() {
                // SAFETY: at + size_of(word) <= N bytes, which the caller promised; a packed struct
                // asks no alignment.
                let word = unsafe { from.add(at).cast::<Unaligned<$word>>().read_volatile() }.0;
                local[at..at + size_of::<$word>()].copy_from_slice(&word.to_ne_bytes());
                at += size_of::<$word>();
            }
        };
    }
    words!(u64);
    words!(u32);
    words!(u16);
    words!(u8);
}

/// Copies `n` bytes that may overlap. Frames are often 60 to 64 bytes, for which the call of
/// `memmove` costs more than the copy: up to [`SMALL_COPY_BYTES`] go by constant-size moves that
/// the compiler makes loads and stores of.
///
/// # Safety
/// `n` bytes are readable at `from` and writable at `to`.
#[inline]
unsafe fn copy_bytes(from: *const u8, to: *mut u8, n: usize) {
    // SAFETY: in every arm the offsets used are below n, within what the caller promised; each arm
    // loads all of its bytes before it stores any, so overlap is fine.
    unsafe {
        if n > SMALL_COPY_BYTES {
            ptr::copy(from, to, n);
        } else if n > 64 {
            let a = from.cast::<[u8; 64]>().read_unaligned();
            let b = from.add(n - 64).cast::<[u8; 64]>().read_unaligned();
            to.cast::<[u8; 64]>().write_unaligned(a);
            to.add(n - 64).cast::<[u8; 64]>().write_unaligned(b);
        } else if n >= 32 {
            let a = from.cast::<[u8; 32]>().read_unaligned();
            let b = from.add(n - 32).cast::<[u8; 32]>().read_unaligned();
            to.cast::<[u8; 32]>().write_unaligned(a);
            to.add(n - 32).cast::<[u8; 32]>().write_unaligned(b);
        } else if n >= 16 {
            let a = from.cast::<[u8; 16]>().read_unaligned();
            let b = from.add(n - 16).cast::<[u8; 16]>().read_unaligned();
            to.cast::<[u8; 16]>().write_unaligned(a);
            to.add(n - 16).cast::<[u8; 16]>().write_unaligned(b);
        } else if n >= 8 {
            let a = from.cast::<u64>().read_unaligned();
            let b = from.add(n - 8).cast::<u64>().read_unaligned();
            to.cast::<u64>().write_unaligned(a);
            to.add(n - 8).cast::<u64>().write_unaligned(b);
        } else {
            ptr::copy(from, to, n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn slice_refuses_what_is_not_wholly_inside() {
        let bytes = [0u8; 16];
        let view = Foreign::from(&bytes[..]);
        assert!(view.slice(0, 16).is_some());
        assert!(view.slice(16, 0).is_some());
        assert!(view.slice(0, 17).is_none());
        assert!(view.slice(17, 0).is_none());
        assert!(view.slice(8, usize::MAX).is_none());
        assert!(view.slice(usize::MAX, 1).is_none());
    }

    #[test]
    fn words_are_refused_out_of_bounds_and_unaligned() {
        let mut words = [0u64; 2];
        // A u64 array gives a window whose alignment is known.
        let ptr = NonNull::from(&mut words).cast::<u8>();
        // SAFETY: 16 bytes of `words`, which outlives the view and is not otherwise used while it
        // lives.
        let view = unsafe { ForeignMut::new(ptr, 16) };
        assert_eq!(view.store_u16(14, 0x1234, Ordering::Relaxed), Some(()));
        assert_eq!(view.as_foreign().load_u16(14, Ordering::Relaxed), Some(0x1234));
        assert_eq!(view.as_foreign().read_array::<2>(14), Some([0x34, 0x12]));
        assert_eq!(view.store_u16(15, 1, Ordering::Relaxed), None);
        assert_eq!(view.store_u16(13, 1, Ordering::Relaxed), None);
        assert_eq!(view.store_u32(14, 1, Ordering::Relaxed), None);
        assert_eq!(view.as_foreign().load_u32(2, Ordering::Relaxed), None);
    }

    #[test]
    fn exchanges_give_what_was_there_and_are_refused_as_stores_are() {
        let mut words = [0u64; 2];
        let ptr = NonNull::from(&mut words).cast::<u8>();
        // SAFETY: 16 bytes of `words`, which outlives the view and is not otherwise used while it
        // lives.
        let view = unsafe { ForeignMut::new(ptr, 16) };
        assert_eq!(view.swap_u64(8, 0xf0f0, Ordering::AcqRel), Some(0));
        assert_eq!(view.fetch_and_u64(8, !0xf000, Ordering::AcqRel), Some(0xf0f0));
        assert_eq!(view.compare_exchange_u16(8, 0xf0f0, 1, Ordering::AcqRel), Some(false));
        assert_eq!(view.compare_exchange_u16(8, 0x00f0, 1, Ordering::AcqRel), Some(true));
        assert_eq!(view.as_foreign().load_u64(8, Ordering::Relaxed), Some(1));
        assert_eq!(view.swap_u64(12, 1, Ordering::AcqRel), None);
        assert_eq!(view.fetch_and_u64(16, 1, Ordering::AcqRel), None);
        assert_eq!(view.compare_exchange_u16(15, 0, 1, Ordering::AcqRel), None);
    }

    #[test]
    fn copies_of_every_length_are_whole_and_stay_inside() {
        for n in 0..200usize {
            let from: Vec<u8> = (0..n).map(|i| i as u8 ^ 0x5a).collect();
            let mut to = [0xa5u8; 256];
            let copied = Foreign::from(&from[..]).copy_to(ForeignMut::from(&mut to[20..20 + n]));
            assert_eq!(copied, n);
            assert_eq!(&to[20..20 + n], &from[..]);
            assert!(to[..20].iter().chain(&to[20 + n..]).all(|b| *b == 0xa5), "n = {n}");
        }
    }

    #[test]
    fn arrays_of_every_shape_are_read_whole_at_every_alignment() {
        let bytes: Vec<u8> = (0..64).collect();
        let view = Foreign::from(&bytes[..]);
        for at in 0..32 {
            assert_eq!(view.read_array::<1>(at), Some([bytes[at]]));
            assert_eq!(view.read_array::<12>(at).as_ref().map(|b| &b[..]), Some(&bytes[at..at + 12]));
            assert_eq!(view.read_array::<14>(at).as_ref().map(|b| &b[..]), Some(&bytes[at..at + 14]));
            assert_eq!(view.read_array::<31>(at).as_ref().map(|b| &b[..]), Some(&bytes[at..at + 31]));
        }
        assert_eq!(view.read_array::<33>(32), None);
        assert_eq!(view.read_array::<0>(64), Some([]));
    }

    #[test]
    fn overlapping_copies_behave_as_memmove() {
        for n in [1usize, 15, 16, 31, 32, 63, 64, 65, 100] {
            let mut bytes: Vec<u8> = (0..=255).collect();
            let want: Vec<u8> = bytes[..n].to_vec();
            let all = ForeignMut::from(&mut bytes[..]);
            all.as_foreign().take(n).copy_to(all.skip(5).take(n));
            assert_eq!(&bytes[5..5 + n], &want[..], "n = {n}");
        }
    }
}
