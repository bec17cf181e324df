//! Attaching to interfaces and detaching again.
//!
//! Everything that is attached is a pinned link, or a filter where the kernel has no tcx (`hook`).
//! So none of our processes has to stay alive. Programs and filters that are already there stay as
//! they are. Programs of others run before ours. Older tc filters would run after ours, and would
//! never see a frame that is taken. Attaching there is refused unless the user asks for it.

use crate::chooser::Why;
use crate::conntrack::Conntrack;
use crate::controller::{self, KEPT};
use crate::hook::{self, has_tcx};
use crate::layout::{Flow, Mode, PORT_PEER, PORT_PRECEDED, PORT_QUEUED, PORT_TAKE, PORT_XDP_OUT, Port, Tuple};
use crate::maps::{self, FlowKey, Maps, MapsError};
use crate::netlink::{InterfaceInfo, NetlinkError, Routes};
use crate::object::{self, INJECT, LoadError, TCX_IN, TCX_OUT, XDP_IN, chain};
use crate::place::{self, Awaited, COMMAND, Interface, Place, PlaceError, PlaceRecord, Wanted};
use crate::retrack;
use crate::rules;
use crate::settle;
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{ProgramError, ProgramInfo, SchedClassifier, TcAttachType, Xdp, XdpMode, loaded_programs};
use aya_obj::programs::XdpAttachType;
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// How long a flow holds, unless the user says otherwise.
pub const LEASE: Duration = Duration::from_secs(1);
const LONGEST_LEASE: Duration = Duration::from_secs(10);
const SHORTEST_LEASE: Duration = Duration::from_millis(20);

/// How long we wait for an interface that went to be re-created under its name, to attach it again.
/// Examples are the restart of a microVM, and a card that is plugged in again. The name of a
/// container's interface (CNI) does not come again.
const AWAITED: Duration = Duration::from_secs(60);

/// For how long we wait for the kernel to take programs off.
const DETACHING: Duration = Duration::from_secs(1);

/// The name of libxdp's program that calls others in turn (xdp-tools, lib/libxdp/xdp-dispatcher.c).
const DISPATCHER: &str = "xdp_dispatcher";
/// IFLA_XDP_ATTACHED of a program that runs on sk_buffs (linux/if_link.h).
const XDP_ATTACHED_SKB: u8 = 2;

/// Why attaching or detaching failed. What was attached before it failed is detached again.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum AttachError {
    #[error(transparent)]
    Place(#[from] PlaceError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Maps(#[from] MapsError),
    /// An interface.
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    /// A setting of conntrack.
    #[error("nf_conntrack_tcp_be_liberal: {0}")]
    Lenient(std::io::Error),
    /// The kernel gives no buffers for captured frames.
    #[error("capture: {0}")]
    Capture(String),
    /// One capture runs already.
    #[error("another capture runs in this network namespace, by {0}; only one can run at a time")]
    Capturing(String),
    /// The system has no thread for the controller.
    #[error("the controller's second thread: {0}")]
    Thread(std::io::Error),
    /// A program could not be attached.
    #[error("{interface}: {cause}")]
    Program { interface: String, cause: String },
    /// Older filters would be skipped.
    #[error(
        "{0} has tc filters at its ingress, which run after tcx programs: they would not see a frame that is taken. \
         Remove them, or use --past-filters if they need not see it"
    )]
    Filters(String),
    /// An XDP program is there, and an interface has room for one.
    #[error(
        "{interface} has an XDP program already ({name}, id {program}{dispatcher}), and an interface can have only \
         one: attach with --mode auto or tcx, which works behind it, or remove that program ({off})"
    )]
    XdpTaken {
        interface: String,
        /// Its id, as in `bpftool prog`.
        program: u32,
        /// Its name; empty if it has none.
        name: String,
        /// Extra text if libxdp put it there.
        dispatcher: &'static str,
        /// The command that takes it off.
        off: String,
    },
    /// Not a member of an Ethernet.
    #[error("{0} is not an Ethernet interface, and the bypass writes Ethernet headers")]
    NotEthernet(String),
    /// The kernel forwards nothing there.
    #[error(
        "{0} is a macvtap: its frames go to and come from the device below it without this host's forwarding, so there is \
         nothing to bypass. Attach interfaces that this host routes between, such as a tap and the output (`ip route`)"
    )]
    Macvtap(String),
    /// Asked for what is not attached.
    #[error("{0} is not attached; `tombolo bypass status` lists what is (with the same --netns)")]
    NotAttached(String),
    /// A lease out of bounds.
    #[error(
        "a lease of {0:?} is out of bounds: {SHORTEST_LEASE:?} to {LONGEST_LEASE:?}, so that the kernel's own timers see each flow in time"
    )]
    Lease(Duration),
}

/// How to attach.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which program takes frames: tcx, XDP, or the better one.
    pub wanted: Wanted,
    /// How long a flow holds before one frame goes the kernel's way again; `None`: as it is, or
    /// `LEASE`.
    pub lease: Option<Duration>,
    /// Attach although older filters at the ingress will not see what is taken.
    pub past_filters: bool,
    /// Whether traffic goes the kernel's way again when the controller has been killed; `None`: as
    /// it is, or not.
    pub needs_keeper: Option<bool>,
    /// Whether flows are taken although rules that judge each frame will then judge one per lease;
    /// `None`: as it is, or not.
    pub skips_judging_rules: Option<bool>,
    /// How the user named the namespace.
    pub netns: String,
    /// Who asks: `place::COMMAND`, or a fabric's name.
    pub owner: String,
}

/// What was done at one interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// As `ip link` shows it.
    pub interface: String,
    /// Whether it was attached before.
    pub already: bool,
    /// Names of tcx programs that run before ours.
    pub after: Vec<String>,
}

/// What `detach` and `release` did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detached {
    /// Names of the interfaces that were detached.
    pub interfaces: Vec<String>,
    /// How many TCP connections conntrack still does not check the windows of.
    pub unchecked: usize,
}

impl Detached {
    /// A sentence about `unchecked`, if there are any.
    pub fn unchecked_text(&self) -> Option<String> {
        let (n, plural) = (self.unchecked, if self.unchecked == 1 { "" } else { "s" });
        (n > 0).then(|| {
            format!("connection tracking still checks no windows of {n} TCP connection{plural}, until they end (docs/bypass.md)")
        })
    }
}

/// The kernel's numbers of our programs. Their names anybody's may have: another bypass's have
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ours {
    ingress: u32,
    egress: u32,
}

impl Ours {
    /// Of the programs that are pinned in this place.
    pub(crate) fn of(place: &Place) -> Result<Ours, AttachError> {
        let id = |name: &str| {
            let wrong = |e| AttachError::Program { interface: name.into(), cause: chain(&e) };
            ProgramInfo::from_pin(place.pin(&format!("prog_{name}"))).map(|p| p.id()).map_err(wrong)
        };
        Ok(Ours { ingress: id(TCX_IN)?, egress: id(TCX_OUT)? })
    }
}

/// What others have attached to an interface's tc hooks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Others {
    /// Filters, or programs behind ours, that should see a frame that is taken here, and would not.
    overlooked: bool,
    /// Programs before ours at the ingress, which XDP would pass by.
    preceding: bool,
    /// Filters or programs that see what goes out, which neither XDP nor the straight way into a
    /// veth's other end passes.
    at_egress: bool,
    /// An XDP program on a veth's other end, which what goes there straight would pass.
    at_peer: bool,
    /// A process takes packets from NFQUEUE, anywhere in this namespace.
    queued: bool,
}

impl Others {
    pub(crate) fn at(
        routes: &Routes,
        link: &InterfaceInfo,
        past_filters: bool,
        ours: Ours,
    ) -> Result<Others, NetlinkError> {
        let at = |hook, id| hook::others_at(routes, &link.name, link.index, hook, id);
        let (ingress, egress) = (at(TcAttachType::Ingress, ours.ingress)?, at(TcAttachType::Egress, ours.egress)?);
        Ok(Others {
            overlooked: !past_filters && ingress.behind,
            preceding: ingress.before,
            at_egress: egress.before || egress.behind,
            at_peer: routes.has_peer_xdp(link)?,
            // Where the kernel has no such queues there is no such file.
            queued: std::fs::read("/proc/thread-self/net/netfilter/nfnetlink_queue").is_ok_and(|t| !t.is_empty()),
        })
    }

    pub(crate) fn are_overlooked(self) -> bool {
        self.overlooked
    }

    pub(crate) fn precede(self) -> bool {
        self.preceding
    }
}

/// Whether our programs are at work at an interface. Neither its number nor the namespace's says
/// so: the kernel gives both out again, and a pin outlives what its link was attached to. So the
/// pinned link is to be of our program, and the interface's hook is to have that program; the hook
/// is asked, since aya does not give a link's interface, which would be 0 of a dead one. A filter
/// is at the hook or nowhere.
pub(crate) fn is_alive(place: &Place, link: &InterfaceInfo, ours: Ours) -> bool {
    let hooks = [(TCX_IN, TcAttachType::Ingress, ours.ingress), (TCX_OUT, TcAttachType::Egress, ours.egress)];
    hooks.into_iter().all(|(name, hook, id)| {
        if !has_tcx() {
            return hook::is_filter(link.index, hook, id);
        }
        let pinned = PinnedLink::from_pin(place.pin(&format!("link_{name}_{}", link.index))).map(FdLink::from);
        let program = pinned.and_then(|l| l.info()).map(|i| i.program_id());
        // One that is renamed in this moment is not found by its name: the next look tells.
        program.is_ok_and(|found| found == id)
            && hook::query_tcx(&link.name, hook).is_none_or(|found| found.contains(&id))
    })
}

/// Whether the place is a namespace's that is no more, whose number another one has now: nothing of
/// it is at work, and no controller runs.
fn is_leftover(place: &Place) -> Result<bool, AttachError> {
    if place.controller().is_some() {
        return Ok(false);
    }
    let (links, record, ours) = (Routes::open()?.links()?, place.record()?, Ours::of(place)?);
    let is_here = |i: &Interface| links.iter().any(|l| l.index == i.index && is_alive(place, l, ours));
    Ok(!record.interfaces.iter().any(is_here))
}

/// Removes what is left of other namespaces that are gone, where no controller did. The caller
/// holds the lock.
fn sweep(place: &Place) -> Result<(), AttachError> {
    for other in place.others() {
        if other.controller().is_none() && (other.is_abandoned(0) || is_anothers(&other)) {
            other.remove()?;
        }
    }
    Ok(())
}

/// Whether the place is one of another namespace, whose number one has now that processes are in.
fn is_anothers(place: &Place) -> bool {
    let Some(path) = place.has_lost_its_name().then(|| place.namespace()).flatten() else { return false };
    let look = || place::enter(&path.to_string_lossy()).is_ok() && is_leftover(place).unwrap_or(false);
    // A thread of its own, since it stays there.
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, look);
        matches!(thread.map(|thread| thread.join()), Ok(Ok(true)))
    })
}

/// What may be done with frames that come in at an interface, and which ways out of it there are.
pub(crate) fn capabilities(link: &InterfaceInfo, others: Others) -> u32 {
    let ingress = if others.queued { PORT_QUEUED } else { 0 } | if others.preceding { PORT_PRECEDED } else { 0 };
    let take = if others.overlooked { 0 } else { PORT_TAKE } | ingress;
    if others.at_egress {
        return take;
    }
    // The other end of a veth in this namespace cannot be redirected into, and a queueing
    // discipline must be able to act.
    let straight = link.qdisc == "noqueue" && link.master.is_none() && !others.at_peer;
    let peer = link.kind == "veth" && link.peer_elsewhere.is_some() && straight;
    // Into a veth XDP would lose what its other end has no NAPI for; and where there is no veth's
    // other end, tcx is faster anyway.
    let xdp = is_suited(link) && PLAIN_QUEUES.contains(&link.qdisc.as_str());
    take | if peer { PORT_PEER } else { 0 } | if xdp { PORT_XDP_OUT } else { 0 }
}

/// Queueing disciplines that do nothing important: XDP passes them by.
const PLAIN_QUEUES: [&str; 6] = ["noqueue", "pfifo_fast", "fq_codel", "fq", "pfifo", "mq"];

/// Whether XDP at this interface costs nothing. A veth's peer would lose segmentation; nothing is
/// known of cards yet.
pub(crate) fn is_suited(link: &InterfaceInfo) -> bool {
    link.kind == "tun"
}

fn program(place: &Place, name: &str) -> Result<SchedClassifier, ProgramError> {
    SchedClassifier::from_pin(place.pin(&format!("prog_{name}")))
}

/// Puts programs and maps in place for a namespace where nothing is yet.
fn found(place: &Place) -> Result<(), AttachError> {
    place.make()?;
    let mut loaded = object::load()?;
    maps::pin(&loaded, place)?;
    for (name, program) in loaded.programs_mut() {
        let path = place.pin(&format!("prog_{name}"));
        program.pin(&path).map_err(|e| AttachError::Program { interface: name.into(), cause: chain(&e) })?;
    }
    Ok(())
}

fn attach_tcx(place: &Place, interface: &str, index: u32, name: &str, hook: TcAttachType) -> Result<(), String> {
    let mut program = program(place, name).map_err(|e| chain(&e))?;
    hook::attach(place, &mut program, (interface, index), (name, hook))
}

/// Puts the XDP program into the driver.
pub(crate) fn attach_xdp(place: &Place, index: u32) -> Result<(), String> {
    let mut program =
        Xdp::from_pin(place.pin(&format!("prog_{XDP_IN}")), XdpAttachType::Interface).map_err(|e| chain(&e))?;
    let id = program.attach_to_if_index(index, XdpMode::Driver).map_err(|e| chain(&e))?;
    let link = program.take_link(id).map_err(|e| chain(&e))?;
    let link = FdLink::try_from(link).map_err(|e| chain(&e))?;
    link.pin(place.pin(&format!("link_{XDP_IN}_{index}"))).map_err(|e| chain(&e))?;
    Ok(())
}

/// Takes it out again; tcx goes on.
pub(crate) fn detach_xdp(place: &Place, index: u32) {
    wait_until_off(&[(index, unpin(place, index, &[XDP_IN]))]);
}

/// Removes pinned links of an interface; gives their programs' numbers. One that is not there is
/// detached already.
fn unpin(place: &Place, index: u32, names: &[&str]) -> Vec<u32> {
    let pinned = names.iter().filter_map(|name| PinnedLink::from_pin(place.pin(&format!("link_{name}_{index}"))).ok());
    pinned.filter_map(|link| Some(link.unpin().ok()?.info().ok()?.program_id())).collect()
}

/// Waits until none of these programs is at the hooks of its interface (the number before it). The
/// kernel takes a program off with the last reference to its link. That of a pin it drops a grace
/// period after the pin is removed (before Linux 6.18), or when a kernel thread gets to it, if
/// nothing else holds the link.
fn wait_until_off(gone: &[(u32, Vec<u32>)]) {
    let is_on = |link: &InterfaceInfo, programs: &[u32]| {
        let at_tc = [TcAttachType::Ingress, TcAttachType::Egress].map(|hook| hook::query_tcx(&link.name, hook));
        let mut found = at_tc.into_iter().flatten().flatten().chain(link.xdp.map(|(_, program)| program));
        found.any(|program| programs.contains(&program))
    };
    let end = Instant::now() + DETACHING;
    let mut waiting: Vec<_> = gone.iter().filter(|(_, programs)| !programs.is_empty()).collect();
    while !waiting.is_empty() {
        let links = Routes::open().and_then(|routes| routes.links()).unwrap_or_default();
        waiting.retain(|(index, programs)| links.iter().any(|link| link.index == *index && is_on(link, programs)));
        if waiting.is_empty() || Instant::now() >= end {
            return;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Takes all programs of this place off these interfaces.
fn detach_all(place: &Place, interfaces: impl IntoIterator<Item = u32>) {
    let take_off = |index| {
        let programs = unpin(place, index, &[XDP_IN, TCX_IN, TCX_OUT]);
        if !has_tcx()
            && let Ok(ours) = Ours::of(place)
        {
            hook::remove_filters(place, index, [ours.ingress, ours.egress]);
        }
        (index, programs)
    };
    wait_until_off(&interfaces.into_iter().map(take_off).collect::<Vec<_>>());
}

/// Takes off all programs of this place, for a caller that is about to remove its pins: filters
/// would outlive them, and links that go with them are off only some time later.
fn strip(place: &Place) {
    detach_all(place, place.linked());
    if has_tcx() || Ours::of(place).is_err() {
        return;
    }
    detach_all(place, Routes::open().and_then(|r| r.links()).unwrap_or_default().into_iter().map(|link| link.index));
}

/// Attaches to interfaces of the calling thread's namespace. All or nothing.
pub fn attach(place: &Place, names: &[String], options: &Options) -> Result<Vec<Attached>, AttachError> {
    if let Some(lease) = options.lease.filter(|l| !(SHORTEST_LEASE..=LONGEST_LEASE).contains(l)) {
        return Err(AttachError::Lease(lease));
    }
    // Nothing is looked at before it is held, and it is held until all is done.
    let lock = place.lock()?;
    restore_checks(place)?;
    let fresh = !place.exists() || is_leftover(place)?;
    if fresh {
        // What an attach that was killed left, or a namespace before this one, if anything.
        strip(place);
        place.clear()?;
    }
    let (mut done, mut changed) = (vec![], vec![]);
    let result = attach_locked(place, names, options, fresh, (&mut done, &mut changed));
    // What others left is no reason for this one to fail; the next one tries again.
    let _ = sweep(place);
    if result.is_err() {
        if fresh {
            strip(place);
            place.remove()?;
        } else {
            let mut maps = Maps::open(place)?;
            for index in done {
                maps.remove_port(index)?;
                detach_all(place, [index]);
            }
            // What fails here must not hide why the attach failed.
            let record = place.record().unwrap_or_default();
            let _ = restore_modes(place, &mut maps, &record, &changed);
            let _ = rules::refresh(place, &mut maps, record.skips_judging_rules);
        }
    }
    drop(lock);
    result
}

/// Has interfaces that were attached before taken from as the record says: an `attach` that failed
/// has changed their modes.
fn restore_modes(place: &Place, maps: &mut Maps, record: &PlaceRecord, changed: &[u32]) -> Result<(), AttachError> {
    let (routes, ours) = (Routes::open()?, Ours::of(place)?);
    for link in routes.links()?.iter().filter(|link| changed.contains(&link.index)) {
        let Some(interface) = record.interfaces.iter().find(|i| i.index == link.index) else { continue };
        let others = Others::at(&routes, link, interface.past_filters, ours)?;
        open_port(place, &routes, maps, link, others, interface.wanted, first_reason(interface.wanted))?;
    }
    Ok(())
}

/// `done` are the interfaces whose programs it attached, `changed` those that were attached before
/// and whose modes it changed.
fn attach_locked(
    place: &Place,
    names: &[String],
    options: &Options,
    fresh: bool,
    (done, changed): (&mut Vec<u32>, &mut Vec<u32>),
) -> Result<Vec<Attached>, AttachError> {
    let routes = Routes::open()?;
    let mut once = HashSet::new();
    let names = names.iter().filter(|name| once.insert(*name));
    let links: Vec<InterfaceInfo> = names.map(|n| routes.link(n)).collect::<Result<_, _>>()?;
    for link in &links {
        if link.mac.is_none() {
            return Err(AttachError::NotEthernet(link.name.clone()));
        }
        if link.kind == "macvtap" {
            return Err(AttachError::Macvtap(link.name.clone()));
        }
        // Without tcx ours is a filter too, and runs behind them.
        if !options.past_filters && has_tcx() && routes.has_ingress_filters(link.index)? {
            return Err(AttachError::Filters(link.name.clone()));
        }
    }
    if fresh {
        found(place)?;
    }
    let mut record = place.record()?;
    let mut maps = Maps::open(place)?;
    let ours = Ours::of(place)?;
    prune(place, &mut record, &mut maps, &routes.links()?, ours)?;
    // Until it is known which rules judge the interfaces that come.
    rules::suspend(&mut maps)?;
    let before_ns = maps.lease_ns()?;
    let lease = options.lease.or((before_ns > 0).then(|| Duration::from_nanos(before_ns))).unwrap_or(LEASE);
    let mut report = vec![];
    for link in &links {
        let known = record.interfaces.iter_mut().find(|i| i.index == link.index);
        let mut attached = Attached { interface: link.name.clone(), already: known.is_some(), after: vec![] };
        if let Some(known) = known {
            if !known.owners.contains(&options.owner) {
                known.owners.push(options.owner.clone());
            }
            if options.owner != COMMAND {
                // Another process attached it, and chose the options.
                report.push(attached);
                continue;
            }
            known.wanted = options.wanted;
            known.past_filters = options.past_filters;
            changed.push(link.index);
        } else {
            attached.after = attach_programs(place, link, done)?;
            // Who asked for the one of this name that went asks for this one too.
            let before = record.awaited.extract_if(.., |a| a.interface.name == link.name).next();
            let mut owners = before.map_or(vec![], |a| a.interface.owners);
            owners.retain(|o| *o != options.owner);
            owners.push(options.owner.clone());
            record.interfaces.push(Interface {
                name: link.name.clone(),
                index: link.index,
                wanted: options.wanted,
                past_filters: options.past_filters,
                owners,
            });
        }
        let others = Others::at(&routes, link, options.past_filters, ours)?;
        open_port(place, &routes, &mut maps, link, others, options.wanted, first_reason(options.wanted))?;
        report.push(attached);
    }
    if !options.netns.is_empty() {
        record.netns.clone_from(&options.netns);
    }
    record.needs_keeper = options.needs_keeper.unwrap_or(record.needs_keeper);
    // A controller that takes longer to start has frames taken from then on.
    let until_ns = monotonic_ns() + KEPT.as_nanos() as u64;
    maps.keep_until(if record.needs_keeper { until_ns } else { 0 })?;
    record.skips_judging_rules = options.skips_judging_rules.unwrap_or(record.skips_judging_rules);
    // What cannot be read now is read by the controller; nothing is learned until then, and the
    // report says so.
    let _ = rules::refresh(place, &mut maps, record.skips_judging_rules);
    maps.set_lease(lease.as_nanos() as u64, tick_ns())?;
    maps.forget_flows()?;
    place.write(&record)?;
    Ok(report)
}

/// Puts both programs of tc onto an interface; gives the names of those that run before ours.
fn attach_programs(place: &Place, link: &InterfaceInfo, done: &mut Vec<u32>) -> Result<Vec<String>, AttachError> {
    done.push(link.index);
    // What an attach left that was killed before it wrote its record.
    detach_all(place, [link.index]);
    let others = hook::names_before(&Routes::open()?, &link.name, link.index);
    for (name, hook) in [(TCX_OUT, TcAttachType::Egress), (TCX_IN, TcAttachType::Ingress)] {
        attach_tcx(place, &link.name, link.index, name, hook)
            .map_err(|cause| AttachError::Program { interface: link.name.clone(), cause })?;
    }
    Ok(others)
}

/// The reason that is reported for the mode in which an interface begins.
fn first_reason(wanted: Wanted) -> Why {
    if wanted == Wanted::Auto { Why::Start } else { Why::Asked }
}

/// Lets frames of an attached interface be taken, in the mode that is wanted from the start.
fn open_port(
    place: &Place,
    routes: &Routes,
    maps: &mut Maps,
    link: &InterfaceInfo,
    others: Others,
    wanted: Wanted,
    why: Why,
) -> Result<(), AttachError> {
    let slot = match maps.port(link.index)? {
        Some(port) => port.slot,
        None => maps.free_slot()?,
    };
    let mode = if wanted == Wanted::Xdp { Mode::Xdp } else { Mode::Tcx };
    detach_xdp(place, link.index);
    if mode == Mode::Xdp {
        if let Some((mode, program)) = routes.link(&link.name)?.xdp {
            return Err(xdp_taken(&link.name, mode, program));
        }
        attach_xdp(place, link.index).map_err(|cause| AttachError::Program { interface: link.name.clone(), cause })?;
    }
    maps.set_port(
        link.index,
        Port { slot, flags: capabilities(link, others), mode, why: why as u32, since_ns: monotonic_ns() },
    )?;
    Ok(())
}

/// Whose program is in the way. libxdp's dispatcher chains programs that libxdp itself loaded; ours
/// is none, and to take its place would end those behind it.
fn xdp_taken(interface: &str, mode: u8, program: u32) -> AttachError {
    let name = loaded_programs().find_map(|p| p.ok().filter(|p| p.id() == program));
    let name = name.and_then(|p| p.name_as_str().map(str::to_owned)).unwrap_or_default();
    let word = if mode == XDP_ATTACHED_SKB { "xdpgeneric" } else { "xdp" };
    let (dispatcher, off) = if name == DISPATCHER {
        (", libxdp's dispatcher", format!("xdp-loader unload {interface} --all"))
    } else {
        ("", format!("ip link set dev {interface} {word} off"))
    };
    AttachError::XdpTaken { interface: interface.into(), program, name, dispatcher, off }
}

/// Interfaces that were renamed are known by their new names.
fn follow(record: &mut PlaceRecord, links: &[InterfaceInfo]) {
    for interface in &mut record.interfaces {
        if let Some(link) = links.iter().find(|l| l.index == interface.index) {
            interface.name.clone_from(&link.name);
        }
    }
}

/// Releases what is gone, perhaps into another namespace. Attaches again what was re-created under
/// the name that it was attached by, or came back. Returns what is attached, and awaited, then. The
/// caller holds the lock.
pub(crate) fn attach_again(place: &Place) -> Result<PlaceRecord, AttachError> {
    restore_checks(place)?;
    if !place.exists() {
        return Ok(PlaceRecord::default());
    }
    let (routes, mut record, mut maps) = (Routes::open()?, place.record()?, Maps::open(place)?);
    let (links, ours, before) = (routes.links()?, Ours::of(place)?, record.clone());
    prune(place, &mut record, &mut maps, &links, ours)?;
    let known: Vec<u32> = record.interfaces.iter().map(|i| i.index).collect();
    let is_awaited =
        |l: &InterfaceInfo| record.awaited.iter().any(|a| a.interface.name == l.name) && !known.contains(&l.index);
    let comes = links.iter().any(is_awaited);
    if comes {
        rules::suspend(&mut maps)?;
    }
    let mut failed = None;
    for awaited in std::mem::take(&mut record.awaited) {
        let interface = &awaited.interface;
        let is_it = |l: &&InterfaceInfo| l.name == interface.name && !known.contains(&l.index) && l.mac.is_some();
        let Some(link) = links.iter().find(is_it) else {
            record.awaited.push(awaited);
            continue;
        };
        let result = attach_programs(place, link, &mut vec![])
            .and_then(|_| Ok(Others::at(&routes, link, interface.past_filters, ours)?))
            .and_then(|others| open_port(place, &routes, &mut maps, link, others, interface.wanted, Why::MadeAgain));
        if let Err(error) = result {
            detach_all(place, [link.index]);
            record.awaited.push(awaited);
            failed = Some(error);
            continue;
        }
        record.interfaces.push(Interface { index: link.index, ..awaited.interface });
        maps.forget_flows()?;
    }
    if comes {
        let _ = rules::refresh(place, &mut maps, record.skips_judging_rules);
    }
    if record != before {
        place.write(&record)?;
    }
    failed.map_or(Ok(record), Err)
}

/// Removes everything where the namespace was deleted and only the calling controller holds it;
/// says whether. The caller holds the lock.
pub(crate) fn leave(place: &Place) -> Result<bool, AttachError> {
    let abandoned = place.is_abandoned(std::process::id());
    if abandoned {
        // It may live on under another name, or held by a process's descriptor.
        strip(place);
        place.remove()?;
    }
    Ok(abandoned)
}

/// Takes interfaces that are gone out of the record and the maps, with what is pinned for them: for
/// a while they are awaited under their names.
fn prune(
    place: &Place,
    record: &mut PlaceRecord,
    maps: &mut Maps,
    links: &[InterfaceInfo],
    ours: Ours,
) -> Result<(), AttachError> {
    let is_here = |i: &Interface| links.iter().any(|l| l.index == i.index && is_alive(place, l, ours));
    let (here, gone): (_, Vec<_>) = std::mem::take(&mut record.interfaces).into_iter().partition(is_here);
    record.interfaces = here;
    follow(record, links);
    let now_ns = monotonic_ns();
    record.awaited.retain(|a| now_ns.saturating_sub(a.since_ns) < AWAITED.as_nanos() as u64);
    if !gone.is_empty() {
        maps.forget_flows()?;
    }
    detach_all(place, gone.iter().map(|interface| interface.index));
    for interface in gone {
        maps.remove_port(interface.index)?;
        record.awaited.retain(|a| a.interface.name != interface.name);
        record.awaited.push(Awaited { interface, since_ns: now_ns });
    }
    Ok(())
}

/// Detaches from these interfaces, or from all where none is named; With the last one everything
/// goes.
pub fn detach(place: &Place, names: &[String]) -> Result<Detached, AttachError> {
    let lock = place.lock_if_there()?;
    if lock.is_none() || !place.exists() {
        let left = names.first().cloned();
        if lock.is_some() {
            restore_checks(place)?;
            strip(place);
            place.remove()?;
        }
        return left.map_or(Ok(Detached::default()), |name| Err(AttachError::NotAttached(name)));
    }
    restore_checks(place)?;
    let mut record = place.record()?;
    prune(place, &mut record, &mut Maps::open(place)?, &Routes::open()?.links()?, Ours::of(place)?)?;
    let is_named = |i: &Interface| names.is_empty() || names.contains(&i.name);
    let awaited: Vec<_> = record.awaited.extract_if(.., |a| is_named(&a.interface)).map(|a| a.interface).collect();
    let (mut going, staying): (Vec<_>, _) = std::mem::take(&mut record.interfaces).into_iter().partition(is_named);
    if !names.is_empty() {
        going.extend(awaited);
    }
    if let Some(name) = names.iter().find(|n| !going.iter().any(|i| i.name == **n)) {
        return Err(AttachError::NotAttached(name.clone()));
    }
    take_off(place, record, going, staying)
}

/// Detaches from all interfaces of the place's namespace, wherever that is, and moves the calling
/// thread there. From a namespace that nothing leads to any more, or with a record of another
/// version, all programs, pins and the controller are removed as they are; conntrack may go on
/// checking no windows there.
pub fn detach_there(place: &Place) -> Result<Detached, AttachError> {
    let namespace = place.namespace();
    if let Some(path) = &namespace {
        place::enter(&path.to_string_lossy())?;
        match detach(place, &[]) {
            Err(AttachError::Place(PlaceError::Version { .. } | PlaceError::Record { .. })) => {}
            done => return done,
        }
    }
    let Some(_lock) = place.lock_if_there()? else { return Ok(Detached::default()) };
    let interfaces = place.record().map(|record| record.interfaces).unwrap_or_default();
    let _ = controller::end(place);
    if namespace.is_some() {
        strip(place);
    }
    place.remove()?;
    Ok(Detached { interfaces: interfaces.into_iter().map(|i| i.name).collect(), unchecked: 0 })
}

/// A fabric releases what it attached. What has no other owner is detached.
pub fn release(place: &Place, owner: &str) -> Result<Detached, AttachError> {
    let Some(_lock) = place.lock_if_there()? else { return Ok(Detached::default()) };
    restore_checks(place)?;
    if !place.exists() {
        strip(place);
        place.remove()?;
        return Ok(Detached::default());
    }
    let mut record = place.record()?;
    let mut interfaces = std::mem::take(&mut record.interfaces);
    record.awaited.iter_mut().for_each(|a| a.interface.owners.retain(|o| o != owner));
    record.awaited.retain(|a| !a.interface.owners.is_empty());
    interfaces.iter_mut().for_each(|i| i.owners.retain(|o| o != owner));
    let (going, staying) = interfaces.into_iter().partition(|i| i.owners.is_empty());
    take_off(place, record, going, staying)
}

fn take_off(
    place: &Place,
    mut record: PlaceRecord,
    going: Vec<Interface>,
    staying: Vec<Interface>,
) -> Result<Detached, AttachError> {
    let mut maps = Maps::open(place)?;
    // First nothing is taken any more, then the programs go.
    for interface in &going {
        maps.remove_port(interface.index)?;
    }
    maps.forget_flows()?;
    let is_of = |tuple: &Tuple, flow: &Flow| going.iter().any(|i| i.index == tuple.input || i.index == flow.output);
    let flows: Vec<_> = maps.keyed_flows().into_iter().filter(|(_, tuple, flow)| is_of(tuple, flow)).collect();
    let ours = going.iter().chain(&staying).map(|i| i.index).collect();
    let unchecked = settle_for_good(place, &mut maps, &flows, &ours);
    detach_all(place, going.iter().map(|interface| interface.index));
    // Their numbers are no longer followed.
    maps.remove_flows(flows.iter().map(|f| &f.0));
    let unchecked = unchecked?;
    if staying.is_empty() && record.awaited.is_empty() {
        // It would end by itself, unless it is stopped.
        let _ = controller::end(place);
        place.remove()?;
    } else {
        record.interfaces = staying;
        place.write(&record)?;
    }
    Ok(Detached { interfaces: going.into_iter().map(|i| i.name).collect(), unchecked })
}

/// Settles connections whose flows end, and has their windows checked again; gives how many stay
/// unchecked. The kernel is out of step with those that had much traffic, and would never see that
/// what is on its way now is acknowledged. `ours` are the interfaces where our programs are.
fn settle_for_good(
    place: &Place,
    maps: &mut Maps,
    flows: &[(FlowKey, Tuple, Flow)],
    ours: &HashSet<u32>,
) -> Result<usize, AttachError> {
    let now_ns = monotonic_ns();
    let plain: Vec<_> = flows.iter().map(|(_, tuple, flow)| (*tuple, *flow)).collect();
    if !plain.iter().any(|(_, flow)| flow.progress.is_some()) {
        return Ok(0);
    }
    let mut standings = settle::standings(&plain);
    for standing in &mut standings {
        if now_ns.saturating_sub(standing.used_ns) < settle::RESTING.as_nanos() as u64 {
            standing.is_acknowledged = [true; 2];
        }
    }
    // What cannot be settled expires earlier, which is no reason to stay attached.
    let (Some(timeouts), Ok(conntrack)) = (settle::Timeouts::read(), Conntrack::open()) else {
        return Ok(standings.len());
    };
    settle::settle(&conntrack, &standings, timeouts, now_ns);
    // By the sysctl no connection is checked, and that is as the user wants it.
    if retrack::is_lenient() {
        return Ok(0);
    }
    // Without the program all was attached by a version before this one.
    if !standings.is_empty()
        && let Ok(inject) = program(place, INJECT)
        && start_lenient(place).is_ok()
    {
        let links = Routes::open().and_then(|routes| routes.links()).unwrap_or_default();
        let macs = links.iter().filter(|l| ours.contains(&l.index)).filter_map(|l| Some((l.index, l.mac?))).collect();
        retrack::retrack(maps, inject, &conntrack, flows, &macs);
    }
    restore_checks(place)?;
    Ok(retrack::unchecked(&conntrack, flows))
}

/// Conntrack checks no windows until `restore_checks`.
fn start_lenient(place: &Place) -> Result<(), AttachError> {
    let mut record = place.record()?;
    record.is_lenient = true;
    place.write(&record)?;
    retrack::set_lenient(true).map_err(AttachError::Lenient)
}

/// Has conntrack check windows again where a `detach` stopped that, perhaps one that was killed.
/// The caller holds the lock.
fn restore_checks(place: &Place) -> Result<(), AttachError> {
    let Ok(mut record) = place.record() else { return Ok(()) };
    if record.is_lenient {
        // Where it could not be set it need not be set back.
        if retrack::is_lenient() {
            retrack::set_lenient(false).map_err(AttachError::Lenient)?;
        }
        record.is_lenient = false;
        place.write(&record)?;
    }
    Ok(())
}

/// Now, on the clock that the programs read.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Length of the kernel's tick (1/CONFIG_HZ), which is the resolution of its coarse clocks
/// (clock_getres(2)).
fn tick_ns() -> u64 {
    rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse).tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_veth_into_another_namespace_without_a_queue_is_redirected_into() {
        let veth = InterfaceInfo {
            kind: "veth".into(),
            qdisc: "noqueue".into(),
            peer_elsewhere: Some((0, 2)),
            ..InterfaceInfo::default()
        };
        let none = Others::default();
        assert_ne!(capabilities(&veth, none) & PORT_PEER, 0);
        for other in [
            InterfaceInfo { kind: "tun".into(), ..veth.clone() },
            InterfaceInfo { qdisc: "tbf".into(), ..veth.clone() },
            InterfaceInfo { peer_elsewhere: None, ..veth.clone() },
            InterfaceInfo { master: Some(4), ..veth.clone() },
        ] {
            assert_eq!(capabilities(&other, none) & PORT_PEER, 0, "{other:?}");
        }
    }

    #[test]
    fn what_others_filters_shall_see_goes_their_way() {
        let (veth, tap) = (
            InterfaceInfo {
                kind: "veth".into(),
                qdisc: "noqueue".into(),
                peer_elsewhere: Some((0, 2)),
                ..InterfaceInfo::default()
            },
            InterfaceInfo { kind: "tun".into(), qdisc: "fq_codel".into(), ..InterfaceInfo::default() },
        );
        let (ingress, egress) =
            (Others { overlooked: true, ..Others::default() }, Others { at_egress: true, ..Others::default() });
        assert_eq!(capabilities(&veth, ingress), PORT_PEER);
        assert_eq!(capabilities(&tap, ingress), PORT_XDP_OUT);
        assert_eq!((capabilities(&veth, egress), capabilities(&tap, egress)), (PORT_TAKE, PORT_TAKE));
        assert_eq!(capabilities(&veth, Others { at_peer: true, ..Others::default() }), PORT_TAKE);
    }
}
