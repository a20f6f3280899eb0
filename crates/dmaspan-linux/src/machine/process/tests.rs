use super::super::MachineFiles;
use super::*;
use crate::pci::fake::Machine;

const SMAPS: &str = "\
7f0000000000-7f0040000000 rw-p 00000000 00:00 0 \n\
Size:            1048576 kB\nKernelPageSize:     PAGE kB\nRss:              524288 kB\n\
AnonHugePages:    262144 kB\nVmFlags: rd wr mr mw me ac sd hg \n\
7f0040000000-7f0050000000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me ac sd \n\
7f1000000000-7f1040000000 rw-s 00000000 00:0f 77                 /dev/hugepages/ram (deleted)\n\
KernelPageSize:     2048 kB\nRss:                   0 kB\nShared_Hugetlb: 1048576 kB\n\
VmFlags: rd wr sh mr mw me ms de ht sd \n\
7f2000000000-7f2000400000 rw-s 00000000 00:01 1024               /memfd:pc.ram (deleted)\n\
7f3000000000-7f3000100000 rw-s 00000000 00:06 125                anon_inode:[vfio-device]\n\
VmFlags: rd wr sh mr mw me ms pf io de dd \n\
7f4000000000-7f4004000000 ---p 00000000 00:00 0 \n\
7f5000000000-7f5004000000 rw-p 00000000 00:00 0                          [heap]\n\
7f5100000000-7f5140000000 rwxp 00000000 00:00 0 \n\
7f6000000000-7f6000001000 r-xp 00000000 08:01 99                 /usr/bin/qemu\nnonsense\n";

fn machine() -> Machine {
    let fake = Machine::new();
    let page = (sys::page_size() >> 10).to_string();
    fake.file("proc/7/smaps", &SMAPS.replace("PAGE", &page));
    fake
}

fn memory(choice: &ProcessChoice) -> ProcessMemory {
    MachineFiles::at(machine().root()).memory_of(7, choice, &mut |_, _| {}).unwrap()
}

#[test]
fn a_guests_memory_is_recognised_and_the_rest_is_listed_with_the_reason() {
    let memory = memory(&ProcessChoice::Large);
    let left_out: Vec<_> = memory.ranges.iter().map(|range| range.left_out).collect();
    let expected = [
        None,
        None,
        None,
        None,
        Some(NotTaken::Registers),
        Some(NotTaken::Access),
        Some(NotTaken::Small),
        Some(NotTaken::Code),
        Some(NotTaken::Access),
    ];
    assert_eq!(left_out, expected);
    let told: Vec<_> = memory
        .regions
        .iter()
        .map(|region| (region.name.as_str(), region.backing, region.pages, region.resident))
        .collect();
    let huge = RegionPages::Partly { size: os::thp_size(), huge: 256 << 20 };
    let page = sys::page_size();
    assert_eq!(
        told,
        [
            ("0x7f0000000000", Backing::Thp, huge, 512 << 20),
            ("0x7f0040000000", Backing::Base, RegionPages::Of(page), 0),
            ("ram", Backing::Hugetlb, RegionPages::Of(2 << 20), 1 << 30),
            ("memfd:pc.ram", Backing::Memfd, RegionPages::Of(page), 0),
        ]
    );
    // What follows without a gap is one memory.
    let numbers: Vec<_> = memory.regions.iter().map(|region| region.memory).collect();
    assert_eq!(numbers[0], numbers[1]);
    assert_ne!(numbers[1], numbers[2]);
}

#[test]
fn ranges_and_names_that_are_asked_for_are_taken_and_nothing_else() {
    let named = memory(&ProcessChoice::Names(vec!["pc.ram".to_owned()]));
    assert_eq!(named.regions.len(), 1);
    let range = |start, len| UserRange::from_len(UserAddr::new(start), len).unwrap();
    // Half of the first range, of which half is in memory; and registers, which cannot be.
    let ranges = vec![range(0x7f00_0000_0000, 512 << 20), range(0x7f30_0000_0000, 4096)];
    let part = memory(&ProcessChoice::Ranges(ranges));
    assert_eq!(part.regions.len(), 1);
    assert_eq!((part.regions[0].len(), part.regions[0].resident), (512 << 20, 256 << 20));
    let reasons = part.ranges.iter().filter_map(|range| range.left_out);
    assert_eq!(reasons.filter(|why| *why == NotTaken::Registers).count(), 1);
}

#[test]
fn memory_is_on_the_node_that_most_of_it_is_on() {
    let machine = machine();
    let numa = "7f0000000000 default anon=131072 N0=1000 N1=130072 kernelpagesize_kB=4\n\
                7f1000000000 bind:0 file=/dev/hugepages/ram huge dirty=512 N0=512\n\
                7f2000000000 default file=/memfd:pc.ram N1=x Nx=4\nnonsense\n";
    machine.file("proc/7/numa_maps", numa);
    let files = MachineFiles::at(machine.root());
    let memory = files.memory_of(7, &ProcessChoice::Large, &mut |_, _| {}).unwrap();
    let nodes: Vec<_> = memory.regions.iter().map(|region| region.node).collect();
    assert_eq!(nodes, [Some(1), None, Some(0), None]);
}

#[test]
fn descriptors_of_vfio_and_iommufd_are_counted() {
    let machine = machine();
    std::fs::create_dir_all(machine.root().join("proc/7/fd")).unwrap();
    let targets = [
        "/dev/vfio/vfio",
        "/dev/vfio/12",
        "anon_inode:[vfio-device]",
        "/dev/iommu",
        "/dev/vfio/devices/vfio0",
        "/dev/null",
    ];
    for (number, target) in targets.iter().enumerate() {
        let link = machine.root().join(format!("proc/7/fd/{number}"));
        std::os::unix::fs::symlink(target, link).unwrap();
    }
    let files = MachineFiles::at(machine.root()).device_files_of(7).unwrap();
    let expected = DeviceFiles {
        containers: 1,
        iommufds: 1,
        devices: 2,
        groups: vec![12],
        functions: Vec::new(),
    };
    assert_eq!(files, expected);
    // Which functions they are: since Linux 6.18, and by the name of the node.
    let path = "pos:\t0\nvfio-device-syspath: /sys/devices/pci0000:00/0000:00:05.0\n";
    machine.file("proc/7/fdinfo/2", path);
    let home = "sys/devices/pci0000:00/0000:00:06.0";
    machine.link("sys/class/vfio-dev/vfio0/device", home);
    let files = MachineFiles::at(machine.root()).device_files_of(7).unwrap();
    let found: Vec<String> = files.functions.iter().map(ToString::to_string).collect();
    assert_eq!(found, ["0000:00:05.0", "0000:00:06.0"]);
}

#[test]
fn a_process_that_is_gone_is_an_error_that_says_so() {
    let files = MachineFiles::new();
    let error = files.memory_of(u32::MAX, &ProcessChoice::Large, &mut |_, _| {}).unwrap_err();
    assert_eq!(error, ProcessError::Gone { pid: u32::MAX, inside: Vec::new() });
    assert!(error.to_string().contains("has ended, or it is in a container"));
}
