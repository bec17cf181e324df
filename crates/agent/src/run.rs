//! The running agent: a worker with two ports, a tap and the link.

use crate::access::{Access, Registers};
use crate::error::AgentError;
use crate::link::NetworkLink;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tombolo_ivshmem::end::{LinkEnd, PeerDoorbells};
use tombolo_port::ivshmem::{Ivshmem, PollSettings};
use tombolo_port::tap::{TapConfig, TapPort};
use tombolo_ring::ivshmem::state::Offloads;
use tombolo_switch::control::PortSettings;
use tombolo_switch::guard::{Guard, Roles};
use tombolo_switch::limit::Storm;
use tombolo_switch::mac::MacSettings;
use tombolo_worker::thread::{WorkerConfig, WorkerThread};

impl PeerDoorbells for Registers {
    fn ring(&self, peer: u32, vector: u16) {
        // A peer's id is below the link's number of peers, at most 64.
        Registers::ring(self, peer as u16, vector);
    }
}

/// Joins the link and a new tap until a signal ends it; then the tap is gone and the other side
/// sees the link reset.
///
/// # Errors
/// What of the tap or the link could not be had; nothing stays behind then.
pub(crate) fn until_signal(link: NetworkLink, tap: &str) -> Result<(), AgentError> {
    // Before anything is made, so that no signal ends the program without taking it away.
    let system = |what| move |source| AgentError::System { what, source };
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(system("waiting for signals"))?;

    let worker = WorkerThread::start(&WorkerConfig { name: "agent".into(), ..WorkerConfig::default() })?;
    let handle = worker.handle();
    let network = handle.add_network("link", MacSettings::default())?;

    let (own_id, peer_id) = (link.own, link.peer());
    let NetworkLink { device, access, header, .. } = link;
    let Access { memory, registers, doorbells, polled_because } = access;
    let mac = (header.mac != [0; 6]).then_some(header.mac);
    // Only a device with doorbells can ring, whether it is rung or not.
    let peer_doorbells = device.has_doorbells().then(|| Box::new(registers) as Box<dyn PeerDoorbells>);
    let end = LinkEnd {
        memory: memory.into(),
        layout: header.layout,
        own_id,
        peer_id,
        vectors: header.vectors,
        doorbells,
        peer_doorbells,
        peer_present: true,
        owns_region: false,
        mtu: u32::from(header.mtu()),
        offloads: if header.offloads && own_id == 1 { Offloads::Taken } else { Offloads::None },
    };
    // The fabric at the other end limits what the guest may send and flood. Here both sides may do
    // everything: the fabric's side is the guest's router and DHCP server.
    let guard = Guard::default().with_roles(Roles::ALL);
    let settings = PortSettings { guard, storm: Storm::OFF, ..PortSettings::default() };
    let reserved = handle.reserve()?;
    let (port, _) = Ivshmem::new(end, PollSettings::default(), worker.registration(&reserved))
        .map_err(|error| AgentError::Header { address: device.address.clone(), problem: error.to_string() })?;
    handle.add_port(reserved, network, "ivshmem", Box::new(port), settings.clone())?;

    let reserved = handle.reserve()?;
    let config = TapConfig { mtu: Some(u32::from(header.mtu())), mac, ..TapConfig::new(tap) };
    let port = TapPort::open(&config, worker.registration(&reserved))?;
    let name = port.name().to_owned();
    handle.add_port(reserved, network, "tap", Box::new(port), settings)?;

    match polled_because {
        None => println!("{name}: {device}, link `{}`, wake-ups by interrupt (vfio)", header.name.as_str()),
        Some(reason) => println!("{name}: {device}, link `{}`, polled: {reason}", header.name.as_str()),
    }
    // One is enough; a second one, while the worker ends, does what it does by default.
    let _ = signals.forever().next();
    worker.stop()?;
    Ok(())
}
