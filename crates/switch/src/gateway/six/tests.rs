//! The gateway's IPv6 side under a virtual clock.

use super::*;
use crate::gateway::{DhcpConfig, Elsewhere, GatewayConfig, GatewayPort, LeaseStore, Member, Name6, Remote, Start};
use crate::port::Port as _;
use crate::wait::Token;
use proptest::prelude::*;
use std::sync::Arc;

const MAC: Mac = [2, 0, 0, 0, 0, 0xfe];
const PREFIX: Ipv6Addr = Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, 0);

fn mac(n: u8) -> Mac {
    [2, 0, 0, 0, 1, n]
}

fn host(n: u64) -> Ipv6Addr {
    Ipv6Config::new(PREFIX).host(n)
}

fn config() -> GatewayConfig {
    let range = (Ipv4Addr::new(10, 9, 0, 16), Ipv4Addr::new(10, 9, 0, 23));
    GatewayConfig {
        mac: MAC,
        address: Ipv4Addr::new(10, 9, 0, 1),
        prefix: 24,
        mtu: 1500,
        router: None,
        dns: vec![],
        domain: "lab.internal".into(),
        name: "gateway".into(),
        forward: true,
        dhcp: Some(DhcpConfig { range, lease_secs: 3600, leases_per_port: None }),
        ipv6: Some(Ipv6Config::new(PREFIX)),
    }
}

struct World {
    gateway: Gateway,
    now: Nanos,
}

impl World {
    fn with(stored: &LeaseStore) -> World {
        let now = Nanos::SECOND.times(1000);
        let start = Start { now, unix_secs: 1_800_000_000, entropy: [7; 16] };
        let mut world = World { gateway: Gateway::new(config(), stored, start).unwrap(), now };
        world.gateway.poll(now);
        assert_eq!(world.sent().len(), 1, "it advertises as it starts");
        world
    }

    fn new() -> World {
        World::with(&LeaseStore::default())
    }

    fn sent(&mut self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.gateway.output()).collect()
    }

    fn put(&mut self, n: u8, frame: &[u8]) -> Vec<Vec<u8>> {
        self.gateway.input(self.now, frame, Checksum::Unverified, Some(Token(n.into()))).unwrap();
        let sent = self.sent();
        assert!(sent.iter().all(|f| f[..6] == mac(n) && f[6..12] == MAC), "to who asked alone");
        sent
    }

    fn count(&self, name: &str) -> u64 {
        self.gateway.counters().all().into_iter().find(|(n, _, _)| *n == name).unwrap().2
    }

    /// What the answer to a DHCPv6 message says: its kind, and the addresses with their times.
    fn ask(&mut self, n: u8, kind: u8, server: bool, associations: &[(u8, &[Ipv6Addr])], name: &str) -> Option<Said> {
        let mut bytes = vec![kind, 1, 2, 3, 0, 1, 0, 4, 0, 4, n, n];
        if server {
            bytes.extend([&[0, 2, 0, 10, 0, 3, 0, 1][..], &MAC].concat());
        }
        for (id, addresses) in associations {
            bytes.extend([0, 3, 0, 12 + 28 * addresses.len() as u8, 0, 0, 0, *id, 0, 0, 0, 0, 0, 0, 0, 0]);
            for address in *addresses {
                bytes.extend([&[0, 5, 0, 24][..], &address.octets(), &[0; 8]].concat());
            }
        }
        if !name.is_empty() {
            bytes.extend([0, 39, 0, name.len() as u8 + 2, 0, name.len() as u8]);
            bytes.extend(name.bytes());
        }
        let to = route(n, link_local(&mac(n)), dhcp::SERVERS);
        let sent = self.put(n, &wire::udp(&to, 546, 547, &bytes));
        let [frame] = &sent[..] else { return None };
        let bytes = &frame[62..];
        assert_eq!((&frame[56..58], &bytes[1..4]), (&[2, 34][..], &[1, 2, 3][..]));
        let (mut rest, mut said) = (&bytes[4..], Said { kind: bytes[0], ..Said::default() });
        while !rest.is_empty() {
            let (code, length) = (rest[1], usize::from(u16::from_be_bytes([rest[2], rest[3]])));
            let data = &rest[4..4 + length];
            match code {
                3 => {
                    let mut inner = &data[12..];
                    while !inner.is_empty() {
                        let length = usize::from(inner[3]);
                        if inner[1] == 5 {
                            let address = Ipv6Addr::from(<[u8; 16]>::try_from(&inner[4..20]).unwrap());
                            said.addresses.push((address, u32::from_be_bytes(inner[24..28].try_into().unwrap())));
                        } else {
                            said.status.push(inner[5]);
                        }
                        inner = &inner[4 + length..];
                    }
                }
                13 => said.status.push(data[1]),
                23 => said.dns = data.to_vec(),
                _ => {}
            }
            rest = &rest[4 + length..];
        }
        Some(said)
    }

    /// The data of the records that answer a question over IPv6.
    fn resolve(&mut self, n: u8, labels: &[&str], kind: u8) -> (u8, Vec<Vec<u8>>) {
        let mut query = vec![0, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in labels {
            query.push(label.len() as u8);
            query.extend(label.bytes());
        }
        query.extend([0, 0, kind, 0, 1]);
        let length = query.len();
        let to = route(n, host(0x99), host(1));
        let sent = self.put(n, &wire::udp(&to, 4000, 53, &query));
        let answer = &sent[0][62..];
        let mut rest = &answer[length..];
        let mut records = vec![];
        for _ in 0..answer[7] {
            let bytes = usize::from(rest[11]);
            records.push(rest[12..12 + bytes].to_vec());
            rest = &rest[12 + bytes..];
        }
        (answer[3] & 15, records)
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    kind: u8,
    addresses: Vec<(Ipv6Addr, u32)>,
    status: Vec<u8>,
    dns: Vec<u8>,
}

fn route(n: u8, source: Ipv6Addr, destination: Ipv6Addr) -> Route {
    let destination_mac = if destination.is_multicast() { wire::group_mac(destination) } else { MAC };
    Route { source_mac: mac(n), destination_mac, source, destination }
}

/// A neighbour message about `target`, with an option that tells the sender's address.
fn neighbour(n: u8, kind: u8, source: Ipv6Addr, to: Ipv6Addr, target: Ipv6Addr) -> Vec<u8> {
    let mut message = [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &target.octets()].concat();
    if !source.is_unspecified() {
        message.extend([&[if kind == 135 { 1 } else { 2 }, 1][..], &mac(n)].concat());
    }
    wire::icmp_bytes(&route(n, source, to), 255, &message)
}

fn solicit(n: u8, source: Ipv6Addr) -> Vec<u8> {
    wire::icmp_bytes(&route(n, source, "ff02::2".parse().unwrap()), 255, &[133, 0, 0, 0, 0, 0, 0, 0])
}

/// The duplicate address detection of an address.
fn detect(n: u8, target: Ipv6Addr) -> Vec<u8> {
    neighbour(n, 135, Ipv6Addr::UNSPECIFIED, "ff02::1:ff00:1".parse().unwrap(), target)
}

fn nibbles(address: Ipv6Addr) -> Vec<String> {
    let digits = address.octets().iter().flat_map(|b| [b >> 4, b & 15]).collect::<Vec<_>>();
    let words = digits.into_iter().rev().map(|d| format!("{d:x}"));
    words.chain(["ip6".into(), "arpa".into()]).collect()
}

#[test]
fn a_solicitation_is_answered_at_once_within_its_rate() {
    let mut world = World::new();
    for source in [Ipv6Addr::UNSPECIFIED, link_local(&mac(1))] {
        let [frame] = &world.put(1, &solicit(1, source))[..] else { panic!("an answer") };
        assert_eq!((frame[20], frame[21], frame[54]), (58, 255, 134));
        let to = if source.is_unspecified() { TO_ALL } else { source };
        assert_eq!((&frame[22..38], &frame[38..54]), (&link_local(&MAC).octets()[..], &to.octets()[..]));
        assert_eq!(frame[60..62], [0, 0], "no default router");
        assert!(frame.windows(16).any(|w| w == PREFIX.octets()));
        assert!(
            wire::read(frame, mac(1)).unwrap().is_some_and(|i| wire::icmp_kind(&i, Checksum::Unverified) == Ok(134))
        );
    }
    let answered = (0..100).filter(|_| !world.put(1, &solicit(1, link_local(&mac(1)))).is_empty()).count();
    assert_eq!((answered, world.count("router_solicitations_throttled")), (6, 94));
    assert_eq!(world.put(2, &solicit(2, link_local(&mac(2)))).len(), 1, "another port has its own rate");
}

#[test]
fn what_is_no_solicitation_gets_no_answer() {
    let mut world = World::new();
    let good = solicit(1, link_local(&mac(1)));
    let with = |at: usize, value: u8| {
        let mut frame = good.clone();
        frame[at] = value;
        frame
    };
    // The hop limit of a packet that was routed, another code, a wrong sum, a short option, our own
    // source.
    let option = [&[133, 0, 0, 0, 0, 0, 0, 0][..], &[1, 0, 2, 0, 0, 0, 1, 1]].concat();
    let other = [&[133, 0, 0, 0, 0, 0, 0, 0][..], &[1, 1, 2, 9, 9, 9, 9, 9]].concat();
    let all = "ff02::2".parse().unwrap();
    for frame in [
        with(21, 64),
        with(55, 1),
        with(57, 0),
        wire::icmp_bytes(&route(1, link_local(&mac(1)), all), 255, &option),
        wire::icmp_bytes(&route(1, link_local(&mac(1)), all), 255, &other),
        wire::icmp_bytes(&route(1, link_local(&MAC), all), 255, &[133, 0, 0, 0, 0, 0, 0, 0]),
        wire::icmp_bytes(&route(1, "2001:db8::1".parse().unwrap(), all), 255, &[133, 0, 0, 0, 0, 0, 0, 0]),
    ] {
        let _ = world.gateway.input(world.now, &frame, Checksum::Unverified, None);
        assert_eq!(world.sent(), Vec::<Vec<u8>>::new());
    }
}

/// DHCPv6 messages, and the record of addresses.
const SOLICIT: u8 = 1;
const REQUEST: u8 = 3;
const RENEW: u8 = 5;
const AAAA: u8 = 28;

#[test]
fn members_of_other_machines_keep_their_addresses_and_lost_ones_are_not_extended() {
    let mut world = World::new();
    let lease = world.ask(1, REQUEST, true, &[(1, &[])], "alpha").unwrap().addresses[0].0;
    let taken = host(0x1_0777);
    let remote = Remote { name: Some("web".into()), mac: mac(40), addresses: vec![taken.into()] };
    let tell = |world: &mut World, lost: &[Ipv6Addr]| {
        let lost = lost.iter().copied().map(IpAddr::from);
        world.gateway.set_elsewhere(std::sync::Arc::new(Elsewhere::new([remote.clone()], lost)));
    };
    tell(&mut world, &[]);
    assert_eq!(world.resolve(2, &["web"], AAAA), (0, vec![taken.octets().to_vec()]));
    let nibbles = nibbles(taken);
    let labels: Vec<&str> = nibbles.iter().map(String::as_str).collect();
    let (_, names) = world.resolve(2, &labels, 12);
    assert_eq!(names, [b"\x03web\x03lab\x08internal\x00".to_vec()]);
    // No other member gets it; the member that has it does, when it moves here.
    assert_ne!(world.ask(2, SOLICIT, false, &[(1, &[taken])], "").unwrap().addresses[0].0, taken);
    assert_eq!(world.ask(40, REQUEST, true, &[(1, &[])], "").unwrap().addresses[0].0, taken);
    let again = world.ask(1, RENEW, true, &[(1, &[lease])], "alpha").unwrap();
    assert_eq!(again.addresses, [(lease, 3600)]);
    world.gateway.take_lease_changes();
    tell(&mut world, &[lease]);
    assert_eq!(world.gateway.take_lease_changes(), [LeaseChange::Freed(lease.into())]);
    let moved = world.ask(1, RENEW, true, &[(1, &[lease])], "alpha").unwrap();
    assert_eq!(moved.addresses[0], (lease, 0), "no time is left for the lost one");
    assert!(moved.addresses[1].0 != lease && moved.addresses[1].1 == 3600, "{moved:?}");
}

#[test]
fn advertisements_repeat_and_end_with_a_withdrawal() {
    let mut world = World::new();
    let due = world.gateway.deadline(world.now).unwrap();
    assert_eq!(due, world.now.after(INTERVAL), "nobody is woken before");
    world.gateway.poll(due);
    let [frame] = &world.sent()[..] else { panic!("one") };
    assert_eq!(frame[..6], [0x33, 0x33, 0, 0, 0, 1]);
    world.gateway.set_router6(None, 1800);
    let [frame] = &world.sent()[..] else { panic!("one") };
    assert_eq!(frame[60..62], 1800u16.to_be_bytes(), "there is a way out now");
    world.gateway.set_router6(None, 1800);
    assert!(world.sent().is_empty(), "nothing new");
    world.gateway.withdraw();
    let [frame] = &world.sent()[..] else { panic!("one") };
    let at = frame.windows(4).position(|w| w == [3, 4, 64, 0xc0]).unwrap();
    assert_eq!((&frame[60..62], &frame[at + 4..at + 12]), (&[0, 0][..], &[0; 8][..]));
    assert!(world.put(1, &solicit(1, link_local(&mac(1)))).is_empty() && world.gateway.has_withdrawn());
}

#[test]
fn it_answers_for_its_addresses_and_echoes() {
    let mut world = World::new();
    let from = link_local(&mac(1));
    for target in [host(1), link_local(&MAC)] {
        let [frame] = &world.put(1, &neighbour(1, 135, from, "ff02::1:ff00:1".parse().unwrap(), target))[..] else {
            panic!("an answer for {target}")
        };
        assert_eq!((frame[54], frame[58]), (136, SOLICITED | OVERRIDE));
        assert_eq!((&frame[62..78], &frame[78..86]), (&target.octets()[..], &[&[2, 1][..], &MAC].concat()[..]));
        let ping = wire::icmp_bytes(&route(1, from, target), 64, &[128, 0, 0, 0, 0, 7, 0, 1, 42]);
        let [frame] = &world.put(1, &ping)[..] else { panic!("an echo") };
        assert_eq!((frame[54], &frame[58..]), (129, &[0, 7, 0, 1, 42][..]));
    }
    assert!(world.put(1, &neighbour(1, 135, from, host(1), host(7))).is_empty(), "it is another's");
    // A guest that would like to have our address hears that it is taken.
    let [frame] = &world.put(1, &detect(1, host(1)))[..] else { panic!("a defence") };
    assert_eq!((frame[54], &frame[38..54], world.count("address_conflicts")), (136, &TO_ALL.octets()[..], 1));
    let far = wire::udp(&route(1, host(9), "2001:db8::1".parse().unwrap()), 4000, 53, b"x");
    assert_eq!(world.put(1, &far)[0][54..56], [1, 0], "no route");
    let closed = wire::udp(&route(1, host(9), host(1)), 4000, 54, b"x");
    assert_eq!(world.put(1, &closed)[0][54..56], [1, 4], "no such port");
}

#[test]
fn a_client_leases_renews_and_gives_back() {
    let mut world = World::new();
    let offer = world.ask(1, 1, false, &[(5, &[])], "web").unwrap();
    let [(address, 3600)] = offer.addresses[..] else { panic!("{offer:?}") };
    assert_eq!((offer.kind, &offer.dns[..]), (2, &host(1).octets()[..]));
    let number = address.to_bits() as u64 as u32;
    assert!(number >= DYNAMIC.0 && number <= DYNAMIC.1 && Ipv6Config::new(PREFIX).holds(address));
    assert!(world.gateway.leases().leases.is_empty(), "an offer is no lease");
    let reply = world.ask(1, 3, true, &[(5, &[address])], "web").unwrap();
    assert_eq!((reply.kind, &reply.addresses[..]), (7, &[(address, 3600)][..]));
    assert_eq!(world.gateway.leases().leases[0].address, IpAddr::from(address));
    assert_eq!(world.resolve(9, &["web"], 28), (0, vec![address.octets().to_vec()]));
    assert_eq!(world.resolve(9, &["web"], 1), (0, vec![]), "no IPv4 address, but there is such a name");
    let name: Vec<String> = nibbles(address);
    let name: Vec<&str> = name.iter().map(String::as_str).collect();
    assert_eq!(world.resolve(9, &name, 12), (0, vec![b"\x03web\x03lab\x08internal\0".to_vec()]));
    assert_eq!(world.resolve(9, &["nobody"], 28).0, 3);
    // The same client with another association, as of its firmware, has the same address; not two
    // at once.
    let two = world.ask(1, 3, true, &[(6, &[]), (7, &[])], "").unwrap();
    assert_eq!((&two.addresses[..], &two.status[..]), (&[(address, 3600)][..], &[2][..]));
    let renewed = world.ask(1, 5, true, &[(6, &[address, host(0x1_0042)])], "").unwrap();
    assert_eq!(renewed.addresses, [(address, 3600), (host(0x1_0042), 0)]);
    // Another one gets another address, and neither the name nor the first's address.
    let other = world.ask(2, 3, true, &[(5, &[address])], "web").unwrap();
    assert!(other.addresses[0].0 != address && world.count("dhcp_name_conflicts") == 1);
    let stolen = world.ask(2, 8, true, &[(5, &[address])], "").unwrap();
    assert_eq!((stolen.status, world.gateway.leases().leases.len()), (vec![0], 2));
    // A restart keeps both.
    let stored = world.gateway.leases();
    let text = serde_json::to_string(&stored).unwrap();
    assert_eq!(World::with(&serde_json::from_str(&text).unwrap()).gateway.leases(), stored);
    assert_eq!(world.ask(1, 8, true, &[(5, &[address])], "").unwrap().kind, 7);
    assert_eq!(world.gateway.leases().leases.len(), 1);
    assert_eq!(world.resolve(9, &["web"], 28).0, 3);
}

#[test]
fn rapid_commit_confirm_and_information_are_answered() {
    let mut world = World::new();
    let confirm = |address: Ipv6Addr, world: &mut World| world.ask(1, 4, false, &[(1, &[address])], "").unwrap().status;
    assert_eq!(confirm(host(5), &mut world), [0]);
    assert_eq!(confirm("2001:db8::5".parse().unwrap(), &mut world), [4]);
    assert_eq!(world.ask(1, 4, false, &[], ""), None);
    let said = world.ask(1, 11, false, &[], "").unwrap();
    assert_eq!((said.kind, said.dns), (7, host(1).octets().to_vec()));
    let mut rapid = vec![1, 1, 2, 3, 0, 1, 0, 4, 0, 4, 1, 1, 0, 14, 0, 0];
    rapid.extend([0, 3, 0, 12, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    let to = route(1, link_local(&mac(1)), dhcp::SERVERS);
    assert_eq!(world.put(1, &wire::udp(&to, 546, 547, &rapid))[0][62], 7);
    assert_eq!(world.gateway.leases().leases.len(), 1);
}

#[test]
fn a_member_of_the_file_gets_its_own_address() {
    let mut world = World::new();
    let four = Ipv4Addr::new(10, 9, 0, 7);
    world.gateway.set_member(Member { name: "db".into(), mac: Some(mac(1)), address: Some(four) }).unwrap();
    let own = host(four.to_bits().into());
    assert_eq!(world.ask(1, 3, true, &[(1, &[])], "other").unwrap().addresses, [(own, 3600)]);
    assert_ne!(world.ask(2, 3, true, &[(1, &[own])], "db").unwrap().addresses[0].0, own);
    assert_eq!(world.resolve(9, &["db"], 28).1, [own.octets().to_vec()]);
    world.gateway.set_names6(&[Name6 { name: "db".into(), mac: Some(mac(1)), addresses: vec![host(0x77)] }]);
    assert_eq!(world.ask(1, 1, false, &[(1, &[])], "").unwrap().addresses, [(host(0x77), 3600)]);
    assert_eq!(world.resolve(9, &["db"], 28).1[0], host(0x77).octets());
    let name = nibbles(host(0x77));
    let name: Vec<&str> = name.iter().map(String::as_str).collect();
    assert_eq!(world.resolve(9, &name, 12).1.len(), 1);
}

#[test]
fn an_address_that_the_file_gives_to_another_member_loses_the_name_of_its_claimant() {
    let mut world = World::new();
    let name6 = |name: &str, n: u8, addresses: &[Ipv6Addr]| Name6 {
        name: name.into(),
        mac: Some(mac(n)),
        addresses: addresses.to_vec(),
    };
    let shown = crate::guard::link_local(&mac(4)).to_bits() as u64;
    let (listed, shown) = (host(0xabc), host(shown));
    world.gateway.set_names6(&[name6("rogue", 3, &[])]);
    let detect_all = |world: &mut World| {
        for target in [listed, shown, host(0xdef)] {
            assert!(world.put(3, &detect(3, target)).is_empty());
        }
    };
    detect_all(&mut world);
    assert_eq!(world.resolve(9, &["rogue"], 28).1.len(), 3);
    world.gateway.set_names6(&[name6("rogue", 3, &[]), name6("web", 4, &[listed])]);
    for _ in 0..2 {
        assert_eq!(world.resolve(9, &["rogue"], 28), (0, vec![host(0xdef).octets().to_vec()]));
        assert_eq!(world.resolve(9, &["web"], 28), (0, vec![listed.octets().to_vec()]));
        // Saying so again changes nothing.
        detect_all(&mut world);
    }
    assert!(world.put(4, &detect(4, shown)).is_empty());
    assert_eq!(world.resolve(9, &["web"], 28).1.len(), 2, "it gives itself the address that shows its MAC address");
}

#[test]
fn learned_addresses_are_looked_at_once_for_all_members_of_a_change() {
    let mut world = World::new();
    let four = |n: u8| Ipv4Addr::new(10, 9, 0, n);
    let derived = host(four(100).to_bits().into());
    for target in [derived, host(0xdef)] {
        assert!(world.put(200, &detect(200, target)).is_empty());
    }
    let learned = |world: &World| {
        let learned = &world.gateway.six.as_ref().unwrap().learned;
        (learned.revoked, learned.len())
    };
    assert_eq!(learned(&world), (0, 2));
    for n in 10..110 {
        let member = Member { name: format!("m{n}"), mac: Some(mac(n)), address: Some(four(n)) };
        world.gateway.set_member(member).unwrap();
    }
    assert!(world.put(200, &detect(200, host(0xdef))).is_empty());
    assert_eq!(learned(&world), (1, 1), "one look, and the address of a member is forgotten");
    world.gateway.poll(world.now);
    assert_eq!(learned(&world), (1, 1));
}

#[test]
fn owners_of_addresses_are_told_as_the_file_and_the_leases_change() {
    let mut world = World::new();
    let told = |world: &mut World| {
        world.gateway.take_lease_changes();
        world.gateway.take_reservations()
    };
    assert_eq!(told(&mut world), Some(Reservations { macs: Some(vec![]), owners: vec![] }));
    assert_eq!(told(&mut world), None);
    let four = Ipv4Addr::new(10, 9, 0, 7);
    let derived = host(four.to_bits().into());
    world.gateway.set_member(Member { name: "db".into(), mac: Some(mac(1)), address: Some(four) }).unwrap();
    assert_eq!(
        told(&mut world),
        Some(Reservations { macs: Some(vec![mac(1)]), owners: vec![(derived, Some(mac(1)))] })
    );
    // A lease, and its end.
    let [(leased, _)] = world.ask(3, 3, true, &[(1, &[])], "").unwrap().addresses[..] else { panic!() };
    assert_eq!(told(&mut world), Some(Reservations { macs: None, owners: vec![(leased, Some(mac(3)))] }));
    world.gateway.set_names6(&[Name6 { name: "web".into(), mac: Some(mac(4)), addresses: vec![host(0xabc)] }]);
    let all = told(&mut world).unwrap();
    let mut owners = all.owners;
    owners.sort();
    assert_eq!(owners, [(host(0xabc), Some(mac(4))), (leased, Some(mac(3))), (derived, Some(mac(1)))]);
    assert_eq!(all.macs.map(|macs| macs.len()), Some(2));
    world.ask(3, 8, true, &[(1, &[leased])], "").unwrap();
    assert_eq!(told(&mut world), Some(Reservations { macs: None, owners: vec![(leased, None)] }));
    // No other member has them by saying so.
    for target in [derived, host(0xabc)] {
        assert!(world.put(9, &detect(9, target)).is_empty());
        assert!(world.gateway.six.as_ref().unwrap().learned.mac_of(target).is_none(), "{target}");
    }
}

#[test]
fn addresses_that_members_gave_themselves_have_names() {
    let mut world = World::new();
    world.gateway.set_names6(&[Name6 { name: "cam".into(), mac: Some(mac(3)), addresses: vec![] }]);
    assert_eq!(world.resolve(9, &["cam"], 28), (0, vec![]));
    for target in [link_local(&mac(3)), host(0xabc)] {
        assert!(world.put(3, &detect(3, target)).is_empty());
    }
    assert_eq!(world.resolve(9, &["cam"], 28), (0, vec![host(0xabc).octets().to_vec()]));
    assert!(world.gateway.learned6().contains(&(host(0xabc), mac(3))));
    // It is asked whether it is still there once somebody asks for it, and given up where it is
    // silent.
    world.now = world.now.after(learned::FRESH_SPAN);
    // A listing asks no member.
    assert_eq!(world.gateway.learned6().len(), 2);
    world.gateway.poll(world.now);
    assert!(world.sent().iter().all(|f| f[54] != 135));
    assert_eq!(world.resolve(9, &["cam"], 28).1.len(), 1);
    for _ in 0..5 {
        world.gateway.poll(world.now);
        assert!(world.sent().iter().all(|f| f[54] == 135 && f[..6] == mac(3)));
        world.now = world.now.after(Nanos::SECOND);
    }
    assert_eq!(world.resolve(9, &["cam"], 28), (0, vec![]));
}

#[test]
fn a_listing_for_the_host_is_made_once_however_often_it_is_asked_for() {
    let mut world = World::new();
    assert!(world.put(3, &detect(3, host(0xabc))).is_empty());
    let now = world.now;
    let (mut port, handle) = GatewayPort::new(world.gateway);
    (0..1000).for_each(|_| handle.ask_learned6());
    assert!(handle.learned6().is_empty(), "the worker has not had its turn");
    port.service(now).unwrap();
    let first = handle.learned6();
    assert_eq!(*first, [(host(0xabc), mac(3))]);
    port.service(now).unwrap();
    assert!(Arc::ptr_eq(&first, &handle.learned6()), "it is made when it is asked for");
    handle.ask_learned6();
    handle.withdraw();
    port.service(now).unwrap();
    assert!(handle.learned6().is_empty());
}

proptest! {
    #[test]
    fn no_frame_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), flags in 0u8..8) {
        let mut world = World::new();
        let heads: [&[u8]; 4] = [&[], &[58, 255], &[17, 64], &[0, 255]];
        let (mut frame, head) = ([&MAC[..], &mac(1), &[0x86, 0xdd]].concat(), heads[usize::from(flags & 3)]);
        if !head.is_empty() {
            frame.extend([0x60, 0, 0, 0]);
            frame.extend((bytes.len() as u16).to_be_bytes());
            frame.extend(head);
            frame.extend(link_local(&mac(1)).octets());
            let to = if flags & 4 != 0 { dhcp::SERVERS } else { host(1) };
            frame.extend(to.octets());
        }
        frame.extend(&bytes);
        let _ = world.gateway.input(world.now, &frame, Checksum::Valid, Some(Token(1)));
        prop_assert!(world.sent().len() <= 1);
    }
}

/// The options 16 and 59 of the answer to a solicitation of client `n` with these options.
fn boot_of(world: &mut World, n: u8, options: &[u8]) -> (Option<Vec<u8>>, Option<String>) {
    let bytes = [&[1, 1, 2, 3, 0, 1, 0, 4, 0, 4, n, n][..], options].concat();
    let to = route(n, link_local(&mac(n)), dhcp::SERVERS);
    let sent = world.put(n, &wire::udp(&to, 546, 547, &bytes));
    let mut rest = &sent[0][66..];
    let (mut class, mut url) = (None, None);
    while !rest.is_empty() {
        let (code, length) = (rest[1], usize::from(u16::from_be_bytes([rest[2], rest[3]])));
        match code {
            16 => class = Some(rest[4..4 + length].to_vec()),
            59 => url = Some(String::from_utf8(rest[4..4 + length].to_vec()).unwrap()),
            _ => {}
        }
        rest = &rest[4 + length..];
    }
    (class, url)
}

#[test]
fn a_client_that_asks_is_told_the_url_that_it_boots() {
    let mut world = World::new();
    let config = crate::gateway::BootConfig {
        url6: Some("tftp://[fd00::5]/x".into()),
        architectures6: vec![(7, "tftp://[fd00::5]/ipxe.efi".into()), (16, "http://[fd00::5]/ipxe.efi".into())],
        ipxe6: Some("http://[fd00::5]/start".into()),
        ..Default::default()
    };
    world.gateway.set_boot(crate::gateway::BootTable { all: Some(config), of: [].into() });
    let requested = [0, 6, 0, 4, 0, 23, 0, 59];
    let with = |more: &[u8]| [&requested[..], more].concat();
    let url = |text: &str| (None, Some(text.to_string()));
    assert_eq!(boot_of(&mut world, 1, &[]), (None, None), "it did not ask");
    assert_eq!(boot_of(&mut world, 1, &[0, 6, 0, 3, 0, 23, 59]), (None, None), "half of a code");
    assert_eq!(boot_of(&mut world, 1, &requested), url("tftp://[fd00::5]/x"));
    let uefi = [0, 61, 0, 2, 0, 7];
    assert_eq!(boot_of(&mut world, 1, &with(&uefi)), url("tftp://[fd00::5]/ipxe.efi"));
    let ipxe = [&uefi[..], b"\0\x0f\0\x06\0\x04iPXE"].concat();
    assert_eq!(boot_of(&mut world, 1, &with(&ipxe)), url("http://[fd00::5]/start"));
    // Vendor class: enterprise 343, and the text with its length.
    let http = b"\0\x10\0\x1b\0\0\x01\x57\0\x15HTTPClient:Arch:00016\0\x3d\0\x02\0\x10";
    let class = b"\0\0\x01\x57\0\x0aHTTPClient".to_vec();
    assert_eq!(boot_of(&mut world, 1, http), (Some(class), Some("http://[fd00::5]/ipxe.efi".into())));
    assert_eq!(world.count("boot_answers"), 4);
    assert_eq!(boot_of(&mut world, 1, &[0, 16, 0, 3, 0, 0, 1]), (None, None), "a class that is cut");
}
