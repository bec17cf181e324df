//! Finds an uplink that storms: one that sends frames without news again and again although nothing
//! asked it to.
//!
//! A frame has no news if it tells its receiver nothing that the flow has not told before: a TCP
//! segment that advances neither the sequence nor the acknowledgement and has the flags and window
//! of the one before, or any other frame that equals one of the flow's last [`CONTENTS`]. It is
//! unprovoked if no frame of the flow that went to the uplink pays for it. A guest that sends
//! duplicate acknowledgements makes its peer retransmit, at most once for each: these frames are
//! paid for. An uplink that repeats by itself soon has no frame left that pays.
//!
//! Two limits hold whether a frame is paid for or not: [`REPEATS_PER_SECOND`] of equal frames, and
//! [`STALE_PER_SECOND`] of a flow's frames without news; what is beyond is dropped. A guest that
//! answers each such frame therefore pays for so many and no more, so a storm that a guest answers
//! is found. And a loop in which each side answers the other, which is not blamed on the uplink
//! since a guest can cause it, goes no faster. TCP has no use for more: a sender repeats a segment
//! by its retransmission timer, and acts on the first few duplicate acknowledgements.
//!
//! Looked at: TCP segments, by connection, and ARP and all protocols that only the uplink itself
//! speaks. UDP and ICMP are not: the uplink relays them for hosts outside, which may send equal
//! ones as often as they like.

use std::hash::{BuildHasher, Hasher, RandomState};

use crate::Nanos;

/// So many unprovoked frames without news in a flow, at no less than 1000 a second for at least a
/// second, are a storm.
pub const STORM_REPEATS: u64 = 5000;
const STORM_PER_SECOND: u64 = 1000;
const STORM_NS: u64 = SECOND_NS;
const SECOND_NS: u64 = Nanos::SECOND.0;
/// So many equal frames of a flow go through in a second.
pub(crate) const REPEATS_PER_SECOND: u64 = 1000;
/// So many frames without news of a flow go through in a second.
const STALE_PER_SECOND: u64 = 5000;
/// Flows are remembered in so many sets, by a keyed hash, and so many to a set.
const SETS: usize = 32;
const FLOWS: usize = 4;
/// Different frames of a flow that are remembered.
const CONTENTS: usize = 4;
/// Frames towards the uplink that are remembered as paying for repeats: more than its socket holds.
const MAX_CREDIT: u64 = 1 << 15;

/// What a TCP segment tells (RFC 9293 §3.1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Segment {
    /// The sequence number behind it.
    end: u32,
    ack: u32,
    flags: u8,
    window: u16,
}

/// Where the source and destination of a frame lie, what else names its flow, and what tells its
/// frames apart.
struct Parts<'f> {
    source: [&'f [u8]; 2],
    destination: [&'f [u8]; 2],
    kind: [&'f [u8]; 2],
    content: [&'f [u8]; 2],
    segment: Option<Segment>,
}

fn parts(frame: &[u8]) -> Option<Parts<'_>> {
    const TCP: u8 = 6;
    const UDP: u8 = 17;
    const ICMP: u8 = 1;
    const HEAD: usize = 128;
    let (ethertype, body) = (frame.get(12..14)?, frame.get(14..)?);
    let head = &body[..body.len().min(HEAD)];
    let (none, kind) = ([&[][..]; 2], [ethertype, &[]]);
    let other = Parts { source: none, destination: none, kind, content: [head, &[]], segment: None };
    if ethertype != [8, 0] {
        return Some(other);
    }
    let protocol = body.get(9..10)?;
    match protocol[0] {
        UDP | ICMP => None,
        TCP => {
            let ip_bytes = usize::from(body[0] & 15) * 4;
            let tcp = body.get(ip_bytes..)?;
            let number = |at: usize| Some(u32::from_be_bytes(tcp.get(at..at + 4)?.try_into().ok()?));
            let short = |of: &[u8], at: usize| Some(u16::from_be_bytes(of.get(at..at + 2)?.try_into().ok()?));
            let headers = ip_bytes + usize::from(tcp.get(12)? >> 4) * 4;
            let payload = usize::from(short(body, 2)?).saturating_sub(headers) as u32;
            let segment = Segment {
                end: number(4)?.wrapping_add(payload),
                ack: number(8)?,
                flags: *tcp.get(13)?,
                window: short(tcp, 14)?,
            };
            Some(Parts {
                source: [body.get(12..16)?, tcp.get(..2)?],
                destination: [body.get(16..20)?, tcp.get(2..4)?],
                kind: [ethertype, protocol],
                content: [body.get(2..4)?, tcp.get(4..16)?],
                segment: Some(segment),
            })
        }
        _ => Some(Parts { kind: [ethertype, protocol], ..other }),
    }
}

/// Costs a keyed hash and a look at one set for each frame.
#[derive(Debug)]
pub(crate) struct Repeats {
    sets: Box<[[Flow; FLOWS]; SETS]>,
    keys: RandomState,
}

#[derive(Clone, Copy, Debug, Default)]
struct Flow {
    hash: u64,
    /// Grows with each frame without news and shrinks with each frame of a flow that has no place
    /// in the set: at zero that one takes it. So a storm keeps its place however many flows there
    /// are.
    hold: u64,
    /// Frames that went to the uplink and have paid for no repeat yet.
    credit: u64,
    /// Unprovoked frames without news since `since`.
    count: u64,
    since: Nanos,
    /// The furthest that its segments have told.
    told: Segment,
    /// Frames without news that went through.
    stale: Rate,
    contents: [Content; CONTENTS],
    /// The next of `contents` to be replaced.
    oldest: usize,
}

/// A frame of a flow, and how often it came again.
#[derive(Clone, Copy, Debug, Default)]
struct Content {
    hash: u64,
    repeats: Rate,
}

/// What went through in the second that began at `window`.
#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    passed: u64,
    window: Nanos,
}

impl Rate {
    /// Whether one more goes through.
    fn admits(&mut self, now: Nanos, per_second: u64) -> bool {
        if now.since(self.window).0 >= SECOND_NS {
            *self = Rate { passed: 0, window: now };
        }
        let admitted = self.passed < per_second;
        self.passed += u64::from(admitted);
        admitted
    }
}

/// What [`Repeats::see`] says of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    /// It is one too many, to be dropped.
    pub(crate) surplus: bool,
    /// The count of unprovoked frames without news, once they are a storm.
    pub(crate) storm: Option<u64>,
}

impl Default for Repeats {
    fn default() -> Self {
        Repeats { sets: Box::new([[Flow::default(); FLOWS]; SETS]), keys: RandomState::new() }
    }
}

impl Repeats {
    fn hash<'b>(&self, parts: impl IntoIterator<Item = &'b [u8]>) -> u64 {
        let mut hasher = self.keys.build_hasher();
        parts.into_iter().for_each(|part| hasher.write(part));
        hasher.finish()
    }

    /// Notes a frame that goes to the uplink.
    pub(crate) fn sent(&mut self, frame: &[u8]) {
        let Some(Parts { source, destination, kind, .. }) = parts(frame) else { return };
        // As the flow's frames from the uplink have it.
        let hash = self.hash(kind.into_iter().chain(destination).chain(source));
        if let Some(flow) = self.sets[hash as usize % SETS].iter_mut().find(|flow| flow.hash == hash) {
            flow.credit = (flow.credit + 1).min(MAX_CREDIT);
        }
    }

    /// Looks at a frame from the uplink.
    pub(crate) fn see(&mut self, now: Nanos, frame: &[u8]) -> Seen {
        let Some(Parts { source, destination, kind, content, segment }) = parts(frame) else { return Seen::default() };
        let hash = self.hash(kind.into_iter().chain(source).chain(destination));
        let content = self.hash(content);
        let set = &mut self.sets[hash as usize % SETS];
        match set.iter_mut().find(|flow| flow.hash == hash) {
            Some(flow) => flow.see(now, content, segment),
            None => {
                if let Some(weakest) = set.iter_mut().min_by_key(|flow| flow.hold) {
                    weakest.hold = weakest.hold.saturating_sub(1);
                    if weakest.hold == 0 {
                        *weakest = Flow::new(hash, now, content, segment);
                    }
                }
                Seen::default()
            }
        }
    }
}

impl Flow {
    fn new(hash: u64, now: Nanos, content: u64, segment: Option<Segment>) -> Flow {
        let mut flow = Flow { hash, hold: 1, since: now, told: segment.unwrap_or_default(), ..Flow::default() };
        flow.contents[0].hash = content;
        flow.oldest = 1;
        flow
    }

    fn see(&mut self, now: Nanos, content: u64, segment: Option<Segment>) -> Seen {
        let known = self.contents.iter().position(|known| known.hash == content);
        let equals = match known {
            Some(at) => !self.contents[at].repeats.admits(now, REPEATS_PER_SECOND),
            None => {
                self.contents[self.oldest] = Content { hash: content, repeats: Rate::default() };
                self.oldest = (self.oldest + 1) % CONTENTS;
                false
            }
        };
        if segment.map_or(known.is_none(), |segment| self.is_news(segment, known.is_none())) {
            (self.hold, self.count) = (1, 0);
            return Seen::default();
        }
        self.hold = (self.hold + 1).min(STORM_REPEATS);
        let surplus = equals || !self.stale.admits(now, STALE_PER_SECOND);
        Seen { surplus, storm: self.storm(now) }
    }

    /// Whether a segment tells something; notes it. Other flags or another window are news only in
    /// a frame that is new.
    fn is_news(&mut self, segment: Segment, is_new: bool) -> bool {
        const SYN: u8 = 2;
        let further = |to: u32, from: u32| to.wrapping_sub(from) as i32 > 0;
        let Segment { end, ack, flags, window } = self.told;
        let news = further(segment.end, end)
            || further(segment.ack, ack)
            || is_new && (flags, window) != (segment.flags, segment.window);
        // A SYN begins another connection, with numbers of its own.
        let begins = segment.flags & SYN != 0 && flags & SYN == 0;
        if news {
            let furthest = |a: u32, b: u32| if further(a, b) { a } else { b };
            self.told = match begins {
                true => segment,
                false => Segment { end: furthest(segment.end, end), ack: furthest(segment.ack, ack), ..segment },
            };
        }
        news
    }

    /// Counts a frame without news, unless it is paid for; returns the count once it is a storm.
    fn storm(&mut self, now: Nanos) -> Option<u64> {
        if self.credit > 0 {
            self.credit -= 1;
            return None;
        }
        if self.count == 0 {
            self.since = now;
        }
        self.count += 1;
        let span = now.since(self.since).0;
        if self.count < STORM_REPEATS || span < STORM_NS {
            return None;
        }
        if self.count.saturating_mul(SECOND_NS) / span >= STORM_PER_SECOND {
            return Some(self.count);
        }
        self.count = 0;
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
        // Each duplicate acknowledgement has its peer retransmit; they come in bursts, which the
        // peer answers later.
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
    fn frames_in_turn_hide_no_storm() {
        // Two frames of a flow; a window's worth of segments again and again; two windows in turn.
        for frames in [2, 30] {
            let at = found(&mut Repeats::default(), |_, n| segment(OUTSIDE, GUEST, (n % frames) as u32));
            assert!(at.is_some_and(|n| n < 3 * 10_000), "{frames} in turn: {at:?}");
        }
        let windows = found(&mut Repeats::default(), |_, n| {
            let mut frame = segment(OUTSIDE, GUEST, 1);
            frame[48] = (n % 2) as u8;
            frame
        });
        assert!(windows.is_some());
        // Storms of several flows, whichever places they have.
        let mut repeats = Repeats::default();
        let flows = found(&mut repeats, |_, n| segment([198, 51, 100, 9, 0, (n % 8) as u8], GUEST, 1));
        assert!(flows.is_some());
    }

    #[test]
    fn duplicate_acknowledgements_of_a_lossy_upload_all_pass() {
        // A loss every 1.5 ms, with four equal acknowledgements each, then the next.
        let mut repeats = Repeats::default();
        for loss in 0..6000_u32 {
            repeats.sent(&segment(GUEST, OUTSIDE, loss));
            for _ in 0..4 {
                let mut acknowledgement = segment(OUTSIDE, GUEST, 1);
                acknowledgement[42..46].copy_from_slice(&(loss * 1448).to_be_bytes());
                let at = Nanos(u64::from(loss) * 1_500_000);
                assert_eq!(repeats.see(at, &acknowledgement), Seen::default(), "loss {loss}");
            }
        }
    }

    #[test]
    fn a_connection_in_place_of_another_is_no_storm() {
        // Each begins at numbers below those of the one before, and sends 100 segments.
        let at = found(&mut Repeats::default(), |_, n| {
            let (connection, nth) = (n / 100, n % 100);
            let mut frame = segment(OUTSIDE, GUEST, (1_000_000 - 1000 * connection as u32) + nth as u32);
            frame[47] = if nth == 0 { 0x12 } else { 0x10 };
            frame
        });
        assert_eq!(at, None);
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
            // Every other frame belongs to one of many other flows, of which some have the storm's
            // slot.
            let [high, low] = (n as u16).to_be_bytes();
            let other = repeats.see(Nanos(n * 100_000), &segment([198, 51, 100, 9, high, low], GUEST, 1));
            assert_eq!(other, Seen::default());
            segment(OUTSIDE, GUEST, 1)
        });
        assert!(hidden.is_some());
    }
}
