//! A record channel for a process: the other end is a cell's control loop, a guest, or another
//! process.
//!
//! [`tombolo_ring::ivshmem::channel`] says what a channel is. Here it gets its memory, its states
//! and its doorbells: records are sent and received by plain calls once the link is up, and the
//! peer is rung where it asked for that. No thread; each call looks at the peer's state first.
//! Nothing blocks but [`ChannelPeer::wait`].

use std::os::fd::BorrowedFd;
use std::time::Duration;

use tombolo_ring::ivshmem::channel::{Channel, ChannelError, Record, Sections, Sent, Shape, initialise};
use tombolo_ring::ivshmem::state::{Duty, State};

use super::doorbells::OwnDoorbells;
use super::end::{EndError, LinkEnd, Memory, PeerDoorbells, Resets};
use super::handshake::Handshake;
use super::peer::wait_until;

/// Why a record was not sent or received.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum Error {
    /// The link is not up.
    #[error("the link is not up: own state {own}, peer's {peer}")]
    Down { own: State, peer: State },
    /// The queue is full until the peer has read records.
    #[error("the queue is full; wait until the peer has read records")]
    Full,
    /// The call was wrong, or the peer broke the channel's rules and the link was reset.
    #[error("{0}")]
    Channel(ChannelError),
}

/// One end of a record channel. See the module's head.
pub struct ChannelPeer {
    handshake: Handshake,
    shape: Shape,
    own: usize,
    peer: usize,
    channel: Channel,
    /// The peer's section was found to say our shape since it came up.
    checked: bool,
    pub(crate) doorbells: OwnDoorbells,
}

fn sections<'m>(memory: &'m Memory, shape: &Shape, own: usize, peer: usize) -> Result<Sections<'m>, ChannelError> {
    let (bytes, needed) = (memory.bytes(), shape.bytes());
    // A checked shape is far below the end of the address space.
    let section =
        |at| bytes.slice(at, needed as usize).ok_or(ChannelError::Section { bytes: bytes.len() as u64, needed });
    Sections::new(shape, section(own)?, section(peer)?.as_foreign())
}

impl ChannelPeer {
    /// An end of `parts`, whose MTU does not matter, with sections cut by `shape`.
    ///
    /// # Errors
    /// [`EndError`], which says what does not fit.
    pub fn new(mut parts: LinkEnd, shape: Shape) -> Result<ChannelPeer, EndError> {
        let bytes = parts.layout.output_bytes;
        shape.check().map_err(EndError::Channel)?;
        if shape.bytes() > bytes {
            return Err(EndError::Channel(ChannelError::Section { bytes, needed: shape.bytes() }));
        }
        let doorbells = OwnDoorbells::from(std::mem::take(&mut parts.doorbells));
        let (handshake, [own, peer]) = Handshake::new(parts)?;
        sections(handshake.memory(), &shape, own, peer).map_err(EndError::Channel)?;
        let channel = Channel::new(&shape);
        let mut end = ChannelPeer { handshake, shape, own, peer, channel, checked: false, doorbells };
        end.step();
        Ok(end)
    }

    /// Follows the peer's state; every other call does so too. Returns whether the link is up.
    pub fn step(&mut self) -> bool {
        let ChannelPeer { handshake, shape, own, peer, channel, checked, .. } = self;
        handshake.follow(|duty, memory| match duty {
            Duty::Clear => {
                // Cannot fail: it was tried with the same numbers.
                if let Ok(sections) = sections(memory, shape, *own, *peer) {
                    initialise(shape, &sections);
                }
                channel.restart();
            }
            // When the first record is due: until then nothing depends on the peer's section.
            Duty::Check => {}
            Duty::Forget(_) => {
                channel.restart();
                *checked = false;
            }
        });
        self.is_up()
    }

    /// Whether both ends run, as of the last look.
    pub fn is_up(&self) -> bool {
        self.handshake.machine().is_up()
    }

    /// Our state and the peer's, as of the last look.
    pub fn states(&self) -> (State, State) {
        (self.handshake.machine().own(), self.handshake.machine().peer())
    }

    /// Why the link was reset, counted.
    pub fn resets(&self) -> Resets {
        self.handshake.resets()
    }

    /// The peer is there, rung by `doorbells` from now on; `None` where it polls.
    pub fn peer_joined(&mut self, doorbells: Option<Box<dyn PeerDoorbells>>) {
        self.doorbells.peer_joined();
        self.handshake.joined(doorbells);
        self.step();
    }

    /// The peer is gone.
    pub fn peer_left(&mut self) {
        self.handshake.left();
        self.step();
    }

    /// Runs `work` on a link that is up, and resets the link where that says so.
    fn on<T>(&mut self, work: impl FnOnce(&mut Channel, &Sections<'_>) -> Result<T, ChannelError>) -> Result<T, Error> {
        self.step();
        if !self.handshake.machine().may_use_rings() {
            let (own, peer) = self.states();
            return Err(Error::Down { own, peer });
        }
        let ChannelPeer { handshake, shape, own, peer, channel, checked, .. } = self;
        let result = sections(handshake.memory(), shape, *own, *peer).and_then(|sections| {
            if !*checked {
                channel.check_peer(&sections)?;
                *checked = true;
            }
            work(channel, &sections)
        });
        result.map_err(|error| {
            if error.resets_link() {
                self.channel.restart();
                self.checked = false;
                if !self.handshake.peer_stopped() {
                    self.handshake.reset();
                }
                self.step();
            }
            Error::Channel(error)
        })
    }

    /// Writes a record into the queue and rings the peer where it wants that.
    ///
    /// # Errors
    /// [`Error`]; the record was not sent.
    pub fn send(&mut self, record: &[u8]) -> Result<(), Error> {
        match self.on(|channel, sections| channel.send(sections, record))? {
            Sent::Ring => self.handshake.ring_traffic(),
            Sent::Quiet => {}
            Sent::Full => return Err(Error::Full),
        }
        Ok(())
    }

    /// Copies the next record into `to`; `None` where there is none.
    ///
    /// # Errors
    /// [`Error`].
    pub fn recv(&mut self, to: &mut [u8]) -> Result<Option<Record>, Error> {
        self.on(|channel, sections| channel.recv(sections, to))
    }

    /// Writes the register.
    ///
    /// # Errors
    /// [`Error`]; nothing was written.
    pub fn set(&mut self, value: &[u8]) -> Result<(), Error> {
        self.on(|channel, sections| channel.set(sections, value))
    }

    /// Copies the peer's latest value into `to`; `None` where it has written none.
    ///
    /// # Errors
    /// [`Error`].
    pub fn get(&mut self, to: &mut [u8]) -> Result<Option<Record>, Error> {
        self.on(|channel, sections| channel.get(sections, to))
    }

    /// Waits until the peer rings, a record is there, or `timeout` has passed. Without a doorbell
    /// it looks again and again. Returns whether something may have happened.
    pub fn wait(&mut self, timeout: Duration) -> bool {
        self.wait_with(timeout, None)
    }

    /// As [`ChannelPeer::wait`], and until `other` is readable.
    pub(crate) fn wait_with(&mut self, timeout: Duration, other: Option<BorrowedFd<'_>>) -> bool {
        let was_up = self.is_up();
        let look = |peer: &mut ChannelPeer, is_rung: bool| {
            let has_changed = peer.step() != was_up;
            has_changed || (!is_rung && peer.on(|channel, sections| channel.arm(sections)).unwrap_or(false))
        };
        wait_until(self, timeout, other, |peer| &peer.doorbells, look)
    }
}

impl Drop for ChannelPeer {
    fn drop(&mut self) {
        self.handshake.close();
    }
}
