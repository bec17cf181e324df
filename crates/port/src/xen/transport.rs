//! Where a packet's TCP or UDP checksum is. Xen's rings only say that it is blank; the switch wants
//! to know where it goes.
//!
//! Of a guest, a packet with VLAN tags is taken too. To a guest none goes whose checksum is blank:
//! Linux's frontend finds no checksum behind a tag (`skb_checksum_setup`) and drops the frame.

use tombolo_ring::xen::{Checksum as RingChecksum, Gso, GsoKind};
use tombolo_switch::drop::Reason;
use tombolo_switch::frame::{Checksum, Offload, SegmentKind, Segmentation};

const TCP: u8 = 6;
const UDP: u8 = 17;
/// Extension headers of IPv6 that are stepped over before a packet is given up.
const MAX_EXTENSIONS: usize = 8;

/// A packet's TCP or UDP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Transport {
    kind: SegmentKind,
    protocol: u8,
    /// From the start of the frame, in bytes.
    start: usize,
}

const fn is_tag(kind: u16) -> bool {
    matches!(kind, 0x8100 | 0x88a8)
}

fn is_tagged(frame: &[u8]) -> bool {
    frame.get(12..14).is_some_and(|kind| is_tag(u16::from_be_bytes([kind[0], kind[1]])))
}

/// Finds it; `None` where there is none, or not in the first bytes.
fn transport(frame: &[u8]) -> Option<Transport> {
    let word = |at: usize| Some(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?]));
    let mut at = 12;
    while is_tag(word(at)?) {
        at += 4;
    }
    let ip = at + 2;
    match word(at)? {
        0x0800 => {
            let fragment = word(ip + 6)? & 0x3fff != 0;
            let header = usize::from(frame.get(ip)? & 15) * 4;
            let protocol = *frame.get(ip + 9)?;
            let good = header >= 20 && !fragment && matches!(protocol, TCP | UDP);
            good.then_some(Transport { kind: SegmentKind::Tcp4, protocol, start: ip + header })
        }
        0x86dd => {
            let (mut protocol, mut start) = (*frame.get(ip + 6)?, ip + 40);
            for _ in 0..MAX_EXTENSIONS {
                match protocol {
                    TCP | UDP => return Some(Transport { kind: SegmentKind::Tcp6, protocol, start }),
                    // Hop-by-hop, routing, destination options: type of the next, length in units
                    // of 8 bytes without the first.
                    0 | 43 | 60 => {
                        protocol = *frame.get(start)?;
                        start += 8 + usize::from(*frame.get(start + 1)?) * 8;
                    }
                    _ => return None,
                }
            }
            None
        }
        _ => None,
    }
}

impl Transport {
    /// Where the checksum goes, from the header's start.
    fn checksum_offset(&self) -> u16 {
        if self.protocol == TCP { 16 } else { 6 }
    }
}

/// The offload state of a frame from a guest.
///
/// # Errors
/// [`Reason::Runt`], [`Reason::TooLong`]; [`Reason::BadOffload`] where the frame has no checksum
/// field, or is not what its segmentation says.
pub(super) fn from_ring(frame: &[u8], checksum: RingChecksum, gso: Option<Gso>) -> Result<Offload, Reason> {
    if checksum != RingChecksum::Blank {
        return Offload::from_guest(Some(Offload::NONE.to_vnet()), frame.len());
    }
    let transport = transport(frame).ok_or(Reason::BadOffload)?;
    let start = u16::try_from(transport.start).map_err(|_| Reason::BadOffload)?;
    let segmentation = match gso {
        None => None,
        Some(Gso { kind, size }) => {
            let kind = if kind == GsoKind::TcpV4 { SegmentKind::Tcp4 } else { SegmentKind::Tcp6 };
            let (words, flags) =
                frame.get(transport.start + 12).zip(frame.get(transport.start + 13)).ok_or(Reason::BadOffload)?;
            if transport.protocol != TCP || transport.kind != kind {
                return Err(Reason::BadOffload);
            }
            // Xen's rings do not tell the flag of congestion; TCP's own CWR flag does.
            let (header_bytes, ecn) = (start + u16::from(words >> 4) * 4, flags & 0x80 != 0);
            Some(Segmentation { kind, ecn, size, header_bytes })
        }
    };
    let checksum = Checksum::Partial { start, offset: transport.checksum_offset() };
    Offload::from_guest(Some(Offload { checksum, segmentation }.to_vnet()), frame.len())
}

/// What a ring is to say of a frame whose first bytes are `head`.
///
/// # Errors
/// [`Reason::NotTransformable`] where the receiver would look for the checksum at another place
/// than it is: inside a tunnel, or behind a VLAN tag, for which the port's capabilities have the
/// switch finish the frame.
pub(super) fn to_ring(head: &[u8], offload: &Offload) -> Result<(RingChecksum, Option<Gso>), Reason> {
    let checksum = match offload.checksum {
        Checksum::Unverified => RingChecksum::None,
        Checksum::Valid => RingChecksum::Valid,
        Checksum::Partial { start, offset } => match transport(head) {
            Some(found)
                if !is_tagged(head) && found.start == usize::from(start) && found.checksum_offset() == offset =>
            {
                RingChecksum::Blank
            }
            _ => return Err(Reason::NotTransformable),
        },
    };
    let gso = match offload.segmentation {
        None => None,
        Some(Segmentation { kind: SegmentKind::Tcp4, size, .. }) => Some(Gso { kind: GsoKind::TcpV4, size }),
        Some(Segmentation { kind: SegmentKind::Tcp6, size, .. }) => Some(Gso { kind: GsoKind::TcpV6, size }),
        // Never said to be taken.
        Some(Segmentation { kind: SegmentKind::Udp, .. }) => return Err(Reason::NotTransformable),
    };
    Ok((checksum, gso))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::partial_frame;

    #[test]
    fn what_a_ring_says_becomes_what_the_switch_says_and_back() {
        for (kind, segment) in
            [(SegmentKind::Tcp4, None), (SegmentKind::Tcp4, Some(1448)), (SegmentKind::Tcp6, Some(1428))]
        {
            let frame = partial_frame(1, 5000, kind, segment);
            let (checksum, gso) = to_ring(&frame.bytes[..128], &frame.offload).unwrap();
            assert_eq!(checksum, RingChecksum::Blank);
            assert_eq!(from_ring(&frame.bytes, checksum, gso), Ok(frame.offload), "{kind:?} {segment:?}");
            // With a VLAN tag all is four bytes further.
            let mut tagged = frame.bytes.clone();
            tagged.splice(12..12, [0x81, 0, 0, 7]);
            let offload = from_ring(&tagged, checksum, gso).unwrap();
            let Checksum::Partial { start, .. } = frame.offload.checksum else { panic!("partial") };
            assert_eq!(offload.checksum, Checksum::Partial { start: start + 4, offset: 16 });
            assert_eq!(to_ring(&tagged[..128], &offload), Err(Reason::NotTransformable), "{kind:?} {segment:?}");
            for len in 0..transport(&frame.bytes).unwrap().start {
                assert!(from_ring(&frame.bytes[..len], checksum, gso).is_err(), "{len}");
            }
        }
    }

    #[test]
    fn frames_that_are_not_what_the_ring_says_are_refused() {
        let frame = partial_frame(1, 5000, SegmentKind::Tcp4, Some(1448));
        let gso = |kind| Some(Gso { kind, size: 1448 });
        let bad = |bytes: &[u8], gso| assert_eq!(from_ring(bytes, RingChecksum::Blank, gso), Err(Reason::BadOffload));
        bad(&frame.bytes, gso(GsoKind::TcpV6));
        for (at, value) in [(12, 0x99), (14, 0x44), (20, 0x20), (23, 1)] {
            let mut bytes = frame.bytes.clone();
            bytes[at] = value;
            bad(&bytes, gso(GsoKind::TcpV4));
        }
        let mut udp = frame.bytes.clone();
        udp[23] = UDP;
        bad(&udp, gso(GsoKind::TcpV4));
        assert_eq!(
            from_ring(&udp, RingChecksum::Blank, None).unwrap().checksum,
            Checksum::Partial { start: 34, offset: 6 }
        );
        // A guest's word that a checksum is right is worth nothing to others.
        assert_eq!(from_ring(&frame.bytes, RingChecksum::Valid, None), Ok(Offload::NONE));
        assert_eq!(from_ring(&frame.bytes[..13], RingChecksum::None, None), Err(Reason::Runt));
        // A checksum inside of a tunnel.
        let inner = Offload { checksum: Checksum::Partial { start: 84, offset: 16 }, segmentation: None };
        assert_eq!(to_ring(&frame.bytes, &inner), Err(Reason::NotTransformable));
    }

    #[test]
    fn extension_headers_of_ipv6_are_stepped_over() {
        let frame = partial_frame(1, 500, SegmentKind::Tcp6, None);
        let mut bytes = frame.bytes.clone();
        bytes[20] = 60;
        bytes.splice(54..54, [TCP, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(transport(&bytes).unwrap().start, 70);
        bytes[54] = 60;
        assert_eq!(transport(&bytes), None, "a chain that ends nowhere");
    }
}
