//! Formats timestamps (RFC 3339, UTC, to the millisecond) and durations.

use std::time::{SystemTime, UNIX_EPOCH};

/// Formats a time, for example as `2026-03-01T09:05:07.250Z`. Times before 1970 become 1970.
pub(crate) fn utc(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", since.subsec_millis())
}

/// Formats a time for the name of a folder, for example as `20260301_090507`.
pub(crate) fn compact_utc(time: SystemTime) -> String {
    let digits = |text: &str| text.chars().filter(char::is_ascii_digit).collect::<String>();
    let text = utc(time);
    format!("{}_{}", digits(&text[..10]), digits(&text[11..19]))
}

/// The year, month and day for a number of days since 1970-01-01.
fn date(days: u64) -> (u64, u64, u64) {
    // First whole spans of 400 years, which all have the same length, then year by year and month by month.
    const SPAN_DAYS: u64 = 400 * 365 + 97;
    let mut year = 1970 + days / SPAN_DAYS * 400;
    let mut left = days % SPAN_DAYS;
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for len in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if left < len {
            break;
        }
        left -= len;
        month += 1;
    }
    (year, month, left + 1)
}

/// Formats a duration for people: `0.87 s`, `42 s`, `3m 05s` or `2h 01m`.
pub fn human_duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "?".into();
    }
    let whole = seconds.round() as u64;
    match whole {
        0..10 => format!("{seconds:.2} s"),
        10..60 => format!("{whole} s"),
        60..3600 => format!("{}m {:02}s", whole / 60, whole % 60),
        _ => format!("{}h {:02}m", whole / 3600, whole / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn known_timestamps() {
        let at = |seconds: u64| utc(UNIX_EPOCH + Duration::from_millis(seconds * 1000 + 250));
        assert_eq!(at(0), "1970-01-01T00:00:00.250Z");
        assert_eq!(at(951_782_399), "2000-02-28T23:59:59.250Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.250Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59.250Z");
        assert_eq!(at(1_767_225_600), "2026-01-01T00:00:00.250Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.250Z");
    }

    #[test]
    fn times_in_names() {
        assert_eq!(compact_utc(UNIX_EPOCH + Duration::from_secs(4_107_542_400)), "21000301_000000");
    }

    #[test]
    fn durations_of_all_magnitudes() {
        assert_eq!(human_duration(0.874), "0.87 s");
        assert_eq!(human_duration(42.2), "42 s");
        assert_eq!(human_duration(185.0), "3m 05s");
        assert_eq!(human_duration(7290.0), "2h 01m");
        assert_eq!(human_duration(f64::NAN), "?");
    }
}
