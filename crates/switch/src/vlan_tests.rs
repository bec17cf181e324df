use super::*;
use crate::Nanos;
use crate::drop::Drops;
use crate::frame::{Checksum, HEAD_BYTES, Mac, Offload, SegmentKind, Segmentation};
use crate::guard::Guard;
use crate::mac::{Address, MacSettings};
use crate::network::{Network, Plan};
use tombolo_ring::mem::Foreign;
use tombolo_testing::Random;

const A: Mac = [2, 0, 0, 0, 0, 1];
const B: Mac = [2, 0, 0, 0, 0, 2];
const ALL: Mac = [0xff; 6];

fn trunk(native: Option<u16>, vlans: &[u16]) -> Option<Membership> {
    Some(Membership { native, trunk: Some(vlans.iter().map(|vlan| *vlan..=*vlan).collect()) })
}

fn access(vlan: u16) -> Option<Membership> {
    Some(Membership::access(vlan))
}

/// Types and control information.
type Tags<'a> = &'a [(u16, u16)];

/// A frame with these tags, whose bytes behind them are all different.
fn frame(to: Mac, from: Mac, tags: Tags<'_>, bytes: usize) -> Vec<u8> {
    let mut frame = [&to[..], &from].concat();
    for (kind, tci) in tags {
        frame.extend_from_slice(&kind.to_be_bytes());
        frame.extend_from_slice(&tci.to_be_bytes());
    }
    frame.extend_from_slice(&[0x88, 0xb5]);
    frame.extend((0..bytes).map(|n| n as u8));
    frame
}

struct Bench {
    network: Network,
    plan: Plan,
}

/// What each port got, and why frames were dropped.
type Outcome = (Vec<(PortNumber, Vec<u8>)>, Vec<Reason>);

impl Bench {
    fn new(ports: impl IntoIterator<Item = Option<Membership>>) -> Bench {
        let mut bench = Bench { network: Network::new(MacSettings::default(), 1), plan: Plan::default() };
        for (port, membership) in ports.into_iter().enumerate() {
            bench.network.join(port as u16, None);
            bench.network.set_link(port as u16, true);
            bench.network.set_vlans(port as u16, membership);
            bench.plan.add_port(port as u16, 8);
        }
        bench.plan.note_drops(true);
        bench
    }

    fn send(&mut self, from: PortNumber, frames: &[Vec<u8>]) -> Outcome {
        let mut batch = Batch::with_capacity(frames.len());
        for bytes in frames {
            // In two pieces, the second of which is beyond the head of a long frame.
            let (a, b) = bytes.split_at(bytes.len().min(100));
            batch.push_pieces([Foreign::from(a), Foreign::from(b)], Offload::NONE);
        }
        let (mut drops, mut got) = (Drops::default(), Vec::new());
        self.network.decide(Nanos(0), from, &Guard::default(), &mut batch, &mut self.plan, &mut drops);
        self.network.restore(&mut batch);
        for (frame, bytes) in batch.frames().iter().zip(frames) {
            let mut out = Vec::new();
            batch.append_to(frame, &mut out);
            assert_eq!(&out, bytes, "a capture sees it as it came");
        }
        for port in self.plan.destinations() {
            self.network.shape(*port, &mut batch, self.plan.frames_to(*port));
            for index in self.plan.frames_to(*port) {
                let mut out = Vec::new();
                batch.append_to(&batch.frames()[usize::from(*index)], &mut out);
                got.push((*port, out));
            }
        }
        let dropped = self.plan.dropped().iter().map(|(_, reason)| *reason).collect();
        self.plan.clear();
        got.sort();
        (got, dropped)
    }
}

#[test]
fn tags_are_put_in_and_taken_out_by_destination() {
    for bytes in [46, 200, 1486] {
        let mut bench = Bench::new([access(10), access(10), trunk(None, &[10, 20]), trunk(Some(10), &[20]), None]);
        let plain = frame(ALL, A, &[], bytes);
        let (got, _) = bench.send(0, std::slice::from_ref(&plain));
        assert_eq!(got, [(1, plain.clone()), (2, frame(ALL, A, &[(0x8100, 10)], bytes)), (3, plain.clone())]);
        // Its answer goes to it alone, without the tag, and with its priority to a trunk.
        let (got, _) = bench.send(2, &[frame(A, B, &[(0x8100, 0x600a)], bytes)]);
        assert_eq!(got, [(0, frame(A, B, &[], bytes))]);
        let (got, _) = bench.send(3, &[frame(B, [2, 0, 0, 0, 0, 3], &[(0x8100, 0xa000)], bytes)]);
        assert_eq!(got, [(2, frame(B, [2, 0, 0, 0, 0, 3], &[(0x8100, 0xa00a)], bytes))]);
    }
}

#[test]
fn what_a_port_may_not_send_is_dropped_under_its_reason() {
    let mut bench = Bench::new([access(10), trunk(None, &[10]), trunk(Some(1), &[10]), None]);
    let (denied, tags) = (Reason::VlanDenied, Reason::VlanTags);
    let cases: [(u16, Tags<'_>, Option<Reason>); 13] = [
        (0, &[(0x8100, 10)], Some(denied)),
        (0, &[(0x8100, 1)], Some(denied)),
        (0, &[(0x8100, 0)], None),
        (0, &[(0x8100, 0), (0x8100, 1)], Some(tags)),
        (0, &[(0x88a8, 10)], Some(tags)),
        (1, &[], Some(denied)),
        (1, &[(0x8100, 0)], Some(denied)),
        (1, &[(0x8100, 4095)], Some(denied)),
        (1, &[(0x8100, 10), (0x88a8, 1)], Some(tags)),
        (2, &[(0x8100, 11)], Some(denied)),
        (2, &[(0x8100, 1)], None),
        (3, &[(0x8100, 10)], Some(denied)),
        (3, &[(0x9100, 10)], Some(tags)),
    ];
    for (port, with, expected) in cases {
        let (got, dropped) = bench.send(port, &[frame(ALL, A, with, 46)]);
        assert_eq!(dropped.first().copied(), expected, "port {port}, tags {with:x?}");
        assert_eq!(got.is_empty(), expected.is_some());
    }
    let cut = frame(ALL, A, &[(0x8100, 10)], 46);
    for len in 14..18 {
        assert_eq!(bench.send(1, &[cut[..len].to_vec()]).1, [Reason::Runt], "{len} bytes");
    }
    assert_eq!(bench.send(1, &[cut[..18].to_vec()]).1, [], "a header and no more");
}

#[test]
fn a_pinned_address_is_its_ports_in_every_vlan() {
    let mut bench = Bench::new([None, access(10), access(10), trunk(None, &[1, 10])]);
    bench.send(1, &[frame(ALL, A, &[], 46)]);
    assert_eq!(bench.network.set_pins(0, &Guard::new(&[A], &[]).pinned()), 0);
    assert_eq!(bench.network.macs.entries(Nanos(0)).count(), 1, "the pin ends what was learned");
    assert_eq!(bench.send(1, &[frame(ALL, A, &[], 46)]).1, [Reason::BadSource]);
    let (got, _) = bench.send(1, &[frame(A, B, &[], 46)]);
    assert_eq!(got.iter().map(|(port, _)| *port).collect::<Vec<_>>(), [2, 3], "not into another VLAN");
    let (got, _) = bench.send(3, &[frame(A, [2, 0, 0, 0, 0, 9], &[(0x8100, 1)], 46)]);
    assert_eq!(got, [(0, frame(A, [2, 0, 0, 0, 0, 9], &[], 46))]);
}

#[test]
fn the_last_membership_that_goes_ends_vlans() {
    let mut bench = Bench::new([access(10), None]);
    assert_eq!(bench.send(0, &[frame(ALL, A, &[], 46)]).1, [Reason::NoDestination]);
    bench.network.set_vlans(0, None);
    assert!(!bench.network.has_vlans() && bench.network.macs.is_empty());
    let tagged = frame(ALL, A, &[(0x88a8, 5), (0x8100, 6)], 46);
    assert_eq!(bench.send(0, std::slice::from_ref(&tagged)).0, [(1, tagged)], "tags pass as other bytes");
}

#[test]
fn offload_state_moves_with_the_headers() {
    let mut bench = Bench::new([access(10), trunk(None, &[10])]);
    let mut bytes = frame(B, A, &[], 3000);
    bytes[12..34].copy_from_slice(&[8, 0, 0x45, 0, 0x0b, 0xb8, 0, 1, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    let cut = Segmentation { kind: SegmentKind::Tcp4, ecn: false, size: 1000, header_bytes: 54 };
    let offload = Offload { checksum: Checksum::Partial { start: 34, offset: 16 }, segmentation: Some(cut) };
    bench.send(1, &[frame(ALL, B, &[(0x8100, 10)], 46)]);
    let mut batch = Batch::with_capacity(1);
    batch.push(bytes[..].into(), offload);
    let mut drops = Drops::default();
    let summary = bench.network.decide(Nanos(0), 0, &Guard::default(), &mut batch, &mut bench.plan, &mut drops);
    assert_eq!((summary.bytes, summary.longest), (bytes.len() as u64, bytes.len() + TAG_BYTES));
    assert_eq!(bench.plan.frames_to(1), [0]);
    bench.network.shape(1, &mut batch, &[0]);
    let shaped = &batch.frames()[0];
    assert_eq!(shaped.head().len(), HEAD_BYTES + TAG_BYTES);
    let moved = Segmentation { header_bytes: 58, ..cut };
    let expected = Offload { checksum: Checksum::Partial { start: 38, offset: 16 }, segmentation: Some(moved) };
    assert_eq!(shaped.offload, expected);
    bench.network.restore(&mut batch);
    assert_eq!(batch.frames()[0].offload, offload);
}

/// The dull switch: what each port gets, by looking at everything each time.
struct Model {
    ports: Vec<Option<Membership>>,
    learned: HashMap<(u16, Mac), u16>,
}

impl Model {
    fn native(&self, port: usize) -> Option<u16> {
        self.ports[port].as_ref().map_or(Some(1), |membership| membership.native)
    }

    fn carries(&self, port: usize, vlan: u16) -> bool {
        let listed = self.ports[port].as_ref().and_then(|membership| membership.trunk.as_ref());
        self.native(port) == Some(vlan) || listed.is_some_and(|ranges| ranges.iter().any(|range| range.contains(&vlan)))
    }

    /// Sends a frame of 46 bytes with one tag or none.
    fn send(&mut self, from: usize, to: Mac, source: Mac, tag: Option<u16>) -> Vec<(u16, Vec<u8>)> {
        let is_trunk = self.ports[from].as_ref().is_some_and(|membership| membership.trunk.is_some());
        let vlan = match tag.map(|tci| tci & 0xfff) {
            None | Some(0) => self.native(from),
            Some(vlan) => Some(vlan).filter(|vlan| is_trunk && self.carries(from, *vlan)),
        };
        let Some(vlan) = vlan else { return vec![] };
        self.learned.insert((vlan, source), from as u16);
        let known = self.learned.get(&(vlan, to)).copied();
        let gets = |port: usize| {
            port != from && self.carries(port, vlan) && known.is_none_or(|known| usize::from(known) == port)
        };
        let form = |port: usize| {
            let tci = vlan | tag.unwrap_or(0) & 0xf000;
            let tags = if self.native(port) == Some(vlan) { vec![] } else { vec![(0x8100, tci)] };
            (port as u16, frame(to, source, &tags, 46))
        };
        (0..self.ports.len()).filter(|port| gets(*port)).map(form).collect()
    }
}

fn some_membership(random: &mut Random) -> Option<Membership> {
    let vlan = |random: &mut Random| 1 + random.below(4) as u16;
    match random.below(4) {
        0 => None,
        1 => access(vlan(random)),
        _ => {
            let native = if random.chance(2) { Some(vlan(random)) } else { None };
            let list: Vec<_> = (0..random.below(4)).map(|_| vlan(random)).collect();
            trunk(native, &list)
        }
    }
}

#[test]
fn vlans_behave_as_a_simple_model() {
    let mut random = Random::seeded();
    for _ in 0..60 {
        let mut ports: Vec<_> = (0..5).map(|_| some_membership(&mut random)).collect();
        // With none at all there are no VLANs.
        ports[0] = access(2);
        let mut bench = Bench::new(ports.clone());
        let mut model = Model { ports, learned: HashMap::new() };
        for _ in 0..300 {
            if random.chance(40) {
                let (port, membership) = (1 + random.index(4), some_membership(&mut random));
                if model.ports[port] != membership {
                    model.learned.retain(|_, behind| usize::from(*behind) != port);
                }
                model.ports[port] = membership.clone();
                bench.network.set_vlans(port as u16, membership);
            }
            let station = |random: &mut Random| [2, 0, 0, 0, 0, random.below(6) as u8];
            let (from, source) = (random.index(5), station(&mut random));
            let to = if random.chance(4) { ALL } else { station(&mut random) };
            let tag = random.chance(2).then(|| random.below(6) as u16 | (random.below(8) as u16) << 13);
            let tags: Vec<_> = tag.iter().map(|tci| (0x8100, *tci)).collect();
            let (got, dropped) = bench.send(from as u16, &[frame(to, source, &tags, 46)]);
            let expected = model.send(from, to, source, tag);
            assert_eq!(got, expected, "from {from} {:?}, tag {tag:x?}, {dropped:?}", model.ports);
            assert_eq!(expected.is_empty(), !dropped.is_empty());
            let mut known: Vec<_> = bench.network.macs.entries(Nanos(0)).collect();
            known.sort_by_key(|entry| (entry.vlan, entry.address));
            let mut want: Vec<_> =
                model.learned.iter().map(|((vlan, mac), port)| (*vlan, Address::from(*mac), *port)).collect();
            want.sort_unstable();
            let known: Vec<_> =
                known.iter().map(|entry| (entry.vlan.unwrap_or(0), entry.address, entry.port)).collect();
            assert_eq!(known, want);
        }
    }
}
