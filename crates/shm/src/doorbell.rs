//! Doorbells: eventfds that wake the side that waits on them.
//!
//! A peer may hold the same eventfd and can change the open file that both share. So the eventfd is
//! never written or read in a way that could block. Ringing goes through [`crate::signal`], and
//! rings are taken with `RWF_NOWAIT` (eventfds have it since Linux 5.8).

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::{Errno, ReadWriteFlags};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::foreign::{ForeignFd, Kind};
use crate::signal::{self, Helper};

/// One doorbell. Rings add up until they are taken; neither ringing nor taking blocks.
#[derive(Debug)]
pub struct Doorbell {
    fd: OwnedFd,
    /// A peer holds it too, and can make a plain `write` or `read` block.
    shared: Option<Helper>,
    /// What has a peer's pipe written when it is rung.
    pipe: Option<PipeWriter>,
}

impl Doorbell {
    /// A new doorbell, not yet rung, for this process alone.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn new() -> Result<Doorbell, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Doorbell { fd, shared: None, pipe: None })
    }

    /// A new doorbell to hand to peers. It is safe against anything that they do with it.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn shared() -> Result<Doorbell, Errno> {
        Ok(Doorbell { shared: Some(Helper::default()), ..Doorbell::new()? })
    }

    /// The same doorbell once more.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn duplicate(&self) -> Result<Doorbell, Errno> {
        let shared = self.shared.as_ref().map(|_| Helper::default());
        Ok(Doorbell { fd: rustix::io::fcntl_dupfd_cloexec(&self.fd, 3)?, shared, pipe: None })
    }

    /// A doorbell that a peer handed over. It is safe against anything that the peer does with it.
    /// Any other descriptor is closed where closing does no harm ([`crate::foreign`]).
    ///
    /// # Errors
    /// `EINVAL` for a descriptor that is no eventfd: a peer's pipe or file could block its writer.
    /// Otherwise the kernel's error.
    pub fn adopt(fd: impl Into<ForeignFd>) -> Result<Doorbell, Errno> {
        Self::take_over(fd.into(), Some(Helper::default()))
    }

    /// As [`Doorbell::adopt`], and also takes the writing end of a pipe, which user-mode Linux
    /// uses: each ring adds eight bytes, unless the pipe is full. A peer can block a writer of its
    /// pipe, by the flags of the open file or by holding the pipe's lock in a read. So a separate
    /// thread writes, and rings that come in between are merged into one.
    ///
    /// # Errors
    /// As for [`Doorbell::adopt`]; `EAGAIN` where [`MAX_PIPES`] pipes are written already, or there
    /// is no thread.
    pub fn adopt_any(fd: impl Into<ForeignFd>) -> Result<Doorbell, Errno> {
        let fd = fd.into();
        if fd.kind() != Kind::Pipe {
            return Doorbell::adopt(fd);
        }
        let doorbell = Doorbell::new()?;
        let writer = PipeWriter::start(&doorbell, fd)?;
        Ok(Doorbell { pipe: Some(writer), ..doorbell })
    }

    /// A doorbell that only this process and the kernel hold, made by a library.
    ///
    /// # Errors
    /// As for [`Doorbell::adopt`].
    pub fn private(fd: OwnedFd) -> Result<Doorbell, Errno> {
        Self::take_over(fd.into(), None)
    }

    fn take_over(fd: ForeignFd, shared: Option<Helper>) -> Result<Doorbell, Errno> {
        if fd.kind() != Kind::Eventfd {
            return Err(Errno::INVAL);
        }
        let fd = fd.keep();
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Doorbell { fd, shared, pipe: None })
    }

    /// The descriptor that the peer handed over, to be handed on to [`Doorbell::adopt_any`].
    pub fn peers_fd(&self) -> BorrowedFd<'_> {
        match &self.pipe {
            Some(writer) => writer.pipe.as_fd(),
            None => self.fd.as_fd(),
        }
    }

    /// Wakes the side that waits. A doorbell that was rung 2^64 - 2 times and never taken stays
    /// rung.
    #[inline]
    pub fn ring(&self) {
        match &self.shared {
            // A signal that is lost is counted there.
            Some(helper) => _ = signal::signal(self.fd.as_fd(), helper),
            // The only failure is a full counter, which is a rung doorbell.
            None => _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes()),
        }
    }

    /// Takes all rings since the last time; `false` where there was none.
    pub fn take(&self) -> bool {
        let mut count = [0; 8];
        let taken = match self.shared {
            // u64::MAX: the current position, since an eventfd has no other.
            Some(_) => {
                rustix::io::preadv2(&self.fd, &mut [IoSliceMut::new(&mut count)], u64::MAX, ReadWriteFlags::NOWAIT)
            }
            None => rustix::io::read(&self.fd, &mut count),
        };
        taken.is_ok()
    }
}

/// Most pipes that are written at a time.
pub const MAX_PIPES: usize = 64;

static PIPES: AtomicUsize = AtomicUsize::new(0);

/// A thread that writes to a peer's pipe whenever a doorbell of this process is rung. Dropped, it
/// ends; where the peer keeps it in `write`, it ends when the peer closes or drains the pipe.
#[derive(Debug)]
struct PipeWriter {
    pipe: Arc<ForeignFd>,
    doorbell: OwnedFd,
    stop: Arc<AtomicBool>,
}

impl PipeWriter {
    fn start(doorbell: &Doorbell, pipe: ForeignFd) -> Result<PipeWriter, Errno> {
        let (heard, own) = (doorbell.duplicate()?, rustix::io::fcntl_dupfd_cloexec(doorbell, 3)?);
        if PIPES.fetch_add(1, Ordering::Relaxed) >= MAX_PIPES {
            PIPES.fetch_sub(1, Ordering::Relaxed);
            return Err(Errno::AGAIN);
        }
        let pipe = Arc::new(pipe);
        let written = pipe.clone();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("pipe-doorbell".into()).stack_size(64 << 10);
        let started = thread.spawn(move || {
            loop {
                // An interrupted wait looks again.
                let _ = poll(&mut [PollFd::new(&heard, PollFlags::IN)], None);
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                // A full pipe counts as a rung doorbell. A pipe without a reader wakes no process.
                if heard.take() {
                    let _ = rustix::io::write(&*written, &1u64.to_ne_bytes());
                }
            }
            drop(written);
            PIPES.fetch_sub(1, Ordering::Relaxed);
        });
        if started.is_err() {
            PIPES.fetch_sub(1, Ordering::Relaxed);
            return Err(Errno::AGAIN);
        }
        Ok(PipeWriter { pipe, doorbell: own, stop })
    }
}

impl Drop for PipeWriter {
    fn drop(&mut self) {
        // Release, partner in the thread: the ring below comes after it.
        self.stop.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.doorbell, &1u64.to_ne_bytes());
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
        let doorbell = Doorbell::new().unwrap();
        assert!(!doorbell.take());
        doorbell.ring();
        doorbell.ring();
        assert!(doorbell.take());
        assert!(!doorbell.take());
    }

    #[test]
    fn what_is_no_eventfd_is_not_adopted() {
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        assert_eq!(Doorbell::adopt(writer).err(), Some(Errno::INVAL));
        let file = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(Doorbell::adopt(OwnedFd::from(file)).err(), Some(Errno::INVAL));
    }

    /// The peer shares the open file: it makes it blocking again and fills the counter.
    #[test]
    fn a_peer_cannot_make_ringing_block() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let peer = fd.try_clone().unwrap();
        let doorbell = Doorbell::adopt(fd).unwrap();
        doorbell.ring();
        assert!(doorbell.take(), "it is rung at all");
        rustix::io::write(&peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let flags = rustix::fs::fcntl_getfl(&peer).unwrap();
        rustix::fs::fcntl_setfl(&peer, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
        let (done, rung) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for _ in 0..1000 {
                doorbell.ring();
            }
            done.send(()).unwrap();
        });
        let answer = rung.recv_timeout(std::time::Duration::from_secs(10));
        assert_eq!(answer, Ok(()), "ringing blocks");
    }

    /// The peer makes the open file blocking again, and takes the rings after they were seen.
    #[test]
    fn a_peer_cannot_make_taking_block() {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let peer = fd.try_clone().unwrap();
        let doorbell = Doorbell::adopt(fd).unwrap();
        let flags = rustix::fs::fcntl_getfl(&peer).unwrap();
        rustix::fs::fcntl_setfl(&peer, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
        let (done, taken) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let empty = doorbell.take();
            doorbell.ring();
            done.send((empty, doorbell.take(), doorbell.take())).unwrap();
        });
        let answer = taken.recv_timeout(std::time::Duration::from_secs(10));
        assert_eq!(answer, Ok((false, true, false)), "taking blocks");
    }

    /// The peer never reads its pipe, which blocks.
    #[test]
    fn a_pipe_is_rung_and_its_peer_cannot_make_ringing_block() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let doorbell = Doorbell::adopt_any(writer).unwrap();
        doorbell.ring();
        let mut bytes = [0; 8];
        assert_eq!(rustix::io::read(&reader, &mut bytes), Ok(8));
        assert_eq!(u64::from_ne_bytes(bytes), 1);
        let (done, rung) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for _ in 0..20_000 {
                doorbell.ring();
                std::thread::yield_now();
            }
            drop(doorbell);
            done.send(()).unwrap();
        });
        let answer = rung.recv_timeout(std::time::Duration::from_secs(20));
        assert_eq!(answer, Ok(()), "ringing blocks");
        drop(reader);
        tombolo_testing::until("the thread ends", || PIPES.load(Ordering::Relaxed) == 0);
    }
}
