//! Buffers, devices and platforms for the DMA API.

use std::sync::Arc;

use dmaspan::dma::{
    BouncePool, Device, DeviceConfig, Direct, DmaConfig, DmaDomain, DmaMemory, Error, Flush,
    Mapping, Piece, Translation, Unmapped, Via,
};
use dmaspan::io_pgtable::{Arena, ArmLpaeS1, PageTable};
use dmaspan::iommu::Domain;
use dmaspan::{Coherency, DmaAddr, Iova, PhysAddr, Platform, Span};
use dmaspan_sim::bounce::SimPool;
use dmaspan_sim::bus::Bus as _;
use dmaspan_sim::fault::{Faults, Faulty};
use dmaspan_sim::iotlb::Iotlb;
use dmaspan_sim::memory::SimMemory;
use dmaspan_sim::walker::arm_lpae::ArmLpaeS1Walker;
use parking_lot::Mutex;

use crate::common::{arena, format, span, walker};

/// Where the memory of these tests begins, and the bytes of it.
pub(crate) const RAM: u64 = 0x8000_0000;
/// Little under Miri, which is hundreds of times slower.
pub(crate) const BYTES: u64 = if cfg!(miri) { 2 << 20 } else { 64 << 20 };
/// What stands in the frames around a buffer.
pub(crate) const OTHERS: u8 = 0xee;

/// What was done to caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caches {
    WrittenBack(Span),
    Invalidated(Span),
}

/// One CPU whose clock stands still, and which says what is done to its caches.
#[derive(Clone, Debug, Default)]
pub(crate) struct Host {
    pub(crate) caches: Arc<Mutex<Vec<Caches>>>,
}

impl Host {
    /// What was done since the last time.
    pub(crate) fn taken(&self) -> Vec<Caches> {
        std::mem::take(&mut *self.caches.lock())
    }
}

impl Platform for Host {
    type Lock = parking_lot::RawMutex;

    fn cpu(&self) -> usize {
        0
    }

    fn now(&self) -> u64 {
        0
    }

    fn write_back(&self, span: Span) {
        self.caches.lock().push(Caches::WrittenBack(span));
    }

    fn invalidate(&self, span: Span) {
        self.caches.lock().push(Caches::Invalidated(span));
    }
}

/// A buffer in frames of its own. They are pinned, and freed when it is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: Arc<SimMemory>,
    frames: Span,
    piece: Piece,
}

// SAFETY: the frames are the buffer's until it is dropped, and simulated: nothing refers to them.
unsafe impl DmaMemory for Buffer {
    fn pieces(&self) -> &[Piece] {
        std::slice::from_ref(&self.piece)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.memory.unpin_frames(&[self.frames], dmaspan::pin::Dirty::Written);
        self.memory.free(&[self.frames]);
    }
}

/// The bytes that a CPU, or a device, writes: never 0, `OTHERS` or poison.
pub(crate) fn pattern(len: u64, seed: u8) -> Vec<u8> {
    (0..len).map(|n| 1 + u8::try_from((n * 7 + u64::from(seed)) % 100).unwrap()).collect()
}

impl Buffer {
    /// `len` bytes at `offset` of their first frame, filled with a pattern.
    pub(crate) fn new(memory: &Arc<SimMemory>, offset: u64, len: u64) -> Self {
        let frame = 1u64 << memory.granule_lg2();
        let bytes = (offset + len).next_multiple_of(frame);
        let frames = memory.allocate(bytes, memory.granule_lg2()).unwrap();
        memory.pin_frames(&[frames]);
        let others = vec![OTHERS; usize::try_from(bytes).unwrap()];
        memory.cpu_write(frames.paddr(), &others).unwrap();
        let piece = Piece::memory(span(frames.paddr().get() + offset, len));
        memory.cpu_write(piece.span.paddr(), &pattern(len, 1)).unwrap();
        Self { memory: Arc::clone(memory), frames, piece }
    }

    pub(crate) fn via(mut self, via: Via) -> Self {
        self.piece.via = via;
        self
    }

    pub(crate) fn span(&self) -> Span {
        self.piece.span
    }

    pub(crate) fn frames(&self) -> Span {
        self.frames
    }

    /// The buffer's bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        read(&self.memory, self.piece.span)
    }

    /// Whether nothing was written around the buffer.
    pub(crate) fn is_whole(&self) -> bool {
        let all = read(&self.memory, self.frames);
        let before = usize::try_from(self.piece.span.paddr().get() - self.frames.paddr().get());
        let before = before.unwrap();
        let len = usize::try_from(self.piece.span.len()).unwrap();
        all[..before].iter().chain(&all[before + len..]).all(|byte| *byte == OTHERS)
    }
}

pub(crate) fn read(memory: &SimMemory, span: Span) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(span.len()).unwrap()];
    memory.cpu_read(span.paddr(), &mut bytes).unwrap();
    bytes
}

pub(crate) type Tlb = Iotlb<ArmLpaeS1Walker, Arena>;
pub(crate) type Translated<const G: u32, H = Buffer> =
    DmaDomain<ArmLpaeS1<G>, Faulty<Arena>, Faulty<Tlb>, Host, H>;
pub(crate) type Pool = Faulty<SimPool>;

/// Memory with a pool at its start, an IOMMU, and what may fail of them.
pub(crate) struct Rig<const G: u32> {
    pub(crate) memory: Arc<SimMemory>,
    pub(crate) faults: Faults,
    pub(crate) pool: SimPool,
    pub(crate) tables: Arena,
    pub(crate) iotlb: Tlb,
    pub(crate) host: Host,
    pub(crate) domain: Arc<Translated<G>>,
    pub(crate) direct: Arc<Direct<Buffer, Host>>,
}

/// All that a refused operation must leave as it was.
pub(crate) type State = (usize, usize, u64, (usize, usize), Vec<Caches>);

impl<const G: u32> Rig<G> {
    pub(crate) fn new(flush: Flush) -> Self {
        let memory = Arc::new(SimMemory::new(PhysAddr::new(RAM), BYTES, G).unwrap());
        let pool = SimPool::new(Arc::clone(&memory), span(RAM, 16 << G)).unwrap();
        let (faults, host) = (Faults::none(), Host::default());
        let tables = arena();
        let table =
            PageTable::new(format::<G>(48, 48), Faulty::new(tables.clone(), &faults)).unwrap();
        let iotlb = Iotlb::new(walker(table.format(), table.root()), tables.clone());
        let domain = Domain::new(table, Faulty::new(iotlb.clone(), &faults)).unwrap();
        let config = DmaConfig { flush, ..DmaConfig::new(1) };
        let domain = Arc::new(DmaDomain::new(domain, config, host.clone()).unwrap());
        let direct = Arc::new(Direct::new(span(RAM, BYTES), host.clone()));
        Self { memory, faults, pool, tables, iotlb, host, domain, direct }
    }

    pub(crate) fn translated(&self, config: DeviceConfig) -> Device<Translated<G>, Pool> {
        let pool = Faulty::new(self.pool.clone(), &self.faults);
        Device::new(Arc::clone(&self.domain), pool, config).unwrap()
    }

    pub(crate) fn direct(
        &self,
        config: DeviceConfig,
    ) -> Result<Device<Direct<Buffer, Host>, Pool>, Error> {
        let pool = Faulty::new(self.pool.clone(), &self.faults);
        Device::new(Arc::clone(&self.direct), pool, config)
    }

    pub(crate) fn buffer(&self, offset: u64, len: u64) -> Buffer {
        Buffer::new(&self.memory, offset, len)
    }

    pub(crate) fn state(&self) -> State {
        (
            self.pool.held(),
            self.tables.tables(),
            self.memory.pinned_frames(),
            self.domain.waiting(),
            self.host.caches.lock().clone(),
        )
    }

    /// A device behind the IOMMU.
    pub(crate) fn behind(&self) -> impl Dma {
        dmaspan_sim::device::SimDevice::new(self.iotlb.clone(), Arc::clone(&self.memory))
    }

    /// A device without one.
    pub(crate) fn beside(&self) -> impl Dma {
        Arc::clone(&self.memory)
    }
}

/// A device's accesses.
pub(crate) trait Dma {
    fn read(&self, addr: DmaAddr, len: u64) -> Option<Vec<u8>>;
    fn write(&self, addr: DmaAddr, bytes: &[u8]) -> Option<()>;
}

impl Dma for dmaspan_sim::device::SimDevice<ArmLpaeS1Walker, Arena, Arc<SimMemory>> {
    fn read(&self, addr: DmaAddr, len: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        self.read(Iova::new(addr.get()), &mut bytes).ok().map(|()| bytes)
    }

    fn write(&self, addr: DmaAddr, bytes: &[u8]) -> Option<()> {
        self.write(Iova::new(addr.get()), bytes).ok()
    }
}

impl Dma for Arc<SimMemory> {
    fn read(&self, addr: DmaAddr, len: u64) -> Option<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(len).unwrap()];
        (**self).read(PhysAddr::new(addr.get()), &mut bytes).ok().map(|()| bytes)
    }

    fn write(&self, addr: DmaAddr, bytes: &[u8]) -> Option<()> {
        (**self).write(PhysAddr::new(addr.get()), bytes).ok()
    }
}

/// The memory of a strict unmap.
pub(crate) fn unmap<T: Translation<Memory = Buffer>, B: BouncePool>(
    device: &Device<T, B>,
    mapping: Mapping<T, B>,
) -> Buffer {
    match device.unmap(mapping) {
        Ok(Unmapped::Released(buffer)) => buffer,
        Ok(Unmapped::Queued) => panic!("a strict unmap was queued"),
        Err(failed) => panic!("{}", failed.error),
    }
}

/// A device with addresses of so many bits, that does not see caches.
pub(crate) fn non_coherent(config: DeviceConfig) -> DeviceConfig {
    DeviceConfig { coherency: Coherency::NonCoherent, ..config }
}

/// A device that is not trusted.
pub(crate) fn untrusted(config: DeviceConfig) -> DeviceConfig {
    DeviceConfig { trust: dmaspan::dma::Trust::Untrusted, ..config }
}
