//! This is what address spaces that others made have in common: their files, and the part of the
//! addresses that is ours.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;

use dmaspan::{IovaRange, Limits};

use super::error::Error;
use crate::os;

/// The device file behind `fd`.
///
/// # Errors
///
/// [`Error::Unsupported`] where it is another kind of file.
pub(super) fn device_file(fd: OwnedFd) -> Result<File, Error> {
    let file = File::from(fd);
    let metadata = file.metadata().map_err(|error| Error::NoLimits { errno: os::errno(&error) })?;
    if !metadata.file_type().is_char_device() {
        return Err(Error::Unsupported {
            what: "the file that is to be adopted is no device",
            advice: "adopt a duplicate of an open /dev/vfio/vfio or /dev/iommu",
        });
    }
    Ok(file)
}

/// What can be mapped in `part` of the addresses; of all of them without one.
pub(super) fn within(limits: Limits, part: Option<IovaRange>) -> Limits {
    let Some(part) = part else { return limits };
    let apertures = limits.apertures.iter();
    let apertures = apertures.filter_map(|aperture| aperture.intersection(part)).collect();
    Limits { apertures, ..limits }
}
