//! The router's table as bytes, for a daemon that takes over while connections run.
//!
//! ```text
//! version u8 (1 for IPv4, 129 for IPv6) · has peer MAC u8 · peer MAC 6 · next port u16 · then five lists, each a count u32 and its entries:
//! flows       outside port u16 · inside · MAC 6 · state 13
//! forwarded   inside · peer · forward's port u16 · state 13
//! neighbours  address · MAC 6
//! held        inside · peer · since u64 · flags u8 (1 first segment, 2 sent) · bytes u32 · frame
//! inside      protocol u8 (0 TCP, 1 UDP, 2 echo) · address · port u16;   peer: address · port u16
//! state       last use u64 · flags u8 (1 answered, 2 first came in, 4 done out, 8 done in, 16 reset)
//! ```
//! Numbers are little-endian, addresses as on the wire (4 or 16 bytes). Instants are those of the
//! monotonic clock, which both daemons share. A mapping is charged to its MAC until its guest uses
//! it, since ports of the switch have other numbers.

use super::family::Address;
use super::flow::{Direction, Flow, FlowState, Inside};
use super::forwarded::Forwarded;
use super::{Config, FIRST_PORT, FLOWS_PER_SOURCE, Forward, HELD, HELD_BYTES, Held, Nat, Neighbour, Protocol};
use crate::Nanos;
use crate::frame::Mac;
use crate::limit::ChargedTo;

const PROTOCOLS: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Echo];

fn put_inside<A: Address>(out: &mut Vec<u8>, (protocol, address, port): Inside<A>) {
    out.push(protocol as u8);
    out.extend(address.bytes().as_ref());
    out.extend(port.to_le_bytes());
}

fn put_state(out: &mut Vec<u8>, state: &FlowState) {
    let flags = [state.answered, state.first == Direction::In, state.done[0], state.done[1], state.reset];
    out.extend(state.last.0.to_le_bytes());
    out.push(flags.iter().enumerate().map(|(bit, set)| u8::from(*set) << bit).sum());
}

fn put_forwarded<A: Address>(out: &mut Vec<u8>, (inside, peer, port): &Forwarded<A>) {
    put_inside(out, *inside);
    out.extend(peer.bytes().as_ref());
    out.extend(port.to_le_bytes());
}

struct Reader<'r>(&'r [u8]);

impl<'r> Reader<'r> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (taken, rest) = self.0.split_first_chunk().ok_or("the stored table of the router ends early")?;
        self.0 = rest;
        Ok(*taken)
    }

    fn byte(&mut self) -> Result<u8, String> {
        self.take().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, String> {
        self.take().map(u16::from_le_bytes)
    }

    fn count(&mut self) -> Result<u32, String> {
        self.take().map(u32::from_le_bytes)
    }

    fn address<A: Address>(&mut self) -> Result<A, String> {
        self.bytes(A::BYTES).map(A::read)
    }

    fn inside<A: Address>(&mut self) -> Result<Inside<A>, String> {
        let number = self.byte()?;
        let protocol = PROTOCOLS.get(usize::from(number)).ok_or_else(|| format!("protocol {number} in the table"))?;
        Ok((*protocol, self.address()?, self.u16()?))
    }

    fn forwarded<A: Address>(&mut self) -> Result<Forwarded<A>, String> {
        Ok((self.inside()?, self.address()?, self.u16()?))
    }

    fn state(&mut self, protocol: Protocol) -> Result<FlowState, String> {
        let last = Nanos(u64::from_le_bytes(self.take()?));
        let flags = self.byte()?;
        let bit = |bit: u8| flags & 1 << bit != 0;
        let first = if bit(1) { Direction::In } else { Direction::Out };
        Ok(FlowState { protocol, last, answered: bit(0), first, done: [bit(2), bit(3)], reset: bit(4) })
    }

    fn bytes(&mut self, len: usize) -> Result<&'r [u8], String> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or("the stored table of the router ends early")?;
        self.0 = rest;
        Ok(taken)
    }
}

impl<A: Address> Nat<A> {
    /// The table, for [`Nat::take_up`] in another process.
    pub fn hand_over(&self) -> Vec<u8> {
        let mut out = vec![A::TABLE_VERSION, u8::from(self.peer_mac.is_some())];
        out.extend(self.peer_mac.unwrap_or_default());
        out.extend(self.next_port.to_le_bytes());
        // No overflow of the counts: there are at most 65,536 ports of each protocol, and 1023
        // forwards of each, with at most 16,384 connections.
        out.extend((self.flows.len() as u32).to_le_bytes());
        for ((_, port), flow) in &self.flows {
            out.extend(port.to_le_bytes());
            put_inside(&mut out, flow.inside);
            out.extend(flow.station);
            put_state(&mut out, &flow.state);
        }
        out.extend((self.forwarded.len() as u32).to_le_bytes());
        for (key, port, state) in self.forwarded.iter() {
            put_forwarded(&mut out, key);
            out.extend(port.to_le_bytes());
            put_state(&mut out, state);
        }
        out.extend((self.neighbours.len() as u32).to_le_bytes());
        for (address, neighbour) in &self.neighbours {
            out.extend(address.bytes().as_ref());
            out.extend(neighbour.mac);
        }
        out.extend((self.held.len() as u32).to_le_bytes());
        for held in &self.held {
            put_forwarded(&mut out, &held.key);
            out.extend(held.since.0.to_le_bytes());
            out.push(u8::from(held.is_first) | u8::from(held.sent) << 1);
            out.extend((held.frame.len() as u32).to_le_bytes());
            out.extend_from_slice(&held.frame);
        }
        out
    }

    /// A router with the table of another process. What no longer fits `config` is left out.
    ///
    /// # Errors
    /// For a table of another version, or a broken one, in words.
    pub fn take_up(config: Config<A>, table: &[u8]) -> Result<Nat<A>, String> {
        let mut nat = Nat::new(config);
        let mut reader = Reader(table);
        let version = reader.byte()?;
        if version != A::TABLE_VERSION {
            let expected = A::TABLE_VERSION;
            return Err(format!("the stored table of the router has version {version}, expected {expected}"));
        }
        let known = reader.byte()? != 0;
        let peer: Mac = reader.take()?;
        nat.next_port = reader.u16()?.max(FIRST_PORT);
        if known {
            nat.peer_mac = Some(peer);
            nat.to_uplink.clear();
        }
        for _ in 0..reader.count()? {
            let port = reader.u16()?;
            let inside = reader.inside()?;
            let station: Mac = reader.take()?;
            let state = reader.state(inside.0)?;
            nat.put_flow(port, inside, station, state);
        }
        let mut forwarded = Vec::new();
        for _ in 0..reader.count()? {
            let key = reader.forwarded()?;
            let port = reader.u16()?;
            forwarded.push((key, port, reader.state(key.0.0)?));
        }
        // The table is in the order of last use.
        forwarded.sort_by_key(|(.., state)| state.last);
        for (key, port, state) in forwarded {
            let to = (key.0.1, key.0.2);
            let is_its = |f: &Forward<A>| f.protocol == key.0.0 && f.port == port && f.to == to;
            if let Some(rule) = nat.config.forwards.iter().position(is_its)
                && nat.forwarded.get(&key).is_none()
            {
                // Refused or displaced where the file now has more forwards, and so smaller shares.
                let _ = nat.forwarded.add(state.last, key, (rule, port), state);
            }
        }
        for _ in 0..reader.count()? {
            let (address, mac) = (reader.address()?, reader.take()?);
            nat.neighbours.insert(address, Neighbour { mac, rival: None });
        }
        for _ in 0..reader.count()? {
            let key = reader.forwarded()?;
            let since = Nanos(u64::from_le_bytes(reader.take()?));
            let flags = reader.byte()?;
            let len = reader.count()? as usize;
            let frame = reader.bytes(len)?.to_vec();
            if nat.held.len() < HELD && (14..=HELD_BYTES).contains(&len) {
                nat.held.push_back(Held { key, since, is_first: flags & 1 != 0, sent: flags & 2 != 0, frame });
            }
        }
        Ok(nat)
    }

    fn put_flow(&mut self, port: u16, inside: Inside<A>, station: Mac, state: FlowState) {
        let (protocol, source) = (inside.0, ChargedTo::Mac(station));
        let free = port >= FIRST_PORT && !self.flows.contains_key(&(protocol, port));
        if !free || self.ports.contains_key(&(inside, station)) || !self.in_subnet(inside.1) {
            return;
        }
        let share = self.shares.entry(source).or_default();
        if share.held >= FLOWS_PER_SOURCE {
            return;
        }
        share.held += 1;
        let (id, queued) = (self.next_id, state.may_yield());
        self.next_id += 1;
        if queued {
            share.yielding.push_back((protocol, port, id));
        }
        self.taken[protocol as usize].set(port, true);
        self.ports.insert((inside, station), port);
        self.flows.insert((protocol, port), Flow { inside, station, source, state, queued, id });
    }
}
