//! A client of XenStore over a stream, for the control thread: it asks and waits for the answer.
//! Watch events that come in between wait for [`Store::take_events`].

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use tombolo_ring::xen::XenError;
use tombolo_ring::xen::store::{self, Content, Inbox, MAX_MESSAGE_BYTES, Request, StoreError};
use tombolo_shm::doorbell::Doorbell;

/// How long an answer may take. A xenstored that is busy takes milliseconds.
const ANSWER: Duration = Duration::from_secs(10);
/// Transactions that met another one are tried so many times.
const ATTEMPTS: usize = 50;

/// Why a request has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum AskError {
    /// XenStore refused it.
    #[error("{0}")]
    Refused(StoreError),
    /// What came is no message of XenStore's, or the request does not fit one.
    #[error("{0}")]
    Message(XenError),
    /// The connection failed, or there was no answer.
    #[error("the connection to XenStore: {0}")]
    Connection(Errno),
}

impl From<XenError> for AskError {
    fn from(error: XenError) -> Self {
        AskError::Message(error)
    }
}

impl From<Errno> for AskError {
    fn from(errno: Errno) -> Self {
        AskError::Connection(errno)
    }
}

impl AskError {
    /// Whether only this request failed, and the connection goes on.
    pub(super) fn is_refusal(&self) -> bool {
        matches!(self, AskError::Refused(_))
    }
}

/// A connection.
pub(super) struct Store {
    stream: OwnedFd,
    inbox: Box<Inbox>,
    number: u32,
    /// Tokens of watches that had an event.
    events: BTreeSet<String>,
    /// Whether an event counts, by its watch's token and the node that changed.
    counts: fn(&str, &str) -> bool,
    transaction: u32,
}

impl AsFd for Store {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Store {
    /// Over a stream that does not block.
    pub(super) fn new(stream: OwnedFd) -> Store {
        let (inbox, events) = (Box::new(Inbox::new()), BTreeSet::new());
        Store { stream, inbox, number: 0, events, counts: |_, _| true, transaction: 0 }
    }

    /// Only these events count: of which this is true for the token and the node.
    pub(super) fn hearing(stream: OwnedFd, counts: fn(&str, &str) -> bool) -> Store {
        Store { counts, ..Store::new(stream) }
    }

    /// Asks, and waits for the answer.
    pub(super) fn ask(&mut self, request: &Request<'_>) -> Result<Vec<u8>, AskError> {
        let mut message = [0; MAX_MESSAGE_BYTES];
        self.number = self.number.wrapping_add(1).max(1);
        let len = store::request(&mut message, self.number, self.transaction, request)?;
        let (mut rest, end) = (&message[..len], Instant::now() + ANSWER);
        while !rest.is_empty() {
            match rustix::io::write(&self.stream, rest) {
                Ok(written) => rest = &rest[written..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait_for(PollFlags::OUT, end)?,
                Err(errno) => return Err(errno.into()),
            }
        }
        loop {
            if let Some((number, answer)) = self.read_one()? {
                if number == self.number {
                    return answer.map_err(AskError::Refused);
                }
                // An answer to a request that was given up.
                continue;
            }
            self.wait_for(PollFlags::IN, end)?;
        }
    }

    fn wait_for(&self, what: PollFlags, end: Instant) -> Result<(), AskError> {
        let left = end.checked_duration_since(Instant::now()).ok_or(Errno::TIMEDOUT)?;
        let left = Timespec::try_from(left).map_err(|_| Errno::TIMEDOUT)?;
        match poll(&mut [PollFd::new(&self.stream, what)], Some(&left)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Reads what is there up to the end of one message: an answer, or `None` where nothing more is
    /// there now.
    #[allow(clippy::type_complexity)]
    fn read_one(&mut self) -> Result<Option<(u32, Result<Vec<u8>, StoreError>)>, AskError> {
        loop {
            match rustix::io::read(&self.stream, self.inbox.room()?) {
                Ok(0) => return Err(Errno::PIPE.into()),
                Ok(bytes) => self.inbox.filled(bytes),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
            let Some(message) = self.inbox.message()? else { continue };
            let number = message.header.request;
            let answer = match message.content()? {
                Content::Event { path, token } => {
                    if (self.counts)(token, path) {
                        self.events.insert(token.to_owned());
                    }
                    None
                }
                Content::Reply(payload) => Some(Ok(payload.to_vec())),
                Content::Failed(error) => Some(Err(error)),
            };
            self.inbox.clear();
            if let Some(answer) = answer {
                return Ok(Some((number, answer)));
            }
        }
    }

    /// Waits for an event, or until `doorbell` is rung, which is taken.
    pub(super) fn wait(&mut self, doorbell: &Doorbell) -> Result<(), AskError> {
        while self.events.is_empty() {
            // Answers that come now answer nothing.
            if self.read_one()?.is_some() {
                continue;
            }
            if !self.events.is_empty() {
                break;
            }
            let mut fds = [PollFd::new(&self.stream, PollFlags::IN), PollFd::new(doorbell, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
            if doorbell.take() {
                break;
            }
        }
        Ok(())
    }

    /// Forgets the events that came. What they are about is read again anyway.
    pub(super) fn take_events(&mut self) {
        self.events.clear();
    }

    /// Reads and forgets the events that have come, without waiting; whether there were any.
    pub(super) fn poll_events(&mut self) -> Result<bool, AskError> {
        // Answers that come now answer nothing.
        while self.read_one()?.is_some() {}
        Ok(!std::mem::take(&mut self.events).is_empty())
    }

    /// A node's value; `None` where there is none.
    pub(super) fn read(&mut self, path: &str) -> Result<Option<Vec<u8>>, AskError> {
        match self.ask(&Request::Read(path)) {
            Ok(value) => Ok(Some(value)),
            Err(AskError::Refused(StoreError::NoEntry)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A node's text; empty where there is none, or no text.
    pub(super) fn text(&mut self, path: &str) -> Result<String, AskError> {
        Ok(self.read(path)?.and_then(|value| String::from_utf8(value).ok()).unwrap_or_default())
    }

    /// A node's number; `None` where there is none, or no number.
    pub(super) fn number(&mut self, path: &str) -> Result<Option<u32>, AskError> {
        Ok(self.read(path)?.and_then(|value| store::number(&value)))
    }

    /// The names of a node's children.
    pub(super) fn children(&mut self, path: &str) -> Result<Vec<String>, AskError> {
        match self.ask(&Request::Directory(path)) {
            Ok(list) => Ok(store::names(&list).map(str::to_owned).collect()),
            Err(AskError::Refused(StoreError::NoEntry)) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Writes nodes below `folder`, if its node `guard` is still there: it goes with the device,
    /// and a write would make the device's folder again. Returns whether they were written.
    pub(super) fn write_below(
        &mut self,
        folder: &str,
        guard: &str,
        nodes: &[(&str, String)],
    ) -> Result<bool, AskError> {
        for _ in 0..ATTEMPTS {
            let id = self.ask(&Request::TransactionStart)?;
            self.transaction = store::number(&id).ok_or(AskError::Message(XenError::Payload))?;
            let written = self.write_inside(folder, guard, nodes);
            let ended = self.ask(&Request::TransactionEnd(matches!(written, Ok(true))));
            self.transaction = 0;
            match (written, ended) {
                (Err(error), _) => return Err(error),
                (Ok(false), _) => return Ok(false),
                (Ok(true), Ok(_)) => return Ok(true),
                (Ok(true), Err(AskError::Refused(StoreError::Again))) => {}
                (Ok(true), Err(error)) => return Err(error),
            }
        }
        Err(AskError::Refused(StoreError::Again))
    }

    fn write_inside(&mut self, folder: &str, guard: &str, nodes: &[(&str, String)]) -> Result<bool, AskError> {
        if self.read(&format!("{folder}/{guard}"))?.is_none() {
            return Ok(false);
        }
        for (name, value) in nodes {
            self.ask(&Request::Write(&format!("{folder}/{name}"), value.as_bytes()))?;
        }
        Ok(true)
    }
}
