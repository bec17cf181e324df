//! The socket at which another daemon asks for a handover: who may ask, and how long the asking may
//! take.
//!
//! # Invariants
//! - Only root and the daemon's own user are heard, but no machine and no helper of the fabric
//!   ([`crate::members`]). A refused peer takes no place. One that connects again and again is
//!   logged once a second.
//! - A peer that connects and says nothing takes a place among [`ASKING`] for [`TIMEOUT`], or
//!   until another needs it. The fabric's task waits for no peer before its first word has arrived.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::net::SocketType;
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::{AbortHandle, JoinHandle};
use tombolo_shm::listener::Listener;

use super::Say;
use super::handover::{self, HELLO};
use crate::api::{Request, Requests};
use crate::members::{Peer, Peers};

/// How long a peer may take for its first line.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Peers that may be about to say it, or have said it and wait for the fabric's task.
const ASKING: usize = 16;
const LINE_BYTES: usize = 64;

/// Passes daemons that want to take over on to the fabric's task, until the returned task is
/// aborted.
pub(crate) fn serve(folder: &Path, requests: Requests, say: Say) -> std::io::Result<JoinHandle<()>> {
    let listener = Listener::replace(&handover::socket_path(folder), SocketType::STREAM)?;
    let listener = UnixListener::from_std(std::os::unix::net::UnixListener::from(listener.hand_over()?))?;
    Ok(tokio::spawn(async move {
        let me = rustix::process::geteuid().as_raw();
        let mut peers = Peers::default();
        let mut asking: Vec<Asking> = Vec::new();
        loop {
            let Ok((socket, _)) = listener.accept().await else {
                // No descriptor is left; there may be one later.
                tokio::time::sleep(Duration::from_secs(1)).await;
                continue;
            };
            // One that has ended asks for nothing any more.
            let Some(peer) = peers.look(&socket) else { continue };
            if let Some(why) = refusal(&peer, me) {
                if !peer.is_known {
                    say(&format!("handover: {why}"));
                }
                continue;
            }
            asking.retain(|asks| !asks.task.is_finished());
            if asking.len() >= ASKING {
                // The one that has been silent for longest.
                match asking.iter().position(|asks| !asks.is_heard.load(Ordering::Relaxed)) {
                    Some(at) => asking.remove(at).task.abort(),
                    None => continue,
                }
            }
            let (requests, say) = (requests.clone(), say.clone());
            let is_heard = Arc::new(AtomicBool::new(false));
            let heard = is_heard.clone();
            let task = tokio::spawn(async move {
                if let Err(why) = hear(socket, &requests, &heard).await {
                    say(&format!("handover: {why}"));
                }
            });
            asking.push(Asking { is_heard, task: task.abort_handle() });
        }
    }))
}

/// A peer that is not refused.
struct Asking {
    /// Its first line is there. Relaxed: all tasks are on one thread.
    is_heard: Arc<AtomicBool>,
    task: AbortHandle,
}

/// Why a peer is not heard.
fn refusal(peer: &Peer, me: u32) -> Option<String> {
    if peer.uid != me && peer.uid != 0 {
        return Some(format!("expected root or user {me}, found user {}: it is ignored", peer.uid));
    }
    let member = peer.member?;
    Some(format!("process {member} is a machine or helper of the fabric itself and may not ask: it is ignored"))
}

/// Hears a peer's first line and passes it on.
async fn hear(mut socket: UnixStream, requests: &Requests, is_heard: &AtomicBool) -> Result<(), String> {
    let line = tokio::time::timeout(TIMEOUT, line(&mut socket)).await;
    let line = line.map_err(|_| format!("a process connected and stayed silent for {} s", TIMEOUT.as_secs()))?;
    let line = line.map_err(|error| error.to_string())?;
    is_heard.store(true, Ordering::Relaxed);
    let socket = socket.into_std().and_then(|socket| socket.set_nonblocking(false).map(|()| socket));
    let mut socket = socket.map_err(|error| error.to_string())?;
    if line != HELLO {
        // There may be no reader. The buffer of a fresh socket has room for it.
        let _ = std::io::Write::write_all(&mut socket, format!("expected {HELLO:?}, found {line:?}\n").as_bytes());
        return Err(format!("a process sent an unknown request: {line:?}"));
    }
    // If there is no receiver, the fabric has ended.
    let _ = requests.send(Request::HandOver { socket }).await;
    Ok(())
}

async fn line(socket: &mut UnixStream) -> std::io::Result<String> {
    let mut out = Vec::new();
    while out.len() < LINE_BYTES {
        match socket.read_u8().await {
            Ok(b'\n') => break,
            Ok(byte) => out.push(byte),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => break,
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&out).trim_end().to_string())
}
