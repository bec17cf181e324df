//! The configuration that runs is read and changed by commands and the API.
//!
//! # Purpose
//! A change is a merge patch of what the file says ([`crate::config`]). The changed text goes the way of a changed file:
//! it is read, compared and applied by [`super::apply`].
//!
//! # Invariants
//! - The file is not written. `changes` of the owner record is the patch that makes what was asked for of the file's
//!   content, as it was last read. A daemon that follows a crash or takes over changes the file's content so too.
//! - An `apply` ends all changes: then what the file says holds again. So do `down`, and a start from another file.
//! - Members that were added (`additions` of the owner record) are a part of what is read. One that a change is about
//!   is the configuration's from then on, and is an addition no more.

use std::path::Path;

use serde_json::{Map, Value};

use super::apply::{Prepared, Source, Wanted};
use super::{FabricError, Running, Say};
use crate::api::config::{ConfigQuery, ConfigReport};
use crate::api::report::SCHEMA;
use crate::config::{self, Document};
use crate::file::{self, Fabric, FileError, Part, Which};
use crate::rundir::{Addition, RunDir};

/// Sections whose members can be added while a fabric runs.
const MEMBERS: [&str; 4] = ["cell", "vm", "tap", "port"];
/// What is shown in place of a file's path.
const CHANGE: &str = "change";

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
    let root = config::merge(base.root.clone(), &Value::Object(changes.clone()));
    parse(&base.with(root), file, spec.which())
}

/// Changes what a start has read from the file, as the daemon before was asked to. If that no longer fits, the file holds.
pub(super) fn restore(
    spec: Fabric,
    base: Option<&Document>,
    changes: &Map<String, Value>,
    dir: &mut RunDir,
    say: &Say,
) -> Fabric {
    changed(&spec, base, changes, &dir.owner().file.clone()).unwrap_or_else(|error| {
        let keys = config::paths(&Value::Object(changes.clone())).join(", ");
        say(&format!("{keys} was changed before and no longer fits; what the file says holds: {error}"));
        dir.record(|o| o.changes.clear());
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
    let of_section = |name: &str, member: &String| {
        member == name || member.strip_prefix(name).is_some_and(|rest| rest.starts_with('-'))
    };
    for word in MEMBERS {
        if let Some(Value::Object(all)) = root.get_mut(word) {
            all.retain(|name, _| addition.names.iter().any(|member| of_section(name, member)));
        }
    }
    if let Some(Value::Array(forwards)) = root.get_mut("forward") {
        let target = |forward: &Value| Some(forward.get("to")?.as_str()?.rsplit_once(':')?.0.to_string());
        forwards.retain(|forward| target(forward).is_some_and(|to| addition.names.contains(&to)));
    }
    root
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

impl Running {
    /// What commands and the API have changed since the file was read.
    pub(super) fn changes(&self) -> Value {
        Value::Object(self.dir.as_ref().map(|dir| dir.owner().changes.clone()).unwrap_or_default())
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
        let mut root = config::merge(base.root.clone(), &self.changes());
        for addition in self.additions() {
            root = with_sections(root, &sections(addition));
        }
        Ok(base.with(root))
    }

    fn additions(&self) -> &[Addition] {
        self.dir.as_ref().map_or(&[], |dir| &dir.owner().additions)
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
            changes: self.changes(),
        })
    }

    /// Compares what runs with its configuration as `patch` changes it, as [`Running::prepare_apply`] does with a file.
    ///
    /// # Errors
    /// A patch that is none, another revision than the one asked for, faults of the changed configuration, or what this
    /// machine does not have.
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
        let mut root = config::merge(before.root.clone(), patch);
        let mut own: Vec<String> = Vec::new();
        for addition in self.additions() {
            match without_sections(&root, &sections(addition)) {
                Some(rest) => root = rest,
                None => own.extend(addition.names.iter().cloned()),
            }
        }
        let base = self.base()?.clone();
        if let Value::Object(words) = &mut root {
            // Of a word whose last section is gone nothing is left, unless the file has it.
            words
                .retain(|word, all| all.as_object().is_none_or(|all| !all.is_empty()) || base.root.get(word).is_some());
        }
        let changed = base.with(root);
        let spec = parse(&changed, &self.file, self.spec.which())?;
        own.extend(spec.members().map(String::from));
        let changes = match config::difference(&base.root, &changed.root) {
            Value::Object(changes) => changes,
            _ => Map::new(),
        };
        let source = Source::Change(config::paths(patch));
        let file = self.file.clone();
        self.prepare_wanted(Wanted { spec, own, file, base: Some(base), changes, source, dry_run: query.dry_run })
    }

    /// Takes note that a tap or port of the configuration was removed.
    pub(super) fn note_removed(&mut self, name: &str) {
        let Some(base) = &self.base else { return };
        let mut root = config::merge(base.root.clone(), &self.changes());
        for word in ["tap", "port"] {
            if let Some(Value::Object(all)) = root.get_mut(word) {
                all.remove(name);
            }
        }
        if let Value::Object(changes) = config::difference(&base.root, &root) {
            self.dir().record(|o| o.changes = changes);
        }
    }

    /// The keys that were changed since the file was read, and that a file of this content says otherwise.
    pub(super) fn reverted(&self, content: Option<&Document>) -> Vec<String> {
        let (Some(base), Some(content)) = (&self.base, content) else { return vec![] };
        let changes = self.changes();
        let now = config::merge(base.root.clone(), &changes);
        let differs = |path: &String| config::at(&now, path) != config::at(&content.root, path);
        config::paths(&changes).into_iter().filter(differs).collect()
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
