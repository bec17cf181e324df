//! Captures: frames of a port or network as pcapng, handed from the worker to the requester.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tombolo_switch::Nanos;
use tombolo_switch::capture::{Capture, CaptureMemory, CaptureRead, CaptureSettings};
use tombolo_switch::filter::Filter;

use super::{FabricError, Running};
use crate::api::CaptureOf;

/// Pieces of about 32 KiB that may wait for the reader; beyond that frames wait in the capture, and
/// are left out when that is full.
const PIECES: usize = 2;
/// Bytes of frames that may wait, in all captures of the daemon.
const MEMORY_BYTES: usize = 64 << 20;
/// A reader that takes nothing for so long loses what waits for it.
const STALLED: Duration = Duration::from_secs(10);
/// How often a capture of a silent port checks whether it still has a reader.
const LOOK: Duration = Duration::from_millis(250);

/// Memory of all captures of this process.
static MEMORY: OnceLock<Arc<CaptureMemory>> = OnceLock::new();

/// Waits until the reader has room for a piece; `false` if it has gone. What waits behind the piece
/// is given up when that takes too long, so that a reader that was forgotten holds no memory.
fn hand_over(pieces: &mpsc::Sender<Vec<u8>>, mut piece: Vec<u8>, capture: &mut Capture) -> bool {
    let begun = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        match pieces.try_send(piece) {
            Ok(()) => {
                capture.resume();
                return true;
            }
            Err(TrySendError::Closed(_)) => return false,
            Err(TrySendError::Full(back)) => piece = back,
        }
        if begun.elapsed() >= STALLED {
            capture.discard();
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(Duration::from_millis(50));
    }
}

/// Hands the capture's pieces over until its reader or what it captures has gone.
fn started(name: &str, mut capture: Capture) -> Result<mpsc::Receiver<Vec<u8>>, FabricError> {
    let (pieces, receiver) = mpsc::channel(PIECES);
    let work = move || {
        loop {
            let mut piece = Vec::new();
            let read = capture.read(&mut piece, LOOK);
            if (!piece.is_empty() && !hand_over(&pieces, piece, &mut capture))
                || read == CaptureRead::Ended
                || pieces.is_closed()
            {
                return;
            }
        }
    };
    // A thread of its own: a capture waits for frames as long as it has a reader.
    std::thread::Builder::new().name("tb-capture".into()).spawn(work).map_err(|source| FabricError::Spawn {
        what: format!("a capture of {name}"),
        source,
        hint: "check the limit on threads (ulimit -u)",
    })?;
    Ok(receiver)
}

impl Running {
    /// Captures a port or network until the receiver is dropped, or the port or the last one of the
    /// network goes.
    ///
    /// # Errors
    /// If there is none of that name.
    pub fn capture(
        &self,
        of: &CaptureOf,
        snaplen: Option<u32>,
        filter: Option<Filter>,
    ) -> Result<mpsc::Receiver<Vec<u8>>, FabricError> {
        let now = clock_gettime(ClockId::Monotonic);
        let monotonic = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
        let settings = CaptureSettings::default();
        let settings = CaptureSettings {
            snap_bytes: snaplen.map_or(settings.snap_bytes, |n| n.clamp(1, settings.snap_bytes)),
            clock_start: Nanos(wall.saturating_sub(monotonic)),
            filter: filter.map(Arc::new),
            memory: Some(MEMORY.get_or_init(|| Arc::new(CaptureMemory::new(MEMORY_BYTES))).clone()),
            ..settings
        };
        match of {
            CaptureOf::Port(name) => {
                for worker in &self.workers {
                    let handle = worker.thread.handle();
                    let status = handle.status()?;
                    if let Some(port) = status.ports.iter().find(|p| *p.name == **name) {
                        return started(name, handle.capture(port.token, settings)?);
                    }
                }
                Err(self.unknown("port", name))
            }
            CaptureOf::Network(name) => {
                let there = self.networks.get(name).zip(self.worker_of(name));
                let (net, (_, worker)) = there.ok_or_else(|| self.unknown("network", name))?;
                started(name, worker.thread.handle().capture_network(net.id, settings)?)
            }
        }
    }
}
