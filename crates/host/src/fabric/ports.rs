//! Ports: opened as planned, handed to their worker, and taken out again.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tombolo_port::ivshmem::Handle;
use tombolo_port::link::{Interface, Netns};
use tombolo_port::packet::{PacketConfig, PacketPort};
use tombolo_port::reactor::Registration;
use tombolo_port::stream::{Address, StreamFeed, StreamPort};
use tombolo_port::tap::{Existing, TapConfig, TapPort};
use tombolo_port::uplink::{Away, Beat, NatPort};
use tombolo_port::vhost_user::{Shelf, Socket, VhostUserConfig, VhostUserPort};
use tombolo_port::vxlan::{VxlanConfig, VxlanPort};
use tombolo_port::xen::{XenConfig, XenPort};
use tombolo_switch::control::PortSettings;
use tombolo_switch::nat;
use tombolo_switch::port::{HandOver, Port};
use tombolo_switch::wait::Token;
use tombolo_switch::worker::Restart;

use super::backoff::Backoff;
use super::events::{Facts, Kind};
use super::helper::Helper;
use super::{FabricError, Running, RunningWorker, Say, describe};
use crate::file::{self, Proto};
use crate::plan::{self, Attachment, PortGuard, PortPlan, UserUplink};
use crate::process::{self, Process, Recorded};
use crate::qemu::probe::which;

/// A port that a worker runs.
pub(crate) struct RunningPort {
    pub(crate) plan: PortPlan,
    pub(crate) worker: usize,
    pub(crate) token: Token,
    /// The passt behind a user uplink.
    passt: Option<Passt>,
}

impl RunningPort {
    /// The passt behind it.
    pub(crate) fn passt_pid(&self) -> Option<u32> {
        self.passt.as_ref().filter(|p| p.fault.is_none()).map(|p| p.process.id())
    }

    /// Counters of the passt behind it.
    pub(crate) fn passt_counters(&self) -> Vec<(String, u64)> {
        let Some(passt) = &self.passt else { return vec![] };
        let all = [("passt_restarts", passt.restarts), ("passt_hangs", passt.hangs), ("passt_storms", passt.storms)];
        all.map(|(name, n)| (name.to_string(), n)).to_vec()
    }

    /// What is wrong with the passt behind it.
    pub(crate) fn fault(&self) -> Option<String> {
        self.passt.as_ref().and_then(|p| p.fault.clone())
    }
}

/// A running passt. It ends when its stream does, unless it hangs: then the next daemon finds and ends it
/// ([`process::helpers`]).
struct Passt {
    process: Helper,
    feed: StreamFeed,
    /// Which guests its router need not wait for.
    away: Away,
    /// How often it was started again, ever.
    restarts: u64,
    /// When it was started, or taken over.
    since: Instant,
    backoff: Backoff,
    /// How it ended, until it is started again.
    fault: Option<String>,
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

/// How often a passt is looked at and asked whether it lives: one frame each way, which costs nothing that can be measured.
const LOOK: Duration = Duration::from_secs(2);
/// Looks in a row at which it was stopped, or had answered nothing; the latter before its first answer, when it starts.
const STOPPED_LOOKS: u32 = 2;
const SILENT_LOOKS: u32 = 4;
const FIRST_LOOKS: u32 = 15;

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
        // Frames from one that reads nothing are no life. The question alone finds its socket full at each look.
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

impl Drop for Passt {
    fn drop(&mut self) {
        self.process.end();
    }
}

/// What the daemon before left of a port, and of the passt behind it.
struct Handed {
    port: HandOver,
    passt: Option<(Vec<u8>, Vec<OwnedFd>)>,
}

/// A port that was opened for a worker.
struct Opened {
    port: Box<dyn Port>,
    /// How it comes back after a panic in its code. The server of an ivshmem link has greeted the peer of a port that is gone, and
    /// does not greet it again.
    restart: Option<Restart>,
    passt: Option<Passt>,
    /// By what the port of a link hears of its peer.
    handle: Option<Handle>,
}

const PASST_HINT: &str = "the user uplink needs passt (Debian: apt install passt)";

fn error(port: &PortPlan) -> impl Fn(&dyn std::fmt::Display) -> FabricError {
    let name = port.name.clone();
    move |why| FabricError::Port { port: name.clone(), why: why.to_string() }
}

impl Running {
    pub(crate) fn worker_of(&self, network: &str) -> Option<(usize, &RunningWorker)> {
        let name = &self.spec.network(network)?.worker;
        self.workers.iter().enumerate().find(|(_, w)| w.spec.name == *name)
    }

    /// Opens a planned port and hands it to its network's worker.
    pub(crate) fn add_port(&mut self, plan: &PortPlan) -> Result<(), FabricError> {
        let fail = error(plan);
        // Ports of a vhost-user frontend take it themselves.
        let own = matches!(plan.attachment, Attachment::VhostUser { .. });
        let handed = if own { None } else { self.take_port(&plan.name) };
        let passt = self.take_state(format!("passt/{}", plan.name));
        let handed = handed.map(|port| Handed { port, passt });
        let (index, worker) = self.worker_of(&plan.network).ok_or_else(|| fail(&"its network has no worker"))?;
        let net = self.networks.get(&plan.network).ok_or_else(|| fail(&"its network is not there"))?;
        let reserved = worker.thread.handle().reserve()?;
        let token = reserved.token();
        let registration = worker.thread.registration(&reserved);
        let Opened { port, restart, passt, handle: told } = self.open(plan, registration, handed)?;
        let file::Traffic { roles, storm, rates, marking, ref vlans, .. } = plan.traffic;
        let rates = self.changed_rates(&plan.name).unwrap_or(rates);
        let guard = plan.guard.as_ref().map(PortGuard::to_switch).unwrap_or_default().with_roles(roles);
        let (labels, vlans) = (plan.labels(), vlans.clone());
        let settings = PortSettings { guard, mac_limit: None, storm, rates, labels, vlans, marking };
        let handle = worker.thread.handle();
        let added = match restart {
            Some(restart) => handle.add_lasting_port(reserved, net.id, &plan.name, port, restart, settings),
            None => handle.add_port(reserved, net.id, &plan.name, port, settings),
        };
        if let (Attachment::Ivshmem { link }, Some(told)) = (&plan.attachment, told) {
            if let (Err(_), Some(links)) = (&added, self.links()) {
                links.close(&link.name);
            } else if let Err(error) = self.serve_link(link, told) {
                // A worker that has ended has dropped the port already.
                let _ = handle.remove_port(token);
                return Err(error);
            }
        }
        added?;
        let watched = passt.as_ref().map(|p| p.process.id());
        self.ports.insert(plan.name.clone(), RunningPort { plan: plan.clone(), worker: index, token, passt });
        if let Some(pid) = watched {
            self.record_passt(&plan.name, pid);
            self.watch_passt(plan.name.clone(), pid);
        }
        (self.say)(&format!("port {} on {}: {}", plan.name, plan.network, describe(plan)));
        Ok(())
    }

    /// Takes a port out of its worker, if it is there.
    pub(crate) fn drop_port(&mut self, name: &str) {
        let Some(port) = self.ports.remove(name) else { return };
        self.watched.news.notify_one();
        if let Some(worker) = self.workers.get(port.worker) {
            // A worker that has ended has dropped the port already.
            let _ = worker.thread.handle().remove_port(port.token);
        }
        if let Attachment::VhostUser { socket, connect: false, .. } | Attachment::Stream { socket, connect: false } =
            &port.plan.attachment
        {
            let _ = std::fs::remove_file(socket);
        }
        if let (Attachment::Ivshmem { link }, Some(links)) = (&port.plan.attachment, self.links()) {
            links.close(&link.name);
        }
    }

    fn open(&self, plan: &PortPlan, registration: Registration, handed: Option<Handed>) -> Result<Opened, FabricError> {
        let fail = error(plan);
        let mtu = u32::from(plan.mtu);
        match &plan.attachment {
            Attachment::Ivshmem { link } => {
                let (port, handle) = self.open_link(link, plan.mtu, registration)?;
                Ok(Opened { port: Box::new(port), restart: None, passt: None, handle: Some(handle) })
            }
            Attachment::User(user) => {
                let (mut stream, feed) = StreamPort::given(mtu, registration);
                let network = self.spec.network(&plan.network).ok_or_else(|| fail(&"its network is not there"))?;
                let forwards = user.forwards.iter().map(|(proto, _, port, to)| nat::Forward {
                    protocol: if *proto == Proto::Tcp { nat::Protocol::Tcp } else { nat::Protocol::Udp },
                    port: *port,
                    to: *to,
                });
                let config = nat::Config {
                    mac: user.mac.0,
                    router: user.router,
                    subnet: network.subnet.base,
                    prefix: network.subnet.prefix,
                    outside: plan::OUTSIDE.parse().expect("a literal address"),
                    peer: plan::PEER.parse().expect("a literal address"),
                    host: plan::PEER.parse().expect("a literal address"),
                    forwards: forwards.collect(),
                };
                let running =
                    handed.and_then(|handed| Some((handed.port, self.running_passt(user, plan.mtu, handed.passt)?)));
                let (port, process) = match running {
                    Some((handed, process)) => {
                        let again = feed.clone();
                        let attach = |handed| stream.take_up(handed).map(|()| Box::new(stream) as Box<dyn Port>);
                        match NatPort::take_up(config.clone(), None, handed, mtu, attach) {
                            Ok(port) => (port, Helper::Adopted(process)),
                            Err(why) => {
                                (self.say)(&format!("{}: starting another passt: {why}", plan.name));
                                let _ = process.signal(rustix::process::Signal::KILL);
                                let stream = again.restart(mtu);
                                let port = NatPort::new(config.clone(), Box::new(stream), mtu);
                                (port, Helper::Child(self.start_passt(plan, user, &feed)?))
                            }
                        }
                    }
                    None => {
                        let process = Helper::Child(self.start_passt(plan, user, &feed)?);
                        (NatPort::new(config.clone(), Box::new(stream), mtu), process)
                    }
                };
                let port = Box::new(port);
                let away = port.away();
                let (again, of_old) = (feed.clone(), away.clone());
                // passt ends with its stream, is started again as ever (`watch_passt`), and comes in through the feed.
                let restart: Restart = Box::new(move |_| {
                    let stream = Box::new(again.restart(mtu));
                    Ok(Box::new(NatPort::in_place_of(of_old.clone(), config.clone(), stream, mtu)))
                });
                let passt = Passt {
                    process,
                    feed,
                    away,
                    restarts: 0,
                    since: Instant::now(),
                    backoff: Backoff::PASST,
                    fault: None,
                    blame: None,
                    hangs: 0,
                    storms: 0,
                };
                Ok(Opened { port, restart: Some(restart), passt: Some(passt), handle: None })
            }
            _ => {
                let shelf = self.shelf(&plan.name);
                let handed = handed.map(|handed| handed.port);
                let attached = attach(plan, registration.clone(), shelf.clone(), handed, &self.say);
                let port = attached.map_err(|why| fail(&why))?;
                // Rules, routes and a bypass hang on the tap of a kernel uplink, and not on a member's.
                let hung =
                    matches!(plan.attachment, Attachment::Tap { .. }) && plan.name == plan::uplink_name(&plan.network);
                let restart = (!hung).then(|| anew(plan, registration, shelf, self.say.clone()));
                Ok(Opened { port, restart, passt: None, handle: None })
            }
        }
    }

    /// The passt that the daemon before ran, if it is still there and runs as it would be started now. Any other is ended.
    fn running_passt(&self, user: &UserUplink, mtu: u16, handed: Option<(Vec<u8>, Vec<OwnedFd>)>) -> Option<Process> {
        let (pid, fds) = handed?;
        let pid = u32::from_le_bytes(*pid.first_chunk()?);
        let process = Process { pid, pidfd: fds.into_iter().next()? };
        let expected = which("passt").map(|program| plan::passt_argv(&program, user, mtu, 0));
        let same = expected.zip(process::arguments(pid)).is_some_and(|(expected, found)| expected[1..] == found[1..]);
        if same && process.is_running() {
            return Some(process);
        }
        let _ = process.signal(rustix::process::Signal::KILL);
        None
    }

    fn start_passt(&self, plan: &PortPlan, user: &UserUplink, feed: &StreamFeed) -> Result<Child, FabricError> {
        let spawn = |source| FabricError::Spawn { what: format!("passt for {}", plan.name), source, hint: PASST_HINT };
        let program = which("passt").ok_or_else(|| spawn(std::io::ErrorKind::NotFound.into()))?;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|e| spawn(e.into()))?;
        let log = self.complaints(&plan.name).map_err(spawn)?;
        // Its end of the stream is its standard input: the one descriptor that needs no flag cleared here.
        let argv = plan::passt_argv(&program, user, plan.mtu, 0);
        let mut command = Command::new(&argv[0]);
        let mark = process::helper_name(&self.facts.runtime, &plan.name);
        command.arg0(&mark).env(process::HELPER_VARIABLE, &mark);
        command.args(&argv[1..]).stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::from(log));
        let child = process::spawn(&mut command).map_err(spawn)?;
        feed.give(ours).map_err(|e| FabricError::Port { port: plan.name.clone(), why: e.to_string() })?;
        Ok(child)
    }

    /// Writes a passt into the owner record, beside the marks that it carries.
    fn record_passt(&mut self, port: &str, pid: u32) {
        let Some(started_ticks) = process::start_ticks(pid) else { return };
        self.note_member(pid);
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

    /// Tells the routers of the user uplinks which machines do not run: connections to them are refused, where those to
    /// one that boots are held for a while. Called after each change. One that this daemon has not come to yet may run.
    pub(crate) fn tell_who_is_away(&mut self) {
        for port in self.ports.values() {
            let Some(passt) = &port.passt else { continue };
            let ended = |m: &&file::Machine| self.machines.get(&m.name).is_some_and(|m| m.pid.is_none());
            let nics = self.spec.machines.iter().filter(ended).flat_map(|m| &m.nics);
            let ips = nics.filter(|n| n.network == port.plan.network).filter_map(|n| n.ip);
            passt.away.set(ips.map(Into::into).collect());
        }
        self.settle_away();
    }

    pub(crate) fn log_path(&self, name: &str) -> std::path::PathBuf {
        self.facts.runtime.join(format!("{name}.log"))
    }

    /// The file of a child's complaints. Where it cannot be made, as on a full disk, they are lost; the child is not.
    pub(crate) fn complaints(&self, name: &str) -> std::io::Result<std::fs::File> {
        crate::rundir::private_file(&self.log_path(name)).or_else(|error| {
            (self.say)(&format!("{name}: its log is not kept: {error}"));
            std::fs::OpenOptions::new().write(true).open("/dev/null")
        })
    }

    /// Starts passt again when it ends, after a pause that grows to ten seconds.
    fn watch_passt(&self, port: String, pid: u32) {
        let (me, say) = (self.me.clone(), self.say.clone());
        let Some(process) = Process::open(pid) else { return };
        self.guard_passt(&port, pid);
        tokio::spawn(async move {
            let log = {
                let Some(running) = me.upgrade() else { return };
                running.lock().await.log_path(&port)
            };
            if !super::machine::ended_trimming(process, &[&log], &me).await {
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
                say(&format!("{port}: passt ended ({how}; {last}); starting it again"));
                passt.fault = Some(format!("passt ended: {how}; {last}"));
                let pause = passt.backoff.failed(passt.since, Instant::now());
                running.note_uplink(&port, pid, Some(&format!("{how}; {last}")));
                pause
            };
            start_again(&me, &say, port, pause).await;
        });
    }

    /// Ends a passt that hangs or storms; [`Running::watch_passt`] starts the next one.
    fn guard_passt(&self, port: &str, pid: u32) {
        let Some(passt) = self.ports.get(port).and_then(|p| p.passt.as_ref()) else { return };
        let (away, feed, me, port) = (passt.away.clone(), passt.feed.clone(), self.me.clone(), port.to_string());
        let Some(process) = Process::open(pid) else { return };
        let mut watchdog = Watchdog { last: away.beat(), ..Watchdog::default() };
        tokio::spawn(async move {
            loop {
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

/// Starts the passt of a port again after `pause`, and after longer ones as often as it does not start.
async fn start_again(me: &std::sync::Weak<tokio::sync::Mutex<Running>>, say: &Say, port: String, mut pause: Duration) {
    loop {
        tokio::time::sleep(pause).await;
        let Some(running) = me.upgrade() else { return };
        let mut running = running.lock().await;
        let Some(RunningPort { plan, passt: Some(old), .. }) = running.ports.get(&port) else { return };
        // The port may have been removed and added again, with a passt of its own.
        if old.fault.is_none() {
            return;
        }
        let (plan, feed) = (plan.clone(), old.feed.clone());
        let Attachment::User(user) = &plan.attachment else { return };
        let started = running.start_passt(&plan, user, &feed);
        let Some(passt) = running.ports.get_mut(&port).and_then(|p| p.passt.as_mut()) else { return };
        let since = std::mem::replace(&mut passt.since, Instant::now());
        match started {
            Ok(child) => {
                let pid = child.id();
                passt.restarts += 1;
                passt.process = Helper::Child(child);
                passt.fault = None;
                running.record_passt(&port, pid);
                running.note_uplink(&port, pid, None);
                running.watch_passt(port, pid);
                return;
            }
            Err(error) => {
                pause = passt.backoff.failed(since, passt.since);
                say(&format!("{port}: {error}; trying again in {:.1} s", pause.as_secs_f32()));
            }
        }
    }
}

/// Opens a port that needs nothing of the fabric but its plan.
///
/// `handed` is what the port of the daemon before left; where it cannot be continued the peer connects again.
fn attach(
    plan: &PortPlan,
    registration: Registration,
    shelf: Option<Shelf>,
    mut handed: Option<HandOver>,
    say: &Say,
) -> Result<Box<dyn Port>, String> {
    fn text(error: impl std::fmt::Display) -> String {
        error.to_string()
    }
    let mtu = u32::from(plan.mtu);
    let lost = |why: String| say(&format!("port {}: its peer has to connect again: {why}", plan.name));
    let go_on = |mut port: StreamPort, handed: Option<HandOver>| {
        if let Some(Err(why)) = handed.map(|handed| port.take_up(handed)) {
            lost(why);
        }
        Box::new(port)
    };
    Ok(match &plan.attachment {
        Attachment::VhostUser { socket, connect, queues, .. } => {
            let socket = if *connect { Socket::Connect(socket.clone()) } else { Socket::Listen(socket.clone()) };
            let config = VhostUserConfig { socket, queue_pairs: *queues, mtu };
            Box::new(VhostUserPort::open_kept(config, registration, shelf).map_err(text)?)
        }
        Attachment::Stream { socket, connect: true } => {
            go_on(StreamPort::connect(&Address::Unix(socket.clone()), mtu, registration), handed)
        }
        Attachment::Stream { socket, connect: false } => {
            let address = Address::Unix(socket.clone());
            let taken = handed.as_mut().map(|h| StreamPort::listen_on(h, &address, 0o600, mtu, registration.clone()));
            match taken {
                Some(Ok(port)) => go_on(port, handed),
                // What the port before it was of another kind, or listened elsewhere.
                taken => {
                    if let Some(Err(why)) = taken {
                        lost(why.to_string());
                    }
                    Box::new(StreamPort::listen(&address, 0o600, mtu, registration).map_err(text)?)
                }
            }
        }
        Attachment::Tap { device, adopt, netns, ip, mac, accept_ra } => {
            if let Some(fd) = handed.and_then(|handed| handed.fds.into_iter().next()) {
                // Addresses, routes and rules are on it as they were.
                match TapPort::adopt(fd, registration.clone()) {
                    Ok(port) if port.name() == device => return Ok(Box::new(port)),
                    Ok(port) => say(&format!(
                        "port {}: expected the tap {device}, found {}: opening it again",
                        plan.name,
                        port.name()
                    )),
                    // What the port before it was of another kind.
                    Err(why) => say(&format!("port {}: opening {device} again: {why}", plan.name)),
                }
            }
            let netns = netns.as_deref().map(Netns::open).transpose().map_err(text)?;
            let existing = if *adopt { Existing::Adopt } else { Existing::Create };
            let mac = mac.map(|m| m.0);
            let closed = !*accept_ra && !*adopt;
            let config =
                TapConfig { netns: netns.clone(), existing, mtu: Some(mtu), mac, closed, ..TapConfig::new(device) };
            let port = TapPort::open(&config, registration).map_err(text)?;
            if let Some((ip, prefix)) = ip {
                let link = Interface::open(netns.as_ref(), device).map_err(text)?;
                link.add_address((*ip).into(), *prefix).map_err(text)?;
            }
            Box::new(port)
        }
        Attachment::Packet { device, netns } => {
            let netns = netns.as_deref().map(Netns::open).transpose().map_err(text)?;
            let config = PacketConfig { netns, ..PacketConfig::new(device) };
            Box::new(PacketPort::open(&config, registration).map_err(text)?)
        }
        // Nothing is handed over: the rings and the nodes in XenStore say where the port before it stood.
        Attachment::Xen { domain, vif, mac, queues } => {
            let (domain, device, mac) = (domain.clone(), *vif, mac.map(|mac| mac.0));
            let config = XenConfig { domain, device, mac, max_queues: u32::from(*queues), mtu };
            Box::new(XenPort::open(config, registration).map_err(text)?)
        }
        // The socket goes on receiving; what was learned is learned again.
        Attachment::Vxlan(tunnel) => {
            let at = |ip| SocketAddr::new(ip, tunnel.udp_port);
            let config = VxlanConfig {
                vni: tunnel.vni,
                local: at(tunnel.local),
                remotes: tunnel.remotes.iter().copied().map(at).collect(),
                mtu,
                learning: tunnel.learning,
                netns: None,
            };
            Box::new(VxlanPort::open(&config, registration, handed).map_err(text)?)
        }
        Attachment::Ivshmem { .. } | Attachment::User(_) => return Err("its peer is the fabric's own to start".into()),
    })
}

/// A port of [`attach`] comes back after a panic as one that was just added: at the same socket, which its peer finds when it
/// connects the next time, or with the same device. Opening takes a few system calls of the worker's time.
fn anew(plan: &PortPlan, registration: Registration, shelf: Option<Shelf>, say: Say) -> Restart {
    let plan = plan.clone();
    Box::new(move |_| attach(&plan, registration.clone(), shelf.clone(), None, &say))
}

#[cfg(test)]
mod tests {
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

    use super::super::injected::{Planted, PlantedPort};
    use super::*;
    use std::os::unix::net::UnixStream;
    use tombolo_port::worker::{WorkerConfig, WorkerThread};
    use tombolo_switch::mac::MacSettings;
    use tombolo_switch::port::Link;
    use tombolo_testing::until;

    #[test]
    fn a_port_in_which_a_bug_showed_is_open_again_to_its_peers_next_connection() {
        let dir = tempfile::tempdir().unwrap();
        let thread = WorkerThread::start(&WorkerConfig { name: "anew".into(), ..WorkerConfig::default() }).unwrap();
        let handle = thread.handle();
        let network = handle.add_network("lan", MacSettings::default()).unwrap();
        let sockets = ["vhost-user", "stream"].map(|name| dir.path().join(name));
        let attachments = [
            Attachment::VhostUser { socket: sockets[0].clone(), connect: false, queues: 1, mac: None },
            Attachment::Stream { socket: sockets[1].clone(), connect: false },
        ];
        for (attachment, socket) in attachments.into_iter().zip(&sockets) {
            let name = socket.file_name().unwrap().to_str().unwrap().to_string();
            let network_name = "lan".to_string();
            let plan = PortPlan {
                name,
                network: network_name,
                attachment,
                guard: None,
                traffic: file::Traffic::default(),
                mtu: 1500,
                machine: None,
            };
            let reserved = handle.reserve().unwrap();
            let (token, registration) = (reserved.token(), thread.registration(&reserved));
            // The real one has its socket, behind a bug.
            let say: Say = std::sync::Arc::new(|_| ());
            let real = attach(&plan, registration.clone(), None, None, &say).unwrap();
            let (kind, shows) = (real.kind(), Planted::Bug("injected"));
            let port = Box::new(PlantedPort { kind, link: Link::Down, shows, _holds: Some(real) });
            let first = UnixStream::connect(socket).unwrap();
            let restart = anew(&plan, registration, None, say);
            let counters =
                handle.add_lasting_port(reserved, network, &plan.name, port, restart, PortSettings::default()).unwrap();
            until("the port made anew", || counters.restarts.get() == 1);
            let status = handle.status().unwrap();
            let port = status.ports.iter().find(|p| p.token == token).unwrap();
            // The injected one says nothing of itself.
            assert!(port.panic.is_none() && port.lasting && !port.details.is_empty(), "{port:?}");
            drop(first);
            let _again = UnixStream::connect(socket).unwrap();
            handle.remove_port(token).unwrap();
            assert!(UnixStream::connect(socket).is_err());
        }
        thread.stop().unwrap();
    }
}
