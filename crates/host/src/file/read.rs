//! Takes typed values out of one TOML table, remembering where each stood and complaining where one does not fit.

use std::collections::HashMap;
use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::model::Mac;
use super::problem::{Complaints, near};
use super::schema::{self, SectionSchema};

/// Where each key of the file stands, by dotted path.
#[derive(Debug, Default)]
pub(super) struct Spots(HashMap<String, Range<usize>>);

impl Spots {
    /// Whether the file has `section.key`.
    pub(super) fn has(&self, section: &str, key: &str) -> bool {
        self.0.contains_key(&format!("{section}.{key}"))
    }

    /// The span of `section.key`, or of the section, or of the file's head.
    pub(super) fn of(&self, section: &str, key: &str) -> Range<usize> {
        let full = format!("{section}.{key}");
        self.0.get(&full).or_else(|| self.0.get(section)).cloned().unwrap_or(0..0)
    }
}

/// What a value is, in the words of a complaint.
pub(super) fn found(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(s) => format!("the string {s:?}"),
        DeValue::Integer(i) => format!("the number {}", i.as_str()),
        DeValue::Float(f) => format!("the number {}", f.as_str()),
        DeValue::Boolean(b) => b.to_string(),
        DeValue::Datetime(d) => format!("the date {d}"),
        DeValue::Array(a) if a.is_empty() => "an empty list".into(),
        DeValue::Array(_) => "a list".into(),
        DeValue::Table(_) => "a table".into(),
    }
}

/// One table being read against its schema.
pub(super) struct Section<'a, 'i, 'c, 't> {
    /// Dotted path of the table, empty for the head of the file.
    pub(super) path: String,
    schema: &'static SectionSchema,
    table: &'a DeTable<'i>,
    out: &'c mut Complaints<'t>,
    span: Range<usize>,
}

impl<'a, 'i, 'c, 't> Section<'a, 'i, 'c, 't> {
    /// Starts reading; keys that the schema does not know are complained about here. `extra` are keys the caller
    /// reads by itself (sub-tables of the head).
    pub(super) fn open(
        schema_name: &str,
        path: String,
        span: Range<usize>,
        table: &'a DeTable<'i>,
        out: &'c mut Complaints<'t>,
        spots: &'c mut Spots,
        extra: &[&str],
    ) -> Self {
        let schema = schema::section(schema_name);
        spots.0.insert(path.clone(), span.clone());
        for (key, value) in table {
            let name: &str = key.get_ref();
            let known = || schema.keys().map(|k| k.name).chain(extra.iter().copied());
            let full = if path.is_empty() { name.to_string() } else { format!("{path}.{name}") };
            if !known().any(|k| k == name) {
                let names: Vec<_> = known().collect();
                out.say(
                    &key.span(),
                    full,
                    format!("one of the keys {}", names.join(", ")),
                    "an unknown key",
                    near(name, known()),
                );
            } else {
                spots.0.insert(format!("{path}.{name}"), value.span());
            }
        }
        Self { path, schema, table, out, span }
    }

    fn full(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    fn expects(&self, key: &str) -> &'static str {
        let found = self.schema.keys().find(|k| k.name == key);
        found.expect("only keys of the schema are read").expects
    }

    /// The raw value and its span.
    pub(super) fn raw(&self, key: &str) -> Option<(&'a DeValue<'i>, Range<usize>)> {
        debug_assert!(self.schema.keys().any(|k| k.name == key), "{key} is not in the schema");
        self.table.get(key).map(|v| (v.get_ref(), v.span()))
    }

    /// Complains about a key's value with the schema's expectation.
    pub(super) fn wrong(&mut self, key: &str, span: &Range<usize>, found: impl Into<String>, hint: Option<String>) {
        let (full, expects) = (self.full(key), self.expects(key));
        self.out.say(span, full, expects, found, hint);
    }

    /// Complains that a key is missing.
    pub(super) fn missing(&mut self, key: &str) {
        let (full, expects, span) = (self.full(key), self.expects(key), self.span.clone());
        self.out.say(&span, full, expects, "nothing", Some(format!("add {key} = … to this section")));
    }

    /// A value read by `convert`, which says `None` for one that does not fit.
    pub(super) fn take<T>(&mut self, key: &str, convert: impl Fn(&DeValue<'_>) -> Option<T>) -> Option<T> {
        let (value, span) = self.raw(key)?;
        let out = convert(value);
        if out.is_none() {
            self.wrong(key, &span, found(value), why_not(key, value));
        }
        out
    }

    /// A value that is a string read by `convert`.
    pub(super) fn text<T>(&mut self, key: &str, convert: impl Fn(&str) -> Option<T>) -> Option<T> {
        self.take(key, |v| v.as_str().and_then(&convert))
    }

    /// A string that is not empty.
    pub(super) fn string(&mut self, key: &str) -> Option<String> {
        self.text(key, |s| (!s.is_empty()).then(|| s.to_string()))
    }

    /// One of a few words; a near one is hinted.
    pub(super) fn word<T: Copy>(&mut self, key: &str, words: &[(&str, T)]) -> Option<T> {
        let (value, span) = self.raw(key)?;
        let text = value.as_str();
        if let Some(&(_, v)) = text.and_then(|t| words.iter().find(|(w, _)| *w == t)) {
            return Some(v);
        }
        let hint = text.and_then(|t| near(t, words.iter().map(|(w, _)| *w)));
        self.wrong(key, &span, found(value), hint);
        None
    }

    /// A whole number within bounds.
    pub(super) fn number(&mut self, key: &str, from: i64, to: i64) -> Option<i64> {
        self.take(key, |v| integer(v).filter(|n| (from..=to).contains(n)))
    }

    /// True or false.
    pub(super) fn flag(&mut self, key: &str) -> Option<bool> {
        self.take(key, |v| v.as_bool())
    }

    /// A list of strings, or one string where `one` allows it, each read by `convert`.
    pub(super) fn list<T>(&mut self, key: &str, one: bool, convert: impl Fn(&str) -> Option<T>) -> Option<Vec<T>> {
        let (value, span) = self.raw(key)?;
        if let (true, Some(text)) = (one, value.as_str()) {
            let out = convert(text);
            if out.is_none() {
                self.wrong(key, &span, found(value), why_not(key, value));
            }
            return out.map(|v| vec![v]);
        }
        let Some(array) = value.as_array() else {
            self.wrong(key, &span, found(value), None);
            return None;
        };
        let mut out = Vec::new();
        for item in array.iter() {
            match item.get_ref().as_str().and_then(&convert) {
                Some(v) => out.push(v),
                None => {
                    let there = format!("{} in the list", found(item.get_ref()));
                    self.wrong(key, &item.span(), there, why_not(key, item.get_ref()));
                }
            }
        }
        (out.len() == array.len()).then_some(out)
    }
}

/// What is wrong with a value that looks right.
fn why_not(key: &str, value: &DeValue<'_>) -> Option<String> {
    let bytes = Mac::bytes(value.as_str().filter(|_| key == "mac")?)?;
    if bytes == [0; 6] {
        return Some("that is nobody's address".into());
    }
    let even = Mac([bytes[0] & !1, bytes[1], bytes[2], bytes[3], bytes[4], bytes[5]]);
    Some(format!("that is a group address, since its first byte is odd; a station's is even, like {even}"))
}

/// A whole number of TOML, in any radix, with underscores.
pub(super) fn integer(value: &DeValue<'_>) -> Option<i64> {
    let number = value.as_integer()?;
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}
