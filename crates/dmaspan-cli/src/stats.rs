//! Times of runs: their medians, and speeds from them.

use std::time::Duration;

use dmaspan_linux::PinnerStats;

/// Nanoseconds of a duration.
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The middle value, or the mean of the two middle ones; 0 of none.
pub fn median(values: &[u64]) -> u64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let upper = sorted.get(sorted.len() / 2).copied().unwrap_or(0);
    if sorted.len() % 2 == 1 {
        return upper;
    }
    let lower = (sorted.len() / 2).checked_sub(1).map_or(0, |at| sorted[at]);
    u64::midpoint(lower, upper)
}

/// With three decimals: more would be noise.
pub fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Says where the time of one operation went, over several runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Series {
    pin: Vec<u64>,
    lookup: Vec<u64>,
    table: Vec<u64>,
    total: Vec<u64>,
}

impl Series {
    /// Adds a map.
    pub fn add_map(&mut self, total: Duration, pinner: PinnerStats) {
        self.add(nanoseconds(total), pinner.pin_ns, pinner.lookup_ns);
    }

    /// Adds an unmap: its spans come out of the table, so nothing is looked up.
    pub fn add_unmap(&mut self, total: Duration, pinner: PinnerStats) {
        self.add(nanoseconds(total), pinner.unpin_ns, 0);
    }

    fn add(&mut self, total: u64, pin: u64, lookup: u64) {
        self.pin.push(pin);
        self.lookup.push(lookup);
        self.table.push(total.saturating_sub(pin).saturating_sub(lookup));
        self.total.push(total);
    }

    /// The median of each part, in the order pin, look-up, table and total.
    pub fn medians(&self) -> [u64; 4] {
        [&self.pin, &self.lookup, &self.table, &self.total].map(|values| median(values))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_is_in_the_middle_whatever_the_order() {
        assert_eq!(median(&[]), 0);
        assert_eq!(median(&[7]), 7);
        assert_eq!(median(&[9, 1]), 5);
        assert_eq!(median(&[1000, 1, 3]), 3);
        assert_eq!(median(&[4, 1, 3, 2]), 2);
        assert_eq!(median(&[u64::MAX, u64::MAX]), u64::MAX);
    }

    #[test]
    fn the_table_has_what_is_left_of_the_total_and_never_less_than_nothing() {
        let mut series = Series::default();
        let mut stats = PinnerStats::default();
        (stats.pin_ns, stats.lookup_ns, stats.unpin_ns, stats.lookups) = (60, 30, 200, 1);
        series.add_map(Duration::from_nanos(100), stats);
        assert_eq!(series.medians(), [60, 30, 10, 100]);
        let mut series = Series::default();
        series.add_unmap(Duration::from_nanos(100), stats);
        assert_eq!(series.medians(), [200, 0, 0, 100]);
    }
}
