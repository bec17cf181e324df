//! Network address translation between the guests of a network and an uplink that knows one address.
//!
//! # Why
//! The user uplink (passt) serves one guest: one address, one MAC. Two guests that use the same port there get each
//! other's resets (docs/decisions/0008-user-uplink.md). This module puts one address in front of many guests.
//!
//! # What it is not
//! No router between networks, no firewall, no IPv6, no application helpers. Fragments are not translated (only the
//! first has ports); they are dropped as `not_transformable`.
//!
//! # How it works
//! Frames go through [`Nat::outbound`] (from the network) and [`Nat::inbound`] (from the uplink). Each rewrites the
//! frame in place and says what to do with it. On the network the router has its own address ([`Config::router`]). It
//! answers ARP and echo for that address, and forwards what is sent to its MAC.
//! - A guest's (protocol, address, port) gets one port of the uplink's address, for all its peers (RFC 4787:
//!   endpoint-independent mapping). Ports are taken from 1024 on; lower ones belong to forwards.
//! - A mapping belongs to the MAC that made it. Two guests that claim one address do not meet. Answers go to the MAC
//!   that asked, even if ARP says otherwise meanwhile.
//! - A forward is a rule (protocol, low port → guest address, port). A connection that comes through one is remembered
//!   with its peer, so that the answers leave with the forward's port. ARP requests are sent only for guests that
//!   forwards name. A claim that such an address has moved is believed once its holder does not answer for it.
//! - The uplink sends the first segment of a connection once and never again (passt of 2023). So the segment is kept
//!   and repeated until the guest answers: a guest that boots answers ARP before anything listens to it.
//! - Frames for a guest that is known to be away ([`Nat::set_away`]) are refused. A TCP segment is answered with a
//!   reset, the rest is dropped. A guest that merely does not answer may be booting, so its frames wait.
//! - ICMP errors about a translated packet are translated with the packet that they quote, both ways. So path MTU
//!   discovery, traceroute and "port unreachable" work through the router. The router itself answers a guest's packet
//!   whose hops are used up, at most fifty times a second, and no other.
//! - The maximum segment size of TCP is left alone. Network and uplink have one MTU, so what fits one fits the other.
//!   The errors above report a smaller MTU further away. (The user uplink ends TCP connections and makes its own.)
//! - Checksums are updated by difference (RFC 1624), never recomputed, so a frame damaged on the way stays damaged.
//!
//! # Limits
//! Each port of the switch has [`FLOWS_PER_SOURCE`] mappings, so a guest cannot spend its neighbours' share by
//! inventing addresses. At that limit the port's own oldest half-open or closing connection, or silent datagram flow,
//! goes first. When the ports of a protocol are used up by many such sources, the one with the most mappings makes room
//! for the others. Connections through a forward are counted by forward and outside address (`forwarded`). A full share
//! makes room among its own connections, unconfirmed ones first. A UDP peer that the guest has not answered is
//! forgotten after 30 s. [`HELD`] frames of at most [`HELD_BYTES`] wait for guests. When all places are taken, the
//! guest that has the most gives one up. So each of n guests is sure of its n-th part, and a guest alone may have them
//! all. Each guest may have at most [`HELD_DATAGRAMS`] datagrams. Among a guest's own frames, the outside address with
//! the most gives up its oldest. That is also the frame that the uplink gives up first. Beyond these limits frames are
//! dropped with a reason. An idle mapping is removed after its time.
//!
//! Time comes in as [`Nanos`]; one thread calls.

mod flow;
mod forwarded;
mod icmp;
mod kept;
mod packet;

pub use flow::Protocol;

use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;

use crate::Nanos;
use crate::drop::Reason;
use crate::frame::Mac;
use crate::wait::Token;
use flow::{Direction, Flow, Inside, Share, Source, State, Taken};
use forwarded::{Forwarded, Table};
use icmp::{End, Quote, echo_reply, time_exceeded};
use packet::{ACK, Arp, BROADCAST, ETHERTYPE_ARP, ETHERTYPE_IPV4, Ethernet, Ipv4, RST, SYN, Transport, arp, ethernet};

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

/// A datagram flow that was silent for so long may give way to a new one of its source.
const SILENT_NS: Nanos = Nanos(30 * 1_000_000_000);
/// Candidates that are looked at for that, per new flow.
const TRIES: usize = 16;
/// ICMP errors of the router's own per second.
const ERRORS_PER_SECOND: u32 = 50;
/// How often idle mappings are looked for.
const SWEEP_NS: Nanos = Nanos(10 * 1_000_000_000);

/// One rule, uplink → guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Port of the uplink's address, below [`FIRST_PORT`].
    pub port: u16,
    /// Address and port of the guest.
    pub to: (Ipv4Addr, u16),
}

/// Addresses and forwards of a NAT router.
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
    /// Connections from outside that are let in, and to which guest.
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
    /// The frame is dropped for this reason.
    Drop(Reason),
}

/// A guest that a forward names.
#[derive(Debug)]
struct Neighbour {
    mac: Mac,
    /// Who else claims its address, since when.
    rival: Option<(Mac, Nanos)>,
}

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
    /// Connections that came through a forward.
    forwarded: Table,
    neighbours: HashMap<Ipv4Addr, Neighbour>,
    /// Guests that are known to be away.
    away: Vec<Ipv4Addr>,
    held: VecDeque<Held>,
    /// Held frames that were given up since the last poll.
    lost: u64,
    /// Held frames that no guest has seen and that gave way to others, since they were last asked for.
    displaced: u64,
    next_repeat: Nanos,
    /// Frames of the router's own for the network: ARP questions, and what waited for their answers.
    to_network: VecDeque<Vec<u8>>,
    /// Frames of the router's own for the uplink: ARP questions.
    to_uplink: VecDeque<Vec<u8>>,
    peer_mac: Option<Mac>,
    peer_asked: Option<Nanos>,
    next_port: u16,
    next_sweep: Nanos,
    /// Errors of the router's own that are left in the second that began at the instant.
    errors_left: (Nanos, u32),
}

impl Nat {
    /// A router without any mapping.
    pub fn new(config: Config) -> Nat {
        let forwarded = Table::new(config.forwards.len());
        let mut nat = Nat {
            config,
            flows: HashMap::new(),
            ports: HashMap::new(),
            taken: std::array::from_fn(|_| Taken::new()),
            shares: HashMap::new(),
            next_id: 0,
            forwarded,
            neighbours: HashMap::new(),
            away: Vec::new(),
            held: VecDeque::new(),
            lost: 0,
            displaced: 0,
            next_repeat: Nanos(0),
            to_network: VecDeque::new(),
            to_uplink: VecDeque::new(),
            peer_mac: None,
            peer_asked: None,
            next_port: FIRST_PORT,
            next_sweep: Nanos(0),
            errors_left: (Nanos(0), ERRORS_PER_SECOND),
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

    /// The uplink is a new one (its process was restarted): connections through the old one are forgotten.
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
            let Some(port) = self.forwarded.remove(&held.key) else { continue };
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

    /// Asks the uplink for its own address, which it answers as long as it lives.
    pub fn ask_for_life(&mut self) {
        self.ask_peer(None);
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
        let quote = Quote::of(frame, &ip)?;
        let refused = self.in_subnet(ip.to) || ip.to.is_multicast() || ip.to.is_broadcast() || ip.to.is_loopback();
        if refused || ip.to.is_unspecified() {
            return Err(Reason::NoDestination);
        }
        if let Some(quote) = quote {
            return self.error_out(from, &ip, &quote, frame);
        }
        let transport = ip.transport(frame)?;
        if !ip.outlives_a_hop(frame) {
            // The first line of a guest's traceroute.
            self.complain(now, &ip, frame);
            return Err(Reason::NoDestination);
        }
        let inside = (transport.protocol, ip.from, transport.source(frame));
        let peer_port = transport.destination(frame);
        let key = (inside, ip.to, peer_port);
        let port = match self.forwarded.note(now, &key, |state| state.note(now, Direction::Out, &transport, frame)) {
            Some(port) => {
                // It is answered.
                self.held.retain(|held| held.key != key);
                port
            }
            // The uplink's own address represents the host there; only answers go to it.
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
            flow.state.note(now, Direction::Out, t, frame);
            if flow.source != source && matches!(flow.source, Source::Mac(_)) {
                self.charge(protocol, port, source);
            }
            self.enqueue(protocol, port);
            return Ok(port);
        }
        if protocol == Protocol::Echo && !t.is_echo_request(frame) {
            return Err(Reason::NoDestination);
        }
        let held = self.shares.get(&source).map_or(0, |share| share.held);
        if held >= FLOWS_PER_SOURCE && !self.make_room(now, source, None) {
            return Err(Reason::GatewayFull);
        }
        // The guest's own port if it is free, else the next free one: few guests collide.
        let wish = inside.2.max(FIRST_PORT);
        let start = if self.flows.contains_key(&(protocol, wish)) { self.next_port } else { wish };
        let mut free = self.taken[protocol as usize].free_from(start);
        if free.is_none() {
            // Only with many sources at their limits, so this is no look-up of every frame. The one with the most makes
            // room, also of what is not silent, as long as it then still has as much as this one.
            let most =
                self.shares.iter().max_by_key(|(_, share)| share.held).map(|(source, share)| (*source, share.held));
            let donor = most.filter(|(_, most)| *most > held + 1);
            if donor.is_some_and(|(donor, _)| self.make_room(now, donor, Some(protocol)))
                || self.make_room(now, source, None)
            {
                free = self.taken[protocol as usize].free_from(start);
            }
        }
        let port = free.ok_or(Reason::GatewayFull)?;
        self.next_port = if port == u16::MAX { FIRST_PORT } else { port + 1 };
        self.next_id += 1;
        let state = State::new(now, Direction::Out, t, frame);
        let flow = Flow { inside, station, source, state, queued: false, id: self.next_id };
        self.flows.insert((protocol, port), flow);
        self.ports.insert((inside, station), port);
        self.taken[protocol as usize].set(port, true);
        self.shares.entry(source).or_default().held += 1;
        self.enqueue(protocol, port);
        Ok(port)
    }

    /// Charges a mapping that was taken over from another process to the port of the switch that it belongs to.
    fn charge(&mut self, protocol: Protocol, port: u16, source: Source) {
        self.next_id += 1;
        let Some(flow) = self.flows.get_mut(&(protocol, port)) else { return };
        // Another number, so that the old queue's entry is a dead one.
        (flow.id, flow.queued) = (self.next_id, false);
        let before = std::mem::replace(&mut flow.source, source);
        self.shares.entry(source).or_default().held += 1;
        self.discharge(before);
    }

    fn discharge(&mut self, source: Source) {
        if let Some(share) = self.shares.get_mut(&source) {
            share.held -= 1;
            if share.held == 0 {
                self.shares.remove(&source);
            }
        }
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

    /// Ends the oldest mapping of `source` that can give way; whether there was one among the first of its queue. With
    /// `wanted` it has to be of that protocol, and datagram flows need not be silent.
    fn make_room(&mut self, now: Nanos, source: Source, wanted: Option<Protocol>) -> bool {
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
            let is_alive = protocol != Protocol::Tcp && now.since(flow.state.last) < SILENT_NS;
            if wanted.map_or(is_alive, |wanted| wanted != protocol) {
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
        self.discharge(flow.source);
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
        if let Some(quote) = Quote::of(frame, &ip)? {
            return self.error_in(&ip, &quote, frame);
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
            flow.state.note(now, Direction::In, &transport, frame);
            let (inside, station) = (flow.inside, flow.station);
            self.enqueue(protocol, port);
            (inside, Some(station), None)
        } else {
            let rule = self.config.forwards.iter().position(|f| f.protocol == protocol && f.port == port);
            let rule = rule.ok_or(Reason::NoDestination)?;
            let (to, to_port) = self.config.forwards[rule].to;
            let key = ((protocol, to, to_port), ip.from, transport.source(frame));
            self.note_forwarded(now, key, (rule, port), &transport, frame)?;
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
                // One that waits already is asked for by `poll`, however many frames come for it.
                let is_asked = self.held.iter().any(|held| held.key.0.1 == guest);
                if !self.hold(now, key, is_syn, false, frame) {
                    self.forget_unanswered(&key);
                    return Err(Reason::GatewayFull);
                }
                if !is_asked {
                    self.ask(guest, BROADCAST);
                }
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

    /// An error about a packet that a guest sent: it goes to that guest, who then knows its own packet in it. Where it
    /// comes from stays as it is, which is what a traceroute shows. It neither keeps a mapping alive nor ends one.
    fn error_in(&self, ip: &Ipv4, quote: &Quote, frame: &mut [u8]) -> Result<Verdict, Reason> {
        if quote.from != self.config.outside {
            return Err(Reason::NoDestination);
        }
        let (inside, station) = match self.flows.get(&(quote.protocol, quote.from_port)) {
            Some(flow) => (flow.inside, Some(flow.station)),
            None => {
                let is_rule = |f: &&Forward| f.protocol == quote.protocol && f.port == quote.from_port;
                let (to, port) = self.config.forwards.iter().find(is_rule).ok_or(Reason::NoDestination)?.to;
                let inside = (quote.protocol, to, port);
                if self.forwarded.get(&(inside, quote.to, quote.to_port)).is_none() {
                    return Err(Reason::NoDestination);
                }
                (inside, self.neighbours.get(&to).map(|n| n.mac))
            }
        };
        let station = station.ok_or(Reason::NoDestination)?;
        let (_, guest, port) = inside;
        ip.live(frame)?;
        ip.rewrite_destination(frame, guest);
        quote.rewrite(frame, End::Source, guest, port);
        frame[0..6].copy_from_slice(&station);
        frame[6..12].copy_from_slice(&self.config.mac);
        Ok(Verdict::Pass)
    }

    /// A guest's error about a packet that came to it: it leaves as if the uplink's address had got that packet.
    fn error_out(&self, station: Mac, ip: &Ipv4, quote: &Quote, frame: &mut [u8]) -> Result<Verdict, Reason> {
        // It is about its own packet, and goes to that packet's sender: no host complains in another's name.
        if quote.to != ip.from || quote.from != ip.to {
            return Err(Reason::BadSource);
        }
        let inside = (quote.protocol, ip.from, quote.to_port);
        let forwarded = self.forwarded.get(&(inside, quote.from, quote.from_port)).map(|(port, _)| port);
        let to_host = ip.to == self.config.peer || ip.to == self.config.outside;
        let mapped = self.ports.get(&(inside, station)).copied().filter(|_| !to_host);
        let port = forwarded.or(mapped).ok_or(Reason::NoDestination)?;
        let peer_mac = self.peer_mac.ok_or(Reason::LinkDown)?;
        ip.live(frame)?;
        ip.rewrite_source(frame, self.config.outside);
        quote.rewrite(frame, End::Destination, self.config.outside, port);
        frame[0..6].copy_from_slice(&peer_mac);
        frame[6..12].copy_from_slice(&self.config.mac);
        Ok(Verdict::Pass)
    }

    /// Tells a guest that its packet's hops are used up, unless there was enough of that in this second.
    fn complain(&mut self, now: Nanos, ip: &Ipv4, frame: &[u8]) {
        if now.since(self.errors_left.0) >= Nanos::SECOND {
            self.errors_left = (now, ERRORS_PER_SECOND);
        }
        if self.errors_left.1 > 0
            && let Some(error) = time_exceeded(frame, ip, self.config.mac, self.config.router)
        {
            self.errors_left.1 -= 1;
            self.to_network.push_back(error);
        }
    }

    /// Notes a frame of a connection through a forward.
    fn note_forwarded(
        &mut self,
        now: Nanos,
        key: Forwarded,
        rule: (usize, u16),
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
        if self.forwarded.note(now, &key, |state| state.note(now, Direction::In, t, frame)).is_some() {
            return Ok(());
        }
        let added = self.forwarded.add(now, key, rule, State::new(now, Direction::In, t, frame));
        if let Some(gone) = added.map_err(|()| Reason::GatewayFull)? {
            // What is held of it would come to the guest without a way back.
            let displaced = &mut self.displaced;
            self.held.retain(|held| {
                *displaced += u64::from(held.key == gone && !held.sent);
                held.key != gone
            });
        }
        Ok(())
    }

    fn forget_unanswered(&mut self, key: &Forwarded) {
        if self.forwarded.get(key).is_some_and(|(_, state)| !state.answered) {
            self.forwarded.remove(key);
        }
    }

    /// Keeps a frame for a guest, if there is room; with `sent` it is on its way already, and a copy is kept.
    fn hold(&mut self, now: Nanos, key: Forwarded, is_first: bool, sent: bool, frame: &mut Vec<u8>) -> bool {
        if let Some(held) = self.held.iter_mut().find(|held| is_first && held.is_first && held.key == key) {
            // The uplink repeats it after all.
            held.frame.clone_from(frame);
            return true;
        }
        if frame.len() > HELD_BYTES {
            return false;
        }
        let guest = key.0.1;
        let is_datagram = |held: &&Held| !held.is_first && held.key.0.1 == guest;
        if !is_first && self.held.iter().filter(is_datagram).count() >= HELD_DATAGRAMS {
            self.displace(key, |held| !held.is_first);
        } else if self.held.len() >= HELD {
            self.displace(key, |_| true);
        }
        self.repeat_at(now.after(REPEAT_NS));
        let frame = if sent { frame.clone() } else { std::mem::take(frame) };
        self.held.push_back(Held { key, since: now, is_first, sent, frame });
        true
    }

    /// Gives up the held frame that has to make room for one of `key`, among those that `may` go: the oldest of the
    /// outside address with the most, of the guest with the most. The newcomer counts as one of them, so who floods
    /// displaces its own.
    fn displace(&mut self, key: Forwarded, may: impl Fn(&Held) -> bool) {
        // Quadratic in the number of places, which is small and constant.
        let held = || self.held.iter().filter(|held| may(held));
        let of_guest = |guest| held().filter(|h| h.key.0.1 == guest).count() + usize::from(key.0.1 == guest);
        // Ties go to the oldest: `max_by_key` takes the last of equals.
        let Some(guest) = held().rev().map(|h| h.key.0.1).max_by_key(|guest| of_guest(*guest)) else { return };
        let end = |k: &Forwarded| (k.0.1, k.1);
        let of_peer = |peer| held().filter(|h| end(&h.key) == peer).count() + usize::from(end(&key) == peer);
        let own = held().rev().map(|h| end(&h.key)).filter(|(to, _)| *to == guest);
        let Some(peer) = own.max_by_key(|peer| of_peer(*peer)) else { return };
        let Some(at) = self.held.iter().position(|h| may(h) && end(&h.key) == peer) else { return };
        if let Some(gone) = self.held.remove(at).filter(|held| !held.sent) {
            self.displaced += 1;
            // The guest cannot answer what it has not seen.
            if !self.held.iter().any(|held| held.key == gone.key) && gone.key != key {
                self.forget_unanswered(&gone.key);
            }
        }
    }

    /// Held frames that no guest has seen and that gave way to others, since the last call.
    pub fn take_displaced(&mut self) -> u64 {
        std::mem::take(&mut self.displaced)
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
        self.forwarded.expire(now);
    }
}

#[cfg(test)]
mod tests;
