//! What `status` shows.

use crate::attachment::{AttachError, monotonic_ns};
use crate::layout::{Counters, Mode, PORT_CAPTURED, PORT_PEER, TAKEN, UNLEARNED, VERDICTS};
use crate::maps::Maps;
use crate::place::{Place, Wanted};
use serde::Serialize;
use std::collections::BTreeMap;

/// The number of the form of this report.
pub const SCHEMA: u32 = 1;

/// Why an interface that is remembered has its mode, where there is none of its number any more.
pub const GONE: &str = "the interface is gone; the keeper attaches one that is made anew under its name";

/// The bypass of one network namespace.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// The form of this report.
    pub schema: u32,
    /// Whether anything is attached here.
    pub attached: bool,
    /// The keeper's process, if it runs. Without it nothing is lost but changes of mode, TCP connections that are opened
    /// from now on through connection tracking, and quickness in seeing a neighbour change.
    pub keeper: Option<u32>,
    /// Whether all traffic goes the kernel's way while none runs.
    pub needs_keeper: bool,
    /// How long a flow holds before one frame goes the kernel's way again, in milliseconds.
    pub lease_ms: u64,
    /// Flows that hold now.
    pub flows: usize,
    /// The interfaces.
    pub interfaces: Vec<InterfaceReport>,
}

/// One interface.
#[derive(Clone, Debug, Serialize)]
pub struct InterfaceReport {
    /// Its name.
    pub name: String,
    /// Its number.
    pub index: u32,
    /// The mode that was asked for.
    pub wanted: Wanted,
    /// The mode that it has.
    pub mode: Mode,
    /// Why it has that mode.
    pub why: &'static str,
    /// For how long, in milliseconds.
    pub for_ms: u64,
    /// Whether frames go out here straight into the other end of the veth pair.
    pub peer: bool,
    /// Whether a packet socket listens.
    pub captured: bool,
    /// Flows that come in here and hold now.
    pub flows: usize,
    /// Packets taken.
    pub taken: u64,
    /// Bytes taken.
    pub taken_bytes: u64,
    /// Segmentation frames among those taken.
    pub taken_large: u64,
    /// Packets that went the kernel's way.
    pub passed: u64,
    /// Packets by path and reason; those that never happened are left out.
    pub by_reason: BTreeMap<&'static str, u64>,
    /// Times that a flow was learned, renewals counted.
    pub learned: u64,
    /// Forwarded frames that nothing was learned from, by reason.
    pub unlearned: BTreeMap<&'static str, u64>,
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
}

/// The state of the bypass in the calling thread's namespace.
pub fn report(place: &Place, detail: Detail) -> Result<Report, AttachError> {
    let mut report = Report { schema: SCHEMA, attached: place.exists(), ..Report::default() };
    if !report.attached {
        return Ok(report);
    }
    let maps = Maps::open(place)?;
    let settings = maps.settings()?;
    let now = monotonic_ns();
    let flows = if detail == Detail::Flows { maps.flows()? } else { vec![] };
    let flows: Vec<_> = flows.into_iter().filter(|(_, f)| f.until_ns > now && f.epoch == settings.epoch).collect();
    let record = place.record()?;
    report.keeper = place.keeper();
    report.needs_keeper = record.needs_keeper;
    report.lease_ms = settings.lease_ns / 1_000_000;
    report.flows = flows.len();
    for interface in record.interfaces {
        // One that went has no port any more.
        let port = maps.port(interface.index)?;
        let counters = port.map_or(Ok(Counters::default()), |p| maps.counters(p.slot))?;
        let flags = port.map_or(0, |p| p.flags);
        report.interfaces.push(InterfaceReport {
            index: interface.index,
            wanted: interface.wanted,
            mode: port.map_or(Mode::Tcx, |p| p.mode),
            why: port.map_or(GONE, |p| crate::chooser::why(p.why)),
            for_ms: port.map_or(0, |p| now.saturating_sub(p.since_ns) / 1_000_000),
            peer: flags & PORT_PEER != 0,
            captured: flags & PORT_CAPTURED != 0,
            flows: flows.iter().filter(|(t, _)| t.input == interface.index).count(),
            taken: counters.taken(),
            taken_bytes: counters.taken_bytes,
            taken_large: counters.taken_large,
            passed: counters.passed(),
            by_reason: named(&counters.packets, &VERDICTS),
            learned: counters.learned,
            unlearned: named(&counters.unlearned, &UNLEARNED),
            name: interface.name,
        });
    }
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
