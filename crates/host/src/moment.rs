//! Moments of the calendar, in UTC: written as RFC 3339, and read as people write them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

const DAY_S: u64 = 86400;

/// Milliseconds since 1970, as the system's clock has it.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// `2026-11-21T21:43:05.123Z`, by the civil calendar of days since 1970 (Hinnant's algorithm, in whole numbers).
pub fn rfc3339(unix_ms: u64) -> String {
    let (s, ms) = (unix_ms / 1000, unix_ms % 1000);
    let (days, s) = (s / DAY_S, s % DAY_S);
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1460 + day / 36524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let march = (5 * of_year + 2) / 153;
    let (d, m) = (of_year - (153 * march + 2) / 5 + 1, if march < 10 { march + 3 } else { march - 9 });
    let y = year + era * 400 + u64::from(m <= 2);
    format!("{y:04}-{m:02}-{d:02}T{:02}:{:02}:{:02}.{ms:03}Z", s / 3600, s / 60 % 60, s % 60)
}

/// Days from 1970 to a day of the civil calendar; `None` for a day that does not exist, or before 1970.
fn days(year: u64, month: u64, day: u64) -> Option<u64> {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let long = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let length = *long.get(usize::try_from(month).ok()?.checked_sub(1)?)?;
    if !(1970..=9999).contains(&year) || day == 0 || day > length {
        return None;
    }
    let y = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (y / 400, y % 400);
    let march = if month > 2 { month - 3 } else { month + 9 };
    let of_year = (153 * march + 2) / 5 + day - 1;
    let of_era = of_era * 365 + of_era / 4 - of_era / 100 + of_year;
    (era * 146_097 + of_era).checked_sub(719_468)
}

fn number(text: &str, digits: usize) -> Option<u64> {
    (text.len() == digits && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok())?
}

/// A time of the day, `21:43`, `21:43:05` or `21:43:05.123`, in milliseconds.
fn time_of_day(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let ms = match fraction.len() {
        1..=9 => number(fraction, fraction.len())? * 1000 / 10u64.pow(fraction.len() as u32),
        _ => return None,
    };
    let mut parts = whole.split(':');
    let (h, m) = (number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    let s = parts.next().map_or(Some(0), |s| number(s, 2))?;
    (h < 24 && m < 60 && s < 61 && parts.next().is_none()).then_some(((h * 60 + m) * 60 + s) * 1000 + ms)
}

/// Milliseconds since 1970 of an RFC 3339 time in UTC, such as [`rfc3339`] writes.
pub fn parse_rfc3339(text: &str) -> Option<u64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    Some(date_ms(date)? + time_of_day(time)?)
}

fn date_ms(text: &str) -> Option<u64> {
    let mut parts = text.splitn(3, '-');
    let (y, m, d) = (number(parts.next()?, 4)?, number(parts.next()?, 2)?, number(parts.next()?, 2)?);
    Some(days(y, m, d)? * DAY_S * 1000)
}

/// A span such as `90s`, `10m`, `2h`, `3d` or `1w`.
fn span(text: &str) -> Option<Duration> {
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (count, unit) = text.split_at(at);
    let unit = match unit {
        "s" => 1,
        "m" | "min" => 60,
        "h" => 3600,
        "d" => DAY_S,
        "w" => 7 * DAY_S,
        _ => return None,
    };
    Some(Duration::from_secs(count.parse::<u64>().ok()?.checked_mul(unit)?))
}

/// The moment that a user means, in milliseconds since 1970: a span back from `now_ms` (`2h`), a day (`2026-11-21`), a time of
/// today in UTC (`21:43`), or both (`2026-11-21T21:43:05Z`, also with a blank and without the Z).
///
/// # Errors
/// What was expected.
pub fn since(text: &str, now_ms: u64) -> Result<u64, String> {
    let text = text.trim();
    if let Some(span) = span(text) {
        return Ok(now_ms.saturating_sub(span.as_millis() as u64));
    }
    if let Some(of_day) = time_of_day(text.trim_end_matches('Z')) {
        return Ok(now_ms / (DAY_S * 1000) * DAY_S * 1000 + of_day);
    }
    let plain = text.strip_suffix('Z').unwrap_or(text);
    let both = plain.split_once(['T', ' ']).map(|(date, time)| Some(date_ms(date)? + time_of_day(time)?));
    both.unwrap_or_else(|| date_ms(plain)).ok_or_else(|| {
        format!(
            "expected a span such as 90s, 10m, 2h or 1d, a day such as 2026-11-21, or a time in UTC such as 21:43 or \
             2026-11-21T21:43:05Z; found {text:?}"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(parse_rfc3339(&rfc3339(day * DAY_S * 1000)), Some(day * DAY_S * 1000), "day {day}");
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
        assert_eq!(since("20000d", now), Ok(now - 20000 * DAY_S * 1000));
        assert_eq!(since("90000d", now), Ok(0));
    }
}
