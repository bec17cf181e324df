//! HTTP/1.1, as much as a small file server needs: request heads, response heads, the bytes of
//! `/bytes/N` (RFC 9112).

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// The longest request head that is taken.
pub const MAX_HEAD_BYTES: usize = 4096;
/// The largest N of `/bytes/N`.
pub const MAX_BODY_BYTES: u64 = 1 << 30;
/// Byte `i` of `/bytes/N` is `i` modulo this: a prime, so that no segment size is a multiple of it.
pub const PATTERN: usize = 251;

/// The statuses that are answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The answer carries what was asked for.
    Ok = 200,
    /// This is not HTTP, or N is too large.
    BadRequest = 400,
    /// Nothing has this path.
    NotFound = 404,
    /// Only GET and HEAD.
    MethodNotAllowed = 405,
    /// The client was too slow.
    Timeout = 408,
    /// A request with a body.
    ContentTooLarge = 413,
    /// A head longer than [`MAX_HEAD_BYTES`].
    HeadTooLarge = 431,
}

impl Status {
    /// The text beside the number.
    pub fn reason(self) -> &'static str {
        match self {
            Status::Ok => "OK",
            Status::BadRequest => "Bad Request",
            Status::NotFound => "Not Found",
            Status::MethodNotAllowed => "Method Not Allowed",
            Status::Timeout => "Request Timeout",
            Status::ContentTooLarge => "Content Too Large",
            Status::HeadTooLarge => "Request Header Fields Too Large",
        }
    }
}

/// What a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// `/`: a short fixed page.
    Page,
    /// `/bytes/N`.
    Bytes(u64),
}

/// A request that can be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The page or byte stream that was asked for.
    pub target: Target,
    /// HEAD: the answer without its body.
    pub head_only: bool,
    /// Whether the connection stays open.
    pub keep_alive: bool,
}

/// What a piece of input is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// The head is not complete.
    Partial,
    /// A head of so many bytes, with a request, or with the status that refuses it. In a refusal,
    /// `keep_alive` says whether the next request can be told from this one.
    Head {
        /// Length of the request head up to and including its empty line.
        bytes: usize,
        /// The request, or why not.
        request: Result<Request, Refusal>,
    },
}

/// Why a request is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The status that the response carries.
    pub status: Status,
    /// Whether the connection stays open.
    pub keep_alive: bool,
}

fn fatal(status: Status) -> Refusal {
    Refusal { status, keep_alive: false }
}

/// Looks for a request at the start of `input`.
pub fn parse(input: &[u8]) -> Parsed {
    // RFC 9112 §2.2: empty lines before a request are skipped.
    let skipped = input.iter().take_while(|b| matches!(b, b'\r' | b'\n')).count();
    let Some(end) = input[skipped..].windows(4).position(|w| w == b"\r\n\r\n") else {
        if input.len() < MAX_HEAD_BYTES {
            return Parsed::Partial;
        }
        return Parsed::Head { bytes: input.len(), request: Err(fatal(Status::HeadTooLarge)) };
    };
    let bytes = skipped + end + 4;
    if bytes > MAX_HEAD_BYTES {
        return Parsed::Head { bytes, request: Err(fatal(Status::HeadTooLarge)) };
    }
    Parsed::Head { bytes, request: head(&input[skipped..skipped + end + 2]) }
}

/// Each line of `bytes` ends with CR LF; one that ends with LF alone is refused.
fn head(bytes: &[u8]) -> Result<Request, Refusal> {
    let text = core::str::from_utf8(bytes).map_err(|_| fatal(Status::BadRequest))?;
    let mut lines = text.split_terminator('\n').map(|line| line.strip_suffix('\r'));
    let mut words = lines.next().flatten().unwrap_or_default().split(' ');
    let (Some(method), Some(path), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(fatal(Status::BadRequest));
    };
    let mut keep_alive = match version {
        "HTTP/1.1" => true,
        "HTTP/1.0" => false,
        _ => return Err(fatal(Status::BadRequest)),
    };
    if method.is_empty() || !method.bytes().all(|b| b.is_ascii_uppercase()) {
        return Err(fatal(Status::BadRequest));
    }
    let mut has_body = false;
    for line in lines {
        let Some((name, value)) = line.and_then(|line| line.split_once(':')) else {
            return Err(fatal(Status::BadRequest));
        };
        // RFC 9112 §5.1, §5.2: no space before the colon, no folded lines.
        if name.is_empty() || name.bytes().any(|b| b.is_ascii_whitespace()) || value.bytes().any(|b| b == 0) {
            return Err(fatal(Status::BadRequest));
        }
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            has_body |= value.parse::<u64>().map_err(|_| fatal(Status::BadRequest))? > 0;
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            has_body = true;
        } else if name.eq_ignore_ascii_case("connection") {
            for option in value.split(',').map(str::trim) {
                if option.eq_ignore_ascii_case("close") {
                    keep_alive = false;
                } else if option.eq_ignore_ascii_case("keep-alive") {
                    keep_alive = true;
                }
            }
        }
    }
    // Bodies are not read, so the connection cannot go on behind one.
    if has_body {
        return Err(fatal(Status::ContentTooLarge));
    }
    let head_only = match method {
        "GET" => false,
        "HEAD" => true,
        _ => return Err(Refusal { status: Status::MethodNotAllowed, keep_alive }),
    };
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    if !path.starts_with('/') {
        return Err(fatal(Status::BadRequest));
    }
    let refuse = |status| Err(Refusal { status, keep_alive });
    let target = match path.strip_prefix("/bytes/") {
        Some(number) if !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) => match number.parse() {
            Ok(n) if n <= MAX_BODY_BYTES => Target::Bytes(n),
            _ => return refuse(Status::BadRequest),
        },
        None if path == "/" => Target::Page,
        _ => return refuse(Status::NotFound),
    };
    Ok(Request { target, head_only, keep_alive })
}

/// Formats status line and headers, including the empty line that ends them.
pub fn response_head(status: Status, kind: &str, body_bytes: u64, keep_alive: bool) -> String {
    let connection = if keep_alive { "keep-alive" } else { "close" };
    let allow = if status == Status::MethodNotAllowed { "Allow: GET, HEAD\r\n" } else { "" };
    format!(
        "HTTP/1.1 {} {}\r\nServer: tombolo-cell\r\nContent-Type: {kind}\r\nContent-Length: {body_bytes}\r\n\
         {allow}Connection: {connection}\r\n\r\n",
        status as u16,
        status.reason(),
    )
}

/// A number of the pattern's bytes, enough to copy up to `len` of them from any offset.
pub fn pattern(len: usize) -> Vec<u8> {
    let whole = len + PATTERN;
    let mut bytes = Vec::with_capacity(whole);
    bytes.extend((0..PATTERN.min(whole)).map(|i| i as u8));
    // A whole number of periods each time but the last: copying is much faster than counting.
    while bytes.len() < whole {
        let more = bytes.len().min(whole - bytes.len());
        bytes.extend_from_within(..more);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(text: &str) -> Result<Request, Refusal> {
        match parse(text.as_bytes()) {
            Parsed::Head { bytes, request } => {
                assert_eq!(bytes, text.len());
                request
            }
            Parsed::Partial => panic!("{text:?} is a whole head"),
        }
    }

    fn status(text: &str) -> u16 {
        request(text).map_or_else(|refusal| refusal.status as u16, |_| 200)
    }

    #[test]
    fn requests_that_are_answered() {
        let page = Request { target: Target::Page, head_only: false, keep_alive: true };
        assert_eq!(request("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), Ok(page));
        assert_eq!(request("\r\nGET /?q=1 HTTP/1.1\r\n\r\n"), Ok(page));
        let closed = Request { keep_alive: false, ..page };
        assert_eq!(request("GET / HTTP/1.0\r\n\r\n"), Ok(closed));
        assert_eq!(request("GET / HTTP/1.1\r\nConnection: x, Close\r\n\r\n"), Ok(closed));
        assert_eq!(request("GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"), Ok(page));
        let bytes = Request { target: Target::Bytes(1 << 30), head_only: true, keep_alive: true };
        assert_eq!(request("HEAD /bytes/1073741824 HTTP/1.1\r\nContent-Length: 0\r\n\r\n"), Ok(bytes));
    }

    #[test]
    fn requests_that_are_refused() {
        for (text, want) in [
            ("GET /bytes/1073741825 HTTP/1.1\r\n\r\n", 400),
            ("GET /bytes/99999999999999999999999 HTTP/1.1\r\n\r\n", 400),
            ("GET /bytes/ HTTP/1.1\r\n\r\n", 404),
            ("GET /bytes/-1 HTTP/1.1\r\n\r\n", 404),
            ("GET /bytes/+1 HTTP/1.1\r\n\r\n", 404),
            ("GET /other HTTP/1.1\r\n\r\n", 404),
            ("POST / HTTP/1.1\r\n\r\n", 405),
            ("POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 413),
            ("GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
            ("GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
            ("GET / HTTP/2.0\r\n\r\n", 400),
            ("GET  / HTTP/1.1\r\n\r\n", 400),
            ("GET /\r\n\r\n", 400),
            ("get / HTTP/1.1\r\n\r\n", 400),
            ("GET x HTTP/1.1\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\n folded\r\n\r\n", 400),
            ("GET / HTTP/1.1\nHost: a\r\n\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: a\nAccept: b\r\n\r\n", 400),
            ("GET /a\nb HTTP/1.1\r\n\r\n", 400),
            ("\u{1}\u{2}\r\n\r\n", 400),
        ] {
            assert_eq!(status(text), want, "{text:?}");
        }
        assert!(!request("GET / HTTP/2.0\r\n\r\n").unwrap_err().keep_alive);
        assert!(request("GET /other HTTP/1.1\r\n\r\n").unwrap_err().keep_alive);
    }

    #[test]
    fn a_head_is_partial_at_every_length_and_has_a_limit() {
        let text = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
        for len in 0..text.len() {
            assert_eq!(parse(&text[..len]), Parsed::Partial, "{len}");
        }
        let long = std::vec![b'x'; MAX_HEAD_BYTES];
        assert_eq!(parse(&long[..MAX_HEAD_BYTES - 1]), Parsed::Partial);
        let Parsed::Head { request: Err(refusal), .. } = parse(&long) else { panic!("not refused") };
        assert_eq!(refusal.status, Status::HeadTooLarge);
    }

    #[test]
    fn a_second_request_stays() {
        let text = b"GET / HTTP/1.1\r\n\r\nGET /bytes/1 HTTP/1.1\r\n\r\n";
        let Parsed::Head { bytes, .. } = parse(text) else { panic!("a whole head") };
        assert_eq!(&text[bytes..bytes + 10], b"GET /bytes");
    }

    #[test]
    fn the_pattern_holds_at_every_offset() {
        let bytes = pattern(1000);
        for offset in [0usize, 1, 250, 251, 252, 100_000] {
            let at = offset % PATTERN;
            for (i, byte) in bytes[at..at + 1000].iter().enumerate() {
                assert_eq!(usize::from(*byte), (offset + i) % PATTERN);
            }
        }
    }
}
