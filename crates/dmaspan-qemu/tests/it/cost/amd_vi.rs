//! QEMU's AMD-Vi.

use dmaspan::IovaRange;
use dmaspan::io_pgtable::AmdV1;
use dmaspan::iommu::ReservedRegions;
use dmaspan_drivers::amd_vi::{AmdVi, AmdViConfig};
use dmaspan_qemu::{Arch, CommandQueue, Pci, QemuHost, Tap};

use crate::cost::bench::{Iommu, SLOT, Started, machine};
use crate::cost::fewest::{Forget, Hardware, Kind, PLACES, covering, named};

/// The class of an IOMMU, and its capability (48882, 3.1, 3.2).
const CLASS: u32 = 0x08_0600;
const CAPABILITY: u8 = 0x0f;

/// Bits 63:60 of the first word: INVALIDATE_IOMMU_PAGES, of everything where the address is all
/// ones but for its top bit, and COMPLETION_WAIT (48882, 2.4.1, 2.4.3).
fn kind(command: &[u64]) -> Kind {
    match (command[0] >> 60, command[1] >> 12) {
        (3, 0x7_ffff_ffff_ffff) => Kind::All,
        (3, _) => Kind::Named,
        (1, _) => Kind::Wait,
        _ => Kind::Other,
    }
}

/// AMD-Vi (48882, 2.4.3): INVALIDATE_IOMMU_PAGES covers a block of any power of two that is aligned
/// to its size (S). Two of them cover any range with less than twice its bytes, and one does where
/// the block around the range is that small; a gibibyte is one.
fn fewest(ranges: &[IovaRange], _: u32) -> Forget {
    named(ranges, 2 * PLACES as u64, |pages| covering(pages, 52))
}

pub(crate) fn start() -> Option<Started> {
    let pci = machine(Arch::X86_64, "q35", &["amd-iommu,dma-remap=on"])?;
    let slot = pci.find_class(CLASS).expect("it is on bus 0");
    let block = pci.capability(slot, CAPABILITY).expect("it has its capability");
    let (header, miscellaneous) = (pci.read(slot, block), pci.read(slot, block + 0x10));
    let config = AmdViConfig::new(header, miscellaneous);
    let tap = Tap::new(pci.machine(), pci.machine().mmio(0xfed8_0000), CommandQueue::AMD_VI);
    let host = QemuHost::new(pci.machine());
    #[expect(unsafe_code, reason = "drives hardware")]
    // SAFETY: 1. The registers are the IOMMU's, and nobody else drives it. 2. The host's memory and
    // that of tables is the machine's RAM. 3. All devices of bus 0 are behind it.
    let iommu = unsafe { AmdVi::new(tap.clone(), host, config) };
    let iommu = iommu.expect("hardware starts");
    let format = AmdV1::new(iommu.v1_config()).expect("there are such tables");
    let ops = iommu.ops().expect("numbers are left");
    let port = iommu.stream(Pci::requester(SLOT), ReservedRegions::new()).expect("it is free");
    let bench = Iommu::new((&pci, &tap), format, ops, port, kind);
    Some((Box::new(bench), Hardware { name: "AMD-Vi", fewest }))
}
