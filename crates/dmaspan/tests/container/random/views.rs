//! Domains of several formats, and what devices behind them see.

use std::cell::Cell;
use std::sync::Arc;

use dmaspan::container::{Attach, Interrupts};
use dmaspan::io_pgtable::{
    AmdV1, AmdV1Config, Arena, ArmLpaeS1, ArmLpaeS1Config, DirtyTracking, Format, PageTable,
    TableMemory, VtdSs, VtdSsConfig, Word,
};
use dmaspan::iommu::{Domain, IommuOps, RegionKind, ReservedRegion, ReservedRegions};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, lg2};
use dmaspan_sim::bus::Bus;
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::{Hit, Iotlb, Planted};
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::walker::amd_v1::{AmdV1WalkRegisters, AmdV1Walker};
use dmaspan_sim::walker::vtd_ss::{VtdSsWalkRegisters, VtdSsWalker};
use dmaspan_sim::walker::{Access, Switch, Walker};

use super::world::Tried;
use crate::common::walker;

/// A leaf as the tables have it, or as an IOTLB does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Leaf {
    pub(crate) paddr: u64,
    pub(crate) prot: Prot,
    pub(crate) block: IovaRange,
}

/// What a device behind a domain sees.
pub(crate) trait View: Send + Sync {
    /// What the tables say, walked without caches.
    fn walk(&self, iova: u64) -> Option<Leaf>;
    /// What the IOTLB says, which remembers everything.
    fn translate(&self, iova: u64) -> Option<Leaf>;
    /// Has the device write there.
    fn write(&self, iova: u64, memory: &SimMemory, bytes: &[u8]) -> Option<Leaf>;
    /// Where the IOTLB has leaves that the tables contradict.
    fn stale(&self) -> Vec<u64>;
    /// How many links it has to tables that are not there any more.
    fn stale_links(&self) -> usize;
    /// How many of the next invalidations and notices of maps fail.
    fn deafen(&self, count: u64);
    fn tables(&self) -> usize;
}

struct Seen<W> {
    iotlb: Iotlb<W, Arena>,
    tables: Arena,
}

fn all() -> IovaRange {
    IovaRange::new(Iova::new(0), Iova::new(u64::MAX)).unwrap()
}

fn leaf(hit: Hit) -> Leaf {
    Leaf { paddr: hit.paddr.get(), prot: hit.prot, block: hit.block }
}

impl<W: Walker + Send + Sync> View for Seen<W> {
    fn walk(&self, iova: u64) -> Option<Leaf> {
        let found = self.iotlb.walker().walk(&self.tables, Iova::new(iova), Access::Read).ok()?;
        Some(Leaf { paddr: found.paddr.get(), prot: found.prot, block: found.group })
    }

    fn translate(&self, iova: u64) -> Option<Leaf> {
        self.iotlb.translate(Iova::new(iova), Access::Read).ok().map(leaf)
    }

    fn write(&self, iova: u64, memory: &SimMemory, bytes: &[u8]) -> Option<Leaf> {
        let write = |hit: Hit| {
            memory.write(hit.paddr, bytes).unwrap();
            leaf(hit)
        };
        self.iotlb.with_translation(Iova::new(iova), Access::Write, write).ok()
    }

    fn stale(&self) -> Vec<u64> {
        let stale = self.iotlb.stale_leaves(all());
        stale.into_iter().map(|leaf| leaf.iova.get()).collect()
    }

    fn stale_links(&self) -> usize {
        self.iotlb.stale_links(all()).len()
    }

    fn deafen(&self, count: u64) {
        self.iotlb.fail_next_invalidations(count);
        self.iotlb.fail_next_sync_maps(count);
    }

    fn tables(&self) -> usize {
        self.tables.tables()
    }
}

thread_local! {
    /// The bug of the hardware behind the domains that this thread makes.
    pub(crate) static PLANTED: Cell<Planted> = const { Cell::new(Planted::None) };
}

/// Interrupts of devices behind some domains: reserved.
pub(crate) const MSI: (u64, u64) = (0xfee0_0000, 0xfeef_ffff);

/// What a model knows of a domain.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) page_sizes: u64,
    pub(crate) aperture: IovaRange,
    pub(crate) reserved: Option<(u64, u64)>,
    pub(crate) marks: bool,
}

/// What to attach: a format, and what is known of the devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) format: u8,
    pub(crate) marks: bool,
    pub(crate) msi: bool,
    pub(crate) isolated: bool,
}

/// A domain that is not attached yet: attaching it is what is left to do.
pub(crate) struct Fresh<const BATCH: usize> {
    pub(crate) view: Arc<dyn View>,
    pub(crate) facts: Facts,
    pub(crate) attach: AttachFn<BATCH>,
}

type AttachFn<const BATCH: usize> = Box<
    dyn FnOnce(&Tried<BATCH>, &dyn Fn() -> bool) -> Result<super::world::Id, super::world::Failed>,
>;

/// A domain of the kind.
pub(crate) fn fresh<const BATCH: usize>(kind: Kind, faults: &Faults) -> Fresh<BATCH> {
    let dirty = if kind.marks { DirtyTracking::Hardware } else { DirtyTracking::Off };
    let tables = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
    let memory = Faulty::new(tables.clone(), faults);
    match kind.format % 4 {
        0 => arm::<12, BATCH>(kind, dirty, memory, &tables, faults),
        1 => arm::<14, BATCH>(kind, dirty, memory, &tables, faults),
        2 => {
            let config = AmdV1Config { first_levels: 4, dirty, ..AmdV1Config::new(48, 48) };
            let table = PageTable::new(AmdV1::new(config).unwrap(), memory).unwrap();
            let (root, level) = table.root_and_level();
            let dte = table.format().registers(root, level).dte;
            let walker = AmdV1Walker::new(AmdV1WalkRegisters { dte }).unwrap();
            finish(kind, table, walker, tables, faults)
        }
        _ => {
            let config = VtdSsConfig { dirty, ..VtdSsConfig::new(39, 46) };
            let table = PageTable::new(VtdSs::new(config).unwrap(), memory).unwrap();
            let [entry, _] = table.format().registers(table.root()).pasid_entry;
            let walker = VtdSsWalker::new(VtdSsWalkRegisters {
                ssptptr: entry & !lg2::mask(12),
                aw: u8::try_from(entry >> 2 & 0b111).unwrap(),
                ssade: if entry & 1 << 9 != 0 { Switch::On } else { Switch::Off },
                host_lg2: 46,
                sslps: 0b11,
                snoop_control: Switch::Off,
            });
            finish(kind, table, walker.unwrap(), tables, faults)
        }
    }
}

/// The formats with leaves of 4K.
pub(crate) const FORMATS_4K: [u8; 3] = [0, 2, 3];

fn arm<const G: u32, const BATCH: usize>(
    kind: Kind,
    dirty: DirtyTracking,
    memory: Faulty<Arena>,
    tables: &Arena,
    faults: &Faults,
) -> Fresh<BATCH> {
    let config = ArmLpaeS1Config { dirty, ..ArmLpaeS1Config::new(48, 48) };
    let table = PageTable::new(ArmLpaeS1::<G>::new(config).unwrap(), memory).unwrap();
    let walker = walker(&table);
    finish(kind, table, walker, tables.clone(), faults)
}

fn finish<F: Format + 'static, W: Walker + Send + Sync + 'static, const BATCH: usize>(
    kind: Kind,
    table: PageTable<F, Faulty<Arena>>,
    walker: W,
    tables: Arena,
    faults: &Faults,
) -> Fresh<BATCH>
where
    Faulty<Arena>: TableMemory<F::Word>,
    Iotlb<W, Arena>: IommuOps<Address = PhysAddr>,
    F::Word: Word,
{
    let iotlb = Iotlb::new(walker, tables.clone());
    iotlb.drop_invalidations(PLANTED.get());
    let domain = Domain::new(table, Faulty::new(iotlb.clone(), faults)).unwrap();
    let reserved = kind.msi.then_some(MSI);
    let geometry = domain.geometry();
    let (page_sizes, aperture) = (geometry.page_sizes, geometry.aperture);
    let facts = Facts { page_sizes, aperture, reserved, marks: kind.marks };
    let attach = move |container: &Tried<BATCH>, cancelled: &dyn Fn() -> bool| {
        let mut regions = ReservedRegions::new();
        if let Some((start, last)) = reserved {
            let range = IovaRange::new(Iova::new(start), Iova::new(last)).unwrap();
            let (kind, prot) = (RegionKind::Msi, Prot::WRITE);
            regions.insert(ReservedRegion { range, kind, prot }).unwrap();
        }
        let interrupts = if kind.isolated { Interrupts::Isolated } else { Interrupts::Unsafe };
        let how = Attach::new(interrupts).regions(regions).cancelled_by(cancelled);
        container.attach(domain, how)
    };
    Fresh { view: Arc::new(Seen { iotlb, tables }), facts, attach: Box::new(attach) }
}
