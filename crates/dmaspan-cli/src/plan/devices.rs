//! Devices that are to be passed through, as sysfs describes them.

use dmaspan_cli::size::ByteSize;
use dmaspan_linux::Bdf;
use dmaspan_linux::machine::MachineFiles;
use dmaspan_linux::plan::forecast::{PaperIommu, PaperLimits, PaperRegion};

/// What this machine allows whatever the process.
pub(super) fn limits_here(machine: &MachineFiles, limits: &mut PaperLimits) {
    limits.pools = machine.pools();
    if limits.mappings.is_some() {
        limits.mappings = machine.entry_limit().or(limits.mappings);
    }
}

/// The IOMMU of the first of them that has one.
pub(super) fn iommu(
    machine: &MachineFiles,
    functions: &[Bdf],
    notes: &mut Vec<String>,
) -> Option<PaperIommu> {
    let of = |bdf: &Bdf| Some((*bdf, machine.iommu_of(*bdf).ok()?));
    let (bdf, found) = functions.iter().find_map(of)?;
    notes.push(format!("the IOMMU is that of {bdf}"));
    notes.extend(found.assumed);
    Some(found.iommu)
}

/// The registers of all of them.
pub(super) fn bars(
    machine: &MachineFiles,
    functions: &[Bdf],
    notes: &mut Vec<String>,
) -> Vec<PaperRegion> {
    let bars: Vec<PaperRegion> = functions.iter().flat_map(|bdf| machine.bars_of(*bdf)).collect();
    if !bars.is_empty() {
        let bytes = bars.iter().map(PaperRegion::len).fold(0, u64::saturating_add);
        let devices: Vec<String> = functions.iter().map(Bdf::to_string).collect();
        notes.push(format!(
            "{} of BARs of {} are planned too, as QEMU maps them for other devices; where a guest \
             will have them is not known",
            ByteSize::new(bytes),
            devices.join(", ")
        ));
    }
    bars
}
