//! What the loader passes on: the PVH start information, read once into plain values. Pure except
//! for the reader.
//!
//! Layout: Xen's public/arch-x86/hvm/start_info.h, version 1.
//!
//! | offset | field |
//! | --- | --- |
//! | 0 | magic 0x336ec578 |
//! | 4 | version; memory map from version 1 |
//! | 24 | u64 address of the command line |
//! | 32 | u64 address of ACPI's RSDP |
//! | 40 | u64 address of the memory map |
//! | 48 | u32 entries of the memory map, 24 bytes each: address, size, type (1 is RAM), reserved |

use crate::acpi::Ecam;
use alloc::string::String;
use alloc::vec::Vec;

const MAGIC: u32 = 0x336e_c578;
const MEMORY_MAP_ENTRY_BYTES: u64 = 24;
const TYPE_RAM: u32 = 1;
/// More entries than any machine has; a bound for a map that is not one.
pub(crate) const MAX_REGIONS: usize = 64;
/// The longest command line that is read.
pub(crate) const MAX_COMMAND_LINE_BYTES: usize = 4096;

/// Addresses of memory, `start` inclusive, `end` exclusive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

/// Memory as the loader left it; a trait, so that the parsing is tested on bytes.
pub(crate) trait Physical {
    /// `N` bytes at `address`.
    fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]>;

    fn u32(&self, address: u64) -> Option<u32> {
        self.read(address).map(u32::from_le_bytes)
    }

    fn u64(&self, address: u64) -> Option<u64> {
        self.read(address).map(u64::from_le_bytes)
    }
}

/// The start information without what needs a heap, which is made from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartInfo {
    pub(crate) ram: [Region; MAX_REGIONS],
    pub(crate) ram_count: usize,
    command_line: u64,
    pub(crate) rsdp: u64,
}

impl StartInfo {
    /// Reads the structure at `address`; `None` where it has not the right magic or no memory map.
    pub(crate) fn read(memory: &impl Physical, address: u64) -> Option<StartInfo> {
        if memory.u32(address)? != MAGIC || memory.u32(address + 4)? < 1 {
            return None;
        }
        let map = memory.u64(address + 40)?;
        let entries = memory.u32(address + 48)? as usize;
        let mut info = StartInfo {
            ram: [Region::default(); MAX_REGIONS],
            ram_count: 0,
            command_line: memory.u64(address + 24)?,
            rsdp: memory.u64(address + 32)?,
        };
        for index in 0..entries.min(MAX_REGIONS) {
            let entry = map.checked_add(index as u64 * MEMORY_MAP_ENTRY_BYTES)?;
            let (start, size) = (memory.u64(entry)?, memory.u64(entry + 8)?);
            if memory.u32(entry + 16)? == TYPE_RAM {
                let end = start.checked_add(size)?;
                info.ram[info.ram_count] = Region { start, end };
                info.ram_count += 1;
            }
        }
        (info.ram_count > 0).then_some(info)
    }

    pub(crate) fn ram(&self) -> &[Region] {
        &self.ram[..self.ram_count]
    }

    /// Copies the command line, at most its first [`MAX_COMMAND_LINE_BYTES`] into `to`; returns its
    /// length.
    pub(crate) fn copy_command_line(&self, memory: &impl Physical, to: &mut [u8; MAX_COMMAND_LINE_BYTES]) -> usize {
        if self.command_line == 0 {
            return 0;
        }
        for (index, slot) in to.iter_mut().enumerate() {
            match memory.read::<1>(self.command_line + index as u64) {
                Some([byte]) if byte != 0 => *slot = byte,
                _ => return index,
            }
        }
        to.len()
    }
}

/// The RAM that the heap may have: whole pages between `floor` and `ceiling` without `taken` (the
/// image).
pub(crate) fn free_memory(ram: &[Region], taken: Region, floor: u64, ceiling: u64) -> impl Iterator<Item = Region> {
    const PAGE: u64 = 4096;
    ram.iter()
        .flat_map(move |r| {
            [
                Region { start: r.start.max(floor), end: r.end.min(ceiling).min(taken.start) },
                Region { start: r.start.max(floor).max(taken.end), end: r.end.min(ceiling) },
            ]
        })
        .map(|r| Region { start: r.start.div_ceil(PAGE) * PAGE, end: r.end / PAGE * PAGE })
        .filter(|r| r.start < r.end)
}

/// The command line as text; bytes that are none become a replacement character.
pub(crate) fn command_line_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// All that the rest of the cell wants to know of the start.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) command_line: String,
    pub(crate) ram: Vec<Region>,
    pub(crate) ecam: Option<Ecam>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    struct Bytes(Vec<u8>);

    impl Physical for Bytes {
        fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
            let at = usize::try_from(address).ok()?;
            self.0.get(at..at.checked_add(N)?)?.try_into().ok()
        }
    }

    fn sample() -> Bytes {
        let mut bytes = vec![0u8; 256];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = 1;
        bytes[24] = 200;
        bytes[32..40].copy_from_slice(&0xf59f0u64.to_le_bytes());
        bytes[40] = 100;
        bytes[48] = 3;
        for (index, (start, size, kind)) in
            [(0u64, 0x9fc00u64, 1u32), (0xf0000, 0x10000, 2), (0x100000, 0x3f00000, 1)].iter().enumerate()
        {
            let at = 100 + index * 24;
            bytes[at..at + 8].copy_from_slice(&start.to_le_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&size.to_le_bytes());
            bytes[at + 16..at + 20].copy_from_slice(&kind.to_le_bytes());
        }
        bytes[200..206].copy_from_slice(b"ip=dhc");
        Bytes(bytes)
    }

    #[test]
    fn start_info_gives_ram_command_line_and_rsdp() {
        let bytes = sample();
        let info = StartInfo::read(&bytes, 0).unwrap();
        assert_eq!(
            info.ram(),
            [Region { start: 0, end: 0x9fc00 }, Region { start: 0x100000, end: 0x4000000 }].as_slice()
        );
        assert_eq!(info.rsdp, 0xf59f0);
        let mut line = [0; MAX_COMMAND_LINE_BYTES];
        let n = info.copy_command_line(&bytes, &mut line);
        assert_eq!(command_line_text(&line[..n]), "ip=dhc");
    }

    #[test]
    fn truncation_and_wrong_magic_are_refused() {
        let whole = sample();
        for len in 0..100 + 2 * 24 + 20 {
            assert!(StartInfo::read(&Bytes(whole.0[..len].to_vec()), 0).is_none(), "{len} bytes");
        }
        let mut wrong = sample();
        wrong.0[0] ^= 1;
        assert!(StartInfo::read(&wrong, 0).is_none());
        let mut old = sample();
        old.0[4] = 0;
        assert!(StartInfo::read(&old, 0).is_none());
    }

    #[test]
    fn free_memory_leaves_out_the_image_and_what_is_below_the_floor() {
        let ram = [Region { start: 0, end: 0x9fc00 }, Region { start: 0x100000, end: 0x2000800 }];
        let image = Region { start: 0x100000, end: 0x150000 };
        let free: Vec<_> = free_memory(&ram, image, 1 << 20, 3 << 30).collect();
        assert_eq!(free, [Region { start: 0x150000, end: 0x2000000 }]);
        let middle = Region { start: 0x300000, end: 0x400000 };
        let free: Vec<_> = free_memory(&ram, middle, 1 << 20, 0x1000000).collect();
        assert_eq!(free, [Region { start: 0x100000, end: 0x300000 }, Region { start: 0x400000, end: 0x1000000 }]);
    }
}
