//! The history keeps these events.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;
use std::thread::ThreadId;

use dmaspan::iommu::{Invalidation, Scope, SyncFor, Tables};
use dmaspan::{Direction, IovaRange, Prot, Span};

use crate::walker::Access;

/// Says how an invalidation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Hardware was seen to have forgotten.
    Done,
    /// It was not: whatever was to be forgotten may be in use.
    Failed,
}

/// Says which IOVAs an event concerns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Where {
    /// None: it is about memory, or about nothing.
    Nowhere,
    /// These.
    Range(IovaRange),
    /// These; shared by the begin and the end of an invalidation.
    Ranges(Arc<[IovaRange]>),
    /// All of the domain.
    All,
}

impl Where {
    pub(super) fn new(scope: Scope<'_>) -> Self {
        match scope {
            Scope::All => Self::All,
            Scope::Ranges([]) => Self::Nowhere,
            Scope::Ranges(&[range]) => Self::Range(range),
            Scope::Ranges(ranges) => Self::Ranges(ranges.into()),
        }
    }

    /// The ranges, or `None` for all.
    pub(super) fn ranges(&self) -> Option<&[IovaRange]> {
        match self {
            Self::Nowhere => Some(&[]),
            Self::Range(range) => Some(std::slice::from_ref(range)),
            Self::Ranges(ranges) => Some(ranges),
            Self::All => None,
        }
    }

    /// Returns whether any IOVA of `range` is among them.
    pub fn meets(&self, range: IovaRange) -> bool {
        self.ranges().is_none_or(|all| all.iter().any(|one| one.intersection(range).is_some()))
    }
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ranges() {
            None => f.write_str("everything"),
            Some([]) => f.write_str("-"),
            Some([only]) => write!(f, "{only}"),
            Some([first, second]) => write!(f, "{first}, {second}"),
            Some([first, rest @ ..]) => write!(f, "{first} and {} more", rest.len()),
        }
    }
}

/// Says what was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Op {
    /// IOVAs were handed out.
    Alloc,
    /// Translations were made.
    Map {
        /// What they permit.
        prot: Prot,
        /// The first memory that they lead to, where it was said.
        first: Option<Span>,
    },
    /// Hardware that caches absent entries was told of a mapping.
    SyncMap,
    /// A device accessed memory.
    Dma {
        /// How.
        access: Access,
    },
    /// The CPU and the device took turns.
    Sync {
        /// Whose turn it became.
        turn: SyncFor,
        /// Which way the data goes.
        direction: Direction,
    },
    /// Translations were taken away.
    Unmap {
        /// Whether tables were, too.
        tables: Tables,
        /// The sizes of the leaves, bit n for 2^n bytes; 0 where they were not said.
        leaf_sizes: u64,
    },
    /// An unmap was refused.
    RefusedUnmap,
    /// Entries were replaced by others that lead to the same memory.
    Protect {
        /// What they permit; `None` for what the old ones did.
        prot: Option<Prot>,
    },
    /// Hardware was told to forget.
    InvalidateBegin {
        /// Whether walks too.
        tables: Tables,
        /// The sizes of leaves that were named, bit n for 2^n bytes.
        leaf_sizes: u64,
    },
    /// It answered.
    InvalidateEnd {
        /// The number of the begin.
        began: u64,
        /// What it answered.
        outcome: Outcome,
    },
    /// IOVAs, and what was mapped there, went back to their owners.
    Release,
    /// Memory went back to its owner.
    Free {
        /// Which.
        span: Span,
    },
    /// The same of memory that is [`Tracked`](super::Tracked), whose origin is the call that made
    /// it so: nothing knows where it was dropped.
    Drop {
        /// Which.
        span: Span,
    },
    /// A table was taken out of a tree.
    RetireTable {
        /// Which.
        span: Span,
    },
    /// A table went back to where it can become another.
    FreeTable {
        /// Which.
        span: Span,
    },
    /// The domain was taken away from hardware.
    Detach,
    /// All was said to be over.
    Finish,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Alloc => f.write_str("alloc"),
            Self::Map { prot, first } => {
                f.write_str("map")?;
                first.map_or(Ok(()), |span| write!(f, " to {span}"))?;
                write!(f, ", {}", Permits(prot))
            }
            Self::SyncMap => f.write_str("sync_map"),
            Self::Dma { access: Access::Read } => f.write_str("DMA read"),
            Self::Dma { access: Access::Write } => f.write_str("DMA write"),
            Self::Sync { turn: SyncFor::Cpu, direction } => {
                write!(f, "sync for CPU, {direction:?}")
            }
            Self::Sync { turn: SyncFor::Device, direction } => {
                write!(f, "sync for device, {direction:?}")
            }
            Self::Unmap { tables, leaf_sizes } => {
                write!(f, "unmap{}{}", Detached(tables), Sizes(leaf_sizes))
            }
            Self::RefusedUnmap => f.write_str("unmap refused"),
            Self::Protect { prot: Some(prot) } => write!(f, "protect, {}", Permits(prot)),
            Self::Protect { prot: None } => f.write_str("rewritten"),
            Self::InvalidateBegin { tables, leaf_sizes } => {
                write!(f, "invalidate begins{}{}", Detached(tables), Sizes(leaf_sizes))
            }
            Self::InvalidateEnd { began, outcome: Outcome::Done } => {
                write!(f, "invalidate #{began} done")
            }
            Self::InvalidateEnd { began, outcome: Outcome::Failed } => {
                write!(f, "invalidate #{began} FAILED")
            }
            Self::Release => f.write_str("release"),
            Self::Free { span } => write!(f, "memory {span} freed"),
            Self::Drop { span } => write!(f, "memory {span} freed, which was made"),
            Self::RetireTable { span } => write!(f, "table {span} detached"),
            Self::FreeTable { span } => write!(f, "table {span} freed"),
            Self::Detach => f.write_str("detach"),
            Self::Finish => f.write_str("finish"),
        }
    }
}

struct Detached(Tables);

impl fmt::Display for Detached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Tables::Kept => Ok(()),
            Tables::Detached => f.write_str(", tables detached"),
        }
    }
}

struct Sizes(u64);

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut before = ", leaves of ";
        for lg2 in (0..u64::BITS).filter(|lg2| self.0 & (1 << lg2) != 0) {
            write!(f, "{before}{:#x}", 1u64 << lg2)?;
            before = "|";
        }
        Ok(())
    }
}

/// Permissions in words.
pub(super) struct Permits(pub(super) Prot);

impl fmt::Display for Permits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.0.contains(Prot::READ), self.0.contains(Prot::WRITE)) {
            (true, true) => "reads and writes",
            (true, false) => "reads only",
            (false, true) => "writes only",
            (false, false) => "nothing permitted",
        })
    }
}

/// One operation of the history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its number; all events of a sanitizer are numbered in the order in which they came, from 1.
    pub number: u64,
    /// What was done.
    pub op: Op,
    /// Which IOVAs it concerns.
    pub iovas: Where,
    /// The caller that told of it.
    pub origin: Origin,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { number, op, iovas, origin } = self;
        let (number, iovas) = (format!("#{number}"), iovas.to_string());
        write!(f, "{number:<6} {iovas:<22} {op}  {origin}")
    }
}

/// Says where an event comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The call.
    pub location: &'static Location<'static>,
    /// The thread.
    pub thread: ThreadId,
    /// What the caller calls itself: see [`Sanitizer::named`](super::Sanitizer::named).
    pub name: Option<&'static str>,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { location, thread, name } = self;
        write!(f, "at {}:{}, {thread:?}", location.file(), location.line())?;
        name.map_or(Ok(()), |name| write!(f, ", {name}"))
    }
}

/// An invalidation that has begun: for
/// [`on_invalidate_end`](super::Sanitizer::on_invalidate_end). Dropped, it has never ended.
#[derive(Debug)]
#[must_use = "the invalidation ends when `on_invalidate_end` is told so"]
pub struct Invalidating {
    pub(super) begin: Record,
    pub(super) what: Forget,
}

/// What an invalidation names.
#[derive(Clone, Debug)]
pub(super) struct Forget {
    pub(super) iovas: Where,
    pub(super) leaf_sizes: u64,
    pub(super) tables: Tables,
}

impl Forget {
    pub(super) fn new(what: &Invalidation<'_>) -> Self {
        let Invalidation { scope, leaf_sizes, tables } = *what;
        Self { iovas: Where::new(scope), leaf_sizes, tables }
    }

    /// Everything about the domain includes its walks.
    pub(super) fn forgets_walks(&self) -> bool {
        self.tables == Tables::Detached || self.iovas == Where::All
    }
}
