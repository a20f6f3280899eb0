//! Latencies, counted without allocating.

use std::time::Duration;

/// log2 of how many classes an octave has: a class is at most 1/32 wide.
const FINE_LG2: u32 = 5;
/// How many classes there are for 64 bits.
const CLASSES: usize = 64 << FINE_LG2;

/// How many I/Os took how long.
pub(crate) struct Latencies {
    counts: Box<[u64]>,
    total: u64,
}

impl Latencies {
    /// Of none.
    pub(crate) fn new() -> Self {
        Self { counts: vec![0; CLASSES].into(), total: 0 }
    }

    /// Counts an I/O.
    pub(crate) fn add(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(count) = self.counts.get_mut(class(ns)) {
            *count += 1;
            self.total += 1;
        }
    }

    /// What so many of a thousand I/Os took at most, in nanoseconds; 0 of none.
    pub(crate) fn per_mille(&self, part: u64) -> u64 {
        let rank = (self.total * part).div_ceil(1000).max(1);
        let mut seen = 0;
        let found = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        found.map_or(0, lowest)
    }
}

/// The class of a time.
fn class(ns: u64) -> usize {
    let octave = ns.max(1).ilog2();
    let shift = octave.saturating_sub(FINE_LG2);
    // The bits below the highest, as many as a class tells.
    let fine = usize::try_from(ns >> shift).unwrap_or(0);
    (shift as usize) * (1 << FINE_LG2) + fine
}

/// The shortest time of a class.
fn lowest(class: usize) -> u64 {
    let fine = 1 << FINE_LG2;
    // Classes below two octaves of fine ones are single nanoseconds.
    let shift = (class / fine).saturating_sub(1);
    ((class - shift * fine) as u64) << shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_a_class_that_begins_little_below_it() {
        for ns in
            (0..100_000).chain((10..63).flat_map(|lg2| [(1 << lg2) - 1, 1 << lg2, 3 << (lg2 - 1)]))
        {
            let below = lowest(class(ns));
            assert!(below <= ns && ns - below <= ns / 32, "{ns} {below}");
        }
    }

    #[test]
    fn parts_of_a_thousand_are_found() {
        let mut latencies = Latencies::new();
        assert_eq!(latencies.per_mille(500), 0);
        (1..=100).for_each(|us| latencies.add(Duration::from_micros(us)));
        let near = |found: u64, us: u64| found <= us * 1000 && found > us * 960;
        assert!(near(latencies.per_mille(500), 50));
        assert!(near(latencies.per_mille(990), 99));
    }
}
