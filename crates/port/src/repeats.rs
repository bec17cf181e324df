//! Finds an uplink that storms: one that sends the same frame again and again although nothing asked it to.
//!
//! A frame counts as an unprovoked repeat if it equals the flow's frame before, and no frame of the flow that went to the
//! uplink pays for it. A guest that sends duplicate acknowledgements makes its peer retransmit, at most once for each:
//! these repeats are paid for. An uplink that repeats by itself soon has no frame left that pays.
//!
//! Repeats beyond [`REPEATS_PER_SECOND`] of a frame are dropped, paid for or not. A guest that answers each repeat it gets
//! therefore pays for so many and no more, so a storm that a guest answers is found. And a loop in which each side answers the
//! other, which is not blamed on the uplink since a guest can cause it, goes no faster. TCP has no use for more: a
//! sender repeats a segment at intervals of its retransmission timer, and acts on the first few duplicate acknowledgements.
//!
//! Looked at: TCP segments, by connection, and ARP and all protocols that only the uplink itself speaks. UDP and ICMP are
//! not: the uplink relays them for hosts outside, which may send equal ones as often as they like.

use tombolo_switch::Nanos;

/// So many unprovoked repeats of one frame, at no less than [`STORM_PER_SECOND`] for [`STORM_NS`], are a storm.
pub(crate) const STORM_REPEATS: u64 = 5000;
const STORM_PER_SECOND: u64 = 1000;
const STORM_NS: u64 = SECOND_NS;
const SECOND_NS: u64 = Nanos::SECOND.0;
/// So many repeats of one frame go through in a second.
pub(crate) const REPEATS_PER_SECOND: u64 = 1000;
/// Flows that are remembered.
const SLOTS: usize = 64;
/// Frames towards the uplink that are remembered as paying for repeats: more than its socket holds.
const MAX_CREDIT: u64 = 1 << 15;

/// Where the source and destination of a frame lie, what else names its flow, and what tells its frames apart.
struct Parts<'f> {
    source: [&'f [u8]; 2],
    destination: [&'f [u8]; 2],
    kind: [&'f [u8]; 2],
    content: [&'f [u8]; 2],
}

fn parts(frame: &[u8]) -> Option<Parts<'_>> {
    const TCP: u8 = 6;
    const UDP: u8 = 17;
    const ICMP: u8 = 1;
    const HEAD: usize = 128;
    let (ethertype, body) = (frame.get(12..14)?, frame.get(14..)?);
    let head = &body[..body.len().min(HEAD)];
    let other = Parts { source: [&[]; 2], destination: [&[]; 2], kind: [ethertype, &[]], content: [head, &[]] };
    if ethertype != [8, 0] {
        return Some(other);
    }
    let protocol = body.get(9..10)?;
    match protocol[0] {
        UDP | ICMP => None,
        // RFC 9293 §3.1: ports, then sequence and acknowledgement, flags and window.
        TCP => {
            let tcp = body.get(usize::from(body[0] & 15) * 4..)?;
            Some(Parts {
                source: [body.get(12..16)?, tcp.get(..2)?],
                destination: [body.get(16..20)?, tcp.get(2..4)?],
                kind: [ethertype, protocol],
                content: [body.get(2..4)?, tcp.get(4..16)?],
            })
        }
        _ => Some(Parts { kind: [ethertype, protocol], ..other }),
    }
}

/// FNV-1a.
fn hash<'b>(parts: impl IntoIterator<Item = &'b [u8]>) -> u64 {
    let bytes = parts.into_iter().flatten();
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3))
}

impl Parts<'_> {
    /// The flow of a frame that came from the uplink.
    fn flow(&self) -> u64 {
        hash(self.kind.into_iter().chain(self.source).chain(self.destination))
    }

    /// The same flow, of a frame that goes to the uplink.
    fn flow_back(&self) -> u64 {
        hash(self.kind.into_iter().chain(self.destination).chain(self.source))
    }
}

/// Costs a look at one slot for each frame.
#[derive(Debug)]
pub(crate) struct Repeats {
    slots: [Slot; SLOTS],
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    flow: u64,
    content: u64,
    /// Grows with each repeat and shrinks with each frame of another flow that has the same slot: at zero that one takes
    /// it. So a storm keeps its slot however many flows there are.
    hold: u64,
    /// Frames that went to the uplink and have paid for no repeat yet.
    credit: u64,
    /// Unprovoked repeats since `since`.
    count: u64,
    since: Nanos,
    /// Repeats that went through in the second that began at `window`.
    passed: u64,
    window: Nanos,
}

/// What [`Repeats::see`] says of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// It is one repeat too many, to be dropped.
    pub(crate) surplus: bool,
    /// The count of unprovoked repeats, once they are a storm.
    pub(crate) storm: Option<u64>,
}

impl Default for Repeats {
    fn default() -> Self {
        Repeats { slots: [Slot::default(); SLOTS] }
    }
}

impl Repeats {
    /// Notes a frame that goes to the uplink.
    pub(crate) fn sent(&mut self, frame: &[u8]) {
        let Some(parts) = parts(frame) else { return };
        let flow = parts.flow_back();
        let slot = &mut self.slots[flow as usize % SLOTS];
        if slot.flow == flow {
            slot.credit = (slot.credit + 1).min(MAX_CREDIT);
        }
    }

    /// Looks at a frame from the uplink.
    pub(crate) fn see(&mut self, now: Nanos, frame: &[u8]) -> Seen {
        let Some(parts) = parts(frame) else { return Seen::default() };
        let (flow, content) = (parts.flow(), hash(parts.content));
        let slot = &mut self.slots[flow as usize % SLOTS];
        if slot.flow != flow {
            slot.hold = slot.hold.saturating_sub(1);
            if slot.hold == 0 {
                *slot = Slot { flow, content, hold: 1, since: now, window: now, ..Slot::default() };
            }
            return Seen::default();
        }
        if slot.content != content {
            // What was paid for a repeat that has not come yet remains.
            *slot = Slot { content, hold: 1, count: 0, ..*slot };
            return Seen::default();
        }
        slot.hold = (slot.hold + 1).min(STORM_REPEATS);
        if now.since(slot.window).0 >= SECOND_NS {
            (slot.passed, slot.window) = (0, now);
        }
        let surplus = slot.passed >= REPEATS_PER_SECOND;
        slot.passed += u64::from(!surplus);
        Seen { surplus, storm: slot.storm(now) }
    }
}

impl Slot {
    /// Counts a repeat, unless it is paid for; returns the count once it is a storm.
    fn storm(&mut self, now: Nanos) -> Option<u64> {
        let slot = self;
        if slot.credit > 0 {
            slot.credit -= 1;
            return None;
        }
        if slot.count == 0 {
            slot.since = now;
        }
        slot.count += 1;
        let span = now.since(slot.since).0;
        if slot.count < STORM_REPEATS || span < STORM_NS {
            return None;
        }
        if slot.count.saturating_mul(SECOND_NS) / span >= STORM_PER_SECOND {
            return Some(slot.count);
        }
        slot.count = 0;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: [u8; 6] = [192, 0, 0, 2, 0x90, 1];
    const OUTSIDE: [u8; 6] = [198, 51, 100, 7, 0, 80];

    /// A segment between two ends, each an address and a port.
    fn segment(from: [u8; 6], to: [u8; 6], sequence: u32) -> Vec<u8> {
        let header: &[u8] = &[8, 0, 0x45, 0, 0, 40, 0, 1, 0, 0, 64, 6, 0, 0];
        let rest: &[u8] = &[0, 0, 0, 9, 0x50, 0x10, 1, 0, 0, 0, 0, 0];
        let (addresses, ports) = ([&from[..4], &to[..4]].concat(), [&from[4..], &to[4..]].concat());
        [&[2; 12], header, &addresses, &ports, &sequence.to_be_bytes(), rest].concat()
    }

    fn arp() -> Vec<u8> {
        [&[2; 12][..], &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &[7; 20]].concat()
    }

    /// At which of the repeats, 10000 a second, a storm is found.
    fn found(repeats: &mut Repeats, mut step: impl FnMut(&mut Repeats, u64) -> Vec<u8>) -> Option<u64> {
        (0..20 * STORM_REPEATS).find(|n| {
            let frame = step(repeats, *n);
            repeats.see(Nanos(n * 100_000), &frame).storm.is_some()
        })
    }

    #[test]
    fn repeats_without_a_cause_are_a_storm() {
        assert_eq!(found(&mut Repeats::default(), |_, _| segment(OUTSIDE, GUEST, 1)), Some(10_001));
        assert_eq!(found(&mut Repeats::default(), |_, _| arp()), Some(10_001));
        // A guest that answers each tenth.
        let at = found(&mut Repeats::default(), |repeats, n| {
            if n % 10 == 0 {
                repeats.sent(&segment(GUEST, OUTSIDE, 9));
            }
            segment(OUTSIDE, GUEST, 1)
        });
        assert!(at.is_some());
    }

    #[test]
    fn repeats_that_a_guest_provokes_are_no_storm() {
        // Each duplicate acknowledgement has its peer retransmit; they come in bursts, which the peer answers later.
        let provoked = |repeats: &mut Repeats, n: u64| {
            if n % 1000 == 1 {
                (0..1000).for_each(|_| repeats.sent(&segment(GUEST, OUTSIDE, 9)));
            }
            segment(OUTSIDE, GUEST, 1)
        };
        assert_eq!(found(&mut Repeats::default(), provoked), None);
        // What goes out on another flow provokes nothing on this one.
        let elsewhere = |repeats: &mut Repeats, _| {
            repeats.sent(&segment([192, 0, 0, 2, 0x90, 2], OUTSIDE, 9));
            segment(OUTSIDE, GUEST, 1)
        };
        assert!(found(&mut Repeats::default(), elsewhere).is_some());
    }

    #[test]
    fn a_storm_that_a_guest_answers_is_one() {
        let mut repeats = Repeats::default();
        let mut passed = 0;
        let found = (0..20 * STORM_REPEATS).find(|n| {
            let seen = repeats.see(Nanos(n * 100_000), &segment(OUTSIDE, GUEST, 1));
            if !seen.surplus {
                passed += 1;
                repeats.sent(&segment(GUEST, OUTSIDE, 9));
            }
            seen.storm.is_some()
        });
        assert!(found.is_some_and(|n| n < 2 * 10_000), "{found:?}");
        assert_eq!(passed, 2 * REPEATS_PER_SECOND + 1);
    }

    #[test]
    fn what_others_outside_can_send_is_not_blamed_on_the_uplink() {
        for protocol in [1, 17] {
            let mut frame = segment(OUTSIDE, GUEST, 1);
            frame[23] = protocol;
            assert_eq!(found(&mut Repeats::default(), |_, _| frame.clone()), None);
        }
    }

    #[test]
    fn segments_that_change_or_come_slowly_are_no_storm() {
        // Bursts of 4000, then the next sequence number.
        assert_eq!(found(&mut Repeats::default(), |_, n| segment(OUTSIDE, GUEST, (n / 4000) as u32)), None);
        let mut repeats = Repeats::default();
        for n in 0..2 * STORM_REPEATS {
            let at = Nanos(n * 2_000_000);
            assert_eq!(repeats.see(at, &segment(OUTSIDE, GUEST, 1)), Seen::default(), "500 a second");
        }
        assert_eq!(repeats.see(Nanos(0), &segment(OUTSIDE, GUEST, 1)[..20]), Seen::default());
    }

    #[test]
    fn many_flows_hide_no_storm() {
        let mut repeats = Repeats::default();
        let hidden = found(&mut repeats, |repeats, n| {
            // Every other frame belongs to one of many other flows, of which some have the storm's slot.
            let [high, low] = (n as u16).to_be_bytes();
            let other = repeats.see(Nanos(n * 100_000), &segment([198, 51, 100, 9, high, low], GUEST, 1));
            assert_eq!(other, Seen::default());
            segment(OUTSIDE, GUEST, 1)
        });
        assert!(hidden.is_some());
    }
}
