//! `cargo xtask kernel`: the operating system in `examples/kernel`, on QEMU's machines.
//!
//! Each machine is booted as it is, with every fault that the kernel can plant, and with firmware
//! that does not say what it should. Of the first boot the disks and answers to echoes are compared
//! here with what they should be; of all others the line is expected by which the kernel says what
//! is wrong.

mod boot;
mod echo;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::debian::{cannot_write, output_of};
use crate::parts::Parts;
use crate::{Checked, Outcome, hw};
use boot::Boot;

/// The kernel's folder and manifest.
pub(crate) const FOLDER: &str = "examples/kernel";
pub(crate) const MANIFEST: &str = "examples/kernel/Cargo.toml";
/// The bytes of each disk.
const DISK_BYTES: usize = 16 << 20;

/// A machine of QEMU's.
struct Machine {
    /// As the command line names it.
    name: &'static str,
    /// What Rust calls its CPU.
    triple: &'static str,
    /// What QEMU calls it.
    cpu: &'static str,
    /// The options of the machine with its IOMMU, and those without one.
    with: &'static str,
    without: &'static str,
    /// What it says besides, and faults that it can plant besides.
    says: &'static [&'static str],
    planted: &'static [Planted],
}

/// A fault that the kernel's command line plants, what it is, and what the kernel has to say.
type Planted = (&'static str, &'static str, &'static str);

const MACHINES: [Machine; 6] = [
    Machine {
        name: "aarch64",
        with: "-M virt,iommu=smmuv3 -cpu cortex-a72",
        without: "-M virt -cpu cortex-a72",
        ..ARM
    },
    // The kernel runs in EL2, and a guest in EL1.
    Machine {
        name: "aarch64-el2",
        with: "-M virt,iommu=smmuv3,virtualization=on -cpu cortex-a76 \
               -device edu,addr=8,dma_mask=0xffffffff",
        without: "-M virt,virtualization=on -cpu cortex-a76",
        says: &[
            "guest: its CPU translates 16 pages and registers as the table does",
            "guest: its edu copied a page at the guest's addresses, as the guest told it",
            "fault: guest: the CPU was refused to read 0x8000",
            "fault: guest: the CPU was refused to write 0x8000",
            "fault: guest's edu: stream",
            "guest's edu: was refused to write to a page of the kernel",
            "guest's edu: was refused to write to a page that was unmapped",
            "guest: its memory is the kernel's again",
        ],
        planted: &[
            (
                "plant=guest-cpus",
                "an unmap for a guest that CPUs are not told of",
                "FAIL: the guest reached a page that was unmapped: Done",
            ),
            (
                "plant=guest-device",
                "an unmap for a guest that the IOMMU is not told of",
                "FAIL: guest's edu wrote to a page that was unmapped",
            ),
        ],
        ..ARM
    },
    Machine { name: "riscv64", with: "-M virt,iommu-sys=on -bios none", ..RISCV },
    Machine {
        name: "riscv64-pci",
        with: "-M virt -bios none -device riscv-iommu-pci,addr=1",
        ..RISCV
    },
    Machine { name: "x86_64-vtd", with: "-M q35 -device intel-iommu,intremap=off", ..PC },
    Machine {
        name: "x86_64-amd",
        with: "-M q35 -device amd-iommu,dma-remap=on,intremap=off",
        ..PC
    },
];

const ARM: Machine = Machine {
    name: "",
    triple: "aarch64-unknown-none",
    cpu: "aarch64",
    with: "",
    without: "",
    says: &[],
    planted: &[],
};

const RISCV: Machine = Machine {
    triple: "riscv64gc-unknown-none-elf",
    cpu: "riscv64",
    without: "-M virt -bios none",
    ..ARM
};

const PC: Machine =
    Machine { triple: "x86_64-unknown-none", cpu: "x86_64", without: "-M q35", ..ARM };

const NAMES: [&str; MACHINES.len()] = {
    let mut names = [""; MACHINES.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = MACHINES[at].name;
        at += 1;
    }
    names
};

/// What a boot has to print, as the beginnings of lines, one of which is the last line.
const REFUSED: &str = "FAIL: firmware is refused, no device is let at memory";

/// The boots of all machines with faults.
const PLANTED: [Planted; 7] = [
    (
        "plant=invalidation",
        "an invalidation that is left out",
        "FAIL: edu wrote to a page that was unmapped",
    ),
    ("plant=stream", "the stream of another device", "FAIL: edu"),
    (
        "plant=early",
        "an unmap before the device has ended",
        "FAIL: edu did what it may, and the IOMMU refused",
    ),
    (
        "plant=limits",
        "a device that writes more than it was given",
        "FAIL: edu did what it may, and the IOMMU refused",
    ),
    (
        "plant=mask",
        "a device that uses more bits than its mask has",
        "FAIL: testdev did what it may, and the IOMMU refused",
    ),
    ("firmware=truncated", "half of what firmware says", REFUSED),
    ("firmware=nonsense", "nonsense that firmware says", REFUSED),
];

/// Reads the command line's arguments behind `kernel`.
///
/// # Errors
///
/// What is wrong with them, in one line.
pub fn parse(arguments: &[&str]) -> Result<Parts, String> {
    Parts::parse(arguments, &NAMES, &NAMES)
}

/// The machine that is booted within a minute, the build included.
pub(crate) fn quick() -> Parts {
    Parts::of(&NAMES[..1])
}

/// Builds the kernel for the machines that were asked for, and boots it there.
///
/// # Errors
///
/// What failed, in one line; the consoles are in `kernel/logs` of the target directory.
pub fn run(machines: &Parts) -> Checked {
    for name in machines.iter() {
        let Some(machine) = MACHINES.iter().find(|machine| machine.name == name) else { continue };
        let kernel = match build(machine)? {
            Ok(kernel) => kernel,
            Err(why) => return Ok(Outcome::Skipped(why)),
        };
        let qemu = match hw::ready() {
            Ok(folder) => folder.join(hw::program(machine.cpu)),
            Err(why) if hw::is_required() => return Err(why),
            Err(why) => return Ok(Outcome::Skipped(why)),
        };
        boots(machine, &qemu, &kernel)?;
    }
    Ok(Outcome::Passed)
}

/// Lints the kernel and boots it on all machines.
pub(crate) fn check() -> Checked {
    let machines = Parts::of(&NAMES);
    let ran = run(&machines)?;
    if ran == Outcome::Passed {
        for machine in &MACHINES {
            crate::run(cargo("clippy", machine).args(["--", "-D", "warnings"]))?;
        }
    }
    Ok(ran)
}

fn folder() -> PathBuf {
    crate::target_directory().join("kernel")
}

/// A command of cargo's for the kernel of a machine.
fn cargo(command: &str, machine: &Machine) -> Command {
    let mut cargo = crate::cargo(&[command, "--release", "--locked", "--manifest-path", MANIFEST]);
    cargo.args(["--target", machine.triple, "--target-dir"]).arg(folder());
    // That of PCs is for programs that may lie anywhere.
    cargo.env("CARGO_TARGET_X86_64_UNKNOWN_NONE_RUSTFLAGS", "-C relocation-model=static");
    cargo
}

/// Builds the kernel, or says why it cannot be built here.
fn build(machine: &Machine) -> Result<Result<PathBuf, String>, String> {
    let mut rustup = Command::new("rustup");
    rustup.args(["target", "add", machine.triple]).current_dir(crate::root());
    if let Err(why) = output_of(&mut rustup) {
        return Ok(Err(why));
    }
    let built = crate::run(&mut cargo("build", machine));
    built.map_err(|why| format!("the kernel does not build: {why}"))?;
    Ok(Ok(folder().join(machine.triple).join("release/kernel")))
}

/// Boots a machine in all ways.
fn boots(machine: &Machine, qemu: &Path, kernel: &Path) -> Result<(), String> {
    let (disk, hash) = disk()?;
    let boot = |name: &str, options: &str, command_line: &str| {
        let log = folder().join("logs").join(format!("{}-{name}.txt", machine.name));
        Boot { qemu, kernel, disk: &disk, options, command_line, log: &log }.run()
    };
    let failed = |name: &str, why: String| format!("{}, {name}: {why}", machine.name);

    let ended = boot("whole", machine.with, "").map_err(|why| failed("whole", why))?;
    whole(&ended, &hash, machine.says).map_err(|why| failed("whole", why))?;
    for line in ended.console.lines() {
        crate::say(&format!("   {line}"));
    }
    crate::say(&format!("{}: passed in {} ms", machine.name, ended.took.as_millis()));
    for &(command_line, what, expected) in PLANTED.iter().chain(machine.planted) {
        let name = command_line.replace('=', "-");
        let ended = boot(&name, machine.with, command_line).map_err(|why| failed(&name, why))?;
        said(&ended.console, expected).map_err(|why| failed(&name, why))?;
        crate::say(&format!("{}: {what}: {}", machine.name, ended.last()));
    }
    let ended = boot("without", machine.without, "").map_err(|why| failed("without", why))?;
    said(&ended.console, REFUSED).map_err(|why| failed("without", why))?;
    crate::say(&format!("{}: no IOMMU: {}", machine.name, ended.last()));
    Ok(())
}

/// Whether a boot that should fail did so, and said why.
fn said(console: &str, expected: &str) -> Result<(), String> {
    let has_said = console.lines().any(|line| line.starts_with(expected));
    let has_failed = console.lines().last().is_some_and(|line| line.starts_with("FAIL: "));
    if has_said && has_failed {
        return Ok(());
    }
    Err(format!("the kernel does not end with `FAIL: `, or does not say `{expected}`"))
}

/// Whether the boot with everything did everything.
fn whole(ended: &boot::Ended, hash: &str, says: &[&str]) -> Result<(), String> {
    let lines: Vec<_> = ended.console.lines().collect();
    let expected = [
        format!("virtio-blk: sha256 {hash}"),
        format!("nvme: sha256 {hash}"),
        "fault: edu: stream".to_owned(),
        "edu: read and wrote a page that was mapped for it".to_owned(),
        "edu: was refused to write to a page that was unmapped".to_owned(),
        "edu: was refused to write to a page of the kernel".to_owned(),
        "testdev: wrote a page that was mapped for it".to_owned(),
        "fault: testdev: stream".to_owned(),
        "testdev: was refused to write to a page that was unmapped".to_owned(),
        format!("network: {} echoes answered", echo::ECHOES),
    ];
    for line in expected.iter().map(String::as_str).chain(says.iter().copied()) {
        if !lines.iter().any(|one| one.starts_with(line)) {
            return Err(format!("the kernel does not say `{line}`"));
        }
    }
    let pairs = lines.iter().find_map(|line| line.strip_prefix("pairs: ")).unwrap_or_default();
    let counts: Vec<u64> = pairs.split(' ').filter_map(|word| word.parse().ok()).collect();
    if counts.len() != 2 || counts.iter().any(|&count| count < 10_000) {
        return Err(format!("two CPUs made `{pairs}`, and not 10000 pairs each"));
    }
    if ended.answers != echo::ECHOES {
        return Err(format!("{} of {} echoes came back", ended.answers, echo::ECHOES));
    }
    if lines.last() != Some(&"PASS") {
        return Err("the kernel does not end with `PASS`".to_owned());
    }
    Ok(())
}

/// A disk of bytes that do not repeat, and what they hash to.
fn disk() -> Result<(PathBuf, String), String> {
    let path = folder().join("disk.img");
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bytes = Vec::with_capacity(DISK_BYTES);
    while bytes.len() < DISK_BYTES {
        // Xorshift, by Marsaglia.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    let logs = folder().join("logs");
    fs::create_dir_all(&logs).map_err(|error| cannot_write(&logs, &error))?;
    fs::write(&path, bytes).map_err(|error| cannot_write(&path, &error))?;
    let hash = crate::sha256(&path)?;
    Ok((path, hash))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Tree;

    fn ended(console: &str, answers: u32) -> boot::Ended {
        boot::Ended { console: console.to_owned(), answers, took: std::time::Duration::ZERO }
    }

    const GOOD: &str = "virtio-blk: sha256 ab\nnvme: sha256 ab\npairs: 10000 and 20000\n\
                        fault: edu: stream 3\nedu: read and wrote a page that was mapped for it\n\
                        edu: was refused to write to a page that was unmapped\n\
                        edu: was refused to write to a page of the kernel\n\
                        testdev: wrote a page that was mapped for it\n\
                        fault: testdev: stream 7\n\
                        testdev: was refused to write to a page that was unmapped\n\
                        network: 3 echoes answered\nPASS\n";

    #[test]
    fn a_whole_boot_has_done_everything() {
        assert_eq!(whole(&ended(GOOD, 3), "ab", &[]), Ok(()));
        for line in GOOD.lines() {
            let without = GOOD.replace(&format!("{line}\n"), "");
            assert!(whole(&ended(&without, 3), "ab", &[]).is_err(), "{line}");
        }
        let said = ["nvme: ", "guest: "];
        assert_eq!(whole(&ended(GOOD, 3), "ab", &said[..1]), Ok(()));
        assert!(whole(&ended(GOOD, 3), "ab", &said).is_err_and(|why| why.contains("guest")));
        assert!(whole(&ended(GOOD, 3), "cd", &[]).is_err_and(|why| why.contains("virtio-blk")));
        assert!(whole(&ended(GOOD, 2), "ab", &[]).is_err_and(|why| why.contains("echoes")));
        let few = GOOD.replace("10000", "9999");
        assert!(whole(&ended(&few, 3), "ab", &[]).is_err_and(|why| why.contains("9999")));
    }

    /// What a kernel's author copies, and what each CPU has of its own, without comments.
    #[test]
    fn the_kernel_is_as_small_as_its_page_says() {
        let tree = Tree::of_workspace().unwrap();
        let lines = |path: &str| {
            let (file, rust) = tree.rust(path).next().unwrap();
            assert_eq!(file.path, path);
            rust.code_lines.len()
        };
        let glue = lines("examples/kernel/src/glue.rs");
        assert!(glue <= 90, "glue.rs has {glue} lines");
        let guest = lines("examples/kernel/src/guest/mod.rs");
        assert!(guest <= 260, "guest/mod.rs has {guest} lines");
        for machine in &MACHINES {
            let cpu = format!("examples/kernel/src/cpu/{}", machine.cpu);
            let script = tree.file(&format!("{cpu}.ld")).unwrap().text.lines().count();
            let all = lines(&format!("{cpu}.rs")) + script;
            assert!(all <= 400, "{cpu} has {all} lines");
        }
    }

    #[test]
    fn a_planted_fault_is_said_and_ends_the_boot() {
        assert_eq!(said("fault: x\nFAIL: y", "fault: x"), Ok(()));
        assert!(said("fault: x\nPASS", "fault: x").is_err());
        assert!(said("FAIL: y", "fault: x").is_err());
        assert!(said("", "FAIL: y").is_err());
    }
}
