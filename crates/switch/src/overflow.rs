//! Frames that wait for a destination that has no buffer at the moment.
//!
//! # Purpose
//! A guest that posts few receive buffers loses most of a burst, such as the 45 segments that one
//! frame of a sender becomes, and TCP then crawls. Frames that a port refuses ([`Drops::refuse`])
//! are copied into the destination's queue and handed over when it has room. The source gets its
//! own buffers back at once, so a slow or hostile destination holds nothing of its neighbours.
//! docs/decisions/0015-bounded-queue-per-destination.md says why.
//!
//! # Limits
//! | what | limit | then |
//! | --- | --- | --- |
//! | memory of a destination | [`CELLS`] cells of [`CELL_BYTES`], allocated at the first overflow, freed after [`KEEP`] empty | `queue_full` |
//! | time of a frame in the queue | [`HOLD`] | `queue_timeout` |
//! | a ring that took nothing for [`HOLD`] | has no queue until it takes a frame again | `no_buffer` |
//!
//! Frames beyond the limit of what a port may receive wait here too, until it lets them pass. A
//! frame of 64 KiB then may hold up others for long, so they wait for the time that it takes as
//! well, up to [`LONGEST_HOLD`]. What is lost then is counted as `rate_limit`, and the ring keeps
//! its queue, unless the port itself refused all frames for it for [`HOLD`].
//!
//! # Fairness and order
//! Each source has a lane for each of the destination's rings and each class ([`crate::class`]),
//! first in, first out. Lanes of a class take turns, one frame each. After [`RUN`] frames of a
//! class goes one of those below, so that they do not starve. A ring that is full holds up its own
//! lanes only. A full queue drops from the end of the longest lane of the source that has most in
//! it, so a source that floods loses its own frames and not those of others. Before that, a frame
//! takes the place of one of a lower class of its own source, or of any source where its own has
//! little in the queue ([`MODEST`]). When a peer opens or closes rings, frames of one flow that
//! wait meanwhile may overtake each other.
//!
//! # Waking up
//! A queue that is not empty is tried again whenever a frame for the port comes, and after
//! [`FIRST_TRY`], doubling up to [`LAST_TRY`] while the port takes nothing. No notification of the
//! peer is needed, so a lost or withheld one costs nothing. Where a rate limit holds frames back,
//! the queue is tried when the limit lets the next one pass, after [`HOLD`] at the latest. The
//! tries end with the queue, at the latest when its last frame has waited for as long as it may:
//! nothing ticks.
//!
//! # Cost
//! A frame that is not refused costs one comparison. Queueing is O(lanes) at worst, takes no memory
//! once the cells are there, and copies the frame once more.

use crate::Nanos;
use crate::class::{CLASSES, Class};
use crate::drop::{Drops, Reason};
use crate::frame::{Batch, Frame, Offload};
use crate::port::{Caps, Fault, MAX_RINGS, Sent};
use crate::wait::Token;
use std::cmp::Reverse;
use tombolo_ring::mem::Foreign;

/// Bytes of a cell: one frame of an MTU of 1500 with a VLAN tag.
pub(crate) const CELL_BYTES: usize = 1536;
/// Cells of one destination: 384 KiB.
pub(crate) const CELLS: u16 = 256;
/// How long a frame waits.
pub(crate) const HOLD: Nanos = Nanos(50_000_000);
/// How long a frame waits that a rate limit holds back.
pub(crate) const LONGEST_HOLD: Nanos = Nanos(2_000_000_000);
/// First pause before a port that refused is tried again, and the longest.
pub(crate) const FIRST_TRY: Nanos = Nanos(50_000);
/// The longest of these pauses.
pub(crate) const LAST_TRY: Nanos = Nanos(1_000_000);
/// How long an empty queue keeps its memory.
pub(crate) const KEEP: Nanos = Nanos(1_000_000_000);
/// Frames of a class that go one after the other while those of lower classes wait.
pub(crate) const RUN: u8 = 7;
/// Cells of a source up to which its frames displace those of lower classes: a quarter of the
/// queue.
pub(crate) const MODEST: usize = CELLS as usize / 4;
/// Frames that are handed over at a time.
const CHUNK: usize = 32;

/// No cell.
const NIL: u16 = u16::MAX;

/// The queue of one destination.
#[derive(Debug, Default)]
pub(crate) struct Overflow {
    store: Option<Box<Store>>,
    /// The rings that took nothing for [`HOLD`], a bit each; nothing is queued for one until it
    /// takes a frame.
    stalled: u64,
    /// When the port took something last, or the queue began.
    progress: Nanos,
    /// When it is tried next, or, where it is empty, when its memory is freed.
    pub(crate) next_try: Nanos,
    pause: Nanos,
    /// How long a frame may wait where the port has a rate limit; else [`HOLD`].
    limit_hold: Option<Nanos>,
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

/// The frames of one source and class for one ring. Without frames it is free for another.
#[derive(Clone, Copy, Debug)]
struct Lane {
    /// Index of its source's [`Share`].
    share: u16,
    ring: u8,
    class: Class,
    first: u16,
    last: u16,
    cells: u16,
}

/// What a source has in the queue. Without cells it is free for another.
#[derive(Clone, Copy, Debug)]
struct Share {
    source: Option<Token>,
    cells: u16,
}

/// One of the peer's rings.
#[derive(Clone, Copy, Debug, Default)]
struct RingState {
    /// Frames that wait for it.
    waiting: u16,
    /// When it took something last, or its first frame was queued.
    progress: Nanos,
    /// When the port first refused a frame for it, and when last, since it took one.
    refused: Option<(Nanos, Nanos)>,
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
    shares: Vec<Share>,
    rings: [RingState; MAX_RINGS],
    /// The rings that frames wait for, a bit each.
    busy: u64,
    /// The lane that is first next time.
    turn: usize,
    /// Frames of each class that went while those of lower classes waited, since one of those went.
    runs: Runs,
    /// What the port took when the frames were queued. Frames for other capabilities are of no use.
    caps: Caps,
    /// Reused allocations.
    spare: Vec<u16>,
    batch: Batch<'static>,
    picks: Vec<u16>,
    /// What `runs` is once the pick of the same index has gone.
    after: Vec<Runs>,
    cursors: Vec<u16>,
}

type Runs = [u8; CLASSES];

/// The class that goes next, of those with lanes `left`.
fn next_class(left: &[usize; CLASSES], runs: &mut Runs) -> Option<usize> {
    let below = |class: usize| (0..class).rev().find(|class| left[*class] != 0);
    let mut class = below(CLASSES)?;
    while let Some(lower) = below(class) {
        if runs[class] < RUN {
            runs[class] += 1;
            break;
        }
        runs[class] = 0;
        class = lower;
    }
    Some(class)
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

/// The bit of a ring, which is below [`MAX_RINGS`].
#[inline]
const fn bit(ring: u8) -> u64 {
    1 << (ring as usize % MAX_RINGS)
}

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
            // Each has a cell at least.
            lanes: Vec::with_capacity(usize::from(CELLS)),
            shares: Vec::with_capacity(usize::from(CELLS)),
            rings: [RingState::default(); MAX_RINGS],
            busy: 0,
            turn: 0,
            runs: Runs::default(),
            caps,
            spare: Vec::with_capacity(CHUNK),
            batch: Batch::with_capacity(CHUNK),
            picks: Vec::with_capacity(CHUNK),
            after: Vec::with_capacity(CHUNK),
            cursors: Vec::with_capacity(usize::from(CELLS)),
        })
    }

    /// The share of `source`, or a free one for it.
    fn share_of(&mut self, source: Option<Token>) -> usize {
        let own = |share: &Share| share.cells != 0 && share.source == source;
        let at = self.shares.iter().position(own).or_else(|| self.shares.iter().position(|share| share.cells == 0));
        let at = at.unwrap_or(self.shares.len());
        if at == self.shares.len() {
            self.shares.push(Share { source, cells: 0 });
        }
        self.shares[at].source = source;
        at
    }

    /// The lane of a share for `ring` and `class`, or a free one for it.
    fn lane_of(&mut self, share: u16, ring: u8, class: Class) -> usize {
        let own = |lane: &Lane| lane.first != NIL && (lane.share, lane.ring, lane.class) == (share, ring, class);
        let at = self.lanes.iter().position(own).or_else(|| self.lanes.iter().position(|lane| lane.first == NIL));
        let at = at.unwrap_or(self.lanes.len());
        if at == self.lanes.len() {
            self.lanes.push(Lane { share, ring, class, first: NIL, last: NIL, cells: 0 });
        }
        let lane = &mut self.lanes[at];
        (lane.share, lane.ring, lane.class) = (share, ring, class);
        at
    }

    /// The lane to drop from in favour of a frame of `class` of the source `share`: the longest of
    /// the lowest class below; one of the same source, else one of others where the source is
    /// `modest`.
    fn displaced(&self, share: usize, class: Class, modest: bool) -> Option<&Lane> {
        let is_own = |lane: &Lane| usize::from(lane.share) == share;
        let lower = self.lanes.iter().filter(|lane| lane.first != NIL && lane.class < class);
        let may_go = lower.filter(|lane| modest || is_own(lane));
        may_go.max_by_key(|lane| (is_own(lane), Reverse(lane.class), lane.cells))
    }

    /// Makes room for `need` cells of the source `share` and `class`; `false` where no frame of a
    /// lower class may be displaced, and no other source has more than that one would have. Frames
    /// that go for it are counted in `late`.
    fn make_room(&mut self, share: usize, class: Class, need: usize, late: &mut u64) -> bool {
        let own = usize::from(self.shares[share].cells) + need;
        while usize::from(self.free_cells) < need {
            if let Some(lane) = self.displaced(share, class, own <= MODEST) {
                self.remove(lane.last);
                *late += 1;
                continue;
            }
            let greediest = (0..self.shares.len()).max_by_key(|at| self.shares[*at].cells);
            let Some(greediest) = greediest.filter(|at| usize::from(self.shares[*at].cells) > own) else {
                return false;
            };
            let lanes = self.lanes.iter().filter(|lane| lane.first != NIL && usize::from(lane.share) == greediest);
            let Some(longest) = lanes.max_by_key(|lane| (Reverse(lane.class), lane.cells)) else { return false };
            self.remove(longest.last);
            *late += 1;
        }
        true
    }

    /// Copies a frame to the end of the lane of its source and ring; `false` where there is no room
    /// for it. Frames of others that make room are counted in `late`.
    fn push(
        &mut self,
        source: Option<Token>,
        ring: u8,
        batch: &Batch<'_>,
        frame: &Frame,
        now: Nanos,
        late: &mut u64,
    ) -> bool {
        let (need, class) = (frame.len().div_ceil(CELL_BYTES), batch.class_of(frame));
        let share = self.share_of(source);
        if !self.make_room(share, class, need, late) {
            return false;
        }
        let lane = self.lane_of(share as u16, ring, class);
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
        self.shares[share].cells += need as u16;
        let to = &mut self.rings[usize::from(ring)];
        if to.waiting == 0 {
            (to.progress, to.refused) = (now, None);
            self.busy |= bit(ring);
        }
        to.waiting += 1;
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
        self.shares[usize::from(lane.share)].cells -= cells;
        let ring = &mut self.rings[usize::from(lane.ring)];
        ring.waiting -= 1;
        if ring.waiting == 0 {
            self.busy &= !bit(lane.ring);
        }
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

    /// The ring of the frame that starts at cell `first`.
    fn ring_of(&self, first: u16) -> u8 {
        self.lanes[usize::from(self.frames[usize::from(first)].lane)].ring
    }

    /// Takes all frames out that wait for `rings`; returns how many there were.
    fn empty(&mut self, rings: u64) -> u64 {
        let before = self.waiting;
        for lane in 0..self.lanes.len() {
            while self.lanes[lane].first != NIL && rings & bit(self.lanes[lane].ring) != 0 {
                self.remove(self.lanes[lane].first);
            }
        }
        (before - self.waiting) as u64
    }

    /// Chooses the frames that go next, one of each lane of a class in turn, without those for the
    /// rings `full`.
    fn pick(&mut self, full: u64) {
        self.picks.clear();
        self.after.clear();
        self.cursors.clear();
        let free = |lane: &Lane| if full & bit(lane.ring) == 0 { lane.first } else { NIL };
        self.cursors.extend(self.lanes.iter().map(free));
        let lanes = self.lanes.len();
        // Lanes of each class that have something, and where the turn of each class is.
        let (mut left, mut turns, mut runs) = ([0; CLASSES], [self.turn; CLASSES], self.runs);
        let there = self.lanes.iter().zip(&self.cursors).filter(|(_, cursor)| **cursor != NIL);
        there.for_each(|(lane, _)| left[lane.class as usize] += 1);
        while self.picks.len() < CHUNK
            && let Some(class) = next_class(&left, &mut runs)
        {
            let ready = |at: &usize| self.lanes[*at].class as usize == class && self.cursors[*at] != NIL;
            let turn = turns[class];
            let Some(at) = (0..lanes).map(|n| (turn + n) % lanes).find(ready) else { break };
            turns[class] = at + 1;
            let cursor = &mut self.cursors[at];
            self.picks.push(*cursor);
            self.after.push(runs);
            *cursor = self.frames[usize::from(*cursor)].behind;
            if *cursor == NIL {
                left[class] -= 1;
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

    /// Whether frames wait for `ring`, so that others for it must go behind them.
    #[inline]
    pub(crate) fn waits_for(&self, ring: u8) -> bool {
        self.store.as_ref().is_some_and(|store| store.busy & bit(ring) != 0)
    }

    /// Whether there are rings that were given up, so that it is of interest when one of them takes
    /// a frame.
    #[inline]
    pub(crate) fn has_stalled(&self) -> bool {
        self.stalled != 0
    }

    /// Says that `ring` took a frame.
    #[inline]
    pub(crate) fn took(&mut self, ring: u8) {
        self.stalled &= !bit(ring);
    }

    /// Queues what the port refused of `batch`, and takes that out of `drops`; returns how many
    /// frames. What finds no room is counted in `drops` as `queue_full`. Frames of others that gave
    /// way are counted in `late`. `ring_of` is [`crate::port::Port::ring_of`] of the port.
    #[cold]
    pub(crate) fn take(
        &mut self,
        now: Nanos,
        batch: &Batch<'_>,
        caps: Caps,
        drops: &mut Drops,
        late: &mut u64,
        ring_of: impl Fn(&Frame) -> u8,
    ) -> u64 {
        let Overflow { store, stalled, progress, pause, next_try, .. } = self;
        let (source, limited) = (batch.ingress(), drops.limited());
        drops.take_refused(|index, _| {
            let frame = &batch.frames()[usize::from(index)];
            let ring = ring_of(frame);
            if *stalled & bit(ring) != 0 {
                return Err(Reason::NoBuffer);
            }
            let store = store.get_or_insert_with(|| Store::new(caps));
            if store.waiting == 0 {
                (*progress, store.caps) = (now, caps);
            }
            if store.busy & bit(ring) == 0 {
                // Tried again soon, however long another ring has been full.
                let soon = now.after(FIRST_TRY);
                *next_try = if store.waiting == 0 { soon } else { soon.min(*next_try) };
                *pause = FIRST_TRY;
            }
            match store.push(source, ring, batch, frame, now, late) {
                true => Ok(()),
                false => Err(if limited.is_some() { Reason::RateLimit } else { Reason::QueueFull }),
            }
        })
    }

    /// Hands over what waits, as far as the port takes it, to `send`; then drops what waited for
    /// too long. All that leaves the queue is in what it returns or in `drops`.
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
            drops.count(Reason::Reset, store.empty(u64::MAX));
        }
        // Rings that refused a frame, and those that took one.
        let (mut full, mut moved) = (0, 0);
        while store.busy & !full != 0 {
            store.pick(full);
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
                    // As for `Port::transmit`: what the peer has not seen is lost, and what was
                    // counted stays counted.
                    store.picks.clone().into_iter().for_each(|first| store.remove(first));
                    let counted = drops.total() - before;
                    drops.count(Reason::Reset, sent.frames + (count as u64).saturating_sub(counted));
                    drops.forget_refused();
                    return Err(fault);
                }
            }
            let before = full;
            drops.take_refused(|index, by_port| {
                // Marked to stay.
                let first = std::mem::replace(&mut store.picks[usize::from(index)], NIL);
                let ring = store.ring_of(first);
                full |= bit(ring);
                if by_port {
                    let refused = &mut store.rings[usize::from(ring)].refused;
                    *refused = Some((refused.map_or(now, |(since, _)| since), now));
                }
                Ok(())
            });
            for at in 0..count {
                match store.picks[at] {
                    NIL => {}
                    first => {
                        let ring = store.ring_of(first);
                        let state = &mut store.rings[usize::from(ring)];
                        (state.progress, state.refused) = (now, None);
                        store.runs = store.after[at];
                        moved |= bit(ring);
                        store.remove(first);
                    }
                }
            }
            debug_assert!(full != before || store.picks.iter().any(|first| *first != NIL), "each look gets further");
        }
        self.stalled &= !moved;
        if moved != 0 {
            (self.progress, self.pause) = (now, FIRST_TRY);
        } else if full != 0 {
            self.pause = Nanos(self.pause.0 * 2).min(LAST_TRY);
        }
        self.next_try = now.after(self.pause);
        self.rest(now, drops);
        Ok(sent)
    }

    /// Says how long a frame may wait for the port's rate limit; `None` where it has none.
    pub(crate) fn set_limit_hold(&mut self, hold: Option<Nanos>) {
        self.limit_hold = hold;
    }

    /// Leaves what waits where it is, until the limit that `drops` tells of lets more pass.
    pub(crate) fn rest(&mut self, now: Nanos, drops: &mut Drops) {
        if let Some(wait) = drops.limited() {
            self.next_try = now.after(wait.max(FIRST_TRY).min(HOLD));
        }
        self.expire(now, drops);
    }

    /// Drops what waited for too long. Frees the memory of a queue that was empty for [`KEEP`].
    fn expire(&mut self, now: Nanos, drops: &mut Drops) {
        let Some(store) = &mut self.store else { return };
        let (mut late, mut of) = (0, 0);
        let hold = self.limit_hold.unwrap_or(HOLD);
        let reason = if drops.limited().is_some() { Reason::RateLimit } else { Reason::QueueTimeout };
        if hold != HOLD {
            // Frames for other rings may go on to wait for the limit; those for a ring that the
            // peer has abandoned need not.
            let is_dead = |ring: &RingState| ring.refused.is_some_and(|(since, last)| last.since(since) >= HOLD);
            let waiting = (0..MAX_RINGS as u8).filter(|ring| store.busy & bit(*ring) != 0);
            let dead = waiting.filter(|ring| is_dead(&store.rings[usize::from(*ring)])).fold(0, |all, n| all | bit(n));
            self.stalled |= dead;
            drops.count(Reason::QueueTimeout, store.empty(dead));
        }
        for lane in 0..store.lanes.len() {
            loop {
                let first = store.lanes[lane].first;
                if first == NIL || now.since(store.frames[usize::from(first)].at) < hold {
                    break;
                }
                let ring = store.lanes[lane].ring;
                if reason == Reason::QueueTimeout && now.since(store.rings[usize::from(ring)].progress) >= hold {
                    of |= bit(ring);
                }
                store.remove(first);
                late += 1;
            }
        }
        if of != 0 {
            self.stalled |= of;
            late += store.empty(of);
        }
        drops.count(reason, late);
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
