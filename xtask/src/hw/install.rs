//! Puts Debian's QEMU into a folder, with all that it needs, and nothing outside of it.
//!
//! `root` has the unpacked packages, `bin` a wrapper for each program, which starts it with the
//! loader and the libraries of `root`: those of the machine may be older. The folder is made beside
//! its place and renamed when its programs have run, so it is whole wherever it is there.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::{bin, qemu};
use crate::debian::{self, Architecture, Machine, cannot_write, lock, remove, replace};

const SUITES: &str = "trixie trixie-updates trixie-backports";
/// The suite whose QEMU is new enough. It is newer than the machine's may be, so it comes with all
/// that it stands on, the C library too.
const SUITE: &str = "trixie-backports";
const PACKAGES: [&str; 3] = ["qemu-system-x86", "qemu-system-arm", "qemu-system-riscv"];

/// Installs QEMU and returns the folder of its programs and their version. One process does it at a
/// time; what another has installed meanwhile is taken.
///
/// # Errors
///
/// What is missing or failed, in one line.
pub(super) fn install(place: &Path) -> Result<(PathBuf, String), String> {
    let machine = Machine::here()?;
    let lock = lock(place)?;
    if let Ok(version) = qemu::check(&bin(place)) {
        return Ok((bin(place), version));
    }
    let version = replace(place, |new| fill(&machine, new, &lock))?;
    Ok((bin(place), version))
}

/// Makes the folder, and returns the version of the programs in it.
fn fill(machine: &Machine, folder: &Path, lock: &File) -> Result<String, String> {
    let apt = folder.join("apt");
    let packages = machine.root(&apt, SUITES, lock)?.download_closure(SUITE, &PACKAGES)?;
    let root = folder.join("root");
    debian::unpack(&packages, &root, lock)?;
    write_wrappers(machine.architecture, &bin(folder))
        .and_then(|()| remove_programs(&root))
        .and_then(|()| remove(&apt))
        .map_err(|error| cannot_write(folder, &error))?;
    qemu::check(&bin(folder)).map_err(|why| format!("Debian's QEMU does not serve: {why}"))
}

/// Removes the programs that no wrapper starts. Some of them would run with more privileges than
/// their user has.
fn remove_programs(root: &Path) -> io::Result<()> {
    remove(&root.join("usr/sbin"))?;
    let wanted = qemu::MACHINES.map(qemu::program);
    for entry in fs::read_dir(root.join("usr/bin"))? {
        let entry = entry?;
        if !wanted.iter().any(|name| entry.file_name() == name.as_str()) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn write_wrappers(architecture: &Architecture, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for name in qemu::MACHINES.map(qemu::program) {
        let path = folder.join(&name);
        fs::write(&path, wrapper(architecture, &name))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    Ok(())
}

/// Starts a program from wherever the folder lies.
fn wrapper(architecture: &Architecture, name: &str) -> String {
    let Architecture { libraries, loader, .. } = architecture;
    format!(
        "#!/bin/sh\n\
         bin=$(dirname \"$(readlink -f \"$0\")\")\n\
         root=${{bin%/bin}}/root\n\
         libraries=$root/usr/lib/{libraries}\n\
         QEMU_MODULE_DIR=$libraries/qemu exec \"$libraries/{loader}\" --argv0 {name} \\\n\
         \x20 --library-path \"$libraries\" \"$root/usr/bin/{name}\" \\\n\
         \x20 -L \"$root/usr/share/qemu\" -L \"$root/usr/share/seabios\" \"$@\"\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrapper_starts_its_program_with_the_loader_and_libraries_beside_it() {
        let architecture = Architecture { name: "x", libraries: "x-gnu", loader: "ld.so" };
        let wrapper = wrapper(&architecture, "qemu-system-x");
        assert!(wrapper.starts_with("#!/bin/sh\n"));
        assert!(wrapper.contains("libraries=$root/usr/lib/x-gnu\n"));
        assert!(wrapper.contains(" exec \"$libraries/ld.so\" --argv0 qemu-system-x \\\n"));
        assert!(wrapper.contains(" \"$root/usr/bin/qemu-system-x\" \\\n"));
        assert!(wrapper.ends_with(" \"$@\"\n"));
    }
}
