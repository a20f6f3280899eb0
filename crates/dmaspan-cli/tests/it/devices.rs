//! `dmaspan devices` over machines made of files.

use std::process::{Command, Output};

use serde_json::{Value, json};

use crate::fake::Machine;

const NVME: &str = "0000:00:05.0";
const ETHERNET: &str = "0000:00:06.0";
const BRIDGE: &str = "0000:00:1c.0";

/// A machine with a bridge, an NVMe controller alone in group 3, and two functions in group 4.
fn machine() -> Machine {
    let machine = Machine::new();
    machine
        .function(BRIDGE, "0x060400", "pcieport")
        .function(NVME, "0x010802", "nvme")
        .function(ETHERNET, "0x020000", "e1000e")
        .function("0000:00:06.1", "0x0c0330", "xhci_hcd")
        .group(3, &[NVME])
        .group(4, &[ETHERNET, "0000:00:06.1"])
        .vfio();
    machine
}

fn run(machine: &Machine, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dmaspan"));
    command.args(["devices", "--root"]).arg(machine.root()).args(args);
    command.output().unwrap()
}

fn text(machine: &Machine, args: &[&str]) -> String {
    let output = run(machine, args);
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn device(machine: &Machine, bdf: &str) -> Value {
    let text = text(machine, &[bdf, "--format", "json"]);
    let report: Value = serde_json::from_str(&text).unwrap();
    report["devices"][0].clone()
}

#[test]
fn the_list_has_endpoints_by_group_and_with_all_the_bridges() {
    let machine = machine();
    let list = text(&machine, &[]);
    let rows = [" 3 ", "  └", " 4 "].map(|group| list.lines().any(|row| row.starts_with(group)));
    assert_eq!(rows, [true; 3], "{list}");
    assert!(list.contains("3 PCI functions, 0 usable by this process; the IOMMU is active"));
    assert!(!list.contains("PCI bridge"), "{list}");
    assert!(text(&machine, &["--all"]).contains("PCI bridge"));
}

#[test]
fn no_line_but_a_command_is_wider_than_80_columns() {
    let machine = machine();
    for args in [&[][..], &["--all"], &[NVME], &[ETHERNET]] {
        let text = text(&machine, args);
        let is_command =
            |line: &&str| ["    echo ", "    test "].iter().any(|it| line.starts_with(it));
        for line in text.lines().filter(|line| !is_command(line)) {
            assert!(line.chars().count() <= 80 && line == line.trim_end(), "{line:?}");
        }
    }
}

#[test]
fn a_function_that_is_not_bound_comes_with_the_commands_both_ways() {
    let text = text(&machine(), &[NVME]);
    let to_use = "  to use it by type1, as root:\n    \
        echo vfio-pci > /sys/bus/pci/devices/0000:00:05.0/driver_override\n    \
        echo 0000:00:05.0 > /sys/bus/pci/devices/0000:00:05.0/driver/unbind\n    \
        echo 0000:00:05.0 > /sys/bus/pci/drivers_probe\n";
    let back = "  to give it back to its driver, as root:\n    \
        echo > /sys/bus/pci/devices/0000:00:05.0/driver_override\n";
    assert!(text.contains(to_use) && text.contains(back), "{text}");
    assert!(text.contains("✗ type1: 0000:00:05.0 is bound to nvme, not to vfio-pci"), "{text}");
}

#[test]
fn commands_that_give_back_go_on_where_there_is_no_driver() {
    let machine = Machine::new();
    machine.function(NVME, "0x010802", "").group(3, &[NVME]).vfio();
    let own = |line: &Value| line.as_str().unwrap().replace("/sys", "./sys");
    let lines: Vec<String> =
        device(&machine, NVME)["give_back"].as_array().unwrap().iter().map(own).collect();
    // The files that the kernel has there.
    machine.file("sys/bus/pci/drivers_probe", "");
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", &lines.join("\n")]).current_dir(machine.root());
    let output = shell.output().unwrap();
    assert!(output.status.success(), "{lines:?}: {output:?}");
    let probed = std::fs::read_to_string(machine.root().join("sys/bus/pci/drivers_probe"));
    assert_eq!(probed.unwrap(), format!("{NVME}\n"));
}

#[test]
fn what_no_command_changes_is_the_only_thing_that_is_said() {
    let machine = machine();
    machine.file("proc/sys/kernel/osrelease", "6.1.0-50-cloud-amd64\n");
    let text = text(&machine, &[NVME]);
    assert!(text.contains("✗ iommufd: /dev/iommu does not exist: this kernel is older"), "{text}");
    assert!(text.contains("# start a kernel from 6.6 on"), "{text}");
    assert!(!text.contains("modprobe iommufd"), "{text}");
    assert_eq!(text.matches("✗ iommufd:").count(), 1, "{text}");
    let reasons = &device(&machine, NVME)["iommufd"]["reasons"];
    let names: Vec<&Value> = reasons.as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names, ["no-iommufd", "not-bound"]);
}

#[test]
fn a_bound_function_is_usable() {
    let machine = machine();
    machine.bound(NVME, 3).cdev(NVME, "vfio0");
    let text = text(&machine, &[NVME]);
    assert!(text.contains("✓ usable by type1 and iommufd"), "{text}");
    assert!(text.contains("✓ type1, iommufd\n"), "{text}");
    assert!(!text.contains("to use it"), "{text}");
}

#[test]
fn the_json_says_everything_by_names_that_scripts_use() {
    let machine = machine();
    machine.bound(NVME, 3).cdev(NVME, "vfio0");
    let usable = json!({"usable": true, "reasons": [], "commands": []});
    let text = "an IOMMU translates the accesses of 0000:00:05.0, which VFIO gives to nobody \
        without it: use it by iommufd";
    let translated = json!({
        "usable": false, "reasons": [{"name": "translated", "text": text, "final": true}],
        "commands": ["# use it by iommufd"],
    });
    let expected = json!({
        "bdf": NVME, "vendor": "1b36", "device": "0010", "class": "010802",
        "class_name": "NVMe controller", "driver": "vfio-pci", "driver_override": null,
        "kind": "physical", "present": true, "bridge": false, "numa_node": null,
        "bars": [{"index": 0, "bytes": 16384, "space": "memory"}],
        "group": {
            "number": 3, "type": "DMA-FQ", "noiommu": false,
            "members": [{"bdf": NVME, "driver": "vfio-pci", "blocks": false}],
        },
        "group_node": "/dev/vfio/3", "cdev_node": "/dev/vfio/devices/vfio0", "uses": [],
        "type1": usable, "iommufd": usable, "noiommu": translated,
        "give_back": [
            "echo > /sys/bus/pci/devices/0000:00:05.0/driver_override",
            "test ! -e /sys/bus/pci/devices/0000:00:05.0/driver || \
             echo 0000:00:05.0 > /sys/bus/pci/devices/0000:00:05.0/driver/unbind",
            "echo 0000:00:05.0 > /sys/bus/pci/drivers_probe",
        ],
    });
    assert_eq!(device(&machine, NVME), expected);
    let type1 = &device(&machine, ETHERNET)["type1"];
    assert_eq!(type1["usable"], false);
    let names: Vec<&Value> =
        type1["reasons"].as_array().unwrap().iter().map(|reason| &reason["name"]).collect();
    assert_eq!(names, ["not-bound", "group-not-viable"]);
    assert_eq!(type1["reasons"][0]["final"], false);
}

#[test]
fn a_function_without_an_iommu_is_usable_where_the_kernel_takes_it() {
    let machine = Machine::new();
    machine.remove("sys/class/iommu/dmar0").function(NVME, "0x010802", "nvme").vfio();
    machine.file("proc/sys/kernel/osrelease", "7.2.13\n").file("proc/cpuinfo", "hypervisor");
    let older = text(&machine, &[NVME]);
    assert!(!older.contains("noiommu"), "{older}");
    machine.file("proc/sys/kernel/osrelease", "7.3.4\n").node("dev/iommu", 0o660);
    let newer = text(&machine, &[NVME]);
    let on = "echo Y > /sys/module/vfio/parameters/enable_unsafe_noiommu_mode";
    assert!(newer.contains("✗ noiommu: VFIO's mode without IOMMU is off"), "{newer}");
    assert!(newer.contains(on) && newer.contains("echo vfio-pci > "), "{newer}");
    machine.file("sys/module/vfio/parameters/enable_unsafe_noiommu_mode", "Y\n");
    machine.driver(NVME, "vfio-pci").cdev(NVME, "noiommu-vfio0");
    let usable = text(&machine, &[NVME]);
    assert!(usable.contains("✓ usable by noiommu") && usable.contains("✓ noiommu"), "{usable}");
    let noiommu = &device(&machine, NVME)["noiommu"];
    assert_eq!(*noiommu, json!({"usable": true, "reasons": [], "commands": []}));
    assert_eq!(device(&machine, NVME)["cdev_node"], "/dev/vfio/devices/noiommu-vfio0");
}

#[test]
fn what_is_wrong_with_the_machine_is_said_once() {
    let machine = machine();
    machine.remove("sys/class/iommu/dmar0").file("sys/firmware/acpi/tables/DMAR", "");
    machine.file("proc/sys/kernel/osrelease", "7.2.13\n");
    let text = text(&machine, &["--all"]);
    assert_eq!(text.matches("add intel_iommu=on").count(), 1, "{text}");
    assert_eq!(text.matches("✗ no IOMMU").count(), 3, "{text}");
}

#[test]
fn in_a_container_the_use_of_disks_is_unknown_in_text_and_json_and_nothing_is_unbound() {
    let machine = machine();
    let mounts = "50 27 0:40 / / rw - overlay overlay rw\n";
    machine.disk(NVME, "nvme0n1", mounts).namespace("proc/self/ns/mnt", "mnt:[4026532999]");
    for bdf in [NVME, ETHERNET] {
        let text = text(&machine, &[bdf]);
        let words = text.split_whitespace().filter(|word| *word != "#");
        let flat = words.collect::<Vec<_>>().join(" ");
        assert!(flat.contains("use: the use of") && flat.contains("is unknown: "), "{text}");
        assert!(flat.contains(&format!("{bdf}` on the host")), "{text}");
        assert!(!text.contains("unbind") && !text.contains("drivers_probe"), "{text}");
        let device = device(&machine, bdf);
        assert!(device["uses"][0].as_str().unwrap().contains("is unknown: "), "{device}");
        assert_eq!(device["type1"]["reasons"][0]["final"], true);
        assert!(!device.to_string().contains("unbind"), "{device}");
    }
}

#[test]
fn a_limit_of_locked_memory_is_a_note() {
    let machine = machine().user(54321, 0);
    let text = text(&machine, &[]);
    assert!(text.contains("note: this process may map 64 KiB at a time"), "{text}");
}

#[test]
fn a_machine_without_pci_or_the_function_is_an_error_of_one_line() {
    let machine = machine();
    let error = |args: &[&str], code| {
        let output = run(&machine, args);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(output.stdout.is_empty());
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.starts_with("error: ") && error.lines().count() == 1, "{error}");
        error
    };
    assert!(error(&["00:09.0"], 1).contains("no PCI function 0000:00:09.0"));
    assert!(error(&["9"], 2).contains("`dmaspan devices --help` says more"));
    machine.remove("sys/bus");
    assert!(error(&[], 1).contains("no PCI, or sysfs is not mounted"));
}
