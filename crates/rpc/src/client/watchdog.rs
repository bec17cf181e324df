//! Notices that providers have gone: one thread per process sleeps on the sockets of all
//! connections, and on the processes at their other ends.
//!
//! A socket closes with its process, however that ends, unless a forked child keeps it open: then
//! the process itself is the sign. The thread marks the connection as lost and wakes those who wait
//! on it, again and again until none is left. A waiter cannot be woken between its look at the mark
//! and its sleep, so one wake-up might come too early. While no provider dies the thread never
//! runs.
//!
//! A process that forks has no such thread in the child: its first connection starts one of its
//! own. The connections of its parent do not survive a fork; in the child they are left alone
//! ([`is_ours`]). The child knows that there is no thread yet from data behind a lock that forks
//! take ([`fork::keep`]), so that the lock is free in the child.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, Weak};

use rustix::event::epoll;
use rustix::io::Errno;
use tombolo_shm::fork;

use super::connection::ClientConnection;
use crate::process;
use crate::sync::lock;

struct Watchdog {
    /// The process whose thread it is.
    process: u32,
    epoll: OwnedFd,
    watched: Mutex<Watched>,
}

#[derive(Default)]
struct Watched {
    next: u32,
    connections: HashMap<u64, (Weak<ClientConnection>, Option<OwnedFd>)>,
}

static WATCHDOG: Mutex<Option<Arc<Watchdog>>> = Mutex::new(None);

/// That of this process, with its thread.
fn watchdog() -> Result<Arc<Watchdog>, Errno> {
    fork::keep(&WATCHDOG);
    let known = &mut *lock(&WATCHDOG);
    if let Some(watchdog) = known.as_ref().filter(|watchdog| watchdog.process == process::here()) {
        return Ok(watchdog.clone());
    }
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let watchdog = Arc::new(Watchdog { process: process::here(), epoll, watched: Mutex::default() });
    let watched = watchdog.clone();
    let started = std::thread::Builder::new().name("tombolo-rpc-watchdog".into()).spawn(move || watch(&watched));
    started.map_err(|_| Errno::AGAIN)?;
    Ok(known.insert(watchdog).clone())
}

fn watch(watchdog: &Watchdog) {
    let mut events = Vec::with_capacity(16);
    loop {
        events.clear();
        let _ = epoll::wait(&watchdog.epoll, rustix::buffer::spare_capacity(&mut events), None);
        for event in &events {
            let Some((connection, process)) = lock(&watchdog.watched).connections.remove(&event.data.u64()) else {
                continue;
            };
            watchdog.forget(process);
            if let Some(connection) = connection.upgrade() {
                let _ = epoll::delete(&watchdog.epoll, connection.socket());
                connection.lost();
            }
        }
    }
}

impl Watchdog {
    /// A forked child may hold the descriptor too: closing ours would not end its events.
    fn forget(&self, process: Option<OwnedFd>) {
        if let Some(process) = process {
            let _ = epoll::delete(&self.epoll, &process);
        }
    }
}

/// Watches a connection; returns its number, which tells the process too.
pub(super) fn add(connection: &Arc<ClientConnection>) -> Result<u64, Errno> {
    let watchdog = watchdog()?;
    // Edges: what a forked child keeps open of a connection that ended here is signalled once, and
    // not for ever.
    let edge = epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
    let process = process::pidfd_of(connection.socket());
    let id = {
        let watched = &mut *lock(&watchdog.watched);
        watched.next = watched.next.wrapping_add(1);
        let id = u64::from(watchdog.process) << 32 | u64::from(watched.next);
        if let Some(process) = &process {
            epoll::add(&watchdog.epoll, process, epoll::EventData::new_u64(id), edge | epoll::EventFlags::IN)?;
        }
        watched.connections.insert(id, (Arc::downgrade(connection), process));
        id
    };
    // What the provider sends is read by who needs it; its end is all that is of interest here.
    let added = epoll::add(&watchdog.epoll, connection.socket(), epoll::EventData::new_u64(id), edge);
    added.inspect_err(|_| remove(id))?;
    Ok(id)
}

/// Whether this process made the connection of that number. In a forked child it is the parent's,
/// and not to be touched.
pub(super) fn is_ours(id: u64) -> bool {
    (id >> 32) as u32 == process::here()
}

/// The connection ends: its socket is closed next, which ends its events.
pub(super) fn remove(id: u64) {
    if !is_ours(id) {
        return;
    }
    if let Ok(watchdog) = watchdog()
        && let Some((_, process)) = lock(&watchdog.watched).connections.remove(&id)
    {
        watchdog.forget(process);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use tombolo_testing::fork::in_child;

    use super::*;

    #[test]
    fn a_child_that_is_forked_at_any_instant_watches_for_itself() {
        let enough = AtomicBool::new(false);
        let all = std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !enough.load(Ordering::Relaxed) {
                        assert!(watchdog().is_ok());
                    }
                });
            }
            // The first of a process starts its thread, under the lock; each child is the first of
            // its own.
            let watches = || watchdog().is_ok_and(|watchdog| watchdog.process == std::process::id());
            let all = (0..300).try_for_each(|_| in_child(|| watches() && in_child(watches).is_ok()));
            enough.store(true, Ordering::Relaxed);
            all
        });
        all.unwrap();
    }
}
