//! Numbers on the command line: what is expected is said where something else was found.

use std::time::Duration;

/// A number of things, from 1 on.
pub(crate) fn count(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a whole number of at least 1, such as 10".into())
}

/// A place in a list, from 1 on.
pub(crate) fn place(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|n| *n > 0).ok_or_else(|| "expected a number from 1 on".into())
}

/// A number of things that a section of a file has, which is judged there.
pub(crate) fn whole(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}, such as 2", u32::MAX))
}

/// A span of time in whole milliseconds.
pub(crate) fn milliseconds(text: &str) -> Result<Duration, String> {
    let ms = text.parse().map_err(|_| "expected milliseconds as a whole number, such as 500".to_string());
    ms.map(Duration::from_millis)
}

/// A span of time in seconds, such as "5" or "0.5".
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.strip_suffix('s').unwrap_or(text).parse::<f64>().ok().filter(|s| *s > 0.0 && *s <= 1e9);
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected seconds, such as 5 or 0.5".into())
}

/// A span of time with its unit: "5ms" and the like.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit_ns = match &text[digits.len()..] {
        "ns" => 1.0,
        "us" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        _ => return Err("expected a number with ns, us, ms or s, such as 5ms".into()),
    };
    let number: f64 =
        digits.parse().map_err(|_| format!("\"{digits}\" is not a number; expected a time such as 5ms"))?;
    let ns = number * unit_ns;
    if !(0.0..1e19).contains(&ns) {
        return Err("expected at least 0 and less than 300 years".into());
    }
    Ok(Duration::from_nanos(ns as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_milliseconds_say_what_they_expect() {
        assert_eq!((count("1"), milliseconds("500")), (Ok(1), Ok(Duration::from_millis(500))));
        for text in ["0", "-1", "x", "", "1.5", "1e30"] {
            assert!(count(text).unwrap_err().starts_with("expected"), "{text}");
        }
        for text in ["-1", "x", "1.5", "5ms"] {
            assert!(milliseconds(text).unwrap_err().starts_with("expected"), "{text}");
        }
    }

    #[test]
    fn places_and_whole_numbers_say_what_they_expect() {
        assert_eq!((place("1"), whole("0")), (Ok(1), Ok(0)));
        for text in ["0", "-1", "x", ""] {
            assert!(place(text).unwrap_err().starts_with("expected"), "{text}");
        }
        for text in ["-1", "x", "1.5", "5000000000"] {
            assert!(whole(text).unwrap_err().starts_with("expected"), "{text}");
        }
    }

    #[test]
    fn durations_are_numbers_with_a_unit() {
        for (text, ns) in [("5ms", 5_000_000), ("1.5s", 1_500_000_000), ("20us", 20_000), ("0ns", 0)] {
            assert_eq!(duration(text), Ok(Duration::from_nanos(ns)), "{text}");
        }
        for text in ["5", "ms", "5m", "-1s", "1e30s", "5 ms", ""] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
