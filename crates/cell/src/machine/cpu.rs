//! Single instructions that Rust has no words for: port I/O, model-specific registers, tables,
//! `hlt`.
//!
//! A port or an MSR reaches devices and the processor, never Rust's memory (device memory access is
//! set up by the drivers alone, with addresses from [`super::dma`]), so the functions are safe for
//! this crate; none is public.
#![allow(unsafe_code)]

use core::arch::asm;
use core::arch::x86_64::{__cpuid, _rdtsc, CpuidResult};

pub(crate) fn out8(port: u16, value: u8) {
    // SAFETY: port I/O touches no memory and no flag.
    unsafe { asm!("out dx, al", in("dx") port, in("al") value, options(nomem, nostack, preserves_flags)) };
}

pub(crate) fn in8(port: u16) -> u8 {
    let value: u8;
    // SAFETY: as for out8.
    unsafe { asm!("in al, dx", in("dx") port, out("al") value, options(nomem, nostack, preserves_flags)) };
    value
}

pub(crate) fn out32(port: u16, value: u32) {
    // SAFETY: as for out8.
    unsafe { asm!("out dx, eax", in("dx") port, in("eax") value, options(nomem, nostack, preserves_flags)) };
}

pub(crate) fn in32(port: u16) -> u32 {
    let value: u32;
    // SAFETY: as for out8.
    unsafe { asm!("in eax, dx", in("dx") port, out("eax") value, options(nomem, nostack, preserves_flags)) };
    value
}

pub(crate) fn read_msr(register: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: the callers name registers whose presence they have checked; reading one has no
    // effect on memory.
    unsafe { asm!("rdmsr", in("ecx") register, out("eax") low, out("edx") high, options(nomem, nostack)) };
    u64::from(high) << 32 | u64::from(low)
}

/// # Safety
/// Some registers name memory that the processor or the hypervisor then writes (the pvclock page);
/// the caller owns that memory for ever.
pub(crate) unsafe fn write_msr(register: u32, value: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("wrmsr", in("ecx") register, in("eax") value as u32, in("edx") (value >> 32) as u32, options(nostack));
    }
}

pub(crate) fn tsc() -> u64 {
    // SAFETY: every x86_64 processor has a time-stamp counter, and nothing here forbids reading it.
    unsafe { _rdtsc() }
}

pub(crate) fn cpuid(leaf: u32) -> CpuidResult {
    __cpuid(leaf)
}

/// How many bits a physical address has (Intel SDM volume 2, CPUID leaf 80000008H); 36 where
/// nothing says.
pub(crate) fn physical_address_bits() -> u32 {
    const EXTENDED: u32 = 0x8000_0000;
    const ADDRESSES: u32 = 0x8000_0008;
    let is_told = cpuid(EXTENDED).eax >= ADDRESSES;
    let bits = if is_told { cpuid(ADDRESSES).eax & 0xff } else { 36 };
    bits.clamp(36, 46)
}

/// A random word from the processor, where it has a generator.
fn hardware_random() -> Option<u64> {
    if cpuid(1).ecx & 1 << 30 == 0 {
        return None;
    }
    for _ in 0..10 {
        let (value, ok): (u64, u8);
        // SAFETY: CPUID has just said that the instruction exists.
        unsafe { asm!("rdrand {}", "setc {}", out(reg) value, out(reg_byte) ok, options(nomem, nostack)) };
        if ok != 0 {
            return Some(value);
        }
    }
    None
}

/// A number that peers do not know: of a generator of the processor's if there is one, else of what
/// differs from start to start.
pub(crate) fn seed() -> u64 {
    hardware_random().unwrap_or_else(|| tsc().wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The address whose access caused the last page fault.
pub(super) fn fault_address() -> u64 {
    let value: u64;
    // SAFETY: reading CR2 has no effect.
    unsafe { asm!("mov {}, cr2", out(reg) value, options(nomem, nostack, preserves_flags)) };
    value
}

/// Forgets all cached translations.
pub(super) fn flush_tlb() {
    // SAFETY: reloads CR3 with its own value; not `nomem`, since page tables must be written
    // before.
    unsafe { asm!("mov rax, cr3", "mov cr3, rax", out("rax") _, options(nostack, preserves_flags)) };
}

#[repr(C, packed)]
pub(super) struct TablePointer {
    pub(super) limit: u16,
    pub(super) base: u64,
}

/// # Safety
/// The table stays in place for ever and its gates lead to entry code.
pub(super) unsafe fn load_idt(table: &TablePointer) {
    // SAFETY: the caller's promise.
    unsafe { asm!("lidt [{}]", in(reg) table, options(readonly, nostack, preserves_flags)) };
}

/// # Safety
/// `selector` names an available TSS descriptor in the loaded GDT.
pub(super) unsafe fn load_task_register(selector: u16) {
    // SAFETY: the caller's promise.
    unsafe { asm!("ltr {:x}", in(reg) selector, options(nostack, preserves_flags)) };
}

/// Sleeps until the next interrupt. Interrupts are off outside this function: one that came before
/// is still pending in the local APIC, and `sti` takes effect only after `hlt` has begun, so no
/// wake-up is lost.
pub(super) fn sleep() {
    // SAFETY: every vector that can fire has its gate on a stack of its own (traps.rs); not
    // `nomem`, since what the devices wrote meanwhile must be read again.
    unsafe { asm!("sti", "hlt", "cli", options(nostack)) };
}

/// Stops for good.
pub(super) fn halt() -> ! {
    loop {
        // SAFETY: with interrupts off nothing wakes this processor but a reset.
        unsafe { asm!("cli", "hlt", options(nomem, nostack)) };
    }
}

/// Resets the processor by a fault that has no handler.
pub(super) fn triple_fault() -> ! {
    let none = TablePointer { limit: 0, base: 0 };
    // SAFETY: the fault that follows is the purpose.
    unsafe {
        load_idt(&none);
        asm!("int3", options(noreturn));
    }
}
