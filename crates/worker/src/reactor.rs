//! Where a worker sleeps: one epoll instance for all of its ports.
//!
//! Sources are edge-triggered. An eventfd that a guest kicks need not be read (which would be a
//! system call per wake-up). A socket that stays readable while its port is polled wakes no thread.
//! In exchange a port has to look once more after it armed, which the port trait asks for anyway.
//!
//! A [`Registration`] belongs to one port (one [`Token`]). It may be used from any thread: a
//! control thread adds the kick descriptor of a new ring, or wakes the port to look into its
//! mailbox.

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec, clock_gettime};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use tombolo_shm::doorbell::Doorbell;
use tombolo_switch::Nanos;
use tombolo_switch::wait::{Token, Waiter};

/// Events taken from the kernel per call; more wait for the next call.
const EVENTS_PER_WAIT: usize = 256;
/// The token of the reactor's own doorbell; ports have 32-bit tokens.
const OWN_DOORBELL: u64 = u64::MAX;

#[derive(Debug)]
struct ReactorInner {
    epoll: OwnedFd,
    doorbell: Doorbell,
    /// Tokens woken by [`Registration::wake`], until the worker takes them.
    woken: Mutex<Vec<Token>>,
}

/// The worker's end: it waits here.
pub struct Reactor {
    shared: Arc<ReactorInner>,
    events: Vec<epoll::Event>,
}

/// Makes [`Registration`]s; for the control side.
#[derive(Clone, Debug)]
pub struct Registrar(Arc<ReactorInner>);

/// One port's right to be woken.
#[derive(Clone, Debug)]
pub struct Registration {
    shared: Arc<ReactorInner>,
    token: Token,
}

/// A descriptor that wakes its port; dropping it ends that. It keeps the descriptor open, since the
/// kernel goes on reporting an open file that was closed here but lives on in another process.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<ReactorInner>,
    fd: OwnedFd,
}

impl Reactor {
    /// A reactor without sources.
    ///
    /// # Errors
    /// The kernel's, where no descriptor is left.
    pub fn new() -> Result<Reactor, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let doorbell = Doorbell::new()?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&epoll, &doorbell, epoll::EventData::new_u64(OWN_DOORBELL), flags)?;
        let shared = Arc::new(ReactorInner { epoll, doorbell, woken: Mutex::default() });
        Ok(Reactor { shared, events: Vec::with_capacity(EVENTS_PER_WAIT) })
    }

    /// For the control side.
    pub fn registrar(&self) -> Registrar {
        Registrar(self.shared.clone())
    }
}

impl Registrar {
    /// The registration of the port that has `token`.
    pub fn registration(&self, token: Token) -> Registration {
        Registration { shared: self.0.clone(), token }
    }
}

impl Registration {
    /// The token that this registration wakes.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Wakes the port whenever `fd` becomes readable (or fails), edge-triggered. Takes a duplicate
    /// of `fd`.
    ///
    /// # Errors
    /// The kernel's: a descriptor that cannot be polled (`EPERM`), or none left.
    pub fn watch(&self, fd: impl AsFd) -> Result<Watch, Errno> {
        self.watch_for(fd, epoll::EventFlags::IN)
    }

    /// As [`Registration::watch`], and when `fd` becomes writable again after it was full.
    ///
    /// # Errors
    /// As for [`Registration::watch`].
    pub fn watch_both(&self, fd: impl AsFd) -> Result<Watch, Errno> {
        self.watch_for(fd, epoll::EventFlags::IN | epoll::EventFlags::OUT)
    }

    fn watch_for(&self, fd: impl AsFd, interest: epoll::EventFlags) -> Result<Watch, Errno> {
        let fd = rustix::io::fcntl_dupfd_cloexec(fd, 3)?;
        let flags = interest | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&self.shared.epoll, &fd, epoll::EventData::new_u64(self.token.0.into()), flags)?;
        Ok(Watch { shared: self.shared.clone(), fd })
    }

    /// Wakes the port now, from any thread.
    pub fn wake(&self) {
        self.shared.woken.lock().unwrap_or_else(PoisonError::into_inner).push(self.token);
        self.shared.doorbell.ring();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // It was added in `watch_for` and is removed nowhere else, so this cannot fail.
        let _ = epoll::delete(&self.shared.epoll, &self.fd);
    }
}

impl Waiter for Reactor {
    fn wait(&mut self, timeout: Option<Nanos>, ready: &mut Vec<Token>) {
        let timeout = timeout.map(|Nanos(ns)| Timespec {
            tv_sec: (ns / 1_000_000_000).min(i64::MAX as u64) as i64,
            tv_nsec: (ns % 1_000_000_000) as i64,
        });
        self.events.clear();
        // An interrupted or failed wait reports no event; the caller's loop comes back here anyway.
        let _ = epoll::wait(&self.shared.epoll, rustix::buffer::spare_capacity(&mut self.events), timeout.as_ref());
        for event in &self.events {
            let data = event.data.u64();
            if data == OWN_DOORBELL {
                // Taken before the list is read: a wake-up that comes in between rings again.
                self.shared.doorbell.take();
                ready.append(&mut self.shared.woken.lock().unwrap_or_else(PoisonError::into_inner));
            } else {
                ready.push(Token(data as u32));
            }
        }
    }

    fn now(&mut self) -> Nanos {
        let now = clock_gettime(ClockId::Monotonic);
        Nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn woken(reactor: &mut Reactor, timeout: Nanos) -> Vec<Token> {
        let mut ready = Vec::new();
        reactor.wait(Some(timeout), &mut ready);
        ready
    }

    #[test]
    fn a_kick_wakes_its_port_once_per_ring_without_being_read() {
        let mut reactor = Reactor::new().unwrap();
        let doorbell = Doorbell::new().unwrap();
        let watch = reactor.registrar().registration(Token(7)).watch(&doorbell).unwrap();
        assert!(woken(&mut reactor, Nanos(0)).is_empty());
        for _ in 0..2 {
            doorbell.ring();
            assert_eq!(woken(&mut reactor, Nanos::SECOND), [Token(7)]);
            assert!(woken(&mut reactor, Nanos(0)).is_empty());
        }
        drop(watch);
        doorbell.ring();
        assert!(woken(&mut reactor, Nanos(0)).is_empty());
    }

    #[test]
    fn a_wake_from_another_thread_ends_the_sleep() {
        let mut reactor = Reactor::new().unwrap();
        let registration = reactor.registrar().registration(Token(3));
        let other = std::thread::spawn(move || registration.wake());
        assert_eq!(woken(&mut reactor, Nanos::SECOND.times(10)), [Token(3)]);
        other.join().unwrap();
        assert!(woken(&mut reactor, Nanos(0)).is_empty());
    }
}
