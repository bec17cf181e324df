//! A device's memory and doorbells, by whichever way this guest has.
//!
//! | way | needs | wake-ups | cost of waiting |
//! | --- | --- | --- | --- |
//! | vfio | the module vfio-pci, and an IOMMU in the guest | by interrupt | nothing while idle |
//! | sysfs | root | none: the memory is polled | a look now and then while idle, see `port::ivshmem` |
//!
//! Ringing the other side works either way: it is a write to a register.

use crate::error::AgentError;
use crate::pci::Device;
use crate::vfio;
use std::fs::OpenOptions;
use std::sync::atomic::Ordering;
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::memory::Mapping;

/// Registers of BAR 0 (QEMU docs/specs/ivshmem-spec, "Device Registers").
const IV_POSITION: usize = 8;
const DOORBELL: usize = 12;
const PAGE: u64 = 4096;

/// How the agent learns of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Wakeups {
    /// By interrupts if this guest has them, else by polling.
    Auto,
    /// By interrupts, through vfio, or not at all.
    Vfio,
    /// By polling only.
    Poll,
}

/// A device that is open.
pub(crate) struct Access {
    /// BAR 2.
    pub(crate) memory: Mapping,
    /// The way to BAR 0.
    pub(crate) registers: Registers,
    /// What the device rings; none where it is polled.
    pub(crate) doorbells: Vec<Doorbell>,
    /// Why there are no doorbells, where there are none.
    pub(crate) polled_because: Option<String>,
}

/// The way to a device's registers.
pub(crate) enum Registers {
    /// A page, and where in it they begin.
    Mapped(Mapping, usize),
    /// Reads and writes of the device's descriptor: vfio does not map a BAR of less than a page.
    Vfio(vfio::Opened),
}

impl Registers {
    /// The device's own id on its link. 0 is the first peer of a link, or a plain device, which has
    /// none.
    pub(crate) fn position(&self) -> u32 {
        match self {
            Registers::Mapped(page, offset) => {
                page.view().load_u32(offset + IV_POSITION, Ordering::Relaxed).unwrap_or(0)
            }
            Registers::Vfio(opened) => opened.read_register(IV_POSITION),
        }
    }

    /// Rings a vector of a peer. The device passes over a peer that is not there.
    pub(crate) fn ring(&self, peer: u16, vector: u16) {
        let value = u32::from(peer) << 16 | u32::from(vector);
        match self {
            // Release: what was written into the memory is there before the doorbell is heard.
            Registers::Mapped(page, offset) => {
                let _ = page.view_mut().and_then(|view| view.store_u32(offset + DOORBELL, value, Ordering::Release));
            }
            Registers::Vfio(opened) => opened.write_register(DOORBELL, value),
        }
    }
}

/// Opens a device the way that `wakeups` says, for up to `vectors` interrupts.
///
/// # Errors
/// [`AgentError::NoWakeups`] where interrupts are demanded and cannot be had; [`AgentError::Sysfs`]
/// and [`AgentError::Map`] where the device cannot be reached at all.
pub(crate) fn open(device: &Device, wakeups: Wakeups, vectors: usize) -> Result<Access, AgentError> {
    let polled_because = match wakeups {
        Wakeups::Poll => "--wakeups poll".into(),
        Wakeups::Vfio => return through_vfio(device, vectors),
        Wakeups::Auto => match through_vfio(device, vectors) {
            Err(AgentError::NoWakeups { reason, .. }) => reason,
            other => return other,
        },
    };
    through_sysfs(device, polled_because)
}

fn through_vfio(device: &Device, vectors: usize) -> Result<Access, AgentError> {
    let (opened, memory, doorbells) = vfio::open(device, vectors)?;
    Ok(Access { memory, registers: Registers::Vfio(opened), doorbells, polled_because: None })
}

fn through_sysfs(device: &Device, because: String) -> Result<Access, AgentError> {
    // Memory decoding is off until somebody enables the device.
    let enable = device.folder.join("enable");
    std::fs::write(&enable, "1").map_err(|source| AgentError::Sysfs { what: "writing", path: enable, source })?;
    let map =
        |bar: u32, bytes: u64| {
            let path = device.resource(bar);
            let what = if bar == 0 { "the registers" } else { "the memory" };
            match OpenOptions::new().read(true).write(true).open(&path) {
                Ok(file) => Mapping::of_device(file, 0, bytes.next_multiple_of(PAGE))
                    .map_err(|source| AgentError::Map { address: device.address.clone(), what, source }),
                Err(source) => Err(AgentError::Sysfs { what: "opening", path, source }),
            }
        };
    let (registers, memory) = (map(0, device.registers_bytes)?, map(2, device.memory_bytes)?);
    // The kernel maps whole pages, and a small BAR may begin anywhere in one.
    let registers = Registers::Mapped(registers, (device.registers_start % PAGE) as usize);
    Ok(Access { memory, registers, doorbells: Vec::new(), polled_because: Some(because) })
}
