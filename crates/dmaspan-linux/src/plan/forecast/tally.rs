//! A [`Tally`] counts leaves, and the tables that have them, by arithmetic on ranges.

use std::collections::BTreeMap;

use dmaspan::{Iova, UserAddr, UserRange, lg2};

use super::super::leaves::LeafSizes;
use super::iommu::PaperIommu;

/// Contiguous memory, seen at contiguous IOVAs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stretch {
    /// What decides which leaves fit: where the frames are, or where the process has them.
    pub(super) at: u64,
    pub(super) iova: u64,
    pub(super) len: u64,
    /// No leaf is larger.
    pub(super) most: u64,
}

impl Stretch {
    /// Whether `next` begins where this ends, in pages of the same size.
    pub(super) fn goes_on_with(self, next: Self) -> bool {
        let follows = |start: u64, next: u64| start.checked_add(self.len) == Some(next);
        follows(self.at, next.at) && follows(self.iova, next.iova) && self.most == next.most
    }
}

/// Leaves by size, and the tables that have them.
#[derive(Clone, Debug)]
pub(super) struct Tally {
    sizes: LeafSizes,
    granule_lg2: u32,
    /// Log2 of the entries of a table.
    index_bits: u32,
    leaves: BTreeMap<u64, u64>,
    /// For each level below the root which tables there are, by their number: disjoint ranges.
    tables: Vec<Numbers>,
}

/// Ranges of numbers, most of which come in order.
#[derive(Clone, Debug, Default)]
struct Numbers {
    all: BTreeMap<u64, u64>,
    /// The first and the last number of the range that the last one went into.
    recent: Option<(u64, u64)>,
}

impl Numbers {
    /// Adds `first` to `last`.
    fn add(&mut self, mut first: u64, mut last: u64) {
        if self.recent.is_some_and(|(start, end)| start <= first && last <= end) {
            return;
        }
        // Those that touch it become one with it.
        let reach = last.saturating_add(1);
        while let Some((&start, &end)) = self.all.range(..=reach).next_back() {
            if end.saturating_add(1) < first {
                break;
            }
            (first, last) = (first.min(start), last.max(end));
            self.all.remove(&start);
        }
        self.all.insert(first, last);
        self.recent = Some((first, last));
    }

    fn count(&self) -> u64 {
        self.all
            .iter()
            .map(|(first, last)| (last - first).saturating_add(1))
            .fold(0, u64::saturating_add)
    }
}

impl Tally {
    /// Nothing is mapped yet by the leaves of this IOMMU.
    pub(super) fn new(iommu: &PaperIommu) -> Self {
        let granule_lg2 = lg2::floor(iommu.granule().max(8));
        let below_root = usize::try_from(iommu.levels().saturating_sub(1)).unwrap_or(0);
        Self {
            sizes: LeafSizes::exactly(iommu.page_sizes),
            granule_lg2,
            index_bits: granule_lg2.saturating_sub(3).max(1),
            leaves: BTreeMap::new(),
            tables: vec![Numbers::default(); below_root],
        }
    }

    /// The same, of which no table is counted.
    pub(super) fn of_leaves(iommu: &PaperIommu) -> Self {
        Self { tables: Vec::new(), ..Self::new(iommu) }
    }

    /// Maps a stretch by the largest leaves.
    pub(super) fn add(&mut self, stretch: Stretch) {
        let Stretch { at, iova, len, most } = stretch;
        let Ok(user) = UserRange::from_len(UserAddr::new(at), len) else { return };
        for (size, bytes) in self.sizes.up_to(most).permitted(user, Iova::new(iova)) {
            if bytes > 0 {
                *self.leaves.entry(size).or_insert(0) += bytes / size;
            }
        }
        self.add_tables(stretch);
    }

    /// Counts the tables of each level that have entries for what is not in larger leaves.
    fn add_tables(&mut self, stretch: Stretch) {
        let Stretch { at, iova, len, most } = stretch;
        let end = iova.saturating_add(len);
        for (level, numbers) in (0_u32..).zip(&mut self.tables) {
            let table_lg2 = self.granule_lg2 + self.index_bits * (level + 1);
            if table_lg2 >= u64::BITS {
                break;
            }
            let mut add = |first: u64, end: u64| {
                if first < end {
                    numbers.add(first >> table_lg2, (end - 1) >> table_lg2);
                }
            };
            // Leaves of a higher level, the smallest of which is as large as the whole table.
            let larger = self.sizes.up_to(most).descending().filter(|size| *size >> table_lg2 != 0);
            let smallest = larger.filter(|size| (at ^ iova) & (size - 1) == 0).last();
            let (inner_start, inner_end) = match smallest {
                Some(size) => {
                    let start = lg2::align_up(iova, lg2::floor(size)).unwrap_or(u64::MAX);
                    (start, end & !(size - 1))
                }
                None => (end, end),
            };
            if inner_start >= inner_end {
                add(iova, end);
            } else {
                add(iova, inner_start);
                add(inner_end, end);
            }
        }
    }

    /// Leaves by size, the largest first.
    pub(super) fn leaves(&self) -> Vec<LeafCount> {
        let count = |(&size, &count): (&u64, &u64)| LeafCount { size, count };
        self.leaves.iter().rev().map(count).collect()
    }

    /// How many tables there are, with one root.
    pub(super) fn tables(&self) -> u64 {
        self.tables.iter().map(Numbers::count).fold(1, u64::saturating_add)
    }

    /// Their bytes.
    pub(super) fn table_bytes(&self) -> u64 {
        self.tables().saturating_mul(lg2::size(self.granule_lg2))
    }
}

/// How many leaves of a size there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeafCount {
    /// The bytes of one.
    pub size: u64,
    /// How many.
    pub count: u64,
}

#[cfg(test)]
mod tests {
    use super::super::iommu::IommuModel;
    use super::*;

    const K4: u64 = 4 << 10;
    const M2: u64 = 2 << 20;
    const G1: u64 = 1 << 30;

    fn of(stretches: &[(u64, u64, u64, u64)]) -> (Vec<(u64, u64)>, u64) {
        let mut tally = Tally::new(&PaperIommu::new(IommuModel::Vtd));
        for &(at, iova, len, most) in stretches {
            tally.add(Stretch { at, iova, len, most });
        }
        (tally.leaves().iter().map(|leaf| (leaf.size, leaf.count)).collect(), tally.tables())
    }

    #[test]
    fn leaves_need_tables_down_to_their_level() {
        // Root, level 2; 1 GiB leaves are in the table of 512 GiB.
        assert_eq!(of(&[(G1, G1, G1, G1)]), (vec![(G1, 1)], 2));
        assert_eq!(of(&[(G1, G1, G1, M2)]), (vec![(M2, 512)], 3));
        assert_eq!(of(&[(G1, G1, G1, K4)]), (vec![(K4, 262_144)], 3 + 512));
        // Seen at another offset in the leaf.
        assert_eq!(of(&[(G1, G1 + K4, M2, G1)]), (vec![(K4, 512)], 3 + 2));
        // A head and a tail of base pages around one of 2 MiB.
        assert_eq!(of(&[(M2 - K4, M2 - K4, M2 + 2 * K4, G1)]), (vec![(M2, 1), (K4, 2)], 5));
    }

    #[test]
    fn a_table_that_two_stretches_use_is_counted_once() {
        let page = |n: u64| (n * 2 * K4, n * 2 * K4, K4, K4);
        let pages: Vec<_> = (0..256).rev().map(page).collect();
        assert_eq!(of(&pages), (vec![(K4, 256)], 4));
        assert_eq!(of(&[(0, 0, M2, K4), (0, M2, M2, K4)]).1, 5);
    }
}
