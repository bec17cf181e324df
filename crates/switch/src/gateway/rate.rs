//! How many DHCP messages each source may send: a token bucket per port of the switch.
//!
//! A message costs the worker some microseconds and at most one line of the host's journal. The
//! rate bounds what one member can make of that; the others have buckets of their own. A bridge
//! with 16,000 clients behind one port, whose leases last an hour, renews 9 times a second.
//!
//! Memory: one entry for each source that was heard in the last seconds. A source whose bucket is
//! full again is forgotten, since it is as if it had never sent.

use crate::Nanos;
use crate::limit::ChargedTo;
use std::collections::HashMap;

/// Messages per second of one source.
pub(super) const RATE: u64 = 100;
/// Messages that may come at once.
pub(super) const BURST: u64 = 300;
/// One token, as the time in which it comes back.
const TOKEN: Nanos = Nanos(1_000_000_000 / RATE);
/// Entries at which full buckets are looked for first.
const FIRST_SWEEP: usize = 256;

/// The buckets. Each is kept as the instant at which it is full again.
#[derive(Debug)]
pub(super) struct Rates {
    full_at: HashMap<ChargedTo, Nanos>,
    /// The time in which one token comes back, and how many there are.
    token: Nanos,
    burst: u64,
    /// Number of entries at which full buckets are removed next.
    sweep_at: usize,
}

impl Default for Rates {
    fn default() -> Self {
        Rates::new(TOKEN, BURST)
    }
}

impl Rates {
    /// Buckets of `burst` tokens, one of which comes back in the time of `token`.
    pub(super) fn new(token: Nanos, burst: u64) -> Rates {
        Rates { full_at: HashMap::new(), token, burst, sweep_at: FIRST_SWEEP }
    }

    /// Takes a token of `source`; `false` where it has none left.
    pub(super) fn take(&mut self, source: ChargedTo, now: Nanos) -> bool {
        let full_at = self.full_at.get(&source).copied().unwrap_or(now).max(now).after(self.token);
        if full_at.since(now) > self.token.times(self.burst) {
            return false;
        }
        if self.full_at.len() >= self.sweep_at {
            self.full_at.retain(|_, full_at| *full_at > now);
            // Twice what is left, so that a sweep is paid for by the entries made since the last.
            self.sweep_at = (self.full_at.len() * 2).max(FIRST_SWEEP);
        }
        self.full_at.insert(source, full_at);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait::Token;

    #[test]
    fn a_burst_then_the_rate_and_each_source_its_own() {
        let mut rates = Rates::default();
        let mut now = Nanos::SECOND;
        let allowed = |rates: &mut Rates, port: u32, now| {
            (0..1000).filter(|_| rates.take(ChargedTo::Port(Token(port)), now)).count() as u64
        };
        assert_eq!(allowed(&mut rates, 1, now), BURST);
        assert_eq!(allowed(&mut rates, 2, now), BURST, "another port has its own");
        now = now.after(Nanos::SECOND);
        assert_eq!(allowed(&mut rates, 1, now), RATE);
        now = now.after(Nanos::SECOND.times(100));
        assert_eq!(allowed(&mut rates, 1, now), BURST, "no more than a burst is saved up");
    }

    #[test]
    fn a_source_that_was_quiet_is_forgotten() {
        let mut rates = Rates::default();
        for n in 0..100_000u32 {
            let now = Nanos(u64::from(n) * TOKEN.0);
            assert!(rates.take(ChargedTo::Mac([2, 0, 0, (n >> 16) as u8, (n >> 8) as u8, n as u8]), now));
        }
        assert!(rates.full_at.len() <= FIRST_SWEEP);
    }
}
