//! The calls that one side has under way on a connection: slots, tokens, and what became of each
//! call.
//!
//! A call takes a free slot and gets a [`Token`]: the slot, and the slot's generation (its *turn*).
//! An entry of the ring names the call by that token, and so does its answer. The slot becomes free
//! when the caller has fetched what the call ended with, or with the answer if no caller waits for it
//! (abandoned). It is never free before the answer, since the peer may still read the request's
//! memory.
//!
//! ```text
//!   Free --begin--> Waiting --answer--> Done --fetch--> Free
//!                      | abandon           | abandon
//!                      v                   v
//!                   Waiting, abandoned    Free
//!                      | answer
//!                      v
//!                     Free
//! ```
//!
//! # The peer is hostile
//! An answer whose token names no call that waits is [`Broken::Token`]. So a second answer, an
//! answer to an earlier use of the slot, and an answer to nothing all break the connection, and
//! change nothing here.
//!
//! # Who uses it
//! The client of a service of this machine (`tombolo-rpc`, under its lock) and both sides of calls
//! between machines ([`crate::session`]). `K` is what they keep with a call until its answer, `D`
//! is what they keep after it. Wakers are handed out and not called: a waker is foreign code, and
//! its owner may hold a lock. All operations are O(1), except those that say "all".

use alloc::vec::Vec;
use core::task::Waker;

use tombolo_ring::rpc::Broken;
use tombolo_ring::rpc::entry::{BEST_EFFORT, Token};

use crate::error::Came;

/// A call whose answer has not come.
#[derive(Debug)]
pub struct Waiting<K> {
    kept: Option<K>,
    /// Of the future that waits for it.
    pub waker: Option<Waker>,
    /// The peer was told that it is cancelled.
    cancelled: bool,
    /// When the answer is wanted; `u64::MAX`: best effort.
    deadline_ns: u64,
    /// When the call ends by itself: at its deadline, or as much later as its caller waits for a
    /// late reply.
    until_ns: u64,
}

impl<K> Waiting<K> {
    /// When the call ends by itself; `u64::MAX`: it does not.
    pub fn until_ns(&self) -> u64 {
        self.until_ns
    }

    /// The clock is read only for a call that has a deadline.
    #[inline]
    fn came(&self, now_ns: impl FnOnce() -> u64) -> Came {
        let late_by_ns = match self.deadline_ns {
            BEST_EFFORT => 0,
            deadline_ns => now_ns().saturating_sub(deadline_ns),
        };
        Came { late_by_ns, waits_late: self.until_ns > self.deadline_ns }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotState {
    Free,
    Waiting,
    Abandoned,
    Done,
}

/// The state says which parts are there: `call` has its content while the answer has not come,
/// `done` from then on. They lie side by side, since an enum with both would be moved as a whole at
/// each change, which costs a call of a microsecond 5 %.
#[derive(Debug)]
struct Slot<K, D> {
    turn: u32,
    state: SlotState,
    call: Waiting<K>,
    done: Option<D>,
}

impl<K, D> Slot<K, D> {
    const fn new() -> Slot<K, D> {
        let call = Waiting { kept: None, waker: None, cancelled: false, deadline_ns: 0, until_ns: 0 };
        Slot { turn: 0, state: SlotState::Free, call, done: None }
    }

    #[inline]
    fn is_waiting(&self) -> bool {
        matches!(self.state, SlotState::Waiting | SlotState::Abandoned)
    }

    /// The answer has come, or never will. `None` where it was not waited for.
    #[inline]
    fn end(&mut self, done: impl FnOnce(&Waiting<K>) -> D) -> Option<Ended<K>> {
        if !self.is_waiting() {
            return None;
        }
        let kept = self.call.kept.take()?;
        let abandoned = self.state == SlotState::Abandoned;
        if abandoned {
            self.state = SlotState::Free;
        } else {
            self.done = Some(done(&self.call));
            self.state = SlotState::Done;
        }
        Some(Ended { kept, waker: self.call.waker.take(), abandoned })
    }
}

/// What a token's call has come to, see [`Slots::fetch`] and [`Slots::abandon`].
#[derive(Debug, PartialEq, Eq)]
pub enum Found<D, W = ()> {
    /// It has ended so. The slot is free.
    Done(D),
    /// Its answer has not come.
    Waiting(W),
    /// The token names no call that somebody waits for.
    Unknown,
}

/// A call whose answer has come.
#[derive(Debug)]
pub struct Ended<K> {
    /// What was kept until now.
    pub kept: K,
    /// To be woken.
    pub waker: Option<Waker>,
    /// No caller waits for it: nothing was stored, and the slot is free.
    pub abandoned: bool,
}

/// The slots of one side. See the module's head.
#[derive(Debug)]
pub struct Slots<K, D> {
    slots: Vec<Slot<K, D>>,
    /// Free slots; the last used first.
    free: Vec<u32>,
}

impl<K, D> Slots<K, D> {
    /// So many, all free.
    pub fn new(entries: u32) -> Slots<K, D> {
        Slots { slots: (0..entries).map(|_| Slot::new()).collect(), free: (0..entries).rev().collect() }
    }

    /// Calls that hold a slot: under way, or done and not fetched.
    pub fn under_way(&self) -> u32 {
        (self.slots.len() - self.free.len()) as u32
    }

    /// Whether no slot is free.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// The token of the next call. `None` where no slot is free.
    #[inline]
    pub fn vacant(&self) -> Option<Token> {
        let slot = *self.free.last()?;
        Some(Token::new(slot, self.slots[slot as usize].turn.wrapping_add(1)))
    }

    /// A call begins. `token` is what [`Slots::vacant`] gave just before.
    #[inline]
    pub fn begin(&mut self, token: Token, deadline_ns: u64, until_ns: u64, kept: K) {
        let vacant = self.free.pop();
        debug_assert_eq!(vacant, Some(token.slot()), "not the vacant slot's token");
        let slot = &mut self.slots[token.slot() as usize];
        (slot.turn, slot.state) = (token.turn(), SlotState::Waiting);
        slot.call.kept = Some(kept);
        (slot.call.cancelled, slot.call.deadline_ns, slot.call.until_ns) = (false, deadline_ns, until_ns);
    }

    #[inline]
    fn slot(&self, token: Token) -> Option<&Slot<K, D>> {
        self.slots.get(token.slot() as usize).filter(|slot| slot.turn == token.turn())
    }

    #[inline]
    fn slot_mut(&mut self, token: Token) -> Option<&mut Slot<K, D>> {
        self.slots.get_mut(token.slot() as usize).filter(|slot| slot.turn == token.turn())
    }

    /// The call of a token whose answer has not come, abandoned or not.
    #[inline]
    pub fn waiting(&self, token: Token) -> Option<&Waiting<K>> {
        self.slot(token).filter(|slot| slot.is_waiting()).map(|slot| &slot.call)
    }

    /// The same, for its waker and what is kept.
    #[inline]
    pub fn waiting_mut(&mut self, token: Token) -> Option<&mut Waiting<K>> {
        self.slot_mut(token).filter(|slot| slot.is_waiting()).map(|slot| &mut slot.call)
    }

    /// All calls whose answers have not come.
    pub fn all_waiting_mut(&mut self) -> impl Iterator<Item = &mut Waiting<K>> {
        self.slots.iter_mut().filter(|slot| slot.is_waiting()).map(|slot| &mut slot.call)
    }

    /// Whether its caller has nothing to wait for: the call has ended, or the token names none.
    #[inline]
    pub fn is_settled(&self, token: Token) -> bool {
        self.slot(token).is_none_or(|slot| slot.state != SlotState::Waiting)
    }

    /// When a call under way ends by itself; `u64::MAX` where it does not.
    #[inline]
    pub fn until_ns(&self, token: Token) -> u64 {
        self.waiting(token).map_or(u64::MAX, |waiting| waiting.until_ns)
    }

    /// Whether a call under way has come to its own end: its deadline, or as much later as its
    /// caller waits. Its caller abandons it then. The clock is read only for a call that has such
    /// an end.
    pub fn is_overdue(&self, token: Token, now_ns: impl FnOnce() -> u64) -> bool {
        let until_ns = if self.is_settled(token) { u64::MAX } else { self.until_ns(token) };
        until_ns != u64::MAX && now_ns() >= until_ns
    }

    /// What a call ended with, once: its slot is free then.
    #[inline]
    pub fn fetch(&mut self, token: Token) -> Found<D> {
        let Some(slot) = self.slot_mut(token) else { return Found::Unknown };
        match slot.state {
            SlotState::Waiting => Found::Waiting(()),
            SlotState::Free | SlotState::Abandoned => Found::Unknown,
            SlotState::Done => {
                slot.state = SlotState::Free;
                let done = slot.done.take();
                self.free.push(token.slot());
                done.map_or(Found::Unknown, Found::Done)
            }
        }
    }

    /// No caller waits for this call any more. If its answer has not come, the slot becomes free with
    /// that, and the waker is handed out.
    pub fn abandon(&mut self, token: Token) -> Found<D, Option<Waker>> {
        if let Some(slot) = self.slot_mut(token).filter(|slot| slot.state == SlotState::Waiting) {
            slot.state = SlotState::Abandoned;
            return Found::Waiting(slot.call.waker.take());
        }
        match self.fetch(token) {
            Found::Done(done) => Found::Done(done),
            _ => Found::Unknown,
        }
    }

    /// Whether the peer is to be told that the call is cancelled. `None` where the token names no
    /// call under way. Once it is told, [`Slots::cancelled`].
    pub fn to_cancel(&self, token: Token) -> Option<bool> {
        self.waiting(token).map(|waiting| !waiting.cancelled)
    }

    /// The peer was told that the call is cancelled. Its answer still comes.
    pub fn cancelled(&mut self, token: Token) {
        if let Some(waiting) = self.waiting_mut(token) {
            waiting.cancelled = true;
        }
    }

    /// An answer has come. `done` makes of it what is kept until the caller fetches it; it is not
    /// asked for an abandoned call.
    ///
    /// # Errors
    /// [`Broken::Token`] where the token names no call that waits. Nothing has changed then.
    #[inline]
    pub fn answer(
        &mut self,
        token: Token,
        now_ns: impl FnOnce() -> u64,
        done: impl FnOnce(Came) -> D,
    ) -> Result<Ended<K>, Broken> {
        let slot = self.slot_mut(token).ok_or(Broken::Token)?;
        let ended = slot.end(|call| done(call.came(now_ns))).ok_or(Broken::Token)?;
        if ended.abandoned {
            self.free.push(token.slot());
        }
        Ok(ended)
    }

    /// The peer has gone: all calls under way end with what `done` says, and `ended` is told of
    /// each.
    pub fn end_all(&mut self, done: impl Fn() -> D, mut ended: impl FnMut(Ended<K>)) {
        for (at, slot) in (0..).zip(&mut self.slots) {
            let Some(end) = slot.end(|_| done()) else { continue };
            if end.abandoned {
                self.free.push(at);
            }
            ended(end);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_answer_is_taken_once_and_only_by_the_use_of_the_slot_that_asked() {
        let mut slots: Slots<(), u32> = Slots::new(1);
        let first = slots.vacant().unwrap();
        slots.begin(first, BEST_EFFORT, BEST_EFFORT, ());
        assert_eq!(slots.vacant(), None);
        let of_before = Token::new(first.slot(), first.turn().wrapping_sub(1));
        for stranger in [of_before, Token::new(1, first.turn()), Token::new(u32::MAX, 0)] {
            assert_eq!(slots.answer(stranger, || 0, |_| 0).map(|_| ()), Err(Broken::Token), "{stranger:?}");
            assert_eq!(slots.fetch(stranger), Found::Unknown);
        }
        assert!(slots.answer(first, || 0, |_| 7).is_ok());
        assert_eq!(slots.answer(first, || 0, |_| 8).map(|_| ()), Err(Broken::Token), "a second answer");
        assert_eq!(slots.fetch(first), Found::Done(7));
        assert_eq!(slots.fetch(first), Found::Unknown);
        let second = slots.vacant().unwrap();
        assert_eq!((second.slot(), second.turn()), (first.slot(), first.turn().wrapping_add(1)));
        slots.begin(second, BEST_EFFORT, BEST_EFFORT, ());
        assert_eq!(slots.answer(first, || 0, |_| 9).map(|_| ()), Err(Broken::Token), "an answer of the use before");
    }

    #[test]
    fn how_late_an_answer_is_and_when_a_call_ends_follow_from_its_deadline() {
        let mut slots: Slots<(), Came> = Slots::new(4);
        let mut begin = |deadline_ns, until_ns| {
            let token = slots.vacant().unwrap();
            slots.begin(token, deadline_ns, until_ns, ());
            token
        };
        let (any, strict, patient) = (begin(BEST_EFFORT, BEST_EFFORT), begin(100, 100), begin(100, 150));
        let clock = |_: &str| -> u64 { panic!("the clock is not read for a call without a deadline") };
        assert!(!slots.is_overdue(any, || clock("")));
        assert_eq!([99, 100].map(|now| slots.is_overdue(strict, || now)), [false, true]);
        assert_eq!([149, 150].map(|now| slots.is_overdue(patient, || now)), [false, true]);
        for (token, late_by_ns, waits_late) in [(any, 0, false), (strict, 20, false), (patient, 20, true)] {
            let now = || if token == any { clock("") } else { 120 };
            assert!(slots.answer(token, now, |came| came).is_ok());
            assert!(!slots.is_overdue(token, || u64::MAX), "it has ended");
            assert_eq!(slots.fetch(token), Found::Done(Came { late_by_ns, waits_late }));
        }
    }

    /// What a call may be, in a dull table that forgets nothing.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Dull {
        Waiting,
        Abandoned,
        Done(u32),
        Over,
    }

    proptest! {
        #[test]
        fn any_order_of_events_gives_what_a_table_of_all_calls_gives(
            steps in prop::collection::vec((0u8..6, any::<prop::sample::Index>()), 1..400),
        ) {
            const ENTRIES: u32 = 4;
            let mut slots: Slots<u32, u32> = Slots::new(ENTRIES);
            let mut calls: Vec<Token> = Vec::new();
            let mut dull: HashMap<u64, Dull> = HashMap::new();
            for (n, (step, which)) in (0u32..).zip(steps) {
                if step == 0 {
                    let held = dull.values().filter(|state| **state != Dull::Over).count() as u32;
                    prop_assert_eq!(slots.under_way(), held);
                    let token = slots.vacant();
                    prop_assert_eq!(token.is_none(), held == ENTRIES);
                    if let Some(token) = token {
                        slots.begin(token, BEST_EFFORT, BEST_EFFORT, n);
                        prop_assert_eq!(dull.insert(token.bits(), Dull::Waiting), None, "a token is used once");
                        calls.push(token);
                    }
                    continue;
                }
                if step == 5 && n % 8 == 0 {
                    slots.end_all(|| n, |_| ());
                    for state in dull.values_mut() {
                        *state = match *state {
                            Dull::Waiting => Dull::Done(n),
                            Dull::Abandoned => Dull::Over,
                            other => other,
                        };
                    }
                    continue;
                }
                if calls.is_empty() {
                    continue;
                }
                let token = calls[which.index(calls.len())];
                let state = dull.get_mut(&token.bits()).unwrap();
                prop_assert_eq!(slots.is_settled(token), *state != Dull::Waiting);
                match step {
                    1 => {
                        let answered = slots.answer(token, || 0, |_| n);
                        let waits = matches!(state, Dull::Waiting | Dull::Abandoned);
                        prop_assert_eq!(answered.as_ref().map(|ended| ended.abandoned).ok(), waits.then_some(*state == Dull::Abandoned));
                        *state = match *state {
                            Dull::Waiting => Dull::Done(n),
                            Dull::Abandoned => Dull::Over,
                            other => other,
                        };
                    }
                    2 => {
                        let want = match *state {
                            Dull::Waiting => Found::Waiting(()),
                            Dull::Done(with) => Found::Done(with),
                            _ => Found::Unknown,
                        };
                        prop_assert_eq!(slots.fetch(token), want);
                        if let Dull::Done(_) = state {
                            *state = Dull::Over;
                        }
                    }
                    3 => {
                        let found = slots.abandon(token);
                        match *state {
                            Dull::Waiting => prop_assert!(matches!(found, Found::Waiting(None))),
                            Dull::Done(with) => prop_assert!(matches!(found, Found::Done(got) if got == with)),
                            _ => prop_assert!(matches!(found, Found::Unknown)),
                        }
                        *state = match *state {
                            Dull::Waiting | Dull::Abandoned => Dull::Abandoned,
                            _ => Dull::Over,
                        };
                    }
                    _ => {
                        let waits = matches!(state, Dull::Waiting | Dull::Abandoned);
                        prop_assert_eq!(slots.to_cancel(token).is_some(), waits);
                        slots.cancelled(token);
                        prop_assert_ne!(slots.to_cancel(token), Some(true), "the peer is told once");
                    }
                }
            }
        }
    }
}
