//! A hypervisor with grants and event channels, a XenStore, and a frontend, all of the test's own.

use super::super::platform::{self, Guest, Page};
use super::super::transport;
use crate::pair::OwnedFrame;
use crate::sys::GrantCopy;
use rustix::io::Errno;
use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::xen::ctrl::{CtrlFront, CtrlRequest};
use tombolo_ring::xen::netif::{Extra, RSP_ERROR};
use tombolo_ring::xen::{Checksum, PAGE_BYTES, PacketHash, RingPage, RxFront, TxFront, TxPart};
use tombolo_shm::doorbell::Doorbell;
use tombolo_switch::frame::Offload;

struct Transaction {
    /// The version that it began with.
    began: u64,
    /// Nodes that it writes, and their values.
    writes: Vec<(String, Vec<u8>)>,
}

#[derive(Default)]
struct WorldState {
    nodes: BTreeMap<String, Vec<u8>>,
    /// Raised with each change of `nodes`.
    version: u64,
    /// Open transactions by their number.
    transactions: HashMap<u32, Transaction>,
    started: u32,
    /// Connection, path as it was given, token.
    watches: Vec<(usize, String, String)>,
    requests: usize,
    streams: HashMap<usize, UnixStream>,
    connections: usize,
    pages: HashMap<u32, ForeignMut<'static>>,
    /// Ports of guests that may be bound: domain and port.
    unbound: Vec<(u16, u32)>,
    /// Bound ports, with what wakes the backend.
    bound: HashMap<(u16, u32), Doorbell>,
    /// Events to the guest.
    notified: HashMap<(u16, u32), usize>,
    mapped: usize,
    /// Copies fail.
    revoked: bool,
    /// The system refuses to copy anything.
    refuses: bool,
    /// So many transactions end with EAGAIN and change nothing.
    conflicts: usize,
    /// As in a domain that is not the toolstack's.
    hides_names: bool,
    /// What XenStore answers to whoever wants to write or watch something.
    denial: Option<&'static str>,
}

/// What is shared by all.
#[derive(Clone, Default)]
pub(super) struct World(Arc<Mutex<WorldState>>);

impl World {
    pub(super) fn new() -> World {
        World::default()
    }

    fn lock(&self) -> MutexGuard<'_, WorldState> {
        self.0.lock().unwrap()
    }

    /// Pages that are mapped.
    pub(super) fn mapped(&self) -> usize {
        self.lock().mapped
    }

    /// Event channels that are bound.
    pub(super) fn bound(&self) -> usize {
        self.lock().bound.len()
    }

    /// Paths that are watched, by all connections.
    pub(super) fn watched(&self) -> Vec<String> {
        self.lock().watches.iter().map(|(_, path, _)| path.clone()).collect()
    }

    /// Requests to XenStore so far.
    pub(super) fn requests(&self) -> usize {
        self.lock().requests
    }

    pub(super) fn revoke(&self, revoked: bool) {
        self.lock().revoked = revoked;
    }

    /// From now on, or no more, this system refuses to copy anything.
    pub(super) fn refuse_copies(&self, refuses: bool) {
        self.lock().refuses = refuses;
    }

    /// Has the next transactions meet others.
    pub(super) fn conflict(&self, transactions: usize) {
        self.lock().conflicts = transactions;
    }

    /// How many of these are to come.
    pub(super) fn conflicts(&self) -> usize {
        self.lock().conflicts
    }

    /// From now on XenStore refuses to tell the names of domains, as in a driver domain.
    pub(super) fn hide_names(&self) {
        self.lock().hides_names = true;
    }

    /// From now on XenStore answers with this error where something is to be written or watched, or
    /// no more.
    pub(super) fn deny(&self, errno: Option<&'static str>) {
        self.lock().denial = errno;
    }

    pub(super) fn nodes_below(&self, path: &str) -> usize {
        self.lock().nodes.keys().filter(|node| node.starts_with(path)).count()
    }

    /// Writes nodes, then tells those who watch.
    pub(super) fn write(&self, nodes: &[(String, String)]) {
        let mut state = self.lock();
        for (path, value) in nodes {
            state.put(path, value.as_bytes());
        }
        for (path, _) in nodes {
            state.tell(path);
        }
    }

    fn remove(&self, path: &str) {
        let mut state = self.lock();
        let below = format!("{path}/");
        state.nodes.retain(|node, _| node != path && !node.starts_with(&below));
        state.version += 1;
        state.tell(path);
    }

    fn read(&self, path: &str) -> Option<String> {
        self.lock().nodes.get(path).map(|value| String::from_utf8(value.clone()).unwrap())
    }
}

fn absolute(path: &str) -> String {
    if path.starts_with('/') { path.into() } else { format!("/local/domain/0/{path}") }
}

fn message(kind: u32, request: u32, payload: &[u8]) -> Vec<u8> {
    let words = [kind, request, 0, payload.len() as u32];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend_from_slice(payload);
    bytes
}

impl WorldState {
    fn put(&mut self, path: &str, value: &[u8]) {
        self.nodes.insert(path.into(), value.into());
        self.version += 1;
    }

    /// Sends the events of a change at `path`.
    fn tell(&mut self, path: &str) {
        for (connection, watched, token) in &self.watches {
            let above = absolute(watched);
            let touches =
                path == above || path.starts_with(&format!("{above}/")) || above.starts_with(&format!("{path}/"));
            if let Some(stream) = self.streams.get_mut(connection).filter(|_| touches) {
                let _ = stream.write_all(&message(15, 0, format!("{path}\0{token}\0").as_bytes()));
            }
        }
    }

    /// Answers a request: type and payload. `transaction` is 0 outside of one.
    fn answer(&mut self, connection: usize, kind: u32, transaction: u32, payload: &[u8]) -> (u32, Vec<u8>) {
        let parts: Vec<&str> =
            payload.split(|byte| *byte == 0).map(|part| std::str::from_utf8(part).unwrap()).collect();
        let path = absolute(parts[0]);
        let missing = (16, b"ENOENT\0".to_vec());
        if let (4 | 6 | 11, Some(errno)) = (kind, self.denial) {
            return (16, format!("{errno}\0").into_bytes());
        }
        match kind {
            1 => {
                let below = format!("{path}/");
                let mut names: Vec<&str> =
                    self.nodes.keys().filter_map(|node| node.strip_prefix(&below)?.split('/').next()).collect();
                names.dedup();
                if names.is_empty() {
                    return missing;
                }
                (1, names.iter().flat_map(|name| name.bytes().chain([0])).collect())
            }
            2 if self.hides_names && path.ends_with("/name") => (16, b"EACCES\0".to_vec()),
            2 => self.nodes.get(&path).map_or(missing, |value| (2, value.clone())),
            4 if self.watches.contains(&(connection, parts[0].into(), parts[1].into())) => (16, b"EEXIST\0".to_vec()),
            4 => {
                self.watches.push((connection, parts[0].into(), parts[1].into()));
                (4, b"OK\0".to_vec())
            }
            5 => {
                self.watches.retain(|watch| *watch != (connection, parts[0].into(), parts[1].into()));
                (5, b"OK\0".to_vec())
            }
            6 => {
                self.started += 1;
                self.transactions.insert(self.started, Transaction { began: self.version, writes: Vec::new() });
                (6, format!("{}\0", self.started).into_bytes())
            }
            // Any change since it began is a conflict, as in the first xenstored.
            7 => match self.transactions.remove(&transaction) {
                None => (16, b"ENOENT\0".to_vec()),
                Some(open) if parts[0] == "T" && (self.conflicts > 0 || open.began != self.version) => {
                    self.conflicts = self.conflicts.saturating_sub(1);
                    (16, b"EAGAIN\0".to_vec())
                }
                Some(open) => {
                    let writes = if parts[0] == "T" { open.writes } else { Vec::new() };
                    writes.iter().for_each(|(path, value)| self.put(path, value));
                    writes.iter().for_each(|(path, _)| self.tell(path));
                    (7, b"OK\0".to_vec())
                }
            },
            11 => {
                let value = parts[1].as_bytes();
                match self.transactions.get_mut(&transaction) {
                    Some(open) => open.writes.push((path, value.into())),
                    None => {
                        self.put(&path, value);
                        self.tell(&path);
                    }
                }
                (11, b"OK\0".to_vec())
            }
            _ => (16, b"ENOSYS\0".to_vec()),
        }
    }
}

/// Serves one connection to XenStore until it is closed.
fn serve(world: &World, connection: usize, mut stream: UnixStream) {
    loop {
        let mut header = [0; 16];
        if stream.read_exact(&mut header).is_err() {
            break;
        }
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        let mut payload = vec![0; word(12) as usize];
        if stream.read_exact(&mut payload).is_err() {
            break;
        }
        let mut state = world.lock();
        state.requests += 1;
        let (kind, answer) = state.answer(connection, word(0), word(8), &payload);
        let _ = stream.write_all(&message(kind, word(4), &answer));
        if word(0) == 4 {
            // The first event of a watch comes at once.
            let parts: Vec<&[u8]> = payload.split(|byte| *byte == 0).collect();
            let _ = stream.write_all(&message(15, 0, &[parts[0], b"\0", parts[1], b"\0"].concat()));
        }
    }
    let mut state = world.lock();
    state.streams.remove(&connection);
    state.watches.retain(|watch| watch.0 != connection);
}

/// The machine as the port sees it.
pub(super) struct Machine(pub(super) World);

impl platform::Machine for Machine {
    fn store(&self) -> Result<OwnedFd, Errno> {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let world = self.0.clone();
        let connection = {
            let mut state = world.lock();
            state.connections += 1;
            let connection = state.connections;
            state.streams.insert(connection, theirs.try_clone().unwrap());
            connection
        };
        std::thread::spawn(move || serve(&world, connection, theirs));
        Ok(ours.into())
    }

    fn guest(&self, domain: u16) -> Result<Box<dyn Guest>, Errno> {
        Ok(Box::new(FakeGuest { world: self.0.clone(), domain, doorbell: Doorbell::new()?, ports: Mutex::default() }))
    }
}

struct FakeGuest {
    world: World,
    domain: u16,
    doorbell: Doorbell,
    ports: Mutex<Vec<u32>>,
}

struct FakePage(World, ForeignMut<'static>);

impl Page for FakePage {
    fn bytes(&self) -> ForeignMut<'_> {
        self.1
    }
}

impl Drop for FakePage {
    fn drop(&mut self) {
        self.0.lock().mapped -= 1;
    }
}

impl Guest for FakeGuest {
    fn map(&self, gref: u32) -> Result<Box<dyn Page>, Errno> {
        let mut state = self.world.lock();
        let page = *state.pages.get(&gref).ok_or(Errno::INVAL)?;
        state.mapped += 1;
        Ok(Box::new(FakePage(self.world.clone(), page)))
    }

    fn bind(&self, port: u32) -> Result<u32, Errno> {
        let mut state = self.world.lock();
        if !state.unbound.contains(&(self.domain, port)) || state.bound.contains_key(&(self.domain, port)) {
            return Err(Errno::INVAL);
        }
        state.bound.insert((self.domain, port), self.doorbell.duplicate()?);
        self.ports.lock().unwrap().push(port);
        Ok(port)
    }

    fn notify(&self, port: u32) {
        *self.world.lock().notified.entry((self.domain, port)).or_default() += 1;
    }

    fn events(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    fn unmask(&self) {
        self.doorbell.take();
    }

    fn copy(&self, copies: &mut [GrantCopy<'_>]) -> Result<(), Errno> {
        let state = self.world.lock();
        if state.refuses {
            return Err(Errno::NOMEM);
        }
        for copy in copies {
            copy.imitate(|domain, gref| {
                let good = domain == self.domain && !state.revoked;
                state.pages.get(&gref).copied().filter(|_| good)
            });
        }
        Ok(())
    }
}

impl Drop for FakeGuest {
    fn drop(&mut self) {
        let mut state = self.world.lock();
        for port in self.ports.lock().unwrap().iter() {
            state.bound.remove(&(self.domain, *port));
        }
    }
}

/// Pages for packets, for each direction of each queue.
const BUFFERS: u32 = 256;

struct FrontQueue {
    tx_page: ForeignMut<'static>,
    rx_page: ForeignMut<'static>,
    tx: TxFront,
    rx: RxFront,
    /// Grants of free pages for packets to send.
    free: Vec<u32>,
}

/// A guest's frontend. Its memory stays when its domain goes, and is the next one's.
pub(super) struct Frontend {
    world: World,
    domain: u16,
    device: u32,
    split: bool,
    queues: Vec<FrontQueue>,
    sent: usize,
    failed_pages: usize,
    /// Pieces of packets that were answered with an error.
    failed_pieces: usize,
    /// Where in its page the last frame that was taken began.
    taken_offset: u16,
    /// Its hash.
    taken_hash: Option<PacketHash>,
    control_page: ForeignMut<'static>,
    control: CtrlFront,
}

/// Grant and event channel of the control ring.
const CONTROL_GREF: u32 = 900;
const CONTROL_CHANNEL: u32 = 90;

fn tx_gref(queue: usize) -> u32 {
    1 + 2 * queue as u32
}

fn buffer_gref(queue: usize, n: u32) -> u32 {
    1000 + 2 * BUFFERS * queue as u32 + n
}

impl Frontend {
    pub(super) fn new(world: World, queues: u32, split: bool) -> Frontend {
        let page = |gref: u32| {
            let memory = Box::leak(vec![0u8; PAGE_BYTES + 64].into_boxed_slice());
            let skip = memory.as_ptr().align_offset(64);
            let page = ForeignMut::from(&mut memory[skip..skip + PAGE_BYTES]);
            world.lock().pages.insert(gref, page);
            page
        };
        let queues = (0..queues as usize)
            .map(|queue| {
                for n in 0..2 * BUFFERS {
                    page(buffer_gref(queue, n));
                }
                let (tx_page, rx_page) = (page(tx_gref(queue)), page(tx_gref(queue) + 1));
                FrontQueue { tx_page, rx_page, tx: TxFront::new(), rx: RxFront::new(), free: Vec::new() }
            })
            .collect();
        let (control_page, control) = (page(CONTROL_GREF), CtrlFront::new());
        let (domain, device, sent, failed_pages, failed_pieces, taken_offset) = (0, 0, 0, 0, 0, 0);
        Frontend {
            world,
            domain,
            device,
            split,
            queues,
            sent,
            failed_pages,
            failed_pieces,
            taken_offset,
            taken_hash: None,
            control_page,
            control,
        }
    }

    fn front_path(&self) -> String {
        format!("/local/domain/{}/device/vif/{}", self.domain, self.device)
    }

    fn back_path(&self) -> String {
        format!("/local/domain/0/backend/vif/{}/{}", self.domain, self.device)
    }

    /// A node of the backend's.
    pub(super) fn back(&self, name: &str) -> Option<String> {
        self.world.read(&format!("{}/{name}", self.back_path()))
    }

    pub(super) fn write_back(&self, name: &str, value: &str) {
        self.world.write(&[(format!("{}/{name}", self.back_path()), value.into())]);
    }

    pub(super) fn set_state(&self, state: &str) {
        self.ask("state", state);
    }

    /// Writes a node of its own.
    pub(super) fn ask(&self, name: &str, value: &str) {
        self.world.write(&[(format!("{}/{name}", self.front_path()), value.into())]);
    }

    /// As the toolstack makes a new domain with a vif.
    pub(super) fn make(&mut self, step: u16) {
        self.domain += step;
        let (front, back) = (self.front_path(), self.back_path());
        self.world.write(&[
            (format!("/local/domain/{}/name", self.domain), "guest".into()),
            (format!("{front}/state"), "1".into()),
            (format!("{back}/frontend"), front.clone()),
            (format!("{back}/frontend-id"), self.domain.to_string()),
            (format!("{back}/online"), "1".into()),
            (format!("{back}/state"), "1".into()),
        ]);
    }

    /// The frontend's part of the handshake.
    pub(super) fn publish(&mut self) {
        self.publish_with(&[]);
    }

    /// As [`Frontend::publish`], with other nodes, or without those whose value is empty.
    pub(super) fn publish_with(&mut self, others: &[(&str, &str)]) {
        let front = self.front_path();
        let mut nodes: BTreeMap<String, String> = [
            ("request-rx-copy", "1"),
            ("feature-rx-notify", "1"),
            ("feature-sg", "1"),
            ("feature-gso-tcpv4", "1"),
            ("feature-gso-tcpv6", "1"),
            ("feature-ipv6-csum-offload", "1"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        let several = self.queues.len() > 1;
        nodes.insert("multi-queue-num-queues".into(), self.queues.len().to_string());
        for (index, queue) in self.queues.iter_mut().enumerate() {
            for page in [queue.tx_page, queue.rx_page] {
                RingPage::new(page).unwrap().initialise();
            }
            (queue.tx, queue.rx) = (TxFront::new(), RxFront::new());
            queue.free = (0..BUFFERS).map(|n| buffer_gref(index, n)).collect();
            let page = RingPage::new(queue.rx_page).unwrap();
            for n in BUFFERS..2 * BUFFERS {
                let gref = buffer_gref(index, n);
                assert!(queue.rx.post(&page, gref, gref));
            }
            queue.rx.publish(&page);
            let folder = if several { format!("queue-{index}/") } else { String::new() };
            let (tx, rx) = (100 + 2 * index as u32, 101 + 2 * index as u32);
            nodes.insert(format!("{folder}tx-ring-ref"), tx_gref(index).to_string());
            nodes.insert(format!("{folder}rx-ring-ref"), (tx_gref(index) + 1).to_string());
            if self.split {
                nodes.insert(format!("{folder}event-channel-tx"), tx.to_string());
                nodes.insert(format!("{folder}event-channel-rx"), rx.to_string());
            } else {
                nodes.insert(format!("{folder}event-channel"), tx.to_string());
            }
            let mut state = self.world.lock();
            state.unbound.extend([(self.domain, tx), (self.domain, rx)]);
        }
        RingPage::new(self.control_page).unwrap().initialise();
        self.control = CtrlFront::new();
        self.world.lock().unbound.push((self.domain, CONTROL_CHANNEL));
        for (name, value) in others {
            nodes.insert((*name).into(), (*value).into());
        }
        let mut nodes: Vec<_> = nodes.into_iter().map(|(name, value)| (format!("{front}/{name}"), value)).collect();
        nodes.push((format!("{front}/state"), "4".into()));
        self.world.write(&nodes);
    }

    /// As [`Frontend::publish`], with a control ring.
    pub(super) fn publish_control(&mut self) {
        let (gref, channel) = (CONTROL_GREF.to_string(), CONTROL_CHANNEL.to_string());
        self.publish_with(&[("ctrl-ring-ref", &gref), ("event-channel-ctrl", &channel)]);
    }

    /// Sends a request on the control ring.
    pub(super) fn request(&mut self, kind: u16, data: [u32; 3]) {
        let page = RingPage::new(self.control_page).unwrap();
        let request = CtrlRequest { id: kind + 100, kind, data };
        if self.control.ask(&page, request).unwrap() {
            self.notify(CONTROL_CHANNEL);
        }
    }

    /// The next answer on the control ring: its kind, status and data.
    pub(super) fn answered(&mut self) -> Option<(u16, u32, u32)> {
        let answer = self.control.answer(&RingPage::new(self.control_page).unwrap()).unwrap()?;
        assert_eq!(answer.id, answer.kind + 100);
        Some((answer.kind, answer.status, answer.data))
    }

    /// Moves the control ring's index where it may not be.
    pub(super) fn jump_control(&mut self) {
        self.control_page.store_u32(tombolo_ring::xen::ring::REQ_PROD, 1000, Ordering::Release).unwrap();
        self.notify(CONTROL_CHANNEL);
    }

    /// Writes bytes to the beginning of a page for packets, and gives its grant.
    pub(super) fn granted(&self, bytes: &[u8]) -> u32 {
        let gref = buffer_gref(0, 0);
        self.world.lock().pages[&gref].write_from(bytes);
        gref
    }

    /// A new domain whose frontend waits for nothing.
    pub(super) fn start(&mut self, step: u16) {
        self.make(step);
        self.publish();
    }

    /// The domain is destroyed.
    pub(super) fn vanish(&mut self) {
        self.world.remove(&format!("/local/domain/{}", self.domain));
        self.world.remove(&format!("/local/domain/0/backend/vif/{}", self.domain));
    }

    fn ports(&self, queue: usize) -> (u32, u32) {
        let tx = 100 + 2 * queue as u32;
        if self.split { (tx, tx + 1) } else { (tx, tx) }
    }

    fn notify(&self, port: u32) {
        if let Some(doorbell) = self.world.lock().bound.get(&(self.domain, port)) {
            doorbell.ring();
        }
    }

    /// Sends a frame; `false` where there is no room.
    pub(super) fn send(&mut self, queue: usize, bytes: &[u8], offload: Offload, notify: bool) -> bool {
        let (checksum, gso) = transport::to_ring(bytes, &offload).unwrap();
        self.push(queue, bytes, checksum, gso, notify)
    }

    /// As [`Frontend::send`], with a blank checksum for any bytes.
    pub(super) fn send_as_is(&mut self, queue: usize, bytes: &[u8], _offload: Offload) {
        assert!(self.push(queue, bytes, Checksum::Blank, None, true));
    }

    /// Takes the answers to packets.
    fn complete(&mut self, index: usize) {
        let queue = &mut self.queues[index];
        let page = RingPage::new(queue.tx_page).unwrap();
        while let Some(completed) = queue.tx.complete(&page).unwrap() {
            self.failed_pieces += usize::from(completed.status == RSP_ERROR);
            queue.free.push(completed.token);
        }
    }

    /// Pieces of packets of the first queue that were answered with an error.
    pub(super) fn failed_pieces(&mut self) -> usize {
        self.complete(0);
        self.failed_pieces
    }

    fn push(
        &mut self,
        index: usize,
        bytes: &[u8],
        checksum: Checksum,
        gso: Option<tombolo_ring::xen::Gso>,
        notify: bool,
    ) -> bool {
        self.complete(index);
        let queue = &mut self.queues[index];
        let page = RingPage::new(queue.tx_page).unwrap();
        // In the pieces in which drivers send: whole, headers apart, in pages that begin anywhere.
        self.sent += 1;
        let head = [bytes.len().min(PAGE_BYTES), 14, 54][self.sent % 3].min(bytes.len());
        let mut rest = bytes;
        let (mut parts, mut first) = (Vec::new(), true);
        while !rest.is_empty() {
            let Some(gref) = queue.free.pop() else {
                queue.free.extend(parts.iter().map(|part: &TxPart| part.gref));
                return false;
            };
            let len = if first { head } else { rest.len().min(PAGE_BYTES) };
            let offset = (PAGE_BYTES - len).min(self.sent % 100);
            let to = self.world.lock().pages[&gref];
            to.skip(offset).write_from(&rest[..len]);
            parts.push(TxPart { gref, offset: offset as u16, len: len as u16, token: gref });
            (rest, first) = (&rest[len..], false);
        }
        if !queue.tx.push(&page, &parts, checksum, gso).unwrap() {
            queue.free.extend(parts.iter().map(|part| part.gref));
            return false;
        }
        if queue.tx.publish(&page) && notify {
            self.notify(self.ports(index).0);
        }
        true
    }

    pub(super) fn subscribe(&mut self, extra: Extra) {
        self.complete(0);
        let queue = &mut self.queues[0];
        let page = RingPage::new(queue.tx_page).unwrap();
        assert!(queue.tx.push_multicast(&page, extra).unwrap());
        if queue.tx.publish(&page) {
            self.notify(self.ports(0).0);
        }
    }

    /// The next frame, if there is one; its pages are posted again.
    pub(super) fn receive(&mut self, index: usize) -> Option<OwnedFrame> {
        let queue = &mut self.queues[index];
        let page = RingPage::new(queue.rx_page).unwrap();
        loop {
            let (mut bytes, mut grefs, mut offset) = (Vec::new(), Vec::new(), None);
            let received = queue
                .rx
                .receive(&page, |part| {
                    let from = self.world.lock().pages[&part.token];
                    let mut piece = vec![0; part.len.into()];
                    from.as_foreign().skip(part.offset.into()).read_into(&mut piece);
                    bytes.extend(piece);
                    grefs.push(part.token);
                    offset.get_or_insert(part.offset);
                })
                .unwrap()?;
            for gref in grefs {
                assert!(queue.rx.post(&page, gref, gref));
            }
            queue.rx.publish(&page);
            if received.failed {
                self.failed_pages += 1;
                continue;
            }
            assert_eq!(received.len, bytes.len());
            (self.taken_offset, self.taken_hash) = (offset.unwrap_or(0), received.hash);
            let offload = transport::from_ring(&bytes, received.checksum, received.gso).unwrap();
            return Some(OwnedFrame { bytes, offload });
        }
    }

    /// Where in its page the last frame that was taken began.
    pub(super) fn taken_offset(&self) -> u16 {
        self.taken_offset
    }

    /// Its hash.
    pub(super) fn taken_hash(&self) -> Option<PacketHash> {
        self.taken_hash
    }

    /// Pages that came back with an error.
    pub(super) fn failed_pages(&mut self) -> usize {
        assert_eq!(self.receive(0), None);
        self.failed_pages
    }

    /// Wants to be notified at the next frame.
    pub(super) fn arm(&mut self, index: usize) {
        let queue = &mut self.queues[index];
        let page = RingPage::new(queue.rx_page).unwrap();
        queue.rx.arm(&page).unwrap();
    }

    /// Whether the backend notified the frontend of frames since the last call.
    pub(super) fn was_notified(&mut self, index: usize) -> bool {
        let port = self.ports(index).1;
        self.world.lock().notified.remove(&(self.domain, port)).is_some()
    }

    /// Writes `count` random requests and lets the backend see them: of any content where they are
    /// `wild`, else single packets whose grants, lengths and flags alone are random. What the
    /// frontend itself knows of its ring is wrong from here on.
    pub(super) fn scribble(&mut self, index: usize, random: &mut tombolo_testing::Random, count: u32, wild: bool) {
        use tombolo_ring::xen::ring::{REQ_PROD, RING_SLOTS, SLOTS};
        let page = self.queues[index].tx_page;
        let produced = page.as_foreign().load_u32(REQ_PROD, Ordering::Relaxed).unwrap();
        for n in 0..count {
            // struct netif_tx_request: gref, offset, flags, id, size; an extra info has its kind in
            // the first byte.
            let slot = SLOTS + (produced.wrapping_add(n) % RING_SLOTS) as usize * 12;
            let gref =
                if random.chance(4) { random.next_u64() as u32 } else { buffer_gref(index, random.below(64) as u32) };
            let (mut offset, mut flags) = (random.next_u64() as u16, random.next_u64() as u16 & 0x1f);
            let mut size = [0, 1, 13, 14, 60, 1514, 4096, 65_535, random.next_u64() as u16][random.index(9)];
            if !wild || random.chance(3) {
                (offset, flags, size) = (0, flags & 0x3, size.min(4096));
            }
            let mut bytes = [0; 12];
            bytes[..4].copy_from_slice(&gref.to_le_bytes());
            bytes[4..6].copy_from_slice(&offset.to_le_bytes());
            bytes[6..8].copy_from_slice(&flags.to_le_bytes());
            bytes[8..10].copy_from_slice(&(random.next_u64() as u16).to_le_bytes());
            bytes[10..].copy_from_slice(&size.to_le_bytes());
            if wild && random.chance(4) {
                bytes[..2].copy_from_slice(&[random.below(6) as u8, random.below(2) as u8]);
            }
            page.skip(slot).write_from(&bytes);
        }
        page.store_u32(REQ_PROD, produced.wrapping_add(count), Ordering::Release).unwrap();
        self.notify(self.ports(index).0);
    }

    /// Notifies the backend of nothing.
    pub(super) fn notify_of_nothing(&self, index: usize) {
        let (tx, rx) = self.ports(index);
        self.notify(tx);
        self.notify(rx);
    }

    /// Moves an index where it may not be.
    pub(super) fn jump(&mut self, index: usize) {
        let page = self.queues[index].tx_page;
        let at = tombolo_ring::xen::ring::REQ_PROD;
        let produced = page.as_foreign().load_u32(at, Ordering::Relaxed).unwrap();
        page.store_u32(at, produced.wrapping_add(1000), Ordering::Release).unwrap();
        self.notify(self.ports(index).0);
    }
}
