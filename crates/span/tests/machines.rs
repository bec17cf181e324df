//! Several machines on a virtual clock: joins, moves, losses, partitions, deaths, conflicts,
//! floods.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use proptest::prelude::*;
use tombolo_span::control::{MAX_CHANGES_PER_S, MAX_JUMP};
use tombolo_span::member::MAX_MEMBERS;
use tombolo_span::message::{Change, Claim, Known, Network as Joined, Number};
use tombolo_span::simulation::{NETWORK, Network, World, mac};
use tombolo_span::{Action, Address, Control, Home, Local, Member, PeerState, Settings};

const S: Duration = Duration::from_secs(1);

fn quick() -> Network {
    Network { delay: (Duration::from_micros(200), Duration::from_millis(2)), loss: 0.0 }
}

fn ip(number: u32) -> IpAddr {
    let [_, b, c, d] = number.to_be_bytes();
    [10, b, c, d].into()
}

fn member(number: u32) -> Member {
    let addresses = vec![Address { ip: ip(number), fixed: true }];
    Member { mac: mac(number), name: Some(format!("m-{number}")), addresses }
}

fn leased(number: u32, address: u32) -> Member {
    Member { addresses: vec![Address { ip: ip(address), fixed: false }], ..member(number) }
}

/// `machines` machines that run, with `members` members each.
fn world(machines: usize, members: u32, network: Network) -> World {
    let mut world = World::new(machines, network, Settings::new("-"), 1);
    for at in 0..machines {
        for number in 0..members {
            world.add(at, member(at as u32 * 1000 + number));
        }
        world.start(at);
    }
    let end = 60 * S;
    assert!(world.until(end, World::is_settled), "all machines know all members");
    world
}

#[test]
fn a_member_that_comes_or_goes_is_known_everywhere_after_one_message() {
    let mut world = world(5, 3, quick());
    // Between two questions: one message to each of the others, and nothing else.
    world.pass(10 * S);
    let before = world.messages;
    world.add(2, member(77));
    assert_eq!(world.messages - before, 4);
    let begin = world.now;
    assert!(world.until(begin + S, |world| world.all_know(2, mac(77))));
    assert!(world.now - begin <= Duration::from_millis(2), "{:?}", world.now - begin);
    world.remove(2, mac(77));
    assert!(world.until(begin + S, World::is_settled));
    assert_eq!(world.place(0, mac(77)), None);
}

#[test]
fn a_member_that_moves_is_followed_although_its_old_machine_still_lists_it() {
    let mut world = world(4, 2, quick());
    // The old switch's table keeps the entry, but no frame comes any more.
    world.machines[0].here.get_mut(&mac(0)).unwrap().sends = false;
    let moved = world.machines[0].here[&mac(0)].member.clone();
    for to in [1, 2, 3, 1] {
        world.pass(3 * S);
        for other in 1..4 {
            world.machines[other].here.remove(&mac(0));
        }
        let begin = world.now;
        world.add(to, moved.clone());
        assert!(world.until(begin + S, |world| {
            (0..4).all(|at| at == to || world.place(at, mac(0)) == Some(&format!("node-{to:03}")))
        }));
    }
    // Back to where it was: it sends there again.
    world.machines[1].here.remove(&mac(0));
    world.machines[0].here.get_mut(&mac(0)).unwrap().sends = true;
    let end = world.now + 5 * S;
    assert!(world.until(end, |world| (1..4).all(|at| world.place(at, mac(0)) == Some("node-000"))));
    assert!(world.machines.iter().all(|machine| machine.control.as_ref().unwrap().conflicts().is_empty()));
}

#[test]
fn a_machine_that_starts_again_does_not_take_back_what_moved_away() {
    let mut world = world(3, 2, quick());
    world.machines[0].here.get_mut(&mac(0)).unwrap().sends = false;
    world.pass(30 * S);
    let moved = world.machines[0].here[&mac(0)].member.clone();
    world.add(1, moved);
    world.pass(S);
    world.kill(0);
    world.machines[0].tables.clear();
    world.start(0);
    world.pass(30 * S);
    assert_eq!(world.place(0, mac(0)), Some("node-001"));
    assert_eq!(world.place(2, mac(0)), Some("node-001"));
}

#[test]
fn two_members_with_one_mac_address_do_not_make_the_machines_fight() {
    let mut world = world(3, 1, quick());
    world.add(0, member(500));
    world.add(1, member(500));
    world.pass(60 * S);
    let before = world.messages;
    world.pass(30 * S);
    // Questions and answers of 30 s between three machines are 120; a fight would be more.
    assert!(world.messages - before < 160, "{}", world.messages - before);
    let conflicts = world.machines[0].control.as_ref().unwrap().conflicts();
    assert!(conflicts.iter().any(|c| c.what == "02:00:00:00:01:f4" && c.machines.len() == 2), "{conflicts:?}");
    assert!(world.machines.iter().any(|m| m.events.iter().any(|e| e.contains("two machines have a member"))));
    let places = [world.place(2, mac(500)), world.place(2, mac(500))];
    assert!(places[0].is_some());
}

/// Has a file say what belongs to which machine.
fn file(control: &mut Control, homes: Vec<Home>) {
    control.homes(BTreeMap::from([(NETWORK.into(), homes)]));
}

/// The real control of a machine that behaves, and of a hostile one that claims whatever it likes.
struct Attack {
    world: World,
    version: u64,
    epoch: u64,
    count: u64,
}

impl Attack {
    /// Machine 0 has member 0, and machine 3 is hostile: its program is the test.
    fn new() -> Attack {
        let mut world = world(4, 1, quick());
        world.pass(10 * S);
        world.kill(3);
        Attack { world, version: 1, epoch: 9, count: 0 }
    }

    /// Claims members in the name of machine 3, or withdraws its claims.
    fn says(&mut self, came: Vec<Claim>, went: Vec<[u8; 6]>) {
        self.count += 1;
        let networks = vec![Joined { name: NETWORK.into(), end: None, came, went }];
        let bytes = Change { number: Number { epoch: self.epoch, count: self.count }, networks }.encode();
        let now = self.world.now;
        for at in 0..3 {
            let control = self.world.machines[at].control.as_mut().unwrap();
            if self.count == 1 {
                let nothing = Change { number: Number { epoch: self.epoch, count: 0 }, networks: vec![] };
                control.answered("node-003", &tombolo_span::message::KnownAnswer::All(nothing).encode(), now).unwrap();
            }
            control.heard("node-003", &bytes, now).unwrap();
            self.world.look(at);
        }
    }

    /// The next message is the first one of a program that started again.
    fn epoch_ends(&mut self) {
        (self.epoch, self.count) = (self.epoch + 1, 0);
    }

    /// Its machine still lists it, silent, while it sends at another one.
    fn moves_member_0(&mut self) {
        self.world.machines[0].here.get_mut(&mac(0)).unwrap().sends = false;
        self.world.add(1, member(0));
        let begin = self.world.now;
        assert!(self.world.until(begin + 30 * S, |world| world.place(2, mac(0)) == Some("node-001")));
        assert!(self.world.now - begin < 8 * S, "{:?}", self.world.now - begin);
    }

    fn claims_member_0(&mut self) {
        self.version += 2;
        let claim = Claim { member: member(0), version: self.version, placed: true };
        self.says(vec![claim], vec![]);
    }

    /// How many of the machines 1 and 2 take member 0 for that of machine 0.
    fn right(&self) -> usize {
        (1..3).filter(|at| self.world.place(*at, mac(0)) == Some("node-000")).count()
    }
}

#[test]
fn a_machine_that_claims_a_member_of_another_one_again_and_again_has_it_for_a_moment_only() {
    for withdraws in [false, true] {
        let mut attack = Attack::new();
        let (mut right, mut all) = (0, 0);
        for round in 0..300 {
            attack.claims_member_0();
            attack.world.pass(Duration::from_millis(400));
            if withdraws && round % 2 == 1 {
                attack.says(vec![], vec![mac(0)]);
            }
            right += attack.right();
            all += 2;
        }
        assert!(right * 100 > all * 96, "{right} of {all} looks in two minutes");
        for at in 1..3 {
            let machine = &attack.world.machines[at];
            let named =
                |text: &String| text.contains("machine node-003: two machines have") && text.contains("node-000");
            assert!(machine.events.iter().any(named), "{:?}", machine.events);
            assert!(machine.events.len() < 12, "named now and then, not each time: {:?}", machine.events);
        }
        attack.claims_member_0();
        let conflicts = attack.world.machines[1].control.as_ref().unwrap().conflicts();
        assert!(conflicts.iter().any(|c| c.what == "02:00:00:00:00:00" && c.winner == "node-000"), "{conflicts:?}");
    }
}

#[test]
fn a_machine_that_claims_a_member_before_it_runs_does_not_keep_it_from_the_machine_of_the_file() {
    // Also one that claims it without a pause while the other machines start again.
    for starts_again in [false, true] {
        let mut attack = Attack::new();
        let at_home = || vec![Home { machine: "node-000".into(), name: None, addresses: None, mac: Some(mac(0)) }];
        let tell = |attack: &mut Attack, at: usize| {
            file(attack.world.machines[at].control.as_mut().unwrap(), at_home());
        };
        (0..3).for_each(|at| tell(&mut attack, at));
        attack.world.remove(0, mac(0));
        attack.world.pass(S);
        attack.claims_member_0();
        attack.world.pass(5 * S);
        assert_eq!(attack.world.place(1, mac(0)), Some("node-003"), "any machine may have it");
        attack.world.add(0, member(0));
        let (mut right, mut all) = (0, 0);
        for round in 0..400 {
            if starts_again && round == 150 {
                attack.world.kill(1);
                attack.world.start(1);
                tell(&mut attack, 1);
                attack.epoch_ends();
            }
            attack.claims_member_0();
            attack.world.pass(Duration::from_millis(400));
            // The machine that started learns it when the member's machine claims it again, five times
            // in a minute.
            if !(starts_again && (150..310).contains(&round)) {
                right += attack.right();
                all += 2;
            }
        }
        assert!(right * 100 > all * 96, "{right} of {all} looks, {starts_again}");
        let conflicts = attack.world.machines[2].control.as_ref().unwrap().conflicts();
        assert!(conflicts.iter().any(|c| c.what == "02:00:00:00:00:00" && c.winner == "node-000"), "{conflicts:?}");
        let named = |text: &String| text.contains("machine node-003: two machines have");
        assert!(attack.world.machines[2].events.iter().any(named));
        // It can move from there all the same.
        attack.says(vec![], vec![mac(0)]);
        attack.moves_member_0();
    }
}

#[test]
fn a_member_that_was_contested_can_still_move_and_is_followed_after_it_is_silent() {
    let mut attack = Attack::new();
    for _ in 0..10 {
        attack.claims_member_0();
        attack.world.pass(S);
    }
    attack.says(vec![], vec![mac(0)]);
    assert_eq!(attack.right(), 2);
    // Now it does move, and its old machine still lists it.
    attack.moves_member_0();
}

#[test]
fn what_a_file_gives_to_a_machine_no_other_one_takes_and_a_member_that_moves_takes_it_along() {
    let mut all = ["a", "b", "c", "x"].map(|name| (name, Control::new(Settings::new(name), 1)));
    // 10 to 19 are leased by "x", whose name sorts last, 5 and "web" are of its member.
    let home =
        |name: Option<&str>, addresses| Home { machine: "x".into(), name: name.map(Into::into), addresses, mac: None };
    let homes = [home(None, Some((ip(10), ip(19)))), home(None, Some((ip(5), ip(5)))), home(Some("web"), None)];
    for (_, control) in &mut all {
        ["a", "b", "c", "x"].into_iter().for_each(|name| control.expect(name));
        file(control, homes.to_vec());
    }
    let of = |number: u32, ips: &[u32], fixed, name: Option<&str>| {
        let addresses = ips.iter().map(|at| Address { ip: ip(*at), fixed }).collect();
        Member { mac: mac(number), name: name.map(Into::into), addresses }
    };
    let here = |members: &[Member]| -> Vec<Local> {
        let local = |member: &Member| Local { member: member.clone(), placed: true, silent_for: Some(Duration::ZERO) };
        members.iter().map(local).collect()
    };
    let (leased, web) = (of(1, &[10], false, None), of(2, &[5], true, Some("web")));
    let mut known = BTreeMap::new();
    // The hostile machine "a" claims all of it as fixed, for members of its own, before "x" has any.
    let taken = of(7, &[5, 10, 11], true, Some("web"));
    all[0].1.local(NETWORK, Some(ip(201)), here(std::slice::from_ref(&taken)), S);
    exchange(&mut all, S);
    tables(&mut all[1].1, &mut known);
    assert_eq!(known["a"], [of(7, &[], true, None)], "what was never given to it is not believed");
    let conflicts = all[1].1.conflicts();
    let named: Vec<_> = conflicts.iter().map(|c| (c.what.as_str(), c.winner.as_str(), c.machines.len())).collect();
    assert!(conflicts[0].to_string().ends_with(": 10.0.0.10 is claimed by a, and it belongs to x"), "{}", conflicts[0]);
    assert_eq!(named, [("10.0.0.10", "x", 1), ("10.0.0.11", "x", 1), ("10.0.0.5", "x", 1), ("web", "x", 1)]);
    // So "x" can give them to its members, and loses none.
    all[3].1.local(NETWORK, Some(ip(204)), here(&[leased.clone(), web.clone()]), 2 * S);
    exchange(&mut all, 2 * S);
    tables(&mut all[1].1, &mut known);
    assert_eq!(known["x"], [leased.clone(), web.clone()]);
    let lost = all[3].1.actions().into_iter().any(|action| matches!(action, Action::Lost { .. }));
    assert!(!lost, "no lease ends");
    // The member with the lease moves to "b" with it, and goes on there when the lease of "x" has
    // ended.
    all[1].1.local(NETWORK, Some(ip(202)), here(std::slice::from_ref(&leased)), 3 * S);
    exchange(&mut all, 3 * S);
    all[3].1.local(NETWORK, Some(ip(204)), here(std::slice::from_ref(&web)), 4 * S);
    exchange(&mut all, 4 * S);
    tables(&mut all[2].1, &mut known);
    assert_eq!((known["b"].clone(), known["x"].clone()), (vec![leased], vec![web]));
    // Without the file's word, the first name has all of it.
    file(&mut all[2].1, vec![]);
    tables(&mut all[2].1, &mut known);
    assert_eq!(known["a"], [taken]);
}

#[test]
fn what_a_file_gives_to_a_machine_that_is_known_later_is_its_own_from_then_on() {
    let mut all = ["c", "m"].map(|name| (name, Control::new(Settings::new(name), 1)));
    let home =
        |name: Option<&str>, addresses| Home { machine: "a".into(), name: name.map(Into::into), addresses, mac: None };
    file(&mut all[1].1, vec![home(None, Some((ip(5), ip(5)))), home(Some("web"), None)]);
    let taken = Member { name: Some("web".into()), ..member(5) };
    let here = vec![Local { member: taken.clone(), placed: true, silent_for: Some(Duration::ZERO) }];
    all[0].1.local(NETWORK, Some(ip(201)), here, S);
    exchange(&mut all, S);
    let mut known = BTreeMap::new();
    tables(&mut all[1].1, &mut known);
    assert_eq!(known["c"], [taken], "of a machine that is not known nothing is kept back");
    // Its name sorts before all others, so that they get other numbers.
    all[1].1.expect("a");
    tables(&mut all[1].1, &mut known);
    assert_eq!(known["c"], [Member { name: None, addresses: vec![], ..member(5) }]);
    assert!(all[1].1.conflicts().iter().all(|c| c.winner == "a") && all[1].1.conflicts().len() == 2);
}

#[test]
fn of_a_network_that_leaves_the_file_nothing_is_kept() {
    let mut control = Control::new(Settings::new("a"), 1);
    ["a", "b"].into_iter().for_each(|name| control.expect(name));
    let at_b = |number| Home { machine: "b".into(), name: None, addresses: Some((ip(number), ip(number))), mac: None };
    let local = |member: Member| Local { member, placed: true, silent_for: Some(Duration::ZERO) };
    let nameless = |number: u32| Member { name: Some(String::new()), ..member(number) };
    let name = "leaves-the-file";
    control.homes(BTreeMap::from([(name.into(), vec![at_b(5)]), (NETWORK.into(), vec![at_b(6)])]));
    // It has a lease of b's as well, and a member that is not valid.
    let members = [member(1), leased(2, 5), nameless(3)].map(local).to_vec();
    control.local(name, Some(ip(201)), members, S);
    let claim = Claim { member: member(5), version: 1, placed: true };
    let of_b = Joined { name: name.into(), end: Some(ip(202)), came: vec![claim], went: vec![] };
    let mut change = Change { number: Number { epoch: 1, count: 1 }, networks: vec![of_b] };
    control.answered("b", &tombolo_span::message::KnownAnswer::All(change.clone()).encode(), S).unwrap();
    let lost = Action::Lost { network: name.into(), addresses: vec![ip(5)] };
    assert!(control.actions().contains(&lost), "b has the address");
    // The file changes here, then at b.
    control.homes(BTreeMap::from([(NETWORK.into(), vec![at_b(6)])]));
    control.local(name, None, vec![], 2 * S);
    change = Change { number: Number { epoch: 1, count: 2 }, networks: vec![] };
    control.answered("b", &tombolo_span::message::KnownAnswer::All(change).encode(), 2 * S).unwrap();
    drop(control.actions());
    let left = format!("{control:?}");
    assert!(!left.contains(name) && left.contains(NETWORK), "{left}");
}

#[test]
fn a_lease_that_moved_with_its_member_stays_when_a_machine_starts_again_or_the_file_changes() {
    let mut all = ["a", "b", "c", "x"].map(|name| (name, Control::new(Settings::new(name), 1)));
    let home = |machine: &str, first, last| Home {
        machine: machine.into(),
        name: None,
        addresses: Some((first, last)),
        mac: None,
    };
    let starts = |name: &str, epoch| {
        let mut control = Control::new(Settings::new(name), epoch);
        ["a", "b", "c", "x"].into_iter().for_each(|name| control.expect(name));
        file(&mut control, vec![home("x", ip(10), ip(19))]);
        control
    };
    all.iter_mut().for_each(|(name, control)| *control = starts(name, 1));
    let here = |members: &[Member]| -> Vec<Local> {
        let local = |member: &Member| Local { member: member.clone(), placed: true, silent_for: Some(Duration::ZERO) };
        members.iter().map(local).collect()
    };
    let moved = Member { name: None, ..leased(1, 10) };
    let other = Member { name: None, ..leased(2, 11) };
    // "x" leases it, the member moves to "b", and the lease of "x" ends.
    all[3].1.local(NETWORK, Some(ip(204)), here(std::slice::from_ref(&moved)), S);
    exchange(&mut all, S);
    all[1].1.local(NETWORK, Some(ip(202)), here(std::slice::from_ref(&moved)), 2 * S);
    exchange(&mut all, 2 * S);
    all[3].1.local(NETWORK, Some(ip(204)), here(std::slice::from_ref(&other)), 3 * S);
    exchange(&mut all, 3 * S);
    // All that knew it start again, one after the other: another machine, the owner, the member's.
    let mut known = BTreeMap::new();
    for (at, epoch) in [(2, 2), (3, 3), (1, 4)] {
        let name = all[at].0;
        all[at].1 = starts(name, epoch);
        if at == 3 {
            all[3].1.local(NETWORK, Some(ip(204)), here(std::slice::from_ref(&other)), 4 * S);
        } else if at == 1 {
            all[1].1.local(NETWORK, Some(ip(202)), here(std::slice::from_ref(&moved)), 4 * S);
        }
        exchange(&mut all, 4 * S);
        // Also the gateway of "x" is told, so that it leases the address to no other member.
        for reader in [2, 3, 0] {
            file(&mut all[reader].1, vec![]);
            file(&mut all[reader].1, vec![home("x", ip(10), ip(19))]);
            known.clear();
            tables(&mut all[reader].1, &mut known);
            assert_eq!(
                known["b"].as_slice(),
                std::slice::from_ref(&moved),
                "at {} after {name} started",
                all[reader].0
            );
            assert_eq!(all[reader].1.conflicts(), [], "at {} after {name} started", all[reader].0);
        }
        let lost = all[1].1.actions().into_iter().any(|action| matches!(action, Action::Lost { .. }));
        assert!(!lost, "after {name} started");
    }
    // The range is shared in another way: a part of it is at home at "a".
    for at in [0, 2, 3] {
        file(&mut all[at].1, vec![home("a", ip(10), ip(14)), home("x", ip(15), ip(19))]);
        known.clear();
        tables(&mut all[at].1, &mut known);
        assert_eq!(known["b"].as_slice(), std::slice::from_ref(&moved), "at {}", all[at].0);
    }
    // Should the owner have leased it all the same, then its member has it, and the other lease ends.
    let twice = Member { name: None, ..leased(3, 10) };
    all.iter_mut().for_each(|(_, control)| file(control, vec![home("x", ip(10), ip(19))]));
    all[3].1.local(NETWORK, Some(ip(204)), here(&[other, twice]), 5 * S);
    exchange(&mut all, 5 * S);
    let lost = all[1].1.actions().into_iter().find(|action| matches!(action, Action::Lost { .. }));
    assert_eq!(lost, Some(Action::Lost { network: NETWORK.into(), addresses: vec![ip(10)] }));
    let conflicts = all[2].1.conflicts();
    let named: Vec<_> = conflicts.iter().map(|c| (c.what.as_str(), c.machines.join(" "), c.winner.as_str())).collect();
    assert_eq!(named, [("10.0.0.10", "b x".to_string(), "x")]);
}

#[test]
fn a_dead_machine_is_forgotten_after_its_lease_and_one_that_is_cut_off_keeps_what_it_knows() {
    let mut world = world(4, 2, quick());
    world.kill(3);
    world.pass(14 * S);
    assert_eq!(world.place(0, mac(3000)), Some("node-003"), "not before its lease has ended");
    world.pass(3 * S);
    assert_eq!(world.place(0, mac(3000)), None);
    let now = world.now;
    let peers = world.machines[0].control.as_ref().unwrap().peers(now);
    assert_eq!(
        peers.iter().map(|peer| peer.state).collect::<Vec<_>>(),
        [PeerState::Up, PeerState::Up, PeerState::Gone]
    );
    // Machine 0 hears nothing of anyone: the carrier, and not all machines at once. The others'
    // last words came at different times within a beat.
    world.pass(Duration::from_millis(1300));
    world.machines[0].part = 9;
    world.pass(300 * S);
    assert_eq!(world.place(0, mac(1000)), Some("node-001"));
    assert_eq!(world.place(0, mac(2000)), Some("node-002"));
    assert_eq!(world.place(1, mac(0)), None, "the others hear each other");
    // And for an hour only.
    world.pass(3600 * S);
    assert_eq!(world.place(0, mac(1000)), None);
    world.machines[0].part = 0;
    world.start(3);
    let end = world.now + 10 * S;
    assert!(world.until(end, World::is_settled));
}

#[test]
fn an_address_that_both_sides_of_a_partition_gave_away_is_lost_by_one_of_them() {
    let mut world = world(6, 1, quick());
    for at in 3..6 {
        world.machines[at].part = 1;
    }
    world.pass(20 * S);
    world.add(1, leased(101, 7));
    world.add(4, leased(104, 7));
    world.add(2, leased(102, 8));
    world.add(5, Member { addresses: member(8).addresses, ..member(105) });
    world.pass(S);
    assert!(world.until(world.now, World::is_settled), "each side by itself");
    for machine in &mut world.machines {
        machine.part = 0;
    }
    let begin = world.now;
    world.pass(10 * S);
    println!("healed from {begin:?}");
    assert_eq!(world.machines[4].lost, [ip(7)], "a lease of the machine that sorts later");
    assert_eq!(world.machines[2].lost, [ip(8)], "a lease, where another machine's file fixes the address");
    assert!([0, 1, 3, 5].iter().all(|at| world.machines[*at].lost.is_empty()));
    // Everywhere, and on the losing side too, the address is that of one member.
    for at in 0..6 {
        let of = |address| {
            let mut all: Vec<_> = world.machines[at].tables.values().flatten().collect();
            all.retain(|member| member.addresses.iter().any(|a| a.ip == address));
            all.iter().map(|member| member.mac).collect::<Vec<_>>()
        };
        assert_eq!(of(ip(7)), if at == 1 { vec![] } else { vec![mac(101)] }, "machine {at}");
        assert_eq!(of(ip(8)), if at == 5 { vec![] } else { vec![mac(105)] }, "machine {at}");
        // The member itself is still reached.
        assert_eq!(world.place(at, mac(104)), if at == 4 { None } else { Some("node-004") });
    }
    let conflicts = world.machines[0].control.as_ref().unwrap().conflicts();
    let found: Vec<_> = conflicts.iter().map(|c| (c.what.as_str(), c.winner.as_str())).collect();
    assert_eq!(found, [("10.0.0.7", "node-001"), ("10.0.0.8", "node-005")]);
    // The daemon ended the leases: the members have other addresses.
    world.add(4, leased(104, 9));
    world.add(2, leased(102, 10));
    world.pass(S);
    assert!(world.machines.iter().all(|machine| machine.lost.is_empty()));
    assert!(world.is_settled());
}

#[test]
fn a_name_is_that_of_the_first_machine_and_passes_on_when_it_goes() {
    let mut world = world(3, 0, quick());
    for at in [1, 2] {
        world.add(at, Member { name: Some("web".into()), ..member(at as u32) });
    }
    world.pass(S);
    let named = |world: &World| {
        let all = world.machines[0].tables.values().flatten();
        all.filter(|member| member.name.is_some()).map(|member| member.mac).collect::<Vec<_>>()
    };
    assert_eq!(named(&world), [mac(1)]);
    world.remove(1, mac(1));
    world.pass(S);
    assert_eq!(named(&world), [mac(2)]);
}

#[test]
fn a_flood_of_changes_is_limited_named_and_made_up_for() {
    let mut a = Control::new(Settings::new("a"), 1);
    let mut flood = Control::new(Settings::new("b"), 1);
    let mut refused = 0;
    for n in 0..3 * MAX_CHANGES_PER_S {
        let here = vec![Local { member: member(n), placed: true, silent_for: None }];
        flood.local(NETWORK, None, here, Duration::ZERO);
        for action in flood.actions() {
            if let Action::Tell(bytes) = action {
                a.heard("b", &bytes, S).unwrap();
            }
        }
        refused = a.peers(S)[0].refused;
    }
    assert!(refused > 0);
    let events: Vec<_> =
        a.actions().into_iter().filter(|a| matches!(a, Action::Event(text) if text.contains("more changes"))).collect();
    assert_eq!(events.len(), 1, "named once, and not by message");
    // A second later there is room for all of it.
    a.answered("b", &flood.answer(&a.question("b")).unwrap(), 2 * S).unwrap();
    let members = a.actions().into_iter().find_map(|action| match action {
        Action::Table { members, .. } => Some(members),
        _ => None,
    });
    assert_eq!(members.unwrap(), [member(3 * MAX_CHANGES_PER_S - 1)]);
}

#[test]
fn a_machine_claims_no_more_than_it_may_and_jumps_no_versions() {
    let network = |came: Vec<Claim>, went| vec![Joined { name: NETWORK.into(), end: None, came, went }];
    let claim = |number, version| Claim { member: member(number), version, placed: true };
    let new = || {
        let mut a = Control::new(Settings::new("a"), 1);
        let here = vec![Local { member: member(1), placed: true, silent_for: Some(Duration::ZERO) }];
        a.local(NETWORK, None, here, S);
        let nothing = Change { number: Number { epoch: 1, count: 0 }, networks: vec![] };
        a.answered("b", &tombolo_span::message::KnownAnswer::All(nothing).encode(), S).unwrap();
        a
    };
    // A jump beyond the highest that is known, also where none is.
    for (number, version) in [(1, 2 + MAX_JUMP), (2, u64::MAX)] {
        let mut a = new();
        let change =
            Change { number: Number { epoch: 1, count: 1 }, networks: network(vec![claim(number, version)], vec![]) };
        a.heard("b", &change.encode(), S).unwrap();
        let peer = &a.peers(S)[0];
        assert_eq!((peer.members, peer.refused), (0, 1));
        // What was refused is asked for again.
        assert_eq!(a.question("b"), Known { number: None }.encode());
    }
    let mut a = new();
    let full = MAX_MEMBERS as u64 / 128;
    for count in 1..=full + 2 {
        let came = (0..128).map(|i| claim(10_000 + count as u32 * 128 + i, 1)).collect();
        let change = Change { number: Number { epoch: 1, count }, networks: network(came, vec![]) };
        a.heard("b", &change.encode(), S).unwrap();
        if count == full {
            // One that goes makes room for one that comes.
            assert_eq!((a.peers(S)[0].members, a.peers(S)[0].refused), (MAX_MEMBERS, 0));
            let mut all = a.clone();
            let number = Number { epoch: 1, count: count + 1 };
            let networks = network(vec![claim(1_000_000, 1)], vec![mac(10_000 + 128)]);
            all.heard("b", &Change { number, networks }.encode(), S).unwrap();
            assert_eq!((all.peers(S)[0].members, all.peers(S)[0].refused), (MAX_MEMBERS, 0));
        }
    }
    let peer = &a.peers(S)[0];
    assert!(peer.members == MAX_MEMBERS && peer.refused >= 1, "{peer:?}");
}

/// All machines ask all others.
fn exchange(all: &mut [(&str, Control)], now: Duration) {
    for from in 0..all.len() {
        for to in 0..all.len() {
            if from != to {
                let question = all[to].1.question(all[from].0);
                let answer = all[from].1.answer(&question).unwrap();
                let name = all[from].0;
                all[to].1.answered(name, &answer, now).unwrap();
            }
        }
    }
}

/// The members that the last tables of a machine have, with their machines.
fn tables(control: &mut Control, known: &mut BTreeMap<String, Vec<Member>>) {
    for action in control.actions() {
        if let Action::Table { machine, members, .. } = action {
            known.insert(machine, members);
        }
    }
}

#[test]
fn a_member_that_moved_and_is_silent_stays_where_it_is_and_keeps_its_lease() {
    let mut all = ["a", "b", "c"].map(|name| (name, Control::new(Settings::new(name), 1)));
    let end = |n: u8| Some(IpAddr::from([192, 0, 2, n]));
    let moved = leased(1, 50);
    let here = |placed, silent| vec![Local { member: moved.clone(), placed, silent_for: silent }];
    let without_lease = Member { name: None, addresses: vec![], ..moved.clone() };
    let mut known = BTreeMap::new();
    // It has its lease at a, is silent there, and still there for all.
    all[0].1.local(NETWORK, end(1), here(true, Some(Duration::ZERO)), S);
    all[0].1.local(NETWORK, end(1), here(false, None), 2 * S);
    exchange(&mut all, 2 * S);
    tables(&mut all[2].1, &mut known);
    assert_eq!(known["a"], vec![moved.clone()]);
    // It moves to b, which has no lease of its.
    let at_b = vec![Local { member: without_lease, placed: true, silent_for: Some(Duration::ZERO) }];
    all[1].1.local(NETWORK, end(2), at_b, 3 * S);
    exchange(&mut all, 3 * S);
    all[0].1.local(NETWORK, end(1), here(false, None), 4 * S);
    exchange(&mut all, 4 * S);
    tables(&mut all[2].1, &mut known);
    assert_eq!((known["a"].len(), known["b"].clone()), (0, vec![moved.clone()]), "its place is b, its lease is kept");
    // It is silent for so long that b's switch forgets it.
    all[1].1.local(NETWORK, end(2), vec![], 400 * S);
    all[0].1.local(NETWORK, end(1), here(false, None), 400 * S);
    exchange(&mut all, 400 * S);
    tables(&mut all[2].1, &mut known);
    assert_eq!((known["a"].len(), known["b"].clone()), (0, vec![moved.clone()]));
    // b starts again and knows nothing: then no machine has it, and frames for it go to all.
    all[1].1 = Control::new(Settings::new("b"), 2);
    all[1].1.local(NETWORK, end(2), vec![], 401 * S);
    exchange(&mut all, 401 * S);
    all[0].1.local(NETWORK, end(1), here(false, None), 402 * S);
    exchange(&mut all, 402 * S);
    tables(&mut all[2].1, &mut known);
    assert_eq!((known["a"].len(), known["b"].len()), (0, 0));
    // It is back at a.
    all[0].1.local(NETWORK, end(1), here(true, Some(Duration::ZERO)), 403 * S);
    exchange(&mut all, 403 * S);
    tables(&mut all[2].1, &mut known);
    assert_eq!(known["a"], [moved]);
    assert!(all.iter().all(|(_, control)| control.conflicts().is_empty()));
}

/// What the machines know, and what is, for the message of a failed property.
fn difference(world: &World) -> String {
    let all = world.machines.iter().map(|machine| {
        let here: Vec<_> = machine.here.keys().map(|mac| mac[5]).collect();
        let of = |members: &Vec<Member>| members.iter().map(|m| (m.mac[5], m.addresses.len())).collect::<Vec<_>>();
        let tables: Vec<_> = machine.tables.iter().map(|(name, members)| (name, of(members))).collect();
        format!("{} has {here:?}, knows {tables:?}", machine.name)
    });
    all.collect::<Vec<_>>().join("\n")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Whatever happens, and whatever is lost: some time after it has ended, all machines know the
    /// truth.
    #[test]
    fn after_any_history_all_machines_agree(
        seed in any::<u64>(),
        loss in 0.0..0.2f64,
        steps in proptest::collection::vec((0..7u8, 0..5usize, 0..5usize, 0..12u32, 0..4000u64), 1..40),
    ) {
        let network = Network { loss, ..quick() };
        let mut world = World::new(5, network, Settings::new("-"), seed);
        (0..5).for_each(|at| world.start(at));
        for (what, at, to, number, time) in steps {
            match what {
                0 | 1 if !world.machines.iter().any(|m| m.here.contains_key(&mac(number))) => world.add(at, member(number)),
                2 => drop(world.remove(at, mac(number))),
                3 => {
                    let first = world.machines[at].here.keys().next().copied();
                    if let Some(member) = first.and_then(|mac| world.remove(at, mac)) {
                        world.add(to, member);
                    }
                }
                4 => world.machines[at].part = 1 - world.machines[at].part,
                5 => world.kill(at),
                6 if world.machines[at].control.is_none() => {
                    world.machines[at].tables.clear();
                    world.start(at);
                }
                _ => {}
            }
            world.pass(Duration::from_millis(time));
        }
        for at in 0..5 {
            world.machines[at].part = 0;
            if world.machines[at].control.is_none() {
                world.machines[at].tables.clear();
                world.start(at);
            }
        }
        let end = world.now + 120 * S;
        let is_settled = world.until(end, World::is_settled);
        prop_assert!(is_settled, "{}", difference(&world));
    }
}
