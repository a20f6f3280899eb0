//! The limits that the machine, its kernel and a process set, read from `/proc` and `/sys`.
//!
//! [`MachineFiles`] reads those of this machine, or copies of another one's. Nothing is changed.
//!
//! ```
//! use dmaspan_linux::machine::MachineFiles;
//!
//! let machine = MachineFiles::new();
//! let own = machine.limits_of(std::process::id())?;
//! println!("{:?} of {:?} bytes are locked", own.locked, own.memlock);
//! for check in machine.checks() {
//!     println!("{} {check}", if check.is_right { '✓' } else { '✗' });
//! }
//! Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod checks;
mod device;
mod limits;
mod process;

pub use checks::MachineCheck;
pub use device::{DeviceIommu, DeviceIommuError};
pub use limits::{ProcessError, ProcessLimits};
pub use process::{DeviceFiles, NotTaken, ProcessChoice, ProcessMemory, ProcessRange};

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::plan::forecast::LinuxVersion;

/// The folder that procfs, sysfs and `/dev` are in: `/`, or a copy of them.
#[derive(Clone, Debug)]
pub struct MachineFiles(PathBuf);

impl Default for MachineFiles {
    fn default() -> Self {
        Self::new()
    }
}

impl MachineFiles {
    /// Those of this machine.
    pub fn new() -> Self {
        Self::at(Path::new("/"))
    }

    /// Those below `root`, in folders `proc` and `sys`.
    pub fn at(root: &Path) -> Self {
        Self(root.to_owned())
    }

    /// The version of the kernel; `None` where it does not say.
    pub fn kernel(&self) -> Option<LinuxVersion> {
        self.text("proc/sys/kernel/osrelease")?.parse().ok()
    }

    /// The bytes of memory that can be allocated without swapping; `None` where the kernel does
    /// not say (`MemAvailable` of proc(5)).
    pub fn available_bytes(&self) -> Option<u64> {
        kib_field(&self.text("proc/meminfo")?, "MemAvailable:")
    }

    fn path(&self, below: impl AsRef<Path>) -> PathBuf {
        self.0.join(below)
    }

    /// A file's text without white space around it.
    fn read(&self, below: impl AsRef<Path>) -> io::Result<String> {
        fs::read_to_string(self.path(below)).map(|text| text.trim().to_owned())
    }

    fn text(&self, below: impl AsRef<Path>) -> Option<String> {
        self.read(below).ok()
    }

    fn number(&self, below: impl AsRef<Path>) -> Option<u64> {
        self.text(below)?.parse().ok()
    }

    /// The names in a folder, in order; none where there is no such folder.
    fn names(&self, below: impl AsRef<Path>) -> Vec<String> {
        let entries = fs::read_dir(self.path(below)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        names
    }
}

/// What stands behind the name of a line.
fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// A field in KiB, in bytes (proc(5)).
fn kib_field(text: &str, name: &str) -> Option<u64> {
    field(text, name)?.strip_suffix(" kB")?.trim_end().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests;
