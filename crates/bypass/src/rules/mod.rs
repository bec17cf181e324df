//! Firewall rules that judge each frame: which they are, and how flows that they could judge stay
//! on the kernel's path.
//!
//! The bypass repeats for a flow what the kernel did with one of its frames. A rule like `limit`,
//! `log`, `dup` or a match on the payload may treat the next frame differently. So the ruleset of
//! nftables is read over netlink (`source`, `ruleset`), and walked for each kind of flow that may
//! be taken (`world`, `walk`). There are two results: the rules that judge each frame, for people,
//! and filters of the flows that these rules could judge (`filter`), which are written into a map.
//! The egress program does not learn a flow that a filter matches (ebpf/judges.h).
//!
//! # When it is read
//! It is read at `attach`, and by the controller whenever the ruleset's generation changes or an
//! interface gets another name. The map holds the generation that it was made for. Under another
//! generation no flow is learned, from Linux 6.17 on, where programs can read the generation. So no
//! flow is learned before a new rule was read. The controller reads on a thread of its own and
//! without the place's lock, since a large ruleset takes seconds. Known flows expire by themselves,
//! since they hold under one generation only. Without a controller no flow is learned until the
//! next `attach`; `status` says so. Before Linux 6.17 flows are learned under a ruleset that has
//! not been read yet, for as long as the controller needs to read it. They are then learned again.
//!
//! # What it does not see
//! Rules of legacy iptables, and BPF programs at netfilter's hooks. Of sets only the elements that
//! matter are read: verdicts, and those that a rule was written with. If an element times out, or
//! is added by a rule, this is a change of the ruleset that is seen after the lease.

mod compare;
mod filter;
mod ruleset;
mod source;
mod value;
mod walk;
mod world;
mod xt;

pub use filter::JUDGES_BYTES;
pub use source::RulesMonitor;

use crate::attachment::AttachError;
use crate::maps::Maps;
use crate::netlink::NetlinkError;
use crate::place::Place;
use filter::{Filters, RulesState, header};
use rustix::net::{AddressFamily, SocketType, netdevice::index_to_name, socket};
use serde::{Deserialize, Serialize};
use source::Nftables;
use world::Port;

/// A rule that may treat frames of one flow differently.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JudgingRule {
    /// "ip", "ip6", "inet" or "netdev"; empty where the ruleset as a whole could not be understood.
    pub family: String,
    /// As `nft list ruleset` names it.
    pub table: String,
    /// As `nft list ruleset` names it.
    pub chain: String,
    /// The rule's handle, as `nft -a list ruleset` shows it.
    pub handle: u64,
    /// What of it judges: an expression, or what it matches.
    pub why: String,
}

impl std::fmt::Display for JudgingRule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let JudgingRule { family, table, chain, handle, why } = self;
        match family.as_str() {
            "" => write!(f, "{why}"),
            _ => write!(f, "{family} {table} {chain} handle {handle}: {why}"),
        }
    }
}

/// The attached interfaces, by the names that they have now. Nothing here waits for the kernel's
/// lock of interfaces.
fn ports(maps: &Maps) -> Result<Vec<Port>, AttachError> {
    let wrong = |cause| NetlinkError::Call { what: "socket", cause };
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None).map_err(wrong)?;
    let ports = maps.ports()?.into_iter();
    let named = ports.filter_map(|(index, port)| {
        // One that goes in this moment has no traffic.
        let name = index_to_name(&any, index).ok()?;
        Some(Port { slot: port.slot, index, name })
    });
    Ok(named.collect())
}

/// Most rules whose names are kept: a ruleset can have a hundred thousand.
const MOST_KEPT: usize = 100;

/// The rules that judge each frame: the first of them, and how many there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Judging {
    pub rules: Vec<JudgingRule>,
    pub total: usize,
}

/// The ruleset as it was read for the interfaces that were attached then. Beside the pins there is
/// a copy of it without the map's contents, so that `status` need not read the ruleset again.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Reading {
    generation: u32,
    ports: Vec<Port>,
    judging: Judging,
    #[serde(skip)]
    filters: Vec<u8>,
}

/// Reads the ruleset. That takes time where it is large: the place's lock need not be held.
pub(crate) fn read(maps: &Maps) -> Result<Reading, AttachError> {
    let ports = ports(maps)?;
    let (ruleset, generation) = Nftables::open()?.read()?;
    let (mut rules, filters) = walk::survey(&ruleset, &ports);
    let total = rules.len();
    rules.truncate(MOST_KEPT);
    let filters = filters.to_bytes(RulesState::Read, generation).to_vec();
    Ok(Reading { generation, ports, judging: Judging { rules, total }, filters })
}

/// Whether the ruleset and the interfaces are those that it was read for.
fn is_true(reading: &Reading, maps: &Maps) -> Result<bool, AttachError> {
    Ok(reading.generation == Nftables::open()?.generation()? && reading.ports == ports(maps)?)
}

/// The rules that judge each frame of flows between attached interfaces, as they are now: as they
/// were read last, or else, if they are to be read for that, as they are read now. Nothing where
/// they are not known.
pub(crate) fn judging(place: &Place, maps: &Maps, reads: bool) -> Result<Option<Judging>, AttachError> {
    match place.rules().filter(|known| is_true(known, maps).unwrap_or(false)) {
        Some(known) => Ok(Some(known.judging)),
        None if reads => Ok(Some(read(maps)?.judging)),
        None => Ok(None),
    }
}

/// Whether the map is that of the ruleset as it is now, or the ruleset does not matter.
pub(crate) fn is_current(maps: &Maps) -> Result<bool, AttachError> {
    Ok(match header(&maps.judges()?) {
        (RulesState::Skipped, _) => true,
        (RulesState::Read, generation) => generation == Nftables::open()?.generation()?,
        (RulesState::Unread, _) => false,
    })
}

/// Whether the map is that of the ruleset and the interfaces as they are now, so that there is
/// nothing to read.
pub(crate) fn is_read(place: &Place, maps: &Maps) -> Result<bool, AttachError> {
    let is_state = matches!(header(&maps.judges()?), (RulesState::Read, _)) && is_current(maps)?;
    Ok(is_state && place.rules().is_some_and(|known| is_true(&known, maps).unwrap_or(false)))
}

/// From here on nothing is learned until `refresh`: interfaces are about to change.
pub(crate) fn suspend(maps: &mut Maps) -> Result<(), AttachError> {
    Ok(maps.set_judges(&Filters::default().to_bytes(RulesState::Unread, 0))?)
}

/// Writes what was read, if it is still true, and returns whether it is. Flows that were learned
/// before are then learned again. The caller holds the place's lock.
pub(crate) fn write(place: &Place, maps: &mut Maps, reading: &Reading) -> Result<bool, AttachError> {
    if !is_true(reading, maps)? {
        return Ok(false);
    }
    // What it is for is only seen: without it `status` reads the ruleset itself.
    let _ = place.set_rules(Some(reading));
    let bytes = reading.filters.as_slice().try_into().expect("as long as the map's");
    set(maps, bytes)?;
    Ok(true)
}

fn set(maps: &mut Maps, bytes: &[u8; JUDGES_BYTES]) -> Result<(), AttachError> {
    if maps.judges()? != *bytes {
        maps.set_judges(bytes)?;
        // In this order: a flow that was judged by the filters before has an epoch from before.
        maps.forget_flows()?;
    }
    Ok(())
}

/// From here on rules do not matter. The caller holds the place's lock.
pub(crate) fn skip(place: &Place, maps: &mut Maps) -> Result<(), AttachError> {
    let _ = place.set_rules(None);
    set(maps, &Filters::default().to_bytes(RulesState::Skipped, 0))
}

/// Reads the ruleset, and writes the map if the ruleset has changed. The caller holds the place's
/// lock, or no other process knows of the place yet.
pub(crate) fn refresh(place: &Place, maps: &mut Maps, skips: bool) -> Result<(), AttachError> {
    if skips {
        return skip(place, maps);
    }
    let reading = read(maps)?;
    // Where it is true no more the controller reads it again.
    write(place, maps, &reading).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_named_as_nft_names_it() {
        let rule = JudgingRule {
            family: "inet".into(),
            table: "filter".into(),
            chain: "forward".into(),
            handle: 12,
            why: "limit".into(),
        };
        assert_eq!(rule.to_string(), "inet filter forward handle 12: limit");
        let whole = JudgingRule { why: "too large".into(), ..JudgingRule::default() };
        assert_eq!(whole.to_string(), "too large");
    }
}
