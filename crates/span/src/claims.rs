//! Who claims what in one network, and who wins. A look-up costs as much as there are claims to the
//! same thing, which is one unless members move or addresses conflict.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::net::IpAddr;

use crate::member::Mac;
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
    /// Wins over one that is not.
    fixed: bool,
}

/// The claims of all machines in one network.
#[derive(Clone, Debug, Default)]
pub struct Claims {
    macs: HashMap<Mac, Vec<(Machine, Claim)>>,
    addresses: HashMap<IpAddr, Vec<To>>,
    names: HashMap<String, Vec<To>>,
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
    /// Whether nothing is claimed.
    pub fn is_empty(&self) -> bool {
        self.macs.is_empty()
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

    /// The machine where a MAC address is.
    pub fn winner(&self, mac: Mac) -> Option<Machine> {
        let claims = self.macs.get(&mac)?.iter().filter(|(_, claim)| claim.placed);
        claims.min_by_key(|(machine, claim)| (std::cmp::Reverse(claim.version), *machine)).map(|(machine, _)| *machine)
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

    fn best(&self, list: Option<&Vec<To>>) -> Option<To> {
        self.valid(list?).min_by_key(|to| (!to.fixed, to.machine, to.mac))
    }

    /// The machine and member that have an IP address.
    pub fn holder(&self, ip: IpAddr) -> Option<(Machine, Mac)> {
        self.best(self.addresses.get(&ip)).map(|to| (to.machine, to.mac))
    }

    /// The machine and member that have a name.
    pub fn named(&self, name: &str) -> Option<(Machine, Mac)> {
        self.best(self.names.get(name)).map(|to| (to.machine, to.mac))
    }

    /// Replaces what a machine claims of a MAC address, and adds to `touched` all machines for
    /// which something may have changed by that.
    pub fn set(&mut self, machine: Machine, mac: Mac, claim: Option<Claim>, touched: &mut BTreeSet<Machine>) {
        if self.of(machine, mac) == claim.as_ref() {
            return;
        }
        self.touch(mac, touched);
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
        let add = |list: &mut Vec<To>, fixed| {
            if list.iter().filter(|to| to.machine == machine).count() < MAX_EQUAL {
                list.push(To { mac, machine, fixed });
            }
        };
        for address in &claim.member.addresses {
            add(self.addresses.entry(address.ip).or_default(), address.fixed);
        }
        if let Some(name) = &claim.member.name {
            add(self.names.entry(name.clone()).or_default(), false);
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
    pub fn renumber(&mut self, new: impl Fn(Machine) -> Machine) {
        let claims = self.macs.values_mut().flatten().map(|(machine, _)| machine);
        let others = self.addresses.values_mut().chain(self.names.values_mut()).flatten().map(|to| &mut to.machine);
        for machine in claims.chain(others) {
            *machine = new(*machine);
        }
    }

    /// Things that several members claim, at most [`MAX_CONFLICTS`]: what, the machines in their
    /// order, and the one that has it.
    pub fn conflicts(&self) -> Vec<(String, Vec<Machine>, Machine)> {
        let mut found = Vec::new();
        let mut look = |what: String, list: &Vec<To>| {
            let members: BTreeSet<Mac> = list.iter().map(|to| to.mac).collect();
            if let (2.., Some(best)) = (members.len(), self.best(Some(list)))
                && found.len() < MAX_CONFLICTS
            {
                let machines: BTreeSet<Machine> = self.valid(list).map(|to| to.machine).collect();
                found.push((what, machines.into_iter().collect(), best.machine));
            }
        };
        for (ip, list) in self.addresses.iter().filter(|(_, list)| list.len() > 1) {
            look(ip.to_string(), list);
        }
        for (name, list) in self.names.iter().filter(|(_, list)| list.len() > 1) {
            look(name.clone(), list);
        }
        found.sort();
        found
    }
}
