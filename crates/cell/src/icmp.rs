//! ICMP echo, from the asking side. The stack answers echo requests by itself.

use crate::Net;
use alloc::vec;
use alloc::vec::Vec;
use core::future::poll_fn;
use core::task::Poll;
use smoltcp::iface::SocketHandle;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::socket::icmp::{Endpoint, PacketBuffer, PacketMetadata, Socket};
use smoltcp::wire::{
    Icmpv4Message, Icmpv4Packet, Icmpv4Repr, Icmpv6Message, Icmpv6Packet, Icmpv6Repr, IpAddress, Ipv6Address,
};

/// Bytes of an echo request behind its header, as `ping` sends by default.
const PAYLOAD: [u8; 56] = [0x5a; 56];
/// Requests or replies that a socket holds.
const PACKETS: usize = 8;
/// Room for those: header and payload each.
const BUFFER_BYTES: usize = PACKETS * (8 + PAYLOAD.len());

/// Sends echo requests under an identifier of its own and waits for the replies.
pub struct Pinger {
    net: Net,
    /// For each device, in their order.
    handles: Vec<SocketHandle>,
    ident: u16,
    sequence: u16,
}

impl Pinger {
    pub(crate) fn new(net: Net) -> Pinger {
        let (handles, ident) = net.with(|stack| {
            let buffer = || PacketBuffer::new(vec![PacketMetadata::EMPTY; PACKETS], vec![0; BUFFER_BYTES]);
            let ident = stack.ephemeral_port();
            let nics = stack.nics.iter_mut();
            let handles = nics.map(|nic| {
                let mut socket = Socket::new(buffer(), buffer());
                // A new socket is closed and the identifier is not 0, which is all that could be
                // refused.
                let _ = socket.bind(Endpoint::Ident(ident));
                nic.sockets.add(socket)
            });
            (handles.collect(), ident)
        });
        Pinger { net, handles, ident, sequence: 0 }
    }

    fn with<R>(&self, nic: usize, f: impl FnOnce(&mut Socket<'static>) -> R) -> R {
        self.net.with(|stack| f(stack.nics[nic].sockets.get_mut(self.handles[nic])))
    }

    /// One echo request; nanoseconds until its reply, or `None` where none came within
    /// `timeout_ns`.
    pub async fn ping(&mut self, to: impl Into<IpAddress>, timeout_ns: u64) -> Option<u64> {
        let to = to.into();
        self.sequence = self.sequence.wrapping_add(1);
        let (ident, seq_no) = (self.ident, self.sequence);
        let start = self.net.now_ns();
        let nic = self.net.with(|stack| {
            let nic = stack.route(to);
            stack.expect_sending_to(nic, to, start);
            nic
        });
        // With its checksum: the stack parses what lies in the buffer before it sends it.
        let checksums = ChecksumCapabilities::default();
        self.with(nic, |socket| {
            match to {
                IpAddress::Ipv4(_) => {
                    let request = Icmpv4Repr::EchoRequest { ident, seq_no, data: &PAYLOAD };
                    let room = socket.send(request.buffer_len(), to).ok()?;
                    request.emit(&mut Icmpv4Packet::new_unchecked(room), &checksums);
                }
                IpAddress::Ipv6(address) => {
                    let request = Icmpv6Repr::EchoRequest { ident, seq_no, data: &PAYLOAD };
                    let room = socket.send(request.buffer_len(), to).ok()?;
                    // The source is chosen when it is sent, and the sum is made then.
                    let packet = &mut Icmpv6Packet::new_unchecked(room);
                    request.emit(&Ipv6Address::UNSPECIFIED, &address, packet, &checksums);
                }
            }
            Some(())
        })?;
        let net = self.net.clone();
        net.within(timeout_ns, self.reply(nic, to, seq_no)).await?;
        Some(self.net.now_ns() - start)
    }

    async fn reply(&self, nic: usize, from: IpAddress, sequence: u16) {
        let is_reply = |bytes: &[u8]| match from {
            IpAddress::Ipv4(_) => Icmpv4Packet::new_checked(bytes)
                .is_ok_and(|p| p.msg_type() == Icmpv4Message::EchoReply && p.echo_seq_no() == sequence),
            IpAddress::Ipv6(_) => Icmpv6Packet::new_checked(bytes)
                .is_ok_and(|p| p.msg_type() == Icmpv6Message::EchoReply && p.echo_seq_no() == sequence),
        };
        poll_fn(|cx| {
            self.with(nic, |socket| {
                // Late replies to earlier requests are taken out of the way.
                while let Ok((bytes, source)) = socket.recv() {
                    if source == from && is_reply(bytes) {
                        return Poll::Ready(());
                    }
                }
                socket.register_recv_waker(cx.waker());
                Poll::Pending
            })
        })
        .await;
    }
}

impl Drop for Pinger {
    fn drop(&mut self) {
        self.net.with(|stack| {
            for (nic, handle) in stack.nics.iter_mut().zip(&self.handles) {
                nic.sockets.remove(*handle);
            }
        });
    }
}
