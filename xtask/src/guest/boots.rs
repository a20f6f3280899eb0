//! The boots: which guests there are and what each does.

use super::qemu::Time;

/// Which kernels a boot is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum On {
    /// Those of Debian's packages, which have type1.
    Stock,
    /// The newest of those.
    Newest,
    /// The one with iommufd.
    Iommufd,
}

/// What translates for the guest's devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Iommu {
    /// Intel's VT-d, with interrupt remapping.
    Intel,
    /// virtio-iommu, which has none.
    Virtio,
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
    /// More arguments of QEMU.
    pub(super) qemu: &'static [&'static str],
    /// More of the kernel's command line.
    pub(super) cmdline: &'static str,
    /// The seconds after which it is given up.
    pub(super) seconds: u64,
    /// The lines that its init runs.
    pub(super) commands: &'static [&'static str],
}

/// An NVMe controller, for every boot's commands.
const NVME: &str = "bind 0000:00:05.0";
/// A function with memory that others reach.
const PEER: &str = "bind 0000:00:06.0";

/// A boot that does nothing, for the others to say what they do.
const PLAIN: Boot = Boot {
    name: "",
    on: &[],
    iommu: Iommu::Intel,
    time: Time::Real,
    memory: "3G",
    qemu: &[],
    cmdline: "",
    seconds: 180,
    commands: &[],
};

/// All boots.
pub(super) const BOOTS: &[Boot] = &[
    Boot {
        name: "type1",
        on: &[On::Stock],
        commands: &[NVME, PEER, "hugepages 64", "dmaspan-guest cases --backend vfio"],
        ..PLAIN
    },
    Boot {
        name: "backends",
        on: &[On::Iommufd],
        commands: &[
            NVME,
            PEER,
            "hugepages 64",
            "dmaspan-guest cases --backend vfio",
            "dmaspan-guest cases --backend iommufd",
            "dmaspan-guest cases --backend compat",
        ],
        ..PLAIN
    },
    Boot {
        name: "virtio-iommu",
        on: &[On::Newest],
        iommu: Iommu::Virtio,
        commands: &[NVME, PEER, "hugepages 64", "dmaspan-guest cases --backend vfio"],
        ..PLAIN
    },
    Boot {
        name: "virtio-iommu-backends",
        on: &[On::Iommufd],
        iommu: Iommu::Virtio,
        commands: &[
            NVME,
            PEER,
            "hugepages 64",
            "dmaspan-guest cases --backend vfio",
            "dmaspan-guest cases --backend iommufd",
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
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boots_differ_in_their_names_and_all_do_something() {
        for (index, boot) in BOOTS.iter().enumerate() {
            assert!(BOOTS[..index].iter().all(|other| other.name != boot.name), "{}", boot.name);
            assert!(!boot.commands.is_empty() && !boot.on.is_empty(), "{}", boot.name);
        }
    }
}
