//! Complaints about a fabric file, and the text they are shown in.

use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{fmt, io};

/// What has to change for a complaint to be met.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Of {
    /// What the file says.
    #[default]
    File,
    /// What this machine has.
    Machine,
}

impl Of {
    /// As in reports.
    pub fn word(self) -> &'static str {
        match self {
            Of::File => "file",
            Of::Machine => "machine",
        }
    }
}

/// One complaint. Lines and columns count from 1; columns are in characters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// Line of the value or key complained about; 0 where it is not in the file.
    pub line: usize,
    /// Column where that begins.
    pub column: usize,
    /// Dotted path of the key, empty for a fault of TOML's syntax outside any key.
    pub key: String,
    /// What would have been right.
    pub expected: String,
    /// What the file has there instead.
    pub found: String,
    /// A near name, or what to do.
    pub hint: Option<String>,
    /// What has to change.
    pub of: Of,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // What was added while the fabric ran has no place in the file.
        match self.line {
            0 => write!(f, " ")?,
            line => write!(f, "{line}:{}: ", self.column)?,
        }
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

/// Why a fabric file, or an addition to one, was refused. Nothing has been started when one of
/// these is returned.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum FileError {
    /// The file could not be read.
    #[error("reading the fabric file {}: {source}{}", path.display(), remedy(path, source))]
    Read {
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file, or what was to be added to a running fabric, was read and has faults; all are
    /// listed, one a line.
    #[error("{}", list(path, problems, *part))]
    Faulty {
        /// The file's path, as shown before each line.
        path: PathBuf,
        /// In order of their place in the file; never empty.
        problems: Vec<Problem>,
        part: Part,
    },
}

/// What a text is that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A whole fabric file.
    File,
    /// An addition to a running fabric.
    Addition,
    /// A change of a running fabric.
    Change,
    /// What a file that is right needs of this machine.
    Machine,
    /// A whole fabric file, and what its sections without faults need of this machine.
    Both,
}

/// What to do about a file that could not be read.
fn remedy(path: &Path, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::NotFound => "; give its path, or write one (docs/fabric-file.md)".into(),
        io::ErrorKind::IsADirectory => {
            format!("; give the path of a file, such as {}", path.join("tombolo.toml").display())
        }
        io::ErrorKind::PermissionDenied => "; change its mode or owner, or run this as a user who may".into(),
        _ => String::new(),
    }
}

/// The text of the fabric file at `path`.
///
/// # Errors
/// If it cannot be read, or is no text.
pub fn text_of(path: &Path) -> Result<String, FileError> {
    let bytes = std::fs::read(path).map_err(|source| FileError::Read { path: path.into(), source })?;
    String::from_utf8(bytes).map_err(|error| {
        let (good, rest) = error.as_bytes().split_at(error.utf8_error().valid_up_to());
        let (line, column) = Complaints::new(&String::from_utf8_lossy(good)).place(good.len());
        let found = rest.first().map_or_else(String::new, |byte| format!("the byte {byte:#04x}"));
        let hint = Some("save it as UTF-8".into());
        let problem =
            Problem { line, column, key: String::new(), expected: "text in UTF-8".into(), found, hint, of: Of::File };
        FileError::Faulty { path: path.into(), problems: vec![problem], part: Part::File }
    })
}

fn list(path: &std::path::Path, problems: &[Problem], part: Part) -> String {
    let mut out = String::new();
    for problem in problems {
        out.push_str(&format!("{}:{problem}\n", path.display()));
    }
    let s = if problems.len() == 1 { "" } else { "s" };
    let outcome = match part {
        Part::File => "in the fabric file; nothing was started",
        Part::Addition => "in the addition; nothing was added",
        Part::Change => "in the change; nothing was changed",
        Part::Machine => "on this machine; nothing was done",
        Part::Both => "in the fabric file and on this machine; nothing was changed",
    };
    out.push_str(&format!("{} fault{s} {outcome}", problems.len()));
    out
}

/// Turns byte offsets into lines and columns and gathers complaints: of each fault its root alone.
///
/// A key gets a default value if it could not be read, or if a misspelt one was found in its place.
/// A conflict with that default is no fault of the file. So reading notes what is in doubt, and the
/// check of the whole file reports nothing that depends on it. The user fixes the root fault, and
/// the next run reports the rest, if there is any.
pub(super) struct Complaints<'a> {
    text: &'a str,
    list: Vec<Problem>,
    /// Dotted paths of keys whose value is not the file's.
    doubts: HashSet<String>,
    /// Sections that were not taken, by word and name. An empty word is any word, an empty name any
    /// name.
    refused: Vec<(String, String)>,
    /// The text is no TOML: what seems to be missing may stand in what could not be read.
    pub(super) broken: bool,
}

/// `section.key`; the key alone in the head of the file, the section alone for no key.
pub(super) fn dotted(section: &str, key: &str) -> String {
    let dot = if section.is_empty() || key.is_empty() { "" } else { "." };
    format!("{section}{dot}{key}")
}

impl<'a> Complaints<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, list: Vec::new(), doubts: HashSet::new(), refused: Vec::new(), broken: false }
    }

    /// Notes that the value of this key, as read, is not the file's.
    pub(super) fn doubt(&mut self, section: &str, key: &str) {
        self.doubts.insert(dotted(section, key));
    }

    /// Whether the value of this key, as read, is not the file's.
    pub(super) fn doubted(&self, section: &str, key: &str) -> bool {
        self.doubts.contains(&dotted(section, key))
    }

    /// Whether there was any complaint about this key so far, or its value is in doubt.
    pub(super) fn at_fault(&self, section: &str, key: &str) -> bool {
        let full = dotted(section, key);
        self.doubts.contains(&full) || self.list.iter().any(|p| p.key == full)
    }

    /// Notes that a section `[WORD.NAME]` was not taken. An empty word is any word, an empty name
    /// any name.
    pub(super) fn refuse(&mut self, word: &str, name: &str) {
        self.refused.push((word.into(), name.to_lowercase()));
    }

    /// Whether a section of that word, and of that name where one is given, was not taken.
    pub(super) fn refused(&self, word: &str, name: Option<&str>) -> bool {
        let name = name.map(str::to_lowercase);
        let named = |n: &String| n.is_empty() || name.as_ref().is_none_or(|name| n == name);
        self.refused.iter().any(|(w, n)| (w.is_empty() || w == word) && named(n))
    }

    /// Drops the complaints that a syntax fault explains: those of its lines.
    pub(super) fn explain_by_syntax(&mut self) {
        let lines: HashSet<_> = self.list.iter().filter(|p| p.key.is_empty()).map(|p| p.line).collect();
        self.list.retain(|p| p.key.is_empty() || !lines.contains(&p.line));
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

    /// What the file says there, its lines joined.
    pub(super) fn excerpt(&self, span: &Range<usize>) -> String {
        let text = self.text.get(span.clone()).unwrap_or_default();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
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
        self.list.push(Problem {
            line,
            column,
            key: key.into(),
            expected: expected.into(),
            found: found.into(),
            hint,
            of: Of::File,
        });
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
    nearest(name, known).map(|k| format!("did you mean \"{k}\"?"))
}

/// The known name closest to `name`, if close enough to be meant.
pub fn nearest<'n>(name: &str, known: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let lower = name.to_lowercase();
    known
        .into_iter()
        .map(|k| (strsim::damerau_levenshtein(&lower, &k.to_lowercase()), k))
        .filter(|&(distance, k)| distance <= 1 + k.len().min(name.len()) / 4)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, k)| k)
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
    fn what_is_no_text_has_its_place_and_what_cannot_be_read_its_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.toml");
        std::fs::write(&path, b"name = \"a\"\n# \xc3\xbc \xff\n").unwrap();
        let told = |path: &Path| text_of(path).unwrap_err().to_string();
        let expected =
            format!("{}:2:5: expected text in UTF-8, found the byte 0xff; save it as UTF-8\n", path.display());
        assert!(told(&path).starts_with(&expected), "{}", told(&path));
        let folder = told(dir.path());
        assert!(
            folder.ends_with(&format!(
                "; give the path of a file, such as {}",
                dir.path().join("tombolo.toml").display()
            ))
        );
        assert!(told(&dir.path().join("none")).ends_with("give its path, or write one (docs/fabric-file.md)"));
    }

    #[test]
    fn a_near_name_is_offered_and_a_far_one_is_not() {
        assert_eq!(near("memroy", ["memory", "mac"]).as_deref(), Some("did you mean \"memory\"?"));
        assert_eq!(near("colour", ["memory", "mac"]), None);
        assert_eq!(near("x", ["ip"]), None);
    }
}
