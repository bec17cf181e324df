//! Segments of TCP over IPv6, put together into one packet that the backend cuts again.
//!
//! The stack cuts TCP over IPv6 itself (smoltcp 0.14 drops what is longer than the MTU there). It
//! gives the segments of a connection one after the other, and each would cost the backend and the
//! receiver a packet. So a segment is held until the next frame or the end of the turn. A segment
//! that continues it is appended.
//!
//! Only what the receiver would put together as well is appended: the same headers but for the
//! length, the sequence number, the sum and PSH, which ends the packet. All segments but the last
//! have the same length.

use alloc::vec::Vec;
use core::num::NonZeroU16;

const TYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const PAYLOAD_LENGTH: usize = 18;
const NEXT_HEADER: usize = 20;
const TCP: usize = 54;
const SEQUENCE: usize = TCP + 4;
const ACKNOWLEDGEMENT: usize = TCP + 8;
const FLAGS: usize = TCP + 13;
const CHECKSUM: usize = TCP + 16;
const TCP_HEADER_BYTES: usize = 20;
const PROTOCOL_TCP: u8 = 6;
const PSH: u8 = 0x08;
const ACK: u8 = 0x10;

/// The packet that is held.
pub(super) struct Segments {
    frame: Vec<u8>,
    /// Bytes of it; 0 where none is held.
    len: usize,
    /// The vif that it is for.
    front: usize,
    /// Bytes of its headers, and of the payload of each segment but the last.
    header: usize,
    segment: usize,
    /// The last segment was shorter, or had PSH.
    is_complete: bool,
}

/// Bytes of the headers of a segment with nothing but payload; `None` for any other frame.
fn header_of(frame: &[u8]) -> Option<usize> {
    let header = TCP + usize::from(frame.get(TCP + 12)? >> 4) * 4;
    let length = usize::from(u16::from_be_bytes([frame[PAYLOAD_LENGTH], frame[PAYLOAD_LENGTH + 1]]));
    let is_data = frame[12..14] == TYPE_IPV6
        && frame[NEXT_HEADER] == PROTOCOL_TCP
        && header >= TCP + TCP_HEADER_BYTES
        && frame.len() > header
        && frame.len() - TCP == length
        && frame[FLAGS] & !PSH == ACK;
    is_data.then_some(header)
}

fn sequence(frame: &[u8]) -> u32 {
    u32::from_be_bytes([frame[SEQUENCE], frame[SEQUENCE + 1], frame[SEQUENCE + 2], frame[SEQUENCE + 3]])
}

impl Segments {
    /// In this memory, which has the length of the largest packet.
    pub(super) fn new(frame: Vec<u8>) -> Segments {
        Segments { frame, len: 0, front: 0, header: 0, segment: 0, is_complete: false }
    }

    /// The vif of the packet that is held.
    pub(super) fn front(&self) -> Option<usize> {
        (self.len > 0).then_some(self.front)
    }

    /// Holds a frame, or appends it to what is held. False where it is to be sent by itself, after
    /// what is held.
    pub(super) fn add(&mut self, front: usize, frame: &[u8]) -> bool {
        let Some(header) = header_of(frame) else { return false };
        let payload = frame.len() - header;
        if self.len == 0 {
            self.frame[..frame.len()].copy_from_slice(frame);
            (self.len, self.front, self.header, self.segment) = (frame.len(), front, header, payload);
            self.is_complete = frame[FLAGS] & PSH != 0;
            return true;
        }
        let held = &self.frame[..self.len];
        let is_next = front == self.front
            && !self.is_complete
            && header == self.header
            && payload <= self.segment
            && self.len + payload <= self.frame.len()
            && sequence(frame) == sequence(held).wrapping_add((self.len - self.header) as u32)
            && [
                0..PAYLOAD_LENGTH,
                NEXT_HEADER..SEQUENCE,
                ACKNOWLEDGEMENT..FLAGS,
                FLAGS + 1..CHECKSUM,
                CHECKSUM + 2..header,
            ]
            .into_iter()
            .all(|range| frame[range.clone()] == held[range]);
        if is_next {
            self.frame[self.len..self.len + payload].copy_from_slice(&frame[header..]);
            self.len += payload;
            self.frame[FLAGS] |= frame[FLAGS] & PSH;
            self.is_complete = frame[FLAGS] & PSH != 0 || payload < self.segment;
        }
        is_next
    }

    /// The packet that was held, for which vif it is, and how it is to be cut.
    pub(super) fn take(&mut self) -> Option<(usize, &mut [u8], Option<NonZeroU16>)> {
        let len = core::mem::take(&mut self.len);
        if len == 0 {
            return None;
        }
        let frame = &mut self.frame[..len];
        frame[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 2].copy_from_slice(&((len - TCP) as u16).to_be_bytes());
        let is_one = len - self.header <= self.segment;
        Some((self.front, frame, NonZeroU16::new(self.segment as u16).filter(|_| !is_one)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: usize = 1428;

    /// A segment from this byte of the connection on.
    fn segment(from: u32, payload: usize, flags: u8) -> Vec<u8> {
        let mut frame = std::vec![0; 74 + payload];
        frame[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
        frame[PAYLOAD_LENGTH..NEXT_HEADER].copy_from_slice(&((20 + payload) as u16).to_be_bytes());
        frame[NEXT_HEADER] = PROTOCOL_TCP;
        frame[SEQUENCE..ACKNOWLEDGEMENT].copy_from_slice(&from.to_be_bytes());
        frame[TCP + 12] = 0x50;
        frame[FLAGS] = flags;
        frame[74..].iter_mut().zip(0..).for_each(|(byte, at): (&mut u8, u32)| *byte = from.wrapping_add(at) as u8);
        frame
    }

    fn segments() -> Segments {
        Segments::new(std::vec![0; 61_440])
    }

    #[test]
    fn segments_of_a_connection_become_one_packet() {
        let mut held = segments();
        // Beyond the end of the sequence numbers.
        let first = 0u32.wrapping_sub(MSS as u32 + 5);
        for at in 0..10u32 {
            assert!(held.add(0, &segment(first.wrapping_add(at * MSS as u32), MSS, ACK)));
        }
        assert!(held.add(0, &segment(first.wrapping_add(10 * MSS as u32), 9, ACK | PSH)));
        // A packet with PSH has ended.
        assert!(!held.add(0, &segment(first.wrapping_add(10 * MSS as u32 + 9), MSS, ACK)));
        let (front, packet, cut) = held.take().unwrap();
        assert_eq!((front, cut), (0, NonZeroU16::new(MSS as u16)));
        assert_eq!(packet, segment(first, 10 * MSS + 9, ACK | PSH));
        assert!(held.take().is_none() && held.front().is_none());
    }

    #[test]
    fn one_segment_stays_as_it_is() {
        let mut held = segments();
        assert!(held.add(1, &segment(7, MSS, ACK)) && held.front() == Some(1));
        let (front, packet, cut) = held.take().unwrap();
        assert_eq!((front, cut), (1, None));
        assert_eq!(packet, segment(7, MSS, ACK));
    }

    #[test]
    fn no_packet_is_longer_than_its_memory() {
        let mut held = segments();
        let added = (0..60u32).take_while(|at| held.add(0, &segment(at * MSS as u32, MSS, ACK))).count();
        assert_eq!(added, (61_440 - 74) / MSS);
    }

    #[test]
    fn what_does_not_continue_a_packet_is_not_appended() {
        let next = segment(MSS as u32, MSS, ACK);
        let with = |at: usize, byte: u8| {
            let mut frame = next.clone();
            frame[at] ^= byte;
            frame
        };
        let mut others = std::vec![segment(MSS as u32 + 1, MSS, ACK), segment(MSS as u32, MSS + 1, ACK)];
        // Addresses, flow label, hop limit, ports, acknowledgement, header length, window, urgent
        // pointer.
        others.extend([0, 6, 15, 21, 22, 53, 54, 57, 62, 68, 72].map(|at| with(at, 1)));
        // FIN, SYN, RST, URG, ECE, CWR; and without ACK.
        others.extend([1, 2, 4, 0x20, 0x40, 0x80, 0x10].map(|flag| with(FLAGS, flag)));
        others.extend([with(NEXT_HEADER, 1), with(TCP + 12, 0x10), segment(MSS as u32, 0, ACK), next[..60].to_vec()]);
        for other in others {
            let mut held = segments();
            assert!(held.add(0, &segment(0, MSS, ACK)));
            assert!(!held.add(0, &other), "{:?}", &other[..60]);
            assert_eq!(held.take().unwrap().1, segment(0, MSS, ACK));
        }
        let mut held = segments();
        assert!(held.add(0, &segment(0, MSS, ACK)) && !held.add(1, &next), "another vif");
        // One that was shorter than the first ends the packet.
        assert!(held.add(0, &segment(MSS as u32, 100, ACK)) && !held.add(0, &segment(MSS as u32 + 100, 100, ACK)));
    }
}
