//! Ports of containers that cannot be attached: parked, and tried again.
//!
//! # Purpose
//! A container is root in its own namespace. It can put another interface in the place of its own,
//! or keep its tap open, so that the kernel does not let the daemon attach. That is the container's
//! own loss: the fabric and all other members start without it. The port is in the worker as one
//! that is down, with its name, its addresses and the reason, and is tried again with a back-off.
//!
//! # Invariants
//! - Only members with `container` are parked when the fabric starts or is changed. An addition by
//!   the API fails instead, so that the runtime is told.
//! - A parked port holds nothing of the namespace.
//! - It is replaced once the real one is open: until then its addresses stay taken.
//!
//! # Limits
//! A try takes a few system calls of the control plane's time, every 30 s for each parked port
//! once it has failed six times.

use std::time::Instant;

use tombolo_switch::Nanos;
use tombolo_switch::detail::Details;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::Batch;
use tombolo_switch::port::{Caps, Fault, Link, Port, Sent};

use super::backoff::Backoff;
use super::events::{Facts as Told, Kind};
use super::{FabricError, Running};
use crate::plan::{Attachment, PortPlan};

/// That a port is parked, and when it is tried again.
#[derive(Clone)]
pub(crate) struct Parked {
    why: String,
    backoff: Backoff,
    again_at: Instant,
}

/// The port of a worker that stands for one that could not be attached.
struct ParkedPort {
    kind: &'static str,
    mtu: u32,
    why: String,
}

impl Port for ParkedPort {
    fn kind(&self) -> &'static str {
        self.kind
    }
    fn link(&self) -> Link {
        Link::Down
    }
    fn caps(&self) -> Caps {
        Caps::plain(self.mtu)
    }
    fn service(&mut self, _: Nanos) -> Result<Option<Nanos>, Fault> {
        Ok(None)
    }
    fn receive<'m>(&'m mut self, _: usize, _: &mut Batch<'m>, _: &mut Drops) -> Result<usize, Fault> {
        Ok(0)
    }
    fn release(&mut self) -> Result<(), Fault> {
        Ok(())
    }
    fn transmit(&mut self, _: &Batch<'_>, which: &[u16], drops: &mut Drops) -> Result<Sent, Fault> {
        drops.count(Reason::LinkDown, which.len() as u64);
        Ok(Sent::default())
    }
    fn flush(&mut self) -> Result<(), Fault> {
        Ok(())
    }
    fn arm(&mut self) -> Result<bool, Fault> {
        Ok(false)
    }
    fn disarm(&mut self) {}
    fn reset(&mut self, _: &Fault) {}
    fn details(&self) -> Details {
        let hint = format!("it is parked, since it cannot be attached, and is tried again: {}", self.why);
        vec![("state", "parked".to_string().into()), ("hint", hint.into())]
    }
}

fn kind_of(plan: &PortPlan) -> &'static str {
    match plan.attachment {
        Attachment::Tap { .. } => "tap",
        Attachment::Packet { .. } => "packet",
        Attachment::VhostUser { .. } => "vhost-user",
        _ => "parked",
    }
}

impl Running {
    /// Adds a planned port. One of a container is parked where it cannot be attached.
    ///
    /// # Errors
    /// As for [`Running::add_port`]: of a port that belongs to no container, or of a worker that has ended.
    pub(super) fn add_port_or_park(&mut self, plan: &PortPlan) -> Result<(), FabricError> {
        match self.add_port(plan) {
            Err(FabricError::Port { why, .. }) if self.is_contained(&plan.name) => self.park(plan, &why),
            done => done,
        }
    }

    fn park(&mut self, plan: &PortPlan, why: &str) -> Result<(), FabricError> {
        let (mut backoff, now) = (Backoff::CONTAINER, Instant::now());
        let again_at = now + backoff.failed(now, now);
        self.put_parked(plan, Parked { why: why.into(), backoff, again_at })?;
        let text = format!("port {} is parked: it cannot be attached, and is tried again", plan.name);
        (self.say)(&format!("{text}: {why}"));
        let facts = Told::of(&plan.name).network(&plan.network).cause(why);
        self.events.add(Kind::Fault, facts, &text);
        Ok(())
    }

    fn put_parked(&mut self, plan: &PortPlan, parked: Parked) -> Result<(), FabricError> {
        let port = ParkedPort { kind: kind_of(plan), mtu: plan.mtu.into(), why: parked.why.clone() };
        self.hand_to_worker(plan, Box::new(port))?;
        if let Some(port) = self.ports.get_mut(&plan.name) {
            port.parked = Some(parked);
        }
        Ok(())
    }

    /// Tries the parked ports again whose time has come.
    pub(super) fn try_parked(&mut self, now: Instant) {
        let due = |port: &&super::RunningPort| port.parked.as_ref().is_some_and(|parked| parked.again_at <= now);
        let due: Vec<PortPlan> = self.ports.values().filter(due).map(|port| port.plan.clone()).collect();
        for plan in due {
            let parked = self.ports.get(&plan.name).and_then(|port| port.parked.clone());
            let Err(error) = self.add_port(&plan) else {
                let text = format!("port {} is attached again", plan.name);
                self.events.add(Kind::Recovery, Told::of(&plan.name).network(&plan.network), &text);
                self.note_containers();
                continue;
            };
            let Some(mut parked) = parked else { continue };
            let why = match error {
                FabricError::Port { why, .. } => why,
                other => other.to_string(),
            };
            parked.again_at = now + parked.backoff.failed(now, now);
            match self.ports.get_mut(&plan.name) {
                Some(port) if why == parked.why => port.parked = Some(parked),
                // Its status tells the reason of now.
                _ => {
                    self.drop_port(&plan.name);
                    if let Err(error) = self.put_parked(&plan, Parked { why, ..parked }) {
                        (self.say)(&format!("port {}: {error}", plan.name));
                    }
                }
            }
        }
    }

    pub(super) fn is_contained(&self, name: &str) -> bool {
        self.spec.contained().any(|member| member.name == name)
    }

    pub(super) fn is_parked(&self, name: &str) -> bool {
        self.ports.get(name).is_some_and(|port| port.parked.is_some())
    }
}
