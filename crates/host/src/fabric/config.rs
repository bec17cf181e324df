//! The configuration that runs is read and changed by commands and the API.
//!
//! # Purpose
//! A change is a merge patch of what the file says ([`crate::config`]). The changed text goes the
//! way of a changed file: it is read, compared and applied by [`super::apply`].
//!
//! # Invariants
//! - The file is not written. `changes` in the owner record is a merge patch: the file as last
//!   read, plus this patch, gives the requested configuration. A daemon that follows a crash or
//!   takes over applies the same patch.
//! - An `apply` ends all changes: then what the file says holds again. So do `down`, and a start
//!   from another file.
//! - Members that were added (`additions` of the owner record) are a part of what is read. A change
//!   of one changes what was added, so that it outlives the next `apply` as the member does. One
//!   that a rule or forward of the configuration names is the configuration's (`named`), and an
//!   addition again after the next `apply`.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Map, Value};

use super::apply::{ApplySource, Prepared, Wanted};
use super::events::{Facts as Told, Kind};
use super::{FabricError, Running, Say, namespaces};
use crate::api::config::{ConfigQuery, ConfigReport};
use crate::api::report::SCHEMA;
use crate::config::{self, Document};
use crate::difference::rates_text;
use crate::file::{self, Fabric, FileError, MEMBERS, Part, Which};
use crate::rundir::{Addition, Owner, RunDir};

/// What is shown in place of a file's path.
pub(super) const CHANGE: &str = "change";
/// Lists of sections that name members.
const NAMING: [&str; 3] = ["forward", "rule", "mirror"];

/// What the file of `spec` with these `changes` says.
///
/// # Errors
/// Faults of the changed file.
pub(super) fn changed(
    spec: &Fabric,
    base: Option<&Document>,
    changes: &Map<String, Value>,
    file: &Path,
) -> Result<Fabric, FileError> {
    let Some(base) = base.filter(|_| !changes.is_empty()) else { return Ok(spec.clone()) };
    parse(&base.with(with_changes(base, changes)), file, spec.which())
}

/// The file's content with these changes.
fn with_changes(base: &Document, changes: &Map<String, Value>) -> Value {
    config::merge(base.root.clone(), &Value::Object(changes.clone()))
}

/// The changes that make `root` of the file's content.
fn changes_to(base: &Document, root: &Value) -> Map<String, Value> {
    match config::difference(&base.root, root) {
        Value::Object(changes) => changes,
        // A configuration is an object, and so is what makes one of another.
        _ => Map::new(),
    }
}

/// The keys that are changed, in words.
pub(super) fn keys_of(changes: &Map<String, Value>) -> String {
    config::paths(&Value::Object(changes.clone())).join(", ")
}

/// Changes what a start has read from the file, as the daemon before was asked to. If that no
/// longer fits, the file holds.
pub(super) fn restore(
    spec: Fabric,
    base: Option<&Document>,
    changes: &Map<String, Value>,
    dir: &mut RunDir,
    say: &Say,
) -> Fabric {
    changed(&spec, base, changes, &dir.owner().file.clone()).unwrap_or_else(|error| {
        let keys = keys_of(changes);
        say(&format!("{keys} was changed before and no longer fits; what the file says holds: {error}"));
        dir.record(Owner::end_changes);
        spec
    })
}

/// Reads a changed document. Its lines are in no file, so faults have their keys only.
fn parse(document: &Document, file: &Path, which: Which<'_>) -> Result<Fabric, FileError> {
    file::parse_on(&document.text(), file, which).map_err(|error| match error {
        FileError::Faulty { mut problems, .. } => {
            problems.iter_mut().for_each(|problem| (problem.line, problem.column) = (0, 0));
            FileError::Faulty { path: CHANGE.into(), problems, part: Part::Change }
        }
        error => error,
    })
}

/// The sections that are left of an addition.
fn sections(addition: &Addition) -> Value {
    let mut root = Document::read(&addition.text).map_or(Value::Null, |document| document.root);
    // A section with `count` is there as long as one of its members is.
    let of_section = |name: &str, section: &Value, member: &String| match section.get("count") {
        None => member == name,
        Some(_) => member
            .strip_prefix(name)
            .and_then(|rest| rest.strip_prefix('-'))
            .is_some_and(|number| number.bytes().all(|b| b.is_ascii_digit())),
    };
    for word in MEMBERS {
        if let Some(Value::Object(all)) = root.get_mut(word) {
            all.retain(|name, section| addition.names.iter().any(|member| of_section(name, section, member)));
        }
    }
    if let Some(Value::Array(forwards)) = root.get_mut("forward") {
        forwards.retain(|forward| target(forward).is_some_and(|to| addition.names.iter().any(|name| name == to)));
    }
    root
}

/// The member, or address, that a forward leads to.
fn target(forward: &Value) -> Option<&str> {
    Some(forward.get("to")?.as_str()?.rsplit_once(':')?.0)
}

/// The sections of members in an addition: word, name and content.
fn members(root: &Value) -> impl Iterator<Item = (&'static str, &String, &Value)> {
    let of_word = |word: &'static str| {
        let all = root.get(word).and_then(Value::as_object);
        all.into_iter().flatten().map(move |(name, section)| (word, name, section))
    };
    MEMBERS.into_iter().flat_map(of_word)
}

fn forwards(root: &Value) -> &[Value] {
    root.get("forward").and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// `root` with an addition's sections.
fn with_sections(root: Value, addition: &Value) -> Value {
    let all: Vec<Value> = forwards(&root).iter().chain(forwards(addition)).cloned().collect();
    let mut out = config::merge(root, addition);
    if let (Some(map), false) = (out.as_object_mut(), all.is_empty()) {
        map.insert("forward".into(), Value::Array(all));
    }
    out
}

/// `root` without an addition's sections; `None` if they are in it otherwise than they were added.
fn without_sections(root: &Value, addition: &Value) -> Option<Value> {
    let mut out = root.clone();
    for (word, name, section) in members(addition) {
        let all = out.get_mut(word)?.as_object_mut()?;
        if all.remove(name).as_ref() != Some(section) {
            return None;
        }
        if all.is_empty() {
            out.as_object_mut()?.remove(word);
        }
    }
    for forward in forwards(addition) {
        let all = out.get_mut("forward")?.as_array_mut()?;
        all.remove(all.iter().position(|f| f == forward)?);
        if all.is_empty() {
            out.as_object_mut()?.remove("forward");
        }
    }
    Some(out)
}

/// The sections of an addition as `root` has them; `None` if it lacks one, or has them as they were
/// added, or how many members they make may be another number.
fn changed_sections(root: &Value, addition: &Value) -> Option<Value> {
    let mut out = addition.clone();
    for (word, name, section) in members(addition) {
        let now = root.get(word)?.get(name)?;
        if section.get("count").is_some() || now.get("count").is_some() {
            return None;
        }
        *out.get_mut(word)?.get_mut(name)? = now.clone();
    }
    (out != *addition).then_some(out)
}

/// The sections of a changed addition as they are added: without what [`on_this_machine`] has put
/// in, where that was not changed.
fn as_added(mut changed: Value, shown: &Value, added: &Value) -> Value {
    for (word, name, section) in members(added) {
        let Some(now) = changed.get_mut(word).and_then(|all| all.get_mut(name)).and_then(Value::as_object_mut) else {
            continue;
        };
        for key in ["on", "mac"] {
            let put_in = shown.get(word).and_then(|all| all.get(name)).and_then(|section| section.get(key));
            if section.get(key).is_none() && now.get(key) == put_in {
                now.remove(key);
            }
        }
    }
    changed
}

/// The sections of an addition with `on`, for a file of several machines. A member that one machine
/// alone has gets another MAC address from its name than one of an addition, so its address is said
/// too.
fn on_this_machine(mut root: Value, spec: &Fabric) -> Value {
    let Some(here) = &spec.here else { return root };
    let macs = |word: &str, name: &String| -> Option<Value> {
        match word {
            "tap" => spec.taps.iter().find(|tap| tap.name == *name).map(|tap| tap.mac.to_string().into()),
            "port" => None,
            _ => {
                let machine = spec.machines.iter().find(|machine| machine.name == *name)?;
                Some(machine.nics.iter().map(|nic| Value::from(nic.mac.to_string())).collect())
            }
        }
    };
    for word in MEMBERS {
        for (name, section) in root.get_mut(word).and_then(Value::as_object_mut).into_iter().flatten() {
            let Some(section) = section.as_object_mut() else { continue };
            section.entry("on").or_insert_with(|| here.host.name.clone().into());
            if let Some(mac) = macs(word, name).filter(|_| !section.contains_key("count")) {
                section.insert("mac".into(), mac);
            }
        }
    }
    root
}

/// Whether a forward, rule or mirror of `root` names this member.
fn names(root: &Value, member: &str) -> bool {
    fn has(value: &Value, member: &str) -> bool {
        match value {
            Value::String(text) => {
                text.strip_prefix(member).is_some_and(|rest| rest.is_empty() || rest.starts_with(':'))
            }
            Value::Array(list) => list.iter().any(|value| has(value, member)),
            Value::Object(map) => map.values().any(|value| has(value, member)),
            _ => false,
        }
    }
    NAMING.iter().any(|word| root.get(*word).is_some_and(|list| has(list, member)))
}

/// `root` without the additions that are in it as they were added, but for those to `keep`. Returns
/// the members of the others too.
fn without_additions(
    mut root: Value,
    additions: &[(Addition, Value)],
    base: &Document,
    keep: impl Fn(&Addition) -> bool,
) -> (Vec<String>, Document) {
    let mut own = Vec::new();
    for (addition, sections) in additions {
        match without_sections(&root, sections).filter(|_| !keep(addition)) {
            Some(rest) => root = rest,
            None => own.extend(addition.names.iter().cloned()),
        }
    }
    if let Value::Object(words) = &mut root {
        // Of a word whose last section is gone nothing is left, unless the file has it.
        words.retain(|word, all| all.as_object().is_none_or(|all| !all.is_empty()) || base.root.get(word).is_some());
    }
    (own, base.with(root))
}

/// Whether a section is in a group of this name, which rules and mirrors may mean.
fn is_group(root: &Value, name: &str) -> bool {
    let has = |section: &Value| {
        let groups = section.get("groups").and_then(Value::as_array);
        groups.is_some_and(|groups| groups.iter().any(|group| group == name))
    };
    let sections = MEMBERS.into_iter().filter_map(|word| root.get(word)?.as_object());
    sections.flat_map(|all| all.values()).any(has)
}

/// A rule or mirror without a member. `None` if it is about no other.
fn without_name(item: &Value, name: &str) -> Option<Value> {
    let mut item = item.clone();
    // Of a rule, and of a mirror.
    for key in ["from", "to", "of"] {
        match item.get_mut(key) {
            Some(Value::String(text)) if text == name => return None,
            Some(Value::Array(list)) => {
                let before = list.len();
                list.retain(|value| value != name);
                if list.is_empty() && before != 0 {
                    return None;
                }
            }
            _ => {}
        }
    }
    Some(item)
}

/// `root` without a tap or port. With `all`, also without what names it: the forwards to it, and
/// its name in rules and mirrors.
fn without_member(root: &Value, name: &str, all: bool) -> Value {
    let mut root = root.clone();
    for word in ["tap", "port"] {
        if let Some(Value::Object(all)) = root.get_mut(word) {
            all.remove(name);
        }
    }
    if !all {
        return root;
    }
    if let Some(Value::Array(all)) = root.get_mut("forward") {
        all.retain(|forward| target(forward) != Some(name));
    }
    if is_group(&root, name) {
        return root;
    }
    for word in ["rule", "mirror"] {
        let Some(Value::Array(list)) = root.get_mut(word) else { continue };
        *list = list.iter().filter_map(|item| without_name(item, name)).collect();
        if list.is_empty()
            && let Some(root) = root.as_object_mut()
        {
            root.remove(word);
        }
    }
    root
}

/// `changes` of `base` once these members are removed from it, with all that names them.
pub(super) fn changes_without(
    base: Option<&Document>,
    changes: &Map<String, Value>,
    gone: impl Iterator<Item = impl AsRef<str>>,
) -> Map<String, Value> {
    let Some(base) = base else { return changes.clone() };
    let now = with_changes(base, changes);
    changes_to(base, &gone.fold(now, |root, name| without_member(&root, name.as_ref(), true)))
}

/// What rules and mirrors of a configuration lose with a member: how each of them changes, for
/// people.
fn losses(root: &Value, name: &str) -> Option<String> {
    if is_group(root, name) {
        return None;
    }
    let items = |word: &'static str| {
        let list = root.get(word).and_then(Value::as_array).into_iter().flatten();
        list.filter_map(move |item| match without_name(item, name) {
            None => Some(format!("the {word} {item} is removed")),
            Some(left) if left != *item => Some(format!("the {word} {item} is {left} now")),
            Some(_) => None,
        })
    };
    let all: Vec<_> = items("rule").chain(items("mirror")).collect();
    (!all.is_empty()).then(|| format!("the container \"{name}\" has ended, and what names it goes: {}", all.join("; ")))
}

/// What the rules and mirrors of a configuration lose with the members that have gone, a sentence
/// each.
pub(super) fn lost_by_policies(
    base: Option<&Document>,
    changes: &Map<String, Value>,
    gone: impl Iterator<Item = impl AsRef<str>>,
) -> Vec<String> {
    let Some(base) = base else { return vec![] };
    let mut root = with_changes(base, changes);
    let lost = gone.filter_map(|name| {
        let lost = losses(&root, name.as_ref());
        root = without_member(&root, name.as_ref(), true);
        lost
    });
    lost.collect()
}

impl Running {
    /// What commands and the API have changed since the file was read.
    pub(super) fn changes(&self) -> Map<String, Value> {
        self.dir.as_ref().map(|dir| dir.owner().changes.clone()).unwrap_or_default()
    }

    fn base(&self) -> Result<&Document, FabricError> {
        self.base.as_ref().ok_or_else(|| {
            FabricError::State(format!(
                "expected the configuration that runs, found none: {} could not be read when this daemon started; \
                 `tombolo apply` reads it again",
                self.file.display()
            ))
        })
    }

    /// The configuration that runs, with members that were added.
    fn configuration(&self) -> Result<Document, FabricError> {
        let base = self.base()?;
        let mut root = with_changes(base, &self.changes());
        for addition in self.additions() {
            root = with_sections(root, &self.sections(addition));
        }
        Ok(base.with(root))
    }

    /// The sections that are left of an addition, as a file for this machine has them.
    fn sections(&self, addition: &Addition) -> Value {
        on_this_machine(sections(addition), &self.spec)
    }

    fn additions(&self) -> &[Addition] {
        self.dir.as_ref().map_or(&[], |dir| &dir.owner().additions)
    }

    /// The limits that ports were given while they ran, in words.
    fn port_limits(&self) -> BTreeMap<String, String> {
        let ports = self.dir.as_ref().map(|dir| dir.owner().rates.keys()).into_iter().flatten();
        let limits = ports.filter_map(|port| Some((port.clone(), rates_text(&self.changed_rates(port)?))));
        limits.map(|(port, text)| (port, text.unwrap_or("off".into()))).collect()
    }

    /// The configuration that runs, for the API.
    ///
    /// # Errors
    /// If the file could not be read when this daemon started.
    pub(super) fn config_report(&self) -> Result<ConfigReport, FabricError> {
        let document = self.configuration()?;
        let toml = document.text();
        Ok(ConfigReport {
            schema: SCHEMA,
            fabric: self.spec.name.clone(),
            file: self.file.clone(),
            revision: config::revision(&toml),
            config: document.root,
            toml,
            port_limits: self.port_limits(),
            changes: Value::Object(self.changes()),
        })
    }

    /// The namespaces that a change would open, by members. Faults are told by
    /// [`Running::prepare_change`].
    pub(super) fn new_in_change(&self, patch: &Value) -> BTreeMap<String, String> {
        let Ok(before) = self.configuration() else { return BTreeMap::new() };
        let after = before.with(config::merge(before.root.clone(), patch));
        let new = parse(&after, &self.file, self.spec.which());
        new.map(|new| namespaces::new_in(&new, &self.spec)).unwrap_or_default()
    }

    /// Compares what runs with its configuration as `patch` changes it, as
    /// [`Running::prepare_apply`] does with a file.
    ///
    /// # Errors
    /// A patch that is none, another revision than the one asked for, faults of the changed
    /// configuration, or what this machine does not have.
    pub(super) fn prepare_change(&mut self, patch: &Value, query: &ConfigQuery) -> Result<Prepared, FabricError> {
        if !patch.is_object() || config::has_null_in_list(patch) {
            let text = "expected a JSON merge patch (RFC 7386): an object of sections without null in lists";
            return Err(FabricError::Request(text.into()));
        }
        let before = self.configuration()?;
        if query.revision.as_ref().is_some_and(|revision| *revision != config::revision(&before.text())) {
            let text = "the configuration has changed since it was read; read it again, and change that";
            return Err(FabricError::State(text.into()));
        }
        let root = config::merge(before.root.clone(), patch);
        let base = self.base()?.clone();
        let mut has_changed = false;
        let all = self.all_additions();
        let now = all.iter().map(|addition| {
            let shown = self.sections(addition);
            let Some(changed) = changed_sections(&root, &shown) else { return (addition.clone(), shown) };
            let text = base.with(as_added(changed.clone(), &shown, &sections(addition))).text();
            has_changed = true;
            (Addition { names: addition.names.clone(), text }, changed)
        });
        let now: Vec<(Addition, Value)> = now.collect();
        // What is wrong with a changed one is told as of a section of the file.
        if has_changed {
            parse(&base.with(root.clone()), &self.file, self.spec.which())?;
        }
        let (own, changed) = without_additions(root.clone(), &now, &base, |_| false);
        let (mut own, changed, spec) = match parse(&changed, &self.file, self.spec.which()) {
            Ok(spec) => (own, changed, spec),
            Err(error) => {
                // A forward or a rule may name members that were added. These are the
                // configuration's as long as it names them.
                let named = |addition: &Addition| addition.names.iter().any(|name| names(&changed.root, name));
                let (more, kept) = without_additions(root, &now, &base, named);
                if more.len() == own.len() {
                    return Err(error.into());
                }
                let spec = parse(&kept, &self.file, self.spec.which())?;
                (more, kept, spec)
            }
        };
        self.is_for_this_machine(&spec, &before.root, &changed.root)?;
        own.extend(spec.members().map(String::from));
        let changes = changes_to(&base, &changed.root);
        let source = ApplySource::Change(config::paths(patch));
        let file = self.file.clone();
        let additions = now.into_iter().map(|(addition, _)| addition).collect();
        let dry_run = query.dry_run;
        self.prepare_wanted(Wanted { spec, own, file, base: Some(base), changes, additions, source, dry_run })
    }

    /// Whether a change from `before` to `after`, of which `spec` is read, is about this machine of
    /// a file for several.
    ///
    /// # Errors
    /// It is about a member that only another machine has: it would be without effect here.
    fn is_for_this_machine(&self, spec: &Fabric, before: &Value, after: &Value) -> Result<(), FabricError> {
        let was_here = |name: &str| self.spec.members().any(|member| member == name);
        let others = spec.elsewhere.members.iter().filter(|(name, ..)| !was_here(name));
        let patch = config::difference(before, after);
        // The forwards, rules and mirrors that are new.
        let more = |word: &&str| {
            let list = |root: &Value| root.get(*word).and_then(Value::as_array).cloned().unwrap_or_default();
            let old = list(before);
            (word.to_string(), list(after).into_iter().filter(|item| !old.contains(item)).collect::<Value>())
        };
        let more: Value = NAMING.iter().map(more).collect();
        for (name, section, machine) in others {
            if config::at(&patch, section).is_some() || names(&more, name) {
                return Err(FabricError::State(format!(
                    "[{section}] runs on machine \"{machine}\", and a change is made where its member runs: use --fabric \
                     with the name of the fabric there"
                )));
            }
        }
        Ok(())
    }

    /// Whether the configuration fits without a tap or port of it.
    ///
    /// # Errors
    /// What names it, such as a rule. One that does not fit with it either, such as one with an
    /// image that was deleted since, keeps nothing from going.
    pub(super) fn can_remove(&self, name: &str) -> Result<(), FabricError> {
        let Some(base) = &self.base else { return Ok(()) };
        let now = with_changes(base, &self.changes());
        let read = |root: Value| parse(&base.with(root), &self.file, self.spec.which());
        match read(without_member(&now, name, false)) {
            Ok(_) => Ok(()),
            Err(_) if read(now).is_err() => Ok(()),
            Err(FileError::Faulty { problems, .. }) => {
                let keys: Vec<_> = problems.iter().map(|problem| problem.key.as_str()).collect();
                let text = format!(
                    "the configuration names \"{name}\" in {}; it cannot go before that: {}",
                    keys.join(", "),
                    "`tombolo rule` and `tombolo forward` change rules and forwards, and `tombolo unset mirror` removes the \
                     mirrors"
                );
                Err(FabricError::State(text))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Takes note that a tap or port of the configuration was removed; with `all`, what names it
    /// too.
    pub(super) fn note_removed(&mut self, name: &str, all: bool) {
        let Some(base) = &self.base else { return };
        let before = with_changes(base, &self.changes());
        let after = without_member(&before, name, all);
        let lost = if all { losses(&before, name) } else { None };
        let changes = changes_to(base, &after);
        self.dir().record(|o| o.changes = changes);
        let Some(lost) = lost else { return };
        self.spec.forget_in_policies([name].into_iter());
        self.settle_policies().iter().for_each(|error| (self.say)(error));
        (self.say)(&lost);
        // It may be what kept others from a member of this name that comes later.
        self.events.add(Kind::Apply, Told::of(name), &lost);
    }

    /// The members that were added, also those that a rule or forward of the configuration names, all
    /// as they are now.
    pub(super) fn all_additions(&self) -> Vec<Addition> {
        self.additions().iter().cloned().chain(self.named()).collect()
    }

    fn named(&self) -> Vec<Addition> {
        let (Some(base), Some(dir)) = (&self.base, &self.dir) else { return vec![] };
        let now = with_changes(base, &dir.owner().changes);
        let of_now = |addition: &Addition| {
            let added = sections(addition);
            let mut own = added.clone();
            for (word, name, _) in members(&added) {
                // It has gone since.
                own[word][name] = now.get(word)?.get(name)?.clone();
            }
            if let Some(Value::Array(own)) = own.get_mut("forward") {
                own.retain(|forward| forwards(&now).contains(forward));
            }
            let own = as_added(own, &self.sections(addition), &added);
            Some(Addition { names: addition.names.clone(), text: base.with(own).text() })
        };
        dir.owner().named.iter().filter_map(of_now).collect()
    }

    /// The keys that were changed since the file was read, and that a file of this content says
    /// otherwise.
    pub(super) fn reverted(&self, content: Option<&Document>) -> Vec<String> {
        let (Some(base), Some(content)) = (&self.base, content) else { return vec![] };
        let changes = self.changes();
        let now = with_changes(base, &changes);
        let named = self.named();
        let stays = |path: &String| {
            let member = path.split_once('.').filter(|(word, _)| MEMBERS.contains(word)).map(|(_, rest)| rest);
            let is_of = |name: &String| {
                member.is_some_and(|rest| {
                    rest.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
                })
            };
            named.iter().any(|addition| addition.names.iter().any(is_of))
        };
        let differs = |path: &String| !stays(path) && config::at(&now, path) != config::at(&content.root, path);
        config::paths(&Value::Object(changes)).into_iter().filter(differs).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_addition_is_read_with_the_configuration_and_known_again_in_it() {
        let text = "[port.a]\nkind = \"stream\"\n[vm.x]\ncount = 2\n[tap.gone]\n\
                    [[forward]]\nlisten = \"127.0.0.1:1\"\nto = \"a:1\"\n[[forward]]\nlisten = \"127.0.0.1:2\"\nto = \"gone:1\"\n";
        let addition = Addition { names: vec!["a".into(), "x-2".into()], text: text.into() };
        let left = sections(&addition);
        let forward = json!({"listen": "127.0.0.1:1", "to": "a:1"});
        assert_eq!(left["vm"], json!({"x": {"count": 2}}));
        assert_eq!((&left["tap"], &left["forward"]), (&json!({}), &json!([forward])));
        let root = json!({"port": {"b": {"kind": "stream"}}, "forward": [{"listen": "127.0.0.1:3", "to": "b:1"}]});
        let whole = with_sections(root.clone(), &left);
        assert_eq!(whole["forward"].as_array().map(Vec::len), Some(2));
        assert_eq!(without_sections(&whole, &left), Some(config::merge(root, &json!({"tap": {}}))));
        for patch in [
            json!({"port": {"a": {"guard": "off"}}}),
            json!({"port": {"a": null}}),
            json!({"vm": null}),
            json!({"forward": []}),
        ] {
            assert_eq!(without_sections(&config::merge(whole.clone(), &patch), &left), None, "{patch}");
        }
        assert!(without_sections(&config::merge(whole, &json!({"port": {"b": null}})), &left).is_some());
    }

    #[test]
    fn a_member_that_was_added_alone_is_not_one_of_another_with_a_longer_name() {
        let left = |names: &[&str], text: &str| {
            let names = names.iter().map(|name| name.to_string()).collect();
            sections(&Addition { names, text: text.into() })["port"].clone()
        };
        let text = "[port.web]\nkind = \"stream\"\n[port.web-2]\nkind = \"stream\"\n";
        assert_eq!(left(&["web-2"], text), json!({"web-2": {"kind": "stream"}}));
        assert_eq!(left(&["web"], text), json!({"web": {"kind": "stream"}}));
        let text = "[port.web]\ncount = 2\n[port.web-x]\n";
        assert_eq!(left(&["web-x"], text), json!({"web-x": {}}));
        assert_eq!(left(&["web-2"], text), json!({"web": {"count": 2}}));
    }

    #[test]
    fn an_addition_that_a_forward_or_rule_names_is_the_configurations() {
        let base = Document::read("name = \"d\"\n").unwrap();
        let of =
            |name: &str| Addition { names: vec![name.into()], text: format!("[port.{name}]\nkind = \"stream\"\n") };
        let all = [of("web"), of("other")].map(|addition| {
            let sections = sections(&addition);
            (addition, sections)
        });
        for patch in [
            json!({"forward": [{"listen": "127.0.0.1:1", "to": "web:80"}]}),
            json!({"rule": [{"action": "deny", "from": ["db", "web"]}]}),
            json!({"mirror": [{"from": "web", "to": "db"}]}),
        ] {
            let whole = with_sections(with_sections(config::merge(base.root.clone(), &patch), &all[0].1), &all[1].1);
            let (own, rest) = without_additions(whole.clone(), &all, &base, |_| false);
            assert!(own.is_empty() && rest.root.get("port").is_none());
            let named = |addition: &Addition| addition.names.iter().any(|name| names(&rest.root, name));
            let (own, kept) = without_additions(whole, &all, &base, named);
            assert_eq!(
                (own, &kept.root["port"]),
                (vec!["web".to_string()], &json!({"web": {"kind": "stream"}})),
                "{patch}"
            );
        }
        assert!(!names(&json!({"forward": [{"to": "web-2:80"}], "tap": {"web": {}}}), "web"));
    }

    #[test]
    fn what_a_container_leaves_in_the_changes_goes_with_it() {
        let base = Document::read("name = \"d\"\n[tap.a]\n").unwrap();
        let forward = |to: &str| json!({"listen": "127.0.0.1:1", "to": to});
        let changes = json!({"port": {"pod": {"kind": "stream"}}, "forward": [forward("pod:80"), forward("a:80")]});
        let left = changes_without(Some(&base), changes.as_object().unwrap(), ["pod"].iter());
        assert_eq!(Value::Object(left), json!({"port": {}, "forward": [forward("a:80")]}));
        let gone = changes_without(Some(&base), &Map::new(), ["a"].iter());
        assert_eq!(Value::Object(gone), json!({"tap": {"a": null}}));
    }

    #[test]
    fn rules_and_mirrors_lose_the_name_of_a_container_that_has_ended_unless_it_is_a_groups() {
        let base = Document::read("name = \"d\"\n[tap.a]\n").unwrap();
        let rule = |from: Value| json!({"action": "deny", "from": from});
        let changes = json!({"tap": {"a": {"groups": ["front"]}}, "port": {"pod": {}, "front": {}},
            "rule": [rule(json!("pod")), rule(json!(["pod", "a"])), rule(json!("front"))],
            "mirror": [{"of": "a", "to": "pod"}, {"of": ["pod"], "to": "a"}]});
        let changes = changes.as_object().unwrap();
        let left = Value::Object(changes_without(Some(&base), changes, ["pod"].iter()));
        assert_eq!((&left["rule"], left.get("mirror")), (&json!([rule(json!(["a"])), rule(json!("front"))]), None));
        let left = Value::Object(changes_without(Some(&base), changes, ["front"].iter()));
        assert_eq!(left["rule"], changes["rule"], "members of the group are there");
        let lost = lost_by_policies(Some(&base), changes, ["front", "pod", "pod"].iter());
        let told = "the container \"pod\" has ended, and what names it goes: \
            the rule {\"action\":\"deny\",\"from\":\"pod\"} is removed; \
            the rule {\"action\":\"deny\",\"from\":[\"pod\",\"a\"]} is {\"action\":\"deny\",\"from\":[\"a\"]} now; \
            the mirror {\"of\":\"a\",\"to\":\"pod\"} is removed; the mirror {\"of\":[\"pod\"],\"to\":\"a\"} is removed";
        assert_eq!(lost, [told]);
    }

    #[test]
    fn an_addition_keeps_its_machine_and_mac_address_in_a_file_for_several() {
        let text =
            "name = \"d\"\n[machine.a]\naddress = \"192.0.2.1\"\n[machine.b]\naddress = \"192.0.2.2\"\n[network.lan]\n";
        let read = |text: &str, machine| file::parse_on(text, Path::new("/x/t.toml"), Which::Named(machine)).unwrap();
        let added = "[tap.t]\n[port.p]\nkind = \"stream\"\n[vm.v]\nkernel = \"/etc/passwd\"\n";
        let spec = file::add(added, Path::new("added"), &read(text, "a")).unwrap();
        let names = ["t", "p", "v"].map(String::from).to_vec();
        let own = on_this_machine(sections(&Addition { names, text: added.into() }), &spec);
        let base = Document::read(text).unwrap();
        let whole = base.with(with_sections(base.root.clone(), &own)).text();
        let (a, b) = (read(&whole, "a"), read(&whole, "b"));
        assert_eq!((&a.taps, &a.ports, &a.machines), (&spec.taps, &spec.ports, &spec.machines), "{whole}");
        assert_eq!(b.members().count(), 0, "{whole}");
        assert_eq!(without_sections(&with_sections(base.root.clone(), &own), &own), Some(base.root));
    }

    #[test]
    fn changes_are_made_again_to_the_file_and_their_faults_name_keys() {
        let text = "name = \"d\"\n[network.lan]\nsubnet = \"10.9.0.0/24\"\n";
        let file = Path::new("/nowhere/tombolo.toml");
        let (base, spec) = (Document::read(text).unwrap(), file::parse(text, file).unwrap());
        let with = |patch: Value| changed(&spec, Some(&base), patch.as_object().unwrap(), file);
        assert_eq!(with(json!({})).unwrap(), spec);
        assert_eq!(with(json!({"network": {"lan": {"mtu": 1400}}})).unwrap().networks[0].mtu, 1400);
        assert_eq!(changed(&spec, None, json!({"a": 1}).as_object().unwrap(), file).unwrap(), spec);
        let error = with(json!({"network": {"lan": {"mtu": 7}}})).unwrap_err().to_string();
        assert!(error.starts_with("change: network.lan.mtu: expected"), "{error}");
        assert!(error.ends_with("1 fault in the change; nothing was changed"), "{error}");
    }
}
