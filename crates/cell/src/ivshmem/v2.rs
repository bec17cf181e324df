//! The second version of the device, as Jailhouse has it: what its configuration space says. Pure.
//!
//! Jailhouse, Documentation/ivshmem-v2-specification.md. Stock QEMU has no such device, so only the
//! parsing is tested, against bytes made from the specification.

use core::fmt;

/// Vendor and device of the second version.
pub(crate) const VENDOR: u16 = 0x110a;
pub(crate) const DEVICE: u16 = 0x4106;
/// The class of a device that fits no other; subclass and interface are the protocol.
const CLASS: u8 = 0xff;

/// Registers of BAR0.
pub(crate) const ID: usize = 0x00;
pub(crate) const MAX_PEERS: usize = 0x04;
pub(crate) const INT_CONTROL: usize = 0x08;
pub(crate) const DOORBELL: usize = 0x0c;
pub(crate) const STATE: usize = 0x10;
pub(crate) const REGISTER_BYTES: usize = 0x14;
/// Bit 0 of `INT_CONTROL`.
pub(crate) const INT_ENABLE: u32 = 1;

/// The vendor capability with an address of the memory, and without it (then it lies behind BAR2).
const LONG_BYTES: u8 = 0x20;
const SHORT_BYTES: u8 = 0x18;
pub(crate) const CAPABILITY_BYTES: usize = LONG_BYTES as usize;

/// What the vendor capability says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capability {
    pub(crate) state_table_bytes: u32,
    pub(crate) rw_bytes: u64,
    pub(crate) output_bytes: u64,
    /// Where the memory lies; `None`: behind BAR2.
    pub(crate) address: Option<u64>,
}

/// A vendor capability is not the device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrongLength(u8);

impl fmt::Display for WrongLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its vendor capability has {} bytes, expected {SHORT_BYTES} or {LONG_BYTES}", self.0)
    }
}

impl Capability {
    /// Parses the capability from its first byte on.
    pub(crate) fn parse(bytes: &[u8; CAPABILITY_BYTES]) -> Result<Capability, WrongLength> {
        let u64_at = |at: usize| bytes[at..at + 8].iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
        let length = bytes[2];
        if length != SHORT_BYTES && length != LONG_BYTES {
            return Err(WrongLength(length));
        }
        Ok(Capability {
            state_table_bytes: u64_at(4) as u32,
            rw_bytes: u64_at(8),
            output_bytes: u64_at(0x10),
            address: (length == LONG_BYTES).then(|| u64_at(0x18)),
        })
    }
}

/// The protocol, from the word of configuration space that holds revision, interface, subclass and
/// class; `None` for another class.
pub(crate) fn protocol(class_word: u32) -> Option<u32> {
    ((class_word >> 24) as u8 == CLASS).then_some(class_word >> 8 & 0xffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written out by hand from the specification's table.
    const LONG: [u8; 32] = [
        0x09, 0x60, 0x20, 0x00, // id, next, length, privileged control
        0x00, 0x10, 0x00, 0x00, // state table
        0x00, 0x20, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, // read/write section
        0x00, 0xf0, 0x07, 0x00, 0x00, 0x00, 0x00, 0x00, // output sections
        0x00, 0x00, 0xf0, 0x3f, 0x01, 0x00, 0x00, 0x00, // address
    ];

    #[test]
    fn both_lengths_are_parsed_as_the_specification_lays_them_out() {
        let long = Capability {
            state_table_bytes: 0x1000,
            rw_bytes: 0x2000,
            output_bytes: 0x7f000,
            address: Some(0x1_3ff0_0000),
        };
        assert_eq!(Capability::parse(&LONG), Ok(long));
        let mut short = LONG;
        short[2] = 0x18;
        assert_eq!(Capability::parse(&short), Ok(Capability { address: None, ..long }));
    }

    #[test]
    fn every_other_length_is_refused() {
        for length in (0..=255).filter(|l| ![0x18, 0x20].contains(l)) {
            let mut bytes = LONG;
            bytes[2] = length;
            assert_eq!(Capability::parse(&bytes), Err(WrongLength(length)));
        }
    }

    #[test]
    fn the_protocol_is_the_subclass_and_the_interface() {
        assert_eq!(protocol(0xff00_0100), Some(0x0001));
        assert_eq!(protocol(0xff40_0101), Some(0x4001));
        assert_eq!(protocol(0x0500_0001), None);
    }
}
