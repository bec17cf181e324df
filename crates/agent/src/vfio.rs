//! A device through vfio: the way to its interrupts.
//!
//! vfio-pci takes a device only where an IOMMU keeps its DMA in check; a guest has one if its VMM
//! gives it one (QEMU: `-device intel-iommu,intremap=on`), or if its kernel allows vfio without
//! (CONFIG_VFIO_NOIOMMU, which Debian's kernels leave out, and which taints the kernel; it is not
//! used here). An ivshmem device does no DMA, so the IOMMU costs nothing once the device is open.
//!
//! The device stays with vfio-pci afterwards, where the next agent finds it, however this one
//! ended: nothing else wants it, and taking it away would wait for the last mapping to go.

use crate::error::AgentError;
use crate::pci::Device;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::memory::Mapping;
use vfio_ioctls::{VfioContainer, VfioDevice, VfioOps};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

const DRIVER: &str = "/sys/bus/pci/drivers/vfio-pci";
const PROBE: &str = "/sys/bus/pci/drivers_probe";
/// `PCI_COMMAND` and its bits for memory and bus mastering (PCI Local Bus 3.0, section 6.2.2):
/// without the second no MSI-X message leaves the device.
const COMMAND: u64 = 4;
const MEMORY_AND_MASTER: u16 = 0b110;
/// `VFIO_PCI_CONFIG_REGION_INDEX` of Linux's include/uapi/linux/vfio.h; BARs have their own
/// numbers.
const CONFIG: u32 = 7;
/// `VFIO_PCI_MSIX_IRQ_INDEX` of the same file.
const MSIX: u32 = 2;

/// A device that is open through vfio, with its interrupts on; they are off when it goes.
pub(crate) struct Opened(VfioDevice);

impl Opened {
    /// The 32-bit register at `offset` of BAR 0.
    pub(crate) fn read_register(&self, offset: usize) -> u32 {
        let mut value = [0; 4];
        self.0.region_read(0, &mut value, offset as u64);
        u32::from_le_bytes(value)
    }

    /// Sets the 32-bit register at `offset` of BAR 0.
    pub(crate) fn write_register(&self, offset: usize, value: u32) {
        self.0.region_write(0, &value.to_le_bytes(), offset as u64);
    }
}

/// Why vfio cannot be had for a device, if that can be known before it is tried; the text says what
/// to do.
pub(crate) fn obstacle(device: &Device) -> Option<String> {
    if !device.has_doorbells() {
        return Some("the device is ivshmem-plain, which has no interrupts".into());
    }
    if !Path::new(DRIVER).exists() {
        return Some("the driver vfio-pci is not there: `modprobe vfio-pci` loads it".into());
    }
    if device.iommu_group.is_none() {
        return Some(
            "this guest has no IOMMU, which vfio needs: QEMU provides one with `-device intel-iommu,intremap=on` \
             (machine q35), and the guest's kernel needs intel_iommu=on"
                .into(),
        );
    }
    match device.driver.as_deref() {
        None | Some("vfio-pci") => None,
        Some(other) => Some(format!("the driver {other} has the device: unbind it first")),
    }
}

/// Opens a device, with up to `vectors` interrupts.
///
/// # Errors
/// [`AgentError::NoWakeups`] with what vfio said; the device may have been given to vfio-pci by
/// then.
pub(crate) fn open(device: &Device, vectors: usize) -> Result<(Opened, Mapping, Vec<Doorbell>), AgentError> {
    let refused = |reason: String| AgentError::NoWakeups { address: device.address.clone(), reason };
    if let Some(reason) = obstacle(device) {
        return Err(refused(reason));
    }
    if device.driver.is_none() {
        let write = |path: &Path, text: &str| {
            fs::write(path, text).map_err(|error| refused(format!("writing {}: {error}", path.display())))
        };
        write(&device.folder.join("driver_override"), "vfio-pci\n")?;
        write(Path::new(PROBE), &device.address)?;
    }
    let vfio = |error: vfio_ioctls::VfioError| {
        refused(format!(
            "vfio: {error}; is the module vfio_iommu_type1 loaded, and is the device alone in its IOMMU group?"
        ))
    };
    let container: Arc<dyn VfioOps> = Arc::new(VfioContainer::new(None).map_err(vfio)?);
    let open = VfioDevice::new(&device.folder, container, false).map_err(vfio)?;

    let mut command = [0; 2];
    open.region_read(CONFIG, &mut command, COMMAND);
    let command = u16::from_le_bytes(command) | MEMORY_AND_MASTER;
    open.region_write(CONFIG, &command.to_le_bytes(), COMMAND);

    let there = open.get_irq_info(MSIX).map_or(0, |irq| irq.count as usize);
    let system = |what: &str, error: std::io::Error| refused(format!("{what}: {error}"));
    let events: Vec<EventFd> = (0..vectors.min(there))
        .map(|_| EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC))
        .collect::<Result<_, _>>()
        .map_err(|error| system("making an eventfd", error))?;
    if events.is_empty() {
        return Err(refused(format!("the device has {there} vectors, at least 1 is expected")));
    }
    open.enable_msix(events.iter().collect()).map_err(vfio)?;

    let fd = duplicate(open.as_raw_fd()).map_err(|error| system("duplicating the device's descriptor", error))?;
    let memory = Mapping::of_device(&fd, open.get_region_offset(2), device.memory_bytes)
        .map_err(|source| AgentError::Map { address: device.address.clone(), what: "the memory", source })?;
    let doorbells = events
        .iter()
        .map(|event| Doorbell::private(duplicate(event.as_raw_fd())?).map_err(Into::into))
        .collect::<Result<_, std::io::Error>>()
        .map_err(|error| system("duplicating an eventfd", error))?;
    Ok((Opened(open), memory, doorbells))
}

/// A descriptor of this process by its number, once more: the way from a library's raw number to an
/// owned one.
fn duplicate(number: i32) -> Result<OwnedFd, std::io::Error> {
    let me = pidfd_open(Pid::from_raw(std::process::id() as i32).ok_or(rustix::io::Errno::SRCH)?, PidfdFlags::empty())?;
    Ok(pidfd_getfd(me, number, PidfdGetfdFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duplicate_is_the_same_file() {
        let event = EventFd::new(EFD_NONBLOCK).unwrap();
        let doorbell = Doorbell::private(duplicate(event.as_raw_fd()).unwrap()).unwrap();
        event.write(1).unwrap();
        assert!(doorbell.take());
    }

    #[test]
    fn what_stands_in_the_way_is_said_before_anything_is_touched() {
        let plain = Device {
            address: "0000:00:03.0".into(),
            folder: "/nonexistent".into(),
            registers_start: 0xfebf_1000,
            registers_bytes: 256,
            interrupts_bytes: 0,
            memory_bytes: 1 << 20,
            driver: None,
            iommu_group: None,
        };
        assert!(obstacle(&plain).unwrap().contains("ivshmem-plain"));
        assert!(matches!(open(&plain, 2), Err(AgentError::NoWakeups { .. })));
    }
}
