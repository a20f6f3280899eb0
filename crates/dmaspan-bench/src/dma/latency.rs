//! Latencies of operations, counted in buckets of fixed limits, so that adding one allocates
//! nothing.

/// Buckets of an octave: a percentile is right to 3 %.
const PER_OCTAVE: usize = 16;
/// log2 of them.
const PER_OCTAVE_LG2: usize = 4;
/// Octaves of nanoseconds.
const OCTAVES: usize = 64;

/// An operation that is longer than 2 ms, and than 16 times the median, waited for a CPU: no
/// scheduler of Linux lets others wait for less than that.
const LONG_OCTAVE: usize = 21;

/// Sums of what lies in an octave.
#[derive(Clone, Copy, Debug, Default)]
struct Moments {
    count: u64,
    sum: f64,
    squares: f64,
}

/// Many durations of one operation.
#[derive(Clone, Debug)]
pub(crate) struct Latency {
    octaves: Box<[Moments; OCTAVES]>,
    buckets: Box<[u64; PER_OCTAVE * OCTAVES]>,
}

/// What is said of them, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    /// The average of those that did not wait for a CPU.
    pub(crate) average: f64,
    /// Their standard deviation.
    pub(crate) deviation: f64,
    /// What 50, 90, 99 and 99.9 % of all took at most.
    pub(crate) percentiles: [f64; 4],
    /// How many there were.
    pub(crate) count: u64,
    /// How many of them waited for a CPU.
    pub(crate) interrupted: u64,
}

/// The percentiles, in parts of a thousand.
pub(crate) const PERMILLES: [u64; 4] = [500, 900, 990, 999];

impl Default for Latency {
    fn default() -> Self {
        Self {
            octaves: Box::new([Moments::default(); OCTAVES]),
            buckets: Box::new([0; PER_OCTAVE * OCTAVES]),
        }
    }
}

impl Latency {
    /// Adds one of so many nanoseconds.
    #[inline]
    pub(crate) fn add(&mut self, ns: u64) {
        let octave = octave_of(ns);
        let moments = &mut self.octaves[octave];
        let value = ns as f64;
        moments.count += 1;
        moments.sum += value;
        moments.squares += value * value;
        self.buckets[bucket_of(ns)] += 1;
    }

    /// Adds all of another one's.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (moments, more) in self.octaves.iter_mut().zip(other.octaves.iter()) {
            moments.count += more.count;
            moments.sum += more.sum;
            moments.squares += more.squares;
        }
        for (count, more) in self.buckets.iter_mut().zip(other.buckets.iter()) {
            *count += more;
        }
    }

    pub(crate) fn figures(&self) -> Figures {
        let count = self.octaves.iter().map(|moments| moments.count).sum();
        let percentiles = PERMILLES.map(|permille| self.percentile(permille, count));
        let median_octave = bucket_octave(self.bucket_at(500, count));
        let first_long = LONG_OCTAVE.max(median_octave + 4).min(OCTAVES);
        let mut kept = Moments::default();
        for moments in &self.octaves[..first_long] {
            kept.count += moments.count;
            kept.sum += moments.sum;
            kept.squares += moments.squares;
        }
        let average = kept.sum / (kept.count.max(1) as f64);
        let variance = kept.squares / (kept.count.max(1) as f64) - average * average;
        let deviation = variance.max(0.0).sqrt();
        Figures { average, deviation, percentiles, count, interrupted: count - kept.count }
    }

    /// The bucket in which so many of a thousand of `count` end.
    fn bucket_at(&self, permille: u64, count: u64) -> usize {
        let wanted = (u128::from(count) * u128::from(permille)).div_ceil(1000).max(1);
        let mut seen = 0;
        let found = self.buckets.iter().position(|&count| {
            seen += u128::from(count);
            seen >= wanted
        });
        found.unwrap_or(0)
    }

    fn percentile(&self, permille: u64, count: u64) -> f64 {
        if count == 0 {
            return 0.0;
        }
        let bucket = self.bucket_at(permille, count);
        if bucket < PER_OCTAVE {
            return bucket as f64;
        }
        // The middle of what the bucket holds.
        let step = (1u64 << (bucket_octave(bucket) - PER_OCTAVE_LG2)) as f64;
        let place = (PER_OCTAVE + bucket % PER_OCTAVE) as f64;
        (place + 0.5) * step - 0.5
    }
}

#[inline]
fn octave_of(ns: u64) -> usize {
    (ns | 1).ilog2() as usize
}

/// Below 16 ns a bucket for each, above 16 for each octave.
#[inline]
fn bucket_of(ns: u64) -> usize {
    let octave = octave_of(ns);
    if octave < PER_OCTAVE_LG2 {
        return ns.to_le_bytes()[0].into();
    }
    let place = (ns >> (octave - PER_OCTAVE_LG2)).to_le_bytes()[0];
    (octave - PER_OCTAVE_LG2 + 1) * PER_OCTAVE + usize::from(place) % PER_OCTAVE
}

fn bucket_octave(bucket: usize) -> usize {
    match bucket / PER_OCTAVE {
        0 => octave_of(bucket as u64),
        row => row + PER_OCTAVE_LG2 - 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: impl IntoIterator<Item = u64>) -> Figures {
        let mut latency = Latency::default();
        values.into_iter().for_each(|ns| latency.add(ns));
        latency.figures()
    }

    #[test]
    fn every_duration_has_a_bucket_whose_middle_is_near_it() {
        for lg2 in 0..64 {
            for ns in [1u64 << lg2, (1 << lg2) + (1 << lg2 >> 1), (1 << lg2) - 1] {
                let middle = of([ns]).percentiles[0];
                assert!((middle - ns as f64).abs() <= ns as f64 / 32.0, "{ns}: {middle}");
            }
        }
        assert_eq!(bucket_of(u64::MAX), (OCTAVES - PER_OCTAVE_LG2 + 1) * PER_OCTAVE - 1);
    }

    #[test]
    fn averages_deviations_and_percentiles_are_those_of_the_values() {
        let figures = of((1..=1000).map(|n| n * 10));
        assert_eq!((figures.average, figures.count, figures.interrupted), (5005.0, 1000, 0));
        assert!((figures.deviation - 2886.75).abs() < 0.01, "{figures:?}");
        for (found, expected) in figures.percentiles.into_iter().zip([5000.0, 9000.0, 9900.0]) {
            assert!((found / expected - 1.0).abs() < 0.035, "{found} {expected}");
        }
        assert_eq!(of([]), Figures::default());
    }

    #[test]
    fn what_waited_for_a_cpu_is_counted_and_not_averaged() {
        let mut latency = Latency::default();
        (0..999).for_each(|_| latency.add(100));
        let mut other = Latency::default();
        other.add(12_000_000);
        latency.merge(&other);
        let figures = latency.figures();
        assert_eq!((figures.average, figures.deviation), (100.0, 0.0));
        assert_eq!((figures.count, figures.interrupted), (1000, 1));
        // What always takes long does not wait.
        assert_eq!(of([3_000_000, 5_000_000]).interrupted, 0);
    }
}
