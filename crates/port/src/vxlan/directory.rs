//! What the control plane says of the members behind a tunnel: at which remote each MAC address is,
//! and which MAC address has which IP address.
//!
//! The control side keeps a [`Directory`] and leaves whole tables in it; the port looks into it
//! when it is woken. So a table changes between two turns, all of it at once, and a look-up takes
//! no lock. A port that is opened in place of another one finds the table that is there.
//!
//! The table before the last is kept, and given up with the next one. So its memory is returned by
//! the control side, and not by a worker between frames.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tombolo_switch::frame::Mac;
use tombolo_switch::limit::Storm;

use tombolo_worker::reactor::Registration;

/// Members behind one tunnel.
pub const MAX_PLACES: usize = 16_384;
/// IP addresses of one of them.
pub const MAX_ADDRESSES: usize = 16;

/// Where members are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// The ends of the tunnel, which `remotes` counts.
    ends: Vec<IpAddr>,
    /// By MAC address, the number of its end.
    remotes: HashMap<Mac, u16>,
    /// The MAC address that has an IP address.
    holders: HashMap<IpAddr, Mac>,
}

impl Places {
    /// Says that `mac` is behind the end of the tunnel at `end`; what was said of `mac` before is
    /// replaced. `false`: there are [`MAX_PLACES`], or more ends than a tunnel can have.
    pub fn place(&mut self, mac: Mac, end: IpAddr) -> bool {
        if self.remotes.len() >= MAX_PLACES && !self.remotes.contains_key(&mac) {
            return false;
        }
        let known = self.ends.iter().position(|known| *known == end);
        let Ok(number) = u16::try_from(known.unwrap_or(self.ends.len())) else { return false };
        if known.is_none() {
            self.ends.push(end);
        }
        self.remotes.insert(mac, number);
        true
    }

    /// Has questions for `address` answered with `mac`. `false`: there are as many as members may
    /// have together.
    pub fn answer_for(&mut self, address: IpAddr, mac: Mac) -> bool {
        let fits = self.holders.len() < MAX_PLACES * MAX_ADDRESSES || self.holders.contains_key(&address);
        if fits {
            self.holders.insert(address, mac);
        }
        fits
    }

    /// How many MAC addresses have a place, and how many IP addresses are answered for.
    pub fn len(&self) -> (usize, usize) {
        (self.remotes.len(), self.holders.len())
    }

    /// Whether nothing is said.
    pub fn is_empty(&self) -> bool {
        self.remotes.is_empty() && self.holders.is_empty()
    }
}

#[derive(Debug, Default)]
struct Mailbox {
    /// Set after a table was left, Release; partner of the Acquire swap of the port.
    is_fresh: AtomicBool,
    places: Mutex<(Arc<Places>, Arc<Places>)>,
    /// What the remotes may send to groups, once that was changed.
    storm: Mutex<Option<Storm>>,
    port: Mutex<Option<Registration>>,
}

/// The control side's end; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Directory(Arc<Mailbox>);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while it holds one of these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Directory {
    /// Replaces the table, from the port's next turn on; for any thread, never waits for a worker.
    pub fn set(&self, places: Places) {
        let gone = {
            let (now, before) = &mut *lock(&self.0.places);
            let last = std::mem::replace(now, Arc::new(places));
            std::mem::replace(before, last)
        };
        drop(gone);
        self.tell();
    }

    /// Replaces the limits of [`super::VxlanConfig::storm`], from the port's next turn on, also for
    /// one that is opened again; for any thread, never waits for a worker.
    pub fn set_storm(&self, storm: Storm) {
        *lock(&self.0.storm) = Some(storm);
        self.tell();
    }

    fn tell(&self) {
        self.0.is_fresh.store(true, Ordering::Release);
        let port = lock(&self.0.port).clone();
        if let Some(port) = port {
            port.wake();
        }
    }

    /// The table as it was left last.
    pub fn places(&self) -> Arc<Places> {
        lock(&self.0.places).0.clone()
    }

    fn serve(&self, port: Registration) {
        *lock(&self.0.port) = Some(port);
        self.0.is_fresh.store(true, Ordering::Release);
    }
}

/// The port's end: the last table, with the numbers that the port's own remotes have.
#[derive(Debug)]
pub(super) struct Known {
    directory: Directory,
    places: Arc<Places>,
    /// By an end's number, that of the port's remote.
    remotes: Vec<Option<u16>>,
    storm: Option<Storm>,
}

impl Known {
    /// The port that `registration` wakes takes its tables from `directory` from now on.
    pub(super) fn new(directory: Directory, registration: Registration) -> Known {
        directory.serve(registration);
        Known { directory, places: Arc::default(), remotes: Vec::new(), storm: None }
    }

    /// Takes the table that was left, if one was. `number` gives the number of a remote of the
    /// port.
    pub(super) fn look(&mut self, number: impl Fn(IpAddr) -> Option<u16>) {
        if self.directory.0.is_fresh.swap(false, Ordering::Acquire) {
            self.places = self.directory.places();
            self.storm = *lock(&self.directory.0.storm);
            self.remotes.clear();
            self.remotes.extend(self.places.ends.iter().map(|end| number(*end)));
        }
    }

    /// The remote behind which `mac` is.
    pub(super) fn remote(&self, mac: Mac) -> Option<u16> {
        *self.remotes.get(usize::from(*self.places.remotes.get(&mac)?))?
    }

    /// The MAC address with which questions for `address` are answered.
    pub(super) fn holder(&self, address: IpAddr) -> Option<Mac> {
        self.places.holders.get(&address).copied()
    }

    /// What the remotes may send to groups, if that was changed.
    pub(super) fn storm(&self) -> Option<Storm> {
        self.storm
    }

    pub(super) fn answers_any(&self) -> bool {
        !self.places.holders.is_empty()
    }

    pub(super) fn len(&self) -> (usize, usize) {
        self.places.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_switch::Nanos;
    use tombolo_switch::wait::{Token, Waiter};
    use tombolo_worker::reactor::Reactor;

    fn end(n: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, n])
    }

    #[test]
    fn a_table_is_there_after_a_wake_up_and_ends_are_those_of_the_port() {
        let mut reactor = Reactor::new().unwrap();
        let directory = Directory::default();
        let mut places = Places::default();
        assert!(places.place([2, 0, 0, 0, 0, 1], end(9)) && places.place([2, 0, 0, 0, 0, 2], end(2)));
        assert!(places.place([2, 0, 0, 0, 0, 1], end(3)), "it moved");
        assert!(places.answer_for(end(77), [2, 0, 0, 0, 0, 1]));
        assert_eq!((places.len(), places.is_empty()), ((2, 1), false));
        directory.set(places.clone());
        // One that is opened later finds it.
        let mut known = Known::new(directory.clone(), reactor.registrar().registration(Token(4)));
        let number = |ip: IpAddr| [end(2), end(3)].iter().position(|known| *known == ip).map(|at| at as u16);
        assert_eq!(known.remote([2, 0, 0, 0, 0, 2]), None, "before it has looked");
        known.look(number);
        assert_eq!(known.remote([2, 0, 0, 0, 0, 1]), Some(1));
        assert_eq!((known.remote([2, 0, 0, 0, 0, 2]), known.remote([2, 0, 0, 0, 0, 3])), (Some(0), None));
        assert_eq!((known.holder(end(77)), known.holder(end(78))), (Some([2, 0, 0, 0, 0, 1]), None));
        places.place([2, 0, 0, 0, 0, 3], end(9));
        directory.set(places);
        let mut ready = Vec::new();
        reactor.wait(Some(Nanos::SECOND), &mut ready);
        assert_eq!(ready, [Token(4)]);
        known.look(number);
        assert_eq!((known.len(), known.remote([2, 0, 0, 0, 0, 3])), ((3, 1), None), "behind none of its remotes");
    }

    #[test]
    fn a_table_has_its_limits() {
        let mut places = Places::default();
        let mac = |n: u32| {
            let [a, b, c, d] = n.to_be_bytes();
            [2, 0, a, b, c, d]
        };
        assert!((0..MAX_PLACES as u32).all(|n| places.place(mac(n), end(2))));
        assert!(!places.place(mac(u32::MAX), end(2)));
        assert!(places.place(mac(7), end(3)), "one that is there may move");
        let address = |n: u32| IpAddr::from(n.to_be_bytes());
        assert!((0..(MAX_PLACES * MAX_ADDRESSES) as u32).all(|n| places.answer_for(address(n), mac(n))));
        assert!(!places.answer_for(address(u32::MAX), mac(1)) && places.answer_for(address(7), mac(1)));
    }
}
