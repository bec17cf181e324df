//! VXLAN (RFC 7348 §5): the header between a UDP datagram and the Ethernet frame in it.
//!
//! ```text
//!   0      flags; 0x08 says that there is an identifier, the others are reserved
//!   1..4   reserved
//!   4..7   identifier of the network (VNI), big-endian
//!   7      reserved
//! ```
//!
//! Reserved bits are sent as zero and ignored when they come, as the RFC says, but for two cases.
//! Extensions of the header that change what follows it (VXLAN-GPE, draft-ietf-nvo3-vxlan-gpe §3.2:
//! flag 0x04) are refused, since what follows need not be an Ethernet frame.

use core::fmt;

/// Length of the header.
pub const HEADER_BYTES: usize = 8;
/// UDP's port for VXLAN (IANA). Linux without `dstport`, and flannel, use 8472.
pub const PORT: u16 = 4789;

/// By how much the MTU of a network is less than that of the path: IPv4 20 or IPv6 40, UDP 8, VXLAN
/// 8, and the inner frame's Ethernet header 14.
pub const fn overhead_bytes(over_ipv6: bool) -> u32 {
    if over_ipv6 { 70 } else { 50 }
}

const FLAG_VNI: u8 = 0x08;
const FLAG_NEXT_PROTOCOL: u8 = 0x04;

/// The identifier of a network: 24 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vni(u32);

impl Vni {
    /// The largest.
    pub const MAX: u32 = (1 << 24) - 1;

    /// `None` for more than 24 bits.
    pub const fn new(vni: u32) -> Option<Vni> {
        if vni <= Vni::MAX { Some(Vni(vni)) } else { None }
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Vni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Why a datagram is no VXLAN packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Malformed {
    /// Shorter than the header.
    Short,
    /// It says that it has no identifier.
    NoVni,
    /// What follows the header need not be an Ethernet frame.
    NextProtocol,
}

/// The identifier of a packet. The frame follows at [`HEADER_BYTES`].
///
/// # Errors
/// [`Malformed`].
pub fn parse(packet: &[u8]) -> Result<Vni, Malformed> {
    let Some(&[flags, _, _, _, a, b, c, _]) = packet.first_chunk() else { return Err(Malformed::Short) };
    if flags & FLAG_VNI == 0 {
        return Err(Malformed::NoVni);
    }
    if flags & FLAG_NEXT_PROTOCOL != 0 {
        return Err(Malformed::NextProtocol);
    }
    Ok(Vni(u32::from_be_bytes([0, a, b, c])))
}

/// The header of a packet in this network.
pub const fn header(vni: Vni) -> [u8; HEADER_BYTES] {
    let [_, a, b, c] = vni.0.to_be_bytes();
    [FLAG_VNI, 0, 0, 0, a, b, c, 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_is_these_bytes_both_ways() {
        let golden = [0x08, 0, 0, 0, 0x12, 0x34, 0x56, 0];
        assert_eq!(header(Vni::new(0x12_3456).unwrap()), golden);
        assert_eq!(parse(&golden), Ok(Vni(0x12_3456)));
        for n in 0..HEADER_BYTES {
            assert_eq!(parse(&golden[..n]), Err(Malformed::Short), "{n} bytes");
        }
        // Reserved bits are ignored.
        assert_eq!(parse(&[0xfb & !0x04, 0xa5, 0xa5, 0xa5, 0, 0, 1, 0xa5, 0xff]), Ok(Vni(1)));
    }

    #[test]
    fn other_packets_are_told_apart() {
        assert_eq!(parse(&[0; 8]), Err(Malformed::NoVni));
        assert_eq!(parse(&[0xf7, 0, 0, 0, 0, 0, 1, 0]), Err(Malformed::NoVni));
        assert_eq!(parse(&[0x0c, 0, 0, 3, 0, 0, 1, 0]), Err(Malformed::NextProtocol));
        assert_eq!(Vni::new(1 << 24), None);
        assert_eq!(Vni::new(Vni::MAX).map(|vni| header(vni)[4..7].to_vec()), Some([0xff; 3].to_vec()));
    }
}
