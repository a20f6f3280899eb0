//! The guest itself: without this no other case says anything.

use super::context::{driver, in_sysfs};
use super::{BACKEND, Case, Context, Outcome, Result, case};

pub(super) const CASES: &[Case] = &[
    // The function is behind an IOMMU and bound to vfio-pci.
    case("guest/device_is_bound", BACKEND, device_is_bound),
];

fn device_is_bound(context: &Context) -> Result {
    let device = &context.device;
    match driver(device) {
        Some(name) if name == "vfio-pci" => {}
        Some(name) => return Err(format!("{name} drives {device}").into()),
        None => return Err(format!("nothing drives {device}").into()),
    }
    let group = in_sysfs(device).join("iommu_group");
    if !group.exists() {
        return Err(format!("{device} is behind no IOMMU").into());
    }
    Ok(Outcome::Passed)
}
