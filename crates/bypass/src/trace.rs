//! What happens to each frame, as it happens: for looking into one thing, not for keeping on.
//!
//! While a trace runs every program writes an event per frame into a ring; what does not fit is
//! counted. The programs are asked for events up to a moment that is put off again and again, so a
//! trace that is killed costs nothing after a second or two.

use crate::attachment::{AttachError, monotonic_ns};
use crate::layout::Event;
use crate::maps::{self, Lost, Maps};
use crate::netlink::NetlinkError;
use crate::place::Place;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::ops::ControlFlow;

/// Asks for events for this long.
fn want(maps: &mut Maps, seconds: u64) -> Result<(), AttachError> {
    let now = monotonic_ns() / 1_000_000_000;
    Ok(maps.trace_until(if seconds == 0 { 0 } else { now + seconds })?)
}

/// How a trace ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traced {
    /// Events that were lost meanwhile, of any interface.
    pub lost: u64,
    /// Whether everything was detached meanwhile, so that no more events came.
    pub detached: bool,
}

/// Hands events to `each` until it breaks or fails, or everything is detached. It is called without
/// an event ten times a second, so that it can see that time is up.
///
/// # Errors
/// If nothing is attached, or a map cannot be read.
pub fn trace<E: From<AttachError>>(
    place: &Place,
    mut each: impl FnMut(Option<Event>) -> Result<ControlFlow<()>, E>,
) -> Result<Traced, E> {
    let generation = place.generation();
    let mut maps = Maps::open(place).map_err(AttachError::from)?;
    let mut ring = maps::events(place).map_err(AttachError::from)?;
    // What an earlier trace left.
    while ring.next().is_some() {}
    let lost = Lost::open(place).map_err(AttachError::from)?;
    let lost_before = lost.read().map_err(AttachError::from)?;
    let mut detached = false;
    let mut run = |maps: &mut Maps| -> Result<(), E> {
        loop {
            want(maps, 1)?;
            let tenth = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            match poll(&mut [PollFd::new(&ring, PollFlags::IN)], Some(&tenth)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(cause) => return Err(AttachError::from(NetlinkError::Call { what: "poll", cause }).into()),
            }
            while let Some(item) = ring.next() {
                if let Some(event) = Event::from_bytes(&item)
                    && each(Some(event))?.is_break()
                {
                    return Ok(());
                }
            }
            if each(None)?.is_break() {
                return Ok(());
            }
            if place.generation() != generation {
                detached = true;
                return Ok(());
            }
        }
    };
    let result = run(&mut maps);
    want(&mut maps, 0)?;
    result?;
    let lost = lost.read().map_err(AttachError::from)?.saturating_sub(lost_before);
    Ok(Traced { lost, detached })
}
