//! What conntrack holds of a TCP connection that was taken, made what it would be if the kernel had
//! seen every frame.
//!
//! The kernel sees one frame per lease. If that one carries data, the kernel waits for an
//! acknowledgement that it will not see, and the entry of an idle connection expires after five
//! minutes in place of five days. The flows know better (ebpf/sequence.h): once both directions
//! rest, and again at `detach`, the entry gets the flag and the timeout that belong to what was
//! acknowledged.

use crate::conntrack::{Connection, Conntrack, ESTABLISHED, Entry, UNACKNOWLEDGED, Update};
use crate::layout::{Flow, Tuple};
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

/// How long a connection rests before its entry is settled.
pub(crate) const RESTING: Duration = Duration::from_secs(2);
/// How far the kernel's timeout may be off from what its rule for unacknowledged data makes of it:
/// its ticks, and a lease.
const SLACK_S: u64 = 12;

/// Timeouts in force in this network namespace, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timeouts {
    established_s: u64,
    unacknowledged_s: u64,
}

impl Timeouts {
    /// From the sysctls; nothing where conntrack is not there.
    pub(crate) fn read() -> Option<Timeouts> {
        let read = |name: &str| {
            let path = format!("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_{name}");
            std::fs::read_to_string(path).ok()?.trim().parse().ok()
        };
        Some(Timeouts { established_s: read("established")?, unacknowledged_s: read("unacknowledged")? })
    }
}

/// A connection as its flows know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    /// The address of its entry, which identifies it as long as the entry lives.
    pub(crate) conn: u64,
    pub(crate) connection: Connection,
    /// When a frame of it came last.
    pub(crate) used_ns: u64,
    /// Of each direction, whether all its data was acknowledged.
    pub(crate) is_acknowledged: [bool; 2],
}

/// One direction, over all its flows.
#[derive(Clone, Copy)]
struct Side {
    tuple: Tuple,
    used_ns: u64,
    end: u32,
    ack: u32,
}

pub(crate) fn is_before(a: u32, b: u32) -> bool {
    (a.wrapping_sub(b) as i32) < 0
}

pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

/// A connection for conntrack's questions, by the tuple of any of its flows: an entry is found by
/// either direction.
pub(crate) fn by_tuple(tuple: &Tuple) -> Connection {
    Connection {
        source: octets(tuple.source),
        destination: octets(tuple.destination),
        source_port: tuple.source_port.to_be_bytes(),
        destination_port: tuple.destination_port.to_be_bytes(),
    }
}

/// The connections of which both directions are known for sure and that have not begun to end.
pub(crate) fn standings(flows: &[(Tuple, Flow)]) -> Vec<Standing> {
    let mut sides: HashMap<(u64, bool), Side> = HashMap::new();
    for (tuple, flow) in flows {
        let Some(p) = flow.progress.filter(|p| p.is_sure && !p.is_ending) else { continue };
        let new = Side { tuple: *tuple, used_ns: flow.used_ns, end: p.end, ack: p.ack };
        let ends = |t: &Tuple| (t.source, t.source_port, t.destination, t.destination_port);
        sides
            .entry((p.conn, p.is_reply))
            .and_modify(|side| {
                if ends(&side.tuple) != ends(tuple) {
                    // The kernel has made another connection's entry at the same address.
                    if side.used_ns < new.used_ns {
                        *side = new;
                    }
                    return;
                }
                side.used_ns = side.used_ns.max(new.used_ns);
                side.end = if is_before(side.end, new.end) { new.end } else { side.end };
                side.ack = if is_before(side.ack, new.ack) { new.ack } else { side.ack };
            })
            .or_insert(new);
    }
    let first = sides.iter().filter(|((_, is_reply), _)| !is_reply);
    first
        .filter_map(|((conn, _), there)| {
            let back = sides.get(&(*conn, true))?;
            let t = &there.tuple;
            Some(Standing {
                conn: *conn,
                connection: by_tuple(t),
                used_ns: there.used_ns.max(back.used_ns),
                is_acknowledged: [!is_before(back.ack, there.end), !is_before(there.ack, back.end)],
            })
        })
        .collect()
}

/// What is to be altered of an entry whose connection has rested for so long; nothing where the
/// kernel is right.
fn due(entry: Entry, is_acknowledged: [bool; 2], rested_s: u64, timeouts: Timeouts) -> Option<Update> {
    if entry.state != ESTABLISHED {
        return None;
    }
    let flags = is_acknowledged.map(|yes| if yes { 0 } else { UNACKNOWLEDGED });
    let was = entry.flags.map(|f| f & UNACKNOWLEDGED);
    if was == flags {
        return None;
    }
    let Timeouts { established_s, unacknowledged_s } = timeouts;
    let left = |of: u64| u32::try_from(of.saturating_sub(rested_s).max(1)).unwrap_or(u32::MAX);
    let timeout_s = u64::from(entry.timeout_s);
    let (waited, waits) = (was != [0; 2], flags != [0; 2]);
    // A `ct timeout` of nftables may be in force that is shorter than the rule for unacknowledged
    // data, or was set in place of the sysctl's.
    let is_as_of = |of: u64| timeout_s.abs_diff(of.saturating_sub(rested_s)) <= SLACK_S;
    let timeout_s = if established_s <= unacknowledged_s || waited == waits {
        None
    } else if waited {
        is_as_of(unacknowledged_s).then(|| left(established_s))
    } else {
        (timeout_s > unacknowledged_s).then(|| left(unacknowledged_s))
    };
    Some(Update { flags: Some((flags, UNACKNOWLEDGED)), state: None, timeout_s })
}

/// Ends the kernel's wait for an acknowledgement that it will not recognise, moments after the wait
/// began. Whether it did: then [`confirm`] is due once no frame of before is under way.
pub(crate) fn acknowledge(conntrack: &Conntrack, connection: &Connection, timeouts: Timeouts) -> bool {
    let Ok(Some(entry)) = conntrack.entry(connection) else { return false };
    // If it fails, it is wished for again.
    due(entry, [true; 2], 0, timeouts).is_some_and(|update| conntrack.update(connection, update).is_ok())
}

/// Sets the timeout of a connection that was acknowledged once more, if a frame has undone it. The
/// kernel sets the timeout before the flag, and chooses a frame's timeout by the flag some time
/// before it sets that.
pub(crate) fn confirm(conntrack: &Conntrack, connection: &Connection, timeouts: Timeouts) {
    if let Ok(Some(entry)) = conntrack.entry(connection)
        && let Some(update) = undone(entry, timeouts)
    {
        let _ = conntrack.update(connection, update);
    }
}

/// What sets the timeout of an entry that was just acknowledged and has that of one that waits.
fn undone(entry: Entry, Timeouts { established_s, unacknowledged_s }: Timeouts) -> Option<Update> {
    let waits = entry.flags.iter().any(|flags| flags & UNACKNOWLEDGED != 0);
    let is_short = u64::from(entry.timeout_s).abs_diff(unacknowledged_s) <= SLACK_S;
    let timeout_s = u32::try_from(established_s).ok().filter(|_| established_s > unacknowledged_s);
    let is_undone = entry.state == ESTABLISHED && !waits && is_short;
    timeout_s.filter(|_| is_undone).map(|seconds| Update { timeout_s: Some(seconds), ..Update::default() })
}

/// Settles these connections. One that is gone, or that the kernel does not alter, is left as it
/// is.
pub(crate) fn settle<'a>(
    conntrack: &Conntrack,
    standings: impl IntoIterator<Item = &'a Standing>,
    timeouts: Timeouts,
    now_ns: u64,
) {
    for standing in standings {
        let Ok(Some(entry)) = conntrack.entry(&standing.connection) else { continue };
        let rested_s = now_ns.saturating_sub(standing.used_ns) / 1_000_000_000;
        if let Some(update) = due(entry, standing.is_acknowledged, rested_s, timeouts) {
            let _ = conntrack.update(&standing.connection, update);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Progress;

    const TIMEOUTS: Timeouts = Timeouts { established_s: 432_000, unacknowledged_s: 300 };

    fn flow(is_reply: bool, source_port: u16, used_ns: u64, end: u32, ack: u32) -> (Tuple, Flow) {
        let address = |n| IpAddr::from([10, 0, 0, n]);
        let (a, b) = if is_reply { (2, 1) } else { (1, 2) };
        let tuple = Tuple {
            input: 3,
            source: address(a),
            source_port: if is_reply { 80 } else { source_port },
            destination: address(b),
            destination_port: if is_reply { source_port } else { 80 },
            protocol: 6,
        };
        let progress =
            Some(Progress { conn: 0x1000, is_reply, is_sure: true, is_ending: false, end, ack, window: 500, scale: 7 });
        (tuple, Flow { until_ns: 0, tracked: true, epoch: 0, output: 4, to: [0; 6], used_ns, progress })
    }

    #[test]
    fn a_connection_is_settled_by_the_furthest_of_all_its_flows() {
        // The second flow of the first direction has another TOS; sequence numbers wrap.
        let flows = [flow(false, 9, 5, u32::MAX - 9, 70), flow(false, 9, 7, 10, 100), flow(true, 9, 6, 100, 10)];
        let all = standings(&flows);
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].used_ns, all[0].is_acknowledged), (7, [true, true]));
        assert_eq!(all[0].connection.source_port, [0, 9]);
        let late = [flow(false, 9, 7, 11, 100), flow(true, 9, 6, 101, 10)];
        assert_eq!(standings(&late)[0].is_acknowledged, [false, false]);
    }

    #[test]
    fn what_is_not_known_for_sure_or_of_one_direction_only_is_left_alone() {
        let (there, back) = (flow(false, 9, 7, 10, 100), flow(true, 9, 6, 100, 10));
        assert!(standings(&[there]).is_empty() && standings(&[back]).is_empty());
        for change in [|p: &mut Progress| p.is_sure = false, |p: &mut Progress| p.is_ending = true] {
            let mut other = back;
            change(other.1.progress.as_mut().unwrap());
            assert!(standings(&[there, other]).is_empty());
        }
    }

    #[test]
    fn an_entry_that_took_the_place_of_another_is_the_one_that_was_used_last() {
        let flows = [flow(false, 8, 1, 5, 5), flow(false, 9, 7, 10, 100), flow(true, 9, 6, 100, 10)];
        assert_eq!(standings(&flows)[0].connection.source_port, [0, 9]);
    }

    #[test]
    fn a_timeout_that_a_frame_set_by_the_flag_of_before_is_set_again() {
        let entry = |flags, timeout_s| Entry { state: ESTABLISHED, flags, timeout_s };
        let again = Some(Update { timeout_s: Some(432_000), ..Update::default() });
        assert_eq!(undone(entry([8, 8], 299), TIMEOUTS), again);
        assert_eq!(undone(entry([8, 8], 431_999), TIMEOUTS), None);
        // Data has come since, and the kernel waits for its acknowledgement.
        assert_eq!(undone(entry([0x18, 8], 299), TIMEOUTS), None);
        // A `ct timeout` of 100 s, and sysctls by which nothing waits for less long.
        assert_eq!(undone(entry([8, 8], 100), TIMEOUTS), None);
        let equal = Timeouts { established_s: 300, unacknowledged_s: 300 };
        assert_eq!(undone(entry([8, 8], 299), equal), None);
        assert_eq!(undone(Entry { state: 5, flags: [8, 8], timeout_s: 299 }, TIMEOUTS), None);
    }

    #[test]
    fn flags_and_timeout_become_those_of_what_was_acknowledged() {
        let entry = |flags, timeout_s| Entry { state: ESTABLISHED, flags, timeout_s };
        let update = |values, timeout_s| Some(Update { flags: Some((values, UNACKNOWLEDGED)), state: None, timeout_s });
        let yes = [true; 2];
        // The kernel waits in vain: five days from the last frame on.
        assert_eq!(due(entry([0x18, 8], 297), yes, 3, TIMEOUTS), update([0; 2], Some(431_997)));
        // It is right.
        assert_eq!(due(entry([8, 8], 431_990), yes, 3, TIMEOUTS), None);
        assert_eq!(due(entry([8, 0x18], 297), [true, false], 3, TIMEOUTS), None);
        // It does not know that data waits.
        assert_eq!(due(entry([8, 8], 431_990), [false, true], 3, TIMEOUTS), update([0x10, 0], Some(297)));
        // A `ct timeout` of 100 s is in force, which is neither of the two.
        assert_eq!(due(entry([0x18, 8], 97), yes, 3, TIMEOUTS), update([0; 2], None));
        // It is closing.
        assert_eq!(due(Entry { state: 5, flags: [0x18, 8], timeout_s: 60 }, yes, 3, TIMEOUTS), None);
    }
}
