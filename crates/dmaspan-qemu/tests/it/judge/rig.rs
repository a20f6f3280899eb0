//! The facts about each IOMMU that the judge needs.

use std::sync::Arc;

use dmaspan::Iova;
use dmaspan::io_pgtable::{Arena, Format, PageTable};
use dmaspan::iommu::{Domain, FaultReason, IommuOps, Port};
use dmaspan_drivers::Handled;
use dmaspan_qemu::{Arch, Machine, Pci, Tap, ready};
use dmaspan_sim::walker::amd_v1::AmdV1Walker;
use dmaspan_sim::walker::arm_lpae::{ArmLpaeS1Walker, ArmLpaeS2Walker};
use dmaspan_sim::walker::riscv::RiscvWalker;
use dmaspan_sim::walker::vtd_ss::VtdSsWalker;
use dmaspan_sim::walker::x86_64::X86Walker;
use dmaspan_sim::walker::{Checked as _, Translated, Walker};

use crate::judge::planted::Bug;

/// The domains of a rig.
pub(crate) type DomainOf<R> = Domain<<R as Rig>::Format, Arena, <R as Rig>::Ops>;

/// A walker that also finds what hardware passes over: reserved bits, and groups of entries that
/// disagree.
pub(crate) trait Strict: Walker {
    fn strict(&self, tables: &Arena, iova: Iova) -> Result<Translated, String>;
}

macro_rules! strict {
    ($($walker:ty),+) => { $(
        impl Strict for $walker {
            fn strict(&self, tables: &Arena, iova: Iova) -> Result<Translated, String> {
                self.strict_walk(tables, iova).map_err(|bad| bad.to_string())
            }
        }
    )+ };
}

strict!(AmdV1Walker, RiscvWalker, VtdSsWalker, X86Walker);

macro_rules! strict_of_arm {
    ($($walker:ty),+) => { $(
        impl Strict for $walker {
            fn strict(&self, tables: &Arena, iova: Iova) -> Result<Translated, String> {
                let group = self.check_contiguous_group(tables, iova);
                let leaf = group.and_then(|_| self.strict_walk(tables, iova));
                leaf.map_err(|bad| bad.to_string())
            }
        }
    )+ };
}

strict_of_arm!(ArmLpaeS1Walker, ArmLpaeS2Walker);

/// A machine with an IOMMU, its driver, and the devices that [`machine`] puts there.
pub(crate) trait Rig: Sized {
    type Format: Format<Word = u64>;
    type Ops: IommuOps;
    type Walker: Strict;
    type Port: Port<Paging = Domain<Self::Format, Arena, Self::Ops>>;

    /// The name of the model and of its tables.
    const NAME: &'static str;

    /// Whether the model refuses without a report what its IOTLB knows that it may only be read.
    const SILENT_WHEN_CACHED: bool = false;

    /// Whether the model says at what address a fault was.
    const NAMES_ADDRESSES: bool = true;
    /// The last address that the model tells apart from all others.
    const REACH: u64 = u64::MAX;

    /// Starts it; `None` without QEMU.
    fn start() -> Option<Self>;

    fn pci(&self) -> &Pci;

    /// The eye on the driver's commands.
    fn tap(&self) -> &Tap;

    fn format(&self) -> Self::Format;

    fn ops(&self) -> Self::Ops;

    /// The stream of the device in that slot.
    fn port(&self, slot: u8) -> Self::Port;

    fn handle_faults(&self) -> Handled;

    /// The independent walker of a domain's tables.
    fn walker(&self, domain: &DomainOf<Self>) -> Self::Walker;

    /// What the hardware reports of a stream that is blocked; `None` where it says nothing.
    fn blocked() -> Option<FaultReason> {
        Some(FaultReason::Blocked)
    }

    /// What the hardware reports of an access to where nothing is mapped.
    fn unmapped() -> FaultReason {
        FaultReason::Translation
    }

    /// What the hardware reports of a write to what may only be read.
    fn read_only() -> FaultReason {
        FaultReason::Permission
    }

    /// Puts a bug into a command, if it is one that the bug is about.
    fn plant(bug: Bug, command: &mut [u64]);

    /// A domain with nothing mapped.
    fn domain(&self, tables: &Arena) -> Arc<DomainOf<Self>> {
        let table = PageTable::new(self.format(), tables.clone()).expect("there is room");
        Arc::new(Domain::new(table, self.ops()).expect("nothing is mapped"))
    }
}

/// The slots of the devices.
pub(crate) const WRITERS: [u8; 2] = [8, 9];
pub(crate) const COPIER: u8 = 10;
/// The machine's RAM: all that a PC has below 4 GiB in one piece, and room for a leaf of 1 GiB.
const RAM: u64 = 2 << 30;

/// A machine with two `iommu-testdev`s, one `edu` that reaches everything, and `devices`.
pub(crate) fn machine(arch: Arch, kind: &str, devices: &[&str]) -> Option<Pci> {
    let mut builder = Machine::builder(ready(arch)?, kind).ram(RAM);
    for device in devices {
        builder = builder.device(device);
    }
    for slot in WRITERS {
        builder = builder.device(&format!("iommu-testdev,addr={slot:x}"));
    }
    let copier = format!("edu,addr={COPIER:x},dma_mask=0xffffffffffffffff");
    let machine = builder.device(&copier).start().expect("QEMU starts");
    Some(Pci::new(&machine))
}
