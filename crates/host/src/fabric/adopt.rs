//! What an earlier daemon of the fabric left: machines that are kept, and processes, rules and
//! interfaces that go.

use super::ending::Ending;
use super::handover::{Commit, Prepared};
use super::{FabricError, Running};
use crate::blocking;
use crate::plan::Plan;
use crate::process;

/// The daemon that ran the fabric before this one.
#[derive(Default)]
pub(crate) struct Predecessor {
    /// It has put the final state of everything into the fd store, and this daemon takes it up.
    pub(super) hands_over: bool,
    /// It has given everything up: there is no way back to it.
    pub(super) has_handed_over: bool,
    /// It waits to be told that this daemon takes over.
    pub(super) commit: Option<Commit>,
    /// What was found out before it was asked.
    pub(super) prepared: Option<Prepared>,
    /// What was done with what it had left, a sentence each.
    pub(super) told: Vec<String>,
}

impl Running {
    /// Kills the helpers (passt) that an earlier daemon left, in any state.
    pub(super) async fn end_helpers(&mut self) {
        let Some(dir) = &self.dir else { return };
        let left = process::helpers(dir.path(), &dir.owner().helpers);
        if left.is_empty() {
            return;
        }
        let names: Vec<_> = left.iter().map(|(name, p)| (name.clone(), p.pid)).collect();
        let work = move || process::kill_all(&left.iter().map(|(_, process)| process).collect::<Vec<_>>());
        // The work does not panic.
        let there = blocking::spawn_or_run(work).await.unwrap_or_default();
        for (name, pid) in names {
            self.took_over(match there.contains(&pid) {
                false => format!("{name}: passt, process {pid}, was ended: its daemon had left it behind"),
                true => format!("{name}: passt, process {pid}, was killed and has not ended: the kernel holds it"),
            });
        }
        // Those that have ended need no record.
        self.dir().record(|o| o.helpers.retain(|h| there.contains(&h.pid)));
    }

    /// Why a machine that an earlier daemon left cannot be kept; `None` if it can.
    fn unfit(&self, plan: &Plan, machine: &str, process: &process::Process, words: &[String]) -> Option<String> {
        let Some(planned) = plan.machines.iter().find(|m| m.name == machine) else {
            return Some("it is not in the file any more".into());
        };
        match (&planned.domain, process::machine_of_xl(words, &self.facts.runtime)) {
            (Some(domain), Some(_)) => return self.unfit_domain(domain),
            (None, None) => {}
            _ => return Some("its section has changed: `attach`".into()),
        }
        let settled = self.dir.as_ref()?.owner().settled.iter().find(|s| {
            s.machine == machine && s.pid == process.pid && process::start_ticks(s.pid) == Some(s.started_ticks)
        });
        let Some(settled) = settled else {
            // A script may add arguments, and a descriptor's number replaces its name.
            let asked = planned.argv.iter().skip(1).filter(|w| !w.contains("/proc/self/fd/"));
            if asked.into_iter().any(|word| !words.contains(word)) {
                return Some(format!("its section has changed: {}", difference(words, &planned.argv)));
            }
            return Some(
                "its driver was not on the network when its daemon ended, so it could not connect again".into(),
            );
        };
        // What it was started with is in the record, not on its command line: a script may stand
        // between.
        if planned.argv != settled.argv {
            return Some(format!("its section has changed: {}", difference(&settled.argv, &planned.argv)));
        }
        if !planned.survives && !self.before.hands_over {
            return Some("its attachment cannot connect again under this QEMU".into());
        }
        self.lost_link(&planned.seats)
    }

    /// What becomes of the machines that an earlier daemon left: those that are kept, and those
    /// that are to be ended.
    pub(super) fn sort_recorded(&mut self, plan: &Plan) -> (Vec<(String, u32)>, Vec<Ending>) {
        let (name, runtime) = (self.spec.name.clone(), self.dir().path().to_path_buf());
        let (mut keep, mut end) = (Vec::new(), Vec::new());
        let known = self.before.prepared.take().map(|prepared| prepared.machines);
        for (machine, process, words) in known.unwrap_or_else(|| process::machines(&name, &runtime)) {
            if !process.is_running() {
                continue;
            }
            let pid = process.pid;
            let Some(why) = self.unfit(plan, &machine, &process, &words) else {
                self.took_over(format!("{machine}: kept, process {pid} runs on"));
                keep.push((machine, pid));
                continue;
            };
            let planned = plan.machines.iter().find(|m| m.name == machine);
            if planned.is_some_and(|p| self.lost_link(&p.seats).is_some()) {
                self.notes.push(format!("{machine} was restarted: {why}"));
            }
            let domain = self.domain_left(&words, &runtime);
            let ending = Ending::left(process, &words, &machine, &runtime, domain);
            let how = if ending.button.is_some() { ", by its power button first" } else { "" };
            let then = if planned.is_some() { "started again" } else { "ended" };
            self.took_over(format!("{machine}: {then}; process {pid} is ended{how}: {why}"));
            end.push(ending);
        }
        (keep, end)
    }

    /// Undoes what an earlier daemon made for a plan that has changed.
    pub(super) fn undo_leftover(&mut self, plan: &Plan) -> Result<(), FabricError> {
        self.end_bypass()?;
        if let Some(table) = self.dir().owner().nft_table.clone()
            && plan.kernel.is_empty()
        {
            self.undo_kernel(&table)?;
            self.took_over(format!("nftables table {table}: removed: no network has a kernel uplink any more"));
        }
        Ok(())
    }
}

/// What an argument list has that another has not, for people: "now -m 48M, before -m 32M".
fn difference(before: &[String], now: &[String]) -> String {
    /// Options with their values; a value alone says little.
    fn options(argv: &[String]) -> Vec<String> {
        let mut out: Vec<String> = Vec::new();
        for word in argv.iter().skip(1) {
            match out.last_mut() {
                Some(last) if !word.starts_with('-') => *last = format!("{last} {word}"),
                _ => out.push(word.clone()),
            }
        }
        out
    }
    /// Characters of each side that are shown.
    const SHOWN: usize = 160;
    let (before_options, now_options) = (options(before), options(now));
    let only = |of: &[String], not_in: &[String]| {
        let all: Vec<&str> = of.iter().filter(|o| !not_in.contains(o)).map(String::as_str).collect();
        let text = all.join(" ");
        let cut: String = text.chars().take(SHOWN).collect();
        if cut.len() < text.len() { format!("{cut}…") } else { cut }
    };
    let sides = [("now", only(&now_options, &before_options)), ("before", only(&before_options, &now_options))];
    let told: Vec<String> = sides.iter().filter(|(_, t)| !t.is_empty()).map(|(w, t)| format!("{w} {t}")).collect();
    if told.is_empty() { format!("QEMU is {} now", now.first().map_or("", String::as_str)) } else { told.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(String::from).collect()
    }

    #[test]
    fn a_changed_section_is_told_by_its_options() {
        let before = words("qemu -m 32M -smp 1 -device a");
        assert_eq!(difference(&before, &words("qemu -m 48M -smp 1 -device a")), "now -m 48M, before -m 32M");
        assert_eq!(difference(&before, &words("qemu -m 32M -smp 1 -device a -device b")), "now -device b");
        assert_eq!(difference(&before, &words("other -m 32M -smp 1 -device a")), "QEMU is other now");
        let long = "x".repeat(500);
        assert!(difference(&before, &words(&format!("qemu -append {long}"))).chars().count() < 400);
    }
}
