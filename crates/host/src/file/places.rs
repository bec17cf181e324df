//! Where the keys of a fabric file are, for faults that only the machine shows.

use std::path::{Path, PathBuf};

use super::hosts::Which;
use super::model::Fabric;
use super::parse;
use super::problem::{Complaints, FileError, Of, Part, Problem, dotted, text_of};
use super::read::Spots;

/// The text of a fabric file with the places of its keys.
#[derive(Debug)]
pub struct Places {
    path: PathBuf,
    text: String,
    spots: Spots,
}

/// Reads and checks the file at `path`, as [`parse::load_on`] does, and keeps the places of its
/// keys.
///
/// # Errors
/// All faults of the file.
pub fn load_with_places(path: &Path, which: Which<'_>) -> Result<(Fabric, Places), FileError> {
    parse_with_places(text_of(path)?, path, which)
}

/// As [`load_with_places`], of a text that was read already.
///
/// # Errors
/// All its faults.
pub fn parse_with_places(text: String, path: &Path, which: Which<'_>) -> Result<(Fabric, Places), FileError> {
    let (fabric, spots) = parse::parse_with_spots(&text, path, which)?;
    Ok((fabric, Places { path: path.into(), text, spots }))
}

/// What could be read of a file that has faults.
#[derive(Debug)]
pub struct Readable {
    /// Without the sections, or with other values for the keys, that are at fault.
    pub fabric: Fabric,
    /// Where its keys are.
    pub places: Places,
    /// The keys that are at fault.
    faults: Vec<String>,
}

impl Readable {
    /// `None` where the faults leave open what the rest means: the syntax of the file, its name,
    /// its machines.
    pub fn of(text: &str, path: &Path, which: Which<'_>) -> Option<Readable> {
        let (read, problems) = parse::parse_partly(text, path, which);
        let (fabric, spots) = read.filter(|(fabric, _)| fabric.here.as_ref().is_none_or(|here| here.is_chosen))?;
        let faults: Vec<String> = problems.into_iter().map(|problem| problem.key).collect();
        let of_all = |key: &String| ["", "name", "machine", "span"].contains(&key.split('.').next().unwrap_or(key));
        let places = Places { path: path.into(), text: text.into(), spots };
        (!faults.iter().any(of_all)).then_some(Readable { fabric, places, faults })
    }

    /// Whether a section, or all of its kind, is at fault.
    pub fn doubts(&self, section: &str) -> bool {
        // The port of a network's tunnel is of its section.
        let network = section.strip_prefix("port.").and_then(|name| name.strip_prefix(parse::SPAN));
        let own = network.map_or_else(|| section.to_string(), |network| format!("network.{network}"));
        let is_of = |key: &String| {
            let rest = key.strip_prefix(&own);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.')) || own.split('.').next() == Some(key)
        };
        self.faults.iter().any(is_of)
    }
}

impl Places {
    /// Of a text that is at no place, such as what was added to a running fabric.
    pub fn none(path: &Path) -> Places {
        Places { path: path.into(), text: String::new(), spots: Spots::default() }
    }

    /// A problem at `section.key`; line 0 where the file has no such section.
    pub fn problem(
        &self,
        (section, key): (&str, &str),
        expected: String,
        found: String,
        hint: Option<String>,
    ) -> Problem {
        // The port of a tunnel that the file has as `span`.
        let network = section.strip_prefix("port.").and_then(|name| name.strip_prefix(parse::SPAN));
        let network = network.map(|network| format!("network.{network}"));
        if let Some(network) = network.filter(|at| !self.spots.has(section, "") && self.spots.has(at, "span")) {
            return self.problem((&network, "span"), format!("{expected} as its {key}"), found, hint);
        }
        // The first disk of a machine may be that of its list.
        let key = if key == "disk" && !self.spots.has(section, key) && self.spots.has(section, "disks") {
            "disks"
        } else {
            key
        };
        let known = self.spots.has(section, "") || self.spots.has(section, key);
        let place = |offset| Complaints::new(&self.text).place(offset);
        let (line, column) = if known { place(self.spots.of(section, key).start) } else { (0, 0) };
        Problem { line, column, key: dotted(section, key), expected, found, hint, of: Of::Machine }
    }

    /// All of them as one error, in the order of their places.
    pub fn error(&self, mut problems: Vec<Problem>) -> FileError {
        problems.sort_by(|a, b| (a.line, a.column, &a.key).cmp(&(b.line, b.column, &b.key)));
        problems.dedup();
        FileError::Faulty { path: self.path.clone(), problems, part: Part::Machine }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_has_the_place_of_its_key_or_else_of_its_section() {
        let text = "name = \"x\"\n[network.lan]\n  mtu = 1400\n[tap.t]\n";
        let path = Path::new("t.toml");
        let (_, spots) = parse::parse_with_spots(text, path, Which::This).unwrap();
        let places = Places { path: path.into(), text: text.into(), spots };
        let at = |section, key| {
            let problem = places.problem((section, key), "a".into(), "b".into(), None);
            (problem.line, problem.key)
        };
        assert_eq!(at("network.lan", "mtu"), (3, "network.lan.mtu".into()));
        assert_eq!(at("tap.t", "device"), (4, "tap.t.device".into()), "a key with its default");
        assert_eq!(at("tap.added", "device"), (0, "tap.added.device".into()));
        let error = places.error(vec![places.problem(("tap.added", "device"), "a".into(), "b".into(), None)]);
        assert_eq!(
            error.to_string(),
            "t.toml: tap.added.device: expected a, found b\n1 fault on this machine; nothing was done"
        );
    }
}
