use super::*;
use crate::offload::{Transformer, Work};
use crate::port::Caps;
use proptest::prelude::*;
use std::collections::BTreeMap;
use tombolo_ring::mem::Foreign;

const FULL: Caps = Caps { uso: true, ..Caps::full(1500) };
const PLAIN: Caps = Caps::plain(1500);

/// A TCP segment or a UDP datagram, as the test's own notion of it.
#[derive(Clone, Debug)]
struct Packet {
    v6: bool,
    /// Then what is only TCP's means nothing.
    udp: bool,
    port: u8,
    service: u8,
    hops: u8,
    /// The IPv4 identification and fragment field, or the lower half of the flow label.
    identification: u16,
    fragment: u16,
    sequence: u32,
    acknowledged: u8,
    flags: u8,
    window: u8,
    /// The first byte of 12 bytes of options, or none.
    options: Option<u8>,
    data: Vec<u8>,
    /// Bytes behind the packet.
    padding: usize,
}

impl Packet {
    fn plain(v6: bool) -> Packet {
        Packet {
            v6,
            udp: false,
            port: 1,
            service: 0,
            hops: 64,
            identification: 7,
            fragment: 0x4000,
            sequence: 0xffff_ff00,
            acknowledged: 4,
            flags: TCP_ACK,
            window: 9,
            options: Some(1),
            data: (0..100).collect(),
            padding: 0,
        }
    }

    /// The one after this, of the same length.
    fn next(&self) -> Packet {
        let identification = if self.v6 { self.identification } else { self.identification.wrapping_add(1) };
        let sequence = self.sequence.wrapping_add(self.data.len() as u32);
        Packet { identification, sequence, ..self.clone() }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut f = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
        let options = self.options.map_or(vec![], |first| vec![first; 12]);
        let header_bytes = if self.udp { 8 } else { 20 + options.len() };
        let (transport_bytes, protocol) = ((header_bytes + self.data.len()) as u16, if self.udp { 17 } else { 6 });
        let mut addresses = [0; 32];
        if self.v6 {
            f.extend([0x86, 0xdd, 0x60 | self.service >> 4, self.service << 4]);
            f.extend(self.identification.to_be_bytes());
            f.extend(transport_bytes.to_be_bytes());
            f.extend([protocol, self.hops]);
            (addresses[0], addresses[15], addresses[16], addresses[31]) = (0xfd, 1, 0xfd, 2);
            f.extend(addresses);
        } else {
            let mut ip = vec![0x45, self.service];
            ip.extend((20 + transport_bytes).to_be_bytes());
            ip.extend(self.identification.to_be_bytes());
            ip.extend(self.fragment.to_be_bytes());
            ip.extend([self.hops, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
            let sum = !checksum::sum(&ip);
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
            addresses[..8].copy_from_slice(&ip[12..20]);
            f.extend([8, 0]);
            f.extend(ip);
        }
        let transport = f.len();
        f.extend([0x12, self.port, 0, 80]);
        if self.udp {
            f.extend(transport_bytes.to_be_bytes());
            f.extend([0, 0]);
        } else {
            f.extend(self.sequence.to_be_bytes());
            let words = (header_bytes / 4 * 16) as u8;
            f.extend([1, 2, 3, self.acknowledged, words, self.flags, 1, self.window, 0, 0, 0, 0]);
            f.extend(options);
        }
        f.extend(&self.data);
        let pseudo = checksum::add(checksum::add(checksum::sum(&addresses), protocol.into()), transport_bytes);
        let sum = !checksum::add(pseudo, checksum::sum(&f[transport..]));
        let (at, sum) =
            if self.udp { (transport + 6, if sum == 0 { 0xffff } else { sum }) } else { (transport + 16, sum) };
        f[at..at + 2].copy_from_slice(&sum.to_be_bytes());
        f.resize(f.len() + self.padding, 0);
        f
    }
}

/// What the merger hands on of `frames`: bytes and offload of each, and how many became parts of
/// others.
fn merge(merger: &mut Merger, frames: &[Vec<u8>], caps: Caps) -> (Vec<(Vec<u8>, Offload)>, u64) {
    let mut batch = Batch::with_capacity(8);
    for frame in frames {
        // In two pieces now and then, as a peer may have it.
        let (a, b) = frame.split_at(frame.len() * usize::from(frame.len() % 3 == 0) / 2);
        batch.push_pieces([Foreign::from(a), Foreign::from(b)], Offload::NONE);
    }
    let which: Vec<u16> = (0..frames.len() as u16).collect();
    let (mut out, mut merged, mut calls) = (Vec::new(), 0, 0);
    let send = |batch: &Batch<'_>, which: &[u16], _: &mut Drops| {
        calls += 1;
        for index in which {
            let frame = &batch.frames()[*index as usize];
            let mut bytes = Vec::new();
            batch.append_to(frame, &mut bytes);
            out.push((bytes, frame.offload));
        }
        Ok(Sent { frames: which.len() as u64, bytes: 0 })
    };
    let sent = merger.transmit(&batch, &which, caps, &mut Drops::default(), &mut merged, send).unwrap();
    assert_eq!((sent.frames + merged, calls), (frames.len() as u64, 1));
    (out, merged)
}

/// What the frames become for a destination that takes them only as they are on a wire.
fn cut(frames: &[(Vec<u8>, Offload)]) -> Vec<Vec<u8>> {
    let mut batch = Batch::with_capacity(8);
    for (bytes, offload) in frames {
        batch.push(Foreign::from(&bytes[..]), *offload);
    }
    let which: Vec<u16> = (0..frames.len() as u16).collect();
    let (mut out, mut drops) = (Vec::new(), Drops::default());
    let send = |batch: &Batch<'_>, which: &[u16], _: &mut Drops| {
        for index in which {
            let mut bytes = Vec::new();
            batch.append_to(&batch.frames()[*index as usize], &mut bytes);
            out.push(bytes);
        }
        Ok(Sent { frames: which.len() as u64, bytes: 0 })
    };
    Transformer::default().transmit(&batch, &which, PLAIN, &mut drops, &mut Work::default(), send).unwrap();
    assert_eq!(drops.total(), 0);
    out
}

/// Segments in a row: `count` of them that begin with `first`.
fn row(first: &Packet, count: usize) -> Vec<Packet> {
    std::iter::successors(Some(first.clone()), |packet| Some(packet.next())).take(count).collect()
}

fn bytes_of(packets: &[Packet]) -> Vec<Vec<u8>> {
    packets.iter().map(Packet::bytes).collect()
}

#[test]
fn segments_in_a_row_are_one_frame_that_is_cut_into_them_again() {
    for v6 in [false, true] {
        let mut packets = row(&Packet::plain(v6), 40);
        packets[39].data.truncate(31);
        packets[39].flags |= TCP_PSH;
        let frames = bytes_of(&packets);
        let mut merger = Merger::default();
        // Twice: scratch memory that was used behaves as new.
        for _ in 0..2 {
            let (out, merged) = merge(&mut merger, &frames, FULL);
            assert_eq!((out.len(), merged), (1, 39));
            let segmentation = out[0].1.segmentation.unwrap();
            assert_eq!((segmentation.size, segmentation.header_bytes), (100, if v6 { 86 } else { 66 }));
            assert_eq!(cut(&out), frames, "v6: {v6}");
        }
    }
}

#[test]
fn datagrams_in_a_row_are_one_frame_that_is_cut_into_them_again() {
    for v6 in [false, true] {
        let mut packets = row(&Packet { udp: true, ..Packet::plain(v6) }, 70);
        packets[69].data.truncate(31);
        let frames = bytes_of(&packets);
        let (out, merged) = merge(&mut Merger::default(), &frames, FULL);
        // 64 and the rest: no more are taken at once.
        assert_eq!((out.len(), merged), (2, 68));
        let segmentation = out[0].1.segmentation.unwrap();
        let header_bytes = if v6 { 62 } else { 42 };
        assert_eq!((segmentation.kind, segmentation.size), (SegmentKind::Udp, 100));
        assert_eq!((segmentation.header_bytes, out[0].0.len()), (header_bytes, header_bytes as usize + 6400));
        assert_eq!(cut(&out), frames, "v6: {v6}");
        // Not for one that takes segments of TCP only.
        assert_eq!(merge(&mut Merger::default(), &frames, Caps::full(1500)).1, 0);
    }
}

#[test]
fn a_datagram_without_a_checksum_stays_alone() {
    let mut frames = bytes_of(&row(&Packet { udp: true, ..Packet::plain(false) }, 4));
    frames[1][40..42].fill(0);
    let (out, merged) = merge(&mut Merger::default(), &frames, FULL);
    assert_eq!((merged, &out[1].0, out[1].1), (1, &frames[1], Offload::NONE));
    assert_eq!(cut(&out), frames);
}

#[test]
fn streams_that_alternate_are_merged_each_for_itself() {
    let rows: Vec<Vec<Packet>> =
        (0..MAX_OPEN as u8).map(|port| row(&Packet { port, v6: port % 2 == 1, ..Packet::plain(false) }, 5)).collect();
    let packets: Vec<Packet> = (0..5).flat_map(|n| rows.iter().map(move |row| row[n].clone())).collect();
    let (out, merged) = merge(&mut Merger::default(), &bytes_of(&packets), FULL);
    assert_eq!((out.len(), merged), (MAX_OPEN, 4 * MAX_OPEN as u64));
    let frames: Vec<Vec<u8>> = rows.iter().flat_map(|row| bytes_of(row)).collect();
    assert_eq!(cut(&out), frames);
}

#[test]
fn what_cannot_be_told_apart_afterwards_is_not_merged() {
    let plain = |v6| Packet::plain(v6);
    type Change = Box<dyn Fn(&mut Packet)>;
    let cases: Vec<(&str, bool, Change)> = vec![
        ("another stream", false, Box::new(|p| p.port = 2)),
        ("type of service", false, Box::new(|p| p.service = 4)),
        ("traffic class", true, Box::new(|p| p.service = 1)),
        ("flow label", true, Box::new(|p| p.identification ^= 1)),
        ("hop limit", false, Box::new(|p| p.hops -= 1)),
        ("hop limit", true, Box::new(|p| p.hops -= 1)),
        ("fragment flags", false, Box::new(|p| p.fragment = 0)),
        ("a fragment", false, Box::new(|p| p.fragment = 0x2000)),
        ("a later fragment", false, Box::new(|p| p.fragment = 9)),
        ("a hole", false, Box::new(|p| p.sequence += 1)),
        ("the same bytes again", true, Box::new(|p| p.sequence -= 100)),
        ("acknowledgement", false, Box::new(|p| p.acknowledged += 1)),
        ("window", true, Box::new(|p| p.window += 1)),
        ("options", false, Box::new(|p| p.options = Some(2))),
        ("no options", true, Box::new(|p| p.options = None)),
        ("longer", false, Box::new(|p| p.data.push(1))),
        ("empty", false, Box::new(|p| p.data.clear())),
        ("padding", true, Box::new(|p| p.padding = 1)),
        ("FIN", false, Box::new(|p| p.flags |= 1)),
        ("SYN", false, Box::new(|p| p.flags |= 2)),
        ("RST", true, Box::new(|p| p.flags |= 4)),
        ("URG", false, Box::new(|p| p.flags |= 0x20)),
        ("ECE", false, Box::new(|p| p.flags |= 0x40)),
        ("CWR", true, Box::new(|p| p.flags |= 0x80)),
        ("no ACK", false, Box::new(|p| p.flags = 0)),
    ];
    for (what, v6, change) in &cases {
        let mut packets = row(&plain(*v6), 2);
        change(&mut packets[1]);
        let frames = bytes_of(&packets);
        let (out, merged) = merge(&mut Merger::default(), &frames, FULL);
        assert_eq!(merged, 0, "{what}, v6: {v6}");
        assert!(out.iter().map(|(bytes, offload)| (bytes, *offload)).eq(frames.iter().map(|f| (f, Offload::NONE))));
    }
    // Identifications matter where the packet may be fragmented.
    let mut packets = row(&Packet { fragment: 0, ..plain(false) }, 2);
    assert_eq!(merge(&mut Merger::default(), &bytes_of(&packets), FULL).1, 1);
    packets[1].identification += 1;
    assert_eq!(merge(&mut Merger::default(), &bytes_of(&packets), FULL).1, 0);
    packets.iter_mut().for_each(|packet| packet.fragment = 0x4000);
    assert_eq!(merge(&mut Merger::default(), &bytes_of(&packets), FULL).1, 1);
}

#[test]
fn a_wrong_checksum_goes_on_as_it_came() {
    for v6 in [false, true] {
        let frames = bytes_of(&row(&Packet::plain(v6), 3));
        for wrong in 0..3 {
            // In the last byte, in TCP's header, and in that of IPv4.
            for at in [frames[0].len() - 1, if v6 { 60 } else { 40 }, 24] {
                let mut frames = frames.clone();
                frames[wrong][at] ^= 1;
                let (out, merged) = merge(&mut Merger::default(), &frames, FULL);
                // The other two are neighbours unless it is between them.
                let neighbours = u64::from(wrong != 1);
                assert!(merged <= neighbours, "v6: {v6}, frame {wrong}, byte {at}");
                assert!(out.iter().any(|(bytes, offload)| *bytes == frames[wrong] && *offload == Offload::NONE));
            }
        }
    }
}

#[test]
fn frames_of_one_stream_keep_their_order() {
    let mut packets = row(&Packet::plain(false), 6);
    // A bare acknowledgement, or the end of what the application wrote, in the middle.
    for change in [|p: &mut Packet| p.flags |= TCP_PSH, |p: &mut Packet| p.flags |= 1] {
        let before = packets[2].clone();
        change(&mut packets[2]);
        let frames = bytes_of(&packets);
        let (out, merged) = merge(&mut Merger::default(), &frames, FULL);
        assert!(merged >= 3);
        assert_eq!(cut(&out), frames);
        packets[2] = before;
    }
    let mut frames = bytes_of(&packets);
    let empty = Packet { data: vec![], ..packets[3].clone() };
    frames.insert(3, empty.bytes());
    // Something that may be of the stream, as far as anybody looked: a fragment.
    frames.insert(5, Packet { fragment: 0x2000, ..packets[0].clone() }.bytes());
    let (out, merged) = merge(&mut Merger::default(), &frames, FULL);
    assert_eq!(merged, 3);
    assert_eq!(cut(&out), frames);
}

#[test]
fn a_frame_with_padding_ends_its_own_flow_only() {
    let rows: Vec<Vec<Packet>> =
        [(1, 100), (2, 6)].map(|(port, n)| row(&Packet { port, data: vec![5; n], ..Packet::plain(false) }, 6)).to_vec();
    let mut packets: Vec<Packet> = (0..6).flat_map(|n| rows.iter().map(move |row| row[n].clone())).collect();
    // The second flow's third segment.
    packets[5].padding = 4;
    let frames = bytes_of(&packets);
    let (out, merged) = merge(&mut Merger::default(), &frames, FULL);
    assert_eq!((merged, out.len()), (5 + 1 + 2, 4));
    let mut sorted = frames.clone();
    sorted.sort_by_key(|frame| frame[35]);
    assert_eq!(cut(&out[..1]), sorted[..6]);
    assert_eq!(cut(&out[1..]), sorted[6..]);
}

#[test]
fn a_destination_gets_merged_only_what_it_takes() {
    for (v6, caps) in [(false, Caps { tso4: false, ..FULL }), (true, Caps { tso6: false, ..FULL })] {
        let frames = bytes_of(&row(&Packet::plain(v6), 4));
        assert_eq!(merge(&mut Merger::default(), &frames, caps).1, 0);
        let other = bytes_of(&row(&Packet::plain(!v6), 4));
        assert_eq!(merge(&mut Merger::default(), &other, caps).1, 3);
    }
}

#[test]
fn a_merged_frame_is_no_longer_than_an_ip_packet() {
    let first = Packet { data: vec![3; 1448], ..Packet::plain(false) };
    let frames = bytes_of(&row(&first, 64));
    let (out, merged) = merge(&mut Merger::default(), &frames, FULL);
    assert_eq!(merged, 62);
    assert_eq!(out[0].0.len(), 66 + 45 * 1448);
    assert_eq!(cut(&out), frames);
}

/// The stream that a frame belongs to, as the test sees it: its first 14 bytes, protocol, addresses
/// and ports.
fn stream_of(frame: &[u8]) -> Vec<u8> {
    let is_v6 = frame[12] == 0x86;
    let (protocol, range) = if is_v6 { (frame[20], 22..58) } else { (frame[23], 26..38) };
    [&frame[..14], &[protocol], &frame[range]].concat()
}

fn by_stream(frames: &[Vec<u8>]) -> BTreeMap<Vec<u8>, Vec<Vec<u8>>> {
    let mut streams: BTreeMap<Vec<u8>, Vec<Vec<u8>>> = BTreeMap::new();
    for frame in frames {
        let mut frame = frame.clone();
        // With "don't fragment" the identification has no meaning; and the sum follows it.
        if frame[12] == 8 && frame[20] & DONT_FRAGMENT != 0 {
            frame[18..20].fill(0);
            frame[24..26].fill(0);
        }
        streams.entry(stream_of(&frame)).or_default().push(frame);
    }
    streams
}

prop_compose! {
    /// How a segment differs from the one before it in its stream.
    fn change()(
        what in 0u8..24,
        value in any::<u8>(),
        length in 1usize..300,
        port in 0u8..3,
    ) -> (u8, u8, usize, u8) {
        (what, value, length, port)
    }
}

proptest! {
    #[test]
    fn cutting_gives_what_was_merged(
        v6 in any::<bool>(),
        udp in any::<bool>(),
        fragment in prop_oneof![Just(0u16), Just(0x4000), Just(0xc000)],
        changes in prop::collection::vec(change(), 1..64),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut streams: Vec<Packet> = (0..3).map(|port| Packet { udp, port, fragment, ..Packet::plain(v6) }).collect();
        let mut frames = Vec::new();
        for (what, value, length, port) in changes {
            let stream = &mut streams[port as usize];
            *stream = stream.next();
            let mut packet = stream.clone();
            match what {
                0 => packet.flags |= value,
                1 => packet.flags |= TCP_PSH,
                2 => packet.window = value,
                3 => packet.acknowledged = value,
                4 => packet.options = None,
                5 => packet.options = Some(value),
                6 => packet.sequence ^= u32::from(value),
                7 => packet.identification ^= u16::from(value),
                8 => packet.hops = value,
                9 => packet.data.truncate(length % packet.data.len().max(1)),
                10 => packet.data.resize(length, value),
                11 => packet.padding = length % 7,
                _ => {}
            }
            stream.sequence = packet.sequence.wrapping_add(packet.data.len() as u32).wrapping_sub(stream.data.len() as u32);
            frames.push(packet.bytes());
        }
        for (frame, at, value) in flips {
            let frame = frame.get_mut(&mut frames);
            let at = at.index(frame.len());
            frame[at] ^= value;
        }
        let (out, _) = merge(&mut Merger::default(), &frames, FULL);
        let again = cut(&out);
        prop_assert_eq!(again.len(), frames.len());
        prop_assert_eq!(by_stream(&again), by_stream(&frames));
    }
}
