//! Complaints about a fabric file, and the text they are shown in.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

/// One complaint. Lines and columns count from 1; columns are in characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Line of the value or key complained about.
    pub line: usize,
    /// Column of it.
    pub column: usize,
    /// Dotted path of the key, empty for a fault of TOML's syntax outside any key.
    pub key: String,
    /// What would have been right.
    pub expected: String,
    /// What stands there.
    pub found: String,
    /// A near name, or what to do.
    pub hint: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: ", self.line, self.column)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        write!(f, "expected {}, found {}", self.expected, self.found)?;
        if let Some(hint) = &self.hint {
            write!(f, "; {hint}")?;
        }
        Ok(())
    }
}

/// Why a fabric file, or an addition to one, was refused. Nothing has been started when one of these is returned.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file could not be read.
    #[error("reading the fabric file {}: {source}; give its path, or write one (docs/fabric-file.md)", path.display())]
    Read {
        /// The path tried.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file, or what was to be added to a running fabric, was read and has faults; all are listed, one a line.
    #[error("{}", list(path, problems, *addition))]
    Faulty {
        /// The file's path, as shown before each line.
        path: PathBuf,
        /// In order of their place in the file; never empty.
        problems: Vec<Problem>,
        /// Whether this was an addition to a fabric that stands.
        addition: bool,
    },
}

fn list(path: &std::path::Path, problems: &[Problem], addition: bool) -> String {
    let mut out = String::new();
    for problem in problems {
        out.push_str(&format!("{}:{problem}\n", path.display()));
    }
    let s = if problems.len() == 1 { "" } else { "s" };
    let outcome =
        if addition { "in the addition; nothing was added" } else { "in the fabric file; nothing was started" };
    out.push_str(&format!("{} fault{s} {outcome}", problems.len()));
    out
}

/// Turns byte offsets into lines and columns and gathers complaints.
pub(super) struct Complaints<'a> {
    text: &'a str,
    pub(super) list: Vec<Problem>,
}

impl<'a> Complaints<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, list: Vec::new() }
    }

    /// Line and column, both from 1, of a byte offset. Offsets past the end mean the end.
    pub(super) fn place(&self, offset: usize) -> (usize, usize) {
        let mut end = offset.min(self.text.len());
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        let before = &self.text[..end];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        (line, column)
    }

    pub(super) fn say(
        &mut self,
        span: &Range<usize>,
        key: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
        hint: Option<String>,
    ) {
        let (line, column) = self.place(span.start);
        self.list.push(Problem { line, column, key: key.into(), expected: expected.into(), found: found.into(), hint });
    }

    /// The complaints in the order of their places, doubles removed.
    pub(super) fn finish(mut self) -> Vec<Problem> {
        self.list.sort_by(|a, b| (a.line, a.column, &a.key).cmp(&(b.line, b.column, &b.key)));
        self.list.dedup();
        self.list
    }
}

/// The known name closest to `name`, if close enough to be meant, as a hint.
pub(super) fn near<'n>(name: &str, known: impl IntoIterator<Item = &'n str>) -> Option<String> {
    let lower = name.to_lowercase();
    known
        .into_iter()
        .map(|k| (strsim::damerau_levenshtein(&lower, &k.to_lowercase()), k))
        .filter(|&(distance, k)| distance <= 1 + k.len().min(name.len()) / 4)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, k)| format!("did you mean \"{k}\"?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_count_characters_from_one() {
        let c = Complaints::new("a = 1\nü = 2\n");
        assert_eq!(c.place(0), (1, 1));
        assert_eq!(c.place(6), (2, 1));
        assert_eq!(c.place(9), (2, 3), "a letter of two bytes is one column");
        assert_eq!(c.place(999), (3, 1));
    }

    #[test]
    fn a_near_name_is_offered_and_a_far_one_is_not() {
        assert_eq!(near("memroy", ["memory", "mac"]).as_deref(), Some("did you mean \"memory\"?"));
        assert_eq!(near("colour", ["memory", "mac"]), None);
        assert_eq!(near("x", ["ip"]), None);
    }
}
