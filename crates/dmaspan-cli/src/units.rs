//! Numbers as people read them: three digits and a unit.

/// A time: `740 ns`, `4.12 µs`, `12.1 ms`, `1.30 s`.
pub fn time(ns: u64) -> String {
    if ns < 1000 { format!("{ns} ns") } else { fine_time(ns as f64) }
}

/// A time with three digits also where it is short: `14.2 ns`.
pub fn fine_time(ns: f64) -> String {
    let (unit, lg10) = match ns {
        ..999.5 => ("ns", 0),
        ..999_500.0 => ("µs", 3),
        ..999_500_000.0 => ("ms", 6),
        _ => ("s", 9),
    };
    format!("{} {unit}", three_digits(ns / 10f64.powi(lg10)))
}

/// A number with three significant digits, more where it is larger.
pub fn three_digits(value: f64) -> String {
    let decimals = match value {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// A size without decimals where it has none: `4K`, `2M`, `1G`, `8E`.
pub fn page_size(bytes: u64) -> String {
    let units = [('E', 60), ('P', 50), ('T', 40), ('G', 30), ('M', 20), ('K', 10)];
    for (unit, lg2) in units {
        if bytes != 0 && bytes.trailing_zeros() >= lg2 {
            return format!("{}{unit}", bytes >> lg2);
        }
    }
    bytes.to_string()
}

/// Ascending page sizes, as ranges where each is twice the one before: `4K, 2M, 1G`, `4K to 8E`.
pub fn page_sizes(sizes: &[u64]) -> String {
    let runs = sizes.chunk_by(|&one, &next| one.checked_mul(2) == Some(next));
    let shown: Vec<String> = runs
        .flat_map(|run| match run {
            [first, _, .., last] => {
                vec![format!("{} to {}", page_size(*first), page_size(*last))]
            }
            few => few.iter().map(|&size| page_size(size)).collect(),
        })
        .collect();
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_in_every_unit() {
        let shown = [0, 740, 999, 1000, 4123, 41_234, 412_345, 999_499, 999_500, 12_100_000];
        let expected = [
            "0 ns", "740 ns", "999 ns", "1.00 µs", "4.12 µs", "41.2 µs", "412 µs", "999 µs",
            "1.00 ms", "12.1 ms",
        ];
        assert_eq!(shown.map(time), expected);
        assert_eq!(time(999_600_000), "1.00 s");
        let short = [0.0, 1.25, 14.21, 740.3, 999.4, 999.5, 4123.0];
        let expected = ["0.00 ns", "1.25 ns", "14.2 ns", "740 ns", "999 ns", "1.00 µs", "4.12 µs"];
        assert_eq!(short.map(fine_time), expected);
        assert_eq!(time(123_000_000_000), "123 s");
    }

    #[test]
    fn rounding_never_makes_a_fourth_digit() {
        assert_eq!(three_digits(9.996), "10.0");
        assert_eq!(three_digits(99.96), "100");
        assert_eq!(three_digits(340.4), "340");
        assert_eq!(three_digits(0.5), "0.50");
        assert_eq!(three_digits(12345.6), "12346");
    }

    #[test]
    fn page_sizes_are_short() {
        assert_eq!(
            [4096, 65536, 2 << 20, 512 << 20, 1 << 30].map(page_size),
            ["4K", "64K", "2M", "512M", "1G"]
        );
        assert_eq!([3 << 40, 1 << 50, 1 << 63].map(page_size), ["3T", "1P", "8E"]);
        assert_eq!(page_size(100), "100");
    }

    #[test]
    fn many_page_sizes_are_a_range() {
        let of = |bits: u64| {
            let sizes = (0..64).map(|lg2| 1 << lg2).filter(|size| bits & size != 0);
            page_sizes(&sizes.collect::<Vec<u64>>())
        };
        // AMD-Vi; Arm's with groups; VT-d.
        assert_eq!(of(!0xfff), "4K to 8E");
        assert_eq!(of(1 << 12 | 1 << 16 | 1 << 21 | 1 << 25 | 1 << 30), "4K, 64K, 2M, 32M, 1G");
        assert_eq!(of(1 << 12 | 1 << 21 | 1 << 30), "4K, 2M, 1G");
        assert_eq!(of(0b11 << 12 | 0b111 << 20), "4K, 8K, 1M to 4M");
        assert_eq!(of(0), "");
    }
}
