//! QEMU's VT-d.

use std::marker::PhantomData;
use std::sync::Arc;

use dmaspan::io_pgtable::{VtdSs, X86_64};
use dmaspan::iommu::{FaultReason, ReservedRegions};
use dmaspan::{Coherency, PhysAddr, lg2};
use dmaspan_drivers::Handled;
use dmaspan_drivers::vtd::{Mode, Stage, Vtd, VtdConfig, VtdFormat, VtdOps, VtdStream};
use dmaspan_qemu::{Arch, CommandQueue, Pci, QemuHost, Tap};
use dmaspan_sim::walker::Switch;
use dmaspan_sim::walker::vtd_ss::{VtdSsWalkRegisters, VtdSsWalker};
use dmaspan_sim::walker::x86_64::{X86_64WalkRegisters, X86Walker};

use crate::judge::planted::Bug;
use crate::judge::rig::{DomainOf, Rig, Strict, machine};

type Driver = Vtd<Tap, QemuHost>;
/// Bits of physical addresses.
const HOST_BITS: u32 = 39;

/// A way in which the hardware translates.
pub(crate) trait Way: 'static {
    type Format: VtdFormat<Word = u64>;
    type Walker: Strict;
    const NAME: &'static str;
    /// The properties of QEMU's `intel-iommu`.
    const PROPERTIES: &'static str;
    const MODE: Mode;
    const STAGE: Stage;

    /// What is reported of an access to where nothing is mapped.
    const UNMAPPED: FaultReason;

    fn format(driver: &Driver) -> Self::Format;

    fn walker(format: &Self::Format, root: PhysAddr) -> Self::Walker;
}

/// Legacy mode, or scalable mode with its second stage; with caching mode or without.
pub(crate) struct SecondStage<const SCALABLE: bool, const CACHING: bool>;

impl<const SCALABLE: bool, const CACHING: bool> Way for SecondStage<SCALABLE, CACHING> {
    type Format = VtdSs;
    type Walker = VtdSsWalker;

    const NAME: &'static str = match (SCALABLE, CACHING) {
        (false, false) => "VT-d, legacy mode",
        (false, true) => "VT-d, legacy mode with caching mode",
        (true, _) => "VT-d, scalable mode, second stage",
    };
    const PROPERTIES: &'static str = match (SCALABLE, CACHING) {
        (false, false) => "aw-bits=48",
        (false, true) => "aw-bits=48,caching-mode=on",
        (true, _) => "scalable-mode=on",
    };
    const MODE: Mode = if SCALABLE { Mode::Scalable } else { Mode::Legacy };
    const STAGE: Stage = Stage::Second;
    /// An entry that is not there is one that permits nothing (VT-d, 9.8).
    const UNMAPPED: FaultReason = FaultReason::Permission;

    fn format(driver: &Driver) -> VtdSs {
        let config = driver.second_stage_config().expect("the model has the stage");
        VtdSs::new(config).expect("there are such tables")
    }

    fn walker(format: &VtdSs, root: PhysAddr) -> Self::Walker {
        let [low, high] = format.registers(root).context_entry;
        let walker = VtdSsWalker::new(VtdSsWalkRegisters {
            ssptptr: low & !lg2::mask(12),
            aw: (high & 7).try_into().unwrap_or(0),
            ssade: Switch::Off,
            host_lg2: HOST_BITS,
            sslps: 3,
            snoop_control: Switch::On,
        });
        walker.expect("the format made the entry")
    }
}

/// Scalable mode with its first stage.
pub(crate) struct FirstStage;

impl Way for FirstStage {
    type Format = X86_64;
    type Walker = X86Walker;

    const NAME: &'static str = "VT-d, scalable mode, first stage";
    const PROPERTIES: &'static str = "scalable-mode=on,fsts=on";
    const MODE: Mode = Mode::Scalable;
    const STAGE: Stage = Stage::First;
    const UNMAPPED: FaultReason = FaultReason::Translation;

    fn format(driver: &Driver) -> X86_64 {
        let config = driver.first_stage_config().expect("the model has the stage");
        X86_64::new(config).expect("there are such tables")
    }

    fn walker(format: &X86_64, root: PhysAddr) -> Self::Walker {
        let entry = format.registers(root).pasid_entry;
        let walker = X86Walker::new(X86_64WalkRegisters {
            root: entry & !lg2::mask(12),
            physical_lg2: HOST_BITS,
            ..X86_64WalkRegisters::default()
        });
        walker.expect("the format made the entry")
    }
}

/// A VT-d that translates in that way.
pub(crate) struct VtdRig<W> {
    pci: Pci,
    tap: Tap,
    driver: Arc<Driver>,
    way: PhantomData<W>,
}

impl<W: Way> Rig for VtdRig<W> {
    type Format = W::Format;
    type Ops = VtdOps<Tap, QemuHost>;
    type Walker = W::Walker;
    type Port = VtdStream<DomainOf<Self>, Tap, QemuHost>;

    const NAME: &'static str = W::NAME;

    fn start() -> Option<Self> {
        let device = format!("intel-iommu,intremap=off,{}", W::PROPERTIES);
        let pci = machine(Arch::X86_64, "q35", &[&device])?;
        let tap = Tap::new(pci.machine(), pci.machine().mmio(0xfed9_0000), CommandQueue::VT_D);
        // The model says that it sees no caches, and has none.
        let walks = Some(Coherency::Coherent);
        let config = VtdConfig { mode: Some(W::MODE), walks, ..VtdConfig::new(HOST_BITS) };
        let host = QemuHost::new(pci.machine());
        #[expect(unsafe_code, reason = "drives hardware")]
        // SAFETY: 1. The registers are the IOMMU's, and nobody else drives it. 2. The host's memory
        // and that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
        let driver = unsafe { Vtd::new(tap.clone(), host, config) };
        let driver = driver.expect("hardware starts");
        Some(Self { pci, tap, driver, way: PhantomData })
    }

    fn pci(&self) -> &Pci {
        &self.pci
    }

    fn tap(&self) -> &Tap {
        &self.tap
    }

    fn format(&self) -> W::Format {
        W::format(&self.driver)
    }

    fn ops(&self) -> Self::Ops {
        self.driver.ops(W::STAGE).expect("numbers are left")
    }

    fn port(&self, slot: u8) -> Self::Port {
        self.driver.stream(Pci::requester(slot), ReservedRegions::new()).expect("it is free")
    }

    fn handle_faults(&self) -> Handled {
        self.driver.handle_faults().expect("hardware answers")
    }

    /// Context-cache, IOTLB, PASID-based IOTLB and PASID-cache invalidation, the domain in 31:16,
    /// and in 5:4 whether it is one of pages, log2 of which follow; nothing is to invalidate a
    /// domain that there is not (VT-d, 6.5.2).
    fn plant(bug: Bug, command: &mut [u64]) {
        const NOBODY: u64 = 0xffff << 16;
        match (bug, command[0] & 0xf) {
            (Bug::NoInvalidation, 2 | 6) | (Bug::NoConfiguration, 1 | 7) => {
                command.fill(0);
                command[0] = 2 | 2 << 4 | NOBODY;
            }
            (Bug::WrongDomain, 2 | 6) => command[0] ^= 1 << 16,
            (Bug::TooNarrow, 2 | 6) if command[0] >> 4 & 3 == 3 && command[1] & 0x3f != 0 => {
                command[1] -= 1;
            }
            _ => {}
        }
    }

    fn unmapped() -> FaultReason {
        W::UNMAPPED
    }

    fn walker(&self, domain: &DomainOf<Self>) -> Self::Walker {
        W::walker(domain.format(), domain.root())
    }
}
