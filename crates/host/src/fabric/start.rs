//! The start of a fabric: what can be refused is refused first, then everything is made in the
//! order in which it depends on each other.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use super::additions::restore_additions;
use super::ending::end_all;
use super::events::{Facts as Told, Kind};
use super::handover::Takeover;
use super::{FabricError, Running, Say, Shared, facts};
use super::{config, containers, handover, lacking, namespaces, refuse_faults, standing, uplinks};
use crate::blocking;
use crate::config::Document;
use crate::file::Fabric;
use crate::notify;
use crate::plan::{self, Plan};
use crate::preflight;
use crate::routes::{self, Clash, Route};
use crate::rundir::{Owner, RunDir};

/// How long what a killed daemon had is waited for that the kernel takes back.
const LEAVING: Duration = Duration::from_secs(3);

impl Running {
    /// Carries out a fabric file. On an error nothing is left.
    ///
    /// # Errors
    /// The first thing that did not work.
    ///
    /// With `replace`, a daemon that runs the fabric is asked to hand over first. On an error
    /// before it has done so it goes on; on one afterwards the guests run on, and the next `up`
    /// takes them up. It may be dropped while it waits. Then nothing was made, or `owns` is set:
    /// what there is is this process's to clean up.
    pub async fn start(
        spec: Fabric,
        path: &Path,
        say: Say,
        replace: bool,
        owns: &Arc<AtomicBool>,
    ) -> Result<Shared, FabricError> {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.into());
        let base = std::fs::read_to_string(path).ok().and_then(|text| Document::read(&text));
        let mut looked_at = None;
        let takeover = if replace {
            let (spec, base, absolute, say) = (spec.clone(), base.clone(), absolute.clone(), say.clone());
            // Before the other daemon pauses for this one.
            let namespaces = handover::namespaces(&spec, base.as_ref(), &absolute);
            let silent = namespaces::silent(namespaces).await;
            looked_at = Some(silent.clone());
            // It waits for the other daemon, which may be stopped.
            let begun = blocking::spawn(move || Takeover::begin(&spec, base.as_ref(), &absolute, &silent, &say)).await;
            begun.map_err(|error| FabricError::State(format!("asking for a handover: {error}")))??
        } else {
            None
        };
        let (mut dir, known) = match takeover {
            Some(Takeover { dir, facts, prepared, store, commit }) => (dir, Some((facts, prepared, store, commit))),
            None => {
                let dir = RunDir::claim(&spec.name, &absolute, &say).await?;
                owns.store(true, Ordering::Relaxed);
                (dir, None)
            }
        };
        // What the file says, if something was changed since that this machine may refuse by now.
        let mut unchanged = None;
        let spec = match dir.leftover.clone() {
            Some(left) if left.file == absolute => {
                unchanged = (!left.changes.is_empty()).then(|| spec.clone());
                let spec = config::restore(spec, base.as_ref(), &left.changes, &mut dir, &say);
                let additions = dir.owner().additions.clone();
                restore_additions(spec, &additions, &mut dir, &say)?
            }
            Some(_) => {
                dir.record(|o| {
                    o.additions.clear();
                    o.named.clear();
                    o.rates.clear();
                    o.changes.clear();
                });
                spec
            }
            None => spec,
        };
        let silent = match looked_at.filter(|_| known.is_some()) {
            Some(silent) => silent,
            None => namespaces::silent(namespaces::of(&spec)).await,
        };
        let (spec, lost) = containers::without_gone(spec, base.as_ref(), &silent, &mut dir, &say);
        let running = match known {
            Some((facts, prepared, store, commit)) => {
                let mut running = Running::new(spec, absolute, dir, facts, say);
                (running.before.commit, running.before.prepared) = (Some(commit), Some(prepared));
                running.store.use_found(store);
                running
            }
            None => {
                let facts = facts(&spec, dir.path().into());
                let mut running = Running::new(spec, absolute, dir, facts, say);
                running.store.find(&running.say);
                running
            }
        };
        let shared = Shared { running: Arc::new(Mutex::new(running)) };
        let mut running = shared.running.lock().await;
        running.base = base;
        running.silent = silent;
        running.me = Arc::downgrade(&shared.running);
        running.before.hands_over = running.store.take_state("handover".into()).is_some();
        lost.into_iter().for_each(|what| running.took_over(what));
        let mut planned = running.prepare().await;
        if let (Err(error), Some(spec)) = (&planned, unchanged.filter(|_| !running.before.hands_over))
            && !running.dir().owner().changes.is_empty()
        {
            let why = error.to_string();
            match running.prepare_unchanged(spec, &why).await {
                Ok(plan) => planned = Ok(plan),
                Err(also) => (running.say)(&format!("neither can what the file says be started: {also}")),
            }
        }
        let plan = match planned {
            Ok(plan) => plan,
            Err(error) => {
                // Nothing was made. What a killed daemon left, guests that run among it, waits for
                // a better file.
                if let Some(dir) = running.dir.take()
                    && dir.leftover.is_none()
                {
                    dir.remove()?;
                }
                return Err(error);
            }
        };
        if let Err(error) = running.make(&plan, owns).await {
            if running.before.hands_over && !running.before.has_handed_over {
                // The daemon before goes on, or has left: the guests are not this one's to end.
                return Err(error);
            }
            drop(running);
            return Err(shared.fail(error).await);
        }
        drop(running);
        Ok(shared)
    }

    /// What can be refused before anything is made.
    async fn prepare(&mut self) -> Result<Plan, FabricError> {
        if let Some(prepared) = &self.before.prepared {
            return Ok(prepared.plan.clone());
        }
        let plan = plan::plan(&self.spec, &self.facts);
        if self.before.hands_over {
            // Routes and listeners are there already, and are the fabric's own.
            return Ok(plan?);
        }
        // A container's port is parked; what the file says has to be there.
        if let Some((port, why)) = self.silent.iter().find(|(name, _)| !self.is_contained(name)) {
            return Err(FabricError::Port { port: port.clone(), why: why.clone() });
        }
        // They are of no use without their daemon, and hold the listeners that are looked at below.
        self.end_helpers().await;
        self.note_routes();
        // Bridges to other machines go on, and listen.
        let standing = standing::Standing::listening(self.left_listeners());
        let begun = Instant::now();
        loop {
            let all = preflight::faults(&self.answering(), Some(&standing));
            // What a container has done to its namespace keeps no other member from its network:
            // its port is parked.
            let (of_containers, mut faults): (Vec<_>, Vec<_>) = all.into_iter().partition(|f| self.is_of_container(f));
            // The passt and the taps of a daemon that was killed an instant ago are on their way
            // out.
            let passes = self.dir().leftover.is_some() && begun.elapsed() < LEAVING;
            if passes && faults.iter().any(|fault| fault.may_pass) {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            for preflight::HostFault { section, key, expected, found, .. } in of_containers {
                (self.say)(&format!("[{section}] {key}: expected {expected}, found {found}"));
            }
            return match plan {
                Ok(plan) => refuse_faults(faults, &self.file, self.spec.which()).map(|()| plan),
                Err(error) if faults.is_empty() => Err(error.into()),
                Err(_) => {
                    faults.extend(preflight::plan_faults(&self.spec, &self.facts));
                    Err(lacking(faults, &self.file, self.spec.which()))
                }
            };
        }
    }

    /// As [`Running::prepare`], with what the file says in place of what was changed since, which
    /// this machine refuses: `why`.
    async fn prepare_unchanged(&mut self, spec: Fabric, why: &str) -> Result<Plan, FabricError> {
        let keys = config::keys_of(&self.dir().owner().changes);
        self.dir().record(Owner::end_changes);
        let (say, additions) = (self.say.clone(), self.dir().owner().additions.clone());
        self.spec = restore_additions(spec, &additions, self.dir(), &say)?;
        self.facts = facts(&self.spec, self.facts.runtime.clone());
        let plan = self.prepare().await?;
        (self.say)(&format!(
            "{keys} was changed before and this machine refuses it now; what the file says holds: {why}"
        ));
        Ok(plan)
    }

    /// Notes the networks whose subnet takes a part of a wider route of the host.
    fn note_routes(&mut self) {
        let mut notes = Vec::new();
        for (network, clash) in routes::clashes(&self.spec, &routes::host()) {
            let (name, subnet) = (network.name.clone(), network.subnet);
            // One that is taken is a fault.
            if let Clash::Shadowed(Route { subnet: wide, device }) = clash {
                notes.push(format!(
                    "network {name}: the host reaches {subnet} in the fabric now, and no longer by its route to {wide} through {device}"
                ));
            }
        }
        notes.iter().for_each(|note| (self.say)(note));
        self.notes = notes;
    }

    /// Makes everything. `owns` is set once what there is is this process's to clean up.
    async fn make(&mut self, plan: &Plan, owns: &AtomicBool) -> Result<(), FabricError> {
        self.store.start(plan, &self.say);
        self.start_links(plan)?;
        self.take_doors();
        let (adopted, mut ending) = self.sort_recorded(plan);
        let kept: Vec<String> = adopted.iter().map(|(name, _)| name.clone()).chain(self.saved_machines(plan)).collect();
        if !self.before.hands_over {
            end_all(std::mem::take(&mut ending), &self.say).await;
            self.destroy_left(Some(plan), &kept).await;
            self.undo_leftover(plan)?;
        }
        for worker in self.spec.workers.clone() {
            self.start_worker(worker)?;
        }
        for network in self.spec.networks.clone() {
            self.start_network(&network)?;
        }
        // Kernel rules before the ports: no guest may send before its masquerade is in place. In a
        // handover the previous daemon's rules are in place, and guests do not wait for new ones.
        if !self.before.hands_over {
            self.kernel_rules(plan)?;
        }
        if self.before.commit.is_some() {
            // The last moment at which a signal calls it off.
            tokio::task::yield_now().await;
        }
        self.before.commit.take().map(|commit| commit.commit()).transpose()?;
        self.before.has_handed_over = self.before.hands_over;
        owns.store(true, Ordering::Relaxed);
        if self.before.has_handed_over {
            notify::took_over();
        }
        for port in &plan.ports {
            self.add_port_or_park(port)?;
        }
        if self.before.hands_over {
            self.teach();
            end_all(ending, &self.say).await;
            self.destroy_left(Some(plan), &kept).await;
            self.undo_leftover(plan)?;
            self.kernel_rules(plan)?;
        }
        self.undo_killed();
        uplinks::set_up_taps(&self.spec.name, plan, false)?;
        self.settle_relay();
        self.settle_routers6();
        self.start_bypass(plan);
        self.direct_links(plan)?;
        if let Some(links) = self.links() {
            links.forget_rest();
        }
        self.start_bridges().await;
        self.update_names();
        for machine in &plan.machines {
            if let Some((_, pid)) = adopted.iter().find(|(name, _)| *name == machine.name) {
                self.adopt(machine, pid)?;
            } else if kept.contains(&machine.name) {
                self.leave_saved(machine);
            } else if let Some((how, _)) = self.store.take_state(format!("idle/{}", machine.name)) {
                self.leave_idle(machine, &String::from_utf8_lossy(&how));
            } else {
                match self.start_or_wait(machine) {
                    // Guests that run on, and have their network again, do not end for one that
                    // cannot start.
                    Err(error) if !adopted.is_empty() || self.before.hands_over => {
                        self.note_not_started(machine, &error)
                    }
                    started => started?,
                }
            }
        }
        // Those that are kept come behind some that depend on them.
        self.start_waiting();
        self.store.settle(plan);
        self.record_standing();
        self.open_events();
        self.watch_ports();
        self.note_containers();
        self.silent.clear();
        tokio::spawn(containers::watch(self.me.clone()));
        tokio::spawn(crate::stamps::keep(self.facts.runtime.clone(), self.me.clone()));
        let name = self.spec.name.clone();
        let facts = Told::of(&name).pid(std::process::id());
        let how = if self.before.has_handed_over { "taken over by another daemon" } else { "up" };
        self.events.add(Kind::Up, facts, &format!("{name} is {how}"));
        Ok(())
    }
}
