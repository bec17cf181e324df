//! Capture of a port's frames, or of a network's, to pcapng, while it works.
//!
//! ```text
//! worker: Tap --- parcels of copied frames, bounded in bytes, never waited for ---> Capture: any other thread
//! ```
//!
//! The worker copies the frames of a turn into a parcel and sends it on. Where the reader has left
//! too many bytes unread, frames are left out. They are counted in the port's `capture_lost` and in
//! the statistics block at the end of the capture. The worker never waits. A [`Capture`] that is
//! dropped ends the copying with the next frame.
//!
//! Captures may share a [`CaptureMemory`]. Each may hold as much of it as is still free. So many
//! captures that are not read leave room for one that is. A reader that cannot continue frees its
//! waiting parcels by [`Capture::discard`].
//!
//! What is captured:
//! * *received*: frames that came from the peer and were taken, with a comment on those that go
//!   nowhere and why.
//! * *transmitted*: frames that were handed to the peer, after segments and checksums were made.
//!   Where the port did not take all frames of a turn, a comment says how many of how many, since
//!   only the port knows which.
//!
//! A port that is not captured pays one comparison per turn.

use crate::Nanos;
use crate::counters::PortCounters;
use crate::drop::Reason;
use crate::filter::Filter;
use crate::frame::{Batch, Checksum, MAX_FRAME_BYTES, Offload};
use crate::pcapng::{self, Direction, Packet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;
use tombolo_ring::mem::ForeignMut;

/// Memory of several captures together, for frames that wait to be read.
#[derive(Debug)]
pub struct CaptureMemory {
    limit_bytes: usize,
    /// Relaxed: it bounds memory and orders nothing. Taps of several workers may exceed the limit
    /// by a parcel each.
    used_bytes: AtomicUsize,
}

impl CaptureMemory {
    /// Creates a budget that several captures share.
    pub fn new(limit_bytes: usize) -> CaptureMemory {
        CaptureMemory { limit_bytes, used_bytes: AtomicUsize::new(0) }
    }

    /// Bytes of frames that wait, of all captures.
    pub fn used_bytes(&self) -> usize {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// What one that holds `own` bytes may add: at the end each has as much as is free.
    fn room(&self, own: usize) -> usize {
        self.limit_bytes.saturating_sub(self.used_bytes()).saturating_sub(own) / 2
    }
}

/// What a capture takes.
#[derive(Clone, Debug)]
pub struct CaptureSettings {
    /// Bytes of each frame that are kept.
    pub snap_bytes: u32,
    /// Frames from the port's peer.
    pub received: bool,
    /// Frames to the port's peer.
    pub transmitted: bool,
    /// Of the received frames, also those that go nowhere.
    pub dropped: bool,
    /// Which frames; all with `None`.
    pub filter: Option<Arc<Filter>>,
    /// Bytes of frames that may wait to be read, with [`FRAME_OVERHEAD_BYTES`] for each; beyond
    /// that frames are left out.
    pub queue_bytes: usize,
    /// Memory that it shares with other captures.
    pub memory: Option<Arc<CaptureMemory>>,
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
            filter: None,
            queue_bytes: 8 << 20,
            memory: None,
            clock_start: Nanos(0),
        }
    }
}

/// Relaxed throughout: numbers, and a flag that may take effect some frames later. The channel
/// orders what is read.
#[derive(Debug, Default)]
struct CaptureCounts {
    /// Frames that were to be captured; written by the worker only.
    frames: AtomicU64,
    /// Those of them that were left out by the worker, or discarded by the reader.
    lost: AtomicU64,
    /// Of those, the discarded ones that are not in the port's counters yet.
    discarded: AtomicU64,
    /// The reader cannot go on: all frames are left out.
    stalled: AtomicBool,
}

/// Bytes that were sent and not read.
#[derive(Debug)]
struct Account {
    waiting_bytes: AtomicUsize,
    memory: Option<Arc<CaptureMemory>>,
}

impl Account {
    fn room(&self, queue_bytes: usize) -> usize {
        let own = self.waiting_bytes.load(Ordering::Relaxed);
        let room = queue_bytes.saturating_sub(own);
        self.memory.as_ref().map_or(room, |memory| room.min(memory.room(own)))
    }

    fn charge(self: &Arc<Self>, bytes: usize) -> Charge {
        self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        if let Some(memory) = &self.memory {
            memory.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        Charge { bytes, account: self.clone() }
    }
}

/// What a parcel holds of the memory, until it is dropped wherever that is.
#[derive(Debug)]
struct Charge {
    bytes: usize,
    account: Arc<Account>,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.account.waiting_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        if let Some(memory) = &self.account.memory {
            memory.used_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

/// The worker's end.
#[derive(Debug)]
pub(crate) struct Tap {
    settings: CaptureSettings,
    /// Number of the port in the capture.
    interface: u32,
    parcels: Sender<Parcel>,
    shared: Arc<CaptureCounts>,
    account: Arc<Account>,
}

/// Frames of one turn in one direction.
#[derive(Debug)]
struct Parcel {
    interface: u32,
    time_ns: u64,
    direction: Direction,
    records: Vec<FrameRecord>,
    bytes: Vec<u8>,
    /// Frames that the port did not take, of how many; not known which.
    refused: (u64, u64),
    charge: Option<Charge>,
}

/// Bytes beyond which a parcel, and what [`Capture::read`] appends, takes no further frame.
const PARCEL_BYTES: usize = 32 << 10;

/// What a frame that waits to be read takes beside the bytes that are kept of it.
pub const FRAME_OVERHEAD_BYTES: usize = size_of::<FrameRecord>();

#[derive(Debug)]
struct FrameRecord {
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
    /// Frames were appended to the buffer.
    Data,
    /// Nothing came within the time.
    Quiet,
    /// The port is gone; the last bytes were appended.
    Ended,
}

/// A running capture of one port, or of several. Any thread but the worker's reads it.
#[derive(Debug)]
pub struct Capture {
    /// The ports by their numbers in the capture.
    ports: Vec<(Arc<str>, Arc<CaptureCounts>)>,
    settings: CaptureSettings,
    parcels: Receiver<Parcel>,
    last_time_ns: u64,
    began: bool,
}

/// Both ends of a capture of the ports of these names: a tap for each, in that order.
pub(crate) fn start(names: impl IntoIterator<Item = Arc<str>>, settings: CaptureSettings) -> (Vec<Tap>, Capture) {
    let (sender, parcels) = mpsc::channel();
    let account = Arc::new(Account { waiting_bytes: AtomicUsize::new(0), memory: settings.memory.clone() });
    let last_time_ns = settings.clock_start.0;
    let ports: Vec<_> = names.into_iter().map(|name| (name, Arc::new(CaptureCounts::default()))).collect();
    let tap = |(interface, (_, shared)): (u32, &(_, Arc<CaptureCounts>))| Tap {
        settings: settings.clone(),
        interface,
        parcels: sender.clone(),
        shared: shared.clone(),
        account: account.clone(),
    };
    let taps = (0..).zip(&ports).map(tap).collect();
    (taps, Capture { ports, settings, parcels, last_time_ns, began: false })
}

impl Tap {
    /// Copies the frames of a turn that came from the port; `dropped` are those that go nowhere, by
    /// rising index. Returns `false` when there is no reader any more.
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
        let interface = self.interface;
        let new =
            || Parcel { interface, time_ns, direction, records: Vec::new(), bytes: Vec::new(), refused, charge: None };
        let mut parcel = new();
        let stalled = self.shared.stalled.load(Ordering::Relaxed);
        let mut room = if stalled { 0 } else { self.account.room(self.settings.queue_bytes) };
        let (mut taken, mut lost) = (0, 0);
        for (index, dropped) in frames {
            if parcel.bytes.len() >= PARCEL_BYTES {
                taken += parcel.records.len() as u64;
                room -= parcel.waiting_bytes();
                if !self.hand_over(std::mem::replace(&mut parcel, new())) {
                    return false;
                }
            }
            let frame = &batch.frames()[index as usize];
            if self.settings.filter.as_ref().is_some_and(|filter| !filter.matches(frame.head(), frame.len())) {
                continue;
            }
            let captured = frame.len().min(self.settings.snap_bytes as usize);
            let start = parcel.bytes.len();
            if parcel.waiting_bytes() + FRAME_OVERHEAD_BYTES + captured > room {
                lost += 1;
                continue;
            }
            parcel.bytes.resize(start + captured, 0);
            batch.copy(frame, ForeignMut::from(&mut parcel.bytes[start..]));
            let (captured, original) = (captured as u32, frame.len() as u32);
            parcel.records.push(FrameRecord { captured, original, offload: frame.offload, dropped });
        }
        taken += parcel.records.len() as u64;
        counters.captured.add(taken);
        counters.capture_lost.add(lost + self.shared.discarded.swap(0, Ordering::Relaxed));
        self.shared.frames.fetch_add(taken + lost, Ordering::Relaxed);
        self.shared.lost.fetch_add(lost, Ordering::Relaxed);
        parcel.records.is_empty() || self.hand_over(parcel)
    }

    fn hand_over(&self, mut parcel: Parcel) -> bool {
        parcel.charge = Some(self.account.charge(parcel.waiting_bytes()));
        self.parcels.send(parcel).is_ok()
    }
}

impl Capture {
    /// Appends pcapng to `out`: what was captured since the last call, up to about 32 KiB and a
    /// frame, waiting up to `timeout` for the first frame. What all calls append, in order, is a
    /// whole file once [`CaptureRead::Ended`] came or [`Capture::finish`] was called.
    pub fn read(&mut self, out: &mut Vec<u8>, timeout: Duration) -> CaptureRead {
        let mut blocks = Vec::new();
        self.begin(&mut blocks);
        let found = match self.parcels.recv_timeout(timeout) {
            Ok(parcel) => {
                self.append(&mut blocks, parcel);
                while blocks.len() < PARCEL_BYTES {
                    let Ok(parcel) = self.parcels.try_recv() else { break };
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

    /// Gives back the memory of all that waits: those frames are lost, and all that come until
    /// [`Capture::resume`].
    pub fn discard(&mut self) {
        self.ports.iter().for_each(|(_, shared)| shared.stalled.store(true, Ordering::Relaxed));
        for parcel in self.parcels.try_iter() {
            let lost = parcel.records.len() as u64;
            // A tap's number is that of its port.
            let Some((_, shared)) = self.ports.get(parcel.interface as usize) else { continue };
            shared.lost.fetch_add(lost, Ordering::Relaxed);
            shared.discarded.fetch_add(lost, Ordering::Relaxed);
        }
    }

    /// Takes frames again after [`Capture::discard`].
    pub fn resume(&mut self) {
        self.ports.iter().for_each(|(_, shared)| shared.stalled.store(false, Ordering::Relaxed));
    }

    /// Frames left out so far because they were not read fast enough.
    pub fn lost(&self) -> u64 {
        self.ports.iter().map(|(_, shared)| shared.lost.load(Ordering::Relaxed)).sum()
    }

    fn begin(&mut self, out: &mut Vec<u8>) {
        if !std::mem::replace(&mut self.began, true) {
            pcapng::section(out, concat!("tombolo ", env!("CARGO_PKG_VERSION")));
            for (name, _) in &self.ports {
                pcapng::interface(out, name, self.settings.snap_bytes);
            }
        }
    }

    fn append(&mut self, out: &mut Vec<u8>, parcel: Parcel) {
        self.last_time_ns = parcel.time_ns;
        let mut bytes = &parcel.bytes[..];
        let mut comment = String::new();
        for record in &parcel.records {
            let (frame, rest) = bytes.split_at(record.captured as usize);
            bytes = rest;
            comment.clear();
            describe(&mut comment, record, parcel.refused);
            let packet = Packet {
                interface: parcel.interface,
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
        for (interface, (_, shared)) in (0..).zip(&self.ports) {
            let (frames, lost) = (shared.frames.load(Ordering::Relaxed), shared.lost.load(Ordering::Relaxed));
            pcapng::statistics(out, interface, self.last_time_ns, frames, lost);
        }
    }
}

/// What the bytes alone do not say.
fn describe(comment: &mut String, record: &FrameRecord, (refused, of): (u64, u64)) {
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
