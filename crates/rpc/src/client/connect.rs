//! How a client connects: its options, the handshake, what can go wrong.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use tombolo_ring::rpc::{Broken, Ends, Geometry, Role, initialise};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::foreign::ForeignFd;
use tombolo_shm::memory::{Mapping, MemoryError};
use tombolo_shm::section::{self, AdoptError};

use crate::folder::{self, FolderError};
use crate::message::{Facts, Malformed, Message};
use crate::poll::Polling;
use crate::provider::{MAX_REPLY_ARENA_BYTES, Report};
use crate::socket::{self, Received};
use crate::warm;

/// How a client connects.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// Most requests under way: a power of two up to 4096.
    pub entries: u32,
    /// Memory for requests that do not fit into an entry: 0 or a power of two from 4 KiB. Larger
    /// ones get memory of their own.
    pub arena_bytes: u64,
    /// Most bytes of whole memories that the service may have handed over at a time: the memory of
    /// a reply counts until the service has taken it back and the reply was dropped. A reply beyond
    /// that is [`CallError::ReplyTooLarge`](super::CallError::ReplyTooLarge).
    pub max_shared_bytes: u64,
    /// How long the provider may take to answer the connection.
    pub timeout: Duration,
    /// How the client waits for answers.
    pub polling: Polling,
    /// The folder of sockets; the user's own where there is none.
    pub folder: Option<PathBuf>,
}

impl Default for ConnectOptions {
    fn default() -> Self {
        ConnectOptions {
            entries: 64,
            arena_bytes: 1 << 20,
            max_shared_bytes: 4 << 30,
            timeout: Duration::from_secs(5),
            polling: Polling::Adaptive,
            folder: None,
        }
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum ConnectError {
    /// The name, the folder, or the socket.
    #[error(transparent)]
    Folder(FolderError),
    /// No process serves under the name.
    #[error("no service \"{name}\" is running ({}); `tombolo service ls` shows those that are", path.display())]
    NoService {
        name: String,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The service does not let us in.
    #[error("the service refused the connection: {0}")]
    Refused(String),
    /// The provider did not answer in time.
    #[error("the service accepted the connection but did not answer for {0:?}")]
    Silent(Duration),
    /// The provider closed the connection, or died.
    #[error("the service ended while we connected")]
    Gone,
    /// The other side speaks another protocol, or wants what none of its kind does.
    #[error("{0}")]
    Protocol(String),
    /// The provider's section is not what it should be.
    #[error(transparent)]
    Section(#[from] AdoptError),
    /// No memory for our own section.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The provider's section says something else than agreed.
    #[error("{0}")]
    Broken(Broken),
    /// An option that makes no sense.
    #[error(
        "{entries} entries and an arena of {arena_bytes} bytes: expected powers of two, up to 4096 entries, an arena of 0 or from 4096 bytes"
    )]
    Geometry { entries: u32, arena_bytes: u64 },
    /// The system refused.
    #[error("{what}: {source}")]
    System { what: &'static str, source: Errno },
}

impl From<Malformed> for ConnectError {
    fn from(malformed: Malformed) -> Self {
        ConnectError::Protocol(malformed.to_string())
    }
}

/// A connection that was welcome.
pub(super) struct Connected {
    pub(super) socket: OwnedFd,
    pub(super) doorbell: Doorbell,
    pub(super) own: (Mapping, Geometry),
    pub(super) peer: (Mapping, Geometry),
    pub(super) facts: Facts,
}

/// Why the kernel keeps this process out of a socket, and what to do about it.
fn kept_out(path: &Path) -> String {
    let us = rustix::process::geteuid();
    match std::fs::metadata(path) {
        Ok(socket) => format!(
            "{} is open only to its owner, user {}, and this process runs as user {us}: call as that user, or let \
             the service admit others",
            path.display(),
            socket.uid(),
        ),
        Err(_) => format!("{}: user {us} may not enter a folder on this path: call as its owner", path.display()),
    }
}

fn dial(name: &str, options: &ConnectOptions) -> Result<OwnedFd, ConnectError> {
    let folder = options.folder.clone().map_or_else(folder::services, Ok).map_err(ConnectError::Folder)?;
    let path = folder::socket_path(&folder, name).map_err(ConnectError::Folder)?;
    let socket = folder::dial(&path, options.timeout).map_err(|error| match error {
        FolderError::System { source, .. }
            if matches!(source.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused) =>
        {
            ConnectError::NoService { name: name.into(), path: path.clone() }
        }
        FolderError::System { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
            ConnectError::Refused(kept_out(&path))
        }
        error => ConnectError::Folder(error),
    })?;
    set_socket_timeout(&socket, Timeout::Recv, Some(options.timeout))
        .map_err(|source| ConnectError::System { what: "setting a time limit", source })?;
    Ok(socket)
}

fn ask(
    socket: &OwnedFd,
    message: &Message,
    fds: &[std::os::fd::BorrowedFd<'_>],
    options: &ConnectOptions,
) -> Result<(Message, Vec<ForeignFd>), ConnectError> {
    // Where the service refused us already, its reason waits to be read.
    let sent = socket::send(socket, message, fds, true);
    match socket::receive(socket, true) {
        Received::Message(Message::Refused(why), _) => Err(ConnectError::Refused(why)),
        Received::Message(message, fds) => Ok((message, fds)),
        Received::Malformed(malformed) => Err(malformed.into()),
        Received::Nothing => Err(ConnectError::Silent(options.timeout)),
        Received::Gone => match sent {
            Ok(()) | Err(Errno::PIPE | Errno::CONNRESET) => Err(ConnectError::Gone),
            Err(source) => Err(ConnectError::System { what: "sending to the service", source }),
        },
    }
}

/// Asks a service for its report.
///
/// # Errors
/// [`ConnectError`].
pub fn report(name: &str, options: &ConnectOptions) -> Result<Report, ConnectError> {
    let socket = dial(name, options)?;
    match ask(&socket, &Message::Ask, &[], options)? {
        (Message::Report(text), _) => {
            serde_json::from_str(&text).map_err(|e| ConnectError::Protocol(format!("the service's report: {e}")))
        }
        _ => Err(Malformed::Bytes.into()),
    }
}

pub(super) fn connect(name: &str, options: &ConnectOptions) -> Result<Connected, ConnectError> {
    let (entries, arena_bytes) = (options.entries, options.arena_bytes);
    let geometry = || ConnectError::Geometry { entries, arena_bytes };
    let own_geometry = Geometry::new(entries, arena_bytes).ok_or_else(geometry)?;
    let socket = dial(name, options)?;
    let (fd, own) = section::make("tombolo-rpc", own_geometry.section_bytes(), true)?;
    let view = own.view_mut().ok_or_else(geometry)?;
    initialise(view, own_geometry, Role::Client);
    let hello = Message::Hello { entries, arena_bytes };
    let (Message::Welcome(facts), fds) = ask(&socket, &hello, &[fd.as_fd()], options)? else {
        return Err(Malformed::Bytes.into());
    };
    let [theirs, doorbell] = <[ForeignFd; 2]>::try_from(fds).map_err(|_| ConnectError::from(Malformed::Bytes))?;
    if facts.arena_bytes > MAX_REPLY_ARENA_BYTES {
        return Err(ConnectError::Protocol(format!(
            "the service's reply memory has {} bytes, expected at most {MAX_REPLY_ARENA_BYTES}, since all of it is faulted in here",
            facts.arena_bytes
        )));
    }
    let peer_geometry = Geometry::new(entries, facts.arena_bytes).ok_or(ConnectError::from(Malformed::Bytes))?;
    let peer = section::adopt(&theirs, peer_geometry.section_bytes(), false)?;
    if !warm::has_header(&theirs, peer_geometry, Role::Provider) {
        return Err(ConnectError::Broken(Broken::Header));
    }
    let ends = Ends::new(view, own_geometry, peer.view(), peer_geometry).map_err(ConnectError::Broken)?;
    ends.check_peer(Role::Provider).map_err(ConnectError::Broken)?;
    warm::fault_in(&theirs, &peer, peer_geometry);
    let doorbell =
        Doorbell::adopt(doorbell).map_err(|source| ConnectError::System { what: "the service's doorbell", source })?;
    Ok(Connected { socket, doorbell, own: (own, own_geometry), peer: (peer, peer_geometry), facts })
}
