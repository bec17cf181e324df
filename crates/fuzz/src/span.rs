//! What another machine may tell the control plane. It panics where the code under test breaks a promise.

use std::collections::BTreeMap;
use std::time::Duration;

use tombolo_span::member::MAX_MEMBERS;
use tombolo_span::{Action, Address, Control, Local, Member, Settings};

use crate::{Behaviour, records};

const NETWORK: &str = "lan";

fn own() -> Vec<Local> {
    let address = |last, fixed| Address { ip: [10, 87, 0, last].into(), fixed };
    let member = |last: u8, fixed| Member {
        mac: [2, 0, 0, 0, 0, last],
        name: Some(format!("m-{last}")),
        addresses: vec![address(last, fixed)],
    };
    [member(1, true), member(2, false)]
        .map(|member| Local { member, placed: true, silent_for: Some(Duration::ZERO) })
        .into()
}

/// Records are messages of two machines, "b" and "z": changes, answers, questions. Time passes with each, and this
/// machine's members stay what they are. Afterwards no table has what this machine or another table has.
pub fn span(input: &[u8], behaviour: &mut Behaviour) {
    let mut control = Control::new(Settings::new("m"), 1);
    control.local(NETWORK, None, own(), Duration::ZERO);
    let mut now = Duration::ZERO;
    let mut tables: BTreeMap<(String, String), Vec<Member>> = BTreeMap::new();
    for (step, message) in records(input) {
        now += Duration::from_millis(u64::from(step >> 2) * 100);
        let from = if step & 1 == 0 { "b" } else { "z" };
        if step & 2 != 0 {
            behaviour.note(control.answered(from, message, now).is_ok());
        } else {
            behaviour.note(control.heard(from, message, now).is_ok());
        }
        behaviour.note(control.answer(message).is_ok());
        control.local(NETWORK, None, own(), now);
        control.tick(now);
        for action in control.actions() {
            behaviour.note(std::mem::discriminant(&action));
            match action {
                Action::Table { network, machine, members, .. } => {
                    assert!(members.len() <= MAX_MEMBERS && members.iter().all(|member| member.check().is_ok()));
                    behaviour.note_size(members.len());
                    tables.insert((network, machine), members);
                }
                Action::Forget { network, machine } => drop(tables.remove(&(network, machine))),
                Action::Lost { addresses, .. } => {
                    assert!(
                        addresses.iter().all(|ip| *ip == std::net::IpAddr::from([10, 87, 0, 2])),
                        "no lease of ours"
                    );
                }
                Action::Tell(_) | Action::Ask(_) | Action::Event(_) => {}
            }
        }
    }
    let mut all: Vec<_> =
        tables.iter().flat_map(|((net, _), members)| members.iter().map(move |m| (net, m.mac))).collect();
    let mut addresses: Vec<_> = tables
        .iter()
        .flat_map(|((net, _), members)| members.iter().flat_map(move |m| m.addresses.iter().map(move |a| (net, a.ip))))
        .collect();
    for list in [all.len(), addresses.len()] {
        behaviour.note_size(list);
    }
    all.sort();
    addresses.sort();
    assert!(all.windows(2).all(|two| two[0] != two[1]), "a MAC address on two machines");
    assert!(addresses.windows(2).all(|two| two[0] != two[1]), "an IP address of two members");
    assert!(control.peers(now).iter().all(|peer| peer.members <= MAX_MEMBERS));
}
