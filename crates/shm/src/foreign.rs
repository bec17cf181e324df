//! Descriptors that a peer handed over: finding out what they are, and closing them, without
//! waiting for the peer.
//!
//! A descriptor can lead to a file system that the peer made itself (FUSE). There `fstat`,
//! `fstatfs`, `poll`, `read` and `close` ask the peer's server, which may never answer. A socket
//! whose owner set SO_LINGER can hold up `close`, too.
//!
//! * [`kind`] asks only the kernel's own structures: seals, which only memory has (fcntl(2),
//!   F_GET_SEALS), and the name of an anonymous inode. No path can imitate that name, since paths
//!   begin with a slash.
//! * [`ForeignFd`] owns a received descriptor. A descriptor that is not kept is closed by
//!   [`close`]. Eventfds and memory are closed at once, because closing them involves no other
//!   process. All others are closed on a separate thread, since that may never return.
//!
//! # Limits
//! * [`MAX_CLOSERS`] threads close. While all are held up, further descriptors wait. A user (of the
//!   sending process) may have [`MAX_HELD_PER_USER`] descriptors waiting or held up, all users
//!   together [`MAX_HELD`]. Beyond that [`has_room`] says no, and sockets are read without
//!   accepting descriptors, which the kernel then discards.
//! * A thread that is held up by a FUSE server ends when that server answers or ends. Until then
//!   the kernel keeps the process, even a killed one, and with it the descriptors that it has open.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::fcntl_get_seals;

use crate::{credentials, fork};

/// Most threads that close descriptors at a time.
pub const MAX_CLOSERS: usize = 4;
/// Most descriptors of one user that wait to be closed or hold up a thread.
pub const MAX_HELD_PER_USER: usize = 64;
/// Most descriptors that wait to be closed or hold up a thread.
pub const MAX_HELD: usize = 256;

/// What a descriptor is, as far as that can be known without asking its file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `read` and `write` can block if the peer made it blocking.
    Eventfd,
    /// A file of tmpfs or hugetlbfs: a memfd, or one with a name. `fstat`, `fstatfs` and `close` do
    /// not block.
    Memory,
    /// One end of a pipe, or a FIFO.
    Pipe,
    /// Anything else.
    Other,
}

/// Classifies a descriptor without calling into its file system.
pub fn kind(fd: impl AsFd) -> Kind {
    // The kernel looks at the file's operations, and asks no file system.
    if fcntl_get_seals(&fd).is_ok() {
        return Kind::Memory;
    }
    match link(fd.as_fd()).as_deref() {
        Some(b"anon_inode:[eventfd]") => Kind::Eventfd,
        Some(name) if name.starts_with(b"pipe:[") => Kind::Pipe,
        _ => Kind::Other,
    }
}

/// The kernel's name for it, for error messages; a path may be of the peer's choosing.
pub fn name(fd: impl AsFd) -> String {
    link(fd.as_fd()).map_or_else(|| "unknown".into(), |name| String::from_utf8_lossy(&name).escape_debug().to_string())
}

fn link(fd: BorrowedFd<'_>) -> Option<Vec<u8>> {
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new());
    link.ok().map(std::ffi::CString::into_bytes)
}

/// A descriptor that a peer handed over. Dropping it does not block.
#[derive(Debug)]
pub struct ForeignFd {
    /// `None` only while it is taken out.
    fd: Option<OwnedFd>,
    user: u32,
}

impl ForeignFd {
    /// A descriptor that came from a process of `user`.
    pub fn new(fd: OwnedFd, user: u32) -> ForeignFd {
        ForeignFd { fd: Some(fd), user }
    }

    /// Same as the function [`kind`].
    pub fn kind(&self) -> Kind {
        kind(self)
    }

    /// The descriptor, which the caller knows to be harmless: its [`ForeignFd::kind`] is `Eventfd`
    /// or `Memory`, or it comes from a process that is trusted.
    pub fn keep(mut self) -> OwnedFd {
        match self.fd.take() {
            Some(fd) => fd,
            None => unreachable!("it is taken out here and in drop only"),
        }
    }
}

impl From<OwnedFd> for ForeignFd {
    /// For descriptors whose sender is not known: they are counted with those of this process's own
    /// user.
    fn from(fd: OwnedFd) -> ForeignFd {
        ForeignFd::new(fd, rustix::process::geteuid().as_raw())
    }
}

impl AsFd for ForeignFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("it is taken out by keep and drop only"),
        }
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        let Some(fd) = self.fd.take() else { return };
        match kind(&fd) {
            Kind::Eventfd | Kind::Memory => drop(fd),
            Kind::Pipe | Kind::Other => CLOSERS.close(fd, self.user),
        }
    }
}

/// Closes a descriptor that a peer handed over, without blocking.
pub fn close(fd: OwnedFd) {
    drop(ForeignFd::from(fd));
}

/// Whether descriptors may still be received from the process at the other end of a Unix socket:
/// few enough of its user's are waiting to be closed.
pub fn has_room(socket: impl AsFd) -> bool {
    let inner = CLOSERS.lock();
    // The common case asks the kernel nothing.
    inner.held == 0 || inner.has_room(user_of(socket))
}

/// The user at the other end of a Unix socket; where that cannot be told, this process's own.
pub fn user_of(socket: impl AsFd) -> u32 {
    credentials::peer(socket).map_or_else(|_| rustix::process::geteuid().as_raw(), |peer| peer.uid)
}

/// Descriptors that wait to be closed or hold up a thread that closes them.
pub fn held() -> usize {
    CLOSERS.lock().held
}

struct Closers(Mutex<Inner>);

static CLOSERS: Closers = Closers(Mutex::new(Inner::new()));

struct Inner {
    /// The process whose threads are counted here.
    process: u32,
    waiting: VecDeque<(OwnedFd, u32)>,
    threads: usize,
    held: usize,
    by_user: BTreeMap<u32, usize>,
}

impl Inner {
    const fn new() -> Inner {
        Inner { process: 0, waiting: VecDeque::new(), threads: 0, held: 0, by_user: BTreeMap::new() }
    }

    fn has_room(&self, user: u32) -> bool {
        self.held < MAX_HELD && self.by_user.get(&user).is_none_or(|held| *held < MAX_HELD_PER_USER)
    }

    fn done(&mut self, user: u32) {
        self.held -= 1;
        if let Some(held) = self.by_user.get_mut(&user) {
            *held -= 1;
            if *held == 0 {
                self.by_user.remove(&user);
            }
        }
    }
}

impl Closers {
    fn lock(&'static self) -> MutexGuard<'static, Inner> {
        fork::keep(&self.0);
        let mut inner = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let here = fork::process();
        if inner.process != here {
            // A forked child has none of its parent's threads. What waited is left alone: it is the
            // parent's to close.
            let parents = std::mem::replace(&mut *inner, Inner { process: here, ..Inner::new() });
            std::mem::forget(parents.waiting);
        }
        inner
    }

    /// Beyond the limits, too: the descriptor is here already. Its receiver asks [`has_room`]
    /// first.
    fn close(&'static self, fd: OwnedFd, user: u32) {
        let mut inner = self.lock();
        inner.held += 1;
        *inner.by_user.entry(user).or_default() += 1;
        inner.waiting.push_back((fd, user));
        if inner.threads < MAX_CLOSERS {
            let thread = std::thread::Builder::new().name("closer".into()).stack_size(64 << 10);
            // Without a thread it waits for the next one that starts.
            if thread.spawn(|| self.run()).is_ok() {
                inner.threads += 1;
            }
        }
    }

    /// Closes what waits, and ends.
    fn run(&'static self) {
        let mut inner = self.lock();
        while let Some((fd, user)) = inner.waiting.pop_front() {
            drop(inner);
            // May never return.
            drop(fd);
            inner = self.lock();
            inner.done(user);
        }
        inner.threads -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doorbell::Doorbell;
    use crate::memory::sealed_region;

    #[test]
    fn kinds_are_known_without_asking_a_file_system() {
        assert_eq!(kind(sealed_region("test", 4096).unwrap()), Kind::Memory);
        assert_eq!(kind(Doorbell::new().unwrap()), Kind::Eventfd);
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        assert_eq!((kind(&reader), kind(&writer)), (Kind::Pipe, Kind::Pipe));
        // Names that look like the kernel's own.
        let place = tempfile::tempdir().unwrap();
        for name in ["memfd:x (deleted)", "anon_inode:[eventfd]", "pipe:[1]"] {
            let path = place.path().join(name);
            std::fs::write(&path, b"x").unwrap();
            let file = std::fs::File::open(&path).unwrap();
            // The folder may be on a tmpfs.
            assert!(matches!(kind(&file), Kind::Other | Kind::Memory), "{name}");
        }
        assert_eq!(kind(std::fs::File::open("/proc/self/stat").unwrap()), Kind::Other);
    }
}
