use super::*;
use crate::class::Marking;
use crate::frame::Segmentation;
use std::collections::{BTreeMap, VecDeque};

const CAPS: Caps = Caps::full(1500);

/// A frame whose bytes tell its source, its number and its length.
fn bytes(source: u32, number: u32, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|at| (at as u32 * 7 + number * 13 + source) as u8).collect();
    bytes[..4].copy_from_slice(&source.to_be_bytes());
    bytes[4..8].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// Rings of the destination.
const RINGS: usize = 4;

/// A destination with room for so many frames in each ring, and its queue.
#[derive(Default)]
struct World {
    overflow: Overflow,
    room: [usize; RINGS],
    /// More than one spreads the frames over that many rings, by their numbers.
    rings: u32,
    got: Vec<Vec<u8>>,
    drops: Drops,
    late: u64,
    now: Nanos,
    /// Of each source.
    classes: [Class; 5],
    /// How many frames a rate limit lets pass with each try.
    limit: Option<usize>,
}

/// The ring of a frame.
fn ring(rings: u32, head: &[u8]) -> u8 {
    (u32::from_be_bytes([head[4], head[5], head[6], head[7]]) % rings.max(1)) as u8
}

impl World {
    /// Sends frames of one source as the worker does; returns how many were queued.
    fn send(&mut self, source: u32, frames: &[Vec<u8>]) -> u64 {
        let mut batch = Batch::with_capacity(frames.len());
        batch.set_ingress(Token(source));
        batch.set_marking(Marking::Fixed(self.classes[source as usize]));
        for frame in frames {
            batch.push(frame[..].into(), Offload::NONE);
        }
        self.drain();
        let World { overflow, room, rings, got, drops, .. } = self;
        for (index, frame) in frames.iter().enumerate() {
            let ring = ring(*rings, frame);
            if overflow.waits_for(ring) || room[usize::from(ring)] == 0 {
                drops.refuse(&[index as u16]);
                room[usize::from(ring)] = 0;
            } else {
                room[usize::from(ring)] -= 1;
                got.push(frame.clone());
                overflow.took(ring);
            }
        }
        overflow.take(self.now, &batch, CAPS, drops, &mut self.late, |frame| ring(*rings, frame.head()))
    }

    fn drain(&mut self) {
        let World { overflow, room, rings, got, drops, now, limit, .. } = self;
        let mut left = limit.unwrap_or(usize::MAX);
        overflow
            .drain(*now, CAPS, drops, |batch, which, drops| {
                let mut sent = Sent::default();
                let (which, later) = which.split_at(left.min(which.len()));
                left -= which.len();
                if !later.is_empty() {
                    drops.note_limit(Nanos::MILLI);
                    drops.hold(later);
                }
                for index in which {
                    let frame = &batch.frames()[usize::from(*index)];
                    let room = &mut room[usize::from(ring(*rings, frame.head()))];
                    if *room == 0 {
                        drops.refuse(&[*index]);
                        continue;
                    }
                    *room -= 1;
                    let mut bytes = Vec::new();
                    batch.append_to(frame, &mut bytes);
                    sent.frames += 1;
                    sent.bytes += bytes.len() as u64;
                    got.push(bytes);
                }
                Ok(sent)
            })
            .unwrap();
    }

    fn pass(&mut self, by: Nanos) {
        self.now = self.now.after(by);
        self.drain();
    }

    /// What holds in every case: each cell is free or in one frame, and lanes know what they have.
    fn check(&self) {
        let Some(store) = &self.overflow.store else { return };
        let mut free = 0;
        let mut cell = store.free;
        while free < store.free_cells {
            free += 1;
            cell = store.next[usize::from(cell)];
        }
        let (mut held, mut waiting) = (0, 0);
        let (mut shares, mut rings) = (vec![0; store.shares.len()], [0u16; MAX_RINGS]);
        for lane in &store.lanes {
            let (mut first, mut before, mut cells) = (lane.first, NIL, 0);
            while first != NIL {
                let frame = store.frames[usize::from(first)];
                assert_eq!(frame.before, before);
                assert_eq!(usize::from(frame.cells), (frame.len as usize).div_ceil(CELL_BYTES));
                (cells, waiting) = (cells + frame.cells, waiting + 1);
                rings[usize::from(lane.ring)] += 1;
                (before, first) = (first, frame.behind);
            }
            shares[usize::from(lane.share)] += lane.cells;
            assert_eq!((lane.cells, lane.last), (cells, before));
            held += cells;
        }
        assert_eq!((held + store.free_cells, waiting), (CELLS, store.waiting));
        assert!(shares.iter().eq(store.shares.iter().map(|share| &share.cells)));
        for (ring, waiting) in rings.into_iter().enumerate() {
            assert_eq!((store.rings[ring].waiting, store.busy & bit(ring as u8) != 0), (waiting, waiting != 0));
        }
    }
}

#[test]
fn frames_come_out_as_they_went_in_whatever_their_length() {
    let mut world = World::default();
    let lens = [14, 60, 127, 128, 129, 1514, 1535, 1536, 1537, 3000, 9018, 65_000];
    let frames: Vec<_> = lens.iter().enumerate().map(|(n, len)| bytes(1, n as u32, *len)).collect();
    assert_eq!(world.send(1, &frames), frames.len() as u64);
    world.check();
    world.room[0] = 5;
    world.drain();
    assert_eq!(world.got, frames[..5]);
    world.room[0] = 100;
    world.pass(FIRST_TRY);
    assert_eq!(world.got, frames);
    assert_eq!(world.drops.total(), 0);
    world.check();
}

#[test]
fn offloads_stay_with_their_frames_and_go_to_the_same_capabilities_only() {
    let cut = Segmentation { kind: crate::frame::SegmentKind::Tcp4, ecn: false, size: 1448, header_bytes: 54 };
    let offload = Offload { checksum: crate::frame::Checksum::Valid, segmentation: Some(cut) };
    let frame = bytes(1, 1, 30_000);
    let mut world = World::default();
    let queue = |overflow: &mut Overflow, drops: &mut Drops| {
        let mut batch = Batch::with_capacity(1);
        batch.push(frame[..].into(), offload);
        drops.refuse(&[0]);
        assert_eq!(overflow.take(Nanos(0), &batch, CAPS, drops, &mut 0, |_| 0), 1);
    };
    queue(&mut world.overflow, &mut world.drops);
    let mut seen = None;
    let send = |batch: &Batch<'_>, _: &[u16], _: &mut Drops| {
        seen = Some(batch.frames()[0].offload);
        Ok(Sent { frames: 1, bytes: 30_000 })
    };
    world.overflow.drain(Nanos(0), CAPS, &mut world.drops, send).unwrap();
    assert_eq!(seen, Some(offload));
    queue(&mut world.overflow, &mut world.drops);
    let never = |_: &Batch<'_>, _: &[u16], _: &mut Drops| panic!("not for this driver");
    world.overflow.drain(Nanos(0), Caps::plain(1500), &mut world.drops, never).unwrap();
    assert_eq!(world.drops.of(Reason::Reset), 1);
}

#[test]
fn a_source_that_floods_leaves_the_others_their_share_and_their_turns() {
    let mut world = World::default();
    let flood: Vec<_> = (0..1000).map(|n| bytes(1, n, 1514)).collect();
    assert_eq!(world.send(1, &flood), u64::from(CELLS));
    let few: Vec<_> = (0..50).map(|n| bytes(2, n, 1514)).collect();
    assert_eq!(world.send(2, &few), 50, "the flood gives way");
    assert_eq!((world.late, world.drops.of(Reason::QueueFull)), (50, 1000 - u64::from(CELLS)));
    world.check();
    // In turn, although the flood came first.
    world.room[0] = 100;
    world.drain();
    let of = |source: u32| move |frame: &&Vec<u8>| frame[..4] == source.to_be_bytes();
    assert_eq!(world.got.iter().filter(of(2)).count(), 50);
    assert_eq!(world.got.iter().filter(of(2)).cloned().collect::<Vec<_>>(), few);
    // A second flood gets half and no more.
    let mut world = World::default();
    world.send(1, &flood);
    let other: Vec<_> = (0..1000).map(|n| bytes(2, n, 1514)).collect();
    assert_eq!(world.send(2, &other), u64::from(CELLS) / 2);
    world.check();
}

#[test]
fn higher_classes_go_first_and_lower_ones_do_not_starve() {
    use Class::{Background, Normal, Urgent};
    let mut world = World { classes: [Normal, Normal, Urgent, Background, Normal], ..World::default() };
    for source in [3, 1, 2] {
        let frames: Vec<_> = (0..60).map(|n| bytes(source, n, 100)).collect();
        assert_eq!(world.send(source, &frames), 60);
    }
    world.check();
    // One buffer at a time, as of a guest that posts few.
    while world.overflow.waits() {
        world.room[0] = 1;
        world.drain();
        world.check();
    }
    let order: Vec<u32> =
        world.got.iter().map(|frame| u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]])).collect();
    let of = |source: u32, part: &[u32]| part.iter().filter(|of| **of == source).count();
    // Seven of the urgent class, then one of those below, of which every eighth is a background
    // one.
    assert_eq!(order[..8], [2, 2, 2, 2, 2, 2, 2, 1]);
    assert_eq!((of(2, &order[..64]), of(1, &order[..64]), of(3, &order[..64])), (56, 7, 1));
    // What is left of the urgent ones, then the two others in the same proportion.
    let last = order.iter().rposition(|source| *source == 2).unwrap();
    assert!((66..72).contains(&last), "{last}");
    assert_eq!((of(1, &order[last + 1..last + 57]), of(3, &order[last + 1..last + 57])), (49, 7), "{order:?}");
    assert_eq!(order.len(), 180);
    // Each source's own order stays.
    for source in 1..4 {
        let own = world.got.iter().filter(|frame| frame[..4] == u32::to_be_bytes(source));
        assert!(own.cloned().eq((0..60).map(|n| bytes(source, n, 100))));
    }
}

#[test]
fn marked_frames_of_a_source_displace_its_own_others() {
    let mut world = World::default();
    let flood: Vec<_> = (0..1000).map(|n| bytes(1, n, 1514)).collect();
    assert_eq!(world.send(1, &flood), u64::from(CELLS));
    // The same source has the whole queue, and now something that is in a hurry.
    world.classes[1] = Class::Urgent;
    let marked: Vec<_> = (2000..2010).map(|n| bytes(1, n, 100)).collect();
    assert_eq!(world.send(1, &marked), 10);
    world.check();
    assert_eq!(world.late, 10);
    world.room[0] = 7;
    world.drain();
    assert_eq!(world.got, marked[..7]);
}

#[test]
fn a_full_queue_gives_a_modest_source_of_a_higher_class_the_place_of_lower_ones() {
    use Class::{Background, Normal, Urgent};
    let flood = |source: u32| (0..1000).map(|n| bytes(source, n, 1514)).collect::<Vec<_>>();
    let mut world = World { classes: [Normal, Background, Normal, Urgent, Urgent], ..World::default() };
    assert_eq!(world.send(1, &flood(1)[..128]), 128);
    assert_eq!(world.send(2, &flood(2)[..128]), 128);
    // No source has more than half, so the urgent source gets its place by its class alone, and the
    // lowest class pays.
    assert_eq!(world.send(3, &flood(3)[..MODEST]), MODEST as u64);
    world.check();
    let waiting = |world: &World, class: Class| {
        let lanes = &world.overflow.store.as_ref().unwrap().lanes;
        lanes.iter().filter(|lane| lane.class == class).map(|lane| lane.cells).sum::<u16>()
    };
    assert_eq!([Background, Normal, Urgent].map(|class| waiting(&world, class)), [64, 128, 64]);
    // Beyond that it is one source among others: each gets a third at most.
    world.send(3, &flood(3));
    world.check();
    let left = [Background, Normal, Urgent].map(|class| waiting(&world, class));
    assert!(left[0] >= 60 && left[1] >= 80 && left[2] <= 100, "{left:?}");
    // A lower class displaces no higher one.
    let mut world = World { classes: [Normal, Background, Normal, Urgent, Urgent], ..World::default() };
    world.send(3, &flood(3)[..128]);
    world.send(4, &flood(4)[..128]);
    world.send(1, &flood(1)[..MODEST]);
    world.check();
    assert!(waiting(&world, Urgent) >= 256 - MODEST as u16);
    assert_eq!(waiting(&world, Background), MODEST as u16, "the fair share of a third source");
}

#[test]
fn a_destination_that_takes_nothing_is_given_up_until_it_takes_something() {
    let mut world = World::default();
    assert_eq!(world.send(1, &[bytes(1, 0, 100)]), 1);
    world.pass(Nanos(HOLD.0 - 1));
    assert!(world.overflow.waits());
    world.pass(Nanos(1));
    assert!(!world.overflow.waits());
    assert_eq!(world.drops.of(Reason::QueueTimeout), 1);
    assert_eq!(world.send(1, &[bytes(1, 1, 100)]), 0, "no more work for a dead guest");
    assert_eq!(world.drops.of(Reason::NoBuffer), 1);
    world.room[0] = 1;
    assert_eq!(world.send(1, &[bytes(1, 2, 100), bytes(1, 3, 100)]), 1, "it lives again");
    world.room[0] = 1;
    world.pass(FIRST_TRY);
    assert_eq!(world.got.len(), 2);
    // The memory goes when it was not needed for a while.
    assert!(world.overflow.is_live());
    world.pass(KEEP);
    assert!(!world.overflow.is_live());
}

#[test]
fn a_ring_that_is_full_holds_up_its_own_frames_only() {
    let mut world = World { rings: 2, ..World::default() };
    world.room = [0, 10, 0, 0];
    let frames: Vec<_> = (0..8).map(|n| bytes(1, n, 100)).collect();
    let of = |ring: u32| frames.iter().skip(ring as usize).step_by(2).cloned().collect::<Vec<_>>();
    assert_eq!(world.send(1, &frames), 4, "those for the full ring");
    assert_eq!(world.got, of(1));
    // The other ring is full for a moment, and goes on at the next try.
    world.room = [0, 1, 0, 0];
    assert_eq!(world.send(1, &frames), 7);
    world.check();
    world.room = [0, 10, 0, 0];
    world.pass(FIRST_TRY);
    assert_eq!(world.got, [of(1), of(1)].concat());
    // It alone is given up.
    world.pass(HOLD);
    assert!(!world.overflow.waits());
    assert_eq!((world.drops.of(Reason::QueueTimeout), world.drops.of(Reason::NoBuffer)), (8, 0));
    world.room = [0, 1, 0, 0];
    assert_eq!(world.send(1, &frames), 3, "only the ring that lives has a queue");
    assert_eq!(world.drops.of(Reason::NoBuffer), 4);
    world.room = [1, 10, 0, 0];
    world.pass(FIRST_TRY);
    assert_eq!(world.send(1, &frames[..3]), 1, "the given up ring took a frame again");
}

#[test]
fn a_dead_ring_is_given_up_while_a_rate_limit_holds_the_others_back() {
    let mut world = World { rings: 2, room: [1000, 0, 0, 0], ..World::default() };
    // As of 1 Mbit/s, where a frame of 64 KiB takes half a second.
    world.overflow.set_limit_hold(Some(Nanos::MILLI.times(550)));
    let frames: Vec<_> = (0..200).map(|n| bytes(1, n, 100)).collect();
    world.room[0] = 0;
    assert_eq!(world.send(1, &frames), 200);
    (world.room[0], world.limit) = (1000, Some(2));
    for ms in 0..60u64 {
        let given_up = world.overflow.has_stalled();
        assert!(ms > HOLD.0 / Nanos::MILLI.0 || !given_up, "given up after {ms} ms");
        world.drops = Drops::default();
        world.pass(Nanos::MILLI);
        if !given_up && world.overflow.has_stalled() {
            assert_eq!(world.drops.of(Reason::QueueTimeout), 100, "all that waited for the dead ring");
            world.limit = Some(0);
        }
        assert_eq!(world.drops.of(Reason::RateLimit), 0);
        world.check();
    }
    assert!(world.overflow.has_stalled(), "the dead ring keeps its queue");
    assert!(world.overflow.waits_for(0) && !world.overflow.waits_for(1), "the other ring keeps its frames");
}

#[test]
fn a_source_gains_no_share_by_sending_to_many_rings() {
    let mut world = World { rings: RINGS as u32, ..World::default() };
    let flood: Vec<_> = (0..1000).map(|n| bytes(1, n, 1514)).collect();
    assert_eq!(world.send(1, &flood), u64::from(CELLS));
    let one_ring: Vec<_> = (0..1000).map(|n| bytes(2, 4 * n, 1514)).collect();
    assert_eq!(world.send(2, &one_ring), u64::from(CELLS) / 2);
    world.check();
}

#[test]
fn a_slow_destination_is_tried_less_often_and_a_quick_one_at_once() {
    let mut world = World::default();
    world.send(1, &[bytes(1, 0, 100), bytes(1, 1, 100)]);
    let mut tries = 0;
    while world.overflow.waits() {
        let pause = world.overflow.next_try.since(world.now);
        assert!(pause >= FIRST_TRY && pause <= LAST_TRY, "{pause:?}");
        world.pass(pause);
        tries += 1;
    }
    assert!((10..100).contains(&tries), "{tries} tries within HOLD");
}

#[test]
fn what_a_fault_loses_is_counted_once() {
    let mut world = World::default();
    world.send(1, &(0..40).map(|n| bytes(1, n, 100)).collect::<Vec<_>>());
    let mut calls = 0;
    let fault = Fault { kind: crate::port::FaultKind::Ring, detail: String::new() };
    let done = world.overflow.drain(Nanos(0), CAPS, &mut world.drops, |_, which, drops| {
        calls += 1;
        if calls == 1 {
            return Ok(Sent { frames: which.len() as u64, bytes: 0 });
        }
        drops.count(Reason::TooLong, 3);
        Err(fault.clone())
    });
    assert_eq!(done, Err(fault));
    assert_eq!((world.drops.of(Reason::TooLong), world.drops.of(Reason::Reset), world.overflow.waiting()), (3, 37, 0));
    world.check();
}

/// Beside a simple one: per source a queue, nothing but order and accounts.
#[test]
fn random_work_keeps_order_and_accounts() {
    let seed = std::env::var("TOMBOLO_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed_u64);
    println!("TOMBOLO_SEED={seed}");
    let mut state = seed | 1;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let classes = [Class::Normal, Class::Urgent, Class::Background, Class::High, Class::Normal];
    let mut world = World { classes, ..World::default() };
    let (mut numbers, mut sent) = ([0u32; 5], 0u64);
    world.rings = RINGS as u32;
    for _ in 0..1200 {
        match random(4) {
            0 | 1 => {
                let source = random(5) as u32;
                let frames: Vec<_> = (0..random(40))
                    .map(|_| {
                        numbers[source as usize] += 1;
                        let len = [14, 60, 1514, 1536, 2000, 9000][random(6) as usize];
                        bytes(source, numbers[source as usize], len)
                    })
                    .collect();
                sent += frames.len() as u64;
                world.send(source, &frames);
            }
            2 => world.room = [(); RINGS].map(|()| random(30) as usize),
            _ => world.pass(Nanos(random(12_000_000))),
        }
        world.check();
        let left = world.overflow.waiting() as u64;
        assert_eq!(world.got.len() as u64 + world.drops.total() + world.late + left, sent);
    }
    let mut last: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    let mut lens: BTreeMap<u32, VecDeque<usize>> = BTreeMap::new();
    for frame in &world.got {
        let source = u32::from_be_bytes([frame[0], frame[1], frame[2], frame[3]]);
        let number = u32::from_be_bytes([frame[4], frame[5], frame[6], frame[7]]);
        assert_eq!(*frame, bytes(source, number, frame.len()), "bytes changed");
        assert!(
            last.insert((source, number % RINGS as u32), number).is_none_or(|before| before < number),
            "order of source {source}"
        );
        lens.entry(source).or_default().push_back(frame.len());
    }
    assert!(world.got.len() > 500 && world.drops.of(Reason::QueueTimeout) > 0 && world.late > 0, "the test tests");
}
