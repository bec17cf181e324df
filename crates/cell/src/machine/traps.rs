//! Descriptor tables, and what an exception says before the cell ends.
//!
//! Every vector runs on a stack of its own (IST): the processor switches stacks before it writes
//! anything, so code compiled with a red zone (the prebuilt `core`) is safe, and an overflow of the
//! main stack can still be reported.
#![allow(unsafe_code)]

use super::cpu::{self, TablePointer};
use super::exit::{ExitCode, exit};
use super::paging;
use crate::println;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The first vector of the devices' interrupts; exceptions lie below.
const FIRST_INTERRUPT: usize = 32;
/// How many device interrupts have an entry.
pub(crate) const INTERRUPTS: usize = 16;
/// Where the local APIC reports an interrupt that went away.
pub(super) const SPURIOUS_VECTOR: u8 = 255;

const CODE_SELECTOR: u16 = 8;
const TASK_SELECTOR: u16 = 24;
const INTERRUPT_GATE: u8 = 0x8e;
const AVAILABLE_TSS: u64 = 0x89;

unsafe extern "C" {
    static mut cell_gdt: [u64; 5];
    static cell_exception_table: [u64; 32];
    static cell_interrupt_table: [u64; INTERRUPTS];
    static cell_interrupts: [AtomicU64; INTERRUPTS];
    static cell_ist_irq_top: u8;
    static cell_ist_fault_top: u8;
    fn cell_spurious();
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Gate {
    offset_low: u16,
    selector: u16,
    ist: u8,
    kind: u8,
    offset_middle: u16,
    offset_high: u32,
    reserved: u32,
}

impl Gate {
    const fn none() -> Gate {
        Gate { offset_low: 0, selector: 0, ist: 0, kind: 0, offset_middle: 0, offset_high: 0, reserved: 0 }
    }

    fn new(entry: u64, ist: u8) -> Gate {
        Gate {
            offset_low: entry as u16,
            selector: CODE_SELECTOR,
            ist,
            kind: INTERRUPT_GATE,
            offset_middle: (entry >> 16) as u16,
            offset_high: (entry >> 32) as u32,
            reserved: 0,
        }
    }
}

#[repr(C, packed(4))]
struct TaskState {
    reserved: u32,
    stacks: [u64; 3],
    reserved_1: u64,
    ist: [u64; 7],
    reserved_2: u64,
    reserved_3: u16,
    io_map: u16,
}

const _: () = assert!(size_of::<TaskState>() == 104 && size_of::<Gate>() == 16);

static mut IDT: [Gate; 256] = [Gate::none(); 256];
static mut TASK: TaskState =
    TaskState { reserved: 0, stacks: [0; 3], reserved_1: 0, ist: [0; 7], reserved_2: 0, reserved_3: 0, io_map: 104 };

const IST_INTERRUPT: u8 = 1;
const IST_FAULT: u8 = 2;

/// Loads the tables. Called once, on the boot processor, before anything can fault on purpose.
pub(super) fn init() {
    // SAFETY: one processor, called once; from here on the tables are only read by it. Entry
    // addresses come from traps.s, stack addresses from boot.s.
    unsafe {
        let idt = (&raw mut IDT).cast::<Gate>();
        let entries = cell_exception_table.iter().chain(&cell_interrupt_table);
        for (vector, entry) in entries.enumerate() {
            let stack = if vector < FIRST_INTERRUPT { IST_FAULT } else { IST_INTERRUPT };
            idt.add(vector).write(Gate::new(*entry, stack));
        }
        let spurious = cell_spurious as *const () as u64;
        idt.add(usize::from(SPURIOUS_VECTOR)).write(Gate::new(spurious, IST_INTERRUPT));

        let task = &raw mut TASK;
        (*task).ist[usize::from(IST_INTERRUPT) - 1] = (&raw const cell_ist_irq_top).addr() as u64;
        (*task).ist[usize::from(IST_FAULT) - 1] = (&raw const cell_ist_fault_top).addr() as u64;
        let base = task.addr() as u64;
        let gdt = (&raw mut cell_gdt).cast::<u64>();
        let low = (size_of::<TaskState>() as u64 - 1) | (base & 0xff_ffff) << 16 | AVAILABLE_TSS << 40;
        gdt.add(3).write(low | (base >> 24 & 0xff) << 56);
        gdt.add(4).write(base >> 32);
        cpu::load_task_register(TASK_SELECTOR);
        cpu::load_idt(&TablePointer { limit: (size_of::<Gate>() * 256 - 1) as u16, base: idt.addr() as u64 });
    }
}

/// The vector of device interrupt `index`.
pub(crate) const fn vector(index: usize) -> u8 {
    assert!(index < INTERRUPTS);
    (FIRST_INTERRUPT + index) as u8
}

/// How often device interrupt `index` came.
pub(crate) fn interrupt_count(index: usize) -> u64 {
    // SAFETY: written by traps.s with locked increments, read here as atomics.
    unsafe { cell_interrupts[index].load(Relaxed) }
}

/// What traps.s has pushed.
#[repr(C)]
struct Frame {
    registers: [u64; 15],
    vector: u64,
    code: u64,
    rip: u64,
    cs: u64,
    flags: u64,
    rsp: u64,
    ss: u64,
}

const PAGE_FAULT: u64 = 14;

fn name(vector: u64) -> &'static str {
    match vector {
        0 => "divide error",
        2 => "non-maskable interrupt",
        3 => "breakpoint",
        6 => "invalid instruction",
        8 => "double fault",
        12 => "stack fault",
        13 => "general protection fault",
        14 => "page fault",
        16 | 19 => "floating-point error",
        18 => "machine check",
        _ => "exception",
    }
}

/// Why a page fault came, from its error code (Intel SDM volume 3, §4.7).
fn page_fault_reason(address: u64, code: u64) -> &'static str {
    const PROTECTION: u64 = 1;
    const WRITE: u64 = 2;
    const FETCH: u64 = 16;
    let guard = paging::stack_guard() as u64;
    if (guard..guard + 4096).contains(&address) {
        "the stack overflowed"
    } else if code & FETCH != 0 {
        "execution of data"
    } else if code & PROTECTION != 0 && code & WRITE != 0 {
        "write to read-only memory"
    } else if address < 4096 {
        "null pointer"
    } else {
        "access to unmapped memory"
    }
}

/// The end of every exception: a report, and an exit code. On the fault stack, with interrupts off.
///
/// # Safety
/// Called by traps.s with the frame it has pushed.
#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C" fn cell_exception(frame: *const Frame) -> ! {
    // SAFETY: traps.s pushed the frame on this stack and never returns to reuse it.
    let frame = unsafe { &*frame };
    let (vector, code, rip, rsp) = (frame.vector, frame.code, frame.rip, frame.rsp);
    let mut exit_code = ExitCode::Exception;
    if vector == PAGE_FAULT {
        let address = cpu::fault_address();
        let reason = page_fault_reason(address, code);
        if reason == "the stack overflowed" {
            exit_code = ExitCode::StackOverflow;
        }
        println!("tombolo-cell: {reason}: address {address:#x}, code {code:#x}, rip {rip:#x}, rsp {rsp:#x}");
    } else {
        println!("tombolo-cell: {} (vector {vector}): code {code:#x}, rip {rip:#x}, rsp {rsp:#x}", name(vector));
    }
    let [r15, r14, r13, r12, r11, r10, r9, r8, rbp, rdi, rsi, rdx, rcx, rbx, rax] = frame.registers;
    println!("  rax {rax:016x} rbx {rbx:016x} rcx {rcx:016x} rdx {rdx:016x} rsi {rsi:016x} rdi {rdi:016x}");
    println!("  rbp {rbp:016x} r8  {r8:016x} r9  {r9:016x} r10 {r10:016x} r11 {r11:016x} r12 {r12:016x}");
    println!(
        "  r13 {r13:016x} r14 {r14:016x} r15 {r15:016x} flags {:x} cs {:x} ss {:x}",
        frame.flags, frame.cs, frame.ss
    );
    exit(exit_code)
}
