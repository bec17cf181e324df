//! Signalling an eventfd that a peer holds too, without ever blocking.
//!
//! `write` on an eventfd blocks when its counter is full, unless the open file is non-blocking.
//! That flag belongs to the open file, which the peer shares. The peer can clear the flag, fill the
//! counter, and keep a worker in `write` for ever. Looking with `poll` first leaves a gap, and
//! `RWF_NOWAIT` is not supported for writing to eventfds.
//!
//! The kernel itself signals eventfds without blocking, when asynchronous work completes. A full
//! counter stays full, which is a rung doorbell. The ways are tried in this order:
//!
//! 1. `aio`: one system call. The system has a limit of contexts that any local user can use up.
//! 2. `uring`: three system calls. Administrators and containers may switch io_uring off.
//! 3. A helper thread that writes, and may block. A doorbell has one helper at most, and the
//!    process [`MAX_HELPERS`]. A helper that a peer keeps blocked ends when the peer closes or
//!    drains the eventfd.
//! 4. The signal is dropped and counted ([`Counters::dropped`]).
//!
//! A thread keeps its context and its ring until it ends. Where it has none, the next signal tries
//! to make one.

use std::cell::RefCell;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::fork;

mod aio;
mod uring;

/// Most helper threads of the process at a time.
pub const MAX_HELPERS: usize = 16;

/// What became of signals that did not go the usual way, since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Signals that went through io_uring, since no context of asynchronous I/O was to be had
    /// (`fs.aio-max-nr`).
    pub by_io_uring: u64,
    /// Signals that were left to a helper thread, since there was no io_uring either.
    pub by_helper: u64,
    /// Signals that were lost, since all helpers were busy or none could be started.
    pub dropped: u64,
}

static BY_IO_URING: AtomicU64 = AtomicU64::new(0);
static BY_HELPER: AtomicU64 = AtomicU64::new(0);
static DROPPED: AtomicU64 = AtomicU64::new(0);
static HELPERS: AtomicUsize = AtomicUsize::new(0);

/// The counters of this process.
pub fn counters() -> Counters {
    // Relaxed: statistics.
    let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Counters { by_io_uring: of(&BY_IO_URING), by_helper: of(&BY_HELPER), dropped: of(&DROPPED) }
}

fn count(counter: &AtomicU64) {
    // Relaxed: statistics.
    counter.fetch_add(1, Ordering::Relaxed);
}

/// What a thread signals with.
struct Ways {
    /// The process that made them: a forked child makes its own.
    process: u32,
    aio: Option<aio::Context>,
    uring: Option<uring::Uring>,
}

impl Ways {
    const NONE: Ways = Ways { process: 0, aio: None, uring: None };

    fn signal(&mut self, fd: BorrowedFd<'_>) -> bool {
        let here = fork::process();
        if self.process != here {
            *self = Ways { process: here, ..Ways::NONE };
        }
        if by(&mut self.aio, usable(AIO, aio::Context::new), |context| context.signal(fd)) {
            return true;
        }
        let done = by(&mut self.uring, usable(URING, uring::Uring::new), |ring| ring.signal(fd));
        if done {
            count(&BY_IO_URING);
        }
        done
    }
}

/// Signals by `way`, which is made first where there is none; one that fails is thrown away.
fn by<T>(way: &mut Option<T>, make: impl FnOnce() -> Option<T>, signal: impl FnOnce(&mut T) -> bool) -> bool {
    if way.is_none() {
        *way = make();
    }
    let done = way.as_mut().is_some_and(signal);
    if !done {
        *way = None;
    }
    done
}

const AIO: u8 = 1;
const URING: u8 = 2;
#[cfg(test)]
const HELPER: u8 = 4;

#[cfg(test)]
thread_local! {
    /// Ways that a test has fail on this thread.
    static FAILING: std::cell::Cell<u8> = const { std::cell::Cell::new(0) };
}

/// `make`, unless a test has this way fail.
fn usable<T>(way: u8, make: impl FnOnce() -> Option<T>) -> impl FnOnce() -> Option<T> {
    move || {
        #[cfg(test)]
        if FAILING.get() & way != 0 {
            return None;
        }
        let _ = way;
        make()
    }
}

thread_local! {
    static WAYS: RefCell<Ways> = const { RefCell::new(Ways::NONE) };
}

// States of a doorbell's helper.
const IDLE: u8 = 0;
/// A write is asked for.
const ASKED: u8 = 1;
/// The helper writes; what is asked for from now on takes another write.
const WRITING: u8 = 2;

/// A doorbell's claim to a helper thread.
#[derive(Debug, Default)]
pub(crate) struct Helper(Arc<AtomicU8>);

impl Helper {
    /// Has a helper thread write. False where the signal is lost.
    fn ask(&self, fd: BorrowedFd<'_>) -> bool {
        let now = [PollFd::from_borrowed_fd(fd, PollFlags::OUT)];
        if poll(&mut { now }, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0) {
            // Full, which is a rung doorbell.
            return true;
        }
        // SeqCst: orders the caller's stores before the write that follows, as the system call
        // would have.
        if self.0.swap(ASKED, Ordering::SeqCst) != IDLE {
            return true;
        }
        let started = start(self.0.clone(), fd);
        if !started {
            self.0.store(IDLE, Ordering::SeqCst);
        }
        started
    }
}

fn start(state: Arc<AtomicU8>, fd: BorrowedFd<'_>) -> bool {
    #[cfg(test)]
    if FAILING.get() & HELPER != 0 {
        return false;
    }
    let Ok(fd) = rustix::io::fcntl_dupfd_cloexec(fd, 3) else { return false };
    if HELPERS.fetch_add(1, Ordering::Relaxed) >= MAX_HELPERS {
        HELPERS.fetch_sub(1, Ordering::Relaxed);
        return false;
    }
    let thread = std::thread::Builder::new().name("doorbell".into()).stack_size(64 << 10);
    let started = thread.spawn(move || help(&state, fd)).is_ok();
    if !started {
        HELPERS.fetch_sub(1, Ordering::Relaxed);
    }
    started
}

/// Writes for as long as it is asked to.
fn help(state: &AtomicU8, fd: OwnedFd) {
    loop {
        state.store(WRITING, Ordering::SeqCst);
        // The only failure is a full counter, which is a rung doorbell. This may block; see the
        // head of the module.
        let _ = rustix::io::write(&fd, &1u64.to_ne_bytes());
        if state.compare_exchange(WRITING, IDLE, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            break;
        }
    }
    drop(fd);
    HELPERS.fetch_sub(1, Ordering::Relaxed);
}

/// Signals the eventfd `fd` and never blocks. False where the signal was lost, which is counted.
#[inline]
pub(crate) fn signal(fd: BorrowedFd<'_>, helper: &Helper) -> bool {
    WAYS.try_with(|ways| ways.borrow_mut().signal(fd)).unwrap_or(false) || signal_slowly(fd, helper)
}

#[cold]
fn signal_slowly(fd: BorrowedFd<'_>, helper: &Helper) -> bool {
    let done = helper.ask(fd);
    count(if done { &BY_HELPER } else { &DROPPED });
    done
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doorbell::Doorbell;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
    use std::sync::mpsc;
    use std::time::Duration;
    use tombolo_testing::until;

    const LONG: Duration = Duration::from_secs(20);

    /// A doorbell, and the peer's descriptor of the same eventfd.
    fn doorbell() -> (Doorbell, OwnedFd) {
        let fd = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let peer = fd.try_clone().unwrap();
        (Doorbell::adopt(fd).unwrap(), peer)
    }

    /// The peer makes the eventfd blocking and full.
    fn fill(peer: &OwnedFd) {
        fcntl_setfl(peer, fcntl_getfl(peer).unwrap() | OFlags::NONBLOCK).unwrap();
        let _ = rustix::io::read(peer, &mut [0; 8]);
        rustix::io::write(peer, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        fcntl_setfl(peer, fcntl_getfl(peer).unwrap() - OFlags::NONBLOCK).unwrap();
    }

    /// What `with` finds when it runs on a thread of its own, whose `failing` ways fail.
    fn run<T: Send + 'static>(failing: u8, with: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, result) = mpsc::channel();
        std::thread::spawn(move || {
            FAILING.set(failing);
            done.send(with()).unwrap();
        });
        result.recv_timeout(LONG).expect("it returns")
    }

    fn arrives_and_never_blocks(failing: u8) {
        let (doorbell, peer) = doorbell();
        let doorbell = run(failing, move || {
            doorbell.ring();
            doorbell
        });
        until("the signal arrives", || doorbell.take());
        fill(&peer);
        run(failing, move || (0..500).for_each(|_| doorbell.ring()));
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(&peer, &mut count), Ok(8), "still rung");
    }

    #[test]
    fn every_way_signals_and_never_blocks() {
        arrives_and_never_blocks(0);
        if uring::Uring::new().is_some() {
            let before = counters().by_io_uring;
            arrives_and_never_blocks(AIO);
            assert!(counters().by_io_uring >= before + 501);
        } else {
            tombolo_testing::skip("no io_uring here");
        }
        let before = counters().by_helper;
        arrives_and_never_blocks(AIO | URING);
        assert!(counters().by_helper >= before + 501);
    }

    #[test]
    fn a_signal_that_cannot_be_sent_is_counted() {
        let (doorbell, _peer) = doorbell();
        let before = counters().dropped;
        let doorbell = run(AIO | URING | HELPER, move || {
            doorbell.ring();
            doorbell
        });
        assert!(counters().dropped > before && !doorbell.take());
        run(0, move || {
            doorbell.ring();
            assert!(doorbell.take(), "the next one arrives");
        });
    }

    /// A peer that wins the race against a helper keeps that one thread, and no other doorbell
    /// waits for it.
    #[test]
    fn a_blocked_helper_is_the_only_one_of_its_doorbell() {
        let (doorbell, peer) = doorbell();
        fill(&peer);
        let state = Arc::new(AtomicU8::new(ASKED));
        assert!(start(state.clone(), rustix::fd::AsFd::as_fd(&doorbell)));
        until("the helper writes", || state.load(Ordering::SeqCst) == WRITING);
        let helper = Helper(state.clone());
        assert!(helper.ask(rustix::fd::AsFd::as_fd(&doorbell)));
        arrives_and_never_blocks(AIO | URING);
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(&peer, &mut count), Ok(8));
        until("the helper ends", || state.load(Ordering::SeqCst) == IDLE);
    }

    /// The real thing: everything that the system allows is taken.
    #[test]
    fn a_used_up_limit_of_asynchronous_io_blocks_nobody() {
        let taken = aio::take_all();
        assert!(aio::Context::new().is_none(), "the limit of fs.aio-max-nr is reached");
        arrives_and_never_blocks(0);
        drop(taken);
    }
}
