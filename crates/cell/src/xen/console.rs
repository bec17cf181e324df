//! Xen's console: two rings of bytes, shared with a daemon in dom0 ([`tombolo_ring::xen::bytes`]).
//!
//! The cell waits while the ring for output is full: its reader has been woken, and the text may be
//! a panic's last words. The wait has a limit, since a dead reader must not stop the cell; what
//! finds no room after that is left out.
//!
//! Input is read by the app ([`Net::read_console`](crate::Net::read_console)). While it does not,
//! up to 1024 bytes wait in the ring, and further ones in dom0.

use crate::machine::{cpu, hypercall};
use core::cell::Cell;
use tombolo_ring::xen::bytes::{BytePage, CONSOLE_INPUT, CONSOLE_OUTPUT};

/// How long one wait for the reader may take, in ticks of the time-stamp counter: about a second of
/// a fast machine.
const TIMEOUT_TICKS: u64 = 3_000_000_000;

/// The ring, mapped.
pub(crate) struct ConsoleRing {
    page: BytePage<'static>,
    port: u32,
    /// The reader did not come in time: it is not waited for until it has read something.
    is_stuck: Cell<bool>,
}

impl ConsoleRing {
    pub(crate) fn new(page: BytePage<'static>, port: u32) -> ConsoleRing {
        ConsoleRing { page, port, is_stuck: Cell::new(false) }
    }

    /// Waits until `step` says that it is done; false where the reader does not come.
    fn wait(&self, step: impl Fn() -> bool) -> bool {
        let start = cpu::tsc();
        while !step() {
            if self.is_stuck.get() || cpu::tsc().wrapping_sub(start) > TIMEOUT_TICKS {
                self.is_stuck.set(true);
                return false;
            }
            hypercall::yield_now();
        }
        true
    }

    /// Writes bytes and tells the reader.
    pub(crate) fn write(&self, bytes: &[u8]) {
        let at = Cell::new(0);
        self.wait(|| {
            // A reader that breaks the indices loses what is written here: as if the ring stayed
            // full.
            let written = self.page.write(CONSOLE_OUTPUT, &bytes[at.get()..]).unwrap_or(0);
            if written > 0 {
                at.set(at.get() + written);
                self.is_stuck.set(false);
                hypercall::send(self.port);
            }
            at.get() == bytes.len()
        });
    }

    /// Takes bytes that were typed; returns how many.
    pub(crate) fn read(&self, to: &mut [u8]) -> usize {
        // A daemon that breaks the indices is not heard any more.
        let read = self.page.read(CONSOLE_INPUT, to).unwrap_or(0);
        if read > 0 {
            hypercall::send(self.port);
        }
        read
    }

    /// Waits until all is read, or the reader does not come.
    pub(crate) fn drain(&self) {
        self.wait(|| self.page.filled(CONSOLE_OUTPUT) == Ok(0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::dma;
    use core::sync::atomic::Ordering::Relaxed;

    #[test]
    fn input_is_taken_once_and_not_at_all_where_its_indices_do_not_fit() {
        let memory = dma::alloc(4096);
        let ring = ConsoleRing::new(BytePage::new(memory).unwrap(), 2);
        let mut to = [0; 8];
        assert_eq!(ring.read(&mut to), 0);
        assert_eq!(ring.page.write(CONSOLE_INPUT, b"0123456789"), Ok(10));
        assert_eq!((ring.read(&mut to), &to), (8, b"01234567"));
        assert_eq!((ring.read(&mut to), &to[..2]), (2, &b"89"[..]));
        assert_eq!(ring.read(&mut to), 0);
        memory.store_u32(3076, 5000, Relaxed).unwrap();
        assert_eq!(ring.read(&mut to), 0);
    }
}
