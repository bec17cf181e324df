//! Both sides against each other, against a simple model, and against garbage.

use std::boxed::Box;
use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

use core::sync::atomic::Ordering;

use proptest::prelude::*;

use super::notify::passes;
use super::split::*;
use super::*;

/// Where the guest's two regions are, and how long each is.
const LOW: u64 = 0x1_0000;
const HIGH: u64 = 0x8000_0000;
const REGION_BYTES: usize = 1 << 17;
/// The ring is at the start of the low region, tables and buffers behind it.
const LOW_BUFFERS: u64 = LOW + 0x4000;

type Table<'m> = RegionTable<ForeignMut<'m>, [Region<ForeignMut<'m>>; 2]>;

/// Memory for one test, given back to the system when the test's process ends.
fn region() -> ForeignMut<'static> {
    let bytes = Box::leak(vec![0xa5u8; REGION_BYTES + 128].into_boxed_slice());
    let skip = bytes.as_ptr().align_offset(128);
    ForeignMut::from(&mut bytes[skip..skip + REGION_BYTES])
}

fn memory() -> Table<'static> {
    RegionTable::new([Region::new(LOW, region()), Region::new(HIGH, region())]).unwrap()
}

fn config(size: u16, features: u64) -> QueueConfig {
    let layout = Layout::new(size);
    QueueConfig {
        size: u32::from(size),
        descriptors: LOW + layout.descriptors as u64,
        available: LOW + layout.available as u64,
        used: LOW + layout.used as u64,
        features,
        max_chain_bytes: 1 << 16,
        max_chain_segments: 128,
    }
}

fn pair(memory: &Table<'static>, size: u16, features: u64) -> (DriverQueue<'static, 64>, DeviceQueue) {
    let driver = DriverQueue::new(*memory.regions()[0].backing(), size, features).unwrap();
    (driver, DeviceQueue::new(&config(size, features)).unwrap())
}

fn readable(address: u64, len: u32) -> Segment {
    Segment { address, len, writable: false }
}

fn writable(address: u64, len: u32) -> Segment {
    Segment { address, len, writable: true }
}

/// Publishes one descriptor by hand at table index `index`, as the chain's head if `head`.
fn raw(memory: &Table<'_>, size: u16, index: u16, descriptor: Descriptor) {
    descriptor.write(memory.view(LOW, descriptors_bytes(size)).unwrap(), index).unwrap();
}

fn publish_head(memory: &Table<'_>, size: u16, head: u16) {
    let avail = memory.view(LOW + Layout::new(size).available as u64, available_bytes(size)).unwrap();
    let index = avail.as_foreign().load_u16(RING_INDEX, Ordering::Relaxed).unwrap();
    let entry = RING_ENTRIES + AVAIL_ENTRY_BYTES * usize::from(index % size);
    avail.store_u16(entry, head, Ordering::Relaxed).unwrap();
    avail.store_u16(RING_INDEX, index.wrapping_add(1), Ordering::Release).unwrap();
}

/// What a device with size 8 makes of hand-written descriptors with head 0.
fn refuse(features: u64, descriptors: &[(u16, Descriptor)], write: bool) -> Result<usize, RingError> {
    let memory = memory();
    let (_driver, mut device) = pair(&memory, 8, features);
    for (index, descriptor) in descriptors {
        raw(&memory, 8, *index, *descriptor);
    }
    publish_head(&memory, 8, 0);
    if write { device.take_writable(&memory, 8, |_, _| ()) } else { device.receive(&memory, 8, |_, _| ()) }
}

fn desc(address: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { address, len, flags, next }
}

#[test]
fn golden_layout_from_the_driver() {
    let memory = memory();
    let (mut driver, _) = pair(&memory, 8, features::EVENT_IDX);
    assert!(driver.add(&[readable(0x1122_3344_5566_7788, 0x0102_0304), writable(HIGH, 9)], 7));
    driver.publish();
    let bytes = memory.view(LOW, Layout::new(8).bytes as u32).unwrap().as_foreign();
    #[rustfmt::skip]
    assert_eq!(bytes.read_array::<32>(0).unwrap(), [
        0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0x04, 0x03, 0x02, 0x01, 0x01, 0x00, 0x01, 0x00,
        0x00, 0x00, 0x00, 0x80, 0x00, 0x00, 0x00, 0x00, 0x09, 0x00, 0x00, 0x00, 0x02, 0x00, 0x00, 0x00,
    ]);
    // flags, idx = 1, ring[0] = 0, ..., used_event
    assert_eq!(bytes.read_array::<22>(128).unwrap(), {
        let mut golden = [0; 22];
        golden[2] = 1;
        golden
    });
    assert_eq!(Layout::new(8), Layout { descriptors: 0, available: 128, used: 256, bytes: 256 + 70 });
}

#[test]
fn golden_layout_from_the_device() {
    let memory = memory();
    let (mut driver, mut device) = pair(&memory, 8, features::EVENT_IDX);
    driver.add(&[readable(LOW_BUFFERS, 1)], 0);
    driver.add(&[writable(HIGH, 0x300)], 0);
    driver.publish();
    assert_eq!(device.receive(&memory, 1, |_, _| ()), Ok(1));
    assert_eq!(device.take_writable(&memory, 1, |_, _| ()), Ok(1));
    assert_eq!(device.complete(&memory, [0, 0x203]), Ok(2));
    device.publish(&memory).unwrap();
    assert_eq!(device.arm(&memory), Ok(false));
    let used = memory.view(LOW + 256, used_bytes(8)).unwrap().as_foreign();
    #[rustfmt::skip]
    assert_eq!(used.read_array::<20>(0).unwrap(), [
        0x00, 0x00, 0x02, 0x00,
        0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00,
        0x01, 0x00, 0x00, 0x00, 0x03, 0x02, 0x00, 0x00,
    ]);
    // avail_event: wake us for the chain with index 2.
    assert_eq!(used.read_array::<2>(68).unwrap(), [2, 0]);
}

#[test]
fn regions_translate_inside_only() {
    let memory = memory();
    let end = LOW + REGION_BYTES as u64;
    for _ in 0..2 {
        // Twice: with the region found by search, and as the one that served last.
        assert!(memory.view(LOW, REGION_BYTES as u32).is_some());
        assert!(memory.view(end - 1, 1).is_some());
        assert!(memory.view(HIGH + 5, 100).is_some());
    }
    for (address, len) in [
        (LOW - 1, 1),
        (LOW - 1, 2),
        (end, 1),
        (end - 1, 2),
        (0, 1),
        (u64::MAX, 1),
        (u64::MAX, u32::MAX),
        (HIGH - 1, 2),
        (LOW, REGION_BYTES as u32 + 1),
        (HIGH + (1 << 40), 1),
    ] {
        assert!(memory.view(address, len).is_none(), "{address:#x} {len}");
    }
}

#[test]
fn region_tables_that_overlap_wrap_or_are_out_of_order_are_refused() {
    let table = |a: u64, b: u64| RegionTable::new([Region::new(a, region()), Region::new(b, region())]);
    assert!(table(0, REGION_BYTES as u64).is_ok());
    assert_eq!(table(0, 1).err(), Some(RingError::Regions { index: 1, start: 1 }));
    assert_eq!(table(HIGH, LOW).err(), Some(RingError::Regions { index: 1, start: LOW }));
    assert_eq!(table(0, u64::MAX).err(), Some(RingError::Regions { index: 1, start: u64::MAX }));
    let empty = RegionTable::new([Region::new(0, region().take(0))]).err();
    assert_eq!(empty, Some(RingError::Regions { index: 0, start: 0 }));
}

#[test]
fn queues_of_impossible_shape_are_refused() {
    for size in [0, 3, 6, 65536, 1 << 20] {
        let error = DeviceQueue::new(&QueueConfig { size, ..config(8, 0) }).err();
        assert_eq!(error, Some(RingError::QueueSize { got: size }));
    }
    assert!(DeviceQueue::new(&QueueConfig { size: 32768, ..config(8, 0) }).is_ok());
    for (change, part) in [(8u64, Part::Descriptors), (1, Part::Available), (2, Part::Used)] {
        let mut bad = config(8, 0);
        match part {
            Part::Descriptors => bad.descriptors += change,
            Part::Available => bad.available += change,
            Part::Used => bad.used += change,
        }
        assert!(matches!(DeviceQueue::new(&bad), Err(RingError::Misaligned { part: p, .. }) if p == part), "{part}");
    }
}

#[test]
fn rings_outside_the_memory_are_refused_at_use() {
    let memory = memory();
    for (part, at) in [(Part::Descriptors, 0), (Part::Available, 1), (Part::Used, 2)] {
        for address in [0, LOW + REGION_BYTES as u64 - 16, u64::MAX - 15] {
            let mut bad = config(8, 0);
            *[&mut bad.descriptors, &mut bad.available, &mut bad.used][at] = address;
            let mut device = DeviceQueue::new(&bad).unwrap();
            let error = device.receive(&memory, 1, |_, _| ()).err();
            assert!(matches!(error, Some(RingError::RingUnmapped { part: p, .. }) if p == part), "{part} {address:#x}");
        }
    }
}

/// Features, descriptors by index, whether the device writes, and what it says.
type HostileCase<'a> = (u64, &'a [(u16, Descriptor)], bool, RingError);

#[test]
fn hostile_chains_are_refused_by_name() {
    use RingError as E;
    let ok = desc(LOW_BUFFERS, 10, 0, 0);
    let table = LOW_BUFFERS + 0x100;
    assert_eq!(refuse(0, &[(0, ok)], false), Ok(1));
    let cases: &[HostileCase<'_>] = &[
        // A loop, on itself and over two.
        (0, &[(0, desc(LOW_BUFFERS, 1, DESC_NEXT, 0))], false, E::ChainLength { head: 0, limit: 8 }),
        (
            0,
            &[(0, desc(LOW_BUFFERS, 1, DESC_NEXT, 1)), (1, desc(LOW_BUFFERS, 1, DESC_NEXT, 0))],
            false,
            E::ChainLength { head: 0, limit: 8 },
        ),
        (0, &[(0, desc(LOW_BUFFERS, 1, DESC_NEXT, 8))], false, E::DescriptorIndex { head: 0, got: 8, size: 8 }),
        (0, &[(0, desc(LOW_BUFFERS, 1, DESC_NEXT, 65535))], false, E::DescriptorIndex { head: 0, got: 65535, size: 8 }),
        (0, &[(0, desc(LOW_BUFFERS, 1, DESC_WRITE, 0))], false, E::UnexpectedWritable { head: 0, index: 0 }),
        (0, &[(0, ok)], true, E::UnexpectedReadable { head: 0, index: 0 }),
        (
            0,
            &[(0, desc(LOW_BUFFERS, 1, DESC_WRITE | DESC_NEXT, 3)), (3, ok)],
            true,
            E::UnexpectedReadable { head: 0, index: 3 },
        ),
        (
            0,
            &[(0, desc(LOW_BUFFERS, 1, DESC_NEXT, 3)), (3, desc(LOW_BUFFERS, 1, DESC_WRITE, 0))],
            false,
            E::UnexpectedWritable { head: 0, index: 3 },
        ),
        (0, &[(0, desc(LOW_BUFFERS, 0, 0, 0))], false, E::EmptyDescriptor { head: 0, index: 0 }),
        (0, &[(0, desc(0, 1, 0, 0))], false, E::BufferUnmapped { head: 0, address: 0, bytes: 1 }),
        (0, &[(0, desc(u64::MAX - 3, 8, 0, 0))], false, E::BufferUnmapped { head: 0, address: u64::MAX - 3, bytes: 8 }),
        (
            0,
            &[(0, desc(LOW_BUFFERS, u32::MAX, 0, 0))],
            false,
            E::ChainBytes { head: 0, got: u32::MAX as u64, limit: 1 << 16 },
        ),
        (
            0,
            &[(0, desc(LOW_BUFFERS, 1 << 16, DESC_NEXT, 1)), (1, ok)],
            false,
            E::ChainBytes { head: 0, got: (1 << 16) + 10, limit: 1 << 16 },
        ),
        (0, &[(0, desc(table, 16, DESC_INDIRECT, 0))], false, E::Indirect { head: 0, index: 0, flags: DESC_INDIRECT }),
        (
            features::INDIRECT_DESC,
            &[(0, desc(table, 16, DESC_INDIRECT | DESC_NEXT, 1))],
            false,
            E::Indirect { head: 0, index: 0, flags: DESC_INDIRECT | DESC_NEXT },
        ),
        (
            features::INDIRECT_DESC,
            &[(0, desc(table, 0, DESC_INDIRECT, 0))],
            false,
            E::IndirectLength { head: 0, bytes: 0 },
        ),
        (
            features::INDIRECT_DESC,
            &[(0, desc(table, 24, DESC_INDIRECT, 0))],
            false,
            E::IndirectLength { head: 0, bytes: 24 },
        ),
        (
            features::INDIRECT_DESC,
            &[(0, desc(table, 16 * 1025, DESC_INDIRECT, 0))],
            false,
            E::IndirectLength { head: 0, bytes: 16 * 1025 },
        ),
        (
            features::INDIRECT_DESC,
            &[(0, desc(0, 16, DESC_INDIRECT, 0))],
            false,
            E::BufferUnmapped { head: 0, address: 0, bytes: 16 },
        ),
    ];
    for (features, descriptors, write, want) in cases {
        assert_eq!(refuse(*features, descriptors, *write), Err(*want), "{want}");
    }
}

#[test]
fn hostile_indirect_tables_are_refused_aligned_and_not() {
    use RingError as E;
    for skew in [0u64, 1, 4] {
        let table = LOW_BUFFERS + 0x100 + skew;
        let run = |entries: &[Descriptor]| {
            let memory = memory();
            let (_driver, mut device) = pair(&memory, 8, features::INDIRECT_DESC);
            for (index, entry) in entries.iter().enumerate() {
                let rest = u64::from(entry.len) | u64::from(entry.flags) << 32 | u64::from(entry.next) << 48;
                let at = memory.view(table + 16 * index as u64, 16).unwrap();
                at.write_array(0, entry.address.to_le_bytes()).unwrap();
                at.write_array(8, rest.to_le_bytes()).unwrap();
            }
            raw(&memory, 8, 0, desc(table, 16 * entries.len() as u32, DESC_INDIRECT, 0));
            publish_head(&memory, 8, 0);
            let mut lens = Vec::new();
            device.receive(&memory, 8, |view, last| lens.push((view.len(), last))).map(|_| lens)
        };
        let ok = desc(LOW_BUFFERS, 10, 0, 0);
        let next = |n| desc(LOW_BUFFERS, 5, DESC_NEXT, n);
        assert_eq!(run(&[ok]), Ok(vec![(10, true)]));
        assert_eq!(run(&[next(2), ok, next(1)]), Ok(vec![(5, false), (5, false), (10, true)]));
        assert_eq!(run(&[next(0)]), Err(E::ChainLength { head: 0, limit: 1 }));
        assert_eq!(run(&[next(1), next(0)]), Err(E::ChainLength { head: 0, limit: 2 }));
        assert_eq!(run(&[next(2), ok]), Err(E::DescriptorIndex { head: 0, got: 2, size: 2 }));
        let nested = desc(LOW_BUFFERS, 16, DESC_INDIRECT, 0);
        assert_eq!(run(&[nested]), Err(E::Indirect { head: 0, index: 0, flags: DESC_INDIRECT }));
        let write = desc(LOW_BUFFERS, 16, DESC_WRITE, 0);
        assert_eq!(run(&[next(1), write]), Err(E::UnexpectedWritable { head: 0, index: 1 }));
        assert_eq!(run(&[desc(LOW_BUFFERS, 0, 0, 0)]), Err(E::EmptyDescriptor { head: 0, index: 0 }));
        assert_eq!(run(&[desc(9, 1, 0, 0)]), Err(E::BufferUnmapped { head: 0, address: 9, bytes: 1 }));
        let huge = desc(LOW_BUFFERS, 1 << 16, DESC_NEXT, 1);
        assert_eq!(run(&[huge, ok]), Err(E::ChainBytes { head: 0, got: (1 << 16) + 10, limit: 1 << 16 }));
    }
}

#[test]
fn segments_of_a_chain_are_bounded_in_the_table_and_outside() {
    for (entries, fits) in [(128u16, true), (129, false)] {
        let memory = memory();
        let mut driver = DriverQueue::<256>::new(*memory.regions()[0].backing(), 256, 0).unwrap();
        let mut device = DeviceQueue::new(&config(256, 0)).unwrap();
        let segments: Vec<Segment> = (0..entries).map(|i| readable(HIGH + u64::from(i), 1)).collect();
        assert!(driver.add(&segments, 0));
        driver.publish();
        assert_eq!(device.receive(&memory, 1, |_, _| ()).is_ok(), fits);

        for skew in [0u64, 1] {
            let (_driver, mut device) = pair(&memory, 8, features::INDIRECT_DESC);
            let table = LOW_BUFFERS + 0x1000 + skew;
            for index in 0..entries {
                let at = memory.view(table + 16 * u64::from(index), 16).unwrap();
                let next =
                    if index + 1 < entries { u64::from(DESC_NEXT) << 32 | u64::from(index + 1) << 48 } else { 0 };
                at.write_array(0, HIGH.to_le_bytes()).unwrap();
                at.write_array(8, (1 | next).to_le_bytes()).unwrap();
            }
            raw(&memory, 8, 0, desc(table, 16 * u32::from(entries), DESC_INDIRECT, 0));
            publish_head(&memory, 8, 0);
            let taken = device.receive(&memory, 1, |_, _| ());
            let want = if fits { Ok(1) } else { Err(RingError::ChainLength { head: 0, limit: 128 }) };
            assert_eq!(taken, want, "{skew}");
        }
    }
}

#[test]
fn heads_and_index_jumps_are_refused() {
    let memory = memory();
    let (_driver, mut device) = pair(&memory, 8, 0);
    publish_head(&memory, 8, 8);
    let error = device.receive(&memory, 8, |_, _| ()).err();
    assert_eq!(error, Some(RingError::DescriptorIndex { head: 8, got: 8, size: 8 }));

    let (mut driver, mut device) = pair(&memory, 8, 0);
    let avail = memory.view(LOW + Layout::new(8).available as u64, available_bytes(8)).unwrap();
    avail.store_u16(RING_INDEX, 9, Ordering::Relaxed).unwrap();
    let jump = RingError::AvailableJump { next: 0, got: 9, size: 8 };
    assert_eq!(device.receive(&memory, 8, |_, _| ()), Err(jump));
    assert_eq!(device.arm(&memory), Err(jump));
    assert_eq!(device.has_available(&memory), Err(jump));

    // Backwards, with a chain held.
    avail.store_u16(RING_INDEX, 0, Ordering::Relaxed).unwrap();
    assert!(driver.add(&[readable(LOW_BUFFERS, 1)], 0));
    driver.publish();
    assert_eq!(device.receive(&memory, 8, |_, _| ()), Ok(1));
    avail.store_u16(RING_INDEX, 0, Ordering::Relaxed).unwrap();
    let back = RingError::AvailableJump { next: 1, got: 0, size: 8 };
    assert_eq!(device.receive(&memory, 8, |_, _| ()), Err(back));
    // Ahead by as many as the queue has, counted from what is taken and not from what is returned.
    avail.store_u16(RING_INDEX, 9, Ordering::Relaxed).unwrap();
    assert!(device.receive(&memory, 8, |_, _| ()).is_err());
}

#[test]
fn held_chains_are_bounded_and_go_back() {
    let memory = memory();
    let size = 512;
    let low = *memory.regions()[0].backing();
    let mut driver = DriverQueue::<512>::new(low, size, 0).unwrap();
    let mut device = DeviceQueue::new(&config(size, 0)).unwrap();
    for token in 0..300 {
        assert!(driver.add(&[writable(HIGH + u64::from(token) * 64, 64)], token));
    }
    driver.publish();
    assert_eq!(device.take_writable(&memory, 1000, |_, _| ()), Ok(MAX_HELD));
    assert_eq!(device.take_writable(&memory, 1000, |_, _| ()), Ok(0));
    assert_eq!(device.has_available(&memory), Ok(true));
    device.put_back(MAX_HELD - 2);
    assert_eq!(device.held(), 2);
    assert_eq!(device.complete(&memory, [1, 2, 3, 4]), Ok(2));
    assert_eq!(driver.take_used(), Ok(None), "nothing shows before it is published");
    assert_eq!(device.publish(&memory), Ok(true));
    assert_eq!(device.publish(&memory), Ok(false));
    assert_eq!(driver.take_used(), Ok(Some(Used { token: 0, len: 1 })));
    assert_eq!(driver.take_used(), Ok(Some(Used { token: 1, len: 2 })));
    assert_eq!(driver.take_used(), Ok(None));
    let mut first = None;
    assert_eq!(device.take_writable(&memory, 1, |view, _| first = Some(view.as_mut_ptr())), Ok(1));
    assert_eq!(first, memory.view(HIGH + 128, 1).map(|view| view.as_mut_ptr()));
    device.put_back(77);
    assert_eq!(device.held(), 0);
    assert_eq!(device.next_avail(), 2);
}

#[test]
fn another_device_resumes_where_the_ring_says() {
    let memory = memory();
    let (mut driver, mut device) = pair(&memory, 8, 0);
    for token in 0..4 {
        assert!(driver.add(&[readable(HIGH + u64::from(token), 1)], token));
    }
    driver.publish();
    assert_eq!(device.receive(&memory, 3, |_, _| ()), Ok(3));
    device.release(&memory, 1).unwrap();
    // The device dies with two chains held; the next one takes them again.
    let mut device = DeviceQueue::new(&config(8, 0)).unwrap();
    assert_eq!(device.resume(&memory, 3), Ok(1));
    assert_eq!(device.receive(&memory, 8, |_, _| ()), Ok(3));
    device.release(&memory, 3).unwrap();
    for token in 0..4 {
        assert_eq!(driver.take_used(), Ok(Some(Used { token, len: 0 })));
    }
}

#[test]
fn a_ring_that_was_not_cleared_starts_at_the_base() {
    let memory = memory();
    let (_driver, mut device) = pair(&memory, 8, 0);
    let used = memory.view(LOW + Layout::new(8).used as u64, used_bytes(8)).unwrap();
    used.store_u16(RING_INDEX, 777, Ordering::Relaxed).unwrap();
    assert_eq!(device.resume(&memory, 0), Ok(0));
    assert_eq!(device.resume(&memory, 9), Err(RingError::AvailableJump { next: 9, got: 0, size: 8 }));
}

#[test]
fn signals_follow_the_drivers_request() {
    for features in [0, features::EVENT_IDX] {
        let memory = memory();
        let (mut driver, mut device) = pair(&memory, 8, features);
        let give = |driver: &mut DriverQueue<'static, 64>, device: &mut DeviceQueue| {
            assert!(driver.add(&[readable(HIGH, 1)], 0));
            driver.publish();
            assert_eq!(device.receive(&memory, 1, |_, _| ()), Ok(1));
            device.release(&memory, 1).unwrap();
            let signal = device.needs_signal(&memory).unwrap();
            assert_eq!(device.needs_signal(&memory), Ok(false), "asked once per batch");
            assert!(driver.take_used().unwrap().is_some());
            signal
        };
        assert_eq!(driver.arm(), Ok(false));
        assert!(give(&mut driver, &mut device), "armed ({features:#x})");
        driver.disarm();
        assert!(!give(&mut driver, &mut device), "not armed ({features:#x})");
        assert_eq!(driver.arm(), Ok(false));
        assert!(give(&mut driver, &mut device), "armed again ({features:#x})");
    }
}

#[test]
fn notifications_follow_the_devices_request() {
    for features in [0, features::EVENT_IDX] {
        let memory = memory();
        let (mut driver, mut device) = pair(&memory, 8, features);
        let add = |driver: &mut DriverQueue<'static, 64>| {
            assert!(driver.add(&[readable(HIGH, 1)], 0));
            driver.publish()
        };
        assert_eq!(device.arm(&memory), Ok(false));
        assert!(add(&mut driver), "armed ({features:#x})");
        assert_eq!(device.arm(&memory), Ok(true), "the second look finds it");
        device.disarm(&memory).unwrap();
        assert_eq!(device.receive(&memory, 8, |_, _| ()), Ok(1));
        // With event indices, arming has put the request behind the chain that was found already.
        let spurious = add(&mut driver);
        assert!(!spurious || features != 0);
        assert_eq!(device.receive(&memory, 8, |_, _| ()), Ok(1));
        assert!(!add(&mut driver), "not armed ({features:#x})");
    }
}

#[test]
fn drivers_refuse_what_a_device_makes_up() {
    use RingError as E;
    let fresh = || {
        let memory = memory();
        let (mut driver, _) = pair(&memory, 8, 0);
        assert!(driver.add(&[writable(HIGH, 10)], 0));
        driver.publish();
        let used = memory.regions()[0].backing().skip(Layout::new(8).used).take(used_bytes(8) as usize);
        (driver, used)
    };
    for (id, len, index, want) in [
        (0, 11, 1, E::UsedLength { head: 0, got: 11, limit: 10 }),
        (1, 0, 1, E::UsedId { got: 1, size: 8 }),
        (8, 0, 1, E::UsedId { got: 8, size: 8 }),
        (1 << 16, 0, 1, E::UsedId { got: 1 << 16, size: 8 }),
        (0, 0, 2, E::UsedJump { next: 0, got: 2, outstanding: 1 }),
        (0, 0, 65535, E::UsedJump { next: 0, got: 65535, outstanding: 1 }),
    ] {
        let (mut driver, used) = fresh();
        used.store_u32(4, id, Ordering::Relaxed).unwrap();
        used.store_u32(8, len, Ordering::Relaxed).unwrap();
        used.store_u16(RING_INDEX, index, Ordering::Release).unwrap();
        assert_eq!(driver.take_used(), Err(want));
    }
}

#[test]
fn event_index_arithmetic_wraps() {
    assert!(passes(5, 5, 6));
    assert!(!passes(5, 6, 7));
    assert!(passes(5, 0, 6));
    assert!(!passes(6, 0, 6));
    assert!(passes(65535, 65530, 0));
    assert!(passes(0, 65530, 1));
    assert!(!passes(1, 65530, 1));
}

// --- against a simple model ---

#[derive(Clone, Debug)]
enum Op {
    /// Add a chain with these lengths, in a table of its own or not.
    Add {
        lens: Vec<u16>,
        indirect: bool,
    },
    Publish,
    /// Take up to so many, give back so many of them.
    Take {
        max: usize,
        put_back: usize,
    },
    Release(usize),
    Collect(usize),
    Arm,
    Disarm,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (prop::collection::vec(1u16..300, 1..6), any::<bool>()).prop_map(|(lens, indirect)| Op::Add { lens, indirect }),
        2 => Just(Op::Publish),
        3 => (0usize..12, 0usize..4).prop_map(|(max, put_back)| Op::Take { max, put_back }),
        3 => (0usize..12).prop_map(Op::Release),
        2 => (0usize..12).prop_map(Op::Collect),
        1 => Just(Op::Arm),
        1 => Just(Op::Disarm),
    ]
}

/// A chain as the model knows it.
#[derive(Clone, Debug, PartialEq)]
struct Chain {
    token: u32,
    segments: Vec<(u64, u32)>,
}

struct Model {
    added: VecDeque<Chain>,
    published: VecDeque<Chain>,
    held: VecDeque<Chain>,
    /// Returned, with the length written.
    returned: VecDeque<(u32, u32)>,
}

fn run_model(ops: Vec<Op>, features: u64, write: bool, size: u16) {
    let memory = memory();
    let (mut driver, mut device) = pair(&memory, size, features);
    let mut model =
        Model { added: VecDeque::new(), published: VecDeque::new(), held: VecDeque::new(), returned: VecDeque::new() };
    let mut free = usize::from(size);
    let mut descriptors = std::collections::BTreeMap::new();
    let mut token = 0;
    // Buffers go round the high region, tables round the low one: many more than can be
    // outstanding.
    let mut buffer = 0u64;
    for op in ops {
        match op {
            Op::Add { lens, indirect } => {
                token += 1;
                let mut segments = Vec::new();
                for len in &lens {
                    segments.push((HIGH + buffer, u32::from(*len)));
                    buffer = (buffer + 512) % (REGION_BYTES as u64);
                }
                let indirect = indirect && features & features::INDIRECT_DESC != 0;
                let need = if indirect { 1 } else { lens.len() };
                let added = if indirect {
                    let table = LOW_BUFFERS + u64::from(token % 256) * 128;
                    for (i, (address, len)) in segments.iter().enumerate() {
                        let more = if i + 1 < segments.len() { DESC_NEXT } else { 0 };
                        let flags = more | if write { DESC_WRITE } else { 0 };
                        let view = memory.view(table, 128).unwrap();
                        desc(*address, *len, flags, i as u16 + 1).write(view, i as u16).unwrap();
                    }
                    let room = if write { segments.iter().map(|s| s.1).sum() } else { 0 };
                    driver.add_indirect(table, lens.len() as u16, room, token)
                } else {
                    let segments: Vec<Segment> =
                        segments.iter().map(|(a, l)| Segment { address: *a, len: *l, writable: write }).collect();
                    driver.add(&segments, token)
                };
                assert_eq!(added, need <= free);
                if added {
                    free -= need;
                    descriptors.insert(token, need);
                    model.added.push_back(Chain { token, segments });
                }
            }
            Op::Publish => {
                driver.publish();
                model.published.append(&mut model.added);
            }
            Op::Take { max, put_back } => {
                let mut chains = vec![Vec::new()];
                let mut sink = |ptr: *const u8, len: usize, last: bool| {
                    chains.last_mut().unwrap().push((ptr as usize, len));
                    if last {
                        chains.push(Vec::new());
                    }
                };
                let taken = if write {
                    device.take_writable(&memory, max, |v, last| sink(v.as_mut_ptr(), v.len(), last))
                } else {
                    device.receive(&memory, max, |v, last| sink(v.as_ptr(), v.len(), last))
                }
                .unwrap();
                assert_eq!(chains.pop(), Some(Vec::new()), "the last segment is marked");
                assert_eq!(chains.len(), taken);
                assert_eq!(taken, max.min(model.published.len()));
                for got in chains {
                    let chain = model.published.pop_front().unwrap();
                    let want: Vec<(usize, usize)> = chain
                        .segments
                        .iter()
                        .map(|(a, l)| (memory.view(*a, *l).unwrap().as_mut_ptr() as usize, *l as usize))
                        .collect();
                    assert_eq!(got, want);
                    model.held.push_back(chain);
                }
                device.put_back(put_back);
                for _ in 0..put_back.min(model.held.len()) {
                    model.published.push_front(model.held.pop_back().unwrap());
                }
            }
            Op::Release(count) => {
                let count = count.min(model.held.len());
                if write {
                    let lens: Vec<u32> = model.held.iter().take(count).map(|chain| chain.segments[0].1).collect();
                    assert_eq!(device.complete(&memory, lens), Ok(count));
                    assert_eq!(device.publish(&memory), Ok(count > 0));
                } else {
                    device.release(&memory, count).unwrap();
                }
                for chain in model.held.drain(..count) {
                    model.returned.push_back((chain.token, if write { chain.segments[0].1 } else { 0 }));
                }
                device.needs_signal(&memory).unwrap();
            }
            Op::Collect(count) => {
                for _ in 0..count {
                    let used = driver.take_used().unwrap();
                    let want = model.returned.pop_front();
                    assert_eq!(used.map(|used| (used.token, used.len)), want);
                    let Some(used) = used else { break };
                    free += descriptors.remove(&used.token).unwrap();
                }
            }
            Op::Arm => {
                assert_eq!(device.arm(&memory), Ok(!model.published.is_empty()));
                assert_eq!(driver.arm(), Ok(!model.returned.is_empty()));
            }
            Op::Disarm => {
                device.disarm(&memory).unwrap();
                driver.disarm();
            }
        }
        assert_eq!(device.held(), model.held.len());
        assert_eq!(driver.free(), free);
        let outstanding = model.added.len() + model.published.len() + model.held.len() + model.returned.len();
        assert_eq!(driver.outstanding(), outstanding);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_sides_agree_with_a_dull_model(
        ops in prop::collection::vec(op(), 1..200),
        event_idx in any::<bool>(),
        indirect in any::<bool>(),
        in_order in any::<bool>(),
        write in any::<bool>(),
        log_size in 0u32..6,
    ) {
        let features = if event_idx { features::EVENT_IDX } else { 0 }
            | if indirect { features::INDIRECT_DESC } else { 0 }
            | if in_order { features::IN_ORDER } else { 0 };
        run_model(ops, features, write, 1 << log_size);
    }

    /// Any bytes at all in the ring, mostly near-valid: no panic, no view outside, work bounded.
    #[test]
    fn garbage_is_survived(
        seed in prop::collection::vec(any::<u8>(), 512),
        descriptors in prop::collection::vec(
            (prop_oneof![Just(LOW), Just(LOW_BUFFERS), Just(HIGH), any::<u64>()], prop_oneof![0u32..64, any::<u32>()],
             0u16..8, 0u16..10), 8),
        index in prop_oneof![0u16..9, any::<u16>()],
        write in any::<bool>(),
        features in prop_oneof![Just(0), Just(features::INDIRECT_DESC), Just(features::IN_ORDER | features::EVENT_IDX)],
    ) {
        let memory = memory();
        memory.view(LOW, 512).unwrap().write_from(&seed);
        memory.view(LOW_BUFFERS, 512).unwrap().write_from(&seed);
        let table = memory.view(LOW, descriptors_bytes(8)).unwrap();
        for (i, (address, len, flags, next)) in descriptors.into_iter().enumerate() {
            desc(address, len, flags, next).write(table, i as u16).unwrap();
        }
        let avail = memory.view(LOW + Layout::new(8).available as u64, available_bytes(8)).unwrap();
        for (slot, random) in seed.iter().enumerate().take(8) {
            // Half of the heads valid.
            let head = u16::from(random % 16);
            avail.store_u16(RING_ENTRIES + 2 * slot, head, Ordering::Relaxed).unwrap();
        }
        avail.store_u16(RING_INDEX, index, Ordering::Relaxed).unwrap();
        let mut device = DeviceQueue::new(&config(8, features)).unwrap();
        let (low, high) = (memory.view(LOW, 1).unwrap(), memory.view(HIGH, 1).unwrap());
        let mut views = 0;
        let mut check = |ptr: *const u8, len: usize| {
            views += 1;
            let inside = |start: ForeignMut<'_>| {
                let offset = (ptr as usize).wrapping_sub(start.as_mut_ptr() as usize);
                offset <= REGION_BYTES && len <= REGION_BYTES - offset
            };
            assert!(inside(low) || inside(high));
        };
        for _ in 0..3 {
            let taken = if write {
                device.take_writable(&memory, 8, |v, _| check(v.as_mut_ptr(), v.len()))
            } else {
                device.receive(&memory, 8, |v, _| check(v.as_ptr(), v.len()))
            };
            let _ = device.release(&memory, taken.unwrap_or(0));
            let _ = device.needs_signal(&memory);
            let _ = device.arm(&memory);
        }
        assert!(views <= 3 * 8 * (8 + usize::from(MAX_INDIRECT_ENTRIES)));
    }
}
