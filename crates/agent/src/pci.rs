//! ivshmem devices of this guest, as sysfs shows them.
//!
//! Only what the kernel itself says is read here: identity and sizes. What is in a device's memory
//! is the other side's word, and is read by `link.rs`.

use crate::error::AgentError;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// Where sysfs lists the devices.
pub(crate) const DEVICES: &str = "/sys/bus/pci/devices";
/// Vendor and device number of QEMU's ivshmem, version 1 (QEMU docs/specs/ivshmem-spec, "PCI Device
/// Information").
const VENDOR_DEVICE: (u32, u32) = (0x1af4, 0x1110);
/// `IORESOURCE_MEM` of Linux's include/linux/ioport.h: a BAR that is memory.
const RESOURCE_MEMORY: u64 = 0x200;

/// A device that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    /// Domain, bus, device and function, such as `0000:00:03.0`.
    pub(crate) address: String,
    /// Its folder in sysfs.
    pub(crate) folder: PathBuf,
    /// Address of BAR 0, the registers.
    pub(crate) registers_start: u64,
    /// Bytes of BAR 0.
    pub(crate) registers_bytes: u64,
    /// Bytes of BAR 1, the table of interrupts; 0 on a device without doorbells.
    pub(crate) interrupts_bytes: u64,
    /// Bytes of BAR 2, the memory.
    pub(crate) memory_bytes: u64,
    pub(crate) driver: Option<String>,
    /// The number of its group of the IOMMU, if the guest has one.
    pub(crate) iommu_group: Option<String>,
}

impl Device {
    /// Whether it can ring and be rung: only then is its own id known to it.
    pub(crate) fn has_doorbells(&self) -> bool {
        self.interrupts_bytes != 0
    }

    /// The file of sysfs for a BAR.
    pub(crate) fn resource(&self, bar: u32) -> PathBuf {
        self.folder.join(format!("resource{bar}"))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.has_doorbells() { "doorbell" } else { "plain" };
        write!(f, "{} ivshmem-{kind}, {} KiB", self.address, self.memory_bytes >> 10)
    }
}

/// Every ivshmem device below `root`, in the order of their addresses.
///
/// # Errors
/// [`AgentError::Sysfs`] where the folder cannot be read. Devices that vanish meanwhile are passed
/// over.
pub(crate) fn find(root: &Path) -> Result<Vec<Device>, AgentError> {
    let unreadable = |source| AgentError::Sysfs { what: "reading", path: root.into(), source };
    let mut found = Vec::new();
    for entry in fs::read_dir(root).map_err(unreadable)?.flatten() {
        found.extend(device(&entry.path()));
    }
    found.sort_by(|a, b| a.address.cmp(&b.address));
    Ok(found)
}

fn device(folder: &Path) -> Option<Device> {
    let number = |name: &str| u32::from_str_radix(word(folder, name)?.trim_start_matches("0x"), 16).ok();
    if (number("vendor")?, number("device")?) != VENDOR_DEVICE {
        return None;
    }
    let bars = bars(&fs::read_to_string(folder.join("resource")).ok()?);
    let name_of = |link: &str| Some(fs::read_link(folder.join(link)).ok()?.file_name()?.to_str()?.to_owned());
    Some(Device {
        address: folder.file_name()?.to_str()?.to_owned(),
        folder: folder.into(),
        registers_start: bars[0].0,
        registers_bytes: bars[0].1,
        interrupts_bytes: bars[1].1,
        memory_bytes: bars[2].1,
        driver: name_of("driver"),
        iommu_group: name_of("iommu_group"),
    })
}

/// Address and size of the first three BARs from sysfs's `resource`: a line `START END FLAGS` in
/// hexadecimal for each. A BAR that is not there, or is no memory, has 0 bytes.
fn bars(resource: &str) -> [(u64, u64); 3] {
    let mut bars = [(0, 0); 3];
    for (bar, line) in bars.iter_mut().zip(resource.lines()) {
        let mut numbers =
            line.split_whitespace().map(|n| u64::from_str_radix(n.trim_start_matches("0x"), 16).unwrap_or(0));
        if let (Some(start), Some(end), Some(flags)) = (numbers.next(), numbers.next(), numbers.next())
            && flags & RESOURCE_MEMORY != 0
            && end > start
        {
            *bar = (start, (end - start).saturating_add(1));
        }
    }
    bars
}

fn word(folder: &Path, name: &str) -> Option<String> {
    Some(fs::read_to_string(folder.join(name)).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn add(root: &Path, address: &str, vendor: &str, device: &str, resource: &str) -> PathBuf {
        let folder = root.join(address);
        fs::create_dir(&folder).unwrap();
        for (name, text) in [("vendor", vendor), ("device", device), ("resource", resource)] {
            fs::write(folder.join(name), format!("{text}\n")).unwrap();
        }
        folder
    }

    const DOORBELL: &str = "0x00000000febf1000 0x00000000febf10ff 0x0000000000040200\n\
         0x00000000febf2000 0x00000000febf2fff 0x0000000000040200\n\
         0x00000000fe000000 0x00000000fe0fffff 0x000000000014220c\n";
    const PLAIN: &str = "0x00000000febf1000 0x00000000febf10ff 0x0000000000040200\n\
         0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
         0x0000004000000000 0x00000040000fffff 0x000000000014220c\n";

    #[test]
    fn both_kinds_are_found_and_told_apart_and_others_are_not() {
        let root = tempfile::tempdir().unwrap();
        let doorbell = add(root.path(), "0000:00:04.0", "0x1af4", "0x1110", DOORBELL);
        add(root.path(), "0000:00:03.0", "0x1af4", "0x1110", PLAIN);
        add(root.path(), "0000:00:02.0", "0x1af4", "0x1000", PLAIN);
        symlink("../../../bus/pci/drivers/vfio-pci", doorbell.join("driver")).unwrap();
        symlink("../../../kernel/iommu_groups/7", doorbell.join("iommu_group")).unwrap();

        let found = find(root.path()).unwrap();
        let addresses: Vec<&str> = found.iter().map(|d| d.address.as_str()).collect();
        assert_eq!(addresses, ["0000:00:03.0", "0000:00:04.0"]);
        assert!(!found[0].has_doorbells() && found[1].has_doorbells());
        assert_eq!(
            (found[1].registers_start, found[1].registers_bytes, found[1].memory_bytes),
            (0xfebf_1000, 256, 1 << 20)
        );
        assert_eq!((found[0].driver.as_deref(), found[0].iommu_group.as_deref()), (None, None));
        assert_eq!((found[1].driver.as_deref(), found[1].iommu_group.as_deref()), (Some("vfio-pci"), Some("7")));
        assert_eq!(found[1].to_string(), "0000:00:04.0 ivshmem-doorbell, 1024 KiB");
    }

    #[test]
    fn lines_that_are_no_memory_have_no_bytes() {
        for text in ["", "0x1 0x0 0x200", "0x1000 0x1fff 0x101", "junk", "0x1000 0x1fff", "0x0 0xffffffffffffffff"] {
            assert_eq!(bars(text), [(0, 0); 3], "{text:?}");
        }
        assert_eq!(bars("0x0 0xffffffffffffffff 0x200")[0], (0, u64::MAX));
    }
}
