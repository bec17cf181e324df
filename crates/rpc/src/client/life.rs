//! Notices that providers have gone: one thread per process sleeps on the sockets of all connections.
//!
//! A socket closes with its process, however that ends. The thread marks the connection as lost and wakes those who wait on it, again
//! and again until none is left: between its look at the mark and its sleep a waiter cannot be woken, so one wake-up might come too
//! early. While nobody dies the thread never runs. A process that forks has no such thread in the child: connections do not
//! survive a fork.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, OnceLock, Weak};

use rustix::event::epoll;
use rustix::io::Errno;

use super::Inner;
use crate::sync::lock;

struct Life {
    epoll: OwnedFd,
    watched: Mutex<(u64, HashMap<u64, Weak<Inner>>)>,
}

static LIFE: OnceLock<Option<Life>> = OnceLock::new();

fn life() -> Result<&'static Life, Errno> {
    let made = LIFE.get_or_init(|| {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).ok()?;
        let started = std::thread::Builder::new().name("tombolo-rpc-life".into()).spawn(watch);
        started.ok().map(|_| Life { epoll, watched: Mutex::default() })
    });
    made.as_ref().ok_or(Errno::AGAIN)
}

fn watch() {
    // The thread may run before the cell is filled.
    let Some(life) = LIFE.wait() else { return };
    let mut events = Vec::with_capacity(16);
    loop {
        events.clear();
        let _ = epoll::wait(&life.epoll, rustix::buffer::spare_capacity(&mut events), None);
        for event in &events {
            let inner = lock(&life.watched).1.remove(&event.data.u64()).and_then(|weak| weak.upgrade());
            if let Some(inner) = inner {
                let _ = epoll::delete(&life.epoll, &inner.socket);
                inner.lost();
            }
        }
    }
}

/// Watches a connection; returns its number.
pub(super) fn add(inner: &std::sync::Arc<Inner>) -> Result<u64, Errno> {
    let life = life()?;
    let id = {
        let (next, watched) = &mut *lock(&life.watched);
        *next += 1;
        watched.insert(*next, std::sync::Arc::downgrade(inner));
        *next
    };
    // What the provider sends is read by who needs it; its end is all that is of interest here.
    let added = epoll::add(&life.epoll, &inner.socket, epoll::EventData::new_u64(id), epoll::EventFlags::RDHUP);
    added.inspect_err(|_| remove(id))?;
    Ok(id)
}

/// The connection ends: its socket is closed next, which ends its events.
pub(super) fn remove(id: u64) {
    if let Ok(life) = life() {
        lock(&life.watched).1.remove(&id);
    }
}
