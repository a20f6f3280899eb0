//! Before a device is opened, this asks the system what keeps it from being used.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use dmaspan::Errno;

use super::backend::Backend;
use super::error::OpenError;
use crate::os;
use crate::pci::{Bdf, Function, GroupKind, Reason, System};

/// A function that a VFIO driver has, and what keeps it from being used.
#[derive(Debug)]
pub(super) struct Candidate {
    system: System,
    function: Function,
    backend: Backend,
    /// The number of its group; 0 where it needs none.
    pub(super) group: u32,
}

impl Candidate {
    /// Finds a function of this machine.
    ///
    /// # Errors
    ///
    /// [`OpenError::Unusable`] where no VFIO driver has it, or no IOMMU translates for it.
    pub(super) fn find(backend: Backend, bdf: Bdf) -> Result<Self, OpenError> {
        Self::find_in(System::new(), backend, bdf)
    }

    fn find_in(system: System, backend: Backend, bdf: Bdf) -> Result<Self, OpenError> {
        let unusable = |reasons| OpenError::Unusable { bdf, backend, reasons };
        let Ok(function) = system.device(bdf) else {
            return Err(unusable(system.why_not(bdf, backend)));
        };
        let group = match backend {
            // Where the kernel has no groups, it has none for functions without an IOMMU alone.
            Backend::NoIommu => function
                .has_untranslated_cdev()
                .then(|| function.group.as_ref().map_or(0, |group| group.number)),
            _ => {
                let group = function.group.as_ref();
                group.filter(|group| group.kind == GroupKind::Iommu).map(|group| group.number)
            }
        };
        match group.filter(|_| function.has_vfio_driver()) {
            Some(group) => Ok(Self { system, function, backend, group }),
            None => Err(unusable(system.verdict(&function, backend))),
        }
    }

    /// Its address.
    pub(super) fn bdf(&self) -> Bdf {
        self.function.bdf
    }

    /// Opens the function's group.
    pub(super) fn open_group(&self) -> Result<File, OpenError> {
        self.open(&Path::new("/dev/vfio").join(self.group.to_string()))
    }

    /// Opens the function's own device of VFIO.
    pub(super) fn open_cdev(&self) -> Result<File, OpenError> {
        let missing = || OpenError::File { path: PathBuf::from(CDEVS), errno: Errno::ENOENT };
        let path = self.function.cdev_node().ok_or_else(|| self.explain(missing()))?;
        self.open(&path)
    }

    /// Opens a node to read and write.
    pub(super) fn open(&self, path: &Path) -> Result<File, OpenError> {
        open(path).map_err(|error| match error {
            // Only the function's own nodes can be opened once alone.
            OpenError::File { errno: Errno::EBUSY, .. } => {
                self.explain(OpenError::InUse { bdf: self.bdf() })
            }
            error => self.explain(error),
        })
    }

    /// Why the kernel answered a request with `EPERM`: the group has another owner, which may be a
    /// driver or another open file of VFIO or iommufd (`iommu_device_claim_dma_owner`), or
    /// interrupts are not remapped. Only what the system shows of the two is said.
    pub(super) fn not_permitted(&self, request: &'static str) -> OpenError {
        let (bdf, group) = (self.bdf(), self.group);
        let hides_interrupts = self.system.hides_interrupts();
        self.explain(OpenError::NotPermitted { bdf, group, request, hides_interrupts })
    }

    /// The error, or what the system says about it.
    pub(super) fn explain(&self, error: OpenError) -> OpenError {
        let explains = |reason: &Reason| match &error {
            OpenError::File { .. } | OpenError::Unsupported { .. } => true,
            // The kernel asks for both, in this order (`iommufd_device_bind`).
            OpenError::NotPermitted { .. } => {
                matches!(reason, Reason::UnsafeInterrupts { .. } | Reason::GroupNotViable { .. })
            }
            OpenError::NotViable { .. } | OpenError::InUse { .. } => {
                matches!(reason, Reason::GroupNotViable { .. })
            }
            _ => false,
        };
        let mut reasons = self.system.verdict(&self.function, self.backend);
        reasons.retain(explains);
        // Interrupts that are not remapped are reason enough, whoever holds the group.
        let by_owner = matches!(error, OpenError::NotPermitted { .. } | OpenError::InUse { .. });
        if by_owner && reasons.is_empty() {
            reasons.extend(self.system.held(&self.function));
        }
        let (bdf, backend) = (self.bdf(), self.backend);
        if reasons.is_empty() { error } else { OpenError::Unusable { bdf, backend, reasons } }
    }
}

/// Where functions' own nodes are.
const CDEVS: &str = "/dev/vfio/devices";

/// Opens a file of the kernel to read and write.
pub(super) fn open(path: &Path) -> Result<File, OpenError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    opened.map_err(|error| OpenError::File { path: path.to_owned(), errno: os::errno(&error) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pci::fake::Machine;

    const DISK: &str = "0000:00:05.0";
    const NVME: &str = "0x010802\n";

    fn find(machine: &Machine, backend: Backend) -> Result<Candidate, OpenError> {
        Candidate::find_in(System::at(machine.root()), backend, DISK.parse().unwrap())
    }

    /// The only line that says why not.
    fn refusal(machine: &Machine, backend: Backend) -> (String, Errno) {
        let error = find(machine, backend).unwrap_err();
        let text = error.to_string();
        assert!(!text.contains('\n') && text.starts_with(DISK), "{text}");
        (text, error.errno())
    }

    #[test]
    fn a_device_that_cannot_be_opened_is_refused_with_the_reasons_and_the_command() {
        let machine = Machine::new();
        let (absent, errno) = refusal(&machine, Backend::Vfio);
        assert!(absent.contains("there is no PCI function"), "{absent}");
        assert_eq!(errno, Errno::ENODEV);
        machine.function(DISK, NVME, "nvme").group(3, &[DISK]).vfio();
        let (bound, errno) = refusal(&machine, Backend::Vfio);
        assert!(bound.contains("bound to nvme, not to vfio-pci"), "{bound}");
        assert!(bound.contains("`dmaspan devices 0000:00:05.0`"), "{bound}");
        assert_eq!(errno, Errno::ENODEV);
        machine.remove("sys/class/iommu/dmar0").file("proc/cpuinfo", "");
        machine.remove(&format!("sys/devices/pci0000:00/{DISK}/iommu_group"));
        let (no_iommu, _) = refusal(&machine, Backend::Iommufd);
        assert!(no_iommu.contains("VT-d"), "{no_iommu}");
    }

    #[test]
    fn what_the_kernel_refuses_is_explained_where_the_system_says_why() {
        let user = Machine::new().user(1000, 0);
        user.function(DISK, NVME, "").group(3, &[DISK, "0000:00:06.0"]).bound(DISK, 3);
        user.function("0000:00:06.0", NVME, "nvme");
        let candidate = find(&user, Backend::Vfio).unwrap();
        assert_eq!(candidate.group, 3);
        let bdf = candidate.bdf();
        let text = |error| candidate.explain(error).to_string();
        let busy = text(OpenError::NotViable { bdf, group: 3 });
        assert!(busy.contains("0000:00:06.0 (bound to nvme)"), "{busy}");
        let node = OpenError::File { path: "/dev/vfio/3".into(), errno: os::EACCES };
        let denied = text(node);
        assert!(denied.contains("user 1000 may not open /dev/vfio/3"), "{denied}");
        // What has nothing to do with it stays.
        let unfit = OpenError::DoesNotFit { bdf, errno: Errno::EINVAL };
        assert_eq!(candidate.explain(unfit.clone()), unfit);
        user.driver("0000:00:06.0", "vfio-pci");
        let candidate = find(&user, Backend::Vfio).unwrap();
        let busy = OpenError::InUse { bdf };
        assert_eq!(candidate.explain(busy.clone()), busy);
        let denied = candidate.explain(OpenError::File { path: "/x".into(), errno: os::EACCES });
        assert!(denied.to_string().ends_with("run `chown 1000 /dev/vfio/3` as root"), "{denied}");
        assert_eq!(denied.errno(), os::EACCES);
    }

    /// A machine with the disk in group 3 beside another function, and iommufd.
    fn shared_group() -> Machine {
        let machine = Machine::new();
        machine.function(DISK, NVME, "").group(3, &[DISK, OTHER]).bound(DISK, 3);
        machine.function(OTHER, NVME, "vfio-pci").cdev(DISK, "vfio4").cdev(OTHER, "vfio7");
        machine
    }

    const OTHER: &str = "0000:00:06.0";
    /// More than any process has.
    const PID: u32 = 1 << 30;

    fn not_permitted(machine: &Machine, backend: Backend) -> OpenError {
        find(machine, backend).unwrap().not_permitted("VFIO_DEVICE_BIND_IOMMUFD")
    }

    #[test]
    fn a_group_of_another_owner_is_never_told_as_interrupts_that_are_not_remapped() {
        let machine = shared_group();
        let remapped = [("  0:  9  IR-IO-APIC  2-edge  timer", false), ("", true)];
        for (interrupts, is_hidden) in remapped {
            machine.file("proc/interrupts", interrupts);
            let error = not_permitted(&machine, Backend::Iommufd);
            let text = error.to_string();
            assert!(matches!(error, OpenError::NotPermitted { group: 3, .. }), "{error:?}");
            assert!(text.contains("another process") && text.contains("its group 3"), "{text}");
            assert!(!text.contains("unsafe_interrupts") && !text.contains("remap"), "{text}");
            assert_eq!(text.contains("keep the interrupts of devices apart"), is_hidden, "{text}");
            assert_eq!(error.errno(), Errno::EPERM);
        }
        // Another driver of the group is named.
        machine.driver(OTHER, "nvme");
        let text = not_permitted(&machine, Backend::Iommufd).to_string();
        assert!(text.contains("0000:00:06.0 (bound to nvme)"), "{text}");
        assert!(!text.contains("unsafe_interrupts"), "{text}");
    }

    #[test]
    fn processes_that_hold_a_group_are_named_with_the_node() {
        for (node, backend) in [
            ("/dev/vfio/3", Backend::Vfio),
            ("/dev/vfio/devices/vfio4", Backend::Iommufd),
            ("/dev/vfio/devices/vfio7", Backend::Iommufd),
        ] {
            let machine = shared_group();
            machine.process(PID, "qemu-system-x86\n", node).process(PID + 1, "sh\n", "/dev/null");
            let held = not_permitted(&machine, backend);
            let says = format!("process {PID} (qemu-system-x86) has {node} open");
            assert!(held.to_string().contains(&says), "{held}");
            assert!(!held.to_string().contains("unsafe_interrupts"), "{held}");
            let busy = OpenError::InUse { bdf: DISK.parse().unwrap() };
            assert_eq!(find(&machine, backend).unwrap().explain(busy), held);
            assert_eq!(held.errno(), Errno::EBUSY);
        }
    }

    #[test]
    fn interrupts_that_are_not_remapped_are_said_where_the_machine_shows_it() {
        let machine = shared_group();
        machine.file("proc/interrupts", "  0:  9  IO-APIC  2-edge  timer");
        machine.process(PID, "qemu\n", "/dev/vfio/3");
        let error = not_permitted(&machine, Backend::Iommufd);
        let text = error.to_string();
        assert!(text.contains("interrupts are not remapped"), "{text}");
        assert_eq!(error.errno(), Errno::EPERM);
        // Permitted already, they are not what the kernel refuses.
        machine.file("sys/module/iommufd/parameters/allow_unsafe_interrupts", "Y\n");
        let text = not_permitted(&machine, Backend::Iommufd).to_string();
        assert!(text.contains("(qemu) has /dev/vfio/3 open"), "{text}");
    }

    #[test]
    fn each_backend_is_told_of_what_it_needs_alone() {
        let machine = Machine::new();
        machine.function(DISK, NVME, "").group(3, &[DISK]).bound(DISK, 3);
        machine.file("boot/config-7", "CONFIG_IOMMUFD=m\n").file("proc/sys/kernel/osrelease", "7");
        let missing = || OpenError::File { path: "/x".into(), errno: Errno::ENOENT };
        let explained = |backend| find(&machine, backend).unwrap().explain(missing());
        assert_eq!(explained(Backend::Vfio), missing());
        let compat = explained(Backend::Compat).to_string();
        assert!(compat.ends_with("run `modprobe iommufd` as root"), "{compat}");
        let iommufd = explained(Backend::Iommufd).to_string();
        assert!(iommufd.contains("older than 6.6"), "{iommufd}");
    }
}
