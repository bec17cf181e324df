//! The header in front of each frame of a network device (VirtIO 1.3 §5.1.6, `struct
//! virtio_net_hdr`).
//!
//! ```text
//!   0       1          2         4          6            8             10            12
//!   +-------+----------+---------+----------+------------+-------------+-------------+
//!   | flags | gso_type | hdr_len | gso_size | csum_start | csum_offset | num_buffers |
//!   +-------+----------+---------+----------+------------+-------------+-------------+
//! ```
//!
//! Little-endian. `num_buffers` is there with `VIRTIO_F_VERSION_1` or `VIRTIO_NET_F_MRG_RXBUF` (12
//! bytes), and not on a tap with its default header size (10 bytes).

use core::fmt;

mod field {
    use core::ops::Range;
    pub(super) const FLAGS: usize = 0;
    pub(super) const GSO_TYPE: usize = 1;
    pub(super) const HDR_LEN: Range<usize> = 2..4;
    pub(super) const GSO_SIZE: Range<usize> = 4..6;
    pub(super) const CSUM_START: Range<usize> = 6..8;
    pub(super) const CSUM_OFFSET: Range<usize> = 8..10;
    pub(super) const NUM_BUFFERS: Range<usize> = 10..12;
}

// --- the specification's ---

/// Length with `num_buffers` (VIRTIO_F_VERSION_1 or mergeable buffers).
pub const HEADER_BYTES: usize = field::NUM_BUFFERS.end;
/// Length without `num_buffers`.
pub const SHORT_HEADER_BYTES: usize = field::CSUM_OFFSET.end;
/// Where `num_buffers` begins.
pub const NUM_BUFFERS_OFFSET: usize = field::NUM_BUFFERS.start;

/// Flag: the checksum is to be computed from `csum_start` on and stored at `csum_start +
/// csum_offset`.
pub const NEEDS_CSUM: u8 = 1;
/// Flag: the checksum was verified.
pub const DATA_VALID: u8 = 2;

/// No segmentation.
pub const GSO_NONE: u8 = 0;
/// TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// UDP fragmentation.
pub const GSO_UDP: u8 = 3;
/// TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// UDP segmentation.
pub const GSO_UDP_L4: u8 = 5;
/// Bit added to the type: TCP segments have the ECN bit.
pub const GSO_ECN: u8 = 0x80;

/// Feature bits of the network device (VirtIO 1.3 §5.1.3), as masks.
pub mod features {
    /// The device takes frames with partial checksums.
    pub const CSUM: u64 = 1 << 0;
    /// The driver takes frames with partial checksums.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// The device tells an MTU.
    pub const MTU: u64 = 1 << 3;
    /// The device has a MAC address.
    pub const MAC: u64 = 1 << 5;
    /// The driver takes TCP over IPv4 not cut.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// The driver takes TCP over IPv6 not cut.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// The driver takes TCP with ECN not cut.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// The device takes TCP over IPv4 not cut.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// The device takes TCP over IPv6 not cut.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// The device takes TCP with ECN not cut.
    pub const HOST_ECN: u64 = 1 << 13;
    /// A received frame may be spread over several chains.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// The device tells link state.
    pub const STATUS: u64 = 1 << 16;
    /// There is a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// There are several queue pairs.
    pub const MQ: u64 = 1 << 22;
}

/// The bytes of a header that was copied into local memory.
#[derive(Clone, Copy, Debug)]
pub struct NetHeader<'a>(&'a [u8]);

impl<'a> NetHeader<'a> {
    /// A header at the start of `bytes`; `None` where they are too short for one
    /// ([`NetHeader::check_len`]).
    pub fn new_checked(bytes: &'a [u8]) -> Option<Self> {
        let header = NetHeader(bytes);
        header.check_len().then_some(header)
    }

    /// Whether no accessor panics: all but `num_buffers` is there.
    pub fn check_len(&self) -> bool {
        self.0.len() >= SHORT_HEADER_BYTES
    }

    fn word(&self, at: core::ops::Range<usize>) -> u16 {
        u16::from_le_bytes([self.0[at.start], self.0[at.start + 1]])
    }

    /// [`NEEDS_CSUM`], [`DATA_VALID`].
    pub fn flags(&self) -> u8 {
        self.0[field::FLAGS]
    }
    /// How the frame is to be cut, with [`GSO_ECN`].
    pub fn gso_type(&self) -> u8 {
        self.0[field::GSO_TYPE]
    }
    /// Bytes of the frame's headers that each segment repeats; a hint.
    pub fn hdr_len(&self) -> u16 {
        self.word(field::HDR_LEN)
    }
    /// Largest payload of a segment, in bytes.
    pub fn gso_size(&self) -> u16 {
        self.word(field::GSO_SIZE)
    }
    /// Where the checksum starts, from the frame's start.
    pub fn csum_start(&self) -> u16 {
        self.word(field::CSUM_START)
    }
    /// Where the checksum goes, from `csum_start`.
    pub fn csum_offset(&self) -> u16 {
        self.word(field::CSUM_OFFSET)
    }
    /// Over how many chains the frame is spread; 1 where the header is the short one.
    pub fn num_buffers(&self) -> u16 {
        if self.0.len() >= HEADER_BYTES { self.word(field::NUM_BUFFERS) } else { 1 }
    }
}

/// A header as a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetHeaderRepr {
    /// [`NEEDS_CSUM`], [`DATA_VALID`].
    pub flags: u8,
    /// How the frame is to be cut, with [`GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of the frame's headers that each segment repeats; a hint.
    pub hdr_len: u16,
    /// Largest payload of a segment, in bytes.
    pub gso_size: u16,
    /// Where the checksum starts, from the frame's start.
    pub csum_start: u16,
    /// Where the checksum goes, from `csum_start`.
    pub csum_offset: u16,
    /// Over how many chains the frame is spread; 1 for frames that the driver sends (the
    /// specification says 0 there, but no known device checks it).
    pub num_buffers: u16,
}

impl NetHeaderRepr {
    /// A frame that is whole and needs nothing.
    pub const PLAIN: NetHeaderRepr = NetHeaderRepr {
        flags: 0,
        gso_type: GSO_NONE,
        hdr_len: 0,
        gso_size: 0,
        csum_start: 0,
        csum_offset: 0,
        num_buffers: 1,
    };

    /// The value of a header; `None` where it is truncated. Whether offsets lie inside the frame is
    /// not known here.
    #[inline]
    pub fn parse(bytes: &[u8]) -> Option<NetHeaderRepr> {
        let header = NetHeader::new_checked(bytes)?;
        Some(NetHeaderRepr {
            flags: header.flags(),
            gso_type: header.gso_type(),
            hdr_len: header.hdr_len(),
            gso_size: header.gso_size(),
            csum_start: header.csum_start(),
            csum_offset: header.csum_offset(),
            num_buffers: header.num_buffers(),
        })
    }

    /// The header's bytes; the first [`SHORT_HEADER_BYTES`] are the short header.
    #[inline]
    pub fn emit(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[field::FLAGS] = self.flags;
        bytes[field::GSO_TYPE] = self.gso_type;
        bytes[field::HDR_LEN].copy_from_slice(&self.hdr_len.to_le_bytes());
        bytes[field::GSO_SIZE].copy_from_slice(&self.gso_size.to_le_bytes());
        bytes[field::CSUM_START].copy_from_slice(&self.csum_start.to_le_bytes());
        bytes[field::CSUM_OFFSET].copy_from_slice(&self.csum_offset.to_le_bytes());
        bytes[field::NUM_BUFFERS].copy_from_slice(&self.num_buffers.to_le_bytes());
        bytes
    }
}

impl fmt::Display for NetHeaderRepr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "virtio-net flags={:#x}", self.flags)?;
        if self.flags & NEEDS_CSUM != 0 {
            write!(f, " csum={}+{}", self.csum_start, self.csum_offset)?;
        }
        if self.gso_type != GSO_NONE {
            write!(f, " gso={:#x} size={} hdr={}", self.gso_type, self.gso_size, self.hdr_len)?;
        }
        write!(f, " buffers={}", self.num_buffers)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::string::ToString;

    const GOLDEN: [u8; HEADER_BYTES] = [0x01, 0x81, 0x36, 0x00, 0xa8, 0x05, 0x22, 0x00, 0x10, 0x00, 0x03, 0x00];
    const REPR: NetHeaderRepr = NetHeaderRepr {
        flags: NEEDS_CSUM,
        gso_type: GSO_TCPV4 | GSO_ECN,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
        num_buffers: 3,
    };

    #[test]
    fn golden_both_ways() {
        assert_eq!(NetHeaderRepr::parse(&GOLDEN), Some(REPR));
        let mut bytes = [0xa5; 20];
        bytes[4..16].copy_from_slice(&REPR.emit());
        assert_eq!(bytes[4..16], GOLDEN);
        assert_eq!(REPR.to_string(), "virtio-net flags=0x1 csum=34+16 gso=0x81 size=1448 hdr=54 buffers=3");
        assert_eq!(NetHeaderRepr::PLAIN.to_string(), "virtio-net flags=0x0 buffers=1");
    }

    #[test]
    fn truncated_at_every_length() {
        for len in 0..SHORT_HEADER_BYTES {
            assert_eq!(NetHeaderRepr::parse(&GOLDEN[..len]), None, "{len}");
        }
        for len in SHORT_HEADER_BYTES..HEADER_BYTES {
            assert_eq!(NetHeaderRepr::parse(&GOLDEN[..len]), Some(NetHeaderRepr { num_buffers: 1, ..REPR }), "{len}");
        }
    }
}
