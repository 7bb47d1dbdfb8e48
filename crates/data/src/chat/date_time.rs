//! The date and time that templates print. The caller provides it: rendering reads no clock, so that a row
//! gives the same tokens on every day.

use std::fmt::Write as _;

/// A date and time without a time zone. Templates read it through `strftime_now`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DateTime {
    pub year: i32,
    /// From 1.
    pub month: u32,
    /// From 1.
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
}

/// The default is the date that LLaMA 3.1's template falls back to.
impl Default for DateTime {
    fn default() -> Self {
        DateTime { year: 2024, month: 7, day: 26, hour: 0, minute: 0, second: 0 }
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

impl DateTime {
    /// The UTC date and time of a Unix timestamp in seconds.
    pub fn from_unix(seconds: u64) -> Self {
        let (mut days, rest) = (seconds / 86_400, (seconds % 86_400) as u32);
        let mut year = 1970;
        while days >= year_days(year) {
            days -= year_days(year);
            year += 1;
        }
        let mut month = 1;
        while days >= u64::from(month_days(year, month)) {
            days -= u64::from(month_days(year, month));
            month += 1;
        }
        let day = days as u32 + 1;
        DateTime { year, month, day, hour: rest / 3600, minute: rest / 60 % 60, second: rest % 60 }
    }

    /// C's `strftime` in the C locale. `Err` is the first unknown directive.
    pub(crate) fn format(&self, format: &str) -> Result<String, String> {
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next();
            let unpadded = directive == Some('-');
            if unpadded {
                directive = chars.next();
            }
            let Some(directive) = directive else { return Err("%".into()) };
            self.put(&mut out, directive, unpadded).ok_or_else(|| format!("%{directive}"))?;
        }
        Ok(out)
    }

    fn put(&self, out: &mut String, directive: char, unpadded: bool) -> Option<()> {
        let hour_12 = (self.hour + 11) % 12 + 1;
        let mut padded = |number: u32, width: usize| {
            let width = if unpadded { 0 } else { width };
            write!(out, "{number:0width$}").expect("writing to a String cannot fail");
        };
        match directive {
            'd' => padded(self.day, 2),
            'm' => padded(self.month, 2),
            'y' => padded(self.year.rem_euclid(100) as u32, 2),
            'H' => padded(self.hour, 2),
            'I' => padded(hour_12, 2),
            'M' => padded(self.minute, 2),
            'S' => padded(self.second, 2),
            'j' => padded(self.day_of_year(), 3),
            'w' => padded(self.weekday() as u32, 0),
            'u' => padded((self.weekday() as u32 + 6) % 7 + 1, 0),
            'e' => write!(out, "{:2}", self.day).ok()?,
            'Y' => write!(out, "{}", self.year).ok()?,
            'B' => out.push_str(self.month_name()?),
            'b' | 'h' => out.push_str(&self.month_name()?[..3]),
            'A' => out.push_str(DAYS[self.weekday()]),
            'a' => out.push_str(&DAYS[self.weekday()][..3]),
            'p' => out.push_str(if self.hour < 12 { "AM" } else { "PM" }),
            'F' => out.push_str(&self.format("%Y-%m-%d").ok()?),
            'T' | 'X' => out.push_str(&self.format("%H:%M:%S").ok()?),
            'R' => out.push_str(&self.format("%H:%M").ok()?),
            'D' | 'x' => out.push_str(&self.format("%m/%d/%y").ok()?),
            'c' => out.push_str(&self.format("%a %b %e %H:%M:%S %Y").ok()?),
            'n' => out.push('\n'),
            't' => out.push('\t'),
            // There is no time zone, as in Python's `datetime.now()`.
            'z' | 'Z' => {}
            '%' => out.push('%'),
            _ => return None,
        }
        Some(())
    }

    fn month_name(&self) -> Option<&'static str> {
        MONTHS.get(self.month.checked_sub(1)? as usize).copied()
    }

    fn day_of_year(&self) -> u32 {
        (1..self.month).map(|month| month_days(self.year, month)).sum::<u32>() + self.day
    }

    /// The day of the week; Sunday is 0.
    fn weekday(&self) -> usize {
        let years = i64::from(self.year) - 1;
        let days = years * 365 + years.div_euclid(4) - years.div_euclid(100) + years.div_euclid(400);
        (days + i64::from(self.day_of_year())).rem_euclid(7) as usize
    }
}

fn leap(year: i32) -> bool {
    year % 4 == 0 && (year % 100 != 0 || year % 400 == 0)
}

fn year_days(year: i32) -> u64 {
    if leap(year) { 366 } else { 365 }
}

fn month_days(year: i32, month: u32) -> u32 {
    match month {
        2 => 28 + u32::from(leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strftime_matches_python() {
        let new_year = DateTime { year: 2025, month: 1, day: 1, hour: 13, minute: 5, second: 9 };
        // Python 3.11: datetime(2025, 1, 1, 13, 5, 9).strftime(...).
        let text = new_year.format("%d %b %Y|%-d %B %y|%A %a %j|%I:%M:%S %p|%e %F %T|%c %%").unwrap();
        let expected = "01 Jan 2025|1 January 25|Wednesday Wed 001|01:05:09 PM| 1 2025-01-01 13:05:09|\
                        Wed Jan  1 13:05:09 2025 %";
        assert_eq!(text, expected);
        assert_eq!(DateTime::default().format("%A %j"), Ok("Friday 208".into()));
        assert_eq!(new_year.format("%Q"), Err("%Q".into()));
        assert_eq!(new_year.format("50%"), Err("%".into()));
    }

    #[test]
    fn unix_timestamps_become_dates() {
        let at = DateTime::from_unix(1_709_210_096);
        assert_eq!(at, DateTime { year: 2024, month: 2, day: 29, hour: 12, minute: 34, second: 56 });
        assert_eq!(DateTime::from_unix(0).format("%F %T %A"), Ok("1970-01-01 00:00:00 Thursday".into()));
    }
}
