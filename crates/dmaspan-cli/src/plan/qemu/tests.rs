use dmaspan_linux::plan::forecast::Forecast;

use super::*;

fn regions(text: &str) -> Vec<(u64, u64, Backing)> {
    let layout = parse(text).unwrap().source.layout;
    let place = |region: &PaperRegion| (region.iova.unwrap().get(), region.len(), region.backing);
    layout.regions.iter().map(place).collect()
}

#[test]
fn memory_is_where_each_machine_has_it() {
    let thp = Backing::Thp;
    let qemu = "qemu-system-x86_64";
    let split = |low, high| vec![(0, low, thp), (4 * GIB, high, thp)];
    assert_eq!(regions(&format!("{qemu} -M q35 -m 8G")), split(2 * GIB, 6 * GIB));
    assert_eq!(regions(&format!("{qemu} -m 8192")), split(3 * GIB, 5 * GIB));
    assert_eq!(regions(&format!("{qemu} -machine pc-q35-8.2 -m 2816")), split(2 * GIB, 3 << 28));
    assert_eq!(regions(&format!("{qemu} -M q35 -m 2815")), [(0, 2815 << 20, thp)]);
    let less = format!("{qemu} -M q35,max-ram-below-4g=1G -m 8G");
    assert_eq!(regions(&less), split(GIB, 7 * GIB));
    assert_eq!(regions("qemu-system-aarch64 -M virt -m 4G"), [(GIB, 4 * GIB, thp)]);
    assert_eq!(regions("qemu-system-riscv64 -M virt -m 4G"), [(2 * GIB, 4 * GIB, thp)]);
    assert_eq!(regions(qemu), [(0, 128 << 20, thp)]);
}

#[test]
fn memory_objects_of_nodes_are_cut_where_the_machine_cuts() {
    let text = "qemu-system-x86_64 -machine type=q35 -m 6G \
        -object memory-backend-memfd,id=b,size=3G,hugetlb=on,hugetlbsize=1G \
        -object 'memory-backend-file,id=a,size=3G,mem-path=/dev/hugepages' \
        -numa node,nodeid=1,memdev=b -numa node,nodeid=0,memdev=a";
    let huge = Backing::Hugetlb;
    let expected = [(0, 2 * GIB, huge), (4 * GIB, GIB, huge), (5 * GIB, 3 * GIB, huge)];
    assert_eq!(regions(text), expected);
    let CommandLineSource { source, .. } = parse(text).unwrap();
    assert_eq!(source.layout.regions[2].pages, RegionPages::Of(GIB));
    assert_eq!(Forecast::new(&source.layout).unwrap().maps.len(), 3);
}

#[test]
fn devices_iommus_and_interfaces_are_counted_and_all_else_is_listed_as_ignored() {
    let text = "/bin/qemu-system-x86_64 -nodefaults -enable-kvm -cpu host \\\n -M q35 -m 4G \
        -device intel-iommu,aw-bits=48 -object iommufd,id=i \
        -device vfio-pci,host=01:00.0,iommufd=i -device \"vfio-pci,host=02:00.0\" \
        -device virtio-net-pci -drive file=a.img disk.img";
    let CommandLineSource { source, functions, .. } = parse(text).unwrap();
    let Source { layout, notes, .. } = source;
    let functions: Vec<String> = functions.iter().map(Bdf::to_string).collect();
    assert_eq!(functions, ["0000:01:00.0", "0000:02:00.0"]);
    assert_eq!((layout.devices, layout.has_viommu), (2, true));
    assert_eq!(layout.limits.locked_by, LockedBy::User);
    let ignored = notes.last().unwrap();
    for option in ["-nodefaults", "-enable-kvm", "-cpu host", "-device virtio-net-pci", "disk.img"]
    {
        assert!(ignored.contains(&format!("`{option}`")), "{ignored}");
    }
    let nul = text.replace("\\\n", " ").replace('"', "");
    let nul = nul.split_whitespace().collect::<Vec<_>>().join("\0");
    assert_eq!(parse(&nul).unwrap().source.layout.devices, 2);
}

#[test]
fn a_command_line_as_libvirt_writes_it_is_read_with_its_objects_of_json() {
    let text = r#"LC_ALL=C \
PATH=/usr/bin:/bin \
HOME=/var/lib/libvirt/qemu/domain-1-vm \
/usr/bin/qemu-system-x86_64 \
-name guest=vm,debug-threads=on \
-S \
-object '{"qom-type":"secret","id":"masterKey0","format":"raw","file":"/var/lib/key.aes"}' \
-machine pc-q35-9.2,usb=off,smm=on,dump-guest-core=off,memory-backend=pc.ram,acpi=on \
-accel kvm \
-cpu host,migratable=on \
-m size=8388608k \
-object '{"qom-type":"memory-backend-memfd","id":"pc.ram","hugetlb":true,
"hugetlbsize":1073741824,"share":true,
"size":8589934592,"host-nodes":[1],"policy":"bind"}' \
-overcommit mem-lock=off \
-smp 4,sockets=4,cores=1,threads=1 \
-object '{"qom-type":"iommufd","id":"iommufd0"}' \
-device '{"driver":"intel-iommu","id":"iommu0","intremap":"on"}' \
-device '{"driver":"vfio-pci","host":"0000:01:00.0","id":"hostdev0","iommufd":"iommufd0"}' \
-device '{"driver":"virtio-net-pci","netdev":"hostnet0","id":"net0"}' \
-msg timestamp=on"#;
    let CommandLineSource { source: Source { layout, notes, .. }, functions, .. } =
        parse(text).unwrap();
    let huge = Backing::Hugetlb;
    assert_eq!(regions(text), [(0, 2 * GIB, huge), (4 * GIB, 6 * GIB, huge)]);
    assert_eq!(layout.regions[0].pages, RegionPages::Of(GIB));
    assert_eq!(layout.regions[0].node, Some(1));
    assert_eq!((functions[0].to_string().as_str(), layout.devices), ("0000:01:00.0", 1));
    assert_eq!((layout.has_viommu, layout.limits.locked_by), (true, LockedBy::User));
    let ignored = notes.last().unwrap();
    for option in ["HOME=/var/lib/libvirt/qemu/domain-1-vm", "-S", "-accel kvm"] {
        assert!(ignored.contains(&format!("`{option}`")), "{ignored}");
    }
    assert!(ignored.contains("masterKey0") && !ignored.contains("iommufd"), "{ignored}");
}

#[test]
fn what_starts_qemu_stands_before_it_and_does_not_hide_its_name() {
    let arm = [(GIB, 4 * GIB, Backing::Thp)];
    for before in ["sudo -E", "numactl --membind=0", "taskset -c 0-3 nice -n 5", "A=b"] {
        let text = format!("{before} /opt/.qemu-system-aarch64-wrapped -M virt -m 4G");
        assert_eq!(regions(&text), arm);
    }
    let proxmox = "/usr/bin/kvm -id 100 -m 4096 -machine type=q35+pve0,hpet=off";
    assert_eq!(regions(proxmox)[1].0, 4 * GIB);
    // No program at all: what `-accel` has is none.
    assert_eq!(regions("-m 4G -accel kvm -M q35")[0].1, 2 * GIB);
}

#[test]
fn commas_that_are_doubled_are_of_a_value_and_a_name_alone_switches_on() {
    let text = "qemu -M pc,memory-backend=a -m 1G -object \
                memory-backend-file,id=a,size=0x40000000,mem-path=/mnt/a,,huge,,b";
    assert_eq!(regions(text), [(0, GIB, Backing::Hugetlb)]);
    let text = "qemu -M pc,memory-backend=a -m slots=2,maxmem=4G -m 1G -object \
                memory-backend-memfd,id=a,size=1G,hugetlb,host-nodes.0=2";
    assert_eq!(regions(text), [(0, GIB, Backing::Hugetlb)]);
    assert_eq!(parse(text).unwrap().source.layout.regions[0].node, Some(2));
}

#[test]
fn memory_of_devices_lies_behind_all_other_or_where_it_says() {
    let text = "qemu-system-x86_64 -M q35 -m 3G,slots=4,maxmem=64G \
        -object memory-backend-ram,id=d0,size=1G \
        -object memory-backend-memfd,id=d1,size=2G,hugetlb=on,hugetlbsize=1G \
        -object memory-backend-ram,id=d2,size=1G \
        -object memory-backend-memfd,id=v0,size=8G -device pc-dimm,memdev=d0 \
        -device nvdimm,memdev=d1 -device pc-dimm,memdev=d2,addr=0x400000000 \
        -device virtio-mem-pci,memdev=v0,requested-size=4G,memaddr=32G";
    let devices = [
        (5 * GIB, GIB, Backing::Thp),
        (6 * GIB, 2 * GIB, Backing::Hugetlb),
        (16 * GIB, GIB, Backing::Thp),
        (32 * GIB, 4 * GIB, Backing::Memfd),
    ];
    assert_eq!(regions(text)[2..], devices);
    let Source { layout, notes, .. } = parse(text).unwrap().source;
    assert_eq!(Forecast::new(&layout).unwrap().maps.len(), 6);
    assert!(notes.iter().any(|note| note.contains("of v0 4 GiB are planned")), "{notes:?}");
    let arm = "qemu-system-aarch64 -M virt -m 512M,slots=1,maxmem=2G \
        -object memory-backend-ram,id=d0,size=1G -device pc-dimm,memdev=d0";
    assert_eq!(regions(arm)[1], (2 * GIB, GIB, Backing::Thp));
    let none = "qemu -m 1G -object memory-backend-ram,id=v,size=4G \
        -device virtio-mem-pci,memdev=v";
    assert_eq!(regions(none).len(), 1);
}

#[test]
fn a_wrong_command_line_names_the_option() {
    for (text, part) in [
        ("qemu -m lots", "-m lots: `lots` is no size"),
        ("qemu -m 99999999999999999999", "is no size"),
        ("qemu -m 16384P", "is no size"),
        ("qemu -m 0", "no machine has 0x0 bytes"),
        ("qemu -m 18446744073709551615", "is no size"),
        ("qemu -M sun4m -m 4G", "a machine `sun4m` is, is not known"),
        ("qemu -m 4G -object memory-backend-ram,id=a", "it has no size"),
        ("qemu -m 4G -object memory-backend-ram,size=4G", "it has no id"),
        (
            "qemu -M q35,memory-backend=a -m 4G -object memory-backend-epc,id=a,size=4G",
            "no `-object memory-backend-…,id=a`",
        ),
        (
            "qemu -m 4G -object '{\"qom-type\":\"memory-backend-ram\",\"id\":\"a\"}'",
            "it has no size",
        ),
        ("qemu -m 4G -object '{\"qom-type\":' -S", "it is no object of JSON"),
        ("qemu -m 4G -device pc-dimm,id=d", "-device pc-dimm,id=d: it has no memdev"),
        ("qemu -m 4G -device pc-dimm,memdev=d", "no `-object memory-backend-…,id=d`"),
        (
            "qemu -m 4G -object memory-backend-ram,id=d,size=1G \
             -device virtio-mem-pci,memdev=d,requested-size=2G",
            "has no more than 1 GiB",
        ),
        (
            "qemu -m 4G -object memory-backend-ram,id=d,size=1G \
             -device pc-dimm,memdev=d,addr=0xfffffffff0000000",
            "ends behind all addresses",
        ),
        ("qemu -M q35,memory-backend=x -m 4G", "no `-object memory-backend-…,id=x`"),
        (
            "qemu -M q35,memory-backend=x -m 4G -object memory-backend-ram,id=x,size=2G",
            "4 GiB are asked for and the memory objects have 2 GiB",
        ),
        (
            "qemu -m 3M -object memory-backend-memfd,id=a,size=3M,hugetlb=on",
            "not whole pages of 2 MiB",
        ),
        ("qemu -numa node,nodeid=x,memdev=a", "`x` is no number of a node"),
        ("qemu -name 'open", "within a quote (')"),
    ] {
        let error = parse(text).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(part), "{text}: {error}");
        assert!(!error.contains('\n'));
    }
    // Nothing at all is a machine of the usual size.
    assert_eq!(parse("").unwrap().source.layout.regions.len(), 1);
}
