//! QEMU's SMMUv3, and as if it could not invalidate ranges.

use std::sync::Arc;

use dmaspan::IovaRange;
use dmaspan::io_pgtable::{ArmLpaeS1, ArmLpaeS2};
use dmaspan::iommu::ReservedRegions;
use dmaspan_drivers::Mmio;
use dmaspan_drivers::arm_smmu_v3::{OnFault, SmmuV3, SmmuV3Config, Stage};
use dmaspan_qemu::{Arch, CommandQueue, Pci, QemuHost, Tap};

use crate::cost::bench::{Iommu, PAGE_LG2, SLOT, Started, machine};
use crate::cost::fewest::{Forget, Hardware, Kind, named};

/// Bits 7:0 of the first word: CMD_TLBI_NH_VA and CMD_TLBI_S2_IPA; CMD_TLBI_NH_ASID and
/// CMD_TLBI_S12_VMALL; CMD_SYNC (IHI 0070, 4.1.3).
fn kind(command: &[u64]) -> Kind {
    match command[0] & 0xff {
        0x12 | 0x2a => Kind::Named,
        0x11 | 0x28 => Kind::All,
        0x46 => Kind::Wait,
        _ => Kind::Other,
    }
}

/// SMMUv3 with range invalidation (IHI 0070, 4.4.1): a command covers (NUM + 1) * 2^SCALE granules
/// from any granule on, NUM of 5 bits. So a gibibyte of 4K pages is one, with NUM 0 and SCALE 18.
fn fewest(ranges: &[IovaRange], _: u32) -> Forget {
    named(ranges, 255, |pages| {
        // Each command for as many units, whatever the unit: trailing zeros go into SCALE.
        let units = pages.count() >> pages.count().trailing_zeros();
        let units = usize::try_from(units).expect("it was counted");
        let mut fewest = vec![0u64; units + 1];
        for covered in 1..=units {
            let steps = (0..=units.ilog2()).flat_map(|scale| (1..=32).map(move |num| num << scale));
            let before = steps.filter_map(|step| covered.checked_sub(step));
            let best = before.map(|before| fewest[before]).min();
            fewest[covered] = 1 + best.expect("a command for one unit is among them");
        }
        fewest[units]
    })
}

/// SMMUv3 without range invalidation (IHI 0070, 4.4.1; IDR3.RIL is 0): a command covers the leaf at
/// an address, and CMD_TLBI_NH_ASID all of a gibibyte. Those of a batch go into the queue together
/// with their CMD_SYNC: it has 256 places.
fn fewest_without_ranges(ranges: &[IovaRange], leaf_lg2: u32) -> Forget {
    named(ranges, 255, |pages| pages.count() >> (leaf_lg2 - PAGE_LG2))
}

/// SMMU_IDR3, and its bit RIL (IHI 0070, 6.3.4).
const IDR3: u64 = 0xc;
const RIL: u32 = 1 << 10;

/// The registers, but for that bit.
struct NoRanges(Tap);

impl Mmio for NoRanges {
    fn read32(&self, offset: u64) -> u32 {
        let value = self.0.read32(offset);
        if offset == IDR3 { value & !RIL } else { value }
    }

    fn write32(&self, offset: u64, value: u32) {
        self.0.write32(offset, value);
    }

    fn read64(&self, offset: u64) -> u64 {
        self.0.read64(offset)
    }

    fn write64(&self, offset: u64, value: u64) {
        self.0.write64(offset, value);
    }
}

/// A machine, the tap on its SMMU's registers, and the driver.
type Parts<R> = (Pci, Tap, Arc<SmmuV3<R, QemuHost>>);

/// Starts a machine; the driver goes through registers made of the tap.
fn smmu<R: Mmio>(registers: fn(Tap) -> R) -> Option<Parts<R>> {
    let pci = machine(Arch::Aarch64, "virt,iommu=smmuv3", &[])?;
    let tap = Tap::new(pci.machine(), pci.machine().mmio(0x0905_0000), CommandQueue::SMMU_V3);
    let host = QemuHost::new(pci.machine());
    #[expect(unsafe_code, reason = "drives hardware")]
    // SAFETY: 1. The registers are the SMMU's, and nobody else drives it. 2. The host's memory and
    // that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
    let smmu = unsafe { SmmuV3::new(registers(tap.clone()), host, SmmuV3Config::default()) };
    Some((pci, tap, smmu.expect("hardware starts")))
}

fn start_1<R: Mmio + 'static>(registers: fn(Tap) -> R, hardware: Hardware) -> Option<Started> {
    let (pci, tap, smmu) = smmu(registers)?;
    let config = smmu.stage1_config(PAGE_LG2).expect("the model has the granule");
    let format = ArmLpaeS1::<PAGE_LG2>::new(config).expect("there are such tables");
    let ops = smmu.ops(Stage::First, OnFault::Terminate).expect("numbers are left");
    let port = smmu.stream(Pci::requester(SLOT), ReservedRegions::new()).expect("it is free");
    Some((Box::new(Iommu::new((&pci, &tap), format, ops, port, kind)), hardware))
}

pub(crate) fn stage_1() -> Option<Started> {
    start_1(|tap| tap, Hardware { name: "SMMUv3, stage 1", fewest })
}

pub(crate) fn stage_1_without_ranges() -> Option<Started> {
    let name = "SMMUv3, stage 1, no ranges";
    start_1(NoRanges, Hardware { name, fewest: fewest_without_ranges })
}

pub(crate) fn stage_2() -> Option<Started> {
    let (pci, tap, smmu) = smmu(|tap| tap)?;
    let config = smmu.stage2_config(PAGE_LG2).expect("the model has the granule");
    let format = ArmLpaeS2::<PAGE_LG2>::new(config).expect("there are such tables");
    let ops = smmu.ops(Stage::Second, OnFault::Terminate).expect("numbers are left");
    let port = smmu.stream(Pci::requester(SLOT), ReservedRegions::new()).expect("it is free");
    let hardware = Hardware { name: "SMMUv3, stage 2", fewest };
    Some((Box::new(Iommu::new((&pci, &tap), format, ops, port, kind)), hardware))
}
