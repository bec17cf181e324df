//! Which device is a network link, and what its header says.
//!
//! The header page lies in memory that the host can write at any moment, so it is copied once and
//! judged by the copy.

use crate::access::{self, Access, Wakeups};
use crate::error::AgentError;
use crate::pci::Device;
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::region::Header;

/// A device that is open, and is a network link.
pub(crate) struct NetworkLink {
    pub(crate) device: Device,
    /// The way to it.
    pub(crate) access: Access,
    /// What its memory begins with.
    pub(crate) header: Header,
    /// Our id on the link.
    pub(crate) own: u32,
}

impl NetworkLink {
    /// The fabric's side of the link: a network link has two peers, and the fabric is the first.
    pub(crate) fn peer(&self) -> u32 {
        u32::from(self.own == 0)
    }
}

/// Reads the header of a device through sysfs; nothing stays open.
pub(crate) fn header(device: &Device) -> Result<Header, AgentError> {
    let access = access::open(device, Wakeups::Poll, 0)?;
    Header::read(access.memory.view())
        .map_err(|error| AgentError::Header { address: device.address.clone(), problem: error.to_string() })
}

/// The device to use: the one that is asked for, or the only one that is a network link.
///
/// # Errors
/// [`AgentError::NoDevice`], [`AgentError::NoSuchDevice`], [`AgentError::NoNetwork`],
/// [`AgentError::Several`]; what a header has wrong only where its device was asked for.
pub(crate) fn choose(devices: &[Device], asked: Option<&str>) -> Result<Device, AgentError> {
    if devices.is_empty() {
        return Err(AgentError::NoDevice);
    }
    let list = |devices: &[&Device]| {
        let texts: Vec<String> = devices.iter().map(ToString::to_string).collect();
        texts.join("; ")
    };
    if let Some(address) = asked {
        // As lspci has it, without the domain, will do.
        let is_it =
            |device: &&Device| device.address == address || device.address.strip_prefix("0000:") == Some(address);
        let there = || list(&devices.iter().collect::<Vec<_>>());
        let missing = || AgentError::NoSuchDevice { address: address.into(), there: there() };
        return devices.iter().find(is_it).cloned().ok_or_else(missing);
    }
    let mut links = Vec::new();
    let mut found = Vec::new();
    for device in devices {
        match header(device) {
            Ok(header) if header.protocol == protocol::NETWORK => links.push(device),
            Ok(header) => found.push(format!("{device}: {header}")),
            Err(error) => found.push(error.to_string()),
        }
    }
    match links.as_slice() {
        [link] => Ok((*link).clone()),
        [] => Err(AgentError::NoNetwork { found: found.join("; ") }),
        several => Err(AgentError::Several { there: list(several) }),
    }
}

/// Opens a device as a network link.
///
/// # Errors
/// [`AgentError::Header`] where it is none, and those of [`access::open`].
pub(crate) fn open(device: Device, wakeups: Wakeups) -> Result<NetworkLink, AgentError> {
    let wrong = |problem: String| AgentError::Header { address: device.address.clone(), problem };
    let header = header(&device)?;
    if header.protocol != protocol::NETWORK {
        return Err(wrong(format!("protocol {:#x}, expected {:#x} (network)", header.protocol, protocol::NETWORK)));
    }
    if header.layout.max_peers != 2 {
        return Err(wrong(format!("{} peers, a network link has 2", header.layout.max_peers)));
    }
    let vectors = header.vectors.min(2) as usize;
    let access = access::open(&device, wakeups, vectors)?;
    // A plain device has no id of its own: the fabric is peer 0 of its links, the guest peer 1.
    let own = if device.has_doorbells() { access.registers.position() } else { 1 };
    if own >= header.layout.max_peers {
        return Err(wrong(format!("the device's id is {own}, expected 0 or 1")));
    }
    Ok(NetworkLink { device, access, header, own })
}
