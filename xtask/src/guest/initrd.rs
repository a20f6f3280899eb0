//! A guest begins with this: its programs, its kernel's modules and its list of commands.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::boots::{Iommu, Served};
use super::cpio::Archive;
use super::kernels::{Cpu, Ready};
use super::nested;
use crate::cross::File;
use crate::{cargo, cross};

const X86: &str = "x86_64-unknown-linux-gnu";

/// A program of the workspace that guests have.
struct Program {
    package: &'static str,
    name: &'static str,
    /// Where it lies in a guest.
    place: &'static str,
}

/// Which programs guests have beside the usual ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// The benchmarks.
    pub(super) benchmarks: bool,
    /// Tests, of Arm alone.
    pub(super) tests: bool,
}

const PROGRAMS: [Program; 5] = [
    Program { package: "dmaspan-guest", name: "dmaspan-guest", place: "bin/dmaspan-guest" },
    Program { package: "dmaspan-cli", name: "dmaspan", place: "bin/dmaspan" },
    Program { package: "dmaspan-nvme", name: "dmaspan-nvme", place: "bin/dmaspan-nvme" },
    Program { package: "dmaspan-vfio-ioctls", name: "guest_disk", place: "bin/guest_disk" },
    Program { package: "dmaspan-virtio-drivers", name: "virtio_disk", place: "bin/virtio_disk" },
];
const BENCHMARKS: Program =
    Program { package: "dmaspan-bench", name: "dmaspan-bench", place: "bin/dmaspan-bench" };
/// Those that are examples of their packages; a guest begins with the first.
const EXAMPLES: [&str; 3] = [INIT, "guest_disk", "virtio_disk"];
const INIT: &str = "dmaspan-guest";

/// What the shell is, too, under these names.
const SHELL_IS: [&str; 6] = ["cat", "kill", "mount", "rm", "sleep", "unshare"];

/// The programs of a guest.
#[derive(Clone, Debug, Default)]
pub(super) struct Programs {
    /// Where they lie, and what they are.
    own: Vec<(&'static str, Vec<u8>)>,
    /// Tests, and what they start.
    tests: Vec<File>,
    /// Those for file systems, by their names, with what they stand on.
    pub(super) tools: Vec<(String, Vec<u8>)>,
}

/// Builds the programs so that they stand on nothing but a kernel, in a target directory of their
/// own: everything is built anew for the flag.
///
/// # Errors
///
/// What failed, in one line; cargo has said more by then.
pub(super) fn programs(cpu: Cpu, target: &Path, wanted: Wanted) -> Result<Programs, String> {
    let Wanted { benchmarks, tests } = wanted;
    let wanted = || PROGRAMS.iter().chain(benchmarks.then_some(&BENCHMARKS));
    let mut build = cargo(&["build", "--quiet", "--release", "--target-dir"]);
    build.arg(target);
    let triple = match cpu {
        Cpu::X86 => {
            build.env("RUSTFLAGS", "-C target-feature=+crt-static");
            X86
        }
        Cpu::Arm => cross::for_arm64(&mut build)?,
    };
    build.args(["--target", triple]);
    for Program { package, .. } in wanted() {
        build.args(["-p", package]);
    }
    build.arg("--bins");
    for name in EXAMPLES {
        build.args(["--example", name]);
    }
    build.env("CARGO_PROFILE_RELEASE_DEBUG", "false").env("CARGO_PROFILE_RELEASE_STRIP", "true");
    crate::run(&mut build).map_err(|why| format!("its programs cannot be built: {why}"))?;
    let built = target.join(triple).join("release");
    let mut programs = Programs::default();
    for &Program { name, place, .. } in wanted() {
        let folder = if EXAMPLES.contains(&name) { built.join("examples") } else { built.clone() };
        let program = read(&folder.join(name))?;
        if name == INIT {
            programs.own.push(("init", program.clone()));
        }
        programs.own.push((place, program));
    }
    if cpu == Cpu::Arm && tests {
        programs.tests = cross::tests_for_guests()?;
    }
    Ok(programs)
}

/// Everything in one archive; with `nested`, the QEMU of this machine, too.
///
/// # Errors
///
/// Which module cannot be read, or why there is no QEMU for the guest, in one line.
pub(super) fn write(
    programs: &Programs,
    kernel: &Ready,
    devices: (Iommu, Served),
    commands: &[String],
    nested: Option<&Path>,
) -> Result<Vec<u8>, String> {
    let mut archive = Archive::default();
    ["bin", "guest", "modules", "run"].iter().for_each(|folder| archive.folder(folder));
    for (place, program) in &programs.own {
        archive.file(place, program);
    }
    add_tests(&programs.tests, &mut archive);
    if !programs.tools.is_empty() {
        archive.folder("tools");
    }
    for (name, tool) in &programs.tools {
        archive.file(&format!("tools/{name}"), tool);
    }
    if let Some(program) = nested {
        nested::add(program, &kernel.image, &mut archive)?;
    }
    if let Some(shell) = &kernel.shell {
        archive.file("bin/sh", &read(shell)?);
        SHELL_IS.iter().for_each(|name| archive.link(&format!("bin/{name}"), "sh"));
    }
    let mut order = String::new();
    for (name, file) in wanted(&kernel.modules, devices) {
        archive.file(&format!("modules/{name}.ko"), &read(file)?);
        order.push_str(&line(name, devices.0));
    }
    archive.file("modules/order", order.as_bytes());
    archive.file("guest/commands", (commands.join("\n") + "\n").as_bytes());
    Ok(archive.finish())
}

fn add_tests(tests: &[File], archive: &mut Archive) {
    let mut folders = BTreeSet::new();
    for test in tests {
        match test {
            File::Copy(path, content) => {
                let all: Vec<&Path> = path.ancestors().skip(1).map(in_archive).collect();
                // The archive's own root comes last.
                for folder in all.into_iter().rev().skip(1) {
                    if folders.insert(folder) {
                        archive.folder(&folder.to_string_lossy());
                    }
                }
                archive.file(&in_archive(path).to_string_lossy(), content);
            }
            File::Name(name, path) => {
                archive.link(&format!("bin/{name}"), &path.to_string_lossy());
            }
        }
    }
}

/// A path below the archive's root.
fn in_archive(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

/// The modules for an IOMMU, and for the disks of a server.
fn wanted<'m>(
    modules: &'m [(&'static str, PathBuf)],
    (iommu, served): (Iommu, Served),
) -> impl Iterator<Item = (&'static str, &'m Path)> {
    let is_wanted = move |name: &str| match name {
        "virtio-iommu" => iommu == Iommu::Virtio,
        "virtio_blk" => served == Served::Measured,
        _ => true,
    };
    let modules = modules.iter().filter(move |module| is_wanted(module.0));
    modules.map(|(name, file)| (*name, file.as_path()))
}

/// The line about a module: its name, and its parameters. Without interrupt remapping type1 has to
/// be told that it may be used all the same.
fn line(name: &str, iommu: Iommu) -> String {
    match (name, iommu) {
        ("vfio_iommu_type1", Iommu::Virtio) => format!("{name} allow_unsafe_interrupts=1\n"),
        _ => format!("{name}\n"),
    }
}

pub(super) fn read(file: &Path) -> Result<Vec<u8>, String> {
    fs::read(file).map_err(|error| format!("{} cannot be read: {error}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_those_for_the_devices_with_their_parameters() {
        let modules = ["virtio-iommu", "vfio_iommu_type1", "virtio_blk"];
        let modules = modules.map(|name| (name, PathBuf::new()));
        let lines = |iommu, served| {
            let wanted = wanted(&modules, (iommu, served));
            wanted.map(|(name, _)| line(name, iommu)).collect::<String>()
        };
        assert_eq!(lines(Iommu::Intel, Served::Judged), "vfio_iommu_type1\n");
        assert_eq!(lines(Iommu::Intel, Served::Measured), "vfio_iommu_type1\nvirtio_blk\n");
        let virtio = "virtio-iommu\nvfio_iommu_type1 allow_unsafe_interrupts=1\n";
        assert_eq!(lines(Iommu::Virtio, Served::No), virtio);
    }
}
