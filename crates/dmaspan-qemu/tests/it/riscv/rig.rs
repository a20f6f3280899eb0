//! A machine with a RISC-V IOMMU, its driver, and devices.

use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, Half, PageTable, Riscv, RiscvConfig, RiscvMode, RiscvStage};
use dmaspan::iommu::{
    Attachment, Domain, FaultHandler, FaultReport, FaultResponse, Port as _, Prepared,
    ReservedRegions, Target,
};
use dmaspan::{Iova, IovaRange, Prot, Span};
use dmaspan_drivers::riscv::{RiscvIommu, RiscvIommuConfig, RiscvOps, RiscvStream};
use dmaspan_qemu::{Arch, Buffer, CommandQueue, Machine, Pci, QemuHost, Tap, TestDev, ready};
use parking_lot::Mutex;

pub(crate) type Iommu = RiscvIommu<Tap, QemuHost>;
pub(crate) type Ops = RiscvOps<Tap, QemuHost>;
pub(crate) type Tables = Domain<Riscv, Arena, Ops>;
pub(crate) type Stream = Attachment<RiscvStream<Tables, Tap, QemuHost>>;

pub(crate) const FIRST: RiscvStage = RiscvStage::First(Half::Lower);
pub(crate) const SECOND: RiscvStage = RiscvStage::Second;
pub(crate) const STAGES: [RiscvStage; 2] = [FIRST, SECOND];

/// Which IOMMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A PCI device.
    Pci,
    /// The same without translation of MSIs: device contexts have the base format.
    PciBase,
    /// A device of the platform.
    Platform,
}

pub(crate) const KINDS: [Kind; 3] = [Kind::Pci, Kind::PciBase, Kind::Platform];

/// The slots of the devices that write.
pub(crate) const WRITERS: [u8; 2] = [1, 2];
const IOMMU_SLOT: u8 = 3;
const IOMMU_ID: u32 = 0x0014_1b36;
const PLATFORM_BASE: u64 = 0x301_0000;

/// Faults as they were reported.
#[derive(Default)]
pub(crate) struct Heard(Mutex<Vec<FaultReport>>);

impl Heard {
    pub(crate) fn take(&self) -> Vec<FaultReport> {
        std::mem::take(&mut self.0.lock())
    }
}

impl FaultHandler for Heard {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.0.lock().push(*report);
        FaultResponse::Terminate
    }
}

pub(crate) struct Rig {
    pub(crate) machine: Machine,
    pub(crate) pci: Pci,
    pub(crate) tap: Tap,
    pub(crate) iommu: Arc<Iommu>,
    pub(crate) tables: Arena,
}

impl Rig {
    /// A machine with that IOMMU, or `None` without QEMU.
    pub(crate) fn start(kind: Kind, config: RiscvIommuConfig) -> Option<Self> {
        let (machine, pci, tap) = hardware(kind)?;
        let host = QemuHost::new(&machine);
        #[expect(unsafe_code, reason = "a driver is given its hardware")]
        // SAFETY: the registers are the IOMMU's, nobody else has them, and the host's memory and
        // the arena are RAM of the machine.
        let iommu = unsafe { RiscvIommu::new(tap.clone(), host, config) }.unwrap();
        let tables = machine.ram().arena(8 << 20).unwrap();
        tap.take();
        Some(Self { machine, pci, tap, iommu, tables })
    }

    pub(crate) fn domain(&self, stage: RiscvStage) -> Arc<Tables> {
        self.domain_of(self.iommu.config(stage).unwrap())
    }

    pub(crate) fn domain_of(&self, config: RiscvConfig) -> Arc<Tables> {
        let ops = self.iommu.ops(config.stage).unwrap();
        let table = PageTable::new(Riscv::new(config).unwrap(), self.tables.clone()).unwrap();
        Arc::new(Domain::new(table, ops).unwrap())
    }

    pub(crate) fn stream(&self, slot: u8) -> (Stream, Arc<Heard>) {
        let id = Pci::requester(slot);
        let port = self.iommu.stream(id, ReservedRegions::new()).unwrap();
        let heard = Arc::new(Heard::default());
        port.faults().set(Some(Arc::clone(&heard) as Arc<dyn FaultHandler>));
        (Attachment::new(port).unwrap(), heard)
    }

    pub(crate) fn writer(&self, slot: u8) -> TestDev {
        TestDev::new(&self.pci, slot).unwrap()
    }

    pub(crate) fn buffer(&self, bytes: u64) -> Buffer {
        self.machine.ram().allocate(bytes).unwrap()
    }

    /// The faults that were reported to a stream since the last call.
    pub(crate) fn faults(&self, heard: &Heard) -> Vec<FaultReport> {
        let handled = self.iommu.handle_faults().unwrap();
        assert_eq!((handled.malformed, handled.more), (0, false));
        heard.take()
    }
}

/// A machine, its bus, and the registers of its IOMMU.
pub(crate) fn hardware(kind: Kind) -> Option<(Machine, Pci, Tap)> {
    let qemu = ready(Arch::Riscv64)?;
    let machine = match kind {
        Kind::Platform => "virt,aclint=on,aia=aplic-imsic,iommu-sys=on",
        Kind::Pci | Kind::PciBase => "virt",
    };
    let mut builder = Machine::builder(qemu, machine);
    match kind {
        Kind::Pci => builder = builder.device(&format!("riscv-iommu-pci,addr={IOMMU_SLOT}")),
        Kind::PciBase => {
            let device = format!("riscv-iommu-pci,addr={IOMMU_SLOT},intremap=off");
            builder = builder.device(&device);
        }
        Kind::Platform => {}
    }
    for slot in WRITERS {
        builder = builder.device(&format!("iommu-testdev,addr={slot}"));
    }
    let machine = builder.start().unwrap();
    let pci = Pci::new(&machine);
    let registers = match kind {
        Kind::Platform => machine.mmio(PLATFORM_BASE),
        Kind::Pci | Kind::PciBase => pci.enable_known(IOMMU_SLOT, IOMMU_ID).unwrap(),
    };
    let tap = Tap::new(&machine, registers, CommandQueue::RISC_V);
    Some((machine, pci, tap))
}

/// Maps a whole buffer.
pub(crate) fn map(domain: &Tables, iova: u64, buffer: &Buffer, prot: Prot) {
    map_span(domain, iova, buffer.span(), prot);
}

pub(crate) fn map_span(domain: &Tables, iova: u64, span: Span, prot: Prot) {
    #[expect(unsafe_code, reason = "a device is let at the machine's RAM")]
    // SAFETY: 1. The test is the only user of the domain. 2. The RAM of the machine is reached by
    // atomics alone, and no QEMU writes it behind the machine's end.
    unsafe { domain.map_spans(Iova::new(iova), &[span], prot) }.unwrap();
}

/// Unmaps, and syncs. Returns the sizes of the leaves that were there, one bit each.
pub(crate) fn unmap(domain: &Tables, iova: u64, bytes: u64) -> u64 {
    let range = IovaRange::from_len(Iova::new(iova), bytes).unwrap();
    #[expect(unsafe_code, reason = "the test owns all IOVAs")]
    // SAFETY: the test is the only user of the domain.
    let removed = unsafe { domain.remove(range) }.unwrap();
    let (gather, _) = removed.into_gather();
    let leaves = gather.invalidation().leaf_sizes;
    #[expect(unsafe_code, reason = "the gather is the domain's")]
    // SAFETY: it was made of what this domain retired.
    let synced = unsafe { domain.sync(gather) }.unwrap();
    assert!(synced.covers(range));
    leaves
}

pub(crate) fn paging(domain: &Arc<Tables>) -> Target<Tables> {
    Target::Paging(Prepared::new(Arc::clone(domain)))
}

pub(crate) const MODES: [RiscvMode; 3] = [RiscvMode::Sv39, RiscvMode::Sv48, RiscvMode::Sv57];
