//! Who holds which address, and until when.
//!
//! A lease belongs to a MAC address; client identifiers (option 61) are not keys, since one client
//! can make up any number of them. Each MAC holds one address at most. The state of an address:
//!
//! ```text
//! free -> offered (10 s) -> bound (lease time) -> free          released, expired
//!             |                 |
//!             +-------> declined (10 min) -> free               the client found somebody else there
//! ```
//!
//! Limits: 65,536 dynamic addresses. Each source port of the switch holds at most its quota of
//! them, offered and declined ones included. So one guest that makes up MAC addresses cannot take
//! them all. An address is chosen by a keyed hash of the MAC, so a client without history gets the
//! same one again after a restart. If it is taken, the next free one is used.
//!
//! # Cost
//! Every operation is logarithmic in the number of leases at most. The search for a free address
//! reads a bitmap ([`FreeSet`]). Each call ends at most [`EXPIRED_PER_CALL`] leases. So many leases
//! that end at one moment are spread over several turns of the worker. Changes are noted by
//! address, so the table is never copied.

use crate::Nanos;
use crate::frame::Mac;
use crate::wait::Token;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr};

/// How long an offer is valid (RFC 2131 leaves it to the server).
pub(super) const OFFER_SPAN: Nanos = Nanos::SECOND.times(10);
/// How long an address is left alone after a client declined it.
pub(super) const DECLINE_SPAN: Nanos = Nanos::SECOND.times(600);
/// After so long a search that found nothing tries again what was reserved before.
pub(super) const SKIP_SPAN: Nanos = Nanos::SECOND.times(10);
/// Leases that one call ends at most; the rest is due at once, with the next call.
pub(super) const EXPIRED_PER_CALL: usize = 64;
/// Most addresses of a dynamic range.
pub const MAX_POOL: u32 = 65_536;

/// A MAC address as text, `02:00:00:00:00:01`, for serde.
mod mac_text {
    use crate::frame::Mac;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(mac: &Mac, to: S) -> Result<S::Ok, S::Error> {
        let [a, b, c, d, e, f] = mac;
        to.serialize_str(&format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}"))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Mac, D::Error> {
        let text = String::deserialize(from)?;
        let wrong = || D::Error::custom(format!("expected a MAC address such as 02:00:00:00:00:01, found {text:?}"));
        let mut mac = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut mac {
            let part = parts.next().filter(|p| p.len() == 2).ok_or_else(wrong)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| wrong())?;
        }
        if parts.next().is_some() { Err(wrong()) } else { Ok(mac) }
    }
}

/// The leases of a network in the form in which they outlive a restart; the host keeps it in a
/// file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStore {
    /// Bound leases, by address.
    pub leases: Vec<LeaseRecord>,
}

/// One bound lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRecord {
    /// The client's MAC address.
    #[serde(with = "mac_text")]
    pub mac: Mac,
    /// The address that it holds.
    pub address: IpAddr,
    /// The name that it goes by in DNS, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// When it ends, in seconds since 1970.
    pub expires_unix_secs: u64,
}

/// What became of one address since it was last told; the last change of an address says all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseChange {
    /// The lease is in force, in place of any other for the address.
    Bound(LeaseRecord),
    /// The address has no lease any more.
    Freed(IpAddr),
}

impl LeaseChange {
    /// The address that was bound or freed.
    pub fn address(&self) -> IpAddr {
        match self {
            LeaseChange::Bound(record) => record.address,
            LeaseChange::Freed(address) => *address,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseState {
    Offered,
    Bound,
    Declined,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) mac: Mac,
    pub(crate) state: LeaseState,
    pub(crate) expires: Nanos,
    pub(crate) name: Option<String>,
    /// The port whose quota it counts against.
    charged: Option<Token>,
}

/// Why a client got no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// No dynamic address is free.
    Exhausted,
    /// The client's port holds its quota.
    Quota,
    /// The address is somebody else's, or not one to be leased.
    NotFree,
}

/// What a lease is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) mac: Mac,
    /// Where the claim came from, where the switch said so.
    pub(crate) port: Option<Token>,
    /// The address that belongs to this client by configuration; not counted against a quota.
    pub(crate) fixed: Option<Ipv4Addr>,
}

/// Which addresses of the range the search may still try: a bitmap of two levels. So finding the
/// next one reads a few words, for any size of the range.
#[derive(Debug)]
struct FreeSet {
    words: Vec<u64>,
    /// Bit n says that word n is not zero.
    summary: Vec<u64>,
}

impl FreeSet {
    fn new(size: u32) -> FreeSet {
        let count = (size as usize).div_ceil(64);
        let mut set = FreeSet { words: vec![0; count], summary: vec![0; count.div_ceil(64)] };
        (0..size).for_each(|n| set.set(n, true));
        set
    }

    fn set(&mut self, n: u32, free: bool) {
        let (word, bit) = (n as usize / 64, n % 64);
        if free {
            self.words[word] |= 1 << bit;
        } else {
            self.words[word] &= !(1 << bit);
        }
        let (at, bit) = (word / 64, word % 64);
        if self.words[word] != 0 {
            self.summary[at] |= 1 << bit;
        } else {
            self.summary[at] &= !(1 << bit);
        }
    }

    /// The first free number from `start` on.
    fn from(&self, start: u32) -> Option<u32> {
        let above = |word: u64, bit: usize| word & u64::MAX.checked_shl(bit as u32).unwrap_or(0);
        let word = start as usize / 64;
        let rest = above(*self.words.get(word)?, start as usize % 64);
        if rest != 0 {
            return Some(word as u32 * 64 + rest.trailing_zeros());
        }
        let next = word + 1;
        let first = next / 64;
        (first..self.summary.len()).find_map(|at| {
            let full = self.summary[at];
            let words = if at == first { above(full, next % 64) } else { full };
            (words != 0).then(|| {
                let word = at * 64 + words.trailing_zeros() as usize;
                word as u32 * 64 + self.words[word].trailing_zeros()
            })
        })
    }
}

#[derive(Debug)]
pub(crate) struct Leases {
    first: u32,
    last: u32,
    quota: u32,
    key: u64,
    by_address: BTreeMap<u32, Lease>,
    by_mac: HashMap<Mac, u32>,
    by_name: HashMap<String, u32>,
    by_expiry: BTreeSet<(Nanos, u32)>,
    charged: HashMap<Token, u32>,
    /// Records whose address lies in the dynamic range.
    used: u32,
    /// Addresses of the range without a record, by their distance from `first`; less those in
    /// `skipped`.
    free: FreeSet,
    /// Addresses that the search found to be reserved. It does not try them again before
    /// reservations change, or nothing else is free and `skipped_until` has passed: a host may have
    /// claimed an address and gone.
    skipped: BTreeSet<u32>,
    skipped_until: Nanos,
    /// Addresses whose bound lease came, changed or went since [`Leases::take_changes`].
    changed: BTreeSet<u32>,
}

impl Leases {
    /// `range` is inclusive and holds at most [`MAX_POOL`] addresses; `quota` per port is at least 1.
    pub(crate) fn new(range: (Ipv4Addr, Ipv4Addr), quota: u32, key: u64) -> Leases {
        let (first, last) = (range.0.to_bits(), range.1.to_bits());
        debug_assert!(first <= last && last - first < MAX_POOL && quota > 0);
        Leases {
            first,
            last,
            quota,
            key,
            by_address: BTreeMap::new(),
            by_mac: HashMap::new(),
            by_name: HashMap::new(),
            by_expiry: BTreeSet::new(),
            charged: HashMap::new(),
            used: 0,
            free: FreeSet::new(last - first + 1),
            skipped: BTreeSet::new(),
            skipped_until: Nanos::default(),
            changed: BTreeSet::new(),
        }
    }

    fn in_range(&self, address: u32) -> bool {
        (self.first..=self.last).contains(&address)
    }

    /// How many addresses of the range are not free, and how many there are.
    pub(crate) fn usage(&self) -> (u32, u32) {
        (self.used, self.last - self.first + 1)
    }

    pub(crate) fn at(&self, address: Ipv4Addr) -> Option<&Lease> {
        self.by_address.get(&address.to_bits())
    }

    /// The address that `mac` holds or was offered.
    pub(crate) fn of_mac(&self, mac: Mac) -> Option<(Ipv4Addr, &Lease)> {
        let address = *self.by_mac.get(&mac)?;
        Some((Ipv4Addr::from_bits(address), &self.by_address[&address]))
    }

    /// The address whose holder goes by `name`, which is in small letters.
    pub(crate) fn named(&self, name: &str) -> Option<Ipv4Addr> {
        self.by_name.get(name).map(|address| Ipv4Addr::from_bits(*address))
    }

    pub(crate) fn next_expiry(&self) -> Option<Nanos> {
        self.by_expiry.first().map(|(at, _)| *at)
    }

    /// Ends what has run out, at most [`EXPIRED_PER_CALL`] of it; [`Leases::next_expiry`] says
    /// whether more is due.
    pub(crate) fn expire(&mut self, now: Nanos) {
        for _ in 0..EXPIRED_PER_CALL {
            match self.by_expiry.first() {
                Some(&(at, address)) if at <= now => self.free(address),
                _ => break,
            };
        }
    }

    /// The addresses that belong to somebody by configuration have changed.
    pub(crate) fn reservations_changed(&mut self) {
        for address in std::mem::take(&mut self.skipped) {
            self.free.set(address - self.first, !self.by_address.contains_key(&address));
        }
    }

    fn note_change(&mut self, address: u32, state: LeaseState) {
        if state == LeaseState::Bound {
            self.changed.insert(address);
        }
    }

    /// Takes the record of `address` out of every table.
    fn free(&mut self, address: u32) -> Option<Lease> {
        let lease = self.by_address.remove(&address)?;
        self.by_expiry.remove(&(lease.expires, address));
        if self.by_mac.get(&lease.mac) == Some(&address) {
            self.by_mac.remove(&lease.mac);
        }
        self.forget_name(&lease, address);
        self.discharge(lease.charged);
        if self.in_range(address) {
            self.used -= 1;
            self.free.set(address - self.first, true);
        }
        self.note_change(address, lease.state);
        Some(lease)
    }

    fn forget_name(&mut self, lease: &Lease, address: u32) {
        if let Some(name) = &lease.name
            && self.by_name.get(name) == Some(&address)
        {
            self.by_name.remove(name);
        }
    }

    fn discharge(&mut self, port: Option<Token>) {
        let Some(port) = port else { return };
        if let Some(n) = self.charged.get_mut(&port) {
            *n -= 1;
            if *n == 0 {
                self.charged.remove(&port);
            }
        }
    }

    fn insert(&mut self, address: u32, lease: Lease) {
        debug_assert!(!self.by_address.contains_key(&address));
        if let Some(port) = lease.charged {
            *self.charged.entry(port).or_default() += 1;
        }
        if lease.state != LeaseState::Declined {
            self.by_mac.insert(lease.mac, address);
        }
        if let Some(name) = &lease.name {
            self.by_name.insert(name.clone(), address);
        }
        self.by_expiry.insert((lease.expires, address));
        if self.in_range(address) {
            self.used += 1;
            self.free.set(address - self.first, false);
        }
        self.note_change(address, lease.state);
        self.by_address.insert(address, lease);
    }

    /// Whether `claim` may have `address` now, `reserved` being an address that belongs to somebody
    /// by configuration.
    fn check(&self, claim: &Claim, address: u32, reserved: &dyn Fn(Ipv4Addr) -> bool) -> Result<(), Refusal> {
        if claim.fixed != Some(Ipv4Addr::from_bits(address))
            && (!self.in_range(address) || reserved(Ipv4Addr::from_bits(address)))
        {
            return Err(Refusal::NotFree);
        }
        match self.by_address.get(&address) {
            Some(lease) if lease.mac == claim.mac && lease.state != LeaseState::Declined => Ok(()),
            Some(_) => Err(Refusal::NotFree),
            None => Ok(()),
        }
    }

    /// Whether the port of `claim` has a dynamic address left in its quota, once what its MAC holds
    /// is given back.
    fn check_quota(&self, claim: &Claim, address: u32) -> Result<(), Refusal> {
        if claim.fixed == Some(Ipv4Addr::from_bits(address)) { Ok(()) } else { self.check_dynamic_quota(claim) }
    }

    fn check_dynamic_quota(&self, claim: &Claim) -> Result<(), Refusal> {
        let Some(port) = claim.port else { return Ok(()) };
        let own = self.of_mac(claim.mac).is_some_and(|(_, lease)| lease.charged == Some(port));
        let held = self.charged.get(&port).copied().unwrap_or(0) - u32::from(own);
        if held < self.quota { Ok(()) } else { Err(Refusal::Quota) }
    }

    /// Writes `claim` down for `address`, in place of the address that its MAC held. The caller has
    /// checked both.
    fn record(&mut self, claim: &Claim, address: u32, state: LeaseState, name: Option<String>, expires: Nanos) {
        if let Some(held) = self.by_mac.get(&claim.mac).copied() {
            self.free(held);
        }
        let fixed = claim.fixed == Some(Ipv4Addr::from_bits(address));
        let charged = claim.port.filter(|_| !fixed);
        self.insert(address, Lease { mac: claim.mac, state, expires, name, charged });
    }

    /// Chooses an address for `claim`: its fixed one, the one it has, the one it `wants`, or a free
    /// one; holds it for [`OFFER_SPAN`].
    pub(crate) fn offer(
        &mut self,
        claim: &Claim,
        wants: Option<Ipv4Addr>,
        reserved: &dyn Fn(Ipv4Addr) -> bool,
        now: Nanos,
    ) -> Result<Ipv4Addr, Refusal> {
        self.expire(now);
        let held = self.of_mac(claim.mac).map(|(address, _)| address);
        let choice = match claim.fixed {
            // Declined, or still leased to the holder from before the file changed: a dynamic
            // address meanwhile.
            Some(fixed) if self.check(claim, fixed.to_bits(), reserved).is_ok() => fixed.to_bits(),
            _ => {
                let free = |a: &Ipv4Addr| self.check(claim, a.to_bits(), reserved).is_ok();
                match held.filter(free).or(wants.filter(free)) {
                    Some(address) => address.to_bits(),
                    None => {
                        // First, so that a client over its quota costs no search.
                        self.check_dynamic_quota(claim)?;
                        self.search(claim, reserved, now).ok_or(Refusal::Exhausted)?
                    }
                }
            }
        };
        let address = Ipv4Addr::from_bits(choice);
        // A bound lease is not turned back into an offer by a client that asks again.
        if held == Some(address) && self.by_address[&choice].state == LeaseState::Bound {
            return Ok(address);
        }
        self.check_quota(claim, choice)?;
        self.record(claim, choice, LeaseState::Offered, None, now.after(OFFER_SPAN));
        Ok(address)
    }

    fn search(&mut self, claim: &Claim, reserved: &dyn Fn(Ipv4Addr) -> bool, now: Nanos) -> Option<u32> {
        let size = self.usage().1;
        let start = (mix(self.key, claim.mac) % u64::from(size)) as u32;
        // Each turn but the last takes a reserved address out of the set.
        loop {
            let Some(number) = self.free.from(start).or_else(|| self.free.from(0)) else {
                if self.skipped.is_empty() || now < self.skipped_until {
                    return None;
                }
                self.skipped_until = now.after(SKIP_SPAN);
                self.reservations_changed();
                continue;
            };
            let address = self.first + number;
            if self.check(claim, address, reserved).is_ok() {
                return Some(address);
            }
            self.free.set(address - self.first, false);
            self.skipped.insert(address);
        }
    }

    /// Binds `address` to `claim` until `expires`. The name is taken where no other lease has it;
    /// without one the client keeps the name that it has.
    pub(crate) fn bind(
        &mut self,
        claim: &Claim,
        address: Ipv4Addr,
        name: Option<String>,
        reserved: &dyn Fn(Ipv4Addr) -> bool,
        now: Nanos,
        expires: Nanos,
    ) -> Result<(), Refusal> {
        self.expire(now);
        self.check(claim, address.to_bits(), reserved)?;
        self.check_quota(claim, address.to_bits())?;
        let kept = || self.of_mac(claim.mac).and_then(|(_, lease)| lease.name.clone());
        let name = name.filter(|name| self.name_is_free(name, claim.mac)).or_else(kept);
        self.record(claim, address.to_bits(), LeaseState::Bound, name, expires);
        Ok(())
    }

    /// Whether no client other than `mac` goes by `name`.
    pub(crate) fn name_is_free(&self, name: &str, mac: Mac) -> bool {
        self.by_name.get(name).is_none_or(|address| self.by_address[address].mac == mac)
    }

    /// Ends the lease of `mac`, if it is for `address`.
    pub(crate) fn release(&mut self, mac: Mac, address: Ipv4Addr) -> bool {
        let held = self.by_mac.get(&mac) == Some(&address.to_bits());
        held && self.free(address.to_bits()).is_some()
    }

    /// Leaves `address` alone for a while, if it is what `mac` holds. It goes on counting against
    /// its port.
    pub(crate) fn decline(&mut self, mac: Mac, address: Ipv4Addr, now: Nanos) -> bool {
        if self.by_mac.get(&mac) != Some(&address.to_bits()) {
            return false;
        }
        let Some(lease) = self.free(address.to_bits()) else { return false };
        let expires = now.after(DECLINE_SPAN);
        self.insert(address.to_bits(), Lease { state: LeaseState::Declined, name: None, expires, ..lease });
        true
    }

    /// Ends the lease of `address`, unless `keep` holds it: the configuration gave the address to
    /// another member.
    pub(crate) fn revoke(&mut self, address: Ipv4Addr, keep: Option<Mac>) -> bool {
        let stale = self.at(address).is_some_and(|lease| Some(lease.mac) != keep);
        stale && self.free(address.to_bits()).is_some()
    }

    /// Takes `name` away from the client that goes by it.
    pub(crate) fn strip_name(&mut self, name: &str) {
        if let Some(address) = self.by_name.remove(name)
            && let Some(lease) = self.by_address.get_mut(&address)
        {
            lease.name = None;
            let state = lease.state;
            self.note_change(address, state);
        }
    }

    /// What became of the addresses that changed since the last call.
    pub(crate) fn take_changes(&mut self, unix_secs: impl Fn(Nanos) -> u64) -> Vec<LeaseChange> {
        let changed = std::mem::take(&mut self.changed);
        let change = |address| match self.by_address.get(&address) {
            Some(lease) if lease.state == LeaseState::Bound => LeaseChange::Bound(record(address, lease, &unix_secs)),
            _ => LeaseChange::Freed(Ipv4Addr::from_bits(address).into()),
        };
        changed.into_iter().map(change).collect()
    }

    /// The bound leases as they are kept over a restart.
    pub(crate) fn store(&self, unix_secs: impl Fn(Nanos) -> u64) -> LeaseStore {
        let bound = self.by_address.iter().filter(|(_, lease)| lease.state == LeaseState::Bound);
        LeaseStore { leases: bound.map(|(address, lease)| record(*address, lease, &unix_secs)).collect() }
    }
}

fn record(address: u32, lease: &Lease, unix_secs: &impl Fn(Nanos) -> u64) -> LeaseRecord {
    LeaseRecord {
        mac: lease.mac,
        address: Ipv4Addr::from_bits(address).into(),
        name: lease.name.clone(),
        expires_unix_secs: unix_secs(lease.expires),
    }
}

/// A keyed mix of a MAC address (the finaliser of splitmix64): spreads, and is not to be guessed
/// from outside.
fn mix(key: u64, mac: Mac) -> u64 {
    let [a, b, c, d, e, f] = mac;
    let mut x = u64::from_be_bytes([0, 0, a, b, c, d, e, f]) ^ key;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
