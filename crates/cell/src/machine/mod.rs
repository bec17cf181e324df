//! The machine layer: from the first instruction to memory, interrupts, a clock and a console. All
//! that is unsafe about running without an operating system is in this folder.
//!
//! | file | noun |
//! | --- | --- |
//! | boot.s, start.rs | PVH entry, page tables, long mode; then the order of initialisation |
//! | startup.rs | the loader's start information (pure) |
//! | paging.rs | page rights, device windows |
//! | traps.s, traps.rs | descriptor tables, exceptions, interrupt entries |
//! | apic.rs | local APIC and its timer, I/O APICs |
//! | clock.rs | nanoseconds from the time-stamp counter |
//! | heap.rs, dma.rs, mmio.rs | memory for Rust, for devices, of devices |
//! | console.rs, exit.rs | serial port or Xen's console, the end |
//! | hypercall.rs | calls to Xen |
//! | cpu.rs | single instructions |
//! | mem.s | memcpy and its family |

pub(crate) mod apic;
pub(crate) mod clock;
pub mod console;
pub(crate) mod cpu;
pub(crate) mod dma;
pub(crate) mod exit;
pub(crate) mod heap;
pub(crate) mod hypercall;
pub(crate) mod mmio;
mod paging;
#[cfg(not(test))]
mod start;
pub(crate) mod startup;
#[cfg_attr(test, allow(dead_code))]
mod traps;

use crate::xen::Domain;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::RefCell;
use mmio::Mmio;
use startup::Region;
use tombolo_ring::mem::ForeignMut;

/// The parts of the machine that drivers and the main loop use.
pub(crate) struct Platform {
    pub(crate) clock: clock::Clock,
    local_apic: apic::Local,
    io_apics: Vec<apic::IoApic>,
    ram: Vec<Region>,
    /// What Xen gave to the cell, where that is its hypervisor.
    pub(crate) xen: Option<Rc<Domain>>,
    /// The next device interrupt to give out; 0 is the timer's.
    next_interrupt: RefCell<usize>,
}

/// A device interrupt that was given out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interrupt {
    index: usize,
}

impl Interrupt {
    /// Address and data of the message that raises it (MSI, MSI-X).
    pub(crate) fn message(&self, platform: &Platform) -> (u64, u32) {
        (0xfee0_0000 | u64::from(platform.local_apic.id() & 0xff) << 12, u32::from(traps::vector(self.index)))
    }

    /// How often it came.
    pub(crate) fn count(&self) -> u64 {
        traps::interrupt_count(self.index)
    }
}

impl Platform {
    /// Maps device registers; `None` where the addresses are RAM or beyond reach.
    pub(crate) fn map_device(&self, address: u64, len: usize) -> Option<Mmio> {
        map_device(&self.ram, address, len)
    }

    /// Maps memory that a device shares with others, cached; `None` where the addresses are RAM or
    /// beyond reach.
    pub(crate) fn map_shared(&self, address: u64, len: usize) -> Option<ForeignMut<'static>> {
        paging::map_shared(address, len, |start, end| overlaps(&self.ram, start, end))
    }

    /// A device interrupt of its own; `None` when all are given out.
    pub(crate) fn interrupt(&self) -> Option<Interrupt> {
        let mut next = self.next_interrupt.borrow_mut();
        let index = *next;
        (index < traps::INTERRUPTS).then(|| {
            *next += 1;
            Interrupt { index }
        })
    }

    /// Leads an input of the I/O APICs to `interrupt`; false where there is no such input.
    pub(crate) fn route(&self, gsi: u32, interrupt: Interrupt) -> bool {
        let vector = traps::vector(interrupt.index);
        self.io_apics.iter().any(|apic| apic.route(gsi, vector, self.local_apic.id()))
    }

    /// How many I/O APICs there are: two on microvm with ACPI, where devices use the second.
    pub(crate) fn io_apic_count(&self) -> usize {
        self.io_apics.len()
    }

    /// How many device interrupts came so far, of all together.
    pub(crate) fn interrupts(&self) -> u64 {
        (0..*self.next_interrupt.borrow())
            .filter(|index| *index != apic::TIMER_INTERRUPT)
            .map(traps::interrupt_count)
            .sum()
    }

    /// Sleeps until an interrupt comes, or until `until_ns`. It may wake early.
    pub(crate) fn sleep(&self, until_ns: Option<u64>) {
        if until_ns.is_some_and(|until| until <= self.clock.now_ns()) {
            return;
        }
        if let Some(domain) = &self.xen {
            return domain.sleep(until_ns);
        }
        self.local_apic.arm(&self.clock, until_ns);
        cpu::sleep();
    }
}

/// Sleeps until the next interrupt.
pub(crate) fn wait_for_interrupt() {
    cpu::sleep();
}

fn map_device(ram: &[Region], address: u64, len: usize) -> Option<Mmio> {
    paging::map_device(address, len, |start, end| overlaps(ram, start, end))
}

fn overlaps(ram: &[Region], start: u64, end: u64) -> bool {
    ram.iter().any(|r| start < r.end && r.start < end)
}
