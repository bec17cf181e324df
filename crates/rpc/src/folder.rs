//! Where services are found: a folder of sockets, one for each name.
//!
//! The folder is `$TOMBOLO_RUNTIME/services/NAME`, else `/run/tombolo/services/NAME` for root and
//! `$XDG_RUNTIME_DIR/tombolo/services/NAME` for others. A service lives as long as a process
//! listens on its socket. A socket is stale if its listener was killed and it refuses connections.
//! It is also stale if its listener's process has ended and only a forked child keeps it open. The
//! next service of that name replaces a stale socket, and listing the services removes it. A file
//! that is no socket belongs to no service, and is left alone.
//!
//! Two processes of one user may register one name at the same time, or one may remove a stale
//! socket while another replaces it. A lock that only this user can take keeps them apart. It is a
//! file of mode 0600, `.lock-UID`, that exists while it is held. The folder itself is not locked,
//! since every process that can read it could hold that lock for ever.
//!
//! Several users may share a folder that all of them can write. The file system keeps them apart: a
//! name is taken by a rename that replaces nothing, and a stale file is first moved aside and
//! checked again. A socket is bound under another name and then renamed, so that a client that
//! finds the name finds a listener.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FlockOperation, OFlags, RenameFlags, flock, renameat_with};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};

use crate::process;
use tombolo_calls::hello::is_name;
use tombolo_shm::environment::variable;

/// How long the lock is waited for: it is held for a few system calls.
const LOCKED: Duration = Duration::from_secs(2);

/// Why a service's socket could not be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum FolderError {
    /// Not a name of a service.
    #[error("\"{0}\" is not a valid service name: expected 1 to 64 of a-z A-Z 0-9 . _ -, the first not a dot")]
    Name(String),
    /// Neither variable nor default fits.
    #[error(
        "no place for sockets: expected $XDG_RUNTIME_DIR or $TOMBOLO_RUNTIME to be set (not running as root); set one"
    )]
    NoPlace,
    /// Another process serves under this name already.
    #[error("the service \"{0}\" is running already; end it, or register another name")]
    Running(String),
    /// A Unix socket's path has at most 107 bytes.
    #[error("the socket path {} is longer than the 107 bytes that the system allows; set $TOMBOLO_RUNTIME to a shorter folder", .0.display())]
    LongPath(PathBuf),
    /// The system refused.
    #[error("{what} {}: {source}", path.display())]
    System { what: &'static str, path: PathBuf, source: io::Error },
}

fn system(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FolderError {
    move |source| FolderError::System { what, path: path.into(), source }
}

/// The folder of this user's services. It may not be there yet.
///
/// # Errors
/// [`FolderError::NoPlace`].
pub fn services() -> Result<PathBuf, FolderError> {
    let root = if let Some(path) = variable("TOMBOLO_RUNTIME") {
        PathBuf::from(path)
    } else if rustix::process::geteuid().is_root() {
        "/run/tombolo".into()
    } else {
        let base = variable("XDG_RUNTIME_DIR").ok_or(FolderError::NoPlace)?;
        Path::new(&base).join("tombolo")
    };
    Ok(root.join("services"))
}

/// The socket of a service in a folder.
///
/// # Errors
/// [`FolderError::Name`] for what could be a path of something else.
pub fn socket_path(folder: &Path, name: &str) -> Result<PathBuf, FolderError> {
    if !is_name(name.as_bytes()) {
        return Err(FolderError::Name(name.into()));
    }
    Ok(folder.join(name))
}

fn address(path: &Path) -> Result<SocketAddrUnix, FolderError> {
    SocketAddrUnix::new(path).map_err(|_| FolderError::LongPath(path.into()))
}

fn new_socket(flags: SocketFlags) -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags | SocketFlags::CLOEXEC, None)
}

/// Connects to a service's socket. Waits for at most `timeout` if many clients connect at the same
/// time.
///
/// # Errors
/// `NotFound` and `ConnectionRefused` mean that no process serves under the name.
pub(crate) fn dial(path: &Path, timeout: Duration) -> Result<OwnedFd, FolderError> {
    let address = address(path)?;
    let tried = (|| {
        let socket = new_socket(SocketFlags::empty())?;
        set_socket_timeout(&socket, Timeout::Send, Some(timeout))?;
        connect(&socket, &address)?;
        // If only a child of the listener keeps the socket open, no process accepts on it.
        if process::has_ended(&socket) { Err(Errno::CONNREFUSED) } else { Ok(socket) }
    })();
    tried.map_err(|e: Errno| system("connecting to", path)(e.into()))
}

/// Whether it is a socket without a listener, now and in the future, because its listener has gone.
/// The kernel refuses a connection to a file that is no socket with the same error.
fn is_stale(path: &Path) -> bool {
    if !fs::symlink_metadata(path).is_ok_and(|m| m.file_type().is_socket()) {
        return false;
    }
    let Ok(address) = address(path) else { return false };
    // Non-blocking: a listener whose queue is full is a listener.
    new_socket(SocketFlags::NONBLOCK).is_ok_and(|probe| match connect(&probe, &address) {
        Ok(()) => process::has_ended(&probe),
        Err(error) => error == Errno::CONNREFUSED,
    })
}

/// The lock that keeps this user's changes of the folder apart; released, and its file removed,
/// when dropped.
struct Locked {
    file: File,
    path: PathBuf,
}

impl Drop for Locked {
    fn drop(&mut self) {
        // Removed while it is held: a process that has opened it meanwhile sees that, and begins
        // again.
        let _ = fs::remove_file(&self.path);
        // Closing it would not do: a child that was forked meanwhile has the same open file, and
        // with it the lock.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

fn lock(folder: &Path) -> Result<Locked, FolderError> {
    let user = rustix::process::geteuid().as_raw();
    let path = folder.join(format!(".lock-{user}"));
    let end = Instant::now() + LOCKED;
    loop {
        // Without waiting: where others may write the folder, it could be a pipe that they made.
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let opened = OpenOptions::new().read(true).write(true).create(true).mode(0o600).custom_flags(flags).open(&path);
        let file = opened.map_err(system("opening", &path))?;
        let there = file.metadata().map_err(system("looking at", &path))?;
        if !there.is_file() || there.uid() != user || there.mode() & 0o077 != 0 {
            let (owner, mode) = (there.uid(), there.mode() & 0o7777);
            let why = format!(
                "it is of user {owner} with mode {mode:o}, expected a file of user {user} with mode 600; remove it"
            );
            return Err(system("locking", &path)(io::Error::new(io::ErrorKind::PermissionDenied, why)));
        }
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            // Its last holder removed the file between our open and our lock: then it protects
            // nothing.
            Ok(()) if file_of(&path) == Some((there.dev(), there.ino())) => return Ok(Locked { file, path }),
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
            Err(Errno::WOULDBLOCK) => {
                let held = format!("another process of user {user} has held it for {LOCKED:?}; end that process");
                return Err(system("locking", &path)(io::Error::new(io::ErrorKind::WouldBlock, held)));
            }
            Err(error) => return Err(system("locking", &path)(error.into())),
        }
    }
}

/// A name in the folder that no service has, and no other process uses.
fn private(folder: &Path, name: &str, what: &str) -> PathBuf {
    // Process numbers are not unique where the folder is shared across PID namespaces.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let (next, now) = (NEXT.fetch_add(1, Ordering::Relaxed), crate::clock::now_ns());
    folder.join(format!(".{name}.{}.{next}.{now:x}{what}", std::process::id()))
}

/// Renames if the target name is free. On file systems that cannot do this (none of those that hold
/// `/run`) it replaces the target.
fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::INVAL | Errno::NOSYS) => fs::rename(from, to),
        renamed => Ok(renamed?),
    }
}

/// Removes a stale socket, and nothing else: a process that does not share our lock may have
/// replaced it since it was looked at.
fn remove_stale(folder: &Path, path: &Path) {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let aside = private(folder, name.trim_start_matches('.'), ".old");
    if fs::rename(path, &aside).is_err() {
        return;
    }
    if is_stale(&aside) || rename_to_free(&aside, path).is_err() {
        let _ = fs::remove_file(&aside);
    }
}

/// The socket that a service listens on. Its name goes when this is dropped, unless another service
/// has it by then.
#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    path: PathBuf,
    folder: PathBuf,
    /// Device and number of the socket's file.
    file: (u64, u64),
}

fn file_of(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

/// Makes a folder for services that other users can look into, independent of the umask. An
/// existing folder stays as it is.
///
/// # Errors
/// The system's.
pub fn make(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    if let Some(above) = folder.parent().filter(|p| !p.as_os_str().is_empty()) {
        make(above)?;
    }
    match fs::DirBuilder::new().mode(0o755).create(folder) {
        Ok(()) => fs::set_permissions(folder, fs::Permissions::from_mode(0o755)),
        // Another process was first.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
    }
}

impl Listener {
    /// Takes the name, replacing a stale socket. `mode` is the socket's permissions.
    pub(crate) fn bind(folder: &Path, name: &str, mode: u32) -> Result<Listener, FolderError> {
        let path = socket_path(folder, name)?;
        make(folder).map_err(system("creating", folder))?;
        let _lock = lock(folder)?;
        if let Ok(there) = fs::symlink_metadata(&path) {
            if !there.file_type().is_socket() {
                let why = "it is not a socket, expected a socket or nothing; move it away, or register another name";
                return Err(system("taking the name of", &path)(io::Error::new(io::ErrorKind::AlreadyExists, why)));
            }
            if !is_stale(&path) {
                return Err(FolderError::Running(name.into()));
            }
            remove_stale(folder, &path);
        }
        let new = private(folder, name, "");
        let made = (|| {
            let socket = new_socket(SocketFlags::NONBLOCK)?;
            bind(&socket, &address(&new).map_err(|_| Errno::NAMETOOLONG)?)?;
            fs::set_permissions(&new, fs::Permissions::from_mode(mode))?;
            listen(&socket, 128)?;
            rename_to_free(&new, &path)?;
            io::Result::Ok(socket)
        })();
        let socket = made.map_err(|source| {
            let _ = fs::remove_file(&new);
            if source.raw_os_error() == Some(Errno::NAMETOOLONG.raw_os_error()) {
                return FolderError::LongPath(new.clone());
            }
            if source.kind() == io::ErrorKind::AlreadyExists {
                // Another user was faster, in a folder that both may write.
                return FolderError::Running(name.into());
            }
            system("listening on", &path)(source)
        })?;
        let file = file_of(&path).unwrap_or_default();
        Ok(Listener { socket, path, folder: folder.into(), file })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // If the lock is not available, go on: no other process replaces a socket that still
        // listens, as ours does.
        let _lock = lock(&self.folder);
        if file_of(&self.path) == Some(self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes a socket whose listener has gone, as far as we may. Returns whether its listener had
/// gone.
fn clear_path(folder: &Path, path: &Path) -> bool {
    let stale = is_stale(path);
    if stale {
        let locked = lock(folder);
        // Again, under the lock: it may have been replaced.
        if locked.is_ok() && is_stale(path) {
            remove_stale(folder, path);
        }
    }
    stale
}

/// Removes what a killed service has left under its name. A service that runs is left alone.
pub fn clear(folder: &Path, name: &str) {
    if let Ok(path) = socket_path(folder, name) {
        clear_path(folder, &path);
    }
}

/// Names of the services of a folder, sorted; sockets whose listeners have gone are removed on the
/// way, as far as we may.
pub fn list(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return vec![] };
    let mut names = Vec::new();
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = entry.path();
        if clear_path(folder, &path) {
            continue;
        }
        if socket_path(folder, &name).is_ok() && fs::metadata(&path).is_ok_and(|m| m.file_type().is_socket()) {
            names.push(name);
        }
    }
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_be_paths_are_refused() {
        let folder = Path::new("/x");
        for name in ["", ".", "..", ".a", "a/b", "a b", "ä", &"a".repeat(65)] {
            assert!(matches!(socket_path(folder, name), Err(FolderError::Name(_))), "{name}");
        }
        assert_eq!(socket_path(folder, "Calc-1.b_c").unwrap(), Path::new("/x/Calc-1.b_c"));
    }

    #[test]
    fn a_name_has_one_listener_and_goes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(dir.path(), "a", 0o600).unwrap();
        assert!(matches!(Listener::bind(dir.path(), "a", 0o600), Err(FolderError::Running(_))));
        assert_eq!(list(dir.path()), ["a"]);
        assert!(dial(&dir.path().join("a"), Duration::from_secs(1)).is_ok());
        drop(listener);
        assert_eq!(list(dir.path()), [""; 0]);
        assert!(Listener::bind(dir.path(), "a", 0o600).is_ok());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_cleared() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c"] {
            let listener = Listener::bind(dir.path(), name, 0o600).unwrap();
            // As a killed process leaves it: the descriptor is closed, the name stays.
            let Listener { socket, .. } = &listener;
            rustix::net::shutdown(socket, rustix::net::Shutdown::Both).unwrap();
            let copy = socket.try_clone().unwrap();
            std::mem::forget(listener);
            drop(copy);
        }
        assert!(is_stale(&dir.path().join("a")));
        let replaced = Listener::bind(dir.path(), "a", 0o600).unwrap();
        assert!(dir.path().join("c").exists());
        ["c", "a", "absent", "../c"].iter().for_each(|name| clear(dir.path(), name));
        assert!(!dir.path().join("c").exists(), "what was killed is cleared by its name, and what runs is not");
        assert_eq!(list(dir.path()), ["a"]);
        assert!(!dir.path().join("b").exists(), "listing clears what is stale");
        drop(replaced);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn what_is_no_socket_is_neither_replaced_nor_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("notes"), "precious").unwrap();
        fs::create_dir(at("folder")).unwrap();
        std::os::unix::fs::symlink(at("nowhere"), at("link")).unwrap();
        assert_eq!(list(dir.path()), [""; 0]);
        for name in ["notes", "folder", "link"] {
            let error = Listener::bind(dir.path(), name, 0o600).unwrap_err().to_string();
            assert!(error.contains("not a socket") && error.contains(name), "{error}");
            assert!(fs::symlink_metadata(at(name)).is_ok(), "{name} is gone");
        }
        assert_eq!(fs::read_to_string(at("notes")).unwrap(), "precious");
    }

    #[test]
    fn a_lock_on_the_folder_or_on_a_socket_keeps_no_name_from_being_taken() {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(dir.path(), "a", 0o600).unwrap();
        // As any user can who may read the folder.
        let folder = File::open(dir.path()).unwrap();
        flock(&folder, FlockOperation::NonBlockingLockExclusive).unwrap();
        let began = Instant::now();
        let other = Listener::bind(dir.path(), "b", 0o600).unwrap();
        assert_eq!(list(dir.path()), ["a", "b"]);
        drop((listener, other));
        assert!(began.elapsed() < LOCKED, "the folder's lock is waited for");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn only_this_user_can_hold_the_lock_and_not_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(dir.path(), "a", 0o600).unwrap();
        let held = lock(dir.path()).unwrap();
        assert_eq!(fs::metadata(&held.path).unwrap().mode() & 0o7777, 0o600);
        let error = Listener::bind(dir.path(), "b", 0o600).unwrap_err().to_string();
        assert!(error.contains("lock"), "{error}");
        drop(listener);
        drop(held);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "its own name goes all the same");
        // A file that others can open is not accepted as our lock: this is reported, not waited
        // for.
        let injected = dir.path().join(format!(".lock-{}", rustix::process::geteuid().as_raw()));
        fs::write(&injected, "").unwrap();
        fs::set_permissions(&injected, fs::Permissions::from_mode(0o666)).unwrap();
        let error = Listener::bind(dir.path(), "b", 0o600).unwrap_err().to_string();
        assert!(error.contains("mode 666") && error.contains("remove it"), "{error}");
    }

    #[test]
    fn the_lock_is_given_back_also_while_a_forked_child_has_it_open() {
        let dir = tempfile::tempdir().unwrap();
        let locked = lock(dir.path()).unwrap();
        // As a child has it: the same open file.
        let inherited = locked.file.try_clone().unwrap();
        drop(locked);
        assert!(lock(dir.path()).is_ok());
        drop(inherited);
    }

    #[test]
    fn of_many_that_take_a_stale_name_one_has_it() {
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..20 {
            // As a killed process leaves it.
            let killed = std::mem::ManuallyDrop::new(Listener::bind(dir.path(), "a", 0o600).unwrap());
            rustix::net::shutdown(&killed.socket, rustix::net::Shutdown::Both).unwrap();
            assert!(is_stale(&dir.path().join("a")));
            let taken: Vec<_> = std::thread::scope(|scope| {
                let all: Vec<_> = (0..6).map(|_| scope.spawn(|| Listener::bind(dir.path(), "a", 0o600).ok())).collect();
                all.into_iter().filter_map(|one| one.join().unwrap()).collect()
            });
            assert_eq!(taken.len(), 1);
            assert_eq!(list(dir.path()), ["a"]);
            drop(taken);
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
        }
    }

    #[test]
    fn a_socket_that_was_replaced_is_not_removed_as_stale() {
        let dir = tempfile::tempdir().unwrap();
        let live = Listener::bind(dir.path(), "a", 0o600).unwrap();
        remove_stale(dir.path(), &dir.path().join("a"));
        assert_eq!(list(dir.path()), ["a"]);
        drop(live);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_path_that_is_too_long_is_said_so() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("x".repeat(100));
        assert!(matches!(Listener::bind(&folder, "a", 0o600), Err(FolderError::LongPath(_))));
    }
}
