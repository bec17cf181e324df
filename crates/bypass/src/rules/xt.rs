//! iptables' matches and targets, as `iptables-nft` puts them into nftables rules.
//!
//! Those that all frames of a flow have in common are listed; of a few the data is read, since
//! firewalls lean on them. One that is not listed judges each frame.

use super::compare::Match;
use super::filter::Filter;
use super::world::{Position, Protocol, World};
use std::collections::BTreeSet;

/// Matches with one answer for all frames of a flow, or for none that may be taken (SCTP,
/// fragments).
const STABLE_MATCHES: &[&str] = &[
    "addrtype",
    "ah",
    "cgroup",
    "cluster",
    "connlabel",
    "connmark",
    "dccp",
    "devgroup",
    "dscp",
    "esp",
    "frag",
    "hbh",
    "helper",
    "hl",
    "icmp",
    "icmp6",
    "ipcomp",
    "iprange",
    "ipv6header",
    "ipvs",
    "mark",
    "mh",
    "multiport",
    "owner",
    "physdev",
    "pkttype",
    "policy",
    "realm",
    "rpfilter",
    "rt",
    "sctp",
    "socket",
    "srh",
    "tos",
    "ttl",
];

/// Targets that do the same with all frames of a flow, or whose work is seen when a flow is
/// learned. TCPMSS alters SYN only.
const STABLE_TARGETS: &[&str] = &[
    "CHECKSUM",
    "CLASSIFY",
    "CONNMARK",
    "CONNSECMARK",
    "CT",
    "DNAT",
    "DNPT",
    "DSCP",
    "HL",
    "HMARK",
    "MARK",
    "MASQUERADE",
    "NETMAP",
    "NOTRACK",
    "REDIRECT",
    "REJECT",
    "SECMARK",
    "SET",
    "SNAT",
    "SNPT",
    "TCPMSS",
    "TOS",
    "TTL",
];

/// `XT_CONNTRACK_*` and `XT_STATE_*`.
const CONNTRACK_STATE: u16 = 1 << 0;
const CONNTRACK_EXPIRES: u16 = 1 << 7;
const CONNTRACK_UNTRACKED: u32 = 1 << 8;
/// Where `struct xt_conntrack_mtinfo2` and `3` have match_flags, invert_flags and state_mask.
const CONNTRACK_FLAGS_AT: usize = 146;
/// `ct state`'s bit of what is not tracked, which `xt_state` has too.
const UNTRACKED: u32 = 1 << 6;

/// `XT_TCP_INV_*`.
const TCP_INVERT_SOURCE: u8 = 1;
const TCP_INVERT_DESTINATION: u8 = 2;
const TCP_INVERT_FLAGS: u8 = 4;

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn settled(is_true: bool) -> Match {
    if is_true { Match::Always } else { Match::Never }
}

/// Both have to hold.
fn both(first: Match, second: impl FnOnce(&Filter) -> Match, filter: &Filter) -> Match {
    match first {
        Match::Always => second(filter),
        Match::Only(some) | Match::Maybe(some) => match second(&some) {
            Match::Always => Match::Maybe(some),
            other => other,
        },
        other => other,
    }
}

/// `-m NAME`, with its data.
pub(crate) fn matches(world: World, at: Position, name: &str, revision: u32, info: &[u8], filter: &Filter) -> Match {
    let known = match name {
        "comment" => Some(Match::Always),
        "conntrack" if revision >= 2 => conntrack(world, at, info),
        "state" if at.knows_state => info
            .get(..4)
            .and_then(|b| Some(u32::from_ne_bytes(b.try_into().ok()?)))
            .map(|states| settled(states & world.state_bit() != 0)),
        "tcp" => tcp(world, at, info, filter),
        "udp" => udp(world, at, info, filter),
        _ => None,
    };
    match known {
        Some(known) => known,
        None if matches!(name, "conntrack" | "state" | "udp") || STABLE_MATCHES.contains(&name) => {
            Match::Maybe(*filter)
        }
        None => Match::Judges(format!("matches -m {name}")),
    }
}

/// `-m set`, with the sets whose entries have MAC addresses. Those of a flow's frames may differ,
/// and what a set has counted grows with each frame that the kernel sees. `struct
/// xt_set_info_match_v1` to `v4`: the set's index, and since the third two comparisons with
/// counters, each an operator beside eight bytes.
pub(crate) fn set(revision: u32, info: &[u8], mac_sets: &BTreeSet<u16>, filter: &Filter) -> Match {
    let operators: &[usize] = match revision {
        0..=2 => &[],
        3 => &[8, 24],
        4 => &[16, 32],
        _ => return Match::Judges("matches -m set".into()),
    };
    match (u16_at(info, 0), operators.iter().map(|at| info.get(*at)).collect::<Option<Vec<_>>>()) {
        (Some(index), _) if mac_sets.contains(&index) => Match::Judges("matches a set of MAC addresses".into()),
        (Some(_), Some(operators)) if operators.iter().all(|operator| **operator == 0) => Match::Maybe(*filter),
        (Some(_), Some(_)) => Match::Judges("matches the counters of a set".into()),
        _ => Match::Judges("matches -m set".into()),
    }
}

fn conntrack(world: World, at: Position, info: &[u8]) -> Option<Match> {
    let word = |n| u16_at(info, CONNTRACK_FLAGS_AT + n);
    let (flags, inverted, states) = (word(0)?, word(2)?, word(4)?);
    if flags & CONNTRACK_EXPIRES != 0 {
        return Some(Match::Judges("matches -m conntrack --ctexpire".into()));
    }
    if flags != CONNTRACK_STATE || !at.knows_state {
        return None;
    }
    let own = if world.state_bit() == UNTRACKED { CONNTRACK_UNTRACKED } else { world.state_bit() };
    // SNAT and DNAT, which are states here, no other bit tells of.
    let known = 0b1111 | CONNTRACK_UNTRACKED;
    let is_in = u32::from(states) & own != 0;
    if !is_in && u32::from(states) & !known != 0 {
        return None;
    }
    Some(settled(is_in != (inverted & CONNTRACK_STATE != 0)))
}

/// `struct xt_tcp`: two ranges of ports, an option, flags, what of it is inverted.
fn tcp(world: World, at: Position, info: &[u8], filter: &Filter) -> Option<Match> {
    if world.protocol != Protocol::Tcp {
        return Some(Match::Never);
    }
    let [option, mask, compared, inverted] = *info.get(8..12)? else { return None };
    if option != 0 {
        return Some(Match::Judges("matches TCP's options".into()));
    }
    let flags = |_: &Filter| {
        const KNOWN: u8 = 0x17;
        const VALUE: u8 = 0x10;
        let is_other = (compared & !mask) != 0 || (compared ^ VALUE) & mask & KNOWN != 0;
        match (is_other, mask & !KNOWN) {
            (true, _) => settled(inverted & TCP_INVERT_FLAGS != 0),
            (false, 0) => settled(inverted & TCP_INVERT_FLAGS == 0),
            (false, _) => Match::Judges("matches TCP's flags".into()),
        }
    };
    Some(both(ports(at, info, inverted, filter)?, flags, filter))
}

/// `struct xt_udp`: two ranges of ports, which of them are inverted.
fn udp(world: World, at: Position, info: &[u8], filter: &Filter) -> Option<Match> {
    if world.protocol != Protocol::Udp {
        return Some(Match::Never);
    }
    ports(at, info, *info.get(8)?, filter)
}

fn ports(at: Position, info: &[u8], inverted: u8, filter: &Filter) -> Option<Match> {
    let mut narrow = *filter;
    let mut is_all = true;
    let sides = [
        (0, TCP_INVERT_SOURCE, at.source_is_out.is_some(), &mut narrow.source_ports),
        (4, TCP_INVERT_DESTINATION, at.destination_is_out.is_some(), &mut narrow.destination_ports),
    ];
    for (offset, inverts, is_known, range) in sides {
        let (first, last) = (u16_at(info, offset)?, u16_at(info, offset + 2)?);
        if inverted & inverts != 0 || !is_known {
            is_all &= inverted & inverts == 0 && (first, last) == (0, u16::MAX);
            continue;
        }
        if first <= range.0 && range.1 <= last {
            continue;
        }
        is_all = false;
        *range = (range.0.max(first), range.1.min(last));
        if range.0 > range.1 {
            return Some(Match::Never);
        }
    }
    Some(if is_all { Match::Always } else { Match::Maybe(narrow) })
}

/// `-j NAME`: why it judges each frame, if it does.
pub(crate) fn target(name: &str) -> Option<String> {
    (!STABLE_TARGETS.contains(&name)).then(|| format!("-j {name}"))
}

/// Whether no frame gets past it.
pub(crate) fn ends(name: &str) -> bool {
    name == "REJECT"
}

#[cfg(test)]
mod tests {
    use super::super::ruleset::{Hook, IPV4};
    use super::*;

    fn forward() -> Position {
        Position::of(IPV4, &Hook { number: 2, priority: 0, devices: vec![] }).unwrap()
    }

    fn world(protocol: Protocol, state: usize) -> World {
        World { v6: false, protocol, state }
    }

    fn classify(world: World, name: &str, info: &[u8]) -> Match {
        matches(world, forward(), name, 3, info, &Filter::ALL)
    }

    /// `-m conntrack --ctstate RELATED,ESTABLISHED` is 6.
    fn ctstate(states: u16, inverted: u16) -> Vec<u8> {
        let mut info = vec![0; 168];
        for (at, value) in [(146, CONNTRACK_STATE), (148, inverted), (150, states)] {
            info[at..at + 2].copy_from_slice(&value.to_ne_bytes());
        }
        info
    }

    #[test]
    fn the_state_of_a_connection_settles_what_asks_for_it() {
        let by = |info: &[u8], state| classify(world(Protocol::Udp, state), "conntrack", info);
        assert_eq!([0, 1, 2, 3, 4].map(|s| by(&ctstate(6, 0), s) == Match::Always), [true, true, false, false, false]);
        assert_eq!([0, 2].map(|s| by(&ctstate(6, 1), s)), [Match::Never, Match::Always]);
        assert_eq!([3, 4].map(|s| by(&ctstate(1 << 8, 0), s)), [Match::Always, Match::Never]);
        // --ctstate DNAT: by what is not known here.
        assert_eq!(by(&ctstate(1 << 7, 0), 0), Match::Maybe(Filter::ALL));
        for length in 0..152 {
            assert_eq!(by(&ctstate(6, 0)[..length], 0), Match::Maybe(Filter::ALL));
        }
        assert_eq!(classify(world(Protocol::Udp, 0), "state", &6u32.to_ne_bytes()), Match::Always);
    }

    #[test]
    fn the_clamp_of_a_handshakes_segments_meets_no_frame_that_is_taken() {
        let tcp = |mask, compared, inverted: u8| {
            let mut info = [0, 0, 0xff, 0xff].repeat(2);
            info.extend([0, mask, compared, inverted]);
            classify(world(Protocol::Tcp, 0), "tcp", &info)
        };
        // --tcp-flags SYN,RST SYN, as before -j TCPMSS; ! --syn; --tcp-flags PSH PSH; none.
        assert_eq!(tcp(0x06, 0x02, 0), Match::Never);
        assert_eq!(tcp(0x17, 0x02, 4), Match::Always);
        assert_eq!(tcp(0x08, 0x08, 0), Match::Judges("matches TCP's flags".into()));
        assert_eq!(tcp(0, 0, 0), Match::Always);
        assert_eq!(classify(world(Protocol::Udp, 0), "tcp", &[]), Match::Never);
        assert_eq!(classify(world(Protocol::Tcp, 0), "tcp", &[0; 11]), Match::Judges("matches -m tcp".into()));
    }

    #[test]
    fn ports_narrow() {
        let mut info = [0u16, 0xffff, 53, 53].map(u16::to_ne_bytes).concat();
        info.push(0);
        let expected = Filter { destination_ports: (53, 53), ..Filter::ALL };
        assert_eq!(classify(world(Protocol::Udp, 0), "udp", &info), Match::Maybe(expected));
        info[8] = TCP_INVERT_DESTINATION;
        assert_eq!(classify(world(Protocol::Udp, 0), "udp", &info), Match::Maybe(Filter::ALL));
    }

    #[test]
    fn sets_with_counters_or_mac_addresses_judge() {
        let by = |revision, info: &[u8]| set(revision, info, &BTreeSet::from([7]), &Filter::ALL);
        let info = |index: u16, operator: Option<usize>| {
            let mut info = [&index.to_ne_bytes()[..], &[0; 46]].concat();
            operator.into_iter().for_each(|at| info[at] = 4);
            info
        };
        for revision in 0..5 {
            assert_eq!(by(revision, &info(6, None)), Match::Maybe(Filter::ALL));
            assert_eq!(by(revision, &info(7, None)), Match::Judges("matches a set of MAC addresses".into()));
        }
        for (revision, at) in [(3, 8), (3, 24), (4, 16), (4, 32)] {
            assert_eq!(by(revision, &info(6, Some(at))), Match::Judges("matches the counters of a set".into()));
        }
        assert_eq!(by(5, &info(6, None)), Match::Judges("matches -m set".into()));
        assert_eq!(
            [0, 1, 8, 32].map(|n| by(4, &info(6, None)[..n])),
            [(); 4].map(|()| Match::Judges("matches -m set".into()))
        );
    }

    #[test]
    fn what_is_not_listed_judges() {
        for name in [
            "limit",
            "hashlimit",
            "statistic",
            "string",
            "u32",
            "length",
            "connbytes",
            "quota",
            "bpf",
            "mac",
            "new",
            "eui64",
            "nfacct",
        ] {
            assert!(matches!(classify(world(Protocol::Udp, 0), name, &[]), Match::Judges(_)), "{name}");
        }
        assert_eq!(classify(world(Protocol::Udp, 0), "mark", &[]), Match::Maybe(Filter::ALL));
        assert_eq!(classify(world(Protocol::Udp, 0), "comment", &[]), Match::Always);
        assert_eq!(target("MASQUERADE"), None);
        assert!(target("LOG").is_some() && target("TEE").is_some() && target("NEW").is_some());
    }
}
