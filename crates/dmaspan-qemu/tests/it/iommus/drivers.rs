//! The start of each driver, and the properties of its model.

use std::sync::Arc;

use dmaspan::Coherency;
use dmaspan::io_pgtable::{AmdV1, ArmLpaeS1, ArmLpaeS2, Half, Riscv, RiscvStage, VtdSs, X86_64};
use dmaspan::iommu::{FaultReason, ReservedRegions};
use dmaspan_drivers::arm_smmu_v3::{self as smmu, OnFault, SmmuV3, SmmuV3Config};
use dmaspan_drivers::riscv::{self, RiscvIommu, RiscvIommuConfig};
use dmaspan_drivers::vtd::{self, Mode, Vtd, VtdConfig};
use dmaspan_drivers::{Handled, amd_vi};
use dmaspan_qemu::{Arch, Pci, QemuHost, QtestMmio};

use super::{DomainOf, Iommu};

/// Bits of physical addresses of a PC.
const HOST_BITS: u32 = 39;
/// The class of an AMD IOMMU, and its capability (48882, 3.1, 3.2).
const AMD_CLASS: u32 = 0x08_0600;
const AMD_CAPABILITY: u8 = 0x0f;
/// Where RISC-V's IOMMU is on the bus.
const RISCV_SLOT: u8 = 3;

/// What all have in common but for names.
macro_rules! iommu {
    (
        $(#[$doc:meta])* $name:ident($driver:ty),
        $format:ty, $ops:ident, $stream:ident in $module:ident,
        $arch:ident $machine:literal $devices:expr,
        $(const $constant:ident: $kind:ty = $value:expr,)*
        start $start:expr,
        format $config:expr,
        ops $hooks:expr,
    ) => {
        $(#[$doc])*
        pub(crate) struct $name(Arc<$driver>);

        impl Iommu for $name {
            type Format = $format;
            type Ops = $module::$ops<QtestMmio, QemuHost>;
            type Port = $module::$stream<DomainOf<Self>, QtestMmio, QemuHost>;

            const ARCH: Arch = Arch::$arch;
            const MACHINE: &'static str = $machine;
            const DEVICES: &'static [&'static str] = $devices;
            $(const $constant: $kind = $value;)*

            fn start(pci: &Pci) -> Self {
                let start: fn(&Pci) -> Arc<$driver> = $start;
                Self(start(pci))
            }

            fn format(&self) -> $format {
                let config: fn(&$driver) -> $format = $config;
                config(&self.0)
            }

            fn ops(&self) -> Self::Ops {
                let hooks: fn(&Arc<$driver>) -> Result<Self::Ops, _> = $hooks;
                hooks(&self.0).expect("numbers are left")
            }

            fn port(&self, id: u32, regions: ReservedRegions) -> Self::Port {
                self.0.stream(id, regions).expect("it is free")
            }

            fn handle_faults(&self) -> Handled {
                self.0.handle_faults().expect("hardware answers")
            }
        }
    };
}

type Smmu = SmmuV3<QtestMmio, QemuHost>;

fn start_smmu(pci: &Pci) -> Arc<Smmu> {
    let registers = pci.machine().mmio(0x0905_0000);
    let host = QemuHost::new(pci.machine());
    #[expect(unsafe_code, reason = "drives hardware")]
    // SAFETY: 1. The registers are the SMMU's, and nobody else drives it. 2. The host's memory and
    // that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
    let smmu = unsafe { SmmuV3::new(registers, host, SmmuV3Config::default()) };
    smmu.expect("hardware starts")
}

iommu! {
    /// QEMU's SMMUv3 with stage 1.
    SmmuV3Stage1(Smmu),
    ArmLpaeS1<12>, SmmuV3Ops, SmmuV3Stream in smmu,
    Aarch64 "virt,iommu=smmuv3" &[],
    start start_smmu,
    format |smmu| {
        ArmLpaeS1::new(smmu.stage1_config(12).expect("it has 4K")).expect("there are such tables")
    },
    ops |smmu| smmu.ops(smmu::Stage::First, OnFault::Terminate),
}

iommu! {
    /// QEMU's SMMUv3 with stage 2 and a granule larger than the controller's pages.
    SmmuV3Stage2(Smmu),
    ArmLpaeS2<16>, SmmuV3Ops, SmmuV3Stream in smmu,
    Aarch64 "virt,iommu=smmuv3" &[],
    start start_smmu,
    format |smmu| {
        ArmLpaeS2::new(smmu.stage2_config(16).expect("it has 64K")).expect("there are such tables")
    },
    ops |smmu| smmu.ops(smmu::Stage::Second, OnFault::Terminate),
}

type Intel = Vtd<QtestMmio, QemuHost>;

fn start_vtd(pci: &Pci, mode: Mode) -> Arc<Intel> {
    let registers = pci.machine().mmio(0xfed9_0000);
    let host = QemuHost::new(pci.machine());
    // The model says that it sees no caches, and has none.
    let walks = Some(Coherency::Coherent);
    let config = VtdConfig { mode: Some(mode), walks, ..VtdConfig::new(HOST_BITS) };
    #[expect(unsafe_code, reason = "drives hardware")]
    // SAFETY: 1. The registers are the IOMMU's, and nobody else drives it. 2. The host's memory and
    // that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
    let vtd = unsafe { Vtd::new(registers, host, config) };
    vtd.expect("hardware starts")
}

fn second_stage(vtd: &Intel) -> VtdSs {
    let config = vtd.second_stage_config().expect("the model has the stage");
    VtdSs::new(config).expect("there are such tables")
}

iommu! {
    /// QEMU's VT-d in legacy mode.
    VtdLegacy(Intel),
    VtdSs, VtdOps, VtdStream in vtd,
    X86_64 "q35" &["intel-iommu,intremap=off,aw-bits=48"],
    // An entry that is not there is one that permits nothing (VT-d, 9.8).
    const UNMAPPED: FaultReason = FaultReason::Permission,
    start |pci| start_vtd(pci, Mode::Legacy),
    format second_stage,
    ops |vtd| vtd.ops(vtd::Stage::Second),
}

iommu! {
    /// QEMU's VT-d in scalable mode with its second stage.
    VtdSecondStage(Intel),
    VtdSs, VtdOps, VtdStream in vtd,
    X86_64 "q35" &["intel-iommu,intremap=off,scalable-mode=on"],
    const UNMAPPED: FaultReason = FaultReason::Permission,
    start |pci| start_vtd(pci, Mode::Scalable),
    format second_stage,
    ops |vtd| vtd.ops(vtd::Stage::Second),
}

iommu! {
    /// QEMU's VT-d in scalable mode with its first stage.
    VtdFirstStage(Intel),
    X86_64, VtdOps, VtdStream in vtd,
    X86_64 "q35" &["intel-iommu,intremap=off,scalable-mode=on,fsts=on"],
    start |pci| start_vtd(pci, Mode::Scalable),
    format |vtd| {
        let config = vtd.first_stage_config().expect("the model has the stage");
        X86_64::new(config).expect("there are such tables")
    },
    ops |vtd| vtd.ops(vtd::Stage::First),
}

iommu! {
    /// QEMU's AMD-Vi, whose faults have no addresses.
    AmdVi(amd_vi::AmdVi<QtestMmio, QemuHost>),
    AmdV1, AmdViOps, AmdViStream in amd_vi,
    X86_64 "q35" &["amd-iommu,dma-remap=on"],
    const NAMES_ADDRESSES: bool = false,
    start |pci| {
        let slot = pci.find_class(AMD_CLASS).expect("it is on bus 0");
        let block = pci.capability(slot, AMD_CAPABILITY).expect("it has its capability");
        let (header, miscellaneous) = (pci.read(slot, block), pci.read(slot, block + 0x10));
        let config = amd_vi::AmdViConfig::new(header, miscellaneous);
        let registers = pci.machine().mmio(0xfed8_0000);
        let host = QemuHost::new(pci.machine());
        #[expect(unsafe_code, reason = "drives hardware")]
        // SAFETY: 1. The registers are the IOMMU's, and nobody else drives it. 2. The host's memory
        // and that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
        let amd_vi = unsafe { amd_vi::AmdVi::new(registers, host, config) };
        amd_vi.expect("hardware starts")
    },
    format |amd_vi| AmdV1::new(amd_vi.v1_config()).expect("there are such tables"),
    ops |amd_vi| amd_vi.ops(),
}

type Riscvs = RiscvIommu<QtestMmio, QemuHost>;

fn start_riscv(pci: &Pci) -> Arc<Riscvs> {
    let registers = pci.enable(RISCV_SLOT, 0).expect("it is there");
    let host = QemuHost::new(pci.machine());
    #[expect(unsafe_code, reason = "drives hardware")]
    // SAFETY: 1. The registers are the IOMMU's, and nobody else drives it. 2. The host's memory and
    // that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
    let iommu = unsafe { RiscvIommu::new(registers, host, RiscvIommuConfig::default()) };
    iommu.expect("hardware starts")
}

iommu! {
    /// QEMU's RISC-V IOMMU with its first stage.
    RiscvFirst(Riscvs),
    Riscv, RiscvOps, RiscvStream in riscv,
    Riscv64 "virt" &["riscv-iommu-pci,addr=3"],
    start start_riscv,
    format |iommu| {
        let config = iommu.config(RiscvStage::First(Half::Lower)).expect("the model has both");
        Riscv::new(config).expect("there are such tables")
    },
    ops |iommu| iommu.ops(RiscvStage::First(Half::Lower)),
}

iommu! {
    /// QEMU's RISC-V IOMMU with its second stage.
    RiscvSecond(Riscvs),
    Riscv, RiscvOps, RiscvStream in riscv,
    Riscv64 "virt" &["riscv-iommu-pci,addr=3"],
    start start_riscv,
    format |iommu| {
        let config = iommu.config(RiscvStage::Second).expect("the model has both");
        Riscv::new(config).expect("there are such tables")
    },
    ops |iommu| iommu.ops(RiscvStage::Second),
}
