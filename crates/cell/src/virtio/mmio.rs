//! Virtio over MMIO (VirtIO 1.3 §4.2), both register layouts: QEMU 7.2's microvm still begins with
//! the old one.

use super::Transport;
use crate::config::{MmioDevice, mmio_devices};
use crate::machine::mmio::Mmio;
use crate::machine::{Interrupt, Platform};
use alloc::vec::Vec;
use tombolo_ring::virtio::Layout;

const MAGIC: usize = 0x00;
const VERSION: usize = 0x04;
const DEVICE_ID: usize = 0x08;
const DEVICE_FEATURES: usize = 0x10;
const DEVICE_FEATURES_SELECT: usize = 0x14;
const DRIVER_FEATURES: usize = 0x20;
const DRIVER_FEATURES_SELECT: usize = 0x24;
const LEGACY_PAGE_SIZE: usize = 0x28;
const QUEUE_SELECT: usize = 0x30;
const QUEUE_SIZE_MAX: usize = 0x34;
const QUEUE_SIZE: usize = 0x38;
const LEGACY_QUEUE_ALIGN: usize = 0x3c;
const LEGACY_QUEUE_PAGE: usize = 0x40;
const QUEUE_READY: usize = 0x44;
const QUEUE_NOTIFY: usize = 0x50;
const INTERRUPT_STATUS: usize = 0x60;
const INTERRUPT_ACK: usize = 0x64;
const STATUS: usize = 0x70;
const QUEUE_DESCRIPTORS: usize = 0x80;
const QUEUE_DRIVER: usize = 0x90;
const QUEUE_DEVICE: usize = 0xa0;
const CONFIG: usize = 0x100;

const MAGIC_VALUE: u32 = 0x7472_6976;
const PAGE_BYTES: u64 = 4096;
/// The alignment of the used ring in [`Layout`], which an old device must be told.
const USED_ALIGN: u32 = 128;

/// Where QEMU's microvm has its devices, if the command line does not say.
const MICROVM_FIRST: u64 = 0xfeb0_0000;
const MICROVM_STEP: u64 = 512;
const MICROVM_DEVICES: u32 = 24;
/// Their first interrupt: with one I/O APIC, and with two.
const MICROVM_FIRST_GSI: [u32; 2] = [5, 24];

/// A device over MMIO.
pub(crate) struct MmioTransport {
    registers: Mmio,
    legacy: bool,
    interrupt: Option<Interrupt>,
}

/// The devices of the command line; if it has none, those that microvm has in its places.
fn candidates(platform: &Platform, command_line: &str, with_scan: bool) -> Vec<MmioDevice> {
    let mut devices = mmio_devices(command_line);
    if devices.is_empty() && with_scan {
        let first_gsi = MICROVM_FIRST_GSI[usize::from(platform.io_apic_count() > 1)];
        devices.extend((0..MICROVM_DEVICES).map(|index| MmioDevice {
            address: MICROVM_FIRST + u64::from(index) * MICROVM_STEP,
            bytes: MICROVM_STEP,
            gsi: first_gsi + index,
        }));
    }
    devices
}

impl MmioTransport {
    /// The devices of kind `device_id`, `most` at most. `with_scan`: look in microvm's places if
    /// the command line names none.
    pub(crate) fn find(
        platform: &Platform,
        line: &str,
        with_scan: bool,
        device_id: u32,
        most: usize,
    ) -> Vec<MmioTransport> {
        let found = candidates(platform, line, with_scan).into_iter().filter_map(|device| {
            let registers = platform.map_device(device.address, usize::try_from(device.bytes).ok()?)?;
            if registers.len() < CONFIG || registers.read32(MAGIC) != MAGIC_VALUE {
                return None;
            }
            let version = registers.read32(VERSION);
            if !(1..=2).contains(&version) || registers.read32(DEVICE_ID) != device_id {
                return None;
            }
            let interrupt = platform.interrupt().filter(|interrupt| platform.route(device.gsi, *interrupt));
            Some(MmioTransport { registers, legacy: version == 1, interrupt })
        });
        found.take(most).collect()
    }

    fn write64(&self, at: usize, value: u64) {
        self.registers.write32(at, value as u32);
        self.registers.write32(at + 4, (value >> 32) as u32);
    }
}

impl Transport for MmioTransport {
    fn name(&self) -> &'static str {
        if self.legacy { "virtio-mmio (legacy)" } else { "virtio-mmio" }
    }

    fn features(&self) -> u64 {
        let half = |select| {
            self.registers.write32(DEVICE_FEATURES_SELECT, select);
            u64::from(self.registers.read32(DEVICE_FEATURES))
        };
        half(0) | if self.legacy { 0 } else { half(1) << 32 }
    }

    fn set_features(&self, features: u64) {
        for select in 0..if self.legacy { 1 } else { 2 } {
            self.registers.write32(DRIVER_FEATURES_SELECT, select);
            self.registers.write32(DRIVER_FEATURES, (features >> (32 * select)) as u32);
        }
        if self.legacy {
            self.registers.write32(LEGACY_PAGE_SIZE, PAGE_BYTES as u32);
        }
    }

    fn is_legacy(&self) -> bool {
        self.legacy
    }

    fn status(&self) -> u8 {
        self.registers.read32(STATUS) as u8
    }

    fn set_status(&self, status: u8) {
        self.registers.write32(STATUS, u32::from(status));
    }

    fn queue_max(&self, queue: u16) -> u16 {
        self.registers.write32(QUEUE_SELECT, u32::from(queue));
        self.registers.read32(QUEUE_SIZE_MAX).min(u32::from(u16::MAX)) as u16
    }

    fn set_queue(&self, queue: u16, size: u16, address: u64) {
        self.registers.write32(QUEUE_SELECT, u32::from(queue));
        self.registers.write32(QUEUE_SIZE, u32::from(size));
        if self.legacy {
            self.registers.write32(LEGACY_QUEUE_ALIGN, USED_ALIGN);
            self.registers.write32(LEGACY_QUEUE_PAGE, (address / PAGE_BYTES) as u32);
            return;
        }
        let layout = Layout::new(size);
        self.write64(QUEUE_DESCRIPTORS, address + layout.descriptors as u64);
        self.write64(QUEUE_DRIVER, address + layout.available as u64);
        self.write64(QUEUE_DEVICE, address + layout.used as u64);
        self.registers.write32(QUEUE_READY, 1);
    }

    fn notify(&self, queue: u16) {
        self.registers.write32(QUEUE_NOTIFY, u32::from(queue));
    }

    fn config(&self, offset: usize) -> u8 {
        self.registers.slice(CONFIG + offset, 1).map_or(0, |byte| byte.read8(0))
    }

    fn acknowledge(&self) {
        let status = self.registers.read32(INTERRUPT_STATUS);
        if status != 0 {
            self.registers.write32(INTERRUPT_ACK, status);
        }
    }

    fn interrupt(&self) -> Option<Interrupt> {
        self.interrupt
    }
}
