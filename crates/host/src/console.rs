//! A machine's console: a file that holds what it printed, and a pipe that takes what is typed.
//!
//! QEMU has them as its standard streams. Neither loses or repeats a byte, or lets QEMU wait: a
//! file takes everything at once, and the pipe keeps what was typed until the guest reads it.
//! QEMU's own pair of a socket and a log would repeat in the log each byte that the socket had no
//! room for.
//!
//! A domain of Xen prints into such a file through its `xl`. Input goes to the terminal of
//! xenconsoled, which XenStore names.
//!
//! # Invariants
//! * Both outlive the daemon. QEMU holds both ends of the pipe, so its input never ends, and the
//!   next daemon opens it by its name.
//! * A byte of the file keeps its offset. What is cut off leaves a hole, so that nothing is lost
//!   that comes meanwhile, and who follows goes on where it was.
//!
//! # Limits
//! Of output the last 512 KiB to 1 MiB are kept (`KEPT_BYTES`), in whole pages; the pipe holds 64
//! KiB of what the guest has not read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::log::shown;
use rustix::fs::{CWD, FallocateFlags, FileType, Mode, fallocate, mknodat, seek};

/// Bytes of output that are kept: beyond this the older half is cut off.
pub(crate) const KEPT_BYTES: u64 = 1 << 20;
/// Holes are of whole pages.
const PAGE_BYTES: u64 = 4096;
/// Characters of a line that a report of a machine's end shows.
const TAIL_CHARS: usize = 200;
/// As much of a file's end is searched for its last lines.
const TAIL_BYTES: u64 = 64 << 10;

/// The file that holds what a machine printed.
pub fn log_path(runtime: &Path, machine: &str) -> PathBuf {
    runtime.join(format!("{machine}.console"))
}

/// The pipe that takes what is typed at a machine's console.
pub fn tty_path(runtime: &Path, machine: &str) -> PathBuf {
    runtime.join(format!("{machine}.tty"))
}

/// What a machine that starts gets as standard input and output; what an earlier one left is gone.
pub(crate) fn make(runtime: &Path, machine: &str) -> io::Result<(File, File)> {
    let tty = tty_path(runtime, machine);
    match std::fs::remove_file(&tty) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => mknodat(CWD, &tty, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?,
    }
    let input = OpenOptions::new().read(true).write(true).open(&tty)?;
    Ok((input, make_output(runtime, machine)?))
}

/// What a machine that starts gets as standard output, where its console takes input elsewhere.
pub(crate) fn make_output(runtime: &Path, machine: &str) -> io::Result<File> {
    let log = log_path(runtime, machine);
    // Those of an earlier one; see `stamps`. One that stays is seen to be of a longer console.
    let _ = std::fs::remove_file(crate::stamps::path_of(&log));
    crate::rundir::private_file(&log)?;
    OpenOptions::new().append(true).open(&log)
}

/// The output of a machine that goes on, for another process to write to.
pub(crate) fn continue_output(runtime: &Path, machine: &str) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(log_path(runtime, machine))
}

/// Where a console begins that has been cut, and 0 for one that has not.
pub fn start(log: &File) -> u64 {
    // An empty file has no data anywhere.
    seek(log, rustix::fs::SeekFrom::Data(0)).unwrap_or(0)
}

/// Cuts the older half off a console that has grown too long.
pub(crate) fn trim(path: &Path) -> io::Result<()> {
    let log = OpenOptions::new().write(true).open(path)?;
    let len = log.metadata()?.len();
    if len - start(&log) <= KEPT_BYTES {
        return Ok(());
    }
    let cut = (len - KEPT_BYTES / 2) / PAGE_BYTES * PAGE_BYTES;
    Ok(fallocate(&log, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, cut)?)
}

/// The last lines of a file, escaped and cut.
pub(crate) fn tail(path: &Path, lines: usize) -> Vec<String> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES)))?;
        let mut out = Vec::new();
        file.take(TAIL_BYTES).read_to_end(&mut out)?;
        Ok(out)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all = text.lines().rev().map(|l| l.trim_end_matches('\r')).filter(|l| !l.trim().is_empty());
    // What a guest prints is not for the terminal on which its end is reported.
    let mut last: Vec<String> = all.take(lines).map(|l| shown(l, TAIL_CHARS)).collect();
    last.reverse();
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_machine_types_and_prints_by_names_that_the_next_daemon_knows() {
        let dir = tempfile::tempdir().unwrap();
        for round in 0..2 {
            let (mut input, mut output) = make(dir.path(), "web").unwrap();
            // What was typed stays when its writer goes; more than what was written now would be
            // what an earlier machine left.
            OpenOptions::new().write(true).open(tty_path(dir.path(), "web")).unwrap().write_all(b"hello").unwrap();
            if round == 1 {
                let mut typed = [0; 16];
                assert_eq!(input.read(&mut typed).unwrap(), 5);
                assert_eq!(&typed[..5], b"hello");
            }
            output.write_all(b"boot\n").unwrap();
            assert_eq!(std::fs::read(log_path(dir.path(), "web")).unwrap(), b"boot\n");
        }
    }

    #[test]
    fn a_tail_is_the_last_lines_escaped_and_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        std::fs::write(&path, "one\ntwo\r\n\n\u{1b}[31mthree\n").unwrap();
        assert_eq!(tail(&path, 2), ["two", "\\u{1b}[31mthree"]);
        std::fs::write(&path, "x".repeat(10_000)).unwrap();
        assert_eq!(tail(&path, 2)[0].chars().count(), TAIL_CHARS + 1);
        assert!(tail(&dir.path().join("absent"), 2).is_empty());
    }

    #[test]
    fn a_console_is_trimmed_from_its_start_and_keeps_its_offsets() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c");
        trim(&path).unwrap_err();
        let mut log = File::create_new(&path).unwrap();
        assert_eq!(start(&log), 0);
        log.write_all(&vec![b'x'; KEPT_BYTES as usize]).unwrap();
        trim(&path).unwrap();
        assert_eq!(start(&log), 0);
        log.seek(SeekFrom::End(0)).unwrap();
        log.write_all(b"the end").unwrap();
        trim(&path).unwrap();
        let all = std::fs::read(&path).unwrap();
        assert_eq!(all.len() as u64, KEPT_BYTES + 7);
        assert!(all.ends_with(b"xthe end"));
        let begins = start(&log);
        assert_eq!(begins, KEPT_BYTES / 2);
        assert_eq!((all[begins as usize - 1], all[begins as usize]), (0, b'x'));
    }
}
