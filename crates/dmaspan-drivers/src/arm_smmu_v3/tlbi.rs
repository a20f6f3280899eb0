//! This chooses the commands that make hardware forget ranges (IHI 0070, 4.4.1).

use dmaspan::iommu::{Invalidation, Tables};
use dmaspan::{IovaRange, lg2};

use super::command::{Command, Tag};
use super::features::SmmuV3Features;
use super::spec::cmd;

/// The most commands that name addresses, in one invalidation. Beyond it all of the domain is
/// forgotten, by one: the SMMU takes as long for each of them, and walking the tables again costs
/// less than so many (Linux: `CMDQ_MAX_TLBI_OPS`).
pub(super) const MAX_COMMANDS: usize = 512;

/// How one invalidation of a domain is told.
#[derive(Clone, Copy)]
pub(super) struct Forget {
    tag: Tag,
    by: By,
    /// LEAF of word 1, or 0.
    leaf: u64,
}

/// What a command covers.
#[derive(Clone, Copy)]
enum By {
    /// The leaf at an address; the leaves are of `2^step` bytes or more.
    Leaf { step: u32 },
    /// A number of granules from an address on; TG of word 1. The leaves are all of `2^step` bytes
    /// or groups of them, which TTL of word 1 says, or it says nothing.
    Range { granule_lg2: u32, granule: u64, step: u32, level: u64 },
}

impl Forget {
    /// For a domain with a granule of `2^granule_lg2` bytes, 12, 14 or 16, on hardware with these
    /// features.
    pub(super) fn new(
        tag: Tag,
        granule_lg2: u32,
        what: &Invalidation<'_>,
        features: &SmmuV3Features,
    ) -> Self {
        // How far above the smallest leaves. A contiguous group may be cached entry by entry.
        let level = |lg2: u32| lg2.saturating_sub(granule_lg2) / (granule_lg2 - 3);
        let highest = level(what.leaf_sizes.max(1).ilog2());
        let smallest = level(what.leaf_sizes.trailing_zeros());
        let lowest = match what.tables {
            Tables::Kept => smallest,
            // A table of the smallest leaves may have been empty, and walks led to it.
            Tables::Detached => smallest.min(1),
        };
        let step = granule_lg2 + lowest * (granule_lg2 - 3);
        let leaf = if what.tables == Tables::Kept { cmd::LEAF } else { 0 };
        if !features.range_invalidation {
            return Self { tag, by: By::Leaf { step }, leaf };
        }
        // 0b01, 0b10 and 0b11 for 4K, 16K and 64K. The manual's level 3 is that of the smallest
        // leaves, and 0 says nothing.
        let granule = (u64::from(granule_lg2 - 10) / 2) << cmd::TG_SHIFT;
        let known = lowest == highest && what.tables == Tables::Kept;
        let level = if known { u64::from(3u32.saturating_sub(lowest)) } else { 0 };
        let level = level << cmd::TTL_SHIFT;
        Self { tag, by: By::Range { granule_lg2, granule, step, level }, leaf }
    }

    /// The commands for a range, and none if there is none.
    pub(super) fn range(self, range: IovaRange) -> Commands {
        let lg2 = match self.by {
            By::Leaf { step } => step,
            By::Range { granule_lg2, .. } => granule_lg2,
        };
        let (first, last) = (range.start().get() >> lg2, range.last().get() >> lg2);
        let left = last - first + 1;
        let hint = match self.by {
            By::Leaf { .. } => 0,
            // Where an address is inside of a block, hardware that is told the level need not look
            // for one.
            By::Range { granule, step, level, .. } => {
                match (first | left) & lg2::mask(step - lg2) {
                    0 => granule | level,
                    _ => granule,
                }
            }
        };
        Commands { forget: self, lg2, hint, next: first, left }
    }
}

/// The commands for a range.
#[derive(Clone)]
pub(super) struct Commands {
    forget: Forget,
    /// What the numbers below count.
    lg2: u32,
    /// TG and TTL of word 1.
    hint: u64,
    next: u64,
    left: u64,
}

impl Iterator for Commands {
    type Item = Command;

    fn next(&mut self) -> Option<Command> {
        if self.left == 0 {
            return None;
        }
        let (covered, range, hint) = match self.forget.by {
            By::Leaf { .. } => (1, 0, self.hint),
            By::Range { .. } => {
                // The lowest five bits of the number that are not all 0, so that each command
                // removes as many as NUM has. They are 0 only beyond the largest SCALE.
                let scale = self.left.trailing_zeros().min(cmd::MAX_SCALE);
                let number = match self.left >> scale & 0x1f {
                    0 => 32,
                    number => number,
                };
                let fields = (number - 1) << cmd::NUM_SHIFT | u64::from(scale) << cmd::SCALE_SHIFT;
                match number << scale {
                    // One granule without a level is no range: all its fields would be 0.
                    1 => (1, 0, 0),
                    covered => (covered, fields, self.hint),
                }
            }
        };
        let address = self.next << self.lg2;
        self.next = self.next.wrapping_add(covered);
        self.left = self.left.saturating_sub(covered);
        Some(Command::address(self.forget.tag, range, address | hint | self.forget.leaf))
    }
}
