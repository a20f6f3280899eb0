//! The kernel with iommufd, which no package of Debian enables, built from Debian's source.

use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::{env, io, thread};

use super::kernels::IMAGE;
use super::packages;
use crate::debian::{self, cannot_write, output_under, remove};

/// The options that differ from none at all.
const CONFIG: &str = include_str!("kernel.config");
/// The first version whose source is taken.
const LEAST: [u64; 2] = [7, 2];

/// The options without which guests show nothing.
const NEEDED: [&str; 8] = [
    "CONFIG_IOMMUFD=y",
    "CONFIG_VFIO_DEVICE_CDEV=y",
    "CONFIG_VFIO_IOMMU_TYPE1=y",
    "CONFIG_VFIO_PCI=y",
    "CONFIG_INTEL_IOMMU=y",
    "CONFIG_IRQ_REMAP=y",
    "CONFIG_VIRTIO_IOMMU=y",
    "CONFIG_SERIAL_8250_CONSOLE=y",
];

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
pub(super) fn build(root: &debian::Root<'_>, place: &Path, lock: &File) -> Result<(), String> {
    let missing = missing();
    if !missing.is_empty() {
        let missing = missing.join(" ");
        return Err(format!(
            "building it needs the packages {missing}: install them, or name an image in {IMAGE}"
        ));
    }
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
    fs::write(linux.join("guest.config"), CONFIG).map_err(fail)?;
    eprintln!("guest: building {name}, which takes minutes");
    let make = |arguments: &[&str]| {
        let mut command = Command::new("make");
        command.arg("-s").args(arguments).current_dir(&linux);
        output_under(lock, command.env("KCONFIG_ALLCONFIG", "guest.config"))
    };
    make(&["allnoconfig"])?;
    check_config(&fs::read_to_string(linux.join(".config")).map_err(fail)?)?;
    let jobs = thread::available_parallelism().map_or(1, usize::from);
    make(&[&format!("-j{jobs}"), "bzImage"])?;
    fs::rename(linux.join("arch/x86/boot/bzImage"), place.join("vmlinuz")).map_err(fail)?;
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
fn check_config(config: &str) -> Result<(), String> {
    let vanished: Vec<&str> = options(CONFIG)
        .filter(|option| option.ends_with("=y") && !config.lines().any(|line| line == *option))
        .collect();
    if vanished.iter().any(|option| NEEDED.contains(option)) {
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
        let whole = CONFIG.to_owned();
        assert_eq!(check_config(&whole), Ok(()));
        let without = whole.replace("CONFIG_IOMMUFD=y", "# CONFIG_IOMMUFD is not set");
        assert!(check_config(&without).unwrap_err().ends_with(" CONFIG_IOMMUFD=y"));
        let without = whole.replace("CONFIG_KALLSYMS=y", "");
        assert_eq!(check_config(&without), Ok(()), "guests do without");
        assert!(NEEDED.iter().all(|needed| options(CONFIG).any(|option| option == *needed)));
    }

    #[test]
    fn options_stand_once() {
        let all: Vec<&str> = options(CONFIG).collect();
        for (index, option) in all.iter().enumerate() {
            let name = option.split('=').next();
            assert!(all[..index].iter().all(|other| other.split('=').next() != name), "{option}");
        }
    }
}
