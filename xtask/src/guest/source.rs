//! Kernels that no package of Debian has, built from Debian's source: with iommufd, and for Arm
//! with pages of 64 KiB.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::{env, io, thread};

use super::kernels::{Cpu, IMAGE};
use super::packages;
use crate::cross;
use crate::debian::{self, cannot_write, output_under, remove};

/// The options of kernels for any CPU that differ from none at all.
const CONFIG: &str = include_str!("kernel.config");
/// The first version whose source is taken.
const LEAST: [u64; 2] = [7, 2];

/// What a kernel for a CPU is made of.
#[derive(Debug)]
struct Recipe {
    /// What `make` is told, beside where the compiler is.
    architecture: &'static str,
    /// Its options, behind those of all.
    config: &'static str,
    /// The options without which guests show nothing.
    needed: &'static [&'static str],
    /// What is made, and where that lies in the tree.
    image: (&'static str, &'static str),
}

const X86: Recipe = Recipe {
    architecture: "ARCH=x86",
    config: include_str!("kernel.x86.config"),
    needed: &[
        "CONFIG_IOMMUFD=y",
        "CONFIG_VFIO_DEVICE_CDEV=y",
        "CONFIG_VFIO_IOMMU_TYPE1=y",
        "CONFIG_VFIO_PCI=y",
        "CONFIG_INTEL_IOMMU=y",
        "CONFIG_IRQ_REMAP=y",
        "CONFIG_VIRTIO_IOMMU=y",
        "CONFIG_SERIAL_8250_CONSOLE=y",
    ],
    image: ("bzImage", "arch/x86/boot/bzImage"),
};

const ARM: Recipe = Recipe {
    architecture: "ARCH=arm64",
    config: include_str!("kernel.arm64.config"),
    needed: &[
        "CONFIG_ARM64_64K_PAGES=y",
        "CONFIG_VFIO_IOMMU_TYPE1=y",
        "CONFIG_VFIO_PCI=y",
        "CONFIG_ARM_SMMU_V3=y",
        "CONFIG_PCI_HOST_GENERIC=y",
        "CONFIG_SERIAL_AMBA_PL011_CONSOLE=y",
    ],
    image: ("Image", "arch/arm64/boot/Image"),
};

impl Recipe {
    fn config(&self) -> String {
        format!("{CONFIG}{}", self.config)
    }
}

/// The programs that a kernel is built with, and the packages that have them.
const PROGRAMS: [(&str, &str); 7] = [
    ("make", "make"),
    ("gcc", "gcc"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("lz4", "lz4"),
    ("xz", "xz-utils"),
];
/// The headers that it is built with, below `usr/include`, and the packages that have them.
const HEADERS: [(&str, &str); 2] = [("libelf.h", "libelf-dev"), ("openssl/ssl.h", "libssl-dev")];

/// Builds it: `vmlinuz` in a folder.
///
/// # Errors
///
/// What is missing or failed, in one line.
pub(super) fn build(
    cpu: Cpu,
    root: &debian::Root<'_>,
    place: &Path,
    lock: &File,
) -> Result<(), String> {
    let missing = missing();
    if !missing.is_empty() {
        let missing = missing.join(" ");
        let or =
            if cpu == Cpu::X86 { format!(", or name an image in {IMAGE}") } else { String::new() };
        return Err(format!("building it needs the packages {missing}: install them{or}"));
    }
    let (recipe, compiler) = match cpu {
        Cpu::X86 => (&X86, String::new()),
        Cpu::Arm => (&ARM, cross::compilers_of_arm64()?),
    };
    let fail = |error: io::Error| cannot_write(place, &error);
    let names = root.names("linux-source-")?;
    let name = packages::newest_source(&names, LEAST).ok_or("the mirror has no source of it")?;
    let files = root.download(&place.join("packages"), &[name])?;
    let tree = place.join("tree");
    debian::unpack(&files, &tree, lock)?;
    let archive = tree.join(format!("usr/src/{name}.tar.xz"));
    let mut tar = Command::new("tar");
    output_under(lock, tar.arg("-xJf").arg(&archive).arg("-C").arg(&tree))?;
    let linux = tree.join(name);
    fs::write(linux.join("guest.config"), recipe.config()).map_err(fail)?;
    eprintln!("guest: building {name}, which takes minutes");
    let make = |arguments: &[&str]| {
        let mut command = Command::new("make");
        command.args(["-s", recipe.architecture]).args(arguments).current_dir(&linux);
        command.arg(format!("CROSS_COMPILE={compiler}"));
        output_under(lock, command.env("KCONFIG_ALLCONFIG", "guest.config"))
    };
    make(&["allnoconfig"])?;
    check_config(recipe, &fs::read_to_string(linux.join(".config")).map_err(fail)?)?;
    let jobs = thread::available_parallelism().map_or(1, usize::from);
    let (image, path) = recipe.image;
    make(&[&format!("-j{jobs}"), image])?;
    fs::rename(linux.join(path), place.join("vmlinuz")).map_err(fail)?;
    fs::write(place.join("release"), name).map_err(fail)?;
    remove(&tree).and_then(|()| remove(&place.join("packages"))).map_err(fail)
}

/// The packages that are missing.
fn missing() -> Vec<&'static str> {
    let path = env::var_os("PATH").unwrap_or_default();
    let has = |name: &str| env::split_paths(&path).any(|folder| folder.join(name).is_file());
    let include = |name: &str| {
        let machines = Path::new("/usr/include/x86_64-linux-gnu").join(name);
        Path::new("/usr/include").join(name).is_file() || machines.is_file()
    };
    let programs = PROGRAMS.iter().filter(|(name, _)| !has(name));
    let headers = HEADERS.iter().filter(|(name, _)| !include(name));
    programs.chain(headers).map(|&(_, package)| package).collect()
}

/// Whether the options were taken: one whose name changed, or that needs another, vanishes
/// without a word.
fn check_config(recipe: &Recipe, config: &str) -> Result<(), String> {
    let wanted = recipe.config();
    let vanished: Vec<&str> = options(&wanted)
        .filter(|option| option.ends_with("=y") && !config.lines().any(|line| line == *option))
        .collect();
    if vanished.iter().any(|option| recipe.needed.contains(option)) {
        return Err(format!("its configuration does not take {}", vanished.join(", ")));
    }
    if !vanished.is_empty() {
        eprintln!("guest: the configuration does not take {}", vanished.join(", "));
    }
    Ok(())
}

fn options(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| line.starts_with("CONFIG_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_vanished_is_named() {
        for recipe in [&X86, &ARM] {
            let whole = recipe.config();
            assert_eq!(check_config(recipe, &whole), Ok(()));
            let first = recipe.needed[0];
            let without = whole.replace(first, "# is not set");
            assert!(check_config(recipe, &without).unwrap_err().ends_with(&format!(" {first}")));
            let without = whole.replace("CONFIG_KALLSYMS=y", "");
            assert_eq!(check_config(recipe, &without), Ok(()), "guests do without");
            let stands = |needed: &&str| options(&whole).any(|option| option == *needed);
            assert!(recipe.needed.iter().all(stands));
        }
    }

    #[test]
    fn options_stand_once() {
        for recipe in [&X86, &ARM] {
            let config = recipe.config();
            let all: Vec<&str> = options(&config).collect();
            for (index, option) in all.iter().enumerate() {
                let name = option.split('=').next();
                let is_it = |other: &&str| other.split('=').next() == name;
                assert!(!all[..index].iter().any(is_it), "{option}");
            }
        }
    }
}
