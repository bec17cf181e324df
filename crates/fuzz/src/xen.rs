//! What the other end of a Xen ring, and XenStore, may write. Each panics where the code under test
//! breaks a promise.

use std::sync::atomic::Ordering;
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::xen::bus::{BackAction, BusState, back_step, front_step};
use tombolo_ring::xen::bytes::{BytePage, CONSOLE_INPUT, CONSOLE_OUTPUT, STORE_REPLIES, STORE_REQUESTS};
use tombolo_ring::xen::ctrl::{CtrlBack, CtrlFront, CtrlRequest, CtrlResponse};
use tombolo_ring::xen::netif::{Extra, FATAL_DATA_SLOTS, MAX_DATA_SLOTS, MAX_EXTRAS, RSP_OKAY, RxRequest};
use tombolo_ring::xen::ring::{CTRL_SLOTS, REQ_PROD, RSP_PROD};
use tombolo_ring::xen::store::{self, Content, Inbox, Request};
use tombolo_ring::xen::{
    Checksum, Gso, GsoKind, PAGE_BYTES, Packet, PacketHash, RING_SLOTS, RingPage, RxBack, RxContent, RxFront, TxBack,
    TxFront, TxPart,
};

use crate::{Behaviour, records};

/// A page of a ring, in memory that outlives it.
fn page_of(bytes: &mut Vec<u8>) -> ForeignMut<'_> {
    bytes.resize(PAGE_BYTES + 64, 0);
    let skip = bytes.as_ptr().align_offset(64);
    ForeignMut::from(&mut bytes[skip..skip + PAGE_BYTES])
}

/// The same, for a new ring.
fn ring_of(bytes: &mut Vec<u8>) -> (ForeignMut<'_>, RingPage<'_>) {
    let memory = page_of(bytes);
    let Ok(page) = RingPage::new(memory) else { panic!("a page is a page") };
    page.initialise();
    (memory, page)
}

/// Writes a record over the page: two bytes of place, then what goes there. With no place, moves
/// one of the indices.
fn write_over(memory: ForeignMut<'_>, write: &[u8]) {
    if let Some((&place, bytes)) = write.split_first_chunk() {
        memory.skip(usize::from(u16::from_be_bytes(place)) % PAGE_BYTES).write_from(bytes);
    } else if let [step] = write {
        let at = if step & 0x80 == 0 { REQ_PROD } else { RSP_PROD };
        let index = memory.as_foreign().load_u32(at, Ordering::Relaxed).unwrap_or(0);
        let _ = memory.store_u32(at, index.wrapping_add(u32::from(step & 0x7f)), Ordering::Relaxed);
    }
}

/// Both ends of a transmit ring on one page, over which each record is written first. After an
/// error an end starts again.
pub fn xen_transmit(input: &[u8], behaviour: &mut Behaviour) {
    let mut bytes = Vec::new();
    let (memory, page) = ring_of(&mut bytes);
    let mut front = TxFront::new();
    let Ok(mut back) = TxBack::attach(&page) else { panic!("a new ring can be attached") };
    let mut held: Vec<Packet> = Vec::new();
    for (step, write) in records(input) {
        write_over(memory, write);
        let many = u32::from(step >> 4);
        match step & 7 {
            0 | 1 => {
                let mut packet = Packet::new();
                let taken = back.take(&page, &mut packet);
                behaviour.note(taken.map_err(|error| std::mem::discriminant(&error)));
                match taken {
                    Ok(true) => {
                        let sum: usize = packet.pieces().iter().map(|piece| usize::from(piece.len)).sum();
                        let inside = |offset: u16, len: u16| usize::from(offset) + usize::from(len) <= PAGE_BYTES;
                        assert!(packet.pieces().iter().all(|piece| piece.len > 0 && inside(piece.offset, piece.len)));
                        assert!(packet.pieces().len() <= MAX_DATA_SLOTS);
                        assert!(packet.pieces().is_empty() || sum == usize::from(packet.len), "{packet:?}");
                        assert!(packet.slots() as usize <= FATAL_DATA_SLOTS + MAX_EXTRAS);
                        behaviour.note((packet.slots(), packet.refusal.map(|why| std::mem::discriminant(&why))));
                        behaviour.note((packet.gso.is_some(), packet.multicast.is_some(), packet.checksum as u8));
                        held.push(packet);
                    }
                    Ok(false) => (),
                    Err(_) => {
                        held.clear();
                        page.initialise();
                        (front, back) = (TxFront::new(), TxBack::attach(&page).unwrap_or_else(|_| panic!("new")));
                    }
                }
            }
            2 => {
                for packet in held.drain(..) {
                    assert!(back.answer(&page, &packet, RSP_OKAY).is_ok(), "in order");
                }
                behaviour.note(back.publish(&page));
            }
            3 => behaviour.note((back.arm(&page).is_ok(), back.is_in_doubt() && back.recheck(&page))),
            4 => {
                let len = 1 + u16::from(step >> 4) * 256;
                let part = TxPart { gref: many, offset: 0, len, token: many };
                let gso = (step & 8 != 0).then_some(Gso { kind: GsoKind::TcpV6, size: 1 });
                let parts = vec![part; 1 + usize::from(step >> 5)];
                behaviour.note((front.push(&page, &parts, Checksum::Blank, gso).is_ok(), front.publish(&page)));
            }
            5 => {
                let room = front.push_multicast(&page, Extra::MulticastAdd([step; 6]));
                behaviour.note((room.is_ok(), front.publish(&page)));
            }
            6 => loop {
                let completed = front.complete(&page);
                behaviour.note(completed.map_err(|error| std::mem::discriminant(&error)).is_ok());
                match completed {
                    Ok(Some(completed)) => assert!(completed.token < 16),
                    Ok(None) => break,
                    Err(_) => {
                        held.clear();
                        page.initialise();
                        (front, back) = (TxFront::new(), TxBack::attach(&page).unwrap_or_else(|_| panic!("new")));
                        break;
                    }
                }
            },
            _ => behaviour.note((front.arm(&page, many).is_ok(), front.is_in_doubt() && front.recheck(&page))),
        }
        assert!(back.ring().held() <= RING_SLOTS && front.free() <= RING_SLOTS);
    }
}

/// Both ends of a receive ring on one page, over which each record is written first. After an error
/// an end starts again.
pub fn xen_receive(input: &[u8], behaviour: &mut Behaviour) {
    let mut bytes = Vec::new();
    let (memory, page) = ring_of(&mut bytes);
    let mut front = RxFront::new();
    let Ok(mut back) = RxBack::attach(&page) else { panic!("a new ring can be attached") };
    for (step, write) in records(input) {
        write_over(memory, write);
        let many = u32::from(step >> 4);
        let mut broken = false;
        match step & 7 {
            0 | 1 => {
                for n in 0..many * 4 {
                    behaviour.note(front.post(&page, n, n));
                }
                behaviour.note(front.publish(&page));
            }
            2 | 3 => {
                let gso = (step & 8 != 0).then_some(Gso { kind: GsoKind::TcpV4, size: 1448 });
                let len = many as usize * 4369;
                let hash = (step & 16 != 0).then_some(PacketHash { kind: 1, algorithm: 1, value: many });
                let content = RxContent { len, checksum: Checksum::Valid, gso, hash, headroom: u16::from(step) * 7 };
                let mut requests = vec![RxRequest::default(); content.slots()];
                let reserved = back.reserve(&page, &mut requests);
                behaviour.note(reserved.map_err(|error| std::mem::discriminant(&error)));
                if reserved == Ok(true) {
                    let answered = back.respond(&page, &requests, &content, step & 1 != 0);
                    assert!(answered.is_ok(), "as many as were reserved");
                }
                broken = reserved.is_err();
            }
            4 => behaviour.note(back.publish(&page)),
            5 => behaviour.note((back.arm(&page, many).is_ok(), back.is_in_doubt() && back.recheck(&page))),
            6 => loop {
                let (mut parts, mut total) = (0, 0);
                let received = front.receive(&page, |part| {
                    assert!(usize::from(part.offset) + usize::from(part.len) <= PAGE_BYTES && part.token < 64);
                    (parts, total) = (parts + 1, total + usize::from(part.len));
                });
                behaviour.note(received.as_ref().map_err(std::mem::discriminant).is_ok());
                match received {
                    Ok(Some(packet)) => {
                        assert!(parts <= MAX_DATA_SLOTS + 1 + MAX_EXTRAS && packet.len == total);
                        behaviour.note((parts, packet.failed, packet.gso.is_some()));
                    }
                    Ok(None) => break,
                    Err(error) => {
                        behaviour.note(std::mem::discriminant(&error));
                        broken = true;
                        break;
                    }
                }
            },
            _ => behaviour.note((front.arm(&page).is_ok(), front.is_in_doubt() && front.recheck(&page))),
        }
        if broken {
            page.initialise();
            (front, back) = (RxFront::new(), RxBack::attach(&page).unwrap_or_else(|_| panic!("new")));
        }
        assert!(back.ring().held() <= RING_SLOTS && front.free() <= RING_SLOTS);
        assert!(front.outstanding().count() == front.ring().outstanding() as usize);
    }
}

/// Both ends of a control ring on one page, over which each record is written first. After an error
/// an end starts again.
pub fn xen_control(input: &[u8], behaviour: &mut Behaviour) {
    let mut bytes = Vec::new();
    let (memory, page) = ring_of(&mut bytes);
    let (mut front, mut held) = (CtrlFront::new(), Vec::new());
    let Ok(mut back) = CtrlBack::attach(&page) else { panic!("a new ring can be attached") };
    for (step, write) in records(input) {
        write_over(memory, write);
        let many = u32::from(step >> 4);
        let mut broken = false;
        match step & 7 {
            0 | 1 => {
                for n in 0..=many {
                    behaviour.note(front.ask(&page, CtrlRequest { id: n as u16, kind: 6, data: [n, many, 0] }));
                }
            }
            2 | 3 => {
                let taken = back.take(&page);
                behaviour.note(taken.as_ref().map(Option::is_some).map_err(std::mem::discriminant));
                broken = taken.is_err();
                held.extend(taken.ok().flatten());
                assert!(held.len() <= CTRL_SLOTS as usize);
            }
            4 | 5 => {
                let answered = back.answer(&page, CtrlResponse { status: many, ..CtrlResponse::default() });
                assert_eq!(answered.is_ok(), !held.is_empty(), "as many as were taken");
                held.truncate(held.len().saturating_sub(1));
            }
            6 => behaviour.note(back.arm(&page).is_ok()),
            _ => {
                let answer = front.answer(&page);
                behaviour.note(answer.as_ref().map(Option::is_some).map_err(std::mem::discriminant));
                broken = answer.is_err();
            }
        }
        if broken {
            page.initialise();
            held.clear();
            (front, back) = (CtrlFront::new(), CtrlBack::attach(&page).unwrap_or_else(|_| panic!("new")));
        }
    }
}

/// The first byte of the input says how the rest arrives: as a stream of XenStore's in pieces, or
/// over a page of byte rings.
pub fn xen_store(input: &[u8], behaviour: &mut Behaviour) {
    let Some((&step, stream)) = input.split_first() else { return };
    if step & 0x80 != 0 {
        let mut bytes = Vec::new();
        let memory = page_of(&mut bytes);
        let Ok(page) = BytePage::new(memory) else { panic!("a page is a page") };
        let mut to = [0; 3000];
        for (step, write) in records(stream) {
            write_over(memory, write);
            let at = [STORE_REQUESTS, STORE_REPLIES, CONSOLE_INPUT, CONSOLE_OUTPUT][usize::from(step & 3)];
            let moved = if step & 4 == 0 { page.read(at, &mut to) } else { page.write(at, write) };
            assert!(moved.as_ref().is_ok_and(|moved| *moved <= 2048) || moved.is_err());
            behaviour.note(moved.map_err(|error| std::mem::discriminant(&error)));
        }
        return;
    }
    let (mut inbox, mut rest, piece) = (Inbox::new(), stream, 1 + usize::from(step) * 8);
    let (mut own, mut front_own) = (BusState::Initialising, BusState::Initialising);
    while !rest.is_empty() {
        let room = match inbox.room() {
            Ok(room) => room,
            Err(error) => return behaviour.note(std::mem::discriminant(&error)),
        };
        let len = room.len().min(piece).min(rest.len());
        assert!(len > 0, "a message that is complete was not seen");
        room[..len].copy_from_slice(&rest[..len]);
        inbox.filled(len);
        rest = &rest[len..];
        let message = match inbox.message() {
            Ok(Some(message)) => message,
            Ok(None) => continue,
            Err(error) => return behaviour.note(std::mem::discriminant(&error)),
        };
        assert_eq!(message.payload.len(), message.header.len as usize);
        behaviour.note((message.header.kind, message.payload.len().checked_ilog2()));
        match message.content() {
            Ok(Content::Reply(value)) => {
                behaviour.note((store::names(value).count(), store::number(value).map(|n| n.leading_zeros())));
                let state = BusState::parse(value);
                let step = back_step(own, state, value.len() != 2);
                assert!(step.next != BusState::Connected || own == step.next || step.action == BackAction::Connect);
                own = step.next;
                front_own = front_step(front_own, state).next;
                behaviour.note((own, front_own));
                let mut message = [0; store::MAX_MESSAGE_BYTES];
                let asked = store::request(&mut message, 1, 0, &Request::Write("x", value));
                assert!(asked.is_ok() || value.len() + 2 > store::MAX_PAYLOAD_BYTES);
            }
            Ok(Content::Failed(error)) => behaviour.note(std::mem::discriminant(&error)),
            Ok(Content::Event { path, token }) => {
                assert!(!path.contains('\0') && !token.contains('\0') && !path.is_empty());
                behaviour.note((path.len(), token.len()));
            }
            Err(error) => behaviour.note(std::mem::discriminant(&error)),
        }
        inbox.clear();
    }
}
