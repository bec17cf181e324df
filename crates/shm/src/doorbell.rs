//! Doorbells: eventfds that wake whoever waits on them.

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// One doorbell. Rings add up until they are taken; ringing never blocks.
#[derive(Debug)]
pub struct Doorbell {
    fd: OwnedFd,
    /// A peer holds it too, and can make a `write` block.
    shared: bool,
}

impl Doorbell {
    /// A new doorbell that nobody has rung.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn new() -> Result<Doorbell, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Doorbell { fd, shared: false })
    }

    /// A new doorbell that is to be handed to peers: they may do with it what they like, ringing it does not block.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn shared() -> Result<Doorbell, Errno> {
        Ok(Doorbell { shared: true, ..Doorbell::new()? })
    }

    /// The same doorbell once more.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn duplicate(&self) -> Result<Doorbell, Errno> {
        Ok(Doorbell { fd: rustix::io::fcntl_dupfd_cloexec(&self.fd, 3)?, shared: self.shared })
    }

    /// A doorbell that a peer handed over. The peer may do with it what it likes: ringing it does not block (see
    /// `signal.rs`).
    ///
    /// # Errors
    /// `EINVAL` for what is no eventfd: a pipe or a file of the peer's could block whoever writes to it. Else the
    /// kernel's.
    pub fn adopt(fd: OwnedFd) -> Result<Doorbell, Errno> {
        let name = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new())?;
        if name.as_bytes() != b"anon_inode:[eventfd]" {
            return Err(Errno::INVAL);
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Doorbell { fd, shared: true })
    }

    /// Wakes whoever waits. A doorbell that was rung 2^64 - 2 times and never taken stays rung.
    #[inline]
    pub fn ring(&self) {
        if self.shared && crate::signal::signal(self.fd.as_fd()) {
            return;
        }
        // The only failure is a full counter, which is a rung doorbell.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// Takes all rings since the last time; `false` where there was none.
    pub fn take(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::read(&self.fd, &mut count).is_ok()
    }
}

impl AsFd for Doorbell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
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
    fn what_is_no_eventfd_is_not_adopted() {
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(Doorbell::adopt(writer).err(), Some(Errno::INVAL));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(Doorbell::adopt(file.into()).err(), Some(Errno::INVAL));
    }

    /// The peer shares the open file: it makes it blocking again and fills the counter.
    #[test]
    fn a_peer_cannot_make_ringing_block() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let peer = fd.try_clone().unwrap();
        let bell = Doorbell::adopt(fd).unwrap();
        bell.ring();
        assert!(bell.take(), "it is rung at all");
        rustix::io::write(&peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let flags = rustix::fs::fcntl_getfl(&peer).unwrap();
        rustix::fs::fcntl_setfl(&peer, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
        let (done, rung) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for _ in 0..1000 {
                bell.ring();
            }
            done.send(()).unwrap();
        });
        let answer = rung.recv_timeout(std::time::Duration::from_secs(10));
        assert_eq!(answer, Ok(()), "ringing blocks");
    }
}
