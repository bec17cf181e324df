//! The clock: nanoseconds since the start, from the processor's time-stamp counter.
//!
//! Its rate comes from the first of these that is there: `tsc_khz=` of the command line, Xen's
//! clock page, KVM's pvclock, CPUID leaf 0x15, the hypervisor's CPUID leaf 0x40000010, the interval
//! timer (PIT).
//!
//! While a domain of Xen is saved, its clock is stopped ([`Clock::resume`]).
#![allow(unsafe_code)]

use super::cpu::{self, cpuid, in8, out8, tsc};
use alloc::rc::Rc;
use core::cell::Cell;

const KVM_CLOCK_MSR: u32 = 0x4b56_4d01;
const KVM_FEATURE_CLOCK: u32 = 1 << 3;
const KVM_LEAF: u32 = 0x4000_0000;
const HYPERVISOR_TIMING_LEAF: u32 = 0x4000_0010;
const HYPERVISOR_PRESENT: u32 = 1 << 31;

/// Ticks of the interval timer a second.
const PIT_HZ: u64 = 1_193_182;

/// Where the rate came from; printed at start with `verbose`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RateSource {
    CommandLine,
    Xen,
    KvmClock,
    Cpuid15,
    HypervisorLeaf,
    IntervalTimer,
}

/// Counter values become nanoseconds by `start_ns + ((tsc - start) * multiplier >> 32)`.
#[derive(Clone, Copy, Debug)]
struct Scale {
    start: u64,
    start_ns: u64,
    multiplier: u64,
}

/// A clone is the same clock.
#[derive(Clone, Debug)]
pub(crate) struct Clock {
    scale: Rc<Cell<Scale>>,
    pub(crate) source: RateSource,
}

impl Clock {
    /// Finds the rate. `start` is the counter at the cell's first instruction in Rust.
    ///
    /// # Panics
    /// Where nothing tells the rate.
    pub(crate) fn new(start: u64, command_line_khz: Option<u64>, xen: Option<PvRate>) -> Clock {
        let clock = Clock::find(start, command_line_khz, xen);
        // Xen's domains have none.
        if xen.is_none() {
            stop_interval_timer();
        }
        clock
    }

    fn find(start: u64, command_line_khz: Option<u64>, xen: Option<PvRate>) -> Clock {
        let with = |multiplier, source| {
            let scale = Rc::new(Cell::new(Scale { start, start_ns: 0, multiplier }));
            Clock { scale, source }
        };
        let by_rate = |hz: u64, source| with(((1_000_000_000u128 << 32) / u128::from(hz)) as u64, source);
        if let Some(khz) = command_line_khz.filter(|khz| *khz > 0) {
            return by_rate(khz * 1000, RateSource::CommandLine);
        }
        if let Some(multiplier) = xen.and_then(PvRate::multiplier) {
            return with(multiplier, RateSource::Xen);
        }
        if let Some(multiplier) = kvm_clock_multiplier() {
            return with(multiplier, RateSource::KvmClock);
        }
        if let Some(hz) = cpuid_15_hz() {
            return by_rate(hz, RateSource::Cpuid15);
        }
        if let Some(hz) = hypervisor_leaf_hz() {
            return by_rate(hz, RateSource::HypervisorLeaf);
        }
        match interval_timer_hz() {
            Some(hz) => by_rate(hz, RateSource::IntervalTimer),
            None => panic!("no clock: no pvclock, no CPUID leaf, no interval timer; give tsc_khz= on the command line"),
        }
    }

    /// Nanoseconds since the start.
    pub(crate) fn now_ns(&self) -> u64 {
        let scale = self.scale.get();
        let ticks = tsc().saturating_sub(scale.start);
        scale.start_ns + ((u128::from(ticks) * u128::from(scale.multiplier)) >> 32) as u64
    }

    /// Goes on from `now_ns`, on a machine whose counter may be another one, with another rate.
    pub(crate) fn resume(&self, now_ns: u64, rate: Option<PvRate>) {
        let multiplier = match (self.source, rate.and_then(PvRate::multiplier)) {
            (RateSource::Xen, Some(multiplier)) => multiplier,
            _ => self.scale.get().multiplier,
        };
        self.scale.set(Scale { start: tsc(), start_ns: now_ns, multiplier });
    }

    /// The counter's value at `ns`.
    pub(super) fn tsc_at(&self, ns: u64) -> u64 {
        let scale = self.scale.get();
        scale.start + ((u128::from(ns.saturating_sub(scale.start_ns)) << 32) / u128::from(scale.multiplier)) as u64
    }

    /// The counter's rate.
    pub(crate) fn khz(&self) -> u64 {
        ((1_000_000u128 << 32) / u128::from(self.scale.get().multiplier)) as u64
    }
}

/// A rate as the hypervisors' clock pages tell it: ticks, shifted left by `shift` or right by
/// `-shift`, times `multiplier >> 32` are nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PvRate {
    pub(crate) multiplier: u32,
    pub(crate) shift: i8,
}

impl PvRate {
    /// The shift as part of the multiplier; `None` for a rate that no machine has.
    fn multiplier(self) -> Option<u64> {
        let multiplier = u64::from(self.multiplier);
        let distance = u32::from(self.shift.unsigned_abs());
        let multiplier =
            if self.shift >= 0 { multiplier.checked_shl(distance) } else { multiplier.checked_shr(distance) }?;
        (multiplier != 0).then_some(multiplier)
    }

    /// Nanoseconds that `ticks` take.
    pub(crate) fn ns(self, ticks: u64) -> u64 {
        self.multiplier().map_or(0, |multiplier| ((u128::from(ticks) * u128::from(multiplier)) >> 32) as u64)
    }
}

fn hypervisor_leaves() -> Option<u32> {
    (cpuid(1).ecx & HYPERVISOR_PRESENT != 0).then(|| cpuid(KVM_LEAF).eax)
}

/// The page that KVM fills (Documentation/virt/kvm/x86/msr.rst): version u32, pad u32, tsc u64,
/// system time u64, multiplier u32, shift i8, flags u8.
#[repr(C, align(64))]
struct PvClock([u8; 64]);

static mut PV_CLOCK: PvClock = PvClock([0; 64]);

fn kvm_clock_multiplier() -> Option<u64> {
    hypervisor_leaves()?;
    let name = cpuid(KVM_LEAF);
    if [name.ebx, name.ecx, name.edx].map(u32::to_le_bytes).concat() != b"KVMKVMKVM\0\0\0" {
        return None;
    }
    if cpuid(KVM_LEAF + 1).eax & KVM_FEATURE_CLOCK == 0 {
        return None;
    }
    let page = &raw mut PV_CLOCK;
    // SAFETY: the page is a static of this module that nothing else uses; KVM writes it before the
    // MSR write returns, and is told to stop right after the read.
    let (multiplier, shift) = unsafe {
        cpu::write_msr(KVM_CLOCK_MSR, page.addr() as u64 | 1);
        let bytes = page.cast::<u8>();
        let multiplier = bytes.add(24).cast::<u32>().read_volatile();
        let shift = bytes.add(28).cast::<i8>().read_volatile();
        cpu::write_msr(KVM_CLOCK_MSR, 0);
        (multiplier, shift)
    };
    PvRate { multiplier, shift }.multiplier()
}

fn cpuid_15_hz() -> Option<u64> {
    if cpuid(0).eax < 0x15 {
        return None;
    }
    let leaf = cpuid(0x15);
    let (denominator, numerator, crystal) = (u64::from(leaf.eax), u64::from(leaf.ebx), u64::from(leaf.ecx));
    (denominator != 0 && numerator != 0 && crystal != 0).then(|| crystal * numerator / denominator)
}

fn hypervisor_leaf_hz() -> Option<u64> {
    if hypervisor_leaves()? < HYPERVISOR_TIMING_LEAF {
        return None;
    }
    let khz = u64::from(cpuid(HYPERVISOR_TIMING_LEAF).eax);
    (khz != 0).then_some(khz * 1000)
}

/// One reading of the interval timer's counter, with the counter before and after it.
fn read_interval_timer() -> (u64, u16, u64) {
    let before = tsc();
    out8(0x43, 0);
    let low = in8(0x40);
    let after = tsc();
    let high = in8(0x40);
    (before, u16::from_le_bytes([low, high]), after)
}

/// Runs of 1 ms; the tightest counts, since a busy host may take the processor away between two
/// reads. Stops as soon as two runs agree within 1 in 2000.
fn interval_timer_hz() -> Option<u64> {
    const RUN_TICKS: u16 = (PIT_HZ / 1000) as u16;
    const TRIES: u32 = 100_000;
    out8(0x43, 0x34);
    out8(0x40, 0);
    out8(0x40, 0);
    let (mut best_hz, mut best_slack) = (None, u64::MAX);
    for _ in 0..5 {
        let (before_start, start, after_start) = read_interval_timer();
        let mut end = (0, start, 0);
        for _ in 0..TRIES {
            end = read_interval_timer();
            // It counts down, and around.
            if start.wrapping_sub(end.1) >= RUN_TICKS {
                break;
            }
        }
        let ticks = u64::from(start.wrapping_sub(end.1));
        if ticks < u64::from(RUN_TICKS) {
            return None;
        }
        let slack = (after_start - before_start) + (end.2 - end.0);
        let passed = (end.0 + end.2 - before_start - after_start) / 2;
        let hz = passed * PIT_HZ / ticks;
        let agrees = best_hz.is_some_and(|best: u64| best.abs_diff(hz) < hz / 2000);
        if slack < best_slack {
            best_slack = slack;
            best_hz = Some(hz);
        }
        if agrees {
            break;
        }
    }
    best_hz
}

/// Sets the interval timer to fire once, and so to stop. From reset on it fires 18 times a second
/// for no purpose, which costs each emulated machine a third of a percent of its host's processor.
/// On a machine without such a timer this has no effect.
fn stop_interval_timer() {
    out8(0x43, 0x30);
    out8(0x40, 1);
    out8(0x40, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_resumes_goes_on_where_it_stood() {
        let rate = PvRate { multiplier: 1 << 31, shift: 0 };
        let clock = Clock::new(tsc(), None, Some(rate));
        let twin = clock.clone();
        let saved_ns = 7_000_000_000;
        clock.resume(saved_ns, Some(PvRate { multiplier: 1 << 30, shift: 0 }));
        let resumed_ns = twin.now_ns();
        assert!((saved_ns..saved_ns + 1_000_000_000).contains(&resumed_ns), "{resumed_ns}");
        assert_eq!(twin.khz(), 4_000_000);
        assert!(twin.now_ns() >= resumed_ns);
    }
}
