//! An IOMMU of software: page tables, an IOTLB over them and the container that maps.

use std::error::Error;
use std::fmt;

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::Domain;
use dmaspan::{Account, Container, PhysAddr, Prot};
use dmaspan_linux::{FrameAddress, LinuxPinner};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::arm_lpae::{ArmLpaeS1Walker, ArmS1WalkRegisters};

/// What a device may do with what is mapped for it.
pub(crate) const PROT: Prot = Prot::READ_WRITE.union(Prot::CACHE);

/// Bits of IOVAs and of physical addresses.
const ADDRESS_BITS: u32 = 48;

/// The physical address of the first table: any, since tables and memory are reached separately.
const TABLES_AT: PhysAddr = PhysAddr::new(1 << 40);

/// The tables as the walker's manual describes them, and what was read from them.
pub(crate) type TableIotlb = Iotlb<ArmLpaeS1Walker, Arena>;

/// Page tables of the process with a granule of `2^G` bytes.
pub(crate) type Table<const G: u32> = PageTable<ArmLpaeS1<G>, Arena>;

/// Why there is no software IOMMU.
pub(crate) type BuildError = Box<dyn Error + Send + Sync>;

/// A container over page tables that a device of this process can use.
#[derive(Debug)]
pub(crate) struct SoftIommu<A: FrameAddress> {
    /// What maps.
    pub(crate) container: Container<LinuxPinner<A>, parking_lot::RawMutex>,
    /// Where its tables are.
    pub(crate) tables: Arena,
    /// What a device translates by.
    pub(crate) iotlb: TableIotlb,
    /// How many tables there are while nothing is mapped: the root.
    empty_tables: usize,
}

/// What is still there though everything was unmapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Left {
    /// Mappings that the container has.
    mappings: usize,
    /// Leaves of these mappings.
    leaves: usize,
    /// Tables below the root.
    tables: usize,
    /// Leaves that the IOTLB holds.
    cached_leaves: usize,
    /// Links to tables that the IOTLB holds.
    cached_links: usize,
}

impl Left {
    fn parts(&self) -> [(usize, &'static str); 5] {
        [
            (self.mappings, "mappings"),
            (self.leaves, "leaves in the tables"),
            (self.tables, "tables below the root"),
            (self.cached_leaves, "leaves in the IOTLB"),
            (self.cached_links, "links to tables in the IOTLB"),
        ]
    }

    /// How much there is of everything together.
    pub(crate) fn count(&self) -> u64 {
        let count: usize = self.parts().iter().map(|(count, _)| count).sum();
        u64::try_from(count).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Left {
    /// What there is: `2 tables below the root, 1 leaves in the IOTLB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.parts().into_iter().filter(|(count, _)| *count > 0);
        let parts: Vec<String> = parts.map(|(count, what)| format!("{count} {what}")).collect();
        f.write_str(&parts.join(", "))
    }
}

impl<A: FrameAddress> SoftIommu<A> {
    /// One with tables of a granule of `2^G` bytes, for `bytes` of memory.
    ///
    /// # Errors
    ///
    /// [`BuildError`], for a granule that Arm does not have.
    pub(crate) fn new<const G: u32>(
        pinner: LinuxPinner<A>,
        bytes: u64,
    ) -> Result<Self, BuildError> {
        let (table, tables) = new_table::<G>(bytes)?;
        let registers = table.format().registers(table.root());
        let walker = ArmLpaeS1Walker::new(ArmS1WalkRegisters {
            ttbr: registers.ttbr,
            tcr: registers.tcr,
            mair: registers.mair,
            ..Default::default()
        })?;
        let iotlb = Iotlb::new(walker, tables.clone());
        let domain = Domain::new(table, iotlb.reaching::<A>())?;
        let container = Container::with_domain(pinner, domain, Account::new(bytes));
        let empty_tables = tables.tables();
        Ok(Self { container, tables, iotlb, empty_tables })
    }

    /// Whether nothing is mapped and charged.
    pub(crate) fn is_empty(&self) -> bool {
        self.container.mappings() == 0 && self.container.account().used() == 0
    }

    /// What is still there, after everything was unmapped. Ask before addresses are tried again,
    /// which fills the IOTLB.
    pub(crate) fn left(&self) -> Left {
        let leaves: u64 = self.container.census().sizes().map(|(_, count)| count).sum();
        Left {
            mappings: self.container.mappings(),
            leaves: usize::try_from(leaves).unwrap_or(usize::MAX),
            tables: self.tables.tables().saturating_sub(self.empty_tables),
            cached_leaves: self.iotlb.cached_leaves(),
            cached_links: self.iotlb.cached_links(),
        }
    }
}

/// An empty table with memory for all tables that `bytes` of memory can need.
pub(crate) fn new_table<const G: u32>(bytes: u64) -> Result<(Table<G>, Arena), BuildError> {
    let format = ArmLpaeS1::<G>::new(ArmLpaeS1Config::new(ADDRESS_BITS, ADDRESS_BITS))?;
    // An entry of 8 bytes for each page, as much again for upper levels, and some at the ends.
    let arena = Arena::new(TABLES_AT, ((bytes >> G) << 4) + (64 << G));
    Ok((PageTable::new(format, arena.clone())?, arena))
}
