//! A software IOMMU of this process: page tables, a device behind them and the container that maps.

use std::error::Error;
use std::fmt;

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::soft::SoftDevice;
use dmaspan::iommu::{Domain, IommuOps, SoftIommu};
use dmaspan::{Account, Container, PhysAddr, Prot};
use dmaspan_linux::{FrameAddress, LinuxPinner, UserPlatform};
use parking_lot::Mutex;

/// What a device may do with what is mapped for it.
pub(crate) const PROT: Prot = Prot::READ_WRITE.union(Prot::CACHE);

/// Bits of IOVAs and of physical addresses.
const ADDRESS_BITS: u32 = 48;

/// The physical address of the first table: any, since tables and memory are reached separately.
const TABLES_AT: PhysAddr = PhysAddr::new(1 << 40);

/// The number by which faults name the device.
const STREAM: u32 = 0;

/// A device behind tables with a granule of `2^G` bytes, with an IOTLB that keeps all it finds.
pub(crate) type Device<A, const G: u32> = SoftDevice<ArmLpaeS1<G>, Arena, A>;

/// What it translates by.
pub(crate) type Iommu<A, const G: u32> = SoftIommu<ArmLpaeS1<G>, Arena, A>;

/// Page tables of the process with a granule of `2^G` bytes.
pub(crate) type Table<const G: u32> = PageTable<ArmLpaeS1<G>, Arena>;

/// Why there is no software IOMMU.
pub(crate) type BuildError = Box<dyn Error + Send + Sync>;

/// A container over page tables that a device of this process can use.
#[derive(Debug)]
pub(crate) struct SoftContainer<A: FrameAddress, const G: u32> {
    /// What maps.
    pub(crate) container: Container<LinuxPinner<A>, parking_lot::RawMutex>,
    /// Where its tables are.
    pub(crate) tables: Arena,
    /// What uses what is mapped. It forgets nothing by itself: what an unmap leaves out is found.
    pub(crate) device: Mutex<Device<A, G>>,
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
    /// Spans that the device's IOTLB keeps.
    cached_spans: usize,
}

impl Left {
    fn parts(&self) -> [(usize, &'static str); 4] {
        [
            (self.mappings, "mappings"),
            (self.leaves, "leaves in the tables"),
            (self.tables, "tables below the root"),
            (self.cached_spans, "spans in the IOTLB"),
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

impl<A: FrameAddress, const G: u32> SoftContainer<A, G> {
    /// One for `bytes` of memory.
    ///
    /// # Errors
    ///
    /// [`BuildError`], for a granule that Arm does not have.
    pub(crate) fn new(pinner: LinuxPinner<A>, bytes: u64) -> Result<Self, BuildError> {
        Self::with_hooks(pinner, bytes, |iommu| iommu)
    }

    /// The same with the hooks that `hooks` makes of the IOMMU's.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub(crate) fn with_hooks<O: IommuOps<Address = A> + 'static>(
        pinner: LinuxPinner<A>,
        bytes: u64,
        hooks: impl FnOnce(Iommu<A, G>) -> O,
    ) -> Result<Self, BuildError> {
        let (table, tables) = new_table::<G>(bytes)?;
        let iommu = SoftIommu::over(&table).reaching::<A>().waiting_by(UserPlatform::sleeping);
        let mut device = iommu.device(STREAM);
        device.set_places(usize::try_from(bytes >> G).unwrap_or(usize::MAX))?;
        let domain = Domain::new(table, hooks(iommu))?;
        let container = Container::with_domain(pinner, domain, Account::new(bytes));
        let empty_tables = tables.tables();
        Ok(Self { container, tables, device: Mutex::new(device), empty_tables })
    }

    /// Whether nothing is mapped and charged.
    pub(crate) fn is_empty(&self) -> bool {
        self.container.mappings() == 0 && self.container.account().used() == 0
    }

    /// What is still there, after everything was unmapped.
    pub(crate) fn left(&self) -> Left {
        let leaves: u64 = self.container.census().sizes().map(|(_, count)| count).sum();
        Left {
            mappings: self.container.mappings(),
            leaves: usize::try_from(leaves).unwrap_or(usize::MAX),
            tables: self.tables.tables().saturating_sub(self.empty_tables),
            cached_spans: self.device.lock().cached().len(),
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
