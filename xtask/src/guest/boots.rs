//! The boots: which guests there are and what each does.

use super::qemu::Time;

/// Which kernels a boot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum On {
    /// Those of Debian's packages, which have type1.
    Stock,
    /// The newest of those.
    Newest,
    /// Those with iommufd.
    Iommufd,
    /// Those of Arm, with pages of each size that Debian has.
    Arm,
    /// Those of these names, before a change of Linux and after it. Such a boot runs where it is
    /// asked for alone.
    Named(&'static [&'static str]),
}

/// What translates for the guest's devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Iommu {
    /// Intel's VT-d, with interrupt remapping.
    Intel,
    /// virtio-iommu, which has none.
    Virtio,
    /// Arm's SMMUv3.
    Smmu,
}

/// A disk of a server beside QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    /// There is none.
    No,
    /// A sanitizer judges the server.
    Judged,
    /// The server is as users build it, and a disk of QEMU's storage daemon is beside its own.
    Measured,
}

/// A guest and what it is told to do.
#[derive(Clone, Debug)]
pub(super) struct Boot {
    /// What it is called.
    pub(super) name: &'static str,
    /// The kernels that it is for.
    pub(super) on: &'static [On],
    /// What translates.
    pub(super) iommu: Iommu,
    /// How its instructions pass.
    pub(super) time: Time,
    /// Its memory, as QEMU writes sizes.
    pub(super) memory: &'static str,
    /// More arguments of QEMU. `IMAGE` in them is the file of which every boot has a copy.
    pub(super) qemu: &'static [&'static str],
    /// More of the kernel's command line.
    pub(super) cmdline: &'static str,
    /// The seconds after which it is given up.
    pub(super) seconds: u64,
    /// The lines that its init runs first. `SHA256` in them is what that file hashes to.
    pub(super) commands: &'static [&'static str],
    /// Whether it has QEMU, for a VM of its own.
    pub(super) nested: bool,
    /// The disk of a vfio-user server that it has, whose socket is `SOCKET` in the arguments.
    pub(super) served: Served,
    /// What a second guest runs, on the disk of a server that was started again. `FLUSHED` in it is
    /// the last file that the first guest has flushed.
    pub(super) again: &'static [&'static str],
    /// The backends that all programs are run with behind them.
    pub(super) backends: &'static [&'static str],
}

impl Boot {
    /// The kernels that it names, if it does.
    pub(super) fn named(&self) -> impl Iterator<Item = &'static str> {
        self.on
            .iter()
            .flat_map(|on| match on {
                On::Named(names) => *names,
                _ => &[],
            })
            .copied()
    }

    /// All lines that its init runs.
    pub(super) fn lines(&self) -> Vec<String> {
        let mut lines: Vec<String> = self.commands.iter().map(|&line| line.to_owned()).collect();
        for backend in self.backends {
            lines.extend(PROGRAMS.map(|line| line.replace("BACKEND", backend)));
        }
        lines
    }
}

/// What is run with a backend.
const PROGRAMS: [&str; 4] = [
    "dmaspan-guest cases --backend BACKEND",
    "dmaspan map 64M --runs 1 --backend BACKEND:0000:00:05.0 --format json",
    "dmaspan-nvme identify 0000:00:05.0 --backend BACKEND",
    "dmaspan-nvme bench 0000:00:05.0 --backend BACKEND --count 2000 --turns 4 --format json",
];

/// An NVMe controller, for every boot's commands.
const NVME: &str = "bind 0000:00:05.0";
/// A function with memory that others reach.
const PEER: &str = "bind 0000:00:06.0";
/// A function with a large BAR, and its device.
const LARGE: &str = "bind 0000:00:07.0";
const LARGE_DEVICE: &str = "pci-testdev,membar=1G,addr=07";
/// A disk of virtio, whose bytes are those of every boot's disk before anybody writes to it.
const VIRTIO: &str = "bind 0000:00:08.0";
const VIRTIO_DRIVE: &str = "file=IMAGE,if=none,id=virtio,format=raw,readonly=on";
const VIRTIO_DEVICE: &str =
    "virtio-blk-pci,drive=virtio,addr=08,disable-legacy=on,iommu_platform=on";
pub(super) const WITH_VIRTIO: [&str; 4] = ["-drive", VIRTIO_DRIVE, "-device", VIRTIO_DEVICE];
const WITH_BOTH: [&str; 6] =
    ["-device", LARGE_DEVICE, "-drive", VIRTIO_DRIVE, "-device", VIRTIO_DEVICE];
/// The block driver of virtio-drivers in a process, by each interface of the kernel.
const VIRTIO_BY_VFIO: &str = "virtio_disk 0000:00:08.0 vfio SHA256";
const VIRTIO_BY_IOMMUFD: &str = "virtio_disk 0000:00:08.0 iommufd SHA256";
/// For memory of that kind, and of the kind whose pages are set aside when the kernel starts, which
/// takes more memory than [`PLAIN`] has.
const HUGEPAGES: &str = "hugepages 64";
const PAGE_OF_1G: &str = "hugepagesz=1G hugepages=1";
/// What the program says of the machine.
const DEVICES: &str = "dmaspan devices";
/// And of the controller alone.
const DEVICE: &str = "dmaspan devices 0000:00:05.0";
/// A VMM of vfio-ioctls, which gives its guest the controller.
const VMM: &str = "guest_disk 0000:00:05.0 container";
const VMM_BY_IOMMUFD: &str = "guest_disk 0000:00:05.0 iommufd";
/// The program without a device, which needs io_uring of the kernel and what it counts as pinned.
const SOFT: &str = "dmaspan map 64M --runs 1";

/// A boot that does nothing, for the others to say what they do.
const PLAIN: Boot = Boot {
    name: "",
    on: &[],
    iommu: Iommu::Intel,
    time: Time::Real,
    memory: "3G",
    qemu: &[],
    cmdline: "",
    seconds: 300,
    commands: &[],
    nested: false,
    served: Served::No,
    again: &[],
    backends: &[],
};

/// A boot with the disk of a server beside QEMU.
const OF_SERVER: Boot =
    Boot { on: &[On::Newest], qemu: SERVED, memory: "1G", served: Served::Judged, ..PLAIN };

/// All boots.
pub(super) const BOOTS: &[Boot] = &[
    Boot {
        name: "type1",
        on: &[On::Stock],
        qemu: &WITH_BOTH,
        memory: "4G",
        cmdline: PAGE_OF_1G,
        commands: &[
            SOFT,
            NVME,
            PEER,
            LARGE,
            HUGEPAGES,
            DEVICES,
            DEVICE,
            VMM,
            VIRTIO,
            VIRTIO_BY_VFIO,
        ],
        backends: &["vfio"],
        ..PLAIN
    },
    Boot {
        name: "backends",
        on: &[On::Iommufd],
        qemu: &WITH_BOTH,
        memory: "4G",
        cmdline: PAGE_OF_1G,
        seconds: 600,
        commands: &[
            SOFT,
            NVME,
            PEER,
            LARGE,
            HUGEPAGES,
            DEVICES,
            VMM,
            VMM_BY_IOMMUFD,
            VIRTIO,
            VIRTIO_BY_VFIO,
            VIRTIO_BY_IOMMUFD,
        ],
        backends: &["vfio", "iommufd", "compat"],
        ..PLAIN
    },
    Boot {
        name: "noiommu",
        on: &[On::Named(&["iommufd-built"])],
        cmdline: "intel_iommu=off vfio.enable_unsafe_noiommu_mode=1",
        commands: &[NVME, HUGEPAGES, DEVICE, "dmaspan-guest cases --backend noiommu noiommu/"],
        ..PLAIN
    },
    Boot {
        name: "narrow",
        on: &[On::Iommufd],
        qemu: &["-global", "intel-iommu.aw-bits=39"],
        cmdline: "dmaspan.bits=39",
        commands: &[
            NVME,
            PEER,
            "dmaspan-guest cases --backend vfio forecast/",
            "dmaspan-guest cases --backend iommufd forecast/",
            "dmaspan-guest cases --backend compat forecast/",
        ],
        ..PLAIN
    },
    Boot {
        name: "virtio-iommu",
        on: &[On::Newest],
        iommu: Iommu::Virtio,
        qemu: &WITH_VIRTIO,
        commands: &[NVME, PEER, HUGEPAGES, DEVICES, VIRTIO, VIRTIO_BY_VFIO],
        backends: &["vfio"],
        ..PLAIN
    },
    Boot {
        name: "virtio-iommu-backends",
        on: &[On::Iommufd],
        iommu: Iommu::Virtio,
        qemu: &WITH_VIRTIO,
        seconds: 600,
        commands: &[NVME, PEER, HUGEPAGES, DEVICES, VIRTIO, VIRTIO_BY_IOMMUFD],
        backends: &["vfio", "iommufd"],
        ..PLAIN
    },
    Boot {
        name: "arm",
        on: &[On::Arm],
        iommu: Iommu::Smmu,
        qemu: &WITH_VIRTIO,
        seconds: 1500,
        commands: &[
            SOFT,
            // Before a driver is bound there is no group.
            DEVICES,
            NVME,
            PEER,
            HUGEPAGES,
            DEVICES,
            "dmaspan map 64M --runs 1 --backend vfio:0000:00:05.0",
            "dmaspan-nvme read 0000:00:05.0 --backend vfio --blocks 16384 --out /dev/null",
            VIRTIO,
            VIRTIO_BY_VFIO,
        ],
        backends: &["vfio"],
        ..PLAIN
    },
    Boot {
        name: "arm-tests",
        on: &[On::Arm],
        iommu: Iommu::Smmu,
        // Huge pages of 512 MiB, where base pages have 64 KiB.
        memory: "6G",
        seconds: 3000,
        commands: &[
            "tests-linux --test-threads 2",
            "tests-linux-pinner --test-threads 2",
            // It reads the source, which guests do not have.
            "tests-linux-it --test-threads 2 --skip unsafe_blocks::",
            "tests-cli --test-threads 2",
            "tests-cli-it --test-threads 2",
        ],
        ..PLAIN
    },
    Boot {
        name: "counted",
        on: &[On::Iommufd],
        time: Time::Counted,
        commands: &[
            NVME,
            "hugepages 512",
            // The kernel first ends what it does after it started.
            "settle 20",
            "dmaspan-guest cases --backend vfio plan/",
            "dmaspan-guest cases --backend iommufd plan/",
        ],
        ..PLAIN
    },
    Boot {
        name: "map-pages",
        on: &[On::Named(&["5.10", "6.1"])],
        time: Time::Counted,
        seconds: 600,
        commands: TABLES,
        ..PLAIN
    },
    Boot {
        name: "map-pages-arm",
        on: &[On::Named(&["arm64-5.10", "arm64"])],
        iommu: Iommu::Smmu,
        time: Time::Counted,
        seconds: 1200,
        commands: TABLES,
        ..PLAIN
    },
    Boot {
        name: "swiotlb",
        on: &[On::Named(&["5.10", "6.1"])],
        qemu: FOUR_CPUS,
        cmdline: "intel_iommu=off swiotlb=force",
        seconds: 900,
        commands: BOUNCE,
        ..PLAIN
    },
    Boot {
        name: "swiotlb-one-area",
        on: &[On::Named(&["6.1"])],
        qemu: FOUR_CPUS,
        // 64 MiB of slots of 2 KiB, as there are by default.
        cmdline: "intel_iommu=off swiotlb=32768,1,force",
        seconds: 900,
        commands: BOUNCE,
        ..PLAIN
    },
    Boot {
        name: "no-swiotlb",
        on: &[On::Named(&["5.10", "6.1"])],
        qemu: FOUR_CPUS,
        cmdline: "intel_iommu=off",
        seconds: 900,
        commands: BOUNCE,
        ..PLAIN
    },
    Boot {
        name: "large-folios",
        on: &[On::Named(&["6.17", "6.18"])],
        time: Time::Counted,
        memory: "10G",
        seconds: 1800,
        commands: &[NVME, "settle 20", "dmaspan-guest measure folios"],
        ..PLAIN
    },
    Boot {
        name: "registered-buffers",
        on: &[On::Named(&["6.1", "6.12"])],
        time: Time::Counted,
        // Commands of up to 2 MiB.
        qemu: &["-global", "nvme.mdts=9"],
        cmdline: "intel_iommu=off",
        seconds: 900,
        commands: &["hugepages 300", "settle 20", REGISTERED],
        ..PLAIN
    },
    Boot {
        name: "unaligned-bar",
        on: &[On::Named(&["6.12", "6.16", "6.18"])],
        time: Time::Counted,
        qemu: &["-device", LARGE_DEVICE],
        seconds: 600,
        commands: &[LARGE, "settle 20", "dmaspan-guest measure bars"],
        ..PLAIN
    },
    Boot {
        name: "vm-boot-requests",
        on: &[On::Named(&["6.12", "6.16", "6.18"])],
        time: Time::Counted,
        qemu: BAR_OF_32G,
        seconds: 1800,
        commands: &[LARGE, "settle 20", "dmaspan-guest measure boot"],
        ..PLAIN
    },
    Boot {
        name: "vm-boot",
        on: &[On::Named(&["6.12", "6.16"])],
        time: Time::Counted,
        qemu: BAR_OF_32G,
        seconds: 3000,
        commands: &[LARGE, "settle 20", "dmaspan-guest measure vm"],
        nested: true,
        ..PLAIN
    },
    Boot {
        name: "viommu-pins",
        on: &[On::Named(&["iommufd"])],
        time: Time::Counted,
        seconds: 900,
        commands: &[NVME, HUGEPAGES, "settle 20", "dmaspan-guest measure pins"],
        ..PLAIN
    },
    Boot {
        name: "requests",
        on: &[On::Named(&["iommufd"])],
        time: Time::Counted,
        memory: "4G",
        seconds: 1800,
        commands: &[NVME, "hugepages 512", "settle 20", "dmaspan-guest measure requests"],
        ..PLAIN
    },
    Boot {
        name: "vfio-user",
        cmdline: "intel_iommu=off",
        seconds: 1200,
        commands: &["dmaspan-guest served write random files reset pieces unbind"],
        ..OF_SERVER
    },
    Boot {
        name: "vfio-user-viommu",
        cmdline: "iommu.strict=1",
        seconds: 1800,
        commands: &["dmaspan-guest served part random files reset"],
        ..OF_SERVER
    },
    Boot {
        name: "vfio-user-viommu-whole",
        on: &[On::Named(&["newest"])],
        cmdline: "iommu.strict=1",
        seconds: 3600,
        commands: &["dmaspan-guest served write random files reset"],
        ..OF_SERVER
    },
    Boot {
        name: "vfio-user-iops",
        on: &[On::Named(&["newest"])],
        cmdline: "intel_iommu=off",
        seconds: 1200,
        commands: &["settle 10", "dmaspan-guest served iops"],
        served: Served::Measured,
        ..OF_SERVER
    },
    Boot {
        name: "vfio-user-killed",
        // The driver gives a command up earlier than it would by itself, which is after 30 s.
        cmdline: "intel_iommu=off nvme_core.io_timeout=15",
        seconds: 600,
        commands: &["dmaspan-guest served layout killed"],
        again: &["dmaspan-guest served flushed=FLUSHED"],
        ..OF_SERVER
    },
    Boot {
        name: "vfio-user-killed-busy",
        cmdline: "intel_iommu=off nvme_core.io_timeout=15",
        seconds: 600,
        commands: &["dmaspan-guest served layout killed-busy"],
        again: &["dmaspan-guest served flushed=FLUSHED"],
        ..OF_SERVER
    },
];

/// A disk of a server, which reaches the guest's memory by its file.
const SERVED: &[&str] = &[
    "-object",
    "memory-backend-memfd,id=ram,size=1G,share=on",
    "-machine",
    "memory-backend=ram",
    "-device",
    r#"{"driver":"vfio-user-pci","addr":"9","socket":{"type":"unix","path":"SOCKET"}}"#,
];

/// One with a BAR as long as that of the series.
const BAR_OF_32G: &[&str] = &["-device", "pci-testdev,membar=32G,addr=07"];
/// What reads and writes the disk by registered buffers: it runs `dmaspan-bench`.
pub(super) const REGISTERED: &str = "dmaspan-guest measure registered";
/// What maps contiguous pages by requests of VFIO.
const TABLES: &[&str] = &[NVME, "hugepages 8", "settle 20", "dmaspan-guest measure tables"];
/// What reads and writes the disk by the kernel's own driver, with more CPUs than others have.
const BOUNCE: &[&str] = &["settle 10", "dmaspan-guest measure bounce"];
const FOUR_CPUS: &[&str] = &["-smp", "4"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boots_differ_in_their_names_and_all_do_something() {
        for (index, boot) in BOOTS.iter().enumerate() {
            assert!(BOOTS[..index].iter().all(|other| other.name != boot.name), "{}", boot.name);
            assert!(!boot.lines().is_empty() && !boot.on.is_empty(), "{}", boot.name);
        }
    }

    #[test]
    fn every_kernel_of_the_usual_boots_runs_the_program_without_a_device() {
        for kernel in super::super::kernels::KERNELS {
            if kernel.is_old() {
                continue;
            }
            let boots = BOOTS.iter().filter(|boot| kernel.is_one_of(boot.on));
            let runs = boots.filter(|boot| boot.commands.contains(&SOFT)).count();
            assert_eq!(runs, 1, "{}", kernel.name);
        }
    }

    #[test]
    fn programs_run_with_each_backend_behind_the_first_lines() {
        let boot = Boot { commands: &["a b"], backends: &["vfio", "iommufd"], ..PLAIN };
        let lines = boot.lines();
        assert_eq!(lines.len(), 1 + 2 * PROGRAMS.len());
        assert_eq!(lines[0], "a b");
        assert!(lines[1].ends_with(" --backend vfio"), "{lines:?}");
        let of_iommufd = &lines[1 + PROGRAMS.len()..];
        assert!(of_iommufd.iter().all(|line| line.contains("--backend iommufd")), "{lines:?}");
    }
}
