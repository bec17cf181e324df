//! Requests, responses and extra infos of a network ring as bytes (xen/include/public/io/netif.h).
//!
//! ```text
//!                  0     1     2     3     4     5     6     7     8     9     10    11
//!   tx request     | grant reference       | offset    | flags     | id        | size      |
//!   tx response    | id        | status    |
//!   rx request     | id        | padding   | grant reference       |
//!   rx response    | id        | offset    | flags     | status    |
//!   GSO            | 1   |flags| size      | kind| pad | features  |
//!   multicast      | 2/3 |flags| address                           |
//!   hash           | 4   |flags| kind| alg.| value                 |
//!   headroom       | 5   |flags| bytes     | padding               |
//! ```
//!
//! Little-endian (the frontend's own order; only x86 and arm64 guests exist). The size of a
//! packet's first transmit request is that of the whole packet. An extra info takes its own slot
//! behind the first one.

use core::fmt;

use super::XenError;

mod field {
    use core::ops::Range;
    pub(super) mod tx {
        use super::Range;
        pub(in super::super) const GREF: Range<usize> = 0..4;
        pub(in super::super) const OFFSET: Range<usize> = 4..6;
        pub(in super::super) const FLAGS: Range<usize> = 6..8;
        pub(in super::super) const ID: Range<usize> = 8..10;
        pub(in super::super) const SIZE: Range<usize> = 10..12;
    }
    pub(super) mod rx {
        use super::Range;
        pub(in super::super) const ID: Range<usize> = 0..2;
        pub(in super::super) const GREF: Range<usize> = 4..8;
        pub(in super::super) const OFFSET: Range<usize> = 2..4;
        pub(in super::super) const FLAGS: Range<usize> = 4..6;
        pub(in super::super) const STATUS: Range<usize> = 6..8;
    }
    pub(super) const STATUS: Range<usize> = 2..4;
    pub(super) const TYPE: usize = 0;
    pub(super) const EXTRA_FLAGS: usize = 1;
    pub(super) const GSO_SIZE: Range<usize> = 2..4;
    pub(super) const GSO_KIND: usize = 4;
    pub(super) const ADDRESS: Range<usize> = 2..8;
    pub(super) const HEADROOM: Range<usize> = 2..4;
    pub(super) const HASH_KIND: usize = 2;
    pub(super) const HASH_ALGORITHM: usize = 3;
    pub(super) const HASH_VALUE: Range<usize> = 4..8;
}

// --- the header's ---

/// Bytes of a transmit request.
pub const TX_REQUEST_BYTES: usize = field::tx::SIZE.end;
/// Bytes of a transmit response.
pub const TX_RESPONSE_BYTES: usize = field::STATUS.end;
/// Bytes of a receive request, a receive response and an extra info.
pub const SLOT_BYTES: usize = field::rx::STATUS.end;

/// Transmit flag: a checksum is missing (XEN_NETTXF_csum_blank).
pub const TX_CSUM_BLANK: u16 = 1 << 0;
/// Transmit flag: the checksum is known to be right (XEN_NETTXF_data_validated).
pub const TX_DATA_VALIDATED: u16 = 1 << 1;
/// Transmit flag: the packet goes on in the next request (XEN_NETTXF_more_data).
pub const TX_MORE_DATA: u16 = 1 << 2;
/// Transmit flag: an extra info follows (XEN_NETTXF_extra_info).
pub const TX_EXTRA_INFO: u16 = 1 << 3;

/// Receive flag: the checksum is known to be right (XEN_NETRXF_data_validated).
pub const RX_DATA_VALIDATED: u16 = 1 << 0;
/// Receive flag: a checksum is missing (XEN_NETRXF_csum_blank).
pub const RX_CSUM_BLANK: u16 = 1 << 1;
/// Receive flag: the packet goes on in the next response (XEN_NETRXF_more_data).
pub const RX_MORE_DATA: u16 = 1 << 2;
/// Receive flag: an extra info follows (XEN_NETRXF_extra_info).
pub const RX_EXTRA_INFO: u16 = 1 << 3;
/// Receive flag: segmentation told by an old way, which nothing here agrees to
/// (XEN_NETRXF_gso_prefix).
pub const RX_GSO_PREFIX: u16 = 1 << 4;

/// Status: the packet was dropped (XEN_NETIF_RSP_DROPPED).
pub const RSP_DROPPED: i16 = -2;
/// Status: the request was wrong (XEN_NETIF_RSP_ERROR).
pub const RSP_ERROR: i16 = -1;
/// Status: done (XEN_NETIF_RSP_OKAY). On the receive ring the field holds the length in bytes
/// instead.
pub const RSP_OKAY: i16 = 0;
/// Status: the slot held an extra info; there is nothing to answer (XEN_NETIF_RSP_NULL).
pub const RSP_NULL: i16 = 1;

/// Type of an extra info: segmentation.
pub const EXTRA_GSO: u8 = 1;
/// Type of an extra info: let packets to a multicast address pass.
pub const EXTRA_MCAST_ADD: u8 = 2;
/// Type of an extra info: do not let packets to a multicast address pass.
pub const EXTRA_MCAST_DEL: u8 = 3;
/// Type of an extra info: a packet's hash.
pub const EXTRA_HASH: u8 = 4;
/// Type of an extra info: room before a received packet, for the frontend's XDP program.
pub const EXTRA_XDP: u8 = 5;
/// Flag of an extra info: another one follows.
pub const EXTRA_MORE: u8 = 1;

/// Slots of data that a packet from any frontend may take (XEN_NETIF_NR_SLOTS_MIN).
pub const MAX_DATA_SLOTS: usize = 18;

// --- ours ---

/// Extra infos per packet. Linux's backend sends up to three; the header names five types.
pub const MAX_EXTRAS: usize = 4;
/// Slots of data after which a frontend is broken, and not merely generous: those above
/// [`MAX_DATA_SLOTS`] are dropped, not fatal. Linux's backend draws the line at 20 by default.
pub const FATAL_DATA_SLOTS: usize = 20;
/// The shortest packet: an Ethernet header, in bytes.
pub const MIN_PACKET_BYTES: u16 = 14;

#[inline]
pub(super) fn word(bytes: &[u8], at: core::ops::Range<usize>) -> u16 {
    u16::from_le_bytes([bytes[at.start], bytes[at.start + 1]])
}

#[inline]
pub(super) fn long(bytes: &[u8], at: core::ops::Range<usize>) -> u32 {
    u32::from_le_bytes([bytes[at.start], bytes[at.start + 1], bytes[at.start + 2], bytes[at.start + 3]])
}

/// A transmit request: a piece of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxRequest {
    /// The page that holds it, as a grant reference.
    pub gref: u32,
    /// Where in the page it starts, in bytes.
    pub offset: u16,
    /// [`TX_CSUM_BLANK`], [`TX_DATA_VALIDATED`], [`TX_MORE_DATA`], [`TX_EXTRA_INFO`].
    pub flags: u16,
    /// What the response repeats.
    pub id: u16,
    /// Its length in bytes; in a packet's first request that of the whole packet.
    pub size: u16,
}

impl TxRequest {
    /// The request in a slot's bytes.
    #[inline]
    pub fn parse(bytes: &[u8; TX_REQUEST_BYTES]) -> Self {
        use field::tx;
        TxRequest {
            gref: long(bytes, tx::GREF),
            offset: word(bytes, tx::OFFSET),
            flags: word(bytes, tx::FLAGS),
            id: word(bytes, tx::ID),
            size: word(bytes, tx::SIZE),
        }
    }

    /// Serialises into the layout of a ring slot.
    #[inline]
    pub fn emit(&self) -> [u8; TX_REQUEST_BYTES] {
        use field::tx;
        let mut bytes = [0; TX_REQUEST_BYTES];
        bytes[tx::GREF].copy_from_slice(&self.gref.to_le_bytes());
        bytes[tx::OFFSET].copy_from_slice(&self.offset.to_le_bytes());
        bytes[tx::FLAGS].copy_from_slice(&self.flags.to_le_bytes());
        bytes[tx::ID].copy_from_slice(&self.id.to_le_bytes());
        bytes[tx::SIZE].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }
}

impl fmt::Display for TxRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TxRequest { gref, offset, flags, id, size } = self;
        write!(f, "tx request id={id} gref={gref} offset={offset} size={size} flags={flags:#x}")
    }
}

/// A transmit response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxResponse {
    /// `id` of the request that it answers.
    pub id: u16,
    /// [`RSP_OKAY`], [`RSP_ERROR`], [`RSP_DROPPED`], or [`RSP_NULL`] where `id` means nothing.
    pub status: i16,
}

impl TxResponse {
    /// The response in the first bytes of a slot.
    #[inline]
    pub fn parse(bytes: &[u8; TX_RESPONSE_BYTES]) -> Self {
        TxResponse { id: word(bytes, field::rx::ID), status: word(bytes, field::STATUS) as i16 }
    }

    /// Serialises into the layout of a ring slot.
    #[inline]
    pub fn emit(&self) -> [u8; TX_RESPONSE_BYTES] {
        let ([a, b], [c, d]) = (self.id.to_le_bytes(), self.status.to_le_bytes());
        [a, b, c, d]
    }
}

impl fmt::Display for TxResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tx response id={} status={}", self.id, self.status)
    }
}

/// A receive request: an empty page for a piece of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxRequest {
    /// What the response repeats.
    pub id: u16,
    /// The page, as a grant reference.
    pub gref: u32,
}

impl RxRequest {
    /// Reads a ring slot. Every bit pattern is valid.
    #[inline]
    pub fn parse(bytes: &[u8; SLOT_BYTES]) -> Self {
        RxRequest { id: word(bytes, field::rx::ID), gref: long(bytes, field::rx::GREF) }
    }

    /// Serialises into the layout of a ring slot.
    #[inline]
    pub fn emit(&self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        bytes[field::rx::ID].copy_from_slice(&self.id.to_le_bytes());
        bytes[field::rx::GREF].copy_from_slice(&self.gref.to_le_bytes());
        bytes
    }
}

impl fmt::Display for RxRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rx request id={} gref={}", self.id, self.gref)
    }
}

/// A receive response: a piece of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxResponse {
    /// `id` of the request that it answers.
    pub id: u16,
    /// Where in the page it starts, in bytes.
    pub offset: u16,
    /// [`RX_DATA_VALIDATED`], [`RX_CSUM_BLANK`], [`RX_MORE_DATA`], [`RX_EXTRA_INFO`].
    pub flags: u16,
    /// Its length in bytes, or a negative status.
    pub status: i16,
}

impl RxResponse {
    /// Reads a ring slot. Every bit pattern is valid.
    #[inline]
    pub fn parse(bytes: &[u8; SLOT_BYTES]) -> Self {
        use field::rx;
        RxResponse {
            id: word(bytes, rx::ID),
            offset: word(bytes, rx::OFFSET),
            flags: word(bytes, rx::FLAGS),
            status: word(bytes, rx::STATUS) as i16,
        }
    }

    /// Serialises into the layout of a ring slot.
    #[inline]
    pub fn emit(&self) -> [u8; SLOT_BYTES] {
        use field::rx;
        let mut bytes = [0; SLOT_BYTES];
        bytes[rx::ID].copy_from_slice(&self.id.to_le_bytes());
        bytes[rx::OFFSET].copy_from_slice(&self.offset.to_le_bytes());
        bytes[rx::FLAGS].copy_from_slice(&self.flags.to_le_bytes());
        bytes[rx::STATUS].copy_from_slice(&self.status.to_le_bytes());
        bytes
    }
}

impl fmt::Display for RxResponse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RxResponse { id, offset, flags, status } = self;
        write!(f, "rx response id={id} offset={offset} status={status} flags={flags:#x}")
    }
}

/// What a packet's flags say about its checksum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Nothing: the receiver checks it.
    #[default]
    None,
    /// It is known to be right.
    Valid,
    /// The TCP or UDP checksum field holds the sum over the pseudo-header only. The receiver finds
    /// the field by parsing the packet; the ring does not say where it is.
    Blank,
}

impl Checksum {
    /// From the flags of a transmit request.
    #[inline]
    pub const fn from_tx(flags: u16) -> Self {
        Self::from_bits(flags & TX_CSUM_BLANK != 0, flags & TX_DATA_VALIDATED != 0)
    }

    /// From the flags of a receive response.
    #[inline]
    pub const fn from_rx(flags: u16) -> Self {
        Self::from_bits(flags & RX_CSUM_BLANK != 0, flags & RX_DATA_VALIDATED != 0)
    }

    const fn from_bits(blank: bool, validated: bool) -> Self {
        match (blank, validated) {
            (true, _) => Checksum::Blank,
            (false, true) => Checksum::Valid,
            (false, false) => Checksum::None,
        }
    }

    /// As flags of a transmit request. A blank one is also said to be valid, as Linux does.
    #[inline]
    pub const fn tx_flags(self) -> u16 {
        match self {
            Checksum::None => 0,
            Checksum::Valid => TX_DATA_VALIDATED,
            Checksum::Blank => TX_CSUM_BLANK | TX_DATA_VALIDATED,
        }
    }

    /// As flags of a receive response.
    #[inline]
    pub const fn rx_flags(self) -> u16 {
        match self {
            Checksum::None => 0,
            Checksum::Valid => RX_DATA_VALIDATED,
            Checksum::Blank => RX_CSUM_BLANK | RX_DATA_VALIDATED,
        }
    }
}

/// How a packet is to be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GsoKind {
    /// TCP over IPv4 (XEN_NETIF_GSO_TYPE_TCPV4).
    TcpV4 = 1,
    /// TCP over IPv6 (XEN_NETIF_GSO_TYPE_TCPV6).
    TcpV6 = 2,
}

/// Segmentation that a packet needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// TCP over IPv4 or IPv6.
    pub kind: GsoKind,
    /// Largest payload of a segment, in bytes; not 0.
    pub size: u16,
}

/// A packet's hash, by which it was given to its queue ([`ctrl`](super::ctrl)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketHash {
    /// What it is of, as the number of the bit in [`SET_HASH_FLAGS`](super::ctrl::SET_HASH_FLAGS).
    pub kind: u8,
    /// [`ALGORITHM_TOEPLITZ`](super::ctrl::ALGORITHM_TOEPLITZ).
    pub algorithm: u8,
    /// Its value.
    pub value: u32,
}

/// An extra info.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extra {
    /// Says how a large frame is cut into segments.
    Gso(Gso),
    /// Let packets to this multicast address pass.
    MulticastAdd([u8; 6]),
    /// Do not let packets to this multicast address pass.
    MulticastDel([u8; 6]),
    /// The packet's hash.
    Hash(PacketHash),
    /// A received packet begins so many bytes behind the beginning of its page.
    Headroom(u16),
}

impl Extra {
    /// The extra info in a slot's bytes, and whether another one follows.
    ///
    /// # Errors
    /// [`XenError::ExtraType`] and [`XenError::Gso`] for what is not known.
    #[inline]
    pub fn parse(bytes: &[u8; SLOT_BYTES]) -> Result<(Self, bool), XenError> {
        let address = || {
            let mut address = [0; 6];
            address.copy_from_slice(&bytes[field::ADDRESS]);
            address
        };
        let extra = match bytes[field::TYPE] {
            EXTRA_GSO => {
                let (size, kind) = (word(bytes, field::GSO_SIZE), bytes[field::GSO_KIND]);
                let kind = match kind {
                    1 if size > 0 => GsoKind::TcpV4,
                    2 if size > 0 => GsoKind::TcpV6,
                    _ => return Err(XenError::Gso { kind, size }),
                };
                Extra::Gso(Gso { kind, size })
            }
            EXTRA_MCAST_ADD => Extra::MulticastAdd(address()),
            EXTRA_MCAST_DEL => Extra::MulticastDel(address()),
            EXTRA_HASH => Extra::Hash(PacketHash {
                kind: bytes[field::HASH_KIND],
                algorithm: bytes[field::HASH_ALGORITHM],
                value: long(bytes, field::HASH_VALUE),
            }),
            EXTRA_XDP => Extra::Headroom(word(bytes, field::HEADROOM)),
            got => return Err(XenError::ExtraType { got }),
        };
        Ok((extra, bytes[field::EXTRA_FLAGS] & EXTRA_MORE != 0))
    }

    /// Its bytes; `more` says that another one follows.
    #[inline]
    pub fn emit(&self, more: bool) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        bytes[field::EXTRA_FLAGS] = if more { EXTRA_MORE } else { 0 };
        match self {
            Extra::Gso(gso) => {
                bytes[field::TYPE] = EXTRA_GSO;
                bytes[field::GSO_SIZE].copy_from_slice(&gso.size.to_le_bytes());
                bytes[field::GSO_KIND] = gso.kind as u8;
            }
            Extra::MulticastAdd(address) => {
                bytes[field::TYPE] = EXTRA_MCAST_ADD;
                bytes[field::ADDRESS].copy_from_slice(address);
            }
            Extra::MulticastDel(address) => {
                bytes[field::TYPE] = EXTRA_MCAST_DEL;
                bytes[field::ADDRESS].copy_from_slice(address);
            }
            Extra::Hash(hash) => {
                bytes[field::TYPE] = EXTRA_HASH;
                (bytes[field::HASH_KIND], bytes[field::HASH_ALGORITHM]) = (hash.kind, hash.algorithm);
                bytes[field::HASH_VALUE].copy_from_slice(&hash.value.to_le_bytes());
            }
            Extra::Headroom(len) => {
                bytes[field::TYPE] = EXTRA_XDP;
                bytes[field::HEADROOM].copy_from_slice(&len.to_le_bytes());
            }
        }
        bytes
    }
}

impl fmt::Display for Extra {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Extra::Gso(gso) => write!(f, "extra gso {:?} size={}", gso.kind, gso.size),
            Extra::MulticastAdd(address) => write!(f, "extra multicast add {address:02x?}"),
            Extra::MulticastDel(address) => write!(f, "extra multicast del {address:02x?}"),
            Extra::Hash(hash) => write!(f, "extra hash {:#x} of kind {}", hash.value, hash.kind),
            Extra::Headroom(len) => write!(f, "extra headroom {len}"),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::string::ToString;

    /// In a buffer full of 0xa5, so that a byte that is not written shows.
    fn within<const N: usize>(bytes: [u8; N]) -> [u8; 16] {
        let mut all = [0xa5; 16];
        all[2..2 + N].copy_from_slice(&bytes);
        all
    }

    #[test]
    fn golden_requests_and_responses_both_ways() {
        let golden = [0x21, 0x03, 0, 0, 0x42, 0, 0x0d, 0, 0x07, 0x01, 0xea, 0x05];
        let request = TxRequest {
            gref: 0x321,
            offset: 0x42,
            flags: TX_CSUM_BLANK | TX_MORE_DATA | TX_EXTRA_INFO,
            id: 0x107,
            size: 1514,
        };
        assert_eq!((TxRequest::parse(&golden), within(request.emit())), (request, within(golden)));
        assert_eq!(request.to_string(), "tx request id=263 gref=801 offset=66 size=1514 flags=0xd");

        let (golden, response) = ([0x07, 0x01, 0xff, 0xff], TxResponse { id: 0x107, status: RSP_ERROR });
        assert_eq!((TxResponse::parse(&golden), response.emit()), (response, golden));
        assert_eq!(response.to_string(), "tx response id=263 status=-1");

        let (golden, request) = ([0xfe, 0, 0, 0, 0x00, 0x02, 0x01, 0], RxRequest { id: 254, gref: 0x1_0200 });
        assert_eq!((RxRequest::parse(&golden), within(request.emit())), (request, within(golden)));
        assert_eq!(request.to_string(), "rx request id=254 gref=66048");

        let golden = [0xfe, 0, 0x40, 0, 0x0f, 0, 0x00, 0x10];
        let flags = RX_DATA_VALIDATED | RX_CSUM_BLANK | RX_MORE_DATA | RX_EXTRA_INFO;
        let response = RxResponse { id: 254, offset: 64, flags, status: 4096 };
        assert_eq!((RxResponse::parse(&golden), within(response.emit())), (response, within(golden)));
        assert_eq!(response.to_string(), "rx response id=254 offset=64 status=4096 flags=0xf");
    }

    #[test]
    fn golden_extra_infos_both_ways() {
        let address = [0x01, 0x00, 0x5e, 0, 0, 0xfb];
        let gso = |kind, size| Extra::Gso(Gso { kind, size });
        for (golden, extra, more, text) in [
            ([1, 0, 0xa8, 0x05, 1, 0, 0, 0], gso(GsoKind::TcpV4, 1448), false, "extra gso TcpV4 size=1448"),
            ([1, 1, 0x94, 0x05, 2, 0, 0, 0], gso(GsoKind::TcpV6, 1428), true, "extra gso TcpV6 size=1428"),
            (
                [2, 0, 1, 0, 0x5e, 0, 0, 0xfb],
                Extra::MulticastAdd(address),
                false,
                "extra multicast add [01, 00, 5e, 00, 00, fb]",
            ),
            (
                [3, 1, 1, 0, 0x5e, 0, 0, 0xfb],
                Extra::MulticastDel(address),
                true,
                "extra multicast del [01, 00, 5e, 00, 00, fb]",
            ),
            (
                [4, 1, 3, 1, 0x78, 0xc1, 0xcc, 0x51],
                Extra::Hash(PacketHash { kind: 3, algorithm: 1, value: 0x51cc_c178 }),
                true,
                "extra hash 0x51ccc178 of kind 3",
            ),
            ([5, 1, 0x00, 0x01, 0, 0, 0, 0], Extra::Headroom(256), true, "extra headroom 256"),
        ] {
            assert_eq!(Extra::parse(&golden), Ok((extra, more)));
            assert_eq!(within(extra.emit(more)), within(golden));
            assert_eq!(extra.to_string(), text);
        }
    }

    #[test]
    fn extra_infos_that_nobody_defined_are_refused() {
        for got in (0..=255u8).filter(|got| !(1..=5).contains(got)) {
            assert_eq!(Extra::parse(&[got, 0, 1, 1, 1, 0, 0, 0]), Err(XenError::ExtraType { got }));
        }
        for kind in (0..=255u8).filter(|kind| !(1..=2).contains(kind)) {
            let error = XenError::Gso { kind, size: 1448 };
            assert_eq!(Extra::parse(&[1, 0, 0xa8, 5, kind, 0, 0, 0]), Err(error));
        }
        assert_eq!(Extra::parse(&[1, 0, 0, 0, 1, 0, 0, 0]), Err(XenError::Gso { kind: 1, size: 0 }));
    }

    #[test]
    fn checksum_flags_are_what_linux_sends() {
        assert_eq!((TX_CSUM_BLANK, TX_DATA_VALIDATED, RX_DATA_VALIDATED, RX_CSUM_BLANK), (1, 2, 1, 2));
        for checksum in [Checksum::None, Checksum::Valid, Checksum::Blank] {
            assert_eq!(Checksum::from_tx(checksum.tx_flags()), checksum);
            assert_eq!(Checksum::from_rx(checksum.rx_flags()), checksum);
        }
        assert_eq!(Checksum::from_tx(TX_CSUM_BLANK), Checksum::Blank);
    }
}
