//! Captures: a port's frames as pcapng, handed from its worker to the requester.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tombolo_switch::Nanos;
use tombolo_switch::capture::{Capture, CaptureMemory, CaptureRead, CaptureSettings};

use super::{FabricError, Running};

/// Pieces of about 32 KiB that may wait for the reader; beyond that frames wait in the capture, and are left out when that is full.
const PIECES: usize = 2;
/// Bytes of frames that may wait, in all captures of the daemon.
const MEMORY_BYTES: usize = 64 << 20;
/// A reader that takes nothing for so long loses what waits for it.
const STALLED: Duration = Duration::from_secs(10);
/// How often a capture of a silent port checks whether it still has a reader.
const LOOK: Duration = Duration::from_millis(250);

/// Memory of all captures of this process.
static MEMORY: OnceLock<Arc<CaptureMemory>> = OnceLock::new();

/// Waits until the reader has room for a piece; `false` if it has gone. What waits behind the piece is given up when that takes
/// too long, so that a reader that was forgotten holds no memory.
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

impl Running {
    /// Captures a port until the receiver is dropped or the port goes.
    ///
    /// # Errors
    /// If there is no port of that name.
    pub fn capture(&self, name: &str, snaplen: Option<u32>) -> Result<mpsc::Receiver<Vec<u8>>, FabricError> {
        let now = clock_gettime(ClockId::Monotonic);
        let monotonic = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
        let settings = CaptureSettings::default();
        let settings = CaptureSettings {
            snap_bytes: snaplen.map_or(settings.snap_bytes, |n| n.clamp(1, settings.snap_bytes)),
            clock_start: Nanos(wall.saturating_sub(monotonic)),
            memory: Some(MEMORY.get_or_init(|| Arc::new(CaptureMemory::new(MEMORY_BYTES))).clone()),
            ..settings
        };
        for worker in &self.workers {
            let handle = worker.thread.handle();
            let status = handle.status()?;
            let Some(port) = status.ports.iter().find(|p| &*p.name == name) else { continue };
            let mut capture = handle.capture(port.token, settings.clone())?;
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
            return Ok(receiver);
        }
        Err(self.unknown("port", name))
    }
}
