//! Tells the daemon what it should know, in a task of its own: a daemon that hangs holds up nothing
//! else, above all no answers to other machines, which would forget this one.
//!
//! What the daemon did not take is told again: at once when it answers again, after a growing pause
//! where it refused, and all of it once in a while, since equal lists change nothing. A daemon
//! without a report has started again, and one that takes a network in again knows nothing of it.
//! What it has of machines that are no peers any more, or that are not heard within a lease of this
//! program's start, is removed.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use crate::daemon::{Daemon, DaemonError, Remote};
use crate::say;

/// The first and the longest pause after a refusal.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How often what is due is looked at, where nothing new comes.
const TICK: Duration = Duration::from_millis(500);
/// How often everything is told again.
const AGAIN: Duration = Duration::from_secs(60);

/// What the daemon should know.
#[derive(Debug)]
pub enum Tell {
    /// What a machine has in a network; `None` if it left.
    Remote {
        /// Network and machine.
        key: (String, String),
        /// Its members.
        remote: Option<Remote>,
    },
    /// The addresses that this machine lost.
    Lost {
        /// The network.
        network: String,
        /// All of them.
        addresses: Vec<IpAddr>,
    },
    /// The networks that the daemon has now.
    Networks(BTreeSet<String>),
    /// The report for `tombolo span status`.
    Report(Box<serde_json::Value>),
}

/// Something that is due, and when it may be told.
#[derive(Clone, Copy, Debug)]
struct Due {
    at: Instant,
    pause: Duration,
}

/// The task's state.
pub struct Teller {
    daemon: Daemon,
    peers: BTreeSet<String>,
    /// When machines that were not heard yet are removed.
    settled: Instant,
    remotes: BTreeMap<(String, String), Option<Remote>>,
    lost: BTreeMap<String, Vec<IpAddr>>,
    due: BTreeMap<(String, String), Due>,
    due_lost: BTreeMap<String, Due>,
    networks: BTreeSet<String>,
    report: Option<Box<serde_json::Value>>,
    /// Networks in which it was not looked yet for machines that this program has heard nothing of.
    unseen: BTreeSet<String>,
    /// Such machines, of which the daemon has members.
    strangers: BTreeSet<(String, String)>,
    /// What was said of each refusal, so that it is said once.
    said: BTreeMap<String, String>,
    told_all: Instant,
}

fn now_due() -> Due {
    Due { at: Instant::now(), pause: FIRST_PAUSE }
}

/// What may be told now, of networks that the daemon has.
fn ready<K: Clone>(all: &BTreeMap<K, Due>, is_there: impl Fn(&K) -> bool) -> Vec<(K, Due)> {
    let now = Instant::now();
    all.iter().filter(|(key, due)| due.at <= now && is_there(key)).map(|(key, due)| (key.clone(), *due)).collect()
}

impl Due {
    fn refused(self) -> Due {
        Due { at: Instant::now() + self.pause, pause: (self.pause * 2).min(LONGEST_PAUSE) }
    }
}

impl Teller {
    /// Starts the task, in a local set, with nothing to tell yet; it ends with the sender. `lease`
    /// is how long machines have to be heard.
    pub fn start(daemon: Daemon, peers: impl Iterator<Item = String>, lease: Duration) -> mpsc::UnboundedSender<Tell> {
        let (tells, taken) = mpsc::unbounded_channel();
        let teller = Teller {
            daemon,
            peers: peers.collect(),
            settled: Instant::now() + 2 * lease,
            remotes: BTreeMap::new(),
            lost: BTreeMap::new(),
            due: BTreeMap::new(),
            due_lost: BTreeMap::new(),
            networks: BTreeSet::new(),
            report: None,
            unseen: BTreeSet::new(),
            strangers: BTreeSet::new(),
            said: BTreeMap::new(),
            told_all: Instant::now(),
        };
        tokio::task::spawn_local(teller.run(taken));
        tells
    }

    async fn run(mut self, mut tells: mpsc::UnboundedReceiver<Tell>) {
        loop {
            match tokio::time::timeout(TICK, tells.recv()).await {
                Ok(Some(tell)) => self.take(tell),
                Ok(None) => return,
                Err(_) => {}
            }
            while let Ok(tell) = tells.try_recv() {
                self.take(tell);
            }
            // What is left stays due.
            let _ = self.tell().await;
        }
    }

    fn take(&mut self, tell: Tell) {
        match tell {
            // Of a network or machine that the daemon was never told of there is nothing to remove.
            Tell::Remote { key, remote: None } if !self.remotes.contains_key(&key) => {}
            Tell::Remote { key, remote } => {
                self.strangers.remove(&key);
                self.due.insert(key.clone(), now_due());
                self.remotes.insert(key, remote);
            }
            Tell::Lost { network, addresses } => {
                self.due_lost.insert(network.clone(), now_due());
                self.lost.insert(network, addresses);
            }
            Tell::Networks(networks) => {
                let before = std::mem::replace(&mut self.networks, networks.clone());
                networks.difference(&before).for_each(|network| self.all_of(network));
            }
            Tell::Report(report) => self.report = Some(report),
        }
    }

    /// Everything about a network is due, also that nothing is lost.
    fn all_of(&mut self, network: &str) {
        let keys = self.remotes.keys().filter(|(name, _)| name == network);
        self.due.extend(keys.map(|key| (key.clone(), now_due())));
        self.due_lost.insert(network.into(), now_due());
        self.unseen.insert(network.into());
    }

    fn everything(&mut self) {
        self.told_all = Instant::now();
        self.networks.clone().iter().for_each(|network| self.all_of(network));
    }

    /// Tells what is due.
    ///
    /// # Errors
    /// The daemon does not answer.
    async fn tell(&mut self) -> Result<(), DaemonError> {
        if let Some(report) = self.report.take() {
            if !self.daemon.has_report().await? {
                self.everything();
            }
            match self.daemon.report(&report).await {
                Err(error) if !error.is_absent() => self.say_once("report".into(), &error),
                told => told?,
            }
        }
        if self.told_all.elapsed() >= AGAIN {
            self.everything();
        }
        for (key, due) in ready(&self.due, |(network, _)| self.networks.contains(network)) {
            let (network, machine) = &key;
            let told = match self.remotes.get(&key) {
                Some(Some(remote)) => self.daemon.set_remote(network, machine, remote).await,
                _ => self.daemon.forget_remote(network, machine).await,
            };
            match told {
                Err(error) if error.is_absent() => return Err(error),
                Err(error) => {
                    self.say_once(format!("{network} {machine}"), &error);
                    self.due.insert(key, due.refused());
                }
                Ok(()) => {
                    self.due.remove(&key);
                    self.said.remove(&format!("{network} {machine}"));
                    if self.remotes.get(&key) == Some(&None) {
                        self.remotes.remove(&key);
                    }
                }
            }
        }
        for (network, due) in ready(&self.due_lost, |network| self.networks.contains(network)) {
            let lost = self.lost.get(&network).map(Vec::as_slice).unwrap_or_default();
            match self.daemon.set_lost(&network, lost).await {
                Err(error) if error.is_absent() => return Err(error),
                Err(error) => {
                    self.say_once(network.clone(), &error);
                    self.due_lost.insert(network, due.refused());
                }
                Ok(()) => drop(self.due_lost.remove(&network)),
            }
        }
        self.remove_strangers().await
    }

    /// Removes what the daemon has of machines that are none of the site any more.
    async fn remove_strangers(&mut self) -> Result<(), DaemonError> {
        for network in self.unseen.clone() {
            let there = match self.daemon.remotes(&network).await {
                Err(error) if error.is_absent() => return Err(error),
                // Without the network there is nothing.
                Err(_) => Vec::new(),
                Ok(there) => there,
            };
            self.unseen.remove(&network);
            let keys = there.into_iter().map(|machine| (network.clone(), machine));
            self.strangers.extend(keys.filter(|key| !self.remotes.contains_key(key)));
        }
        let is_settled = Instant::now() >= self.settled;
        let gone = self.strangers.iter().filter(|(_, machine)| is_settled || !self.peers.contains(machine));
        for (network, machine) in gone.cloned().collect::<Vec<_>>() {
            match self.daemon.forget_remote(&network, &machine).await {
                Err(error) if error.is_absent() => return Err(error),
                Err(error) => self.say_once(format!("{network} {machine}"), &error),
                Ok(()) => say(&format!("{machine} is not heard: the fabric forgets its members in {network}")),
            }
            self.strangers.remove(&(network, machine));
        }
        Ok(())
    }

    fn say_once(&mut self, what: String, error: &DaemonError) {
        let text = error.to_string();
        if self.said.get(&what) != Some(&text) {
            say(&text);
            self.said.insert(what, text);
        }
    }
}
