//! An observer of a domain is told these events. The sanitizer of `dmaspan-sim` is one.

use super::ops::Tables;
use crate::label::Caller;
use crate::prot::{Direction, Prot};
use crate::range::IovaRange;
use crate::span::Span;

/// Whose turn it is with a buffer that stays mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SyncFor {
    /// The CPU will look at it.
    Cpu,
    /// The device will.
    Device,
}

/// Says what a domain did to its tables, or was asked for: see
/// [`IommuOps::observe`](super::IommuOps::observe).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// All that is mapped in the domain from now on has one owner, as a guest's memory in a
    /// container: mappings side by side may be one buffer. Said before a container uses the domain.
    OneOwner,
    /// A driver asked to map in these IOVAs, which it was given for that. Said by the thread that
    /// maps before the tables change, and so also of a map that fails then.
    Mapping {
        /// All of the IOVAs, in whole granules.
        range: IovaRange,
        /// The caller that asked.
        by: Caller,
    },
    /// A driver asked to unmap what is mapped in these IOVAs. Said by the thread that unmaps before
    /// the tables change.
    Unmapping {
        /// The IOVAs, in whole granules.
        range: IovaRange,
        /// The caller that asked.
        by: Caller,
    },
    /// Translations were written. Said before [`sync_map`](super::IommuOps::sync_map) and before
    /// anybody is given the IOVAs.
    Mapped {
        /// Where.
        range: IovaRange,
        /// Where they lead, one span behind the other; none where they were taken away again for
        /// an error, which is said next.
        spans: &'a [Span],
        /// What they permit.
        prot: Prot,
    },
    /// Of the granules that are mapped next in these IOVAs, only these bytes are of the buffer;
    /// what else lies in them is other memory. Said between [`Mapping`](Self::Mapping) and
    /// [`Mapped`](Self::Mapped), for each piece of a buffer.
    Bytes {
        /// Where the device finds them.
        range: IovaRange,
        /// log2 of the granule.
        granule_lg2: u32,
    },
    /// All translations in a range were taken away; there may have been holes between them. Said
    /// after the tables were changed, by the thread that did it, and before it can ask for the
    /// invalidation: one that begins later is one of all this.
    Unmapped {
        /// Where.
        range: IovaRange,
        /// The sizes of the leaves, bit n for 2^n bytes; 0 where only tables were taken away.
        leaf_sizes: u64,
        /// Whether tables were, too.
        tables: Tables,
    },
    /// Entries were replaced by others that lead to the same memory; as
    /// [`Unmapped`](Self::Unmapped) otherwise.
    Rewritten {
        /// Where.
        range: IovaRange,
        /// What they permit now; `None` for what the old ones did.
        prot: Option<Prot>,
    },
    /// CPU and device were to take turns with a buffer. Said before it is looked at, and so also
    /// of what is refused.
    Sync {
        /// The bytes that were named.
        range: IovaRange,
        /// Whose turn it was to be.
        turn: SyncFor,
        /// Which way the data was said to go.
        direction: Direction,
        /// The bytes and the direction of the mapping; `None` where there is none.
        mapping: Option<(IovaRange, Direction)>,
        /// The caller that asked.
        by: Caller,
    },
    /// An unmap was refused, and nothing changed: no mapping is known by this address and length.
    RefusedUnmap {
        /// What was named.
        range: IovaRange,
        /// The caller that asked.
        by: Caller,
    },
}
