//! A `q35` with QEMU's AMD IOMMU, its driver, and devices.

use std::sync::Arc;

use dmaspan::io_pgtable::{AmdV1, AmdV1Config, Arena, PageTable};
use dmaspan::iommu::{
    Attachment, Domain, FaultHandler, FaultReport, FaultResponse, Port as _, Prepared,
    ReservedRegions, Target,
};
use dmaspan::{Iova, IovaRange, PhysAddr, Prot, Span, SpanBuf};
use dmaspan_drivers::amd_vi::{AmdVi, AmdViConfig, AmdViOps, AmdViStream};
use dmaspan_qemu::{Arch, CommandQueue, Edu, Machine, Pci, QemuHost, Tap, TestDev, ready};
use dmaspan_sim::walker::amd_v1::{AmdV1WalkRegisters, AmdV1Walker};
use dmaspan_sim::walker::{Access, Fault, Translated, Walker as _};
use parking_lot::Mutex;

pub(crate) type Ops = AmdViOps<Tap, QemuHost>;
pub(crate) type Paging = Domain<AmdV1, Arena, Ops>;
pub(crate) type Stream = Attachment<AmdViStream<Paging, Tap, QemuHost>>;

/// Where the model's registers are.
pub(crate) const REGISTERS: u64 = 0xfed8_0000;
/// The slots of the devices.
pub(crate) const WRITERS: [u8; 2] = [4, 5];
pub(crate) const COPIER: u8 = 6;

/// The kinds of commands that tests count (48882, 2.4).
pub(crate) const COMPLETION_WAIT: u64 = 1;
pub(crate) const INVALIDATE_DEVICE: u64 = 2;
pub(crate) const INVALIDATE_PAGES: u64 = 3;

/// The kind of a command.
pub(crate) fn opcode(command: &[u64]) -> u64 {
    command[0] >> 60
}

/// What the model does not do, in the place of a command that is left out: it is taken and has no
/// effect (48882, 2.4.6, PREFETCH_IOMMU_PAGES).
pub(crate) fn leave_out(command: &mut [u64]) {
    command.copy_from_slice(&[6 << 60, 0]);
}

/// A machine without a driver.
pub(crate) struct Board {
    pub(crate) machine: Machine,
    pub(crate) pci: Pci,
    pub(crate) tap: Tap,
}

impl Board {
    /// `None` without QEMU, which was said.
    pub(crate) fn start() -> Option<Self> {
        Self::with("amd-iommu,dma-remap=on")
    }

    pub(crate) fn with(iommu: &str) -> Option<Self> {
        let mut builder = Machine::builder(ready(Arch::X86_64)?, "q35").ram(2 << 30).device(iommu);
        for slot in WRITERS {
            builder = builder.device(&format!("iommu-testdev,addr={slot}"));
        }
        let copier = format!("edu,addr={COPIER},dma_mask=0xffffffffffffffff");
        let machine = builder.device(&copier).start().expect("QEMU starts");
        let tap = Tap::new(&machine, machine.mmio(REGISTERS), CommandQueue::AMD_VI);
        Some(Self { pci: Pci::new(&machine), machine, tap })
    }

    /// What the IOMMU's capability block says: capability ID 0Fh of a function of class 0806h
    /// (48882, 3.2).
    pub(crate) fn config(&self) -> AmdViConfig {
        let is_iommu = |slot: &u8| self.pci.read(*slot, 0x08) >> 16 == 0x0806;
        let slot = (0..32).find(is_iommu).expect("the IOMMU is a PCI function");
        let mut at = self.pci.read(slot, 0x34) & 0xfc;
        for _ in 0..16 {
            let offset = u16::try_from(at).expect("8 bits");
            let header = self.pci.read(slot, offset);
            if header & 0xff == 0x0f {
                return AmdViConfig::new(header, self.pci.read(slot, offset + 0x10));
            }
            at = header >> 8 & 0xfc;
        }
        panic!("no IOMMU capability in slot {slot}");
    }

    pub(crate) fn drive(self, config: AmdViConfig) -> Rig {
        let host = QemuHost::new(&self.machine);
        // SAFETY: the registers are the model's, which nobody else drives, and `QemuHost` and
        // arenas of the RAM are what it sees.
        let iommu = unsafe { AmdVi::new(self.tap.clone(), host, config) }.expect("it starts");
        let arena = self.machine.ram().arena(16 << 20).expect("there is RAM");
        self.tap.take();
        Rig { board: self, iommu, arena }
    }

    pub(crate) fn writer(&self, index: usize) -> TestDev {
        TestDev::new(&self.pci, WRITERS[index]).expect("it is there")
    }

    pub(crate) fn copier(&self) -> Edu {
        Edu::new(&self.pci, COPIER).expect("it is there")
    }
}

/// A machine with its driver.
pub(crate) struct Rig {
    pub(crate) board: Board,
    pub(crate) iommu: Arc<AmdVi<Tap, QemuHost>>,
    pub(crate) arena: Arena,
}

impl Rig {
    /// `None` without QEMU.
    pub(crate) fn start() -> Option<Self> {
        let board = Board::start()?;
        let config = board.config();
        Some(board.drive(config))
    }

    pub(crate) fn stream(&self, slot: u8) -> Stream {
        let port = self.iommu.stream(Pci::requester(slot), ReservedRegions::new());
        Attachment::new(port.expect("nobody has it")).expect("it can be blocked")
    }

    pub(crate) fn domain(&self) -> Arc<Paging> {
        self.domain_of(self.iommu.v1_config())
    }

    pub(crate) fn domain_of(&self, config: AmdV1Config) -> Arc<Paging> {
        let format = AmdV1::new(config).expect("the hardware has it");
        let table = PageTable::new(format, self.arena.clone()).expect("there is room");
        let ops = self.iommu.ops().expect("there is a domain ID");
        Arc::new(Domain::new(table, ops).expect("nothing is mapped"))
    }

    /// What the independent walker says of a read.
    pub(crate) fn walk(&self, domain: &Paging, iova: Iova) -> Result<Translated, Fault> {
        let (root, level) = domain.root_and_level();
        let registers = AmdV1WalkRegisters { dte: domain.format().registers(root, level).dte };
        let walker = AmdV1Walker::new(registers).expect("the entry is valid");
        walker.walk(&self.arena, iova, Access::Read)
    }

    /// Forgets the commands so far, and returns those of `work`.
    pub(crate) fn commands_of(&self, work: impl FnOnce()) -> Vec<Vec<u64>> {
        self.board.tap.take();
        work();
        self.board.tap.take()
    }
}

pub(crate) fn paging(domain: &Arc<Paging>) -> Target<Paging> {
    Target::Paging(Prepared::new(Arc::clone(domain)))
}

pub(crate) fn map(domain: &Paging, iova: u64, span: Span, prot: Prot) {
    // SAFETY: nobody else uses these addresses, and the machine's memory outlives the domain.
    unsafe { domain.map_spans(Iova::new(iova), &[span], prot) }.expect("it can be mapped");
}

/// Takes a range away, and returns when hardware has forgotten it.
pub(crate) fn unmap(domain: &Paging, iova: u64, len: u64) {
    let range = IovaRange::from_len(Iova::new(iova), len).expect("a range");
    let mut spans = [Span::new(PhysAddr::new(0), 0x1000).expect("a span"); 4];
    let mut buf = SpanBuf::new(&mut spans);
    // SAFETY: nobody else uses these addresses.
    let unsynced = unsafe { domain.unmap(range, &mut buf) }.expect("it is mapped");
    let synced = unsynced.sync().map_err(|failed| failed.error);
    let (synced, rest) = synced.expect("hardware answers");
    assert!(rest.is_none());
    assert!(synced.covers(range));
}

/// Keeps what is reported.
#[derive(Default)]
pub(crate) struct Faults(Mutex<Vec<FaultReport>>);

impl Faults {
    pub(crate) fn of(stream: &Stream) -> Arc<Self> {
        let faults = Arc::new(Self::default());
        stream.port().faults().set(Some(faults.clone()));
        faults
    }

    pub(crate) fn take(&self) -> Vec<FaultReport> {
        std::mem::take(&mut self.0.lock())
    }
}

impl FaultHandler for Faults {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.0.lock().push(*report);
        FaultResponse::Terminate
    }
}
