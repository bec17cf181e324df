//! Frames that wait for a destination that has no buffer at the moment.
//!
//! # Purpose
//! A guest that posts few receive buffers loses most of a burst, such as the 45 segments that one frame of a sender
//! becomes, and TCP then crawls. Frames that a port refuses ([`Drops::refuse`]) are copied into the destination's queue and
//! handed over when it has room. The source gets its own buffers back at once, so a slow or hostile
//! destination holds nothing of its neighbours. docs/decisions/0015-bounded-queue-per-destination.md says why.
//!
//! # Limits
//! | what | limit | then |
//! | --- | --- | --- |
//! | memory of a destination | [`CELLS`] cells of [`CELL_BYTES`], allocated at the first overflow, freed after [`KEEP`] empty | `queue_full` |
//! | sources of one destination | [`LANES`] at a time | `queue_full` |
//! | time of a frame in the queue | [`HOLD`] | `queue_timeout` |
//! | a destination that took nothing for [`HOLD`] | has no queue until it takes a frame again | `no_buffer` |
//!
//! # Fairness and order
//! Each source has a lane, first in, first out. Lanes take turns, one frame each. A full queue drops from the end of its
//! longest lane, so a source that floods loses its own frames and not those of others.
//!
//! # Waking up
//! A queue that is not empty is tried again whenever a frame for the port comes, and after [`FIRST_TRY`], doubling up to
//! [`LAST_TRY`] while the port takes nothing. No notification of the peer is needed, so a lost or withheld one costs
//! nothing. The tries end with the queue, after [`HOLD`] at the latest: nothing ticks.
//!
//! # Cost
//! A frame that is not refused costs one comparison. Queueing is O(lanes) at worst, takes no memory once the cells are
//! there, and copies the frame once more.

use crate::Nanos;
use crate::drop::{Drops, Reason};
use crate::frame::{Batch, Frame, Offload};
use crate::port::{Caps, Fault, Sent};
use crate::wait::Token;
use tombolo_ring::mem::Foreign;

/// Bytes of a cell: one frame of an MTU of 1500 with a VLAN tag.
pub(crate) const CELL_BYTES: usize = 1536;
/// Cells of one destination: 384 KiB.
pub(crate) const CELLS: u16 = 256;
/// Sources that wait for one destination at a time.
pub(crate) const LANES: usize = 64;
/// How long a frame waits.
pub(crate) const HOLD: Nanos = Nanos(50_000_000);
/// First pause before a port that refused is tried again, and the longest.
pub(crate) const FIRST_TRY: Nanos = Nanos(50_000);
/// The longest of these pauses.
pub(crate) const LAST_TRY: Nanos = Nanos(1_000_000);
/// How long an empty queue keeps its memory.
pub(crate) const KEEP: Nanos = Nanos(1_000_000_000);
/// Frames that are handed over at a time.
const CHUNK: usize = 32;

/// No cell.
const NIL: u16 = u16::MAX;

/// The queue of one destination.
#[derive(Debug, Default)]
pub(crate) struct Overflow {
    store: Option<Box<Store>>,
    /// The port took nothing for [`HOLD`]; nothing is queued for it until it takes a frame.
    stalled: bool,
    /// When the port took something last, or the queue began.
    progress: Nanos,
    /// When it is tried next, or, where it is empty, when its memory is freed.
    pub(crate) next_try: Nanos,
    pause: Nanos,
    /// Whether the worker has it on its list.
    pub(crate) listed: bool,
}

/// What is known of a queued frame; at the index of its first cell.
#[derive(Clone, Copy, Debug)]
struct Queued {
    at: Nanos,
    len: u32,
    cells: u16,
    lane: u16,
    before: u16,
    behind: u16,
    offload: Offload,
}

#[derive(Clone, Copy, Debug)]
struct Lane {
    source: Option<Token>,
    first: u16,
    last: u16,
    cells: u16,
}

#[derive(Debug)]
struct Store {
    bytes: Box<[u8]>,
    /// The cell that follows each one, in its frame or in the list of free ones.
    next: Box<[u16]>,
    frames: Box<[Queued]>,
    free: u16,
    free_cells: u16,
    waiting: usize,
    lanes: Vec<Lane>,
    /// The lane that is first next time.
    turn: usize,
    /// What the port took when the frames were queued. Frames for other capabilities are of no use.
    caps: Caps,
    /// Reused allocations.
    spare: Vec<u16>,
    batch: Batch<'static>,
    picks: Vec<u16>,
    cursors: Vec<u16>,
}

/// 0, 1, 2, … as [`crate::port::Port::transmit`] wants them.
const ALL: [u16; CHUNK] = {
    let mut all = [0; CHUNK];
    let mut n = 0;
    while n < CHUNK {
        all[n] = n as u16;
        n += 1;
    }
    all
};

impl Store {
    fn new(caps: Caps) -> Box<Store> {
        let empty =
            Queued { at: Nanos(0), len: 0, cells: 0, lane: 0, before: NIL, behind: NIL, offload: Offload::NONE };
        let chain = (1..CELLS).chain([NIL]);
        Box::new(Store {
            bytes: vec![0; CELL_BYTES * usize::from(CELLS)].into(),
            next: chain.collect(),
            frames: vec![empty; usize::from(CELLS)].into(),
            free: 0,
            free_cells: CELLS,
            waiting: 0,
            lanes: Vec::with_capacity(LANES),
            turn: 0,
            caps,
            spare: Vec::with_capacity(CHUNK),
            batch: Batch::with_capacity(CHUNK),
            picks: Vec::with_capacity(CHUNK),
            cursors: Vec::with_capacity(LANES),
        })
    }

    /// The lane of `source`, or one for it; `None` where too many sources wait.
    fn lane_of(&mut self, source: Option<Token>) -> Option<usize> {
        let own = |lane: &Lane| lane.first != NIL && lane.source == source;
        let unused = |lane: &Lane| lane.first == NIL;
        if let Some(at) = self.lanes.iter().position(own).or_else(|| self.lanes.iter().position(unused)) {
            self.lanes[at].source = source;
            return Some(at);
        }
        (self.lanes.len() < LANES).then(|| {
            self.lanes.push(Lane { source, first: NIL, last: NIL, cells: 0 });
            self.lanes.len() - 1
        })
    }

    /// Copies a frame to the end of its source's lane; `false` where there is no room for it. Frames of others that make
    /// room are counted in `late`.
    fn push(&mut self, source: Option<Token>, batch: &Batch<'_>, frame: &Frame, now: Nanos, late: &mut u64) -> bool {
        let need = frame.len().div_ceil(CELL_BYTES);
        let Some(lane) = self.lane_of(source) else { return false };
        while usize::from(self.free_cells) < need {
            let own = usize::from(self.lanes[lane].cells) + need;
            let Some(longest) = self.lanes.iter().max_by_key(|lane| lane.cells) else { return false };
            if usize::from(longest.cells) <= own {
                return false;
            }
            self.remove(longest.last);
            *late += 1;
        }
        // In range: `need` cells are free, and at least one is needed.
        let first = self.free;
        let (mut cell, mut at) = (first, 0);
        let pieces = std::iter::once(Foreign::from(frame.head())).chain(batch.tail(frame).iter().copied());
        for mut piece in pieces {
            while !piece.is_empty() {
                if at == CELL_BYTES {
                    (cell, at) = (self.next[usize::from(cell)], 0);
                }
                let start = usize::from(cell) * CELL_BYTES;
                let n = piece.read_into(&mut self.bytes[start + at..start + CELL_BYTES]);
                piece = piece.skip(n);
                at += n;
            }
        }
        self.free = self.next[usize::from(cell)];
        self.free_cells -= need as u16;
        self.waiting += 1;
        let Lane { last, cells, first: lane_first, .. } = &mut self.lanes[lane];
        *cells += need as u16;
        let before = std::mem::replace(last, first);
        if before == NIL {
            *lane_first = first;
        } else {
            self.frames[usize::from(before)].behind = first;
        }
        self.frames[usize::from(first)] = Queued {
            at: now,
            len: frame.len() as u32,
            cells: need as u16,
            lane: lane as u16,
            before,
            behind: NIL,
            offload: frame.offload,
        };
        true
    }

    /// Takes the frame that starts at cell `first` out.
    fn remove(&mut self, first: u16) {
        let Queued { cells, lane, before, behind, .. } = self.frames[usize::from(first)];
        let lane = &mut self.lanes[usize::from(lane)];
        lane.cells -= cells;
        match before {
            NIL => lane.first = behind,
            before => self.frames[usize::from(before)].behind = behind,
        }
        match behind {
            NIL => lane.last = before,
            behind => self.frames[usize::from(behind)].before = before,
        }
        let mut last = first;
        for _ in 1..cells {
            last = self.next[usize::from(last)];
        }
        self.next[usize::from(last)] = self.free;
        self.free = first;
        self.free_cells += cells;
        self.waiting -= 1;
    }

    /// Takes all frames out; returns how many there were.
    fn empty(&mut self) -> u64 {
        let before = self.waiting;
        for lane in 0..self.lanes.len() {
            while self.lanes[lane].first != NIL {
                self.remove(self.lanes[lane].first);
            }
        }
        before as u64
    }

    /// Chooses the frames that go next, one of each lane in turn.
    fn pick(&mut self) {
        self.picks.clear();
        self.cursors.clear();
        self.cursors.extend(self.lanes.iter().map(|lane| lane.first));
        let lanes = self.lanes.len();
        let mut found = true;
        while found && self.picks.len() < CHUNK {
            found = false;
            for n in 0..lanes {
                let cursor = &mut self.cursors[(self.turn + n) % lanes];
                if *cursor != NIL && self.picks.len() < CHUNK {
                    self.picks.push(*cursor);
                    *cursor = self.frames[usize::from(*cursor)].behind;
                    found = true;
                }
            }
        }
        self.turn = (self.turn + 1) % lanes.max(1);
    }
}

impl Overflow {
    /// Whether frames wait, so that others must go behind them.
    #[inline]
    pub(crate) fn waits(&self) -> bool {
        self.waiting() != 0
    }

    /// How many frames wait.
    #[inline]
    pub(crate) fn waiting(&self) -> usize {
        self.store.as_ref().map_or(0, |store| store.waiting)
    }

    /// Says that the port took a frame.
    #[inline]
    pub(crate) fn took(&mut self) {
        self.stalled = false;
    }

    /// Queues what the port refused of `batch`, and takes that out of `drops`; returns how many frames. What finds no
    /// room is counted in `drops` as `queue_full`. Frames of others that gave way are counted in `late`.
    #[cold]
    pub(crate) fn take(&mut self, now: Nanos, batch: &Batch<'_>, caps: Caps, drops: &mut Drops, late: &mut u64) -> u64 {
        if self.stalled {
            drops.forget_refused();
            return 0;
        }
        let store = self.store.get_or_insert_with(|| Store::new(caps));
        if store.waiting == 0 {
            (self.progress, self.pause, self.next_try) = (now, FIRST_TRY, now.after(FIRST_TRY));
            store.caps = caps;
        }
        let source = batch.ingress();
        drops.take_refused(|index| store.push(source, batch, &batch.frames()[usize::from(index)], now, late))
    }

    /// Hands over what waits, as far as the port takes it, to `send`; then drops what waited for too long. All that
    /// leaves the queue is in what it returns or in `drops`.
    pub(crate) fn drain(
        &mut self,
        now: Nanos,
        caps: Caps,
        drops: &mut Drops,
        mut send: impl FnMut(&Batch<'_>, &[u16], &mut Drops) -> Result<Sent, Fault>,
    ) -> Result<Sent, Fault> {
        let mut sent = Sent::default();
        let Some(store) = &mut self.store else { return Ok(sent) };
        if store.waiting != 0 && store.caps != caps {
            // Another driver, or none.
            drops.count(Reason::Reset, store.empty());
        }
        while store.waiting != 0 {
            store.pick();
            let Store { bytes, next, frames, batch, picks, .. } = &mut **store;
            let mut chunk: Batch<'_> = std::mem::take(batch);
            for first in &*picks {
                let Queued { len, offload, .. } = frames[usize::from(*first)];
                let (mut cell, mut left) = (*first, len as usize);
                let pieces = std::iter::from_fn(|| {
                    let n = left.min(CELL_BYTES);
                    let start = usize::from(cell) * CELL_BYTES;
                    (n != 0).then(|| {
                        left -= n;
                        cell = next[usize::from(cell)];
                        Foreign::from(&bytes[start..start + n])
                    })
                });
                chunk.push_pieces(pieces, offload);
            }
            let (count, before) = (picks.len(), drops.total());
            let result = send(&chunk, &ALL[..count], drops);
            store.batch = chunk.recycle();
            match result {
                Ok(more) => sent.add(more),
                Err(fault) => {
                    // As for `Port::transmit`: what the peer has not seen is lost, and what was counted stays counted.
                    store.picks.clone().into_iter().for_each(|first| store.remove(first));
                    let counted = drops.total() - before;
                    drops.count(Reason::Reset, sent.frames + (count as u64).saturating_sub(counted));
                    drops.forget_refused();
                    return Err(fault);
                }
            }
            let mut refused = 0;
            drops.take_refused(|index| {
                // Marked to stay.
                store.picks[usize::from(index)] = NIL;
                refused += 1;
                true
            });
            for at in 0..count {
                match store.picks[at] {
                    NIL => {}
                    first => store.remove(first),
                }
            }
            if refused != count {
                (self.progress, self.pause) = (now, FIRST_TRY);
            } else {
                self.pause = Nanos(self.pause.0 * 2).min(LAST_TRY);
            }
            if refused != 0 {
                break;
            }
        }
        self.next_try = now.after(self.pause);
        self.expire(now, drops);
        Ok(sent)
    }

    /// Drops what waited for too long. Frees the memory of a queue that was empty for [`KEEP`].
    fn expire(&mut self, now: Nanos, drops: &mut Drops) {
        let Some(store) = &mut self.store else { return };
        let mut late = 0;
        for lane in 0..store.lanes.len() {
            loop {
                let first = store.lanes[lane].first;
                if first == NIL || now.since(store.frames[usize::from(first)].at) < HOLD {
                    break;
                }
                store.remove(first);
                late += 1;
            }
        }
        drops.count(Reason::QueueTimeout, late);
        if late != 0 && now.since(self.progress) >= HOLD {
            self.stalled = true;
            drops.count(Reason::QueueTimeout, store.empty());
        }
        if store.waiting == 0 {
            if now.since(self.progress) >= KEEP {
                self.store = None;
            } else {
                self.next_try = self.progress.after(KEEP);
            }
        }
    }

    /// Drops all that waits, and gives the memory back.
    pub(crate) fn clear(&mut self, reason: Reason, drops: &mut Drops) {
        if let Some(store) = self.store.take() {
            drops.count(reason, store.waiting as u64);
        }
    }

    /// Memory for what a port refuses, to be given back by [`Overflow::keep_spare`].
    pub(crate) fn spare(&mut self) -> Vec<u16> {
        self.store.as_mut().map(|store| std::mem::take(&mut store.spare)).unwrap_or_default()
    }

    pub(crate) fn keep_spare(&mut self, spare: Vec<u16>) {
        if let Some(store) = &mut self.store {
            store.spare = spare;
        }
    }

    /// Whether it has memory, and so something to do at [`Overflow::next_try`].
    pub(crate) fn is_live(&self) -> bool {
        self.store.is_some()
    }
}

#[cfg(test)]
#[path = "overflow_tests.rs"]
mod tests;
