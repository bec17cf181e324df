//! UDP sockets.

use crate::Net;
use core::fmt;
use core::future::poll_fn;
use core::task::Poll;
use smoltcp::iface::SocketHandle;
use smoltcp::socket::udp::{self, PacketMetadata};
use smoltcp::wire::{IpAddress, IpEndpoint};

/// A socket holds as many datagrams each way as its bytes hold of this size, and at least 256.
const SMALL_DATAGRAM_BYTES: usize = 512;
/// Bytes that a socket holds each way, unless the app says otherwise.
pub(crate) const DEFAULT_BYTES: usize = 128 << 10;

/// Why a datagram was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UdpError {
    /// No address of our own, or none of the peer's.
    Unreachable,
    /// Another socket of this cell is bound to the port.
    PortInUse,
}

impl fmt::Display for UdpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UdpError::Unreachable => "the peer cannot be reached",
            UdpError::PortInUse => "the port is in use",
        })
    }
}

/// A UDP socket; its port is free again when it is dropped.
pub struct UdpSocket {
    net: Net,
    handle: SocketHandle,
    /// Where the last datagram went.
    last: Option<IpAddress>,
}

impl UdpSocket {
    pub(crate) fn new(net: Net, port: u16, bytes: usize) -> Result<UdpSocket, UdpError> {
        let handle = net.with(|stack| {
            let port = if port == 0 { stack.ephemeral_port() } else { port };
            let taken = |socket: &smoltcp::socket::Socket<'_>| match socket {
                smoltcp::socket::Socket::Udp(socket) => socket.endpoint().port == port,
                _ => false,
            };
            if stack.sockets.iter().any(|(_, socket)| taken(socket)) {
                return Err(UdpError::PortInUse);
            }
            let buffer = || {
                udp::PacketBuffer::new(
                    alloc::vec![PacketMetadata::EMPTY; (bytes / SMALL_DATAGRAM_BYTES).max(256)],
                    alloc::vec![0; bytes],
                )
            };
            let mut socket = udp::Socket::new(buffer(), buffer());
            socket.bind(port).map_err(|_| UdpError::PortInUse)?;
            Ok(stack.sockets.add(socket))
        })?;
        Ok(UdpSocket { net, handle, last: None })
    }

    fn with<R>(&self, f: impl FnOnce(&mut udp::Socket<'static>) -> R) -> R {
        self.net.with(|stack| f(stack.sockets.get_mut(self.handle)))
    }

    /// Waits for a datagram and hands it to `take`, without a copy.
    pub async fn receive_with<R>(&mut self, mut take: impl FnMut(&[u8], IpEndpoint) -> R) -> R {
        poll_fn(|cx| {
            self.with(|socket| match socket.recv() {
                Ok((bytes, meta)) => Poll::Ready(take(bytes, meta.endpoint)),
                Err(_) => {
                    socket.register_recv_waker(cx.waker());
                    Poll::Pending
                }
            })
        })
        .await
    }

    /// Waits for a datagram and copies it, as much as `to` holds; its length there, and its sender.
    pub async fn receive(&mut self, to: &mut [u8]) -> (usize, IpEndpoint) {
        self.receive_with(|bytes, from| {
            let n = bytes.len().min(to.len());
            to[..n].copy_from_slice(&bytes[..n]);
            (n, from)
        })
        .await
    }

    /// A datagram that is there already, handed to `take`.
    pub fn try_receive_with<R>(&mut self, take: impl FnOnce(&[u8], IpEndpoint) -> R) -> Option<R> {
        self.with(|socket| socket.recv().ok().map(|(bytes, meta)| take(bytes, meta.endpoint)))
    }

    /// Waits for room and sends a datagram of `len` bytes, which `fill` writes.
    pub async fn send_with(
        &mut self,
        len: usize,
        to: IpEndpoint,
        mut fill: impl FnMut(&mut [u8]),
    ) -> Result<(), UdpError> {
        if self.last.replace(to.addr) != Some(to.addr) {
            let now_ns = self.net.now_ns();
            self.net.with(|stack| stack.expect_sending_to(to.addr, now_ns));
        }
        poll_fn(|cx| {
            self.with(|socket| match socket.send(len, to) {
                Ok(room) => {
                    fill(room);
                    Poll::Ready(Ok(()))
                }
                Err(udp::SendError::Unaddressable) => Poll::Ready(Err(UdpError::Unreachable)),
                Err(udp::SendError::BufferFull) => {
                    socket.register_send_waker(cx.waker());
                    Poll::Pending
                }
            })
        })
        .await
    }

    /// Waits for room and sends a datagram.
    pub async fn send(&mut self, bytes: &[u8], to: IpEndpoint) -> Result<(), UdpError> {
        self.send_with(bytes.len(), to, |room| room.copy_from_slice(bytes)).await
    }
}

impl Drop for UdpSocket {
    fn drop(&mut self) {
        let handle = self.handle;
        self.net.with(|stack| stack.sockets.remove(handle));
    }
}
