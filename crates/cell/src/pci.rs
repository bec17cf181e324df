//! PCI: configuration space by ECAM or by ports, capabilities, base addresses, MSI-X.

use crate::acpi::Ecam;
use crate::machine::mmio::Mmio;
use crate::machine::{Interrupt, Platform, cpu};
use alloc::vec::Vec;

const CONFIG_ADDRESS: u16 = 0xcf8;
const CONFIG_DATA: u16 = 0xcfc;
const CONFIG_ENABLE: u32 = 1 << 31;
const BUS_BYTES: usize = 1 << 20;

const VENDOR_DEVICE: u16 = 0x00;
const COMMAND_STATUS: u16 = 0x04;
const HEADER_TYPE: u16 = 0x0c;
const FIRST_BAR: u16 = 0x10;
const BRIDGE_BUSES: u16 = 0x18;
const CAPABILITIES: u16 = 0x34;

const COMMAND_MEMORY: u32 = 1 << 1;
const COMMAND_BUS_MASTER: u32 = 1 << 2;
const COMMAND_NO_INTX: u32 = 1 << 10;
const STATUS_CAPABILITIES: u32 = 1 << 20;

const CAPABILITY_MSIX: u8 = 0x11;
const MSIX_ENABLE: u32 = 1 << 31;
const MSIX_MASK_ALL: u32 = 1 << 30;

/// Where base addresses are put if the firmware left them out: free on QEMU's microvm and q35, whose firmware
/// (qboot) does so. `pcimem=` of the command line names another place.
const DEFAULT_WINDOW: u64 = 0xc000_0000;

/// QEMU's microvm says where its configuration space is in AML only: here, behind this host bridge (1b36:0008).
const MICROVM_ECAM: Ecam = Ecam { base: 0xe000_0000, first_bus: 0, last_bus: 255 };
const MICROVM_HOST_BRIDGE: u32 = 0x0008_1b36;

enum Access {
    Ports,
    Memory(Ecam),
}

/// The way to PCI's configuration space, with the window for base addresses that nobody has set.
pub(crate) struct Pci<'p> {
    platform: &'p Platform,
    access: Access,
    buses: Vec<(u8, Mmio)>,
    window: u64,
}

/// Bus, device and function of one PCI function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Function {
    pub(crate) bus: u8,
    pub(crate) device: u8,
    pub(crate) function: u8,
    pub(crate) vendor_id: u16,
    pub(crate) device_id: u16,
}

/// A capability: its place in configuration space and its identity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capability {
    pub(crate) at: u16,
    pub(crate) id: u8,
}

impl<'p> Pci<'p> {
    /// Finds configuration space; `None` where there is none.
    pub(crate) fn find(platform: &'p Platform, ecam: Option<Ecam>, window: Option<u64>) -> Option<Pci<'p>> {
        let access = match ecam {
            Some(ecam) => Access::Memory(ecam),
            None => {
                cpu::out32(CONFIG_ADDRESS, CONFIG_ENABLE);
                if cpu::in32(CONFIG_ADDRESS) == CONFIG_ENABLE {
                    Access::Ports
                } else {
                    let bridge = platform.map_device(MICROVM_ECAM.base, BUS_BYTES)?;
                    (bridge.read32(0) == MICROVM_HOST_BRIDGE).then_some(Access::Memory(MICROVM_ECAM))?
                }
            }
        };
        Some(Pci { platform, access, buses: Vec::new(), window: window.unwrap_or(DEFAULT_WINDOW) })
    }

    /// The part of memory-mapped configuration space that is `bus`'s.
    fn bus(&mut self, bus: u8) -> Option<Mmio> {
        let Access::Memory(ecam) = &self.access else { return None };
        if let Some((_, window)) = self.buses.iter().find(|(b, _)| *b == bus) {
            return Some(*window);
        }
        if !(ecam.first_bus..=ecam.last_bus).contains(&bus) {
            return None;
        }
        let window = self.platform.map_device(ecam.base + u64::from(bus) * BUS_BYTES as u64, BUS_BYTES)?;
        self.buses.push((bus, window));
        Some(window)
    }

    fn select(&self, f: Function, at: u16) {
        let address = u32::from(f.bus) << 16 | u32::from(f.device) << 11 | u32::from(f.function) << 8;
        cpu::out32(CONFIG_ADDRESS, CONFIG_ENABLE | address | u32::from(at & 0xfc));
    }

    fn offset(f: Function, at: u16) -> usize {
        usize::from(f.device) << 15 | usize::from(f.function) << 12 | usize::from(at & 0xffc)
    }

    /// The word at `at`, a multiple of 4.
    pub(crate) fn read(&mut self, f: Function, at: u16) -> u32 {
        if matches!(self.access, Access::Ports) {
            self.select(f, at);
            return cpu::in32(CONFIG_DATA);
        }
        self.bus(f.bus).map_or(u32::MAX, |window| window.read32(Self::offset(f, at)))
    }

    /// Writes the word at `at`, a multiple of 4.
    pub(crate) fn write(&mut self, f: Function, at: u16, value: u32) {
        if matches!(self.access, Access::Ports) {
            self.select(f, at);
            cpu::out32(CONFIG_DATA, value);
        } else if let Some(window) = self.bus(f.bus) {
            window.write32(Self::offset(f, at), value);
        }
    }

    /// The byte at `at`.
    pub(crate) fn read8(&mut self, f: Function, at: u16) -> u8 {
        (self.read(f, at & !3) >> (8 * (at & 3))) as u8
    }

    /// All functions, those behind bridges too.
    pub(crate) fn functions(&mut self) -> Vec<Function> {
        let first = match &self.access {
            Access::Memory(ecam) => ecam.first_bus,
            Access::Ports => 0,
        };
        let mut found = Vec::new();
        let mut buses = alloc::vec![first];
        let mut next = 0;
        while let Some(bus) = buses.get(next).copied() {
            next += 1;
            for device in 0..32 {
                let mut functions = 1;
                let mut function = 0;
                while function < functions {
                    let mut f = Function { bus, device, function, vendor_id: 0, device_id: 0 };
                    let identity = self.read(f, VENDOR_DEVICE);
                    if identity as u16 != 0xffff {
                        (f.vendor_id, f.device_id) = (identity as u16, (identity >> 16) as u16);
                        let header = (self.read(f, HEADER_TYPE) >> 16) as u8;
                        if header & 0x80 != 0 && function == 0 {
                            functions = 8;
                        }
                        if header & 0x7f == 1 {
                            let behind = (self.read(f, BRIDGE_BUSES) >> 8) as u8;
                            if behind != 0 && !buses.contains(&behind) {
                                buses.push(behind);
                            }
                        }
                        found.push(f);
                    }
                    function += 1;
                }
            }
        }
        found
    }

    /// The capabilities of a function.
    pub(crate) fn capabilities(&mut self, f: Function) -> Vec<Capability> {
        let mut found = Vec::new();
        if self.read(f, COMMAND_STATUS) & STATUS_CAPABILITIES == 0 {
            return found;
        }
        let mut at = u16::from(self.read8(f, CAPABILITIES) & 0xfc);
        // 48: as many as fit into the 192 bytes behind the header; a list with a loop ends there.
        while at >= 0x40 && found.len() < 48 {
            let head = self.read(f, at);
            found.push(Capability { at, id: head as u8 });
            at = (head >> 8 & 0xfc) as u16;
        }
        found
    }

    /// Maps base address `bar`, giving it one first where the firmware gave none; `None` for an I/O port or an
    /// address beyond reach.
    pub(crate) fn map_bar(&mut self, f: Function, bar: u8) -> Option<Mmio> {
        if bar > 5 {
            return None;
        }
        let at = FIRST_BAR + 4 * u16::from(bar);
        let low = self.read(f, at);
        if low & 1 != 0 {
            return None;
        }
        let wide = low & 6 == 4 && bar < 5;
        let command = self.read(f, COMMAND_STATUS) & 0xffff;
        // Its size: the bits that stay 0 when 1 is written. Not while it decodes accesses.
        self.write(f, COMMAND_STATUS, command & !COMMAND_MEMORY);
        self.write(f, at, u32::MAX);
        let mask = self.read(f, at) & !0xf;
        self.write(f, at, low);
        let size = u64::from(!mask) + 1;
        if mask == 0 {
            self.write(f, COMMAND_STATUS, command);
            return None;
        }
        let high = if wide { self.read(f, at + 4) } else { 0 };
        let mut address = u64::from(high) << 32 | u64::from(low & !0xf);
        if address == 0 {
            address = self.window.next_multiple_of(size);
            self.window = address + size;
            self.write(f, at, address as u32);
            if wide {
                self.write(f, at + 4, (address >> 32) as u32);
            }
        }
        self.write(f, COMMAND_STATUS, command | COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_NO_INTX);
        self.platform.map_device(address, usize::try_from(size).ok()?)
    }

    /// Leads entry 0 of the function's MSI-X table to `interrupt`; false where it has no such table.
    pub(crate) fn enable_msix(&mut self, f: Function, interrupt: Interrupt) -> bool {
        let Some(capability) = self.capabilities(f).into_iter().find(|c| c.id == CAPABILITY_MSIX) else { return false };
        let control = self.read(f, capability.at);
        let place = self.read(f, capability.at + 4);
        let Some(table) = self.map_bar(f, (place & 7) as u8) else { return false };
        let Some(entry) = table.slice((place & !7) as usize, 16) else { return false };
        self.write(f, capability.at, control | MSIX_ENABLE | MSIX_MASK_ALL);
        let (address, data) = interrupt.message(self.platform);
        for (offset, word) in [(0, address as u32), (4, (address >> 32) as u32), (8, data), (12, 0)] {
            entry.write32(offset, word);
        }
        self.write(f, capability.at, (control | MSIX_ENABLE) & !MSIX_MASK_ALL);
        true
    }
}
