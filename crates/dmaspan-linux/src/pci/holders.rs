//! This finds processes that have nodes of VFIO open.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process;

use super::files::{self, Root};
use super::function::{Function, folder, vfio_device};

/// A process that has a node of a function's IOMMU group open.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Its number.
    pub pid: u32,
    /// The name of its program, as far as the kernel keeps it (`comm` of proc(5)).
    pub name: String,
    /// The node.
    pub node: PathBuf,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, name, node } = self;
        write!(f, "process {pid} ({name}) has {} open", node.display())
    }
}

/// Other processes that have the node of the function's group, or of a member of it, open. Only
/// root sees those of other users.
pub(super) fn holders(root: &Root, function: &Function) -> Vec<Holder> {
    let members = function.group.iter().flat_map(|group| &group.members);
    let cdev = |name| Path::new("/dev/vfio/devices").join(name);
    let cdevs =
        members.filter_map(|member| Some(cdev(vfio_device(&folder(root, member.bdf))?.name)));
    let nodes: Vec<PathBuf> = function.group_node().into_iter().chain(cdevs).collect();
    let mut holders = Vec::new();
    for name in root.names("proc") {
        let Some(pid) = name.parse().ok().filter(|pid| *pid != process::id()) else { continue };
        let of_process = Path::new("proc").join(&name);
        let open: Vec<PathBuf> = root
            .names(of_process.join("fd"))
            .iter()
            .filter_map(|fd| fs::read_link(root.path(of_process.join("fd").join(fd))).ok())
            .collect();
        if let Some(node) = nodes.iter().find(|node| open.contains(node)) {
            let name = files::text(&root.path(of_process.join("comm"))).unwrap_or_default();
            holders.push(Holder { pid, name, node: node.clone() });
        }
    }
    holders
}
