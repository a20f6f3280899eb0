//! Mapping and unmapping a case, one way or the other, and how long that takes.

use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, LeafCensus, PageTable};
use dmaspan::iommu::{self, Domain};
use dmaspan::{Account, Container, PhysAddr};
use dmaspan_cli::stats::nanoseconds;
use dmaspan_sim::memory::SimPinner;

use super::ground::{Ground, Piece};
use super::plan::PAGE;
use crate::PROT;
use crate::crew::{self, Gate};
use crate::failed::Failed;
use crate::models::type1_before::Type1Before;
use crate::models::unwalked::Untold;
use crate::time::{Meter, Series, Took};

/// Bits of IOVAs and of physical addresses.
const ADDRESS_BITS: u32 = 48;
/// Where tables are: a multiple of every leaf, and where nothing else is.
const TABLES_AT: PhysAddr = PhysAddr::new(1 << 45);

/// Room for the tables of so many bytes by pages: an entry of 8 bytes each, as much again for upper
/// levels, and some at the ends. Memory is only used once tables lie in it.
fn table_bytes(bytes: u64) -> u64 {
    (bytes / PAGE) * 16 + (1 << 20)
}

/// A container, of now or of before.
pub(crate) enum Way {
    /// As Linux did it.
    ByPage(Type1Before<ArmLpaeS1<12>>),
    /// The container, and the memory of its tables.
    BySpan(Container<SimPinner, parking_lot::RawMutex>, Arena),
}

impl Way {
    /// Empty ones: by page and by span.
    pub(crate) fn both(ground: &Ground) -> Result<[Self; 2], Failed> {
        let format = || ArmLpaeS1::new(ArmLpaeS1Config::new(ADDRESS_BITS, ADDRESS_BITS));
        let (memory, bytes) = (&ground.memory, table_bytes(ground.bytes));
        let type1 = Type1Before::new(format()?, TABLES_AT, bytes, Arc::clone(memory), u64::MAX);
        let tables = Arena::new(TABLES_AT, bytes);
        let table = PageTable::new(format()?, tables.clone()).map_err(iommu::Error::from)?;
        let (pinner, account) = (SimPinner::new(Arc::clone(memory)), Account::new(u64::MAX));
        let container = Container::with_domain(pinner, Domain::new(table, Untold)?, account);
        let type1 = type1.map_err(iommu::Error::from)?;
        Ok([Self::ByPage(type1), Self::BySpan(container, tables)])
    }

    /// Maps a piece.
    fn map(&self, ground: &Ground, piece: &Piece) -> Result<(), Failed> {
        let (space, user, iova) = (&ground.space, piece.user, piece.range.start());
        match self {
            Self::ByPage(type1) => {
                type1.map(space, user, iova, PROT).map_err(Failed::at("by page"))
            }
            Self::BySpan(container, _) => {
                let mapped = container.map(space, user, iova, PROT);
                let mapped = mapped.map_err(Failed::at("by span"))?;
                check_bytes("by span: mapped", mapped.memory + mapped.mmio, piece)
            }
        }
    }

    /// Unmaps a piece.
    fn unmap(&self, piece: &Piece) -> Result<(), Failed> {
        match self {
            Self::ByPage(type1) => {
                let unmapped = type1.unmap(piece.range).map_err(Failed::at("by page"))?;
                check_bytes("by page: unmapped", unmapped, piece)
            }
            Self::BySpan(container, _) => {
                let unmapped = container.unmap(piece.range).map_err(Failed::at("by span"))?;
                check_bytes("by span: unmapped", unmapped, piece)
            }
        }
    }

    /// Leaves of the CPU's tables that were looked up so far, and steps over the IOMMU's that
    /// unmaps took; none of those where a step is a leaf.
    fn lookups(&self) -> (u64, Option<u64>) {
        match self {
            Self::ByPage(type1) => {
                let lookups = type1.lookups();
                (lookups.cpu, Some(lookups.iommu))
            }
            Self::BySpan(container, _) => (container.pinner().lookups(), None),
        }
    }

    /// What is mapped.
    fn census(&self) -> LeafCensus {
        match self {
            Self::ByPage(type1) => type1.census(),
            Self::BySpan(container, _) => container.census(),
        }
    }

    /// Whether nothing is left.
    pub(crate) fn check_empty(&self, ground: &Ground) -> Result<(), Failed> {
        let (mappings, tables, charged) = match self {
            Self::ByPage(type1) => (type1.mappings(), 0, 0),
            Self::BySpan(container, tables) => {
                (container.mappings(), tables.tables() - 1, container.account().used())
            }
        };
        ground.check(self.census().total(), mappings)?;
        if (tables, charged) == (0, 0) {
            return Ok(());
        }
        Err(Failed::new(format_args!(
            "left after all unmaps: {tables} tables below the root, {charged} bytes charged"
        )))
    }
}

fn check_bytes(what: &'static str, found: u64, piece: &Piece) -> Result<(), Failed> {
    let wanted = piece.bytes;
    if found == wanted {
        return Ok(());
    }
    Err(Failed::new(format_args!("{what} {found} bytes instead of {wanted}")))
}

/// The operations of a case, in the order of a run.
pub(crate) const OPS: [&str; 2] = ["map", "unmap"];

/// A case one way, over several runs; of each operation.
#[derive(Debug, Default)]
pub(crate) struct Measured {
    pub(crate) ns: [Series; 2],
    /// Of all threads; of none where one could not count.
    pub(crate) instructions: [Series; 2],
    /// The same in every run.
    pub(crate) lookups: [u64; 2],
    /// Entries of the IOMMU's tables that map it all.
    pub(crate) leaves: u64,
}

/// Maps and unmaps everything once.
pub(crate) fn run(way: &Way, ground: &Ground, measured: &mut Measured) -> Result<(), Failed> {
    let (cpu, steps) = way.lookups();
    let took = at_once(ground, |piece| way.map(ground, piece))?;
    measured.add(0, &took);
    measured.lookups[0] = way.lookups().0 - cpu;
    measured.leaves = way.census().total();
    let took = at_once(ground, |piece| way.unmap(piece))?;
    measured.add(1, &took);
    let steps = way.lookups().1.zip(steps).map(|(after, before)| after - before);
    measured.lookups[1] = steps.unwrap_or(measured.leaves);
    Ok(())
}

impl Measured {
    /// Adds what all threads took for an operation.
    fn add(&mut self, op: usize, took: &[Took]) {
        let begin = took.iter().map(|took| took.begin).min();
        let end = took.iter().map(|took| took.end).max();
        let ns = begin.zip(end).map_or(0, |(begin, end)| nanoseconds(end - begin));
        self.ns[op].add(ns, 1);
        let instructions: Option<u64> = took.iter().map(|took| took.instructions).sum();
        instructions.into_iter().for_each(|count| self.instructions[op].add(count, 1));
    }
}

/// One operation on everything, by all threads at once; a single one needs no other.
fn at_once(
    ground: &Ground,
    each: impl Fn(&Piece) -> Result<(), Failed> + Sync,
) -> Result<Vec<Took>, Failed> {
    let work = |pieces: &Vec<Piece>, gate: &Gate| {
        let meter = Meter::of_this_thread();
        gate.pass();
        let begun = meter.begin();
        pieces.iter().try_for_each(&each)?;
        Ok(meter.end(begun))
    };
    match &ground.shares[..] {
        [only] => Ok(vec![work(only, &Gate::default())?]),
        many => crew::at_once(many.iter(), work, || ()),
    }
}
