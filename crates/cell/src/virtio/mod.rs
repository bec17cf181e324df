//! Virtio devices: how they are found and talked to (PCI, MMIO), and the network device.

pub(crate) mod mmio;
pub(crate) mod net;
pub(crate) mod offload;
pub(crate) mod pci;

use crate::machine::Interrupt;
use tombolo_ring::virtio::features::VERSION_1;

/// Virtio's number for a network device.
pub(crate) const DEVICE_NET: u32 = 1;

const STATUS_ACKNOWLEDGE: u8 = 1;
const STATUS_DRIVER: u8 = 2;
const STATUS_DRIVER_OK: u8 = 4;
const STATUS_FEATURES_OK: u8 = 8;
const STATUS_FAILED: u8 = 128;

/// A device's registers (VirtIO 1.3 §4.1, §4.2).
pub(crate) trait Transport {
    /// What it is, for the log.
    fn name(&self) -> &'static str;
    /// The features that the device offers.
    fn features(&self) -> u64;
    /// Writes the features that were chosen.
    fn set_features(&self, features: u64);
    /// Whether the device has the layout of before VirtIO 1.0.
    fn is_legacy(&self) -> bool;
    /// The status register.
    fn status(&self) -> u8;
    /// Writes the status register; 0 resets the device.
    fn set_status(&self, status: u8);
    /// The largest size of a queue; 0 where it does not exist.
    fn queue_max(&self, queue: u16) -> u16;
    /// Gives the device a queue of `size` whose ring lies at `address` as
    /// [`tombolo_ring::virtio::Layout`] says.
    fn set_queue(&self, queue: u16, size: u16, address: u64);
    /// Tells the device that a queue has something new.
    fn notify(&self, queue: u16);
    /// A byte of the device's own configuration.
    fn config(&self, offset: usize) -> u8;
    /// Acknowledges the interrupt, where that is needed.
    fn acknowledge(&self);
    /// The interrupt that wakes the cell; `None` where it has to look by itself.
    fn interrupt(&self) -> Option<Interrupt>;
}

/// Begins the initialisation of a device (VirtIO 1.3 §3.1): reset, greetings, features. Returns the
/// features agreed on; `None` where the device refuses them.
pub(crate) fn negotiate(transport: &dyn Transport, wanted: u64) -> Option<u64> {
    transport.set_status(0);
    // A PCI device may take its time; the specification asks to wait for 0.
    while transport.status() != 0 {
        core::hint::spin_loop();
    }
    transport.set_status(STATUS_ACKNOWLEDGE);
    transport.set_status(STATUS_ACKNOWLEDGE | STATUS_DRIVER);
    let mut features = transport.features() & wanted;
    if transport.is_legacy() {
        features &= !VERSION_1;
        transport.set_features(features);
        return Some(features);
    }
    if features & VERSION_1 == 0 {
        transport.set_status(STATUS_FAILED);
        return None;
    }
    transport.set_features(features);
    transport.set_status(STATUS_ACKNOWLEDGE | STATUS_DRIVER | STATUS_FEATURES_OK);
    if transport.status() & STATUS_FEATURES_OK == 0 {
        transport.set_status(STATUS_FAILED);
        return None;
    }
    Some(features)
}

/// Ends the initialisation: the device is live.
pub(crate) fn go(transport: &dyn Transport) {
    let features_ok = if transport.is_legacy() { 0 } else { STATUS_FEATURES_OK };
    transport.set_status(STATUS_ACKNOWLEDGE | STATUS_DRIVER | STATUS_DRIVER_OK | features_ok);
}
