//! This is the written list of how dmaspan's tables may differ from Linux's, and why.
//!
//! `xtask/peers/README.md` has it for readers. Whatever is not in it is a failure.

/// One difference of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Difference {
    /// Links: each side marks those that were written back to memory, in another bit that hardware
    /// ignores. A tree that grows marks the link to its former root in any memory here.
    SoftwareBit,
    /// A table that was emptied stays on one side, and the entry above it is empty on the other.
    EmptyTable,
    /// Arm: device memory that was asked for with `CACHE` is outer shareable here and inner
    /// shareable in Linux; hardware does not look.
    DeviceShareability,
    /// Arm's stage 2: XN is 0b10 here and 0b11 in Linux, which lets privileged code execute where
    /// hardware has FEAT_XNX.
    Stage2ExecuteNever,
    /// Arm's stage 1 with hardware's dirty state: a new leaf is clean here and dirty in Linux.
    StartsClean,
    /// AMD v1 and VT-d with dirty bits: the accessed bit is set from the start here, so that
    /// hardware need not write it.
    StartsAccessed,
    /// AMD v1: Linux forces coherent accesses for every leaf, this side for those with `CACHE`.
    ForcedCoherence,
    /// x86-64 and RISC-V: `PRIV` has a bit here; Linux's code ignores it.
    Privilege,
    /// x86-64: `MMIO` is uncacheable here; Linux's code ignores it.
    MemoryType,
    /// x86-64: `NOEXEC` has a bit here, where hardware knows it; Linux's code ignores it.
    NoExecute,
    /// Linux offers page sizes that its own table of these widths cannot hold, or leaves out those
    /// as large as all that a table translates.
    PageSizes,
    /// Linux makes tables that the manual does not have, which are refused here.
    Refused,
    /// TTBR and VTTBR with 52 bits of address: here as the register has them, in Linux as the
    /// SMMU's structures do.
    BaseAddress,
    /// MAIR: attributes that no leaf names are 0 here and ones in Linux.
    UnusedAttributes,
    /// AMD v1: of a leaf of several entries that hardware wrote, Linux reports all but the last
    /// entry's bytes.
    DirtyLength,
}

/// All of the list, in its order, with a name of few letters.
pub(crate) const ALL: [(Difference, &str); 15] = [
    (Difference::SoftwareBit, "software bit"),
    (Difference::EmptyTable, "empty table"),
    (Difference::DeviceShareability, "device shareability"),
    (Difference::Stage2ExecuteNever, "XN of stage 2"),
    (Difference::StartsClean, "starts clean"),
    (Difference::StartsAccessed, "starts accessed"),
    (Difference::ForcedCoherence, "forced coherence"),
    (Difference::Privilege, "privilege"),
    (Difference::MemoryType, "memory type"),
    (Difference::NoExecute, "no-execute"),
    (Difference::PageSizes, "page sizes"),
    (Difference::Refused, "refused"),
    (Difference::BaseAddress, "base address"),
    (Difference::UnusedAttributes, "unused attributes"),
    (Difference::DirtyLength, "dirty length"),
];

/// How often each was met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Met([u64; ALL.len()]);

impl Met {
    /// Once more.
    pub(crate) fn count(&mut self, difference: Difference) {
        self.0[difference as usize] += 1;
    }

    /// Those of both.
    pub(crate) fn add(&mut self, other: &Self) {
        for (mine, others) in self.0.iter_mut().zip(other.0) {
            *mine += others;
        }
    }

    /// The names of those that were met, and how often.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let met = ALL.iter().map(|&(difference, name)| (name, self.0[difference as usize]));
        met.filter(|&(_, times)| times > 0)
    }
}

/// Linux's word, turned into what this side is to have by the differences that apply.
#[derive(Debug)]
pub(crate) struct Expected<'m> {
    pub(crate) word: u64,
    met: &'m mut Met,
}

impl<'m> Expected<'m> {
    pub(crate) fn of(theirs: u64, met: &'m mut Met) -> Self {
        Self { word: theirs, met }
    }

    /// Changes the word as a difference that may be in it has it.
    pub(crate) fn apply(&mut self, difference: Difference, change: impl Fn(u64) -> u64) {
        let changed = change(self.word);
        if changed != self.word {
            self.met.count(difference);
            self.word = changed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_in_the_order_of_the_differences() {
        for (n, (difference, _)) in ALL.iter().enumerate() {
            assert_eq!(*difference as usize, n);
        }
    }

    #[test]
    fn a_difference_counts_only_where_it_changes_a_word() {
        let mut met = Met::default();
        let mut expected = Expected::of(0b11, &mut met);
        expected.apply(Difference::Privilege, |word| word & !0b1);
        expected.apply(Difference::Privilege, |word| word & !0b1);
        assert_eq!(expected.word, 0b10);
        assert_eq!(met.named().collect::<Vec<_>>(), [("privilege", 1)]);
    }
}
