//! Segments that a network merges for a destination which takes them as one frame.

use std::collections::BTreeMap;
use std::ops::Range;

use tombolo_ring::checksum;
use tombolo_ring::mem::Foreign;
use tombolo_switch::drop::Drops;
use tombolo_switch::frame::{Batch, Checksum, ETHERNET_HEADER_BYTES, Offload, SegmentKind};
use tombolo_switch::merge::{MAX_COUNT, Merger};
use tombolo_switch::offload::{Transformer, Work};
use tombolo_switch::port::{Caps, Sent};

use crate::{Behaviour, records};

const IP: usize = ETHERNET_HEADER_BYTES;
const TCP: u8 = 6;
const UDP: u8 = 17;
const DONT_FRAGMENT: u8 = 0x40;
/// Frames of one turn.
const MAX_FRAMES: usize = 128;
/// How often a record's frame follows itself, by two bits of the record's flags.
const TIMES: [usize; 4] = [1, 2, 5, 40];

/// A TCP or UDP packet that the merger may look at: where its header begins, and where the parts
/// are that name its stream.
struct Packet {
    is_v6: bool,
    protocol: u8,
    transport: usize,
    /// Addresses; the ports are the first four bytes of the transport header.
    addresses: Range<usize>,
}

impl Packet {
    fn of(frame: &[u8]) -> Option<Packet> {
        let (ethertype, first) = (frame.get(12..IP)?, *frame.get(IP)?);
        let (is_v6, protocol_at, transport, addresses) = match (ethertype, first) {
            ([0x08, 0x00], 0x45) => (false, IP + 9, IP + 20, IP + 12..IP + 20),
            ([0x86, 0xdd], 0x60..0x70) => (true, IP + 6, IP + 40, IP + 8..IP + 40),
            _ => return None,
        };
        let protocol = *frame.get(protocol_at)?;
        let header_bytes = if protocol == TCP { 20 } else { 8 };
        let is_whole = [TCP, UDP].contains(&protocol) && frame.len() >= transport + header_bytes;
        is_whole.then_some(Packet { is_v6, protocol, transport, addresses })
    }

    fn sum_at(&self) -> usize {
        self.transport + if self.protocol == TCP { 16 } else { 6 }
    }

    /// Makes lengths and checksums those of a packet that fills its frame.
    fn repair(&self, frame: &mut [u8]) {
        let length = frame.len() - self.transport;
        let length = u16::try_from(length).expect("an input is shorter than a packet may be");
        if self.protocol == UDP {
            frame[self.transport + 4..][..2].copy_from_slice(&length.to_be_bytes());
        }
        match self.is_v6 {
            true => frame[IP + 4..][..2].copy_from_slice(&length.to_be_bytes()),
            false => {
                frame[IP + 2..][..2].copy_from_slice(&(length + 20).to_be_bytes());
                frame[IP + 10..][..2].fill(0);
                let sum = !checksum::sum(&frame[IP..IP + 20]);
                frame[IP + 10..][..2].copy_from_slice(&sum.to_be_bytes());
            }
        }
        let at = self.sum_at();
        frame[at..][..2].fill(0);
        let pseudo = checksum::add(checksum::sum(&frame[self.addresses.clone()]), u16::from(self.protocol));
        let sum = !checksum::add(checksum::add(pseudo, length), checksum::sum(&frame[self.transport..]));
        let sum = if self.protocol == UDP && sum == 0 { 0xffff } else { sum };
        frame[at..][..2].copy_from_slice(&sum.to_be_bytes());
    }

    /// Makes the frame the one that follows it in its stream.
    fn advance(&self, frame: &mut [u8]) {
        let add = |field: &mut [u8], n: u32| {
            let number = field.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)).wrapping_add(n);
            let bytes = number.to_be_bytes();
            field.copy_from_slice(&bytes[4 - field.len()..]);
        };
        if !self.is_v6 {
            add(&mut frame[IP + 4..IP + 6], 1);
        }
        if self.protocol == TCP {
            let header_bytes = usize::from(frame[self.transport + 12] >> 4) * 4;
            let data_bytes = (frame.len() - self.transport).saturating_sub(header_bytes);
            add(&mut frame[self.transport + 4..self.transport + 8], data_bytes as u32);
        }
    }
}

/// The frames of each stream, in order; those of none under an empty name. What says nothing is
/// zero: the identification of a packet that may not be fragmented, and which of its two forms a
/// checksum of zero has.
fn by_stream(frames: &[Vec<u8>]) -> BTreeMap<Vec<u8>, Vec<Vec<u8>>> {
    let mut streams: BTreeMap<Vec<u8>, Vec<Vec<u8>>> = BTreeMap::new();
    for frame in frames {
        let (mut frame, mut name) = (frame.clone(), vec![]);
        if let Some(packet) = Packet::of(&frame) {
            let ports = packet.transport..packet.transport + 4;
            name = [&frame[..IP], &[packet.protocol], &frame[packet.addresses.clone()], &frame[ports]].concat();
            let mut sums = vec![packet.sum_at()];
            if !packet.is_v6 {
                sums.push(IP + 10);
                if frame[IP + 6] & DONT_FRAGMENT != 0 {
                    [IP + 4, IP + 10].into_iter().for_each(|at| frame[at..][..2].fill(0));
                }
            }
            for at in sums {
                if frame[at..][..2] == [0xff, 0xff] {
                    frame[at..][..2].fill(0);
                }
            }
        }
        streams.entry(name).or_default().push(frame);
    }
    streams
}

fn bytes_of(batch: &Batch<'_>, index: u16) -> Vec<u8> {
    let mut bytes = Vec::new();
    batch.append_to(&batch.frames()[usize::from(index)], &mut bytes);
    bytes
}

/// The first byte says what the destination takes. Each record is a frame, of which the flags say
/// whether its lengths and checksums are made right, whether its receiver vouches for them, how
/// often it follows itself, and where it is cut in two pieces. All are of one turn. What was merged
/// and is cut again is what came, in the order of each stream.
pub fn merge(input: &[u8], behaviour: &mut Behaviour) {
    let Some((&takes, input)) = input.split_first() else { return };
    let (mut frames, mut states) = (Vec::new(), Vec::new());
    for (flags, bytes) in records(input) {
        if bytes.len() < IP {
            continue;
        }
        let mut frame = bytes.to_vec();
        let packet = Packet::of(&frame);
        let is_repaired = flags & 1 != 0 && packet.is_some();
        for _ in 0..TIMES[usize::from(flags >> 2 & 3)] {
            if let Some(packet) = packet.as_ref().filter(|_| is_repaired) {
                packet.repair(&mut frame);
            }
            let checksum = if is_repaired && flags & 2 != 0 { Checksum::Valid } else { Checksum::Unverified };
            frames.push(frame.clone());
            states.push((Offload { checksum, segmentation: None }, usize::from(flags >> 4)));
            if let Some(packet) = &packet {
                packet.advance(&mut frame);
            }
        }
    }
    frames.truncate(MAX_FRAMES);
    let mut batch = Batch::with_capacity(frames.len());
    for (frame, (offload, cut)) in frames.iter().zip(states) {
        let (a, b) = frame.split_at(cut.min(frame.len()));
        batch.push_pieces([Foreign::from(a), Foreign::from(b)], offload);
    }
    let caps =
        Caps { tso4: takes & 1 != 0, tso6: takes & 2 != 0, uso: takes & 4 != 0, ..Caps::full(u32::from(u16::MAX)) };
    let which: Vec<u16> = (0..frames.len() as u16).collect();
    let (mut drops, mut merged, mut again, mut made_frames) = (Drops::default(), 0, Vec::new(), 0);
    let mut transformer = Transformer::default();
    let sent = Merger::default().transmit(&batch, &which, caps, &mut drops, &mut merged, |made, which, drops| {
        made_frames = which.len();
        for index in which {
            let frame = &made.frames()[usize::from(*index)];
            let bytes = bytes_of(made, *index);
            assert_eq!(bytes.len(), frame.len());
            if let Some(whole) = frame.offload.segmentation {
                assert!(caps.takes(whole.kind), "it cannot cut {:?}", whole.kind);
                let (header, size) = (usize::from(whole.header_bytes), usize::from(whole.size));
                let segments = (bytes.len() - header).div_ceil(size);
                assert!((2..=usize::from(MAX_COUNT)).contains(&segments), "{segments} segments");
                assert!(bytes.len() - IP <= usize::from(u16::MAX), "{} bytes are no IP packet", bytes.len());
                behaviour.note((whole.kind == SegmentKind::Udp, whole.kind == SegmentKind::Tcp4));
                behaviour.note_size(segments);
            }
        }
        let plain = Caps::plain(u32::from(u16::MAX));
        transformer.transmit(made, which, plain, drops, &mut Work::default(), |cut, which, _| {
            again.extend(which.iter().map(|index| bytes_of(cut, *index)));
            Ok(Sent { frames: which.len() as u64, bytes: 0 })
        })
    });
    assert!(sent.is_ok(), "nothing here faults");
    assert_eq!(drops.total(), 0, "each frame is one that the destination takes");
    assert_eq!(made_frames as u64 + merged, frames.len() as u64, "each frame is accounted for");
    assert_eq!(by_stream(&again), by_stream(&frames));
    behaviour.note_size(merged as usize);
    behaviour.note_size(frames.len());
}
