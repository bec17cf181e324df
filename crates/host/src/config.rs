//! The configuration that a fabric runs with, as JSON: its file, and what commands and the API have
//! changed since. Pure.
//!
//! # Purpose
//! A change is a JSON merge patch (RFC 7386) of the file's content. [`merge`] carries it out, and
//! [`difference`] finds the patch between two documents. What was changed since the file was read
//! is kept as one such patch: so a daemon that follows makes the same changes to the file as it is
//! then. [`Document::text`] writes a document as a fabric file, which goes the way of every other
//! file: it is read, checked, planned and compared with what runs.
//!
//! # Limits
//! A list (`[[forward]]`, `[[rule]]`) is one value of a patch, so it is replaced as a whole.

use std::cmp::Ordering;
use std::collections::HashMap;

use serde_json::{Map, Value};
use toml::de::{DeTable, DeValue};

use crate::hash::fnv1a;

/// The content of a fabric file, and the order of its keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Document {
    /// The file as JSON: an object of sections.
    pub root: Value,
    /// Where each key stands in the text, in bytes, by dotted path. The order of networks decides
    /// their default subnets.
    places: HashMap<String, usize>,
}

impl Document {
    /// The content of a text that is valid TOML; `None` for another one.
    pub fn read(text: &str) -> Option<Document> {
        let root = toml::from_str(text).ok()?;
        let (table, _) = DeTable::parse_recoverable(text);
        let mut places = HashMap::new();
        note_places("", table.get_ref(), &mut places);
        Some(Document { root, places })
    }

    /// Another content, in this order; what is new comes last.
    #[must_use]
    pub fn with(&self, root: Value) -> Document {
        Document { root, places: self.places.clone() }
    }

    /// The content as the text of a fabric file.
    pub fn text(&self) -> String {
        let mut head = String::new();
        let mut rest = String::new();
        for (word, value) in self.sorted("", &self.root) {
            match value {
                Value::Object(sections) => self.sections(word, sections, &mut rest),
                Value::Array(list) if !list.is_empty() && list.iter().all(Value::is_object) => {
                    for item in list {
                        rest.push_str(&format!("\n[[{}]]\n", key(word)));
                        self.keys("", item, &mut rest);
                    }
                }
                value => head.push_str(&line(word, value)),
            }
        }
        (head + &rest).trim_start().to_string()
    }

    fn sections(&self, word: &str, sections: &Map<String, Value>, out: &mut String) {
        let is_section = |value: &Value| value.is_object();
        // An empty one may mean something by being there, like [span].
        if sections.is_empty() || !sections.values().all(is_section) {
            out.push_str(&format!("\n[{}]\n", key(word)));
        }
        let all = self.sorted_map(word, sections);
        for (name, value) in all.iter().filter(|(_, value)| !is_section(value)) {
            out.push_str(&line(name, value));
        }
        for (name, value) in all.iter().filter(|(_, value)| is_section(value)) {
            out.push_str(&format!("\n[{}.{}]\n", key(word), key(name)));
            self.keys(&format!("{word}.{name}"), value, out);
        }
    }

    fn keys(&self, path: &str, section: &Value, out: &mut String) {
        for (name, value) in self.sorted(path, section) {
            out.push_str(&line(name, value));
        }
    }

    fn sorted<'v>(&self, path: &str, object: &'v Value) -> Vec<(&'v String, &'v Value)> {
        object.as_object().map_or_else(Vec::new, |map| self.sorted_map(path, map))
    }

    fn sorted_map<'v>(&self, path: &str, map: &'v Map<String, Value>) -> Vec<(&'v String, &'v Value)> {
        let place = |name: &str| self.places.get(&dotted(path, name)).copied().unwrap_or(usize::MAX);
        let mut all: Vec<_> = map.iter().collect();
        all.sort_by(|(a, _), (b, _)| match place(a).cmp(&place(b)) {
            Ordering::Equal => a.cmp(b),
            order => order,
        });
        all
    }
}

fn note_places(path: &str, table: &DeTable<'_>, places: &mut HashMap<String, usize>) {
    for (name, value) in table {
        let own = dotted(path, name.get_ref());
        if let DeValue::Table(inner) = value.get_ref() {
            note_places(&own, inner, places);
        }
        places.insert(own, name.span().start);
    }
}

fn dotted(path: &str, name: &str) -> String {
    if path.is_empty() { name.into() } else { format!("{path}.{name}") }
}

/// A key of TOML, bare where it may be.
fn key(name: &str) -> String {
    let is_bare = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if is_bare { name.into() } else { string(name) }
}

/// A string of TOML. JSON's escapes are all valid in it; TOML has DEL escaped too.
fn string(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

fn line(name: &str, value: &Value) -> String {
    format!("{} = {}\n", key(name), inline(value))
}

/// A value as TOML in one line.
pub fn inline(value: &Value) -> String {
    match value {
        Value::String(text) => string(text),
        Value::Array(list) => format!("[{}]", list.iter().map(inline).collect::<Vec<_>>().join(", ")),
        Value::Object(map) if map.is_empty() => "{}".into(),
        Value::Object(map) => {
            let pairs: Vec<_> = map.iter().map(|(name, value)| format!("{} = {}", key(name), inline(value))).collect();
            format!("{{ {} }}", pairs.join(", "))
        }
        // A merge leaves no null, and TOML has none.
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

/// `target` changed by a JSON merge patch (RFC 7386).
#[must_use]
pub fn merge(target: Value, patch: &Value) -> Value {
    let Value::Object(patch) = patch else { return patch.clone() };
    let mut out = match target {
        Value::Object(map) => map,
        _ => Map::new(),
    };
    for (name, value) in patch {
        let before = out.remove(name).unwrap_or(Value::Null);
        if !value.is_null() {
            out.insert(name.clone(), merge(before, value));
        }
    }
    Value::Object(out)
}

/// The merge patch that makes `new` of `old`. Neither has a null.
pub fn difference(old: &Value, new: &Value) -> Value {
    let (Value::Object(before), Value::Object(after)) = (old, new) else { return new.clone() };
    let gone = before.keys().filter(|name| !after.contains_key(*name)).map(|name| (name.clone(), Value::Null));
    let changed = after.iter().filter(|(name, value)| before.get(*name) != Some(value));
    let changed =
        changed.map(|(name, value)| (name.clone(), difference(before.get(name).unwrap_or(&Value::Null), value)));
    Value::Object(gone.chain(changed).collect())
}

/// Whether there is a null anywhere in it, which TOML cannot say.
pub fn has_null(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.iter().any(has_null),
        Value::Object(map) => map.values().any(has_null),
        _ => false,
    }
}

/// Whether a list in it has a null: elsewhere it removes a key.
pub fn has_null_in_list(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.iter().any(has_null),
        Value::Object(map) => map.values().any(has_null_in_list),
        _ => false,
    }
}

/// The value at a dotted path.
pub fn at<'v>(root: &'v Value, path: &str) -> Option<&'v Value> {
    path.split('.').try_fold(root, |value, name| value.get(name))
}

/// The dotted paths of what a patch sets or removes.
pub fn paths(patch: &Value) -> Vec<String> {
    fn walk(path: &str, value: &Value, out: &mut Vec<String>) {
        match value {
            Value::Object(map) if !map.is_empty() => {
                map.iter().for_each(|(name, value)| walk(&dotted(path, name), value, out));
            }
            _ if path.is_empty() => {}
            _ => out.push(path.into()),
        }
    }
    let mut out = Vec::new();
    walk("", patch, &mut out);
    out
}

/// A number that differs for configurations that differ: a hash of the text.
pub fn revision(text: &str) -> String {
    format!("{:016x}", fnv1a(text.bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tombolo_testing::Random;

    #[test]
    fn a_patch_is_merged_as_in_the_appendix_of_the_rfc() {
        // RFC 7386, appendix A.
        for (target, patch, result) in [
            (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"})),
            (json!({"a": "b"}), json!({"a": null}), json!({})),
            (json!({"a": "b", "b": "c"}), json!({"a": null}), json!({"b": "c"})),
            (json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "c"}), json!({"a": ["b"]}), json!({"a": ["b"]})),
            (json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}})),
            (json!({"a": [{"b": "c"}]}), json!({"a": [1]}), json!({"a": [1]})),
            (json!(["a", "b"]), json!(["c", "d"]), json!(["c", "d"])),
            (json!({"a": "b"}), json!(["c"]), json!(["c"])),
            (json!({"a": "foo"}), json!(null), json!(null)),
            (json!({"a": "foo"}), json!("bar"), json!("bar")),
            (json!([1, 2]), json!({"a": "b", "c": null}), json!({"a": "b"})),
            (json!({}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}})),
        ] {
            assert_eq!(merge(target.clone(), &patch), result, "{target} with {patch}");
        }
    }

    /// A document without nulls, of a few names, so that two of them have much in common.
    fn any(random: &mut Random, depth: usize) -> Value {
        match random.below(if depth == 0 { 3 } else { 6 }) {
            0 => json!(random.below(3)),
            1 => json!("x"),
            2 => json!([1, random.below(2)]),
            _ => {
                let names: Vec<_> = (0..random.below(4)).map(|_| ["a", "b", "c", "d"][random.index(4)]).collect();
                Value::Object(names.into_iter().map(|name| (name.into(), any(random, depth - 1))).collect())
            }
        }
    }

    #[test]
    fn a_difference_makes_the_new_of_the_old() {
        let mut random = Random::seeded();
        for _ in 0..5000 {
            let wrap = |value: Value| json!({"top": value});
            let (old, new) = (wrap(any(&mut random, 3)), wrap(any(&mut random, 3)));
            let patch = difference(&old, &new);
            assert_eq!(merge(old.clone(), &patch), new, "{old} to {new} by {patch}");
            assert_eq!(difference(&new, &new), json!({}));
        }
    }

    #[test]
    fn a_document_is_written_as_the_file_that_it_was_read_from() {
        let text = "\
name = \"demo\"

[network.wide]
subnet = \"10.9.0.0/24\"
dns = [\"192.0.2.1\", \"192.0.2.2\"]

[network.lan]
mtu = 1400

[port.web]
kind = \"stream\"
rate = { receive = \"1G\", send = \"100M\" }

[[forward]]
listen = \"127.0.0.1:8080\"
to = \"web:80\"

[[forward]]
listen = \"[::1]:8080\"
to = \"web:80\"
";
        let document = Document::read(text).unwrap();
        assert_eq!(document.text(), text, "networks stay in their order");
        let root = merge(
            document.root.clone(),
            &json!({"network": {"a": {}}, "port": {"web": {"rate": null, "mac": "x\u{7f}\"\n"}}}),
        );
        let changed = document.with(root.clone());
        assert_eq!(Document::read(&changed.text()).unwrap().root, root, "{}", changed.text());
        assert!(changed.text().find("[network.a]") > changed.text().find("[network.lan]"), "what is new comes last");
        assert_eq!(Document::read("name = "), None);
        let empty = document.with(json!({"name": "d", "span": {}}));
        assert_eq!(empty.text(), "name = \"d\"\n\n[span]\n", "a section may mean something by being there");
        // What is no section is written too, so that it is complained about.
        let odd =
            document.with(json!({"network": {"mtu": 9000, "lan": {"odd key": true}}, "forward": [], "rule": [1]}));
        assert_eq!(Document::read(&odd.text()).unwrap().root, odd.root, "{}", odd.text());
    }

    #[test]
    fn what_a_patch_changes_is_named_by_dotted_paths() {
        let patch =
            json!({"network": {"lan": {"uplink": "kernel", "dns": null}}, "forward": [{"a": 1}], "cell": {"b": {}}});
        assert_eq!(paths(&patch), ["cell.b", "forward", "network.lan.dns", "network.lan.uplink"]);
        assert_eq!(paths(&json!({})), Vec::<String>::new());
        assert_eq!(at(&patch, "network.lan.uplink"), Some(&json!("kernel")));
        assert_eq!(at(&patch, "network.lan.uplink.more"), None);
        assert!(has_null_in_list(&json!({"rule": [{"from": null}]})) && !has_null_in_list(&patch));
        assert_ne!(revision("a"), revision("b"));
    }
}
