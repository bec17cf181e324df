//! An end's own doorbells, and when a link's memory is looked at again although nothing has rung.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use std::os::fd::AsFd;
use tombolo_ring::ivshmem::vector_traffic;
use tombolo_ring::virtio::notify::RECHECK_NS;
use tombolo_shm::doorbell::Doorbell;

/// Without a doorbell: the first pause between two looks, of which each is twice as long as the one
/// before.
const FIRST_POLL: Duration = Duration::from_micros(50);
const LONGEST_POLL: Duration = Duration::from_millis(4);
/// With one: from the beginning of a sleep to its second look, since the peer's memory fences may
/// do nothing ([`tombolo_ring::virtio::notify`]).
const SECOND_LOOK: Duration = Duration::from_nanos(RECHECK_NS);
/// With one that has not been rung yet: looks follow at pauses that double up to this one. QEMU
/// drops a ring for a peer of which the server has not told it yet, and it may be told late: its
/// main loop shares a busy machine with the guest's processor.
const LONGEST_UNHEARD: Duration = Duration::from_secs(4);

/// What can wake an end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wakes {
    /// Nothing: the memory is looked at again and again.
    Polled,
    /// A doorbell that this peer has not rung for traffic yet.
    Unheard,
    /// A doorbell that it has rung.
    Heard,
}

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

    /// Another peer is there, whose first rings may get lost.
    pub fn peer_joined(&self) {
        self.is_heard.store(false, Ordering::Relaxed);
    }
}

/// The pauses between looks that find nothing.
///
/// ```
/// use std::time::Duration;
/// use tombolo_ivshmem::backoff::{Backoff, Wakes};
///
/// // A peer that has rung before is relied on after a second look.
/// let mut backoff = Backoff::default();
/// assert_eq!(backoff.pause(Wakes::Heard), Some(Duration::from_micros(100)));
/// assert_eq!(backoff.pause(Wakes::Heard), None);
/// backoff.found();
/// assert_eq!(backoff.pause(Wakes::Heard), Some(Duration::from_micros(100)));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    /// Pauses since something was found.
    pauses: u32,
}

impl Backoff {
    /// Something came, so the pauses begin with the shortest again.
    pub fn found(&mut self) {
        self.pauses = 0;
    }

    /// How long after a look that found nothing the next one is due, though nothing rings; `None`:
    /// not before something rings.
    pub fn pause(&mut self, wakes: Wakes) -> Option<Duration> {
        let factor = 1 << self.pauses.min(20);
        let pause = match wakes {
            Wakes::Polled => Some((factor * FIRST_POLL).min(LONGEST_POLL)),
            Wakes::Unheard => Some(factor * SECOND_LOOK).filter(|pause| *pause <= LONGEST_UNHEARD),
            Wakes::Heard => (self.pauses == 0).then_some(SECOND_LOOK),
        };
        self.pauses = self.pauses.saturating_add(1);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses(wakes: Wakes, most: usize) -> Vec<Duration> {
        let mut backoff = Backoff::default();
        std::iter::from_fn(|| backoff.pause(wakes)).take(most).collect()
    }

    #[test]
    fn pauses_double_without_an_end_where_nothing_rings_and_up_to_four_seconds_before_the_first_ring() {
        let polled = pauses(Wakes::Polled, 100);
        assert_eq!(polled[..3], [50, 100, 200].map(Duration::from_micros));
        assert_eq!((polled.len(), polled[99]), (100, LONGEST_POLL));
        let unheard = pauses(Wakes::Unheard, 100);
        assert_eq!(unheard[..3], [100, 200, 400].map(Duration::from_micros));
        assert!(unheard.iter().sum::<Duration>() > LONGEST_UNHEARD && unheard.len() == 16, "{unheard:?}");
        assert_eq!(pauses(Wakes::Heard, 100), [SECOND_LOOK]);
    }

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
        doorbells.peer_joined();
        assert_eq!((doorbells.wakes(), other.wakes()), (Wakes::Unheard, Wakes::Unheard));
        // With one vector it is for both.
        let one = OwnDoorbells::from(vec![Doorbell::new().unwrap()]);
        ring(&one, 0);
        one.take(|_| true);
        assert_eq!(one.wakes(), Wakes::Heard);
        assert_eq!(OwnDoorbells::from(Vec::new()).wakes(), Wakes::Polled);
    }
}
