//! This reads what the benchmarks printed.

use std::collections::BTreeMap;

use super::plan::BUILDS;

/// Nanoseconds by who, case and operation, a value for each process.
#[derive(Debug, Default)]
pub(super) struct Samples {
    values: BTreeMap<(String, String, String), Vec<f64>>,
}

impl Samples {
    /// Adds lines `case operation nanoseconds`.
    ///
    /// # Errors
    ///
    /// The first line that is none.
    pub(super) fn read(&mut self, who: &str, lines: &str) -> Result<(), String> {
        for line in lines.lines() {
            let parts: Vec<&str> = line.split_whitespace().collect();
            let ns = parts.last().and_then(|ns| ns.parse::<f64>().ok());
            let ns = ns.filter(|ns| ns.is_finite() && *ns > 0.0);
            let ([case, operation, _], Some(ns)) = (parts.as_slice(), ns) else {
                return Err(format!("{who} printed `{line}`, which is not a measurement"));
            };
            let key = (who.to_owned(), (*case).to_owned(), (*operation).to_owned());
            self.values.entry(key).or_default().push(ns);
        }
        Ok(())
    }

    /// The median of the processes.
    pub(super) fn median(&self, who: &str, case: &str, operation: &str) -> Option<f64> {
        let key = (who.to_owned(), case.to_owned(), operation.to_owned());
        let mut values = self.values.get(&key)?.clone();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        let upper = *values.get(middle)?;
        Some(if values.len() % 2 == 0 { (values[middle - 1] + upper) / 2.0 } else { upper })
    }

    /// The median of the faster build of a peer.
    pub(super) fn fastest(&self, peer: &str, case: &str, operation: &str) -> Option<f64> {
        let median = |build| self.median(&format!("{peer}/{build}"), case, operation);
        BUILDS.into_iter().filter_map(median).min_by(f64::total_cmp)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_of_all_processes_and_the_faster_build_counts() {
        let mut samples = Samples::default();
        for ns in ["9", "1", "2.5"] {
            samples.read("peer/u", &format!("4k_1 map {ns}\n4k_1 unmap 7\n")).unwrap();
        }
        samples.read("peer/k", "4k_1 map 4\n").unwrap();
        samples.read("peer/k", "4k_1 map 0.5\n").unwrap();
        assert_eq!(samples.median("peer/u", "4k_1", "map"), Some(2.5));
        assert_eq!(samples.median("peer/k", "4k_1", "map"), Some(2.25));
        assert_eq!(samples.fastest("peer", "4k_1", "map"), Some(2.25));
        assert_eq!(samples.fastest("peer", "4k_1", "unmap"), Some(7.0));
        assert_eq!(samples.fastest("peer", "4k_1", "pair"), None);
    }

    #[test]
    fn what_is_no_measurement_is_refused() {
        for line in ["4k_1 map", "4k_1 map fast", "4k_1 map 1 ns", "4k_1 map inf", "4k_1 map 0"] {
            assert!(Samples::default().read("peer/u", line).is_err(), "{line}");
        }
    }
}
