//! The fabric's links of shared memory: served in a thread, kept by a process of their own while
//! the daemon restarts.
//!
//! # Invariants
//! - Links are open and served before the first machine starts: QEMU reads its greeting in its own
//!   start.
//! - What outlives the daemon is in the fd store; see `fdstore`.

use std::os::fd::AsFd;

use tombolo_ivshmem::end::{EventDoorbells, LinkEnd, PeerDoorbells};
use tombolo_ivshmem::links::{Config, Event, LinkStatus, Links};
use tombolo_ivshmem::server::Dialect;
use tombolo_port::ivshmem::{Handle, Ivshmem, PollSettings};
use tombolo_ring::ivshmem::protocol;
use tombolo_ring::ivshmem::state::Offloads;
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::memory::Mapping;
use tombolo_worker::reactor::Registration;

use super::events::{Facts, Kind, Ration};
use super::fdstore::{self, Finder};
use super::{FabricError, Running, Say};
use crate::api::report::{LinkPeerReport, LinkReport};
use crate::plan::{Plan, Seat};
use crate::process;

/// The links of a running fabric.
pub(crate) struct SharedMemory {
    pub(crate) links: Links,
    finder: Finder,
}

impl SharedMemory {
    fn start(fabric: &str, finder: &Finder, say: &Say) -> Result<SharedMemory, FabricError> {
        let its = finder.clone();
        let told = say.clone();
        let on_failure = Box::new(move |text: &str| told(text));
        let failed = |source: rustix::io::Errno| FabricError::Spawn {
            what: "the thread of the ivshmem links".into(),
            source: source.into(),
            hint: "`tombolo doctor` says what is missing",
        };
        let links = Links::start(fabric, Some(Box::new(move || its.find())), on_failure).map_err(failed)?;
        if let Some(fd_store) = finder.running()
            && let Err(error) = links.recall(fd_store)
        {
            say(&format!("the fd store of the ivshmem links does not answer ({error}): the links start again"));
        }
        Ok(SharedMemory { links, finder: finder.clone() })
    }

    /// Ends the links and their fd store.
    fn end(self) {
        self.links.end_fd_store(fdstore::TIMEOUT);
        drop(self.links);
        self.finder.reap();
    }
}

impl Running {
    /// Starts the thread that serves links, where the plan has some.
    pub(crate) fn start_links(&mut self, plan: &Plan) -> Result<(), FabricError> {
        if self.shared.is_some() {
            return Ok(());
        }
        if plan.all_links().next().is_none() {
            return Ok(());
        }
        self.shared = Some(SharedMemory::start(&self.spec.name, self.store.finder(), &self.say)?);
        Ok(())
    }

    pub(crate) fn links(&self) -> Option<&Links> {
        self.shared.as_ref().map(|s| &s.links)
    }

    /// Opens and serves the direct links.
    pub(crate) fn direct_links(&mut self, plan: &Plan) -> Result<(), FabricError> {
        let Some(links) = self.links() else { return Ok(()) };
        for link in &plan.links {
            let opened = links.open(link.clone())?;
            links.serve(&link.name, Some(self.link_watcher(&link.name)))?;
            let machines = opened.restored.len();
            let again = if machines > 0 { format!(", taken up with {machines} machine(s)") } else { String::new() };
            (self.say)(&format!("{}: {} bytes for {} ends{again}", link.name, link.region_bytes, link.shape.max_peers));
        }
        Ok(())
    }

    /// Adds events when peers join and leave a direct link. What a peer repeats is rationed.
    pub(super) fn link_watcher(&self, name: &str) -> tombolo_ivshmem::links::Watcher {
        let (events, mut ration) = (self.events.clone(), Ration::port());
        let name = name.split_once(':').map_or(name, |(_, name)| name).to_string();
        Box::new(move |event| {
            if !ration.take(std::time::Instant::now()) {
                return;
            }
            let text = match event {
                Event::Joined { id, .. } => format!("peer {id} joined the link {name}"),
                Event::Left { id } => format!("peer {id} left the link {name}"),
            };
            events.add(Kind::Link, Facts::of(&name), &text);
        })
    }

    /// Why a machine that an earlier daemon left cannot be adopted as far as its links go.
    pub(crate) fn lost_link(&self, seats: &[Seat]) -> Option<String> {
        let links = self.links()?;
        let lost = seats.iter().find(|seat| !links.remembers(&seat.link, seat.id))?;
        Some(format!("its link {} is lost, because no fd store has it", lost.link.name))
    }

    /// The port of a network link; the link is open and not served yet.
    pub(crate) fn open_link(
        &self,
        config: &Config,
        mtu: u16,
        registration: Registration,
    ) -> Result<(Ivshmem, Handle), FabricError> {
        let failed = |why: String| FabricError::Port { port: config.name.clone(), why };
        let links = self.links().ok_or_else(|| failed("its links are not served".into()))?;
        let opened = links.open(config.clone())?;
        let make = || -> Result<(Ivshmem, Handle), String> {
            // One that was there when the daemon before was killed has to see our RESET: it runs on
            // with rings of that one.
            let there = opened.restored.into_iter().find(|(id, _)| *id == 1);
            let peer_present = there.is_some();
            let doorbells = there.and_then(|(_, doorbells)| doorbells_of(doorbells));
            let memory = Mapping::new(&opened.region, 0, config.region_bytes, true).map_err(|e| e.to_string())?;
            let end = LinkEnd {
                memory: memory.into(),
                layout: config.layout,
                own_id: 0,
                peer_id: 1,
                vectors: config.shape.vectors,
                doorbells: opened.own,
                peer_doorbells: doorbells,
                peer_present,
                owns_region: true,
                mtu: mtu.into(),
                offloads: if config.header.as_ref().is_some_and(|h| h.offloads) {
                    Offloads::Offered
                } else {
                    Offloads::None
                },
            };
            Ivshmem::new(end, PollSettings::default(), registration).map_err(|e| e.to_string())
        };
        make().map_err(|why| {
            links.close(&config.name);
            failed(why)
        })
    }

    /// Lets machines join a port's link.
    pub(crate) fn serve_link(&self, config: &Config, handle: Handle) -> Result<(), FabricError> {
        let Some(links) = self.links() else { return Ok(()) };
        let watcher = Box::new(move |event| match event {
            Event::Joined { doorbells, .. } => handle.peer_joined(doorbells_of(doorbells)),
            Event::Left { .. } => handle.peer_left(),
        });
        Ok(links.serve(&config.name, Some(watcher))?)
    }

    /// Puts a started machine on its seats of plain links.
    pub(crate) fn take_seats(&self, seats: &[Seat], pid: u32) -> Result<(), FabricError> {
        let (Some(links), Some(process)) = (self.links(), process::Process::open(pid)) else { return Ok(()) };
        for seat in seats.iter().filter(|s| s.is_plain()) {
            links.occupy(&seat.link.name, seat.id, pid, process.pidfd.as_fd())?;
        }
        Ok(())
    }

    /// Has links listen again whose sockets were deleted; whether one could not be made.
    pub(crate) fn restore_links(&mut self) -> bool {
        let Some(links) = self.links() else { return false };
        let faults = links.restore_doors();
        let is_pending = !faults.is_empty();
        self.deleted.faults.extend(faults.iter().map(|error| format!("a link's socket was deleted: {error}")));
        is_pending
    }

    /// Ends all links, and the fd store.
    pub(crate) fn end_links(&mut self) {
        self.store.close();
        match self.shared.take() {
            Some(shared) => shared.end(),
            None => self.store.finder().end(),
        }
    }

    /// What is to be said of the links. `ports` gives the fill of a network link's rings.
    pub(crate) fn link_reports(&self, ports: &[crate::api::report::PortReport]) -> Vec<LinkReport> {
        let statuses = self.links().map(Links::status).unwrap_or_default();
        statuses.iter().map(|link| self.link_report(link, ports)).collect()
    }

    fn link_report(&self, link: &LinkStatus, ports: &[crate::api::report::PortReport]) -> LinkReport {
        let (kind, name) = match link.name.split_once(':') {
            Some(("port", name)) => ("network", name),
            Some((_, name)) => ("direct", name),
            None => ("direct", link.name.as_str()),
        };
        let direct = self.spec.links.iter().find(|l| kind == "direct" && l.name == name);
        let port = ports.iter().find(|p| kind == "network" && p.name == name);
        let (version, number) = match link.shape.dialect {
            Dialect::V1 => (1, direct.map_or(protocol::NETWORK, |l| l.protocol)),
            Dialect::V2 { protocol, .. } => (2, protocol),
        };
        let who = |id: u32| match (direct, port) {
            (Some(link), _) => {
                let fabric = || link.is_bridged().then(|| "fabric".into());
                link.between.get(id as usize).cloned().or_else(fabric)
            }
            (None, _) if id == 0 => Some("fabric".into()),
            (None, port) => port.and_then(|p| p.details.get("machine")?.as_str().map(String::from)),
        };
        let offloads = if kind == "network" { Offloads::Offered } else { Offloads::None };
        let state = |word: u32| match offloads.of_peer(word).0 {
            Some(state) => (state.name().to_string(), state.word()),
            None => (format!("{word:#x}"), word),
        };
        let peers = link.peers.iter().map(|p| {
            let (state, state_word) = state(p.state);
            let (pid, waiting_messages) = ((p.pid != 0).then_some(p.pid), p.waiting as u64);
            LinkPeerReport { id: p.id, name: who(p.id), pid, state, state_word, waiting_messages }
        });
        LinkReport {
            name: name.into(),
            kind: kind.into(),
            version,
            protocol: number,
            plain: link.shape.vectors == 0,
            region_bytes: link.region_bytes,
            vectors: link.shape.vectors,
            max_peers: link.shape.max_peers,
            peers: peers.collect(),
            rings: port.and_then(|p| p.rings.clone()),
            joins: link.joins,
            leaves: link.leaves,
            cut_slow: link.cut_slow,
            cut_talking: link.cut_talking,
            refused: link.refused,
            kept: link.kept,
        }
    }
}

/// How a peer is rung; `None` for one that polls.
fn doorbells_of(doorbells: Vec<Doorbell>) -> Option<Box<dyn PeerDoorbells>> {
    if doorbells.is_empty() { None } else { Some(Box::new(EventDoorbells::from(doorbells))) }
}
