//! Doorbells: eventfds that wake whoever waits on them.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// One doorbell. Rings add up until they are taken; ringing never blocks.
#[derive(Debug)]
pub struct Doorbell(OwnedFd);

impl Doorbell {
    /// A new doorbell that nobody has rung.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn new() -> Result<Doorbell, Errno> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Doorbell)
    }

    /// A doorbell that a peer handed over. The peer may have handed over anything; a descriptor that is no
    /// eventfd only makes [`Doorbell::ring`] without effect. It is set non-blocking, so that no ring can block.
    ///
    /// # Errors
    /// The kernel's, where the descriptor takes no flags.
    pub fn adopt(fd: OwnedFd) -> Result<Doorbell, Errno> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Doorbell(fd))
    }

    /// Wakes whoever waits. A doorbell that was rung 2^64 - 2 times and never taken stays rung.
    #[inline]
    pub fn ring(&self) {
        // The only failures are a full counter, which is a rung doorbell, and a peer's odd descriptor.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes all rings since the last time; `false` where there was none.
    pub fn take(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::read(&self.0, &mut count).is_ok()
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_add_up_and_are_taken_once() {
        let bell = Doorbell::new().unwrap();
        assert!(!bell.take());
        bell.ring();
        bell.ring();
        assert!(bell.take());
        assert!(!bell.take());
    }

    #[test]
    fn ringing_a_peers_odd_descriptor_neither_blocks_nor_fails() {
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let bell = Doorbell::adopt(writer).unwrap();
        for _ in 0..100_000 {
            bell.ring();
        }
    }
}
