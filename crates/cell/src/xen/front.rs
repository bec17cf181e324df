//! The frontend of one network device (vif): the handshake with its backend, and its queues.
//!
//! The table of the handshake is [`front_step`]; the nodes in XenStore are [`super::vif`]'s. There
//! may be no device yet. An existing device may go and come back, with another address or another
//! backend.
//!
//! The backend is not trusted. The rings check what it writes. A backend that breaks them loses the
//! device, counted (`link_faults`): the frontend goes to Closing, and takes part again when the
//! backend starts again. The domain continues.
//!
//! # Queues
//!
//! There are as many as both ends agree on ([`Front::queues`]). The frontend chooses a frame's
//! queue by its flow, so frames of one connection stay in order. The backend chooses for what it
//! sends. With one processor, more queues make no cell faster. They keep a slow receiver at the
//! backend's other side from holding up the flows of the other queues.

use super::Domain;
use super::queue::Queue;
use super::vif::{Features, Vif};
use crate::println;
use crate::virtio::net::DeviceStats;
use alloc::vec::Vec;
use smoltcp::wire::EthernetAddress;
use tombolo_ring::xen::XenError;
use tombolo_ring::xen::bus::{BusState, FrontAction, front_step};
use tombolo_ring::xen::netif::Extra;

pub(super) const DEFAULT_MTU: usize = 1500;
const MIN_MTU: usize = 576;
/// Handshake steps in one turn; a backend that changes its state faster than that waits for the
/// next.
const STEPS: usize = 8;

/// Which device of the domain a front takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    Number(u32),
    /// The first one that none of these numbers names.
    FirstBut(Vec<u32>),
}

impl Wanted {
    fn takes(&self, number: u32) -> bool {
        match self {
            Wanted::Number(wanted) => *wanted == number,
            Wanted::FirstBut(others) => !others.contains(&number),
        }
    }
}

/// The frontend of one device, with or without that device at the moment.
pub(super) struct Front {
    wanted: Wanted,
    /// The token of the watch of the backend's state.
    token: &'static str,
    vif: Option<Vif>,
    pub(super) state: BusState,
    /// All that were ever needed; the first [`Front::active`] are in use while the link is there.
    pub(super) queues: Vec<Queue>,
    active: usize,
    max_queues: usize,
    pages: usize,
    pub(super) features: Features,
    pub(super) mac: Option<EthernetAddress>,
    pub(super) mtu: usize,
    pub(super) is_up: bool,
    /// Rings were published and not let go of.
    has_rings: bool,
    /// The backend broke the rings of the last connection.
    has_given_up: bool,
    /// Multicast addresses that the stack wants, and those that the backend was asked for.
    groups: Vec<EthernetAddress>,
    asked: Vec<EthernetAddress>,
    /// The queue that is looked at first.
    first: usize,
    /// Since when there has been no room for a frame.
    pub(super) full_since_ns: Option<u64>,
}

impl Front {
    /// With up to `max_queues` queues of `pages` pages each way.
    pub(super) fn new(wanted: Wanted, token: &'static str, max_queues: usize, pages: usize) -> Front {
        Front {
            wanted,
            token,
            vif: None,
            state: BusState::Initialising,
            queues: Vec::from([Queue::new(pages)]),
            active: 1,
            max_queues,
            pages,
            features: Features::default(),
            mac: None,
            mtu: DEFAULT_MTU,
            is_up: false,
            has_rings: false,
            has_given_up: false,
            groups: Vec::new(),
            asked: Vec::new(),
            first: 0,
            full_since_ns: None,
        }
    }

    /// Whether there is a device.
    pub(super) fn has_device(&self) -> bool {
        self.vif.is_some()
    }

    /// The queues in use.
    pub(super) fn queues(&mut self) -> &mut [Queue] {
        let active = if self.has_rings { self.active } else { 0 };
        &mut self.queues[..active]
    }

    /// How many queues both ends have agreed on.
    pub(super) fn active(&self) -> usize {
        self.active
    }

    /// Pages for each direction, of all queues in use together.
    pub(super) fn page_count(&self) -> usize {
        self.active * self.pages
    }

    /// Whether something happened to the backend since this was asked last.
    pub(super) fn has_news(&self, domain: &Domain) -> bool {
        domain.take_watch(self.token)
    }

    /// How the backend broke the rings, if it did.
    pub(super) fn fault(&mut self) -> Option<XenError> {
        self.queues().iter().find_map(|queue| queue.fault())
    }

    /// Follows the table until neither end moves. `has_come` is set where the link came up.
    pub(super) fn handshake(&mut self, domain: &Domain, stats: &mut DeviceStats, has_come: &mut bool) {
        for _ in 0..STEPS {
            if self.vif.is_none() {
                let Some(vif) = Vif::find(domain, self.token, |number| self.wanted.takes(number)) else { return };
                self.mac = Some(vif.mac);
                let told = vif.mtu.map_or(DEFAULT_MTU, |mtu| mtu as usize);
                self.mtu = if (MIN_MTU..=65535).contains(&told) { told } else { DEFAULT_MTU };
                self.state = BusState::Initialising;
                self.vif = Some(vif);
            }
            let Some(vif) = self.vif.clone() else { return };
            let Some((back, is_wanted)) = vif.look(domain) else {
                self.disconnect(stats);
                self.vif = None;
                println!("tombolo-cell: the network device is gone");
                vif.forget(domain, self.token);
                continue;
            };
            // Linux's backend can be unbound and bound again without a notice, and uses the
            // existing rings. Where it cannot (fewer queues than before), it writes Closing and
            // then Connected at once. The cell may see only the latter. So it asks Xen whether the
            // backend is there, and begins a new handshake where it is not.
            let is_silent = (self.state, back) == (BusState::Connected, BusState::Connected)
                && self.queues().iter().any(|queue| queue.is_unbound());
            if is_silent {
                println!("tombolo-cell: the network's backend says connected but has no event channels: retrying");
                self.disconnect(stats);
                self.state = BusState::Closing;
                vif.set_state(domain, self.state);
                continue;
            }
            let step = front_step(self.state, back);
            if step.disconnect {
                self.disconnect(stats);
            }
            let mut next = step.next;
            match step.action {
                FrontAction::Wait => {}
                FrontAction::Publish if self.publish(domain, &vif) => {}
                FrontAction::Publish => {
                    println!(
                        "tombolo-cell: the network device cannot be set up: no grants, no event channels, or no XenStore"
                    );
                    self.disconnect(stats);
                    next = BusState::Closing;
                }
                FrontAction::Up if !self.is_up && self.has_rings => {
                    self.is_up = true;
                    *has_come = true;
                    self.ask_groups();
                }
                FrontAction::Up => {}
            }
            // Linux's backend answers Closed with Closed, also when it starts again, so one of the
            // two has to begin. With a backend that broke the rings it is not this end.
            if (next, back) == (BusState::Closed, BusState::Closed) && is_wanted && !self.has_given_up {
                next = BusState::Initialising;
            }
            if next == self.state {
                return;
            }
            self.state = next;
            vif.set_state(domain, next);
        }
    }

    /// Makes rings and event channels and writes them to XenStore. False where something is
    /// refused.
    fn publish(&mut self, domain: &Domain, vif: &Vif) -> bool {
        let features = vif.features(domain);
        let Some(rings) = self.open(domain, vif.backend_domain, features) else { return false };
        vif.publish(domain, &rings, features)
    }

    /// Makes rings and event channels for `backend`; `None` where Xen refuses something.
    pub(super) fn open(&mut self, domain: &Domain, backend: u16, features: Features) -> Option<Vec<super::vif::Rings>> {
        self.active = self.max_queues.min(features.max_queues as usize).max(1);
        while self.queues.len() < self.active {
            self.queues.push(Queue::new(self.pages));
        }
        self.has_rings = true;
        self.has_given_up = false;
        self.features = features;
        self.asked.clear();
        self.first = 0;
        self.full_since_ns = None;
        let queues = self.queues[..self.active].iter_mut();
        queues.map(|queue| queue.open(domain, backend, features.split_channels)).collect()
    }

    /// Lets go of the rings; what was under way is lost.
    pub(super) fn disconnect(&mut self, stats: &mut DeviceStats) {
        if !self.has_rings {
            return;
        }
        self.has_rings = false;
        for queue in &mut self.queues {
            queue.close();
        }
        stats.link_resets += u64::from(self.is_up);
        self.is_up = false;
    }

    /// The domain was restored: its device is a new one.
    pub(super) fn restored(&mut self, stats: &mut DeviceStats) {
        self.queues.iter_mut().for_each(Queue::restored);
        // Closes nothing: the queues have no event channels any more.
        self.disconnect(stats);
        self.vif = None;
        self.has_given_up = false;
        self.state = BusState::Initialising;
    }

    /// The backend broke the rings: it loses the device.
    pub(super) fn give_up(&mut self, domain: &Domain, fault: XenError, stats: &mut DeviceStats) {
        stats.link_faults += 1;
        self.has_given_up = true;
        println!("tombolo-cell: the network's backend broke its rings: {fault}");
        self.disconnect(stats);
        if let Some(vif) = &self.vif {
            self.state = BusState::Closing;
            vif.set_state(domain, self.state);
            // Its answer may be there already.
            self.handshake(domain, stats, &mut false);
        }
    }

    /// Has the backend let these multicast addresses pass and no others, where it can.
    pub(super) fn set_groups(&mut self, groups: Vec<EthernetAddress>) {
        self.groups = groups;
        self.ask_groups();
    }

    fn ask_groups(&mut self) {
        let Front { groups, asked, queues, .. } = self;
        let (Some(queue), true, true) = (queues.first_mut(), self.is_up, self.features.multicast_control) else {
            return;
        };
        // One that finds no room is asked for when the addresses change the next time, or the link
        // comes up again.
        asked.retain(|had| groups.contains(had) || !queue.ask_multicast(Extra::MulticastDel(had.0)));
        for group in groups.iter() {
            if !asked.contains(group) && queue.ask_multicast(Extra::MulticastAdd(group.0)) {
                asked.push(*group);
            }
        }
    }

    /// Copies the next packet of any queue into `frame`; see [`Queue::receive`].
    pub(super) fn receive(&mut self, frame: &mut [u8]) -> Option<(usize, tombolo_ring::xen::Received, bool)> {
        if !self.is_up {
            return None;
        }
        let (first, active) = (self.first, self.active);
        for turn in 0..active {
            let at = (first + turn) % active;
            if let Some(received) = self.queues[at].receive(frame) {
                self.first = (at + 1) % active;
                return Some(received);
            }
        }
        None
    }

    /// Whether each queue has room for so many of the largest frames, since their flow is not known
    /// before they are built.
    pub(super) fn prepare(&mut self, frames: usize, stats: &mut DeviceStats) -> bool {
        self.queues().iter_mut().all(|queue| queue.prepare(frames, stats))
    }
}
