//! Golden bytes, both ends against a simple model, and peers that write anything.

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::ivshmem::tests::section;

const SHAPE: Shape = Shape { slots: 4, record_bytes: 60, latest_bytes: 24 };
const BYTES: usize = 512 + 4 * 128 + 4 * 64;

struct End {
    own: ForeignMut<'static>,
    sections: Sections<'static>,
    channel: Channel,
}

fn link(shape: Shape) -> (End, End) {
    let bytes = shape.bytes() as usize;
    let (a, b) = (section(bytes), section(bytes));
    let end = |own: ForeignMut<'static>, peer: ForeignMut<'static>| {
        let sections = Sections::new(&shape, own, peer.as_foreign()).unwrap();
        initialise(&shape, &sections);
        End { own, sections, channel: Channel::new(&shape) }
    };
    (end(a, b), end(b, a))
}

impl End {
    fn send(&mut self, record: &[u8]) -> Result<Sent, ChannelError> {
        self.channel.send(&self.sections, record)
    }

    fn recv(&mut self) -> Result<Option<(u32, Vec<u8>)>, ChannelError> {
        let mut to = vec![0; self.channel.shape.record_bytes as usize];
        let record = self.channel.recv(&self.sections, &mut to)?;
        Ok(record.map(|record| (record.number, to[..record.len].to_vec())))
    }
}

#[test]
fn golden_bytes_of_a_section() {
    assert_eq!(SHAPE.bytes(), BYTES as u64);
    let (mut a, mut b) = link(SHAPE);
    assert_eq!(a.send(b"first"), Ok(Sent::Ring), "a fresh request of 0 asks for the first");
    assert_eq!(a.send(b"second"), Ok(Sent::Quiet));
    a.channel.set(&a.sections, b"value").unwrap();
    let bytes: [u8; BYTES] = a.own.as_foreign().read_array(0).unwrap();
    assert_eq!(bytes[..20], [b'T', b'M', b'C', b'H', 1, 0, 0, 0, 4, 0, 0, 0, 60, 0, 0, 0, 24, 0, 0, 0]);
    assert_eq!(bytes[128..130], [2, 0]);
    assert_eq!(bytes[256..260], [0; 4]);
    assert_eq!(bytes[384..388], [1, 0, 0, 0]);
    assert_eq!(bytes[512..525], *b"\x01\0\0\0\x05\0\0\0first");
    assert_eq!(bytes[525], 0xa5, "behind a record nothing is written");
    assert_eq!(bytes[640..654], *b"\x02\0\0\0\x06\0\0\0second");
    assert_eq!(bytes[1024 + 64..1024 + 64 + 13], *b"\x01\0\0\0\x05\0\0\0value");
    assert_eq!(b.recv(), Ok(Some((1, b"first".to_vec()))));
    assert_eq!(b.channel.arm(&b.sections), Ok(true), "the second look finds the second");
    let bytes: [u8; 4] = b.own.as_foreign().read_array(256).unwrap();
    assert_eq!(bytes, [1, 0, 1, 0]);
}

#[test]
fn shapes_and_sections_without_sense_are_refused() {
    for slots in [0, 3, MAX_SLOTS * 2, u32::MAX] {
        let shape = Shape { slots, ..SHAPE };
        assert_eq!(shape.check(), Err(ChannelError::Shape(shape)));
    }
    assert!(Shape { record_bytes: MAX_RECORD_BYTES + 1, ..SHAPE }.check().is_err());
    assert!(Shape { latest_bytes: u32::MAX, ..SHAPE }.check().is_err());
    let (good, short) = (section(BYTES), section(BYTES - 64));
    assert!(Sections::new(&SHAPE, good, short.as_foreign()).is_err());
    assert!(Sections::new(&SHAPE, short, good.as_foreign()).is_err());
    let odd = section(BYTES + 8).skip(8);
    assert!(Sections::new(&SHAPE, odd, good.as_foreign()).is_err());
    let largest = Shape::largest(0x7f000, 248, 0).unwrap();
    assert_eq!((largest.slots, largest.bytes() <= 0x7f000), (1024, true));
    assert_eq!(Shape::largest(512, 1, 0), None);
    assert_eq!(Shape::largest(1 << 20, u32::MAX, 0), None);
}

#[test]
fn a_peer_of_another_shape_is_refused_by_name() {
    let (a, b) = link(SHAPE);
    assert_eq!(a.channel.check_peer(&a.sections), Ok(()));
    b.own.write_array(8, [8]).unwrap();
    let got = Shape { slots: 8, ..SHAPE };
    assert_eq!(a.channel.check_peer(&a.sections), Err(ChannelError::PeerShape { expected: SHAPE, got }));
    for at in 0..8 {
        let (a, b) = link(SHAPE);
        b.own.write_array(at, [0xff]).unwrap();
        assert!(matches!(a.channel.check_peer(&a.sections), Err(ChannelError::Header { .. })), "{at}");
    }
}

#[test]
fn a_full_queue_refuses_and_takes_again() {
    let (mut a, mut b) = link(SHAPE);
    for i in 0..100_000u32 {
        while a.channel.outstanding() < 4 {
            assert_ne!(a.send(&i.to_le_bytes()), Ok(Sent::Full));
        }
        assert_eq!(a.send(&[]), Ok(Sent::Full));
        assert!(b.recv().unwrap().is_some());
        assert_ne!(a.send(&[]), Ok(Sent::Full));
    }
    assert_eq!(a.send(&[0; 61]), Err(ChannelError::Length { got: 61, room: 60 }));
}

#[test]
fn a_buffer_too_short_leaves_the_record() {
    let (mut a, mut b) = link(SHAPE);
    a.send(b"record").unwrap();
    let mut short = [0; 5];
    assert_eq!(b.channel.recv(&b.sections, &mut short), Err(ChannelError::Length { got: 6, room: 5 }));
    assert_eq!(b.recv(), Ok(Some((1, b"record".to_vec()))));
    a.channel.set(&a.sections, b"value").unwrap();
    assert!(b.channel.get(&b.sections, &mut short[..4]).is_err());
    assert_eq!(b.channel.get(&b.sections, &mut short), Ok(Some(Record { number: 1, len: 5 })));
}

/// Each word that the peer writes, with any value.
#[test]
fn whatever_a_peer_writes_is_refused_by_name_or_harmless() {
    for value in [0u16, 1, 2, 3, 4, 5, 6, 7, 100, 0x7fff, 0x8000, 0xfffe, 0xffff] {
        // Head: two were written.
        let (mut a, mut b) = link(SHAPE);
        a.send(b"1").unwrap();
        a.send(b"2").unwrap();
        a.own.store_u16(HEAD, value, Ordering::Relaxed).unwrap();
        let mut got = 0;
        let end = loop {
            match b.recv() {
                Ok(Some(_)) => got += 1,
                other => break other,
            }
            assert!(got <= 4);
        };
        match value {
            0..=2 => assert_eq!((got, end), (value, Ok(None))),
            // What was not written carries no number.
            3 | 4 => assert_eq!((got, end), (2, Err(ChannelError::Number { expected: 3, got: 0 }))),
            _ => assert_eq!((got, end), (0, Err(ChannelError::HeadJump { next: 0, got: value }))),
        }
        // Tail: four are out.
        let (mut a, b) = link(SHAPE);
        for _ in 0..4 {
            a.send(b"x").unwrap();
        }
        b.own.store_u16(TAIL, value, Ordering::Relaxed).unwrap();
        let want = match value {
            0 => Ok(Sent::Full),
            1..=4 => Ok(Sent::Quiet),
            _ => Err(ChannelError::TailJump { outstanding: 4, got: value }),
        };
        assert_eq!(a.send(b"y"), want);
        // Wake: any request is answered by ringing or not.
        let (mut a, b) = link(SHAPE);
        b.own.store_u16(WAKE, value, Ordering::Relaxed).unwrap();
        assert_eq!(a.send(b"z"), Ok(if value == 0 { Sent::Ring } else { Sent::Quiet }));
    }
    for value in [0u32, 2, 61, 1 << 20, u32::MAX] {
        let (mut a, mut b) = link(SHAPE);
        a.send(b"1").unwrap();
        a.own.store_u32(512, value, Ordering::Relaxed).unwrap();
        assert_eq!(b.recv(), Err(ChannelError::Number { expected: 1, got: value }));
        a.own.store_u32(512, 1, Ordering::Relaxed).unwrap();
        a.own.store_u32(516, value, Ordering::Relaxed).unwrap();
        match value {
            0 | 2 => assert_eq!(b.recv().unwrap().unwrap().1.len(), value as usize),
            _ => assert_eq!(b.recv(), Err(ChannelError::RecordLength { got: value, most: 60 })),
        }
        // The register's number and length.
        let (mut a, b) = link(SHAPE);
        let mut to = [0; 24];
        a.channel.set(&a.sections, b"value").unwrap();
        a.own.store_u32(LATEST, value, Ordering::Relaxed).unwrap();
        assert_eq!(b.channel.get(&b.sections, &mut to), Ok(None));
        a.own.store_u32(LATEST, 1, Ordering::Relaxed).unwrap();
        a.own.store_u32(SHAPE.copy(1) + 4, value, Ordering::Relaxed).unwrap();
        assert_eq!(b.channel.get(&b.sections, &mut to).is_ok(), value <= 24);
    }
}

#[test]
fn the_register_gives_the_latest_value() {
    let (mut a, b) = link(SHAPE);
    let mut to = [0; 24];
    assert_eq!(b.channel.get(&b.sections, &mut to), Ok(None));
    for i in 1..1000u32 {
        a.channel.set(&a.sections, &i.to_le_bytes()).unwrap();
        assert_eq!(b.channel.get(&b.sections, &mut to), Ok(Some(Record { number: i, len: 4 })));
        assert_eq!(to[..4], i.to_le_bytes());
    }
    assert!(a.channel.set(&a.sections, &[0; 25]).is_err());
    a.channel.values = u32::MAX;
    a.channel.set(&a.sections, b"after the last number").unwrap();
    assert_eq!(b.channel.get(&b.sections, &mut to).unwrap().unwrap().number, 1);
    let (mut none, _) = link(Shape { latest_bytes: 0, ..SHAPE });
    assert!(none.channel.set(&none.sections, &[]).is_err());
    assert_eq!(none.channel.get(&none.sections, &mut to), Ok(None));
}

/// One writes as fast as it can, the other reads: no value is torn, and none goes backwards.
#[test]
fn the_register_is_never_torn() {
    let (mut a, b) = link(Shape { latest_bytes: 240, ..SHAPE });
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 1..100_000u32 {
                a.channel.set(&a.sections, &[i as u8; 240]).unwrap();
            }
            done.store(true, Ordering::Release);
        });
        let (mut last, mut to) = (0, [0; 240]);
        loop {
            let over = done.load(Ordering::Acquire);
            if let Some(record) = b.channel.get(&b.sections, &mut to).unwrap() {
                assert!(record.number >= last);
                assert!(to.iter().all(|byte| *byte == record.number as u8), "torn: {to:?}");
                last = record.number;
            }
            if over {
                break;
            }
        }
        assert_eq!(last, 99_999);
    });
}

#[derive(Clone, Debug)]
enum Op {
    Send(Vec<u8>),
    Recv,
    Set(Vec<u8>),
    Get,
    Arm,
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => prop::collection::vec(any::<u8>(), 0..60).prop_map(Op::Send),
        4 => Just(Op::Recv),
        1 => prop::collection::vec(any::<u8>(), 0..24).prop_map(Op::Set),
        1 => Just(Op::Get),
        1 => Just(Op::Arm),
        1 => Just(Op::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_ends_agree_with_a_dull_model(ops in prop::collection::vec((op(), any::<bool>()), 1..300), log in 0u32..4) {
        let slots = 1 << log;
        let (a, b) = link(Shape { slots, ..SHAPE });
        let mut ends = [a, b];
        let mut queues = [VecDeque::new(), VecDeque::new()];
        let mut numbers = [0u32; 2];
        let mut latest: [Option<Vec<u8>>; 2] = [None, None];
        for (op, second) in ops {
            let (me, other) = (usize::from(second), usize::from(!second));
            match op {
                Op::Send(bytes) => {
                    let sent = ends[me].send(&bytes).unwrap();
                    assert_eq!(sent == Sent::Full, queues[me].len() == slots as usize);
                    if sent != Sent::Full {
                        numbers[me] += 1;
                        queues[me].push_back((numbers[me], bytes));
                    }
                }
                Op::Recv => assert_eq!(ends[me].recv().unwrap(), queues[other].pop_front()),
                Op::Set(bytes) => {
                    ends[me].channel.set(&ends[me].sections, &bytes).unwrap();
                    latest[me] = Some(bytes);
                }
                Op::Get => {
                    let mut to = [0; 24];
                    let got = ends[me].channel.get(&ends[me].sections, &mut to).unwrap();
                    assert_eq!(got.map(|record| to[..record.len].to_vec()), latest[other]);
                }
                Op::Arm => {
                    let more = ends[me].channel.arm(&ends[me].sections).unwrap();
                    assert_eq!(more, !queues[other].is_empty());
                }
                Op::Restart => {
                    for end in &mut ends {
                        initialise(&end.channel.shape, &end.sections);
                        end.channel.restart();
                    }
                    (queues, numbers, latest) = ([VecDeque::new(), VecDeque::new()], [0; 2], [None, None]);
                }
            }
        }
    }
}
