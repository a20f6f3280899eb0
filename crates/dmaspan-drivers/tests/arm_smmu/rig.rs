//! An SMMU with its driver, domains of any format, and devices behind streams.

use std::sync::Arc;

use dmaspan::io_pgtable::{
    Arena, ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS2, ArmV7s, ArmV7sConfig, Format, PageTable,
    TableMemory,
};
use dmaspan::iommu::{
    Attachment, Domain, FaultHandler, FaultReport, FaultResponse, Port, Prepared, ReservedRegions,
    Target,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use dmaspan_drivers::arm_smmu::{
    SmmuV2, SmmuV2Config, SmmuV2Features, SmmuV2Format, SmmuV2Ops, SmmuV2Stream,
};
use dmaspan_sim::smmu_v2::{Smmu, SmmuConfig};
use dmaspan_sim::walker::Access;
use parking_lot::Mutex;

use super::host::{Hardware, LeftOut, Ram, Registers, TestHost};

pub(crate) type Driver = SmmuV2<Registers, TestHost>;
pub(crate) type Ops = SmmuV2Ops<Registers, TestHost>;
pub(crate) type TestDomain<F> = Domain<F, Arena, Ops>;
pub(crate) type Stream<F> = SmmuV2Stream<TestDomain<F>, Registers, TestHost>;
pub(crate) type Attached<F> = Attachment<Stream<F>>;

/// A format, made for what the hardware has. Groups are among its sizes, where it has any.
pub(crate) trait Tables: SmmuV2Format + Clone + Send + Sync + 'static {
    const NAME: &'static str;
    fn fitting(features: &SmmuV2Features) -> Self;
}

impl<const G: u32> Tables for ArmLpaeS1<G> {
    const NAME: &'static str = "AArch64 stage 1";
    fn fitting(features: &SmmuV2Features) -> Self {
        Self::new(features.stage_1_config()).unwrap()
    }
}

impl<const G: u32> Tables for ArmLpaeS2<G> {
    const NAME: &'static str = "AArch64 stage 2";
    fn fitting(features: &SmmuV2Features) -> Self {
        Self::new(features.stage_2_config()).unwrap()
    }
}

impl Tables for ArmLpae32S1 {
    const NAME: &'static str = "AArch32 stage 1, long";
    fn fitting(features: &SmmuV2Features) -> Self {
        Self::new(features.long_stage_1_config()).unwrap()
    }
}

impl Tables for ArmLpae32S2 {
    const NAME: &'static str = "AArch32 stage 2";
    fn fitting(features: &SmmuV2Features) -> Self {
        Self::new(features.long_stage_2_config()).unwrap()
    }
}

impl Tables for ArmV7s {
    const NAME: &'static str = "AArch32 short";
    fn fitting(features: &SmmuV2Features) -> Self {
        let page_sizes = Some(Self::PAGE_SIZES);
        Self::new(ArmV7sConfig { page_sizes, ..features.short_config() }).unwrap()
    }
}

/// Calls a generic function for every format that an SMMUv2 walks.
#[macro_export]
macro_rules! for_all_tables {
    ($body:ident $(, $argument:expr)*) => {{
        use dmaspan::io_pgtable::{ArmLpae32S1, ArmLpae32S2, ArmLpaeS1, ArmLpaeS2, ArmV7s};
        $body::<ArmLpaeS1<12>>($($argument),*);
        $body::<ArmLpaeS1<14>>($($argument),*);
        $body::<ArmLpaeS1<16>>($($argument),*);
        $body::<ArmLpaeS2<12>>($($argument),*);
        $body::<ArmLpaeS2<14>>($($argument),*);
        $body::<ArmLpaeS2<16>>($($argument),*);
        $body::<ArmLpae32S1>($($argument),*);
        $body::<ArmLpae32S2>($($argument),*);
        $body::<ArmV7s>($($argument),*);
    }};
}

/// An SMMU that was reset by its driver.
pub(crate) struct Rig {
    pub(crate) hardware: Arc<Hardware>,
    pub(crate) registers: Registers,
    pub(crate) driver: Arc<Driver>,
    pub(crate) tables: Arena,
    pub(crate) ram: Ram,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(SmmuConfig::default(), SmmuV2Config::new())
    }

    pub(crate) fn with(hardware: SmmuConfig, config: SmmuV2Config) -> Self {
        let tables = arena();
        let hardware = Arc::new(Smmu::new(hardware, tables.clone()).unwrap());
        Self::over(hardware, tables, config, LeftOut::Nothing)
    }

    pub(crate) fn over(
        hardware: Arc<Hardware>,
        tables: Arena,
        config: SmmuV2Config,
        left_out: LeftOut,
    ) -> Self {
        let registers = Registers::new(Arc::clone(&hardware), left_out);
        // SAFETY: the model is used by this driver alone, and reads tables from the arena.
        #[expect(unsafe_code, reason = "the promise to drive the hardware alone")]
        let driver = unsafe { SmmuV2::new(registers.clone(), TestHost, config) }.unwrap();
        Self { hardware, registers, driver, tables, ram: Ram::default() }
    }

    pub(crate) fn domain<F: Tables>(&self) -> Arc<TestDomain<F>>
    where
        Arena: TableMemory<F::Word>,
    {
        self.domain_of(F::fitting(self.driver.features()))
    }

    pub(crate) fn domain_of<F: SmmuV2Format>(&self, format: F) -> Arc<TestDomain<F>>
    where
        Arena: TableMemory<F::Word>,
    {
        let table = PageTable::new(format, self.tables.clone()).unwrap();
        Arc::new(Domain::new(table, self.driver.ops::<F>().unwrap()).unwrap())
    }

    pub(crate) fn stream<F: SmmuV2Format + Send + Sync>(&self, id: u32) -> Attached<F>
    where
        Arena: TableMemory<F::Word>,
    {
        Attachment::new(self.driver.stream(id, ReservedRegions::new()).unwrap()).unwrap()
    }

    /// Where an access of a stream arrives.
    pub(crate) fn probe(&self, stream: u16, iova: u64, access: Access) -> Option<u64> {
        let hit = self.hardware.access(stream, Iova::new(iova), access);
        hit.ok().map(|hit| hit.paddr.get())
    }

    pub(crate) fn reads(&self, stream: u16, iova: u64) -> Option<u64> {
        self.probe(stream, iova, Access::Read)
    }
}

pub(crate) fn arena() -> Arena {
    Arena::new(PhysAddr::new(0x4000_0000), 64 << 20)
}

pub(crate) fn target<F: SmmuV2Format + Send + Sync>(
    domain: &Arc<TestDomain<F>>,
) -> Target<TestDomain<F>>
where
    Arena: TableMemory<F::Word>,
{
    Target::Paging(Prepared::new(Arc::clone(domain)))
}

pub(crate) fn range(start: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(start), len).unwrap()
}

/// Maps contiguous memory. The devices of the model touch nothing but the rig's RAM.
#[expect(unsafe_code, reason = "simulated memory, one thread a range")]
pub(crate) fn map<F: SmmuV2Format>(
    domain: &TestDomain<F>,
    iova: u64,
    paddr: u64,
    len: u64,
    prot: Prot,
) where
    Arena: TableMemory<F::Word>,
{
    let span = Span::new(PhysAddr::new(paddr), len).unwrap();
    // SAFETY: nobody else works on the range, and the memory is simulated.
    unsafe { domain.map_spans(Iova::new(iova), &[span], prot) }.unwrap();
}

/// Unmaps and syncs.
#[expect(unsafe_code, reason = "simulated memory, one thread a range")]
pub(crate) fn unmap<F: SmmuV2Format>(domain: &TestDomain<F>, iova: u64, len: u64)
where
    Arena: TableMemory<F::Word>,
{
    let mut room = SpanBuf::room::<8>();
    // SAFETY: nobody else works on the range.
    let unmapped = unsafe { domain.unmap(range(iova, len), &mut SpanBuf::new(&mut room)) }.unwrap();
    let (_synced, rest) = unmapped.sync().unwrap();
    assert!(rest.is_none());
}

/// The bytes of the smallest leaf.
pub(crate) fn granule<F: Format>() -> u64 {
    1 << F::GRANULE_LG2
}

/// Keeps what it hears.
pub(crate) struct Recorder {
    pub(crate) reports: Mutex<Vec<FaultReport>>,
    pub(crate) response: FaultResponse,
}

impl Recorder {
    pub(crate) fn on<P: Port>(stream: &Attachment<P>) -> Arc<Self> {
        Self::answering(stream, FaultResponse::Terminate)
    }

    pub(crate) fn answering<P: Port>(stream: &Attachment<P>, response: FaultResponse) -> Arc<Self> {
        let recorder = Arc::new(Self { reports: Mutex::default(), response });
        stream.port().faults().set(Some(Arc::clone(&recorder) as _));
        recorder
    }

    pub(crate) fn take(&self) -> Vec<FaultReport> {
        std::mem::take(&mut self.reports.lock())
    }
}

impl FaultHandler for Recorder {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.reports.lock().push(*report);
        self.response
    }
}
