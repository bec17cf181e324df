//! DNS over UDP: names of members, names of leases, and what is handed to the host.

use super::*;

pub(super) const A: u16 = 1;
pub(super) const AAAA: u16 = 28;
pub(super) const PTR: u16 = 12;

fn query(id: u16, name: &str, kind: u16) -> Vec<u8> {
    let mut bytes = id.to_be_bytes().to_vec();
    bytes.extend_from_slice(b"\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00");
    for label in name.split('.') {
        bytes.push(label.len() as u8);
        bytes.extend_from_slice(label.as_bytes());
    }
    bytes.push(0);
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&[0, 1]);
    bytes
}

/// Code, number of answers, and the last four bytes of the answer.
fn summary(answer: &[u8]) -> (u8, u8, [u8; 4]) {
    (answer[3] & 15, answer[7], answer[answer.len() - 4..].try_into().unwrap())
}

impl World {
    pub(super) fn dns(&mut self, name: &str, kind: u16) -> Option<Vec<u8>> {
        self.dns_bytes(50, 40_000, &query(0x4321, name, kind))
    }

    fn dns_bytes(&mut self, n: u8, port: u16, bytes: &[u8]) -> Option<Vec<u8>> {
        let mut frames = self.put(&packet::udp(&route(n, ip(n)), port, 53, bytes)).unwrap();
        let frame = frames.pop()?;
        Some(self.dns_answer(&frame, n, port))
    }

    fn dns_answer(&self, frame: &[u8], n: u8, port: u16) -> Vec<u8> {
        let (to, from, to_port, answer) = udp_of(frame);
        assert_eq!((to.destination, to.destination_mac, from, to_port), (ip(n), mac(n), 53, port));
        answer
    }

    pub(super) fn address_of(&mut self, name: &str) -> Option<Ipv4Addr> {
        let answer = self.dns(name, A).unwrap();
        match summary(&answer) {
            (0, 1, octets) => Some(Ipv4Addr::from(octets)),
            (3, 0, _) => None,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn members_and_leases_are_found_by_name_and_by_address() {
    let mut world = World::new();
    world.gateway.set_member(Member { name: "db".into(), mac: None, address: Some(ip(100)) }).unwrap();
    let leased = world.lease(1, Some("Alpha"));
    for name in ["db", "DB", "db.lab.internal", "Db.LAB.Internal"] {
        assert_eq!(world.address_of(name), Some(ip(100)), "{name}");
    }
    assert_eq!(world.address_of("alpha.lab.internal"), Some(leased));
    assert_eq!(world.address_of("gateway"), Some(GATEWAY));
    assert_eq!(world.address_of("router"), Some(ROUTER));
    for name in ["nobody", "nobody.lab.internal", "x.db.lab.internal"] {
        assert_eq!(world.address_of(name), None, "{name}");
    }
    // A name that has no address of the wanted kind is there all the same.
    assert_eq!(world.dns("db", AAAA).map(|a| (a[3] & 15, a[7])), Some((0, 0)));
    assert_eq!(world.dns("lab.internal", A).map(|a| (a[3] & 15, a[7])), Some((0, 0)));

    let pointer = world.dns("100.0.9.10.in-addr.arpa", PTR).unwrap();
    assert!(pointer.ends_with(b"\x00\x11\x02db\x03lab\x08internal\x00"), "{pointer:x?}");
    let last = leased.octets()[3];
    let pointer = world.dns(&format!("{last}.0.9.10.in-addr.arpa"), PTR).unwrap();
    assert!(pointer.ends_with(b"\x05alpha\x03lab\x08internal\x00"));
    assert_eq!(world.dns("200.0.9.10.in-addr.arpa", PTR).map(|a| a[3] & 15), Some(3));

    world.pass(3600);
    assert_eq!(world.address_of("alpha"), None, "the lease is over");
    assert!(world.gateway.remove_member("db"));
    assert_eq!(world.address_of("db"), None);
}

#[test]
fn a_member_without_address_goes_by_what_its_mac_leases() {
    let mut world = World::new();
    world.gateway.set_member(Member { name: "cell".into(), mac: Some(mac(1)), address: None }).unwrap();
    assert_eq!(world.dns("cell", A).map(|a| (a[3] & 15, a[7])), Some((0, 0)), "known, without an address yet");
    let address = world.lease(1, None);
    assert_eq!(world.address_of("cell"), Some(address));
    let last = address.octets()[3];
    let pointer = world.dns(&format!("{last}.0.9.10.in-addr.arpa"), PTR).unwrap();
    assert!(pointer.ends_with(b"\x04cell\x03lab\x08internal\x00"));
}

#[test]
fn a_client_takes_no_name_that_others_trust() {
    let mut world = World::new();
    let names = [
        "wpad",
        "WPAD.lab.internal",
        "isatap",
        "localhost",
        "LocalHost",
        "autodiscover",
        "local",
        "2130706433",
        "0x7f000001",
    ];
    for (n, name) in (1..).zip(names) {
        let address = world.lease(n, Some(name));
        assert_eq!(world.count("dhcp_name_conflicts"), u64::from(n), "{name}");
        assert_eq!((world.address_of(name), world.address_of(&format!("{name}.lab.internal"))), (None, None), "{name}");
        let [a, b, c, d] = address.octets();
        let pointer = world.dns(&format!("{d}.{c}.{b}.{a}.in-addr.arpa"), PTR);
        assert_eq!(pointer.map(|answer| answer[3] & 15), Some(3), "{name}: the address has no name");
        // One port has half of the range only.
        world.pass(3601);
    }
    // The file's owner may.
    world.gateway.set_member(Member { name: "wpad".into(), mac: None, address: Some(ip(100)) }).unwrap();
    assert_eq!(world.address_of("wpad"), Some(ip(100)));
}

#[test]
fn a_client_takes_nobodys_name() {
    let mut world = World::new();
    world.gateway.set_member(Member { name: "db".into(), mac: None, address: Some(ip(100)) }).unwrap();
    let first = world.lease(1, Some("alpha"));
    for (n, name) in [(2, "alpha"), (3, "gateway"), (4, "router")] {
        world.lease(n, Some(name));
    }
    assert_eq!(world.count("dhcp_name_conflicts"), 3);
    assert_eq!(world.address_of("alpha"), Some(first));
    assert_eq!(world.address_of("gateway"), Some(GATEWAY));
    // A member that comes later takes the name away.
    world.gateway.set_member(Member { name: "alpha".into(), mac: None, address: Some(ip(101)) }).unwrap();
    assert_eq!(world.address_of("alpha"), Some(ip(101)));
    let again = world.ask(Ask { client: first, name: Some("alpha"), ..Ask::new(1, DhcpMessageType::Request) });
    assert_eq!(again.unwrap().kind, DhcpMessageType::Nak, "by its name the address is the member's");
}

#[test]
fn names_of_elsewhere_go_to_the_host_and_come_back() {
    let mut world = World::new();
    assert_eq!(world.dns("example.org", A), None);
    let asked = world.gateway.take_queries();
    assert_eq!(asked.len(), 1);
    // The same question under another identification.
    assert_eq!(asked[0].bytes[2..], query(0, "example.org", A)[2..]);
    assert_eq!(world.dns("example.org", A), None, "the client repeats it");
    assert!(world.gateway.take_queries().is_empty(), "and it is asked once");

    let mut answer = asked[0].bytes.clone();
    (answer[2], answer[3], answer[7]) = (0x81, 0x80, 1);
    answer.extend_from_slice(b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x01\x2c\x00\x04\x5d\xb8\xd7\x0e");
    let mut forged = answer.clone();
    forged[0] ^= 1;
    world.gateway.answer(world.now, asked[0].id, forged);
    world.gateway.answer(world.now, asked[0].id + 1, answer.clone());
    assert!(world.sent().is_empty());
    assert_eq!(world.count("dns_upstream_strays"), 2);

    world.gateway.answer(world.now, asked[0].id, answer.clone());
    let frame = world.sent().pop().unwrap();
    let got = world.dns_answer(&frame, 50, 40_000);
    assert_eq!((&got[..2], &got[2..]), (&[0x43, 0x21][..], &answer[2..]));
    // Once only.
    world.gateway.answer(world.now, asked[0].id, answer);
    assert!(world.sent().is_empty());
}

#[test]
fn a_query_without_an_answer_fails_in_time() {
    let mut world = World::new();
    world.dns("example.org", A);
    world.now = world.now.after(Nanos::MILLI.times(4499));
    let next = world.gateway.poll(world.now).unwrap();
    assert_eq!((next.since(world.now), world.sent().len()), (Nanos::MILLI, 0));
    world.now = next;
    world.gateway.poll(world.now);
    let frame = world.sent().pop().unwrap();
    let answer = world.dns_answer(&frame, 50, 40_000);
    assert_eq!((&answer[..2], answer[3] & 15), (&[0x43, 0x21][..], 2));
    assert_eq!(answer[12..], query(0, "example.org", A)[12..]);
    // The host says that no server answered: at once.
    world.dns("example.org", A);
    let id = world.gateway.take_queries().pop().unwrap().id;
    world.gateway.answer(world.now, id, Vec::new());
    assert_eq!(world.sent().len(), 1);
    assert_eq!((world.count("dns_failures"), world.gateway.forwarder.outstanding()), (2, 0));
}

#[test]
fn outstanding_queries_are_bounded_per_source_and_in_all() {
    let mut world = World::new();
    let mut failed = 0;
    for port in 0..6u32 {
        world.port = Some(Token(port));
        for i in 0..70u16 {
            let answer = world.dns_bytes(50, 1000 + i, &query(port as u16, "example.org", A));
            failed += u64::from(answer.is_some_and(|a| a[3] & 15 == 2));
        }
    }
    // Three ports have their 64 each, and each further one half of what is left: some is left for a
    // seventh.
    let taken = 64 * 3 + 32 + 16 + 8;
    assert_eq!(world.gateway.take_queries().len(), taken);
    assert_eq!((failed, world.count("dns_failures")), (6 * 70 - taken as u64, 6 * 70 - taken as u64));
    world.pass(5);
    assert_eq!(world.sent().len(), taken);
    world.port = Some(Token(9));
    assert_eq!(world.dns("example.org", A), None);
}

#[test]
fn without_an_uplink_elsewhere_is_refused() {
    let mut world = World::with(GatewayConfig { forward: false, ..config() }, &LeaseStore::default());
    for (name, kind) in [("example.org", A), ("1.1.1.1.in-addr.arpa", PTR)] {
        assert_eq!(world.dns(name, kind).map(|a| a[3] & 15), Some(5));
    }
    world.gateway.set_forward(true);
    assert_eq!(world.dns("example.org", A), None);
}

#[test]
fn a_long_answer_is_cut_for_udp() {
    let mut world = World::new();
    let plain = query(1, "example.org", A);
    let mut edns = plain.clone();
    edns[11] = 1;
    edns.extend_from_slice(b"\x00\x00\x29\xff\xff\x00\x00\x00\x00\x00\x00");
    for (bytes, room) in [(plain, 512), (edns, 1472)] {
        for length in [room, room + 1] {
            assert_eq!(world.dns_bytes(50, 999, &bytes), None);
            let asked = world.gateway.take_queries().pop().unwrap();
            let mut answer = asked.bytes[..29].to_vec();
            answer[2] = 0x81;
            answer.resize(length, 0x55);
            world.gateway.answer(world.now, asked.id, answer);
            let frame = world.sent().pop().unwrap();
            assert!(frame.len() <= 1514);
            let got = world.dns_answer(&frame, 50, 999);
            let want = if length == room { (room, 0) } else { (29, 2) };
            assert_eq!((got.len(), got[2] & 2), want, "{room} {length}");
        }
    }
}
