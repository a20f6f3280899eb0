use super::*;
use crate::pci::Bdf;
use crate::pci::fake::Machine;
use crate::plan::forecast::IommuModel;

const LIMITS: &str = "Max processes  1 1 processes\n\
                      Max locked memory         8388608              8388608              bytes\n";

fn files(machine: &Machine) -> MachineFiles {
    MachineFiles::at(machine.root())
}

fn process(capabilities: &str) -> Machine {
    let fake = Machine::new();
    let status = format!("Name:\tqemu\nVmLck:\t    2048 kB\nVmPin:\t      4 kB\n{capabilities}\n");
    fake.file("proc/7/status", &status).file("proc/7/limits", LIMITS);
    fake
}

#[test]
fn limits_of_a_process_are_those_of_its_files() {
    let fake = process("CapEff:\t0000000000000000");
    let limits = files(&fake).limits_of(7).unwrap();
    assert_eq!((limits.memlock, limits.has_ipc_lock), (Some(8 << 20), false));
    assert_eq!((limits.locked, limits.pinned, limits.cgroup_left), (2 << 20, 4096, None));
    let fake = process("CapEff:\t0000000000004000");
    let limits = files(&fake).limits_of(7).unwrap();
    assert_eq!((limits.memlock, limits.has_ipc_lock), (None, true));
    let gone = files(&fake).limits_of(8).unwrap_err();
    assert_eq!(gone, ProcessError::Gone { pid: 8, inside: Vec::new() });
    // The number that process 7 has in its container.
    fake.file("proc/7/status", "Name:\tqemu\nNSpid:\t7\t8\n");
    let inside = files(&fake).limits_of(8).unwrap_err();
    assert_eq!(inside, ProcessError::Gone { pid: 8, inside: vec![7] });
    assert!(inside.to_string().ends_with("7 has the number 8 in a container"), "{inside}");
    let own = MachineFiles::new().limits_of(std::process::id()).unwrap();
    assert!(own.memlock.is_none_or(|limit| limit > 0));
}

#[test]
fn capabilities_lift_the_limit_in_the_first_user_namespace_alone() {
    let fake = process("CapEff:\t000001ffffffffff");
    let lifted = |inside: bool| {
        let limits = files(&fake).limits_of(7).unwrap();
        let memlock = inside.then_some(8 << 20);
        assert_eq!((limits.memlock, limits.has_ipc_lock), (memlock, !inside));
        assert_eq!(limits.in_user_namespace, inside);
    };
    // A kernel without such namespaces.
    lifted(false);
    // Who may not follow the link reads the map.
    for (map, inside) in
        [("         0          0 4294967295\n", false), ("0 1000 1\n", true), ("", true)]
    {
        fake.file("proc/7/uid_map", map);
        lifted(inside);
    }
    // A namespace within the first may map all users.
    fake.file("proc/7/uid_map", "0 0 4294967295\n");
    for (namespace, inside) in [("user:[4026531837]", false), ("user:[4026532311]", true)] {
        fake.namespace("proc/7/ns/user", namespace);
        lifted(inside);
    }
    let own = format!("proc/{}", std::process::id());
    fake.file(&format!("{own}/status"), "CapEff:\t000001ffffffffff\n")
        .file(&format!("{own}/limits"), LIMITS)
        .namespace(&format!("{own}/ns/user"), "user:[4026532311]");
    let checks = files(&fake).checks();
    let check = checks.iter().find(|check| check.name == "memlock").unwrap();
    assert!(
        !check.is_right && check.text.contains("8 MiB") && check.text.contains("user namespace")
    );
    assert!(check.change.as_ref().unwrap().contains("memlock=-1:-1"), "{check}");
}

#[test]
fn the_tightest_cgroup_counts_without_its_cached_files() {
    let fake = process("CapEff:\t0");
    let left = |cgroups: &str| {
        fake.file("proc/7/cgroup", cgroups);
        let limits = files(&fake).limits_of(7).unwrap();
        limits.cgroup_left.map(|left| (left, limits.cgroup_file.unwrap()))
    };
    let root = files(&fake).path("sys/fs/cgroup");
    fake.file("sys/fs/cgroup/a/b/memory.max", "max\n")
        .file("sys/fs/cgroup/a/memory.max", "1000\n")
        .file("sys/fs/cgroup/a/memory.current", "700\n")
        .file("sys/fs/cgroup/a/memory.stat", "anon 300\ninactive_file 100\nactive_file 300\n");
    assert_eq!(left("1:cpu:/x\n0::/a/b\n"), Some((700, root.join("a/memory.max"))));
    assert_eq!(left("0::/c\n"), None);
    assert_eq!(left(""), None);
    let v1 = |file: &str| format!("sys/fs/cgroup/memory/{file}");
    let stat = "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 200\n";
    fake.file(&v1("a/b/memory.limit_in_bytes"), "9223372036854771712\n")
        .file(&v1("a/memory.limit_in_bytes"), "900\n")
        .file(&v1("a/memory.usage_in_bytes"), "700\n")
        .file(&v1("a/memory.stat"), stat);
    let of_a = Some((500, root.join("memory/a/memory.limit_in_bytes")));
    assert_eq!(left("4:cpu,memory:/a/b\n1:cpu:/x\n0::/\n"), of_a);
    assert_eq!(left("4:memory:/a/b\n0::/a/b\n"), of_a);
    // The host's path of a container that sees its own cgroup as the root.
    fake.file(&v1("memory.limit_in_bytes"), "300\n");
    assert_eq!(left("4:memory:/docker/x\n").unwrap().0, 300);
}

#[test]
fn the_iommu_of_a_device_is_read_from_its_registers_and_reserved_regions() {
    let fake = Machine::new();
    let bdf: Bdf = "0000:00:05.0".parse().unwrap();
    let device = "sys/bus/pci/devices/0000:00:05.0";
    let error = files(&fake).iommu_of(bdf).unwrap_err();
    assert_eq!(error, DeviceIommuError::NoDevice { bdf });
    fake.file(&format!("{device}/vendor"), "0x8086\n");
    let error = files(&fake).iommu_of(bdf).unwrap_err();
    assert_eq!(error, DeviceIommuError::NoIommu { bdf });
    // 39 bits by SAGAW (bit 9), MGAW 38 (bits 16 to 21), 2 MiB (bit 34).
    let cap = format!("{:x}\n", 1_u64 << 9 | 38 << 16 | 1 << 34);
    let regions = "0x00000000000a0000 0x00000000000bffff direct-relaxable\n\
                   0x00000000fee00000 0x00000000feefffff msi\n";
    fake.file("sys/class/iommu/dmar0/intel-iommu/cap", &cap)
        .link(&format!("{device}/iommu"), "sys/class/iommu/dmar0")
        .file(&format!("{device}/iommu_group/reserved_regions"), regions);
    let found = files(&fake).iommu_of(bdf).unwrap();
    assert_eq!(found.assumed, None);
    let iommu = found.iommu;
    assert_eq!((iommu.kind, iommu.address_bits), (Some(IommuModel::Vtd), 39));
    assert_eq!(iommu.page_sizes, 1 << 12 | 1 << 21);
    assert_eq!(iommu.reserved.len(), 1);
    let last = iommu.limits(None).apertures.last().map(|aperture| aperture.last().get());
    assert_eq!(last, Some((1 << 39) - 1));
}

#[test]
fn an_iommu_that_linux_tells_nothing_of_is_assumed_in_words() {
    let bdf: Bdf = "0000:00:05.0".parse().unwrap();
    let of = |name: &str, file: Option<(&str, &str)>| {
        let fake = Machine::new();
        let class = format!("sys/class/iommu/{name}");
        fake.link("sys/bus/pci/devices/0000:00:05.0/iommu", &class);
        if let Some((path, text)) = file {
            fake.file(&format!("{class}/{path}"), text);
        }
        let found = files(&fake).iommu_of(bdf).unwrap();
        (found.iommu.kind, found.iommu.address_bits, found.assumed)
    };
    let features = "amd-iommu/features";
    for (text, bits) in [("58f77ef22294ade:0", 64), ("65a:0", 57), ("25a", 48)] {
        let amd = of("ivhd0", Some((features, text)));
        assert_eq!(amd, (Some(IommuModel::Amd), bits, None), "{text}");
    }
    let kinds = [
        ("smmu3.0x0000000009050000", IommuModel::SmmuV3, None, "`dmesg | grep ias` may say it"),
        ("riscv-iommu@0000:00:01.0", IommuModel::Riscv, None, "`--iommu riscv,bits=N`"),
        // A value that the specification reserves.
        ("ivhd0", IommuModel::Amd, Some((features, "c00")), "the AMD-Vi has, and 48"),
        ("dmar0", IommuModel::Vtd, Some(("intel-iommu/cap", "x")), "the Intel VT-d has, and 48"),
    ];
    for (name, kind, file, part) in kinds {
        let (found, bits, assumed) = of(name, file);
        assert_eq!((found, bits), (Some(kind), 48));
        assert!(assumed.as_ref().is_some_and(|text| text.contains(part)), "{assumed:?}");
    }
}

#[test]
fn bars_and_nodes_of_a_device_and_pools_of_a_machine_are_read() {
    let fake = Machine::new();
    let bdf: Bdf = "0000:00:05.0".parse().unwrap();
    fake.function("0000:00:05.0", "0x010802", "");
    assert_eq!(files(&fake).node_of(bdf), None);
    let bar = 4 * crate::sys::page_size();
    let behind = 0xfe00_0000 + bar;
    let resource = format!(
        "0x00000000fe000000 {:#018x} 0x0000000000140204\n\
         0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
         0x0000000000006000 0x000000000000603f 0x0000000000040101\n\
         {behind:#018x} {:#018x} 0x0000000000040200\n\
         0x0000001000000000 0x00000017ffffffff 0x000000000014220c\n",
        behind - 1,
        behind + 0xff
    );
    let device = "sys/bus/pci/devices/0000:00:05.0";
    fake.file(&format!("{device}/resource"), &resource).file(&format!("{device}/numa_node"), "1");
    assert_eq!(files(&fake).node_of(bdf), Some(1));
    let bars = files(&fake).bars_of(bdf);
    let found: Vec<_> =
        bars.iter().map(|bar| (bar.name.as_str(), bar.user.start().get(), bar.len())).collect();
    // Ports are not mapped, nor are less than a page of registers.
    let expected = [("00:05.0 BAR 0", 0xfe00_0000, bar), ("00:05.0 BAR 4", 1 << 36, 32 << 30)];
    assert_eq!(found, expected);
    assert!(bars.iter().all(|bar| bar.node == Some(1)));
    let pool = |kib: u64| format!("sys/kernel/mm/hugepages/hugepages-{kib}kB");
    for (kib, file, text) in [
        (1 << 20, "nr_hugepages", "2"),
        (1 << 20, "free_hugepages", "1"),
        (2 << 10, "nr_hugepages", "512"),
        (2 << 10, "free_hugepages", "300"),
        (2 << 10, "resv_hugepages", "100"),
        (2 << 10, "nr_overcommit_hugepages", "8"),
    ] {
        fake.file(&format!("{}/{file}", pool(kib)), text);
    }
    let [small, large] = files(&fake).pools()[..] else { panic!("no two pools") };
    assert_eq!((small.page, small.pages, small.free), (2 << 20, 520, 208));
    assert_eq!((large.page, large.pages, large.free), (1 << 30, 2, 1));
}

#[test]
fn each_check_that_is_wrong_has_a_command_and_is_right_when_that_was_followed() {
    let own = format!("proc/{}", std::process::id());
    let fake = Machine::new();
    let thp = "sys/kernel/mm/transparent_hugepage";
    let pool = "sys/devices/system/node/node1/hugepages/hugepages-2048kB";
    fake.remove("sys/class/iommu/dmar0")
        .file(&format!("{thp}/enabled"), "always madvise [never]\n")
        .file(&format!("{thp}/shmem_enabled"), "always within_size advise [never] deny force\n")
        .file(&format!("{pool}/nr_hugepages"), "0\n")
        .file(&format!("{pool}/free_hugepages"), "0\n")
        .file("sys/devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages", "0")
        .file("sys/devices/system/node/node1/hugepages/hugepages-1048576kB/free_hugepages", "0")
        .file("proc/meminfo", "MemAvailable:    16777216 kB\n")
        .file(&format!("{own}/status"), "CapEff:\t0\n")
        .file(&format!("{own}/limits"), LIMITS)
        .file(&format!("{own}/cgroup"), "0::/vm\n")
        .file("sys/fs/cgroup/vm/memory.max", "1073741824\n")
        .file("sys/firmware/acpi/tables/DMAR", "")
        .file("proc/sys/kernel/osrelease", "6.12.3-amd64\n");
    let checks = files(&fake).checks();
    let names: Vec<_> = checks.iter().map(|check| check.name).collect();
    let expected = ["thp", "thp-shmem", "hugetlb", "memlock", "cgroup", "iommu", "vfio", "kernel"];
    assert_eq!(names, expected);
    for check in &checks {
        assert!(!check.is_right && check.change.is_some(), "{check}");
    }
    let text: Vec<String> = checks.iter().map(ToString::to_string).collect();
    let more = "`echo 512 | tee /sys/bus/node/devices/node1/hugepages/*-2048kB/nr_hugepages`";
    for part in ["`echo madvise > /", more, "of node1: 0", "intel_iommu=on", "6.18 or newer"] {
        assert!(text.iter().any(|line| line.contains(part)), "{part}: {text:#?}");
    }
    fake.file(&format!("{thp}/enabled"), "always [madvise] never\n")
        .file(&format!("{thp}/shmem_enabled"), "always within_size [advise] never deny force\n")
        .file(&format!("{pool}/nr_hugepages"), "512\n")
        .file(&format!("{pool}/free_hugepages"), "512\n")
        .file(&format!("{own}/limits"), "Max locked memory unlimited unlimited bytes\n")
        .file("sys/fs/cgroup/vm/memory.max", "max\n")
        .file("sys/class/iommu/dmar0/x", "")
        .file("sys/module/vfio_iommu_type1/parameters/dma_entry_limit", "65535\n")
        .file("proc/sys/kernel/osrelease", "6.18.2-amd64\n");
    for check in files(&fake).checks() {
        assert!(check.is_right && check.change.is_none(), "{check}");
    }
}
