//! Bounds: what one user may take of a service, over all of its connections, and what one side may
//! hand over in a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes, or entries, that may be in use together. Clones are the same quota.
#[derive(Clone, Debug)]
pub(crate) struct Quota {
    used: Arc<AtomicU64>,
    max: u64,
}

impl Default for Quota {
    /// One without a bound.
    fn default() -> Self {
        Quota::new(u64::MAX)
    }
}

impl Quota {
    pub(crate) fn new(max: u64) -> Quota {
        Quota { used: Arc::default(), max }
    }

    /// Takes so much of it, if that is left.
    pub(crate) fn take(&self, amount: u64) -> Option<Charge> {
        let fits = |used: u64| used.checked_add(amount).filter(|sum| *sum <= self.max);
        // Relaxed: a count that orders nothing else.
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Charge { used: self.used.clone(), amount })
    }

    /// What is in use of it.
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether nothing of it is in use.
    pub(crate) fn is_free(&self) -> bool {
        self.used() == 0
    }
}

/// What the connections of one user may take together.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    pub(crate) bytes: Quota,
    pub(crate) entries: Quota,
}

/// A part of a quota; it is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    used: Arc<AtomicU64>,
    amount: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.used.fetch_sub(self.amount, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_comes_back() {
        let quota = Quota::new(10);
        let six = quota.take(6);
        assert!(six.is_some() && quota.take(5).is_none() && quota.clone().take(u64::MAX).is_none());
        let four = quota.take(4);
        assert!(four.is_some() && quota.take(1).is_none());
        drop((six, four));
        assert!(quota.is_free() && quota.take(10).is_some());
    }
}
