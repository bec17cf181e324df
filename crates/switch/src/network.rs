//! Where the frames of a batch go: one network's decision, without moving a byte.
//!
//! [`Network::decide`] passes over a batch once and writes a [`Plan`]: for each destination port
//! the indices of its frames, in order. Frames of one batch tend to be of few flows. So the verdict
//! on the last source and the way to the last destination are kept while they repeat. A repeated
//! pair costs two comparisons.
//!
//! # What becomes of a frame
//! | frame | becomes |
//! | --- | --- |
//! | shorter than a header | dropped, `runt` |
//! | source is a group, zero, or pinned to another port | dropped, `bad_source` |
//! | source or sender that the port's guard does not let pass | dropped, `guard` |
//! | IPv6 of a port that learns its addresses ([`crate::guard::Learn`]) | dropped, `source6`, `nd_inspection`, `address_limit` |
//! | IPv6 from too many new addresses of a port without a guard for it | dropped, `address_limit` |
//! | what the port has no role for ([`crate::guard::Roles`]) | dropped, `rogue_router`, `rogue_dhcp`, `gateway_claim` |
//! | partial checksum of anything but the TCP or UDP header behind the IP headers | dropped, `bad_offload` |
//! | represents several segments, and would be flooded | dropped, `not_transformable` |
//! | destination known, behind another port | one copy there |
//! | destination known, behind the port it came from | dropped, `hairpin` |
//! | destination unknown, multicast or broadcast | a copy to every other port whose link is up |
//! | destination a reserved group address (IEEE 802.1Q table 8-1, all but spanning tree's own) | dropped, `reserved` |
//! | flooded, and no other port is up | dropped, `no_destination` |
//! | flooded beyond what storm control allows ([`crate::limit`]) | dropped, `…_storm` or `flood_budget` |
//! | not for its destination ([`crate::policy`]) | dropped, `isolated`, `denied`, `connections_full` |
//! | from a mirror's port | dropped, `mirror_port` |
//! | of a VLAN that its port may not send in, or with other tags ([`crate::vlan`]) | dropped, `vlan_denied`, `vlan_tags` |
//!
//! Where the network has VLANs, each is a network of its own for all of this but pinned addresses,
//! which are in every one. Where it has a policy, floods reach only the ports that the frame may go
//! to, and a mirror's port gets its own copies.
//!
//! # Accounting
//! A frame that came in is counted once as one of the port's `rx_frames`. It is then counted either
//! as one of its `rx_drops` or as `copies` ≥ 1 of this network. Each copy ends as one of the
//! destination's `tx_frames` or `tx_drops`. Where a destination needs segments, each segment counts
//! instead of the copy that was cut.

use crate::Nanos;
use crate::counters::Counter;
use crate::drop::{Drops, Reason};
use crate::frame::{Batch, Checksum, ETHERNET_HEADER_BYTES, Frame, TAG_BYTES};
use crate::guard::{self, Bindings, ETHERTYPE_IPV6, Guard, Protected, Roles};
use crate::limit::{Flooded, Floods, Storm};
use crate::mac::{Address, Learned, MacSettings, MacTable, PortNumber, Tick};
use crate::offload;
use crate::plain;
use crate::policy::{self, Labels, Passes, Policy, Relation};
use crate::vlan::{Membership, Vlans};
use std::collections::HashMap;

/// What one network counts; one writer, any number of readers.
#[derive(Debug, Default)]
pub struct NetworkCounters {
    /// Copies of frames on their way to a destination; 1 for a frame to a known port, n for one
    /// that is flooded.
    pub copies: Counter,
    /// Frames that went to all ports because no port was known to have the address.
    pub flooded_unknown: Counter,
    /// Frames that went to all ports because of a multicast or broadcast address.
    pub flooded_group: Counter,
}

/// The state of one network.
#[derive(Debug)]
pub struct Network {
    /// Addresses and their ports.
    pub macs: MacTable,
    /// Copies and floods.
    pub counters: NetworkCounters,
    members: Vec<PortNumber>,
    /// Members whose link is up: where floods go.
    up: Vec<PortNumber>,
    /// Whether a port is in `up`, by its number.
    is_up: Vec<bool>,
    floods: Floods,
    protected: Protected,
    bindings: Bindings,
    labels: HashMap<PortNumber, Labels>,
    policy_settings: policy::Settings,
    /// `None` where nothing is to be checked.
    policy: Option<Box<Policy>>,
    seed: u64,
    memberships: HashMap<PortNumber, Membership>,
    /// `None` where no port has a membership.
    vlans: Option<Box<Vlans>>,
}

/// Facts of a batch that tell whether its frames fit a destination as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Bytes of all frames.
    pub bytes: u64,
    /// Length of the longest frame.
    pub longest: usize,
    /// Whether any frame has a partial checksum or represents several segments.
    pub offloads: bool,
}

/// Which frames of a batch go to which port. Reused from turn to turn.
#[derive(Debug, Default)]
pub struct Plan {
    lists: Vec<Vec<u16>>,
    destinations: Vec<PortNumber>,
    dropped: Vec<(u16, Reason)>,
    notes_drops: bool,
    /// By frame, whether [`Plan::limit`] lets it pass.
    passes: Vec<Option<bool>>,
}

impl Plan {
    /// Makes room for `port`; `budget` frames per turn fit without allocation.
    pub fn add_port(&mut self, port: PortNumber, budget: usize) {
        if self.lists.len() <= port as usize {
            self.lists.resize_with(port as usize + 1, Vec::new);
        }
        let list = &mut self.lists[port as usize];
        list.reserve(budget.saturating_sub(list.len()));
        self.destinations.reserve(self.lists.len());
    }

    /// The ports that get frames, in the order of their first frame.
    #[inline]
    pub fn destinations(&self) -> &[PortNumber] {
        &self.destinations
    }

    /// Indices of the frames that go to `port`, in order.
    #[inline]
    pub fn frames_to(&self, port: PortNumber) -> &[u16] {
        &self.lists[port as usize]
    }

    /// Frames that go nowhere and why, where that was asked for.
    pub fn dropped(&self) -> &[(u16, Reason)] {
        &self.dropped
    }

    /// Asks for the list of frames that go nowhere, or no longer.
    pub fn note_drops(&mut self, on: bool) {
        self.notes_drops = on;
    }

    /// Empties the plan for the next batch.
    #[inline]
    pub fn clear(&mut self) {
        for port in self.destinations.drain(..) {
            self.lists[port as usize].clear();
        }
        self.dropped.clear();
    }

    /// Takes out the frames that `passes` refuses, and counts them. Frames that go somewhere are
    /// asked for once each.
    pub(crate) fn limit(&mut self, batch: &Batch<'_>, mut passes: impl FnMut(&Frame) -> bool, drops: &mut Drops) {
        let mut known = std::mem::take(&mut self.passes);
        known.clear();
        known.resize(batch.len(), None);
        let mut destinations = std::mem::take(&mut self.destinations);
        destinations.retain(|port| {
            let mut list = std::mem::take(&mut self.lists[usize::from(*port)]);
            list.retain(|index| {
                let at = usize::from(*index);
                known[at].unwrap_or_else(|| {
                    let is_good = passes(&batch.frames()[at]);
                    if !is_good {
                        self.lose(at, Reason::RateLimit, drops);
                    }
                    known[at] = Some(is_good);
                    is_good
                })
            });
            let is_left = !list.is_empty();
            self.lists[usize::from(*port)] = list;
            is_left
        });
        (self.destinations, self.passes) = (destinations, known);
    }

    #[inline]
    fn push(&mut self, port: PortNumber, frame: u16) {
        let list = &mut self.lists[port as usize];
        if list.is_empty() {
            self.destinations.push(port);
        }
        list.push(frame);
    }

    /// As [`Plan::push`], unless the frame is on the port's list already, as its last one; returns
    /// how many were added.
    #[inline]
    fn push_once(&mut self, port: PortNumber, frame: u16) -> u64 {
        let is_new = self.lists[port as usize].last() != Some(&frame);
        if is_new {
            self.push(port, frame);
        }
        is_new.into()
    }

    #[inline]
    fn lose(&mut self, frame: usize, reason: Reason, drops: &mut Drops) {
        drops.count(reason, 1);
        if self.notes_drops {
            self.dropped.push((frame as u16, reason));
        }
    }
}

/// Where frames to one address go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Destination {
    Port(PortNumber),
    Unknown,
    Group,
    Nowhere(Reason),
}

impl Network {
    /// A network without ports.
    pub fn new(settings: MacSettings, seed: u64) -> Network {
        Network {
            macs: MacTable::new(settings, seed),
            counters: NetworkCounters::default(),
            members: Vec::new(),
            up: Vec::new(),
            is_up: Vec::new(),
            floods: Floods::default(),
            protected: Protected::default(),
            bindings: Bindings::default(),
            labels: HashMap::new(),
            policy_settings: policy::Settings::default(),
            policy: None,
            seed,
            memberships: HashMap::new(),
            vlans: None,
        }
    }

    /// Joins `port`, its link down, without storm control; `mac_limit` as in
    /// [`MacTable::add_port`].
    pub fn join(&mut self, port: PortNumber, mac_limit: Option<u32>) {
        self.macs.add_port(port, mac_limit);
        self.floods.set(port, Storm::OFF);
        if self.is_up.len() <= port as usize {
            self.is_up.resize(port as usize + 1, false);
        }
        self.members.push(port);
        self.set_labels(port, Labels::default());
    }

    /// Sets what the policy knows of `port`, a member.
    pub fn set_labels(&mut self, port: PortNumber, labels: Labels) {
        self.labels.insert(port, labels.clone());
        match &mut self.policy {
            Some(policy) => policy.join(port, labels),
            None => self.set_policy(self.policy_settings.clone()),
        }
    }

    /// Sets what the members may exchange. Connections that the policy before let through are
    /// judged again.
    pub fn set_policy(&mut self, settings: policy::Settings) {
        if self.policy.is_some() && settings == self.policy_settings {
            return;
        }
        let before = self.policy.take();
        self.policy = Policy::new(settings.clone(), &self.labels, self.seed).map(Box::new);
        if let (Some(policy), Some(before)) = (&mut self.policy, before) {
            policy.inherit(*before);
        }
        self.policy_settings = settings;
    }

    /// Sets the VLANs of `port`, a member; `None` for an access port of [`crate::vlan::DEFAULT`].
    /// What was learned behind it is forgotten, where that changes anything.
    pub fn set_vlans(&mut self, port: PortNumber, membership: Option<Membership>) {
        if self.memberships.get(&port) == membership.as_ref() {
            return;
        }
        match membership {
            Some(membership) => self.memberships.insert(port, membership),
            None => self.memberships.remove(&port),
        };
        self.vlans = Vlans::new(&self.memberships).map(Box::new);
        self.macs.keep_vlans(self.vlans.is_some());
        self.macs.forget_learned(port);
    }

    /// Whether the form of frames depends on their destination: see [`Network::shape`].
    #[inline]
    pub fn has_vlans(&self) -> bool {
        self.vlans.is_some()
    }

    /// Gives the frames `which` of the batch that was decided on the form that `to` gets.
    pub fn shape(&mut self, to: PortNumber, batch: &mut Batch<'_>, which: &[u16]) {
        if let Some(vlans) = &mut self.vlans {
            vlans.shape(to, batch, which);
        }
    }

    /// Gives the frames of the batch that was decided on the form in which they came.
    pub fn restore(&mut self, batch: &mut Batch<'_>) {
        if let Some(vlans) = &mut self.vlans {
            vlans.restore(batch);
        }
    }

    /// What the members may exchange.
    pub fn policy(&self) -> &policy::Settings {
        &self.policy_settings
    }

    /// Whether the port gets only copies of others' frames.
    pub(crate) fn is_mirror(&self, port: PortNumber) -> bool {
        self.policy.as_ref().is_some_and(|policy| policy.is_mirror(port))
    }

    /// What the policy has counted.
    pub fn policy_counts(&self) -> policy::Counts {
        self.policy.as_ref().map(|policy| policy.counts()).unwrap_or_default()
    }

    /// Removes `port` and every address behind it.
    pub fn leave(&mut self, port: PortNumber) {
        self.macs.remove_port(port);
        self.bindings.leave(port);
        self.members.retain(|p| *p != port);
        self.labels.remove(&port);
        self.set_vlans(port, None);
        if self.policy.as_mut().is_some_and(|policy| !policy.leave(port)) {
            self.policy = None;
        }
        self.set_link(port, false);
    }

    /// Sets the addresses that only ports with the role of the gateway may use.
    pub fn protect(&mut self, protected: Protected) {
        self.protected = protected;
        if let Some(policy) = &mut self.policy {
            policy.forget_recent();
        }
    }

    /// Sets the IPv6 addresses that no port whose guard learns may claim, since another machine has
    /// them.
    pub fn lose(&mut self, addresses: &[std::net::Ipv6Addr]) {
        self.bindings.lose(addresses.iter().copied());
    }

    /// Takes what the gateway behind `port`, a member, says of whose IPv6 addresses are.
    pub fn reserve(&mut self, port: PortNumber, reservations: guard::Reservations) {
        self.bindings.reserve(port, reservations);
    }

    /// Sets what `port`, a member, may flood.
    pub fn set_storm(&mut self, port: PortNumber, storm: Storm) {
        self.floods.set(port, storm);
    }

    /// The ports, in the order in which they joined.
    pub fn members(&self) -> &[PortNumber] {
        &self.members
    }

    /// Says whether floods are to reach `port`, a member.
    pub fn set_link(&mut self, port: PortNumber, up: bool) {
        if let Some(is_up) = self.is_up.get_mut(port as usize) {
            *is_up = up;
        }
        match (self.up.iter().position(|p| *p == port), up) {
            (None, true) => self.up.push(port),
            (Some(at), false) => {
                self.up.remove(at);
            }
            _ => {}
        }
    }

    /// Locks the guard's addresses to `port` where the guard asks for it, and ends what an earlier
    /// guard had locked. Returns how many are pinned to another port already and so could not be
    /// had.
    pub fn set_pins(&mut self, port: PortNumber, guard: &Guard) -> usize {
        self.macs.unpin_port(port);
        let listed = guard.ipv6().into_iter().flatten().filter(|(_, bits)| *bits == 128);
        self.bindings.list(port, listed.map(|(address, _)| address));
        if !guard.is_pinned() {
            return 0;
        }
        let mut elsewhere = 0;
        for source in guard.sources() {
            if self.macs.pin(*source, port) {
                self.bindings.lock(port, source.bytes());
            } else {
                elsewhere += 1;
            }
        }
        elsewhere
    }

    /// Decides on `batch`, which came from `from` at `now`: fills `plan`, which is empty, and
    /// counts in `drops` the frames that go nowhere. Where the network has VLANs, the frames lose
    /// their tags; [`Network::shape`] then gives them the form for each destination.
    #[inline]
    pub fn decide(
        &mut self,
        now: Nanos,
        from: PortNumber,
        guard: &Guard,
        batch: &mut Batch<'_>,
        plan: &mut Plan,
        drops: &mut Drops,
    ) -> Summary {
        match self.vlans.take() {
            None => self.decide_in::<false>(now, from, guard, batch, None, plan, drops),
            Some(mut vlans) => {
                vlans.untag(from, batch);
                let mut summary = self.decide_in::<true>(now, from, guard, batch, Some(&vlans), plan, drops);
                // Any of them may get a tag.
                summary.longest += TAG_BYTES;
                self.vlans = Some(vlans);
                summary
            }
        }
    }

    /// [`Network::decide`]; a network without VLANs has code of its own, which knows nothing of
    /// them.
    #[allow(clippy::too_many_arguments)]
    fn decide_in<const VLANS: bool>(
        &mut self,
        now: Nanos,
        from: PortNumber,
        guard: &Guard,
        batch: &Batch<'_>,
        vlans: Option<&Vlans>,
        plan: &mut Plan,
        drops: &mut Drops,
    ) -> Summary {
        let (instant, now) = (now, Tick::of(now));
        self.macs.expire(now);
        let mut policy = self.policy.take();
        if let Some(policy) = &mut policy {
            policy.begin(now);
        }
        let silent = policy.as_ref().is_some_and(|policy| policy.is_mirror(from));
        let mut summary = Summary::default();
        let roles = guard.roles();
        // The address zero is no station's, so it can mean "none yet": the verdict on it is the one
        // kept.
        let (mut last_source, mut source_reason) = (Address::ZERO, Some(Reason::BadSource));
        let (mut last_destination, mut way) = (Address::ZERO, None);
        // What holds between the port and the last destination's.
        let (mut related, mut relation) = (None, Relation { passes: Passes::Always, is_mirrored: false });
        let (mut copies, mut unknown, mut group) = (0u64, 0u64, 0u64);
        // 0 where there are none.
        let mut vlan = 0;
        for (index, frame) in batch.frames().iter().enumerate() {
            let len = frame.len();
            if VLANS && let Some(vlans) = vlans {
                let (found, came_bytes) = vlans.of(index, frame);
                summary.bytes += came_bytes as u64;
                match found {
                    Ok(found) if found == vlan => {}
                    Ok(found) => {
                        (vlan, way) = (found, None);
                        (last_source, source_reason) = (Address::ZERO, Some(Reason::BadSource));
                    }
                    Err(reason) => {
                        plan.lose(index, reason, drops);
                        continue;
                    }
                }
            } else {
                summary.bytes += len as u64;
            }
            summary.longest = summary.longest.max(len);
            let offloads = needs_capability(frame);
            summary.offloads |= offloads;
            let (destination, source) = frame.addresses();
            if source != last_source || len < ETHERNET_HEADER_BYTES {
                if len < ETHERNET_HEADER_BYTES {
                    plan.lose(index, Reason::Runt, drops);
                    continue;
                }
                let (reason, changed) = self.verdict::<VLANS>(now, vlan, source, from, guard);
                (last_source, source_reason) = (source, reason);
                if changed {
                    way = None;
                }
            }
            if let Some(reason) = source_reason {
                plan.lose(index, reason, drops);
                continue;
            }
            if silent {
                plan.lose(index, Reason::MirrorPort, drops);
                continue;
            }
            let to = match way {
                Some(way) if destination == last_destination => way,
                _ => {
                    let mut found = self.destination::<VLANS>(vlan, destination, from);
                    // An address that is pinned to a port of other VLANs.
                    if VLANS
                        && let (Some(vlans), Destination::Port(port)) = (vlans, found)
                        && !vlans.has(port, vlan)
                    {
                        found = Destination::Unknown;
                    }
                    (last_destination, way) = (destination, Some(found));
                    if let (Some(policy), Destination::Port(port)) = (&mut policy, found)
                        && related != Some(port)
                    {
                        (related, relation) = (Some(port), policy.relation(from, port));
                    }
                    found
                }
            };
            let plain = plain::read(frame.head());
            let is_recent = match (&policy, to, plain) {
                (Some(policy), Destination::Port(port), Some(plain)) if relation.passes == Passes::IfAllowed => {
                    policy.is_recent(now, (from, roles), port, plain)
                }
                _ => false,
            };
            if !is_recent
                && roles != Roles::ALL
                && !plain.is_some_and(|(plain, _)| guard::lets_pass(&plain, &self.protected))
                && let Some(reason) = guard::refuse(frame.head(), len > frame.head().len(), roles, &self.protected)
            {
                plan.lose(index, reason, drops);
                continue;
            }
            if guard.checks_senders() && !guard.lets_sender_pass(frame.head()) {
                plan.lose(index, Reason::Guard, drops);
                continue;
            }
            if let Some(learn) = guard.learns()
                && let Some((ETHERTYPE_IPV6, at)) = guard::network_layer(frame.head())
            {
                let macs = &self.macs;
                let locked_to = |mac: crate::frame::Mac| macs.pinned_to(mac.into());
                let packet = &frame.head()[at..];
                let who = (learn, roles);
                if let Some(reason) =
                    self.bindings.refuse(instant, (from, vlan), who, packet, &source.bytes(), &locked_to)
                {
                    plan.lose(index, reason, drops);
                    continue;
                }
            }
            if guard.learns().is_none()
                && let Some(prefix) = self.protected.prefix6()
                && let Some((ETHERTYPE_IPV6, at)) = guard::network_layer(frame.head())
                && let Some(reason) =
                    self.bindings.refuse_unguarded(instant, (from, vlan), guard, prefix, &frame.head()[at..])
            {
                plan.lose(index, reason, drops);
                continue;
            }
            if offloads && !is_honest(frame) {
                plan.lose(index, Reason::BadOffload, drops);
                continue;
            }
            match to {
                Destination::Port(port) => {
                    if let Some(policy) = &mut policy {
                        let refused = match relation.passes {
                            Passes::Always => None,
                            Passes::Never(reason) => Some(reason),
                            Passes::IfAllowed if is_recent => None,
                            Passes::IfAllowed => policy.judge(now, (from, roles), port, frame.head(), false),
                        };
                        if let Some(reason) = refused {
                            plan.lose(index, reason, drops);
                            continue;
                        }
                        if relation.is_mirrored {
                            policy.mirror(from, port, |mirror| copies += plan.push_once(mirror, index as u16));
                            copies += plan.push_once(port, index as u16);
                            continue;
                        }
                    }
                    copies += 1;
                    plan.push(port, index as u16);
                }
                Destination::Nowhere(reason) => plan.lose(index, reason, drops),
                // TCP knows no groups, and a sender of bulk data has just heard from its peer. If
                // one such frame with a few bytes per segment were flooded, it would cost a
                // thousand copies at each port that has it cut.
                Destination::Unknown | Destination::Group if frame.offload.segmentation.is_some() => {
                    plan.lose(index, Reason::NotTransformable, drops);
                }
                Destination::Unknown | Destination::Group => {
                    let own = self.is_up.get(from as usize).is_some_and(|up| *up);
                    let belongs = |port: PortNumber| !VLANS || vlans.is_none_or(|vlans| vlans.has(port, vlan));
                    let up = match VLANS {
                        true => self.up.iter().filter(|port| **port == from || belongs(**port)).count() as u64,
                        false => self.up.len() as u64,
                    };
                    let reached = up - u64::from(own);
                    if reached == 0 {
                        plan.lose(index, Reason::NoDestination, drops);
                        continue;
                    }
                    let why = match to {
                        Destination::Group if destination == Address::BROADCAST => Flooded::Broadcast,
                        Destination::Group => Flooded::Multicast,
                        _ => Flooded::Unknown,
                    };
                    if let Err(reason) = self.floods.admit(instant, from, why, (reached, up)) {
                        plan.lose(index, reason, drops);
                        continue;
                    }
                    match &mut policy {
                        None => {
                            for port in self.up.iter().filter(|port| **port != from && belongs(**port)) {
                                plan.push(*port, index as u16);
                            }
                            copies += reached;
                        }
                        Some(policy) => {
                            let shared = to == Destination::Group;
                            let up = self.up.iter().copied().filter(|port| *port != from && belongs(*port));
                            match flood(policy, plan, now, (from, roles), frame.head(), shared, up, index as u16) {
                                Ok(reached) => copies += reached,
                                Err(reason) => {
                                    plan.lose(index, reason, drops);
                                    continue;
                                }
                            }
                        }
                    }
                    *(if to == Destination::Group { &mut group } else { &mut unknown }) += 1;
                }
            }
        }
        self.policy = policy;
        self.counters.copies.add(copies);
        if unknown + group != 0 {
            self.counters.flooded_unknown.add(unknown);
            self.counters.flooded_group.add(group);
        }
        summary
    }

    /// Why frames from `source` are dropped, if they are, and whether the table changed.
    #[inline]
    fn verdict<const VLANS: bool>(
        &mut self,
        now: Tick,
        vlan: u16,
        source: Address,
        from: PortNumber,
        guard: &Guard,
    ) -> (Option<Reason>, bool) {
        if !source.is_station() {
            return (Some(Reason::BadSource), false);
        }
        if !guard.lets_source_pass(source) {
            return (Some(Reason::Guard), false);
        }
        match if VLANS { self.macs.learn_in(now, vlan, source, from) } else { self.macs.learn(now, source, from) } {
            Learned::Known | Learned::Refused => (None, false),
            Learned::Changed => (None, true),
            Learned::Pinned => (Some(Reason::BadSource), false),
        }
    }

    #[inline]
    fn destination<const VLANS: bool>(&self, vlan: u16, destination: Address, from: PortNumber) -> Destination {
        if destination.is_group() {
            return if is_reserved(destination) { Destination::Nowhere(Reason::Reserved) } else { Destination::Group };
        }
        match if VLANS { self.macs.find_in(vlan, destination) } else { self.macs.find(destination) } {
            Some(port) if port == from => Destination::Nowhere(Reason::Hairpin),
            Some(port) => Destination::Port(port),
            None => Destination::Unknown,
        }
    }
}

/// Plans a copy of a frame for each port of `up` that it may go to, and for the mirrors of those;
/// returns how many, or why there is none.
#[allow(clippy::too_many_arguments)]
fn flood(
    policy: &mut Policy,
    plan: &mut Plan,
    now: Tick,
    (from, roles): (PortNumber, Roles),
    head: &[u8],
    shared: bool,
    up: impl Iterator<Item = PortNumber>,
    index: u16,
) -> Result<u64, Reason> {
    let (mut copies, mut refused) = (0, Reason::NoDestination);
    for port in up {
        if policy.is_mirror(port) {
            continue;
        }
        match policy.refuse(now, (from, roles), port, head, shared) {
            Some(reason) => refused = reason,
            None => {
                copies += plan.push_once(port, index);
                policy.mirror(from, port, |mirror| copies += plan.push_once(mirror, index));
            }
        }
    }
    if copies == 0 { Err(refused) } else { Ok(copies) }
}

#[inline]
fn needs_capability(frame: &Frame) -> bool {
    matches!(frame.offload.checksum, Checksum::Partial { .. }) || frame.offload.segmentation.is_some()
}

/// Whether the frame's checksum, where it is partial, is one that can be completed without a change
/// to its headers.
fn is_honest(frame: &Frame) -> bool {
    match frame.offload.checksum {
        Checksum::Partial { start, offset } => offload::is_of_transport(frame.head(), start, offset),
        _ => true,
    }
}

/// Group addresses that no bridge passes on: 01-80-C2-00-00-01 to -0F (pause frames, slow
/// protocols, LLDP and the like belong to one link). Spanning tree's own, -00, passes, as through
/// any bridge that does not take part in it, so that bridges around the fabric can find a loop
/// through it.
fn is_reserved(destination: Address) -> bool {
    let [a, b, c, d, e, last] = destination.bytes();
    [a, b, c, d, e] == [0x01, 0x80, 0xc2, 0, 0] && (0x01..=0x0f).contains(&last)
}

#[cfg(test)]
#[path = "network_tests.rs"]
mod tests;
