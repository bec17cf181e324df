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
//! - A mapping belongs to the MAC that made it: two guests that claim one address do not meet, and answers go to the
//!   MAC that asked, whatever ARP says meanwhile.
//! - A forward is a rule (protocol, low port → guest address, port). A connection that comes through one is remembered
//!   with its peer, so that the answers leave with the forward's port. Only the guests that forwards name are looked
//!   for by ARP; who says that such an address has moved is believed once its holder does not answer for it.
//! - The uplink sends the first segment of a connection once and never again (passt of 2023), so it is kept and
//!   repeated until the guest answers: one that boots answers ARP before anything listens to it.
//! - What is for a guest that is known to be away ([`Nat::set_away`]) is refused: a TCP segment is answered with a
//!   reset, the rest is dropped. A guest that merely does not answer may be booting, and is waited for.
//! - Checksums are updated by difference (RFC 1624), never recomputed, so a frame damaged on the way stays damaged.
//!
//! # Limits
//! [`FLOWS_PER_SOURCE`] mappings a port of the switch (a guest cannot spend its neighbours' share by inventing
//! addresses); at that limit its own oldest half-open or closing connection, or silent datagram flow, goes first.
//! [`HELD`] frames of at most [`HELD_BYTES`] wait for a guest, [`HELD_DATAGRAMS`] datagrams among them for each.
//! Beyond them frames are dropped with a reason; an idle mapping goes after its time.
//!
//! Time comes in as [`Nanos`]; one thread calls.

use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;

use crate::Nanos;
use crate::checksum::{add, sum};
use crate::drop::Reason;
use crate::frame::Mac;
use crate::wait::Token;

/// Mappings that one port of the switch may hold.
pub const FLOWS_PER_SOURCE: usize = 4096;
/// Frames that are kept for guests.
pub const HELD: usize = 64;
/// Longest frame that is kept.
pub const HELD_BYTES: usize = 2048;
/// Datagrams that are kept for one guest.
pub const HELD_DATAGRAMS: usize = 16;
/// How often a guest is asked for, and a first segment repeated; and for how long.
const REPEAT_NS: Nanos = Nanos(500_000_000);
const HOLD_NS: Nanos = Nanos(20 * 1_000_000_000);
/// How long the holder of an address has to answer for it when somebody else claims it; it is asked three times.
const RIVAL_NS: Nanos = Nanos(1_500_000_000);
/// The uplink's own address is asked for at most this often.
const ASK_PEER_NS: Nanos = Nanos(1_000_000_000);
/// First uplink port of guests' mappings; lower ones are for forwards.
pub const FIRST_PORT: u16 = 1024;

// Idle times: RFC 5382 REQ-5 for TCP (2 h 4 min established, 4 min half-open and half-closed), RFC 4787 REQ-5 for
// UDP, RFC 5508 REQ-2 for echo. Both ends have said that they are done: twice Linux' segment lifetime (60 s). A reset
// ends a connection at once; its port rests a little.
const TCP_NS: Nanos = Nanos(7_440 * 1_000_000_000);
const TCP_HALF_NS: Nanos = Nanos(240 * 1_000_000_000);
const TCP_CLOSED_NS: Nanos = Nanos(60 * 1_000_000_000);
const TCP_RESET_NS: Nanos = Nanos(10 * 1_000_000_000);
const UDP_NS: Nanos = Nanos(300 * 1_000_000_000);
const ECHO_NS: Nanos = Nanos(60 * 1_000_000_000);
/// A datagram flow that was silent for so long may give way to a new one of its source.
const SILENT_NS: Nanos = Nanos(30 * 1_000_000_000);
/// Candidates that are looked at for that, per new flow.
const TRIES: usize = 16;
/// How often idle mappings are looked for.
const SWEEP_NS: Nanos = Nanos(10 * 1_000_000_000);

const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_ARP: u16 = 0x0806;
const BROADCAST: Mac = [0xff; 6];
// TCP flags: RFC 9293 §3.1.
const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
const ACK: u8 = 0x10;

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

/// Who a mapping is charged to: a port of the switch, or a MAC address where the port is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Source {
    Port(Token),
    Mac(Mac),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Out,
    In,
}

/// How far a connection has come, as its segments say, and how long it may be idle.
#[derive(Clone, Copy, Debug)]
struct State {
    protocol: Protocol,
    last: Nanos,
    /// Something came the other way than the first frame.
    answered: bool,
    first: Way,
    /// FIN seen: out, in.
    done: [bool; 2],
    reset: bool,
}

impl State {
    fn new(now: Nanos, first: Way, t: &Transport, frame: &[u8]) -> State {
        let mut state =
            State { protocol: t.protocol, last: now, answered: false, first, done: [false; 2], reset: false };
        state.note(now, first, t, frame);
        state
    }

    fn note(&mut self, now: Nanos, way: Way, t: &Transport, frame: &[u8]) {
        self.last = now;
        if self.protocol != Protocol::Tcp {
            self.answered |= way != self.first;
            return;
        }
        let (flags, data) = t.flags(frame);
        let over = self.reset || self.done == [true; 2];
        if flags & RST != 0 {
            self.reset = true;
        } else if flags & (SYN | ACK) == SYN {
            *self = State { answered: false, first: way, done: [false; 2], reset: false, ..*self };
        } else if over && data {
            // A guest's port serves all its peers: another connection of it is alive.
            (self.done, self.reset, self.answered) = ([false; 2], false, true);
        } else {
            self.answered |= way != self.first;
            self.done[way as usize] |= flags & FIN != 0;
        }
    }

    fn idle(&self) -> Nanos {
        match self.protocol {
            Protocol::Udp => UDP_NS,
            Protocol::Echo => ECHO_NS,
            Protocol::Tcp if self.reset => TCP_RESET_NS,
            Protocol::Tcp if self.done == [true; 2] => TCP_CLOSED_NS,
            Protocol::Tcp if !self.answered || self.done != [false; 2] => TCP_HALF_NS,
            Protocol::Tcp => TCP_NS,
        }
    }

    fn is_over(&self, now: Nanos) -> bool {
        now.since(self.last) >= self.idle()
    }

    /// Whether it may have to give way to a new flow of its source; for datagrams, at some time.
    fn may_yield(&self) -> bool {
        self.protocol != Protocol::Tcp || self.idle().0 < TCP_NS.0
    }
}

#[derive(Debug)]
struct Flow {
    inside: Inside,
    station: Mac,
    source: Source,
    state: State,
    /// It stands in its source's queue.
    queued: bool,
    id: u64,
}

/// What one source holds.
#[derive(Debug, Default)]
struct Share {
    held: usize,
    /// Mappings that may have to give way, oldest first, with the mapping's number; each at most once, dead ones
    /// among them.
    yielding: VecDeque<(Protocol, u16, u64)>,
}

/// Which uplink ports are taken.
#[derive(Debug)]
struct Taken(Vec<u64>);

impl Taken {
    fn new() -> Taken {
        let mut words = vec![0; 1024];
        // The forwards' ports are never given.
        words[..usize::from(FIRST_PORT) / 64].fill(u64::MAX);
        Taken(words)
    }

    fn set(&mut self, port: u16, taken: bool) {
        let (word, bit) = (&mut self.0[usize::from(port) / 64], 1 << (port % 64));
        *word = if taken { *word | bit } else { *word & !bit };
    }

    /// The first free port from `start` on, the lowest ones after the highest.
    fn free_from(&self, start: u16) -> Option<u16> {
        let first = usize::from(start) / 64;
        let below = (1u64 << (start % 64)) - 1;
        let words = (first..1024).chain(0..=first);
        words.enumerate().find_map(|(i, word)| {
            let taken = if i == 0 { self.0[word] | below } else { self.0[word] };
            (taken != u64::MAX).then(|| (word * 64) as u16 + taken.trailing_ones() as u16)
        })
    }
}

/// A guest that a forward names.
#[derive(Debug)]
struct Neighbour {
    mac: Mac,
    /// Who else claims its address, since when.
    rival: Option<(Mac, Nanos)>,
}

/// A connection through a forward: the guest's end, and the peer's.
type Forwarded = (Inside, Ipv4Addr, u16);

/// A frame for a guest that has not been heard of, or a first segment that it has not answered.
#[derive(Debug)]
struct Held {
    key: Forwarded,
    since: Nanos,
    /// It is kept until it is answered, not only until it can be sent.
    is_first: bool,
    sent: bool,
    frame: Vec<u8>,
}

/// The translation table and the router's two faces.
#[derive(Debug)]
pub struct Nat {
    config: Config,
    /// Uplink port → mapping.
    flows: HashMap<(Protocol, u16), Flow>,
    /// Guest's end and MAC → uplink port.
    ports: HashMap<(Inside, Mac), u16>,
    /// Ports of TCP, UDP, echo that are taken.
    taken: [Taken; 3],
    shares: HashMap<Source, Share>,
    next_id: u64,
    /// Connections that came through a forward → forward's port.
    forwarded: HashMap<Forwarded, (u16, State)>,
    neighbours: HashMap<Ipv4Addr, Neighbour>,
    /// Guests that are known to be away.
    away: Vec<Ipv4Addr>,
    held: VecDeque<Held>,
    /// Held frames that were given up since the last poll.
    lost: u64,
    next_repeat: Nanos,
    /// Frames of the router's own for the network: ARP questions, and what waited for their answers.
    to_network: VecDeque<Vec<u8>>,
    /// Frames of the router's own for the uplink: ARP questions.
    to_uplink: VecDeque<Vec<u8>>,
    peer_mac: Option<Mac>,
    peer_asked: Option<Nanos>,
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
            taken: std::array::from_fn(|_| Taken::new()),
            shares: HashMap::new(),
            next_id: 0,
            forwarded: HashMap::new(),
            neighbours: HashMap::new(),
            away: Vec::new(),
            held: VecDeque::new(),
            lost: 0,
            next_repeat: Nanos(0),
            to_network: VecDeque::new(),
            to_uplink: VecDeque::new(),
            peer_mac: None,
            peer_asked: None,
            next_port: FIRST_PORT,
            next_sweep: Nanos(0),
        };
        nat.ask_peer(None);
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
        self.taken = std::array::from_fn(|_| Taken::new());
        self.shares.clear();
        self.forwarded.clear();
        self.lost += self.held.drain(..).filter(|held| !held.sent).count() as u64;
        self.peer_mac = None;
        self.to_uplink.clear();
        self.ask_peer(None);
    }

    /// Names the guests that are away (their machines do not run), instead of those named before. What is held for them
    /// is given up, and refused.
    pub fn set_away(&mut self, away: Vec<Ipv4Addr>) {
        self.away = away;
        for held in std::mem::take(&mut self.held) {
            if !self.away.contains(&held.key.0.1) {
                self.held.push_back(held);
                continue;
            }
            self.lost += u64::from(!held.sent);
            let Some((port, _)) = self.forwarded.remove(&held.key) else { continue };
            let ((_, peer, peer_port), Some(mac)) = (held.key, self.peer_mac) else { continue };
            let transport = Ipv4::of(&held.frame).and_then(|ip| ip.transport(&held.frame));
            if let Ok(answer) = transport.map(|t| t.reset(&held.frame, (self.config.outside, port), (peer, peer_port)))
            {
                self.to_uplink.extend(answer.map(|packet| ethernet(mac, self.config.mac, &packet)));
            }
        }
    }

    /// Asks for the uplink's MAC; with an instant only if that was not done just before.
    fn ask_peer(&mut self, now: Option<Nanos>) {
        let recent = now.zip(self.peer_asked).is_some_and(|(now, asked)| now.since(asked) < ASK_PEER_NS);
        if recent || !self.to_uplink.is_empty() {
            return;
        }
        self.peer_asked = now;
        let question = arp(1, self.config.mac, self.config.outside, [0; 6], self.config.peer, BROADCAST);
        self.to_uplink.push_back(question);
    }

    fn in_subnet(&self, ip: Ipv4Addr) -> bool {
        let mask = u32::MAX.checked_shl(32 - u32::from(self.config.prefix)).unwrap_or(0);
        u32::from(ip) & mask == u32::from(self.config.subnet) & mask
    }

    /// `mac` sent something as `ip`, which counts only where a forward leads there.
    fn learn(&mut self, now: Nanos, ip: Ipv4Addr, mac: Mac) {
        if mac[0] & 1 == 1 || !self.config.forwards.iter().any(|f| f.to.0 == ip) {
            return;
        }
        match self.neighbours.get_mut(&ip) {
            None => {
                self.neighbours.insert(ip, Neighbour { mac, rival: None });
                self.send_held(now, ip);
            }
            // Its holder is there; who else claimed it did so wrongly.
            Some(known) if known.mac == mac => known.rival = None,
            // A rival that repeats itself gains no time, and a second one has to wait for the first one's end.
            Some(known) if known.rival.is_some() => {}
            Some(known) => {
                let holder = known.mac;
                self.repeat_at(now.after(REPEAT_NS));
                self.neighbours.insert(ip, Neighbour { mac: holder, rival: Some((mac, now)) });
                self.ask(ip, holder);
            }
        }
    }

    fn repeat_at(&mut self, at: Nanos) {
        // Called before what it is for is written down.
        self.next_repeat = self.deadline().map_or(at, |due| due.min(at));
    }

    /// Sends what is held for `guest`, whose MAC is known; keeps first segments.
    fn send_held(&mut self, now: Nanos, guest: Ipv4Addr) {
        let Some(mac) = self.neighbours.get(&guest).map(|n| n.mac) else { return };
        for mut held in std::mem::take(&mut self.held) {
            if held.key.0.1 != guest {
                self.held.push_back(held);
                continue;
            }
            held.frame[0..6].copy_from_slice(&mac);
            if held.is_first && now.since(held.since) < HOLD_NS {
                self.to_network.push_back(held.frame.clone());
                held.sent = true;
                self.held.push_back(held);
            } else {
                self.to_network.push_back(held.frame);
            }
        }
    }

    /// A frame from the network, that came in by the port `ingress` of the switch.
    pub fn outbound(&mut self, now: Nanos, ingress: Option<Token>, frame: &mut [u8]) -> Verdict {
        self.sweep(now);
        let Some(ethernet) = Ethernet::of(frame) else { return Verdict::Drop(Reason::Runt) };
        match ethernet.kind {
            ETHERTYPE_ARP => self.arp_from_network(now, ethernet.from, frame),
            ETHERTYPE_IPV4 if ethernet.to == self.config.mac => {
                match self.route_out(now, ethernet.from, ingress, frame) {
                    Ok(verdict) => verdict,
                    Err(reason) => Verdict::Drop(reason),
                }
            }
            // Flooded frames of others, IPv6, broadcasts: not the router's business.
            _ => Verdict::Taken,
        }
    }

    fn arp_from_network(&mut self, now: Nanos, from: Mac, frame: &mut [u8]) -> Verdict {
        let Some(message) = Arp::of(frame) else { return Verdict::Taken };
        // Who answers for somebody else, or under another name than its own, is not believed.
        if message.sender != from {
            return Verdict::Drop(Reason::BadSource);
        }
        self.learn(now, message.sender_ip, message.sender);
        if message.operation != 1 || message.target_ip != self.config.router {
            return Verdict::Taken;
        }
        let answer = arp(2, self.config.mac, self.config.router, message.sender, message.sender_ip, message.sender);
        frame[..answer.len()].copy_from_slice(&answer);
        Verdict::Reply
    }

    fn route_out(
        &mut self,
        now: Nanos,
        from: Mac,
        ingress: Option<Token>,
        frame: &mut [u8],
    ) -> Result<Verdict, Reason> {
        let ip = Ipv4::of(frame)?;
        if !self.in_subnet(ip.from) || ip.from == self.config.router {
            return Err(Reason::BadSource);
        }
        self.learn(now, ip.from, from);
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
        let key = (inside, ip.to, peer_port);
        let port = match self.forwarded.get_mut(&key) {
            Some((port, state)) => {
                state.note(now, Way::Out, &transport, frame);
                let port = *port;
                // It is answered.
                self.held.retain(|held| held.key != key);
                port
            }
            // The uplink's own address stands for the host there; only answers go to it.
            None if ip.to == self.config.peer || ip.to == self.config.outside => return Err(Reason::NoDestination),
            None => self.map(now, from, ingress.map_or(Source::Mac(from), Source::Port), inside, &transport, frame)?,
        };
        let Some(peer_mac) = self.peer_mac else {
            self.ask_peer(Some(now));
            return Err(Reason::LinkDown);
        };
        ip.live(frame)?;
        ip.rewrite_source(frame, self.config.outside);
        transport.rewrite(frame, transport.source_at(), port, Some((ip.from, self.config.outside)));
        frame[0..6].copy_from_slice(&peer_mac);
        frame[6..12].copy_from_slice(&self.config.mac);
        Ok(Verdict::Pass)
    }

    fn map(
        &mut self,
        now: Nanos,
        station: Mac,
        source: Source,
        inside: Inside,
        t: &Transport,
        frame: &[u8],
    ) -> Result<u16, Reason> {
        let protocol = inside.0;
        if let Some(&port) = self.ports.get(&(inside, station)) {
            let flow = self.flows.get_mut(&(protocol, port)).expect("ports and flows name each other");
            flow.state.note(now, Way::Out, t, frame);
            self.enqueue(protocol, port);
            return Ok(port);
        }
        if protocol == Protocol::Echo && !t.is_echo_request(frame) {
            return Err(Reason::NoDestination);
        }
        let held = self.shares.get(&source).map_or(0, |share| share.held);
        if held >= FLOWS_PER_SOURCE && !self.make_room(now, source) {
            return Err(Reason::GatewayFull);
        }
        // The guest's own port if it is free, else the next free one: few guests collide.
        let wish = inside.2.max(FIRST_PORT);
        let start = if self.flows.contains_key(&(protocol, wish)) { self.next_port } else { wish };
        let mut free = self.taken[protocol as usize].free_from(start);
        if free.is_none() && self.make_room(now, source) {
            free = self.taken[protocol as usize].free_from(start);
        }
        let port = free.ok_or(Reason::GatewayFull)?;
        self.next_port = if port == u16::MAX { FIRST_PORT } else { port + 1 };
        self.next_id += 1;
        let state = State::new(now, Way::Out, t, frame);
        let flow = Flow { inside, station, source, state, queued: false, id: self.next_id };
        self.flows.insert((protocol, port), flow);
        self.ports.insert((inside, station), port);
        self.taken[protocol as usize].set(port, true);
        self.shares.entry(source).or_default().held += 1;
        self.enqueue(protocol, port);
        Ok(port)
    }

    /// Puts a mapping that may have to give way into its source's queue.
    fn enqueue(&mut self, protocol: Protocol, port: u16) {
        let Some(flow) = self.flows.get_mut(&(protocol, port)) else { return };
        if flow.queued || !flow.state.may_yield() {
            return;
        }
        let (source, id) = (flow.source, flow.id);
        flow.queued = true;
        let Some(share) = self.shares.get_mut(&source) else { return };
        share.yielding.push_back((protocol, port, id));
        // Dead entries are at most as many as live ones, so this costs little for each.
        if share.yielding.len() > 2 * FLOWS_PER_SOURCE {
            let flows = &self.flows;
            share.yielding.retain(|(protocol, port, id)| flows.get(&(*protocol, *port)).is_some_and(|f| f.id == *id));
        }
    }

    /// Ends the oldest mapping of `source` that can give way; whether there was one among the first of its queue.
    fn make_room(&mut self, now: Nanos, source: Source) -> bool {
        let mut tries = 0;
        while tries < TRIES {
            let Some(share) = self.shares.get_mut(&source) else { return false };
            let Some((protocol, port, id)) = share.yielding.pop_front() else { return false };
            let Some(flow) = self.flows.get_mut(&(protocol, port)).filter(|flow| flow.id == id) else { continue };
            tries += 1;
            flow.queued = false;
            if !flow.state.may_yield() {
                continue;
            }
            if protocol != Protocol::Tcp && now.since(flow.state.last) < SILENT_NS {
                self.enqueue(protocol, port);
                continue;
            }
            self.end_flow(protocol, port);
            return true;
        }
        false
    }

    fn end_flow(&mut self, protocol: Protocol, port: u16) {
        let Some(flow) = self.flows.remove(&(protocol, port)) else { return };
        self.ports.remove(&(flow.inside, flow.station));
        self.taken[protocol as usize].set(port, false);
        if let Some(share) = self.shares.get_mut(&flow.source) {
            share.held -= 1;
            if share.held == 0 {
                self.shares.remove(&flow.source);
            }
        }
    }

    /// A frame from the uplink.
    pub fn inbound(&mut self, now: Nanos, frame: &mut Vec<u8>) -> Verdict {
        self.sweep(now);
        let Some(ethernet) = Ethernet::of(frame) else { return Verdict::Drop(Reason::Runt) };
        match ethernet.kind {
            ETHERTYPE_ARP => {
                let Some(message) = Arp::of(frame) else { return Verdict::Taken };
                if message.sender_ip == self.config.peer && message.sender == ethernet.from {
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
        let protocol = transport.protocol;
        if self.is_away(protocol, port) {
            let (from, to) = ((ip.to, port), (ip.from, transport.source(frame)));
            let answer = transport.reset(frame, from, to).ok_or(Reason::NoDestination)?;
            let station = Ethernet::of(frame).ok_or(Reason::Runt)?.from;
            *frame = ethernet(station, self.config.mac, &answer);
            return Ok(Verdict::Reply);
        }
        let (inside, station, first) = if let Some(flow) = self.flows.get_mut(&(protocol, port)) {
            flow.state.note(now, Way::In, &transport, frame);
            let (inside, station) = (flow.inside, flow.station);
            self.enqueue(protocol, port);
            (inside, Some(station), None)
        } else {
            let rule = self.config.forwards.iter().find(|f| f.protocol == protocol && f.port == port);
            let (to, to_port) = rule.ok_or(Reason::NoDestination)?.to;
            let key = ((protocol, to, to_port), ip.from, transport.source(frame));
            self.note_forwarded(now, key, port, &transport, frame)?;
            (key.0, self.neighbours.get(&to).map(|n| n.mac), Some(key))
        };
        let (_, guest, guest_port) = inside;
        let is_syn = protocol == Protocol::Tcp && transport.flags(frame).0 & (SYN | ACK) == SYN;
        ip.live(frame)?;
        ip.rewrite_destination(frame, guest);
        let at = if transport.protocol == Protocol::Echo { transport.source_at() } else { transport.at + 2 };
        transport.rewrite(frame, at, guest_port, Some((self.config.outside, guest)));
        frame[6..12].copy_from_slice(&self.config.mac);
        if let Some(mac) = station {
            frame[0..6].copy_from_slice(&mac);
        }
        match (station, first) {
            (Some(_), Some(key)) if is_syn => {
                self.hold(now, key, is_syn, true, frame);
                Ok(Verdict::Pass)
            }
            (Some(_), _) => Ok(Verdict::Pass),
            (None, Some(key)) => {
                if !self.hold(now, key, is_syn, false, frame) {
                    if self.forwarded.get(&key).is_some_and(|(_, state)| !state.answered) {
                        self.forwarded.remove(&key);
                    }
                    return Err(Reason::GatewayFull);
                }
                self.ask(guest, BROADCAST);
                Ok(Verdict::Taken)
            }
            (None, None) => Err(Reason::NoDestination),
        }
    }

    /// Whether the guest behind a port of the uplink's address is away.
    fn is_away(&self, protocol: Protocol, port: u16) -> bool {
        let flow = self.flows.get(&(protocol, port)).map(|flow| flow.inside.1);
        let rule = || self.config.forwards.iter().find(|f| f.protocol == protocol && f.port == port);
        let guest = if self.away.is_empty() { None } else { flow.or_else(|| rule().map(|f| f.to.0)) };
        guest.is_some_and(|guest| self.away.contains(&guest))
    }

    /// Notes a frame of a connection through a forward.
    fn note_forwarded(
        &mut self,
        now: Nanos,
        key: Forwarded,
        port: u16,
        t: &Transport,
        frame: &[u8],
    ) -> Result<(), Reason> {
        let is_reset = t.protocol == Protocol::Tcp && t.flags(frame).0 & RST != 0;
        if is_reset {
            // The uplink has given it up: what is held of it is of no use any more.
            let before = self.held.len();
            let mut unsent = 0;
            self.held.retain(|held| {
                unsent += u64::from(held.key == key && !held.sent);
                held.key != key
            });
            if before != self.held.len() && unsent > 0 {
                self.lost += unsent;
                self.forwarded.remove(&key);
                return Err(Reason::NoDestination);
            }
        }
        if let Some((_, state)) = self.forwarded.get_mut(&key) {
            state.note(now, Way::In, t, frame);
        } else if self.forwarded.len() >= usize::from(u16::MAX) {
            return Err(Reason::GatewayFull);
        } else {
            self.forwarded.insert(key, (port, State::new(now, Way::In, t, frame)));
        }
        Ok(())
    }

    /// Keeps a frame for a guest, if there is room; with `sent` it is on its way already, and a copy is kept.
    fn hold(&mut self, now: Nanos, key: Forwarded, is_first: bool, sent: bool, frame: &mut Vec<u8>) -> bool {
        if let Some(held) = self.held.iter_mut().find(|held| is_first && held.is_first && held.key == key) {
            // The uplink repeats it after all.
            held.frame.clone_from(frame);
            return true;
        }
        let guest = key.0.1;
        let datagrams = self.held.iter().filter(|held| !held.is_first && held.key.0.1 == guest).count();
        if self.held.len() >= HELD || frame.len() > HELD_BYTES || (!is_first && datagrams >= HELD_DATAGRAMS) {
            return false;
        }
        self.repeat_at(now.after(REPEAT_NS));
        let frame = if sent { frame.clone() } else { std::mem::take(frame) };
        self.held.push_back(Held { key, since: now, is_first, sent, frame });
        true
    }

    fn ask(&mut self, guest: Ipv4Addr, to: Mac) {
        let question = arp(1, self.config.mac, self.config.router, [0; 6], guest, to);
        self.to_network.push_back(question);
    }

    /// When [`Nat::poll`] is due, if ever.
    pub fn deadline(&self) -> Option<Nanos> {
        let rivals = self.neighbours.values().any(|n| n.rival.is_some());
        (rivals || !self.held.is_empty()).then_some(self.next_repeat)
    }

    /// Asks guests that have not answered again, and repeats what they have not answered; gives up what waited too
    /// long. Returns how many frames were lost that no guest has seen, and when to be called again, if ever.
    pub fn poll(&mut self, now: Nanos) -> (u64, Option<Nanos>) {
        let (lost, forwarded) = (&mut self.lost, &mut self.forwarded);
        self.held.retain(|held| {
            let keep = now.since(held.since) < HOLD_NS;
            if !keep {
                *lost += u64::from(!held.sent);
                forwarded.remove(&held.key);
            }
            keep
        });
        if self.deadline().is_some_and(|due| now >= due) {
            self.next_repeat = now.after(REPEAT_NS);
            self.settle_rivals(now);
            let mut guests: Vec<_> = self.held.iter().map(|held| held.key.0.1).collect();
            guests.sort_unstable();
            guests.dedup();
            for guest in guests {
                // Asked even if it is known: it may have come back with another MAC.
                self.ask(guest, BROADCAST);
                self.send_held(now, guest);
            }
        }
        (std::mem::take(&mut self.lost), self.deadline())
    }

    /// Asks the holders of claimed addresses again; those that have not answered lose them.
    fn settle_rivals(&mut self, now: Nanos) {
        let claimed: Vec<_> = self.neighbours.iter().filter_map(|(ip, n)| Some((*ip, n.mac, n.rival?))).collect();
        for (ip, holder, (rival, since)) in claimed {
            if now.since(since) < RIVAL_NS {
                self.ask(ip, holder);
            } else {
                self.neighbours.insert(ip, Neighbour { mac: rival, rival: None });
            }
        }
    }

    fn sweep(&mut self, now: Nanos) {
        if now < self.next_sweep {
            return;
        }
        self.next_sweep = now.after(SWEEP_NS);
        let over: Vec<_> = self.flows.iter().filter(|(_, f)| f.state.is_over(now)).map(|(key, _)| *key).collect();
        for (protocol, port) in over {
            self.end_flow(protocol, port);
        }
        self.forwarded.retain(|_, (_, state)| !state.is_over(now));
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

/// A frame that carries an IPv4 packet.
fn ethernet(to: Mac, from: Mac, packet: &[u8]) -> Vec<u8> {
    [&to[..], &from, &ETHERTYPE_IPV4.to_be_bytes(), packet].concat()
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
        Ok(Transport { protocol, at, end: self.end })
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
    /// End of the packet in the frame.
    end: usize,
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

    /// The flags of a TCP segment, and whether it carries data.
    fn flags(&self, frame: &[u8]) -> (u8, bool) {
        let data_at = self.at + usize::from(frame[self.at + 12] >> 4) * 4;
        (frame[self.at + 13], data_at < self.end)
    }

    /// The packet that refuses a TCP segment (RFC 9293 §3.10.7.1); none for a reset, nor for other protocols.
    fn reset(&self, frame: &[u8], from: (Ipv4Addr, u16), to: (Ipv4Addr, u16)) -> Option<Vec<u8>> {
        if self.protocol != Protocol::Tcp {
            return None;
        }
        let segment = &frame[self.at..self.end];
        let flags = segment[13];
        if flags & RST != 0 {
            return None;
        }
        let [sequence, acknowledged] = [4, 8].map(|at| u32::from_be_bytes([0, 1, 2, 3].map(|i| segment[at + i])));
        let data = segment.len().saturating_sub(usize::from(segment[12] >> 4) * 4) as u32;
        let length = data + u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        let (own, next, answer) =
            if flags & ACK != 0 { (acknowledged, 0, RST) } else { (0, sequence.wrapping_add(length), RST | ACK) };
        let mut out = vec![0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6, 0, 0];
        out.extend([from.0.octets(), to.0.octets()].concat());
        out.extend([from.1.to_be_bytes(), to.1.to_be_bytes()].concat());
        out.extend([own.to_be_bytes(), next.to_be_bytes(), [0x50, answer, 0, 0], [0; 4]].concat());
        let header = !sum(&out[..20]);
        out[10..12].copy_from_slice(&header.to_be_bytes());
        // RFC 9293 §3.1: addresses, protocol and length go before the segment.
        let segment = !add(add(sum(&out[12..20]), sum(&[0, 6, 0, 20])), sum(&out[20..]));
        out[36..38].copy_from_slice(&segment.to_be_bytes());
        Some(out)
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
                assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Pass, "{protocol:?}");
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
        assert_eq!(nat.outbound(Nanos(0), None, &mut answer), Verdict::Taken);
        let delivered = nat.next_for_network().unwrap();
        sums_are_right(&delivered);
        assert_eq!(ends(&delivered), ((ip("192.0.0.1"), 40000), (ip("10.87.0.9"), 80)));
        assert_eq!(delivered[0..6], GUEST);
        let mut reply = packet(ROUTER, GUEST, Protocol::Tcp, ("10.87.0.9", 80), ("192.0.0.1", 40000), 0x12);
        assert_eq!(nat.outbound(Nanos(0), None, &mut reply), Verdict::Pass);
        sums_are_right(&reply);
        assert_eq!(ends(&reply), ((ip("192.0.0.2"), 1), (ip("192.0.0.1"), 40000)));
        // Nobody starts a connection to the host through that address.
        let mut other = packet(ROUTER, GUEST, Protocol::Tcp, ("10.87.0.9", 81), ("192.0.0.1", 22), 2);
        assert_eq!(nat.outbound(Nanos(0), None, &mut other), Verdict::Drop(Reason::NoDestination));
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
        assert_eq!((asked, lost, now), (40, 1, HOLD_NS));
    }

    #[test]
    fn what_is_for_a_guest_that_is_away_is_refused_at_once() {
        let mut nat = nat();
        nat.set_away(vec![ip("10.87.0.9")]);
        let from = ("192.0.0.1", 40000);
        let refusal = |frame: &[u8]| {
            sums_are_right(frame);
            assert_eq!(frame[0..12], [PEER, ROUTER].concat()[..]);
            assert_eq!(ends(frame), ((ip("192.0.0.2"), 1), (ip("192.0.0.1"), 40000)));
            let number = |at: usize| u32::from_be_bytes(frame[at..at + 4].try_into().unwrap());
            (frame[47], number(38), number(42))
        };
        // The first segment of a connection: the five bytes that it carries and its SYN are counted.
        let syn = packet(ROUTER, PEER, Protocol::Tcp, from, ("192.0.0.2", 1), SYN);
        let mut frame = syn.clone();
        assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Reply);
        assert_eq!(refusal(&frame), (RST | ACK, 0, 6));
        // One of a connection that stands.
        let mut frame = packet(ROUTER, PEER, Protocol::Tcp, from, ("192.0.0.2", 1), ACK);
        frame[42..46].copy_from_slice(&77u32.to_be_bytes());
        assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Reply);
        assert_eq!(refusal(&frame), (RST, 77, 0));
        // A reset is not answered, and nobody is asked for.
        let mut frame = packet(ROUTER, PEER, Protocol::Tcp, from, ("192.0.0.2", 1), RST);
        assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Drop(Reason::NoDestination));
        assert_eq!((nat.next_for_network(), nat.deadline(), nat.flows()), (None, None, 0));
        // It is started, and waited for; and is away again before it answered.
        nat.set_away(vec![]);
        assert_eq!(nat.inbound(Nanos(0), &mut syn.clone()), Verdict::Taken);
        assert_eq!(nat.next_for_uplink(), None);
        nat.set_away(vec![ip("10.87.0.9")]);
        assert_eq!(refusal(&nat.next_for_uplink().unwrap()), (RST | ACK, 0, 6));
        assert_eq!((nat.poll(Nanos(0)), nat.flows()), ((1, None), 0));
        // Another guest's connections are not touched.
        let mut out = packet(ROUTER, OTHER, Protocol::Tcp, ("10.87.0.10", 5001), ("198.51.100.7", 80), SYN);
        assert_eq!(nat.outbound(Nanos(0), None, &mut out), Verdict::Pass);
        let (_, port) = ends(&out).0;
        let mut back = packet(ROUTER, PEER, Protocol::Tcp, ("198.51.100.7", 80), ("192.0.0.2", port), SYN | ACK);
        assert_eq!(nat.inbound(Nanos(0), &mut back), Verdict::Pass);
    }

    #[test]
    fn the_router_answers_arp_and_echo_for_itself_only() {
        let mut nat = nat();
        let mut question = arp(1, GUEST, ip("10.87.0.9"), [0; 6], ip("10.87.0.2"), BROADCAST);
        assert_eq!(nat.outbound(Nanos(0), None, &mut question), Verdict::Reply);
        let answer = Arp::of(&question).unwrap();
        assert_eq!((answer.operation, answer.sender, answer.sender_ip), (2, ROUTER, ip("10.87.0.2")));
        let mut other = arp(1, GUEST, ip("10.87.0.9"), [0; 6], ip("10.87.0.7"), BROADCAST);
        assert_eq!(nat.outbound(Nanos(0), None, &mut other), Verdict::Taken);
        let mut ping = packet(ROUTER, GUEST, Protocol::Echo, ("10.87.0.9", 7), ("10.87.0.2", 0), 0);
        assert_eq!(nat.outbound(Nanos(0), None, &mut ping), Verdict::Reply);
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
            assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Drop(*reason), "case {i}");
        }
        for to in ["127.0.0.1", "10.87.0.50", "224.0.0.1", "255.255.255.255", "0.0.0.0"] {
            let mut frame = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 5), (to, 53), 0);
            assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Drop(Reason::NoDestination), "{to}");
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
                nat.outbound(Nanos(0), None, &mut frame[..n].to_vec());
                nat.inbound(Nanos(0), &mut frame[..n].to_vec());
            }
        }
    }

    #[test]
    fn a_guest_that_opens_flows_without_end_spends_only_its_own_share_until_they_are_idle() {
        let mut nat = nat();
        let mut refused = 0;
        for n in 0..(FLOWS_PER_SOURCE + 100) {
            let from = format!("10.87.0.{}", 20 + n % 200);
            let mut frame =
                packet(ROUTER, GUEST, Protocol::Udp, (&from, (n / 200 + 2000) as u16), ("198.51.100.7", 53), 0);
            refused += usize::from(nat.outbound(Nanos(0), None, &mut frame) == Verdict::Drop(Reason::GatewayFull));
        }
        assert_eq!(refused, 100);
        let mut other = packet(ROUTER, OTHER, Protocol::Udp, ("10.87.0.10", 5), ("198.51.100.7", 53), 0);
        assert_eq!(nat.outbound(Nanos(0), None, &mut other), Verdict::Pass);
        let later = UDP_NS.after(Nanos::SECOND);
        let mut frame = packet(ROUTER, GUEST, Protocol::Udp, ("10.87.0.9", 9), ("198.51.100.7", 53), 0);
        assert_eq!(nat.outbound(later, None, &mut frame), Verdict::Pass);
        assert_eq!(nat.flows(), 1, "idle mappings are gone");
    }

    fn secs(n: u64) -> Nanos {
        Nanos::SECOND.times(n)
    }

    fn tcp(from: (&str, u16), to: (&str, u16), flags: u8) -> Vec<u8> {
        let sender = if from.0.starts_with("10.87.") { GUEST } else { PEER };
        packet(ROUTER, sender, Protocol::Tcp, from, to, flags)
    }

    /// What the router sends into the network by itself: questions by whom they ask for, and other frames.
    fn sent(nat: &mut Nat) -> (Vec<(Mac, Ipv4Addr)>, Vec<Vec<u8>>) {
        let all = std::iter::from_fn(|| nat.next_for_network());
        let (questions, frames): (Vec<_>, Vec<_>) = all.partition(|f| f[12..14] == [8, 6]);
        let asked = |f: Vec<u8>| (f[0..6].try_into().unwrap(), Arp::of(&f).unwrap().target_ip);
        (questions.into_iter().map(asked).collect(), frames)
    }

    fn says(nat: &mut Nat, now: Nanos, mac: Mac) {
        let mut answer = arp(2, mac, ip("10.87.0.9"), ROUTER, ip("10.87.0.2"), ROUTER);
        assert_eq!(nat.outbound(now, None, &mut answer), Verdict::Taken);
    }

    #[test]
    fn a_first_segment_is_repeated_until_the_guest_answers() {
        let mut nat = nat();
        let mut syn = tcp(("192.0.0.1", 40000), ("192.0.0.2", 1), SYN);
        assert_eq!(nat.inbound(Nanos(0), &mut syn), Verdict::Taken);
        // ARP is answered after 3 s, but the guest's TCP does not run for another 2 s.
        let (mut now, mut segments) = (Nanos(0), Vec::new());
        while let (0, Some(next)) = nat.poll(now) {
            let (asked, frames) = sent(&mut nat);
            assert!(asked.contains(&(BROADCAST, ip("10.87.0.9"))), "asked at {now:?}");
            for frame in frames {
                sums_are_right(&frame);
                assert_eq!((&frame[0..6], ends(&frame).1), (&GUEST[..], (ip("10.87.0.9"), 80)));
                segments.push(now);
            }
            if now == secs(3) {
                says(&mut nat, now, GUEST);
            }
            if now == secs(5) {
                let mut answer = tcp(("10.87.0.9", 80), ("192.0.0.1", 40000), SYN | ACK);
                assert_eq!(nat.outbound(now, None, &mut answer), Verdict::Pass);
            }
            now = next;
        }
        assert_eq!(nat.poll(now), (0, None), "nothing is repeated after the answer");
        assert!((4..=6).contains(&segments.len()), "{segments:?}");
        assert!(now <= secs(6));
    }

    #[test]
    fn a_guest_that_was_known_and_boots_again_gets_the_first_segment_again() {
        let mut nat = nat();
        says(&mut nat, Nanos(0), OTHER);
        let mut syn = tcp(("192.0.0.1", 40000), ("192.0.0.2", 1), SYN);
        assert_eq!(nat.inbound(Nanos(0), &mut syn), Verdict::Pass);
        assert_eq!(syn[0..6], OTHER);
        // It comes back with another MAC; the old one answers nobody.
        let mut now = Nanos(0);
        let delivered = loop {
            let (lost, next) = nat.poll(now);
            assert_eq!(lost, 0);
            let (_, frames) = sent(&mut nat);
            if let Some(frame) = frames.into_iter().find(|f| f[0..6] == GUEST) {
                break frame;
            }
            if now >= secs(1) {
                says(&mut nat, now, GUEST);
            }
            now = next.expect("it is still held");
        };
        sums_are_right(&delivered);
        assert!(now <= secs(4), "{now:?}");
        // The uplink gives the connection up: nothing is repeated any more.
        let mut reset = tcp(("192.0.0.1", 40000), ("192.0.0.2", 1), RST);
        assert_eq!(nat.inbound(now, &mut reset), Verdict::Pass);
        assert_eq!(nat.poll(now), (0, None));
    }

    #[test]
    fn what_is_held_has_limits_and_every_loss_is_counted() {
        let mut nat = nat();
        let mut lost = 0;
        for n in 0..(HELD as u16 + 10) {
            let mut syn = tcp(("192.0.0.1", 40000 + n), ("192.0.0.2", 1), SYN);
            lost += u64::from(nat.inbound(Nanos(0), &mut syn) == Verdict::Drop(Reason::GatewayFull));
        }
        assert_eq!(lost, 10);
        assert_eq!(nat.poll(HOLD_NS), (HELD as u64, None));
        assert_eq!(nat.flows(), 0, "nothing is left of connections that nobody answered");
    }

    #[test]
    fn the_uplink_is_not_asked_for_its_address_by_every_frame() {
        let mut nat = nat();
        nat.uplink_restarted();
        for n in 0..10_000 {
            let mut frame = tcp(("10.87.0.9", 2000 + n % 50), ("198.51.100.7", 80), SYN);
            assert_eq!(nat.outbound(secs(1), None, &mut frame), Verdict::Drop(Reason::LinkDown));
        }
        assert_eq!(std::iter::from_fn(|| nat.next_for_uplink()).count(), 1);
        let mut asked = 0;
        for n in 0..100 {
            let mut frame = tcp(("10.87.0.9", 2000), ("198.51.100.7", 80), SYN);
            nat.outbound(secs(2).after(Nanos::MILLI.times(100 * n)), None, &mut frame);
            asked += std::iter::from_fn(|| nat.next_for_uplink()).count();
        }
        assert_eq!(asked, 10, "once a second");
    }

    #[test]
    fn nobody_takes_over_the_address_of_a_guest_that_answers() {
        let mut nat = nat();
        says(&mut nat, Nanos(0), GUEST);
        let to = |nat: &mut Nat, now| {
            let mut frame = tcp(("192.0.0.1", 40000), ("192.0.0.2", 1), ACK);
            assert_eq!(nat.inbound(now, &mut frame), Verdict::Pass);
            Mac::try_from(&frame[0..6]).unwrap()
        };
        // A message whose sender is not its frame's.
        let mut lie = arp(2, OTHER, ip("10.87.0.9"), ROUTER, ip("10.87.0.2"), ROUTER);
        lie[6..12].copy_from_slice(&GUEST);
        assert_eq!(nat.outbound(Nanos(0), None, &mut lie), Verdict::Drop(Reason::BadSource));
        for round in 0..10 {
            let now = secs(10 * round);
            says(&mut nat, now, OTHER);
            assert_eq!(sent(&mut nat).0, [(GUEST, ip("10.87.0.9"))], "its holder is asked");
            says(&mut nat, now, GUEST);
            nat.poll(now.after(secs(3)));
            assert_eq!(to(&mut nat, now.after(secs(3))), GUEST);
        }
        // One that has gone does not keep it.
        says(&mut nat, secs(200), OTHER);
        let mut now = secs(200);
        while let (_, Some(next)) = nat.poll(now) {
            now = next;
        }
        assert_eq!(to(&mut nat, now), OTHER);
        assert!(now <= secs(203));
    }

    #[test]
    fn answers_go_to_the_station_that_asked_though_another_claims_its_address() {
        let mut nat = nat();
        let mut ports = Vec::new();
        for mac in [GUEST, OTHER] {
            let mut frame = packet(ROUTER, mac, Protocol::Udp, ("10.87.0.9", 5000), ("198.51.100.7", 53), 0);
            assert_eq!(nat.outbound(Nanos(0), None, &mut frame), Verdict::Pass);
            ports.push((mac, ends(&frame).0.1));
        }
        assert_ne!(ports[0].1, ports[1].1);
        for (mac, port) in ports {
            let mut back = packet(ROUTER, PEER, Protocol::Udp, ("198.51.100.7", 53), ("192.0.0.2", port), 0);
            assert_eq!(nat.inbound(Nanos(0), &mut back), Verdict::Pass);
            assert_eq!((&back[0..6], ends(&back).1), (&mac[..], (ip("10.87.0.9"), 5000)));
        }
    }

    #[test]
    fn a_connection_lasts_as_long_as_its_state_says() {
        let (out, back) = (("10.87.0.9", 4000), ("198.51.100.7", 80));
        // What is sent out and comes in, and how long its port is kept then.
        let cases: [(&[u8], &[u8], Nanos); 6] = [
            (&[SYN], &[], TCP_HALF_NS),
            (&[SYN], &[SYN | ACK], TCP_NS),
            (&[SYN, RST], &[], TCP_RESET_NS),
            (&[SYN], &[SYN | ACK, RST], TCP_RESET_NS),
            (&[SYN, FIN | ACK], &[SYN | ACK], TCP_HALF_NS),
            (&[SYN, FIN | ACK], &[FIN | ACK], TCP_CLOSED_NS),
        ];
        for (i, (outs, ins, idle)) in cases.into_iter().enumerate() {
            let mut nat = nat();
            for flags in outs {
                assert_eq!(nat.outbound(Nanos(0), None, &mut tcp(out, back, *flags)), Verdict::Pass);
            }
            for flags in ins {
                let mut frame = tcp(back, ("192.0.0.2", 4000), *flags);
                assert_eq!(nat.inbound(Nanos(0), &mut frame), Verdict::Pass);
            }
            nat.sweep(Nanos(idle.0 - 1));
            assert_eq!(nat.flows(), 1, "case {i}: too early");
            nat.sweep(idle.after(SWEEP_NS));
            assert_eq!((nat.flows(), nat.shares.len(), nat.ports.len()), (0, 0, 0), "case {i}");
        }
    }

    #[test]
    fn short_connections_give_way_to_new_ones_and_a_long_one_stays() {
        let mut nat = nat();
        let mut long = tcp(("10.87.0.9", 22), ("198.51.100.7", 22), SYN);
        assert_eq!(nat.outbound(Nanos(0), None, &mut long), Verdict::Pass);
        let port = ends(&long).0.1;
        assert_eq!(
            nat.inbound(Nanos(0), &mut tcp(("198.51.100.7", 22), ("192.0.0.2", port), SYN | ACK)),
            Verdict::Pass
        );
        // A thousand connections a second, and nobody waits for one.
        for n in 0..40_000u64 {
            let now = Nanos::MILLI.times(n);
            let from = format!("10.87.0.{}", 20 + n / 20_000);
            let mut frame = tcp((&from, (2000 + n % 20_000) as u16), ("198.51.100.7", 80), SYN);
            assert_eq!(nat.outbound(now, Some(Token(1)), &mut frame), Verdict::Pass, "{n}");
        }
        assert!(nat.flows() <= FLOWS_PER_SOURCE + 1);
        assert!(nat.shares[&Source::Port(Token(1))].yielding.len() <= 2 * FLOWS_PER_SOURCE);
        let mut back = tcp(("198.51.100.7", 22), ("192.0.0.2", port), ACK);
        assert_eq!(nat.inbound(secs(41), &mut back), Verdict::Pass);
    }

    #[test]
    fn a_guest_that_makes_up_addresses_spends_one_share_and_leaves_nothing_behind() {
        let mut nat = nat();
        let mut passed = 0;
        for n in 0..20_000u32 {
            let [_, a, b, c] = n.to_be_bytes();
            let station = [2, 9, 9, a, b, c];
            let mut frame = packet(ROUTER, station, Protocol::Udp, ("10.87.0.77", 7000), ("198.51.100.7", 53), 0);
            passed += usize::from(nat.outbound(Nanos(0), Some(Token(4)), &mut frame) == Verdict::Pass);
        }
        assert_eq!((passed, nat.shares.len(), nat.neighbours.len()), (FLOWS_PER_SOURCE, 1, 0));
    }

    #[test]
    fn every_port_is_given_once_and_the_search_says_when_there_is_none() {
        let mut taken = Taken::new();
        let mut seen = std::collections::HashSet::new();
        while let Some(port) = taken.free_from(40_001) {
            assert!(port >= FIRST_PORT && seen.insert(port));
            taken.set(port, true);
        }
        assert_eq!(seen.len(), usize::from(u16::MAX - FIRST_PORT) + 1);
        taken.set(40_000, false);
        assert_eq!(taken.free_from(40_001), Some(40_000));
    }
}
