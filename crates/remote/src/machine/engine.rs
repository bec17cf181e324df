//! How bytes get from one machine to another: the trait of engines, and the engine that comes with
//! the daemon, TCP.
//!
//! Everything above is the same for all engines: TLS between the two machines, the hello, calls
//! with their deadlines, order and cancellation. So an engine need not be trusted: whatever it does
//! to the bytes, calls end with a named result. The program `tombolo-span` has the other engine,
//! over zenoh.
//!
//! # What an engine owes
//! - A connection carries bytes both ways, in order. It loses none in the middle: it ends instead.
//! - It holds a bounded number of bytes that the other side has not taken. Then [`Socket`] takes no
//!   more.
//! - It ends at both sides if either side ends it, and at most twice [`DEAD_AFTER`] after the other
//!   machine or the way to it has gone.
//! - It is never resumed. A call is never sent twice.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt;
use tombolo_shm::doorbell::Doorbell;

use super::{DEAD_AFTER, HANDSHAKE, MachineError, Remote};
use crate::transport::RemoteError;

/// A TCP connection without traffic is probed so often.
const PROBE: Duration = Duration::from_secs(1);
/// A pause after the system refused a connection, since it lacks descriptors or memory.
const REFUSED: Duration = Duration::from_millis(100);

/// Connects machines.
pub trait Engine: Send + Sync {
    /// A connection to the exports of a machine. Takes at most [`HANDSHAKE`], for each address that
    /// it tries.
    ///
    /// # Errors
    /// [`MachineError::Address`], [`MachineError::Connect`], [`MachineError::Unreachable`].
    fn connect(&self, to: &Remote) -> Result<Socket, MachineError>;

    /// Has `accept` called with each connection that another machine makes to the exports here,
    /// until the returned value is dropped. `accept` must not block.
    ///
    /// # Errors
    /// [`RemoteError::System`].
    fn listen(&self, accept: Accept) -> Result<Box<dyn Listening>, RemoteError>;
}

/// What takes connections that other machines make.
pub type Accept = Arc<dyn Fn(Socket, Origin) + Send + Sync>;

/// Connections are accepted until it is dropped.
pub trait Listening: Send + Sync {}

/// From where a connection comes, as the engine has it. Only TLS proves it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// An address.
    Address(SocketAddr),
    /// A machine's name.
    Machine(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Address(address) => address.fmt(f),
            Origin::Machine(name) => f.write_str(name),
        }
    }
}

impl Origin {
    /// Whether a certificate with these names may speak for it. Without encryption there is none,
    /// and an address is no name.
    pub(super) fn is_proven_by(&self, names: Option<&[String]>) -> bool {
        match (self, names) {
            (Origin::Machine(name), Some(names)) => names.contains(name),
            _ => true,
        }
    }

    fn ip(&self) -> Option<IpAddr> {
        match self {
            Origin::Address(address) => Some(address.ip()),
            Origin::Machine(_) => None,
        }
    }

    /// Whether both count as one for limits: the port does not matter.
    pub(super) fn is_same_host(&self, other: &Origin) -> bool {
        match self.ip() {
            Some(ip) => other.ip() == Some(ip),
            None => self == other,
        }
    }
}

/// This side's end of a connection: a stream socket.
#[derive(Debug)]
pub enum Socket {
    /// The connection itself.
    Tcp(TcpStream),
    /// A pair of sockets, whose other one an engine of this process serves. The engine finds out
    /// that the other machine is gone.
    Local(UnixStream),
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Socket::Tcp(socket) => socket.as_fd(),
            Socket::Local(socket) => socket.as_fd(),
        }
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(socket) => socket.read(bytes),
            Socket::Local(socket) => socket.read(bytes),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(socket) => socket.write(bytes),
            Socket::Local(socket) => socket.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Socket {
    pub(crate) fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        match self {
            Socket::Tcp(socket) => socket.set_nonblocking(on),
            Socket::Local(socket) => socket.set_nonblocking(on),
        }
    }

    /// Limits each read and write from now on.
    pub(super) fn limit(&self, time: Duration) -> io::Result<()> {
        let time = Some(time);
        match self {
            Socket::Tcp(socket) => socket.set_read_timeout(time).and_then(|()| socket.set_write_timeout(time)),
            Socket::Local(socket) => socket.set_read_timeout(time).and_then(|()| socket.set_write_timeout(time)),
        }
    }

    /// Ends the connection, for all who share the socket. It may have ended by itself.
    pub fn end(&self) {
        let _ = match self {
            Socket::Tcp(socket) => socket.shutdown(Shutdown::Both),
            Socket::Local(socket) => socket.shutdown(Shutdown::Both),
        };
    }

    pub(super) fn try_clone(&self) -> io::Result<Socket> {
        Ok(match self {
            Socket::Tcp(socket) => Socket::Tcp(socket.try_clone()?),
            Socket::Local(socket) => Socket::Local(socket.try_clone()?),
        })
    }

    /// Has what is written sent at once.
    pub(crate) fn set_nodelay(&self) -> io::Result<()> {
        match self {
            Socket::Tcp(socket) => socket.set_nodelay(true),
            Socket::Local(_) => Ok(()),
        }
    }

    /// Has the kernel find out that the other machine is dead.
    pub(super) fn watch(&self) -> io::Result<()> {
        let Socket::Tcp(socket) = self else { return Ok(()) };
        sockopt::set_tcp_keepidle(socket, PROBE)?;
        sockopt::set_tcp_keepintvl(socket, PROBE)?;
        sockopt::set_tcp_keepcnt(socket, (DEAD_AFTER.as_secs() / PROBE.as_secs()).saturating_sub(1) as u32)?;
        sockopt::set_socket_keepalive(socket, true)?;
        sockopt::set_tcp_user_timeout(socket, DEAD_AFTER.as_millis() as u32)?;
        Ok(())
    }
}

/// The engine of a direct path: a TCP connection for each import at each machine.
#[derive(Debug, Default)]
pub struct Tcp {
    listener: Option<TcpListener>,
}

impl Tcp {
    /// For imports, and for exports at this listener.
    pub fn at(listener: TcpListener) -> Tcp {
        Tcp { listener: Some(listener) }
    }
}

impl Engine for Tcp {
    fn connect(&self, to: &Remote) -> Result<Socket, MachineError> {
        let failed = |source| MachineError::Address { address: to.address.clone(), source };
        let mut last = failed(ErrorKind::NotFound.into());
        for to in to.address.to_socket_addrs().map_err(failed)? {
            // The name's next address may be reachable. A silent one does not take its time.
            match TcpStream::connect_timeout(&to, HANDSHAKE) {
                Ok(tcp) => return Ok(Socket::Tcp(tcp)),
                Err(source) => last = MachineError::Connect { to, source },
            }
        }
        Err(last)
    }

    fn listen(&self, accept: Accept) -> Result<Box<dyn Listening>, RemoteError> {
        let system = |what| move |source| RemoteError::System { what, source };
        let listener = self.listener.as_ref().ok_or(ErrorKind::NotConnected.into()).map_err(system("listening"))?;
        let listener = listener.try_clone().map_err(system("the listener"))?;
        listener.set_nonblocking(true).map_err(system("O_NONBLOCK"))?;
        let nudge = Doorbell::new().map_err(|errno| RemoteError::System { what: "eventfd", source: errno.into() })?;
        let listening = Arc::new((AtomicBool::new(false), nudge));
        let own = listening.clone();
        let thread = std::thread::Builder::new().name("tombolo-export".into()).spawn(move || {
            while !own.0.load(Ordering::SeqCst) {
                match listener.accept() {
                    // It may have gone again.
                    Ok((tcp, _)) if tcp.set_nonblocking(false).is_err() => {}
                    Ok((tcp, from)) => accept(Socket::Tcp(tcp), Origin::Address(from)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        let mut fds = [PollFd::new(&listener, PollFlags::IN), PollFd::new(&own.1, PollFlags::IN)];
                        // An interrupted wait looks again.
                        let _ = poll(&mut fds, None);
                    }
                    // A client that has gone again; or no descriptors, and then others have to end
                    // first.
                    Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                    Err(_) => std::thread::sleep(REFUSED),
                }
            }
        });
        let thread = thread.map_err(system("starting a thread"))?;
        Ok(Box::new(TcpListening { stop: listening, thread: Some(thread) }))
    }
}

struct TcpListening {
    stop: Arc<(AtomicBool, Doorbell)>,
    thread: Option<JoinHandle<()>>,
}

impl Listening for TcpListening {}

impl Drop for TcpListening {
    fn drop(&mut self) {
        self.stop.0.store(true, Ordering::SeqCst);
        self.stop.1.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_who_its_certificate_says() {
        let names = |names: &[&str]| Some(names.iter().map(|name| name.to_string()).collect::<Vec<_>>());
        let one = Origin::Machine("node-1".into());
        assert!(one.is_proven_by(names(&["node-1", "192.0.2.1"]).as_deref()));
        assert!(!one.is_proven_by(names(&["hub"]).as_deref()), "the router, in the machine's place");
        assert!(one.is_proven_by(None), "nothing is encrypted");
        let address = Origin::Address(([192, 0, 2, 1], 7).into());
        assert!(address.is_proven_by(names(&["node-1"]).as_deref()));
    }
}
