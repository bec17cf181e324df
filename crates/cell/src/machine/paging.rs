//! Page rights: write or execute, never both, and a guard page under the stack.
//!
//! boot.s maps 0 to 4 GiB at their own addresses in pages of 2 MiB, of which the first four may be
//! executed. Here these first 8 MiB get pages of 4 KiB: text read and execute; constants read only;
//! data read and write; page 0 and the guard page under the stack not at all. All other memory is
//! data. Devices are mapped on demand: registers uncached, memory that a device shares cached.
#![allow(unsafe_code)]

use super::mmio::Mmio;
use super::{cpu, hypercall};
use core::ptr::NonNull;
use tombolo_ring::mem::ForeignMut;

const PRESENT: u64 = 1;
const WRITE: u64 = 1 << 1;
const UNCACHED: u64 = 1 << 3 | 1 << 4;
const HUGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

const PAGE: usize = 4096;
const PAGE_2M: usize = 2 << 20;
/// Where the 4 KiB tables end, and with them the room for the image.
const FINE_END: usize = 8 << 20;

unsafe extern "C" {
    static __image_start: u8;
    static __text_end: u8;
    static __ro_end: u8;
    static __image_end: u8;
    static cell_stack_guard: u8;
    static mut cell_pml4: [u64; 512];
    static mut cell_pd: [u64; 4 * 512];
    static mut cell_pt: [u64; 4 * 512];
}

/// Where the image lies in memory: first byte, and the byte after its last.
pub(crate) fn image() -> (usize, usize) {
    ((&raw const __image_start).addr(), (&raw const __image_end).addr())
}

/// The address of the guard page.
pub(super) fn stack_guard() -> usize {
    (&raw const cell_stack_guard).addr()
}

/// Gives the first 8 MiB their rights. Called once, on the boot processor, before anything else is
/// mapped.
///
/// # Panics
/// Where the image is larger than the tables reach.
pub(super) fn protect() {
    let (start, end) = image();
    let text_end = (&raw const __text_end).addr();
    let ro_end = (&raw const __ro_end).addr();
    assert!(end <= FINE_END, "the image ends at {end:#x}; at most {FINE_END:#x} is possible");
    for index in 0..FINE_END / PAGE {
        let address = index * PAGE;
        let rights = match address {
            0 => 0,
            a if a == stack_guard() => 0,
            // Xen has written it; nothing here ever does.
            a if hypercall::is_available() && a == hypercall::page() => PRESENT,
            a if (start..text_end).contains(&a) => PRESENT,
            a if (text_end..ro_end).contains(&a) => PRESENT | NO_EXECUTE,
            _ => PRESENT | WRITE | NO_EXECUTE,
        };
        let entry = if rights == 0 { 0 } else { address as u64 | rights };
        // SAFETY: index < 4 * 512 by FINE_END; one processor, called once, no reference to the
        // table exists.
        unsafe { (&raw mut cell_pt).cast::<u64>().add(index).write(entry) };
    }
    for table in 0..FINE_END / PAGE_2M {
        let entry = ((&raw const cell_pt).addr() + table * PAGE) as u64 | PRESENT | WRITE;
        // SAFETY: the new tables map the same addresses with the rights that text, constants and
        // data need.
        unsafe { (&raw mut cell_pd).cast::<u64>().add(table).write_volatile(entry) };
    }
    cpu::flush_tlb();
}

/// Maps the registers of a device, uncached; `None` where they overlap RAM or cannot be addressed.
pub(super) fn map_device(address: u64, len: usize, is_ram: impl Fn(u64, u64) -> bool) -> Option<Mmio> {
    let base = map(address, len, UNCACHED, is_ram)?;
    // SAFETY: mapped just now, for ever, and not RAM by the check in `map`.
    Some(unsafe { Mmio::new(base, len) })
}

/// Maps memory that a device shares with others, cached; `None` as for [`map_device`].
pub(super) fn map_shared(address: u64, len: usize, is_ram: impl Fn(u64, u64) -> bool) -> Option<ForeignMut<'static>> {
    let base = map(address, len, 0, is_ram)?;
    // SAFETY: mapped just now, for ever; not RAM that Rust uses, so no reference leads into it.
    Some(unsafe { ForeignMut::new(base, len) })
}

/// Maps `len` bytes at `address` to themselves: whole pages of 2 MiB where they are covered, else
/// pages of 4 KiB, so that registers and shared memory that are neighbours keep their own cache
/// modes.
fn map(address: u64, len: usize, cache: u64, is_ram: impl Fn(u64, u64) -> bool) -> Option<NonNull<u8>> {
    let end = address.checked_add(len as u64)?.checked_next_multiple_of(PAGE as u64)?;
    // Below 8 MiB there is only memory and what is left of the first megabyte; neither belongs to a
    // device.
    let mut at = address & !(PAGE as u64 - 1);
    if len == 0 || at < FINE_END as u64 || end > 1 << 47 || is_ram(at, end) {
        return None;
    }
    let mut changed = false;
    while at < end {
        let is_whole = at.is_multiple_of(PAGE_2M as u64) && end - at >= PAGE_2M as u64;
        // SAFETY: the page holds no RAM, so its mode takes nothing from Rust's memory.
        let (mapped, is_new) = unsafe { map_page(at, cache, is_whole) };
        changed |= is_new;
        at += mapped as u64;
    }
    // Most devices lie where boot.s has mapped them; an emulator pays for each flush with a new
    // walk for every page in use.
    if changed {
        cpu::flush_tlb();
    }
    NonNull::new(core::ptr::with_exposed_provenance_mut::<u8>(address as usize))
}

/// The table that an entry of `table` leads to, made where there is none. A 2 MiB page becomes 512
/// of 4 KiB, with its own mode.
///
/// # Safety
/// `table` is a page of 512 entries at its own address; one processor.
unsafe fn next_table(table: *mut u64, index: usize) -> *mut u64 {
    // SAFETY: index < 512 by the callers' masks; the rest is the caller's promise.
    let slot = unsafe { table.add(index) };
    // SAFETY: as above.
    let mut value = unsafe { slot.read_volatile() };
    if value & (PRESENT | HUGE) != PRESENT {
        let made = super::dma::alloc(PAGE).as_mut_ptr();
        if value & PRESENT != 0 {
            for page in 0..512 {
                let entry = (value & !HUGE) + page as u64 * PAGE as u64;
                // SAFETY: a page of its own, allocated just now.
                unsafe { made.cast::<u64>().add(page).write(entry) };
            }
        }
        value = made.expose_provenance() as u64 | PRESENT | WRITE;
        // SAFETY: as above; the new table maps what the entry did before.
        unsafe { slot.write_volatile(value) };
    }
    core::ptr::with_exposed_provenance_mut((value & ADDRESS) as usize)
}

/// Maps the page at `address` to itself: 2 MiB where that `is_whole`ly belongs to the device, else
/// 4 KiB. Returns how many bytes from there on are mapped as was asked, and whether the tables had
/// to be changed for that.
///
/// # Safety
/// The page holds a device's registers or memory.
unsafe fn map_page(address: u64, cache: u64, is_whole: bool) -> (usize, bool) {
    let entry = address | PRESENT | WRITE | NO_EXECUTE | cache;
    let index = |shift: u32| (address >> shift & 511) as usize;
    // SAFETY: the PML4 and what its entries lead to, all of them at their own addresses; one
    // processor.
    unsafe {
        let pointers = next_table((&raw mut cell_pml4).cast::<u64>(), index(39));
        let directory = next_table(pointers, index(30));
        let slot = directory.add(index(21));
        let value = slot.read_volatile();
        if value & (PRESENT | HUGE) == PRESENT | HUGE && value & UNCACHED == cache {
            return (PAGE_2M - (address as usize & (PAGE_2M - 1)), false);
        }
        // A table that is there stays: a neighbour with a mode of its own may need it.
        if is_whole && value & (PRESENT | HUGE) != PRESENT {
            slot.write_volatile(entry | HUGE);
            return (PAGE_2M, true);
        }
        next_table(directory, index(21)).add(index(12)).write_volatile(entry);
    }
    (PAGE, true)
}
