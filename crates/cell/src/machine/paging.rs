//! Page rights: write or execute, never both, and a guard page under the stack.
//!
//! boot.s maps 0 to 4 GiB at their own addresses in pages of 2 MiB, of which the first four may be executed. Here
//! these first 8 MiB get pages of 4 KiB: text read and execute; constants read only; data read and write; page 0
//! and the guard page under the stack not at all. All other memory is data. Devices above 4 GiB are mapped on
//! demand.
#![allow(unsafe_code)]

use super::cpu;
use super::mmio::Mmio;
use core::ptr::NonNull;

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
const GIB4: u64 = 4 << 30;

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

/// Gives the first 8 MiB their rights. Called once, on the boot processor, before anything else is mapped.
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
            a if (start..text_end).contains(&a) => PRESENT,
            a if (text_end..ro_end).contains(&a) => PRESENT | NO_EXECUTE,
            _ => PRESENT | WRITE | NO_EXECUTE,
        };
        let entry = if rights == 0 { 0 } else { address as u64 | rights };
        // SAFETY: index < 4 * 512 by FINE_END; one processor, called once, no reference to the table exists.
        unsafe { (&raw mut cell_pt).cast::<u64>().add(index).write(entry) };
    }
    for table in 0..FINE_END / PAGE_2M {
        let entry = ((&raw const cell_pt).addr() + table * PAGE) as u64 | PRESENT | WRITE;
        // SAFETY: the new tables map the same addresses with the rights that text, constants and data need.
        unsafe { (&raw mut cell_pd).cast::<u64>().add(table).write_volatile(entry) };
    }
    cpu::flush_tlb();
}

/// Maps the registers of a device, uncached; `None` where they overlap `ram_end` and below (the top of the memory that
/// may be RAM) or cannot be addressed.
pub(super) fn map_device(address: u64, len: usize, is_ram: impl Fn(u64, u64) -> bool) -> Option<Mmio> {
    let end = address.checked_add(len as u64)?;
    if end > 1 << 47 || is_ram(address, end) {
        return None;
    }
    let mut at = address & !(PAGE_2M as u64 - 1);
    while at < end {
        // Below 8 MiB there is only memory and what is left of the first megabyte; neither holds registers.
        if at < FINE_END as u64 {
            return None;
        }
        // SAFETY: the page holds no RAM, so making it uncached takes nothing from Rust's memory.
        unsafe { map_2m(at) };
        at += PAGE_2M as u64;
    }
    cpu::flush_tlb();
    let base = NonNull::new(core::ptr::with_exposed_provenance_mut::<u8>(address as usize))?;
    // SAFETY: mapped just now, for ever, and not RAM by the check above.
    Some(unsafe { Mmio::new(base, len) })
}

/// Maps the 2 MiB page at `address` to itself, uncached, making tables where there are none.
///
/// # Safety
/// The page holds device registers.
unsafe fn map_2m(address: u64) {
    let entry = address | PRESENT | WRITE | HUGE | NO_EXECUTE | UNCACHED;
    if address < GIB4 {
        // SAFETY: index < 2048; one processor.
        unsafe { (&raw mut cell_pd).cast::<u64>().add((address >> 21) as usize).write_volatile(entry) };
        return;
    }
    let mut table = (&raw mut cell_pml4).cast::<u64>();
    for shift in [39, 30] {
        let index = (address >> shift & 511) as usize;
        // SAFETY: `table` is a page of 512 entries: the PML4 or one that an entry of it leads to, all of them at
        // their own addresses; one processor.
        unsafe {
            let slot = table.add(index);
            let mut value = slot.read_volatile();
            if value & PRESENT == 0 {
                value = super::dma::alloc(PAGE).as_mut_ptr().expose_provenance() as u64 | PRESENT | WRITE;
                slot.write_volatile(value);
            }
            table = core::ptr::with_exposed_provenance_mut((value & ADDRESS) as usize);
        }
    }
    // SAFETY: as above.
    unsafe { table.add((address >> 21 & 511) as usize).write_volatile(entry) };
}
