//! Verdicts over machines made of files.

use super::fake::Machine;
use super::*;

const NVME: &str = "0000:00:05.0";
const NVME_CLASS: &str = "0x010802";

/// A machine whose NVMe controller is in group 3, alone, with its own driver.
fn machine() -> Machine {
    let machine = Machine::new();
    machine.function(NVME, NVME_CLASS, "nvme").group(3, &[NVME]);
    machine
}

fn bdf(text: &str) -> Bdf {
    text.parse().unwrap()
}

fn reasons(machine: &Machine, backend: Backend) -> Vec<Reason> {
    System::at(machine.root()).why_not(bdf(NVME), backend)
}

fn names(machine: &Machine, backend: Backend) -> Vec<&'static str> {
    reasons(machine, backend).iter().map(Reason::name).collect()
}

fn steps(machine: &Machine, backend: Backend) -> Vec<String> {
    let system = System::at(machine.root());
    let steps = system.steps(&system.device(bdf(NVME)).unwrap(), backend);
    steps.iter().map(Step::to_string).collect()
}

const BIND: [&str; 3] = [
    "echo vfio-pci > /sys/bus/pci/devices/0000:00:05.0/driver_override",
    "echo 0000:00:05.0 > /sys/bus/pci/devices/0000:00:05.0/driver/unbind",
    "echo 0000:00:05.0 > /sys/bus/pci/drivers_probe",
];

#[test]
fn a_function_is_read_with_all_that_sysfs_says() {
    let machine = machine();
    machine.function("0000:00:1c.0", "0x060400", "pcieport").cdev(NVME, "vfio4").bound(NVME, 3);
    machine.file("sys/bus/pci/devices/0000:00:05.0/driver_override", "vfio-pci\n");
    machine.file("sys/bus/pci/devices/0000:00:05.0/numa_node", "1\n");
    let functions = System::at(machine.root()).devices().unwrap();
    let [nvme, bridge] = &functions[..] else { panic!("{functions:?}") };
    assert_eq!((nvme.vendor, nvme.device, nvme.class.raw()), (0x1b36, 0x10, 0x01_08_02));
    assert_eq!(nvme.driver.as_deref(), Some("vfio-pci"));
    assert_eq!(nvme.driver_override.as_deref(), Some("vfio-pci"));
    assert_eq!((nvme.numa_node, bridge.numa_node), (Some(1), None));
    let group = nvme.group.as_ref().unwrap();
    assert_eq!((group.number, &group.domain), (3, &GroupDomain::DmaFq));
    assert_eq!(group.members.len(), 1);
    assert_eq!(
        nvme.bars,
        [BarInfo { index: 0, start: 0xfe00_0000, bytes: 16 << 10, space: BarSpace::Memory }]
    );
    assert_eq!(nvme.group_node(), Some(PathBuf::from("/dev/vfio/3")));
    assert_eq!(nvme.cdev_node(), Some(PathBuf::from("/dev/vfio/devices/vfio4")));
    assert_eq!((nvme.kind, nvme.presence), (FunctionKind::Physical, Presence::Present));
    assert!(bridge.class.is_bridge() && bridge.group.is_none());
    assert_eq!(bridge.driver_override, None);
}

#[test]
fn a_virtual_function_and_one_that_is_gone_are_told() {
    let machine = machine();
    machine.link("sys/bus/pci/devices/0000:00:05.0/physfn", "sys/devices/pci0000:00/0000:00:04.0");
    let read = || System::at(machine.root()).device(bdf(NVME)).unwrap();
    assert_eq!((read().kind, read().presence), (FunctionKind::Virtual, Presence::Present));
    let config = machine.root().join("sys/bus/pci/devices/0000:00:05.0/config");
    std::fs::write(config, [0xff; 64]).unwrap();
    assert_eq!(read().presence, Presence::Gone);
    assert_eq!(names(&machine, Backend::Vfio), ["gone"]);
    let rescan = "echo 1 > /sys/bus/pci/rescan";
    assert_eq!(steps(&machine, Backend::Vfio).last().unwrap(), rescan);
}

#[test]
fn a_bound_function_is_usable_by_what_the_kernel_has() {
    let machine = machine();
    machine.bound(NVME, 3);
    assert_eq!(reasons(&machine, Backend::Vfio), []);
    assert_eq!(names(&machine, Backend::Iommufd), ["no-iommufd", "no-cdev"]);
    machine.cdev(NVME, "vfio0");
    assert_eq!(reasons(&machine, Backend::Vfio), []);
    assert_eq!(reasons(&machine, Backend::Iommufd), []);
    assert!(steps(&machine, Backend::Vfio).is_empty());
}

#[test]
fn a_function_of_another_driver_is_bound_by_commands_and_given_back() {
    let machine = machine();
    assert_eq!(names(&machine, Backend::Vfio), ["no-vfio-pci", "not-bound"]);
    let expected = [&["modprobe vfio-pci"][..], &BIND[..]].concat();
    assert_eq!(steps(&machine, Backend::Vfio), expected);
    machine.vfio();
    assert_eq!(steps(&machine, Backend::Vfio), BIND);
    assert!(reasons(&machine, Backend::Vfio)[0].to_string().contains("bound to nvme"));

    let system = System::at(machine.root());
    let back = system.give_back(&system.device(bdf(NVME)).unwrap());
    let back: Vec<String> = back.iter().map(Step::to_string).collect();
    let cleared = "echo > /sys/bus/pci/devices/0000:00:05.0/driver_override";
    let unbound = format!("test ! -e /sys/bus/pci/devices/0000:00:05.0/driver || {}", BIND[1]);
    assert_eq!(back, [cleared, &unbound, BIND[2]]);
}

#[test]
fn a_function_without_driver_is_not_unbound() {
    let machine = Machine::new();
    machine.function(NVME, NVME_CLASS, "").group(3, &[NVME]).vfio();
    assert_eq!(steps(&machine, Backend::Vfio), [BIND[0], BIND[2]]);
}

#[test]
fn members_of_the_group_are_in_the_way_only_with_drivers_that_do_dma() {
    let machine = machine();
    let others = [
        ("0000:00:1c.0", "0x060400", "pcieport"),
        ("0000:00:06.0", "0x020000", ""),
        ("0000:00:07.0", "0x020000", "pci-stub"),
        ("0000:00:08.0", "0x020000", "mlx5-vfio-pci"),
        ("0000:00:09.0", "0x020000", "e1000e"),
    ];
    for (bdf, class, driver) in others {
        machine.function(bdf, class, driver).group(3, &[bdf]);
    }
    machine.bound(NVME, 3);
    let found = reasons(&machine, Backend::Vfio);
    let [Reason::GroupNotViable { group: 3, blockers }] = &found[..] else { panic!("{found:?}") };
    let [blocker] = &blockers[..] else { panic!("{blockers:?}") };
    assert_eq!((blocker.bdf, blocker.driver.as_deref()), (bdf("0000:00:09.0"), Some("e1000e")));
    assert!(found[0].to_string().contains("0000:00:09.0 (bound to e1000e)"));
    let unbind = "echo 0000:00:09.0 > /sys/bus/pci/devices/0000:00:09.0/driver/unbind";
    assert_eq!(steps(&machine, Backend::Vfio)[1], unbind);
}

#[test]
fn an_iommu_that_is_switched_off_is_switched_on_by_its_parameter() {
    let machine = machine();
    machine.remove("sys/class/iommu/dmar0").file("sys/firmware/acpi/tables/DMAR", "");
    for (line, words, step) in [
        ("quiet", "does not ask for it", "# add intel_iommu=on to"),
        ("intel_iommu=on intel_iommu=off", "says intel_iommu=off", "# replace that by"),
        ("intel_iommu=on", "says intel_iommu=on", "# `dmesg | grep -i dmar`"),
    ] {
        machine.file("proc/cmdline", line);
        let found = reasons(&machine, Backend::Vfio);
        assert_eq!(found.len(), 1);
        assert!(found[0].to_string().contains(words), "{}", found[0]);
        assert!(steps(&machine, Backend::Vfio)[0].starts_with(step), "{line}");
    }
    machine.remove("sys/firmware/acpi/tables/DMAR").file("sys/firmware/acpi/tables/IVRS", "");
    machine.file("proc/cmdline", "amd_iommu=off");
    assert!(steps(&machine, Backend::Iommufd)[0].starts_with("# take that off"));
}

#[test]
fn a_kernel_without_the_iommus_driver_is_told_so_and_not_to_boot_again() {
    let machine = machine();
    machine.remove("sys/class/iommu/dmar0").file("proc/cmdline", "quiet");
    machine.file("proc/sys/kernel/osrelease", "6.12.1-cloud\n");
    for (table, option, others) in [
        ("IVRS", "CONFIG_AMD_IOMMU", "CONFIG_INTEL_IOMMU=y\n"),
        ("DMAR", "CONFIG_INTEL_IOMMU", "CONFIG_AMD_IOMMU=y\n"),
        ("VIOT", "CONFIG_VIRTIO_IOMMU", "CONFIG_AMD_IOMMU=y\n"),
        ("IORT", "CONFIG_ARM_SMMU_V3 or CONFIG_ARM_SMMU", ""),
    ] {
        let path = format!("sys/firmware/acpi/tables/{table}");
        machine.file(&path, "").file("boot/config-6.12.1-cloud", others);
        let found = reasons(&machine, Backend::Vfio);
        assert_eq!(found.len(), 1);
        let text = found[0].to_string();
        assert!(text.ends_with(&format!("it is built without {option}")), "{text}");
        let steps = steps(&machine, Backend::Vfio);
        assert_eq!(steps, [format!("# start a kernel that was built with {option}")]);
        machine.remove(&path);
    }
    // With the driver, or where nobody knows.
    machine.file("sys/firmware/acpi/tables/IVRS", "");
    for config in ["CONFIG_AMD_IOMMU=y\n", ""] {
        match config {
            "" => machine.remove("boot/config-6.12.1-cloud"),
            config => machine.file("boot/config-6.12.1-cloud", config),
        };
        let text = reasons(&machine, Backend::Vfio)[0].to_string();
        assert!(text.contains("CONFIG_AMD_IOMMU, or its driver failed"), "{text}");
        let first = &steps(&machine, Backend::Vfio)[0];
        assert!(first.starts_with("# `dmesg | grep -i amd-vi` says why"), "{first}");
    }
}

#[test]
fn where_no_iommu_is_described_the_firmware_or_the_hypervisor_must_give_one() {
    let machine = machine();
    machine.remove("sys/class/iommu/dmar0");
    assert_eq!(names(&machine, Backend::Vfio), ["no-iommu"]);
    assert!(steps(&machine, Backend::Vfio)[0].contains("firmware's settings"));
    machine.file("proc/cpuinfo", "flags\t\t: fpu hypervisor lahf_lm\n");
    assert!(steps(&machine, Backend::Vfio)[0].contains("-device intel-iommu"));
}

#[test]
fn a_function_without_group_and_a_bridge_cannot_be_used() {
    let machine = Machine::new();
    machine.function(NVME, NVME_CLASS, "nvme");
    assert_eq!(names(&machine, Backend::Vfio), ["no-group"]);
    machine.function(NVME, "0x060400", "pcieport");
    assert_eq!(names(&machine, Backend::Iommufd), ["bridge"]);
    assert!(steps(&machine, Backend::Iommufd).is_empty());
}

#[test]
fn a_function_of_a_device_tree_gets_its_group_when_a_driver_is_bound() {
    let machine = Machine::new();
    machine.function("0000:00:06.0", NVME_CLASS, "nvme").group(3, &["0000:00:06.0"]);
    machine.function(NVME, NVME_CLASS, "").vfio();
    assert_eq!(names(&machine, Backend::Vfio), ["no-group"], "ACPI describes it");
    machine.file("sys/firmware/devicetree/base/compatible", "linux,dummy-virt");
    assert_eq!(names(&machine, Backend::Vfio), ["not-bound"]);
    assert_eq!(steps(&machine, Backend::Vfio), [BIND[0], BIND[2]]);
}

#[test]
fn the_mode_without_iommu_is_not_taken_for_one() {
    let machine = machine();
    machine.remove("sys/class/iommu/dmar0").bound(NVME, 3);
    machine.file("sys/kernel/iommu_groups/3/name", "vfio-noiommu\n");
    let function = System::at(machine.root()).device(bdf(NVME)).unwrap();
    assert_eq!(function.group_node(), Some(PathBuf::from("/dev/vfio/noiommu-3")));
    assert_eq!(reasons(&machine, Backend::Vfio), [Reason::NoIommuMode { group: 3 }]);
}

#[test]
fn a_user_who_may_not_open_the_nodes_is_told_whose_they_are() {
    let machine = machine().user(54321, 0);
    machine.bound(NVME, 3).cdev(NVME, "vfio0");
    let found = reasons(&machine, Backend::Vfio);
    let [Reason::Permission { owner: Some(owner), uid: 54321, .. }] = &found[..] else {
        panic!("{found:?}")
    };
    assert_eq!(owner.mode, 0o600);
    assert_eq!(steps(&machine, Backend::Vfio), ["chown 54321 /dev/vfio/3"]);
    let both = ["chown 54321 /dev/iommu", "chown 54321 /dev/vfio/devices/vfio0"];
    assert_eq!(steps(&machine, Backend::Iommufd), both);
    machine.node("dev/vfio/3", 0o666);
    assert_eq!(reasons(&machine, Backend::Vfio), []);
}

#[test]
fn a_user_is_told_before_binding_that_the_nodes_will_be_roots() {
    let machine = machine().user(54321, 0);
    machine.vfio().node("dev/iommu", 0o666);
    let expected = [&BIND[..], &["chown 54321 /dev/vfio/3"]].concat();
    assert_eq!(steps(&machine, Backend::Vfio), expected);
    let own = "chown 54321 /dev/vfio/devices/$(ls /sys/bus/pci/devices/0000:00:05.0/vfio-dev)";
    assert_eq!(steps(&machine, Backend::Iommufd).last().unwrap(), own);
}

#[test]
fn a_node_that_is_missing_behind_a_bound_driver_is_a_containers() {
    let machine = machine();
    machine.bound(NVME, 3).remove("dev/vfio/3");
    let missing = Reason::NodeMissing { node: PathBuf::from("/dev/vfio/3") };
    assert_eq!(reasons(&machine, Backend::Vfio), [missing]);
    assert!(steps(&machine, Backend::Vfio)[0].contains("--device=/dev/vfio/3"));
}

#[test]
fn the_kernels_configuration_says_whether_iommufd_can_be_loaded() {
    let machine = machine();
    machine.bound(NVME, 3).file("proc/sys/kernel/osrelease", "6.12.1\n");
    machine.cdev(NVME, "vfio0").remove("dev/iommu");
    let kernel = |text: &str| {
        machine.file("boot/config-6.12.1", text);
        match &reasons(&machine, Backend::Iommufd)[..] {
            [Reason::NoIommufd { kernel }, ..] => *kernel,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(kernel("CONFIG_IOMMUFD=m\n"), KernelSupport::Module);
    assert_eq!(kernel("# CONFIG_IOMMUFD is not set\n"), KernelSupport::Missing);
    let boot = "# start a kernel that was built with CONFIG_IOMMUFD";
    assert_eq!(steps(&machine, Backend::Iommufd), [boot]);
    machine.remove("boot/config-6.12.1");
    assert_eq!(steps(&machine, Backend::Iommufd)[0], "modprobe iommufd");
}

#[test]
fn a_kernel_that_is_too_old_for_iommufd_is_not_told_to_load_it() {
    let machine = machine();
    for (release, reason, first) in [
        ("6.1.0-50-cloud-amd64\n", "no-iommufd", "# start a kernel from 6.6 on"),
        ("6.5.13\n", "no-cdev", "# start a kernel from 6.6 on"),
        ("6.6.1\n", "no-iommufd", "modprobe iommufd"),
        ("7.2.13\n", "no-iommufd", "modprobe iommufd"),
    ] {
        machine.file("proc/sys/kernel/osrelease", release);
        let first_step = &steps(&machine, Backend::Iommufd)[0];
        assert!(first_step.starts_with(first), "{release}: {first_step}");
        assert!(names(&machine, Backend::Iommufd).contains(&reason), "{release}");
    }
}

#[test]
fn interrupts_that_are_not_remapped_need_a_parameter() {
    let machine = machine();
    machine.bound(NVME, 3).file("proc/interrupts", " 0:  9  IO-APIC  2-edge  timer\n");
    assert_eq!(names(&machine, Backend::Vfio), ["unsafe-interrupts"]);
    let parameter = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
    assert_eq!(steps(&machine, Backend::Vfio)[1], format!("echo 1 > {parameter}"));
    machine.file(parameter.trim_start_matches('/'), "Y\n");
    assert_eq!(reasons(&machine, Backend::Vfio), []);
    machine.remove("sys/module/vfio_iommu_type1");
    // A parameter behind the name of a module that another step has loaded would do nothing.
    let permit = format!("echo 1 > {parameter}");
    let expected = ["modprobe vfio_iommu_type1", &permit];
    assert_eq!(steps(&machine, Backend::Vfio)[1..], expected);
    machine.cdev(NVME, "vfio0");
    let instead = "echo 1 > /sys/module/iommufd/parameters/allow_unsafe_interrupts";
    assert_eq!(steps(&machine, Backend::Vfio)[1], instead);
    machine.file("proc/interrupts", " 0:  9  GICv3  27  arch_timer\n");
    assert_eq!(reasons(&machine, Backend::Vfio), []);
}

#[test]
fn vfio_without_its_type_1_is_completed() {
    let machine = machine();
    machine.bound(NVME, 3).remove("sys/module/vfio_iommu_type1");
    assert_eq!(steps(&machine, Backend::Vfio), ["modprobe vfio_iommu_type1"]);
}

#[test]
fn a_mounted_disk_is_unmounted_first() {
    let machine = machine();
    let mounts = "36 35 259:1 / /my\\040data rw - ext4 /dev/nvme0n1p1 rw\n";
    machine.vfio().disk(NVME, "nvme0n1", mounts);
    let found = reasons(&machine, Backend::Vfio);
    assert!(found[0].to_string().ends_with("nvme0n1p1 is mounted at /my data"), "{}", found[0]);
    assert_eq!(steps(&machine, Backend::Vfio)[0], "umount '/my data'");
    machine.file("proc/swaps", "Filename Type\n/dev/nvme0n1 partition 8 0 -2\n");
    assert_eq!(steps(&machine, Backend::Vfio)[0], "swapoff /dev/nvme0n1");
}

#[test]
fn the_systems_own_disk_is_never_taken_also_below_other_devices() {
    let machine = machine();
    machine.vfio().disk(NVME, "nvme0n1", "36 35 253:0 / / rw - ext4 /dev/mapper/root rw\n");
    machine.file("sys/devices/virtual/block/dm-0/dev", "253:0\n");
    let holders = "sys/devices/pci0000:00/0000:00:05.0/nvme/nvme0n1/nvme0n1p1/holders";
    machine.link(&format!("{holders}/dm-0"), "sys/devices/virtual/block/dm-0");
    let steps = steps(&machine, Backend::Vfio);
    assert_eq!(steps.len(), 1);
    assert!(steps[0].starts_with("# dm-0 is mounted at /: the system needs"), "{}", steps[0]);
}

#[test]
fn an_interface_that_is_up_is_warned_of() {
    let machine = machine();
    let net = "sys/devices/pci0000:00/0000:00:05.0/net/eth0";
    machine.vfio().link("sys/class/net/eth0", net).file(&format!("{net}/flags"), "0x1003\n");
    let found = steps(&machine, Backend::Vfio);
    assert!(found[0].starts_with("# eth0 is up"));
    assert_eq!(found[1], "ip link set eth0 down");
    machine.file(&format!("{net}/flags"), "0x1002\n");
    assert_eq!(steps(&machine, Backend::Vfio), BIND);
}

#[test]
fn the_use_of_a_disk_that_cannot_be_seen_is_unknown_and_no_command_takes_the_disk() {
    let host = "27 1 254:0 / / rw - ext4 /dev/vda rw\n22 27 0:21 / /proc rw - proc proc rw\n";
    let tmpfs = "50 27 0:40 / / rw - tmpfs none rw\n51 50 0:21 / /proc rw - proc proc rw\n";
    let chroot = "51 50 0:21 / /proc rw - proc proc rw\n";
    let (first, other, pids) = ("mnt:[4026531832]", "mnt:[4026532999]", "pid:[4026531836]");
    // Namespaces of this process and of the first, what each has mounted, and whether that is all.
    for (own, own_pids, one, mounts, of_one, is_known) in [
        (first, pids, Some(first), tmpfs, None, true),
        (first, pids, None, host, None, true),
        (first, pids, None, chroot, None, false),
        (first, pids, None, tmpfs, None, false),
        (other, pids, Some(first), host, None, false),
        (other, "pid:[4026532888]", Some(other), tmpfs, Some(host), false),
        (other, pids, Some(first), tmpfs, Some(host), true),
    ] {
        let machine = self::machine();
        machine.vfio().disk(NVME, "nvme0n1", mounts).namespace("proc/self/ns/mnt", own);
        machine.namespace("proc/self/ns/pid", own_pids);
        one.map(|one| machine.namespace("proc/1/ns/mnt", one));
        of_one.map(|mounts| machine.file("proc/1/mountinfo", mounts));
        assert_eq!(is_use_known(&machine), is_known, "{own} {own_pids} {one:?} {mounts}");
    }
    // Without procfs.
    let machine = self::machine();
    machine.vfio().disk(NVME, "nvme0n1", "").remove("proc/self/mountinfo");
    assert!(!is_use_known(&machine));
    // Without block devices, of a driver that has some.
    let machine = self::machine();
    machine.vfio().remove("sys/block");
    assert!(!is_use_known(&machine));
    machine.bound(NVME, 3);
    assert_eq!(reasons(&machine, Backend::Vfio), []);
    // What the first process has mounted counts, too.
    let machine = self::machine();
    let mounts = "36 35 259:1 / /data rw - ext4 /dev/nvme0n1p1 rw\n";
    machine.vfio().disk(NVME, "nvme0n1", tmpfs).file("proc/1/mountinfo", mounts);
    machine.namespace("proc/self/ns/mnt", other).namespace("proc/self/ns/pid", pids);
    assert_eq!(steps(&machine, Backend::Vfio)[0], "umount /data");
}

/// Whether the use of the function is known. Where it is not, it is not taken away.
fn is_use_known(machine: &Machine) -> bool {
    let system = System::at(machine.root());
    let function = system.device(bdf(NVME)).unwrap();
    let found = system.verdict(&function, Backend::Vfio);
    let steps = steps(machine, Backend::Vfio);
    let is_known = !function.uses.iter().any(Use::is_unknown);
    let takes = steps.iter().any(|step| step.contains("unbind"));
    assert_eq!((takes, found[0].is_final()), (is_known, !is_known), "{found:?}");
    assert_eq!(system.give_back(&function).is_empty(), !is_known);
    if !is_known {
        assert!(found[0].to_string().contains(" is unknown: "), "{}", found[0]);
        let [step] = &steps[..] else { panic!("{steps:?}") };
        assert!(step.contains("run `dmaspan devices 0000:00:05.0` on the host"), "{step}");
    }
    is_known
}

#[test]
fn the_use_of_a_network_card_whose_interface_cannot_be_seen_is_unknown() {
    let machine = Machine::new();
    machine.function(NVME, "0x020000", "e1000e").group(3, &[NVME]).vfio();
    assert!(is_use_known(&machine));
    machine.namespace("proc/self/ns/net", "net:[4026532999]");
    assert!(!is_use_known(&machine));
    // It is seen, and down.
    let net = "sys/devices/pci0000:00/0000:00:05.0/net/eth0";
    machine.link("sys/class/net/eth0", net).file(&format!("{net}/flags"), "0x1002\n");
    assert!(is_use_known(&machine));
    machine.remove("sys/class/net/eth0").bound(NVME, 3);
    assert_eq!(reasons(&machine, Backend::Vfio), []);
    // Without procfs; in the group of another function it is not taken either.
    machine.driver(NVME, "e1000e").remove("proc/self");
    assert!(!is_use_known(&machine));
    let usb = "0000:00:06.0";
    machine.function(usb, "0x0c0330", "xhci_hcd").group(3, &[usb]);
    let system = System::at(machine.root());
    let function = system.device(bdf(usb)).unwrap();
    let steps: Vec<String> =
        system.steps(&function, Backend::Vfio).iter().map(Step::to_string).collect();
    assert!(!steps.iter().any(|step| step.contains("0000:00:05.0/driver/unbind")), "{steps:?}");
    assert!(system.give_back(&function).is_empty());
}

#[test]
fn a_disk_that_something_is_built_on_is_in_use_without_being_mounted() {
    let machine = machine();
    machine.vfio().disk(NVME, "nvme0n1", "");
    machine.file("sys/devices/virtual/block/md0/dev", "9:0\n");
    let holders = "sys/devices/pci0000:00/0000:00:05.0/nvme/nvme0n1/nvme0n1p1/holders";
    machine.link(&format!("{holders}/md0"), "sys/devices/virtual/block/md0");
    let found = reasons(&machine, Backend::Vfio);
    assert!(found[0].to_string().ends_with("; nvme0n1p1 is a part of md0"), "{}", found[0]);
    let first = &steps(&machine, Backend::Vfio)[0];
    assert_eq!(first, "# nvme0n1p1 is a part of md0: stop md0 first");
}

#[test]
fn a_limit_of_locked_memory_is_a_hint_and_no_refusal() {
    let root = machine();
    assert_eq!(System::at(root.root()).hints(), []);
    let user = machine().user(54321, 0);
    let hints = System::at(user.root()).hints();
    assert_eq!(hints, [Hint::LockedMemory { bytes: 65536, in_user_namespace: false }]);
    assert!(hints[0].to_string().contains("64 KiB"));

    let inside = machine().user(0, 1 << 14);
    inside.file("proc/self/uid_map", "0 1000 1\n");
    let hint = System::at(inside.root()).hints()[0].to_string();
    assert!(hint.contains("`--ulimit memlock=-1:-1`") && !hint.contains("as root"), "{hint}");
}

#[test]
fn a_machine_without_pci_or_the_function_says_so() {
    let machine = machine();
    let system = System::at(machine.root());
    let absent = bdf("0000:00:1f.0");
    assert_eq!(system.device(absent), Err(PciError::Absent { bdf: absent }));
    assert_eq!(system.why_not(absent, Backend::Vfio), [Reason::Absent { bdf: absent }]);
    machine.remove("sys/bus");
    assert!(matches!(system.devices(), Err(PciError::NoPci { .. })));
    assert!(matches!(system.device(absent), Err(PciError::NoPci { .. })));
    assert_eq!(system.why_not(absent, Backend::Vfio), [Reason::NoPci]);
}

#[test]
fn this_machine_can_be_read() {
    match System::new().devices() {
        Ok(functions) => assert!(functions.is_sorted_by_key(|function| function.bdf)),
        Err(error) => assert!(matches!(error, PciError::NoPci { .. }), "{error}"),
    }
}
