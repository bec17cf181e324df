//! The bytes of messages, from real peers.
//!
//! What iproute2 6.1 sent, and what kernel 6.18 answered, was recorded at `sendmsg`, `send` and
//! `recvmsg` of `ip` and `tc` in a network namespace: its interface v0 (number 3) is an end of a
//! veth pair. Two requests for which iproute2 has no command come from a C program with the
//! structures of `linux/rtnetlink.h`. A recorded request has a sequence number, which is compared
//! as zero: ours have none.

use super::*;
use tombolo_testing::hex;

const LINK: &str = include_str!("link.hex");

/// A recorded request, with the sequence number 0.
fn request(text: &str) -> Vec<u8> {
    let mut bytes = hex(text);
    bytes[8..12].fill(0);
    bytes
}

fn bpf_filter(handle: u32) -> Filter {
    let name = if handle == 0 { "bpf" } else { "tc.o:[tc]" };
    let (kind, name, program) = ("bpf".into(), name.into(), (handle != 0).then_some(0x5b3c));
    Filter { priority: 49152, handle, protocol: 0x0300, kind, name, program }
}

#[test]
fn requests_are_those_of_iproute2_and_of_the_kernels_headers() {
    let mut links = links_request();
    assert_eq!(
        Message(links.0.clone()).finish(),
        // The C program: struct nlmsghdr, struct ifinfomsg.
        hex("20000000 1200 0103 00000000 00000000  00 00 0000 00000000 00000000 00000000")
    );
    // `ip neigh` asks for its interfaces so; iproute2 adds what to leave out (IFLA_EXT_MASK).
    links.put(29, &1u32.to_ne_bytes());
    assert_eq!(
        links.finish(),
        request(
            "28000000 1200 0103 4df30a6b 00000000  00 00 0000 00000000 00000000 00000000
            0800 1d00 01000000"
        )
    );
    // The C program: struct nlmsghdr, struct ifinfomsg, struct rtattr (IFLA_TARGET_NETNSID).
    assert_eq!(
        link_elsewhere_request(5, 7).finish(),
        hex("28000000 1200 0500 00000000 00000000  00 00 0000 07000000 00000000 00000000
            0800 2e00 05000000")
    );
    // `ip neigh`, up to the length that its header says.
    assert_eq!(
        neighbours_request().finish(),
        request("1c000000 1e00 0103 4ef30a6b 00000000  00000000 00000000 0000 00 00")
    );
    // `tc filter show dev v0 ingress`
    assert_eq!(
        filters_request(3, TC_INGRESS).finish(),
        request("24000000 2e00 0103 91f30a6b 00000000  00000000 03000000 00000000 f2ffffff 00000000")
    );
    // `tc filter del dev v0 ingress pref 49152 protocol all handle 1 bpf`
    assert_eq!(
        remove_filter_request(3, TC_INGRESS, &bpf_filter(1)).finish(),
        request(
            "2c000000 2d00 0500 91f30a6b 00000000  00000000 03000000 01000000 f2ffffff 000300c0
            0800 0100 62706600 # TCA_KIND"
        )
    );
    // `tc qdisc del dev v0 clsact`
    assert_eq!(
        remove_clsact_request(3).finish(),
        request(
            "30000000 2500 0500 52f30a6b 00000000  00000000 03000000 0000ffff f1ffffff 00000000
            0b00 0100 636c7361637400 00 # TCA_KIND"
        )
    );
}

/// What the kernel told, each with what is read in it: a datagram, its messages' types, and the
/// changes.
fn told() -> [(Vec<u8>, &'static [u16], Vec<Change>); 5] {
    let neighbour = |mac| Change::Neighbour { index: 3, address: vec![10, 0, 0, 2], mac };
    let link = InterfaceInfo {
        index: 3,
        name: "v0".into(),
        kind: "veth".into(),
        qdisc: "noqueue".into(),
        mtu: 1400,
        mac: Some([2, 0, 0, 0, 0, 9]),
        master: Some(2),
        group: 3,
        peer_elsewhere: Some((0, 2)),
        xdp: Some((2, 0x5b38)),
    };
    [
        (hex(LINK), &[RTM_NEWLINK], vec![Change::Link(link)]),
        (
            // `ip neigh`: struct ndmsg (permanent), NDA_DST, NDA_LLADDR, NDA_PROBES, NDA_CACHEINFO;
            // then NLMSG_DONE.
            hex("4c000000 1c00 0200 4ef30a6b 52360000  02 00 0000 03000000 8000 00 01
                0800 0100 0a000002
                0a00 0200 020000000022 0000
                0800 0400 00000000
                1400 0300 00000000000000000000000000000000
                14000000 0300 0200 4ef30a6b 52360000  00000000"),
            &[RTM_NEWNEIGH, NLMSG_DONE],
            vec![neighbour(Some([2, 0, 0, 0, 0, 0x22]))],
        ),
        (
            // `ip monitor neigh` when the entry went: its state is NUD_FAILED, and it has no
            // Ethernet address.
            hex("40000000 1c00 0000 00000000 ab340000  02 00 0000 03000000 2000 00 01
                0800 0100 0a000002
                0800 0400 00000000
                1400 0300 34000000340000003400000001000000"),
            &[RTM_NEWNEIGH],
            vec![neighbour(None)],
        ),
        (
            hex("40000000 1d00 0000 00000000 00000000  02 00 0000 03000000 2000 00 01
                0800 0100 0a000002
                0800 0400 00000000
                1400 0300 34000000340000003400000000000000"),
            &[RTM_DELNEIGH],
            vec![neighbour(None)],
        ),
        (
            // `ip monitor netconf`, as net.ipv4.conf.v0.forwarding became 1: NETCONFA_IFINDEX,
            // NETCONFA_FORWARDING.
            hex("24000000 5000 0000 00000000 00000000  02 000000
                0800 0100 03000000
                0800 0200 01000000"),
            &[RTM_NEWNETCONF],
            vec![Change::Forwarding(3)],
        ),
    ]
}

/// `tc filter show dev v0 ingress`: struct tcmsg, TCA_KIND, TCA_CHAIN; the second message has
/// TCA_OPTIONS, and there TCA_BPF_NAME, TCA_BPF_ID, TCA_BPF_TAG, TCA_BPF_FLAGS, TCA_BPF_FLAGS_GEN.
const FILTERS: &str = "
    34000000 2c00 0200 91f30a6b 29390000  00000000 03000000 00000000 f2ffffff 000300c0
    0800 0100 62706600
    0800 0b00 00000000
    6c000000 2c00 0200 91f30a6b 29390000  00000000 03000000 01000000 f2ffffff 000300c0
    0800 0100 62706600
    0800 0b00 00000000
    3800 0200
      0e00 0700 74632e6f3a5b74635d00 0000
      0800 0b00 3c5b0000
      0c00 0a00 f03f3c893109830e
      0800 0800 01000000
      0800 0900 08000000";

#[test]
fn what_the_kernel_tells_is_read() {
    for (datagram, kinds, changes) in told() {
        assert_eq!(messages(&datagram).map(|message| message.0).collect::<Vec<_>>(), kinds);
        let read: Vec<_> = messages(&datagram).filter_map(|(kind, body)| parse_change(kind, body)).collect();
        assert_eq!(read, changes);
    }
    let filters: Vec<_> = messages(&hex(FILTERS)).map(|(_, body)| Filter::parse(body)).collect();
    assert_eq!(filters, [Some(bpf_filter(0)), Some(bpf_filter(1))]);
}

#[test]
fn an_acknowledgement_is_no_error_and_what_is_too_short_for_either_is_one() {
    // Answers to `tc qdisc del dev v0 clsact`, and to a second `tc filter del` of the same filter:
    // struct nlmsgerr, and with the second the kernel's words (NLMSGERR_ATTR_MSG).
    let done = hex("24000000 0200 0001 52f30a6b 71360000  00000000
        30000000 2500 0500 52f30a6b 00000000");
    let failed = hex("68000000 0200 0002 91f30a6b 2b390000  feffffff
        2c000000 2d00 0500 91f30a6b 00000000 00000000 03000000 01000000 f2ffffff 000300c0 0800 0100 62706600
        2700 0100 43616e6e6f742066696e64207370656369666965642066696c74657220636861696e00 00");
    for (datagram, expected) in [(done, Ok(())), (failed, Err(Errno::NOENT))] {
        let (kind, body) = messages(&datagram).next().unwrap();
        assert_eq!((kind, outcome(body)), (NLMSG_ERROR, expected));
        for len in 0..4 {
            assert_eq!(outcome(&body[..len]), Err(Errno::BADMSG), "{len} bytes");
        }
    }
}

#[test]
fn a_datagram_that_is_cut_loses_the_message_that_is_cut_and_no_other() {
    let all = told().map(|told| told.0).into_iter().chain([hex(FILTERS)]);
    for datagram in all {
        let whole: Vec<_> = messages(&datagram).collect();
        for len in 0..datagram.len() {
            let cut: Vec<_> = messages(&datagram[..len]).collect();
            assert_eq!(cut, whole[..cut.len()], "{len} bytes");
            assert!(cut.iter().map(|message| HEADER_BYTES + message.1.len()).sum::<usize>() <= len, "{len} bytes");
            assert!(cut.len() < whole.len(), "{len} bytes");
        }
    }
}

#[test]
fn a_body_that_is_shorter_than_its_message_should_be_is_skipped_or_ends_its_attributes() {
    for (datagram, ..) in told() {
        let (kind, body) = messages(&datagram).next().unwrap();
        let whole = parse_change(kind, body).unwrap();
        let fixed = match kind {
            RTM_NEWLINK => LINK_BYTES,
            RTM_NEWNETCONF => NETCONF_BYTES,
            _ => NEIGHBOUR_BYTES,
        };
        for len in 0..body.len() {
            match parse_change(kind, &body[..len]) {
                None => {}
                Some(_) if len < fixed => panic!("{len} bytes of a message of type {kind} are no change"),
                Some(Change::Link(link)) => assert_eq!(link.index, 3),
                // The addresses of a neighbour come first; nothing else is read.
                Some(Change::Neighbour { mac: None, .. }) if len < NEIGHBOUR_BYTES + 20 => {}
                Some(change) => assert_eq!(change, whole, "{len} bytes"),
            }
        }
    }
    let filters = hex(FILTERS);
    let (_, body) = messages(&filters).nth(1).unwrap();
    for len in 0..body.len() {
        let filter = Filter::parse(&body[..len]);
        assert_eq!(filter.is_some(), len >= FILTER_BYTES + 8, "{len} bytes");
        assert!(filter.is_none_or(|filter| filter.name == "bpf" && filter.program.is_none()), "{len} bytes");
    }
}
