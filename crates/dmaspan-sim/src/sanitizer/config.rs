//! The configuration says what hardware and driver are like, and how findings are reported.

use dmaspan::dma::Trust;

use crate::iotlb::AbsentEntries;

/// Says whether hardware forgets only the sizes of leaves that an invalidation names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum LeafSizes {
    /// It forgets leaves of all sizes.
    Any,
    /// It forgets the named sizes, as the weakest hardware does (IHI 0070, 4.4.1, TTL; and a driver
    /// that names one address for each leaf): one that was unmapped and not named stays. For unmaps
    /// that say their sizes.
    #[default]
    Named,
}

/// Says whether a part of what was mapped by one event may be unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Parts {
    /// It may not, as in the DMA API: kernel/dma/debug.c calls it "different size".
    #[default]
    Report,
    /// It may, as in an IOMMU API.
    Allow,
}

/// Says whether mappings side by side may be one buffer, so that an access may begin in one and end
/// in another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Neighbours {
    /// They may in the domain of a container, whose mappings are parts of a guest's memory, and
    /// nowhere else.
    #[default]
    ByOwner,
    /// They may not. What was asked for together, as a list or a reservation, is one mapping.
    Apart,
    /// They may.
    Joined,
}

/// Says what happens with a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum OnFinding {
    /// It is kept, for [`findings`](super::Sanitizer::findings).
    #[default]
    Collect,
    /// It is kept, and if it is an error the thread that caused it panics with the report, unless
    /// it panics already.
    Panic,
}

/// Says what a [`Sanitizer`](super::Sanitizer) assumes and does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SanitizerConfig {
    /// Whether hardware caches absent entries, so that it must be told of what is mapped.
    pub absent: AbsentEntries,
    /// Whether it minds the sizes of leaves in invalidations.
    pub leaf_sizes: LeafSizes,
    /// Whether a part of a mapping may be unmapped.
    pub parts: Parts,
    /// Whether an access may begin in one mapping and end in another.
    pub neighbours: Neighbours,
    /// Whether devices are trusted with the rest of the granules that their buffers lie in.
    ///
    /// Of a device that is trusted, nothing is found where a neighbour of its buffer, on the same
    /// granule, is freed, or where it reads there; what it writes there is found. Of one that is
    /// not, both are.
    pub trust: Trust,
    /// log2 of the smallest leaf: what a mapping lets a device reach ends at multiples of it. A
    /// domain says its own ([`Event::Bytes`](dmaspan::iommu::Event::Bytes)), and from then on that
    /// counts.
    pub granule_lg2: u32,
    /// What happens with findings.
    pub mode: OnFinding,
    /// How many of the last operations are kept, and of how many unmaps it is known for how long
    /// nothing was mapped there since. An operation costs about 100 bytes, an unmap 400.
    pub history: usize,
    /// How many operations a finding shows at most.
    pub shown: usize,
    /// How many findings of each kind are kept, errors and advice of a kind apart. More are only
    /// counted, so that a flood of one kind hides no other, and advice hides no error.
    pub findings: usize,
}

impl Default for SanitizerConfig {
    fn default() -> Self {
        Self {
            absent: AbsentEntries::NotCached,
            leaf_sizes: LeafSizes::Named,
            parts: Parts::Report,
            neighbours: Neighbours::ByOwner,
            trust: Trust::Trusted,
            granule_lg2: 12,
            mode: OnFinding::Collect,
            history: 16384,
            shown: 12,
            findings: 100,
        }
    }
}
