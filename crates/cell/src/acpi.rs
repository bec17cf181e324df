//! The one thing that is wanted of ACPI: where PCI's configuration space lies in memory (table
//! MCFG). Pure.
//!
//! ACPI 6.5 §5.2.5 (RSDP), §5.2.7 (RSDT), §5.2.8 (XSDT); PCI Firmware 3.3 §4.1.2 (MCFG).

use crate::machine::startup::Physical;

const RSDP_SIGNATURE: [u8; 8] = *b"RSD PTR ";
const RSDP_REVISION: u64 = 15;
const RSDP_RSDT: u64 = 16;
const RSDP_XSDT: u64 = 24;
const TABLE_LENGTH: u64 = 4;
const TABLE_HEADER_BYTES: u64 = 36;
const MCFG_FIRST_ENTRY: u64 = 44;
/// Where a BIOS leaves the RSDP for those who were not told.
const BIOS_AREA: core::ops::Range<u64> = 0xe0000..0x100000;
/// More tables than any machine has.
const MAX_TABLES: u64 = 256;

/// The memory window of PCI's configuration space: 1 MiB a bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ecam {
    /// Address of bus 0's part, whether or not that bus exists.
    pub(crate) base: u64,
    pub(crate) first_bus: u8,
    pub(crate) last_bus: u8,
}

/// Finds the window through the tables at `rsdp`, or where a BIOS leaves them if that is 0.
pub(crate) fn find_ecam(memory: &impl Physical, rsdp: u64) -> Option<Ecam> {
    let rsdp =
        if rsdp != 0 { rsdp } else { BIOS_AREA.step_by(16).find(|at| memory.read(*at) == Some(RSDP_SIGNATURE))? };
    if memory.read(rsdp)? != RSDP_SIGNATURE {
        return None;
    }
    let [revision] = memory.read(rsdp + RSDP_REVISION)?;
    let xsdt = if revision >= 2 { memory.u64(rsdp + RSDP_XSDT)? } else { 0 };
    let (root, entry_bytes) = match xsdt {
        0 => (u64::from(memory.u32(rsdp + RSDP_RSDT)?), 4),
        xsdt => (xsdt, 8),
    };
    let length = u64::from(memory.u32(root.checked_add(TABLE_LENGTH)?)?);
    let entries = length.checked_sub(TABLE_HEADER_BYTES)? / entry_bytes;
    for index in 0..entries.min(MAX_TABLES) {
        let at = root.checked_add(TABLE_HEADER_BYTES + index * entry_bytes)?;
        let table = if entry_bytes == 8 { memory.u64(at)? } else { u64::from(memory.u32(at)?) };
        if memory.read(table) == Some(*b"MCFG") {
            let entry = table.checked_add(MCFG_FIRST_ENTRY)?;
            let [first_bus, last_bus] = memory.read(entry + 10)?;
            let ecam = Ecam { base: memory.u64(entry)?, first_bus, last_bus };
            return (ecam.base != 0 && first_bus <= last_bus).then_some(ecam);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    struct Bytes(u64, Vec<u8>);

    impl Physical for Bytes {
        fn read<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
            let at = usize::try_from(address.checked_sub(self.0)?).ok()?;
            self.1.get(at..at.checked_add(N)?)?.try_into().ok()
        }
    }

    const BASE: u64 = 0xf0000;

    fn tables(revision: u8) -> Bytes {
        let mut bytes = std::vec![0u8; 400];
        bytes[16..24].copy_from_slice(b"RSD PTR ");
        bytes[16 + 15] = revision;
        bytes[16 + 16..16 + 20].copy_from_slice(&(BASE as u32 + 64).to_le_bytes());
        bytes[16 + 24..16 + 32].copy_from_slice(&(BASE + 128).to_le_bytes());
        // RSDT and XSDT with two entries each; the second is MCFG.
        bytes[64 + 4..64 + 8].copy_from_slice(&44u32.to_le_bytes());
        bytes[64 + 36..64 + 40].copy_from_slice(&(BASE as u32 + 200).to_le_bytes());
        bytes[64 + 40..64 + 44].copy_from_slice(&(BASE as u32 + 240).to_le_bytes());
        bytes[128 + 4..128 + 8].copy_from_slice(&52u32.to_le_bytes());
        bytes[128 + 36..128 + 44].copy_from_slice(&(BASE + 200).to_le_bytes());
        bytes[128 + 44..128 + 52].copy_from_slice(&(BASE + 240).to_le_bytes());
        bytes[200..204].copy_from_slice(b"APIC");
        bytes[240..244].copy_from_slice(b"MCFG");
        bytes[284..292].copy_from_slice(&0xe000_0000u64.to_le_bytes());
        bytes[295] = 0xff;
        Bytes(BASE, bytes)
    }

    #[test]
    fn the_window_is_found_through_either_root_table_and_without_being_told() {
        let want = Some(Ecam { base: 0xe000_0000, first_bus: 0, last_bus: 255 });
        for revision in [0, 2] {
            assert_eq!(find_ecam(&tables(revision), BASE + 16), want);
            assert_eq!(find_ecam(&tables(revision), 0), want);
        }
    }

    #[test]
    fn truncated_tables_give_nothing() {
        for len in 0..296 {
            let mut whole = tables(2);
            whole.1.truncate(len);
            assert_eq!(find_ecam(&whole, BASE + 16), None, "{len} bytes");
        }
        assert_eq!(find_ecam(&tables(2), BASE + 17), None);
    }
}
