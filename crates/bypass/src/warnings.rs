//! What a user should act on, from what `status` knows: one list, made by one function.

use crate::chooser::Why;
use crate::place::Wanted;
use crate::report::{InterfaceReport, Report};
use serde::Serialize;

/// Something that does not work as it could.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Warning {
    /// What it is about, for programs: "keeper", "rules_unread", "judging_rules", "judging_rule",
    /// "interface", "leases", "windows", "lenient", "flows", "trace", "kernel".
    pub kind: &'static str,
    /// What is so, and what follows.
    pub what: String,
    /// What to do about it; empty where nothing can be done on this machine as it is.
    pub advice: &'static str,
}

impl std::fmt::Display for Warning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.advice {
            "" => f.write_str(&self.what),
            advice => write!(f, "{}; {advice}", self.what),
        }
    }
}

/// Most rules that are named.
pub const MOST_NAMED: usize = 20;
/// A table of flows counts as nearly full from this share of its entries on, in hundredths.
const NEARLY_FULL: usize = 90;
/// What a counter says is acted on while it was counted within this time: counters never fall, and
/// what they tell of may be over.
const RECENT_MS: u64 = 60_000;
/// If at least this many frames wait for liberal windows, and more than were taken, nothing grants
/// them.
const MANY_WAITING: u64 = 1000;

/// All warnings of a report, the gravest first.
pub fn of(report: &Report) -> Vec<Warning> {
    if !report.attached {
        return vec![];
    }
    let mut all = vec![];
    all.extend(controller(report));
    if let Some(fault) = &report.rules_fault {
        all.push(Warning {
            kind: "rules_unread",
            what: format!("{fault}: until then no flow is learned"),
            advice: "the controller or `tombolo bypass attach` reads them",
        });
    }
    all.extend(report.interfaces.iter().filter_map(interface));
    all.extend(judging_rules(report));
    all.extend(report.interfaces.iter().filter_map(windows));
    all.extend(report.interfaces.iter().filter_map(leases));
    all.extend(lenient(report));
    all.extend(flows(report));
    if report.trace_lost > 0 {
        all.push(Warning {
            kind: "trace",
            what: format!("traces lost {} events since the first attach", report.trace_lost),
            advice: "`tombolo bypass flows` counts every frame, and `capture` writes those of one flow",
        });
    }
    let limit = |limit: &&'static str| Warning { kind: "kernel", what: format!("this kernel: {limit}"), advice: "" };
    all.extend(report.limits.iter().map(limit));
    all
}

fn controller(report: &Report) -> Option<Warning> {
    let advice = match report.keeper {
        Some(_) => "`tombolo bypass attach` replaces it",
        None => "`tombolo bypass attach` starts one",
    };
    let what = match (&report.keeper_fault, report.keeper, report.needs_keeper) {
        (Some(fault), ..) => {
            let all = if report.needs_keeper { ", and all traffic takes the kernel's path" } else { "" };
            format!("{fault}: no changes of mode, no new TCP connections through connection tracking{all}")
        }
        (None, Some(_), _) => return None,
        (None, None, false) => {
            "no controller runs: no new TCP connections through connection tracking, no changes of mode".into()
        }
        (None, None, true) => {
            "no controller runs, so all traffic takes the kernel's path, within three seconds of its \
            end, as --if-controller-dies leave says"
                .into()
        }
    };
    Some(Warning { kind: "keeper", what, advice })
}

/// An interface of which nothing is taken, or which has not the mode that was asked for.
fn interface(i: &InterfaceReport) -> Option<Warning> {
    let name = &i.name;
    let (what, advice) = if !i.takes {
        let why = "filters or programs were added behind ours at its ingress, which would not see what is taken";
        (format!("{name}: nothing is taken: {why}"), "remove them, or attach with --past-filters if they need not")
    } else if let Some(above) = &i.port_of {
        (
            format!("{name}: it is a port of {above}, and the bypass takes nothing at ports of a bridge, bond or VRF"),
            "attach the bridge or bond itself",
        )
    } else if i.captured && i.wanted != Wanted::Tcx {
        (
            format!("{name}: a process captures on it, so XDP takes nothing there"),
            "`tombolo bypass capture` leaves the interface in its mode",
        )
    } else if i.why == Why::Refused.text() {
        (format!("{name}: {}", i.why), "the controller's log has the kernel's message")
    } else if i.why == Why::Preceded.text() {
        (format!("{name}: {}", i.why), "")
    } else {
        return None;
    };
    Some(Warning { kind: "interface", what, advice })
}

fn judging_rules(report: &Report) -> Vec<Warning> {
    let total = report.judging_rules_total;
    if total == 0 {
        return vec![];
    }
    let skips = report.judging_rules_skipped;
    let kept = report.interfaces.iter().filter(|i| is_recent(i, "judged"));
    let kept: Vec<_> = kept.map(|i| format!("{} at {}", i.unlearned["judged"], i.name)).collect();
    let mut all = vec![];
    if !skips && !kept.is_empty() {
        all.push(Warning {
            kind: "judging_rules",
            what: format!(
                "{total} firewall rule(s) that judge each frame keep frames on the kernel's path, since attach: {}",
                kept.join(", ")
            ),
            advice: "have them match the interfaces, addresses or ports that they are for, put them behind `ct state \
                     established accept`, or attach with --judging-rules skip",
        });
    }
    let so = match skips {
        false => "flows that it could judge take the kernel's path",
        true => "it judges one frame per lease of taken flows, as --judging-rules skip says",
    };
    for rule in report.judging_rules.iter().take(MOST_NAMED) {
        let what = format!("rule that judges each frame: {rule}");
        all.push(Warning { kind: "judging_rule", what, advice: so });
    }
    let named = report.judging_rules.len().min(MOST_NAMED);
    if total > named {
        let what = format!("{} more such rules", total - named);
        all.push(Warning { kind: "judging_rule", what, advice: "" });
    }
    all
}

/// Whether frames were not learned from for this reason a short time ago.
fn is_recent(i: &InterfaceReport, reason: &str) -> bool {
    i.unlearned.contains_key(reason) && i.unlearned_ms_ago.get(reason).is_some_and(|ago| *ago < RECENT_MS)
}

/// TCP connections that conntrack would have to judge liberally, and does not.
fn windows(i: &InterfaceReport) -> Option<Warning> {
    let waiting = *i.unlearned.get("not_liberal")?;
    (waiting >= MANY_WAITING && waiting > i.taken && is_recent(i, "not_liberal")).then(|| Warning {
        kind: "windows",
        what: format!(
            "{}: {waiting} frames of TCP connections whose windows conntrack still checks take the kernel's path",
            i.name
        ),
        advice: "see that the controller runs and the module nf_conntrack_netlink is loaded",
    })
}

fn leases(i: &InterfaceReport) -> Option<Warning> {
    i.shortened_ms_ago.is_some_and(|ago| ago < RECENT_MS).then(|| Warning {
        kind: "leases",
        what: format!(
            "{}: {} leases were cut to half of a conntrack timeout, so that more frames take the kernel's path",
            i.name, i.shortened
        ),
        advice: "raise that timeout (net.netfilter.nf_conntrack_*_timeout*, or `ct timeout`) above twice the lease",
    })
}

/// A `detach` that was killed. A controller would have restored the setting.
fn lenient(report: &Report) -> Option<Warning> {
    (report.is_lenient && report.keeper.is_none()).then(|| Warning {
        kind: "lenient",
        what: "connection tracking checks no TCP windows in this namespace, since a detach was killed".into(),
        advice: "`tombolo bypass attach` and `detach` restore net.netfilter.nf_conntrack_tcp_be_liberal",
    })
}

fn flows(report: &Report) -> Option<Warning> {
    let (entries, limit) = (report.flow_entries, report.flow_limit);
    (limit > 0 && entries * 100 >= limit * NEARLY_FULL).then(|| Warning {
        kind: "flows",
        what: format!(
            "a table of flows has {entries} of {limit} entries: flows fall out of it before their leases end"
        ),
        advice: "attach fewer interfaces with many short flows; those that fall out take the kernel's path",
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Mode;
    use crate::rules::JudgingRule;
    use std::collections::BTreeMap;

    fn report() -> Report {
        let interface = InterfaceReport {
            name: "ta".into(),
            index: 3,
            wanted: Wanted::Auto,
            mode: Mode::Tcx,
            why: Why::Light.text(),
            for_ms: 0,
            peer: false,
            captured: false,
            port_of: None,
            takes: true,
            flows: 0,
            taken: 10,
            taken_bytes: 0,
            taken_large: 0,
            passed: 0,
            by_reason: BTreeMap::new(),
            learned: 0,
            shortened: 0,
            shortened_ms_ago: None,
            unlearned: BTreeMap::new(),
            unlearned_ms_ago: BTreeMap::new(),
        };
        Report { attached: true, keeper: Some(7), interfaces: vec![interface], flow_limit: 100, ..Report::default() }
    }

    /// So many frames were not learned from for this reason, the last of them so long ago.
    fn unlearned(r: &mut Report, reason: &'static str, frames: u64, ms_ago: u64) {
        r.interfaces[0].unlearned.insert(reason, frames);
        r.interfaces[0].unlearned_ms_ago.insert(reason, ms_ago);
    }

    /// The kind and text of the warnings of a report that is changed like this.
    fn told(change: impl FnOnce(&mut Report)) -> Vec<(&'static str, String)> {
        let mut report = report();
        change(&mut report);
        of(&report).into_iter().map(|w| (w.kind, w.to_string())).collect()
    }

    #[test]
    fn nothing_is_said_where_all_is_well_or_nothing_is_attached() {
        assert_eq!(told(|_| {}), []);
        assert_eq!(told(|r| (r.attached, r.keeper) = (false, None)), []);
    }

    #[test]
    fn each_state_that_a_user_should_act_on_is_named_once() {
        let is = |change: &dyn Fn(&mut Report), kind, text: &str| {
            let told = told(change);
            assert!(told.len() == 1 && told[0].0 == kind && told[0].1.contains(text), "{kind}: {told:?}");
        };
        is(&|r| r.keeper = None, "keeper", "no controller runs: no new TCP");
        is(&|r| (r.keeper, r.needs_keeper) = (None, true), "keeper", "all traffic takes the kernel's path");
        is(&|r| r.keeper_fault = Some("the controller is stopped".into()), "keeper", "stopped: no changes of mode");
        is(&|r| r.rules_fault = Some("rules changed".into()), "rules_unread", "until then no flow is learned");
        is(&|r| r.interfaces[0].takes = false, "interface", "ta: nothing is taken");
        is(&|r| r.interfaces[0].captured = true, "interface", "ta: a process captures");
        is(&|r| r.interfaces[0].why = Why::Refused.text(), "interface", "ta: XDP could not be attached");
        is(&|r| r.interfaces[0].why = Why::Preceded.text(), "interface", "ta: tcx programs of others");
        is(
            &|r| (r.interfaces[0].shortened, r.interfaces[0].shortened_ms_ago) = (3, Some(RECENT_MS - 1)),
            "leases",
            "ta: 3 leases were cut",
        );
        is(&|r| r.interfaces[0].port_of = Some("br0".into()), "interface", "ta: it is a port of br0");
        let left = "checks no TCP windows in this namespace";
        assert!(
            told(|r| (r.is_lenient, r.keeper) = (true, None)).iter().any(|w| w.0 == "lenient" && w.1.contains(left))
        );
        assert_eq!(told(|r| r.is_lenient = true), []);
        is(&|r| r.flow_entries = 90, "flows", "90 of 100 entries");
        is(&|r| r.trace_lost = 5, "trace", "lost 5 events");
        is(&|r| r.limits = vec!["no tcx"], "kernel", "this kernel: no tcx");
        is(&|r| unlearned(r, "not_liberal", 1000, 5), "windows", "1000 frames of TCP");
        assert_eq!(told(|r| unlearned(r, "not_liberal", 999, 5)), []);
        assert_eq!(told(|r| r.flow_entries = 89), []);
        // What is over.
        assert_eq!(told(|r| unlearned(r, "not_liberal", 1000, RECENT_MS)), []);
        assert_eq!(told(|r| (r.interfaces[0].shortened, r.interfaces[0].shortened_ms_ago) = (3, Some(RECENT_MS))), []);
        assert_eq!(told(|r| (r.interfaces[0].captured, r.interfaces[0].wanted) = (true, Wanted::Tcx)), []);
    }

    #[test]
    fn rules_that_judge_are_named_up_to_a_limit_with_the_frames_that_they_keep() {
        let rule =
            JudgingRule { family: "ip".into(), table: "f".into(), chain: "c".into(), handle: 7, why: "limit".into() };
        let set = |r: &mut Report| (r.judging_rules, r.judging_rules_total) = (vec![rule.clone(); 50], 60);
        let all = told(set);
        assert_eq!(all.len(), MOST_NAMED + 1);
        assert_eq!(
            all[0].1,
            "rule that judges each frame: ip f c handle 7: limit; flows that it could judge take the kernel's path"
        );
        assert_eq!(all[MOST_NAMED].1, "40 more such rules");
        let all = told(|r| {
            set(r);
            unlearned(r, "judged", 12, 1000);
        });
        assert!(all[0].1.starts_with("60 firewall rule(s)") && all[0].1.contains("12 at ta"), "{all:?}");
        let all = told(|r| {
            set(r);
            r.judging_rules_skipped = true;
            unlearned(r, "judged", 12, 1000);
        });
        assert!(
            all[0].1.contains("judges one frame per lease of taken flows, as --judging-rules skip says"),
            "{all:?}"
        );
    }
}
