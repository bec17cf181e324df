//! TCP: listeners and streams.
//!
//! The stack below has no backlog: one socket takes one connection. So a listener keeps a few
//! sockets listening. It adds one more as soon as one is taken, up to the limit of connections. It
//! checks after each frame that asks for a connection, so a burst finds enough sockets. Closed
//! connections give their socket, with its buffers, to the next.
//!
//! The stack sends in the order of its sockets and stops when the transmit ring is full. So early
//! sockets could starve late ones. Therefore all streams together have no more on the way than half
//! of what the ring's buffers hold. Each stream may have written, and not yet acknowledged, an
//! equal share of that, at least [`MIN_SHARE_BYTES`].
//!
//! In the other direction the peers may send what the windows allow, all at a time. The receive
//! ring loses what it cannot hold. So the windows of some dozens of sockets together stay within
//! the ring. Each new socket gets at most a quarter of what the others have left of seven eighths
//! of it, at least [`MIN_WINDOW_BYTES`]. On Xen the ring is counted in pages, which are full where
//! the sender leaves cutting to the backend; peers that send segments of 1,500 bytes can overrun it
//! (docs/xen.md has what that costs).

use crate::Net;
use crate::machine::heap;
use crate::stack::{Handle, Nic, Stack};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::fmt;
use core::future::poll_fn;
use core::task::{Poll, Waker};
use smoltcp::iface::SocketSet;
use smoltcp::socket::Socket;
use smoltcp::socket::tcp::{self, State};
use smoltcp::time::Duration;
use smoltcp::wire::IpEndpoint;

/// Sockets that listen at least, while the limit allows it, and at most.
const BACKLOG: core::ops::RangeInclusive<usize> = 2..=16;
/// A peer that answers nothing for so long is given up.
const PEER_TIMEOUT: Duration = Duration::from_secs(20);
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// How long a peer may take to answer the first time.
const CONNECT_NS: u64 = 10_000_000_000;
/// How long a stream that was dropped may go without delivering any of what it has, or take to end,
/// and then its reset to leave.
const LINGER_NS: u64 = 30_000_000_000;

/// What a stream may always have on the way.
const MIN_SHARE_BYTES: usize = 4096;

/// A window that a socket gets however many there are.
const MIN_WINDOW_BYTES: usize = 4096;

/// What a socket may have written and not yet acknowledged however many there are.
const MIN_SEND_BYTES: usize = 8192;

/// What a listener gives each of its connections, and how many there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpOptions {
    /// Bytes received and not yet read: the window that the peer sees; less where there are many
    /// connections.
    pub receive_bytes: usize,
    /// Bytes written and not yet acknowledged: as long as a round trip takes, no more are sent.
    pub send_bytes: usize,
    /// The same of all sockets of the cell together. A connection that comes gets an eighth of what
    /// is left, at most `send_bytes`, and 8 KiB however many there are.
    pub send_all_bytes: usize,
    /// Connections of the listener at a time; further ones are refused. It does not bound those
    /// that the cell itself begins.
    pub limit: usize,
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions { receive_bytes: 16 << 10, send_bytes: 64 << 10, send_all_bytes: 8 << 20, limit: 128 }
    }
}

/// Why a TCP call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpError {
    /// The peer has closed, or reset, or answered nothing for too long.
    Closed,
    /// The peer cannot be reached: no route, no address of our own, or no answer within 10 s.
    Unreachable,
    /// The peer refused the connection.
    Refused,
}

impl fmt::Display for TcpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TcpError::Closed => "the connection is closed",
            TcpError::Unreachable => "the peer cannot be reached",
            TcpError::Refused => "the peer refused the connection",
        })
    }
}

/// A listener's part of the stack's state.
pub(crate) struct ListenState {
    port: u16,
    options: TcpOptions,
    /// Sockets that listen, or whose handshake is under way.
    backlog: Vec<Handle>,
    /// Connections that wait to be accepted.
    ready: VecDeque<Handle>,
    waker: Option<Waker>,
    /// Connections that were accepted and still hold their socket.
    accepted: usize,
}

impl ListenState {
    /// How many there are of it, in whatever state.
    fn sockets(&self) -> usize {
        self.backlog.len() + self.ready.len() + self.accepted
    }
}

/// A connection whose stream was dropped.
pub(crate) struct Closing {
    handle: Handle,
    listener: Option<usize>,
    /// Bytes that were not acknowledged when this was last looked at.
    left: usize,
    pub(crate) deadline_ns: u64,
}

impl Closing {
    fn new(handle: Handle, listener: Option<usize>, left: usize, now_ns: u64) -> Closing {
        Closing { handle, listener, left, deadline_ns: now_ns + LINGER_NS }
    }

    /// Notes what is left: a peer that reads slowly gets all of it.
    fn note(&mut self, left: usize, now_ns: u64) {
        if left < self.left {
            self.left = left;
            self.deadline_ns = now_ns + LINGER_NS;
        }
    }
}

/// The window of a new socket that wants `wanted` bytes, where those of the others are `taken` of
/// the `whole`.
fn window_bytes(wanted: usize, whole: usize, taken: usize) -> usize {
    wanted.min(((whole - whole / 8).saturating_sub(taken) / 4).max(MIN_WINDOW_BYTES))
}

fn streams<'a>(sockets: &'a SocketSet<'static>) -> impl Iterator<Item = &'a tcp::Socket<'static>> {
    sockets.iter().filter_map(|(_, socket)| match socket {
        Socket::Tcp(socket) => Some(socket),
        _ => None,
    })
}

fn windows(sockets: &SocketSet<'static>) -> usize {
    streams(sockets).map(tcp::Socket::recv_capacity).sum()
}

/// What a new socket may send before it is acknowledged, where those of all sockets take `taken`
/// bytes and its listener has `sockets`. As many as the limit allows get the least.
fn send_bytes(options: &TcpOptions, taken: usize, sockets: usize) -> usize {
    let least = MIN_SEND_BYTES.min(options.send_bytes);
    let kept = options.limit.saturating_sub(sockets + 1).saturating_mul(least);
    let left = options.send_all_bytes.saturating_sub(taken).saturating_sub(kept);
    (left / 8).clamp(least, options.send_bytes)
}

fn all_sends(nics: &[Nic]) -> usize {
    nics.iter().flat_map(|nic| streams(&nic.sockets)).map(tcp::Socket::send_capacity).sum()
}

fn new_socket(window_bytes: usize, send_bytes: usize) -> tcp::Socket<'static> {
    let buffer = |bytes: usize| tcp::SocketBuffer::new(heap::buffer(bytes));
    let mut socket = tcp::Socket::new(buffer(window_bytes), buffer(send_bytes));
    socket.set_nagle_enabled(false);
    socket.set_ack_delay(None);
    socket.set_timeout(Some(PEER_TIMEOUT));
    socket.set_keep_alive(Some(KEEP_ALIVE));
    socket
}

/// Whether a connection has ended, and its peer was told. A reset waits where the device has no room
/// or its link is down; the stack forgets the peer when it is sent.
pub(crate) fn is_over(socket: &tcp::Socket<'_>) -> bool {
    match socket.state() {
        // Left at once: the peer has said its last word and was answered in the turn before; one that
        // says it again gets a reset.
        State::TimeWait => true,
        State::Closed => socket.remote_endpoint().is_none(),
        _ => false,
    }
}

fn is_listening(nics: &[Nic], handle: &Handle) -> bool {
    nics[handle.nic].sockets.get::<tcp::Socket<'_>>(handle.socket).is_listening()
}

impl Stack {
    /// How many bytes each stream may have on the way by a device.
    fn share_bytes(&self, nic: usize) -> usize {
        (self.nics[nic].transmit_bytes() / 2 / self.streams.max(1)).max(MIN_SHARE_BYTES)
    }

    fn socket(&mut self, handle: Handle) -> &mut tcp::Socket<'static> {
        self.nics[handle.nic].sockets.get_mut(handle.socket)
    }

    /// Sees that each listener has enough sockets that listen at each device. A limit holds for all
    /// devices together; where it is nearly reached, each may still take one connection.
    pub(crate) fn refill_listeners(&mut self) {
        let Stack { nics, listeners, stats, .. } = self;
        for listener in listeners {
            let idle_at = |nics: &[Nic], listener: &ListenState, at: usize| {
                listener.backlog.iter().filter(|handle| handle.nic == at && is_listening(nics, handle)).count()
            };
            let idle: usize = (0..nics.len()).map(|at| idle_at(nics, listener, at)).sum();
            let busy = listener.backlog.len() - idle + listener.ready.len() + listener.accepted;
            let room = listener.options.limit.saturating_sub(busy);
            for at in 0..nics.len() {
                let mut idle = idle_at(nics, listener, at);
                while idle < *BACKLOG.start() && idle < room {
                    let sends = send_bytes(&listener.options, all_sends(nics), listener.sockets());
                    let nic = &mut nics[at];
                    let window =
                        window_bytes(listener.options.receive_bytes, nic.receive_bytes(), windows(&nic.sockets));
                    let mut socket = new_socket(window, sends);
                    // Cannot fail: the socket is new and the port is not 0.
                    let _ = socket.listen(listener.port);
                    listener.backlog.push(Handle { nic: at, socket: nic.sockets.add(socket) });
                    idle += 1;
                }
                // Over the limit no socket may listen.
                while idle > room {
                    let fits = |handle: &Handle| handle.nic == at && is_listening(nics, handle);
                    let Some(found) = listener.backlog.iter().position(fits) else { break };
                    let handle = listener.backlog.swap_remove(found);
                    nics[at].sockets.remove(handle.socket);
                    idle -= 1;
                }
            }
            if room == 0 {
                stats.refused += 1;
            }
        }
    }

    /// Hands finished handshakes to the tasks that accept.
    pub(crate) fn promote_connections(&mut self) {
        let mut changed = false;
        for listener in &mut self.listeners {
            let mut at = 0;
            while at < listener.backlog.len() {
                let handle = listener.backlog[at];
                let socket = self.nics[handle.nic].sockets.get_mut::<tcp::Socket<'_>>(handle.socket);
                match socket.state() {
                    State::Listen | State::SynReceived => at += 1,
                    State::Closed => {
                        // A handshake that came to nothing.
                        let _ = socket.listen(listener.port);
                        at += 1;
                    }
                    _ => {
                        listener.backlog.swap_remove(at);
                        listener.ready.push_back(handle);
                        self.stats.accepted += 1;
                        changed = true;
                        if let Some(waker) = listener.waker.take() {
                            waker.wake();
                        }
                    }
                }
            }
        }
        if changed {
            self.refill_listeners();
        }
    }

    /// Replaces listening sockets that were made when there were many connections by some with the
    /// windows of now.
    fn renew_listeners(&mut self) {
        let Stack { nics, listeners, .. } = self;
        let mut renewed = false;
        let mut taken: Vec<usize> = nics.iter().map(|nic| windows(&nic.sockets)).collect();
        let mut sends_taken = all_sends(nics);
        for listener in listeners {
            let sockets = listener.sockets();
            listener.backlog.retain(|handle| {
                let nic = &mut nics[handle.nic];
                let whole = nic.receive_bytes();
                let taken = &mut taken[handle.nic];
                let socket = nic.sockets.get::<tcp::Socket<'_>>(handle.socket);
                let window = socket.recv_capacity();
                let fresh = window_bytes(listener.options.receive_bytes, whole, *taken - window);
                let sends = socket.send_capacity();
                let fresh_sends = send_bytes(&listener.options, sends_taken - sends, sockets - 1);
                // Half of it is good enough, so that not each end of a connection costs two
                // sockets.
                let keep = !socket.is_listening() || 2 * window > fresh && 2 * sends > fresh_sends;
                if !keep {
                    *taken -= window;
                    sends_taken -= sends;
                    renewed = true;
                    nic.sockets.remove(handle.socket);
                }
                keep
            });
        }
        if renewed {
            self.refill_listeners();
        }
    }

    /// Reclaims the sockets of connections that have ended.
    pub(crate) fn reap_connections(&mut self, now_ns: u64) {
        if self.closing.is_empty() {
            return;
        }
        let before = self.closing.len();
        let mut at = 0;
        while at < self.closing.len() {
            let Closing { handle, listener, .. } = self.closing[at];
            let nic = &mut self.nics[handle.nic];
            let socket = nic.sockets.get_mut::<tcp::Socket<'_>>(handle.socket);
            self.closing[at].note(socket.send_queue(), now_ns);
            let deadline_ns = self.closing[at].deadline_ns;
            if !is_over(socket) && now_ns < deadline_ns {
                at += 1;
                continue;
            }
            if !matches!(socket.state(), State::Closed | State::TimeWait) {
                socket.abort();
                self.closing[at].deadline_ns = now_ns + LINGER_NS;
                at += 1;
                continue;
            }
            self.closing.swap_remove(at);
            let (window, sends) = (socket.recv_capacity(), socket.send_capacity());
            let sends_taken = all_sends(&self.nics) - sends;
            let nic = &mut self.nics[handle.nic];
            let whole = nic.receive_bytes();
            let taken = windows(&nic.sockets) - window;
            let socket = nic.sockets.get_mut::<tcp::Socket<'_>>(handle.socket);
            let reused = listener.is_some_and(|index| {
                let listener = &mut self.listeners[index];
                listener.accepted -= 1;
                // One that was made when there were many others has too small a window for its
                // successor.
                let fits = window == window_bytes(listener.options.receive_bytes, whole, taken)
                    && 2 * sends > send_bytes(&listener.options, sends_taken, listener.sockets());
                let waiting = listener.backlog.iter().filter(|other| other.nic == handle.nic).count();
                let keep = fits && waiting < *BACKLOG.end() && socket.listen(listener.port).is_ok();
                if keep {
                    listener.backlog.push(handle);
                }
                keep
            });
            if !reused {
                nic.sockets.remove(handle.socket);
            }
        }
        if self.closing.len() < before {
            self.renew_listeners();
        }
    }
}

/// Accepts connections on a port.
pub struct TcpListener {
    net: Net,
    index: usize,
}

impl TcpListener {
    /// # Panics
    /// Port 0, and a port that another listener has: mistakes of the app.
    pub(crate) fn new(net: Net, port: u16, options: TcpOptions) -> TcpListener {
        assert!(port != 0, "a listener needs a port");
        let index = net.with(|stack| {
            assert!(stack.listeners.iter().all(|l| l.port != port), "two listeners on port {port}");
            stack.listeners.push(ListenState {
                port,
                options,
                backlog: Vec::new(),
                ready: VecDeque::new(),
                waker: None,
                accepted: 0,
            });
            stack.refill_listeners();
            stack.listeners.len() - 1
        });
        TcpListener { net, index }
    }

    /// Waits for the next connection.
    pub async fn accept(&mut self) -> TcpStream {
        let handle = poll_fn(|cx| {
            self.net.with(|stack| {
                let listener = &mut stack.listeners[self.index];
                match listener.ready.pop_front() {
                    Some(handle) => {
                        listener.accepted += 1;
                        Poll::Ready(handle)
                    }
                    None => {
                        listener.waker = Some(cx.waker().clone());
                        Poll::Pending
                    }
                }
            })
        })
        .await;
        TcpStream::new(self.net.clone(), handle, Some(self.index))
    }
}

/// A TCP connection. Dropped, it delivers what was written, closes, and gives its socket back.
pub struct TcpStream {
    net: Net,
    handle: Handle,
    listener: Option<usize>,
}

impl TcpStream {
    fn new(net: Net, handle: Handle, listener: Option<usize>) -> TcpStream {
        net.with(|stack| stack.streams += 1);
        TcpStream { net, handle, listener }
    }

    pub(crate) async fn connect(net: Net, to: IpEndpoint, options: TcpOptions) -> Result<TcpStream, TcpError> {
        let now_ns = net.now_ns();
        let handle = net.with(|stack| {
            let at = stack.route(to.addr);
            stack.expect_sending_to(at, to.addr, now_ns);
            let port = stack.ephemeral_port();
            let sends = send_bytes(&options, all_sends(&stack.nics), 0);
            let nic = &mut stack.nics[at];
            let window = window_bytes(options.receive_bytes, nic.receive_bytes(), windows(&nic.sockets));
            let mut socket = new_socket(window, sends);
            socket.connect(nic.interface.context(), to, port).map_err(|_| TcpError::Unreachable)?;
            Ok(Handle { nic: at, socket: nic.sockets.add(socket) })
        })?;
        let stream = TcpStream::new(net, handle, None);
        let answer = poll_fn(|cx| {
            stream.with(|socket| match socket.state() {
                State::SynSent | State::SynReceived => {
                    socket.register_send_waker(cx.waker());
                    Poll::Pending
                }
                State::Closed => Poll::Ready(Err(TcpError::Refused)),
                _ => Poll::Ready(Ok(())),
            })
        });
        let done = stream.net.within(CONNECT_NS, answer).await;
        done.unwrap_or(Err(TcpError::Unreachable)).map(|()| stream)
    }

    fn with<R>(&self, f: impl FnOnce(&mut tcp::Socket<'static>) -> R) -> R {
        self.net.with(|stack| f(stack.socket(self.handle)))
    }

    /// The peer's address and port.
    pub fn peer(&self) -> Option<IpEndpoint> {
        self.with(|socket| socket.remote_endpoint())
    }

    /// The own address and port.
    pub fn local(&self) -> Option<IpEndpoint> {
        self.with(|socket| socket.local_endpoint())
    }

    /// Waits for bytes and hands `take` what is there, without a copy; it says how many it has used
    /// up. `Ok(None)`: the peer has sent its last byte.
    pub async fn read_with<R>(&mut self, mut take: impl FnMut(&mut [u8]) -> (usize, R)) -> Result<Option<R>, TcpError> {
        poll_fn(|cx| {
            self.with(|socket| {
                if socket.can_recv() {
                    return Poll::Ready(socket.recv(&mut take).map(Some).map_err(|_| TcpError::Closed));
                }
                match socket.state() {
                    // It has said that it sends nothing more.
                    State::CloseWait | State::LastAck | State::Closing | State::TimeWait => Poll::Ready(Ok(None)),
                    _ if !socket.may_recv() => Poll::Ready(Err(TcpError::Closed)),
                    _ => {
                        socket.register_recv_waker(cx.waker());
                        Poll::Pending
                    }
                }
            })
        })
        .await
    }

    /// Waits for bytes and copies them; 0: the peer has sent its last byte.
    pub async fn read(&mut self, to: &mut [u8]) -> Result<usize, TcpError> {
        let copied = self
            .read_with(|bytes| {
                let n = bytes.len().min(to.len());
                to[..n].copy_from_slice(&bytes[..n]);
                (n, n)
            })
            .await?;
        Ok(copied.unwrap_or(0))
    }

    /// The socket, and how many bytes may be written now.
    fn with_room<R>(&self, f: impl FnOnce(&mut tcp::Socket<'static>, usize) -> R) -> R {
        self.net.with(|stack| {
            let share = stack.share_bytes(self.handle.nic);
            let socket = stack.socket(self.handle);
            let room = share.saturating_sub(socket.send_queue());
            f(socket, if socket.can_send() { room } else { 0 })
        })
    }

    /// Waits for room and lets `fill` write into it, without a copy; it says how many bytes it has
    /// written.
    pub async fn write_with<R>(&mut self, mut fill: impl FnMut(&mut [u8]) -> (usize, R)) -> Result<R, TcpError> {
        poll_fn(|cx| {
            self.with_room(|socket, room| {
                if !socket.may_send() {
                    return Poll::Ready(Err(TcpError::Closed));
                }
                if room > 0 {
                    let written = socket.send(|to| {
                        let n = to.len().min(room);
                        fill(&mut to[..n])
                    });
                    return Poll::Ready(written.map_err(|_| TcpError::Closed));
                }
                // Woken by each acknowledgement; where the share is used up there is one to come.
                socket.register_send_waker(cx.waker());
                Poll::Pending
            })
        })
        .await
    }

    /// Waits until there are bytes to read or there is room to write, and does what is possible of
    /// both: `take` and `fill` say how many bytes they have used.
    pub async fn exchange(
        &mut self,
        mut take: impl FnMut(&mut [u8]) -> usize,
        mut fill: impl FnMut(&mut [u8]) -> usize,
    ) -> Result<(usize, usize), TcpError> {
        poll_fn(|cx| {
            self.with_room(|socket, room| {
                if !socket.may_send() {
                    return Poll::Ready(Err(TcpError::Closed));
                }
                let counted = |n| (n, n);
                let taken = if socket.can_recv() { socket.recv(|b| counted(take(b))).unwrap_or(0) } else { 0 };
                let mut fill_room = |to: &mut [u8]| {
                    let n = to.len().min(room);
                    counted(fill(&mut to[..n]))
                };
                let filled = if room > 0 { socket.send(&mut fill_room).unwrap_or(0) } else { 0 };
                if taken + filled > 0 {
                    return Poll::Ready(Ok((taken, filled)));
                }
                socket.register_recv_waker(cx.waker());
                socket.register_send_waker(cx.waker());
                Poll::Pending
            })
        })
        .await
    }

    /// Writes all of `bytes`, waiting for room as often as is needed.
    pub async fn write_all(&mut self, mut bytes: &[u8]) -> Result<(), TcpError> {
        while !bytes.is_empty() {
            let written = self
                .write_with(|room| {
                    let n = room.len().min(bytes.len());
                    room[..n].copy_from_slice(&bytes[..n]);
                    (n, n)
                })
                .await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Sends all that was written, then the end; waits until the peer has acknowledged, or is gone.
    pub async fn finish(&mut self) {
        self.with(|socket| socket.close());
        poll_fn(|cx| {
            self.with(|socket| match socket.state() {
                State::FinWait1 | State::Closing | State::LastAck => {
                    socket.register_send_waker(cx.waker());
                    Poll::Pending
                }
                _ => Poll::Ready(()),
            })
        })
        .await
    }

    /// Ends the connection at once, with a reset.
    pub fn abort(&mut self) {
        self.with(|socket| socket.abort());
    }

    /// Whether the peer has sent its last byte, and all of it was read; or the connection is gone.
    pub(crate) fn is_ended(&self) -> bool {
        self.with(|socket| !socket.may_recv() && !socket.can_recv())
    }

    /// Bytes that were written and not yet acknowledged.
    pub fn unacknowledged(&self) -> usize {
        self.with(|socket| socket.send_queue())
    }
}

impl Drop for TcpStream {
    fn drop(&mut self) {
        let now_ns = self.net.now_ns();
        let (handle, listener) = (self.handle, self.listener);
        self.net.with(|stack| {
            stack.streams -= 1;
            let socket = stack.socket(handle);
            socket.close();
            let left = socket.send_queue();
            stack.closing.push(Closing::new(handle, listener, left, now_ns));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::device::NetDevice;
    use smoltcp::wire::Ipv4Address;

    #[test]
    fn the_windows_of_many_connections_stay_within_the_ring() {
        const RING_BYTES: usize = 512 * 1500;
        for wanted in [8192, 16 << 10, 64 << 10, 256 << 10] {
            let mut taken = 0;
            for number in 0..32 {
                let window = window_bytes(wanted, RING_BYTES, taken);
                assert!((MIN_WINDOW_BYTES..=wanted).contains(&window));
                if number == 0 {
                    assert_eq!(window, wanted.min(RING_BYTES * 7 / 32), "a connection that is alone is not held back");
                }
                taken += window;
            }
            assert!(taken <= RING_BYTES, "32 windows of up to {wanted} bytes come to {taken}");
        }
        assert_eq!(window_bytes(256 << 10, usize::MAX, 1 << 30), 256 << 10);
    }

    #[test]
    fn a_socket_whose_reset_could_not_be_sent_waits_for_that_but_not_for_good() {
        let config = Config::parse("ip=10.0.0.10/24").unwrap();
        let mut stack = Stack::new(Vec::from([NetDevice::None]), &config, 0, 1);
        let nic = &mut stack.nics[0];
        let mut socket = new_socket(64, 64);
        socket.connect(nic.interface.context(), (Ipv4Address::new(10, 0, 0, 1), 80), 50_000).unwrap();
        socket.abort();
        let handle = Handle { nic: 0, socket: nic.sockets.add(socket) };
        stack.closing.push(Closing::new(handle, None, 0, 7));
        stack.reap_connections(6 + LINGER_NS);
        assert_eq!(stack.closing.len(), 1);
        stack.reap_connections(7 + LINGER_NS);
        assert!(stack.closing.is_empty());
    }

    #[test]
    fn a_dropped_stream_has_time_as_long_as_its_peer_reads() {
        let handle = Handle { nic: 0, socket: SocketSet::new(Vec::new()).add(new_socket(64, 64)) };
        let mut closing = Closing::new(handle, None, 1000, 7);
        for (left, now_ns, expected) in [
            (1000, 8, 7 + LINGER_NS),
            (999, LINGER_NS, 2 * LINGER_NS),
            (999, 2 * LINGER_NS - 1, 2 * LINGER_NS),
            (0, 2 * LINGER_NS - 1, 3 * LINGER_NS - 1),
            (0, 3 * LINGER_NS - 2, 3 * LINGER_NS - 1),
        ] {
            closing.note(left, now_ns);
            assert_eq!(closing.deadline_ns, expected, "{left} left after {now_ns} ns");
        }
    }

    #[test]
    fn few_connections_send_much_and_as_many_as_may_be_stay_within_what_all_have() {
        for (all, limit) in [(12 << 20, 256), (256 * MIN_SEND_BYTES, 256), (64 << 20, 1024), (1 << 20, 4)] {
            let options = TcpOptions { receive_bytes: 8192, send_bytes: 256 << 10, send_all_bytes: all, limit };
            let (mut taken, mut last) = (0, usize::MAX);
            for sockets in 0..limit {
                let bytes = send_bytes(&options, taken, sockets);
                assert!((MIN_SEND_BYTES..=options.send_bytes).contains(&bytes) && bytes <= last, "{sockets}: {bytes}");
                (taken, last) = (taken + bytes, bytes);
            }
            assert!(taken <= all, "{limit} connections have {taken} of {all}");
        }
        let options =
            TcpOptions { send_bytes: 256 << 10, send_all_bytes: 12 << 20, limit: 256, ..TcpOptions::default() };
        let mut taken = 0;
        for sockets in 0..24 {
            assert_eq!(send_bytes(&options, taken, sockets), 256 << 10, "connection {sockets}");
            taken += 256 << 10;
        }
        // Where an app gives each less than the least, it has that.
        let small = TcpOptions { send_bytes: 1024, ..options };
        assert_eq!(send_bytes(&small, 0, 0), 1024);
    }
}
