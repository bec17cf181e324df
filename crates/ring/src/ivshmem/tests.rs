//! Both ends against each other, against a dull model, and against garbage.

use std::boxed::Box;
use std::vec;
use std::vec::Vec;

use super::net::{Geometry, NetError, Receiver, Sections, Sender, initialise};
use super::region::*;
use super::state::{Action, Cause, Machine, State};
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
