//! Listening Unix sockets that leave nothing behind, and replace what a killed process left.

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 16;
/// The same where many may connect at one time and are accepted at once. The kernel may allow fewer
/// (net.core.somaxconn).
const LARGE_BACKLOG: i32 = 4096;

/// A listening Unix socket, for its owner's user only. Its file goes with it.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of the file, so that another's of the same name is left alone.
    file: Option<(u64, u64)>,
}

/// Binds a Unix socket at `path` with the mode 0600, for any umask. The file never has wider
/// permissions, not even for a moment, and no process can connect before the caller listens.
///
/// # Errors
/// The kernel's.
pub fn bind_private(socket: impl AsFd, path: &Path) -> Result<(), Errno> {
    // On Linux the file takes the mode of the socket, less the umask.
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(0o600))?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    // A umask may have taken from the owner's rights.
    rustix::fs::chmod(path, Mode::from_raw_mode(0o600))
}

/// Whether a connection to `path`, the name of a listening Unix socket, finds this socket. If its
/// file was removed, the socket has no name any more, even if another file has that name now. A
/// listener that was killed may leave a file behind on which no process listens.
pub fn is_found_at(socket: impl AsFd, path: &Path) -> bool {
    let named = net::getsockname(&socket).ok().and_then(|name| SocketAddrUnix::try_from(name).ok());
    let Ok(name) = SocketAddrUnix::new(path) else { return false };
    let listens = net::sockopt::socket_acceptconn(&socket).unwrap_or(false);
    // A datagram socket cannot connect to a listener, and this error differs from the one for a
    // name without a listener. So no connection results from it.
    let found = net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
        .and_then(|probe| net::connect(&probe, &name));
    listens && named.is_some_and(|named| named == name) && found == Err(Errno::PROTOTYPE)
}

impl Listener {
    /// Listens at `path`. Replaces the file of a socket on which no process listens any more.
    ///
    /// # Errors
    /// `EADDRINUSE` where somebody listens there, else the kernel's.
    pub fn bind(path: &Path, kind: SocketType) -> Result<Listener, Errno> {
        let name = SocketAddrUnix::new(path)?;
        let make = |flags| net::socket_with(AddressFamily::UNIX, kind, flags | SocketFlags::CLOEXEC, None);
        let probe = make(SocketFlags::NONBLOCK)?;
        if net::connect(&probe, &name) == Err(Errno::CONNREFUSED) {
            // If another process removed it meanwhile, the result is the same.
            let _ = rustix::fs::unlink(path);
        }
        Self::listen(make(SocketFlags::NONBLOCK)?, path, BACKLOG)
    }

    /// Listens at `path` in place of the present listener, which cannot be reached there any more.
    /// This is for names that belong to the caller alone: a process that ends may close its
    /// listening socket after everything else. Many connections may wait to be accepted.
    ///
    /// # Errors
    /// The kernel's.
    pub fn replace(path: &Path, kind: SocketType) -> Result<Listener, Errno> {
        let new = path.with_extension("new");
        match rustix::fs::unlink(&new) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let mut listener =
            Self::listen(net::socket_with(AddressFamily::UNIX, kind, flags, None)?, &new, LARGE_BACKLOG)?;
        rustix::fs::rename(&new, path)?;
        listener.path = path.into();
        Ok(listener)
    }

    fn listen(socket: OwnedFd, path: &Path, backlog: i32) -> Result<Listener, Errno> {
        bind_private(&socket, path)?;
        let file = identity(path);
        net::listen(&socket, backlog)?;
        Ok(Listener { socket, path: path.into(), file })
    }

    /// A listening socket that another process made at `path` and handed over.
    ///
    /// # Errors
    /// The kernel's, for what is no listening socket.
    pub fn adopt(socket: OwnedFd, path: &Path) -> Result<Listener, Errno> {
        if !net::sockopt::socket_acceptconn(&socket)? {
            return Err(Errno::INVAL);
        }
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Listener { socket, path: path.into(), file: identity(path) })
    }

    /// The socket, to be handed to another process; the file stays.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn hand_over(mut self) -> Result<OwnedFd, Errno> {
        let socket = rustix::io::fcntl_dupfd_cloexec(&self.socket, 3)?;
        self.file = None;
        Ok(socket)
    }

    /// Path of the socket, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next peer, if one waits. Its socket does not block.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        accept(&self.socket)
    }
}

/// The next peer of a listening socket that does not block, of any family, if one waits. Its socket
/// does not block either.
///
/// # Errors
/// The kernel's, where no descriptor is left.
pub fn accept(socket: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
    loop {
        match net::accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(peer) => return Ok(Some(peer)),
            Err(Errno::AGAIN) => return Ok(None),
            // The peer went before it was accepted.
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(errno) => return Err(errno),
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // It still listens, so no other process binds the name between the look and the removal.
        if self.file.is_some() && identity(&self.path) == self.file {
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_whose_file_was_replaced_is_not_found() {
        let path = std::env::temp_dir().join(format!("tmb-listener-{}-found", std::process::id()));
        let first = Listener::bind(&path, SocketType::STREAM).unwrap();
        assert!(is_found_at(&first, &path));
        assert!(first.accept().unwrap().is_none(), "the look is no connection");
        std::fs::remove_file(&path).unwrap();
        assert!(!is_found_at(&first, &path));
        // Made by another process, which is killed: its file stays.
        let second = Listener::bind(&path, SocketType::STREAM).unwrap();
        drop(second.hand_over().unwrap());
        assert!(path.exists());
        // A process that another test is starting has it too, up to its `exec`.
        tombolo_testing::until("no process listens there", || !is_found_at(&first, &path));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_dead_ones_file_is_replaced_and_a_living_ones_is_not() {
        let path = std::env::temp_dir().join(format!("tmb-listener-{}", std::process::id()));
        let first = Listener::bind(&path, SocketType::STREAM).unwrap();
        assert_eq!(Listener::bind(&path, SocketType::STREAM).err(), Some(Errno::ADDRINUSE));
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        // As a killed process leaves it.
        let left = std::env::temp_dir().join(format!("tmb-listener-{}-left", std::process::id()));
        std::fs::rename(&path, &left).unwrap();
        drop(first);
        assert!(left.exists(), "it is no longer the file of that name");
        std::fs::rename(&left, &path).unwrap();
        // As above: until the last copy of the socket is closed.
        tombolo_testing::until("no process listens there", || Listener::bind(&path, SocketType::STREAM).is_ok());
        let second = Listener::bind(&path, SocketType::STREAM).unwrap().hand_over().unwrap();
        let second = Listener::adopt(second, &path).unwrap();
        assert!(second.accept().unwrap().is_none());
        assert_eq!(second.path(), path);
        let third = Listener::replace(&path, SocketType::STREAM).unwrap();
        let probe = net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        net::connect(&probe, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        assert!(second.accept().unwrap().is_none() && third.accept().unwrap().is_some());
        drop(second);
        assert!(path.exists(), "it is another's");
        drop(third);
        assert!(!path.exists() && !path.with_extension("new").exists());
    }
}
