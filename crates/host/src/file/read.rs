//! Takes typed values out of one TOML table, remembering where each stood and complaining where one
//! does not fit.

use std::collections::HashMap;
use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::model::Mac;
use super::problem::{Complaints, dotted, near, nearest};
use super::schema::{self, SectionSchema};

/// Where each key of the file is, by dotted path.
#[derive(Debug, Clone, Default)]
pub(super) struct Spots(HashMap<String, Range<usize>>);

impl Spots {
    /// Whether the file has `section.key`.
    pub(super) fn has(&self, section: &str, key: &str) -> bool {
        self.0.contains_key(&dotted(section, key))
    }

    /// The span of `section.key`, or of the section, or of the file's head.
    pub(super) fn of(&self, section: &str, key: &str) -> Range<usize> {
        self.0.get(&dotted(section, key)).or_else(|| self.0.get(section)).cloned().unwrap_or(0..0)
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
    /// Keys that are left out and that a misspelt one of the table means.
    misspelt: Vec<&'a str>,
}

impl<'a, 'i, 'c, 't> Section<'a, 'i, 'c, 't> {
    /// Starts reading; keys that the schema does not know are complained about here. `extra` are
    /// keys the caller reads by itself (sub-tables of the head).
    pub(super) fn open(
        schema_name: &str,
        path: String,
        span: Range<usize>,
        table: &'a DeTable<'i>,
        out: &'c mut Complaints<'t>,
        spots: &'c mut Spots,
        extra: &[&'a str],
    ) -> Self {
        let schema = schema::section(schema_name);
        spots.0.insert(path.clone(), span.clone());
        let mut misspelt = Vec::new();
        let known = || schema.keys().map(|k| k.name).chain(extra.iter().copied());
        for (key, value) in table {
            let name: &str = key.get_ref();
            // What is left of a head that is no TOML, which was told.
            if name.is_empty() && out.broken {
                continue;
            }
            if known().any(|k| k == name) {
                spots.0.insert(dotted(&path, name), value.span());
                continue;
            }
            let names: Vec<_> = known().collect();
            // The unknown key may have been meant for any key that is left out, or for the near
            // one.
            let left_out = || known().filter(|k| !table.contains_key(*k));
            let meant = nearest(name, left_out());
            left_out().filter(|k| meant.is_none_or(|m| m == *k)).for_each(|k| out.doubt(&path, k));
            misspelt.extend(meant);
            let hint = near(name, known()).or_else(|| schema::at_home(name));
            let expected = format!("one of the keys {}", names.join(", "));
            out.say(&key.span(), dotted(&path, name), expected, "an unknown key", hint);
        }
        Self { path, schema, table, out, span, misspelt }
    }

    fn expects(&self, key: &str) -> &'static str {
        let found = self.schema.keys().find(|k| k.name == key);
        found.expect("only keys of the schema are read").expects
    }

    /// Complains about keys that stand where they mean nothing: those that depend on `on`, which
    /// has the value `value`, or `None` where it is not given and has no default.
    pub(super) fn applies(&mut self, on: &str, value: Option<&str>) {
        if self.doubted(on) || self.misspelt.contains(&on) {
            return;
        }
        let conditions = schema::CONDITIONS.iter().filter(|c| c.section == self.schema.name && c.on == on);
        for condition in conditions {
            let fits = value.is_some_and(|v| condition.values.is_empty() || condition.values.contains(&v));
            let Some((there, span)) = self.raw(condition.key).filter(|_| !fits) else { continue };
            let quoted =
                |v: &str| if matches!(v, "true" | "false") { format!("{on} = {v}") } else { format!("{on} = {v:?}") };
            let at = value.map_or_else(|| format!("without `{on}`"), |v| format!("with {}", quoted(v)));
            let place = match condition.values {
                [] => format!("beside `{on}`"),
                values => format!("with {}", values.iter().map(|v| quoted(v)).collect::<Vec<_>>().join(" or ")),
            };
            let key = condition.key;
            let hint = Some(format!("`{key}` means something only {place}; leave it out"));
            self.out.doubt(&self.path, key);
            let expected = format!("no `{key}` {at}");
            self.out.say(&span, dotted(&self.path, key), expected, found(there), hint);
        }
    }

    /// The raw value and its span.
    pub(super) fn raw(&self, key: &str) -> Option<(&'a DeValue<'i>, Range<usize>)> {
        debug_assert!(self.schema.keys().any(|k| k.name == key), "{key} is not in the schema");
        self.table.get(key).map(|v| (v.get_ref(), v.span()))
    }

    /// Whether the section's word is `word`.
    pub(super) fn is_of(&self, word: &str) -> bool {
        self.schema.name == word
    }

    /// Whether sections of this word have such a key at all.
    pub(super) fn has_key(&self, key: &str) -> bool {
        self.schema.keys().any(|k| k.name == key)
    }

    /// Complains about a key's value with the schema's expectation.
    pub(super) fn wrong(&mut self, key: &str, span: &Range<usize>, found: impl Into<String>, hint: Option<String>) {
        let expects = self.expects(key);
        self.out.doubt(&self.path, key);
        self.out.say(span, dotted(&self.path, key), expects, found, hint);
    }

    /// Complains that a key is missing, unless it is there misspelt or may be where the text is no
    /// TOML.
    pub(super) fn missing(&mut self, key: &str) {
        self.out.doubt(&self.path, key);
        if self.misspelt.contains(&key) || self.out.broken {
            return;
        }
        let hint = Some(format!("add {key} = … to this section"));
        self.out.say(&self.span, dotted(&self.path, key), self.expects(key), "nothing", hint);
    }

    /// Notes that the value that a key has is not the file's.
    pub(super) fn doubt(&mut self, key: &str) {
        self.out.doubt(&self.path, key);
    }

    /// Whether the value that a key has is not the file's.
    pub(super) fn doubted(&self, key: &str) -> bool {
        self.out.doubted(&self.path, key)
    }

    /// Whether a section of that word was not taken.
    pub(super) fn refused(&self, word: &str) -> bool {
        self.out.refused(word, None)
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

    /// As [`Section::text`]; `hint` is asked what was meant by a string that `convert` refuses.
    pub(super) fn text_or<T>(
        &mut self,
        key: &str,
        convert: impl Fn(&str) -> Option<T>,
        hint: impl Fn(&str) -> Option<String>,
    ) -> Option<T> {
        let (value, span) = self.raw(key)?;
        let text = value.as_str();
        if let Some(read) = text.and_then(&convert) {
            return Some(read);
        }
        let hint = text.and_then(hint).or_else(|| why_not(key, value));
        self.wrong(key, &span, found(value), hint);
        None
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
        return Some("an address that no host can have".into());
    }
    let even = Mac([bytes[0] & !1, bytes[1], bytes[2], bytes[3], bytes[4], bytes[5]]);
    Some(format!("that is a group address, since its first byte is odd; a station's is even, like {even}"))
}

/// A whole number of TOML, in any radix, with underscores.
pub(super) fn integer(value: &DeValue<'_>) -> Option<i64> {
    let number = value.as_integer()?;
    i64::from_str_radix(number.as_str(), number.radix()).ok()
}
