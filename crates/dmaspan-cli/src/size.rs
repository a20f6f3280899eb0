//! Sizes in bytes, as people write and read them.

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(u64);

impl ByteSize {
    /// So many bytes.
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// A number of bytes that is not rounded.
    pub fn exact(bytes: u64) -> String {
        format!("{bytes} byte{}", if bytes == 1 { "" } else { "s" })
    }

    /// The number.
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

/// The reason why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadSize {
    /// No number, or an unknown unit.
    #[error("a size is a number of bytes or like 512M, 4G or 1.5GiB (K, M, G, T: powers of 1024)")]
    NotASize,
    /// A fraction of a byte.
    #[error("the size is not a whole number of bytes")]
    Fraction,
    /// More than 64 bits can say.
    #[error("the size is more than any machine has")]
    TooLarge,
}

/// Units and their log2, the largest first.
const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

impl FromStr for ByteSize {
    type Err = BadSize;

    fn from_str(text: &str) -> Result<Self, BadSize> {
        let text = text.trim();
        let unit_at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_at);
        let lg2 = unit_lg2(unit.trim_start()).ok_or(BadSize::NotASize)?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let has_dot = whole.len() < number.len();
        if whole.is_empty() || fraction.contains('.') || (has_dot && fraction.is_empty()) {
            return Err(BadSize::NotASize);
        }
        // The digits as a whole number of powers of ten: 1.5 is 15 / 10.
        let digits: u128 = format!("{whole}{fraction}").parse().map_err(|_| BadSize::TooLarge)?;
        let places = u32::try_from(fraction.len()).map_err(|_| BadSize::TooLarge)?;
        let divisor = 10u128.checked_pow(places).ok_or(BadSize::TooLarge)?;
        let scaled = digits.checked_mul(1 << lg2).ok_or(BadSize::TooLarge)?;
        if scaled % divisor != 0 {
            return Err(BadSize::Fraction);
        }
        u64::try_from(scaled / divisor).map(Self).map_err(|_| BadSize::TooLarge)
    }
}

/// The log2 of a unit: nothing or `B` for bytes, or a letter, alone or with `B`, `i` or `iB`.
fn unit_lg2(unit: &str) -> Option<u32> {
    let mut letters = unit.chars().map(|c| c.to_ascii_uppercase());
    let Some(first) = letters.next() else { return Some(0) };
    let rest: String = letters.collect();
    if first == 'B' {
        return rest.is_empty().then_some(0);
    }
    let (_, lg2) = UNITS.into_iter().find(|(letter, _)| *letter == first)?;
    matches!(rest.as_str(), "" | "B" | "I" | "IB").then_some(lg2)
}

impl fmt::Display for ByteSize {
    /// In the largest unit that it has one of, with two decimals at most.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((letter, lg2)) = UNITS.into_iter().find(|(_, lg2)| self.0 >> lg2 != 0) else {
            return f.write_str(&Self::exact(self.0));
        };
        let number = format!("{:.2}", self.0 as f64 / (1u64 << lg2) as f64);
        let number = number.trim_end_matches('0').trim_end_matches('.');
        write!(f, "{number} {letter}iB")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<u64, BadSize> {
        text.parse().map(ByteSize::bytes)
    }

    #[test]
    fn units_are_powers_of_1024_however_they_are_written() {
        for text in [
            "512M",
            "512m",
            "512MB",
            "512Mi",
            "512MiB",
            "512 MiB",
            "536870912",
            "0.5G",
            "536870912B",
        ] {
            assert_eq!(parse(text), Ok(512 << 20), "{text}");
        }
        assert_eq!(parse("4K"), Ok(4096));
        assert_eq!(parse("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse("2T"), Ok(2 << 40));
        assert_eq!(parse("0"), Ok(0));
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in
            ["", "M", "1X", "-1M", "1e9", "1.M", ".5M", "1.2.3M", "12Mib/s", "1MM", "x", "0x10"]
        {
            assert_eq!(parse(text), Err(BadSize::NotASize), "{text}");
        }
        assert_eq!(parse("0.3K"), Err(BadSize::Fraction));
        assert_eq!(parse("1.5"), Err(BadSize::Fraction));
        for text in
            ["16777216T", "99999999999999999999999999999999999999999", "1e".repeat(9).as_str()]
        {
            assert!(parse(text).is_err(), "{text}");
        }
        assert_eq!(parse("18446744073709551615"), Ok(u64::MAX));
        assert_eq!(parse("18446744073709551616"), Err(BadSize::TooLarge));
    }

    #[test]
    fn sizes_are_shown_in_the_largest_unit() {
        let show = |bytes| ByteSize::new(bytes).to_string();
        assert_eq!(show(0), "0 bytes");
        assert_eq!(show(1), "1 byte");
        assert_eq!(show(4096), "4 KiB");
        assert_eq!(show(3 << 29), "1.5 GiB");
        assert_eq!(show(24_684_084 << 10), "23.54 GiB");
        assert_eq!(show(10 << 30), "10 GiB");
    }
}
