//! What `status` shows.

use crate::attachment::{AttachError, Ours, is_alive, monotonic_ns};
use crate::controller;
use crate::layout::{MAX_FLOWS, Mode, PORT_CAPTURED, PORT_PEER, PORT_TAKE, TAKEN, UNLEARNED, VERDICTS};
use crate::maps::{Lost, Maps};
use crate::netlink::{NetlinkError, Routes};
use crate::place::{Interface, Place, Wanted};
use crate::probe;
use crate::rules::{self, JudgingRule};
use crate::warnings::{self, Warning};
use serde::Serialize;
use std::collections::BTreeMap;

/// The number of the form of this report.
pub const SCHEMA: u32 = 1;

/// The bypass of one network namespace.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The form of this report.
    pub schema: u32,
    /// Whether anything is attached here.
    pub attached: bool,
    /// The controller's process, if it runs. Without it nothing is lost but changes of mode, TCP
    /// connections that are opened from now on through connection tracking, and quickness in seeing
    /// a neighbour change.
    pub keeper: Option<u32>,
    /// What is wrong with it, where it runs and does not work: stopped, or it hangs.
    pub keeper_fault: Option<String>,
    /// Whether all traffic goes the kernel's way while none runs.
    pub needs_keeper: bool,
    /// How long a flow holds before one frame goes the kernel's way again, in milliseconds.
    pub lease_ms: u64,
    /// Flows that hold now.
    pub flows: usize,
    /// Entries of the fuller one of both families' tables of flows, and how many each has room for;
    /// 0 where flows are not counted (`Detail`).
    pub flow_entries: usize,
    /// See `flow_entries`.
    pub flow_limit: usize,
    /// Firewall rules that judge each frame of flows between the attached interfaces, the first
    /// hundred.
    pub judging_rules: Vec<JudgingRule>,
    /// Length of the whole list, of which `judging_rules` shows the first hundred.
    pub judging_rules_total: usize,
    /// Whether flows are taken although these rules then judge one frame per lease. Otherwise flows
    /// that they could judge take the kernel's path.
    pub judging_rules_skipped: bool,
    /// Why nothing is learned until the ruleset was read, where that is so.
    pub rules_fault: Option<String>,
    /// Whether connection tracking checks no TCP windows in this namespace because of a `detach`
    /// that runs now, or was killed.
    pub is_lenient: bool,
    /// Events that traces lost since all was attached.
    pub trace_lost: u64,
    /// Interfaces that are attached now and still have our programs.
    pub interfaces: Vec<InterfaceReport>,
    /// What this kernel lacks, and what follows.
    pub limits: Vec<&'static str>,
    /// What of all this a user should act on.
    pub warnings: Vec<Warning>,
}

/// State and counters of one attached interface.
#[derive(Clone, Debug, Serialize)]
pub struct InterfaceReport {
    /// As `ip link` shows it.
    pub name: String,
    /// The interface index in its namespace.
    pub index: u32,
    /// The mode that was asked for.
    pub wanted: Wanted,
    /// The mode in force now.
    pub mode: Mode,
    /// Why it has that mode.
    pub why: &'static str,
    /// For how long, in milliseconds.
    pub for_ms: u64,
    /// Whether frames go out here straight into the other end of the veth pair.
    pub peer: bool,
    /// Whether a packet socket listens.
    pub captured: bool,
    /// The bridge, bond or VRF that it is a port of; not looked for in a `Glance`.
    pub port_of: Option<String>,
    /// Whether frames that come in here may be taken; else others' filters or programs would miss
    /// them.
    pub takes: bool,
    /// Flows that come in here and hold now.
    pub flows: usize,
    /// Packets that came in here and skipped the kernel's forwarding.
    pub taken: u64,
    /// Bytes of the packets in `taken`.
    pub taken_bytes: u64,
    /// Segmentation frames among those taken.
    pub taken_large: u64,
    /// Packets that went the kernel's way.
    pub passed: u64,
    /// Packets by path and reason; those that never happened are left out.
    pub by_reason: BTreeMap<&'static str, u64>,
    /// Times that a flow was learned, renewals counted.
    pub learned: u64,
    /// Of those, how many got a shorter lease than `lease_ms`, because a conntrack timeout would
    /// have ended the connection.
    pub shortened: u64,
    /// How long ago that was last, in milliseconds.
    pub shortened_ms_ago: Option<u64>,
    /// Forwarded frames that nothing was learned from, by reason.
    pub unlearned: BTreeMap<&'static str, u64>,
    /// How long ago that was last, in milliseconds.
    pub unlearned_ms_ago: BTreeMap<&'static str, u64>,
}

fn named<const N: usize>(values: &[u64; N], names: &[(&'static str, &'static str); N]) -> BTreeMap<&'static str, u64> {
    values.iter().zip(names).filter(|(n, _)| **n > 0).map(|(n, name)| (name.0, *n)).collect()
}

/// How much a report is to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Flows are counted too, for which each of them is looked at.
    Flows,
    /// Counters only: for who asks again and again.
    Counters,
    /// Counters, and nothing for which the kernel locks its interfaces: for who must not wait.
    Glance,
}

/// An interface of a record that is here.
struct Present {
    /// By its name now.
    interface: Interface,
    port_of: Option<String>,
}

/// The interfaces of a record that are here and have our programs.
fn present(place: &Place, interfaces: Vec<Interface>, detail: Detail) -> Result<Vec<Present>, AttachError> {
    if detail == Detail::Glance {
        use rustix::net::{AddressFamily, SocketType, netdevice::index_to_name, socket};
        let wrong = |cause| NetlinkError::Call { what: "socket", cause };
        let any = socket(AddressFamily::INET, SocketType::DGRAM, None).map_err(wrong)?;
        let named = interfaces.into_iter().filter_map(|i| {
            let name = index_to_name(&any, i.index).ok()?;
            Some(Present { interface: Interface { name, ..i }, port_of: None })
        });
        return Ok(named.collect());
    }
    let (links, ours) = (Routes::open()?.links()?, Ours::of(place)?);
    let present = interfaces.into_iter().filter_map(|i| {
        let link = links.iter().find(|l| l.index == i.index).filter(|l| is_alive(place, l, ours))?;
        let port_of = links.iter().find(|l| Some(l.index) == link.master).map(|l| l.name.clone());
        Some(Present { interface: Interface { name: link.name.clone(), ..i }, port_of })
    });
    Ok(present.collect())
}

/// How long ago something happened, in ms; `None`: never.
fn ms_ago(now_ns: u64, at_ns: u64) -> Option<u64> {
    (at_ns > 0).then(|| now_ns.saturating_sub(at_ns) / 1_000_000)
}

/// The state of the bypass in the calling thread's namespace.
pub fn report(place: &Place, detail: Detail) -> Result<Report, AttachError> {
    match of_attached(place, detail) {
        // Detached while it was looked at.
        Err(_) if !place.exists() => Ok(Report { schema: SCHEMA, ..Report::default() }),
        result => result,
    }
}

fn of_attached(place: &Place, detail: Detail) -> Result<Report, AttachError> {
    let mut report = Report { schema: SCHEMA, attached: place.exists(), ..Report::default() };
    if !report.attached {
        return Ok(report);
    }
    let maps = Maps::open(place)?;
    let epoch = maps.epoch()?;
    let now = monotonic_ns();
    let flows = if detail == Detail::Flows { maps.flows()? } else { vec![] };
    if detail == Detail::Flows {
        let v4 = flows.iter().filter(|(t, _)| t.source.is_ipv4()).count();
        (report.flow_entries, report.flow_limit) = (v4.max(flows.len() - v4), MAX_FLOWS);
    }
    let flows: Vec<_> = flows.into_iter().filter(|(_, f)| f.until_ns > now && f.epoch == epoch).collect();
    let record = place.record()?;
    let interfaces = present(place, record.interfaces, detail)?;
    report.attached = !interfaces.is_empty();
    report.keeper = place.controller();
    report.keeper_fault = report.keeper.and_then(|pid| controller::fault(place, pid));
    report.needs_keeper = record.needs_keeper;
    report.is_lenient = record.is_lenient;
    report.judging_rules_skipped = record.skips_judging_rules;
    // Who asks for more often than a person does gets what was read last.
    match rules::judging(place, &maps, detail == Detail::Flows).and_then(|j| Ok((j, rules::is_current(&maps)?))) {
        Ok((judging, is_current)) => {
            let judging = judging.unwrap_or_default();
            (report.judging_rules, report.judging_rules_total) = (judging.rules, judging.total);
            report.rules_fault = (!is_current).then(|| "the firewall's rules changed and were not read yet".into());
        }
        Err(error) => report.rules_fault = Some(format!("the firewall's rules could not be read: {error}")),
    }
    report.trace_lost = Lost::open(place)?.read()?;
    report.lease_ms = maps.lease_ns()? / 1_000_000;
    report.flows = flows.len();
    report.limits = probe::limits_of(place);
    for Present { interface, port_of } in interfaces {
        // One that goes in this moment has no port any more.
        let Some(port) = maps.port(interface.index)? else { continue };
        let counters = maps.counters(port.slot)?;
        let flags = port.flags;
        report.interfaces.push(InterfaceReport {
            index: interface.index,
            wanted: interface.wanted,
            mode: port.mode,
            why: crate::chooser::why(port.why),
            for_ms: now.saturating_sub(port.since_ns) / 1_000_000,
            peer: flags & PORT_PEER != 0,
            captured: flags & PORT_CAPTURED != 0,
            port_of,
            takes: flags & PORT_TAKE != 0,
            flows: flows.iter().filter(|(t, _)| t.input == interface.index).count(),
            taken: counters.taken(),
            taken_bytes: counters.taken_bytes,
            taken_large: counters.taken_large,
            passed: counters.passed(),
            by_reason: named(&counters.packets, &VERDICTS),
            learned: counters.learned,
            shortened: counters.shortened,
            shortened_ms_ago: ms_ago(now, counters.shortened_ns),
            unlearned: named(&counters.unlearned, &UNLEARNED),
            unlearned_ms_ago: UNLEARNED
                .iter()
                .zip(counters.unlearned_ns)
                .filter_map(|(reason, at)| Some((reason.0, ms_ago(now, at)?)))
                .collect(),
            name: interface.name,
        });
    }
    report.warnings = warnings::of(&report);
    Ok(report)
}

/// What a key of `by_reason` or `unlearned` means.
pub fn meaning(key: &str) -> Option<&'static str> {
    VERDICTS.iter().chain(&UNLEARNED).find(|(name, _)| *name == key).map(|(_, meaning)| *meaning)
}

/// Whether a key of `by_reason` is of frames that were taken.
pub fn is_taken(key: &str) -> bool {
    VERDICTS[..TAKEN].iter().any(|(name, _)| *name == key)
}
