//! A changed fabric file is carried out on the fabric that runs.
//!
//! # Purpose
//! [`Running::prepare_apply`] reads the file ([`super::config`] a change of it), compares it with
//! what runs ([`crate::difference`]) and refuses what cannot be done, before anything is changed.
//! [`carry_out`] then does the changes ([`super::steps`]), with the functions by which single
//! members come and go.
//!
//! # Invariants
//! - `spec` is what runs: it changes with each step that is done, and stays without one that
//!   failed. A machine that could not be started is in it, and known as one that never ran
//!   (`model` leaves it out). So the next apply finds what is missing.
//! - A part that is equal in both is not touched: its ports, processes and connections go on. Only
//!   the bypass is attached again for all networks, where one that has it changes.
//! - What goes is taken out before what comes is made, so that names, addresses and listeners are
//!   free: also bridges, uplinks and forwards of parts that go on with others. Rules of the
//!   kernel's uplinks are in place before the ports behind them.
//! - Steps do not depend on each other's success. One that fails is reported, and the others are
//!   done.
//! - No machine starts between the end of its process and its turn here: those that go are marked
//!   (`is_ending`), and neither a restart that is due nor one that waits for others starts
//!   meanwhile.
//! - A daemon that is killed meanwhile leaves what every killed daemon leaves: the next `up` reads
//!   the file, keeps the machines that fit it and starts the others.
//!
//! # Threads
//! The fabric's mutex is held, except while machines end. Meanwhile all other requests that would
//! change the fabric's parts are refused (`applying`), and so is an apply while a machine is being
//! stopped or restarted. What the control plane tells of other machines is taken.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tombolo_port::link::DELETED;
use tombolo_switch::control::WorkerStatus;

use super::additions::restore_additions_of;
use super::ending::end_all;
use super::events::{Facts as Told, Kind};
use super::facts::NOT_ASKED;
use super::standing::Standing;
use super::steps::Steps;
use super::{FabricError, Running, Shared, lacking_at, namespaces, refuse_faults};
use crate::api::apply::{ApplyQuery, ApplyReport, ChangeReport, KeyReport};
use crate::config::Document;
use crate::difference::{self, Action, Change, Model, Part, difference};
use crate::file::{self, Contained, Fabric};
use crate::plan::{self, Attachment, Facts, Plan};
use crate::preflight;
use crate::rundir::Addition;

/// The version of the report.
const SCHEMA: u32 = 1;

/// What is to be done, found to be possible.
pub(super) struct Prepared {
    changes: Vec<Change>,
    new: Model,
    facts: Facts,
    file: PathBuf,
    base: Option<Document>,
    /// See [`Wanted::changes`].
    changes_of_file: Map<String, Value>,
    /// See [`Wanted::additions`].
    additions: Vec<Addition>,
    source: ApplySource,
    /// The members that the file itself has.
    own: Vec<String>,
    report: ApplyReport,
    is_asked: bool,
}

/// What the running fabric is to become.
pub(super) struct Wanted {
    pub(super) spec: Fabric,
    /// The members that it has itself, and those that are additions no more.
    pub(super) own: Vec<String>,
    /// Where it is from.
    pub(super) file: PathBuf,
    /// The content of the file.
    pub(super) base: Option<Document>,
    /// What is changed of that: a merge patch.
    pub(super) changes: Map<String, Value>,
    /// The members that were added while the fabric ran, in place of those recorded.
    pub(super) additions: Vec<Addition>,
    pub(super) source: ApplySource,
    /// Only tell what would be done.
    pub(super) dry_run: bool,
}

/// Who wants it.
pub(super) enum ApplySource {
    /// `apply`, of a whole file.
    File,
    /// A change of these keys.
    Change(Vec<String>),
}

/// A change as a report has it.
fn told(change: &Change) -> ChangeReport {
    let key = |k: &crate::difference::KeyChange| KeyReport {
        key: k.key.clone(),
        before: k.before.clone(),
        after: k.after.clone(),
    };
    let outcome = if change.action == Action::Refuse { "refused" } else { "planned" };
    ChangeReport {
        section: change.section.clone(),
        action: change.action.word().into(),
        keys: change.keys.iter().map(key).collect(),
        reason: change.reason.clone(),
        outcome: outcome.into(),
        error: None,
    }
}

impl Running {
    /// What runs, part by part.
    fn model(&self) -> Model {
        let mut fabric = self.spec.clone();
        // What could never be started is not there, so it is tried again.
        let missing = |name: &String| self.machines.get(name).is_none_or(|m| m.never_started);
        fabric.machines.retain(|m| !missing(&m.name));
        let kernel = fabric.networks.iter().filter_map(|n| plan::uplink(&fabric, n).1).collect();
        let links = fabric.links.iter().filter_map(|l| plan::direct_link(l, &self.facts).ok()).collect();
        let machines = self.machines.values().filter(|m| !m.never_started).map(|m| m.plan.clone()).collect();
        let ports = self.ports.values().map(|p| p.plan.clone()).collect();
        Model { plan: Plan { ports, machines, kernel, links }, fabric }
    }

    /// Ports of taps that the fabric made and that were deleted since, by what the workers say.
    pub(super) fn deleted_taps<'s>(&self, statuses: impl Iterator<Item = &'s WorkerStatus>) -> Vec<String> {
        let is_made = |name: &str| {
            let plan = self.ports.get(name).map(|port| &port.plan);
            plan.is_some_and(|plan| matches!(plan.attachment, Attachment::Tap { adopt: false, .. }))
        };
        let ports = statuses.flat_map(|status| &status.ports).filter(|port| is_made(&port.name));
        let deleted = ports.filter(|p| p.details.iter().any(|(key, value)| *key == "state" && value.text() == DELETED));
        deleted.map(|port| port.name.to_string()).collect()
    }

    /// The same, as it is now.
    fn deleted_taps_now(&self) -> Vec<String> {
        let statuses: Vec<_> = self.workers.iter().filter_map(|w| w.thread.handle().status().ok()).collect();
        self.deleted_taps(statuses.iter())
    }

    /// The namespaces that an apply of this text would open, by members. Faults are told by
    /// [`Running::prepare_apply`].
    pub(super) fn new_in_file(&self, text: &str, query: &ApplyQuery) -> BTreeMap<String, String> {
        let file = query.file.as_ref().unwrap_or(&self.file);
        let Ok(new) = file::parse_on(text, file, self.spec.which()) else { return BTreeMap::new() };
        let (mut old, deleted) = (self.spec.clone(), self.deleted_taps_now());
        old.taps.retain(|tap| !deleted.contains(&tap.name));
        namespaces::new_in(&new, &old)
    }

    /// Compares the text of a fabric file with what runs, and looks at all that the changes need.
    /// Changes nothing, and keeps others from changing the fabric if [`carry_out`] is to follow.
    ///
    /// # Errors
    /// The file's faults, or what this machine does not have.
    pub(super) fn prepare_apply(&mut self, text: &str, query: &ApplyQuery) -> Result<Prepared, FabricError> {
        let file = query.file.clone().unwrap_or_else(|| self.file.clone());
        let which = self.spec.which();
        let spec = file::parse_on(text, &file, which).map_err(|error| {
            let old = self.model();
            preflight::beside(error, text, which, |_| Some(Standing::of(&old.fabric, old.plan.ports.iter())))
        })?;
        let own = spec.members().map(String::from).collect();
        let base = Document::read(text);
        let reverted = self.reverted(base.as_ref());
        let additions = self.all_additions();
        let (changes, source, dry_run) = (Map::new(), ApplySource::File, query.dry_run);
        let mut prepared =
            self.prepare_wanted(Wanted { spec, own, file, base, changes, additions, source, dry_run })?;
        prepared.report.reverted = reverted;
        Ok(prepared)
    }

    /// As [`Running::prepare_apply`], once the text was read.
    pub(super) fn prepare_wanted(&mut self, wanted: Wanted) -> Result<Prepared, FabricError> {
        let Wanted { spec, own, file: path, base, changes: patch, additions, source, dry_run } = wanted;
        if spec.name != self.spec.name {
            let (now, other) = (&self.spec.name, &spec.name);
            return Err(FabricError::State(match source {
                ApplySource::File => format!(
                    "expected a file of the fabric \"{now}\", which runs, found one of \"{other}\"; `tombolo up` starts \
                     that one"
                ),
                ApplySource::Change(_) => format!(
                    "the name of a fabric that runs cannot be changed, and \"{now}\" is to be \"{other}\": change it in \
                     the file between `tombolo down` and `tombolo up`"
                ),
            }));
        }
        let (spec, kept) = self.with_additions(spec, &additions, &own)?;
        let mut facts = self.facts.clone();
        let wants_xl = facts.xl.is_err() && spec.machines.iter().any(|m| m.attach == file::Attach::Xen);
        let unasked = facts.qemu.is_err() || facts.kvm == Err(NOT_ASKED.into());
        if !spec.machines.is_empty() && (unasked || wants_xl) {
            facts = super::facts(&spec, facts.runtime);
        }
        let plan = plan::plan(&spec, &facts)?;
        let new = Model { fabric: spec, plan };
        let mut old = self.model();
        // What was deleted is made again by an `apply`; a change is about what it names.
        if matches!(source, ApplySource::File) {
            let deleted = self.deleted_taps_now();
            old.plan.ports.retain(|plan| !deleted.contains(&plan.name));
        }
        let changes = difference(&old, &new);
        let is_refused = changes.iter().any(|c| c.action == Action::Refuse);
        if !is_refused {
            let standing = Standing::of(&old.fabric, old.plan.ports.iter());
            let faults = preflight::faults(&new.fabric, Some(&standing));
            match &source {
                ApplySource::File => refuse_faults(faults, &path, new.fabric.which())?,
                // Lines of the file say nothing of what is not in it.
                ApplySource::Change(_) if !faults.is_empty() => {
                    return Err(lacking_at(faults, &file::Places::none(Path::new(super::config::CHANGE))));
                }
                ApplySource::Change(_) => {}
            }
        }
        let of_new = new.parts();
        let unchanged = old.parts().iter().filter(|(section, part)| of_new.get(*section) == Some(*part)).count();
        let listed: Vec<ChangeReport> = difference::told(&changes).map(told).collect();
        let unchanged = unchanged + changes.len() - listed.len();
        let report = ApplyReport {
            schema: SCHEMA,
            fabric: self.spec.name.clone(),
            outcome: if is_refused { "refused" } else { "planned" }.into(),
            changes: listed,
            unchanged,
            kept,
            reverted: vec![],
        };
        let is_asked = !dry_run && !is_refused;
        if is_asked && let Some(name) = self.machines.iter().find(|(_, m)| m.is_ending).map(|(name, _)| name) {
            return Err(FabricError::Busy(format!(
                "machine \"{name}\" is being stopped or restarted; try again when that is done"
            )));
        }
        // From here on nothing else changes the fabric.
        self.applying = is_asked;
        Ok(Prepared {
            changes,
            new,
            facts,
            file: path,
            base,
            changes_of_file: patch,
            additions,
            source,
            own,
            report,
            is_asked,
        })
    }

    /// The file with the members that were added while the fabric ran, and their names: an apply
    /// does not end what the file never had. One that the file has now is the file's.
    fn with_additions(
        &self,
        spec: Fabric,
        recorded: &[Addition],
        own: &[String],
    ) -> Result<(Fabric, Vec<String>), FabricError> {
        // A member of the file would end the container's, as the one that it was until now.
        let mut was = self.spec.contained().filter(|member| own.iter().any(|name| name == member.name));
        let is_other =
            |was: &Contained<'_>| !spec.contained().any(|now| (now.name, now.container) == (was.name, was.container));
        if let Some(Contained { name, container, .. }) = was.find(is_other) {
            return Err(FabricError::State(format!(
                "\"{name}\" is the name of a container that runs ({container}): give the section of the file another name, or \
                 end the container first"
            )));
        }
        let mut misfit = None;
        let mut kept = Vec::new();
        let mut additions = Vec::new();
        for mut addition in recorded.iter().cloned() {
            let names = addition.names.len();
            addition.names.retain(|name| !own.contains(name));
            if addition.names.len() == names {
                kept.extend(addition.names.iter().cloned());
                additions.push(addition);
            } else if !addition.names.is_empty() {
                return Err(FabricError::State(format!(
                    "{} of the file were added before, together with {}, which it does not have: put these into the \
                     file too, or remove them first",
                    own.join(", "),
                    addition.names.join(", ")
                )));
            }
        }
        let full = restore_additions_of(spec, &additions, &mut |addition, error| {
            let names = addition.names.join(", ");
            misfit.get_or_insert(format!(
                "{names} was added while the fabric ran, and does not fit the changed file: {error}; remove it first \
                 (`tombolo port del`, `tombolo cell stop`), or put it into the file"
            ));
        });
        match misfit {
            Some(why) => Err(FabricError::State(why)),
            None => Ok((full, kept)),
        }
    }
}

/// Does what was prepared, and reports each step.
pub(super) async fn carry_out(shared: &Shared, prepared: Prepared) -> Result<ApplyReport, FabricError> {
    let Prepared { changes, new, facts, file, base, changes_of_file, additions, source, own, mut report, is_asked } =
        prepared;
    if !is_asked {
        return Ok(report);
    }
    let mut steps = Steps { changes, failed: BTreeMap::new() };
    let say = {
        let mut running = shared.running.lock().await;
        let is_file = matches!(source, ApplySource::File);
        let noted = running.note_file(&file, is_file, (additions, &own), facts, &new, changes_of_file);
        if let Err(error) = noted {
            running.applying = false;
            return Err(error);
        }
        running.base = base;
        running.say.clone()
    };
    let mut ended = Vec::new();
    let mut left = Vec::new();
    let mut running = loop {
        let mut running = shared.running.lock().await;
        if running.dir.is_none() {
            running.applying = false;
            return Err(FabricError::State("the fabric was taken down meanwhile".into()));
        }
        running.finish_ends(&std::mem::take(&mut ended), &left);
        // Also those that have a process again, however they came by it: none is taken out with
        // one.
        let endings = running.begin_ends(&steps);
        if endings.is_empty() {
            break running;
        }
        drop(running);
        let ending;
        (ended, ending) = endings.into_iter().map(|(name, pid, ending)| ((name, pid), ending)).unzip();
        left.extend(end_all(ending, &say).await);
    };
    // The lock is held from here to the end.
    running.applying = false;
    running.unmark_ends(&steps);
    for domain in &left {
        let of_it = |c: &&Change| matches!(&c.before, Some(Part::Machine(m)) if m.spec.name == domain.machine);
        if let Some(change) = steps.changes.iter().find(of_it) {
            let why = format!("its domain {0} may run on; `xl destroy {0}` ends it", domain.name);
            steps.failed.insert(change.section.clone(), why);
        }
    }
    running.take_out(&mut steps);
    running.put_in(&mut steps, &new);
    running.note_containers();
    running.record_standing();
    let done = report_steps(&mut report, steps.failed);
    let text = match &source {
        ApplySource::File => format!("apply: {done}"),
        ApplySource::Change(keys) => format!("change of {}: {done}", keys.join(", ")),
    };
    (running.say)(&text);
    running.events.add(Kind::Apply, Told::of(&report.fabric), &text);
    Ok(report)
}

/// Puts into the report which of its changes failed and why, also what failed of a section that no
/// change is about. Returns it in a sentence.
fn report_steps(report: &mut ApplyReport, mut failed: BTreeMap<String, String>) -> String {
    for told in &mut report.changes {
        match failed.remove(&told.section) {
            None => told.outcome = "done".into(),
            Some(why) => (told.outcome, told.error) = ("failed".into(), Some(why)),
        }
    }
    report.changes.extend(failed.into_iter().map(|(section, why)| ChangeReport {
        section,
        action: Action::Change.word().into(),
        outcome: "failed".into(),
        error: Some(why),
        ..ChangeReport::default()
    }));
    report.changes.sort_by(|a, b| a.section.cmp(&b.section));
    let failed = report.changes.iter().filter(|c| c.outcome == "failed").count();
    report.outcome = if failed == 0 { "done" } else { "partly" }.into();
    let done = report.changes.len() - failed;
    let changes = if done == 1 { "change" } else { "changes" };
    let parts = if report.unchanged == 1 { "part" } else { "parts" };
    format!("{done} {changes} done, {failed} failed, {} {parts} untouched", report.unchanged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_is_reported_also_of_a_section_that_no_change_is_about() {
        let change = |section: &str| ChangeReport { section: section.into(), ..ChangeReport::default() };
        let mut report =
            ApplyReport { changes: vec![change("cell.web"), change("port.guest")], ..ApplyReport::default() };
        let failed = [("policy", "its worker has ended"), ("port.guest", "no room")];
        let text =
            report_steps(&mut report, failed.map(|(section, why)| (section.to_string(), why.to_string())).into());
        let told: Vec<_> =
            report.changes.iter().map(|c| (&c.section[..], &c.outcome[..], c.error.as_deref())).collect();
        let expected = [
            ("cell.web", "done", None),
            ("policy", "failed", Some("its worker has ended")),
            ("port.guest", "failed", Some("no room")),
        ];
        assert_eq!(told, expected);
        assert_eq!((&report.outcome[..], &text[..]), ("partly", "1 change done, 2 failed, 0 parts untouched"));
    }
}
