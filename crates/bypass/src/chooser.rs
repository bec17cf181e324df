//! Which program takes an interface's frames: pure, by counts per window of time.
//!
//! # What is known of the two
//! tcx is never slower than the kernel's forwarding, and keeps segmentation and checksum state.
//! XDP, in the driver, is about twice as fast for small whole frames between taps; but it costs
//! segmentation frames a third, has no view of a checksum that is not finished, and takes
//! segmentation from a veth's peer for as long as it is attached. So `auto` starts with tcx, moves
//! an interface only where its frames are many, whole, and go out where XDP can send, and goes back
//! as soon as they are not.
//!
//! # Hysteresis
//! To XDP: `CALM_WINDOWS` windows in a row that all speak for it. Back: one window that speaks
//! against it. After going back XDP is not tried again for `FIRST_PAUSE`, and twice as long each
//! time, up to `LONGEST_PAUSE`; a stay of that length in XDP forgives.

use crate::layout::Mode;
use crate::place::Wanted;
use std::time::Duration;

/// Windows in a row that must speak for XDP. A window is the controller's tick, one second.
const CALM_WINDOWS: u32 = 3;
/// Below this rate the difference is not noticeable.
const FEW_PER_S: u64 = 20_000;
/// In XDP, below this rate it is given up: attaching may cost the peer its offloads.
const IDLE_PER_S: u64 = 1_000;
/// Frames a second from which on it matters what they cost.
const FLEETING_PER_S: u64 = 1_000;
const IDLE_WINDOWS: u32 = 10;
/// A frame that a tap's queue is just taking while XDP comes has an sk_buff already, as else a
/// large one has: so many queues a tap may have.
const ON_THEIR_WAY: u64 = 256;
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// Why an interface has its mode. The number is what the map holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Why {
    /// It was just attached.
    Start = 0,
    /// The user said so.
    Asked = 1,
    /// Its driver has no native XDP, or it is a veth, whose peer would lose its offloads.
    Unsuited = 2,
    /// Its traffic is light.
    Light = 3,
    /// Segmentation frames come in.
    Large = 4,
    /// Frames with unfinished checksums come in.
    Partial = 5,
    /// Its frames go out where XDP cannot send.
    OutputUnsuited = 6,
    /// A process captures.
    Captured = 7,
    /// It went back not long ago.
    Pausing = 8,
    /// Many whole frames, to outputs that take them.
    Small = 9,
    /// XDP could not be attached.
    Refused = 10,
    /// The frames are not such as can be taken at all.
    NotTaken = 11,
    /// It was re-created under its name, and attached again by the controller.
    MadeAgain = 12,
    /// Others' filters or programs behind ours would not see what is taken.
    Overlooked = 13,
    /// Others' programs at the ingress run before ours; XDP would pass them by.
    Preceded = 14,
}

const TEXTS: [&str; 15] = [
    "just attached",
    "as asked for",
    "no native XDP that would not cost the peer its offloads",
    "light traffic",
    "segmentation frames come in",
    "frames with unfinished checksums come in",
    "frames go out where XDP cannot send",
    "a process captures on it",
    "XDP failed here; it is tried again later",
    "many whole frames, to outputs that take them from XDP",
    "XDP could not be attached",
    "few of its frames can be taken at all",
    "the interface was created again",
    "nothing is taken: filters were added at its ingress that would not see it (--past-filters takes it anyway)",
    "tcx programs of others run before ours at its ingress, and XDP would bypass them",
];

impl Why {
    /// The reason as a phrase, for `status`.
    pub fn text(self) -> &'static str {
        TEXTS[self as usize]
    }
}

/// The text of a reason's number.
pub fn why(number: u32) -> &'static str {
    TEXTS.get(number as usize).copied().unwrap_or("unknown")
}

/// What happened at an interface within one window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    /// How long it was.
    pub length: Duration,
    /// Frames that were taken, by either program.
    pub taken: u64,
    /// Of those: by tcx, although XDP could have sent them out.
    pub xdp_able: u64,
    /// Frames among `taken` that XDP took.
    pub by_xdp: u64,
    /// Frames that went the kernel's way.
    pub passed: u64,
    /// Segmentation frames among `taken`.
    pub large: u64,
    /// Frames with unfinished checksums, which XDP hands on.
    pub partial: u64,
    /// Frames of flows that are not known.
    pub unknown: u64,
    /// Whether a process captures.
    pub captured: bool,
}

impl Window {
    /// Whether most frames here are of flows that do not come again: then learning one costs more
    /// than it ever gives. Few frames leave it as it was.
    pub fn is_fleeting(&self, before: bool) -> bool {
        let rate = (self.unknown + self.taken).saturating_mul(1000) / self.length.as_millis().max(1) as u64;
        if rate < FLEETING_PER_S { before } else { self.unknown > self.taken }
    }

    fn rate(&self) -> u64 {
        let ms = self.length.as_millis().max(1) as u64;
        (self.taken + self.passed).saturating_mul(1000) / ms
    }
}

/// The chooser of one interface.
#[derive(Clone, Debug)]
pub struct Chooser {
    wanted: Wanted,
    /// Whether XDP in this driver costs nothing.
    suited: bool,
    mode: Mode,
    calm: u32,
    idle: u32,
    pause: Duration,
    /// When XDP may be tried again, and since when the mode is what it is.
    not_before: Duration,
    since: Duration,
    /// The window that comes has frames of the mode before: on a busy machine it took its time to
    /// change.
    mixed: bool,
}

impl Chooser {
    /// An interface in mode `mode`; `suited`: native XDP is there and costs its peer nothing.
    pub fn new(wanted: Wanted, suited: bool, mode: Mode, now: Duration) -> Chooser {
        Chooser {
            wanted,
            suited,
            mode,
            calm: 0,
            idle: 0,
            pause: FIRST_PAUSE,
            not_before: Duration::ZERO,
            since: now,
            mixed: false,
        }
    }

    /// The mode it chose last.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The mode that the user wants.
    pub fn wanted(&self) -> Wanted {
        self.wanted
    }

    /// XDP could not be attached: it is not tried again for the longest pause.
    pub fn refused(&mut self, now: Duration) -> Why {
        self.mode = Mode::Tcx;
        self.calm = 0;
        self.not_before = now + LONGEST_PAUSE;
        Why::Refused
    }

    /// Decides the mode for the time after `window`, and gives the reason.
    pub fn choose(&mut self, window: &Window, now: Duration) -> (Mode, Why) {
        let (mode, why) = match (self.wanted, self.mode) {
            (Wanted::Tcx, _) => (Mode::Tcx, Why::Asked),
            (Wanted::Xdp, _) if now < self.not_before => (Mode::Tcx, Why::Refused),
            (Wanted::Xdp, _) => (Mode::Xdp, Why::Asked),
            (Wanted::Auto, Mode::Tcx) => self.in_tcx(window, now),
            (Wanted::Auto, Mode::Xdp) => self.in_xdp(window, now),
        };
        self.mixed = mode != self.mode;
        if mode != self.mode {
            self.mode = mode;
            self.since = now;
            self.calm = 0;
            self.idle = 0;
        }
        (mode, why)
    }

    fn in_tcx(&mut self, window: &Window, now: Duration) -> (Mode, Why) {
        let against = if !self.suited {
            Some(Why::Unsuited)
        } else if window.captured {
            Some(Why::Captured)
        } else if window.large > 0 {
            Some(Why::Large)
        } else if window.rate() < FEW_PER_S {
            Some(Why::Light)
        } else if window.taken < window.passed {
            Some(Why::NotTaken)
        } else if window.partial * 10 > window.taken {
            Some(Why::Partial)
        } else if window.xdp_able * 10 < window.taken * 9 {
            Some(Why::OutputUnsuited)
        } else if now < self.not_before {
            Some(Why::Pausing)
        } else {
            None
        };
        if let Some(why) = against {
            self.calm = 0;
            return (Mode::Tcx, why);
        }
        self.calm += 1;
        let mode = if self.calm >= CALM_WINDOWS { Mode::Xdp } else { Mode::Tcx };
        (mode, Why::Small)
    }

    fn in_xdp(&mut self, window: &Window, now: Duration) -> (Mode, Why) {
        self.idle = if window.rate() < IDLE_PER_S { self.idle + 1 } else { 0 };
        let (why, blame) = if window.captured {
            (Why::Captured, false)
        } else if window.large > if self.mixed { ON_THEIR_WAY } else { 0 } {
            (Why::Large, true)
        } else if window.partial * 10 > window.taken + window.passed {
            (Why::Partial, true)
        } else if !self.mixed && window.rate() >= IDLE_PER_S && window.by_xdp * 2 < window.taken {
            (Why::OutputUnsuited, true)
        } else if self.idle >= IDLE_WINDOWS {
            (Why::Light, false)
        } else {
            if now.saturating_sub(self.since) >= self.pause {
                self.pause = FIRST_PAUSE;
            }
            return (Mode::Xdp, Why::Small);
        };
        if blame {
            self.not_before = now + self.pause;
            self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        }
        (Mode::Tcx, why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn small() -> Window {
        Window { length: SECOND, taken: 500_000, xdp_able: 500_000, ..Window::default() }
    }

    fn by_xdp() -> Window {
        Window { by_xdp: 500_000, xdp_able: 0, ..small() }
    }

    /// Feeds one window a second and gives what was chosen.
    struct Day {
        chooser: Chooser,
        now: Duration,
    }

    impl Day {
        fn new(wanted: Wanted) -> Day {
            Day { chooser: Chooser::new(wanted, true, Mode::Tcx, Duration::ZERO), now: Duration::ZERO }
        }

        fn feed(&mut self, window: Window) -> (Mode, Why) {
            self.now += SECOND;
            self.chooser.choose(&window, self.now)
        }

        fn until_xdp(&mut self) -> u32 {
            (1..10_000).find(|_| self.feed(small()).0 == Mode::Xdp).expect("XDP at last")
        }
    }

    #[test]
    fn small_frames_move_to_xdp_after_three_calm_windows() {
        assert_eq!(Day::new(Wanted::Auto).until_xdp(), CALM_WINDOWS);
    }

    #[test]
    fn each_reason_against_xdp_keeps_tcx_and_is_named() {
        for (window, why) in [
            (Window { captured: true, ..small() }, Why::Captured),
            (Window { large: 1, ..small() }, Why::Large),
            (Window { taken: 100, ..small() }, Why::Light),
            (Window { passed: 600_000, ..small() }, Why::NotTaken),
            (Window { partial: 100_000, xdp_able: 400_000, ..small() }, Why::Partial),
            (Window { xdp_able: 100_000, ..small() }, Why::OutputUnsuited),
        ] {
            let mut day = Day::new(Wanted::Auto);
            for _ in 0..10 {
                assert_eq!(day.feed(window), (Mode::Tcx, why));
            }
        }
        let mut veth = Chooser::new(Wanted::Auto, false, Mode::Tcx, Duration::ZERO);
        assert_eq!(veth.choose(&small(), SECOND), (Mode::Tcx, Why::Unsuited));
    }

    #[test]
    fn flows_are_fleeting_where_most_frames_are_a_flows_only_one() {
        let fleeting =
            |unknown, taken, before| Window { unknown, taken, length: SECOND, ..Window::default() }.is_fleeting(before);
        assert!(fleeting(5000, 0, false) && fleeting(5000, 4000, false));
        assert!(!fleeting(5000, 6000, true), "most come again");
        assert!(!fleeting(500, 0, false) && fleeting(0, 500, true), "too few to say anything");
    }

    #[test]
    fn one_window_against_it_ends_xdp() {
        for (window, why) in [
            (Window { captured: true, ..by_xdp() }, Why::Captured),
            (Window { large: 1, ..by_xdp() }, Why::Large),
            (Window { partial: 100_000, ..by_xdp() }, Why::Partial),
            (Window { by_xdp: 1000, ..by_xdp() }, Why::OutputUnsuited),
        ] {
            let mut day = Day::new(Wanted::Auto);
            day.until_xdp();
            assert_eq!(day.feed(by_xdp()), (Mode::Xdp, Why::Small));
            assert_eq!(day.feed(window), (Mode::Tcx, why));
        }
    }

    #[test]
    fn frames_that_tcx_took_before_the_change_are_not_held_against_xdp() {
        let mut day = Day::new(Wanted::Auto);
        day.until_xdp();
        let late = Window { by_xdp: 1000, ..by_xdp() };
        assert_eq!(day.feed(late), (Mode::Xdp, Why::Small));
        assert_eq!(day.feed(late), (Mode::Tcx, Why::OutputUnsuited));
    }

    #[test]
    fn frames_that_were_on_their_way_at_the_change_are_not_held_against_xdp() {
        let mut day = Day::new(Wanted::Auto);
        day.until_xdp();
        let one = Window { large: 1, ..by_xdp() };
        assert_eq!(day.feed(one), (Mode::Xdp, Why::Small));
        assert_eq!(day.feed(one), (Mode::Tcx, Why::Large));
        let mut day = Day::new(Wanted::Auto);
        day.until_xdp();
        assert_eq!(day.feed(Window { large: ON_THEIR_WAY + 1, ..by_xdp() }), (Mode::Tcx, Why::Large));
    }

    #[test]
    fn traffic_that_alternates_makes_the_pauses_longer() {
        let mut day = Day::new(Wanted::Auto);
        day.until_xdp();
        let mut waits = vec![];
        for _ in 0..9 {
            day.feed(Window { large: 500, ..by_xdp() });
            waits.push(day.until_xdp());
        }
        assert!(waits.windows(2).all(|w| w[1] >= w[0]), "{waits:?}");
        assert_eq!(*waits.last().unwrap(), LONGEST_PAUSE.as_secs() as u32 + CALM_WINDOWS - 1);
    }

    #[test]
    fn silence_gives_xdp_up_without_blame() {
        let mut day = Day::new(Wanted::Auto);
        day.until_xdp();
        let quiet = Window { length: SECOND, ..Window::default() };
        let last = (0..IDLE_WINDOWS).map(|_| day.feed(quiet)).last();
        assert_eq!(last, Some((Mode::Tcx, Why::Light)));
        assert_eq!(day.until_xdp(), CALM_WINDOWS);
    }

    #[test]
    fn what_is_forced_stays_unless_the_kernel_refuses() {
        let mut day = Day::new(Wanted::Xdp);
        assert_eq!(day.feed(Window { large: 9, ..small() }), (Mode::Xdp, Why::Asked));
        assert_eq!(day.chooser.refused(day.now), Why::Refused);
        assert_eq!(day.feed(small()), (Mode::Tcx, Why::Refused));
        assert_eq!(Day::new(Wanted::Tcx).feed(small()), (Mode::Tcx, Why::Asked));
    }

    proptest! {
        #[test]
        fn xdp_is_never_chosen_in_a_window_that_speaks_against_it(
            windows in prop::collection::vec((0u64..100_000, 0u64..100_000, prop::sample::select(vec![0, 500]), any::<bool>(), 0u64..100_000), 1..60),
        ) {
            let mut day = Day::new(Wanted::Auto);
            for (taken, passed, large, captured, partial) in windows {
                let window = Window { taken, passed, large, captured, partial, xdp_able: taken, by_xdp: taken, length: SECOND, unknown: 0 };
                let (mode, _) = day.feed(window);
                if large > 0 || captured {
                    prop_assert_eq!(mode, Mode::Tcx);
                }
            }
        }

        #[test]
        fn every_reason_has_a_text(number in 0u32..TEXTS.len() as u32) {
            prop_assert_ne!(why(number), "unknown");
        }
    }
}
