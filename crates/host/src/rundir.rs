//! Where a running fabric keeps everything that needs a name: its lock, its owner record, sockets
//! and consoles.
//!
//! The runtime directory is `$TOMBOLO_RUNTIME/NAME/`, else `/run/tombolo/NAME/` for root and
//! `$XDG_RUNTIME_DIR/tombolo/NAME/` for others. Leases and logs outlive `down`. They are in
//! `$TOMBOLO_STATE/NAME/`, else `/var/lib/tombolo/NAME/` or `$XDG_STATE_HOME/tombolo/NAME/`.
//!
//! # Invariants
//! - The holder of the exclusive lock of `lock` owns the fabric. The kernel releases the lock
//!   however the owner ends.
//! - `owner.json` is written (whole, then renamed) before a thing outside this process is made, so
//!   a killed owner's leftovers are in it. Processes are found by marks that they carry (see
//!   [`process`]), so there is no instant at which a process runs and cannot be found.
//! - The directory has mode 0700 and belongs to its owner.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use tombolo_shm::environment::variable;

use crate::fabric::Say;
use crate::fabric::standing::Standing;
use crate::process::{self, Liveness, Recorded, RecordedBridge};
use crate::xen::config::Domain;

/// How long a lock is waited for whose recorded owner has gone.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a daemon that is ending is waited for: 256 taps took the kernel 22 s, and a guest may
/// take 15 s to shut down.
const ENDING_TIMEOUT: Duration = Duration::from_secs(180);
/// How often it is said that a daemon is waited for, and how often that one is looked at.
const PROGRESS: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(20);

/// How long another's turn at shared settings is waited for, which takes two runs of `nft`; and how
/// often it is looked at.
const TURN_TIMEOUT: Duration = Duration::from_secs(10);
const TURN_LOOK: Duration = Duration::from_millis(5);

/// Begins what is said while something is waited for: it is for the user even where no other
/// progress is shown.
pub const WAITING: &str = "waiting ";

/// Why a runtime directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum RunDirError {
    /// Neither variable nor default fits.
    #[error(
        "no place for runtime files: expected $XDG_RUNTIME_DIR or $TOMBOLO_RUNTIME to be set (not running as root); set one"
    )]
    NoPlace,
    /// The system refused.
    #[error("{what} {}: {source}", path.display())]
    System { what: &'static str, path: PathBuf, source: io::Error },
    /// Somebody else's directory.
    #[error("{} belongs to user {owner}, expected {expected}; remove it or set $TOMBOLO_RUNTIME", path.display())]
    Foreign { path: PathBuf, owner: u32, expected: u32 },
    /// Another daemon runs this fabric.
    #[error(
        "the fabric \"{name}\" is running already (process {pid}); `tombolo apply` changes it to what its file says, `tombolo up --replace` takes over from it, `tombolo down --fabric {name}` ends it"
    )]
    Running {
        name: String,
        /// Its daemon, 0 if it has not said yet.
        pid: u32,
    },
    /// The fabric of another file has the name.
    #[error(
        "the name \"{name}\" is taken: the fabric of {} runs under it (process {pid}); give the one of {} another `name`, \
         or end that one with `tombolo down --file {}`",
        theirs.display(), ours.display(), theirs.display()
    )]
    Elsewhere {
        name: String,
        pid: u32,
        /// The file of the one that runs.
        theirs: PathBuf,
        /// The file of the one that was to be started.
        ours: PathBuf,
    },
    /// A daemon that ends does not come to its end.
    #[error(
        "the daemon of the fabric \"{name}\" (process {pid}) has been ending for {waited} s: expected its lock, taps and \
         sockets to be released; found it still there. See /proc/{pid}/stack for what the kernel does, and try again"
    )]
    Ending {
        name: String,
        pid: u32,
        /// Seconds that were waited.
        waited: u64,
    },
    /// `down` removes all of the one, and keeps the other.
    #[error(
        "{} is the folder of $TOMBOLO_RUNTIME and of $TOMBOLO_STATE: `down` would remove leases and logs with the sockets; set \
         one of them to another folder", path.display()
    )]
    OneFolder { path: PathBuf },
    /// A Unix socket's path has at most 107 bytes.
    #[error("the socket path {} has {} bytes, and the system allows 107; set $TOMBOLO_RUNTIME to a shorter folder", path.display(), path.as_os_str().len())]
    LongPath { path: PathBuf },
}

pub(crate) fn system(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RunDirError {
    move |source| RunDirError::System { what, path: path.into(), source }
}

/// A sysctl that was changed, to be put back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sysctl {
    /// Path below /proc/sys.
    pub key: String,
    /// The value to restore on `down`.
    pub before: String,
}

/// Sections that were added while the fabric ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addition {
    /// The members that are left of it.
    pub names: Vec<String>,
    /// The sections, as text of a fabric file.
    pub text: String,
}

/// What a fabric has made outside its own process that the kernel does not reclaim by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Process ID of the daemon.
    pub pid: u32,
    /// Its start, in clock ticks after boot, so that a reused pid is not taken for it.
    pub started_ticks: u64,
    /// Absolute path of the fabric file.
    pub file: PathBuf,
    /// The nftables table, if the kernel uplink made one.
    pub nft_table: Option<String>,
    /// Sysctls to put back.
    pub sysctls: Vec<Sysctl>,
    /// Whether interfaces were given to the bypass for this fabric.
    #[serde(default)]
    pub bypass: bool,
    /// Members added while running; a daemon that follows a crash adds them again.
    pub additions: Vec<Addition>,
    /// Those of them that a rule or forward of the configuration names, so that `changes` has them:
    /// as they were added. They are additions again once `changes` is not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub named: Vec<Addition>,
    /// Rate limits that were changed while it ran: by port, as text of a fabric file. They go
    /// before the file's.
    #[serde(default)]
    pub rates: BTreeMap<String, String>,
    /// What commands and the API have changed since the file was read: a merge patch of its
    /// content. A daemon that follows changes the file's content so too.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub changes: serde_json::Map<String, serde_json::Value>,
    /// Where the ports of containers lead, by their names.
    #[serde(default)]
    pub containers: BTreeMap<String, ContainerPlace>,
    /// Machines whose drivers have been seen on the network: only those can be adopted. A QEMU that
    /// loses its backend while its guest agrees on features agrees on other ones with the next
    /// backend.
    #[serde(default)]
    pub settled: Vec<Settled>,
    /// The passts of the user uplinks, beside the marks by which they are found.
    #[serde(default)]
    pub helpers: Vec<Recorded>,
    /// The bridges of links, beside the marks by which they are found. A bridge does nothing before
    /// it is in here.
    #[serde(default)]
    pub bridges: Vec<RecordedBridge>,
    /// Domains of Xen: written before they are created, until they are gone.
    #[serde(default)]
    pub domains: Vec<Domain>,
    /// The fabric is being taken down.
    #[serde(default)]
    pub ending: bool,
    /// Its daemon has ended and left it to the next one.
    #[serde(default)]
    pub left: bool,
    /// What a handover leaves as it is; not in a record of a daemon that does not stand yet, or of
    /// an older version.
    #[serde(default)]
    pub standing: Option<Standing>,
}

/// A running machine that the next daemon may adopt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settled {
    /// Name of the machine in the fabric file.
    pub machine: String,
    /// The process that listens at its monitor's socket: QEMU itself, even if a script started it.
    pub pid: u32,
    /// Its start, in clock ticks after boot.
    pub started_ticks: u64,
    /// What the daemon started. The process's own arguments are others where $TOMBOLO_QEMU is a
    /// script.
    pub argv: Vec<String>,
}

/// Where a container's port leads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerPlace {
    /// Path of the namespace.
    pub netns: PathBuf,
    /// Device and inode of that file. A path may lead to another namespace later, such as that of a
    /// process whose number was used again. Zeros where none was seen.
    pub inode: (u64, u64),
    /// What the kernel calls the namespace. An inode is used again, and this number is not. `None`
    /// where the kernel does not tell.
    #[serde(default)]
    pub cookie: Option<u64>,
    /// Name and MAC address of the tap in there; nothing for a port without one.
    pub tap: Option<(String, [u8; 6])>,
    /// The index of that tap. `None` in records of earlier versions.
    #[serde(default)]
    pub index: Option<u32>,
}

impl Owner {
    /// Ends what was changed since the file was read. Members that were added are still there.
    pub fn end_changes(&mut self) {
        self.changes.clear();
        self.additions.append(&mut self.named);
    }

    /// What that daemon is at. One that is dead and not reaped is gone; one that takes its fabric
    /// down is ending.
    pub fn liveness(&self) -> Liveness {
        match process::liveness(self.pid, self.started_ticks) {
            Liveness::Runs if self.ending => Liveness::Ending,
            liveness => liveness,
        }
    }
}

/// The folder that holds the runtime directories of all fabrics of this user.
pub fn runtime_root() -> Result<PathBuf, RunDirError> {
    if let Some(path) = variable("TOMBOLO_RUNTIME") {
        // Children carry the path as their mark, and may be looked for from another folder.
        return Ok(std::path::absolute(&path).unwrap_or_else(|_| path.into()));
    }
    if rustix::process::geteuid().is_root() {
        return Ok("/run/tombolo".into());
    }
    variable("XDG_RUNTIME_DIR").map(|d| Path::new(&d).join("tombolo")).ok_or(RunDirError::NoPlace)
}

/// The folder of what outlives a fabric of that name: leases, logs, events.
pub fn state_folder(fabric: &str) -> PathBuf {
    state_root().join(fabric)
}

fn state_root() -> PathBuf {
    if let Some(path) = variable("TOMBOLO_STATE") {
        return path.into();
    }
    if rustix::process::geteuid().is_root() {
        return "/var/lib/tombolo".into();
    }
    let home = variable("HOME").map(|h| Path::new(&h).join(".local/state"));
    let base = variable("XDG_STATE_HOME").map(PathBuf::from).or(home);
    base.unwrap_or_else(|| "/tmp".into()).join("tombolo")
}

/// A folder without symbolic links, as far as it is there.
fn place(folder: &Path) -> PathBuf {
    fs::canonicalize(folder).or_else(|_| std::path::absolute(folder)).unwrap_or_else(|_| folder.into())
}

/// Where the daemon of a fabric listens for API clients.
pub fn api_socket(root: &Path, fabric: &str) -> PathBuf {
    root.join(fabric).join("api.sock")
}

/// The socket at which processes take the seats of a direct link, in the fabric's directory.
pub fn link_socket(directory: &Path, link: &str) -> PathBuf {
    directory.join(format!("{link}.link.sock"))
}

/// Daemons by the locks that they hold, found in their open files: also where the name of the lock,
/// or the whole directory, was deleted. (fabric, process, whether the name is gone).
fn holders(root: &Path) -> Vec<(String, u32, bool)> {
    let fabric = |target: &Path| -> Option<(String, bool)> {
        let text = target.to_str()?;
        let (text, is_deleted) = text.strip_suffix(" (deleted)").map_or((text, false), |t| (t, true));
        let name = Path::new(text).strip_prefix(root).ok()?.to_str()?.strip_suffix("/lock")?;
        // A folder further down is of another root.
        (!name.contains('/')).then(|| (name.to_string(), is_deleted))
    };
    let device = |path: &Path| fs::metadata(path).ok().map(|m| m.dev());
    let here = device(root);
    let mut out = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        // What another user has open is not asked for: it may be on a file system that never
        // answers.
        if !process::is_same_user(pid) {
            continue;
        }
        // Another user's are not to be seen.
        for file in fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten() {
            let Some((name, is_deleted)) = fs::read_link(file.path()).ok().and_then(|t| fabric(&t)) else { continue };
            // In a container the same path is another file. A folder of a fabric may be a mount of
            // its own.
            let same =
                |path: &Path| here.is_none() || here == device(path) || device(&root.join(&name)) == device(path);
            if !same(&file.path()) {
                continue;
            }
            // A command that only looks has it open and not locked.
            let info = fs::read_to_string(entry.path().join("fdinfo").join(file.file_name())).unwrap_or_default();
            let is_locked = info.lines().any(|l| l.starts_with("lock:") && l.contains("FLOCK") && l.contains("WRITE"));
            if is_locked && process::start_ticks(pid).is_some_and(|t| process::liveness(pid, t) == Liveness::Runs) {
                out.push((name, pid, is_deleted));
            }
        }
    }
    out
}

/// Whether a daemon holds the lock that has its name in this runtime directory.
fn is_locked(folder: &Path) -> bool {
    File::open(folder.join("lock")).is_ok_and(|lock| flock(&lock, FlockOperation::NonBlockingLockShared).is_err())
}

/// The process that runs the fabric of this runtime directory, by the lock that it holds, even if
/// its files are gone.
pub fn daemon_of(folder: &Path) -> Option<u32> {
    let (root, name) = (folder.parent()?, folder.file_name()?.to_str()?);
    let runs = |o: &Owner| is_locked(folder) && process::liveness(o.pid, o.started_ticks) == Liveness::Runs;
    let recorded = read_owner(folder).filter(runs).map(|owner| owner.pid);
    let holder = || holders(root).into_iter().find(|(n, ..)| n == name).map(|(_, pid, _)| pid);
    // Its lock may have got a name again while the processes were looked through, by a descriptor
    // that was not in its list yet. The record follows later.
    recorded.or_else(holder).or_else(|| is_locked(folder).then(holder).flatten())
}

/// Names of the fabrics that run, sorted: those whose lock is held, also where its file was
/// deleted.
pub fn running(root: &Path) -> Vec<String> {
    let named = || {
        let folders = fs::read_dir(root).into_iter().flatten().flatten().filter(|entry| is_locked(&entry.path()));
        folders.filter_map(|entry| entry.file_name().into_string().ok())
    };
    let mut out: Vec<String> = named().collect();
    out.extend(holders(root).into_iter().filter(|(.., is_deleted)| *is_deleted).map(|(name, ..)| name));
    // As in `daemon_of`.
    out.extend(named());
    out.sort();
    out.dedup();
    out
}

/// The records of all fabrics of `root`, with their folders.
fn owners(root: &Path) -> impl Iterator<Item = (PathBuf, Owner)> {
    let folders = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.path());
    folders.filter_map(|folder| read_owner(&folder).map(|owner| (folder, owner)))
}

/// The records of fabrics that do not run and were not taken down: their daemons were killed.
pub fn left_owners(root: &Path) -> Vec<Owner> {
    let running = running(root);
    let runs = |folder: &Path| running.iter().any(|name| folder.ends_with(name));
    owners(root).filter(|(folder, _)| !runs(folder)).map(|(_, owner)| owner).collect()
}

/// The names of these fabrics.
pub fn left(root: &Path) -> Vec<String> {
    let running = running(root);
    let names = owners(root).filter_map(|(folder, _)| folder.file_name()?.to_str().map(String::from));
    let mut names: Vec<String> = names.filter(|name| !running.contains(name)).collect();
    names.sort();
    names
}

/// A fabric whose daemon was killed, under its lock: no daemon of it starts until this is dropped.
#[derive(Debug)]
pub struct Killed {
    folder: PathBuf,
    owner: Owner,
    _lock: File,
}

impl Killed {
    /// Those in `root` whose records `wanted` accepts. One that is being started, or looked after
    /// by another process, is left to that.
    pub fn all(root: &Path, wanted: impl Fn(&Owner) -> bool) -> Vec<Killed> {
        let wanted = |owner: &Owner| owner.liveness() == Liveness::Gone && wanted(owner);
        let killed = owners(root).filter(|(_, owner)| wanted(owner)).filter_map(|(folder, _)| {
            let lock = fs::OpenOptions::new().read(true).write(true).open(folder.join("lock")).ok()?;
            flock(&lock, FlockOperation::NonBlockingLockExclusive).ok()?;
            // As it is now that none changes it.
            let owner = read_owner(&folder).filter(wanted)?;
            Some(Killed { folder, owner, _lock: lock })
        });
        killed.collect()
    }

    /// What its daemon left.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Changes the record, after what it named was undone.
    ///
    /// # Errors
    /// If it cannot be written: then the fabric's next daemon undoes it once more, which changes
    /// nothing.
    pub fn record(&mut self, change: impl FnOnce(&mut Owner)) -> Result<(), RunDirError> {
        change(&mut self.owner);
        let text = serde_json::to_vec_pretty(&self.owner).expect("all map keys in the record are strings");
        write_whole(&self.folder.join("owner.json"), &text)
    }
}

/// A turn at the settings of the machine that fabrics share, such as forwarding: who looks whether
/// others need them, and then changes them, has one. It ends when the file is dropped.
///
/// # Errors
/// If the lock cannot be made, or another process keeps it.
pub fn shared_turn(root: &Path) -> Result<File, RunDirError> {
    let path = root.join("shared.lock");
    let open = fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let lock = open.map_err(system("opening", &path))?;
    let begun = Instant::now();
    while let Err(error) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        if begun.elapsed() >= TURN_TIMEOUT {
            return Err(system("waiting for the turn of another fabric at", &path)(error.into()));
        }
        std::thread::sleep(TURN_LOOK);
    }
    Ok(lock)
}

/// The owned runtime directory of one fabric. Dropping it releases the lock.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    state: PathBuf,
    lock: File,
    /// The record as it was last written.
    owner: Owner,
    /// What the daemon before left behind, if it did not end by itself.
    pub leftover: Option<Owner>,
    /// Why the record on the disk is not the one in memory.
    unwritten: Option<String>,
}

/// Makes a folder for our own user only, in a folder that others may look into: that one is the
/// services', too.
///
/// # Errors
/// If it is another user's, or the system refuses.
pub fn make_dir(path: &Path) -> Result<(), RunDirError> {
    if let Some(root) = path.parent().filter(|r| !r.exists()) {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(root).map_err(system("making the folder", root))?;
        fs::set_permissions(root, fs::Permissions::from_mode(0o755)).map_err(system("setting the mode of", root))?;
    }
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(system("making the folder", path))?;
    let there = fs::metadata(path).map_err(system("looking at", path))?;
    let owner = there.uid();
    let expected = rustix::process::geteuid().as_raw();
    if owner != expected {
        return Err(RunDirError::Foreign { path: path.into(), owner, expected });
    }
    if there.mode() & 0o077 != 0 {
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(system("closing to others", path))?;
    }
    Ok(())
}

/// Whether a lock could be taken.
enum Attempt {
    Taken(File, Option<Owner>),
    /// Another has it, and perhaps has written this record.
    Held(Option<Owner>),
    /// The file was removed meanwhile by its owner, who ended by itself.
    Removed,
}

fn try_lock(path: &Path) -> Result<Attempt, RunDirError> {
    let lock_path = path.join("lock");
    make_dir(path)?;
    let mut open = fs::OpenOptions::new();
    let lock = open.read(true).write(true).create(true).truncate(false).mode(0o600).open(&lock_path);
    let lock = lock.map_err(system("opening", &lock_path))?;
    let is_locked = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
    let record = read_owner(path);
    if !is_locked {
        return Ok(Attempt::Held(record));
    }
    let held = lock.metadata().map_err(system("looking at", &lock_path))?;
    let is_named = fs::metadata(&lock_path).is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino()));
    Ok(if is_named { Attempt::Taken(lock, record) } else { Attempt::Removed })
}

/// The owner record in a runtime directory, if there is one.
pub fn read_owner(path: &Path) -> Option<Owner> {
    fs::read(path.join("owner.json")).ok().and_then(|text| serde_json::from_slice(&text).ok())
}

/// Makes the directory and takes its lock; gives the record of the owner before.
///
/// A daemon that is ending is waited for, until its process is gone: the kernel closes its lock
/// before its taps. So is a child that a killed owner had forked and that has not reached its
/// program yet, which holds the lock still: once the lock is free, every child there is can be
/// found.
async fn take_lock(fabric: &str, path: &Path, say: &Say) -> Result<(File, Option<Owner>), RunDirError> {
    let begun = Instant::now();
    let root = path.parent().unwrap_or(path);
    let mut next_word = begun + Duration::from_millis(500);
    loop {
        let (taken, record) = match try_lock(path)? {
            Attempt::Taken(lock, record) => (Some(lock), record),
            Attempt::Held(record) => (None, record),
            Attempt::Removed => continue,
        };
        let liveness = record.as_ref().map_or(Liveness::Gone, Owner::liveness);
        let pid = record.as_ref().map_or(0, |o| o.pid);
        match (taken, liveness) {
            // Nothing is recorded: it is the first start, or a daemon runs whose files were deleted
            // and not made again yet.
            (Some(_), Liveness::Gone) if record.is_none() && deleted(fabric, root).is_some() => {
                return Err(RunDirError::Running { name: fabric.into(), pid: deleted(fabric, root).unwrap_or(0) });
            }
            (Some(lock), Liveness::Gone) => return Ok((lock, record)),
            (Some(lock), Liveness::Runs) if pid == std::process::id() => return Ok((lock, record)),
            // Only the file was deleted: that daemon makes it again, or cannot, and has all else
            // still.
            (Some(_), Liveness::Runs) if begun.elapsed() >= LOCK_TIMEOUT || deleted(fabric, root).is_some() => {
                return Err(RunDirError::Running { name: fabric.into(), pid });
            }
            (None, Liveness::Runs) => return Err(RunDirError::Running { name: fabric.into(), pid }),
            // The lock is given back: it is taken again once the process is gone.
            (_, Liveness::Ending) if begun.elapsed() >= ENDING_TIMEOUT => {
                return Err(RunDirError::Ending { name: fabric.into(), pid, waited: begun.elapsed().as_secs() });
            }
            (None, Liveness::Gone) if begun.elapsed() >= LOCK_TIMEOUT => {
                return Err(RunDirError::Running { name: fabric.into(), pid });
            }
            (_, Liveness::Ending) if Instant::now() >= next_word => {
                next_word = Instant::now() + PROGRESS;
                let since = begun.elapsed().as_secs_f64();
                say(&format!(
                    "{WAITING}for the daemon before (process {pid}), which is ending, to release its taps and sockets: {since:.1} s so far"
                ));
            }
            _ => {}
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// A daemon of that fabric, other than this process, whose lock has no name any more.
fn deleted(fabric: &str, root: &Path) -> Option<u32> {
    let me = std::process::id();
    let of_it = |(name, pid, is_deleted): &(String, u32, bool)| name == fabric && *pid != me && *is_deleted;
    holders(root).into_iter().find(of_it).map(|(_, pid, _)| pid)
}

impl RunDir {
    /// Makes the directory, takes its lock and reads what a killed owner left. `say` is told while
    /// a daemon that is ending is waited for.
    ///
    /// # Errors
    /// If a daemon runs, one does not come to its end, or the system refuses. A record that cannot
    /// be written is no error: see [`RunDir::unwritten`].
    pub async fn claim(fabric: &str, file: &Path, say: &Say) -> Result<RunDir, RunDirError> {
        let root = runtime_root()?;
        if place(&root) == place(&state_root()) {
            return Err(RunDirError::OneFolder { path: root });
        }
        let path = root.join(fabric);
        let taken = take_lock(fabric, &path, say).await;
        let (lock, leftover) = taken.map_err(|error| match (error, read_owner(&path)) {
            (RunDirError::Running { name, pid }, Some(owner))
                if owner.pid == pid && ![file, &owner.file].contains(&Path::new("")) && owner.file != file =>
            {
                RunDirError::Elsewhere { name, pid, theirs: owner.file, ours: file.into() }
            }
            (error, _) => error,
        })?;
        Ok(Self::own(fabric, path, file, lock, leftover))
    }

    fn own(fabric: &str, path: PathBuf, file: &Path, lock: File, leftover: Option<Owner>) -> RunDir {
        let pid = std::process::id();
        let owner = Owner {
            pid,
            started_ticks: process::start_ticks(pid).unwrap_or(0),
            file: file.into(),
            ending: false,
            left: false,
            // Until they are undone, undoing them is up to us.
            ..leftover.clone().unwrap_or_default()
        };
        let state = state_root().join(fabric);
        let mut dir = RunDir { path, state, lock, owner, leftover, unwritten: None };
        dir.record(|_| ());
        dir
    }

    /// For tests: one in a folder of the test's own.
    #[cfg(test)]
    pub(crate) fn of_test(folder: &Path) -> RunDir {
        let lock = File::create(folder.join("lock")).unwrap();
        let (path, state) = (folder.to_path_buf(), folder.join("state"));
        RunDir { path, state, lock, owner: Owner::default(), leftover: None, unwritten: None }
    }

    /// Takes the directory over from a daemon that handed its lock over. That daemon holds it too,
    /// until it ends.
    pub fn inherit(fabric: &str, file: &Path, lock: OwnedFd) -> Result<RunDir, RunDirError> {
        let path = runtime_root()?.join(fabric);
        let lock = File::from(lock);
        let lock_path = path.join("lock");
        let held = lock.metadata().map_err(system("looking at", &lock_path))?;
        let named = fs::metadata(&lock_path).map_err(system("looking at", &lock_path))?;
        let locked = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        let record: Option<Owner> =
            fs::read(path.join("owner.json")).ok().and_then(|text| serde_json::from_slice(&text).ok());
        if !locked || (held.dev(), held.ino()) != (named.dev(), named.ino()) {
            return Err(RunDirError::Running { name: fabric.into(), pid: record.map_or(0, |o| o.pid) });
        }
        Ok(Self::own(fabric, path, file, lock, record))
    }

    /// The lock, for a daemon that takes over.
    pub fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Folder of the fabric's sockets, records and locks.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The owner record as it was last written.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// A file for what outlives `down`, in the state folder, which is made.
    ///
    /// # Errors
    /// If the folder is another user's, or the system refuses. The path is [`RunDir::state_path`]
    /// all the same.
    pub fn make_state(&self) -> Result<(), RunDirError> {
        make_dir(&self.state)
    }

    /// Where a file is that outlives `down`.
    pub fn state_path(&self, name: &str) -> PathBuf {
        self.state.join(name)
    }

    /// A socket's path, whose length is checked.
    pub fn socket(&self, name: &str) -> Result<PathBuf, RunDirError> {
        let path = self.path.join(name);
        if path.as_os_str().len() > 107 {
            return Err(RunDirError::LongPath { path });
        }
        Ok(path)
    }

    /// Changes the owner record and writes it, before what it names is made or after it is gone. On
    /// a full disk the record in memory counts until there is room again: a running network is
    /// worth more than its record.
    pub fn record(&mut self, change: impl FnOnce(&mut Owner)) {
        change(&mut self.owner);
        let text = serde_json::to_vec_pretty(&self.owner).expect("all map keys in the record are strings");
        self.unwritten = write_whole(&self.path.join("owner.json"), &text).err().map(|e| e.to_string());
    }

    /// Makes the directory, the lock and the record again where they were deleted. Returns whether
    /// something was.
    ///
    /// # Errors
    /// If another daemon has taken the directory meanwhile, or the system refuses.
    pub fn restore(&mut self) -> Result<bool, RunDirError> {
        let lock_path = self.path.join("lock");
        let held = self.lock.metadata().map_err(system("looking at", &lock_path))?;
        let is_named =
            fs::metadata(&lock_path).is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino()));
        if !is_named {
            match try_lock(&self.path)? {
                Attempt::Taken(lock, _) => self.lock = lock,
                Attempt::Held(record) => {
                    let name = self.path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_string();
                    return Err(RunDirError::Running { name, pid: record.map_or(0, |o| o.pid) });
                }
                // Deleted again: so is this looked at again.
                Attempt::Removed => {}
            }
        }
        let is_recorded = self.path.join("owner.json").exists();
        if !is_recorded {
            self.record(|_| ());
        }
        Ok(!is_named || !is_recorded)
    }

    /// Why the owner record could not be written. What it does not name the next daemon does not
    /// know of: it starts machines again that it could have kept.
    pub fn unwritten(&self) -> Option<&str> {
        self.unwritten.as_deref()
    }

    /// Removes everything; the fabric has ended by itself.
    pub fn remove(self) -> Result<(), RunDirError> {
        let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        // Logs that cannot be kept do not keep the rest from going.
        let kept = crate::log::keep(&self.path, &self.state);
        let Ok(entries) = fs::read_dir(&self.path) else { return Ok(()) };
        for entry in entries.flatten() {
            // The lock goes last: a daemon that starts meanwhile must not find a half-removed
            // directory unlocked.
            if entry.file_name() != "lock" {
                match fs::remove_file(entry.path()) {
                    Err(error) if !is_gone(&error) => return Err(system("removing", &entry.path())(error)),
                    _ => {}
                }
            }
        }
        // Leases and logs stay; without any there is nothing to keep the folder for.
        let _ = fs::remove_dir(&self.state);
        fs::remove_file(self.path.join("lock")).map_err(system("removing", &self.path))?;
        // A call of the CNI plugin that came meanwhile has made a lock of its own.
        if fs::remove_dir(&self.path).is_err() {
            for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
                if entry.file_name().to_str().is_some_and(|name| name.starts_with("cni-") && name.ends_with(".lock")) {
                    let _ = fs::remove_file(entry.path());
                }
            }
            fs::remove_dir(&self.path).map_err(system("removing", &self.path))?;
        }
        kept
    }
}

/// Makes an empty file that only our own user may read, independent of the umask and of what was
/// there before.
pub(crate) fn private_file(path: &Path) -> io::Result<File> {
    let file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    // One that was there already keeps its mode by itself.
    file.set_permissions(fs::Permissions::from_mode(0o600))?;
    Ok(file)
}

/// Writes a file so that a reader sees the old content or the new, never a part, whenever the
/// writer is killed.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), RunDirError> {
    let next = path.with_extension("next");
    let write = || -> io::Result<()> {
        let mut file = private_file(&next)?;
        file.write_all(bytes)?;
        fs::rename(&next, path)
    };
    let written = write().or_else(|error| match (error.kind(), path.parent()) {
        // The folder was removed under a running fabric.
        (io::ErrorKind::NotFound, Some(folder)) => {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            write()
        }
        _ => Err(error),
    });
    written.map_err(|error| {
        // A part of a file is of no use, and holds room on a full disk.
        let _ = fs::remove_file(&next);
        system("writing", path)(error)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use std::sync::{Arc, Mutex};
    use tombolo_testing::until;

    fn record(path: &Path, pid: u32, started_ticks: u64) {
        let owner = Owner { pid, started_ticks, ..Owner::default() };
        write_whole(&path.join("owner.json"), &serde_json::to_vec(&owner).unwrap()).unwrap();
    }

    fn lock(path: &Path, say: &Say) -> Result<(File, Option<Owner>), RunDirError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(take_lock("f", path, say))
    }

    fn quiet() -> Say {
        Arc::new(|_| ())
    }

    #[test]
    fn a_lock_that_a_dead_owners_child_holds_is_waited_for_and_a_living_owners_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let (held, _) = lock(dir.path(), &quiet()).unwrap();
        let me = std::process::id();
        record(dir.path(), me, process::start_ticks(me).unwrap());
        let begun = Instant::now();
        assert!(matches!(lock(dir.path(), &quiet()), Err(RunDirError::Running { pid, .. }) if pid == me));
        assert!(begun.elapsed() < LOCK_TIMEOUT);
        // The same number with another start is another process.
        record(dir.path(), me, 0);
        let waiter = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| lock(dir.path(), &quiet()).map(|(_, owner)| owner.map(|o| o.pid)));
            // A span in which one that did not wait would be done.
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waiter.is_finished());
            drop(held);
            waiter.join().unwrap()
        });
        assert_eq!(waiter.unwrap(), Some(me));
    }

    #[test]
    fn a_daemon_is_found_while_it_makes_its_deleted_files_again() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("f");
        let mut dir = RunDir::of_test(&make_dir(&folder).map(|()| folder.clone()).unwrap());
        flock(&dir.lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        let me = std::process::id();
        dir.owner = Owner { pid: me, started_ticks: process::start_ticks(me).unwrap(), ..Owner::default() };
        // The more descriptors, the longer the moment in which a new one is overlooked.
        let _many: Vec<File> = (0..500).map(|_| File::open("/dev/null").unwrap()).collect();
        let begun = Instant::now();
        assert_eq!((daemon_of(&folder), running(root.path())), (Some(me), vec!["f".to_string()]));
        let took = begun.elapsed();
        // At each moment of a look.
        for turn in 0..200 {
            fs::remove_dir_all(&folder).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(took * turn / 200);
                    // Who looks whether the lock is held, holds it for that moment.
                    while dir.restore().is_err() {}
                });
                assert_eq!(daemon_of(&folder), Some(me), "turn {turn}");
                assert_eq!(running(root.path()), ["f"], "turn {turn}");
            });
        }
    }

    #[test]
    fn a_daemon_that_is_ending_is_waited_for_with_progress_also_after_its_lock_is_free() {
        let dir = tempfile::tempdir().unwrap();
        // It takes its fabric down, until it is killed.
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        until("the program's start", || process::arguments(child.id()).is_some_and(|w| w[0] == "sleep"));
        let (pid, started_ticks) = (child.id(), process::start_ticks(child.id()).unwrap());
        assert_eq!(process::liveness(pid, started_ticks), Liveness::Runs);
        let owner = Owner { pid, started_ticks, ending: true, ..Owner::default() };
        write_whole(&dir.path().join("owner.json"), &serde_json::to_vec(&owner).unwrap()).unwrap();
        let said = Arc::new(Mutex::new(Vec::<String>::new()));
        let (told, heard) = (said.clone(), said.clone());
        let say: Say = Arc::new(move |line: &str| told.lock().unwrap().push(line.to_string()));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| lock(dir.path(), &say).map(|(_, owner)| owner.map(|o| o.pid)));
            until("a word about the wait", || !heard.lock().unwrap().is_empty());
            assert!(!waiter.is_finished());
            child.kill().unwrap();
            child.wait().unwrap();
            assert_eq!(waiter.join().unwrap().unwrap(), Some(pid));
        });
        let said = said.lock().unwrap();
        assert!(said[0].starts_with(WAITING) && said[0].contains(&format!("process {pid}")), "{said:?}");
        assert_eq!(process::liveness(pid, started_ticks), Liveness::Gone);
    }

    #[test]
    fn a_free_lock_is_not_taken_while_its_recorded_owner_runs() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let (pid, started_ticks) = (child.id(), process::start_ticks(child.id()).unwrap());
        record(dir.path(), pid, started_ticks);
        let error = lock(dir.path(), &quiet()).unwrap_err();
        assert!(matches!(error, RunDirError::Running { pid: found, .. } if found == pid), "{error}");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(lock(dir.path(), &quiet()).unwrap().1.map(|owner| owner.pid), Some(pid));
    }

    #[test]
    fn a_killed_fabrics_record_is_changed_under_its_lock_and_a_living_ones_is_not() {
        let root = tempfile::tempdir().unwrap();
        let (dead, alive) = (root.path().join("dead"), root.path().join("alive"));
        [&dead, &alive].into_iter().for_each(|folder| make_dir(folder).unwrap());
        let (held, _) = lock(&dead, &quiet()).unwrap();
        let _alive = lock(&alive, &quiet()).unwrap();
        let me = std::process::id();
        record(&alive, me, process::start_ticks(me).unwrap());
        // The number is another's now.
        record(&dead, me, 0);
        let found = || Killed::all(root.path(), |_| true);
        assert!(found().is_empty(), "its lock is held: another looks after it");
        drop(held);
        assert!(Killed::all(root.path(), |owner| owner.nft_table.is_some()).is_empty());
        let [mut one] = <[Killed; 1]>::try_from(found()).unwrap();
        assert!(found().is_empty(), "it is looked after");
        one.record(|owner| owner.sysctls.push(Sysctl { key: "k".into(), before: "0".into() })).unwrap();
        drop(one);
        assert_eq!(read_owner(&dead).unwrap().sysctls[0].key, "k");
        // A lock that was free although its owner runs.
        record(&dead, me, process::start_ticks(me).unwrap());
        assert!(found().is_empty());
    }

    #[test]
    fn shared_settings_are_changed_in_turns() {
        let root = tempfile::tempdir().unwrap();
        let turn = shared_turn(root.path()).unwrap();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| shared_turn(root.path()).map(drop));
            // A span in which one that did not wait would be done.
            std::thread::sleep(Duration::from_millis(50));
            assert!(!other.is_finished());
            drop(turn);
            other.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_lock_on_a_file_that_was_removed_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let (old, _) = lock(dir.path(), &quiet()).unwrap();
        fs::remove_file(dir.path().join("lock")).unwrap();
        let (new, _) = lock(dir.path(), &quiet()).unwrap();
        assert_ne!(old.metadata().unwrap().ino(), new.metadata().unwrap().ino());
        assert!(matches!(lock(dir.path(), &quiet()), Err(RunDirError::Running { .. })));
    }
}
