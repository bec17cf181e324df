//! DHCP: the exchanges of RFC 2131, over frames.

use super::*;
use crate::gateway::dhcp::{CLIENT_PORT, SERVER_PORT};
use DhcpMessageType::{Ack, Decline, Discover, Inform, Nak, Offer, Release, Request};
use std::collections::HashSet;

/// The exchange in bytes: what a client of RFC 2131 sends, and what it gets, written out by hand.
#[test]
fn the_golden_exchange() {
    let mut world = World::new();
    world.gateway.set_member(Member { name: "web".into(), mac: Some(mac(1)), address: Some(ip(77)) }).unwrap();
    let mut discover = b"\x01\x01\x06\x00\xde\xad\xbe\xef\x00\x00\x80\x00".to_vec();
    discover.extend_from_slice(&[0; 16]);
    discover.extend_from_slice(&mac(1));
    discover.resize(236, 0);
    discover.extend_from_slice(b"\x63\x82\x53\x63\x35\x01\x01\x37\x03\x01\x03\x06\xff");
    let to_all = Route {
        source_mac: mac(1),
        destination_mac: [0xff; 6],
        source: Ipv4Addr::UNSPECIFIED,
        destination: Ipv4Addr::BROADCAST,
    };
    let frames = world.put(&packet::udp(&to_all, 68, 67, &discover)).unwrap();
    let mut want = b"\x02\x01\x06\x00\xde\xad\xbe\xef\x00\x00\x80\x00\x00\x00\x00\x00\x0a\x09\x00\x4d".to_vec();
    want.extend_from_slice(&[0; 8]);
    want.extend_from_slice(&mac(1));
    want.resize(236, 0);
    want.extend_from_slice(b"\x63\x82\x53\x63");
    want.extend_from_slice(b"\x35\x01\x02"); // OFFER
    want.extend_from_slice(b"\x36\x04\x0a\x09\x00\x01"); // server
    want.extend_from_slice(b"\x03\x04\x0a\x09\x00\x02"); // router
    want.extend_from_slice(b"\x01\x04\xff\xff\xff\x00"); // mask
    want.extend_from_slice(b"\x33\x04\x00\x00\x0e\x10"); // lease: 3600 s
    want.extend_from_slice(b"\x06\x04\x0a\x09\x00\x01"); // name server
    want.extend_from_slice(b"\x3a\x04\x00\x00\x07\x08"); // renewal: 1800 s
    want.extend_from_slice(b"\x3b\x04\x00\x00\x0c\x4e"); // rebinding: 3150 s
    want.extend_from_slice(b"\x1a\x02\x05\xdc"); // MTU 1500
    want.extend_from_slice(b"\x1c\x04\x0a\x09\x00\xff"); // broadcast
    want.extend_from_slice(b"\x0f\x0clab.internal");
    want.extend_from_slice(b"\x0c\x03web\xff");
    let (route, from, to, bytes) = udp_of(&frames[0]);
    assert_eq!(bytes, want);
    assert_eq!((from, to, route.destination, route.destination_mac), (67, 68, Ipv4Addr::BROADCAST, [0xff; 6]));

    let end = discover.len() - 1;
    let mut request = discover;
    request[242] = 3;
    request.truncate(end);
    request.extend_from_slice(b"\x32\x04\x0a\x09\x00\x4d\x36\x04\x0a\x09\x00\x01\xff");
    let frames = world.put(&packet::udp(&to_all, 68, 67, &request)).unwrap();
    want[242] = 5;
    assert_eq!(udp_of(&frames[0]).3, want);
    assert_eq!(world.gateway.leases().leases[0].address, ip(77));
}

#[test]
fn an_exchange_gives_an_address_and_answers_go_where_the_client_can_hear_them() {
    let mut world = World::new();
    let offer = world.discover(1, Some("Alpha.example")).unwrap();
    assert_eq!((offer.kind, offer.to_mac, offer.to), (Offer, mac(1), offer.address));
    assert!((16..=23).contains(&offer.address.octets()[3]));
    assert_eq!(offer.option(12), Some(&b"alpha"[..]));
    assert_eq!(world.gateway.take_lease_changes(), [], "an offer is no lease");
    let ack = world.select(1, Some("alpha"), offer.address).unwrap();
    assert_eq!((ack.kind, ack.to_mac, ack.to), (Ack, mac(1), offer.address));
    let changes = world.gateway.take_lease_changes();
    let want = LeaseRecord {
        mac: mac(1),
        address: offer.address.into(),
        name: Some("alpha".into()),
        expires_unix_secs: UNIX + 3600,
    };
    assert_eq!(changes, [LeaseChange::Bound(want)]);
    assert_eq!(world.gateway.take_lease_changes(), []);

    // With the broadcast flag, to all.
    let offer = world.ask(Ask { broadcast: true, ..Ask::new(2, Discover) }).unwrap();
    assert_eq!((offer.to_mac, offer.to), ([0xff; 6], Ipv4Addr::BROADCAST));
    // Renewing: to the address that the client has, which stays.
    world.pass(1800);
    let renewed = world.ask(Ask { client: ack.address, ..Ask::new(1, Request) }).unwrap();
    assert_eq!((renewed.kind, renewed.address, renewed.to), (Ack, ack.address, ack.address));
    let changes = world.gateway.take_lease_changes();
    assert!(
        matches!(&changes[..], [LeaseChange::Bound(record)] if record.expires_unix_secs == UNIX + 1800 + 3600),
        "{changes:?}"
    );
    // Asking again, from the start: the same.
    assert_eq!(world.lease(1, None), ack.address);
}

#[test]
fn an_address_is_free_again_when_its_lease_ran_out_or_was_released() {
    let mut world = World::new();
    let mut held = HashSet::new();
    for n in 1..=8 {
        assert!(held.insert(world.lease(n, None)), "an address twice");
    }
    assert!(world.discover(9, None).is_none());
    assert_eq!(world.count("dhcp_exhausted"), 1);
    let second = world.gateway.leases().leases.iter().find(|l| l.mac == mac(2)).unwrap().address;
    let IpAddr::V4(second) = second else { panic!("IPv6 is off") };
    // Somebody else cannot release it.
    world.ask(Ask { client: second, ..Ask::new(3, Release) });
    assert_eq!((world.gateway.leases().leases.len(), world.count("dhcp_releases")), (8, 0));
    world.ask(Ask { client: second, ..Ask::new(2, Release) });
    assert_eq!(world.lease(9, None), second);
    world.pass(3599);
    assert_eq!(world.gateway.leases().leases.len(), 8);
    world.pass(1);
    assert_eq!(world.gateway.leases().leases.len(), 0);
    let changes = world.gateway.take_lease_changes();
    assert_eq!(changes.len(), 8, "expiry is a change to be kept, once for each address");
    assert!(changes.iter().all(|change| matches!(change, LeaseChange::Freed(_))), "{changes:?}");
    assert!(world.discover(10, None).is_some());
}

#[test]
fn an_offer_that_nobody_takes_is_free_after_ten_seconds() {
    let mut world = World::new();
    for n in 1..=8 {
        world.discover(n, None).unwrap();
    }
    assert!(world.discover(9, None).is_none());
    world.pass(10);
    let offer = world.discover(9, None).unwrap();
    // Taking another server's offer frees ours at once.
    world.ask(Ask { requested: Some(ip(99)), server: Some(ip(3)), ..Ask::new(9, Request) });
    assert!(world.gateway.leases.as_ref().unwrap().at(offer.address).is_none());
}

#[test]
fn wrong_requests_get_a_nak_and_change_nothing() {
    let mut world = World::new();
    let first = world.lease(1, None);
    let wrong = [
        first,                         // somebody's
        ip(99),                        // outside the range
        GATEWAY,                       // ours
        ROUTER,                        // the router's
        ip(0),                         // the network
        Ipv4Addr::new(192, 168, 1, 5), // another network
    ];
    for address in wrong {
        let said = world.select(2, None, address).unwrap();
        assert_eq!((said.kind, said.to, said.to_mac), (Nak, Ipv4Addr::BROADCAST, [0xff; 6]), "{address}");
        let said = world.ask(Ask { requested: Some(address), ..Ask::new(2, Request) }).unwrap();
        assert_eq!(said.kind, Nak, "{address}, init-reboot");
    }
    assert_eq!(world.gateway.leases().leases.len(), 1);
    assert_eq!(world.count("dhcp_naks"), 12);
    // An address of the range that is free is granted to a client that remembers it, even if we do
    // not.
    let said = world.ask(Ask { requested: Some(ip(20)), ..Ask::new(2, Request) });
    if first != ip(20) {
        assert_eq!(said.unwrap().kind, Ack);
    }
}

#[test]
fn a_wish_is_granted_where_it_is_free() {
    let mut world = World::new();
    let offer = world.ask(Ask { requested: Some(ip(21)), ..Ask::new(1, Discover) }).unwrap();
    assert_eq!(offer.address, ip(21));
    let offer = world.ask(Ask { requested: Some(ip(21)), ..Ask::new(2, Discover) }).unwrap();
    assert_ne!(offer.address, ip(21));
}

#[test]
fn a_declined_address_rests() {
    let mut world = World::new();
    let first = world.lease(1, Some("alpha"));
    world.ask(Ask { requested: Some(first), server: Some(GATEWAY), ..Ask::new(2, Decline) });
    assert_eq!(world.count("dhcp_declines"), 0, "another client's word");
    world.ask(Ask { requested: Some(first), server: Some(GATEWAY), ..Ask::new(1, Decline) });
    assert_eq!(world.count("dhcp_declines"), 1);
    let second = world.lease(1, Some("alpha"));
    assert_ne!(first, second);
    assert_eq!(world.select(3, None, first).unwrap().kind, Nak);
    world.pass(601);
    assert_eq!(world.select(3, None, first).unwrap().kind, Ack);
}

#[test]
fn inform_gets_facts_and_no_lease() {
    let mut world = World::new();
    let said = world.ask(Ask { client: ip(200), ..Ask::new(1, Inform) }).unwrap();
    assert_eq!((said.kind, said.address, said.to), (Ack, Ipv4Addr::UNSPECIFIED, ip(200)));
    assert_eq!((said.option(51), said.option(6)), (None, Some(&GATEWAY.octets()[..])));
    assert!(world.gateway.leases().leases.is_empty());
}

#[test]
fn leases_outlive_a_restart() {
    let mut world = World::new();
    let first = world.lease(1, Some("alpha"));
    world.pass(1800);
    let second = world.lease(2, None);
    let mut world = world.restart(600);
    let mut addresses: Vec<_> = world.gateway.leases().leases.iter().map(|l| (l.mac, l.address)).collect();
    addresses.sort();
    assert_eq!(addresses, [(mac(1), first.into()), (mac(2), second.into())]);
    assert_eq!(world.gateway.take_lease_changes(), [], "nothing to write");
    assert_eq!(world.select(3, None, first).unwrap().kind, Nak);
    let renewed = world.ask(Ask { client: first, ..Ask::new(1, Request) }).unwrap();
    assert_eq!((renewed.kind, renewed.option(12)), (Ack, Some(&b"alpha"[..])));
    // The second ran out while no gateway ran.
    let world = world.restart(3500);
    assert_eq!(world.gateway.leases().leases.iter().map(|l| l.mac).collect::<Vec<_>>(), [mac(1)]);
}

#[test]
fn a_file_that_does_not_fit_does_no_harm() {
    let record = |n: u8, address: Ipv4Addr, secs| LeaseRecord {
        mac: mac(n),
        address: address.into(),
        name: Some("-no name-".into()),
        expires_unix_secs: secs,
    };
    let stored = LeaseStore {
        leases: vec![
            record(1, ip(20), UNIX + 100),
            record(2, ip(20), UNIX + 100),                      // an address twice
            record(1, ip(21), UNIX + 100),                      // a client twice
            record(3, GATEWAY, UNIX + 100),                     // our own
            record(4, Ipv4Addr::new(10, 8, 0, 20), UNIX + 100), // another network
            record(5, ip(22), UNIX),                            // over
            record(6, ip(23), u64::MAX),                        // for ever
        ],
    };
    let mut world = World::with(config(), &stored);
    let kept: Vec<_> = world.gateway.leases().leases.iter().map(|l| (l.mac, l.name.clone())).collect();
    assert_eq!(kept, [(mac(1), None), (mac(6), None)]);
    world.pass(3600);
    assert!(world.gateway.leases().leases.is_empty());
}

#[test]
fn members_have_their_addresses_by_mac_or_by_name() {
    let mut world = World::new();
    let set = |world: &mut World, name: &str, m: Option<u8>, a: Option<u8>| {
        world.gateway.set_member(Member { name: name.into(), mac: m.map(mac), address: a.map(ip) })
    };
    set(&mut world, "db", Some(1), Some(100)).unwrap();
    set(&mut world, "Printer", None, Some(20)).unwrap();
    set(&mut world, "laptop", Some(3), None).unwrap();
    assert_eq!(world.lease(1, Some("anything")), ip(100));
    assert_eq!(world.lease(2, Some("printer")), ip(20));
    // A second one that says it is the printer gets a dynamic address, and not the name.
    let said = world.discover(4, Some("printer")).unwrap();
    assert_ne!(said.address, ip(20));
    let said = world.select(4, Some("printer"), said.address).unwrap();
    assert_eq!((said.option(12), world.count("dhcp_name_conflicts")), (None, 1));
    let laptop = world.discover(3, Some("other")).unwrap();
    assert_eq!(laptop.option(12), Some(&b"laptop"[..]));
    // No client gets a member's address by asking for it.
    assert_eq!(world.select(5, None, ip(100)).unwrap().kind, Nak);
    assert_eq!(world.select(5, None, ip(20)).unwrap().kind, Nak);
    for (m, a) in [(None, 1), (None, 2), (None, 255), (Some(9), 100)] {
        assert!(set(&mut world, "new", m, Some(a)).is_err(), "{a}");
    }
}

#[test]
fn a_member_that_is_added_live_ends_what_stands_in_its_way() {
    let mut world = World::new();
    let address = world.lease(1, Some("web"));
    let member = Member { name: "web".into(), mac: Some(mac(2)), address: Some(address) };
    world.gateway.set_member(member).unwrap();
    assert!(world.gateway.leases().leases.is_empty());
    assert_eq!(world.ask(Ask { client: address, ..Ask::new(1, Request) }).unwrap().kind, Nak);
    assert_eq!(world.lease(2, None), address);
    assert_ne!(world.lease(1, Some("web")), address);
    // A member that moves is sent back to ask again, and its old address is free.
    let member = Member { name: "web".into(), mac: Some(mac(2)), address: Some(ip(150)) };
    world.gateway.set_member(member).unwrap();
    assert_eq!(world.ask(Ask { client: address, ..Ask::new(2, Request) }).unwrap().kind, Nak);
    assert_eq!(world.lease(2, None), ip(150));
    assert!(world.gateway.remove_member("web"));
    assert!(!world.gateway.remove_member("web"));
}

#[test]
fn one_port_cannot_take_all_addresses() {
    let mut world = World::new();
    world.port = Some(Token(1));
    let offers = (1..=50).filter(|n| world.discover(*n, None).is_some()).count();
    assert_eq!((offers, world.count("dhcp_over_quota")), (4, 46));
    // Declined ones count on.
    for record in [1, 2, 3, 4] {
        if let Some((address, _)) = world.gateway.leases.as_ref().unwrap().of_mac(mac(record)) {
            world.select(record, None, address);
            world.ask(Ask { requested: Some(address), ..Ask::new(record, Decline) });
        }
    }
    assert_eq!(world.count("dhcp_declines"), 4);
    assert!(world.discover(60, None).is_none());
    // Not even looked for: the quota speaks before the search does.
    let claim = Claim { mac: mac(60), port: Some(Token(1)), fixed: None };
    let never = |_: Ipv4Addr| -> bool { panic!("an address was looked at") };
    let now = world.now;
    assert_eq!(world.gateway.leases.as_mut().unwrap().offer(&claim, None, &never, now), Err(Refusal::Quota));
    world.port = Some(Token(2));
    let moved = world.lease(70, None);
    // A client that comes back by another port counts against that one.
    world.port = Some(Token(3));
    assert_eq!(world.ask(Ask { client: moved, ..Ask::new(70, Request) }).unwrap().kind, Ack);
    for n in 71..74 {
        world.lease(n, None);
    }
    assert!(world.discover(75, None).is_none());
    // A fixed address is outside of any quota.
    world.gateway.set_member(Member { name: "db".into(), mac: Some(mac(76)), address: Some(ip(100)) }).unwrap();
    assert_eq!(world.lease(76, None), ip(100));
}

#[test]
fn what_no_direct_client_sends_is_refused() {
    let mut world = World::new();
    let good = Ask::new(1, Discover).message();
    let to = route(1, Ipv4Addr::UNSPECIFIED);
    let to = Route { destination: Ipv4Addr::BROADCAST, ..to };
    let changes: &[(usize, u8)] = &[
        (0, 2),   // an answer
        (1, 6),   // other hardware
        (2, 8),   // a longer address
        (24, 10), // through a relay
        (33, 99), // another client's hardware address
        (236, 0), // no magic
        (240, 0), // no message type
    ];
    for (at, value) in changes {
        let mut bytes = good.clone();
        bytes[*at] = *value;
        let done = world.put(&packet::udp(&to, 68, 67, &bytes));
        assert_eq!(done, Err(Reason::GatewayRefused), "byte {at}");
    }
    assert_eq!(world.count("dhcp_refused_messages"), changes.len() as u64);
    assert_eq!(world.put(&packet::udp(&to, 68, 67, &good)).unwrap().len(), 1);
}

#[test]
fn a_change_of_one_lease_costs_the_same_whatever_the_table_holds() {
    // A /16 with `others` leases of other clients, each behind a port of its own as in a network of
    // many guests.
    let world = |others: u32| {
        let range = (Ipv4Addr::new(10, 9, 1, 0), Ipv4Addr::new(10, 9, 255, 254));
        let dhcp = Some(DhcpConfig { range, lease_secs: 3600, leases_per_port: None });
        let config = GatewayConfig { prefix: 16, dhcp, ..config() };
        let record = |n: u32| LeaseRecord {
            mac: [6, 0, 0, (n >> 16) as u8, (n >> 8) as u8, n as u8],
            address: Ipv4Addr::from_bits(range.0.to_bits() + 500 + n).into(),
            name: Some(format!("host-{n}")),
            expires_unix_secs: UNIX + 3600,
        };
        World::with(config, &LeaseStore { leases: (0..others).map(record).collect() })
    };
    // The least of several runs, since other work of the machine only adds.
    let mut least = [std::time::Duration::MAX; 2];
    let mut worlds = [world(100), world(16_000)];
    for _ in 0..7 {
        for (world, least) in worlds.iter_mut().zip(&mut least) {
            let address = world.lease(1, Some("alpha"));
            world.gateway.take_lease_changes();
            let begun = std::time::Instant::now();
            for _ in 0..100 {
                let renewed = world.ask(Ask { client: address, ..Ask::new(1, Request) });
                assert_eq!(renewed.unwrap().kind, Ack);
                assert_eq!(world.gateway.take_lease_changes().len(), 1);
            }
            *least = begun.elapsed().min(*least);
            // The tokens come back.
            world.now = world.now.after(Nanos::SECOND.times(10));
        }
    }
    // A table that is copied per change costs more than a hundred times as much.
    assert!(least[1] < least[0] * 8, "100 renewals took {:?} with 100 leases and {:?} with 16,000", least[0], least[1]);
}

#[test]
fn many_leases_that_end_at_once_are_spread_over_several_turns() {
    let range = (Ipv4Addr::new(10, 9, 1, 0), Ipv4Addr::new(10, 9, 255, 254));
    let dhcp = Some(DhcpConfig { range, lease_secs: 3600, leases_per_port: None });
    let record = |n: u32| LeaseRecord {
        mac: [6, 0, 0, 0, (n >> 8) as u8, n as u8],
        address: Ipv4Addr::from_bits(range.0.to_bits() + n).into(),
        name: None,
        expires_unix_secs: UNIX + 10,
    };
    let stored = LeaseStore { leases: (0..1000).map(record).collect() };
    let mut world = World::with(GatewayConfig { prefix: 16, dhcp, ..config() }, &stored);
    let (mut turns, end) = (0, world.now.after(Nanos::SECOND.times(10)));
    world.now = end;
    while world.gateway.poll(end).is_some_and(|due| due <= end) {
        turns += 1;
        assert!(world.gateway.take_lease_changes().len() <= crate::gateway::lease::EXPIRED_PER_CALL);
    }
    assert!(turns >= 1000 / crate::gateway::lease::EXPIRED_PER_CALL, "{turns}");
    assert!(world.gateway.leases().leases.is_empty());
}

#[test]
fn reserved_addresses_are_passed_over_once_and_tried_again_when_they_are_free() {
    let mut world = World::new();
    for n in 16..=22u8 {
        let (name, mac) = (format!("m{n}"), Some(mac(100 + n)));
        world.gateway.set_member(Member { name, mac, address: Some(ip(n)) }).unwrap();
    }
    assert_eq!(world.lease(1, None), ip(23), "the only one that is left");
    assert!(world.discover(2, None).is_none());
    assert!(world.gateway.remove_member("m18"));
    assert_eq!(world.lease(2, None), ip(18));
    assert!(world.discover(3, None).is_none());
}

#[test]
fn a_port_that_floods_with_dhcp_is_throttled_and_others_are_not() {
    let mut world = World::new();
    world.port = Some(Token(3));
    let mut throttled = 0;
    for _ in 0..1000 {
        let to_all = route(1, Ipv4Addr::UNSPECIFIED);
        let to_all = Route { destination_mac: [0xff; 6], destination: Ipv4Addr::BROADCAST, ..to_all };
        let frame = packet::udp(&to_all, CLIENT_PORT, SERVER_PORT, b"no message, but it costs a token");
        match world.put(&frame) {
            Err(Reason::DhcpRate) => throttled += 1,
            other => assert_eq!(other, Err(Reason::GatewayRefused)),
        }
    }
    assert_eq!((throttled, world.count("dhcp_throttled")), (700, 700));
    world.port = Some(Token(4));
    world.lease(2, None);
}
