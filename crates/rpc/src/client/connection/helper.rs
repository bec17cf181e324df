//! The two threads that wait on behalf of futures, and the books of those futures.
//!
//! Futexes are in no reactor. So the first future of a connection starts a thread that takes
//! answers and wakes futures, until the last client has gone. Deadlines have a thread of their own.
//! The first one may sleep on the ring's futex, where a wake-up that comes just before the sleep is
//! lost. The second one sleeps on a condition variable with the lock, where none is.

use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::task::Waker;
use std::time::Duration;

use tombolo_calls::CallError;
use tombolo_ring::rpc::entry::Token;

use super::super::reply::Reply;
use super::wait::{LONGEST_SLEEP, Limit};
use super::{ClientConnection, ConnectionState};
use crate::clock::now_ns;
use crate::sync::lock;

/// The futures of a connection.
#[derive(Debug)]
pub(super) struct Futures {
    /// Calls under way that have a waker.
    under_way: u32,
    /// No future's call ends by itself before this instant; the thread of deadlines looks for those
    /// that do, then.
    end_ns: u64,
    /// Wakers of futures that are done.
    woken: Vec<Waker>,
    /// The threads were started.
    helped: bool,
}

impl Default for Futures {
    fn default() -> Self {
        Futures { under_way: 0, end_ns: u64::MAX, woken: Vec::new(), helped: false }
    }
}

impl Futures {
    /// The call that this waker waits for has ended.
    pub(super) fn ended(&mut self, waker: Waker) {
        self.under_way -= 1;
        self.woken.push(waker);
    }

    /// A call is no longer awaited; whether by a future.
    pub(super) fn abandoned(&mut self, by_future: bool) {
        self.under_way -= u32::from(by_future);
    }

    /// To be woken without the lock.
    #[inline]
    pub(super) fn take_woken(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.woken)
    }
}

impl ConnectionState {
    /// Leaves the wakers of futures whose calls have ended by themselves in `woken`: who polls them
    /// finds that.
    fn end_futures(&mut self, now: u64) {
        let ConnectionState { slots, futures, .. } = self;
        if now < futures.end_ns {
            return;
        }
        futures.end_ns = u64::MAX;
        for waiting in slots.all_waiting_mut() {
            let until_ns = waiting.until_ns();
            if until_ns > now {
                if waiting.waker.is_some() {
                    futures.end_ns = futures.end_ns.min(until_ns);
                }
            } else if let Some(waker) = waiting.waker.take() {
                futures.ended(waker);
            }
        }
    }

    /// The wakers of all futures: of those that are done, and of those that will not be.
    pub(super) fn take_wakers(&mut self) -> Vec<Waker> {
        self.futures.under_way = 0;
        let waiting = self.slots.all_waiting_mut().filter_map(|waiting| waiting.waker.take());
        self.futures.woken.drain(..).chain(waiting).collect()
    }
}

impl ClientConnection {
    /// What a call ended with, or the waker is woken when it ends.
    pub(in super::super) fn poll_with(self: &Arc<Self>, token: Token, by: &Waker) -> Option<Result<Reply, CallError>> {
        if let Some(done) = self.poll(token) {
            return Some(done);
        }
        let mut own = Some(by.clone());
        let (mut again, mut sooner) = (false, false);
        {
            let state = &mut *lock(&self.state);
            let ConnectionState { slots, futures, .. } = state;
            match slots.waiting_mut(token) {
                Some(waiting) => {
                    // The one before is dropped without the lock.
                    std::mem::swap(&mut waiting.waker, &mut own);
                    futures.under_way += u32::from(own.is_none());
                    // The thread of deadlines has to end its sleep sooner.
                    sooner = waiting.until_ns() < futures.end_ns;
                    futures.end_ns = futures.end_ns.min(waiting.until_ns());
                }
                // It came in between.
                None => again = true,
            }
            again |= self.is_gone();
            if !std::mem::replace(&mut futures.helped, true) {
                let connection = self.clone();
                let help = move || connection.help();
                let started = std::thread::Builder::new().name("tombolo-rpc-async".into()).spawn(help);
                // Without the thread the executor has to look again and again.
                futures.helped = started.is_ok();
                again |= started.is_err();
            }
            self.turn.notify_all();
        }
        if sooner {
            self.timer.notify_all();
        }
        if again {
            by.wake_by_ref();
        }
        None
    }

    /// Waits on behalf of futures until the last client has gone.
    fn help(&self) {
        std::thread::scope(|scope| {
            let end = || self.end_in_time();
            let timer = std::thread::Builder::new().name("tombolo-rpc-time".into()).spawn_scoped(scope, end);
            self.wait_for_answers(timer.is_ok());
            // It has seen `closing` or `broken`, or does now.
            self.timer.notify_all();
        });
        let wakers = lock(&self.state).take_wakers();
        wakers.into_iter().for_each(Waker::wake);
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst) || self.is_gone()
    }

    /// Calls the wakers of futures that are done, without the lock.
    fn wake_futures<'a>(&'a self, mut state: MutexGuard<'a, ConnectionState>) -> MutexGuard<'a, ConnectionState> {
        let woken = state.futures.take_woken();
        if woken.is_empty() {
            return state;
        }
        drop(state);
        woken.into_iter().for_each(Waker::wake);
        lock(&self.state)
    }

    /// Takes the answers of futures and wakes them. Where no thread could be started for their
    /// deadlines, it looks after those as well.
    fn wait_for_answers(&self, has_timer: bool) {
        let mut state = lock(&self.state);
        loop {
            state = self.wake_futures(state);
            if self.is_closing() || state.broken.is_some() {
                // Under the lock, so that the other thread either sees it or sleeps already and is
                // woken.
                return;
            }
            if state.futures.under_way == 0 {
                state = self.turn.wait(state).unwrap_or_else(|e| e.into_inner());
                continue;
            }
            let end_ns = if has_timer { u64::MAX } else { state.futures.end_ns };
            let ready = |state: &mut ConnectionState| {
                let Futures { under_way, end_ns: next_ns, woken, .. } = &state.futures;
                let sooner = !has_timer && *next_ns < end_ns;
                *under_way == 0 || !woken.is_empty() || sooner || self.is_closing()
            };
            state = self.wait_until(state, Limit::new(LONGEST_SLEEP, end_ns), ready);
            if !has_timer {
                state.end_futures(now_ns());
            }
        }
    }

    /// Ends the futures whose calls end by themselves, at their instants.
    fn end_in_time(&self) {
        let mut state = lock(&self.state);
        loop {
            state = self.wake_futures(state);
            if self.is_closing() || state.broken.is_some() {
                return;
            }
            let now = now_ns();
            if state.futures.end_ns <= now {
                state.end_futures(now);
                continue;
            }
            let left = Duration::from_nanos(state.futures.end_ns - now).min(LONGEST_SLEEP);
            state = match state.futures.under_way {
                0 => self.timer.wait(state).unwrap_or_else(|e| e.into_inner()),
                _ => self.timer.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0,
            };
        }
    }
}
