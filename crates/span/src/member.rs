//! A member of a network, and the limits of what a machine may claim.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// An Ethernet address.
pub type Mac = [u8; 6];

/// Members that one machine may claim in all networks.
pub const MAX_MEMBERS: usize = 4096;
/// IP addresses of one member.
pub const MAX_ADDRESSES: usize = 16;
/// Networks of one machine.
pub const MAX_NETWORKS: usize = 64;
/// Bytes of the name of a member, a network or a machine: one label of a DNS name.
pub const MAX_NAME_BYTES: usize = 63;

/// An IP address of a member.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// Whether the file of its machine fixes it. A lease can be ended, a fixed address cannot.
    pub fixed: bool,
}

/// A member of a network, as its machine announces it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its Ethernet address, which identifies it within the network.
    pub mac: Mac,
    /// Its name, without the network's domain.
    pub name: Option<String>,
    /// Its IP addresses, each once, at most [`MAX_ADDRESSES`].
    pub addresses: Vec<Address>,
}

/// Why a member cannot be announced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemberError {
    /// Not the address of one interface.
    #[error("the MAC address {0:02x?}: expected one of a single interface, not a group's and not zero")]
    Mac(Mac),
    /// Not a name.
    #[error("the name \"{0}\": expected 1 to 63 of a-z, 0-9 and -, not at the beginning or end")]
    Name(String),
    /// Not the address of one interface.
    #[error("the address {0}: expected one of a single interface")]
    Address(IpAddr),
    /// An address twice.
    #[error("the address {0} is there twice")]
    Twice(IpAddr),
    /// Too many addresses.
    #[error("a member with {0} addresses: expected at most {MAX_ADDRESSES}")]
    Addresses(usize),
}

/// A MAC address as text, such as "52:54:00:12:34:56".
pub fn mac_text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

/// Whether this can be the name of a member, a network or a machine: one label of a DNS name.
pub fn is_name(name: &str) -> bool {
    let fine = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=MAX_NAME_BYTES).contains(&name.len())
        && name.bytes().all(fine)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// Whether an interface can have this address.
pub fn is_unicast(ip: IpAddr) -> bool {
    let is_odd = match ip {
        // 0.0.0.0/8 and 240.0.0.0/4.
        IpAddr::V4(ip) => ip.octets()[0] == 0 || ip.octets()[0] >= 240,
        IpAddr::V6(ip) => ip.to_ipv4_mapped().is_some(),
    };
    !(ip.is_unspecified() || ip.is_multicast() || ip.is_loopback() || is_odd)
}

impl Member {
    /// Checks what another machine announced.
    ///
    /// # Errors
    /// [`MemberError`]: the first thing that is wrong.
    pub fn check(&self) -> Result<(), MemberError> {
        if self.mac[0] & 1 != 0 || self.mac == [0; 6] {
            return Err(MemberError::Mac(self.mac));
        }
        if let Some(name) = self.name.as_ref().filter(|name| !is_name(name)) {
            return Err(MemberError::Name(name.clone()));
        }
        if self.addresses.len() > MAX_ADDRESSES {
            return Err(MemberError::Addresses(self.addresses.len()));
        }
        for (at, Address { ip, .. }) in self.addresses.iter().enumerate() {
            if !is_unicast(*ip) {
                return Err(MemberError::Address(*ip));
            }
            if self.addresses[..at].iter().any(|other| other.ip == *ip) {
                return Err(MemberError::Twice(*ip));
            }
        }
        Ok(())
    }
}
