//! Virtio over PCI (VirtIO 1.3 §4.1), modern devices, interrupts by MSI-X.

use super::Transport;
use crate::machine::mmio::Mmio;
use crate::machine::{Interrupt, Platform};
use crate::pci::{Capability, Function, Pci};
use alloc::vec::Vec;
use core::cell::Cell;
use tombolo_ring::virtio::Layout;

const VENDOR: u16 = 0x1af4;
/// A modern device's number is this plus virtio's number for its kind; the ones for network devices
/// that can also be spoken to in the old way begin at 0x1000.
const MODERN_DEVICE: u16 = 0x1040;
const TRANSITIONAL_NET: u16 = 0x1000;

const CAPABILITY_VENDOR: u8 = 0x09;
const CONFIG_COMMON: u8 = 1;
const CONFIG_NOTIFY: u8 = 2;
const CONFIG_DEVICE: u8 = 4;

const DEVICE_FEATURE_SELECT: usize = 0;
const DEVICE_FEATURE: usize = 4;
const DRIVER_FEATURE_SELECT: usize = 8;
const DRIVER_FEATURE: usize = 12;
const CONFIG_MSIX_VECTOR: usize = 16;
const DEVICE_STATUS: usize = 20;
const QUEUE_SELECT: usize = 22;
const QUEUE_SIZE: usize = 24;
const QUEUE_MSIX_VECTOR: usize = 26;
const QUEUE_ENABLE: usize = 28;
const QUEUE_NOTIFY_OFFSET: usize = 30;
const QUEUE_DESCRIPTORS: usize = 32;
const QUEUE_DRIVER: usize = 40;
const QUEUE_DEVICE: usize = 48;
const COMMON_BYTES: usize = 56;

const NO_VECTOR: u16 = 0xffff;

/// As many queues as are ever set up: receive and transmit.
const QUEUES: usize = 2;

/// A device over PCI.
pub(crate) struct PciTransport {
    common: Mmio,
    notify: Mmio,
    notify_multiplier: u32,
    /// Offset of each queue's register in `notify`, read when the queue was set up.
    notify_offsets: Cell<[usize; QUEUES]>,
    device: Option<Mmio>,
    interrupt: Option<Interrupt>,
}

impl PciTransport {
    /// The devices of kind `device_id` (VirtIO 1.3 §5), `most` at most.
    pub(crate) fn find(platform: &Platform, pci: &mut Pci<'_>, device_id: u32, most: usize) -> Vec<PciTransport> {
        let wanted = [MODERN_DEVICE + device_id as u16, TRANSITIONAL_NET + device_id as u16 - 1];
        let functions = pci.functions();
        let fitting = functions.into_iter().filter(|f| f.vendor_id == VENDOR && wanted.contains(&f.device_id));
        fitting.filter_map(|f| PciTransport::new(platform, pci, f)).take(most).collect()
    }

    fn new(platform: &Platform, pci: &mut Pci<'_>, f: Function) -> Option<PciTransport> {
        let capabilities = pci.capabilities(f);
        let mut window = |kind: u8| -> Option<(Capability, Mmio)> {
            capabilities.iter().filter(|c| c.id == CAPABILITY_VENDOR).find_map(|c| {
                if pci.read8(f, c.at + 3) != kind {
                    return None;
                }
                let bar = pci.read8(f, c.at + 4);
                let (offset, len) = (pci.read(f, c.at + 8), pci.read(f, c.at + 12));
                Some((*c, pci.map_bar(f, bar)?.slice(offset as usize, len as usize)?))
            })
        };
        let (_, common) = window(CONFIG_COMMON).filter(|(_, w)| w.len() >= COMMON_BYTES)?;
        let (notify_capability, notify) = window(CONFIG_NOTIFY)?;
        let device = window(CONFIG_DEVICE).map(|(_, w)| w);
        let notify_multiplier = pci.read(f, notify_capability.at + 16);
        let interrupt = platform.interrupt().filter(|interrupt| pci.enable_msix(f, *interrupt, 1) > 0);
        Some(PciTransport {
            common,
            notify,
            notify_multiplier,
            notify_offsets: Cell::new([0; QUEUES]),
            device,
            interrupt,
        })
    }

    fn write64(&self, at: usize, value: u64) {
        self.common.write32(at, value as u32);
        self.common.write32(at + 4, (value >> 32) as u32);
    }
}

impl Transport for PciTransport {
    fn name(&self) -> &'static str {
        if self.interrupt.is_some() { "virtio-pci" } else { "virtio-pci without MSI-X, looked at every millisecond" }
    }

    fn features(&self) -> u64 {
        let half = |select| {
            self.common.write32(DEVICE_FEATURE_SELECT, select);
            u64::from(self.common.read32(DEVICE_FEATURE))
        };
        half(0) | half(1) << 32
    }

    fn set_features(&self, features: u64) {
        for select in 0..2 {
            self.common.write32(DRIVER_FEATURE_SELECT, select);
            self.common.write32(DRIVER_FEATURE, (features >> (32 * select)) as u32);
        }
    }

    fn is_legacy(&self) -> bool {
        false
    }

    fn status(&self) -> u8 {
        self.common.read8(DEVICE_STATUS)
    }

    fn set_status(&self, status: u8) {
        self.common.write8(DEVICE_STATUS, status);
    }

    fn queue_max(&self, queue: u16) -> u16 {
        self.common.write16(QUEUE_SELECT, queue);
        self.common.read16(QUEUE_SIZE)
    }

    fn set_queue(&self, queue: u16, size: u16, address: u64) {
        self.common.write16(CONFIG_MSIX_VECTOR, NO_VECTOR);
        self.common.write16(QUEUE_SELECT, queue);
        self.common.write16(QUEUE_SIZE, size);
        self.common.write16(QUEUE_MSIX_VECTOR, if self.interrupt.is_some() { 0 } else { NO_VECTOR });
        let layout = Layout::new(size);
        self.write64(QUEUE_DESCRIPTORS, address + layout.descriptors as u64);
        self.write64(QUEUE_DRIVER, address + layout.available as u64);
        self.write64(QUEUE_DEVICE, address + layout.used as u64);
        self.common.write16(QUEUE_ENABLE, 1);
        let mut offsets = self.notify_offsets.get();
        let offset = usize::from(self.common.read16(QUEUE_NOTIFY_OFFSET)) * self.notify_multiplier as usize;
        offsets[usize::from(queue)] = offset;
        self.notify_offsets.set(offsets);
    }

    fn notify(&self, queue: u16) {
        self.notify.write16(self.notify_offsets.get()[usize::from(queue)], queue);
    }

    fn config(&self, offset: usize) -> u8 {
        self.device.and_then(|window| window.slice(offset, 1)).map_or(0, |byte| byte.read8(0))
    }

    fn acknowledge(&self) {}

    fn interrupt(&self) -> Option<Interrupt> {
        self.interrupt
    }
}
