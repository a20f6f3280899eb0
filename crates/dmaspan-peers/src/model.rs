//! The model knows what is mapped, as it was asked for.

use std::collections::BTreeMap;

use crate::formats::Asked;

/// A mapping, or what is left of one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapping {
    pub(crate) start: u64,
    pub(crate) last: u64,
    /// Where its first address leads.
    pub(crate) paddr: u64,
    pub(crate) asked: Asked,
}

impl Mapping {
    /// Its bytes less one.
    pub(crate) fn reach(&self) -> u64 {
        self.last - self.start
    }
}

/// All mappings, none of which overlap.
#[derive(Debug, Default)]
pub(crate) struct Model {
    by_start: BTreeMap<u64, Mapping>,
}

impl Model {
    /// The mapping at an address.
    pub(crate) fn at(&self, iova: u64) -> Option<Mapping> {
        let (_, mapping) = self.by_start.range(..=iova).next_back()?;
        (iova <= mapping.last).then_some(*mapping)
    }

    /// The mappings with an address in a range, in their order.
    pub(crate) fn within(&self, start: u64, last: u64) -> impl Iterator<Item = Mapping> + '_ {
        let first = self.at(start).map_or(start, |mapping| mapping.start);
        self.by_start.range(first..=last).map(|(_, mapping)| *mapping)
    }

    /// Whether nothing is mapped in a range.
    pub(crate) fn is_free(&self, start: u64, last: u64) -> bool {
        self.within(start, last).next().is_none()
    }

    /// Adds one where nothing is mapped.
    pub(crate) fn insert(&mut self, mapping: Mapping) {
        self.by_start.insert(mapping.start, mapping);
    }

    /// Takes all of a range away.
    pub(crate) fn cut(&mut self, start: u64, last: u64) {
        let met: Vec<Mapping> = self.within(start, last).collect();
        for mapping in met {
            self.by_start.remove(&mapping.start);
            if mapping.start < start {
                self.insert(Mapping { last: start - 1, ..mapping });
            }
            if mapping.last > last {
                let paddr = mapping.paddr + (last - mapping.start) + 1;
                self.insert(Mapping { start: last + 1, paddr, ..mapping });
            }
        }
    }

    /// From now on nothing is unknown of what hardware wrote in the mapping at `start`.
    pub(crate) fn asked_for_dirty(&mut self, start: u64) {
        if let Some(mapping) = self.by_start.get_mut(&start) {
            mapping.asked.fresh = false;
        }
    }

    /// The `n`-th mapping.
    pub(crate) fn nth(&self, n: usize) -> Option<Mapping> {
        self.by_start.values().nth(n).copied()
    }

    /// How many mappings there are.
    pub(crate) fn len(&self) -> usize {
        self.by_start.len()
    }

    /// The end of what is mapped without a hole from an address of a mapping on.
    pub(crate) fn run_end(&self, iova: u64) -> Option<u64> {
        let mut last = self.at(iova)?.last;
        while let Some(next) = last.checked_add(1).and_then(|next| self.by_start.get(&next)) {
            last = next.last;
        }
        Some(last)
    }

    /// All bytes that are mapped.
    pub(crate) fn bytes(&self) -> u128 {
        self.by_start.values().map(|mapping| u128::from(mapping.reach()) + 1).sum()
    }
}

#[cfg(test)]
mod tests {
    use dmaspan::Prot;

    use super::*;

    fn mapping(start: u64, last: u64) -> Mapping {
        let asked = Asked { prot: Prot::READ, fresh: true };
        Mapping { start, last, paddr: start + 0x100, asked }
    }

    #[test]
    fn what_is_cut_leaves_both_ends_where_they_led() {
        let mut model = Model::default();
        model.insert(mapping(0x10, 0x1f));
        model.insert(mapping(0x20, u64::MAX));
        assert_eq!(model.run_end(0x14), Some(u64::MAX));
        model.cut(0x14, 0x2f);
        let left: Vec<_> = model
            .within(0, u64::MAX)
            .map(|mapping| (mapping.start, mapping.last, mapping.paddr))
            .collect();
        assert_eq!(left, [(0x10, 0x13, 0x110), (0x30, u64::MAX, 0x130)]);
        assert!(model.is_free(0x14, 0x2f) && !model.is_free(0x13, 0x13));
        assert_eq!(model.run_end(0x10), Some(0x13));
        assert_eq!(model.bytes(), (1 << 64) - 0x30 + 4);
        assert_eq!((model.len(), model.nth(1).map(|mapping| mapping.start)), (2, Some(0x30)));
    }
}
