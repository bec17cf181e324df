//! Who claims what in one network, and who wins. A look-up costs as much as there are claims to the
//! same thing, which is one unless members move or addresses conflict.
//!
//! A file for several machines says at which machine a name or an address is at home. A claim of
//! another machine to it counts only for a member that the home has it for, or had when the claim
//! came: so a member that moved keeps what it had, and no machine takes what was never given to its
//! members.
//!
//! A machine that started after the move does not know what the home gave. So any lease counts
//! while the home has the address for no member: a lease that is in use must not be given twice.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

use crate::member::{Address, Mac, mac_text};
use crate::message::Claim;

/// A machine by its place among all names in their order. So the lower of two is the one whose name
/// sorts first.
pub type Machine = u16;

/// Members of one machine that may claim the same address or name. More are not looked at, so that
/// a machine cannot make work for all others.
const MAX_EQUAL: usize = 4;
/// Conflicts that are listed.
pub const MAX_CONFLICTS: usize = 1000;

/// One claim to an address or a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct To {
    mac: Mac,
    machine: Machine,
    /// Not a lease, and so wins over one. Names are never leased.
    fixed: bool,
    /// The thing's home has, or had, it for the same member.
    given: bool,
}

/// What belongs to which machine, as a file for several machines says it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Homes {
    /// Single addresses.
    pub addresses: HashMap<IpAddr, Machine>,
    /// The first and last addresses of parts of ranges, which do not overlap.
    pub parts: BTreeMap<IpAddr, (IpAddr, Machine)>,
    /// Names of members.
    pub names: HashMap<String, Machine>,
    /// MAC addresses of members.
    pub macs: HashMap<Mac, Machine>,
}

impl Homes {
    fn of_address(&self, ip: IpAddr) -> Option<Machine> {
        let part = || self.parts.range(..=ip).next_back().filter(|(_, (last, _))| ip <= *last);
        self.addresses.get(&ip).copied().or_else(|| part().map(|(_, (_, machine))| *machine))
    }

    fn of_name(&self, name: &str) -> Option<Machine> {
        self.names.get(name).copied()
    }

    fn renumber(&mut self, new: impl Fn(Machine) -> Machine) {
        let parts = self.parts.values_mut().map(|(_, machine)| machine);
        let single = self.addresses.values_mut().chain(self.names.values_mut()).chain(self.macs.values_mut());
        for machine in single.chain(parts) {
            *machine = new(*machine);
        }
    }
}

/// The claims of all machines in one network.
#[derive(Clone, Debug, Default)]
pub struct Claims {
    macs: HashMap<Mac, Vec<(Machine, Claim)>>,
    addresses: HashMap<IpAddr, Vec<To>>,
    names: HashMap<String, Vec<To>>,
    homes: Homes,
    /// Machines that keep a member as long as they claim that it is there, whatever others claim.
    kept: HashMap<Mac, Machine>,
}

/// Notes which members have an address or name from its home.
fn give(list: &mut [To], home: Option<Machine>) {
    let Some(home) = home else { return };
    let of_home: Vec<Mac> = list.iter().filter(|to| to.machine == home).map(|to| to.mac).collect();
    for to in list.iter_mut().filter(|to| of_home.contains(&to.mac)) {
        to.given = true;
    }
}

/// Whether a claim counts to what is at home at a machine. See the head of the module.
fn counts(to: &To, home: Option<Machine>) -> bool {
    home.is_none() || to.given || !to.fixed
}

fn remove<K: Hash + Eq>(map: &mut HashMap<K, Vec<To>>, key: &K, mac: Mac, machine: Machine) {
    if let Some(list) = map.get_mut(key) {
        list.retain(|to| (to.mac, to.machine) != (mac, machine));
        if list.is_empty() {
            map.remove(key);
        }
    }
}

impl Claims {
    /// Whether there is nothing to know.
    pub fn is_empty(&self) -> bool {
        self.macs.is_empty() && self.homes == Homes::default()
    }

    /// Says what belongs to which machine, in place of what did. Anything may change by that.
    pub fn set_homes(&mut self, homes: Homes, touched: &mut BTreeSet<Machine>) {
        if self.homes == homes {
            return;
        }
        self.homes = homes;
        for (ip, list) in &mut self.addresses {
            give(list, self.homes.of_address(*ip));
        }
        for (name, list) in &mut self.names {
            give(list, self.homes.of_name(name));
        }
        touched.extend(self.macs.values().flatten().map(|(machine, _)| *machine));
    }

    /// Has a machine keep a member as long as it claims that the member is there; `None` ends that.
    pub fn keep(&mut self, mac: Mac, machine: Option<Machine>, touched: &mut BTreeSet<Machine>) {
        if self.kept.get(&mac).copied() == machine {
            return;
        }
        self.touch(mac, touched);
        match machine {
            Some(machine) => self.kept.insert(mac, machine),
            None => self.kept.remove(&mac),
        };
        self.touch(mac, touched);
    }

    /// The machine at which a file has a member.
    pub fn home(&self, mac: Mac) -> Option<Machine> {
        self.homes.macs.get(&mac).copied()
    }

    /// The machine that keeps a member, whatever others claim.
    pub fn keeper(&self, mac: Mac) -> Option<Machine> {
        self.kept.get(&mac).copied()
    }

    /// The claim of a machine to a MAC address.
    pub fn of(&self, machine: Machine, mac: Mac) -> Option<&Claim> {
        self.macs.get(&mac)?.iter().find(|(other, _)| *other == machine).map(|(_, claim)| claim)
    }

    /// The highest version by which another machine claims a MAC address.
    pub fn rival(&self, machine: Machine, mac: Mac) -> Option<u64> {
        let others = self.macs.get(&mac)?.iter().filter(|(other, _)| *other != machine);
        others.map(|(_, claim)| claim.version).max()
    }

    /// As [`Claims::rival`], of claims that the member is there.
    pub fn rival_placed(&self, machine: Machine, mac: Mac) -> Option<u64> {
        let others = self.macs.get(&mac)?.iter().filter(|(other, claim)| *other != machine && claim.placed);
        others.map(|(_, claim)| claim.version).max()
    }

    /// The machine where a MAC address is.
    pub fn winner(&self, mac: Mac) -> Option<Machine> {
        let claims = self.macs.get(&mac)?.iter().filter(|(_, claim)| claim.placed);
        let keeper = self.kept.get(&mac);
        let order = |(machine, claim): &&(Machine, Claim)| {
            (Some(machine) != keeper, std::cmp::Reverse(claim.version), *machine)
        };
        claims.min_by_key(order).map(|(machine, _)| *machine)
    }

    /// All claims to a MAC address: one member, whichever machine has a lease of its.
    pub fn all_of(&self, mac: Mac) -> impl Iterator<Item = &Claim> {
        self.macs.get(&mac).into_iter().flatten().map(|(_, claim)| claim)
    }

    /// A claim to an address or name is that of the machine where its member is, or of the machine
    /// that keeps it for the member.
    fn valid<'a>(&'a self, list: &'a [To]) -> impl Iterator<Item = To> + 'a {
        list.iter().map(|to| To { machine: self.winner(to.mac).unwrap_or(to.machine), ..*to })
    }

    /// Of those that count: what the home claims now, then what it gave, then what a file fixes.
    fn best(&self, list: Option<&Vec<To>>, home: Option<Machine>) -> Option<To> {
        let counts = list?.iter().filter(|to| counts(to, home));
        let rank = |to: &&To| {
            let from_home = home.map(|home| (to.machine != home, !to.given));
            (from_home, !to.fixed)
        };
        let at = |to: &To| self.winner(to.mac).unwrap_or(to.machine);
        let best = counts.min_by_key(|to| (rank(to), at(to), to.mac))?;
        Some(To { machine: at(best), ..*best })
    }

    /// The machine and member that have an IP address.
    pub fn holder(&self, ip: IpAddr) -> Option<(Machine, Mac)> {
        self.best(self.addresses.get(&ip), self.homes.of_address(ip)).map(|to| (to.machine, to.mac))
    }

    /// The machine and member that have a name.
    pub fn named(&self, name: &str) -> Option<(Machine, Mac)> {
        self.best(self.names.get(name), self.homes.of_name(name)).map(|to| (to.machine, to.mac))
    }

    /// Replaces what a machine claims of a MAC address, and adds to `touched` all machines for
    /// which something may have changed by that.
    pub fn set(&mut self, machine: Machine, mac: Mac, claim: Option<Claim>, touched: &mut BTreeSet<Machine>) {
        if self.of(machine, mac) == claim.as_ref() {
            return;
        }
        self.touch(mac, touched);
        // What a member was given stays given while its machine claims it.
        let (mut had, mut was_named) = (Vec::new(), None);
        if let Some(old) = self.of(machine, mac) {
            let given = |list: Option<&Vec<To>>| {
                list.into_iter().flatten().any(|to| (to.mac, to.machine, to.given) == (mac, machine, true))
            };
            let ips = old.member.addresses.iter().map(|address| address.ip);
            had.extend(ips.filter(|ip| given(self.addresses.get(ip))));
            was_named = old.member.name.clone().filter(|name| given(self.names.get(name)));
        }
        if let Some(list) = self.macs.get_mut(&mac) {
            if let Some(at) = list.iter().position(|(other, _)| *other == machine) {
                let (_, old) = list.swap_remove(at);
                for address in &old.member.addresses {
                    remove(&mut self.addresses, &address.ip, mac, machine);
                }
                if let Some(name) = &old.member.name {
                    remove(&mut self.names, name, mac, machine);
                }
            }
            if list.is_empty() {
                self.macs.remove(&mac);
            }
        }
        touched.insert(machine);
        let Some(claim) = claim else { return };
        let add = |list: &mut Vec<To>, fixed, given, home| {
            if list.iter().filter(|to| to.machine == machine).count() < MAX_EQUAL {
                list.push(To { mac, machine, fixed, given });
                give(list, home);
            }
        };
        for Address { ip, fixed } in &claim.member.addresses {
            let home = self.homes.of_address(*ip);
            add(self.addresses.entry(*ip).or_default(), *fixed, had.contains(ip), home);
        }
        if let Some(name) = &claim.member.name {
            let given = was_named.as_ref() == Some(name);
            add(self.names.entry(name.clone()).or_default(), true, given, self.homes.of_name(name));
        }
        self.macs.entry(mac).or_default().push((machine, claim));
        self.touch(mac, touched);
    }

    /// All that claim a MAC address, or an address or name of its members.
    fn touch(&self, mac: Mac, touched: &mut BTreeSet<Machine>) {
        for (machine, claim) in self.macs.get(&mac).into_iter().flatten() {
            touched.insert(*machine);
            for address in &claim.member.addresses {
                let list = self.addresses.get(&address.ip).map(Vec::as_slice).unwrap_or_default();
                touched.extend(list.iter().map(|to| to.machine).chain(self.valid(list).map(|to| to.machine)));
            }
            if let Some(name) = &claim.member.name {
                let list = self.names.get(name).map(Vec::as_slice).unwrap_or_default();
                touched.extend(list.iter().map(|to| to.machine).chain(self.valid(list).map(|to| to.machine)));
            }
        }
    }

    /// The machines that claim a MAC address, in order.
    pub fn claimants(&self, mac: Mac) -> Vec<Machine> {
        let mut machines: Vec<Machine> =
            self.macs.get(&mac).into_iter().flatten().map(|(machine, _)| *machine).collect();
        machines.sort_unstable();
        machines
    }

    /// Gives all machines other numbers. `new` keeps their order.
    pub fn renumber(&mut self, new: impl Fn(Machine) -> Machine + Copy) {
        let claims = self.macs.values_mut().flatten().map(|(machine, _)| machine);
        let others = self.addresses.values_mut().chain(self.names.values_mut()).flatten().map(|to| &mut to.machine);
        for machine in claims.chain(others).chain(self.kept.values_mut()) {
            *machine = new(*machine);
        }
        self.homes.renumber(new);
    }

    /// Things that several members claim, or one that may not, at most [`MAX_CONFLICTS`]: what, the
    /// machines that claim it in their order, and the one that has it. Of more, those that take
    /// something from a machine come first, so that claims to free addresses do not hide them.
    pub fn conflicts(&self) -> Vec<(String, Vec<Machine>, Machine)> {
        let mut found = BTreeSet::new();
        let mut add = |what, machines: BTreeSet<Machine>, winner: Machine| {
            found.insert((what, machines, winner));
            if found.len() > MAX_CONFLICTS {
                found.pop_last();
            }
        };
        for (mac, keeper) in &self.kept {
            let claims = self.macs.get(mac).into_iter().flatten().filter(|(_, claim)| claim.placed);
            let machines: BTreeSet<Machine> = claims.map(|(machine, _)| *machine).collect();
            if machines.len() > 1 && machines.contains(keeper) {
                add(What::Kept(*mac), machines, *keeper);
            }
        }
        let addresses = self.addresses.iter().map(|(ip, list)| (Key::Address(*ip), list, self.homes.of_address(*ip)));
        let names = self.names.iter().map(|(name, list)| (Key::Name(name), list, self.homes.of_name(name)));
        for (key, list, home) in addresses.chain(names) {
            let may_not = list.iter().any(|to| !counts(to, home));
            let members: BTreeSet<Mac> = list.iter().map(|to| to.mac).collect();
            if members.len() < 2 && !may_not {
                continue;
            }
            let Some(winner) = self.best(Some(list), home).map(|best| best.machine).or(home) else { continue };
            let machines: BTreeSet<Machine> = self.valid(list).map(|to| to.machine).collect();
            let what = if machines.contains(&winner) { What::Contested(key) } else { What::Foreign(key) };
            add(what, machines, winner);
        }
        let text = |what: &What| match what {
            What::Kept(mac) => mac_text(*mac),
            What::Contested(key) | What::Foreign(key) => key.to_string(),
        };
        let mut told: Vec<_> = found
            .iter()
            .map(|(what, machines, winner)| (text(what), machines.iter().copied().collect(), *winner))
            .collect();
        told.sort();
        told
    }
}

/// What is contested, the most important first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum What<'a> {
    /// A member that its machine keeps, and another machine claims.
    Kept(Mac),
    /// What its winner claims too.
    Contested(Key<'a>),
    /// What belongs to a machine that does not claim it.
    Foreign(Key<'a>),
}

/// An address or a name.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Key<'a> {
    Address(IpAddr),
    Name(&'a str),
}

impl std::fmt::Display for Key<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Key::Address(ip) => ip.fmt(out),
            Key::Name(name) => name.fmt(out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::Member;

    #[test]
    fn what_a_machine_keeps_is_told_first_and_claims_to_foreign_addresses_do_not_hide_it() {
        let (right, hostile) = (1, 0);
        let address = |number: u32| Address { ip: std::net::Ipv4Addr::from(0x0a00_0000 + number).into(), fixed: true };
        let claim = |mac: Mac, addresses: Vec<Address>, version| Claim {
            member: Member { mac, name: None, addresses },
            version,
            placed: true,
        };
        let mac = |number: u32| {
            let [_, _, c, d] = number.to_be_bytes();
            [2, 0, 0, 0, c, d]
        };
        let (mut claims, mut touched) = (Claims::default(), BTreeSet::new());
        let mut homes = Homes::default();
        homes.parts.insert(address(1).ip, (address(60_000).ip, right));
        claims.set_homes(homes, &mut touched);
        for number in 0..=MAX_CONFLICTS as u32 {
            let foreign = claim(mac(number), vec![address(number + 1)], 1);
            claims.set(hostile, foreign.member.mac, Some(foreign), &mut touched);
        }
        // A member that its machine keeps, and an address that both have.
        let last = MAX_CONFLICTS as u32;
        let (kept, both) = (mac(50_000), address(last + 1));
        claims.set(right, kept, Some(claim(kept, vec![both.clone()], 1)), &mut touched);
        claims.set(hostile, kept, Some(claim(kept, vec![], 9)), &mut touched);
        claims.keep(kept, Some(right), &mut touched);
        let told = claims.conflicts();
        assert_eq!(told.len(), MAX_CONFLICTS);
        let of = |what: &str| {
            told.iter().find(|(told, ..)| told == what).map(|(_, machines, winner)| (&machines[..], *winner))
        };
        assert_eq!(of(&mac_text(kept)), Some((&[hostile, right][..], right)));
        assert_eq!(of(&both.ip.to_string()), Some((&[hostile, right][..], right)));
        assert_eq!(of("10.0.0.1"), Some((&[hostile][..], right)), "its owner does not claim it");
        assert_eq!(claims.conflicts(), told, "the same ones each time");
    }
}
