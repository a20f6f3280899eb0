//! An SMMUv3 whose registers are memory, and which does at once what it is told.

use alloc::sync::Arc;

use dmaspan::io_pgtable::{ArmLpaeS1, PageTable};
use dmaspan::iommu::{Attachment, Domain, Prepared, ReservedRegions, Target};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3, SmmuV3Config, Stage};
use dmaspan_drivers::{Mmio, MmioRegion};

use crate::hardware::{Bare, Words};
use crate::tables::Tables;

/// Both pages of registers (IHI 0070, 6.1).
const REGISTERS: u64 = 0x2_0000;
const PAGE: u64 = 4096;

/// Stage 1 by 64-bit tables, coherent, with ASIDs of 16 bits; 16 streams, 2^8 commands and 2^7
/// events; range invalidation; 48 bits, granule 4K (6.3.1, 6.3.2, 6.3.4, 6.3.6).
const IDS: [(u64, u32); 4] = [
    (0x0, 1 << 1 | 1 << 3 | 1 << 4 | 1 << 12),
    (0x4, 8 << 21 | 7 << 16 | 4),
    (0xc, 1 << 10),
    (0x14, 5 | 1 << 4),
];
/// CR0 and IRQ_CTRL with what acknowledges them; CMDQ_PROD and CMDQ_CONS.
const ANSWERS: [(u64, u64); 3] = [(0x20, 0x24), (0x50, 0x54), (0x98, 0x9c)];
const CMDQ_PROD: u64 = 0x98;
const GBPA: u64 = 0x44;
const GBPA_UPDATE: u32 = 1 << 31;

/// The registers of hardware that answers.
struct Answering(MmioRegion);

impl Mmio for Answering {
    fn read32(&self, offset: u64) -> u32 {
        self.0.read32(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        let value = if offset == GBPA { value & !GBPA_UPDATE } else { value };
        self.0.write32(offset, value);
        for (_, answer) in ANSWERS.into_iter().filter(|&(register, _)| register == offset) {
            self.0.write32(answer, value);
        }
    }

    fn read64(&self, offset: u64) -> u64 {
        self.0.read64(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.0.write64(offset, value);
    }
}

/// Registers that say what there is.
fn registers() -> Option<MmioRegion> {
    let memory = Words::new(REGISTERS, PAGE)?;
    // SAFETY: the memory is never given back, and reached through this alone.
    let region = unsafe { MmioRegion::new(memory.start(), REGISTERS) };
    IDS.into_iter().for_each(|(offset, value)| region.write32(offset, value));
    Some(region)
}

/// Maps and unmaps a page for a stream, and meets hardware that does not answer. `None` where
/// anything is not as it should be.
pub fn exercise() -> Option<()> {
    let config = SmmuV3Config::default();
    // SAFETY: there is no hardware.
    let silent = unsafe { SmmuV3::new(registers()?, Bare, config) };
    silent.is_err().then_some(())?;

    let registers = Arc::new(Answering(registers()?));
    let placed = || registers.read32(CMDQ_PROD);
    // SAFETY: the hardware reads nothing.
    let smmu = unsafe { SmmuV3::new(Arc::clone(&registers), Bare, config) }.ok()?;
    let format = ArmLpaeS1::<12>::new(smmu.stage1_config(12).ok()?).ok()?;
    let ops = smmu.ops(Stage::First, OnFault::Terminate).ok()?;
    let domain = Arc::new(Domain::new(PageTable::new(format, Tables).ok()?, ops).ok()?);
    let stream = Attachment::new(smmu.stream(5, ReservedRegions::new()).ok()?).ok()?;
    stream.attach(Target::Paging(Prepared::new(Arc::clone(&domain)))).ok()?;

    let page = Span::new(PhysAddr::new(0x8000_0000), PAGE).ok()?;
    // SAFETY: no device reads or writes.
    unsafe { domain.map_spans(Iova::new(PAGE), &[page], Prot::READ_WRITE) }.ok()?;
    let before = placed();
    let range = IovaRange::from_len(Iova::new(PAGE), PAGE).ok()?;
    let mut room = SpanBuf::room::<1>();
    let mut spans = SpanBuf::new(&mut room);
    // SAFETY: there is one thread.
    let (synced, rest) = unsafe { domain.unmap(range, &mut spans) }.ok()?.sync().ok()?;
    (synced.covers(range) && rest.is_none() && spans.spans() == [page]).then_some(())?;
    // One command and a sync.
    (placed() == before + 2).then_some(())
}
