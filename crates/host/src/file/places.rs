//! Where the keys of a fabric file are, for faults that only the machine shows.

use std::path::{Path, PathBuf};

use super::hosts::Which;
use super::model::Fabric;
use super::parse;
use super::problem::{Complaints, FileError, Part, Problem, dotted};
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
    let text = std::fs::read_to_string(path).map_err(|source| FileError::Read { path: path.into(), source })?;
    let (fabric, spots) = parse::parse_with_spots(&text, path, which)?;
    Ok((fabric, Places { path: path.into(), text, spots }))
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
        Problem { line, column, key: dotted(section, key), expected, found, hint }
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
