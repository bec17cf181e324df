//! The connection to XenStore: requests that are waited for, and watch events that are not.
//!
//! A domain has to trust XenStore, so a request sleeps until its reply comes. The wait has a limit,
//! since a dead daemon must not stop the cell. A connection that gives no reply in time, or sends a
//! malformed message, is closed for good. The domain then continues without control by the
//! toolstack and without new devices.
//!
//! Several requests are sent together where that is possible: each way costs two switches between
//! domains.

use crate::machine::hypercall;
use crate::println;
use alloc::boxed::Box;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use tombolo_ring::xen::XenError;
use tombolo_ring::xen::bytes::{BytePage, STORE_REPLIES, STORE_REQUESTS};
use tombolo_ring::xen::store::{Content, Inbox, MAX_MESSAGE_BYTES, Request, StoreError, request};

/// How long a reply may take.
pub(super) const TIMEOUT_NS: u64 = 10_000_000_000;

/// What a request came to.
pub(crate) type Reply = Result<Vec<u8>, StoreError>;

/// The ring of the connection, and what came of it.
pub(super) struct Connection {
    page: BytePage<'static>,
    port: u32,
    inbox: Box<Inbox>,
    /// Number of the next request; 0 is for watch events.
    next: u32,
    /// Tokens of watches whose events came and were not asked for yet.
    events: Vec<String>,
    is_closed: bool,
}

/// Requests that are under way: bytes not yet written, replies so far.
pub(super) struct Asked {
    first: u32,
    bytes: Vec<u8>,
    written: usize,
    replies: Vec<Option<Reply>>,
}

impl Asked {
    /// All replies, where none is missing.
    pub(super) fn is_answered(&self) -> bool {
        self.replies.iter().all(Option::is_some)
    }

    /// The replies; an error for each that did not come.
    pub(super) fn into_replies(self) -> Vec<Reply> {
        self.replies.into_iter().map(|reply| reply.unwrap_or(Err(StoreError::Other))).collect()
    }
}

impl Connection {
    pub(super) fn new(page: BytePage<'static>, port: u32) -> Connection {
        Connection { page, port, inbox: Box::default(), next: 1, events: Vec::new(), is_closed: false }
    }

    pub(super) fn port(&self) -> u32 {
        self.port
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Ends the connection, and says why.
    pub(super) fn close(&mut self, why: &dyn core::fmt::Display) {
        if !self.is_closed {
            self.is_closed = true;
            println!("tombolo-cell: the connection to XenStore is closed: {why}");
        }
    }

    /// Puts requests together. One that does not fit is answered with [`StoreError::Invalid`] right
    /// here.
    pub(super) fn ask(&mut self, requests: &[Request<'_>]) -> Asked {
        let mut asked = Asked { first: self.next, bytes: Vec::new(), written: 0, replies: Vec::new() };
        let mut buffer = Box::new([0; MAX_MESSAGE_BYTES]);
        for what in requests {
            let fits = request(&mut buffer[..], self.next, 0, what);
            asked.replies.push(fits.is_err().then_some(Err(StoreError::Invalid)));
            asked.bytes.extend_from_slice(&buffer[..fits.unwrap_or(0)]);
            self.next = self.next.checked_add(1).unwrap_or(1);
        }
        asked
    }

    /// Moves bytes both ways. Replies that `asked` has no place for are of requests that were given
    /// up.
    pub(super) fn turn(&mut self, asked: Option<&mut Asked>) {
        if self.is_closed {
            return;
        }
        if let Err(error) = self.exchange(asked) {
            self.close(&error);
        }
    }

    fn exchange(&mut self, mut asked: Option<&mut Asked>) -> Result<(), XenError> {
        let mut has_moved = false;
        if let Some(asked) = &mut asked {
            let written = self.page.write(STORE_REQUESTS, &asked.bytes[asked.written..])?;
            asked.written += written;
            has_moved = written > 0;
        }
        loop {
            let read = self.page.read(STORE_REPLIES, self.inbox.room()?)?;
            self.inbox.filled(read);
            has_moved |= read > 0;
            if let Some(message) = self.inbox.message()? {
                let number = message.header.request;
                let reply = match message.content()? {
                    Content::Event { token, .. } => {
                        // One event per watch is enough: its user reads the nodes again.
                        if !self.events.iter().any(|had| had == token) {
                            self.events.push(token.to_string());
                        }
                        None
                    }
                    Content::Reply(payload) => Some(Ok(payload.to_vec())),
                    Content::Failed(error) => Some(Err(error)),
                };
                if let (Some(reply), Some(asked)) = (reply, &mut asked)
                    && let Some(place) = asked.replies.get_mut(number.wrapping_sub(asked.first) as usize)
                {
                    *place = Some(reply);
                }
                self.inbox.clear();
            } else if read == 0 {
                break;
            }
        }
        if has_moved {
            hypercall::send(self.port);
        }
        Ok(())
    }

    /// Whether events came that nothing has taken yet.
    pub(super) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Whether an event came for the watch with this token.
    pub(super) fn take_event(&mut self, token: &str) -> bool {
        let at = self.events.iter().position(|had| had == token);
        at.map(|at| self.events.swap_remove(at)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::dma;

    fn message(kind: u32, number: u32, payload: &[u8]) -> Vec<u8> {
        let words = [kind, number, 0, payload.len() as u32].map(u32::to_le_bytes);
        [&words.concat(), payload].concat()
    }

    #[test]
    fn an_event_that_comes_with_a_reply_is_not_forgotten() {
        let page = dma::alloc(4096);
        let mut connection = Connection::new(BytePage::new(page).unwrap(), 3);
        let daemon = BytePage::new(page).unwrap();
        let mut asked = connection.ask(&[Request::Read("state")]);
        connection.turn(Some(&mut asked));
        assert!(!asked.is_answered() && !connection.has_events());
        // One notification may announce both (xs_wire.h: XS_READ 2, XS_WATCH_EVENT 15).
        let both = [message(2, 1, b"4"), message(15, 0, b"backend/state\0vif0\0")].concat();
        assert_eq!(daemon.write(STORE_REPLIES, &both).unwrap(), both.len());
        connection.turn(Some(&mut asked));
        assert!(asked.is_answered() && connection.has_events());
        assert!(connection.take_event("vif0") && !connection.has_events());
    }
}
