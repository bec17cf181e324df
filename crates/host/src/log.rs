//! What a fabric writes for people to read: escaped, cut, bounded, and kept after its end.
//!
//! Purpose: a guest decides what its console and the complaints of its QEMU say, and how much. This
//! module keeps that from a terminal, from the disk and from the daemon's own words.
//!
//! # Invariants
//! - The daemon's log has at most [`LOG_BYTES`] and one predecessor of that size, `log.1`.
//! - A line has at most [`LINE_CHARS`] characters and none that a terminal obeys ([`shown`]).
//! - After `down` the logs of the last two runs are kept in the state folder, `logs` and `logs.1`,
//!   each of at most [`KEPT_BYTES`] (`keep`).

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::console;
use crate::rundir::{self, RunDirError};
use crate::stamps;

/// Bytes of the daemon's log; beyond this it becomes `log.1`, and a new one is begun.
pub const LOG_BYTES: u64 = 4 << 20;
/// Characters of a line of a log or a report.
pub const LINE_CHARS: usize = 1024;
/// Bytes that are kept of a run that has ended.
pub const KEPT_BYTES: u64 = 16 << 20;

/// A text that others may have chosen, for a terminal or a log: control characters and those that
/// change the direction of text are escaped (`\u{1b}`), and all beyond `chars` characters is cut
/// off and replaced by "…".
pub fn shown(text: &str, chars: usize) -> String {
    let mut out = String::new();
    let mut left = chars;
    for c in text.chars() {
        if left == 0 {
            out.push('…');
            break;
        }
        left -= 1;
        let hidden = matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
        match c {
            '\t' => out.push(' '),
            c if c.is_control() || hidden => out.extend(c.escape_unicode()),
            c => out.push(c),
        }
    }
    out
}

/// A log that is rotated.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    file: File,
    limit: u64,
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

impl Log {
    /// Goes on with the log at `path`.
    ///
    /// # Errors
    /// The system's.
    pub fn open(path: &Path) -> io::Result<Log> {
        Ok(Log { path: path.into(), file: open(path)?, limit: LOG_BYTES })
    }

    /// Writes a message of one or more lines, each escaped and cut; the first begins with `head`,
    /// which is taken as it is. Whether [`Log::file`] is another one now.
    ///
    /// # Errors
    /// The system's: the disk is full.
    pub fn write(&mut self, head: &str, message: &str) -> io::Result<bool> {
        let mut text = String::from(head);
        for (n, line) in message.lines().enumerate() {
            if n > 0 {
                text.push('\n');
            }
            text.push_str(&shown(line, LINE_CHARS));
        }
        text.push('\n');
        // Panics and children write to it, too.
        let there = self.file.metadata()?;
        // The file was deleted: what is written there is never read. Without its folder it is
        // opened again later.
        let is_deleted = there.nlink() == 0 && self.reopen();
        let bytes = if is_deleted { 0 } else { there.len() };
        let full = bytes > 0 && bytes + text.len() as u64 > self.limit;
        if full {
            fs::rename(&self.path, self.path.with_extension("1"))?;
            self.file = open(&self.path)?;
        }
        self.file.write_all(text.as_bytes())?;
        Ok(full || is_deleted)
    }

    fn reopen(&mut self) -> bool {
        open(&self.path).map(|file| self.file = file).is_ok()
    }

    /// The file that is written now, for a panic's words.
    pub fn file(&self) -> &File {
        &self.file
    }
}

/// Whether a file of a runtime folder is a log.
fn is_log(name: &str) -> bool {
    matches!(name, "log" | "log.1") || name.ends_with(".console") || name.ends_with(".log")
}

/// Copies the logs of a runtime folder into `logs` of the state folder, where those of the run
/// before become `logs.1`. Of a file that is longer than its share the end is kept.
pub(crate) fn keep(runtime: &Path, state: &Path) -> Result<(), RunDirError> {
    let entries = fs::read_dir(runtime).map_err(rundir::system("looking into", runtime))?;
    let mut logs: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| is_log(&name_of(p))).collect();
    logs.retain(|path| fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() > 0));
    if logs.is_empty() {
        return Ok(());
    }
    logs.sort();
    let (now, before) = (state.join("logs"), state.join("logs.1"));
    rundir::make_dir(state)?;
    if now.exists() {
        let _ = fs::remove_dir_all(&before);
        fs::rename(&now, &before).map_err(rundir::system("renaming", &now))?;
    }
    rundir::make_dir(&now)?;
    let share = KEPT_BYTES / logs.len() as u64;
    for log in &logs {
        let to = now.join(name_of(log));
        let cut = copy_end(log, &to, share).map_err(rundir::system("keeping the log", &to))?;
        if stamps::path_of(log).exists() {
            stamps::copy(log, &to, cut).map_err(rundir::system("keeping the times of", &to))?;
        }
    }
    Ok(())
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Where the copy begins.
fn copy_end(from: &Path, to: &Path, limit: u64) -> io::Result<u64> {
    let mut file = File::open(from)?;
    let len = file.metadata()?.len();
    // Where a console was cut there is a hole.
    let start = console::start(&file).max(len.saturating_sub(limit));
    file.seek(SeekFrom::Start(start))?;
    io::copy(&mut file.take(limit), &mut rundir::private_file(to)?)?;
    Ok(start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_a_terminal_would_obey_is_escaped_and_long_lines_are_cut() {
        assert_eq!(shown("plain ünïcode\ttab", 100), "plain ünïcode tab");
        assert_eq!(shown("\x1b[2J\r\n\u{9b}31m\u{7f}", 100), "\\u{1b}[2J\\u{d}\\u{a}\\u{9b}31m\\u{7f}");
        assert_eq!(shown("a\u{202e}b\u{200b}\u{feff}", 100), "a\\u{202e}b\\u{200b}\\u{feff}");
        assert_eq!(shown("abcdef", 3), "abc…");
        assert_eq!(shown("abc", 3), "abc");
    }

    #[test]
    fn a_log_is_rotated_once_and_its_lines_are_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = Log::open(&path).unwrap();
        log.limit = 64 << 10;
        let long = "y".repeat(100_000);
        for n in 0..1000 {
            log.write("now ", &format!("{n} \x1b]0;title\x07\n    | {long}")).unwrap();
        }
        let (now, before) = (fs::read_to_string(&path).unwrap(), fs::read_to_string(dir.path().join("log.1")).unwrap());
        assert!(now.len() as u64 <= log.limit && before.len() as u64 <= log.limit, "{} {}", now.len(), before.len());
        assert!(now.ends_with("…\n") && now.contains("now 999 \\u{1b}]0;title\\u{7}\n    | yyy"));
        assert!(!now.contains('\x1b') && !before.contains('\x1b'));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        // A daemon that comes later goes on with the same file.
        Log::open(&path).unwrap().write("", "more").unwrap();
        assert!(fs::read_to_string(&path).unwrap().ends_with("…\nmore\n"));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_log_that_was_deleted_is_begun_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = Log::open(&path).unwrap();
        assert!(!log.write("", "one").unwrap());
        fs::remove_file(&path).unwrap();
        assert!(log.write("", "two").unwrap(), "standard error has to follow");
        assert!(!log.write("", "three").unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "two\nthree\n");
        fs::remove_dir_all(dir.path()).unwrap();
        assert!(!log.write("", "nowhere").unwrap());
    }

    #[test]
    fn logs_of_the_last_two_runs_are_kept() {
        let (runtime, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let state = state.path().join("demo");
        for run in 0..4 {
            fs::write(runtime.path().join("log"), format!("run {run}")).unwrap();
            fs::write(runtime.path().join("web.console"), vec![b'0' + run; KEPT_BYTES as usize]).unwrap();
            fs::write(runtime.path().join("web.log"), "").unwrap();
            fs::write(runtime.path().join("owner.json"), "{}").unwrap();
            keep(runtime.path(), &state).unwrap();
        }
        let names = |folder: &str| {
            let mut names: Vec<_> =
                fs::read_dir(state.join(folder)).unwrap().map(|e| name_of(&e.unwrap().path())).collect();
            names.sort();
            names
        };
        assert_eq!(fs::read_to_string(state.join("logs/log")).unwrap(), "run 3");
        assert_eq!(fs::read_to_string(state.join("logs.1/log")).unwrap(), "run 2");
        assert_eq!(names("logs"), ["log", "web.console"]);
        assert_eq!(names(""), ["logs", "logs.1"]);
        assert_eq!(fs::metadata(state.join("logs/web.console")).unwrap().len(), KEPT_BYTES / 2);
        assert_eq!(fs::metadata(state.join("logs")).unwrap().permissions().mode() & 0o777, 0o700);
    }
}
