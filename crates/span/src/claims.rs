//! Who claims what in one network, and who wins. A look-up costs as much as there are claims to the
//! same thing, which is one unless members move or addresses conflict.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::IpAddr;

use crate::member::Mac;
use crate::message::Claim;

/// A machine by its place among all names in their order. So the lower of two is the one whose name
/// sorts first.
pub type Machine = u16;

/// One claim to an address or a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct To {
    mac: Mac,
    machine: Machine,
    /// Wins over one that is not.
    fixed: bool,
}

/// The claims of all machines in one network.
#[derive(Debug, Default)]
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

    /// The machine that has a MAC address.
    pub fn winner(&self, mac: Mac) -> Option<Machine> {
        let claims = self.macs.get(&mac)?.iter();
        claims.min_by_key(|(machine, claim)| (std::cmp::Reverse(claim.version), *machine)).map(|(machine, _)| *machine)
    }

    fn best(&self, list: Option<&Vec<To>>) -> Option<To> {
        let valid = list?.iter().filter(|to| self.winner(to.mac) == Some(to.machine));
        valid.min_by_key(|to| (!to.fixed, to.machine, to.mac)).copied()
    }

    /// The machine and member that have an IP address.
    pub fn holder(&self, ip: IpAddr) -> Option<(Machine, Mac)> {
        self.best(self.addresses.get(&ip)).map(|to| (to.machine, to.mac))
    }

    /// The machine and member that have a name.
    pub fn named(&self, name: &str) -> Option<(Machine, Mac)> {
        self.best(self.names.get(name)).map(|to| (to.machine, to.mac))
    }

    /// Replaces what a machine claims of a MAC address, and adds to `touched` all machines for which
    /// something may have changed by that.
    pub fn set(&mut self, machine: Machine, mac: Mac, claim: Option<Claim>, touched: &mut Vec<Machine>) {
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
        touched.push(machine);
        let Some(claim) = claim else { return };
        for address in &claim.member.addresses {
            let to = To { mac, machine, fixed: address.fixed };
            self.addresses.entry(address.ip).or_default().push(to);
        }
        if let Some(name) = &claim.member.name {
            self.names.entry(name.clone()).or_default().push(To { mac, machine, fixed: false });
        }
        self.macs.entry(mac).or_default().push((machine, claim));
        self.touch(mac, touched);
    }

    /// All that claim a MAC address, or an address or name of its members.
    fn touch(&self, mac: Mac, touched: &mut Vec<Machine>) {
        for (machine, claim) in self.macs.get(&mac).into_iter().flatten() {
            touched.push(*machine);
            for address in &claim.member.addresses {
                touched.extend(self.addresses.get(&address.ip).into_iter().flatten().map(|to| to.machine));
            }
            if let Some(name) = &claim.member.name {
                touched.extend(self.names.get(name).into_iter().flatten().map(|to| to.machine));
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

    /// Things that several winning members claim: what, the machines in their order, and the one that has it.
    pub fn conflicts(&self) -> Vec<(String, Vec<Machine>, Machine)> {
        let mut found = Vec::new();
        let mut look = |what: String, list: &Vec<To>| {
            let valid: Vec<&To> = list.iter().filter(|to| self.winner(to.mac) == Some(to.machine)).collect();
            if let (2.., Some(best)) = (valid.len(), self.best(Some(list))) {
                let mut machines: Vec<Machine> = valid.iter().map(|to| to.machine).collect();
                machines.sort_unstable();
                machines.dedup();
                found.push((what, machines, best.machine));
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
