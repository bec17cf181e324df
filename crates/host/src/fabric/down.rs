//! The end of a fabric, and of what a killed daemon left of one.

use std::path::{Path, PathBuf};

use super::ending::{Ending, end_all};
use super::events::{Facts as Told, Kind};
use super::network::Net;
use super::{FabricError, Running, Say, facts};
use crate::file::Fabric;
use crate::process;
use crate::rundir::RunDir;

impl Running {
    /// Takes everything down. With `quietly`, the start has failed: nothing is said of what could
    /// not be removed, and containers that an earlier daemon had keep their interfaces and their
    /// record. The next daemon takes them up.
    ///
    /// # Errors
    /// Domains of Xen that may run on; then the runtime folder stays with the record of them.
    pub async fn take_down(&mut self, quietly: bool) -> Result<(), FabricError> {
        let say = self.say.clone();
        let trouble = |what: &str, error: &dyn std::fmt::Display| {
            if !quietly {
                say(&format!("down: {what}: {error}"));
            }
        };
        if !quietly {
            let name = self.spec.name.clone();
            self.events.add(Kind::Down, Told::of(&name), &format!("{name} is taken down"));
        }
        // An `up` that comes meanwhile waits.
        if let Some(dir) = &mut self.dir {
            dir.record(|o| o.ending = true);
        }
        let mut processes = Vec::new();
        let running = self.machines.iter().filter_map(|(name, m)| Some((name.clone(), m.pid?)));
        let running: Vec<_> = running.collect();
        for machine in self.machines.values_mut() {
            let (button, domain) = (machine.button(&self.facts.runtime), machine.plan.domain.clone());
            processes.extend(machine.let_go().map(|process| Ending { process: Some(process), button, domain }));
        }
        end_all(processes, &say).await;
        for (name, pid) in running {
            self.events.add(Kind::Stop, Told::of(&name).pid(pid), &format!("{name} was stopped with its fabric"));
        }
        self.machines.clear();
        // What a killed daemon, a start that failed half-way, or an adoption that did not come
        // about, has left.
        if let Some(dir) = &self.dir {
            let runtime = dir.path().to_path_buf();
            let left = process::machines(&self.spec.name, &runtime);
            let mut endings = Vec::new();
            for (machine, process, words) in left {
                let pid = process.pid;
                let domain = self.domain_left(&words, &runtime);
                let ending = Ending::left(process, &words, &machine, &runtime, domain);
                let how = if ending.button.is_some() { ", by its power button first" } else { "" };
                self.took_over(format!("{machine}: process {pid} is ended{how}"));
                endings.push(ending);
            }
            end_all(endings, &say).await;
            self.destroy_left(None, &[]).await;
        }
        if let Err(error) = self.end_bypass() {
            trouble("the bypass", &error);
        }
        self.uplinks.end_relay();
        self.networks.values().for_each(Net::withdraw);
        self.networks.values().for_each(Net::finish_withdrawal);
        let names: Vec<String> = self.ports.keys().cloned().collect();
        for name in names {
            self.drop_port(&name);
        }
        let keeps_containers = quietly && !self.containers.is_empty();
        if !keeps_containers {
            self.delete_taps_of_containers().await;
        }
        self.networks.values().for_each(Net::stop_leases);
        for net in self.networks.values() {
            net.finish_leases(&say);
        }
        self.networks.clear();
        self.end_helpers().await;
        self.end_bridges().await;
        self.end_links();
        for worker in std::mem::take(&mut self.workers) {
            if let Err(error) = worker.thread.stop() {
                trouble("a worker", &error);
            }
        }
        if let Some(table) = self.dir.as_ref().and_then(|d| d.owner().nft_table.clone())
            && let Err(error) = self.undo_kernel(&table)
        {
            trouble("the kernel uplink", &error);
        }
        self.undo_killed();
        if !self.events.finish() {
            trouble("events", &"the last ones are not written: the disk does not answer");
        }
        let Some(mut dir) = self.dir.take() else { return Ok(()) };
        let left: Vec<String> = dir.owner().domains.iter().map(|d| d.name.clone()).collect();
        if !left.is_empty() {
            // The record is all that tells of them; of the rest nothing is to come back.
            dir.record(|o| {
                (o.standing, o.ending) = (None, false);
                o.additions.clear();
                o.named.clear();
                o.rates.clear();
                o.changes.clear();
                o.settled.clear();
                o.containers.clear();
            });
            let (names, fabric) = (left.join(", "), &self.spec.name);
            return Err(FabricError::State(format!(
                "all is down but the Xen domains {names}, which may run on: `tombolo down --fabric {fabric}` tries again, and `xl destroy` ends one"
            )));
        }
        if keeps_containers {
            dir.record(|o| {
                (o.standing, o.ending, o.left) = (None, false, true);
                o.settled.clear();
            });
            let n = self.containers.len();
            say(&format!("{n} container(s) keep their interfaces, which the next `up` takes up"));
            return Ok(());
        }
        if let Err(error) = dir.remove() {
            trouble("the runtime directory", &error);
        }
        Ok(())
    }
}

/// Ends what a killed daemon of this fabric left, without starting anything. Returns what was done,
/// a sentence each; `None` if nothing was left.
///
/// # Errors
/// If a daemon runs, or the system refuses.
pub async fn clean_up(fabric: &str, say: Say) -> Result<Option<Vec<String>>, FabricError> {
    let dir = RunDir::claim(fabric, Path::new(""), &say).await?;
    let found = dir.leftover.is_some();
    let spec = Fabric::empty(fabric, PathBuf::new());
    let facts = facts(&spec, dir.path().into());
    let mut running = Running::new(spec, PathBuf::new(), dir, facts, say);
    running.take_down(false).await?;
    let done = std::mem::take(&mut running.before.told);
    Ok((found || !done.is_empty()).then_some(done))
}
