//! The end of a cell: an exit code for the process that started it, else a reset, else a stop.

use super::hypercall::{self, ShutdownReason};
use super::{console, cpu};

/// What the cell reports through QEMU's `-device isa-debug-exit,iobase=0xf4,iosize=4`. QEMU's own
/// exit status is then `2 * code + 1`. Without that device the machine is reset, which ends QEMU
/// under `-no-reboot` and otherwise restarts the cell. Where even that does nothing, the processor
/// halts. A domain of Xen powers off with `Success`, and reports a crash with every other code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// The app is done and all is well: status 5. Not code 0, whose status 1 is also QEMU's own for
    /// a bad argument.
    Success = 2,
    /// The app says that it failed: status 3.
    Failure = 1,
    /// A panic: status 33.
    Panic = 0x10,
    /// A processor exception, for example a write to read-only memory or the execution of data:
    /// status 35.
    Exception = 0x11,
    /// The stack overflowed into its guard page: status 37.
    StackOverflow = 0x12,
    /// The loader gave no PVH start information, or none that can be used: status 39.
    BadStart = 0x13,
    /// The loader entered the ELF entry point instead of the PVH note's (boot.s): status 41.
    NotPvh = 0x14,
}

const DEBUG_EXIT: u16 = 0xf4;

/// Leaves the machine with `code`.
pub fn exit(code: ExitCode) -> ! {
    if hypercall::is_available() {
        leave_domain(if code == ExitCode::Success { ShutdownReason::Poweroff } else { ShutdownReason::Crash });
    }
    cpu::out8(DEBUG_EXIT, code as u8);
    // Still here: no such device. The reset register of PCI chip sets, the keyboard controller's
    // reset line, and a triple fault, which every VMM takes for a reset.
    cpu::out8(0xcf9, 0x06);
    cpu::out8(0x64, 0xfe);
    if cfg!(test) { cpu::halt() } else { cpu::triple_fault() }
}

/// Ends a domain of Xen, once what it has printed is read.
pub(crate) fn leave_domain(reason: ShutdownReason) -> ! {
    console::drain();
    hypercall::shutdown(reason)
}
