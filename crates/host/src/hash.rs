//! A hash that is the same in each version and on each machine, for what must not change from one
//! start to the next.

/// FNV-1a of 64 bits.
pub(crate) fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// The same of words, each with a zero byte behind it.
pub(crate) fn fnv1a_of_words(words: &[&str]) -> u64 {
    fnv1a(words.iter().flat_map(|word| word.bytes().chain([0])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_the_published_test_vectors() {
        // draft-eastlake-fnv, appendix C.
        assert_eq!(fnv1a([]), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(*b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(*b"foobar"), 0x8594_4171_f739_67e8);
        assert_eq!(fnv1a_of_words(&["foo", "bar"]), fnv1a(*b"foo\0bar\0"));
    }
}
