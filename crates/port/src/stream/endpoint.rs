//! Where a stream attachment finds its peer: addresses, listening sockets and connections. All of
//! them are non-blocking.

use super::StreamError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::str::FromStr;
use tombolo_shm::credentials;

/// The address of a stream socket: `unix:PATH`, a plain `/PATH`, or `tcp:IP:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// A socket in the file system.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl FromStr for Address {
    type Err = StreamError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bad = || StreamError::Address { text: text.into() };
        match text.split_once(':') {
            Some(("unix", path)) if !path.is_empty() => Ok(Address::Unix(path.into())),
            Some(("tcp", rest)) => rest.parse().map(Address::Tcp).map_err(|_| bad()),
            _ if text.starts_with('/') => Ok(Address::Unix(text.into())),
            _ => Err(bad()),
        }
    }
}

fn socket(address: &Address) -> Result<OwnedFd, Errno> {
    let family = match address {
        Address::Unix(_) => AddressFamily::UNIX,
        Address::Tcp(SocketAddr::V4(_)) => AddressFamily::INET,
        Address::Tcp(SocketAddr::V6(_)) => AddressFamily::INET6,
    };
    net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

/// Has a TCP socket send frames at once and notice a peer that disappears silently; no effect on
/// others.
pub(crate) fn tune(socket: impl AsFd) {
    // Each fails on a Unix socket, which needs none of them.
    let _ = sockopt::set_tcp_nodelay(&socket, true);
    let _ = sockopt::set_socket_keepalive(&socket, true);
    let _ = sockopt::set_tcp_keepidle(&socket, std::time::Duration::from_secs(10));
}

/// A listening socket; its file goes with it.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    pub(crate) address: Address,
    /// Device and inode of the socket's file, so that another's of the same name is left alone.
    file: Option<(u64, u64)>,
}

impl Listener {
    pub(crate) fn bind(address: &Address, mode: u32) -> Result<Listener, StreamError> {
        let failed = |what| move |source| StreamError::System { what, address: address.clone(), source };
        let socket = socket(address).map_err(failed("making a socket for"))?;
        let mut listener = Listener { socket, address: address.clone(), file: None };
        match address {
            Address::Unix(path) => {
                let name = SocketAddrUnix::new(path).map_err(failed("naming"))?;
                remove_stale(path, &name);
                // The file is made with these rights, less the umask, so it is never open wider
                // than asked.
                rustix::fs::fchmod(&listener.socket, Mode::from_raw_mode(mode))
                    .map_err(failed("setting the mode of"))?;
                net::bind(&listener.socket, &name).map_err(failed("listening on"))?;
                listener.file = std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()));
                rustix::fs::chmod(path, Mode::from_raw_mode(mode)).map_err(failed("setting the mode of"))?;
            }
            Address::Tcp(ip) => {
                sockopt::set_socket_reuseaddr(&listener.socket, true).map_err(failed("setting options of"))?;
                net::bind(&listener.socket, ip).map_err(failed("listening on"))?;
                // Port 0 means any port.
                let bound = net::getsockname(&listener.socket).ok().and_then(|a| SocketAddr::try_from(a).ok());
                listener.address = bound.map_or(address.clone(), Address::Tcp);
            }
        }
        net::listen(&listener.socket, 1).map_err(failed("listening on"))?;
        Ok(listener)
    }

    /// The listening socket of another process at `address`; `None` where it is not that.
    pub(crate) fn adopt(socket: OwnedFd, address: &Address) -> Option<Listener> {
        let file = match address {
            Address::Unix(path) => {
                if !tombolo_shm::listener::is_found_at(&socket, path) {
                    return None;
                }
                let file = std::fs::symlink_metadata(path).ok()?;
                Some((file.dev(), file.ino()))
            }
            Address::Tcp(ip) => {
                let named = SocketAddr::try_from(net::getsockname(&socket).ok()?).ok()?;
                if !sockopt::socket_acceptconn(&socket).ok()? || named != *ip {
                    return None;
                }
                None
            }
        };
        rustix::io::ioctl_fionbio(&socket, true).ok()?;
        Some(Listener { socket, address: address.clone(), file })
    }

    /// The next peer, if one waits.
    pub(crate) fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        tombolo_shm::listener::accept(&self.socket)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let (Address::Unix(path), Some(file)) = (&self.address, self.file) {
            let ours = std::fs::symlink_metadata(path).is_ok_and(|m| (m.dev(), m.ino()) == file);
            if ours {
                // If it was removed meanwhile, another process has done the same.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// Removes the socket file of a killed process: one that has no listener.
fn remove_stale(path: &PathBuf, name: &SocketAddrUnix) {
    use std::os::unix::fs::FileTypeExt;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket());
    let Ok(probe) = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None) else {
        return;
    };
    if is_socket && net::connect(&probe, name) == Err(Errno::CONNREFUSED) {
        // If that fails, binding says why.
        let _ = std::fs::remove_file(path);
    }
}

/// How far a connection is.
pub(crate) enum Progress {
    Connected(OwnedFd),
    Pending(OwnedFd),
}

/// Starts to connect.
pub(crate) fn connect(address: &Address) -> Result<Progress, Errno> {
    let socket = socket(address)?;
    let result = match address {
        Address::Unix(path) => net::connect(&socket, &SocketAddrUnix::new(path)?),
        Address::Tcp(ip) => net::connect(&socket, ip),
    };
    match result {
        Ok(()) => Ok(Progress::Connected(socket)),
        Err(Errno::INPROGRESS | Errno::INTR) => Ok(Progress::Pending(socket)),
        // A Unix socket whose backlog is full says EAGAIN; that is another attempt later.
        Err(errno) => Err(errno),
    }
}

/// What became of a connection that was pending.
pub(crate) fn connected(socket: OwnedFd) -> Result<Progress, Errno> {
    let mut fds = [PollFd::new(&socket, PollFlags::OUT)];
    poll(&mut fds, Some(&Timespec::default()))?;
    if fds[0].revents().is_empty() {
        return Ok(Progress::Pending(socket));
    }
    sockopt::socket_error(&socket)??;
    Ok(Progress::Connected(socket))
}

/// Who is at the other end, as far as the kernel vouches for it.
pub(crate) fn describe_peer(socket: impl AsFd) -> String {
    let unix = sockopt::socket_domain(&socket) == Ok(AddressFamily::UNIX);
    if let (true, Ok(peer)) = (unix, credentials::peer(&socket)) {
        return format!("pid {} uid {}", peer.pid_or_zero(), peer.uid);
    }
    let address = net::getpeername(&socket).ok().and_then(|a| SocketAddr::try_from(a?).ok());
    address.map_or("unknown".into(), |a| a.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["unix:/run/x.sock", "tcp:127.0.0.1:7000", "tcp:[::1]:7000"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("/run/x".parse::<Address>().unwrap(), Address::Unix("/run/x".into()));
        for text in ["", "unix:", "tcp:", "tcp:localhost", "udp:1.2.3.4:5", "x.sock"] {
            assert!(text.parse::<Address>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_killed_listeners_file_is_replaced_and_a_live_ones_is_not() {
        let folder = crate::stream::tests::Folder::new();
        let address = Address::Unix(folder.path("s"));
        let mut first = Listener::bind(&address, 0o600).unwrap();
        assert_eq!(std::fs::metadata(folder.path("s")).unwrap().mode() & 0o777, 0o600);
        assert!(matches!(Listener::bind(&address, 0o600), Err(StreamError::System { source: Errno::ADDRINUSE, .. })));
        // As a killed process leaves it: the socket closed, the file there.
        first.file = None;
        drop(first);
        let second = Listener::bind(&address, 0o660).unwrap();
        assert_eq!(std::fs::metadata(folder.path("s")).unwrap().mode() & 0o777, 0o660);
        drop(second);
        assert!(!folder.path("s").exists());
    }
}
