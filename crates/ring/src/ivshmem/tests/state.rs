//! The states of two machines that meet.

use std::cell::{Cell, RefCell};
use std::vec;
use std::vec::Vec;

use super::super::state::{Action, Cause, Duty, Machine, Offloads, State};

/// The table at the head of `state.rs`, row by row: own, the peer's word, what is done, and what
/// the own state is then.
#[test]
fn every_row_of_the_state_table() {
    use Action as A;
    use Cause as C;
    use State::{Init, Ready, Reset, Run};
    let path = |own: State| {
        let mut machine = Machine::new();
        let words: &[u32] = match own {
            Reset => &[],
            Init => &[0],
            Ready => &[0, 1],
            Run => &[0, 1, 2],
        };
        for word in words {
            assert_ne!(machine.step(*word), A::None);
        }
        assert_eq!(machine.own(), own);
        machine
    };
    let rows = [
        (Reset, 0, A::Write(Init), Init),
        (Reset, 1, A::Write(Init), Init),
        (Reset, 2, A::None, Reset),
        (Reset, 3, A::None, Reset),
        (Reset, 4, A::None, Reset),
        (Init, 0, A::None, Init),
        (Init, 1, A::Initialise, Ready),
        (Init, 2, A::Initialise, Ready),
        (Init, 3, A::Initialise, Ready),
        (Init, 4, A::Fall(C::PeerWord(4)), Reset),
        (Ready, 0, A::Fall(C::PeerReset), Reset),
        (Ready, 1, A::None, Ready),
        (Ready, 2, A::Write(Run), Run),
        (Ready, 3, A::Write(Run), Run),
        (Ready, u32::MAX, A::Fall(C::PeerWord(u32::MAX)), Reset),
        (Run, 0, A::Fall(C::PeerReset), Reset),
        (Run, 1, A::Fall(C::PeerSkipped), Reset),
        (Run, 2, A::None, Run),
        (Run, 3, A::None, Run),
        (Run, 0x8000_0003, A::Fall(C::PeerWord(0x8000_0003)), Reset),
    ];
    for (own, word, action, then) in rows {
        let mut machine = path(own);
        assert_eq!((machine.step(word), machine.own()), (action, then), "{own} sees {word:#x}");
        assert_eq!(machine.is_up(), then == Run && word == 3);
        assert_eq!(machine.may_use_rings(), then == Run && (word == 2 || word == 3));
        machine.reset();
        assert_eq!(machine.own(), Reset);
    }
}

/// A guest says in each word but RESET that it takes offloads, and only where they were offered it
/// may.
#[test]
fn offloads_are_agreed_on_by_the_guests_words() {
    use State::{Init, Ready, Reset, Run};
    for wants in [false, true] {
        let mut fabric = Machine::with_offloads(Offloads::Offered);
        let mut guest = Machine::with_offloads(if wants { Offloads::Taken } else { Offloads::None });
        let mut words = vec![guest.own_word()];
        for _ in 0..8 {
            let _ = fabric.step(guest.own_word());
            assert!(fabric.own_word() < 4, "the fabric's words are those that any driver knows");
            let _ = guest.step(fabric.own_word());
            words.push(guest.own_word());
        }
        words.dedup();
        let bit = if wants { 0x100 } else { 0 };
        assert_eq!(words, [0, 1 | bit, 2 | bit, 3 | bit]);
        assert!(fabric.is_up() && guest.is_up());
        assert_eq!((fabric.uses_offloads(), guest.uses_offloads()), (wants, wants));
        // A driver that thinks otherwise took the guest's place, unseen.
        assert_eq!(fabric.step(3 | (bit ^ 0x100)), Action::Fall(Cause::PeerSkipped));
        assert_eq!(fabric.own(), Reset);
    }
    for (offloads, word, state) in [
        (Offloads::Offered, 0x100, None),
        (Offloads::Offered, 0x101, Some(Init)),
        (Offloads::Offered, 0x102, Some(Ready)),
        (Offloads::Offered, 0x103, Some(Run)),
        (Offloads::Offered, 0x104, None),
        (Offloads::Offered, 0x203, None),
        (Offloads::Offered, 3, Some(Run)),
        (Offloads::None, 0x103, None),
        (Offloads::Taken, 0x103, None),
    ] {
        assert_eq!(offloads.of_peer(word), (state, state.is_some() && word > 3), "{offloads:?} {word:#x}");
    }
}

/// Two machines, served in any order, from any states in which one's driver may have been replaced:
/// they meet in RUN, and neither clears its section while the other one runs.
#[test]
fn two_machines_meet_from_wherever_they_are() {
    use State::{Init, Ready, Reset, Run};
    for stale in [Reset, Init, Ready, Run] {
        for order in 0..256u32 {
            // `a` is new, as after a restart; `b` is where it was when `a`'s predecessor ran.
            let (mut a, mut b) = (Machine::new(), Machine::new());
            while b.own() != stale {
                let _ = b.step(if b.own() == Reset { 0 } else { 2 });
            }
            for turn in 0..32u32 {
                let (me, other) = if (order >> (turn % 8)) & 1 == 0 { (&mut a, &b) } else { (&mut b, &a) };
                let action = me.step(other.own().word());
                assert!(action != Action::Initialise || other.own() != Run, "{stale} {order:#b}");
            }
            // Fairly from here on, since an order may have left one out.
            for _ in 0..8 {
                let _ = a.step(b.own().word());
                let _ = b.step(a.own().word());
            }
            assert!(a.is_up() && b.is_up(), "{stale} {order:#b}: {a:?} {b:?}");
        }
    }
}

/// What a link sees of [`Machine::follow`], in its order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Look(u32),
    Act(Duty),
    Tell(u32),
}

/// Follows a peer whose word is `words` one after the other, the last of them for ever; refuses
/// `refused`.
fn follow(machine: &mut Machine, words: &[u32], refused: Option<Duty>) -> (Result<bool, Duty>, Vec<Seen>) {
    let (seen, at) = (RefCell::new(Vec::new()), Cell::new(0));
    let look = || {
        let word = words[at.get().min(words.len() - 1)];
        at.set(at.get() + 1);
        seen.borrow_mut().push(Seen::Look(word));
        word
    };
    let act = |duty| {
        seen.borrow_mut().push(Seen::Act(duty));
        if refused == Some(duty) { Err(duty) } else { Ok(()) }
    };
    let result = machine.follow(look, |word| seen.borrow_mut().push(Seen::Tell(word)), act);
    (result, seen.into_inner())
}

/// The section is cleared before READY is written, the peer's is checked before RUN, and what is
/// known of it is forgotten before RESET.
#[test]
fn a_peer_is_followed_in_the_order_of_the_table() {
    use Seen::{Act, Look, Tell};
    let mut machine = Machine::new();
    assert_eq!(follow(&mut machine, &[0], None), (Ok(true), vec![Look(0), Tell(1), Look(0)]));
    assert_eq!(follow(&mut machine, &[0], None), (Ok(false), vec![Look(0)]));
    assert_eq!(follow(&mut machine, &[1], None), (Ok(true), vec![Look(1), Act(Duty::Clear), Tell(2), Look(1)]));
    assert_eq!(follow(&mut machine, &[2], None), (Ok(true), vec![Look(2), Act(Duty::Check), Tell(3), Look(2)]));
    // Only the peer's state changes.
    assert_eq!(follow(&mut machine, &[3], None), (Ok(true), vec![Look(3)]));
    assert!(machine.is_up());
    let down = [Look(0), Act(Duty::Forget(Cause::PeerReset)), Tell(0), Look(0), Tell(1), Look(0)];
    assert_eq!(follow(&mut machine, &[0], None), (Ok(true), down.to_vec()));
    // All the way at once, with this end's request for offloads in each word but RESET.
    let mut machine = Machine::with_offloads(Offloads::Taken);
    let up = [Look(1), Tell(0x101), Look(1), Act(Duty::Clear), Tell(0x102), Look(2), Act(Duty::Check), Tell(0x103)];
    let (result, seen) = follow(&mut machine, &[1, 1, 2, 3], None);
    assert_eq!((result, &seen[..8], &seen[8..]), (Ok(true), &up[..], &[Look(3)][..]));
}

/// A link that refuses the peer's section, or cannot clear its own, says nothing to the peer.
#[test]
fn a_refusal_ends_the_following_before_the_word_is_written() {
    for (words, refused, told) in [(&[1][..], Duty::Clear, 1), (&[1, 1, 2][..], Duty::Check, 2)] {
        let mut machine = Machine::new();
        let (result, seen) = follow(&mut machine, words, Some(refused));
        assert_eq!((result, seen.last()), (Err(refused), Some(&Seen::Act(refused))));
        assert_eq!(seen.iter().filter(|seen| matches!(seen, Seen::Tell(_))).count(), told, "{refused:?}");
        machine.reset();
        assert_eq!(follow(&mut machine, &[0], None).0, Ok(true));
    }
}

/// A peer that changes its word with each look costs four looks, not a loop without end.
#[test]
fn a_peer_that_plays_with_its_word_is_followed_for_four_looks() {
    for first in 0..5u32 {
        let mut machine = Machine::new();
        let words: Vec<u32> = (first..).take(64).map(|n| [0, 1, 2, 0, 1, 3][n as usize % 6]).collect();
        for turn in 0..8 {
            let (_, seen) = follow(&mut machine, &words[turn..], None);
            let looks = seen.iter().filter(|seen| matches!(seen, Seen::Look(_))).count();
            assert!((1..=4).contains(&looks), "{looks} looks");
        }
    }
    let mut machine = Machine::new();
    let (_, seen) = follow(&mut machine, &[0, 1, 0, 0, 1, 0, 0, 1], None);
    assert_eq!(seen.iter().filter(|seen| matches!(seen, Seen::Look(_))).count(), 4, "{seen:?}");
}
