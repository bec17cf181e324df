//! Members that move: since when another machine claims one, how often it was won back, and from
//! which machine one was taken. It decides whether a member is here, has moved away, or is that of
//! two machines with one address. See "Who wins" in the head of the crate.

use std::collections::HashMap;
use std::time::Duration;

use crate::claims::Machine;
use crate::member::Mac;

/// How long the frames of a member that moves may be under way: a member that sent nothing later
/// than this after a rival's claim came has moved away.
const SLACK: Duration = Duration::from_millis(500);
/// A member that another machine claims has moved here if it came and sent within this time. An
/// older entry of the switch's table may be from before it moved away.
const FRESH: Duration = Duration::from_secs(10);
/// How often a member is won back within [`CALM`]. One that two machines still both have then is
/// two members with one address.
const MAX_WINS: u32 = 5;
const CALM: Duration = Duration::from_secs(60);
/// A member that was taken from a machine, and that sends there again within this time, is kept by
/// that machine for as long.
const MEMORY: Duration = Duration::from_secs(600);
/// A machine that keeps a member gives it up if the member sends nothing for so long while another
/// machine claims it. It doubles with each time that the member comes back, up to the longest.
const FIRST_TIMEOUT: Duration = Duration::from_secs(5);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(300);
/// Members that were taken which are remembered.
const MAX_TAKEN: usize = 65_536;

/// A member of a network.
pub(crate) type Key = (String, Mac);

/// When a claim of another machine to a member of this one came, and how often the member was won
/// back.
#[derive(Clone, Copy, Debug, Default)]
struct Rivalry {
    version: u64,
    since: Duration,
    wins: u32,
    first_win: Duration,
}

impl Rivalry {
    /// Another machine claims the member with a higher version. It counts since when it did so after
    /// this machine's last claim, of version `mine`: further ones do not put off what follows.
    fn rises(&mut self, version: u64, mine: u64, now: Duration) {
        if self.version <= mine {
            self.since = now;
        }
        self.version = version;
    }
}

/// A member that one machine took from another one, which still claimed that it is there.
#[derive(Clone, Copy, Debug)]
struct Taken {
    from: Machine,
    at: Duration,
    /// How often the member came back.
    returns: u32,
}

/// Whose a member is that another machine claims as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nothing says that it is here: this machine's claim stays as it is.
    Unchanged,
    /// It is here: this machine claims it with a higher version.
    Won,
    /// It was won back too often, for the first time: two members have one address.
    Two,
}

/// What is remembered of members that several machines claim.
#[derive(Clone, Debug, Default)]
pub(crate) struct Moves {
    rivalries: HashMap<Key, Rivalry>,
    taken: HashMap<Key, Taken>,
}

impl Moves {
    /// Machines have other numbers from now on.
    pub(crate) fn renumber(&mut self, shift: impl Fn(Machine) -> Machine) {
        self.taken.values_mut().for_each(|taken| taken.from = shift(taken.from));
    }

    /// Another machine, which has the number `to` and claims the member too, takes it `from` one.
    /// Gives the machine that keeps it, if one does. The first time it may have moved. One that came
    /// back since, or comes back now, is that of two machines: the one to which it came back keeps
    /// it as long as it claims it. If a file has the member at `home` at one of the two, it is this
    /// one that keeps it: the other one may have claimed it before it ran.
    pub(crate) fn takes(
        &mut self,
        key: Key,
        (from, to): (Machine, Machine),
        home: Option<Machine>,
        now: Duration,
    ) -> Option<Machine> {
        let old = self.taken.get(&key).filter(|old| now.saturating_sub(old.at) < MEMORY).copied();
        let home = home.filter(|home| [from, to].contains(home));
        let keeper = old.and_then(|old| home.or(Some(old.from).filter(|keeper| [from, to].contains(keeper))));
        let returns = old.map_or(0, |old| old.returns) + u32::from(keeper.is_some());
        if old.is_some() || self.taken.len() < MAX_TAKEN {
            self.taken.insert(key, Taken { from: home.or(keeper).unwrap_or(from), at: now, returns });
        }
        keeper
    }

    /// Members that were taken long ago.
    pub(crate) fn taken_long_ago(&self, now: Duration) -> Vec<Key> {
        let is_old = |taken: &Taken| now.saturating_sub(taken.at) >= MEMORY;
        self.taken.iter().filter(|(_, taken)| is_old(taken)).map(|(key, _)| key.clone()).collect()
    }

    /// Forgets that a member was taken.
    pub(crate) fn forget_taken(&mut self, key: &Key) {
        self.taken.remove(key);
    }

    /// Whether a member that this machine has, and that another one claims with a higher version,
    /// is silent for so long that it has moved there. `keeps`: this machine keeps it.
    pub(crate) fn has_moved_away(&self, key: &Key, keeps: bool, silent: Option<Duration>, now: Duration) -> bool {
        let Some(rivalry) = self.rivalries.get(key) else { return false };
        let timeout = if keeps {
            let returns = self.taken.get(key).map_or(1, |taken| taken.returns);
            LONGEST_TIMEOUT.min(FIRST_TIMEOUT * (1 << returns.saturating_sub(1).min(6)))
        } else {
            SLACK
        };
        now.saturating_sub(rivalry.since) > timeout && silent.is_none_or(|silent| silent > timeout)
    }

    /// No other machine claims the member now.
    pub(crate) fn is_alone(&mut self, key: &Key) {
        if let Some(rivalry) = self.rivalries.get_mut(key) {
            rivalry.version = 0;
        }
    }

    /// The member has left this machine.
    pub(crate) fn leaves(&mut self, key: &Key) {
        self.rivalries.remove(key);
    }

    /// Another machine's claim of a member of this one came, with the version `rival`; the own claim
    /// has the version `mine`, or 0 where there is none yet.
    pub(crate) fn rival_claims(&mut self, key: Key, (mine, rival): (u64, u64), now: Duration) {
        let rivalry = self.rivalries.entry(key).or_default();
        if rivalry.version < rival {
            rivalry.rises(rival, mine, now);
        }
    }

    /// Another machine claims the member with the version `rival`, this one with `mine`, which is
    /// no higher and `None` where it did not claim it yet. `silent`: for how long it has sent
    /// nothing here, as far as that is known.
    pub(crate) fn meets(
        &mut self,
        key: Key,
        (mine, rival): (Option<u64>, u64),
        silent: Option<Duration>,
        now: Duration,
    ) -> Verdict {
        let rivalry = self.rivalries.entry(key).or_default();
        if rivalry.version != rival {
            // The claim came since this was last looked at, at the latest now.
            rivalry.rises(rival, mine.unwrap_or(1), now);
            // A member that just came and sends has moved here; one that was here must first send
            // again.
            if mine.is_some() {
                return Verdict::Unchanged;
            }
        }
        let is_here = silent.is_some_and(|silent| match mine {
            None => silent < FRESH,
            Some(_) => now.saturating_sub(silent) > rivalry.since + SLACK,
        });
        if !is_here {
            return Verdict::Unchanged;
        }
        if now.saturating_sub(rivalry.first_win) > CALM {
            (rivalry.wins, rivalry.first_win) = (0, now);
        }
        rivalry.wins += 1;
        match rivalry.wins {
            ..=MAX_WINS => Verdict::Won,
            wins if wins == MAX_WINS + 1 => Verdict::Two,
            _ => Verdict::Unchanged,
        }
    }

    /// Members that were won back too often.
    pub(crate) fn contested(&self) -> impl Iterator<Item = &Key> {
        self.rivalries.iter().filter(|(_, rivalry)| rivalry.wins > MAX_WINS).map(|(key, _)| key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn key() -> Key {
        ("lan".into(), [2, 0, 0, 0, 0, 1])
    }

    #[test]
    fn one_that_comes_back_is_kept_by_where_it_came_back_to() {
        let mut moves = Moves::default();
        assert_eq!(moves.takes(key(), (0, 1), None, S), None);
        // As it may have moved on, a third machine has it after that.
        assert_eq!(moves.takes(key(), (1, 0), None, 2 * S), Some(0));
        assert_eq!(moves.takes(key(), (0, 2), None, 3 * S), Some(0));
        assert_eq!(moves.takes(key(), (0, 2), Some(2), 4 * S), Some(2));
        assert!(moves.taken_long_ago(600 * S).is_empty());
        assert_eq!(moves.taken_long_ago(604 * S), [key()]);
        assert_eq!(moves.takes(key(), (1, 0), None, 605 * S), None, "that was long ago");
        moves.forget_taken(&key());
        assert!(moves.taken_long_ago(2000 * S).is_empty());
    }

    #[test]
    fn renumbered_machines_keep_what_is_theirs() {
        let mut moves = Moves::default();
        moves.takes(key(), (1, 2), None, S);
        moves.renumber(|machine| machine + 1);
        assert_eq!(moves.takes(key(), (3, 2), None, 2 * S), Some(2));
    }

    #[test]
    fn who_keeps_a_member_waits_longer_each_time_before_it_gives_it_up() {
        let mut moves = Moves::default();
        moves.meets(key(), (Some(1), 2), Some(S), Duration::ZERO);
        let long = Some(1000 * S);
        assert!(!moves.has_moved_away(&key(), false, long, S / 2) && moves.has_moved_away(&key(), false, long, S));
        assert!(!moves.has_moved_away(&key(), false, Some(S / 4), S), "it sends");
        let timeout = |moves: &mut Moves, from| {
            moves.takes(key(), (from, 1 - from), Some(0), S);
            (1..2000).find(|s| moves.has_moved_away(&key(), true, None, *s * S)).unwrap()
        };
        assert_eq!(
            [1, 0, 1, 0, 1, 0, 1, 0, 1].map(|from| timeout(&mut moves, from)),
            [6, 6, 11, 21, 41, 81, 161, 301, 301]
        );
        moves.leaves(&key());
        assert!(!moves.has_moved_away(&key(), true, None, 5000 * S));
    }

    #[test]
    fn a_member_is_won_back_five_times_a_minute() {
        let mut moves = Moves::default();
        let won = |moves: &mut Moves, version, now| {
            // A new claim of the other machine, and then a frame.
            let first = moves.meets(key(), (Some(version), version + 1), Some(Duration::ZERO), now);
            assert_eq!(first, Verdict::Unchanged);
            moves.meets(key(), (Some(version), version + 1), Some(Duration::ZERO), now + S)
        };
        let all: Vec<Verdict> = (0..7).map(|n| won(&mut moves, 2 * u64::from(n) + 1, (100 + 2 * n) * S)).collect();
        assert_eq!(all[..5], [Verdict::Won; 5]);
        assert_eq!(all[5..], [Verdict::Two, Verdict::Unchanged]);
        assert_eq!(moves.contested().collect::<Vec<_>>(), [&key()]);
        assert_eq!(won(&mut moves, 101, 200 * S), Verdict::Won, "a calm minute later");
        assert_eq!(moves.contested().count(), 0);
    }

    #[test]
    fn a_new_member_has_moved_here_only_if_it_sent_lately() {
        for (silent, verdict) in
            [(Some(9 * S), Verdict::Won), (Some(11 * S), Verdict::Unchanged), (None, Verdict::Unchanged)]
        {
            assert_eq!(Moves::default().meets(key(), (None, 1), silent, 100 * S), verdict, "{silent:?}");
        }
    }
}
