//! Cells and VMs: started, adopted, watched, ended, and started again where the file asks for that.

use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use std::os::unix::process::{CommandExt, ExitStatusExt};
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use super::backoff::Backoff;
use super::ending::{Ending, end_all};
use super::events::{Facts, Kind};
use super::{APPLY_RUNS, FabricError, Running, domains};
use crate::api::Console;
use crate::blocking;
use crate::confine::{self, Writes};
use crate::console;
use crate::file::{self, Boot, MachineKind, Restart};
use crate::plan::MachinePlan;
use crate::process::{self, Process};
use crate::qemu::argv::{has_disk, memory_place, monitor_path};
use crate::qemu::{cloud_init, monitor};
use crate::rundir::Settled;
use crate::xen::toolstack;

/// How often the size of a console, and of QEMU's complaints, is looked at.
const TRIM: Duration = Duration::from_secs(2);
/// How often a machine that is due to be started again looks whether an apply is done.
const APPLYING: Duration = Duration::from_millis(200);
/// Lines of a console that a report of a death shows.
const LAST_LINES: usize = 12;

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Exit code or signal, as a phrase.
    pub how: String,
    /// Whether it ended well.
    pub well: bool,
    /// The last lines of its console, and of QEMU's own complaints.
    pub last_lines: Vec<String>,
}

/// A machine of the fabric, running or not.
pub(crate) struct RunningMachine {
    pub(crate) plan: MachinePlan,
    pub(crate) pid: Option<u32>,
    child: Option<Child>,
    pub(crate) adopted: bool,
    pub(crate) restarts: u32,
    /// The pause after its next failure.
    backoff: Backoff,
    /// When it is started again, if it is to be.
    pub(crate) again_at: Option<Instant>,
    pub(crate) ended: Option<Ended>,
    /// The user asked for its end.
    pub(crate) stopped: bool,
    /// That is under way.
    pub(super) is_ending: bool,
    /// It could not be started, ever.
    pub(super) never_started: bool,
    /// It is started once those that it depends on are on the network.
    pub(super) waits: bool,
    /// All of its ports have been up since it was started.
    pub(super) was_up: bool,
    /// Its process has ended: its number may be another's now.
    pub(super) is_gone: bool,
    pub(crate) console: PathBuf,
    /// When it was started, or taken over.
    pub(crate) since: Instant,
}

impl RunningMachine {
    /// One that does not run, and never has.
    fn new(plan: &MachinePlan, console: PathBuf) -> RunningMachine {
        RunningMachine {
            plan: plan.clone(),
            pid: None,
            child: None,
            adopted: false,
            restarts: 0,
            backoff: Backoff::MACHINE,
            again_at: None,
            ended: None,
            stopped: false,
            is_ending: false,
            never_started: false,
            waits: false,
            was_up: false,
            is_gone: false,
            console,
            since: Instant::now(),
        }
    }

    /// Takes note of a failure; how long to wait before it is started again.
    fn failed(&mut self) -> Duration {
        let now = Instant::now();
        let pause = self.backoff.failed(self.since, now);
        // If it cannot even be started, the next failure counts from here.
        self.since = now;
        self.again_at = Some(now + pause);
        pause
    }

    /// Gives the process up, to be ended by the caller; its end is not reported.
    pub(crate) fn let_go(&mut self) -> Option<Process> {
        self.stopped = true;
        self.waits = false;
        self.pid.filter(|_| !self.is_gone).and_then(Process::open)
    }
}

impl Drop for RunningMachine {
    fn drop(&mut self) {
        // Reaps a child that has been ended; one that runs on is adopted by the next daemon.
        if let Some(child) = &mut self.child {
            let _ = child.try_wait();
        }
    }
}

impl RunningMachine {
    /// The monitor of a machine that is asked to shut down before it is ended: one that has a disk
    /// to leave in order. A guest without one has nothing to save, and a cell does not know the
    /// button.
    pub(super) fn button(&self, runtime: &Path) -> Option<PathBuf> {
        has_disk(&self.plan.argv).then(|| monitor_path(runtime, &self.plan.name))
    }
}

/// Waits until a process has ended; `false` if that cannot be watched.
pub(crate) async fn ended(process: Process) -> bool {
    #[expect(deprecated, reason = "unsound for a type that gives another descriptor each time; an OwnedFd does not")]
    let fd = AsyncFd::new(process.pidfd);
    match fd {
        Ok(fd) => fd.readable().await.is_ok(),
        Err(_) => false,
    }
}

/// Waits until a process has ended, and meanwhile keeps what it writes from growing; `false` if
/// that cannot be watched, or the fabric has gone. It does not wait any longer for a process that
/// `is_useless`.
pub(super) async fn ended_trimming(
    process: Process,
    logs: &[&Path],
    fabric: &std::sync::Weak<tokio::sync::Mutex<Running>>,
    is_useless: impl Fn() -> bool,
) -> bool {
    let mut gone = std::pin::pin!(ended(process));
    loop {
        if let Ok(ended) = tokio::time::timeout(TRIM, &mut gone).await {
            return ended;
        }
        // What cannot be trimmed now is looked at again after the next pause.
        logs.iter().for_each(|log| drop(console::trim(log)));
        if fabric.strong_count() == 0 {
            return false;
        }
        if is_useless() {
            return true;
        }
    }
}

/// Destroys the domain of a machine whose `xl` has ended, if it is still there: that was killed.
/// Until this is done the machine counts as running, so that none of that name is created
/// meanwhile. A suspended domain is followed instead.
async fn domain_ended(fabric: &std::sync::Weak<tokio::sync::Mutex<Running>>, machine: &str, pid: u32) {
    let (domain, log) = {
        let Some(running) = fabric.upgrade() else { return };
        let mut running = running.lock().await;
        let log = running.log_path(machine);
        let Some(it) = running.machines.get_mut(machine).filter(|m| m.pid == Some(pid)) else { return };
        it.is_gone = true;
        (running.domain_of(machine), log)
    };
    let Some(domain) = domain else { return };
    if domains::is_suspended(&log) {
        return domains::follow(fabric, machine, Some(pid)).await;
    }
    let asked = domain.clone();
    let done =
        blocking::insist(move || toolstack::destroy(&asked)).await.unwrap_or_else(|error| Err(error.to_string()));
    let Some(running) = fabric.upgrade() else { return };
    let mut running = running.lock().await;
    match done {
        // Started by hand after a stop, it is another one's.
        Ok(_) if running.machines.get(machine).is_some_and(|m| m.pid == Some(pid)) => running.forget_domain(&domain),
        Ok(_) => {}
        Err(why) => {
            (running.say)(&format!("{machine}: its domain may run on: {why}; `xl destroy {}` ends it", domain.name));
        }
    }
}

/// What an exit status means. A cell leaves through isa-debug-exit, where code c is QEMU's 2c + 1;
/// 1 is QEMU's own failure.
fn classify_end(status: ExitStatus, kind: MachineKind) -> (String, bool) {
    match (status.code(), status.signal()) {
        (Some(0), _) => ("it ended".into(), true),
        (Some(5), _) if kind == MachineKind::Cell => ("it ended".into(), true),
        (Some(code), _) if kind == MachineKind::Cell && code % 2 == 1 && code != 1 => {
            let meaning = match code >> 1 {
                1 => " (it says that it failed)",
                0x10 => " (panic)",
                0x11 => " (processor exception)",
                0x12 => " (stack overflow)",
                _ => "",
            };
            (format!("cell code {}{meaning}", code >> 1), false)
        }
        (Some(code), _) => (format!("QEMU's exit code {code}"), false),
        (None, Some(signal)) => (format!("signal {signal}"), false),
        (None, None) => ("an unknown end".into(), false),
    }
}

impl Running {
    pub(crate) fn machine_spec(&self, name: &str) -> Option<&file::Machine> {
        self.spec.machines.iter().find(|m| m.name == name)
    }

    /// Where a machine's console is.
    pub(crate) fn console(&self, name: &str) -> Console {
        let runtime = &self.facts.runtime;
        Console { log: console::log_path(runtime, name), input: Some(console::tty_path(runtime, name)) }
    }

    pub(crate) fn start_machine(&mut self, plan: &MachinePlan) -> Result<(), FabricError> {
        self.restore_for(&plan.name)?;
        let child = match &plan.domain {
            Some(domain) => self.spawn_xl(plan, domain)?,
            None => self.spawn_qemu(plan)?,
        };
        let pid = child.id();
        // Of one that is started again it stays known how it ended.
        let before = self.machines.get(&plan.name).map(|m| (m.restarts, m.backoff, m.ended.clone()));
        let (restarts, backoff, ended) = before.unwrap_or((0, Backoff::MACHINE, None));
        let console = console::log_path(&self.facts.runtime, &plan.name);
        let mut machine = RunningMachine::new(plan, console);
        machine.pid = Some(pid);
        machine.child = Some(child);
        machine.restarts = restarts;
        machine.backoff = backoff;
        machine.ended = ended;
        self.machines.insert(plan.name.clone(), machine);
        self.store.note_member(pid);
        self.tell_who_is_away();
        self.watch_machine(&plan.name, pid);
        self.take_seats(&plan.seats, pid)?;
        self.settle(&plan.name, pid);
        (self.say)(&format!("{}: started as process {pid} ({})", plan.name, plan.accel()));
        let text = format!("{} was started as process {pid} ({})", plan.name, plan.accel());
        self.events.add(Kind::Start, Facts::of(&plan.name).pid(pid), &text);
        Ok(())
    }

    fn spawn_qemu(&self, plan: &MachinePlan) -> Result<Child, FabricError> {
        let spawn = |source| FabricError::Spawn {
            what: format!("{} for {}", plan.argv[0], plan.name),
            source,
            hint: "`tombolo doctor` says what is missing",
        };
        let (typed, printed) = console::make(&self.facts.runtime, &plan.name).map_err(spawn)?;
        let complaints = self.complaints(&plan.name).map_err(spawn)?;
        let plain = plan.seats.iter().filter(|s| s.is_plain()).map(|s| s.link.name.clone());
        let plain: Vec<String> = plain.filter(|_| self.links().is_some()).collect();
        let regions = plain.iter().flat_map(|name| self.links().map(|links| links.region(name)));
        let regions = regions.collect::<Result<Vec<_>, _>>()?;
        let spec = self.machine_spec(&plan.name);
        let disks = spec.and_then(|m| match &m.boot {
            Boot::Vm { disks, .. } => Some(disks.iter().map(|(path, _)| path.clone()).collect::<Vec<_>>()),
            Boot::Cell(_) => None,
        });
        if let Some((spec, Boot::Vm { cloud_init: Some(user_data), .. })) = spec.map(|m| (m, &m.boot)) {
            let place = cloud_init::path(&self.facts.runtime, &plan.name);
            let network_config = cloud_init::network_config(&self.spec, spec);
            cloud_init::write(&place, &plan.name, user_data, network_config.as_deref()).map_err(spawn)?;
        }
        let writes = Writes { runtime: self.facts.runtime.clone(), files: disks.unwrap_or_default() };
        let has_own_arguments = spec.is_none_or(|m| !m.qemu.is_empty());
        let start = |numbers: &[i32]| {
            let (mut command, words) = confine::command(&plan.argv, &writes, has_own_arguments);
            for word in &words {
                let place = plain.iter().position(|name| word.ends_with(&memory_place(name)));
                match place {
                    Some(i) => {
                        command.arg(word.replace(&memory_place(&plain[i]), &memory_place(&numbers[i].to_string())))
                    }
                    None => command.arg(word),
                };
            }
            command.stdin(typed).stdout(printed).stderr(complaints);
            // A group of its own: a terminal's ^C is for the daemon, which ends its guests in
            // order.
            command.process_group(0);
            command
        };
        process::spawn_with(&regions, start).map_err(spawn)
    }

    /// Starts a machine, now or once those that it depends on are on the network.
    pub(crate) fn start_or_wait(&mut self, plan: &MachinePlan) -> Result<(), FabricError> {
        let on = self.waits_for(&plan.name);
        if on.is_empty() {
            return self.start_machine(plan);
        }
        (self.say)(&format!("{}: waits for {}", plan.name, on.join(", ")));
        let console = console::log_path(&self.facts.runtime, &plan.name);
        let mut machine = RunningMachine::new(plan, console);
        machine.waits = true;
        self.machines.insert(plan.name.clone(), machine);
        self.tell_who_is_away();
        Ok(())
    }

    /// Those that a machine depends on and that have not been on the network yet.
    fn waits_for(&self, name: &str) -> Vec<String> {
        let on = self.machine_spec(name).map(|m| m.depends_on.clone()).unwrap_or_default();
        on.into_iter().filter(|other| self.machines.get(other).is_none_or(|m| !m.was_up)).collect()
    }

    /// Starts the machines that wait and need not any more. An apply does so at its end, by its
    /// plan.
    pub(crate) fn start_waiting(&mut self) {
        if self.applying {
            return;
        }
        let waiting = self.machines.values().filter(|m| m.waits).map(|m| m.plan.clone());
        let ready: Vec<_> = waiting.filter(|plan| self.waits_for(&plan.name).is_empty()).collect();
        for plan in ready {
            if let Err(error) = self.start_machine(&plan) {
                self.note_not_started(&plan, &error);
            }
        }
    }

    /// Notes a machine that could not be started, as one that failed.
    pub(crate) fn note_not_started(&mut self, plan: &MachinePlan, error: &FabricError) {
        let how = format!("it could not be started: {error}");
        (self.say)(&format!("{}: {how}", plan.name));
        let facts = Facts::of(&plan.name).cause(&error.to_string());
        self.events.add(Kind::Death, facts, &format!("{} could not be started", plan.name));
        let console = console::log_path(&self.facts.runtime, &plan.name);
        let mut machine = RunningMachine::new(plan, console);
        machine.ended = Some(Ended { how, well: false, last_lines: vec![] });
        machine.never_started = true;
        self.machines.insert(plan.name.clone(), machine);
        self.tell_who_is_away();
    }

    /// Takes over a machine that an earlier daemon started.
    pub(crate) fn adopt(&mut self, plan: &MachinePlan, pid: &u32) -> Result<(), FabricError> {
        let console = console::log_path(&self.facts.runtime, &plan.name);
        let mut machine = RunningMachine::new(plan, console);
        machine.pid = Some(*pid);
        machine.adopted = true;
        // It was settled before.
        machine.was_up = true;
        self.machines.insert(plan.name.clone(), machine);
        self.store.note_member(*pid);
        self.tell_who_is_away();
        self.watch_machine(&plan.name, *pid);
        Ok(())
    }

    /// Takes note of a machine that did not run under the daemon before either.
    pub(crate) fn leave_idle(&mut self, plan: &MachinePlan, how: &str) {
        let ended = (!how.is_empty()).then(|| Ended { how: how.into(), well: false, last_lines: vec![] });
        let console = console::log_path(&self.facts.runtime, &plan.name);
        let mut machine = RunningMachine::new(plan, console);
        machine.ended = ended;
        machine.stopped = true;
        self.machines.insert(plan.name.clone(), machine);
        self.tell_who_is_away();
    }

    /// Takes note of a machine whose domain was saved under the daemon before, and may be restored.
    pub(crate) fn leave_saved(&mut self, plan: &MachinePlan) {
        let (how, well) = domains::classify_end(&self.log_path(&plan.name), None);
        let console = console::log_path(&self.facts.runtime, &plan.name);
        let mut machine = RunningMachine::new(plan, console);
        machine.ended = Some(Ended { how, well, last_lines: vec![] });
        // What depends on it was started with it.
        machine.was_up = true;
        self.machines.insert(plan.name.clone(), machine);
        self.tell_who_is_away();
        let (me, name) = (self.me.clone(), plan.name.clone());
        tokio::spawn(async move { domains::follow(&me, &name, None).await });
    }

    /// Takes note of another process of a machine that goes on, whose own has ended.
    pub(super) fn goes_on(&mut self, name: &str, child: Child, how: &str) {
        let pid = child.id();
        let Some(machine) = self.machines.get_mut(name) else { return };
        if let Some(mut before) = machine.child.replace(child) {
            let _ = before.try_wait();
        }
        machine.pid = Some(pid);
        (machine.adopted, machine.is_gone, machine.stopped) = (false, false, false);
        machine.since = Instant::now();
        self.store.note_member(pid);
        self.tell_who_is_away();
        self.watch_machine(name, pid);
        self.settle(name, pid);
        (self.say)(&format!("{name}: {how}; process {pid} watches it"));
        self.events.add(Kind::Start, Facts::of(name).pid(pid), &format!("{name}: {how}"));
    }

    /// Notes all that run as ready to be adopted: in a handover their connections go on,
    /// independent of their drivers.
    pub(crate) fn note_all_settled(&mut self) {
        let running: Vec<_> = self.machines.iter().filter_map(|(name, m)| Some((name.clone(), m.pid?))).collect();
        for (name, pid) in running {
            self.note_settled(&name, pid);
        }
    }

    /// Writes into the owner record that the machine can be adopted, once all of its ports have
    /// been up.
    pub(crate) fn settle(&self, name: &str, pid: u32) {
        let (me, name) = (self.me.clone(), name.to_string());
        let own = self.ports.values().filter(|p| p.plan.machine.as_deref() == Some(&name));
        let waits = own.map(|p| {
            let (tell, told) = oneshot::channel();
            // The receiver may have gone.
            let up = move || tell.send(()).unwrap_or(());
            self.workers[p.worker].thread.handle().when_up(p.token, up).map(|()| told)
        });
        // A worker that has ended is reported by itself.
        let Ok(waits) = waits.collect::<Result<Vec<_>, _>>() else { return };
        tokio::spawn(async move {
            for told in waits {
                // A port that goes before it was up leaves nothing to note, and so does one that
                // waits for the machine's next start.
                if told.await.is_err() {
                    return;
                }
            }
            let Some(running) = me.upgrade() else { return };
            let mut running = running.lock().await;
            if running.dir.is_some()
                && let Some(machine) = running.machines.get_mut(&name).filter(|m| m.pid == Some(pid))
            {
                machine.was_up = true;
                running.note_settled(&name, pid);
                running.start_waiting();
            }
        });
    }

    fn note_settled(&mut self, name: &str, pid: u32) {
        let Some(argv) = self.machines.get(name).map(|m| m.plan.argv.clone()) else { return };
        // A script that runs QEMU as its child is not QEMU.
        let pid = monitor::listener(&monitor_path(&self.facts.runtime, name)).unwrap_or(pid);
        let Some(started_ticks) = process::start_ticks(pid) else { return };
        self.store.note_member(pid);
        let settled = Settled { machine: name.to_string(), pid, started_ticks, argv };
        // If the record cannot be written, the next daemon restarts the machine.
        self.dir().record(|o| {
            o.settled.retain(|s| s.machine != settled.machine);
            o.settled.push(settled);
        });
    }

    fn watch_machine(&self, name: &str, pid: u32) {
        let (me, name) = (self.me.clone(), name.to_string());
        let (mut process, ticks) = (Process::open(pid), process::start_ticks(pid));
        let is_domain = self.domain_of(&name).is_some();
        tokio::spawn(async move {
            loop {
                let (console, complaints) = {
                    let Some(running) = me.upgrade() else { return };
                    let running = running.lock().await;
                    let console = running.machines.get(&name).map(|m| m.console.clone());
                    (console.unwrap_or_default(), running.log_path(&name))
                };
                let logs = [&*console, &*complaints];
                // The `xl` of a domain that was suspended waits for the end of its console only.
                let is_useless = || is_domain && domains::is_suspended(&complaints);
                if let Some(process) = process.take()
                    && ended_trimming(process, &logs, &me, is_useless).await
                {
                    break;
                }
                // It could not be watched, perhaps because no descriptor was free, and need not
                // have ended.
                tokio::time::sleep(TRIM).await;
                process = Process::open(pid);
                if process::has_gone(pid, ticks) {
                    break;
                }
            }
            if is_domain && let Some(process) = Process::open(pid).filter(|_| process::start_ticks(pid) == ticks) {
                // The work does not panic.
                let _ = blocking::spawn_or_run(move || domains::end_xl(&process)).await;
            }
            domain_ended(&me, &name, pid).await;
            let Some(running) = me.upgrade() else { return };
            let mut pause = running.lock().await.machine_ended(&name, pid);
            drop(running);
            while let Some(wait) = pause {
                tokio::time::sleep(wait).await;
                let Some(running) = me.upgrade() else { return };
                let mut running = running.lock().await;
                // It may have been stopped, or started by hand. Where it has failed again since,
                // that failure has its own pause.
                let now = Instant::now();
                let due = |m: &RunningMachine| m.pid.is_none() && !m.stopped && m.again_at.is_some_and(|at| at <= now);
                if !running.machines.get(&name).is_some_and(due) {
                    return;
                }
                if running.applying {
                    pause = Some(APPLYING);
                    continue;
                }
                let Some(machine) = running.machines.get_mut(&name) else { return };
                machine.restarts += 1;
                let plan = machine.plan.clone();
                let Err(error) = running.start_machine(&plan) else { return };
                (running.say)(&format!("{name}: {error}"));
                let facts = Facts::of(&name).cause(&error.to_string());
                running.events.add(Kind::Death, facts, &format!("{name} could not be started again"));
                pause = running.machines.get_mut(&name).filter(|m| m.pid.is_none()).map(RunningMachine::failed);
            }
        });
    }

    /// Takes note of a machine's end; after which pause it is to be started again.
    pub(super) fn machine_ended(&mut self, name: &str, pid: u32) -> Option<Duration> {
        let log = self.log_path(name);
        let spec = self.machine_spec(name).map(|m| (m.kind, m.restart));
        let machine = self.machines.get_mut(name).filter(|m| m.pid == Some(pid))?;
        let (kind, restart) = spec.unwrap_or((MachineKind::Vm, Restart::No));
        machine.pid = None;
        machine.is_gone = false;
        let status = machine.child.take().map(|mut c| c.wait());
        let is_domain = machine.plan.domain.is_some();
        let (how, well) = match status {
            Some(Ok(status)) if is_domain => domains::classify_end(&log, Some(status)),
            None if is_domain => domains::classify_end(&log, None),
            Some(Ok(status)) => classify_end(status, kind),
            Some(Err(error)) => (error.to_string(), false),
            // Only a parent is told how.
            None => ("it ended, how is not known since an earlier daemon had started it".into(), false),
        };
        let mut last_lines = console::tail(&machine.console, LAST_LINES);
        // Where a domain has ended in order, its `xl` has complained of nothing.
        let (program, lines) = match is_domain {
            true => ("xl", if how.starts_with("xl ") { 8 } else { 0 }),
            false => ("qemu", 4),
        };
        last_lines.extend(console::tail(&log, lines).into_iter().map(|l| format!("{program}: {l}")));
        machine.ended = Some(Ended { how: how.clone(), well, last_lines: last_lines.clone() });
        let stopped = machine.stopped;
        let wanted = restart == Restart::Always || restart == Restart::OnFailure && !well;
        let is_saved = is_domain && domains::is_suspended(&log);
        let again = (!stopped && wanted && !is_saved).then(|| machine.failed());
        self.tell_who_is_away();
        let facts = Facts::of(name).pid(pid).cause(&how);
        if stopped {
            self.events.add(Kind::Stop, facts, &format!("{name} was stopped"));
            return None;
        }
        let then = again.map(|pause| format!("; starting it again in {} s", pause.as_secs())).unwrap_or_default();
        let mut text = format!("{name}: {how}{then}");
        for line in &last_lines {
            text.push_str(&format!("\n    | {line}"));
        }
        (self.say)(&text);
        let (kind, word) = match (well, is_saved) {
            (_, true) => (Kind::Exit, "was saved"),
            (true, _) => (Kind::Exit, "ended by itself"),
            (false, _) => (Kind::Death, "failed"),
        };
        self.events.add(kind, facts, &format!("{name} {word}{then}"));
        again
    }

    /// Starts a machine that is not running.
    ///
    /// # Errors
    /// If there is none of that name, it runs, or it does not start.
    pub fn run(&mut self, name: &str) -> Result<(), FabricError> {
        let Some(machine) = self.machines.get(name) else { return Err(self.unknown("machine", name)) };
        if machine.is_ending {
            return Err(FabricError::Busy(format!("machine \"{name}\" is being stopped; try again when that is done")));
        }
        if let Some(pid) = machine.pid {
            return Err(FabricError::State(format!("machine \"{name}\" runs already, as process {pid}")));
        }
        let plan = machine.plan.clone();
        self.start_machine(&plan)
    }
}

/// What becomes of a machine that was added while the fabric ran, once it is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// It goes with its ports.
    Forget,
    /// It is started again.
    Run,
}

/// Ends a machine: by its power button if it has a disk, then SIGTERM, then SIGKILL. One that was
/// added while the fabric ran goes with its ports; one of the file stays as stopped. Nothing comes
/// between the end and a new start, neither an apply nor another request.
///
/// # Errors
/// If there is none of that name, it is being stopped already, an apply is under way, or it does
/// not start again.
pub(super) async fn stop(shared: &super::Shared, name: &str, then: Then) -> Result<(), FabricError> {
    let (ending, say, pid) = {
        let mut running = shared.running.lock().await;
        let say = running.say.clone();
        let runtime = running.facts.runtime.clone();
        // It may have begun after the request was taken.
        if running.applying {
            return Err(FabricError::Busy(APPLY_RUNS.into()));
        }
        let Some(machine) = running.machines.get_mut(name) else { return Err(running.unknown("machine", name)) };
        let (button, domain, pid) = (machine.button(&runtime), machine.plan.domain.clone(), machine.pid);
        if std::mem::replace(&mut machine.is_ending, true) {
            return Err(FabricError::Busy(format!(
                "machine \"{name}\" is being stopped already; try again when that is done"
            )));
        }
        (Ending { process: machine.let_go(), button, domain }, say, pid)
    };
    let left = end_all(vec![ending], &say).await;
    let mut running = shared.running.lock().await;
    // Of its name there is no other one: while it ends none is started.
    if let Some(machine) = running.machines.get_mut(name) {
        machine.is_ending = false;
    }
    if let Some(pid) = pid.filter(|pid| running.machines.get(name).is_some_and(|m| m.pid == Some(*pid))) {
        running.machine_ended(name, pid);
    }
    if let Some(domain) = running.domain_of(name).filter(|d| running.dir.is_some() && !left.contains(d)) {
        running.forget_domain(&domain);
    }
    if then == Then::Forget && running.forget_addition(name)? {
        let ports: Vec<_> = running.ports.values().filter(|p| p.plan.machine.as_deref() == Some(name)).collect();
        let ports: Vec<String> = ports.into_iter().map(|p| p.plan.name.clone()).collect();
        for port in ports {
            running.drop_port(&port);
        }
        running.machines.remove(name);
        running.spec.machines.retain(|m| m.name != name);
        // They are not in force since the machine has ended.
        running.spec.forwards.retain(|f| !matches!(&f.target, file::Target::Name(target) if target == name));
        running.update_names();
        running.settle_away();
    }
    match left.first() {
        None if then == Then::Run => running.run(name),
        None => Ok(()),
        Some(crate::xen::config::Domain { name, .. }) => {
            Err(FabricError::State(format!("its domain {name} may run on; `xl destroy {name}` ends it")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_classified_by_what_the_kind_means_with_them() {
        let status = |raw| ExitStatus::from_raw(raw);
        assert_eq!(classify_end(status(0), MachineKind::Vm), ("it ended".into(), true));
        assert_eq!(classify_end(status(5 << 8), MachineKind::Cell), ("it ended".into(), true));
        assert_eq!(classify_end(status(1 << 8), MachineKind::Cell), ("QEMU's exit code 1".into(), false));
        assert!(!classify_end(status(5 << 8), MachineKind::Vm).1);
        assert_eq!(classify_end(status(33 << 8), MachineKind::Cell).0, "cell code 16 (panic)");
        assert_eq!(classify_end(status(9), MachineKind::Cell), ("signal 9".into(), false));
    }
}
