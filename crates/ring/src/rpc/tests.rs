//! Golden bytes, impossible values field by field, the rings beside a simple model, and peers that
//! write what they like.

use super::entry::{Answer, Ask, BEST_EFFORT, Call, Entry, Head, Payload, Refusal, Status, Token};
use super::ring::{Consumer, Producer, is_there};
use super::*;
use proptest::prelude::*;
use std::boxed::Box;
use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

const GEOMETRY: Geometry = Geometry::new(4, 4096).unwrap();

/// Zeroed memory, aligned for lines. Tests end, so it is never given back.
fn region(bytes: usize) -> ForeignMut<'static> {
    let memory = Box::leak(vec![0u8; bytes + LINE_BYTES].into_boxed_slice());
    let skip = memory.as_ptr().align_offset(LINE_BYTES);
    ForeignMut::from(&mut memory[skip..skip + bytes])
}

/// The client's ends and the provider's of a new connection.
fn connection() -> (Ends<'static>, Ends<'static>) {
    let bytes = GEOMETRY.section_bytes() as usize;
    let (client, provider) = (region(bytes), region(bytes));
    let a = Ends::new(client, GEOMETRY, provider.as_foreign(), GEOMETRY).unwrap();
    let b = Ends::new(provider, GEOMETRY, client.as_foreign(), GEOMETRY).unwrap();
    a.initialise(Role::Client);
    b.initialise(Role::Provider);
    (a, b)
}

fn call(slot: u32, turn: u32, payload: Payload) -> Call {
    Call { token: Token::new(slot, turn), deadline_ns: BEST_EFFORT, time_left: false, trace: 0, ttl_ms: 0, payload }
}

fn answer(token: Token, payload: Payload) -> Answer {
    Answer { token, status: Status::Served, code: 0, queued_ns: 0, service_ns: 0, payload }
}

#[test]
fn geometry_takes_powers_of_two_and_lines_are_apart() {
    for (entries, arena) in
        [(0, 4096), (3, 4096), (8192, 4096), (1, 1), (1, 2048), (1, 6144), (1, 1 << 41), (u32::MAX, 0)]
    {
        assert_eq!(Geometry::new(entries, arena), None, "{entries} {arena}");
    }
    for entries in [1, 2, 64, 4096] {
        let g = Geometry::new(entries, 1 << 20).unwrap();
        assert!(g.ring() >= g.mark(entries - 1) + 4 && g.ring().is_multiple_of(LINE_BYTES));
        assert!(g.arena() >= g.entry(entries - 1) + ENTRY_BYTES && g.arena().is_multiple_of(4096));
        assert_eq!(g.section_bytes(), g.arena() as u64 + (1 << 20));
    }
    assert_eq!(Geometry::new(64, 0).unwrap().section_bytes(), 20480);
    assert_eq!((PUBLISHED, WAKE, HINT), (128, 256, 384));
}

#[test]
fn the_header_is_these_bytes() {
    let want = b"TMBLRPC\x02\x02\0\0\0\x02\0\0\0\x04\0\0\0\0\x01\0\0\0\x10\0\0\0\0\0\0\0\x20\0\0\0\0\0\0";
    assert_eq!(&GEOMETRY.header(Role::Provider), want);
    let (client, provider) = connection();
    assert_eq!(client.check_peer(Role::Provider), Ok(()));
    assert_eq!(provider.check_peer(Role::Client), Ok(()));
    assert_eq!(provider.check_peer(Role::Provider), Err(Broken::Header));
}

#[test]
fn a_header_with_any_other_byte_is_refused() {
    for at in 0..HEADER_BYTES {
        let (client, provider) = connection();
        let byte = client.own.as_foreign().read_array::<1>(at).unwrap()[0];
        client.own.write_array(at, [byte ^ 1]).unwrap();
        assert_eq!(provider.check_peer(Role::Client), Err(Broken::Header), "byte {at}");
    }
}

#[test]
fn sections_shorter_than_their_geometry_are_refused() {
    let (a, b) = (region(8192), region(8192));
    let large = Geometry::new(64, 4096).unwrap();
    assert_eq!(Ends::new(a, large, b.as_foreign(), large).err(), Some(Broken::Short));
    let (small, other) = (Geometry::new(4, 0).unwrap(), Geometry::new(8, 0).unwrap());
    assert!(Ends::new(a, small, b.as_foreign(), small).is_ok());
    assert_eq!(Ends::new(a, small, b.as_foreign(), other).err(), Some(Broken::Short));
}

#[test]
fn entries_are_these_bytes() {
    let call = Ask::Call(Call {
        token: Token::new(3, 0x0a0b_0c0d),
        deadline_ns: 0x1122_3344_5566_7788,
        time_left: true,
        trace: 0x99,
        ttl_ms: 0x1234,
        payload: Payload::Shared { memory: 7, offset: 0x100, len: 0x4000_0000 },
    });
    let mut want: Head = [0; ENTRY_HEAD_BYTES];
    want[0..8].copy_from_slice(&[3, 0, 0, 0, 0x0d, 0x0c, 0x0b, 0x0a]);
    want[8..16].copy_from_slice(&[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
    want[16] = 0x99;
    want[25] = 1;
    want[35] = 0x40;
    want[40] = 7;
    want[44..46].copy_from_slice(&[0x34, 0x12]);
    want[48..51].copy_from_slice(&[1, 2, 1]);
    assert_eq!(call.encode(), want);
    assert_eq!(Ask::parse(&want, GEOMETRY), Ok(call));

    let cancel = Ask::Cancel(Token::new(1, 2));
    let mut want: Head = [0; ENTRY_HEAD_BYTES];
    (want[0], want[4], want[48]) = (1, 2, 2);
    assert_eq!(cancel.encode(), want);
    assert_eq!(Ask::parse(&want, GEOMETRY), Ok(cancel));

    let refused = Answer {
        token: Token::new(2, 1),
        status: Status::Refused(Refusal::Admission),
        code: 0x01020304,
        queued_ns: 5,
        service_ns: 6,
        payload: Payload::Arena { offset: 512, len: 3, block: 1, generation: 9 },
    };
    let mut want: Head = [0; ENTRY_HEAD_BYTES];
    (want[0], want[4], want[8], want[16], want[25], want[32], want[40], want[44]) = (2, 1, 5, 6, 2, 3, 1, 9);
    want[48..56].copy_from_slice(&[3, 1, 2, 0, 4, 3, 2, 1]);
    assert_eq!(refused.encode(), want);
    assert_eq!(Answer::parse(&want, GEOMETRY), Ok(refused));
}

/// The entry with one field overwritten.
fn with(mut head: Head, at: usize, bytes: &[u8]) -> Head {
    head[at..at + bytes.len()].copy_from_slice(bytes);
    head
}

#[test]
fn impossible_requests_are_refused_field_by_field() {
    let inline = Ask::Call(call(0, 0, Payload::Inline { len: 5 })).encode();
    let arena = Ask::Call(call(0, 0, Payload::Arena { offset: 0, len: 4096, block: 0, generation: 0 })).encode();
    let shared = Ask::Call(call(0, 0, Payload::Shared { memory: 0, offset: 0, len: 9 })).encode();
    for (head, broken) in [
        (with(inline, 0, &[4]), Broken::Slot),
        (with(inline, 0, &[0xff; 4]), Broken::Slot),
        (with(inline, 48, &[0]), Broken::Kind),
        (with(inline, 48, &[3]), Broken::Kind),
        (with(inline, 49, &[3]), Broken::Payload),
        (with(inline, 32, &[193]), Broken::Inline),
        (with(inline, 32, &[0xff; 8]), Broken::Inline),
        (with(arena, 24, &[1]), Broken::Arena),
        (with(arena, 24, &[0xff; 8]), Broken::Arena),
        (with(arena, 32, &[0xff; 8]), Broken::Arena),
        (with(arena, 40, &[4]), Broken::Slot),
        (with(shared, 24, &[0xff; 8]), Broken::Payload),
    ] {
        assert_eq!(Ask::parse(&head, GEOMETRY), Err(broken), "{head:?}");
    }
    // A cancellation's slot is checked too; its other fields are not.
    assert_eq!(Ask::parse(&with(with(inline, 48, &[2]), 0, &[9]), GEOMETRY), Err(Broken::Slot));
}

#[test]
fn impossible_answers_are_refused_field_by_field() {
    let served = answer(Token::new(0, 0), Payload::EMPTY).encode();
    for (head, broken) in [
        (with(served, 0, &[4]), Broken::Slot),
        (with(served, 48, &[0]), Broken::Status),
        (with(served, 48, &[7]), Broken::Status),
        (with(served, 48, &[3, 0, 0, 0]), Broken::Status),
        (with(served, 48, &[3, 0, 6, 0]), Broken::Status),
        (with(served, 49, &[9]), Broken::Payload),
        (with(served, 33, &[1]), Broken::Inline),
    ] {
        assert_eq!(Answer::parse(&head, GEOMETRY), Err(broken), "{head:?}");
    }
    for status in [Status::Served, Status::Late, Status::Cancelled, Status::Expired, Status::Failed]
        .into_iter()
        .chain(Refusal::ALL.map(Status::Refused))
    {
        let sent = Answer { status, ..answer(Token::new(1, 1), Payload::EMPTY) };
        assert_eq!(Answer::parse(&sent.encode(), GEOMETRY), Ok(sent));
    }
}

#[test]
fn a_request_and_its_answer_travel_and_wake_only_who_waits() {
    let (client, provider) = connection();
    let (mut asks, mut taken) = (Producer::<Ask>::default(), Consumer::<Ask>::default());
    let mut inline = [0xa5; INLINE_BYTES];
    let ask = Ask::Call(call(2, 7, Payload::Inline { len: 3 }));
    asks.push(client, &ask, b"abc");
    assert!(!taken.is_ready(provider).unwrap(), "not published yet");
    assert!(!asks.publish(client), "nobody sleeps");
    assert_eq!(taken.take(provider, &mut inline), Ok(Some(ask)));
    assert_eq!(&inline[..4], b"abc\xa5");
    assert_eq!(taken.take(provider, &mut inline), Ok(None));
    assert_eq!(taken.arm(provider), Ok(true));
    asks.push(client, &ask, b"abc");
    assert!(asks.publish(client), "it sleeps");
    asks.push(client, &ask, b"abc");
    assert!(!asks.publish(client), "it was woken already");
    assert_eq!(taken.arm(provider), Ok(false), "entries wait");
}

#[test]
fn a_full_ring_has_no_room_until_entries_are_given_back() {
    let (client, provider) = connection();
    let (mut asks, mut taken) = (Producer::<Ask>::default(), Consumer::<Ask>::default());
    for slot in 0..4 {
        assert_eq!(asks.has_room(client), Ok(true));
        asks.push(client, &Ask::Cancel(Token::new(slot, 0)), b"");
    }
    let _ = asks.publish(client);
    assert_eq!(asks.has_room(client), Ok(false));
    assert!(taken.take(provider, &mut [0; INLINE_BYTES]).unwrap().is_some());
    assert_eq!(asks.has_room(client), Ok(false), "taken, but not given back");
    taken.took(provider);
    assert_eq!(asks.has_room(client), Ok(true));
}

#[test]
fn lying_indices_end_the_connection() {
    let (client, provider) = connection();
    let mut taken = Consumer::<Ask>::default();
    for lie in [5, 0x8000_0000, u32::MAX] {
        client.own.store_u32(PUBLISHED, lie, Ordering::Relaxed);
        assert_eq!(taken.arm(provider), Err(Broken::Index), "{lie}");
        assert_eq!(taken.take(provider, &mut [0; INLINE_BYTES]), Err(Broken::Index), "{lie}");
    }
    let mut asks = Producer::<Ask>::default();
    for slot in 0..4 {
        asks.push(client, &Ask::Cancel(Token::new(slot, 0)), b"");
    }
    // Took five of four; took a number that was never reached; went back by more than it may be
    // late.
    for lie in [5 << 1, 0x1000 << 1, u32::MAX - 2] {
        provider.own.store_u32(WAKE, lie, Ordering::Relaxed);
        assert_eq!(asks.has_room(client), Err(Broken::Wake), "{lie}");
        assert_eq!(asks.may_answer(client), Ok(true), "within what a consumer may be late");
    }
}

#[test]
fn a_consumer_says_late_what_it_took_and_the_producer_knows_by_answers() {
    let (client, provider) = connection();
    let (mut asks, mut taken) = (Producer::<Ask>::default(), Consumer::<Ask>::default());
    let word = || provider.own.as_foreign().load_u32(WAKE, Ordering::Relaxed);
    assert_eq!(taken.arm(provider), Ok(true));
    for n in 0..4 {
        assert_eq!(asks.has_room(client), Ok(true), "{n}");
        asks.push(client, &Ask::Cancel(Token::new(n, 0)), b"");
    }
    assert!(asks.publish(client));
    // A sleeper says at once that it is awake; after that a quarter of the ring may be taken and
    // not said.
    for said in [1, 1, 3, 3] {
        assert!(taken.take(provider, &mut [0; INLINE_BYTES]).unwrap().is_some());
        taken.took_some(provider);
        assert_eq!(word(), Some(said << 1));
    }
    asks.push(client, &Ask::Cancel(Token::new(0, 1)), b"");
    let _ = asks.publish(client);
    asks.push(client, &Ask::Cancel(Token::new(1, 1)), b"");
    asks.push(client, &Ask::Cancel(Token::new(2, 1)), b"");
    assert_eq!(asks.has_room(client), Ok(false), "three of seven are said to be taken");
    assert_eq!(asks.may_answer(client), Ok(true), "if these were answers, the fourth had been taken");
    asks.taken_to(4);
    assert_eq!(asks.has_room(client), Ok(true), "the fourth was answered");
    asks.taken_to(2);
    assert_eq!(asks.has_room(client), Ok(true), "what is known is not forgotten");
    asks.push(client, &Ask::Cancel(Token::new(3, 1)), b"");
    assert_eq!(asks.has_room(client), Ok(false));
    assert_eq!(asks.may_answer(client), Ok(true));
    asks.push(client, &Ask::Cancel(Token::new(3, 2)), b"");
    assert_eq!(asks.may_answer(client), Err(Broken::Wake), "six are not said to be taken: nobody is as late as that");
}

#[test]
fn an_index_that_goes_back_ends_the_connection() {
    let (client, provider) = connection();
    let (mut asks, mut taken) = (Producer::<Ask>::default(), Consumer::<Ask>::default());
    asks.push(client, &Ask::Cancel(Token::new(0, 0)), b"");
    let _ = asks.publish(client);
    assert!(taken.take(provider, &mut [0; INLINE_BYTES]).unwrap().is_some());
    client.own.store_u32(PUBLISHED, 0, Ordering::Relaxed);
    assert_eq!(taken.arm(provider), Err(Broken::Index));
}

#[test]
fn an_entry_is_found_by_its_stamp_and_by_the_index_alone_before_sleep() {
    let (client, provider) = connection();
    let (mut asks, mut taken) = (Producer::<Ask>::default(), Consumer::<Ask>::default());
    let stamp = |index: u32| GEOMETRY.entry(index) + ENTRY_STAMP;
    // Twice around the ring: what an entry left behind is no stamp of the next in its place.
    for n in 0..8 {
        asks.push(client, &Ask::Cancel(Token::new(n % 4, n)), b"");
        assert!(!is_there(provider, n) && !taken.is_ready(provider).unwrap(), "{n} is not published yet");
        let _ = asks.publish(client);
        assert_eq!(client.own.as_foreign().load_u32(stamp(n), Ordering::Relaxed), Some(n + 1));
        assert!(is_there(provider, n) && !is_there(provider, n + 4));
        assert!(taken.take(provider, &mut [0; INLINE_BYTES]).unwrap().is_some());
        taken.took(provider);
    }
    // A producer that was interrupted between the index and the stamp.
    asks.push(client, &Ask::Cancel(Token::new(0, 8)), b"");
    client.own.store_u32(PUBLISHED, 9, Ordering::Release);
    assert_eq!(taken.take(provider, &mut [0; INLINE_BYTES]), Ok(None));
    assert_eq!(taken.arm(provider), Ok(false), "nobody sleeps over it");
    assert_eq!(taken.take(provider, &mut [0; INLINE_BYTES]), Ok(Some(Ask::Cancel(Token::new(0, 8)))));
    // A stamp that the index does not count is noticed before sleep.
    client.own.store_u32(stamp(9), 10, Ordering::Release);
    assert!(taken.take(provider, &mut [0; INLINE_BYTES]).is_ok());
    assert_eq!(taken.arm(provider), Err(Broken::Index));
}

#[test]
fn marks_and_hints_are_seen_by_the_peer_and_checked() {
    let (client, provider) = connection();
    assert_eq!(provider.peer_cpu(), None);
    client.set_cpu(1);
    assert_eq!(provider.peer_cpu(), Some(1));
    provider.set_mark(3, 8);
    assert!(client.still_ours(3, 8) && !client.still_ours(3, 7));
    provider.set_mark(4, 1);
    assert_eq!(client.peer_mark(4), 0);
    // Mark 4 does not exist: nothing was written behind the marks either.
    let first = client.peer.read_array::<ENTRY_BYTES>(GEOMETRY.ring()).unwrap();
    assert!(first.iter().all(|b| *b == 0));
    assert!(client.peer_payload(4096, 0).is_some() && client.peer_payload(4096, 1).is_none());
    assert!(client.own_payload(u64::MAX, 2).is_none() && client.own_payload(0, 4096).is_some());
}

#[derive(Clone, Debug)]
enum Step {
    Push(Vec<u8>),
    Publish,
    Take,
    GiveBack,
    Arm,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => prop::collection::vec(any::<u8>(), 0..=INLINE_BYTES).prop_map(Step::Push),
        3 => Just(Step::Publish),
        4 => Just(Step::Take),
        2 => Just(Step::GiveBack),
        1 => Just(Step::Arm),
    ]
}

proptest! {
    /// Beside a queue that cannot be wrong.
    #[test]
    fn the_ring_is_a_bounded_queue(steps in prop::collection::vec(step(), 1..300)) {
        let (client, provider) = connection();
        let (mut asks, mut taken) = (Producer::<Ask>::default(), Consumer::<Ask>::default());
        let mut queue = VecDeque::<(Token, Vec<u8>)>::new();
        // (pushed, published, taken, given back), and the sleeper's place.
        let (mut pushed, mut published, mut out, mut back) = (0u32, 0u32, 0u32, 0u32);
        let (mut sleeps_at, mut woken_at) = (None, None);
        for step in steps {
            match step {
                Step::Push(bytes) => {
                    let room = pushed - back < 4;
                    prop_assert_eq!(asks.has_room(client), Ok(room));
                    if room {
                        let token = Token::new(pushed % 4, pushed);
                        asks.push(client, &Ask::Call(Call { token, ..call(0, 0, Payload::Inline { len: bytes.len() as u32 }) }), &bytes);
                        queue.push_back((token, bytes));
                        pushed += 1;
                    }
                }
                Step::Publish => {
                    published = pushed;
                    // A sleeper for whom there is nothing is left asleep.
                    let wake = sleeps_at.is_some_and(|at| at != published) && woken_at != sleeps_at;
                    prop_assert_eq!(asks.publish(client), wake);
                    if wake { woken_at = sleeps_at; }
                }
                Step::Take => {
                    let mut inline = [0; INLINE_BYTES];
                    let got = taken.take(provider, &mut inline).unwrap();
                    prop_assert_eq!(got.is_some(), out < published);
                    if let Some(Ask::Call(got)) = got {
                        let (token, bytes) = queue.pop_front().unwrap();
                        prop_assert_eq!(got.token, token);
                        prop_assert_eq!(&inline[..bytes.len()], &bytes[..]);
                        out += 1;
                    }
                }
                Step::GiveBack => {
                    taken.took(provider);
                    back = out;
                    sleeps_at = None;
                }
                Step::Arm => {
                    prop_assert_eq!(taken.arm(provider), Ok(out == published));
                    back = out;
                    sleeps_at = Some(out);
                }
            }
        }
    }

    /// A client that writes anything, anywhere, at any time: the provider's end answers or ends the
    /// connection, and everything that it hands out is inside the arena.
    #[test]
    fn a_hostile_section_is_survived(
        junk in prop::collection::vec((0usize..4096, any::<u64>()), 1..200),
        index in any::<[u8; 4]>(),
    ) {
        let (client, provider) = connection();
        let mut taken = Consumer::<Ask>::default();
        let mut answers = Producer::<Answer>::default();
        for (n, (at, word)) in junk.into_iter().enumerate() {
            client.own.write_array(at, word.to_le_bytes());
            let _ = taken.arm(provider);
            client.own.store_u32(PUBLISHED, u32::from(index[n % 4]) % 6 + taken.index(), Ordering::Relaxed);
            while let Ok(Some(ask)) = taken.take(provider, &mut [0; INLINE_BYTES]) {
                if let Ask::Call(Call { token, payload, .. }) = ask {
                    prop_assert!(token.slot() < 4);
                    if let Payload::Arena { offset, len, .. } = payload {
                        prop_assert!(provider.peer_payload(offset, len).is_some());
                    }
                }
            }
            if answers.has_room(provider) == Ok(true) {
                answers.push(provider, &answer(Token::new(0, 0), Payload::EMPTY), b"");
                let _ = answers.publish(provider);
            }
            let _ = provider.peer_mark(n as u32 % 8);
        }
    }

    /// What one side writes the other reads, for all values.
    #[test]
    fn entries_are_read_as_they_were_written(
        slot in 0u32..4, turn in any::<u32>(), deadline_ns in any::<u64>(), time_left in any::<bool>(), trace in any::<u64>(),
        ttl_ms in any::<u32>(), memory in any::<u32>(), offset in 0u64..1 << 40, len in 0u64..1 << 40,
    ) {
        let payload = Payload::Shared { memory, offset, len };
        let ask = Ask::Call(Call { token: Token::new(slot, turn), deadline_ns, time_left, trace, ttl_ms, payload });
        prop_assert_eq!(Ask::parse(&ask.encode(), GEOMETRY), Ok(ask));
        let reply = Answer { queued_ns: deadline_ns, service_ns: trace, code: ttl_ms, ..answer(Token::new(slot, turn), payload) };
        prop_assert_eq!(Answer::parse(&reply.encode(), GEOMETRY), Ok(reply));
    }
}
