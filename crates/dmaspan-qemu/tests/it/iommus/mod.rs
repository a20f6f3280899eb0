//! A device of a machine behind each IOMMU, which reaches what is mapped in a domain of its own.

mod drivers;

use std::sync::Arc;

use dmaspan::dma::{DmaConfig, DmaDomain, DmaMemory};
use dmaspan::io_pgtable::{Arena, Format, PageTable};
use dmaspan::iommu::{
    Attachment, Domain, FaultAccess, FaultHandler, FaultReason, FaultReport, FaultResponse,
    IommuOps, Port, Prepared, Relaxable, ReservedRegions, Target,
};
use dmaspan::platform::OneThread;
use dmaspan::{IovaRange, PhysAddr};
use dmaspan_drivers::Handled;
use dmaspan_qemu::{Arch, Builder, Machine, Pci, ready};
use parking_lot::Mutex;

pub(crate) use drivers::{
    AmdVi, RiscvFirst, RiscvSecond, SmmuV3Stage1, SmmuV3Stage2, VtdFirstStage, VtdLegacy,
    VtdSecondStage,
};

/// What is mapped for devices.
pub(crate) type Memory = Box<dyn DmaMemory>;
/// The domain of a device.
pub(crate) type Translated<F, O> = DmaDomain<F, Arena, O, OneThread, Memory>;
pub(crate) type DomainOf<I> = Translated<<I as Iommu>::Format, <I as Iommu>::Ops>;

/// For page tables.
const TABLES: u64 = 4 << 20;

/// An IOMMU of a machine, by its driver, with one kind of tables.
pub(crate) trait Iommu: Sized + 'static {
    type Format: Format<Word = u64>;
    type Ops: IommuOps<Address = PhysAddr>;
    type Port: Port<Paging = DomainOf<Self>>;

    const ARCH: Arch;
    /// As behind `-M`.
    const MACHINE: &'static str;
    /// As behind `-device`.
    const DEVICES: &'static [&'static str];
    /// What is reported of an access to where nothing is mapped.
    const UNMAPPED: FaultReason = FaultReason::Translation;
    /// Whether the model says at what address a fault was.
    const NAMES_ADDRESSES: bool = true;

    /// Starts the driver.
    fn start(pci: &Pci) -> Self;

    fn format(&self) -> Self::Format;

    fn ops(&self) -> Self::Ops;

    fn port(&self, id: u32, regions: ReservedRegions) -> Self::Port;

    fn handle_faults(&self) -> Handled;
}

/// A machine with that IOMMU, and what else `with` adds to it. `None` without QEMU.
pub(crate) fn machine<I: Iommu>(with: impl FnOnce(Builder) -> Builder) -> Option<Machine> {
    let builder = Machine::builder(ready(I::ARCH)?, I::MACHINE);
    let builder = I::DEVICES.iter().fold(builder, |builder, device| builder.device(device));
    Some(with(builder).start().expect("QEMU starts"))
}

/// A device behind its IOMMU.
pub(crate) struct Behind<I: Iommu> {
    /// Detached on drop, before the domain goes.
    pub(crate) attachment: Attachment<I::Port>,
    pub(crate) domain: Arc<DomainOf<I>>,
    heard: Arc<Heard>,
    id: u32,
    iommu: I,
}

impl<I: Iommu> Behind<I> {
    /// The device in a slot, attached to a domain with nothing mapped.
    pub(crate) fn new(pci: &Pci, slot: u8) -> Self {
        let (iommu, id) = (I::start(pci), Pci::requester(slot));
        let tables = pci.machine().ram().arena(TABLES).expect("there is room");
        let table = PageTable::new(iommu.format(), tables).expect("there is room");
        let domain = Domain::new(table, iommu.ops()).expect("nothing is mapped");
        let domain = DmaDomain::new(domain, DmaConfig::new(1), OneThread).expect("there is room");
        let domain = Arc::new(domain);
        let port = iommu.port(id, ReservedRegions::new());
        let kept_out = port.reserved_regions().reserve_in(domain.iovas(), Relaxable::Keep);
        kept_out.expect("nothing is handed out");
        let heard = Arc::new(Heard::default());
        port.faults().set(Some(Arc::clone(&heard) as Arc<dyn FaultHandler>));
        let attachment = Attachment::new(port).ok().expect("hardware answers");
        attachment.attach(Target::Paging(Prepared::new(Arc::clone(&domain)))).expect("they fit");
        Self { attachment, domain, heard, id, iommu }
    }

    /// No fault was reported since the last look.
    pub(crate) fn no_faults(&self) {
        assert_eq!(self.faults(), []);
    }

    /// Faults were reported since the last look, all of them of the device, of this access to a
    /// range where nothing is mapped.
    pub(crate) fn faulted(&self, access: FaultAccess, range: IovaRange) {
        let faults = self.faults();
        assert!(!faults.is_empty(), "nothing was reported of {range}");
        for fault in faults {
            assert_eq!((fault.stream, fault.access, fault.reason), (self.id, access, I::UNMAPPED));
            assert!(!I::NAMES_ADDRESSES || range.contains(fault.iova), "{fault:x?} not in {range}");
        }
    }

    /// What was reported of the device. QEMU's devices try each word again, so hardware may have
    /// had no room for some.
    pub(crate) fn faults(&self) -> Vec<FaultReport> {
        for _ in 0..100 {
            let handled = self.iommu.handle_faults();
            assert_eq!(handled.malformed, 0);
            if !handled.more {
                break;
            }
        }
        std::mem::take(&mut self.heard.0.lock())
    }
}

/// Faults as they were reported.
#[derive(Default)]
struct Heard(Mutex<Vec<FaultReport>>);

impl FaultHandler for Heard {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.0.lock().push(*report);
        FaultResponse::Terminate
    }
}
