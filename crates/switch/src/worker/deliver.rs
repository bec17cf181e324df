//! Delivery: the frames of a batch to one destination, with what waits for its buffers.

use super::{Core, NEVER, PortFailure, SERVICE_INTERVAL, catch_panic};
use crate::Nanos;
use crate::capture::Tap;
use crate::counters::PortCounters;
use crate::drop::{Drops, Reason};
use crate::frame::Batch;
use crate::limit::Meter;
use crate::network::Summary;
use crate::offload::Work;
use crate::overflow::{HOLD, LONGEST_HOLD, Overflow};
use crate::port::{Caps, Fault, FaultKind, Port, Sent};

impl Core {
    /// Has a destination that slept look at the time, and at what its control side left. Inner
    /// ports act on frames within `transmit`, and what they time (leases, queries, mappings) would
    /// be timed from the past.
    #[inline]
    pub(super) fn catch_up(&mut self, to: u16) {
        let now = self.now;
        if let Some(slot) = &self.slots[to as usize]
            && now.since(slot.serviced_at) >= SERVICE_INTERVAL
            && now >= slot.quiet_until
        {
            self.service_destination(to);
        }
    }

    fn service_destination(&mut self, to: u16) {
        let now = self.now;
        let Some(mut slot) = self.slots[to as usize].take() else { return };
        slot.serviced_at = now;
        match slot.port.as_mut().map(|port| catch_panic(|| port.service(now))) {
            // An earlier deadline stays: it may be the end of a rate limit's pause.
            Some(Ok(next)) => slot.deadline = slot.deadline.min(next.unwrap_or(NEVER)),
            Some(Err(failure)) => slot.suffer(failure, now),
            None => {}
        }
        self.refresh_link(to, &mut slot);
        self.earliest = self.earliest.min(slot.deadline);
        self.slots[to as usize] = Some(slot);
    }

    /// Hands the frames that are planned for `to` to it, merged only if `may_merge`; returns how
    /// many copies and segments they became, or `None` where there is no such port.
    #[inline]
    pub(super) fn deliver(&mut self, to: u16, batch: &Batch<'_>, summary: Summary, may_merge: bool) -> Option<u64> {
        let mut which = self.plan.frames_to(to);
        let slot = self.slots[to as usize].as_mut()?;
        let mut drops = Drops::reusing(std::mem::take(&mut self.refused));
        if slot.receive.has_classes() {
            slot.receive.pass_classes(self.now, batch, which, &mut self.passed, &mut drops);
            slot.counters.add_tx_drops(&mut drops);
            which = &self.passed;
            if which.is_empty() {
                self.refused = drops.into_spare();
                return Some(0);
            }
        }
        let Some(port) = &mut slot.port else {
            drops.count(Reason::LinkDown, which.len() as u64);
            slot.counters.add_tx_drops(&mut drops);
            self.refused = drops.into_spare();
            return Some(0);
        };
        let (now, taps, counters) = (self.now, &mut slot.taps, &slot.counters);
        let (mut work, mut merged) = (Work::default(), 0);
        let (transformer, merger, rechecks) = (&mut self.transformer, &mut self.merger, &mut self.rechecks);
        let (overflow, shown, apart) = (&mut slot.overflow, &mut self.shown, &mut self.apart);
        let limit = &mut slot.receive.whole;
        let (mut queued, mut late) = (0, 0);
        let result = catch_panic(|| {
            let caps = port.caps();
            if overflow.waits() {
                drain(overflow, &mut **port, now, taps, counters, limit)?;
            }
            let mut hand_over = |batch: &Batch<'_>, which: &[u16], drops: &mut Drops| {
                let mut sent = Sent::default();
                let ring_of = |port: &dyn Port, index: u16| port.ring_of(&batch.frames()[usize::from(index)]);
                let mut ready = which;
                if overflow.waits() {
                    apart.clear();
                    drops.note_limit(limit.wait(now));
                    for index in which {
                        if overflow.waits_for(ring_of(&**port, *index)) {
                            // Behind those that wait already.
                            drops.refuse(&[*index]);
                        } else {
                            apart.push(*index);
                        }
                    }
                    ready = apart;
                }
                if !ready.is_empty() {
                    sent = transmit_within(limit, &mut **port, now, batch, ready, drops)?;
                }
                if sent.frames != 0 && overflow.has_stalled() {
                    let taken = ready.iter().filter(|index| !drops.refused().contains(index));
                    taken.for_each(|index| overflow.took(ring_of(&**port, *index)));
                }
                if drops.has_refused() {
                    if !taps.is_empty() {
                        drops.without_refused(which, shown);
                    }
                    queued += overflow.take(now, batch, caps, drops, &mut late, |frame| port.ring_of(frame));
                    if !taps.is_empty() {
                        taps.retain(|tap| tap.transmitted(now, batch, shown, 0, counters));
                    }
                } else if !taps.is_empty() {
                    let refused = (which.len() as u64).saturating_sub(sent.frames);
                    taps.retain(|tap| tap.transmitted(now, batch, which, refused, counters));
                }
                Ok(sent)
            };
            let sent = if !fits(summary, caps) {
                transformer.transmit(batch, which, caps, &mut drops, &mut work, hand_over)?
            } else if may_merge && which.len() > 1 && caps.checksum && (caps.tso4 || caps.tso6) {
                merger.transmit(batch, which, caps, &mut drops, &mut merged, hand_over)?
            } else {
                hand_over(batch, which, &mut drops)?
            };
            port.flush()?;
            if port.take_recheck() {
                rechecks.note(to);
            }
            Ok((sent, port.answers()))
        });
        let total = which.len() as u64 + work.segments - work.segmented - merged;
        if merged != 0 {
            slot.counters.software_merged.add(merged);
        }
        if work != Work::default() {
            slot.counters.software_checksums.add(work.checksums);
            slot.counters.software_segmented.add(work.segmented);
            slot.counters.software_segments.add(work.segments);
        }
        let result = match result {
            Ok((sent, _)) if sent.frames + drops.total() + queued != total => {
                Err(PortFailure::Fault(unaccounted(sent, &drops, total)))
            }
            other => other,
        };
        if slot.overflow.is_live() {
            slot.counters.queued_frames.add(queued);
            let reason = if drops.limited().is_some() { Reason::RateLimit } else { Reason::QueueFull };
            slot.counters.tx_drops[reason as usize].add(late);
            if !std::mem::replace(&mut slot.overflow.listed, true) {
                self.waiting.push(to);
            }
            self.waiting_at = self.waiting_at.min(slot.overflow.next_try);
        }
        match result {
            Ok((sent, answers)) => {
                slot.counters.tx_frames.add(sent.frames);
                slot.counters.tx_bytes.add(sent.bytes);
                slot.counters.add_tx_drops(&mut drops);
                if answers && !slot.active {
                    self.activate(to);
                }
            }
            Err(failure) => {
                // Frames that were not counted yet were lost with the port's rings; see
                // `Port::transmit`.
                drops.count(Reason::Reset, total.saturating_sub(drops.total() + queued));
                slot.counters.add_tx_drops(&mut drops);
                self.fault_of(to, failure);
            }
        }
        self.refused = drops.into_spare();
        Some(total)
    }

    /// Tries the ports again for which frames wait.
    #[cold]
    pub(super) fn drain_waiting(&mut self) {
        let now = self.now;
        self.waiting_at = NEVER;
        for at in (0..self.waiting.len()).rev() {
            let index = self.waiting[at];
            let slot = self.slots.get_mut(usize::from(index)).and_then(Option::as_mut);
            let Some(slot) = slot.filter(|slot| slot.overflow.listed) else {
                self.waiting.swap_remove(at);
                continue;
            };
            let (mut answers, mut failure) = (false, None);
            if slot.overflow.next_try <= now
                && let Some(port) = &mut slot.port
            {
                let (overflow, taps, counters) = (&mut slot.overflow, &mut slot.taps, &slot.counters);
                let limit = &mut slot.receive.whole;
                let rechecks = &mut self.rechecks;
                let result = catch_panic(|| {
                    drain(overflow, &mut **port, now, taps, counters, limit)?;
                    port.flush()?;
                    if port.take_recheck() {
                        rechecks.note(index);
                    }
                    Ok(port.answers())
                });
                (answers, failure) = match result {
                    Ok(answers) => (answers && !slot.active, None),
                    Err(failure) => (false, Some(failure)),
                };
            }
            if slot.overflow.is_live() && failure.is_none() {
                self.waiting_at = self.waiting_at.min(slot.overflow.next_try);
            } else {
                slot.overflow.listed = false;
                self.waiting.swap_remove(at);
            }
            if let Some(failure) = failure {
                self.fault_of(index, failure);
            } else if answers {
                self.activate(index);
            }
        }
    }
}

/// Hands what waits for `port` to it, and counts what becomes of it. The caller flushes.
#[cold]
fn drain(
    overflow: &mut Overflow,
    port: &mut dyn Port,
    now: Nanos,
    taps: &mut Vec<Tap>,
    counters: &PortCounters,
    limit: &mut Meter,
) -> Result<(), Fault> {
    let mut drops = Drops::reusing(overflow.spare());
    overflow.set_limit_hold(limit.is_on().then(|| HOLD.after(limit.longest_wait()).min(LONGEST_HOLD)));
    drops.note_limit(limit.wait(now));
    if drops.limited().is_some() {
        // Nothing may go, so nothing is looked at.
        overflow.rest(now, &mut drops);
        counters.add_tx_drops(&mut drops);
        overflow.keep_spare(drops.into_spare());
        return Ok(());
    }
    let caps = port.caps();
    let mut shown = Vec::new();
    let done = overflow.drain(now, caps, &mut drops, |batch, which, drops| {
        let before = drops.total();
        let sent = transmit_within(limit, port, now, batch, which, drops)?;
        if sent.frames + (drops.total() - before) != which.len() as u64 {
            return Err(unaccounted(sent, drops, which.len() as u64));
        }
        if !taps.is_empty() {
            drops.without_refused(which, &mut shown);
            taps.retain(|tap| tap.transmitted(now, batch, &shown, 0, counters));
        }
        Ok(sent)
    });
    if let Ok(sent) = &done {
        counters.tx_frames.add(sent.frames);
        counters.tx_bytes.add(sent.bytes);
    }
    counters.add_tx_drops(&mut drops);
    overflow.keep_spare(drops.into_spare());
    done.map(drop)
}

/// [`Port::transmit`] of the frames that the port's limit lets pass now. It refuses the others, so
/// that they wait.
#[inline]
fn transmit_within(
    limit: &mut Meter,
    port: &mut dyn Port,
    now: Nanos,
    batch: &Batch<'_>,
    which: &[u16],
    drops: &mut Drops,
) -> Result<Sent, Fault> {
    if !limit.is_on() {
        return port.transmit(batch, which, drops);
    }
    let fit = limit.fit(now, which.iter().map(|index| batch.frames()[usize::from(*index)].len()));
    let (which, later) = which.split_at(fit);
    let mut sent = Sent::default();
    if !which.is_empty() {
        sent = port.transmit(batch, which, drops)?;
        limit.charge(now, sent.frames, sent.bytes);
    }
    if !later.is_empty() {
        drops.note_limit(limit.wait(now));
        drops.hold(later);
    }
    Ok(sent)
}

/// A port's code has lost frames without accounting for them, or counted some twice. This is a
/// defect in this project, and it costs that port only.
#[cold]
fn unaccounted(sent: Sent, drops: &Drops, total: u64) -> Fault {
    let detail = format!(
        "{total} frames were handed to the port's code, which says that it sent {} and dropped {}; this is a defect of \
         tombolo, the port was reset",
        sent.frames,
        drops.total()
    );
    Fault { kind: FaultKind::System, detail }
}

/// Whether all frames of a batch can go to a destination as they are.
#[inline]
fn fits(summary: Summary, caps: Caps) -> bool {
    !summary.offloads && summary.longest <= caps.max_frame_bytes as usize
}
