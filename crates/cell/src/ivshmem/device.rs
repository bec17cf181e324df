//! The device: memory that peers share, a state word for each, doorbells.
//!
//! Two kinds are known. The first version (QEMU's `ivshmem-doorbell` and `ivshmem-plain`;
//! docs/specs/ivshmem-spec.rst) has no register for the memory's layout, so its region begins with
//! a header page. The second (Jailhouse's) has the layout in its capability. Every value from the
//! memory is read once and checked. A device that makes no sense is refused, and the cell continues
//! without it.
//!
//! Bus mastering and MSI-X are on before anything is written that peers see. A ring that comes
//! before is lost, since a vector has no pending bit that can be polled. All vectors lead to one
//! interrupt of the cell, which then looks at everything.

use super::v2;
use crate::config::Config;
use crate::machine::mmio::Mmio;
use crate::machine::{Interrupt, Platform};
use crate::pci::{Function, Pci};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;
use core::sync::atomic::Ordering;
use tombolo_ring::ivshmem::region::{Header, Layout, PAGE_BYTES, RegionError, Section};
use tombolo_ring::ivshmem::{VECTOR_STATE, protocol, vector_traffic};
use tombolo_ring::mem::{Foreign, ForeignMut};

const V1_VENDOR: u16 = 0x1af4;
const V1_DEVICE: u16 = 0x1110;
/// The revision before had other registers (QEMU before 2.6).
const V1_REVISION: u32 = 1;
const V1_POSITION: usize = 8;
const V1_DOORBELL: usize = 12;
const V1_REGISTER_BYTES: usize = 16;

const REGISTERS_BAR: u8 = 0;
const MEMORY_BAR: u8 = 2;
/// The second version does not say, and Zephyr's driver takes this.
const V2_MTU: u16 = 1500;
const REVISION_CLASS: u16 = 0x08;
const CAPABILITY_VENDOR: u8 = 0x09;
/// Of the vectors that a device has, more than any protocol here uses.
const MAX_VECTORS: u16 = 8;
/// Vectors that a peer rings: state and traffic.
const RUNG_VECTORS: u32 = 2;

/// Why a device is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// A base address has no memory, or no place in the machine.
    NoBar(u8),
    /// The device is older than what this driver knows.
    Revision(u32),
    /// The header, or the layout of the second version, makes no sense.
    Region(RegionError),
    /// The second version's class is not one of its own, or the vendor capability is not there or
    /// has a wrong length.
    V2(String),
    /// The own number is not one of the link's.
    Peer { id: u32, max_peers: u32 },
    /// A plain device does not know which of the peers it is.
    Unnumbered { name: String },
    /// The command line's number of the peer is none.
    Number { key: String, value: String },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NoBar(bar) => write!(f, "BAR {bar} has no address, or one beyond reach; see pcimem="),
            Refusal::Revision(found) => {
                write!(f, "revision {found}, expected {V1_REVISION}: QEMU 2.6 or later is needed")
            }
            Refusal::Region(error) => write!(f, "{error}"),
            Refusal::V2(what) => f.write_str(what),
            Refusal::Peer { id, max_peers } => {
                write!(
                    f,
                    "this is peer {id} of a link for peers 0 to {}; is the region shared by too many?",
                    max_peers - 1
                )
            }
            Refusal::Unnumbered { name } => write!(
                f,
                "link {name:?} has no doorbell, and so no number for this peer: add ivshmem.{name}.id=N to the command line"
            ),
            Refusal::Number { key, value } => write!(f, "command line: {key}={value}: expected the number of a peer"),
        }
    }
}

/// The registers behind BAR0.
#[derive(Clone, Copy, Debug)]
enum Registers {
    V1(Mmio),
    V2(Mmio),
}

/// A device, ready for a protocol.
pub(crate) struct Device {
    registers: Registers,
    memory: ForeignMut<'static>,
    layout: Layout,
    own_id: u32,
    protocol: u32,
    name: String,
    mac: [u8; 6],
    mtu: u16,
    /// Whether the fabric offers offloads.
    offloads: bool,
    /// Vectors of each peer; 0 where no peer rings.
    vectors: u32,
    interrupt: Option<Interrupt>,
}

/// Which peer this one is. `position` is what the device says; `None` for a plain one, which cannot
/// say. Pure.
fn own_id(header: &Header, position: Option<u32>, told: Option<&str>) -> Result<u32, Refusal> {
    let name = || header.name.as_str().to_string();
    let id = match (position, told) {
        (Some(position), _) => position,
        (None, Some(text)) => text.parse().map_err(|_| Refusal::Number {
            key: format!("ivshmem.{}.id", header.name.as_str()),
            value: text.to_string(),
        })?,
        // The host is peer 0 of every network link.
        (None, None) if header.protocol == protocol::NETWORK => 1,
        (None, None) => return Err(Refusal::Unnumbered { name: name() }),
    };
    let max_peers = header.layout.max_peers;
    if id < max_peers { Ok(id) } else { Err(Refusal::Peer { id, max_peers }) }
}

impl Device {
    /// All devices of the machine; those that are refused are named on the console.
    pub(crate) fn find(platform: &Platform, pci: &mut Pci<'_>, config: &Config) -> Vec<Device> {
        let mut found = Vec::new();
        for f in pci.functions() {
            let device = match (f.vendor_id, f.device_id) {
                (V1_VENDOR, V1_DEVICE) => Device::v1(platform, pci, f, config),
                (v2::VENDOR, v2::DEVICE) => Device::v2(platform, pci, f),
                _ => continue,
            };
            match device {
                Ok(device) => {
                    if config.verbose {
                        crate::println!("tombolo-cell: ivshmem {f}: {device}");
                    }
                    found.push(device);
                }
                Err(refusal) => crate::println!("tombolo-cell: ivshmem {f} is not used: {refusal}"),
            }
        }
        found
    }

    /// Leads the device's vectors to an interrupt of the cell. `None` where it has fewer than peers
    /// ring of `vectors`, or no interrupt is left: then the cell looks by itself, and rings its
    /// peers all the same.
    fn enable_vectors(platform: &Platform, pci: &mut Pci<'_>, f: Function, vectors: u32) -> Option<Interrupt> {
        if vectors == 0 || pci.msix_vectors(f) < vectors.min(RUNG_VECTORS) {
            return None;
        }
        let interrupt = platform.interrupt()?;
        (pci.enable_msix(f, interrupt, MAX_VECTORS) > 0).then_some(interrupt)
    }

    fn v1(platform: &Platform, pci: &mut Pci<'_>, f: Function, config: &Config) -> Result<Device, Refusal> {
        let revision = pci.read(f, REVISION_CLASS) & 0xff;
        if revision < V1_REVISION {
            return Err(Refusal::Revision(revision));
        }
        let registers = pci
            .map_bar(f, REGISTERS_BAR)
            .filter(|window| window.len() >= V1_REGISTER_BYTES)
            .ok_or(Refusal::NoBar(REGISTERS_BAR))?;
        let bar = pci.bar(f, MEMORY_BAR).ok_or(Refusal::NoBar(MEMORY_BAR))?;
        let no_memory = || Refusal::NoBar(MEMORY_BAR);
        let page = platform.map_shared(bar.address, PAGE_BYTES.min(bar.bytes) as usize).ok_or_else(no_memory)?;
        let mut bytes = [0; PAGE_BYTES as usize];
        let len = page.as_foreign().read_into(&mut bytes);
        let header = Header::decode(&bytes[..len], bar.bytes).map_err(Refusal::Region)?;
        let (offset, bytes) = (header.layout.state_table_offset, 4 * u64::from(header.layout.max_peers));
        if offset < PAGE_BYTES {
            let part = Section::StateTable;
            return Err(Refusal::Region(RegionError::Section { part, offset, bytes, free_from: PAGE_BYTES }));
        }
        let memory = platform.map_shared(bar.address, header.layout.bytes() as usize).ok_or_else(no_memory)?;
        // Only a device with doorbell has vectors, and a number of its own; 0 in the register may
        // mean both.
        let has_doorbell = pci.msix_vectors(f) > 0;
        let position = has_doorbell.then(|| registers.read32(V1_POSITION));
        let own_id = own_id(&header, position, config.get(&format!("ivshmem.{}.id", header.name.as_str())))?;
        let vectors = if has_doorbell { header.vectors } else { 0 };
        let interrupt = Device::enable_vectors(platform, pci, f, vectors);
        Ok(Device {
            registers: Registers::V1(registers),
            memory,
            layout: header.layout,
            own_id,
            protocol: header.protocol,
            name: header.name.as_str().to_string(),
            mac: header.mac,
            mtu: header.mtu(),
            // Only to the guest, which is peer 1.
            offloads: header.offloads && own_id == 1,
            vectors,
            interrupt,
        })
    }

    fn v2(platform: &Platform, pci: &mut Pci<'_>, f: Function) -> Result<Device, Refusal> {
        let class_word = pci.read(f, REVISION_CLASS);
        let protocol = v2::protocol(class_word)
            .ok_or_else(|| Refusal::V2(format!("class {:#x}, expected 0xff", class_word >> 24)))?;
        let capabilities = pci.capabilities(f);
        let at = capabilities
            .iter()
            .find(|c| c.id == CAPABILITY_VENDOR)
            .ok_or_else(|| Refusal::V2("it has no vendor capability".to_string()))?
            .at;
        let mut bytes = [0; v2::CAPABILITY_BYTES];
        for (word, offset) in bytes.chunks_exact_mut(4).zip((0..).step_by(4)) {
            word.copy_from_slice(&pci.read(f, at + offset).to_le_bytes());
        }
        let capability = v2::Capability::parse(&bytes).map_err(|error| Refusal::V2(error.to_string()))?;
        let registers = pci
            .map_bar(f, REGISTERS_BAR)
            .filter(|window| window.len() >= v2::REGISTER_BYTES)
            .ok_or(Refusal::NoBar(REGISTERS_BAR))?;
        let max_peers = registers.read32(v2::MAX_PEERS);
        let state_bytes = u64::from(capability.state_table_bytes);
        let layout = Layout::v2(state_bytes, capability.rw_bytes, capability.output_bytes, max_peers);
        let no_memory = || Refusal::NoBar(MEMORY_BAR);
        let (address, bytes) = match capability.address {
            Some(address) => (address, layout.bytes()),
            None => pci.bar(f, MEMORY_BAR).map(|bar| (bar.address, bar.bytes)).ok_or_else(no_memory)?,
        };
        layout.check(bytes).map_err(Refusal::Region)?;
        let memory = platform.map_shared(address, layout.bytes() as usize).ok_or_else(no_memory)?;
        let own_id = registers.read32(v2::ID);
        if own_id >= max_peers {
            return Err(Refusal::Peer { id: own_id, max_peers });
        }
        let vectors = pci.msix_vectors(f);
        let interrupt = Device::enable_vectors(platform, pci, f, vectors);
        if interrupt.is_some() {
            registers.write32(v2::INT_CONTROL, v2::INT_ENABLE);
        }
        let name = f.to_string();
        Ok(Device {
            registers: Registers::V2(registers),
            memory,
            layout,
            own_id,
            protocol,
            name,
            mac: [0; 6],
            mtu: V2_MTU,
            offloads: false,
            vectors,
            interrupt,
        })
    }

    /// The link's name: of its header, or the device's place on the bus where it has none.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn protocol(&self) -> u32 {
        self.protocol
    }

    pub(crate) fn own_id(&self) -> u32 {
        self.own_id
    }

    /// How many peers there can be.
    pub(crate) fn max_peers(&self) -> u32 {
        self.layout.max_peers
    }

    /// The address that the link asks for; zero where it does not care.
    pub(crate) fn mac(&self) -> [u8; 6] {
        self.mac
    }

    pub(crate) fn mtu(&self) -> u16 {
        self.mtu
    }

    /// Whether the other end of a network link offers offloads.
    pub(crate) fn offloads(&self) -> bool {
        self.offloads
    }

    /// How often peers have rung; `None` where none can.
    pub(crate) fn rings(&self) -> Option<u64> {
        self.interrupt.map(|interrupt| interrupt.count())
    }

    /// The output section that this peer writes.
    pub(crate) fn own_output(&self) -> ForeignMut<'static> {
        self.output_mut(self.own_id).expect("own_id < max_peers, and the layout is checked and mapped")
    }

    /// The output section of `peer`, to be read; `None` where there can be no such peer.
    pub(crate) fn output(&self, peer: u32) -> Option<Foreign<'static>> {
        self.output_mut(peer).map(|section| section.as_foreign())
    }

    fn output_mut(&self, peer: u32) -> Option<ForeignMut<'static>> {
        let range = self.layout.output(peer)?;
        self.memory.slice(range.start, range.len())
    }

    /// The section that all peers write; empty where there is none.
    pub(crate) fn shared(&self) -> ForeignMut<'static> {
        self.memory.skip(self.layout.rw_offset as usize).take(self.layout.rw_bytes as usize)
    }

    /// The state word of `peer`; 0 where there can be no such peer.
    pub(crate) fn state(&self, peer: u32) -> u32 {
        // Acquire: what the peer wrote before its state is seen with it.
        let word = |offset| self.memory.as_foreign().load_u32(offset, Ordering::Acquire);
        self.layout.state(peer).and_then(word).unwrap_or(0)
    }

    /// Writes the own state word once more, where peers can write it too (v1) and one may have.
    pub(crate) fn assert_state(&self, value: u32) {
        if let (Registers::V1(_), Some(offset)) = (self.registers, self.layout.state(self.own_id)) {
            // Release: what was written before (a cleared section) is seen with it. Cannot fail:
            // the table is mapped.
            let _ = self.memory.store_u32(offset, value, Ordering::Release);
        }
    }

    /// Writes the own state word and tells all peers.
    pub(crate) fn set_state(&self, value: u32) {
        match self.registers {
            Registers::V1(_) => {
                self.assert_state(value);
                for peer in (0..self.layout.max_peers).filter(|peer| *peer != self.own_id) {
                    self.ring(peer, VECTOR_STATE);
                }
            }
            // The device writes the table, and rings if the state is another one.
            Registers::V2(registers) => registers.write32(v2::STATE, value),
        }
    }

    /// Rings `vector` of `peer`; one that is not there hears nothing.
    pub(crate) fn ring(&self, peer: u32, vector: u16) {
        if self.vectors == 0 {
            return;
        }
        // All that was written before is in memory before the peer hears of it.
        core::sync::atomic::fence(Ordering::SeqCst);
        let value = peer << 16 | u32::from(vector);
        match self.registers {
            Registers::V1(registers) => registers.write32(V1_DOORBELL, value),
            Registers::V2(registers) => registers.write32(v2::DOORBELL, value),
        }
    }

    /// Tells `peer` of frames or records.
    pub(crate) fn ring_traffic(&self, peer: u32) {
        self.ring(peer, vector_traffic(self.vectors));
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.registers {
            Registers::V1(_) => "v1",
            Registers::V2(_) => "v2",
        };
        write!(
            f,
            "{kind}, link {:?}, protocol {:#06x}, peer {} of {}, outputs of {} KiB, ",
            self.name,
            self.protocol,
            self.own_id,
            self.layout.max_peers,
            self.layout.output_bytes >> 10
        )?;
        match (self.vectors, self.interrupt) {
            (0, _) => f.write_str("no doorbell: polled"),
            (vectors, Some(_)) => write!(f, "{vectors} vectors"),
            (vectors, None) => write!(f, "{vectors} vectors, but no interrupt for them here: polled"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_ring::ivshmem::region::Name;

    fn header(protocol: u32) -> Header {
        let mut header = Header::network(Name::new("control").unwrap(), 2);
        header.protocol = protocol;
        header
    }

    #[test]
    fn a_device_with_doorbell_says_its_number_and_the_command_line_is_not_asked() {
        assert_eq!(own_id(&header(protocol::CHANNEL), Some(0), Some("1")), Ok(0));
        assert_eq!(own_id(&header(protocol::CHANNEL), Some(1), None), Ok(1));
        let refused = own_id(&header(protocol::CHANNEL), Some(2), None).unwrap_err();
        assert_eq!(refused, Refusal::Peer { id: 2, max_peers: 2 });
    }

    #[test]
    fn a_plain_device_is_the_guest_of_a_network_link_and_is_told_its_number_elsewhere() {
        assert_eq!(own_id(&header(protocol::NETWORK), None, None), Ok(1));
        assert_eq!(own_id(&header(protocol::NETWORK), None, Some("0")), Ok(0));
        assert_eq!(own_id(&header(protocol::CHANNEL), None, Some("1")), Ok(1));
        let refused = own_id(&header(protocol::CHANNEL), None, None).unwrap_err();
        assert!(refused.to_string().contains("ivshmem.control.id=N"), "{refused}");
        for text in ["", "-1", "x", "0x1"] {
            let refused = own_id(&header(protocol::CHANNEL), None, Some(text)).unwrap_err();
            assert!(refused.to_string().starts_with("command line: ivshmem.control.id="), "{refused}");
        }
        let refused = own_id(&header(protocol::CHANNEL), None, Some("2")).unwrap_err();
        assert_eq!(refused, Refusal::Peer { id: 2, max_peers: 2 });
    }
}
