//! The members of a network that its file (or the API) names, and what a valid name is.
//!
//! A member ties a name to an address, to a MAC address, or to both:
//!
//! | mac | address | what it gives |
//! | --- | --- | --- |
//! | yes | yes | a static lease, and the name |
//! | no | yes | the name; the first client that asks for a lease by that host name gets the address |
//! | yes | no | the name, for the address that this MAC leases |
//! | no | no | nothing is served, but no client may take the name |
//!
//! This configuration wins over what clients say: a client cannot take a member's name or address.

use crate::frame::Mac;
use crate::gateway::ConfigError;
use crate::guard::shown_mac;
use std::collections::HashMap;
use std::net::{Ipv4Addr, Ipv6Addr};

/// Longest label of a name (RFC 1035 §2.3.4).
pub(crate) const MAX_LABEL_BYTES: usize = 63;
/// Most fixed IPv6 addresses of one member.
pub(crate) const MAX_STATIC6: usize = 16;
/// Most members of one network.
pub const MAX_MEMBERS: usize = 16_384;

/// A named party of the network. See the table at the head of the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// One label, without the domain.
    pub name: String,
    /// Its MAC address, where that is fixed.
    pub mac: Option<Mac>,
    /// Its address, where that is fixed; may lie inside the range of dynamic leases, which then
    /// leaves it out.
    pub address: Option<Ipv4Addr>,
}

/// A name under which a member's IPv6 addresses are found, whether or not it has an IPv4 address of
/// the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name6 {
    /// One label, without the domain.
    pub name: String,
    /// Its MAC address, where that is fixed: what it leases, and gives itself, has the name.
    pub mac: Option<Mac>,
    /// Its fixed addresses.
    pub addresses: Vec<Ipv6Addr>,
}

/// The label in small letters, if it is one that a host may have: letters, digits and inner hyphens
/// (RFC 1123 §2.1).
pub(crate) fn label(text: &str) -> Option<String> {
    let bytes = text.as_bytes();
    let fits = !bytes.is_empty()
        && bytes.len() <= MAX_LABEL_BYTES
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-')
        && bytes[0] != b'-'
        && bytes[bytes.len() - 1] != b'-';
    fits.then(|| text.to_ascii_lowercase())
}

/// Names that programs look up by themselves and trust. A client that has one takes over a part of
/// its neighbours: proxies and tunnels (CERT VU#598349), mail settings, configuration servers. Also
/// names that mean the machine itself or no machine (RFC 6761, RFC 8375). Sorted.
const RESERVED: [&str; 27] = [
    "alt",
    "arpa",
    "autoconfig",
    "autodiscover",
    "broadcasthost",
    "corp",
    "dns",
    "example",
    "home",
    "internal",
    "invalid",
    "ip6-allnodes",
    "ip6-allrouters",
    "ip6-localhost",
    "ip6-localnet",
    "ip6-loopback",
    "ip6-mcastprefix",
    "isatap",
    "local",
    "localdomain",
    "localhost",
    "onion",
    "puppet",
    "salt",
    "test",
    "unifi",
    "wpad",
];

/// Whether no client gets `name`, a label in small letters, by asking for it; the file may name a
/// member so. Besides `RESERVED` these are names that resolvers read as an address (`inet_aton`):
/// of digits alone, or of hexadecimal ones.
pub fn is_reserved(name: &str) -> bool {
    let hex = name.strip_prefix("0x").is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_hexdigit()));
    hex || name.bytes().all(|b| b.is_ascii_digit()) || RESERVED.binary_search(&name).is_ok()
}

/// The members, found by name, MAC and address.
#[derive(Clone, Debug, Default)]
pub(crate) struct Members {
    by_name: HashMap<String, Member>,
    name_of_mac: HashMap<Mac, String>,
    name_of_address: HashMap<Ipv4Addr, String>,
    /// Fixed IPv6 addresses and MAC addresses, by the member's name, and the other way.
    static6: HashMap<String, Vec<Ipv6Addr>>,
    name_of6: HashMap<Ipv6Addr, String>,
    mac6: HashMap<String, Mac>,
    name_of_mac6: HashMap<Mac, String>,
}

impl Members {
    /// Adds `member`, or puts it in the place of the one that has its name.
    pub(crate) fn set(&mut self, mut member: Member) -> Result<(), ConfigError> {
        member.name = label(&member.name).ok_or_else(|| ConfigError::Name(member.name.clone()))?;
        let taken = |owner: Option<&String>| owner.filter(|name| **name != member.name).cloned();
        if let Some(other) = member.mac.and_then(|mac| taken(self.name_of_mac.get(&mac))) {
            return Err(ConfigError::Taken { what: "MAC address", name: member.name, other });
        }
        if let Some(other) = member.address.and_then(|address| taken(self.name_of_address.get(&address))) {
            return Err(ConfigError::Taken { what: "address", name: member.name, other });
        }
        self.remove(&member.name);
        if self.by_name.len() >= MAX_MEMBERS {
            return Err(ConfigError::TooManyMembers);
        }
        if let Some(mac) = member.mac {
            self.name_of_mac.insert(mac, member.name.clone());
        }
        if let Some(address) = member.address {
            self.name_of_address.insert(address, member.name.clone());
        }
        self.by_name.insert(member.name.clone(), member);
        Ok(())
    }

    /// Forgets the member of that name; `None` where there is none.
    pub(crate) fn remove(&mut self, name: &str) -> Option<Member> {
        let member = self.by_name.remove(&label(name)?)?;
        if let Some(mac) = member.mac {
            self.name_of_mac.remove(&mac);
        }
        if let Some(address) = member.address {
            self.name_of_address.remove(&address);
        }
        Some(member)
    }

    /// Sets all names that are for IPv6; names and addresses that occur twice are the first one's.
    pub(crate) fn set_names6(&mut self, names: &[Name6]) {
        self.static6.clear();
        self.name_of6.clear();
        self.mac6.clear();
        self.name_of_mac6.clear();
        for Name6 { name, mac, addresses } in names.iter().take(MAX_MEMBERS) {
            let Some(name) = label(name).filter(|name| !self.static6.contains_key(name)) else { continue };
            if let Some(mac) = mac.filter(|mac| !self.name_of_mac6.contains_key(mac)) {
                self.mac6.insert(name.clone(), mac);
                self.name_of_mac6.insert(mac, name.clone());
            }
            let free: Vec<_> =
                addresses.iter().copied().filter(|a| !self.name_of6.contains_key(a)).take(MAX_STATIC6).collect();
            self.name_of6.extend(free.iter().map(|address| (*address, name.clone())));
            self.static6.insert(name, free);
        }
    }

    /// The MAC address that the file gives to the member of that name, and the other way.
    pub(crate) fn mac6(&self, name: &str) -> Option<Mac> {
        self.mac6.get(name).copied()
    }

    pub(crate) fn name_of_mac6(&self, mac: Mac) -> Option<&str> {
        self.name_of_mac6.get(&mac).map(String::as_str)
    }

    /// The fixed IPv6 addresses of the member of that name, which is in small letters.
    pub(crate) fn static6(&self, name: &str) -> &[Ipv6Addr] {
        self.static6.get(name).map_or(&[], |list| list)
    }

    /// Whether the file has a member of that name.
    pub(crate) fn lists6(&self, name: &str) -> bool {
        self.static6.contains_key(name)
    }

    /// Whether some member has that fixed IPv6 address.
    pub(crate) fn has_static6(&self, address: Ipv6Addr) -> bool {
        self.name_of6.contains_key(&address)
    }

    /// The MAC address of the member with that fixed address, or with the fixed IPv4 address that it
    /// follows from.
    pub(crate) fn fixed6(&self, address: Ipv6Addr, from: Option<Ipv4Addr>) -> Option<Mac> {
        let of_file = self.name_of6(address).and_then(|name| self.mac6(name));
        of_file.or_else(|| self.of_address(from?)?.mac)
    }

    /// The MAC address of a member that `address` shows.
    pub(crate) fn shown6(&self, address: Ipv6Addr) -> Option<Mac> {
        let is_known = |mac: &Mac| self.name_of_mac.contains_key(mac) || self.name_of_mac6.contains_key(mac);
        shown_mac(address.to_bits()).filter(is_known)
    }

    /// MAC addresses that the file gives to members, some of them twice.
    pub(crate) fn macs(&self) -> impl Iterator<Item = Mac> {
        self.name_of_mac.keys().chain(self.name_of_mac6.keys()).copied()
    }

    /// Fixed IPv4 addresses.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.name_of_address.keys().copied()
    }

    /// Fixed IPv6 addresses.
    pub(crate) fn addresses6(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.name_of6.keys().copied()
    }

    pub(crate) fn name_of6(&self, address: Ipv6Addr) -> Option<&str> {
        self.name_of6.get(&address).map(String::as_str)
    }

    /// The member of that name, which is in small letters.
    pub(crate) fn named(&self, name: &str) -> Option<&Member> {
        self.by_name.get(name)
    }

    pub(crate) fn of_mac(&self, mac: Mac) -> Option<&Member> {
        self.by_name.get(self.name_of_mac.get(&mac)?)
    }

    pub(crate) fn of_address(&self, address: Ipv4Addr) -> Option<&Member> {
        self.by_name.get(self.name_of_address.get(&address)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(name: &str, mac: Option<u8>, address: Option<u8>) -> Member {
        Member {
            name: name.into(),
            mac: mac.map(|m| [2, 0, 0, 0, 0, m]),
            address: address.map(|a| Ipv4Addr::new(10, 0, 0, a)),
        }
    }

    #[test]
    fn labels_are_those_of_hosts() {
        for good in ["a", "web-1", "3com", "A-Z", &"x".repeat(63)] {
            assert_eq!(label(good), Some(good.to_ascii_lowercase()));
        }
        for bad in ["", "-a", "a-", "a.b", "a_b", "ä", "a b", "a\0", &"x".repeat(64)] {
            assert_eq!(label(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn reserved_names_are_sorted_labels_and_numbers_are_no_names() {
        assert!(RESERVED.is_sorted() && RESERVED.iter().all(|name| label(name).as_deref() == Some(*name)));
        for name in ["wpad", "localhost", "isatap", "127", "0", "0x7f000001", "0x"] {
            assert!(is_reserved(name), "{name}");
        }
        for name in ["web", "wpad2", "3com", "x7", "0xg", "local-1"] {
            assert!(!is_reserved(name), "{name}");
        }
    }

    #[test]
    fn a_member_is_found_by_each_key_and_gone_by_each_key() {
        let mut members = Members::default();
        members.set(member("Web", Some(1), Some(20))).unwrap();
        assert_eq!(members.of_mac([2, 0, 0, 0, 0, 1]).unwrap().name, "web");
        assert_eq!(members.of_address(Ipv4Addr::new(10, 0, 0, 20)).unwrap().name, "web");
        // In its place, other keys: the old ones lead nowhere.
        members.set(member("web", Some(2), None)).unwrap();
        assert!(members.of_mac([2, 0, 0, 0, 0, 1]).is_none());
        assert!(members.of_address(Ipv4Addr::new(10, 0, 0, 20)).is_none());
        assert!(members.remove("WEB").is_some());
        assert!(members.of_mac([2, 0, 0, 0, 0, 2]).is_none() && members.named("web").is_none());
    }

    #[test]
    fn two_members_share_no_key() {
        let mut members = Members::default();
        members.set(member("a", Some(1), Some(20))).unwrap();
        assert!(matches!(members.set(member("b", Some(1), None)), Err(ConfigError::Taken { .. })));
        assert!(matches!(members.set(member("b", None, Some(20))), Err(ConfigError::Taken { .. })));
        assert!(matches!(members.set(member("b c", None, None)), Err(ConfigError::Name(_))));
        assert!(members.named("b").is_none());
    }
}
