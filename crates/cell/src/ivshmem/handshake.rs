//! The handshake of the cell and its peer on a link: the state words, and what is done to the
//! sections on the way. Channels and calls share this. What they clear and check is defined in
//! their own modules.

use super::link::Link;
use super::poll_interval::PollInterval;
use tombolo_ring::ivshmem::state::{Duty, Machine, State};

/// How long a link stays down after its peer broke its protocol.
const FAULT_PAUSE_NS: u64 = 10_000_000;

/// The cell's end of a link with one peer.
pub(crate) struct Handshake {
    pub(crate) link: Link,
    pub(crate) peer: u32,
    machine: Machine,
    /// When a link may come up again that broke.
    down_until_ns: u64,
    /// How often the link went down since its peer did.
    pub(crate) resets: u64,
    /// How often it was taken down since its peer broke the protocol.
    pub(crate) faults: u64,
}

impl Handshake {
    pub(crate) fn new(link: Link, peer: u32) -> Handshake {
        let machine = Machine::new();
        // An earlier life of this machine may have left another word there.
        link.set_state(machine.own().word());
        Handshake { link, peer, machine, down_until_ns: 0, resets: 0, faults: 0 }
    }

    fn word(&self) -> u32 {
        self.link.state(self.peer)
    }

    /// The peer's number, and its state word as it is; for [`Handshake::change`].
    pub(crate) fn theirs(&self) -> (u32, u32) {
        (self.peer, self.word())
    }

    /// Whether the sections may be used, as of the last look.
    pub(crate) fn is_up(&self) -> bool {
        self.machine.may_use_rings()
    }

    /// Looks at the peer's word and follows it; whether the sections may be used.
    ///
    /// # Errors
    /// What `act` refused with; the link stays as it is, and [`Handshake::fault`] is to follow.
    pub(crate) fn step<E>(&mut self, mut act: impl FnMut(Duty) -> Result<(), E>) -> Result<bool, E> {
        if self.machine.is_up() && self.word() == State::Run.word() {
            return Ok(true);
        }
        if self.link.now_ns() < self.down_until_ns {
            return Ok(false);
        }
        let was_up = self.is_up();
        let Handshake { link, peer, machine, resets, .. } = self;
        machine.follow(
            || link.state(*peer),
            |word| link.set_state(word),
            |duty| {
                *resets += u64::from(matches!(duty, Duty::Forget(_)));
                act(duty)
            },
        )?;
        let is_up = self.is_up();
        if is_up && !was_up {
            self.link.peer_joined();
        }
        if !is_up {
            self.link.assert_state(self.machine.own().word());
        }
        Ok(is_up)
    }

    /// The peer broke the protocol: the link restarts after a pause.
    pub(crate) fn fault(&mut self) {
        self.faults += 1;
        self.machine.reset();
        self.link.set_state(self.machine.own().word());
        self.down_until_ns = self.link.now_ns() + FAULT_PAUSE_NS;
    }

    /// Waits, while the link is down, until the peer's word is no longer `theirs` or it is time to
    /// look again. It is looked at also where the peer rings: the first rings of a machine that
    /// starts can go to one that is not yet told of it.
    pub(crate) async fn change(link: &Link, theirs: (u32, u32), down_until_ns: u64, poll_interval: &mut PollInterval) {
        let ((peer, word), now_ns) = (theirs, link.now_ns());
        if now_ns < down_until_ns {
            link.net().sleep_until(down_until_ns).await;
        } else {
            let changed = link.until(|| (link.state(peer) != word).then_some(()));
            link.net().within(poll_interval.next(now_ns) - now_ns, changed).await;
        }
    }

    /// Until when the link stays down after a fault.
    pub(crate) fn down_until_ns(&self) -> u64 {
        self.down_until_ns
    }
}
