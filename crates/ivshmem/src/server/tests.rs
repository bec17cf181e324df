use super::*;
use std::collections::BTreeMap;

const V1: Shape = Shape { dialect: Dialect::V1, max_peers: 4, vectors: 2 };

/// Takes all that waits for a peer, as (number, descriptor).
fn drain(server: &mut Server, id: u32) -> Vec<(i64, Option<Passed>)> {
    let mut out = Vec::new();
    while let Some(message) = server.next(id).copied() {
        out.push((v1::decode(message.bytes().try_into().unwrap()), message.passed));
        server.sent(id, 0);
    }
    out
}

fn doorbell(peer: u32, vector: u32) -> (i64, Option<Passed>) {
    (peer.into(), Some(Passed::Doorbell { peer, vector }))
}

#[test]
fn a_client_is_greeted_and_the_others_are_told_in_the_order_of_the_specification() {
    let mut server = Server::new(V1);
    assert_eq!(server.join(Seat::Fixed(0), Hears::Nothing, 0), Ok(0));
    assert_eq!(server.join(Seat::Any, Hears::Comings, 0), Ok(1));
    let greeting = [
        (0, None),
        (1, None),
        (-1, Some(Passed::Region)),
        doorbell(0, 0),
        doorbell(0, 1),
        doorbell(1, 0),
        doorbell(1, 1),
    ];
    assert_eq!(drain(&mut server, 1), greeting);
    assert_eq!(server.join(Seat::Any, Hears::Comings, 0), Ok(2));
    assert_eq!(drain(&mut server, 1), [doorbell(2, 0), doorbell(2, 1)]);
    assert_eq!(
        drain(&mut server, 2)[3..],
        [doorbell(0, 0), doorbell(0, 1), doorbell(1, 0), doorbell(1, 1), doorbell(2, 0), doorbell(2, 1)]
    );
    assert!(server.leave(1, 0) && !server.leave(1, 0));
    assert_eq!(drain(&mut server, 2), [(1, None)]);
    assert_eq!(server.join(Seat::Any, Hears::Comings, 0), Ok(1), "the seat is free again");
    assert_eq!(server.join(Seat::Fixed(1), Hears::Comings, 0), Err(Refused::Taken { id: 1 }));
    assert_eq!(server.join(Seat::Fixed(4), Hears::Comings, 0), Err(Refused::NoSeat { id: 4, max_peers: 4 }));
    assert_eq!(server.join(Seat::Any, Hears::Comings, 0), Ok(3));
    assert_eq!(server.join(Seat::Any, Hears::Comings, 0), Err(Refused::Full { max_peers: 4 }));
}

#[test]
fn stock_qemu_hears_of_all_seats_at_once_and_never_again() {
    let mut server = Server::new(V1);
    server.join(Seat::Fixed(0), Hears::Nothing, 0).unwrap();
    server.join(Seat::Fixed(2), Hears::Seats, 0).unwrap();
    let doorbells =
        [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0), (3, 1), (2, 0), (2, 1)].map(|(peer, vector)| doorbell(peer, vector));
    assert_eq!(drain(&mut server, 2)[3..], doorbells);
    for _ in 0..3 {
        server.join(Seat::Fixed(1), Hears::Comings, 0).unwrap();
        assert_eq!(
            drain(&mut server, 1)[3..],
            [doorbell(0, 0), doorbell(0, 1), doorbell(2, 0), doorbell(2, 1), doorbell(1, 0), doorbell(1, 1)]
        );
        server.leave(1, 0);
    }
    assert_eq!(drain(&mut server, 2), []);
    assert!(server.record(2).unwrap().settled);
    let (again, out) = Server::restore(V1, &[server.record(0).unwrap(), server.record(2).unwrap()], 0);
    assert!(out.is_empty() && again.next(2).is_none());
}

#[test]
fn version_2_says_the_same_in_its_words() {
    let dialect = Dialect::V2 { protocol: 0x8001, output_bytes: 0x7f000 };
    let mut server = Server::new(Shape { dialect, max_peers: 2, vectors: 1 });
    server.join(Seat::Any, Hears::Comings, 0).unwrap();
    server.join(Seat::Any, Hears::Comings, 0).unwrap();
    let mut said = |id| {
        let mut out = Vec::new();
        while let Some(message) = server.next(id).copied() {
            let (decoded, len) = v2::Message::decode(message.bytes()).unwrap().unwrap();
            assert_eq!(len, message.bytes().len());
            out.push((decoded, message.passed));
            server.sent(id, 0);
        }
        out
    };
    let init = |id, protocol| {
        (v2::Message::Init { id, max_peers: 2, vectors: 1, protocol, output_bytes: 0x7f000 }, Some(Passed::Region))
    };
    let event = |id| (v2::Message::EventFd { id, vector: 0 }, Some(Passed::Doorbell { peer: id, vector: 0 }));
    assert_eq!(said(0), [init(0, 0xc001), event(0), event(1)]);
    assert_eq!(said(1), [init(1, 0x8001), event(0), event(1)]);
    server.leave(0, 0);
    let gone = server.next(1).copied().unwrap();
    assert_eq!(v2::Message::decode(gone.bytes()), Ok(Some((v2::Message::PeerGone { id: 0 }, 12))));
}

#[test]
fn a_client_that_takes_nothing_has_a_bounded_queue_and_becomes_overdue() {
    let mut server = Server::new(V1);
    server.join(Seat::Fixed(0), Hears::Comings, 5).unwrap();
    drain(&mut server, 0);
    server.join(Seat::Fixed(1), Hears::Comings, 5).unwrap();
    drain(&mut server, 0);
    assert_eq!((server.deadline_ns(), server.waiting(0)), (Some(5 + TIMEOUT_NS), 0), "the other has not been greeted");
    server.leave(1, 10);
    for round in 0..1000u64 {
        for id in 1..4 {
            server.join(Seat::Fixed(id), Hears::Comings, 10 + round).unwrap();
            drain(&mut server, id);
        }
        for id in 1..4 {
            server.leave(id, 10 + round);
        }
        assert!(server.waiting(0) <= 3 * 3, "{}", server.waiting(0));
    }
    assert_eq!(server.deadline_ns(), Some(10 + TIMEOUT_NS));
    assert!(server.overdue(9 + TIMEOUT_NS).is_empty());
    assert_eq!(server.overdue(10 + TIMEOUT_NS), [0]);
    assert_eq!(drain(&mut server, 0), [(1, None)], "what it never heard of is withdrawn");
}

#[test]
fn a_peer_is_settled_when_everybody_has_heard_of_it() {
    let mut server = Server::new(V1);
    server.join(Seat::Fixed(0), Hears::Comings, 0).unwrap();
    assert!(!server.record(0).unwrap().settled);
    drain(&mut server, 0);
    assert!(server.record(0).unwrap().settled);
    server.join(Seat::Fixed(1), Hears::Comings, 0).unwrap();
    drain(&mut server, 1);
    assert!(!server.record(1).unwrap().settled, "0 has not heard of it");
    let changed = server.changed();
    assert!(changed.contains(&0) && changed.contains(&1));
    drain(&mut server, 0);
    assert!(server.record(1).unwrap().settled && server.changed().contains(&1));
    assert_eq!(server.record(0).unwrap().told, 1 << 1);
    server.leave(1, 0);
    assert_eq!(server.record(0).unwrap().told, 0, "it is said at most once");
    assert_eq!(drain(&mut server, 0), [(1, None)]);
}

#[test]
fn a_restarted_server_goes_on_where_its_records_say() {
    let mut server = Server::new(V1);
    server.join(Seat::Fixed(0), Hears::Nothing, 0).unwrap();
    for id in [1, 2] {
        server.join(Seat::Fixed(id), Hears::Comings, 0).unwrap();
        drain(&mut server, 1);
        drain(&mut server, 2);
    }
    // 3 joins; the server dies before it has said so, and 2 while there is none.
    server.join(Seat::Fixed(3), Hears::Comings, 0).unwrap();
    let records: Vec<_> = server.ids().filter(|id| *id != 2).map(|id| server.record(id).unwrap()).collect();
    for record in &records {
        assert_eq!(PeerRecord::decode(&record.encode()), Some(*record));
    }
    let (mut again, out) = Server::restore(V1, &records, 0);
    assert_eq!(out, [3]);
    assert_eq!(again.ids().collect::<Vec<_>>(), [0, 1]);
    assert_eq!(drain(&mut again, 1), [(2, None)], "of 3 it may not have heard");
    assert_eq!(again.record(1).unwrap(), PeerRecord { id: 1, hears: Hears::Comings, settled: true, told: 1 });
    assert_eq!(again.join(Seat::Any, Hears::Comings, 0), Ok(2));
    assert_eq!(drain(&mut again, 1), [doorbell(2, 0), doorbell(2, 1)]);
}

#[test]
fn what_is_no_record_is_none() {
    let good = PeerRecord { id: 63, hears: Hears::Seats, settled: true, told: u64::MAX }.encode();
    assert!(PeerRecord::decode(&good).is_some());
    assert_eq!(PeerRecord::decode(&good[..15]), None);
    for (at, value) in [(0, 64), (4, 2), (6, 3), (7, 1)] {
        let mut bad = good;
        bad[at] = value;
        assert_eq!(PeerRecord::decode(&bad), None);
    }
}

/// What each client believes after any crash and any order of events is who is there; seeded.
#[test]
fn clients_know_who_is_there_whatever_happens() {
    let mut seed = 0x2026_1121_u64;
    let mut dice = move |n: u64| {
        // xorshift64*
        seed ^= seed >> 12;
        seed ^= seed << 25;
        seed ^= seed >> 27;
        (seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % n
    };
    let mut server = Server::new(V1);
    // By client: its own queue in the socket, and what it has read so far.
    let mut known: BTreeMap<u32, BTreeMap<u32, u32>> = BTreeMap::new();
    let mut kept: BTreeMap<u32, PeerRecord> = BTreeMap::new();
    for step in 0..20_000u64 {
        match dice(10) {
            0..3 => {
                let id = dice(4) as u32;
                if server.join(Seat::Fixed(id), Hears::Comings, step).is_ok() {
                    known.insert(id, BTreeMap::new());
                }
            }
            3..5 => {
                let id = dice(4) as u32;
                server.leave(id, step);
                known.remove(&id);
            }
            5 if dice(20) == 0 => {
                let records: Vec<_> = kept.values().copied().collect();
                let (again, out) = Server::restore(V1, &records, step);
                server = again;
                out.iter().for_each(|id| drop((known.remove(id), kept.remove(id))));
                // What was to be said of a going and was not said before the crash, and what was
                // half said of a coming, is left to the state word.
                for (id, client) in &mut known {
                    let peer = &server.peers[id];
                    let to_come = |other: u32| peer.queue.iter().any(|m| m.about == About::Left(other));
                    client.retain(|other, _| other == id || peer.told & 1 << other != 0 || to_come(*other));
                }
                assert_eq!(server.ids().collect::<Vec<_>>(), known.keys().copied().collect::<Vec<_>>());
            }
            _ => {
                // As the shell does: records first, then one message.
                let id = dice(4) as u32;
                if let Some(message) = server.next(id).copied() {
                    let number = v1::decode(message.bytes().try_into().unwrap());
                    let client = known.get_mut(&id).unwrap();
                    match message.passed {
                        Some(Passed::Doorbell { peer, vector }) => {
                            assert!(server.has(peer), "the coming of one who is gone");
                            let next = client.entry(peer).or_default();
                            assert_eq!(*next, vector, "peer {peer} to {id} at step {step}");
                            *next += 1;
                        }
                        None if message.about == About::Greeting => {}
                        // To be told so of one that was never heard of, or twice, would corrupt
                        // some clients.
                        None => drop(client.remove(&(number as u32)).expect("it is gone already")),
                        Some(Passed::Region) => {}
                    }
                    server.sent(id, step);
                }
            }
        }
        for id in server.changed() {
            match server.record(id) {
                Some(record) => drop(kept.insert(id, record)),
                None => drop(kept.remove(&id)),
            }
        }
    }
    for id in server.ids().collect::<Vec<_>>() {
        while let Some(message) = server.next(id).copied() {
            let number = v1::decode(message.bytes().try_into().unwrap()) as u32;
            match message.passed {
                Some(Passed::Doorbell { peer, .. }) => *known.get_mut(&id).unwrap().entry(peer).or_default() += 1,
                None if message.about != About::Greeting => drop(known.get_mut(&id).unwrap().remove(&number)),
                _ => {}
            }
            server.sent(id, 0);
        }
    }
    let here: Vec<u32> = server.ids().collect();
    for (id, peers) in known {
        assert_eq!(peers.keys().copied().collect::<Vec<_>>(), here, "as {id} sees it");
        assert!(peers.values().all(|vectors| *vectors == 2));
    }
}
