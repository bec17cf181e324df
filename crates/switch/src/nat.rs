//! Network address translation between the guests of a network and an uplink that knows one address.
//!
//! # Why
//! The user uplink (passt) serves one guest: one address, one MAC; two guests that use the same port there get each
//! other's resets (docs/decisions/0008-user-uplink.md). This module puts one address in front of many guests.
//!
//! # What it is not
//! No router between networks, no firewall, no IPv6, no application helpers. Fragments are not translated (only the
//! first has ports); they are dropped as `not_transformable`.
//!
//! # How it works
//! Frames go through [`Nat::outbound`] (from the network) and [`Nat::inbound`] (from the uplink); each says what to do
//! with the frame, which was rewritten in place. On the network the router has an address of its own ([`Config::router`]),
//! answers ARP and echo for it, and forwards what is sent to its MAC.
//! - A guest's (protocol, address, port) gets one port of the uplink's address, for all its peers (RFC 4787:
//!   endpoint-independent mapping). Ports are taken from 1024 on; lower ones belong to forwards.
//! - A forward is a rule (protocol, low port → guest address, port). A connection that comes through one is remembered
//!   with its peer, so that the answers leave with the forward's port.
//! - Checksums are updated by difference (RFC 1624), never recomputed, so a frame damaged on the way stays damaged.
//!
//! # Limits
//! [`FLOWS_PER_STATION`] mappings a guest (by MAC, which the port's guard vouches for: a guest cannot spend its
//! neighbours' share by inventing IP addresses), [`NEIGHBOURS`] remembered guests, [`WAITING`] frames that wait for
//! an ARP answer. Beyond them frames are dropped with a reason; an idle mapping goes after its protocol's time.
//!
//! Time comes in as [`Nanos`]; one thread calls.

use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;

use crate::Nanos;
use crate::drop::Reason;
use crate::frame::Mac;

/// Mappings that one guest may hold.
pub const FLOWS_PER_STATION: usize = 4096;
/// Guests whose MAC is remembered.
pub const NEIGHBOURS: usize = 1024;
/// Frames that wait for an ARP answer.
pub const WAITING: usize = 64;
/// How often a guest that does not answer is asked again, and for how long: passt gives a connection up after 10 s and
/// never repeats its first segment, so that segment must not be lost while a guest boots.
const ASK_NS: Nanos = Nanos(500_000_000);
const ASK_FOR_NS: Nanos = Nanos(10 * 1_000_000_000);
/// First uplink port of guests' mappings; lower ones are for forwards.
pub const FIRST_PORT: u16 = 1024;

// Idle times: RFC 5382 REQ-5 for TCP (2 h 4 min established, 4 min otherwise), RFC 4787 REQ-5 for UDP, RFC 5508
// REQ-2 for echo.
const TCP_NS: Nanos = Nanos(7_440 * 1_000_000_000);
const TCP_CLOSING_NS: Nanos = Nanos(240 * 1_000_000_000);
const UDP_NS: Nanos = Nanos(300 * 1_000_000_000);
const ECHO_NS: Nanos = Nanos(60 * 1_000_000_000);
/// How often idle mappings are looked for.
const SWEEP_NS: Nanos = Nanos(10 * 1_000_000_000);

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_ARP: u16 = 0x0806;
const BROADCAST: Mac = [0xff; 6];

/// A transport that is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// TCP (6).
    Tcp,
    /// UDP (17).
    Udp,
    /// ICMP echo (1); the identifier stands for the port.
    Echo,
}

impl Protocol {
    fn of(number: u8) -> Option<Protocol> {
        match number {
            1 => Some(Protocol::Echo),
            6 => Some(Protocol::Tcp),
            17 => Some(Protocol::Udp),
            _ => None,
        }
    }

    fn idle(self) -> Nanos {
        match self {
            Protocol::Tcp => TCP_NS,
            Protocol::Udp => UDP_NS,
            Protocol::Echo => ECHO_NS,
        }
    }
}

/// One rule, uplink → guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Port of the uplink's address, below [`FIRST_PORT`].
    pub port: u16,
    /// The guest.
    pub to: (Ipv4Addr, u16),
}

/// Addresses and rules.
#[derive(Clone, Debug)]
pub struct Config {
    /// The router's MAC, on both sides.
    pub mac: Mac,
    /// The router's address on the network.
    pub router: Ipv4Addr,
    /// Base address of the network.
    pub subnet: Ipv4Addr,
    /// Prefix length of the network.
    pub prefix: u8,
    /// The address that the uplink knows.
    pub outside: Ipv4Addr,
    /// The uplink's own address: where frames are sent to, and as what the host's own connections come.
    pub peer: Ipv4Addr,
    /// Forwards.
    pub forwards: Vec<Forward>,
}

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It was rewritten and goes to the other side.
    Pass,
    /// It was rewritten into an answer and goes back to the side that it came from.
    Reply,
    /// It was not for the router, or it was taken in (an ARP answer, a frame that waits); nothing is sent.
    Taken,
    /// It is lost.
    Drop(Reason),
}

/// A guest's end of a mapping.
type Inside = (Protocol, Ipv4Addr, u16);

#[derive(Debug)]
struct Flow {
    inside: Inside,
    station: Mac,
    last: Nanos,
    idle: Nanos,
}

/// A frame for a guest whose MAC is asked for.
#[derive(Debug)]
struct Waiting {
    guest: Ipv4Addr,
    since: Nanos,
    frame: Vec<u8>,
}

/// The translation table and the router's two faces.
#[derive(Debug)]
pub struct Nat {
    config: Config,
    /// Uplink port → mapping.
    flows: HashMap<(Protocol, u16), Flow>,
    /// Guest's end → uplink port.
    ports: HashMap<Inside, u16>,
    /// Connections that came through a forward: guest's end and peer → (forward's port, last use, idle time).
    forwarded: HashMap<(Inside, Ipv4Addr, u16), (u16, Nanos, Nanos)>,
    per_station: HashMap<Mac, usize>,
    neighbours: HashMap<Ipv4Addr, Mac>,
    /// Order in which neighbours came, for forgetting the oldest.
    neighbour_order: VecDeque<Ipv4Addr>,
    waiting: VecDeque<Waiting>,
    next_ask: Nanos,
    /// Frames of the router's own for the network: ARP questions, and what waited for their answers.
    to_network: VecDeque<Vec<u8>>,
    /// Frames of the router's own for the uplink: ARP questions.
    to_uplink: VecDeque<Vec<u8>>,
    peer_mac: Option<Mac>,
    next_port: u16,
    next_sweep: Nanos,
}

impl Nat {
    /// An empty table.
    pub fn new(config: Config) -> Nat {
        let mut nat = Nat {
            config,
            flows: HashMap::new(),
            ports: HashMap::new(),
            forwarded: HashMap::new(),
            per_station: HashMap::new(),
            neighbours: HashMap::new(),
            neighbour_order: VecDeque::new(),
            waiting: VecDeque::new(),
            next_ask: Nanos(0),
            to_network: VecDeque::new(),
            to_uplink: VecDeque::new(),
            peer_mac: None,
            next_port: FIRST_PORT,
            next_sweep: Nanos(0),
        };
        nat.ask_peer();
        nat
    }

    /// Mappings held now.
    pub fn flows(&self) -> usize {
        self.flows.len() + self.forwarded.len()
    }

    /// A frame of the router's own for the network, if there is one.
    pub fn next_for_network(&mut self) -> Option<Vec<u8>> {
        self.to_network.pop_front()
    }

    /// A frame of the router's own for the uplink, if there is one.
    pub fn next_for_uplink(&mut self) -> Option<Vec<u8>> {
        self.to_uplink.pop_front()
    }

    /// Whether a frame of the router's own waits for the network.
    pub fn has_for_network(&self) -> bool {
        !self.to_network.is_empty()
    }

    /// The uplink is a new one (its process was started anew): connections through the old one are forgotten.
    pub fn uplink_restarted(&mut self) {
        self.flows.clear();
        self.ports.clear();
        self.forwarded.clear();
        self.per_station.clear();
        self.peer_mac = None;
        self.to_uplink.clear();
        self.ask_peer();
    }

    fn ask_peer(&mut self) {
        let question = arp(1, self.config.mac, self.config.outside, [0; 6], self.config.peer, BROADCAST);
        self.to_uplink.push_back(question);
    }

    fn in_subnet(&self, ip: Ipv4Addr) -> bool {
        let mask = u32::MAX.checked_shl(32 - u32::from(self.config.prefix)).unwrap_or(0);
        u32::from(ip) & mask == u32::from(self.config.subnet) & mask
    }

    fn learn(&mut self, ip: Ipv4Addr, mac: Mac) {
        if !self.in_subnet(ip) || ip == self.config.router || mac[0] & 1 == 1 {
            return;
        }
        if self.neighbours.insert(ip, mac).is_none() {
            self.neighbour_order.push_back(ip);
            if self.neighbour_order.len() > NEIGHBOURS
                && let Some(oldest) = self.neighbour_order.pop_front()
            {
                self.neighbours.remove(&oldest);
            }
        }
        if self.waiting.iter().any(|w| w.guest == ip) {
            for mut waiting in std::mem::take(&mut self.waiting) {
                if waiting.guest == ip {
                    waiting.frame[0..6].copy_from_slice(&mac);
                    self.to_network.push_back(waiting.frame);
                } else {
                    self.waiting.push_back(waiting);
                }
            }
        }
    }

    /// A frame from the network.
    pub fn outbound(&mut self, now: Nanos, frame: &mut [u8]) -> Verdict {
        self.sweep(now);
        let Some(ethernet) = Ethernet::of(frame) else { return Verdict::Drop(Reason::Runt) };
        match ethernet.kind {
            ETHERTYPE_ARP => self.arp_from_network(frame),
            ETHERTYPE_IPV4 if ethernet.to == self.config.mac => match self.route_out(now, ethernet.from, frame) {
                Ok(verdict) => verdict,
                Err(reason) => Verdict::Drop(reason),
            },
            // Flooded frames of others, IPv6, broadcasts: not the router's business.
            _ => Verdict::Taken,
        }
    }

    fn arp_from_network(&mut self, frame: &mut [u8]) -> Verdict {
        let Some(message) = Arp::of(frame) else { return Verdict::Taken };
        self.learn(message.sender_ip, message.sender);
        if message.operation != 1 || message.target_ip != self.config.router {
            return Verdict::Taken;
        }
        let answer = arp(2, self.config.mac, self.config.router, message.sender, message.sender_ip, message.sender);
        frame[..answer.len()].copy_from_slice(&answer);
        Verdict::Reply
    }

    fn route_out(&mut self, now: Nanos, from: Mac, frame: &mut [u8]) -> Result<Verdict, Reason> {
        let ip = Ipv4::of(frame)?;
        if !self.in_subnet(ip.from) || ip.from == self.config.router {
            return Err(Reason::BadSource);
        }
        self.learn(ip.from, from);
        if ip.to == self.config.router {
            return Ok(echo_reply(&ip, frame));
        }
        let transport = ip.transport(frame)?;
        let refused = self.in_subnet(ip.to) || ip.to.is_multicast() || ip.to.is_broadcast() || ip.to.is_loopback();
        if refused || ip.to.is_unspecified() {
            return Err(Reason::NoDestination);
        }
        let inside = (transport.protocol, ip.from, transport.source(frame));
        let peer_port = transport.destination(frame);
        let port = match self.forwarded.get_mut(&(inside, ip.to, peer_port)) {
            Some((port, last, idle)) => {
                (*last, *idle) = (now, transport.idle(frame, *idle));
                *port
            }
            // The uplink's own address stands for the host there; only answers go to it.
            None if ip.to == self.config.peer || ip.to == self.config.outside => return Err(Reason::NoDestination),
            None => self.map(now, from, inside, &transport, frame)?,
        };
        let Some(peer_mac) = self.peer_mac else {
            self.ask_peer();
            return Err(Reason::LinkDown);
        };
        ip.live(frame)?;
        ip.rewrite_source(frame, self.config.outside);
        transport.rewrite(frame, transport.source_at(), port, Some((ip.from, self.config.outside)));
        frame[0..6].copy_from_slice(&peer_mac);
        frame[6..12].copy_from_slice(&self.config.mac);
        Ok(Verdict::Pass)
    }

    fn map(&mut self, now: Nanos, station: Mac, inside: Inside, t: &Transport, frame: &[u8]) -> Result<u16, Reason> {
        let protocol = inside.0;
        if let Some(&port) = self.ports.get(&inside) {
            let flow = self.flows.get_mut(&(protocol, port)).expect("ports and flows name each other");
            flow.last = now;
            flow.idle = t.idle(frame, flow.idle);
            return Ok(port);
        }
        if protocol == Protocol::Echo && !t.is_echo_request(frame) {
            return Err(Reason::NoDestination);
        }
        let held = self.per_station.entry(station).or_default();
        if *held >= FLOWS_PER_STATION {
            return Err(Reason::GatewayFull);
        }
        let span = u32::from(u16::MAX - FIRST_PORT) + 1;
        // The guest's own port if it is free, else the next free one: few guests collide.
        let wish = inside.2.max(FIRST_PORT);
        let start = if self.flows.contains_key(&(protocol, wish)) { self.next_port } else { wish };
        let port = (0..span)
            .map(|i| FIRST_PORT + ((u32::from(start - FIRST_PORT) + i) % span) as u16)
            .find(|p| !self.flows.contains_key(&(protocol, *p)))
            .ok_or(Reason::GatewayFull)?;
        *held += 1;
        self.next_port = if port == u16::MAX { FIRST_PORT } else { port + 1 };
        let idle = t.idle(frame, protocol.idle());
        self.flows.insert((protocol, port), Flow { inside, station, last: now, idle });
        self.ports.insert(inside, port);
        Ok(port)
    }

    /// A frame from the uplink.
    pub fn inbound(&mut self, now: Nanos, frame: &mut Vec<u8>) -> Verdict {
        self.sweep(now);
        let Some(ethernet) = Ethernet::of(frame) else { return Verdict::Drop(Reason::Runt) };
        match ethernet.kind {
            ETHERTYPE_ARP => {
                let Some(message) = Arp::of(frame) else { return Verdict::Taken };
                if message.sender_ip == self.config.peer {
                    self.peer_mac = Some(message.sender);
                }
                if message.operation == 1 && message.target_ip == self.config.outside {
                    let c = &self.config;
                    let answer = arp(2, c.mac, c.outside, message.sender, message.sender_ip, message.sender);
                    frame[..answer.len()].copy_from_slice(&answer);
                    return Verdict::Reply;
                }
                Verdict::Taken
            }
            ETHERTYPE_IPV4 => match self.route_in(now, frame) {
                Ok(verdict) => verdict,
                Err(reason) => Verdict::Drop(reason),
            },
            _ => Verdict::Taken,
        }
    }

    fn route_in(&mut self, now: Nanos, frame: &mut Vec<u8>) -> Result<Verdict, Reason> {
        let ip = Ipv4::of(frame)?;
        if ip.to != self.config.outside {
            return Err(Reason::NoDestination);
        }
        let transport = ip.transport(frame)?;
        let port =
            if transport.protocol == Protocol::Echo { transport.source(frame) } else { transport.destination(frame) };
        let (_, guest, guest_port) = if let Some(flow) = self.flows.get_mut(&(transport.protocol, port)) {
            flow.last = now;
            flow.idle = transport.idle(frame, flow.idle);
            flow.inside
        } else {
            let rule = self.config.forwards.iter().find(|f| f.protocol == transport.protocol && f.port == port);
            let (to, to_port) = rule.ok_or(Reason::NoDestination)?.to;
            let inside = (transport.protocol, to, to_port);
            let key = (inside, ip.from, transport.source(frame));
            let before = self.forwarded.get(&key).map_or(transport.protocol.idle(), |(_, _, idle)| *idle);
            if self.forwarded.len() >= usize::from(u16::MAX) && !self.forwarded.contains_key(&key) {
                return Err(Reason::GatewayFull);
            }
            self.forwarded.insert(key, (port, now, transport.idle(frame, before)));
            inside
        };
        ip.live(frame)?;
        ip.rewrite_destination(frame, guest);
        let at = if transport.protocol == Protocol::Echo { transport.source_at() } else { transport.at + 2 };
        transport.rewrite(frame, at, guest_port, Some((self.config.outside, guest)));
        frame[6..12].copy_from_slice(&self.config.mac);
        match self.neighbours.get(&guest) {
            Some(mac) => {
                frame[0..6].copy_from_slice(mac);
                Ok(Verdict::Pass)
            }
            None => {
                if self.waiting.len() >= WAITING {
                    return Err(Reason::GatewayFull);
                }
                self.ask(guest);
                self.next_ask = now.after(ASK_NS);
                self.waiting.push_back(Waiting { guest, since: now, frame: std::mem::take(frame) });
                Ok(Verdict::Taken)
            }
        }
    }

    fn ask(&mut self, guest: Ipv4Addr) {
        let question = arp(1, self.config.mac, self.config.router, [0; 6], guest, BROADCAST);
        self.to_network.push_back(question);
    }

    /// Asks guests that have not answered again; gives the frames that waited too long, of which there are so many, up.
    /// Returns how many that were, and when to be called again, if ever.
    pub fn poll(&mut self, now: Nanos) -> (u64, Option<Nanos>) {
        let before = self.waiting.len();
        self.waiting.retain(|w| now.since(w.since) < ASK_FOR_NS);
        let lost = (before - self.waiting.len()) as u64;
        if self.waiting.is_empty() {
            return (lost, None);
        }
        if now >= self.next_ask {
            self.next_ask = now.after(ASK_NS);
            let mut guests: Vec<_> = self.waiting.iter().map(|w| w.guest).collect();
            guests.sort_unstable();
            guests.dedup();
            guests.into_iter().for_each(|guest| self.ask(guest));
        }
        (lost, Some(self.next_ask))
    }

    fn sweep(&mut self, now: Nanos) {
        if now < self.next_sweep {
            return;
        }
        self.next_sweep = now.after(SWEEP_NS);
        let (ports, per_station) = (&mut self.ports, &mut self.per_station);
        self.flows.retain(|_, flow| {
            let keep = now.since(flow.last) < flow.idle;
            if !keep {
                ports.remove(&flow.inside);
                if let Some(held) = per_station.get_mut(&flow.station) {
                    *held -= 1;
                    if *held == 0 {
                        per_station.remove(&flow.station);
                    }
                }
            }
            keep
        });
        self.forwarded.retain(|_, (_, last, idle)| now.since(*last) < *idle);
    }
}

struct Ethernet {
    to: Mac,
    from: Mac,
    kind: u16,
}

impl Ethernet {
    fn of(frame: &[u8]) -> Option<Ethernet> {
        let (to, rest) = frame.split_first_chunk::<6>()?;
        let (from, rest) = rest.split_first_chunk::<6>()?;
        let (kind, _) = rest.split_first_chunk::<2>()?;
        Some(Ethernet { to: *to, from: *from, kind: u16::from_be_bytes(*kind) })
    }
}

/// RFC 826 for Ethernet and IPv4: 28 bytes behind the Ethernet header.
const ARP_BYTES: usize = 14 + 28;

struct Arp {
    operation: u16,
    sender: Mac,
    sender_ip: Ipv4Addr,
    target_ip: Ipv4Addr,
}

impl Arp {
    fn of(frame: &[u8]) -> Option<Arp> {
        let body: &[u8; 28] = frame.get(14..ARP_BYTES)?.try_into().ok()?;
        if body[..6] != [0, 1, 8, 0, 6, 4] {
            return None;
        }
        let mut sender = [0; 6];
        sender.copy_from_slice(&body[8..14]);
        Some(Arp {
            operation: u16::from_be_bytes([body[6], body[7]]),
            sender,
            sender_ip: Ipv4Addr::new(body[14], body[15], body[16], body[17]),
            target_ip: Ipv4Addr::new(body[24], body[25], body[26], body[27]),
        })
    }
}

fn arp(operation: u8, sender: Mac, sender_ip: Ipv4Addr, target: Mac, target_ip: Ipv4Addr, to: Mac) -> Vec<u8> {
    let mut out = Vec::with_capacity(ARP_BYTES);
    out.extend_from_slice(&to);
    out.extend_from_slice(&sender);
    out.extend_from_slice(&[0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, operation]);
    out.extend_from_slice(&sender);
    out.extend_from_slice(&sender_ip.octets());
    out.extend_from_slice(&target);
    out.extend_from_slice(&target_ip.octets());
    out
}

/// A checked IPv4 header: `end` is within the frame.
struct Ipv4 {
    header_bytes: usize,
    /// End of the packet in the frame; padding may follow.
    end: usize,
    protocol: u8,
    from: Ipv4Addr,
    to: Ipv4Addr,
    fragment: bool,
}

const IP_AT: usize = 14;

impl Ipv4 {
    fn of(frame: &[u8]) -> Result<Ipv4, Reason> {
        let header: &[u8; 20] =
            frame.get(IP_AT..IP_AT + 20).and_then(|h| h.try_into().ok()).ok_or(Reason::NotTransformable)?;
        let header_bytes = usize::from(header[0] & 15) * 4;
        let total = usize::from(u16::from_be_bytes([header[2], header[3]]));
        if header[0] >> 4 != 4 || header_bytes < 20 || total < header_bytes || IP_AT + total > frame.len() {
            return Err(Reason::NotTransformable);
        }
        Ok(Ipv4 {
            header_bytes,
            end: IP_AT + total,
            protocol: header[9],
            from: Ipv4Addr::new(header[12], header[13], header[14], header[15]),
            to: Ipv4Addr::new(header[16], header[17], header[18], header[19]),
            // More fragments, or an offset: RFC 791 §3.1.
            fragment: u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0,
        })
    }

    fn transport(&self, frame: &[u8]) -> Result<Transport, Reason> {
        let protocol = Protocol::of(self.protocol).ok_or(Reason::NotTransformable)?;
        let at = IP_AT + self.header_bytes;
        let least = if protocol == Protocol::Tcp { 20 } else { 8 };
        if self.fragment || at + least > self.end {
            return Err(Reason::NotTransformable);
        }
        // Echo request and reply only: RFC 792.
        if protocol == Protocol::Echo && !matches!(frame[at], 0 | 8) {
            return Err(Reason::NotTransformable);
        }
        Ok(Transport { protocol, at })
    }

    /// One hop less to live.
    fn live(&self, frame: &mut [u8]) -> Result<(), Reason> {
        let ttl = frame[IP_AT + 8];
        if ttl <= 1 {
            return Err(Reason::NoDestination);
        }
        let old = u16::from_be_bytes([ttl, self.protocol]);
        frame[IP_AT + 8] = ttl - 1;
        update(frame, IP_AT + 10, &[old], &[u16::from_be_bytes([ttl - 1, self.protocol])]);
        Ok(())
    }

    fn rewrite_source(&self, frame: &mut [u8], to: Ipv4Addr) {
        frame[IP_AT + 12..IP_AT + 16].copy_from_slice(&to.octets());
        update(frame, IP_AT + 10, &words(self.from), &words(to));
    }

    fn rewrite_destination(&self, frame: &mut [u8], to: Ipv4Addr) {
        frame[IP_AT + 16..IP_AT + 20].copy_from_slice(&to.octets());
        update(frame, IP_AT + 10, &words(self.to), &words(to));
    }
}

struct Transport {
    protocol: Protocol,
    at: usize,
}

impl Transport {
    fn source_at(&self) -> usize {
        if self.protocol == Protocol::Echo { self.at + 4 } else { self.at }
    }

    fn source(&self, frame: &[u8]) -> u16 {
        word(frame, self.source_at())
    }

    fn destination(&self, frame: &[u8]) -> u16 {
        if self.protocol == Protocol::Echo { 0 } else { word(frame, self.at + 2) }
    }

    fn is_echo_request(&self, frame: &[u8]) -> bool {
        frame[self.at] == 8
    }

    /// The idle time after this frame: a TCP connection that is being closed or reset goes soon.
    fn idle(&self, frame: &[u8], before: Nanos) -> Nanos {
        const FIN_OR_RST: u8 = 0x05;
        const SYN: u8 = 0x02;
        match self.protocol {
            Protocol::Tcp if frame[self.at + 13] & FIN_OR_RST != 0 => TCP_CLOSING_NS,
            Protocol::Tcp if frame[self.at + 13] & SYN != 0 => TCP_NS,
            _ => before,
        }
    }

    /// Writes a port (or echo identifier) at `at`; `address` is the change of an address in the pseudo-header.
    fn rewrite(&self, frame: &mut [u8], at: usize, port: u16, address: Option<(Ipv4Addr, Ipv4Addr)>) {
        let old = word(frame, at);
        frame[at..at + 2].copy_from_slice(&port.to_be_bytes());
        let sum_at = match self.protocol {
            Protocol::Tcp => self.at + 16,
            Protocol::Udp => self.at + 6,
            Protocol::Echo => self.at + 2,
        };
        // A UDP sum of zero means that there is none: RFC 768.
        if self.protocol == Protocol::Udp && word(frame, sum_at) == 0 {
            return;
        }
        update(frame, sum_at, &[old], &[port]);
        if let (Some((from, to)), false) = (address, self.protocol == Protocol::Echo) {
            update(frame, sum_at, &words(from), &words(to));
        }
        if self.protocol == Protocol::Udp && word(frame, sum_at) == 0 {
            frame[sum_at..sum_at + 2].copy_from_slice(&[0xff, 0xff]);
        }
    }
}

/// Turns an echo request to the router itself into its answer; anything else for the router's address is not served.
fn echo_reply(ip: &Ipv4, frame: &mut [u8]) -> Verdict {
    match ip.transport(frame) {
        Ok(t) if t.protocol == Protocol::Echo && t.is_echo_request(frame) => {
            let (to, from) = frame.split_at_mut(6);
            to.swap_with_slice(&mut from[..6]);
            let (from, to) = frame[IP_AT + 12..IP_AT + 20].split_at_mut(4);
            from.swap_with_slice(to);
            frame[t.at] = 0;
            update(frame, t.at + 2, &[0x0800], &[0]);
            Verdict::Reply
        }
        Ok(_) => Verdict::Drop(Reason::NoDestination),
        Err(reason) => Verdict::Drop(reason),
    }
}

fn word(frame: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([frame[at], frame[at + 1]])
}

fn words(ip: Ipv4Addr) -> [u16; 2] {
    let [a, b, c, d] = ip.octets();
    [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])]
}

/// RFC 1624 equation 3: HC' = ~(~HC + ~m + m').
fn update(frame: &mut [u8], at: usize, old: &[u16], new: &[u16]) {
    let mut sum = u32::from(!word(frame, at));
    sum += old.iter().map(|w| u32::from(!w)).sum::<u32>() + new.iter().map(|w| u32::from(*w)).sum::<u32>();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    frame[at..at + 2].copy_from_slice(&(!(sum as u16)).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTER: Mac = [2, 0, 0, 0, 0, 0xfe];
    const GUEST: Mac = [2, 0, 0, 0, 0, 1];
    const OTHER: Mac = [2, 0, 0, 0, 0, 2];
    const PEER: Mac = [2, 0, 0, 0, 0, 0xaa];

    fn ip(text: &str) -> Ipv4Addr {
        text.parse().unwrap()
    }

    fn nat() -> Nat {
        let mut nat = Nat::new(Config {
            mac: ROUTER,
            router: ip("10.87.0.2"),
            subnet: ip("10.87.0.0"),
            prefix: 24,
            outside: ip("192.0.0.2"),
            peer: ip("192.0.0.1"),
            forwards: vec![Forward { protocol: Protocol::Tcp, port: 1, to: (ip("10.87.0.9"), 80) }],
        });
        let question = nat.next_for_uplink().unwrap();
        assert_eq!(Arp::of(&question).unwrap().target_ip, ip("192.0.0.1"));
        let mut answer = arp(2, PEER, ip("192.0.0.1"), ROUTER, ip("192.0.0.2"), ROUTER);
        assert_eq!(nat.inbound(Nanos(0), &mut answer), Verdict::Taken);
        nat
    }

    fn sum(bytes: impl IntoIterator<Item = u8>) -> u16 {
        let bytes: Vec<u8> = bytes.into_iter().collect();
        let mut sum: u32 =
            bytes.chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], *c.get(1).unwrap_or(&0)]))).sum();
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    /// A frame with right sums.
    fn packet(to: Mac, from: Mac, protocol: Protocol, src: (&str, u16), dst: (&str, u16), flags: u8) -> Vec<u8> {
        let mut body = match protocol {
            Protocol::Tcp => {
                let mut b = vec![0; 20];
                (b[12], b[13]) = (0x50, flags);
                b
            }
            Protocol::Udp => vec![0, 0, 0, 0, 0, 13, 0, 0],
            Protocol::Echo => vec![8, 0, 0, 0, 0, 0, 0, 1],
        };
        if protocol == Protocol::Echo {
            body[4..6].copy_from_slice(&src.1.to_be_bytes());
        } else {
            body[0..2].copy_from_slice(&src.1.to_be_bytes());
            body[2..4].copy_from_slice(&dst.1.to_be_bytes());
        }
        body.extend_from_slice(b"hello");
        let (number, at) = match protocol {
            Protocol::Tcp => (6, 16),
            Protocol::Udp => (17, 6),
            Protocol::Echo => (1, 2),
        };
        let total = (20 + body.len()) as u16;
        let mut header = vec![0x45, 0, (total >> 8) as u8, total as u8, 0, 1, 0, 0, 64, number, 0, 0];
        header.extend_from_slice(&ip(src.0).octets());
        header.extend_from_slice(&ip(dst.0).octets());
        let s = !sum(header.iter().copied());
        header[10..12].copy_from_slice(&s.to_be_bytes());
        let pseudo = [0, number, 0, body.len() as u8];
        let pseudo = header[12..20].iter().copied().chain(pseudo).filter(|_| protocol != Protocol::Echo);
        let s = !sum(pseudo.chain(body.iter().copied()));
        body[at..at + 2].copy_from_slice(&s.to_be_bytes());
        let mut out = Vec::new();
        out.extend_from_slice(&to);
        out.extend_from_slice(&from);
        out.extend_from_slice(&[8, 0]);
        out.extend(header);
        out.extend(body);
        out
    }

    fn sums_are_right(frame: &[u8]) {
        let packet = Ipv4::of(frame).unwrap();
        assert_eq!(sum(frame[14..34].iter().copied()), 0xffff, "IP header");
        let body = &frame[34..packet.end];
        let pseudo = [0, packet.protocol, 0, body.len() as u8];
        let pseudo = frame[26..34].iter().copied().chain(pseudo).filter(|_| packet.protocol != 1);
        assert_eq!(sum(pseudo.chain(body.iter().copied())), 0xffff, "transport");
    }

    fn ends(frame: &[u8]) -> ((Ipv4Addr, u16), (Ipv4Addr, u16)) {
        let packet = Ipv4::of(frame).unwrap();
        let t = packet.transport(frame).unwrap();
        ((packet.from, t.source(frame)), (packet.to, t.destination(frame)))
    }

    #[test]
    fn two_guests_with_the_same_port_get_different_ones_and_their_own_answers() {
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            let mut nat = nat();
            let mut seen = Vec::new();
            for (mac, guest) in [(GUEST, "10.87.0.9"), (OTHER, "10.87.0.10")] {
                let mut frame = packet(ROUTER, mac, protocol, (guest, 5001), ("198.51.100.7", 53), 2);
                assert_eq!(nat.outbound(Nanos(0), &mut frame), Verdict::Pass, "{protocol:?}");
                sums_are_right(&frame);
                let ((src, port), (dst, _)) = ends(&frame);
                assert_eq!((src, dst), (ip("192.0.0.2"), ip("198.51.100.7")));
                assert_eq!(frame[0..12], [PEER, ROUTER].concat()[..]);
                seen.push((mac, guest, port));
            }
            assert_ne!(seen[0].2, seen[1].2);
            for (mac, guest, port) in seen {
                let from = if protocol == Protocol::Echo { port } else { 53 };
                let mut frame = packet(ROUTER, PEER, protocol, ("198.51.100.7", from), ("192.0.0.2", port), 0x12);
                assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Pass);
                sums_are_right(&frame);
                assert_eq!(frame[0..12], [mac, ROUTER].concat()[..]);
                let ((_, echo), (dst, to)) = ends(&frame);
                assert_eq!(dst, ip(guest));
                assert_eq!(if protocol == Protocol::Echo { echo } else { to }, 5001);
            }
        }
    }

    #[test]
    fn a_forward_asks_for_the_guest_then_delivers_and_its_answers_keep_its_port() {
        let mut nat = nat();
        let syn = packet(ROUTER, PEER, Protocol::Tcp, ("192.0.0.1", 40000), ("192.0.0.2", 1), 2);
        assert_eq!(nat.inbound(Nanos(0), &mut syn.clone()), Verdict::Taken);
        let question = nat.next_for_network().unwrap();
        assert_eq!(
            (question[0..6].to_vec(), Arp::of(&question).unwrap().target_ip),
            (BROADCAST.to_vec(), ip("10.87.0.9"))
        );
        let mut answer = arp(2, GUEST, ip("10.87.0.9"), ROUTER, ip("10.87.0.2"), ROUTER);
        assert_eq!(nat.outbound(Nanos(0), &mut answer), Verdict::Taken);
        let delivered = nat.next_for_network().unwrap();
        sums_are_right(&delivered);
        assert_eq!(ends(&delivered), ((ip("192.0.0.1"), 40000), (ip("10.87.0.9"), 80)));
        assert_eq!(delivered[0..6], GUEST);
        let mut reply = packet(ROUTER, GUEST, Protocol::Tcp, ("10.87.0.9", 80), ("192.0.0.1", 40000), 0x12);
        assert_eq!(nat.outbound(Nanos(0), &mut reply), Verdict::Pass);
        sums_are_right(&reply);
        assert_eq!(ends(&reply), ((ip("192.0.0.2"), 1), (ip("192.0.0.1"), 40000)));
        // Nobody starts a connection to the host through that address.
        let mut other = packet(ROUTER, GUEST, Protocol::Tcp, ("10.87.0.9", 81), ("192.0.0.1", 22), 2);
        assert_eq!(nat.outbound(Nanos(0), &mut other), Verdict::Drop(Reason::NoDestination));
    }

    #[test]
    fn a_guest_that_boots_is_asked_until_the_uplink_would_give_up() {
        let mut nat = nat();
        let mut syn = packet(ROUTER, PEER, Protocol::Tcp, ("192.0.0.1", 40000), ("192.0.0.2", 1), 2);
        assert_eq!(nat.inbound(Nanos(0), &mut syn), Verdict::Taken);
        let (mut now, mut asked) = (Nanos(0), 0);
        let lost = loop {
            asked += u64::from(nat.next_for_network().is_some());
            match nat.poll(now) {
                (lost, None) => break lost,
                (0, Some(next)) => now = next,
                (lost, Some(_)) => panic!("{lost} lost early"),
            }
        };
        assert_eq!((asked, lost, now), (20, 1, ASK_FOR_NS));
    }

    #[test]
    fn the_router_answers_arp_and_echo_for_itself_only() {
        let mut nat = nat();
        let mut question = arp(1, GUEST, ip("10.87.0.9"), [0; 6], ip("10.87.0.2"), BROADCAST);
        assert_eq!(nat.outbound(Nanos(0), &mut question), Verdict::Reply);
        let answer = Arp::of(&question).unwrap();
        assert_eq!((answer.operation, answer.sender, answer.sender_ip), (2, ROUTER, ip("10.87.0.2")));
        let mut other = arp(1, GUEST, ip("10.87.0.9"), [0; 6], ip("10.87.0.7"), BROADCAST);
        assert_eq!(nat.outbound(Nanos(0), &mut other), Verdict::Taken);
        let mut ping = packet(ROUTER, GUEST, Protocol::Echo, ("10.87.0.9", 7), ("10.87.0.2", 0), 0);
        assert_eq!(nat.outbound(Nanos(0), &mut ping), Verdict::Reply);
        sums_are_right(&ping);
        assert_eq!(ping[0..12], [GUEST, ROUTER].concat()[..]);
    }

    #[test]
    fn what_cannot_or_must_not_be_translated_is_dropped_with_a_reason() {
        let mut nat = nat();
        let good = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 5), ("198.51.100.7", 53), 0);
        type Change = dyn Fn(&mut Vec<u8>);
        let cases: [(&Change, Reason); 7] = [
            (&|f| f.truncate(13), Reason::Runt),
            (&|f| f.truncate(40), Reason::NotTransformable),
            (&|f| f[14] = 0x4f, Reason::NotTransformable),
            (&|f| f[20] = 0x20, Reason::NotTransformable),
            (&|f| f[23] = 47, Reason::NotTransformable),
            (&|f| f[26] = 11, Reason::BadSource),
            (&|f| f[22] = 1, Reason::NoDestination),
        ];
        for (i, (spoil, reason)) in cases.iter().enumerate() {
            let mut frame = good.clone();
            spoil(&mut frame);
            assert_eq!(nat.outbound(Nanos(0), &mut frame), Verdict::Drop(*reason), "case {i}");
        }
        for to in ["127.0.0.1", "10.87.0.50", "224.0.0.1", "255.255.255.255", "0.0.0.0"] {
            let mut frame = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 5), (to, 53), 0);
            assert_eq!(nat.outbound(Nanos(0), &mut frame), Verdict::Drop(Reason::NoDestination), "{to}");
        }
        let mut frame = packet(ROUTER, PEER, Protocol::Udp, ("198.51.100.7", 53), ("192.0.0.2", 3000), 0);
        assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Drop(Reason::NoDestination));
    }

    #[test]
    fn no_truncation_panics() {
        let mut nat = nat();
        for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Echo] {
            let frame = packet(ROUTER, GUEST, protocol, ("10.87.0.9", 5), ("198.51.100.7", 53), 0);
            for n in 0..=frame.len() {
                nat.outbound(Nanos(0), &mut frame[..n].to_vec());
                nat.inbound(Nanos(0), &mut frame[..n].to_vec());
            }
        }
    }

    #[test]
    fn a_guest_that_opens_flows_without_end_spends_only_its_own_share_until_they_are_idle() {
        let mut nat = nat();
        let mut refused = 0;
        for n in 0..(FLOWS_PER_STATION + 100) {
            let from = format!("10.87.0.{}", 20 + n % 200);
            let mut frame =
                packet(ROUTER, GUEST, Protocol::Udp, (&from, (n / 200 + 2000) as u16), ("198.51.100.7", 53), 0);
            refused += usize::from(nat.outbound(Nanos(0), &mut frame) == Verdict::Drop(Reason::GatewayFull));
        }
        assert_eq!(refused, 100);
        let mut other = packet(ROUTER, OTHER, Protocol::Udp, ("10.87.0.10", 5), ("198.51.100.7", 53), 0);
        assert_eq!(nat.outbound(Nanos(0), &mut other), Verdict::Pass);
        let later = UDP_NS.after(Nanos::SECOND);
        let mut frame = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 9), ("198.51.100.7", 53), 0);
        assert_eq!(nat.outbound(later, &mut frame), Verdict::Pass);
        assert_eq!(nat.flows(), 1, "idle mappings are gone");
    }

    #[test]
    fn a_closed_connection_goes_before_an_open_one() {
        let mut nat = nat();
        for (port, flags) in [(1, 2), (2, 2), (2, 0x11)] {
            let mut frame = packet(ROUTER, GUEST, Protocol::Tcp, ("10.87.0.9", port), ("198.51.100.7", 80), flags);
            assert_eq!(nat.outbound(Nanos(0), &mut frame), Verdict::Pass);
        }
        assert_eq!(nat.flows(), 2);
        nat.sweep(TCP_CLOSING_NS.after(Nanos::SECOND));
        assert_eq!(nat.flows(), 1);
    }
}
