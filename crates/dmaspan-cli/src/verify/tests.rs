use std::sync::{Arc, MutexGuard};

use dmaspan::iommu::FaultReason;
use dmaspan::{HostAddr, Span};
use dmaspan_linux::{FrameMap, LinuxPinner, Lookup, MemoryKind};
use dmaspan_sim::fault::{Forgets, SilentHooks};

use super::*;
use crate::bus::MemoryBus;
use crate::pinned::pinning_turn;
use crate::soft_iommu::{PROT, SoftContainer};

const BYTES: u64 = 4 << 20;
const PAGE: u64 = 4096;

/// Memory that is mapped for a device, one page behind its start.
struct Setup {
    iommu: SoftContainer<HostAddr, 12>,
    forgets: Forgets,
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
        let (pinner, forgets) = (LinuxPinner::<HostAddr>::new().unwrap(), Forgets::default());
        let hooks = |iommu| SilentHooks::new(iommu, &forgets);
        let iommu = SoftContainer::with_hooks(pinner, BYTES, hooks).unwrap();
        let range = IovaRange::from_len(Iova::new(7 << 30), BYTES).unwrap();
        iommu.container.map(&memory, user, range.start(), PROT).unwrap();
        let mut spans = Vec::new();
        let frames = iommu.container.pinner().frames();
        frames.frames(&memory, user, Lookup::EveryPage, &mut spans).unwrap();
        Self { iommu, forgets, memory, spans, range, _turn: turn }
    }

    fn bus(&self) -> MemoryBus<HostAddr> {
        let user = self.memory.sub_range(PAGE, BYTES).unwrap();
        let frames = FrameMap::new(&self.memory, user, &self.spans).unwrap();
        MemoryBus::new(Arc::clone(&self.memory), frames)
    }

    fn check(&self, bus: &impl Bus<HostAddr>) -> Checked {
        self.mapped().check(&mut self.iommu.device.lock(), bus, &|_| ())
    }

    fn stale(&self) -> Stale {
        stale(&mut self.iommu.device.lock(), self.range, PAGE)
    }

    fn mapped(&self) -> Mapped<'_> {
        Mapped { memory: &self.memory, offset: PAGE, range: self.range }
    }
}

/// A bus that changes a byte on its way, for one address of the memory.
struct Flips<B> {
    bus: B,
    at: HostAddr,
    which: FaultAccess,
}

impl<B> Flips<B> {
    fn flip(&self, start: HostAddr, buf: &mut [u8], access: FaultAccess) {
        let at = self.at.get().checked_sub(start.get()).and_then(|at| usize::try_from(at).ok());
        if let Some(byte) = at.and_then(|at| buf.get_mut(at))
            && access == self.which
        {
            *byte ^= 0x10;
        }
    }
}

impl<B: Bus<HostAddr>> Bus<HostAddr> for Flips<B> {
    fn read(&self, at: HostAddr, buf: &mut [u8]) -> Result<(), BusError> {
        self.bus.read(at, buf)?;
        self.flip(at, buf, FaultAccess::Read);
        Ok(())
    }

    fn write(&self, at: HostAddr, buf: &[u8]) -> Result<(), BusError> {
        let mut buf = buf.to_vec();
        self.flip(at, &mut buf, FaultAccess::Write);
        self.bus.write(at, &buf)
    }
}

#[test]
fn every_byte_passes_and_nothing_is_left_after_the_unmap() {
    let setup = Setup::new();
    let advanced = std::cell::Cell::new(0);
    let advance = |bytes| advanced.set(advanced.get() + bytes);
    let device = &mut *setup.iommu.device.lock();
    let checked = setup.mapped().check(device, &setup.bus(), &advance);
    assert_eq!(checked, Checked { bytes: BYTES, mismatch: None });
    assert_eq!(advanced.get(), PASSES * BYTES);
    assert!(stale(device, setup.range, PAGE).translations == 2 * BYTES / PAGE);
    setup.iommu.container.unmap(setup.range).unwrap();
    assert_eq!(stale(device, setup.range, PAGE), Stale::default());
    assert!(setup.iommu.is_empty());
}

#[test]
fn an_unmap_whose_flush_is_left_out_is_found() {
    let setup = Setup::new();
    assert_eq!(setup.check(&setup.bus()).mismatch, None);
    setup.forgets.nothing();
    setup.iommu.container.unmap(setup.range).unwrap();
    // All that the device found while it was mapped, though none of it is in the tables.
    let found = setup.stale();
    assert_eq!(found.translations, 2 * BYTES / PAGE);
    assert_eq!(found.first, Some(setup.range.start()));
}

#[test]
fn a_byte_that_changes_on_the_way_is_named_by_its_word() {
    let setup = Setup::new();
    let at = HostAddr::new(setup.spans[0].start().get() + 0x123);
    let iova = setup.range.start().wrapping_add(0x120);
    let checked = setup.check(&Flips { bus: setup.bus(), at, which: FaultAccess::Write });
    let Some(Mismatch::CpuSees { iova: found, .. }) = checked.mismatch else {
        panic!("{checked:?}");
    };
    assert_eq!((found, checked.bytes), (iova, 0));
    let checked = setup.check(&Flips { bus: setup.bus(), at, which: FaultAccess::Read });
    let Some(Mismatch::DeviceReads { iova: found, .. }) = checked.mismatch else {
        panic!("{checked:?}");
    };
    assert_eq!((found, checked.bytes), (iova, 0x120));
}

#[test]
fn what_is_not_mapped_is_named_by_its_address() {
    let setup = Setup::new();
    setup.iommu.container.unmap(setup.range).unwrap();
    let checked = setup.check(&setup.bus());
    let Some(Mismatch::Refused { iova, source }) = checked.mismatch else { panic!("{checked:?}") };
    assert_eq!((iova, checked.bytes), (setup.range.start(), 0));
    let AccessFailed::Fault(fault) = source else { panic!("{source:?}") };
    assert_eq!(fault.reason, FaultReason::Translation);
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
