//! The console: the first serial port, written and waited for; as a domain of Xen, Xen's console
//! ring.

use super::cpu::{in8, out8};
use super::hypercall;
use crate::xen::console::ConsoleRing;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use spinning_top::Spinlock;

const COM1: u16 = 0x3f8;
const LINE_STATUS: u16 = COM1 + 5;
const TRANSMITTER_EMPTY: u8 = 1 << 5;
/// What the port takes once its transmitter is empty (16550A).
const FIFO_BYTES: usize = 16;
/// How often the status is read before bytes are written all the same: a port that never gets ready
/// must not stop the cell.
const READY_TRIES: u32 = 100_000;

/// False where a read of the status gives what an empty bus gives: there is no port, and no output
/// to wait for.
static PRESENT: AtomicBool = AtomicBool::new(true);

/// Sets the port to 115200 8N1 with its FIFO on.
pub(super) fn init() {
    for (register, value) in [(1, 0), (3, 0x80), (0, 1), (1, 0), (3, 3), (2, 7), (4, 3)] {
        out8(COM1 + register, value);
    }
    PRESENT.store(in8(LINE_STATUS) != 0xff, Relaxed);
}

/// Where bytes appear in Xen's own log, for a domain that has no console ring yet: the debug port
/// of HVM domains (Xen's tools/firmware/hvmloader).
const XEN_DEBUG_PORT: u16 = 0xe9;

/// Xen's console ring, once it is mapped.
static RING: Spinlock<Option<ConsoleRing>> = Spinlock::new(None);

/// From now on the console is Xen's ring.
pub(crate) fn use_ring(ring: ConsoleRing) {
    *RING.lock() = Some(ring);
}

/// Takes bytes that were typed at Xen's console; returns how many. A serial port's input is not
/// read.
pub(crate) fn read(to: &mut [u8]) -> usize {
    RING.lock().as_ref().map_or(0, |ring| ring.read(to))
}

/// Waits until what was written has been read, where somebody may be reading still; for the end of
/// a domain.
pub(crate) fn drain() {
    if let Some(Some(ring)) = RING.try_lock().as_deref() {
        ring.drain();
    }
}

struct Console;

impl Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // A test has no port.
        if cfg!(test) {
            return Ok(());
        }
        if hypercall::is_available() {
            // An exception may come while the ring is written: its words must not wait for what it
            // has interrupted.
            match RING.try_lock().as_deref() {
                Some(Some(ring)) => ring.write(text.as_bytes()),
                _ => text.bytes().for_each(|byte| out8(XEN_DEBUG_PORT, byte)),
            }
        } else if PRESENT.load(Relaxed) {
            for burst in text.as_bytes().chunks(FIFO_BYTES) {
                for _ in 0..READY_TRIES {
                    if in8(LINE_STATUS) & TRANSMITTER_EMPTY != 0 {
                        break;
                    }
                }
                for byte in burst {
                    out8(COM1, *byte);
                }
            }
        }
        Ok(())
    }
}

/// Writes to the console; used through [`println!`](crate::println).
pub fn print(text: fmt::Arguments<'_>) {
    // Console's write_str never fails; an error could come from a Display only, which then prints
    // less.
    let _ = Console.write_fmt(text);
}

/// Writes a line to the console.
#[macro_export]
macro_rules! println {
    ($($text:tt)*) => {
        $crate::console::print(::core::format_args!("{}\n", ::core::format_args!($($text)*)))
    };
}
