//! The settings file of `--config`: TOML, whose keys are the flags.
//!
//! Reading is strict. All faults are listed with their line and column, what was expected and what
//! was found; nothing starts with a file that has one. What keys mean together is looked at in
//! [`crate::options`], since flags win over the file.

use std::net::SocketAddr;
use std::ops::Range;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::carrier::Peer;
use crate::options::{self, CALLERS, Callers, EXPORT, IMPORT, LEASE_S, NAME, PEER, ROUTER, SharedService};

/// The keys, which are all at the head of the file, and what each expects.
const KEYS: [(&str, &str); 12] = [
    ("fabric", NAME),
    ("machine", NAME),
    ("listen", "ADDRESS:PORT, such as \"192.0.2.1:7447\""),
    ("peer", PEER),
    ("keys", "a folder with ca.pem, MACHINE.pem and MACHINE.key"),
    ("no_tls", "true or false"),
    ("site", NAME),
    ("lease", "a whole number of seconds from 5 to 3600"),
    ("router", ROUTER),
    ("export", EXPORT),
    ("import", IMPORT),
    ("callers", CALLERS),
];

/// Why there are no settings.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error("reading the settings file {}: {source}; docs/span.md has an example", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
    /// Its text has faults, one a line.
    #[error("{}", options::listed(.0))]
    Faulty(Vec<String>),
}

/// A setting, and where it was said: "--listen", or "home.span.toml:3:10: listen".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said<T> {
    /// The setting.
    pub value: T,
    /// The beginning of a complaint about it.
    pub at: String,
}

/// What the file says. `None` is a key that is left out.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "the fields are the flags")]
pub struct File {
    pub fabric: Option<Said<String>>,
    pub machine: Option<Said<String>>,
    pub listen: Option<Said<SocketAddr>>,
    pub peer: Option<Vec<Said<Peer>>>,
    pub keys: Option<Said<PathBuf>>,
    pub no_tls: Option<Said<bool>>,
    pub site: Option<Said<String>>,
    pub lease: Option<Said<u64>>,
    pub router: Option<Vec<Said<Peer>>>,
    pub export: Option<Vec<Said<SharedService>>>,
    pub import: Option<Vec<Said<SharedService>>>,
    pub callers: Option<Said<Callers>>,
}

/// Reads the file at `path`. A relative folder of keys starts where the file is.
///
/// # Errors
/// [`FileError`].
pub fn read(path: &Path) -> Result<File, FileError> {
    let text = std::fs::read_to_string(path).map_err(|source| FileError::Read { path: path.into(), source })?;
    parse(&text, path)
}

/// Reads its text.
fn parse(text: &str, path: &Path) -> Result<File, FileError> {
    let (root, errors) = DeTable::parse_recoverable(text);
    let mut reader = Reader { text, path, faults: Vec::new() };
    for error in &errors {
        let span = error.span().unwrap_or(text.len()..text.len());
        let there = text.get(span.clone()).map(str::trim).filter(|there| !there.is_empty());
        let there = there.and_then(|there| there.lines().next());
        let found = there.map_or_else(|| "the end of it".into(), |there| format!("{there:?}"));
        reader.fault(&span, "", &format!("valid TOML ({})", error.message()), &found, None);
    }
    // A fault of the syntax explains others.
    let file = if errors.is_empty() { reader.file(root.get_ref()) } else { File::default() };
    if reader.faults.is_empty() {
        return Ok(file);
    }
    reader.faults.sort_by_key(|(place, _)| *place);
    Err(FileError::Faulty(reader.faults.into_iter().map(|(_, fault)| fault).collect()))
}

/// What a value is, in the words of a complaint.
fn found(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("the string {text:?}"),
        DeValue::Integer(number) => format!("the number {}", number.as_str()),
        DeValue::Float(number) => format!("the number {}", number.as_str()),
        DeValue::Boolean(value) => value.to_string(),
        DeValue::Datetime(date) => format!("the date {date}"),
        DeValue::Array(list) if list.is_empty() => "an empty list".into(),
        DeValue::Array(_) => "a list".into(),
        DeValue::Table(_) => "a table".into(),
    }
}

/// The known key that is close enough to be meant.
fn near(name: &str) -> Option<String> {
    let lower = name.to_lowercase();
    let known = KEYS.iter().map(|(key, _)| (strsim::damerau_levenshtein(&lower, key), *key));
    let close = known.filter(|(distance, key)| *distance <= 1 + key.len().min(name.len()) / 4);
    close.min_by_key(|(distance, _)| *distance).map(|(_, key)| format!("did you mean \"{key}\"?"))
}

struct Reader<'a> {
    text: &'a str,
    path: &'a Path,
    /// Complaints, by the byte at which they begin.
    faults: Vec<(usize, String)>,
}

impl Reader<'_> {
    /// "FILE:LINE:COLUMN: KEY". Lines and columns count from 1, columns in characters.
    fn at(&self, span: &Range<usize>, key: &str) -> String {
        let mut end = span.start.min(self.text.len());
        while !self.text.is_char_boundary(end) {
            end -= 1;
        }
        let before = &self.text[..end];
        let (line, column) =
            (before.matches('\n').count() + 1, before.rsplit('\n').next().map_or(0, |l| l.chars().count()));
        let colon = if key.is_empty() { "" } else { ": " };
        format!("{}:{line}:{}{colon}{key}", self.path.display(), column + 1)
    }

    fn fault(&mut self, span: &Range<usize>, key: &str, expected: &str, found: &str, hint: Option<String>) {
        let hint = hint.map(|hint| format!("; {hint}")).unwrap_or_default();
        let fault = format!("{}: expected {expected}, found {found}{hint}", self.at(span, key));
        self.faults.push((span.start, fault));
    }

    fn file(&mut self, root: &DeTable<'_>) -> File {
        let mut file = File::default();
        let folder = std::path::absolute(self.path).ok().and_then(|path| path.parent().map(Path::to_path_buf));
        let folder = folder.unwrap_or_default();
        for (key, value) in root {
            let text = |value: &DeValue<'_>| value.as_str().map(str::to_string);
            let name = |value: &DeValue<'_>| options::name(value.as_str()?).ok();
            match key.get_ref().as_ref() {
                "fabric" => file.fabric = self.take("fabric", value, name),
                "machine" => file.machine = self.take("machine", value, name),
                "listen" => file.listen = self.take("listen", value, |value| value.as_str()?.parse().ok()),
                "peer" => file.peer = self.list("peer", value, |text| options::peer(text).ok()),
                "router" => file.router = self.list("router", value, |text| options::router(text).ok()),
                "export" => file.export = self.list("export", value, |text| options::export(text).ok()),
                "import" => file.import = self.list("import", value, |text| options::import(text).ok()),
                "callers" => {
                    let callers = |value: &DeValue<'_>| Callers::from_str(value.as_str()?, false).ok();
                    file.callers = self.take("callers", value, callers);
                }
                "keys" => {
                    let folder =
                        |value: &DeValue<'_>| text(value).filter(|text| !text.is_empty()).map(|text| folder.join(text));
                    file.keys = self.take("keys", value, folder);
                }
                "no_tls" => file.no_tls = self.take("no_tls", value, |value| value.as_bool()),
                "site" => file.site = self.take("site", value, name),
                "lease" => {
                    let seconds = |value: &DeValue<'_>| {
                        let number = value.as_integer()?;
                        u64::from_str_radix(number.as_str(), number.radix())
                            .ok()
                            .filter(|lease| LEASE_S.contains(lease))
                    };
                    file.lease = self.take("lease", value, seconds);
                }
                other => {
                    let names: Vec<_> = KEYS.iter().map(|(key, _)| *key).collect();
                    let expected = format!("one of the keys {}", names.join(", "));
                    let hint = match other {
                        "tls" => Some("without encryption it is no_tls = true".into()),
                        _ => near(other),
                    };
                    self.fault(&key.span(), other, &expected, "an unknown key", hint);
                }
            }
        }
        file
    }

    /// A value that `convert` understands.
    fn take<T>(
        &mut self,
        key: &'static str,
        value: &Spanned<DeValue<'_>>,
        convert: impl Fn(&DeValue<'_>) -> Option<T>,
    ) -> Option<Said<T>> {
        let (span, value) = (value.span(), value.get_ref());
        match convert(value) {
            Some(value) => Some(Said { value, at: self.at(&span, key) }),
            None => {
                let expected = KEYS.iter().find(|(name, _)| *name == key).map_or("", |(_, expected)| *expected);
                self.fault(&span, key, expected, &found(value), None);
                None
            }
        }
    }

    /// A list of texts that `convert` understands, or one.
    fn list<T>(
        &mut self,
        key: &'static str,
        value: &Spanned<DeValue<'_>>,
        convert: impl Fn(&str) -> Option<T>,
    ) -> Option<Vec<Said<T>>> {
        let one = |value: &DeValue<'_>| convert(value.as_str()?);
        match value.get_ref() {
            DeValue::Array(list) => Some(list.iter().filter_map(|value| self.take(key, value, one)).collect()),
            _ => self.take(key, value, one).map(|one| vec![one]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: &str = "/etc/tombolo/home.span.toml";

    fn faults(text: &str) -> Vec<String> {
        match parse(text, Path::new(PLACE)) {
            Err(FileError::Faulty(faults)) => faults,
            other => panic!("{text:?}: {other:?}"),
        }
    }

    #[test]
    fn every_key_is_read_and_a_folder_starts_where_the_file_is() {
        let text = "fabric = \"home\"\nmachine = \"node-1\"\nlisten = \"192.0.2.1:7447\"\n\
            peer = [\"node-2=192.0.2.2:7447\", \"node-3=[2001:db8::3]:7447\"]\nkeys = \"keys\"\nno_tls = false\n\
            site = \"lab\"\nlease = 20\nrouter = \"hub=192.0.2.9:7447\"\nexport = [\"calc\", \"time=node-2,node-3\"]\n\
            import = \"log=node-2\"\ncallers = \"everybody\"\n";
        let file = parse(text, Path::new(PLACE)).unwrap();
        let shared = |service: &str, machines: &[&str]| SharedService {
            service: service.into(),
            machines: machines.iter().map(|name| name.to_string()).collect(),
        };
        let values = |list: Option<Vec<Said<SharedService>>>| {
            list.unwrap().into_iter().map(|said| said.value).collect::<Vec<_>>()
        };
        assert_eq!(values(file.export), [shared("calc", &[]), shared("time", &["node-2", "node-3"])]);
        assert_eq!(values(file.import), [shared("log", &["node-2"])]);
        assert_eq!(file.router.unwrap()[0].value.to_string(), "hub=192.0.2.9:7447");
        assert_eq!(file.callers.unwrap().value, Callers::Everybody);
        assert_eq!(file.fabric, Some(Said { value: "home".into(), at: format!("{PLACE}:1:10: fabric") }));
        assert_eq!(file.machine.unwrap().value, "node-1");
        assert_eq!(file.listen.unwrap().value, "192.0.2.1:7447".parse().unwrap());
        let peers: Vec<_> = file.peer.unwrap().into_iter().map(|peer| peer.value.name).collect();
        assert_eq!(peers, ["node-2", "node-3"]);
        assert_eq!(file.keys.unwrap().value, Path::new("/etc/tombolo/keys"));
        assert_eq!((file.no_tls.unwrap().value, file.site.unwrap().value), (false, "lab".into()));
        assert_eq!(file.lease.unwrap().value, 20);
        let one = parse("peer = \"node-2=192.0.2.2:7447\"\nkeys = \"/srv/keys\"\n", Path::new(PLACE)).unwrap();
        assert_eq!(one.peer.unwrap().len(), 1);
        assert_eq!(one.keys.unwrap().value, Path::new("/srv/keys"), "an absolute folder stays what it is");
    }

    #[test]
    fn each_fault_says_where_it_is_what_was_expected_and_what_was_found() {
        let text = "fabrik = \"home\"\nmachine = \"Node\"\nlisten = \"192.0.2.1\"\npeer = [\"node-2=192.0.2.2:7447\", 7]\n\
            keys = \"\"\nno_tls = \"yes\"\n  lease = 4\n[site]\nname = \"lab\"\n";
        let expected = [
            "1:1: fabrik: expected one of the keys fabric, machine, listen, peer, keys, no_tls, site, lease, router, \
             export, import, callers, found an unknown key; did you mean \"fabric\"?",
            "2:11: machine: expected 1 to 63 of a-z, 0-9 and -, not at the beginning or end, found the string \"Node\"",
            "3:10: listen: expected ADDRESS:PORT, such as \"192.0.2.1:7447\", found the string \"192.0.2.1\"",
            "4:34: peer: expected MACHINE=ADDRESS:PORT such as node-2=192.0.2.2:7447, or MACHINE alone where \
             there is a router, found the number 7",
            "5:8: keys: expected a folder with ca.pem, MACHINE.pem and MACHINE.key, found the string \"\"",
            "6:10: no_tls: expected true or false, found the string \"yes\"",
            "7:11: lease: expected a whole number of seconds from 5 to 3600, found the number 4",
            "8:1: site: expected 1 to 63 of a-z, 0-9 and -, not at the beginning or end, found a table",
        ];
        assert_eq!(faults(text), expected.map(|fault| format!("{PLACE}:{fault}")));
        let expected = [
            "1:10: router: expected MACHINE=ADDRESS:PORT of a router of zenoh, such as hub=192.0.2.9:7447, found the string \
             \"hub\"",
            "2:19: export: expected SERVICE for all machines, or SERVICE=MACHINE,… for some, such as calculator=node-2, \
             found the string \"a/b\"",
            "3:10: import: expected SERVICE=MACHINE,… such as calculator=node-1, found the string \"calc\"",
            "4:11: callers: expected \"owner\" or \"everybody\", found the string \"all\"",
        ];
        let text = "router = \"hub\"\nexport = [\"calc\", \"a/b\"]\nimport = \"calc\"\ncallers = \"all\"\n";
        assert_eq!(faults(text), expected.map(|fault| format!("{PLACE}:{fault}")));
        assert!(faults("peers = []\n")[0].ends_with("did you mean \"peer\"?"));
        assert!(faults("tls = false\n")[0].ends_with("without encryption it is no_tls = true"));
        assert!(!faults("colour = 1\n")[0].contains("did you mean"));
    }

    #[test]
    fn a_text_that_is_no_toml_says_where_it_ends_to_be_one() {
        let found = faults("fabric = \"home\"\nmachine node-1\n");
        assert!(found[0].starts_with(&format!("{PLACE}:2:")) && found[0].contains("expected valid TOML"), "{found:?}");
        // Keys twice are such a fault too.
        assert!(faults("lease = 5\nlease = 6\n")[0].starts_with(&format!("{PLACE}:2:1")));
    }
}
