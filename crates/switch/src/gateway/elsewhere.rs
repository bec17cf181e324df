//! What is known of the same network on other machines: their members, and addresses that this
//! machine has lost to them.
//!
//! The control plane says it, as a whole ([`Elsewhere`]). The gateway resolves the names of these
//! members, and leases none of their addresses, except to the member itself if it moves here. What
//! this machine has wins: its own members, their leases, the gateway and the router keep their
//! names and addresses, whatever is said here.
//!
//! An address that was lost is leased to no member here, and a lease for it ends at once: after a
//! partition two machines had both given it out, and the other one keeps it. Addresses that the
//! configuration fixes stay.

use super::Gateway;
use super::lease::LeaseState;
use super::names;
use crate::frame::Mac;
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

/// Most addresses of one remote member in an answer.
const MAX_ANSWERS: usize = 8;

/// A member of the network on another machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    /// One label, without the domain, where it has one.
    pub name: Option<String>,
    /// Its MAC address.
    pub mac: Mac,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Holder {
    mac: Mac,
    name: Option<Arc<str>>,
}

/// The remote members, found by name, address and MAC address, and the addresses that were lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    names: HashMap<Arc<str>, Vec<IpAddr>>,
    holders: HashMap<IpAddr, Holder>,
    macs: HashMap<Mac, Vec<IpAddr>>,
    lost: HashSet<IpAddr>,
}

impl Elsewhere {
    /// What is said of `members`, and `lost` addresses. A name or an address that occurs twice is
    /// the first one's; a name that no host may have is left out.
    pub fn new(members: impl IntoIterator<Item = Remote>, lost: impl IntoIterator<Item = IpAddr>) -> Elsewhere {
        let mut all = Elsewhere { lost: lost.into_iter().collect(), ..Elsewhere::default() };
        for Remote { name, mac, addresses } in members {
            let name: Option<Arc<str>> = name.as_deref().and_then(names::label).map(Into::into);
            let free: Vec<_> = addresses.into_iter().filter(|address| !all.holders.contains_key(address)).collect();
            for address in &free {
                all.holders.insert(*address, Holder { mac, name: name.clone() });
            }
            if let Some(name) = name
                && !all.names.contains_key(&name)
            {
                all.names.insert(name, free.clone());
            }
            all.macs.entry(mac).or_default().extend(free);
        }
        all
    }

    /// Whether `address` is not to be leased to `mac`; `held` says that it is the address that it
    /// has a lease for.
    pub(super) fn refuses(&self, address: IpAddr, mac: Mac, held: bool) -> bool {
        self.lost.contains(&address) || !held && self.holders.get(&address).is_some_and(|holder| holder.mac != mac)
    }

    /// The IPv4 address that a member had on another machine.
    pub(super) fn ipv4_of(&self, mac: Mac) -> Option<Ipv4Addr> {
        self.macs.get(&mac)?.iter().find_map(|address| match address {
            IpAddr::V4(address) => Some(*address),
            IpAddr::V6(_) => None,
        })
    }

    /// The IPv6 addresses that a member had on another machine.
    pub(super) fn ipv6_of(&self, mac: Mac) -> impl Iterator<Item = Ipv6Addr> {
        self.macs.get(&mac).into_iter().flatten().filter_map(|address| match address {
            IpAddr::V6(address) => Some(*address),
            IpAddr::V4(_) => None,
        })
    }
}

/// Whether a member on another machine may have this name: letters, digits and inner hyphens, at
/// most 63.
pub fn is_host_name(text: &str) -> bool {
    names::label(text).is_some()
}

impl Gateway {
    /// Replaces what is known of other machines. Leases of addresses that are lost now end, unless
    /// the configuration fixes them.
    pub fn set_elsewhere(&mut self, elsewhere: Arc<Elsewhere>) {
        self.elsewhere = elsewhere;
        let all = self.elsewhere.clone();
        for address in &all.lost {
            match address {
                _ if self.is_fixed(*address) => {}
                IpAddr::V4(address) => {
                    if let Some(leases) = &mut self.leases {
                        leases.revoke(*address, None);
                    }
                }
                IpAddr::V6(address) => {
                    if let Some(six) = &mut self.six
                        && let Some(number) = six.number(*address)
                        && let Some(leases) = &mut six.leases
                    {
                        leases.revoke(number, None);
                    }
                }
            }
        }
        // Addresses that were another machine's may be free now.
        if let Some(leases) = &mut self.leases {
            leases.reservations_changed();
        }
        if let Some(leases) = self.six.as_mut().and_then(|six| six.leases.as_mut()) {
            leases.reservations_changed();
        }
    }

    /// Whether the configuration gives `address` to a member or a role.
    fn is_fixed(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => {
                address == self.config.address
                    || Some(address) == self.config.router
                    || self.members.of_address(address).is_some()
            }
            IpAddr::V6(address) => self.six.as_ref().is_some_and(|six| {
                let number = six.number(address);
                six.is_own(address)
                    || self.members.has_static6(address)
                    || number.is_some_and(|number| self.members.of_address(number).is_some())
            }),
        }
    }

    /// Whether `address` is that of a member of this machine, or of the gateway or router.
    fn is_here(&self, address: IpAddr) -> bool {
        self.is_fixed(address) || self.lease_at(address).is_some_and(|lease| lease.state == LeaseState::Bound)
    }

    /// The addresses of a remote member of that name, in small letters; `None` where there is none.
    pub(super) fn resolve_elsewhere(&self, name: &str) -> Option<impl Iterator<Item = IpAddr>> {
        let addresses = self.elsewhere.names.get(name)?.iter().copied();
        Some(addresses.filter(|address| !self.is_here(*address)).take(MAX_ANSWERS))
    }

    /// The name of the remote member with `address`, which has none on this machine.
    pub(super) fn name_elsewhere(&self, address: IpAddr) -> Option<&str> {
        let holder = self.elsewhere.holders.get(&address)?;
        holder.name.as_deref().filter(|_| !self.is_here(address))
    }
}
