//! The kernels, kept in a folder each: `vmlinuz`, `modules` and, of packages, their `release`.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, io};

use super::boots::On;
use super::{packages, source};
use crate::debian::{self, Machine, cannot_write, output_under, remove, replace};
use crate::hw;

/// Names the image of the kernel with iommufd.
pub(super) const IMAGE: &str = "DMASPAN_GUEST_KERNEL";

/// The modules that guests load, in this order, where the kernel has them as modules.
const MODULES: [&str; 8] = [
    "virtio-iommu",
    "irqbypass",
    "vfio",
    "vfio_virqfd",
    "vfio_iommu_type1",
    "vfio-pci-core",
    "vfio-pci",
    "virtio_blk",
];

/// The program that is a shell, and the package that has it.
const SHELL: &str = "busybox";
const SHELL_PACKAGE: &str = "busybox-static/trixie";

/// Where a kernel comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// The newest package of a series.
    Series(&'static str),
    /// The newest package of all.
    Newest,
    /// An image that the environment names, or one that is built.
    Image,
    /// One that is built, whatever the environment names: the newest with iommufd.
    Built,
}

/// The CPU of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cpu {
    X86,
    Arm,
}

impl Cpu {
    /// Its program of QEMU, beside that of x86-64.
    pub(super) fn program(self, x86: &Path) -> PathBuf {
        match self {
            Self::X86 => x86.to_path_buf(),
            Self::Arm => x86.with_file_name(hw::program("aarch64")),
        }
    }
}

/// A kernel that can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Kernel {
    /// The CPU that it is for.
    pub(super) cpu: Cpu,
    /// Its name on the command line.
    pub(super) name: &'static str,
    /// Whether it runs where nothing was asked for.
    pub(super) by_default: bool,
    origin: Origin,
    /// The suites of Debian that have it.
    suites: &'static str,
    /// How the releases end that are made for such guests.
    flavour: &'static str,
}

/// What kernels are taken from, each at once.
const ALL_SUITES: [&str; 2] = [packages::SUITES, packages::OLD_SUITES];

/// How the releases end that are made for virtual machines, which these are.
const CLOUD: &str = "-cloud-amd64";

const fn x86(name: &'static str, origin: Origin) -> Kernel {
    let suites = packages::SUITES;
    Kernel { cpu: Cpu::X86, name, by_default: false, origin, suites, flavour: CLOUD }
}

/// The same kernel, run where nothing was asked for.
const fn by_default(kernel: Kernel) -> Kernel {
    Kernel { by_default: true, ..kernel }
}

const fn arm(name: &'static str, flavour: &'static str) -> Kernel {
    let (origin, suites) = (Origin::Series("6.12"), packages::SUITES);
    Kernel { cpu: Cpu::Arm, name, by_default: false, origin, suites, flavour }
}

/// That of an older release of Debian.
const fn old(kernel: Kernel) -> Kernel {
    Kernel { origin: Origin::Series("5.10"), suites: packages::OLD_SUITES, ..kernel }
}

/// All kernels that can be asked for.
pub(super) const KERNELS: [Kernel; 13] = [
    old(x86("5.10", Origin::Newest)),
    by_default(x86("6.1", Origin::Series("6.1"))),
    x86("6.12", Origin::Series("6.12")),
    x86("6.16", Origin::Series("6.16")),
    x86("6.17", Origin::Series("6.17")),
    x86("6.18", Origin::Series("6.18")),
    by_default(x86("newest", Origin::Newest)),
    by_default(x86("iommufd", Origin::Image)),
    x86("iommufd-built", Origin::Built),
    arm("arm64", "-arm64"),
    arm("arm64-16k", "-arm64-16k"),
    // No package has one.
    Kernel { origin: Origin::Built, ..arm("arm64-64k", "") },
    old(arm("arm64-5.10", "-arm64")),
];

/// A kernel that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ready {
    /// Which it is.
    pub(super) kernel: Kernel,
    /// Its image.
    pub(super) image: PathBuf,
    /// Its modules and their files, in the order in which they are loaded.
    pub(super) modules: Vec<(&'static str, PathBuf)>,
    /// A program that is a shell, and others, for tests that start them.
    pub(super) shell: Option<PathBuf>,
}

impl Kernel {
    /// Whether only boots that name it are for it.
    pub(super) fn is_old(self) -> bool {
        self.suites == packages::OLD_SUITES
    }

    /// Whether boots for these are for it.
    pub(super) fn is_one_of(self, on: &[On]) -> bool {
        on.iter().any(|on| match on {
            On::Named(names) => names.contains(&self.name),
            // What others do is for kernels of now.
            _ if self.is_old() => false,
            On::Arm => self.cpu == Cpu::Arm,
            _ if self.cpu != Cpu::X86 => false,
            On::Stock => !self.has_iommufd(),
            On::Newest => self.origin == Origin::Newest,
            On::Iommufd => self.has_iommufd(),
        })
    }

    fn has_iommufd(self) -> bool {
        matches!(self.origin, Origin::Image | Origin::Built)
    }

    /// Its folder: both of x86 with iommufd have one, where the environment names none.
    fn place(self, folder: &Path) -> PathBuf {
        let is_shared = self.has_iommufd() && self.cpu == Cpu::X86;
        folder.join(if is_shared { "iommufd" } else { self.name })
    }
}

/// Gets kernels, each or why it cannot be had, in one line.
pub(super) fn get(
    kernels: &[Kernel],
    folder: &Path,
    lock: &File,
) -> Vec<(Kernel, Result<Ready, String>)> {
    // An image that is named and not there is said, and none is built in its place.
    let is_missing = |kernel: &Kernel| {
        let is_named = kernel.origin == Origin::Image && named_image().is_some();
        !is_named && find(*kernel, folder).is_err()
    };
    let missing: Vec<Kernel> = kernels.iter().copied().filter(is_missing).collect();
    let failed = match missing.is_empty() {
        true => Vec::new(),
        false => fetch(&missing, folder, lock).unwrap_or_else(|why| {
            // What failed for all of them.
            missing.iter().map(|kernel| (kernel.name, why.clone())).collect()
        }),
    };
    let shell = x86_shell(kernels, folder, lock);
    let ready = |&kernel: &Kernel| {
        let found = find(kernel, folder).map(|ready| match kernel.cpu {
            Cpu::X86 => Ready { shell: shell.clone(), ..ready },
            Cpu::Arm => ready,
        });
        let fetching = failed.iter().find(|(name, _)| *name == kernel.name);
        (kernel, found.map_err(|why| fetching.map_or(why, |(_, why)| why.clone())))
    };
    kernels.iter().map(ready).collect()
}

/// The shell of guests on x86, which follow advice in it; where there is none, they say so.
fn x86_shell(kernels: &[Kernel], folder: &Path, lock: &File) -> Option<PathBuf> {
    let place = folder.join("shell");
    let shell = place.join(SHELL);
    if shell.is_file() || kernels.iter().all(|kernel| kernel.cpu != Cpu::X86) {
        return Some(shell).filter(|shell| shell.is_file());
    }
    let apt = folder.join("apt-of-shell");
    let fetched = Machine::here().and_then(|here| {
        let root = here.root(&apt, packages::SUITES, lock)?;
        replace(&place, |new| unpack_shell(&root, new, lock))
    });
    if let Err(why) = fetched {
        eprintln!("guest: there is no shell: {why}");
    }
    let _ = remove(&apt);
    Some(shell).filter(|shell| shell.is_file())
}

/// A kernel that is there already.
fn find(kernel: Kernel, folder: &Path) -> Result<Ready, String> {
    let place = kernel.place(folder);
    let image = match (kernel.origin, named_image()) {
        (Origin::Image, Some(image)) => {
            let image = std::path::absolute(&image).unwrap_or_else(|_| image.into());
            if !image.is_file() {
                return Err(format!("{IMAGE} names {}, which is not a file", image.display()));
            }
            return Ok(Ready { kernel, image, modules: Vec::new(), shell: None });
        }
        _ => place.join("vmlinuz"),
    };
    if !image.is_file() {
        return Err("it is not there".to_owned());
    }
    let file = |name: &str| place.join("modules").join(format!("{name}.ko"));
    let modules = MODULES.map(|name| (name, file(name)));
    let modules = modules.into_iter().filter(|(_, file)| file.is_file()).collect();
    let shell = Some(place.join(SHELL)).filter(|shell| shell.is_file());
    if kernel.cpu != Cpu::X86 && shell.is_none() {
        return Err("its shell is not there".to_owned());
    }
    Ok(Ready { kernel, image, modules, shell })
}

/// The image that the environment names.
fn named_image() -> Option<OsString> {
    env::var_os(IMAGE).filter(|image| !image.is_empty())
}

/// Gets what is missing, as far as that goes, and returns the names of those that failed, and why.
///
/// # Errors
///
/// Why none can be had, in one line.
fn fetch(
    missing: &[Kernel],
    folder: &Path,
    lock: &File,
) -> Result<Vec<(&'static str, String)>, String> {
    let here = Machine::here()?;
    let mut failed = Vec::new();
    let of = [Cpu::X86, Cpu::Arm].map(|cpu| ALL_SUITES.map(|suites| (cpu, suites)));
    for (cpu, suites) in of.into_iter().flatten() {
        let is_of = |kernel: &&Kernel| kernel.cpu == cpu && kernel.suites == suites;
        let missing: Vec<&Kernel> = missing.iter().filter(is_of).collect();
        if missing.is_empty() {
            continue;
        }
        let machine = match cpu {
            Cpu::X86 => &here,
            Cpu::Arm => &here.of_architecture("arm64")?,
        };
        let apt = folder.join("apt");
        let root = match machine.root(&apt, suites, lock) {
            Ok(root) => root,
            // Others may still be had.
            Err(why) => {
                failed.extend(missing.iter().map(|kernel| (kernel.name, why.clone())));
                continue;
            }
        };
        for kernel in missing {
            // The one before may have filled the same folder.
            if find(*kernel, folder).is_ok() {
                continue;
            }
            let unpack = |series, new: &Path| unpack(&root, series, kernel.flavour, new, lock);
            let done = replace(&kernel.place(folder), |new| {
                match kernel.origin {
                    Origin::Series(series) => unpack(Some(series), new),
                    Origin::Newest => unpack(None, new),
                    Origin::Image | Origin::Built => source::build(kernel.cpu, &root, new, lock),
                }?;
                if cpu == Cpu::X86 { Ok(()) } else { unpack_shell(&root, new, lock) }
            });
            failed.extend(done.err().map(|why| (kernel.name, why)));
        }
        remove(&apt).map_err(|error| cannot_write(&apt, &error))?;
    }
    Ok(failed)
}

/// Takes a kernel out of its packages.
fn unpack(
    root: &debian::Root<'_>,
    series: Option<&str>,
    flavour: &str,
    place: &Path,
    lock: &File,
) -> Result<(), String> {
    let mut names = root.names("linux-image-")?;
    names.extend(root.names("linux-binary-")?);
    names.extend(root.names("linux-modules-")?);
    let choice = packages::choose(&names, series, flavour).ok_or("the mirror has none")?;
    let wanted: Vec<&str> = choice.packages.iter().map(String::as_str).collect();
    let files = root.download(&place.join("packages"), &wanted)?;
    let tree = place.join("tree");
    debian::unpack(&files, &tree, lock)?;
    let fail = |error: io::Error| cannot_write(place, &error);
    let modules = place.join("modules");
    fs::create_dir_all(&modules).map_err(fail)?;
    let mut all = Vec::new();
    files_below(&tree, &mut all).map_err(fail)?;
    let image = all.iter().find(|path| file_name(path).starts_with("vmlinuz"));
    let image = image.ok_or("its packages have no vmlinuz")?;
    fs::rename(image, place.join("vmlinuz")).map_err(fail)?;
    for name in MODULES {
        let beginning = format!("{name}.ko");
        if let Some(file) = all.iter().find(|path| file_name(path).starts_with(&beginning)) {
            fs::write(modules.join(beginning), plain(file, lock)?).map_err(fail)?;
        }
    }
    fs::write(place.join("release"), choice.release).map_err(fail)?;
    remove(&tree).and_then(|()| remove(&place.join("packages"))).map_err(fail)
}

fn unpack_shell(root: &debian::Root<'_>, place: &Path, lock: &File) -> Result<(), String> {
    let (packages, tree) = (place.join("packages"), place.join("tree"));
    debian::unpack(&root.download(&packages, &[SHELL_PACKAGE])?, &tree, lock)?;
    let fail = |error: io::Error| cannot_write(place, &error);
    let mut all = Vec::new();
    files_below(&tree, &mut all).map_err(fail)?;
    // Its settings have the same name.
    let shell = all.iter().find(|path| path.ends_with(Path::new("bin").join(SHELL)));
    let shell = shell.ok_or("its package has no shell")?;
    fs::rename(shell, place.join(SHELL)).map_err(fail)?;
    remove(&tree).and_then(|()| remove(&packages)).map_err(fail)
}

/// A module without its compression.
fn plain(file: &Path, lock: &File) -> Result<Vec<u8>, String> {
    let program = match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return fs::read(file).map_err(|error| format!("{}: {error}", file.display())),
    };
    // The file beside it: what these programs print would have to be text.
    output_under(lock, Command::new(program).args(["-d", "-k", "-f", "-q"]).arg(file))?;
    let plain = file.with_extension("");
    fs::read(&plain).map_err(|error| format!("{}: {error}", plain.display()))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn files_below(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            files_below(&entry.path(), files)?;
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_boot_is_for_the_kernels_that_it_names() {
        let named = |name: &str| KERNELS.into_iter().find(|kernel| kernel.name == name).unwrap();
        assert!(named("6.1").is_one_of(&[On::Stock]) && !named("6.1").is_one_of(&[On::Newest]));
        assert!(
            named("newest").is_one_of(&[On::Stock]) && named("newest").is_one_of(&[On::Newest])
        );
        assert!(named("iommufd").is_one_of(&[On::Newest, On::Iommufd]));
        assert!(!named("iommufd").is_one_of(&[On::Stock]));
        let built = named("iommufd-built");
        assert!(built.is_one_of(&[On::Iommufd]) && !built.is_one_of(&[On::Stock, On::Newest]));
    }
}
