//! Domains to map into.

use dmaspan::io_pgtable::{
    Arena, ArmLpaeS1, ArmLpaeS1Config, DirtyTracking, PageTable, TableMemory,
};
use dmaspan::iommu::Domain;
use dmaspan::{Iova, IovaRange, PhysAddr, Prot};
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

pub(crate) const PROT: Prot = Prot::READ_WRITE.union(Prot::CACHE);

/// Instantiates generic tests for the three granules.
macro_rules! for_all_granules {
    ($($test:ident),* $(,)?) => {
        mod granule_4k { $(#[test] fn $test() { super::$test::<12>(); })* }
        mod granule_16k { $(#[test] fn $test() { super::$test::<14>(); })* }
        mod granule_64k { $(#[test] fn $test() { super::$test::<16>(); })* }
    };
}
pub(crate) use for_all_granules;

pub(crate) fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

/// A domain over a simulated IOMMU, with faults in its tables and its invalidations.
pub(crate) type FaultyDomain<const G: u32> =
    Domain<ArmLpaeS1<G>, Faulty<Arena>, Faulty<Iotlb<ArmLpaeS1Walker, Arena>>>;

pub(crate) fn faulty_domain<const G: u32>(
    faults: &Faults,
) -> (FaultyDomain<G>, Arena, Iotlb<ArmLpaeS1Walker, Arena>) {
    domain_of(ArmLpaeS1Config::new(48, 48), faults)
}

/// The same with hardware that marks what it writes.
pub(crate) fn marking_domain<const G: u32>(
    faults: &Faults,
) -> (FaultyDomain<G>, Arena, Iotlb<ArmLpaeS1Walker, Arena>) {
    let dirty = DirtyTracking::Hardware;
    domain_of(ArmLpaeS1Config { dirty, ..ArmLpaeS1Config::new(48, 48) }, faults)
}

fn domain_of<const G: u32>(
    config: ArmLpaeS1Config,
    faults: &Faults,
) -> (FaultyDomain<G>, Arena, Iotlb<ArmLpaeS1Walker, Arena>) {
    let memory = Arena::new(PhysAddr::new(0x4000_0000), 64 << 20);
    let format = ArmLpaeS1::<G>::new(config).unwrap();
    let table = PageTable::new(format, Faulty::new(memory.clone(), faults)).unwrap();
    let iotlb = Iotlb::new(walker(&table), memory.clone());
    let domain = Domain::new(table, Faulty::new(iotlb.clone(), faults)).unwrap();
    (domain, memory, iotlb)
}

/// Reads Arm's tables as hardware does.
pub(crate) fn walker<const G: u32, M: TableMemory<u64>>(
    table: &PageTable<ArmLpaeS1<G>, M>,
) -> ArmLpaeS1Walker {
    let registers = table.format().registers(table.root());
    ArmLpaeS1Walker::new(registers.into()).unwrap()
}

/// Methods of a [`Pinner`](dmaspan::pin::Pinner) that are those of another one, in a field.
macro_rules! as_inner {
    ($inner:tt:) => {};
    ($inner:tt: unpin $($more:ident)*) => {
        fn unpin(
            &self,
            promise: dmaspan::Promise<'_>,
            pin: &mut Self::Pin,
            spans: &[Span],
            kind: Kind,
            dirty: Dirty,
        ) {
            self.$inner.unpin(promise, pin, spans, kind, dirty);
        }
        crate::common::as_inner!($inner: $($more)*);
    };
    ($inner:tt: release $($more:ident)*) => {
        fn release(&self, promise: dmaspan::Promise<'_>, pin: Self::Pin) {
            self.$inner.release(promise, pin);
        }
        crate::common::as_inner!($inner: $($more)*);
    };
    ($inner:tt: space_id $($more:ident)*) => {
        fn space_id(&self, space: &Self::Space) -> u64 {
            self.$inner.space_id(space)
        }
        crate::common::as_inner!($inner: $($more)*);
    };
    ($inner:tt: counts $($more:ident)*) => {
        fn chargeable(&self, space: &Self::Space, range: UserRange) -> u64 {
            self.$inner.chargeable(space, range)
        }

        fn knows_frames(&self) -> bool {
            self.$inner.knows_frames()
        }
        crate::common::as_inner!($inner: $($more)*);
    };
    ($inner:tt: copies $($more:ident)*) => {
        fn read(
            &self,
            space: &Self::Space,
            at: UserAddr,
            bytes: &mut [u8],
        ) -> Result<(), Self::Error> {
            self.$inner.read(space, at, bytes)
        }

        fn write(
            &self,
            space: &Self::Space,
            at: UserAddr,
            bytes: &[u8],
        ) -> Result<(), Self::Error> {
            self.$inner.write(space, at, bytes)
        }
        crate::common::as_inner!($inner: $($more)*);
    };
    ($inner:tt: errno $($more:ident)*) => {
        fn errno(&self, error: &Self::Error) -> Errno {
            self.$inner.errno(error)
        }
        crate::common::as_inner!($inner: $($more)*);
    };
}
pub(crate) use as_inner;
