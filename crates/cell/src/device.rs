//! The stack's device: virtio, a link over shared memory, a network device of Xen, or none.

use crate::ivshmem::net::{IvshmemNet, TransmitPermit as IvshmemPermit};
use crate::neighbor::NeighborEvent;
use crate::virtio::net::{DeviceStats, Received, TransmitPermit as VirtioPermit, VirtioNet};
use crate::xen::net::{TransmitPermit as XenPermit, XenNet};
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::num::NonZeroUsize;
use smoltcp::phy::{Checksum, Device, DeviceCapabilities, Medium, PacketMeta, RxToken, TxToken};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, IpCidr};

/// How often a virtio device without interrupts is looked at.
const POLLING_NS: u64 = 1_000_000;
const DEFAULT_MTU: usize = 1500;
pub(crate) const ETHERNET_HEADER_BYTES: usize = 14;

/// What a device tells the stack: frames of the MTU, no sums of TCP and UDP wanted, and frames of
/// `segmented_bytes` to be cut where it takes those of IPv4. Those of IPv6 are cut by the stack:
/// smoltcp 0.14 drops what is longer than the MTU there.
pub(crate) fn capabilities(mtu: usize, segmented_bytes: usize, tcpv4: bool) -> DeviceCapabilities {
    let mut caps = DeviceCapabilities::default();
    caps.medium = Medium::Ethernet;
    caps.max_transmission_unit = mtu + ETHERNET_HEADER_BYTES;
    caps.checksum.tcp = Checksum::None;
    caps.checksum.udp = Checksum::None;
    caps.segmentation.tcpv4 = NonZeroUsize::new(segmented_bytes).filter(|_| tcpv4);
    caps
}

/// The network device of the cell.
pub(crate) enum NetDevice {
    Virtio(Box<VirtioNet>),
    /// A link over shared memory.
    Ivshmem(Box<IvshmemNet>),
    /// A network device of Xen, which may come and go.
    Xen(Box<XenNet>),
    /// No network: for apps that use bare channels only.
    None,
}

impl NetDevice {
    /// The device's address; an unused one where there is no device.
    pub(crate) fn mac(&self) -> EthernetAddress {
        match self {
            NetDevice::Virtio(device) => device.mac(),
            NetDevice::Ivshmem(device) => device.mac(),
            NetDevice::Xen(device) => device.mac(),
            NetDevice::None => EthernetAddress([0x02, 0, 0, 0, 0, 0]),
        }
    }

    /// Payload bytes that fit into the transmit buffers.
    pub(crate) fn transmit_bytes(&self) -> usize {
        match self {
            NetDevice::Virtio(device) => device.transmit_bytes(),
            NetDevice::Ivshmem(device) => device.transmit_bytes(),
            NetDevice::Xen(device) => device.transmit_bytes(),
            NetDevice::None => 0,
        }
    }

    /// Payload bytes that may arrive before the cell has its turn.
    pub(crate) fn receive_bytes(&self) -> usize {
        match self {
            NetDevice::Virtio(device) => device.receive_bytes(),
            NetDevice::Ivshmem(device) => device.receive_bytes(),
            NetDevice::Xen(device) => device.receive_bytes(),
            NetDevice::None => usize::MAX,
        }
    }

    pub(crate) fn stats(&self) -> DeviceStats {
        match self {
            NetDevice::Virtio(device) => device.stats(),
            NetDevice::Ivshmem(device) => device.stats(),
            NetDevice::Xen(device) => device.stats(),
            NetDevice::None => DeviceStats::default(),
        }
    }

    /// How often the device's interrupt came; `None` where it has none.
    pub(crate) fn interrupts(&self) -> Option<u64> {
        match self {
            NetDevice::Virtio(device) => device.interrupts(),
            NetDevice::Ivshmem(device) => device.interrupts(),
            NetDevice::Xen(device) => Some(device.interrupts()),
            NetDevice::None => None,
        }
    }

    /// Whether a frame since the last call asked for a TCP connection.
    pub(crate) fn take_syn(&mut self) -> bool {
        match self {
            NetDevice::Virtio(device) => device.take_syn(),
            NetDevice::Ivshmem(device) => device.take_syn(),
            NetDevice::Xen(device) => device.take_syn(),
            NetDevice::None => false,
        }
    }

    /// The router advertisement that was received last, from its IPv6 header on.
    pub(crate) fn take_router_advert(&mut self) -> Option<Vec<u8>> {
        match self {
            NetDevice::Virtio(device) => device.take_router_advert(),
            NetDevice::Ivshmem(device) => device.take_router_advert(),
            NetDevice::Xen(device) => device.take_router_advert(),
            NetDevice::None => None,
        }
    }

    /// Who sent the frame that was received last, where that is news.
    pub(crate) fn take_neighbor_event(&mut self) -> Option<NeighborEvent> {
        match self {
            NetDevice::Virtio(device) => device.take_neighbor_event(),
            NetDevice::Ivshmem(device) => device.take_neighbor_event(),
            NetDevice::Xen(device) => device.take_neighbor_event(),
            NetDevice::None => None,
        }
    }

    /// Whether the device is one that came up since the last call, perhaps with another address.
    pub(crate) fn take_up(&mut self) -> bool {
        match self {
            NetDevice::Xen(device) => device.take_up(),
            NetDevice::Virtio(_) | NetDevice::Ivshmem(_) | NetDevice::None => false,
        }
    }

    /// The first step of each turn.
    pub(crate) fn begin_turn(&mut self, now_ns: u64) {
        match self {
            NetDevice::Virtio(device) => device.begin_turn(),
            NetDevice::Ivshmem(device) => device.begin_turn(now_ns),
            NetDevice::Xen(device) => device.begin_turn(),
            NetDevice::None => {}
        }
    }

    /// Shows the other side what was added, and tells it where it wants that.
    pub(crate) fn flush(&mut self) {
        match self {
            NetDevice::Virtio(device) => device.flush(),
            NetDevice::Ivshmem(device) => device.flush(),
            NetDevice::Xen(device) => device.flush(),
            NetDevice::None => {}
        }
    }

    /// Asks for a wake-up; returns whether there is something to do already.
    pub(crate) fn arm(&mut self) -> bool {
        match self {
            NetDevice::Virtio(device) => device.arm(),
            NetDevice::Ivshmem(device) => device.arm(),
            NetDevice::Xen(device) => device.arm(),
            NetDevice::None => false,
        }
    }

    /// Whether a sleep is to be followed by [`NetDevice::recheck`].
    pub(crate) fn wants_recheck(&self) -> bool {
        match self {
            NetDevice::Virtio(device) => device.wants_recheck(),
            NetDevice::Ivshmem(device) => device.wants_recheck(),
            // Emulated processors run one after the other under Xen, so no fence of theirs is
            // missed.
            NetDevice::Xen(_) | NetDevice::None => false,
        }
    }

    /// The look that follows a sleep once, some time after it: whether there is something to do
    /// without a wake-up. Tells the other side late what it wishes to know by now.
    pub(crate) fn recheck(&mut self) -> bool {
        match self {
            NetDevice::Virtio(device) => device.recheck(),
            NetDevice::Ivshmem(device) => device.recheck(),
            NetDevice::Xen(_) | NetDevice::None => false,
        }
    }

    /// When the cell has to look by itself; `None` where it is woken.
    pub(crate) fn poll_at(&mut self, now_ns: u64) -> Option<u64> {
        match self {
            NetDevice::Virtio(device) => device.needs_polling().then_some(now_ns + POLLING_NS),
            NetDevice::Ivshmem(device) => device.poll_at(now_ns),
            NetDevice::Xen(device) => device.poll_at(now_ns),
            NetDevice::None => None,
        }
    }

    /// Tells the device the addresses of the stack.
    pub(crate) fn set_addresses(&mut self, own: &[IpCidr]) {
        if let NetDevice::Xen(device) = self {
            device.set_addresses(own);
        }
    }

    /// Whether nothing can be sent now, so that the stack's wish to send is no reason to stay
    /// awake.
    pub(crate) fn is_blocked(&self) -> bool {
        match self {
            NetDevice::Virtio(_) => false,
            NetDevice::Ivshmem(device) => device.is_blocked(),
            NetDevice::Xen(device) => device.is_blocked(),
            NetDevice::None => true,
        }
    }
}

/// Permission to send a frame.
pub(crate) enum TransmitPermit<'d> {
    Virtio(VirtioPermit<'d>),
    Ivshmem(IvshmemPermit<'d>),
    Xen(XenPermit<'d>),
}

impl TxToken for TransmitPermit<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, build: F) -> R {
        match self {
            TransmitPermit::Virtio(permit) => permit.consume(len, build),
            TransmitPermit::Ivshmem(permit) => permit.consume(len, build),
            TransmitPermit::Xen(permit) => permit.consume(len, build),
        }
    }

    fn set_meta(&mut self, meta: PacketMeta) {
        match self {
            TransmitPermit::Virtio(permit) => permit.set_meta(meta),
            TransmitPermit::Ivshmem(permit) => permit.set_meta(meta),
            TransmitPermit::Xen(permit) => permit.set_meta(meta),
        }
    }
}

/// A received frame, in local memory.
pub(crate) struct ReceivedFrame<'d>(&'d [u8]);

impl RxToken for ReceivedFrame<'_> {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, read: F) -> R {
        read(self.0)
    }
}

/// A device of which the stack is to use smaller frames than it has.
pub(crate) struct Narrowed<'n> {
    pub(crate) device: &'n mut NetDevice,
    /// Largest packet, in bytes, without the Ethernet header.
    pub(crate) mtu: usize,
}

impl Device for Narrowed<'_> {
    type RxToken<'d>
        = ReceivedFrame<'d>
    where
        Self: 'd;
    type TxToken<'d>
        = TransmitPermit<'d>
    where
        Self: 'd;

    fn receive(&mut self, now: Instant) -> Option<(ReceivedFrame<'_>, TransmitPermit<'_>)> {
        self.device.receive(now)
    }

    fn transmit(&mut self, now: Instant) -> Option<TransmitPermit<'_>> {
        self.device.transmit(now)
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut caps = self.device.capabilities();
        caps.max_transmission_unit = caps.max_transmission_unit.min(self.mtu.saturating_add(ETHERNET_HEADER_BYTES));
        caps
    }
}

impl Device for NetDevice {
    type RxToken<'d> = ReceivedFrame<'d>;
    type TxToken<'d> = TransmitPermit<'d>;

    fn receive(&mut self, now: Instant) -> Option<(ReceivedFrame<'_>, TransmitPermit<'_>)> {
        match self {
            NetDevice::Virtio(device) => {
                let (Received(frame), permit) = device.receive(now)?;
                Some((ReceivedFrame(frame), TransmitPermit::Virtio(permit)))
            }
            NetDevice::Ivshmem(device) => {
                device.flush_if_much();
                if !device.next_frame() {
                    return None;
                }
                let (frame, permit) = device.received();
                Some((ReceivedFrame(frame), TransmitPermit::Ivshmem(permit)))
            }
            NetDevice::Xen(device) => {
                device.flush_if_much();
                if !device.next_frame() {
                    return None;
                }
                let (frame, permit) = device.received();
                Some((ReceivedFrame(frame), TransmitPermit::Xen(permit)))
            }
            NetDevice::None => None,
        }
    }

    fn transmit(&mut self, now: Instant) -> Option<TransmitPermit<'_>> {
        match self {
            NetDevice::Virtio(device) => device.transmit(now).map(TransmitPermit::Virtio),
            NetDevice::Ivshmem(device) => {
                device.flush_if_much();
                device.transmit().map(TransmitPermit::Ivshmem)
            }
            NetDevice::Xen(device) => {
                device.flush_if_much();
                device.transmit().map(TransmitPermit::Xen)
            }
            NetDevice::None => None,
        }
    }

    fn capabilities(&self) -> DeviceCapabilities {
        match self {
            NetDevice::Virtio(device) => device.capabilities(),
            NetDevice::Ivshmem(device) => device.capabilities(),
            NetDevice::Xen(device) => device.capabilities(),
            NetDevice::None => capabilities(DEFAULT_MTU, 0, false),
        }
    }
}
