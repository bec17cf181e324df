//! A typed request's bytes: which method, and its message.
//!
//! ```text
//!  0        1        2                4              4 + n
//!  +--------+--------+----------------+--------------+----------------------+
//!  | version| 0      | n, u16 LE      | method, UTF-8| message, protobuf    |
//!  +--------+--------+----------------+--------------+----------------------+
//! ```
//! The method is "package.Service/Method", as gRPC names it without the first slash.

use prost::Message;

use crate::status::{Code, Status};

/// Version of the layout.
const VERSION: u8 = 1;
const HEAD_BYTES: usize = 4;

/// A request for a method. `tombolo-rpc-build` checks that its name is not longer than its length
/// can say.
pub fn encode(method: &str, message: &impl Message) -> Vec<u8> {
    let len = u16::try_from(method.len()).unwrap_or(u16::MAX);
    let mut bytes = Vec::with_capacity(HEAD_BYTES + method.len() + message.encoded_len());
    bytes.extend([VERSION, 0]);
    bytes.extend(len.to_le_bytes());
    bytes.extend(method.as_bytes());
    message.encode_raw(&mut bytes);
    bytes
}

/// The service, the method and the message's bytes of a request.
///
/// # Errors
/// [`Code::InvalidArgument`], with what is wrong.
pub fn parse(bytes: &[u8]) -> Result<(&str, &str, &[u8]), Status> {
    let wrong = |what: &str| Status::new(Code::InvalidArgument, format!("not a request of a typed service: {what}"));
    let (head, rest) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or_else(|| wrong("shorter than its head"))?;
    let [version, zero, low, high] = *head;
    if (version, zero) != (VERSION, 0) {
        return Err(wrong(&format!("version {version}.{zero}, expected {VERSION}.0")));
    }
    let len = usize::from(u16::from_le_bytes([low, high]));
    let (name, message) = rest.split_at_checked(len).ok_or_else(|| wrong("shorter than its method's name"))?;
    let name = std::str::from_utf8(name).map_err(|_| wrong("its method's name is not UTF-8"))?;
    let (service, method) = name.split_once('/').ok_or_else(|| wrong("its method has no service"))?;
    Ok((service, method, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_these_bytes() {
        // A message with one field 1, a string.
        let bytes = encode("p.S/M", &String::from("hi"));
        assert_eq!(bytes, b"\x01\0\x05\0p.S/M\x0a\x02hi");
        assert_eq!(parse(&bytes), Ok(("p.S", "M", &b"\x0a\x02hi"[..])));
    }

    #[test]
    fn what_is_cut_or_no_request_is_told_apart() {
        let bytes = encode("p.S/M", &());
        for len in 0..bytes.len() {
            assert_eq!(parse(&bytes[..len]).unwrap_err().code(), Code::InvalidArgument, "{len} bytes");
        }
        assert_eq!(parse(&bytes), Ok(("p.S", "M", &[][..])));
        for (at, value) in [(0, 2), (1, 1), (2, 255), (3, 255), (4, 0xff), (7, b'-')] {
            let mut wrong = bytes.clone();
            wrong[at] = value;
            assert!(parse(&wrong).is_err(), "{value:#x} at {at}");
        }
        assert!(parse(b"6 * 7").is_err());
    }
}
