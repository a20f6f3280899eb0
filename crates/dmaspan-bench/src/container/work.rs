//! Mapping and unmapping a case, one way or the other.

use std::sync::Arc;

use crate::models::type1_before::{Type1Before, Type1Error};
use crate::models::unwalked::UnwalkedContainer;
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS1Config, ConfigError, LeafCensus};
use dmaspan::{
    Account, Iova, IovaRange, PhysAddr, RangeError, Span, UserAddr, UserRange, container, iommu,
};
use dmaspan_sim::memory::{
    AllocError, Books, MapOptions, SimMemory, SimPinError, SimPinner, SimSpace,
};

use super::plan::{Case, GIB, Lie, PAGE, What};
use crate::PROT;

/// Bits of IOVAs and of physical addresses.
const ADDRESS_BITS: u32 = 48;
/// Where everything is: multiples of every leaf, and different, so that nothing is right by
/// accident.
const MEMORY_AT: PhysAddr = PhysAddr::new(1 << 36);
const BARS_AT: PhysAddr = PhysAddr::new(1 << 46);
const TABLES_AT: PhysAddr = PhysAddr::new(1 << 45);
const USER_AT: UserAddr = UserAddr::new(0x7e00_0000_0000);
const IOVA_AT: Iova = Iova::new(0x0200_0000_0000);
/// log2 of the bytes of a block in which base pages are scattered (`pageblock_order`).
const BLOCK_LG2: u32 = 21;
/// By which folios are scattered; any number.
const SEED: u64 = 17;

/// Why a case could not be measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ContainerBenchError {
    /// The format has no such tables.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There is no domain.
    #[error(transparent)]
    Domain(#[from] iommu::Error),
    /// A range is none.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// There is no simulated memory.
    #[error("simulated memory: {0}")]
    Memory(#[from] AllocError),
    /// The space refused a range.
    #[error("the simulated space has no place for {0} bytes")]
    NoPlace(u64),
    /// By page something failed.
    #[error("by page: {0}")]
    ByPage(#[from] Type1Error),
    /// The container failed.
    #[error("by span: {0}")]
    BySpan(#[from] container::Error<SimPinError>),
    /// Something else than the whole range was mapped or unmapped.
    #[error("{what} {found} bytes instead of {wanted}")]
    OtherBytes {
        /// What was done.
        what: &'static str,
        /// To how many bytes.
        found: u64,
        /// To how many it should have been.
        wanted: u64,
    },
    /// Something was done to memory that may not be.
    #[error("memory was used wrongly: {0}")]
    Violation(String),
    /// Something is there though everything was unmapped.
    #[error("left after all unmaps: {0}")]
    Left(String),
    /// The system gave no thread.
    #[error("there is no thread: {0}")]
    NoThread(std::io::Error),
}

/// A mapping to make.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    user: UserRange,
    range: IovaRange,
    bytes: u64,
}

/// What a case maps: a user's memory or BARs, and where.
#[derive(Debug)]
pub(crate) struct Ground {
    memory: Arc<SimMemory>,
    space: Arc<SimSpace>,
    /// The mappings of each thread.
    pub(crate) shares: Vec<Vec<Piece>>,
    bytes: u64,
}

impl Ground {
    /// Allocates and maps for the user what a case is about.
    pub(crate) fn new(case: &Case) -> Result<Self, ContainerBenchError> {
        let simulated = match case.what {
            // Room to lie apart in, which base pages choose from four times as much.
            What::Memory { .. } => 4 * case.bytes + 4 * GIB,
            What::Bars { .. } => GIB,
        };
        let memory = SimMemory::with_books(MEMORY_AT, simulated, 12, Books::Folios)?;
        let memory = Arc::new(memory);
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        let no_place = ContainerBenchError::NoPlace(case.bytes);
        let user = match case.what {
            What::Memory { order, lie } => {
                space.map(USER_AT, &folios(&memory, case.bytes, order, lie)?)
            }
            What::Bars { leaf_lg2, .. } => {
                let options = MapOptions { max_leaf_lg2: leaf_lg2, ..MapOptions::default() };
                space.map_device_with(USER_AT, Span::new(BARS_AT, case.bytes)?, options)
            }
        };
        user.ok_or(no_place)?;
        let (per_thread, bytes) = match case.what {
            What::Memory { .. } => (1, case.bytes / case.threads),
            What::Bars { count, .. } => (count / case.threads, case.bytes / count),
        };
        let piece = |n: u64| {
            let user = UserRange::from_len(USER_AT.wrapping_add(n * bytes), bytes)?;
            let range = IovaRange::from_len(IOVA_AT.wrapping_add(n * bytes), bytes)?;
            Ok(Piece { user, range, bytes })
        };
        let share = |thread: u64| (0..per_thread).map(|n| piece(thread * per_thread + n)).collect();
        let shares = (0..case.threads).map(share).collect::<Result<_, RangeError>>()?;
        Ok(Self { memory, space, shares, bytes: case.bytes })
    }

    /// Whether nothing is pinned, and nothing was done that may not be.
    fn check(&self, leaves: u64, mappings: usize) -> Result<(), ContainerBenchError> {
        if let Some(first) = self.memory.violations().first() {
            return Err(ContainerBenchError::Violation(format!("{first:?}")));
        }
        let pinned = self.memory.pinned_frames();
        if pinned > 0 || leaves > 0 || mappings > 0 {
            let left = format!("{pinned} pinned pages, {leaves} leaves, {mappings} mappings");
            return Err(ContainerBenchError::Left(left));
        }
        Ok(())
    }
}

/// Folios, as many as `bytes` take.
fn folios(memory: &SimMemory, bytes: u64, order: u32, lie: Lie) -> Result<Vec<Span>, AllocError> {
    let count = usize::try_from((bytes / PAGE) >> order).unwrap_or(usize::MAX);
    match (lie, order) {
        (Lie::Fresh, _) => (0..count).map(|_| Ok(memory.allocate_folio(order)?.span())).collect(),
        (Lie::Apart, 0) => memory.allocate_scattered(bytes, SEED),
        (Lie::InBlocks, _) => Ok(in_blocks(memory.allocate_scattered(bytes, SEED)?)),
        (Lie::Apart, _) => memory.allocate_folios(&vec![order; count], SEED),
    }
}

/// Base pages block by block, in each as scattered as before: no two neighbours follow each other.
fn in_blocks(mut pages: Vec<Span>) -> Vec<Span> {
    pages.sort_by_key(|page| page.paddr().get() >> BLOCK_LG2);
    for next in 1..pages.len() {
        // In descending order neighbours are two runs. What lies before them is no neighbour of the
        // higher one.
        if pages[next - 1].join(pages[next]).is_some() {
            pages.swap(next - 1, next);
        }
    }
    pages
}

fn format() -> Result<ArmLpaeS1<12>, ConfigError> {
    ArmLpaeS1::new(ArmLpaeS1Config::new(ADDRESS_BITS, ADDRESS_BITS))
}

/// Room for the tables of so many bytes by pages: an entry of 8 bytes each, as much again for upper
/// levels, and some at the ends. Memory is only used once tables lie in it.
fn table_bytes(bytes: u64) -> u64 {
    (bytes / PAGE) * 16 + (1 << 20)
}

/// A container, of now or of before.
pub(crate) trait Way: Sync {
    /// Maps a piece.
    fn map(&self, piece: &Piece) -> Result<(), ContainerBenchError>;
    /// Unmaps a piece.
    fn unmap(&self, piece: &Piece) -> Result<(), ContainerBenchError>;
    /// Leaves of the CPU's tables that were looked up so far.
    fn cpu_lookups(&self) -> u64;
    /// Steps over the IOMMU's tables that unmaps took so far; `None` where a step is a leaf.
    fn iommu_lookups(&self) -> Option<u64>;
    /// What is mapped.
    fn census(&self) -> LeafCensus;
    /// Whether nothing is left.
    fn check_empty(&self) -> Result<(), ContainerBenchError>;
}

fn check_bytes(what: &'static str, found: u64, piece: &Piece) -> Result<(), ContainerBenchError> {
    let wanted = piece.bytes;
    if found == wanted {
        return Ok(());
    }
    Err(ContainerBenchError::OtherBytes { what, found, wanted })
}

/// As Linux did it.
#[derive(Debug)]
pub(crate) struct ByPage<'g> {
    ground: &'g Ground,
    type1: Type1Before<ArmLpaeS1<12>>,
}

impl<'g> ByPage<'g> {
    pub(crate) fn new(ground: &'g Ground) -> Result<Self, ContainerBenchError> {
        let memory = Arc::clone(&ground.memory);
        let bytes = table_bytes(ground.bytes);
        let type1 = Type1Before::new(format()?, TABLES_AT, bytes, memory, u64::MAX);
        Ok(Self { ground, type1: type1.map_err(iommu::Error::from)? })
    }
}

impl Way for ByPage<'_> {
    fn map(&self, piece: &Piece) -> Result<(), ContainerBenchError> {
        let Self { ground, type1 } = self;
        Ok(type1.map(&ground.space, piece.user, piece.range.start(), PROT)?)
    }

    fn unmap(&self, piece: &Piece) -> Result<(), ContainerBenchError> {
        check_bytes("by page: unmapped", self.type1.unmap(piece.range)?, piece)
    }

    fn cpu_lookups(&self) -> u64 {
        self.type1.lookups().cpu
    }

    fn iommu_lookups(&self) -> Option<u64> {
        Some(self.type1.lookups().iommu)
    }

    fn census(&self) -> LeafCensus {
        self.type1.census()
    }

    fn check_empty(&self) -> Result<(), ContainerBenchError> {
        self.ground.check(self.census().total(), self.type1.mappings())
    }
}

/// The container.
#[derive(Debug)]
pub(crate) struct BySpan<'g> {
    ground: &'g Ground,
    container: UnwalkedContainer<SimPinner>,
}

impl<'g> BySpan<'g> {
    pub(crate) fn new(ground: &'g Ground) -> Result<Self, ContainerBenchError> {
        let pinner = SimPinner::new(Arc::clone(&ground.memory));
        let (bytes, account) = (table_bytes(ground.bytes), Account::new(u64::MAX));
        let container = UnwalkedContainer::new(format()?, TABLES_AT, bytes, pinner, account)?;
        Ok(Self { ground, container })
    }
}

impl Way for BySpan<'_> {
    fn map(&self, piece: &Piece) -> Result<(), ContainerBenchError> {
        let container = self.container.container();
        let mapped = container.map(&self.ground.space, piece.user, piece.range.start(), PROT)?;
        check_bytes("by span: mapped", mapped.memory + mapped.mmio, piece)
    }

    fn unmap(&self, piece: &Piece) -> Result<(), ContainerBenchError> {
        check_bytes("by span: unmapped", self.container.container().unmap(piece.range)?, piece)
    }

    fn cpu_lookups(&self) -> u64 {
        self.container.container().pinner().lookups()
    }

    fn iommu_lookups(&self) -> Option<u64> {
        None
    }

    fn census(&self) -> LeafCensus {
        self.container.container().census()
    }

    fn check_empty(&self) -> Result<(), ContainerBenchError> {
        let container = self.container.container();
        self.ground.check(container.census().total(), container.mappings())?;
        match (self.container.tables(), container.account().used()) {
            (1, 0) => Ok(()),
            (tables, charged) => Err(ContainerBenchError::Left(format!(
                "{} tables below the root, {charged} bytes charged",
                tables - 1
            ))),
        }
    }
}
