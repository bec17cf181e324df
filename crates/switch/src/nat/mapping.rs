//! The mappings of guests' ends to ports of the uplink's address: who holds how many, and which
//! give way.

use super::family::Address;
use super::flow::{Direction, Flow, FlowState, Inside};
use super::packet::Transport;
use super::{FIRST_PORT, FLOWS_PER_SOURCE, Nat, Protocol, SILENT_NS};
use crate::Nanos;
use crate::drop::Reason;
use crate::frame::Mac;
use crate::limit::ChargedTo;

/// Candidates that are looked at for one that may give way, per new flow.
const TRIES: usize = 16;

impl<A: Address> Nat<A> {
    pub(super) fn map(
        &mut self,
        now: Nanos,
        station: Mac,
        source: ChargedTo,
        inside: Inside<A>,
        t: &Transport,
        frame: &[u8],
    ) -> Result<u16, Reason> {
        let protocol = inside.0;
        if let Some(&port) = self.ports.get(&(inside, station)) {
            let flow = self.flows.get_mut(&(protocol, port)).expect("ports and flows name each other");
            flow.state.note(now, Direction::Out, t, frame);
            if flow.source != source && matches!(flow.source, ChargedTo::Mac(_)) {
                self.charge(protocol, port, source);
            }
            self.enqueue(protocol, port);
            return Ok(port);
        }
        if protocol == Protocol::Echo && !t.is_echo_request::<A>(frame) {
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
            // Only with many sources at their limits, so this is no look-up of every frame. The one
            // with the most makes room, also of what is not silent, as long as it then still has as
            // much as this one.
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
        let state = FlowState::new(now, Direction::Out, t, frame);
        let flow = Flow { inside, station, source, state, queued: false, id: self.next_id };
        self.flows.insert((protocol, port), flow);
        self.ports.insert((inside, station), port);
        self.taken[protocol as usize].set(port, true);
        self.shares.entry(source).or_default().held += 1;
        self.enqueue(protocol, port);
        Ok(port)
    }

    /// Charges a mapping that was taken over from another process to the port of the switch that it
    /// belongs to.
    fn charge(&mut self, protocol: Protocol, port: u16, source: ChargedTo) {
        self.next_id += 1;
        let Some(flow) = self.flows.get_mut(&(protocol, port)) else { return };
        // Another number, so that the old queue's entry is a dead one.
        (flow.id, flow.queued) = (self.next_id, false);
        let before = std::mem::replace(&mut flow.source, source);
        self.shares.entry(source).or_default().held += 1;
        self.discharge(before);
    }

    fn discharge(&mut self, source: ChargedTo) {
        if let Some(share) = self.shares.get_mut(&source) {
            share.held -= 1;
            if share.held == 0 {
                self.shares.remove(&source);
            }
        }
    }

    /// Puts a mapping that may have to give way into its source's queue.
    pub(super) fn enqueue(&mut self, protocol: Protocol, port: u16) {
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

    /// Ends the oldest mapping of `source` that can give way; whether there was one among the first
    /// of its queue. With `wanted` it has to be of that protocol, and datagram flows need not be
    /// silent.
    fn make_room(&mut self, now: Nanos, source: ChargedTo, wanted: Option<Protocol>) -> bool {
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

    pub(super) fn end_flow(&mut self, protocol: Protocol, port: u16) {
        let Some(flow) = self.flows.remove(&(protocol, port)) else { return };
        self.ports.remove(&(flow.inside, flow.station));
        self.taken[protocol as usize].set(port, false);
        self.discharge(flow.source);
    }
}
