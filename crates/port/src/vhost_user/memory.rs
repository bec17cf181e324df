//! The guest's memory as the frontend describes it: regions, each with its place in the guest, in
//! the frontend, and here.
//!
//! Descriptors carry the guest's addresses; the addresses of the rings come in the *frontend's*
//! address space. Both are translated by the same regions.

use rustix::fs::fstat;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::virtio::{Backing, GuestMemory, Region, RegionTable, RingError};
use tombolo_shm::guest::{GuestMapping, MAX_BYTES};
use tombolo_shm::memory::MemoryError;

/// Most regions of a guest. QEMU names some five; memory that was plugged in later adds one each.
/// Twice as many are mapped while a table is replaced; 64 ports of that are what the process has
/// room for.
pub(super) const MAX_REGIONS: usize = 32;

/// A region as the frontend described it, mapped.
#[derive(Clone, Debug)]
pub(super) struct GuestRegion {
    pub(super) guest_address: u64,
    pub(super) frontend_address: u64,
    pub(super) bytes: u64,
    /// Where it begins in its file.
    pub(super) file_offset: u64,
    /// Held for the next daemon.
    pub(super) file: Arc<OwnedFd>,
    mapping: Arc<GuestMapping>,
}

impl GuestRegion {
    /// Maps the region from the frontend's file.
    pub(super) fn map(
        file: impl Into<OwnedFd>,
        guest_address: u64,
        frontend_address: u64,
        bytes: u64,
        file_offset: u64,
    ) -> Result<GuestRegion, MemoryError> {
        let file = Arc::new(file.into());
        let mapping = Arc::new(GuestMapping::new(&*file, file_offset, bytes)?);
        Ok(GuestRegion { guest_address, frontend_address, bytes, file_offset, file, mapping })
    }

    /// Whether `other` is the same memory at the same place, described once more. The files are
    /// known to be memory, so their file system is the kernel's own and answers at once.
    pub(super) fn is_same(&self, other: &GuestRegion) -> bool {
        let file = |r: &GuestRegion| fstat(&*r.file).ok().map(|stat| (stat.st_dev, stat.st_ino));
        let place = |r: &GuestRegion| (r.guest_address, r.frontend_address, r.bytes, r.file_offset);
        place(self) == place(other) && file(self).is_some_and(|of_self| file(other) == Some(of_self))
    }
}

/// A mapping that tables share: one region added or removed leaves the others mapped.
#[derive(Clone, Debug)]
struct SharedMapping(Arc<GuestMapping>);

impl Backing for SharedMapping {
    #[inline]
    fn bytes(&self) -> ForeignMut<'_> {
        self.0.bytes()
    }
}

/// Why a frontend's description of memory was refused.
#[derive(Debug, thiserror::Error)]
pub(super) enum TableError {
    #[error("{got} memory regions, at most {MAX_REGIONS} are accepted")]
    TooMany { got: usize },
    #[error("memory regions of {got} bytes in all, at most {MAX_BYTES} are accepted")]
    TooLarge { got: u64 },
    #[error("memory region at frontend address {address:#x} overlaps another one or wraps around")]
    FrontendOverlap { address: u64 },
    #[error(transparent)]
    Guest(#[from] RingError),
}

/// All regions of a guest.
#[derive(Debug)]
pub(super) struct GuestTable {
    table: RegionTable<SharedMapping, Vec<Region<SharedMapping>>>,
    regions: Vec<GuestRegion>,
}

impl GuestTable {
    /// A table of `regions`, which may come in any order and must not overlap.
    pub(super) fn new(mut regions: Vec<GuestRegion>) -> Result<GuestTable, TableError> {
        if regions.len() > MAX_REGIONS {
            return Err(TableError::TooMany { got: regions.len() });
        }
        let total = regions.iter().fold(0u64, |sum, region| sum.saturating_add(region.bytes));
        if total > MAX_BYTES {
            return Err(TableError::TooLarge { got: total });
        }
        regions.sort_by_key(|region| region.frontend_address);
        let mut free_from = 0;
        for region in &regions {
            let address = region.frontend_address;
            match address.checked_add(region.bytes) {
                Some(end) if address >= free_from => free_from = end,
                _ => return Err(TableError::FrontendOverlap { address }),
            }
        }
        regions.sort_by_key(|region| region.guest_address);
        let mapped = regions.iter().map(|r| Region::new(r.guest_address, SharedMapping(r.mapping.clone()))).collect();
        Ok(GuestTable { table: RegionTable::new(mapped)?, regions })
    }

    pub(super) fn empty() -> GuestTable {
        match GuestTable::new(Vec::new()) {
            Ok(table) => table,
            Err(_) => unreachable!("no region breaks no rule"),
        }
    }

    /// The guest's address of what the frontend has at `address`.
    pub(super) fn guest_address(&self, address: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = address.checked_sub(region.frontend_address).filter(|offset| *offset < region.bytes)?;
            // No overflow: offset < bytes, and the table refused regions that wrap around.
            Some(region.guest_address + offset)
        })
    }

    pub(super) fn regions(&self) -> &[GuestRegion] {
        &self.regions
    }

    /// Whether pages of the guest's memory are gone.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.regions.iter().any(|region| region.mapping.is_lost())
    }
}

impl GuestMemory for GuestTable {
    #[inline]
    fn view(&self, address: u64, len: u32) -> Option<ForeignMut<'_>> {
        self.table.view(address, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_shm::memory::sealed_region;

    fn region(guest: u64, frontend: u64, bytes: u64) -> GuestRegion {
        GuestRegion::map(sealed_region("t", bytes).unwrap(), guest, frontend, bytes, 0).unwrap()
    }

    #[test]
    fn both_address_spaces_are_translated() {
        let table = GuestTable::new(vec![region(0x10_0000, 0x7000_0000, 0x3000), region(0, 0x7f00_0000, 0x1000)]);
        let table = table.unwrap();
        assert_eq!(table.guest_address(0x7000_0010), Some(0x10_0010));
        assert_eq!(table.guest_address(0x7f00_0fff), Some(0xfff));
        assert_eq!(table.guest_address(0x7f00_1000), None);
        assert_eq!(table.guest_address(0x6fff_ffff), None);
        assert!(table.view(0x10_0010, 0x2ff0).is_some());
        assert!(table.view(0x10_0010, 0x2ff1).is_none());
    }

    #[test]
    fn only_the_same_memory_at_the_same_place_is_the_same() {
        let (one, other) = (sealed_region("t", 0x2000).unwrap(), sealed_region("t", 0x2000).unwrap());
        let map = |fd: &OwnedFd, guest, frontend, bytes, offset| {
            GuestRegion::map(fd.try_clone().unwrap(), guest, frontend, bytes, offset).unwrap()
        };
        let first = map(&one, 0, 0x10_0000, 0x1000, 0);
        assert!(first.is_same(&map(&one, 0, 0x10_0000, 0x1000, 0)));
        for different in [
            map(&other, 0, 0x10_0000, 0x1000, 0),
            map(&one, 0x1000, 0x10_0000, 0x1000, 0),
            map(&one, 0, 0x20_0000, 0x1000, 0),
            map(&one, 0, 0x10_0000, 0x2000, 0),
            map(&one, 0, 0x10_0000, 0x1000, 0x1000),
        ] {
            assert!(!first.is_same(&different), "{different:?}");
        }
    }

    #[test]
    fn overlaps_in_either_space_are_refused() {
        let frontend = GuestTable::new(vec![region(0, 0x1000, 0x2000), region(0x10_0000, 0x2000, 0x1000)]);
        assert!(matches!(frontend, Err(TableError::FrontendOverlap { address: 0x2000 })));
        let guest = GuestTable::new(vec![region(0, 0x1000, 0x2000), region(0x1000, 0x8000, 0x1000)]);
        assert!(matches!(guest, Err(TableError::Guest(RingError::Regions { .. }))));
        let wrap = GuestTable::new(vec![region(0, u64::MAX - 10, 0x1000)]);
        assert!(matches!(wrap, Err(TableError::FrontendOverlap { .. })));
    }
}
