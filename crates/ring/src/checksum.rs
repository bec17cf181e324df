//! The internet checksum (RFC 1071): the project's only implementation.

/// The one's complement sum of `bytes` as big-endian words, an odd last byte padded with zero; not
/// complemented.
#[inline]
pub fn sum(bytes: &[u8]) -> u16 {
    // The sum is the same for any word size and byte order, up to a swap at the end (RFC 1071 §2).
    // So wide words of the machine's own order are added, in a form that the compiler makes vector
    // code of. 64 KiB of 32-bit words cannot overflow 64 bits.
    let (words, rest) = bytes.as_chunks::<4>();
    let mut total: u64 = words.iter().map(|word| u32::from_le_bytes(*word) as u64).sum();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    total += u32::from_le_bytes(last) as u64;
    fold(total).swap_bytes()
}

/// The one's complement sum of two sums.
#[inline]
pub fn add(a: u16, b: u16) -> u16 {
    let (sum, carry) = a.overflowing_add(b);
    sum + u16::from(carry)
}

/// The checksum that `checksum` becomes when words whose [`sum`] is `old` are replaced by words
/// whose [`sum`] is `new` (RFC 1624, equation 3). A sum that was wrong stays wrong.
#[inline]
pub fn update(checksum: u16, old: u16, new: u16) -> u16 {
    !add(add(!checksum, !old), new)
}

#[inline]
fn fold(mut total: u64) -> u16 {
    total = (total & 0xffff_ffff) + (total >> 32);
    total = (total & 0xffff_ffff) + (total >> 32);
    total = (total & 0xffff) + (total >> 16);
    total = (total & 0xffff) + (total >> 16);
    total = (total & 0xffff) + (total >> 16);
    total as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    fn dull(bytes: &[u8]) -> u16 {
        let mut total = 0u32;
        for pair in bytes.chunks(2) {
            total += u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
            total = (total & 0xffff) + (total >> 16);
        }
        total as u16
    }

    #[test]
    fn it_is_the_dull_sum_at_every_length_and_for_extreme_bytes() {
        let mut state = 7u32;
        for len in (0..300).chain([1447, 1448, 1500, 65_535]) {
            let bytes: Vec<u8> = (0..len)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 24) as u8
                })
                .collect();
            assert_eq!(sum(&bytes), dull(&bytes), "len {len}");
            let ones = vec![0xff; len];
            assert_eq!(sum(&ones), dull(&ones), "ones, len {len}");
        }
    }

    #[test]
    fn an_update_gives_the_sum_of_the_changed_bytes() {
        let mut state = 11u32;
        let mut bytes = [0u8; 40];
        for round in 0..10_000 {
            for byte in &mut bytes {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *byte = (state >> 24) as u8;
            }
            let before = !sum(&bytes);
            let words = 2 * (1 + round % 8);
            let old = sum(&bytes[8..8 + words]);
            let with = [0x00, 0xff, state as u8][round % 3];
            bytes[8..8 + words].fill(with);
            assert_eq!(update(before, old, sum(&bytes[8..8 + words])), !sum(&bytes), "round {round}");
        }
    }

    #[test]
    fn the_example_of_rfc_1624() {
        // Section 4: 0x5555 becomes 0x3285 in a header with the checksum 0xdd2f. The next one must
        // not become 0xffff.
        assert_eq!(update(0xdd2f, 0x5555, 0x3285), 0x0000);
    }

    #[test]
    fn the_example_of_rfc_1071() {
        assert_eq!(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), 0xddf2);
    }
}
