//! Offload state to and from `virtio_net_hdr` (VirtIO 1.3 §5.1.6), which virtio-net guests, taps
//! with `IFF_VNET_HDR` and packet sockets with `PACKET_VNET_HDR` all put before a frame, in little
//! endian.
//!
//! What comes from a peer is checked against the frame's own length here, once; behind this door an
//! [`Offload`] can be relied on (CVE-2024-11614 of another switch was a `csum_start` beyond the
//! frame).

use crate::drop::Reason;
use crate::frame::{Checksum, ETHERNET_HEADER_BYTES, MAX_FRAME_BYTES, Offload, SegmentKind, Segmentation};

/// Bytes of the header without `num_buffers`.
pub const VNET_HEADER_BYTES: usize = 10;

const FLAG_NEEDS_CSUM: u8 = 1;
const FLAG_DATA_VALID: u8 = 2;
const GSO_NONE: u8 = 0;
const GSO_TCPV4: u8 = 1;
const GSO_TCPV6: u8 = 4;
const GSO_UDP_L4: u8 = 5;
const GSO_ECN: u8 = 0x80;

impl Offload {
    /// The state that a peer's header gives a frame of `frame_bytes`.
    ///
    /// # Errors
    /// [`Reason::BadOffload`] where its fields do not fit the frame, or name a segmentation that
    /// was not offered.
    #[inline]
    pub fn from_vnet(header: &[u8; VNET_HEADER_BYTES], frame_bytes: usize) -> Result<Offload, Reason> {
        // The ordinary small frame: no flag, no segmentation.
        if header[0] == 0 && header[1] == GSO_NONE {
            return Ok(Offload::NONE);
        }
        Self::from_vnet_slow(header, frame_bytes)
    }

    #[cold]
    fn from_vnet_slow(header: &[u8; VNET_HEADER_BYTES], frame_bytes: usize) -> Result<Offload, Reason> {
        let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let (flags, gso) = (header[0], header[1]);
        let checksum = if flags & FLAG_NEEDS_CSUM != 0 {
            let (start, offset) = (word(6), word(8));
            let field_end = start as usize + offset as usize + 2;
            if (start as usize) < ETHERNET_HEADER_BYTES || field_end > frame_bytes {
                return Err(Reason::BadOffload);
            }
            Checksum::Partial { start, offset }
        } else if flags & FLAG_DATA_VALID != 0 {
            Checksum::Valid
        } else {
            Checksum::Unverified
        };
        let segmentation = match gso & !GSO_ECN {
            GSO_NONE => None,
            kind @ (GSO_TCPV4 | GSO_TCPV6 | GSO_UDP_L4) => {
                let (header_bytes, size) = (word(2), word(4));
                // A segmented frame has a partial checksum by the specification's own words
                // (§5.1.6.2.2).
                let partial = matches!(checksum, Checksum::Partial { .. });
                // Datagrams have no flag of TCP's.
                let is_marked = kind == GSO_UDP_L4 && gso & GSO_ECN != 0;
                if !partial || size == 0 || header_bytes as usize > frame_bytes || is_marked {
                    return Err(Reason::BadOffload);
                }
                let kind = match kind {
                    GSO_TCPV4 => SegmentKind::Tcp4,
                    GSO_TCPV6 => SegmentKind::Tcp6,
                    _ => SegmentKind::Udp,
                };
                Some(Segmentation { kind, ecn: gso & GSO_ECN != 0, size, header_bytes })
            }
            _ => return Err(Reason::BadOffload),
        };
        Ok(Offload { checksum, segmentation })
    }

    /// As [`Offload::from_vnet`], from a guest: also the frame's length is judged, the guest's word
    /// that a checksum is right is worth nothing to others, and it was not offered to send several
    /// datagrams as one frame.
    ///
    /// # Errors
    /// [`Reason::Runt`], [`Reason::TooLong`], [`Reason::BadOffload`]; `None` for a header is a
    /// runt.
    #[inline]
    pub fn from_guest(header: Option<[u8; VNET_HEADER_BYTES]>, frame_bytes: usize) -> Result<Offload, Reason> {
        match header {
            Some(header) if (ETHERNET_HEADER_BYTES..=MAX_FRAME_BYTES).contains(&frame_bytes) => {
                let mut offload = Offload::from_vnet(&header, frame_bytes)?;
                if offload.segmentation.is_some_and(|segmentation| segmentation.kind == SegmentKind::Udp) {
                    return Err(Reason::BadOffload);
                }
                if offload.checksum == Checksum::Valid {
                    offload.checksum = Checksum::Unverified;
                }
                Ok(offload)
            }
            Some(_) if frame_bytes > MAX_FRAME_BYTES => Err(Reason::TooLong),
            _ => Err(Reason::Runt),
        }
    }

    /// The header for a peer that takes these offloads.
    #[inline]
    pub fn to_vnet(&self) -> [u8; VNET_HEADER_BYTES] {
        let mut header = [0; VNET_HEADER_BYTES];
        match self.checksum {
            Checksum::Unverified => {}
            Checksum::Valid => header[0] = FLAG_DATA_VALID,
            Checksum::Partial { start, offset } => {
                header[0] = FLAG_NEEDS_CSUM;
                header[6..8].copy_from_slice(&start.to_le_bytes());
                header[8..10].copy_from_slice(&offset.to_le_bytes());
            }
        }
        if let Some(s) = self.segmentation {
            let kind = match s.kind {
                SegmentKind::Tcp4 => GSO_TCPV4,
                SegmentKind::Tcp6 => GSO_TCPV6,
                SegmentKind::Udp => GSO_UDP_L4,
            };
            header[1] = kind | if s.ecn { GSO_ECN } else { 0 };
            header[2..4].copy_from_slice(&s.header_bytes.to_le_bytes());
            header[4..6].copy_from_slice(&s.size.to_le_bytes());
        }
        header
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Datagrams of 64 bytes each.
    const DATAGRAMS: [u8; 10] = [1, 5, 42, 0, 64, 0, 34, 0, 6, 0];

    #[test]
    fn a_guest_may_not_send_what_it_was_not_offered() {
        assert!(Offload::from_vnet(&DATAGRAMS, 9000).is_ok());
        assert_eq!(Offload::from_guest(Some(DATAGRAMS), 9000), Err(Reason::BadOffload));
    }

    #[test]
    fn golden_headers_go_both_ways() {
        let partial = Checksum::Partial { start: 34, offset: 16 };
        let tso = Some(Segmentation { kind: SegmentKind::Tcp4, ecn: false, size: 1448, header_bytes: 66 });
        let uso = Some(Segmentation { kind: SegmentKind::Udp, ecn: false, size: 64, header_bytes: 42 });
        let cases = [
            (Offload::NONE, [0; 10]),
            (Offload { checksum: Checksum::Valid, segmentation: None }, [2, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            (Offload { checksum: partial, segmentation: None }, [1, 0, 0, 0, 0, 0, 34, 0, 16, 0]),
            (Offload { checksum: partial, segmentation: tso }, [1, 1, 66, 0, 0xa8, 5, 34, 0, 16, 0]),
            (Offload { checksum: Checksum::Partial { start: 34, offset: 6 }, segmentation: uso }, DATAGRAMS),
        ];
        for (offload, bytes) in cases {
            assert_eq!(offload.to_vnet(), bytes);
            assert_eq!(Offload::from_vnet(&bytes, 9000), Ok(offload));
        }
    }

    #[test]
    fn fields_that_do_not_fit_the_frame_are_refused() {
        let refused: &[[u8; 10]] = &[
            [1, 0, 0, 0, 0, 0, 90, 0, 16, 0],           // the checksum field lies past the end
            [1, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], // far past it
            [1, 0, 0, 0, 0, 0, 4, 0, 16, 0],            // the sum would start inside the Ethernet header
            [0, 1, 54, 0, 0xa8, 5, 0, 0, 0, 0],         // segmentation without a partial checksum
            [1, 1, 54, 0, 0, 0, 34, 0, 16, 0],          // segments of no byte
            [1, 1, 0xff, 0xff, 0xa8, 5, 34, 0, 16, 0],  // headers longer than the frame
            [1, 3, 54, 0, 0xa8, 5, 34, 0, 16, 0],       // UFO, which was not offered
            [1, 0x85, 42, 0, 64, 0, 34, 0, 6, 0],       // datagrams with a flag of TCP's
            [1, 0x7f, 54, 0, 0xa8, 5, 34, 0, 16, 0],    // no such kind
        ];
        for header in refused {
            assert_eq!(Offload::from_vnet(header, 100), Err(Reason::BadOffload), "{header:?}");
        }
    }
}
