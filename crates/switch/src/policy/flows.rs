//! The connections that a filter has let through, so that the frames that follow, and the answers,
//! pass.
//!
//! # What a hostile port can do
//! A connection is charged to the port that opened it. A port holds [`PER_PORT`] connections at
//! most. At that limit, and when the table is full and the port holds its fair share or more, its
//! own oldest connection makes room. A port below its share takes the place of the oldest
//! connection of the port that holds most. So a flood of connections costs its own port. The hash
//! is keyed.

use super::tuple::{ACK, End, FIN, Kind, RST, SYN, Tuple};
use crate::Nanos;
use crate::guard::Roles;
use crate::mac::{PortNumber, Tick};
use crate::plain::{Fields, Plain, TCP};
use foldhash::quality::FixedState;
use hashbrown::HashTable;
use std::hash::{BuildHasher, Hasher};

/// Connections that one network remembers.
pub const CAPACITY: usize = 65_536;
/// Connections that one port may have opened.
pub const PER_PORT: usize = 16_384;
/// Places that are looked at for connections whose time is over, once per [`Tick`].
const SWEEP: usize = 256;
/// Pairs of places for directions of connections that had a frame in the present tick, per family:
/// so many at first, four times as many where they do not suffice, and so many at most. Powers of
/// two. A pair has 64 bytes for IPv4, 128 for IPv6.
const RECENT: usize = 1_024;
const MOST_RECENT: usize = 16_384;
/// No place of the table.
const NIL: u32 = u32::MAX;

/// Names a connection, the same for both directions: the lower end's address (two words), the
/// higher end's, the ends' ports and the switch's ports of both, protocol and fragment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key([u64; 6]);

impl PartialEq for Key {
    /// Word by word: a key is compared right after its words were made, so they are still in
    /// registers. Comparing the arrays would store them and wait for that.
    #[inline(always)]
    fn eq(&self, other: &Key) -> bool {
        let ([a, b, c, d, e, f], [g, h, i, j, k, l]) = (self.0, other.0);
        (a ^ g) | (b ^ h) | (c ^ i) | (d ^ j) | (e ^ k) | (f ^ l) == 0
    }
}

impl Eq for Key {}

impl Key {
    const PROTOCOL: usize = 5;
    /// Beside the protocol: of the fragments of one packet, its identification and this mark; else
    /// zero.
    const FRAGMENT: u64 = 1 << 8;

    /// The key of packets with this tuple, and whether such a packet comes from the lower end.
    #[inline(always)]
    pub(super) fn of(tuple: &Tuple, from: PortNumber, to: PortNumber) -> (Key, bool) {
        // Address and both ports, as a number that orders the ends.
        let place = |end: End, port: PortNumber| (end.ip, u32::from(end.port) << 16 | u32::from(port));
        let (from, to) = (place(tuple.from, from), place(tuple.to, to));
        let from_low = from <= to;
        let (low, high) = if from_low { (from, to) } else { (to, from) };
        let ((low_ip, low_ports), (high_ip, high_ports)) = (low, high);
        let ports = u64::from(low_ports) << 32 | u64::from(high_ports);
        let protocol = tuple.protocol.into();
        let words = [(low_ip >> 64) as u64, low_ip as u64, (high_ip >> 64) as u64, high_ip as u64, ports, protocol];
        (Key(words), from_low)
    }

    /// The key of the fragments of one packet, whose tuple has ports or not.
    pub(super) fn of_fragments(tuple: &Tuple, from: PortNumber, to: PortNumber, id: u32) -> Key {
        let bare = |end: End| End { port: 0, ..end };
        let tuple = Tuple { from: bare(tuple.from), to: bare(tuple.to), protocol: tuple.protocol };
        let (mut key, _) = Key::of(&tuple, from, to);
        key.0[Key::PROTOCOL] |= u64::from(id) << 32 | Key::FRAGMENT;
        key
    }

    /// Word by word, for the same reason.
    #[inline(always)]
    fn hash(&self, hasher: &FixedState) -> u64 {
        let mut hash = hasher.build_hasher();
        self.0.iter().for_each(|word| hash.write_u64(*word));
        hash.finish()
    }

    /// Of both directions: the switch's ports, from and to, and the tuple.
    fn tuples(&self) -> [((PortNumber, PortNumber), Tuple); 2] {
        let [a, b, c, d, ports, _] = self.0;
        let end =
            |high: u64, low: u64, port: u64| End { ip: u128::from(high) << 64 | u128::from(low), port: port as u16 };
        let (low, high) = (end(a, b, ports >> 48), end(c, d, ports >> 16));
        let (low_port, high_port) = ((ports >> 32) as PortNumber, ports as PortNumber);
        let tuple = Tuple { from: low, to: high, protocol: self.protocol() };
        [((low_port, high_port), tuple), ((high_port, low_port), tuple.reversed())]
    }

    fn protocol(&self) -> u8 {
        self.0[Key::PROTOCOL] as u8
    }

    fn is_of_fragments(&self) -> bool {
        self.0[Key::PROTOCOL] & Key::FRAGMENT != 0
    }

    fn touches(&self, port: PortNumber) -> bool {
        (self.0[4] >> 32) as u16 == port || self.0[4] as u16 == port
    }
}

// Seconds without a frame after which a connection is forgotten. RFC 5382 REQ-5 for TCP (2 h 4 min
// established, 4 min half-open), RFC 4787 REQ-5 for UDP; 30 s for datagrams without an answer, and
// for a packet's fragments (RFC 8200 §4.5: 60 s; IPv4 hosts give up after 15 to 30).
const ESTABLISHED: u64 = 7_440;
const HALF_OPEN: u64 = 240;
const CLOSED: u64 = 60;
const RESET: u64 = 10;
const DATAGRAMS: u64 = 300;
const UNANSWERED: u64 = 30;

/// What is known of a connection: one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Flow {
    key: Key,
    seen: Tick,
    /// The generation of the rules that let it through.
    generation: u32,
    /// The port that opened it; the direction that its first frame took.
    owner: PortNumber,
    opened_by_low: bool,
    answered: bool,
    done_low: bool,
    done_high: bool,
    reset: bool,
    used: bool,
}

/// The neighbours of a connection in its port's list.
#[derive(Clone, Copy, Debug)]
struct Links {
    newer: u32,
    older: u32,
}

impl Flow {
    fn is_over(&self, now: Tick) -> bool {
        let secs = match self.key.protocol() {
            _ if self.key.is_of_fragments() => UNANSWERED,
            TCP if self.reset => RESET,
            TCP if self.done_low && self.done_high => CLOSED,
            TCP if !self.answered => HALF_OPEN,
            TCP => ESTABLISHED,
            _ if !self.answered => UNANSWERED,
            _ => DATAGRAMS,
        };
        self.seen.is_older_than(now, Nanos::SECOND.times(secs))
    }

    fn note(&mut self, from_low: bool, kind: Kind) {
        self.answered |= from_low != self.opened_by_low;
        if let Kind::Segment(flags) = kind {
            self.reset |= flags & RST != 0;
            let done = if from_low { &mut self.done_low } else { &mut self.done_high };
            *done |= flags & FIN != 0;
        }
    }
}

/// One direction of a connection, as a frame shows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Direction {
    pub(super) plain: Plain,
    /// The switch's ports.
    pub(super) from: PortNumber,
    pub(super) to: PortNumber,
    /// What the port `from` may do.
    pub(super) roles: Roles,
}

/// A direction of a connection that had a frame in some tick: as it stands in its frames, so that
/// the next frame of the tick needs no key, no hash and no look at the connection.
#[derive(Clone, Copy, Debug)]
struct Recent<const WORDS: usize> {
    addresses: [u64; WORDS],
    /// The packet's ports and the switch's.
    ends: u64,
    when: u64,
    /// Protocol, and the roles of the port that the frame came from.
    kind: u32,
}

/// Two of them: one cache line for IPv4, two for IPv6.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Pair<const WORDS: usize>([Recent<WORDS>; 2]);

impl<const WORDS: usize> Pair<WORDS> {
    #[inline(always)]
    fn has(&self, recent: &Recent<WORDS>) -> bool {
        self.0.iter().any(|place| place.when == recent.when && place.is_of(recent, u32::MAX))
    }
}

impl<const WORDS: usize> Recent<WORDS> {
    /// No connection: without addresses, from a port to itself.
    const NONE: Recent<WORDS> = Recent { addresses: [0; WORDS], ends: 0, when: u64::MAX, kind: 0 };
    /// The part of `kind` that says nothing of roles.
    const CONNECTION: u32 = 0xffff;

    #[inline(always)]
    fn new(fields: &Fields<WORDS>, direction: &Direction, when: u64) -> Recent<WORDS> {
        let Direction { from, to, roles, .. } = direction;
        let ends = u64::from(fields.ports) << 32 | u64::from(*from) << 16 | u64::from(*to);
        let kind = u32::from(fields.protocol) | u32::from(roles.bits()) << 16;
        Recent { addresses: fields.addresses, ends, when, kind }
    }

    /// Whether both are the same direction of the same connection, and equal in these bits of
    /// `kind`. Here and below words are counted, not iterated over: so they stay in registers.
    #[inline(always)]
    fn is_of(&self, other: &Recent<WORDS>, kind: u32) -> bool {
        let mut differ = (self.ends ^ other.ends) | u64::from((self.kind ^ other.kind) & kind);
        let mut at = 0;
        while at < WORDS {
            differ |= self.addresses[at] ^ other.addresses[at];
            at += 1;
        }
        differ == 0
    }

    /// Where it is. Directions that share a pair of places, also on purpose, cost each other only a
    /// look into the index.
    #[inline(always)]
    fn hash(&self, secret: &[u64; 2]) -> usize {
        let (mut left, mut right) = (secret[0], self.ends ^ secret[1]);
        let mut at = 0;
        while at < WORDS {
            let word = self.addresses[at].rotate_left(32 * (at as u32 / 2));
            if at % 2 == 0 {
                left ^= word;
            } else {
                right ^= word;
            }
            at += 1;
        }
        let product = u128::from(left) * u128::from(right);
        ((product >> 64) as u64 ^ product as u64) as usize
    }
}

/// The directions of one family.
#[derive(Debug)]
struct Recents<const WORDS: usize> {
    pairs: Box<[Pair<WORDS>]>,
    /// One less than their number.
    mask: usize,
    secret: [u64; 2],
    /// A bit for each pair that had no place for a further direction in this tick.
    crowded: Box<[u64]>,
}

impl<const WORDS: usize> Recents<WORDS> {
    fn new(pairs: usize, secret: [u64; 2]) -> Recents<WORDS> {
        let mask = pairs.saturating_sub(1);
        let crowded = vec![0; pairs.div_ceil(64)].into();
        Recents { pairs: vec![Pair([Recent::NONE; 2]); pairs].into(), mask, secret, crowded }
    }

    /// Makes room if a sixteenth of the pairs were crowded, and begins to note that again. What is
    /// remembered is lost; it is a short cut only.
    fn fit(&mut self) {
        let crowded: u32 = self.crowded.iter().map(|word| word.count_ones()).sum();
        if crowded as usize > self.pairs.len() / 16 && self.pairs.len() < MOST_RECENT {
            *self = Recents::new(self.pairs.len() * 4, self.secret);
        } else if crowded != 0 {
            self.crowded.fill(0);
        }
    }

    #[inline(always)]
    fn has(&self, recent: &Recent<WORDS>) -> bool {
        let pair = self.pairs.get(recent.hash(&self.secret) & self.mask);
        pair.is_some_and(|pair| pair.has(recent))
    }

    /// Those of this tick stay. Where all are, as many directions as possible keep their place.
    fn note(&mut self, recent: Recent<WORDS>) {
        let at = recent.hash(&self.secret) & self.mask;
        let Some(pair) = self.pairs.get_mut(at).filter(|pair| !pair.has(&recent)) else { return };
        match pair.0.iter_mut().find(|place| place.when != recent.when) {
            Some(place) => *place = recent,
            None => self.crowded[at / 64] |= 1 << (at % 64),
        }
    }

    /// Forgets the direction, whatever the roles of its port.
    fn forget(&mut self, recent: &Recent<WORDS>) {
        let Some(Pair(pair)) = self.pairs.get_mut(recent.hash(&self.secret) & self.mask) else { return };
        let gone = pair.iter_mut().filter(|place| place.is_of(recent, Recent::<WORDS>::CONNECTION));
        gone.for_each(|place| *place = Recent::NONE);
    }

    fn forget_all(&mut self) {
        self.pairs.fill(Pair([Recent::NONE; 2]));
    }
}

/// When a frame was let through, for comparison only.
#[inline(always)]
fn when(now: Tick, generation: u32) -> u64 {
    u64::from(now.number()) << 32 | u64::from(generation)
}

/// A port's connections, in order of age.
#[derive(Clone, Copy, Debug)]
struct Share {
    newest: u32,
    oldest: u32,
    held: u32,
}

impl Share {
    const EMPTY: Share = Share { newest: NIL, oldest: NIL, held: 0 };
}

/// What the table says of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Its connection was let through by the present rules.
    Open,
    /// It was let through by earlier rules; whether the packet goes the way of its first one.
    Stale {
        forward: bool,
    },
    Unknown,
}

/// The connections of one network.
#[derive(Debug)]
pub(super) struct Flows {
    /// Places by the hash of their key.
    index: HashTable<u32>,
    hasher: FixedState,
    places: Vec<Flow>,
    links: Vec<Links>,
    free: Vec<u32>,
    shares: Vec<Share>,
    members: usize,
    capacity: usize,
    recent_four: Recents<1>,
    recent_six: Recents<4>,
    swept: usize,
    swept_at: Tick,
}

impl Flows {
    pub(super) fn new(capacity: usize, seed: u64) -> Flows {
        let hasher = FixedState::with_seed(seed);
        let secret = [1, 2].map(|n: u64| hasher.hash_one(n));
        let pairs = if capacity == 0 { 0 } else { RECENT };
        Flows {
            index: HashTable::with_capacity(capacity),
            recent_four: Recents::new(pairs, secret),
            recent_six: Recents::new(pairs, secret),
            hasher,
            places: Vec::with_capacity(capacity),
            links: Vec::with_capacity(capacity),
            free: Vec::new(),
            shares: Vec::new(),
            members: 1,
            capacity,
            swept: 0,
            swept_at: Tick::default(),
        }
    }

    /// Connections held, those included whose time is over and that were not looked at since.
    pub(super) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Among how many ports the table is shared.
    pub(super) fn set_members(&mut self, members: usize) {
        self.members = members.max(1);
    }

    /// Whether the packet's direction of its connection had a frame in this tick, under these
    /// rules, from a port of these roles. Then one that does not change its state needs nothing
    /// more.
    #[inline(always)]
    pub(super) fn is_recent(&self, now: Tick, generation: u32, direction: &Direction) -> bool {
        let when = when(now, generation);
        match &direction.plain {
            Plain::Four(fields) => self.recent_four.has(&Recent::new(fields, direction, when)),
            Plain::Six(fields) => self.recent_six.has(&Recent::new(fields, direction, when)),
        }
    }

    /// [`Flows::find`], and notes that the direction had a frame. Kept out of the path of most
    /// frames, which would save its registers.
    #[inline(never)]
    pub(super) fn find_plain(&mut self, now: Tick, generation: u32, direction: &Direction, kind: Kind) -> Found {
        let (key, from_low) = Key::of(&direction.plain.tuple(), direction.from, direction.to);
        let found = self.find(now, generation, &key, from_low, kind);
        if found == Found::Open {
            let when = when(now, generation);
            match &direction.plain {
                Plain::Four(fields) => self.recent_four.note(Recent::new(fields, direction, when)),
                Plain::Six(fields) => self.recent_six.note(Recent::new(fields, direction, when)),
            }
        }
        found
    }

    /// The directions of a connection that goes are no longer recent.
    fn forget_recent(&mut self, key: &Key) {
        for tuple in key.tuples() {
            for is_ipv4 in [true, false] {
                let ((from, to), tuple) = tuple;
                let plain = Plain::of(&tuple, is_ipv4);
                let direction = Direction { plain, from, to, roles: Roles::default() };
                match &plain {
                    Plain::Four(fields) => self.recent_four.forget(&Recent::new(fields, &direction, 0)),
                    Plain::Six(fields) => self.recent_six.forget(&Recent::new(fields, &direction, 0)),
                }
            }
        }
    }

    /// No direction is recent any more.
    pub(super) fn forget_all_recent(&mut self) {
        self.recent_four.forget_all();
        self.recent_six.forget_all();
    }

    fn place_of(&self, key: &Key) -> Option<u32> {
        self.index.find(key.hash(&self.hasher), |at| self.places[*at as usize].key == *key).copied()
    }

    /// Looks a packet's connection up, and keeps it alive.
    #[inline(always)]
    pub(super) fn find(&mut self, now: Tick, generation: u32, key: &Key, from_low: bool, kind: Kind) -> Found {
        let Some(at) = self.place_of(key) else { return Found::Unknown };
        let flow = &mut self.places[at as usize];
        let (forward, is_late) = (flow.opened_by_low == from_low, flow.seen != now);
        if is_late && flow.is_over(now) {
            self.remove(at);
            return Found::Unknown;
        }
        if flow.generation != generation {
            return Found::Stale { forward };
        }
        // A new connection between the same ends: as new, also in who has to answer.
        let is_done = flow.reset || flow.done_low && flow.done_high;
        if is_done && matches!(kind, Kind::Segment(flags) if flags & (SYN | ACK) == SYN) {
            self.remove(at);
            return Found::Unknown;
        }
        flow.note(from_low, kind);
        if is_late {
            self.refresh(at, now);
        }
        Found::Open
    }

    /// Whether there is such a connection, without a change to it.
    pub(super) fn has(&self, now: Tick, generation: u32, key: &Key) -> bool {
        let flow = self.place_of(key).map(|at| &self.places[at as usize]);
        flow.is_some_and(|flow| flow.generation == generation && !flow.is_over(now))
    }

    /// Says that the present rules let a connection through as well.
    pub(super) fn renew(&mut self, generation: u32, key: &Key) {
        if let Some(at) = self.place_of(key) {
            self.places[at as usize].generation = generation;
        }
    }

    /// Forgets a connection.
    pub(super) fn close(&mut self, key: &Key) {
        if let Some(at) = self.place_of(key) {
            self.remove(at);
        }
    }

    /// Remembers a connection that `owner` opens; `false` where there is no room that the port may
    /// take.
    pub(super) fn open(
        &mut self,
        now: Tick,
        generation: u32,
        key: Key,
        from_low: bool,
        owner: PortNumber,
        kind: Kind,
    ) -> bool {
        self.close(&key);
        if self.shares.len() <= usize::from(owner) {
            self.shares.resize(usize::from(owner) + 1, Share::EMPTY);
        }
        if !self.make_room(owner) {
            return false;
        }
        let mut flow = Flow {
            key,
            seen: now,
            generation,
            owner,
            opened_by_low: from_low,
            answered: false,
            done_low: false,
            done_high: false,
            reset: false,
            used: true,
        };
        flow.note(from_low, kind);
        let at = match self.free.pop() {
            Some(at) => {
                self.places[at as usize] = flow;
                at
            }
            None => {
                self.places.push(flow);
                self.links.push(Links { newer: NIL, older: NIL });
                self.places.len() as u32 - 1
            }
        };
        let (hasher, places) = (&self.hasher, &self.places);
        self.index.insert_unique(key.hash(hasher), at, |at| places[*at as usize].key.hash(hasher));
        self.attach(at);
        true
    }

    fn make_room(&mut self, owner: PortNumber) -> bool {
        let held = self.shares[usize::from(owner)].held as usize;
        let is_full = self.len() >= self.capacity;
        if held < PER_PORT.min(self.capacity) && !is_full {
            return true;
        }
        let fair = (self.capacity / self.members).max(1);
        let victim = if !is_full || held >= fair {
            self.shares[usize::from(owner)].oldest
        } else {
            self.shares.iter().max_by_key(|share| share.held).map_or(NIL, |share| share.oldest)
        };
        if victim == NIL {
            return false;
        }
        self.remove(victim);
        true
    }

    /// Forgets every connection of `port`, on either end.
    pub(super) fn remove_port(&mut self, port: PortNumber) {
        for at in 0..self.places.len() {
            let flow = &self.places[at];
            if flow.used && (flow.key.touches(port) || flow.owner == port) {
                self.remove(at as u32);
            }
        }
    }

    /// Forgets some of the connections whose time is over; called once per batch.
    #[inline]
    pub(super) fn sweep(&mut self, now: Tick) {
        if now == self.swept_at || self.places.is_empty() {
            return;
        }
        self.swept_at = now;
        self.recent_four.fit();
        self.recent_six.fit();
        for _ in 0..SWEEP.min(self.places.len()) {
            self.swept = (self.swept + 1) % self.places.len();
            let flow = &self.places[self.swept];
            if flow.used && flow.is_over(now) {
                self.remove(self.swept as u32);
            }
        }
    }

    fn refresh(&mut self, at: u32, now: Tick) {
        self.detach(at);
        self.places[at as usize].seen = now;
        self.attach(at);
    }

    fn remove(&mut self, at: u32) {
        self.detach(at);
        let flow = &mut self.places[at as usize];
        flow.used = false;
        let key = flow.key;
        self.forget_recent(&key);
        let hash = key.hash(&self.hasher);
        if let Ok(entry) = self.index.find_entry(hash, |other| *other == at) {
            entry.remove();
        }
        self.free.push(at);
    }

    fn attach(&mut self, at: u32) {
        let owner = usize::from(self.places[at as usize].owner);
        let share = &mut self.shares[owner];
        let newest = std::mem::replace(&mut share.newest, at);
        share.held += 1;
        if newest == NIL {
            share.oldest = at;
        } else {
            self.links[newest as usize].newer = at;
        }
        self.links[at as usize] = Links { newer: NIL, older: newest };
    }

    fn detach(&mut self, at: u32) {
        let Links { newer, older } = self.links[at as usize];
        let share = &mut self.shares[usize::from(self.places[at as usize].owner)];
        share.held -= 1;
        match newer {
            NIL => share.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        match older {
            NIL => share.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32, from: PortNumber) -> (Key, bool) {
        let from_end = End { ip: u128::from(n), port: 1 };
        Key::of(&Tuple { from: from_end, to: End { ip: 1 << 64, port: 80 }, protocol: TCP }, from, 9)
    }

    fn at(secs: u64) -> Tick {
        Tick::of(Nanos::SECOND.times(secs))
    }

    fn open(flows: &mut Flows, now: Tick, n: u32, owner: PortNumber) -> bool {
        let (key, from_low) = key(n, owner);
        flows.open(now, 1, key, from_low, owner, Kind::Segment(SYN))
    }

    fn has(flows: &Flows, now: Tick, n: u32, owner: PortNumber) -> bool {
        flows.has(now, 1, &key(n, owner).0)
    }

    #[test]
    fn both_directions_have_one_key() {
        let tuple = Tuple { from: End { ip: 5, port: 1 }, to: End { ip: 4, port: 2 }, protocol: TCP };
        let ((a, low), (b, other)) = (Key::of(&tuple, 1, 2), Key::of(&tuple.reversed(), 2, 1));
        assert_eq!(a, b);
        assert_ne!(low, other);
        assert_ne!(a, Key::of(&tuple, 3, 2).0, "another port of the switch is another connection");
    }

    #[test]
    fn a_connection_lives_as_long_as_its_state_says() {
        let mut flows = Flows::new(64, 1);
        assert!(open(&mut flows, at(0), 1, 1));
        assert!(has(&flows, at(HALF_OPEN - 1), 1, 1));
        assert!(!has(&flows, at(HALF_OPEN + 1), 1, 1), "nobody answered");
        let (k, low) = key(1, 1);
        assert_eq!(flows.find(at(10), 1, &k, !low, Kind::Segment(SYN | 16)), Found::Open);
        assert!(has(&flows, at(ESTABLISHED), 1, 1));
        for (from_low, flags) in [(low, FIN), (!low, FIN)] {
            assert_eq!(flows.find(at(20), 1, &k, from_low, Kind::Segment(flags)), Found::Open);
        }
        assert!(has(&flows, at(20 + CLOSED - 1), 1, 1));
        assert!(!has(&flows, at(20 + CLOSED + 1), 1, 1));
        assert_eq!(flows.find(at(30), 1, &k, low, Kind::Segment(SYN)), Found::Unknown, "a new connection is asked for");
        assert_eq!(flows.len(), 0);
    }

    #[test]
    fn other_rules_make_it_stale_until_it_is_renewed() {
        let mut flows = Flows::new(64, 1);
        open(&mut flows, at(0), 1, 1);
        let (k, low) = key(1, 1);
        assert_eq!(flows.find(at(1), 2, &k, low, Kind::Segment(16)), Found::Stale { forward: true });
        assert_eq!(flows.find(at(1), 2, &k, !low, Kind::Segment(16)), Found::Stale { forward: false });
        flows.renew(2, &k);
        assert_eq!(flows.find(at(1), 2, &k, low, Kind::Segment(16)), Found::Open);
    }

    #[test]
    fn a_flood_of_connections_costs_its_own_port_only() {
        let mut flows = Flows::new(64, 1);
        flows.set_members(4);
        for n in 0..8 {
            assert!(open(&mut flows, at(n.into()), n, 2));
        }
        for n in 0..1_000 {
            assert!(open(&mut flows, at(10), 100 + n, 1));
            assert!(flows.len() <= 64);
        }
        assert!((0..8).all(|n| has(&flows, at(11), n, 2)), "the neighbour keeps what it has");
        for n in 8..16 {
            assert!(open(&mut flows, at(12), n, 2), "and gets its share");
        }
        assert!((0..16).all(|n| has(&flows, at(12), n, 2)));
        assert_eq!(flows.len(), 64);
        flows.remove_port(1);
        assert_eq!(flows.len(), 16);
    }

    #[test]
    fn the_sweep_forgets_what_is_over() {
        let mut flows = Flows::new(64, 1);
        for n in 0..64 {
            open(&mut flows, at(0), n, 1);
        }
        flows.sweep(at(HALF_OPEN + 1));
        assert_eq!(flows.len(), 0);
        flows.remove_port(1);
        assert!(open(&mut flows, at(HALF_OPEN + 2), 1, 1));
    }

    #[test]
    fn lists_and_index_agree_after_any_history() {
        let mut flows = Flows::new(32, 7);
        flows.set_members(3);
        let mut state = 1u32;
        for step in 0..20_000u32 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (n, owner, now) = (state >> 24 & 63, (state >> 20 & 3) as PortNumber, at(u64::from(step) / 10));
            let (k, low) = key(n, owner);
            match state >> 28 {
                0..6 => _ = flows.open(now, 1, k, low, owner, Kind::Datagram),
                6..12 => _ = flows.find(now, 1, &k, low, Kind::Segment((state >> 12 & 7) as u8)),
                12 => flows.close(&k),
                13 => flows.sweep(now),
                _ if state & 0xff00 == 0 => flows.remove_port(owner),
                _ => {}
            }
            assert_eq!(flows.index.len(), flows.len());
            let held: u32 = flows.shares.iter().map(|share| share.held).sum();
            assert_eq!(held as usize, flows.len());
            for (port, share) in flows.shares.iter().enumerate() {
                let (mut at, mut seen) = (share.oldest, 0);
                while at != NIL {
                    assert_eq!(usize::from(flows.places[at as usize].owner), port);
                    (at, seen) = (flows.links[at as usize].newer, seen + 1);
                }
                assert_eq!(seen, share.held);
            }
        }
    }

    /// With more connections than there is room for at first, there is room in the next tick.
    #[test]
    fn the_room_for_recent_ones_follows_their_number() {
        for is_ipv4 in [true, false] {
            let mut flows = Flows::new(CAPACITY, 7);
            let base = if is_ipv4 { 0xffff_0000_0000 } else { 0xfd << 120 };
            let direction = |n: u32| {
                let end = |ip: u128, port| End { ip: base | ip, port };
                let tuple = Tuple { from: end(n.into(), 7), to: end(1 << 24, 80), protocol: TCP };
                Direction { plain: Plain::of(&tuple, is_ipv4), from: 1, to: 9, roles: Roles::default() }
            };
            let recent = |flows: &mut Flows, now: Tick, count: u32| {
                flows.sweep(now);
                for n in 0..count {
                    let (key, from_low) = Key::of(&direction(n).plain.tuple(), 1, 9);
                    if flows.find_plain(now, 1, &direction(n), Kind::Segment(ACK)) == Found::Unknown {
                        assert!(flows.open(now, 1, key, from_low, 1, Kind::Segment(ACK)));
                        flows.find_plain(now, 1, &direction(n), Kind::Segment(ACK));
                    }
                }
                let known = (0..count).filter(|n| flows.is_recent(now, 1, &direction(*n))).count();
                (known, flows.recent_four.pairs.len().max(flows.recent_six.pairs.len()))
            };
            let (few, pairs) = recent(&mut flows, at(1), 64);
            assert!((62..=64).contains(&few), "{few}");
            assert_eq!(pairs, RECENT);
            // However many frames they have, and of whatever kind.
            let reset = Kind::Segment(RST | ACK);
            (0..10_000).for_each(|n| _ = flows.find_plain(at(1), 1, &direction(n % 64), reset));
            flows.sweep(at(2));
            assert_eq!((flows.recent_four.pairs.len(), flows.recent_six.pairs.len()), (RECENT, RECENT));
            let (crowded, _) = recent(&mut flows, at(3), 10_000);
            assert!(crowded <= 2 * RECENT, "{crowded}");
            let _ = recent(&mut flows, at(4), 10_000);
            let (known, pairs) = recent(&mut flows, at(5), 10_000);
            assert!(known > 9_000 && pairs == MOST_RECENT, "{known} {pairs}");
        }
    }

    /// Frames that need no look at their connection are those that would not change it.
    #[test]
    fn what_is_recent_would_change_nothing() {
        let mut flows = Flows::new(24, 9);
        flows.set_members(3);
        let mut state = 5u32;
        let mut next = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        let (mut recent, mut generation) = (0, 1);
        for step in 0..150_000u64 {
            let now = Tick::of(Nanos::SECOND.times(step / 1_000));
            // IPv4, IPv6, and an IPv6 frame of an IPv4 address.
            let is_ipv4 = next(2) == 0;
            let base = if is_ipv4 || next(4) == 0 { 0xffff_0000_0000 } else { 0xfd << 120 };
            let end = |n: u32| End { ip: base | u128::from(n), port: 7 };
            let (a, b) = (next(8), 8 + next(2));
            let protocol = if next(2) == 0 { TCP } else { 17 };
            let mut tuple = Tuple { from: end(a), to: end(b), protocol };
            let (mut from, mut to) = ((a % 3) as PortNumber, 9);
            if next(2) == 0 {
                (tuple, from, to) = (tuple.reversed(), to, from);
            }
            let flags = [ACK, ACK, ACK, SYN, SYN | ACK, FIN | ACK, RST][next(7) as usize];
            let kind = if protocol == TCP { Kind::Segment(flags) } else { Kind::Datagram };
            let roles = Roles { router: next(2) == 0, ..Roles::default() };
            let direction = Direction { plain: Plain::of(&tuple, is_ipv4), from, to, roles };
            let (key, from_low) = Key::of(&tuple, from, to);
            if !kind.changes_state() && flows.is_recent(now, generation, &direction) {
                recent += 1;
                let at = flows.place_of(&key).expect("its connection is there");
                let mut flow = flows.places[at as usize];
                let before = (flow.answered, flow.reset, flow.done_low, flow.done_high);
                assert!(flow.used && flow.generation == generation && flow.seen == now, "{step}: {flow:?}");
                flow.note(from_low, kind);
                assert_eq!((flow.answered, flow.reset, flow.done_low, flow.done_high), before, "{step}");
            }
            match next(64) {
                0 => flows.close(&key),
                1 => flows.sweep(now),
                2 => flows.remove_port(from),
                3 => flows.renew(generation, &key),
                4 if step % 16 == 0 => generation += 1,
                5..12 => _ = flows.open(now, generation, key, from_low, from.min(to), kind),
                _ => _ = flows.find_plain(now, generation, &direction, kind),
            }
        }
        assert!(recent > 1_000, "{recent}");
    }
}
