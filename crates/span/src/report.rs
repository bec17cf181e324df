//! What a machine says of the others: how each is heard, and what several claim.

use std::net::IpAddr;
use std::time::Duration;

/// What is known of the connection to a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// Never heard.
    Unheard,
    /// Heard within two beats.
    Up,
    /// Not heard for longer; what it has is kept.
    Stale,
    /// Forgotten.
    Gone,
}

impl PeerState {
    /// One word.
    pub const fn name(self) -> &'static str {
        match self {
            PeerState::Unheard => "unheard",
            PeerState::Up => "up",
            PeerState::Stale => "stale",
            PeerState::Gone => "gone",
        }
    }
}

/// Another machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub name: String,
    /// Whether it is heard.
    pub state: PeerState,
    /// When it was last heard.
    pub heard: Option<Duration>,
    /// Members that it claims in all networks.
    pub members: usize,
    /// Its networks, each with the end of its tunnel.
    pub networks: Vec<(String, Option<IpAddr>)>,
    /// Messages of its that were refused, since they were wrong or too many.
    pub refused: u64,
}

/// Something that members of several machines claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Conflict {
    /// The network.
    pub network: String,
    /// An IP address, a name, or a MAC address.
    pub what: String,
    /// The machines that claim it, in order.
    pub machines: Vec<String>,
    /// The one whose member has it, or to which a file gives it.
    pub winner: String,
}

impl std::fmt::Display for Conflict {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Conflict { network, what, machines, winner } = self;
        let verb =
            if machines.contains(winner) { format!("{winner} has it") } else { format!("it belongs to {winner}") };
        write!(out, "conflict in {network}: {what} is claimed by {}, and {verb}", machines.join(" and "))
    }
}
