//! Network address translation between the guests of a network and an uplink that knows one
//! address.
//!
//! # Why
//! The user uplink (passt) serves one guest: one address, one MAC. Two guests that use the same
//! port there get each other's resets (docs/decisions/0008-user-uplink.md). This module puts one
//! address in front of many guests.
//!
//! [`uplink`] makes a port of it: a router that has another port, its uplink, inside.
//!
//! # What it is not
//! No router between networks, no firewall, no translation between families, no application
//! helpers. Fragments are not translated (only the first has ports); they are dropped as
//! `not_transformable`.
//!
//! # How it works
//! Frames go through [`Nat::outbound`] (from the network) and [`Nat::inbound`] (from the uplink).
//! Each rewrites the frame in place and says what to do with it. On the network the router has its
//! own address ([`Config::router`]). It answers ARP (neighbour discovery) and echo for that
//! address, and forwards what is sent to its MAC.
//! - A guest's (protocol, address, port) gets one port of the uplink's address, for all its peers
//!   (RFC 4787: endpoint-independent mapping). Ports are taken from 1024 on; lower ones belong to
//!   forwards.
//! - A mapping belongs to the MAC that made it. Two guests that claim one address do not meet.
//!   Answers go to the MAC that asked, even if ARP says otherwise meanwhile.
//! - A forward is a rule (protocol, low port → guest address, port). A connection that comes
//!   through one is remembered with its peer, so that the answers leave with the forward's port.
//!   ARP requests are sent only for guests that forwards name. A claim that such an address has
//!   moved is believed once its holder does not answer for it.
//! - The uplink sends the first segment of a connection once and never again (passt of 2023). So
//!   the segment is kept and repeated until the guest answers: a guest that boots answers ARP
//!   before anything listens to it.
//! - Frames for a guest that is known to be away ([`Nat::set_away`]) are refused. A TCP segment is
//!   answered with a reset, the rest is dropped. A guest that merely does not answer may be
//!   booting, so its frames wait.
//! - ICMP errors about a translated packet are translated with the packet that they quote, both
//!   ways. So path MTU discovery, traceroute and "port unreachable" work through the router. The
//!   router itself answers a guest's packet whose hops are used up, at most fifty times a second,
//!   and no other.
//! - With IPv6 the uplink's own address is link-local (passt's is): the router speaks to it from
//!   the link-local address of its MAC, and guests see it as [`Config::host`]. Other link-local
//!   sources on the uplink are dropped as `bad_source`, since no guest could answer them.
//! - The maximum segment size of TCP is left alone. Network and uplink have one MTU, so what fits
//!   one fits the other. The errors above report a smaller MTU further away. (The user uplink ends
//!   TCP connections and makes its own.)
//! - Checksums are updated by difference (RFC 1624), never recomputed, so a frame damaged on the
//!   way stays damaged.
//!
//! # Limits
//! Each port of the switch has [`FLOWS_PER_SOURCE`] mappings, so a guest cannot spend its
//! neighbours' share by inventing addresses. At that limit the port's own oldest half-open or
//! closing connection, or silent datagram flow, goes first. When the ports of a protocol are used
//! up by many such sources, the one with the most mappings makes room for the others. Connections
//! through a forward are counted by forward and outside address (`forwarded`). A full share makes
//! room among its own connections, unconfirmed ones first. A UDP peer that the guest has not
//! answered is forgotten after 30 s. [`HELD`] frames of at most [`HELD_BYTES`] wait for guests.
//! When all places are taken, the guest that has the most gives one up. So each of n guests is sure
//! of its n-th part, and a guest alone may have them all. Each guest may have at most
//! [`HELD_DATAGRAMS`] datagrams. Among a guest's own frames, the outside address with the most
//! gives up its oldest. That is also the frame that the uplink gives up first. Beyond these limits
//! frames are dropped with a reason. An idle mapping is removed after its time.
//!
//! Time comes in as [`Nanos`]; one thread calls.

mod family;
mod flow;
mod forwarded;
mod held;
mod icmp;
mod kept;
mod mapping;
mod opening;
mod packet;
mod repeats;
pub mod uplink;

pub use family::Address;
pub use flow::Protocol;

use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;

use crate::Nanos;
use crate::drop::Reason;
use crate::frame::Mac;
use crate::limit::ChargedTo;
use crate::wait::Token;
use flow::{Direction, Flow, FlowState, Inside, Share, Taken};
use forwarded::{Forwarded, Table};
use held::Held;
use icmp::{End, Quote, echo_reply, time_exceeded};
use opening::Opening;
use packet::{ACK, Ethernet, Ip, RST, Readdressed, SYN, Transport, ethernet};

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
/// How long the holder of an address has to answer for it when somebody else claims it; it is asked
/// three times.
const RIVAL_NS: Nanos = Nanos(1_500_000_000);
/// The uplink's own address is asked for at most this often.
const ASK_PEER_NS: Nanos = Nanos(1_000_000_000);
/// First uplink port of guests' mappings; lower ones are for forwards.
pub const FIRST_PORT: u16 = 1024;

/// A datagram flow that was silent for so long may give way to a new one of its source.
const SILENT_NS: Nanos = Nanos(30 * 1_000_000_000);
/// ICMP errors of the router's own per second.
const ERRORS_PER_SECOND: u32 = 50;
/// How often idle mappings are looked for.
const SWEEP_NS: Nanos = Nanos(10 * 1_000_000_000);

/// One rule, uplink → guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward<A = Ipv4Addr> {
    /// TCP or UDP.
    pub protocol: Protocol,
    /// Port of the uplink's address, below [`FIRST_PORT`].
    pub port: u16,
    /// Address and port of the guest.
    pub to: (A, u16),
}

/// Addresses and forwards of a NAT router.
#[derive(Clone, Debug)]
pub struct Config<A = Ipv4Addr> {
    /// The router's MAC, on both sides.
    pub mac: Mac,
    /// The router's address on the network.
    pub router: A,
    /// Base address of the network.
    pub subnet: A,
    /// Prefix length of the network.
    pub prefix: u8,
    /// The address that the uplink knows.
    pub outside: A,
    /// The uplink's own address: where frames are sent to, and as what the host's own connections
    /// come.
    pub peer: A,
    /// As what guests see `peer`, if it is a link-local address, which they would look for on their
    /// own link. An address outside their network; of no account for IPv4.
    pub host: A,
    /// Connections from outside that are let in, and to which guest.
    pub forwards: Vec<Forward<A>>,
}

/// What becomes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It was rewritten and goes to the other side.
    Pass,
    /// It was rewritten into an answer and goes back to the side that it came from.
    Reply,
    /// It was not for the router, or it was taken in (an ARP answer, a frame that waits); nothing
    /// is sent.
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

/// The translation table and the router's two faces.
#[derive(Debug)]
pub struct Nat<A: Address = Ipv4Addr> {
    config: Config<A>,
    /// Uplink port → mapping.
    flows: HashMap<(Protocol, u16), Flow<A>>,
    /// Guest's end and MAC → uplink port.
    ports: HashMap<(Inside<A>, Mac), u16>,
    /// Ports of TCP, UDP, echo that are taken.
    taken: [Taken; 3],
    shares: HashMap<ChargedTo, Share>,
    next_id: u64,
    /// Connections that came through a forward.
    forwarded: Table<A>,
    neighbours: HashMap<A, Neighbour>,
    /// Guests that are known to be away.
    away: Vec<A>,
    held: VecDeque<Held<A>>,
    /// Held frames that were given up since the last poll.
    lost: u64,
    /// Held frames that no guest has seen and that gave way to others, since they were last asked
    /// for.
    displaced: u64,
    next_repeat: Nanos,
    /// Frames of the router's own for the network: ARP questions, and what waited for their
    /// answers.
    to_network: VecDeque<Vec<u8>>,
    /// Frames of the router's own for the uplink: ARP questions.
    to_uplink: VecDeque<Vec<u8>>,
    opening: Opening,
    peer_mac: Option<Mac>,
    peer_asked: Option<Nanos>,
    next_port: u16,
    next_sweep: Nanos,
    /// Errors of the router's own that are left in the second that began at the instant.
    errors_left: (Nanos, u32),
}

impl<A: Address> Nat<A> {
    /// A router without any mapping.
    pub fn new(config: Config<A>) -> Nat<A> {
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
            opening: Opening::new(),
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

    /// The uplink is a new one (its process was restarted): connections through the old one are
    /// forgotten.
    pub fn uplink_restarted(&mut self) {
        self.flows.clear();
        self.ports.clear();
        self.taken = std::array::from_fn(|_| Taken::new());
        self.shares.clear();
        self.forwarded.clear();
        self.opening.clear();
        self.lost += self.held.drain(..).filter(|held| !held.sent).count() as u64;
        self.peer_mac = None;
        self.to_uplink.clear();
        self.ask_peer(None);
    }

    /// Names the guests that are away (their machines do not run), instead of those named before.
    /// What is held for them is given up, and refused.
    pub fn set_away(&mut self, away: Vec<A>) {
        self.away = away;
        for held in std::mem::take(&mut self.held) {
            if !self.away.contains(&held.key.0.1) {
                self.held.push_back(held);
                continue;
            }
            self.lost += u64::from(!held.sent);
            let Some(port) = self.forwarded.remove(&held.key) else { continue };
            let ((_, peer, peer_port), Some(mac)) = (held.key, self.peer_mac) else { continue };
            let transport = Ip::<A>::of(&held.frame).and_then(|ip| ip.transport(&held.frame));
            let peer = self.beyond(peer);
            let (from, to) = ((self.own_towards(peer), port), (peer, peer_port));
            if let Ok(answer) = transport.map(|t| t.reset(&held.frame, from, to)) {
                self.to_uplink.extend(answer.map(|packet| ethernet::<A>(mac, self.config.mac, &packet)));
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
        let peer = self.config.peer;
        let question = A::question(self.config.mac, self.own_towards(peer), peer, None);
        self.to_uplink.push_back(question);
    }

    /// Asks the uplink for its own address, which it answers as long as it lives.
    pub fn ask_for_life(&mut self) {
        self.ask_peer(None);
    }

    /// Whether the uplink has said where it is since it was started. One that has no IPv6 outside
    /// never does so for IPv6.
    pub fn is_peer_known(&self) -> bool {
        self.peer_mac.is_some()
    }

    fn in_subnet(&self, ip: A) -> bool {
        ip.is_in(self.config.subnet, self.config.prefix)
    }

    /// As what the router is known to an address behind the uplink.
    fn own_towards(&self, outside: A) -> A {
        if !outside.is_scoped() {
            return self.config.outside;
        }
        A::scoped(self.config.mac).unwrap_or(self.config.outside)
    }

    /// The address behind the uplink that guests see as `seen`.
    fn beyond(&self, seen: A) -> A {
        if A::HAS_SCOPES && seen == self.config.host { self.config.peer } else { seen }
    }

    /// As what guests see an address behind the uplink; `None` for one that they could not answer,
    /// since it means something on the uplink's link or machine only.
    fn seen(&self, outside: A) -> Option<A> {
        let seen = if A::HAS_SCOPES && outside == self.config.peer { self.config.host } else { outside };
        (!seen.is_scoped() && !seen.is_loopback()).then_some(seen)
    }

    /// `mac` sent something as `ip`, which counts only where a forward leads there.
    fn learn(&mut self, now: Nanos, ip: A, mac: Mac) {
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
            // A rival that repeats itself gains no time, and a second one has to wait for the first
            // one's end.
            Some(known) if known.rival.is_some() => {}
            Some(known) => {
                let holder = known.mac;
                self.repeat_at(now.after(REPEAT_NS));
                self.neighbours.insert(ip, Neighbour { mac: holder, rival: Some((mac, now)) });
                self.ask(ip, Some(holder));
            }
        }
    }

    fn repeat_at(&mut self, at: Nanos) {
        // Called before what it is for is written down.
        self.next_repeat = self.deadline().map_or(at, |due| due.min(at));
    }

    /// A frame from the network, that came in by the port `ingress` of the switch.
    pub fn outbound(&mut self, now: Nanos, ingress: Option<Token>, frame: &mut Vec<u8>) -> Verdict {
        self.sweep(now);
        let Some(ethernet) = Ethernet::of(frame) else { return Verdict::Drop(Reason::Runt) };
        if A::is_link_message(frame, ethernet.kind) {
            return self.message_from_network(now, ethernet.from, frame);
        }
        // Flooded frames of others, the other family, broadcasts: not the router's business.
        if ethernet.kind != A::ETHERTYPE || ethernet.to != self.config.mac {
            return Verdict::Taken;
        }
        match self.route_out(now, ethernet.from, ingress, frame) {
            Ok(verdict) => verdict,
            Err(reason) => Verdict::Drop(reason),
        }
    }

    fn message_from_network(&mut self, now: Nanos, from: Mac, frame: &mut Vec<u8>) -> Verdict {
        let Some(message) = A::link_message(frame) else { return Verdict::Taken };
        // Who answers for somebody else, or under another name than its own, is not believed.
        if message.sender != from {
            return Verdict::Drop(Reason::BadSource);
        }
        self.learn(now, message.sender_ip, message.sender);
        if !message.is_question || message.target_ip != self.config.router {
            return Verdict::Taken;
        }
        *frame = A::answer(self.config.mac, self.config.router, &message);
        Verdict::Reply
    }

    fn route_out(
        &mut self,
        now: Nanos,
        from: Mac,
        ingress: Option<Token>,
        frame: &mut [u8],
    ) -> Result<Verdict, Reason> {
        let ip = Ip::<A>::of(frame)?;
        let is_neighbour = ip.from.is_scoped() && ip.to == self.config.router;
        if !self.in_subnet(ip.from) && !is_neighbour || ip.from == self.config.router {
            return Err(Reason::BadSource);
        }
        self.learn(now, ip.from, from);
        if ip.to == self.config.router {
            return Ok(echo_reply(&ip, frame));
        }
        let quote = Quote::of(frame, &ip)?;
        if self.in_subnet(ip.to) || !ip.to.is_host() || ip.to.is_loopback() || ip.to.is_scoped() {
            return Err(Reason::NoDestination);
        }
        let to = self.beyond(ip.to);
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
        // What does not go to the uplink says nothing of the connection there, so it is not noted.
        let known = self.forwarded.port_of(&key).or_else(|| self.ports.get(&(inside, from)).copied());
        if let Some(port) = known.filter(|_| self.peer_mac.is_some()) {
            self.lets_out(now, (port, to, peer_port), &transport, frame)?;
        }
        let port = match self.forwarded.note(now, &key, |state| state.note(now, Direction::Out, &transport, frame)) {
            Some(port) => {
                // It is answered.
                self.held.retain(|held| held.key != key);
                port
            }
            // The uplink's own address represents the host there; only answers go to it.
            None if to == self.config.peer || to == self.config.outside => return Err(Reason::NoDestination),
            None => {
                self.map(now, from, ingress.map_or(ChargedTo::Mac(from), ChargedTo::Port), inside, &transport, frame)?
            }
        };
        let Some(peer_mac) = self.peer_mac else {
            self.ask_peer(Some(now));
            return Err(Reason::LinkDown);
        };
        if known.is_none() {
            self.lets_out(now, (port, to, peer_port), &transport, frame)?;
        }
        ip.live(frame)?;
        let own = self.own_towards(to);
        ip.rewrite_source(frame, own);
        let mut addresses = Readdressed::of(ip.from, own);
        if to != ip.to {
            ip.rewrite_destination(frame, to);
            addresses = addresses.and(ip.to, to);
        }
        transport.rewrite::<A>(frame, transport.source_at(), port, addresses);
        frame[0..6].copy_from_slice(&peer_mac);
        frame[6..12].copy_from_slice(&self.config.mac);
        Ok(Verdict::Pass)
    }

    /// Whether a segment may go to the uplink now. `seen` is what the uplink knows the connection by:
    /// its port, which several of a guest's may get one after the other, and the peer.
    fn lets_out(&mut self, now: Nanos, seen: (u16, A, u16), transport: &Transport, frame: &[u8]) -> Result<(), Reason> {
        let is_early =
            transport.protocol == Protocol::Tcp && !self.opening.lets_out(now, &seen, transport.flags(frame).0);
        if is_early { Err(Reason::UplinkOpening) } else { Ok(()) }
    }

    /// A frame from the uplink.
    pub fn inbound(&mut self, now: Nanos, frame: &mut Vec<u8>) -> Verdict {
        self.sweep(now);
        let Some(ethernet) = Ethernet::of(frame) else { return Verdict::Drop(Reason::Runt) };
        if A::is_link_message(frame, ethernet.kind) {
            return self.message_from_uplink(ethernet.from, frame);
        }
        if ethernet.kind != A::ETHERTYPE {
            return Verdict::Taken;
        }
        match self.route_in(now, frame) {
            Ok(verdict) => verdict,
            Err(reason) => Verdict::Drop(reason),
        }
    }

    fn message_from_uplink(&mut self, from: Mac, frame: &mut Vec<u8>) -> Verdict {
        let Some(message) = A::link_message(frame) else { return Verdict::Taken };
        if message.sender_ip == self.config.peer && message.sender == from {
            self.peer_mac = Some(message.sender);
        }
        if message.is_question && self.is_own(message.target_ip) {
            *frame = A::answer(self.config.mac, message.target_ip, &message);
            return Verdict::Reply;
        }
        Verdict::Taken
    }

    /// Whether the uplink knows the router as `address`.
    fn is_own(&self, address: A) -> bool {
        address == self.config.outside || (A::HAS_SCOPES && Some(address) == A::scoped(self.config.mac))
    }

    fn route_in(&mut self, now: Nanos, frame: &mut Vec<u8>) -> Result<Verdict, Reason> {
        let ip = Ip::<A>::of(frame)?;
        if !self.is_own(ip.to) {
            return Err(Reason::NoDestination);
        }
        let seen = self.seen(ip.from).ok_or(Reason::BadSource)?;
        if let Some(quote) = Quote::of(frame, &ip)? {
            return self.error_in(&ip, &quote, seen, frame);
        }
        let transport = ip.transport(frame)?;
        let port =
            if transport.protocol == Protocol::Echo { transport.source(frame) } else { transport.destination(frame) };
        let protocol = transport.protocol;
        if self.is_away(protocol, port) {
            let (from, to) = ((ip.to, port), (ip.from, transport.source(frame)));
            let answer = transport.reset(frame, from, to).ok_or(Reason::NoDestination)?;
            let station = Ethernet::of(frame).ok_or(Reason::Runt)?.from;
            *frame = ethernet::<A>(station, self.config.mac, &answer);
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
            let key = ((protocol, to, to_port), seen, transport.source(frame));
            self.note_forwarded(now, key, (rule, port), &transport, frame)?;
            (key.0, self.neighbours.get(&to).map(|n| n.mac), Some(key))
        };
        if protocol == Protocol::Tcp {
            self.opening.answered(now, &(port, ip.from, transport.source(frame)), transport.flags(frame).0);
        }
        let (_, guest, guest_port) = inside;
        let is_syn = protocol == Protocol::Tcp && transport.flags(frame).0 & (SYN | ACK) == SYN;
        ip.live(frame)?;
        ip.rewrite_destination(frame, guest);
        let at = if transport.protocol == Protocol::Echo { transport.source_at() } else { transport.at + 2 };
        let mut addresses = Readdressed::of(ip.to, guest);
        if seen != ip.from {
            ip.rewrite_source(frame, seen);
            addresses = addresses.and(ip.from, seen);
        }
        transport.rewrite::<A>(frame, at, guest_port, addresses);
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
                    self.ask(guest, None);
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

    /// An error about a packet that a guest sent: it goes to that guest, who then knows its own
    /// packet in it. Where it comes from stays as it is, which is what a traceroute shows. It
    /// neither keeps a mapping alive nor ends one.
    fn error_in(&self, ip: &Ip<A>, quote: &Quote<A>, seen: A, frame: &mut [u8]) -> Result<Verdict, Reason> {
        let peer = self.seen(quote.to).filter(|_| self.is_own(quote.from)).ok_or(Reason::NoDestination)?;
        let (inside, station) = match self.flows.get(&(quote.protocol, quote.from_port)) {
            Some(flow) => (flow.inside, Some(flow.station)),
            None => {
                let is_rule = |f: &&Forward<A>| f.protocol == quote.protocol && f.port == quote.from_port;
                let (to, port) = self.config.forwards.iter().find(is_rule).ok_or(Reason::NoDestination)?.to;
                let inside = (quote.protocol, to, port);
                if self.forwarded.get(&(inside, peer, quote.to_port)).is_none() {
                    return Err(Reason::NoDestination);
                }
                (inside, self.neighbours.get(&to).map(|n| n.mac))
            }
        };
        let station = station.ok_or(Reason::NoDestination)?;
        let (_, guest, port) = inside;
        ip.live(frame)?;
        ip.rewrite_destination(frame, guest);
        ip.rewrite_source(frame, seen);
        let outer = Readdressed::of(ip.to, guest).and(ip.from, seen);
        quote.rewrite(frame, (guest, peer), End::Source, port, outer);
        frame[0..6].copy_from_slice(&station);
        frame[6..12].copy_from_slice(&self.config.mac);
        Ok(Verdict::Pass)
    }

    /// A guest's error about a packet that came to it: it leaves as if the uplink's address had got
    /// that packet.
    fn error_out(&self, station: Mac, ip: &Ip<A>, quote: &Quote<A>, frame: &mut [u8]) -> Result<Verdict, Reason> {
        // It is about its own packet, and goes to that packet's sender: no host complains in
        // another's name.
        if quote.to != ip.from || quote.from != ip.to {
            return Err(Reason::BadSource);
        }
        let inside = (quote.protocol, ip.from, quote.to_port);
        let forwarded = self.forwarded.get(&(inside, quote.from, quote.from_port)).map(|(port, _)| port);
        let to = self.beyond(ip.to);
        let to_host = to == self.config.peer || to == self.config.outside;
        let mapped = self.ports.get(&(inside, station)).copied().filter(|_| !to_host);
        let port = forwarded.or(mapped).ok_or(Reason::NoDestination)?;
        let peer_mac = self.peer_mac.ok_or(Reason::LinkDown)?;
        ip.live(frame)?;
        let own = self.own_towards(to);
        ip.rewrite_source(frame, own);
        ip.rewrite_destination(frame, to);
        let outer = Readdressed::of(ip.from, own).and(ip.to, to);
        quote.rewrite(frame, (to, own), End::Destination, port, outer);
        frame[0..6].copy_from_slice(&peer_mac);
        frame[6..12].copy_from_slice(&self.config.mac);
        Ok(Verdict::Pass)
    }

    /// Tells a guest that its packet's hops are used up, unless there was enough of that in this
    /// second.
    fn complain(&mut self, now: Nanos, ip: &Ip<A>, frame: &[u8]) {
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
        key: Forwarded<A>,
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
        let added = self.forwarded.add(now, key, rule, FlowState::new(now, Direction::In, t, frame));
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

    fn ask(&mut self, guest: A, to: Option<Mac>) {
        let question = A::question(self.config.mac, self.config.router, guest, to);
        self.to_network.push_back(question);
    }

    /// When [`Nat::poll`] is due, if ever.
    pub fn deadline(&self) -> Option<Nanos> {
        let rivals = self.neighbours.values().any(|n| n.rival.is_some());
        (rivals || !self.held.is_empty()).then_some(self.next_repeat)
    }

    /// Asks guests that have not answered again, and repeats what they have not answered; gives up
    /// what waited too long. Returns how many frames were lost that no guest has seen, and when to
    /// be called again, if ever.
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
                self.ask(guest, None);
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
                self.ask(ip, Some(holder));
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
#[cfg(test)]
mod tests6;
