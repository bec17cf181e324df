//! The passt behind a user uplink, and the router before it: started, watched, replaced and taken
//! over.
//!
//! passt serves IPv6 only where this machine has a default route for it when passt starts. Asked to
//! listen at an IPv6 address without one, it ends. So each start looks at the routes, and without
//! one leaves IPv6 and its listeners out; their forwards have a fault then. What passt has it says
//! to the router before it ([`Away::has_ipv6`]), and the gateway advertises the way out only after
//! that.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tombolo_port::stream::{StreamFeed, StreamPort};
use tombolo_switch::guard::link_local;
use tombolo_switch::nat;
use tombolo_switch::nat::uplink::{self, Away, Beat, NatPort};
use tombolo_switch::port::Port;
use tombolo_switch::worker::Restart;
use tombolo_worker::reactor::Registration;

use super::backoff::Backoff;
use super::events::{Facts, Kind};
use super::helper::Helper;
use super::ports::{Handed, Opened, RunningPort};
use super::{FabricError, Running, Say};
use crate::file::{self, Proto};
use crate::plan::{self, Attachment, PortPlan, UserUplink};
use crate::process::{self, Process, Recorded};
use crate::qemu::probe::which;
use crate::routes;

/// A running passt. It ends when its stream does, unless it hangs: then the next daemon finds and
/// ends it ([`process::helpers`]).
pub(super) struct Passt {
    pub(super) process: Helper,
    feed: StreamFeed,
    /// Which guests its router need not wait for.
    away: Away,
    /// How often it was started again, ever.
    restarts: u64,
    /// When it was started, or taken over.
    since: Instant,
    backoff: Backoff,
    /// Whether it was started to serve IPv6, and whether it has ever said that it does.
    serves_ipv6: bool,
    has_served_ipv6: bool,
    /// Whether its forwards were told as interrupted, and not as open since.
    is_interrupted: bool,
    /// How it ended, until it is started again.
    pub(super) fault: Option<String>,
    /// Why the watchdog has ended it.
    blame: Option<Blame>,
    hangs: u64,
    storms: u64,
}

/// What the watchdog finds wrong with a passt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blame {
    Stopped,
    Silent,
    Deaf,
    Storm(u64),
}

impl std::fmt::Display for Blame {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Blame::Stopped => write!(f, "ended by the watchdog: it was stopped by a signal"),
            Blame::Silent => write!(f, "ended by the watchdog: it hung, and did not answer {SILENT_LOOKS} checks"),
            Blame::Deaf => {
                write!(
                    f,
                    "ended by the watchdog: it sent, but read nothing from its full socket for {SILENT_LOOKS} checks"
                )
            }
            Blame::Storm(times) => {
                write!(f, "ended by the watchdog: it repeated one frame {times} times, and nothing provoked that")
            }
        }
    }
}

/// How often a passt is looked at and asked whether it lives: one frame each way, which costs
/// nothing that can be measured.
const LOOK: Duration = Duration::from_secs(2);
/// Looks in a row at which it was stopped, or had answered nothing; the latter before its first
/// answer, when it starts.
const STOPPED_LOOKS: u32 = 2;
const SILENT_LOOKS: u32 = 4;
const FIRST_LOOKS: u32 = 15;
/// How often, and how many times, a passt that was just started is looked at until it has said that
/// it has IPv6, which takes it milliseconds.
const EARLY_LOOK: Duration = Duration::from_millis(50);
const EARLY_LOOKS: u32 = 40;
/// A passt that ends so soon has not got through its arguments.
const EARLY_END: Duration = Duration::from_secs(1);

/// Watches over a passt: Debian's has been seen to repeat one segment 18.9 million times, and one
/// that hangs takes the way out from all guests. It counts looks and not seconds, so that a paused
/// machine causes no false alarm.
#[derive(Debug, Default)]
struct Watchdog {
    last: Beat,
    stopped: u32,
    silent: u32,
    deaf: u32,
    has_answered: bool,
}

impl Watchdog {
    fn look(&mut self, beat: Beat, is_stopped: bool) -> Option<Blame> {
        self.stopped = if is_stopped { self.stopped + 1 } else { 0 };
        let answered = beat.answers != self.last.answers;
        // Without a question sent since, as where the port is down, silence says nothing.
        let is_silent = !answered && beat.frames == self.last.frames && beat.asked != self.last.asked;
        self.silent = if is_silent { self.silent + 1 } else { 0 };
        // Frames from one that reads nothing are no life. The question alone finds its socket full
        // at each look.
        let is_deaf = !answered && beat.taken == self.last.taken && beat.refused != self.last.refused;
        self.deaf = if is_deaf { self.deaf + 1 } else { 0 };
        self.has_answered |= answered;
        let storms = beat.repeats != self.last.repeats;
        self.last = beat;
        let limit = if self.has_answered { SILENT_LOOKS } else { FIRST_LOOKS };
        match () {
            () if storms => Some(Blame::Storm(beat.repeats)),
            () if self.stopped >= STOPPED_LOOKS => Some(Blame::Stopped),
            () if self.silent >= limit => Some(Blame::Silent),
            () if self.deaf >= SILENT_LOOKS => Some(Blame::Deaf),
            () => None,
        }
    }
}

impl Passt {
    /// One that was just started, or taken over.
    fn new(process: Helper, feed: StreamFeed, away: Away, serves_ipv6: bool) -> Passt {
        Passt {
            has_served_ipv6: away.has_ipv6(),
            process,
            feed,
            away,
            restarts: 0,
            since: Instant::now(),
            backoff: Backoff::PASST,
            serves_ipv6,
            is_interrupted: false,
            fault: None,
            blame: None,
            hangs: 0,
            storms: 0,
        }
    }

    /// Whether it has said that it has IPv6.
    pub(super) fn has_ipv6(&self) -> bool {
        self.away.has_ipv6()
    }

    /// Counters of it and of those before it.
    pub(super) fn counters(&self) -> [(&'static str, u64); 3] {
        [("passt_restarts", self.restarts), ("passt_hangs", self.hangs), ("passt_storms", self.storms)]
    }

    /// What is wrong with it, for a forward from `listen`.
    pub(super) fn fault_of(&self, listen: SocketAddr) -> Option<String> {
        let without = || {
            "passt was started without IPv6: this machine had no default route for it then, or passt failed with it; \
             it is looked for when passt is started again"
        };
        self.fault.clone().or_else(|| (listen.is_ipv6() && !self.serves_ipv6).then(|| without().to_string()))
    }
}

impl Drop for Passt {
    fn drop(&mut self) {
        self.process.end();
    }
}

const PASST_HINT: &str = "the user uplink needs passt (Debian: apt install passt)";

/// Why passt may end at once on a machine without a default route, which it does not say itself.
fn no_route() -> &'static str {
    match (routes::host_default_devices().is_empty(), routes::host_has_default6()) {
        (true, false) => "; this machine has no default route, and passt needs one (`ip route add default via …`)",
        (true, true) => {
            "; this machine has a default route for IPv6 only, and passt needs one for IPv4 (`ip route add default via …`)"
        }
        (false, _) => "",
    }
}

/// Whether a passt that is started now can serve IPv6, and is to.
fn serves_ipv6(user: &UserUplink) -> bool {
    user.ipv6.is_some() && routes::host_has_default6()
}

/// The address of a /64 that an interface with that Ethernet address forms by itself (RFC 4291
/// appendix A).
fn formed(prefix: Ipv6Addr, mac: &[u8; 6]) -> Ipv6Addr {
    Ipv6Addr::from_bits(prefix.to_bits() | u128::from(link_local(mac).to_bits() as u64))
}

/// What the router before a passt is made with, as often as it is.
struct Router {
    config: nat::Config,
    ipv6: Option<nat::Config<Ipv6Addr>>,
    mtu: u32,
}

impl Router {
    fn new(user: &UserUplink, network: &file::Network) -> Router {
        fn forwards<A>(user: &UserUplink, family: impl Fn(IpAddr) -> Option<A>) -> Vec<nat::Forward<A>> {
            let one = |f: &plan::UserForward| {
                let protocol = if f.proto == Proto::Tcp { nat::Protocol::Tcp } else { nat::Protocol::Udp };
                Some(nat::Forward { protocol, port: f.number, to: (family(f.to.ip())?, f.to.port()) })
            };
            user.forwards.iter().filter_map(one).collect()
        }
        let config = nat::Config {
            mac: user.mac.0,
            router: user.router,
            subnet: network.subnet.base,
            prefix: network.subnet.prefix,
            outside: plan::OUTSIDE,
            peer: plan::PEER,
            host: plan::PEER,
            forwards: forwards(user, |ip| if let IpAddr::V4(ip) = ip { Some(ip) } else { None }),
        };
        let ipv6 = user.ipv6.map(|prefix| nat::Config {
            mac: user.mac.0,
            // By which members know the router (RFC 4861 §4.2), and passt its one guest.
            router: link_local(&user.mac.0),
            subnet: prefix,
            prefix: 64,
            outside: plan::OUTSIDE6,
            peer: plan::PEER6,
            host: plan::HOST6,
            forwards: forwards(user, |ip| if let IpAddr::V6(ip) = ip { Some(ip) } else { None }),
        });
        Router { config, ipv6, mtu: network.mtu.into() }
    }

    /// The router in the place of the one whose `away` it takes over, before the passt at the other
    /// end of `stream`.
    fn make(&self, away: Away, stream: StreamPort) -> NatPort {
        let port = NatPort::in_place_of(away, self.config.clone(), Box::new(stream), self.mtu);
        match self.ipv6.clone() {
            Some(ipv6) => port.with_ipv6(ipv6),
            None => port,
        }
    }
}

impl Running {
    /// Opens the port of a user uplink, with a passt behind it: that of the daemon before, where it
    /// goes on.
    pub(super) fn open_user(
        &self,
        plan: &PortPlan,
        user: &UserUplink,
        network: &file::Network,
        registration: Registration,
        handed: Option<Handed>,
    ) -> Result<Opened, FabricError> {
        let router = Router::new(user, network);
        let (mut stream, feed) = StreamPort::given(router.mtu, registration);
        let running = handed.and_then(|handed| {
            let had_ipv6 = uplink::had_ipv6(&handed.port);
            Some((handed.port, self.running_passt(plan, user, had_ipv6, handed.passt)?))
        });
        let start = |stream| {
            let ipv6 = serves_ipv6(user);
            let child = self.start_passt(plan, user, &feed, ipv6)?;
            Ok::<_, FabricError>((router.make(Away::default(), stream), Helper::Child(child), ipv6))
        };
        let (port, process, ipv6) = match running {
            Some((handed, (process, ipv6))) => {
                let again = feed.clone();
                let attach = |handed| stream.take_up(handed).map(|()| Box::new(stream) as Box<dyn Port>);
                match NatPort::take_up(router.config.clone(), router.ipv6.clone(), handed, router.mtu, attach) {
                    Ok(port) => (port, Helper::Adopted(process), ipv6),
                    Err(why) => {
                        (self.say)(&format!("{}: starting another passt: {why}", plan.name));
                        Helper::Adopted(process).end();
                        start(again.restart(router.mtu))?
                    }
                }
            }
            None => start(stream)?,
        };
        let away = port.away();
        let (again, of_old) = (feed.clone(), away.clone());
        // passt ends with its stream, is started again as ever (`watch_passt`), and comes in
        // through the feed.
        let restart: Restart = Box::new(move |_| Ok(Box::new(router.make(of_old.clone(), again.restart(router.mtu)))));
        let passt = Some(Passt::new(process, feed, away, ipv6));
        Ok(Opened { port: Box::new(port), restart: Some(restart), passt, handle: None, directory: None })
    }

    /// The passt that the daemon before ran, if it is still there and runs as it would be started
    /// now, and whether it was started to serve IPv6. Any other is ended. `had_ipv6`: the router
    /// before it was to translate IPv6 already.
    fn running_passt(
        &self,
        plan: &PortPlan,
        user: &UserUplink,
        had_ipv6: bool,
        handed: Option<(Vec<u8>, Vec<OwnedFd>)>,
    ) -> Option<(Process, bool)> {
        let (pid, fds) = handed?;
        let pid = u32::from_le_bytes(*pid.first_chunk()?);
        let process = Process { pid, pidfd: fds.into_iter().next()? };
        let started_as = || {
            let (program, found) = (which("passt")?, process::arguments(pid)?);
            let is_found = |ipv6: bool| plan::passt_argv(&program, user, (plan.mtu, 0), ipv6)[1..] == found[1..];
            // The routes may have changed since it was started, which is no reason to end it; that
            // the file asks for IPv6 since then is one.
            let goes_on_without = had_ipv6 || !serves_ipv6(user);
            let as_ipv6 = user.ipv6.is_some() && is_found(true);
            (as_ipv6 || goes_on_without && is_found(false)).then_some(as_ipv6)
        };
        if let Some(serves_ipv6) = started_as().filter(|_| process.is_running()) {
            return Some((process, serves_ipv6));
        }
        (self.say)(&format!("{}: the passt that ran is not as the file has it: starting another one", plan.name));
        // The next one listens where this one did.
        Helper::Adopted(process).end();
        None
    }

    /// Starts a passt, which takes its stream from `feed`; with `ipv6` it is to serve IPv6 as well.
    fn start_passt(
        &self,
        plan: &PortPlan,
        user: &UserUplink,
        feed: &StreamFeed,
        ipv6: bool,
    ) -> Result<Child, FabricError> {
        let spawn = |source| FabricError::Spawn { what: format!("passt for {}", plan.name), source, hint: PASST_HINT };
        let program = which("passt").ok_or_else(|| spawn(std::io::ErrorKind::NotFound.into()))?;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|e| spawn(e.into()))?;
        let log = self.complaints(&plan.name).map_err(spawn)?;
        // Its end of the stream is its standard input: the one descriptor that needs no flag
        // cleared here.
        let argv = plan::passt_argv(&program, user, (plan.mtu, 0), ipv6);
        let mut command = Command::new(&argv[0]);
        let mark = process::helper_name(&self.facts.runtime, &plan.name);
        command.arg0(&mark).env(process::HELPER_VARIABLE, &mark);
        command.args(&argv[1..]).stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::from(log));
        let child = process::spawn(&mut command).map_err(spawn)?;
        feed.give(ours).map_err(|e| FabricError::Port { port: plan.name.clone(), why: e.to_string() })?;
        Ok(child)
    }

    /// Writes a passt into the owner record, beside the marks that it carries.
    pub(super) fn record_passt(&mut self, port: &str, pid: u32) {
        let Some(started_ticks) = process::start_ticks(pid) else { return };
        self.store.note_member(pid);
        let recorded = Recorded { name: port.into(), pid, started_ticks };
        self.dir().record(|o| {
            o.helpers.retain(|h| h.name != recorded.name);
            o.helpers.push(recorded);
        });
    }

    /// Adds the events of a passt that has ended by `cause`, or is there again.
    fn note_uplink(&self, port: &str, pid: u32, cause: Option<&str>) {
        let Some(network) = self.ports.get(port).map(|p| p.plan.network.clone()) else { return };
        let facts = || {
            let facts = Facts { pid: Some(pid), ..Facts::of(port).network(&network) };
            cause.map_or(facts.clone(), |cause| facts.cause(cause))
        };
        if cause.is_some() {
            self.events.add(Kind::Fault, facts(), &format!("the passt of {port} ended and is started again"));
        }
        let word = if cause.is_some() { "interrupted" } else { "open again" };
        for forward in self.spec.forwards.iter().filter(|f| f.network == network) {
            let text = format!("the forward {} {} is {word}", forward.proto.word(), forward.listen);
            self.events.add(Kind::Forward, facts(), &text);
        }
    }

    /// Tells the routers of the user uplinks which machines do not run: connections to them are
    /// refused, where those to one that boots are held for a while. Called after each change. One
    /// that this daemon has not come to yet may run.
    pub(crate) fn tell_who_is_away(&mut self) {
        for port in self.ports.values() {
            let Some(passt) = &port.passt else { continue };
            let ended = |m: &&file::Machine| self.machines.get(&m.name).is_some_and(|m| m.pid.is_none());
            let Some(network) = self.spec.network(&port.plan.network) else { continue };
            let ended: Vec<_> = self.spec.machines.iter().filter(ended).collect();
            let nics = ended.iter().flat_map(|m| &m.nics).filter(|nic| nic.network == network.name);
            // Fixed addresses, and those that machines form of their MAC addresses.
            let own = |nic: &file::Nic| Some(formed(network.ipv6?, &nic.mac.0).into());
            let mut ips: Vec<IpAddr> =
                nics.flat_map(|nic| nic.ip.map(IpAddr::from).into_iter().chain(own(nic))).collect();
            let fixed = self.spec.addresses6(&network.name).into_iter();
            let fixed = fixed.filter(|(name, ..)| ended.iter().any(|m| m.name == *name));
            ips.extend(fixed.flat_map(|(.., all)| all).map(IpAddr::from));
            passt.away.set(ips);
        }
        self.settle_away();
    }

    /// Starts passt again when it ends, after a pause that grows to ten seconds.
    pub(super) fn watch_passt(&self, port: String, pid: u32) {
        let (me, say) = (self.me.clone(), self.say.clone());
        let Some(process) = Process::open(pid) else { return };
        self.guard_passt(&port, pid);
        tokio::spawn(async move {
            let log = {
                let Some(running) = me.upgrade() else { return };
                running.lock().await.log_path(&port)
            };
            if !super::machine::ended_trimming(process, &[&log], &me, || false).await {
                return;
            }
            let pause = {
                let Some(running) = me.upgrade() else { return };
                let mut running = running.lock().await;
                let log = running.log_path(&port);
                let Some(passt) = running.ports.get_mut(&port).and_then(|p| p.passt.as_mut()) else { return };
                if passt.process.id() != pid {
                    return;
                }
                let status = passt.process.how();
                let blame = passt.blame.take();
                match blame {
                    Some(Blame::Storm(_)) => passt.storms += 1,
                    Some(_) => passt.hangs += 1,
                    None => {}
                }
                let how = blame.map_or(status, |blame| blame.to_string());
                let last = crate::console::tail(&log, 3).join(" / ");
                let is_early = blame.is_none() && passt.since.elapsed() < EARLY_END;
                let last = if is_early { last + no_route() } else { last };
                say(&format!("{port}: passt ended ({how}; {last}); starting it again"));
                passt.fault = Some(format!("passt ended: {how}; {last}"));
                let is_known = std::mem::replace(&mut passt.is_interrupted, true);
                let pause = passt.backoff.failed(passt.since, Instant::now());
                // As long as it goes on, the forwards are closed, which was told.
                if !is_known {
                    running.note_uplink(&port, pid, Some(&format!("{how}; {last}")));
                }
                pause
            };
            start_again(&me, &say, port, pause).await;
        });
    }

    /// Ends a passt that hangs or storms; [`Running::watch_passt`] starts the next one. Has members
    /// told of the way out for IPv6 once passt has said that it has it.
    fn guard_passt(&self, port: &str, pid: u32) {
        let Some(passt) = self.ports.get(port).and_then(|p| p.passt.as_ref()) else { return };
        let (away, feed, me, port) = (passt.away.clone(), passt.feed.clone(), self.me.clone(), port.to_string());
        let Some(process) = Process::open(pid) else { return };
        let mut watchdog = Watchdog { last: away.beat(), ..Watchdog::default() };
        let early = if passt.serves_ipv6 { EARLY_LOOKS } else { 0 };
        tokio::spawn(async move {
            for _ in 0..early {
                if away.has_ipv6() {
                    break;
                }
                tokio::time::sleep(EARLY_LOOK).await;
            }
            let mut told = None;
            loop {
                let has_ipv6 = away.has_ipv6();
                if told != Some(has_ipv6) {
                    let Some(running) = me.upgrade() else { return };
                    let mut running = running.lock().await;
                    running.settle_routers6();
                    let passt = running.ports.get_mut(&port).and_then(|p| p.passt.as_mut());
                    if let Some(passt) = passt.filter(|p| p.process.id() == pid) {
                        passt.has_served_ipv6 |= has_ipv6;
                    }
                    told = Some(has_ipv6);
                }
                tokio::time::sleep(LOOK).await;
                let Some(running) = me.upgrade() else { return };
                if !process.is_running() {
                    return;
                }
                let blame = watchdog.look(away.beat(), process::is_stopped(pid));
                away.ask();
                feed.wake();
                let Some(blame) = blame else { continue };
                let mut running = running.lock().await;
                if let Some(passt) =
                    running.ports.get_mut(&port).and_then(|p| p.passt.as_mut()).filter(|p| p.process.id() == pid)
                {
                    passt.blame = Some(blame);
                    // One that has ended meanwhile is reported by its status.
                    let _ = process.signal(rustix::process::Signal::KILL);
                }
                return;
            }
        });
    }
}

/// Starts the passt of a port again after `pause`, and after longer ones as often as it does not
/// start.
async fn start_again(me: &std::sync::Weak<tokio::sync::Mutex<Running>>, say: &Say, port: String, mut pause: Duration) {
    loop {
        tokio::time::sleep(pause).await;
        let Some(fabric) = me.upgrade() else { return };
        let mut running = fabric.lock().await;
        let Some(RunningPort { plan, passt: Some(old), .. }) = running.ports.get(&port) else { return };
        // The port may have been removed and added again, with a passt of its own.
        if old.fault.is_none() {
            return;
        }
        let (plan, feed) = (plan.clone(), old.feed.clone());
        let Attachment::User(user) = &plan.attachment else { return };
        // One that ended at once may have failed at a listener of IPv6: IPv4 is tried without.
        let ended_early = old.since.elapsed() < EARLY_END + pause;
        let listens6 = user.forwards.iter().any(|forward| forward.listen.is_ipv6());
        let failed_at_it = listens6 && old.serves_ipv6 && !old.has_served_ipv6 && ended_early;
        let ipv6 = serves_ipv6(user) && !failed_at_it;
        let started = running.start_passt(&plan, user, &feed, ipv6);
        let Some(passt) = running.ports.get_mut(&port).and_then(|p| p.passt.as_mut()) else { return };
        let since = std::mem::replace(&mut passt.since, Instant::now());
        match started {
            Ok(child) => {
                let pid = child.id();
                passt.restarts += 1;
                passt.process = Helper::Child(child);
                passt.fault = None;
                (passt.serves_ipv6, passt.has_served_ipv6) = (ipv6, false);
                let process = Process::open(pid);
                running.record_passt(&port, pid);
                running.watch_passt(port.clone(), pid);
                drop(running);
                // One that ends at once has opened nothing.
                drop(fabric);
                tokio::time::sleep(EARLY_END).await;
                let Some(fabric) = me.upgrade() else { return };
                let mut running = fabric.lock().await;
                let passt = running.ports.get_mut(&port).and_then(|p| p.passt.as_mut());
                if let Some(passt) = passt.filter(|p| p.process.id() == pid)
                    && process.is_some_and(|process| process.is_running())
                {
                    passt.is_interrupted = false;
                    running.note_uplink(&port, pid, None);
                }
                return;
            }
            Err(error) => {
                pause = passt.backoff.failed(since, passt.since);
                // Nothing leads out by IPv6 as long as that goes on.
                running.settle_routers6();
                say(&format!("{port}: {error}; trying again in {:.1} s", pause.as_secs_f32()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_blames_a_passt_that_is_stopped_silent_or_storms_and_no_other() {
        let beat = |asked, answers, frames, repeats| Beat { asked, answers, frames, repeats, ..Beat::default() };
        let mut dog = Watchdog::default();
        assert_eq!(dog.look(beat(1, 1, 1, 0), false), None);
        // Frames are life as well, and so is a port that could not ask.
        assert!((2..50).all(|n| dog.look(beat(n, 1, n, 0), false).is_none()));
        assert!((0..50).all(|_| dog.look(beat(49, 1, 49, 0), false).is_none()));
        let blamed: Vec<_> = (50..54).map(|n| dog.look(beat(n, 1, 49, 0), false)).collect();
        assert_eq!(blamed, [None, None, None, Some(Blame::Silent)]);
        assert_eq!(dog.look(beat(60, 2, 60, 7000), false), Some(Blame::Storm(7000)));
        // What a passt before it did is not blamed on this one.
        let mut dog = Watchdog { last: beat(60, 2, 60, 7000), ..Watchdog::default() };
        assert_eq!(dog.look(beat(61, 3, 61, 7000), false), None);
        // One that sends and takes nothing, and one that takes little of what it should.
        let sends = |n, taken| Beat { taken, refused: n * 10, ..beat(n, 1, n * 1000, 0) };
        let mut dog = Watchdog { last: sends(0, 5), ..Watchdog::default() };
        let blamed: Vec<_> = (1..5).map(|n| dog.look(sends(n, 5), false)).collect();
        assert_eq!(blamed, [None, None, None, Some(Blame::Deaf)]);
        let mut dog = Watchdog { last: sends(0, 5), ..Watchdog::default() };
        assert!((1..50).all(|n| dog.look(sends(n, n / 2), false).is_none()));
        let mut dog = Watchdog::default();
        assert_eq!(
            [true, false, true, true].map(|t| dog.look(beat(0, 0, 0, 0), t)),
            [None, None, None, Some(Blame::Stopped)]
        );
        // One that starts has longer.
        let mut dog = Watchdog::default();
        assert!((1..15).all(|n| dog.look(beat(n, 0, 0, 0), false).is_none()));
        assert_eq!(dog.look(beat(15, 0, 0, 0), false), Some(Blame::Silent));
    }
}
