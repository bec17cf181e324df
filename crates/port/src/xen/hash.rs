//! How a guest wants its frames spread over its queues, and the control ring by which it says so.
//!
//! Linux's backend has the same limits. Linux's frontend has no control ring; Windows drivers use
//! it for receive-side scaling.

use super::connection::{copy_fault, ring};
use super::platform::{Guest, Page};
use crate::sys::GrantCopy;
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::xen::ctrl::{self, CtrlBack, CtrlRequest, CtrlResponse};
use tombolo_ring::xen::netif::PacketHash;
use tombolo_ring::xen::{PAGE_BYTES, XenError};
use tombolo_switch::port::{Fault, FaultKind};

/// Longest key, in bytes.
const KEY_BYTES: usize = 40;
/// Most entries of the table from hashes to queues.
const TABLE_ENTRIES: usize = 128;
/// Requests that are served in a turn. Each is a system call at most, as a turn with frames is.
const PER_TURN: usize = 1;
/// All hashes that are defined.
const ALL_FLAGS: u32 = ctrl::HASH_IPV4 | ctrl::HASH_IPV4_TCP | ctrl::HASH_IPV6 | ctrl::HASH_IPV6_TCP;

const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];
const TCP: u8 = 6;

/// What a guest has asked for. Another daemon does not know it: then frames are spread as without
/// it, until the guest asks again.
pub(super) struct Hashing {
    is_on: bool,
    flags: u32,
    key: [u8; KEY_BYTES],
    /// Queue of each remainder of a hash; empty where the remainder is the queue.
    table: Vec<u32>,
}

impl Hashing {
    pub(super) fn new() -> Hashing {
        Hashing { is_on: false, flags: 0, key: [0; KEY_BYTES], table: Vec::new() }
    }

    /// The queue of a frame among `queues`, and the hash that led to it; `None` where the guest
    /// leaves that to us. A frame that has no hash is spread as if it were 0.
    pub(super) fn place(&self, head: &[u8], queues: usize) -> Option<(usize, Option<PacketHash>)> {
        if !self.is_on || self.flags == 0 {
            return None;
        }
        let hash = self.hash(head);
        let value = hash.map_or(0, |hash| hash.value) as usize;
        let queue = match self.table.len() {
            0 => value % queues.max(1),
            // Each entry was checked.
            entries => self.table[value % entries] as usize,
        };
        Some((queue, hash))
    }

    /// Of an IP packet in an Ethernet frame without a VLAN tag, if one of its kind is asked for.
    /// Only the first of several fragments has ports, so none is hashed by them.
    fn hash(&self, head: &[u8]) -> Option<PacketHash> {
        let (ethertype, ip) = (head.get(12..14)?, head.get(14..)?);
        let (addresses, ports, [plain, tcp]) = match ethertype.try_into().ok()? {
            ETHERTYPE_IPV4 => {
                let (header, _) = ip.split_first_chunk::<20>()?;
                let is_whole = u16::from_be_bytes([header[6], header[7]]) & 0x3fff == 0;
                let start = usize::from(header[0] & 15) * 4;
                let has_ports = header[9] == TCP && is_whole && start >= header.len();
                let ports = ip.get(start..start + 4).filter(|_| has_ports);
                (&header[12..], ports, [ctrl::HASH_IPV4, ctrl::HASH_IPV4_TCP])
            }
            ETHERTYPE_IPV6 => {
                let (header, behind) = ip.split_first_chunk::<40>()?;
                let ports = behind.get(..4).filter(|_| header[6] == TCP);
                (&header[8..], ports, [ctrl::HASH_IPV6, ctrl::HASH_IPV6_TCP])
            }
            _ => return None,
        };
        let ports = ports.filter(|_| self.flags & tcp != 0);
        let kind = if ports.is_some() { tcp } else { plain };
        if self.flags & kind == 0 {
            return None;
        }
        let mut data = [0; 36];
        let (to, rest) = data.split_at_mut(addresses.len());
        to.copy_from_slice(addresses);
        rest[..4].copy_from_slice(ports.unwrap_or(&[0; 4]));
        let len = addresses.len() + ports.map_or(0, <[u8]>::len);
        let value = ctrl::toeplitz(&self.key, &data[..len]);
        Some(PacketHash { kind: kind.trailing_zeros() as u8, algorithm: ctrl::ALGORITHM_TOEPLITZ as u8, value })
    }

    /// Carries a request out. `copy` brings bytes from the beginning of a granted page, and says
    /// whether the grant was good.
    ///
    /// # Errors
    /// Those of `copy`: it was not the guest's doing.
    fn serve<E>(
        &mut self,
        request: &CtrlRequest,
        queues: u32,
        copy: impl FnOnce(u32, &mut [u8]) -> Result<bool, E>,
    ) -> Result<CtrlResponse, E> {
        let CtrlRequest { id, kind, data } = *request;
        let answer = |status, data| CtrlResponse { id, kind, status, data };
        let done = answer(ctrl::STATUS_SUCCESS, 0);
        let wrong = answer(ctrl::STATUS_INVALID_PARAMETER, 0);
        Ok(match kind {
            ctrl::SET_HASH_ALGORITHM if data[0] <= ctrl::ALGORITHM_TOEPLITZ => {
                self.is_on = data[0] != ctrl::ALGORITHM_NONE;
                done
            }
            ctrl::GET_HASH_FLAGS if self.is_on => answer(ctrl::STATUS_SUCCESS, ALL_FLAGS),
            ctrl::SET_HASH_FLAGS if self.is_on && data[0] & !ALL_FLAGS == 0 => {
                self.flags = data[0];
                done
            }
            ctrl::SET_HASH_KEY if data[1] as usize > KEY_BYTES => answer(ctrl::STATUS_BUFFER_OVERFLOW, 0),
            ctrl::SET_HASH_KEY => {
                let mut key = [0; KEY_BYTES];
                if data[1] > 0 && !copy(data[0], &mut key[..data[1] as usize])? {
                    return Ok(wrong);
                }
                self.key = key;
                done
            }
            ctrl::GET_HASH_MAPPING_SIZE => answer(ctrl::STATUS_SUCCESS, TABLE_ENTRIES as u32),
            ctrl::SET_HASH_MAPPING_SIZE if data[0] as usize <= TABLE_ENTRIES => {
                self.table = vec![0; data[0] as usize];
                done
            }
            ctrl::SET_HASH_MAPPING => {
                let (count, first) = (data[1] as usize, data[2] as usize);
                // All of it lies in the table, so also in a page.
                let Some(end) = first.checked_add(count).filter(|end| *end <= self.table.len()) else {
                    return Ok(wrong);
                };
                let mut bytes = [0; 4 * TABLE_ENTRIES];
                let bytes = &mut bytes[..4 * count];
                if count > 0 && !copy(data[0], bytes)? {
                    return Ok(wrong);
                }
                let entries =
                    bytes.chunks_exact(4).map(|entry| u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]));
                if entries.clone().any(|queue| queue >= queues) {
                    return Ok(wrong);
                }
                self.table[first..end].iter_mut().zip(entries).for_each(|(to, queue)| *to = queue);
                done
            }
            ctrl::GET_HASH_FLAGS => answer(ctrl::STATUS_NOT_SUPPORTED, 0),
            ctrl::SET_HASH_ALGORITHM | ctrl::SET_HASH_FLAGS | ctrl::SET_HASH_MAPPING_SIZE => wrong,
            _ => answer(ctrl::STATUS_NOT_SUPPORTED, 0),
        })
    }
}

const _: () = assert!(4 * TABLE_ENTRIES <= PAGE_BYTES);

/// The control ring of a vif.
pub(super) struct ControlRing {
    page: Box<dyn Page>,
    ring: CtrlBack,
    port: u32,
    wants_recheck: bool,
}

#[cold]
fn broken(error: XenError) -> Fault {
    Fault { kind: FaultKind::Ring, detail: format!("control ring: {error}") }
}

impl ControlRing {
    /// Attaches to the ring in a mapped page, with our end of its event channel.
    pub(super) fn attach(page: Box<dyn Page>, port: u32) -> Result<ControlRing, XenError> {
        let back = CtrlBack::attach(&ring(&*page)?)?;
        Ok(ControlRing { page, ring: back, port, wants_recheck: false })
    }

    pub(super) fn port(&self) -> u32 {
        self.port
    }

    /// Serves some of what waits.
    pub(super) fn serve(
        &mut self,
        guest: &dyn Guest,
        domain: u16,
        queues: usize,
        hashing: &mut Hashing,
    ) -> Result<(), Fault> {
        let page = ring(&*self.page).map_err(broken)?;
        for _ in 0..PER_TURN {
            let Some(request) = self.ring.take(&page).map_err(broken)? else { break };
            let copy = |gref, to: &mut [u8]| -> Result<bool, Fault> {
                let mut copies = [GrantCopy::from_guest(domain, gref, 0, ForeignMut::from(to))];
                guest.copy(&mut copies).map_err(copy_fault)?;
                Ok(copies[0].is_done())
            };
            let response = hashing.serve(&request, queues as u32, copy)?;
            self.ring.answer(&page, response).map_err(broken)?;
        }
        if self.ring.publish(&page) {
            guest.notify(self.port);
        }
        self.wants_recheck |= self.ring.is_in_doubt();
        Ok(())
    }

    /// Turns wake-ups on and looks once more; whether the worker may sleep.
    pub(super) fn arm(&mut self) -> Result<bool, Fault> {
        self.wants_recheck = true;
        ring(&*self.page).and_then(|page| self.ring.arm(&page)).map_err(broken)
    }

    pub(super) fn take_recheck(&mut self) -> bool {
        std::mem::take(&mut self.wants_recheck)
    }

    /// Looks again, some time after [`ControlRing::take_recheck`]: whether there are requests, and
    /// whether the guest was notified after all.
    pub(super) fn recheck(&mut self, guest: &dyn Guest) -> Result<(bool, bool), Fault> {
        let page = ring(&*self.page).map_err(broken)?;
        let is_late = self.ring.is_in_doubt() && self.ring.recheck(&page);
        if is_late {
            guest.notify(self.port);
        }
        Ok((self.ring.look(&page).map_err(broken)?, is_late))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The key of Microsoft's examples for receive-side scaling.
    const KEY: [u8; 40] = [
        0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0, 0xd0, 0xca,
        0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c, 0x6a, 0x42, 0xb7, 0x3b,
        0xbe, 0xac, 0x01, 0xfa,
    ];

    /// A guest with four queues, whose granted page holds `content`; grant 0 is a bad one.
    fn ask(hashing: &mut Hashing, kind: u16, data: [u32; 3], content: &[u8]) -> (u32, u32) {
        let copy = |gref: u32, to: &mut [u8]| -> Result<bool, ()> {
            to.copy_from_slice(&content[..to.len()]);
            Ok(gref != 0)
        };
        let response = hashing.serve(&CtrlRequest { id: 9, kind, data }, 4, copy).unwrap();
        assert_eq!((response.id, response.kind), (9, kind));
        (response.status, response.data)
    }

    const DONE: (u32, u32) = (ctrl::STATUS_SUCCESS, 0);
    const WRONG: (u32, u32) = (ctrl::STATUS_INVALID_PARAMETER, 0);

    fn on() -> Hashing {
        let mut hashing = Hashing::new();
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_ALGORITHM, [1, 0, 0], &[]), DONE);
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_KEY, [7, 40, 0], &KEY), DONE);
        hashing
    }

    /// 66.9.149.187:2794 to 161.142.100.80:1766, of Microsoft's examples.
    fn ipv4(proto: u8, fragment: u8) -> Vec<u8> {
        let mut frame =
            vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0, 0, 40, 0, 0, fragment, 0, 64, proto, 0, 0];
        frame.extend([66, 9, 149, 187, 161, 142, 100, 80, 0x0a, 0xea, 0x06, 0xe6]);
        frame
    }

    #[test]
    fn frames_go_where_the_guest_says() {
        let mut hashing = on();
        let all = |hashing: &Hashing, frame: &[u8]| hashing.place(frame, 4).unwrap();
        let hash = |kind, value| Some(PacketHash { kind, algorithm: 1, value });
        assert_eq!(hashing.place(&ipv4(6, 0), 4), None, "no packet is to be hashed");
        assert_eq!(ask(&mut hashing, ctrl::GET_HASH_FLAGS, [0; 3], &[]), (ctrl::STATUS_SUCCESS, 15));
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_FLAGS, [15, 0, 0], &[]), DONE);
        let (tcp, plain) = (hash(1, 0x51cc_c178), hash(0, 0x323e_8fc2));
        assert_eq!(all(&hashing, &ipv4(6, 0)), (0, tcp));
        for frame in [ipv4(17, 0), ipv4(6, 0x20), ipv4(6, 0)[..34].to_vec()] {
            assert_eq!(all(&hashing, &frame), (2, plain));
        }
        // 3ffe:2501:200:1fff::7, port 2794, to 3ffe:2501:200:3::1, port 1766.
        let mut six = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, 6, 64];
        six.extend([0x3f, 0xfe, 0x25, 0x01, 0x02, 0, 0x1f, 0xff, 0, 0, 0, 0, 0, 0, 0, 7]);
        six.extend([0x3f, 0xfe, 0x25, 0x01, 0x02, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 1, 0x0a, 0xea, 0x06, 0xe6]);
        assert_eq!(all(&hashing, &six), (1, hash(3, 0x4020_7d3d)));
        assert_eq!(all(&hashing, &six[..54]), (1, hash(2, 0x2cc1_8cd5)));
        // What has no hash goes where a hash of 0 would.
        let mut arp = six.clone();
        arp[12..14].copy_from_slice(&[8, 6]);
        assert_eq!(all(&hashing, &arp), (0, None));
        // By a table, of which a part is written.
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_MAPPING_SIZE, [8, 0, 0], &[]), DONE);
        assert_eq!(all(&hashing, &ipv4(17, 0)), (0, plain), "a new table is zero");
        let entries: Vec<u8> = [3u32, 1].into_iter().flat_map(u32::to_le_bytes).collect();
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_MAPPING, [7, 2, 1], &entries), DONE);
        assert_eq!(hashing.table, [0, 3, 1, 0, 0, 0, 0, 0]);
        assert_eq!(all(&hashing, &ipv4(17, 0)), (1, plain), "0x323e8fc2 leaves 2");
        // Only some packets, and none.
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_FLAGS, [ctrl::HASH_IPV4, 0, 0], &[]), DONE);
        assert_eq!((all(&hashing, &ipv4(6, 0)), all(&hashing, &six)), ((1, plain), (0, None)));
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_ALGORITHM, [0; 3], &[]), DONE);
        assert_eq!(hashing.place(&ipv4(6, 0), 4), None);
    }

    #[test]
    fn no_frame_is_too_short_or_too_odd_to_be_placed() {
        let mut hashing = on();
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_FLAGS, [15, 0, 0], &[]), DONE);
        for ethertype in [ETHERTYPE_IPV4, ETHERTYPE_IPV6] {
            for first in 0..=255u8 {
                let mut frame = ipv4(6, 0);
                frame.resize(70, 6);
                frame[12..14].copy_from_slice(&ethertype);
                frame[14] = first;
                for len in 0..=frame.len() {
                    let (queue, hash) = hashing.place(&frame[..len], 4).unwrap();
                    let least = if ethertype == ETHERTYPE_IPV4 { 34 } else { 54 };
                    assert_eq!((queue < 4, hash.is_some()), (true, len >= least), "{len} {first}");
                }
            }
        }
        // A header that ends before it does has no ports.
        let mut frame = ipv4(6, 0);
        frame[14] = 0x44;
        assert_eq!(hashing.hash(&frame).unwrap().kind, 0);
    }

    #[test]
    fn what_may_not_be_asked_changes_nothing() {
        let mut off = Hashing::new();
        assert_eq!(ask(&mut off, ctrl::GET_HASH_FLAGS, [0; 3], &[]), (ctrl::STATUS_NOT_SUPPORTED, 0));
        assert_eq!(ask(&mut off, ctrl::SET_HASH_FLAGS, [1, 0, 0], &[]), WRONG, "no algorithm");
        let mut hashing = on();
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_MAPPING_SIZE, [4, 0, 0], &[]), DONE);
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_MAPPING, [7, 4, 0], &[1, 0, 0, 0].repeat(4)), DONE);
        let page = [0xff; 4096];
        for (kind, data, status) in [
            (ctrl::SET_HASH_ALGORITHM, [2, 0, 0], ctrl::STATUS_INVALID_PARAMETER),
            (ctrl::SET_HASH_FLAGS, [16, 0, 0], ctrl::STATUS_INVALID_PARAMETER),
            (ctrl::SET_HASH_KEY, [7, 41, 0], ctrl::STATUS_BUFFER_OVERFLOW),
            (ctrl::SET_HASH_KEY, [7, u32::MAX, 0], ctrl::STATUS_BUFFER_OVERFLOW),
            (ctrl::SET_HASH_KEY, [0, 40, 0], ctrl::STATUS_INVALID_PARAMETER),
            (ctrl::SET_HASH_MAPPING_SIZE, [129, 0, 0], ctrl::STATUS_INVALID_PARAMETER),
            (ctrl::SET_HASH_MAPPING_SIZE, [u32::MAX, 0, 0], ctrl::STATUS_INVALID_PARAMETER),
            (ctrl::SET_HASH_MAPPING, [7, 5, 0], ctrl::STATUS_INVALID_PARAMETER),
            (ctrl::SET_HASH_MAPPING, [7, 1, 4], ctrl::STATUS_INVALID_PARAMETER),
            // The sum of the two leaves 32 bits (XSA-270 was about the end of the table).
            (ctrl::SET_HASH_MAPPING, [7, 4, u32::MAX - 1], ctrl::STATUS_INVALID_PARAMETER),
            (ctrl::SET_HASH_MAPPING, [7, u32::MAX, 1], ctrl::STATUS_INVALID_PARAMETER),
            (ctrl::SET_HASH_MAPPING, [0, 1, 0], ctrl::STATUS_INVALID_PARAMETER),
            // A queue that is not there.
            (ctrl::SET_HASH_MAPPING, [7, 1, 0], ctrl::STATUS_INVALID_PARAMETER),
            (0, [0; 3], ctrl::STATUS_NOT_SUPPORTED),
            (8, [0; 3], ctrl::STATUS_NOT_SUPPORTED),
            (u16::MAX, [u32::MAX; 3], ctrl::STATUS_NOT_SUPPORTED),
        ] {
            assert_eq!(ask(&mut hashing, kind, data, &page), (status, 0), "{kind} {data:?}");
            assert_eq!((hashing.is_on, hashing.flags, hashing.key, &hashing.table[..]), (true, 0, KEY, &[1; 4][..]));
        }
        // A key of no bytes is all zero, and so is each hash.
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_KEY, [0, 0, 0], &[]), DONE);
        assert_eq!(ask(&mut hashing, ctrl::SET_HASH_FLAGS, [15, 0, 0], &[]), DONE);
        assert_eq!(hashing.place(&ipv4(6, 0), 4).unwrap().1.unwrap().value, 0);
    }
}
