//! Machines that are domains of Xen: created, judged by how they ended, and destroyed where nothing watches them.
//!
//! The process of such a machine is the `xl` that creates its domain and waits for its end ([`crate::xen`]). What is
//! different from QEMU is here: a domain outlives a killed `xl`, and the log of `xl`, not its exit status, tells the end.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use std::os::unix::process::{CommandExt, ExitStatusExt};

use tombolo_port::xen::console_of;

use super::ending::{Ending, end_all};
use super::{FabricError, Running};
use crate::api::report::DomainReport;
use crate::plan::{MachinePlan, Plan};
use crate::rundir::write_whole;
use crate::xen::config::{self, Domain};
use crate::xen::toolstack;
use crate::{console, process};

/// What the log of an `xl` says.
fn read_log(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// How a domain ended, and whether well: by the log of its `xl`, else by how that ended itself; `None` as the status where
/// another process had started it.
pub(super) fn classify_end(log: &Path, status: Option<ExitStatus>) -> (String, bool) {
    toolstack::end_in_log(&read_log(log)).unwrap_or_else(|| {
        let how = match status.map(|status| (status.code(), status.signal())) {
            Some((Some(code), _)) => format!("xl ended with exit code {code}"),
            Some((None, Some(signal))) => format!("xl was ended by signal {signal}, and the domain was destroyed"),
            _ => "xl ended, how is not known, and the domain was destroyed".into(),
        };
        (how, false)
    })
}

impl Running {
    /// Starts the `xl` that creates a machine's domain, with the machine's console as its standard streams.
    pub(super) fn spawn_xl(&mut self, plan: &MachinePlan, domain: &Domain) -> Result<Child, FabricError> {
        let runtime = self.facts.runtime.clone();
        // In the record before there is one.
        self.dir().record(|o| {
            o.domains.retain(|d| d.machine != domain.machine);
            o.domains.push(domain.clone());
        });
        write_whole(&config::config_path(&runtime, &plan.name), domain.config.as_bytes())?;
        let spawn = |source| FabricError::Spawn {
            what: format!("{} for {}", plan.argv[0], plan.name),
            source,
            hint: "`tombolo doctor` says what is missing",
        };
        let printed = console::make_output(&runtime, &plan.name).map_err(spawn)?;
        let complaints = self.complaints(&plan.name).map_err(spawn)?;
        let mut command = Command::new(&plan.argv[0]);
        // What is typed goes to the domain's terminal: xenconsole reads its standard input only where that is one.
        command.args(&plan.argv[1..]).stdin(Stdio::null()).stdout(printed).stderr(complaints);
        // A group of its own: a terminal's ^C is for the daemon, which ends its guests in order.
        command.process_group(0);
        process::spawn(&mut command).map_err(spawn)
    }

    pub(super) fn domain_of(&self, machine: &str) -> Option<Domain> {
        self.machines.get(machine)?.plan.domain.clone()
    }

    /// The domain of an `xl` that an earlier daemon left, by its arguments.
    pub(super) fn domain_left(&self, words: &[String], runtime: &Path) -> Option<Domain> {
        let machine = process::machine_of_xl(words, runtime)?;
        let recorded = self.dir.as_ref()?.owner().domains.iter().find(|d| d.machine == machine).cloned();
        Some(recorded.unwrap_or_else(|| config::unrecorded(&self.spec.name, &machine, runtime)))
    }

    /// Why a domain that an earlier daemon left is not the one of the plan; `None` if it is.
    pub(super) fn unfit_domain(&self, planned: &Domain) -> Option<String> {
        let recorded = self.dir.as_ref()?.owner().domains.iter().find(|d| d.machine == planned.machine);
        let Some(recorded) = recorded else { return Some("it is not in the owner record".into()) };
        (recorded != planned).then(|| format!("its section has changed: {}", config::difference(recorded, planned)))
    }

    /// Destroys domains of the record, and of the plan, that no `xl` watches: all but those of the machines that are
    /// `kept`. Takes them out of the record.
    pub(super) async fn destroy_left(&mut self, plan: Option<&Plan>, kept: &[(String, u32)]) {
        let Some(dir) = &self.dir else { return };
        let planned = plan.iter().flat_map(|plan| &plan.machines).filter_map(|machine| machine.domain.as_ref());
        let mut all: BTreeMap<&str, &Domain> = planned.map(|d| (d.uuid.as_str(), d)).collect();
        all.extend(dir.owner().domains.iter().map(|d| (d.uuid.as_str(), d)));
        let is_kept = |d: &Domain| kept.iter().any(|(name, _)| *name == d.machine);
        let left: Vec<Domain> = all.into_values().filter(|d| !is_kept(d)).cloned().collect();
        // Side by side: without a daemon each takes ten seconds.
        let tasks = left.into_iter().map(|domain| {
            let asked = domain.clone();
            (domain, tokio::task::spawn_blocking(move || toolstack::destroy(&asked)))
        });
        for (domain, task) in tasks.collect::<Vec<_>>() {
            let Domain { machine, name, .. } = &domain;
            // The task does not panic.
            match task.await.unwrap_or(Ok(false)) {
                Ok(false) => {}
                Ok(true) => self.took_over(format!("{machine}: its domain {name} was destroyed: no `xl` watched it")),
                Err(why) => {
                    (self.say)(&format!("{machine}: its domain may run on: {why}; `xl destroy {name}` ends it"));
                    continue;
                }
            }
            self.forget_domain(&domain);
        }
    }

    /// Ends a domain whose addition failed. Until that is done none of its name is added.
    pub(super) fn end_unadded(&mut self, name: &str, ending: Ending) {
        self.unadded.insert(name.to_string());
        let (me, name, say, domain) = (self.me.clone(), name.to_string(), self.say.clone(), ending.domain.clone());
        tokio::spawn(async move {
            let left = end_all(vec![ending], &say).await;
            let Some(running) = me.upgrade() else { return };
            let mut running = running.lock().await;
            running.unadded.remove(&name);
            if let Some(domain) = domain.filter(|d| !left.contains(d)) {
                running.forget_domain(&domain);
            }
        });
    }

    /// Takes a domain that is gone out of the record.
    pub(super) fn forget_domain(&mut self, domain: &Domain) {
        if self.dir.as_ref().is_some_and(|dir| dir.owner().domains.contains(domain)) {
            self.dir().record(|o| o.domains.retain(|d| d != domain));
        }
    }

    /// Name and number for `status`. `None`: the machine is not a Xen domain.
    pub(super) fn domain_report(&self, plan: &MachinePlan, runs: bool) -> Option<DomainReport> {
        let domain = plan.domain.as_ref()?;
        let id = if runs { self.domain_id(&plan.name) } else { None };
        Some(DomainReport { name: domain.name.clone(), id })
    }

    /// The number of a machine's domain, once its `xl` has created it.
    fn domain_id(&self, machine: &str) -> Option<u32> {
        toolstack::id_in_log(&read_log(&self.log_path(machine)))
    }

    /// How to find out where the console of a machine takes input, where it is a domain. It asks XenStore, so it is not for
    /// the async runtime's own thread.
    pub(super) fn domain_input(&self, machine: &str) -> Option<impl FnOnce() -> Option<PathBuf> + use<>> {
        self.domain_of(machine)?;
        let id = self.domain_id(machine);
        Some(move || console_of(id?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_the_domains_where_the_log_has_it_and_else_that_of_xl() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("web.log");
        let killed = || Some(ExitStatus::from_raw(9));
        let xl = classify_end(&log, killed());
        assert_eq!(xl, ("xl was ended by signal 9, and the domain was destroyed".into(), false));
        assert_eq!(classify_end(&log, Some(ExitStatus::from_raw(1 << 8))).0, "xl ended with exit code 1");
        assert!(classify_end(&log, None).0.contains("how is not known"));
        std::fs::write(&log, "Domain 3 has shut down, reason code 0 0x0\n").unwrap();
        assert_eq!(classify_end(&log, killed()), ("the domain powered off".into(), true));
    }
}
