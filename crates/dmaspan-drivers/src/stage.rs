//! An IOMMU can do two translations one after the other: the stages.

/// By which stage a domain is translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The first, with tables as for processes: Arm's stage 1, whose domains are told apart by
    /// ASIDs, and VT-d's first stage, [`X86_64`](dmaspan::io_pgtable::X86_64), which takes scalable
    /// mode.
    First,
    /// The second, with tables as for virtual machines: Arm's stage 2, whose domains are told apart
    /// by VMIDs, and VT-d's second stage, [`VtdSs`](dmaspan::io_pgtable::VtdSs).
    Second,
}
