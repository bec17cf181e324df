//! A range of IPv4 addresses on the command line: `10.88.0.10-10.88.0.73`, both ends of it
//! included, or one address.

use core::net::Ipv4Addr;

/// Most addresses of a range.
pub const MOST: u32 = 4096;

/// The addresses that `text` names; `None` where it names none, more than [`MOST`], or has its ends
/// the wrong way round.
pub fn range(text: &str) -> Option<impl Iterator<Item = Ipv4Addr>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last): (Ipv4Addr, Ipv4Addr) = (first.parse().ok()?, last.parse().ok()?);
    let (first, last) = (first.to_bits(), last.to_bits());
    (first <= last && last - first < MOST).then(|| (first..=last).map(Ipv4Addr::from_bits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    #[test]
    fn both_ends_belong_to_a_range() {
        let addresses: Vec<_> = range("10.0.0.254-10.0.1.1").unwrap().map(|a| a.octets()).collect();
        assert_eq!(addresses, [[10, 0, 0, 254], [10, 0, 0, 255], [10, 0, 1, 0], [10, 0, 1, 1]]);
        assert_eq!(range("10.0.0.7").unwrap().count(), 1);
        assert_eq!(range("0.0.0.0-0.0.15.255").unwrap().count(), MOST as usize);
        assert_eq!(range("255.255.255.254-255.255.255.255").unwrap().count(), 2);
    }

    #[test]
    fn what_is_no_range_is_none() {
        for text in
            ["", "-", "10.0.0.1-", "-10.0.0.1", "10.0.0.2-10.0.0.1", "10.0.0.1-10.0.0.300", "0.0.0.0-0.0.16.0", "a-b"]
        {
            assert!(range(text).is_none(), "{text}");
        }
    }
}
