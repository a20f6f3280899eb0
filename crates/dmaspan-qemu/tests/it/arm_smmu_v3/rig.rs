//! A machine with an SMMUv3, its driver, and devices behind it.

use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, ArmLpaeS1, ArmLpaeS2, Format, PageTable};
use dmaspan::iommu::{
    Attachment, Domain, FaultAccess, FaultHandler, FaultReason, FaultReport, FaultResponse,
    FaultState, Port as _, Prepared, ReservedRegions, Target,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use dmaspan_drivers::Handled;
use dmaspan_drivers::arm_smmu_v3::{
    OnFault, SmmuV3, SmmuV3Config, SmmuV3Format, SmmuV3Ops, SmmuV3Stream,
};
use dmaspan_qemu::{Arch, Buffer, CommandQueue, Edu, Machine, Pci, QemuHost, Tap, TestDev, ready};
use parking_lot::Mutex;

/// Where the machine `virt` has it.
pub(crate) const SMMU: u64 = 0x0905_0000;
/// The slots of the devices.
pub(crate) const WRITERS: [u8; 2] = [1, 2];
const COPIER: u8 = 5;
/// Room for an aligned leaf of 1 GiB.
const RAM: u64 = 2 << 30;

pub(crate) type Smmu = SmmuV3<Tap, QemuHost>;
pub(crate) type Ops = SmmuV3Ops<Tap, QemuHost>;
pub(crate) type DomainOf<F> = Domain<F, Arena, Ops>;
pub(crate) type Stream<F> = Attachment<SmmuV3Stream<DomainOf<F>, Tap, QemuHost>>;

/// Tables that are tried.
pub(crate) trait Tables: SmmuV3Format<Word = u64> + Sized + 'static {
    fn of(smmu: &Smmu) -> Self;
}

impl<const G: u32> Tables for ArmLpaeS1<G> {
    fn of(smmu: &Smmu) -> Self {
        Self::new(smmu.stage1_config(G).unwrap()).unwrap()
    }
}

impl<const G: u32> Tables for ArmLpaeS2<G> {
    fn of(smmu: &Smmu) -> Self {
        Self::new(smmu.stage2_config(G).unwrap()).unwrap()
    }
}

/// Keeps what it hears of.
#[derive(Default)]
pub(crate) struct Faults(Mutex<Vec<FaultReport>>);

impl FaultHandler for Faults {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.0.lock().push(*report);
        FaultResponse::Terminate
    }
}

impl Faults {
    pub(crate) fn take(&self) -> Vec<FaultReport> {
        std::mem::take(&mut *self.0.lock())
    }
}

pub(crate) struct Rig {
    pub(crate) smmu: Arc<Smmu>,
    pub(crate) tap: Tap,
    pub(crate) machine: Machine,
    pub(crate) writers: [TestDev; 2],
    pub(crate) copier: Edu,
    pub(crate) tables: Arena,
    pub(crate) faults: Arc<Faults>,
}

impl Rig {
    /// A machine of the newest kind; `None` without QEMU.
    pub(crate) fn new() -> Option<Self> {
        Self::with(SmmuV3Config::default())
    }

    pub(crate) fn with(config: SmmuV3Config) -> Option<Self> {
        let (machine, writers, copier) = machine("virt,iommu=smmuv3")?;
        let tap = tap(&machine);
        let smmu = driver(&machine, &tap, config);
        let tables = machine.ram().arena(16 << 20).unwrap();
        let faults = Arc::default();
        Some(Self { smmu, tap, machine, writers, copier, tables, faults })
    }

    pub(crate) fn domain<F: Tables>(&self) -> Arc<DomainOf<F>> {
        let ops = self.smmu.ops(F::STAGE, OnFault::Terminate).unwrap();
        let table = PageTable::new(F::of(&self.smmu), self.tables.clone()).unwrap();
        Arc::new(Domain::new(table, ops).unwrap())
    }

    /// The stream of the device in that slot, which is blocked.
    pub(crate) fn stream<F: Tables>(&self, slot: u8) -> Stream<F> {
        let port = self.smmu.stream(Pci::requester(slot), ReservedRegions::new()).unwrap();
        let stream = Attachment::new(port).unwrap();
        stream.port().faults().set(Some(Arc::clone(&self.faults) as Arc<dyn FaultHandler>));
        stream
    }

    pub(crate) fn page(&self) -> Buffer {
        self.machine.ram().allocate(0x1_0000).unwrap()
    }

    /// Writes 4 bytes by one of the writers; whether they arrived.
    pub(crate) fn write(&mut self, writer: usize, iova: u64, to: &Buffer) -> bool {
        to.set_word(0, 0);
        let said = self.writers[writer].write(iova, to.paddr(), 4).is_ok();
        let arrived = to.word(0) != 0;
        assert_eq!(said, arrived, "the device says otherwise of {iova:#x}");
        arrived
    }

    /// What was reported since the last call.
    pub(crate) fn reported(&self) -> (Handled, Vec<FaultReport>) {
        let handled = self.smmu.handle_faults().unwrap();
        (handled, self.faults.take())
    }

    /// A write at `iova` is refused, which is reported of the writer as a fault for that reason.
    pub(crate) fn refused(&mut self, writer: usize, iova: u64, to: &Buffer, reason: FaultReason) {
        assert!(!self.write(writer, iova, to), "a write at {iova:#x} arrived");
        let (handled, reports) = self.reported();
        assert_eq!((handled.reported, handled.malformed), (1, 0), "{handled:?}");
        let [report] = reports[..] else { panic!("{reports:?}") };
        assert_eq!(report.stream, Pci::requester(WRITERS[writer]));
        assert_eq!(report.iova, Iova::new(iova));
        assert_eq!(report.access, FaultAccess::Write);
        assert_eq!(report.reason, reason);
        assert_eq!(report.state, FaultState::Ended);
    }
}

/// A machine and the devices in it.
pub(crate) fn machine(kind: &str) -> Option<(Machine, [TestDev; 2], Edu)> {
    let machine = Machine::builder(ready(Arch::Aarch64)?, kind)
        .ram(RAM)
        .device("iommu-testdev,addr=1")
        .device("iommu-testdev,addr=2")
        .device("edu,addr=5,dma_mask=0xffffffffffffffff")
        .start()
        .unwrap();
    let pci = Pci::new(&machine);
    let writers = WRITERS.map(|slot| TestDev::new(&pci, slot).unwrap());
    let copier = Edu::new(&pci, COPIER).unwrap();
    Some((machine, writers, copier))
}

pub(crate) fn driver(machine: &Machine, tap: &Tap, config: SmmuV3Config) -> Arc<Smmu> {
    #[expect(unsafe_code, reason = "the machine is the test's alone")]
    // SAFETY: the registers are those of the machine's SMMU, which nobody else drives.
    unsafe { SmmuV3::new(tap.clone(), QemuHost::new(machine), config) }.unwrap()
}

pub(crate) fn tap(machine: &Machine) -> Tap {
    Tap::new(machine, machine.mmio(SMMU), CommandQueue::SMMU_V3)
}

pub(crate) fn attach<F: Tables>(stream: &Stream<F>, domain: &Arc<DomainOf<F>>) {
    stream.replace(Target::Paging(Prepared::new(Arc::clone(domain)))).unwrap();
}

pub(crate) fn map<F: Tables>(
    domain: &DomainOf<F>,
    iova: u64,
    paddr: PhysAddr,
    len: u64,
    prot: Prot,
) {
    let span = Span::new(paddr, len).unwrap();
    #[expect(unsafe_code, reason = "the memory is the machine's, which the test owns")]
    // SAFETY: nobody else uses the domain, and the machine's memory may be written at any time.
    unsafe { domain.map_spans(Iova::new(iova), &[span], prot) }.unwrap();
}

pub(crate) fn range(iova: u64, len: u64) -> IovaRange {
    IovaRange::from_len(Iova::new(iova), len).unwrap()
}

/// Unmaps and calls `meanwhile` before the sync.
pub(crate) fn unmap<F: Tables>(
    domain: &DomainOf<F>,
    iova: u64,
    len: u64,
    meanwhile: impl FnOnce(),
) {
    let mut room = SpanBuf::room::<8>();
    let mut spans = SpanBuf::new(&mut room);
    #[expect(unsafe_code, reason = "the test owns the IOVAs")]
    // SAFETY: nobody else uses the domain.
    let unsynced = unsafe { domain.unmap(range(iova, len), &mut spans) }.unwrap();
    meanwhile();
    let (_, rest) = unsynced.sync().unwrap();
    assert!(rest.is_none());
}

/// The granule of a format, in bytes.
pub(crate) const fn granule<F: Format>() -> u64 {
    1 << F::GRANULE_LG2
}
