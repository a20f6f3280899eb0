//! Puts what builds and runs programs of other CPUs into a folder, and nothing outside of it.
//!
//! Compilers and C libraries come from the machine's own release of Debian, whose libraries they
//! stand on. The emulators of programs are QEMU's, which Debian links statically. `root` has the
//! unpacked packages, `bin` a wrapper for each compiler.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::TARGETS;
use crate::debian::{self, Machine, cannot_write, lock, output_of, remove, replace};

/// The suite whose QEMU is the one of the tests against IOMMUs.
const EMULATORS: &str = "trixie-backports";
const QEMU: &str = "qemu-user/trixie-backports";

/// The programs for each CPU: the compiler, what shows instructions, and what Linux is linked with.
const PROGRAMS: [&str; 8] = ["gcc", "objdump", "ld", "ar", "nm", "objcopy", "strip", "readelf"];

/// What builds and runs programs of other CPUs.
#[derive(Debug)]
pub(super) struct Tools {
    folder: PathBuf,
}

impl Tools {
    /// The tools, which are installed where they are not there.
    ///
    /// # Errors
    ///
    /// Why there are none, in one line.
    pub(super) fn ready() -> Result<Self, String> {
        let folder = crate::target_directory().join("cross-tools");
        let tools = Self { folder };
        if tools.check().is_err() {
            let machine = Machine::here()?;
            let lock = lock(&tools.folder)?;
            if tools.check().is_err() {
                replace(&tools.folder, |new| fill(&machine, new, &lock))?;
            }
        }
        tools.check()?;
        Ok(tools)
    }

    /// The compiler, which links as well.
    pub(super) fn compiler(&self, gnu: &str) -> PathBuf {
        self.folder.join("bin").join(format!("{gnu}-gcc"))
    }

    /// How the names of all programs for a CPU begin, with their folder.
    pub(super) fn prefix(&self, gnu: &str) -> PathBuf {
        self.folder.join("bin").join(format!("{gnu}-"))
    }

    /// The program that shows instructions.
    pub(super) fn disassembler(&self, gnu: &str) -> PathBuf {
        self.folder.join("bin").join(format!("{gnu}-objdump"))
    }

    /// The emulator of programs.
    pub(super) fn emulator(&self, machine: &str) -> PathBuf {
        self.folder.join("root/usr/bin").join(format!("qemu-{machine}"))
    }

    /// Whether all of them run.
    fn check(&self) -> Result<(), String> {
        for target in TARGETS {
            for program in PROGRAMS {
                let path = self.folder.join("bin").join(format!("{}-{program}", target.gnu));
                output_of(Command::new(path).arg("--version"))?;
            }
            output_of(Command::new(self.emulator(target.machine)).arg("--version"))?;
        }
        Ok(())
    }
}

fn fill(machine: &Machine, folder: &Path, lock: &File) -> Result<(), String> {
    let (apt, root) = (folder.join("apt"), folder.join("root"));
    let release = release()?;
    let suites = match EMULATORS.starts_with(&release) {
        true => format!("{release} {EMULATORS}"),
        false => format!("{release} trixie {EMULATORS}"),
    };
    let packages: Vec<String> = TARGETS
        .iter()
        .flat_map(|target| {
            let gcc = format!("gcc-{}", target.gnu);
            [gcc, format!("libc6-dev-{}-cross", target.debian)]
        })
        .collect();
    let names: Vec<&str> = packages.iter().map(String::as_str).collect();
    let from = machine.root(&apt, &suites, lock)?;
    let mut files = from.download_closure(&release, &names)?;
    // The machine has a C library, with the loader that fits.
    files.retain(|file| {
        !file.file_name().is_some_and(|it| it.to_string_lossy().starts_with("libc6_"))
    });
    files.extend(from.download(&folder.join("emulators"), &[QEMU])?);
    debian::unpack(&files, &root, lock)?;
    let libraries = machine.architecture.libraries;
    write_wrappers(libraries, &folder.join("bin"))
        .and_then(|()| remove(&folder.join("emulators")))
        .and_then(|()| remove(&apt))
        .map_err(|error| cannot_write(folder, &error))
}

/// The name of the machine's release of Debian.
fn release() -> Result<String, String> {
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    name.map(|name| name.trim_matches('"').to_owned())
        .ok_or_else(|| "/etc/os-release does not name the release of Debian".to_owned())
}

fn write_wrappers(libraries: &str, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    for target in TARGETS {
        for program in PROGRAMS {
            let name = format!("{}-{program}", target.gnu);
            let path = folder.join(&name);
            fs::write(&path, wrapper(libraries, &name))?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
    }
    Ok(())
}

/// Starts a program from wherever the folder lies, with the libraries beside it.
fn wrapper(libraries: &str, name: &str) -> String {
    format!(
        "#!/bin/sh\n\
         bin=$(dirname \"$(readlink -f \"$0\")\")\n\
         root=${{bin%/bin}}/root\n\
         LD_LIBRARY_PATH=$root/usr/lib/{libraries} exec \"$root/usr/bin/{name}\" \"$@\"\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrapper_starts_its_program_with_the_libraries_beside_it() {
        let wrapper = wrapper("x-gnu", "y-gcc");
        assert!(wrapper.contains("LD_LIBRARY_PATH=$root/usr/lib/x-gnu exec "), "{wrapper}");
        assert!(wrapper.ends_with("\"$root/usr/bin/y-gcc\" \"$@\"\n"));
    }
}
