//! For any input: no panic, no broken table. The lease table is also compared with a simple model.

use super::*;
use crate::gateway::lease::{DECLINE_SPAN, OFFER_SPAN, SKIP_SPAN};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// One valid frame of each kind that the gateway serves.
fn valid_frames() -> Vec<Vec<u8>> {
    let query = b"\x43\x21\x01\x00\x00\x01\x00\x00\x00\x00\x00\x01\x07gateway\x00\x00\x01\x00\x01\
        \x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00";
    let elsewhere = b"\x43\x21\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x01b\x00\x00\x01\x00\x01";
    let dhcp = |kind| Ask { name: Some("alpha"), requested: Some(ip(20)), ..Ask::new(1, kind) }.frame();
    let mut arp = [&[0xff; 6][..], &mac(1), b"\x08\x06\0\x01\x08\0\x06\x04\0\x01", &mac(1)].concat();
    arp.extend_from_slice(&[10, 9, 0, 20, 0, 0, 0, 0, 0, 0, 10, 9, 0, 1]);
    let mut syn = packet::udp(&route(1, ip(20)), 0, 0, &[0; 12]);
    syn[14 + 9] = 6;
    syn[34..54].copy_from_slice(b"\x10\x00\x00\x35\0\0\0\x01\0\0\0\0\x50\x02\x40\0\0\0\0\0");
    smoltcp::wire::TcpPacket::new_unchecked(&mut syn[34..]).fill_checksum(&ip(20).into(), &GATEWAY.into());
    Ipv4Packet::new_unchecked(&mut syn[14..]).fill_checksum();
    vec![
        arp,
        super::link::echo(&route(1, ip(20)), b"some data to carry"),
        packet::udp(&route(1, ip(20)), 999, 53, query),
        packet::udp(&route(1, ip(20)), 999, 53, elsewhere),
        packet::udp(&route(1, ip(20)), 999, 9, b"closed"),
        dhcp(DhcpMessageType::Discover),
        dhcp(DhcpMessageType::Request),
        dhcp(DhcpMessageType::Release),
        dhcp(DhcpMessageType::Decline),
        dhcp(DhcpMessageType::Inform),
        syn,
    ]
}

#[test]
fn every_valid_frame_is_taken_and_every_shorter_one_does_no_harm() {
    let mut world = World::new();
    for frame in valid_frames() {
        assert!(world.put(&frame).is_ok());
        for cut in 0..frame.len() {
            for checksum in [Checksum::Unverified, Checksum::Valid] {
                // A cut frame may still be whole for what it says of itself; it must only not
                // panic.
                let done = world.gateway.input(world.now, &frame[..cut], checksum, None);
                assert!(cut >= 14 || done == Err(Reason::Runt));
            }
        }
        // Cut, with the lengths in its headers set right: the inner parts are read further.
        for cut in 34..frame.len().min(400) {
            let mut short = frame[..cut].to_vec();
            if short[12..14] == [8, 0] {
                let total = (cut - 14) as u16;
                short[16..18].copy_from_slice(&total.to_be_bytes());
                if short[23] == 17 && cut >= 42 {
                    short[38..40].copy_from_slice(&(total - 20).to_be_bytes());
                }
                Ipv4Packet::new_unchecked(&mut short[14..]).fill_checksum();
            }
            let _ = world.gateway.input(world.now, &short, Checksum::Valid, None);
        }
        world.pass(1);
        world.sent();
    }
    check_tables(&world);
}

/// What holds of the lease table in every case.
fn check_tables(world: &World) {
    let leases = world.gateway.leases.as_ref().unwrap();
    let (used, size) = leases.usage();
    assert!(used <= size);
    let stored = world.gateway.leases();
    let mut macs: Vec<_> = stored.leases.iter().map(|l| l.mac).collect();
    macs.sort_unstable();
    macs.dedup();
    assert_eq!(macs.len(), stored.leases.len(), "a MAC with two leases");
    for record in &stored.leases {
        let IpAddr::V4(address) = record.address else { panic!("IPv6 is off") };
        assert!(world.gateway.config.has_host(address) && address != GATEWAY);
        assert_eq!(leases.of_mac(record.mac).map(|(a, _)| a), Some(address));
        if let Some(name) = &record.name {
            assert_eq!(leases.named(name), Some(address));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_do_no_harm(frames in prop::collection::vec((prop::collection::vec(any::<u8>(), 0..200), any::<bool>()), 1..20)) {
        let mut world = World::new();
        for (mut frame, addressed) in frames {
            if addressed && frame.len() >= 14 {
                frame[..6].copy_from_slice(&GATEWAY_MAC);
                frame[6] &= 0xfe;
                frame[12] = 8;
                frame[13] &= 6;
            }
            let _ = world.gateway.input(world.now, &frame, Checksum::Valid, None);
            world.pass(1);
        }
        check_tables(&world);
    }

    #[test]
    fn changed_frames_do_no_harm(
        changes in prop::collection::vec((0usize..11, prop::collection::vec((14usize..400, any::<u8>()), 0..6), 0u64..20), 1..60),
    ) {
        let mut world = World::new();
        let frames = valid_frames();
        for (which, bytes, seconds) in changes {
            let mut frame = frames[which].clone();
            for (at, value) in bytes {
                let end = frame.len();
                if at < end {
                    frame[at] = value;
                }
            }
            if frame[12..14] == [8, 0] {
                fill_header(&mut frame);
            }
            let _ = world.gateway.input(world.now, &frame, Checksum::Valid, Some(Token(1)));
            world.sent();
            for query in world.gateway.take_queries() {
                world.gateway.answer(world.now, query.id, query.bytes);
            }
            world.pass(seconds);
        }
        check_tables(&world);
    }

    #[test]
    fn any_message_to_the_dns_server_is_answered_at_most_once(message in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut world = World::new();
        let frames = world.put(&packet::udp(&route(1, ip(20)), 999, 53, &message)).unwrap();
        prop_assert!(frames.len() <= 1);
        for frame in &frames {
            let answer = udp_of(frame).3;
            // An answer to an answer could go on for ever.
            prop_assert!(answer[2] & 0x80 != 0 && message[2] & 0x80 == 0);
            prop_assert_eq!(&answer[..2], &message[..2]);
        }
    }

    #[test]
    fn any_answer_from_outside_is_delivered_for_its_question_only(mut answer in prop::collection::vec(any::<u8>(), 0..600), honest in 0usize..40) {
        let mut world = World::new();
        let query = b"\x43\x21\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x01b\x00\x00\x01\x00\x01";
        world.put(&packet::udp(&route(1, ip(20)), 999, 53, query)).unwrap();
        let asked = world.gateway.take_queries().pop().unwrap();
        let n = honest.min(asked.bytes.len()).min(answer.len());
        answer[..n].copy_from_slice(&asked.bytes[..n]);
        world.gateway.answer(world.now, asked.id, answer);
        for frame in world.sent() {
            let got = udp_of(&frame).3;
            prop_assert!(got.len() <= 512);
            prop_assert_eq!(&got[..2], &b"\x43\x21"[..]);
        }
    }
}

/// Sets version, lengths and sum of the IPv4 header, so that what is behind it gets read.
fn fill_header(frame: &mut [u8]) {
    let total = (frame.len() - 14) as u16;
    let mut header = Ipv4Packet::new_unchecked(&mut frame[14..]);
    header.set_version(4);
    header.set_header_len(20);
    header.set_total_len(total);
    header.fill_checksum();
}

/// An operation on a lease table, by small numbers.
#[derive(Clone, Debug)]
enum Act {
    Offer { n: u8, port: u32, wants: Option<u8> },
    Bind { n: u8, port: u32, address: u8, name: Option<u8> },
    Release { n: u8, address: u8 },
    Decline { n: u8, address: u8 },
    Revoke { address: u8, keep: u8 },
    Pass { seconds: u64 },
}

fn act() -> impl Strategy<Value = Act> {
    let (n, port, address) = (0u8..12, 0u32..3, 14u8..26);
    let wish = proptest::option::of(address.clone());
    let name = proptest::option::of(0u8..4);
    prop_oneof![
        4 => (n.clone(), port.clone(), wish).prop_map(|(n, port, wants)| Act::Offer { n, port, wants }),
        6 => (n.clone(), port, address.clone(), name).prop_map(|(n, port, address, name)| Act::Bind { n, port, address, name }),
        2 => (n.clone(), address.clone()).prop_map(|(n, address)| Act::Release { n, address }),
        1 => (n.clone(), address.clone()).prop_map(|(n, address)| Act::Decline { n, address }),
        1 => (address, n).prop_map(|(address, keep)| Act::Revoke { address, keep }),
        2 => prop_oneof![Just(1u64), Just(10), Just(60), Just(600)].prop_map(|seconds| Act::Pass { seconds }),
    ]
}

/// The simple table: one map, everything by going through all of it.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    mac: Mac,
    state: LeaseState,
    expires: Nanos,
    name: Option<String>,
    port: Token,
}

#[derive(Default)]
struct Dull(BTreeMap<u8, Row>);

impl Dull {
    fn held_by(&self, mac: Mac) -> Option<u8> {
        self.0.iter().find(|(_, row)| row.mac == mac && row.state != LeaseState::Declined).map(|(a, _)| *a)
    }

    fn free_for(&self, mac: Mac, address: u8) -> bool {
        let allowed = (16..=23).contains(&address) && address != 18;
        allowed && self.0.get(&address).is_none_or(|row| row.mac == mac && row.state != LeaseState::Declined)
    }

    fn over_quota(&self, mac: Mac, port: Token) -> bool {
        let held = self.0.values().filter(|row| row.port == port);
        held.filter(|row| row.mac != mac || row.state == LeaseState::Declined).count() >= 4
    }

    fn put(&mut self, address: u8, row: Row) {
        if let Some(held) = self.held_by(row.mac) {
            self.0.remove(&held);
        }
        self.0.insert(address, row);
    }
}

#[test]
fn addresses_that_a_host_claims_and_leaves_are_given_again() {
    let mut leases = Leases::new((ip(16), ip(23)), 8, 99);
    let (none, all) = (|_: Ipv4Addr| false, |_: Ipv4Addr| true);
    let claim = |n| Claim { mac: mac(n), port: Some(Token(1)), fixed: None };
    let now = Nanos::SECOND;
    assert_eq!(leases.offer(&claim(1), None, &all, now), Err(Refusal::Exhausted));
    // They are looked at once in a while only, so that a full range costs each question little.
    assert_eq!(leases.offer(&claim(1), None, &all, now), Err(Refusal::Exhausted));
    assert_eq!(leases.offer(&claim(1), None, &none, now), Err(Refusal::Exhausted));
    let later = now.after(SKIP_SPAN);
    for n in 1..=8 {
        assert!(leases.offer(&claim(n), None, &none, later).is_ok(), "{n}");
    }
    assert_eq!(leases.offer(&claim(9), None, &none, later), Err(Refusal::Quota));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn the_lease_table_does_what_a_dull_one_does(acts in prop::collection::vec(act(), 1..80)) {
        let mut leases = Leases::new((ip(16), ip(23)), 4, 99);
        let mut dull = Dull::default();
        // An address of the range that belongs to somebody by configuration.
        let reserved = |address: Ipv4Addr| address == ip(18);
        let mut now = Nanos::SECOND;
        for act in acts {
            match act {
                Act::Offer { n, port, wants } => {
                    let (mac, port) = (mac(n), Token(port));
                    let claim = Claim { mac, port: Some(port), fixed: None };
                    let held = dull.held_by(mac);
                    match leases.offer(&claim, wants.map(ip), &reserved, now) {
                        Ok(address) => {
                            let address = address.octets()[3];
                            prop_assert!(dull.free_for(mac, address));
                            if let Some(held) = held {
                                prop_assert_eq!(address, held, "a client keeps what it has");
                            } else if let Some(wish) = wants.filter(|wish| dull.free_for(mac, *wish)) {
                                prop_assert_eq!(address, wish);
                            }
                            if held.is_none_or(|held| dull.0[&held].state == LeaseState::Offered) {
                                prop_assert!(!dull.over_quota(mac, port));
                                let row = Row { mac, state: LeaseState::Offered, expires: now.after(OFFER_SPAN), name: None, port };
                                dull.put(address, row);
                            }
                        }
                        Err(Refusal::Exhausted) => prop_assert!((0..=255).all(|a| !dull.free_for(mac, a))),
                        Err(Refusal::Quota) => prop_assert!(dull.over_quota(mac, port)),
                        Err(Refusal::NotFree) => prop_assert!(false, "an offer chooses what is free"),
                    }
                }
                Act::Bind { n, port, address, name } => {
                    let (mac, port) = (mac(n), Token(port));
                    let claim = Claim { mac, port: Some(port), fixed: None };
                    let name = name.map(|n| format!("name{n}"));
                    let expires = now.after(Nanos::SECOND.times(60));
                    let done = leases.bind(&claim, ip(address), name.clone(), &reserved, now, expires);
                    let want = if !dull.free_for(mac, address) {
                        Err(Refusal::NotFree)
                    } else if dull.over_quota(mac, port) {
                        Err(Refusal::Quota)
                    } else {
                        Ok(())
                    };
                    prop_assert_eq!(done, want);
                    if done.is_ok() {
                        let taken = |name: &String| dull.0.values().any(|row| row.name.as_ref() == Some(name) && row.mac != mac);
                        let kept = dull.held_by(mac).and_then(|held| dull.0[&held].name.clone());
                        let name = name.filter(|name| !taken(name)).or(kept);
                        dull.put(address, Row { mac, state: LeaseState::Bound, expires, name, port });
                    }
                }
                Act::Release { n, address } => {
                    let mine = dull.held_by(mac(n)) == Some(address);
                    prop_assert_eq!(leases.release(mac(n), ip(address)), mine);
                    if mine {
                        dull.0.remove(&address);
                    }
                }
                Act::Decline { n, address } => {
                    let mine = dull.held_by(mac(n)) == Some(address);
                    prop_assert_eq!(leases.decline(mac(n), ip(address), now), mine);
                    if mine {
                        let row = dull.0.get_mut(&address).unwrap();
                        (row.state, row.expires, row.name) = (LeaseState::Declined, now.after(DECLINE_SPAN), None);
                    }
                }
                Act::Revoke { address, keep } => {
                    let stale = dull.0.get(&address).is_some_and(|row| row.mac != mac(keep));
                    prop_assert_eq!(leases.revoke(ip(address), Some(mac(keep))), stale);
                    if stale {
                        dull.0.remove(&address);
                    }
                }
                Act::Pass { seconds } => {
                    now = now.after(Nanos::SECOND.times(seconds));
                    leases.expire(now);
                    dull.0.retain(|_, row| row.expires > now);
                }
            }
            prop_assert_eq!(leases.usage().0 as usize, dull.0.len());
            prop_assert_eq!(leases.next_expiry(), dull.0.values().map(|row| row.expires).min());
            for (address, row) in &dull.0 {
                let lease = leases.at(ip(*address)).expect("the row is in the table");
                let got = (lease.mac, lease.state, lease.expires, lease.name.clone());
                prop_assert_eq!(got, (row.mac, row.state, row.expires, row.name.clone()));
                if let Some(name) = &row.name {
                    prop_assert_eq!(leases.named(name), Some(ip(*address)));
                }
            }
            for n in 0..12 {
                prop_assert_eq!(leases.of_mac(mac(n)).map(|(a, _)| a.octets()[3]), dull.held_by(mac(n)));
            }
            for n in 0..4 {
                let name = format!("name{n}");
                let holder = dull.0.iter().find(|(_, row)| row.name.as_ref() == Some(&name));
                prop_assert_eq!(leases.named(&name), holder.map(|(a, _)| ip(*a)));
            }
        }
    }
}
