//! Records between two peers of a link, without IP: the base for real-time code.
//!
//! The layout of the sections is [`tombolo_ring::ivshmem::channel`]'s: a queue of records each way,
//! and a register that holds the latest value. The states are those of a network link. Either peer
//! may stop, die and restart, and the channel comes up again. A peer that breaks the layout loses
//! the channel for a moment, and this is counted.

use super::handshake::Handshake;
use super::link::{Link, LinkError};
use super::poll_interval::{Pauses, PollInterval};
use crate::Net;
use core::fmt;
use tombolo_ring::ivshmem::channel::{self, Record, Sections, Sent, Shape};
use tombolo_ring::ivshmem::protocol::CHANNEL;
use tombolo_ring::ivshmem::state::Duty;

/// What a channel shall be like; both peers say the same.
#[derive(Clone, Copy, Debug)]
pub struct ChannelOptions {
    /// The number of the peer; `None`: the other one of a link for two.
    pub peer: Option<u32>,
    /// Slots of each queue, a power of two.
    pub slots: u32,
    /// The longest record, in bytes.
    pub record_bytes: u32,
    /// The longest value of the register, in bytes; 0: no register.
    pub latest_bytes: u32,
}

impl Default for ChannelOptions {
    /// 64 records of 256 bytes, and a register of 256.
    fn default() -> Self {
        ChannelOptions { peer: None, slots: 64, record_bytes: 256, latest_bytes: 256 }
    }
}

/// What went wrong on a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChannelError {
    /// There is no such link.
    Link(LinkError),
    /// The link was made for something else.
    Protocol(u32),
    /// The link has more than two peers, and none of them was named; or the one that was is the
    /// cell itself, or none.
    Peer {
        /// The cell's own number.
        own: u32,
        /// How many peers there can be.
        max_peers: u32,
    },
    /// The peer is not there, or restarts; [`Channel::up`] waits for it.
    Down,
    /// The call, or the shape of the channel, does not fit; or the peer broke the layout, and the
    /// channel restarts.
    Layout(channel::ChannelError),
}

impl fmt::Display for ChannelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChannelError::Link(error) => write!(f, "{error}"),
            ChannelError::Protocol(got) => write!(f, "the link's protocol is {got:#06x}, expected {CHANNEL:#06x}"),
            ChannelError::Peer { own, max_peers } => {
                write!(f, "this is peer {own} of {max_peers}: name another one for the channel")
            }
            ChannelError::Down => f.write_str("the peer is not there"),
            ChannelError::Layout(error) => write!(f, "{error}"),
        }
    }
}

/// Counters of a channel, all monotonic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelStats {
    /// Records sent.
    pub sent: u64,
    /// Records received.
    pub received: u64,
    /// How often the channel went down since its peer did.
    pub resets: u64,
    /// How often it was taken down since its peer broke the layout.
    pub faults: u64,
}

/// One end of a channel; from [`Net::channel`]. It stays open for as long as the cell lives.
pub struct Channel {
    handshake: Handshake,
    sections: Sections<'static>,
    ring: channel::Channel,
    sent: u64,
    received: u64,
}

impl Channel {
    pub(crate) fn open(net: &Net, name: &str, options: ChannelOptions) -> Result<Channel, ChannelError> {
        let link = Link::open(net, name).map_err(ChannelError::Link)?;
        if link.protocol() != CHANNEL {
            return Err(ChannelError::Protocol(link.protocol()));
        }
        let (own, max_peers) = (link.own_id(), link.max_peers());
        let wrong = ChannelError::Peer { own, max_peers };
        let peer = match options.peer {
            Some(peer) if peer != own => peer,
            None if max_peers == 2 => 1 - own.min(1),
            _ => return Err(wrong),
        };
        let other = link.output(peer).ok_or(wrong)?;
        let ChannelOptions { slots, record_bytes, latest_bytes, .. } = options;
        let shape = Shape { slots, record_bytes, latest_bytes };
        let sections = Sections::new(&shape, link.own_output(), other).map_err(ChannelError::Layout)?;
        let (handshake, ring) = (Handshake::new(link, peer), channel::Channel::new(&shape));
        Ok(Channel { handshake, sections, ring, sent: 0, received: 0 })
    }

    /// The link that the channel runs over.
    pub fn link(&self) -> &Link {
        &self.handshake.link
    }

    /// Counters that only grow.
    pub fn stats(&self) -> ChannelStats {
        let Handshake { resets, faults, .. } = self.handshake;
        ChannelStats { sent: self.sent, received: self.received, resets, faults }
    }

    /// Looks at the peer's state and follows it; whether records may go.
    pub fn is_up(&mut self) -> bool {
        matches!(self.step(), Ok(true))
    }

    fn step(&mut self) -> Result<bool, ChannelError> {
        let Channel { handshake, sections, ring, .. } = self;
        let stepped = handshake.step(|duty| match duty {
            Duty::Clear => {
                channel::initialise(ring.shape(), sections);
                ring.restart();
                Ok(())
            }
            Duty::Check => ring.check_peer(sections),
            Duty::Forget(_) => Ok(()),
        });
        stepped.map_err(|error| self.fault(error))
    }

    /// What an error of the layout means: the channel restarts where the peer caused it.
    fn fault(&mut self, error: channel::ChannelError) -> ChannelError {
        if error.resets_link() {
            self.handshake.fault();
        }
        ChannelError::Layout(error)
    }

    fn need_up(&mut self) -> Result<(), ChannelError> {
        if self.step()? { Ok(()) } else { Err(ChannelError::Down) }
    }

    /// Waits until the peer is there and both have cleared their sections.
    ///
    /// # Errors
    /// [`ChannelError::Layout`] where the peer's channel has another shape.
    pub async fn up(&mut self) -> Result<(), ChannelError> {
        let mut poll_interval = PollInterval::new(Pauses::DOWN);
        poll_interval.busy(self.handshake.link.now_ns());
        loop {
            let theirs = self.handshake.theirs();
            if self.step()? {
                return Ok(());
            }
            Handshake::change(&self.handshake.link, theirs, self.handshake.down_until_ns(), &mut poll_interval).await;
        }
    }

    /// Sends a record; false where the queue is full, and nothing was sent.
    ///
    /// # Errors
    /// [`ChannelError::Down`]; [`ChannelError::Layout`] where the record is too long, or the peer
    /// broke the layout.
    pub fn send(&mut self, record: &[u8]) -> Result<bool, ChannelError> {
        self.need_up()?;
        let sent = self.ring.send(&self.sections, record).map_err(|error| self.fault(error))?;
        if sent == Sent::Full {
            return Ok(false);
        }
        self.sent += 1;
        let Handshake { link, peer, .. } = &self.handshake;
        link.expect_answer();
        if sent == Sent::Ring {
            link.ring_traffic(*peer);
        }
        Ok(true)
    }

    /// Copies the next record into `to`; `None` where there is none now.
    ///
    /// # Errors
    /// As [`Channel::send`], with a `to` that is too short instead of a record that is too long.
    pub fn try_recv(&mut self, to: &mut [u8]) -> Result<Option<Record>, ChannelError> {
        self.need_up()?;
        let record = self.ring.recv(&self.sections, to).map_err(|error| self.fault(error))?;
        self.received += u64::from(record.is_some());
        Ok(record)
    }

    /// As [`Channel::try_recv`]; where there is none, the peer is asked to ring.
    fn recv_or_arm(&mut self, to: &mut [u8]) -> Option<Result<Record, ChannelError>> {
        match self.try_recv(to) {
            Err(error) => return Some(Err(error)),
            Ok(Some(record)) => return Some(Ok(record)),
            Ok(None) => {}
        }
        match self.ring.arm(&self.sections) {
            Ok(false) => None,
            Ok(true) => self.try_recv(to).transpose(),
            Err(error) => Some(Err(self.fault(error))),
        }
    }

    /// Waits for the next record and copies it into `to`. The network and other tasks have their
    /// turns meanwhile.
    ///
    /// # Errors
    /// As [`Channel::try_recv`].
    pub async fn recv(&mut self, to: &mut [u8]) -> Result<Record, ChannelError> {
        let (link, this) = self.split();
        link.until(|| this.recv_or_arm(to)).await
    }

    /// Waits for the next record until `until_ns`, and copies it into `to`; `None` where none came.
    /// Nothing else runs meanwhile; with `spin` the processor does not sleep either. See
    /// [`Link::until_alone`].
    ///
    /// # Errors
    /// As [`Channel::try_recv`].
    pub fn recv_alone(&mut self, to: &mut [u8], until_ns: u64, spin: bool) -> Result<Option<Record>, ChannelError> {
        let (link, this) = self.split();
        link.until_alone(until_ns, spin, || this.recv_or_arm(to)).transpose()
    }

    /// A second handle of the link, for the wait, beside the channel that looks.
    fn split(&mut self) -> (Link, &mut Channel) {
        (self.handshake.link.clone(), self)
    }

    /// Writes the register. The peer is not rung: it looks when it needs the value.
    ///
    /// # Errors
    /// [`ChannelError::Down`]; [`ChannelError::Layout`] where the value is too long.
    pub fn set(&mut self, value: &[u8]) -> Result<(), ChannelError> {
        self.need_up()?;
        self.ring.set(&self.sections, value).map_err(|error| self.fault(error))
    }

    /// Copies the peer's latest value into `to`; `None` where it has written none.
    ///
    /// # Errors
    /// As [`Channel::try_recv`].
    pub fn get(&mut self, to: &mut [u8]) -> Result<Option<Record>, ChannelError> {
        self.need_up()?;
        self.ring.get(&self.sections, to).map_err(|error| self.fault(error))
    }
}
