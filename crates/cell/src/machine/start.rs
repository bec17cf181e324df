//! The order of things from the first instruction in Rust to the app.
#![allow(unsafe_code)]

use super::exit::{ExitCode, exit};
use super::startup::{MAX_COMMAND_LINE_BYTES, Machine, Physical, Region, StartInfo, command_line_text, free_memory};
use super::{Platform, apic, clock, console, cpu, dma, heap, hypercall, paging, traps};
use crate::acpi::find_ecam;
use crate::println;
use crate::xen::Domain;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::arch::global_asm;
use core::cell::RefCell;

global_asm!(include_str!("boot.s"), options(att_syntax));
global_asm!(include_str!("traps.s"), options(att_syntax));
global_asm!(include_str!("mem.s"), options(att_syntax));

/// Below lie the tables of firmware and loader; the heap begins here.
const HEAP_FLOOR: u64 = 1 << 20;
/// Above lies what is mapped uncached, or not at all.
const HEAP_CEILING: u64 = 3 << 30;
/// The value of `events=` on the command line that asks Xen for two-level event channels.
const TWO_LEVEL_EVENTS: &str = "2l";
/// boot.s maps this much.
const MAPPED: u64 = 4 << 30;

/// Memory as the loader left it: mapped at its own addresses.
pub(crate) struct Identity;

impl Physical for Identity {
    fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        if address == 0 || address.checked_add(N as u64)? > MAPPED {
            return None;
        }
        let pointer = core::ptr::with_exposed_provenance::<[u8; N]>(address as usize);
        // SAFETY: mapped by boot.s and readable; bytes have no invalid value; the code that uses
        // them checks them. What is read this way (start information, ACPI tables) is not written
        // by Rust.
        Some(unsafe { pointer.read_unaligned() })
    }
}

/// Entered by boot.s, once, with interrupts off.
#[unsafe(no_mangle)]
extern "C" fn cell_start(start_info: u32) -> ! {
    let start = cpu::tsc();
    // First, since everything that is printed depends on it.
    let on_xen = hypercall::init();
    if !on_xen {
        console::init();
    }
    traps::init();
    let Some(info) = StartInfo::read(&Identity, u64::from(start_info)) else {
        println!("tombolo-cell: the PVH start information at {start_info:#x} has no valid magic or memory map");
        exit(ExitCode::BadStart)
    };
    let mut line = [0; MAX_COMMAND_LINE_BYTES];
    let line_bytes = info.copy_command_line(&Identity, &mut line);
    let ecam = find_ecam(&Identity, info.rsdp);
    // All that lies in page 0 has been read; from here on it is not mapped.
    paging::protect();
    let (image_start, image_end) = paging::image();
    let image = Region { start: image_start as u64, end: image_end as u64 };
    let free = || free_memory(info.ram(), image, HEAP_FLOOR, HEAP_CEILING);
    let largest = free().max_by_key(|r| r.end - r.start).unwrap_or_default();
    for mut region in free() {
        // SAFETY, both: RAM by the loader's map, mapped by boot.s, outside of the image, above what
        // the loader placed in the first megabyte; what was needed of its tables elsewhere has been
        // copied or (ACPI) is marked reserved.
        if region == largest {
            let apart = dma::share(region.end - region.start);
            let end = region.start + apart;
            // SAFETY: see above.
            unsafe { dma::set_apart(Region { start: region.start, end }) };
            region.start = end;
        }
        // SAFETY: see above; without what was set apart.
        unsafe { heap::add(region) };
    }
    let machine = Machine { command_line: command_line_text(&line[..line_bytes]), ram: info.ram().to_vec(), ecam };
    let map = |address, len| super::map_device(&machine.ram, address, len);
    let khz = crate::config::number(&machine.command_line, "tsc_khz");
    let wants_fifo = crate::config::value(&machine.command_line, "events") != Some(TWO_LEVEL_EVENTS);
    apic::mask_legacy_controllers();
    let local_apic = apic::Local::new(map);
    let (ram, shared_ram) = (machine.ram.clone(), machine.ram.clone());
    let shared_page =
        move |address, len| paging::map_shared(address, len, |start, end| super::overlaps(&shared_ram, start, end));
    let domain = on_xen.then(|| Domain::open(start, khz, wants_fifo, shared_page));
    let (clock, io_apics) = match &domain {
        // Xen's timer needs no rate, and its domains have no I/O APIC.
        Some(domain) => (domain.clock.clone(), Vec::new()),
        None => {
            let clock = clock::Clock::new(start, khz, None);
            local_apic.measure(&clock);
            (clock, apic::IoApic::find(map))
        }
    };
    let xen = domain.map(Rc::new);
    let platform = Platform { clock, local_apic, io_apics, ram, xen, next_interrupt: RefCell::new(1) };
    if let (Some(domain), Some(interrupt)) = (&platform.xen, platform.interrupt()) {
        domain.take_interrupt(traps::vector(interrupt.index));
    }
    crate::run(platform, machine)
}

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    println!("tombolo-cell: {info}");
    exit(ExitCode::Panic)
}

/// Named by the prebuilt `core`; never called, since nothing unwinds.
#[unsafe(no_mangle)]
extern "C" fn rust_eh_personality() {}

/// Named by the prebuilt `core` in builds without link-time optimisation; never called.
#[unsafe(no_mangle)]
extern "C" fn _Unwind_Resume() -> ! {
    exit(ExitCode::Panic)
}
