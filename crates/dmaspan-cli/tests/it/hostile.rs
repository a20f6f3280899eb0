//! Nothing that a program has read from others is a command for the terminal that shows it.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use crate::fake::Machine;

const DMASPAN: &str = env!("CARGO_BIN_EXE_dmaspan");

/// A title and a clearing of the screen, a colour by one character, a backspace, other directions.
const NAME: &str =
    "EVIL\u{1b}]0;PWNED\u{7}\u{1b}[2J\u{9b}31m\u{7f}\u{8}\u{202e}\u{2066}\u{200f}\u{61c}✓";

const FORMATS: [&str; 4] = ["table", "json", "html", "prometheus"];

/// A folder that goes away.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("dmaspan-{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, content: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn is_command(sign: char) -> bool {
    let directions = ['\u{61c}', '\u{200e}', '\u{200f}', '\u{2028}', '\u{2029}'];
    sign.is_control() && sign != '\n'
        || directions.contains(&sign)
        || ('\u{202a}'..='\u{202e}').contains(&sign)
        || ('\u{2066}'..='\u{2069}').contains(&sign)
}

fn run(args: &[&str]) -> Output {
    Command::new(DMASPAN).args(args).output().unwrap()
}

/// That text which the program wrote commands nothing.
fn assert_clean(bytes: &[u8], args: &[&str]) {
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    let found = text.chars().find(|sign| is_command(*sign));
    assert!(found.is_none(), "{found:?} of {args:?}: {text}");
}

/// That a report in each form commands nothing, printed and in a file, and that JSON has the name
/// as it is.
fn assert_reports_are_clean(args: &[&str], folder: &Folder, json_has: &str) {
    for format in FORMATS {
        let args = [args, &["--format", format]].concat();
        let printed = run(&args);
        assert_clean(&printed.stderr, &args);
        assert_clean(&printed.stdout, &args);
        let text = String::from_utf8(printed.stdout).unwrap();
        assert!(format == "prometheus" || text.contains("EVIL"), "{args:?}: {text}");
        if format == "json" {
            let value: Value = serde_json::from_str(&text).unwrap();
            let unescaped = value.to_string();
            let name = serde_json::to_string(json_has).unwrap();
            assert!(unescaped.contains(name.trim_matches('"')), "{unescaped}");
        }
        let file = folder.file("report", "");
        let output = run(&[&args[..], &["--output", &file]].concat());
        assert!(output.stdout.is_empty(), "{output:?}");
        assert_clean(&fs::read(&file).unwrap(), &args);
    }
}

#[test]
fn dumps_command_nothing_in_any_form() {
    let folder = Folder::new("hostile-dumps");
    let lines = format!(
        "tree title={NAME} first=0x0 last=0xffff\ntable at=0x1000 level=0\n\
         leaf first=0x0 last=0xfff size=0x1000 paddr=0x1000 prot=READ|WRITE\n"
    );
    let debugfs = format!(
        "Device {NAME} @0x646a000\nIOVA_PFN PML5E PML4E PDPE PDE PTE\n0x0000000010000 |\t\
         0x0000000000000000\t0x000000000647a403\t0x000000000647e403\t0x000000000647f403\t\
         0x00000000031f1003\n"
    );
    for (kind, text) in [("lines", lines), ("debugfs", debugfs)] {
        // The name of the file is anybody's, too.
        let file = folder.file(&format!("{kind}{NAME}"), &text);
        let other = folder.file("other", &text);
        for more in [&[][..], &["--diff", &other], &["--iova", "0x10000000", "--phys", "0x1000"]] {
            let args = [&["inspect", &file, "--kind", kind], more].concat();
            assert_reports_are_clean(&args, &folder, NAME);
        }
    }
    for wrong in [
        format!("tree title=x first={NAME} last=0xff\n"),
        format!(
            "tree title=x first=0x0 last=0xff\n\
             leaf first=0x0 last=0xfff prot={NAME} size=4096 paddr=0\n"
        ),
        format!("Device a {NAME}\n"),
    ] {
        let kind = if wrong.starts_with("tree") { "lines" } else { "debugfs" };
        let file = folder.file("wrong", &wrong);
        let output = run(&["inspect", &file, "--kind", kind]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert_clean(&output.stderr, &[&wrong]);
        assert_eq!(output.stderr.iter().filter(|byte| **byte == b'\n').count(), 1);
    }
}

#[test]
fn layouts_and_command_lines_command_nothing_in_any_form() {
    let folder = Folder::new("hostile-layouts");
    let layout = "[[region]]\nname = \"ram\"\nsize = \"1G\"\n[iommu]\nkind = \"vtd\"\n";
    let file = folder.file(&format!("a{NAME}"), layout);
    assert_reports_are_clean(&["plan", "--layout", &file], &folder, NAME);
    let line = format!(
        "qemu-system-x86_64 -m 1G -M pc,memory-backend={NAME} -name {NAME} \
         -object memory-backend-ram,id={NAME},size=1G -device vfio-pci,host=00:05.0 -{NAME} {NAME}"
    );
    let file = folder.file("cmdline", &line);
    let args = ["plan", "--qemu-cmdline", &file, "--iommu", "vtd"];
    assert_reports_are_clean(&args, &folder, NAME);
    for wrong in [
        format!("[[region]]\nname = \"{}\"\nsize = 1\n", NAME.replace(is_command, "\\u001b")),
        format!("# {NAME}\n[[region]]\nsize = \"{}\"\n", "\\u001b[31m\\u202e"),
        format!("[[region]]\n{NAME} = 1\n"),
        "[[region]]\n\"\\u001b[31m\\u202e\" = 1\n".to_owned(),
        "[iommu]\nkind = \"\\u001b[31m\\u009b\\u202e\"\n".to_owned(),
    ] {
        let file = folder.file("wrong", &wrong);
        let output = run(&["plan", "--layout", &file]);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert_clean(&output.stderr, &[&wrong]);
        assert_eq!(output.stderr.iter().filter(|byte| **byte == b'\n').count(), 1, "{output:?}");
    }
}

#[test]
fn arguments_command_nothing() {
    for args in [
        &[NAME][..],
        &["map", NAME],
        &["map", "--memory", NAME],
        &["plan", "--layout", NAME],
        &["plan", "--pid", NAME],
        &["inspect", NAME],
        &["inspect", "x", "--root", NAME],
        &["devices", NAME],
        &["doctor", "--format", NAME],
    ] {
        let output = run(args);
        assert!(!output.status.success(), "{output:?}");
        assert_clean(&output.stderr, args);
        assert_clean(&output.stdout, args);
        assert!(output.stderr.starts_with(b"error: "), "{output:?}");
    }
}

/// A process that goes with this.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn processes_command_nothing_in_any_form() {
    let folder = Folder::new("hostile-process");
    // The program's own data is of a file of that name, and may be written.
    let program = folder.0.join(NAME);
    fs::copy("/bin/sleep", &program).unwrap();
    let other = Other(Command::new(&program).arg("60").stdout(Stdio::null()).spawn().unwrap());
    let pid = other.0.id().to_string();
    let is_there =
        |maps: &str| maps.lines().any(|line| line.contains("rw-p") && line.contains("EVIL"));
    while !is_there(&fs::read_to_string(format!("/proc/{pid}/maps")).unwrap()) {
        std::thread::yield_now();
    }
    let args = ["plan", "--pid", &pid, "--name", "EVIL", "--iommu", "vtd"];
    assert_reports_are_clean(&args, &folder, "EVIL?]0;PWNED??[2J");
}

#[test]
fn files_of_the_machine_command_nothing() {
    let machine = Machine::new();
    let nvme = "0000:00:05.0";
    machine.function(nvme, "0x010802", NAME).group(3, &[nvme]).vfio();
    let mounts = format!("36 35 259:1 / /data{NAME} rw - ext4 /dev/nvme0n1p1 rw\n");
    machine.disk(nvme, "nvme0n1", &mounts).file("sys/kernel/iommu_groups/3/type", NAME);
    machine.file("sys/kernel/mm/transparent_hugepage/enabled", &format!("[{NAME}]"));
    machine.file("proc/sys/kernel/osrelease", NAME);
    let root = machine.root().to_str().unwrap();
    for args in [&["devices", nvme][..], &["doctor"]] {
        for format in ["table", "json"] {
            let args = [args, &["--root", root, "--format", format]].concat();
            let output = run(&args);
            assert_clean(&output.stdout, &args);
            assert_clean(&output.stderr, &args);
            assert!(String::from_utf8(output.stdout).unwrap().contains("EVIL"), "{args:?}");
        }
    }
}
