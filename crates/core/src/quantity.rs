//! Counted quantities as types, so that a number of bytes cannot be used as a number of elements.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub};

use crate::DType;

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// A number of elements of some dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Elems(pub u64);

/// An optimizer step, counted from 0: step 0 is the first one taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Step(pub u64);

impl Elems {
    /// The size of these elements in `dtype`.
    pub const fn bytes(self, dtype: DType) -> Bytes {
        Bytes(self.0 * dtype.size() as u64)
    }
}

impl Bytes {
    pub const ZERO: Bytes = Bytes(0);

    /// Rounded up to a multiple of `align`, a power of two.
    pub const fn align_to(self, align: u64) -> Bytes {
        Bytes((self.0 + align - 1) & !(align - 1))
    }
}

macro_rules! counted {
    ($($name:ident),*) => {$(
        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self { Self(self.0 + other.0) }
        }
        impl Sub for $name {
            type Output = Self;
            fn sub(self, other: Self) -> Self { Self(self.0 - other.0) }
        }
        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) { self.0 += other.0 }
        }
        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self { Self(iter.map(|x| x.0).sum()) }
        }
    )*};
}
counted!(Bytes, Elems);

impl fmt::Display for Bytes {
    /// Three significant digits in binary units: `1.41 GiB`, `317 MiB`, `12 B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut value = self.0 as f64;
        let mut unit = 0;
        while value >= 1023.5 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        let digits = if unit == 0 || value >= 99.95 {
            0
        } else if value >= 9.995 {
            1
        } else {
            2
        };
        f.pad(&format!("{value:.digits$} {}", UNITS[unit]))
    }
}

impl fmt::Display for Elems {
    /// Like parameter counts: `8.34 M`, `6.74 B`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0 as f64;
        let text = match self.0 {
            0..10_000 => format!("{}", self.0),
            10_000..1_000_000 => format!("{:.1} k", n / 1e3),
            1_000_000..1_000_000_000 => format!("{:.2} M", n / 1e6),
            _ => format!("{:.2} B", n / 1e9),
        };
        f.pad(&text)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_have_three_digits_and_a_unit() {
        assert_eq!(Bytes(12).to_string(), "12 B");
        assert_eq!(Bytes(317 << 20).to_string(), "317 MiB");
        assert_eq!(Bytes(1536 << 20).to_string(), "1.50 GiB");
        assert_eq!(Bytes(1023 << 20).to_string(), "1023 MiB");
        assert_eq!(Elems(8_343_000).to_string(), "8.34 M");
    }

    #[test]
    fn alignment_rounds_up() {
        assert_eq!(Bytes(1).align_to(64), Bytes(64));
        assert_eq!(Bytes(64).align_to(64), Bytes(64));
        assert_eq!(Bytes(0).align_to(64), Bytes(0));
    }
}
