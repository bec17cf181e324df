//! How threads wait for answers.
//!
//! One of the threads that wait is the leader: it polls or sleeps on the provider's word without
//! the lock. The others are followers, on `turn`. A thread that takes answers wakes the followers.
//! A leader that is done leaves the lead to one of them.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tombolo_ring::rpc::{PUBLISHED, ring};
use tombolo_shm::futex;

use super::{ClientConnection, ConnectionState};
use crate::clock::{self, now_ns};
use crate::cpu;
use crate::poll::{self, Poller, Polling};
use crate::sync::lock;

/// The longest sleep; a wait without a limit is a sequence of them.
pub(super) const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// Who waits.
#[derive(Debug, Default)]
pub(super) struct Lead {
    /// One of those that wait sleeps or polls for all.
    taken: bool,
    /// The others.
    followers: u32,
    poller: Poller,
}

/// How long a thread waits. The clock is first looked at when it matters.
pub(super) struct Limit {
    timeout_ns: u64,
    until: Option<u64>,
    /// An instant at which it ends in any case.
    end_ns: u64,
    over: bool,
}

impl Limit {
    /// So long, and not beyond an instant.
    pub(super) fn new(timeout: Duration, end_ns: u64) -> Limit {
        Limit { timeout_ns: clock::ns(timeout), until: None, end_ns, over: false }
    }

    fn left_ns(&mut self, now: u64) -> u64 {
        let until = *self.until.get_or_insert(now.saturating_add(self.timeout_ns).min(self.end_ns));
        until.saturating_sub(now)
    }

    fn is_over(&mut self, now: u64) -> bool {
        self.over |= self.left_ns(now) == 0;
        self.over
    }

    /// How long the next sleep may last; `None` when the wait is over.
    fn left(&mut self, now: u64) -> Option<Duration> {
        (!self.is_over(now)).then(|| Duration::from_nanos(self.left_ns(now)).min(LONGEST_SLEEP))
    }
}

impl ClientConnection {
    /// Answers were taken: others look whether theirs is among them.
    #[inline]
    pub(super) fn tell(&self, state: &ConnectionState) {
        if state.lead.taken {
            // The one that sleeps may be the one whose answer this was; and it is not armed any
            // more.
            futex::wake(self.peer.view(), PUBLISHED);
        }
        if state.lead.followers > 0 {
            self.turn.notify_all();
        }
    }

    /// Waits until `ready`, the connection is lost, or the time is over.
    pub(super) fn wait_until<'a>(
        &'a self,
        mut state: MutexGuard<'a, ConnectionState>,
        mut limit: Limit,
        mut ready: impl FnMut(&mut ConnectionState) -> bool,
    ) -> MutexGuard<'a, ConnectionState> {
        loop {
            // Before the answers are taken: what a provider wrote before it went is still an
            // answer.
            let gone = self.is_gone();
            self.drain(&mut state);
            if ready(&mut state) || gone || state.broken.is_some() || limit.over {
                break;
            }
            if state.lead.taken {
                let Some(left) = limit.left(now_ns()) else { continue };
                state.lead.followers += 1;
                state = self.turn.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
                state.lead.followers -= 1;
                continue;
            }
            state.lead.taken = true;
            state = self.lead(state, &mut limit);
            state.lead.taken = false;
        }
        if state.lead.followers > 0 {
            // Another thread's turn to sleep.
            self.turn.notify_all();
        }
        state
    }

    /// Polls or sleeps until something may have come, or the time is over.
    fn lead<'a>(
        &'a self,
        mut state: MutexGuard<'a, ConnectionState>,
        limit: &mut Limit,
    ) -> MutexGuard<'a, ConnectionState> {
        let ends = self.ends();
        let index = state.answers.index();
        let polls = self.polls(&mut state);
        let mut began = None;
        if polls {
            let window_ns = state.lead.poller.window_ns();
            drop(state);
            let find = || ring::is_there(ends, index).then_some(());
            let over = |now, looked| looked >= window_ns || limit.is_over(now) || self.gone.load(Ordering::Relaxed);
            let (found, first_look) = poll::look(find, over);
            began = first_look;
            let gained = found.is_some();
            state = lock(&self.state);
            state.lead.poller.learn(gained);
            // Another thread may have taken what came meanwhile, the answer that this one waits for
            // too.
            if gained || self.polling == Polling::Always || state.answers.index() != index {
                return state;
            }
        }
        let now = now_ns();
        let Some(left) = limit.left(now) else { return state };
        match state.answers.arm(ends) {
            Ok(true) => {}
            Ok(false) => return state,
            Err(broken) => {
                state.broken = Some(broken);
                return state;
            }
        }
        let index = state.answers.index();
        drop(state);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        if !self.is_gone() {
            futex::wait(self.peer.view(), PUBLISHED, index, left);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        let mut state = lock(&self.state);
        state.lead.poller.slept(now_ns().saturating_sub(began.unwrap_or(now)), polls);
        state
    }

    fn polls(&self, state: &mut ConnectionState) -> bool {
        match self.polling {
            Polling::Never => false,
            Polling::Always => true,
            Polling::Adaptive => {
                cpu::several() && state.lead.poller.worth_it() && self.ends().peer_cpu() != Some(self.set_cpu())
            }
        }
    }

    /// Tells the provider where we run, where that has changed.
    pub(super) fn set_cpu(&self) -> u32 {
        let cpu = cpu::current();
        // Relaxed: a hint.
        if self.cpu.swap(cpu, Ordering::Relaxed) != cpu {
            self.ends().set_cpu(cpu);
        }
        cpu
    }
}
