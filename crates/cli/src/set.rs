//! `tombolo set`, `unset` and `config`: keys of the running fabric's file are changed without the
//! file.

use clap::Args;
use serde_json::{Map, Value};
use tombolo_host::api::apply::ApplyReport;
use tombolo_host::api::config::{ConfigQuery, ConfigReport};
use tombolo_host::config;
use tombolo_host::file::nearest;

use crate::apply::tell;
use crate::exit::{Exit, Failure};
use crate::out;
use crate::section::{Origin, told};
use crate::select::Select;

/// How a change is carried out and told.
#[derive(Args, Debug)]
pub(crate) struct How {
    /// Only print what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print what was done, or would be, as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Set {
    /// Keys as in the fabric file, with their sections, such as network.lan.uplink=kernel. A value
    /// is written as in the file; a text may be without quotes
    #[arg(value_name = "KEY=VALUE", required = true)]
    settings: Vec<String>,
    #[command(flatten)]
    how: How,
}

#[derive(Args, Debug)]
pub(crate) struct Unset {
    /// Keys as in the fabric file, with their sections; a section alone is removed with its member
    #[arg(value_name = "KEY", required = true)]
    keys: Vec<String>,
    #[command(flatten)]
    how: How,
}

#[derive(Args, Debug)]
pub(crate) struct Config {
    /// Only what was changed since the file was read, a key a line
    #[arg(long)]
    changes: bool,
    /// Print it as JSON: the configuration, its text and what was changed
    #[arg(long)]
    json: bool,
}

impl How {
    /// Has the fabric changed by a merge patch, and tells what was done.
    /// Faults are told by where the patch is from.
    pub(crate) fn change(
        &self,
        select: &Select,
        patch: &Value,
        revision: Option<String>,
        origin: Option<Origin<'_>>,
    ) -> Result<Exit, Failure> {
        let query = ConfigQuery { dry_run: self.dry_run, revision };
        let report: ApplyReport = select.client()?.change_config(patch, &query).map_err(|error| match origin {
            Some(origin) => told(error, origin),
            None => error.into(),
        })?;
        tell(&report, self.json)
    }
}

/// A value as in the file; what is no TOML is a text. So is what JSON has no number for, such as
/// `nan` and `inf`.
fn value(text: &str) -> Value {
    let read = config::Document::read(&format!("value = {text}\n"));
    let read = read.and_then(|document| document.root.get("value").cloned());
    read.filter(|value| !config::has_null(value)).unwrap_or_else(|| text.into())
}

/// Puts `value` at a dotted path of a patch; `None` if the path has an empty part, or runs through
/// another setting.
fn put(patch: &mut Map<String, Value>, path: &str, value: Value) -> Option<()> {
    let (parents, name) = path.rsplit_once('.')?;
    let mut at = patch;
    for parent in parents.split('.') {
        at = at.entry(parent).or_insert_with(|| Value::Object(Map::new())).as_object_mut()?;
    }
    let is_named = !name.is_empty() && !parents.split('.').any(str::is_empty);
    (is_named && at.insert(name.into(), value).is_none()).then_some(())
}

impl Set {
    fn patch(&self) -> Result<Value, Failure> {
        let mut patch = Map::new();
        for setting in &self.settings {
            let parts = setting.split_once('=').map(|(path, text)| (path.trim(), text.trim()));
            let done = match parts {
                // A list, such as that of rules, has no section.
                Some((path, text)) if !path.contains('.') && !path.is_empty() => {
                    patch.insert(path.into(), value(text)).is_none().then_some(())
                }
                Some((path, text)) => put(&mut patch, path, value(text)),
                None => None,
            };
            done.ok_or_else(|| {
                Failure::misused(format!(
                    "expected KEY=VALUE with a key that is set once, like network.lan.uplink=kernel, found {setting:?}"
                ))
            })?;
        }
        Ok(Value::Object(patch))
    }

    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let patch = self.patch()?;
        self.how.change(select, &patch, None, None).map_err(|failure| match failure {
            Failure::Said(exit, text) => {
                let running = select.client().ok().and_then(|client| client.config().ok());
                let notes = running.map_or_else(Vec::new, |running| mistyped(&patch, &running.config));
                Failure::Said(exit, [vec![text], notes].concat().join("\n"))
            }
            unread => unread,
        })
    }
}

/// What is to be said of a refused patch that would have made sections: the key of one that exists
/// may have been meant, of another kind or with a name that is near.
fn mistyped(patch: &Value, running: &Value) -> Vec<String> {
    let sections = |root: &Value| -> Vec<(String, String)> {
        let words = root.as_object().into_iter().flatten();
        let named = words.filter_map(|(word, all)| Some((word, all.as_object()?)));
        named.flat_map(|(word, all)| all.keys().map(|name| (word.clone(), name.clone()))).collect()
    };
    let known = sections(running);
    let note = |(word, name): (String, String)| {
        if known.contains(&(word.clone(), name.clone())) {
            return None;
        }
        let others = known.iter().filter(|(of, _)| *of == word).map(|(_, name)| name.as_str());
        let meant = match known.iter().find(|(_, other)| *other == name) {
            Some((kind, _)) => Some(format!("{kind}.{name}")),
            None => nearest(&name, others).map(|near| format!("{word}.{near}")),
        };
        let hint = meant.map_or_else(String::new, |meant| format!("; did you mean \"{meant}\"?"));
        Some(format!("there is no [{word}.{name}], which would be new{hint}"))
    };
    sections(patch).into_iter().filter_map(note).collect()
}

/// What may be meant by a key that is not there. In a section that is there it may be a key that is
/// not set, so only the key itself is compared.
fn hint(running: &Value, key: &str) -> String {
    let section = key.rsplit_once('.').and_then(|(path, name)| Some((path, name, config::at(running, path)?)));
    let meant = match section.and_then(|(path, name, value)| Some((path, name, value.as_object()?))) {
        Some((path, name, section)) => match nearest(name, section.keys().map(String::as_str)) {
            Some(near) => format!("{path}.{near}"),
            None => return format!("; nothing is set there, so the default of {name} holds"),
        },
        None => match nearest(key, all_paths(running).iter().map(String::as_str)) {
            Some(near) => near.to_string(),
            None => return String::new(),
        },
    };
    format!("; did you mean \"{meant}\"?")
}

impl Unset {
    fn patch(&self, running: &Value) -> Result<Value, Failure> {
        let mut patch = Map::new();
        for key in &self.keys {
            if config::at(running, key).is_none() {
                let hint = hint(running, key);
                return Err(Failure::failed(format!("{key}: expected a key of what runs (`tombolo config`){hint}")));
            }
            let done = match key.contains('.') {
                true => put(&mut patch, key, Value::Null),
                false => patch.insert(key.clone(), Value::Null).is_none().then_some(()),
            };
            done.ok_or_else(|| Failure::misused(format!("{key}: expected each key once, and none inside another")))?;
        }
        Ok(Value::Object(patch))
    }

    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let running = select.client()?.config()?;
        self.how.change(select, &self.patch(&running.config)?, Some(running.revision), None)
    }
}

/// The sections and keys of a configuration, by dotted paths.
pub(crate) fn all_paths(running: &Value) -> Vec<String> {
    let mut out = Vec::new();
    for path in config::paths(running) {
        // What leads to it, but for the word alone.
        out.extend(path.match_indices('.').skip(1).map(|(at, _)| path[..at].to_string()));
        out.push(path);
    }
    out.sort();
    out.dedup();
    out
}

impl Config {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let report = select.client()?.config()?;
        match (self.json, self.changes) {
            (true, false) => out::json(&report)?,
            (true, true) => out::json(&report.changes)?,
            (false, true) => out::print(&(changes(&report.changes) + &limits(&report)))?,
            (false, false) => out::print(&(report.toml.clone() + &limits(&report)))?,
        }
        Ok(Exit::Done)
    }
}

/// The limits of `port set`, as comments: sections of a file may have no place for them, such as
/// those of one of several members.
fn limits(report: &ConfigReport) -> String {
    let line = |(port, text): (&String, &String)| {
        format!("# port {port} has another limit while it runs (`tombolo port set`): {text}\n")
    };
    report.port_limits.iter().map(line).collect()
}

/// What was changed, as `set` and `unset` take it.
fn changes(patch: &Value) -> String {
    let line = |path: String| match config::at(patch, &path) {
        Some(Value::Null) | None => format!("{path} removed\n"),
        Some(value) => format!("{path} = {}\n", config::inline(value)),
    };
    config::paths(patch).into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn set(settings: &[&str]) -> Result<Value, Failure> {
        let how = How { dry_run: false, json: false };
        Set { settings: settings.iter().map(|s| s.to_string()).collect(), how }.patch()
    }

    #[test]
    fn settings_become_one_patch_with_values_as_in_the_file() {
        let patch = set(&[
            "network.lan.uplink=kernel",
            "network.lan.mtu=1400",
            "cell.web.guard=\"off\"",
            "cell.web.isolated=true",
            "port.p.rate={ send = \"100M\" }",
            "port.q.rate.send=100M",
            "port.q.ip=10.87.0.9",
            "tap.t.groups=[\"a\", \"b\"]",
            "rule=[{ action = \"deny\", to = \"db\" }]",
            "network.lan.domain=a=b",
        ]);
        let expected = json!({
            "network": {"lan": {"uplink": "kernel", "mtu": 1400, "domain": "a=b"}},
            "cell": {"web": {"guard": "off", "isolated": true}},
            "port": {"p": {"rate": {"send": "100M"}}, "q": {"rate": {"send": "100M"}, "ip": "10.87.0.9"}},
            "tap": {"t": {"groups": ["a", "b"]}},
            "rule": [{"action": "deny", "to": "db"}],
        });
        assert_eq!(patch.unwrap(), expected);
        // JSON has no number for these, and null would remove the key.
        let patch = set(&["cell.x.args=nan", "cell.y.args=[1, inf]"]).unwrap();
        assert_eq!(patch, json!({"cell": {"x": {"args": "nan"}, "y": {"args": "[1, inf]"}}}));
        for wrong in [
            &["network.lan.uplink"][..],
            &["=x"],
            &["a..b=1"],
            &[".a=1"],
            &["a.=1"],
            &["a.b=1", "a.b=2"],
            &["a.b=1", "a.b.c=2"],
        ] {
            assert!(set(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_section_that_would_be_new_is_told_with_a_near_one() {
        let running = json!({"name": "demo", "cell": {"web": {}, "db": {}}, "network": {"lan": {}}});
        let told = |path: &str| {
            let mut patch = Map::new();
            put(&mut patch, path, "64M".into()).unwrap();
            mistyped(&Value::Object(patch), &running)
        };
        assert_eq!(told("cell.wbe.memory"), ["there is no [cell.wbe], which would be new; did you mean \"cell.web\"?"]);
        assert_eq!(told("port.web.rate"), ["there is no [port.web], which would be new; did you mean \"cell.web\"?"]);
        assert_eq!(told("cell.other.memory"), ["there is no [cell.other], which would be new"]);
        assert_eq!(told("cell.web.memory"), [""; 0], "it is there");
    }

    #[test]
    fn only_what_runs_can_be_unset() {
        let running = json!({"port": {"web": {"rate": {"send": "1M"}}, "x": {}}, "rule": []});
        let unset = |keys: &[&str]| {
            let how = How { dry_run: false, json: false };
            Unset { keys: keys.iter().map(|s| s.to_string()).collect(), how }.patch(&running)
        };
        let patch = unset(&["port.web.rate", "port.x", "rule"]).unwrap();
        assert_eq!(patch, json!({"port": {"web": {"rate": null}, "x": null}, "rule": null}));
        assert_eq!(all_paths(&running), ["port.web", "port.web.rate", "port.web.rate.send", "port.x", "rule"]);
        assert_eq!(changes(&patch), "port.web.rate removed\nport.x removed\nrule removed\n");
        assert_eq!(changes(&json!({"port": {"x": {"mtu": 7}}})), "port.x.mtu = 7\n");
        let Err(Failure::Said(_, text)) = unset(&["port.web.rat"]) else { panic!() };
        assert!(text.contains("did you mean \"port.web.rate"), "{text}");
        for (key, said) in [
            ("port.web.ip", "so the default of ip holds"),
            ("port.wbe", "did you mean \"port.web\"?"),
            ("port.wbe.rate", "did you mean \"port.web.rate\"?"),
            ("cell.nope.x", "(`tombolo config`)"),
        ] {
            let Err(Failure::Said(_, text)) = unset(&[key]) else { panic!() };
            assert!(text.ends_with(said), "{text}");
        }
        assert!(unset(&["port.web.rate.send", "port.web.rate"]).is_err(), "one is inside the other");
    }
}
