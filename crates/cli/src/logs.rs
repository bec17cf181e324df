//! `tombolo logs`: the daemon's log and the consoles of the machines, in the order of time.
//!
//! It reads the files of the runtime folder, and of a fabric that is down those that `down` kept.
//! So it works without a daemon, and costs one that runs nothing. The times of a console's lines
//! are those that the daemon noted ([`tombolo_host::stamps`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde::Serialize;
use tombolo_host::api::client::{Client, ClientError};
use tombolo_host::{console, log, moment, rundir, stamps};

use crate::events::since;
use crate::exit::{Exit, Failure};
use crate::number;
use crate::out;
use crate::select::Select;

/// How often followed files are looked at.
const LOOK: Duration = Duration::from_millis(200);
/// A last line without an end is printed as it is once nothing has come for so many looks: a
/// prompt.
const PROMPT_LOOKS: u32 = 5;
/// Most bytes of a console that are held back until they have a time.
const HELD_BYTES: usize = 64 << 10;
/// Whose bridge a log is of, after the name of the section.
const BRIDGED: [&str; 3] = [".link", ".export", ".import"];
/// The daemon's own log, among names of members.
const DAEMON: &str = "daemon";

const EXAMPLES: &str = "\
MEMBER is a machine (its console), a machine or uplink whose QEMU or passt complained, the bridge of a link, export or import
(calls.link), or `daemon` (the daemon's own log).
Times are in UTC; a console's are those at which the daemon saw the line, a tenth of a second later at most.

Examples:
  tombolo logs                      everything, in the order of time
  tombolo logs -F web db            two consoles, as they are written
  tombolo logs --since 10m daemon   what the daemon said in the last ten minutes";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Logs {
    /// Only these [default: all]
    #[arg(value_name = "MEMBER")]
    members: Vec<String>,
    /// Print further lines as they are written, until the fabric is down
    #[arg(short = 'F', long)]
    follow: bool,
    /// Only lines from then on: 90s, 10m, 2h or 1d ago, a day (2026-11-21), or a time in UTC
    /// (21:43, 2026-11-21T21:43:05Z)
    #[arg(long, value_name = "WHEN", allow_hyphen_values = true)]
    since: Option<String>,
    /// Only the last N of the lines that there are
    #[arg(short = 'n', long, value_name = "N", value_parser = number::count, allow_hyphen_values = true)]
    last: Option<u64>,
    /// Print each line as JSON
    #[arg(long)]
    json: bool,
}

/// A line of one of the files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct LogLine {
    time: String,
    unix_ms: u64,
    member: String,
    /// "daemon", "console", or the program that complained: "qemu", "passt", or "bridge" for what
    /// passes calls on.
    source: &'static str,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Daemon,
    Console,
    Complaints,
}

/// A file that is read on.
#[derive(Debug)]
struct LogFile {
    path: PathBuf,
    member: String,
    kind: Kind,
    offset: u64,
    inode: u64,
    /// When the file of a console's times was made: a machine that starts again writes the same
    /// file from its beginning, and may have written as much as before, but its times are a new
    /// file.
    born: Option<SystemTime>,
    /// A line whose end has not come yet, and where it begins.
    pending: Vec<u8>,
    silent: u32,
    /// The time of the line before, for those without one.
    last_ms: u64,
}

impl LogFile {
    fn new(path: PathBuf, member: &str, kind: Kind) -> LogFile {
        let member = member.to_string();
        LogFile { path, member, kind, offset: 0, inode: 0, born: None, pending: vec![], silent: 0, last_ms: 0 }
    }

    /// The lines that came since the last call. With `all`, also a last one without an end.
    fn read(&mut self, all: bool) -> Vec<LogLine> {
        let Ok(mut file) = File::open(&self.path) else { return vec![] };
        let Ok(meta) = file.metadata() else { return vec![] };
        let times = (self.kind == Kind::Console).then(|| std::fs::metadata(stamps::path_of(&self.path)).ok()).flatten();
        let born = times.and_then(|times| times.created().ok()).or(self.born);
        let again = self.born.is_some() && born != self.born;
        self.born = born;
        // Another file of that name, or one that begins again.
        if meta.ino() != self.inode || meta.len() < self.offset || again {
            (self.offset, self.inode) = (0, meta.ino());
            self.pending.clear();
        }
        // A console that was cut begins with a hole.
        let start = console::start(&file);
        if start > self.offset {
            self.offset = start;
            self.pending.clear();
        }
        let begin = self.offset - self.pending.len() as u64;
        let mut bytes = std::mem::take(&mut self.pending);
        let fresh = match file.seek(SeekFrom::Start(self.offset)).and_then(|_| file.read_to_end(&mut bytes)) {
            Ok(fresh) => fresh as u64,
            Err(_) => 0,
        };
        self.offset += fresh;
        self.silent = if fresh == 0 { self.silent + 1 } else { 0 };
        let marks = if self.kind == Kind::Console && !bytes.is_empty() { stamps::load(&self.path) } else { vec![] };
        // What the daemon has not seen yet is held back until it has a time, but not for long.
        let held =
            !all && self.silent < PROMPT_LOOKS && bytes.len() < HELD_BYTES && stamps::path_of(&self.path).exists();
        let seen = marks.last().map_or(0, |mark| mark.offset.saturating_sub(begin));
        let ready = if self.kind == Kind::Console && held { bytes.len().min(seen as usize) } else { bytes.len() };
        let whole = bytes[..ready].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let changed = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        let changed_ms = changed.map_or(0, |since| since.as_millis() as u64);
        let mut out = Vec::new();
        let mut at = begin;
        for line in bytes[..whole].split_inclusive(|byte| *byte == b'\n') {
            self.take(line, at, &marks, changed_ms, &mut out);
            at += line.len() as u64;
        }
        let rest = &bytes[whole..];
        if !rest.is_empty() && (all || self.silent == PROMPT_LOOKS) {
            self.take(rest, at, &marks, changed_ms, &mut out);
        } else {
            self.pending = rest.to_vec();
        }
        out
    }

    fn take(&mut self, line: &[u8], at: u64, marks: &[stamps::Mark], changed_ms: u64, out: &mut Vec<LogLine>) {
        let text = String::from_utf8_lossy(line);
        let mut text = text.trim_end_matches(['\n', '\r']);
        let unix_ms = match self.kind {
            Kind::Daemon => {
                let stamped = text.split_once(' ').and_then(|(time, rest)| Some((moment::parse_rfc3339(time)?, rest)));
                // A report of several lines has one time.
                let (ms, rest) = stamped.unwrap_or((self.last_ms, text));
                text = rest;
                ms
            }
            Kind::Console => stamps::time_of(marks, at).unwrap_or(changed_ms),
            Kind::Complaints => changed_ms,
        };
        self.last_ms = unix_ms;
        // A terminal would show what follows the last carriage return.
        let text = text.rsplit('\r').next().unwrap_or(text);
        if text.trim().is_empty() {
            return;
        }
        let source = match self.kind {
            Kind::Daemon => DAEMON,
            Kind::Console => "console",
            Kind::Complaints if self.member.starts_with("uplink-") => "passt",
            // Names have no dots: this is of a section, such as "sums.link".
            Kind::Complaints if BRIDGED.iter().any(|kind| self.member.ends_with(kind)) => "bridge",
            Kind::Complaints => "qemu",
        };
        // The daemon has escaped what it wrote.
        let text = if self.kind == Kind::Daemon { text.to_string() } else { log::shown(&plain(text), log::LINE_CHARS) };
        out.push(LogLine { time: moment::rfc3339(unix_ms), unix_ms, member: self.member.clone(), source, text });
    }
}

/// A line without the escape sequences that colour it or move the cursor (ECMA-48: CSI, and OSC up
/// to its end).
fn plain(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        match (c, rest.peek()) {
            ('\u{1b}', Some('[')) => {
                rest.next();
                rest.by_ref().find(|c| ('\u{40}'..='\u{7e}').contains(c));
            }
            ('\u{1b}', Some(']')) => {
                rest.by_ref().find(|c| matches!(c, '\u{7}' | '\u{5c}'));
            }
            ('\u{1b}', Some('(' | ')')) => {
                rest.nth(1);
            }
            ('\u{1b}', Some('7' | '8' | 'M' | '=' | '>' | 'c')) => {
                rest.next();
            }
            _ => out.push(c),
        }
    }
    out
}

/// The files of a folder, by what they are of.
fn files(folder: &Path) -> BTreeMap<(String, Kind, String), PathBuf> {
    let mut out = BTreeMap::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let (member, kind) = match (name.as_str(), name.strip_suffix(".console"), name.strip_suffix(".log")) {
            ("log" | "log.1", ..) => (DAEMON, Kind::Daemon),
            (_, Some(member), _) => (member, Kind::Console),
            (_, _, Some(member)) => (member, Kind::Complaints),
            _ => continue,
        };
        out.insert((member.to_string(), kind, name.clone()), entry.path());
    }
    out
}

/// What is followed.
struct Followed {
    folder: PathBuf,
    members: Vec<String>,
    sources: BTreeMap<(String, Kind, String), LogFile>,
}

impl Followed {
    /// Takes files in that are new: a machine was added, or a fabric starts.
    fn look(&mut self) {
        for (key, path) in files(&self.folder) {
            if !self.members.is_empty() && !self.members.contains(&key.0) {
                continue;
            }
            let source = || LogFile::new(path, &key.0, key.1);
            self.sources.entry(key.clone()).or_insert_with(source);
        }
    }

    /// All lines that came since the last call, in the order of time.
    fn read(&mut self, all: bool) -> Vec<LogLine> {
        let mut lines: Vec<LogLine> = self.sources.values_mut().flat_map(|source| source.read(all)).collect();
        // Stable: lines of one file stay in their order.
        lines.sort_by_key(|line| line.unix_ms);
        lines
    }
}

impl Logs {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let from_ms = since(self.since.as_deref())?;
        let root = rundir::runtime_root()?;
        let name = select.name(&root)?;
        let runtime = root.join(&name);
        let is_there = runtime.join("owner.json").exists();
        let folder = if is_there { runtime.clone() } else { rundir::state_folder(&name).join("logs") };
        let known = files(&folder);
        if known.is_empty() {
            return Err(ClientError::not_running(name.clone(), rundir::api_socket(&root, &name)).into());
        }
        let names: std::collections::BTreeSet<&str> = known.keys().map(|(member, ..)| member.as_str()).collect();
        for member in &self.members {
            if !names.contains(member.as_str()) {
                let there = names.into_iter().collect::<Vec<_>>().join(", ");
                return Err(Failure::failed(format!("nothing is logged of \"{member}\"; there are: {there}")));
            }
        }
        let mut followed = Followed { folder, members: self.members.clone(), sources: BTreeMap::new() };
        followed.look();
        let mut lines = followed.read(!self.follow);
        lines.retain(|line| line.unix_ms >= from_ms);
        let skip = self.last.map_or(0, |n| lines.len().saturating_sub(usize::try_from(n).unwrap_or(usize::MAX)));
        let width = names_width(&followed);
        self.print(&lines[skip..], width)?;
        if !self.follow || !is_there {
            return Ok(Exit::Done);
        }
        let mut client = Client::new(&name, &rundir::api_socket(&root, &name))?;
        loop {
            if client.sleep(LOOK)? {
                return Ok(Exit::Done);
            }
            // Looked at before the last read, so that nothing of its end is missed.
            let is_over = rundir::daemon_of(&runtime).is_none();
            followed.look();
            let width = names_width(&followed);
            self.print(&followed.read(is_over), width)?;
            if is_over {
                out::tell!("tombolo: {name} is down");
                return Ok(Exit::Done);
            }
        }
    }

    fn print(&self, lines: &[LogLine], width: usize) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        for line in lines {
            if self.json {
                let text = serde_json::to_string(line).map_err(|e| Failure::failed(e.to_string()))?;
                writeln!(out, "{text}")?;
            } else {
                writeln!(out, "{}  {:<width$}  {}", line.time, line.member, line.text)?;
            }
        }
        out.flush()?;
        Ok(())
    }
}

fn names_width(followed: &Followed) -> usize {
    followed.sources.keys().map(|(member, ..)| member.chars().count()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn followed(folder: &Path, members: &[&str]) -> Followed {
        let members = members.iter().map(|m| m.to_string()).collect();
        let mut out = Followed { folder: folder.into(), members, sources: BTreeMap::new() };
        out.look();
        out
    }

    fn texts(lines: &[LogLine]) -> Vec<String> {
        lines.iter().map(|l| format!("{} {}", l.member, l.text)).collect()
    }

    #[test]
    fn lines_of_all_members_are_merged_by_their_times() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
        write("log.1", "1970-01-01T00:00:01Z first\n");
        write("log", "1970-01-01T00:00:03Z web: failed\n    | the cause\n1970-01-01T00:00:07Z last\n");
        write("web.console", "boot\r\n\r\nlogin: \u{1b}[31mred\u{1b}[0m\u{1b}]0;title\u{7}\u{1b}Z\nend");
        write("web.console.times", "2000 6\n5000 60\n");
        write("owner.json", "{}");
        let lines = followed(dir.path(), &[]).read(true);
        let expected = [
            "daemon first",
            "web boot",
            "daemon web: failed",
            "daemon     | the cause",
            "web login: red\\u{1b}Z",
            "web end",
            "daemon last",
        ];
        assert_eq!(texts(&lines), expected);
        assert_eq!(lines[1].time, "1970-01-01T00:00:02.000Z");
        assert_eq!(texts(&followed(dir.path(), &["web"]).read(true)).len(), 3);
    }

    #[test]
    fn a_complaint_has_the_program_that_wrote_it() {
        let dir = tempfile::tempdir().unwrap();
        let written = ["web.log", "uplink-lan.log", "sums.link.log", "mean.export.log", "mean.import.log", "log"];
        written.iter().for_each(|name| std::fs::write(dir.path().join(name), "no\n").unwrap());
        let mut found: Vec<_> =
            followed(dir.path(), &[]).read(true).into_iter().map(|l| (l.member, l.source)).collect();
        found.sort();
        let expected = [
            ("daemon", "daemon"),
            ("mean.export", "bridge"),
            ("mean.import", "bridge"),
            ("sums.link", "bridge"),
            ("uplink-lan", "passt"),
            ("web", "qemu"),
        ];
        assert_eq!(found, expected.map(|(member, source)| (member.to_string(), source)));
    }

    #[test]
    fn what_is_followed_comes_once_and_a_prompt_comes_too() {
        let dir = tempfile::tempdir().unwrap();
        let console = dir.path().join("web.console");
        let write = |text: &str| {
            let mut file = std::fs::OpenOptions::new().append(true).create(true).open(&console).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        write("one\ntw");
        let mut all = followed(dir.path(), &[]);
        assert_eq!(texts(&all.read(false)), ["web one"]);
        write("o\n# ");
        let lines = all.read(false);
        assert_eq!(texts(&lines), ["web two"]);
        assert!(moment::unix_ms() - lines[0].unix_ms < 60_000, "without a mark it is the file's own time");
        let prompt: Vec<_> = (0..10).flat_map(|_| texts(&all.read(false))).collect();
        assert_eq!(prompt, ["web # "]);
        // The machine starts again and writes as much as before into the same file.
        std::fs::write(dir.path().join("web.console.times"), "5 11\n").unwrap();
        assert!(all.read(false).is_empty());
        std::fs::remove_file(dir.path().join("web.console.times")).unwrap();
        std::fs::write(&console, "uno\ndos\n# a\n").unwrap();
        std::fs::write(dir.path().join("web.console.times"), "9 12\n").unwrap();
        assert_eq!(texts(&all.read(false)), ["web uno", "web dos", "web # a"]);
        std::fs::remove_file(dir.path().join("web.console.times")).unwrap();
        // It does so again, as a new file, and another is added.
        std::fs::remove_file(&console).unwrap();
        write("again\n");
        std::fs::write(dir.path().join("db.log"), "no disk\n").unwrap();
        all.look();
        let mut lines = texts(&all.read(false));
        lines.sort();
        assert_eq!(lines, ["db no disk", "web again"]);
    }
}
