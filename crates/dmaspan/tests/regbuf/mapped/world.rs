//! A user's memory, and devices with and without an IOMMU that it is registered for.

use std::sync::Arc;

use dmaspan::dma::{
    Device, DeviceConfig, Direct, DmaConfig, DmaDomain, Flush, MappedSource, NoPool, Registered,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS1Config, PageTable};
use dmaspan::iommu::Domain;
use dmaspan::regbuf::{Pinned, Registry};
use dmaspan::{Account, DmaAddr, Iova, PhysAddr, Platform, Prot, Span, UserAddr, UserRange};
use dmaspan_sim::bus::Bus as _;
use dmaspan_sim::device::DmaError;
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::{SimMemory, SimPinner, SimSpace};
use dmaspan_sim::sanitizer::{Sanitized, Sanitizer};
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;

pub(crate) use crate::common::{Rng, USER, part, size};

pub(crate) const RAM: u64 = 0x8000_0000;
pub(crate) const BYTES: u64 = 64 << 20;
pub(crate) const PAGE: u64 = 0x1000;

/// One CPU whose clock stands still.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host;

impl Platform for Host {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }
}

pub(crate) type Memory = Pinned<Faulty<SimPinner>>;
pub(crate) type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
pub(crate) type Dma<const G: u32, H = Registered> =
    DmaDomain<ArmLpaeS1<G>, Faulty<Arena>, Sanitized<Faulty<Tlb>>, Host, H>;
pub(crate) type Source<T> = MappedSource<Memory, T>;

/// A user and its memory.
pub(crate) struct World {
    pub(crate) memory: Arc<SimMemory>,
    pub(crate) space: Arc<SimSpace>,
    pub(crate) account: Arc<Account>,
    pub(crate) faults: Faults,
}

impl World {
    pub(crate) fn new() -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, 12).unwrap());
        let space = Arc::new(SimSpace::new(Arc::clone(&memory)));
        Self { memory, space, account: Account::new(BYTES), faults: Faults::none() }
    }

    /// Puts folios of these orders at the beginning of the user's memory, at places that the seed
    /// chooses.
    pub(crate) fn folios(&self, orders: &[u32], seed: u64) -> UserRange {
        let folios = self.memory.allocate_folios(orders, seed).unwrap();
        self.space.map(UserAddr::new(USER), &folios).unwrap()
    }

    pub(crate) fn pinned(&self) -> Memory {
        let pinner = Faulty::new(SimPinner::new(Arc::clone(&self.memory)), &self.faults);
        Pinned::new(Arc::new(pinner), Arc::clone(&self.space), Arc::clone(&self.account), 12)
    }

    pub(crate) fn read(&self, range: UserRange) -> Vec<u8> {
        let mut bytes = vec![0; size(range.checked_len().unwrap())];
        self.space.read(range.start(), &mut bytes).unwrap();
        bytes
    }

    /// How many frames are pinned, and how many bytes are charged.
    pub(crate) fn held(&self) -> (u64, u64) {
        (self.memory.pinned_frames(), self.account.used())
    }

    pub(crate) fn direct(&self, config: DeviceConfig) -> Arc<Device<Direct<Registered, Host>>> {
        let ram = Span::new(PhysAddr::new(RAM), BYTES).unwrap();
        Arc::new(Device::new(Arc::new(Direct::new(ram, Host)), NoPool, config).unwrap())
    }
}

/// A domain, its hardware, and a device in it.
pub(crate) struct Behind<const G: u32> {
    pub(crate) domain: Arc<Dma<G>>,
    pub(crate) device: Arc<Device<Dma<G>>>,
    pub(crate) tables: Arena,
    pub(crate) iotlb: Tlb,
    pub(crate) sanitizer: Sanitizer,
    memory: Arc<SimMemory>,
}

impl<const G: u32> Behind<G> {
    pub(crate) fn new(world: &World, flush: Flush) -> Self {
        Self::with(world, flush, DeviceConfig::bits(48))
    }

    pub(crate) fn with(world: &World, flush: Flush, config: DeviceConfig) -> Self {
        let tables = Arena::new(PhysAddr::new(0x4000_0000), 16 << 20);
        let format = ArmLpaeS1::new(ArmLpaeS1Config::new(48, 48)).unwrap();
        let table = PageTable::new(format, Faulty::new(tables.clone(), &world.faults)).unwrap();
        let registers = table.format().registers(table.root());
        let walker = ArmLpaeS1Walker::new(registers.into());
        let iotlb = Iotlb::new(walker.unwrap(), tables.clone());
        let sanitizer = Sanitizer::default();
        let hooks = Sanitized::new(Faulty::new(iotlb.clone(), &world.faults), &sanitizer);
        let domain = Domain::new(table, hooks).unwrap();
        let dma = DmaConfig { flush, ..DmaConfig::new(1) };
        let domain = Arc::new(DmaDomain::new(domain, dma, Host).unwrap());
        let device = Arc::new(Device::new(Arc::clone(&domain), NoPool, config).unwrap());
        let memory = Arc::clone(&world.memory);
        Self { domain, device, tables, iotlb, sanitizer, memory }
    }

    pub(crate) fn registry(&self, world: &World) -> Registry<Source<Dma<G>>> {
        Registry::new(MappedSource::new(world.pinned(), Arc::clone(&self.device)))
    }

    fn hardware(&self) -> dmaspan_sim::device::SimDevice<ArmLpaeS1Walker, Arena, Arc<SimMemory>> {
        dmaspan_sim::device::SimDevice::new(self.iotlb.clone(), Arc::clone(&self.memory))
    }

    /// How many ranges of IOVAs are in use, and how many unmaps wait and are in quarantine.
    pub(crate) fn state(&self) -> (usize, (usize, usize)) {
        (self.domain.iovas().stats().live, self.domain.waiting())
    }

    /// Nothing is mapped, and nothing was done too late, twice or never.
    pub(crate) fn check_end(&self) {
        assert_eq!(self.state(), (0, (0, 0)));
        let all = dmaspan::IovaRange::new(Iova::new(0), Iova::new(u64::MAX >> 16)).unwrap();
        assert_eq!(self.sanitizer.mapped(all), []);
        assert_eq!(self.iotlb.stale_leaves(all), []);
        assert!(self.sanitizer.finish().is_empty(), "{}", self.sanitizer);
        assert!(self.memory.violations().is_empty(), "{:?}", self.memory.violations());
    }
}

/// A device's accesses.
pub(crate) trait Accesses {
    fn read(&self, at: Span<DmaAddr>) -> Option<Vec<u8>>;
    fn write(&self, at: DmaAddr, bytes: &[u8]) -> Option<()>;
}

impl<const G: u32> Accesses for Behind<G> {
    fn read(&self, at: Span<DmaAddr>) -> Option<Vec<u8>> {
        let mut bytes = vec![0; size(at.len())];
        let read = self.hardware().read(Iova::new(at.start().get()), &mut bytes);
        fault_or(read).map(|()| bytes)
    }

    fn write(&self, at: DmaAddr, bytes: &[u8]) -> Option<()> {
        fault_or(self.hardware().write(Iova::new(at.get()), bytes))
    }
}

/// Where an access does not fault, it finds memory.
fn fault_or(accessed: Result<(), DmaError>) -> Option<()> {
    match accessed {
        Ok(()) => Some(()),
        Err(DmaError::Fault { .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

impl Accesses for Arc<SimMemory> {
    fn read(&self, at: Span<DmaAddr>) -> Option<Vec<u8>> {
        let mut bytes = vec![0; size(at.len())];
        (**self).read(PhysAddr::new(at.start().get()), &mut bytes).ok().map(|()| bytes)
    }

    fn write(&self, at: DmaAddr, bytes: &[u8]) -> Option<()> {
        (**self).write(PhysAddr::new(at.get()), bytes).ok()
    }
}

/// The physical buffer of a range, for devices to share.
pub(crate) fn physical(
    world: &World,
    user: UserRange,
    access: Prot,
) -> Arc<dmaspan::regbuf::Buffer<PhysAddr>> {
    Arc::new(world.pinned().buffer(user, access).unwrap())
}
