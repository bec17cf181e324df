//! The header of a region, and the layouts that it may name.

use super::super::region::*;

fn header() -> Header {
    Header {
        protocol: 0x4001,
        vectors: 2,
        layout: Layout::v1(1 << 20, 0x3000, 2).unwrap(),
        mac: [0x02, 0x54, 0x4d, 1, 2, 3],
        mtu: 0x2328,
        name: Name::new("control").unwrap(),
        offloads: true,
    }
}

#[rustfmt::skip]
const GOLDEN: [u8; HEADER_BYTES] = [
    b'T', b'M', b'B', b'L', b'I', b'V', b'S', b'1', 1, 0, 0, 0, 0x01, 0x40, 0, 0,
    2, 0, 0, 0, 2, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0,
    0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0x30, 0, 0, 0, 0, 0, 0,
    0, 0x50, 0, 0, 0, 0, 0, 0, 0, 0xd0, 0x07, 0, 0, 0, 0, 0,
    0x02, 0x54, 0x4d, 1, 2, 3, 0x28, 0x23, b'c', b'o', b'n', b't', b'r', b'o', b'l', 0,
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    1, 0, 0, 0,
];

#[test]
fn golden_header_both_ways() {
    let mut page = [0xa5; 4096];
    header().encode(&mut page).unwrap();
    assert_eq!(page[..HEADER_BYTES], GOLDEN);
    assert!(page[HEADER_BYTES..].iter().all(|byte| *byte == 0));
    // What comes behind the fields is for later versions.
    page[HEADER_BYTES..].fill(0xa5);
    assert_eq!(Header::decode(&page, 1 << 20), Ok(header()));
    assert_eq!(header().name.as_str(), "control");
    // A maker that offers nothing, or something that is not known here.
    for (offers, offloads) in [(0u8, false), (2, false), (3, true), (0xfe, false)] {
        page[104] = offers;
        assert_eq!(Header::decode(&page, 1 << 20), Ok(Header { offloads, ..header() }), "{offers:#x}");
    }
}

#[test]
fn a_header_cut_at_any_length_is_refused() {
    for got in 0..HEADER_BYTES {
        assert_eq!(Header::decode(&GOLDEN[..got], 1 << 20), Err(RegionError::Truncated { got }));
        assert_eq!(header().encode(&mut [0xa5; HEADER_BYTES][..got]), Err(RegionError::Truncated { got }));
    }
    assert!(Header::decode(&GOLDEN, 1 << 20).is_ok());
}

#[test]
fn impossible_headers_are_refused_by_name() {
    use RegionError as E;
    let with = |at: usize, bytes: &[u8]| {
        let mut page = GOLDEN;
        page[at..at + bytes.len()].copy_from_slice(bytes);
        Header::decode(&page, 1 << 20).unwrap_err()
    };
    let long = |n: u64| n.to_le_bytes();
    for at in 0..8 {
        assert!(matches!(with(at, &[0]), E::Magic { .. }));
    }
    for got in [0, 2, u32::MAX] {
        assert_eq!(with(8, &got.to_le_bytes()), E::Version { got });
    }
    for got in [0, 1, 65, u32::MAX] {
        assert_eq!(with(16, &got.to_le_bytes()), E::Peers { got });
    }
    // Offsets and lengths: not of pages, into the one before, beyond the end, and so that a sum
    // would overflow.
    for (at, part, values) in [
        (24, Section::StateTable, &[1, 0x1800, u64::MAX, !0xfff][..]),
        (32, Section::ReadWrite, &[0, 0x1000, 0x2001, !0xfff]),
        (40, Section::ReadWrite, &[1, 0x3001, !0xfff, 1 << 41]),
        (48, Section::Outputs, &[0, 0x4000, 0x5001, !0xfff]),
        (56, Section::Outputs, &[0, 1, 0x7d001, !0xfff, 1 << 63]),
    ] {
        for value in values {
            let error = with(at, &long(*value));
            assert!(matches!(error, E::Section { part: p, .. } if p == part), "{at} {value:#x}: {error}");
        }
    }
    assert!(
        matches!(with(40, &long(0x4000)), E::Section { part: Section::Outputs, .. }),
        "the R/W section grew into it"
    );
    assert_eq!(with(56, &long(0x7e000)), E::Region { needed: 0x10_1000, got: 1 << 20 });
    assert_eq!(with(72, &[0xff]), E::Name);
}

#[test]
fn layouts_are_those_of_the_table() {
    let net = Layout::default_network();
    assert_eq!((net.output(0), net.output(1), net.output(2)), (Some(0x2000..0x81000), Some(0x81000..0x100000), None));
    assert_eq!((net.state(0), net.state(1), net.state(2)), (Some(0x1000), Some(0x1004), None));
    assert_eq!((net.bytes(), net.check(1 << 20)), (1 << 20, Ok(())));
    let jailhouse = Layout::v2(0x1000, 0, 0x7f000, 2);
    assert_eq!((jailhouse.state(1), jailhouse.output(1)), (Some(4), Some(0x80000..0xff000)));
    assert_eq!(jailhouse.check(0xff000), Ok(()));
    assert!(jailhouse.check(0xfefff).is_err());
    let common = Layout::v1(1 << 24, 0x10000, 64).unwrap();
    assert_eq!(common.check(1 << 24), Ok(()));
    assert!(common.output_bytes >= 0x3f000);
    for (bytes, rw, peers) in
        [(0, 0, 2), (0x3000, 0, 2), (1 << 20, 1 << 20, 2), (1 << 20, u64::MAX, 2), (1 << 20, 0, 1)]
    {
        assert!(Layout::v1(bytes, rw, peers).is_err(), "{bytes:#x} {rw:#x} {peers}");
    }
    assert!(Layout::v2(u64::MAX, u64::MAX, u64::MAX, 2).check(u64::MAX).is_err());
    assert_eq!(Layout::v2(0x1000, 0, u64::MAX, 2).output(1), None, "an absurd layout has no section");
    assert_eq!(Name::new("a name of thirty-three characters"), None);
    assert_eq!(Name::new("a\0b"), None);
}
