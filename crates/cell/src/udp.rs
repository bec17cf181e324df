//! UDP sockets.

use crate::Net;
use crate::stack::Stack;
use alloc::vec::Vec;
use core::fmt;
use core::future::poll_fn;
use core::task::{Poll, Waker};
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

/// A UDP socket; its port is free again when it is dropped. It receives by every network device.
/// What is sent to a peer leaves by the device that the peer's last datagram came by, where that
/// was the last one received; else by the route.
pub struct UdpSocket {
    net: Net,
    /// For each device, in their order.
    handles: Vec<SocketHandle>,
    /// The device that is looked at first.
    first: usize,
    /// Who sent the last datagram, and the device it came by.
    sender: Option<(IpEndpoint, usize)>,
    /// Where the last datagram went, and the device it left by.
    last: Option<(IpAddress, usize)>,
}

impl UdpSocket {
    pub(crate) fn new(net: Net, port: u16, bytes: usize) -> Result<UdpSocket, UdpError> {
        let handles = net.with(|stack| {
            let port = if port == 0 { stack.ephemeral_port() } else { port };
            let taken = |socket: &smoltcp::socket::Socket<'_>| match socket {
                smoltcp::socket::Socket::Udp(socket) => socket.endpoint().port == port,
                _ => false,
            };
            if stack.nics[0].sockets.iter().any(|(_, socket)| taken(socket)) {
                return Err(UdpError::PortInUse);
            }
            let buffer = || {
                udp::PacketBuffer::new(
                    alloc::vec![PacketMetadata::EMPTY; (bytes / SMALL_DATAGRAM_BYTES).max(256)],
                    alloc::vec![0; bytes],
                )
            };
            let nics = stack.nics.iter_mut();
            let handles = nics.map(|nic| {
                let mut socket = udp::Socket::new(buffer(), buffer());
                // A new socket is open for every port but 0.
                let _ = socket.bind(port);
                nic.sockets.add(socket)
            });
            Ok(handles.collect())
        })?;
        Ok(UdpSocket { net, handles, first: 0, sender: None, last: None })
    }

    /// The next datagram of any device, or `None` where there is none; then `waker` is woken when
    /// one comes.
    fn take<R>(&mut self, waker: Option<&Waker>, take: impl FnOnce(&[u8], IpEndpoint) -> R) -> Option<R> {
        let UdpSocket { net, handles, first, sender, .. } = self;
        net.with(|stack| {
            let count = handles.len();
            for turn in 0..count {
                let at = (*first + turn) % count;
                let socket = stack.nics[at].sockets.get_mut::<udp::Socket<'_>>(handles[at]);
                if let Ok((bytes, meta)) = socket.recv() {
                    *first = (at + 1) % count;
                    *sender = Some((meta.endpoint, at));
                    return Some(take(bytes, meta.endpoint));
                }
                if let Some(waker) = waker {
                    socket.register_recv_waker(waker);
                }
            }
            None
        })
    }

    /// The device that a datagram to `to` leaves by.
    fn route(&self, stack: &mut Stack, to: IpEndpoint) -> usize {
        match self.sender {
            Some((sender, at)) if sender == to => at,
            _ => stack.route(to.addr),
        }
    }

    /// Waits for a datagram and hands it to `take`, without a copy.
    pub async fn receive_with<R>(&mut self, mut take: impl FnMut(&[u8], IpEndpoint) -> R) -> R {
        poll_fn(|cx| match self.take(Some(cx.waker()), &mut take) {
            Some(taken) => Poll::Ready(taken),
            None => Poll::Pending,
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
        self.take(None, take)
    }

    /// Waits for room and sends a datagram of `len` bytes, which `fill` writes.
    pub async fn send_with(
        &mut self,
        len: usize,
        to: IpEndpoint,
        mut fill: impl FnMut(&mut [u8]),
    ) -> Result<(), UdpError> {
        let now_ns = self.net.now_ns();
        let at = self.net.with(|stack| {
            let at = self.route(stack, to);
            if self.last != Some((to.addr, at)) {
                stack.expect_sending_to(at, to.addr, now_ns);
            }
            at
        });
        self.last = Some((to.addr, at));
        let handle = self.handles[at];
        poll_fn(|cx| {
            self.net.with(|stack| {
                let socket = stack.nics[at].sockets.get_mut::<udp::Socket<'_>>(handle);
                match socket.send(len, to) {
                    Ok(room) => {
                        fill(room);
                        Poll::Ready(Ok(()))
                    }
                    Err(udp::SendError::Unaddressable) => Poll::Ready(Err(UdpError::Unreachable)),
                    Err(udp::SendError::BufferFull) => {
                        socket.register_send_waker(cx.waker());
                        Poll::Pending
                    }
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
        self.net.with(|stack| {
            for (nic, handle) in stack.nics.iter_mut().zip(&self.handles) {
                nic.sockets.remove(*handle);
            }
        });
    }
}
