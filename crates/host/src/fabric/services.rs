//! Services of cells, VMs and other machines by name: what `service` and `to` of a `[link.NAME]`
//! ask for, and `[export.NAME]` and `[import.NAME]`.
//!
//! For each of them a process beside the daemon passes calls on ([`crate::bridge`]). It goes on
//! while the daemon is replaced, and after a crash: the next daemon adopts it.
//!
//! # Invariants
//! - A bridge does nothing before it is in the owner record, with its arguments. It is adopted if
//!   it was started so, its arguments are what the file asks for now, and that of a link still has
//!   its seat. Any other bridge is ended before another one is started for its section.
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
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Weak;
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tombolo_rpc::folder;

use super::Running;
use super::backoff::Backoff;
use super::helper::Helper;
use crate::blocking;
use crate::bridge::{self, Spec};
use crate::process::{self, Process, RecordedBridge};

/// How often a bridge is looked at, and looks in a row at which it was stopped by a signal.
const LOOK: Duration = Duration::from_secs(2);
const STOPPED_LOOKS: u32 = 2;
/// One that has run for so long works.
const WORKS: Duration = Duration::from_secs(3);

/// A bridge. It is known by the path of its section, such as "link.sums".
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

/// The section of a link.
pub(crate) fn link(name: &str) -> String {
    format!("link.{name}")
}

/// A section as messages name it: "link sums".
fn label(section: &str) -> String {
    section.replacen('.', " ", 1)
}

/// The name of a bridge's log, without its ending: "sums.link".
fn log_name(section: &str) -> String {
    section.split_once('.').map_or_else(|| section.into(), |(kind, name)| format!("{name}.{kind}"))
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
    // The work does not panic.
    blocking::spawn_or_run(work).await.unwrap_or_default()
}

impl Running {
    /// Adopts the bridges that an earlier daemon left and that the file asks for, ends the others,
    /// and starts what is not there. The links are served by now.
    pub(crate) async fn start_bridges(&mut self) {
        let runtime = self.facts.runtime.clone();
        let wanted = Spec::all(&self.spec, &runtime);
        let recorded = self.dir.as_ref().map(|dir| dir.owner().bridges.clone()).unwrap_or_default();
        let left = if recorded.is_empty() && !self.follows() { vec![] } else { process::bridges(&runtime, &recorded) };
        let seated = self.seated();
        let mut ending = Vec::new();
        for (process, words, record) in left {
            let started_with = record.as_ref().map(|record| &record.words[..]);
            let asked = wanted.iter().find(|(_, spec)| started_with == Some(&spec.words()[..]));
            let pid = process.pid;
            let works = |section: &String, spec: &Spec| match spec {
                Spec::Link(_) => seated.contains(&(section.clone(), pid)),
                Spec::Machines(_) => true,
            };
            let why = match asked {
                Some((section, spec)) if works(section, spec) && !self.bridges.contains_key(section) => {
                    self.took_over(format!("{}: its bridge is kept, process {pid} runs on", label(section)));
                    self.have_bridge(section, spec.clone(), Some(Helper::Adopted(process)));
                    continue;
                }
                Some(_) => "it has no peer ID on its link any more",
                None => "the file asks for another one, or for none",
            };
            self.took_over(format!("a bridge, process {pid}, is ended: {why}"));
            ending.push((process, started_with.map_or(words, <[String]>::to_vec)));
        }
        let there = kill(ending).await;
        let kept: Vec<u32> = self.bridges.values().filter_map(RunningBridge::pid).chain(there).collect();
        if recorded.iter().any(|record| !kept.contains(&record.pid)) {
            self.dir().record(|o| o.bridges.retain(|record| kept.contains(&record.pid)));
        }
        for pid in self.bridges.values().filter_map(RunningBridge::pid) {
            self.store.note_member(pid);
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

    /// Starts the bridge of a section that has just come, if it asks for one.
    pub(crate) fn start_bridge_as_asked(&mut self, section: &str) {
        let mut all = Spec::all(&self.spec, &self.facts.runtime).into_iter();
        let Some((_, spec)) = all.find(|(known, _)| known == section) else { return };
        self.have_bridge(section, spec, None);
        self.start_bridge(section);
    }

    /// Ends the bridge of a section that is about to go.
    pub(crate) fn end_bridge(&mut self, section: &str) {
        // Once it is taken out here, nothing starts it again.
        let Some(mut bridge) = self.bridges.remove(section) else { return };
        if let Some(process) = &mut bridge.process {
            process.end();
        }
        let words = bridge.spec.words();
        clear_name(&words);
        self.dir().record(|o| o.bridges.retain(|record| record.words != words));
    }

    /// Where bridges listen that a killed daemon has left. They are adopted or ended before another
    /// one listens there.
    pub(crate) fn left_listeners(&self) -> Vec<SocketAddr> {
        let Some(dir) = self.dir.as_ref().filter(|dir| !dir.owner().bridges.is_empty()) else { return vec![] };
        let left = process::bridges(dir.path(), &dir.owner().bridges).into_iter();
        left.filter_map(|(_, words, record)| bridge::listen_of(&record.map_or(words, |record| record.words))).collect()
    }

    /// Whether an earlier daemon may have left something.
    fn follows(&self) -> bool {
        self.before.hands_over || self.dir.as_ref().is_some_and(|dir| dir.leftover.is_some())
    }

    /// Sections of links, and the processes on them.
    fn seated(&self) -> BTreeSet<(String, u32)> {
        let links = self.links().map(|links| links.status()).unwrap_or_default();
        let peers = links.into_iter().flat_map(|link| {
            let section = self::link(link.name.strip_prefix("link:").unwrap_or_default());
            link.peers.into_iter().map(move |peer| (section.clone(), peer.pid))
        });
        peers.collect()
    }

    fn have_bridge(&mut self, section: &str, spec: Spec, process: Option<Helper>) {
        let bridge = RunningBridge { spec, process, since: Instant::now(), backoff: Backoff::BRIDGE, fault: None };
        self.bridges.insert(section.into(), bridge);
    }

    /// Starts a section's bridge, now or after a pause.
    fn start_bridge(&mut self, section: &str) {
        let Some(spec) = self.bridges.get(section).map(|bridge| bridge.spec.clone()) else { return };
        let started = self.spawn_bridge(section, &spec);
        let Some(bridge) = self.bridges.get_mut(section) else { return };
        bridge.since = Instant::now();
        match started {
            Ok(child) => {
                bridge.process = Some(Helper::Child(child));
                self.watch_bridge(section);
            }
            Err(error) => self.bridge_failed(section, format!("its bridge could not be started: {error}")),
        }
    }

    fn spawn_bridge(&mut self, section: &str, spec: &Spec) -> io::Result<Child> {
        let words = spec.words();
        let (begins, mut tell) = io::pipe()?;
        let log = self.complaints(&log_name(section))?;
        let mut command = Command::new(bridge::program());
        command.arg0("tombolo").args(&words).stdin(Stdio::from(begins)).stdout(Stdio::null()).stderr(Stdio::from(log));
        let child = process::spawn(&mut command)?;
        let pid = child.id();
        self.store.note_member(pid);
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
    fn watch_bridge(&self, section: &str) {
        let Some(pid) = self.bridges.get(section).and_then(RunningBridge::pid) else { return };
        let (me, section) = (self.me.clone(), section.to_string());
        let (process, log) = (Process::open(pid), self.log_path(&log_name(&section)));
        self.guard_bridge(&section, pid);
        tokio::spawn(async move {
            // One that is not there has ended.
            if let Some(process) = process
                && !super::machine::ended_trimming(process, &[&log], &me, || false).await
            {
                return;
            }
            let Some(running) = me.upgrade() else { return };
            let mut running = running.lock().await;
            let Some(bridge) = running.bridges.get_mut(&section).filter(|bridge| bridge.pid() == Some(pid)) else {
                return;
            };
            let how = bridge.process.as_mut().map(Helper::how).unwrap_or_default();
            bridge.process = None;
            let last: String = crate::console::tail(&log, 1).iter().map(|line| format!("; {line}")).collect();
            running.bridge_failed(&section, format!("its bridge ended ({how}{last})"));
        });
    }

    /// Ends a bridge that is stopped, which keeps its callers waiting; [`Running::watch_bridge`]
    /// starts the next one.
    fn guard_bridge(&self, section: &str, pid: u32) {
        let (me, say, section) = (self.me.clone(), self.say.clone(), section.to_string());
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
            say(&format!("{}: its bridge, process {pid}, was stopped by a signal, and is ended", label(&section)));
            // One that has ended meanwhile is noticed as ever.
            let _ = process.signal(rustix::process::Signal::KILL);
        });
    }

    /// Says why a section has no bridge, and starts one after a pause.
    fn bridge_failed(&mut self, section: &str, why: String) {
        let Some(bridge) = self.bridges.get_mut(section) else { return };
        if bridge.fault.as_ref() != Some(&why) || bridge.works() {
            (self.say)(&format!("{}: {why}; it is restarted until it stays up", label(section)));
        }
        bridge.fault = Some(why);
        let pause = bridge.backoff.failed(bridge.since, Instant::now());
        tokio::spawn(start_again(self.me.clone(), section.to_string(), pause));
    }

    /// What is wrong with bridges.
    pub(crate) fn bridge_warnings(&self) -> impl Iterator<Item = String> {
        self.bridges.iter().filter_map(|(section, bridge)| {
            let fault = bridge.fault.as_ref().filter(|_| bridge.process.is_none() || !bridge.works())?;
            Some(format!("{}: calls are not passed on: {fault}", label(section)))
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
                self.took_over(format!("a bridge, process {pid}, was killed and has not ended: the kernel holds it"));
            } else if !pids.contains(&pid) {
                self.took_over(format!("a bridge, process {pid}, was ended: its daemon had left it behind"));
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

async fn start_again(me: Weak<Mutex<Running>>, section: String, pause: Duration) {
    tokio::time::sleep(pause).await;
    let Some(running) = me.upgrade() else { return };
    let mut running = running.lock().await;
    if running.bridges.get(&section).is_some_and(|bridge| bridge.process.is_none()) {
        running.start_bridge(&section);
    }
}
