//! The states of the xenbus handshake (xen/include/public/io/xenbus.h), as a table for each end.
//!
//! Each end has a `state` node in XenStore that only it writes (the toolstack too: it writes
//! Closing into a backend's to detach a device). Each end watches the other's. A step takes this
//! end's state and what the other's node says, and answers with the state to write next and with
//! what to do before writing it.
//!
//! ```text
//!   frontend      backend
//!   --------      -------
//!   Initialising                 toolstack creates both
//!                 InitWait       features are written
//!   Connected                    rings and event channels are written
//!                 Connected      rings are mapped, event channels bound
//!   …
//!   Closing       Closing        either begins
//!   Closed        Closed
//! ```
//!
//! What neither table allows: a backend that goes Connected before its frontend, a frontend that
//! writes rings before InitWait, and either going back from Connected without letting go of the
//! rings.

use core::fmt;

/// A device's state, as its node in XenStore says it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BusState {
    /// The node is not there, or says nothing that is known: the end is gone.
    #[default]
    Unknown = 0,
    /// The toolstack has created the device.
    Initialising = 1,
    /// The backend waits for what the frontend writes.
    InitWait = 2,
    /// A frontend has written its rings and waits; other devices than vifs use it.
    Initialised = 3,
    /// Frames flow.
    Connected = 4,
    /// On the way to Closed.
    Closing = 5,
    /// Everything is let go of.
    Closed = 6,
    /// A frontend has changed what it asks of its backend while it was connected, as Linux's does
    /// for an XDP program.
    Reconfiguring = 7,
    /// A backend has read that. The frontend goes Connected again.
    Reconfigured = 8,
}

impl BusState {
    /// In the order of their numbers, 0 to 8.
    pub const ALL: [BusState; 9] = [
        BusState::Unknown,
        BusState::Initialising,
        BusState::InitWait,
        BusState::Initialised,
        BusState::Connected,
        BusState::Closing,
        BusState::Closed,
        BusState::Reconfiguring,
        BusState::Reconfigured,
    ];

    /// From a node's text; [`BusState::Unknown`] for what is no state.
    pub fn parse(text: &[u8]) -> BusState {
        match text {
            [digit @ b'1'..=b'8'] => BusState::ALL[usize::from(digit - b'0')],
            _ => BusState::Unknown,
        }
    }

    /// Whether a backend in this state has its frontend's rings.
    pub const fn has_rings(self) -> bool {
        matches!(self, BusState::Connected | BusState::Reconfigured)
    }

    /// The number as XenStore holds it.
    pub const fn text(self) -> &'static str {
        ["0", "1", "2", "3", "4", "5", "6", "7", "8"][self as usize]
    }
}

impl fmt::Display for BusState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BusState::Unknown => "gone",
            BusState::Initialising => "initialising",
            BusState::InitWait => "waiting for its peer",
            BusState::Initialised => "initialised",
            BusState::Connected => "connected",
            BusState::Closing => "closing",
            BusState::Closed => "closed",
            BusState::Reconfiguring => "reconfiguring",
            BusState::Reconfigured => "reconfigured",
        })
    }
}

/// What a backend does besides writing a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackAction {
    /// Nothing.
    Wait,
    /// Writes its features.
    Advertise,
    /// Reads what the frontend wrote, maps its rings, binds its event channels. Where that fails it
    /// goes Closing instead.
    Connect,
    /// Forgets the device: it is not wanted any more.
    Forget,
}

/// A step of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackStep {
    /// First lets go of rings and event channels, if it has any.
    pub disconnect: bool,
    /// Then does this.
    pub action: BackAction,
    /// Then writes this state, where it is not its state already.
    pub next: BusState,
}

/// A backend's step: its own state, what the frontend's node says, and whether the toolstack wants
/// the device (its `online` node is not "0").
///
/// | own | frontend | wanted | disconnect | action | next |
/// | --- | --- | --- | --- | --- | --- |
/// | any | gone | any | yes | forget | Closed |
/// | any | Closed | no | yes | forget | Closed |
/// | Connected, Reconfigured | Initialising | no | yes | wait | Closing |
/// | any other | Initialising | no | yes | forget | Closed |
/// | any | Closed | yes | yes | wait | Closed |
/// | any | Closing | any | yes | wait | Closing |
/// | InitWait | Initialising | yes | no | wait | InitWait |
/// | any other | Initialising | yes | yes | advertise | InitWait |
/// | Connected | Connected | any | no | wait | Connected |
/// | Reconfigured | Connected | yes | no | wait | Connected |
/// | Reconfigured | Connected | no | yes | wait | Closing |
/// | any other | Connected | yes | yes | connect | Connected |
/// | Connected, Reconfigured | Reconfiguring | any | no | wait | Reconfigured |
/// | any other | Reconfiguring | yes | yes | connect | Reconfigured |
/// | any | any other | any | no | wait | the same |
///
/// A frontend that is Reconfiguring waits for its answer, so it has one also when the device is not
/// wanted any more, over the Closing that the toolstack has written; that is written again after it.
///
/// Before it writes Reconfigured, a backend does what the frontend's nodes ask for now. One that
/// starts takes the state in its node as its own. If that one says that it has the rings, it passes
/// [`BusState::Initialising`]: what a dead backend had is to be connected again.
pub const fn back_step(own: BusState, front: BusState, online: bool) -> BackStep {
    use BackAction::{Advertise, Connect, Forget, Wait};
    use BusState as S;
    let (disconnect, action, next) = match (own, front, online) {
        (_, S::Unknown, _) | (_, S::Closed, false) => (true, Forget, S::Closed),
        (S::Connected | S::Reconfigured, S::Initialising, false) => (true, Wait, S::Closing),
        (_, S::Initialising, false) => (true, Forget, S::Closed),
        (_, S::Closed, true) => (true, Wait, S::Closed),
        (_, S::Closing, _) => (true, Wait, S::Closing),
        (S::InitWait, S::Initialising, true) => (false, Wait, S::InitWait),
        // The first step, or the frontend has started again, with or without closing before.
        (_, S::Initialising, true) => (true, Advertise, S::InitWait),
        (S::Connected, S::Connected, _) | (S::Reconfigured, S::Connected, true) => (false, Wait, S::Connected),
        (S::Reconfigured, S::Connected, false) => (true, Wait, S::Closing),
        (S::Connected | S::Reconfigured, S::Reconfiguring, _) => (false, Wait, S::Reconfigured),
        // The frontend has written its rings; or the last backend died while it was connected.
        (_, S::Connected, true) => (true, Connect, S::Connected),
        // The same while the frontend waits for an answer, which it does for ever.
        (_, S::Reconfiguring, true) => (true, Connect, S::Reconfigured),
        (own, _, _) => (false, Wait, own),
    };
    BackStep { disconnect, action, next }
}

/// What a frontend does besides writing a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrontAction {
    /// Nothing.
    Wait,
    /// Makes rings and event channels for the features that the backend offers, and writes them.
    Publish,
    /// The link is up: announces its addresses, if it has not done so since it published.
    Up,
}

/// A step of a frontend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrontStep {
    /// First lets go of rings and event channels, if it has any.
    pub disconnect: bool,
    /// Then does this.
    pub action: FrontAction,
    /// Then writes this state, where it is not its state already.
    pub next: BusState,
}

/// A frontend's step: its own state and what the backend's node says.
///
/// | own | backend | disconnect | action | next |
/// | --- | --- | --- | --- | --- |
/// | Initialising | InitWait | no | publish | Connected |
/// | Closed | InitWait | yes | publish | Connected |
/// | Connected | Connected | no | up | Connected |
/// | Connected | gone, Initialising | yes | wait | Initialising |
/// | Closed | Initialising | yes | wait | Initialising |
/// | Connected | Closing, Closed | yes | wait | Closed |
/// | Initialising | Closing | yes | wait | Closed |
/// | Closing | Closing, Closed, gone | yes | wait | Closed |
/// | any | any other | no | wait | the same |
///
/// A frontend that leaves by itself writes Closing and steps on from there. After Closed it comes
/// back when its backend does.
pub const fn front_step(own: BusState, back: BusState) -> FrontStep {
    use BusState as S;
    use FrontAction::{Publish, Up, Wait};
    let (disconnect, action, next) = match (own, back) {
        (S::Initialising, S::InitWait) => (false, Publish, S::Connected),
        (S::Closed, S::InitWait) => (true, Publish, S::Connected),
        (S::Connected, S::Connected) => (false, Up, S::Connected),
        (S::Connected, S::Unknown | S::Initialising) | (S::Closed, S::Initialising) => (true, Wait, S::Initialising),
        (S::Connected | S::Closing, S::Closing | S::Closed) => (true, Wait, S::Closed),
        (S::Initialising, S::Closing) | (S::Closing, S::Unknown) => (true, Wait, S::Closed),
        (own, _) => (false, Wait, own),
    };
    FrontStep { disconnect, action, next }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::string::ToString;
    use std::vec::Vec;

    use BusState as S;

    const ANY: &[S] = &S::ALL;

    /// Rows as the documentation has them; the first that matches counts.
    type BackRow = (&'static [S], &'static [S], &'static [bool], (bool, BackAction, Option<S>));

    /// States with rings.
    const HAS: &[S] = &[S::Connected, S::Reconfigured];

    const BACK: [BackRow; 15] = [
        (ANY, &[S::Unknown], &[true, false], (true, BackAction::Forget, Some(S::Closed))),
        (ANY, &[S::Closed], &[false], (true, BackAction::Forget, Some(S::Closed))),
        (HAS, &[S::Initialising], &[false], (true, BackAction::Wait, Some(S::Closing))),
        (ANY, &[S::Initialising], &[false], (true, BackAction::Forget, Some(S::Closed))),
        (ANY, &[S::Closed], &[true], (true, BackAction::Wait, Some(S::Closed))),
        (ANY, &[S::Closing], &[true, false], (true, BackAction::Wait, Some(S::Closing))),
        (&[S::InitWait], &[S::Initialising], &[true], (false, BackAction::Wait, Some(S::InitWait))),
        (ANY, &[S::Initialising], &[true], (true, BackAction::Advertise, Some(S::InitWait))),
        (&[S::Connected], &[S::Connected], &[true, false], (false, BackAction::Wait, Some(S::Connected))),
        (&[S::Reconfigured], &[S::Connected], &[true], (false, BackAction::Wait, Some(S::Connected))),
        (&[S::Reconfigured], &[S::Connected], &[false], (true, BackAction::Wait, Some(S::Closing))),
        (ANY, &[S::Connected], &[true], (true, BackAction::Connect, Some(S::Connected))),
        (HAS, &[S::Reconfiguring], &[true, false], (false, BackAction::Wait, Some(S::Reconfigured))),
        (ANY, &[S::Reconfiguring], &[true], (true, BackAction::Connect, Some(S::Reconfigured))),
        (ANY, ANY, &[true, false], (false, BackAction::Wait, None)),
    ];

    #[test]
    fn each_row_of_the_backend() {
        let mut used = [false; BACK.len()];
        for (own, front, online) in
            ANY.iter().flat_map(|own| ANY.iter().flat_map(move |front| [true, false].map(|on| (*own, *front, on))))
        {
            let matches = |row: &BackRow| row.0.contains(&own) && row.1.contains(&front) && row.2.contains(&online);
            let at = BACK.iter().position(matches).unwrap();
            used[at] = true;
            let (disconnect, action, next) = BACK[at].3;
            let step = BackStep { disconnect, action, next: next.unwrap_or(own) };
            assert_eq!(back_step(own, front, online), step, "{own:?} {front:?} {online}");
        }
        assert_eq!(used, [true; BACK.len()]);
    }

    type FrontRow = (&'static [S], &'static [S], (bool, FrontAction, Option<S>));

    const FRONT: [FrontRow; 9] = [
        (&[S::Initialising], &[S::InitWait], (false, FrontAction::Publish, Some(S::Connected))),
        (&[S::Closed], &[S::InitWait], (true, FrontAction::Publish, Some(S::Connected))),
        (&[S::Connected], &[S::Connected], (false, FrontAction::Up, Some(S::Connected))),
        (&[S::Connected], &[S::Unknown, S::Initialising], (true, FrontAction::Wait, Some(S::Initialising))),
        (&[S::Closed], &[S::Initialising], (true, FrontAction::Wait, Some(S::Initialising))),
        (&[S::Connected], &[S::Closing, S::Closed], (true, FrontAction::Wait, Some(S::Closed))),
        (&[S::Initialising], &[S::Closing], (true, FrontAction::Wait, Some(S::Closed))),
        (&[S::Closing], &[S::Closing, S::Closed, S::Unknown], (true, FrontAction::Wait, Some(S::Closed))),
        (ANY, ANY, (false, FrontAction::Wait, None)),
    ];

    #[test]
    fn each_row_of_the_frontend() {
        let mut used = [false; FRONT.len()];
        for (own, back) in ANY.iter().flat_map(|own| ANY.iter().map(move |back| (*own, *back))) {
            let at = FRONT.iter().position(|row| row.0.contains(&own) && row.1.contains(&back)).unwrap();
            used[at] = true;
            let (disconnect, action, next) = FRONT[at].2;
            let step = FrontStep { disconnect, action, next: next.unwrap_or(own) };
            assert_eq!(front_step(own, back), step, "{own:?} {back:?}");
        }
        assert_eq!(used, [true; FRONT.len()]);
    }

    /// Both ends by turns until neither moves. Rings are held from Publish to disconnect and from
    /// Connect to disconnect.
    fn settle(front: &mut (S, bool), back: &mut (S, bool), online: bool) -> Vec<(S, S)> {
        let mut path = std::vec![(front.0, back.0)];
        for _ in 0..20 {
            let step = back_step(back.0, front.0, online);
            back.1 = (back.1 && !step.disconnect) || step.action == BackAction::Connect;
            back.0 = step.next;
            let step = front_step(front.0, back.0);
            front.1 = (front.1 && !step.disconnect) || step.action == FrontAction::Publish;
            front.0 = step.next;
            assert!(!back.0.has_rings() || back.1, "connected without rings: {path:?}");
            if path.last() == Some(&(front.0, back.0)) {
                return path;
            }
            path.push((front.0, back.0));
        }
        panic!("the two ends never settle: {path:?}");
    }

    #[test]
    fn the_two_ends_meet_part_and_meet_again() {
        let (mut front, mut back) = ((S::Initialising, false), (S::Initialising, false));
        settle(&mut front, &mut back, true);
        assert_eq!((front, back), ((S::Connected, true), (S::Connected, true)));
        // The frontend leaves, as on reboot, and starts again.
        front.0 = S::Closing;
        settle(&mut front, &mut back, true);
        assert_eq!((front, back), ((S::Closed, false), (S::Closed, false)));
        front.0 = S::Initialising;
        settle(&mut front, &mut back, true);
        assert_eq!((front.0, back.0), (S::Connected, S::Connected));
        // The backend died and started again: the frontend notices nothing.
        back = (S::Initialising, false);
        settle(&mut front, &mut back, true);
        assert_eq!((front, back), ((S::Connected, true), (S::Connected, true)));
        // The frontend changes what it wants, once with a backend that dies before it answers.
        for rings in [true, false] {
            front.0 = S::Reconfiguring;
            back = (if rings { S::Connected } else { S::Initialising }, rings);
            settle(&mut front, &mut back, true);
            assert_eq!((front, back), ((S::Reconfiguring, true), (S::Reconfigured, true)));
            front.0 = S::Connected;
            settle(&mut front, &mut back, true);
            assert_eq!((front, back), ((S::Connected, true), (S::Connected, true)));
        }
        // A frontend that starts again without leaving.
        front = (S::Initialising, false);
        settle(&mut front, &mut back, true);
        assert_eq!((front, back), ((S::Connected, true), (S::Connected, true)));
        // The toolstack detaches the device.
        back.0 = S::Closing;
        front.0 = front_step(front.0, back.0).next;
        front.1 = false;
        settle(&mut front, &mut back, false);
        assert_eq!((front, back), ((S::Closed, false), (S::Closed, false)));
        assert_eq!(back_step(back.0, front.0, false).action, BackAction::Forget);
    }

    #[test]
    fn the_two_ends_settle_from_wherever_they_are() {
        for (own, other) in ANY.iter().flat_map(|a| ANY.iter().map(move |b| (*a, *b))) {
            for online in [true, false] {
                settle(&mut (own, own == S::Connected), &mut (other, other.has_rings()), online);
            }
        }
    }

    #[test]
    fn states_are_one_digit() {
        for state in &S::ALL[1..] {
            assert_eq!(S::parse(state.text().as_bytes()), *state);
        }
        for text in ["", "0", "9", "44", "4 ", " 4", "x"] {
            assert_eq!(S::parse(text.as_bytes()), S::Unknown, "{text:?}");
        }
        assert_eq!(S::InitWait.to_string(), "waiting for its peer");
    }
}
