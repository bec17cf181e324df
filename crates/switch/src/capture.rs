//! Capture of a port's frames to pcapng, while it works.
//!
//! ```text
//! worker: Tap --- parcels of copied frames, bounded in bytes, never waited for ---> Capture: any other thread
//! ```
//!
//! The worker copies the frames of a turn into a parcel and sends it on. Where the reader has left too many bytes
//! unread, frames are left out and counted, in the port's `capture_lost` and in the statistics block at the end of
//! the capture; the worker never waits. A [`Capture`] that is dropped ends the copying with the next frame.
//!
//! What is captured:
//! * *received*: what came from the peer and was taken, with a comment on those that go nowhere and why.
//! * *transmitted*: what was handed to the peer, after segments and checksums were made. Where the port did not take
//!   all frames of a turn, a comment says how many of how many, since only the port knows which.
//!
//! A port that nobody captures pays one comparison per turn.

use crate::Nanos;
use crate::counters::PortCounters;
use crate::drop::Reason;
use crate::frame::{Batch, Checksum, MAX_FRAME_BYTES, Offload};
use crate::pcapng::{self, Direction, Packet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;
use tombolo_ring::mem::ForeignMut;

/// What a capture takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaptureSettings {
    /// Bytes of each frame that are kept.
    pub snap_bytes: u32,
    /// Frames from the port's peer.
    pub received: bool,
    /// Frames to the port's peer.
    pub transmitted: bool,
    /// Of the received frames, also those that go nowhere.
    pub dropped: bool,
    /// Bytes of frames that may wait to be read, with [`FRAME_OVERHEAD_BYTES`] for each; beyond that frames are left
    /// out.
    pub queue_bytes: usize,
    /// Time since 1970 at which the worker's clock was zero.
    pub clock_start: Nanos,
}

impl Default for CaptureSettings {
    fn default() -> Self {
        CaptureSettings {
            snap_bytes: MAX_FRAME_BYTES as u32,
            received: true,
            transmitted: true,
            dropped: true,
            queue_bytes: 8 << 20,
            clock_start: Nanos(0),
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    /// Bytes that were sent and not read. Relaxed: it bounds memory and orders nothing, the channel does that.
    waiting_bytes: AtomicUsize,
    /// Frames that were to be captured, and those of them that were left out; written by the worker only.
    frames: AtomicU64,
    lost: AtomicU64,
}

/// The worker's end.
#[derive(Debug)]
pub(crate) struct Tap {
    settings: CaptureSettings,
    parcels: Sender<Parcel>,
    shared: Arc<Shared>,
}

/// Frames of one turn in one direction.
#[derive(Debug)]
struct Parcel {
    time_ns: u64,
    direction: Direction,
    records: Vec<Record>,
    bytes: Vec<u8>,
    /// Frames that the port did not take, of how many; not known which.
    refused: (u64, u64),
}

/// What a frame that waits to be read takes beside the bytes that are kept of it.
pub const FRAME_OVERHEAD_BYTES: usize = size_of::<Record>();

#[derive(Debug)]
struct Record {
    captured: u32,
    original: u32,
    offload: Offload,
    dropped: Option<Reason>,
}

impl Parcel {
    /// Bytes that it holds while it waits.
    fn waiting_bytes(&self) -> usize {
        self.bytes.len() + self.records.len() * FRAME_OVERHEAD_BYTES
    }
}

/// What [`Capture::read`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CaptureRead {
    /// Bytes were appended.
    Data,
    /// Nothing came within the time.
    Quiet,
    /// The port is gone; the last bytes were appended.
    Ended,
}

/// A running capture of one port. Any thread but the worker's reads it.
#[derive(Debug)]
pub struct Capture {
    name: Arc<str>,
    settings: CaptureSettings,
    parcels: Receiver<Parcel>,
    shared: Arc<Shared>,
    last_time_ns: u64,
    began: bool,
}

/// Both ends of a capture of the port that is called `name`.
pub(crate) fn start(name: Arc<str>, settings: CaptureSettings) -> (Tap, Capture) {
    let (sender, parcels) = mpsc::channel();
    let shared = Arc::new(Shared::default());
    let tap = Tap { settings, parcels: sender, shared: shared.clone() };
    (tap, Capture { name, settings, parcels, shared, last_time_ns: settings.clock_start.0, began: false })
}

impl Tap {
    /// Copies the frames of a turn that came from the port; `dropped` are those that go nowhere, by rising index.
    /// Returns `false` when nobody reads any more.
    pub(crate) fn received(
        &self,
        now: Nanos,
        batch: &Batch<'_>,
        dropped: &[(u16, Reason)],
        counters: &PortCounters,
    ) -> bool {
        if !self.settings.received {
            return true;
        }
        let mut dropped = dropped.iter().peekable();
        let frames = (0..batch.len() as u16).filter_map(|index| {
            let reason = dropped.next_if(|(at, _)| *at == index).map(|(_, reason)| *reason);
            (reason.is_none() || self.settings.dropped).then_some((index, reason))
        });
        self.send(now, Direction::Received, batch, frames, (0, 0), counters)
    }

    /// Copies frames that were handed to the port, which did not take `refused` of them.
    pub(crate) fn transmitted(
        &self,
        now: Nanos,
        batch: &Batch<'_>,
        which: &[u16],
        refused: u64,
        counters: &PortCounters,
    ) -> bool {
        if !self.settings.transmitted {
            return true;
        }
        let frames = which.iter().map(|index| (*index, None));
        self.send(now, Direction::Transmitted, batch, frames, (refused, which.len() as u64), counters)
    }

    fn send(
        &self,
        now: Nanos,
        direction: Direction,
        batch: &Batch<'_>,
        frames: impl Iterator<Item = (u16, Option<Reason>)>,
        refused: (u64, u64),
        counters: &PortCounters,
    ) -> bool {
        if Arc::strong_count(&self.shared) == 1 {
            return false;
        }
        let time_ns = now.after(self.settings.clock_start).0;
        let mut parcel = Parcel { time_ns, direction, records: Vec::new(), bytes: Vec::new(), refused };
        let room = self.settings.queue_bytes.saturating_sub(self.shared.waiting_bytes.load(Ordering::Relaxed));
        let mut lost = 0;
        for (index, dropped) in frames {
            let frame = &batch.frames()[index as usize];
            let captured = frame.len().min(self.settings.snap_bytes as usize);
            let start = parcel.bytes.len();
            if parcel.waiting_bytes() + FRAME_OVERHEAD_BYTES + captured > room {
                lost += 1;
                continue;
            }
            parcel.bytes.resize(start + captured, 0);
            batch.copy(frame, ForeignMut::from(&mut parcel.bytes[start..]));
            let (captured, original) = (captured as u32, frame.len() as u32);
            parcel.records.push(Record { captured, original, offload: frame.offload, dropped });
        }
        let taken = parcel.records.len() as u64;
        counters.captured.add(taken);
        counters.capture_lost.add(lost);
        self.shared.frames.fetch_add(taken + lost, Ordering::Relaxed);
        self.shared.lost.fetch_add(lost, Ordering::Relaxed);
        if taken == 0 {
            return true;
        }
        self.shared.waiting_bytes.fetch_add(parcel.waiting_bytes(), Ordering::Relaxed);
        self.parcels.send(parcel).is_ok()
    }
}

impl Capture {
    /// Appends pcapng to `out`: whatever was captured since the last call, waiting up to `timeout` for the first
    /// frame. What all calls append, in order, is a whole file once [`CaptureRead::Ended`] came or
    /// [`Capture::finish`] was called.
    pub fn read(&mut self, out: &mut Vec<u8>, timeout: Duration) -> CaptureRead {
        let mut blocks = Vec::new();
        self.begin(&mut blocks);
        let found = match self.parcels.recv_timeout(timeout) {
            Ok(parcel) => {
                self.append(&mut blocks, parcel);
                while let Ok(parcel) = self.parcels.try_recv() {
                    self.append(&mut blocks, parcel);
                }
                CaptureRead::Data
            }
            Err(RecvTimeoutError::Timeout) if blocks.is_empty() => CaptureRead::Quiet,
            Err(RecvTimeoutError::Timeout) => CaptureRead::Data,
            Err(RecvTimeoutError::Disconnected) => {
                self.append_statistics(&mut blocks);
                CaptureRead::Ended
            }
        };
        out.append(&mut blocks);
        found
    }

    /// Ends the capture: appends what was captured and not read yet, and the statistics.
    pub fn finish(mut self, out: &mut Vec<u8>) {
        let mut blocks = Vec::new();
        self.begin(&mut blocks);
        while let Ok(parcel) = self.parcels.try_recv() {
            self.append(&mut blocks, parcel);
        }
        self.append_statistics(&mut blocks);
        out.append(&mut blocks);
    }

    /// Frames left out so far because they were not read fast enough.
    pub fn lost(&self) -> u64 {
        self.shared.lost.load(Ordering::Relaxed)
    }

    fn begin(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.began, true) {
            pcapng::section(out, concat!("tombolo ", env!("CARGO_PKG_VERSION")));
            pcapng::interface(out, &self.name, self.settings.snap_bytes);
        }
    }

    fn append(&mut self, out: &mut Vec<u8>, parcel: Parcel) {
        self.shared.waiting_bytes.fetch_sub(parcel.waiting_bytes(), Ordering::Relaxed);
        self.last_time_ns = parcel.time_ns;
        let mut bytes = &parcel.bytes[..];
        let mut comment = String::new();
        for record in &parcel.records {
            let (frame, rest) = bytes.split_at(record.captured as usize);
            bytes = rest;
            comment.clear();
            describe(&mut comment, record, parcel.refused);
            let packet = Packet {
                interface: 0,
                time_ns: parcel.time_ns,
                direction: parcel.direction,
                bytes: frame,
                original_bytes: record.original,
                comment: &comment,
            };
            pcapng::packet(out, &packet);
        }
    }

    fn append_statistics(&self, out: &mut Vec<u8>) {
        let (frames, lost) = (self.shared.frames.load(Ordering::Relaxed), self.lost());
        pcapng::statistics(out, 0, self.last_time_ns, frames, lost);
    }
}

/// What the bytes alone do not say.
fn describe(comment: &mut String, record: &Record, (refused, of): (u64, u64)) {
    let mut part = |text: std::fmt::Arguments<'_>| {
        let separator = if comment.is_empty() { "" } else { "; " };
        // Writing to a string does not fail.
        let _ = write!(comment, "{separator}{text}");
    };
    if let Some(reason) = record.dropped {
        part(format_args!("dropped: {}", reason.name()));
    }
    if let Some(cut) = record.offload.segmentation {
        part(format_args!("{:?} in segments of {} bytes", cut.kind, cut.size));
    }
    match record.offload.checksum {
        Checksum::Partial { start, offset } => part(format_args!("partial checksum, from {start}, at +{offset}")),
        Checksum::Valid => part(format_args!("checksum vouched for")),
        Checksum::Unverified => {}
    }
    if refused != 0 {
        part(format_args!("the port did not take {refused} of the {of} frames of this turn"));
    }
}
