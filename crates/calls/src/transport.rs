//! One side of calls with one peer: the session, and what carries it. Cells and processes use this
//! module, each with its own memory, doorbells and sockets ([`Sections`], [`Stream`]).
//!
//! # What carries it
//! A *link* outlives its peer. It goes down when the peer stops or dies, and comes up with the next
//! one. Each time that it is up is an epoch of the link, in which both sides start with fresh
//! sections. A *stream* ends once, and its side with it ([`Transport::is_over`]).
//!
//! # Failure
//! Calls under way end at once when the peer goes ([`CallError::ProviderGone`]). A peer that breaks
//! the protocol has its link reset or its connection closed, and calls end with
//! [`CallError::Broken`]. But a peer that stops clears its section, and a side that reads meanwhile
//! may find anything there. So if the peer has stopped by then, its calls end with
//! [`CallError::ProviderGone`].
//!
//! # What it is not
//! It has no thread, task, clock or lock. Its owner calls [`Transport::turn`] whenever something
//! may have come, and sleeps when [`Transport::arm`] allows it.

use alloc::boxed::Box;
use core::task::Waker;

use tombolo_ring::mem::{Foreign, ForeignMut};
use tombolo_ring::rpc::Broken;
use tombolo_ring::rpc::entry::Token;

use crate::call::{CallOptions, Reply, Request, Response};
use crate::carrier::Carrier;
use crate::error::CallError;
use crate::frames::Frames;
use crate::sections::{Plan, Rings};
use crate::session::{ServeOptions, Session};

/// One end of a link: both output sections, the peer's state, and its doorbell.
pub trait Sections {
    /// Follows the peer's state, and returns whether the sections may be used. On the way it clears
    /// the own section by `plan`.
    ///
    /// # Errors
    /// What the peer broke on the way up; [`Sections::fault`] follows.
    fn follow(&mut self, plan: &Plan) -> Result<bool, Broken>;

    /// Changes whenever the own section was cleared or the peer has stopped: what was known of the
    /// sections is void then.
    fn epoch(&self) -> u64;

    /// The own section, to be written, and the peer's, to be read. `None` where the memory is gone.
    fn sections(&self) -> Option<(ForeignMut<'_>, Foreign<'_>)>;

    /// Rings the peer.
    fn ring(&mut self);

    /// The peer broke the protocol: resets the link. Returns whether the peer has stopped
    /// meanwhile.
    fn fault(&mut self) -> bool;
}

/// A connection that carries bytes.
pub trait Stream {
    /// Puts what has come into the frames, as far as they want it. False where the other side has
    /// ended.
    fn read(&mut self, frames: &mut Frames) -> bool;

    /// Sends what waits in the frames, or has it sent. False where the connection has ended.
    fn write(&mut self, frames: &mut Frames) -> bool;

    /// Ends the connection.
    fn close(&mut self);

    /// Whether bytes have come that the frames did not want yet, and that wake no thread any more.
    fn has_more(&self) -> bool {
        false
    }
}

#[derive(Debug)]
struct OnLink<L> {
    link: L,
    plan: Plan,
    rings: Rings,
    /// The link's epoch that `rings` belong to, and whether the peer's headers were looked at in
    /// it.
    epoch: Option<u64>,
    checked: bool,
}

#[derive(Debug)]
struct OnStream<S> {
    stream: S,
    frames: Frames,
    over: bool,
}

#[derive(Debug)]
enum Medium<L, S> {
    Link(Box<OnLink<L>>),
    Stream(OnStream<S>),
}

/// One side. See the module's head.
#[derive(Debug)]
pub struct Transport<L, S> {
    session: Session,
    medium: Medium<L, S>,
    up: bool,
}

impl<L: Sections, S: Stream> Transport<L, S> {
    /// Over a link. The peer need not be there yet.
    pub fn on_link(link: L, plan: Plan, options: &ServeOptions) -> Transport<L, S> {
        let on = OnLink { link, plan, rings: Rings::new(plan), epoch: None, checked: false };
        Transport { session: Session::new(plan.entries(), options), medium: Medium::Link(Box::new(on)), up: false }
    }

    /// Over a connection on which both have greeted, with so many entries each way
    /// ([`Frames::greeted`]).
    pub fn on_stream(stream: S, frames: Frames, entries: u32, options: &ServeOptions) -> Transport<L, S> {
        let on = OnStream { stream, frames, over: false };
        let mut session = Session::new(entries, options);
        session.subtract_way();
        Transport { session, medium: Medium::Stream(on), up: true }
    }

    /// Whether the peer is there, as of the last look.
    pub fn is_up(&self) -> bool {
        self.up
    }

    /// Whether it never comes again: the connection has ended.
    pub fn is_over(&self) -> bool {
        matches!(&self.medium, Medium::Stream(on) if on.over)
    }

    /// The session, to look at.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// From now on this side serves what the peer asks. Before, requests are answered as failed.
    pub fn serve(&mut self) {
        self.session.serve();
    }

    /// The link, where it is one.
    pub fn link(&self) -> Option<&L> {
        if let Medium::Link(on) = &self.medium { Some(&on.link) } else { None }
    }

    /// The link, where it is one.
    pub fn link_mut(&mut self) -> Option<&mut L> {
        if let Medium::Link(on) = &mut self.medium { Some(&mut on.link) } else { None }
    }

    /// The connection and its frames, where it is one.
    pub fn stream(&self) -> Option<(&S, &Frames)> {
        if let Medium::Stream(on) = &self.medium { Some((&on.stream, &on.frames)) } else { None }
    }

    /// The connection and its frames, where it is one.
    pub fn stream_mut(&mut self) -> Option<(&mut S, &mut Frames)> {
        if let Medium::Stream(on) = &mut self.medium { Some((&mut on.stream, &mut on.frames)) } else { None }
    }

    /// Works on the session with what carries it. What the peer broke, it loses; `None` then, and
    /// where it is not there.
    fn with<T>(&mut self, work: impl FnOnce(&mut Session, &mut dyn Carrier) -> Result<T, Broken>) -> Option<T> {
        if !self.up {
            return None;
        }
        let Transport { session, medium, .. } = self;
        let result = match medium {
            Medium::Link(on) => {
                let OnLink { link, rings, checked, .. } = &mut **on;
                let on_sections = |(own, peer)| {
                    let mut wire = rings.on(own, peer)?;
                    if !*checked {
                        wire.check_peer()?;
                        *checked = true;
                    }
                    work(session, &mut wire)
                };
                let result = link.sections().ok_or(Broken::Short).and_then(on_sections);
                if rings.take_ring() {
                    link.ring();
                }
                result
            }
            Medium::Stream(on) => {
                let result = work(session, &mut on.frames);
                on.over |= !on.stream.write(&mut on.frames);
                result
            }
        };
        result.map_err(|broken| self.fault(broken)).ok()
    }

    /// The peer broke the protocol.
    fn fault(&mut self, broken: Broken) {
        self.up = false;
        let stopped = match &mut self.medium {
            Medium::Link(on) => on.link.fault(),
            Medium::Stream(on) => {
                on.over = true;
                on.stream.close();
                false
            }
        };
        self.session.lost(if stopped { CallError::ProviderGone } else { CallError::Broken(broken) });
    }

    /// Follows the peer, takes what it sent, sends what waits. Returns whether anything came or
    /// changed.
    pub fn turn(&mut self, now_ns: u64) -> bool {
        let was_up = self.up;
        // Before the peer's state: what it wrote before it went is still an answer.
        let mut any = self.drain(now_ns);
        let gone = match &mut self.medium {
            Medium::Link(on) => {
                let OnLink { link, plan, rings, epoch, checked } = &mut **on;
                let followed = link.follow(plan);
                let is_new = *epoch != Some(link.epoch());
                if is_new {
                    (*rings, *epoch, *checked) = (Rings::new(*plan), Some(link.epoch()), false);
                }
                match followed {
                    Ok(up) => self.up = up,
                    Err(broken) => {
                        self.fault(broken);
                        return any || was_up;
                    }
                }
                was_up && (is_new || !self.up)
            }
            Medium::Stream(on) => {
                self.up = !on.over;
                was_up && on.over
            }
        };
        if gone {
            self.session.lost(CallError::ProviderGone);
        }
        if self.up && !was_up {
            any |= self.drain(now_ns);
        }
        any || was_up != self.up
    }

    fn drain(&mut self, now_ns: u64) -> bool {
        if let Medium::Stream(on) = &mut self.medium
            && !on.over
        {
            // What is in the frames is taken below; the end is seen after it.
            on.over |= !on.stream.read(&mut on.frames);
        }
        self.with(|session, carrier| session.drain(carrier, now_ns)).unwrap_or(false)
    }

    /// Says that we are about to sleep. False where something waits, or the peer was found to have
    /// broken the protocol: then all who wait look again.
    pub fn arm(&mut self) -> bool {
        if let Medium::Stream(on) = &self.medium
            && !on.over
            && on.stream.has_more()
            && on.frames.wanted() > 0
        {
            return false;
        }
        !self.up || self.with(|_, carrier| carrier.arm()).unwrap_or(false)
    }

    /// Asks without waiting. What it ends with is fetched by [`Transport::fetch`] or
    /// [`Transport::poll`]; until then it holds a slot.
    ///
    /// # Errors
    /// [`CallError::Busy`], [`CallError::TooLong`], [`CallError::ProviderGone`]: nothing was sent.
    pub fn submit(&mut self, options: &CallOptions, bytes: &[u8], now_ns: u64) -> Result<Token, CallError> {
        let sent = self.with(|session, carrier| match session.submit(carrier, options, bytes, now_ns) {
            Err(CallError::Broken(broken)) => Err(broken),
            other => Ok(other),
        });
        sent.unwrap_or(Err(CallError::ProviderGone))
    }

    /// How a call ended, once; `None` while it is under way, and then `waker` is woken when it
    /// ends.
    pub fn fetch(&mut self, token: Token, waker: Option<&Waker>) -> Option<Result<Reply, CallError>> {
        self.session.fetch(token, waker)
    }

    /// How a call ended, once; `None` while it is under way. From its deadline on
    /// [`CallError::DeadlineExceeded`], and the token names nothing any more.
    pub fn poll(&mut self, token: Token, now_ns: u64) -> Option<Result<Reply, CallError>> {
        let end = self.session.fetch(token, None);
        if end.is_none() && self.session.is_overdue(token, now_ns) {
            self.give_up(token);
            return Some(Err(CallError::DeadlineExceeded));
        }
        end
    }

    /// Asks the peer to cancel a call. Its answer still comes: [`CallError::Cancelled`], or what it
    /// was if service had begun. False where the token names no call under way.
    pub fn cancel(&mut self, token: Token) -> bool {
        self.with(|session, carrier| session.cancel(carrier, token)).unwrap_or(false)
    }

    /// Abandons this call: it is cancelled, and its slot becomes free with its answer.
    pub fn give_up(&mut self, token: Token) {
        self.cancel(token);
        self.session.abandon(token);
    }

    /// The peer's next request, earliest deadline first; [`Transport::respond`] answers it.
    pub fn next(&mut self, now_ns: u64) -> Option<Request> {
        self.with(|session, carrier| session.next(carrier, now_ns)).flatten()
    }

    /// Answers a request. Where the peer has gone since, nothing happens.
    pub fn respond(&mut self, request: &Request, response: Response, now_ns: u64) {
        if self.up {
            self.with(|session, carrier| session.respond(carrier, request, now_ns, response));
        } else {
            self.session.forget(request);
        }
    }
}

#[cfg(test)]
#[path = "transport_tests.rs"]
mod tests;
