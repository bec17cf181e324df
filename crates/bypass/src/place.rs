//! Where the bypass of a network namespace is kept: pins, owner record, locks.
//!
//! Links, programs and maps live as long as a name refers to them. The names are a folder of pins
//! in our own bpffs under the runtime directory. So traffic keeps flowing when all of our processes
//! are gone, and the next command finds everything by the folder's name, which is the namespace's
//! number. The owner record is beside it.
//!
//! ```text
//! RUNTIME/bypass/             the folder itself is locked (flock) while something is attached or detached; the lock ends with its holder
//! RUNTIME/bypass/bpf/         a bpffs; gone with the last namespace's bypass
//! RUNTIME/bypass/bpf/ID/      pins: map_*, prog_*, link_*, qdisc_*
//! RUNTIME/bypass/ID.json      the owner record
//! RUNTIME/bypass/ID.rules     which firewall rules judge each frame, as they were read last
//! RUNTIME/bypass/ID.keeper    held by the controller while it runs; its number
//! RUNTIME/bypass/ID.capture   held by a capture while it runs
//! ```

use crate::object::TCX_IN;
use crate::rules::Reading;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// BPF_FS_MAGIC.
const BPFFS: u64 = 0xcafe_4a11;
/// Raised when a record or a map changes its meaning.
const VERSION: u32 = 6;
/// How long a command waits for one other that attaches or detaches.
const WAITING: Duration = Duration::from_secs(60);
/// Of the time for one process that holds the lock, how many times so long the lock is waited for
/// where it goes from one to the next. Of 200 attaches at once the last one waited for more than
/// five minutes on an emulated machine that other programs kept busy.
const MOST_HOLDERS: u32 = 20;
/// How often it looks whether they are done: a part of how long it has waited, so that hundreds of
/// commands that wait do not take the CPU time of the one that works, within these bounds. The
/// least is much shorter than what one takes.
const PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(100);
const PAUSES: u32 = 32;
/// The same for a look at who holds the lock, which costs more.
const LOOK: Duration = Duration::from_secs(1);
const LONGEST_LOOK: Duration = Duration::from_secs(10);
const LOOKS: u32 = 8;
/// How long an unmount is tried again while a process looks into the bpffs.
const UNMOUNTING: Duration = Duration::from_millis(500);

/// Why the place cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum PlaceError {
    /// A file or folder.
    #[error("{path}: {cause}")]
    File {
        path: PathBuf,
        /// What the system said.
        cause: std::io::Error,
    },
    /// No such network namespace.
    #[error(
        "no network namespace {name}: {cause}; `ip netns` lists those with names, and a path such as \
         /proc/PID/ns/net works too"
    )]
    Namespace {
        /// As it was given.
        name: String,
        /// What the system said.
        cause: std::io::Error,
    },
    /// Another command attaches or detaches, and does not come to its end.
    #[error(
        "{path} has been locked for {} s by {holder}, which attaches or detaches interfaces: nothing was done; \
         try again when it has ended, or end it if it hangs", .waited.as_secs()
    )]
    Busy {
        path: PathBuf,
        /// Which process, as far as the kernel tells.
        holder: String,
        /// How long it was waited for.
        waited: Duration,
    },
    /// Pins would go with the calling process.
    #[error(
        "this process has its own mount namespace, as `ip netns exec` creates one: pins made here would be lost with \
         it. Run it outside, with --netns NAME"
    )]
    PrivateMounts,
    /// Another version's record.
    #[error(
        "{path} belongs to another version of tombolo ({found}; this one writes {VERSION}): detach with that \
        version first"
    )]
    Version { path: PathBuf, found: u32 },
    /// A record that is none.
    #[error("{path} is not an owner record: {cause}; remove {pins} and it to give the interfaces back")]
    Record {
        path: PathBuf,
        /// What is wrong with it.
        cause: serde_json::Error,
        /// The folder of pins.
        pins: PathBuf,
    },
}

fn file(path: &Path) -> impl Fn(std::io::Error) -> PlaceError {
    move |cause| PlaceError::File { path: path.into(), cause }
}

/// What the user wants of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Wanted {
    /// What is never slower, by its traffic.
    #[default]
    Auto,
    /// Frames are always taken by tcx.
    Tcx,
    /// Frames are always taken by XDP.
    Xdp,
}

/// An attached interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name when it was attached.
    pub name: String,
    /// Its index when it was attached.
    pub index: u32,
    /// The mode that was asked for.
    pub wanted: Wanted,
    /// Whether filters at its ingress may be left without the frames that are taken.
    #[serde(default)]
    pub past_filters: bool,
    /// Who asked for it: `COMMAND`, or fabrics by their names. It is detached when the last of them
    /// lets it go.
    #[serde(default = "by_command")]
    pub owners: Vec<String>,
}

/// The owner of what was attached by hand. No fabric has such a name.
pub const COMMAND: &str = "COMMAND";

fn by_command() -> Vec<String> {
    vec![COMMAND.into()]
}

/// An interface that is gone. It is attached again if it is soon re-created under its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Awaited {
    /// How it was attached.
    pub interface: Interface,
    /// Since when it is gone, in ns of the monotonic clock.
    pub since_ns: u64,
}

/// Who attached what.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceRecord {
    version: u32,
    /// The namespace as the user named it; empty: the one that the command ran in.
    pub netns: String,
    /// Interfaces that our programs are attached to.
    pub interfaces: Vec<Interface>,
    /// Those that went a short while ago.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub awaited: Vec<Awaited>,
    /// Whether traffic goes the kernel's way again when the controller has been killed.
    #[serde(default)]
    pub needs_keeper: bool,
    /// Whether flows are taken although rules that judge each frame will then judge one per lease.
    #[serde(default)]
    pub skips_judging_rules: bool,
    /// Whether a `detach` has conntrack check no windows in this namespace, for the moment that it
    /// takes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_lenient: bool,
}

/// The place of one namespace's bypass.
#[derive(Clone, Debug)]
pub struct Place {
    root: PathBuf,
    id: u64,
}

/// Where a network namespace is, by name or path.
fn path_of(name: &str) -> PathBuf {
    if name.contains('/') { PathBuf::from(name) } else { Path::new("/run/netns").join(name) }
}

/// Moves the calling thread into a network namespace, by name or path. Threads started later are in
/// it too.
pub fn enter(name: &str) -> Result<(), PlaceError> {
    let path = path_of(name);
    let wrong = |cause: std::io::Error| PlaceError::Namespace { name: name.into(), cause };
    let space = File::open(path).map_err(wrong)?;
    rustix::thread::move_into_link_name_space(space.as_fd(), Some(rustix::thread::LinkNameSpaceType::Network))
        .map_err(|e| wrong(e.into()))
}

impl Place {
    /// The place for the calling thread's network namespace, under the runtime directory.
    pub fn here(runtime: &Path) -> Result<Place, PlaceError> {
        let own = Path::new("/proc/thread-self/ns/net");
        let id = fs::metadata(own).map_err(file(own))?.ino();
        Ok(Place { root: runtime.join("bypass"), id })
    }

    /// The places of all network namespaces under the runtime directory: those with a record or
    /// with pins.
    pub fn all(runtime: &Path) -> Vec<Place> {
        let root = runtime.join("bypass");
        let entries = fs::read_dir(&root).into_iter().flatten().flatten();
        let records = entries.filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok());
        let pins = namespaces(&root.join("bpf")).unwrap_or_default();
        let ids: BTreeSet<u64> = records.chain(pins).collect();
        ids.into_iter().map(|id| Place { root: root.clone(), id }).collect()
    }

    /// A path that leads to the namespace: by the name that was used to attach, another name, or a
    /// process in it. `None` if it has neither.
    pub fn namespace(&self) -> Option<PathBuf> {
        let entries = |folder: &str| fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
        let used = self.record().ok().map(|record| record.netns).filter(|name| !name.is_empty());
        let used = used.map(|name| path_of(&name)).into_iter();
        let own = ["/proc/thread-self/ns/net".into()].into_iter();
        let of_processes = entries("/proc").map(|process| process.join("ns/net"));
        used.chain(own).chain(entries("/run/netns")).chain(of_processes).find(|path| self.is_at(path))
    }

    fn is_at(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|m| m.ino() == self.id)
    }

    /// Whether the name that was used to attach no longer leads to the namespace.
    pub(crate) fn has_lost_its_name(&self) -> bool {
        self.record().is_ok_and(|record| !record.netns.is_empty() && !self.is_at(&path_of(&record.netns)))
    }

    /// Whether the namespace was deleted and only its bypass is still in it. That is so if it has
    /// lost its name, and it holds no process except the controller `but`.
    pub(crate) fn is_abandoned(&self, but: u32) -> bool {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let other =
            |e: &fs::DirEntry| e.file_name().to_str().and_then(|n| n.parse().ok()).is_some_and(|pid: u32| pid != but);
        self.has_lost_its_name() && !processes.filter(other).any(|e| self.is_at(&e.path().join("ns/net")))
    }

    /// The places of other namespaces.
    pub(crate) fn others(&self) -> impl Iterator<Item = Place> {
        let all = Place::all(self.root.parent().unwrap_or(Path::new("/")));
        all.into_iter().filter(|place| place.id != self.id)
    }

    /// Where the bypass's pins are.
    pub fn pins(&self) -> PathBuf {
        self.bpffs().join(self.id.to_string())
    }

    /// Where one thing is pinned.
    pub(crate) fn pin(&self, name: &str) -> PathBuf {
        self.pins().join(name)
    }

    /// Indexes of interfaces that links are pinned for.
    pub(crate) fn linked(&self) -> BTreeSet<u32> {
        let entries = fs::read_dir(self.pins()).into_iter().flatten().flatten();
        let index = |name: &str| name.strip_prefix("link_")?.rsplit_once('_')?.1.parse().ok();
        entries.filter_map(|entry| index(entry.file_name().to_str()?)).collect()
    }

    fn bpffs(&self) -> PathBuf {
        self.root.join("bpf")
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        self.root.join(format!("{}.{suffix}", self.id))
    }

    /// Whether anything is attached in this namespace.
    pub fn exists(&self) -> bool {
        self.pins().is_dir() && self.beside("json").is_file()
    }

    /// Keeps others from changing anything until the file is dropped or its process killed; makes
    /// the folder where there is none.
    pub(crate) fn lock(&self) -> Result<File, PlaceError> {
        self.lock_within(WAITING)
    }

    fn lock_within(&self, limit: Duration) -> Result<File, PlaceError> {
        let wrong = file(&self.root);
        loop {
            fs::create_dir_all(self.root.parent().unwrap_or(Path::new("/"))).map_err(&wrong)?;
            // For root alone: every process that can open the folder could hold its lock.
            match fs::DirBuilder::new().mode(0o700).create(&self.root) {
                Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(wrong(e)),
                _ => {}
            }
            if let Some(lock) = self.lock_if_there_within(limit)? {
                return Ok(lock);
            }
        }
    }

    /// The same, but returns nothing if there is no folder, or if the previous lock holder removed
    /// it. A caller that only changes or removes something must not leave a new folder behind.
    pub(crate) fn lock_if_there(&self) -> Result<Option<File>, PlaceError> {
        self.lock_if_there_within(WAITING)
    }

    /// The same for the controller, which has to go on: nothing, too, where another process holds
    /// the lock.
    pub(crate) fn lock_now(&self) -> Result<Option<File>, PlaceError> {
        match self.lock_if_there_within(Duration::ZERO) {
            Err(PlaceError::Busy { .. }) => Ok(None),
            other => other,
        }
    }

    /// The lock that the process which started this one has handed over as standard input, which is
    /// /dev/null from then on. Nothing where that is anything else, or not locked by it.
    pub(crate) fn lock_handed_over(&self) -> Result<Option<File>, PlaceError> {
        let wrong = file(&self.root);
        let input = std::io::stdin().as_fd().try_clone_to_owned().map(File::from).map_err(&wrong)?;
        if !is_at(&input, &self.root) {
            return Ok(None);
        }
        // Where another process has the lock of the folder, this fails.
        let is_locked = input.try_lock().is_ok();
        let null = Path::new("/dev/null");
        rustix::stdio::dup2_stdin(File::open(null).map_err(file(null))?).map_err(|e| file(null)(e.into()))?;
        Ok(is_locked.then_some(input))
    }

    fn lock_if_there_within(&self, limit: Duration) -> Result<Option<File>, PlaceError> {
        let wrong = file(&self.root);
        let lock = match File::open(&self.root) {
            Ok(lock) => lock,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(wrong(e)),
        };
        let (start, mut looked) = (Instant::now(), Duration::ZERO);
        // Many commands at once are served one after the other; only one that keeps the lock is
        // given up on.
        let (mut seen, mut seen_since) = (None, start);
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::Error(cause)) => return Err(wrong(cause)),
                Err(TryLockError::WouldBlock) => {}
            }
            let waited = start.elapsed();
            if seen_since.elapsed() >= limit || waited >= limit * MOST_HOLDERS {
                return Err(PlaceError::Busy { path: self.root.clone(), holder: holder(&lock), waited });
            }
            if waited >= looked + (waited / LOOKS).clamp(LOOK, LONGEST_LOOK) {
                looked = waited;
                // A controller holds it for a moment in each second; one that was stopped in it
                // would hold it for ever. What cannot be ended is named when the time is up.
                let _ = crate::controller::end_if_silent(self);
                // Not sooner: reading the table makes the kernel wait for all its CPUs.
                let now = holder_of(&lock);
                if seen.is_some() && now != seen {
                    seen_since = Instant::now();
                }
                seen = now;
            }
            std::thread::sleep((waited / PAUSES).clamp(PAUSE, LONGEST_PAUSE));
        }
        // It may have been removed and re-created meanwhile: then the new folder must be locked.
        Ok(is_at(&lock, &self.root).then_some(lock))
    }

    /// Makes the folder for pins, and the bpffs around it.
    pub(crate) fn make(&self) -> Result<(), PlaceError> {
        if has_private_mounts() {
            return Err(PlaceError::PrivateMounts);
        }
        let bpffs = self.bpffs();
        fs::create_dir_all(&bpffs).map_err(file(&bpffs))?;
        let kind = rustix::fs::statfs(&bpffs).map_err(|e| file(&bpffs)(e.into()))?.f_type as u64;
        if kind != BPFFS {
            rustix::mount::mount("bpf", &bpffs, "bpf", rustix::mount::MountFlags::empty(), Some(c"mode=0700"))
                .map_err(|e| file(&bpffs)(e.into()))?;
        }
        fs::create_dir_all(self.pins()).map_err(file(&self.pins()))
    }

    /// Removes pins, record and folder: what was attached is detached by that. Safe to call over a
    /// half-made place. The lock went with the folder: nothing may be changed after it.
    pub(crate) fn remove(&self) -> Result<(), PlaceError> {
        self.clear()?;
        // Where others' pins or records are the folder stays.
        let _ = fs::remove_dir(&self.root);
        Ok(())
    }

    /// Removes pins and record, but not the folder, so that the caller keeps its lock.
    pub(crate) fn clear(&self) -> Result<(), PlaceError> {
        // The record first: killed behind it, what is left is known for that, and removed by the
        // next command.
        gone(fs::remove_file(self.beside("json"))).map_err(file(&self.beside("json")))?;
        let pins = self.pins();
        for entry in fs::read_dir(&pins).into_iter().flatten().flatten() {
            let path = entry.path();
            fs::remove_file(&path).map_err(file(&path))?;
        }
        for path in ["keeper", "log", "new", "capture", "rules"].map(|kind| self.beside(kind)) {
            gone(fs::remove_file(&path)).map_err(file(&path))?;
        }
        gone(fs::remove_dir(&pins)).map_err(file(&pins))?;
        let bpffs = self.bpffs();
        if namespaces(&bpffs).is_ok_and(|found| found.is_empty()) {
            let end = Instant::now() + UNMOUNTING;
            loop {
                match rustix::mount::unmount(&bpffs, rustix::mount::UnmountFlags::empty()) {
                    // Others look into it, most for an instant: `status`, or a controller whether
                    // it is still there.
                    Err(Errno::BUSY) if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
                    // Or it was no mount any more: the next one that detaches tries again.
                    Ok(()) | Err(Errno::BUSY | Errno::INVAL | Errno::NOENT) => break,
                    Err(cause) => return Err(file(&bpffs)(cause.into())),
                }
            }
            let _ = fs::remove_dir(&bpffs);
        }
        Ok(())
    }

    /// Reads the owner record.
    pub fn record(&self) -> Result<PlaceRecord, PlaceError> {
        let path = self.beside("json");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Ok(PlaceRecord { version: VERSION, ..PlaceRecord::default() });
            }
            Err(cause) => return Err(file(&path)(cause)),
        };
        let record: PlaceRecord = serde_json::from_str(&text).map_err(|cause| PlaceError::Record {
            path: path.clone(),
            cause,
            pins: self.pins(),
        })?;
        if record.version != VERSION {
            return Err(PlaceError::Version { path, found: record.version });
        }
        Ok(record)
    }

    /// Puts a new file in the place of one, whole or not at all, once `fill` is done with it. The
    /// caller holds the lock.
    fn replace(&self, suffix: &str, fill: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<File, PlaceError> {
        let (path, new) = (self.beside(suffix), self.beside("new"));
        let mut made = File::create(&new).map_err(file(&new))?;
        fill(&mut made).map_err(file(&new))?;
        fs::rename(&new, &path).map_err(file(&path))?;
        Ok(made)
    }

    /// Writes the owner record.
    pub(crate) fn write(&self, record: &PlaceRecord) -> Result<(), PlaceError> {
        let text = serde_json::to_vec_pretty(record).expect("a record is plain data");
        self.replace("json", |made| made.write_all(&text)).map(drop)
    }

    /// The ruleset as it was read last, if it was.
    pub(crate) fn rules(&self) -> Option<Reading> {
        serde_json::from_slice(&fs::read(self.beside("rules")).ok()?).ok()
    }

    /// Keeps that, or forgets it. The caller holds the lock.
    pub(crate) fn set_rules(&self, reading: Option<&Reading>) -> Result<(), PlaceError> {
        let Some(reading) = reading else {
            let path = self.beside("rules");
            return gone(fs::remove_file(&path)).map_err(file(&path));
        };
        let text = serde_json::to_vec(reading).expect("a reading is plain data");
        self.replace("rules", |made| made.write_all(&text)).map(drop)
    }

    /// Makes this process the controller: its lock, which whoever finds it held finds with this
    /// process's number. Nothing where another controller runs. The caller holds the place's lock.
    pub(crate) fn controller_lock(&self) -> Result<Option<File>, PlaceError> {
        if self.controller_file().is_some() {
            return Ok(None);
        }
        // In the old file its number would still be the last one's when the lock is taken.
        let fill = |lock: &mut File| lock.lock().and_then(|()| writeln!(lock, "{}", std::process::id()));
        self.replace("keeper", fill).map(Some)
    }

    /// The lock of the one capture that may run; else which process holds it.
    pub(crate) fn capture_lock(&self) -> Result<Result<File, String>, PlaceError> {
        let path = self.beside("capture");
        let lock =
            File::options().create(true).truncate(false).read(true).write(true).open(&path).map_err(file(&path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Ok(lock)),
            Err(TryLockError::WouldBlock) => Ok(Err(holder(&lock))),
            Err(TryLockError::Error(cause)) => Err(file(&path)(cause)),
        }
    }

    /// Whether the controller that holds this lock is still this place's. It is not if everything
    /// was removed, even if it was re-created meanwhile.
    pub(crate) fn is_kept_by(&self, lock: &File) -> bool {
        self.has_lock("keeper", lock)
    }

    /// A number that another bypass of this namespace does not have: of one that was made after
    /// everything was detached. `None` where nothing is attached.
    pub(crate) fn generation(&self) -> Option<u64> {
        fs::metadata(self.pin(&format!("prog_{TCX_IN}"))).ok().map(|m| m.ino())
    }

    /// The same of a capture.
    pub(crate) fn is_captured_by(&self, lock: &File) -> bool {
        self.has_lock("capture", lock)
    }

    fn has_lock(&self, name: &str, lock: &File) -> bool {
        self.exists() && is_at(lock, &self.beside(name))
    }

    /// The controller's process, if one runs.
    pub fn controller(&self) -> Option<u32> {
        std::io::read_to_string(self.controller_file()?).ok()?.trim().parse().ok()
    }

    /// The file that the controller holds, if one runs. Others that look at the same moment share
    /// the lock.
    fn controller_file(&self) -> Option<File> {
        let lock = File::open(self.beside("keeper")).ok()?;
        matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)).then_some(lock)
    }

    /// Whether a process is a controller in this namespace: its number in a file may have become
    /// another's.
    pub(crate) fn is_controller(&self, pid: u32) -> bool {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let is_here = fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|m| m.ino() == self.id);
        is_here && words.split(|b| *b == 0).skip(1).take(2).eq([&b"bypass"[..], b"keep"])
    }

    /// Where the controller says what went wrong.
    pub fn log(&self) -> PathBuf {
        self.beside("log")
    }
}

/// Whether this path names that open file, and not another one that was made in its place.
fn is_at(file: &File, path: &Path) -> bool {
    let number = |m: fs::Metadata| (m.dev(), m.ino());
    file.metadata().is_ok_and(|is| fs::metadata(path).is_ok_and(|now| number(now) == number(is)))
}

/// The process that holds the lock of an open file: the kernel lists them in /proc/locks.
fn holder_of(lock: &File) -> Option<u32> {
    let table = fs::read_to_string("/proc/locks").unwrap_or_default();
    lock.metadata().ok().and_then(|m| flock_holder(&table, m.ino()))
}

/// The same in words.
fn holder(lock: &File) -> String {
    let number = holder_of(lock);
    let name = |pid: u32| fs::read_to_string(format!("/proc/{pid}/comm"));
    match number.map(|pid| (pid, name(pid))) {
        Some((pid, Ok(name))) => format!("process {pid} ({})", name.trim_end()),
        // The kernel names who locked it first (`lock_handed_over`).
        Some((pid, Err(_))) => format!("a process that got it from process {pid}, which has ended"),
        None => "a process that cannot be seen from here".into(),
    }
}

/// The process in such a line of /proc/locks: `1: FLOCK  ADVISORY  WRITE 1234 00:1a:5678 0 EOF`,
/// with major, minor and inode number.
fn flock_holder(table: &str, inode: u64) -> Option<u32> {
    table.lines().find_map(|line| {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, "FLOCK", _, _, pid, at, ..] = words[..] else { return None };
        let is_it = at.rsplit(':').next().is_some_and(|n| n.parse() == Ok(inode));
        pid.parse().ok().filter(|_| is_it)
    })
}

/// The namespaces that have pins in a bpffs: folders with a number. The kernel puts files of its
/// own into every bpffs, and `ip` and `tc` make folders in the first one that they find, which is
/// this one in a namespace.
fn namespaces(bpffs: &Path) -> std::io::Result<Vec<u64>> {
    let entries = fs::read_dir(bpffs)?;
    Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// Whether an ancestor of this process has another network namespace and other mounts: then it was
/// started by something like `ip netns exec`, whose mounts end with it. (A container's processes
/// have all the same.)
fn has_private_mounts() -> bool {
    let space = |pid: &str, kind: &str| fs::metadata(format!("/proc/{pid}/ns/{kind}")).map(|m| m.ino()).ok();
    let own = |kind| space("self", kind);
    let mut pid = "self".to_owned();
    let mut differs = false;
    loop {
        // The name in parentheses may hold anything; the parent is the second field behind it.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent =
            stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(1)).unwrap_or("0").to_owned();
        let (Some(mounts), Some(net)) = (space(&parent, "mnt"), space(&parent, "net")) else { return differs };
        // An ancestor beyond that has our mounts: then it is the one in between that has others,
        // and ours stay when it ends.
        differs = Some(mounts) != own("mnt") && (differs || Some(net) != own("net"));
        pid = parent;
    }
}

fn gone(result: std::io::Result<()>) -> std::io::Result<()> {
    match result {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A place of the test's own, of which nothing is there.
    fn absent(name: &str) -> Place {
        let root = std::env::temp_dir().join(format!("tombolo-{name}-{}", std::process::id()));
        Place { root, id: 1 }
    }

    #[test]
    fn who_has_nothing_to_change_leaves_no_folder() {
        let place = absent("no-folder");
        assert!(place.lock_if_there().unwrap().is_none() && place.lock_now().unwrap().is_none());
        assert!(crate::attachment::detach(&place, &[]).unwrap().interfaces.is_empty());
        assert!(crate::attachment::detach(&place, &["ta".into()]).is_err());
        assert!(crate::attachment::release(&place, "fabric").unwrap().interfaces.is_empty());
        assert!(!place.root.exists());
    }

    #[test]
    fn one_that_looks_for_the_controller_does_not_hinder_it_and_never_takes_the_last_one_for_it() {
        const LAST: u32 = 1;
        let place = absent("glances");
        drop(place.lock().unwrap());
        let done = std::sync::atomic::AtomicBool::new(false);
        let own = Some(std::process::id());
        std::thread::scope(|scope| {
            let look = || {
                let mut seen = BTreeSet::new();
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    seen.extend(place.controller());
                }
                seen
            };
            let looks = [scope.spawn(look), scope.spawn(look)];
            for _ in 0..200 {
                gone(fs::remove_file(place.beside("keeper"))).unwrap();
                fs::write(place.beside("keeper"), format!("{LAST}\n")).unwrap();
                let lock = place.controller_lock().unwrap();
                assert!(lock.is_some() && place.controller() == own && place.controller_lock().unwrap().is_none());
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
            let seen = looks.map(|look| look.join().unwrap());
            assert!(seen.iter().flatten().all(|&pid| Some(pid) == own), "{seen:?}");
        });
        fs::remove_dir_all(&place.root).unwrap();
    }

    #[test]
    fn a_place_that_was_made_anew_has_another_controller() {
        let place = absent("other-keeper");
        drop(place.lock().unwrap());
        let make = || {
            fs::create_dir_all(place.pins()).unwrap();
            fs::write(place.beside("json"), "").unwrap();
            place.controller_lock().unwrap().unwrap()
        };
        let old = make();
        assert!(place.is_kept_by(&old));
        place.remove().unwrap();
        assert!(!place.is_kept_by(&old));
        drop(place.lock().unwrap());
        let new = make();
        assert!(place.is_kept_by(&new) && !place.is_kept_by(&old));
        place.remove().unwrap();
        assert!(!place.root.exists());
    }

    #[test]
    fn a_lock_that_is_not_let_go_is_waited_for_so_long_and_its_holder_named() {
        let place = absent("busy");
        let held = place.lock().unwrap();
        let limit = Duration::from_millis(50);
        let error = place.lock_within(limit).unwrap_err();
        assert!(matches!(&error, PlaceError::Busy { waited, .. } if *waited >= limit), "{error}");
        let (text, own) = (error.to_string(), format!("by process {} (", std::process::id()));
        assert!(text.contains(&own) && text.contains("nothing was done"), "{text}");
        assert!(place.lock_now().unwrap().is_none());
        drop(held);
        assert!(place.lock_now().unwrap().is_some());
        assert_eq!(fs::metadata(&place.root).unwrap().mode() & 0o77, 0, "others can open it");
        fs::remove_dir(&place.root).unwrap();
    }

    #[test]
    fn a_lock_that_goes_from_one_to_the_next_is_waited_for_longer() {
        let place = absent("handed-on");
        drop(place.lock().unwrap());
        // Another process each time, as /proc/locks names processes.
        let hold = |seconds: &str| {
            let mut child =
                std::process::Command::new("flock").arg(&place.root).args(["sleep", seconds]).spawn().unwrap();
            while place.lock_now().unwrap().is_some() {
                assert!(child.try_wait().unwrap().is_none(), "flock(1) ended");
                std::thread::sleep(Duration::from_millis(5));
            }
            child
        };
        let mut first = hold("2.5");
        let mut next = std::process::Command::new("flock").arg(&place.root).args(["sleep", "2.5"]).spawn().unwrap();
        // Each of the two holds it for less than this, and both together for longer. Which of us
        // gets it after the first is the kernel's choice: nothing here waits for the other one with
        // the lock in its hand.
        let result = place.lock_within(Duration::from_secs(4)).map(drop);
        first.wait().unwrap();
        next.wait().unwrap();
        result.unwrap();
        let mut long = hold("4");
        assert!(matches!(place.lock_within(Duration::from_millis(2500)), Err(PlaceError::Busy { .. })));
        long.wait().unwrap();
        fs::remove_dir(&place.root).unwrap();
    }

    #[test]
    fn one_that_got_a_lock_from_another_is_named_by_that() {
        let place = absent("handed-over");
        drop(place.lock().unwrap());
        let script = r#"exec 9<"$0"; flock 9; exec sleep 100"#;
        let mut child = std::process::Command::new("sh").args(["-c", script]).arg(&place.root).spawn().unwrap();
        let error = loop {
            match place.lock_within(Duration::from_millis(1)).map_err(|e| e.to_string()) {
                // flock(1) has not ended yet.
                Err(error) if error.contains("(flock)") => {}
                Err(error) => break error,
                Ok(_) => assert!(child.try_wait().unwrap().is_none(), "the lock's holder ended"),
            }
        };
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(error.contains("a process that got it from process "), "{error}");
        fs::remove_dir(&place.root).unwrap();
    }

    #[test]
    fn who_waits_for_a_lock_is_not_its_holder() {
        let table = "1: FLOCK  ADVISORY  WRITE 77 00:1a:5678 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 78 00:1a:5679 0 EOF\n\
                     2: POSIX  ADVISORY  WRITE 79 00:1a:5680 0 EOF\n";
        assert_eq!([5678, 5679, 5680, 678].map(|n| flock_holder(table, n)), [Some(77), None, None, None]);
    }

    #[test]
    fn a_folder_that_went_while_its_lock_was_waited_for_is_not_made_again() {
        let place = absent("gone-folder");
        let held = place.lock().unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| place.lock_if_there().unwrap().is_none());
            fs::remove_dir(&place.root).unwrap();
            drop(held);
            assert!(waits.join().unwrap());
        });
        assert!(!place.root.exists());
    }
}
