use super::tuple::tests::{frame, tcp};
use super::tuple::{ACK, FIN, SYN};
use super::*;
use crate::Nanos;
use crate::plain::{TCP, UDP};

const WEB: PortNumber = 1;
const DB: PortNumber = 2;
const APP: PortNumber = 3;
const GATEWAY: PortNumber = 70;

fn name(text: &str) -> Arc<str> {
    text.into()
}

fn label(text: &str) -> Vec<Who> {
    vec![Who::Label(name(text))]
}

fn labels() -> HashMap<PortNumber, Labels> {
    let of = |names: &[&str]| Labels { names: names.iter().map(|n| name(n)).collect(), ..Labels::default() };
    let gateway = Labels { exempt: true, ..of(&["gateway"]) };
    [(WEB, of(&["web", "front"])), (DB, of(&["db"])), (APP, of(&["app", "front"])), (GATEWAY, gateway)].into()
}

fn policy(otherwise: Action, rules: Vec<Rule>) -> Policy {
    Policy::new(Settings { otherwise, rules, mirrors: vec![] }, &labels(), 1).expect("there is something to check")
}

fn allow(from: &str, to: &str, port: u16) -> Rule {
    Rule {
        from: label(from),
        to: label(to),
        protocol: Protocol::Number(TCP),
        ports: vec![port..=port],
        ..Rule::default()
    }
}

fn at(secs: u64) -> Tick {
    Tick::of(Nanos::SECOND.times(secs))
}

/// The addresses of the ports in both families.
fn ip(port: PortNumber, six: bool) -> String {
    if six { format!("fd00::{port}") } else { format!("10.0.0.{port}") }
}

fn segment(from: (PortNumber, u16), to: (PortNumber, u16), flags: u8, six: bool) -> Vec<u8> {
    frame(&ip(from.0, six), &ip(to.0, six), TCP, &tcp(from.1, to.1, flags))
}

fn send(
    p: &mut Policy,
    now: u64,
    from: (PortNumber, u16),
    to: (PortNumber, u16),
    flags: u8,
    six: bool,
) -> Option<Reason> {
    p.refuse(at(now), (from.0, Roles::ALL), to.0, &segment(from, to, flags, six), false)
}

#[test]
fn without_rules_and_isolation_there_is_no_policy() {
    assert!(Policy::new(Settings::default(), &labels(), 1).is_none());
    let rules = vec![Rule { action: Action::Deny, ..Rule::default() }];
    assert!(Policy::new(Settings { rules, ..Settings::default() }, &labels(), 1).is_some());
}

#[test]
fn an_allowed_connection_passes_both_ways_and_nothing_else_does() {
    for six in [false, true] {
        let mut p = policy(Action::Deny, vec![allow("front", "db", 5432)]);
        let (client, server) = ((WEB, 40_000), (DB, 5432));
        assert_eq!(send(&mut p, 1, server, client, SYN | ACK, six), Some(Reason::Denied), "an answer to nothing");
        assert_eq!(send(&mut p, 1, client, server, SYN, six), None);
        assert_eq!(send(&mut p, 1, server, client, SYN | ACK, six), None);
        assert_eq!(send(&mut p, 1, client, server, ACK, six), None);
        assert_eq!(send(&mut p, 1, client, (DB, 22), SYN, six), Some(Reason::Denied));
        assert_eq!(send(&mut p, 1, (DB, 9), (WEB, 80), SYN, six), Some(Reason::Denied), "the other way");
        assert_eq!(send(&mut p, 1, (APP, 1), (WEB, 5432), SYN, six), Some(Reason::Denied));
        assert_eq!(send(&mut p, 1, (APP, 1), server, SYN, six), None, "of the same group");
        let spoofed = segment(client, server, SYN, six);
        assert_eq!(p.refuse(at(1), (DB, Roles::ALL), WEB, &spoofed, false), Some(Reason::Denied), "from another port");
        assert_eq!(p.counts().connections, 2);
    }
}

#[test]
fn an_answer_passes_against_a_rule_that_denies_its_direction() {
    let deny = Rule { action: Action::Deny, from: label("db"), to: label("web"), ..Rule::default() };
    let mut p = policy(Action::Allow, vec![deny]);
    assert_eq!(send(&mut p, 1, (DB, 5), (WEB, 80), SYN, false), Some(Reason::Denied));
    assert_eq!(send(&mut p, 1, (WEB, 80), (DB, 5), SYN, false), None);
    assert_eq!(send(&mut p, 1, (DB, 5), (WEB, 80), SYN | ACK, false), None);
    assert_eq!(send(&mut p, 1, (DB, 5), (APP, 80), SYN, false), None, "no rule is about these");
    assert_eq!(p.counts().rules, [1]);
    assert_eq!(p.counts().connections, 1, "pairs that no rule is about are not followed");
}

#[test]
fn the_first_rule_that_applies_decides() {
    let deny = Rule { action: Action::Deny, from: label("web"), ..Rule::default() };
    let mut p = policy(Action::Deny, vec![allow("web", "db", 80), deny.clone(), allow("front", "db", 81)]);
    assert_eq!(send(&mut p, 1, (WEB, 1), (DB, 80), SYN, false), None);
    assert_eq!(send(&mut p, 1, (WEB, 1), (DB, 81), SYN, false), Some(Reason::Denied));
    assert_eq!(send(&mut p, 1, (APP, 1), (DB, 81), SYN, false), None);
    assert_eq!(p.counts().rules, [1, 1, 1]);
}

#[test]
fn prefixes_tell_hosts_behind_one_port_apart() {
    let inside = Rule { from: vec![Who::Prefix("10.0.0.0".parse().unwrap(), 30)], ..Rule::default() };
    let six = Rule { to: vec![Who::Prefix("fd00::".parse().unwrap(), 112)], from: label("web"), ..Rule::default() };
    let mut p = policy(Action::Deny, vec![inside, six]);
    let from = |p: &mut Policy, from: &str, to: &str| {
        p.refuse(at(1), (WEB, Roles::ALL), DB, &frame(from, to, UDP, &[0; 8]), false)
    };
    assert_eq!(from(&mut p, "10.0.0.3", "192.0.2.1"), None);
    assert_eq!(from(&mut p, "10.0.0.4", "192.0.2.1"), Some(Reason::Denied));
    assert_eq!(from(&mut p, "fd00::a00:3", "fd00::7"), None);
    assert_eq!(from(&mut p, "fd00::1", "fd00::1:0"), Some(Reason::Denied));
    assert_eq!(from(&mut p, "::10.0.0.3", "fd01::1"), Some(Reason::Denied), "that is no IPv4 address");
}

#[test]
fn icmp_errors_belong_to_the_connection_that_they_are_about() {
    for six in [false, true] {
        let mut p = policy(Action::Deny, vec![allow("web", "db", 80)]);
        let request = segment((WEB, 9), (DB, 80), SYN, six);
        let (protocol, kind) = if six { (tuple::ICMPV6, 1) } else { (tuple::ICMPV4, 3) };
        let error = |about: &[u8]| {
            let payload = [&[kind, 0, 0, 0, 0, 0, 0, 0], &about[14..]].concat();
            frame(&ip(DB, six), &ip(WEB, six), protocol, &payload)
        };
        assert_eq!(
            p.refuse(at(1), (DB, Roles::ALL), WEB, &error(&request), false),
            Some(Reason::Denied),
            "about nothing"
        );
        assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &request, false), None);
        assert_eq!(p.refuse(at(1), (DB, Roles::ALL), WEB, &error(&request), false), None);
        let other = segment((WEB, 9), (DB, 81), SYN, six);
        assert_eq!(p.refuse(at(1), (DB, Roles::ALL), WEB, &error(&other), false), Some(Reason::Denied));
        let echo = frame(&ip(DB, six), &ip(WEB, six), protocol, &[if six { 128 } else { 8 }, 0, 0, 0, 0, 1, 0, 1]);
        assert_eq!(p.refuse(at(1), (DB, Roles::ALL), WEB, &echo, false), Some(Reason::Denied));
    }
}

#[test]
fn the_protocol_icmp_is_that_of_both_families() {
    let rule = Rule { protocol: Protocol::Icmp, ..Rule::default() };
    let mut p = policy(Action::Deny, vec![rule]);
    for (six, request, answer) in [(false, 8, 0), (true, 128, 129)] {
        let protocol = if six { tuple::ICMPV6 } else { tuple::ICMPV4 };
        let echo = |from, to, kind| frame(&ip(from, six), &ip(to, six), protocol, &[kind, 0, 0, 0, 0, 1, 0, 1]);
        assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &echo(WEB, DB, request), false), None);
        assert_eq!(p.refuse(at(1), (DB, Roles::ALL), WEB, &echo(DB, WEB, answer), false), None);
        assert_eq!(send(&mut p, 1, (WEB, 1), (DB, 80), SYN, six), Some(Reason::Denied));
    }
}

#[test]
fn fragments_follow_their_first_one() {
    let mut p =
        policy(Action::Deny, vec![Rule { protocol: Protocol::Number(UDP), ports: vec![80..=80], ..Rule::default() }]);
    let part = |to_port: u8, flags: u8, offset: u8, id: u8| {
        let mut f = frame("10.0.0.1", "10.0.0.2", UDP, &[0, 9, 0, to_port, 0, 8, 0, 0]);
        (f[14 + 5], f[14 + 6], f[14 + 7]) = (id, flags, offset);
        f
    };
    assert_eq!(
        p.refuse(at(1), (WEB, Roles::ALL), DB, &part(80, 0x20, 1, 3), false),
        Some(Reason::Denied),
        "before the first"
    );
    assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &part(80, 0x20, 0, 3), false), None);
    assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &part(80, 0x20, 1, 3), false), None);
    assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &part(80, 0, 2, 3), false), None);
    assert_eq!(
        p.refuse(at(1), (WEB, Roles::ALL), DB, &part(80, 0, 2, 4), false),
        Some(Reason::Denied),
        "of another packet"
    );
    assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &part(81, 0x20, 0, 5), false), Some(Reason::Denied));
    assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &part(81, 0, 1, 5), false), Some(Reason::Denied));
    assert_eq!(p.refuse(at(99), (WEB, Roles::ALL), DB, &part(80, 0, 2, 3), false), Some(Reason::Denied), "too late");
}

#[test]
fn headers_that_are_out_of_sight_do_not_pass_a_rule() {
    let deny = Rule { action: Action::Deny, ..allow("web", "db", 22) };
    let mut p = policy(Action::Allow, vec![deny]);
    let chain = [&[60, 14][..], &[0; 118]].concat();
    let hidden = frame("fd00::1", "fd00::2", 0, &chain);
    assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &hidden[..128], false), Some(Reason::Denied));
    assert_eq!(p.refuse(at(1), (APP, Roles::ALL), DB, &hidden[..128], false), None, "nothing could be denied there");
    let mut tagged = frame("10.0.0.1", "10.0.0.2", TCP, &tcp(1, 22, SYN));
    tagged.splice(12..12, [0x81, 0, 0, 0]);
    assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &tagged, false), Some(Reason::Denied), "a tag hides nothing");
}

#[test]
fn the_link_works_under_every_policy() {
    let mut p = policy(Action::Deny, vec![]);
    let arp = [&[0xff; 12][..], &[8, 6], &[0; 28]].concat();
    assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &arp, true), None);
    assert_eq!(
        p.refuse(at(1), (WEB, Roles::ALL), DB, &frame("fe80::1", "ff02::1:ff00:2", tuple::ICMPV6, &[135; 24]), true),
        None
    );
    assert_eq!(
        p.refuse(at(1), (WEB, Roles::ALL), DB, &[&[0xff; 12][..], &[0x88, 0xb5], &[0; 28]].concat(), false),
        Some(Reason::Denied)
    );
    let dhcp = frame("0.0.0.0", "255.255.255.255", UDP, &[0, 68, 0, 67, 0, 8, 0, 0]);
    assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), GATEWAY, &dhcp, true), None, "the gateway serves everybody");
    assert_eq!(p.refuse(at(1), (WEB, Roles::ALL), DB, &dhcp, true), Some(Reason::Denied));
    assert_eq!(p.counts().connections, 0, "a frame to a group opens none");
}

#[test]
fn isolated_ports_reach_the_others_and_their_community() {
    let mut labels = labels();
    let mut isolate = |port: PortNumber, isolation| labels.entry(port).or_default().isolation = isolation;
    isolate(1, Isolation::Alone);
    isolate(4, Isolation::Alone);
    isolate(5, Isolation::Community(name("a")));
    isolate(6, Isolation::Community(name("a")));
    isolate(7, Isolation::Community(name("b")));
    let mut p = Policy::new(Settings::default(), &labels, 1).expect("ports are isolated");
    let mut pass = |from, to| p.refuse(at(1), (from, Roles::ALL), to, &[0; 14], false);
    for (a, b, want) in
        [(1, 4, false), (1, 5, false), (5, 6, true), (5, 7, false), (1, DB, true), (1, GATEWAY, true), (DB, APP, true)]
    {
        let want = (!want).then_some(Reason::Isolated);
        assert_eq!((pass(a, b), pass(b, a)), (want, want), "{a} and {b}");
    }
}

#[test]
fn when_the_rules_change_connections_are_judged_anew() {
    let mut p = policy(Action::Deny, vec![allow("web", "db", 80), allow("web", "db", 81)]);
    for port in [80, 81] {
        assert_eq!(send(&mut p, 1, (WEB, 9), (DB, port), SYN, false), None);
        assert_eq!(send(&mut p, 1, (DB, port), (WEB, 9), SYN | ACK, false), None);
    }
    let mut next = policy(Action::Deny, vec![allow("web", "db", 81)]);
    next.inherit(p);
    assert_eq!(send(&mut next, 2, (DB, 81), (WEB, 9), ACK, false), None, "still allowed");
    assert_eq!(send(&mut next, 2, (DB, 80), (WEB, 9), ACK, false), Some(Reason::Denied), "no longer");
    assert_eq!(send(&mut next, 2, (WEB, 9), (DB, 80), ACK, false), Some(Reason::Denied));
    assert_eq!(next.counts().connections, 1);
}

#[test]
fn a_port_that_leaves_takes_its_connections_along() {
    let mut p = policy(Action::Deny, vec![allow("front", "db", 80)]);
    assert_eq!(send(&mut p, 1, (WEB, 9), (DB, 80), SYN, false), None);
    assert_eq!(send(&mut p, 1, (APP, 9), (DB, 80), SYN, false), None);
    assert!(p.leave(WEB));
    p.join(WEB, Labels { names: vec![name("stranger")], ..Labels::default() });
    assert_eq!(send(&mut p, 1, (DB, 80), (WEB, 9), SYN | ACK, false), Some(Reason::Denied));
    assert_eq!(send(&mut p, 1, (DB, 80), (APP, 9), SYN | ACK, false), None);
}

#[test]
fn a_connection_survives_a_restart_of_the_daemon() {
    let mut p = policy(Action::Deny, vec![allow("web", "db", 80)]);
    assert_eq!(send(&mut p, 1, (DB, 80), (WEB, 9), ACK, false), Some(Reason::Denied), "the answer comes first");
    assert_eq!(send(&mut p, 1, (WEB, 9), (DB, 80), ACK, false), None, "its sender repeats what was not acknowledged");
    assert_eq!(send(&mut p, 1, (DB, 80), (WEB, 9), ACK, false), None);
    assert_eq!(send(&mut p, 1, (WEB, 9), (DB, 80), FIN | ACK, false), None);
}

#[test]
fn a_mirror_gets_what_its_ports_send_or_receive() {
    let mirror = |of: &[&str], sent, received| {
        let of = of.iter().map(|n| name(n)).collect();
        let mirrors = vec![Mirror { of, to: name("app"), sent, received }];
        Policy::new(Settings { mirrors, ..Settings::default() }, &labels(), 1).expect("there is a mirror")
    };
    let copies = |p: &Policy, from, to| {
        let mut copies = vec![];
        p.mirror(from, to, |port| copies.push(port));
        copies
    };
    let p = mirror(&["web"], true, false);
    assert!(p.is_mirror(APP) && !p.is_mirror(WEB));
    assert_eq!((copies(&p, WEB, DB), copies(&p, DB, WEB)), (vec![APP], vec![]));
    let p = mirror(&["web"], false, true);
    assert_eq!((copies(&p, WEB, DB), copies(&p, DB, WEB)), (vec![], vec![APP]));
    let p = mirror(&[], true, true);
    assert_eq!((copies(&p, WEB, DB), copies(&p, DB, GATEWAY)), (vec![APP], vec![APP]));
    let nobody = Mirror { of: vec![], to: name("ids"), sent: true, received: true };
    let p = Policy::new(Settings { mirrors: vec![nobody], ..Settings::default() }, &labels(), 1).unwrap();
    assert!(copies(&p, WEB, DB).is_empty(), "its port is not there");
}
