//! Messages of XenStore (xen/include/public/io/xs_wire.h, docs/misc/xenstore.txt).
//!
//! ```text
//!   0        4            8             12       16
//!   | type   | request    | transaction | length | payload (up to 4096 bytes) …
//! ```
//!
//! Little-endian. A reply repeats type and request of what it answers; its type is ERROR where that
//! failed. Watch events come in between, with request 0. Paths and tokens end with a NUL; the value
//! of a write does not.
//!
//! [`request`] puts a message together, [`Inbox`] takes a stream of bytes apart, [`Message`] says
//! what a message holds. All lengths are bounded by the specification's, and checked.

use super::XenError;

mod field {
    use core::ops::Range;
    pub(super) const TYPE: Range<usize> = 0..4;
    pub(super) const REQUEST: Range<usize> = 4..8;
    pub(super) const TRANSACTION: Range<usize> = 8..12;
    pub(super) const LEN: Range<usize> = 12..16;
}

// --- the header's ---

/// Bytes of a message's header.
pub const HEADER_BYTES: usize = field::LEN.end;
/// XENSTORE_PAYLOAD_MAX.
pub const MAX_PAYLOAD_BYTES: usize = 4096;
/// Header and largest payload together.
pub const MAX_MESSAGE_BYTES: usize = HEADER_BYTES + MAX_PAYLOAD_BYTES;
/// Most bytes of an absolute path, with its NUL.
pub const MAX_PATH_BYTES: usize = 3072;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Kind {
    /// The names of a node's children.
    Directory = 1,
    /// A node's value.
    Read = 2,
    /// Who may read and write a node.
    GetPermissions = 3,
    /// Asks for events about a node and what is below it.
    Watch = 4,
    /// Ends that.
    Unwatch = 5,
    /// Starts a transaction; the reply has its number as text.
    TransactionStart = 6,
    /// Ends one: "T" commits, "F" gives up.
    TransactionEnd = 7,
    /// The path of a domain's nodes.
    GetDomainPath = 10,
    /// Writes a node, and makes it and those above it.
    Write = 11,
    /// Makes a node without a value.
    MakeDirectory = 12,
    /// Removes a node and all below it.
    Remove = 13,
    /// Sets who may read and write a node.
    SetPermissions = 14,
    /// Not a reply: something changed below a watched node.
    WatchEvent = 15,
    /// The request failed; the payload names the error.
    Error = 16,
    /// Whether a domain is there.
    IsDomainIntroduced = 17,
    /// Ends all watches of this connection.
    ResetWatches = 21,
    /// As [`Kind::Directory`], in pieces, for nodes with many children.
    DirectoryPart = 22,
}

impl Kind {
    const ALL: [Kind; 17] = [
        Kind::Directory,
        Kind::Read,
        Kind::GetPermissions,
        Kind::Watch,
        Kind::Unwatch,
        Kind::TransactionStart,
        Kind::TransactionEnd,
        Kind::GetDomainPath,
        Kind::Write,
        Kind::MakeDirectory,
        Kind::Remove,
        Kind::SetPermissions,
        Kind::WatchEvent,
        Kind::Error,
        Kind::IsDomainIntroduced,
        Kind::ResetWatches,
        Kind::DirectoryPart,
    ];

    fn parse(got: u32) -> Result<Kind, XenError> {
        Kind::ALL.into_iter().find(|kind| *kind as u32 == got).ok_or(XenError::MessageType { got })
    }
}

/// A message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Operation, event or error.
    pub kind: Kind,
    /// The request's number; 0 in watch events.
    pub request: u32,
    /// The transaction's number; 0 outside of one.
    pub transaction: u32,
    /// Length of the payload in bytes.
    pub len: u32,
}

impl Header {
    /// The header in a message's first bytes.
    ///
    /// # Errors
    /// [`XenError::MessageTooLong`], [`XenError::MessageType`].
    pub fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Header, XenError> {
        let word = |at: core::ops::Range<usize>| {
            u32::from_le_bytes([bytes[at.start], bytes[at.start + 1], bytes[at.start + 2], bytes[at.start + 3]])
        };
        let len = word(field::LEN);
        if len as usize > MAX_PAYLOAD_BYTES {
            return Err(XenError::MessageTooLong { len });
        }
        let kind = Kind::parse(word(field::TYPE))?;
        Ok(Header { kind, request: word(field::REQUEST), transaction: word(field::TRANSACTION), len })
    }

    /// Serialises into the little-endian layout of the wire.
    pub fn emit(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[field::TYPE].copy_from_slice(&(self.kind as u32).to_le_bytes());
        bytes[field::REQUEST].copy_from_slice(&self.request.to_le_bytes());
        bytes[field::TRANSACTION].copy_from_slice(&self.transaction.to_le_bytes());
        bytes[field::LEN].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }
}

/// What to ask XenStore. Paths, tokens and permissions must not hold a NUL, which [`request`]
/// checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// The names of a node's children.
    Directory(&'a str),
    /// As `Directory`, from this byte of the list on.
    DirectoryPart(&'a str, u32),
    /// A node's value.
    Read(&'a str),
    /// Who may read and write a node.
    GetPermissions(&'a str),
    /// Asks for events with a token; the first one comes at once.
    Watch(&'a str, &'a str),
    /// Ends the watch with this path and token.
    Unwatch(&'a str, &'a str),
    /// Answered with the number that later requests carry in their header.
    TransactionStart,
    /// Commits a transaction (`true`), or gives it up.
    TransactionEnd(bool),
    /// The path of a domain's nodes.
    GetDomainPath(u16),
    /// Writes a node.
    Write(&'a str, &'a [u8]),
    /// Makes a node.
    MakeDirectory(&'a str),
    /// Removes a node and all below it.
    Remove(&'a str),
    /// Sets who may read and write a node: its owner and the right of all others first, such as
    /// "n0", then "r3".
    SetPermissions(&'a str, &'a [&'a str]),
    /// Whether a domain is there.
    IsDomainIntroduced(u16),
    /// Ends all watches of this connection.
    ResetWatches,
}

/// Appends to a buffer, and goes on counting where it is full.
struct Writer<'b> {
    buffer: &'b mut [u8],
    len: usize,
    nul_inside: bool,
}

impl Writer<'_> {
    fn bytes(&mut self, bytes: &[u8]) {
        if let Some(room) = self.buffer.get_mut(self.len..self.len + bytes.len()) {
            room.copy_from_slice(bytes);
        }
        self.len += bytes.len();
    }

    fn text(&mut self, text: &str) {
        self.nul_inside |= text.bytes().any(|byte| byte == 0);
        self.bytes(text.as_bytes());
        self.bytes(&[0]);
    }

    fn number(&mut self, number: u32) {
        let mut digits = [0; 10];
        let (mut at, mut rest) = (digits.len(), number);
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.bytes(&digits[at..]);
        self.bytes(&[0]);
    }
}

/// Writes the message that asks `what`, as request `number` and inside `transaction` (0 for none),
/// to the start of `buffer`. Returns its length in bytes.
///
/// # Errors
/// [`XenError::NoRoom`] where it does not fit the buffer or is longer than XenStore allows,
/// [`XenError::Payload`] where a text holds a NUL.
pub fn request(buffer: &mut [u8], number: u32, transaction: u32, what: &Request<'_>) -> Result<usize, XenError> {
    let mut to = Writer { buffer, len: HEADER_BYTES, nul_inside: false };
    let kind = match *what {
        Request::Directory(path) => {
            to.text(path);
            Kind::Directory
        }
        Request::DirectoryPart(path, offset) => {
            to.text(path);
            to.number(offset);
            Kind::DirectoryPart
        }
        Request::Read(path) => {
            to.text(path);
            Kind::Read
        }
        Request::GetPermissions(path) => {
            to.text(path);
            Kind::GetPermissions
        }
        Request::Watch(path, token) => {
            to.text(path);
            to.text(token);
            Kind::Watch
        }
        Request::Unwatch(path, token) => {
            to.text(path);
            to.text(token);
            Kind::Unwatch
        }
        Request::TransactionStart => {
            to.text("");
            Kind::TransactionStart
        }
        Request::TransactionEnd(commit) => {
            to.text(if commit { "T" } else { "F" });
            Kind::TransactionEnd
        }
        Request::GetDomainPath(domain) => {
            to.number(domain.into());
            Kind::GetDomainPath
        }
        Request::Write(path, value) => {
            to.text(path);
            to.bytes(value);
            Kind::Write
        }
        Request::MakeDirectory(path) => {
            to.text(path);
            Kind::MakeDirectory
        }
        Request::Remove(path) => {
            to.text(path);
            Kind::Remove
        }
        Request::SetPermissions(path, permissions) => {
            to.text(path);
            permissions.iter().for_each(|permission| to.text(permission));
            Kind::SetPermissions
        }
        Request::IsDomainIntroduced(domain) => {
            to.number(domain.into());
            Kind::IsDomainIntroduced
        }
        Request::ResetWatches => {
            to.text("");
            Kind::ResetWatches
        }
    };
    let Writer { buffer, len, nul_inside } = to;
    if nul_inside {
        return Err(XenError::Payload);
    }
    if len > buffer.len() || len > MAX_MESSAGE_BYTES {
        return Err(XenError::NoRoom { needed: len });
    }
    let header = Header { kind, request: number, transaction, len: (len - HEADER_BYTES) as u32 };
    buffer[..HEADER_BYTES].copy_from_slice(&header.emit());
    Ok(len)
}

/// An error that XenStore reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// The node does not exist (ENOENT).
    #[error("no such node in XenStore")]
    NoEntry,
    /// Somebody else changed what the transaction had read: try again.
    #[error("XenStore's transaction conflicts with another one")]
    Again,
    /// This domain may not access the node (EACCES).
    #[error("XenStore does not allow that to this domain")]
    Access,
    /// A limit of this domain's is reached: nodes, watches, transactions or memory.
    #[error("a limit of this domain's in XenStore is reached")]
    Quota,
    /// The node exists already (EEXIST).
    #[error("the node is in XenStore already")]
    Exists,
    /// A request that makes no sense.
    #[error("XenStore says that the request is invalid")]
    Invalid,
    /// Every errno text without a variant of its own.
    #[error("XenStore reports an error")]
    Other,
}

impl StoreError {
    fn parse(name: &[u8]) -> StoreError {
        match name {
            b"ENOENT" => StoreError::NoEntry,
            b"EAGAIN" => StoreError::Again,
            b"EACCES" | b"EPERM" | b"EROFS" => StoreError::Access,
            b"ENOSPC" | b"ENOMEM" | b"EBUSY" | b"E2BIG" => StoreError::Quota,
            b"EEXIST" => StoreError::Exists,
            b"EINVAL" => StoreError::Invalid,
            _ => StoreError::Other,
        }
    }
}

/// A message that came from XenStore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Type, numbers and length.
    pub header: Header,
    /// Its payload, of the header's length.
    pub payload: &'a [u8],
}

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// The answer to a request: its payload, without the NUL behind it where it is text.
    Reply(&'a [u8]),
    /// XenStore refused the request.
    Failed(StoreError),
    /// Something changed at `path`, or below it, or above it.
    Event {
        /// Where. What the watch was set on, or something below it.
        path: &'a str,
        /// The token that the watch was set with.
        token: &'a str,
    },
}

/// The bytes up to the first NUL or the end, and what is behind it.
fn until_nul(bytes: &[u8]) -> (&[u8], &[u8]) {
    match bytes.iter().position(|byte| *byte == 0) {
        Some(at) => (&bytes[..at], &bytes[at + 1..]),
        None => (bytes, &[]),
    }
}

impl<'a> Message<'a> {
    /// What it says.
    ///
    /// # Errors
    /// [`XenError::Payload`] for a watch event without path and token.
    pub fn content(&self) -> Result<Content<'a>, XenError> {
        match self.header.kind {
            Kind::Error => Ok(Content::Failed(StoreError::parse(until_nul(self.payload).0))),
            Kind::WatchEvent => {
                let (path, rest) = until_nul(self.payload);
                let (token, _) = until_nul(rest);
                let text = |bytes| core::str::from_utf8(bytes).map_err(|_| XenError::Payload);
                // Both end with a NUL, so there is something behind the path at least.
                if path.is_empty() || rest.is_empty() {
                    return Err(XenError::Payload);
                }
                Ok(Content::Event { path: text(path)?, token: text(token)? })
            }
            // Values have no NUL of their own; a node can hold one at its end, which Xen's own
            // tools do not strip.
            Kind::Read => Ok(Content::Reply(self.payload)),
            _ => Ok(Content::Reply(self.payload.strip_suffix(&[0]).unwrap_or(self.payload))),
        }
    }
}

/// The names in the reply to [`Request::Directory`]. Names that are not text are left out.
pub fn names(reply: &[u8]) -> impl Iterator<Item = &str> {
    reply.split(|byte| *byte == 0).filter_map(|name| core::str::from_utf8(name).ok()).filter(|name| !name.is_empty())
}

/// A number in decimal, as nodes hold it; `None` for anything else, and for more than `u32` holds.
pub fn number(value: &[u8]) -> Option<u32> {
    let digits = value.strip_suffix(&[0]).unwrap_or(value);
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    digits.iter().try_fold(0u32, |sum, digit| sum.checked_mul(10)?.checked_add(u32::from(digit - b'0')))
}

/// Takes a stream of bytes from XenStore apart into messages. Holds one message at most.
#[derive(Clone, Debug)]
pub struct Inbox {
    buffer: [u8; MAX_MESSAGE_BYTES],
    filled: usize,
}

impl Default for Inbox {
    fn default() -> Self {
        Inbox::new()
    }
}

impl Inbox {
    /// At the start of a message.
    pub const fn new() -> Self {
        Inbox { buffer: [0; MAX_MESSAGE_BYTES], filled: 0 }
    }

    /// Where the next bytes go, and no more than the message lacks: never empty while it is not
    /// complete. [`Inbox::filled`] says how many came.
    pub fn room(&mut self) -> Result<&mut [u8], XenError> {
        let end = self.end()?;
        Ok(&mut self.buffer[self.filled..end])
    }

    /// `bytes` came into [`Inbox::room`].
    pub fn filled(&mut self, bytes: usize) {
        self.filled = (self.filled + bytes).min(MAX_MESSAGE_BYTES);
    }

    /// Where the header ends, or the message once the header is there.
    fn end(&self) -> Result<usize, XenError> {
        match self.header()? {
            // At most MAX_MESSAGE_BYTES, as `parse` checked.
            Some(header) => Ok(HEADER_BYTES + header.len as usize),
            None => Ok(HEADER_BYTES),
        }
    }

    fn header(&self) -> Result<Option<Header>, XenError> {
        match self.buffer.first_chunk() {
            Some(bytes) if self.filled >= HEADER_BYTES => Header::parse(bytes).map(Some),
            _ => Ok(None),
        }
    }

    /// The message, if it is complete; [`Inbox::clear`] makes room for the next one.
    ///
    /// # Errors
    /// As [`Header::parse`]. The stream cannot go on after that.
    pub fn message(&self) -> Result<Option<Message<'_>>, XenError> {
        let Some(header) = self.header()? else { return Ok(None) };
        let end = HEADER_BYTES + header.len as usize;
        Ok((self.filled >= end).then(|| Message { header, payload: &self.buffer[HEADER_BYTES..end] }))
    }

    /// Forgets the message.
    pub fn clear(&mut self) {
        self.filled = 0;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::string::ToString;
    use std::vec::Vec;

    fn ask(what: &Request<'_>) -> Vec<u8> {
        let mut buffer = [0xa5; MAX_MESSAGE_BYTES];
        let len = request(&mut buffer, 7, 9, what).unwrap();
        assert!(buffer[len..].iter().all(|byte| *byte == 0xa5));
        buffer[..len].to_vec()
    }

    #[test]
    fn golden_requests() {
        let path = "/local/domain/0";
        let cases: [(Request<'_>, u8, &[u8]); 15] = [
            (Request::Directory(path), 1, b"/local/domain/0\0"),
            (Request::DirectoryPart(path, 1020), 22, b"/local/domain/0\x001020\0"),
            (Request::Read("name"), 2, b"name\0"),
            (Request::GetPermissions("name"), 3, b"name\0"),
            (Request::Watch("@releaseDomain", "gone"), 4, b"@releaseDomain\0gone\0"),
            (Request::Unwatch("a", "b"), 5, b"a\0b\0"),
            (Request::TransactionStart, 6, b"\0"),
            (Request::TransactionEnd(true), 7, b"T\0"),
            (Request::TransactionEnd(false), 7, b"F\0"),
            (Request::GetDomainPath(12), 10, b"12\0"),
            (Request::Write("device/vif/0/state", b"4"), 11, b"device/vif/0/state\x004"),
            (Request::MakeDirectory("a"), 12, b"a\0"),
            (Request::Remove("a"), 13, b"a\0"),
            (Request::SetPermissions("a", &["n0", "r3"]), 14, b"a\0n0\0r3\0"),
            (Request::ResetWatches, 21, b"\0"),
        ];
        for (what, kind, payload) in cases {
            let mut golden = std::vec![kind, 0, 0, 0, 7, 0, 0, 0, 9, 0, 0, 0, payload.len() as u8, 0, 0, 0];
            golden.extend_from_slice(payload);
            assert_eq!(ask(&what), golden, "{what:?}");
        }
        assert_eq!(ask(&Request::IsDomainIntroduced(0))[..], *b"\x11\0\0\0\x07\0\0\0\x09\0\0\0\x02\0\0\x000\0");
    }

    #[test]
    fn requests_that_do_not_fit_are_refused() {
        let long = "x".repeat(MAX_PAYLOAD_BYTES);
        let mut buffer = [0; 2 * MAX_MESSAGE_BYTES];
        let error = XenError::NoRoom { needed: MAX_MESSAGE_BYTES + 1 };
        assert_eq!(request(&mut buffer, 1, 0, &Request::Read(&long)), Err(error));
        assert_eq!(request(&mut buffer, 1, 0, &Request::Read(&long[1..])), Ok(MAX_MESSAGE_BYTES));
        for len in 0..19 {
            let error = XenError::NoRoom { needed: 19 };
            assert_eq!(request(&mut buffer[..len], 1, 0, &Request::Read("ab")), Err(error));
        }
        assert_eq!(request(&mut buffer, 1, 0, &Request::Read("a\0b")), Err(XenError::Payload));
    }

    fn message(kind: u32, request: u32, payload: &[u8]) -> Vec<u8> {
        let words = [kind, request, 0, payload.len() as u32];
        let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.extend_from_slice(payload);
        bytes
    }

    #[test]
    fn a_stream_is_taken_apart_however_it_arrives() {
        let mut stream = message(2, 3, b"4");
        stream.extend(message(15, 0, b"backend/vif/3/0/state\0token\0"));
        stream.extend(message(16, 4, b"ENOENT\0"));
        stream.extend(message(4, 5, b"OK\0"));
        stream.extend(message(2, 6, b""));
        let wanted = [
            (3, Content::Reply(&b"4"[..])),
            (0, Content::Event { path: "backend/vif/3/0/state", token: "token" }),
            (4, Content::Failed(StoreError::NoEntry)),
            (5, Content::Reply(b"OK")),
            (6, Content::Reply(b"")),
        ];
        for step in 1..stream.len() {
            let (mut inbox, mut rest, mut wanted) = (Inbox::new(), &stream[..], wanted.iter());
            while !rest.is_empty() {
                let room = inbox.room().unwrap();
                let n = room.len().min(step).min(rest.len());
                assert!(n > 0);
                room[..n].copy_from_slice(&rest[..n]);
                inbox.filled(n);
                rest = &rest[n..];
                if let Some(message) = inbox.message().unwrap() {
                    assert_eq!(Some(&(message.header.request, message.content().unwrap())), wanted.next());
                    inbox.clear();
                }
            }
            assert_eq!(wanted.next(), None);
        }
    }

    #[test]
    fn impossible_messages_are_refused() {
        let check = |bytes: &[u8], error| {
            let mut inbox = Inbox::new();
            inbox.room().unwrap().copy_from_slice(&bytes[..HEADER_BYTES]);
            inbox.filled(HEADER_BYTES);
            assert_eq!(inbox.message(), Err(error));
            assert_eq!(inbox.room().err(), Some(error));
        };
        let mut long = message(2, 1, b"");
        long[12..14].copy_from_slice(&4097u16.to_le_bytes());
        check(&long, XenError::MessageTooLong { len: 4097 });
        for got in [0, 8, 9, 18, 23, 0xffff, u32::MAX] {
            check(&message(got, 1, b""), XenError::MessageType { got });
        }
        for payload in [&b""[..], b"\0", b"path", b"path\0", b"\0token\0", b"\xff\0token\0"] {
            let header = Header { kind: Kind::WatchEvent, request: 0, transaction: 0, len: payload.len() as u32 };
            assert_eq!(Message { header, payload }.content(), Err(XenError::Payload), "{payload:?}");
        }
        let header = Header { kind: Kind::WatchEvent, request: 0, transaction: 0, len: 0 };
        let event = Message { header, payload: b"path\0\0" }.content();
        assert_eq!(event, Ok(Content::Event { path: "path", token: "" }));
        assert_eq!(Kind::ALL.map(|kind| Kind::parse(kind as u32)), Kind::ALL.map(Ok));
    }

    #[test]
    fn names_and_numbers() {
        assert!(names(b"0\x001\0\xff\0queue-2").eq(["0", "1", "queue-2"]));
        assert_eq!(names(b"").count(), 0);
        for (text, value) in [("0", Some(0)), ("4294967295", Some(u32::MAX)), ("07\0", Some(7)), ("4294967296", None)] {
            assert_eq!(number(text.as_bytes()), value, "{text}");
        }
        for text in ["", "-1", "+1", "1 ", "0x1", "\0"] {
            assert_eq!(number(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(StoreError::parse(b"EAGAIN").to_string(), "XenStore's transaction conflicts with another one");
    }
}
