//! A machine made of files, for tests: a tree with the folders and links that sysfs and procfs
//! have.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// The tree, which is removed with it.
#[derive(Debug)]
pub(crate) struct Machine {
    root: PathBuf,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// Where functions really are: what is in `sys/bus/pci/devices` are links.
const HOME: &str = "sys/devices/pci0000:00";

impl Machine {
    /// A machine with PCI, an active Intel IOMMU with interrupt remapping, and root at it.
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let own =
            format!("dmaspan-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let machine = Self { root: std::env::temp_dir().join(own) };
        for folder in ["sys/bus/pci/devices", "sys/class/iommu/dmar0", "sys/block", "dev", HOME] {
            fs::create_dir_all(machine.root.join(folder)).unwrap();
        }
        machine.file("proc/interrupts", "  0:  9  IR-IO-APIC  2-edge  timer");
        machine.user(0, u64::MAX)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn file(&self, path: &str, text: &str) -> &Self {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
        self
    }

    pub(crate) fn folder(&self, path: &str) -> &Self {
        fs::create_dir_all(self.root.join(path)).unwrap();
        self
    }

    pub(crate) fn remove(&self, path: &str) -> &Self {
        let path = self.root.join(path);
        if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) }.unwrap();
        self
    }

    /// A link to a folder of the tree, which is made.
    pub(crate) fn link(&self, path: &str, target: &str) -> &Self {
        self.folder(target);
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(self.root.join(target), path).unwrap();
        self
    }

    /// A node of `/dev` that only its owner may open.
    pub(crate) fn node(&self, path: &str, mode: u32) -> &Self {
        self.file(path, "");
        fs::set_permissions(self.root.join(path), fs::Permissions::from_mode(mode)).unwrap();
        self
    }

    /// The user that looks at it: one with these capabilities, and 64 KiB of locked memory.
    pub(crate) fn user(self, uid: u32, capabilities: u64) -> Self {
        let status = format!(
            "Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t{uid}\t{uid}\t{uid}\t{uid}\n\
             Groups:\t{uid} \nCapEff:\t{capabilities:016x}\n"
        );
        self.file("proc/self/status", &status);
        let limits =
            "Limit   Soft Limit  Hard Limit  Units\nMax locked memory  65536  65536  bytes\n";
        self.file("proc/self/limits", limits);
        self
    }

    /// A function with a class code and, unless it is empty, a driver.
    pub(crate) fn function(&self, bdf: &str, class: &str, driver: &str) -> &Self {
        let at = format!("{HOME}/{bdf}");
        self.link(&format!("sys/bus/pci/devices/{bdf}"), &at);
        for (name, text) in [
            ("vendor", "0x1b36\n"),
            ("device", "0x0010\n"),
            ("class", class),
            ("driver_override", "(null)\n"),
            ("numa_node", "-1\n"),
            ("resource", "0x00000000fe000000 0x00000000fe003fff 0x0000000000140204\n"),
        ] {
            self.file(&format!("{at}/{name}"), text);
        }
        if driver.is_empty() { self } else { self.driver(bdf, driver) }
    }

    /// Binds a driver.
    pub(crate) fn driver(&self, bdf: &str, driver: &str) -> &Self {
        self.link(&format!("{HOME}/{bdf}/driver"), &format!("sys/bus/pci/drivers/{driver}"))
    }

    /// Puts functions into one group.
    pub(crate) fn group(&self, number: u32, members: &[&str]) -> &Self {
        let group = format!("sys/kernel/iommu_groups/{number}");
        self.file(&format!("{group}/type"), "DMA-FQ\n");
        for bdf in members {
            self.link(&format!("{HOME}/{bdf}/iommu_group"), &group);
            self.link(&format!("{group}/devices/{bdf}"), &format!("{HOME}/{bdf}"));
        }
        self
    }

    /// What follows when vfio-pci is loaded and bound to a function of a group.
    pub(crate) fn bound(&self, bdf: &str, group: u32) -> &Self {
        self.driver(bdf, "vfio-pci").vfio().node(&format!("dev/vfio/{group}"), 0o600)
    }

    /// Loads VFIO.
    pub(crate) fn vfio(&self) -> &Self {
        self.folder("sys/module/vfio")
            .folder("sys/module/vfio_iommu_type1")
            .folder("sys/bus/pci/drivers/vfio-pci")
            .node("dev/vfio/vfio", 0o666)
    }

    /// Gives a function a device of its own, with a node, and the kernel iommufd.
    pub(crate) fn cdev(&self, bdf: &str, name: &str) -> &Self {
        self.file(&format!("{HOME}/{bdf}/vfio-dev/{name}/dev"), "511:0\n")
            .node(&format!("dev/vfio/devices/{name}"), 0o600)
            .node("dev/iommu", 0o660)
    }

    /// A process that has a node open.
    pub(crate) fn process(&self, pid: u32, comm: &str, node: &str) -> &Self {
        self.file(&format!("proc/{pid}/comm"), comm).folder(&format!("proc/{pid}/fd"));
        symlink(node, self.root.join(format!("proc/{pid}/fd/5"))).unwrap();
        self
    }

    /// The link that says which namespace a process is in: `proc/self/ns/mnt`.
    pub(crate) fn namespace(&self, path: &str, name: &str) -> &Self {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_file(&path);
        symlink(name, path).unwrap();
        self
    }

    /// A disk of a function, with a partition, and what `/proc/self/mountinfo` says.
    pub(crate) fn disk(&self, bdf: &str, name: &str, mountinfo: &str) -> &Self {
        let disk = format!("{HOME}/{bdf}/nvme/{name}");
        self.link(&format!("sys/block/{name}"), &disk)
            .file(&format!("{disk}/dev"), "259:0\n")
            .file(&format!("{disk}/{name}p1/dev"), "259:1\n")
            .file(&format!("{disk}/{name}p1/partition"), "1\n")
            .file("proc/self/mountinfo", mountinfo)
    }
}
