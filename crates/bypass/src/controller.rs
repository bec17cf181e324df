//! The controller: a process that supports the attached programs. Traffic flows without it.
//!
//! It does what the programs cannot:
//!
//! - It asks connection tracking to judge liberally each TCP connection that is to be taken, since
//!   the kernel will see only a few of its segments.
//! - It updates the conntrack entries of idle connections.
//! - It has all flows learned again when an interface, or how it forwards, has changed. It has the
//!   flows to a neighbour learned again when the neighbour's Ethernet address has changed.
//! - It reads the firewall's rules when they change (`rules`).
//! - It chooses each interface's mode by its traffic, and detects whether a process captures on it.
//! - It attaches again to an interface that was re-created under its name.
//! - It removes flows that are no longer used.
//!
//! Two of its threads write into a map, at each turn, that they are at work. A thread that has not
//! done so for a while is stopped or hangs. `status` and the metrics report this, and the next
//! `attach`, or a fabric's daemon, ends the controller and starts another.
//!
//! It ends by itself within one tick when the place is gone. When the namespace was deleted, it
//! removes everything and ends. A lock makes sure that one runs per namespace.
//!
//! A third thread reads the rules, which takes longer the larger the ruleset is. Connections have
//! their own thread, because their traffic waits for it. All other work here asks the kernel for
//! links, and the kernel does not answer while any namespace of the machine is created or removed.

use crate::attachment::{
    AttachError, Others, Ours, attach_again, attach_xdp, capabilities, detach_xdp, is_suited, leave, monotonic_ns,
};
use crate::chooser::{Chooser, Why, Window};
use crate::conntrack::{CLOSED, Connection, Conntrack, Update};
use crate::layout::{
    Counters, HANDED_LARGE, HANDED_PARTIAL, Mode, NO_FLOW, PORT_CAPTURED, PORT_TWICE, Port, TAKEN_XDP, WISH_BYTES,
};
use crate::maps::{self, Beats, Maps};
use crate::neighbours::Neighbours;
use crate::netlink::{Change, InterfaceInfo, Monitor, Routes};
use crate::place::{Interface, Place};
use crate::rules::{self, RulesMonitor};
use crate::settle;
use aya::maps::{MapData, RingBuf};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::cell::LazyCell;
use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often the controller looks at what tells nothing by itself.
const TICK: Duration = Duration::from_secs(1);
/// How long frames are taken without a tick, where that needs a controller.
pub(crate) const KEPT: Duration = Duration::from_secs(3);
/// How long a controller may say nothing before it counts as stopped: many turns, and longer than
/// the kernel's lock of all interfaces is held as a rule. The programs have the same (SILENT_NS).
const SILENT: Duration = Duration::from_secs(5);
/// How long a killed one may take to be gone.
const DYING: Duration = Duration::from_secs(5);
/// The threads that say that they are at work.
const WATCHING: u32 = 0;
const GRANTING: u32 = 1;
/// How often it looks whether the place is still there.
const GLANCE: Duration = Duration::from_millis(200);
/// The same for the lock when rules were read, and the least pause before they are read again.
const SHORT_GLANCE: Duration = Duration::from_millis(10);
/// Of the time that it reads rules it rests so many times as long behind it: a ruleset that changes
/// all the time costs a fifth of a core at most. But no longer than this.
const REST: u32 = 4;
const LONGEST_REST: Duration = Duration::from_secs(2);
/// The same of looks at all flows for those to neighbours that moved.
const SCAN_REST: u64 = 4;
/// A flow that was used last this long ago is removed.
const UNUSED: Duration = Duration::from_secs(60);
/// How often such flows are looked for.
const REAP: Duration = Duration::from_secs(15);
/// How long after a connection was acknowledged it is looked at again: longer than a frame is in
/// the kernel's hands.
const CONFIRM: Duration = Duration::from_millis(100);
/// How often TCP connections are looked at that rest.
const SETTLE: Duration = Duration::from_secs(5);
/// How long a controller may take to start.
const STARTING: Duration = Duration::from_secs(30);
/// How often a controller is started at least where others detach everything meanwhile.
const LEAST_STARTS: u32 = 5;

/// What is wrong with the controller that runs, where it does not work.
pub(crate) fn fault(place: &Place, pid: u32) -> Option<String> {
    let beat_ns = Beats::open(place).and_then(|b| b.oldest()).ok()?;
    let silent = Duration::from_nanos(monotonic_ns().saturating_sub(beat_ns));
    if silent < SILENT {
        return None;
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    let what = match state {
        Some('T' | 't') => "is stopped, by a signal or a debugger,",
        _ => "hangs",
    };
    Some(format!("the controller, process {pid}, {what} and has done nothing for {} s", silent.as_secs()))
}

/// Why a place needs another controller, if it does.
pub fn lacks(place: &Place) -> Option<String> {
    match place.controller() {
        _ if !place.exists() => None,
        Some(pid) => fault(place, pid),
        None => Some("the controller has ended".into()),
    }
}

/// Ends a controller that does not work any more, if one is there.
pub(crate) fn end_if_silent(place: &Place) -> std::io::Result<()> {
    match place.controller() {
        Some(pid) if fault(place, pid).is_some() => end(place),
        _ => Ok(()),
    }
}

/// Kills the controller, if one runs, and waits for its end: it holds nothing that does not end
/// with it.
pub(crate) fn end(place: &Place) -> std::io::Result<()> {
    let Some(pid) = place.controller() else { return Ok(()) };
    let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(()) };
    let process = match pidfd_open(number, PidfdFlags::empty()) {
        Ok(process) => process,
        Err(Errno::SRCH) => return Ok(()),
        Err(e) => return Err(e.into()),
    };
    // From here on the process is held, and is the one that has the lock, unless that changed hands
    // before.
    if place.controller() != Some(pid) || !place.is_controller(pid) {
        return Ok(());
    }
    match pidfd_send_signal(&process, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(e) => return Err(e.into()),
    }
    let limit = rustix::event::Timespec::try_from(DYING).expect("seconds");
    match poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)) {
        Ok(0) => {
            let what = format!("the controller, process {pid}, was killed but has not ended; the kernel holds it");
            Err(std::io::Error::other(what))
        }
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Starts a controller for this place with the running program, unless one works already. Returns
/// whether one runs then; none is needed if another process has detached everything meanwhile. Its
/// output goes to its log, and it outlives the process that started it.
pub fn start(place: &Place) -> std::io::Result<bool> {
    let end = Instant::now() + STARTING;
    let mut starts = 0;
    loop {
        starts += 1;
        match start_once(place)? {
            Start::Works => return Ok(true),
            Start::Failed => return Ok(false),
            // The lock alone may have been waited for that long.
            Start::Overtaken if Instant::now() > end && starts >= LEAST_STARTS => return Ok(false),
            Start::Overtaken => {}
        }
    }
}

/// How the start of a controller ended.
enum Start {
    /// One runs, or none is needed.
    Works,
    /// It ended because other processes detached everything meanwhile, and perhaps attached again.
    /// Such a process may have been killed before it started a controller.
    Overtaken,
    /// It ended by a fault, which its log names, or took too long.
    Failed,
}

fn start_once(place: &Place) -> std::io::Result<Start> {
    if lacks(place).is_none() {
        return Ok(Start::Works);
    }
    let Some(lock) = place.lock_if_there().map_err(std::io::Error::other)? else { return Ok(Start::Works) };
    if lacks(place).is_none() {
        return Ok(Start::Works);
    }
    end(place)?;
    // It has time to start.
    Beats::open(place).and_then(|mut b| b.set_all(monotonic_ns())).map_err(std::io::Error::other)?;
    let log = std::fs::File::create(place.log())?;
    // The program that runs, also if another one is installed by now.
    let mut child = Command::new("/proc/self/exe")
        .arg0("tombolo")
        .args(["bypass", "keep"])
        .current_dir("/")
        .process_group(0)
        // The new controller has the lock from its first moment: who detaches meanwhile must not
        // find a new log behind it, nor a controller of what it removed, and who attaches must not
        // start another one. Nor does it wait behind all who want the lock.
        .stdin(Stdio::from(lock))
        .stdout(Stdio::null())
        .stderr(log.try_clone()?)
        .spawn()?;
    let limit = Instant::now() + STARTING;
    while place.controller().is_none() {
        if let Some(status) = child.try_wait()? {
            if place.controller().is_some() {
                return Ok(Start::Works);
            }
            // The log goes with all else that is removed at the end of a bypass. A `detach` kills
            // the controller first.
            let is_removed = !place.exists() || log.metadata()?.nlink() == 0;
            let is_fault = status.code().is_some_and(|code| code != 0);
            return Ok(if is_fault && !is_removed { Start::Failed } else { Start::Overtaken });
        }
        if Instant::now() > limit {
            // It may still have the lock.
            child.kill()?;
            child.wait()?;
            return Ok(Start::Failed);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // A daemon that started it may outlive it: then it must not stay as a zombie.
    std::thread::Builder::new().name("bypass-controller".into()).spawn(move || child.wait())?;
    Ok(Start::Works)
}

fn wished(wish: &[u8]) -> Option<(Connection, Update)> {
    const AF_INET: u8 = 2;
    /// How long conntrack keeps a connection that was reset (nf_conntrack_tcp_timeout_close).
    const CLOSE_S: u32 = 10;
    let wish: &[u8; WISH_BYTES] = wish.try_into().ok()?;
    let bytes = if wish[36] == AF_INET { 4 } else { 16 };
    let update = match u16::from_ne_bytes([wish[38], wish[39]]) {
        0 => Update::LIBERAL,
        1 => Update::ACKNOWLEDGED,
        2 => Update { state: Some(CLOSED), timeout_s: Some(close_timeout_s().unwrap_or(CLOSE_S)), ..Update::default() },
        _ => return None,
    };
    let connection = Connection {
        source: wish[..bytes].to_vec(),
        destination: wish[16..16 + bytes].to_vec(),
        source_port: [wish[32], wish[33]],
        destination_port: [wish[34], wish[35]],
    };
    Some((connection, update))
}

/// How long conntrack keeps a connection that was reset, in this network namespace.
fn close_timeout_s() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close").ok()?.trim().parse().ok()
}

/// Numbers of the interfaces that packet sockets listen on, from /proc/net/packet; 0 stands for all
/// of them.
fn captured(table: &str) -> Vec<u32> {
    let mut found = vec![];
    for line in table.lines().skip(1) {
        let mut words = line.split_ascii_whitespace().skip(3);
        let (protocol, interface) = (words.next(), words.next());
        if protocol.is_some_and(|p| p != "0000") {
            found.extend(interface.and_then(|i| i.parse::<u32>().ok()));
        }
    }
    found
}

/// What the controller knows of an interface.
struct Watched {
    chooser: Chooser,
    last: Counters,
}

struct Controller {
    place: Place,
    maps: Maps,
    neighbours: Neighbours,
    watched: HashMap<u32, Watched>,
    last_tick_ns: u64,
    last_reap_ns: u64,
    last_settle_ns: u64,
    /// When flows to neighbours that moved may be looked for again.
    next_scan_ns: u64,
    /// The connections that rested at the last look, by their entries, and since when.
    settled: HashMap<u64, u64>,
    /// An interface came, went or changed since this was looked at last.
    links_changed: bool,
    /// The interfaces as they were then.
    links: HashMap<u32, InterfaceInfo>,
    /// Reads the firewall's rules.
    rules: RulesReader,
}

/// The thread that reads the firewall's rules. A large ruleset takes it seconds, in which all else
/// goes on.
struct RulesReader {
    /// The ruleset, or an interface's name, may have changed since the rules were read.
    changed: Arc<AtomicBool>,
    thread: JoinHandle<Result<(), AttachError>>,
}

impl RulesReader {
    fn start(place: &Place) -> Result<RulesReader, AttachError> {
        let changed = Arc::new(AtomicBool::new(true));
        let (place, flag) = (place.clone(), changed.clone());
        let work = move || read_rules(&place, &flag);
        let thread =
            std::thread::Builder::new().name("bypass-rules".into()).spawn(work).map_err(AttachError::Thread)?;
        Ok(RulesReader { changed, thread })
    }

    /// Has them read again.
    fn ask(&self) {
        self.changed.store(true, Ordering::Release);
        self.thread.thread().unpark();
    }
}

/// Reads the rules whenever they may have changed, until the place is gone.
fn read_rules(place: &Place, changed: &AtomicBool) -> Result<(), AttachError> {
    let mut maps = Maps::open(place)?;
    let mut told = String::new();
    loop {
        if !place.exists() {
            return Ok(());
        }
        // What changes from here on is read the next time.
        if !changed.swap(false, Ordering::AcqRel) {
            std::thread::park_timeout(GLANCE);
            continue;
        }
        let begin = Instant::now();
        let result = read_rules_once(place, &mut maps);
        let rest = (begin.elapsed() * REST).min(LONGEST_REST);
        match result {
            Ok(true) => told.clear(),
            Ok(false) => changed.store(true, Ordering::Release),
            // Nothing is learned, and it is tried again.
            Err(error) => {
                changed.store(true, Ordering::Release);
                let text = format!("the firewall's rules could not be read: {error}");
                if text != told {
                    tell(&text);
                    told = text;
                }
            }
        }
        std::thread::sleep(rest.max(SHORT_GLANCE));
    }
}

/// Whether the rules were read and written, or nothing is to be read.
fn read_rules_once(place: &Place, maps: &mut Maps) -> Result<bool, AttachError> {
    if !place.exists() {
        return Ok(true);
    }
    if place.record()?.skips_judging_rules {
        let Some(_lock) = place.lock_now()? else { return Ok(false) };
        // Read again now that no other process can change it.
        if place.exists() && place.record()?.skips_judging_rules {
            rules::skip(place, maps)?;
        }
        return Ok(true);
    }
    // By `attach`, or by this thread after it was asked while it read.
    if rules::is_read(place, maps)? {
        return Ok(true);
    }
    let reading = rules::read(maps)?;
    // Other commands hold it for moments.
    let end = Instant::now() + GLANCE;
    loop {
        if let Some(_lock) = place.lock_now()? {
            if !place.exists() {
                return Ok(true);
            }
            return Ok(!place.record()?.skips_judging_rules && rules::write(place, maps, &reading)?);
        }
        if Instant::now() > end {
            return Ok(false);
        }
        std::thread::sleep(SHORT_GLANCE);
    }
}

impl Controller {
    /// Whether the change makes flows untrue.
    fn is_untrue(&mut self, change: Change) -> Result<bool, AttachError> {
        Ok(match change {
            Change::Neighbour { index, address, mac } => {
                self.neighbours.note(index, address, mac, monotonic_ns());
                false
            }
            Change::Link(_) => {
                self.links_changed = true;
                false
            }
            Change::Forwarding(index) => match u32::try_from(index) {
                Ok(index) => self.maps.port(index)?.is_some(),
                Err(_) => true,
            },
            Change::Missed => {
                self.links_changed = true;
                true
            }
        })
    }

    /// Removes the flows to neighbours that have moved and whose turn it is.
    fn follow_neighbours(&mut self) {
        let start_ns = monotonic_ns();
        if start_ns < self.next_scan_ns {
            return;
        }
        let moved = self.neighbours.due(start_ns);
        if !moved.is_empty() {
            self.maps.remove_flows_to(&moved);
            // One guest may have many addresses, and move all of them: the looks at all flows take
            // a fifth of the time at most.
            let end_ns = monotonic_ns();
            self.next_scan_ns = end_ns + SCAN_REST * end_ns.saturating_sub(start_ns);
        }
    }

    /// Looks at the interfaces; says whether one that stayed is another than it was: its name and
    /// group, which rules go by, its bridge.
    fn are_links_others(&mut self) -> Result<bool, AttachError> {
        // Of an XDP program flows do not depend.
        let links = Routes::open()?.links()?.into_iter().map(|l| (l.index, InterfaceInfo { xdp: None, ..l })).collect();
        let before = std::mem::replace(&mut self.links, links);
        Ok(self.links.iter().any(|(index, link)| before.get(index).is_some_and(|old| old != link)))
    }

    /// Attaches to interfaces that were re-created; returns nothing if another command holds the
    /// lock.
    fn attach_again(&self) -> Result<Option<()>, AttachError> {
        let Some(_lock) = self.place.lock_now()? else { return Ok(None) };
        self.attach_again_locked();
        Ok(Some(()))
    }

    /// The same for who holds the lock; says whether anything is attached or awaited then.
    fn attach_again_locked(&self) -> bool {
        match attach_again(&self.place) {
            Ok(record) => !record.interfaces.is_empty() || !record.awaited.is_empty(),
            // One that is gone again already is no reason to end.
            Err(error) => {
                tell(&format!("an interface that was created again could not be attached: {error}"));
                true
            }
        }
    }

    /// What is done once a second; says whether the controller is to end.
    fn tick(&mut self) -> Result<bool, AttachError> {
        let now_ns = monotonic_ns();
        // Of a failure the reading tells.
        if !rules::is_current(&self.maps).unwrap_or(true) {
            self.rules.ask();
        }
        if self.place.record()?.needs_keeper {
            self.maps.keep_until(now_ns + KEPT.as_nanos() as u64)?;
        }
        // Each flow is looked at for that, two system calls each.
        if now_ns.saturating_sub(self.last_reap_ns) >= REAP.as_nanos() as u64 {
            self.last_reap_ns = now_ns;
            self.maps.reap(now_ns.saturating_sub(UNUSED.as_nanos() as u64))?;
        }
        if now_ns.saturating_sub(self.last_settle_ns) >= SETTLE.as_nanos() as u64 {
            self.last_settle_ns = now_ns;
            self.settle(now_ns)?;
        }
        // Where another command attaches or detaches, the next tick does the rest, over what that
        // one left.
        let Some(_lock) = self.place.lock_now()? else { return Ok(false) };
        // A controller must not be what keeps a deleted namespace, with all its interfaces, alive.
        if leave(&self.place)? {
            return Ok(true);
        }
        if !self.place.exists() {
            return Ok(false);
        }
        // An `attach` that needs it no more may have been overtaken by this tick. Only with the
        // lock: one that needs it from now on must not be overtaken by this.
        if !self.place.record()?.needs_keeper {
            self.maps.keep_until(0)?;
        }
        // Changes that netlink did not report, and interfaces that are no longer awaited.
        if !self.attach_again_locked() {
            self.place.remove()?;
            return Ok(true);
        }
        self.read_rules(now_ns)?;
        Ok(false)
    }

    /// Settles the TCP connections that rest, once for each rest.
    fn settle(&mut self, now_ns: u64) -> Result<(), AttachError> {
        let Some(timeouts) = settle::Timeouts::read() else { return Ok(()) };
        let mut standings = settle::standings(&self.maps.flows()?);
        let rests = |s: &settle::Standing| now_ns.saturating_sub(s.used_ns) >= settle::RESTING.as_nanos() as u64;
        standings.retain(rests);
        let resting: HashMap<u64, u64> = standings.iter().map(|s| (s.conn, s.used_ns)).collect();
        let is_new =
            |s: &&settle::Standing| self.settled.get(&s.conn).is_none_or(|before| !is_same_moment(*before, s.used_ns));
        let due: Vec<_> = standings.iter().filter(is_new).collect();
        if !due.is_empty() {
            settle::settle(&Conntrack::open()?, due, timeouts, now_ns);
        }
        self.settled = resting;
        Ok(())
    }

    /// Has each interface's traffic, and what others do there, say what may be taken and by which
    /// program. The caller holds the place's lock: what is written here to a port that goes at the
    /// same time would stay.
    fn read_rules(&mut self, now_ns: u64) -> Result<(), AttachError> {
        let length = Duration::from_nanos(now_ns.saturating_sub(self.last_tick_ns));
        self.last_tick_ns = now_ns;
        let table = std::fs::read_to_string("/proc/thread-self/net/packet").unwrap_or_default();
        let captured = captured(&table);
        let routes = Routes::open()?;
        let links = routes.links()?;
        let (record, ours) = (self.place.record()?, Ours::of(&self.place)?);
        let mut changed = false;
        for (index, port) in self.maps.ports()? {
            let Some(interface) = record.interfaces.iter().find(|i| i.index == index) else { continue };
            let Some(link) = links.iter().find(|l| l.index == index) else { continue };
            let on = captured.contains(&0) || captured.contains(&index);
            let others = Others::at(&routes, link, interface.past_filters, ours)?;
            let flags = capabilities(link, others) | if on { PORT_CAPTURED } else { 0 };
            let (mode, mut why, is_fleeting) = self.choose(interface, link, &port, length, on)?;
            if others.are_overlooked() {
                why = Why::Overlooked;
            } else if others.precede() && why == Why::OutputUnsuited {
                why = Why::Preceded;
            }
            changed |= flags != port.flags & !PORT_TWICE;
            let flags = flags | if is_fleeting { PORT_TWICE } else { 0 };
            let since_ns = if mode == port.mode { port.since_ns } else { now_ns };
            let now = Port { flags, mode, why: why as u32, since_ns, ..port };
            if now != port {
                self.maps.set_port(index, now)?;
            }
        }
        if changed {
            self.maps.forget_flows()?;
        }
        Ok(())
    }

    /// Has an interface's mode chosen, and puts the XDP program in or takes it out; says too
    /// whether its flows are fleeting.
    fn choose(
        &mut self,
        interface: &Interface,
        link: &InterfaceInfo,
        port: &Port,
        length: Duration,
        captured: bool,
    ) -> Result<(Mode, Why, bool), AttachError> {
        let now = Duration::from_nanos(self.last_tick_ns);
        let counters = self.maps.counters(port.slot)?;
        let fresh = || Chooser::new(interface.wanted, is_suited(link), port.mode, now);
        let watched =
            self.watched.entry(link.index).or_insert_with(|| Watched { chooser: fresh(), last: counters.clone() });
        // It was attached again meanwhile, perhaps with another wish: that one counts, and the mode
        // that the map has.
        if watched.chooser.wanted() != interface.wanted || watched.chooser.mode() != port.mode {
            watched.chooser = fresh();
        }
        let window = window(&watched.last, &counters, length, captured);
        watched.last = counters;
        let (mode, why) = watched.chooser.choose(&window, now);
        let is_fleeting = window.is_fleeting(port.flags & PORT_TWICE != 0);
        if mode == port.mode {
            return Ok((mode, why, is_fleeting));
        }
        if mode == Mode::Tcx {
            detach_xdp(&self.place, link.index);
        } else if let Err(cause) = attach_xdp(&self.place, link.index) {
            tell(&format!("{}: XDP could not be attached: {cause}", link.name));
            return Ok((Mode::Tcx, watched.chooser.refused(now), is_fleeting));
        }
        Ok((mode, why, is_fleeting))
    }
}

/// Whether two readings of when a flow was used mean the same: the unit of that is about a
/// millisecond, and depends on when it is read.
fn is_same_moment(a_ns: u64, b_ns: u64) -> bool {
    a_ns.abs_diff(b_ns) < 3 << 20
}

/// Writes a line to the log. On a full disk it is lost, where `eprintln!` would panic.
fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// What happened between two readings of an interface's counters.
fn window(before: &Counters, after: &Counters, length: Duration, captured: bool) -> Window {
    let packets = |n: usize| after.packets[n].saturating_sub(before.packets[n]);
    Window {
        length,
        taken: after.taken().saturating_sub(before.taken()),
        xdp_able: after.taken_able.saturating_sub(before.taken_able),
        by_xdp: packets(TAKEN_XDP),
        unknown: packets(NO_FLOW),
        passed: after.passed().saturating_sub(before.passed()),
        large: after.taken_large.saturating_sub(before.taken_large) + packets(HANDED_LARGE),
        partial: packets(HANDED_PARTIAL) + after.taken_partial.saturating_sub(before.taken_partial),
        captured,
    }
}

/// Waits until there is something to read, but not for long.
fn glance(fds: &[BorrowedFd<'_>], longest: Duration) -> Result<(), AttachError> {
    let glance = rustix::event::Timespec::try_from(longest).expect("a fifth of a second");
    let mut polled: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    match poll(&mut polled, Some(&glance)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(crate::netlink::NetlinkError::Call { what: "poll", cause: e }.into()),
    }
}

/// Has connections' entries altered as the programs wish, until the place is gone.
fn grant(place: &Place, mut wishes: RingBuf<MapData>, conntrack: &Conntrack) -> Result<(), AttachError> {
    let mut beats = Beats::open(place)?;
    // Connections that were acknowledged, and when that is to be confirmed.
    let mut acknowledged: VecDeque<(u64, Connection)> = VecDeque::new();
    loop {
        beats.set(GRANTING, monotonic_ns())?;
        glance(&[wishes.as_fd()], GLANCE)?;
        if !place.exists() {
            return Ok(());
        }
        let timeouts = LazyCell::new(settle::Timeouts::read);
        while let Some(wish) = wishes.next() {
            match wished(&wish) {
                // The kernel has just set the timeout that goes with the flag.
                Some((connection, Update::ACKNOWLEDGED)) => {
                    if let Some(timeouts) = *timeouts
                        && settle::acknowledge(conntrack, &connection, timeouts)
                    {
                        acknowledged.push_back((monotonic_ns() + CONFIRM.as_nanos() as u64, connection));
                    }
                }
                // One that closed meanwhile needs it no more; one that the kernel does not change
                // is wished for again.
                Some((connection, update)) => drop(conntrack.update(&connection, update)),
                None => {}
            }
        }
        let now_ns = monotonic_ns();
        while let Some((_, connection)) = acknowledged.pop_front_if(|(due_ns, _)| *due_ns <= now_ns) {
            if let Some(timeouts) = *timeouts {
                settle::confirm(conntrack, &connection, timeouts);
            }
        }
    }
}

/// Runs until the place is gone. Gives back at once where another controller runs.
pub fn keep(place: &Place) -> Result<(), AttachError> {
    let lock = {
        let held = match place.lock_handed_over()? {
            Some(lock) => Some(lock),
            None => place.lock_if_there()?,
        };
        // One that comes late must not make its lock in a place that was removed.
        let Some(_held) = held.filter(|_| place.exists()) else { return Ok(()) };
        let Some(lock) = place.controller_lock()? else { return Ok(()) };
        lock
    };
    let mut beats = Beats::open(place)?;
    beats.set_all(monotonic_ns())?;
    let monitor = Monitor::open()?;
    let rules_monitor = RulesMonitor::open();
    let conntrack = Conntrack::open()?;
    let wishes = maps::wishes(place)?;
    let granting = place.clone();
    let granter = std::thread::Builder::new()
        .name("bypass-grants".into())
        .spawn(move || grant(&granting, wishes, &conntrack))
        .map_err(AttachError::Thread)?;
    let mut controller = Controller {
        place: place.clone(),
        maps: Maps::open(place)?,
        neighbours: Neighbours::default(),
        watched: HashMap::new(),
        last_tick_ns: monotonic_ns(),
        last_reap_ns: monotonic_ns(),
        last_settle_ns: monotonic_ns(),
        next_scan_ns: 0,
        settled: HashMap::new(),
        links_changed: true,
        links: HashMap::new(),
        rules: RulesReader::start(place)?,
    };
    for change in Routes::open()?.neighbours()? {
        controller.is_untrue(change)?;
    }
    let mut next_tick = monotonic_ns();
    loop {
        beats.set(WATCHING, monotonic_ns())?;
        let told = [Some(monitor.as_fd()), rules_monitor.as_ref().map(AsFd::as_fd)];
        glance(&told.into_iter().flatten().collect::<Vec<_>>(), GLANCE)?;
        if !controller.place.is_kept_by(&lock) {
            return Ok(());
        }
        if granter.is_finished() {
            return granter.join().unwrap_or(Ok(()));
        }
        if controller.rules.thread.is_finished() {
            return controller.rules.thread.join().unwrap_or(Ok(()));
        }
        let mut untrue = false;
        for change in monitor.changes()? {
            untrue |= controller.is_untrue(change)?;
        }
        controller.follow_neighbours();
        let links_changed = std::mem::take(&mut controller.links_changed);
        let rules_changed = rules_monitor.as_ref().map(RulesMonitor::changed).transpose()?.unwrap_or(false);
        if rules_changed || links_changed {
            controller.rules.ask();
        }
        if links_changed {
            untrue |= controller.are_links_others()?;
        }
        if untrue {
            controller.maps.forget_flows()?;
        }
        if links_changed && controller.attach_again()?.is_none() {
            // Another command is at it, perhaps with the same interface: the next turn looks again.
            controller.links_changed = true;
        }
        if monotonic_ns() >= next_tick {
            next_tick = monotonic_ns() + TICK.as_nanos() as u64;
            if controller.tick()? {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_sockets_that_listen_are_seen_and_those_that_only_send_are_not() {
        let table = "sk       RefCnt Type Proto  Iface R Rmem   User   Inode\n\
                     000000001 3      3    0003   5     1 0      0      123\n\
                     000000002 3      3    0000   6     1 0      0      124\n\
                     000000003 3      3    0003   0     1 0      0      125\n";
        assert_eq!(captured(table), [5, 0]);
    }

    #[test]
    fn a_wish_names_the_connection_as_netlink_wants_it() {
        let mut wish = [0; WISH_BYTES];
        wish[..4].copy_from_slice(&[10, 0, 0, 1]);
        wish[16..20].copy_from_slice(&[10, 0, 0, 2]);
        wish[32..36].copy_from_slice(&[0x12, 0x34, 0, 80]);
        wish[36] = 2;
        let (connection, update) = wished(&wish).unwrap();
        assert_eq!((connection.source, connection.destination_port), (vec![10, 0, 0, 1], [0, 80]));
        assert_eq!(update, Update::LIBERAL);
        wish[38] = 2;
        assert_eq!(wished(&wish).unwrap().1.state, Some(CLOSED));
        wish[38] = 3;
        assert_eq!(wished(&wish), None);
    }
}
