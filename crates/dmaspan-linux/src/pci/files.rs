//! Small files and links of sysfs and procfs below one root folder.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The folder that sysfs, procfs and `/dev` are in: `/`, or a copy of them.
#[derive(Clone, Debug)]
pub(super) struct Root(PathBuf);

impl Root {
    pub(super) fn new(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Where a path like `sys/bus/pci` is.
    pub(super) fn path(&self, below: impl AsRef<Path>) -> PathBuf {
        self.0.join(below)
    }

    pub(super) fn has(&self, below: impl AsRef<Path>) -> bool {
        self.path(below).exists()
    }

    /// A file's text without white space around it; `None` where it cannot be read.
    pub(super) fn text(&self, below: impl AsRef<Path>) -> Option<String> {
        text(&self.path(below))
    }

    /// The names in a folder, in order; none where there is no such folder.
    pub(super) fn names(&self, below: impl AsRef<Path>) -> Vec<String> {
        names(&self.path(below)).unwrap_or_default()
    }
}

/// A file's text without white space around it; `None` where it cannot be read.
pub(super) fn text(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The names in a folder, in order.
pub(super) fn names(path: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

/// The name of what a link leads to: in sysfs, of a driver or group.
pub(super) fn target(link: &Path) -> Option<String> {
    let target = fs::read_link(link).ok()?;
    Some(target.file_name()?.to_string_lossy().into_owned())
}

/// A hexadecimal number, with or without `0x`.
pub(super) fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).ok()
}
