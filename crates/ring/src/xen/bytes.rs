//! The byte rings of a guest's page: its connection to XenStore (xen/include/public/io/xs_wire.h)
//! and its console (xen/include/public/io/console.h).
//!
//! Two buffers of bytes with a producer and a consumer index each; indices are 32 bits and run
//! free. There is no notification suppression: each side notifies the other whenever it has
//! produced or consumed something.

use core::sync::atomic::Ordering;

use super::{PAGE_BYTES, XenError};
use crate::mem::ForeignMut;

/// Where one direction of a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Direction {
    /// Offset of the buffer in bytes.
    buffer: usize,
    /// Its size in bytes, a power of two.
    size: u32,
    /// Offset of the consumer's index.
    consumed: usize,
    /// Offset of the producer's index.
    produced: usize,
}

// --- the headers' ---

/// XenStore: requests, from the guest.
pub const STORE_REQUESTS: Direction = Direction { buffer: 0, size: 1024, consumed: 2048, produced: 2052 };
/// XenStore: replies and watch events, to the guest.
pub const STORE_REPLIES: Direction = Direction { buffer: 1024, size: 1024, consumed: 2056, produced: 2060 };
/// XenStore: offset of the word in which a guest asks to start again (1) and the daemon says that
/// it did (0).
pub const STORE_CONNECTION: usize = 2068;
/// Console: what was typed, to the guest.
pub const CONSOLE_INPUT: Direction = Direction { buffer: 0, size: 1024, consumed: 3072, produced: 3076 };
/// Console: what the guest prints.
pub const CONSOLE_OUTPUT: Direction = Direction { buffer: 1024, size: 2048, consumed: 3080, produced: 3084 };

/// A page with byte rings; at least [`PAGE_BYTES`] long.
#[derive(Clone, Copy, Debug)]
pub struct BytePage<'m>(ForeignMut<'m>);

impl<'m> BytePage<'m> {
    /// The rings in `page`, which is at least [`PAGE_BYTES`] long and aligned to 64 bytes.
    pub fn new(page: ForeignMut<'m>) -> Result<Self, XenError> {
        if page.len() < PAGE_BYTES || !(page.as_mut_ptr() as usize).is_multiple_of(64) {
            return Err(XenError::Page { bytes: page.len() });
        }
        Ok(BytePage(page.take(PAGE_BYTES)))
    }

    /// Both indices of a direction, and how many bytes lie between them.
    fn indices(&self, at: Direction) -> Result<(u32, u32, u32), XenError> {
        let page = self.0.as_foreign();
        // A0: the bytes before the peer's index may be read, and those behind it written, after
        // this. Partner R0 in `write` and `read`.
        let word = |offset| page.load_u32(offset, Ordering::Acquire).unwrap_or(0);
        let (consumed, produced) = (word(at.consumed), word(at.produced));
        let filled = produced.wrapping_sub(consumed);
        if filled > at.size {
            return Err(XenError::IndexJump { got: produced, from: consumed, room: at.size });
        }
        Ok((consumed, produced, filled))
    }

    /// Appends bytes, as many as there is room for; returns how many. Notify the peer where that is
    /// not 0.
    ///
    /// # Errors
    /// [`XenError::IndexJump`] where the two indices do not fit each other.
    pub fn write(&self, at: Direction, bytes: &[u8]) -> Result<usize, XenError> {
        let (_, produced, filled) = self.indices(at)?;
        let n = bytes.len().min((at.size - filled) as usize);
        let start = (produced % at.size) as usize;
        let head = n.min(at.size as usize - start);
        let part = |offset: usize, len: usize| self.0.slice(at.buffer + offset, len);
        if let (Some(first), Some(second)) = (part(start, head), part(0, n - head)) {
            first.write_from(&bytes[..head]);
            second.write_from(&bytes[head..n]);
        }
        // R0, partner A0 in the peer: who sees the index sees the bytes.
        let _ = self.0.store_u32(at.produced, produced.wrapping_add(n as u32), Ordering::Release);
        Ok(n)
    }

    /// Takes bytes, as many as there are and `to` has room for; returns how many. Notify the peer
    /// where that is not 0.
    ///
    /// # Errors
    /// [`XenError::IndexJump`] where the two indices do not fit each other.
    pub fn read(&self, at: Direction, to: &mut [u8]) -> Result<usize, XenError> {
        let (consumed, _, filled) = self.indices(at)?;
        let n = to.len().min(filled as usize);
        let start = (consumed % at.size) as usize;
        let head = n.min(at.size as usize - start);
        let part = |offset: usize, len: usize| self.0.as_foreign().slice(at.buffer + offset, len);
        if let (Some(first), Some(second)) = (part(start, head), part(0, n - head)) {
            first.read_into(&mut to[..head]);
            second.read_into(&mut to[head..n]);
        }
        // R0, partner A0 in the peer: the bytes are read before their room is given back.
        let _ = self.0.store_u32(at.consumed, consumed.wrapping_add(n as u32), Ordering::Release);
        Ok(n)
    }

    /// Bytes that were produced and not consumed yet.
    ///
    /// # Errors
    /// [`XenError::IndexJump`] where the two indices do not fit each other.
    pub fn filled(&self, at: Direction) -> Result<usize, XenError> {
        self.indices(at).map(|(_, _, filled)| filled as usize)
    }

    /// Asks the daemon to start the connection again (guests do so after a kexec), or looks whether
    /// it has.
    pub fn store_connection(&self, restart: bool) -> bool {
        if restart {
            let _ = self.0.store_u32(STORE_CONNECTION, 1, Ordering::Release);
        }
        self.0.as_foreign().load_u32(STORE_CONNECTION, Ordering::Acquire) == Some(0)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::VecDeque;
    use std::vec;
    use std::vec::Vec;

    fn page() -> ForeignMut<'static> {
        let memory = std::boxed::Box::leak(vec![0u8; PAGE_BYTES + 64].into_boxed_slice());
        let skip = memory.as_ptr().align_offset(64);
        ForeignMut::from(&mut memory[skip..skip + PAGE_BYTES])
    }

    #[test]
    fn golden_layout() {
        let memory = page();
        let bytes = BytePage::new(memory).unwrap();
        memory.store_u32(2052, u32::MAX, Ordering::Relaxed);
        memory.store_u32(2048, u32::MAX, Ordering::Relaxed);
        assert_eq!(bytes.write(STORE_REQUESTS, b"xy"), Ok(2));
        assert_eq!(
            (memory.as_foreign().read_array(1023), memory.as_foreign().read_array(0)),
            (Some(*b"x"), Some(*b"y"))
        );
        assert_eq!(memory.as_foreign().load_u32(2052, Ordering::Relaxed), Some(1));
        memory.slice(1024, 3).unwrap().write_from(b"abc");
        memory.store_u32(2060, 3, Ordering::Relaxed);
        let mut to = [0; 8];
        assert_eq!(bytes.read(STORE_REPLIES, &mut to), Ok(3));
        assert_eq!((&to[..3], memory.as_foreign().load_u32(2056, Ordering::Relaxed)), (&b"abc"[..], Some(3)));
        assert!(!bytes.store_connection(true));
        memory.store_u32(2068, 0, Ordering::Relaxed);
        assert!(bytes.store_connection(false));
        assert!(BytePage::new(memory.skip(64)).is_err());
    }

    #[test]
    fn bytes_come_out_as_they_went_in_whatever_the_sizes() {
        for at in [STORE_REQUESTS, CONSOLE_OUTPUT, CONSOLE_INPUT, STORE_REPLIES] {
            let bytes = BytePage::new(page()).unwrap();
            let (mut model, mut next, mut state) = (VecDeque::<u8>::new(), 0u8, 1u32);
            for _ in 0..5000 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let n = (state >> 16) as usize % 1500;
                if state & 0x800 == 0 {
                    let chunk: Vec<u8> = (0..n).map(|i| next.wrapping_add(i as u8)).collect();
                    let wrote = bytes.write(at, &chunk).unwrap();
                    assert_eq!(wrote, n.min(at.size as usize - model.len()));
                    model.extend(&chunk[..wrote]);
                    assert_eq!(bytes.filled(at), Ok(model.len()));
                    next = next.wrapping_add(wrote as u8);
                } else {
                    let mut to = vec![0; n];
                    let got = bytes.read(at, &mut to).unwrap();
                    assert_eq!(got, n.min(model.len()));
                    assert!(model.drain(..got).eq(to[..got].iter().copied()));
                }
            }
        }
    }

    #[test]
    fn indices_that_do_not_fit_are_refused() {
        let memory = page();
        let bytes = BytePage::new(memory).unwrap();
        memory.store_u32(2060, 1025, Ordering::Relaxed);
        let error = XenError::IndexJump { got: 1025, from: 0, room: 1024 };
        assert_eq!(bytes.read(STORE_REPLIES, &mut [0; 4]), Err(error));
        memory.store_u32(2048, 1, Ordering::Relaxed);
        assert!(bytes.write(STORE_REQUESTS, b"x").is_err());
    }
}
