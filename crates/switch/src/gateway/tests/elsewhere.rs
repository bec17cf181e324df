//! Members of other machines, and addresses that were lost to them: names and leases of IPv4.

use super::dns::{A, AAAA, PTR};
use super::*;
use crate::gateway::{Elsewhere, Remote};
use DhcpMessageType::{Ack, Nak, Request};

fn remote(name: &str, n: u8, addresses: &[&str]) -> Remote {
    let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
    Remote { name: (!name.is_empty()).then(|| name.into()), mac: mac(n), addresses }
}

impl World {
    fn tell(&mut self, members: Vec<Remote>, lost: &[u8]) {
        let lost = lost.iter().map(|last| IpAddr::from(ip(*last)));
        self.gateway.set_elsewhere(Arc::new(Elsewhere::new(members, lost)));
    }

    /// The name of an address, if it has one.
    fn name_of(&mut self, last: u8) -> Option<String> {
        let answer = self.dns(&format!("{last}.0.9.10.in-addr.arpa"), PTR).unwrap();
        let tail = b"\x03lab\x08internal\x00";
        let name = answer.strip_suffix(&tail[..]).filter(|_| answer[7] == 1)?;
        let from = name.iter().rposition(|byte| *byte < 0x20)?;
        Some(String::from_utf8(name[from + 1..].to_vec()).unwrap())
    }
}

#[test]
fn members_of_other_machines_are_found_by_name_and_by_address() {
    let mut world = World::new();
    world
        .tell(vec![remote("Web", 40, &["10.9.0.120", "fd00::12", "10.9.0.121"]), remote("", 41, &["10.9.0.122"])], &[]);
    let (four, six) = (world.dns("web.lab.internal", A).unwrap(), world.dns("WEB", AAAA).unwrap());
    assert_eq!((four[3] & 15, four[7], four[four.len() - 4..].to_vec()), (0, 2, vec![10, 9, 0, 121]));
    assert_eq!((six[7], six[six.len() - 16..].to_vec()), (1, [&[0xfd][..], &[0; 14], &[0x12]].concat()));
    assert_eq!((world.name_of(120), world.name_of(121)), (Some("web".into()), Some("web".into())));
    assert_eq!((world.name_of(122), world.name_of(123)), (None, None), "one without a name");
    world.tell(vec![remote("web", 40, &["10.9.0.130"])], &[]);
    assert_eq!(
        (world.address_of("web"), world.name_of(120)),
        (Some(ip(130)), None),
        "the new table in place of the old"
    );
    world.tell(vec![], &[]);
    assert_eq!((world.address_of("web"), world.name_of(130)), (None, None));
}

#[test]
fn what_this_machine_has_wins() {
    let mut world = World::new();
    world.gateway.set_member(Member { name: "db".into(), mac: None, address: Some(ip(100)) }).unwrap();
    let leased = world.lease(1, Some("alpha"));
    let nameless = world.lease(2, None);
    let text = |address: Ipv4Addr| address.to_string();
    let others = vec![
        remote("db", 40, &["10.9.0.120"]),
        remote("alpha", 41, &["10.9.0.121"]),
        remote("gateway", 42, &["10.9.0.122"]),
        remote("router", 43, &["10.9.0.123"]),
        remote("thief", 44, &["10.9.0.100", &text(leased), &text(nameless), "10.9.0.1", "10.9.0.2", "10.9.0.124"]),
    ];
    world.tell(others, &[]);
    for (name, address) in [("db", ip(100)), ("alpha", leased), ("gateway", GATEWAY), ("router", ROUTER)] {
        assert_eq!(world.address_of(name), Some(address), "{name}");
        assert_eq!(world.name_of(address.octets()[3]).as_deref(), Some(name));
    }
    assert_eq!(world.name_of(nameless.octets()[3]), None, "it is here, without a name");
    // Of the other's addresses those remain that no member here has.
    let answer = world.dns("thief", A).unwrap();
    assert_eq!((answer[7], world.address_of("thief")), (1, Some(ip(124))));
    // The lease goes on, and another one takes it over when it has ended.
    let kept = world.ask(Ask { client: leased, ..Ask::new(1, Request) }).unwrap();
    assert_eq!((kept.kind, kept.address), (Ack, leased));
    world.pass(3601);
    assert_eq!(world.name_of(leased.octets()[3]).as_deref(), Some("thief"));
}

#[test]
fn no_address_of_another_machine_is_leased_but_to_the_member_that_has_it() {
    let mut world = World::new();
    // All but two of the range, 16 to 23.
    let others = (16..=21u8).map(|last| remote("", 100 + last, &[&ip(last).to_string()])).collect();
    world.tell(others, &[]);
    let asked = world.discover(1, None).unwrap().address;
    assert!([ip(22), ip(23)].contains(&asked), "{asked}");
    assert_eq!(world.ask(Ask { requested: Some(ip(17)), ..Ask::new(2, Request) }).map(|said| said.kind), Some(Nak));
    // One that moves here gets its own, asked for or not.
    assert_eq!(world.lease(117, None), ip(17));
    world.tell(vec![], &[]);
    let mut free: Vec<_> = (3..=8).filter_map(|n| world.discover(n, None)).map(|said| said.address).collect();
    free.sort();
    assert_eq!(free.len(), 6, "what is not said any more is free: {free:?}");
}

#[test]
fn a_lost_address_is_nobodys_at_once_until_it_is_given_back() {
    let mut world = World::new();
    world.gateway.set_member(Member { name: "db".into(), mac: Some(mac(9)), address: Some(ip(100)) }).unwrap();
    let (leased, fixed) = (world.lease(1, Some("alpha")), world.lease(9, None));
    assert_eq!(fixed, ip(100));
    world.gateway.take_lease_changes();
    world.tell(vec![], &[leased.octets()[3], 100]);
    assert_eq!(world.gateway.take_lease_changes(), [LeaseChange::Freed(leased.into())], "the configuration's stays");
    assert_eq!(world.address_of("alpha"), None);
    // Renewing, and asking for it after a restart.
    for ask in [Ask { client: leased, ..Ask::new(1, Request) }, Ask { requested: Some(leased), ..Ask::new(1, Request) }]
    {
        assert_eq!(world.ask(ask).unwrap().kind, Nak);
    }
    assert_eq!(world.ask(Ask { client: ip(100), ..Ask::new(9, Request) }).unwrap().kind, Ack);
    let other = world.lease(1, Some("alpha"));
    assert_ne!(other, leased);
    for n in 2..=8 {
        assert_ne!(world.discover(n, None).map(|said| said.address), Some(leased), "{n}");
    }
    // Also to the member that has it on the other machine.
    world.tell(vec![remote("alpha", 50, &[&leased.to_string()])], &[leased.octets()[3]]);
    assert_eq!(world.ask(Ask { requested: Some(leased), ..Ask::new(50, Request) }).unwrap().kind, Nak);
    world.pass(20);
    world.tell(vec![], &[]);
    assert_eq!(world.ask(Ask { requested: Some(leased), ..Ask::new(2, Request) }).unwrap().kind, Ack);
}

#[test]
fn a_port_made_anew_after_a_panic_knows_of_other_machines() {
    let start = Start { now: Nanos::SECOND, unix_secs: UNIX, entropy: [7; 16] };
    let (mut before, handle) = GatewayPort::new(Gateway::new(config(), &LeaseStore::default(), start).unwrap());
    handle.set_elsewhere(Elsewhere::new([remote("old", 39, &["10.9.0.119"])], []));
    handle.set_elsewhere(Elsewhere::new([remote("web", 40, &["10.9.0.120"])], [ip(16).into()]));
    // What was told waits for no port any more.
    crate::port::Port::service(&mut before, Nanos::SECOND).unwrap();
    drop(before);
    let mut port = handle.restart(Nanos::SECOND.times(2)).unwrap();
    crate::port::Port::service(&mut port, Nanos::SECOND.times(2)).unwrap();
    assert_eq!(port.gateway_names("web"), vec![IpAddr::from(ip(120))]);
    assert_eq!(port.gateway_names("old"), Vec::<IpAddr>::new());
}
