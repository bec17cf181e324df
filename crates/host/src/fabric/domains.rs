//! Machines that are domains of Xen: created, judged by how they ended, and destroyed where nothing
//! watches them.
//!
//! The process of such a machine is the `xl` that creates its domain and waits for its end
//! ([`crate::xen`]). What is different from QEMU is here: a domain outlives a killed `xl`, and the
//! log of `xl`, not its exit status, tells the end.
//!
//! # Saved domains
//! `xl save` suspends a domain, writes it into a file, and destroys it. To the fabric the machine
//! is stopped, and no restart policy starts it. `xl restore` makes a domain of the same name and
//! UUID. XenStore tells of each new domain ([`follow`]), so the fabric finds it, and starts a
//! `tombolo domain-watch` as the machine's process ([`crate::xen::watcher`]). The port finds the
//! domain by its name as after any start. A checkpoint (`xl save -c`), or a save that fails,
//! resumes the domain, which is found in the same way.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Weak;
use std::time::{Duration, Instant};

use std::os::unix::process::{CommandExt, ExitStatusExt};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::unix::AsyncFd;
use tombolo_port::xen::{DomainEvent, DomainEvents, console_of};

use super::ending::{Ending, end_all};
use super::{FabricError, Running};
use crate::api::report::DomainReport;
use crate::blocking;
use crate::plan::{MachinePlan, Plan};
use crate::rundir::write_whole;
use crate::xen::config::{self, Domain};
use crate::xen::toolstack::{self, DomainState, Listed, SUSPENDED};
use crate::xen::watcher;
use crate::{console, process};

/// How often a domain is looked at that is being saved or restored: no event tells that this is
/// over. At first, and at last: a guest can also suspend itself, for ever.
const LOOK: Duration = Duration::from_millis(500);
const LAST_LOOK: Duration = Duration::from_secs(10);
/// How long an `xl` or XenStore that did not answer is left alone.
const AGAIN: Duration = Duration::from_secs(5);
/// Time that an `xl` has to end after SIGTERM.
const GRACE: Duration = Duration::from_secs(2);

/// The pause before the next look at a domain that has been suspended for so long.
fn pause_before_look(since: Duration) -> Duration {
    (since / 8).clamp(LOOK, LAST_LOOK)
}

/// What the log of an `xl` says.
fn read_log(path: &Path) -> String {
    std::fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// How a domain ended, and whether well: by the log of its `xl`, else by how that ended itself;
/// `None` as the status where another process had started it.
pub(super) fn classify_end(log: &Path, status: Option<ExitStatus>) -> (String, bool) {
    toolstack::end_in_log(&read_log(log)).unwrap_or_else(|| {
        let who = if read_log(log).starts_with(watcher::FIRST_WORDS) { "the domain's watcher" } else { "xl" };
        let how = match status.map(|status| (status.code(), status.signal())) {
            Some((Some(code), _)) => format!("{who} ended with exit code {code}"),
            Some((None, Some(signal))) => format!("{who} was ended by signal {signal}, and the domain was destroyed"),
            _ => format!("{who} ended, how is not known, and the domain was destroyed"),
        };
        (how, false)
    })
}

/// Whether the log of what watched a domain ends with its suspension.
pub(super) fn is_suspended(log: &Path) -> bool {
    toolstack::is_suspended_in_log(&read_log(log))
}

/// Ends the `xl` of a domain that was suspended. It only waits for its own child, which copies the
/// console, and would take what is printed from the next one. Blocks for up to a few seconds.
pub(super) fn end_xl(process: &process::Process) {
    if process.is_running() {
        // Started as the leader of a group, whose number is not reused as long as it runs.
        let _ = Pid::from_raw(process.pid as i32).map(|leader| kill_process_group(leader, Signal::TERM));
        // One that cannot be signalled is no longer ours.
        let _ = process.end(GRACE);
    }
}

/// Follows a domain that was suspended: takes note of its end, and has it watched again once it
/// goes on. `pid` is the ended process of a machine that still counts as running; it does so until
/// the domain is gone, so that none of its name is created meanwhile. Ends when the machine is
/// another's affair: started, stopped, or removed.
pub(super) async fn follow(fabric: &Weak<tokio::sync::Mutex<Running>>, machine: &str, pid: Option<u32>) {
    let (mut pid, mut events) = (pid, None);
    // Since when each look has found it suspended.
    let mut suspended = None;
    loop {
        let Some(running) = fabric.upgrade() else { return };
        let Some(domain) = running.lock().await.suspended_domain(machine, pid) else { return };
        drop(running);
        let found = blocking::spawn(move || toolstack::look_up(&domain)).await;
        let found = found.unwrap_or_else(|error| Err(error.to_string()));
        let Some(running) = fabric.upgrade() else { return };
        let mut running = running.lock().await;
        // It may have been stopped or started meanwhile.
        if running.suspended_domain(machine, pid).is_none() {
            return;
        }
        let trouble = match found {
            Ok(Some(Listed { state: DomainState::ShutDown(SUSPENDED), .. } | Listed { is_paused: true, .. })) => {
                drop(running);
                let since = suspended.get_or_insert_with(Instant::now).elapsed();
                tokio::time::sleep(pause_before_look(since)).await;
                continue;
            }
            Ok(Some(Listed { id, .. })) => match running.watch_domain(machine, id) {
                Ok(()) => return,
                Err(error) => Err(error.to_string()),
            },
            Ok(None) => {
                if let Some(pid) = pid.take() {
                    running.machine_ended(machine, pid);
                }
                Ok(())
            }
            Err(why) => Err(why),
        };
        let say = running.say.clone();
        drop(running);
        suspended = None;
        let waited = match trouble {
            Ok(()) => next_domain(&mut events).await.map_err(|error| format!("XenStore: {error}")),
            trouble => trouble,
        };
        if let Err(why) = waited {
            say(&format!("{machine}: its suspended domain is looked for again in {} s: {why}", AGAIN.as_secs()));
            events = None;
            tokio::time::sleep(AGAIN).await;
        }
    }
}

/// Waits until a domain has come.
async fn next_domain(events: &mut Option<AsyncFd<DomainEvents>>) -> std::io::Result<()> {
    let events = match events {
        Some(events) => events,
        None => {
            let open = || DomainEvents::open(&[DomainEvent::Introduced]);
            let opened = blocking::spawn(open).await??;
            #[expect(
                deprecated,
                reason = "unsound for a type that gives another descriptor each time; this one does not"
            )]
            let watched = AsyncFd::new(opened)?;
            events.insert(watched)
        }
    };
    loop {
        let mut ready = events.readable_mut().await?;
        if ready.get_inner_mut().take()? {
            return Ok(());
        }
        ready.clear_ready();
    }
}

impl Running {
    /// The domain of a machine that was suspended, and is still to be followed: see [`follow`].
    fn suspended_domain(&self, machine: &str, pid: Option<u32>) -> Option<Domain> {
        let running = self.machines.get(machine).filter(|m| m.pid == pid && !m.is_ending)?;
        let domain = running.plan.domain.clone()?;
        let is_saved = || self.unfit_domain(&domain).is_none() && is_suspended(&self.log_path(machine));
        (pid.is_some() || is_saved()).then_some(domain)
    }

    /// Machines of the plan whose domains were saved, as far as the plan still has the same
    /// domains.
    pub(super) fn saved_machines(&self, plan: &Plan) -> Vec<String> {
        let is_saved = |machine: &&MachinePlan| {
            let fits = machine.domain.as_ref().is_some_and(|domain| self.unfit_domain(domain).is_none());
            fits && is_suspended(&self.log_path(&machine.name))
        };
        plan.machines.iter().filter(is_saved).map(|machine| machine.name.clone()).collect()
    }

    /// Starts the process that watches a domain which goes on after it was suspended.
    fn watch_domain(&mut self, machine: &str, id: u32) -> Result<(), FabricError> {
        let runtime = self.facts.runtime.clone();
        let spawn = |source| FabricError::Spawn {
            what: format!("`tombolo {}` for {machine}", watcher::COMMAND),
            source,
            hint: "`tombolo doctor` says what is missing",
        };
        let printed = console::continue_output(&runtime, machine).map_err(spawn)?;
        let complaints = self.complaints(machine).map_err(spawn)?;
        let mut command = Command::new("/proc/self/exe");
        command.arg0("tombolo").args(watcher::words(&runtime, machine, id));
        command.stdin(Stdio::null()).stdout(printed).stderr(complaints).process_group(0);
        let child = process::spawn(&mut command).map_err(spawn)?;
        self.goes_on(machine, child, &format!("its domain goes on, as number {id}"));
        Ok(())
    }

    /// Starts the `xl` that creates a machine's domain, with the machine's console as its standard
    /// streams.
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
        // What is typed goes to the domain's terminal: xenconsole reads its standard input only
        // where that is one.
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

    /// Destroys domains of the record, and of the plan, that no `xl` watches: all but those of the
    /// machines that are `kept`. Takes them out of the record.
    pub(super) async fn destroy_left(&mut self, plan: Option<&Plan>, kept: &[String]) {
        let Some(dir) = &self.dir else { return };
        let planned = plan.iter().flat_map(|plan| &plan.machines).filter_map(|machine| machine.domain.as_ref());
        let mut all: BTreeMap<&str, &Domain> = planned.map(|d| (d.uuid.as_str(), d)).collect();
        all.extend(dir.owner().domains.iter().map(|d| (d.uuid.as_str(), d)));
        let is_kept = |d: &Domain| kept.contains(&d.machine);
        let left: Vec<Domain> = all.into_values().filter(|d| !is_kept(d)).cloned().collect();
        // Side by side: without a daemon each takes ten seconds.
        let tasks = left.into_iter().map(|domain| {
            let asked = domain.clone();
            (domain, blocking::spawn_or_run(move || toolstack::destroy(&asked)))
        });
        for (domain, task) in tasks.collect::<Vec<_>>() {
            let Domain { machine, name, .. } = &domain;
            match task.await.unwrap_or_else(|error| Err(error.to_string())) {
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

    /// Name and number for `status`, and whether it is followed ([`follow`]), its process having
    /// ended. `None`: the machine is not a Xen domain.
    pub(super) fn domain_report(&self, plan: &MachinePlan, runs: bool, has_no_process: bool) -> Option<DomainReport> {
        let domain = plan.domain.as_ref()?;
        let id = if runs { self.domain_id(&plan.name) } else { None };
        let suspended = runs && has_no_process && is_suspended(&self.log_path(&plan.name));
        Some(DomainReport { name: domain.name.clone(), id, suspended })
    }

    /// The number of a machine's domain, once its `xl` has created it.
    fn domain_id(&self, machine: &str) -> Option<u32> {
        toolstack::id_in_log(&read_log(&self.log_path(machine)))
    }

    /// How to find out where the console of a machine takes input, where it is a domain. It asks
    /// XenStore, so it is not for the async runtime's own thread.
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
    fn a_domain_that_stays_suspended_is_looked_at_less_and_less() {
        let (mut since, mut looks) = (Duration::ZERO, 0);
        while since < Duration::from_secs(3600) {
            let pause = pause_before_look(since);
            // A save of some length is over at most an eighth of it later.
            assert!(
                pause >= LOOK && pause <= LAST_LOOK && (pause == LOOK || pause <= since / 8),
                "{since:?} {pause:?}"
            );
            since += pause;
            looks += 1;
        }
        assert!(looks < 420, "{looks} runs of `xl` in an hour");
    }

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
        std::fs::write(&log, format!("{} of web (domid 3)\n", watcher::FIRST_WORDS)).unwrap();
        let watched = classify_end(&log, killed()).0;
        assert_eq!(watched, "the domain's watcher was ended by signal 9, and the domain was destroyed");
    }
}
