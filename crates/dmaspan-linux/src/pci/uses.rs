//! This finds what would break if a function lost its driver: mounted disks, swap, network
//! interfaces.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::Bdf;
use super::files::{self, Root};
use super::function::folder;

/// Something of the running system that needs a function's driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Use {
    /// A disk behind it, or a partition of one, has a mounted file system.
    Mounted {
        /// The name of the disk or partition, or of a device-mapper or RAID device on it.
        block: String,
        /// Where.
        at: String,
    },
    /// A disk behind it, or a partition of one, is swapped to.
    Swap {
        /// The path of its node.
        node: String,
    },
    /// A network interface of it is up.
    NetworkUp {
        /// Its name.
        interface: String,
    },
}

impl Use {
    /// Returns whether the system cannot run without it: the file systems that it was started from.
    pub fn is_vital(&self) -> bool {
        let Self::Mounted { at, .. } = self else { return false };
        matches!(at.as_str(), "/" | "/usr" | "/var" | "/etc")
    }
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted { block, at } => write!(f, "{block} is mounted at {at}"),
            Self::Swap { node } => write!(f, "{node} is used for swap"),
            Self::NetworkUp { interface } => write!(f, "the network interface {interface} is up"),
        }
    }
}

/// `IFF_UP` (include/uapi/linux/if.h).
const INTERFACE_UP: u64 = 1;

/// How deep devices on devices are followed: a file system on LVM on LUKS on RAID is 3.
const DEPTH: u32 = 8;

/// All uses in this system, each with the folder in sysfs of what is used.
#[derive(Debug)]
pub(super) struct Uses(Vec<(PathBuf, Use)>);

impl Uses {
    pub(super) fn read(root: &Root) -> Self {
        let mut uses = Vec::new();
        let mounts = Mounts::read(root);
        for name in root.names("sys/block") {
            let Ok(disk) = fs::canonicalize(root.path("sys/block").join(&name)) else { continue };
            // A path of a multipath NVMe namespace has no node; what is mounted is its head.
            let head = nvme_head(&name).map(|head| root.path("sys/block").join(head));
            let mut found = Vec::new();
            mounts.on(head.as_deref().unwrap_or(&disk), DEPTH, &mut found);
            uses.extend(found.into_iter().map(|found| (disk.clone(), found)));
        }
        for interface in root.names("sys/class/net") {
            let link = root.path("sys/class/net").join(&interface);
            let flags = files::text(&link.join("flags")).and_then(|text| files::hex(&text));
            let is_up = flags.is_some_and(|flags| flags & INTERFACE_UP != 0);
            if let Some(folder) = fs::canonicalize(&link).ok().filter(|_| is_up) {
                uses.push((folder, Use::NetworkUp { interface }));
            }
        }
        Self(uses)
    }

    /// Those of one function: what lies below its folder.
    pub(super) fn of(&self, root: &Root, bdf: Bdf) -> Vec<Use> {
        let Ok(own) = fs::canonicalize(folder(root, bdf)) else { return Vec::new() };
        let below = self.0.iter().filter(|(folder, _)| folder.starts_with(&own));
        below.map(|(_, used)| used.clone()).collect()
    }
}

/// `nvme0n1` of `nvme0c1n1`: the namespace that several paths lead to.
fn nvme_head(name: &str) -> Option<String> {
    let (subsystem, rest) = name.strip_prefix("nvme")?.split_once('c')?;
    let (_, namespace) = rest.split_once('n')?;
    Some(format!("nvme{subsystem}n{namespace}"))
}

/// What is mounted and swapped to.
#[derive(Debug)]
struct Mounts {
    /// `major:minor`, the name of the source's node, and where.
    mounts: Vec<(String, String, String)>,
    /// Paths of nodes.
    swaps: Vec<String>,
}

impl Mounts {
    /// From `/proc/self/mountinfo` and `/proc/swaps` (proc(5)).
    fn read(root: &Root) -> Self {
        let mounts = root.text("proc/self/mountinfo").unwrap_or_default();
        let swaps = root.text("proc/swaps").unwrap_or_default();
        let first = |line: &str| line.split_whitespace().next().map(unescaped);
        Self {
            mounts: mounts.lines().filter_map(mount).collect(),
            swaps: swaps.lines().skip(1).filter_map(first).collect(),
        }
    }

    /// The uses of a block device, of its partitions and of the devices that are built on them.
    fn on(&self, folder: &Path, depth: u32, uses: &mut Vec<Use>) {
        let Some(name) = folder.file_name().map(|name| name.to_string_lossy()) else { return };
        let number = files::text(&folder.join("dev")).unwrap_or_default();
        for (device, source, at) in &self.mounts {
            let found = Use::Mounted { block: name.clone().into_owned(), at: at.clone() };
            if (*device == number || *source == name) && !uses.contains(&found) {
                uses.push(found);
            }
        }
        for node in &self.swaps {
            let found = Use::Swap { node: node.clone() };
            if node.rsplit('/').next() == Some(&*name) && !uses.contains(&found) {
                uses.push(found);
            }
        }
        let Some(depth) = depth.checked_sub(1) else { return };
        for part in files::names(folder).unwrap_or_default() {
            let part = folder.join(part);
            if part.join("partition").exists() {
                self.on(&part, depth, uses);
            }
        }
        for holder in files::names(&folder.join("holders")).unwrap_or_default() {
            if let Ok(holder) = fs::canonicalize(folder.join("holders").join(holder)) {
                self.on(&holder, depth, uses);
            }
        }
    }
}

/// Number, source and place of a line of mountinfo, whose fields before the source vary in number.
fn mount(line: &str) -> Option<(String, String, String)> {
    let (fields, rest) = line.split_once(" - ")?;
    let mut fields = fields.split(' ').skip(2);
    let (device, at) = (fields.next()?, fields.nth(1)?);
    let source = rest.split(' ').nth(1)?.rsplit('/').next()?;
    Some((device.to_owned(), source.to_owned(), unescaped(at)))
}

/// A path whose blanks are written as `\040`.
fn unescaped(text: &str) -> String {
    let blanks = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    blanks.iter().fold(text.to_owned(), |text, (code, blank)| text.replace(code, blank))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mountinfo_is_read_whatever_its_optional_fields() {
        for tags in ["", "shared:1 ", "shared:1 master:2 "] {
            let line = format!("36 35 259:2 / /my\\040data rw {tags}- ext4 /dev/nvme0n1p2 rw");
            let (device, source, at) = mount(&line).unwrap();
            assert_eq!((device.as_str(), source.as_str()), ("259:2", "nvme0n1p2"));
            assert_eq!(at, "/my data");
        }
        assert_eq!(mount("36 35 259:2"), None);
    }

    #[test]
    fn a_path_of_a_multipath_namespace_is_used_by_its_head() {
        assert_eq!(nvme_head("nvme0c1n2").as_deref(), Some("nvme0n2"));
        assert_eq!(nvme_head("nvme0n1"), None);
        assert_eq!(nvme_head("vda"), None);
    }
}
