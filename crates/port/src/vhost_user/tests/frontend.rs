//! A vhost-user frontend with a guest's driver, written from the specification and not from the
//! crate that the port uses. It says what it is told to, right or wrong.

use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tombolo_ring::mem::ForeignMut;
use tombolo_ring::virtio::{DriverQueue, Layout, Segment};
use tombolo_shm::doorbell::Doorbell;
use tombolo_shm::memory::Mapping;

pub(crate) const GET_FEATURES: u32 = 1;
pub(crate) const SET_FEATURES: u32 = 2;
pub(crate) const SET_OWNER: u32 = 3;
pub(crate) const SET_MEM_TABLE: u32 = 5;
pub(crate) const SET_VRING_NUM: u32 = 8;
pub(crate) const SET_VRING_ADDR: u32 = 9;
pub(crate) const SET_VRING_BASE: u32 = 10;
pub(crate) const GET_VRING_BASE: u32 = 11;
pub(crate) const SET_VRING_KICK: u32 = 12;
pub(crate) const SET_VRING_CALL: u32 = 13;
pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
pub(crate) const GET_QUEUE_NUM: u32 = 17;
pub(crate) const SET_VRING_ENABLE: u32 = 18;
pub(crate) const NET_SET_MTU: u32 = 20;
pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
pub(crate) const ADD_MEM_REG: u32 = 37;
pub(crate) const REM_MEM_REG: u32 = 38;

const VERSION: u32 = 1;
const NEED_REPLY: u32 = 8;
/// MQ, REPLY_ACK, CONFIGURE_MEM_SLOTS.
pub(crate) const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 15;

pub(crate) const GUEST_BASE: u64 = 0x4000_0000;
pub(crate) const FRONTEND_BASE: u64 = 0x7f00_0000_0000;
pub(crate) const MEMORY_BYTES: u64 = 1 << 23;
pub(crate) const RING_SIZE: u16 = 256;
/// Rings at the start of memory, one every 64 KiB; buffers in the upper half: receive buffers
/// first, then frames to be sent.
const RING_STRIDE: u64 = 1 << 16;
const BUFFERS: u64 = 1 << 22;
/// Frames of up to 128 KiB that may be on their way from the guest.
pub(crate) const SLOTS: u64 = 16;
/// How long anything may take before a test fails.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(crate) fn state(index: u32, num: u32) -> Vec<u8> {
    [index, num].iter().flat_map(|value| value.to_le_bytes()).collect()
}

pub(crate) struct Frontend {
    pub(crate) stream: UnixStream,
    reply_ack: bool,
}

impl Frontend {
    pub(crate) fn connect(path: &Path) -> Frontend {
        let end = Instant::now() + TIMEOUT;
        loop {
            match UnixStream::connect(path) {
                Ok(stream) => return Frontend::new(stream),
                Err(error) if Instant::now() > end => panic!("{}: {error}", path.display()),
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    pub(crate) fn new(stream: UnixStream) -> Frontend {
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.set_write_timeout(Some(TIMEOUT)).unwrap();
        Frontend { stream, reply_ack: false }
    }

    /// Sends bytes as they are.
    pub(crate) fn raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), rustix::io::Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let sent = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
        assert_eq!(sent, bytes.len());
        Ok(())
    }

    pub(crate) fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
        let header = [request, flags, payload.len() as u32];
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(payload);
        bytes
    }

    /// Sends a request and waits for the acknowledgement, where that was agreed on. False if it was
    /// refused, or the connection ended.
    pub(crate) fn tell(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let flags = VERSION | if self.reply_ack { NEED_REPLY } else { 0 };
        if self.raw(&Self::message(request, flags, payload), fds).is_err() {
            return false;
        }
        !self.reply_ack || self.reply(request).is_some_and(|reply| reply == words(&[0]))
    }

    pub(crate) fn ask(&self, request: u32, payload: &[u8]) -> Option<Vec<u8>> {
        self.raw(&Self::message(request, VERSION, payload), &[]).ok()?;
        self.reply(request)
    }

    fn reply(&self, request: u32) -> Option<Vec<u8>> {
        let mut header = [0; 12];
        (&self.stream).read_exact(&mut header).ok()?;
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4)), (request, VERSION | 4), "the reply's header");
        let mut payload = vec![0; word(8) as usize];
        (&self.stream).read_exact(&mut payload).ok()?;
        Some(payload)
    }

    pub(crate) fn ask_u64(&self, request: u32) -> Option<u64> {
        Some(u64::from_le_bytes(self.ask(request, &[])?.try_into().ok()?))
    }

    /// The usual first words; `features` without those of the transport.
    pub(crate) fn negotiate(&mut self, features: u64) {
        let offered = self.ask_u64(GET_FEATURES).unwrap();
        assert_eq!(features & !offered, 0, "features not offered");
        assert_ne!(offered & 1 << 30, 0);
        let protocol = self.ask_u64(GET_PROTOCOL_FEATURES).unwrap();
        assert_eq!(PROTOCOL_FEATURES & !protocol, 0);
        assert!(self.tell(SET_PROTOCOL_FEATURES, &words(&[PROTOCOL_FEATURES]), &[]));
        assert!(self.tell(SET_OWNER, &[], &[]));
        // Acknowledged from here on: the port knows of both only now.
        assert!(self.tell(SET_FEATURES, &words(&[features | 1 << 30]), &[]));
        self.reply_ack = true;
        assert!(self.tell(SET_FEATURES, &words(&[features | 1 << 30]), &[]));
    }

    /// Whether the other side has closed the connection, within [`TIMEOUT`].
    pub(crate) fn is_closed(&self) -> bool {
        let mut bytes = [0; 256];
        loop {
            let mut space = [MaybeUninit::uninit(); 64];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            match recvmsg(&self.stream, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::empty()) {
                Ok(message) if message.bytes == 0 => return true,
                Ok(_) => {}
                Err(rustix::io::Errno::CONNRESET) => return true,
                Err(_) => return false,
            }
        }
    }
}

/// A guest: memory, one queue pair and their doorbells. It outlives connections.
pub(crate) struct Guest {
    pub(crate) file: OwnedFd,
    pub(crate) memory: &'static Mapping,
    pub(crate) features: u64,
    /// Ring 0, to the guest; ring 1, from the guest.
    pub(crate) rings: [DriverQueue<'static, 256>; 2],
    pub(crate) kicks: [Doorbell; 2],
    pub(crate) calls: [Doorbell; 2],
    pub(crate) buffer_bytes: u32,
    next_buffer: u64,
    sent: u64,
}

impl Guest {
    /// A guest whose receive queue has as many buffers of `buffer_bytes` as it takes.
    pub(crate) fn new(features: u64, buffer_bytes: u32) -> Guest {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = rustix::fs::memfd_create("guest", flags).unwrap();
        rustix::fs::ftruncate(&file, MEMORY_BYTES).unwrap();
        // Leaked: views of it live as long as the test.
        let memory: &'static Mapping = Box::leak(Box::new(Mapping::new(&file, 0, MEMORY_BYTES, true).unwrap()));
        let mut guest = Guest {
            rings: [0, 1].map(|index| Self::driver(memory, index, features)),
            file,
            memory,
            features,
            kicks: [0, 1].map(|_| Doorbell::new().unwrap()),
            calls: [0, 1].map(|_| Doorbell::new().unwrap()),
            buffer_bytes,
            next_buffer: 0,
            sent: 0,
        };
        guest.post_buffers();
        guest
    }

    fn driver(memory: &'static Mapping, index: u64, features: u64) -> DriverQueue<'static, 256> {
        let view = memory.view_mut().unwrap().slice((index * RING_STRIDE) as usize, Layout::new(RING_SIZE).bytes);
        DriverQueue::new(view.unwrap(), RING_SIZE, features).unwrap()
    }

    /// Forgets all buffers and starts the rings afresh, as a rebooted guest does.
    pub(crate) fn reboot(&mut self) {
        self.rings = [0, 1].map(|index| Self::driver(self.memory, index, self.features));
        self.next_buffer = 0;
        self.post_buffers();
    }

    pub(crate) fn post_buffers(&mut self) {
        while self.buffer_bytes != 0 {
            let address = GUEST_BASE + BUFFERS + self.next_buffer;
            let token = self.next_buffer as u32;
            let segment = Segment { address, len: self.buffer_bytes, writable: true };
            if !self.rings[0].add(&[segment], token) {
                break;
            }
            self.next_buffer = (self.next_buffer + u64::from(self.buffer_bytes)) % (BUFFERS / 2);
        }
        self.rings[0].publish();
    }

    pub(crate) fn view(&self, offset: u64, len: usize) -> ForeignMut<'static> {
        self.memory.view_mut().unwrap().slice(offset as usize, len).unwrap()
    }

    pub(crate) fn region(&self) -> Vec<u8> {
        words(&[GUEST_BASE, MEMORY_BYTES, FRONTEND_BASE, 0])
    }

    pub(crate) fn mem_table(&self) -> Vec<u8> {
        [words(&[1]), self.region()].concat()
    }

    pub(crate) fn vring_addr(index: u32) -> Vec<u8> {
        let layout = Layout::new(RING_SIZE);
        let base = FRONTEND_BASE + u64::from(index) * RING_STRIDE;
        let at = |offset: usize| base + offset as u64;
        let flags = 0;
        [state(index, flags), words(&[at(layout.descriptors), at(layout.used), at(layout.available), 0])].concat()
    }

    /// Attaches with memory as one table; `base` is what the frontend believes the rings' index to
    /// be.
    pub(crate) fn attach(&self, frontend: &mut Frontend, base: u32) {
        frontend.negotiate(self.features);
        assert!(frontend.tell(SET_MEM_TABLE, &self.mem_table(), &[self.file.as_fd()]));
        self.start_rings(frontend, base);
    }

    pub(crate) fn start_rings(&self, frontend: &Frontend, base: u32) {
        for index in 0..2u32 {
            assert!(frontend.tell(SET_VRING_NUM, &state(index, u32::from(RING_SIZE)), &[]));
            assert!(frontend.tell(SET_VRING_BASE, &state(index, base), &[]));
            assert!(frontend.tell(SET_VRING_ADDR, &Self::vring_addr(index), &[]));
            let payload = words(&[u64::from(index)]);
            assert!(frontend.tell(SET_VRING_CALL, &payload, &[self.calls[index as usize].as_fd()]));
            assert!(frontend.tell(SET_VRING_KICK, &payload, &[self.kicks[index as usize].as_fd()]));
            assert!(frontend.tell(SET_VRING_ENABLE, &state(index, 1), &[]));
        }
    }

    /// Sends a frame behind `header`, in pieces of `cuts` bytes and the rest; kicks only if the
    /// port wants that.
    pub(crate) fn send(&mut self, header: &[u8], frame: &[u8], cuts: &[usize]) {
        assert!(self.try_send(header, frame, cuts), "no room for a frame");
    }

    /// As [`Guest::send`]; false where [`SLOTS`] frames are on their way.
    pub(crate) fn try_send(&mut self, header: &[u8], frame: &[u8], cuts: &[usize]) -> bool {
        let added = self.add_frame(header, frame, cuts);
        if added && self.rings[1].publish() {
            self.kicks[1].ring();
        }
        added
    }

    /// As [`Guest::try_send`], without showing it to the port.
    pub(crate) fn add_frame(&mut self, header: &[u8], frame: &[u8], cuts: &[usize]) -> bool {
        let bytes = [header, frame].concat();
        while self.rings[1].take_used().unwrap().is_some() {}
        if self.rings[1].outstanding() as u64 == SLOTS {
            return false;
        }
        let at = BUFFERS + BUFFERS / 2 + (self.sent % SLOTS) * (1 << 17);
        self.sent += 1;
        assert_eq!(self.view(at, bytes.len()).write_from(&bytes), bytes.len());
        let mut segments = Vec::new();
        let mut from = 0;
        for cut in cuts.iter().copied().chain([bytes.len() - cuts.iter().sum::<usize>()]) {
            segments.push(Segment { address: GUEST_BASE + at + from as u64, len: cut as u32, writable: false });
            from += cut;
        }
        self.rings[1].add(&segments, 0)
    }

    /// The next frame with its header, within [`TIMEOUT`], sleeping on the call descriptor.
    /// Mergeable buffers are put together.
    pub(crate) fn receive(&mut self) -> (Vec<u8>, Vec<u8>) {
        self.receive_within(TIMEOUT).expect("a frame in time")
    }

    pub(crate) fn receive_within(&mut self, timeout: Duration) -> Option<(Vec<u8>, Vec<u8>)> {
        let end = Instant::now() + timeout;
        let mut bytes = Vec::new();
        let mut left = None;
        while left != Some(0u16) {
            let Some(used) = self.rings[0].take_used().unwrap() else {
                if self.rings[0].arm().unwrap() {
                    continue;
                }
                // In the middle of a frame there must be more.
                assert!(left.is_none(), "{left:?} buffers of a frame are missing");
                let wait = end.checked_duration_since(Instant::now())?;
                let timeout =
                    rustix::time::Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
                let mut fds = [rustix::event::PollFd::new(&self.calls[0], rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut fds, Some(&timeout)).unwrap();
                self.calls[0].take();
                continue;
            };
            let start = bytes.len();
            bytes.resize(start + used.len as usize, 0);
            let from = self.view(BUFFERS + u64::from(used.token), used.len as usize).as_foreign();
            from.read_into(&mut bytes[start..]);
            let buffers = u16::from_le_bytes([bytes[10], bytes[11]]);
            left = Some(left.unwrap_or(buffers) - 1);
        }
        self.post_buffers();
        let frame = bytes.split_off(12);
        Some((bytes, frame))
    }
}

/// A frame with some addresses and a recognisable rest.
pub(crate) fn frame(len: usize, seed: u8) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
    let head = [0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x08, 0x00];
    let head_len = head.len().min(len);
    frame[..head_len].copy_from_slice(&head[..head_len]);
    frame
}

pub(crate) const PLAIN: [u8; 12] = [0; 12];

/// Shared by tests that look at what a worker thread has seen.
pub(crate) type Noted<T> = Arc<std::sync::Mutex<T>>;
