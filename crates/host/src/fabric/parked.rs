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
//! - It is tried again until it is attached or removed, whatever fails: also while its worker takes
//!   no port.
//! - What is in the namespace is looked at without the lock of [`Running`].
//!
//! # Limits
//! A try takes a few system calls of the control plane's time, every 30 s for each parked port
//! once it has failed six times.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tombolo_switch::Nanos;
use tombolo_switch::detail::Details;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::Batch;
use tombolo_switch::port::{Caps, Carrier, Fault, Port, Sent};

use super::backoff::Backoff;
use super::events::{Facts as Told, Kind};
use super::ports::{NOWHERE, RunningPort};
use super::{FabricError, Running};
use crate::plan::{Attachment, PortPlan};
use crate::rundir::ContainerPlace;

/// Why a port is parked, for the control plane, and for the worker that tells it.
#[derive(Clone)]
struct Why(Arc<Mutex<String>>);

impl Why {
    fn new(text: &str) -> Why {
        Why(Arc::new(Mutex::new(text.into())))
    }

    fn text(&self) -> MutexGuard<'_, String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// That a port is parked, and when it is tried again.
pub(crate) struct Parked {
    why: Why,
    backoff: Backoff,
    again_at: Instant,
}

/// The port of a worker that stands for one that could not be attached.
struct ParkedPort {
    kind: &'static str,
    mtu: u32,
    why: Why,
}

impl ParkedPort {
    fn of(plan: &PortPlan, why: &Why) -> Box<ParkedPort> {
        Box::new(ParkedPort { kind: kind_of(plan), mtu: plan.mtu.into(), why: why.clone() })
    }
}

impl Port for ParkedPort {
    fn kind(&self) -> &'static str {
        self.kind
    }
    fn link(&self) -> Carrier {
        Carrier::Down
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
        let hint = format!("it is parked, since it cannot be attached, and is tried again: {}", self.why.text());
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
    /// As for [`Running::add_port`]: of a port that belongs to no container, or of a worker that
    /// has ended.
    pub(super) fn add_port_or_park(&mut self, plan: &PortPlan) -> Result<(), FabricError> {
        let added = match self.silent.get(&plan.name).cloned() {
            None => self.add_port(plan),
            Some(why) => {
                let handed = self.take_handed(plan);
                let needs_namespace = match &plan.attachment {
                    // A tap that was handed over is open.
                    Attachment::Tap { .. } => handed.as_ref().is_none_or(|handed| handed.fds.is_empty()),
                    Attachment::Packet { netns, .. } => netns.is_some(),
                    _ => false,
                };
                match needs_namespace {
                    true => Err(FabricError::Port { port: plan.name.clone(), why }),
                    false => self.add_handed_port(plan, handed),
                }
            }
        };
        match added {
            Err(FabricError::Port { why, .. }) if self.is_contained(&plan.name) => self.park(plan, &why),
            done => done,
        }
    }

    fn park(&mut self, plan: &PortPlan, why: &str) -> Result<(), FabricError> {
        let (mut backoff, now) = (Backoff::CONTAINER, Instant::now());
        let again_at = now + backoff.failed(now, now);
        let parked = Parked { why: Why::new(why), backoff, again_at };
        let (worker, token) = self.hand_to_worker(plan, ParkedPort::of(plan, &parked.why))?;
        let parked = Some(parked);
        let port = RunningPort { plan: plan.clone(), worker, token, passt: None, directory: None, parked };
        self.ports.insert(plan.name.clone(), port);
        let text = format!("port {} is parked: it cannot be attached, and is tried again", plan.name);
        (self.say)(&format!("{text}: {why}"));
        let facts = Told::of(&plan.name).network(&plan.network).cause(why);
        self.events.add(Kind::Fault, facts, &text);
        Ok(())
    }

    /// The parked ports whose time has come, and what was noted of their namespaces. They are
    /// looked at without the lock that protects this ([`super::containers::check_place`]).
    pub(super) fn parked_that_are_due(&self, now: Instant) -> Vec<(PortPlan, Option<ContainerPlace>)> {
        if self.applying {
            return vec![];
        }
        let due = self.ports.values().filter(|port| port.parked.as_ref().is_some_and(|parked| parked.again_at <= now));
        due.map(|port| (port.plan.clone(), self.containers.get(&port.plan.name).cloned())).collect()
    }

    /// Tries a parked port again. `checked` is what a look at `place` has found.
    pub(super) fn try_parked(
        &mut self,
        plan: &PortPlan,
        place: Option<&ContainerPlace>,
        checked: Result<(), String>,
        now: Instant,
    ) {
        // It may have been removed, and added again, during the look.
        let is_it = self.ports.get(&plan.name).is_some_and(|port| port.parked.is_some() && port.plan == *plan);
        if self.applying || !is_it || self.containers.get(&plan.name) != place {
            return;
        }
        let why = match checked.map(|()| self.add_checked_port(plan)) {
            Ok(Ok(())) => {
                let text = format!("port {} is attached again", plan.name);
                self.events.add(Kind::Recovery, Told::of(&plan.name).network(&plan.network), &text);
                self.note_containers();
                return;
            }
            Ok(Err(FabricError::Port { why, .. })) | Err(why) => why,
            Ok(Err(other)) => other.to_string(),
        };
        let Some(port) = self.ports.get_mut(&plan.name) else { return };
        let token = port.token;
        let Some(parked) = &mut port.parked else { return };
        parked.again_at = now + parked.backoff.failed(now, now);
        *parked.why.text() = why;
        if token != NOWHERE {
            return;
        }
        let stand_in = ParkedPort::of(plan, &parked.why);
        match self.hand_to_worker(plan, stand_in) {
            Ok((worker, token)) => {
                self.ports.entry(plan.name.clone()).and_modify(|port| (port.worker, port.token) = (worker, token));
            }
            // The next try is one for this, too.
            Err(error) => (self.say)(&format!("port {} is in no worker, and is tried again: {error}", plan.name)),
        }
    }

    pub(super) fn is_contained(&self, name: &str) -> bool {
        self.spec.contained().any(|member| member.name == name)
    }

    pub(super) fn is_parked(&self, name: &str) -> bool {
        self.ports.get(name).is_some_and(|port| port.parked.is_some())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};
    use std::path::{Path, PathBuf};
    use std::time::Duration;

    use tombolo_port::link::Netns;
    use tombolo_port::tap::{TapConfig, make};

    use super::*;
    use crate::plan::{self, Facts};
    use crate::rundir::RunDir;

    const LATER: Duration = Duration::from_secs(3600);

    #[test]
    fn a_parked_port_is_tried_again_though_its_worker_has_ended_and_is_attached_by_the_next() {
        let netns = match Netns::anonymous() {
            Ok(netns) => netns,
            Err(error) => return tombolo_testing::skip(error),
        };
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "name = \"demo\"\n[network.lan]\n[tap.pod]\nadopt = true\ndevice = \"eth0\"\n\
             netns = \"/proc/self/fd/{}\"\nmac = \"02:00:00:00:00:07\"\nguard = \"mac\"\n\
             container = \"pods/a/eth0\"\n",
            netns.as_fd().as_raw_fd()
        );
        let mut spec = crate::file::parse(&text, Path::new("/x/demo.toml")).unwrap();
        spec.networks[0].gateway = None;
        let none = || Err("not asked".to_string());
        let facts = Facts {
            qemu: Err("not asked".into()),
            kvm: none(),
            xl: Err("not asked".into()),
            runtime: folder.path().into(),
            tsc: None,
        };
        let plan = plan::plan(&spec, &facts).unwrap().ports.remove(0);
        let (worker, network) = (spec.workers[0].clone(), spec.networks[0].clone());
        let dir = RunDir::of_test(folder.path());
        let mut running = Running::new(spec, PathBuf::new(), dir, facts, std::sync::Arc::new(|_| ()));
        running.start_worker(worker.clone()).unwrap();
        running.start_network(&network).unwrap();
        // The device is not there yet.
        running.add_port_or_park(&plan).unwrap();
        assert!(running.is_parked("pod") && running.parked_that_are_due(Instant::now()).is_empty());
        let reason = |running: &Running| running.ports["pod"].parked.as_ref().unwrap().why.text().clone();
        assert!(reason(&running).contains("eth0"), "{}", reason(&running));
        let tap = TapConfig {
            netns: Some(netns.clone()),
            persist: true,
            mac: Some([2, 0, 0, 0, 0, 7]),
            ..TapConfig::new("eth0")
        };
        make(&tap).unwrap();
        running.workers[0].thread.handle().stop().unwrap();
        let mut now = Instant::now();
        for checked in [Ok(()), Err("it is another one".to_string()), Ok(())] {
            now += LATER;
            assert_eq!(running.parked_that_are_due(now), [(plan.clone(), None)]);
            running.try_parked(&plan, None, checked, now);
            assert!(running.is_parked("pod") && running.parked_that_are_due(now).is_empty());
        }
        assert!(reason(&running).contains("worker has ended"), "{}", reason(&running));
        // As an apply gives a network another worker.
        running.workers.clear();
        running.networks.clear();
        running.start_worker(worker).unwrap();
        running.start_network(&network).unwrap();
        // In no worker yet, it takes a changed guard with it.
        let changed = PortPlan { guard: None, ..plan.clone() };
        assert_ne!(changed.guard(), plan.guard());
        running.set_guard_of(&changed).unwrap();
        running.settle_limits_of(changed.clone()).unwrap();
        assert_eq!(running.parked_that_are_due(now + LATER), [(changed.clone(), None)]);
        let guards = |running: &Running| {
            let status = running.workers[0].thread.handle().status().unwrap();
            status.ports.into_iter().map(|port| port.guard).collect::<Vec<_>>()
        };
        running.try_parked(&changed, None, Err("it is another one".into()), now + LATER);
        assert_eq!(guards(&running), [changed.guard()]);
        let there = |running: &Running| {
            let status = running.workers[0].thread.handle().status().unwrap();
            status.ports.iter().map(|port| (port.name.to_string(), port.details.clone())).collect::<Vec<_>>()
        };
        let parked = there(&running);
        assert!(
            matches!(&parked[..], [(name, details)] if name == "pod" && format!("{details:?}").contains("it is another one")),
            "{parked:?}"
        );
        running.try_parked(&changed, None, Ok(()), now + 2 * LATER);
        assert!(!running.is_parked("pod"));
        assert_eq!(guards(&running), [changed.guard()]);
        let attached = there(&running);
        assert!(
            matches!(&attached[..], [(name, details)] if name == "pod" && !format!("{details:?}").contains("parked")),
            "{attached:?}"
        );
    }
}
