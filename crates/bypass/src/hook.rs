//! The tc hooks of an interface: its ingress and its egress, by tcx or behind a clsact qdisc.
//!
//! Since Linux 6.6 programs have a list of their own there (tcx). Each is attached by a link, which
//! is pinned. Older kernels have filters behind a clsact qdisc. A filter holds its program by
//! itself and needs no pin. It is recognised by its program's number, as a tcx program is. Filters
//! run by priority, lowest first. Ours gets a priority behind all existing filters, so these
//! already see every frame, as with tcx. If a hook has both kinds, tcx programs run first.
//!
//! The qdisc goes with our last filter if it was made for it (a pin `qdisc_INDEX` says so) and it
//! has no other filters.

use crate::netlink::{Filter, NetlinkError, Routes, TC_EGRESS, TC_INGRESS};
use crate::object::{self, chain};
use crate::place::Place;
use aya::programs::links::FdLink;
use aya::programs::tc::{NlOptions, TcAttachOptions, TcHandle, qdisc_add_clsact};
use aya::programs::{LinkOrder, ProgramInfo, SchedClassifier, TcAttachType};
use std::sync::OnceLock;

/// The priority that the kernel gives a first filter by itself, and gives later ones lower numbers:
/// those run before ours.
const FIRST_PRIORITY: u16 = 0xc000;

/// Whether this kernel has tcx.
pub(crate) fn has_tcx() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| !object::is_as_old() && query_tcx("lo", TcAttachType::Ingress).is_some())
}

/// Numbers of the tcx programs at an interface's hook, in the order in which they run; nothing
/// where the kernel cannot be asked.
pub(crate) fn query_tcx(interface: &str, hook: TcAttachType) -> Option<Vec<u32>> {
    let programs = SchedClassifier::query_tcx(interface, hook).ok()?.1;
    Some(programs.iter().map(ProgramInfo::id).collect())
}

fn parent(hook: TcAttachType) -> u32 {
    if matches!(hook, TcAttachType::Egress) { TC_EGRESS } else { TC_INGRESS }
}

/// What of others runs before and behind a program at a hook.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Neighbours {
    pub(crate) before: bool,
    pub(crate) behind: bool,
}

/// Of tcx programs and filters, in the order in which they run. Where ours is none of them filters
/// count as behind it, as they would be with tcx.
fn neighbours(tcx: &[u32], filters: &[Filter], ours: u32) -> Neighbours {
    if let Some(at) = tcx.iter().position(|id| *id == ours) {
        return Neighbours { before: at > 0, behind: at + 1 < tcx.len() || !filters.is_empty() };
    }
    let Some(own) = filters.iter().find(|f| f.program == Some(ours)).map(|f| f.priority) else {
        return Neighbours { before: !tcx.is_empty(), behind: !filters.is_empty() };
    };
    // The kernel also reports a priority by itself, without a program. Such a report with our
    // priority is ours alone unless another filter is there.
    let others = || filters.iter().filter(|f| f.program != Some(ours) && !(f.priority == own && f.handle == 0));
    Neighbours {
        before: !tcx.is_empty() || others().any(|f| f.priority < own),
        behind: others().any(|f| f.priority >= own),
    }
}

/// What of others runs before and behind ours at an interface's hook.
pub(crate) fn others_at(
    routes: &Routes,
    interface: &str,
    index: u32,
    hook: TcAttachType,
    ours: u32,
) -> Result<Neighbours, NetlinkError> {
    Ok(neighbours(&query_tcx(interface, hook).unwrap_or_default(), &routes.filters(index, parent(hook))?, ours))
}

/// Whether a hook has a program as a filter. If the kernel cannot be asked, the answer is not "no".
pub(crate) fn is_filter(index: u32, hook: TcAttachType, ours: u32) -> bool {
    let filters = Routes::open().and_then(|routes| routes.filters(index, parent(hook)));
    filters.map_or(true, |filters| filters.iter().any(|f| f.program == Some(ours)))
}

/// Names of others' programs that a program put at the ingress now runs after.
pub(crate) fn names_before(routes: &Routes, interface: &str, index: u32) -> Vec<String> {
    let programs = SchedClassifier::query_tcx(interface, TcAttachType::Ingress).map(|q| q.1).unwrap_or_default();
    let mut names: Vec<_> = programs.iter().map(|p| p.name_as_str().unwrap_or("unnamed").to_owned()).collect();
    if !has_tcx() {
        let filters = routes.filters(index, TC_INGRESS).unwrap_or_default();
        names.extend(filters.into_iter().filter(|f| f.handle != 0).map(|f| f.name));
        // Some kinds are told of in several parts.
        names.dedup();
    }
    names
}

/// Puts a program at the end of the line at an interface's hook.
pub(crate) fn attach(
    place: &Place,
    program: &mut SchedClassifier,
    (interface, index): (&str, u32),
    (name, hook): (&str, TcAttachType),
) -> Result<(), String> {
    if has_tcx() {
        let options = TcAttachOptions::TcxOrder(LinkOrder::last());
        let id = program.attach_with_options(interface, hook, options).map_err(|e| chain(&e))?;
        let link = program.take_link(id).map_err(|e| chain(&e))?;
        let link = FdLink::try_from(link).map_err(|e| chain(&e))?;
        link.pin(place.pin(&format!("link_{name}_{index}"))).map_err(|e| chain(&e))?;
        return Ok(());
    }
    let routes = Routes::open().map_err(|e| chain(&e))?;
    let (mark, is_marked) = (place.pin(&format!("qdisc_{index}")), is_made(place, index));
    if !is_marked {
        // Marked before it is there: if this is killed in between, an empty qdisc of another's may
        // go with our filters later.
        program.pin(&mark).map_err(|e| chain(&e))?;
        if qdisc_add_clsact(interface).is_err() {
            // It is there already, or there can be none, which the next call says.
            let _ = std::fs::remove_file(&mark);
        }
    }
    let filters = routes.filters(index, parent(hook)).map_err(|e| chain(&e))?;
    let last = filters.iter().map(|f| f.priority).max();
    let priority = match last {
        Some(u16::MAX) => return Err("a filter has the last priority, 65535, and ours is to run behind it".into()),
        last => last.map_or(FIRST_PRIORITY, |last| FIRST_PRIORITY.max(last + 1)),
    };
    let options = NlOptions { priority, handle: TcHandle::new(0, 1), classid: None };
    let id = program
        .attach_with_options(interface, hook, TcAttachOptions::Netlink(options))
        .map_err(|e| format!("tc filter: {}", chain(&e)))?;
    // The filter must outlive this process, and dropping its handle would remove it.
    std::mem::forget(program.take_link(id).map_err(|e| chain(&e))?);
    Ok(())
}

/// Whether the qdisc was made for our filters.
fn is_made(place: &Place, index: u32) -> bool {
    place.pin(&format!("qdisc_{index}")).exists()
}

/// Removes the filters of these programs (ingress, egress) from an interface, and the qdisc that
/// was made for them. Of an interface that is gone everything is gone.
pub(crate) fn remove_filters(place: &Place, index: u32, programs: [u32; 2]) {
    let Ok(routes) = Routes::open() else { return };
    let mut is_empty = true;
    for parent in [TC_INGRESS, TC_EGRESS] {
        let filters = routes.filters(index, parent).unwrap_or_default();
        let (own, others): (Vec<_>, Vec<_>) =
            filters.into_iter().partition(|f| f.program.is_some_and(|id| programs.contains(&id)));
        for filter in &own {
            let _ = routes.remove_filter(index, parent, filter);
        }
        // The kernel tells of each of our priorities by itself too.
        is_empty &= !others.iter().any(|f| f.handle != 0 || !own.iter().any(|o| o.priority == f.priority));
    }
    if is_made(place, index) {
        if is_empty {
            let _ = routes.remove_clsact(index);
        }
        let _ = std::fs::remove_file(place.pin(&format!("qdisc_{index}")));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(priority: u16, program: Option<u32>) -> Filter {
        Filter {
            priority,
            handle: u32::from(program.is_some()),
            protocol: 0,
            kind: "bpf".into(),
            name: String::new(),
            program,
        }
    }

    #[test]
    fn what_runs_before_and_behind_ours_is_told_by_place() {
        let is = |before, behind| Neighbours { before, behind };
        let line = |tcx: &[u32], filters: &[Filter]| neighbours(tcx, filters, 7);
        assert_eq!(line(&[7], &[]), is(false, false));
        assert_eq!((line(&[1, 7], &[]), line(&[7, 1], &[])), (is(true, false), is(false, true)));
        assert_eq!(line(&[7], &[filter(1, None)]), is(false, true));
        let ours = [filter(0xc000, None), filter(0xc000, Some(7))];
        assert_eq!(line(&[], &ours), is(false, false));
        assert_eq!(line(&[1], &ours), is(true, false));
        let with = |other: Filter| [&ours[..], &[other]].concat();
        assert_eq!(line(&[], &with(filter(3, Some(1)))), is(true, false));
        assert_eq!(line(&[], &with(filter(3, None))), is(true, false));
        assert_eq!(line(&[], &with(filter(0xc001, None))), is(false, true));
        assert_eq!(line(&[], &with(filter(0xc000, Some(1)))), is(false, true));
        // Not there yet.
        assert_eq!((line(&[1], &[]), line(&[], &[filter(3, None)])), (is(true, false), is(false, true)));
    }
}
