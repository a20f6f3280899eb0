//! Mapping and unmapping a case, one way or the other, and how long that takes.

use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ConfigError, LeafCensus};
use dmaspan::{Account, PhysAddr, iommu};
use dmaspan_cli::stats::nanoseconds;
use dmaspan_sim::memory::SimPinner;

use super::ground::{Ground, Piece};
use super::plan::PAGE;
use crate::PROT;
use crate::crew::{self, Gate};
use crate::failed::Failed;
use crate::models::type1_before::Type1Before;
use crate::models::unwalked::UnwalkedContainer;
use crate::time::{Meter, Series, Took};

/// Bits of IOVAs and of physical addresses.
const ADDRESS_BITS: u32 = 48;
/// Where tables are: a multiple of every leaf, and where nothing else is.
const TABLES_AT: PhysAddr = PhysAddr::new(1 << 45);

fn format() -> Result<ArmLpaeS1<12>, ConfigError> {
    ArmLpaeS1::new(ArmLpaeS1Config::new(ADDRESS_BITS, ADDRESS_BITS))
}

/// Room for the tables of so many bytes by pages: an entry of 8 bytes each, as much again for upper
/// levels, and some at the ends. Memory is only used once tables lie in it.
fn table_bytes(bytes: u64) -> u64 {
    (bytes / PAGE) * 16 + (1 << 20)
}

/// A container, of now or of before.
pub(crate) trait Way: Sync + Sized {
    /// An empty one.
    fn over(ground: &Ground) -> Result<Self, Failed>;
    /// Maps a piece.
    fn map(&self, ground: &Ground, piece: &Piece) -> Result<(), Failed>;
    /// Unmaps a piece.
    fn unmap(&self, piece: &Piece) -> Result<(), Failed>;
    /// Leaves of the CPU's tables that were looked up so far.
    fn cpu_lookups(&self) -> u64;
    /// Steps over the IOMMU's tables that unmaps took so far; `None` where a step is a leaf.
    fn iommu_lookups(&self) -> Option<u64>;
    /// What is mapped.
    fn census(&self) -> LeafCensus;
    /// Whether nothing is left.
    fn check_empty(&self, ground: &Ground) -> Result<(), Failed>;
}

fn check_bytes(what: &'static str, found: u64, piece: &Piece) -> Result<(), Failed> {
    let wanted = piece.bytes;
    if found == wanted {
        return Ok(());
    }
    Err(Failed::new(format_args!("{what} {found} bytes instead of {wanted}")))
}

/// As Linux did it.
pub(crate) type ByPage = Type1Before<ArmLpaeS1<12>>;

impl Way for ByPage {
    fn over(ground: &Ground) -> Result<Self, Failed> {
        let (memory, bytes) = (ground.memory.clone(), table_bytes(ground.bytes));
        let type1 = Type1Before::new(format()?, TABLES_AT, bytes, memory, u64::MAX);
        Ok(type1.map_err(iommu::Error::from)?)
    }

    fn map(&self, ground: &Ground, piece: &Piece) -> Result<(), Failed> {
        let mapped = self.map(&ground.space, piece.user, piece.range.start(), PROT);
        mapped.map_err(Failed::at("by page"))
    }

    fn unmap(&self, piece: &Piece) -> Result<(), Failed> {
        let unmapped = self.unmap(piece.range).map_err(Failed::at("by page"))?;
        check_bytes("by page: unmapped", unmapped, piece)
    }

    fn cpu_lookups(&self) -> u64 {
        self.lookups().cpu
    }

    fn iommu_lookups(&self) -> Option<u64> {
        Some(self.lookups().iommu)
    }

    fn census(&self) -> LeafCensus {
        self.census()
    }

    fn check_empty(&self, ground: &Ground) -> Result<(), Failed> {
        ground.check(self.census().total(), self.mappings())
    }
}

/// The container.
pub(crate) type BySpan = UnwalkedContainer<SimPinner>;

impl Way for BySpan {
    fn over(ground: &Ground) -> Result<Self, Failed> {
        let (pinner, account) = (SimPinner::new(ground.memory.clone()), Account::new(u64::MAX));
        let bytes = table_bytes(ground.bytes);
        Ok(UnwalkedContainer::new(format()?, TABLES_AT, bytes, pinner, account)?)
    }

    fn map(&self, ground: &Ground, piece: &Piece) -> Result<(), Failed> {
        let container = self.container();
        let mapped = container.map(&ground.space, piece.user, piece.range.start(), PROT);
        let mapped = mapped.map_err(Failed::at("by span"))?;
        check_bytes("by span: mapped", mapped.memory + mapped.mmio, piece)
    }

    fn unmap(&self, piece: &Piece) -> Result<(), Failed> {
        let unmapped = self.container().unmap(piece.range).map_err(Failed::at("by span"))?;
        check_bytes("by span: unmapped", unmapped, piece)
    }

    fn cpu_lookups(&self) -> u64 {
        self.container().pinner().lookups()
    }

    fn iommu_lookups(&self) -> Option<u64> {
        None
    }

    fn census(&self) -> LeafCensus {
        self.container().census()
    }

    fn check_empty(&self, ground: &Ground) -> Result<(), Failed> {
        let container = self.container();
        ground.check(container.census().total(), container.mappings())?;
        match (self.tables() - 1, container.account().used()) {
            (0, 0) => Ok(()),
            (tables, charged) => Err(Failed::new(format_args!(
                "left after all unmaps: {tables} tables below the root, {charged} bytes charged"
            ))),
        }
    }
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
pub(crate) fn run(way: &impl Way, ground: &Ground, measured: &mut Measured) -> Result<(), Failed> {
    let cpu = way.cpu_lookups();
    let took = at_once(ground, |piece| way.map(ground, piece))?;
    measured.add(0, &took);
    measured.lookups[0] = way.cpu_lookups() - cpu;
    measured.leaves = way.census().total();
    let steps = way.iommu_lookups();
    let took = at_once(ground, |piece| way.unmap(piece))?;
    measured.add(1, &took);
    let steps = way.iommu_lookups().zip(steps).map(|(after, before)| after - before);
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
