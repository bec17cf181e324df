//! Moments of the calendar, in UTC: written as RFC 3339, and read as people write them. The
//! calendar is jiff's.

use jiff::civil::{Date, DateTime, Time};
use jiff::tz::TimeZone;
use jiff::{Span, SpanRelativeTo, Timestamp};

/// Milliseconds since 1970, as the system's clock has it.
pub fn unix_ms() -> u64 {
    in_ms(Timestamp::now()).unwrap_or_default()
}

/// `None` before 1970.
fn in_ms(at: Timestamp) -> Option<u64> {
    at.as_millisecond().try_into().ok()
}

/// The latest moment that there is, for what lies beyond it.
fn at(unix_ms: u64) -> Timestamp {
    i64::try_from(unix_ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok()).unwrap_or(Timestamp::MAX)
}

/// `2026-11-21T21:43:05.123Z`
pub fn rfc3339(unix_ms: u64) -> String {
    format!("{:.3}", at(unix_ms))
}

/// Milliseconds since 1970 of an RFC 3339 time in UTC, such as [`rfc3339`] writes.
pub fn parse_rfc3339(text: &str) -> Option<u64> {
    text.strip_suffix('Z').filter(|rest| rest.contains('T'))?;
    in_ms(text.parse().ok()?)
}

fn utc(moment: DateTime) -> Option<u64> {
    in_ms(TimeZone::UTC.to_timestamp(moment).ok()?)
}

/// The moment that a user means, in milliseconds since 1970: a span back from `now_ms` (`2h`), a
/// day (`2026-11-21`), a time of today in UTC (`21:43`), or both (`2026-11-21T21:43:05Z`, also with
/// a blank and without the Z).
///
/// # Errors
/// What was expected.
pub fn since(text: &str, now_ms: u64) -> Result<u64, String> {
    let plain = text.trim().trim_end_matches('Z');
    let (date, time) = (|| plain.parse::<Date>().ok(), || plain.parse::<Time>().ok());
    let has = |c| plain.contains(c);
    // The calendar's own readers take more forms than one can tell apart, like 10 for a time of
    // day.
    let found = match plain.as_bytes().first() {
        Some(b'0'..=b'9') if has('-') && (has(':')) => plain.parse::<DateTime>().ok().and_then(utc),
        Some(b'0'..=b'9') if has('-') => date().and_then(|date| utc(date.to_datetime(Time::midnight()))),
        Some(b'0'..=b'9') if has(':') => {
            let today = TimeZone::UTC.to_datetime(at(now_ms)).date();
            time().and_then(|time| utc(today.to_datetime(time)))
        }
        Some(b'0'..=b'9') if !has(' ') => plain.parse::<Span>().ok().and_then(|span| {
            let span = span.to_duration(SpanRelativeTo::days_are_24_hours()).ok()?;
            Some(now_ms.saturating_sub(u64::try_from(span.as_millis()).ok()?))
        }),
        _ => None,
    };
    found.ok_or_else(|| {
        format!(
            "expected a span such as 90s, 10m, 2h or 1d, a day such as 2026-11-21, or a time in UTC such as 21:43 or \
             2026-11-21T21:43:05Z; found {text:?}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY_MS: u64 = 86_400_000;

    #[test]
    fn times_are_civil_and_are_read_as_they_are_written() {
        for (s, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_868_799, "2000-02-29T23:59:59.000Z"),
            (1_798_761_599, "2026-12-31T23:59:59.000Z"),
            (4_102_444_800, "2100-01-01T00:00:00.000Z"),
        ] {
            assert_eq!(rfc3339(s * 1000), text);
            assert_eq!(parse_rfc3339(text), Some(s * 1000));
        }
        // Every day of 400 years, against the one that writes.
        for day in 0..146_097 {
            assert_eq!(parse_rfc3339(&rfc3339(day * DAY_MS)), Some(day * DAY_MS), "day {day}");
        }
        assert_eq!(parse_rfc3339("2026-11-21T21:43:05Z"), parse_rfc3339("2026-11-21T21:43:05.000Z"));
        for wrong in ["2026-02-29T00:00:00Z", "2026-13-01T00:00:00Z", "2026-01-01T24:00:00Z", "2026-01-01", "", "Z"] {
            assert_eq!(parse_rfc3339(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_user_says_since_when_in_several_ways() {
        let now = parse_rfc3339("2026-11-25T22:00:00Z").unwrap();
        for (text, expected) in [
            ("90s", "2026-11-25T21:58:30.000Z"),
            ("10m", "2026-11-25T21:50:00.000Z"),
            ("2h", "2026-11-25T20:00:00.000Z"),
            ("1d", "2026-11-24T22:00:00.000Z"),
            ("1w", "2026-11-18T22:00:00.000Z"),
            ("21:43", "2026-11-25T21:43:00.000Z"),
            ("21:43:05.25", "2026-11-25T21:43:05.250Z"),
            ("2026-11-21", "2026-11-21T00:00:00.000Z"),
            ("2026-11-21 06:30", "2026-11-21T06:30:00.000Z"),
            ("2026-11-21T06:30:01Z", "2026-11-21T06:30:01.000Z"),
        ] {
            assert_eq!(since(text, now).map(rfc3339), Ok(expected.into()), "{text}");
        }
        for wrong in ["", "yesterday", "10", "10 m", "2026-11-31", "-1h", "99999999999999999999d", "25:00"] {
            assert!(since(wrong, now).unwrap_err().contains("expected a span"), "{wrong}");
        }
        assert_eq!(since("20000d", now), Ok(now - 20000 * DAY_MS));
        assert_eq!(since("90000d", now), Ok(0));
    }
}
