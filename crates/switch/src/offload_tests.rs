use super::*;
use crate::frame::HEAD_BYTES;
use smoltcp::wire::{EthernetFrame, Ipv4Packet, TcpPacket, UdpPacket};

const PAYLOAD: usize = 4000;

/// What a frame is built from: the test's own notion of a packet, not the code's.
#[derive(Clone, Debug)]
struct Shape {
    v6: bool,
    tags: usize,
    ip_options: usize,
    tcp_options: usize,
    flags: u8,
    payload: usize,
    identification: u16,
    sequence: u32,
}

impl Shape {
    fn plain(v6: bool) -> Shape {
        let (identification, sequence) = (0xfffe, 0xffff_fa00);
        Shape { v6, tags: 0, ip_options: 0, tcp_options: 12, flags: 0x18, payload: PAYLOAD, identification, sequence }
    }

    fn header_bytes(&self) -> usize {
        14 + self.tags * 4 + if self.v6 { 40 } else { 20 } + self.ip_options + 20 + self.tcp_options
    }

    fn data(&self) -> Vec<u8> {
        (0..self.payload).map(|i| (i * 31 + i / 251) as u8).collect()
    }

    /// The bytes of one packet with `data`, without any checksum.
    fn build(&self, data: &[u8], identification: u16, sequence: u32, flags: u8) -> Vec<u8> {
        let mut f = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
        for tag in 0..self.tags {
            f.extend_from_slice(if tag == 0 && self.tags == 2 { &[0x88, 0xa8, 0, 9] } else { &[0x81, 0, 0, 5] });
        }
        let tcp_bytes = 20 + self.tcp_options + data.len();
        if self.v6 {
            f.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0]);
            f.extend_from_slice(&((self.ip_options + tcp_bytes) as u16).to_be_bytes());
            f.push(if self.ip_options == 0 { 6 } else { 0 });
            f.push(64);
            f.extend_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
            f.extend_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
            if self.ip_options != 0 {
                // One hop-by-hop header, padded by PadN.
                let pad = self.ip_options - 4;
                f.extend_from_slice(&[6, (self.ip_options / 8 - 1) as u8, 1, pad as u8]);
                f.extend(vec![0; pad]);
            }
        } else {
            f.extend_from_slice(&[8, 0, 0x45 + (self.ip_options / 4) as u8, 0]);
            f.extend_from_slice(&((20 + self.ip_options + tcp_bytes) as u16).to_be_bytes());
            f.extend_from_slice(&identification.to_be_bytes());
            f.extend_from_slice(&[0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
            f.extend(vec![1; self.ip_options]);
        }
        f.extend_from_slice(&[0x12, 0x34, 0, 80]);
        f.extend_from_slice(&sequence.to_be_bytes());
        f.extend_from_slice(&[1, 2, 3, 4, ((20 + self.tcp_options) / 4 * 16) as u8, flags, 0xff, 0xff, 0, 0, 0, 0]);
        f.extend(vec![1; self.tcp_options]);
        f.extend_from_slice(data);
        f
    }

    fn tcp(&self) -> usize {
        self.header_bytes() - 20 - self.tcp_options
    }

    /// The sum of the pseudo header, word by word.
    fn pseudo(&self, f: &[u8], tcp_bytes: usize) -> u32 {
        let ip = 14 + self.tags * 4;
        let addresses = if self.v6 { &f[ip + 8..ip + 40] } else { &f[ip + 12..ip + 20] };
        addresses.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(w[1])).sum::<u32>() + 6 + tcp_bytes as u32
    }

    /// The offload frame as a guest's driver makes it.
    fn offload_frame(&self, size: u16) -> (Vec<u8>, Offload) {
        let mut f = self.build(&self.data(), self.identification, self.sequence, self.flags);
        let tcp = self.tcp();
        let mut sum = self.pseudo(&f, f.len() - tcp);
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        f[tcp + 16..tcp + 18].copy_from_slice(&(sum as u16).to_be_bytes());
        let kind = if self.v6 { SegmentKind::Tcp6 } else { SegmentKind::Tcp4 };
        let cut = Segmentation { kind, ecn: false, size, header_bytes: self.header_bytes() as u16 };
        let checksum = Checksum::Partial { start: tcp as u16, offset: 16 };
        (f, Offload { checksum, segmentation: (size != 0).then_some(cut) })
    }

    /// The segments, built one by one from the shape, and summed word by word.
    fn segments(&self, size: usize) -> Vec<Vec<u8>> {
        let data = self.data();
        let chunks: Vec<_> = data.chunks(size).collect();
        let last = chunks.len() - 1;
        let make = |(n, chunk): (usize, &&[u8])| {
            let mut flags = self.flags;
            if n != 0 {
                flags &= !0x80;
            }
            if n != last {
                flags &= !0x09;
            }
            let identification = (u32::from(self.identification) + n as u32) as u16;
            let sequence = (u64::from(self.sequence) + (n * size) as u64) as u32;
            let mut f = self.build(chunk, identification, sequence, flags);
            let (ip, tcp) = (14 + self.tags * 4, self.tcp());
            if !self.v6 {
                let sum = dull_sum(&f[ip..tcp], 0);
                f[ip + 10..ip + 12].copy_from_slice(&sum.to_be_bytes());
            }
            let pseudo = self.pseudo(&f, f.len() - tcp);
            let sum = dull_sum(&f[tcp..], pseudo);
            f[tcp + 16..tcp + 18].copy_from_slice(&sum.to_be_bytes());
            f
        };
        chunks.iter().enumerate().map(make).collect()
    }
}

fn dull_sum(bytes: &[u8], start: u32) -> u16 {
    let mut sum = start;
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

type Out = (Vec<Vec<u8>>, Vec<Offload>, Drops, Work, Vec<usize>);

/// What a destination with `caps` gets of `frames`, and in calls of how many; the same whether they
/// lie in one piece or in many.
fn run(frames: &[(Vec<u8>, Offload)], caps: Caps) -> Out {
    let whole = run_in_pieces(frames, caps, usize::MAX);
    for piece_bytes in [131, 1000] {
        assert_eq!(run_in_pieces(frames, caps, piece_bytes), whole, "in pieces of {piece_bytes} bytes");
    }
    whole
}

fn run_in_pieces(frames: &[(Vec<u8>, Offload)], caps: Caps, piece_bytes: usize) -> Out {
    let mut transformer = Transformer::default();
    let mut batch = Batch::with_capacity(4);
    for (bytes, offload) in frames {
        batch.push_pieces(bytes.chunks(piece_bytes).map(Foreign::from), *offload);
    }
    let which: Vec<u16> = (0..frames.len() as u16).collect();
    let (mut drops, mut work) = (Drops::default(), Work::default());
    let (mut out, mut offloads, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    let sent = transformer.transmit(&batch, &which, caps, &mut drops, &mut work, |batch, which, _| {
        calls.push(which.len());
        let mut sent = Sent::default();
        for index in which {
            let frame = &batch.frames()[*index as usize];
            let mut bytes = Vec::new();
            batch.append_to(frame, &mut bytes);
            sent.add(Sent { frames: 1, bytes: bytes.len() as u64 });
            out.push(bytes);
            offloads.push(frame.offload);
        }
        Ok(sent)
    });
    assert_eq!(sent.unwrap().frames as usize, out.len());
    (out, offloads, drops, work, calls)
}

fn shapes() -> Vec<Shape> {
    let mut all = Vec::new();
    for v6 in [false, true] {
        for tags in 0..=2 {
            for ip_options in [0, 8, 16] {
                for tcp_options in [0, 12, 20] {
                    for flags in [0x10, 0x18, 0x19, 0x98] {
                        all.push(Shape { tags, ip_options, tcp_options, flags, ..Shape::plain(v6) });
                    }
                }
            }
        }
    }
    all
}

#[test]
fn segments_are_those_of_the_dull_construction() {
    for shape in shapes() {
        for size in [1448, 536, 1000, 3999, 4000, 1399] {
            let (out, offloads, drops, work, _) = run(&[shape.offload_frame(size)], Caps::plain(9000));
            let want = shape.segments(size as usize);
            assert_eq!(out, want, "{shape:?} size {size}");
            assert!(!drops.any() && offloads.iter().all(|o| *o == Offload::NONE));
            assert_eq!(work, Work { checksums: want.len() as u64, segmented: 1, segments: want.len() as u64 });
        }
    }
}

#[test]
fn another_stack_finds_the_checksums_right() {
    let (out, ..) = run(&[Shape::plain(false).offload_frame(700)], Caps::plain(1500));
    assert_eq!(out.len(), 6);
    for bytes in &out {
        let ethernet = EthernetFrame::new_checked(&bytes[..]).unwrap();
        let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
        assert!(ip.verify_checksum());
        let tcp = TcpPacket::new_checked(ip.payload()).unwrap();
        assert!(tcp.verify_checksum(&ip.src_addr().into(), &ip.dst_addr().into()));
    }
}

/// A golden frame: two segments of a packet whose every byte is written here.
#[test]
fn a_golden_packet_is_cut_as_written_here() {
    let header = [
        2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, // Ethernet
        0x45, 0, 0, 46, 0, 7, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, // IPv4
        0, 7, 0, 9, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x19, 1, 0, 0x14, 0x21, 0, 0, // TCP
    ];
    let frame = [&header[..], b"golden"].concat();
    let cut = Segmentation { kind: SegmentKind::Tcp4, ecn: false, size: 4, header_bytes: 54 };
    let offload = Offload { checksum: Checksum::Partial { start: 34, offset: 16 }, segmentation: Some(cut) };
    let (out, ..) = run(&[(frame, offload)], Caps::plain(1500));
    let first = [
        2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, //
        0x45, 0, 0, 44, 0, 7, 0x40, 0, 64, 6, 0x26, 0xc3, 10, 0, 0, 1, 10, 0, 0, 2, //
        0, 7, 0, 9, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 1, 0, 0xc6, 0xe7, 0, 0, //
        b'g', b'o', b'l', b'd',
    ];
    let second = [
        2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, //
        0x45, 0, 0, 42, 0, 8, 0x40, 0, 64, 6, 0x26, 0xc4, 10, 0, 0, 1, 10, 0, 0, 2, //
        0, 7, 0, 9, 0, 0, 0, 5, 0, 0, 0, 2, 0x50, 0x19, 1, 0, 0x35, 0x42, 0, 0, //
        b'e', b'n',
    ];
    assert_eq!(out, [first.to_vec(), second.to_vec()]);
}

#[test]
fn datagrams_of_one_flow_are_cut_as_written_here() {
    let header = [
        2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, // Ethernet
        0x45, 0, 0, 34, 0, 7, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2, // IPv4
        0, 7, 0, 9, 0, 14, 0x14, 0x22, // UDP
    ];
    let frame = [&header[..], b"golden"].concat();
    let cut = Segmentation { kind: SegmentKind::Udp, ecn: false, size: 4, header_bytes: 42 };
    let offload = Offload { checksum: Checksum::Partial { start: 34, offset: 6 }, segmentation: Some(cut) };
    let takes = Caps { uso: true, ..Caps::full(1500) };
    assert_eq!(run(&[(frame.clone(), offload)], takes).0, std::slice::from_ref(&frame));
    let (out, _, _, work, _) = run(&[(frame.clone(), offload)], Caps::full(1500));
    assert_eq!(work, Work { checksums: 2, segmented: 1, segments: 2 });
    let ends: [(&[u8], u8, u8); 2] = [(b"gold", 32, 7), (b"en", 30, 8)];
    for (bytes, (data, total, identification)) in out.iter().zip(ends) {
        let ethernet = EthernetFrame::new_checked(&bytes[..]).unwrap();
        let ip = Ipv4Packet::new_checked(ethernet.payload()).unwrap();
        assert_eq!((bytes[17], bytes[19], bytes[23]), (total, identification, 17));
        let udp = UdpPacket::new_checked(ip.payload()).unwrap();
        assert!(ip.verify_checksum() && udp.verify_checksum(&ip.src_addr().into(), &ip.dst_addr().into()));
        assert_eq!((udp.src_port(), udp.dst_port(), udp.payload()), (7, 9, data));
    }
    assert_eq!(out.len(), 2);
    // TCP is none, nor is what has no room for a header.
    let mut tcp = frame.clone();
    tcp[23] = 6;
    assert_eq!(run(&[(tcp, offload)], Caps::full(1500)).2.of(Reason::BadOffload), 1);
    for len in 15..42 {
        let (out, _, drops, ..) = run(&[(frame[..len].to_vec(), offload)], Caps::full(1500));
        assert!(out.is_empty() && drops.total() == 1, "{len}");
    }
}

#[test]
fn a_partial_checksum_is_completed_only_where_it_has_to_be() {
    for v6 in [false, true] {
        let shape = Shape { payload: 1001, ..Shape::plain(v6) };
        let (frame, offload) = shape.offload_frame(0);
        let (out, offloads, _, work, _) = run(&[(frame.clone(), offload)], Caps::full(1500));
        assert_eq!((out, offloads, work), (vec![frame.clone()], vec![offload], Work::default()));
        let (out, offloads, drops, work, _) = run(&[(frame.clone(), offload)], Caps::plain(1500));
        let mut want = shape.segments(2000).remove(0);
        // The IPv4 header's sum was not requested; the sender has to make it.
        let ip = 14;
        if !v6 {
            want[ip + 10..ip + 12].copy_from_slice(&frame[ip + 10..ip + 12]);
        }
        assert_eq!((out, offloads, drops.any()), (vec![want], vec![Offload::NONE], false));
        assert_eq!(work, Work { checksums: 1, ..Work::default() });
    }
}

#[test]
fn tagged_frames_are_finished_for_a_destination_that_takes_the_state_of_others_only() {
    let caps = Caps { tagged: false, ..Caps::full(1500) };
    for shape in shapes() {
        let summed = Shape { payload: 1001, ..shape };
        for frame in [summed.offload_frame(0), shape.offload_frame(1000)] {
            let (out, offloads, drops, ..) = run(std::slice::from_ref(&frame), caps);
            assert!(!drops.any(), "{shape:?}");
            if shape.tags == 0 {
                assert_eq!((out, offloads), (vec![frame.0], vec![frame.1]), "{shape:?}");
                continue;
            }
            let plain = run(std::slice::from_ref(&frame), Caps::plain(1500));
            assert_eq!((&out, &offloads), (&plain.0, &plain.1), "{shape:?}");
            assert!(offloads.iter().all(|offload| *offload == Offload::NONE), "{shape:?}");
        }
    }
}

#[test]
fn a_udp_sum_of_zero_is_sent_as_ones() {
    // Such a payload that the sum comes out as 0xffff, whose complement would mean "no checksum".
    let mut f = vec![0; 14 + 20 + 8 + 2];
    f[12] = 8;
    f[14] = 0x45;
    f[38..40].copy_from_slice(&10u16.to_be_bytes());
    let rest = 0xffff - 10 - 17 - 10;
    f[40..42].copy_from_slice(&(17u16 + 10).to_be_bytes());
    f[42..44].copy_from_slice(&(rest as u16).to_be_bytes());
    let offload = Offload { checksum: Checksum::Partial { start: 34, offset: 6 }, segmentation: None };
    let (out, ..) = run(&[(f, offload)], Caps::plain(1500));
    assert_eq!(out[0][40..42], [0xff, 0xff]);
    let udp = UdpPacket::new_checked(&out[0][34..]).unwrap();
    assert_eq!(udp.checksum(), 0xffff);
}

#[test]
fn segmentation_stays_whole_where_the_destination_cuts_by_itself() {
    for v6 in [false, true] {
        let (frame, mut offload) = Shape::plain(v6).offload_frame(1000);
        let full = Caps::full(1500);
        let own = Caps { tso4: !v6, tso6: v6, ..full };
        assert_eq!(run(&[(frame.clone(), offload)], own).0, std::slice::from_ref(&frame));
        let other = Caps { tso4: v6, tso6: !v6, ..full };
        assert_eq!(run(&[(frame.clone(), offload)], other).0.len(), 4);
        if let Some(cut) = &mut offload.segmentation {
            cut.ecn = true;
        }
        assert_eq!(run(&[(frame.clone(), offload)], full).0.len(), 1);
        assert_eq!(run(&[(frame.clone(), offload)], Caps { ecn: false, ..full }).0.len(), 4);
    }
}

#[test]
fn lengths_are_kept_to() {
    let reason = |frame: (Vec<u8>, Offload), caps| {
        let (out, _, drops, ..) = run(&[frame], caps);
        assert!(out.len() as u64 + drops.total() >= 1);
        drops.of(Reason::TooLong)
    };
    assert_eq!(reason((vec![1; 1518], Offload::NONE), Caps::full(1500)), 0);
    assert_eq!(reason((vec![1; 1519], Offload::NONE), Caps::full(1500)), 1);
    // 66 bytes of headers.
    for caps in [Caps::full(1500), Caps::plain(1500)] {
        assert_eq!(reason(Shape::plain(false).offload_frame(1452), caps), 0);
        assert_eq!(reason(Shape::plain(false).offload_frame(1453), caps), 1);
    }
}

#[test]
fn order_is_kept_between_frames_that_are_cut_and_frames_that_are_not() {
    let plain = |tag: u8| (vec![tag; 60], Offload::NONE);
    let shape = Shape { payload: 2000, ..Shape::plain(false) };
    let frames = [
        plain(1),
        plain(2),
        shape.offload_frame(1000),
        shape.offload_frame(0).clone(),
        plain(3),
        shape.offload_frame(1000),
    ];
    let (out, _, drops, _, calls) = run(&frames, Caps::plain(9000));
    let cut = shape.segments(1000);
    let whole = {
        let mut f = shape.segments(2000).remove(0);
        f[24..26].fill(0);
        f
    };
    let want = [&[vec![1; 60], vec![2; 60]], &cut[..], &[whole, vec![3; 60]], &cut[..]].concat();
    assert_eq!(out, want);
    assert_eq!((calls, drops.any()), (vec![2, 3, 1, 2], false));
}

#[test]
fn a_stream_of_large_frames_is_handed_on_in_parts_of_bounded_size() {
    let shape = Shape { payload: 60_000, ..Shape::plain(false) };
    let frames: Vec<_> = (0..16).map(|_| shape.offload_frame(1448)).collect();
    let (out, _, _, work, calls) = run(&frames, Caps::plain(1500));
    assert_eq!(out, vec![shape.segments(1448); 16].concat());
    assert_eq!(work.segments, 16 * 42);
    assert!(calls.iter().all(|n| *n <= 42 * 3), "{calls:?}");
}

#[test]
fn what_is_not_what_it_says_is_dropped_and_nothing_panics() {
    let reason = |frame: Vec<u8>, offload: Offload| {
        let (out, _, drops, ..) = run(&[(frame, offload)], Caps::plain(9000));
        match Reason::ALL.iter().find(|r| drops.of(**r) == 1) {
            Some(reason) => Some(*reason),
            None => {
                assert!(!out.is_empty());
                None
            }
        }
    };
    let with = |v6: bool, change: &dyn Fn(&mut Vec<u8>)| {
        let (mut frame, offload) = Shape { ip_options: if v6 { 8 } else { 0 }, ..Shape::plain(v6) }.offload_frame(1000);
        change(&mut frame);
        reason(frame, offload)
    };
    assert_eq!(with(false, &|_| {}), None);
    assert_eq!(with(false, &|f| f[12] = 9), Some(Reason::BadOffload)); // another protocol
    assert_eq!(with(false, &|f| f[14] = 0x65), Some(Reason::BadOffload)); // version
    assert_eq!(with(false, &|f| f[14] = 0x44), Some(Reason::BadOffload)); // short header
    assert_eq!(with(false, &|f| f[23] = 17), Some(Reason::BadOffload)); // UDP
    assert_eq!(with(false, &|f| f[20] |= 0x20), Some(Reason::NotTransformable)); // more fragments
    assert_eq!(with(false, &|f| f[21] = 1), Some(Reason::NotTransformable)); // a fragment's offset
    assert_eq!(with(false, &|f| f[16] = 0xff), Some(Reason::BadOffload)); // longer than the frame
    assert_eq!(with(false, &|f| f[16..18].fill(0)), None); // length left to the device
    assert_eq!(with(false, &|f| f[46] = 0x40), Some(Reason::BadOffload)); // TCP header too short
    assert_eq!(with(true, &|_| {}), None);
    assert_eq!(with(true, &|f| f[20] = 44), Some(Reason::NotTransformable)); // a fragment header
    assert_eq!(with(true, &|f| f[55] = 20), Some(Reason::NotTransformable)); // beyond the head
    assert_eq!(with(true, &|f| (f[20], f[57]) = (43, 1)), Some(Reason::NotTransformable)); // still under way
    assert_eq!(with(true, &|f| (f[20], f[57]) = (43, 0)), None); // arrived
    let three_tags = Shape { tags: 3, ..Shape::plain(false) }.offload_frame(1000);
    assert_eq!(reason(three_tags.0, three_tags.1), Some(Reason::NotTransformable));
    let crumbs = Shape { payload: 60_000, ..Shape::plain(false) }.offload_frame(1);
    assert_eq!(reason(crumbs.0, crumbs.1), Some(Reason::NotTransformable));
    // Cut off at every length.
    for v6 in [false, true] {
        let (frame, offload) = Shape { ip_options: 8, tags: 2, ..Shape::plain(v6) }.offload_frame(1000);
        for len in 1..HEAD_BYTES + 40 {
            assert!(reason(frame[..len].to_vec(), offload).is_some(), "{len}");
        }
    }
    let far = Checksum::Partial { start: 60_000, offset: 60_000 };
    let lie = Offload { checksum: far, segmentation: None };
    assert_eq!(reason(vec![1; 60], lie), Some(Reason::BadOffload));
}
