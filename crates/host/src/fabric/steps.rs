//! The steps of a change of the running fabric: what goes is taken out, then what comes is put in.
//! [`super::apply`] says in which order, and what holds meanwhile.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tombolo_switch::Nanos;
use tombolo_switch::control::{ControlError, WorkerSettings};

use super::ending::Ending;
use super::ports::NOWHERE;
use super::{FabricError, Running};
use super::{services, uplinks};
use crate::difference::{Action, Change, MachinePart, Model, NetworkPart, Part, gateway_differs, uplink_differs};
use crate::file::{self, Fabric, Forward};
use crate::plan::{self, Facts, Plan, PortPlan};
use crate::rundir::Addition;

/// The changes, and which of them failed so far.
pub(super) struct Steps {
    pub(super) changes: Vec<Change>,
    pub(super) failed: BTreeMap<String, String>,
}

impl Steps {
    /// The machines that are taken out, or started again.
    fn machines_that_go(&self) -> impl Iterator<Item = &String> {
        let going = self.changes.iter().filter(|c| GOES.contains(&c.action));
        going.filter_map(|c| match &c.before {
            Some(Part::Machine(part)) => Some(&part.spec.name),
            _ => None,
        })
    }

    /// Does `step` with every change of these actions that has not failed.
    fn each(&mut self, actions: &[Action], mut step: impl FnMut(&Change) -> Result<(), FabricError>) {
        for change in &self.changes {
            if actions.contains(&change.action)
                && !self.failed.contains_key(&change.section)
                && let Err(error) = step(change)
            {
                self.failed.insert(change.section.clone(), error.to_string());
            }
        }
    }
}

const GOES: [Action; 2] = [Action::Remove, Action::Restart];
const COMES: [Action; 2] = [Action::Add, Action::Restart];

impl Running {
    /// Starts what the changes need first, and notes from which file the fabric is now. What is
    /// noted is one record: a daemon that follows a kill never sees the changes of one file with
    /// another, nor a member that is in neither.
    pub(super) fn note_file(
        &mut self,
        file: &Path,
        is_file: bool,
        (additions, own): (Vec<Addition>, &[String]),
        facts: Facts,
        new: &Model,
        changes: Map<String, Value>,
    ) -> Result<(), FabricError> {
        self.facts = facts;
        self.store.start(&new.plan, &self.say);
        self.start_links(&new.plan)?;
        self.file = file.to_path_buf();
        let path = self.file.clone();
        let there: Vec<String> = new.fabric.members().map(String::from).collect();
        self.dir().record(|o| {
            o.file = path;
            o.changes = changes;
            // Those that the changed configuration has, and not because the file has them.
            let is_named = |a: &Addition| a.names.iter().all(|name| own.contains(name) && there.contains(name));
            o.named = additions.iter().filter(|a| !is_file && is_named(a)).cloned().collect();
            o.additions = additions;
            // Those that the file has now are no additions any more.
            for addition in &mut o.additions {
                addition.names.retain(|name| !own.contains(name));
            }
            o.additions.retain(|a| !a.names.is_empty());
        });
        Ok(())
    }

    /// Begins to end the machines that go or start again, and keeps them from being started until
    /// [`Running::unmark_ends`]: also those without a process, that are about to be started again
    /// or wait for others. Returns those that have one.
    pub(super) fn begin_ends(&mut self, steps: &Steps) -> Vec<(String, u32, Ending)> {
        let runtime = self.facts.runtime.clone();
        let mut out = Vec::new();
        for name in steps.machines_that_go() {
            let Some(machine) = self.machines.get_mut(name) else { continue };
            machine.is_ending = true;
            machine.again_at = None;
            machine.waits = false;
            let Some(pid) = machine.pid else { continue };
            let (button, domain) = (machine.button(&runtime), machine.plan.domain.clone());
            out.push((name.clone(), pid, Ending { process: machine.let_go(), button, domain }));
        }
        out
    }

    /// Takes note of the ends of machines; the domains of those that are `left` may run on.
    pub(super) fn finish_ends(&mut self, ended: &[(String, u32)], left: &[crate::xen::config::Domain]) {
        for (name, pid) in ended {
            self.machine_ended(name, *pid);
            if let Some(domain) = self.domain_of(name).filter(|d| !left.contains(d)) {
                self.forget_domain(&domain);
            }
            if let Some(machine) = self.machines.get_mut(name) {
                // The apply ended it, neither its user nor itself.
                machine.stopped = false;
                machine.ended = None;
            }
        }
    }

    pub(super) fn unmark_ends(&mut self, steps: &Steps) {
        for name in steps.machines_that_go() {
            self.machines.entry(name.clone()).and_modify(|machine| machine.is_ending = false);
        }
    }

    /// Takes out what goes, and what is made again.
    pub(super) fn take_out(&mut self, steps: &mut Steps) {
        steps.each(&GOES, |change| {
            match (&change.before, &change.after) {
                (Some(Part::Machine(before)), after) => {
                    let kept: &[PortPlan] = match after {
                        Some(Part::Machine(after)) => &after.ports,
                        _ => &[],
                    };
                    let gone: Vec<_> = before.ports.iter().filter(|p| !kept.contains(p)).collect();
                    gone.iter().for_each(|port| self.drop_port(&port.name));
                    if after.is_none() {
                        self.machines.remove(&before.spec.name);
                        self.forget_member(&before.spec.name);
                    }
                }
                (Some(Part::Tap(part)), after) => self.take_port_out(&part.0.name, after.is_none()),
                (Some(Part::Port(part)), after) => self.take_port_out(&part.0.name, after.is_none()),
                _ => return Ok(()),
            }
            self.have(&Change { after: None, ..change.clone() });
            Ok(())
        });
        steps.each(&[Action::Remove, Action::Restart, Action::Change], |change| {
            if let Some(Part::Link(part)) = &change.before {
                // All of them before the first new one: a name may go from one link to another.
                self.end_bridge(&services::link(&part.0.name));
                if change.action == Action::Change {
                    return Ok(());
                }
                if let (Some(links), Some(config)) = (self.links(), &part.1) {
                    links.close(&config.name);
                }
                self.have(&Change { after: None, ..change.clone() });
            }
            if let Some(Part::Export(_) | Part::Import(_)) = &change.before {
                self.end_bridge(&change.section);
                self.have(&Change { after: None, ..change.clone() });
            }
            Ok(())
        });
        self.take_uplinks_out(steps);
        steps.each(&GOES, |change| {
            if let Some(Part::Network(part)) = &change.before {
                self.drop_port(&plan::uplink_name(&part.spec.name));
                self.stop_network(&part.spec.name)?;
                self.bypass.forget(&part.spec.name);
                self.have(&Change { after: None, ..change.clone() });
                // Its rules go with the next ones.
                self.kernel_again()?;
            }
            Ok(())
        });
    }

    /// Takes out the uplinks and forwards of networks that get others: another network's may need
    /// their listeners.
    fn take_uplinks_out(&mut self, steps: &mut Steps) {
        let mut is_relayed = false;
        steps.each(&[Action::Change], |change| {
            let (Some(Part::Network(a)), Some(Part::Network(b))) = (&change.before, &change.after) else {
                return Ok(());
            };
            if uplink_differs(a, b) {
                self.drop_port(&plan::uplink_name(&a.spec.name));
            }
            let kept = self.spec.forwards.len();
            self.spec.forwards.retain(|f| f.network != a.spec.name || b.forwards.contains(f));
            is_relayed |= self.spec.forwards.len() < kept && a.kernel.is_some();
            Ok(())
        });
        if is_relayed {
            // The kernel's rules are all loaded again with those that come; the relay has
            // listeners.
            self.settle_relay();
        }
    }

    fn take_port_out(&mut self, name: &str, for_good: bool) {
        self.deleted.forget(name);
        self.drop_port(name);
        // It may come back in another namespace, which is noted then.
        self.forget_container(name);
        if for_good {
            self.forget_member(name);
        }
    }

    /// Forgets what was noted of a member that goes.
    fn forget_member(&mut self, name: &str) {
        self.forget_rates(name);
        self.dir().record(|o| o.settled.retain(|s| s.machine != name));
    }

    /// Takes note that what runs is as after `change`.
    fn have(&mut self, change: &Change) {
        let plan = Plan { ports: vec![], machines: vec![], kernel: vec![], links: vec![] };
        let fabric = std::mem::replace(&mut self.spec, Fabric::empty("", PathBuf::new()));
        self.spec = Model { fabric, plan }.with(change).fabric;
    }

    /// Does `work` with the part in place; where that fails, what runs is without it.
    fn with_part(
        &mut self,
        change: &Change,
        work: impl FnOnce(&mut Self) -> Result<(), FabricError>,
    ) -> Result<(), FabricError> {
        let before = self.spec.clone();
        self.have(change);
        let done = work(self);
        if done.is_err() {
            self.spec = before;
        }
        done
    }

    /// Makes what comes, and changes what goes on.
    pub(super) fn put_in(&mut self, steps: &mut Steps, new: &Model) {
        // Networks find their workers before theirs go.
        let changed = [Action::Add, Action::Change];
        steps.each(&changed, |change| match &change.after {
            Some(Part::Worker(worker)) => self.put_worker(change, worker),
            _ => Ok(()),
        });
        let bypassed = |steps: &Steps| {
            let has = |part: &Option<Part>| matches!(part, Some(Part::Network(p)) if p.spec.bypass.is_some());
            steps.changes.iter().any(|c| has(&c.before) || has(&c.after))
        };
        let bypass = bypassed(steps);
        steps.each(&[Action::Add, Action::Restart, Action::Change], |change| match (&change.before, &change.after) {
            (before, Some(Part::Network(part))) => {
                let before = match (change.action, before) {
                    (Action::Change, Some(Part::Network(before))) => Some(&**before),
                    _ => None,
                };
                self.put_network(change, before, part)
            }
            _ => Ok(()),
        });
        steps.each(&GOES, |change| match (&change.before, &change.after) {
            (Some(Part::Worker(worker)), None) => self.end_worker(change, &worker.name),
            _ => Ok(()),
        });
        // Before a member comes that the new rules are about.
        steps.each(&[Action::Add, Action::Change, Action::Remove], |change| {
            if matches!((&change.before, &change.after), (Some(Part::Policy(_)), _) | (_, Some(Part::Policy(_)))) {
                self.have(change);
            }
            Ok(())
        });
        // Also where the rules are the same: they are about members that have changed.
        for error in self.settle_policies() {
            steps.failed.entry("policy".into()).and_modify(|why| why.push_str(&format!("; {error}"))).or_insert(error);
        }
        steps.each(&[Action::Add, Action::Restart, Action::Change], |change| match &change.after {
            // Its memory and its machines go on.
            Some(Part::Link(part)) if change.action == Action::Change => {
                self.have(change);
                self.start_bridge_as_asked(&services::link(&part.0.name));
                Ok(())
            }
            Some(Part::Link(part)) => self.with_part(change, |running| running.put_link(part)),
            Some(Part::Export(_) | Part::Import(_)) => {
                self.have(change);
                self.start_bridge_as_asked(&change.section);
                Ok(())
            }
            _ => Ok(()),
        });
        self.change_members(steps);
        steps.each(&COMES, |change| match &change.after {
            Some(Part::Tap(part)) => self.with_part(change, |running| running.put_port(&part.1)),
            Some(Part::Port(part)) => self.with_part(change, |running| running.put_port(&part.1)),
            Some(Part::Machine(part)) => self.put_ports_of(change, part),
            _ => Ok(()),
        });
        // Before the first guest asks for its lease.
        self.update_names();
        self.settle_limits(steps);
        steps.each(&COMES, |change| match &change.after {
            Some(Part::Machine(part)) => self.put_machine(change, part),
            _ => Ok(()),
        });
        self.start_waiting();
        self.update_names();
        self.in_order_of(&new.fabric);
        self.settle_relay();
        self.settle_routers6();
        if bypass {
            let plan = self.kernel_plan();
            if let Err(error) = self.end_bypass() {
                (self.say)(&format!("apply: the bypass: {error}"));
            }
            self.start_bypass(&plan);
        }
    }

    fn put_worker(&mut self, change: &Change, spec: &file::Worker) -> Result<(), FabricError> {
        if let Some(worker) = self.workers.iter_mut().find(|w| w.spec.name == spec.name) {
            let busy_poll = Nanos::MICRO.times(spec.busy_poll_us.into());
            worker.thread.handle().set(WorkerSettings { budget: spec.budget as usize, busy_poll })?;
            if worker.spec.cpu != spec.cpu {
                let failed = |e: rustix::io::Errno| {
                    FabricError::State(format!("worker {}: moving its thread to another CPU: {e}", spec.name))
                };
                let cpus = match spec.cpu {
                    Some(cpu) => {
                        let mut only = rustix::thread::CpuSet::new();
                        only.set(cpu);
                        only
                    }
                    // Those of the control plane, which no setting moves.
                    None => rustix::thread::sched_getaffinity(None).map_err(failed)?,
                };
                rustix::thread::sched_setaffinity(Some(worker.thread.pid()), &cpus).map_err(failed)?;
            }
            worker.spec = spec.clone();
        } else {
            self.start_worker(spec.clone())?;
        }
        self.have(change);
        Ok(())
    }

    fn end_worker(&mut self, change: &Change, name: &str) -> Result<(), FabricError> {
        let Some(at) = self.workers.iter().position(|w| w.spec.name == name) else { return Ok(()) };
        let worker = self.workers.remove(at);
        // Ports know their worker by its place.
        self.ports.values_mut().filter(|p| p.worker > at).for_each(|p| p.worker -= 1);
        self.have(change);
        Ok(worker.thread.stop()?)
    }

    fn put_network(
        &mut self,
        change: &Change,
        before: Option<&NetworkPart>,
        part: &NetworkPart,
    ) -> Result<(), FabricError> {
        let kernel = before.and_then(|b| b.kernel.as_ref()) != part.kernel.as_ref();
        let uplink = before.is_none_or(|before| uplink_differs(before, part));
        self.with_part(change, |running| {
            match before {
                None => running.start_network(&part.spec)?,
                Some(before) if gateway_differs(&before.spec, &part.spec) => {
                    running.restart_gateway(&part.spec)?;
                    running.update_names();
                }
                Some(_) => {}
            }
            if kernel {
                running.kernel_again()?;
            }
            if uplink {
                running.drop_port(&plan::uplink_name(&part.spec.name));
                part.uplink.iter().try_for_each(|port| running.add_port(port))?;
            }
            // Also those of a tap that is another one.
            if (kernel || uplink)
                && let Some(kernel) = &part.kernel
            {
                let plan = Plan { ports: vec![], machines: vec![], kernel: vec![kernel.clone()], links: vec![] };
                let before = before.and_then(|before| before.kernel.as_ref());
                let reset = before.is_some_and(|before| before.network.router6() != kernel.network.router6());
                uplinks::set_up_taps(&running.spec.name, &plan, reset)?;
            }
            Ok(())
        })
        .inspect_err(|_| self.back_to(before, part, uplink))
    }

    /// A change of a network failed: it gets the uplink that it had, and a new one goes.
    fn back_to(&mut self, before: Option<&NetworkPart>, part: &NetworkPart, uplink: bool) {
        let name = &part.spec.name;
        if uplink {
            self.drop_port(&plan::uplink_name(name));
        }
        let done = match before {
            Some(before) => {
                let gateway = match gateway_differs(&before.spec, &part.spec) {
                    true => self.restart_gateway(&before.spec),
                    false => Ok(()),
                };
                self.have_forwards(before);
                let port = before.uplink.iter().filter(|_| uplink).try_for_each(|port| self.add_port(port));
                self.update_names();
                gateway.and(port).and_then(|()| self.kernel_again())
            }
            None => self.stop_network(name),
        };
        if let Err(error) = done {
            (self.say)(&format!("apply: network {name} cannot be put back: {error}"));
        }
    }

    /// Has the forwards of a network as before, but those that another one has by now.
    fn have_forwards(&mut self, before: &NetworkPart) {
        let name = &before.spec.name;
        let taken = |f: &Forward| {
            self.spec.forwards.iter().any(|o| o.network != *name && (o.proto, o.listen) == (f.proto, f.listen))
        };
        let back: Vec<Forward> = before.forwards.iter().filter(|f| !taken(f)).cloned().collect();
        self.spec.forwards.retain(|f| f.network != *name);
        self.spec.forwards.extend(back);
    }

    fn put_link(&mut self, part: &(file::LinkDecl, Option<tombolo_ivshmem::links::Config>)) -> Result<(), FabricError> {
        let (Some(links), Some(config)) = (self.links(), &part.1) else { return Ok(()) };
        links.open(config.clone())?;
        links.serve(&config.name, Some(self.link_watcher(&config.name)))?;
        self.start_bridge_as_asked(&services::link(&part.0.name));
        Ok(())
    }

    fn put_port(&mut self, plan: &Option<PortPlan>) -> Result<(), FabricError> {
        plan.iter().try_for_each(|plan| self.add_port_or_park(plan))
    }

    /// Makes the ports of a machine that is to start, but those that are there as they should be.
    fn put_ports_of(&mut self, change: &Change, part: &MachinePart) -> Result<(), FabricError> {
        self.have(change);
        let done = part.ports.iter().try_for_each(|port| {
            if self.ports.get(&port.name).is_some_and(|running| running.plan == *port) {
                return Ok(());
            }
            self.drop_port(&port.name);
            self.add_port(port)
        });
        if let (Err(error), Some(plan)) = (&done, &part.plan) {
            self.note_not_started(plan, error);
        }
        done
    }

    /// Starts a machine of which the ports are there. One that cannot start stays known, as one
    /// that failed.
    fn put_machine(&mut self, change: &Change, part: &MachinePart) -> Result<(), FabricError> {
        let Some(plan) = &part.plan else { return Ok(()) };
        // Its user stopped it, and starts it again.
        let stopped = self.machines.get(&plan.name).is_some_and(|m| m.stopped && m.pid.is_none());
        if change.action == Action::Restart && stopped {
            self.leave_idle(plan, "");
            return Ok(());
        }
        let started = self.start_or_wait(plan);
        if let Err(error) = &started {
            self.note_not_started(plan, error);
        }
        started
    }

    /// Gives members that go on their new limits and guards.
    fn change_members(&mut self, steps: &mut Steps) {
        // An address may go from one member to another: what is given up first makes room.
        let mut open: Vec<(String, Vec<PortPlan>)> = Vec::new();
        for change in steps.changes.iter().filter(|c| c.action == Action::Change) {
            let ports = match &change.after {
                Some(Part::Machine(part)) => part.ports.clone(),
                Some(Part::Tap(part)) => part.1.iter().cloned().collect(),
                Some(Part::Port(part)) => part.1.iter().cloned().collect(),
                _ => continue,
            };
            open.push((change.section.clone(), ports));
        }
        let mut tries = open.len() + 1;
        while !open.is_empty() && tries > 0 {
            tries -= 1;
            open.retain(|(section, ports)| match ports.iter().try_for_each(|plan| self.set_guard_of(plan)) {
                Ok(()) => {
                    steps.failed.remove(section);
                    false
                }
                Err(error) => {
                    steps.failed.insert(section.clone(), error.to_string());
                    matches!(error, FabricError::Control(ControlError::PinnedElsewhere(_)))
                }
            });
        }
        steps.each(&[Action::Change], |change| {
            let (rates, name) = match (&change.before, &change.after) {
                (Some(Part::Machine(a)), Some(Part::Machine(b))) => {
                    (a.spec.traffic.rates != b.spec.traffic.rates, &b.spec.name)
                }
                (Some(Part::Tap(a)), Some(Part::Tap(b))) => (a.0.traffic.rates != b.0.traffic.rates, &b.0.name),
                (Some(Part::Port(a)), Some(Part::Port(b))) => (a.0.traffic.rates != b.0.traffic.rates, &b.0.name),
                _ => return Ok(()),
            };
            if rates {
                // What the file says now goes before what was set by hand.
                self.forget_rates(name);
            }
            self.have(change);
            Ok(())
        });
    }

    pub(super) fn set_guard_of(&mut self, plan: &PortPlan) -> Result<(), FabricError> {
        let Some(port) = self.ports.get(&plan.name) else { return Err(self.unknown("port", &plan.name)) };
        let is_same = port.plan.guard == plan.guard && port.plan.traffic.roles == plan.traffic.roles;
        // One that is in no worker begins with its guard when it is tried again.
        if is_same || port.token == NOWHERE {
            return Ok(());
        }
        let handle = self.workers[port.worker].thread.handle();
        Ok(handle.set_guard(port.token, plan.guard())?)
    }

    /// Sets the limits of members that go on, once what was set by hand is forgotten.
    fn settle_limits(&mut self, steps: &mut Steps) {
        steps.each(&[Action::Change], |change| {
            let ports: Vec<PortPlan> = match &change.after {
                Some(Part::Machine(part)) => part.ports.clone(),
                Some(Part::Tap(part)) => part.1.iter().cloned().collect(),
                Some(Part::Port(part)) => part.1.iter().cloned().collect(),
                _ => return Ok(()),
            };
            ports.into_iter().try_for_each(|plan| self.settle_limits_of(plan))
        });
    }

    /// Sets the limits of one port that goes on.
    pub(super) fn settle_limits_of(&mut self, plan: PortPlan) -> Result<(), FabricError> {
        let rates = self.changed_rates(&plan.name).unwrap_or(plan.traffic.rates);
        let Some(port) = self.ports.get_mut(&plan.name) else { return Ok(()) };
        if port.token == NOWHERE {
            // It begins with its settings when it is tried again.
            port.plan = plan;
            return Ok(());
        }
        let handle = self.workers[port.worker].thread.handle();
        handle.set_limits(port.token, plan.traffic.storm, rates)?;
        if let Some(directory) = &port.directory {
            directory.set_storm(plan.traffic.storm);
        }
        if port.plan.labels() != plan.labels() {
            handle.set_labels(port.token, plan.labels())?;
        }
        if port.plan.traffic.marking != plan.traffic.marking {
            handle.set_marking(port.token, plan.traffic.marking)?;
        }
        if port.plan.traffic.vlans != plan.traffic.vlans {
            handle.set_vlans(port.token, plan.traffic.vlans.clone())?;
        }
        port.plan = plan;
        Ok(())
    }

    /// Has every switch judge by the file's rules; one whose rules are the same goes on
    /// undisturbed. Returns why one does not.
    pub(super) fn settle_policies(&self) -> Vec<String> {
        let settle = |spec: &file::Network| {
            let (_, worker) = self.worker_of(&spec.name)?;
            let net = self.networks.get(&spec.name)?;
            let set = worker.thread.handle().set_policy(net.id, self.spec.policy(&spec.name));
            set.err().map(|error| format!("the rules of network {}: {error}", spec.name))
        };
        self.spec.networks.iter().filter_map(settle).collect()
    }

    /// Puts the lists of what runs in the order of the file, which reports follow, and takes over
    /// what it says of other machines, which additions are checked against.
    fn in_order_of(&mut self, file: &Fabric) {
        fn place<T>(list: &[T], is_it: impl Fn(&T) -> bool) -> usize {
            list.iter().position(is_it).unwrap_or(list.len())
        }
        (self.spec.here, self.spec.elsewhere) = (file.here.clone(), file.elsewhere.clone());
        self.spec.networks.sort_by_key(|n| place(&file.networks, |o| o.name == n.name));
        self.spec.machines.sort_by_key(|m| place(&file.machines, |o| o.name == m.name));
        self.spec.taps.sort_by_key(|t| place(&file.taps, |o| o.name == t.name));
        self.spec.ports.sort_by_key(|p| place(&file.ports, |o| o.name == p.name));
        self.spec.links.sort_by_key(|l| place(&file.links, |o| o.name == l.name));
        self.spec.workers.sort_by_key(|w| place(&file.workers, |o| o.name == w.name));
        self.spec.forwards.sort_by_key(|f| place(&file.forwards, |o| (o.proto, o.listen) == (f.proto, f.listen)));
    }
}
