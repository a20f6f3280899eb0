use std::sync::{Arc, MutexGuard};

use dmaspan::{HostAddr, PhysAddr, Span};
use dmaspan_linux::{FrameMap, LinuxPinner, Lookup, MemoryKind};
use dmaspan_sim::bus::BusError;
use dmaspan_sim::iotlb::Planted;

use super::*;
use crate::bus::MemoryBus;
use crate::pinned::pinning_turn;
use crate::soft_iommu::{PROT, SoftIommu, TableIotlb};

const BYTES: u64 = 4 << 20;
const PAGE: u64 = 4096;

/// Memory that is mapped for a device, one page behind its start.
struct Setup {
    iommu: SoftIommu<HostAddr>,
    memory: Arc<Memory>,
    spans: Vec<Span<HostAddr>>,
    range: IovaRange,
    // The last to go: until then the memory is pinned.
    _turn: MutexGuard<'static, ()>,
}

impl Setup {
    fn new() -> Self {
        let turn = pinning_turn();
        let memory = Arc::new(Memory::new(MemoryKind::Base, BYTES + PAGE).unwrap());
        let user = memory.sub_range(PAGE, BYTES).unwrap();
        let iommu = SoftIommu::new::<12>(LinuxPinner::<HostAddr>::new().unwrap(), BYTES).unwrap();
        let range = IovaRange::from_len(Iova::new(7 << 30), BYTES).unwrap();
        iommu.container.map(&memory, user, range.start(), PROT).unwrap();
        let mut spans = Vec::new();
        let frames = iommu.container.pinner().frames();
        frames.frames(&memory, user, Lookup::EveryPage, &mut spans).unwrap();
        Self { iommu, memory, spans, range, _turn: turn }
    }

    fn bus(&self) -> MemoryBus<HostAddr> {
        let user = self.memory.sub_range(PAGE, BYTES).unwrap();
        let frames = FrameMap::new(&self.memory, user, &self.spans).unwrap();
        MemoryBus::new(Arc::clone(&self.memory), frames)
    }

    fn device<B: Bus>(
        &self,
        bus: B,
    ) -> SimDevice<dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker, dmaspan::io_pgtable::Arena, B>
    {
        let iotlb: TableIotlb = self.iommu.iotlb.clone();
        SimDevice::new(iotlb, bus)
    }

    fn mapped(&self) -> Mapped<'_> {
        Mapped { memory: &self.memory, offset: PAGE, range: self.range }
    }
}

/// A bus that changes a byte on its way, for one address of the memory.
struct Flips<B> {
    bus: B,
    at: PhysAddr,
    which: Access,
}

impl<B> Flips<B> {
    fn flip(&self, paddr: PhysAddr, buf: &mut [u8], access: Access) {
        let at = self.at.get().checked_sub(paddr.get()).and_then(|at| usize::try_from(at).ok());
        if let Some(byte) = at.and_then(|at| buf.get_mut(at))
            && access == self.which
        {
            *byte ^= 0x10;
        }
    }
}

impl<B: Bus> Bus for Flips<B> {
    fn read(&self, paddr: PhysAddr, buf: &mut [u8]) -> Result<(), BusError> {
        self.bus.read(paddr, buf)?;
        self.flip(paddr, buf, Access::Read);
        Ok(())
    }

    fn write(&self, paddr: PhysAddr, buf: &[u8]) -> Result<(), BusError> {
        let mut buf = buf.to_vec();
        self.flip(paddr, &mut buf, Access::Write);
        self.bus.write(paddr, &buf)
    }
}

#[test]
fn every_byte_passes_and_nothing_is_left_after_the_unmap() {
    let setup = Setup::new();
    let device = setup.device(setup.bus());
    let advanced = std::cell::Cell::new(0);
    let checked = setup.mapped().check(&device, &|bytes| advanced.set(advanced.get() + bytes));
    assert_eq!(checked, Checked { bytes: BYTES, mismatch: None });
    assert_eq!(advanced.get(), PASSES * BYTES);
    assert!(stale(device.iotlb(), setup.range, PAGE).translations == 2 * BYTES / PAGE);
    setup.iommu.container.unmap(setup.range).unwrap();
    assert_eq!(stale(device.iotlb(), setup.range, PAGE), Stale::default());
    assert!(setup.iommu.is_empty());
}

#[test]
fn an_unmap_whose_flush_is_left_out_is_found() {
    let setup = Setup::new();
    let device = setup.device(setup.bus());
    assert_eq!(setup.mapped().check(&device, &|_| ()).mismatch, None);
    setup.iommu.iotlb.drop_invalidations(Planted::IgnoreAll);
    setup.iommu.container.unmap(setup.range).unwrap();
    let found = stale(device.iotlb(), setup.range, PAGE);
    assert!(found.translations > 0);
    assert_eq!(found.first, Some(setup.range.start()));
}

#[test]
fn a_byte_that_changes_on_the_way_is_named_by_its_word() {
    let setup = Setup::new();
    let paddr = PhysAddr::new(setup.spans[0].start().get() + 0x123);
    let iova = setup.range.start().wrapping_add(0x120);
    let flips = |which| setup.device(Flips { bus: setup.bus(), at: paddr, which });
    let checked = setup.mapped().check(&flips(Access::Write), &|_| ());
    let Some(Mismatch::CpuSees { iova: found, .. }) = checked.mismatch else {
        panic!("{checked:?}");
    };
    assert_eq!((found, checked.bytes), (iova, 0));
    let checked = setup.mapped().check(&flips(Access::Read), &|_| ());
    let Some(Mismatch::DeviceReads { iova: found, .. }) = checked.mismatch else {
        panic!("{checked:?}");
    };
    assert_eq!((found, checked.bytes), (iova, 0x120));
}

#[test]
fn what_is_not_mapped_is_named_by_its_address() {
    let setup = Setup::new();
    let device = setup.device(setup.bus());
    setup.iommu.container.unmap(setup.range).unwrap();
    let checked = setup.mapped().check(&device, &|_| ());
    let Some(Mismatch::Refused { iova, .. }) = checked.mismatch else { panic!("{checked:?}") };
    assert_eq!((iova, checked.bytes), (setup.range.start(), 0));
}

#[test]
fn no_two_words_of_the_patterns_are_equal() {
    let mut words: Vec<u64> = (0..1 << 16)
        .flat_map(|n| [pattern(Writer::Device, n * 8), pattern(Writer::Cpu, n * 8)])
        .collect();
    words.sort_unstable();
    words.dedup();
    assert_eq!(words.len(), 2 << 16);
}
