//! What opening a device needs to know of it, from `/sys/bus/pci/devices`.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use super::error::OpenError;
use crate::os;
use crate::pci::Bdf;

const DEVICES: &str = "/sys/bus/pci/devices";

/// The driver of a function that VFIO can open.
const VFIO_PCI: &str = "vfio-pci";

fn folder(bdf: Bdf) -> PathBuf {
    Path::new(DEVICES).join(bdf.to_string())
}

/// The last part of what a link points to.
fn link_name(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_string_lossy().into_owned())
}

/// The driver of a function.
fn driver(bdf: Bdf) -> Option<String> {
    link_name(&folder(bdf).join("driver"))
}

/// Whether VFIO has the function.
pub(super) fn check_bound(bdf: Bdf) -> Result<(), OpenError> {
    if !folder(bdf).exists() {
        return Err(OpenError::NoDevice { bdf });
    }
    match driver(bdf) {
        Some(driver) if driver == VFIO_PCI || driver.ends_with("_vfio_pci") => Ok(()),
        driver => Err(OpenError::NotBound { bdf, driver }),
    }
}

/// The number of the function's IOMMU group.
pub(super) fn group(bdf: Bdf) -> Result<u32, OpenError> {
    let name = link_name(&folder(bdf).join("iommu_group"));
    name.and_then(|name| name.parse().ok()).ok_or(OpenError::NoIommu { bdf })
}

/// Members of the function's group that have drivers of their own.
pub(super) fn others(bdf: Bdf) -> Vec<(Bdf, String)> {
    let members = fs::read_dir(folder(bdf).join("iommu_group/devices"));
    let names = members.into_iter().flatten().flatten();
    names
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter_map(|member| Some((member, driver(member)?)))
        .filter(|(_, driver)| !driver.ends_with(VFIO_PCI) && driver != "pcieport")
        .collect()
}

/// The function's own device of VFIO, for iommufd.
pub(super) fn cdev(bdf: Bdf) -> Result<PathBuf, OpenError> {
    let entries = fs::read_dir(folder(bdf).join("vfio-dev"));
    let mut names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
    names
        .find(|name| name.to_string_lossy().starts_with("vfio"))
        .map(|name| Path::new("/dev/vfio/devices").join(name))
        .ok_or(OpenError::Unsupported {
            what: "this kernel has no VFIO devices of their own (CONFIG_VFIO_DEVICE_CDEV)",
            advice: "use the backend vfio instead of iommufd, or another kernel",
        })
}

/// Opens a file of the kernel to read and write.
pub(super) fn open(path: &Path) -> Result<File, OpenError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(|error| OpenError::File { path: path.to_owned(), errno: os::errno(&error) })
}
