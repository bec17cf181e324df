//! Where services are found: a folder of sockets, one for each name.
//!
//! `$TOMBOLO_RUNTIME/services/NAME`, else `/run/tombolo/services/NAME` for root and `$XDG_RUNTIME_DIR/tombolo/services/NAME` for
//! others. A service lives as long as somebody listens on its socket: a socket whose listener was killed refuses
//! connections, and is replaced by the next service of that name and removed by whoever lists the services. So is one whose listener's process
//! has ended, and only a child that it forked keeps it open. What is no socket is nobody's service, and left alone.
//!
//! Two that register one name at a time, or one that removes a stale socket while another replaces it, are kept apart by a
//! lock on the folder, which the kernel releases however its holder ends; nobody waits for it for longer than 2 s, since
//! whoever can read the folder can hold it. A socket is bound under another name and renamed, so
//! that whoever finds the name finds a listener.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};

use crate::process;

const MAX_NAME_BYTES: usize = 64;
/// How long the folder's lock is waited for: it is held for a few system calls.
const LOCKED: Duration = Duration::from_secs(2);

/// Why a service's socket could not be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// Not a name of a service.
    #[error("\"{0}\" is no name of a service: expected 1 to 64 of a-z A-Z 0-9 . _ -, the first not a dot")]
    Name(String),
    /// Neither variable nor default fits.
    #[error(
        "no place for sockets: expected $XDG_RUNTIME_DIR or $TOMBOLO_RUNTIME to be set (not running as root); set one"
    )]
    NoPlace,
    /// Somebody serves under this name already.
    #[error("the service \"{0}\" is running already; end it, or register another name")]
    Running(String),
    /// A Unix socket's path has at most 107 bytes.
    #[error("the socket path {} is longer than the 107 bytes that the system allows; set $TOMBOLO_RUNTIME to a shorter folder", .0.display())]
    LongPath(PathBuf),
    /// The system refused.
    #[error("{what} {}: {source}", path.display())]
    System {
        /// What was tried.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
}

fn system(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FolderError {
    move |source| FolderError::System { what, path: path.into(), source }
}

/// The folder of this user's services. It may not be there yet.
///
/// # Errors
/// [`FolderError::NoPlace`].
pub fn services() -> Result<PathBuf, FolderError> {
    let root = if let Some(path) = std::env::var_os("TOMBOLO_RUNTIME") {
        PathBuf::from(path)
    } else if rustix::process::geteuid().is_root() {
        "/run/tombolo".into()
    } else {
        let base = std::env::var_os("XDG_RUNTIME_DIR").ok_or(FolderError::NoPlace)?;
        Path::new(&base).join("tombolo")
    };
    Ok(root.join("services"))
}

/// The socket of a service in a folder.
///
/// # Errors
/// [`FolderError::Name`] for what could be a path of something else.
pub fn socket_path(folder: &Path, name: &str) -> Result<PathBuf, FolderError> {
    let fine = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.starts_with('.') || !name.bytes().all(fine) {
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

/// Connects to a service's socket, and waits for at most `patience` where many connect at a time.
///
/// # Errors
/// `NotFound` and `ConnectionRefused` mean that nobody serves under the name.
pub(crate) fn dial(path: &Path, patience: Duration) -> Result<OwnedFd, FolderError> {
    let address = address(path)?;
    let tried = (|| {
        let socket = new_socket(SocketFlags::empty())?;
        set_socket_timeout(&socket, Timeout::Send, Some(patience))?;
        connect(&socket, &address)?;
        // Nobody accepts what a child of the listener keeps open.
        if process::has_ended(&socket) { Err(Errno::CONNREFUSED) } else { Ok(socket) }
    })();
    tried.map_err(|e: Errno| system("connecting to", path)(e.into()))
}

/// It is a socket, nobody listens on it, and nobody will: its listener has gone. The kernel refuses connections to what is no socket by
/// the same word.
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

/// The lock that keeps changes of the folder apart; released when dropped.
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        // Closing it would not do: a child that was forked meanwhile has the same open file, and with it the lock.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

fn lock(folder: &Path) -> Result<Locked, FolderError> {
    let file = File::open(folder).map_err(system("opening", folder))?;
    let end = Instant::now() + LOCKED;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Locked(file)),
            Err(Errno::WOULDBLOCK) if Instant::now() < end => std::thread::sleep(Duration::from_millis(1)),
            Err(Errno::WOULDBLOCK) => {
                let held = format!("another process has held its lock (flock) for {LOCKED:?}; end that one");
                return Err(system("locking", folder)(io::Error::new(io::ErrorKind::WouldBlock, held)));
            }
            Err(error) => return Err(system("locking", folder)(error.into())),
        }
    }
}

/// The socket that a service listens on. Its name goes when this is dropped, unless somebody else has it by then.
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

impl Listener {
    /// Takes the name, replacing a stale socket. `mode` is the socket's permissions.
    pub(crate) fn bind(folder: &Path, name: &str, mode: u32) -> Result<Listener, FolderError> {
        let path = socket_path(folder, name)?;
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true).mode(0o755).create(folder).map_err(system("creating", folder))?;
        let _lock = lock(folder)?;
        if let Ok(there) = fs::symlink_metadata(&path) {
            if !there.file_type().is_socket() {
                let why = "it is no socket, expected one or nothing; move it away, or register another name";
                return Err(system("taking the name of", &path)(io::Error::new(io::ErrorKind::AlreadyExists, why)));
            }
            if !is_stale(&path) {
                return Err(FolderError::Running(name.into()));
            }
        }
        let new = folder.join(format!(".{name}.{}", std::process::id()));
        // Left by a process of our number that was killed between the two steps.
        let _ = fs::remove_file(&new);
        let made = (|| {
            let socket = new_socket(SocketFlags::NONBLOCK)?;
            bind(&socket, &address(&new).map_err(|_| Errno::NAMETOOLONG)?)?;
            fs::set_permissions(&new, fs::Permissions::from_mode(mode))?;
            listen(&socket, 128)?;
            fs::rename(&new, &path)?;
            io::Result::Ok(socket)
        })();
        let socket = made.map_err(|source| {
            let _ = fs::remove_file(&new);
            if source.raw_os_error() == Some(Errno::NAMETOOLONG.raw_os_error()) {
                return FolderError::LongPath(new.clone());
            }
            system("listening on", &path)(source)
        })?;
        let file = file_of(&path).unwrap_or_default();
        Ok(Listener { socket, path, folder: folder.into(), file })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Where it is not to be had: nobody replaces a socket that still listens, as ours does.
        let _lock = lock(&self.folder);
        if file_of(&self.path) == Some(self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Names of the services of a folder, sorted; sockets whose listeners have gone are removed on the way, as far as we may.
pub fn list(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return vec![] };
    let mut names = Vec::new();
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = entry.path();
        if is_stale(&path) {
            let locked = lock(folder);
            // Again, under the lock: it may have been replaced.
            if locked.is_ok() && is_stale(&path) {
                let _ = fs::remove_file(&path);
            }
        } else if socket_path(folder, &name).is_ok() && fs::metadata(&path).is_ok_and(|m| m.file_type().is_socket()) {
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
        for name in ["a", "b"] {
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
            assert!(error.contains("no socket") && error.contains(name), "{error}");
            assert!(fs::symlink_metadata(at(name)).is_ok(), "{name} is gone");
        }
        assert_eq!(fs::read_to_string(at("notes")).unwrap(), "precious");
    }

    #[test]
    fn whoever_holds_the_lock_keeps_nobody_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(dir.path(), "a", 0o600).unwrap();
        let _held = lock(dir.path()).unwrap();
        let error = Listener::bind(dir.path(), "b", 0o600).unwrap_err().to_string();
        assert!(error.contains("lock"), "{error}");
        drop(listener);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "its own name goes all the same");
    }

    #[test]
    fn the_lock_is_given_back_also_while_a_forked_child_has_it_open() {
        let dir = tempfile::tempdir().unwrap();
        let locked = lock(dir.path()).unwrap();
        // As a child has it: the same open file.
        let inherited = locked.0.try_clone().unwrap();
        drop(locked);
        assert!(lock(dir.path()).is_ok());
        drop(inherited);
    }

    #[test]
    fn a_path_that_is_too_long_is_said_so() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("x".repeat(100));
        assert!(matches!(Listener::bind(&folder, "a", 0o600), Err(FolderError::LongPath(_))));
    }
}
