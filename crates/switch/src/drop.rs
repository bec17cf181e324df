//! Why a frame was lost. Every loss goes through [`Drops::count`] with one of these reasons; the
//! reason is a counter of the port, a label of the metrics, and a line of the generated table in
//! docs/drops.md.

use crate::Nanos;

macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)+) => {
        /// The reason for which a frame was dropped. The doc line of each is its explanation in
        /// docs and status.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Reason { $($(#[doc = $doc])+ $name,)+ }

        impl Reason {
            /// Every reason, in the order of the counters.
            pub const ALL: &[Reason] = &[$(Reason::$name,)+];

            /// The name in counters, metrics and traces.
            pub const fn name(self) -> &'static str {
                match self { $(Reason::$name => $text,)+ }
            }

            /// One sentence that says what happened.
            pub const fn explanation(self) -> &'static str {
                match self { $(Reason::$name => concat!($($doc),+).trim_ascii(),)+ }
            }
        }
    };
}

reasons! {
    /// The frame is shorter than an Ethernet header (14 bytes).
    Runt = "runt",
    /// The frame is longer than the destination's MTU and carries no segmentation state to cut it
    /// by.
    TooLong = "too_long",
    /// The frame came with offload fields that do not fit its own bytes.
    BadOffload = "bad_offload",
    /// The source address is not one that the port may use.
    Guard = "guard",
    /// The source address is a group address, zero, or pinned to another port, such as the
    /// gateway's own.
    BadSource = "bad_source",
    /// The destination has no buffer free: its guest or peer does not keep up.
    NoBuffer = "no_buffer",
    /// The destination had no buffer free for as long as a frame may wait for one.
    QueueTimeout = "queue_timeout",
    /// The frames that wait for a buffer of the destination fill its queue, or the sender's share
    /// of it.
    QueueFull = "queue_full",
    /// The destination's buffers are too small for the frame.
    SmallBuffer = "small_buffer",
    /// The destination is not connected, or its rings are not enabled.
    LinkDown = "link_down",
    /// The frame's only destination is the port that it came from.
    Hairpin = "hairpin",
    /// No port is there to take the frame. A gateway has one for each router advertisement to all
    /// while no member is up, such as the first one of a network.
    NoDestination = "no_destination",
    /// The destination is a group address that belongs to one link, such as that of pause frames or
    /// LLDP.
    Reserved = "reserved",
    /// The destination needs a checksum or segments in software, and the frame's headers do not
    /// allow it; or a frame that represents several segments is for no known port.
    NotTransformable = "not_transformable",
    /// The operating system refused the frame.
    SystemRefused = "system_refused",
    /// The port was reset while it held the frame.
    Reset = "reset",
    /// The gateway's own queue was full.
    GatewayFull = "gateway_full",
    /// The frame is addressed to the gateway, and is cut short, a fragment, wrongly summed or from
    /// a false address.
    GatewayRefused = "gateway_refused",
    /// The sender's DHCP messages exceed its rate.
    DhcpRate = "dhcp_rate",
    /// The sender disabled the ring before the frame was taken from it.
    Disabled = "disabled",
    /// A router advertisement or redirect, or a packet that could hide one, from a port without the
    /// role of a router.
    RogueRouter = "rogue_router",
    /// An answer to a DHCP client from a port without the role of a DHCP server.
    RogueDhcp = "rogue_dhcp",
    /// The frame comes from an address of the gateway or the router, or claims it, and the port is
    /// neither.
    GatewayClaim = "gateway_claim",
    /// The IPv6 source address is not one that the port may use: another port has it, or it is not
    /// of the network.
    Source6 = "source6",
    /// A message of neighbour discovery is about an address that the port does not have, tells
    /// another MAC address than the frame's source, or is hidden.
    NdInspection = "nd_inspection",
    /// The port has as many IPv6 addresses as it may have, or, without a guard for them, uses new ones
    /// faster than its neighbours could remember.
    AddressLimit = "address_limit",
    /// The port sends more broadcast frames than its `storm` limit allows.
    BroadcastStorm = "broadcast_storm",
    /// The port sends more multicast frames than its `storm` limit allows.
    MulticastStorm = "multicast_storm",
    /// The port sends more frames to unknown addresses than its `storm` limit allows.
    UnknownStorm = "unknown_storm",
    /// The frame was to be copied to all ports, and the port's share of such copies and the
    /// network's pool are used up.
    FloodBudget = "flood_budget",
    /// The destination's `rate` limit was reached, and its queue had no room, or the frame waited
    /// for too long; or a limit of the frame's class was reached.
    RateLimit = "rate_limit",
    /// The user uplink sent the same frame more than 1000 times within a second, or 5000 frames
    /// without news in one flow.
    UplinkRepeat = "uplink_repeat",
    /// A member sent more on a connection through the user uplink before the uplink had answered
    /// what opens it.
    UplinkOpening = "uplink_opening",
    /// The sender and the destination are isolated from each other.
    Isolated = "isolated",
    /// A rule of the network denies the connection, or no rule allows it and the network's policy
    /// is to deny.
    Denied = "denied",
    /// The port may open no more connections: the network's table of connections is full.
    ConnectionsFull = "connections_full",
    /// The port gets copies of other ports' frames (a mirror), and may not send.
    MirrorPort = "mirror_port",
    /// The frame's VLAN is not one that the port may send in, or the frame has no tag and the port
    /// has no native VLAN.
    VlanDenied = "vlan_denied",
    /// The frame has more than one VLAN tag, or one of another kind than 802.1Q's, and its network
    /// has VLANs.
    VlanTags = "vlan_tags",
    /// A page of a Xen guest, in which the frame lies or was to go to, could not be copied: it is
    /// not granted.
    BadGrant = "bad_grant",
    /// The frame's multicast address is not one that the destination, a Xen guest, asked for.
    Unsubscribed = "unsubscribed",
    /// The frame with the headers of its tunnel is longer than the way to the other machine allows;
    /// the network's MTU is too large.
    TunnelTooLong = "tunnel_too_long",
    /// A datagram came to a tunnel that is no packet of it.
    BadTunnel = "bad_tunnel",
    /// A packet came to a tunnel from a machine that is not one of its remotes.
    UnknownRemote = "unknown_remote",
    /// A packet came to a tunnel with the identifier of another network.
    WrongVni = "wrong_vni",
    /// A frame came through a tunnel from a remote that sends from more addresses than its share,
    /// while the table is full.
    RemoteAddresses = "remote_addresses",
    /// A frame to a group came through a tunnel from a remote that sends more of them than its
    /// share, while others need theirs.
    RemoteStorm = "remote_storm",
}

impl Reason {
    /// Length of the arrays that count by reason.
    pub const COUNT: usize = Reason::ALL.len();
}

/// Frames dropped, by reason; filled while a batch is handled, then added to the port's counters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drops {
    by_reason: [u64; Reason::COUNT],
    any: bool,
    /// Frames of the batch in hand that are counted as [`Reason::NoBuffer`] and may be queued
    /// instead.
    refused: Vec<u16>,
    /// As [`Drops::note_limit`] was told.
    limited: Option<Nanos>,
    /// How many of `refused`, its last ones, the rate limit held back, and not the port.
    held: usize,
}

impl Default for Drops {
    fn default() -> Self {
        Drops { by_reason: [0; Reason::COUNT], any: false, refused: Vec::new(), limited: None, held: 0 }
    }
}

impl Drops {
    /// The only way to lose frames: `n` of them, for `reason`.
    #[inline]
    pub fn count(&mut self, reason: Reason, n: u64) {
        self.by_reason[reason as usize] += n;
        self.any |= n != 0;
    }

    /// Frames of the batch that is being transmitted, by their indices, for which the peer has no
    /// buffer at the moment. They are counted as [`Reason::NoBuffer`], unless the worker has them
    /// wait for one. A port refuses every frame behind one that it refused, as far as they share a
    /// ring, so that their order is kept.
    #[inline]
    pub fn refuse(&mut self, which: &[u16]) {
        self.count(Reason::NoBuffer, which.len() as u64);
        self.refused.extend_from_slice(which);
    }

    /// Says how long the port's rate limit still lets nothing pass; zero where it does.
    pub(crate) fn note_limit(&mut self, wait: Nanos) {
        if wait != Nanos(0) {
            self.limited = Some(wait);
        }
    }

    /// As [`Drops::refuse`], of frames that the port's rate limit holds back: those behind all that
    /// the port was given.
    pub(crate) fn hold(&mut self, which: &[u16]) {
        self.refuse(which);
        self.held += which.len();
    }

    /// How long the port's rate limit lets nothing pass, where it held frames back.
    #[inline]
    pub(crate) fn limited(&self) -> Option<Nanos> {
        self.limited
    }

    /// Whether frames were refused, and neither taken nor forgotten.
    #[inline]
    pub(crate) fn has_refused(&self) -> bool {
        !self.refused.is_empty()
    }

    /// Hands the refused frames to `queue`, each with whether it was the port that refused it, and
    /// returns how many it took. Those are not counted any more; the others are counted under the
    /// reason that it gives.
    pub(crate) fn take_refused(&mut self, mut queue: impl FnMut(u16, bool) -> Result<(), Reason>) -> u64 {
        let mut taken = 0;
        let refused = std::mem::take(&mut self.refused);
        let by_port = refused.len().saturating_sub(std::mem::take(&mut self.held));
        for (at, index) in refused.iter().enumerate() {
            self.by_reason[Reason::NoBuffer as usize] -= 1;
            match queue(*index, at < by_port) {
                Ok(()) => taken += 1,
                Err(reason) => self.by_reason[reason as usize] += 1,
            }
        }
        self.refused = refused;
        self.refused.clear();
        taken
    }

    /// The refused frames.
    #[inline]
    pub(crate) fn refused(&self) -> &[u16] {
        &self.refused
    }

    /// Puts those of `which` into `rest` that were not refused.
    pub(crate) fn without_refused(&self, which: &[u16], rest: &mut Vec<u16>) {
        rest.clear();
        rest.extend(which.iter().filter(|index| !self.refused.contains(index)));
    }

    /// Leaves the refused frames counted as they are: they are lost and do not wait.
    #[inline]
    pub fn forget_refused(&mut self) {
        self.refused.clear();
        self.held = 0;
    }

    /// As new, with the memory of `spare` for refused frames.
    #[inline]
    pub(crate) fn reusing(mut spare: Vec<u16>) -> Drops {
        spare.clear();
        Drops { refused: spare, ..Drops::default() }
    }

    /// The memory back, for [`Drops::reusing`].
    #[inline]
    pub(crate) fn into_spare(self) -> Vec<u16> {
        self.refused
    }

    /// Whether anything was counted since the last [`Drops::drain`].
    #[inline]
    pub fn any(&self) -> bool {
        self.any
    }

    /// Frames lost for `reason`.
    pub fn of(&self, reason: Reason) -> u64 {
        self.by_reason[reason as usize]
    }

    /// Frames lost in all.
    pub fn total(&self) -> u64 {
        self.by_reason.iter().sum()
    }

    /// Hands each non-zero count to `each` and starts again at zero.
    pub fn drain(&mut self, mut each: impl FnMut(Reason, u64)) {
        if !self.any {
            return;
        }
        for reason in Reason::ALL {
            let n = core::mem::take(&mut self.by_reason[*reason as usize]);
            if n != 0 {
                each(*reason, n);
            }
        }
        self.any = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_own_name_and_an_explanation() {
        let mut names: Vec<_> = Reason::ALL.iter().map(|r| r.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::COUNT);
        assert!(Reason::ALL.iter().all(|r| r.explanation().ends_with('.')));
    }

    #[test]
    fn drain_hands_out_each_count_once() {
        let mut drops = Drops::default();
        drops.count(Reason::Runt, 2);
        drops.count(Reason::NoBuffer, 3);
        let mut seen = Vec::new();
        drops.drain(|r, n| seen.push((r, n)));
        assert_eq!(seen, [(Reason::Runt, 2), (Reason::NoBuffer, 3)]);
        assert!(!drops.any());
        drops.drain(|_, _| panic!("already drained"));
    }
}
