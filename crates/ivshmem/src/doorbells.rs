//! The doorbells of an end, and whether its peer rings them.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use tombolo_ring::ivshmem::backoff::Wakes;
use tombolo_ring::ivshmem::vector_traffic;
use tombolo_shm::doorbell::Doorbell;

/// The doorbells that the peer of an end rings, one per vector; none where both ends poll.
#[derive(Debug)]
pub struct OwnDoorbells {
    all: Vec<Doorbell>,
    /// The peer has rung for traffic. Duplicates share it.
    is_heard: Arc<AtomicBool>,
}

impl From<Vec<Doorbell>> for OwnDoorbells {
    fn from(all: Vec<Doorbell>) -> OwnDoorbells {
        OwnDoorbells { all, is_heard: Arc::default() }
    }
}

impl OwnDoorbells {
    /// The same doorbells for another thread, which then hears of the peer by both.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn duplicate(&self) -> Result<OwnDoorbells, Errno> {
        let duplicate = |doorbell: &Doorbell| Doorbell::adopt(rustix::io::fcntl_dupfd_cloexec(doorbell.as_fd(), 3)?);
        Ok(OwnDoorbells {
            all: self.all.iter().map(duplicate).collect::<Result<_, _>>()?,
            is_heard: self.is_heard.clone(),
        })
    }

    /// By vector.
    pub fn all(&self) -> &[Doorbell] {
        &self.all
    }

    /// What can wake this end.
    pub fn wakes(&self) -> Wakes {
        // Relaxed: how often to look depends on it, and nothing else.
        match self.all.is_empty() {
            true => Wakes::Polled,
            false if self.is_heard.load(Ordering::Relaxed) => Wakes::Heard,
            false => Wakes::Unheard,
        }
    }

    /// Takes the rings since the last time, of the vectors that `is_rung` names.
    pub fn take(&self, is_rung: impl Fn(usize) -> bool) {
        let traffic = usize::from(vector_traffic(self.all.len() as u32));
        for (vector, doorbell) in self.all.iter().enumerate().filter(|(vector, _)| is_rung(*vector)) {
            if doorbell.take() && vector == traffic {
                self.is_heard.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Another peer is there, whose first rings may get lost. Rings of the one before are taken, so
    /// that they do not count as its; the memory is to be looked at next.
    pub fn peer_joined(&self) {
        self.all.iter().for_each(|doorbell| _ = doorbell.take());
        self.is_heard.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_heard_by_its_first_ring_for_traffic_and_the_next_peer_by_its_own() {
        let ring = |doorbells: &OwnDoorbells, vector: usize| doorbells.all()[vector].ring();
        let doorbells = OwnDoorbells::from(vec![Doorbell::new().unwrap(), Doorbell::new().unwrap()]);
        let other = doorbells.duplicate().unwrap();
        // The state's, which says nothing of the other vector.
        ring(&doorbells, 0);
        doorbells.take(|_| true);
        assert_eq!((doorbells.wakes(), other.wakes()), (Wakes::Unheard, Wakes::Unheard));
        ring(&doorbells, 1);
        other.take(|vector| vector == 1);
        assert_eq!((doorbells.wakes(), other.wakes()), (Wakes::Heard, Wakes::Heard));
        ring(&doorbells, 1);
        doorbells.peer_joined();
        doorbells.take(|_| true);
        assert_eq!((doorbells.wakes(), other.wakes()), (Wakes::Unheard, Wakes::Unheard));
        // With one vector it is for both.
        let one = OwnDoorbells::from(vec![Doorbell::new().unwrap()]);
        ring(&one, 0);
        one.take(|_| true);
        assert_eq!(one.wakes(), Wakes::Heard);
        assert_eq!(OwnDoorbells::from(Vec::new()).wakes(), Wakes::Polled);
    }
}
