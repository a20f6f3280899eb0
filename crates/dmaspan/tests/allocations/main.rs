//! The stack's allocations, and its state where there is no memory: an allocation that may fail
//! changes nothing. An allocation that may not fail ends the program, and operations that take
//! things away have none of them.
//!
//! A program of its own: its allocator counts what each thread allocates, and fails where a test
//! says so.

mod container_memory;
mod container_nomem;
mod dirty_bytes;
mod failing;
mod frames_nomem;
mod listing;
mod mapped_nomem;
mod pin_memory;
mod pool_nomem;
mod regbuf_bytes;
mod regbuf_nomem;
mod reservation;

use dmaspan::PhysAddr;
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::Domain;
use dmaspan_sim::allocator::{self, Watched};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// What `f` returns, and the bytes that it allocated, those that it freed again included.
fn allocated<R>(f: impl FnOnce() -> R) -> (R, u64) {
    let (result, allocated) = allocator::allocated(f);
    (result, allocated.bytes)
}

type Iommu = Iotlb<ArmLpaeS1Walker, Arena>;
type Arm = Domain<ArmLpaeS1<12>, Arena, Iommu>;

/// A table in memory of `bytes` that the arena has from the start, and an IOMMU that walks it.
fn table(bytes: u64) -> (PageTable<ArmLpaeS1<12>, Arena>, Iommu, Arena) {
    let tables = Arena::new(PhysAddr::new(0), bytes);
    let format = ArmLpaeS1::<12>::new(ArmLpaeS1Config::new(48, 48)).unwrap();
    let table = PageTable::new(format, tables.clone()).unwrap();
    let registers = table.format().registers(table.root());
    let walker = ArmLpaeS1Walker::new(registers.into());
    let iommu = Iotlb::new(walker.unwrap(), tables.clone());
    (table, iommu, tables)
}

/// A domain, and its tables.
fn domain(bytes: u64) -> (Arm, Arena) {
    let (table, iommu, tables) = table(bytes);
    (Domain::new(table, iommu).unwrap(), tables)
}
