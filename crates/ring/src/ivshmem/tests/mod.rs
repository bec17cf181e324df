//! Both ends against each other, against a dull model, and against garbage.

use std::boxed::Box;
use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

use core::sync::atomic::Ordering;

use proptest::prelude::*;

use super::net::{Geometry, NetError, Receiver, Sections, Sender, initialise};
use super::region::*;
use super::state::{Action, Cause, Machine, Offloads, State};
use crate::mem::ForeignMut;

/// A section for one test, full of 0xa5, given back to the system when the test's process ends.
fn section(bytes: usize) -> ForeignMut<'static> {
    let memory = Box::leak(vec![0xa5u8; bytes + 64].into_boxed_slice());
    let skip = memory.as_ptr().align_offset(64);
    ForeignMut::from(&mut memory[skip..skip + bytes])
}

/// One end of a link.
struct End {
    own: ForeignMut<'static>,
    sections: Sections<'static>,
    sender: Sender<256>,
    receiver: Receiver,
}

impl End {
    fn new(geometry: &Geometry, own: ForeignMut<'static>, peer: ForeignMut<'static>) -> End {
        initialise(geometry, own);
        let sections = Sections::new(geometry, own, peer.as_foreign()).unwrap();
        End { own, sections, sender: Sender::new(geometry), receiver: Receiver::new(geometry) }
    }

    fn send(&mut self, bytes: &[u8]) -> bool {
        self.sender.push(&self.sections, bytes.len()).map(|place| place.write_from(bytes)).is_some()
    }

    fn receive(&mut self, max: usize) -> Result<Vec<Vec<u8>>, NetError> {
        let mut frames = Vec::new();
        self.receiver.receive(&self.sections, max, |view| {
            let mut bytes = vec![0; view.len()];
            view.read_into(&mut bytes);
            frames.push(bytes);
        })?;
        Ok(frames)
    }
}

fn link(section_bytes: usize) -> (Geometry, End, End) {
    let geometry = Geometry::new(section_bytes as u64).unwrap();
    let (a, b) = (section(section_bytes), section(section_bytes));
    (geometry, End::new(&geometry, a, b), End::new(&geometry, b, a))
}

// --- geometry ---

#[test]
fn the_ring_of_jailhouses_section_is_as_its_drivers_compute_it() {
    let geometry = Geometry::new(0x7f000).unwrap();
    assert_eq!((geometry.num(), geometry.header_bytes(), geometry.data_bytes()), (2048, 53376, 466816));
    assert_eq!((geometry.available_offset(), geometry.used_offset()), (32768, 36928));
    assert_eq!((geometry.used_event_offset(), geometry.avail_event_offset()), (32768 + 4 + 4096, 36928 + 4 + 16384));
    assert_eq!((geometry.linux_default_mtu(), geometry.max_mtu()), (16384, 65535));
}

/// The drivers' own loop, written as they write it, beside ours, for every page count up to 2 MiB.
#[test]
fn geometry_is_the_drivers_loop_for_every_section() {
    fn align(n: u64) -> u64 {
        n.div_ceil(64) * 64
    }
    for pages in 1..512u64 {
        let bytes = pages * 4096;
        let (mut num, mut size) = (4096u64, 0);
        while num > 32 {
            size = align(align(16 * num + 2 * (3 + num)) + 2 * 3 + 8 * num);
            if size < bytes / 8 {
                break;
            }
            num >>= 1;
        }
        let geometry = Geometry::new(bytes).unwrap();
        assert_eq!((u64::from(geometry.num()), u64::from(geometry.header_bytes())), (num, size), "{pages} pages");
        assert!(geometry.avail_event_offset() + 2 <= geometry.header_bytes());
    }
}

#[test]
fn sections_without_room_are_refused() {
    for bytes in [0, 64, 1791, 1792 + 271, 1 << 32, u64::MAX] {
        assert_eq!(Geometry::new(bytes), Err(NetError::Section { bytes }));
    }
    let least = Geometry::new(1792 + 272).unwrap();
    assert_eq!((least.num(), least.header_bytes(), least.data_bytes()), (32, 1792, 272));
    let geometry = Geometry::new(8192).unwrap();
    let (short, odd) = (section(4096), section(8192 + 64).skip(8).take(8192));
    let good = section(8192);
    assert!(Sections::new(&geometry, good, short.as_foreign()).is_err());
    assert!(Sections::new(&geometry, short, good.as_foreign()).is_err());
    assert!(Sections::new(&geometry, odd, good.as_foreign()).is_err());
}

// --- both ends ---

#[test]
fn frames_go_both_ways_and_places_return_in_order() {
    let (_, mut a, mut b) = link(0x4000);
    for round in 0..1000usize {
        let frame: Vec<u8> = (0..60 + round % 500).map(|i| (i * 7 + round) as u8).collect();
        assert!(a.send(&frame) && b.send(&frame));
        a.sender.publish(&a.sections);
        b.sender.publish(&b.sections);
        assert_eq!(b.receive(4).unwrap(), std::slice::from_ref(&frame));
        assert_eq!(a.receive(4).unwrap(), std::slice::from_ref(&frame));
        b.receiver.release(&b.sections, 1);
        a.receiver.release(&a.sections, 1);
        assert_eq!(a.sender.reclaim(&a.sections), Ok(1));
        assert_eq!(b.sender.reclaim(&b.sections), Ok(1));
        assert_eq!((a.sender.outstanding(), a.sender.taken_bytes()), (0, 0));
    }
}

#[test]
fn golden_bytes_of_a_frame_and_of_its_return() {
    let (geometry, mut a, mut b) = link(0x7f000);
    assert!(a.send(&[0x11; 60]) && a.send(&[0x22; 47]));
    assert!(a.sender.publish(&a.sections), "a fresh avail_event of 0 asks for the first frame");
    let bytes = a.own.as_foreign();
    #[rustfmt::skip]
    assert_eq!(bytes.read_array::<48>(0).unwrap(), [
        0x80, 0xd0, 0, 0, 0, 0, 0, 0, 60, 0, 0, 0, 0, 0, 1, 0,
        // 18 + 60 = 78, so the next one is 128 further.
        0x00, 0xd1, 0, 0, 0, 0, 0, 0, 47, 0, 0, 0, 0, 0, 2, 0,
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0,
    ]);
    assert_eq!(bytes.read_array::<10>(32768).unwrap(), [0, 0, 2, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(bytes.read_array::<16>(2047 * 16).unwrap(), [0; 16], "the last descriptor links to none");
    assert_eq!(bytes.read_array::<4>(53376).unwrap(), [0x11; 4]);
    // Behind the frame nothing was written.
    assert_eq!(bytes.read_array::<4>(53376 + 60).unwrap(), [0xa5; 4]);

    assert_eq!(b.receive(8).unwrap(), [vec![0x11; 60], vec![0x22; 47]]);
    assert!(b.receiver.release(&b.sections, 2), "a fresh used_event of 0 asks for the first return");
    assert_eq!(b.receiver.arm(&b.sections), Ok(false));
    let bytes = b.own.as_foreign();
    assert_eq!(bytes.read_array::<20>(36928).unwrap(), [0, 0, 2, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]);
    assert_eq!(bytes.read_array::<2>(geometry.avail_event_offset() as usize).unwrap(), [2, 0]);
    assert_eq!(a.sender.arm(&a.sections), Ok(true), "the second look finds what returned");
    let used_event = geometry.used_event_offset() as usize;
    assert_eq!(a.sender.arm(&a.sections), Ok(false));
    assert_eq!(a.own.as_foreign().read_array::<2>(used_event).unwrap(), [2, 0]);
}

// --- regions ---

fn header() -> Header {
    Header {
        protocol: 0x4001,
        vectors: 2,
        layout: Layout::v1(1 << 20, 0x3000, 2).unwrap(),
        mac: [0x02, 0x54, 0x4d, 1, 2, 3],
        mtu: 0x2328,
        name: Name::new("control").unwrap(),
        offloads: true,
    }
}

#[rustfmt::skip]
const GOLDEN: [u8; HEADER_BYTES] = [
    b'T', b'M', b'B', b'L', b'I', b'V', b'S', b'1', 1, 0, 0, 0, 0x01, 0x40, 0, 0,
    2, 0, 0, 0, 2, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0,
    0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x30, 0, 0, 0, 0, 0, 0,
    0, 0x50, 0, 0, 0, 0, 0, 0, 0, 0xd0, 0x07, 0, 0, 0, 0, 0,
    0x02, 0x54, 0x4d, 1, 2, 3, 0x28, 0x23, b'c', b'o', b'n', b't', b'r', b'o', b'l', 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    1, 0, 0, 0,
];

#[test]
fn golden_header_both_ways() {
    let mut page = [0xa5; 4096];
    header().encode(&mut page).unwrap();
    assert_eq!(page[..HEADER_BYTES], GOLDEN);
    assert!(page[HEADER_BYTES..].iter().all(|byte| *byte == 0));
    // What comes behind the fields is for later versions.
    page[HEADER_BYTES..].fill(0xa5);
    assert_eq!(Header::decode(&page, 1 << 20), Ok(header()));
    assert_eq!(header().name.as_str(), "control");
    // A maker that offers nothing, or something that is not known here.
    for (offers, offloads) in [(0u8, false), (2, false), (3, true), (0xfe, false)] {
        page[104] = offers;
        assert_eq!(Header::decode(&page, 1 << 20), Ok(Header { offloads, ..header() }), "{offers:#x}");
    }
}

#[test]
fn a_header_cut_at_any_length_is_refused() {
    for got in 0..HEADER_BYTES {
        assert_eq!(Header::decode(&GOLDEN[..got], 1 << 20), Err(RegionError::Truncated { got }));
        assert_eq!(header().encode(&mut [0xa5; HEADER_BYTES][..got]), Err(RegionError::Truncated { got }));
    }
    assert!(Header::decode(&GOLDEN, 1 << 20).is_ok());
}

#[test]
fn impossible_headers_are_refused_by_name() {
    use RegionError as E;
    let with = |at: usize, bytes: &[u8]| {
        let mut page = GOLDEN;
        page[at..at + bytes.len()].copy_from_slice(bytes);
        Header::decode(&page, 1 << 20).unwrap_err()
    };
    let long = |n: u64| n.to_le_bytes();
    for at in 0..8 {
        assert!(matches!(with(at, &[0]), E::Magic { .. }));
    }
    for got in [0, 2, u32::MAX] {
        assert_eq!(with(8, &got.to_le_bytes()), E::Version { got });
    }
    for got in [0, 1, 65, u32::MAX] {
        assert_eq!(with(16, &got.to_le_bytes()), E::Peers { got });
    }
    // Offsets and lengths: not of pages, into the one before, beyond the end, and so that a sum would overflow.
    for (at, part, values) in [
        (24, Section::StateTable, &[1, 0x1800, u64::MAX, !0xfff][..]),
        (32, Section::ReadWrite, &[0, 0x1000, 0x2001, !0xfff]),
        (40, Section::ReadWrite, &[1, 0x3001, !0xfff, 1 << 41]),
        (48, Section::Outputs, &[0, 0x4000, 0x5001, !0xfff]),
        (56, Section::Outputs, &[0, 1, 0x7d001, !0xfff, 1 << 63]),
    ] {
        for value in values {
            let error = with(at, &long(*value));
            assert!(matches!(error, E::Section { part: p, .. } if p == part), "{at} {value:#x}: {error}");
        }
    }
    assert!(
        matches!(with(40, &long(0x4000)), E::Section { part: Section::Outputs, .. }),
        "the R/W section grew into it"
    );
    assert_eq!(with(56, &long(0x7e000)), E::Region { needed: 0x10_1000, got: 1 << 20 });
    assert_eq!(with(72, &[0xff]), E::Name);
}

#[test]
fn layouts_are_those_of_the_table() {
    let net = Layout::default_network();
    assert_eq!((net.output(0), net.output(1), net.output(2)), (Some(0x2000..0x81000), Some(0x81000..0x100000), None));
    assert_eq!((net.state(0), net.state(1), net.state(2)), (Some(0x1000), Some(0x1004), None));
    assert_eq!((net.bytes(), net.check(1 << 20)), (1 << 20, Ok(())));
    let jailhouse = Layout::v2(0x1000, 0, 0x7f000, 2);
    assert_eq!((jailhouse.state(1), jailhouse.output(1)), (Some(4), Some(0x80000..0xff000)));
    assert_eq!(jailhouse.check(0xff000), Ok(()));
    assert!(jailhouse.check(0xfefff).is_err());
    let common = Layout::v1(1 << 24, 0x10000, 64).unwrap();
    assert_eq!(common.check(1 << 24), Ok(()));
    assert!(common.output_bytes >= 0x3f000);
    for (bytes, rw, peers) in
        [(0, 0, 2), (0x3000, 0, 2), (1 << 20, 1 << 20, 2), (1 << 20, u64::MAX, 2), (1 << 20, 0, 1)]
    {
        assert!(Layout::v1(bytes, rw, peers).is_err(), "{bytes:#x} {rw:#x} {peers}");
    }
    assert!(Layout::v2(u64::MAX, u64::MAX, u64::MAX, 2).check(u64::MAX).is_err());
    assert_eq!(Layout::v2(0x1000, 0, u64::MAX, 2).output(1), None, "an absurd layout has no section");
    assert_eq!(Name::new("a name of thirty-three characters"), None);
    assert_eq!(Name::new("a\0b"), None);
}

// --- states ---

/// The table at the head of `state.rs`, row by row: own, the peer's word, what is done, and what the own state is then.
#[test]
fn every_row_of_the_state_table() {
    use Action as A;
    use Cause as C;
    use State::{Init, Ready, Reset, Run};
    let path = |own: State| {
        let mut machine = Machine::new();
        let words: &[u32] = match own {
            Reset => &[],
            Init => &[0],
            Ready => &[0, 1],
            Run => &[0, 1, 2],
        };
        for word in words {
            assert_ne!(machine.step(*word), A::None);
        }
        assert_eq!(machine.own(), own);
        machine
    };
    let rows = [
        (Reset, 0, A::Write(Init), Init),
        (Reset, 1, A::Write(Init), Init),
        (Reset, 2, A::None, Reset),
        (Reset, 3, A::None, Reset),
        (Reset, 4, A::None, Reset),
        (Init, 0, A::None, Init),
        (Init, 1, A::Initialise, Ready),
        (Init, 2, A::Initialise, Ready),
        (Init, 3, A::Initialise, Ready),
        (Init, 4, A::Fall(C::PeerWord(4)), Reset),
        (Ready, 0, A::Fall(C::PeerReset), Reset),
        (Ready, 1, A::None, Ready),
        (Ready, 2, A::Write(Run), Run),
        (Ready, 3, A::Write(Run), Run),
        (Ready, u32::MAX, A::Fall(C::PeerWord(u32::MAX)), Reset),
        (Run, 0, A::Fall(C::PeerReset), Reset),
        (Run, 1, A::Fall(C::PeerSkipped), Reset),
        (Run, 2, A::None, Run),
        (Run, 3, A::None, Run),
        (Run, 0x8000_0003, A::Fall(C::PeerWord(0x8000_0003)), Reset),
    ];
    for (own, word, action, then) in rows {
        let mut machine = path(own);
        assert_eq!((machine.step(word), machine.own()), (action, then), "{own} sees {word:#x}");
        assert_eq!(machine.is_up(), then == Run && word == 3);
        assert_eq!(machine.may_use_rings(), then == Run && (word == 2 || word == 3));
        machine.reset();
        assert_eq!(machine.own(), Reset);
    }
}

/// A guest says in each word but RESET that it takes offloads, and only where they were offered it may.
#[test]
fn offloads_are_agreed_on_by_the_guests_words() {
    use State::{Init, Ready, Reset, Run};
    for wants in [false, true] {
        let mut fabric = Machine::with_offloads(Offloads::Offered);
        let mut guest = Machine::with_offloads(if wants { Offloads::Taken } else { Offloads::None });
        let mut words = vec![guest.own_word()];
        for _ in 0..8 {
            let _ = fabric.step(guest.own_word());
            assert!(fabric.own_word() < 4, "the fabric's words are those that any driver knows");
            let _ = guest.step(fabric.own_word());
            words.push(guest.own_word());
        }
        words.dedup();
        let bit = if wants { 0x100 } else { 0 };
        assert_eq!(words, [0, 1 | bit, 2 | bit, 3 | bit]);
        assert!(fabric.is_up() && guest.is_up());
        assert_eq!((fabric.uses_offloads(), guest.uses_offloads()), (wants, wants));
        // A driver that thinks otherwise took the guest's place, unseen.
        assert_eq!(fabric.step(3 | (bit ^ 0x100)), Action::Fall(Cause::PeerSkipped));
        assert_eq!(fabric.own(), Reset);
    }
    for (offloads, word, state) in [
        (Offloads::Offered, 0x100, None),
        (Offloads::Offered, 0x101, Some(Init)),
        (Offloads::Offered, 0x102, Some(Ready)),
        (Offloads::Offered, 0x103, Some(Run)),
        (Offloads::Offered, 0x104, None),
        (Offloads::Offered, 0x203, None),
        (Offloads::Offered, 3, Some(Run)),
        (Offloads::None, 0x103, None),
        (Offloads::Taken, 0x103, None),
    ] {
        assert_eq!(offloads.of_peer(word), (state, state.is_some() && word > 3), "{offloads:?} {word:#x}");
    }
}

/// Two machines, looked after in any order, from any states in which one's driver may have been replaced: they meet in RUN,
/// and nobody clears its section while the other one runs.
#[test]
fn two_machines_meet_from_wherever_they_are() {
    use State::{Init, Ready, Reset, Run};
    for stale in [Reset, Init, Ready, Run] {
        for order in 0..256u32 {
            // `a` is new, as after a restart; `b` stands where it was when `a`'s predecessor ran.
            let (mut a, mut b) = (Machine::new(), Machine::new());
            while b.own() != stale {
                let _ = b.step(if b.own() == Reset { 0 } else { 2 });
            }
            for turn in 0..32u32 {
                let (me, other) = if (order >> (turn % 8)) & 1 == 0 { (&mut a, &b) } else { (&mut b, &a) };
                let action = me.step(other.own().word());
                assert!(action != Action::Initialise || other.own() != Run, "{stale} {order:#b}");
            }
            // Fairly from here on, since an order may have left one out.
            for _ in 0..8 {
                let _ = a.step(b.own().word());
                let _ = b.step(a.own().word());
            }
            assert!(a.is_up() && b.is_up(), "{stale} {order:#b}: {a:?} {b:?}");
        }
    }
}

// --- wishes ---

#[test]
fn rings_follow_the_peers_wish_both_ways() {
    let (_, mut a, mut b) = link(0x4000);
    // The first frame and its return are asked for by the zeros of fresh rings.
    assert!(a.send(&[1; 60]) && a.sender.publish(&a.sections));
    assert!(!a.sender.publish(&a.sections), "nothing new");
    assert!(a.send(&[1; 60]) && !a.sender.publish(&a.sections), "not asked for");
    assert_eq!(b.receive(8).unwrap().len(), 2);
    assert!(b.receiver.release(&b.sections, 2));
    assert_eq!(a.sender.reclaim(&a.sections), Ok(2));
    for _ in 0..1000 {
        assert_eq!(b.receiver.arm(&b.sections), Ok(false));
        assert!(a.send(&[1; 60]) && a.sender.publish(&a.sections), "armed");
        assert_eq!(b.receiver.arm(&b.sections), Ok(true), "the second look finds it");
        assert_eq!(b.receive(8).unwrap().len(), 1);
        assert!(!b.receiver.release(&b.sections, 1), "the sender did not ask");
        assert_eq!(a.sender.reclaim(&a.sections), Ok(1));

        assert!(a.send(&[2; 60]));
        a.sender.publish(&a.sections);
        assert_eq!(a.sender.arm(&a.sections), Ok(false));
        assert_eq!(b.receive(8).unwrap().len(), 1);
        assert!(b.receiver.release(&b.sections, 1), "the sender asked");
        assert!(!b.receiver.release(&b.sections, 1), "nothing is held");
        assert_eq!(a.sender.arm(&a.sections), Ok(true), "the second look finds it");
    }
}

/// Linux's sender writes its wish after buffers returned, does not look again, and sends one frame more: its return rings.
#[test]
fn a_wish_that_comes_late_is_heard_with_the_next_return() {
    let (geometry, mut a, mut b) = link(0x4000);
    for _ in 0..3 {
        assert!(a.send(&[1; 60]));
    }
    a.sender.publish(&a.sections);
    assert_eq!(b.receive(1).unwrap().len(), 1);
    assert!(b.receiver.release(&b.sections, 1), "the zero of a fresh ring");
    assert_eq!(a.sender.reclaim(&a.sections), Ok(1));
    assert_eq!(b.receive(1).unwrap().len(), 1);
    assert!(!b.receiver.release(&b.sections, 1));
    // The wish for the second return, which is there already.
    a.own.store_u16(geometry.used_event_offset() as usize, 1, Ordering::Relaxed).unwrap();
    assert_eq!(b.receive(1).unwrap().len(), 1);
    assert!(b.receiver.release(&b.sections, 1), "late, but heard");
    assert!(a.send(&[1; 60]));
    a.sender.reclaim(&a.sections).unwrap();
    a.sender.publish(&a.sections);
    assert_eq!(b.receive(1).unwrap().len(), 1);
    assert!(!b.receiver.release(&b.sections, 1), "and heard once");
}

/// A sender that never wishes, as Zephyr's, is rung once for each turn of the index, not once for each frame.
#[test]
fn a_wish_that_stays_at_zero_costs_one_ring_in_65536() {
    let (_, mut a, mut b) = link(0x4000);
    let mut rings = 0;
    for _ in 0..200_000u32 {
        assert!(a.send(&[1; 60]));
        a.sender.publish(&a.sections);
        assert_eq!(b.receiver.receive(&b.sections, 1, |_| ()), Ok(1));
        rings += u32::from(b.receiver.release(&b.sections, 1));
        assert_eq!(a.sender.reclaim(&a.sections), Ok(1));
    }
    assert_eq!(rings, 4);
}

// --- places ---

#[test]
fn a_full_section_refuses_and_takes_again() {
    let (geometry, mut a, mut b) = link(0x4000);
    let data = geometry.data_bytes();
    assert!(a.sender.push(&a.sections, 0).is_none(), "a frame has a byte");
    assert!(a.sender.push(&a.sections, data as usize - 17).is_none(), "a frame that never fits");
    // By bytes: 2048 - 64 < 2000 + 18.
    let most = (data / 2048) as usize;
    for i in 0..most {
        assert!(a.send(&[3; 2000]), "{i} of {most}");
    }
    assert!(!a.send(&[3; 2000]) && !a.sender.has_room(2000));
    a.sender.publish(&a.sections);
    assert_eq!(b.receive(1).unwrap().len(), 1);
    b.receiver.release(&b.sections, 1);
    assert!(!a.send(&[3; 2000]), "not before it is reclaimed");
    assert_eq!(a.sender.reclaim(&a.sections), Ok(1));
    assert!(a.send(&[4; 2000]));
    assert!(!a.send(&[4; 2000]));

    // By descriptors: 64-byte places for frames up to 46 bytes.
    let (geometry, mut a, _) = link(0x4000);
    assert_eq!((geometry.num(), a.sender.depth()), (64, 64));
    for _ in 0..64 {
        assert!(a.send(&[3; 46]));
    }
    assert!(!a.send(&[3; 46]));
    // By our own depth, where the ring has more.
    let mut shallow = Sender::<8>::new(&Geometry::new(0x4000).unwrap());
    for _ in 0..8 {
        assert!(shallow.push(&a.sections, 46).is_some());
    }
    assert!(shallow.push(&a.sections, 46).is_none());
}

#[test]
fn a_frame_that_was_pushed_by_mistake_leaves_no_trace() {
    let (_, mut a, mut b) = link(0x4000);
    let mut fill = 46;
    for round in 0..500usize {
        fill = 46 + (fill * 7 + round) % 1900;
        let before = (a.sender.outstanding(), a.sender.taken_bytes());
        if a.sender.push(&a.sections, fill).is_some() {
            assert!(a.sender.unpush());
            assert_eq!((a.sender.outstanding(), a.sender.taken_bytes()), before);
        }
        assert!(!a.sender.unpush(), "nothing unpublished is left");
        let frame = vec![round as u8; fill];
        if a.send(&frame) {
            a.sender.publish(&a.sections);
            assert_eq!(b.receive(1).unwrap(), [frame]);
            b.receiver.release(&b.sections, 1);
            assert_eq!(a.sender.reclaim(&a.sections), Ok(1));
        }
    }
}

#[test]
fn frames_given_back_come_again() {
    let (_, mut a, mut b) = link(0x4000);
    for i in 0..4 {
        assert!(a.send(&[i; 60]));
    }
    a.sender.publish(&a.sections);
    assert_eq!(b.receive(4).unwrap().len(), 4);
    b.receiver.unreceive(3);
    assert_eq!((b.receiver.held(), b.receiver.waiting()), (1, 3));
    assert_eq!(b.receive(2).unwrap(), [vec![1; 60], vec![2; 60]]);
    b.receiver.unreceive(100);
    assert_eq!(b.receive(9).unwrap(), [[0; 60], [1; 60], [2; 60], [3; 60]]);
}

// --- hostile peers ---

/// What `b` makes of one good frame of `a`'s after `spoil` wrote into `a`'s section.
fn received(spoil: impl FnOnce(&Geometry, ForeignMut<'_>)) -> Result<usize, NetError> {
    let (geometry, mut a, mut b) = link(0x4000);
    assert!(a.send(&[7; 60]));
    a.sender.publish(&a.sections);
    spoil(&geometry, a.own);
    b.receive(256).map(|frames| frames.len())
}

#[test]
fn every_word_of_a_frame_is_checked() {
    use NetError as E;
    let geometry = Geometry::new(0x4000).unwrap();
    let (num, from, to) = (geometry.num(), geometry.header_bytes(), geometry.section_bytes());
    let avail = geometry.available_offset() as usize;
    assert_eq!(received(|_, _| ()), Ok(1));
    // The available index.
    for got in [0u16, 1, 64, 65, 66, 1000, 0x7fff, 0x8000, 0xffff] {
        let result = received(|_, own| own.store_u16(avail + 2, got, Ordering::Relaxed).unwrap());
        match got {
            0 | 1 => assert_eq!(result, Ok(usize::from(got))),
            // Entries that were not written are zeros: the same frame again, which is the peer's own affair.
            64 => assert_eq!(result, Ok(64)),
            _ => assert_eq!(result, Err(E::AvailableJump { next: 0, got, num })),
        }
    }
    // Its flags mean nothing here.
    assert_eq!(received(|_, own| own.store_u16(avail, 0xffff, Ordering::Relaxed).unwrap()), Ok(1));
    // The entry.
    for got in [num, num + 1, 0xffff] {
        let result = received(|_, own| own.store_u16(avail + 4, got, Ordering::Relaxed).unwrap());
        assert_eq!(result, Err(E::AvailableEntry { index: 0, got, num }));
    }
    // The descriptor's offset: before the data, at its edges, beyond, and so that a sum would overflow.
    for address in [0, 1, u64::from(from) - 1, u64::from(to) - 59, u64::from(to), 1 << 32, 1 << 63, u64::MAX] {
        let result = received(|_, own| own.store_u64(0, address, Ordering::Relaxed).unwrap());
        assert_eq!(result, Err(E::DescriptorRange { id: 0, address, len: 60, from, to }), "{address:#x}");
    }
    assert_eq!(received(|_, own| own.store_u64(0, u64::from(to) - 60, Ordering::Relaxed).unwrap()), Ok(1));
    // Its length.
    for len in [to - from + 1, to, 1 << 31, u32::MAX] {
        let result = received(|_, own| own.store_u32(8, len, Ordering::Relaxed).unwrap());
        assert_eq!(result, Err(E::DescriptorRange { id: 0, address: u64::from(from), len, from, to }), "{len:#x}");
    }
    for len in [0, to - from] {
        assert_eq!(received(|_, own| own.store_u32(8, len, Ordering::Relaxed).unwrap()), Ok(1), "{len:#x}");
    }
    // Its flags: chains, device-written buffers and indirect tables are no frames.
    for got in [1, 2, 4, 0x8000, 0xffff] {
        let result = received(|_, own| own.store_u16(12, got, Ordering::Relaxed).unwrap());
        assert_eq!(result, Err(E::DescriptorFlags { id: 0, got }));
    }
    // Its link is not looked at.
    assert_eq!(received(|_, own| own.store_u16(14, 0xffff, Ordering::Relaxed).unwrap()), Ok(1));
}

#[test]
fn an_available_index_that_runs_backwards_is_refused() {
    let (geometry, mut a, mut b) = link(0x4000);
    for _ in 0..10 {
        assert!(a.send(&[7; 60]));
    }
    a.sender.publish(&a.sections);
    assert_eq!(b.receive(8).unwrap().len(), 8);
    let index = geometry.available_offset() as usize + 2;
    a.own.store_u16(index, 7, Ordering::Relaxed).unwrap();
    assert_eq!(b.receiver.arm(&b.sections), Err(NetError::AvailableJump { next: 8, got: 7, num: 64 }));
    // Further than the ring is long behind what was not released.
    a.own.store_u16(index, 65, Ordering::Relaxed).unwrap();
    assert_eq!(b.receiver.arm(&b.sections), Err(NetError::AvailableJump { next: 8, got: 65, num: 64 }));
    a.own.store_u16(index, 64, Ordering::Relaxed).unwrap();
    assert_eq!(b.receiver.arm(&b.sections), Ok(true));
}

/// What `a` makes of the return of its three frames after `spoil` wrote into `b`'s section.
fn returned(spoil: impl FnOnce(usize, ForeignMut<'_>)) -> Result<usize, NetError> {
    let (geometry, mut a, mut b) = link(0x4000);
    for _ in 0..3 {
        assert!(a.send(&[7; 60]));
    }
    a.sender.publish(&a.sections);
    b.receive(3).unwrap();
    b.receiver.release(&b.sections, 3);
    spoil(geometry.used_offset() as usize, b.own);
    a.sender.reclaim(&a.sections)
}

#[test]
fn every_word_of_a_return_is_checked() {
    use NetError as E;
    assert_eq!(returned(|_, _| ()), Ok(3));
    // The used index.
    for got in [0u16, 1, 2, 3, 4, 64, 0x8000, 0xffff] {
        let result = returned(|used, own| own.store_u16(used + 2, got, Ordering::Relaxed).unwrap());
        match got {
            0..=3 => assert_eq!(result, Ok(usize::from(got))),
            _ => assert_eq!(result, Err(E::UsedJump { next: 0, got, outstanding: 3 })),
        }
    }
    assert_eq!(returned(|used, own| own.store_u16(used, 0xffff, Ordering::Relaxed).unwrap()), Ok(3), "flags");
    // An identifier: another frame's that is out, one that is not, none at all.
    for got in [1, 2, 3, 64, 0x10000, u32::MAX] {
        let result = returned(|used, own| own.store_u32(used + 4, got, Ordering::Relaxed).unwrap());
        assert_eq!(result, Err(E::UsedId { index: 0, expected: 0, got }));
    }
    // Out of order: the second before the first; what came before the wrong one is taken back.
    let swapped = returned(|used, own| {
        own.store_u32(used + 4 + 8, 2, Ordering::Relaxed).unwrap();
        own.store_u32(used + 4 + 16, 1, Ordering::Relaxed).unwrap();
    });
    assert_eq!(swapped, Err(E::UsedId { index: 1, expected: 1, got: 2 }));
    // Twice the same.
    let twice = returned(|used, own| own.store_u32(used + 4 + 8, 0, Ordering::Relaxed).unwrap());
    assert_eq!(twice, Err(E::UsedId { index: 1, expected: 1, got: 0 }));
    for got in [0, 2, 60, u32::MAX] {
        let result = returned(|used, own| own.store_u32(used + 8, got, Ordering::Relaxed).unwrap());
        assert_eq!(result, Err(E::UsedLen { index: 0, got }));
    }
}

#[test]
fn event_words_of_any_value_only_ring_or_do_not() {
    for value in (0..=u16::MAX).step_by(251).chain([1, 2, 3, u16::MAX]) {
        let (geometry, mut a, mut b) = link(0x4000);
        b.own.store_u16(geometry.avail_event_offset() as usize, value, Ordering::Relaxed).unwrap();
        assert!(a.send(&[7; 60]) && a.send(&[8; 60]));
        assert_eq!(a.sender.publish(&a.sections), value < 2);
        assert_eq!(b.receive(8).unwrap().len(), 2);
        a.own.store_u16(geometry.used_event_offset() as usize, value, Ordering::Relaxed).unwrap();
        assert_eq!(b.receiver.release(&b.sections, 2), value < 2);
        assert_eq!(a.sender.reclaim(&a.sections), Ok(2));
    }
}

/// With v1 devices the peer can write our own section too: what we sent and remember does not change.
#[test]
fn a_peer_that_writes_our_section_changes_nothing_of_ours() {
    let (geometry, mut a, mut b) = link(0x4000);
    for round in 0..200u32 {
        assert!(a.send(&[round as u8; 100]));
        a.sender.publish(&a.sections);
        // The descriptor, the entry, the event: all of the rings except the index that b needs.
        let garbage = [round as u8 | 0x80; 64];
        assert_eq!(b.receive(1).unwrap().len(), 1);
        a.own.take(geometry.available_offset() as usize).write_from(&garbage);
        a.own.store_u16(geometry.used_event_offset() as usize, round as u16 * 77, Ordering::Relaxed).unwrap();
        b.receiver.release(&b.sections, 1);
        b.own.take(64).write_from(&garbage);
        assert_eq!(a.sender.reclaim(&a.sections), Ok(1));
        assert_eq!((a.sender.outstanding(), a.sender.taken_bytes()), (0, 0));
    }
}

// --- against a dull model ---

#[derive(Clone, Debug)]
enum Op {
    Send(u16),
    Publish,
    Receive { max: usize, back: usize },
    Release(usize),
    Reclaim,
    Arm,
    Unpush,
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => prop_oneof![1u16..100, 1u16..1600, 1u16..6000].prop_map(Op::Send),
        4 => Just(Op::Publish),
        5 => (0usize..40, 0usize..4).prop_map(|(max, back)| Op::Receive { max, back }),
        5 => (0usize..40).prop_map(Op::Release),
        4 => Just(Op::Reclaim),
        2 => Just(Op::Arm),
        1 => Just(Op::Unpush),
        1 => Just(Op::Restart),
    ]
}

/// One direction as the model knows it.
#[derive(Default)]
struct Model {
    pushed: VecDeque<Vec<u8>>,
    published: VecDeque<Vec<u8>>,
    held: VecDeque<Vec<u8>>,
    returned: usize,
}

impl Model {
    fn out(&self) -> usize {
        self.pushed.len() + self.published.len() + self.held.len() + self.returned
    }
}

fn run_model(ops: Vec<(Op, bool)>, pages: usize) {
    let (geometry, a, b) = link(pages * 4096);
    let mut ends = [a, b];
    // Index i: frames from end i.
    let mut models = [Model::default(), Model::default()];
    let mut stamp = 0u32;
    for (op, second) in ops {
        let (me, other) = (usize::from(second), usize::from(!second));
        match op {
            Op::Send(len) => {
                stamp += 1;
                let bytes: Vec<u8> = (0..u32::from(len)).map(|i| (i.wrapping_mul(stamp) >> 3) as u8).collect();
                let sent = ends[me].send(&bytes);
                // Where the model cannot say without doing the same sums: a small frame in a section that is half empty fits.
                let half = ends[me].sender.taken_bytes() <= geometry.data_bytes() / 2;
                let few = models[me].out() < ends[me].sender.depth();
                assert!(sent || !(half && few && u32::from(len) < geometry.data_bytes() / 8));
                assert!(!sent || few);
                if sent {
                    models[me].pushed.push_back(bytes);
                }
            }
            Op::Publish => {
                ends[me].sender.publish(&ends[me].sections);
                let mut pushed = std::mem::take(&mut models[me].pushed);
                models[me].published.append(&mut pushed);
            }
            Op::Receive { max, back } => {
                let got = ends[me].receive(max).unwrap();
                let model = &mut models[other];
                assert_eq!(got.len(), max.min(model.published.len()));
                for bytes in got {
                    let want = model.published.pop_front().unwrap();
                    assert!(bytes == want, "{} bytes differ", bytes.len());
                    model.held.push_back(want);
                }
                let back = back.min(model.held.len());
                ends[me].receiver.unreceive(back);
                for _ in 0..back {
                    let frame = model.held.pop_back().unwrap();
                    model.published.push_front(frame);
                }
            }
            Op::Release(count) => {
                ends[me].receiver.release(&ends[me].sections, count);
                let model = &mut models[other];
                let count = count.min(model.held.len());
                model.held.drain(..count);
                model.returned += count;
            }
            Op::Reclaim => {
                let end = &mut ends[me];
                assert_eq!(end.sender.reclaim(&end.sections), Ok(std::mem::take(&mut models[me].returned)));
            }
            Op::Arm => {
                let end = &mut ends[me];
                assert_eq!(end.receiver.arm(&end.sections), Ok(!models[other].published.is_empty()));
                assert_eq!(end.sender.arm(&end.sections), Ok(models[me].returned != 0));
                models[me].returned = 0;
            }
            Op::Unpush => assert_eq!(ends[me].sender.unpush(), models[me].pushed.pop_back().is_some()),
            Op::Restart => {
                for end in &mut ends {
                    initialise(&geometry, end.own);
                    end.sender.restart();
                    end.receiver.restart();
                }
                models = [Model::default(), Model::default()];
            }
        }
        for (i, model) in models.iter().enumerate() {
            assert_eq!(ends[i].sender.outstanding(), model.out());
            assert_eq!(ends[1 - i].receiver.held(), model.held.len());
            assert!(ends[i].sender.taken_bytes() <= geometry.data_bytes());
            assert!(model.out() != 0 || ends[i].sender.taken_bytes() == 0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_ends_agree_with_a_dull_model(ops in prop::collection::vec((op(), any::<bool>()), 1..400), pages in 1usize..9) {
        run_model(ops, pages);
    }

    /// Any bytes at all in the peer's section, mostly near-valid: no panic, no view outside, work bounded.
    #[test]
    fn garbage_is_survived(
        seed in prop::collection::vec(any::<u8>(), 4096),
        descriptors in prop::collection::vec(
            (prop_oneof![0u64..0x4000, 0x700u64..0x900, any::<u64>()], prop_oneof![0u32..100, any::<u32>()],
             prop_oneof![4 => Just(0u16), 1 => any::<u16>()]), 64),
        entries in prop::collection::vec(prop_oneof![8 => 0u16..64, 1 => any::<u16>()], 64),
        indices in [prop_oneof![0u16..70, any::<u16>()], prop_oneof![0u16..4, any::<u16>()]],
        state in any::<u32>(),
    ) {
        let (geometry, a, mut b) = link(0x4000);
        for _ in 0..3 {
            assert!(b.send(&[9; 60]));
        }
        b.sender.publish(&b.sections);
        a.own.write_from(&seed);
        for (id, (address, len, flags)) in descriptors.into_iter().enumerate() {
            a.own.store_u64(16 * id, address, Ordering::Relaxed).unwrap();
            a.own.store_u32(16 * id + 8, len, Ordering::Relaxed).unwrap();
            a.own.store_u16(16 * id + 12, flags, Ordering::Relaxed).unwrap();
        }
        let avail = geometry.available_offset() as usize;
        for (slot, entry) in entries.into_iter().enumerate() {
            a.own.store_u16(avail + 4 + 2 * slot, entry, Ordering::Relaxed).unwrap();
        }
        a.own.store_u16(avail + 2, indices[0], Ordering::Relaxed).unwrap();
        a.own.store_u16(geometry.used_offset() as usize + 2, indices[1], Ordering::Relaxed).unwrap();
        let section = a.own.as_mut_ptr() as usize;
        let data = section + geometry.header_bytes() as usize..section + geometry.section_bytes() as usize;
        for _ in 0..3 {
            let mut views = 0;
            let got = b.receiver.receive(&b.sections, 256, |view| {
                views += 1;
                let start = view.as_ptr() as usize;
                assert!(data.contains(&start) && start + view.len() <= data.end);
            });
            assert!(views <= 64);
            b.receiver.release(&b.sections, got.unwrap_or(0));
            let _ = b.receiver.arm(&b.sections);
            let _ = b.sender.arm(&b.sections);
            assert!(b.sender.outstanding() <= 3);
        }
        let mut machine = Machine::new();
        for word in [state, 0, state, 1, state, 2, state, 3, state] {
            let _ = machine.step(word);
            assert!(!machine.is_up() || word == 3);
        }
    }
}
