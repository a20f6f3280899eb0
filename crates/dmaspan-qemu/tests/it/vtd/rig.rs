//! A machine with a VT-d and devices behind it.

use std::sync::Arc;

use dmaspan::io_pgtable::{Arena, PageTable, VtdSs, X86_64};
use dmaspan::iommu::{
    Attachment, Domain, FaultHandler, FaultReport, FaultResponse, Port as _, Prepared,
    ReservedRegions, Target,
};
use dmaspan::{Coherency, Iova, IovaRange, Prot, Span};
use dmaspan_drivers::vtd::{Mode, Stage, Vtd, VtdConfig, VtdFormat, VtdOps, VtdStream};
use dmaspan_qemu::{Arch, Buffer, CommandQueue, Machine, Pci, QemuHost, Tap, TestDev, ready};
use parking_lot::Mutex;

/// Where QEMU's q35 has the registers.
pub(crate) const REGISTERS: u64 = 0xfed9_0000;

pub(crate) type Iommu = Vtd<Tap, QemuHost>;
pub(crate) type Tables<F> = Domain<F, Arena, VtdOps<Tap, QemuHost>>;
pub(crate) type Stream<F> = Attachment<VtdStream<Tables<F>, Tap, QemuHost>>;

/// A way in which the hardware translates.
pub(crate) trait Kind {
    type Format: VtdFormat<Word = u64>;
    /// The properties of QEMU's `intel-iommu`.
    const PROPERTIES: &'static str;
    const MODE: Mode;
    const STAGE: Stage;
    fn format(iommu: &Iommu) -> Self::Format;
}

macro_rules! kind {
    ($name:ident, $format:ty, $mode:ident, $stage:ident, $config:ident, $properties:literal) => {
        pub(crate) struct $name;
        impl Kind for $name {
            type Format = $format;
            const PROPERTIES: &'static str = $properties;
            const MODE: Mode = Mode::$mode;
            const STAGE: Stage = Stage::$stage;
            fn format(iommu: &Iommu) -> $format {
                <$format>::new(iommu.$config().expect("the model has the stage")).expect("it fits")
            }
        }
    };
}

kind!(Legacy, VtdSs, Legacy, Second, second_stage_config, "aw-bits=48");
kind!(Narrow, VtdSs, Legacy, Second, second_stage_config, "aw-bits=39");
kind!(Caching, VtdSs, Legacy, Second, second_stage_config, "aw-bits=48,caching-mode=on");
kind!(ScalableSecond, VtdSs, Scalable, Second, second_stage_config, "scalable-mode=on");
kind!(First, X86_64, Scalable, First, first_stage_config, "scalable-mode=on,fsts=on");

/// Runs a generic test of every kind.
macro_rules! of_every_kind {
    ($($test:ident),+ $(,)?) => { $(
        mod $test {
            use crate::vtd::rig;
            #[test] fn legacy() { super::$test::<rig::Legacy>(); }
            #[test] fn legacy_3_levels() { super::$test::<rig::Narrow>(); }
            #[test] fn legacy_caching_mode() { super::$test::<rig::Caching>(); }
            #[test] fn scalable_second_stage() { super::$test::<rig::ScalableSecond>(); }
            #[test] fn scalable_first_stage() { super::$test::<rig::First>(); }
        }
    )+ };
}
pub(crate) use of_every_kind;

/// Faults that were reported.
#[derive(Default)]
pub(crate) struct Heard(pub(crate) Mutex<Vec<FaultReport>>);

impl FaultHandler for Heard {
    fn fault(&self, report: &FaultReport) -> FaultResponse {
        self.0.lock().push(*report);
        FaultResponse::Terminate
    }
}

pub(crate) struct Rig {
    pub(crate) tap: Tap,
    pub(crate) iommu: Arc<Iommu>,
    pub(crate) tables: Arena,
    /// In slots 1 and 2.
    pub(crate) devices: [TestDev; 2],
    pub(crate) pci: Pci,
    pub(crate) machine: Machine,
}

/// The machine alone, and the tap on its IOMMU.
pub(crate) fn machine<K: Kind>() -> Option<(Machine, Tap)> {
    machine_with(K::PROPERTIES)
}

pub(crate) fn machine_with(properties: &str) -> Option<(Machine, Tap)> {
    let machine = Machine::builder(ready(Arch::X86_64)?, "q35")
        .device(&format!("intel-iommu,intremap=off,{properties}"))
        .device("iommu-testdev,addr=1")
        .device("iommu-testdev,addr=2")
        .device("edu,addr=3")
        .start()
        .expect("QEMU starts");
    let tap = Tap::new(&machine, machine.mmio(REGISTERS), CommandQueue::VT_D);
    Some((machine, tap))
}

impl Rig {
    /// A machine of that kind; `None` without QEMU.
    pub(crate) fn new<K: Kind>() -> Option<Self> {
        let (machine, tap) = machine::<K>()?;
        Some(Self::over::<K>(machine, tap))
    }

    pub(crate) fn over<K: Kind>(machine: Machine, tap: Tap) -> Self {
        // The model says that it sees no caches, and has none.
        let walks = Some(Coherency::Coherent);
        let config = VtdConfig { mode: Some(K::MODE), walks, ..VtdConfig::new(39) };
        #[expect(unsafe_code, reason = "hands hardware to its driver")]
        // SAFETY: the model's registers are used by this driver alone, and reach the host's memory.
        let iommu = unsafe { Vtd::new(tap.clone(), QemuHost::new(&machine), config) };
        let iommu = iommu.expect("the model starts");
        let pci = Pci::new(&machine);
        let devices = [1, 2].map(|slot| TestDev::new(&pci, slot).expect("it is in its slot"));
        let tables = machine.ram().arena(4 << 20).expect("there is RAM");
        tap.take();
        Self { tap, iommu, tables, devices, pci, machine }
    }

    pub(crate) fn domain<K: Kind>(&self) -> Arc<Tables<K::Format>> {
        let ops = self.iommu.ops(K::STAGE).expect("there is a number");
        let table = PageTable::new(K::format(&self.iommu), self.tables.clone()).expect("a root");
        Arc::new(Domain::new(table, ops).expect("it is empty"))
    }

    /// The stream of the device in a slot, blocked, and what is heard of it.
    pub(crate) fn stream<F: VtdFormat<Word = u64>>(&self, slot: u8) -> (Stream<F>, Arc<Heard>) {
        let id = Pci::requester(slot);
        let port = self.iommu.stream(id, ReservedRegions::new()).expect("nobody has it");
        let heard = Arc::new(Heard::default());
        port.faults().set(Some(Arc::<Heard>::clone(&heard)));
        (Attachment::new(port).expect("it is blocked"), heard)
    }

    /// A page or more of RAM.
    pub(crate) fn buffer(&self, bytes: u64) -> Buffer {
        self.machine.ram().allocate(bytes).expect("there is RAM")
    }

    /// Whether the first device writes the first word of `buffer` through `iova`.
    pub(crate) fn reaches(&mut self, iova: u64, buffer: &Buffer) -> bool {
        reaches(&mut self.devices[0], iova, buffer)
    }

    /// What was heard since the last call, after a look at the records.
    pub(crate) fn faults(&self, heard: &Heard) -> Vec<FaultReport> {
        self.iommu.handle_faults().expect("the model is there");
        std::mem::take(&mut *heard.0.lock())
    }
}

/// Whether `device` writes the first word of `buffer` through `iova`: memory says so.
pub(crate) fn reaches(device: &mut TestDev, iova: u64, buffer: &Buffer) -> bool {
    buffer.set_word(0, 0);
    let said = device.write(iova, buffer.paddr(), 4).is_ok();
    let written = buffer.word(0) == u64::from(TestDev::WRITTEN);
    assert_eq!(said, written, "the device says what memory says");
    written
}

pub(crate) fn to<D: dmaspan::iommu::PagingDomain>(domain: &Arc<D>) -> Target<D> {
    Target::Paging(Prepared::new(Arc::clone(domain)))
}

pub(crate) const RW: Prot = Prot::READ.union(Prot::WRITE);

pub(crate) fn map<F: VtdFormat<Word = u64>>(domain: &Tables<F>, iova: u64, span: Span, prot: Prot) {
    #[expect(unsafe_code, reason = "lets the model's devices at the machine's RAM")]
    // SAFETY: one thread maps, and the memory is a buffer of the machine.
    let mapped = unsafe { domain.map_spans(Iova::new(iova), &[span], prot) };
    mapped.expect("it can be mapped");
}

/// Unmaps and syncs.
pub(crate) fn unmap<F: VtdFormat<Word = u64>>(domain: &Tables<F>, iova: u64, bytes: u64) {
    let range = IovaRange::from_len(Iova::new(iova), bytes).expect("a range");
    #[expect(unsafe_code, reason = "one thread owns the addresses")]
    // SAFETY: one thread maps and unmaps.
    let unsynced = unsafe { domain.remove(range) };
    let synced = unsynced.expect("it is mapped whole").sync();
    synced.map(drop).expect("the model answers");
}

/// The types of the commands that passed, and their granularity: what 3:0 and 5:4 say.
pub(crate) fn commands(tap: &Tap) -> Vec<(u64, u64)> {
    tap.take().iter().map(|words| (words[0] & 0xf, words[0] >> 4 & 3)).collect()
}
