//! A finding says what is wrong, why, and what led to it.

use std::fmt;

use dmaspan::dma::Trust;
use dmaspan::{Direction, IovaRange, Prot, Span};

use super::event::{Op, Permits, Record};
use crate::walker::Access;

/// Says how bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Nothing breaks: time is lost, or a device looks at what it was not given and may.
    Advice,
    /// Memory, or what a device reads, may be corrupted, or memory is lost.
    Error,
}

/// Says what hardware may still hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cached {
    /// A translation, in the IOTLB.
    Leaf,
    /// A walk that leads into a detached table, in the walk cache.
    Walk,
}

/// The reason why hardware may still hold what was unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// No invalidation has named it since it was mapped.
    NoFlush,
    /// The last one was over before the unmap.
    FlushBeforeUnmap,
    /// One that ended after the unmap had begun before it: hardware may have forgotten first, and
    /// cached the translation again.
    BeganBeforeUnmap,
    /// One named a part of what was unmapped, and this was not in it.
    TooShort,
    /// One named the IOVAs and not that tables were detached.
    TablesKept,
    /// One named the IOVAs and not the sizes of the leaves.
    LeafSizes,
    /// One failed.
    Failed,
    /// One has begun and has not ended yet.
    StillRunning,
}

impl Cause {
    const fn says(self) -> &'static str {
        match self {
            Self::NoFlush => "no invalidation has named these IOVAs since they were mapped",
            Self::FlushBeforeUnmap => "the invalidation came before the unmap, not after it",
            Self::BeganBeforeUnmap => {
                "the invalidation began before the unmap: hardware may have cached it again"
            }
            Self::TooShort => "the invalidation named a part of what was unmapped, and not this",
            Self::TablesKept => {
                "the invalidation did not say that tables were detached: only leaves were forgotten"
            }
            Self::LeafSizes => "the invalidation did not name the sizes of the leaves unmapped",
            Self::Failed => "the invalidation failed",
            Self::StillRunning => "the invalidation has begun and not ended",
        }
    }

    const fn remedy(self) -> &'static str {
        match self {
            Self::NoFlush => "invalidate after the unmap, wait, and release only then",
            Self::FlushBeforeUnmap | Self::BeganBeforeUnmap => {
                "begin the invalidation after the tables were changed"
            }
            Self::TooShort => "invalidate all that was unmapped, the last byte included",
            Self::TablesKept => "invalidate with Tables::Detached where tables were detached",
            Self::LeafSizes => "collect the sizes of all leaves that were unmapped",
            Self::Failed => "keep what a failed invalidation covers until one succeeds",
            Self::StillRunning => "wait for the end of the invalidation",
        }
    }
}

/// Says what is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FindingKind {
    /// A device accessed IOVAs that were unmapped, which hardware may let it.
    UseAfterUnmap {
        /// How.
        access: Access,
        /// Why hardware may.
        cause: Cause,
    },
    /// A device accessed IOVAs that were unmapped and flushed, and were not mapped since.
    UseAfterFlush {
        /// How.
        access: Access,
        /// The number of the unmap.
        unmapped: u64,
        /// The number of the invalidation.
        flushed: u64,
    },
    /// A device accessed IOVAs where nothing is mapped; it faults.
    Unmapped {
        /// How.
        access: Access,
    },
    /// A device accessed the address that stands for a buffer that was not mapped
    /// ([`DmaAddr::REFUSED`](dmaspan::DmaAddr::REFUSED)); it faults.
    RefusedBuffer {
        /// How.
        access: Access,
    },
    /// A device began in a mapping and ran out of it, to where nothing is mapped.
    PastMapping {
        /// How.
        access: Access,
        /// What it began in.
        mapping: IovaRange,
    },
    /// A device began in a mapping and ran out of it, into another, so that no IOMMU refuses it.
    IntoNext {
        /// How.
        access: Access,
        /// What it began in.
        mapping: IovaRange,
        /// The mapping that it came into.
        next: IovaRange,
    },
    /// A device accessed what is not of a buffer, in a granule of it, so that no IOMMU refuses it.
    BesideMapping {
        /// How.
        access: Access,
        /// The buffer.
        mapping: IovaRange,
        /// Whether the device is trusted: then it may read there.
        trust: Trust,
    },
    /// A device did what the mapping does not permit.
    Denied {
        /// What it did.
        access: Access,
        /// What the mapping permits.
        prot: Prot,
    },
    /// A device accessed a mapping that hardware, which caches absent entries, was not told of.
    Unannounced {
        /// How.
        access: Access,
    },
    /// What was unmapped was unmapped before.
    DoubleUnmap,
    /// What was unmapped was never mapped.
    UnmapOfNothing,
    /// Entries were replaced where nothing is mapped.
    ProtectOfNothing,
    /// An unmap was refused: it named a mapping by another length or direction.
    RefusedUnmap {
        /// The mapping there.
        mapping: IovaRange,
    },
    /// A part of a mapping was unmapped.
    PartialUnmap {
        /// All of the mapping that there was.
        mapping: IovaRange,
    },
    /// IOVAs were mapped, or handed out, that are mapped already.
    AlreadyMapped {
        /// What is mapped.
        taken: IovaRange,
    },
    /// IOVAs were used again, or everything was over, and nobody had flushed.
    MissingFlush {
        /// What hardware may hold.
        cached: Cached,
        /// Why.
        cause: Cause,
    },
    /// IOVAs or memory went back to their owner, and nobody had flushed until then.
    LateFlush {
        /// What hardware may hold.
        cached: Cached,
        /// Why.
        cause: Cause,
        /// The memory that is free now.
        freed: Option<Span>,
    },
    /// IOVAs or memory went back to their owner while they were mapped.
    ReleasedWhileMapped {
        /// The memory that is free now.
        freed: Option<Span>,
    },
    /// Memory went back to its owner while a neighbour in the same granule is mapped for a device
    /// that is not trusted, or is not flushed yet.
    SharedGranule {
        /// The memory that is free now.
        freed: Span,
        /// The granule.
        granule: Span,
    },
    /// An invalidation of what hardware cannot hold any more.
    PointlessFlush,
    /// A sync of something that is not, or not all, in one mapping.
    SyncOutside {
        /// The mapping that it begins in.
        mapping: Option<IovaRange>,
    },
    /// A sync with another direction than that of the mapping.
    SyncDirection {
        /// The sync's.
        direction: Direction,
        /// What the mapping permits.
        prot: Prot,
    },
    /// A device read a bounced buffer that the CPU wrote and did not sync for it: found with a
    /// [`PoisonedPool`](super::PoisonedPool).
    MissingSync,
    /// A mapping that nobody unmapped.
    Leak,
}

const FAULTS: &str = "the IOMMU faults, or translates by what somebody else maps there next";
const COMPARE: &str = "compare address and length in the descriptor with what was mapped";
const JOINED: &str = "compare address and length in the descriptor with what was mapped; where \
                      neighbours are one buffer, say so: Neighbours::Joined";
const WRONG_RANGE: &str = "the range is wrong, or the mapping was another domain's";
const UNMAP_ONCE: &str = "unmap once, by the owner of the mapping";

impl FindingKind {
    /// Returns how bad it is.
    pub const fn class(&self) -> Severity {
        match self {
            Self::PointlessFlush
            | Self::BesideMapping { access: Access::Read, trust: Trust::Trusted, .. } => {
                Severity::Advice
            }
            _ => Severity::Error,
        }
    }

    pub(super) const fn title(&self) -> &'static str {
        match self {
            Self::UseAfterUnmap { .. } => "use after unmap",
            Self::UseAfterFlush { .. } => "use after flush",
            Self::Unmapped { .. } => "DMA to nothing",
            Self::RefusedBuffer { .. } => "DMA to a refused buffer",
            Self::PastMapping { .. } => "DMA past the end of a mapping",
            Self::IntoNext { .. } => "DMA into the next mapping",
            Self::BesideMapping { .. } => "DMA beside a buffer",
            Self::Denied { .. } => "DMA without permission",
            Self::Unannounced { .. } => "missing sync_map",
            Self::DoubleUnmap => "double unmap",
            Self::UnmapOfNothing => "unmap of nothing",
            Self::ProtectOfNothing => "protect of nothing",
            Self::RefusedUnmap { .. } => "refused unmap",
            Self::PartialUnmap { .. } => "partial unmap",
            Self::AlreadyMapped { .. } => "map over a mapping",
            Self::MissingFlush { .. } => "missing flush",
            Self::LateFlush { .. } => "late flush",
            Self::ReleasedWhileMapped { .. } => "release while mapped",
            Self::SharedGranule { .. } => "shared granule",
            Self::PointlessFlush => "pointless flush",
            Self::SyncOutside { .. } => "sync outside of a mapping",
            Self::SyncDirection { .. } => "sync in the wrong direction",
            Self::MissingSync => "missing sync for the device",
            Self::Leak => "leak",
        }
    }

    /// Why it matters, and what to do.
    const fn why(&self) -> (&'static str, &'static str) {
        match self {
            Self::UseAfterUnmap { cause, .. } => (cause.says(), "stop the device before the unmap"),
            Self::UseAfterFlush { .. } => (FAULTS, "stop the device before the unmap"),
            Self::Unmapped { .. } | Self::PastMapping { .. } => (FAULTS, COMPARE),
            Self::RefusedBuffer { .. } => (
                "a map was refused, by an interface that cannot say so, and its driver went on",
                "look at what the refusal says: mostly the device's pool has too few slots",
            ),
            Self::IntoNext { .. } => ("the IOMMU lets it: another buffer is mapped there", JOINED),
            Self::BesideMapping { .. } => (
                "the IOMMU lets it: a mapping is whole granules, with what else lies in them",
                COMPARE,
            ),
            Self::Denied { .. } => {
                ("the IOMMU faults", "map for the direction in which the device transfers")
            }
            Self::Unannounced { .. } => (
                "it may have cached that nothing is mapped there",
                "call sync_map after the tables are written",
            ),
            Self::DoubleUnmap => {
                ("what somebody else maps there next is unmapped with it", UNMAP_ONCE)
            }
            Self::UnmapOfNothing => (WRONG_RANGE, UNMAP_ONCE),
            Self::ProtectOfNothing => (WRONG_RANGE, "compare the range with what was mapped"),
            Self::RefusedUnmap { .. } => (
                "it stays mapped, and its owner may believe otherwise",
                "unmap with the length and the direction of the map",
            ),
            Self::PartialUnmap { .. } => (
                "the rest stays mapped, and nobody may know of it",
                "unmap all of it, or say that parts are allowed",
            ),
            Self::AlreadyMapped { .. } => (
                "two owners believe that the IOVAs are theirs",
                "allocate IOVAs, and unmap before they are used again",
            ),
            Self::MissingFlush { cause, .. } | Self::LateFlush { cause, .. } => {
                (cause.says(), cause.remedy())
            }
            Self::ReleasedWhileMapped { .. } => {
                ("a device reaches what the next owner puts there", "unmap and flush first")
            }
            Self::SharedGranule { .. } => (
                "a device that is not trusted reaches all of the granules of its buffers",
                "give its buffers granules of their own, or bounce their ends",
            ),
            Self::PointlessFlush => (
                "a flush costs more than most unmaps, and stops other devices",
                "gather what is unmapped and flush it once",
            ),
            Self::SyncOutside { .. } => (
                "caches of other memory are written back or dropped",
                "sync within what was mapped",
            ),
            Self::SyncDirection { .. } => (
                "the data that was to be seen may not be",
                "sync with the direction of the mapping",
            ),
            Self::MissingSync => (
                "where a buffer is bounced, or caches are not coherent, it read older bytes",
                "sync what the CPU wrote for the device, and tell the device then",
            ),
            Self::Leak => (
                "the IOVAs and the memory are lost, and a device reaches them",
                "unmap what the history shows to be mapped",
            ),
        }
    }

    /// What a device did, where it is about that.
    const fn access(&self) -> Option<Access> {
        match *self {
            Self::UseAfterUnmap { access, .. }
            | Self::UseAfterFlush { access, .. }
            | Self::Unmapped { access }
            | Self::RefusedBuffer { access }
            | Self::PastMapping { access, .. }
            | Self::IntoNext { access, .. }
            | Self::BesideMapping { access, .. }
            | Self::Denied { access, .. }
            | Self::Unannounced { access } => Some(access),
            Self::MissingSync => Some(Access::Read),
            _ => None,
        }
    }

    fn what(&self, f: &mut fmt::Formatter<'_>, at: IovaRange, history: &[Record]) -> fmt::Result {
        match self.access() {
            Some(Access::Read) => write!(f, "a device read {at}")?,
            Some(Access::Write) => write!(f, "a device wrote {at}")?,
            None => {}
        }
        match self {
            Self::UseAfterUnmap { .. } => f.write_str(", which was unmapped"),
            Self::UseAfterFlush { unmapped, flushed, .. } => {
                write!(f, ": unmapped by #{unmapped}, flushed by #{flushed}")
            }
            Self::Unmapped { .. } => f.write_str(", where nothing is mapped"),
            Self::RefusedBuffer { .. } => f.write_str(", in place of a buffer that was refused"),
            Self::PastMapping { mapping, .. } => write!(f, ", past the end of {mapping}"),
            Self::IntoNext { mapping, next, .. } => write!(f, ", past {mapping} and into {next}"),
            Self::BesideMapping { mapping, .. } => write!(f, ", in a granule of {mapping}"),
            Self::Denied { prot, .. } => write!(f, ": {}", Permits(*prot)),
            Self::Unannounced { .. } => f.write_str(", which hardware takes for absent"),
            Self::DoubleUnmap => write!(f, "{at} was unmapped twice"),
            Self::UnmapOfNothing => write!(f, "{at} was unmapped and never mapped"),
            Self::ProtectOfNothing => write!(f, "{at} was protected and is not mapped"),
            Self::RefusedUnmap { mapping } => {
                write!(f, "an unmap of {at} was refused: it is not the mapping in {mapping}")
            }
            Self::PartialUnmap { mapping } => {
                write!(f, "only {at} of the mapping {mapping} was unmapped")
            }
            Self::AlreadyMapped { taken } => write!(f, "{at} was mapped over {taken}"),
            Self::MissingFlush { cached, .. } => {
                write!(f, "the {} of {at} was never flushed", cached.says())
            }
            Self::LateFlush { cached, freed, .. } => {
                let cached = cached.says();
                match freed {
                    Some(span) => write!(f, "memory {span} is free, and the {cached} of {at} "),
                    None => write!(f, "{at} was released, and its {cached} "),
                }?;
                f.write_str("is not flushed yet")
            }
            Self::ReleasedWhileMapped { freed: Some(span) } => {
                write!(f, "memory {span} is free and still mapped at {at}")
            }
            Self::ReleasedWhileMapped { freed: None } => {
                write!(f, "{at} was released and is still mapped")
            }
            Self::SharedGranule { freed, granule } => {
                write!(f, "memory {freed} is free, and its granule {granule} is mapped at {at}")
            }
            Self::PointlessFlush => {
                write!(f, "an invalidation of {at}, of which hardware holds nothing stale")
            }
            Self::SyncOutside { mapping: Some(mapping) } => {
                write!(f, "a sync of {at}, which is not all in the mapping {mapping}")
            }
            Self::SyncOutside { mapping: None } => write!(f, "a sync of {at}, which is not mapped"),
            Self::SyncDirection { direction, prot } => {
                write!(f, "a sync of {at} as {direction:?}: mapped for {}", Permits(*prot))
            }
            Self::MissingSync => {
                f.write_str(", where the CPU wrote the buffer after the device had got it")
            }
            Self::Leak => {
                let is_map = |record: &&Record| matches!(record.op, Op::Map { .. });
                if let Some(Record { number, origin, .. }) = history.iter().rev().find(is_map) {
                    write!(f, "#{number}, {origin}, mapped {at}: it ")?;
                }
                f.write_str("is still mapped at the end")
            }
        }
    }
}

impl Cached {
    const fn says(self) -> &'static str {
        match self {
            Self::Leaf => "translation",
            Self::Walk => "walk into detached tables",
        }
    }
}

/// Something wrong, with what led to it.
///
/// Displayed, it is a report of several lines.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// What is wrong.
    pub kind: FindingKind,
    /// With which IOVAs.
    pub iovas: IovaRange,
    /// The memory that they lead or led to, where it was said and is one piece.
    pub memory: Option<Span>,
    /// The operations that touched these IOVAs, the oldest first. The last one is that which showed
    /// what is wrong.
    pub history: Vec<Record>,
}

impl Finding {
    /// Returns how bad it is.
    pub fn class(&self) -> Severity {
        self.kind.class()
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let class = match self.class() {
            Severity::Error => "ERROR",
            Severity::Advice => "ADVICE",
        };
        let Self { kind, iovas, memory, history } = self;
        let (title, (why, remedy)) = (kind.title(), kind.why());
        write!(f, "{class}: {title}\n  what: ")?;
        kind.what(f, *iovas, history)?;
        if let Some(span) = memory {
            write!(f, "\n        leads to memory {span}")?;
        }
        write!(f, "\n  why:  {why}\n  do:   {remedy}\n  history of {iovas}, oldest first:")?;
        let last = history.last().map(|record| record.number);
        history.iter().try_for_each(|record| {
            let mark = if Some(record.number) == last { "=>" } else { "  " };
            write!(f, "\n   {mark} {record}")
        })
    }
}
