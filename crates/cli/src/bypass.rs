//! `tombolo bypass`: interfaces whose traffic skips the kernel's forwarding.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use tombolo_bypass::attachment::{self, AttachError, Detached, Options, monotonic_ns};
use tombolo_bypass::layout::{Event, TAKEN, Tuple, VERDICTS};
use tombolo_bypass::netlink::{InterfaceInfo, NetlinkError, Routes};
use tombolo_bypass::place::{self, COMMAND, Place, Wanted};
use tombolo_bypass::report::{self, Detail, Report};
use tombolo_bypass::trace::Traced;
use tombolo_host::api::metrics;
use tombolo_host::api::report::BypassReport;
use tombolo_host::rundir;

use crate::bypass_capture::Capture;
use crate::exit::{Exit, Failure};
use crate::number;
use crate::out::{self, Table};

#[derive(Subcommand, Debug)]
pub(crate) enum Bypass {
    /// Let traffic between these interfaces skip the kernel's forwarding
    Attach(Attach),
    /// Return interfaces to the kernel; without a name, all of them
    Detach(Detach),
    /// Show interfaces, their modes, and which path their frames took and why
    Status(Status),
    /// Print each frame with the path that it took, and why
    Trace(Trace),
    /// Measure which flows have traffic, which path their frames take, and why
    Flows(Flows),
    /// Write the frames of one flow or filter to a pcapng file, each with its path and the reason
    Capture(Capture),
    /// Help the attached programs along until they are detached
    #[command(hide = true)]
    Keep(Keep),
}

#[derive(Args, Debug)]
pub(crate) struct Space {
    /// Network namespace that holds the interfaces, by name or path [default: the command's own]
    #[arg(long, value_name = "NAMESPACE")]
    netns: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ModeArg {
    /// Chosen by the traffic of each interface, so that it is never slower
    Auto,
    /// At the tc ingress hook: segmentation and checksum state are kept
    Tcx,
    /// In the driver, before there is an sk_buff
    Xdp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum IfControllerDies {
    /// It stays in the bypass, without the controller's work
    Stay,
    /// It takes the kernel's path within three seconds, until `attach` starts another controller
    Leave,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum JudgingRules {
    /// Flows that such a rule could judge take the kernel's path
    Obey,
    /// They are taken, and such a rule judges one frame per lease
    Skip,
}

#[derive(Args, Debug)]
pub(crate) struct Attach {
    /// Names of the interfaces: taps, veths, cards
    #[arg(required = true, value_name = "INTERFACE")]
    interfaces: Vec<String>,
    /// Which program takes the frames
    #[arg(long, value_enum, default_value = "auto")]
    mode: ModeArg,
    /// Milliseconds before one frame of a flow takes the kernel's path again, 20 to 10000, for all
    /// interfaces of the namespace [default: 1000, or unchanged]
    #[arg(long, value_name = "MS", value_parser = number::milliseconds, allow_hyphen_values = true)]
    lease: Option<Duration>,
    /// Attach even if older tc filters at the ingress then do not see the frames that are taken
    #[arg(long)]
    past_filters: bool,
    /// What happens to traffic if the controller is killed, for all interfaces of the namespace
    /// [default: stay, or unchanged]
    #[arg(long, alias = "if-keeper-dies", value_enum, value_name = "WHAT", conflicts_with = "no_controller")]
    if_controller_dies: Option<IfControllerDies>,
    /// How to treat firewall rules that judge each frame (limit, log, matches on the payload), for
    /// all interfaces of the namespace [default: obey, or unchanged]
    #[arg(long, value_enum, value_name = "WHAT")]
    judging_rules: Option<JudgingRules>,
    /// Start no controller: no changes of mode, and no new TCP connections through connection
    /// tracking
    #[arg(long, alias = "no-keeper")]
    no_controller: bool,
    #[command(flatten)]
    space: Space,
    /// Print the state afterwards as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Detach {
    /// Names of the interfaces [default: all]
    #[arg(value_name = "INTERFACE")]
    interfaces: Vec<String>,
    /// All interfaces of all network namespaces, also what fabrics attached
    #[arg(long, conflicts_with_all = ["interfaces", "netns"])]
    everywhere: bool,
    #[command(flatten)]
    space: Space,
}

#[derive(Args, Debug)]
pub(crate) struct Status {
    #[command(flatten)]
    space: Space,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// Print the counters as Prometheus text, with the names and labels of a fabric's metrics; the
    /// namespace, as given, takes the place of a network
    #[arg(long, conflicts_with = "json")]
    metrics: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Trace {
    /// Only frames that come in at this interface
    #[arg(value_name = "INTERFACE")]
    interface: Option<String>,
    /// Stop after this many lines
    #[arg(long, value_name = "N", value_parser = number::count, allow_hyphen_values = true)]
    count: Option<u64>,
    /// Stop after this many seconds
    #[arg(long, value_name = "S", value_parser = number::seconds, allow_hyphen_values = true)]
    seconds: Option<Duration>,
    /// Print every frame, not only the first of each flow and path
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    space: Space,
    /// Print one JSON object per line; the last one has the number of lost events
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Flows {
    /// Only flows that come in at this interface
    #[arg(value_name = "INTERFACE")]
    interface: Option<String>,
    /// How long to measure
    #[arg(long, value_name = "S", default_value = "1", value_parser = number::seconds, allow_hyphen_values = true)]
    seconds: Duration,
    /// Show this many flows, those with most bytes first
    #[arg(long, value_name = "N", default_value = "20", value_parser = number::count, allow_hyphen_values = true)]
    top: u64,
    /// Only flows with frames that took the kernel's path
    #[arg(long)]
    passed: bool,
    #[command(flatten)]
    space: Space,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Keep {
    #[command(flatten)]
    space: Space,
}

impl ModeArg {
    /// As it is typed.
    fn word(self) -> &'static str {
        match self {
            ModeArg::Auto => "auto",
            ModeArg::Tcx => "tcx",
            ModeArg::Xdp => "xdp",
        }
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        let misused = matches!(
            error,
            AttachError::NotAttached(_)
                | AttachError::NotEthernet(_)
                | AttachError::Lease(_)
                | AttachError::Netlink(NetlinkError::NoInterface(_))
        );
        if misused { Failure::misused(error.to_string()) } else { Failure::failed(error.to_string()) }
    }
}

/// The runtime directory, where root asks.
fn need_root() -> Result<PathBuf, Failure> {
    if !rustix::process::geteuid().is_root() {
        return Err(Failure::failed(
            "the bypass needs root (CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON): run it as root or through sudo",
        ));
    }
    rundir::runtime_root().map_err(|e| Failure::failed(e.to_string()))
}

impl Space {
    /// Goes into the namespace and gives its place.
    pub(crate) fn enter(&self) -> Result<Place, Failure> {
        let runtime = need_root()?;
        if let Some(name) = &self.netns {
            place::enter(name).map_err(AttachError::from)?;
        }
        Ok(Place::here(&runtime).map_err(AttachError::from)?)
    }
}

impl Bypass {
    pub(crate) fn run(self) -> Result<Exit, Failure> {
        match self {
            Bypass::Attach(attach) => attach.run(),
            Bypass::Detach(detach) => detach.run(),
            Bypass::Status(status) => status.run(),
            Bypass::Trace(trace) => trace.run(),
            Bypass::Flows(flows) => flows.run(),
            Bypass::Capture(capture) => capture.run(),
            Bypass::Keep(keep) => keep.run(),
        }
    }
}

impl Attach {
    /// What was set for all interfaces of the namespace.
    fn settings(&self) -> Option<String> {
        let set = [
            self.lease.map(|lease| format!("lease {} ms", lease.as_millis())),
            self.if_controller_dies.map(|then| match then {
                IfControllerDies::Stay => "traffic stays in the bypass if the controller dies".into(),
                IfControllerDies::Leave => "traffic leaves the bypass if the controller dies".into(),
            }),
            self.judging_rules.map(|then| match then {
                JudgingRules::Obey => "flows that a judging rule could judge take the kernel's path".into(),
                JudgingRules::Skip => "judging rules see one frame per lease".into(),
            }),
        ];
        let set: Vec<String> = set.into_iter().flatten().collect();
        (!set.is_empty()).then(|| set.join(", "))
    }

    fn run(self) -> Result<Exit, Failure> {
        let place = self.space.enter()?;
        let wanted = match self.mode {
            ModeArg::Auto => Wanted::Auto,
            ModeArg::Tcx => Wanted::Tcx,
            ModeArg::Xdp => Wanted::Xdp,
        };
        let netns = self.space.netns.clone().unwrap_or_default();
        let done = attachment::attach(
            &place,
            &self.interfaces,
            &Options {
                wanted,
                lease: self.lease,
                past_filters: self.past_filters,
                needs_keeper: self.if_controller_dies.map(|then| then == IfControllerDies::Leave),
                skips_judging_rules: self.judging_rules.map(|then| then == JudgingRules::Skip),
                netns,
                owner: COMMAND.into(),
            },
        )?;
        for attached in done.iter().filter(|a| !a.after.is_empty()) {
            out::tell!(
                "tombolo: {}: runs after {}, which was there before",
                attached.interface,
                attached.after.join(", ")
            );
        }
        let mut exit = Exit::Done;
        if !self.no_controller && !tombolo_bypass::controller::start(&place)? {
            out::tell!("tombolo: the controller did not start; see {}", place.log().display());
            exit = Exit::Partly;
        }
        let report = settled_report(&place)?;
        let is_of_others = |what: &str| !self.interfaces.iter().any(|name| what.starts_with(&format!("{name}: ")));
        for warning in report.warnings.iter().filter(|w| ATTACH_WARNINGS.contains(&w.kind)) {
            if warning.kind != "interface" || !is_of_others(&warning.what) {
                out::tell!("tombolo: {warning}");
            }
        }
        if self.json {
            out::json(&report)?;
        } else {
            for attached in done {
                let what = if attached.already { "was attached already, and now has" } else { "attached in" };
                out::print(&format!("{} {what} mode {}\n", attached.interface, self.mode.word()))?;
            }
            if let Some(settings) = self.settings() {
                out::print(&format!("all interfaces of this network namespace: {settings}\n"))?;
            }
        }
        Ok(exit)
    }
}

/// Kinds of warnings that `attach` prints: those that say what this attach will not do.
const ATTACH_WARNINGS: [&str; 4] = ["rules_unread", "judging_rules", "judging_rule", "interface"];
/// How long an attach that runs at the same time may take to read the firewall's rules.
const RULES_READ: Duration = Duration::from_secs(1);

/// The report, once the firewall's rules were read again where another attach is about to.
fn settled_report(place: &Place) -> Result<Report, Failure> {
    let end = Instant::now() + RULES_READ;
    while report::report(place, Detail::Counters)?.rules_fault.is_some() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(report::report(place, Detail::Flows)?)
}

impl Detach {
    fn run(self) -> Result<Exit, Failure> {
        if !self.everywhere {
            let place = self.space.enter()?;
            return Self::tell(&attachment::detach(&place, &self.interfaces)?);
        }
        let runtime = need_root()?;
        let places = Place::all(&runtime);
        if places.is_empty() {
            return Self::tell(&Detached::default());
        }
        let mut exit = Exit::Done;
        for place in places {
            // What fails in one namespace is no reason to leave the others attached.
            match attachment::detach_there(&place) {
                Ok(detached) => drop(Self::tell(&detached)?),
                Err(error) => {
                    out::tell!("tombolo: {}: {error}", place.pins().display());
                    exit = Exit::Failed;
                }
            }
        }
        Ok(exit)
    }

    fn tell(detached: &Detached) -> Result<Exit, Failure> {
        if detached.interfaces.is_empty() {
            out::print(&format!("{NOTHING}\n"))?;
        }
        for name in &detached.interfaces {
            out::print(&format!("{name} detached\n"))?;
        }
        if let Some(text) = detached.unchecked_text() {
            out::print(&format!("{text}\n"))?;
        }
        Ok(Exit::Done)
    }
}

impl Keep {
    fn run(self) -> Result<Exit, Failure> {
        let place = self.space.enter()?;
        // A session of its own: a terminal that closes does not end it.
        let _ = rustix::process::setsid();
        tombolo_bypass::controller::keep(&place)?;
        Ok(Exit::Done)
    }
}

impl Status {
    fn run(self) -> Result<Exit, Failure> {
        let place = self.space.enter()?;
        // Who asks for metrics asks again and again.
        let report = report::report(&place, if self.metrics { Detail::Counters } else { Detail::Flows })?;
        if self.json {
            out::json(&report)?;
        } else if self.metrics {
            let name = self.space.netns.as_deref().unwrap_or_default();
            out::print(&metrics::render_bypass(name, &as_of_a_network(report)))?;
        } else {
            out::print(&render(&report))?;
        }
        Ok(Exit::Done)
    }
}

/// The report in the form in which a fabric has that of a network.
fn as_of_a_network(report: Report) -> BypassReport {
    let fault = if !report.attached {
        Some(NOTHING.into())
    } else if report.needs_keeper && report.keeper.is_none() {
        Some("no controller runs, and --if-controller-dies leave takes nothing without one".into())
    } else {
        report.keeper_fault
    };
    let warnings = report.warnings.iter().map(ToString::to_string).collect();
    BypassReport { fault, interfaces: report.interfaces.into_iter().map(Into::into).collect(), warnings }
}

const SHORTENED: &str = "leases cut to half of the conntrack timeout in force, which is shorter";
const NOTHING: &str =
    "nothing is attached in this network namespace (--netns names another one, TOMBOLO_RUNTIME another runtime folder)";

fn render(report: &Report) -> String {
    if !report.attached {
        return format!("{NOTHING}\n");
    }
    let controller = match report.keeper {
        Some(pid) => format!("controller {pid}"),
        None => "no controller".into(),
    };
    let mut text = format!("{} flows, lease {} ms, {controller}\n\n", report.flows, report.lease_ms);
    let mut table = Table::new(&["interface", "mode", "why", ">flows", ">taken", ">bytes", ">passed"]);
    for i in &report.interfaces {
        let numbers = [i.flows as u64, i.taken, i.taken_bytes, i.passed].map(|n| n.to_string());
        let [flows, taken, bytes, passed] = &numbers;
        let reasons = i
            .by_reason
            .iter()
            .chain(&i.unlearned)
            .map(|(key, n)| format!("{n:>12}  {key}: {}", report::meaning(key).unwrap_or_default()))
            .chain((i.shortened > 0).then(|| format!("{:>12}  shortened: {SHORTENED}", i.shortened)));
        table.row(&[&i.name, i.mode.word(), i.why, flows, taken, bytes, passed]).extend(reasons);
    }
    text.push_str(&table.render(false));
    if !report.warnings.is_empty() {
        text.push('\n');
    }
    for warning in &report.warnings {
        text.push_str(&format!("{warning}\n"));
    }
    text
}

#[derive(Serialize)]
struct Line<'a> {
    at_ns: u64,
    input: &'a str,
    output: Option<&'a str>,
    protocol: u8,
    source: String,
    destination: String,
    length: u32,
    path: &'static str,
    why: &'static str,
}

/// A flow's protocol in words, and its ends: only TCP's and UDP's have ports; an echo's id is with
/// the protocol.
fn ends(t: &Tuple) -> (String, String, String) {
    let ported = |address, port| std::net::SocketAddr::new(address, port).to_string();
    // An echo has its type and code where a destination port would be.
    let protocol = match (t.protocol, t.destination_port >> 8) {
        (6, _) => "tcp".into(),
        (17, _) => "udp".into(),
        (1, 0 | 8) | (58, 128 | 129) => format!("icmp echo {}", t.source_port),
        (1 | 58, _) => "icmp".into(),
        (other, _) => format!("protocol {other}"),
    };
    match t.protocol {
        6 | 17 => (protocol, ported(t.source, t.source_port), ported(t.destination, t.destination_port)),
        _ => (protocol, t.source.to_string(), t.destination.to_string()),
    }
}

/// The links of a namespace where something is attached; `wanted` has to be one that is attached.
pub(crate) fn links_of_attached(place: &Place, wanted: Option<&str>) -> Result<Vec<InterfaceInfo>, Failure> {
    if !place.exists() {
        return Err(Failure::misused(NOTHING));
    }
    let links = Routes::open().and_then(|r| r.links()).map_err(AttachError::from)?;
    if let Some(wanted) = wanted {
        let record = place.record().map_err(AttachError::from)?;
        let link = links.iter().find(|l| l.name == wanted);
        if !link.is_some_and(|l| record.interfaces.iter().any(|i| i.index == l.index)) {
            return Err(AttachError::NotAttached(wanted.into()).into());
        }
    }
    Ok(links)
}

/// Says that it ended early, where everything was detached meanwhile.
pub(crate) fn end_of(detached: bool) -> Exit {
    if detached {
        out::tell!("tombolo: everything was detached meanwhile");
        return Exit::Partly;
    }
    Exit::Done
}

/// Becomes true with the first SIGINT or SIGTERM; the second one ends the process, also where it
/// waits for its reader.
pub(crate) fn stop_flag() -> Result<Arc<AtomicBool>, Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, stop.clone())?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    Ok(stop)
}

/// One flow in the output of `flows`.
#[derive(Debug, Serialize)]
struct FlowLine {
    input: String,
    output: Option<String>,
    protocol: String,
    source: String,
    destination: String,
    taken: u64,
    taken_bytes: u64,
    passed: u64,
    passed_bytes: u64,
    /// How its last frame that was taken went.
    path: Option<&'static str>,
    /// Why its last frame that took the kernel's path did.
    why: Option<&'static str>,
}

#[derive(Serialize)]
struct FlowsReport {
    schema: u32,
    /// How long it was measured.
    seconds: f64,
    /// Flows with frames in that time; `flows` may have fewer of them.
    total: usize,
    flows: Vec<FlowLine>,
}

impl FlowsReport {
    fn render(&self) -> String {
        let mut table = Table::new(&["from", "to", "flow", ">taken", ">bytes", ">kernel", ">bytes", "path"]);
        for f in &self.flows {
            let numbers = [f.taken, f.taken_bytes, f.passed, f.passed_bytes].map(|n| n.to_string());
            let [taken, taken_bytes, passed, passed_bytes] = &numbers;
            let flow = format!("{} {} > {}", f.protocol, f.source, f.destination);
            let path = f.path.unwrap_or("kernel");
            let why = f.why.map(|why| format!("{:>4}{why}: {}", "", report::meaning(why).unwrap_or_default()));
            table
                .row(&[
                    &f.input,
                    f.output.as_deref().unwrap_or("?"),
                    &flow,
                    taken,
                    taken_bytes,
                    passed,
                    passed_bytes,
                    path,
                ])
                .extend(why);
        }
        let shown =
            if self.flows.len() < self.total { format!(", {} of them shown", self.flows.len()) } else { String::new() };
        format!("{} flows with frames in {:.1} s{shown}\n\n{}", self.total, self.seconds, table.render(false))
    }
}

impl Flows {
    fn run(self) -> Result<Exit, Failure> {
        let place = self.space.enter()?;
        let links = links_of_attached(&place, self.interface.as_deref())?;
        let name = |index| links.iter().find(|l| l.index == index).map(|l| l.name.clone());
        if !self.json && self.seconds > Duration::from_secs(2) && std::io::stderr().is_terminal() {
            out::tell!(
                "tombolo: measuring for {:.1} s; Ctrl-C ends it early and shows the result so far",
                self.seconds.as_secs_f64()
            );
        }
        let (start, stop) = (Instant::now(), stop_flag()?);
        let tombolo_bypass::flows::Measured { flows: measured, detached } =
            tombolo_bypass::flows::measure(&place, self.seconds, || stop.load(Ordering::Relaxed))?;
        let mut flows = vec![];
        for f in measured.into_iter().filter(|f| f.passed > 0 || !self.passed) {
            let input = name(f.tuple.input).unwrap_or_else(|| "?".into());
            if self.interface.as_ref().is_some_and(|wanted| *wanted != input) {
                continue;
            }
            let (protocol, source, destination) = ends(&f.tuple);
            flows.push(FlowLine {
                input,
                output: name(f.output),
                protocol,
                source,
                destination,
                taken: f.taken,
                taken_bytes: f.taken_bytes,
                passed: f.passed,
                passed_bytes: f.passed_bytes,
                path: f.path,
                why: f.why.map(|why| why.0),
            });
        }
        let total = flows.len();
        flows.truncate(usize::try_from(self.top).unwrap_or(usize::MAX));
        let report = FlowsReport { schema: report::SCHEMA, seconds: start.elapsed().as_secs_f64(), total, flows };
        if self.json {
            out::json(&report)?;
        } else {
            out::print(&report.render())?;
        }
        Ok(end_of(detached))
    }
}

impl Trace {
    fn run(self) -> Result<Exit, Failure> {
        let place = self.space.enter()?;
        let links = links_of_attached(&place, self.interface.as_deref())?;
        let name = |index| links.iter().find(|l| l.index == index).map(|l| l.name.as_str());
        if !self.json && std::io::stderr().is_terminal() {
            out::tell!("tombolo: waiting for frames; Ctrl-C ends the trace and does not change the bypass");
        }
        let end = self.seconds.map(|s| Instant::now() + s);
        let start = monotonic_ns();
        let mut told = std::collections::HashMap::new();
        let mut lines = 0;
        let stop = stop_flag()?;
        let Traced { lost, detached } = tombolo_bypass::trace::trace(&place, |event: Option<Event>| {
            if stop.load(Ordering::Relaxed) || end.is_some_and(|end| Instant::now() >= end) {
                return Ok(ControlFlow::Break(()));
            }
            let Some(event) = event else { return Ok(ControlFlow::Continue(())) };
            let input = name(event.tuple.input).unwrap_or("?");
            if self.interface.as_deref().is_some_and(|wanted| wanted != input) {
                return Ok(ControlFlow::Continue(()));
            }
            let key = (
                event.tuple.source,
                event.tuple.destination,
                event.tuple.source_port,
                event.tuple.destination_port,
                event.tuple.protocol,
            );
            let same = told.insert(key, event.what.0) == Some(event.what.0);
            if same && !self.all {
                return Ok(ControlFlow::Continue(()));
            }
            self.print(&event, input, name(event.output), start)?;
            lines += 1;
            Ok::<_, Failure>(if self.count == Some(lines) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        if self.json {
            writeln!(std::io::stdout(), "{}", serde_json::json!({ "lost": lost }))?;
        } else if lost > 0 {
            out::tell!("tombolo: {lost} more events, of all interfaces, came faster than they could be printed");
        }
        Ok(end_of(detached))
    }

    fn print(&self, event: &Event, input: &str, output: Option<&str>, start: u64) -> Result<(), Failure> {
        let t = &event.tuple;
        let (protocol, source, destination) = ends(t);
        let (path, why) = event.what;
        let mut out = std::io::stdout().lock();
        if self.json {
            let line = Line {
                at_ns: event.at_ns,
                input,
                output,
                protocol: t.protocol,
                source,
                destination,
                length: event.length,
                path,
                why,
            };
            let text = serde_json::to_string(&line).map_err(|e| Failure::failed(e.to_string()))?;
            writeln!(out, "{text}")?;
        } else {
            let seconds = event.at_ns.saturating_sub(start) as f64 / 1e9;
            let taken = VERDICTS[..TAKEN].iter().any(|v| v.0 == path);
            let arrow = output.map_or(String::new(), |o| format!(" -> {o}"));
            let mark = if taken { "=>" } else { "  " };
            writeln!(
                out,
                "{seconds:11.6} {mark} {input}{arrow} {protocol} {source} > {destination} {} B: {path}: {why}",
                event.length
            )?;
        }
        out.flush()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Whole {
        #[command(subcommand)]
        bypass: Bypass,
    }

    #[test]
    fn attach_wants_an_interface_and_a_known_mode() {
        let parse = |line: &str| Whole::try_parse_from(line.split(' ')).map(|w| w.bypass).map_err(|e| e.exit_code());
        assert!(
            matches!(parse("x attach tap0 eth0 --mode tcx"), Ok(Bypass::Attach(a)) if a.interfaces == ["tap0", "eth0"] && a.mode == ModeArg::Tcx)
        );
        assert_eq!(parse("x attach").map(drop), Err(2));
        assert_eq!(parse("x attach tap0 --mode fast").map(drop), Err(2));
    }

    #[test]
    fn an_empty_namespace_says_so() {
        let report = Report { schema: 1, ..Report::default() };
        assert!(render(&report).contains("nothing is attached"));
        assert!(
            metrics::render_bypass("lab", &as_of_a_network(report)).contains("tombolo_bypass_up{network=\"lab\"} 0\n")
        );
    }

    #[test]
    fn warnings_stand_behind_the_table() {
        let mut report = Report { attached: true, rules_fault: Some("rules changed".into()), ..Report::default() };
        report.warnings = tombolo_bypass::warnings::of(&report);
        let text = render(&report);
        let (controller, rules) =
            (text.find("\nno controller runs: no new TCP"), text.find("\nrules changed: until then no flow"));
        assert!(controller.is_some() && controller < rules, "{text}");
    }

    #[test]
    fn metrics_say_that_nothing_is_taken_where_the_controller_that_is_needed_is_gone() {
        let up = |needs_keeper, keeper| {
            let report = Report { schema: 1, attached: true, needs_keeper, keeper, ..Report::default() };
            metrics::render_bypass("", &as_of_a_network(report)).contains("tombolo_bypass_up{network=\"\"} 1\n")
        };
        assert!(up(true, Some(7)) && up(false, None) && up(false, Some(7)));
        assert!(!up(true, None));
        let fault = Some("the controller is stopped".to_owned());
        let report = Report { attached: true, keeper: Some(7), keeper_fault: fault, ..Report::default() };
        assert!(metrics::render_bypass("", &as_of_a_network(report)).contains("tombolo_bypass_up{network=\"\"} 0\n"));
    }
}
