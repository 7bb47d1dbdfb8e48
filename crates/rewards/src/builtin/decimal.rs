//! Decimal numbers, compared without rounding: `0.10` equals `0.1`, and 2^53 + 1 differs from 2^53.

use super::numbers::is_currency;

/// `digits · 10^exponent`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Decimal {
    is_negative: bool,
    /// ASCII digits without leading or trailing zeros. Empty for 0.
    digits: String,
    exponent: i64,
}

impl Decimal {
    /// Reads `-1,234.50e-3`. The text must be a number, as [`super::numbers`] finds it.
    pub(super) fn parse(text: &str) -> Option<Decimal> {
        let is_negative = text.starts_with(['-', '−']);
        let text =
            text.trim_start_matches(|c| matches!(c, '-' | '−' | '+') || is_currency(c)).replace(',', "");
        let (mantissa, exponent) = match text.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, exponent.parse::<i64>().ok()?),
            None => (text.as_str(), 0),
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let all = format!("{whole}{fraction}");
        if all.is_empty() || !all.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let digits = all.trim_end_matches('0');
        let num_zeros = (all.len() - digits.len()) as i64;
        let digits = digits.trim_start_matches('0').to_owned();
        if digits.is_empty() {
            return Some(Decimal { is_negative: false, digits, exponent: 0 });
        }
        let exponent = exponent.checked_sub(fraction.len() as i64)?.checked_add(num_zeros)?;
        Some(Decimal { is_negative, digits, exponent })
    }

    /// A finite number.
    pub(super) fn from_f64(value: f64) -> Option<Decimal> {
        Decimal::parse(&value.to_string())
    }

    /// Whether the two differ by at most `tolerance`. Exact where the numbers fit into 128 bits at a common scale, else
    /// in f64.
    pub(super) fn is_close(&self, other: &Decimal, tolerance: &Decimal) -> bool {
        if self == other {
            return true;
        }
        if tolerance.digits.is_empty() {
            return false;
        }
        let scale = self.exponent.min(other.exponent).min(tolerance.exponent);
        let exact = || {
            let difference = self.scaled(scale)?.checked_sub(other.scaled(scale)?)?;
            Some(difference.unsigned_abs() <= tolerance.scaled(scale)?.unsigned_abs())
        };
        exact().unwrap_or_else(|| (self.to_f64() - other.to_f64()).abs() <= tolerance.to_f64())
    }

    /// The number over 10^`scale`, if it is an integer of 128 bits.
    fn scaled(&self, scale: i64) -> Option<i128> {
        if self.digits.is_empty() {
            return Some(0);
        }
        let power = u32::try_from(self.exponent.checked_sub(scale)?).ok()?;
        let value = self.digits.parse::<i128>().ok()?.checked_mul(10_i128.checked_pow(power)?)?;
        Some(if self.is_negative { -value } else { value })
    }

    fn to_f64(&self) -> f64 {
        let sign = if self.is_negative { "-" } else { "" };
        format!("{sign}{}e{}", if self.digits.is_empty() { "0" } else { &self.digits }, self.exponent)
            .parse()
            .expect("digits and an exponent are a number")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: &str, b: &str, tolerance: f64) -> bool {
        let parse = |text| Decimal::parse(text).unwrap();
        parse(a).is_close(&parse(b), &Decimal::from_f64(tolerance).unwrap())
    }

    #[test]
    fn equal_numbers_are_equal_in_any_notation() {
        for (a, b) in [
            ("0.10", ".1"),
            ("1,234.50", "1234.5"),
            ("-0", "0.000"),
            ("1200", "1.2e3"),
            ("+7", "007"),
            ("−3", "-3.0"),
            ("-$3", "-3"),
            ("5e-2", "0.05"),
        ] {
            assert!(close(a, b, 0.0), "{a} {b}");
        }
        for (a, b) in [("9007199254740993", "9007199254740992"), ("1", "-1"), ("0.1", "0.10000000000000001")]
        {
            assert!(!close(a, b, 0.0), "{a} {b}");
        }
        assert_eq!(Decimal::parse("."), None);
        assert_eq!(Decimal::parse("1e99999999999999999999"), None);
    }

    #[test]
    fn tolerances_are_exact_at_their_edge() {
        assert!(close("1.1", "1.0", 0.1));
        assert!(!close("1.1000001", "1.0", 0.1));
        assert!(close("3.14", "3.14159", 2e-3));
        assert!(close("-0.05", "0.05", 0.1));
        let long = "1".repeat(60);
        assert!(close(&long, &long, 0.5));
        assert!(!close(&long, "1", 0.5));
    }
}
