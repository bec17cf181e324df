//! ICMP echo, from the asking side. The stack answers echo requests by itself.

use crate::Net;
use alloc::vec;
use core::future::poll_fn;
use core::task::Poll;
use smoltcp::iface::SocketHandle;
use smoltcp::phy::ChecksumCapabilities;
use smoltcp::socket::icmp::{Endpoint, PacketBuffer, PacketMetadata, Socket};
use smoltcp::wire::{Icmpv4Message, Icmpv4Packet, Icmpv4Repr, Ipv4Address};

/// Bytes of an echo request behind its header, as `ping` sends by default.
const PAYLOAD: [u8; 56] = [0x5a; 56];
/// Requests or replies that a socket holds.
const PACKETS: usize = 8;
/// Room for those: header and payload each.
const BUFFER_BYTES: usize = PACKETS * (8 + PAYLOAD.len());

/// Sends echo requests under an identifier of its own and waits for the replies.
pub struct Pinger {
    net: Net,
    handle: SocketHandle,
    ident: u16,
    sequence: u16,
}

impl Pinger {
    pub(crate) fn new(net: Net) -> Pinger {
        let (handle, ident) = net.with(|stack| {
            let buffer = || PacketBuffer::new(vec![PacketMetadata::EMPTY; PACKETS], vec![0; BUFFER_BYTES]);
            let mut socket = Socket::new(buffer(), buffer());
            let ident = stack.ephemeral_port();
            // A new socket is closed and the identifier is not 0, which is all that could be refused.
            let _ = socket.bind(Endpoint::Ident(ident));
            (stack.sockets.add(socket), ident)
        });
        Pinger { net, handle, ident, sequence: 0 }
    }

    fn with<R>(&self, f: impl FnOnce(&mut Socket<'static>) -> R) -> R {
        self.net.with(|stack| f(stack.sockets.get_mut(self.handle)))
    }

    /// One echo request; nanoseconds until its reply, or `None` where none came within `timeout_ns`.
    pub async fn ping(&mut self, to: Ipv4Address, timeout_ns: u64) -> Option<u64> {
        self.sequence = self.sequence.wrapping_add(1);
        let (ident, seq_no) = (self.ident, self.sequence);
        let request = Icmpv4Repr::EchoRequest { ident, seq_no, data: &PAYLOAD };
        let start = self.net.now_ns();
        self.net.with(|stack| stack.expect_sending_to(to.into(), start));
        self.with(|socket| {
            let room = socket.send(request.buffer_len(), to.into()).ok()?;
            // With its checksum: the stack parses what lies in the buffer before it sends it.
            request.emit(&mut Icmpv4Packet::new_unchecked(room), &ChecksumCapabilities::default());
            Some(())
        })?;
        let net = self.net.clone();
        net.within(timeout_ns, self.reply(to, seq_no)).await?;
        Some(self.net.now_ns() - start)
    }

    async fn reply(&self, from: Ipv4Address, sequence: u16) {
        poll_fn(|cx| {
            self.with(|socket| {
                // Late replies to earlier requests are taken out of the way.
                while let Ok((bytes, source)) = socket.recv() {
                    let packet = Icmpv4Packet::new_checked(bytes);
                    if source == from.into()
                        && packet.is_ok_and(|p| p.msg_type() == Icmpv4Message::EchoReply && p.echo_seq_no() == sequence)
                    {
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
        let handle = self.handle;
        self.net.with(|stack| stack.sockets.remove(handle));
    }
}
