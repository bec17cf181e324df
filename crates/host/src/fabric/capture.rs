//! Captures: a port's frames as pcapng, handed from its worker to whoever asked.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::mpsc;
use tombolo_switch::Nanos;
use tombolo_switch::capture::{CaptureRead, CaptureSettings};

use super::{FabricError, Running};

/// Pieces that may wait for the reader; beyond that frames wait in the capture, and are left out when that is full.
const PIECES: usize = 16;
/// How often a capture of a silent port looks whether anybody reads it still.
const LOOK: Duration = Duration::from_millis(250);

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
            ..settings
        };
        for worker in &self.workers {
            let handle = worker.thread.handle();
            let status = handle.status()?;
            let Some(port) = status.ports.iter().find(|p| &*p.name == name) else { continue };
            let mut capture = handle.capture(port.token, settings)?;
            let (pieces, receiver) = mpsc::channel(PIECES);
            let work = move || {
                loop {
                    let mut piece = Vec::new();
                    let read = capture.read(&mut piece, LOOK);
                    if (!piece.is_empty() && pieces.blocking_send(piece).is_err())
                        || read == CaptureRead::Ended
                        || pieces.is_closed()
                    {
                        return;
                    }
                }
            };
            // A thread of its own: a capture waits for frames as long as somebody reads it.
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
