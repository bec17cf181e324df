//! PCI: configuration space by ECAM or by ports, capabilities, base addresses, MSI-X.

use crate::acpi::Ecam;
use crate::machine::mmio::Mmio;
use crate::machine::{Interrupt, Platform, cpu};
use alloc::vec::Vec;
use core::fmt;

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
/// Of the control word's upper half: entries, less one.
const MSIX_TABLE_SIZE: u32 = 0x7ff;

/// Where base addresses are put if the firmware left them out: free on QEMU's microvm and q35,
/// whose firmware (qboot) does so. `pcimem=` of the command line names another place.
const DEFAULT_WINDOW: u64 = 0xc000_0000;
/// The window ends at the next multiple of its size: behind it lies microvm's configuration space.
const WINDOW_BYTES: u64 = 512 << 20;
/// Larger 64-bit base addresses go to the top quarter of what the processor can address. There
/// microvm's host bridge has its second window, and q35 decodes everything that is not memory.
const LARGE_BYTES: u64 = 64 << 20;

/// QEMU's microvm says where its configuration space is in AML only: here, behind this host bridge
/// (1b36:0008).
const MICROVM_ECAM: Ecam = Ecam { base: 0xe000_0000, first_bus: 0, last_bus: 255 };
const MICROVM_HOST_BRIDGE: u32 = 0x0008_1b36;

enum Access {
    Ports,
    Memory(Ecam),
}

/// The way to PCI's configuration space, with the window for base addresses that the firmware has
/// not set.
pub(crate) struct Pci<'p> {
    platform: &'p Platform,
    access: Access,
    buses: Vec<(u8, Mmio)>,
    window: u64,
    window_end: u64,
    high_window: u64,
    /// All functions, once they were looked for.
    functions: Option<Vec<Function>>,
}

/// What a base address register says: memory of `bytes` at `address`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bar {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
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

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}:{:02x}.{}", self.bus, self.device, self.function)
    }
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
        let window = window.unwrap_or(DEFAULT_WINDOW);
        let window_end = (window + 1).next_multiple_of(WINDOW_BYTES);
        let high_window = 3 << (cpu::physical_address_bits() - 2);
        Some(Pci { platform, access, buses: Vec::new(), window, window_end, high_window, functions: None })
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
        if self.functions.is_none() {
            self.functions = Some(self.find_functions());
        }
        self.functions.clone().unwrap_or_default()
    }

    fn find_functions(&mut self) -> Vec<Function> {
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

    /// Base address `bar`, given to the function first where the firmware gave none, with memory
    /// decoding and bus mastering on; `None` for an I/O port, a register that is not there, or one
    /// for which no window has room.
    pub(crate) fn bar(&mut self, f: Function, bar: u8) -> Option<Bar> {
        if bar > 5 {
            return None;
        }
        let at = FIRST_BAR + 4 * u16::from(bar);
        let low = self.read(f, at);
        if low & 1 != 0 {
            return None;
        }
        let is_wide = low & 6 == 4 && bar < 5;
        let high = if is_wide { self.read(f, at + 4) } else { 0 };
        let command = self.read(f, COMMAND_STATUS) & 0xffff;
        // Its size: the bits that stay 0 when 1 is written. Not while it decodes accesses.
        self.write(f, COMMAND_STATUS, command & !COMMAND_MEMORY);
        let mut probe = |at: u16, value: u32| {
            self.write(f, at, u32::MAX);
            let mask = self.read(f, at);
            self.write(f, at, value);
            mask
        };
        let low_mask = probe(at, low) & !0xf;
        let high_mask = if is_wide { probe(at + 4, high) } else { u32::MAX };
        let bytes = (!(u64::from(high_mask) << 32 | u64::from(low_mask))).wrapping_add(1);
        let mut address = u64::from(high) << 32 | u64::from(low & !0xf);
        // A register that is not there has no bit that can be set.
        let mut found = bytes.is_power_of_two() && (is_wide || bytes < 1 << 32);
        if found && address == 0 {
            match self.place(bytes, is_wide) {
                Some(place) => {
                    address = place;
                    self.write(f, at, address as u32);
                    if is_wide {
                        self.write(f, at + 4, (address >> 32) as u32);
                    }
                }
                None => found = false,
            }
        }
        let on = COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_NO_INTX;
        self.write(f, COMMAND_STATUS, if found { command | on } else { command });
        found.then_some(Bar { address, bytes })
    }

    /// A free place for a base address of `bytes`.
    fn place(&mut self, bytes: u64, is_wide: bool) -> Option<u64> {
        let low = self.window.next_multiple_of(bytes);
        if !(is_wide && bytes > LARGE_BYTES) && low.checked_add(bytes)? <= self.window_end {
            self.window = low + bytes;
            return Some(low);
        }
        let high = self.high_window.next_multiple_of(bytes);
        is_wide.then(|| {
            self.high_window = high + bytes;
            high
        })
    }

    /// Maps the registers behind base address `bar`; `None` where there are none or they lie beyond
    /// reach.
    pub(crate) fn map_bar(&mut self, f: Function, bar: u8) -> Option<Mmio> {
        let bar = self.bar(f, bar)?;
        self.platform.map_device(bar.address, usize::try_from(bar.bytes).ok()?)
    }

    pub(crate) fn msix_vectors(&mut self, f: Function) -> u32 {
        let capability = self.capabilities(f).into_iter().find(|c| c.id == CAPABILITY_MSIX);
        capability.map_or(0, |c| (self.read(f, c.at) >> 16 & MSIX_TABLE_SIZE) + 1)
    }

    /// Leads all entries of the function's MSI-X table to `interrupt`, at most `limit`; returns how
    /// many entries there are, 0 where it has no such table.
    pub(crate) fn enable_msix(&mut self, f: Function, interrupt: Interrupt, limit: u16) -> u16 {
        let capabilities = self.capabilities(f);
        let Some(capability) = capabilities.into_iter().find(|c| c.id == CAPABILITY_MSIX) else { return 0 };
        let control = self.read(f, capability.at);
        let place = self.read(f, capability.at + 4);
        let entries = ((control >> 16 & MSIX_TABLE_SIZE) as u16 + 1).min(limit);
        let Some(table) = self.map_bar(f, (place & 7) as u8) else { return 0 };
        let Some(table) = table.slice((place & !7) as usize, 16 * usize::from(entries)) else { return 0 };
        self.write(f, capability.at, control | MSIX_ENABLE | MSIX_MASK_ALL);
        let (address, data) = interrupt.message(self.platform);
        for entry in 0..usize::from(entries) {
            for (offset, word) in [(0, address as u32), (4, (address >> 32) as u32), (8, data), (12, 0)] {
                table.write32(16 * entry + offset, word);
            }
        }
        self.write(f, capability.at, (control | MSIX_ENABLE) & !MSIX_MASK_ALL);
        entries
    }
}
