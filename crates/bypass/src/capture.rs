//! What `capture` writes: frames themselves, of one flow or of a filter, as they come in and as
//! they go out.
//!
//! The programs copy the frames that the filter selects into perf buffers, one for each CPU. The
//! buffers belong to the process that captures. So there are none while no capture runs, and a
//! killed capture leaves none behind. An interface stays in its mode, and its traffic stays in the
//! bypass. Frames are requested up to a moment in the near future. A thread of its own postpones
//! that moment again and again, also while the reader of the frames is paused. So a killed capture
//! costs nothing after two seconds.
//!
//! # Limits
//! One capture at a time in a network namespace. A frame that finds its CPU's buffer full is lost,
//! and counted. Of a frame [`MOST_KEPT`] bytes are kept at most. The frames of all CPUs are put in
//! order by their time; a frame that is reported later than `HOLD` comes further behind.

use crate::attachment::{AttachError, monotonic_ns};
use crate::layout::{Captured, Point, WANTED_BYTES};
use crate::maps::{self, Maps};
use crate::netlink::NetlinkError;
use crate::place::Place;
use aya::maps::MapData;
use aya::maps::perf::{PerfEvent, PerfEventArrayBuffer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fs::File;
use std::net::IpAddr;
use std::ops::ControlFlow;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

/// Most bytes that are kept of a frame: what the kernel writes into a perf buffer at once is
/// shorter than 64 KiB.
pub const MOST_KEPT: u32 = 65_000;
/// Bytes of buffers of all CPUs together, and the least of each CPU.
const BUFFERS_BYTES: usize = 16 << 20;
const LEAST_BUFFER_BYTES: usize = 512 << 10;
/// Bytes that are read from a CPU's buffer before the other ones have their turn.
const TURN_BYTES: usize = 4 << 20;
/// How long a frame waits for earlier ones of other CPUs.
const HOLD: Duration = Duration::from_millis(10);
/// How often it looks whether it is to end, and how long frames gather before they are read.
const GLANCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
const GATHER: Duration = Duration::from_millis(4);
/// How often the moment up to which frames are captured is put off; they are for a second or two.
const RENEW: Duration = Duration::from_millis(300);

/// One end of a flow: what is `None` may be anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct End {
    /// An address, and how many of its leading bits count.
    pub address: Option<(IpAddr, u8)>,
    /// A TCP or UDP port.
    pub port: Option<u16>,
}

/// Which frames are captured. Those of a flow go from either end to the other one, in both
/// directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Number of the interface where they come in or go out.
    pub interface: Option<u32>,
    /// IP protocol number; ICMP's also selects ICMPv6.
    pub protocol: Option<u8>,
    /// Frames from either end to the other are captured.
    pub ends: [End; 2],
    /// Bytes that are kept of each frame.
    pub snap: u32,
}

impl End {
    fn to_bytes(self) -> [u8; 36] {
        let mut bytes = [0; 36];
        if let Some((address, prefix)) = self.address {
            let octets = match address {
                IpAddr::V4(v4) => v4.octets().to_vec(),
                IpAddr::V6(v6) => v6.octets().to_vec(),
            };
            bytes[..octets.len()].copy_from_slice(&octets);
            for (n, byte) in bytes[16..16 + octets.len()].iter_mut().enumerate() {
                let ones = usize::from(prefix).saturating_sub(8 * n).min(8);
                *byte = (0xff00u16 >> ones) as u8;
            }
        }
        // As on the wire, in a `u32`.
        let port = u32::from(self.port.unwrap_or(0).to_be());
        bytes[32..].copy_from_slice(&port.to_ne_bytes());
        bytes
    }
}

impl Wanted {
    /// `struct wanted`.
    fn to_bytes(self) -> [u8; WANTED_BYTES] {
        const AF_INET: u32 = 2;
        const AF_INET6: u32 = 10;
        let family =
            self.ends.iter().find_map(|e| e.address).map_or(0, |a| if a.0.is_ipv4() { AF_INET } else { AF_INET6 });
        let head = [self.interface.unwrap_or(0), family, self.protocol.unwrap_or(0).into(), self.snap.min(MOST_KEPT)];
        let bytes = [head.map(u32::to_ne_bytes).concat(), self.ends.map(End::to_bytes).concat()].concat();
        bytes.try_into().expect("four words and two ends")
    }
}

/// One frame of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Time, interface, path and length, as the program recorded them.
    pub captured: Captured,
    /// The frame from its Ethernet header on, cut to the wanted length.
    pub bytes: Vec<u8>,
}

/// How a capture ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// By interface: frames that were asked for, and how many of these are lost.
    pub interfaces: Vec<(u32, u64, u64)>,
    /// Whether everything was detached meanwhile, so that nothing came any more.
    pub detached: bool,
}

impl Totals {
    /// Frames that are lost.
    pub fn lost(&self) -> u64 {
        self.interfaces.iter().map(|i| i.2).sum()
    }
}

/// Frames that were read, until those of other CPUs before them were read, too.
#[derive(Default)]
struct Waiting(Vec<(usize, Frame)>);

impl Waiting {
    /// Takes in what a CPU's buffer has.
    fn add(&mut self, cpu: usize, sample: &[u8]) {
        let Some((captured, bytes)) = Captured::from_bytes(sample) else { return };
        if captured.point == Point::Failed {
            let last = self.0.iter_mut().rev().find(|(n, _)| *n == cpu).map(|(_, frame)| &mut frame.captured);
            let is_it = |c: &&mut Captured| c.point == Point::In && c.interface == captured.interface && c.other != 0;
            if let Some(last) = last.filter(is_it) {
                (last.what, last.other) = (captured.what, 0);
                return;
            }
        }
        let point = if captured.point == Point::Failed { Point::In } else { captured.point };
        self.0.push((cpu, Frame { captured: Captured { point, ..captured }, bytes: bytes.to_vec() }));
    }

    /// When the frame came that was taken in last of those of a CPU.
    fn newest_ns(&self, cpu: usize) -> Option<u64> {
        self.0.iter().rev().find(|(n, _)| *n == cpu).map(|(_, frame)| frame.captured.at_ns)
    }

    /// Those that came before this time, in order.
    fn due(&mut self, before_ns: u64) -> Vec<Frame> {
        // Stable: frames of one CPU are in order already.
        self.0.sort_by_key(|(_, frame)| frame.captured.at_ns);
        let count = self.0.partition_point(|(_, frame)| frame.captured.at_ns < before_ns);
        self.0.drain(..count).map(|(_, frame)| frame).collect()
    }
}

/// Pages of each CPU's buffer, a power of two.
fn pages(cpus: usize) -> usize {
    let bytes = (BUFFERS_BYTES / cpus.max(1)).max(LEAST_BUFFER_BYTES);
    let pages = bytes / rustix::param::page_size();
    if pages.is_power_of_two() { pages } else { pages.next_power_of_two() / 2 }
}

fn buffers(place: &Place) -> Result<Vec<PerfEventArrayBuffer<MapData>>, AttachError> {
    let wrong = |cause: String| AttachError::Capture(cause);
    let mut array = maps::captures(place)?;
    let cpus = aya::util::online_cpus().map_err(|e| wrong(format!("{}: {}", e.0, e.1)))?;
    let pages = pages(cpus.len());
    cpus.iter().map(|cpu| array.open(*cpu, Some(pages)).map_err(|e| wrong(crate::object::chain(&e)))).collect()
}

/// What each interface's counters say of captures.
fn counted(maps: &Maps) -> Result<Vec<(u32, u64, u64)>, AttachError> {
    let mut found = vec![];
    for (index, port) in maps.ports()? {
        let counters = maps.counters(port.slot)?;
        found.push((index, counters.captured, counters.capture_lost));
    }
    Ok(found)
}

/// The place of the one capture that may run in a network namespace.
pub struct CaptureLock(File);

impl CaptureLock {
    /// Takes it.
    ///
    /// # Errors
    /// If another capture runs here.
    pub fn take(place: &Place) -> Result<CaptureLock, AttachError> {
        place.capture_lock()?.map(CaptureLock).map_err(AttachError::Capturing)
    }
}

/// Has frames captured as long as it lives.
struct Renewer(Option<(Sender<()>, JoinHandle<()>)>);

impl Renewer {
    fn start(place: &Place) -> Result<Renewer, AttachError> {
        let mut maps = Maps::open(place)?;
        let mut renew = move || maps.capture_until(monotonic_ns() / 1_000_000_000 + 1);
        renew()?;
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("capture".into())
            .spawn(move || while stopped.recv_timeout(RENEW) == Err(RecvTimeoutError::Timeout) && renew().is_ok() {});
        Ok(Renewer(Some((stop, thread.map_err(AttachError::Thread)?))))
    }
}

impl Drop for Renewer {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            drop(stop);
            let _ = thread.join();
        }
    }
}

/// Hands frames to `each` until it breaks or fails. It is called without a frame ten times a
/// second, so that it can see that time is up.
///
/// # Errors
/// If nothing is attached, or the kernel gives no buffers.
pub fn capture<E: From<AttachError>>(
    place: &Place,
    slot: &CaptureLock,
    wanted: Wanted,
    mut each: impl FnMut(Option<&Frame>) -> Result<ControlFlow<()>, E>,
) -> Result<Totals, E> {
    let mut maps = Maps::open(place).map_err(AttachError::from)?;
    let mut buffers = buffers(place)?;
    maps::set_wanted(place, wanted.to_bytes()).map_err(AttachError::from)?;
    let before = counted(&maps)?;
    let mut waiting = Waiting::default();
    // Reads what the buffers have. Returns the time from which on frames may be missing, since a
    // buffer has more of them.
    let mut read = |waiting: &mut Waiting| {
        let mut complete_ns = u64::MAX;
        for (cpu, buffer) in buffers.iter_mut().enumerate() {
            let mut joined = vec![];
            let all = buffer.try_fold(0, |read, event| {
                let PerfEvent::Sample { head, tail } = event else { return ControlFlow::Continue(read) };
                if tail.is_empty() {
                    waiting.add(cpu, head);
                } else {
                    joined.clear();
                    joined.extend_from_slice(head);
                    joined.extend_from_slice(tail);
                    waiting.add(cpu, &joined);
                }
                let read = read + head.len() + tail.len();
                if read < TURN_BYTES { ControlFlow::Continue(read) } else { ControlFlow::Break(()) }
            });
            if all.is_break() {
                complete_ns = complete_ns.min(waiting.newest_ns(cpu).unwrap_or(0));
            }
        }
        let fds = buffers.iter();
        let mut polled: Vec<_> = fds.map(|b| PollFd::new(b, PollFlags::IN)).collect();
        match poll(&mut polled, Some(&GLANCE)) {
            Ok(_) | Err(Errno::INTR) => Ok(complete_ns),
            Err(cause) => Err(AttachError::from(NetlinkError::Call { what: "poll", cause })),
        }
    };
    let mut detached = false;
    let mut run = |maps: &mut Maps| -> Result<(), E> {
        let renewer = Renewer::start(place)?;
        loop {
            let now = monotonic_ns();
            let complete_ns = read(&mut waiting)?;
            for frame in waiting.due(complete_ns.min(now.saturating_sub(HOLD.as_nanos() as u64))) {
                if each(Some(&frame))?.is_break() {
                    return Ok(());
                }
            }
            if each(None)?.is_break() {
                break;
            }
            if !place.is_captured_by(&slot.0) {
                detached = true;
                break;
            }
            std::thread::sleep(GATHER);
        }
        drop(renewer);
        // What came before the end was seen, however much that is.
        maps.capture_until(0).map_err(AttachError::from)?;
        let mut complete_ns = 0;
        while complete_ns != u64::MAX {
            complete_ns = read(&mut waiting)?;
            for frame in waiting.due(complete_ns) {
                if each(Some(&frame))?.is_break() {
                    return Ok(());
                }
            }
        }
        Ok(())
    };
    let result = run(&mut maps);
    maps.capture_until(0).map_err(AttachError::from)?;
    result?;
    let since = |(index, frames, lost): (u32, u64, u64)| {
        let (was, was_lost) = before.iter().find(|i| i.0 == index).map_or((0, 0), |i| (i.1, i.2));
        (index, frames.saturating_sub(was), lost.saturating_sub(was_lost))
    };
    Ok(Totals { interfaces: counted(&maps)?.into_iter().map(since).collect(), detached })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::CAPTURED_BYTES;

    fn sample(at_ns: u64, other: u32, point: u8, code: u8) -> Vec<u8> {
        let mut bytes = vec![0; CAPTURED_BYTES];
        bytes[..8].copy_from_slice(&at_ns.to_ne_bytes());
        bytes[8] = 3;
        bytes[12] = other as u8;
        (bytes[29], bytes[30]) = (point, code);
        bytes
    }

    #[test]
    fn frames_of_several_cpus_come_in_order_and_wait_for_each_other() {
        let mut waiting = Waiting::default();
        for (cpu, at_ns) in [(0, 5), (0, 9), (1, 4), (1, 7), (1, 20)] {
            waiting.add(cpu, &sample(at_ns, 0, 0, 3));
        }
        let times = |frames: Vec<Frame>| frames.iter().map(|f| f.captured.at_ns).collect::<Vec<_>>();
        assert_eq!(times(waiting.due(8)), [4, 5, 7]);
        waiting.add(0, &sample(12, 0, 0, 3));
        assert_eq!(times(waiting.due(u64::MAX)), [9, 12, 20]);
        waiting.add(0, &[0; 7]);
        assert!(waiting.due(u64::MAX).is_empty());
    }

    #[test]
    fn a_frame_that_could_not_be_taken_after_all_is_told_of_once() {
        let mut waiting = Waiting::default();
        waiting.add(0, &sample(1, 4, 0, 0));
        waiting.add(1, &sample(2, 4, 0, 0));
        waiting.add(0, &sample(3, 0, 3, 22));
        // Of which nothing was told before.
        waiting.add(0, &sample(4, 0, 3, 22));
        let frames = waiting.due(u64::MAX);
        let what: Vec<_> =
            frames.iter().map(|f| (f.captured.point, f.captured.what.unwrap().0, f.captured.other)).collect();
        assert_eq!(what, [(Point::In, "up_failed", 0), (Point::In, "taken_tcx", 4), (Point::In, "up_failed", 0)]);
    }

    #[test]
    fn a_filter_is_written_as_the_programs_compare_it() {
        let end = |text: &str, prefix, port| End { address: Some((text.parse().unwrap(), prefix)), port };
        let wanted = Wanted {
            interface: Some(7),
            protocol: Some(6),
            ends: [end("10.1.2.3", 20, Some(80)), End::default()],
            snap: 100_000,
        };
        let bytes = wanted.to_bytes();
        assert_eq!(bytes[..16], [7, 2, 6, MOST_KEPT].map(u32::to_ne_bytes).concat()[..]);
        assert_eq!((&bytes[16..20], &bytes[32..36]), (&[10, 1, 2, 3][..], &[255, 255, 240, 0][..]));
        assert_eq!(bytes[48..52], [0, 80, 0, 0]);
        assert_eq!(bytes[52..], [0; 36]);
        let six = Wanted { ends: [End::default(), end("fd01::2", 128, None)], ..wanted }.to_bytes();
        assert_eq!((six[4], &six[68..84]), (10, &[255; 16][..]));
    }

    #[test]
    fn buffers_are_bounded_whatever_the_number_of_cpus() {
        for cpus in [1, 2, 3, 6, 64, 1000] {
            let pages = pages(cpus);
            let bytes = pages * rustix::param::page_size();
            assert!(pages.is_power_of_two() && bytes <= BUFFERS_BYTES, "{cpus} CPUs: {pages} pages");
            assert!(bytes >= LEAST_BUFFER_BYTES / 2, "{cpus} CPUs: {pages} pages");
        }
    }
}
