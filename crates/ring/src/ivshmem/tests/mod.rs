//! Both ends of a link against each other, against a simple model, and against garbage; regions and
//! states.

mod hostile;
mod model;
mod region;
mod state;

use std::boxed::Box;
use std::vec;
use std::vec::Vec;

use core::sync::atomic::Ordering;

use super::net::{Geometry, NetError, Receiver, Sections, Sender, initialise};
use crate::mem::ForeignMut;

/// A section for one test, full of 0xa5, given back to the system when the test's process ends.
pub(super) fn section(bytes: usize) -> ForeignMut<'static> {
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

// --- requests ---

#[test]
fn rings_follow_the_peers_request_both_ways() {
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

/// Linux's sender writes its request after buffers returned, does not look again, and sends one
/// frame more: its return rings.
#[test]
fn a_request_that_comes_late_is_heard_with_the_next_return() {
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
    // The request for the second return, which is there already.
    a.own.store_u16(geometry.used_event_offset() as usize, 1, Ordering::Relaxed).unwrap();
    assert_eq!(b.receive(1).unwrap().len(), 1);
    assert!(b.receiver.release(&b.sections, 1), "late, but heard");
    assert!(a.send(&[1; 60]));
    a.sender.reclaim(&a.sections).unwrap();
    a.sender.publish(&a.sections);
    assert_eq!(b.receive(1).unwrap().len(), 1);
    assert!(!b.receiver.release(&b.sections, 1), "and heard once");
}

/// A sender that never writes a request, such as Zephyr's, is rung once for each turn of the index,
/// not once for each frame.
#[test]
fn a_request_that_stays_at_zero_costs_one_ring_in_65536() {
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
