//! Services of cells and VMs by name: what `service` and `to` of a `[link.NAME]` ask for.
//!
//! For each such link a process beside the daemon takes the link's one seat for processes and
//! forwards calls ([`crate::bridge`]). It goes on while the daemon is replaced, and after a crash:
//! the next daemon adopts it.
//!
//! # Invariants
//! - A bridge does nothing before it is in the owner record, with its arguments. It is adopted if
//!   it was started so, its arguments are what the file asks for now, and it still has its seat.
//!   Any other bridge is ended before another one is started for its link.
//! - It is a member of the fabric as a machine is: the sockets that are for the owner refuse it.
//! - However a bridge ends, the name of its service goes with it, or is taken by the next bridge.
//!
//! # Failure
//! A bridge that ends is started again after a pause of 0.2 to 2 s, also if its name or seat is
//! taken. The reason is printed once, and is among the warnings of the status until the bridge
//! works. Calls under way end with "provider gone". A bridge that is stopped by a signal is ended
//! after two looks, of which there is one every 2 s.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Weak;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tombolo_rpc::folder;

use super::Running;
use super::backoff::Backoff;
use super::helper::Helper;
use crate::bridge::{self, Spec};
use crate::process::{self, Process, RecordedBridge};

/// How often a bridge is looked at, and looks in a row at which it was stopped by a signal.
const LOOK: Duration = Duration::from_secs(2);
const STOPPED_LOOKS: u32 = 2;
/// One that has run for so long works.
const WORKS: Duration = Duration::from_secs(3);

/// A link's bridge.
pub(crate) struct RunningBridge {
    spec: Spec,
    /// None where it could not be started.
    process: Option<Helper>,
    /// When it was started, or taken over.
    since: Instant,
    backoff: Backoff,
    /// Why it ended, or could not be started, the last time. It was said.
    fault: Option<String>,
}

/// The name of a bridge's log, without its ending.
fn log_name(link: &str) -> String {
    format!("{link}.link")
}

/// Has the name of a bridge's service go, if the bridge that had these arguments was killed.
fn clear_name(words: &[String]) {
    if let (Some(name), Ok(services)) = (bridge::service_of(words), folder::services()) {
        folder::clear(&services, name);
    }
}

/// Kills bridges, in any state. Returns those that are still there.
async fn kill(bridges: Vec<(Process, Vec<String>)>) -> Vec<u32> {
    let work = move || {
        let there = process::kill_all(&bridges.iter().map(|(process, _)| process).collect::<Vec<_>>());
        bridges.iter().for_each(|(_, words)| clear_name(words));
        there
    };
    // The task does not panic.
    tokio::task::spawn_blocking(work).await.unwrap_or_default()
}

impl Running {
    /// Adopts the bridges that an earlier daemon left and that the file asks for, ends the others, and starts what is not there.
    /// The links are served by now.
    pub(crate) async fn start_bridges(&mut self) {
        let runtime = self.facts.runtime.clone();
        let wanted: Vec<(String, Spec)> =
            self.spec.links.iter().filter_map(|link| Some((link.name.clone(), Spec::of(link, &runtime)?))).collect();
        let recorded = self.dir.as_ref().map(|dir| dir.owner().bridges.clone()).unwrap_or_default();
        let left = if recorded.is_empty() && !self.follows() { vec![] } else { process::bridges(&runtime, &recorded) };
        let seated = self.seated();
        let mut ending = Vec::new();
        for (process, words, record) in left {
            let started_with = record.as_ref().map(|record| &record.words[..]);
            let link = wanted.iter().find(|(_, spec)| started_with == Some(&spec.words()[..]));
            let pid = process.pid;
            let why = match link {
                Some((name, spec)) if seated.contains(&(name.clone(), pid)) && !self.bridges.contains_key(name) => {
                    self.took_over(format!("link {name}: its bridge is kept, process {pid} runs on"));
                    self.have_bridge(name, spec.clone(), Some(Helper::Adopted(process)));
                    continue;
                }
                Some(_) => "it has no peer ID on its link any more",
                None => "the file asks for another one, or for none",
            };
            self.took_over(format!("a link's bridge, process {pid}, is ended: {why}"));
            ending.push((process, started_with.map_or(words, <[String]>::to_vec)));
        }
        let there = kill(ending).await;
        let kept: Vec<u32> = self.bridges.values().filter_map(RunningBridge::pid).chain(there).collect();
        if recorded.iter().any(|record| !kept.contains(&record.pid)) {
            self.dir().record(|o| o.bridges.retain(|record| kept.contains(&record.pid)));
        }
        for pid in self.bridges.values().filter_map(RunningBridge::pid) {
            self.note_member(pid);
        }
        for (name, spec) in wanted {
            if self.bridges.contains_key(&name) {
                self.watch_bridge(&name);
                continue;
            }
            self.have_bridge(&name, spec, None);
            self.start_bridge(&name);
        }
    }

    /// Starts the bridge of a link that has just been made, if the file asks for one.
    pub(crate) fn start_bridge_of(&mut self, link: &crate::file::Link) {
        let Some(spec) = Spec::of(link, &self.facts.runtime) else { return };
        self.have_bridge(&link.name, spec, None);
        self.start_bridge(&link.name);
    }

    /// Ends the bridge of a link that is about to go.
    pub(crate) fn end_bridge_of(&mut self, link: &str) {
        // Once it is taken out here, nothing starts it again.
        let Some(mut bridge) = self.bridges.remove(link) else { return };
        if let Some(process) = &mut bridge.process {
            process.end();
        }
        let words = bridge.spec.words();
        clear_name(&words);
        self.dir().record(|o| o.bridges.retain(|record| record.words != words));
    }

    /// Whether an earlier daemon may have left something.
    fn follows(&self) -> bool {
        self.taking_over || self.dir.as_ref().is_some_and(|dir| dir.leftover.is_some())
    }

    /// Links and the processes on them.
    fn seated(&self) -> BTreeSet<(String, u32)> {
        let links = self.links().map(|links| links.status()).unwrap_or_default();
        let peers = links.into_iter().flat_map(|link| {
            let name = link.name.strip_prefix("link:").unwrap_or_default().to_string();
            link.peers.into_iter().map(move |peer| (name.clone(), peer.pid))
        });
        peers.collect()
    }

    fn have_bridge(&mut self, link: &str, spec: Spec, process: Option<Helper>) {
        let bridge = RunningBridge { spec, process, since: Instant::now(), backoff: Backoff::BRIDGE, fault: None };
        self.bridges.insert(link.into(), bridge);
    }

    /// Starts a link's bridge, now or after a pause.
    fn start_bridge(&mut self, link: &str) {
        let Some(spec) = self.bridges.get(link).map(|bridge| bridge.spec.clone()) else { return };
        let started = self.spawn_bridge(link, &spec);
        let Some(bridge) = self.bridges.get_mut(link) else { return };
        bridge.since = Instant::now();
        match started {
            Ok(child) => {
                bridge.process = Some(Helper::Child(child));
                self.watch_bridge(link);
            }
            Err(error) => self.bridge_failed(link, format!("its bridge could not be started: {error}")),
        }
    }

    fn spawn_bridge(&mut self, link: &str, spec: &Spec) -> io::Result<Child> {
        let words = spec.words();
        let (begins, mut tell) = io::pipe()?;
        let log = self.complaints(&log_name(link))?;
        let mut command = Command::new(bridge::program());
        command.arg0("tombolo").args(&words).stdin(Stdio::from(begins)).stdout(Stdio::null()).stderr(Stdio::from(log));
        let child = process::spawn(&mut command)?;
        let pid = child.id();
        self.note_member(pid);
        // One that has ended already has no start any more, and is found ended.
        if let Some(started_ticks) = process::start_ticks(pid) {
            self.dir().record(|o| {
                o.bridges.retain(|known| known.words != words);
                o.bridges.push(RecordedBridge { pid, started_ticks, words });
            });
            // Where it has ended meanwhile, its end is noticed as ever.
            let _ = tell.write_all(&[bridge::GO]);
        }
        Ok(child)
    }

    /// Starts a bridge again when it ends.
    fn watch_bridge(&self, link: &str) {
        let Some(pid) = self.bridges.get(link).and_then(RunningBridge::pid) else { return };
        let (me, link) = (self.me.clone(), link.to_string());
        let (process, log) = (Process::open(pid), self.log_path(&log_name(&link)));
        self.guard_bridge(&link, pid);
        tokio::spawn(async move {
            // One that is not there has ended.
            if let Some(process) = process
                && !super::machine::ended_trimming(process, &[&log], &me, || false).await
            {
                return;
            }
            let Some(running) = me.upgrade() else { return };
            let mut running = running.lock().await;
            let Some(bridge) = running.bridges.get_mut(&link).filter(|bridge| bridge.pid() == Some(pid)) else {
                return;
            };
            let how = bridge.process.as_mut().map(Helper::how).unwrap_or_default();
            bridge.process = None;
            let last: String = crate::console::tail(&log, 1).iter().map(|line| format!("; {line}")).collect();
            running.bridge_failed(&link, format!("its bridge ended ({how}{last})"));
        });
    }

    /// Ends a bridge that is stopped, which keeps its callers waiting; [`Running::watch_bridge`] starts the next one.
    fn guard_bridge(&self, link: &str, pid: u32) {
        let (me, say, link) = (self.me.clone(), self.say.clone(), link.to_string());
        let Some(process) = Process::open(pid) else { return };
        tokio::spawn(async move {
            let mut stopped = 0;
            while stopped < STOPPED_LOOKS {
                tokio::time::sleep(LOOK).await;
                if me.strong_count() == 0 || !process.is_running() {
                    return;
                }
                stopped = if process::is_stopped(pid) { stopped + 1 } else { 0 };
            }
            say(&format!("link {link}: its bridge, process {pid}, was stopped by a signal, and is ended"));
            // One that has ended meanwhile is noticed as ever.
            let _ = process.signal(rustix::process::Signal::KILL);
        });
    }

    /// Says why a link has no bridge, and starts one after a pause.
    fn bridge_failed(&mut self, link: &str, why: String) {
        let Some(bridge) = self.bridges.get_mut(link) else { return };
        if bridge.fault.as_ref() != Some(&why) || bridge.works() {
            (self.say)(&format!("link {link}: {why}; it is restarted until it stays up"));
        }
        bridge.fault = Some(why);
        let pause = bridge.backoff.failed(bridge.since, Instant::now());
        tokio::spawn(start_again(self.me.clone(), link.to_string(), pause));
    }

    /// What is wrong with bridges.
    pub(crate) fn bridge_warnings(&self) -> impl Iterator<Item = String> {
        self.bridges.iter().filter_map(|(link, bridge)| {
            let fault = bridge.fault.as_ref().filter(|_| bridge.process.is_none() || !bridge.works())?;
            Some(format!("link {link}: calls are not passed on: {fault}"))
        })
    }

    /// Ends all bridges, including those that an earlier daemon left, in any state. Nothing of them
    /// stays.
    pub(crate) async fn end_bridges(&mut self) {
        let Some(dir) = &self.dir else { return };
        let (runtime, recorded) = (dir.path().to_path_buf(), dir.owner().bridges.clone());
        // Once they are taken out here, nothing starts them again.
        let mut own = std::mem::take(&mut self.bridges);
        let pids: Vec<u32> = own.values().filter_map(RunningBridge::pid).collect();
        let left = process::bridges(&runtime, &recorded).into_iter();
        let left: Vec<_> = left.map(|(p, words, known)| (p, known.map_or(words, |known| known.words))).collect();
        let found: Vec<u32> = left.iter().map(|(process, _)| process.pid).collect();
        let there = kill(left).await;
        for pid in found {
            if there.contains(&pid) {
                self.took_over(format!(
                    "a link's bridge, process {pid}, was killed and has not ended: the kernel holds it"
                ));
            } else if !pids.contains(&pid) {
                self.took_over(format!("a link's bridge, process {pid}, was ended: its daemon had left it behind"));
            }
        }
        own.values_mut().filter_map(|bridge| bridge.process.as_mut()).for_each(Helper::end);
        // Names of those that had been killed before.
        recorded.iter().for_each(|record| clear_name(&record.words));
        if !recorded.is_empty() {
            self.dir().record(|o| o.bridges.retain(|record| there.contains(&record.pid)));
        }
    }
}

impl RunningBridge {
    fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Helper::id)
    }

    /// Whether it runs, or has run, for long enough.
    fn works(&self) -> bool {
        self.since.elapsed() >= WORKS
    }
}

async fn start_again(me: Weak<Mutex<Running>>, link: String, pause: Duration) {
    tokio::time::sleep(pause).await;
    let Some(running) = me.upgrade() else { return };
    let mut running = running.lock().await;
    if running.bridges.get(&link).is_some_and(|bridge| bridge.process.is_none()) {
        running.start_bridge(&link);
    }
}
