//! The loop: what the daemon and the other machines say goes into [`Control`], and what it decides
//! goes to them.
//!
//! The daemon is asked for its members every [`LOOK`], and as soon as it tells of an event. Tables
//! that it could not take, or lost by starting again, are sent again. While it does not answer, the
//! last that it said stays announced for [`ABSENCE`], so that a daemon that is replaced changes
//! nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::{Notify, mpsc};
use tokio::time::MissedTickBehavior;
use tombolo_span::Conflict;
use tombolo_span::member::mac_text;
use tombolo_span::{Action, Control, PeerState, Settings};

use crate::carrier::{Carrier, Heard, Order, Peer};
use crate::daemon::{Daemon, DaemonError, KnownHomes, Port, Remote, RemoteMember, Tables};
use crate::members::{Here, here};
use crate::notify::Manager;
use crate::ration::Ration;
use crate::say;
use crate::teller::{Tell, Teller};

/// How often the daemon is asked for its members.
const LOOK: Duration = Duration::from_secs(1);
/// At most so often, where there are many events.
const LEAST_LOOK: Duration = Duration::from_millis(100);
/// How often the time is looked at.
const TICK: Duration = Duration::from_millis(250);
/// Messages that are looked at in a row.
const MOST_AT_ONCE: usize = 256;
/// How often the daemon gets a report.
const REPORT: Duration = Duration::from_secs(2);
/// A daemon that does not answer for so long has no members any more.
const ABSENCE: Duration = Duration::from_secs(10);

/// The program's state.
pub struct Run {
    site: String,
    machine: String,
    daemon: Daemon,
    carrier: Carrier,
    control: Control,
    begin: Instant,
    tells: mpsc::UnboundedSender<Tell>,
    round_trips: BTreeMap<String, Duration>,
    conflicts: Vec<Conflict>,
    /// Of lines about conflicts, which another machine can make without end.
    lines: Ration,
    /// Since when the daemon does not answer.
    absent: Option<Instant>,
    /// The last look was not possible for want of descriptors or memory here.
    is_short: bool,
    /// Networks of the last look.
    networks: BTreeSet<String>,
    /// Whether the daemon was ever looked at.
    is_known: bool,
    manager: Manager,
}

impl Run {
    /// Before the first look. To be called in a local set, in which it has the daemon told.
    pub fn new(
        site: &str,
        settings: Settings,
        daemon: Daemon,
        carrier: Carrier,
        peers: &[Peer],
        manager: Manager,
    ) -> Run {
        // Higher at each start, unless the clock was set back, which the others notice too.
        let epoch = SystemTime::UNIX_EPOCH.elapsed().map_or(1, |time| time.as_micros() as u64);
        let machine = settings.machine.clone();
        let tells = Teller::start(daemon.clone(), peers.iter().map(|peer| peer.name.clone()), settings.lease);
        let mut control = Control::new(settings, epoch);
        peers.iter().for_each(|peer| control.expect(&peer.name));
        Run {
            site: site.into(),
            machine,
            daemon,
            carrier,
            control,
            begin: Instant::now(),
            tells,
            round_trips: BTreeMap::new(),
            conflicts: Vec::new(),
            lines: Ration::new(Instant::now()),
            absent: None,
            is_short: false,
            networks: BTreeSet::new(),
            is_known: false,
            manager,
        }
    }

    fn now(&self) -> Duration {
        self.begin.elapsed()
    }

    /// Until `ended`.
    ///
    /// # Errors
    /// The carrier has ended by itself.
    pub async fn run(
        mut self,
        mut heard: mpsc::Receiver<Heard>,
        ended: impl Future<Output = ()>,
    ) -> Result<(), String> {
        // Neither this task nor the teller's holds up the loop, whatever the daemon does.
        let (sender, mut looks) = mpsc::channel(1);
        let looking = tokio::task::spawn_local(look_again(self.daemon.clone(), sender));
        let every = |period| {
            let mut interval = tokio::time::interval(period);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        };
        let (mut tick, mut report) = (every(TICK), every(REPORT));
        tokio::pin!(ended);
        let how = loop {
            tokio::select! {
                () = &mut ended => break Ok(()),
                what = heard.recv() => {
                    let Some(what) = what else { break Err("the connection to the other machines has ended".into()) };
                    self.hear(what);
                    for _ in 0..MOST_AT_ONCE {
                        let Ok(what) = heard.try_recv() else { break };
                        self.hear(what);
                    }
                }
                _ = tick.tick() => {
                    let now = self.now();
                    self.control.tick(now);
                    self.look_at_absence();
                    self.manager.works();
                }
                Some(look) = looks.recv() => self.looked(look),
                _ = report.tick() => self.report(),
            }
            self.act();
        };
        looking.abort();
        self.manager.ends();
        how
    }

    fn hear(&mut self, what: Heard) {
        let now = self.now();
        // What is refused is counted and said by `control`.
        let _ = match what {
            Heard::Change { from, bytes } => self.control.heard(&from, &bytes, now),
            Heard::Answer { from, bytes, round_trip } => {
                self.round_trips.insert(from.clone(), round_trip);
                self.control.answered(&from, &bytes, now)
            }
            Heard::Question { question, bytes } => self.control.answer(&bytes).map(|bytes| question.answer(bytes)),
            Heard::There(machine) => {
                self.control.seen(&machine, now);
                Ok(())
            }
        };
    }

    fn looked(&mut self, look: Result<(Tables, Vec<Port>), DaemonError>) {
        match look {
            Ok((tables, ports)) => {
                self.is_known = true;
                self.is_short = false;
                if self.absent.take().is_some_and(|since| since.elapsed() > LOOK) {
                    say("the fabric answers again");
                }
                let mut here = here(&tables, &ports);
                // While the daemon does not answer, they are as they were.
                let homes = here.iter_mut().map(|(network, here)| (network.clone(), std::mem::take(&mut here.homes)));
                self.control.homes(homes.collect());
                self.has(here);
            }
            // Its members are there, as far as this machine knows.
            Err(error) if error.is_shortage() => {
                if !self.is_short {
                    say(&error.to_string());
                }
                self.is_short = true;
            }
            Err(error) => {
                if self.absent.is_none() {
                    say(&error.to_string());
                }
                self.absent.get_or_insert_with(Instant::now);
            }
        }
    }

    /// A daemon that does not answer for long has no members any more.
    fn look_at_absence(&mut self) {
        if self.absent.is_some_and(|since| since.elapsed() >= ABSENCE) && !self.networks.is_empty() {
            self.has(BTreeMap::new());
        }
    }

    fn has(&mut self, all: BTreeMap<String, Here>) {
        let now = self.now();
        for network in self.networks.iter().filter(|network| !all.contains_key(*network)) {
            self.control.local(network, None, Vec::new(), now);
        }
        let networks: BTreeSet<String> = all.keys().cloned().collect();
        if networks != self.networks {
            self.tell(Tell::Networks(networks.clone()));
            self.networks = networks;
        }
        for (network, here) in all {
            self.control.local(&network, here.end, here.members, now);
        }
    }

    fn tell(&self, tell: Tell) {
        // The task ends with the loop.
        let _ = self.tells.send(tell);
    }

    /// Carries out what was decided.
    fn act(&mut self) {
        for action in self.control.actions() {
            match action {
                Action::Tell(bytes) => self.carrier.order(Order::Tell(bytes)),
                Action::Ask(machine) => {
                    let bytes = self.control.question(&machine);
                    self.carrier.order(Order::Ask { machine, bytes });
                }
                Action::Table { network, machine, end, members } => {
                    let members = members.into_iter().map(|member| RemoteMember {
                        name: member.name,
                        mac: mac_text(member.mac),
                        ips: member.addresses.into_iter().map(|address| address.ip).collect(),
                    });
                    let remote = end.map(|address| Remote { address, members: members.collect() });
                    self.tell(Tell::Remote { key: (network, machine), remote });
                }
                Action::Forget { network, machine } => {
                    self.tell(Tell::Remote { key: (network, machine), remote: None })
                }
                Action::Lost { network, addresses } => self.tell(Tell::Lost { network, addresses }),
                Action::Event(text) => say(&text),
            }
        }
    }

    /// Finds conflicts, says what is new, and has the daemon told.
    fn report(&mut self) {
        let conflicts = self.control.conflicts();
        let known: BTreeSet<&Conflict> = self.conflicts.iter().collect();
        let now = Instant::now();
        if let Some(count) = self.lines.left_out(now) {
            say(&format!("{count} more conflicts; `tombolo span status` has those that there are"));
        }
        for conflict in conflicts.iter().filter(|conflict| !known.contains(conflict)) {
            if !self.lines.takes(now) {
                continue;
            }
            say(&conflict.to_string());
        }
        self.conflicts = conflicts;
        let status = self.standing();
        self.manager.stands(status);
        self.tell(Tell::Report(Box::new(self.document())));
    }

    /// One line for the service manager.
    fn standing(&self) -> String {
        let peers = self.control.peers(self.now());
        let up = peers.iter().filter(|peer| peer.state == PeerState::Up).count();
        let fabric = match (self.is_known, self.absent) {
            (_, Some(_)) => "waiting for the fabric",
            (true, None) => "the fabric answers",
            (false, None) => "asking the fabric",
        };
        format!("{up} of {} other machines are heard; {fabric}; conflicts: {}", peers.len(), self.conflicts.len())
    }

    fn document(&self) -> serde_json::Value {
        let now = self.now();
        let machines = self.control.peers(now).into_iter().map(|peer| {
            let ends: BTreeSet<String> =
                peer.networks.iter().filter_map(|(_, end)| end.map(|end| end.to_string())).collect();
            serde_json::json!({
                "name": peer.name,
                "state": peer.state.name(),
                "rtt_us": self.round_trips.get(&peer.name).map(|time| time.as_micros() as u64),
                // Since this program's start, where it was never heard.
                "heard_s": now.saturating_sub(peer.heard.unwrap_or_default()).as_secs_f64(),
                "members": peer.members,
                "networks": peer.networks.iter().map(|(name, _)| name).collect::<Vec<_>>(),
                "addresses": ends,
                "refused": peer.refused,
            })
        });
        let networks = self.control.networks().into_iter();
        let networks =
            networks.map(|(name, local, remote)| serde_json::json!({ "name": name, "local": local, "remote": remote }));
        let refused: u64 = self.control.peers(now).iter().map(|peer| peer.refused).sum();
        let conflicts = self.conflicts.iter().map(|Conflict { network, what, machines, winner }| {
            serde_json::json!({ "network": network, "what": what, "machines": machines, "winner": winner })
        });
        serde_json::json!({
            "machine": self.machine,
            "pid": std::process::id(),
            "uptime_s": now.as_secs_f64(),
            "site": self.site,
            "machines": machines.collect::<Vec<_>>(),
            "networks": networks.collect::<Vec<_>>(),
            "conflicts": conflicts.collect::<Vec<_>>(),
            "counters": { "messages_sent": self.control.sent(), "messages_refused": refused },
        })
    }
}

/// Asks the daemon for its members again and again, and as soon as it tells of an event.
async fn look_again(daemon: Daemon, looks: mpsc::Sender<Result<(Tables, Vec<Port>), DaemonError>>) {
    let event = std::rc::Rc::new(Notify::new());
    let (follower, notify) = (daemon.clone(), event.clone());
    tokio::task::spawn_local(async move {
        let mut stream = None;
        while std::rc::Rc::strong_count(&notify) > 1 {
            match follower.next_event(&mut stream).await {
                Ok(()) => notify.notify_one(),
                Err(_) => tokio::time::sleep(LOOK).await,
            }
        }
    });
    let mut known = KnownHomes::default();
    loop {
        let look = async { Ok((daemon.tables(&mut known).await?, daemon.ports().await?)) }.await;
        if looks.send(look).await.is_err() {
            return;
        }
        tokio::time::sleep(LEAST_LOOK).await;
        let _ = tokio::time::timeout(LOOK, event.notified()).await;
    }
}
