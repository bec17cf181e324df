//! What the fd store keeps of a connection: everything that the frontend has said, as bytes and
//! descriptors.
//!
//! ```text
//! 0 version u8 · 1 zero u8 · 2 regions u16 · 4 rings u16 · 6 zero u16 · 8 features u64 · 16 protocol features u64
//! 24 regions: guest address, frontend address, bytes, file offset; u64 each
//!    rings:   size u32 · base u16 · flags u16 · descriptor table, available ring, used ring; u64 each
//! ```
//! All little-endian. Flags: 1 addresses known, 2 kick, 4 call, 8 enabled or not was said, 16
//! enabled, 32 features agreed on (in ring 0 only). Descriptors: the connection, one per region,
//! then each ring's kick and call.
//!
//! The record comes from another process of the same user and is checked like the frontend's own
//! words: the memory is mapped with the same checks, and the rings in it are as hostile as before.
//! A record of another version, or one that does not fit the port's configuration, is refused; the
//! connection is closed then and the frontend connects again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use tombolo_ivshmem::fd_store::StoredRecord;
use tombolo_ivshmem::store::Store;
use tombolo_shm::doorbell::Doorbell;

use super::control::{Connection, offered_features};
use super::mailbox::Mailbox;
use super::memory::{GuestRegion, GuestTable};
use super::{MAX_QUEUE_PAIRS, VhostUserConfig};

/// The version of the format.
const VERSION: u8 = 1;
const HEAD_BYTES: usize = 24;
const REGION_BYTES: usize = 32;
const RING_BYTES: usize = 32;

const ADDRESSES: u16 = 1;
const KICK: u16 = 2;
const CALL: u16 = 4;
const TOLD: u16 = 8;
const ENABLED: u16 = 16;
const AGREED: u16 = 32;

/// A port's place in the fd store.
#[derive(Clone, Debug)]
pub struct Shelf {
    pub(super) store: Arc<Store>,
    port: String,
}

impl Shelf {
    /// The place of the port of that name.
    pub fn new(store: Arc<Store>, port: &str) -> Shelf {
        Shelf { store, port: port.into() }
    }

    fn name(&self) -> String {
        format!("vhost-user/{}", self.port)
    }

    /// The name under which a planned handover keeps a port's final state.
    pub fn final_name(port: &str) -> String {
        format!("final/{port}")
    }

    pub(super) fn take(&self) -> Option<StoredRecord> {
        self.store.take(&self.name())
    }

    pub(super) fn take_listener(&self) -> Option<OwnedFd> {
        self.store.take_state(&Self::final_name(&self.port)).and_then(|(_, fds)| fds.into_iter().next())
    }

    /// Keeps the connection as it is now. One that cannot be kept is forgotten: the frontend
    /// connects again then.
    pub(super) fn keep(&self, stream: &UnixStream, connection: &Connection) {
        let (bytes, fds) = write(stream, connection);
        if self.store.put_connection(&self.name(), &bytes, &fds).is_err() {
            self.forget();
        }
    }

    pub(super) fn doubt(&self) {
        self.store.doubt(&self.name());
    }

    pub(super) fn forget(&self) {
        self.store.forget(&self.name());
    }

    pub(super) fn give_up(&self, why: &str) {
        self.store.tell(&format!("port {}: the frontend has to connect again: {why}", self.port));
        self.forget();
    }
}

fn write<'c>(stream: &'c UnixStream, connection: &'c Connection) -> (Vec<u8>, Vec<BorrowedFd<'c>>) {
    let (regions, rings) = (connection.memory.regions(), &connection.rings);
    let mut fds = vec![stream.as_fd()];
    let mut out = vec![VERSION, 0];
    // No overflow: at most 32 regions and 256 rings.
    out.extend((regions.len() as u16).to_le_bytes());
    out.extend((rings.len() as u16).to_le_bytes());
    out.extend([0; 2]);
    out.extend(connection.features.unwrap_or(0).to_le_bytes());
    out.extend(connection.protocol_features.to_le_bytes());
    for region in regions {
        for word in [region.guest_address, region.frontend_address, region.bytes, region.file_offset] {
            out.extend(word.to_le_bytes());
        }
        fds.push(region.file.as_fd());
    }
    for (index, ring) in rings.iter().enumerate() {
        let flag = |set: bool, flag: u16| if set { flag } else { 0 };
        let flags = flag(ring.addresses.is_some(), ADDRESSES)
            | flag(ring.kick.is_some(), KICK)
            | flag(ring.call.is_some(), CALL)
            | flag(ring.enabled.is_some(), TOLD)
            | flag(ring.enabled == Some(true), ENABLED)
            | flag(index == 0 && connection.features.is_some(), AGREED);
        out.extend(ring.size.to_le_bytes());
        out.extend(ring.base.to_le_bytes());
        out.extend(flags.to_le_bytes());
        for word in ring.addresses.unwrap_or_default() {
            out.extend(word.to_le_bytes());
        }
        fds.extend(ring.kick.iter().map(AsFd::as_fd));
        fds.extend(ring.call.iter().map(|call| call.peers_fd()));
    }
    (out, fds)
}

/// Takes the parts of a record, one after the other.
struct Reader<'r> {
    bytes: &'r [u8],
    fds: std::vec::IntoIter<OwnedFd>,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (taken, rest) = self.bytes.split_first_chunk().ok_or("the stored state ends early")?;
        self.bytes = rest;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<u16, String> {
        self.take().map(u16::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, String> {
        self.take().map(u64::from_le_bytes)
    }

    fn fd(&mut self) -> Result<OwnedFd, String> {
        self.fds.next().ok_or_else(|| "the stored state has too few descriptors".into())
    }
}

/// The connection that a record describes.
pub(super) fn read(
    record: StoredRecord,
    config: &VhostUserConfig,
    mailbox: Arc<Mailbox>,
) -> Result<(UnixStream, Connection), String> {
    if record.in_doubt {
        return Err("the daemon before ended while it handled a request".into());
    }
    let mut reader = Reader { bytes: &record.bytes, fds: record.fds.into_iter() };
    let [version, _] = reader.take()?;
    if version != VERSION {
        return Err(format!("its state has version {version}, expected {VERSION}"));
    }
    let (regions, rings) = (reader.u16()?, reader.u16()?);
    reader.u16()?;
    if rings != 2 * config.queue_pairs || config.queue_pairs > MAX_QUEUE_PAIRS {
        return Err(format!("it has {} queue pairs, the port has {} now", rings / 2, config.queue_pairs));
    }
    let expected = HEAD_BYTES + usize::from(regions) * REGION_BYTES + usize::from(rings) * RING_BYTES;
    if record.bytes.len() != expected {
        return Err(format!("its state has {} bytes, expected {expected}", record.bytes.len()));
    }
    let (features, protocol_features) = (reader.u64()?, reader.u64()?);
    let surplus = features & !offered_features(config);
    if surplus != 0 {
        return Err(format!("features {surplus:#x} are agreed on that are no longer offered"));
    }
    let stream = UnixStream::from(reader.fd()?);
    stream.set_nonblocking(false).map_err(|error| error.to_string())?;
    let mut connection = Connection::new(config, mailbox);
    connection.protocol_features = protocol_features;
    let mut table = Vec::new();
    for _ in 0..regions {
        let [guest, frontend, bytes, offset] = [reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?];
        let region = GuestRegion::map(reader.fd()?, guest, frontend, bytes, offset);
        table.push(region.map_err(|error| format!("memory region at {guest:#x}: {error}"))?);
    }
    connection.memory = Arc::new(GuestTable::new(table).map_err(|error| error.to_string())?);
    for index in 0..usize::from(rings) {
        let size = u32::from_le_bytes(reader.take()?);
        let (base, flags) = (reader.u16()?, reader.u16()?);
        let addresses = [reader.u64()?, reader.u64()?, reader.u64()?];
        let mut doorbell = |flag: u16| -> Result<Option<Doorbell>, String> {
            if flags & flag == 0 {
                return Ok(None);
            }
            Doorbell::adopt_any(reader.fd()?)
                .map(Some)
                .map_err(|error| format!("a descriptor of ring {index}: {error}"))
        };
        let (kick, call) = (doorbell(KICK)?, doorbell(CALL)?.map(Arc::new));
        if flags & AGREED != 0 {
            connection.features = Some(features);
        }
        let ring = &mut connection.rings[index];
        (ring.size, ring.base, ring.kick, ring.call) = (size, base, kick, call);
        ring.addresses = (flags & ADDRESSES != 0).then_some(addresses);
        ring.enabled = (flags & TOLD != 0).then_some(flags & ENABLED != 0);
    }
    Ok((stream, connection))
}
