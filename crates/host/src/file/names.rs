//! The names in a fabric file, for completion at a prompt. Any text is read, also a faulty or
//! half-written one, because completion is used while the file is being edited. Nothing is checked,
//! and no complaint is made.

use toml::de::{DeTable, DeValue};

use super::parse::words::clean_name;
use super::read::integer;

/// Words of sections that are members of networks.
pub(crate) const MEMBERS: [&str; 4] = ["cell", "vm", "tap", "port"];

/// Words of sections with a name, as in `[cell.NAME]`.
const WORDS: [&str; 9] = ["machine", "network", "cell", "vm", "tap", "port", "link", "export", "import"];

/// The name of each section `[WORD.NAME]` that has a valid one, with its word; for a section with
/// `count`, those of its machines.
pub fn names(text: &str) -> Vec<(&'static str, String)> {
    let (root, _) = DeTable::parse_recoverable(text);
    let mut out = Vec::new();
    for word in WORDS {
        let Some(DeValue::Table(sections)) = root.get_ref().get(word).map(|v| v.get_ref()) else { continue };
        for (key, value) in sections {
            let Some((name, section)) = clean_name(key.get_ref()).zip(value.get_ref().as_table()) else { continue };
            match section.get("count").and_then(|count| integer(count.get_ref())) {
                Some(count) => out.extend((1..=count.min(256)).map(|n| (word, format!("{name}-{n}")))),
                None => out.push((word, name)),
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_faulty_file_has_names_all_the_same() {
        let text = "[network.lan]\nsubnet = 7\n[cell.web]\nfrob = 1\n[vm.db]\ncount = 2\n[tap.Up]\n[port.p-1]\n\
                    [link.l]\n[cell]\nx = 3\n[forward]\nlisten =";
        let found = names(text);
        let found: Vec<_> = found.iter().map(|(word, name)| format!("{word}.{name}")).collect();
        assert_eq!(found, ["network.lan", "cell.web", "vm.db-1", "vm.db-2", "port.p-1", "link.l"]);
        assert_eq!(names("cell = 1\nnetwork = []\n"), []);
        assert_eq!(names(&format!("[vm.x]\ncount = {}\n", i64::MAX)).len(), 256);
        assert_eq!(names("\u{0}\u{1b}[[["), []);
    }
}
