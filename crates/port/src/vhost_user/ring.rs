//! One virtqueue of a network device as the worker runs it: frames between the ring and a batch.

use std::sync::Arc;
use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::virtio::net::{HEADER_BYTES, NUM_BUFFERS_OFFSET};
use tombolo_ring::virtio::{DeviceQueue, MAX_HELD, RingError};
use tombolo_shm::doorbell::Doorbell;
use tombolo_switch::drop::{Drops, Reason};
use tombolo_switch::frame::{Batch, Frame, Offload};
use tombolo_switch::port::Sent;
use tombolo_switch::vnet::VNET_HEADER_BYTES;

use super::memory::GuestTable;
use tombolo_worker::reactor::Watch;

/// Chains taken from a ring before their frames are looked at: as many cache misses are under way
/// at a time.
const CHUNK: usize = 32;

/// The negotiated layout of what precedes a frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct Framing {
    /// Length of the header: 12 bytes, or 10 with a driver older than VirtIO 1.0 without mergeable
    /// buffers.
    pub(super) header_bytes: usize,
    /// Whether a frame to the guest may be spread over several chains.
    pub(super) mergeable: bool,
    /// Whether the guest takes word about checksums.
    pub(super) checksums: bool,
    /// Longest frame to the guest that is not to be cut into segments.
    pub(super) max_frame_bytes: usize,
}

/// Segments of chains, with whether each is its chain's last. Kept empty between calls for the
/// allocation.
pub(super) type Segments<V> = Vec<(V, bool)>;

/// Gives an emptied vector back for another lifetime, with its allocation: an empty vector that is
/// mapped in place keeps it, without unsafe.
pub(super) fn recycle<V, W>(mut segments: Segments<V>) -> Segments<W> {
    segments.clear();
    segments.into_iter().map(|_| unreachable!("the vector was cleared")).collect()
}

/// Whether a ring that runs carries frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gate {
    /// Not enabled since it started. The specification has such a ring discard what the guest
    /// sends; that would lose what the guest sent while the backend was restarted, between two
    /// messages of a frontend that is about to enable it. It is left alone instead.
    Waiting,
    /// Frames flow.
    Open,
    /// Disabled: what the guest sends is discarded, and it gets nothing.
    Shut,
}

#[derive(Debug)]
pub(super) struct Ring {
    pub(super) queue: DeviceQueue,
    pub(super) call: Option<Arc<Doorbell>>,
    /// Held for its effect.
    pub(super) _kick: Option<Watch>,
    pub(super) gate: Gate,
    /// It was armed, or the guest was not interrupted, since this was last asked.
    pub(super) wants_recheck: bool,
    /// Reused: bytes written into each chain of a batch to the guest.
    pub(super) lens: Vec<u32>,
}

impl Ring {
    /// From the guest: appends up to `max` frames to `batch`. Returns how many chains were taken.
    #[inline]
    pub(super) fn receive<'m>(
        &mut self,
        memory: &'m GuestTable,
        framing: Framing,
        max: usize,
        batch: &mut Batch<'m>,
        drops: &mut Drops,
        segments: &mut Segments<Foreign<'m>>,
    ) -> Result<usize, RingError> {
        let mut taken = 0;
        while taken < max && self.gate != Gate::Waiting {
            segments.clear();
            let want = CHUNK.min(max - taken);
            let got = self.queue.receive(memory, want, |view, last| {
                // The header's line, and the frame's where the header ends one.
                view.prefetch();
                view.skip(64).prefetch();
                segments.push((view, last));
            })?;
            // A frame in many pieces counts as several: each costs its copies at every destination.
            taken += got + segments.len().saturating_sub(2 * got) / 4;
            if self.gate == Gate::Open {
                parse(segments, framing, batch, drops);
            } else {
                drops.count(Reason::Disabled, got as u64);
            }
            if got < want {
                break;
            }
        }
        Ok(taken.min(max))
    }

    /// Asks the guest to kick for its next frame, and looks again.
    pub(super) fn arm(&mut self, memory: &GuestTable) -> Result<bool, RingError> {
        // The worker is woken when the gate opens.
        if self.gate == Gate::Waiting {
            return Ok(false);
        }
        self.wants_recheck = true;
        self.queue.arm(memory)
    }

    /// Interrupts the guest late, where its request became visible since it was last read. Returns
    /// whether it did.
    pub(super) fn recheck_signal(&mut self, memory: &GuestTable) -> Result<bool, RingError> {
        let signal = self.queue.recheck_signal(memory)?;
        if signal && let Some(call) = &self.call {
            call.ring();
        }
        Ok(signal)
    }

    /// Whether the guest has sent something, though it did not kick.
    pub(super) fn recheck_work(&mut self, memory: &GuestTable) -> Result<bool, RingError> {
        if self.gate == Gate::Waiting { Ok(false) } else { self.queue.has_available(memory) }
    }

    /// Gives all chains of received frames back, and interrupts the guest where it wants that.
    #[inline]
    pub(super) fn release(&mut self, memory: &GuestTable) -> Result<(), RingError> {
        let held = self.queue.held();
        if held != 0 {
            self.queue.release(memory, held)?;
            self.signal(memory)?;
        }
        Ok(())
    }

    /// Shows the guest the frames that were transmitted, and interrupts it where it wants that.
    #[inline]
    pub(super) fn flush(&mut self, memory: &GuestTable) -> Result<(), RingError> {
        if self.queue.publish(memory)? {
            self.signal(memory)?;
        }
        Ok(())
    }

    #[inline]
    fn signal(&mut self, memory: &GuestTable) -> Result<(), RingError> {
        if !self.queue.needs_signal(memory)? {
            self.wants_recheck = true;
        } else if let Some(call) = &self.call {
            call.ring();
        }
        Ok(())
    }

    /// To the guest: copies the frames `which` of `batch` into its buffers.
    #[inline]
    pub(super) fn transmit<'m>(
        &mut self,
        memory: &'m GuestTable,
        framing: Framing,
        batch: &Batch<'_>,
        which: &[u16],
        drops: &mut Drops,
        segments: &mut Segments<ForeignMut<'m>>,
    ) -> Result<Sent, RingError> {
        let mut sent = Sent::default();
        let mut fill = Fill { queue: &mut self.queue, memory, segments, lens: &mut self.lens, at: 0, taken: 0 };
        fill.segments.clear();
        fill.lens.clear();
        fill.lens.reserve(which.len());
        let frames = batch.frames();
        let mut left = which;
        while !left.is_empty() {
            if fill.at == fill.segments.len() {
                fill.take(left.len().min(CHUNK))?;
            }
            // The usual case, in a loop of its own: each frame fits the next buffer.
            let mut plain = 0;
            for (index, (view, last)) in left.iter().zip(&fill.segments[fill.at..]) {
                let frame = &frames[usize::from(*index)];
                let need = framing.header_bytes + frame.len();
                if !last || view.len() < need || frame.len() > framing.max_frame_bytes {
                    break;
                }
                write_header(frame, framing, *view);
                batch.copy(frame, view.skip(framing.header_bytes));
                // No overflow: a frame has at most MAX_FRAME_BYTES.
                fill.lens.push(need as u32);
                sent.bytes += frame.len() as u64;
                plain += 1;
            }
            sent.frames += plain as u64;
            fill.at += plain;
            left = &left[plain..];
            let Some(index) = left.first() else { break };
            if plain != 0 && fill.at == fill.segments.len() {
                continue;
            }
            let frame = &frames[usize::from(*index)];
            let written = if frame.len() > framing.max_frame_bytes && frame.offload.segmentation.is_none() {
                Err(Reason::TooLong)
            } else if fill.at == fill.segments.len() {
                Err(Reason::NoBuffer)
            } else {
                fill.scatter(batch, frame, framing)?
            };
            match written {
                Ok(()) => {
                    sent.frames += 1;
                    sent.bytes += frame.len() as u64;
                }
                Err(Reason::NoBuffer) => {
                    // Nor will there be one for the frames behind it before the guest has run.
                    drops.refuse(left);
                    break;
                }
                Err(reason) => drops.count(reason, 1),
            }
            left = &left[1..];
        }
        fill.finish()?;
        Ok(sent)
    }
}

/// Turns chains into frames of `batch`. Every chain ends with a segment marked last.
#[inline]
fn parse<'m>(segments: &[(Foreign<'m>, bool)], framing: Framing, batch: &mut Batch<'m>, drops: &mut Drops) {
    let mut at = 0;
    while let Some((first, last)) = segments.get(at) {
        if *last {
            at += 1;
            let header = first.read_array::<VNET_HEADER_BYTES>(0);
            let frame = first.skip(framing.header_bytes);
            match Offload::from_guest(header, frame.len()) {
                Ok(offload) => batch.push(frame, offload),
                Err(reason) => drops.count(reason, 1),
            }
        } else {
            let count = segments[at..].iter().take_while(|(_, last)| !last).count() + 1;
            // In range: every chain ends with a segment marked last.
            parse_scattered(&segments[at..at + count], framing, batch, drops);
            at += count;
        }
    }
}

/// A chain of several segments, of which the header may be one, a part of one, or several.
fn parse_scattered<'m>(chain: &[(Foreign<'m>, bool)], framing: Framing, batch: &mut Batch<'m>, drops: &mut Drops) {
    let mut header = [0; HEADER_BYTES];
    let mut have = 0;
    let mut bytes = 0;
    for (segment, _) in chain {
        have += segment.read_into(&mut header[have..framing.header_bytes]);
        bytes += segment.len();
    }
    let [short @ .., _, _] = header;
    let short: Option<[u8; VNET_HEADER_BYTES]> = (have == framing.header_bytes).then_some(short);
    match Offload::from_guest(short, bytes - have) {
        Ok(offload) => {
            let mut skip = framing.header_bytes;
            let pieces = chain.iter().map(|(segment, _)| {
                let rest = segment.skip(skip);
                skip -= segment.len() - rest.len();
                rest
            });
            batch.push_pieces(pieces.filter(|piece| !piece.is_empty()), offload);
        }
        Err(reason) => drops.count(reason, 1),
    }
}

#[inline]
fn write_header(frame: &Frame, framing: Framing, to: ForeignMut<'_>) {
    if framing.header_bytes == HEADER_BYTES {
        // Two stores, and no call of `memcpy` for what is nearly always the same twelve bytes.
        let [a, b, c, d, e, f, g, h, rest @ ..] = header(frame, framing, 1);
        let _ = to.write_array(0, [a, b, c, d, e, f, g, h]);
        let _ = to.write_array(8, rest);
    } else {
        write_short_header(frame, framing, to);
    }
}

/// For a driver older than VirtIO 1.0.
#[cold]
#[inline(never)]
fn write_short_header(frame: &Frame, framing: Framing, to: ForeignMut<'_>) {
    to.write_from(&header(frame, framing, 1)[..VNET_HEADER_BYTES]);
}

#[inline]
fn header(frame: &Frame, framing: Framing, buffers: u16) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    // Frames with partial checksums do not come here where the guest did not agree to them; see
    // `Port::caps`.
    if frame.offload != Offload::NONE && framing.checksums {
        header[..VNET_HEADER_BYTES].copy_from_slice(&frame.offload.to_vnet());
    }
    header[NUM_BUFFERS_OFFSET..].copy_from_slice(&buffers.to_le_bytes());
    header
}

/// Buffers of a guest that are being filled: taken from the ring ahead, used one after the other,
/// the rest given back.
struct Fill<'f, 'm> {
    queue: &'f mut DeviceQueue,
    memory: &'m GuestTable,
    /// Segments of all chains taken.
    segments: &'f mut Segments<ForeignMut<'m>>,
    /// Bytes written into each chain used up to now and not completed yet.
    lens: &'f mut Vec<u32>,
    /// The first segment that is not used.
    at: usize,
    /// Chains taken and not completed, those in `lens` included.
    taken: usize,
}

impl Fill<'_, '_> {
    /// Takes up to `count` more chains; returns how many there were.
    #[inline]
    fn take(&mut self, count: usize) -> Result<usize, RingError> {
        if self.taken == MAX_HELD {
            self.complete()?;
        }
        let segments = &mut *self.segments;
        let got = self.queue.take_writable(self.memory, count, |view, last| {
            view.prefetch();
            view.skip(64).prefetch();
            segments.push((view, last));
        })?;
        self.taken += got;
        Ok(got)
    }

    fn complete(&mut self) -> Result<(), RingError> {
        self.queue.complete(self.memory, self.lens.drain(..)).map(|done| self.taken -= done)
    }

    #[inline]
    fn finish(mut self) -> Result<(), RingError> {
        self.queue.put_back(self.taken - self.lens.len());
        self.taken = self.lens.len();
        self.complete()
    }

    /// Writes a frame over several segments, and over several chains where they may be merged. The
    /// outer result is the ring's, the inner one the frame's; a frame that was not written has used
    /// no chain.
    fn scatter(&mut self, batch: &Batch<'_>, frame: &Frame, framing: Framing) -> Result<Result<(), Reason>, RingError> {
        let need = framing.header_bytes + frame.len();
        let first = self.at;
        let (mut end, mut room, mut chains) = (first, 0, 0usize);
        loop {
            while let Some((view, last)) = self.segments.get(end) {
                end += 1;
                room += view.len();
                if *last {
                    break;
                }
            }
            chains += 1;
            if room >= need {
                break;
            }
            if !framing.mergeable || chains == MAX_HELD / 2 {
                return Ok(Err(Reason::SmallBuffer));
            }
            if end == self.segments.len() {
                // As many as the last one suggests, which is the usual case of equal buffers.
                let guess = ((need - room) * chains).div_ceil(room.max(1)).clamp(1, CHUNK);
                if self.take(guess)? == 0 {
                    return Ok(Err(Reason::NoBuffer));
                }
            }
        }
        // The header is not cut in the usual case; it may be, and then it goes piece by piece.
        let header = header(frame, framing, chains as u16);
        let header = &header[..framing.header_bytes];
        let mut done = 0;
        for (view, _) in &self.segments[first..end] {
            done += view.write_from(&header[done..]);
        }
        let mut skip = header.len();
        let rest = self.segments[first..end].iter().map(|(view, _)| {
            let rest = view.skip(skip);
            skip -= view.len() - rest.len();
            rest
        });
        batch.copy_scattered(frame, rest);
        let mut left = need;
        let mut chain = 0;
        for (view, last) in &self.segments[first..end] {
            chain += view.len().min(left);
            left -= view.len().min(left);
            if *last {
                self.lens.push(chain as u32);
                chain = 0;
            }
        }
        self.at = end;
        Ok(Ok(()))
    }
}
