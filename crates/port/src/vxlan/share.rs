//! What one remote may take of what all remotes share, so that a hostile machine takes it from no
//! other.
//!
//! The switch sees all machines behind a tunnel as one port, with one storm limit. Without more,
//! one machine that broadcasts without pause would use up that limit, and the others' ARP requests
//! would be lost. So half of the limit is divided: each remote always has its share. The other half
//! is a pool, for a remote that needs more while it is not used up. What one sends beyond is
//! dropped here as `remote_storm`, before the switch counts it. Addresses are shared alike
//! ([`super::table`]).
//!
//! Frames to single addresses are not divided: whether one is flooded, only the switch knows.

use std::net::SocketAddr;

use tombolo_switch::Nanos;
use tombolo_switch::frame::Mac;
use tombolo_switch::limit::{Bucket, Limit, Storm};

/// Remotes that are named in the port's details.
const MAX_NAMED: usize = 8;

/// What was refused of one remote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Refused {
    /// Frames to groups.
    pub(super) frames: u64,
    /// Frames from addresses beyond its share.
    pub(super) addresses: u64,
}

/// The limits of all remotes, by their numbers. All are O(1) per frame.
#[derive(Debug)]
pub(super) struct Shares {
    storm: Storm,
    /// Of each remote, for broadcast and multicast.
    own: Vec<[Bucket; 2]>,
    pool: [Bucket; 2],
    pub(super) refused: Vec<Refused>,
}

impl Shares {
    pub(super) fn new(remotes: usize, storm: Storm) -> Shares {
        Shares {
            storm,
            own: vec![Default::default(); remotes],
            pool: Default::default(),
            refused: vec![Default::default(); remotes],
        }
    }

    /// Replaces the limits of all remotes together. Where they differ, every remote begins again.
    pub(super) fn set_storm(&mut self, storm: Storm) {
        if self.storm != storm {
            self.storm = storm;
            self.own.fill(Default::default());
            self.pool = Default::default();
        }
    }

    /// Whether a frame from `remote` to `destination` may go on to the switch.
    pub(super) fn admit(&mut self, remote: u16, destination: Mac, now: Nanos) -> bool {
        if destination[0] & 1 == 0 {
            return true;
        }
        let (kind, limit) = match destination {
            [0xff, 0xff, 0xff, 0xff, 0xff, 0xff] => (0, self.storm.broadcast),
            _ => (1, self.storm.multicast),
        };
        let Some(limit) = limit else { return true };
        let at = usize::from(remote);
        // All shares together stay below half of the limit, unless that is less than one frame for
        // each.
        let part = |all: u64| (all / 2 / self.own.len().max(1) as u64).max(1);
        let share = Limit { per_second: part(limit.per_second), burst: part(limit.burst) };
        let pool = Limit { per_second: (limit.per_second / 2).max(1), burst: (limit.burst / 2).max(1) };
        let passes = self.own[at][kind].take(now, 1, share) || self.pool[kind].take(now, 1, pool);
        self.refused[at].frames += u64::from(!passes);
        passes
    }

    /// The remotes of which most was refused: "192.0.2.3 (12 frames to groups, 0 addresses)".
    pub(super) fn named(&self, remotes: &[SocketAddr]) -> Vec<String> {
        let mut worst: Vec<_> = remotes.iter().zip(&self.refused).filter(|(_, r)| **r != Refused::default()).collect();
        worst.sort_by_key(|(_, r)| std::cmp::Reverse(r.frames + r.addresses));
        let text = |(at, r): &(&SocketAddr, &Refused)| {
            format!("{} ({} frames to groups, {} from further addresses)", at.ip(), r.frames, r.addresses)
        };
        worst.iter().take(MAX_NAMED).map(text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Mac = [0xff; 6];
    const GROUP: Mac = [0x33, 0x33, 0, 0, 0, 1];
    const ONE: Mac = [2, 0, 0, 0, 0, 1];

    /// How many of `each` frames a second, for `seconds`, a remote gets through; another one sends
    /// without pause.
    fn beside_a_flood(remotes: usize, storm: Storm, each: u64, seconds: u64) -> (u64, u64) {
        let mut shares = Shares::new(remotes, storm);
        let (mut quiet, mut flood) = (0, 0);
        for tick in 0..seconds * 10_000 {
            let now = Nanos(tick * 100_000);
            flood += u64::from(shares.admit(0, ALL, now)) + u64::from(shares.admit(0, ALL, now));
            if tick % (10_000 / each) == 0 {
                quiet += u64::from(shares.admit(1, ALL, now));
            }
        }
        (quiet, flood)
    }

    #[test]
    fn a_flood_of_one_remote_leaves_the_others_their_share_and_stays_below_the_ports_limit() {
        let (quiet, flood) = beside_a_flood(4, Storm::default(), 100, 10);
        assert_eq!(quiet, 1000, "each of its frames passes");
        // Its share and the pool, 125 and 500 a second, and what both hold at once.
        assert!((6200..=7000).contains(&flood), "{flood}");
        // Of very many remotes each has a little.
        let (quiet, _) = beside_a_flood(128, Storm::default(), 3, 10);
        assert_eq!(quiet, 31);
    }

    #[test]
    fn all_remotes_together_stay_below_a_small_limit() {
        let limit = Limit { per_second: 20, burst: 40 };
        let mut shares = Shares::new(10, Storm { broadcast: Some(limit), ..Storm::default() });
        let mut all = |now| (0..1000).filter(|n| shares.admit(n % 10, ALL, now)).count();
        assert_eq!(all(Nanos(0)), 40, "the burst");
        assert_eq!(all(Nanos(1_000_000_000)), 20);
    }

    #[test]
    fn one_remote_alone_has_all_and_no_limit_is_none() {
        let mut shares = Shares::new(1, Storm::default());
        let all = (0..1000).filter(|_| shares.admit(0, ALL, Nanos(0))).count();
        assert_eq!(all, 1000, "as the port has");
        assert!(
            !shares.admit(0, ALL, Nanos(0)) && shares.admit(0, GROUP, Nanos(0)),
            "multicast has a limit of its own"
        );
        assert!(shares.admit(0, ONE, Nanos(0)));
        assert_eq!(shares.refused[0], Refused { frames: 1, addresses: 0 });
        assert!(shares.named(&["192.0.2.3:4789".parse().unwrap()])[0].starts_with("192.0.2.3 (1 frames to groups"));
        let mut open = Shares::new(1, Storm::OFF);
        assert!((0..5000).all(|_| open.admit(0, ALL, Nanos(0))));
        assert!(open.named(&[]).is_empty());
    }
}
