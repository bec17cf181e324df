//! Both ends of both rings against each other, against a simple model, and against garbage.

use std::boxed::Box;
use std::collections::VecDeque;
use std::vec;
use std::vec::Vec;

use core::sync::atomic::Ordering;
use proptest::prelude::*;

use super::back::Refusal;
use super::netif::{Extra, RSP_ERROR, RSP_OKAY, RxRequest, TX_CSUM_BLANK, TX_EXTRA_INFO, TX_MORE_DATA, TxRequest};
use super::ring::{REQ_EVENT, REQ_PROD, RSP_EVENT, RSP_PROD, RX_SLOT_BYTES, TX_SLOT_BYTES};
use super::*;
use crate::mem::ForeignMut;

/// A page full of 0xa5, given back to the system when the test's process ends.
fn memory() -> ForeignMut<'static> {
    let memory = Box::leak(vec![0xa5u8; PAGE_BYTES + 64].into_boxed_slice());
    let skip = memory.as_ptr().align_offset(64);
    ForeignMut::from(&mut memory[skip..skip + PAGE_BYTES])
}

pub(super) fn fresh() -> (ForeignMut<'static>, RingPage<'static>) {
    let memory = memory();
    let page = RingPage::new(memory).unwrap();
    page.initialise();
    (memory, page)
}

fn content(len: usize, checksum: Checksum, gso: Option<Gso>) -> RxContent {
    RxContent { len, checksum, gso, ..RxContent::default() }
}

fn word(memory: ForeignMut<'_>, at: usize) -> u32 {
    memory.as_foreign().load_u32(at, Ordering::Relaxed).unwrap()
}

fn set(memory: ForeignMut<'_>, at: usize, value: u32) {
    memory.store_u32(at, value, Ordering::Relaxed).unwrap();
}

fn slot<const N: usize>(memory: ForeignMut<'_>, slot_bytes: usize, index: usize) -> [u8; N] {
    memory.as_foreign().read_array(64 + slot_bytes * (index % 256)).unwrap()
}

const GSO: Gso = Gso { kind: GsoKind::TcpV4, size: 1448 };

fn part(gref: u32, offset: u16, len: u16) -> TxPart {
    TxPart { gref, offset, len, token: 1000 + gref }
}

// --- golden pages ---

#[test]
fn a_transmitted_packet_stands_in_the_page_as_the_header_has_it() {
    let (memory, page) = fresh();
    assert_eq!([REQ_PROD, REQ_EVENT, RSP_PROD, RSP_EVENT].map(|at| word(memory, at)), [0, 1, 0, 1]);
    let (mut front, mut back) = (TxFront::new(), TxBack::attach(&page).unwrap());
    let parts = [part(5, 100, 2000), part(6, 0, 4096), part(7, 0, 30)];
    assert_eq!(front.push(&page, &parts, Checksum::Blank, Some(GSO)), Ok(true));
    assert_eq!(word(memory, REQ_PROD), 0, "not published yet");
    assert!(front.publish(&page), "the first request is announced");
    assert_eq!(word(memory, REQ_PROD), 4);
    let golden = [
        // The whole packet's size: 6126.
        [5, 0, 0, 0, 100, 0, 0x0f, 0, 0, 0, 0xee, 0x17],
        [1, 0, 0xa8, 0x05, 1, 0, 0, 0, 0, 0, 0, 0],
        [6, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0x10],
        [7, 0, 0, 0, 0, 0, 0, 0, 2, 0, 30, 0],
    ];
    for (at, golden) in golden.into_iter().enumerate() {
        assert_eq!(slot(memory, TX_SLOT_BYTES, at), golden, "{at}");
    }
    let mut packet = Packet::new();
    assert_eq!(back.take(&page, &mut packet), Ok(true));
    assert_eq!((packet.len, packet.checksum, packet.gso), (6126, Checksum::Blank, Some(GSO)));
    let pieces: Vec<_> = packet.pieces().iter().map(|piece| (piece.gref, piece.offset, piece.len)).collect();
    assert_eq!(pieces, [(5, 100, 2000), (6, 0, 4096), (7, 0, 30)]);
    back.answer(&page, &packet, RSP_OKAY).unwrap();
    // At once: the requests are gone, so a backend that ended here must not leave them to the next
    // one.
    assert_eq!(word(memory, RSP_PROD), 4);
    assert!(back.publish(&page));
    for (at, golden) in [[0, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0]].into_iter().enumerate() {
        assert_eq!(slot(memory, TX_SLOT_BYTES, at), golden, "{at}");
    }
    let mut tokens = Vec::new();
    while let Some(completed) = front.complete(&page).unwrap() {
        tokens.push((completed.token, completed.status));
    }
    assert_eq!(tokens, [(1005, 0), (1006, 0), (1007, 0)]);
    assert_eq!((front.free(), front.outstanding().count()), (256, 0));
    // Both ask to be woken one further than what they have seen.
    assert_eq!((front.arm(&page, 1), back.arm(&page)), (Ok(true), Ok(true)));
    assert_eq!((word(memory, RSP_EVENT), word(memory, REQ_EVENT)), (5, 5));
}

#[test]
fn a_received_packet_stands_in_the_page_as_the_header_has_it() {
    let (memory, page) = fresh();
    let (mut front, mut back) = (RxFront::new(), RxBack::attach(&page).unwrap());
    for n in 0..6 {
        assert!(front.post(&page, 0x1_0000 + n, 70 + n));
    }
    assert!(front.publish(&page));
    assert_eq!(slot(memory, RX_SLOT_BYTES, 5), [5, 0, 0, 0, 5, 0, 1, 0]);
    let mut requests = [RxRequest::default(); 3];
    let what = content(5000, Checksum::Blank, Some(GSO));
    assert_eq!(what.slots(), 3);
    assert_eq!(back.reserve(&page, &mut requests), Ok(true));
    assert_eq!(requests.map(|request| request.gref), [0x1_0000, 0x1_0001, 0x1_0002]);
    back.respond(&page, &requests, &what, false).unwrap();
    assert!(back.publish(&page));
    assert_eq!(slot(memory, RX_SLOT_BYTES, 0), [0, 0, 0, 0, 0x0f, 0, 0, 0x10]);
    assert_eq!(slot(memory, RX_SLOT_BYTES, 1), [1, 0, 0xa8, 5, 1, 0, 0, 0]);
    assert_eq!(slot(memory, RX_SLOT_BYTES, 2), [2, 0, 0, 0, 0, 0, 0x88, 3]);
    let mut parts = Vec::new();
    let received = front.receive(&page, |part| parts.push((part.token, part.offset, part.len))).unwrap().unwrap();
    assert_eq!(received, Received { len: 5000, checksum: Checksum::Blank, gso: Some(GSO), hash: None, failed: false });
    assert_eq!(parts, [(70, 0, 4096), (71, 0, 0), (72, 0, 904)]);
    // A packet that could not be copied gives its pages back.
    assert_eq!(back.reserve(&page, &mut requests), Ok(true));
    assert_eq!(back.reserve(&page, &mut requests[..1]), Ok(false));
    back.respond(&page, &requests, &what, true).unwrap();
    back.publish(&page);
    for token in 73..76 {
        let mut parts = Vec::new();
        let received = front.receive(&page, |part| parts.push((part.token, part.len))).unwrap().unwrap();
        assert!(received.failed);
        assert_eq!(parts, [(token, 0)]);
    }
    assert_eq!(front.receive(&page, |_| ()), Ok(None));
    assert_eq!((front.arm(&page), back.arm(&page, 18)), (Ok(true), Ok(true)));
    assert_eq!((word(memory, RSP_EVENT), word(memory, REQ_EVENT)), (7, 24));
    // With room for an XDP program, and segmentation beside it.
    for n in 0..6 {
        assert!(front.post(&page, n, 80 + n));
    }
    front.publish(&page);
    let mut requests = [RxRequest::default(); 6];
    let small = RxContent { headroom: 256, ..content(60, Checksum::None, None) };
    let hash = PacketHash { kind: 1, algorithm: 1, value: 0x51cc_c178 };
    let large = RxContent { headroom: 256, hash: Some(hash), ..content(3840, Checksum::Blank, Some(GSO)) };
    assert_eq!((small.slots(), large.slots(), back.reserve(&page, &mut requests)), (2, 4, Ok(true)));
    back.respond(&page, &requests[..2], &small, false).unwrap();
    back.respond(&page, &requests[2..], &large, false).unwrap();
    assert_eq!(slot(memory, RX_SLOT_BYTES, 6), [6, 0, 0, 1, 0x08, 0, 60, 0]);
    assert_eq!(slot(memory, RX_SLOT_BYTES, 7), [5, 0, 0, 1, 0, 0, 0, 0]);
    assert_eq!(slot(memory, RX_SLOT_BYTES, 8), [8, 0, 0, 1, 0x0b, 0, 0, 0x0f]);
    assert_eq!(slot(memory, RX_SLOT_BYTES, 9), [1, 1, 0xa8, 5, 1, 0, 0, 0]);
    assert_eq!(slot(memory, RX_SLOT_BYTES, 10), [4, 1, 1, 1, 0x78, 0xc1, 0xcc, 0x51]);
    assert_eq!(slot(memory, RX_SLOT_BYTES, 11), [5, 0, 0, 1, 0, 0, 0, 0]);
    let (mut parts, mut hashes) = (Vec::new(), Vec::new());
    while let Some(received) = front.receive(&page, |part| parts.push((part.token, part.offset, part.len))).unwrap() {
        hashes.push((received.gso, received.hash));
    }
    assert_eq!(parts, [(80, 256, 60), (81, 0, 0), (82, 256, 3840), (83, 0, 0), (84, 0, 0), (85, 0, 0)]);
    assert_eq!(hashes, [(None, None), (Some(GSO), Some(hash))]);
}

#[test]
fn multicast_requests_take_two_slots_and_no_buffer() {
    let (_, page) = fresh();
    let (mut front, mut back) = (TxFront::new(), TxBack::attach(&page).unwrap());
    let address = [1, 0, 0x5e, 0, 0, 0xfb];
    let mut packet = Packet::new();
    for extra in [Extra::MulticastAdd(address), Extra::MulticastDel(address)] {
        assert_eq!(front.push_multicast(&page, extra), Ok(true));
        front.publish(&page);
        assert_eq!(back.take(&page, &mut packet), Ok(true));
        assert_eq!((packet.multicast, packet.pieces().len(), packet.slots()), (Some(extra), 0, 2));
        back.answer(&page, &packet, RSP_OKAY).unwrap();
        back.publish(&page);
        assert_eq!(front.complete(&page), Ok(None));
        assert_eq!(front.free(), 256);
    }
    assert!(front.push_multicast(&page, Extra::Gso(GSO)).is_err());
}

#[test]
fn notifications_are_sent_where_they_were_asked_for_and_found_late() {
    let (memory, page) = fresh();
    let (mut front, mut back) = (TxFront::new(), TxBack::attach(&page).unwrap());
    let mut packet = Packet::new();
    let one = [part(1, 0, 60)];
    let send = |front: &mut TxFront| {
        assert_eq!(front.push(&page, &one, Checksum::None, None), Ok(true));
        front.publish(&page)
    };
    assert!(send(&mut front) && !send(&mut front), "the backend is awake after the first");
    // The backend fell asleep, but its request became visible late.
    assert!(front.is_in_doubt() && front.recheck(&page) == (word(memory, REQ_EVENT) == 2));
    while back.take(&page, &mut packet).unwrap() {
        back.answer(&page, &packet, RSP_OKAY).unwrap();
    }
    assert_eq!(back.arm(&page), Ok(true));
    assert!(send(&mut front));
    assert_eq!(back.arm(&page), Ok(false), "there is something");
    assert!(back.publish(&page) && !back.publish(&page));
    // Responses: only when half of what is outstanding is there.
    while front.complete(&page).unwrap().is_some() {}
    for _ in 0..7 {
        send(&mut front);
    }
    assert_eq!((front.ring().outstanding(), front.arm(&page, 4)), (8, Ok(true)));
    for n in 1..=8 {
        assert!(back.take(&page, &mut packet).unwrap());
        back.answer(&page, &packet, RSP_OKAY).unwrap();
        assert_eq!(back.publish(&page), n == 4, "{n}");
    }
    assert_eq!(front.arm(&page, 4), Ok(false));
}

#[test]
fn a_backend_that_takes_over_finds_what_was_not_answered() {
    let (memory, page) = fresh();
    set(memory, REQ_PROD, u32::MAX - 1);
    set(memory, RSP_PROD, u32::MAX - 3);
    let mut back = TxBack::attach(&page).unwrap();
    assert_eq!(back.ring().known_requests(), 2);
    for at in 252..254 {
        let request = TxRequest { gref: at, size: 60, id: at as u16, ..TxRequest::default() };
        memory.write_array(64 + 12 * at as usize, request.emit()).unwrap();
    }
    let mut packet = Packet::new();
    assert!(back.take(&page, &mut packet).unwrap() && back.take(&page, &mut packet).unwrap());
    assert!(!back.take(&page, &mut packet).unwrap());
    set(memory, REQ_PROD, (u32::MAX - 3).wrapping_add(257));
    let error = XenError::IndexJump { got: 253, from: u32::MAX - 1, room: 254 };
    assert_eq!(back.take(&page, &mut packet), Err(error));
    assert!(TxBack::attach(&page).is_err());
}

#[test]
fn memory_that_is_no_page_is_refused() {
    let memory = memory();
    assert_eq!(RingPage::new(memory.take(4095)).err(), Some(XenError::Page { bytes: 4095 }));
    assert_eq!(RingPage::new(memory.skip(8)).err(), Some(XenError::Page { bytes: 4088 }));
}

// --- what a frontend can do to a backend ---

/// A backend that takes the first packet behind these requests.
fn taken(requests: &[[u8; 12]], published: u32) -> (Result<bool, XenError>, Packet, TxBack, RingPage<'static>) {
    let (memory, page) = fresh();
    for (at, request) in requests.iter().enumerate() {
        memory.write_array(64 + 12 * at, *request).unwrap();
    }
    set(memory, REQ_PROD, published);
    let mut back = TxBack::attach(&page).unwrap_or_else(|_| panic!("at most a ring of requests"));
    let mut packet = Packet::new();
    let result = back.take(&page, &mut packet);
    (result, packet, back, page)
}

fn tx(flags: u16, offset: u16, size: u16) -> [u8; 12] {
    TxRequest { gref: 9, offset, flags, id: 3, size }.emit()
}

fn extra(extra: Extra, more: bool) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&extra.emit(more));
    bytes
}

#[test]
fn packets_that_break_the_protocol_are_errors() {
    let more = TX_MORE_DATA;
    let check = |requests: &[[u8; 12]], error| {
        assert_eq!(taken(requests, requests.len() as u32).0, Err(error), "{requests:?}");
    };
    check(&[tx(0, 4000, 97)], XenError::Buffer { index: 0, offset: 4000, len: 97 });
    check(&[tx(0, u16::MAX, u16::MAX)], XenError::Buffer { index: 0, offset: u16::MAX, len: u16::MAX });
    check(&[tx(more, 0, 200), tx(0, 4090, 7)], XenError::Buffer { index: 1, offset: 4090, len: 7 });
    check(&[tx(more, 0, 200)], XenError::Incomplete { index: 0 });
    check(&[tx(TX_EXTRA_INFO, 0, 200)], XenError::Incomplete { index: 0 });
    check(&[tx(TX_EXTRA_INFO, 0, 200), [9; 12]], XenError::ExtraType { got: 9 });
    let endless = vec![extra(Extra::Gso(GSO), true); 200];
    let mut requests = vec![tx(TX_EXTRA_INFO, 0, 200)];
    requests.extend(endless);
    check(&requests, XenError::TooManySlots { index: 0 });
    let mut requests = vec![tx(more, 0, 2000); 200];
    requests[0] = tx(more, 0, u16::MAX);
    check(&requests, XenError::TooManySlots { index: 0 });
}

#[test]
fn packets_that_are_merely_wrong_are_refused_and_answered() {
    let more = TX_MORE_DATA;
    let nineteen: Vec<_> =
        (0..19).map(|n| tx(if n < 18 { more } else { 0 }, 0, if n == 0 { 5000 } else { 60 })).collect();
    for (requests, refusal) in [
        (vec![tx(0, 0, 13)], Refusal::Short),
        (vec![tx(0, 0, 0)], Refusal::Length),
        (vec![tx(more, 0, 100), tx(0, 0, 100)], Refusal::Length),
        (vec![tx(more, 0, 100), tx(0, 0, 4000)], Refusal::Length),
        (vec![tx(more, 0, 100), tx(more, 0, 0), tx(0, 0, 10)], Refusal::Length),
        (nineteen, Refusal::TooManySlots),
        (vec![tx(TX_EXTRA_INFO, 0, 100), extra(Extra::Gso(GSO), false)], Refusal::GsoWithoutChecksum),
    ] {
        let (result, packet, mut back, page) = taken(&requests, requests.len() as u32);
        assert_eq!(result, Ok(true), "{requests:?}");
        let short = refusal == Refusal::Length && packet.refusal == Some(Refusal::Short);
        assert!(packet.refusal == Some(refusal) || short, "{requests:?}: {:?}", packet.refusal);
        assert!(packet.pieces().is_empty());
        assert_eq!(packet.slots() as usize, requests.len());
        back.answer(&page, &packet, RSP_ERROR).unwrap();
        assert!(back.answer(&page, &packet, RSP_ERROR).is_err(), "once");
        assert_eq!(back.ring().held(), 0);
    }
    let good = [tx(TX_CSUM_BLANK | TX_EXTRA_INFO, 0, 100), extra(Extra::Gso(GSO), false)];
    assert_eq!(taken(&good, 2).1.refusal, None);
}

#[test]
fn index_jumps_of_a_frontend_are_errors_and_more_than_its_ring_is_one() {
    for (published, good) in [(256, true), (257, false), (u32::MAX, false), (1 << 31, false)] {
        let (memory, page) = fresh();
        let (mut tx, mut rx) = (TxBack::attach(&page).unwrap(), RxBack::attach(&page).unwrap());
        set(memory, REQ_PROD, published);
        assert_eq!(tx.arm(&page).is_ok(), good, "{published}");
        assert_eq!(rx.reserve(&page, &mut [RxRequest::default(); 2]).is_ok(), good, "{published}");
        assert_eq!(RxBack::attach(&page).is_ok(), good);
    }
}

#[test]
fn answers_out_of_order_are_the_callers_mistake() {
    let (_, page) = fresh();
    let (mut front, mut back) = (TxFront::new(), TxBack::attach(&page).unwrap());
    for gref in 0..2 {
        front.push(&page, &[part(gref, 0, 60)], Checksum::None, None).unwrap();
    }
    front.publish(&page);
    let (mut first, mut second) = (Packet::new(), Packet::new());
    assert!(back.take(&page, &mut first).unwrap() && back.take(&page, &mut second).unwrap());
    assert_eq!(back.answer(&page, &second, 0), Err(XenError::OutOfOrder { got: 1, expected: 0 }));
    assert!(back.answer(&page, &first, 0).is_ok() && back.answer(&page, &second, 0).is_ok());
    let mut rx = RxBack::attach(&page).unwrap();
    let requests = [RxRequest::default(); 2];
    assert!(rx.respond(&page, &requests, &content(5000, Checksum::None, None), false).is_err(), "none is held");
}

// --- what a backend can do to a frontend ---

#[test]
fn responses_that_answer_nothing_are_errors() {
    let (memory, page) = fresh();
    let mut front = TxFront::new();
    front.push(&page, &[part(1, 0, 60)], Checksum::None, None).unwrap();
    assert!(front.publish(&page));
    set(memory, RSP_PROD, 2);
    assert_eq!(front.complete(&page), Err(XenError::IndexJump { got: 2, from: 0, room: 1 }));
    set(memory, RSP_PROD, 1);
    memory.write_array(64, [1, 0, 0, 0]).unwrap();
    assert_eq!(front.complete(&page), Err(XenError::ResponseId { index: 0, got: 1 }));

    for (response, error) in [
        ([9, 0, 0, 0, 0, 0, 60, 0], XenError::ResponseId { index: 0, got: 9 }),
        ([0, 0, 0, 16, 0, 0, 1, 0], XenError::Buffer { index: 0, offset: 4096, len: 1 }),
        ([0, 0, 0, 0, 4, 0, 60, 0], XenError::Incomplete { index: 0 }),
        ([0, 0, 0, 0, 8, 0, 60, 0], XenError::Incomplete { index: 0 }),
        ([0, 0, 0, 0, 16, 0, 60, 0], XenError::ExtraType { got: 0 }),
    ] {
        let (memory, page) = fresh();
        let mut front = RxFront::new();
        assert!(front.post(&page, 1, 2) && front.post(&page, 2, 3) && front.publish(&page));
        memory.write_array(64, response).unwrap();
        set(memory, RSP_PROD, 1);
        assert_eq!(front.receive(&page, |_| ()), Err(error), "{response:?}");
    }
    let (memory, page) = fresh();
    let mut front = RxFront::new();
    while front.post(&page, 1, 2) {}
    assert!(front.publish(&page));
    for at in 0..256usize {
        memory.write_array(64 + 8 * at, [at as u8, 0, 0, 0, 4, 0, 60, 0]).unwrap();
    }
    set(memory, RSP_PROD, 256);
    assert_eq!(front.receive(&page, |_| ()), Err(XenError::TooManySlots { index: 0 }));
}

#[test]
fn a_frontend_that_disconnects_knows_which_buffers_are_out() {
    let (_, page) = fresh();
    let (mut tx, mut rx) = (TxFront::new(), RxFront::new());
    tx.push(&page, &[part(1, 0, 60), part(2, 0, 60)], Checksum::None, Some(GSO)).unwrap();
    tx.push_multicast(&page, Extra::MulticastAdd([1; 6])).unwrap();
    assert!(rx.post(&page, 1, 21) && rx.post(&page, 2, 22));
    let mut out: Vec<_> = tx.outstanding().chain(rx.outstanding()).collect();
    out.sort_unstable();
    assert_eq!(out, [21, 22, 1001, 1002]);
}

// --- against a model ---

/// What happens on a transmit ring.
#[derive(Clone, Debug)]
enum Step {
    /// Send a packet of pieces of these lengths, with or without segmentation.
    Send(Vec<u16>, bool),
    /// Take up to so many packets.
    Take(u8),
    /// Answer up to so many of those taken.
    Answer(u8),
    /// Complete all that is answered.
    Complete,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lengths = prop_oneof![Just(60u16), 14..=4096u16];
    let step = prop_oneof![
        4 => (prop::collection::vec(lengths, 1..=15), any::<bool>()).prop_map(|(parts, gso)| Step::Send(parts, gso)),
        2 => any::<u8>().prop_map(Step::Take),
        2 => any::<u8>().prop_map(Step::Answer),
        2 => Just(Step::Complete),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    #[test]
    fn a_transmit_ring_is_a_queue_of_packets(steps in steps()) {
        let (_, page) = fresh();
        let (mut front, mut back) = (TxFront::new(), TxBack::attach(&page).unwrap());
        let (mut sent, mut taken, mut answered) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let (mut next, mut slots, mut answered_slots) = (0u32, 0usize, 0usize);
        for step in steps {
            match step {
                Step::Send(lengths, gso) => {
                    let parts: Vec<_> =
                        lengths.iter().map(|len| { next += 1; part(next, 4096 - len, *len) }).collect();
                    let needed = parts.len() + usize::from(gso);
                    let gso = gso.then_some(GSO);
                    let room = front.push(&page, &parts, Checksum::Blank, gso).unwrap();
                    prop_assert_eq!(room, slots + needed <= 256);
                    if room {
                        slots += needed;
                        sent.push_back((parts, gso));
                        front.publish(&page);
                    }
                }
                Step::Take(count) => for _ in 0..count {
                    let mut packet = Packet::new();
                    if !back.take(&page, &mut packet).unwrap() {
                        prop_assert!(sent.is_empty());
                        break;
                    }
                    let (parts, gso) = sent.pop_front().unwrap();
                    prop_assert_eq!((packet.gso, packet.refusal), (gso, None));
                    let got = packet.pieces().iter().map(|piece| (piece.gref, piece.offset, piece.len));
                    prop_assert!(got.eq(parts.iter().map(|part| (part.gref, part.offset, part.len))));
                    taken.push_back((packet, parts, gso));
                },
                Step::Answer(count) => for _ in 0..count {
                    let Some((packet, parts, gso)) = taken.pop_front() else { break };
                    let status = -i16::from(count % 2);
                    back.answer(&page, &packet, status).unwrap();
                    back.publish(&page);
                    answered_slots += parts.len() + usize::from(gso.is_some());
                    answered.extend(parts.iter().map(|part| Completed { token: part.token, status }));
                },
                Step::Complete => {
                    while let Some(completed) = front.complete(&page).unwrap() {
                        prop_assert_eq!(Some(completed), answered.pop_front());
                    }
                    prop_assert!(answered.is_empty());
                    slots -= core::mem::take(&mut answered_slots);
                }
            }
            prop_assert_eq!(front.free() as usize, 256 - slots);
        }
    }

    #[test]
    fn a_receive_ring_is_a_queue_of_packets(
        packets in prop::collection::vec((14usize..=65535, any::<bool>(), any::<bool>(), 0u16..=2048), 1..100),
        post in 1u32..=256,
    ) {
        let (_, page) = fresh();
        let (mut front, mut back) = (RxFront::new(), RxBack::attach(&page).unwrap());
        let (mut posted, mut next, mut waiting) = (VecDeque::new(), 0u32, VecDeque::new());
        let mut queue = VecDeque::from(packets);
        while let Some((len, gso, failed, headroom)) = queue.front().copied() {
            while posted.len() < post.max(20) as usize && front.post(&page, next, next ^ 0xffff) {
                posted.push_back(next);
                next += 1;
            }
            front.publish(&page);
            let gso = gso.then_some(GSO);
            let mut requests = [RxRequest::default(); 20];
            let hash = (headroom % 2 == 1).then_some(PacketHash { kind: 1, algorithm: 1, value: 7 });
            let what = RxContent { headroom, hash, ..content(len, Checksum::Blank, gso) };
            let requests = &mut requests[..what.slots()];
            if back.reserve(&page, requests).unwrap() {
                queue.pop_front();
                back.respond(&page, requests, &what, failed).unwrap();
                back.publish(&page);
                waiting.push_back((len, gso, failed, requests.len()));
                continue;
            }
            prop_assert!(!waiting.is_empty(), "20 pages are enough for each packet");
            drain(&page, &mut front, &mut posted, &mut waiting)?;
        }
        drain(&page, &mut front, &mut posted, &mut waiting)?;
        prop_assert_eq!(front.ring().outstanding() as usize, posted.len());
    }

    #[test]
    fn whatever_the_memory_holds_nothing_panics_and_the_bounds_hold(
        bytes in prop::collection::vec(any::<u8>(), 512),
        req_prod in 0u32..300,
        rsp_prod in 0u32..300,
    ) {
        let (memory, page) = fresh();
        let (mut tx_front, mut rx_front) = (TxFront::new(), RxFront::new());
        for n in 0..20 {
            tx_front.push(&page, &[part(n, 0, 60)], Checksum::None, None).unwrap();
            rx_front.post(&page, n, n);
        }
        let (mut tx, mut rx) = (TxBack::attach(&page).unwrap(), RxBack::attach(&page).unwrap());
        tx_front.publish(&page);
        memory.skip(64).write_from(&bytes);
        set(memory, REQ_PROD, req_prod);
        let mut packet = Packet::new();
        while let Ok(true) = tx.take(&page, &mut packet) {
            let total: usize = packet.pieces().iter().map(|piece| usize::from(piece.len)).sum();
            prop_assert!(packet.pieces().len() <= 18);
            prop_assert!(packet.pieces().is_empty() || total == usize::from(packet.len));
            prop_assert!(packet.pieces().iter().all(|p| usize::from(p.offset) + usize::from(p.len) <= PAGE_BYTES));
            tx.answer(&page, &packet, 0).unwrap();
        }
        let mut requests = [RxRequest::default(); 3];
        while let Ok(true) = rx.reserve(&page, &mut requests) {
            rx.respond(&page, &requests, &content(9000, Checksum::None, None), false).unwrap();
        }
        memory.skip(64).write_from(&bytes);
        rx_front.publish(&page);
        set(memory, RSP_PROD, rsp_prod);
        while let Ok(Some(_)) = tx_front.complete(&page) {}
        let mut parts = Vec::new();
        while let Ok(Some(_)) = rx_front.receive(&page, |part| parts.push(part)) {}
        prop_assert!(parts.len() <= 20);
        prop_assert!(parts.iter().all(|p| p.token < 20 && usize::from(p.offset) + usize::from(p.len) <= PAGE_BYTES));
    }
}

type Waiting = VecDeque<(usize, Option<Gso>, bool, usize)>;

/// Receives all that waits, and compares it with what was sent.
fn drain(
    page: &RingPage<'_>,
    front: &mut RxFront,
    posted: &mut VecDeque<u32>,
    waiting: &mut Waiting,
) -> Result<(), TestCaseError> {
    for (len, gso, failed, slots) in waiting.drain(..) {
        let mut parts = Vec::new();
        let packets = if failed { slots } else { 1 };
        for _ in 0..packets {
            let received = front.receive(page, |part| parts.push(part)).unwrap().unwrap();
            prop_assert_eq!(received.failed, failed);
            if !failed {
                prop_assert_eq!((received.len, received.gso), (len, gso));
            }
        }
        prop_assert_eq!(parts.len(), slots);
        for part in parts {
            prop_assert_eq!(part.token ^ 0xffff, posted.pop_front().unwrap(), "in the order in which they were posted");
        }
    }
    prop_assert_eq!(front.receive(page, |_| ()).unwrap(), None);
    Ok(())
}
