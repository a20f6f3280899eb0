//! This finds what would break if a function lost its driver: mounted disks, swap, network
//! interfaces.
//!
//! A process sees the mounts of its own mount namespace below its own root, and the interfaces of
//! the network namespace of its `/sys`. Where these are a container's, the use of disks and network
//! cards is unknown, which is a [`Use`] of its own.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::files::{self, Root};
use super::function::{folder, is_vfio_driver};
use super::{Bdf, Class};

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
    /// A device-mapper or RAID device is built on a disk behind it, or a partition of one.
    Held {
        /// The name of the disk or partition.
        block: String,
        /// The name of what is built on it.
        holder: String,
    },
    /// The system may use it, which cannot be seen from here.
    Unknown {
        /// The name of the disk, or of the driver of a network card.
        what: String,
        /// Why it cannot be seen.
        why: &'static str,
    },
}

impl Use {
    /// Returns whether nobody can say here that taking it away breaks nothing.
    pub const fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown { .. })
    }

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
            Self::Held { block, holder } => write!(f, "{block} is a part of {holder}"),
            Self::Unknown { what, why } => write!(f, "the use of {what} is unknown: {why}"),
        }
    }
}

/// `IFF_UP` (include/uapi/linux/if.h).
const INTERFACE_UP: u64 = 1;

/// How deep devices on devices are followed: a file system on LVM on LUKS on RAID is 3.
const DEPTH: u32 = 8;

/// The base classes of disks' and network cards' functions.
const STORAGE: u8 = 0x01;
const NETWORK: u8 = 0x02;
const WIRELESS: u8 = 0x0d;

/// All uses in this system.
#[derive(Debug)]
pub(super) struct Uses {
    /// Each with the folder in sysfs of what is used.
    found: Vec<(PathBuf, Use)>,
    /// The folders of the network interfaces that can be seen.
    interfaces: Vec<PathBuf>,
}

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
            if let Some(why) = mounts.hidden.filter(|_| !found.iter().any(Use::is_vital)) {
                found.push(Use::Unknown { what: name, why });
            }
            uses.extend(found.into_iter().map(|found| (disk.clone(), found)));
        }
        let mut interfaces = Vec::new();
        for interface in root.names("sys/class/net") {
            let link = root.path("sys/class/net").join(&interface);
            let flags = files::text(&link.join("flags")).and_then(|text| files::hex(&text));
            let is_up = flags.is_some_and(|flags| flags & INTERFACE_UP != 0);
            let Ok(folder) = fs::canonicalize(&link) else { continue };
            if is_up {
                uses.push((folder.clone(), Use::NetworkUp { interface }));
            }
            interfaces.push(folder);
        }
        Self { found: uses, interfaces }
    }

    /// Those of one function: what lies below its folder.
    pub(super) fn of(&self, root: &Root, bdf: Bdf) -> Vec<Use> {
        let Ok(own) = fs::canonicalize(folder(root, bdf)) else { return Vec::new() };
        let below = self.found.iter().filter(|(folder, _)| folder.starts_with(&own));
        let mut uses: Vec<Use> = below.map(|(_, used)| used.clone()).collect();
        let class = files::text(&own.join("class")).and_then(|text| files::hex(&text)).unwrap_or(0);
        let class = Class::from_raw(u32::try_from(class).unwrap_or(0));
        let has_namespaces = || root.has("proc/self/ns") || !root.has("proc/self");
        let has_interface = || self.interfaces.iter().any(|folder| folder.starts_with(&own));
        let why = match class.base() {
            STORAGE if !root.has("sys/block") => Some("/sys/block cannot be seen"),
            NETWORK | WIRELESS if has_namespaces() && !has_interface() => Some(
                "its interface, if it has one, is in a network namespace that cannot be seen from \
                 here",
            ),
            _ => None,
        };
        // Without a driver nothing uses it, and VFIO's and placeholders have neither.
        let driver = files::target(&own.join("driver"));
        let driver = driver.filter(|name| !is_vfio_driver(name) && name != "pci-stub");
        uses.extend(why.zip(driver).map(|(why, what)| Use::Unknown { what, why }));
        uses
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
    /// Why there may be other mounts.
    hidden: Option<&'static str>,
}

impl Mounts {
    /// From `/proc/PID/mountinfo` and `/proc/swaps` (proc(5)): of this process, and of the
    /// machine's first, where that can be seen.
    fn read(root: &Root) -> Self {
        let own = root.text("proc/self/mountinfo");
        let namespace = |of: &str| fs::read_link(root.path("proc").join(of)).ok();
        // `PROC_PID_INIT_INO` (include/linux/proc_ns.h). A kernel without namespaces has no link.
        let is_host = |own: PathBuf| own == Path::new("pid:[4026531836]");
        let sees_first = namespace("self/ns/pid").is_none_or(is_host);
        let first = sees_first.then(|| root.text("proc/1/mountinfo")).flatten();
        let of_first = namespace("1/ns/mnt").filter(|_| sees_first);
        let hidden = match (&own, namespace("self/ns/mnt")) {
            (None, _) if first.is_none() => Some("/proc/self/mountinfo cannot be read"),
            (Some(own), of_own @ Some(_)) if first.is_none() => {
                let by_root = || own.lines().any(is_machines_root);
                let is_first = if of_first.is_some() { of_first == of_own } else { by_root() };
                (!is_first).then_some("only the mounts of this container can be seen")
            }
            _ => None,
        };
        let mounts = [own, first].into_iter().flatten().collect::<Vec<_>>().join("\n");
        let swaps = root.text("proc/swaps").unwrap_or_default();
        let first_word = |line: &str| line.split_whitespace().next().map(unescaped);
        Self {
            mounts: mounts.lines().filter_map(mount).collect(),
            swaps: swaps.lines().skip(1).filter_map(first_word).collect(),
            hidden,
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
            let before = uses.len();
            if let Ok(holder) = fs::canonicalize(folder.join("holders").join(&holder)) {
                self.on(&holder, depth, uses);
            }
            // A use of it says more.
            if uses.len() == before {
                uses.push(Use::Held { block: name.clone().into_owned(), holder });
            }
        }
    }
}

/// Whether a line of mountinfo is of the root of the machine: it is on the first mount that the
/// kernel made, whose number has one digit. Those of other mount namespaces are copies with numbers
/// of their own, and a process that was given another root sees that, if it is a mount.
fn is_machines_root(line: &str) -> bool {
    let mut fields = line.split(' ').skip(1);
    let (parent, at) = (fields.next(), fields.nth(2));
    at == Some("/") && parent.is_some_and(|parent| parent.len() == 1)
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
