//! What happened in a fabric: kept in memory for those who ask, and on the disk for the day after.
//!
//! # Purpose
//! Each change worth knowing becomes one [`EventReport`]: starts, ends and deaths of machines,
//! links of ports that come up or go down, faults, leases, forwards, changes that users made. The
//! log answers "what happened overnight", also after a restart. It is not the daemon's log (`log`),
//! which has sentences for people, nor a counter: what a peer can repeat at will is merged and
//! rationed here (`Ration`), and counted elsewhere.
//!
//! # Invariants
//! - Numbers grow by one and go on where the daemon before ended.
//! - `Events::add` never waits: not for the disk, and not for a reader. The file is written by a
//!   thread behind a bounded queue. A reader holds no place here; it asks for what follows a
//!   number, and is told how many it has missed.
//! - A guest cannot push others' events out faster than its ration allows.
//!
//! # Files
//! `events.jsonl` in the state folder has one event per line as the API gives it, and
//! `events.1.jsonl` is its predecessor; each has at most [`FILE_BYTES`]. Lines that cannot be read
//! (torn by a crash or a full disk) are skipped.
//!
//! # Limits
//! [`KEPT`] events in memory, `QUEUE` that wait for the disk; those beyond are on no disk, and
//! counted as `unwritten`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tombolo_switch::gateway::{LeaseChange, LeaseStore};
use tombolo_switch::port::Carrier;

use super::{Running, RunningWorker, Say};
use crate::api::report::{EventReport, Events as Answer, SCHEMA};
use crate::file::Mac;
use crate::log::shown;
use crate::moment;

/// Events that are kept in memory.
pub const KEPT: usize = 8192;
/// Bytes of a file of events; beyond this it becomes `events.1.jsonl`, and a new one is begun.
pub const FILE_BYTES: u64 = 1 << 20;
/// Events that may wait for the disk.
const QUEUE: usize = 4096;
/// Characters of an event's text, and of its cause.
const TEXT_CHARS: usize = 400;
/// How long the end waits for the last write.
const FINISH: Duration = Duration::from_secs(2);
/// How long a handover waits for the disk; what comes later is in no file.
const FLUSH: Duration = Duration::from_millis(200);
/// After a look at the ports, how long until the next one: what changes twice meanwhile is seen
/// once.
const PAUSE: Duration = Duration::from_millis(250);
/// How often is looked again while a port's change waits for its ration.
const AGAIN: Duration = Duration::from_secs(2);

/// What an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The fabric came up, or another daemon took it over.
    Up,
    /// The fabric is being taken down.
    Down,
    /// A user changed the running fabric.
    Apply,
    /// What an earlier daemon had left was kept, ended or removed.
    Recovery,
    /// A machine was started.
    Start,
    /// A machine was stopped by a user.
    Stop,
    /// A machine ended well by itself.
    Exit,
    /// A machine failed, or could not be started.
    Death,
    /// Frames flow through a port.
    PortUp,
    /// They do not any more.
    PortDown,
    /// A peer joined or left a link of shared memory.
    Link,
    /// The gateway leased an address to another client.
    Lease,
    /// A lease ended.
    Release,
    /// Forwards of an uplink stopped or resumed.
    Forward,
    /// An address of a member is in use on another machine too, or was lost to it.
    Span,
    /// A peer broke the rules, or something of the fabric failed.
    Fault,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 16] = [
        Kind::Up,
        Kind::Down,
        Kind::Apply,
        Kind::Recovery,
        Kind::Start,
        Kind::Stop,
        Kind::Exit,
        Kind::Death,
        Kind::PortUp,
        Kind::PortDown,
        Kind::Link,
        Kind::Lease,
        Kind::Release,
        Kind::Forward,
        Kind::Span,
        Kind::Fault,
    ];

    /// As in reports.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Up => "up",
            Kind::Down => "down",
            Kind::Apply => "apply",
            Kind::Recovery => "recovery",
            Kind::Start => "start",
            Kind::Stop => "stop",
            Kind::Exit => "exit",
            Kind::Death => "death",
            Kind::PortUp => "port-up",
            Kind::PortDown => "port-down",
            Kind::Link => "link",
            Kind::Lease => "lease",
            Kind::Release => "release",
            Kind::Forward => "forward",
            Kind::Span => "span",
            Kind::Fault => "fault",
        }
    }
}

/// What is told of an event, beside its text.
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// The machine, port, link or network.
    pub(crate) name: Option<String>,
    pub(crate) network: Option<String>,
    pub(crate) pid: Option<u32>,
    pub(crate) cause: Option<String>,
}

impl Facts {
    pub(crate) fn of(name: &str) -> Facts {
        Facts { name: Some(name.into()), ..Facts::default() }
    }

    pub(crate) fn network(self, network: &str) -> Facts {
        Facts { network: Some(network.into()), ..self }
    }

    pub(crate) fn pid(self, pid: u32) -> Facts {
        Facts { pid: Some(pid), ..self }
    }

    pub(crate) fn cause(self, cause: &str) -> Facts {
        Facts { cause: Some(cause.into()), ..self }
    }
}

/// What waits for the thread that writes.
#[derive(Debug)]
enum Line {
    Event(String),
    Flush(Sender<()>),
}

/// The log of one fabric; clones share it.
#[derive(Clone, Debug)]
pub struct Events(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ring: Mutex<Ring>,
    /// The number of the last event.
    last: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Ring {
    /// The last number that was given.
    last: u64,
    events: VecDeque<EventReport>,
    writer: Option<SyncSender<Line>>,
    done: Option<Receiver<()>>,
    /// Before the file is read nothing has a number.
    is_open: bool,
    unwritten: u64,
}

impl Default for Events {
    fn default() -> Self {
        Events(Arc::new(Inner { ring: Mutex::default(), last: watch::Sender::new(0) }))
    }
}

impl Ring {
    fn push(&mut self, event: EventReport) {
        if self.events.len() == KEPT {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    fn write(&mut self, event: &EventReport) {
        let Some(writer) = &self.writer else { return };
        let Ok(line) = serde_json::to_string(event) else { return };
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = writer.try_send(Line::Event(line)) {
            self.unwritten += 1;
        }
    }
}

impl Events {
    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.0.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an event that happens now.
    pub(crate) fn add(&self, kind: Kind, facts: Facts, text: &str) {
        let unix_ms = moment::unix_ms();
        let Facts { name, network, pid, cause } = facts;
        let mut ring = self.ring();
        let event = EventReport {
            id: if ring.is_open { ring.last + 1 } else { 0 },
            time: moment::rfc3339(unix_ms),
            unix_ms,
            kind: kind.word().into(),
            name,
            network,
            pid,
            cause: cause.map(|cause| shown(&cause, TEXT_CHARS)),
            text: shown(text, TEXT_CHARS),
        };
        if ring.is_open {
            ring.last += 1;
            ring.write(&event);
        }
        ring.push(event);
        let (last, is_open) = (ring.last, ring.is_open);
        drop(ring);
        if is_open {
            self.0.last.send_replace(last);
        }
    }

    /// Reads what was kept in `folder`, numbers the events that came meanwhile, and writes from now
    /// on. Without `folder` they are in memory alone.
    pub(crate) fn open(&self, folder: Option<&Path>, say: &Say) {
        if self.ring().is_open {
            return;
        }
        let files = folder.map(Files::new);
        let kept = files.as_ref().map(Files::load).unwrap_or_default();
        let writer = files.and_then(|files| match Writer::start(files, say.clone()) {
            Ok(writer) => Some(writer),
            Err(error) => {
                say(&format!("events are not kept: starting their thread: {error}"));
                None
            }
        });
        let mut ring = self.ring();
        let fresh = std::mem::take(&mut ring.events);
        (ring.writer, ring.done) = writer.unzip();
        ring.is_open = true;
        ring.last = kept.back().map_or(0, |event| event.id);
        ring.events = kept;
        for mut event in fresh {
            ring.last += 1;
            event.id = ring.last;
            ring.write(&event);
            ring.push(event);
        }
        let last = ring.last;
        drop(ring);
        self.0.last.send_replace(last);
    }

    /// At most `limit` events after number `after`, the oldest first, and how many in between are
    /// not kept any more. A number that was not given yet is of another log: the answer begins with
    /// the first.
    pub fn after(&self, after: Option<u64>, limit: usize) -> Answer {
        let ring = self.ring();
        let first = ring.events.front().filter(|_| ring.is_open).map_or(ring.last + 1, |event| event.id);
        let known = after.filter(|after| *after <= ring.last);
        let (from, lost) = match known {
            Some(after) => ((after + 1).max(first), first.saturating_sub(after + 1)),
            None => (first, 0),
        };
        let skip = ring.events.partition_point(|event| event.id < from);
        let events: Vec<_> = match ring.is_open {
            true => ring.events.iter().skip(skip).take(limit).cloned().collect(),
            false => vec![],
        };
        Answer { schema: SCHEMA, first, last: ring.last, lost, unwritten: ring.unwritten, events }
    }

    /// Waits until there is an event after number `after`.
    pub async fn wait_after(&self, after: u64) {
        let mut last = self.0.last.subscribe();
        // The sender is held by this log.
        let _ = last.wait_for(|last| *last != after).await;
    }

    /// Waits a little until all is written that came so far.
    pub(crate) fn flush(&self) {
        let writer = self.ring().writer.clone();
        let (tell, told) = channel();
        if writer.is_some_and(|writer| writer.try_send(Line::Flush(tell)).is_ok()) {
            // What is not written by then is in no file if the process ends now.
            let _ = told.recv_timeout(FLUSH);
        }
    }

    /// Writes what is left and ends the thread; `false` where the disk does not answer.
    pub(crate) fn finish(&self) -> bool {
        let (writer, done) = {
            let mut ring = self.ring();
            (ring.writer.take(), ring.done.take())
        };
        drop(writer);
        // The thread sends nothing: its end closes the channel.
        done.is_none_or(|done| done.recv_timeout(FINISH) == Err(RecvTimeoutError::Disconnected))
    }
}

/// The files of a log.
#[derive(Clone, Debug)]
pub struct Files {
    now: PathBuf,
    before: PathBuf,
}

impl Files {
    /// Those in a fabric's state folder.
    pub fn new(folder: &Path) -> Files {
        Files { now: folder.join("events.jsonl"), before: folder.join("events.1.jsonl") }
    }

    /// The last [`KEPT`] events.
    pub fn load(&self) -> VecDeque<EventReport> {
        let mut out: VecDeque<EventReport> = VecDeque::new();
        for path in [&self.before, &self.now] {
            // One that is not there is a fabric's first start. Of one that somebody made longer,
            // the start is read.
            let mut text = Vec::new();
            let _ = File::open(path).and_then(|file| file.take(2 * FILE_BYTES).read_to_end(&mut text));
            for line in text.split(|byte| *byte == b'\n') {
                let Ok(event) = serde_json::from_slice::<EventReport>(line) else { continue };
                // Numbers that do not grow are of another log that was copied here.
                if out.back().is_some_and(|before| before.id >= event.id) {
                    continue;
                }
                if out.len() == KEPT {
                    out.pop_front();
                }
                out.push_back(event);
            }
        }
        out
    }
}

/// The thread that writes the files.
struct Writer {
    files: Files,
    file: Option<(File, u64)>,
    say: Say,
    is_failing: bool,
    limit: u64,
}

impl Writer {
    fn start(files: Files, say: Say) -> io::Result<(SyncSender<Line>, Receiver<()>)> {
        let (lines, queue) = sync_channel(QUEUE);
        let (ended, done): (Sender<()>, _) = channel();
        let run = move || {
            // Dropped when the thread ends, however it does.
            let _ended = ended;
            let mut writer = Writer { files, file: None, say, is_failing: false, limit: FILE_BYTES };
            while let Ok(line) = queue.recv() {
                match line {
                    Line::Event(text) => writer.tell(&text),
                    // The one that waited may have gone.
                    Line::Flush(tell) => drop(tell.send(())),
                }
            }
        };
        std::thread::Builder::new().name("events".into()).spawn(run)?;
        Ok((lines, done))
    }

    fn tell(&mut self, line: &str) {
        match self.write(line) {
            Ok(()) if std::mem::take(&mut self.is_failing) => (self.say)("events are written again"),
            Ok(()) => {}
            Err(error) => {
                self.file = None;
                if !std::mem::replace(&mut self.is_failing, true) {
                    (self.say)(&format!("events cannot be written now: {}: {error}", self.files.now.display()));
                }
            }
        }
    }

    fn write(&mut self, line: &str) -> io::Result<()> {
        let mut text = format!("{line}\n");
        if self.file.as_ref().is_some_and(|(_, bytes)| bytes + text.len() as u64 > self.limit) {
            self.file = None;
            std::fs::rename(&self.files.now, &self.files.before)?;
        }
        if self.file.is_none() {
            let file = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.files.now)?;
            let bytes = file.metadata()?.len();
            // The last line may have been torn; an empty line is none.
            if bytes > 0 {
                text.insert(0, '\n');
            }
            self.file = Some((file, bytes));
        }
        let Some((file, bytes)) = &mut self.file else { return Ok(()) };
        file.write_all(text.as_bytes())?;
        *bytes += text.len() as u64;
        Ok(())
    }
}

/// How many events something may cause that a guest can repeat: a burst, and then one per `each`.
#[derive(Debug)]
pub(crate) struct Ration {
    left: u32,
    burst: u32,
    each: Duration,
    filled: Instant,
}

impl Ration {
    fn new(burst: u32, each: Duration) -> Ration {
        Ration { left: burst, burst, each, filled: Instant::now() }
    }

    pub(crate) fn port() -> Ration {
        Ration::new(20, Duration::from_secs(30))
    }

    fn leases() -> Ration {
        Ration::new(300, Duration::from_secs(10))
    }

    pub(crate) fn take(&mut self, now: Instant) -> bool {
        let due = now.saturating_duration_since(self.filled).as_millis() / self.each.as_millis().max(1);
        if due > 0 {
            self.left = self.burst.min(self.left.saturating_add(u32::try_from(due).unwrap_or(u32::MAX)));
            self.filled = now;
        }
        self.left.checked_sub(1).map(|left| self.left = left).is_some()
    }
}

/// What was last told of a port.
#[derive(Debug)]
struct Told {
    token: tombolo_switch::wait::Token,
    up: bool,
    faults: u64,
    restarts: u64,
    ration: Ration,
}

/// What was last told of the ports.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    ports: BTreeMap<String, Told>,
    pub(crate) news: Arc<Notify>,
}

impl Running {
    /// Adds events when links and faults of ports change, from now on.
    pub(crate) fn watch_ports(&self) {
        self.workers.iter().for_each(|worker| self.watch_worker(worker));
        let (news, me): (_, Weak<_>) = (self.watched.news.clone(), self.me.clone());
        // What changed before anything watched.
        news.notify_one();
        tokio::spawn(async move {
            loop {
                news.notified().await;
                loop {
                    let Some(running) = me.upgrade() else { return };
                    let all = running.lock().await.note_ports(Instant::now());
                    drop(running);
                    if all {
                        break;
                    }
                    // What waits for its ration is told as it is then.
                    tokio::time::sleep(AGAIN).await;
                }
                tokio::time::sleep(PAUSE).await;
            }
        });
    }

    /// Has the ports of a worker watched, also of one that is added later.
    pub(crate) fn watch_worker(&self, worker: &RunningWorker) {
        let news = self.watched.news.clone();
        // A worker that has ended is reported by itself.
        let _ = worker.thread.handle().on_change(move || news.notify_one());
    }

    /// Tells what has changed since the last look; whether all of it was.
    fn note_ports(&mut self, now: Instant) -> bool {
        let mut all = true;
        let mut there = Vec::new();
        let statuses: Vec<_> = self.workers.iter().filter_map(|w| w.thread.handle().status().ok()).collect();
        for (status, port) in statuses.iter().flat_map(|s| s.ports.iter().map(move |p| (s, p))) {
            let name = port.name.to_string();
            let (faults, restarts) = (port.counters.faults.get(), port.counters.restarts.get());
            let up = port.link == Carrier::Up;
            let told = self.watched.ports.entry(name.clone()).or_insert_with(|| Told {
                token: port.token,
                up: false,
                faults: 0,
                restarts: 0,
                ration: Ration::port(),
            });
            there.push(name.clone());
            if told.token != port.token {
                // Another one of that name; its ration goes on, so that adding it again earns
                // nothing.
                (told.token, told.faults, told.restarts) = (port.token, 0, 0);
            }
            let network = status.networks.iter().find(|n| n.id == port.network);
            let facts = || Facts::of(&name).network(network.map_or("", |n| &n.name));
            if faults > told.faults || restarts > told.restarts {
                if told.ration.take(now) {
                    let (more, again) = (faults.saturating_sub(told.faults), restarts.saturating_sub(told.restarts));
                    (told.faults, told.restarts) = (faults, restarts);
                    let cause = super::report::last_fault(status, port).unwrap_or_default();
                    let what = match (&port.panic, again) {
                        (Some(_), _) => "is out of service after a panic in its code".to_string(),
                        (None, 1..) => "was restarted after a panic in its code".to_string(),
                        (None, 0) => super::report::reset_words(port, more),
                    };
                    self.events.add(Kind::Fault, facts().cause(&cause), &format!("port {name} {what}"));
                } else {
                    all = false;
                }
            }
            // The gateway is the fabric's own, and always up.
            if up != told.up && port.kind != "gateway" {
                if told.ration.take(now) {
                    told.up = up;
                    let (kind, word) = if up { (Kind::PortUp, "up") } else { (Kind::PortDown, "down") };
                    self.events.add(kind, facts(), &format!("port {name} is {word}"));
                } else {
                    all = false;
                }
            }
        }
        let gone: Vec<_> = self.watched.ports.keys().filter(|name| !there.contains(name)).cloned().collect();
        for name in gone {
            let told = self.watched.ports.remove(&name);
            if told.is_some_and(|told| told.up) {
                self.events.add(Kind::PortDown, Facts::of(&name), &format!("port {name} is gone"));
            }
        }
        all
    }
}

/// Tells which leases are new, and which have ended. A renewal is neither.
pub(crate) struct LeaseWatch {
    network: String,
    events: Events,
    holders: HashMap<IpAddr, [u8; 6]>,
    ration: Ration,
    untold: u64,
    /// Hears of each change that is none of a time alone.
    news: Arc<Notify>,
    given: GivenLeases,
}

/// When each lease was given or renewed by this daemon.
#[derive(Clone, Debug, Default)]
pub(crate) struct GivenLeases(Arc<Mutex<HashMap<IpAddr, Instant>>>);

impl GivenLeases {
    fn table(&self) -> MutexGuard<'_, HashMap<IpAddr, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seconds since the lease of `address` was given or renewed.
    pub(crate) fn age_s(&self, address: IpAddr) -> Option<f64> {
        self.table().get(&address).map(|at| at.elapsed().as_secs_f64())
    }
}

impl LeaseWatch {
    /// `given` has the times that were noted for the network before, and those of this watch.
    pub(crate) fn new(network: &str, events: Events, stored: &LeaseStore, given: GivenLeases) -> LeaseWatch {
        let holders = stored.leases.iter().map(|lease| (lease.address, lease.mac)).collect();
        let (network, news) = (network.into(), Arc::default());
        LeaseWatch { network, events, holders, ration: Ration::leases(), untold: 0, news, given }
    }

    /// The same, which also notifies `news` of each such change.
    pub(crate) fn telling(self, news: Arc<Notify>) -> LeaseWatch {
        LeaseWatch { news, ..self }
    }

    pub(crate) fn note(&mut self, change: &LeaseChange, now: Instant) {
        match change {
            LeaseChange::Bound(lease) => _ = self.given.table().insert(lease.address, now),
            LeaseChange::Freed(address) => _ = self.given.table().remove(address),
        }
        let (kind, name, text) = match change {
            LeaseChange::Bound(lease) => {
                if self.holders.insert(lease.address, lease.mac) == Some(lease.mac) {
                    return;
                }
                let mac = Mac(lease.mac);
                let who = lease.name.as_ref().map_or_else(|| mac.to_string(), |name| format!("{name} ({mac})"));
                (Kind::Lease, lease.name.clone(), format!("{} is leased to {who}", lease.address))
            }
            LeaseChange::Freed(address) => {
                let Some(mac) = self.holders.remove(address) else { return };
                (Kind::Release, None, format!("{address} is free again; {} had it", Mac(mac)))
            }
        };
        self.news.notify_one();
        if !self.ration.take(now) {
            self.untold += 1;
            return;
        }
        let more = match std::mem::take(&mut self.untold) {
            0 => String::new(),
            n => format!("; {n} other changes of leases before were too many to list"),
        };
        let facts = Facts { name, ..Facts::default() }.network(&self.network);
        self.events.add(kind, facts, &format!("{text}{more}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_switch::gateway::LeaseRecord;

    fn quiet() -> Say {
        Arc::new(|_| ())
    }

    fn add(events: &Events, n: usize) {
        for i in 0..n {
            events.add(Kind::Start, Facts::of("web").pid(7), &format!("event {i}"));
        }
    }

    #[test]
    fn numbers_go_on_where_the_daemon_before_ended() {
        let dir = tempfile::tempdir().unwrap();
        let events = Events::default();
        add(&events, 2);
        assert_eq!(events.after(None, 10).events.len(), 0, "without a number there is nothing to ask for");
        events.open(Some(dir.path()), &quiet());
        add(&events, 3);
        let all = events.after(None, 10);
        assert_eq!(all.events.iter().map(|e| e.id).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert_eq!((all.first, all.last, all.lost), (1, 5, 0));
        assert!(events.finish());
        // As after a crash in the middle of a line.
        let path = dir.path().join("events.jsonl");
        let mut text = std::fs::read(&path).unwrap();
        text.truncate(text.len() - 10);
        std::fs::write(&path, &text).unwrap();
        let next = Events::default();
        next.open(Some(dir.path()), &quiet());
        add(&next, 1);
        assert_eq!(next.after(None, 10).events.iter().map(|e| e.id).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert!(next.finish());
        let third = Events::default();
        third.open(Some(dir.path()), &quiet());
        assert_eq!(third.after(None, 10).events, next.after(None, 10).events);
        assert!(third.finish());
    }

    #[test]
    fn a_slow_reader_is_told_what_it_has_missed() {
        let events = Events::default();
        events.open(None, &quiet());
        add(&events, KEPT + 100);
        let answer = events.after(Some(40), 10);
        assert_eq!((answer.first, answer.lost, answer.events[0].id, answer.events.len()), (101, 60, 101, 10));
        let answer = events.after(Some(KEPT as u64 + 98), 10);
        assert_eq!((answer.lost, answer.events.len()), (0, 2));
        assert_eq!(events.after(Some(answer.last), 10).events, []);
        // A number of another log, which was longer.
        assert_eq!(events.after(Some(1 << 40), 1).events[0].id, 101);
    }

    #[tokio::test]
    async fn a_reader_that_waits_hears_of_the_next_event() {
        let events = Events::default();
        events.open(None, &quiet());
        add(&events, 1);
        let (other, last) = (events.clone(), events.after(None, 1).last);
        let waits = tokio::spawn(async move { other.wait_after(last).await });
        tokio::task::yield_now().await;
        assert!(!waits.is_finished());
        add(&events, 1);
        tokio::time::timeout(tombolo_testing::TIMEOUT, waits).await.unwrap().unwrap();
    }

    #[test]
    fn the_files_are_bounded_and_a_disk_that_refuses_keeps_nothing_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path());
        let said = Arc::new(Mutex::new(Vec::new()));
        let to = said.clone();
        let say: Say = Arc::new(move |text: &str| to.lock().unwrap().push(text.to_string()));
        let mut writer = Writer { files: files.clone(), file: None, say, is_failing: false, limit: 10_000 };
        let event = |id| EventReport { id, text: "x".repeat(300), ..EventReport::default() };
        for id in 1..=1000 {
            writer.tell(&serde_json::to_string(&event(id)).unwrap());
        }
        let bytes = |path: &Path| std::fs::metadata(path).unwrap().len();
        assert!(bytes(&files.now) <= 10_000 && bytes(&files.before) <= 10_000);
        let kept = files.load();
        assert!(kept.len() > 20 && kept.back().unwrap().id == 1000, "{}", kept.len());
        assert!(said.lock().unwrap().is_empty());
        writer.file = Some((OpenOptions::new().append(true).open("/dev/full").unwrap(), 0));
        writer.tell("{}");
        writer.tell(&serde_json::to_string(&event(1002)).unwrap());
        let said = said.lock().unwrap();
        assert!(
            said[0].starts_with("events cannot be written now") && said[1] == "events are written again",
            "{said:?}"
        );
        assert_eq!(files.load().iter().rev().map(|e| e.id).take(2).collect::<Vec<_>>(), [1002, 1000]);
    }

    #[test]
    fn what_a_guest_repeats_is_rationed() {
        let mut ration = Ration::new(3, Duration::from_secs(10));
        let begun = Instant::now();
        let taken = |ration: &mut Ration, s| (0..10).filter(|_| ration.take(begun + Duration::from_secs(s))).count();
        assert_eq!(taken(&mut ration, 0), 3);
        assert_eq!(taken(&mut ration, 11), 1);
        assert_eq!(taken(&mut ration, 1000), 3);
    }

    #[test]
    fn a_renewal_is_no_event_and_a_flood_of_leases_is_summed_up() {
        let events = Events::default();
        events.open(None, &quiet());
        let lease = |n: u8, mac: u8| LeaseRecord {
            mac: [2, 0, 0, 0, 0, mac],
            address: IpAddr::from([10, 0, 0, n]),
            name: (n == 1).then(|| "web".into()),
            expires_unix_secs: 0,
        };
        let mut watch =
            LeaseWatch::new("lan", events.clone(), &LeaseStore { leases: vec![lease(9, 9)] }, GivenLeases::default());
        let now = Instant::now();
        for _ in 0..3 {
            watch.note(&LeaseChange::Bound(lease(1, 1)), now);
            watch.note(&LeaseChange::Bound(lease(9, 9)), now);
        }
        watch.note(&LeaseChange::Freed(lease(1, 1).address), now);
        watch.note(&LeaseChange::Freed(lease(1, 1).address), now);
        let texts = |events: &Events| events.after(None, KEPT).events.into_iter().map(|e| e.text).collect::<Vec<_>>();
        let expected =
            ["10.0.0.1 is leased to web (02:00:00:00:00:01)", "10.0.0.1 is free again; 02:00:00:00:00:01 had it"];
        assert_eq!(texts(&events), expected);
        for n in 0..1000u32 {
            watch.note(&LeaseChange::Bound(lease(2, n as u8)), now);
        }
        let told = texts(&events).len();
        assert!((290..310).contains(&told), "{told}");
        watch.note(&LeaseChange::Bound(lease(3, 3)), now + Duration::from_secs(60));
        assert!(texts(&events).last().unwrap().contains("other changes of leases"), "{:?}", texts(&events).last());
    }

    #[test]
    fn every_kind_has_a_word_of_its_own() {
        let words: std::collections::BTreeSet<_> = Kind::ALL.iter().map(|kind| kind.word()).collect();
        assert_eq!(words.len(), Kind::ALL.len());
    }
}
