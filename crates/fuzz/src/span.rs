//! What another machine may tell the control plane. It panics where the code under test breaks a
//! promise.

use std::collections::BTreeMap;
use std::time::Duration;

use tombolo_span::member::MAX_MEMBERS;
use tombolo_span::stream::{MAX_DATA_BYTES, Stream, StreamMessage, WINDOW_BYTES};
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

/// Records are messages of two machines, "b" and "z": changes, answers, questions. Time passes with
/// each, and this machine's members stay what they are. Afterwards no table has what this machine
/// or another table has.
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

/// What the other side of a stream of calls may send. Records are its messages; with each, time
/// passes, and this side takes and sends some bytes. Whatever comes, no more than the window waits
/// on either side.
pub fn span_stream(input: &[u8], behaviour: &mut Behaviour) {
    let (mut stream, mut now) = (Stream::new(Duration::ZERO), Duration::ZERO);
    let mut sent = 0u64;
    for (step, bytes) in records(input) {
        now += Duration::from_millis(u64::from(step >> 4) * 100);
        let message = StreamMessage::parse(bytes);
        behaviour.note(message.map(|message| std::mem::discriminant(&message.content)));
        let Some(message) = message else { continue };
        assert_eq!(message.encode(), bytes, "there is one way to say it");
        let end = stream.receive(&message.content, now);
        behaviour.note(end);
        if end.is_err() {
            return;
        }
        assert!(stream.waiting() <= WINDOW_BYTES && stream.room() <= MAX_DATA_BYTES);
        if step & 1 != 0 {
            stream.took(stream.waiting() as usize);
        }
        if step & 2 != 0 && stream.room() > 0 {
            let bytes = stream.room();
            assert_eq!(stream.send(bytes, now), sent);
            sent += bytes as u64;
        }
        let due = stream.due(now);
        behaviour.note(due.map(|due| due.is_some()));
        behaviour.note_size(stream.waiting() as usize);
        if due.is_err() {
            return;
        }
    }
}
