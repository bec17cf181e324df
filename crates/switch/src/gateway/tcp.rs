//! DNS over TCP (RFC 7766), on smoltcp's TCP.
//!
//! smoltcp's interface runs at the IP level here. It is given the TCP packets that are addressed to
//! the gateway. What it sends goes to the MAC address that its peer's packets come from. A socket
//! listens only while one admitted SYN is handed to it. So the limits below hold for any input from
//! a guest:
//!
//! * [`MAX_STREAMS`] connections, [`STREAMS_PER_SOURCE`] of one source and no more than are left
//!   for the others; more SYNs are not answered, and clients repeat them;
//! * one query at a time per connection, of at most [`MAX_QUERY_BYTES`];
//! * a connection on which nothing happens for [`IDLE_SPAN`] is reset.

use crate::Nanos;
use crate::frame::Mac;
use crate::limit::ChargedTo;
use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::tcp;
use smoltcp::time::{Duration, Instant};
use smoltcp::wire::{HardwareAddress, IpCidr, Ipv4Packet, Ipv6Packet, TcpPacket};
use std::net::IpAddr;

/// Most connections at a time.
pub(super) const MAX_STREAMS: usize = 16;
/// Most connections of one source.
pub(super) const STREAMS_PER_SOURCE: usize = 4;
/// How long a connection may be silent.
pub(super) const IDLE_SPAN: Nanos = Nanos::SECOND.times(10);
/// Longest query that is read.
pub(super) const MAX_QUERY_BYTES: usize = 4096;
/// Bytes of a DNS header (RFC 1035 §4.1.1): what is shorter is no query, and who sends it no
/// client.
const MIN_QUERY_BYTES: usize = 12;
const RECEIVE_BYTES: usize = 2048;
const SEND_BYTES: usize = 8192;
/// Packets that one poll of the stack may put out.
const MAX_OUTPUT: usize = 256;

/// A connection; a later one in the same place has another generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Stream {
    index: usize,
    generation: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Peer {
    mac: Mac,
    address: IpAddr,
    port: u16,
    source: ChargedTo,
}

#[derive(Debug)]
struct Connection {
    socket: SocketHandle,
    generation: u64,
    peer: Option<Peer>,
    inbox: Vec<u8>,
    outbox: Vec<u8>,
    /// A query was handed out and its answer has not come.
    busy: bool,
    last: Nanos,
}

/// What a TCP packet led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// It was given to the stack.
    Yes,
    /// It belongs to no connection.
    Stray,
    /// It would open one connection too many.
    Full,
}

pub(super) struct Server {
    interface: Interface,
    wire: Wire,
    sockets: SocketSet<'static>,
    connections: Vec<Connection>,
    generation: u64,
    mac: Mac,
    frames: Vec<Vec<u8>>,
    /// A caller stopped serving although there may be more queries.
    pub(super) unserved: bool,
}

fn instant(now: Nanos) -> Instant {
    Instant::from_micros((now.0 / 1000) as i64)
}

impl Server {
    /// `addresses`: the gateway's, at most one of each family, with the lengths of their prefixes.
    pub(super) fn new(mac: Mac, addresses: &[(IpAddr, u8)], mtu: u16, seed: u64, now: Nanos) -> Server {
        let mut wire = Wire { input: None, output: Vec::new(), mtu: usize::from(mtu) };
        let mut config = Config::new(HardwareAddress::Ip);
        config.random_seed = seed;
        let mut interface = Interface::new(config, &mut wire, instant(now));
        interface.update_ip_addrs(|list| {
            for (address, prefix) in addresses {
                // The list is empty and holds two.
                let _ = list.push(IpCidr::new((*address).into(), *prefix));
            }
        });
        let mut sockets = SocketSet::new(Vec::with_capacity(MAX_STREAMS));
        let connections = (0..MAX_STREAMS).map(|_| {
            let buffer = |bytes| tcp::SocketBuffer::new(vec![0; bytes]);
            let mut socket = tcp::Socket::new(buffer(RECEIVE_BYTES), buffer(SEND_BYTES));
            socket.set_timeout(Some(Duration::from_micros(IDLE_SPAN.0 / 1000)));
            socket.set_nagle_enabled(false);
            Connection {
                socket: sockets.add(socket),
                generation: 0,
                peer: None,
                inbox: Vec::new(),
                outbox: Vec::new(),
                busy: false,
                last: now,
            }
        });
        let connections = connections.collect();
        Server { interface, wire, sockets, connections, generation: 0, mac, frames: Vec::new(), unserved: false }
    }

    /// Gives an IP packet with TCP, whose checksum is known to be right, to the stack; `port` is
    /// the one that is served.
    pub(super) fn input(&mut self, now: Nanos, packet: &[u8], mac: Mac, source: ChargedTo, port: u16) -> Taken {
        let Some((address, _, segment)) = ends(packet) else { return Taken::Stray };
        if segment.dst_port() != port || segment.src_port() == 0 {
            return Taken::Stray;
        }
        let peer = Peer { mac, address, port: segment.src_port(), source };
        let known = self.connections.iter().any(|c| c.peer == Some(peer));
        if !known {
            if !segment.syn() || segment.ack() || segment.rst() || segment.fin() {
                return Taken::Stray;
            }
            let held = self.connections.iter().filter(|c| c.peer.is_some_and(|p| p.source == source)).count();
            let same = |p: Peer| (p.address, p.port) == (address, peer.port);
            let clash = self.connections.iter().any(|c| c.peer.is_some_and(same));
            let free = self.connections.iter().position(|c| c.peer.is_none());
            // No more than are left either, so that a few sources cannot have all of them.
            let left = self.connections.iter().filter(|c| c.peer.is_none()).count();
            let is_over = held >= STREAMS_PER_SOURCE.min(left);
            let (Some(free), false) = (free, clash || is_over) else { return Taken::Full };
            self.generation += 1;
            let connection = &mut self.connections[free];
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(connection.socket);
            if socket.listen(port).is_err() {
                return Taken::Full;
            }
            connection.generation = self.generation;
            connection.peer = Some(peer);
            connection.last = now;
        }
        self.wire.input = Some(packet.to_vec());
        self.poll(now);
        self.wire.input = None;
        Taken::Yes
    }

    fn poll(&mut self, now: Nanos) {
        self.interface.poll(instant(now), &mut self.wire, &mut self.sockets);
    }

    /// Moves bytes between the sockets and their boxes, ends what is over, and returns the queries
    /// that are whole.
    pub(super) fn serve(&mut self, now: Nanos) -> Vec<(Stream, ChargedTo, Vec<u8>)> {
        let mut queries = Vec::new();
        for (index, connection) in self.connections.iter_mut().enumerate() {
            let Some(peer) = connection.peer else { continue };
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(connection.socket);
            while socket.can_recv() && connection.inbox.len() < MAX_QUERY_BYTES + 2 {
                let room = MAX_QUERY_BYTES + 2 - connection.inbox.len();
                let taken = socket.recv(|bytes| {
                    let n = bytes.len().min(room);
                    connection.inbox.extend_from_slice(&bytes[..n]);
                    (n, n)
                });
                if taken.is_ok_and(|n| n > 0) {
                    connection.last = now;
                }
            }
            if !connection.outbox.is_empty() {
                let sent = socket.send_slice(&connection.outbox).unwrap_or(0);
                connection.outbox.drain(..sent);
                if sent > 0 {
                    connection.last = now;
                }
            }
            if !connection.busy
                && connection.outbox.is_empty()
                && let [high, low, ..] = connection.inbox[..]
            {
                let length = usize::from(u16::from_be_bytes([high, low]));
                if !(MIN_QUERY_BYTES..=MAX_QUERY_BYTES).contains(&length) {
                    socket.abort();
                } else if connection.inbox.len() >= 2 + length {
                    let query = connection.inbox[2..2 + length].to_vec();
                    connection.inbox.drain(..2 + length);
                    connection.busy = true;
                    let stream = Stream { index, generation: connection.generation };
                    queries.push((stream, peer.source, query));
                }
            }
            // The client has said its last word, and it has been answered.
            if socket.state() == tcp::State::CloseWait && !connection.busy && connection.outbox.is_empty() {
                socket.close();
            }
            if now.since(connection.last) >= IDLE_SPAN {
                socket.abort();
            }
        }
        // What was closed, reset or answered above goes out now.
        self.poll(now);
        self.address_output();
        for connection in &mut self.connections {
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(connection.socket);
            // A reset during the handshake puts smoltcp's socket back to listening.
            if socket.is_listening() {
                socket.close();
            }
            if !socket.is_open() && connection.peer.take().is_some() {
                (connection.inbox, connection.outbox, connection.busy) = (Vec::new(), Vec::new(), false);
            }
        }
        queries
    }

    /// Answers the query that `stream` waits for. Then [`Server::serve`] sends it.
    pub(super) fn answer(&mut self, stream: Stream, bytes: &[u8]) {
        let connection = &mut self.connections[stream.index];
        let alive = connection.generation == stream.generation && connection.peer.is_some() && connection.busy;
        let Ok(length) = u16::try_from(bytes.len()) else { return };
        if alive {
            connection.outbox.extend_from_slice(&length.to_be_bytes());
            connection.outbox.extend_from_slice(bytes);
            connection.busy = false;
        }
    }

    /// Ends the wait of `stream` without an answer.
    pub(super) fn give_up(&mut self, stream: Stream) {
        let connection = &mut self.connections[stream.index];
        if connection.generation == stream.generation {
            connection.busy = false;
        }
    }

    /// Puts frames around the packets of the stack, while the connections that they belong to are
    /// known.
    fn address_output(&mut self) {
        for packet in std::mem::take(&mut self.wire.output) {
            let Some((_, address, segment)) = ends(&packet) else { continue };
            let to = (address, segment.dst_port());
            let mut peers = self.connections.iter().filter_map(|c| c.peer);
            if let Some(peer) = peers.find(|p| (p.address, p.port) == to) {
                self.frames.push(super::packet::around(self.mac, peer.mac, &packet));
            }
        }
    }

    /// Frames to send.
    pub(super) fn output(&mut self) -> Vec<Vec<u8>> {
        std::mem::take(&mut self.frames)
    }

    /// When [`Server::poll`] and [`Server::serve`] are to be called although nothing came.
    pub(super) fn deadline(&mut self, now: Nanos) -> Option<Nanos> {
        let live = self.connections.iter().filter(|c| c.peer.is_some());
        let idle = live.map(|c| c.last.after(IDLE_SPAN)).min()?;
        if self.unserved {
            return Some(now);
        }
        let stack = self.interface.poll_at(instant(now), &self.sockets);
        let stack = stack.map(|at| Nanos(at.total_micros().max(0) as u64 * 1000));
        Some(stack.map_or(idle, |at| at.min(idle)))
    }
}

/// The source, the destination and the segment of an IP packet with TCP behind its header, of
/// either family.
fn ends(packet: &[u8]) -> Option<(IpAddr, IpAddr, TcpPacket<&[u8]>)> {
    let (source, destination, at): (IpAddr, IpAddr, usize) = match packet.first()? >> 4 {
        4 => {
            let view = Ipv4Packet::new_checked(packet).ok()?;
            (view.src_addr().into(), view.dst_addr().into(), view.header_len().into())
        }
        6 => {
            let view = Ipv6Packet::new_checked(packet).ok()?;
            (view.src_addr().into(), view.dst_addr().into(), view.header_len())
        }
        _ => return None,
    };
    Some((source, destination, TcpPacket::new_checked(packet.get(at..)?).ok()?))
}

/// The stack's device: one packet in, some out.
struct Wire {
    input: Option<Vec<u8>>,
    output: Vec<Vec<u8>>,
    mtu: usize,
}

struct Received(Vec<u8>);
struct Sending<'a>(&'a mut Vec<Vec<u8>>);

impl RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

impl TxToken for Sending<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, f: F) -> R {
        let mut packet = vec![0; len];
        let result = f(&mut packet);
        self.0.push(packet);
        result
    }
}

impl Device for Wire {
    type RxToken<'a> = Received;
    type TxToken<'a> = Sending<'a>;

    fn receive(&mut self, _: Instant) -> Option<(Received, Sending<'_>)> {
        self.input.take().map(|packet| (Received(packet), Sending(&mut self.output)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Sending<'_>> {
        (self.output.len() < MAX_OUTPUT).then_some(Sending(&mut self.output))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut caps = DeviceCapabilities::default();
        caps.medium = Medium::Ip;
        caps.max_transmission_unit = self.mtu;
        // Sums were looked at before, where they have to be: a frame of this machine may come with
        // half of one.
        caps.checksum.tcp = Checksum::Tx;
        caps
    }
}
