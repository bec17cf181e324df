//! Peers that write what they should not.

use core::sync::atomic::Ordering;

use proptest::prelude::*;

use super::super::net::{Geometry, NetError};
use super::super::state::Machine;
use super::link;
use crate::mem::ForeignMut;

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
            // Entries that were not written are zeros: the same frame again, which is the peer's
            // own affair.
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
    // The descriptor's offset: before the data, at its edges, beyond, and so that a sum would
    // overflow.
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
    // Out of order: the second before the first; what came before the wrong one is reclaimed.
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

/// With v1 devices the peer can write our own section too: what we sent and remember does not
/// change.
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any bytes at all in the peer's section, mostly near-valid: no panic, no view outside, work
    /// bounded.
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
