//! The local APIC (its timer wakes the processor) and the I/O APICs (they carry the interrupts of
//! virtio-mmio).
//!
//! Intel SDM volume 3, chapter 11; Intel 82093AA data sheet for the I/O APIC.
#![allow(unsafe_code)]

use super::clock::Clock;
use super::mmio::Mmio;
use super::{cpu, traps};
use core::cell::Cell;

const APIC_BASE_MSR: u32 = 0x1b;
const APIC_BASE_ENABLE: u64 = 1 << 11;
const APIC_BASE_X2APIC: u64 = 1 << 10;
const TSC_DEADLINE_MSR: u32 = 0x6e0;
const X2APIC_FIRST_MSR: u32 = 0x800;

const REGISTER_ID: u32 = 0x20;
const REGISTER_TASK_PRIORITY: u32 = 0x80;
const REGISTER_EOI: u32 = 0xb0;
const REGISTER_SPURIOUS: u32 = 0xf0;
const REGISTER_TIMER: u32 = 0x320;
const REGISTER_TIMER_COUNT: u32 = 0x380;
const REGISTER_TIMER_CURRENT: u32 = 0x390;
const REGISTER_TIMER_DIVIDE: u32 = 0x3e0;
const SPURIOUS_ENABLE: u32 = 1 << 8;
const TIMER_MASKED: u32 = 1 << 16;
const TIMER_TSC_DEADLINE: u32 = 2 << 17;
const DIVIDE_BY_1: u32 = 0xb;

const FEATURE_X2APIC: u32 = 1 << 21;
const FEATURE_TSC_DEADLINE: u32 = 1 << 24;

/// The timer's index among the device interrupts.
pub(crate) const TIMER_INTERRUPT: usize = 0;

unsafe extern "C" {
    static mut cell_eoi: *mut u32;
}

#[derive(Clone, Copy)]
enum Timer {
    /// The processor compares its time-stamp counter with an MSR.
    TscDeadline,
    /// A counter that runs down, with its rate in ticks per second.
    Countdown(u64),
    /// The counter runs to find its rate: the clock before and after it was set to its largest
    /// value.
    Measuring(u64, u64),
}

/// The local APIC of the one processor that a cell uses.
pub(super) struct Local {
    /// None where the registers are MSRs (x2APIC).
    registers: Option<Mmio>,
    timer: Cell<Timer>,
}

impl Local {
    /// Switches the local APIC on. The timer's rate is found by [`Local::measure`].
    pub(super) fn new(map: impl Fn(u64, usize) -> Option<Mmio>) -> Local {
        let features = cpu::cpuid(1).ecx;
        let base = cpu::read_msr(APIC_BASE_MSR) | APIC_BASE_ENABLE;
        let registers = if features & FEATURE_X2APIC != 0 {
            // SAFETY: enables x2APIC mode; names no memory.
            unsafe { cpu::write_msr(APIC_BASE_MSR, base | APIC_BASE_X2APIC) };
            None
        } else {
            // SAFETY: enables the APIC where it is.
            unsafe { cpu::write_msr(APIC_BASE_MSR, base) };
            Some(map(base & 0xf_ffff_f000, 0x1000).expect("the local APIC's registers are not RAM"))
        };
        let eoi = match &registers {
            Some(_) => {
                core::ptr::with_exposed_provenance_mut::<u32>((base & 0xf_ffff_f000) as usize + REGISTER_EOI as usize)
            }
            None => core::ptr::null_mut(),
        };
        // SAFETY: interrupts are off; traps.s only reads it, from the first interrupt on.
        unsafe { (&raw mut cell_eoi).write(eoi) };
        let timer = if features & FEATURE_TSC_DEADLINE != 0 { Timer::TscDeadline } else { Timer::Countdown(0) };
        let local = Local { registers, timer: Cell::new(timer) };
        local.write(REGISTER_TASK_PRIORITY, 0);
        local.write(REGISTER_SPURIOUS, SPURIOUS_ENABLE | u32::from(traps::SPURIOUS_VECTOR));
        local.write(REGISTER_TIMER_DIVIDE, DIVIDE_BY_1);
        let mode = if matches!(timer, Timer::TscDeadline) { TIMER_TSC_DEADLINE } else { TIMER_MASKED };
        local.write(REGISTER_TIMER, mode | u32::from(traps::vector(TIMER_INTERRUPT)));
        local
    }

    fn read(&self, register: u32) -> u32 {
        match &self.registers {
            Some(window) => window.read32(register as usize),
            None => cpu::read_msr(X2APIC_FIRST_MSR + (register >> 4)) as u32,
        }
    }

    fn write(&self, register: u32, value: u32) {
        match &self.registers {
            Some(window) => window.write32(register as usize, value),
            // SAFETY: a register of the local APIC; names no memory.
            None => unsafe { cpu::write_msr(X2APIC_FIRST_MSR + (register >> 4), u64::from(value)) },
        }
    }

    /// This processor's identity, to which devices address their interrupts.
    pub(super) fn id(&self) -> u32 {
        let id = self.read(REGISTER_ID);
        if self.registers.is_some() { id >> 24 } else { id }
    }

    /// Begins to find the timer's rate by the clock, where the timer is not the clock itself. The
    /// end is with the first [`Local::arm`], so that the start waits for nothing.
    pub(super) fn measure(&self, clock: &Clock) {
        if !matches!(self.timer.get(), Timer::TscDeadline) {
            let before_ns = clock.now_ns();
            self.write(REGISTER_TIMER_COUNT, u32::MAX);
            self.timer.set(Timer::Measuring(before_ns, clock.now_ns()));
        }
    }

    /// The rate, of 500 µs or more: the tightest of up to five readings, since a busy host may take
    /// the processor away between two of them. Where the counter has run out meanwhile, or its
    /// beginning was not tight, the measurement starts again.
    fn measured_rate(&self, clock: &Clock, mut before_start: u64, mut after_start: u64) -> u64 {
        const RUN_NS: u64 = 500_000;
        let (mut best_rate, mut best_slack) = (1_000_000_000, u64::MAX);
        for _ in 0..5 {
            while clock.now_ns() < after_start + RUN_NS {}
            let before_end = clock.now_ns();
            let left = self.read(REGISTER_TIMER_CURRENT);
            let after_end = clock.now_ns();
            let passed = (before_end + after_end - before_start - after_start) / 2;
            // In parts per million of the run.
            let slack = ((after_start - before_start) + (after_end - before_end)) * 1_000_000 / passed.max(1);
            if left > 0 && slack < best_slack {
                best_slack = slack;
                best_rate = (u128::from(u32::MAX - left) * 1_000_000_000 / u128::from(passed.max(1))) as u64;
            }
            if best_slack < 20_000 {
                break;
            }
            before_start = clock.now_ns();
            self.write(REGISTER_TIMER_COUNT, u32::MAX);
            after_start = clock.now_ns();
        }
        self.write(REGISTER_TIMER_COUNT, 0);
        self.write(REGISTER_TIMER, u32::from(traps::vector(TIMER_INTERRUPT)));
        best_rate.max(1)
    }

    /// Sets the timer to fire at `until_ns` by `clock`, or stops it. A countdown that cannot reach
    /// so far fires earlier; the waiting code looks at the clock again.
    pub(super) fn arm(&self, clock: &Clock, until_ns: Option<u64>) {
        if let Timer::Measuring(before_ns, after_ns) = self.timer.get() {
            self.timer.set(Timer::Countdown(self.measured_rate(clock, before_ns, after_ns)));
        }
        match self.timer.get() {
            Timer::TscDeadline => {
                let deadline = until_ns.map_or(0, |ns| clock.tsc_at(ns));
                // SAFETY: names no memory.
                unsafe { cpu::write_msr(TSC_DEADLINE_MSR, deadline) };
            }
            Timer::Countdown(rate) => {
                let count = until_ns.map_or(0, |ns| {
                    let wait = ns.saturating_sub(clock.now_ns());
                    let ticks = u128::from(wait) * u128::from(rate) / 1_000_000_000;
                    u32::try_from(ticks).unwrap_or(u32::MAX).max(1)
                });
                self.write(REGISTER_TIMER_COUNT, count);
            }
            Timer::Measuring(..) => unreachable!("measured just now"),
        }
    }
}

/// Masks the two interrupt controllers of the PC: their interrupts would come in on the vectors of
/// exceptions.
pub(super) fn mask_legacy_controllers() {
    for port in [0x21, 0xa1] {
        cpu::out8(port, 0xff);
    }
}

/// The I/O APIC's registers are reached through two windows.
const IOAPIC_SELECT: usize = 0;
const IOAPIC_WINDOW: usize = 0x10;
const IOAPIC_VERSION: u32 = 1;
const IOAPIC_TABLE: u32 = 0x10;
const IOAPIC_ADDRESSES: [u64; 2] = [0xfec0_0000, 0xfec1_0000];

/// An I/O APIC found in its place, with the number of its first input.
pub(crate) struct IoApic {
    registers: Mmio,
    first: u32,
    inputs: u32,
}

impl IoApic {
    /// The I/O APICs at the addresses where QEMU, Firecracker and every PC have them; the second is
    /// there on microvm with ACPI, whose devices use it.
    pub(super) fn find(map: impl Fn(u64, usize) -> Option<Mmio>) -> alloc::vec::Vec<IoApic> {
        let mut found = alloc::vec::Vec::new();
        let mut first = 0;
        for address in IOAPIC_ADDRESSES {
            let Some(registers) = map(address, 0x20) else { continue };
            registers.write32(IOAPIC_SELECT, IOAPIC_VERSION);
            let version = registers.read32(IOAPIC_WINDOW);
            if version == u32::MAX || version & 0xff == 0 {
                continue;
            }
            let inputs = (version >> 16 & 0xff) + 1;
            found.push(IoApic { registers, first, inputs });
            first += inputs;
        }
        found
    }

    /// Leads input `gsi` to `vector` of processor `apic_id`: edge triggered, active high, as
    /// virtio-mmio wants it. False where the input belongs to another I/O APIC.
    pub(super) fn route(&self, gsi: u32, vector: u8, apic_id: u32) -> bool {
        let Some(input) = gsi.checked_sub(self.first).filter(|i| *i < self.inputs) else { return false };
        for (register, value) in [(1, apic_id << 24), (0, u32::from(vector))] {
            self.registers.write32(IOAPIC_SELECT, IOAPIC_TABLE + 2 * input + register);
            self.registers.write32(IOAPIC_WINDOW, value);
        }
        true
    }
}
