//! [`Retired`] is what an operation took out of the tree, and what hardware may still use until a
//! sync.

use crate::range::IovaRange;

/// Translations and tables that were taken away and not yet forgotten by hardware.
///
/// Pass it to [`Domain::sync`](crate::iommu::Domain::sync): until then nothing that was mapped
/// there may be freed, and the tables are not. Dropped, it leaks the tables and never frees them.
#[derive(Debug)]
#[must_use = "hardware may still use what was retired: sync it"]
pub struct Retired<L> {
    pub(crate) range: Option<IovaRange>,
    pub(crate) leaf_sizes: u64,
    pub(crate) tables: Option<L>,
}

impl<L> Retired<L> {
    pub(crate) const fn nothing() -> Self {
        Self { range: None, leaf_sizes: 0, tables: None }
    }

    /// Returns where translations were taken away: one range that covers all of them.
    pub fn range(&self) -> Option<IovaRange> {
        self.range
    }

    /// The sizes of the leaves, bit n for 2^n bytes.
    pub fn leaf_sizes(&self) -> u64 {
        self.leaf_sizes
    }

    /// Returns whether tables were detached.
    pub fn has_tables(&self) -> bool {
        self.tables.is_some()
    }

    /// Returns whether there is nothing to sync.
    pub fn is_empty(&self) -> bool {
        self.range.is_none() && self.tables.is_none()
    }

    /// Widens the range by `more`.
    pub(super) fn cover(&mut self, more: IovaRange) {
        self.range = Some(match self.range {
            None => more,
            Some(range) => {
                let start = range.start().min(more.start());
                let last = range.last().max(more.last());
                IovaRange::new(start, last).unwrap_or(more)
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::Iova;

    #[test]
    fn what_is_covered_is_the_least_range_around_all_of_it() {
        let range = |(first, last)| IovaRange::new(Iova::new(first), Iova::new(last)).unwrap();
        let all = || (0..5).flat_map(|first| (first..5).map(move |last| (first, last)));
        for (one, more) in all().flat_map(|one| all().map(move |more| (one, more))) {
            let mut retired = Retired::<()>::nothing();
            assert!(retired.is_empty());
            retired.cover(range(one));
            assert_eq!(retired.range(), Some(range(one)));
            retired.cover(range(more));
            assert_eq!(retired.range(), Some(range((one.0.min(more.0), one.1.max(more.1)))));
            assert!(!retired.is_empty() && !retired.has_tables());
        }
        let tables = Retired { tables: Some(()), ..Retired::nothing() };
        assert!(!tables.is_empty() && tables.has_tables());
    }
}
