//! When a console grew: its lines carry no time, so the daemon keeps, beside the file, until where
//! it had been written when.
//!
//! # Files
//! `NAME.console.times` has a line `MILLISECONDS OFFSET` for each look at which the console had
//! grown: all before that offset was there at that time (since 1970, UTC). A byte of a console
//! keeps its offset ([`console`](mod@crate::console)), so the two files need no lock. A console
//! without the file, or one that grew while no daemon looked, has times that are too late, never
//! too early.
//!
//! # Limits
//! A console that grows without a pause is looked at ten times a second. [`MARKS`] are kept of
//! each: beyond that every second one of the older half goes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use tokio::io::unix::AsyncFd;
use tokio::sync::Mutex;

use crate::fabric::Running;
use crate::moment;
use crate::rundir;

/// Marks that are kept of one console.
pub const MARKS: usize = 4096;
/// After a look, how long until the next one.
const PAUSE: Duration = Duration::from_millis(100);
/// How often is looked where the kernel does not tell of changes.
const LOOK: Duration = Duration::from_secs(2);

/// Until where a console had been written when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Milliseconds since 1970.
    pub unix_ms: u64,
    /// Bytes that there were.
    pub offset: u64,
}

/// The file of a console's marks.
pub fn path_of(console: &Path) -> PathBuf {
    let mut path = console.as_os_str().to_owned();
    path.push(".times");
    path.into()
}

/// The marks of a console, in order; lines that cannot be read are left out.
pub fn load(console: &Path) -> Vec<Mark> {
    let text = std::fs::read_to_string(path_of(console)).unwrap_or_default();
    let mut out: Vec<Mark> = Vec::new();
    for line in text.lines() {
        let Some((ms, offset)) = line.split_once(' ') else { continue };
        let (Ok(unix_ms), Ok(offset)) = (ms.parse(), offset.parse()) else { continue };
        if out.last().is_none_or(|last| last.offset < offset) {
            out.push(Mark { unix_ms, offset });
        }
    }
    out
}

/// When the byte at `offset` was there; `None` for one that came after the last look.
pub fn time_of(marks: &[Mark], offset: u64) -> Option<u64> {
    marks.get(marks.partition_point(|mark| mark.offset <= offset)).map(|mark| mark.unix_ms)
}

/// Copies the marks of a console whose first `cut` bytes are not copied.
pub(crate) fn copy(from: &Path, to: &Path, cut: u64) -> io::Result<()> {
    let marks = load(from);
    let moved = marks.iter().filter(|mark| mark.offset > cut).map(|m| Mark { offset: m.offset - cut, ..*m });
    rundir::private_file(&path_of(to))?.write_all(lines(moved).as_bytes())
}

fn lines(marks: impl Iterator<Item = Mark>) -> String {
    marks.map(|mark| format!("{} {}\n", mark.unix_ms, mark.offset)).collect()
}

/// The marks of one console, and their file.
#[derive(Debug)]
struct Stamps {
    console: PathBuf,
    marks: Vec<Mark>,
}

impl Stamps {
    /// Takes note of how long the console is now.
    fn look(&mut self, now_ms: u64) -> io::Result<()> {
        let length = std::fs::metadata(&self.console)?.len();
        let path = path_of(&self.console);
        let last = self.marks.last().map_or(0, |mark| mark.offset);
        // A machine that starts again has a new console, and no marks.
        if length < last || !path.exists() {
            self.marks.clear();
        } else if length == last {
            return Ok(());
        }
        if length == 0 {
            return rundir::private_file(&path).map(drop);
        }
        let mark = Mark { unix_ms: now_ms, offset: length };
        self.marks.push(mark);
        if self.marks.len() > MARKS {
            let half = MARKS / 2;
            let kept = |(n, _): &(usize, &Mark)| *n >= half || n % 2 == 1;
            self.marks = self.marks.iter().enumerate().filter(kept).map(|(_, mark)| *mark).collect();
        } else if self.marks.len() > 1 {
            let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(&path)?;
            return file.write_all(lines([mark].into_iter()).as_bytes());
        }
        rundir::private_file(&path)?.write_all(lines(self.marks.iter().copied()).as_bytes())
    }
}

/// Tells of files of a folder that are written.
struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    fn new() -> Option<Watch> {
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).ok()?;
        #[expect(
            deprecated,
            reason = "unsound for a type that gives another descriptor each time; an OwnedFd does not"
        )]
        AsyncFd::new(fd).ok().map(Watch)
    }

    fn look_at(&self, folder: &Path) -> bool {
        let flags = WatchFlags::MODIFY | WatchFlags::CREATE | WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF;
        inotify::add_watch(self.0.get_ref(), folder, flags).is_ok()
    }

    /// Names of consoles that were written since the last call, and whether the folder is still
    /// there. `None` if the kernel may have left some out.
    async fn written(&self) -> (Option<BTreeSet<String>>, bool) {
        let Ok(mut guard) = self.0.readable().await else { return std::future::pending().await };
        let mut buffer = [MaybeUninit::uninit(); 16 << 10];
        let mut reader = inotify::Reader::new(self.0.get_ref(), &mut buffer);
        let (mut names, mut all, mut there) = (BTreeSet::new(), true, true);
        while let Ok(event) = reader.next() {
            let gone = ReadFlags::IGNORED | ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF;
            there &= !event.events().intersects(gone);
            all &= !event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            let name = event.file_name().and_then(|name| name.to_str().ok());
            names.extend(name.filter(|name| name.ends_with(".console")).map(str::to_string));
        }
        guard.clear_ready();
        (all.then_some(names), there)
    }
}

/// Names of all consoles of a runtime folder.
fn consoles(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|e| e.file_name().into_string().ok()).filter(|name| name.ends_with(".console")).collect()
}

/// Keeps the marks of all consoles of a runtime folder, for as long as its fabric is there.
pub(crate) async fn keep(folder: PathBuf, fabric: Weak<Mutex<Running>>) {
    let mut known: BTreeMap<String, Stamps> = BTreeMap::new();
    let watch = Watch::new();
    let mut is_watched = watch.as_ref().is_some_and(|watch| watch.look_at(&folder));
    let mut names = consoles(&folder);
    while fabric.strong_count() > 0 {
        for name in &names {
            let console = folder.join(name);
            let stamps = known.entry(name.clone()).or_insert_with(|| Stamps { marks: load(&console), console });
            // On a full disk the times of what comes now are those of the next mark.
            let _ = stamps.look(moment::unix_ms());
        }
        known.retain(|_, stamps| stamps.console.exists());
        tokio::time::sleep(PAUSE).await;
        names = match &watch {
            Some(watch) if is_watched => {
                let (written, is_there) = watch.written().await;
                is_watched = is_there;
                written.unwrap_or_else(|| consoles(&folder))
            }
            _ => {
                tokio::time::sleep(LOOK).await;
                is_watched = watch.as_ref().is_some_and(|watch| watch.look_at(&folder));
                consoles(&folder)
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_time_of_the_look_that_saw_it() {
        let dir = tempfile::tempdir().unwrap();
        let console = dir.path().join("web.console");
        let write = |text: &str| {
            OpenOptions::new().append(true).create(true).open(&console).unwrap().write_all(text.as_bytes()).unwrap();
        };
        let mut stamps = Stamps { console: console.clone(), marks: vec![] };
        write("one\n");
        stamps.look(1000).unwrap();
        stamps.look(2000).unwrap();
        write("two\nthree\n");
        stamps.look(3000).unwrap();
        let marks = load(&console);
        assert_eq!(marks, stamps.marks);
        let times = [0, 3, 4, 8, 14].map(|at| time_of(&marks, at));
        assert_eq!(times, [Some(1000), Some(1000), Some(3000), Some(3000), None]);
        // A daemon that comes later goes on; a machine that starts again begins afresh, even if it
        // has printed as much.
        let mut next = Stamps { marks: load(&console), console: console.clone() };
        write("four\n");
        next.look(4000).unwrap();
        assert_eq!(load(&console).len(), 3);
        copy(&console, &dir.path().join("kept.console"), 6).unwrap();
        let kept = load(&dir.path().join("kept.console"));
        assert_eq!(kept, [Mark { unix_ms: 3000, offset: 8 }, Mark { unix_ms: 4000, offset: 13 }]);
        crate::console::make(dir.path(), "web").unwrap();
        write("another that is longer than the one before\n");
        next.look(5000).unwrap();
        assert_eq!(load(&console), [Mark { unix_ms: 5000, offset: 43 }]);
    }

    #[test]
    fn marks_are_bounded_and_the_newest_are_all_there() {
        let dir = tempfile::tempdir().unwrap();
        let console = dir.path().join("web.console");
        let mut stamps = Stamps { console: console.clone(), marks: vec![] };
        let mut file = OpenOptions::new().append(true).create(true).open(&console).unwrap();
        for n in 1..=3 * MARKS as u64 {
            file.write_all(b"x").unwrap();
            stamps.look(n).unwrap();
        }
        let marks = load(&console);
        assert!(marks.len() <= MARKS && marks == stamps.marks, "{}", marks.len());
        let last = 3 * MARKS as u64;
        assert!((last - 1000..last).all(|at| time_of(&marks, at) == Some(at + 1)));
        assert!(time_of(&marks, 0).unwrap() < last / 2);
    }
}
